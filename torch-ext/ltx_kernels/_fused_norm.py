"""A norm with whatever surrounds it in a transformer block, computed by the one op that can do it.

The public functions have one name for each of these ops. `fused_norm` and `fused_norm_pair` are for callers that only
know at run time what surrounds a norm, such as the residual stream of a block: they choose the op by their arguments.
"""

from __future__ import annotations

from typing import Any, Optional, Union

from torch import Tensor

from ._call import op
from ._checks import FLOAT32_EPS, NONE, ROUNDING

_norm = op("norm")
_adaln_norm = op("adaln_norm")
_gated_residual = op("gated_residual")
_residual_norm = op("residual_norm")
_norm_residual = op("norm_residual")
_norm_residual_norm = op("norm_residual_norm")
_adaln_norm_pair = op("adaln_norm_pair")
_residual_norm_pair = op("residual_norm_pair")
_norm_quant = op("norm_quant", gradient=False)
_residual_norm_quant = op("residual_norm_quant", gradient=False)
_norm_residual_norm_quant = op("norm_residual_norm_quant", gradient=False)
_adaln_norm_pair_quant = op("adaln_norm_pair_quant", gradient=False)
_residual_norm_pair_quant = op("residual_norm_pair_quant", gradient=False)

Modulation = tuple[Tensor, Optional[Tensor]]  # a gate, scale or shift, and a vector [H] that is added to it
Rows = Union[Tensor, tuple[Tensor, Tensor]]  # a tensor, or the values and scales of quantised rows

_NOTHING: tuple[Tensor | None, Tensor | None] = None, None


def fused_norm(
    input: Tensor,
    statistic: int = NONE,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = 0.0,
    weight_offset: float = 0.0,
    scale: Modulation | None = None,
    shift: Modulation | None = None,
    residual: Tensor | None = None,
    gate: Modulation | None = None,
    branch_norm: tuple[Tensor | None, float | None] | None = None,
    index: Tensor | None = None,
    rounding: str = "fp32",
    quantise: bool = False,
) -> tuple[Any, Tensor]:
    """(the norm of the sum, the sum), where the sum is ``residual + input * gate``.

    Args:
        input: [..., H], added to the residual. Without a residual it is the sum itself.
        statistic: RMS, LAYER, or NONE for the sum without a norm, which needs a residual or ``quantise``.
        weight, bias, eps, weight_offset: As in the public functions. A LayerNorm has no offset, and neither has an
            RMSNorm with a modulation and without a residual.
        scale, shift: The modulation of the norm. A shift needs a scale.
        residual: Like input.
        gate: What the input is multiplied by. Without a norm of either kind the op needs one.
        branch_norm: Weight and eps of an RMSNorm of the input, with the same offset as the second, which is an RMSNorm
            too or NONE.
        index: [B, S] or [S], the row of gate, scale and shift that each token takes.
        rounding: As in the public functions. Quantised rows are rounded once.
        quantise: The first result is quantised rows, (values, scales). ``branch_norm`` then needs a second norm.
    """
    if eps is None:
        eps = FLOAT32_EPS
    # s, t and g are scale, shift and gate; st, tt and gt are the vectors added to them.
    s = st = t = tt = None
    if scale is not None:
        s, st = scale
        if shift is not None:
            t, tt = shift
    elif gate is None:
        index = None  # an index without rows to choose from would keep the op from its fastest kernel
    if residual is None:
        if quantise:
            rows = _norm_quant(None, input, weight, bias, s, t, st, tt, None, index, eps, weight_offset, statistic)
            return rows, input
        mode = ROUNDING[rounding]
        if scale is None:
            return _norm(None, input, weight, bias, eps, weight_offset, statistic, mode), input
        assert weight_offset == 0.0  # the op has none
        rows = _adaln_norm(None, input, weight, bias, s, t, None, st, tt, None, index, eps, statistic, mode)
        return rows, input

    g, gt = gate or _NOTHING
    if branch_norm is not None:
        weight1, eps1 = branch_norm
        if eps1 is None:
            eps1 = FLOAT32_EPS
        if statistic == NONE:
            mode = ROUNDING[rounding]
            total = _norm_residual(None, input, residual, weight1, g, gt, index, eps1, weight_offset, mode)
            return total, total
        operands = input, residual, g, weight1, weight, s, t, gt, st, tt
        if quantise:
            values, scales, total = _norm_residual_norm_quant(None, *operands, None, index, eps1, eps, weight_offset)
            return (values, scales), total
        return _norm_residual_norm(None, *operands, index, eps1, eps, weight_offset, ROUNDING[rounding])
    if quantise:
        values, scales, total = _residual_norm_quant(
            None, input, residual, g, weight, bias, s, t, gt, st, tt, None, index, eps, weight_offset, statistic
        )
        return (values, scales), total
    mode = ROUNDING[rounding]
    if statistic == NONE:
        total = _gated_residual(None, input, residual, g, gt, index, mode)
        return total, total
    return _residual_norm(
        None, input, residual, g, weight, bias, s, t, gt, st, tt, index, eps, weight_offset, statistic, mode
    )


def fused_norm_pair(
    input: Tensor,
    statistic: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    first: tuple[Modulation, Modulation],
    second: tuple[Modulation, Modulation],
    *,
    residual: Tensor | None = None,
    gate: Modulation | None = None,
    index: Tensor | None = None,
    rounding: str = "fp32",
    quantise: bool = False,
) -> tuple[Rows, Rows, Tensor]:
    """(the sum's norm with the first modulation, with the second, the sum). A modulation is (shift, scale).

    The other arguments are those of `fused_norm`.
    """
    eps = FLOAT32_EPS if eps is None else eps
    (shift, shift_table), (scale, scale_table) = first
    (shift2, shift2_table), (scale2, scale2_table) = second
    norm = weight, bias, scale, shift, scale2, shift2
    tables = scale_table, shift_table, scale2_table, shift2_table
    if residual is None:
        if not quantise:
            mode = ROUNDING[rounding]
            return (*_adaln_norm_pair(None, input, *norm, *tables, index, eps, statistic, mode), input)
        values, scales, values2, scales2 = _adaln_norm_pair_quant(
            None, input, *norm, *tables, None, index, eps, statistic
        )
        return (values, scales), (values2, scales2), input
    gate_value, gate_table = gate or _NOTHING
    operands = input, residual, gate_value, *norm, gate_table, *tables
    if not quantise:
        return _residual_norm_pair(None, *operands, index, eps, statistic, ROUNDING[rounding])
    values, scales, values2, scales2, total = _residual_norm_pair_quant(None, *operands, None, index, eps, statistic)
    return (values, scales), (values2, scales2), total
