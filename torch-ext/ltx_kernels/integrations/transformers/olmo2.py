"""OLMo 2: norms stand after attention and MLP alone; query and key are normalised over all heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..blocks.gated_mlp import GatedMLP
from ..blocks.stream import Stream
from ..causal.engine import LIVE, CausalAttention
from ..causal.kv_cache import CACHE, RENAMES
from ..engine.guards import children
from ..engine.norm_forms import NORMS
from ..engine.norm_forms import transformers_class as _class
from ..engine.rotary_tables import Tables
from ._layer import Layer

ATTENTION = CausalAttention(
    (_class("olmo2", "Olmo2Attention"),), norms=("q_norm", "k_norm"), across_heads=True, casts=True
)
MLP = GatedMLP((_class("olmo2", "Olmo2MLP"),))


def layer_forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    position_embeddings: Tables | None = None,
    **kwargs: Any,
) -> Tensor:
    attn, norm1, ff, norm2 = children(
        self, "self_attn", "post_attention_layernorm", "mlp", "post_feedforward_layernorm"
    )
    h = Stream(self, hidden_states)
    attended = attn(
        hidden_states=h.rows(into="self_attn"),
        attention_mask=attention_mask,
        position_ids=position_ids,
        **{CACHE: past_key_values},
        use_cache=use_cache,
        position_embeddings=position_embeddings,
        **kwargs,
    )
    h.add(attended[0], norm=norm1)
    h.add(ff(h.rows(into="mlp")), norm=norm2)
    return h.value()


ENTRIES = (
    ATTENTION,
    MLP,
    Layer(
        (_class("olmo2", "Olmo2DecoderLayer"),),
        layer_forward,
        renames=RENAMES,
        norms={"post_attention_layernorm": NORMS, "post_feedforward_layernorm": NORMS},
        attentions={"self_attn": ATTENTION, "mlp": MLP},
        live=LIVE,
        ops=("norm_residual",),
    ),
)
