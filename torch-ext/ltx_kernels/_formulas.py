"""The mathematics of every op in plain torch: differentiable, on any device.

The package runs these functions where there is no compiled kernel (a tensor on the variant's other device) and where
autograd has to follow. `reference` makes the public functions of them. The arguments have been checked, and modes are
the codes of the ops' schemas. Math is in float32, or in float64 when the input is float64, which the compiled ops do
not take.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Callable, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ._checks import (
    CHANNEL_NORM,
    E4M3_MAX,
    EAGER,
    FP32,
    GELU_TANH,
    LAYER,
    MIN_SCALE,
    NONE,
    RMS,
    SILU,
    RotaryInput,
    RotaryTable,
    TableForm,
    channels_last_order,
    heads_last,
    is_per_batch,
)
from ._torch_private import is_func_wrapper

Pair = tuple[Tensor, Tensor]
Formula = TypeVar("Formula", bound=Callable[..., Any])


def _without_autocast(formula: Formula) -> Formula:
    """A formula whose products keep their operands' dtype under autocast, too. Its first argument is a tensor."""

    @functools.wraps(formula)
    def called(*arguments: Any, **options: Any) -> Any:
        device = next(iter((*arguments, *options.values()))).device.type
        if not torch.is_autocast_enabled(device):
            return formula(*arguments, **options)
        with torch.autocast(device, enabled=False):
            return formula(*arguments, **options)

    return cast(Formula, called)


def _compute_dtype(input: Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def rms_eps(input: Tensor) -> float:
    """What ``eps=None`` means to torch.nn.RMSNorm: the machine epsilon of the dtype that the mean is taken in."""
    return torch.finfo(_compute_dtype(input)).eps


# Every step below has the promoted dtype of its operands, whatever their rank: that is where eager code rounds. With
# rounding="fp32" the operands are converted first, so that nothing rounds before the end.


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype) * b.to(dtype)


def _add(a: Tensor, b: Tensor) -> Tensor:
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype) + b.to(dtype)


def _subtract(a: Tensor, b: Tensor) -> Tensor:
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype) - b.to(dtype)


# ---- Norms


def modulator(
    value: Tensor | None, table: Tensor | None, input: Tensor, index: Tensor | None, dtype: torch.dtype | None
) -> Tensor | None:
    """value + table, converted to ``dtype`` first where given, in a shape that broadcasts to the input."""
    if value is None:
        return None
    if index is not None:
        value = _named_rows(value, index, input)
    elif is_per_batch(value, input):
        for _ in range(input.dim() - 2):
            value = value.unsqueeze(1)
    if dtype is not None:
        value = value.to(dtype)
    return value if table is None else _add(value, table)


def _named_rows(value: Tensor, index: Tensor, input: Tensor) -> Tensor:
    """The row of value, [rows, H] or [B, rows, H], that the index names, for each row of the input.

    An embedding looks them up, because its gradient has the same bits in every run. The gradient of `gather` differs
    from run to run on a GPU.
    """
    rows = index.long().expand(input.shape[:-1])
    if value.dim() == 3 and value.shape[0] > 1:
        return torch.stack([F.embedding(of_sample, table) for of_sample, table in zip(rows, value)])
    return F.embedding(rows, value.reshape(-1, value.shape[-1])).reshape(*rows.shape, value.shape[-1])


def norm_family(
    input: Tensor,
    *,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    gate_table: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    scale_table: Tensor | None = None,
    shift: Tensor | None = None,
    shift_table: Tensor | None = None,
    out_gate: Tensor | None = None,
    out_gate_table: Tensor | None = None,
    scale2: Tensor | None = None,
    scale2_table: Tensor | None = None,
    shift2: Tensor | None = None,
    shift2_table: Tensor | None = None,
    branch_weight: Tensor | None = None,
    index: Tensor | None = None,
    branch_eps: float | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,
    statistic: int | None = RMS,
    rounding: int = FP32,
    rounded: bool = True,
) -> tuple[Tensor, ...]:
    """(normalised, h) of every op of the norm family: kernel_src/ltx/params.h has the formula.

    With ``scale2`` it is (normalised, normalised with the second scale and shift, h). With ``index`` each row reads the
    row of gate, scale, shift, out_gate, scale2 and shift2 that it names. ``branch_eps`` asks for the norm
    of the input before the residual is added. Without residual and gate, h is the input. ``statistic=None`` stops at h
    and returns it twice. ``rounded=False`` leaves all results but h in the dtype of the math.
    """
    dtype = input.dtype
    compute = _compute_dtype(input)
    eager = rounding != FP32
    wide = None if eager else compute

    def rms(x: Tensor, eps: float, weight: Tensor | None) -> Tensor:
        n = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        if rounding == EAGER and weight_offset == 0.0:
            n = n.to(dtype)
            return n if weight is None else _multiply(n, weight)
        if weight is not None:
            n = n * (weight.to(compute) + weight_offset if weight_offset != 0.0 else weight.to(compute))
        return n.to(dtype) if eager else n

    x = input if eager else input.to(compute)
    if branch_eps is not None:
        x = rms(x.to(compute), branch_eps, branch_weight)
    gate = modulator(gate, gate_table, input, index, wide)
    if gate is not None:
        x = _multiply(x, gate)
    if residual is not None:
        x = _add(residual, x)
    h = input if gate is None and residual is None and branch_eps is None else x.to(dtype).contiguous()
    if statistic is None:
        return h if rounded else x, h
    x = h.to(compute) if eager else x

    if statistic == LAYER:
        x = x - x.mean(-1, keepdim=True)
        n = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        if weight is not None:
            n = n * weight.to(compute)
        if bias is not None:
            n = n + bias.to(compute)
        n = n.to(dtype) if eager else n
    else:
        n = rms(x, eps, weight)

    def modulated(scale: Tensor | None, shift: Tensor | None, out_gate: Tensor | None) -> Tensor:
        out = n
        if scale is not None:
            out = _multiply(out, 1 + scale)
        if shift is not None:
            out = _add(out, shift)
        if out_gate is not None:
            out = _multiply(out, out_gate)
        return out.to(dtype).contiguous() if rounded else out

    first = modulated(
        modulator(scale, scale_table, input, index, wide),
        modulator(shift, shift_table, input, index, wide),
        modulator(out_gate, out_gate_table, input, index, wide),
    )
    if scale2 is None:
        return first, h
    second = modulated(
        modulator(scale2, scale2_table, input, index, wide), modulator(shift2, shift2_table, input, index, wide), None
    )
    return first, second, h


# ---- Gated and plain activations


def _activate(x: Tensor, activation: int) -> Tensor:
    if activation == SILU:
        return torch.nn.functional.silu(x)
    if activation == GELU_TANH:
        # x * sigmoid(2u) is 0.5 * x * (1 + tanh(u)) without its cancellation for negative x.
        return x * (2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)).sigmoid()
    # erfc instead of 1 + erf, for the same reason.
    return 0.5 * x * torch.erfc(x * -math.sqrt(0.5))


def gated_unit(
    input: Tensor,
    *,
    up: Tensor | None = None,
    bias: Tensor | None = None,
    gated: bool,
    gate_first: bool = True,
    activation: int,
    rounding: int = FP32,
    rounded: bool = True,
) -> Tensor:
    """activation(gate) * up, or activation(input + bias) where not ``gated``.

    ``rounded=False`` leaves the result in the dtype of the math.
    """
    dtype = input.dtype
    compute = _compute_dtype(input)
    gate = input
    if gated and up is None:
        width = input.shape[-1] // 2
        first, second = input[..., :width], input[..., width:]
        gate, up = (first, second) if gate_first else (second, first)
    if rounding == EAGER:
        if bias is not None:
            gate = _add(gate, bias).to(dtype)
        out = _activate(gate.to(compute), activation).to(dtype)
        if up is not None:
            out = out * up
    else:
        out = gate.to(compute)
        if bias is not None:
            out = out + bias.to(compute)
        out = _activate(out, activation)
        if up is not None:
            out = out * up.to(compute)
    return out.to(dtype).contiguous() if rounded else out


def clamped_unit(
    input: Tensor, *, up: Tensor | None, alpha: float, limit: float, interleaved: bool, rounding: int = FP32
) -> Tensor:
    """g * sigmoid(alpha * g) * (u + 1) with g = min(gate, limit) and u = clamp(up, -limit, limit)."""
    dtype = input.dtype
    gate = input
    if up is None:
        width = input.shape[-1] // 2
        gate, up = (input[..., 0::2], input[..., 1::2]) if interleaved else (input[..., :width], input[..., width:])
    if rounding == FP32:
        gate, up = gate.to(_compute_dtype(input)), up.to(_compute_dtype(input))
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    out = (up + 1) * (gate * (gate * alpha).sigmoid())
    return out.to(dtype).contiguous()


def head_gates(input: Tensor, logits: Tensor, *, scale: float, rounding: int = FP32, rounded: bool = True) -> Tensor:
    """input * scale * sigmoid(logits), the logits one per head or one per column. rounded: In the input's dtype."""
    dtype = input.dtype if rounded else _compute_dtype(input)
    heads, width = input.shape[-2:]
    logits = logits.unsqueeze(-1) if logits.shape[-1] == heads else logits.unflatten(-1, (heads, width))
    if rounding == FP32:
        input, logits = input.to(_compute_dtype(input)), logits.to(_compute_dtype(input))
    return (input * (scale * logits.sigmoid())).to(dtype).contiguous()


# ---- Gradients


def _gradients(formula: Callable[..., Tensor], grad: Tensor, *inputs: Tensor | None) -> list[Tensor]:
    """The gradients of the inputs that are not None, given that of the formula's result."""
    with torch.enable_grad():
        leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in inputs]
        given = [leaf for leaf in leaves if leaf is not None]
        return [each.contiguous() for each in torch.autograd.grad(formula(*leaves), given, grad)]


def _norm_gradient(
    grad: Tensor, input: Tensor, grad2: Tensor | None, grad_residual: Tensor | None, **arguments: Any
) -> Tensor:
    """The gradient of what a norm read, in the dtype of the math."""
    compute = _compute_dtype(input)
    with torch.enable_grad():
        leaf = input.detach().to(compute, copy=True).requires_grad_()
        *results, _ = norm_family(leaf, **arguments)
        grads = [each.to(compute) for each in (grad, grad2) if each is not None]
        (gradient,) = torch.autograd.grad(results[: len(grads)], leaf, grads)
    return gradient if grad_residual is None else gradient + grad_residual.to(compute)


def _gated(gradient: Tensor, gate: Tensor | None, gate_table: Tensor | None, index: Tensor | None) -> Tensor:
    factor = modulator(gate, gate_table, gradient, index, _compute_dtype(gradient))
    return gradient if factor is None else gradient * factor


def norm_backward(
    grad: Tensor, input: Tensor, *, gate: Tensor | None, gate_table: Tensor | None, **arguments: Any
) -> list[Tensor]:
    """The gradient of the input, or of residual_out, of every norm without a gated residual."""
    gradient = _norm_gradient(grad, input, out_gate=gate, out_gate_table=gate_table, **arguments)
    return [gradient.to(input.dtype).contiguous()]


def residual_norm_backward(
    grad: Tensor,
    input: Tensor,
    *,
    gate: Tensor | None,
    gate_table: Tensor | None,
    branch: Tensor | None = None,
    weight1: Tensor | None = None,
    eps1: float = 0.0,
    **arguments: Any,
) -> list[Tensor]:
    """The gradients of input and residual.

    ``input`` is their residual_out, ``branch`` an input with a norm of its own.
    """
    gradient = _norm_gradient(grad, input, **arguments)
    to_input = _gated(gradient, gate, gate_table, arguments["index"])
    if branch is not None:
        norm = {"weight": weight1, "eps": eps1, "weight_offset": arguments["weight_offset"]}
        to_input = _norm_gradient(to_input, branch, None, None, **norm)
    return [each.to(input.dtype).contiguous() for each in (to_input, gradient)]


def gated_residual_backward(
    grad: Tensor, gate: Tensor, gate_table: Tensor | None, index: Tensor | None
) -> list[Tensor]:
    """The gradient of the input of ``gated_residual``."""
    return [_gated(grad.to(_compute_dtype(grad)), gate, gate_table, index).to(grad.dtype).contiguous()]


def row_sums(grad: Tensor, input: Tensor, *, eps: float, statistic: int) -> list[Tensor]:
    """The sums of grad * n(input) and of grad over the rows of each group, with the norm n, in float32."""
    compute = _compute_dtype(input)
    rows, grad = input.to(compute), grad.to(compute)
    if statistic != NONE:
        rows = norm_family(rows, eps=eps, statistic=statistic)[0]
    return [each.sum(1).float() for each in (grad * rows, grad)]


def _side_by_side(gradients: list[Tensor]) -> Tensor:
    return gradients[0] if len(gradients) == 1 else torch.stack(gradients)


def gated_unit_backward(grad: Tensor, input: Tensor, *, up: Tensor | None = None, **arguments: Any) -> Tensor:
    """The gradients of input and up of ``gated_unit``, [2, ...], or of input alone."""
    return _side_by_side(_gradients(lambda x, u: gated_unit(x, up=u, **arguments), grad, input, up))


def clamped_unit_backward(grad: Tensor, input: Tensor, *, up: Tensor | None, **arguments: Any) -> Tensor:
    """The same of ``clamped_unit``."""
    return _side_by_side(_gradients(lambda x, u: clamped_unit(x, up=u, **arguments), grad, input, up))


def head_gates_backward(grad: Tensor, input: Tensor, logits: Tensor, *, scale: float) -> list[Tensor]:
    """The gradients of input and logits of ``head_gates``."""
    return _gradients(lambda x, y: head_gates(x, y, scale=scale), grad, input, logits)


# ---- Quantised rows


def quantise(y: Tensor, static_scale: Tensor | None) -> Pair:
    """Rows in float32 (or float64) as (float8_e4m3fn values, float32 scales): y is about values * scales.

    Rounded to nearest even, saturating. A row of zeros has the least scale, a row with a NaN the scale NaN.
    """
    if static_scale is not None:
        scales = static_scale.to(y.dtype).reshape(()).expand(*y.shape[:-1], 1)
    elif y.shape[-1] == 0:
        scales = y.new_zeros((*y.shape[:-1], 1))
    else:
        scales = y.abs().amax(-1, keepdim=True) / E4M3_MAX
    scales = scales.clamp(min=MIN_SCALE)
    values = (y * scales.reciprocal()).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return values.contiguous(), scales.to(torch.float32).contiguous()


def norm_family_quant(
    input: Tensor, *, static_scale: Tensor | None, statistic: int, **arguments: Any
) -> tuple[Tensor, ...]:
    """(values, scales, h) of ``norm_family``, of its first result before rounding; with ``scale2`` of the first two."""
    *rows, h = norm_family(input, statistic=statistic or None, rounded=False, **arguments)
    return (*(part for y in rows for part in quantise(y, static_scale)), h)


def gated_unit_quant(input: Tensor, *, prefix: Tensor | None, static_scale: Tensor | None, **arguments: Any) -> Pair:
    """(values, scales) of the prefix and ``gated_unit`` before its rounding, as one row."""
    y = gated_unit(input, rounded=False, **arguments)
    return quantise(y if prefix is None else torch.cat((prefix.to(y.dtype), y), -1), static_scale)


def head_gates_quant(input: Tensor, logits: Tensor, *, static_scale: Tensor | None, scale: float) -> Pair:
    """(values, scales) of ``head_gates`` before its rounding, the heads of a token as one row."""
    return quantise(head_gates(input, logits, scale=scale, rounded=False).flatten(-2), static_scale)


def product(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    addend: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``scaled_linear`` without its checks."""
    out = values.float() @ weight.float().t() * scales * weight_scales
    for term in (bias, addend):
        if term is not None:
            out = out + term.float()
    return out.to(out_dtype)


def weight_only_product(input: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> Tensor:
    """``weight_only_linear`` without its checks."""
    out = input.float() @ weight.float().t() * weight_scales
    return (out if bias is None else out + bias.float()).to(input.dtype)


# ---- Rotary


def _split_pairs(x: Tensor, interleaved: bool) -> Pair:
    """The first and the second elements of the pairs."""
    if interleaved:
        pairs = x.unflatten(-1, (-1, 2))
        return pairs[..., 0], pairs[..., 1]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _join_pairs(a: Tensor, b: Tensor, interleaved: bool) -> Tensor:
    return torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)


def rotate(x: Tensor, table: RotaryTable, dtype: torch.dtype, interleaved: bool, rounding: int) -> Tensor:
    """Rotates the first columns of every head of x [batch, sequence, heads, columns]; the result has ``dtype``.

    With rounding="fp32", x may be in the compute dtype already.
    """
    sequence, rotary_dim = x.shape[1], table.form.rotary_dim
    cos, sin = table.cos, table.sin
    if cos.shape[1] != 1:
        cos = cos[:, :sequence]
    if sin.shape[1] != 1:
        sin = sin[:, :sequence]
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if rounding == FP32:
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        turned, cos, sin = turned.to(compute), cos.to(compute), sin.to(compute)
    xa, xb = _split_pairs(turned, interleaved)
    cos_a, cos_b = (cos, cos) if table.form.half_width else _split_pairs(cos, interleaved)
    sin_a, sin_b = (sin, sin) if table.form.half_width else _split_pairs(sin, interleaved)
    a = _subtract(_multiply(xa, cos_a), _multiply(xb, sin_a)).to(dtype)
    b = _add(_multiply(xb, cos_b), _multiply(xa, sin_b)).to(dtype)
    out = _join_pairs(a, b, interleaved)
    return out if rest.shape[-1] == 0 else torch.cat((out, rest.to(dtype)), -1)


def _restore(out: Tensor, operand: RotaryInput) -> Tensor:
    """From [batch, sequence, heads, columns] back to the dimensions and the memory order of the operand."""
    tensor, dims = operand.tensor, operand.dims
    if dims.head < 0:
        out = out.squeeze(2)
    elif dims.head == 1 and dims.sequence == 2:
        out = out.transpose(1, 2)
    if dims.batch < 0:
        out = out.squeeze(0)
    return out.contiguous() if tensor.is_contiguous() else torch.empty_like(tensor).copy_(out)


def _normalise_heads(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    across_heads: bool,
    *,
    bias: Tensor | None = None,
    weight_offset: float = 0.0,
    statistic: int = RMS,
    cast_before_weight: bool = False,
    rounding: int = FP32,
) -> Tensor:
    """The norm of x [batch, sequence, heads, columns] in the dtype of the math, or in x's with rounding="eager"."""
    compute = _compute_dtype(x)
    n = x.to(compute)
    shape = n.shape
    if across_heads:
        n = n.flatten(-2)
    if statistic == LAYER:
        n = n - n.mean(-1, keepdim=True)
    n = n * (n.square().mean(-1, keepdim=True) + eps).rsqrt()
    if rounding == EAGER and cast_before_weight:
        n = n.to(x.dtype).to(compute)
    if weight is not None:
        n = n * (weight.to(compute) + weight_offset if weight_offset != 0.0 else weight.to(compute))
    if bias is not None:
        n = n + bias.to(compute)
    n = n.view(shape)
    return n.to(x.dtype) if rounding == EAGER else n


def rotary(
    operands: list[RotaryInput],
    tables: list[RotaryTable],
    *,
    interleaved: bool,
    rounding: int = FP32,
    normalised: bool = False,
    across_heads: bool = False,
    **norm: Any,
) -> list[Tensor]:
    """Every op of the rotary family: normalises where asked, then rotates each operand with its table.

    ``norm``: options of ``_normalise_heads``.
    """
    outs = []
    for operand, table in zip(operands, tables):
        x = heads_last(operand.tensor, operand.dims)
        if normalised:
            x = _normalise_heads(
                x, operand.weight, operand.eps, across_heads, bias=operand.bias, rounding=rounding, **norm
            )
        outs.append(_restore(rotate(x, table, operand.tensor.dtype, interleaved, rounding), operand))
    return outs


def rotary_backward(
    operands: list[RotaryInput], tables: list[RotaryTable], grads: Sequence[Tensor], **arguments: Any
) -> list[Tensor]:
    """The gradients of the operands of ``rotary``."""
    found = []
    for operand, table, grad in zip(operands, tables, grads):
        compute = _compute_dtype(operand.tensor)
        with torch.enable_grad():
            leaf = operand.tensor.detach().to(compute, copy=True).requires_grad_()
            results = rotary([operand._replace(tensor=leaf)], [table], **arguments)
            (gradient,) = torch.autograd.grad(results, leaf, grad.to(compute))
        found.append(torch.empty_like(operand.tensor).copy_(gradient))
    return found


def computed_table(
    operand: RotaryInput,
    positions: Tensor | None,
    grid: Sequence[int],
    rope_dims: Sequence[int],
    theta_base: Sequence[float],
) -> RotaryTable:
    """The table of rope_1d and rope_3d for one operand: cos and sin of the float32 angle."""
    tensor = operand.tensor
    token = torch.arange(operand.sequence, device=tensor.device) if positions is None else positions
    if len(grid) == 1:
        axes = [token]
    else:
        _, height, width = grid
        axes = [token // (height * width), token // width % height, token % width]
    angles = []
    for axis, dim, base in zip(axes, rope_dims, theta_base):
        exponent = torch.arange(0, dim, 2, dtype=torch.float64, device=tensor.device) / dim
        inverse_frequency = torch.pow(base, exponent).reciprocal().to(torch.float32)
        angles.append(axis.to(torch.float32).unsqueeze(-1) * inverse_frequency)
    angle = torch.cat(angles, -1).to(_compute_dtype(tensor)).unsqueeze(-2)
    if angle.dim() == 3:
        angle = angle.unsqueeze(0)
    return RotaryTable(angle.cos(), angle.sin(), TableForm(tensor.shape[-1], True, False))


# ---- Attention


def key_mask(mask: Tensor | None, key_lengths: Tensor | None, keys: int) -> Tensor | None:
    """[B or 1, T] of both: bool, or the mask's addends with -inf beyond the lengths."""
    if key_lengths is None:
        return mask
    counts = torch.arange(keys, device=key_lengths.device) < key_lengths[:, None]
    if mask is None:
        return counts
    return mask & counts if mask.dtype == torch.bool else torch.where(counts, mask, -math.inf)


def causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """[S, T] bool: query i sees the keys up to the i-th."""
    return torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device).tril()


def _default_scale(query: Tensor) -> float:
    """What an attention multiplies the scores by; heads without columns have scores of 0 in any case."""
    return max(query.shape[-1], 1) ** -0.5


@_without_autocast
def attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    scale: float | None,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """The output [B, S, heads, D], and the logarithm of each row's sum of exponentials [B, heads, S]."""
    compute = _compute_dtype(query)
    if key.shape[2] != query.shape[2]:
        key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], 2) for x in (key, value))
    q, k = query.to(compute).transpose(1, 2), key.to(compute).permute(0, 2, 3, 1)
    scores = q @ k * (_default_scale(query) if scale is None else scale)
    mask = key_mask(mask, key_lengths, key.shape[1])
    if mask is not None:
        addends = torch.where(mask, 0.0, -math.inf) if mask.dtype == torch.bool else mask
        addends = addends.to(compute)[:, None, None]
        # Where no key counts, not even a query with a NaN is anything but zeros.
        scores = (scores + addends).masked_fill((addends == -math.inf).all(-1, keepdim=True), -math.inf)
    if is_causal:
        scores = scores.masked_fill(~causal_mask(query, key), -math.inf)
    return _attend(scores, value, query.dtype), scores.logsumexp(-1).float()


# kKeys of attention_hopper.cu, and kSamples and kKeyScales of ltx/attention_integers.cuh.
_INT8_TILE, _INT8_SAMPLES, _INT8_SCALES = 80, 256, 4


def _hadamard(columns: int, like: Tensor) -> Tensor:
    """The orthogonal matrix of 1 and -1, divided by the length of its columns."""
    matrix = like.new_ones(1, 1)
    while len(matrix) < columns:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * columns**-0.5


def _int8_scale(magnitude: Tensor) -> Tensor:
    """Of integers up to 127, for numbers up to ``magnitude``; NaN where that is not finite."""
    return (magnitude / 127).clamp(min=MIN_SCALE).where(magnitude < math.inf, math.nan)


@_without_autocast
def attention_int8(
    query: Tensor, key: Tensor, value: Tensor, key_lengths: Tensor | None, scale: float | None
) -> Tensor:
    """Attention with scores of 8-bit integers, [B, S, heads, D]: the recipe of ltx/attention_integers.cuh."""
    compute, keys = _compute_dtype(query), key.shape[1]
    if keys == 0 or query.numel() == 0:
        return query.new_zeros(query.shape)
    lengths = torch.full((key.shape[0],), keys, device=key.device)
    if key_lengths is not None:
        lengths = key_lengths.clamp(0, keys).long()
    position = torch.arange(keys, device=key.device)
    counts = (position < lengths[:, None])[:, None, :, None]  # [B, 1, T, 1]
    q, k = query.to(compute).transpose(1, 2), key.to(compute).transpose(1, 2).where(counts, 0.0)

    samples = lengths.clamp(max=_INT8_SAMPLES)[:, None]
    index = torch.arange(min(keys, _INT8_SAMPLES), device=key.device)
    sampled = (index * lengths[:, None]).div(samples.clamp(min=1), rounding_mode="floor").clamp(max=keys - 1)
    rows = k.gather(2, sampled[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3]))
    rows = rows.where((index < samples)[:, None, :, None], 0.0)
    mean = rows.sum(2, keepdim=True) / samples.clamp(min=1)[:, None, :, None]

    rotation = _hadamard(query.shape[-1], q)
    rotated_q, rotated_k = q @ rotation, (k - mean).where(counts, 0.0) @ rotation
    query_scale = _int8_scale(rotated_q.abs().amax(-1, keepdim=True))
    part = position // _INT8_TILE * _INT8_SCALES + position % _INT8_TILE // 2 % _INT8_SCALES
    most = torch.stack([rotated_k[:, :, part == i].abs().amax((2, 3)) for i in part.unique()], -1)
    key_scale = _int8_scale(most)[:, :, torch.unique(part, return_inverse=True)[1], None]
    scores = (rotated_q / query_scale).round() @ (rotated_k / key_scale).round().transpose(2, 3)
    factor = _default_scale(query) if scale is None else scale
    scores = scores * (query_scale * key_scale.transpose(2, 3) * factor)
    finite = scores.isfinite().all(-1, keepdim=True)
    if not bool(finite.all()):
        scores = scores.where(finite, q @ k.transpose(2, 3) * factor)
    scores = scores.masked_fill(~counts.transpose(2, 3), -math.inf)
    return _attend(scores, value.where(counts.transpose(1, 2), 0.0), query.dtype)


def _attend(scores: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Softmax of scores [B, heads, S, T], times values; queries with nothing to attend to give zeros."""
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    return (weights @ value.to(scores.dtype).transpose(1, 2)).transpose(1, 2).to(dtype).contiguous()


@_without_autocast
def cross_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    mask: Tensor | None,
    *,
    eps: float,
    scale: float | None,
) -> Tensor:
    """Attention of normalised queries to normalised keys; queries with nothing to attend to give zeros."""
    compute = _compute_dtype(query)
    q = _normalise_heads(query, query_weight, eps, True).transpose(1, 2)
    k = _normalise_heads(key, key_weight, eps, True).permute(0, 2, 3, 1)
    scores = q @ k * (_default_scale(query) if scale is None else scale)
    if mask is not None:
        scores = scores + mask.to(compute)[:, None, None]
    return _attend(scores, value, query.dtype)


# ---- Channels-last video


def _ordered(x: Tensor, order: torch.memory_format) -> Tensor:
    """A tensor in a memory order. What torch.func maps over samples has none."""
    if not torch.compiler.is_compiling() and is_func_wrapper(x):
        return x
    return x.contiguous(memory_format=order)


_CHANNELS = (slice(None), None, None, None)  # a vector of the channels, beside a [B, C, T, H, W] tensor


def channel_norm_family(
    input: Tensor,
    *,
    bias: Tensor | None,
    noise: Tensor | None,
    noise_scale: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    scale_table: Tensor | None,
    shift_table: Tensor | None,
    eps: float,
    norm: int,
    silu: bool,
    padding: Sequence[int],
) -> Pair:
    """(normalised and padded, sum) of every channel norm. Each operation rounds to the tensors' dtype."""
    dtype, compute = input.dtype, _compute_dtype(input)
    h = input
    if bias is not None:
        h = h + bias[_CHANNELS]
    if noise is not None and noise_scale is not None:
        h = h + (noise * noise_scale[:, None, None])[:, None]
    if residual is not None:
        h = h + residual
    y = h
    if norm == CHANNEL_NORM["rms"]:
        y = (h * (h.to(compute).square().mean(1, keepdim=True) + eps).rsqrt()).to(dtype)
    elif norm == CHANNEL_NORM["rms_stepwise"]:
        y = h / torch.sqrt((h * h).to(compute).mean(1, keepdim=True).to(dtype) + eps)
    elif norm == CHANNEL_NORM["l2"]:
        y = F.normalize(h.to(compute), dim=1, eps=eps).to(dtype) * math.sqrt(h.shape[1])
    if weight is not None:
        y = y * weight[_CHANNELS]
    if scale is not None and shift is not None:
        scale = scale if scale_table is None else scale + scale_table
        shift = shift if shift_table is None else shift + shift_table
        y = y * (1 + scale)[..., None, None, None] + shift[..., None, None, None]
    if silu:
        y = F.silu(y)
    front, back, reflect = padding
    if y.shape[2] > 0:
        y = torch.cat([y[:, :, :1]] * front + [y] + [y[:, :, -1:]] * back, 2)
    if reflect:
        y = F.pad(y, (1, 1, 1, 1, 0, 0), mode="reflect")
    return _ordered(y, torch.channels_last_3d), _ordered(h, torch.channels_last_3d)


def shuffled(
    input: Tensor, *, bias: Tensor | None, residual: Tensor | None, upscale: Sequence[int], skip_frames: int
) -> Tensor:
    def shuffle(x: Tensor) -> Tensor:
        x = x.unflatten(1, (x.shape[1] // math.prod(upscale), *upscale))  # [B, C, t, h, w, T, H, W]
        return x.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(6, 7).flatten(4, 5).flatten(2, 3)

    out = shuffle(input if bias is None else input + bias[_CHANNELS])
    if residual is not None:
        out = out + shuffle(residual).repeat(1, input.shape[1] // residual.shape[1], 1, 1, 1)
    return _ordered(out[:, :, skip_frames:], torch.channels_last_3d)


def unpatched(input: Tensor, *, bias: Tensor | None, patch_size: int, clamp: bool) -> Tensor:
    x = input if bias is None else input + bias[_CHANNELS]
    x = x.unflatten(1, (x.shape[1] // patch_size**2, patch_size, patch_size))  # [B, C, q, p, T, H, W]
    x = x.permute(0, 1, 4, 5, 3, 6, 2).flatten(5, 6).flatten(3, 4)
    return (x.clamp(-1, 1) if clamp else x).contiguous()


# ---- Channels-last images and videos


def _hidden(input: Tensor, bias: Tensor | None, residual: Tensor | None, residual_bias: Tensor | None) -> Tensor:
    """The sum of the operands; each addition rounds to the tensors' dtype."""

    def per_channel(vector: Tensor) -> Tensor:
        return vector.view(*vector.shape, *[1] * (input.dim() - 2))

    h = input if bias is None else input + per_channel(bias)
    if residual is None:
        return h if residual_bias is None else h + per_channel(residual_bias)
    return h + (residual if residual_bias is None else residual + per_channel(residual_bias))


def group_norm_family(
    input: Tensor,
    *,
    bias: Tensor | None,
    residual: Tensor | None,
    residual_bias: Tensor | None,
    weight: Tensor | None,
    bias_norm: Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
) -> Pair:
    """(normalised, sum) of both group norms. Each operation rounds to the tensors' dtype."""
    order, compute = channels_last_order(input), _compute_dtype(input)
    h = _hidden(input, bias, residual, residual_bias)
    y = h
    if h.numel() > 0:
        x = h.to(compute).unflatten(1, (groups, -1)).flatten(2)
        variance, mean = torch.var_mean(x, 2, correction=0, keepdim=True)
        x = ((x - mean) * (variance + eps).rsqrt()).reshape(h.shape)
        for vector, function in ((weight, torch.mul), (bias_norm, torch.add)):
            if vector is not None:
                x = function(x, vector.to(compute).view(-1, *[1] * (h.dim() - 2)))
        y = x.to(h.dtype)
    if silu:
        y = F.silu(y)
    return _ordered(y, order), _ordered(h.clone(), order)


def upsampled(
    input: Tensor,
    *,
    bias: Tensor | None,
    residual: Tensor | None,
    residual_bias: Tensor | None,
    scale: Sequence[int],
) -> Tensor:
    h = _hidden(input, bias, residual, residual_bias)
    rows, columns = scale
    return _ordered(h.repeat_interleave(rows, -2).repeat_interleave(columns, -1), channels_last_order(input))
