"""Stable Diffusion 3 and 3.5: blocks of two streams, image and text, that meet in the attention, without rotation.

The last block leaves the text as it is. Some blocks of 3.5 medium have a second attention, of the image to itself, with
a modulation of the same norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..attention.description import ADDED_OUTPUT, Attention
from ..blocks.block import Block
from ..blocks.feed_forward import feed_forward
from ..blocks.stream import RMSNORM, TORCH_LAYERNORM, Stream, modulation_by
from ..engine.guards import children

NORMS = "diffusers.models.normalization."


def _why_not_attention(attention: Any) -> str:
    left_out = attention.context_pre_only and attention._modules.get(ADDED_OUTPUT) is not None
    return f"its context_pre_only leaves out {ADDED_OUTPUT}" if left_out else ""


ATTENTION = Attention(
    processor="diffusers.models.attention_processor.JointAttnProcessor2_0",
    rope="",
    norm=RMSNORM,
    added=True,
    text_first=False,
    why_not=_why_not_attention,
)


def block_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor | None, Tensor]:
    norm1, norm1_context, attn, norm2, ff = children(self, "norm1", "norm1_context", "attn", "norm2", "ff")
    options = joint_attention_kwargs or {}
    image, text = Stream(self, hidden_states), Stream(self, encoder_hidden_states)
    count = 9 if self.use_dual_attention else 6
    shift1, scale1, gate1, shift2, scale2, gate2, *second = modulation_by(norm1, temb, count)
    if self.context_pre_only:
        text_scale1, text_shift1 = modulation_by(norm1_context, temb, 2)
    else:
        text_shift1, text_scale1, text_gate1, text_shift2, text_scale2, text_gate2 = modulation_by(
            norm1_context, temb, 6
        )
    if second:
        attn2 = self.attn2
        shift, scale, gate = second
        x, x2 = image.norm_pair(norm1.norm, (shift1, scale1), (shift, scale), "attn", "attn2")
    else:
        x = image.norm(norm1.norm, shift1, scale1, into="attn")
    image_branch, text_branch = attn(
        hidden_states=x,
        encoder_hidden_states=text.norm(norm1_context.norm, text_shift1, text_scale1),
        **options,
    )
    image.add(image_branch, gate1)
    if second:
        image.add(attn2(hidden_states=x2, **options), gate)
    x = image.norm(norm2, shift2, scale2, into="ff")
    image.add(feed_forward(ff, x), gate2)
    if self.context_pre_only:
        return None, image.value()
    norm2_context, ff_context = children(self, "norm2_context", "ff_context")
    text.add(text_branch, text_gate1)
    x = text.norm(norm2_context, text_shift2, text_scale2, into="ff_context")
    text.add(feed_forward(ff_context, x), text_gate2)
    return text.value(), image.value()


def _why_not_block(block: Any, arguments: Mapping[str, Any]) -> str:
    return "its feed-forward runs in chunks" if block._chunk_size is not None else ""


BLOCK = Block(
    classes=("diffusers.models.attention.JointTransformerBlock",),
    forward=block_forward,
    optional_children=frozenset({"attn2", "norm2_context", "ff_context"}),
    streams=("hidden_states", "encoder_hidden_states"),
    norms=dict.fromkeys(("norm1.norm", "norm1_context.norm", "norm2", "norm2_context"), (TORCH_LAYERNORM,)),
    modules={
        "norm1": (NORMS + "AdaLayerNormZero", NORMS + "SD35AdaLayerNormZeroX"),
        "norm1_context": (NORMS + "AdaLayerNormZero", NORMS + "AdaLayerNormContinuous"),
    },
    tensors=("temb",),
    attentions={"attn": ATTENTION, "attn2": ATTENTION},
    feed_forwards=("ff", "ff_context"),
    fp8_skip=("*.attn.add_*_proj", "*.attn.to_add_out", "*.ff_context.*"),
    fp8_skip_low=(),
    modulation=("norm1.linear", "norm1_context.linear"),
    check=_why_not_block,
)

ENTRIES = (BLOCK, ATTENTION)
