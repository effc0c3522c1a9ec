"""Adapters of peft that change or read stock weights of layers in fp8.

peft adds an adapter to the data of the parameter, which leaves its version as it is. So the functions that change it
are replaced: diffusers' methods of a whole model, and ``merge``, ``unmerge`` and ``update_layer`` of each of peft's
layers. After them the fp8 weights are quantised again. Adapters of other kinds than LoRA may read the stock weight,
which is brought back for them.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any, Callable, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..engine.sites import site_of
from .fp8_weights import (
    BACK,
    CHANGING,
    HELD,
    MERGED,
    SCALES,
    STATE,
    bring_back,
    guard_loading,
    hold,
    holds_fp8,
    is_freed,
    is_replaced,
    quantise_again,
)
from .lora import has_adapters, is_lora
from .offload import keeps_copies, tell_offload


def follow(root: nn.Module) -> None:
    """Replaces the functions of a model that merge adapters into stock weights."""
    for module in root.modules():
        linear = below(module)
        if linear is not None:
            linear.__dict__[MERGED] = merged(module)
            if merged(module) and linear.__dict__[STATE] == HELD:
                bring_back(linear)  # peft takes adapters out of a weight without asking
            _watch(module)
    for name in CHANGING:
        if hasattr(type(root), name):
            _put(root, name, _FOLLOWING[name])
    if hasattr(type(root), "save_lora_adapter"):  # diffusers' models, which save all weights
        _put(root, "save_pretrained", _save_pretrained)
    _follow_new_layers()


def _put(module: nn.Module, name: str, method: Callable[..., Any]) -> None:
    """Puts a method in the place of the class's, whose signature it shows: diffusers asks it what it may pass."""
    module.__dict__[name] = types.MethodType(_with_signature(method, getattr(type(module), name)), module)


@functools.cache
def _with_signature(method: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    def called(self: nn.Module, *args: Any, **options: Any) -> Any:
        return method(self, *args, **options)

    vars(called)["__signature__"] = inspect.signature(stock)
    return called


@functools.cache
def _follow_new_layers() -> None:
    """Has torch tell of each layer in fp8 that peft puts below a layer of its own, for as long as the process runs."""

    def see(module: nn.Module, name: str, child: nn.Module | None) -> None:
        if name != "base_layer" or child is None or not _is_tuner(module) or SCALES not in child._buffers:
            return
        if not is_lora(module):
            _bring_back(cast(nn.Linear, child), type(module).__module__, "adapters of other kinds than LoRA read them")
        child.__dict__.pop(MERGED, None)  # this layer has merged nothing yet, whatever its adapters will be called
        _watch(module)

    register_module_module_registration_hook(see)


def _is_tuner(module: nn.Module) -> bool:
    """Whether a module is a layer of peft, of whatever kind, that may merge its adapters into the one below it."""
    return hasattr(type(module), "merge") and hasattr(type(module), "unmerge")


def below(module: nn.Module) -> nn.Linear | None:
    """The layer in fp8 below a layer of peft; None for any other module."""
    base = module._modules.get("base_layer")
    return cast(nn.Linear, base) if base is not None and SCALES in base._buffers and _is_tuner(module) else None


def merged(layer: nn.Module) -> tuple[str, ...]:
    """The adapters that a layer of peft has added to the weight of the linear layer."""
    return tuple(getattr(layer, "merged_adapters", ()))


def _bring_back(linear: nn.Linear, caller: str, why: str) -> None:
    """Puts a stock weight that is not on the device beside the fp8 weight; RuntimeError where that cannot be."""
    site = site_of(linear)
    if is_freed(linear):
        raise RuntimeError(f"{caller}: expected stock weights, which are freed: LoRA adapters run beside fp8 weights")
    if is_replaced(linear):
        if any(map(keeps_copies, site.living_roots)):
            do = "call fuse_lora of the model" if caller == "merge" else "add these adapters before the offload"
            raise RuntimeError(
                f"{caller}: expected no group offload with a stream, which keeps copies of the fp8 weights: {do}"
            )
        bring_back(linear)
        site.remark(f"stock weights on the device again, since {why}")


def _watch(layer: nn.Module) -> None:
    for name, method in _WATCHED.items():
        if hasattr(type(layer), name):
            _put(layer, name, method)


def _merge(self: nn.Module, *args: Any, **options: Any) -> None:
    """In the place of ``merge`` of a peft layer: brings the stock weight back, and quantises what it became."""
    _bring_back(cast(nn.Linear, self._modules["base_layer"]), "merge", "adapters are merged into them")
    cast(Any, type(self)).merge(self, *args, **options)
    follow_layer(self)


def _unmerge(self: nn.Module, *args: Any, **options: Any) -> None:
    """In the place of ``unmerge`` of a peft layer, which its forward calls where adapters are disabled."""
    cast(Any, type(self)).unmerge(self, *args, **options)
    follow_layer(self)


def _reads_weights(args: tuple[Any, ...], options: dict[str, Any]) -> str:
    """How new adapters are made, where that reads the stock weight, as PiSSA and OLoRA do; else empty."""
    made = [
        options.get("init_lora_weights"),
        *(getattr(one, "init_lora_weights", None) for one in (*args, *options.values())),
    ]
    return next((one for one in made if isinstance(one, str) and one not in ("gaussian", "orthogonal", "eva")), "")


def _update_layer(self: nn.Module, *args: Any, **options: Any) -> None:
    """In the place of a peft layer's ``update_layer``: some initial adapters, as PiSSA's, are taken from the weight."""
    linear = cast(nn.Linear, self._modules["base_layer"])
    reads = _reads_weights(args, options)
    if reads:
        _bring_back(linear, reads, f"adapters of {reads} are taken from them")
    has_stock = not is_replaced(linear) and linear.weight.device.type != "meta"
    before = linear.weight.detach().clone() if has_stock else None
    cast(Any, type(self)).update_layer(self, *args, **options)
    if before is not None and not torch.equal(before, linear.weight):
        quantise_again(linear)
        site_of(linear).remark("weights quantised again, since new adapters were taken from them")


_WATCHED: dict[str, Callable[..., None]] = {"merge": _merge, "unmerge": _unmerge, "update_layer": _update_layer}


def _follow_layers(root: nn.Module) -> None:
    for module in root.modules():
        if below(module) is not None:
            follow_layer(module)


def is_behind(layer: nn.Module) -> bool:
    """Whether adapters were merged into a weight, or taken out, since it was quantised."""
    return merged(layer) != cast(nn.Module, layer._modules["base_layer"]).__dict__.get(MERGED, ())


def follow_layer(layer: nn.Module) -> None:
    """Quantises a weight again where it `is_behind`."""
    if not is_behind(layer):
        return
    linear = cast(nn.Linear, layer._modules["base_layer"])
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


def _save_pretrained(self: nn.Module, *args: Any, **options: Any) -> Any:
    if has_adapters(self) and any(map(is_freed, self.modules())):
        raise RuntimeError(
            "save_pretrained: expected stock weights, which are freed: save_lora_adapter saves the adapters, and "
            "report.save_weights the fp8 weights of a model without adapters"
        )
    return cast(Any, type(self)).save_pretrained(self, *args, **options)


_FOLLOWING = {name: _following(name) for name in CHANGING}
