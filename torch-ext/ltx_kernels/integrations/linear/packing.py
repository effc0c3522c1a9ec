"""Weights of several linear layers side by side in one storage, so that one product computes them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import dlpack

from ..._linear import adjacent, make_adjacent, stacked
from ..._ops import add_op_namespace_prefix
from ...quant import multiply
from ..engine.guards import hooked, is_ordinary, submodule
from .fp8 import in_fp8
from .lora import base_of

PACKED = "_ltx_kernels_packed"  # of a module that `pack` has changed: the handles of its hooks, for `unpack`


def pack(module: nn.Module, groups: Sequence[Sequence[str]]) -> str:
    """Moves the weights of each group of linear layers below a module into one storage; returns why not, or ""."""
    for names in groups:
        linears = [cast(nn.Linear, base_of(module.get_submodule(name))) for name in names]
        described = f"{', '.join(names[:-1])} or {names[-1]}"
        if not all(type(linear) is nn.Linear and not hooked(linear) for linear in linears):
            return f"{described} is no plain nn.Linear"
        # fp8 weights are adjacent as they are made.
        weights = [cast(nn.Parameter, linear.weight) for linear in linears if not in_fp8(linear)]
        parameters = [*weights, *(linear.bias for linear in linears if linear.bias is not None)]
        for p in parameters:
            first = parameters[0]
            if not is_ordinary(p) or p.is_inference() or (p.device, p.dtype) != (first.device, first.dtype):
                return f"{described} has other than ordinary parameters of one device and dtype"
            if p.device.type not in ("cuda", "cpu"):
                return f"{described} is on {p.device}"
        storages = [p.untyped_storage().nbytes() > p.nbytes for p in parameters]
        if any(storages) and not adjacent(weights or parameters):
            return f"{described} has parameters in a storage of somebody else's"
        handles = [linear.register_state_dict_post_hook(_apart) for linear in linears]
        module.__dict__.setdefault(PACKED, []).extend(handles)
        if weights:
            make_adjacent(weights)
        if all(linear.bias is not None for linear in linears):
            make_adjacent([linear.bias for linear in linears])
    return ""


def unpack(module: nn.Module, groups: Sequence[Sequence[str]]) -> None:
    """Gives weights that `pack` has moved into one storage a storage each; they stay the parameters they are."""
    if PACKED not in module.__dict__:
        return
    for names in groups:
        layers = (submodule(module, name) for name in names)
        found = (base_of(linear) for linear in layers if linear is not None)
        linears = [linear for linear in found if type(linear) is nn.Linear]
        shared: dict[int, list[Tensor]] = {}
        for parameter in (p for linear in linears for p in (None if in_fp8(linear) else linear.weight, linear.bias)):
            if parameter is not None and is_ordinary(parameter) and parameter.device.type in ("cuda", "cpu"):
                shared.setdefault(parameter.untyped_storage().data_ptr(), []).append(parameter)
        for parameters in shared.values():
            # `pack` made no storage that holds more than these parameters.
            if len(parameters) > 1 and parameters[0].untyped_storage().nbytes() == sum(p.nbytes for p in parameters):
                # All are copied before one is changed: memory may run out.
                with torch.inference_mode(parameters[0].is_inference()):
                    for parameter, data in zip(parameters, [parameter.data.clone() for parameter in parameters]):
                        parameter.data = data
    for handle in module.__dict__.pop(PACKED):
        handle.remove()


def _apart(linear: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Gives the tensors of a state dict a storage each, over the memory of the layer's parameters.

    accelerate and safetensors take tensors of one storage for one tensor, and save the first alone.
    """
    for name in ("weight", "bias"):
        tensor = state.get(f"{prefix}{name}")
        if type(tensor) is not Tensor or tensor.device.type not in ("cuda", "cpu"):  # a parameter has a gradient
            continue
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            # It still counts the parameter's writes. What is exported keeps the memory, and is a tensor of its own.
            with torch.inference_mode(tensor.is_inference()):
                tensor.data = dlpack.from_dlpack(dlpack.to_dlpack(tensor.detach()))


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
