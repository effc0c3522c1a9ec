"""Cosmos: a timestep of each sample or of each frame, and 2.5, whose cross-attention reads text and image."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers import CosmosTransformer3DModel
from torch import nn

from . import Family, randn

TEXT, GRID = 5, (2, 4, 6)  # latent frames, height, width


def make(**config: Any) -> nn.Module:
    sizes = {"in_channels": 4, "out_channels": 4, "num_layers": 2, "text_embed_dim": 32, "adaln_lora_dim": 8}
    heads = {"num_attention_heads": 2, "attention_head_dim": 16}
    places = {"max_size": (4, 8, 8), "concat_padding_mask": False}
    return CosmosTransformer3DModel(**{**sizes, **heads, **places, **config})


def inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, 4, *GRID),
        "timestep": torch.linspace(0.9, 0.3, batch),
        "encoder_hidden_states": randn(batch, TEXT, 32, seed=2),
    }


def per_frame(batch: int) -> dict[str, Any]:
    return {**inputs(batch), "timestep": torch.linspace(0, 0.9, 2 * batch).view(batch, 1, 2, 1, 1)}


def of_image(batch: int) -> dict[str, Any]:
    return {**inputs(batch), "encoder_hidden_states": (randn(batch, TEXT, 32, seed=2), randn(batch, 3, 24, seed=3))}


def controlled(batch: int) -> dict[str, Any]:
    """With what a ControlNet adds after the first block."""
    return {**inputs(batch), "block_controlnet_hidden_states": [randn(batch, 2 * 2 * 3, 32, seed=3)]}


def masked(batch: int) -> dict[str, Any]:
    mask = torch.ones(batch, TEXT, dtype=torch.bool)
    mask[-1, 3:] = False
    return {"attention_mask": mask}


BLOCKS = {"diffusers.CosmosTransformerBlock": 2, "diffusers.Attention": 4}
FP8 = 2 * 8

FAMILIES = {
    "": Family(make, inputs, BLOCKS, FP8, masked=masked),
    "per_frame": Family(partial(make, extra_pos_embed_type=None), per_frame, BLOCKS, FP8),
    "controlled": Family(partial(make, controlnet_block_every_n=2), controlled, BLOCKS, FP8),
    "25": Family(
        partial(make, img_context_dim_in=24, img_context_dim_out=32, extra_pos_embed_type=None),
        of_image,
        {**BLOCKS, "diffusers.Attention": 2},
        2 * 6,
        not_recorded="it holds a CosmosAttention, which may run other kernels",  # the stock cross-attention
    ),
}
