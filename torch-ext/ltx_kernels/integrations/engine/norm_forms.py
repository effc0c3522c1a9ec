"""What the norms of other libraries compute, by the names of their classes: formula, eps, weight, where they round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from ..._checks import LAYER, NONE, RMS
from ...norm import rmsnorm
from .guards import name_of

TORCH_RMSNORM = "torch.nn.modules.normalization.RMSNorm"
TORCH_LAYERNORM = "torch.nn.modules.normalization.LayerNorm"
RMSNORM = "diffusers.models.normalization.RMSNorm"
FP32_LAYERNORM = "diffusers.models.normalization.FP32LayerNorm"
MOCHI_RMSNORM = "diffusers.models.normalization.MochiRMSNorm"
COSMOS3_RMSNORM = "diffusers.models.transformers.transformer_cosmos3.Cosmos3NemotronRMSNorm"
KREA2_RMSNORM = "diffusers.models.transformers.transformer_krea2.Krea2RMSNorm"


@dataclass(frozen=True)
class Form:
    """What one class of norms computes.

    statistic: RMS or LAYER.
    eps: The attribute with the number that is added to the mean square.
    offset: Added to the weight.
    twice: The class rounds before the weight and again after it. The others round once, to the input's dtype.
    """

    statistic: int = RMS
    eps: str = "eps"
    offset: float = 0.0
    twice: bool = False

    def eps_of(self, norm: nn.Module) -> float | None:
        return cast("float | None", norm.__dict__[self.eps])

    def rounding(self, rounding: str) -> str:
        """What to ask the op for, so that the result is as the class's in "eager"; there the op rounds twice."""
        return rounding if self.twice or self.offset else "fp32"

    def rms(self, norm: nn.Module, input: Tensor, rounding: str) -> Tensor:
        """What an RMS norm gives for an input."""
        weight = norm._parameters.get("weight")
        return rmsnorm(input, weight, self.eps_of(norm), weight_offset=self.offset, rounding=self.rounding(rounding))


def transformers_class(model: str, name: str) -> str:
    return f"transformers.models.{model}.modeling_{model}.{name}"


LLAMA4_NORM = transformers_class("llama4", "Llama4TextRMSNorm")
LLAMA4_L2_NORM = transformers_class("llama4", "Llama4TextL2Norm")
LLAMA4_NORMS = (LLAMA4_NORM, LLAMA4_L2_NORM)

_TWICE = Form(eps="variance_epsilon", twice=True)
_ONCE = Form(eps="variance_epsilon")
_FROM_ONE = Form(offset=1.0)

LANGUAGE_FORMS: Mapping[str, Form] = {
    **{
        transformers_class(model, name): _TWICE
        for model, name in (
            ("llama", "LlamaRMSNorm"),
            ("mistral", "MistralRMSNorm"),
            ("ministral", "MinistralRMSNorm"),
            ("ministral3", "Ministral3RMSNorm"),
            ("qwen2", "Qwen2RMSNorm"),
            ("qwen2_5_vl", "Qwen2_5_VLRMSNorm"),
            ("qwen3", "Qwen3RMSNorm"),
            ("qwen3_moe", "Qwen3MoeRMSNorm"),
            ("phi3", "Phi3RMSNorm"),
            ("t5", "T5LayerNorm"),
            ("umt5", "UMT5LayerNorm"),
        )
    },
    **{
        transformers_class(model, name): _ONCE
        for model, name in (("gpt_oss", "GptOssRMSNorm"), ("olmo2", "Olmo2RMSNorm"), ("olmo3", "Olmo3RMSNorm"))
    },
    LLAMA4_NORM: Form(twice=True),
    LLAMA4_L2_NORM: Form(),
    transformers_class("gemma3n", "Gemma3nRMSNorm"): Form(),
    transformers_class("gemma4", "Gemma4RMSNorm"): Form(),
    **{
        transformers_class(model, name): _FROM_ONE
        for model, name in (
            ("gemma", "GemmaRMSNorm"),
            ("gemma2", "Gemma2RMSNorm"),
            ("gemma3", "Gemma3RMSNorm"),
            ("recurrent_gemma", "RecurrentGemmaRMSNorm"),
            ("t5gemma", "T5GemmaRMSNorm"),
            ("qwen3_next", "Qwen3NextRMSNorm"),
            ("qwen3_5", "Qwen3_5RMSNorm"),
            ("qwen3_5_moe", "Qwen3_5MoeRMSNorm"),
        )
    },
}

OFFSET_NORMS = tuple(name for name, form in LANGUAGE_FORMS.items() if form.offset)
NORMS = tuple(name for name in LANGUAGE_FORMS if name not in (*OFFSET_NORMS, *LLAMA4_NORMS))

# torch.nn.Identity counts as a norm that a block's constructor may leave out.
FORMS: Mapping[str, Form] = {
    TORCH_RMSNORM: Form(),
    RMSNORM: Form(twice=True),
    TORCH_LAYERNORM: Form(LAYER),
    FP32_LAYERNORM: Form(LAYER),
    MOCHI_RMSNORM: Form(),
    COSMOS3_RMSNORM: Form(),
    KREA2_RMSNORM: _FROM_ONE,
    **LANGUAGE_FORMS,
}

_forms: dict[type, Form | None] = {}  # the same by class, as far as classes have been met


def form_of(norm: object) -> Form | None:
    """What a norm computes; None for a module of any other class."""
    cls = type(norm)
    if cls not in _forms:
        _forms[cls] = FORMS.get(name_of(cls))
    return _forms[cls]


def statistic(norm: object) -> int:
    """RMS or LAYER; NONE for a module of any other class."""
    form = form_of(norm)
    return NONE if form is None else form.statistic
