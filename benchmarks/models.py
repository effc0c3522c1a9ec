"""Times one forward of diffusion transformers at their released depth and width, with random weights.

    python tools/build.py
    python benchmarks/models.py [--models flux wan] [--configs baseline kernels] [--profile] [--tiny] [--output PATH]

A step is one forward of the transformer with the inputs that its pipeline hands it. The configurations share one set of
weights and take turns. "compile" is `compile_repeated_blocks`, which is how diffusers recommends it. Classes that
do not name their repeated blocks have them compiled in the same way.

`step_ms` is a step as a program launches it, `graph_ms` the same kernels in a CUDA graph (absent where the stock model
reads values on the host, and where a step takes longer than GRAPH_S). `first_step_s` counts from the call that makes a
configuration to the end of its first step. `peak_gb` is its weights and what a step needs beside them. `error_vs_fp32`
is the relative L2 error of the result against the stock model in float32, of the first `error_blocks` blocks of each
kind: whole models of this size do not fit into the memory twice. `loop_error_vs_fp32` is the error of the latents after
`loop_steps` steps at one timestep. Each step subtracts the same share of the result in float32. torchao runs them
without the compiler. With `--blocks` a record is of those blocks alone, and says so.
`--profile` adds `ms_by_kind`, the kernels of a step that take longest, and the GPU's clock and power while steps run.

The file is written after each model, and again after its profile: a run that is killed keeps what it has measured. A
model's records replace its earlier ones; other models keep theirs, each with the commit and date of its run.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import torch
from cpu import DTYPES, result_file
from cpu import meta as common_meta
from ops import load_package, write
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from steps import (
    COLUMNS,
    CONFIGS,
    FP8_CONFIGS,
    INT8_CONFIGS,
    TORCHAO_INDUCTOR,
    Turns,
    draw,
    error,
    first_line,
    label,
    measure,
    profile,
    quantise_with_torchao,
    view_of,
)
from torch import Tensor, nn

ERROR_BLOCKS = 4
KEPT_KERNELS = 12  # of a profile, from the one that takes longest
# The host does not limit longer steps. Stock FLUX.1's, of 0.17 s, crashed in its replay (torch 2.11, H200).
GRAPH_S = 0.1
# What the run says of every record, since another run may measure the other models.
OF_THE_RUN = ("commit", "date", "note")
ALL_CONFIGS = (*CONFIGS, *FP8_CONFIGS, *INT8_CONFIGS)


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
        return model


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
    widths = (config.caption_channels,) * 2
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
}


def block_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """The lists of a model's repeated blocks by name, and no list within a block."""
    return {
        name: child
        for name, child in model.named_children()
        if isinstance(child, nn.ModuleList) and len(child) > 1 and len({type(block) for block in child}) == 1
    }


def first_blocks(model: nn.Module, count: int) -> nn.Module:
    """A model of the first `count` blocks of each list, with the same parameters."""
    shallow = view_of(model)
    for name, blocks in block_lists(shallow).items():
        setattr(shallow, name, blocks[:count])
    return shallow


def make_model(config: str, model: nn.Module, ltx: ModuleType) -> nn.Module:
    model = view_of(model)
    if config.startswith("kernels"):
        precision, attention = "fp8" if "fp8" in config else "native", "int8" if "int8" in config else "native"
        ltx.optimize(model, precision=precision, attention=attention)
    elif config.startswith("torchao"):
        quantise_with_torchao(model, list(block_lists(model).values()))
    if config.endswith("compile"):
        options = {"options": TORCHAO_INDUCTOR} if "torchao" in config else {}
        if getattr(model, "_repeated_blocks", None):
            model.compile_repeated_blocks(fullgraph=True, **options)
        else:  # of classes that do not name them
            for block in (block for blocks in block_lists(model).values() for block in blocks):
                block.compile(fullgraph=True, **options)
    return model


def one_tensor(result: Any) -> Tensor:
    """A model's results side by side: some have two streams, or a list of images."""
    tensors = [t for part in result for t in (part if isinstance(part, (list, tuple)) else [part])]
    return tensors[0] if len(tensors) == 1 else torch.cat([t.flatten() for t in tensors])


def denoise(model: nn.Module, inputs: Inputs, steps: int) -> Tensor:
    """The first stream's latents after some steps, kept in float32 between them."""
    key, start = next(iter(inputs.items()))
    latents = floats(start)
    for _ in range(steps):
        given = [x.to(like.dtype) for x, like in zip(latents, start)] if isinstance(start, list) else latents.to(start)
        result = model(**{**inputs, key: given}, return_dict=False)[0]
        if isinstance(latents, list):
            latents = [moved(x, velocity, steps) for x, velocity in zip(latents, result)]
        else:
            latents = moved(latents, result, steps)
    return torch.cat([x.flatten() for x in latents]) if isinstance(latents, list) else latents


def moved(latents: Tensor, velocity: Tensor, steps: int) -> Tensor:
    """One step; where the model has inputs beside the latents in their channels, dimension 1, these stay."""
    if latents.shape == velocity.shape:
        return latents - velocity.float() / steps
    channels = velocity.shape[1]
    return torch.cat((latents[:, :channels] - velocity.float() / steps, latents[:, channels:]), 1)


def floats(value: Any) -> Any:
    """The same inputs in float32."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(floats(v) for v in value)
    return value


@dataclass
class Benchmark:
    """What every model is measured with."""

    ltx: ModuleType
    options: argparse.Namespace
    turns: Turns
    progress: Progress
    failed: dict[str, str] = field(default_factory=dict)

    def errors(
        self, model: nn.Module, inputs: Inputs, configs: list[str], failed: dict[str, str]
    ) -> dict[str, dict[str, float]]:
        """What a record says of its error; nothing of compiled ones, which differ by the compiler's choice alone.

        torchao's products are made for the compiler, and its error is measured without. A configuration that fails is
        named in `failed`.
        """
        blocks, steps = self.options.error_blocks, self.options.loop_steps
        shallow = first_blocks(model, blocks) if blocks else model
        exact, exact_inputs = copy.deepcopy(shallow).float(), {key: floats(value) for key, value in inputs.items()}
        expected = one_tensor(exact(**exact_inputs, return_dict=False))
        expected_latents = denoise(exact, exact_inputs, steps)
        del exact
        found: dict[str, dict[str, float]] = {}
        for config in configs:
            if config.endswith("compile") and not config.startswith("torchao"):
                continue
            try:
                made = make_model(config.removesuffix("_compile"), shallow, self.ltx)
                result = one_tensor(made(**inputs, return_dict=False))
                latents = denoise(made, inputs, steps)
            except Exception as reason:
                failed[config] = first_line(reason)
                self.progress.console.print(f"[red]{label(config)} failed[/red]: {failed[config]}")
            else:
                found[config] = {"error_vs_fp32": float(f"{error(result, expected):.4g}"), "error_blocks": blocks}
                if steps:
                    found[config] |= {
                        "loop_error_vs_fp32": float(f"{error(latents, expected_latents):.4g}"),
                        "loop_steps": steps,
                    }
        return found

    def model(self, name: str) -> Iterator[list[dict[str, Any]]]:
        """A model's records, as soon as they are timed, and again with their profiles."""
        known, options = MODELS[name], self.options
        dtype = DTYPES[options.dtype]
        torch.compiler.reset()
        whole = known.construct(options.tiny, dtype, options.device)
        model = first_blocks(whole, options.blocks) if options.blocks else whole
        torch.manual_seed(1)
        inputs = known.inputs(model, Make(dtype, options.device), **(known.tiny_shape if options.tiny else known.shape))
        turns = self.turns if known.graphs else replace(self.turns, graph_s=0.0)
        failed: dict[str, str] = {}
        errors = self.errors(model, inputs, options.configs, failed)
        measured = measure(
            name,
            lambda config: make_model(config, model, self.ltx),
            lambda made: lambda: one_tensor(made(**inputs, return_dict=False)),
            [config for config in options.configs if config not in failed],
            turns,
            options.device,
            self.progress,
            failed,
        )
        self.failed.update({f"{name}, {config}": reason for config, reason in failed.items()})
        depth = {key: len(blocks) for key, blocks in block_lists(model).items()}
        common: dict[str, Any] = {"model": name, "shape": "tiny" if options.tiny else known.shape_name, "blocks": depth}
        if options.blocks:
            common["shallow"] = True
        for config in errors.keys() & measured.keys():
            measured[config].record.update(errors[config])
        yield [{**common, "config": config, **one.record} for config, one in measured.items()]
        if options.profile and options.device == "cuda":
            for one in measured.values():
                profile(one, self.turns.steps_of(one.step_s))
                del one.record["kernels"][KEPT_KERNELS:]
            yield [{**common, "config": config, **one.record} for config, one in measured.items()]


def print_table(records: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="One forward of each model")
    for column in ("model", "configuration", "ms", "x stock", "x compile", "graph ms", "first s", "peak GiB", "error"):
        table.add_column(column, justify="left" if column in ("model", "configuration") else "right")
    by_key = {(record["model"], record["config"]): record for record in records}
    for record in records:

        def ratio(config: str, record: dict[str, Any] = record) -> str:
            other = by_key.get((record["model"], config))
            return f"{other['step_ms'] / record['step_ms']:.3f}" if other else ""

        table.add_row(
            record["model"],
            label(record["config"]),
            f"{record['step_ms']:.2f}",
            ratio("baseline"),
            ratio("compile"),
            f"{record['graph_ms']:.2f}" if "graph_ms" in record else "",
            f"{record['first_step_s']:.1f}",
            f"{record['peak_gb']:.1f}" if "peak_gb" in record else "",
            f"{record['error_vs_fp32']:.2e}" if "error_vs_fp32" in record else "",
        )
    console.print(table)


def earlier_records(path: Path) -> list[dict[str, Any]]:
    """The records of a result file that this run adds to, each with what its own run said of all of its records."""
    if not path.exists():
        return []
    earlier = json.loads(path.read_text())
    of_the_run = {key: earlier["meta"][key] for key in OF_THE_RUN if key in earlier["meta"]}
    return [{**of_the_run, **record} for record in earlier["records"]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)")
    parser.add_argument("--configs", nargs="+", choices=ALL_CONFIGS, help="(default: all)")
    parser.add_argument("--blocks", type=int, default=0, help="only the first blocks of each kind (default: all)")
    parser.add_argument("--error-blocks", type=int, default=ERROR_BLOCKS, help="blocks for the error; 0: all of them")
    parser.add_argument("--loop-steps", type=int, default=8, help="steps for the latents' error; 0: none (default: 8)")
    parser.add_argument("--tiny", action="store_true", help="models of seconds on a CPU, to try the script")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=2, help="turns of a configuration (default: 2)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a turn at most (default: 10)")
    parser.add_argument("--seconds", type=float, default=0.5, help="a turn's steps take about this long (default: 0.5)")
    parser.add_argument("--warm-up", type=float, default=0.5, help="seconds of steps before each turn (default: 0.5)")
    parser.add_argument("--no-graphs", action="store_true", help="do not time CUDA graphs")
    parser.add_argument("--profile", action="store_true", help="add the kernels of one step, which takes seconds more")
    parser.add_argument("--output", type=Path, help="JSON (default: benchmarks/results/<gpu>-models.json)")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 130)
    torchao = version("torchao") if importlib.util.find_spec("torchao") else None
    if options.configs is None:
        options.configs = [config for config in ALL_CONFIGS if torchao or not config.startswith("torchao")]

    ltx, metadata = load_package()
    output = options.output or result_file("models", options.device)
    meta = {
        **common_meta(metadata, options.device),
        "diffusers": diffusers.__version__,
        "torchao": torchao,
        "dtype": options.dtype,
        "weights": "random",
    }
    records = earlier_records(output)
    of_the_run = {key: meta[key] for key in OF_THE_RUN if key in meta}
    graph_s = 0.0 if options.no_graphs else GRAPH_S
    turns = Turns(options.rounds, options.steps, options.seconds, options.warm_up, 0, graph_s)
    with torch.no_grad(), Progress(*COLUMNS, console=console) as progress:
        benchmark = Benchmark(ltx, options, turns, progress)
        for model in options.models:
            try:
                for measured in benchmark.model(model):
                    records = [record for record in records if record["model"] != model]
                    records += [{**record, **of_the_run} for record in measured]
                    write(output, meta, records)
            except Exception as reason:  # the others are still measured; the exit status says that one was not
                benchmark.failed[model] = first_line(reason)
                console.print(f"[red]{model} failed[/red]: {benchmark.failed[model]}")
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
    profiled = [record for record in records if "ms_by_kind" in record]
    if profiled:
        groups: dict[str, list[dict[str, Any]]] = {}
        for record in profiled:
            groups.setdefault(f"{record['model']}, {record['shape']}", []).append(record)
        draw(groups, output, f"One forward, {options.dtype}, {meta['device']}")
    print_table(records, console)
    console.print(str(output), highlight=False, soft_wrap=True)
    return 1 if benchmark.failed else 0


if __name__ == "__main__":
    sys.exit(main())
