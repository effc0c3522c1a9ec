"""ControlNets of FLUX.1, Stable Diffusion 3, Qwen-Image and Z-Image, which are made of the models' blocks."""

from __future__ import annotations

from functools import partial
from typing import Any

from diffusers import (
    FluxControlNetModel,
    QwenImageControlNetModel,
    SD3ControlNetModel,
    ZImageControlNetModel,
)
from torch import nn

from . import Family, flux, qwenimage, randn, sd3, z_image


def with_condition(family: Any, *shape: int) -> Any:
    """A model's inputs, and what its ControlNet reads beside them."""
    return lambda batch: {**family.inputs(batch), "controlnet_cond": randn(batch, *shape, seed=9)}


def make_qwen() -> nn.Module:
    return QwenImageControlNetModel(
        in_channels=8,
        out_channels=2,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    )


def make_sd3() -> nn.Module:
    return SD3ControlNetModel(
        sample_size=8,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        pos_embed_max_size=16,
    )


def make_z_image(refiner: str | None) -> nn.Module:
    model = ZImageControlNetModel(
        control_layers_places=[0, 1],
        control_refiner_layers_places=[0],
        control_in_dim=4,
        add_control_noise_refiner=refiner,
        dim=48,
        n_refiner_layers=1,
        n_heads=3,
        n_kv_heads=3,
    )
    model = ZImageControlNetModel.from_transformer(model, z_image.make())
    model.gradient_checkpointing = (
        False  # which its forward reads where gradients are on, and its constructor leaves out
    )
    model.register_forward_pre_hook(lambda _, args, kwargs: (args, _without(kwargs, "return_dict")), with_kwargs=True)
    model.register_forward_hook(lambda _, args, output: tuple(output.values()))
    return model


def _without(kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != name}


def z_image_inputs(batch: int) -> dict[str, Any]:
    context = [randn(*z_image.IMAGE, seed=20 + sample) for sample in range(batch)]
    return {**z_image.inputs(batch), "control_context": context}


def z_image_blocks(plain: int, control: int) -> dict[str, int]:
    return {
        "diffusers.ZImageTransformerBlock": plain,
        "diffusers.ZImageControlTransformerBlock": control,
        "diffusers.Attention": plain + control,
        "diffusers.FeedForward": plain + control,
    }


LORA = ("to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3")
FAMILIES = {
    "flux": Family(
        partial(flux.make, FluxControlNetModel, pooled_projection_dim=32),
        lambda batch: {**flux.pooled(batch), "controlnet_cond": randn(batch, flux.IMAGE, 8, seed=9)},
        flux.blocks("Flux"),
        flux.FP8,
        lora=flux.LORA,
    ),
    "sd3": Family(
        make_sd3,
        with_condition(sd3, 4, 8, 8),
        {"diffusers.JointTransformerBlock": 2, "diffusers.Attention": 2},
        fp8=2 * 6,
    ),
    "qwenimage": Family(make_qwen, with_condition(qwenimage, 6, 8), qwenimage.BLOCKS, fp8=2 * 6, lora=qwenimage.LORA),
    "z_image": Family(
        partial(make_z_image, "control_noise_refiner"), z_image_inputs, z_image_blocks(2, 3), fp8=5 * 7, lora=LORA
    ),
    "z_image-no_refiner": Family(
        partial(make_z_image, None), z_image_inputs, z_image_blocks(3, 2), fp8=5 * 7, lora=LORA
    ),
}
