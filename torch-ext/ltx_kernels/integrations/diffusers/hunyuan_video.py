"""HunyuanVideo and FramePack: double blocks of video and text, single blocks of both.

Double blocks keep video and text apart but for one joint attention. Single blocks run both as one sequence. The joint
order is video, then text. The text is not rotated, and its padding comes last and is masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..attention.description import Attention
from ..attention.masks import PaddingMask
from ..blocks.block import Block
from ..blocks.feed_forward import beside_mlp
from ..blocks.stream import RMSNORM, TORCH_LAYERNORM, Stream, joint, modulation_by
from ..engine.guards import children
from ..engine.rotary_tables import Tables, halves
from ..linear.linears import linears_of
from ._double_block import IMAGE, TEXT, Residual, Tokens, double_block

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
    mods, text_mods = (modulation_by(norm, temb, 6) for norm in children(self, "norm1", "norm1_context"))
    video, text = Tokens(self, hidden_states, IMAGE, mods), Tokens(self, encoder_hidden_states, TEXT, text_mods)
    options = {"attention_mask": attention_mask, "image_rotary_emb": freqs_cis}
    return double_block(self, video, text, options)


def single(
    block: Any, both: Tensor, rows: int, stream: Residual, mods: Sequence[Any], options: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """The body of a single block: (video, text). The first `rows` of `both` are the video's."""
    norm, attn, act_mlp = children(block, "norm", "attn", "act_mlp")
    shift, scale, gate = mods
    up, out = linears_of(block, ("proj_mlp",), both), linears_of(block, ("proj_out",), both)
    x = stream.norm(norm._modules["norm"], shift, scale)
    assert isinstance(x, Tensor)
    attended = attn(hidden_states=x[:, :rows], encoder_hidden_states=x[:, rows:], **options)
    stream.add(beside_mlp(out, joint(*attended), up, x, act_mlp), gate)
    result = stream.value()
    return result[:, :rows], result[:, rows:]


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
    both, rows = joint(hidden_states, encoder_hidden_states), hidden_states.shape[1]
    options = {"attention_mask": attention_mask, "image_rotary_emb": image_rotary_emb}
    mods = modulation_by(self._modules["norm"], temb, 3)
    return single(self, both, rows, Stream(self, both), mods, options)


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
    fp8_skip_low=(),
    modulation=("norm1.linear", "norm1_context.linear"),
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

ENTRIES = (ATTENTION, DOUBLE, SINGLE)
