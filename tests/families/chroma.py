"""Chroma: two double and two single blocks."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ChromaTransformer2DModel
from torch import nn

from . import Family, randn

IMAGE, TEXT = 6, 5


def make() -> nn.Module:
    return ChromaTransformer2DModel(
        in_channels=8,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=16,
        approximator_hidden_dim=32,
        approximator_layers=1,
    )


def inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, IMAGE, 8),
        "encoder_hidden_states": randn(batch, TEXT, 32, seed=2),
        "timestep": torch.linspace(0.9, 0.3, batch),
        "img_ids": torch.arange(IMAGE * 3).view(IMAGE, 3).float() % 5,
        "txt_ids": torch.zeros(TEXT, 3),
    }


def masked(batch: int) -> dict[str, Any]:
    """The prompt's last tokens are padding. The mask is of the model's dtype, as the pipeline makes it."""
    valid = torch.tensor([TEXT - 2, TEXT - 1] * batch)[:batch]
    text = (torch.arange(TEXT) < valid[:, None]).float()
    return {"attention_mask": torch.cat((text, torch.ones(batch, IMAGE)), 1)}


FAMILIES = {
    "": Family(
        make,
        inputs,
        {
            "diffusers.ChromaTransformerBlock": 2,
            "diffusers.ChromaSingleTransformerBlock": 2,
            "diffusers.FluxAttention": 4,
        },
        fp8=2 * 6 + 2 * 5,
        masked=masked,
        lora=("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "net.0.proj", "proj_mlp", "proj_out"),
    )
}
