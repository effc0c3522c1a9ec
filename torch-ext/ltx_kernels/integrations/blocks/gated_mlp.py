"""MLPs of language models and of diffusion transformers: ``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...glu import geglu, swiglu
from ...quant import geglu_quant, swiglu_quant
from ..engine.guards import ATTRIBUTE, class_of, hooked, is_idle, submodule, why_not_input
from ..engine.sites import Entry, site_of, stock_forward
from ..linear.fp8 import in_fp8
from ..linear.linears import Linears, kept_layers
from ..linear.packing import unpack
from ..linear.products import Input, as_tensor, may_overwrite
from .feed_forward import activated, activated_rows

# What activation modules compute, by the name of their class.
SILU, TANH, ERF = "silu", "tanh", "none"
ACTIVATIONS = {
    "torch.nn.modules.activation.SiLU": SILU,
    "diffusers.models.activations.FP32SiLU": SILU,
    "transformers.activations.SiLUActivation": SILU,
    "transformers.activations.GELUTanh": TANH,
    "transformers.activations.NewGELUActivation": TANH,
    "transformers.activations.FastGELUActivation": TANH,
    "transformers.activations.GELUActivation": ERF,
}

TORCH_GELU = "torch.nn.modules.activation.GELU"
# They multiply what their `gate_fn` computes by the linear part.
GATED = (
    "diffusers.models.transformers.transformer_flux2.Flux2SwiGLU",
    "diffusers.models.transformers.transformer_flux3.Flux3SwiGLU",
)


def kind_of(activation: nn.Module | None) -> str:
    """What an activation module computes: SILU, TANH or ERF; empty for a module of any other class."""
    if class_of(activation) == TORCH_GELU:
        return cast(str, activation.approximate)  # type: ignore[union-attr]
    if class_of(activation) in GATED:
        return kind_of(activation._modules["gate_fn"])  # type: ignore[union-attr]
    return ACTIVATIONS.get(class_of(activation), "")


def arguments_by_name(parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(parameters, args)), **kwargs} if args else dict(kwargs)


class Projections:
    """What both descriptions say of the linear layers that read a module's input."""

    projections: tuple[str, ...]

    def packs(self, module: nn.Module) -> tuple[tuple[str, ...], ...]:
        """Groups of linear layers whose weights should lie side by side."""
        return (self.projections,) if len(self.projections) > 1 else ()


@dataclass(frozen=True)
class GatedMLP(Projections):
    """One class of gated MLPs, ``down(act(gate(x)) * up(x))``.

    classes: Names of the classes, with their modules.
    parameter: The name of the stock forward's input.
    projections: Names of the layers for gate and up; one name where a layer holds both, gate first.
    activation: The name of the activation module; empty where the forward itself computes it.
    kind: What the forward itself computes: SILU, TANH, or ERF for the exact GELU.
    down: The name of the last layer.
    dropout: The name of a dropout before it; empty where there is none.
    mixtures: Names of the classes of mixtures whose experts are such MLPs; their own code calls the experts.
    """

    classes: tuple[str, ...]
    parameter: str = "x"
    projections: tuple[str, ...] = ("gate_proj", "up_proj")
    activation: str = "act_fn"
    kind: str = SILU
    down: str = "down_proj"
    dropout: str = ""
    mixtures: tuple[str, ...] = ()
    gated: ClassVar[bool] = True

    def groups(self, module: nn.Module, prefix: str) -> list[tuple[str, ...]]:
        """The linear layers of a module that share an input, by their names after a prefix, for fp8."""
        if class_of(module) in self.mixtures:
            experts = {n: m for n, m in module.named_modules() if class_of(m) in self.classes}
            return [group for name, expert in experts.items() for group in self.groups(expert, f"{prefix}.{name}")]
        if class_of(module) not in self.classes:
            return []
        present = [name for name in self.projections if module._modules.get(name) is not None]
        return [tuple(f"{prefix}.{name}" for name in present), (f"{prefix}.{self.down}",)]

    def readers(self, module: nn.Module, input: Tensor) -> Linears | None:
        """As `Entry.readers`."""
        first = module._modules.get(self.projections[0])
        if first is None or not in_fp8(first) or hooked(module):
            return None
        layers = kept_layers("mlp", module, input, MLPLayers, self)
        return None if layers.reason else layers.up

    def adds(self, module: nn.Module) -> bool:
        """Whether a module's forward takes ``addend``, a tensor that its output is added to in place."""
        site = module.__dict__.get(ATTRIBUTE)
        return site is not None and site.rounding == "fp32" and may_overwrite() and not hooked(module)

    def entry(self) -> Entry:
        """What `optimize` installs."""

        def forward(module: nn.Module, *args: Any, addend: Tensor | None = None, **kwargs: Any) -> Tensor:
            input = arguments_by_name((self.parameter,), args, kwargs)[self.parameter]
            return _mlp(self, module, input, addend)

        return Entry(
            self.classes,
            forward,
            ("swiglu", "geglu") if self.gated else ("gelu",),
            (self.parameter,),
            frozenset(filter(None, (*self.projections, self.down, self.activation, self.dropout))),
            why_not=self._why_not_activation,
            packs=self.packs,
            release=lambda module: unpack(module, self.packs(module)),
            readers=GatedMLP.readers,
        )

    def _why_not_activation(self, module: nn.Module) -> str:
        if not self.activation:
            return ""
        activation = submodule(module, self.activation)
        fits = kind_of(activation) in ((SILU, TANH, ERF) if self.gated else (TANH, ERF))
        return "" if fits else f"{self.activation} is {class_of(activation)}"


@dataclass(frozen=True)
class PlainMLP(GatedMLP):
    """One class of MLPs without a gate, ``down(act(up(x)))``; `projections` names the one layer before the GELU."""

    gated: ClassVar[bool] = False


class MLPLayers:
    """The layers of an MLP in the forms that their state allows, or the reason why its calls run stock."""

    __slots__ = ("activation", "down", "reason", "up")

    def __init__(self, module: nn.Module, spec: GatedMLP, input: Tensor) -> None:
        modules = module._modules
        activation = modules[spec.activation] if spec.activation else None
        self.activation = spec.kind if activation is None else kind_of(activation)
        self.reason = spec._why_not_activation(module)
        for part in () if self.reason or activation is None else activation.modules():
            self.reason = self.reason or (f"{spec.activation} {hooked(part)}" if hooked(part) else "")
        dropout = modules.get(spec.dropout)
        if dropout is not None and not is_idle(dropout):
            self.reason = f"{spec.dropout} is active or has a hook"
        site = site_of(module)
        pack = site.rounding == "fp32"
        self.up = Linears([cast(nn.Linear, modules[name]) for name in spec.projections], input, site, pack)
        down = cast(nn.Linear, modules[spec.down])
        if getattr(getattr(down, "weight", None), "dtype", input.dtype) == torch.float32 != input.dtype:
            self.reason = f"{spec.down} is in float32"  # T5 keeps it so, and casts before it
        self.down = Linears((down,), input, site)


def _mlp(spec: GatedMLP, module: nn.Module, input: Input, addend: Tensor | None) -> Tensor:
    """The stock forward; a layer that asked `Entry.readers` may hand over rows of fp8.

    addend: From a layer that asked `GatedMLP.adds`: what the output is added to.
    """
    # Rows are of a block, which has just asked.
    reason = "" if isinstance(input, tuple) else why_not_input(input, site_of(module).rounding, gradient=True)
    if not reason:
        layers = kept_layers("mlp", module, input, MLPLayers, spec)
        reason = layers.reason
    if reason:
        output = cast(Tensor, stock_forward(module, reason, as_tensor(input)))
        return output if addend is None else addend + output
    site, up, down = site_of(module), layers.up, layers.down
    if not spec.gated:
        site.count_call("gelu")
        rows = activated_rows if down.fp8 else activated
        hidden: Input = rows(up, input, layers.activation)
        return down(hidden)[0] if addend is None else down.add_to(addend, hidden)
    gate_up = (up.together(input),) if up.packed else up(input)
    if len(gate_up) == 2 and site.rounding == "fp32":
        site.count("unpacked")
    if layers.activation == SILU:
        site.count_call("swiglu")
        hidden = swiglu_quant(*gate_up) if down.fp8 else swiglu(*gate_up, rounding=site.rounding)
    else:
        site.count_call("geglu")
        approximate = layers.activation
        if down.fp8:
            hidden = geglu_quant(*gate_up, approximate=approximate)
        else:
            hidden = geglu(*gate_up, approximate=approximate, rounding=site.rounding)
    return down(hidden)[0] if addend is None else down.add_to(addend, hidden)
