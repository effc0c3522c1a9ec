"""The feed-forward of diffusion transformers: Linear and activation in one product where possible, Linear.

Only what is exactly diffusers' FeedForward, with an activation that was replaced and nothing that hooks it, is taken
apart; any other one is called as the module that it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Callable, NamedTuple, cast

import torch
from torch import Tensor, nn

from .._linear import linear_cat
from ..glu import gelu, swiglu
from ..quant import gelu_quant, swiglu_quant
from ._fp8 import in_fp8
from ._guards import ATTRIBUTE, class_of, hooked, remember
from ._linear import Input, Linears, like_of, linear_gelu_of
from ._replay import as_one

FEED_FORWARD = "diffusers.models.attention.FeedForward"
GELU = "diffusers.models.activations.GELU"
DROPOUT = "torch.nn.modules.dropout.Dropout"


class _Layers(NamedTuple):
    up: Linears
    down: Linears
    approximate: str
    count_call: Callable[[], None]


def _layers(ff: nn.Module, input: Tensor) -> _Layers | None:
    """The layers of a feed-forward that may be taken apart; None: it has to be called."""
    if class_of(ff) != FEED_FORWARD:
        return None
    net = list(cast(nn.ModuleList, ff._modules["net"]))
    if len(net) < 3 or any(map(hooked, net[:2])):
        return None
    activation, down = net[0], net[2]
    if class_of(activation) != GELU or ATTRIBUTE not in activation.__dict__:
        return None
    if any(class_of(dropout) != DROPOUT or dropout.training or hooked(dropout) for dropout in (net[1], *net[3:])):
        return None
    up = Linears((cast(nn.Linear, activation._modules["proj"]),), input)
    site = activation.__dict__[ATTRIBUTE]
    return _Layers(up, Linears((cast(nn.Linear, down),), input), cast(str, activation.approximate), site.count_call)


def _known(ff: nn.Module, input: Tensor) -> _Layers | None:
    return None if hooked(ff) else remember(ff, (input.dtype, input.device), _layers, input)


def ff_input(ff: nn.Module, hidden_states: Tensor) -> Linears | None:
    """The linear layer that reads the input of a feed-forward, if it may be handed quantised rows instead."""
    if not any(map(in_fp8, _first(ff))):
        return None
    layers = _known(ff, hidden_states)
    return None if layers is None else layers.up


def _first(ff: nn.Module) -> Iterable[nn.Module]:
    """What stands in the place of a feed-forward's first linear layer; nothing in one of another class."""
    net = ff._modules.get("net")
    activation = None if net is None else net._modules.get("0")
    return () if activation is None else activation._modules.values()  # type: ignore[return-value]


def feed_forward(ff: nn.Module, input: Input) -> Tensor:
    """``ff(input)``, of a tensor or of the rows that `ff_input` allowed."""
    layers = _known(ff, like_of(input))
    if layers is None:
        return cast(Tensor, ff(input))
    layers.count_call()
    up, down, approximate = layers.up, layers.down, layers.approximate
    if down.fp8:
        (hidden,) = up(input)
        return down(gelu_quant(hidden, approximate=approximate))[0]
    return down(up_gelu(up, input, approximate))[0]


def up_gelu(up: Linears, input: Input, approximate: str) -> Tensor:
    """One linear layer, then GELU."""
    if not up.fp8:
        output = linear_gelu_of(up, cast(Tensor, input), approximate)
        if output is not None:
            return output
    (hidden,) = up(input)
    return gelu(hidden, approximate=approximate)


def beside_mlp(out: Linears, attended: Tensor, up: Linears, input: Input, activation: str) -> Tensor:
    """``out(torch.cat((attended, activation(up(input))), -1))``: the last layer of MLP and attention side by side.

    activation: "tanh", a GELU, or "swiglu" of a linear part with the gate behind it.
    """
    gated = activation == "swiglu"
    if out.fp8:
        (hidden,) = up(input)
        if gated:
            return out(swiglu_quant(hidden, gate_first=False, prefix=attended))[0]
        return out(gelu_quant(hidden, approximate=activation, prefix=attended))[0]
    activated = swiglu(up(input)[0], gate_first=False) if gated else up_gelu(up, input, activation)
    if out.direct:
        parts = attended, activated
        return cast(Tensor, as_one(linear_cat, parts, out.weights[0], out.biases[0]))
    return out(torch.cat((attended, activated), -1))[0]
