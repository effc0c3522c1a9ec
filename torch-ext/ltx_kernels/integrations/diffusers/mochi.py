"""Mochi 1: blocks of two streams, video and text, with RMS norms around attention and SwiGLU MLP, and tanh gates.

The streams differ in width and meet in one attention, whose rotation has angles of its own for every head. The last
block leaves the text as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention.description import Attention
from ..attention.masks import PaddingMask
from ..blocks.block import Block
from ..blocks.feed_forward import feed_forward
from ..blocks.stream import RMSNORM, Mod, Stream, modulation_by
from ..engine.guards import children
from ..engine.kept import kept
from ..engine.norm_forms import MOCHI_RMSNORM
from ..engine.rotary_tables import Tables
from ..engine.sites import site_of

MOCHI = "diffusers.models.transformers.transformer_mochi.Mochi"
GENERIC = "diffusers.models.attention_processor.Mochi"


@dataclass(frozen=True)
class _MovedPadding(PaddingMask):
    """As the stock processor: what valid tokens of the text get moves to the front, and zeros follow."""

    def text_of(self, text: Tensor, mask: Tensor) -> Tensor:
        result = super().text_of(text, mask)
        if text.shape[1] < mask.shape[1]:  # trimmed, so the valid tokens come first
            return result
        order = torch.argsort((~mask.bool()).int(), dim=1, stable=True)
        return result.gather(1, order.unsqueeze(-1).expand_as(result))


def _tables(attention: Any, rope: Tables) -> Tables:
    """[1, heads, S, D / 2] each, of the stock [S, heads, D / 2]."""
    cos, sin = rope

    def make() -> Tables:
        return cos.transpose(0, 1).unsqueeze(0).contiguous(), sin.transpose(0, 1).unsqueeze(0).contiguous()

    return kept(site_of(attention), "of heads", rope, make)


ATTENTION = Attention(
    classes=(GENERIC + "Attention",),
    processor=GENERIC + "AttnProcessor2_0",
    parameters=("hidden_states", "encoder_hidden_states", "attention_mask", "kwargs"),
    norm=MOCHI_RMSNORM,
    added=True,
    text_first=False,
    rotates_text=False,
    mask=_MovedPadding(of_text=True),
    tables=_tables,
)


def _tanh(gate: Mod) -> Mod:
    return Mod(gate.value.tanh())


def _finish(h: Stream, block: Any, attended: Tensor, mods: list[Mod], names: tuple[str, ...]) -> Tensor:
    """A stream after the attention's result and the feed-forward. names: norm2, norm3, ff, norm4."""
    gate1, scale2, gate2 = mods
    norm2, norm3, ff, norm4 = children(block, *names)
    h.add(attended, _tanh(gate1), norm2._modules["norm"])
    rows = h.norm(norm3._modules["norm"], None, scale2, into=names[2])
    h.add(feed_forward(ff, rows), _tanh(gate2), norm4._modules["norm"])
    return h.value()


VIDEO = ("norm2", "norm3", "ff", "norm4")
TEXT = ("norm2_context", "norm3_context", "ff_context", "norm4_context")


def block_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    encoder_attention_mask: Tensor,
    image_rotary_emb: Tables | None = None,
) -> tuple[Tensor, Tensor]:
    norm1, norm1_context, attn = children(self, "norm1", "norm1_context", "attn1")
    video, text = Stream(self, hidden_states), Stream(self, encoder_hidden_states)
    scale, *mods = modulation_by(norm1, temb, 4)
    text_mods: list[Mod] = []
    if self.context_pre_only:
        silu, linear, modulated = children(norm1_context, "silu", "linear_1", "norm")
        text_scale, text_norm = Mod(linear(silu(temb))), modulated._modules["norm"]
    else:
        text_scale, *text_mods = modulation_by(norm1_context, temb, 4)
        text_norm = norm1_context._modules["norm"]
    attended, text_attended = attn(
        hidden_states=video.norm(norm1._modules["norm"], None, scale, into="attn1"),
        encoder_hidden_states=text.norm(text_norm, None, text_scale),
        image_rotary_emb=image_rotary_emb,
        attention_mask=encoder_attention_mask,
    )
    result = _finish(video, self, attended, mods, VIDEO)
    if self.context_pre_only:
        return result, encoder_hidden_states
    return result, _finish(text, self, text_attended, text_mods, TEXT)


MODULATED = (MOCHI + "ModulatedRMSNorm",)
WITHOUT_TEXT = ("norm2_context.norm", "norm3_context.norm", "norm1_context.norm.norm")

BLOCK = Block(
    classes=(MOCHI + "TransformerBlock",),
    forward=block_forward,
    optional_children=frozenset({"norm2_context", "norm3_context", "ff_context", *WITHOUT_TEXT}),
    streams=("hidden_states", "encoder_hidden_states"),
    tensors=("temb",),
    norms=dict.fromkeys(
        ("norm1.norm", "norm2.norm", "norm3.norm", "norm4.norm", "norm4_context.norm", *WITHOUT_TEXT), (RMSNORM,)
    ),
    modules={
        "norm1": (MOCHI + "RMSNormZero",),
        "norm1_context": (MOCHI + "RMSNormZero", MOCHI + "LayerNormContinuous"),
        "norm1_context.norm": (RMSNORM, *MODULATED),
        **dict.fromkeys(("norm2", "norm3", "norm4"), MODULATED),
        **dict.fromkeys(("norm2_context", "norm3_context", "norm4_context"), MODULATED),
    },
    attentions={"attn1": ATTENTION},
    feed_forwards=("ff", "ff_context"),
    fp8_skip=("*.attn1.add_*_proj", "*.attn1.to_add_out", "*.ff_context.*"),
    fp8_skip_low=(),
    modulation=("norm1.linear", "norm1_context.linear", "norm1_context.linear_1"),
    ops=("adaln_rmsnorm", "norm_gated_residual_norm", "norm_residual", "rmsnorm"),
)

ENTRIES = (ATTENTION, BLOCK)
