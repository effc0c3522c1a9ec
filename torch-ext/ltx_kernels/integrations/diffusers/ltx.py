"""LTX-Video: blocks of self-attention, cross-attention and feed-forward, modulated by a table and the timestep.

The stock modules add table and timestep up in memory; the ops read both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..attention.description import Attention
from ..attention.masks import KeyBias
from ..blocks.block import Block
from ..blocks.feed_forward import feed_forward
from ..blocks.stream import RMSNORM, Stream, modulation
from ..engine.guards import children
from ..engine.rotary_tables import Tables
from ..parallel.context import Parallel, Splits
from ._ltx_rope import LTX, ROPE, stock_tables, tables


def _why_not_attention(attention: nn.Module, hidden_states: Tensor, text: Tensor | None, rope: Any) -> str:
    return (
        "self-attention without rotary table, or cross-attention with one" if (text is None) == (rope is None) else ""
    )


SELF = Attention(
    classes=(LTX + "LTXAttention",),
    processor=LTX + "LTXVideoAttnProcessor",
    parameters=("hidden_states", "encoder_hidden_states", "attention_mask", "image_rotary_emb", "kwargs"),
    across_heads=True,
    mask=KeyBias(),
    tables=tables,
    stock_rope=stock_tables,
    check=_why_not_attention,
    together_with=LTX + "LTXVideoRotaryPosEmbed",
)
CROSS = replace(SELF, cross=True)


def block_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Tables | None = None,
    encoder_attention_mask: Tensor | None = None,
) -> Tensor:
    norm1, attn1, norm2, attn2, ff = children(self, "norm1", "attn1", "norm2", "attn2", "ff")
    shift1, scale1, gate1, shift2, scale2, gate2 = modulation(temb, 6, self.scale_shift_table)
    h = Stream(self, hidden_states, promotes=True)
    x = h.norm(norm1, shift1, scale1, into="attn1")
    h.add(attn1(hidden_states=x, encoder_hidden_states=None, image_rotary_emb=image_rotary_emb), gate1)
    x = h.rows(into="attn2")
    h.add(
        attn2(
            hidden_states=x,
            encoder_hidden_states=encoder_hidden_states,
            attention_mask=encoder_attention_mask,
            image_rotary_emb=None,
        )
    )
    x = h.norm(norm2, shift2, scale2, into="ff")
    h.add(feed_forward(ff, x), gate2)
    return h.value()


def _why_not_block(block: Any, arguments: Mapping[str, Any]) -> str:
    temb: Tensor = arguments["temb"]
    fits = temb.dim() == 3 and temb.shape[-1] == block.scale_shift_table.numel()
    return "" if fits else f"a timestep embedding of shape {list(temb.shape)}"


BLOCK = Block(
    classes=(LTX + "LTXVideoTransformerBlock",),
    forward=block_forward,
    tensors=("temb", "scale_shift_table"),
    norms={"norm1": (RMSNORM,), "norm2": (RMSNORM,)},
    attentions={"attn1": SELF, "attn2": CROSS},
    feed_forwards=("ff",),
    fp8_skip=("*.attn2.to_k", "*.attn2.to_v", "*.attn2.to_out.0"),
    promotes=True,
    check=_why_not_block,
)


def _splits(model: Any) -> Splits:
    # A timestep of each token, of image-to-video, has two dimensions. One of each sample, [B] or [B, 1], stays whole.
    return {
        "": {"hidden_states": (1, 3), "timestep": (1, 2)},
        "rope": {0: (1, 3), 1: (1, 3)},
    }


# The stock plan splits the prompt: keys, values and mask of the cross-attentions would be exchanged.
PLANS = (Parallel(LTX + "LTXVideoTransformer3DModel", _splits, gather={"proj_out": [(1, 3)]}, local=("*.attn2",)),)

ENTRIES = (BLOCK, SELF, ROPE)
