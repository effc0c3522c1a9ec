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
from .._parallel import Parallel, Splits
from .._rotary import Tables, full_width, halves
from .._sites import site_of
from .._stream import RMSNORM, Mod, Stream, modulation

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
    return halves(site_of(attention), rope)


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
    """One stream of a block with its modules, which differ from the other's by the prefix of their names."""

    def __init__(self, block: Any, prefix: str, value: Tensor, temb: Tensor, adaln: bool) -> None:
        names = "norm1", "attn1", "norm2", "attn2", "norm3", "ff"
        self.modules = children(block, *(prefix + name for name in names))
        self.value, self.stream = value, Stream(block, value)
        table = block._parameters[prefix + "scale_shift_table"]
        mods = modulation(temb, 9 if adaln else 6, table)
        self.attn1, self.mlp, self.query = mods[:3], mods[3:6], mods[6:]  # shift, scale, gate

    def attend_to_itself(self, rope: Tables | None, mask: Tensor | None, options: dict[str, Any]) -> None:
        norm1, attn1 = self.modules[:2]
        shift, scale, gate = self.attn1
        x = self.stream.norm(norm1, shift, scale, into=SELF.readers(attn1, self.value))
        branch = attn1(
            hidden_states=x, encoder_hidden_states=None, query_rotary_emb=rope, attention_mask=mask, **options
        )
        self.stream.add(branch, gate)

    def attend_to_prompt(self, text: Tensor, mask: Tensor | None) -> None:
        norm2, attn2 = self.modules[2:4]
        shift, scale, gate = self.query or (None, None, None)
        x = self.stream.norm(norm2, shift, scale, into=CROSS.readers(attn2, self.value))
        self.stream.add(attn2(x, encoder_hidden_states=text, query_rotary_emb=None, attention_mask=mask), gate)

    def feed_forward(self) -> Tensor:
        norm3, ff = self.modules[4:]
        shift, scale, gate = self.mlp
        x = self.stream.norm(norm3, shift, scale, into=ff_input(ff, self.value))
        self.stream.add(feed_forward(ff, x), gate)
        return self.stream.value()


def block_forward(
    self: Any,
    hidden_states: Tensor,
    audio_hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    audio_encoder_hidden_states: Tensor,
    temb: Tensor,
    temb_audio: Tensor,
    temb_ca_scale_shift: Tensor,
    temb_ca_audio_scale_shift: Tensor,
    temb_ca_gate: Tensor,
    temb_ca_audio_gate: Tensor,
    temb_prompt: Tensor | None = None,
    temb_prompt_audio: Tensor | None = None,
    video_rotary_emb: Tables | None = None,
    audio_rotary_emb: Tables | None = None,
    ca_video_rotary_emb: Tables | None = None,
    ca_audio_rotary_emb: Tables | None = None,
    encoder_attention_mask: Tensor | None = None,
    audio_encoder_attention_mask: Tensor | None = None,
    self_attention_mask: Tensor | None = None,
    audio_self_attention_mask: Tensor | None = None,
    a2v_cross_attention_mask: Tensor | None = None,
    v2a_cross_attention_mask: Tensor | None = None,
    use_a2v_cross_attention: bool = True,
    use_v2a_cross_attention: bool = True,
    perturbation_mask: Tensor | None = None,
    all_perturbed: bool | None = None,
) -> tuple[Tensor, Tensor]:
    video = _Modality(self, "", hidden_states, temb, self.video_cross_attn_adaln)
    audio = _Modality(self, "audio_", audio_hidden_states, temb_audio, self.audio_cross_attn_adaln)
    options: dict[str, Any] = {}
    if self.perturbed_attn:
        options = {"perturbation_mask": perturbation_mask, "all_perturbed": all_perturbed}
    video.attend_to_itself(video_rotary_emb, self_attention_mask, options)
    audio.attend_to_itself(audio_rotary_emb, audio_self_attention_mask, options)
    if self.cross_attn_adaln:
        encoder_hidden_states = _prompt(encoder_hidden_states, self.prompt_scale_shift_table, temb_prompt)
        audio_encoder_hidden_states = _prompt(
            audio_encoder_hidden_states, self.audio_prompt_scale_shift_table, temb_prompt_audio
        )
    video.attend_to_prompt(encoder_hidden_states, encoder_attention_mask)
    audio.attend_to_prompt(audio_encoder_hidden_states, audio_encoder_attention_mask)

    names = "audio_to_video_norm", "audio_to_video_attn", "video_to_audio_norm", "video_to_audio_attn"
    video_norm, to_video, audio_norm, to_audio = children(self, *names)
    video_mods, video_gate = _exchange(self.video_a2v_cross_attn_scale_shift_table, temb_ca_scale_shift, temb_ca_gate)
    audio_mods, audio_gate = _exchange(
        self.audio_a2v_cross_attn_scale_shift_table, temb_ca_audio_scale_shift, temb_ca_audio_gate
    )
    # Both directions read the streams as they are now; each norm serves two modulations.
    a2v = v2a = None
    if use_a2v_cross_attention:
        scale, shift = video_mods[:2]
        query = video.stream.norm(video_norm, shift, scale, into=CROSS.readers(to_video, hidden_states))
        scale, shift = audio_mods[:2]
        a2v = query, audio.stream.norm(audio_norm, shift, scale)
    if use_v2a_cross_attention:
        scale, shift = audio_mods[2:]
        query = audio.stream.norm(audio_norm, shift, scale, into=CROSS.readers(to_audio, audio_hidden_states))
        scale, shift = video_mods[2:]
        v2a = query, video.stream.norm(video_norm, shift, scale)
    if a2v is not None:
        branch = to_video(
            a2v[0],
            encoder_hidden_states=a2v[1],
            query_rotary_emb=ca_video_rotary_emb,
            key_rotary_emb=ca_audio_rotary_emb,
            attention_mask=a2v_cross_attention_mask,
        )
        video.stream.add(branch, video_gate)
    if v2a is not None:
        branch = to_audio(
            v2a[0],
            encoder_hidden_states=v2a[1],
            query_rotary_emb=ca_audio_rotary_emb,
            key_rotary_emb=ca_video_rotary_emb,
            attention_mask=v2a_cross_attention_mask,
        )
        audio.stream.add(branch, audio_gate)
    return video.feed_forward(), audio.feed_forward()


def _exchange(table: Tensor, temb: Tensor, temb_gate: Tensor) -> tuple[list[Mod], Mod]:
    """(scale, shift for audio to video, scale, shift for video to audio), and the gate of what comes in."""
    (gate,) = modulation(temb_gate, 1, table[4:])
    return modulation(temb, 4, table[:4]), gate


def _why_not_block(block: Any, arguments: Mapping[str, Any]) -> str:
    for name, table in (("temb", block.scale_shift_table), ("temb_audio", block.audio_scale_shift_table)):
        temb: Tensor = arguments[name]
        if temb.dim() != 3 or temb.shape[-1] != table.numel():
            return f"{name} of shape {list(temb.shape)}"
    return ""


NORMS = ("norm1", "norm2", "norm3", "audio_norm1", "audio_norm2", "audio_norm3")
BLOCK = Block(
    classes=(LTX2 + "LTX2VideoTransformerBlock",),
    forward=block_forward,
    parameters=tuple(block_forward.__annotations__)[1:-1],
    children=frozenset(
        {
            *NORMS,
            *("attn1", "audio_attn1", "attn2", "audio_attn2", "ff", "audio_ff"),
            *("audio_to_video_norm", "audio_to_video_attn", "video_to_audio_norm", "video_to_audio_attn"),
        }
    ),
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
