"""Qwen-Image: two blocks of two streams."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel
from torch import nn

from . import Family, randn

TEXT = 5


def make() -> nn.Module:
    return QwenImageTransformer2DModel(
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


def masked(batch: int) -> dict[str, Any]:
    mask = torch.ones(batch, TEXT, dtype=torch.bool)
    mask[-1, 3:] = False
    return {"encoder_hidden_states_mask": mask}


FAMILIES = {
    "": Family(
        make,
        inputs,
        {"diffusers.QwenImageTransformerBlock": 2, "diffusers.Attention": 2},
        fp8=2 * 6,
        masked=masked,
        lora=("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "net.0.proj", "img_mod.1"),
        first_block_cache=True,
    )
}
