"""Qwen-Image: two blocks of two streams; Edit 2511, whose input image has a modulation of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel
from torch import nn

from . import Family, randn

TEXT = 5


def make(zero_cond_t: bool = False) -> nn.Module:
    return QwenImageTransformer2DModel(
        zero_cond_t=zero_cond_t,
        in_channels=8,
        out_channels=2,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    )


def inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, 6, 8),
        "encoder_hidden_states": randn(batch, TEXT, 32, seed=2),
        "timestep": torch.linspace(0.9, 0.3, batch),
        "img_shapes": [[(1, 2, 3)]] * batch,
    }


def edit(batch: int) -> dict[str, Any]:
    return {**inputs(batch), "hidden_states": randn(batch, 10, 8), "img_shapes": [[(1, 2, 3), (1, 2, 2)]] * batch}


def masked(batch: int) -> dict[str, Any]:
    mask = torch.ones(batch, TEXT, dtype=torch.bool)
    mask[-1, 3:] = False
    return {"encoder_hidden_states_mask": mask}


BLOCKS = {"diffusers.QwenImageTransformerBlock": 2, "diffusers.Attention": 2}
LORA = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "net.0.proj", "img_mod.1")

FAMILIES = {
    "": Family(make, inputs, BLOCKS, fp8=2 * 6, masked=masked, lora=LORA, first_block_cache=True),
    "edit": Family(
        partial(make, zero_cond_t=True), edit, BLOCKS, fp8=2 * 6, masked=masked, lora=LORA, first_block_cache=True
    ),
}
