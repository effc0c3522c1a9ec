"""Cosmos 1, 2 and 2.5, and their ControlNet: self-attention, cross-attention, MLP, each modulated in its norm.

The modulation is of low rank, per sample or, for video that goes on from frames, per token. The cross-attention of 2.5
to text and image stays stock.
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
from ..blocks.stream import RMSNORM, TORCH_LAYERNORM, Mod, Stream, modulation
from ..engine.guards import children
from ..engine.rotary_tables import Tables

COSMOS = "diffusers.models.transformers.transformer_cosmos.Cosmos"

SELF = Attention(
    processor=COSMOS + "AttnProcessor2_0",
    norm=RMSNORM,
    layout="half",
    mask=ScoresMask(),
)
CROSS = replace(SELF, cross=True)


def _modulation(norm: Any, embedded_timestep: Tensor, temb: Tensor | None) -> list[Mod]:
    """Shift, scale and gate."""
    activation, linear_1, linear_2 = children(norm, "activation", "linear_1", "linear_2")
    values = linear_2(linear_1(activation(embedded_timestep)))
    return modulation(values if temb is None else values + temb, 3)


def block_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Any,
    embedded_timestep: Tensor,
    temb: Tensor | None = None,
    image_rotary_emb: Tables | None = None,
    extra_pos_emb: Tensor | None = None,
    attention_mask: Tensor | None = None,
    controlnet_residual: Tensor | None = None,
    latents: Tensor | None = None,
    block_idx: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    norm1, attn1, norm2, attn2, norm3, ff = children(self, "norm1", "attn1", "norm2", "attn2", "norm3", "ff")
    if self.before_proj is not None:
        hidden_states = self.before_proj(hidden_states) + latents
    if extra_pos_emb is not None:
        hidden_states = hidden_states + extra_pos_emb
    h = Stream(self, hidden_states)
    shift, scale, gate = _modulation(norm1, embedded_timestep, temb)
    x = h.norm(norm1._modules["norm"], shift, scale, into="attn1")
    h.add(attn1(x, image_rotary_emb=image_rotary_emb), gate)
    shift, scale, gate = _modulation(norm2, embedded_timestep, temb)
    x = h.norm(norm2._modules["norm"], shift, scale, into="attn2")
    h.add(attn2(x, encoder_hidden_states=encoder_hidden_states, attention_mask=attention_mask), gate)
    shift, scale, gate = _modulation(norm3, embedded_timestep, temb)
    h.add(feed_forward(ff, h.norm(norm3._modules["norm"], shift, scale, into="ff")), gate)
    result = h.value()
    if controlnet_residual is not None:
        result = result + controlnet_residual
    return result if self.after_proj is None else (result, self.after_proj(result))


def _why_not_block(block: Any, arguments: Mapping[str, Any]) -> str:
    both = arguments.get("controlnet_residual") is not None and block.after_proj is not None
    return "a ControlNet's block with a ControlNet's residual" if both else ""


NORMS = ("norm1", "norm2", "norm3")
BLOCK = Block(
    classes=(COSMOS + "TransformerBlock",),
    forward=block_forward,
    optional_children=frozenset({"before_proj", "after_proj"}),
    tensors=("embedded_timestep", "temb", "extra_pos_emb", "controlnet_residual", "latents"),
    norms={f"{name}.norm": (TORCH_LAYERNORM,) for name in NORMS},
    modules=dict.fromkeys(NORMS, (COSMOS + "AdaLayerNormZero",)),
    attentions={"attn1": SELF, "attn2": CROSS},
    feed_forwards=("ff",),
    fp8_skip=("*.attn2.to_k", "*.attn2.to_v"),
    check=_why_not_block,
)

ENTRIES = (SELF, BLOCK)
