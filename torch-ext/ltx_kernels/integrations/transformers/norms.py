"""Norms of language models.

What is left alone is named with the reason, since a model's norms look alike and are not: with Gemma's formula in the
place of Llama's, a model computes something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, cast

from torch import Tensor, nn

from ...norm import rmsnorm
from .._guards import class_of, name_of, why_not_norm_call
from .._sites import Entry, site_of, stock_forward


class LlamaNorm(Protocol):
    """A norm as LlamaRMSNorm makes it."""

    variance_epsilon: float


def rms_norm_forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
    reason = why_not_norm_call(self, hidden_states)
    if reason:
        return stock_forward(self, reason, hidden_states)
    site = site_of(self)
    site.count_call()
    # The stock forward rounds before the weight and after it, as "eager" does.
    eps = cast(LlamaNorm, self).variance_epsilon
    return rmsnorm(hidden_states, self._parameters["weight"], eps, rounding=site.rounding)


def _class(model: str, name: str) -> str:
    return f"transformers.models.{model}.modeling_{model}.{name}"


NORMS = (
    _class("llama", "LlamaRMSNorm"),
    _class("mistral", "MistralRMSNorm"),
    _class("qwen2", "Qwen2RMSNorm"),
    _class("qwen3", "Qwen3RMSNorm"),
)

ENTRIES = (Entry(NORMS, rms_norm_forward, ("rmsnorm",), ("hidden_states",), level="norms"),)

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
        if base in NORMS:
            return f"{class_of(module)} is a subclass of {base}, and may do something else"
    name = class_of(module)
    if name in DIFFERENT:
        return f"{name}: {DIFFERENT[name]}"
    # The name decides what is reported, never what is replaced.
    library = name.partition(".")[0]
    if library in ("transformers", "transformers_modules") and "Norm" in type(module).__name__ and not module._modules:
        return f"{name} is not known"
    return ""
