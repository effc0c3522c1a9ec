"""CogVideoX 1.0 and 1.5, and ConsisID: blocks of two streams, video and text, that share their weights.

One LayerNorm with weight and bias serves both streams, each with a modulation of its own. One set of projections makes
queries, keys and values of both; the heads have LayerNorms, and the rows of the video alone are rotated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..attention.description import Attention
from ..blocks.block import Block
from ..blocks.feed_forward import feed_forward
from ..blocks.stream import TORCH_LAYERNORM, Stream, modulation_by
from ..engine.guards import children
from ..engine.rotary_tables import Tables, halves
from ..linear.products import concatenated

MODELS = "diffusers.models.transformers."
NORM_ZERO = "diffusers.models.normalization.CogVideoXLayerNormZero"


def _why_not_attention(attention: Any) -> str:
    return "the stock processor does not rotate keys in a cross-attention" if attention.is_cross_attention else ""


ATTENTION = Attention(
    processor="diffusers.models.attention_processor.CogVideoXAttnProcessor2_0",
    norm=TORCH_LAYERNORM,
    shared=True,
    rotates_text=False,
    tables=halves,
    why_not=_why_not_attention,
)


def block_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Tables | None = None,
    attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    norm1, attn1, norm2, ff = children(self, "norm1", "attn1", "norm2", "ff")
    video, text = Stream(self, hidden_states), Stream(self, encoder_hidden_states)
    shift, scale, gate, text_shift, text_scale, text_gate = modulation_by(norm1, temb, 6)
    video_branch, text_branch = attn1(
        hidden_states=video.norm(norm1._modules["norm"], shift, scale),
        encoder_hidden_states=text.norm(norm1._modules["norm"], text_shift, text_scale),
        image_rotary_emb=image_rotary_emb,
        **(attention_kwargs or {}),
    )
    video.add(video_branch, gate)
    text.add(text_branch, text_gate)
    shift, scale, gate, text_shift, text_scale, text_gate = modulation_by(norm2, temb, 6)
    text_rows = text.norm(norm2._modules["norm"], text_shift, text_scale, into="ff")
    video_rows = video.norm(norm2._modules["norm"], shift, scale, into="ff")
    branch = feed_forward(ff, concatenated(text_rows, video_rows))
    length = encoder_hidden_states.shape[1]
    video.add(branch[:, length:], gate)
    text.add(branch[:, :length], text_gate)
    return video.value(), text.value()


BLOCK = Block(
    classes=(MODELS + "cogvideox_transformer_3d.CogVideoXBlock",),
    forward=block_forward,
    streams=("hidden_states", "encoder_hidden_states"),
    tensors=("temb",),
    norms=dict.fromkeys(("norm1.norm", "norm2.norm"), (TORCH_LAYERNORM,)),
    modulation=("norm1.linear", "norm2.linear"),
    modules={"norm1": (NORM_ZERO,), "norm2": (NORM_ZERO,)},
    attentions={"attn1": ATTENTION},
    feed_forwards=("ff",),
)
CONSISID = replace(
    BLOCK,
    classes=(MODELS + "consisid_transformer_3d.ConsisIDBlock",),
    parameters=("hidden_states", "encoder_hidden_states", "temb", "image_rotary_emb"),
)

ENTRIES = (BLOCK, CONSISID, ATTENTION)
