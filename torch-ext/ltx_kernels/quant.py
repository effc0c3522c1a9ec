"""Rows quantised to fp8 for matrix products: the ops that feed linear layers, with fp8 results, and such a layer.

Throughout, a quantised row is float8_e4m3fn values and one float32 scale: the row is about ``values * scale``. The
scale is amax(row) / 448, found in the same pass, so that the largest value is 448, or ``static_scale``, one number for
all rows. Values are rounded once, from the float32 result of the op, to nearest even, and saturate at +-448.

    a row of zeros        the scale 2**-120, the least there is, and values of zero
    an infinity in a row  the scale inf; the infinity becomes NaN, all else zero
    a NaN in a row        the scale NaN, and all values NaN (with ``static_scale``: that one value)

The ops have no gradients: a call that needs one raises.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import _formulas
from ._call import count_writes, op
from ._checks import (
    APPROXIMATE,
    FLOAT32_EPS,
    LAYER,
    NONE,
    RMS,
    SILU,
    check_product_options,
    check_scaled_linear,
    check_sum,
    check_types,
    check_weight,
    checks_types,
    choice,
    no_gradient,
    requires_grad,
)
from ._ops import ops
from ._torch_private import scaled_mm
from ._variant import COMPILED_DEVICE, constant_when_compiled

_norm_quant = op("norm_quant", gradient=False)
_residual_norm_quant = op("residual_norm_quant", gradient=False)
_norm_residual_norm_quant = op("norm_residual_norm_quant", gradient=False)
_adaln_norm_pair_quant = op("adaln_norm_pair_quant", gradient=False)
_residual_norm_pair_quant = op("residual_norm_pair_quant", gradient=False)
_glu_quant = op("glu_quant", gradient=False)
_gelu_quant = op("gelu_quant", gradient=False)
_gate_heads_quant = op("gate_heads_quant", gradient=False)
_weight_only_linear = op("weight_only_linear")
_scaled_linear = ops.scaled_linear.default
_scaled_linear_out = ops.scaled_linear_out.default

Quantised = tuple[Tensor, Tensor]
QuantisedAndResidual = tuple[Tensor, Tensor, Tensor]
TwoQuantised = tuple[Tensor, Tensor, Tensor, Tensor]
TwoQuantisedAndResidual = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def quantize_rows(input: Tensor, *, static_scale: Tensor | None = None) -> Quantised:
    """Quantises rows to fp8.

    Equivalent to::

        x = input.float()
        scales = (x.abs().amax(-1, keepdim=True) / 448).clamp(min=2**-120)     # or static_scale
        values = (x * (1 / scales)).clamp(-448, 448).to(torch.float8_e4m3fn)

    Args:
        input: [..., H], float32, float16 or bfloat16, of any strides.
        static_scale: One float32 number for all rows, on the input's device; None finds each row's own.

    Returns:
        (values, scales): [..., H] float8_e4m3fn and [..., 1] float32, contiguous.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or a gradient is needed.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433).
    """
    return _norm_quant(None, input, None, None, None, None, None, None, static_scale, None, 0.0, 0.0, NONE)


def rmsnorm_quant(
    input: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    weight_offset: float = 0.0,
    static_scale: Tensor | None = None,
) -> Quantised:
    """``rmsnorm`` with a quantised result.

    Equivalent to::

        quantize_rows(rmsnorm(input.float(), weight, eps, weight_offset=weight_offset), static_scale=static_scale)

    Args:
        input: [..., H], float32, float16 or bfloat16.
        weight: [H], any of these dtypes; None: no weight.
        eps: Added to the mean square. None: the machine epsilon of float32, as in torch.nn.RMSNorm.
        weight_offset: Added to the weight; 1.0 for Gemma's convention. Without weight it is not used.
        static_scale: One float32 number for all rows, on the input's device; None finds each row's own.

    Returns:
        (values, scales): [..., H] float8_e4m3fn and [..., 1] float32, contiguous.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or a gradient is needed.

    Source: as ``rmsnorm`` and ``quantize_rows``.
    """
    eps = FLOAT32_EPS if eps is None else eps
    return _norm_quant(None, input, weight, None, None, None, None, None, static_scale, None, eps, weight_offset, RMS)


def rmsnorm_residual_quant(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    weight_offset: float = 0.0,
    static_scale: Tensor | None = None,
) -> QuantisedAndResidual:
    """``rmsnorm_residual`` with a quantised first result.

    Equivalent to::

        h = residual.float() + input.float()
        n = rmsnorm(h, weight, eps, weight_offset=weight_offset)
        *quantize_rows(n, static_scale=static_scale), h.to(input.dtype)

    Args:
        input: [..., H], float32, float16 or bfloat16.
        residual: Like input in shape, dtype and device.
        weight: [H], any of these dtypes; None: no weight.
        eps: Added to the mean square. None: the machine epsilon of float32, as in torch.nn.RMSNorm.
        weight_offset: Added to the weight; 1.0 for Gemma's convention. Without weight it is not used.
        static_scale: One float32 number for all rows, on the input's device; None finds each row's own.

    Returns:
        (values, scales, sum): [..., H] float8_e4m3fn, [..., 1] float32 and [..., H] in the input's dtype, contiguous.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or a gradient is needed.

    Source: as ``rmsnorm_residual`` and ``quantize_rows``.
    """
    eps = FLOAT32_EPS if eps is None else eps
    return _residual_norm_quant(
        None,
        input,
        residual,
        None,
        weight,
        None,
        None,
        None,
        None,
        None,
        None,
        static_scale,
        None,
        eps,
        weight_offset,
        RMS,
    )


def adaln_rmsnorm_quant(
    input: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    shift: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    scale_table: Tensor | None = None,
    shift_table: Tensor | None = None,
    index: Tensor | None = None,
    static_scale: Tensor | None = None,
) -> Quantised:
    """``adaln_rmsnorm`` with a quantised result.

    Equivalent to::

        n = adaln_rmsnorm(input.float(), weight, scale, shift, eps, scale_table=scale_table, shift_table=shift_table)
        quantize_rows(n, static_scale=static_scale)

    Args:
        input: [..., H], float32, float16 or bfloat16.
        weight: [H], any of these dtypes; None: no weight.
        scale: The modulation (not of the quantisation): [B or 1, H] for an input [B, ..., H], or any shape that
            broadcasts to the input; any of these dtypes.
        shift: Like scale, independent of its shape and dtype; None adds nothing.
        eps: Added to the mean square. None: the machine epsilon of float32, as in torch.nn.RMSNorm.
        scale_table: [H], added to scale; None adds nothing.
        shift_table: [H], added to shift; None adds nothing.
        index: Row numbers, [B, S] for an input [B, S, H] or any shape that broadcasts to it; int64, int32 or bool. Each
            token then reads the row that its number names of scale and shift, which are [rows, H] for all samples or
            [B, rows, H]. A number that names no row raises on the CPU; on a GPU it stops the kernel, as in torch. None:
            no rows to choose from.
        static_scale: One float32 number for all rows, on the input's device; None finds each row's own.

    Returns:
        (values, scales): [..., H] float8_e4m3fn and [..., 1] float32, contiguous.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or a gradient is needed.

    Source: as ``adaln_rmsnorm`` and ``quantize_rows``.
    """
    eps = FLOAT32_EPS if eps is None else eps
    return _norm_quant(
        None, input, weight, None, scale, shift, scale_table, shift_table, static_scale, index, eps, 0.0, RMS
    )


def gated_residual_quant(
    input: Tensor,
    residual: Tensor,
    gate: Tensor,
    *,
    gate_table: Tensor | None = None,
    index: Tensor | None = None,
    static_scale: Tensor | None = None,
) -> QuantisedAndResidual:
    """``gated_residual`` with its result both quantised and as the residual stream goes on.

    Equivalent to::

        h = residual.float() + input.float() * (gate_table + gate)
        *quantize_rows(h, static_scale=static_scale), h.to(input.dtype)

    Args:
        input: [..., H], float32, float16 or bfloat16.
        residual: Like input in shape, dtype and device.
        gate: [B or 1, H] for an input [B, ..., H], or any shape that broadcasts to the input; any of these dtypes.
        gate_table: [H], added to gate; None adds nothing.
        index: Row numbers, [B, S] for an input [B, S, H] or any shape that broadcasts to it; int64, int32 or bool. Each
            token then reads the row that its number names of gate, which is [rows, H] for all samples or [B, rows, H].
            A number that names no row raises on the CPU; on a GPU it stops the kernel, as in torch. None: no rows to
            choose from.
        static_scale: One float32 number for all rows, on the input's device; None finds each row's own.

    Returns:
        (values, scales, sum): [..., H] float8_e4m3fn, [..., 1] float32 and [..., H] in the input's dtype, contiguous.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or a gradient is needed.

    Source: as ``gated_residual`` and ``quantize_rows``.
    """
    return _residual_norm_quant(
        None, input, residual, gate, None, None, None, None, gate_table, None, None, static_scale, index, 0.0, 0.0, NONE
    )


def gated_residual_adaln_rmsnorm_quant(
    input: Tensor,
    residual: Tensor,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    gate_table: Tensor | None = None,
    scale_table: Tensor | None = None,
    shift_table: Tensor | None = None,
    index: Tensor | None = None,
    static_scale: Tensor | None = None,
) -> QuantisedAndResidual:
    """``gated_residual_adaln_rmsnorm`` with a quantised first result.

    Equivalent to::

        h = residual.float() + input.float() * (gate_table + gate)
        n = adaln_rmsnorm(h, weight, scale, shift, eps, scale_table=scale_table, shift_table=shift_table)
        *quantize_rows(n, static_scale=static_scale), h.to(input.dtype)

    Args:
        input: [..., H], float32, float16 or bfloat16.
        residual: Like input in shape, dtype and device.
        gate: [B or 1, H] for an input [B, ..., H], or any shape that broadcasts to the input; any of these dtypes;
            None adds the branch as it is.
        weight: [H], any of these dtypes; None: no weight.
        scale: The modulation (not of the quantisation), like gate, independent of its shape and dtype. None: no scale.
        shift: Like gate, independent of its shape and dtype. None adds nothing.
        eps: Added to the mean square. None: the machine epsilon of float32, as in torch.nn.RMSNorm.
        gate_table: [H], added to gate; None adds nothing.
        scale_table: [H], added to scale; None adds nothing.
        shift_table: [H], added to shift; None adds nothing.
        index: Row numbers, [B, S] for an input [B, S, H] or any shape that broadcasts to it; int64, int32 or bool. Each
            token then reads the row that its number names of gate, scale and shift, which are [rows, H] for all samples
            or [B, rows, H]. A number that names no row raises on the CPU; on a GPU it stops the kernel, as in torch.
            None: no rows to choose from.
        static_scale: One float32 number for all rows, on the input's device; None finds each row's own.

    Returns:
        (values, scales, sum): [..., H] float8_e4m3fn, [..., 1] float32 and [..., H] in the input's dtype, contiguous.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or a gradient is needed.

    Source: as ``gated_residual_adaln_rmsnorm`` and ``quantize_rows``.
    """
    eps = FLOAT32_EPS if eps is None else eps
    tables = gate_table, scale_table, shift_table
    tensors = gate, weight, None, scale, shift
    return _residual_norm_quant(None, input, residual, *tensors, *tables, static_scale, index, eps, 0.0, RMS)


def layernorm_quant(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    static_scale: Tensor | None = None,
) -> Quantised:
    """``layernorm`` with a quantised result.

    Equivalent to::

        quantize_rows(layernorm(input.float(), weight, bias, eps), static_scale=static_scale)

    Args:
        input: [..., H], float32, float16 or bfloat16.
        weight: [H], any of these dtypes; None: no weight.
        bias: [H], any of these dtypes; None adds nothing.
        eps: Added to the variance.
        static_scale: One float32 number for all rows, on the input's device; None finds each row's own.

    Returns:
        (values, scales): [..., H] float8_e4m3fn and [..., 1] float32, contiguous.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or a gradient is needed.

    Source: as ``layernorm`` and ``quantize_rows``.
    """
    return _norm_quant(None, input, weight, bias, None, None, None, None, static_scale, None, eps, 0.0, LAYER)


def adaln_layernorm_quant(
    input: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    shift: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    scale_table: Tensor | None = None,
    shift_table: Tensor | None = None,
    index: Tensor | None = None,
    static_scale: Tensor | None = None,
) -> Quantised:
    """``adaln_layernorm`` with a quantised result.

    Equivalent to::

        n = adaln_layernorm(
            input.float(), weight, scale, shift, bias, eps, scale_table=scale_table, shift_table=shift_table
        )
        quantize_rows(n, static_scale=static_scale)

    Args:
        input: [..., H], float32, float16 or bfloat16.
        weight: [H], any of these dtypes; None: no weight.
        scale: The modulation (not of the quantisation): [B or 1, H] for an input [B, ..., H], or any shape that
            broadcasts to the input; any of these dtypes.
        shift: Like scale, independent of its shape and dtype; None adds nothing.
        bias: [H], any of these dtypes, added before the modulation; None adds nothing.
        eps: Added to the variance.
        scale_table: [H], added to scale; None adds nothing.
        shift_table: [H], added to shift; None adds nothing.
        index: Row numbers, [B, S] for an input [B, S, H] or any shape that broadcasts to it; int64, int32 or bool. Each
            token then reads the row that its number names of scale and shift, which are [rows, H] for all samples or
            [B, rows, H]. A number that names no row raises on the CPU; on a GPU it stops the kernel, as in torch. None:
            no rows to choose from.
        static_scale: One float32 number for all rows, on the input's device; None finds each row's own.

    Returns:
        (values, scales): [..., H] float8_e4m3fn and [..., 1] float32, contiguous.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or a gradient is needed.

    Source: as ``adaln_layernorm`` and ``quantize_rows``.
    """
    return _norm_quant(
        None, input, weight, bias, scale, shift, scale_table, shift_table, static_scale, index, eps, 0.0, LAYER
    )


def gated_residual_adaln_layernorm_quant(
    input: Tensor,
    residual: Tensor,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    gate_table: Tensor | None = None,
    scale_table: Tensor | None = None,
    shift_table: Tensor | None = None,
    index: Tensor | None = None,
    static_scale: Tensor | None = None,
) -> QuantisedAndResidual:
    """``gated_residual_adaln_layernorm`` with a quantised first result.

    Equivalent to::

        h = residual.float() + input.float() * (gate_table + gate)
        n = adaln_layernorm(h, weight, scale, shift, bias, eps, scale_table=scale_table, shift_table=shift_table)
        *quantize_rows(n, static_scale=static_scale), h.to(input.dtype)

    Args:
        input: [..., H], the branch; float32, float16 or bfloat16.
        residual: Like input in shape, dtype and device.
        gate: [B or 1, H] for an input [B, ..., H], or any shape that broadcasts to the input; any of these dtypes;
            None adds the branch as it is.
        weight: [H], any of these dtypes; None: no weight.
        scale: The modulation (not of the quantisation), like gate; None: no scale.
        shift: Like gate; None adds nothing.
        bias: [H], any of these dtypes, added before the modulation; None adds nothing.
        eps: Added to the variance.
        gate_table: [H], added to gate; None adds nothing.
        scale_table: [H], added to scale; None adds nothing.
        shift_table: [H], added to shift; None adds nothing.
        index: Row numbers, [B, S] for an input [B, S, H] or any shape that broadcasts to it; int64, int32 or bool. Each
            token then reads the row that its number names of gate, scale and shift, which are [rows, H] for all samples
            or [B, rows, H]. A number that names no row raises on the CPU; on a GPU it stops the kernel, as in torch.
            None: no rows to choose from.
        static_scale: One float32 number for all rows, on the input's device; None finds each row's own.

    Returns:
        (values, scales, sum): [..., H] float8_e4m3fn, [..., 1] float32 and [..., H] in the input's dtype, contiguous.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or a gradient is needed.

    Source: as ``gated_residual_adaln_layernorm`` and ``quantize_rows``.
    """
    tables = gate_table, scale_table, shift_table
    tensors = gate, weight, bias, scale, shift
    return _residual_norm_quant(None, input, residual, *tensors, *tables, static_scale, index, eps, 0.0, LAYER)


def norm_gated_residual_norm_quant(
    input: Tensor,
    residual: Tensor,
    gate: Tensor | None = None,
    weight1: Tensor | None = None,
    eps1: float | None = 1e-6,
    weight2: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    eps2: float | None = 1e-6,
    *,
    weight_offset: float = 0.0,
    gate_table: Tensor | None = None,
    scale_table: Tensor | None = None,
    shift_table: Tensor | None = None,
    index: Tensor | None = None,
    static_scale: Tensor | None = None,
) -> QuantisedAndResidual:
    """``norm_gated_residual_norm`` with a quantised first result.

    Equivalent to::

        b = rmsnorm(input.float(), weight1, eps1, weight_offset=weight_offset)
        h = residual.float() + b * (gate_table + gate)
        n = rmsnorm(h, weight2, eps2, weight_offset=weight_offset)
        n = n * (1 + scale_table + scale) + shift_table + shift
        *quantize_rows(n, static_scale=static_scale), h.to(input.dtype)

    Args:
        input: [..., H], the branch; float32, float16 or bfloat16.
        residual: Like input in shape, dtype and device.
        gate: [B or 1, H] for an input [B, ..., H], or any shape that broadcasts to the input; any of these dtypes;
            None adds the normalised branch as it is.
        weight1: [H], of the branch's norm, any of these dtypes; None: no weight.
        eps1: Added to the branch's mean square. None: the machine epsilon of float32, as in torch.nn.RMSNorm.
        weight2: [H], of the sum's norm, any of these dtypes; None: no weight.
        scale: The modulation (not of the quantisation), like gate; None: no scale.
        shift: Like gate; None adds nothing.
        eps2: Added to the sum's mean square; None as in eps1.
        weight_offset: Added to both weights; 1.0 for Gemma's convention. A norm without weight does not use it.
        gate_table: [H], added to gate; None adds nothing.
        scale_table: [H], added to scale; None adds nothing.
        shift_table: [H], added to shift; None adds nothing.
        index: Row numbers, [B, S] for an input [B, S, H] or any shape that broadcasts to it; int64, int32 or bool. Each
            token then reads the row that its number names of gate, scale and shift, which are [rows, H] for all samples
            or [B, rows, H]. A number that names no row raises on the CPU; on a GPU it stops the kernel, as in torch.
            None: no rows to choose from.
        static_scale: One float32 number for all rows, on the input's device; None finds each row's own.

    Returns:
        (values, scales, sum): [..., H] float8_e4m3fn, [..., 1] float32 and [..., H] in the input's dtype, contiguous.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or a gradient is needed.

    Source: as ``norm_gated_residual_norm`` and ``quantize_rows``.
    """
    eps1 = FLOAT32_EPS if eps1 is None else eps1
    eps2 = FLOAT32_EPS if eps2 is None else eps2
    tables = gate_table, scale_table, shift_table
    tensors = gate, weight1, weight2, scale, shift
    return _norm_residual_norm_quant(
        None, input, residual, *tensors, *tables, static_scale, index, eps1, eps2, weight_offset
    )


def adaln_rmsnorm_pair_quant(
    input: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    shift: Tensor | None,
    scale2: Tensor,
    shift2: Tensor | None,
    eps: float | None = 1e-6,
    *,
    scale_table: Tensor | None = None,
    shift_table: Tensor | None = None,
    scale2_table: Tensor | None = None,
    shift2_table: Tensor | None = None,
    index: Tensor | None = None,
    static_scale: Tensor | None = None,
) -> TwoQuantised:
    """``adaln_rmsnorm_pair`` with both modulated results quantised.

    Equivalent to::

        tables = {"scale_table": scale_table, "shift_table": shift_table, "scale2_table": ..., "shift2_table": ...}
        first, second = adaln_rmsnorm_pair(input.float(), weight, scale, shift, scale2, shift2, eps, **tables)
        first, second = (quantize_rows(n, static_scale=static_scale) for n in (first, second))
        *first, *second

    Args:
        input: [..., H], float32, float16 or bfloat16.
        weight: [H], any of these dtypes; None: no weight.
        scale: [B or 1, H] for an input [B, ..., H], or any shape that broadcasts to the input; any of these dtypes.
        shift: Like scale, independent of its shape and dtype; None adds nothing.
        scale2: Of the second modulation, like scale.
        shift2: Of the second modulation, like shift.
        eps: Added to the mean square. None: the machine epsilon of float32, as in torch.nn.RMSNorm.
        scale_table: [H], added to scale; None adds nothing.
        shift_table: [H], added to shift; None adds nothing.
        scale2_table: [H], added to scale2; None adds nothing.
        shift2_table: [H], added to shift2; None adds nothing.
        index: Row numbers, [B, S] for an input [B, S, H] or any shape that broadcasts to it; int64, int32 or bool. Each
            token then reads the row that its number names of scale, shift, scale2 and shift2, which are [rows, H] for
            all samples or [B, rows, H]. A number that names no row raises on the CPU; on a GPU it stops the kernel, as
            in torch. None: no rows to choose from.
        static_scale: One float32 number for all rows, on the input's device; None finds each row's own.

    Returns:
        (values, scales, second values, second scales): [..., H] float8_e4m3fn and [..., 1] float32,
        contiguous.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or a gradient is needed.

    Source: as ``adaln_rmsnorm_pair`` and ``quantize_rows``.
    """
    eps = FLOAT32_EPS if eps is None else eps
    tables = scale_table, shift_table, scale2_table, shift2_table
    tensors = weight, None, scale, shift, scale2, shift2
    return _adaln_norm_pair_quant(None, input, *tensors, *tables, static_scale, index, eps, RMS)


def adaln_layernorm_pair_quant(
    input: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    shift: Tensor | None,
    scale2: Tensor,
    shift2: Tensor | None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    scale_table: Tensor | None = None,
    shift_table: Tensor | None = None,
    scale2_table: Tensor | None = None,
    shift2_table: Tensor | None = None,
    index: Tensor | None = None,
    static_scale: Tensor | None = None,
) -> TwoQuantised:
    """``adaln_layernorm_pair`` with both modulated results quantised.

    Equivalent to::

        tables = {"scale_table": scale_table, "shift_table": shift_table, "scale2_table": ..., "shift2_table": ...}
        first, second = adaln_layernorm_pair(input.float(), weight, scale, shift, scale2, shift2, bias, eps, **tables)
        first, second = (quantize_rows(n, static_scale=static_scale) for n in (first, second))
        *first, *second

    Args:
        input: [..., H], float32, float16 or bfloat16.
        weight: [H], any of these dtypes; None: no weight.
        scale: [B or 1, H] for an input [B, ..., H], or any shape that broadcasts to the input; any of these dtypes.
        shift: Like scale, independent of its shape and dtype; None adds nothing.
        scale2: Of the second modulation, like scale.
        shift2: Of the second modulation, like shift.
        bias: [H], any of these dtypes, added before the modulations; None adds nothing.
        eps: Added to the variance.
        scale_table: [H], added to scale; None adds nothing.
        shift_table: [H], added to shift; None adds nothing.
        scale2_table: [H], added to scale2; None adds nothing.
        shift2_table: [H], added to shift2; None adds nothing.
        index: Row numbers, [B, S] for an input [B, S, H] or any shape that broadcasts to it; int64, int32 or bool. Each
            token then reads the row that its number names of scale, shift, scale2 and shift2, which are [rows, H] for
            all samples or [B, rows, H]. A number that names no row raises on the CPU; on a GPU it stops the kernel, as
            in torch. None: no rows to choose from.
        static_scale: One float32 number for all rows, on the input's device; None finds each row's own.

    Returns:
        (values, scales, second values, second scales): [..., H] float8_e4m3fn and [..., 1] float32,
        contiguous.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or a gradient is needed.

    Source: as ``adaln_layernorm_pair`` and ``quantize_rows``.
    """
    tables = scale_table, shift_table, scale2_table, shift2_table
    tensors = weight, bias, scale, shift, scale2, shift2
    return _adaln_norm_pair_quant(None, input, *tensors, *tables, static_scale, index, eps, LAYER)


def gated_residual_adaln_rmsnorm_pair_quant(
    input: Tensor,
    residual: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    scale: Tensor,
    shift: Tensor | None,
    scale2: Tensor,
    shift2: Tensor | None,
    eps: float | None = 1e-6,
    *,
    gate_table: Tensor | None = None,
    scale_table: Tensor | None = None,
    shift_table: Tensor | None = None,
    scale2_table: Tensor | None = None,
    shift2_table: Tensor | None = None,
    index: Tensor | None = None,
    static_scale: Tensor | None = None,
) -> TwoQuantisedAndResidual:
    """``gated_residual_adaln_rmsnorm_pair`` with both modulated results quantised.

    Equivalent to::

        h = residual.float() + input.float() * (gate_table + gate)
        tables = {"scale_table": scale_table, "shift_table": shift_table, "scale2_table": ..., "shift2_table": ...}
        first, second = adaln_rmsnorm_pair(h, weight, scale, shift, scale2, shift2, eps, **tables)
        first, second = (quantize_rows(n, static_scale=static_scale) for n in (first, second))
        *first, *second, h.to(input.dtype)

    Args:
        input: [..., H], the branch; float32, float16 or bfloat16.
        residual: Like input in shape, dtype and device.
        gate: [B or 1, H] for an input [B, ..., H], or any shape that broadcasts to the input; any of these dtypes;
            None adds the branch as it is.
        weight: [H], any of these dtypes; None: no weight.
        scale: Of the first modulation, like gate.
        shift: Like scale, independent of its shape and dtype; None adds nothing.
        scale2: Of the second modulation, like scale.
        shift2: Of the second modulation, like shift.
        eps: Added to the mean square. None: the machine epsilon of float32, as in torch.nn.RMSNorm.
        gate_table: [H], added to gate; None adds nothing.
        scale_table: [H], added to scale; None adds nothing.
        shift_table: [H], added to shift; None adds nothing.
        scale2_table: [H], added to scale2; None adds nothing.
        shift2_table: [H], added to shift2; None adds nothing.
        index: Row numbers, [B, S] for an input [B, S, H] or any shape that broadcasts to it; int64, int32 or bool. Each
            token then reads the row that its number names of gate, scale, shift, scale2 and shift2, which are [rows, H]
            for all samples or [B, rows, H]. A number that names no row raises on the CPU; on a GPU it stops the kernel,
            as in torch. None: no rows to choose from.
        static_scale: One float32 number for all rows, on the input's device; None finds each row's own.

    Returns:
        (values, scales, second values, second scales, sum): [..., H] float8_e4m3fn and [..., 1] float32, the sum in the
        input's dtype; all contiguous.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or a gradient is needed.

    Source: as ``gated_residual_adaln_rmsnorm_pair`` and ``quantize_rows``.
    """
    eps = FLOAT32_EPS if eps is None else eps
    tables = gate_table, scale_table, shift_table, scale2_table, shift2_table
    tensors = gate, weight, None, scale, shift, scale2, shift2
    return _residual_norm_pair_quant(None, input, residual, *tensors, *tables, static_scale, index, eps, RMS)


def gated_residual_adaln_layernorm_pair_quant(
    input: Tensor,
    residual: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    scale: Tensor,
    shift: Tensor | None,
    scale2: Tensor,
    shift2: Tensor | None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    gate_table: Tensor | None = None,
    scale_table: Tensor | None = None,
    shift_table: Tensor | None = None,
    scale2_table: Tensor | None = None,
    shift2_table: Tensor | None = None,
    index: Tensor | None = None,
    static_scale: Tensor | None = None,
) -> TwoQuantisedAndResidual:
    """``gated_residual_adaln_layernorm_pair`` with both modulated results quantised.

    Equivalent to::

        h = residual.float() + input.float() * (gate_table + gate)
        tables = {"scale_table": scale_table, "shift_table": shift_table, "scale2_table": ..., "shift2_table": ...}
        first, second = adaln_layernorm_pair(h, weight, scale, shift, scale2, shift2, bias, eps, **tables)
        first, second = (quantize_rows(n, static_scale=static_scale) for n in (first, second))
        *first, *second, h.to(input.dtype)

    Args:
        input: [..., H], the branch; float32, float16 or bfloat16.
        residual: Like input in shape, dtype and device.
        gate: [B or 1, H] for an input [B, ..., H], or any shape that broadcasts to the input; any of these dtypes;
            None adds the branch as it is.
        weight: [H], any of these dtypes; None: no weight.
        scale: Of the first modulation, like gate.
        shift: Like scale, independent of its shape and dtype; None adds nothing.
        scale2: Of the second modulation, like scale.
        shift2: Of the second modulation, like shift.
        bias: [H], any of these dtypes, added before the modulations; None adds nothing.
        eps: Added to the variance.
        gate_table: [H], added to gate; None adds nothing.
        scale_table: [H], added to scale; None adds nothing.
        shift_table: [H], added to shift; None adds nothing.
        scale2_table: [H], added to scale2; None adds nothing.
        shift2_table: [H], added to shift2; None adds nothing.
        index: Row numbers, [B, S] for an input [B, S, H] or any shape that broadcasts to it; int64, int32 or bool. Each
            token then reads the row that its number names of gate, scale, shift, scale2 and shift2, which are [rows, H]
            for all samples or [B, rows, H]. A number that names no row raises on the CPU; on a GPU it stops the kernel,
            as in torch. None: no rows to choose from.
        static_scale: One float32 number for all rows, on the input's device; None finds each row's own.

    Returns:
        (values, scales, second values, second scales, sum): [..., H] float8_e4m3fn and [..., 1] float32, the sum in the
        input's dtype; all contiguous.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or a gradient is needed.

    Source: as ``gated_residual_adaln_layernorm_pair`` and ``quantize_rows``.
    """
    tables = gate_table, scale_table, shift_table, scale2_table, shift2_table
    tensors = gate, weight, bias, scale, shift, scale2, shift2
    return _residual_norm_pair_quant(None, input, residual, *tensors, *tables, static_scale, index, eps, LAYER)


def geglu_quant(
    input: Tensor,
    up: Tensor | None = None,
    *,
    approximate: str = "tanh",
    gate_first: bool = True,
    prefix: Tensor | None = None,
    static_scale: Tensor | None = None,
) -> Quantised:
    """``geglu`` with a quantised result.

    On a GPU the tanh form of 16-bit rows takes the hardware's tanh, whose result is within |x| * 2**-12 before ``up``.

    Equivalent to::

        y = geglu(input.float(), up.float(), approximate=approximate, gate_first=gate_first)
        quantize_rows(torch.cat((prefix.float(), y), -1), static_scale=static_scale)

    Args:
        input: [..., 2N], gate and up side by side; with ``up``: the gate, [..., N]. float32, float16 or bfloat16.
        up: None, or the linear part, like input in shape, dtype and device.
        approximate: "tanh" or "none" (erf, diffusers' GEGLU).
        gate_first: The order in a packed input; diffusers packs (up, gate): False.
        prefix: [..., P], of the input's dtype, device and leading sizes: columns that stand before the result's and are
            quantised with them, as one row. None puts nothing there.
        static_scale: One float32 number for all rows, on the input's device; None finds each row's own.

    Returns:
        (values, scales): [..., P + N] float8_e4m3fn and [..., 1] float32, contiguous.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or a gradient is needed.
        ValueError: An unknown ``approximate``.

    Source: as ``geglu`` and ``quantize_rows``.
    """
    activation = choice("approximate", APPROXIMATE, approximate)
    return _glu_quant(None, input, up, prefix, static_scale, activation, gate_first)


def swiglu_quant(
    input: Tensor,
    up: Tensor | None = None,
    *,
    gate_first: bool = True,
    prefix: Tensor | None = None,
    static_scale: Tensor | None = None,
) -> Quantised:
    """``swiglu`` with a quantised result.

    Equivalent to::

        y = swiglu(input.float(), up.float(), gate_first=gate_first)
        quantize_rows(torch.cat((prefix.float(), y), -1), static_scale=static_scale)

    Args:
        input: [..., 2N], gate and up side by side; with ``up``: the gate, [..., N]. float32, float16 or bfloat16.
        up: None, or the linear part, like input in shape, dtype and device.
        gate_first: The order in a packed input; diffusers packs (up, gate): False.
        prefix: [..., P], of the input's dtype, device and leading sizes: columns that stand before the result's and are
            quantised with them, as one row. None puts nothing there.
        static_scale: One float32 number for all rows, on the input's device; None finds each row's own.

    Returns:
        (values, scales): [..., P + N] float8_e4m3fn and [..., 1] float32, contiguous.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or a gradient is needed.

    Source: as ``swiglu`` and ``quantize_rows``.
    """
    return _glu_quant(None, input, up, prefix, static_scale, SILU, gate_first)


def gelu_quant(
    input: Tensor,
    *,
    bias: Tensor | None = None,
    approximate: str = "none",
    prefix: Tensor | None = None,
    static_scale: Tensor | None = None,
) -> Quantised:
    """``gelu`` with a quantised result.

    On a GPU the tanh form of 16-bit rows takes the hardware's tanh, whose result is within |x| * 2**-12.

    Equivalent to::

        y = gelu(input.float(), bias=bias, approximate=approximate)
        quantize_rows(torch.cat((prefix.float(), y), -1), static_scale=static_scale)

    Args:
        input: [..., N], float32, float16 or bfloat16.
        bias: [N], any of these dtypes; None adds nothing.
        approximate: "none" (erf) or "tanh".
        prefix: [..., P], of the input's dtype, device and leading sizes: columns that stand before the result's and are
            quantised with them, as one row. None puts nothing there.
        static_scale: One float32 number for all rows, on the input's device; None finds each row's own.

    Returns:
        (values, scales): [..., P + N] float8_e4m3fn and [..., 1] float32, contiguous.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or a gradient is needed.
        ValueError: An unknown ``approximate``.

    Source: as ``gelu`` and ``quantize_rows``.
    """
    activation = choice("approximate", APPROXIMATE, approximate)
    return _gelu_quant(None, input, bias, prefix, static_scale, activation)


def gate_heads_quant(
    input: Tensor, logits: Tensor, scale: float = 1.0, *, static_scale: Tensor | None = None
) -> Quantised:
    """``gate_heads`` with a quantised result: the heads of a token are one row.

    Equivalent to::

        y = gate_heads(input.float(), logits.float(), scale)
        quantize_rows(y.flatten(-2), static_scale=static_scale)

    Args:
        input: [..., heads, D], float32, float16 or bfloat16. Heads that do not lie side by side are copied first.
        logits: [..., heads], a gate for each head, or [..., heads * D], a gate for each column; input's leading sizes,
            dtype and device; any strides.
        scale: What the gates are multiplied by.
        static_scale: One float32 number for all rows, on the input's device; None finds each row's own.

    Returns:
        (values, scales): [..., heads * D] float8_e4m3fn and [..., 1] float32, contiguous.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or a gradient is needed.

    Source: as ``gate_heads`` and ``quantize_rows``.
    """
    return _gate_heads_quant(None, input, logits, static_scale, scale)


# ---- Linear layers


@checks_types
def quantize_weight(weight: Tensor) -> Quantised:
    """Quantises the weight of a linear layer once, with one scale per output channel.

    Equivalent to::

        values, scales = quantize_rows(weight)
        values, scales.squeeze(-1)

    Args:
        weight: [out, in], float32, float16 or bfloat16. A weight that is stored in fp8 without scales (diffusers'
            layerwise casting) is taken for what it is: float8_e4m3fn stays, with scales of one; float8_e5m2 is
            quantised as float32.

    Returns:
        (values, scales): [out, in] float8_e4m3fn and [out] float32, contiguous, not connected to the weight's gradient.

    Raises:
        RuntimeError: The shape or the dtype does not fit.

    Source: as ``quantize_rows``.
    """
    check_weight(weight)
    weight = weight.detach()
    if weight.dtype == torch.float8_e4m3fn:
        return weight.contiguous(), torch.ones(weight.shape[0], device=weight.device)
    if weight.dtype == torch.float8_e5m2:
        weight = weight.float()
    values, scales = quantize_rows(weight)
    return values, scales.squeeze(-1)


def fp8_obstacle(device: torch.device) -> str | None:
    """Why ``scaled_linear`` cannot run on a device; None: it can."""
    if device.type == "cpu" or device.type == "meta":
        return None
    if device.type != "cuda":
        return f"a device of type {device.type}"
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) >= (8, 9):
        return None
    return f"{properties.name} ({properties.major}.{properties.minor})"


_known_obstacle = functools.cache(fp8_obstacle)


@functools.cache
def _calls_cublaslt(device: torch.device) -> bool:
    if COMPILED_DEVICE != "cuda" or device.type != "cuda" or torch.version.cuda is None:
        return False
    major, minor, *_ = torch.version.cuda.split(".")
    return (int(major), int(minor)) >= (12, 9) and torch.cuda.get_device_properties(device).major == 9


@constant_when_compiled
def has_own_product(device: torch.device) -> bool:
    """Whether the package calls cuBLASLt itself, as torch._scaled_mm does there: on Hopper, from CUDA 12.9 on."""
    return _calls_cublaslt(device)


def scaled_linear(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None = None,
    *,
    addend: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """A linear layer of quantised rows and a quantised weight, on the fp8 tensor cores.

    Equivalent to::

        x = values.float() * scales
        w = weight.float() * weight_scales[:, None]
        (torch.nn.functional.linear(x, w, bias.float()) + addend.float()).to(out_dtype)

    A layer whose input is several tensors side by side, each with its own scales, takes one call for each tensor. The
    result of a call is the ``addend`` of the next.

    On a GPU this calls torch._scaled_mm. On Hopper, with CUDA 12.9 or newer and for bfloat16, it makes the same call of
    cuBLASLt itself, without the workspace that torch clears before each product. torch._scaled_mm rounds the product
    before it adds the addend, and so does cuBLASLt where ``out`` is the addend itself. On a CPU it is computed as
    written, for tests.

    Args:
        values: [..., in], float8_e4m3fn.
        scales: [..., 1], float32, one per row: as the ops of this module return them.
        weight: [out, in], float8_e4m3fn, contiguous; in and out are multiples of 16.
        weight_scales: [out], float32, one per output channel: as ``quantize_weight`` returns them.
        bias: [out], any float dtype, taken in ``out_dtype``; None adds nothing.
        addend: [..., out], in ``out_dtype``; None adds nothing.
        out_dtype: bfloat16, or what torch._scaled_mm offers beside it on the GPU at hand.
        use_fast_accum: On Hopper, whether partial sums stay in the tensor cores' own precision, which is faster.
        out: Where to write, [..., out], in ``out_dtype``; any strides; may be the addend itself.

    Returns:
        [..., out], contiguous, in ``out_dtype``; ``out`` where given.

    Raises:
        RuntimeError: A shape or dtype does not fit, or the GPU is older than compute capability 8.9 (Ada, Hopper,
            Blackwell and newer have fp8 tensor cores).
        TypeError: ``out_dtype`` is no dtype, or ``use_fast_accum`` neither True nor False.

    Source: torch._scaled_mm with scales per row; matmul with 8-bit floating-point types of the cuBLASLt documentation.
    """
    try:
        check_product_options(out_dtype, use_fast_accum)
        if out_dtype != torch.bfloat16 or not has_own_product(values.device):  # or the op checks
            check_scaled_linear(values, scales, weight, weight_scales, bias)
            check_sum(values, weight, out_dtype, addend=addend, out=out)
            # Under torch.compile the device is looked at while tracing.
            obstacle = (fp8_obstacle if torch.compiler.is_compiling() else _known_obstacle)(values.device)
            if obstacle is not None:
                raise RuntimeError(
                    f"values: expected a GPU of compute capability 8.9 or newer for fp8 matrix products, got {obstacle}"
                )
        no_gradient(bias, addend, out)
        values, scales, weight_scales = values.contiguous(), scales.contiguous(), weight_scales.contiguous()
        bias = None if bias is None else bias.contiguous()
        if addend is not None and not _has_whole_rows(addend):
            addend = addend.clone(memory_format=torch.contiguous_format)  # also where only its address does not fit
        into = out if out is not None and _has_whole_rows(out) else None
        if out is not None and into is None:  # the op does not see it
            check_sum(values, weight, out_dtype, addend=None, out=out)
        result = multiply(values, scales, weight, weight_scales, bias, out_dtype, use_fast_accum, addend, into)
        return result if out is None or into is not None else out.copy_(result)
    except Exception:  # also the dispatcher's, and that of a gradient, which is asked for before the op has checked
        check_types(scaled_linear, values, scales, weight, weight_scales, bias, addend=addend, out=out)
        raise


def _has_whole_rows(tensor: Tensor) -> bool:
    """Whether cuBLASLt can address it: one step from row to row, and rows at multiples of 16 bytes."""
    if tensor.is_contiguous():
        return tensor.storage_offset() % 8 == 0
    step = 0
    for dim in range(tensor.dim() - 2, -1, -1):
        if tensor.shape[dim] == 1:
            continue
        if step and tensor.stride(dim) != step:
            return False
        if not step and (tensor.stride(dim) % 8 or tensor.stride(dim) < tensor.shape[-1]):
            return False
        step = tensor.stride(dim) * tensor.shape[dim]
    return (tensor.stride(-1) == 1 or tensor.shape[-1] == 1) and tensor.storage_offset() % 8 == 0


def multiply(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = True,
    addend: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``scaled_linear`` of contiguous arguments that are known to fit: the checks take longer than launching it."""
    if bias is not None and bias.dtype != out_dtype:
        bias = bias.to(out_dtype)
    if values.is_cpu:
        result = _formulas.product(values, scales, weight, weight_scales, bias, addend, out_dtype)
        return result if out is None else out.copy_(result)
    trained = torch.is_grad_enabled() and requires_grad(bias)  # torch._scaled_mm has an error for it
    if out_dtype == torch.bfloat16 and has_own_product(values.device) and not trained:
        if out is None:
            return _scaled_linear(values, scales, weight, weight_scales, bias, addend, use_fast_accum)
        _scaled_linear_out(out, values, scales, weight, weight_scales, bias, addend, use_fast_accum)
        count_writes((out,))
        return out
    channels, width = weight.shape
    result = scaled_mm(
        values.reshape(-1, width),
        weight.t(),
        scale_a=scales.reshape(-1, 1),
        scale_b=weight_scales.unsqueeze(0),
        bias=bias,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
    ).view(*values.shape[:-1], channels)
    if addend is not None:
        result = result + addend
    return result if out is None else out.copy_(result)


def weight_only_linear(input: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer whose weight alone is in fp8, for few rows.

    Equivalent to::

        w = weight.float() * weight_scales[:, None]
        torch.nn.functional.linear(input.float(), w, bias.float()).to(input.dtype)

    The weight is read once for every four rows. With one or two rows this is faster than a product in bfloat16, with
    more it is slower. A row has the same bits in any batch.

    Args:
        input: [..., in], float32, float16 or bfloat16, contiguous.
        weight: [out, in], float8_e4m3fn, contiguous; in is a positive multiple of 16.
        weight_scales: [out], float32, contiguous: as ``quantize_weight`` returns them.
        bias: [out], in input's dtype, contiguous; None adds nothing.

    Returns:
        [..., out], contiguous, in input's dtype.

    Raises:
        RuntimeError: A shape, dtype or device does not fit.
    """
    result: Tensor = _weight_only_linear(None, input, weight, weight_scales, bias)
    return result
