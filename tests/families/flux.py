"""FLUX.1 and LongCat-Image, Ovis-Image, Bria: two double and two single blocks each."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers import (
    BriaFiboTransformer2DModel,
    BriaTransformer2DModel,
    FluxTransformer2DModel,
    LongCatImageTransformer2DModel,
    OvisImageTransformer2DModel,
)
from torch import nn

from . import Family, randn

IMAGE, TEXT = 6, 5
SIZES: dict[str, Any] = {
    "in_channels": 8,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": [4, 4, 8],
}


def make(cls: type[nn.Module] = FluxTransformer2DModel, **config: Any) -> nn.Module:
    return cls(**{**SIZES, **config})


def inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, IMAGE, 8),
        "encoder_hidden_states": randn(batch, TEXT, 32, seed=2),
        "timestep": torch.linspace(0.9, 0.3, batch),
        "img_ids": torch.arange(IMAGE * 3).view(IMAGE, 3).float() % 5,
        "txt_ids": torch.zeros(TEXT, 3),
    }


def pooled(batch: int) -> dict[str, Any]:
    return {**inputs(batch), "pooled_projections": randn(batch, 32, seed=3)}


def of_layers(batch: int) -> dict[str, Any]:
    """FIBO's blocks read the layers of its text encoder."""
    return {**inputs(batch), "text_encoder_layers": [randn(batch, TEXT, 16, seed=4 + layer) for layer in range(4)]}


def masked(batch: int) -> dict[str, Any]:
    """The padding of prompts, as FIBO's pipeline masks it."""
    seen = torch.ones(batch, 1, 1, TEXT + IMAGE, dtype=torch.bool)
    seen[-1, ..., 3:TEXT] = False
    return {"joint_attention_kwargs": {"attention_mask": seen}}


def blocks(name: str, attention: str = "", attentions: int = 4) -> dict[str, int]:
    return {
        f"diffusers.{name}TransformerBlock": 2,
        f"diffusers.{name}SingleTransformerBlock": 2,
        f"diffusers.{attention or name + 'Attention'}": attentions,
    }


FP8 = 2 * 6 + 2 * 5
LORA = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "net.0.proj", "proj_mlp", "proj_out", "norm1.linear")

FAMILIES = {
    "": Family(
        partial(make, pooled_projection_dim=32),
        pooled,
        blocks("Flux"),
        FP8,
        masked=masked,
        lora=LORA,
        first_block_cache=True,
    ),
    "longcat": Family(
        partial(make, LongCatImageTransformer2DModel, pooled_projection_dim=32), inputs, blocks("LongCatImage"), FP8
    ),
    "ovis": Family(partial(make, OvisImageTransformer2DModel), inputs, blocks("OvisImage"), FP8, lora=LORA),
    "bria": Family(partial(make, BriaTransformer2DModel), inputs, blocks("Bria"), FP8, lora=LORA),
    "fibo": Family(
        partial(make, BriaFiboTransformer2DModel, text_encoder_dim=16),
        of_layers,
        {**blocks("BriaFibo", attentions=2), "diffusers.Attention": 2},
        FP8,
        masked=masked,
        lora=LORA,
    ),
}
