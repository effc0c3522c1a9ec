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

from ._checks import RMS
from ._ops import ops
from ._torch_private import forward_ad, in_func_transform
from ._variant import COMPILED_DEVICE

Gradients = tuple["Tensor | None", ...]
_NONE = (None,) * 16  # of arguments without a gradient


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


# ---- Norms


class _Norm(_OpFunction):
    given = ("input",)

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Any, bias: Any, eps: float, weight_offset: float, statistic: int, rounding: int
    ) -> Tensor:
        _save(ctx, 5, input, weight)
        ctx.norm = (eps, weight_offset, statistic)
        out: Tensor = ops.norm.default(input, weight, bias, eps, weight_offset, statistic, rounding)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Gradients:
        if grad is None:
            return (None,) * 7
        input, weight, _ = ctx.saved_tensors
        return ops.norm_backward.default(grad, input, None, None, weight, *_NONE[:7], *ctx.norm), *_NONE[:6]


class _AdalnNorm(_OpFunction):
    given = ("input",)

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Any, bias: Any, scale: Tensor, shift: Any, gate: Any, scale_table: Any,
        shift_table: Any, gate_table: Any, index: Any, eps: float, statistic: int, rounding: int,
    ) -> Tensor:  # fmt: skip
        _save(ctx, 6, input, weight, scale, gate, scale_table, gate_table, index)
        ctx.norm = (eps, 0.0, statistic)
        out: Tensor = ops.adaln_norm.default(
            input, weight, bias, scale, shift, gate, scale_table, shift_table, gate_table, index, eps, statistic,
            rounding,
        )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Gradients:
        if grad is None:
            return (None,) * 13
        input, weight, scale, gate, scale_table, gate_table, index, _ = ctx.saved_tensors
        to_input: Tensor = ops.norm_backward.default(
            grad, input, None, None, weight, scale, gate, None, scale_table, gate_table, None, index, *ctx.norm
        )
        return to_input, *_NONE[:12]


class _AdalnNormPair(_OpFunction):
    given = ("input",)

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Any, bias: Any, scale: Tensor, shift: Any, scale2: Tensor, shift2: Any,
        scale_table: Any, shift_table: Any, scale2_table: Any, shift2_table: Any, index: Any, eps: float,
        statistic: int, rounding: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        _save(ctx, 7, input, weight, scale, scale2, scale_table, scale2_table, index)
        ctx.norm = (eps, 0.0, statistic)
        out, out2 = ops.adaln_norm_pair.default(
            input, weight, bias, scale, shift, scale2, shift2, scale_table, shift_table, scale2_table, shift2_table,
            index, eps, statistic, rounding,
        )  # fmt: skip
        return out, out2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad2: Tensor | None) -> Gradients:
        input, weight, scale, scale2, scale_table, scale2_table, index, _ = ctx.saved_tensors
        to_input, _ = _stream_gradients(
            grad, grad2, None, input, weight, scale, scale2, scale_table, scale2_table, None, None, index, *ctx.norm
        )
        return to_input, *_NONE[:14]


class _ResidualNorm(_OpFunction):
    given = ("input", "residual")

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, residual: Tensor, gate: Any, weight: Any, bias: Any, scale: Any, shift: Any,
        gate_table: Any, scale_table: Any, shift_table: Any, index: Any, eps: float, weight_offset: float,
        statistic: int, rounding: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, residual_out = ops.residual_norm.default(
            input, residual, gate, weight, bias, scale, shift, gate_table, scale_table, shift_table, index, eps,
            weight_offset, statistic, rounding,
        )  # fmt: skip
        _save(ctx, 8, residual_out, weight, scale, scale_table, gate, gate_table, index)
        ctx.norm = (eps, weight_offset, statistic)
        return out, residual_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_residual: Tensor | None) -> Gradients:
        hidden, weight, scale, scale_table, gate, gate_table, index, _ = ctx.saved_tensors
        to_input, to_residual = _stream_gradients(
            grad, None, grad_residual, hidden, weight, scale, None, scale_table, None,
            gate if ctx.needs_input_grad[0] else None, gate_table, index, *ctx.norm,
        )  # fmt: skip
        return to_input, to_residual, *_NONE[:13]


class _ResidualNormPair(_OpFunction):
    given = ("input", "residual")

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, residual: Tensor, gate: Any, weight: Any, bias: Any, scale: Tensor, shift: Any,
        scale2: Tensor, shift2: Any, gate_table: Any, scale_table: Any, shift_table: Any, scale2_table: Any,
        shift2_table: Any, index: Any, eps: float, statistic: int, rounding: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        out, out2, residual_out = ops.residual_norm_pair.default(
            input, residual, gate, weight, bias, scale, shift, scale2, shift2, gate_table, scale_table, shift_table,
            scale2_table, shift2_table, index, eps, statistic, rounding,
        )  # fmt: skip
        _save(ctx, 9, residual_out, weight, scale, scale2, scale_table, scale2_table, gate, gate_table, index)
        ctx.norm = (eps, 0.0, statistic)
        return out, out2, residual_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad2: Tensor | None, grad_residual: Tensor | None) -> Gradients:
        hidden, weight, scale, scale2, scale_table, scale2_table, gate, gate_table, index, _ = ctx.saved_tensors
        to_input, to_residual = _stream_gradients(
            grad, grad2, grad_residual, hidden, weight, scale, scale2, scale_table, scale2_table,
            gate if ctx.needs_input_grad[0] else None, gate_table, index, *ctx.norm,
        )  # fmt: skip
        return to_input, to_residual, *_NONE[:16]


def _stream_gradients(
    grad: Tensor | None, grad2: Tensor | None, grad_residual: Tensor | None, hidden: Tensor, weight: Tensor | None,
    scale: Tensor | None, scale2: Tensor | None, scale_table: Tensor | None, scale2_table: Tensor | None,
    gate: Tensor | None, gate_table: Tensor | None, index: Tensor | None, *norm: Any,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of input and residual. Without a gate they are one tensor, which is that of ``hidden``."""
    if grad is None:
        grad, scale, scale_table = grad2, scale2, scale2_table
        grad2 = None
    if grad2 is None:
        scale2 = scale2_table = None
    if grad is None:  # nothing reads the normalised rows
        if gate is None or grad_residual is None:
            return grad_residual, grad_residual
        return ops.gated_residual_backward.default(grad_residual, gate, gate_table, index), grad_residual
    if gate is None:
        both: Tensor = ops.norm_backward.default(
            grad, hidden, grad2, grad_residual, weight, scale, None, scale2, scale_table, None, scale2_table, index,
            *norm,
        )  # fmt: skip
        return both, both
    to_input, to_residual = ops.residual_norm_backward.default(
        grad, hidden, gate, grad2, grad_residual, weight, scale, scale2, gate_table, scale_table, scale2_table, index,
        *norm,
    )  # fmt: skip
    return to_input, to_residual


class _GatedResidual(_OpFunction):
    given = ("input", "residual")

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, residual: Tensor, gate: Tensor, gate_table: Any, index: Any, rounding: int
    ) -> Tensor:
        _save(ctx, 10, gate, gate_table, index)
        out: Tensor = ops.gated_residual.default(input, residual, gate, gate_table, index, rounding)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Gradients:
        if grad is None or not ctx.needs_input_grad[0]:
            return None, grad, *_NONE[:4]
        gate, gate_table, index, _ = ctx.saved_tensors
        return ops.gated_residual_backward.default(grad, gate, gate_table, index), grad, *_NONE[:4]


class _NormResidual(_OpFunction):
    given = ("input", "residual")

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, residual: Tensor, weight: Any, gate: Any, gate_table: Any, index: Any, eps: float,
        weight_offset: float, rounding: int,
    ) -> Tensor:  # fmt: skip
        _save(ctx, 11, input, weight, gate, gate_table, index)
        ctx.norm = (eps, weight_offset, RMS)
        out: Tensor = ops.norm_residual.default(
            input, residual, weight, gate, gate_table, index, eps, weight_offset, rounding
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Gradients:
        if grad is None or not ctx.needs_input_grad[0]:
            return None, grad, *_NONE[:7]
        input, weight, gate, gate_table, index, _ = ctx.saved_tensors
        to_input: Tensor = ops.norm_backward.default(
            grad, input, None, None, weight, None, gate, None, None, gate_table, None, index, *ctx.norm
        )
        return to_input, grad, *_NONE[:7]


class _NormResidualNorm(_OpFunction):
    given = ("input", "residual")

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, residual: Tensor, gate: Any, weight1: Any, weight2: Any, scale: Any, shift: Any,
        gate_table: Any, scale_table: Any, shift_table: Any, index: Any, eps1: float, eps2: float,
        weight_offset: float, rounding: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, residual_out = ops.norm_residual_norm.default(
            input, residual, gate, weight1, weight2, scale, shift, gate_table, scale_table, shift_table, index, eps1,
            eps2, weight_offset, rounding,
        )  # fmt: skip
        _save(ctx, 12, input, residual_out, gate, weight1, weight2, scale, gate_table, scale_table, index)
        ctx.norm = (eps1, eps2, weight_offset)
        return out, residual_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_residual: Tensor | None) -> Gradients:
        input, hidden, gate, weight1, weight2, scale, gate_table, scale_table, index, _ = ctx.saved_tensors
        eps1, eps2, offset = ctx.norm
        if grad is not None:
            to_input, to_residual = ops.norm_residual_norm_backward.default(
                grad, hidden, input, grad_residual, gate, weight1, weight2, scale, gate_table, scale_table, index,
                eps1, eps2, offset,
            )  # fmt: skip
        elif grad_residual is not None:  # nothing reads the second norm
            to_residual = grad_residual
            to_input = ops.norm_backward.default(
                grad_residual, input, None, None, weight1, None, gate, None, None, gate_table, None, index,
                eps1, offset, RMS,
            )  # fmt: skip
        else:
            to_input = to_residual = None
        return to_input, to_residual, *_NONE[:13]


# ---- Activations


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


# ---- Rotary


class _ApplyRotary(_OpFunction):
    given = ("input",)

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, cos: Tensor, sin: Tensor, sequence_dim: int, rotary_dim: int, interleaved: bool,
        rounding: int,
    ) -> Tensor:  # fmt: skip
        _save(ctx, 13, cos, sin)
        ctx.modes = (sequence_dim, rotary_dim, interleaved)
        out: Tensor = ops.apply_rotary.default(input, cos, sin, *ctx.modes, rounding)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Gradients:
        if grad is None:
            return _NONE[:7]
        cos, sin, _ = ctx.saved_tensors
        return ops.apply_rotary_backward.default(grad, cos, sin, *ctx.modes), *_NONE[:6]


class _ApplyRotaryQk(_OpFunction):
    given = ("query", "key")

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, sequence_dim: int, rotary_dim: int,
        interleaved: bool, rounding: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        _save(ctx, 14, cos, sin)
        ctx.set_materialize_grads(True)  # one launch serves both
        ctx.modes = (sequence_dim, rotary_dim, interleaved)
        query_out, key_out = ops.apply_rotary_qk.default(query, key, cos, sin, *ctx.modes, rounding)
        return query_out, key_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> Gradients:
        cos, sin, _ = ctx.saved_tensors
        both = ops.apply_rotary_qk_backward.default(grad_query, grad_key, cos, sin, *ctx.modes)
        return *both, *_NONE[:6]


class _QkNormRope(_OpFunction):
    given = ("query", "key")

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, query_weight: Any, key_weight: Any, query_bias: Any, key_bias: Any,
        cos: Tensor, sin: Tensor, key_cos: Any, key_sin: Any, eps: float, key_eps: float, weight_offset: float,
        statistic: int, across_heads: bool, cast_before_weight: bool, rotary_dim: int, interleaved: bool,
        rounding: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        _save(ctx, 15, query, key, query_weight, key_weight, cos, sin, key_cos, key_sin)
        ctx.set_materialize_grads(True)  # one launch serves both
        ctx.modes = (eps, key_eps, weight_offset, statistic, across_heads, rotary_dim, interleaved)
        query_out, key_out = ops.qk_norm_rope.default(
            query, key, query_weight, key_weight, query_bias, key_bias, cos, sin, key_cos, key_sin, eps, key_eps,
            weight_offset, statistic, across_heads, cast_before_weight, rotary_dim, interleaved, rounding,
        )  # fmt: skip
        return query_out, key_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> Gradients:
        query, key, query_weight, key_weight, cos, sin, key_cos, key_sin, _ = ctx.saved_tensors
        to_query, to_key = ops.qk_norm_rope_backward.default(
            grad_query, grad_key, query, key, query_weight, key_weight, cos, sin, key_cos, key_sin, *ctx.modes
        )  # fmt: skip
        return to_query, to_key, *(None,) * 17


FUNCTIONS: dict[str, type[_OpFunction]] = {
    "norm": _Norm,
    "adaln_norm": _AdalnNorm,
    "adaln_norm_pair": _AdalnNormPair,
    "residual_norm": _ResidualNorm,
    "residual_norm_pair": _ResidualNormPair,
    "gated_residual": _GatedResidual,
    "norm_residual": _NormResidual,
    "norm_residual_norm": _NormResidualNorm,
    "apply_rotary": _ApplyRotary,
    "apply_rotary_qk": _ApplyRotaryQk,
    "qk_norm_rope": _QkNormRope,
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
