"""HunyuanVideo, FramePack, HunyuanVideo 1.5, HunyuanImage 2.1: double blocks of video and text, single blocks of both.

Double blocks keep video and text apart but for one joint attention. Single blocks, which 1.5 does not have, run both as
one sequence. The joint order is video, then text. The text is not rotated, and its padding comes last and is masked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from .._attend import Attention, PaddingMask
from .._block import Block
from .._feed_forward import beside_mlp, feed_forward, ff_input
from .._guards import children
from .._linear import linears_of
from .._rotary import Tables, halves
from .._stream import RMSNORM, TORCH_LAYERNORM, Stream, joint, modulation_by

MODELS = "diffusers.models.transformers.transformer_"
NORMS = "diffusers.models.normalization."


# In single blocks, modules of this class have no added projections.
ATTENTION = Attention(
    processor=MODELS + "hunyuan_video.HunyuanVideoAttnProcessor2_0",
    norm=RMSNORM,
    added=True,
    text_first=False,
    shared=True,
    rotates_text=False,
    mask=PaddingMask(),
    tables=halves,
)
ATTENTION_15 = replace(
    ATTENTION,
    processor=MODELS + "hunyuan_video15.HunyuanVideo15AttnProcessor2_0",
    shared=False,
    mask=PaddingMask(of_text=True),
)
ATTENTION_IMAGE = replace(ATTENTION, processor=MODELS + "hunyuanimage.HunyuanImageAttnProcessor")


def double_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    freqs_cis: Tables | None = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    norm1, norm1_context, attn = children(self, "norm1", "norm1_context", "attn")
    norm2, ff, norm2_context, ff_context = children(self, "norm2", "ff", "norm2_context", "ff_context")
    shift1, scale1, gate1, shift2, scale2, gate2 = modulation_by(norm1, temb, 6)
    c_shift1, c_scale1, c_gate1, c_shift2, c_scale2, c_gate2 = modulation_by(norm1_context, temb, 6)
    h, c = Stream(self, hidden_states), Stream(self, encoder_hidden_states)
    # The two classes of attention differ in their masks alone.
    attended, c_attended = attn(
        hidden_states=h.norm(norm1._modules["norm"], shift1, scale1, into=ATTENTION.readers(attn, hidden_states)),
        encoder_hidden_states=c.norm(norm1_context._modules["norm"], c_shift1, c_scale1),
        attention_mask=attention_mask,
        image_rotary_emb=freqs_cis,
    )
    h.add(attended, gate1)
    c.add(c_attended, c_gate1)
    h.add(feed_forward(ff, h.norm(norm2, shift2, scale2, into=ff_input(ff, hidden_states))), gate2)
    text = c.norm(norm2_context, c_shift2, c_scale2, into=ff_input(ff_context, encoder_hidden_states))
    c.add(feed_forward(ff_context, text), c_gate2)
    return h.value(), c.value()


def single_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Tables | None = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    norm, attn, act_mlp = children(self, "norm", "attn", "act_mlp")
    shift, scale, gate = modulation_by(norm, temb, 3)
    both, video = joint(hidden_states, encoder_hidden_states), hidden_states.shape[1]
    h = Stream(self, both)
    up, out = linears_of(self, ("proj_mlp",), both), linears_of(self, ("proj_out",), both)
    x = h.norm(norm._modules["norm"], shift, scale)
    assert isinstance(x, Tensor)
    attended = attn(
        hidden_states=x[:, :video],
        encoder_hidden_states=x[:, video:],
        attention_mask=attention_mask,
        image_rotary_emb=image_rotary_emb,
    )
    h.add(beside_mlp(out, joint(*attended), up, x, act_mlp), gate)
    result = h.value()
    return result[:, :video], result[:, video:]


DOUBLE = Block(
    classes=(MODELS + "hunyuan_video.HunyuanVideoTransformerBlock",),
    forward=double_forward,
    streams=("hidden_states", "encoder_hidden_states"),
    tensors=("temb",),
    norms=dict.fromkeys(("norm1.norm", "norm1_context.norm", "norm2", "norm2_context"), (TORCH_LAYERNORM,)),
    modules={"norm1": (NORMS + "AdaLayerNormZero",), "norm1_context": (NORMS + "AdaLayerNormZero",)},
    attentions={"attn": ATTENTION},
    feed_forwards=("ff", "ff_context"),
    fp8_skip=("*.attn.add_*_proj", "*.attn.to_add_out", "*.ff_context.*"),
)
DOUBLE_15 = replace(
    DOUBLE,
    classes=(MODELS + "hunyuan_video15.HunyuanVideo15TransformerBlock",),
    attentions={"attn": ATTENTION_15},
)
DOUBLE_IMAGE = replace(
    DOUBLE,
    classes=(MODELS + "hunyuanimage.HunyuanImageTransformerBlock",),
    renames={"freqs_cis": "image_rotary_emb"},
    attentions={"attn": ATTENTION_IMAGE},
)
SINGLE = Block(
    classes=(MODELS + "hunyuan_video.HunyuanVideoSingleTransformerBlock",),
    forward=single_forward,
    streams=("hidden_states", "encoder_hidden_states"),
    tensors=("temb",),
    norms={"norm.norm": (TORCH_LAYERNORM,)},
    modules={"norm": (NORMS + "AdaLayerNormZeroSingle",), "act_mlp": ("torch.nn.modules.activation.GELU",)},
    attentions={"attn": ATTENTION},
    linears=(("proj_mlp",), ("proj_out",)),
    roundings=("fp32",),
)
SINGLE_IMAGE = replace(
    SINGLE,
    classes=(MODELS + "hunyuanimage.HunyuanImageSingleTransformerBlock",),
    attentions={"attn": ATTENTION_IMAGE},
)

ENTRIES = (ATTENTION, ATTENTION_15, ATTENTION_IMAGE, DOUBLE, DOUBLE_15, DOUBLE_IMAGE, SINGLE, SINGLE_IMAGE)
