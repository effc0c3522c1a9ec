"""Norms and activations of diffusers and torch by themselves, wherever they stand in a model."""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from ...glu import geglu, gelu, swiglu
from ...norm import layernorm, rmsnorm
from ..blocks.feed_forward import GEGLU, GELU, SWIGLU, why_not_swiglu
from ..blocks.stream import RMSNORM, TORCH_LAYERNORM, TORCH_RMSNORM
from ..engine.autocast import layer_norm, rms_norm, why_not_result
from ..engine.guards import NormModule, children, why_not_input, why_not_norm_call
from ..engine.sites import Entry, site_of, stock_forward
from ..linear.linears import Linears, linear_gelu_of
from ..linear.products import may_overwrite


def rms_norm_forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
    site = site_of(self)
    reason = why_not_norm_call(self, hidden_states, site.rounding) or why_not_diffusers_rms_norm(self)
    if reason:
        return stock_forward(self, reason, hidden_states)
    site.count_call()
    eps = cast(NormModule, self).eps
    # The stock operations keep the order in memory, on which a view of what is computed from the result may rely.
    kept = may_overwrite() and not hidden_states.is_contiguous()
    out = torch.empty_like(hidden_states) if kept else None
    return rmsnorm(hidden_states, self._parameters.get("weight"), eps, rounding=site.rounding, out=out)


def torch_rms_norm_forward(self: nn.Module, x: Tensor) -> Tensor:
    reason = why_not_norm_call(self, x) or why_not_result(rms_norm, x)
    if reason:
        return stock_forward(self, reason, x)
    site_of(self).count_call()
    # torch's norm rounds once, after the weight.
    return rmsnorm(x, self._parameters.get("weight"), cast(NormModule, self).eps)


def layer_norm_forward(self: nn.Module, input: Tensor) -> Tensor:
    # At the first call of an op in a graph, inductor of torch 2.11 prints the op's whole producer graph. For the last
    # norm of LTX-Video, after 28 blocks, that does not finish.
    compiles = "torch.compile fuses it with what follows" if torch.compiler.is_compiling() else ""
    reason = compiles or why_not_norm_call(self, input) or why_not_result(layer_norm, input)
    if reason:
        return stock_forward(self, reason, input)
    site_of(self).count_call()
    parameters = self._parameters
    eps = cast(float, cast(NormModule, self).eps)
    return layernorm(input, parameters.get("weight"), parameters.get("bias"), eps)


def why_not_diffusers_rms_norm(module: nn.Module) -> str:
    return "it has a bias" if module._parameters.get("bias") is not None else ""


def why_not_torch_norm(module: nn.Module) -> str:
    dimensions = len(cast("tuple[int, ...]", module.normalized_shape))
    return f"it normalises {dimensions} dimensions" if dimensions != 1 else ""


class Activation(Protocol):
    """diffusers' GELU."""

    approximate: str


def gelu_forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
    reason = why_not_input(hidden_states, gradient=True)
    if reason:
        return stock_forward(self, reason, hidden_states)
    site_of(self).count_call()
    approximate = cast(Activation, self).approximate
    (linear,) = children(self, "proj")
    linears = Linears((linear,), hidden_states, site_of(self))
    output = linear_gelu_of(linears, hidden_states, approximate)
    return gelu(linears(hidden_states)[0], approximate=approximate) if output is None else output


def geglu_forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    reason = why_not_input(hidden_states, gradient=True) or ("further arguments" if args or kwargs else "")
    if reason:
        return stock_forward(self, reason, hidden_states, *args, **kwargs)
    site_of(self).count_call()
    (linear,) = children(self, "proj")
    return geglu(linear(hidden_states), approximate="none", gate_first=False)


def swiglu_forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
    reason = why_not_input(hidden_states, gradient=True) or why_not_swiglu(self)
    if reason:
        return stock_forward(self, reason, hidden_states)
    site_of(self).count_call()
    (linear,) = children(self, "proj")
    return swiglu(linear(hidden_states), gate_first=False)


ENTRIES = (
    Entry(
        (RMSNORM,),
        rms_norm_forward,
        ("rmsnorm",),
        ("hidden_states",),
        level="norms",
        why_not=why_not_diffusers_rms_norm,
    ),
    Entry((TORCH_RMSNORM,), torch_rms_norm_forward, ("rmsnorm",), ("x",), level="norms", why_not=why_not_torch_norm),
    Entry(
        (TORCH_LAYERNORM,), layer_norm_forward, ("layernorm",), ("input",), level="norms", why_not=why_not_torch_norm
    ),
    # The epilogue does not round before the GELU, so "eager" leaves it to torch.
    Entry((GELU,), gelu_forward, ("gelu",), ("hidden_states",), frozenset({"proj"}), roundings=("fp32",)),
    Entry(
        (GEGLU,),
        geglu_forward,
        ("geglu",),
        ("hidden_states", "args", "kwargs"),
        frozenset({"proj"}),
        roundings=("fp32",),
    ),
    Entry(
        (SWIGLU,),
        swiglu_forward,
        ("swiglu",),
        ("hidden_states",),
        frozenset({"proj", "activation"}),
        roundings=("fp32",),
        why_not=why_not_swiglu,
    ),
)
