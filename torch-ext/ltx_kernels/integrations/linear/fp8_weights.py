"""Weights of linear layers in fp8: where the fp8 and the stock weight are, and whether they are as they were.

A weight is quantised once, per output channel. Where the stock weight stays beside, the fp8 one is a buffer that is not
saved. Otherwise the fp8 values take the place of the parameter's data, so that whatever moves the model's parameters
moves them, and the stock weight is held in the host's memory, or freed.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Container, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..._linear import joined_bits
from ...quant import quantize_weight
from ..engine.guards import is_ordinary
from ..engine.sites import site_of
from .frozen import Rows
from .lora import base_of, has_adapters, loads_adapters
from .offload import hooks_of, is_offload, is_offloaded
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

_QUANTISING = threading.Lock()  # held while a call changes weights that other threads may read


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
    weight, values = linear.weight, linear.weight.data
    stock = held_weight(linear).to(values.device)  # first, because memory may run out here
    version = Version(weight, stock)
    linear.register_buffer(VALUES, values, persistent=False)
    weight.data = stock
    linear.__dict__.update({STATE: BESIDE, QUANTISED: version, BACK: True})
    del linear.__dict__[STOCK]
    _tell_peft(linear, False)
    remove_hooks(linear)
    guard_loading(linear)


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
            remove_hooks(linear)


def _put_beside(linears: Sequence[nn.Linear], values: Tensor, scales: Tensor) -> None:
    start = 0
    for linear in linears:
        end = start + linear.out_features
        linear.register_buffer(SCALES, scales[start:end], persistent=False)
        linear.register_buffer(VALUES, values[start:end], persistent=False)
        _note(linear)
        linear.__dict__[PARAMETER] = linear.weight
        start = end


def _is_converted(linear: nn.Linear) -> bool:
    """Whether a conversion of the model, such as ``model.to(dtype)``, converted an fp8 weight BESIDE, or its scales."""
    values, scales = quantised_weight(linear)
    return values.dtype != torch.float8_e4m3fn or scales.dtype != torch.float32


def quantise_again(linear: nn.Linear) -> None:
    """Quantises the stock weight as it is now into the memory of the fp8 weight; into new one if it `_is_converted`."""
    quantised = quantize_weight(linear.weight.detach())
    if _is_converted(linear):
        for name, tensor in zip((VALUES, SCALES), quantised):
            linear.register_buffer(name, tensor, persistent=False)
    else:
        for here, tensor in zip(quantised_weight(linear), quantised):
            here.copy_(tensor)
    _note(linear)
    linear.__dict__[PARAMETER] = linear.weight


def _note(linear: nn.Linear) -> None:
    """Notes that the stock weight as it is now, which is BESIDE the fp8 weight, is the one that was quantised."""
    linear.__dict__[STATE], linear.__dict__[QUANTISED] = BESIDE, Version(linear.weight, linear.weight.data)


def held_weight(linear: nn.Module) -> Tensor:
    """The stock weight that is HELD, in the dtype that the model was converted to since, or what replaced it."""
    held, weight = cast(Tensor, linear.__dict__[STOCK]), linear._parameters.get("weight")
    if weight is None or weight.dtype == torch.float8_e4m3fn:
        return held
    return weight.data if has_new_values(linear) else held.to(weight.dtype)


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
    if _is_converted(linear):
        quantise_again(linear)
    remove_hooks(linear)
    linear.weight.data = cast(Tensor, linear._buffers.pop(VALUES))
    linear._non_persistent_buffers_set.discard(VALUES)
    _tell_peft(linear, True)
    linear.__dict__[STATE], linear.__dict__[QUANTISED] = state, Values(linear.weight, linear.__dict__.get(STOCK))
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
        return given if is_exchanged(linear) else held_weight(linear).to(given.device)
    if torch.compiler.is_compiling() or any(map(is_offloaded, site.living_roots)):
        site.remark(f"stock weights copied from the host for {reader}")
        return held_weight(linear).to(given.device)
    with _QUANTISING:
        if is_replaced(linear):
            bring_back(linear)
    site.remark(f"stock weights on the device again for {reader}")
    return linear.weight


def drop_weights(linear: nn.Module) -> None:
    """Undoes the quantisation for `restore`: the layer gets its stock weight back, and hooks and buffers go."""
    state, values = linear.__dict__, linear._parameters.get("weight")
    if values is None:  # pruning and parametrizations hold the parameter under another name
        values = state.get(PARAMETER)
    if values is not None and STOCK in state:  # first, because memory may run out here
        stock, is_ours = held_weight(linear), state.get(PARAMETER) is values
        if is_ours:
            values.data = stock.to(values.device)
        elif values.dtype == torch.float8_e4m3fn:  # accelerate has put in another parameter, perhaps on "meta"
            linear._parameters["weight"] = nn.Parameter(stock.to(values.device), values.requires_grad)
    state.pop(PARAMETER, None)
    state.pop(STOCK, None)
    remove_hooks(linear)
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


def holds_fp8(linear: nn.Module) -> bool:
    """Whether a linear layer, or the one below its adapters, has an fp8 weight, in whatever precision it multiplies."""
    return SCALES in base_of(linear)._buffers


# ---- Changes since a weight was quantised


def has_changed(linear: nn.Linear) -> bool:
    """Whether the stock weight is not what was quantised. Writes through `.data` into its memory are not seen."""
    if is_replaced(linear):
        return linear.weight.dtype != torch.float8_e4m3fn or is_overwritten(linear)
    # An offload of accelerate puts the same weight into a new parameter at every call.
    if is_exchanged(linear) and not any(map(is_offload, hooks_of(linear))):
        return True
    return not linear.__dict__[QUANTISED].is_of(linear.weight)


def is_trained(linear: nn.Linear) -> bool:
    """Whether a stock weight BESIDE had gradients or was loaded: all that torch.compile can ask about writes."""
    return not is_replaced(linear) and linear.__dict__[QUANTISED].number < 0


def is_exchanged(linear: nn.Module) -> bool:
    """Whether a layer has another parameter than the one that was quantised, as in torch.func.functional_call.

    torch.compile does not ask, because its parameters are stand-ins.
    """
    return not torch.compiler.is_compiling() and linear._parameters.get("weight") is not linear.__dict__[PARAMETER]


def is_overwritten(linear: nn.Linear) -> bool:
    """Whether the fp8 values were written to, whose scales are not known, or the stock weight they were made of."""
    weight, values = linear._parameters.get("weight"), cast(Values, linear.__dict__[QUANTISED])
    if weight is None or weight.dtype != torch.float8_e4m3fn:
        return False
    if not is_exchanged(linear):
        return values.stock_was_written() or values.were_written(weight)
    # An offload of accelerate casts the stock weight to the dtype of the parameter.
    return not any(map(is_offload, hooks_of(linear))) and not values.are_in(weight)


def has_new_values(linear: nn.Module) -> bool:
    """Whether a parameter that held fp8 values has new stock values. A conversion of the fp8 values does not count."""
    weight = linear._parameters.get("weight")
    if weight is None or weight.dtype == torch.float8_e4m3fn or torch.compiler.is_compiling():
        return False
    return is_replaced(linear) and not linear.__dict__[QUANTISED].are_in(weight)


def refuse_overwritten(linear: nn.Linear) -> None:
    """RuntimeError where a weight in fp8 `is_overwritten`."""
    if not is_overwritten(linear):
        return
    if linear.__dict__[QUANTISED].stock_was_written():
        raise RuntimeError(
            "weight: expected the stock weight that was quantised, got other values, written into a tensor of "
            "state_dict(): restore the model, which keeps them, and optimize again"
        )
    do = "load them into a new model" if is_freed(linear) else "restore the model, write them, and optimize again"
    raise RuntimeError(f"weight: expected values that were quantised, got others, written into fp8: {do}")


@torch.inference_mode(False)  # the weight outlives the call
def quantise_new_values(linear: nn.Linear) -> None:
    """Quantises the stock values that a parameter has; a HELD stock weight becomes these values."""
    with _QUANTISING:
        if not has_new_values(linear):  # another thread was first
            return
        weight = linear.weight
        values, scales = quantize_weight(weight.detach())
        if STOCK in linear.__dict__:
            linear.__dict__[STOCK] = weight.detach().to("cpu", copy=True)
        cast(Tensor, linear._buffers[SCALES]).copy_(scales)
        weight.data = values
        linear.__dict__[QUANTISED] = Values(weight, linear.__dict__.get(STOCK))
    site_of(linear).remark("weights quantised again, since their parameters were given other data")


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
    state[f"{prefix}weight"] = held_weight(module)


def _refuse_to_load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Runs before anything is loaded into the module that `load_state_dict` is called on, or below it."""
    for path, linear in module.named_modules(remove_duplicate=False):
        name = f"{prefix}{path}.weight" if path else f"{prefix}weight"
        if is_replaced(linear) and name in state:
            do = "load them into a new model" if is_freed(linear) else "restore the model, load, and optimize again"
            raise RuntimeError(
                f"state_dict: expected no stock weights of layers in fp8, got {name}, and nothing was loaded: {do}"
            )


def _note_loading(linear: Any, incompatible_keys: Any) -> None:
    if has_changed(linear):
        linear.__dict__[QUANTISED].number = -1


def guard_loading(root: nn.Module) -> None:
    """Has `load_state_dict` of a model and of its parts note stock weights BESIDE, and refuse those in fp8."""
    for module in root.modules():
        if module.__dict__.get(STATE) == BESIDE:
            handle = module.register_load_state_dict_post_hook(_note_loading)
        elif any(map(is_replaced, module.modules())):
            handle = module.register_load_state_dict_pre_hook(_refuse_to_load)
        else:
            continue
        module.__dict__.setdefault(HANDLES, []).append(handle)


def remove_hooks(module: nn.Module) -> None:
    for handle in module.__dict__.pop(HANDLES, ()):
        handle.remove()
