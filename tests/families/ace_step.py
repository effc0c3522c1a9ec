"""ACE-Step 1.5: two blocks, of which the first attends within a window; four heads that share two heads of keys."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AceStepTransformer1DModel
from torch import nn

from . import Family, randn, with_time_in_dtype

TOKENS = 12


def make() -> nn.Module:
    model = AceStepTransformer1DModel(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        in_channels=12,
        audio_acoustic_hidden_dim=4,
        sliding_window=2,
        encoder_hidden_size=24,
    )
    model.register_forward_pre_hook(with_time_in_dtype, with_kwargs=True)
    return model


def inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, TOKENS, 4),
        "timestep": torch.linspace(0.9, 0.3, batch),
        "timestep_r": torch.linspace(0.7, 0.1, batch),
        "encoder_hidden_states": randn(batch, 5, 24, seed=2),
        "context_latents": randn(batch, TOKENS, 8, seed=3),
    }


BLOCKS = {"diffusers.AceStepTransformerBlock": 2, "diffusers.AceStepAttention": 4, "diffusers.AceStepMLP": 2}

FAMILIES = {
    "": Family(
        make,
        inputs,
        BLOCKS,
        fp8=2 * (4 + 1 + 3),
        lora=("to_q", "to_k", "to_v", "to_out.0", "gate_proj", "up_proj", "down_proj"),
    ),
}
