"""The feed-forward of diffusion transformers: Linear and activation in one product where possible, Linear.

Only what is exactly diffusers' FeedForward, with an activation that was replaced and nothing that hooks it, is taken
apart; any other one is called as the module that it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Callable, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..._checks import requires_grad
from ..._linear import linear_cat
from ...glu import geglu, gelu, swiglu
from ...quant import geglu_quant, gelu_quant, swiglu_quant
from ..engine.guards import ATTRIBUTE, class_of, hooked, is_idle
from ..engine.recording import as_one
from ..linear.fp8 import in_fp8
from ..linear.linears import Linears, kept_layers, linear_gelu_of
from ..linear.products import Input

FEED_FORWARD = "diffusers.models.attention.FeedForward"
GELU = "diffusers.models.activations.GELU"
GEGLU = "diffusers.models.activations.GEGLU"
SWIGLU = "diffusers.models.activations.SwiGLU"
SILU = "torch.nn.modules.activation.SiLU"


class _Layers(NamedTuple):
    up: Linears
    down: Linears
    activation: str
    count_call: Callable[[], None]


def _layers(ff: nn.Module, input: Tensor) -> _Layers | None:
    """The layers of a feed-forward that may be taken apart; None: it has to be called."""
    if class_of(ff) != FEED_FORWARD:
        return None
    net = list(cast(nn.ModuleList, ff._modules["net"]))
    if len(net) < 3 or any(map(hooked, net[:2])):
        return None
    activation = net[0]
    if class_of(activation) not in (GELU, GEGLU, SWIGLU) or ATTRIBUTE not in activation.__dict__:
        return None
    if class_of(activation) == SWIGLU and why_not_swiglu(activation):
        return None
    if not all(map(is_idle, (net[1], *net[3:]))):
        return None
    site = activation.__dict__[ATTRIBUTE]
    up = Linears((cast(nn.Linear, activation._modules["proj"]),), input, site)
    down = Linears((cast(nn.Linear, net[2]),), input, site)
    gated = {GEGLU: "geglu", SWIGLU: "swiglu"}
    name = gated.get(class_of(activation)) or cast(str, activation.approximate)
    return _Layers(up, down, name, site.count_call)


def why_not_swiglu(module: nn.Module) -> str:
    """Why the op cannot stand in for the activation of diffusers' SwiGLU."""
    activation = cast(nn.Module, module._modules["activation"])
    if class_of(activation) != SILU or activation.inplace:
        return f"its activation is {activation}"
    reason = hooked(activation)
    return f"its activation {reason}" if reason else ""


def _known(ff: nn.Module, input: Input) -> _Layers | None:
    return None if hooked(ff) else kept_layers("feed-forward", ff, input, _layers)


def readers(ff: nn.Module, input: Tensor) -> Linears | None:
    """As `Entry.readers`."""
    if not any(map(in_fp8, _first(ff))):
        return None
    layers = _known(ff, input)
    return None if layers is None else layers.up


def _first(ff: nn.Module) -> Iterable[nn.Module]:
    """What stands in the place of a feed-forward's first linear layer; nothing in one of another class."""
    net = ff._modules.get("net")
    activation = None if net is None else net._modules.get("0")
    return () if activation is None else activation._modules.values()  # type: ignore[return-value]


def feed_forward(ff: nn.Module, input: Input) -> Tensor:
    """``ff(input)``, of a tensor, or of quantised rows where `readers` allowed them."""
    layers = _known(ff, input)
    if layers is None:
        return cast(Tensor, ff(input))
    layers.count_call()
    up, down, activation = layers.up, layers.down, layers.activation
    if down.fp8:
        return down(activated_rows(up, input, activation))[0]
    return down(activated(up, input, activation))[0]


def activated(up: Linears, input: Input, activation: str) -> Tensor:
    """One linear layer, then its activation."""
    if activation == "swiglu":
        return swiglu(up(input)[0], gate_first=False)
    if activation == "geglu":
        return geglu(up(input)[0], approximate="none", gate_first=False)
    if not up.fp8:
        output = linear_gelu_of(up, cast(Tensor, input), activation)
        if output is not None:
            return output
    return gelu(up(input)[0], approximate=activation)


def activated_rows(up: Linears, input: Input, activation: str, prefix: Tensor | None = None) -> Input:
    """The same after the columns of a prefix, quantised as one row."""
    (hidden,) = up(input)
    if activation == "swiglu":
        return swiglu_quant(hidden, gate_first=False, prefix=prefix)
    if activation == "geglu":
        return geglu_quant(hidden, approximate="none", gate_first=False, prefix=prefix)
    return gelu_quant(hidden, approximate=activation, prefix=prefix)


def beside_mlp(out: Linears, attended: Tensor, up: Linears, input: Input, module: nn.Module) -> Tensor:
    """``out(torch.cat((attended, activation(up(input))), -1))``: the last layer of MLP and attention side by side.

    module: torch.nn.GELU, or the torch.nn.SiLU of a SwiGLU, whose linear part comes before the gate.
    """
    activation = "swiglu" if type(module) is nn.SiLU else cast(str, module.approximate)
    if out.fp8:
        return out(activated_rows(up, input, activation, attended))[0]
    hidden = activated(up, input, activation)
    if out.direct:
        parts = attended, hidden
        if torch.is_grad_enabled() and requires_grad(*parts, out.weights[0], out.biases[0]):
            return linear_cat(parts, out.weights[0], out.biases[0])  # it decides by addresses without gradients alone
        return cast(Tensor, as_one(linear_cat, parts, out.weights[0], out.biases[0]))
    return out(torch.cat((attended, hidden), -1))[0]
