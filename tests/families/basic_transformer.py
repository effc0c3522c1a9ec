"""Models of BasicTransformerBlock: a UNet like SDXL's and one like Stable Diffusion's, PixArt, DiT, Latte."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DiTTransformer2DModel, LatteTransformer3DModel, PixArtTransformer2DModel, UNet2DConditionModel
from torch import nn

from . import Family, randn

TEXT = 5


def unet() -> nn.Module:
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=24,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2),
        attention_head_dim=(1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=8 * 6 + 16,
    )


def unet_inputs(batch: int) -> dict[str, Any]:
    return {
        "sample": randn(batch, 4, 8, 8),
        "timestep": torch.linspace(900, 300, batch),
        "encoder_hidden_states": randn(batch, TEXT, 24, seed=2),
        "added_cond_kwargs": {"text_embeds": randn(batch, 16, seed=3), "time_ids": randn(batch, 6, seed=4)},
    }


def text_mask(batch: int) -> dict[str, Any]:
    lengths = torch.tensor([4] * (batch - 1) + [2])
    return {"encoder_attention_mask": torch.arange(TEXT) < lengths.unsqueeze(1)}


def pixart() -> nn.Module:
    return PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        sample_size=8,
        cross_attention_dim=32,
        caption_channels=24,
        use_additional_conditions=False,
    )


def pixart_inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, 4, 8, 8),
        "encoder_hidden_states": randn(batch, TEXT, 24, seed=2),
        "timestep": torch.linspace(900, 300, batch),
    }


def dit() -> nn.Module:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "sample_size": 8}
    return DiTTransformer2DModel(**sizes, out_channels=8)


def dit_inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, 4, 8, 8),
        "timestep": torch.linspace(900, 300, batch),
        "class_labels": torch.arange(batch),
    }


def latte() -> nn.Module:
    return LatteTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=1,
        patch_size=2,
        sample_size=8,
        cross_attention_dim=32,
        caption_channels=24,
        attention_bias=True,
        activation_fn="gelu-approximate",
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
        video_length=2,
    )


def latte_inputs(batch: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(batch, 4, 2, 8, 8),
        "encoder_hidden_states": randn(batch, TEXT, 24, seed=2),
        "timestep": torch.linspace(900, 300, batch),
    }


def blocks(count: int, attentions: int, activation: str) -> dict[str, int]:
    return {
        "diffusers.BasicTransformerBlock": count,
        "diffusers.Attention": attentions,
        f"diffusers.{activation}": count,
    }


FAMILIES = {
    "": Family(unet, unet_inputs, blocks(8, 16, "GEGLU"), fp8=8 * 7, masked=text_mask, magnifies=2.0),
    "pixart": Family(pixart, pixart_inputs, blocks(2, 4, "GELU"), fp8=2 * 7, masked=text_mask),
    "dit": Family(dit, dit_inputs, blocks(2, 2, "GELU"), fp8=2 * 6),
    "latte": Family(latte, latte_inputs, blocks(2, 3, "GELU"), fp8=7 + 6),
}
