"""The gradients of what rows share, as sums over rows: a norm's weight and bias, scale, shift, gate and their tables.

With n(x) the norm of x without a weight, the gradients of

    z = n(x) * weight + bias        y = (z * (1 + scale) + shift) * gate

follow from two sums over the rows that have the same scale, shift and gate: of grad * n(x), and of grad. A kernel adds
up both in float32, always in the same order for one shape. Where each row has a scale of its own, nothing is added up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Optional, cast

import torch
from torch import Tensor

from ._checks import FP32, NONE, is_per_batch
from ._formulas import modulator
from ._ops import ops

Two = tuple[Optional[Tensor], Optional[Tensor]]
Needs = tuple[bool, ...]


class Modulation(NamedTuple):
    """A scale, shift or gate, the vector that is added to it, and the number of the row that each token takes."""

    value: Tensor | None
    table: Tensor | None
    numbers: Tensor | None

    def leading(self, rows: Tensor) -> int:
        """The number of leading dimensions of the rows up to the last one in which the modulation varies."""
        if self.value is None:
            return 0
        if self.numbers is not None:
            return rows.dim() - 1
        if is_per_batch(self.value, rows):
            return 1
        first = rows.dim() - self.value.dim() + 1
        return max((first + i for i, size in enumerate(self.value.shape[:-1]) if size != 1), default=0)

    def factor(self, rows: Tensor, offset: float = 0.0) -> Tensor | None:
        """The sum of value, table and offset in float32, in a shape that broadcasts to the rows."""
        factor = modulator(self.value, self.table, rows, self.numbers, torch.float32)
        return factor if factor is None or not offset else factor + offset

    def gradients(self, whole: Tensor, needs: Needs) -> Two:
        """The gradients of value and table, where they are needed. ``whole`` is that of their sum, float32 [..., H]."""
        to_value = to_table = None
        if self.value is not None and needs[0]:
            to_value = self._of_value(whole) if self.numbers is None else self._of_named_rows(whole)
        if self.table is not None and needs[1]:
            to_table = _summed(whole, self.table)
        return to_value, to_table

    def _of_value(self, whole: Tensor) -> Tensor:
        value = cast(Tensor, self.value)
        shape: tuple[int, ...] = value.shape
        if is_per_batch(value, whole):
            shape = (shape[0], *(1,) * (whole.dim() - 2), shape[1])
        is_sum = whole.numel() != value.numel()
        sums = whole.sum_to_size(shape) if is_sum else whole
        # What is no sum may be the gradient that came in. A view of it would become a parameter's `grad`.
        return sums.view(value.shape).to(value.dtype, copy=not is_sum)

    def _of_named_rows(self, whole: Tensor) -> Tensor:
        value = cast(Tensor, self.value).detach().requires_grad_()
        with torch.enable_grad():
            factor = cast(Tensor, modulator(value, None, whole, self.numbers, torch.float32))
            return torch.autograd.grad(factor, value, whole.sum_to_size(factor.shape))[0]


UNMODULATED = Modulation(None, None, None)


class Norm(NamedTuple):
    """A norm with or without a weight and a bias. The statistic NONE leaves the rows as they are."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    offset: float
    statistic: int


def of_gate(grad: Tensor, rows: Tensor, gate: Modulation, needs: Needs) -> Two:
    """The gradients of a gate and its table, where they are needed. ``grad`` is the gradient of rows * gate."""
    if not any(needs):
        return None, None
    products, _ = _sums(grad, rows, Norm(None, None, 0.0, 0.0, NONE), gate.leading(rows))
    return gate.gradients(products, needs)


def of_norm(grad: Tensor, rows: Tensor, norm: Norm, needs: Needs) -> Two:
    """The gradients of a norm's weight and bias, where they are needed. ``grad`` is the gradient of its result."""
    to_weight, to_bias, *_ = of_modulated_norm(
        grad, rows, norm, UNMODULATED, UNMODULATED, UNMODULATED, (*needs, *(False,) * 6)
    )
    return to_weight, to_bias


def of_modulated_norm(
    grad: Tensor | None,
    rows: Tensor,
    norm: Norm,
    scale: Modulation,
    shift: Modulation,
    gate: Modulation,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    """The gradients of weight, bias, scale, shift, gate, scale_table, shift_table and gate_table, where needed.

    grad: Of the modulated rows; None where nothing reads them.
    """
    if grad is None or not any(needs):
        return (None,) * 8
    leading = max(modulation.leading(rows) for modulation in (scale, shift, gate))
    products, sums = _sums(grad, rows, norm, leading)
    for_norm, for_scale, for_gate = (any(needs[i] for i in places) for places in ((0, 1), (2, 5), (4, 7)))
    modulated = scale.factor(rows, 1.0) if for_norm or for_gate else None
    to_scale: Two = (None, None)
    to_gate: Two = (None, None)
    if for_gate:
        whole = _weighted(products, sums, norm)
        if modulated is not None:
            whole = whole * modulated
        addend = shift.factor(rows)
        if addend is not None:
            whole = whole + sums * addend
        to_gate = gate.gradients(whole, (needs[4], needs[7]))
    gated = gate.factor(rows)
    if gated is not None:
        products, sums = products * gated, sums * gated
    if for_scale:
        to_scale = scale.gradients(_weighted(products, sums, norm), (needs[2], needs[5]))
    to_shift = shift.gradients(sums, (needs[3], needs[6]))
    if modulated is not None:
        products, sums = products * modulated, sums * modulated
    to_weight = to_bias = None
    if needs[0] and norm.weight is not None:
        to_weight = _summed(products, norm.weight)
    if needs[1] and norm.bias is not None:
        to_bias = _summed(sums, norm.bias)
    return to_weight, to_bias, to_scale[0], to_shift[0], to_gate[0], to_scale[1], to_shift[1], to_gate[1]


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
        values, tables = needs[2 + 2 * i : 4 + 2 * i], needs[6 + 2 * i : 8 + 2 * i]
        mine = (*needs[:2], *values, False, *tables, False)
        parts.append(of_modulated_norm(grad, rows, norm, scale, shift, UNMODULATED, mine))
    first, second = parts
    of_both = [b if a is None else a if b is None else a + b for a, b in zip(first[:2], second[:2])]
    return *of_both, *first[2:4], *second[2:4], *first[5:7], *second[5:7]


def _sums(grad: Tensor, rows: Tensor, norm: Norm, leading: int) -> tuple[Tensor, Tensor]:
    """The sums of grad * n(rows) and of grad, over all dimensions but the ``leading`` ones and the last: in float32."""
    if leading == rows.dim() - 1:  # nothing to add up
        if norm.statistic == NONE:
            products = rows.to(torch.float32, copy=True)
        else:
            products = ops.norm.default(rows.float(), None, None, norm.eps, 0.0, norm.statistic, FP32)
        return products.mul_(grad), grad.float()
    *counts, width = rows.shape
    shape = (math.prod(counts[:leading]), math.prod(counts[leading:]), width)
    both = ops.row_sums.default(grad.reshape(shape), rows.reshape(shape), norm.eps, norm.statistic)
    whole = (*counts[:leading], *(1,) * (len(counts) - leading), width)
    products, sums = (each.view(whole) for each in both)
    return products, sums


def _summed(whole: Tensor, like: Tensor) -> Tensor:
    """A sum in the shape and dtype of a tensor, in memory of its own: gradients are written to."""
    if whole.numel() == like.numel():  # one kernel in place of two
        return whole.to(like.dtype, copy=True).view(like.shape)
    return whole.sum_to_size(like.shape).to(like.dtype)


def _weighted(products: Tensor, sums: Tensor, norm: Norm) -> Tensor:
    """The sum of grad * z with z = n * weight + bias, given those of grad * n and of grad."""
    if norm.weight is not None:
        weight = norm.weight.float()
        products = products * (weight + norm.offset if norm.offset else weight)
    return products if norm.bias is None else products + sums * norm.bias.float()
