"""The gradients of the public functions by kernels of their own: an autograd.Function for each op that has them.

``_call.op`` applies the Function of its op where a gradient is needed. Everything else that autograd may ask for runs
the op in plain torch: forward-mode differentiation, the transforms of torch.func, and arguments that need a gradient
which the Function does not give.

A Function is differentiable once. A second derivative raises torch's error; ``ltx_kernels.reference`` has it.

A Function saves the tensors that its backward reads, and then a mark: an empty tensor whose shape names the op and
which of the tensors there are. A checkpoint may compute a block again on another path, with tensors of the same shapes.
Without the mark that would give wrong gradients. With it, torch.utils.checkpoint finds another shape and raises
CheckpointError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ._ops import ops
from ._torch_private import forward_ad, in_func_transform
from ._variant import COMPILED_DEVICE

Gradients = tuple["Tensor | None", ...]


class _OpFunction(Function):
    """given: The names of the arguments that the Function gives gradients of."""

    given: tuple[str, ...]


def _save(ctx: Any, number: int, *tensors: Tensor | None) -> None:
    """Saves what the backward of the op with this number reads; the first tensor is never None."""
    ctx.set_materialize_grads(False)  # the gradient of a result that nothing reads is None, not zeros
    present = 0
    for tensor in tensors:
        present = 2 * present + (tensor is not None)
    first: Any = tensors[0]
    ctx.save_for_backward(*tensors, first.new_empty((0, present << 8 | number)))


class _Glu(_OpFunction):
    given = ("input", "up")

    @staticmethod
    def forward(ctx: Any, input: Tensor, up: Tensor | None, activation: int, gate_first: bool, rounding: int) -> Tensor:
        _save(ctx, 1, input, up)
        ctx.modes = (activation, gate_first)
        out: Tensor = ops.glu.default(input, up, activation, gate_first, rounding)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Gradients:
        if grad is None:
            return (None,) * 5
        input, up, _ = ctx.saved_tensors
        return *_of_halves(ops.glu_backward.default(grad, input, up, *ctx.modes), up), None, None, None


class _SwigluClamped(_OpFunction):
    given = ("input", "up")

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, up: Tensor | None, alpha: float, limit: float, interleaved: bool, rounding: int
    ) -> Tensor:
        _save(ctx, 2, input, up)
        ctx.modes = (alpha, limit, interleaved)
        out: Tensor = ops.swiglu_clamped.default(input, up, alpha, limit, interleaved, rounding)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Gradients:
        if grad is None:
            return (None,) * 6
        input, up, _ = ctx.saved_tensors
        both = ops.swiglu_clamped_backward.default(grad, input, up, *ctx.modes)
        return *_of_halves(both, up), None, None, None, None


def _of_halves(gradient: Tensor, up: Tensor | None) -> Gradients:
    """The gradients of input and up: of a packed input, or side by side."""
    return (gradient, None) if up is None else tuple(gradient.unbind())


class _Gelu(_OpFunction):
    given = ("input",)

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, activation: int, rounding: int) -> Tensor:
        _save(ctx, 3, input, bias)
        ctx.activation = activation
        out: Tensor = ops.gelu.default(input, bias, activation, rounding)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Gradients:
        if grad is None:
            return (None,) * 4
        input, bias, _ = ctx.saved_tensors
        return ops.gelu_backward.default(grad, input, bias, ctx.activation), None, None, None


class _GateHeads(_OpFunction):
    given = ("input", "logits")

    @staticmethod
    def forward(ctx: Any, input: Tensor, logits: Tensor, scale: float, rounding: int) -> Tensor:
        _save(ctx, 4, input, logits)
        ctx.scale = scale
        out: Tensor = ops.gate_heads.default(input, logits, scale, rounding)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Gradients:
        if grad is None:
            return (None,) * 4
        input, logits, _ = ctx.saved_tensors
        return *ops.gate_heads_backward.default(grad, input, logits, ctx.scale), None, None


FUNCTIONS: dict[str, type[_OpFunction]] = {
    "glu": _Glu,
    "swiglu_clamped": _SwigluClamped,
    "gelu": _Gelu,
    "gate_heads": _GateHeads,
}


def function_of(name: str, tensors: Sequence[str]) -> Callable[[Sequence[Any]], Any]:
    """``find(arguments)``: the Function for a call of an op that needs a gradient; None: plain torch has to run it.

    ``tensors`` are the names of the op's arguments that are tensors, which lead.
    """
    function = FUNCTIONS.get(name)
    others = [] if function is None else [i for i, each in enumerate(tensors) if each not in function.given]

    def find(arguments: Sequence[Any]) -> Any:
        if function is None or forward_ad._current_level >= 0 or in_func_transform():
            return None
        if arguments[0].device.type != COMPILED_DEVICE:
            return None
        for i in others:
            tensor = arguments[i]
            if tensor is not None and tensor.requires_grad:
                return None
        return function

    return find
