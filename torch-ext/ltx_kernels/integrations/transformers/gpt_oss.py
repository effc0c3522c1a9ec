"""GPT-OSS: Llama's layer with sinks in the attention, and a mixture of experts whose activation is one launch.

The norms' weights are in float32, and the rotary tables hold each angle once. The model's own code runs the experts, in
a loop or as batched or grouped products, and calls ``_apply_gate`` on what the first product makes.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ...glu import swiglu_clamped
from ..causal.engine import CausalAttention
from ..engine.guards import why_not_input
from ..engine.norm_forms import transformers_class as _class
from ..engine.sites import Entry, site_of, why_stock
from ._pre_norm import Options, pre_norm_layer

GATE = "_apply_gate"


def _window_and_sinks(attention: Any, arguments: Mapping[str, Any]) -> Options:
    return {"sliding_window": attention.sliding_window, "s_aux": attention.sinks}


ATTENTION = CausalAttention((_class("gpt_oss", "GptOssAttention"),), half_tables=True, options=_window_and_sinks)


def _apply_gate(self: Any, gate_up: Tensor) -> Tensor:
    site = site_of(self)
    reason = why_stock(self) or why_not_input(gate_up, site.rounding)
    if reason:
        site.count_fallback(reason)
        stock: Tensor = type(self)._apply_gate(self, gate_up)
        return stock
    site.count_call()
    return swiglu_clamped(gate_up, alpha=self.alpha, limit=self.limit, rounding=site.rounding)


def experts_forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The stock forward, which finds another gate."""
    result: Tensor = site_of(self).stock(self, *args, **kwargs)
    return result


def _why_not_experts(experts: nn.Module) -> str:
    gate = experts.__dict__.get(GATE)
    ours = gate is None or getattr(gate, "__func__", None) is _apply_gate
    return "" if ours else f"its {GATE} is patched already"


def _prepare(experts: nn.Module) -> None:
    experts.__dict__[GATE] = types.MethodType(_apply_gate, experts)


def _release(experts: nn.Module) -> None:
    experts.__dict__.pop(GATE, None)


EXPERTS = Entry(
    (_class("gpt_oss", "GptOssExperts"),),
    experts_forward,
    ("swiglu_clamped",),
    ("hidden_states", "router_indices", "routing_weights"),
    why_not=_why_not_experts,
    prepare=_prepare,
    release=_release,
)

ENTRIES = (ATTENTION, EXPERTS, pre_norm_layer((_class("gpt_oss", "GptOssDecoderLayer"),), ATTENTION, None, casts=True))
