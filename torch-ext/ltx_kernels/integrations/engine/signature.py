"""The signature of a call: what of its arguments and of the process a recorded call or a CUDA graph holds for."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._torch_private import kernel_settings, own_attention, sdp_priority_order
from .autocast import autocast_state

PLAIN = (type(None), bool, int, float, str)  # types of arguments whose value belongs to the signature


# Others whose value never changes. Few calls have one.
CONSTANT = (complex, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)


def signature(values: Iterable[Any], tensors: list[Tensor]) -> tuple[Hashable, ...]:
    """The choices of the process and what `values` are; the tensors in them are appended to `tensors`.

    Raises:
        TypeError: There is a value of a type that is not known, such as a cache, which a call may change.
        RuntimeError: There is a tensor without strides, which is a nested one.
    """
    # Kernels of attention and convolutions differ in the strides of their results, and a recorded call makes views with
    # the strides that it has seen.
    settings = [setting() for setting in kernel_settings]
    modes = torch.is_inference_mode_enabled(), autocast_state(), F.scaled_dot_product_attention
    return *modes, *settings, *sdp_priority_order(), *_described(values, tensors)


def _described(values: Iterable[Any], tensors: list[Tensor]) -> list[Hashable]:
    """`signature` of the values alone. It is written for speed, because every call of every block needs it."""
    described: list[Hashable] = []
    for value in values:
        kind = type(value)
        if kind is Tensor:
            tensors.append(value)
            described.append((value.shape, value.stride(), value.dtype, value.device, value.is_inference()))
        elif kind in PLAIN:
            described.append((kind, value))
        elif kind in (tuple, list):
            described.append((kind, *_described(value, tensors)))
        elif kind is dict:
            described.append((kind, *value, *_described(value.values(), tensors)))
        elif kind in CONSTANT or isinstance(value, enum.Enum):
            described.append((kind, value))
        else:
            raise TypeError
    return described


def attention_is_replaced() -> bool:
    """Whether a function stands in the place of torch's scaled_dot_product_attention, as with SageAttention."""
    return F.scaled_dot_product_attention is not own_attention
