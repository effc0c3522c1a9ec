"""HunyuanVideo (also from an image), HunyuanImage: two double and two single blocks; HunyuanVideo 1.5: two double."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers import (
    HunyuanImageTransformer2DModel,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoTransformer3DModel,
)
from torch import nn

from . import Family, randn, with_time_in_dtype

TEXT, GRID = 6, (2, 4, 4)  # latent frames, height, width
TEXT_2, IMAGE = 4, 3
SIZES: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "patch_size": 2,
    "text_embed_dim": 32,
    "rope_axes_dim": (4, 6, 6),
}


def make(**config: Any) -> nn.Module:
    return HunyuanVideoTransformer3DModel(**SIZES, num_single_layers=2, pooled_projection_dim=16, **config)


def make_image() -> nn.Module:
    sizes = {**SIZES, "patch_size": (1, 1), "rope_axes_dim": (8, 8)}
    model = HunyuanImageTransformer2DModel(**sizes, num_single_layers=2)
    model.register_forward_pre_hook(with_time_in_dtype, with_kwargs=True)
    return model


def inputs_image(batch: int) -> dict[str, Any]:
    names = "timestep", "encoder_hidden_states", "encoder_attention_mask"
    return {"hidden_states": randn(batch, 4, 3, 4), **{name: inputs(batch)[name] for name in names}}


def inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, 4, *GRID),
        "timestep": torch.linspace(900, 300, batch),
        "encoder_hidden_states": randn(batch, TEXT, 32, seed=2),
        "encoder_attention_mask": torch.ones(batch, TEXT, dtype=torch.int64),
        "pooled_projections": randn(batch, 16, seed=3),
        "guidance": torch.full((batch,), 6000.0),
    }


def padded(*lengths: int) -> torch.Tensor:
    """A mask of TEXT tokens: the first ones of each sample."""
    return (torch.arange(TEXT) < torch.tensor(lengths).unsqueeze(1)).long()


def make_15(**config: Any) -> nn.Module:
    model = HunyuanVideo15Transformer3DModel(**{**SIZES, **config}, text_embed_2_dim=24, image_embed_dim=16)
    model.register_forward_pre_hook(with_time_in_dtype, with_kwargs=True)
    return model


def inputs_15(batch: int) -> dict[str, Any]:
    return {
        **{name: value for name, value in inputs(batch).items() if name not in ("pooled_projections", "guidance")},
        "encoder_hidden_states_2": randn(batch, TEXT_2, 24, seed=4),
        "encoder_attention_mask_2": torch.ones(batch, TEXT_2, dtype=torch.int64),
        "image_embeds": randn(batch, IMAGE, 16, seed=5),
    }


def of_text(batch: int) -> dict[str, Any]:
    """Text to video: no image, and padding in both prompts."""
    return {
        **inputs_15(batch),
        "image_embeds": torch.zeros(batch, IMAGE, 16),
        "encoder_attention_mask": padded(4).expand(batch, TEXT),
    }


BLOCKS = {
    "diffusers.HunyuanVideoTransformerBlock": 2,
    "diffusers.HunyuanVideoSingleTransformerBlock": 2,
    "diffusers.Attention": 5,
}
BLOCKS_15 = {"diffusers.HunyuanVideo15TransformerBlock": 2, "diffusers.Attention": 3}
LORA = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "net.0.proj", "norm1.linear")

MASK = "a value is kept for the tensors that it is made of"  # the lengths of prompts, for their mask
FAMILIES = {
    "": Family(
        make,
        inputs,
        BLOCKS,
        fp8=2 * 6 + 2 * 5,
        masked=lambda batch: {"encoder_attention_mask": padded(*[4] * (batch - 1), 2)},
        lora=(*LORA, "proj_mlp", "proj_out"),
        first_block_cache=True,
        not_recorded=MASK,
    ),
    "padded": Family(
        make,
        lambda batch: {**inputs(batch), "encoder_attention_mask": padded(*[3] * batch)},
        BLOCKS,
        fp8=2 * 6 + 2 * 5,
        lora=LORA,
        not_recorded=MASK,
    ),
    "token_replace": Family(
        partial(make, image_condition_type="token_replace"),
        inputs,
        {
            "diffusers.HunyuanVideoTokenReplaceTransformerBlock": 2,
            "diffusers.HunyuanVideoTokenReplaceSingleTransformerBlock": 2,
            "diffusers.Attention": 5,
        },
        fp8=2 * 6 + 2 * 5,
        masked=lambda batch: {"encoder_attention_mask": padded(*[4] * (batch - 1), 2)},
        lora=(*LORA, "proj_mlp", "proj_out"),
        first_block_cache=True,
        not_recorded=MASK,
    ),
    "image": Family(
        make_image,
        inputs_image,
        {
            "diffusers.HunyuanImageTransformerBlock": 2,
            "diffusers.HunyuanImageSingleTransformerBlock": 2,
            "diffusers.Attention": 5,
        },
        fp8=2 * 6 + 2 * 5,
        masked=lambda batch: {"encoder_attention_mask": padded(*[4] * (batch - 1), 2)},
        lora=(*LORA, "proj_mlp", "proj_out"),
        first_block_cache=True,
        not_recorded=MASK,
    ),
    "15": Family(
        make_15,
        inputs_15,
        BLOCKS_15,
        fp8=2 * 6,
        masked=lambda batch: {"encoder_attention_mask": padded(*[4] * (batch - 1), 2)},
        lora=LORA,
        one_graph=False,
        not_recorded=MASK,
    ),
    "15_text": Family(make_15, of_text, BLOCKS_15, fp8=2 * 6, lora=LORA, one_graph=False, not_recorded=MASK),
}
