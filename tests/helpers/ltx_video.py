"""A tiny LTX-Video transformer and its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

TINY = {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16, "cross_attention_dim": 64}


def make_model(device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    import diffusers

    torch.manual_seed(0)
    model = diffusers.LTXVideoTransformer3DModel(in_channels=8, out_channels=8, caption_channels=32, **TINY)
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def make_inputs(device: str, frames: int = 2, seed: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(1, frames * 6, 8, generator=generator).to(device, dtype),
        "encoder_hidden_states": torch.randn(1, 5, 32, generator=generator).to(device, dtype),
        "timestep": torch.tensor([500.0 - seed], device=device),
        "encoder_attention_mask": torch.ones(1, 5, dtype=torch.int64, device=device),
        "num_frames": frames,
        "height": 2,
        "width": 3,
        "return_dict": False,
    }
