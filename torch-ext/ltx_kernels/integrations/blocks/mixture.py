"""Mixtures of gated MLPs: a gate chooses a few of several experts for each token, and one more MLP takes all tokens.

The tokens are sorted by expert, and a grouped product computes a layer of all experts. Where it cannot, each expert is
called, which asks the host how many tokens it gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...glu import swiglu
from ..engine.guards import ATTRIBUTE, children, class_of, hooked, why_not_input
from ..engine.recording import refuse
from ..engine.sites import Entry, Site, site_of
from ..linear.fp8 import in_fp8
from ..linear.linears import Linears, kept_layers
from ..linear.packing import unpack
from .gated_mlp import SILU, GatedMLP, arguments_by_name

# Compute capabilities for which torch compiles a grouped product. On others it computes one group after another, and
# asks the host for their sizes.
GROUPED = (9, 10)
HOST = "its experts get as many tokens as the gate gives them"


@dataclass(frozen=True)
class Mixture:
    """One class of mixtures, ``shared(x) + sum over i of weight[i] * experts[index[i]](x)``.

    classes: Names of the classes, with their modules.
    mlp: The description of the experts and of the shared MLP.
    parameter: The name of the stock forward's input.
    gate: The name of the module that returns (indices [tokens, chosen], weights [tokens, chosen], anything else).
    experts: The name of the list of experts.
    shared: The name of the MLP that takes all tokens.
    chosen: The attributes of the mixture and of its gate that say how many experts a token gets.
    """

    classes: tuple[str, ...]
    mlp: GatedMLP
    parameter: str = "x"
    gate: str = "gate"
    experts: str = "experts"
    shared: str = "shared_experts"
    chosen: tuple[str, str] = "num_activated_experts", "top_k"

    def packs(self, module: nn.Module) -> tuple[tuple[str, ...], ...]:
        """The experts' first layers, and their last ones."""
        names = [f"{self.experts}.{name}" for name in module._modules[self.experts]._modules]  # type: ignore[union-attr]
        first = tuple(f"{name}.{layer}" for name in names for layer in self.mlp.projections)
        return first, tuple(f"{name}.{self.mlp.down}" for name in names)

    def entry(self) -> Entry:
        """What `optimize` installs."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            return _mixture(self, module, arguments_by_name((self.parameter,), args, kwargs)[self.parameter])

        return Entry(
            self.classes,
            forward,
            ("swiglu",),
            (self.parameter,),
            frozenset((self.gate, self.experts, self.shared)),
            why_not=self._why_not_experts,
            packs=self.packs,
            release=lambda module: unpack(module, self.packs(module)),
        )

    def _why_not_experts(self, module: nn.Module) -> str:
        found = {class_of(expert) for expert in cast(nn.ModuleList, module._modules[self.experts])}
        unknown = sorted(found - set(self.mlp.classes))
        if self.mlp.activation or self.mlp.kind != SILU or not found:
            return "its experts have another activation than SiLU"
        return f"its expert is {unknown[0]}" if unknown else ""


class ExpertLayers:
    """The layers of all experts side by side, or the reason why each expert is called by itself."""

    __slots__ = ("down", "experts", "reason", "sites", "up")

    def __init__(self, module: nn.Module, spec: Mixture, input: Tensor) -> None:
        modules = list(cast(nn.ModuleList, module._modules[spec.experts]))
        site = site_of(module)
        self.experts = len(modules)
        self.sites: list[Site] = []  # of the experts
        self.reason = _why_not_grouped(input, site.rounding) or spec._why_not_experts(module)
        if any(ATTRIBUTE not in expert.__dict__ or hooked(expert) for expert in modules):
            self.reason = self.reason or "an expert has a hook, or was restored"
        if self.reason:
            return
        self.sites = list(map(site_of, modules))
        linears = [[cast(nn.Linear, expert._modules[name]) for name in spec.mlp.projections] for expert in modules]
        last = [cast(nn.Linear, expert._modules[spec.mlp.down]) for expert in modules]
        self.up = Linears([linear for of_expert in linears for linear in of_expert], input, site)
        self.down = Linears(last, input, site)
        if any(map(in_fp8, last)):
            self.reason = "in fp8"
        elif any(bias is not None for layers in (self.up, self.down) for bias in layers.biases):
            self.reason = "they have biases"

    def weights(self) -> Sequence[Tensor] | None:
        """Of all experts: [experts, 2 * hidden, width] and [experts, width, hidden]; None: call each expert."""
        if self.reason or not all(layers.direct and layers.packed for layers in (self.up, self.down)):
            return None
        found = [layers.stacked() for layers in (self.up, self.down)]
        if None in found:
            return None
        return [cast("list[Tensor]", stack)[0].unflatten(0, (self.experts, -1)) for stack in found]


def _why_not_grouped(input: Tensor, rounding: str) -> str:
    if rounding != "fp32":
        return f"rounding {rounding}"
    if input.device.type != "cuda":
        return ""
    if input.dtype != torch.bfloat16:
        return f"dtype {input.dtype}"
    major, minor = torch.cuda.get_device_capability(input.device)
    return "" if major in GROUPED else f"torch has no grouped product for compute capability {major}.{minor}"


def _mixture(spec: Mixture, module: nn.Module, input: Tensor) -> Tensor:
    """The stock forward."""
    site = site_of(module)
    site.count_call()
    reason = "under torch.compile" if torch.compiler.is_compiling() else why_not_input(input, site.rounding)
    if torch.is_grad_enabled() or module.training:
        reason = reason or "with gradients, or to be trained"
    gate, experts, shared = children(module, spec.gate, spec.experts, spec.shared)
    if module.__dict__[spec.chosen[0]] != gate.__dict__.get(spec.chosen[1]):
        reason = reason or "its gate chooses another number of experts"
    if reason:
        refuse(HOST)
        site.remark(f"experts called by the model's own code: {reason}")
        return cast(Tensor, site.stock(module, input))
    layers = kept_layers("experts", module, input, ExpertLayers, spec)
    weights = layers.weights()
    index, weight, *_ = gate(input)
    rows, order, ends = _sorted(input.reshape(-1, input.shape[-1]), index, layers.experts)
    if weights is None:
        refuse(HOST)
        site.remark(f"experts one by one: {layers.reason or 'adapters, hooks, or weights that lie apart'}")
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
        made = torch.cat([expert(part) for expert, part in zip(experts, rows.split(sizes)) if len(part)])
    else:
        for of_expert in layers.sites:
            of_expert.count_call("swiglu")
        hidden = swiglu(F.grouped_mm(rows, weights[0].transpose(1, 2), offs=ends))
        made = F.grouped_mm(hidden, weights[1].transpose(1, 2), offs=ends)
    chosen = _sums(made, order, weight).view(input.shape)
    return cast(Tensor, shared(input, addend=chosen) if spec.mlp.adds(shared) else chosen + shared(input))


def _sorted(rows: Tensor, index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows by expert, their places in ``index.flatten()``, the end of each expert's rows).

    rows: [tokens, width].
    index: Of each row's experts, [tokens, chosen].
    """
    flat = index.flatten()
    order = flat.argsort()
    ends = (flat.unsqueeze(1) <= torch.arange(experts, device=flat.device)).sum(0, dtype=torch.int32)
    return rows.index_select(0, order.div(index.shape[1], rounding_mode="floor")), order, ends


def _sums(made: Tensor, order: Tensor, weight: Tensor) -> Tensor:
    """For each token, the weighted sum of what its experts made, in their dtype: the reverse of `_sorted`.

    weight: [tokens, chosen]; in float32 under autocast, as softmax returns it.
    """
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return (made.index_select(0, back).view(*weight.shape, -1) * weight.unsqueeze(-1)).sum(1).to(made.dtype)
