"""LTX-2, with both forms of the rotary table, and LTX-2.3: gated attention, a modulated prompt, perturbation.

The prompt of LTX-2.3 is modulated by a table and by the time, that of LTX-2.5 by a table alone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from diffusers import LTX2VideoTransformer3DModel
from torch import nn

from . import Family, randn

TEXT = 6
LTX23 = {
    **dict.fromkeys(("gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod"), True),
    "perturbed_attn": True,
    "use_prompt_embeddings": False,
}


def make(**config: Any) -> nn.Module:
    return LTX2VideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=16,
        cross_attention_dim=64,
        audio_in_channels=8,
        audio_out_channels=8,
        audio_num_attention_heads=4,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=32,
        num_layers=2,
        caption_channels=48,
        **config,
    )


def inputs(widths: tuple[int, int], batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, 2 * 2 * 3, 8),
        "audio_hidden_states": randn(batch, 5, 8, seed=2),
        "encoder_hidden_states": randn(batch, TEXT, widths[0], seed=3),
        "audio_encoder_hidden_states": randn(batch, TEXT, widths[1], seed=4),
        "timestep": torch.linspace(900, 300, batch),
        "sigma": torch.linspace(0.9, 0.3, batch),
        "num_frames": 2,
        "height": 2,
        "width": 3,
        "audio_num_frames": 5,
    }


def masked(batch: int) -> dict[str, Any]:
    mask = torch.ones(batch, TEXT, dtype=torch.int64)
    mask[-1, 4:] = 0
    return {"encoder_attention_mask": mask, "audio_encoder_attention_mask": mask}


def family(widths: tuple[int, int], fp8: int, **config: Any) -> Family:
    return Family(
        functools.partial(make, **config),
        functools.partial(inputs, widths),
        {"diffusers.LTX2VideoTransformerBlock": 2, "diffusers.LTX2Attention": 12},
        fp8=fp8,
        masked=masked,
    )


FAMILIES = {
    "": family((48, 48), 2 * 21, rope_type="split"),
    "interleaved": family((48, 48), 2 * 21),
    "3": family((64, 32), 2 * 21, rope_type="split", **LTX23),
    "prompt_table": family((64, 32), 2 * 21, rope_type="split", **LTX23, use_prompt_adaln_single=False),
}
