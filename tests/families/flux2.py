"""FLUX.2: two double and two single blocks, with and without guidance."""

from __future__ import annotations

import functools
from typing import Any

import torch
from diffusers import Flux2Transformer2DModel
from torch import nn

from . import Family, randn

IMAGE, TEXT = 6, 5


def make(guidance: bool) -> nn.Module:
    return Flux2Transformer2DModel(
        in_channels=8,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance,
    )


def inputs(guidance: bool, batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, IMAGE, 8),
        "encoder_hidden_states": randn(batch, TEXT, 32, seed=2),
        "timestep": torch.linspace(0.9, 0.3, batch),
        "img_ids": torch.arange(IMAGE * 4).view(IMAGE, 4).float() % 5,
        "txt_ids": torch.arange(TEXT * 4).view(TEXT, 4).float() % 3,
        "guidance": torch.full((batch,), 4.0) if guidance else None,
    }


def family(guidance: bool) -> Family:
    return Family(
        functools.partial(make, guidance),
        functools.partial(inputs, guidance),
        {
            "diffusers.Flux2TransformerBlock": 2,
            "diffusers.Flux2SingleTransformerBlock": 2,
            "diffusers.Flux2Attention": 2,
            "diffusers.Flux2ParallelSelfAttention": 2,
            "diffusers.Flux2FeedForward": 4,
        },
        fp8=2 * 6 + 2 * 2,
        lora=(
            "to_q",
            "to_k",
            "to_v",
            "to_out.0",
            "add_q_proj",
            "linear_in",
            "to_qkv_mlp_proj",
            "single_transformer_blocks.0.attn.to_out",
        ),
    )


FAMILIES = {"": family(True), "klein": family(False)}
