"""MiniMax H3: two blocks on a packed sequence of text, video and audio at two times, and one that refines the text."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch import nn

from . import Family, randn

TEXT, VIDEO, AUDIO = 4, 6, 3
TOKENS = TEXT + VIDEO + AUDIO


def make() -> nn.Module:
    return MiniMaxH3Transformer3DModel(
        num_attention_heads=3,
        attention_head_dim=16,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=48,
        in_channels=4,
        audio_in_channels=4,
        text_dim=24,
        freq_dim=16,
        time_embed_hidden_dim=32,
        time_embed_dim=16,
        rope_freq_dim=2,
    )


def inputs(batch: int) -> dict[str, Any]:
    places = torch.arange(TOKENS)
    text, video, audio = places.split((TEXT, VIDEO, AUDIO))
    return {
        "hidden_states": randn(batch, VIDEO, 16),
        "audio_hidden_states": randn(batch, AUDIO, 4, seed=2),
        "encoder_hidden_states": randn(batch, TEXT, 24, seed=3),
        "timestep": torch.tensor([0.9, 0.2]),
        "timestep_indices": (places == TEXT).long(),  # the first row of the video is a given image
        "token_tags": torch.tensor([1] * TEXT + [0] * VIDEO + [2] * AUDIO),
        "position_ids": torch.stack((places, places % 3, places % 2), -1),
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
    }


BLOCKS = {
    "diffusers.MiniMaxH3TransformerBlock": 2,
    "diffusers.MiniMaxH3TokenRefinerBlock": 1,
    "diffusers.MiniMaxH3Attention": 3,
    "diffusers.SwiGLU": 3,
}

FAMILIES = {"": Family(make, inputs, BLOCKS, fp8=2 * (4 + 2))}
