"""MiniMax H3: one stream of video, text and audio, self-attention and SwiGLU MLP, modulated by time and kind of token.

Each token takes a row of the modulation by its index. A part of each head's columns is rotated. The blocks that refine
the text have neither modulation nor rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..attention.description import Attention
from ..attention.masks import ScoresMask
from ..blocks.block import Block
from ..blocks.feed_forward import feed_forward
from ..blocks.stream import TORCH_RMSNORM, Stream, modulation
from ..engine.guards import children
from ..engine.rotary_tables import Tables

MINIMAX_H3 = "diffusers.models.transformers.transformer_minimax_h3.MiniMaxH3"


def _why_not_attention(attention: Any, hidden_states: Any, context: Tensor | None, rope: Tables | None) -> str:
    half = rope is not None and 2 * rope[0].shape[-1] == attention.head_dim
    return "a rotation of half of the columns" if half else ""  # the op reads such a table as one entry for each pair


ATTENTION = Attention(
    classes=(MINIMAX_H3 + "Attention",),
    processor=MINIMAX_H3 + "AttnProcessor",
    parameters=("hidden_states", "rotary_emb", "attention_mask"),
    rope="rotary_emb",
    layout="half",
    fuses=True,
    mask=ScoresMask(),
    check=_why_not_attention,
)


def block_forward(
    self: Any,
    hidden_states: Tensor,
    temb: Tensor,
    adaln_indices: Tensor,
    rotary_emb: Tables,
    attention_mask: Tensor | None = None,
) -> Tensor:
    norm1, attn, norm2, ff = children(self, "norm1", "attn", "norm2", "ff")
    # The row kernel reads no index at this width. One launch writes a row for each token, where stock takes six.
    rows = torch.hstack(self.adaln_proj(temb)).index_select(0, adaln_indices)
    shift1, scale1, gate1, shift2, scale2, gate2 = modulation(rows.unsqueeze(0), 6)
    h = Stream(self, hidden_states)
    h.add(attn(h.norm(norm1, shift1, scale1, into="attn"), rotary_emb, attention_mask), gate1)
    h.add(feed_forward(ff, h.norm(norm2, shift2, scale2, into="ff")), gate2)
    return h.value()


def text_forward(self: Any, hidden_states: Tensor) -> Tensor:
    norm1, attn, norm2, ff = children(self, "norm1", "attn", "norm2", "ff")
    h = Stream(self, hidden_states)
    h.add(attn(h.norm(norm1, into="attn")))
    h.add(feed_forward(ff, h.norm(norm2, into="ff")))
    return h.value()


def _why_not_block(block: Any, arguments: Mapping[str, Any]) -> str:
    fits = arguments["adaln_indices"].shape == arguments["hidden_states"].shape[1:2]
    return "" if fits else "adaln_indices has not a row for each token"


BLOCK = Block(
    classes=(MINIMAX_H3 + "TransformerBlock",),
    forward=block_forward,
    children=frozenset({"adaln_proj"}),
    norms={"norm1": (TORCH_RMSNORM,), "norm2": (TORCH_RMSNORM,)},
    attentions={"attn": ATTENTION},
    feed_forwards=("ff",),
    check=_why_not_block,
)
TEXT = Block(
    classes=(MINIMAX_H3 + "TokenRefinerBlock",),
    forward=text_forward,
    norms=BLOCK.norms,
    attentions=BLOCK.attentions,
    feed_forwards=("ff",),
    fp8_skip=("token_refiner.*",),
    ops=("rmsnorm", "rmsnorm_residual"),
)

ENTRIES = (ATTENTION, BLOCK, TEXT)
