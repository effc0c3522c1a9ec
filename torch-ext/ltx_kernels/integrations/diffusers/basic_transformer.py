"""SDXL, Stable Diffusion 1 and 2, their ControlNets, PixArt, DiT, Latte: self-attention, cross-attention and MLP.

One class serves all of them. UNets have norms without modulation, PixArt and Latte modulate by a table, and DiT by the
first norm. Of UNets and ControlNets the modules that take images are known as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..attention.description import Attention
from ..attention.masks import KeyOrScoreBias
from ..blocks.block import Block
from ..blocks.feed_forward import feed_forward
from ..blocks.stream import TORCH_LAYERNORM, Stream, modulation, modulation_by
from ..engine.guards import children, fits_batch, follows_shared, why_not_tensor
from ._unet import UNET

ADA_ZERO = "diffusers.models.normalization.AdaLayerNormZero"
LAYER_NORM, TABLE, ZERO = "layer_norm", "ada_norm_single", "ada_norm_zero"


def _why_not_module(attention: Any) -> str:
    """Why an attention has to stay stock. Its processor also serves autoencoders, whose attentions do more."""
    more = attention.residual_connection or attention.rescale_output_factor != 1
    return "it adds its input, or scales its output" if more else ""


def _why_not_attention(attention: Any, hidden_states: Tensor, context: Tensor | None, rope: Any) -> str:
    return "an input of channels, height and width" if hidden_states.dim() == 4 else ""


SELF = Attention(
    processor="diffusers.models.attention_processor.AttnProcessor2_0",
    parameters=("hidden_states", "encoder_hidden_states", "attention_mask", "cross_attention_kwargs"),
    rope="",
    norm=None,
    mask=KeyOrScoreBias(),
    check=_why_not_attention,
    why_not=_why_not_module,
)
CROSS = replace(SELF, cross=True)


def block_forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    timestep: Tensor | None = None,
    cross_attention_kwargs: Mapping[str, Any] | None = None,
    class_labels: Tensor | None = None,
    added_cond_kwargs: Mapping[str, Tensor] | None = None,
) -> Tensor:
    options = {name: value for name, value in (cross_attention_kwargs or {}).items() if name != "gligen"}
    norm1, attn1, ff = children(self, "norm1", "attn1", "ff")
    norm2, attn2, norm3 = map(self._modules.get, ("norm2", "attn2", "norm3"))
    mods: list[Any] = [None] * 6
    if self.norm_type == TABLE:
        assert timestep is not None
        mods, norm3 = modulation(timestep, 6, self.scale_shift_table), norm2
    elif self.norm_type == ZERO:
        mods = modulation_by(norm1, norm1.emb(timestep, class_labels, hidden_dtype=hidden_states.dtype), 6)
        norm1 = norm1._modules["norm"]
    shift1, scale1, gate1, shift2, scale2, gate2 = mods
    h = Stream(self, hidden_states)
    x = h.norm(norm1, shift1, scale1, into="attn1")
    h.add(attn1(x, encoder_hidden_states=None, attention_mask=attention_mask, **options), gate1)
    if attn2 is not None:
        into = None if encoder_hidden_states is None else "attn2"  # a second self-attention has other readers
        x = h.rows(into) if self.norm_type == TABLE else h.norm(norm2, into=into)
        options.update(encoder_hidden_states=encoder_hidden_states, attention_mask=encoder_attention_mask)
        h.add(attn2(x, **options))
    h.add(feed_forward(ff, h.norm(norm3, shift2, scale2, into="ff")), gate2)
    return h.value()


def _why_not_block(block: Any, arguments: Mapping[str, Any]) -> str:
    if block.norm_type not in (LAYER_NORM, TABLE, ZERO):
        return f"norm_type is {block.norm_type}"
    if block._chunk_size is not None:
        return "feed-forwards in chunks"
    if block.only_cross_attention:
        return "cross-attention alone"
    if (arguments.get("cross_attention_kwargs") or {}).get("gligen") is not None:
        return "GLIGEN"
    hidden_states, timestep = arguments["hidden_states"], arguments.get("timestep")
    if hidden_states.dim() != 3:
        return f"an input of shape {list(hidden_states.shape)}"
    if timestep is not None and not fits_batch(timestep, len(hidden_states)):
        return "a timestep of another batch size"
    if block.norm_type != TABLE:
        return ""
    table = block.scale_shift_table
    if timestep is None or timestep.shape != (hidden_states.shape[0], table.numel()):
        return "a timestep embedding of another shape than [B, 6 H]"
    gradient = follows_shared()
    reason = why_not_tensor("timestep", timestep, hidden_states, gradient=gradient)
    return reason or why_not_tensor("its table", table, hidden_states, gradient=gradient)


BLOCK = Block(
    classes=("diffusers.models.attention.BasicTransformerBlock",),
    forward=block_forward,
    optional_children=frozenset({"norm1.norm", "norm2", "attn2", "norm3"}),
    norms={"norm1": (TORCH_LAYERNORM, ADA_ZERO), **dict.fromkeys(("norm1.norm", "norm2", "norm3"), (TORCH_LAYERNORM,))},
    attentions={"attn1": SELF, "attn2": CROSS},
    feed_forwards=("ff",),
    fp8_skip=("*.attn2.to_k", "*.attn2.to_v", "*.attn2.to_out.0"),
    check=_why_not_block,
    ops=("adaln_layernorm", "gated_residual", "gated_residual_adaln_layernorm", "layernorm"),
)

ENTRIES = (SELF, BLOCK, *UNET)
