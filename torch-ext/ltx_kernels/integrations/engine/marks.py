"""Marks of the way that a call went, for `torch.utils.checkpoint`, which computes a call again in the backward.

A checkpoint keeps no tensors that the first run saves. Those of the second run take their places, by their order. If
the second run goes another way, because a hook or an adapter has come or gone meanwhile, a tensor may stand in the
place of another one of its shape, and gradients are wrong without an error. A marked call also saves an empty tensor
whose shape tells the way. The checkpoint compares shapes, and raises its CheckpointError.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable
from typing import Any, Callable

import torch
from torch import Tensor
from torch.autograd import Function

from ..._torch_private import saved_tensors_hooks


class _Mark(Function):
    """An empty tensor whose graph holds a mark."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, number: int) -> Tensor:
        ctx.save_for_backward(anchor.new_empty(0, number))
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


def first_with_gradient(result: Any) -> Tensor | None:
    """The first tensor of a result, or of a tuple or list of results, that a gradient goes through."""
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return next((part for part in parts if isinstance(part, Tensor) and part.requires_grad), None)


def marked(way: Callable[[], Hashable], input: Tensor, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``compute(*args, **kwargs)``, marked where a checkpoint may compute it again.

    way: Returns what tells this way of computing the call from others.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or saved_tensors_hooks() is None:
        return compute(*args, **kwargs)
    mark = _Mark.apply(torch.empty(0, device=input.device, requires_grad=True), zlib.crc32(repr(way()).encode()))
    result = compute(*args, **kwargs)
    first = first_with_gradient(result)
    if first is not None:
        first.register_hook(lambda grad, mark=mark: None)  # the result's graph holds the mark as long as it lives
    return result
