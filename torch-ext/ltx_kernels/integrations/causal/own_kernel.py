"""Attention of a prompt without a mask, in this package's kernel.

Without padding, transformers hands no mask to scaled_dot_product_attention and asks it for causal attention. The op
`attention` computes the same, and takes as few heads of keys and values as the model has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable

import torch
from torch import Tensor

from ...attention import attention, runs_kernel
from ..engine.recording import others_take_functions
from ..engine.sites import Site
from .flash import is_plain

LEAST = 256  # tokens of a prompt; `_flash` takes shorter ones


def attend(
    site: Site,
    module: Any,
    function: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    options: Mapping[str, Any],
) -> Tensor | None:
    """The attention [B, S, heads, D] of [B, heads, S, D], or None where the model's function has to compute it.

    function: What the model would call, without a mask.
    options: What it would give to the function beside these tensors, the dropout and the scale.
    """
    length, window = query.shape[2], options.get("sliding_window")
    # A graph with a dynamic length holds for one answer to each question about the length, so that none is asked where
    # the kernel does not run. An exported graph has to serve all lengths.
    if length == 1 or not runs_kernel(query, key, value) or _is_exporting():
        return None
    if length < LEAST or key.shape[2] != length or (window is not None and window < length):
        return None
    if site.rounding != "fp32" or not is_plain(function, options) or not getattr(module, "is_causal", True):
        return None
    if others_take_functions():
        return None
    site.remark("causal attention of a prompt in this package's kernel")
    return attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, scale=scale)


def _is_exporting() -> bool:
    """Whether torch.export traces. `torch.compiler.is_exporting` of torch 2.13 says so of torch.compile as well."""
    return getattr(torch.compiler, "_is_exporting_flag", False)
