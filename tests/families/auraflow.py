"""AuraFlow: two blocks of two streams and two of one. The feed-forward's width is a multiple of 256."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AuraFlowTransformer2DModel
from torch import nn

from . import Family, randn

LAYERS = 2


def make() -> nn.Module:
    return AuraFlowTransformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=LAYERS,
        num_single_dit_layers=LAYERS,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        caption_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=16,
    )


def inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, 4, 8, 8),
        "encoder_hidden_states": randn(batch, 5, 24, seed=2),
        "timestep": torch.linspace(0.9, 0.3, batch),
    }


FAMILIES = {
    "": Family(
        make,
        inputs,
        {
            "diffusers.AuraFlowJointTransformerBlock": LAYERS,
            "diffusers.AuraFlowSingleTransformerBlock": LAYERS,
            "diffusers.AuraFlowFeedForward": 3 * LAYERS,
            "diffusers.Attention": 2 * LAYERS,
        },
        fp8=2 * LAYERS * (4 + 3),
        lora=("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "linear_1", "norm1.linear"),
    )
}
