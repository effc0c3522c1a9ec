"""CogVideoX with rotation (5B) and without (2B), and ConsisID."""

from __future__ import annotations

import functools
from typing import Any

import torch
from diffusers import CogVideoXTransformer3DModel, ConsisIDTransformer3DModel
from torch import nn

from . import Family, randn

TEXT, GRID = 5, (2, 4, 6)  # latent frames, height, width; patches of 2 x 2
TOKENS = 2 * 2 * 3


def make(cls: type[nn.Module] = CogVideoXTransformer3DModel, **config: Any) -> nn.Module:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2}
    widths = {"time_embed_dim": 32, "text_embed_dim": 32, "max_text_seq_length": TEXT}
    sample = {"sample_height": GRID[1], "sample_width": GRID[2], "sample_frames": 5}
    return cls(**{**sizes, **widths, **sample, **config})


def inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, GRID[0], 4, *GRID[1:]),
        "encoder_hidden_states": randn(batch, TEXT, 32, seed=2),
        "timestep": torch.linspace(900, 300, batch),
    }


def rotated(batch: int) -> dict[str, Any]:
    angles = randn(TOKENS, 8, seed=3).repeat_interleave(2, -1) * 3
    return {**inputs(batch), "image_rotary_emb": (angles.cos(), angles.sin())}


BLOCKS = {"diffusers.CogVideoXBlock": 2, "diffusers.Attention": 2}
LORA = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "norm1.linear")

FAMILIES = {
    "5b": Family(
        functools.partial(make, use_rotary_positional_embeddings=True),
        rotated,
        BLOCKS,
        fp8=2 * 6,
        lora=LORA,
        first_block_cache=True,
    ),
    "2b": Family(make, inputs, BLOCKS, fp8=2 * 6, lora=LORA, first_block_cache=True),
    "consisid": Family(
        functools.partial(make, ConsisIDTransformer3DModel, use_rotary_positional_embeddings=True),
        rotated,
        {"diffusers.ConsisIDBlock": 2, "diffusers.Attention": 2},
        fp8=2 * 6,
        lora=LORA,
    ),
}
