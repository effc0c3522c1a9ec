"""Bria FIBO 2: three blocks, one of which attends to the prompt, and a refiner; also with an image to edit."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import BriaFibo2Transformer2DModel
from torch import nn

from . import Family, randn

TEXT = 8


def make() -> nn.Module:
    return BriaFibo2Transformer2DModel(
        in_channels=4,
        dim=48,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=3,
        cap_feat_dim=32,
        injection_layer_ids=(1,),
        perceiver_num_layers=1,
        min_num_gist_tokens=2,
        max_num_gist_tokens=6,
        gist_step=1,
        gist_min_text_len=2,
        gist_max_text_len=8,
        axes_dims=(4, 6, 6),
        axes_lens=(32, 16, 16),
    )


def inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, 4, 4, 6),
        "timestep": torch.linspace(0.9, 0.3, batch),
        "encoder_hidden_states": randn(batch, 2, TEXT, 32, seed=2),
    }


def edit(batch: int) -> dict[str, Any]:
    return {**inputs(batch), "context_latents": [randn(batch, 4, 2, 4, seed=3)]}


def masked(batch: int) -> dict[str, Any]:
    lengths = torch.tensor([7] * (batch - 1) + [3])
    return {"encoder_attention_mask": torch.arange(TEXT) < lengths.unsqueeze(1)}


# The Perceiver's layer stays stock around two attentions and an MLP.
BLOCKS = {
    "diffusers.BriaFibo2TransformerBlock": 4,
    "diffusers.BriaFibo2Attention": 4 + 1 + 2,
    "diffusers.FeedForward": 4 + 1,
}
LORA = ("to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3", "layers.0.adaLN_modulation.0")

FAMILIES = {
    "": Family(make, inputs, BLOCKS, fp8=4 * 7 + 2, masked=masked, lora=LORA, given_twice=1),
    "edit": Family(make, edit, BLOCKS, fp8=4 * 7 + 2, lora=LORA, given_twice=1),
}
