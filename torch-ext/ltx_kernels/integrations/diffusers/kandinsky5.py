"""Kandinsky 5: self-attention, cross-attention to the text and MLP, each modulated and gated by the timestep.

The stock blocks compute norm, modulation and gated residual in float32 and cast each result. The blocks of the text
have no cross-attention. The stock rotation rounds to bfloat16 in any dtype, so that self-attentions of other dtypes
stay stock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..attention.description import Attention
from ..blocks.block import Block
from ..blocks.gated_mlp import PlainMLP
from ..blocks.stream import TORCH_LAYERNORM, Stream, modulation
from ..engine.guards import children, fits_batch
from ..engine.rotary_tables import of_matrices

KANDINSKY5 = "diffusers.models.transformers.transformer_kandinsky.Kandinsky5"


def _why_not_attention(attention: Any, hidden_states: Any, context: Tensor | None, rope: Tensor | None) -> str:
    weight = attention.query_norm._parameters.get("weight")  # quantised rows do not tell the model's dtype
    fits = rope is None or (weight is not None and weight.dtype == torch.bfloat16)
    return "" if fits else "the stock rotation rounds to bfloat16"


SELF = Attention(
    classes=(KANDINSKY5 + "Attention",),
    processor=KANDINSKY5 + "AttnProcessor",
    parameters=("hidden_states", "encoder_hidden_states", "sparse_params", "rotary_emb", "kwargs"),
    rope="rotary_emb",
    projections=("to_query", "to_key", "to_value"),
    norms=("query_norm", "key_norm"),
    heads="num_heads",
    output="out_layer",
    tables=of_matrices,
    check=_why_not_attention,
)
CROSS = replace(SELF, cross=True)
MLP = PlainMLP((KANDINSKY5 + "FeedForward",), projections=("in_layer",), activation="activation", down="out_layer")


def _why_not_block(block: Any, arguments: Mapping[str, Any]) -> str:
    stream: Tensor = arguments["x" if "x" in arguments else "visual_embed"]
    return "" if fits_batch(arguments["time_embed"], len(stream)) else "a time embedding of another batch size"


def text_forward(self: Any, x: Tensor, time_embed: Tensor, rope: Tensor) -> Tensor:
    norm1, attention, norm2, ff = children(
        self, "self_attention_norm", "self_attention", "feed_forward_norm", "feed_forward"
    )
    shift1, scale1, gate1, shift2, scale2, gate2 = modulation(self.text_modulation(time_embed), 6)
    h = Stream(self, x)
    h.add(attention(h.norm(norm1, shift1, scale1, into="self_attention"), rotary_emb=rope), gate1)
    h.add(ff(h.norm(norm2, shift2, scale2, into="feed_forward")), gate2)
    return h.value()


def visual_forward(
    self: Any, visual_embed: Tensor, text_embed: Tensor, time_embed: Tensor, rope: Tensor, sparse_params: Any
) -> Tensor:
    norm1, attention = children(self, "self_attention_norm", "self_attention")
    norm2, cross_attention = children(self, "cross_attention_norm", "cross_attention")
    norm3, ff = children(self, "feed_forward_norm", "feed_forward")
    mods = modulation(self.visual_modulation(time_embed), 9)
    shift1, scale1, gate1, shift2, scale2, gate2, shift3, scale3, gate3 = mods
    h = Stream(self, visual_embed)
    rows = h.norm(norm1, shift1, scale1, into="self_attention")
    h.add(attention(rows, rotary_emb=rope, sparse_params=sparse_params), gate1)
    rows = h.norm(norm2, shift2, scale2, into="cross_attention")
    h.add(cross_attention(rows, encoder_hidden_states=text_embed), gate2)
    h.add(ff(h.norm(norm3, shift3, scale3, into="feed_forward")), gate3)
    return h.value()


TEXT = Block(
    classes=(KANDINSKY5 + "TransformerEncoderBlock",),
    forward=text_forward,
    children=frozenset({"text_modulation"}),
    streams=("x",),
    norms=dict.fromkeys(("self_attention_norm", "feed_forward_norm"), (TORCH_LAYERNORM,)),
    attentions={"self_attention": SELF, "feed_forward": MLP},
    fp8_skip=("text_transformer_blocks.*",),
    casts=True,
    check=_why_not_block,
)
VISUAL = Block(
    classes=(KANDINSKY5 + "TransformerDecoderBlock",),
    forward=visual_forward,
    children=frozenset({"visual_modulation"}),
    streams=("visual_embed",),
    norms={**TEXT.norms, "cross_attention_norm": (TORCH_LAYERNORM,)},
    attentions={"self_attention": SELF, "cross_attention": CROSS, "feed_forward": MLP},
    fp8_skip=("*.cross_attention.to_key", "*.cross_attention.to_value", "*.cross_attention.out_layer"),
    casts=True,
    check=_why_not_block,
)

ENTRIES = (SELF, MLP, TEXT, VISUAL)
