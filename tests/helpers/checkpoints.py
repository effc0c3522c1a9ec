"""Checkpoints in scaled fp8 as other programs write them, of tiny models, and what their tensors mean."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

PREFIX = "model.diffusion_model."
E4M3_MAX = 448.0

# Of each family: the names of diffusers as patterns, with those of the authors' checkpoints.
ORIGINAL_NAMES: dict[str, list[tuple[str, str]]] = {
    "ltx": [("proj_in", "patchify_proj"), ("time_embed", "adaln_single"), ("norm_(q|k)", r"\1_norm")],
    "ltx2": [
        ("av_cross_attn_(video|audio)_scale_shift", r"av_ca_\1_scale_shift_adaln_single"),
        ("av_cross_attn_(video|audio)_(a2v|v2a)_gate", r"av_ca_\2_gate_adaln_single"),
        ("time_embed", "adaln_single"),
        ("proj_in", "patchify_proj"),
        ("(video|audio)_a2v_cross_attn_scale_shift_table", r"scale_shift_table_a2v_ca_\1"),
        ("norm_(q|k)", r"\1_norm"),
    ],
    "wan-t2v": [
        (r"condition_embedder\.(time|text)_embedder\.linear_1", r"\1_embedding.0"),
        (r"condition_embedder\.(time|text)_embedder\.linear_2", r"\1_embedding.2"),
        (r"condition_embedder\.time_proj", "time_projection.1"),
        ("attn2", "cross_attn"),
        ("attn1", "self_attn"),
        (r"\.to_out\.0\.", ".o."),
        (r"\.to_([qkv])\.", r".\1."),
        ("proj_out", "head.head"),
        ("^scale_shift_table", "head.modulation"),
        (r"\.scale_shift_table", ".modulation"),
        (r"ffn\.net\.0\.proj", "ffn.0"),
        (r"ffn\.net\.2", "ffn.2"),
        ("norm2", "norm3"),
    ],
    "flux": [
        (r"time_text_embed\.timestep_embedder\.linear_1", "time_in.in_layer"),
        (r"time_text_embed\.timestep_embedder\.linear_2", "time_in.out_layer"),
        (r"time_text_embed\.text_embedder\.linear_1", "vector_in.in_layer"),
        (r"time_text_embed\.text_embedder\.linear_2", "vector_in.out_layer"),
        ("context_embedder", "txt_in"),
        ("x_embedder", "img_in"),
        (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
        (r"^proj_out", "final_layer.linear"),
        (r"single_transformer_blocks\.(\d+)\.norm\.linear", r"single_blocks.\1.modulation.lin"),
        (r"single_transformer_blocks\.(\d+)\.attn\.norm_q\.weight", r"single_blocks.\1.norm.query_norm.scale"),
        (r"single_transformer_blocks\.(\d+)\.attn\.norm_k\.weight", r"single_blocks.\1.norm.key_norm.scale"),
        (r"single_transformer_blocks\.(\d+)\.proj_out", r"single_blocks.\1.linear2"),
        (r"single_transformer_blocks\.", "single_blocks."),
        (r"transformer_blocks\.", "double_blocks."),
        (r"norm1\.linear", "img_mod.lin"),
        (r"norm1_context\.linear", "txt_mod.lin"),
        (r"attn\.norm_q\.weight", "img_attn.norm.query_norm.scale"),
        (r"attn\.norm_k\.weight", "img_attn.norm.key_norm.scale"),
        (r"attn\.norm_added_q\.weight", "txt_attn.norm.query_norm.scale"),
        (r"attn\.norm_added_k\.weight", "txt_attn.norm.key_norm.scale"),
        (r"ff\.net\.0\.proj", "img_mlp.0"),
        (r"ff\.net\.2", "img_mlp.2"),
        (r"ff_context\.net\.0\.proj", "txt_mlp.0"),
        (r"ff_context\.net\.2", "txt_mlp.2"),
        (r"attn\.to_out\.0", "img_attn.proj"),
        (r"attn\.to_add_out", "txt_attn.proj"),
    ],
    "flux2": [
        (r"time_guidance_embed\.timestep_embedder\.linear_1", "time_in.in_layer"),
        (r"time_guidance_embed\.timestep_embedder\.linear_2", "time_in.out_layer"),
        (r"time_guidance_embed\.guidance_embedder\.linear_1", "guidance_in.in_layer"),
        (r"time_guidance_embed\.guidance_embedder\.linear_2", "guidance_in.out_layer"),
        (r"(stream_modulation\w*)\.linear", r"\1.lin"),
        ("context_embedder", "txt_in"),
        ("x_embedder", "img_in"),
        (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
        (r"^proj_out", "final_layer.linear"),
        (r"single_transformer_blocks\.(\d+)\.attn\.to_qkv_mlp_proj", r"single_blocks.\1.linear1"),
        (r"single_transformer_blocks\.(\d+)\.attn\.to_out", r"single_blocks.\1.linear2"),
        (r"single_transformer_blocks\.(\d+)\.attn\.norm_q\.weight", r"single_blocks.\1.norm.query_norm.scale"),
        (r"single_transformer_blocks\.(\d+)\.attn\.norm_k\.weight", r"single_blocks.\1.norm.key_norm.scale"),
        (r"^transformer_blocks\.", "double_blocks."),
        (r"attn\.norm_q\.weight", "img_attn.norm.query_norm.scale"),
        (r"attn\.norm_k\.weight", "img_attn.norm.key_norm.scale"),
        (r"attn\.norm_added_q\.weight", "txt_attn.norm.query_norm.scale"),
        (r"attn\.norm_added_k\.weight", "txt_attn.norm.key_norm.scale"),
        (r"ff\.linear_in", "img_mlp.0"),
        (r"ff\.linear_out", "img_mlp.2"),
        (r"ff_context\.linear_in", "txt_mlp.0"),
        (r"ff_context\.linear_out", "txt_mlp.2"),
        (r"attn\.to_out\.0", "img_attn.proj"),
        (r"attn\.to_add_out", "txt_attn.proj"),
    ],
    "sd3-35large": [
        (r"^pos_embed\.pos_embed", "pos_embed"),
        (r"^pos_embed\.proj", "x_embedder.proj"),
        (r"time_text_embed\.timestep_embedder\.linear_1", "t_embedder.mlp.0"),
        (r"time_text_embed\.timestep_embedder\.linear_2", "t_embedder.mlp.2"),
        (r"time_text_embed\.text_embedder\.linear_1", "y_embedder.mlp.0"),
        (r"time_text_embed\.text_embedder\.linear_2", "y_embedder.mlp.2"),
        (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
        (r"^proj_out", "final_layer.linear"),
        (r"^transformer_blocks\.", "joint_blocks."),
        (r"norm1\.linear", "x_block.adaLN_modulation.1"),
        (r"norm1_context\.linear", "context_block.adaLN_modulation.1"),
        (r"attn\.norm_(q|k)\.", r"x_block.attn.ln_\1."),
        (r"attn\.norm_added_(q|k)\.", r"context_block.attn.ln_\1."),
        (r"attn\.to_out\.0", "x_block.attn.proj"),
        (r"attn\.to_add_out", "context_block.attn.proj"),
        (r"ff\.net\.0\.proj", "x_block.mlp.fc1"),
        (r"ff\.net\.2", "x_block.mlp.fc2"),
        (r"ff_context\.net\.0\.proj", "context_block.mlp.fc1"),
        (r"ff_context\.net\.2", "context_block.mlp.fc2"),
    ],
    "z_image": [
        (r"attention\.to_out\.0", "attention.out"),
        (r"attention\.norm_(q|k)", r"attention.\1_norm"),
        (r"all_final_layer\.2-1\.", "final_layer."),
        (r"all_x_embedder\.2-1\.", "x_embedder."),
    ],
    "hunyuan_video": [
        (r"time_text_embed\.timestep_embedder\.linear_1", "time_in.mlp.0"),
        (r"time_text_embed\.timestep_embedder\.linear_2", "time_in.mlp.2"),
        (r"^context_embedder\.time_text_embed\.text_embedder", "txt_in.c_embedder"),
        (r"^context_embedder\.time_in", "txt_in.t_embedder"),
        (r"^context_embedder\.proj_in", "txt_in.input_embedder"),
        (r"^context_embedder\.token_refiner\.refiner_blocks", "txt_in.individual_token_refiner.blocks"),
        (r"(^txt_in.*)attn\.to_out\.0", r"\1self_attn_proj"),
        (r"(^txt_in.*)ff\.net\.0\.proj", r"\1mlp.fc1"),
        (r"(^txt_in.*)ff\.net\.2", r"\1mlp.fc2"),
        (r"(^txt_in.*)norm_out\.linear", r"\1adaLN_modulation.1"),
        (r"time_text_embed\.guidance_embedder\.linear_1", "guidance_in.mlp.0"),
        (r"time_text_embed\.guidance_embedder\.linear_2", "guidance_in.mlp.2"),
        (r"time_text_embed\.text_embedder\.linear_1", "vector_in.in_layer"),
        (r"time_text_embed\.text_embedder\.linear_2", "vector_in.out_layer"),
        ("x_embedder", "img_in"),
        (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
        (r"^proj_out", "final_layer.linear"),
        (r"single_transformer_blocks\.(\d+)\.norm\.linear", r"single_blocks.\1.modulation.linear"),
        (r"single_transformer_blocks\.(\d+)\.attn\.norm_(q|k)", r"single_blocks.\1.\2_norm"),
        (r"single_transformer_blocks\.(\d+)\.proj_out", r"single_blocks.\1.linear2"),
        (r"^transformer_blocks\.", "double_blocks."),
        (r"norm1\.linear", "img_mod.linear"),
        (r"norm1_context\.linear", "txt_mod.linear"),
        (r"attn\.norm_(q|k)\.", r"img_attn_\1_norm."),
        (r"attn\.norm_added_(q|k)\.", r"txt_attn_\1_norm."),
        (r"attn\.to_out\.0", "img_attn_proj"),
        (r"attn\.to_add_out", "txt_attn_proj"),
        (r"ff\.net\.0\.proj", "img_mlp.fc1"),
        (r"ff\.net\.2", "img_mlp.fc2"),
        (r"ff_context\.net\.0\.proj", "txt_mlp.fc1"),
        (r"ff_context\.net\.2", "txt_mlp.fc2"),
    ],
    # Of Cosmos Predict 2. diffusers 0.42 takes every Cosmos checkpoint for one of these.
    "cosmos-per_frame": [
        (r"time_embed\.t_embedder", "t_embedder.1"),
        (r"time_embed\.norm", "t_embedding_norm"),
        (r"^transformer_blocks\.", "blocks."),
        (r"norm1\.linear_", "adaln_modulation_self_attn."),
        (r"norm2\.linear_", "adaln_modulation_cross_attn."),
        (r"norm3\.linear_", "adaln_modulation_mlp."),
        (r"attn1\.", "self_attn."),
        (r"attn2\.", "cross_attn."),
        (r"to_(q|k|v)\.", r"\1_proj."),
        (r"to_out\.0", "output_proj"),
        (r"norm_(q|k)\.", r"\1_norm."),
        (r"ff\.net\.0\.proj", "mlp.layer1"),
        (r"ff\.net\.2", "mlp.layer2"),
        (r"patch_embed\.proj", "x_embedder.proj.1"),
        (r"norm_out\.linear_", "final_layer.adaln_modulation."),
        (r"^proj_out", "final_layer.linear"),
        ("^", "net."),
    ],
    "qwenimage": [],
}
ORIGINAL_NAMES["chroma"] = [
    (r"(distilled_guidance_layer\.layers\.\d+)\.linear_1", r"\1.in_layer"),
    (r"(distilled_guidance_layer\.layers\.\d+)\.linear_2", r"\1.out_layer"),
    (r"(distilled_guidance_layer\.norms\.\d+)\.weight", r"\1.scale"),
    *ORIGINAL_NAMES["flux"],
]
# Layers that a checkpoint has as one: the names of the parts in diffusers, and of the whole.
JOINED = {
    "flux": [
        (r"^transformer_blocks\.(\d+)\.attn\.to_(q|k|v)\.", r"double_blocks.\1.img_attn.qkv."),
        (r"^transformer_blocks\.(\d+)\.attn\.add_(q|k|v)_proj\.", r"double_blocks.\1.txt_attn.qkv."),
        (r"^single_transformer_blocks\.(\d+)\.(attn\.to_[qkv]|proj_mlp)\.", r"single_blocks.\1.linear1."),
    ],
    "hunyuan_video": [
        (r"^transformer_blocks\.(\d+)\.attn\.to_(q|k|v)\.", r"double_blocks.\1.img_attn_qkv."),
        (r"^transformer_blocks\.(\d+)\.attn\.add_(q|k|v)_proj\.", r"double_blocks.\1.txt_attn_qkv."),
        (r"^single_transformer_blocks\.(\d+)\.(attn\.to_[qkv]|proj_mlp)\.", r"single_blocks.\1.linear1."),
        (
            r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)\.attn\.to_(q|k|v)\.",
            r"txt_in.individual_token_refiner.blocks.\1.self_attn_qkv.",
        ),
    ],
    "z_image": [(r"(.*\.attention)\.to_(q|k|v)\.", r"\1.qkv.")],
    "sd3-35large": [
        (r"^transformer_blocks\.(\d+)\.attn\.to_(q|k|v)\.", r"joint_blocks.\1.x_block.attn.qkv."),
        (r"^transformer_blocks\.(\d+)\.attn\.add_(q|k|v)_proj\.", r"joint_blocks.\1.context_block.attn.qkv."),
    ],
}
JOINED["flux2"] = JOINED["flux"][:2]
JOINED["chroma"] = JOINED["flux"]
# Modulation whose scale and shift are the other way round in the authors' checkpoint.
SWAPPED = {
    **dict.fromkeys(("flux", "flux2", "hunyuan_video"), "final_layer.adaLN"),
    "sd3-35large": r"final_layer.adaLN|joint_blocks.2.context_block.adaLN",  # the last of three blocks
}
_ORDER = ("to_q.", "to_k.", "to_v.", "add_q_proj.", "add_k_proj.", "add_v_proj.", "proj_mlp.")


def in_original_names(family: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's tensors as its authors' checkpoint has them."""
    parts: dict[str, dict[int, Tensor]] = {}
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        whole = next((re.sub(old, new, name) for old, new in JOINED.get(family, ()) if re.match(old, name)), None)
        if whole is not None:
            parts.setdefault(whole, {})[next(i for i, part in enumerate(_ORDER) if part in name)] = tensor
            continue
        for old, new in ORIGINAL_NAMES[family]:
            name = re.sub(old, new, name)
        swapped = family in SWAPPED and re.match(SWAPPED[family], name)
        found[name] = torch.cat(tensor.chunk(2)[::-1]) if swapped else tensor
    found.update({name: torch.cat([tensor for _, tensor in sorted(of.items())]) for name, of in parts.items()})
    return found


def with_constant(function: Callable[..., Any], old: object, new: object) -> Callable[..., Any]:
    """A function with another constant: diffusers' converters have the width of the released models in their code."""

    def changed(code: types.CodeType) -> types.CodeType:
        """The code, and that of the functions in it."""
        constants = (changed(c) if isinstance(c, types.CodeType) else c for c in code.co_consts)
        return code.replace(co_consts=tuple(new if type(c) is type(old) and c == old else c for c in constants))

    return types.FunctionType(changed(function.__code__), function.__globals__, function.__name__)


# ---- Spellings


def _comfy_old(layer: str, scale: Tensor) -> dict[str, Tensor]:
    return {f"{layer}.scale_weight": scale, f"{layer}.scale_input": torch.tensor(0.5)}


def _weight_scale(layer: str, scale: Tensor) -> dict[str, Tensor]:
    return {f"{layer}.weight_scale": scale, f"{layer}.input_scale": torch.tensor(0.5)}


def comfy_quant(layer: str, **description: Any) -> dict[str, Tensor]:
    text = json.dumps({"format": "float8_e4m3fn", **description})
    return {f"{layer}.comfy_quant": torch.tensor(list(text.encode()), dtype=torch.uint8)}


def _comfy_new(layer: str, scale: Tensor) -> dict[str, Tensor]:
    return {**_weight_scale(layer, scale), **comfy_quant(layer)}


def _wan2gp(layer: str, scale: Tensor) -> dict[str, Tensor]:
    return {f"{layer}.scale_weight": scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(1)}


def _fp8r(layer: str, scale: Tensor) -> dict[str, Tensor]:
    return {f"{layer}.weight_scale": scale}


def _half(layer: str, scale: Tensor) -> dict[str, Tensor]:
    return {f"{layer}.weight_scale": scale.bfloat16()}


def _cast(layer: str, scale: Tensor) -> dict[str, Tensor]:
    return {}


# The tensors beside a weight, by who writes them so.
SPELLINGS: dict[str, Callable[[str, Tensor], dict[str, Tensor]]] = {
    "comfy old": _comfy_old,
    "comfy": _comfy_new,
    "comfy in metadata": _weight_scale,
    "lightricks": _weight_scale,
    "wan2gp": _wan2gp,
    "fp8r": _fp8r,
    "bf16 scales": _half,
    "cast": _cast,
}


def quantised(weight: Tensor, per: str, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """(values, scale) with a scale for the tensor or for each row, or without one."""
    weight = weight.float()
    if per == "none":
        return weight.to(dtype), torch.tensor(1.0)
    amax = weight.abs().amax() if per == "tensor" else weight.abs().amax(1, keepdim=True)
    scale = (amax / E4M3_MAX).bfloat16().float()  # exact in every dtype that a file has scales in
    values = (weight / scale).clamp(-E4M3_MAX, E4M3_MAX).to(dtype)
    return values, scale if per == "tensor" else scale.flatten()


def is_layer(name: str, tensor: Tensor) -> bool:
    return name.endswith(".weight") and tensor.dim() == 2


def scaled(
    state: Mapping[str, Tensor],
    spelling: str,
    per: str,
    only: Callable[[str], bool] = lambda name: True,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, str]]:
    """(tensors of a file, what they mean in float32, the file's metadata)."""
    per = "none" if spelling == "cast" else per
    file: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    layers = {}
    for name, tensor in state.items():
        if not (is_layer(name, tensor) and only(name)):
            file[name], meant[name] = tensor.bfloat16(), tensor.bfloat16().float()
            continue
        layer = name[: -len(".weight")]
        values, scale = quantised(tensor, per, dtype)
        file.update({name: values, **SPELLINGS[spelling](layer, scale)})
        meant[name] = values.float() * (scale if scale.dim() == 0 else scale[:, None])
        layers[layer] = {"format": "float8_e4m3fn"}
    metadata = {"format": "pt"}
    if spelling == "comfy old":
        file["scaled_fp8"] = torch.zeros((), dtype=torch.float8_e4m3fn)
    elif spelling == "comfy in metadata":
        metadata["_quantization_metadata"] = json.dumps({"layers": layers})
    elif spelling == "lightricks":
        metadata["config"] = json.dumps({"transformer": {}, "vae": {}})
    return file, meant, metadata


def write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None, shards: int = 1) -> Path:
    """Writes a file, or shards with their index; returns what is given to `optimize`."""
    from safetensors.torch import save_file

    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(dict(tensors), path, metadata=metadata)
        return path
    weight_map = {}
    for shard in range(shards):
        # Every second tensor, so that a scale is in another shard than its weight.
        part = {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % shards == shard}
        name = f"{path.stem}-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file(part, path.parent / name, metadata=metadata)
        weight_map.update(dict.fromkeys(part, name))
    index = path.parent / f"{path.name}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def stock_of(model: nn.Module, meant: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a model's tensors have to be, in bfloat16 or where its class keeps float32, in float32."""
    keep = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return {
        name: tensor if keep & set(name.split(".")) or not tensor.is_floating_point() else tensor.bfloat16()
        for name, tensor in meant.items()
    }
