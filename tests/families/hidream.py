"""HiDream-I1: two blocks of two streams and two of one, with a mixture of experts and, as no release has, without."""

from __future__ import annotations

import functools
from typing import Any

import torch
from diffusers import HiDreamImageTransformer2DModel
from torch import nn

from . import Family, randn

LAYERS, EXPERTS = 2, 3


def make(experts: int = EXPERTS, chosen: int = EXPERTS) -> nn.Module:
    """Tokens take all experts unless told otherwise: another rounding would choose others where two are as good."""
    return HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        num_layers=LAYERS,
        num_single_layers=LAYERS,
        attention_head_dim=16,
        num_attention_heads=2,
        caption_channels=[24, 20],
        text_emb_dim=12,
        num_routed_experts=experts,
        num_activated_experts=chosen,
        axes_dims_rope=(4, 6, 6),
        max_resolution=(8, 8),
        llama_layers=[0, 1, 2, 1],
    )


def inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, 4, 8, 8),
        "timesteps": torch.linspace(900, 300, batch),
        "encoder_hidden_states_t5": randn(batch, 3, 24, seed=2),
        "encoder_hidden_states_llama3": [randn(batch, 2, 20, seed=seed) for seed in (3, 4, 5)],
        "pooled_embeds": randn(batch, 12, seed=6),
    }


def masked(batch: int) -> dict[str, Any]:
    """The same image as tokens, the keys of the last ones multiplied by 0, as for images that are not square."""
    image = inputs(batch)["hidden_states"].unflatten(-2, (4, 2)).unflatten(-1, (4, 2))
    rows, columns = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0)).unbind(-1)
    return {
        "hidden_states": image.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2),
        "hidden_states_masks": (torch.arange(16) < 11).float().expand(batch, -1),
        "img_ids": torch.stack((torch.zeros(16), rows, columns), -1).expand(batch, -1, -1),
        "img_sizes": torch.full((batch, 2), 4),
    }


BLOCKS = {
    "diffusers.HiDreamImageTransformerBlock": LAYERS,
    "diffusers.HiDreamImageSingleTransformerBlock": LAYERS,
    "diffusers.HiDreamAttention": 2 * LAYERS,
}
MIXTURE = "diffusers.MOEFeedForwardSwiGLU"
MLP = "diffusers.HiDreamImageFeedForwardSwiGLU"
LORA = ("to_q", "to_k", "to_v", "to_out", "w1")

FAMILIES = {
    "": Family(
        make,
        inputs,
        {**BLOCKS, MIXTURE: 2 * LAYERS, MLP: 2 * LAYERS * (EXPERTS + 1) + LAYERS},
        fp8=2 * LAYERS * (4 + 3 * (EXPERTS + 1)),
        masked=masked,
        lora=LORA,
        one_graph=False,
    ),
    "dense": Family(
        functools.partial(make, experts=0),
        inputs,
        {**BLOCKS, MLP: 3 * LAYERS},
        fp8=2 * LAYERS * (4 + 3),
        masked=masked,
        lora=LORA,
    ),
}
