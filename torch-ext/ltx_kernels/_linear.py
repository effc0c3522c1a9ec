"""Linear layers in forms that torch.nn.Linear has not: several in one GEMM, and with the GELU in the GEMM's epilogue.

Both are opaque to torch.compile, which would take them apart again; called eagerly they are plain functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ._ops import add_op_namespace_prefix
from .glu import gelu


def adjacent(tensors: Sequence[Tensor]) -> bool:
    """Whether contiguous tensors lie one behind the other in one storage.

    It is asked at every call: moving a model, and replacing or merging weights, gives parameters a storage each.
    """
    address = tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != address or not tensor.is_contiguous():
            return False
        address += tensor.nbytes
    storage = tensors[0].untyped_storage()
    return address <= storage.data_ptr() + storage.nbytes()  # or the next ones have a storage of their own


def make_adjacent(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Moves parameters into one storage, one behind the other. They stay the parameters they are."""
    if adjacent([p.data for p in parameters]):
        return
    with torch.no_grad():
        packed = torch.cat([p.detach().flatten() for p in parameters])
        start = 0
        for parameter in parameters:
            parameter.data = packed[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Adjacent tensors as one, along their first dimension."""
    first = tensors[0]
    return first.as_strided((sum(t.shape[0] for t in tensors), *first.shape[1:]), first.stride())


def packed_linear(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor | None:
    """Several linear layers on one input by one GEMM, their outputs side by side; None if their weights lie apart.

    Equivalent to::

        torch.cat([F.linear(input, weight, bias) for weight, bias in zip(weights, biases)], -1)

    Args:
        input: [..., K].
        weights: [N_i, K] each.
        biases: [N_i] each; an empty list where there are none.

    Returns:
        [..., sum of N_i], or None.
    """
    if adjacent(weights) and (not biases or adjacent(biases)):
        return F.linear(input, stacked(weights), stacked(biases) if biases else None)
    return None


def linear_gelu(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A linear layer and the tanh form of GELU, which a GPU's GEMM applies to its unrounded result.

    Equivalent to::

        F.gelu(F.linear(input, weight, bias), approximate="tanh")

    Args:
        input: [..., K].
        weight: [N, K].
        bias: [N].

    Returns:
        [..., N].
    """
    if input.device.type != "cuda":  # there the epilogue is the erf form
        return gelu(F.linear(input, weight, bias), approximate="tanh")
    rows = input.reshape(-1, input.shape[-1])
    # On an H200 (5376x2048x8192, bf16) it saves torch.compile's separate GELU, 0.06 ms:
    # benchmarks/results/h200-ltx.json.
    output = torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)
    return output.view(*input.shape[:-1], weight.shape[0])


@torch.library.custom_op(
    add_op_namespace_prefix("packed_linear"),
    mutates_args=(),
    schema="(Tensor input, Tensor[] weights, Tensor[] biases) -> Tensor",
)
def packed_linear_op(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    packed = packed_linear(input, weights, biases)
    if packed is not None:
        return packed
    outputs = [F.linear(input, weight, biases[i] if biases else None) for i, weight in enumerate(weights)]
    return torch.cat(outputs, -1)


@packed_linear_op.register_fake
def _(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return input.new_empty(*input.shape[:-1], sum(w.shape[0] for w in weights))


@torch.library.custom_op(
    add_op_namespace_prefix("linear_gelu"),
    mutates_args=(),
    schema="(Tensor input, Tensor weight, Tensor bias) -> Tensor",
)
def linear_gelu_op(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return linear_gelu(input, weight, bias)


@linear_gelu_op.register_fake
def _(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0])
