"""Wan 2.1 and 2.2, Animate, ChronoEdit: self-attention, cross-attention to text and image, MLP.

The stock blocks compute norm, modulation and gated residual in float32 and cast each result, which is what the ops do.
Modulation is a table plus the timestep's, per sample or, in TI2V, per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..attention.description import Attention
from ..attention.masks import ScoresMask
from ..blocks.block import Block
from ..blocks.feed_forward import feed_forward
from ..blocks.stream import FP32_LAYERNORM, Mod, Stream, modulation_of
from ..engine.guards import children
from ..engine.rotary_tables import Tables, halves

MODELS = "diffusers.models.transformers.transformer_"
IDENTITY = "torch.nn.modules.linear.Identity"


def _tables(attention: Any, rope: Tables) -> Tables:
    """[1, S, D / 2] of the stock [1, S, 1, D]."""
    cos, sin = halves(attention, rope)
    return cos.squeeze(2), sin.squeeze(2)


SELF = Attention(
    classes=(MODELS + "wan.WanAttention",),
    processor=MODELS + "wan.WanAttnProcessor",
    parameters=("hidden_states", "encoder_hidden_states", "attention_mask", "rotary_emb", "kwargs"),
    rope="rotary_emb",
    across_heads=True,
    image=("add_k_proj", "add_v_proj", "norm_added_k"),
    text=512,
    fuses=True,
    mask=ScoresMask(),
    tables=_tables,
    parallel_cross=False,
)
CROSS = replace(SELF, cross=True)
COPIES = tuple(
    replace(SELF, classes=(f"{MODELS}{module}.WanAttention",), processor=f"{MODELS}{module}.WanAttnProcessor")
    for module in ("wan_animate", "chronoedit")
)


def modulation(temb: Tensor, dim: int, table: Tensor) -> list[Mod]:
    """Shift, scale and gate of the self-attention and of the MLP, which lie side by side in dimension `dim`.

    `from_pretrained` keeps the table in float32 beside a 16-bit embedding. The row kernel takes vectors of one dtype,
    so they are added here. A modulation for each token (4 dimensions) is not: it would take the memory of six streams.
    The model makes that tensor. Its tokens have one or two different times, but how many they are is known on the GPU
    alone, so that an index of a few rows would make the host wait in every step.
    """
    if temb.dim() == 3 and temb.dtype != table.dtype:
        return modulation_of((table + temb).unbind(dim))
    return modulation_of(temb.unbind(dim), table)


def forward(block: Any, value: Tensor, text: Tensor, mods: list[Any], rotary_emb: Tables, mask: Any = None) -> Tensor:
    """The body that all these blocks share."""
    norm1, attn1, norm2, attn2, norm3, ffn = children(block, "norm1", "attn1", "norm2", "attn2", "norm3", "ffn")
    shift1, scale1, gate1, shift2, scale2, gate2 = mods
    h = Stream(block, value)
    h.add(attn1(h.norm(norm1, shift1, scale1, into="attn1"), None, mask, rotary_emb), gate1)
    h.add(attn2(h.norm(norm2, into="attn2"), text, None, None))
    h.add(feed_forward(ffn, h.norm(norm3, shift2, scale2, into="ffn")), gate2)
    return h.value()


def block_forward(
    self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb: Tables
) -> Tensor:
    mods = modulation(temb, -2, self.scale_shift_table[0])
    return forward(self, hidden_states, encoder_hidden_states, mods, rotary_emb)


def _why_not_block(block: Any, arguments: Mapping[str, Any]) -> str:
    temb: Tensor = arguments["temb"]
    fits = temb.dim() in (3, 4) and temb.shape[-2] == 6
    return "" if fits else f"a timestep embedding of shape {list(temb.shape)}"


BLOCK = Block(
    classes=tuple(f"{MODELS}{module}.WanTransformerBlock" for module in ("wan", "wan_animate", "chronoedit")),
    forward=block_forward,
    tensors=("temb", "scale_shift_table"),
    norms={"norm1": (FP32_LAYERNORM,), "norm2": (FP32_LAYERNORM, IDENTITY), "norm3": (FP32_LAYERNORM,)},
    attentions={"attn1": SELF, "attn2": CROSS},
    feed_forwards=("ffn",),
    fp8_skip=(
        *("*.attn2.to_k", "*.attn2.to_v", "*.attn2.add_*_proj", "*.attn2.to_kv", "*.attn2.to_added_kv"),
        "*.attn2.to_out.0",
    ),
    casts=True,
    check=_why_not_block,
)

ENTRIES = (SELF, *COPIES, BLOCK)
