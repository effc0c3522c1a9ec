"""Attention of a prompt in a sliding window, without a mask of all tokens by all tokens.

A sliding layer of transformers hands a mask [B, 1, S, S] to scaled_dot_product_attention, with keys and values repeated
for every head of the queries. torch then computes the scores that the mask takes away, too. Where the mask says nothing
but the window, torch's flash attention computes the same and skips what is outside.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Callable

import torch
from torch import Tensor

from ._guards import is_capturing
from ._replay import attention_is_replaced, others_take_functions
from ._rotary import kept
from ._sites import Site

HOME = "transformers.integrations.sdpa_attention"
WIDEST = 256  # columns of a head that torch's flash attention takes
# What changes the result of transformers' function beside its own arguments.
CHANGES = ("softcap", "is_causal", "position_bias", "cache", "s_aux")


def attend(
    site: Site,
    function: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    options: Mapping[str, Any],
) -> Tensor | None:
    """The attention [B, S, heads, D] of [B, heads, S, D], or None where the model's function has to compute it.

    function: What the model would call.
    options: What it would give to the function beside these tensors, the dropout and the scale.
    """
    window = options.get("sliding_window")
    length = query.shape[2]
    # Under torch.compile the length is not asked for: a graph holds for one answer.
    if window is None or length == 1 or torch.compiler.is_compiling() or length < window or key.shape[2] != length:
        return None
    if not is_plain(function, options) or not _has_flash(query, key) or not _may_read():
        return None
    if not kept(site, ("window", window, length), mask, lambda: _is_window(mask, window, length)):
        return None
    site.remark("attention in a window without its mask")
    return _flash(query, key, value, scale, window)


def is_plain(function: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Whether a function is transformers' own for torch's attention, and no option changes its result."""
    home = sys.modules.get(HOME)
    if home is None or function is not home.sdpa_attention_forward or attention_is_replaced():
        return False
    return all(options.get(name) is None for name in CHANGES)


def _has_flash(query: Tensor, key: Tensor) -> bool:
    """Whether torch's flash attention takes these tensors, and nobody has turned it off."""
    width = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and width % 8 == 0
        and width <= WIDEST
        and query.shape[1] % key.shape[1] == 0
        and torch.backends.cuda.flash_sdp_enabled()
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and torch.version.hip is None
    )


def _may_read() -> bool:
    """Whether the host may ask for a mask's contents: a captured graph serves other masks, too.

    Where somebody takes calls of torch's functions, scaled_dot_product_attention is called for them.
    """
    return not (others_take_functions() or is_capturing())


def _is_window(mask: Tensor, window: int, length: int) -> bool:
    """Whether a mask lets every token see itself and the ``window - 1`` tokens before it, and nothing else."""
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1:] != (1, length, length):
        return False
    if mask.stride(0) == 0:
        mask = mask[:1]
    expected = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril_().triu_(1 - window)
    return torch.equal(mask, expected.expand_as(mask))


def _flash(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
    length = query.shape[2]
    output: Tensor = torch.ops.aten._flash_attention_forward(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        None,
        None,
        length,
        length,
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=window - 1,
        window_size_right=0,
    )[0]
    return output
