"""Attention of a prompt without a mask, in this package's kernel.

Without padding, transformers hands no mask to scaled_dot_product_attention and asks it for causal attention. The op
`attention` computes the same, and takes as few heads of keys and values as the model has. A static cache has places
after the prompt, which no token sees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...attention import attention, runs_kernel
from ..engine.recording import others_take_functions
from .call import FunctionCall

LEAST = 256  # tokens of a prompt; flash attention computes shorter ones


def attend(call: FunctionCall) -> Tensor | None:
    """The causal attention of a prompt to itself, which may have a window of at least its length."""
    if call.mask is not None:
        return None
    query, key, value = call.query, call.key, call.value
    length, window = query.shape[2], call.options.get("sliding_window")
    # Under torch.compile, a comparison of a dynamic length limits the graph to lengths with the same answer. Except
    # with 1, the length is therefore compared only where the kernel runs. An exported graph has to serve all lengths.
    if length == 1 or not runs_kernel(query, key, value) or _is_exporting():
        return None
    if length < LEAST or key.shape[2] < length or (window is not None and window < length):
        return None
    if call.site.rounding != "fp32" or not call.is_plain() or not getattr(call.module, "is_causal", True):
        return None
    if others_take_functions():
        return None
    call.site.remark("causal attention of a prompt in this package's kernel")
    tokens_first = (heads[:, :, :length].transpose(1, 2) for heads in (query, key, value))
    return attention(*tokens_first, is_causal=True, scale=call.scale)


def _is_exporting() -> bool:
    """Whether torch.export traces. `torch.compiler.is_exporting` of torch 2.13 says so of torch.compile as well."""
    return getattr(torch.compiler, "_is_exporting_flag", False)
