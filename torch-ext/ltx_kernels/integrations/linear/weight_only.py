"""Linear layers whose weights alone are in fp8: modulation, with ``memory="low"``.

A layer that makes the modulation of a block reads one row of each sample, so that its product takes as long as reading
its weight, which `weight_only_linear` does once. For more than a few rows the values are converted to the input's dtype
part by part, which is exact, and the products are scaled in float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from ..._checks import requires_grad
from ..._once import once_differentiable
from ...quant import weight_only_linear
from ..engine.sites import site_of, why_stock
from .fp8 import LINEAR, run_stock, why_not_fp8_input, why_not_fp8_weight
from .fp8_weights import quantised_weight
from .frozen import frozen_gradients, save_frozen

# Of more rows the kernel takes longer than moving five bytes for each value, which the conversion does. The kernel's
# times are in h200-weight-only-tuning.json; the conversion has not been timed by itself.
FEW_ROWS = 8
PART_BYTES = 32 * 2**20  # of converted values that exist at a time: part of an H100's L2 cache of 50 MiB (not measured)


def product(input: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear(input, values * scales, bias)`` in the input's dtype."""
    width = input.shape[-1]
    if input.numel() <= FEW_ROWS * width and width % 16 == 0 and (bias is None or bias.dtype == input.dtype):
        return weight_only_linear(input.contiguous(), values, scales, bias)
    parts = values.split(max(1, PART_BYTES // (2 * width)))
    outputs = [F.linear(input, part.to(input.dtype)) for part in parts]
    output = (outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)).float() * scales
    return (output if bias is None else output + bias).to(input.dtype)


class _WeightOnly(Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        save_frozen(ctx, weight, scales, bias)
        return product(input, weight, scales, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        return frozen_gradients(ctx, gradient)


def _forward(self: nn.Linear, input: Tensor) -> Tensor:
    reason = why_stock(self) or why_not_fp8_input(input) or why_not_fp8_weight(self, input)
    if reason:
        return run_stock(self, reason, input)
    site_of(self).count_call()
    (values, scales), bias = quantised_weight(self), self._parameters["bias"]
    if torch.is_grad_enabled() and requires_grad(input, bias):
        output: Tensor = _WeightOnly.apply(input, values, scales, bias)
        return output
    return product(input, values, scales, bias)


WEIGHT_ONLY = dataclasses.replace(LINEAR, forward=_forward, ops=())
