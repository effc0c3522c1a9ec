"""Wan VACE: Wan's blocks, and blocks of the same body on a stream of control, which also give a hint for the video."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..engine.rotary_tables import Tables
from .wan import BLOCK as WAN_BLOCK
from .wan import forward, modulation


def block_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    control_hidden_states: Tensor,
    temb: Tensor,
    rotary_emb: Tables,
) -> tuple[Tensor | None, Tensor]:
    proj_in, proj_out = (self._modules.get(name) for name in ("proj_in", "proj_out"))
    if proj_in is not None:
        control_hidden_states = proj_in(control_hidden_states) + hidden_states
    mods = modulation(temb, -2, self.scale_shift_table[0])
    result = forward(self, control_hidden_states, encoder_hidden_states, mods, rotary_emb)
    return None if proj_out is None else proj_out(result), result


BLOCK = replace(
    WAN_BLOCK,
    classes=("diffusers.models.transformers.transformer_wan_vace.WanVACETransformerBlock",),
    forward=block_forward,
    optional_children=frozenset({"proj_in", "proj_out"}),
    streams=("control_hidden_states", "hidden_states"),
)

ENTRIES = (BLOCK,)
