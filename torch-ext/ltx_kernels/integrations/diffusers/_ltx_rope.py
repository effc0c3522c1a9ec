"""The rotary tables of LTX-Video, computed once per shape and kept at half their width."""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from torch import Tensor

from ..engine.guards import ATTRIBUTE, is_capturing
from ..engine.kept import kept
from ..engine.rotary_tables import Tables, compact, full_width
from ..engine.sites import Entry, parameters_of, site_of, stock_forward, why_exchanged, why_stock
from ..engine.state import held

LTX = "diffusers.models.transformers.transformer_ltx."


def tables(attention: Any, rope: Tables) -> Tables:
    """What the ops read of the tables that `rope_forward` makes."""
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
    arguments = hidden_states, num_frames, height, width, rope_interpolation_scale, video_coords
    if torch.compiler.is_compiling():
        return _tables(self, *arguments)
    if _has_stock_reader(self):
        return cast(Tables, stock_forward(self, "a stock attention reads its tables", *arguments))
    made = _tables(self, *arguments)
    handed_out = site_of(self).handed_out
    if is_capturing():  # the graph holds the tables for good, and no block will look at them
        for table in made:
            handed_out.pop(id(table), None)
    else:
        handed_out.update((id(table), table) for table in made)
    return made


def _tables(
    rope: Any, hidden_states: Tensor, num_frames: Any, height: Any, width: Any, scale: Any, video_coords: Tensor | None
) -> Tables:
    site = site_of(rope)
    site.count_call()

    def make() -> Tables:
        one = hidden_states[:1] if video_coords is None else hidden_states
        cos, sin = site.stock(rope, one, num_frames, height, width, scale, video_coords)
        return compact(cos), compact(sin)

    scales = tuple(scale or ())
    if any(isinstance(scale, Tensor) for scale in scales):
        return make()  # its value may change without a sign
    model = rope.dim, rope.theta, rope.patch_size, rope.patch_size_t
    base = rope.base_num_frames, rope.base_height, rope.base_width
    key = model, base, num_frames, height, width, scales, hidden_states.device
    return kept(site, key, () if video_coords is None else (video_coords,), make)


def _has_stock_reader(rope: Any) -> bool:
    """Whether an attention that was put into the model later, or taken out of `optimize`, reads the tables."""
    place = held(rope)
    reference = place.parent
    model = None if reference is None else reference()
    if model is None or model._modules.get("rope") is not rope:
        parts = (part for root in site_of(rope).living_roots for part in root.modules())
        model = next((part for part in parts if part._modules.get("rope") is rope), None)
        if model is None:
            return False
        place.parent = weakref.ref(model)
    blocks: Any = model.transformer_blocks
    readers = [block.attn1 for block in blocks]
    if not all(ATTRIBUTE in reader.__dict__ for reader in readers):
        return True
    one_of_each_class = {type(reader): reader for reader in readers}.values()
    return any(map(why_stock, one_of_each_class)) or any(map(why_exchanged, readers))


ROPE = Entry((LTX + "LTXVideoRotaryPosEmbed",), rope_forward, (), parameters_of(rope_forward), table_readers="attn1")
