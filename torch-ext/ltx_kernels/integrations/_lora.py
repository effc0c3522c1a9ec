"""LoRA adapters of peft on linear layers in fp8: their low-rank products run in bfloat16 beside the fp8 product.

peft puts a layer of its own in the place of a linear layer, which becomes its ``base_layer``. The fused forwards look
through it: without an active adapter the linear layer is the one that it was before, with the same bits; with active
adapters the input stays in bfloat16 for them, and is quantised once for the fp8 product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._guards import class_of, hooked, plain_linear

LORA_CLASS = "peft.tuners.lora.layer.Linear"
IDENTITY, DROPOUT = "torch.nn.modules.linear.Identity", "torch.nn.modules.dropout.Dropout"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class LoraLayer(Protocol):
    """What is read of peft's layer."""

    _modules: dict[str, nn.Module]
    active_adapters: Sequence[str]
    disable_adapters: bool
    merged_adapters: Sequence[str]
    lora_variant: Mapping[str, object]
    scaling: Mapping[str, float]


class LowRank(NamedTuple):
    """What an adapter adds to a linear layer: ``scale * F.linear(F.linear(x, down), up, bias)``."""

    down: Tensor  # [rank, in]
    up: Tensor  # [out, rank]
    bias: Tensor | None
    scale: float


def is_lora(module: nn.Module) -> bool:
    return class_of(module) == LORA_CLASS


def base_of(module: nn.Module) -> nn.Module:
    """The linear layer itself, of one that may have adapters around it."""
    base = module._modules.get("base_layer")
    return module if base is None or not is_lora(module) else base


def merged(module: nn.Module) -> tuple[str, ...]:
    """The adapters that peft has added to the weight of the linear layer."""
    return tuple(cast(LoraLayer, module).merged_adapters)


def adapters_of(module: nn.Module, device: torch.device) -> tuple[str, list[LowRank]]:
    """(why peft's layer has to be called as it is, what its active adapters add); both are empty if none is active."""
    layer, found = cast(LoraLayer, module), []
    if layer.disable_adapters:
        return ("disabled adapters that are merged" if layer.merged_adapters else ""), []
    if layer.merged_adapters:
        return "", []
    downs, ups, dropouts = (layer._modules[name]._modules for name in ("lora_A", "lora_B", "lora_dropout"))
    for name in layer.active_adapters:
        down, up, dropout = downs.get(name), ups.get(name), dropouts.get(name)
        if down is None or up is None or dropout is None:
            continue
        if name in layer.lora_variant:
            return f"{type(layer.lora_variant[name]).__name__} of peft", []
        idle = class_of(dropout) == IDENTITY or (class_of(dropout) == DROPOUT and not dropout.training)
        if not idle or hooked(dropout):
            return "a dropout of adapters that is active or has a hook", []
        dtype = cast(Tensor, down._parameters["weight"]).dtype
        if dtype not in _DTYPES or not (plain_linear(down, dtype) and plain_linear(up, dtype)):
            return "adapters that are trained, quantised, hooked or of two dtypes", []
        low_rank = LowRank(down.weight, up.weight, up.bias, layer.scaling[name])  # type: ignore[arg-type]
        if low_rank.up.device != device:
            return f"adapters on {low_rank.up.device}", []
        found.append(low_rank)
    return "", found


def add_adapters(output: Tensor, input: Tensor, adapters: Sequence[LowRank], in_place: bool) -> Tensor:
    """A linear layer's output [..., out] and what adapters add to it, of the layer's input [..., in].

    in_place: The output may be overwritten; it may be a part of wider rows.
    """
    for down, up, bias, scale in adapters:
        x = input.to(down.dtype)
        if in_place and bias is None and down.dtype == output.dtype:
            rows = output.view(-1, output.shape[-1])
            rows.addmm_(F.linear(x, down).view(-1, down.shape[0]), up.t(), alpha=scale)
        else:
            result = (output + F.linear(F.linear(x, down), up, bias) * scale).to(output.dtype)
            output = output.copy_(result) if in_place else result
    return output
