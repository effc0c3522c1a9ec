"""Linear layers in fp8: their weights quantised once, per output channel, their inputs row by row at every call.

The fp8 weight lies beside the stock one, as buffers that are not saved. ``forward`` of the layer quantises its input,
so that whatever calls it works; a fused block hands it rows that an op has quantised already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._linear import adjacent, stacked
from .._ops import add_op_namespace_prefix
from ..quant import multiply, quantize_rows, quantize_weight
from ._sites import Entry, hooked, stock_forward, why_not_input

VALUES, SCALES = "ltx_fp8_values", "ltx_fp8_scales"
STATE = "_ltx_fp8_of"  # the version of the weight that was quantised, or FREED
FREED = "freed"

Rows = tuple[Tensor, Tensor]  # values and scales, as the ops of quant.py return them


def why_not_fp8(linear: Any) -> str:
    """Why the weight of a linear layer cannot be quantised; empty if it can."""
    if type(linear.weight) is not nn.Parameter or linear.weight.device.type == "meta":
        return f"its weight is no ordinary parameter ({type(linear.weight).__name__} on {linear.weight.device})"
    if linear.in_features % 16 or linear.out_features % 16:
        return f"fp8 GEMMs need multiples of 16, not {linear.in_features} x {linear.out_features}"
    return ""


def quantise_weights(linears: Sequence[Any]) -> None:
    """Gives layers that share an input their fp8 weights, one behind the other."""
    quantised = [quantize_weight(linear.weight) for linear in linears]
    values, scales = (torch.cat(parts) for parts in zip(*quantised))
    start = 0
    for linear in linears:
        end = start + linear.out_features
        linear.register_buffer(VALUES, values[start:end], persistent=False)
        linear.register_buffer(SCALES, scales[start:end], persistent=False)
        linear.__dict__[STATE] = linear.weight._version
        start = end


def drop_weights(linear: Any) -> None:
    """What `restore` does beside giving the layer its forward back."""
    for name in (VALUES, SCALES):
        linear._buffers.pop(name, None)
        linear._non_persistent_buffers_set.discard(name)
    linear.__dict__.pop(STATE, None)


def freed(linear: Any) -> bool:
    return linear.__dict__.get(STATE) == FREED


def free_weight(linear: Any) -> int:
    """Gives the memory of the stock weight back; the bytes."""
    size = linear.weight.nbytes
    linear.weight.data = torch.empty(0, dtype=linear.weight.dtype, device=linear.weight.device)
    linear.__dict__[STATE] = FREED
    linear.register_state_dict_pre_hook(_refuse_to_save)
    return size


def summary(linears: Sequence[Any], freed_bytes: int | None) -> str:
    """What to tell about the memory."""
    added = sum(linear.ltx_fp8_values.nbytes + linear.ltx_fp8_scales.nbytes for linear in linears)
    text = f"fp8: {len(linears)} linear layers, {added / 2**20:.1f} MiB of weights"
    if freed_bytes is None:
        return f"{text} beside the stock ones"
    return f"{text} in place of {freed_bytes / 2**20:.1f} MiB, which are freed: there is no restore"


def _refuse_to_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise RuntimeError(
        f"{prefix}weight was freed by optimize(..., free_weights=True) and cannot be saved: load the model again"
    )


def _changed(linear: Any) -> bool:
    """Whether the stock weight was written to after it was quantised (through .data it can be, unseen)."""
    version = linear.weight._version
    if version < linear.__dict__[STATE]:  # a copy, which counts anew
        linear.__dict__[STATE] = version
    return version > linear.__dict__[STATE]


def _why_not_input(input: Tensor) -> str:
    if input.dtype != torch.bfloat16:
        return f"fp8 takes bfloat16 activations, not {input.dtype}"
    return why_not_input(input)


def _why_not_weight(linear: Any, input: Tensor) -> str:
    values = linear._buffers.get(VALUES)
    if values is None or values.dtype != torch.float8_e4m3fn or values.device != input.device:
        return "the fp8 weight was converted or is on another device"
    if not torch.compiler.is_compiling() and not freed(linear) and _changed(linear):
        return "the weight has changed since it was quantised: call optimize again"
    return ""


def linear_forward(self: Any, input: Tensor) -> Tensor:
    reason = _why_not_input(input) or _why_not_weight(self, input)
    if reason and not freed(self):
        return stock_forward(self, reason, input)
    if reason:
        raise RuntimeError(
            f"fp8 cannot run this call ({reason}), and the stock weight was freed by optimize(..., free_weights=True): "
            "load the model again to run it without fp8"
        )
    self._ltx_kernels.count_call()
    return multiply(*quantize_rows(input), self._buffers[VALUES], self._buffers[SCALES], self.bias)


def why_not_restored(linear: Any) -> str:
    return (
        "its stock weight was freed by optimize(..., free_weights=True): load the model again" if freed(linear) else ""
    )


LINEAR = Entry(
    linear_forward,
    ("quantize_rows", "scaled_linear"),
    ("input",),
    why_not=why_not_fp8,
    why_not_restored=why_not_restored,
    release=drop_weights,
)


def in_fp8(linear: Any) -> bool:
    site = linear.__dict__.get("_ltx_kernels")
    return site is not None and site.entry is LINEAR


def takes_rows(linears: Sequence[Any], input: Tensor) -> bool:
    """Whether linear layers can be handed quantised rows of what would have been a tensor like `input`."""
    for linear in linears:
        if not in_fp8(linear) or hooked(linear) or _why_not_weight(linear, input):
            return False
    return not _why_not_input(input)


def apply_rows(linears: Sequence[Any], rows: Rows) -> tuple[tuple[Tensor, ...], bool]:
    """(the outputs of linear layers for quantised rows, whether they are views of one new tensor).

    They are where the weights are adjacent: then one GEMM makes them all.
    """
    values = [linear._buffers[VALUES] for linear in linears]
    scales = [linear._buffers[SCALES] for linear in linears]
    biases = [linear._parameters["bias"] for linear in linears]
    for linear in linears:
        linear._ltx_kernels.count_call()
    if len(linears) > 1 and len({bias is None for bias in biases}) == 1:
        given = [bias for bias in biases if bias is not None]
        sizes = [value.shape[0] for value in values]
        if torch.compiler.is_compiling():
            return packed_scaled_linear_op(*rows, values, scales, given).split(sizes, -1), False
        output = packed_scaled_linear(*rows, values, scales, given)
        if output is not None:
            return output.split(sizes, -1), True
    return tuple(multiply(*rows, *weight) for weight in zip(values, scales, biases)), False


def packed_scaled_linear(
    values: Tensor, scales: Tensor, weights: Sequence[Tensor], weight_scales: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor | None:
    """``scaled_linear`` of several layers with one input, outputs side by side; None if their weights lie apart."""
    if adjacent(weights) and adjacent(weight_scales) and (not biases or adjacent(biases)):
        return multiply(values, scales, stacked(weights), stacked(weight_scales), stacked(biases) if biases else None)
    return None


@torch.library.custom_op(
    add_op_namespace_prefix("packed_scaled_linear"),
    mutates_args=(),
    schema="(Tensor values, Tensor scales, Tensor[] weights, Tensor[] weight_scales, Tensor[] biases) -> Tensor",
)
def packed_scaled_linear_op(
    values: Tensor, scales: Tensor, weights: Sequence[Tensor], weight_scales: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    packed = packed_scaled_linear(values, scales, weights, weight_scales, biases)
    if packed is not None:
        return packed
    outputs = [
        multiply(values, scales, weight, weight_scales[i], biases[i] if biases else None)
        for i, weight in enumerate(weights)
    ]
    return torch.cat(outputs, -1)


@packed_scaled_linear_op.register_fake
def _(
    values: Tensor, scales: Tensor, weights: Sequence[Tensor], weight_scales: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    return values.new_empty(*values.shape[:-1], sum(w.shape[0] for w in weights), dtype=torch.bfloat16)
