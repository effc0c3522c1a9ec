"""LTX-2 and LTX-2.3: blocks of two streams, video and audio, each with self-attention, cross-attention to the prompt,
cross-attention to the other stream and feed-forward.

All modulation is a table plus the timestep's. LTX-2.3 also modulates the prompt and its cross-attention, and gates
every head of an attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from .._attend import Attention, KeyBias
from .._block import Block
from .._feed_forward import feed_forward, ff_input
from .._guards import children
from .._linear import Input
from .._parallel import Parallel, Splits
from .._rotary import Tables, full_width, halves
from .._stream import RMSNORM, Stream, modulation

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
    if attention.heads == 2:
        return full_width(rope[0], attention.inner_dim), full_width(rope[1], attention.inner_dim)
    return halves(attention, rope)


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


def _prompt(text: Tensor, table: Tensor, temb: Tensor | None) -> Tensor:
    """The prompt with the modulation that LTX-2.3 gives it: a few rows, in the stock operations."""
    values = table[None, None].to(text.dtype)
    if temb is not None:
        values = values + temb.reshape(text.shape[0], temb.shape[1], 2, -1)
    shift, scale = values.unbind(2)
    return text * (1 + scale) + shift


class _Modality:
    """One stream of a block, with its modules and arguments: their names tell video from audio."""

    def __init__(self, block: Any, given: Mapping[str, Any], kind: str, other: str) -> None:
        prefix, suffix = ("", "") if kind == "video" else ("audio_", "_audio")
        names = (prefix + name for name in ("norm1", "attn1", "norm2", "attn2", "norm3", "ff"))
        self.modules = children(block, *names, f"{other}_to_{kind}_norm", f"{other}_to_{kind}_attn")
        self.value: Tensor = given[prefix + "hidden_states"]
        self.stream = Stream(block, self.value)
        self.text: Tensor = given[prefix + "encoder_hidden_states"]
        tables = block._parameters
        if block.cross_attn_adaln:
            table = tables[prefix + "prompt_scale_shift_table"]
            self.text = _prompt(self.text, table, given.get("temb_prompt" + suffix))
        self.text_mask, self.mask = (
            given.get(prefix + name) for name in ("encoder_attention_mask", "self_attention_mask")
        )
        self.rope, self.exchange_rope = (given.get(name + kind + "_rotary_emb") for name in ("", "ca_"))
        count = 9 if getattr(block, kind + "_cross_attn_adaln") else 6
        mods = modulation(given["temb" + suffix], count, tables[prefix + "scale_shift_table"])
        self.attn1, self.mlp, self.query = mods[:3], mods[3:6], mods[6:]  # shift, scale, gate
        table = tables[kind + "_a2v_cross_attn_scale_shift_table"]
        scale, shift, scale2, shift2 = modulation(given[f"temb_ca{suffix}_scale_shift"], 4, table[:4])
        (self.gate,) = modulation(given[f"temb_ca{suffix}_gate"], 1, table[4:])
        a2v, v2a = (shift, scale), (shift2, scale2)
        self.reads, self.gives = (a2v, v2a) if kind == "video" else (v2a, a2v)

    def attend_to_itself(self, options: Mapping[str, Any]) -> None:
        norm1, attn1 = self.modules[:2]
        shift, scale, gate = self.attn1
        x = self.stream.norm(norm1, shift, scale, into=SELF.readers(attn1, self.value))
        tokens = {"encoder_hidden_states": None, "query_rotary_emb": self.rope, "attention_mask": self.mask}
        self.stream.add(attn1(hidden_states=x, **tokens, **options), gate)

    def attend_to_prompt(self) -> None:
        norm2, attn2 = self.modules[2:4]
        shift, scale, gate = self.query or (None, None, None)
        x = self.stream.norm(norm2, shift, scale, into=CROSS.readers(attn2, self.value))
        text = {"encoder_hidden_states": self.text, "query_rotary_emb": None, "attention_mask": self.text_mask}
        self.stream.add(attn2(x, **text), gate)

    def exchange(self, reads: bool, gives: bool) -> tuple[Input | None, Input | None]:
        """The stream normalised for its attention to the other stream, and for the other's to it."""
        norm, attn = self.modules[6:]
        into = CROSS.readers(attn, self.value) if reads else None
        if reads and gives:
            return self.stream.norm_pair(norm, self.reads, self.gives, into)
        query = self.stream.norm(norm, *self.reads, into) if reads else None
        return query, self.stream.norm(norm, *self.gives) if gives else None

    def attend_to(self, other: _Modality, query: Input | None, context: Input | None, mask: Tensor | None) -> None:
        ropes = {"query_rotary_emb": self.exchange_rope, "key_rotary_emb": other.exchange_rope}
        branch = self.modules[7](query, encoder_hidden_states=context, **ropes, attention_mask=mask)
        self.stream.add(branch, self.gate)

    def feed_forward(self) -> Tensor:
        norm3, ff = self.modules[4:6]
        shift, scale, gate = self.mlp
        x = self.stream.norm(norm3, shift, scale, into=ff_input(ff, self.value))
        self.stream.add(feed_forward(ff, x), gate)
        return self.stream.value()


def block_forward(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    given = {**dict(zip(PARAMETERS, args)), **kwargs}
    video, audio = _Modality(self, given, "video", "audio"), _Modality(self, given, "audio", "video")
    perturbed = ("perturbation_mask", "all_perturbed") if self.perturbed_attn else ()
    options = {name: given.get(name) for name in perturbed}
    video.attend_to_itself(options)
    audio.attend_to_itself(options)
    video.attend_to_prompt()
    audio.attend_to_prompt()
    a2v, v2a = (given.get(f"use_{name}_cross_attention", True) for name in ("a2v", "v2a"))
    # Both directions read the streams as they are now.
    video_query, video_context = video.exchange(a2v, v2a)
    audio_query, audio_context = audio.exchange(v2a, a2v)
    if a2v:
        video.attend_to(audio, video_query, audio_context, given.get("a2v_cross_attention_mask"))
    if v2a:
        audio.attend_to(video, audio_query, video_context, given.get("v2a_cross_attention_mask"))
    return video.feed_forward(), audio.feed_forward()


def _why_not_block(block: Any, arguments: Mapping[str, Any]) -> str:
    for name, table in (("temb", block.scale_shift_table), ("temb_audio", block.audio_scale_shift_table)):
        temb: Tensor = arguments[name]
        if temb.dim() != 3 or temb.shape[-1] != table.numel():
            return f"{name} of shape {list(temb.shape)}"
    return ""


PARAMETERS = (
    *("hidden_states", "audio_hidden_states", "encoder_hidden_states", "audio_encoder_hidden_states"),
    *("temb", "temb_audio", "temb_ca_scale_shift", "temb_ca_audio_scale_shift", "temb_ca_gate", "temb_ca_audio_gate"),
    *("temb_prompt", "temb_prompt_audio", "video_rotary_emb", "audio_rotary_emb"),
    *("ca_video_rotary_emb", "ca_audio_rotary_emb", "encoder_attention_mask", "audio_encoder_attention_mask"),
    *("self_attention_mask", "audio_self_attention_mask", "a2v_cross_attention_mask", "v2a_cross_attention_mask"),
    *("use_a2v_cross_attention", "use_v2a_cross_attention", "perturbation_mask", "all_perturbed"),
)
NORMS = ("norm1", "norm2", "norm3", "audio_norm1", "audio_norm2", "audio_norm3")
BLOCK = Block(
    classes=(LTX2 + "LTX2VideoTransformerBlock",),
    forward=block_forward,
    parameters=PARAMETERS,
    streams=("hidden_states", "audio_hidden_states"),
    tensors=(
        *("temb", "temb_audio", "temb_ca_scale_shift", "temb_ca_audio_scale_shift"),
        *("temb_ca_gate", "temb_ca_audio_gate", "scale_shift_table", "audio_scale_shift_table"),
        *("video_a2v_cross_attn_scale_shift_table", "audio_a2v_cross_attn_scale_shift_table"),
    ),
    norms=dict.fromkeys((*NORMS, "audio_to_video_norm", "video_to_audio_norm"), (RMSNORM,)),
    attentions={
        **dict.fromkeys(("attn1", "audio_attn1"), SELF),
        **dict.fromkeys(("attn2", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn"), CROSS),
    },
    feed_forwards=("ff", "audio_ff"),
    fp8_skip=("*attn2.to_k", "*attn2.to_v", "*attn2.to_out.0", "*audio_*"),
    check=_why_not_block,
)


def _splits(model: Any) -> Splits:
    # "split" tables are [B, heads, S, D / 2], the others [B, S, D].
    table = (2, 4) if model.config.rope_type == "split" else (1, 3)
    return {
        "": {"hidden_states": (1, 3), "timestep": (1, 2), "video_keyframes_mask": (1, 3)},
        "rope": {0: table, 1: table},
        "cross_attn_rope": {0: table, 1: table},
    }


# The video is split. Audio and prompts are whole on every rank, so that the video alone is exchanged: for its
# self-attention, and as keys and values of the attention from audio to it.
PLANS = (
    Parallel(
        LTX2 + "LTX2VideoTransformer3DModel",
        _splits,
        gather={"proj_out": [(1, 3)]},
        local=("*.attn2", "*.audio_attn1", "*.audio_attn2", "*.audio_to_video_attn"),
    ),
)

ENTRIES = (BLOCK, SELF)
