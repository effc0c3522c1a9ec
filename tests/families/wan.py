"""Wan: text, image and per-token image to video, VACE, Animate, ChronoEdit, SkyReels-V2."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers import (
    ChronoEditTransformer3DModel,
    SkyReelsV2Transformer3DModel,
    WanAnimateTransformer3DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)
from torch import nn

from . import Family, randn

TEXT, GRID = 512, (2, 4, 6)  # the processors take the last 512 tokens for the text's; latent frames, height, width
SIZES: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
BLOCKS = {"diffusers.WanTransformerBlock": 2, "diffusers.WanAttention": 4}
FP8 = 2 * 7


def make(cls: type[nn.Module] = WanTransformer3DModel, **config: Any) -> nn.Module:
    return cls(**{**SIZES, **config})


def inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, 4, *GRID),
        "timestep": torch.linspace(900, 300, batch),
        "encoder_hidden_states": randn(batch, TEXT, 32, seed=2),
    }


def of_image(batch: int) -> dict[str, Any]:
    return {**inputs(batch), "encoder_hidden_states_image": randn(batch, 7, 32, seed=3)}


def per_token(batch: int) -> dict[str, Any]:
    return {**inputs(batch), "timestep": torch.linspace(0, 900, batch * 12).view(batch, 12)}


def vace(batch: int) -> dict[str, Any]:
    return {**inputs(batch), "control_hidden_states": randn(batch, 6, *GRID, seed=4)}


def make_vace() -> nn.Module:
    return make(WanVACETransformer3DModel, vace_layers=[0, 1], vace_in_channels=6)


def make_animate() -> nn.Module:
    return make(
        WanAnimateTransformer3DModel,
        in_channels=12,
        latent_channels=4,
        image_dim=32,
        added_kv_proj_dim=32,
        motion_encoder_channel_sizes={"4": 4, "8": 4, "16": 4},
        motion_encoder_size=16,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=8,
        face_encoder_hidden_dim=16,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )


def animate(batch: int) -> dict[str, Any]:
    return {
        **of_image(batch),
        "hidden_states": randn(batch, 12, *GRID),
        "pose_hidden_states": randn(batch, 4, 1, *GRID[1:], seed=5),
        "face_pixel_values": randn(batch, 3, 4, 16, 16, seed=6),
    }


FAMILIES = {
    "t2v": Family(make, inputs, BLOCKS, FP8, first_block_cache=True),
    "no_norm2": Family(lambda: make(cross_attn_norm=False), inputs, BLOCKS, FP8),
    "i2v": Family(lambda: make(image_dim=32, added_kv_proj_dim=32), of_image, BLOCKS, FP8),
    "ti2v": Family(make, per_token, BLOCKS, FP8),
    "vace": Family(
        make_vace,
        vace,
        {**BLOCKS, "diffusers.WanVACETransformerBlock": 2, "diffusers.WanAttention": 8},
        2 * FP8,
    ),
    "animate": Family(make_animate, animate, BLOCKS, FP8),
    "chronoedit": Family(partial(make, ChronoEditTransformer3DModel), inputs, BLOCKS, FP8),
    "skyreels": Family(
        partial(make, SkyReelsV2Transformer3DModel),
        inputs,
        {"diffusers.SkyReelsV2TransformerBlock": 2, "diffusers.SkyReelsV2Attention": 4},
        FP8,
    ),
}
