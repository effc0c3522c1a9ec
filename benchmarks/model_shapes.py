"""Diffusion transformers at their released depth and width: configuration, and the inputs of a step.

`MODELS` has them by name. Each has a tiny form too, of seconds on a CPU.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import diffusers
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Make:
    """Makes inputs of a model's dtype and device."""

    dtype: torch.dtype
    device: str

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.device)

    def full(self, value: float, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=self.dtype, device=self.device)

    def ones(self, *shape: int) -> Tensor:
        return torch.ones(*shape, dtype=torch.int64, device=self.device)

    def ids(self, count: int, axes: int) -> Tensor:
        return torch.zeros(count, axes, dtype=self.dtype, device=self.device)

    def grid_ids(self, height: int, width: int, axes: int) -> Tensor:
        """[height * width, axes]: the row in column 1, the column in column 2, as FLUX's pipelines make them."""
        ids = torch.zeros(height, width, axes, device=self.device)
        ids[..., 1] += torch.arange(height, device=self.device)[:, None]
        ids[..., 2] += torch.arange(width, device=self.device)[None, :]
        return ids.flatten(0, 1).to(self.dtype)


Inputs = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A released transformer: its class, what its configuration changes, and a step's inputs.

    `inputs` gets the constructed model, the maker of tensors, and the arguments of `shape` or of `tiny_shape`.
    """

    cls: str
    shape_name: str
    config: dict[str, Any]
    inputs: Callable[..., Inputs]
    shape: dict[str, int]
    tiny: dict[str, Any]  # a configuration of seconds on a CPU
    tiny_shape: dict[str, int]
    graphs: bool = True  # whether the stock forward can be captured

    def construct(self, tiny: bool, dtype: torch.dtype, device: str) -> nn.Module:
        torch.manual_seed(0)
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                model = getattr(diffusers, self.cls)(**{**self.config, **(self.tiny if tiny else {})})
        finally:
            torch.set_default_dtype(default)
        model.eval().requires_grad_(False)
        kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if kept.intersection(name.split(".")):  # from_pretrained keeps them in float32 as well
                tensor.data = tensor.data.float()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name and name.endswith("weight"):
                nn.init.normal_(parameter, 1.0, 0.1)  # as constructed they are all one
            elif parameter.dim() > 1 and not parameter.is_meta and not parameter.any():  # gates, closed before training
                nn.init.normal_(parameter, 0.0, 0.02)
        return model


# Arguments of the classes that say how many blocks of a kind there are.
DEPTHS = (
    "num_layers",
    "num_single_layers",
    "num_hidden_layers",
    "num_mmdit_layers",
    "num_single_dit_layers",
    "n_layers",
)
DEPTHS += (
    "num_refiner_layers",
    "n_refiner_layers",
    "num_visual_blocks",
    "num_text_blocks",
    "transformer_layers_per_block",
)


def of_few_blocks(known: Model, count: int) -> Model:
    """The same model with `count` blocks of each kind."""
    names = inspect.signature(getattr(diffusers, known.cls).__init__).parameters
    return replace(known, config={**known.config, **{name: count for name in DEPTHS if name in names}})


def video_tokens(frames: int, height: int, width: int, temporal: int, spatial: int) -> tuple[int, int, int]:
    return (frames - 1) // temporal + 1, height // spatial, width // spatial


def ltx_inputs(model: Any, make: Make, frames: int, height: int, width: int, text: int, valid: int) -> Inputs:
    grid = video_tokens(frames, height, width, 8, 32)
    mask = make.ones(1, text)
    mask[:, valid:] = 0
    return {
        "hidden_states": make(1, math.prod(grid), model.config.in_channels),
        "encoder_hidden_states": make(1, text, model.config.caption_channels),
        "timestep": make.full(500.0, 1),
        "encoder_attention_mask": mask,
        "num_frames": grid[0],
        "height": grid[1],
        "width": grid[2],
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


def ltx2_inputs(model: Any, make: Make, frames: int, height: int, width: int, audio: int, text: int) -> Inputs:
    grid = video_tokens(frames, height, width, 8, 32)
    config = model.config
    widths = (config.caption_channels,) * 2  # of the prompt, for the video and for the sound
    if not config.use_prompt_embeddings:
        widths = config.cross_attention_dim, config.audio_cross_attention_dim
    return {
        "hidden_states": make(1, math.prod(grid), config.in_channels),
        "audio_hidden_states": make(1, audio, config.audio_in_channels),
        "encoder_hidden_states": make(1, text, widths[0]),
        "audio_encoder_hidden_states": make(1, text, widths[1]),
        "timestep": make.full(500.0, 1),
        "sigma": make.full(0.5, 1),
        "encoder_attention_mask": make.ones(1, text),
        "audio_encoder_attention_mask": make.ones(1, text),
        "num_frames": grid[0],
        "height": grid[1],
        "width": grid[2],
        "fps": 24.0,
        "audio_num_frames": audio,
        # The pipeline makes them once for all steps.
        "video_coords": model.rope.prepare_video_coords(1, *grid, make.device, fps=24.0),
        "audio_coords": model.audio_rope.prepare_audio_coords(1, audio, make.device),
    }


def flux_inputs(model: Any, make: Make, height: int, width: int, text: int) -> Inputs:
    rows, columns = height // 16, width // 16
    return {
        "hidden_states": make(1, rows * columns, model.config.in_channels),
        "encoder_hidden_states": make(1, text, model.config.joint_attention_dim),
        "pooled_projections": make(1, model.config.pooled_projection_dim),
        "timestep": make.full(0.5, 1),
        "img_ids": make.grid_ids(rows, columns, 3),
        "txt_ids": make.ids(text, 3),
        "guidance": torch.full((1,), 3.5, device=make.device),
    }


def chroma_inputs(model: Any, make: Make, height: int, width: int, text: int, valid: int) -> Inputs:
    rows, columns = height // 16, width // 16
    mask = make.full(1.0, 1, text + rows * columns)  # in the model's dtype, as the pipeline makes it
    mask[:, valid:text] = 0
    return {
        "hidden_states": make(1, rows * columns, model.config.in_channels),
        "encoder_hidden_states": make(1, text, model.config.joint_attention_dim),
        "timestep": make.full(0.5, 1),
        "img_ids": make.grid_ids(rows, columns, 3),
        "txt_ids": make.ids(text, 3),
        "attention_mask": mask,
    }


def flux2_inputs(model: Any, make: Make, height: int, width: int, text: int) -> Inputs:
    rows, columns = height // 16, width // 16
    text_ids = make.ids(text, 4)
    text_ids[:, 3] = torch.arange(text, device=make.device)
    return {
        "hidden_states": make(1, rows * columns, model.config.in_channels),
        "encoder_hidden_states": make(1, text, model.config.joint_attention_dim),
        "timestep": make.full(0.5, 1),
        "img_ids": make.grid_ids(rows, columns, 4)[None],
        "txt_ids": text_ids[None],
        "guidance": torch.full((1,), 3.5, device=make.device),
    }


def wan_inputs(model: Any, make: Make, frames: int, height: int, width: int, text: int, per_token: int = 0) -> Inputs:
    spatial = 16 if per_token else 8
    grid = video_tokens(frames, height, width, 4, spatial)
    tokens = grid[0] * (grid[1] // 2) * (grid[2] // 2)
    timestep = torch.full((1, tokens), 500.0, device=make.device)
    timestep[:, : tokens // grid[0]] = 0  # the first frame is the image that the clip starts from
    return {
        "hidden_states": make(1, model.config.in_channels, *grid),
        "timestep": timestep if per_token else torch.full((1,), 500, device=make.device),
        "encoder_hidden_states": make(1, text, model.config.text_dim),
    }


def qwen_inputs(model: Any, make: Make, height: int, width: int, text: int) -> Inputs:
    rows, columns = height // 16, width // 16
    return {
        "hidden_states": make(1, rows * columns, model.config.in_channels),
        "encoder_hidden_states": make(1, text, model.config.joint_attention_dim),
        "encoder_hidden_states_mask": None,  # as the pipeline passes it where every token is valid
        "timestep": make.full(0.5, 1),
        "img_shapes": [[(1, rows, columns)]],
    }


def sd3_inputs(model: Any, make: Make, height: int, width: int, text: int) -> Inputs:
    return {
        "hidden_states": make(2, model.config.in_channels, height // 8, width // 8),
        "encoder_hidden_states": make(2, text, model.config.joint_attention_dim),
        "pooled_projections": make(2, model.config.pooled_projection_dim),
        "timestep": make.full(500.0, 2),
    }


def auraflow_inputs(model: Any, make: Make, height: int, width: int, text: int) -> Inputs:
    return {
        "hidden_states": make(2, model.config.in_channels, height // 8, width // 8),
        "encoder_hidden_states": make(2, text, model.config.joint_attention_dim),
        "timestep": make.full(0.5, 2),
    }


def hidream_inputs(model: Any, make: Make, height: int, width: int, text: int) -> Inputs:
    t5, llama = model.config.caption_channels
    depth, layers = len(model.caption_projection) - 1, 32  # blocks, and layers of Llama: its last one serves the rest
    model.register_to_config(llama_layers=[min(block, layers - 1) for block in range(depth)])
    return {
        "hidden_states": make(2, model.config.in_channels, height // 8, width // 8),
        "timesteps": make.full(500.0, 2),
        "encoder_hidden_states_t5": make(2, text, t5),
        "encoder_hidden_states_llama3": make(2, text, llama).expand(layers, 2, text, llama),
        "pooled_embeds": make(2, model.config.text_emb_dim),
    }


def hunyuan15_inputs(
    model: Any, make: Make, frames: int, height: int, width: int, text: int, text2: int, image: int, valid: int
) -> Inputs:
    grid = (frames - 1) // 4 + 1, height // 16, width // 16
    masks = [make.ones(1, count) for count in (text, text2)]
    masks[0][:, valid:] = 0
    masks[1][:, valid // 8 :] = 0
    config = model.config
    return {
        "hidden_states": make(1, config.in_channels, *grid),
        "timestep": make.full(500.0, 1),
        "encoder_hidden_states": make(1, text, config.text_embed_dim),
        "encoder_attention_mask": masks[0],
        "encoder_hidden_states_2": make(1, text2, config.text_embed_2_dim),
        "encoder_attention_mask_2": masks[1],
        "image_embeds": torch.zeros(1, image, config.image_embed_dim, dtype=make.dtype, device=make.device),
    }


def cogvideox_inputs(model: Any, make: Make, frames: int, height: int, width: int, text: int) -> Inputs:
    grid = (frames - 1) // 4 + 1, height // 8, width // 8
    table = diffusers.models.embeddings.get_3d_rotary_pos_embed(
        embed_dim=model.config.attention_head_dim,
        crops_coords=((0, 0), (grid[1] // 2, grid[2] // 2)),
        grid_size=(grid[1] // 2, grid[2] // 2),
        temporal_size=grid[0],
        device=make.device,
    )
    return {
        "hidden_states": make(2, grid[0], model.config.in_channels, *grid[1:]),
        "encoder_hidden_states": make(2, text, model.config.text_embed_dim),
        "timestep": make.full(500.0, 2),
        "image_rotary_emb": table,
    }


def z_image_inputs(model: Any, make: Make, height: int, width: int, text: int) -> Inputs:
    return {
        "x": [make(model.config.in_channels, 1, height // 8, width // 8)],
        "t": make.full(0.5, 1),
        "cap_feats": [make(text, model.config.cap_feat_dim)],
    }


def mochi_inputs(model: Any, make: Make, frames: int, height: int, width: int, text: int, valid: int) -> Inputs:
    mask = make.ones(2, text).bool()
    mask[:, valid:] = False
    return {
        "hidden_states": make(2, model.config.in_channels, (frames - 1) // 6 + 1, height // 8, width // 8),
        "encoder_hidden_states": make(2, text, model.config.text_embed_dim),
        "timestep": make.full(500.0, 2),
        "encoder_attention_mask": mask,
    }


def flux3_inputs(model: Any, make: Make, height: int, width: int, text: int) -> Inputs:
    rows, columns = height // 16, width // 16
    text_ids = make.ids(text, 4)
    text_ids[:, 3] = torch.arange(text, device=make.device)
    return {
        "hidden_states": make(1, rows * columns, model.config.in_channels),
        "encoder_hidden_states": make(1, text, model.config.joint_attention_dim),
        "timestep": make.full(0.5, 1),
        "img_ids": make.grid_ids(rows, columns, 4),
        "txt_ids": text_ids,
    }


def lumina2_inputs(model: Any, make: Make, height: int, width: int, text: int) -> Inputs:
    return {
        "hidden_states": make(1, model.config.in_channels, height // 8, width // 8),
        "timestep": make.full(0.5, 1),
        "encoder_hidden_states": make(1, text, model.config.cap_feat_dim),
        "encoder_attention_mask": make.ones(1, text),
    }


def ideogram4_inputs(model: Any, make: Make, height: int, width: int, text: int) -> Inputs:
    rows, columns = height // 16, width // 16
    tokens = text + rows * columns
    positions = torch.arange(text, device=make.device)[:, None].expand(text, 3)
    grid = make.grid_ids(rows, columns, 3).long() + 65536  # where Ideogram 4 begins to count in an image
    return {
        "hidden_states": make(1, tokens, model.config.in_channels),
        "timestep": make.full(0.5, 1),
        "encoder_hidden_states": make(1, tokens, model.config.llm_features_dim),
        "position_ids": torch.cat((positions, grid)).unsqueeze(0),
        "segment_ids": make.ones(1, tokens),
        "indicator": torch.cat((3 * make.ones(text), 2 * make.ones(rows * columns))).unsqueeze(0),  # text, image
    }


def bria_fibo2_inputs(model: Any, make: Make, height: int, width: int, text: int) -> Inputs:
    config = model.config
    bundles = 1 + len(config.injection_layer_ids)
    return {
        "hidden_states": make(1, config.in_channels, height // 8, width // 8),
        "timestep": make.full(0.5, 1),
        "encoder_hidden_states": make(1, bundles, text, config.cap_feat_dim),
    }


def ace_step_inputs(model: Any, make: Make, seconds: int, text: int) -> Inputs:
    config = model.config
    tokens = 25 * seconds  # of the autoencoder; two make one of the model
    width = config.audio_acoustic_hidden_dim
    return {
        "hidden_states": make(1, tokens, width),
        "timestep": make.full(0.5, 1),
        "timestep_r": make.full(0.5, 1),
        "encoder_hidden_states": make(1, text, config.encoder_hidden_size or config.hidden_size),
        "context_latents": make(1, tokens, config.in_channels - width),
    }


def krea2_inputs(model: Any, make: Make, height: int, width: int, text: int) -> Inputs:
    rows, columns = height // 16, width // 16
    config = model.config
    return {
        "hidden_states": make(1, rows * columns, config.in_channels),
        "encoder_hidden_states": make(1, text, config.num_text_layers, config.text_hidden_dim),
        "timestep": make.full(0.5, 1),
        "position_ids": torch.cat((make.ids(text, 3), make.grid_ids(rows, columns, 3))).float(),
        "encoder_attention_mask": make.ones(1, text).bool(),
    }


def cosmos3_inputs(model: Any, make: Make, frames: int, height: int, width: int, text: int) -> Inputs:
    grid = video_tokens(frames, height, width, 4, 32)
    config, video = model.config, math.prod(grid)
    side = config.latent_patch_size
    places = torch.cartesian_prod(*(torch.arange(size, device=make.device) for size in grid)).T
    tokens = torch.arange(text + video, device=make.device)
    return {
        "vision_tokens": [make(1, config.latent_channel, grid[0], side * grid[1], side * grid[2])],
        "input_ids": make.ones(text),
        "text_indexes": tokens[:text],
        "position_ids": torch.cat((tokens[:text].expand(3, -1), places + text), 1),
        "und_len": text,
        "sequence_length": text + video,
        "vision_token_shapes": [grid],
        "vision_sequence_indexes": tokens[text:],
        "vision_mse_loss_indexes": tokens[text:],
        "vision_timesteps": make.full(500.0, video),
        "vision_noisy_frame_indexes": [tokens[: grid[0]]],
    }


def ernie_image_inputs(model: Any, make: Make, height: int, width: int, text: int) -> Inputs:
    config = model.config
    return {
        "hidden_states": make(2, config.in_channels, height // 16, width // 16),  # with guidance
        "timestep": make.full(500.0, 2),
        "text_bth": make(2, text, config.text_in_dim),
        "text_lens": torch.tensor([text, 1], device=make.device),
    }


def sdxl_inputs(model: Any, make: Make, height: int, width: int, text: int) -> Inputs:
    config = model.config
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    return {
        "sample": make(2, config.in_channels, height // 8, width // 8),  # with guidance
        "timestep": torch.tensor(500, device=make.device),
        "encoder_hidden_states": make(2, text, config.cross_attention_dim),
        "added_cond_kwargs": {"text_embeds": make(2, pooled), "time_ids": make(2, 6)},
    }


def in_a_tuple(model: nn.Module, arguments: Any, result: Any) -> Any:
    """A hook after a forward that returns a tensor where other classes return a tuple."""
    return (result,) if isinstance(result, torch.Tensor) else result


def kandinsky5_inputs(model: Any, make: Make, frames: int, height: int, width: int, text: int) -> Inputs:
    config = model.config
    model.register_forward_hook(in_a_tuple)
    grid = video_tokens(frames, height, width, 4, 8)
    return {
        "hidden_states": make(1, *grid, config.in_visual_dim),
        "encoder_hidden_states": make(1, text, config.in_text_dim),
        "timestep": torch.full((1,), 500.0, device=make.device),
        "pooled_projections": make(1, config.in_text_dim2),
        "visual_rope_pos": tuple(
            torch.arange(size // patch, device=make.device) for size, patch in zip(grid, config.patch_size)
        ),
        "text_rope_pos": torch.arange(text, device=make.device),
    }


def minimax_h3_inputs(model: Any, make: Make, frames: int, height: int, width: int, audio: int, text: int) -> Inputs:
    config = model.config
    video = frames * height * width
    places = torch.arange(text + video + audio, device=make.device)
    of_text, of_video, of_audio = places.split((text, video, audio))
    return {
        "hidden_states": make(1, video, config.in_channels * math.prod(config.patch_size)),
        "audio_hidden_states": make(1, audio, config.audio_in_channels),
        "encoder_hidden_states": make(1, text, config.text_dim),
        "timestep": torch.full((1,), 0.5, device=make.device),
        "timestep_indices": torch.zeros_like(places),
        "token_tags": (places < text).long() + 2 * (places >= text + video),  # 0: video, 1: text, 2: audio
        "position_ids": torch.stack((places // (height * width), places // width % height, places % width), -1),
        "video_indices": of_video,
        "audio_indices": of_audio,
        "text_indices": of_text,
    }


def qwen21_inputs(model: Any, make: Make, height: int, width: int, text: int) -> Inputs:
    """A step after the first, which keeps keys and values of the prompt."""
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

    config, rows, columns = model.config, height // 16, width // 16
    cache = QwenImage21KVCache(config.num_layers)
    for layer in cache.layer_caches:
        shape = 1, text, config.num_attention_heads, config.attention_head_dim
        layer.store(make(*shape), make(*shape))
    slots = rows * columns // 4
    return {
        "hidden_states": make(1, rows * columns, config.in_channels),
        "encoder_hidden_states": make(1, text, config.context_in_dim),
        "timestep": make.full(0.5, 1),
        "img_shapes": [[(1, rows, columns)]],
        "img_mask": torch.arange(text + slots, device=make.device)[None] >= text,
        "kv_cache": cache,
        "kv_cache_mode": "cached",
    }


def pixart_inputs(model: Any, make: Make, height: int, width: int, text: int, valid: int) -> Inputs:
    config = model.config
    mask = make.ones(2, text)
    mask[:, valid:] = 0
    return {
        "hidden_states": make(2, config.in_channels, height // 8, width // 8),  # with guidance
        "encoder_hidden_states": make(2, text, config.caption_channels),
        "timestep": make.full(500.0, 2),
        "encoder_attention_mask": mask,
    }


LTX2 = {"rope_type": "split"}
LTX23 = {
    **LTX2,
    **dict.fromkeys(("gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod"), True),
    "perturbed_attn": True,
    "use_prompt_embeddings": False,
}
LTX2_TINY = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 64,
    "cross_attention_dim": 128,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 32,
    "audio_cross_attention_dim": 64,
    "caption_channels": 64,
}
LTX2_SHAPE = {"frames": 121, "height": 512, "width": 768, "audio": 126, "text": 1024}
LTX2_TINY_SHAPE = {"frames": 9, "height": 64, "width": 64, "audio": 5, "text": 7}
WAN_TINY = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32, "text_dim": 32, "ffn_dim": 64}
WAN_TINY_SHAPE = {"frames": 5, "height": 64, "width": 64, "text": 8}
IMAGE = {"height": 1024, "width": 1024}
TINY_IMAGE = {"height": 64, "width": 64, "text": 8}
AXES = {"axes_dims_rope": (4, 6, 6)}

MODELS = {
    "ltx13b": Model(
        "LTXVideoTransformer3DModel",
        "121 frames 704x1216",
        {"num_layers": 48, "attention_head_dim": 128, "cross_attention_dim": 4096},
        ltx_inputs,
        {"frames": 121, "height": 704, "width": 1216, "text": 128, "valid": 60},
        {"num_layers": 2, "num_attention_heads": 2, "cross_attention_dim": 256, "caption_channels": 64},
        {"frames": 9, "height": 64, "width": 64, "text": 8, "valid": 5},
    ),
    "ltx2": Model(
        "LTX2VideoTransformer3DModel", "121 frames 512x768", LTX2, ltx2_inputs, LTX2_SHAPE, LTX2_TINY, LTX2_TINY_SHAPE
    ),
    "ltx23": Model(
        "LTX2VideoTransformer3DModel", "121 frames 512x768", LTX23, ltx2_inputs, LTX2_SHAPE, LTX2_TINY, LTX2_TINY_SHAPE
    ),
    "flux": Model(
        "FluxTransformer2DModel",
        "1024x1024",
        {"guidance_embeds": True},
        flux_inputs,
        {**IMAGE, "text": 512},
        {"num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, **AXES},
        TINY_IMAGE,
    ),
    "chroma": Model(
        "ChromaTransformer2DModel",
        "1024x1024",
        {},
        chroma_inputs,
        {**IMAGE, "text": 512, "valid": 60},
        {"num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, **AXES}
        | {"joint_attention_dim": 32, "approximator_num_channels": 16, "approximator_hidden_dim": 32}
        | {"approximator_layers": 1},
        {**TINY_IMAGE, "valid": 5},
    ),
    "flux2": Model(
        "Flux2Transformer2DModel",
        "1024x1024",
        {},
        flux2_inputs,
        {**IMAGE, "text": 512},
        {
            "num_layers": 2,
            "num_single_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "joint_attention_dim": 32,
            "axes_dims_rope": (4, 4, 4, 4),
        },
        TINY_IMAGE,
    ),
    "wan": Model(
        "WanTransformer3DModel",
        "81 frames 480x832",
        {},
        wan_inputs,
        {"frames": 81, "height": 480, "width": 832, "text": 512},
        WAN_TINY,
        WAN_TINY_SHAPE,
    ),
    "wan_ti2v": Model(
        "WanTransformer3DModel",
        "121 frames 704x1280",
        {"num_layers": 30, "num_attention_heads": 24, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48},
        wan_inputs,
        {"frames": 121, "height": 704, "width": 1280, "text": 512, "per_token": 1},
        WAN_TINY,
        {**WAN_TINY_SHAPE, "per_token": 1},
    ),
    "qwen": Model(
        "QwenImageTransformer2DModel",
        "1328x1328",
        {},
        qwen_inputs,
        {"height": 1328, "width": 1328, "text": 256},
        {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "joint_attention_dim": 32, **AXES},
        TINY_IMAGE,
    ),
    "sd35": Model(
        "SD3Transformer2DModel",
        "1024x1024",
        {
            "num_layers": 38,
            "num_attention_heads": 38,
            "caption_projection_dim": 2432,
            "pos_embed_max_size": 192,
            "qk_norm": "rms_norm",
        },
        sd3_inputs,
        {**IMAGE, "text": 333},
        {"num_layers": 2, "num_attention_heads": 2, "caption_projection_dim": 128, "joint_attention_dim": 32},
        TINY_IMAGE,
    ),
    "auraflow": Model(
        "AuraFlowTransformer2DModel",
        "1024x1024",
        {"pos_embed_max_size": 9216},
        auraflow_inputs,
        {**IMAGE, "text": 256},
        {"num_mmdit_layers": 2, "num_single_dit_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16}
        | {"joint_attention_dim": 32, "caption_projection_dim": 32},
        TINY_IMAGE,
    ),
    "hidream": Model(
        "HiDreamImageTransformer2DModel",
        "1024x1024",
        {"patch_size": 2, "in_channels": 16, "caption_channels": [4096, 4096], "axes_dims_rope": (64, 32, 32)},
        hidream_inputs,
        {**IMAGE, "text": 128},  # of T5, and of Llama
        {"num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16}
        | {"caption_channels": [32, 32], "text_emb_dim": 32, "axes_dims_rope": (4, 6, 6)},
        TINY_IMAGE,
        graphs=False,
    ),
    "hyvideo15": Model(
        "HunyuanVideo15Transformer3DModel",
        "61 frames 480x848",
        {},
        hunyuan15_inputs,
        {"frames": 61, "height": 480, "width": 848, "text": 1000, "text2": 256, "image": 729, "valid": 200},
        {
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "rope_axes_dim": (4, 6, 6),
            "text_embed_dim": 32,
            "text_embed_2_dim": 32,
            "image_embed_dim": 32,
        },
        {"frames": 5, "height": 64, "width": 64, "text": 16, "text2": 8, "image": 4, "valid": 8},
        graphs=False,
    ),
    "cogvideox": Model(
        "CogVideoXTransformer3DModel",
        "49 frames 480x720",
        {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True},
        cogvideox_inputs,
        {"frames": 49, "height": 480, "width": 720, "text": 226},
        {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "text_embed_dim": 32}
        | {"time_embed_dim": 8, "sample_width": 8, "sample_height": 8, "sample_frames": 5, "max_text_seq_length": 8},
        {"frames": 5, "height": 64, "width": 64, "text": 8},
    ),
    "zimage": Model(
        "ZImageTransformer2DModel",
        "1024x1024",
        {},
        z_image_inputs,
        {**IMAGE, "text": 128},
        {"n_layers": 2, "dim": 64, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 32, "axes_dims": [8, 12, 12]},
        TINY_IMAGE,
        graphs=False,
    ),
    "mochi": Model(
        "MochiTransformer3DModel",
        "85 frames 480x848",
        {},
        mochi_inputs,
        {"frames": 85, "height": 480, "width": 848, "text": 256, "valid": 60},
        {"num_layers": 2, "num_attention_heads": 3, "attention_head_dim": 16, "pooled_projection_dim": 48}
        | {"text_embed_dim": 32, "time_embed_dim": 16},
        {"frames": 7, "height": 64, "width": 64, "text": 8, "valid": 5},
        graphs=False,
    ),
    "flux3": Model(
        "Flux3Transformer2DModel",
        "1024x1024",
        {},
        flux3_inputs,
        {**IMAGE, "text": 512},
        {"num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16}
        | {"joint_attention_dim": 32, "axes_dims_rope": (4, 4, 4, 4)},
        TINY_IMAGE,
    ),
    "lumina2": Model(
        "Lumina2Transformer2DModel",
        "1024x1024",
        {"cap_feat_dim": 2304},
        lumina2_inputs,
        {**IMAGE, "text": 128},
        {"num_layers": 2, "num_refiner_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "num_kv_heads": 2}
        | {"axes_dim_rope": (4, 6, 6), "cap_feat_dim": 32, "multiple_of": 16},
        TINY_IMAGE,
        graphs=False,
    ),
    "ideogram4": Model(
        "Ideogram4Transformer2DModel",
        "2048x2048",
        {},
        ideogram4_inputs,
        {"height": 2048, "width": 2048, "text": 512},
        {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "intermediate_size": 64}
        | {"adaln_dim": 32, "llm_features_dim": 32, "mrope_section": (4, 2, 2)},
        TINY_IMAGE,
    ),
    "bria_fibo2": Model(
        "BriaFibo2Transformer2DModel",
        "1024x1024",
        {},
        bria_fibo2_inputs,
        {**IMAGE, "text": 512},
        {"dim": 64, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "cap_feat_dim": 32, "axes_dims": (8, 12, 12)}
        | {"injection_layer_ids": (1,), "perceiver_num_layers": 1},
        TINY_IMAGE,
        graphs=False,
    ),
    "ace_step": Model(
        "AceStepTransformer1DModel",
        "120 s",
        {},
        ace_step_inputs,
        {"seconds": 120, "text": 512},
        {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8},
        {"seconds": 1, "text": 8},
    ),
    "sdxl": Model(
        "UNet2DConditionModel",
        "1024x1024",
        {"sample_size": 128, "block_out_channels": (320, 640, 1280), "transformer_layers_per_block": (1, 2, 10)}
        | {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")}
        | {"up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")}
        | {"attention_head_dim": (5, 10, 20), "cross_attention_dim": 2048, "use_linear_projection": True}
        | {"addition_embed_type": "text_time", "addition_time_embed_dim": 256}
        | {"projection_class_embeddings_input_dim": 2816},
        sdxl_inputs,
        {**IMAGE, "text": 77},
        {"block_out_channels": (32, 64, 128), "transformer_layers_per_block": 1, "attention_head_dim": (1, 2, 4)}
        | {"cross_attention_dim": 64},
        TINY_IMAGE,
    ),
    "pixart": Model(
        "PixArtTransformer2DModel",
        "1024x1024",
        {"caption_channels": 4096, "use_additional_conditions": False},
        pixart_inputs,
        {**IMAGE, "text": 300, "valid": 100},
        {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "cross_attention_dim": 32}
        | {"caption_channels": 32, "sample_size": 8},
        {**TINY_IMAGE, "valid": 5},
    ),
    "kandinsky5": Model(
        "Kandinsky5Transformer3DModel",
        "121 frames 512x768",
        {"in_visual_dim": 16, "out_visual_dim": 16, "model_dim": 1792, "ff_dim": 7168},
        kandinsky5_inputs,
        {"frames": 121, "height": 512, "width": 768, "text": 256},
        {"in_text_dim": 32, "in_text_dim2": 16, "time_dim": 16, "model_dim": 64, "ff_dim": 96, "num_visual_blocks": 2}
        | {"axes_dims": (8, 12, 12)},
        {"frames": 5, "height": 64, "width": 64, "text": 8},
    ),
    "minimax_h3": Model(
        "MiniMaxH3Transformer3DModel",
        "124 frames 480x864",
        {},
        minimax_h3_inputs,
        {"frames": 37, "height": 15, "width": 27, "audio": 206, "text": 256},  # of tokens
        {"num_attention_heads": 2, "attention_head_dim": 32, "hidden_size": 64, "num_layers": 2, "ffn_dim": 96}
        | {"num_refiner_layers": 1, "text_dim": 32, "rope_freq_dim": 4, "time_embed_dim": 32},
        {"frames": 2, "height": 4, "width": 4, "audio": 5, "text": 8},
    ),
    "qwen21": Model(
        "QwenImage21Transformer2DModel",
        "1024x1024",
        {},
        qwen21_inputs,
        {**IMAGE, "text": 256},
        {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "context_in_dim": 32} | AXES,
        TINY_IMAGE,
        graphs=False,
    ),
    "ernie_image": Model(
        "ErnieImageTransformer2DModel",
        "1024x1024",
        {},
        ernie_image_inputs,
        {**IMAGE, "text": 256},
        {"hidden_size": 64, "num_attention_heads": 2, "num_layers": 2, "ffn_hidden_size": 96, "text_in_dim": 32}
        | {"rope_axes_dim": (8, 12, 12)},
        TINY_IMAGE,
    ),
    "krea2": Model(
        "Krea2Transformer2DModel",
        "1024x1024",
        {},
        krea2_inputs,
        {**IMAGE, "text": 512},
        {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"intermediate_size": 96, "axes_dims_rope": (4, 6, 6), "text_hidden_dim": 32, "num_text_layers": 2}
        | {"text_num_attention_heads": 2, "text_num_key_value_heads": 2, "text_intermediate_size": 48},
        TINY_IMAGE,
    ),
    "cosmos3": Model(
        "Cosmos3OmniTransformer",
        "704x1280x189",
        {},
        cosmos3_inputs,
        {"frames": 189, "height": 704, "width": 1280, "text": 256},
        {"head_dim": 16, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 64, "rope_axes_dim": (4, 2, 2)},
        {"frames": 5, "height": 64, "width": 64, "text": 8},
    ),
}
