"""Linear layers whose weights alone are in fp8: modulation, with ``memory="low"``.

A layer that makes the modulation of a block reads one row of each sample, so that its product takes as long as reading
its weight, which `weight_only_linear` does once. For more than a few rows the values are converted to the input's dtype
part by part, which is exact, and the products are scaled in float32.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...quant import weight_only_linear
from ..engine.sites import site_of, why_stock
from .fp8 import LINEAR, quantised_weight, run_stock, why_not_fp8_input, why_not_fp8_weight

# Of more rows the kernel takes longer than moving five bytes for each value, which the conversion does. The kernel's
# times are in h200-weight-only-tuning.json; the conversion has not been timed by itself.
FEW_ROWS = 8
PART_BYTES = 32 * 2**20  # of converted values that exist at a time: part of an H100's L2 cache of 50 MiB (not measured)


def product(linear: nn.Linear, input: Tensor) -> Tensor:
    """``F.linear(input, values * scales, bias)`` in the input's dtype."""
    values, scales = quantised_weight(linear)
    bias = linear._parameters["bias"]
    width = linear.in_features
    if input.numel() <= FEW_ROWS * width and width % 16 == 0 and (bias is None or bias.dtype == input.dtype):
        return weight_only_linear(input.contiguous(), values, scales, bias)
    parts = values.split(max(1, PART_BYTES // (2 * width)))
    outputs = [F.linear(input, part.to(input.dtype)) for part in parts]
    output = (outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)).float() * scales
    return (output if bias is None else output + bias).to(input.dtype)


def _forward(self: nn.Linear, input: Tensor) -> Tensor:
    reason = why_stock(self) or why_not_fp8_input(input) or why_not_fp8_weight(self, input)
    if reason:
        return run_stock(self, reason, input)
    site_of(self).count_call()
    return product(self, input)


WEIGHT_ONLY = dataclasses.replace(LINEAR, forward=_forward, ops=())
