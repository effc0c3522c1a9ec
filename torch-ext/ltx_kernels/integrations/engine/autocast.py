"""What `torch.autocast` means for modules whose forward runs ops.

Under autocast torch's own functions compute in other dtypes than their inputs have, by lists that differ between
devices and versions of torch: CUDA's ``layer_norm`` returns float32, and from torch 2.12 on its ``rms_norm`` does too.
The ops never look at autocast. They stand in for a module where its stream has autocast's own dtype, or where the
module's description says what the stock module promotes it to. Its linear layers and its attention then compute in
autocast's dtype, and what the stock module keeps in float32 in between, an op never rounds. Weights may be in float32:
linear layers are then called as modules, for which autocast keeps its copies of the weights. Ops read tables and the
weights of norms as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._variant import constant_when_compiled


def autocast_state() -> Hashable:
    """What recordings, graphs and kept answers depend on: each device's dtype of autocast, or None where it is off."""
    return tuple(
        [torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in ("cuda", "cpu")]
    )


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype of autocast on a tensor's device; None where autocast is off."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def why_not_autocast(input: Tensor, rounding: str, promotes: bool = False) -> str:
    """Why ops cannot stand in under the current autocast; empty if they can, or if autocast is off.

    promotes: The input may be in float32.
    """
    dtype = autocast_dtype(input)
    if dtype is None:
        return ""
    if dtype != input.dtype and not (promotes and input.dtype == torch.float32):
        return f"autocast is on in {dtype}, the input has dtype {input.dtype}"
    return "" if rounding == "fp32" else f"autocast is on in {dtype}, and rounds in other places than '{rounding}'"


def why_not_result(stock: Callable[[Tensor], Tensor], input: Tensor) -> str:
    """Why an op's result, of its input's dtype, is none that autocast gives; empty if it is.

    stock: The stock function, from a tensor [8] to its result.
    """
    dtype = autocast_dtype(input)
    found = None if dtype is None else _dtype_under_autocast(stock, input.device.type, dtype)
    return "" if found in (None, input.dtype) else f"autocast returns {found} for an input of {input.dtype}"


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape)


def group_norm(x: Tensor) -> Tensor:
    return F.group_norm(x.view(1, -1), 1)


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape)


def square(x: Tensor) -> Tensor:
    return x**2


@constant_when_compiled
def _dtype_under_autocast(stock: Callable[[Tensor], Tensor], device: str, dtype: torch.dtype) -> torch.dtype:
    return _asked_once(stock, device, dtype)


@functools.cache
def _asked_once(stock: Callable[[Tensor], Tensor], device: str, dtype: torch.dtype) -> torch.dtype:
    with torch.no_grad(), torch.autocast(device, dtype):
        return stock(torch.zeros(8, dtype=dtype, device=device)).dtype


def remark_autocast(remark: Callable[[str], None], input: Tensor) -> None:
    """Has a site count a call that runs ops under autocast."""
    dtype = autocast_dtype(input)
    if dtype is not None:
        remark(f"under autocast in {dtype}")
