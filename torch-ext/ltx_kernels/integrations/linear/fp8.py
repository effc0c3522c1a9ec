"""Linear layers with weights in fp8: where the fp8 and the stock weight are, and the layer's own forward.

A weight is quantised once, per output channel. Where the stock weight stays beside, the fp8 one is a buffer that is not
saved. Otherwise the fp8 values take the place of the parameter's data, so that whatever moves the model's parameters
moves them, and the stock weight is held in the host's memory, or freed. The forward quantises its input row by row, so
that whatever calls the layer works; a fused block hands over rows that an op has quantised already. With gradients
on, a block hands over no such rows, and the weights count as frozen (frozen.py).
"""

from __future__ import annotations

import copy
import types
from collections.abc import Container, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._linear import joined_bits
from ...quant import quantize_weight
from ..engine.autocast import autocast_dtype
from ..engine.guards import ATTRIBUTE, is_ordinary, why_not_input
from ..engine.sites import Entry, site_of, stock_forward, why_stock
from .frozen import Layers, Rows, rows_of
from .lora import base_of, has_adapters, loads_adapters
from .offload import hooks_of, is_offload, is_offloaded, is_on_disk, tell_offload
from .products import count_products
from .written import Values, Version

LINEAR_CLASS = "torch.nn.modules.linear.Linear"
BESIDE, HELD, FREED = STOCK_WEIGHTS = "beside", "cpu", "free"  # the values of the argument `stock_weights`
VALUES, SCALES = "ltx_fp8_values", "ltx_fp8_scales"  # names of buffers
# Attributes of a quantised layer.
STATE = "_ltx_fp8_of"  # where the stock weight is: BESIDE, HELD or FREED
QUANTISED = "_ltx_fp8_quantised"  # the `Version` that was quantised, or the `Values` that the parameter holds for it
STOCK = "_ltx_fp8_stock"  # the stock weight, where it is HELD
PARAMETER = "_ltx_fp8_parameter"  # the parameter that was quantised; it holds the fp8 values where they are not BESIDE
HANDLES = "_ltx_fp8_handles"  # handles of the hooks on saving and loading; what holds such a layer has it too
BACK = "_ltx_fp8_back"  # set where the stock weight is HELD but for the time in which adapters are merged into it
MERGED = "_ltx_fp8_merged"  # the adapters that were merged into the stock weight when it was quantised
# What peft asks a layer for whose weight is quantised: a tensor of the layer's device, and a function.
HQQ_WEIGHT, DEQUANTIZE = "W_q", "dequantize"
# Methods of diffusers' models that write to weights through `.data`, which leaves `_version` as it is.
CHANGING = ("fuse_lora", "unfuse_lora", "unload_lora", "fuse_qkv_projections")

ALONE = 'in fp8 alone (stock_weights="free" or weights=...)'


def why_not_fp8(linear: nn.Linear) -> str:
    """Why the weight of a linear layer cannot be quantised; empty if it can."""
    if not is_ordinary(linear.weight) or linear.weight.device.type == "meta":
        return f"its weight is no ordinary parameter ({type(linear.weight).__name__} on {linear.weight.device})"
    return why_not_shape(linear)


def why_not_shape(linear: nn.Linear) -> str:
    """Why a layer has no products in fp8, whatever its weight is; empty if it has."""
    if linear.in_features % 16 or linear.out_features % 16:
        return f"fp8 GEMMs need multiples of 16, not {linear.in_features} x {linear.out_features}"
    return ""


def quantised_weight(linear: nn.Linear) -> Rows:
    """The fp8 weight [out, in] and its scales [out], which need no gradient."""
    values = linear._buffers.get(VALUES)
    if values is None:
        values = cast(Tensor, linear._parameters["weight"])
        if torch.is_grad_enabled():  # autograd saves it, and `bring_back` may give the parameter other data meanwhile
            values = values.detach()
    return values, cast(Tensor, linear._buffers[SCALES])


def quantise_weights(linears: Sequence[nn.Linear], stock_weights: str, shared: Container[int]) -> None:
    """Quantises the weights of layers that share an input. The fp8 weights are adjacent in one storage.

    stock_weights: HELD moves the stock weights to the host. With BESIDE and FREED they stay; `finish` frees them.
    """
    quantised = [quantize_weight(linear.weight) for linear in linears]
    _put_beside(linears, *map(joined_bits, zip(*quantised)))
    for linear in linears if stock_weights == HELD else ():
        if id(linear.weight) not in shared:
            hold(linear)


def hold(linear: nn.Linear) -> None:
    """Moves a stock weight that lies beside the fp8 weight to the host's memory."""
    linear.__dict__.pop(BACK, None)
    linear.__dict__[STOCK] = linear.weight.data.cpu()
    _replace(linear, HELD, linear.register_state_dict_post_hook(_save_stock))


@torch.inference_mode(False)  # the weight outlives the call
def bring_back(linear: nn.Linear) -> None:
    """Undoes `hold` for as long as adapters need the stock weight, which then lies beside the fp8 weight."""
    values = linear.weight.data
    linear.weight.data = _held(linear).to(values.device)  # first, because memory may run out here
    del linear.__dict__[STOCK]
    _tell_peft(linear, False)
    _remove_hooks(linear)
    linear.register_buffer(VALUES, values, persistent=False)
    _note(linear)
    linear.__dict__[BACK] = True


def put_loaded_weights(
    linears: Sequence[nn.Linear], values: Tensor, scales: Tensor, by_quantizer: bool = False
) -> None:
    """Gives layers fp8 weights that were quantised before, in the place of stock weights.

    by_quantizer: The model's own ``save_pretrained`` writes them, since a quantizer of its library adds the scales.
    """
    for linear in linears:
        if linear.weight.device.type == "meta":
            empty = torch.empty(0, dtype=linear.weight.dtype, device=values.device)
            linear._parameters["weight"] = nn.Parameter(empty, linear.weight.requires_grad)
    _put_beside(linears, values, scales)
    for linear in linears:
        free_weight(linear)
        if by_quantizer:
            _remove_hooks(linear)


def _put_beside(linears: Sequence[nn.Linear], values: Tensor, scales: Tensor) -> None:
    start = 0
    for linear in linears:
        end = start + linear.out_features
        linear.register_buffer(SCALES, scales[start:end], persistent=False)
        linear.register_buffer(VALUES, values[start:end], persistent=False)
        _note(linear)
        linear.__dict__[PARAMETER] = linear.weight
        start = end


def quantise_again(linear: nn.Linear) -> None:
    """Quantises the stock weight as it is now into the memory of the fp8 weight."""
    for here, tensor in zip(quantised_weight(linear), quantize_weight(linear.weight)):
        here.copy_(tensor)
    _note(linear)
    linear.__dict__[PARAMETER] = linear.weight


def _note(linear: nn.Linear) -> None:
    """Notes that the stock weight as it is now, which is BESIDE the fp8 weight, is the one that was quantised."""
    linear.__dict__[STATE], linear.__dict__[QUANTISED] = BESIDE, Version(linear.weight)


def _held(linear: nn.Module) -> Tensor:
    """The stock weight that is HELD, in the dtype that the model was converted to since, or what replaced it."""
    held, weight = cast(Tensor, linear.__dict__[STOCK]), linear._parameters.get("weight")
    if weight is None or weight.dtype == torch.float8_e4m3fn:
        return held
    return weight.data if _has_new_values(linear) else held.to(weight.dtype)


def held_dtypes(root: nn.Module) -> dict[str, torch.dtype]:
    """The dtypes of the stock weights that are HELD, by the names of the parameters that hold fp8 values."""
    return {f"{name}.weight": m.__dict__[STOCK].dtype for name, m in root.named_modules() if STOCK in m.__dict__}


def free_weight(linear: nn.Linear) -> int:
    """Frees a stock weight that lies beside the fp8 weight; returns its size in bytes."""
    size = linear.weight.nbytes
    _replace(linear, FREED, linear.register_state_dict_post_hook(_refuse_to_save))
    return size


def _replace(linear: nn.Linear, state: str, *handles: Any) -> None:
    """Makes the fp8 values the data of the layer's parameter, in the place of the stock weight."""
    linear.weight.data = cast(Tensor, linear._buffers.pop(VALUES))
    linear._non_persistent_buffers_set.discard(VALUES)
    _tell_peft(linear, True)
    linear.__dict__[STATE], linear.__dict__[QUANTISED] = state, Values(linear.weight)
    linear.__dict__[HANDLES] = list(handles)


def _tell_peft(linear: nn.Module, is_replaced: bool) -> None:
    """What peft reads of a layer: the dtype of new adapters, and where DoRA finds the stock weight."""
    state = linear.__dict__
    if is_replaced:
        state["compute_dtype"] = torch.bfloat16
        state[HQQ_WEIGHT], state[DEQUANTIZE] = linear._parameters["weight"], types.MethodType(dequantize, linear)
        return
    for name in ("compute_dtype", HQQ_WEIGHT, DEQUANTIZE):
        state.pop(name, None)


def dequantize(linear: nn.Linear) -> Tensor:
    """The stock weight of a layer whose parameter holds the fp8 values, for an adapter that computes with it.

    It stays on the device from then on. Under an offload, and in torch.compile, each call copies it instead.
    """
    site, reader = site_of(linear), "adapters that read them, such as DoRA"
    if is_freed(linear):
        raise RuntimeError(f"stock_weights: expected 'cpu' or 'beside' for {reader}, got a weight {ALONE}")
    given = linear.weight
    if given.dtype != torch.float8_e4m3fn:
        # An offload of accelerate has put the stock weight in its place, or the fp8 values were converted.
        return given if _is_exchanged(linear) else _held(linear).to(given.device)
    if torch.compiler.is_compiling() or any(map(is_offloaded, site.living_roots)):
        site.remark(f"stock weights copied from the host for {reader}")
        return _held(linear).to(given.device)
    bring_back(linear)
    site.remark(f"stock weights on the device again for {reader}")
    return linear.weight


def drop_weights(linear: nn.Module) -> None:
    """Undoes the quantisation for `restore`: the layer gets its stock weight back, and hooks and buffers go."""
    state, values = linear.__dict__, linear._parameters.get("weight")
    if values is None:  # pruning and parametrizations hold the parameter under another name
        values = state.get(PARAMETER)
    if values is not None and STOCK in state:  # first, because memory may run out here
        stock, is_ours = _held(linear), state.get(PARAMETER) is values
        if is_ours:
            values.data = stock.to(values.device)
        elif values.dtype == torch.float8_e4m3fn:  # accelerate has put in another parameter, perhaps on "meta"
            linear._parameters["weight"] = nn.Parameter(stock.to(values.device), values.requires_grad)
    state.pop(PARAMETER, None)
    state.pop(STOCK, None)
    _remove_hooks(linear)
    for name in (VALUES, SCALES):
        linear._buffers.pop(name, None)
        linear._non_persistent_buffers_set.discard(name)
    if state.pop(STATE, BESIDE) in (HELD, FREED):
        _tell_peft(linear, False)
    for name in (QUANTISED, MERGED, BACK):
        state.pop(name, None)


def is_replaced(linear: nn.Module) -> bool:
    """Whether the parameter holds the fp8 values, and not the stock weight."""
    return linear.__dict__.get(STATE) in (HELD, FREED)


def is_freed(linear: nn.Module) -> bool:
    return linear.__dict__.get(STATE) == FREED


# ---- Saving and loading of stock weights


def _refuse_to_save(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    if loads_adapters():
        return
    if not any(map(has_adapters, site_of(module).living_roots)):
        raise RuntimeError(
            f"{prefix}weight is {ALONE} and cannot be saved as a stock weight: report.save_weights saves it in fp8"
        )
    del state[f"{prefix}weight"]  # what is left has the adapters, for peft


def _save_stock(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    state[f"{prefix}weight"] = _held(module)


def _refuse_to_load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Runs before anything is loaded into the module that `load_state_dict` is called on, or below it."""
    for path, linear in module.named_modules(remove_duplicate=False):
        name = f"{prefix}{path}.weight" if path else f"{prefix}weight"
        if is_replaced(linear) and name in state:
            do = "load them into a new model" if is_freed(linear) else "restore the model, load, and optimize again"
            raise RuntimeError(
                f"state_dict: expected no stock weights of layers in fp8, got {name}, and nothing was loaded: {do}"
            )


def guard_loading(root: nn.Module) -> None:
    """Has `load_state_dict` of a model, and of every part that holds layers in fp8, refuse their stock weights."""
    for module in root.modules():
        if any(map(is_replaced, module.modules())):
            handle = module.register_load_state_dict_pre_hook(_refuse_to_load)
            module.__dict__.setdefault(HANDLES, []).append(handle)


def _remove_hooks(module: nn.Module) -> None:
    for handle in module.__dict__.pop(HANDLES, ()):
        handle.remove()


# ---- The forward


def has_changed(linear: nn.Linear) -> bool:
    """Whether the stock weight is not what was quantised. Writes through `.data` into its memory are not seen."""
    if is_replaced(linear):
        return linear.weight.dtype != torch.float8_e4m3fn or _is_overwritten(linear)
    # An offload of accelerate puts the same weight into a new parameter at every call.
    if _is_exchanged(linear) and not any(map(is_offload, hooks_of(linear))):
        return True
    return not linear.__dict__[QUANTISED].is_of(linear.weight)


def _is_exchanged(linear: nn.Module) -> bool:
    """Whether a layer has another parameter than the one that was quantised, as in torch.func.functional_call.

    torch.compile does not ask, because its parameters are stand-ins.
    """
    return not torch.compiler.is_compiling() and linear._parameters.get("weight") is not linear.__dict__[PARAMETER]


def _is_overwritten(linear: nn.Linear) -> bool:
    """Whether other fp8 values stand in the place of those that were quantised. Their scales are not known."""
    weight, values = linear._parameters.get("weight"), cast(Values, linear.__dict__[QUANTISED])
    if weight is None or weight.dtype != torch.float8_e4m3fn:
        return False
    if not _is_exchanged(linear):
        return values.were_written(weight)
    # An offload of accelerate casts the stock weight to the dtype of the parameter.
    return not any(map(is_offload, hooks_of(linear))) and not values.are_in(weight)


def _has_new_values(linear: nn.Module) -> bool:
    """Whether a parameter that held fp8 values has new stock values. A conversion of the fp8 values does not count."""
    weight = linear._parameters.get("weight")
    if weight is None or weight.dtype == torch.float8_e4m3fn or torch.compiler.is_compiling():
        return False
    return is_replaced(linear) and not linear.__dict__[QUANTISED].are_in(weight)


@torch.inference_mode(False)  # the weight outlives the call
def _quantise_new_values(linear: nn.Linear) -> None:
    """Quantises the stock values that a parameter has; a HELD stock weight becomes these values."""
    weight = linear.weight
    values, scales = quantize_weight(weight.detach())
    if STOCK in linear.__dict__:
        linear.__dict__[STOCK] = weight.detach().to("cpu", copy=True)
    cast(Tensor, linear._buffers[SCALES]).copy_(scales)
    weight.data = values
    linear.__dict__[QUANTISED] = Values(weight)
    site_of(linear).remark("weights quantised again, since their parameters were given other data")


def why_not_fp8_input(input: Tensor) -> str:
    """Why the product of an input cannot be in fp8; empty if it can."""
    if input.dtype != torch.bfloat16:
        return f"fp8 takes bfloat16 activations, not {input.dtype}"
    return why_not_input(input, gradient=True)


def why_not_fp8_weight(linear: nn.Linear, input: Tensor) -> str:
    """Why the product with the fp8 weight cannot run; empty if it can."""
    if "weight" not in linear._parameters:
        return "its weight is parametrized"
    values, _ = quantised_weight(linear)
    if is_replaced(linear) and _is_exchanged(linear):
        return "another parameter is in the place of the fp8 weight"
    if values.dtype != torch.float8_e4m3fn or values.device != input.device:
        return "the fp8 weight was converted or is on another device"
    if torch.is_grad_enabled() and linear.weight.requires_grad and not is_replaced(linear):
        if not torch.compiler.is_compiling():
            linear.__dict__[QUANTISED].number = -1  # fused optimizers leave the version of a weight as it is
        return "a gradient of its weight is needed"
    if not torch.compiler.is_compiling() and has_changed(linear):
        return "the weight has changed or was trained since it was quantised: call optimize again"
    return ""


def _linear_forward(self: nn.Linear, input: Tensor) -> Tensor:
    if autocast_dtype(input) == torch.bfloat16:
        input = input.to(torch.bfloat16)  # as autocast has every linear layer read it
    reason = why_stock(self) or why_not_fp8_input(input) or why_not_fp8_weight(self, input)
    if not reason:
        rows = rows_of(input)
        count_products((self,), rows)
        return Layers(*quantised_weight(self), self._parameters["bias"]).product(input, rows)
    return run_stock(self, reason, input)


def run_stock(self: nn.Linear, reason: str, input: Tensor) -> Tensor:
    """The layer's output by its stock weight, counted as a fallback."""
    site, given = site_of(self), self._parameters.get("weight")
    if is_replaced(self) and _is_exchanged(self) and given is not None:
        if given.dtype == input.dtype or _has_new_values(self):
            return cast(Tensor, stock_forward(self, reason, input))
    elif is_replaced(self) and _has_new_values(self):
        _quantise_new_values(self)
        return cast(Tensor, site.forward(self, input))
    if is_replaced(self) and not torch.compiler.is_compiling() and _is_overwritten(self):
        do = "load them into a new model" if is_freed(self) else "restore the model, write them, and optimize again"
        raise RuntimeError(f"weight: expected values that were quantised, got others, written into fp8: {do}")
    if is_freed(self):
        raise RuntimeError(
            f"fp8 cannot run this call ({reason}), and the weight is {ALONE}: load the model again to run it stock"
        )
    if is_replaced(self):
        if given is None:
            raise RuntimeError(f'fp8 cannot run this call ({reason}): optimize with stock_weights="beside" for it')
        site.count_fallback(reason)
        weight = _held(self).to(input.device)
        if not why_stock(self):
            return F.linear(input, weight, self.bias)
        copied = copy.copy(self)
        copied._parameters = {**self._parameters, "weight": nn.Parameter(weight, requires_grad=False)}
        return type(self).forward(copied, input)
    return cast(Tensor, stock_forward(self, reason, input))


def _why_not_restored(linear: nn.Module) -> str:
    return f"its weight is {ALONE}: load the model again" if is_freed(linear) else ""


def _why_not_root(root: nn.Module) -> str:
    """Why no layer of a whole model can have its stock weight back; empty if each can."""
    replaced = [module for module in root.modules() if is_replaced(module)]
    roots = [root, *site_of(replaced[0]).living_roots] if replaced else []
    return "its fp8 weights are on disk (offload_to_disk_path): load it again" if any(map(is_on_disk, roots)) else ""


LINEAR = Entry(
    (LINEAR_CLASS,),
    _linear_forward,
    ("quantize_rows", "scaled_linear"),
    ("input",),
    why_not=lambda module: why_not_fp8(cast(nn.Linear, module)),
    why_not_replicated=lambda module: "a replica would read fp8 values as its weight" if is_replaced(module) else "",
    why_not_restored=_why_not_restored,
    why_not_root=_why_not_root,
    release=drop_weights,
    release_root=lambda root: _release_root(root),
    guarded=True,
)


def in_fp8(linear: nn.Module) -> bool:
    """Whether a linear layer, or the one below its adapters, multiplies in fp8."""
    site = base_of(linear).__dict__.get(ATTRIBUTE)
    return site is not None and site.entry is LINEAR


def holds_fp8(linear: nn.Module) -> bool:
    """Whether a linear layer, or the one below its adapters, has an fp8 weight, in whatever precision it multiplies."""
    return SCALES in base_of(linear)._buffers


def _release_root(root: nn.Module) -> None:
    for name in (*CHANGING, "save_pretrained"):
        root.__dict__.pop(name, None)
    for module in root.modules():
        if "base_layer" in module._modules:
            for name in ("merge", "unmerge", "update_layer"):
                module.__dict__.pop(name, None)
        if not any(map(is_replaced, module.modules())):
            _remove_hooks(module)
    tell_offload(root)
