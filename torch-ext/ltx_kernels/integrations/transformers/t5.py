"""Encoders of T5 and UMT5: norm, attention with a position bias, norm, gated MLP, two residual additions.

The addition after the attention and the norm after it are one launch, and so are the activation and the product of the
MLP. The attention is called as it is, and a recorded call holds its torch functions. In float16 the stock block runs,
which clamps its stream.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any, Callable

import torch
from torch import Tensor

from ..blocks.gated_mlp import GatedMLP
from ..blocks.stream import Stream
from ..causal.call import HOME
from ..causal.kv_cache import CACHE, RENAMES
from ..engine.guards import children, is_idle
from ..engine.norm_forms import NORMS
from ..engine.norm_forms import transformers_class as _class
from ..engine.recording import recorder_of_thread, refuse
from ._layer import Layer


def _mlp(model: str, prefix: str) -> GatedMLP:
    return GatedMLP(
        (_class(model, f"{prefix}DenseGatedActDense"),),
        "hidden_states",
        ("wi_0", "wi_1"),
        activation="act",
        down="wo",
        dropout="dropout",
    )


def _parts(block: Any) -> tuple[Any, ...]:
    """(attention layer, its norm, attention, MLP layer, its norm, MLP)."""
    first, second = children(block._modules["layer"], "0", "1")
    return (
        first,
        *children(first, "layer_norm", "SelfAttention"),
        second,
        *children(second, "layer_norm", "DenseReluDense"),
    )


def _attention_functions(block: Any) -> tuple[Callable[..., Any], ...]:
    """What the stock attention calls beside its modules: its class's forward, and the function that this looks up.

    A recorded call may hold functions of transformers' file of the model and of its file for torch's attention. Those
    run torch functions alone.
    """
    attention = _parts(block)[2]
    stock = type(attention)
    home = vars(sys.modules[stock.__module__])
    registry, eager = home["ALL_ATTENTION_FUNCTIONS"], home["eager_attention_forward"]
    functions = stock.forward, registry.get_interface(attention.config._attn_implementation, eager)
    homes = home, vars(sys.modules[HOME])
    if recorder_of_thread() is None:
        return functions
    written = inspect.unwrap(stock.forward), functions[1]  # transformers decorates the forward
    codes = [getattr(function, "__globals__", None) for function in written]
    if not all(any(code is names for names in homes) for code in codes):
        refuse("an attention function may run kernels that no torch function tells of")
    return functions


def t5_block_forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    encoder_decoder_position_bias: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor, None]:
    _, norm1, attention, _, norm2, ff = _parts(self)
    h = Stream(self, hidden_states)
    attended, position_bias, _ = attention(
        h.norm(norm1),
        mask=attention_mask,
        position_bias=position_bias,
        **{CACHE: past_key_values},
        **kwargs,
    )
    h.add(attended)
    h.add(ff(h.norm(norm2)))
    return h.value(), position_bias, None


def _why_not_call(block: Any, arguments: Mapping[str, Any]) -> str:
    if arguments["hidden_states"].dtype == torch.float16:
        return "the stock block clamps its stream in float16"
    first, _, _, second, *_ = _parts(block)
    if not all(is_idle(layer._modules["dropout"]) for layer in (first, second)):
        return "a dropout is active or has a hook"
    return ""


def umt5_block_forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Tensor:
    _, norm1, attention, _, norm2, ff = _parts(self)
    h = Stream(self, hidden_states)
    h.add(attention(h.norm(norm1), attention_mask=attention_mask, **{CACHE: past_key_values}, **kwargs)[0])
    h.add(ff(h.norm(norm2)))
    return h.value()


# Of models in float16, transformers keeps it in float32.
_NEVER_FP8 = (("layer.1.DenseReluDense.wo", "the stock MLP casts its input to the dtype of this weight"),)


def _block(model: str, prefix: str, forward: Any) -> Layer:
    return Layer(
        (_class(model, f"{prefix}Block"),),
        forward,
        renames=RENAMES,
        norms={"layer.0.layer_norm": NORMS, "layer.1.layer_norm": NORMS},
        # A decoder's second layer is a cross-attention.
        modules={
            "layer.0": (_class(model, f"{prefix}LayerSelfAttention"),),
            "layer.1": (_class(model, f"{prefix}LayerFF"),),
        },
        plain=tuple(
            _class(model, f"{prefix}{name}") for name in ("LayerSelfAttention", "Attention", "LayerFF", "DenseActDense")
        ),
        linears=(
            tuple(f"layer.0.SelfAttention.{name}" for name in "qkv"),
            ("layer.0.SelfAttention.o",),
            ("layer.1.DenseReluDense.wi_0", "layer.1.DenseReluDense.wi_1"),
        ),
        never_fp8=_NEVER_FP8,
        asks=_attention_functions,
        check=_why_not_call,
        ops=("rmsnorm", "rmsnorm_residual"),
    )


ENTRIES = (
    _mlp("t5", "T5"),
    _mlp("umt5", "UMT5"),
    _block("t5", "T5", t5_block_forward),
    _block("umt5", "UMT5", umt5_block_forward),
)
