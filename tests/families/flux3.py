"""FLUX.3: two blocks of each kind of tokens and two joint ones, also as a flow map."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers import Flux3Transformer2DModel
from torch import nn

from . import Family, randn

IMAGE, REFERENCE, TEXT = 6, 4, 5


def make(**config: Any) -> nn.Module:
    return Flux3Transformer2DModel(
        in_channels=8,
        cond_in_channels=8,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        timestep_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        **config,
    )


def ids(tokens: int, modulus: int) -> torch.Tensor:
    return torch.arange(tokens * 4).view(tokens, 4).float() % modulus


def text_to_image(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, IMAGE, 8),
        "encoder_hidden_states": randn(batch, TEXT, 32, seed=2),
        "timestep": torch.linspace(0.9, 0.3, batch),
        "img_ids": ids(IMAGE, 5),
        "txt_ids": ids(TEXT, 3),
    }


def inputs(batch: int) -> dict[str, Any]:
    """With a reference image, because each kind of tokens has blocks of its own."""
    return {
        **text_to_image(batch),
        "image_cond_hidden_states": randn(batch, REFERENCE, 8, seed=3),
        "image_cond_ids": ids(REFERENCE, 7),
    }


def flow_map(batch: int) -> dict[str, Any]:
    return {**inputs(batch), "target_timestep": torch.linspace(0.7, 0.1, batch)}


LORA = ("to_q", "to_k", "to_v", "to_out.0", "linear_in", "linear_out")
KINDS = 3  # of tokens
BLOCKS = {
    "diffusers.Flux3ModeTransformerBlock": 2 * KINDS,
    "diffusers.Flux3SingleTransformerBlock": 2,
    "diffusers.Flux3Attention": 2 * KINDS + 2,
    "diffusers.Flux3FeedForward": 2 * KINDS + 2,
}

FAMILIES = {
    "": Family(make, inputs, BLOCKS, fp8=(2 * KINDS + 2) * 6, lora=LORA),
    "text": Family(make, text_to_image, BLOCKS, fp8=(2 * KINDS + 2) * 6, lora=LORA, idle=2),
    "flow_map": Family(partial(make, flow_map=True), flow_map, BLOCKS, fp8=(2 * KINDS + 2) * 6, lora=LORA),
}
