"""Norms of language models.

The report names each norm that is left alone, with the reason. Norms of different models look alike, but their formulas
differ: with Gemma's formula in the place of Llama's, a model computes something else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torch import Tensor, nn

from ...glu import swiglu
from ...norm import rmsnorm
from ..blocks.gated_mlp import ACTIVATIONS, SILU
from ..engine.code import patched
from ..engine.guards import class_of, name_of, why_not_input, why_not_norm_weight, why_not_tensor
from ..engine.norm_forms import LANGUAGE_FORMS, LLAMA4_NORMS, NORMS, OFFSET_NORMS, form_of
from ..engine.norm_forms import transformers_class as _class
from ..engine.sites import Entry, site_of, stock_forward


def rms_norm_forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
    form = form_of(self)
    if form is None:
        return stock_forward(self, f"its class is {class_of(self)} now", hidden_states)
    # A module that rounds twice returns the wider dtype where its weight has one.
    site = site_of(self)
    reason = why_not_input(hidden_states, site.rounding) or why_not_norm_weight(
        self,  # type: ignore[arg-type]
        hidden_states,
        casts=not form.twice,
    )
    if reason:
        return stock_forward(self, reason, hidden_states)
    site.count_call()
    return form.rms(self, hidden_states, site.rounding)


def rms_norm_forward_of_x(self: nn.Module, x: Tensor) -> Tensor:
    return rms_norm_forward(self, x)


def _why_not_silu(norm: nn.Module) -> str:
    """Why a gated norm's activation is not torch's SiLU; empty if it is."""
    name = norm.__dict__.get("activation")
    if name is None:  # the class calls torch's function by itself, as in earlier releases of transformers
        return ""
    found = dict.get(sys.modules["transformers.activations"].ACT2FN, name)  # without an instance of it
    if not isinstance(found, type) or ACTIVATIONS.get(name_of(found)) != SILU:
        return f"its activation is {name}"
    return patched(found)


def gated_rms_norm_forward(self: nn.Module, hidden_states: Tensor, gate: Tensor) -> Tensor:
    site = site_of(self)
    reason = (
        why_not_input(hidden_states, site.rounding)
        or why_not_tensor("gate", gate, hidden_states)
        or why_not_norm_weight(self, hidden_states)  # type: ignore[arg-type]
        or ("" if gate.shape == hidden_states.shape else "its gate has another shape than its input")
        or _why_not_silu(self)
    )
    if reason:
        return stock_forward(self, reason, hidden_states, gate)
    site.count_call()
    weight, eps = self._parameters["weight"], self.__dict__["variance_epsilon"]
    # In either rounding the class activates the gate and multiplies by it in float32.
    return swiglu(gate, rmsnorm(hidden_states, weight, eps, rounding=site.rounding))


GATED_NORMS = (
    _class("qwen3_next", "Qwen3NextRMSNormGated"),
    _class("qwen3_5", "Qwen3_5RMSNormGated"),
    _class("qwen3_5_moe", "Qwen3_5MoeRMSNormGated"),
)

ENTRIES = (
    Entry(NORMS, rms_norm_forward, ("rmsnorm",), ("hidden_states",), level="norms"),
    Entry((*OFFSET_NORMS, *LLAMA4_NORMS), rms_norm_forward_of_x, ("rmsnorm",), ("x",), level="norms"),
    Entry(GATED_NORMS, gated_rms_norm_forward, ("rmsnorm", "swiglu"), ("hidden_states", "gate"), level="norms"),
)

# What these do otherwise than the classes above.
DIFFERENT: Mapping[str, str] = {
    _class("kimi_linear", "KimiLinearRMSNormGated"): "its gate is a sigmoid",
}


def why_unknown(module: nn.Module) -> str:
    """Why a norm of transformers, or of a class made from one, has no entry; empty for what is no such norm."""
    for base in map(name_of, type(module).__mro__[1:]):
        if base in LANGUAGE_FORMS:
            return f"{class_of(module)} is a subclass of {base}, and may do something else"
    name = class_of(module)
    if name in DIFFERENT:
        return f"{name}: {DIFFERENT[name]}"
    # The name decides what is reported, never what is replaced.
    library = name.partition(".")[0]
    if library in ("transformers", "transformers_modules") and "Norm" in type(module).__name__ and not module._modules:
        return f"{name} is not known"
    return ""
