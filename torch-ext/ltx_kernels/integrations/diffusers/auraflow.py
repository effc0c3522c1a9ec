"""AuraFlow: blocks of two streams, image and text, that meet in the attention, and blocks of both as one stream.

The feed-forward's result is added to the block's input. The sum of input and attention is only what the second norm
reads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..attention.description import Attention
from ..blocks.block import Block
from ..blocks.gated_mlp import GatedMLP
from ..blocks.stream import FP32_LAYERNORM, Mod, Stream, modulation_by
from ..engine.guards import children

AURA_FLOW = "diffusers.models.transformers.auraflow_transformer_2d.AuraFlow"
NORM_ZERO = "diffusers.models.normalization.AdaLayerNormZero"

ATTENTION = Attention(
    processor="diffusers.models.attention_processor.AuraFlowAttnProcessor2_0",
    norm=FP32_LAYERNORM,
    rope="",
    added=True,
    scale="scale",
)
MLP = GatedMLP((AURA_FLOW + "FeedForward",), projections=("linear_1", "linear_2"), activation="", down="out_projection")

# Names of a stream's first norm, second norm and feed-forward.
IMAGE = ("norm1", "norm2", "ff")
TEXT = ("norm1_context", "norm2_context", "ff_context")


def _finish(
    block: Any, names: tuple[str, str, str], first: Tensor, h: Stream, branch: Tensor, mods: list[Mod]
) -> Tensor:
    """The block's input `first` plus the feed-forward. h: The stream that the attention's branch is added to."""
    gate1, shift2, scale2, gate2 = mods
    norm2, ff = children(block, *names[1:])
    h.add(branch, gate1)
    rows = h.norm(norm2, shift2, scale2, into=names[2])
    result = Stream(block, first)
    result.add(ff(rows), gate2)
    return result.value()


def joint_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    norm1, norm1_context, attn = children(self, "norm1", "norm1_context", "attn")
    image, text = Stream(self, hidden_states), Stream(self, encoder_hidden_states)
    shift, scale, *mods = modulation_by(norm1, temb, 6)
    text_shift, text_scale, *text_mods = modulation_by(norm1_context, temb, 6)
    branch, text_branch = attn(
        hidden_states=image.norm(norm1._modules["norm"], shift, scale, into="attn"),
        encoder_hidden_states=text.norm(norm1_context._modules["norm"], text_shift, text_scale),
        **(attention_kwargs or {}),
    )
    result = _finish(self, IMAGE, hidden_states, image, branch, mods)
    return _finish(self, TEXT, encoder_hidden_states, text, text_branch, text_mods), result


def single_forward(
    self: Any, hidden_states: Tensor, temb: Tensor, attention_kwargs: dict[str, Any] | None = None
) -> Tensor:
    norm1, attn = children(self, "norm1", "attn")
    h = Stream(self, hidden_states)
    shift, scale, *mods = modulation_by(norm1, temb, 6)
    rows = h.norm(norm1._modules["norm"], shift, scale, into="attn")
    return _finish(self, IMAGE, hidden_states, h, attn(hidden_states=rows, **(attention_kwargs or {})), mods)


JOINT = Block(
    classes=(AURA_FLOW + "JointTransformerBlock",),
    forward=joint_forward,
    streams=("hidden_states", "encoder_hidden_states"),
    tensors=("temb",),
    norms=dict.fromkeys(("norm1.norm", "norm1_context.norm", "norm2", "norm2_context"), (FP32_LAYERNORM,)),
    modules=dict.fromkeys(("norm1", "norm1_context"), (NORM_ZERO,)),
    attentions={"attn": ATTENTION, "ff": MLP, "ff_context": MLP},
    fp8_skip=("*.attn.add_*_proj", "*.attn.to_add_out", "*.ff_context.*"),
    fp8_skip_low=(),
    modulation=("norm1.linear", "norm1_context.linear"),
)
SINGLE = Block(
    classes=(AURA_FLOW + "SingleTransformerBlock",),
    forward=single_forward,
    tensors=("temb",),
    norms=dict.fromkeys(("norm1.norm", "norm2"), (FP32_LAYERNORM,)),
    modules={"norm1": (NORM_ZERO,)},
    attentions={"attn": ATTENTION, "ff": MLP},
    modulation=("norm1.linear",),
)

ENTRIES = (ATTENTION, MLP, JOINT, SINGLE)
