"""Cosmos 3: text and video of one sample, with sound too, and the backbone with squared ReLU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers import Cosmos3OmniTransformer
from torch import Tensor, nn

from . import Family, randn

TEXT, GRID, SOUND = 5, (2, 2, 3), 4  # tokens; latent frames, rows and columns of patches; tokens


def make(**config: Any) -> nn.Module:
    heads = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_axes_dim": (4, 2, 2)}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 40}
    latents = {"latent_channel": 4, "patch_latent_dim": 16}
    return Cosmos3OmniTransformer(**{**heads, **sizes, **latents, **config})


def indexes(first: int, count: int) -> Tensor:
    return torch.arange(first, first + count)


def inputs(batch: int) -> dict[str, Any]:
    """The sequence is one sample's, of `batch` videos."""
    frames, rows, columns = GRID
    each = frames * rows * columns
    video = batch * each
    places = torch.cartesian_prod(*map(torch.arange, (batch * frames, rows, columns))).T + TEXT
    return {
        "input_ids": torch.arange(TEXT) * 7 % 40,
        "text_indexes": indexes(0, TEXT),
        "position_ids": torch.cat((indexes(0, TEXT).expand(3, -1), places), 1),
        "und_len": TEXT,
        "sequence_length": TEXT + video,
        "vision_tokens": [randn(1, 4, frames, 2 * rows, 2 * columns, seed=1 + i) for i in range(batch)],
        "vision_token_shapes": [GRID] * batch,
        "vision_sequence_indexes": indexes(TEXT, video),
        "vision_mse_loss_indexes": indexes(TEXT, video),
        "vision_timesteps": torch.full((video,), 700.0),
        "vision_noisy_frame_indexes": [torch.arange(frames)] * batch,
    }


def with_sound(batch: int) -> dict[str, Any]:
    """With sound after the video."""
    of_video = inputs(batch)
    first = of_video["sequence_length"]
    places = indexes(first, SOUND)
    return {
        **of_video,
        "position_ids": torch.cat((of_video["position_ids"], places.expand(3, -1)), 1),
        "sequence_length": first + SOUND,
        "sound_tokens": [randn(6, SOUND, seed=9)],
        "sound_token_shapes": [(SOUND, 1, 1)],
        "sound_sequence_indexes": places,
        "sound_mse_loss_indexes": places,
        "sound_timesteps": torch.full((SOUND,), 700.0),
        "sound_noisy_frame_indexes": [torch.arange(SOUND)],
    }


LAYER, ATTENTION, MLP = (
    f"diffusers.Cosmos3{name}" for name in ("VLTextMoTDecoderLayer", "PackedMoTAttention", "VLTextMLP")
)
LORA = ("to_q", "to_k", "to_v", "add_q_proj", "add_v_proj", "to_add_out", "up_proj")
NEMOTRON = {"hidden_act": "relu2", "qk_norm_for_text": False, "use_und_k_norm_for_gen": True}

FAMILIES = {
    "": Family(make, inputs, {LAYER: 2, ATTENTION: 2, MLP: 4}, 2 * 7, lora=LORA),
    "sound": Family(
        partial(make, sound_gen=True, sound_dim=6, attention_bias=True),
        with_sound,
        {LAYER: 2, ATTENTION: 2, MLP: 4},
        2 * 7,
        lora=LORA,
    ),
    "nemotron": Family(
        partial(make, **NEMOTRON),
        inputs,
        {LAYER: 2},
        2 * 6,
        lora=LORA,
        not_recorded="it holds a Cosmos3PackedMoTAttention, which may run other kernels",
        left_alone=(
            "the generated tokens read keys of the text with another norm",
            "it holds the modules down_proj, up_proj; expected act_fn, down_proj, gate_proj, up_proj",
        ),
    ),
}
