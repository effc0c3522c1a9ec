"""The attention of LTX-2's blocks: one class attends within a stream, to the prompt, and to the other stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..attention.description import Attention
from ..attention.masks import KeyBias
from ..engine.rotary_tables import Tables, halves

LTX2 = "diffusers.models.transformers.transformer_ltx2."


def _tables(attention: Any, rope: Any) -> Tables:
    """(cos, sin) of all rows, or ((cos, cos), (sin, sin)) where query and key have tables of their own."""
    query, key = rope if isinstance(rope[0], tuple) else (rope, None)
    if attention.rope_type == "interleaved":
        query = _interleaved(attention, query)
        key = None if key is None else _interleaved(attention, key)
    return query if key is None else tuple(zip(query, key))  # type: ignore[return-value]


def _interleaved(attention: Any, rope: Tables) -> Tables:
    # With two heads, half of both heads' width would be taken for the whole width of one.
    return rope if attention.heads == 2 else halves(attention, rope)


def _layout(attention: Any) -> str:
    return "interleaved" if attention.rope_type == "interleaved" else "half"


SELF = Attention(
    classes=(LTX2 + "LTX2Attention",),
    processor=LTX2 + "LTX2AudioVideoAttnProcessor",
    other_processors=(LTX2 + "LTX2PerturbedAttnProcessor",),
    parameters=(
        *("hidden_states", "encoder_hidden_states", "attention_mask"),
        *("query_rotary_emb", "key_rotary_emb", "kwargs"),
    ),
    rope="query_rotary_emb",
    key_rope="key_rotary_emb",
    layout_of=_layout,
    across_heads=True,
    gate="to_gate_logits",
    gate_scale=2.0,
    mask=KeyBias(),
    tables=_tables,
)
CROSS = replace(SELF, cross=True)
