"""The gradients of what rows share, as sums over rows: a norm's weight and bias, scale, shift, gate and their tables.

Kernels give the gradients of rows, and compute a norm's result again, in float32. torch multiplies both and adds up,
always in the same order for one shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ._checks import FP32
from ._formulas import modulator
from ._ops import ops

Two = tuple[Optional[Tensor], Optional[Tensor]]
Needs = tuple[bool, ...]


class Modulation(NamedTuple):
    """A scale, shift or gate, the vector that is added to it, and the number of the row that each token takes."""

    value: Tensor | None
    table: Tensor | None
    numbers: Tensor | None

    def gradients(self, terms: Tensor, needs: Needs) -> Two:
        """Of value and table, where they are needed, given each element's share [..., H]."""
        leaves = [
            tensor.detach().requires_grad_() if tensor is not None and needed else None
            for tensor, needed in zip(self[:2], needs)
        ]
        followed = [leaf for leaf in leaves if leaf is not None]
        if not followed:
            return None, None
        value, table = (tensor if leaf is None else leaf for tensor, leaf in zip(self[:2], leaves))
        with torch.enable_grad():
            whole = modulator(value, table, terms, self.numbers, torch.float32)
            assert whole is not None  # a table has a value beside it
            found = iter(torch.autograd.grad(whole, followed, _summed(terms, whole.shape)))
        to_value, to_table = (None if leaf is None else next(found) for leaf in leaves)
        return to_value, to_table

    def times(self, rows: Tensor, offset: float = 0.0) -> Tensor:
        """Rows times the modulation plus an offset, in float32; the rows themselves without one."""
        factor = modulator(self.value, self.table, rows, self.numbers, torch.float32)
        return rows if factor is None else rows * (factor + offset)


class Norm(NamedTuple):
    """A norm with or without a weight and a bias."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    offset: float
    statistic: int

    def shares(self, rows: Tensor, grad: Tensor) -> Tensor:
        """What each element adds to the gradient of a scale: the norm's result, not rounded, times a gradient."""
        out: Tensor = ops.norm.default(rows.float(), *self, FP32)
        return out.mul_(grad)

    def gradients(self, grad: Tensor, rows: Tensor, needs: Needs) -> Two:
        """Of weight and bias, where they are needed, given the gradient of the result."""
        to_weight = to_bias = None
        if self.weight is not None and needs[0]:
            bare = Norm(None, None, self.eps, 0.0, self.statistic)
            to_weight = _summed(bare.shares(rows, grad), self.weight.shape).to(self.weight.dtype)
        if self.bias is not None and needs[1]:
            to_bias = _summed(grad, self.bias.shape).to(self.bias.dtype)
        return to_weight, to_bias


def product(rows: Tensor, grad: Tensor) -> Tensor:
    """What each element adds to the gradient of a gate, in float32."""
    return rows.to(torch.float32, copy=True).mul_(grad)


def of_modulated_norm(
    grad: Tensor | None, rows: Tensor, norm: Norm, scale: Modulation, shift: Modulation, needs: Needs
) -> tuple[Tensor | None, ...]:
    """The gradients of weight, bias, scale, shift, scale_table and shift_table, where they are needed.

    grad: Of the modulated rows; None where nothing reads them.
    """
    if grad is None or not any(needs):
        return (None,) * 6
    to_weight = to_bias = to_scale = to_scale_table = None
    if needs[0] or needs[1]:
        to_weight, to_bias = norm.gradients(scale.times(grad, 1.0), rows, needs[:2])
    if needs[2] or needs[4]:
        to_scale, to_scale_table = scale.gradients(norm.shares(rows, grad), (needs[2], needs[4]))
    to_shift, to_shift_table = shift.gradients(grad, (needs[3], needs[5]))
    return to_weight, to_bias, to_scale, to_shift, to_scale_table, to_shift_table


def of_two_modulations(
    grads: Sequence[Tensor | None],
    rows: Tensor,
    norm: Norm,
    scales: Sequence[Modulation],
    shifts: Sequence[Modulation],
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    """The gradients of one norm with two modulations: weight, bias, each scale and shift, then each pair of tables."""
    parts = []
    for i, (grad, scale, shift) in enumerate(zip(grads, scales, shifts)):
        mine = (*needs[:2], *needs[2 + 2 * i : 4 + 2 * i], *needs[6 + 2 * i : 8 + 2 * i])
        parts.append(of_modulated_norm(grad, rows, norm, scale, shift, mine))
    first, second = parts
    of_norm = [b if a is None else a if b is None else a + b for a, b in zip(first[:2], second[:2])]
    return *of_norm, *first[2:4], *second[2:4], *first[4:], *second[4:]


def _summed(terms: Tensor, shape: torch.Size) -> Tensor:
    """Terms summed to a shape that broadcasts to theirs, in float32."""
    whole = [1] * (terms.dim() - len(shape)) + list(shape)
    dims = [i for i, (wanted, size) in enumerate(zip(whole, terms.shape)) if wanted == 1 != size]
    total = terms.sum(dims, keepdim=True, dtype=torch.float32) if dims else terms.float()
    return total.view(shape)
