"""SkyReels-V2: Wan's blocks, with a mask, and shift, scale and gate of the timestep in another order of dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..engine.rotary_tables import Tables
from .wan import BLOCK as WAN_BLOCK
from .wan import SELF as WAN_SELF
from .wan import forward, modulation

SKYREELS = "diffusers.models.transformers.transformer_skyreels_v2.SkyReelsV2"

ATTENTION = replace(
    WAN_SELF, classes=(SKYREELS + "Attention",), processor=SKYREELS + "AttnProcessor", parallel_cross=True
)


def block_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    rotary_emb: Tables,
    attention_mask: Tensor | None,
) -> Tensor:
    mods = modulation(temb, 1, self.scale_shift_table[0])
    return forward(self, hidden_states, encoder_hidden_states, mods, rotary_emb, attention_mask)


def _why_not_block(block: Any, arguments: Mapping[str, Any]) -> str:
    temb: Tensor = arguments["temb"]
    fits = temb.dim() in (3, 4) and temb.shape[1] == 6
    return "" if fits else f"a timestep embedding of shape {list(temb.shape)}"


BLOCK = replace(WAN_BLOCK, classes=(SKYREELS + "TransformerBlock",), forward=block_forward, check=_why_not_block)

ENTRIES = (ATTENTION, BLOCK)
