"""LTX-2 and LTX-2.3: blocks of two streams, video and audio, each with self-attention, cross-attention to the prompt,
cross-attention to the other stream and feed-forward.

All modulation is a table plus the timestep's. LTX-2.3 also modulates the prompt and its cross-attention, and gates
every head of an attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..blocks.block import Block
from ..blocks.stream import RMSNORM
from ..parallel.context import Parallel, Splits
from ._ltx2_attention import CROSS, LTX2, SELF
from ._ltx2_modality import Modality


def block_forward(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    given = {**dict(zip(PARAMETERS, args)), **kwargs}
    video, audio = Modality(self, given, "video", "audio"), Modality(self, given, "audio", "video")
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
    # The exchange between video and audio. Only the audio's query of it adds little error in fp8.
    fp8_skip=("*.audio_to_video_attn.*", *(f"*.video_to_audio_attn.{name}" for name in ("to_k", "to_v", "to_out.0"))),
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
