"""Attention of several tokens whose mask is causal, perhaps in a window, without that mask.

transformers hands a mask [B, 1, S, T] to scaled_dot_product_attention where the tokens follow others in a KV cache
(assisted decoding, a prompt in pieces), where a static cache has unused places, and in a sliding layer. Keys and values
are then repeated for every head of the queries, and torch also computes the scores that the mask takes away. Where the
last of the S tokens sees the last of the used places, and the mask says nothing but order and window, torch's flash
attention computes the same and skips what is not seen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..engine.guards import is_capturing
from ..engine.kept import kept
from . import flash
from .call import FunctionCall

WINDOW = "attention in a window without its mask"
ORDER = "causal attention of several tokens without their mask"
# Tokens from which every layer asks for the contents of a mask that was made in inference mode: the host then waits for
# the GPU in each layer.
ASKED = 256


def attend(call: FunctionCall) -> Tensor | None:
    """The attention of several tokens with a causal mask."""
    mask = call.mask
    if mask is None or torch.compiler.is_compiling():  # a graph would hold for one answer to a question about lengths
        return None
    query, key, value = call.query, call.key, call.value
    length, places = query.shape[2], key.shape[2]
    window = call.options.get("sliding_window")
    if length == 1 or places < length:
        return None
    whole_prompt = window is not None and places == length >= window
    if not whole_prompt and (call.site.rounding != "fp32" or torch.is_grad_enabled()):
        return None
    if mask.is_inference() and length < ASKED and not whole_prompt:
        return None
    if not call.is_plain() or not flash.takes(query, key, value) or is_capturing():
        return None  # the host may not ask for a mask's contents in a capture: the graph serves other masks, too
    form = "causal mask", window, length, places
    seen = kept(call.site, form, (mask,), lambda: _seen_places(mask, window, length, places))
    if not seen:
        return None
    if window is not None and window > seen:
        window = None
    call.site.remark(ORDER if window is None else WINDOW)
    return flash.attention(query, key[:, :, :seen], value[:, :, :seen], call.scale, window=window)


def _seen_places(mask: Tensor, window: int | None, length: int, places: int) -> int:
    """The place T after which a mask hides all keys, if token i of S sees itself, place T - S + i, and those before.

    It is 0 for any other mask.

    window: How many keys a token sees, itself included; None where all.
    """
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1:] != (1, length, places):
        return 0
    if mask.stride(0) == 0:
        mask = mask[:1]
    keys = torch.arange(places, device=mask.device)
    end = (mask[0, 0, -1] * (keys + 1)).amax()
    behind = torch.arange(length, device=mask.device)[:, None] + (end - length) - keys
    expected = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    fits, seen = torch.stack(((expected == mask).all().to(end.dtype), end)).tolist()
    return int(seen) if fits and seen >= length else 0
