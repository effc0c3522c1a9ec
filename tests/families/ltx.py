"""LTX-Video: two blocks; test_integration.py has more about this family."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import LTXVideoTransformer3DModel
from torch import nn

from . import Family, randn

GRID, TEXT = (2, 3, 4), 8  # latent frames, height, width
TOKENS = 24


def make() -> nn.Module:
    return LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=48,
    )


def inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, TOKENS, 8),
        "encoder_hidden_states": randn(batch, TEXT, 48, seed=2),
        "timestep": torch.linspace(900, 300, batch),
        "encoder_attention_mask": None,
        "rope_interpolation_scale": (8 / 25, 32, 32),
        **dict(zip(("num_frames", "height", "width"), GRID)),
    }


def masked(batch: int) -> dict[str, Any]:
    mask = torch.ones(batch, TEXT, dtype=torch.int64)
    mask[0, 3:] = 0
    return {"encoder_attention_mask": mask}


def per_token(batch: int) -> dict[str, Any]:
    return {**inputs(batch), "timestep": torch.linspace(900, 0, batch * TOKENS).view(batch, TOKENS)}


BLOCKS = {"diffusers.LTXVideoTransformerBlock": 2, "diffusers.LTXAttention": 4}

FAMILIES = {
    "": Family(make, inputs, BLOCKS, fp8=2 * 7, masked=masked, first_block_cache=True),
    "per_token": Family(make, per_token, BLOCKS, fp8=2 * 7),
}
