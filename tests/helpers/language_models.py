"""Small random language models of transformers' own classes, and how far results may be from theirs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

LAYERS, WIDTH = 2, 64

# An attention with a gate in one layer, and linear attention in the other.
QWEN3_5: dict[str, Any] = {
    "layer_types": ["full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}
# Layers with an input of their own; the second has wider heads.
GEMMA4: dict[str, Any] = {
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 99,
    "tie_word_embeddings": False,
}
# A layer that rotates, normalises query and key and sees chunks, and one that scales the query by its position.
LLAMA4: dict[str, Any] = {
    "no_rope_layers": [1, 0],
    "moe_layers": [],
    "intermediate_size_mlp": 96,
    "attention_chunk_size": 6,
    "floor_scale": 3,
    "attn_scale": 0.3,
}
# The query is scaled from the fourth token on.
MINISTRAL3: dict[str, Any] = {
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 4,
        "llama_4_scaling_beta": 0.3,
    },
}


def make_model(device: str, dtype: torch.dtype = torch.float32, family: str = "Llama", **config: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": LAYERS, "vocab_size": 99}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    tokens = {"pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}
    if family == "Qwen2_5_VL":
        model = qwen2_5_vl({**sizes, **heads, **tokens}, {**tokens, **config})
    else:
        # The plain configuration of some families belongs to the model that also takes images.
        config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
        model = getattr(transformers, f"{family}ForCausalLM")(config_class(**{**sizes, **heads, **tokens, **config}))
    return random_(model).to(device=device, dtype=dtype).eval().requires_grad_(False)


FALCONS = {
    "7b": {"multi_query": True, "parallel_attn": True, "new_decoder_architecture": False},
    "40b": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "11b": {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    "every head": {"multi_query": False, "new_decoder_architecture": False, "parallel_attn": False, "bias": True},
}


def make_falcon(device: str, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    sizes = {"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": 99}
    config = transformers.FalconConfig(**{**sizes, "eos_token_id": None, "bos_token_id": None, **config})
    torch.manual_seed(0)
    return random_(transformers.FalconForCausalLM(config)).to(device, dtype).eval().requires_grad_(False)


def make_encoder(prefix: str, device: str, dtype: torch.dtype, **options: Any) -> Any:
    config = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": LAYERS, "num_heads": 4, "vocab_size": 99}
    config = getattr(transformers, f"{prefix}Config")(**{**config, "feed_forward_proj": "gated-gelu", **options})
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}EncoderModel")(config)
    return random_(model).to(device, dtype).eval().requires_grad_(False)


def qwen2_5_vl(text: dict[str, Any], config: dict[str, Any]) -> Any:
    """Qwen2.5-VL, which has no class of its text model with logits. It gets text alone here, and no vision tower."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": WIDTH}
    config_class = transformers.Qwen2_5_VLConfig
    made = config_class(text_config={**text, "rope_parameters": rope}, vision_config=vision, **config)
    model = transformers.Qwen2_5_VLForConditionalGeneration(made)
    model.model.visual = nn.Identity()
    return model


def text_model(model: Any) -> Any:
    """The part of a causal language model that holds the decoder layers."""
    return getattr(model.model, "language_model", model.model)


def decoder_layers(model: Any) -> Any:
    return model.transformer.h if isinstance(model, transformers.FalconForCausalLM) else text_model(model).layers


def rotary_functions() -> list[nn.Module]:
    """What transformers made of `apply_rotary_pos_emb` in every model that is imported."""
    models = [module for name, module in sys.modules.items() if name.startswith("transformers.models.")]
    functions = [vars(module).get("apply_rotary_pos_emb") for module in models]
    return [function for function in functions if isinstance(function, nn.Module)]


def forget_kernelized() -> None:
    """kernelize replaces a decorated function for the whole process: from here on it is the stock one again."""
    for function in rotary_functions():
        vars(function).pop("forward", None)


def random_(model: nn.Module) -> nn.Module:
    """Random parameters: as constructed, norms are all the same and layers hardly do anything."""
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("ln_f.weight"):
            nn.init.normal_(parameter, parameter.mean().item(), 0.2)
        elif not name.endswith("bias"):
            nn.init.normal_(parameter, 0.0, 0.2)
        else:
            nn.init.normal_(parameter, 0.0, 0.1)
    return model


def make_ids(device: str, length: int = 9) -> Tensor:
    return torch.randint(1, 99, (2, length), generator=torch.Generator().manual_seed(1)).to(device)


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def assert_close(got: Tensor, stock: Tensor) -> None:
    """Not further from stock than the order of sums in float32, or a few roundings to half precision, can take it."""
    assert got.dtype == stock.dtype and got.shape == stock.shape
    assert distance(got, stock) < (1e-5 if got.dtype == torch.float32 else 4 * torch.finfo(got.dtype).eps)


OTHER_ATTENTION = ("eager", "patched", "torch patched", "torch function", "training")


def other_attention(
    case: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> contextlib.AbstractContextManager[object]:
    """Has a model attend otherwise than by transformers' own call of torch's function.

    case: One of OTHER_ATTENTION.

    Returns: The context that the model has to be called in.
    """
    if case == "eager":
        model.set_attn_implementation("eager")
    elif case == "patched":
        stock = sys.modules["transformers.integrations.sdpa_attention"].sdpa_attention_forward
        registry = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
        monkeypatch.setitem(registry._global_mapping, "sdpa", lambda *args, **options: stock(*args, **options))
    elif case == "torch patched":
        own = F.scaled_dot_product_attention
        monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **options: own(*args, **options))
    elif case == "training":
        model.train()
    return torch.overrides.BaseTorchFunctionMode() if case == "torch function" else contextlib.nullcontext()


def plain_flash(
    ltx: ModuleType, monkeypatch: pytest.MonkeyPatch, asked: Callable[[Tensor, int | None], object]
) -> None:
    """Has torch's flash attention computed in plain torch on any device.

    asked: Is called with the query [B, heads, S, D] and the window of each call.
    """
    home: Any = sys.modules[f"{ltx.__name__}.integrations.causal.flash"]

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None = None,
        *,
        is_causal: bool = True,
        window: int | None = None,
    ) -> Tensor:
        asked(query, window)
        queries, keys = (torch.arange(x.shape[2], device=x.device) for x in (query, key))
        behind = queries[:, None] + len(keys) - len(queries) - keys
        mask = (behind >= 0) & (behind < (window or len(keys))) if is_causal else None
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
        return output.transpose(1, 2)

    monkeypatch.setattr(home, "_has_flash", lambda *_: True)
    monkeypatch.setattr(home, "attention", attention)


def gradients(model: Any, ids: Tensor) -> list[Tensor]:
    with torch.enable_grad():
        loss = model(ids, labels=ids, use_cache=False).loss
        return list(torch.autograd.grad(loss, list(model.parameters())))
