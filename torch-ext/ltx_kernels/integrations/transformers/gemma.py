"""Gemma 2 and the text model of Gemma 3: a norm before and a norm after attention and MLP, with ``x * (1 + weight)``.

Gemma 3 normalises query and key as well. Each layer gets the rotary tables of its own kind, sliding or full.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..blocks.gated_mlp import GatedMLP
from ..blocks.stream import Stream
from ..causal.engine import LIVE, CausalAttention
from ..causal.kv_cache import CACHE, RENAMES
from ..engine.guards import children
from ..engine.norm_forms import OFFSET_NORMS
from ..engine.norm_forms import transformers_class as _class
from ..engine.rotary_tables import Tables
from ._layer import Layer
from ._pre_norm import Options, layer_window

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _window_and_softcap(attention: Any, arguments: Mapping[str, Any]) -> Options:
    return {"sliding_window": attention.sliding_window, "softcap": attention.attn_logit_softcapping}


def sandwich_layer(classes: tuple[str, ...], attention: CausalAttention, mlp: GatedMLP) -> Layer:
    """Decoder layers of these classes, whose attention and MLP are of the given ones."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Tables | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        norm1, norm2, norm3, norm4 = children(self, *NORMS)
        attn, ff = children(self, "self_attn", "mlp")
        h = Stream(self, hidden_states)
        attended = attn(
            hidden_states=h.norm(norm1, into="self_attn"),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CACHE: past_key_values},
            **kwargs,
        )
        h.add(attended[0], norm=norm2)
        h.add(ff(h.norm(norm3, into="mlp")), norm=norm4)
        return h.value()

    return Layer(
        classes,
        forward,
        renames=RENAMES,
        norms=dict.fromkeys(NORMS, OFFSET_NORMS),
        attentions={"self_attn": attention, "mlp": mlp},
        live=LIVE,
        ops=("norm_gated_residual_norm", "norm_residual", "rmsnorm"),
    )


GEMMA2 = CausalAttention((_class("gemma2", "Gemma2Attention"),), options=_window_and_softcap)
GEMMA3 = CausalAttention((_class("gemma3", "Gemma3Attention"),), norms=("q_norm", "k_norm"), options=layer_window)
MLP = GatedMLP((_class("gemma2", "Gemma2MLP"), _class("gemma3", "Gemma3MLP")))

ENTRIES = (
    GEMMA2,
    GEMMA3,
    MLP,
    sandwich_layer((_class("gemma2", "Gemma2DecoderLayer"),), GEMMA2, MLP),
    sandwich_layer((_class("gemma3", "Gemma3DecoderLayer"),), GEMMA3, MLP),
)
