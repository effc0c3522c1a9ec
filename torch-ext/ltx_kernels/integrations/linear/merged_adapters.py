"""Adapters of peft that are merged into stock weights of layers in fp8: the fp8 weights are quantised again.

peft adds an adapter to the data of the parameter, which leaves its version as it is. So the functions that merge are
replaced: diffusers' methods of a whole model, and ``merge`` and ``unmerge`` of each of peft's layers.
"""

from __future__ import annotations

import functools
import types
from typing import Any, Callable, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..engine.sites import site_of
from .fp8 import (
    BACK,
    CHANGING,
    HELD,
    MERGED,
    STATE,
    bring_back,
    guard_loading,
    hold,
    holds_fp8,
    is_freed,
    is_replaced,
    quantise_again,
)
from .lora import base_of, is_lora, merged
from .offload import keeps_copies, tell_offload


def follow(root: nn.Module) -> None:
    """Replaces the functions of a model that merge adapters into stock weights."""
    for module in root.modules():
        if is_lora(module) and holds_fp8(module):
            linear = cast(nn.Linear, base_of(module))
            linear.__dict__[MERGED] = merged(module)
            if merged(module) and linear.__dict__[STATE] == HELD:
                bring_back(linear)  # peft takes adapters out of a weight without asking
            _watch(module)
    for name in CHANGING:
        if hasattr(type(root), name):
            root.__dict__[name] = types.MethodType(_FOLLOWING[name], root)
    _follow_new_layers()


@functools.cache
def _follow_new_layers() -> None:
    """Has torch tell of each layer in fp8 that peft puts below a layer of its own, for as long as the process runs."""

    def see(module: nn.Module, name: str, child: nn.Module | None) -> None:
        if name == "base_layer" and child is not None and is_lora(module) and holds_fp8(child):
            _watch(module)

    register_module_module_registration_hook(see)


def _watch(layer: nn.Module) -> None:
    for name, method in (("merge", _merge), ("unmerge", _unmerge)):
        layer.__dict__[name] = types.MethodType(method, layer)


def _merge(self: nn.Module, *args: Any, **options: Any) -> None:
    """In the place of ``merge`` of a peft layer: brings the stock weight back, and quantises what it became."""
    linear = cast(nn.Linear, base_of(self))
    site = site_of(linear)
    if is_freed(linear):
        raise RuntimeError("merge: expected stock weights, which are freed: adapters run beside the fp8 weights")
    if is_replaced(linear):
        if any(keeps_copies(root) for reference in site.roots if (root := reference()) is not None):
            raise RuntimeError(
                "merge: expected no group offload with a stream, which keeps copies of the fp8 weights: call fuse_lora "
                "of the model"
            )
        bring_back(linear)
        site.remark("stock weights on the device again, since adapters are merged into them")
    cast(Any, type(self)).merge(self, *args, **options)
    follow_layer(self)


def _unmerge(self: nn.Module, *args: Any, **options: Any) -> None:
    """In the place of ``unmerge`` of a peft layer, which its forward calls where adapters are disabled."""
    cast(Any, type(self)).unmerge(self, *args, **options)
    follow_layer(self)


def _follow_layers(root: nn.Module) -> None:
    for module in root.modules():
        if is_lora(module) and holds_fp8(module):
            follow_layer(module)


def is_behind(layer: nn.Module) -> bool:
    """Whether adapters were merged into a weight, or taken out, since it was quantised."""
    return merged(layer) != base_of(layer).__dict__.get(MERGED, ())


def follow_layer(layer: nn.Module) -> None:
    """Quantises a weight again where it `is_behind`."""
    if not is_behind(layer):
        return
    linear = cast(nn.Linear, base_of(layer))
    if torch.compiler.is_compiling():
        raise RuntimeError("adapters were merged into weights in fp8, or taken out: call optimize again")
    quantise_again(linear)
    linear.__dict__[MERGED] = merged(layer)
    site_of(linear).remark("weights quantised again, since adapters were merged or taken out")


def _following(name: str) -> Callable[..., Any]:
    def method(self: nn.Module, *args: Any, **options: Any) -> Any:
        linears = [module for module in self.modules() if type(module) is nn.Linear and holds_fp8(module)]
        if name != "unload_lora" and any(map(is_freed, linears)):
            do = "adapters run beside the fp8 weights" if "lora" in name else "call it before optimize"
            raise RuntimeError(f"{name}: expected stock weights, which are freed: {do}")
        held = [linear for linear in linears if is_replaced(linear) and name != "unload_lora"]
        for linear in held:
            bring_back(linear)
        _follow_layers(self)
        result = getattr(type(self), name)(self, *args, **options)
        _follow_layers(self)
        back = [linear for linear in linears if BACK in linear.__dict__ and name != "fuse_lora"]
        for linear in back:
            hold(linear)
            guard_loading(linear)
        if held or back:
            tell_offload(self)
        if name == "unload_lora":
            for linear in linears:
                linear.__dict__.pop(MERGED, None)
        return result

    return method


_FOLLOWING = {name: _following(name) for name in CHANGING}
