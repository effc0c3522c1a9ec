"""LTX-Video with this package's ops in place of the norms and the rotary embedding of its transformer.

A minimal integration, short enough to read and to copy. Modules are recognised by their exact class and keep their
class and their parameters: a norm gets a bound method as its `forward`, a self-attention another processor, and
`Report.restore` takes both away again.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

TRANSFORMER = "diffusers.models.transformers.transformer_ltx.LTXVideoTransformer3DModel"
ATTENTION = "diffusers.models.transformers.transformer_ltx.LTXAttention"
PROCESSOR = "diffusers.models.transformers.transformer_ltx.LTXVideoAttnProcessor"
DIFFUSERS_RMSNORM = "diffusers.models.normalization.RMSNorm"
TORCH_RMSNORM = "torch.nn.modules.normalization.RMSNorm"
TORCH_LAYERNORM = "torch.nn.modules.normalization.LayerNorm"


def class_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


class NormRopeAttnProcessor(LTXVideoAttnProcessor):
    """Self-attention in which one launch normalises query and key and rotates both; the rest is diffusers' own."""

    def __init__(self, stock: LTXVideoAttnProcessor, qk_norm_rope: Callable[..., tuple[Tensor, Tensor]], rounding: str):
        super().__init__()
        self.__dict__.update(vars(stock))  # the attention backend and the parallel configuration, where set
        self.qk_norm_rope, self.rounding = qk_norm_rope, rounding

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        if image_rotary_emb is None or encoder_hidden_states is not None or attention_mask is not None:
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        query, key, value = (
            linear(hidden_states).unflatten(2, (attn.heads, -1)) for linear in (attn.to_q, attn.to_k, attn.to_v)
        )
        # cos and sin are [B, S, heads * D]: every head has frequencies of its own.
        cos, sin = image_rotary_emb
        query, key = self.qk_norm_rope(
            query,
            key,
            attn.norm_q.weight,
            attn.norm_k.weight,
            cos,
            sin,
            attn.norm_q.eps,
            across_heads=True,
            rounding=self.rounding,
        )
        hidden_states = dispatch_attention_fn(
            query, key, value, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        return attn.to_out[1](attn.to_out[0](hidden_states.flatten(2, 3)))


@dataclasses.dataclass
class Replacement:
    name: str  # the module's place in the transformer
    parts: tuple[str, ...]  # what the op does the work of, named as in any block
    stock: str  # the class whose forward it was
    op: str  # the package's function
    module: nn.Module
    restore: Callable[[], None]


@dataclasses.dataclass
class Report:
    replaced: list[Replacement]
    left_alone: dict[str, str]  # the module's place in the transformer: why

    def restore(self) -> None:
        """Puts back what was there before."""
        while self.replaced:
            self.replaced.pop().restore()


def replace_norms_and_rope(transformer: nn.Module, ltx: ModuleType, rounding: str = "fp32") -> Report:
    """Puts the package's ops in the place of an LTX-Video transformer's norms and rotary embedding.

    Args:
        transformer: diffusers' LTXVideoTransformer3DModel.
        ltx: The package, as `get_kernel` returns it.
        rounding: "fp32" rounds query and key once, after norm and rotation; "eager" between the two as well, as the
            stock modules do. The other norms round once in either, as the stock ones do.

    Returns:
        What was replaced and what was left alone, with `restore`.

    Raises:
        TypeError: The transformer is of another class.
    """
    if class_of(transformer) != TRANSFORMER:
        raise TypeError(f"transformer: expected {TRANSFORMER}, got {class_of(transformer)}")

    def rms_norm(self: nn.Module, hidden_states: Tensor) -> Tensor:
        return ltx.rmsnorm(hidden_states, self.weight, self.eps)

    def layer_norm(self: nn.Module, hidden_states: Tensor) -> Tensor:
        return ltx.layernorm(hidden_states, self.weight, self.bias, self.eps)

    norms = {
        DIFFUSERS_RMSNORM: ("rmsnorm", rms_norm),
        TORCH_RMSNORM: ("rmsnorm", rms_norm),
        TORCH_LAYERNORM: ("layernorm", layer_norm),
    }
    report = Report([], {})
    # attn1 is self-attention. Its processor normalises query and key, so norm_q and norm_k in it have nothing to do.
    for name, module in transformer.named_modules():
        identity = class_of(module)
        if identity == ATTENTION and name.endswith(".attn1"):
            why = why_not_attention(module)
        elif identity in norms and ".attn1." not in name:
            why = why_not_norm(module)
        else:
            continue
        if why:
            report.left_alone[name] = why
        elif identity == ATTENTION:
            report.replaced.append(replace_processor(name, module, ltx, rounding))
        else:
            op, forward = norms[identity]
            module.forward = types.MethodType(forward, module)
            parts = (re.sub(r"^transformer_blocks\.\d+\.", "", name),)
            report.replaced.append(Replacement(name, parts, identity, op, module, partial(delattr, module, "forward")))
    return report


def replace_processor(name: str, attn: nn.Module, ltx: ModuleType, rounding: str) -> Replacement:
    stock = attn.processor
    attn.set_processor(NormRopeAttnProcessor(stock, ltx.qk_norm_rope, rounding))
    parts = ("attn1.norm_q", "attn1.norm_k", "rotary")
    return Replacement(name, parts, class_of(stock), "qk_norm_rope", attn, partial(attn.set_processor, stock))


def why_not_norm(norm: nn.Module) -> str:
    """Why a norm has to stay as it is; empty if it need not."""
    if "forward" in vars(norm):
        return "its forward is patched already"
    if class_of(norm) == DIFFUSERS_RMSNORM and norm.weight is not None:
        return "diffusers' RMSNorm with a weight may change the dtype"
    if class_of(norm) != DIFFUSERS_RMSNORM and len(norm.normalized_shape) != 1:
        return f"normalises {len(norm.normalized_shape)} dimensions"
    return ""


def why_not_attention(attn: nn.Module) -> str:
    """Why a self-attention has to stay as it is; empty if it need not."""
    if class_of(attn.processor) != PROCESSOR:
        return f"its processor is {class_of(attn.processor)}"
    if any(class_of(norm) != TORCH_RMSNORM or "forward" in vars(norm) for norm in (attn.norm_q, attn.norm_k)):
        return "norm_q or norm_k is not torch's RMSNorm"
    if attn.norm_q.eps != attn.norm_k.eps:
        return "norm_q and norm_k differ in eps"
    return ""


class OpCounter(TorchDispatchMode):
    """Counts the calls of the package's compiled ops as torch's dispatcher sees them, by replaced module.

    Only such a count says that a kernel ran; that a module was patched does not.
    """

    def __init__(self, ltx: ModuleType, report: Report):
        super().__init__()
        self.namespace = ltx._ops.ops.name
        self.report = report
        self.calls: Counter[str] = Counter()
        self._name = ""

    def __enter__(self) -> OpCounter:
        def entering(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any) -> None:
                self._name = name

            return hook

        self._hooks = [r.module.register_forward_pre_hook(entering(r.name)) for r in self.report.replaced]
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == self.namespace:
            self.calls[self._name] += 1
        return func(*args, **(kwargs or {}))
