"""Kandinsky 5: two blocks of the video and one of the text; self-attentions run ops in bfloat16 alone."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Kandinsky5Transformer3DModel
from torch import Tensor, nn

from . import Family, randn

TEXT = 5


def time_in_dtype(layer: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """diffusers loads the layer in float32. The tests cast it, and the model gives it float32."""
    return (args[0].to(layer.weight.dtype),)


def make() -> nn.Module:
    model = Kandinsky5Transformer3DModel(
        in_text_dim=24,
        in_text_dim2=12,
        time_dim=16,
        model_dim=32,
        ff_dim=48,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(4, 6, 6),
    )
    model.time_embeddings.in_layer.register_forward_pre_hook(time_in_dtype)
    return model


def inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, 2, 4, 6, 4),
        "encoder_hidden_states": randn(batch, TEXT, 24, seed=2),
        "timestep": torch.linspace(900, 300, batch),
        "pooled_projections": randn(batch, 12, seed=3),
        "visual_rope_pos": (torch.arange(2), torch.arange(2), torch.arange(3)),
        "text_rope_pos": torch.arange(TEXT),
    }


BLOCKS = {
    "diffusers.Kandinsky5TransformerDecoderBlock": 2,
    "diffusers.Kandinsky5TransformerEncoderBlock": 1,
    "diffusers.Kandinsky5Attention": 5,
    "diffusers.Kandinsky5FeedForward": 3,
}

FAMILIES = {
    "": Family(
        make,
        inputs,
        BLOCKS,
        fp8=2 * (4 + 1 + 2),
        lora=("to_query", "to_key", "to_value", "attention.out_layer", "feed_forward.in_layer"),
        magnifies=30.0,
        stock_but_in_bfloat16=("the stock rotation rounds to bfloat16",),
    ),
}
