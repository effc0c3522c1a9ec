"""Language models by name: released sizes, as configurations of transformers. Nothing is imported that takes long."""

from __future__ import annotations

from typing import Any

CONFIGS = ("eager", "compile", "liger", "kernels", "kernels_compile", "kernels_fp8")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

LLAMA_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
TINY = {"hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 1000, "max_position_embeddings": 4096}
TINY_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}


def rope(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


# (configuration class, what it changes): the released sizes, as far as they decide what is computed.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("LlamaConfig", {**TINY, **TINY_HEADS, "intermediate_size": 688}),
    "llama-8b": (
        "LlamaConfig",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            **LLAMA_HEADS,
            **rope(500000.0),
        },
    ),
    "mistral-7b": (
        "MistralConfig",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "vocab_size": 32768,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            **LLAMA_HEADS,
            **rope(1e6),
        },
    ),
    "qwen2-7b": (
        "Qwen2Config",
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "vocab_size": 152064,
            "max_position_embeddings": 32768,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            **rope(1e6),
        },
    ),
    "qwen3-8b": (
        "Qwen3Config",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            **LLAMA_HEADS,
            **rope(1e6),
        },
    ),
    "gemma3-12b": (
        "Gemma3TextConfig",
        {
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_hidden_layers": 48,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
        },
    ),
    "olmo2-7b": (
        "Olmo2Config",
        {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "vocab_size": 100352,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-6,
            **rope(500000.0),
        },
    ),
    "falcon-7b": (
        "FalconConfig",
        {
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "vocab_size": 65024,
            "multi_query": True,
            "parallel_attn": True,
            "new_decoder_architecture": False,
            "alibi": False,
            "bias": False,
        },
    ),
    "ministral-8b": (
        "MinistralConfig",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "vocab_size": 131072,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "sliding_window": 32768,
            **LLAMA_HEADS,
            **rope(1e8),
        },
    ),
    # The classes' own sizes from here on.
    "ministral3-8b": ("Ministral3Config", {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34}),
    "qwen3.5-9b": ("Qwen3_5TextConfig", {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32}),
    "gemma4": ("Gemma4TextConfig", {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30}),
    "llama4-scout": ("Llama4TextConfig", {"hidden_size": 5120, "intermediate_size": 8192, "num_hidden_layers": 48}),
}
# They do not fit a GPU of 80 GB.
LARGE = ("llama4-scout",)
# What benchmarks/train_llm.py times: a model, and batch x tokens.
TRAINED = ("llama-8b 1x4096", "qwen3-8b 1x4096")
