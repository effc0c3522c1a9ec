"""The gradients of the public functions by kernels of their own: an autograd.Function for each op that has them.

``_call.op`` applies the Function of its op where a gradient is needed. Everything else that autograd may ask for runs
the op in plain torch: forward-mode differentiation, the transforms of torch.func, and arguments that need a gradient
which the Function does not give.

A Function is differentiable once. A second derivative raises torch's error; ``ltx_kernels.reference`` supports it.

A Function saves the tensors that its backward reads, and after them a mark. The mark is an empty tensor. Its shape
tells the op, and which of the saved tensors are not None. A checkpoint may compute a block again by other ops, which
save tensors of the same shapes. Without the mark the gradients would then be wrong. With it, torch.utils.checkpoint
finds a different shape and raises CheckpointError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling

from ._checks import RMS
from ._once import once_differentiable
from ._ops import ops
from ._row_sums import UNMODULATED, Modulation, Norm, of_gate, of_modulated_norm, of_norm, of_two_modulations
from ._torch_private import forward_ad, in_func_transform
from ._variant import COMPILED_DEVICE

Gradients = tuple["Tensor | None", ...]
_NONE = (None,) * 16  # of arguments without a gradient


class _OpFunction(Function):
    """
    given: The names of the arguments whose gradients the Function computes by kernels of their own.
    shared: The names of the arguments that rows share. Their gradients are sums over rows (_row_sums.py).
    """

    given: tuple[str, ...]
    shared: tuple[str, ...] = ()


def _save(ctx: Any, number: int, *tensors: Tensor | None) -> None:
    """Saves what the backward of the op with this number reads; the first tensor is never None."""
    ctx.set_materialize_grads(False)  # the gradient of a result that nothing reads is None, not zeros
    present = 0
    for tensor in tensors:
        present = 2 * present + (tensor is not None)
    first: Any = tensors[0]
    ctx.save_for_backward(*tensors, first.new_empty((0, present << 8 | number)))


def _both(
    first: Tensor | None, second: Tensor | None, shape: Sequence[int], second_shape: Sequence[int]
) -> tuple[Tensor, Tensor] | None:
    """The gradients of two results of these shapes, for a launch that serves both; None if nothing reads either."""
    given = second if first is None else first
    if given is None:
        return None
    return (
        given.new_zeros(shape) if first is None else first,
        given.new_zeros(second_shape) if second is None else second,
    )


# ---- Norms


class _Norm(_OpFunction):
    given = ("input",)
    shared = ("weight", "bias")

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Any, bias: Any, eps: float, weight_offset: float, statistic: int, rounding: int
    ) -> Tensor:
        _save(ctx, 5, input, weight, bias)
        ctx.norm = (eps, weight_offset, statistic)
        out: Tensor = ops.norm.default(input, weight, bias, eps, weight_offset, statistic, rounding)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Gradients:
        if grad is None:
            return (None,) * 7
        input, weight, bias, _ = ctx.saved_tensors
        needs: tuple[bool, ...] = ctx.needs_input_grad
        to_input = None
        if needs[0]:
            to_input = ops.norm_backward.default(grad, input, None, None, weight, *_NONE[:7], *ctx.norm)
        return to_input, *of_norm(grad, input, Norm(weight, bias, *ctx.norm), needs[1:3]), *_NONE[:4]


class _AdalnNorm(_OpFunction):
    given = ("input",)
    shared = ("weight", "bias", "scale", "shift", "gate", "scale_table", "shift_table", "gate_table")

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Any, bias: Any, scale: Tensor, shift: Any, gate: Any, scale_table: Any,
        shift_table: Any, gate_table: Any, index: Any, eps: float, statistic: int, rounding: int,
    ) -> Tensor:  # fmt: skip
        sums = any(ctx.needs_input_grad[1:])
        _save(
            ctx, 6, input, weight, scale, gate, scale_table, gate_table, index, bias if sums else None,
            shift if sums else None, shift_table if sums else None,
        )  # fmt: skip
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
        input, weight, scale, gate, scale_table, gate_table, index, bias, shift, shift_table, _ = ctx.saved_tensors
        needs: tuple[bool, ...] = ctx.needs_input_grad
        to_input = None
        if needs[0]:
            to_input = ops.norm_backward.default(
                grad, input, None, None, weight, scale, gate, None, scale_table, gate_table, None, index, *ctx.norm
            )
        of_shared = of_modulated_norm(
            grad, input, Norm(weight, bias, *ctx.norm), Modulation(scale, scale_table, index),
            Modulation(shift, shift_table, index), Modulation(gate, gate_table, index), needs[1:9],
        )  # fmt: skip
        return to_input, *of_shared, *_NONE[:4]


class _AdalnNormPair(_OpFunction):
    given = ("input",)
    shared = (
        *("weight", "bias", "scale", "shift", "scale2", "shift2"),
        *("scale_table", "shift_table", "scale2_table", "shift2_table"),
    )

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Any, bias: Any, scale: Tensor, shift: Any, scale2: Tensor, shift2: Any,
        scale_table: Any, shift_table: Any, scale2_table: Any, shift2_table: Any, index: Any, eps: float,
        statistic: int, rounding: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        sums = (bias, shift, shift2, shift_table, shift2_table) if any(ctx.needs_input_grad[1:]) else _NONE[:5]
        _save(ctx, 7, input, weight, scale, scale2, scale_table, scale2_table, index, *sums)
        ctx.norm = (eps, 0.0, statistic)
        out, out2 = ops.adaln_norm_pair.default(
            input, weight, bias, scale, shift, scale2, shift2, scale_table, shift_table, scale2_table, shift2_table,
            index, eps, statistic, rounding,
        )  # fmt: skip
        return out, out2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad2: Tensor | None) -> Gradients:
        input, weight, scale, scale2, scale_table, scale2_table, index, *sums, _ = ctx.saved_tensors
        needs: tuple[bool, ...] = ctx.needs_input_grad
        to_input = None
        if needs[0]:
            to_input, _ = _stream_gradients(
                grad, grad2, None, input, weight, scale, scale2, scale_table, scale2_table, None, None, index, *ctx.norm
            )
        of_norm = _two_modulations(
            grad, grad2, input, weight, scale, scale2, scale_table, scale2_table, index, sums, ctx.norm, needs[1:11]
        )
        return to_input, *of_norm, *_NONE[:4]


class _ResidualNorm(_OpFunction):
    given = ("input", "residual")
    shared = ("gate", "weight", "bias", "scale", "shift", "gate_table", "scale_table", "shift_table")

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
        needs: tuple[bool, ...] = ctx.needs_input_grad
        sums = any(needs[2:])
        _save(
            ctx, 8, residual_out, weight, scale, scale_table, gate, gate_table, index, bias if sums else None,
            shift if sums else None, shift_table if sums else None, input if needs[2] or needs[7] else None,
        )  # fmt: skip
        ctx.norm = (eps, weight_offset, statistic)
        return out, residual_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_residual: Tensor | None) -> Gradients:
        (
            hidden, weight, scale, scale_table, gate, gate_table, index, bias, shift, shift_table, input, _
        ) = ctx.saved_tensors  # fmt: skip
        needs: tuple[bool, ...] = ctx.needs_input_grad
        to_input, to_residual, to_gate, to_gate_table = _sum_gradients(
            (grad, None, grad_residual), hidden, weight, (scale, None, scale_table, None), (gate, gate_table, index),
            input, (*needs[:3], needs[7]), ctx.norm,
        )  # fmt: skip
        *of_shared, _, to_scale_table, to_shift_table, _ = of_modulated_norm(
            grad, hidden, Norm(weight, bias, *ctx.norm), Modulation(scale, scale_table, index),
            Modulation(shift, shift_table, index), UNMODULATED, (*needs[3:7], False, *needs[8:10], False),
        )  # fmt: skip
        return to_input, to_residual, to_gate, *of_shared, to_gate_table, to_scale_table, to_shift_table, *_NONE[:5]


class _ResidualNormPair(_OpFunction):
    given = ("input", "residual")
    shared = ("gate", "gate_table", *_AdalnNormPair.shared)

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
        needs: tuple[bool, ...] = ctx.needs_input_grad
        sums = (bias, shift, shift2, shift_table, shift2_table) if any(needs[2:]) else _NONE[:5]
        branch = input if needs[2] or needs[9] else None
        _save(
            ctx, 9, residual_out, weight, scale, scale2, scale_table, scale2_table, gate, gate_table, index, branch,
            *sums,
        )  # fmt: skip
        ctx.norm = (eps, 0.0, statistic)
        return out, out2, residual_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad2: Tensor | None, grad_residual: Tensor | None) -> Gradients:
        (
            hidden, weight, scale, scale2, scale_table, scale2_table, gate, gate_table, index, branch, *sums, _
        ) = ctx.saved_tensors  # fmt: skip
        needs: tuple[bool, ...] = ctx.needs_input_grad
        to_input, to_residual, to_gate, to_gate_table = _sum_gradients(
            (grad, grad2, grad_residual), hidden, weight, (scale, scale2, scale_table, scale2_table),
            (gate, gate_table, index), branch, (*needs[:3], needs[9]), ctx.norm,
        )  # fmt: skip
        of_norm = _two_modulations(
            grad, grad2, hidden, weight, scale, scale2, scale_table, scale2_table, index, sums, ctx.norm,
            (*needs[3:9], *needs[10:14]),
        )  # fmt: skip
        return to_input, to_residual, to_gate, *of_norm[:6], to_gate_table, *of_norm[6:], *_NONE[:4]


def _sum_gradients(
    grads: tuple[Tensor | None, Tensor | None, Tensor | None], hidden: Tensor, weight: Any, scales: Sequence[Any],
    gates: tuple[Any, Any, Any], branch: Tensor | None, needs: tuple[bool, ...], norm: Sequence[Any],
) -> Gradients:  # fmt: skip
    """The gradients of a gated branch, of the stream that it is added to, of the gate and of the gate's table.

    grads: Of the rows with a first and a second modulation, and of the sum.
    scales: The scales of both modulations, then their tables.
    gates: The gate, its table and the index.
    branch: What is gated; None where neither the gate nor its table needs a gradient.
    needs: Which of the four are needed.
    """
    if not any(needs):
        return _NONE[:4]
    gate, gate_table, index = gates
    to_input, to_residual = _stream_gradients(
        *grads, hidden, weight, *scales, gate if needs[0] else None, gate_table, index, *norm
    )
    to_gate: Gradients = (None, None)
    if branch is not None and to_residual is not None:
        to_gate = of_gate(to_residual, branch, Modulation(gate, gate_table, index), needs[2:])
    return to_input, to_residual, *to_gate


def _two_modulations(
    grad: Tensor | None, grad2: Tensor | None, rows: Tensor, weight: Any, scale: Any, scale2: Any, scale_table: Any,
    scale2_table: Any, index: Any, others: Sequence[Any], norm: Sequence[Any], needs: tuple[bool, ...],
) -> Gradients:  # fmt: skip
    """others: The bias, and both shifts and their tables, where a sum over rows is needed."""
    bias, shift, shift2, shift_table, shift2_table = others
    return of_two_modulations(
        (grad, grad2), rows, Norm(weight, bias, *norm),
        (Modulation(scale, scale_table, index), Modulation(scale2, scale2_table, index)),
        (Modulation(shift, shift_table, index), Modulation(shift2, shift2_table, index)), needs,
    )  # fmt: skip


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
    shared = ("gate", "gate_table")

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, residual: Tensor, gate: Tensor, gate_table: Any, index: Any, rounding: int
    ) -> Tensor:
        needs: tuple[bool, ...] = ctx.needs_input_grad
        _save(ctx, 10, gate, gate_table, index, input if needs[2] or needs[3] else None)
        out: Tensor = ops.gated_residual.default(input, residual, gate, gate_table, index, rounding)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Gradients:
        if grad is None:
            return _NONE[:6]
        gate, gate_table, index, input, _ = ctx.saved_tensors
        needs: tuple[bool, ...] = ctx.needs_input_grad
        to_input = ops.gated_residual_backward.default(grad, gate, gate_table, index) if needs[0] else None
        to_gate: Gradients = (None, None)
        if input is not None:
            to_gate = of_gate(grad, input, Modulation(gate, gate_table, index), needs[2:4])
        return to_input, grad, *to_gate, None, None


class _NormResidual(_OpFunction):
    given = ("input", "residual")
    shared = ("weight", "gate", "gate_table")

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
        if grad is None:
            return _NONE[:9]
        input, weight, gate, gate_table, index, _ = ctx.saved_tensors
        needs: tuple[bool, ...] = ctx.needs_input_grad
        to_input = None
        if needs[0]:
            to_input = ops.norm_backward.default(
                grad, input, None, None, weight, None, gate, None, None, gate_table, None, index, *ctx.norm
            )
        of_branch = _branch_norm(grad, input, Norm(weight, None, *ctx.norm), gate, gate_table, index, needs[2:5])
        return to_input, grad, *of_branch, *_NONE[:4]


def _branch_norm(
    grad: Tensor, input: Tensor, norm: Norm, gate: Any, gate_table: Any, index: Any, needs: tuple[bool, ...]
) -> Gradients:
    """The gradients of the weight of a branch's norm, its gate and the gate's table, given that of the sum."""
    to_weight, _, _, _, to_gate, _, _, to_gate_table = of_modulated_norm(
        grad, input, norm, UNMODULATED, UNMODULATED, Modulation(gate, gate_table, index),
        (needs[0], False, False, False, needs[1], False, False, needs[2]),
    )  # fmt: skip
    return to_weight, to_gate, to_gate_table


class _NormResidualNorm(_OpFunction):
    given = ("input", "residual")
    shared = ("gate", "weight1", "weight2", "scale", "shift", "gate_table", "scale_table", "shift_table")

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
        sums = (shift, shift_table) if any(ctx.needs_input_grad[2:]) else _NONE[:2]
        _save(ctx, 12, input, residual_out, gate, weight1, weight2, scale, gate_table, scale_table, index, *sums)
        ctx.norm = (eps1, eps2, weight_offset)
        return out, residual_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_residual: Tensor | None) -> Gradients:
        (
            input, hidden, gate, weight1, weight2, scale, gate_table, scale_table, index, shift, shift_table, _
        ) = ctx.saved_tensors  # fmt: skip
        eps1, eps2, offset = ctx.norm
        needs: tuple[bool, ...] = ctx.needs_input_grad
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
            return _NONE[:15]
        to_weight1, to_gate, to_gate_table = _branch_norm(
            to_residual, input, Norm(weight1, None, eps1, offset, RMS), gate, gate_table, index,
            (needs[3], needs[2], needs[7]),
        )  # fmt: skip
        to_weight2, _, to_scale, to_shift, _, to_scale_table, to_shift_table, _ = of_modulated_norm(
            grad, hidden, Norm(weight2, None, eps2, offset, RMS), Modulation(scale, scale_table, index),
            Modulation(shift, shift_table, index), UNMODULATED,
            (needs[4], False, *needs[5:7], False, *needs[8:10], False),
        )  # fmt: skip
        return (
            to_input, to_residual, to_gate, to_weight1, to_weight2, to_scale, to_shift, to_gate_table, to_scale_table,
            to_shift_table, *_NONE[:5],
        )  # fmt: skip


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
        ctx.shapes = query.shape, key.shape
        ctx.modes = (sequence_dim, rotary_dim, interleaved)
        query_out, key_out = ops.apply_rotary_qk.default(query, key, cos, sin, *ctx.modes, rounding)
        return query_out, key_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_query: Tensor | None, grad_key: Tensor | None) -> Gradients:
        gradients = _both(grad_query, grad_key, *ctx.shapes)
        if gradients is None:
            return _NONE[:8]
        cos, sin, _ = ctx.saved_tensors
        both = ops.apply_rotary_qk_backward.default(*gradients, cos, sin, *ctx.modes)
        return *both, *_NONE[:6]


class _QkNormRope(_OpFunction):
    given = ("query", "key")
    shared = ("query_weight", "key_weight", "query_bias", "key_bias")

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, query_weight: Any, key_weight: Any, query_bias: Any, key_bias: Any,
        cos: Tensor, sin: Tensor, key_cos: Any, key_sin: Any, eps: float, key_eps: float, weight_offset: float,
        statistic: int, across_heads: bool, cast_before_weight: bool, rotary_dim: int, interleaved: bool,
        rounding: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        biases = (query_bias, key_bias) if any(ctx.needs_input_grad[4:6]) else _NONE[:2]
        _save(ctx, 15, query, key, query_weight, key_weight, cos, sin, key_cos, key_sin, *biases)
        ctx.shapes = query.shape, key.shape
        ctx.modes = (eps, key_eps, weight_offset, statistic, across_heads, rotary_dim, interleaved)
        query_out, key_out = ops.qk_norm_rope.default(
            query, key, query_weight, key_weight, query_bias, key_bias, cos, sin, key_cos, key_sin, eps, key_eps,
            weight_offset, statistic, across_heads, cast_before_weight, rotary_dim, interleaved, rounding,
        )  # fmt: skip
        return query_out, key_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_query: Tensor | None, grad_key: Tensor | None) -> Gradients:
        gradients = _both(grad_query, grad_key, *ctx.shapes)
        if gradients is None:
            return (None,) * 19
        grad_query, grad_key = gradients
        query, key, query_weight, key_weight, cos, sin, key_cos, key_sin, query_bias, key_bias, _ = ctx.saved_tensors
        eps, key_eps, offset, statistic, across_heads, *rotation = ctx.modes
        needs: tuple[bool, ...] = ctx.needs_input_grad
        to_query = to_key = None
        if needs[0] or needs[1]:
            to_query, to_key = ops.qk_norm_rope_backward.default(
                grad_query, grad_key, query, key, query_weight, key_weight, cos, sin, key_cos, key_sin, *ctx.modes
            )  # fmt: skip
        if not any(needs[2:6]):
            return to_query, to_key, *(None,) * 17
        turned: Sequence[Tensor]
        if key_cos is None:
            turned = ops.apply_rotary_qk_backward.default(grad_query, grad_key, cos, sin, 1, *rotation)
        else:
            turned = (
                ops.apply_rotary_backward.default(grad_query, cos, sin, 1, *rotation),
                ops.apply_rotary_backward.default(grad_key, key_cos, key_sin, 1, *rotation),
            )
        rows: Sequence[Tensor] = (query, key)
        if across_heads:
            turned, rows = [each.flatten(2) for each in turned], [each.flatten(2) for each in rows]
        of_query = of_norm(turned[0], rows[0], Norm(query_weight, query_bias, eps, offset, statistic), needs[2:6:2])
        of_key = of_norm(turned[1], rows[1], Norm(key_weight, key_bias, key_eps, offset, statistic), needs[3:6:2])
        return to_query, to_key, of_query[0], of_key[0], of_query[1], of_key[1], *_NONE[:13]


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
    given = () if function is None else function.given
    others = [i for i, each in enumerate(tensors) if each not in given]
    shared = () if function is None else function.shared

    def find(arguments: Sequence[Any]) -> Any:
        if function is None or forward_ad._current_level >= 0 or in_func_transform():
            return None
        if arguments[0].device.type != COMPILED_DEVICE:
            return None
        for i in others:
            tensor = arguments[i]
            # torch.compile traces plain torch into kernels of its own.
            if tensor is not None and tensor.requires_grad and (tensors[i] not in shared or is_compiling()):
                return None
        return function

    return find
