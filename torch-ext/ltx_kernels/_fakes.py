"""What the ops do without their compiled kernel: shapes for torch.compile, and the reference on the other device.

A variant holds the kernels of one backend. For tensors on the other device (CPU tensors in a CUDA variant, and the
reverse) its ops run the reference, and warn at the first use of each op.

An op is written once, as ``body(outs, compute, *arguments)`` with the arguments of its schema: it checks them, and
returns the results, without contents unless ``compute``. Its ``_out`` twin, which the quantising ops have not, passes
its leading arguments as ``outs``.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from . import _checks, reference
from ._checks import RotaryInput, RotaryTable
from ._ops import add_op_namespace_prefix

Outs = Optional[Sequence[Tensor]]
Results = Sequence[Tensor]


def _norm_family(outs: Outs, compute: bool, input: Tensor, **arguments: Any) -> Results:
    out, residual_out = (*outs, None)[:2] if outs else (None, None)
    _checks.check_norm(input, out=out, residual_out=residual_out, **arguments)
    if compute:
        return reference.norm_family(input, **arguments)
    return input.new_empty(input.shape), input.new_empty(input.shape)


def _norm(
    outs: Outs,
    compute: bool,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    statistic: int,
    rounding: int,
) -> Results:
    return _norm_family(
        outs,
        compute,
        input,
        weight=weight,
        bias=bias,
        eps=eps,
        weight_offset=weight_offset,
        statistic=statistic,
        rounding=rounding,
    )[:1]


def _adaln_norm(
    outs: Outs,
    compute: bool,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor | None,
    gate: Tensor | None,
    scale_table: Tensor | None,
    shift_table: Tensor | None,
    gate_table: Tensor | None,
    eps: float,
    statistic: int,
    rounding: int,
) -> Results:
    return _norm_family(
        outs,
        compute,
        input,
        weight=weight,
        bias=bias,
        scale=scale,
        scale_table=scale_table,
        shift=shift,
        shift_table=shift_table,
        out_gate=gate,
        out_gate_table=gate_table,
        eps=eps,
        statistic=statistic,
        rounding=rounding,
    )[:1]


def _residual_norm(
    outs: Outs,
    compute: bool,
    input: Tensor,
    residual: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    gate_table: Tensor | None,
    scale_table: Tensor | None,
    shift_table: Tensor | None,
    eps: float,
    weight_offset: float,
    statistic: int,
    rounding: int,
) -> Results:
    return _norm_family(
        outs,
        compute,
        input,
        residual=residual,
        gate=gate,
        gate_table=gate_table,
        weight=weight,
        bias=bias,
        scale=scale,
        scale_table=scale_table,
        shift=shift,
        shift_table=shift_table,
        eps=eps,
        weight_offset=weight_offset,
        statistic=statistic,
        rounding=rounding,
    )


def _gated_residual(
    outs: Outs,
    compute: bool,
    input: Tensor,
    residual: Tensor,
    gate: Tensor,
    gate_table: Tensor | None,
    rounding: int,
) -> Results:
    return _norm_family(
        outs,
        compute,
        input,
        residual=residual,
        gate=gate,
        gate_table=gate_table,
        statistic=None,
        rounding=rounding,
    )[:1]


def _gated_unit(outs: Outs, compute: bool, input: Tensor, **arguments: Any) -> Results:
    shape = _checks.check_glu(input, out=outs[0] if outs else None, **arguments)
    return (reference.gated_unit(input, **arguments) if compute else input.new_empty(shape),)


def _glu(
    outs: Outs,
    compute: bool,
    input: Tensor,
    up: Tensor | None,
    activation: int,
    gate_first: bool,
    rounding: int,
) -> Results:
    return _gated_unit(
        outs,
        compute,
        input,
        up=up,
        gated=True,
        gate_first=gate_first,
        activation=activation,
        rounding=rounding,
    )


def _gelu(outs: Outs, compute: bool, input: Tensor, bias: Tensor | None, activation: int, rounding: int) -> Results:
    return _gated_unit(outs, compute, input, bias=bias, gated=False, activation=activation, rounding=rounding)


def _quantised(input: Tensor, shape: Sequence[int]) -> Results:
    return (
        input.new_empty(shape, dtype=torch.float8_e4m3fn),
        input.new_empty((*shape[:-1], 1), dtype=torch.float32),
        input.new_empty(shape),
    )


def _norm_family_quant(compute: bool, input: Tensor, **arguments: Any) -> Results:
    _checks.check_norm_quant(input, **arguments)
    return reference.norm_family_quant(input, **arguments) if compute else _quantised(input, input.shape)


def _norm_quant(
    outs: Outs,
    compute: bool,
    input: Tensor,
    weight: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    scale_table: Tensor | None,
    shift_table: Tensor | None,
    static_scale: Tensor | None,
    eps: float,
    weight_offset: float,
    statistic: int,
) -> Results:
    return _norm_family_quant(
        compute,
        input,
        weight=weight,
        scale=scale,
        scale_table=scale_table,
        shift=shift,
        shift_table=shift_table,
        static_scale=static_scale,
        eps=eps,
        weight_offset=weight_offset,
        statistic=statistic,
    )[:2]


def _residual_norm_quant(
    outs: Outs,
    compute: bool,
    input: Tensor,
    residual: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    gate_table: Tensor | None,
    scale_table: Tensor | None,
    shift_table: Tensor | None,
    static_scale: Tensor | None,
    eps: float,
    weight_offset: float,
    statistic: int,
) -> Results:
    return _norm_family_quant(
        compute,
        input,
        residual=residual,
        gate=gate,
        gate_table=gate_table,
        weight=weight,
        scale=scale,
        scale_table=scale_table,
        shift=shift,
        shift_table=shift_table,
        static_scale=static_scale,
        eps=eps,
        weight_offset=weight_offset,
        statistic=statistic,
    )


def _gated_unit_quant(compute: bool, input: Tensor, **arguments: Any) -> Results:
    shape = _checks.check_glu_quant(input, **arguments)
    return reference.gated_unit_quant(input, **arguments) if compute else _quantised(input, shape)[:2]


def _glu_quant(
    outs: Outs,
    compute: bool,
    input: Tensor,
    up: Tensor | None,
    static_scale: Tensor | None,
    activation: int,
    gate_first: bool,
) -> Results:
    return _gated_unit_quant(
        compute, input, up=up, static_scale=static_scale, gated=True, gate_first=gate_first, activation=activation
    )


def _scaled_linear(
    outs: Outs,
    compute: bool,
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    use_fast_accum: bool,
) -> Results:
    _checks.check_scaled_linear(values, scales, weight, weight_scales, bias)
    _checks.check_product(values, scales, weight_scales, bias)
    if compute:
        return (reference.product(values, scales, weight, weight_scales, bias),)
    return (values.new_empty((*values.shape[:-1], weight.shape[0]), dtype=torch.bfloat16),)


def _gelu_quant(
    outs: Outs,
    compute: bool,
    input: Tensor,
    bias: Tensor | None,
    static_scale: Tensor | None,
    activation: int,
) -> Results:
    return _gated_unit_quant(compute, input, bias=bias, static_scale=static_scale, gated=False, activation=activation)


def _rotary(compute: bool, operands: list[RotaryInput], tables: list[RotaryTable], **arguments: Any) -> Results:
    if compute:
        return reference.rotary(operands, tables, **arguments)
    return [torch.empty_like(operand.tensor) for operand in operands]


def _rope(
    outs: Outs,
    compute: bool,
    query: Tensor,
    key: Tensor,
    positions: Tensor | None,
    grid: Sequence[int],
    axis_dims: Sequence[int],
    theta: Sequence[float],
    interleaved: bool,
) -> Results:
    operands = _checks.check_rope(query, key, positions, grid, axis_dims, theta, out=outs)
    tables = []
    if compute:
        tables = [reference.computed_table(operand, positions, grid, axis_dims, theta) for operand in operands]
    return _rotary(compute, operands, tables, interleaved=interleaved)


def _apply_rotary(
    outs: Outs,
    compute: bool,
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    sequence_dim: int,
    rotary_dim: int,
    interleaved: bool,
    rounding: int,
) -> Results:
    operands, tables = _checks.check_apply_rotary(
        input,
        cos,
        sin,
        sequence_dim=sequence_dim,
        rotary_dim=rotary_dim,
        rounding=rounding,
        out=outs[0] if outs else None,
    )
    return _rotary(compute, operands, tables, interleaved=interleaved, rounding=rounding)


def _apply_rotary_qk(
    outs: Outs,
    compute: bool,
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    sequence_dim: int,
    rotary_dim: int,
    interleaved: bool,
    rounding: int,
) -> Results:
    operands, tables = _checks.check_apply_rotary_qk(
        query,
        key,
        cos,
        sin,
        sequence_dim=sequence_dim,
        rotary_dim=rotary_dim,
        rounding=rounding,
        out=outs,
    )
    return _rotary(compute, operands, tables, interleaved=interleaved, rounding=rounding)


def _qk_norm_rope(
    outs: Outs,
    compute: bool,
    query: Tensor,
    key: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    key_cos: Tensor | None,
    key_sin: Tensor | None,
    eps: float,
    across_heads: bool,
    rotary_dim: int,
    interleaved: bool,
    rounding: int,
) -> Results:
    operands, tables = _checks.check_qk_norm_rope(
        query,
        key,
        query_weight,
        key_weight,
        cos,
        sin,
        key_cos,
        key_sin,
        eps=eps,
        across_heads=across_heads,
        rotary_dim=rotary_dim,
        rounding=rounding,
        out=outs,
    )
    return _rotary(
        compute,
        operands,
        tables,
        interleaved=interleaved,
        rounding=rounding,
        normalised=True,
        eps=eps,
        across_heads=across_heads,
    )


def _qk_norm_cross_attention(
    outs: Outs,
    compute: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    mask: Tensor | None,
    eps: float,
    scale: float | None,
) -> Results:
    arguments = (query, key, value, query_weight, key_weight, mask)
    out = outs[0] if outs else None
    _checks.check_qk_norm_cross_attention(*arguments, eps=eps, scale=scale, out=out)
    if compute:
        return (reference.cross_attention(*arguments, eps=eps, scale=scale),)
    return (query.new_empty(query.shape),)


def _attention(outs: Outs, compute: bool, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Results:
    _checks.check_attention(query, key, value, scale=scale)
    if compute:
        return (reference.attention(query, key, value, scale=scale),)
    return (query.new_empty(query.shape),)


# ---- Registration


def _compiled_device() -> str | None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = add_op_namespace_prefix("norm")
    return next((device for device in ("cuda", "cpu") if has_kernel(name, device.upper())), None)


# The device whose kernels this variant holds.
COMPILED_DEVICE = _compiled_device()

_warned: set[str] = set()


def _warn_once(name: str, device: str) -> None:
    if name in _warned or device == COMPILED_DEVICE:
        return
    _warned.add(name)
    holds = f"the kernels for {COMPILED_DEVICE}" if COMPILED_DEVICE else "no kernel"
    warnings.warn(
        f"ltx-kernels: {name} on a {device} tensor runs the plain torch reference, because this variant holds {holds}. "
        f'Load the {device} variant, get_kernel(..., backend="{device}"), for the compiled kernel.',
        stacklevel=5,  # the caller of the Python function
    )


def _register(name: str, results: int, body: Callable[..., Results], *, has_out: bool = True) -> None:
    functional, into_outs = add_op_namespace_prefix(name), add_op_namespace_prefix(name + "_out")

    def unpack(outs: Results) -> Any:
        return outs[0] if results == 1 else tuple(outs[:results])

    def fake(*arguments: Any) -> Any:
        return unpack(body(None, False, *arguments))

    def fake_out(*arguments: Any) -> None:
        body(arguments[:results], False, *arguments[results:])

    torch.library.register_fake(functional, fake)
    if has_out:
        torch.library.register_fake(into_outs, fake_out)

    for device in ("cuda", "cpu"):
        if torch._C._dispatch_has_kernel_for_dispatch_key(functional, device.upper()):
            continue

        def kernel(*arguments: Any, device: str = device) -> Any:
            _warn_once(name, device)
            with torch.no_grad():
                return unpack(body(None, True, *arguments))

        def kernel_out(*arguments: Any, device: str = device) -> None:
            _warn_once(name, device)
            outs = arguments[:results]
            with torch.no_grad():
                for out, result in zip(outs, body(outs, True, *arguments[results:])):
                    out.copy_(result)

        torch.library.impl(functional, device)(kernel)
        if has_out:
            torch.library.impl(into_outs, device)(kernel_out)


_register("norm", 1, _norm)
_register("adaln_norm", 1, _adaln_norm)
_register("residual_norm", 2, _residual_norm)
_register("gated_residual", 1, _gated_residual)
_register("glu", 1, _glu)
_register("gelu", 1, _gelu)
_register("rope", 2, _rope)
_register("apply_rotary", 1, _apply_rotary)
_register("apply_rotary_qk", 2, _apply_rotary_qk)
_register("qk_norm_rope", 2, _qk_norm_rope)
_register("qk_norm_cross_attention", 1, _qk_norm_cross_attention)
_register("attention", 1, _attention, has_out=False)
_register("norm_quant", 2, _norm_quant, has_out=False)
_register("residual_norm_quant", 3, _residual_norm_quant, has_out=False)
_register("glu_quant", 2, _glu_quant, has_out=False)
_register("gelu_quant", 2, _gelu_quant, has_out=False)
_register("scaled_linear", 1, _scaled_linear, has_out=False)
