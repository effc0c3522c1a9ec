"""Chroma: FLUX.1's blocks with modulation that the model computes for all of them at once, and a mask of the prompt.

The stock blocks each make a mask of pairs of tokens from the mask of tokens; here one serves all blocks of a forward.
It is added to the scores as it is, 1 where both tokens are valid and 0 elsewhere, as the stock processor does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..blocks.stream import modulation_of
from ..engine.kept import kept
from ..engine.rotary_tables import Tables
from ..engine.sites import site_of
from .flux import DOUBLE, SINGLE, double, single

CHROMA = "diffusers.models.transformers.transformer_chroma.Chroma"


def _options(block: Any, rope: Tables | None, mask: Tensor | None) -> dict[str, Any]:
    """The attention's arguments: the tables, and the mask [B, 1, N, N] of pairs of tokens."""
    if mask is None:
        return {"image_rotary_emb": rope, "attention_mask": None}
    tokens = mask
    pairs = kept(site_of(block), "pairs", (tokens,), lambda: tokens[:, None, None, :] * tokens[:, None, :, None])
    return {"image_rotary_emb": rope, "attention_mask": pairs}


def double_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Tables | None = None,
    attention_mask: Tensor | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    mods = modulation_of(temb.unbind(1))
    options = _options(self, image_rotary_emb, attention_mask)
    return double(self, hidden_states, encoder_hidden_states, mods[:6], mods[6:], options)


def single_forward(
    self: Any,
    hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Tables | None = None,
    attention_mask: Tensor | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> Tensor:
    options = _options(self, image_rotary_emb, attention_mask)
    return single(self, hidden_states, modulation_of(temb.unbind(1)), options)


def _why_not(rows: int, block: Any, arguments: Mapping[str, Any]) -> str:
    temb: Tensor = arguments["temb"]
    if temb.dim() != 3 or temb.shape[1] != rows:
        return f"a modulation of shape {list(temb.shape)}"
    return "joint_attention_kwargs" if arguments.get("joint_attention_kwargs") else ""


def _why_not_double(block: Any, arguments: Mapping[str, Any]) -> str:
    return _why_not(12, block, arguments)


def _why_not_single(block: Any, arguments: Mapping[str, Any]) -> str:
    return _why_not(3, block, arguments)


ZERO, ZERO_SINGLE = (f"{CHROMA}AdaLayerNormZero{kind}Pruned" for kind in ("", "Single"))

ENTRIES = (
    replace(
        DOUBLE,
        classes=(CHROMA + "TransformerBlock",),
        forward=double_forward,
        modules={"norm1": (ZERO,), "norm1_context": (ZERO,)},
        check=_why_not_double,
    ),
    replace(
        SINGLE,
        classes=(CHROMA + "SingleTransformerBlock",),
        forward=single_forward,
        streams=("hidden_states",),
        modules={**SINGLE.modules, "norm": (ZERO_SINGLE,)},
        check=_why_not_single,
    ),
)
