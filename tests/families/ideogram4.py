"""Ideogram 4: two blocks; text and image in one sequence, also after padding."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Ideogram4Transformer2DModel
from torch import nn

from . import Family, randn, with_time_in_dtype

TEXT, IMAGE = 5, 6
TEXT_TOKEN, IMAGE_TOKEN = 3, 2


def make() -> nn.Module:
    model = Ideogram4Transformer2DModel(
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        intermediate_size=64,
        adaln_dim=32,
        llm_features_dim=24,
        mrope_section=(4, 2, 2),
    )
    model.register_forward_pre_hook(with_time_in_dtype, with_kwargs=True)
    return model


def inputs(batch: int) -> dict[str, Any]:
    tokens = TEXT + IMAGE
    kinds = torch.tensor([TEXT_TOKEN] * TEXT + [IMAGE_TOKEN] * IMAGE)
    return {
        "hidden_states": randn(batch, tokens, 4),
        "timestep": torch.linspace(0.9, 0.3, batch),
        "encoder_hidden_states": randn(batch, tokens, 24, seed=2),
        "position_ids": (torch.arange(tokens * 3).view(1, tokens, 3) % 7).expand(batch, -1, -1),
        "segment_ids": torch.ones(batch, tokens, dtype=torch.int64),
        "indicator": kinds.expand(batch, -1),
    }


def padded(*lengths: int) -> dict[str, Any]:
    """Prompts of these lengths, with padding before them, which has a segment of its own."""
    segments = torch.ones(len(lengths), TEXT + IMAGE, dtype=torch.int64)
    for segment, length in zip(segments, lengths):
        segment[: TEXT - length] = -1
    return {"segment_ids": segments}


BLOCKS = {"diffusers.Ideogram4TransformerBlock": 2, "diffusers.Ideogram4Attention": 2, "diffusers.Ideogram4MLP": 2}
LORA = ("to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3", "layers.0.adaln_modulation")

FAMILIES = {
    "": Family(make, inputs, BLOCKS, fp8=2 * 7, masked=lambda batch: padded(*[3] * (batch - 1), TEXT - 1), lora=LORA),
    "padded": Family(make, lambda batch: {**inputs(batch), **padded(*[3] * batch)}, BLOCKS, fp8=2 * 7, lora=LORA),
}
