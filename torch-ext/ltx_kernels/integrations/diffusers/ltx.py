"""LTX-Video: blocks of self-attention, cross-attention and feed-forward, modulated by a table and the timestep.

The rotary table is computed once per shape and kept at half its width. The stock modules add table and timestep up in
memory; the ops read both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .._attend import Attention, KeyBias
from .._block import Block
from .._feed_forward import feed_forward, ff_input
from .._guards import children
from .._parallel import Parallel, Splits
from .._rotary import Tables, compact, full_width, kept
from .._sites import Entry, site_of
from .._stream import RMSNORM, Stream, modulation

LTX = "diffusers.models.transformers.transformer_ltx."


def _tables(attention: Any, rope: Tables) -> Tables:
    # With two heads, half of both heads' width would be taken for the whole width of one.
    return _stock_tables(attention, rope) if attention.heads == 2 else rope


def _stock_tables(attention: Any, rope: Tables) -> Tables:
    return full_width(rope[0], attention.inner_dim), full_width(rope[1], attention.inner_dim)


def _why_not_attention(attention: nn.Module, hidden_states: Tensor, text: Tensor | None, rope: Any) -> str:
    return (
        "self-attention without rotary table, or cross-attention with one" if (text is None) == (rope is None) else ""
    )


SELF = Attention(
    classes=(LTX + "LTXAttention",),
    processor=LTX + "LTXVideoAttnProcessor",
    parameters=("hidden_states", "encoder_hidden_states", "attention_mask", "image_rotary_emb", "kwargs"),
    across_heads=True,
    mask=KeyBias(),
    tables=_tables,
    stock_rope=_stock_tables,
    check=_why_not_attention,
    together_with=LTX + "LTXVideoRotaryPosEmbed",
)
CROSS = replace(SELF, cross=True)


def block_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Tables | None = None,
    encoder_attention_mask: Tensor | None = None,
) -> Tensor:
    norm1, attn1, norm2, attn2, ff = children(self, "norm1", "attn1", "norm2", "attn2", "ff")
    shift1, scale1, gate1, shift2, scale2, gate2 = modulation(temb, 6, self.scale_shift_table)
    h = Stream(self, hidden_states)
    x = h.norm(norm1, shift1, scale1, into=SELF.readers(attn1, hidden_states))
    h.add(attn1(hidden_states=x, encoder_hidden_states=None, image_rotary_emb=image_rotary_emb), gate1)
    x = h.rows(into=CROSS.readers(attn2, hidden_states))
    h.add(
        attn2(
            hidden_states=x,
            encoder_hidden_states=encoder_hidden_states,
            attention_mask=encoder_attention_mask,
            image_rotary_emb=None,
        )
    )
    x = h.norm(norm2, shift2, scale2, into=ff_input(ff, hidden_states))
    h.add(feed_forward(ff, x), gate2)
    return h.value()


def _why_not_block(block: Any, arguments: Mapping[str, Any]) -> str:
    temb: Tensor = arguments["temb"]
    fits = temb.dim() == 3 and temb.shape[-1] == block.scale_shift_table.numel()
    return "" if fits else f"a timestep embedding of shape {list(temb.shape)}"


BLOCK = Block(
    classes=(LTX + "LTXVideoTransformerBlock",),
    forward=block_forward,
    tensors=("temb", "scale_shift_table"),
    norms={"norm1": (RMSNORM,), "norm2": (RMSNORM,)},
    attentions={"attn1": SELF, "attn2": CROSS},
    feed_forwards=("ff",),
    fp8_skip=("*.attn2.to_k", "*.attn2.to_v", "*.attn2.to_out.0"),
    check=_why_not_block,
)


def rope_forward(
    self: Any,
    hidden_states: Tensor,
    num_frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
    rope_interpolation_scale: Any = None,
    video_coords: Tensor | None = None,
) -> Tables:
    """The stock tables, each angle once: [B, S, D / 2], with B = 1 where the samples of a batch share them."""
    site = site_of(self)
    site.count_call()

    def make() -> Tables:
        one = hidden_states[:1] if video_coords is None else hidden_states
        cos, sin = site.stock(self, one, num_frames, height, width, rope_interpolation_scale, video_coords)
        return compact(cos), compact(sin)

    scales = tuple(rope_interpolation_scale or ())
    if any(isinstance(scale, Tensor) for scale in scales):
        return make()  # its value may change without a sign
    model = self.dim, self.theta, self.patch_size, self.patch_size_t
    base = self.base_num_frames, self.base_height, self.base_width
    key = model, base, num_frames, height, width, scales, hidden_states.device
    return kept(site, key, video_coords, make)


def _splits(model: Any) -> Splits:
    # A timestep of each token, of image-to-video, has two dimensions; one of each sample stays whole.
    return {
        "": {"hidden_states": (1, 3), "timestep": (1, 2)},
        "rope": {0: (1, 3), 1: (1, 3)},
    }


# The stock plan splits the prompt: keys, values and mask of the cross-attentions would be exchanged.
PLANS = (Parallel(LTX + "LTXVideoTransformer3DModel", _splits, gather={"proj_out": [(1, 3)]}, local=("*.attn2",)),)

ENTRIES = (
    BLOCK,
    SELF,
    Entry(
        (LTX + "LTXVideoRotaryPosEmbed",),
        rope_forward,
        (),
        ("hidden_states", "num_frames", "height", "width", "rope_interpolation_scale", "video_coords"),
        table_readers="attn1",
    ),
)
