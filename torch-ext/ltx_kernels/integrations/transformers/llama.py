"""Llama, Mistral, Ministral, Qwen2, Qwen2.5-VL (text), Phi-3: norm, attention, norm, gated MLP, two sums.

The classes differ in their windows, in the parameters of the attention, and in which layers are one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..blocks.gated_mlp import GatedMLP
from ..causal.engine import CausalAttention
from ..causal.kv_cache import CACHE
from ..engine.norm_forms import transformers_class as _class
from ._pre_norm import Options, layer_window, pre_norm_layer


def model_window(attention: Any, arguments: Mapping[str, Any]) -> Options:
    return {"sliding_window": getattr(attention.config, "sliding_window", None)}


def _window_and_positions(attention: Any, arguments: Mapping[str, Any]) -> Options:
    return {"sliding_window": attention.sliding_window, "position_ids": arguments.get("position_ids")}


def _scale_of_position(attention: Any, position_ids: Tensor) -> Tensor:
    """1 within the length that Ministral 3 was trained for at first; it grows with the logarithm of the position."""
    rope = attention.config.rope_parameters
    times = (position_ids / rope["original_max_position_embeddings"]).floor()
    return (1 + rope["llama_4_scaling_beta"] * times.log1p())[..., None, None]


LLAMA = CausalAttention((_class("llama", "LlamaAttention"),))
MISTRAL = CausalAttention((_class("mistral", "MistralAttention"),), options=model_window)
MINISTRAL = CausalAttention((_class("ministral", "MinistralAttention"),), options=layer_window)
MINISTRAL3 = CausalAttention(
    (_class("ministral3", "Ministral3Attention"),),
    parameters=(
        "hidden_states",
        "position_embeddings",
        "attention_mask",
        "position_ids",
        CACHE,
        "kwargs",
    ),
    scales=_scale_of_position,
    options=model_window,
)
QWEN2 = CausalAttention((_class("qwen2", "Qwen2Attention"),), options=layer_window)
QWEN2_5_VL = CausalAttention(
    (_class("qwen2_5_vl", "Qwen2_5_VLAttention"),),
    parameters=(
        "hidden_states",
        "attention_mask",
        "position_ids",
        CACHE,
        "position_embeddings",
        "kwargs",
    ),
    options=_window_and_positions,
)
PHI3 = CausalAttention((_class("phi3", "Phi3Attention"),), projections=("qkv_proj",), options=model_window)

MLP = GatedMLP(
    (
        _class("llama", "LlamaMLP"),
        _class("mistral", "MistralMLP"),
        _class("ministral", "MinistralMLP"),
        _class("ministral3", "Ministral3MLP"),
        _class("qwen2", "Qwen2MLP"),
        _class("qwen2_5_vl", "Qwen2MLP"),
    )
)
PHI3_MLP = GatedMLP(
    (_class("phi3", "Phi3MLP"),), "hidden_states", projections=("gate_up_proj",), activation="activation_fn"
)

ENTRIES = (
    LLAMA,
    MISTRAL,
    MINISTRAL,
    MINISTRAL3,
    QWEN2,
    QWEN2_5_VL,
    PHI3,
    MLP,
    PHI3_MLP,
    pre_norm_layer((_class("llama", "LlamaDecoderLayer"),), LLAMA, MLP),
    pre_norm_layer((_class("mistral", "MistralDecoderLayer"),), MISTRAL, MLP),
    pre_norm_layer((_class("ministral", "MinistralDecoderLayer"),), MINISTRAL, MLP),
    pre_norm_layer((_class("ministral3", "Ministral3DecoderLayer"),), MINISTRAL3, MLP),
    pre_norm_layer((_class("qwen2", "Qwen2DecoderLayer"),), QWEN2, MLP),
    pre_norm_layer((_class("qwen2_5_vl", "Qwen2_5_VLDecoderLayer"),), QWEN2_5_VL, MLP),
    pre_norm_layer((_class("phi3", "Phi3DecoderLayer"),), PHI3, PHI3_MLP),
)
