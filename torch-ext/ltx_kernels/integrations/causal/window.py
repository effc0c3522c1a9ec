"""Attention of a prompt in a sliding window, without a mask of all tokens by all tokens.

A sliding layer of transformers hands a mask [B, 1, S, S] to scaled_dot_product_attention, with keys and values repeated
for every head of the queries. torch then computes the scores that the mask takes away, too. Where the mask says nothing
but the window, torch's flash attention computes the same and skips what is outside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..engine.guards import is_capturing
from ..engine.kept import kept
from . import flash
from .call import FunctionCall


def attend(call: FunctionCall) -> Tensor | None:
    """The attention of a prompt, longer than the window, whose mask is that window."""
    mask = call.mask
    if mask is None:
        return None
    query, key, value = call.query, call.key, call.value
    window = call.options.get("sliding_window")
    length = query.shape[2]
    # Under torch.compile the length is not asked for: a graph holds for one answer.
    if window is None or length == 1 or torch.compiler.is_compiling() or length < window or key.shape[2] != length:
        return None
    if not call.is_plain() or not flash.takes(query, key, value) or is_capturing():
        return None  # the host may not ask for a mask's contents in a capture: the graph serves other masks, too
    if not kept(call.site, ("window", window, length), (mask,), lambda: _is_window(mask, window, length)):
        return None
    call.site.remark("attention in a window without its mask")
    return flash.attention(query, key, value, call.scale, window=window)


def _is_window(mask: Tensor, window: int, length: int) -> bool:
    """Whether a mask lets every token see itself and the ``window - 1`` tokens before it, and nothing else."""
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1:] != (1, length, length):
        return False
    if mask.stride(0) == 0:
        mask = mask[:1]
    expected = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril_().triu_(1 - window)
    return torch.equal(mask, expected.expand_as(mask))
