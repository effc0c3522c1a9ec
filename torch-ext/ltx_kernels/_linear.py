"""Linear layers in forms that torch.nn.Linear has not: several in one GEMM, with the GELU in the GEMM's epilogue, and
one layer on inputs side by side.

The first two are opaque to torch.compile, which would take them apart again; called eagerly they are plain functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ._checks import NO_TANGENTS, check_linear_cat, check_types, no_given_outputs, requires_grad
from ._ops import add_op_namespace_prefix
from ._torch_private import addmm_gelu, forward_ad, is_func_wrapper
from .glu import gelu


def adjacent(tensors: Sequence[Tensor]) -> bool:
    """Whether contiguous tensors lie side by side in one storage.

    It is asked at every call: moving a model, and replacing or merging weights, gives parameters a storage each.
    """
    address = tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != address or not tensor.is_contiguous():
            return False
        address += tensor.nbytes
    storage = tensors[0].untyped_storage()
    return address <= storage.data_ptr() + storage.nbytes()  # or the next ones have a storage of their own


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def joined_bits(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """``torch.cat(tensors, dim)`` of tensors of any one dtype: under autocast it refuses fp8, for example."""
    dtype = tensors[0].dtype
    bits = _INTEGERS[dtype.itemsize]
    return torch.cat([tensor.view(bits) for tensor in tensors], dim).view(dtype)


def make_adjacent(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Moves parameters into one storage, side by side. They stay the parameters they are."""
    if adjacent([p.data for p in parameters]):
        return
    with torch.no_grad():
        packed = joined_bits([p.detach().flatten() for p in parameters])
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
        biases: [N_i] each; an empty list if the layers have no bias.

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
    output = addmm_gelu(bias, rows, weight.t())
    return output.view(*input.shape[:-1], weight.shape[0])


def linear_cat(
    inputs: Sequence[Tensor], weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """A linear layer on inputs side by side, without their concatenation.

    Equivalent to::

        torch.nn.functional.linear(torch.cat(inputs, -1), weight, bias)

    Inputs that are neighbouring columns of one tensor take one product. Others take a product each, added to the sum of
    those before, which is rounded to the inputs' dtype once for each. With one input and ``out`` this is a linear layer
    that writes to rows or columns of a larger tensor.

    Args:
        inputs: [..., K_i] each, of one shape but for K_i, one dtype and one device; any strides.
        weight: [N, sum of K_i], of the inputs' dtype.
        bias: [N], of the inputs' dtype; None adds nothing.
        out: Where to write, [..., N], of the inputs' dtype and device. Where it shares a storage with an argument, the
            result is made apart and copied.

    Returns:
        [..., N], contiguous; ``out`` where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit, or ``out`` is given where a gradient is needed.

    Source: FluxSingleTransformerBlock (diffusers): proj_out of attention and MLP.
    """
    if forward_ad._current_level >= 0 and not torch.is_grad_enabled():
        raise RuntimeError(NO_TANGENTS)
    try:
        check_linear_cat(inputs, weight, bias, out)
    except (AttributeError, TypeError):
        check_types(linear_cat, inputs, weight, bias, out=out)
        raise
    if torch.is_grad_enabled() and requires_grad(*inputs, weight, bias, out):
        no_given_outputs(out)
        return F.linear(torch.cat(tuple(inputs), -1), weight, bias)
    if weight.numel() == 0 or any(tensor.numel() == 0 for tensor in inputs) or not _in_place(inputs, weight):
        result = F.linear(torch.cat(tuple(inputs), -1), weight, bias)
        return result if out is None else out.copy_(result)
    if torch.compiler.is_compiling():
        result = _sum_of_products(inputs, weight, bias)
        return result if out is None else out.copy_(result)
    if out is None:
        out = inputs[0].new_empty(*inputs[0].shape[:-1], weight.shape[0])
    elif _shares_storage(out, *inputs, weight, bias):
        return out.copy_(linear_cat(inputs, weight, bias))
    whole = _side_by_side(inputs)
    _add_products(out, inputs if whole is None else (whole,), weight, bias)
    return out


def _in_place(inputs: Sequence[Tensor], weight: Tensor) -> bool:
    """Whether the products can be of the tensors where they lie, in their dtype."""
    device = weight.device.type
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != weight.dtype != torch.float64:
        return False
    if torch.compiler.is_compiling():
        return True
    plain = (Tensor, torch.nn.Parameter)
    return not torch.jit.is_tracing() and all(
        type(x) in plain and not is_func_wrapper(x) and not x.is_neg() for x in (*inputs, weight)
    )


def _sum_of_products(inputs: Sequence[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """The sum of the inputs' products with their columns of the weight.

    It is for torch.compile, whose tensors have no addresses that would tell whether inputs are neighbours.
    """
    start = inputs[0].shape[-1]
    rows = F.linear(inputs[0].reshape(-1, start), weight[:, :start], bias)
    for tensor in inputs[1:]:
        width = tensor.shape[-1]
        rows = torch.addmm(rows, tensor.reshape(-1, width), weight[:, start : start + width].t())
        start += width
    return rows.view(*inputs[0].shape[:-1], weight.shape[0])


def _shares_storage(out: Tensor, *others: Tensor | None) -> bool:
    address = out.untyped_storage().data_ptr()
    return any(other is not None and other.untyped_storage().data_ptr() == address for other in others)


def _side_by_side(inputs: Sequence[Tensor]) -> Tensor | None:
    """Inputs that are neighbouring columns of one tensor as one; None where they are not."""
    first, width = inputs[0], 0
    if len(inputs) == 1:
        return first
    for tensor in inputs:
        beside = tensor.data_ptr() == first.data_ptr() + width * first.element_size()
        if not beside or tensor.stride() != first.stride() or tensor.stride(-1) != 1:
            return None
        width += tensor.shape[-1]
    storage = first.untyped_storage()
    if any(tensor.untyped_storage().data_ptr() != storage.data_ptr() for tensor in inputs):
        return None
    return first.as_strided((*first.shape[:-1], width), first.stride())


def _add_products(out: Tensor, inputs: Sequence[Tensor], weight: Tensor, bias: Tensor | None) -> None:
    """Writes the sum of the inputs' products with their columns of the weight."""
    if out.dim() > 2 and not _is_rows(out):
        for i, sample in enumerate(out):
            _add_products(sample, [tensor[i] for tensor in inputs], weight, bias)
        return
    rows = out.view(-1, out.shape[-1])
    start = 0
    for tensor in inputs:
        width = tensor.shape[-1]
        tokens, columns = tensor.reshape(-1, width), weight[:, start : start + width].t()
        if start:
            rows.addmm_(tokens, columns)
        elif bias is None:
            torch.mm(tokens, columns, out=rows)
        else:
            torch.addmm(bias, tokens, columns, out=rows)
        start += width


def _is_rows(tensor: Tensor) -> bool:
    """Whether the leading dimensions are one, so that a product can write to the tensor as a matrix."""
    step = tensor.stride(-2)
    for dim in range(tensor.dim() - 2, -1, -1):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != step:
            return False
        step = tensor.stride(dim) * tensor.shape[dim]
    return True


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
