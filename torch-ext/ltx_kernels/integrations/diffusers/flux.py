"""FLUX.1: double blocks of image and text, and single blocks of both.

Double blocks keep text and image apart but for one joint attention; single blocks run both as one sequence, attention
beside the feed-forward. The modulation comes from a linear layer inside each norm module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..attention.description import Attention
from ..attention.masks import ScoresMask
from ..blocks.block import Block
from ..blocks.feed_forward import beside_mlp
from ..blocks.stream import TORCH_LAYERNORM, Mod, Stream, clipped, joint, modulation_by
from ..engine.guards import children
from ..engine.rotary_tables import Tables, halves
from ..linear.linears import linears_of
from ._double_block import IMAGE, TEXT, Tokens, double_block

FLUX = "diffusers.models.transformers.transformer_flux.Flux"
ADA_ZERO = "diffusers.models.normalization.AdaLayerNormZero"
ADA_SINGLE = "diffusers.models.normalization.AdaLayerNormZeroSingle"


ATTENTION = Attention(
    classes=(FLUX + "Attention",),
    processor=FLUX + "AttnProcessor",
    parameters=("hidden_states", "encoder_hidden_states", "attention_mask", "image_rotary_emb", "kwargs"),
    added=True,
    fuses=True,
    mask=ScoresMask(),
    tables=halves,
)


def double(
    block: Any, image: Tensor, text: Tensor, mods: Sequence[Mod], text_mods: Sequence[Mod], options: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """The body of a double block: (text, image). `options` are the attention's."""
    sides = Tokens(block, image, IMAGE, mods), Tokens(block, text, TEXT, text_mods)
    image, text = double_block(block, *sides, options)
    return clipped(text), image


def single(block: Any, both: Tensor, mods: Sequence[Mod], options: Mapping[str, Any]) -> Tensor:
    """The body of a single block on the rows of text and image. `options` are the attention's."""
    norm, attn, act_mlp = children(block, "norm", "attn", "act_mlp")
    shift, scale, gate = mods
    h = Stream(block, both)
    up, out = linears_of(block, ("proj_mlp",), both), linears_of(block, ("proj_out",), both)
    x = h.norm(norm._modules["norm"], shift, scale, into=("proj_mlp", "attn"))
    h.add(beside_mlp(out, attn(hidden_states=x, **options), up, x, act_mlp), gate)
    return clipped(h.value())


def double_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Tables | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    mods, text_mods = (modulation_by(norm, temb, 6) for norm in children(self, "norm1", "norm1_context"))
    options = {"image_rotary_emb": image_rotary_emb, **(joint_attention_kwargs or {})}
    return double(self, hidden_states, encoder_hidden_states, mods, text_mods, options)


def single_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Tables | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    mods = modulation_by(self._modules["norm"], temb, 3)
    both = joint(encoder_hidden_states, hidden_states)
    options = {"image_rotary_emb": image_rotary_emb, **(joint_attention_kwargs or {})}
    result = single(self, both, mods, options)
    text = encoder_hidden_states.shape[1]
    return result[:, :text], result[:, text:]


def why_not_call(block: Any, arguments: Mapping[str, Any]) -> str:
    """Why a call has to run stock. A mask is supported. IP-Adapters give other arguments, and have a third result."""
    options = arguments.get("joint_attention_kwargs") or {}
    return "joint_attention_kwargs" if options.keys() - {"attention_mask"} else ""


DOUBLE = Block(
    classes=(FLUX + "TransformerBlock",),
    forward=double_forward,
    streams=("hidden_states", "encoder_hidden_states"),
    tensors=("temb",),
    norms=dict.fromkeys(("norm1.norm", "norm1_context.norm", "norm2", "norm2_context"), (TORCH_LAYERNORM,)),
    modules={"norm1": (ADA_ZERO,), "norm1_context": (ADA_ZERO,)},
    attentions={"attn": ATTENTION},
    feed_forwards=("ff", "ff_context"),
    fp8_skip=("*.add_*_proj", "*.to_added_qkv", "*.to_add_out", "*.ff_context.*"),
    fp8_skip_low=(),
    modulation=("norm1.linear", "norm1_context.linear"),
    check=why_not_call,
)
SINGLE = Block(
    classes=(FLUX + "SingleTransformerBlock",),
    forward=single_forward,
    streams=("hidden_states", "encoder_hidden_states"),
    tensors=("temb",),
    norms={"norm.norm": (TORCH_LAYERNORM,)},
    modules={"norm": (ADA_SINGLE,), "act_mlp": ("torch.nn.modules.activation.GELU",)},
    attentions={"attn": ATTENTION},
    linears=(("proj_mlp",), ("proj_out",)),
    modulation=("norm.linear",),
    check=why_not_call,
    roundings=("fp32",),
)

ENTRIES = (ATTENTION, DOUBLE, SINGLE)
