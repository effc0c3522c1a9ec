"""Qwen3 and the dense parts of its mixtures of experts: Llama's layers, with norms of query and key."""

from __future__ import annotations

from ..blocks.gated_mlp import GatedMLP
from ..causal.engine import CausalAttention
from ..engine.norm_forms import transformers_class as _class
from ._pre_norm import layer_window, pre_norm_layer

QWEN3 = CausalAttention((_class("qwen3", "Qwen3Attention"),), norms=("q_norm", "k_norm"), options=layer_window)
QWEN3_MOE = CausalAttention(
    (_class("qwen3_moe", "Qwen3MoeAttention"),), norms=("q_norm", "k_norm"), options=layer_window
)
MLP = GatedMLP((_class("qwen3", "Qwen3MLP"), _class("qwen3_moe", "Qwen3MoeMLP")))

ENTRIES = (
    QWEN3,
    QWEN3_MOE,
    MLP,
    pre_norm_layer((_class("qwen3", "Qwen3DecoderLayer"),), QWEN3, MLP),
    pre_norm_layer((_class("qwen3_moe", "Qwen3MoeDecoderLayer"),), QWEN3_MOE, MLP),
)
