"""torch's flash attention for language models, called by its own name.

scaled_dot_product_attention prefers cuDNN on Hopper GPUs. cuDNN plans a call for every number of keys that it has not
met in the process, and every token of a text has one key more than the token before it. A plan takes the host longer
than the rest of a token (h200-llm.json: first_decode_ms of the stock models, beside decode_ms). Flash attention needs
no plan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._torch_private import flash_attention
from ..engine.guards import has_tensor_cores
from ..engine.recording import others_take_functions
from .call import FunctionCall

WIDEST = 256  # columns of a head that it takes
SHORT = 1024  # tokens of a prompt from which cuDNN is left to plan: it gains the more, the longer the prompt is


def attend(call: FunctionCall) -> Tensor | None:
    """The attention of one token, or of all tokens of a short prompt, to itself and those before it.

    A static cache has places after a prompt, which no token sees.
    """
    if call.mask is not None or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    query, key, value = call.query, call.key, call.value
    length = query.shape[2]
    is_causal = length > 1 and getattr(call.module, "is_causal", True)
    fits = length == 1 or (key.shape[2] >= length if is_causal else key.shape[2] == length)
    if call.site.rounding != "fp32" or length >= SHORT or not fits:
        return None
    if not call.is_plain() or not takes(query, key, value):
        return None
    call.site.remark("attention without a mask in torch's flash attention")
    if is_causal:
        key, value = key[:, :, :length], value[:, :, :length]
    return attention(query, key, value, call.scale, is_causal=is_causal)


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch's flash attention supports these tensors [B, heads, S, D], and is not turned off.

    It is False where other code intercepts torch's functions: that code expects calls of scaled_dot_product_attention.
    """
    return _has_flash(query, key, value) and not others_take_functions()


def _has_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    width = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and width % 8 == 0
        and width <= WIDEST
        and key.shape == value.shape
        and key.shape[-1] == width
        and query.shape[1] % key.shape[1] == 0
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        and torch.backends.cuda.flash_sdp_enabled()
        and torch.backends.cuda.is_flash_attention_available()
        and has_tensor_cores(query.device)
        and torch.version.hip is None
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    *,
    is_causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """[B, S, heads, D] of [B, heads, S, D]. The last query belongs to the last key.

    scale: Of the logits; None is 1 / sqrt(D).
    window: How many keys a token attends to, itself included.
    """
    sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    return flash_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        is_causal,
        False,
        scale=scale,
        **sides,
    )
