"""One stream of LTX-2's blocks, video or audio: attention to itself, the prompt and the other stream, feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..blocks.feed_forward import feed_forward
from ..blocks.stream import Stream, modulation
from ..engine.guards import children
from ..linear.products import Input


def _prompt(text: Tensor, table: Tensor, temb: Tensor | None) -> Tensor:
    """The prompt with the modulation that LTX-2.3 gives it: a few rows, in the stock operations."""
    values = table[None, None].to(text.dtype)
    if temb is not None:
        values = values + temb.unflatten(-1, (2, -1))
    shift, scale = values.unbind(2)
    return text * (1 + scale) + shift


class Modality:
    """One stream of a block, with its modules and arguments: their names tell video from audio."""

    def __init__(self, block: Any, given: Mapping[str, Any], kind: str, other: str) -> None:
        prefix, suffix = ("", "") if kind == "video" else ("audio_", "_audio")
        names = [prefix + name for name in ("norm1", "attn1", "norm2", "attn2", "norm3", "ff")]
        self.names = *names, f"{other}_to_{kind}_norm", f"{other}_to_{kind}_attn"
        self.modules = children(block, *self.names)
        self.stream = Stream(block, given[prefix + "hidden_states"])
        self.text: Tensor = given[prefix + "encoder_hidden_states"]
        tables = block._parameters
        if block.cross_attn_adaln:
            table = tables[prefix + "prompt_scale_shift_table"]
            self.text = _prompt(self.text, table, given.get("temb_prompt" + suffix))
        self.text_mask, self.mask = (
            given.get(prefix + name) for name in ("encoder_attention_mask", "self_attention_mask")
        )
        self.rope, self.exchange_rope = (given.get(name + kind + "_rotary_emb") for name in ("", "ca_"))
        table = tables[prefix + "scale_shift_table"]
        mods = modulation(given["temb" + suffix], table.shape[0], table)
        self.attn1, self.mlp = mods[:3], mods[3:6]  # shift, scale, gate
        self.query = mods[6:9] if getattr(block, kind + "_cross_attn_adaln") else ()
        table = tables[kind + "_a2v_cross_attn_scale_shift_table"]
        scale, shift, scale2, shift2 = modulation(given[f"temb_ca{suffix}_scale_shift"], 4, table[:4])
        (self.gate,) = modulation(given[f"temb_ca{suffix}_gate"], 1, table[4:])
        a2v, v2a = (shift, scale), (shift2, scale2)
        self.reads, self.gives = (a2v, v2a) if kind == "video" else (v2a, a2v)

    def attend_to_itself(self, options: Mapping[str, Any]) -> None:
        norm1, attn1 = self.modules[:2]
        shift, scale, gate = self.attn1
        x = self.stream.norm(norm1, shift, scale, into=self.names[1])
        tokens = {"encoder_hidden_states": None, "query_rotary_emb": self.rope, "attention_mask": self.mask}
        self.stream.add(attn1(hidden_states=x, **tokens, **options), gate)

    def attend_to_prompt(self) -> None:
        norm2, attn2 = self.modules[2:4]
        shift, scale, gate = self.query or (None, None, None)
        x = self.stream.norm(norm2, shift, scale, into=self.names[3])
        text = {"encoder_hidden_states": self.text, "query_rotary_emb": None, "attention_mask": self.text_mask}
        self.stream.add(attn2(x, **text), gate)

    def exchange(self, reads: bool, gives: bool) -> tuple[Input | None, Input | None]:
        """The stream normalised for its attention to the other stream, and for the other's to it."""
        norm, into = self.modules[6], self.names[7]
        if reads and gives:
            return self.stream.norm_pair(norm, self.reads, self.gives, into)
        query = self.stream.norm(norm, *self.reads, into) if reads else None
        return query, self.stream.norm(norm, *self.gives) if gives else None

    def attend_to(self, other: Modality, query: Input | None, context: Input | None, mask: Tensor | None) -> None:
        ropes = {"query_rotary_emb": self.exchange_rope, "key_rotary_emb": other.exchange_rope}
        branch = self.modules[7](query, encoder_hidden_states=context, **ropes, attention_mask=mask)
        self.stream.add(branch, self.gate)

    def feed_forward(self) -> Tensor:
        norm3, ff = self.modules[4:6]
        shift, scale, gate = self.mlp
        x = self.stream.norm(norm3, shift, scale, into=self.names[5])
        self.stream.add(feed_forward(ff, x), gate)
        return self.stream.value()
