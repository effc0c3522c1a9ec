"""RMSNorm and LayerNorm."""

from __future__ import annotations

from torch import Tensor

from ._call import given_or_new, op
from ._checks import FLOAT32_EPS, LAYER, RMS, ROUNDING, choice, norm_rounding

_norm = op("norm")
_residual_norm = op("residual_norm")
_norm_residual = op("norm_residual")
_norm_residual_norm = op("norm_residual_norm")


def rmsnorm(
    input: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    weight_offset: float = 0.0,
    rounding: str = "fp32",
    cast_before_weight: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Normalises rows by their root mean square.

    Equivalent to::

        x = input.float()
        n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight_offset + weight.float())
        n.to(input.dtype)

    Args:
        input: [..., H], float32, float16 or bfloat16.
        weight: [H], any of these dtypes; None: no weight.
        eps: Added to the mean square. None: the machine epsilon of float32, as in torch.nn.RMSNorm.
        weight_offset: Added to the weight; 1.0 for Gemma's convention. Without weight it is not used.
        rounding: "fp32" rounds once, at the end. "eager" rounds the normalised value to the input's dtype before the
            weight, as diffusers' RMSNorm and LlamaRMSNorm do (with weight_offset: after it, as GemmaRMSNorm does); the
            result is rounded to the input's dtype also where theirs would be promoted by a wider weight.
        cast_before_weight: Where rounding="eager" rounds the norm: True rounds before the weight and after it, as
            LlamaRMSNorm and diffusers' RMSNorm do; False after it alone, as torch.nn.RMSNorm, OLMo 2 and GPT-OSS do.
            With a weight_offset it is after the weight in any case.
        out: Where to write, [..., H] like input, of its dtype and device; may be input itself.

    Returns:
        [..., H], contiguous, in the input's dtype; ``out`` where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or ``out`` is given where a gradient is needed.
        ValueError: An unknown ``rounding``.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467); torch.nn.RMSNorm.
    """
    mode = norm_rounding(rounding, cast_before_weight)
    return _norm(out, input, weight, None, FLOAT32_EPS if eps is None else eps, weight_offset, RMS, mode)


def rmsnorm_residual(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    weight_offset: float = 0.0,
    rounding: str = "fp32",
    cast_before_weight: bool = True,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Adds a residual and normalises the sum by its root mean square.

    Equivalent to::

        h = residual.float() + input.float()
        n = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * (weight_offset + weight.float())
        n.to(input.dtype), h.to(input.dtype)

    Args:
        input: [..., H], float32, float16 or bfloat16.
        residual: Like input in shape, dtype and device.
        weight: [H], any of these dtypes; None: no weight.
        eps: Added to the mean square. None: the machine epsilon of float32, as in torch.nn.RMSNorm.
        weight_offset: Added to the weight; 1.0 for Gemma's convention. Without weight it is not used.
        rounding: "fp32" normalises the unrounded sum and rounds each result once. "eager" rounds the sum to the
            input's dtype first, and then as ``rmsnorm`` does.
        cast_before_weight: Where rounding="eager" rounds the norm: True rounds before the weight and after it, as
            LlamaRMSNorm and diffusers' RMSNorm do; False after it alone, as torch.nn.RMSNorm, OLMo 2 and GPT-OSS do.
            With a weight_offset it is after the weight in any case.
        out: Where to write the normalised sum, like input; may be input or residual itself.
        residual_out: Where to write the sum, like input; may be input or residual itself.

    Returns:
        (normalised, sum), contiguous, in the input's dtype; the given tensors where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or an output is given where a gradient is needed.
        ValueError: An unknown ``rounding``.

    Source: the pre-norm residual stream of LlamaDecoderLayer (transformers); arXiv:1910.07467.
    """
    mode = norm_rounding(rounding, cast_before_weight)
    outs = None if out is None and residual_out is None else given_or_new(input, out, residual_out)
    eps = FLOAT32_EPS if eps is None else eps
    return _residual_norm(
        outs, input, residual, None, weight, None, None, None, None, None, None, None, eps, weight_offset, RMS, mode
    )


def layernorm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    rounding: str = "fp32",
    out: Tensor | None = None,
) -> Tensor:
    """Normalises rows to zero mean and unit (biased) variance, which is taken in two passes.

    Equivalent to::

        x = input.float()
        x = x - x.mean(-1, keepdim=True)
        n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float() + bias.float()
        n.to(input.dtype)

    Args:
        input: [..., H], float32, float16 or bfloat16.
        weight: [H], any of these dtypes; None: no weight.
        bias: [H], any of these dtypes; None adds nothing.
        eps: Added to the variance.
        rounding: "fp32" or "eager": the same here, torch's own layer_norm rounds once too.
        out: Where to write, [..., H] like input, of its dtype and device; may be input itself.

    Returns:
        [..., H], contiguous, in the input's dtype; ``out`` where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or ``out`` is given where a gradient is needed.
        ValueError: An unknown ``rounding``.

    Source: Ba, Kiros and Hinton, "Layer Normalization" (arXiv:1607.06450); torch.nn.LayerNorm.
    """
    mode = choice("rounding", ROUNDING, rounding)
    return _norm(out, input, weight, bias, eps, 0.0, LAYER, mode)


def norm_residual(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    gate: Tensor | None = None,
    gate_table: Tensor | None = None,
    index: Tensor | None = None,
    weight_offset: float = 0.0,
    rounding: str = "fp32",
    cast_before_weight: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Normalises a branch by its root mean square, and adds it to the residual stream.

    Equivalent to::

        x = input.float()
        n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight_offset + weight.float())
        (residual.float() + n * (gate_table + gate)).to(input.dtype)

    Args:
        input: [..., H], the branch; float32, float16 or bfloat16.
        residual: Like input in shape, dtype and device.
        weight: [H], any of these dtypes; None: no weight.
        eps: Added to the mean square. None: the machine epsilon of float32, as in torch.nn.RMSNorm.
        gate: [B or 1, H] for an input [B, ..., H], or any shape that broadcasts to the input; any of these dtypes;
            None adds the normalised branch as it is.
        gate_table: [H], added to gate; None adds nothing.
        index: Row numbers, [B, S] for an input [B, S, H] or any shape that broadcasts to it; int64, int32 or bool. Each
            token then reads the row that its number names of gate, which is [rows, H] for all samples or [B, rows, H].
            A number that names no row raises on the CPU; on a GPU it stops the kernel, as in torch. None: no rows to
            choose from.
        weight_offset: Added to the weight; 1.0 for Gemma's convention. Without weight it is not used.
        rounding: "fp32" rounds once, at the end. "eager" rounds the norm as ``rmsnorm`` does, and the gated branch.
        cast_before_weight: Where rounding="eager" rounds the norm: True rounds before the weight and after it, as
            LlamaRMSNorm and diffusers' RMSNorm do; False after it alone, as torch.nn.RMSNorm, OLMo 2 and GPT-OSS do.
            With a weight_offset it is after the weight in any case.
        out: Where to write, [..., H] like input, of its dtype and device; may be input or residual itself.

    Returns:
        [..., H], contiguous, in the input's dtype; ``out`` where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or an output is given where a gradient is needed.
        ValueError: An unknown ``rounding``.

    Source: Olmo2DecoderLayer and Gemma2DecoderLayer (transformers), ``residual + post_attention_layernorm(hidden)``.
    """
    mode = norm_rounding(rounding, cast_before_weight)
    eps = FLOAT32_EPS if eps is None else eps
    return _norm_residual(out, input, residual, weight, gate, gate_table, index, eps, weight_offset, mode)


def norm_gated_residual_norm(
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
    rounding: str = "fp32",
    cast_before_weight: bool = True,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalises a branch, adds it to the residual stream, and normalises and modulates the sum.

    Equivalent to::

        b = rmsnorm(input.float(), weight1, eps1, weight_offset=weight_offset)
        h = residual.float() + b * (gate_table + gate)
        n = rmsnorm(h, weight2, eps2, weight_offset=weight_offset)
        (n * (1 + scale_table + scale) + shift_table + shift).to(input.dtype), h.to(input.dtype)

    Args:
        input: [..., H], the branch; float32, float16 or bfloat16.
        residual: Like input in shape, dtype and device.
        gate: [B or 1, H] for an input [B, ..., H], or any shape that broadcasts to the input; any of these dtypes;
            None adds the normalised branch as it is.
        weight1: [H], of the branch's norm, any of these dtypes; None: no weight.
        eps1: Added to the branch's mean square. None: the machine epsilon of float32, as in torch.nn.RMSNorm.
        weight2: [H], of the sum's norm, any of these dtypes; None: no weight.
        scale: Like gate; None: no scale.
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
        rounding: "fp32" normalises the unrounded sum and rounds each result once. "eager" rounds each norm as
            ``rmsnorm`` does, the gated branch, the sum, and then as ``adaln_rmsnorm`` does.
        cast_before_weight: Where rounding="eager" rounds the norm: True rounds before the weight and after it, as
            LlamaRMSNorm and diffusers' RMSNorm do; False after it alone, as torch.nn.RMSNorm, OLMo 2 and GPT-OSS do.
            With a weight_offset it is after the weight in any case.
        out: Where to write the modulated norm, like input; may be input or residual itself.
        residual_out: Where to write the sum, like input; may be input or residual itself.

    Returns:
        (normalised and modulated, sum), contiguous, in the input's dtype; the given tensors where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or an output is given where a gradient is needed.
        ValueError: An unknown ``rounding``.

    Source: ZImageTransformerBlock and MochiTransformerBlock (diffusers); Gemma2DecoderLayer (transformers).
    """
    mode = norm_rounding(rounding, cast_before_weight)
    outs = None if out is None and residual_out is None else given_or_new(input, out, residual_out)
    eps1 = FLOAT32_EPS if eps1 is None else eps1
    eps2 = FLOAT32_EPS if eps2 is None else eps2
    tables = gate_table, scale_table, shift_table
    tensors = gate, weight1, weight2, scale, shift
    return _norm_residual_norm(outs, input, residual, *tensors, *tables, index, eps1, eps2, weight_offset, mode)
