"""Z-Image: two blocks, a refiner of noise and one of the caption; captions of several lengths, and the omni mode."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ZImageTransformer2DModel
from torch import nn

from . import Family, randn

IMAGE, TEXT = (4, 1, 4, 6), 24  # channels, frames, height, width; width of the caption's features


def make() -> nn.Module:
    return ZImageTransformer2DModel(
        in_channels=4,
        dim=48,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=3,
        n_kv_heads=3,
        cap_feat_dim=TEXT,
        axes_dims=[4, 6, 6],
        axes_lens=[128, 16, 16],
    )


def inputs(batch: int) -> dict[str, Any]:
    return {
        "x": [randn(*IMAGE, seed=sample) for sample in range(batch)],
        "t": torch.linspace(0.9, 0.3, batch),
        "cap_feats": [randn(7, TEXT, seed=10 + sample) for sample in range(batch)],
    }


def masked(batch: int) -> dict[str, Any]:
    return {"cap_feats": [randn(7 + 32 * sample, TEXT, seed=10 + sample) for sample in range(batch)]}


def omni(batch: int) -> dict[str, Any]:
    return {
        **inputs(batch),
        "x": [[randn(*IMAGE, seed=2 * sample + image) for image in range(2)] for sample in range(batch)],
        "cap_feats": [
            [randn(7 - image, TEXT, seed=10 + sample + image) for image in range(2)] for sample in range(batch)
        ],
        "siglip_feats": [None] * batch,
        "image_noise_mask": [[0, 1]] * batch,
    }


BLOCKS = {"diffusers.ZImageTransformerBlock": 4, "diffusers.Attention": 4, "diffusers.FeedForward": 4}

FAMILIES = {
    "": Family(
        make,
        inputs,
        BLOCKS,
        fp8=4 * 7,
        masked=masked,
        lora=("to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3", "layers.0.adaLN_modulation.0"),
    ),
    "omni": Family(make, omni, BLOCKS, fp8=4 * 7, lora=("to_q", "w1", "w2", "w3")),
}
