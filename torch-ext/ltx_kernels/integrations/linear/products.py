"""Products of linear layers: with LoRA adapters in their sums, into rows of a tensor, and of inputs in fp8."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._linear import joined_bits
from ...quant import has_own_product, multiply
from ..engine.recording import as_one
from ..engine.sites import site_of
from .frozen import Layers, Rows
from .lora import LowRank, add_up, widened, widening_pays

ROWS_OF_A_SAMPLE = 1024  # least rows for a product of one sample; a product of fewer leaves a large GPU partly idle

Input = Union[Tensor, Rows]  # of a linear layer: a tensor, or its rows quantised to fp8


def count_products(linears: Iterable[nn.Linear], rows: Rows) -> None:
    """Counts a product for each layer, and remarks those that torch._scaled_mm computes on a GPU."""
    device = rows[0].device
    by_torch = device.type != "cpu" and not has_own_product(device)
    followed = torch.is_grad_enabled()
    for linear in linears:
        site = site_of(linear)
        site.count_call()
        if by_torch:
            site.remark("products by torch._scaled_mm")
        if followed and linear.weight.requires_grad:
            site.remark("no gradients of weights that are in fp8 alone or in the host's memory")


def may_overwrite() -> bool:
    """Whether fresh tensors may be overwritten: torch.compile and autograd want new ones."""
    return not torch.compiler.is_compiling() and not torch.is_grad_enabled()


def product_with_adapters(
    rows: Tensor,
    quantised: Rows | None,
    layers: Layers,
    sizes: Sequence[int],
    adapters: Sequence[Sequence[LowRank]],
    ranks: Sequence[Sequence[Tensor]],
) -> Tensor:
    """The outputs [M, N] of linear layers with what their adapters add.

    A product with an addend reads it as it writes its result, so the last product costs no further pass. Adding the
    adapters after the layers' large product would read and write all outputs again. So the adapters' products come
    first, with a bias, where every layer has adapters, and the layers' product is added to them.

    rows, quantised: The input [M, K], and the same quantised for layers in fp8.
    sizes, adapters, ranks: Of each layer, its width, active adapters, and what `low_ranks` returns.
    """
    weight, scales, bias = layers
    if scales is None and all(adapters) and widening_pays(rows, weight, adapters, 1):
        return F.linear(*widened(rows, weight, adapters, ranks), bias)
    first = all(adapters) and (scales is not None or bias is None or len(adapters) == 1)

    def product(total: Tensor | None) -> Tensor:
        if scales is not None and quantised is not None:
            return multiply(*quantised, weight, scales, bias, addend=total, out=total)
        return F.linear(rows, weight, bias) if total is None else total.addmm_(rows, weight.t())

    beta, done = 1, 0
    if not first:
        total = product(None)
    elif scales is None and bias is not None:
        _, up, _, scale = adapters[0][0]
        total, done = torch.addmm(bias, ranks[0][0], up.t(), alpha=scale), 1
    else:
        total, beta = rows.new_empty(len(rows), len(weight)), 0
    for output, low, added in zip(total.split_with_sizes(sizes, -1), ranks, adapters):
        add_up(output, low[done:], added[done:], beta)
    return product(total) if first else total


def lie_apart(input: Tensor) -> bool:
    """Whether an input [B, S, K] cannot be viewed as a matrix [B * S, K], and has enough rows for a product per sample.

    The rows of one of two streams in a joint tensor are an example. F.linear computes such a product without the bias,
    and adds the bias in a second pass, which rounds once more.
    """
    if input.dim() != 3 or input.is_contiguous():
        return False
    samples, rows, _ = input.shape
    return samples > 1 and rows >= ROWS_OF_A_SAMPLE and input.stride(0) != rows * input.stride(1)


def write_products(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, output: Tensor) -> None:
    """Writes F.linear of an input [B, S, K] into rows [B, S, N] of a tensor, by a product for each sample."""
    for i in range(len(output)):
        if bias is None:
            torch.mm(input[i], weight.t(), out=output[i])
        else:
            torch.addmm(bias, input[i], weight.t(), out=output[i])


# ---- Inputs that may be quantised


def like_of(input: Input) -> Tensor:
    """A tensor of the dtype and device of an input, which may be rows in fp8."""
    return input[1].new_empty(0, dtype=torch.bfloat16) if isinstance(input, tuple) else input


def as_tensor(input: Input) -> Tensor:
    """The input itself, or the tensor that rows of fp8 stand for."""
    return dequantised(input) if isinstance(input, tuple) else input


def dequantised(rows: Rows) -> Tensor:
    """The tensor that quantised rows stand for."""
    values, scales = rows
    return (values.float() * scales).to(torch.bfloat16)


def _joined_rows(first: Tensor, second: Tensor) -> Tensor:
    return joined_bits((first, second), 1)


def concatenated(first: Input, second: Input) -> Input:
    """The rows [B, S + T, K] of two streams [B, S, K] and [B, T, K], quantised where both are."""
    if isinstance(first, tuple) and isinstance(second, tuple):
        values, scales = (as_one(_joined_rows, *parts) for parts in zip(first, second))
        return values, scales
    parts = [dequantised(rows) if isinstance(rows, tuple) else rows for rows in (first, second)]
    return torch.cat(parts, 1)
