"""ERNIE-Image: two blocks; prompts of two lengths are padded, and their mask is always given."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ErnieImageTransformer2DModel
from torch import nn

from . import Family, randn

TEXT = 5


def make() -> nn.Module:
    return ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=2,
        ffn_hidden_size=48,
        in_channels=4,
        out_channels=4,
        text_in_dim=24,
        rope_axes_dim=(4, 6, 6),
    )


def inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, 4, 3, 4),
        "timestep": torch.linspace(900, 300, batch),
        "text_bth": randn(batch, TEXT, 24, seed=2),
        "text_lens": torch.tensor([TEXT] * batch),
    }


def masked(batch: int) -> dict[str, Any]:
    return {"text_lens": torch.tensor([4] * (batch - 1) + [2])}


BLOCKS = {
    "diffusers.ErnieImageSharedAdaLNBlock": 2,
    "diffusers.ErnieImageAttention": 2,
    "diffusers.ErnieImageFeedForward": 2,
}

FAMILIES = {
    "": Family(
        make,
        inputs,
        BLOCKS,
        fp8=2 * (4 + 3),
        masked=masked,
        lora=("to_q", "to_k", "to_v", "to_out.0", "gate_proj", "up_proj", "linear_fc2"),
    ),
}
