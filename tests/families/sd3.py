"""Stable Diffusion 3 medium (no norms of query and key), 3.5 large (with norms) and 3.5 medium (a second attention)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from torch import nn

from . import Family, randn


def make(**config: Any) -> nn.Module:
    return SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        pos_embed_max_size=16,
        **config,
    )


def inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, 4, 8, 8),
        "encoder_hidden_states": randn(batch, 5, 32, seed=2),
        "pooled_projections": randn(batch, 16, seed=3),
        "timestep": torch.linspace(900, 300, batch),
    }


def family(attentions: int, **config: Any) -> Family:
    return Family(
        functools.partial(make, **config),
        inputs,
        {"diffusers.JointTransformerBlock": 3, "diffusers.Attention": attentions},
        fp8=3 * 6 + 4 * (attentions - 3),
        lora=("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "net.0.proj", "norm1.linear"),
    )


FAMILIES = {
    "": family(3),
    "35large": family(3, qk_norm="rms_norm"),
    "35medium": family(5, qk_norm="rms_norm", dual_attention_layers=(0, 1)),
}
