"""Products of frozen linear layers, with the gradients of their inputs.

With weights in fp8 the product is that of quantised rows, with or without gradients. In the backward the gradient of
the output is multiplied by the weight, which the product alone brings back to the gradient's dtype: it is freed when
the product is done, and nothing of the input is saved. Rounding the input to fp8 counts as the identity.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ..._checks import requires_grad
from ..._once import once_differentiable
from ...quant import multiply, quantize_rows

Rows = tuple[Tensor, Tensor]  # values and scales, as the ops of quant.py return them


class Layers(NamedTuple):
    """Layers side by side, or one by itself."""

    weight: Tensor  # [N, K]
    scales: Tensor | None  # [N] in fp8
    bias: Tensor | None

    def product(self, input: Tensor, rows: Rows | None) -> Tensor:
        """The output of an input [..., K]; ``rows`` are its rows in fp8, for weights in fp8."""
        weight, scales, bias = self
        if scales is None or rows is None:
            return F.linear(input, weight, bias)
        if not (torch.is_grad_enabled() and requires_grad(input, bias)):
            return multiply(*rows, weight, scales, bias)
        output: Tensor = _Scaled.apply(input, weight, scales, bias, *rows)
        return output

    def full_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight in a dtype; of weights in fp8 new memory, rounded once."""
        return self.weight if self.scales is None else self.weight.to(dtype).mul_(self.scales.unsqueeze(1))


def rows_of(input: Tensor) -> Rows:
    """The rows of an input in fp8, which have no gradient of their own."""
    return quantize_rows(input.detach() if torch.is_grad_enabled() else input)


class _Scaled(Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        values: Tensor,
        row_scales: Tensor,
    ) -> Tensor:
        save_frozen(ctx, weight, scales, bias)
        return multiply(values, row_scales, weight, scales, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        return *frozen_gradients(ctx, gradient), None, None


def save_frozen(ctx: Any, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
    """Saves what `frozen_gradients` reads."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(weight, scales)
    ctx.bias_dtype = None if bias is None else bias.dtype


def frozen_gradients(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None, Tensor | None]:
    """The gradients of a Function whose arguments begin with input, weight, scales and bias of a linear layer."""
    if gradient is None:
        return None, None, None, None
    weight, scales = ctx.saved_tensors
    rows = gradient.reshape(-1, len(weight))
    to_input = to_bias = None
    if ctx.needs_input_grad[0]:
        product = torch.mm(rows, Layers(weight, scales, None).full_weight(rows.dtype))
        to_input = product.view(*gradient.shape[:-1], weight.shape[1])
    if ctx.needs_input_grad[3]:
        to_bias = rows.sum(0, dtype=ctx.bias_dtype)
    return to_input, None, None, to_bias
