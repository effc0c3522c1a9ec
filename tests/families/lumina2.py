"""Lumina 2: two blocks, a refiner of noise and one of the caption; four heads that share two heads of keys."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Lumina2Transformer2DModel
from torch import nn

from . import Family, randn

TEXT = 6


def make() -> nn.Module:
    return Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=64,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=16,
        axes_dim_rope=(4, 6, 6),
        axes_lens=(30, 16, 16),
        cap_feat_dim=24,
    )


def inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, 4, 4, 6),
        "timestep": torch.linspace(0.9, 0.3, batch),
        "encoder_hidden_states": randn(batch, TEXT, 24, seed=2),
        "encoder_attention_mask": torch.ones(batch, TEXT, dtype=torch.int64),
    }


def masked(batch: int) -> dict[str, Any]:
    lengths = torch.tensor([4] * (batch - 1) + [2])
    return {"encoder_attention_mask": (torch.arange(TEXT) < lengths.unsqueeze(1)).long()}


BLOCKS = {"diffusers.Lumina2TransformerBlock": 4, "diffusers.Attention": 4, "diffusers.LuminaFeedForward": 4}

FAMILIES = {
    "": Family(
        make,
        inputs,
        BLOCKS,
        fp8=4 * 7,
        masked=masked,
        lora=("to_q", "to_k", "to_v", "to_out.0", "linear_1", "linear_2", "norm1.linear"),
        one_graph=False,
    ),
}
