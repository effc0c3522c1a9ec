"""Linear layers whose weights alone are in fp8: modulation, with ``memory="low"``.

A layer that makes the modulation of a block reads one row of each sample, so that its product takes as long as reading
its weight. The values are converted to bfloat16 part by part, which is exact, and the products are scaled in float32.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..engine.sites import site_of, why_stock
from .fp8 import LINEAR, quantised_weight, run_stock, why_not_fp8_input, why_not_fp8_weight

PART_BYTES = 32 * 2**20  # of bfloat16 values that exist at a time: part of an H100's L2 cache of 50 MiB (not measured)


def product(linear: nn.Linear, input: Tensor) -> Tensor:
    """``F.linear(input, values * scales, bias)`` in the input's dtype, with one weight of it in parts."""
    values, scales = quantised_weight(linear)
    parts = values.split(max(1, PART_BYTES // (2 * linear.in_features)))
    outputs = [F.linear(input, part.to(input.dtype)) for part in parts]
    output = (outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)).float() * scales
    bias = linear._parameters["bias"]
    return (output if bias is None else output + bias).to(input.dtype)


def _forward(self: nn.Linear, input: Tensor) -> Tensor:
    reason = why_stock(self) or why_not_fp8_input(input) or why_not_fp8_weight(self, input)
    if reason:
        return run_stock(self, reason, input)
    site_of(self).count_call()
    return product(self, input)


WEIGHT_ONLY = dataclasses.replace(LINEAR, forward=_forward, ops=())
