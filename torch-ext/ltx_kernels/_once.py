"""Backwards that can be differentiated no further: whatever asks for it gets an error, and never zeros.

torch's own decorator of this name leaves two holes (torch 2.13). Its error has no edge to what the gradients were
computed from, so that ``torch.autograd.grad`` and ``backward(inputs=...)`` do not meet it. And it leaves the error out
where the gradient of the result is a constant, though the gradients depend on what the Function has saved.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling


class _Twice(Function):
    """Gradients as they are, with edges to the tensors that they were computed from."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            "trying to differentiate twice a function that was marked with @once_differentiable: ltx.reference and "
            "ltx.restore(model) have second derivatives"
        )


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the backward of a ``torch.autograd.Function``, below ``staticmethod``; it may return a tensor or a tuple."""

    @functools.wraps(backward)
    def wrapper(ctx: Any, *gradients: Any) -> Any:
        with torch.no_grad():
            found = backward(ctx, *gradients)
        if not torch.is_grad_enabled() or is_compiling():
            return found
        read = [x for x in (*gradients, *ctx.saved_tensors) if isinstance(x, Tensor) and x.requires_grad]
        results = found if isinstance(found, tuple) else (found,)
        tensors = [x for x in results if isinstance(x, Tensor)]
        if not read or not tensors:
            return found
        linked = iter(_Twice.apply(len(tensors), *tensors, *read))
        results = tuple(next(linked) if isinstance(x, Tensor) else x for x in results)
        return results if isinstance(found, tuple) else results[0]

    return wrapper
