"""Qwen-Image 2.1: two blocks on text, an image to edit and the image; also with one time for all tokens."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import QwenImage21Transformer2DModel
from torch import nn

from . import Family, randn

TEXT, SLOTS = 5, 4  # a slot of an image stands for four of its tokens


def make(**config: Any) -> nn.Module:
    return QwenImage21Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=24,
        axes_dims_rope=(4, 6, 6),
        **config,
    )


def one_time() -> nn.Module:
    return make(causal_condition=False)


def inputs(batch: int) -> dict[str, Any]:
    text, slots = [False] * TEXT, [True] * SLOTS
    return {
        "hidden_states": randn(batch, 8 * SLOTS, 4),
        "encoder_hidden_states": randn(batch, TEXT + SLOTS + 2, 24, seed=2),
        "timestep": torch.linspace(0.9, 0.3, batch),
        "img_shapes": [[(1, 4, 4), (1, 4, 4)]] * batch,
        "img_mask": torch.tensor([text + slots + [False] * 2 + slots] * batch),
    }


def masked(batch: int) -> dict[str, Any]:
    lengths = torch.tensor([TEXT + SLOTS + 1] * (batch - 1) + [TEXT + SLOTS])
    return {"encoder_hidden_states_mask": torch.arange(TEXT + SLOTS + 2) < lengths.unsqueeze(1)}


BLOCKS = {
    "diffusers.QwenImage21TransformerBlock": 2,
    "diffusers.QwenImage21Attention": 2,
    "diffusers.QwenImage21SwiGLUFeedForward": 2,
}
LORA = ("to_q", "to_k", "to_v", "to_out.0", "img_mlp.proj", "img_mlp.out", "gate_layer")

FAMILIES = {
    "": Family(make, inputs, BLOCKS, fp8=2 * (4 + 3), masked=masked, lora=LORA, one_graph=False),
    "one_time": Family(one_time, inputs, BLOCKS, fp8=2 * (4 + 3), lora=LORA, one_graph=False),
}
