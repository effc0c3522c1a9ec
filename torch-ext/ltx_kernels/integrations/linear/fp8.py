"""Linear layers with weights in fp8: the layer's own forward.

The forward quantises its input row by row, so that whatever calls the layer works; a fused block hands over rows that
an op has quantised already. With gradients on, a block hands over no such rows, and the weights count as frozen
(frozen.py).
"""

from __future__ import annotations

import copy
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..engine.autocast import autocast_dtype
from ..engine.guards import ATTRIBUTE, why_not_input
from ..engine.sites import Entry, site_of, stock_forward, why_stock
from .fp8_weights import (
    ALONE,
    CHANGING,
    LINEAR_CLASS,
    QUANTISED,
    drop_weights,
    has_changed,
    has_new_values,
    held_weight,
    is_exchanged,
    is_freed,
    is_replaced,
    is_trained,
    quantise_new_values,
    quantised_weight,
    refuse_overwritten,
    remove_hooks,
    why_not_fp8,
)
from .frozen import Layers, rows_of
from .lora import base_of
from .offload import is_on_disk, tell_offload
from .products import count_products


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
    if is_replaced(linear) and is_exchanged(linear):
        return "another parameter is in the place of the fp8 weight"
    if values.dtype != torch.float8_e4m3fn or values.device != input.device:
        return "the fp8 weight was converted or is on another device"
    if torch.is_grad_enabled() and linear.weight.requires_grad and not is_replaced(linear):
        linear.__dict__[QUANTISED].number = -1  # fused optimizers leave the version of a weight as it is
        return "a gradient of its weight is needed"
    if is_trained(linear) if torch.compiler.is_compiling() else has_changed(linear):
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
    if is_replaced(self) and is_exchanged(self) and given is not None:
        if given.dtype == input.dtype or has_new_values(self):
            return cast(Tensor, stock_forward(self, reason, input))
    elif is_replaced(self) and has_new_values(self):
        quantise_new_values(self)
        return cast(Tensor, site.forward(self, input))
    if is_replaced(self) and not torch.compiler.is_compiling():
        refuse_overwritten(self)
    if is_freed(self):
        raise RuntimeError(
            f"fp8 cannot run this call ({reason}), and the weight is {ALONE}: load the model again to run it stock"
        )
    if is_replaced(self):
        if given is None:
            raise RuntimeError(f'fp8 cannot run this call ({reason}): optimize with stock_weights="beside" for it')
        site.count_fallback(reason)
        weight = held_weight(self).to(input.device)
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


def _release_root(root: nn.Module) -> None:
    for name in (*CHANGING, "save_pretrained"):
        root.__dict__.pop(name, None)
    for module in root.modules():
        if "base_layer" in module._modules:
            for name in ("merge", "unmerge", "update_layer"):
                module.__dict__.pop(name, None)
        if not any(map(is_replaced, module.modules())):
            remove_hooks(module)
    tell_offload(root)
