"""Models of transformers, recognised by the names of their classes: nothing of transformers is imported.

So far the norms. What is left alone is named with the reason, since a model's norms look alike and are not: with
Gemma's formula in the place of Llama's, a model computes something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..norm import rmsnorm
from ._sites import Entry, class_of, name_of, stock_forward, why_not_norm_call

# A module whose class is known by its name, and with it its attributes.
Known = Any


def rms_norm_forward(self: Known, hidden_states: Tensor) -> Tensor:
    reason = why_not_norm_call(self, hidden_states)
    if reason:
        return stock_forward(self, reason, hidden_states)
    site = self._ltx_kernels
    site.count_call()
    # The stock forward rounds before the weight and after it, as "eager" does.
    return rmsnorm(hidden_states, self.weight, self.variance_epsilon, rounding=site.rounding)


def _class(model: str, name: str) -> str:
    return f"transformers.models.{model}.modeling_{model}.{name}"


_RMSNORM = Entry(rms_norm_forward, ("rmsnorm",), ("hidden_states",), level="norms")

ENTRIES: Mapping[str, Entry] = {
    _class("llama", "LlamaRMSNorm"): _RMSNORM,
    _class("mistral", "MistralRMSNorm"): _RMSNORM,
    _class("qwen2", "Qwen2RMSNorm"): _RMSNORM,
    _class("qwen3", "Qwen3RMSNorm"): _RMSNORM,
}

_OFFSET = "it multiplies by 1 + weight, not by weight"
_WEIGHT_FIRST = "it multiplies by the weight before it rounds, not after"
_GATED = "it has a gate"

# What these do otherwise than the classes above.
DIFFERENT: Mapping[str, str] = {
    _class("gemma", "GemmaRMSNorm"): _OFFSET,
    _class("gemma2", "Gemma2RMSNorm"): _OFFSET,
    _class("gemma3", "Gemma3RMSNorm"): _OFFSET,
    _class("recurrent_gemma", "RecurrentGemmaRMSNorm"): _OFFSET,
    _class("t5gemma", "T5GemmaRMSNorm"): _OFFSET,
    _class("qwen3_next", "Qwen3NextRMSNorm"): _OFFSET,
    _class("qwen3_5", "Qwen3_5RMSNorm"): _OFFSET,
    _class("qwen3_5_moe", "Qwen3_5MoeRMSNorm"): _OFFSET,
    _class("gemma3n", "Gemma3nRMSNorm"): _WEIGHT_FIRST,
    _class("gemma4", "Gemma4RMSNorm"): _WEIGHT_FIRST,
    _class("gpt_oss", "GptOssRMSNorm"): _WEIGHT_FIRST,
    _class("olmo2", "Olmo2RMSNorm"): _WEIGHT_FIRST,
    _class("olmo3", "Olmo3RMSNorm"): _WEIGHT_FIRST,
    _class("qwen3_next", "Qwen3NextRMSNormGated"): _GATED,
    _class("qwen3_5", "Qwen3_5RMSNormGated"): _GATED,
}


def why_unknown(module: nn.Module) -> str:
    """Why a norm of transformers, or of a class made from one, has no entry; empty for what is no such norm."""
    for base in map(name_of, type(module).__mro__[1:]):
        if base in ENTRIES:
            return f"{class_of(module)} is a subclass of {base}, and may do something else"
    name = class_of(module)
    if name in DIFFERENT:
        return f"{name}: {DIFFERENT[name]}"
    # The name decides what is reported, never what is replaced.
    library = name.partition(".")[0]
    if library in ("transformers", "transformers_modules") and "Norm" in type(module).__name__ and not module._modules:
        return f"{name} is not known"
    return ""
