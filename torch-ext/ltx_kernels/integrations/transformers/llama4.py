"""Llama 4: Llama's layers, with a rotation by complex numbers before the norms of query and key, or none at all.

Layers without a rotation scale the query by its position. A mixture of experts stays the model's, but for its MLP that
all tokens share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...rope import apply_rotary_qk
from ..blocks.gated_mlp import GatedMLP
from ..blocks.stream import Stream
from ..causal.engine import LIVE, CausalAttention
from ..causal.kv_cache import CACHE, RENAMES
from ..engine.guards import children
from ..engine.norm_forms import LLAMA4_NORM
from ..engine.norm_forms import transformers_class as _class
from ..engine.recording import as_one
from ..engine.rotary_tables import of_complex
from ..engine.sites import site_of
from ._layer import Layer
from ._pre_norm import through_mlp

MLP_NAME = "feed_forward"


def _scaled(module: Any, query: Tensor, cache: Any) -> Tensor:
    """A query [B, S, heads, D] times a number that grows with the logarithm of the position."""
    before = 0 if cache is None else cache.get_seq_length(module.layer_idx)
    count = (torch.arange(1, query.shape[1] + 1, device=query.device) + before).float()
    scale = 1 + module.attn_scale * (count / module.floor_scale).floor().log1p()
    return (query * scale.view(-1, 1, 1)).to(query.dtype)


def _turn(module: Any, query: Tensor, key: Tensor, rope: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
    norm = module._modules.get("qk_norm")
    site_of(module).count_call(*(("apply_rotary_qk",) if module.use_rope else ()))
    if module.use_rope:
        # In either rounding the stock rotation computes in float32.
        query, key = apply_rotary_qk(query, key, *as_one(of_complex, module, rope), layout="interleaved")
    if norm is not None:
        query, key = norm(query), norm(key)
    if module.attn_temperature_tuning and not module.use_rope:
        query = as_one(_scaled, module, query, cache)
    return query, key


ATTENTION = CausalAttention(
    (_class("llama4", "Llama4TextAttention"),),
    turn=_turn,
    turns_by=("apply_rotary_qk",),
    optional_children=("qk_norm",),
)
MLP = GatedMLP((_class("llama4", "Llama4TextMLP"),), activation="activation_fn")


def layer_forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    position_embeddings: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    norm, attn = children(self, "input_layernorm", "self_attn")
    h = Stream(self, hidden_states)
    attended = attn(
        hidden_states=h.norm(norm, into="self_attn"),
        position_embeddings=position_embeddings,
        attention_mask=attention_mask,
        **{CACHE: past_key_values},
        use_cache=use_cache,
        **kwargs,
    )
    h.add(attended[0])
    return through_mlp(self, h, MLP, MLP_NAME)


ENTRIES = (
    ATTENTION,
    MLP,
    Layer(
        (_class("llama4", "Llama4TextDecoderLayer"),),
        layer_forward,
        renames=RENAMES,
        norms={"input_layernorm": (LLAMA4_NORM,), "post_attention_layernorm": (LLAMA4_NORM,)},
        attentions={"self_attn": ATTENTION, MLP_NAME: MLP},
        live=LIVE,
        ops=("rmsnorm", "rmsnorm_residual"),
    ),
)
