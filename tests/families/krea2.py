"""Krea 2: two blocks and two that fuse the text; heads that share heads of keys, and a gate for each column."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Krea2Transformer2DModel
from torch import nn

from . import Family, randn

TEXT, IMAGE = 5, 6


def make(in_channels: int = 4) -> nn.Module:
    return Krea2Transformer2DModel(
        in_channels=in_channels,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        timestep_embed_dim=32,
        text_hidden_dim=32,
        num_text_layers=3,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=48,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )


def inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, IMAGE, 4),
        "encoder_hidden_states": randn(batch, TEXT, 3, 32, seed=2),
        "timestep": torch.linspace(0.9, 0.3, batch),
        "position_ids": torch.arange((TEXT + IMAGE) * 3).view(-1, 3) % 7,
    }


def masked(batch: int) -> dict[str, Any]:
    lengths = torch.tensor([4] * (batch - 1) + [2])
    return {"encoder_attention_mask": torch.arange(TEXT) < lengths.unsqueeze(1)}


BLOCKS = {
    "diffusers.Krea2TransformerBlock": 2,
    "diffusers.Krea2TextFusionBlock": 2,
    "diffusers.Krea2Attention": 4,
    "diffusers.Krea2SwiGLU": 4,
}

FAMILIES = {
    "": Family(
        make,
        inputs,
        BLOCKS,
        fp8=2 * (5 + 3),
        masked=masked,
        lora=("to_q", "to_k", "to_v", "to_gate", "to_out.0", "gate", "up", "down"),
    ),
}
