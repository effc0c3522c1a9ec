"""Mochi: two blocks. The last one leaves the text alone after its attention."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import MochiTransformer3DModel
from torch import Tensor, nn

from . import Family, randn

TEXT, GRID = 6, (2, 4, 6)  # latent frames, height, width


def make(in_channels: int = 4) -> nn.Module:
    return MochiTransformer3DModel(
        num_attention_heads=3,
        attention_head_dim=16,
        num_layers=2,
        pooled_projection_dim=96,
        in_channels=in_channels,
        text_embed_dim=32,
        time_embed_dim=16,
    )


def inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, 4, *GRID),
        "encoder_hidden_states": randn(batch, TEXT, 32, seed=2),
        "timestep": torch.linspace(900, 300, batch),
        "encoder_attention_mask": torch.ones(batch, TEXT, dtype=torch.bool),
    }


def lengths(*valid: int) -> dict[str, Tensor]:
    return {"encoder_attention_mask": torch.arange(TEXT) < torch.tensor(valid).unsqueeze(1)}


def scattered(batch: int) -> dict[str, Any]:
    """Padding between valid tokens: the stock attention moves the results of valid tokens to the front."""
    return {"encoder_attention_mask": torch.tensor([0, 1, 1, 0, 1, 0], dtype=torch.bool).expand(batch, TEXT)}


BLOCKS = {"diffusers.MochiTransformerBlock": 2, "diffusers.MochiAttention": 2}
LORA = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "net.0.proj", "norm1.linear")
MASK = "a value is kept for the tensors that it is made of"  # the lengths of prompts, for their mask

FAMILIES = {
    "": Family(
        make,
        inputs,
        BLOCKS,
        fp8=2 * 6,
        masked=lambda batch: lengths(*[4] * (batch - 1), 2),
        lora=LORA,
        first_block_cache=True,
        one_graph=False,
        not_recorded=MASK,
    ),
    "padded": Family(
        make,
        lambda batch: {**inputs(batch), **lengths(*[3] * batch)},
        BLOCKS,
        fp8=2 * 6,
        masked=scattered,
        lora=LORA,
        one_graph=False,
        not_recorded=MASK,
    ),
}
