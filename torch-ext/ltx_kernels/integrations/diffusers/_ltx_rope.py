"""The rotary tables of LTX-Video, computed once per shape and kept at half their width."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._kept import kept
from .._rotary import Tables, compact, full_width
from .._sites import Entry, parameters_of, site_of

LTX = "diffusers.models.transformers.transformer_ltx."


def tables(attention: Any, rope: Tables) -> Tables:
    """What the ops take of the tables that `rope_forward` makes."""
    # With two heads, half of both heads' width would be taken for the whole width of one.
    return stock_tables(attention, rope) if attention.heads == 2 else rope


def stock_tables(attention: Any, rope: Tables) -> Tables:
    """What the stock attention takes."""
    return full_width(rope[0], attention.inner_dim), full_width(rope[1], attention.inner_dim)


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
    return kept(site, key, () if video_coords is None else (video_coords,), make)


ROPE = Entry((LTX + "LTXVideoRotaryPosEmbed",), rope_forward, (), parameters_of(rope_forward), table_readers="attn1")
