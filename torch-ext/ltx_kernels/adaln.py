"""Adaptive norms of diffusion transformers: norm, modulation and gated residual in one pass.

Throughout, a modulation input (scale, shift, gate) is a float tensor of any strides. With two dimensions beside an
input of three or more it is [B or 1, H], one vector per batch; otherwise it broadcasts to the input as in torch. Its
table is an optional [H] that is added to it on the way, as AdaLN-single does (PixArt, LTX-Video).

With ``index`` all modulation inputs of a call are sets of rows, and each token reads the rows that its number names.
This is for tokens of a few kinds. Qwen-Image-Edit, for example, modulates the tokens of its input image and the tokens
of the new image differently. No tensor with a modulation for each token is made.
"""

from __future__ import annotations

from torch import Tensor

from ._call import given_or_new, op
from ._checks import FLOAT32_EPS, LAYER, RMS, ROUNDING, choice

_adaln_norm = op("adaln_norm")
_residual_norm = op("residual_norm")
_gated_residual = op("gated_residual")
_adaln_norm_pair = op("adaln_norm_pair")
_residual_norm_pair = op("residual_norm_pair")


def adaln_rmsnorm(
    input: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    shift: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    scale_table: Tensor | None = None,
    shift_table: Tensor | None = None,
    index: Tensor | None = None,
    rounding: str = "fp32",
    out: Tensor | None = None,
) -> Tensor:
    """RMSNorm, then scale and shift.

    Equivalent to::

        x = input.float()
        n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
        (n * (1 + scale_table + scale) + shift_table + shift).to(input.dtype)

    Args:
        input: [..., H], float32, float16 or bfloat16.
        weight: [H], any of these dtypes; None: no weight.
        scale: [B or 1, H] for an input [B, ..., H], or any shape that broadcasts to the input; any of these dtypes.
        shift: Like scale, independent of its shape and dtype; None adds nothing.
        eps: Added to the mean square. None: the machine epsilon of float32, as in torch.nn.RMSNorm.
        scale_table: [H], added to scale; None adds nothing.
        shift_table: [H], added to shift; None adds nothing.
        index: Row numbers, [B, S] for an input [B, S, H] or any shape that broadcasts to it; int64, int32 or bool. Each
            token then reads the row that its number names of scale and shift, which are [rows, H] for all samples or
            [B, rows, H]. A number that names no row raises on the CPU; on a GPU it stops the kernel, as in torch. None:
            no rows to choose from.
        rounding: "fp32" rounds once, at the end. "eager" rounds where diffusers' blocks do: the normalised value, the
            product with the weight, the sums with the tables, 1 + scale, the product and the sum.
        out: Where to write, [..., H] like input, of its dtype and device; may be input itself.

    Returns:
        [..., H], contiguous, in the input's dtype; ``out`` where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or ``out`` is given where a gradient is needed.
        ValueError: An unknown ``rounding``.

    Source: LTXVideoTransformerBlock (diffusers); adaptive norms of DiT, Peebles and Xie (arXiv:2212.09748).
    """
    mode = choice("rounding", ROUNDING, rounding)
    eps = FLOAT32_EPS if eps is None else eps
    return _adaln_norm(
        out, input, weight, None, scale, shift, None, scale_table, shift_table, None, index, eps, RMS, mode
    )


def adaln_layernorm(
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
    rounding: str = "fp32",
    out: Tensor | None = None,
) -> Tensor:
    """LayerNorm, then scale and shift.

    Equivalent to::

        n = torch.nn.functional.layer_norm(input.float(), (H,), weight, bias, eps)
        (n * (1 + scale_table + scale) + shift_table + shift).to(input.dtype)

    Args:
        input: [..., H], float32, float16 or bfloat16.
        weight: [H], any of these dtypes; None: no weight.
        scale: [B or 1, H] for an input [B, ..., H], or any shape that broadcasts to the input; any of these dtypes.
        shift: Like scale, independent of its shape and dtype; None adds nothing.
        bias: [H], any of these dtypes, added before the modulation; None adds nothing.
        eps: Added to the variance.
        scale_table: [H], added to scale; None adds nothing.
        shift_table: [H], added to shift; None adds nothing.
        index: Row numbers, [B, S] for an input [B, S, H] or any shape that broadcasts to it; int64, int32 or bool. Each
            token then reads the row that its number names of scale and shift, which are [rows, H] for all samples or
            [B, rows, H]. A number that names no row raises on the CPU; on a GPU it stops the kernel, as in torch. None:
            no rows to choose from.
        rounding: "fp32" rounds once, at the end. "eager" rounds where diffusers' blocks do: the normalised value, the
            sums with the tables, 1 + scale, the product and the sum.
        out: Where to write, [..., H] like input, of its dtype and device; may be input itself.

    Returns:
        [..., H], contiguous, in the input's dtype; ``out`` where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or ``out`` is given where a gradient is needed.
        ValueError: An unknown ``rounding``.

    Source: DiT, Peebles and Xie (arXiv:2212.09748); diffusers' AdaLayerNormZero and AdaLayerNormContinuous.
    """
    mode = choice("rounding", ROUNDING, rounding)
    return _adaln_norm(
        out, input, weight, bias, scale, shift, None, scale_table, shift_table, None, index, eps, LAYER, mode
    )


def adaln_zero(
    input: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    shift: Tensor | None,
    gate: Tensor,
    eps: float | None = 1e-6,
    *,
    scale_table: Tensor | None = None,
    shift_table: Tensor | None = None,
    gate_table: Tensor | None = None,
    index: Tensor | None = None,
    rounding: str = "fp32",
    out: Tensor | None = None,
) -> Tensor:
    """RMSNorm, then scale, shift and gate.

    Equivalent to::

        x = input.float()
        n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
        ((n * (1 + scale_table + scale) + shift_table + shift) * (gate_table + gate)).to(input.dtype)

    Args:
        input: [..., H], float32, float16 or bfloat16.
        weight: [H], any of these dtypes; None: no weight.
        scale: [B or 1, H] for an input [B, ..., H], or any shape that broadcasts to the input; any of these dtypes.
        shift: Like scale, independent of its shape and dtype; None adds nothing.
        gate: Like scale, independent of its shape and dtype.
        eps: Added to the mean square. None: the machine epsilon of float32, as in torch.nn.RMSNorm.
        scale_table: [H], added to scale; None adds nothing.
        shift_table: [H], added to shift; None adds nothing.
        gate_table: [H], added to gate; None adds nothing.
        index: Row numbers, [B, S] for an input [B, S, H] or any shape that broadcasts to it; int64, int32 or bool. Each
            token then reads the row that its number names of gate, scale and shift, which are [rows, H] for all samples
            or [B, rows, H]. A number that names no row raises on the CPU; on a GPU it stops the kernel, as in torch.
            None: no rows to choose from.
        rounding: "fp32" rounds once, at the end; "eager" rounds every step, as in ``adaln_rmsnorm``.
        out: Where to write, [..., H] like input, of its dtype and device; may be input itself.

    Returns:
        [..., H], contiguous, in the input's dtype; ``out`` where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or ``out`` is given where a gradient is needed.
        ValueError: An unknown ``rounding``.

    Source: adaLN-Zero of DiT, Peebles and Xie (arXiv:2212.09748), on RMSNorm.
    """
    mode = choice("rounding", ROUNDING, rounding)
    eps = FLOAT32_EPS if eps is None else eps
    return _adaln_norm(
        out, input, weight, None, scale, shift, gate, scale_table, shift_table, gate_table, index, eps, RMS, mode
    )


def gated_residual(
    input: Tensor,
    residual: Tensor,
    gate: Tensor,
    *,
    gate_table: Tensor | None = None,
    index: Tensor | None = None,
    rounding: str = "fp32",
    out: Tensor | None = None,
) -> Tensor:
    """Adds a gated branch to the residual stream.

    Equivalent to::

        (residual.float() + input.float() * (gate_table + gate)).to(input.dtype)

    Args:
        input: [..., H], the branch; float32, float16 or bfloat16.
        residual: Like input in shape, dtype and device.
        gate: [B or 1, H] for an input [B, ..., H], or any shape that broadcasts to the input; any of these dtypes.
        gate_table: [H], added to gate; None adds nothing.
        index: Row numbers, [B, S] for an input [B, S, H] or any shape that broadcasts to it; int64, int32 or bool. Each
            token then reads the row that its number names of gate, which is [rows, H] for all samples or [B, rows, H].
            A number that names no row raises on the CPU; on a GPU it stops the kernel, as in torch. None: no rows to
            choose from.
        rounding: "fp32" rounds once, at the end; "eager" rounds the sum with the table and the product as well.
        out: Where to write, [..., H] like input, of its dtype and device; may be input or residual itself.

    Returns:
        [..., H], contiguous, in the input's dtype; ``out`` where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or ``out`` is given where a gradient is needed.
        ValueError: An unknown ``rounding``.

    Source: LTXVideoTransformerBlock (diffusers), ``hidden_states + attn_hidden_states * gate_msa``.
    """
    mode = choice("rounding", ROUNDING, rounding)
    return _gated_residual(out, input, residual, gate, gate_table, index, mode)


def gated_residual_adaln_rmsnorm(
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
    rounding: str = "fp32",
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Adds a gated branch to the residual stream, and normalises (RMSNorm) and modulates the sum.

    Equivalent to::

        h = residual.float() + input.float() * (gate_table + gate)
        n = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight
        (n * (1 + scale_table + scale) + shift_table + shift).to(input.dtype), h.to(input.dtype)

    Args:
        input: [..., H], the branch; float32, float16 or bfloat16.
        residual: Like input in shape, dtype and device.
        gate: [B or 1, H] for an input [B, ..., H], or any shape that broadcasts to the input; any of these dtypes;
            None adds the branch as it is.
        weight: [H], any of these dtypes; None: no weight.
        scale: Like gate; None: no scale.
        shift: Like gate; None adds nothing.
        eps: Added to the mean square. None: the machine epsilon of float32, as in torch.nn.RMSNorm.
        gate_table: [H], added to gate; None adds nothing.
        scale_table: [H], added to scale; None adds nothing.
        shift_table: [H], added to shift; None adds nothing.
        index: Row numbers, [B, S] for an input [B, S, H] or any shape that broadcasts to it; int64, int32 or bool. Each
            token then reads the row that its number names of gate, scale and shift, which are [rows, H] for all samples
            or [B, rows, H]. A number that names no row raises on the CPU; on a GPU it stops the kernel, as in torch.
            None: no rows to choose from.
        rounding: "fp32" normalises the unrounded sum and rounds each result once. "eager" rounds the gated branch and
            the sum as well, normalises the rounded sum, and then rounds as ``adaln_rmsnorm`` does.
        out: Where to write the modulated norm, like input; may be input or residual itself.
        residual_out: Where to write the sum, like input; may be input or residual itself.

    Returns:
        (normalised and modulated, sum), contiguous, in the input's dtype; the given tensors where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or an output is given where a gradient is needed.
        ValueError: An unknown ``rounding``.

    Source: LTXVideoTransformerBlock (diffusers), from the gate of attention to the modulation of the feed-forward.
    """
    mode = choice("rounding", ROUNDING, rounding)
    eps = FLOAT32_EPS if eps is None else eps
    outs = None if out is None and residual_out is None else given_or_new(input, out, residual_out)
    tables = gate_table, scale_table, shift_table
    return _residual_norm(outs, input, residual, gate, weight, None, scale, shift, *tables, index, eps, 0.0, RMS, mode)


def gated_residual_adaln_layernorm(
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
    rounding: str = "fp32",
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Adds a gated branch to the residual stream, and normalises (LayerNorm) and modulates the sum.

    Equivalent to::

        h = residual.float() + input.float() * (gate_table + gate)
        n = torch.nn.functional.layer_norm(h, (H,), weight, bias, eps)
        (n * (1 + scale_table + scale) + shift_table + shift).to(input.dtype), h.to(input.dtype)

    Args:
        input: [..., H], the branch; float32, float16 or bfloat16.
        residual: Like input in shape, dtype and device.
        gate: [B or 1, H] for an input [B, ..., H], or any shape that broadcasts to the input; any of these dtypes;
            None adds the branch as it is.
        weight: [H], any of these dtypes; None: no weight.
        scale: Like gate; None: no scale.
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
        rounding: "fp32" normalises the unrounded sum and rounds each result once. "eager" rounds the gated branch and
            the sum as well, normalises the rounded sum, and then rounds as ``adaln_layernorm`` does.
        out: Where to write the modulated norm, like input; may be input or residual itself.
        residual_out: Where to write the sum, like input; may be input or residual itself.

    Returns:
        (normalised and modulated, sum), contiguous, in the input's dtype; the given tensors where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or an output is given where a gradient is needed.
        ValueError: An unknown ``rounding``.

    Source: FluxTransformerBlock, JointTransformerBlock (SD3) and WanTransformerBlock of diffusers.
    """
    mode = choice("rounding", ROUNDING, rounding)
    outs = None if out is None and residual_out is None else given_or_new(input, out, residual_out)
    tables = gate_table, scale_table, shift_table
    return _residual_norm(
        outs, input, residual, gate, weight, bias, scale, shift, *tables, index, eps, 0.0, LAYER, mode
    )


def adaln_rmsnorm_pair(
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
    rounding: str = "fp32",
    out: Tensor | None = None,
    out2: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """RMSNorm with two modulations: one pass over the rows for both results.

    Equivalent to::

        x = input.float()
        n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
        first = n * (1 + scale_table + scale) + shift_table + shift
        second = n * (1 + scale2_table + scale2) + shift2_table + shift2
        first.to(input.dtype), second.to(input.dtype)

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
        rounding: "fp32" rounds each result once, at the end; "eager" rounds as ``adaln_rmsnorm`` does.
        out: Where to write the first result, like input; may be input itself.
        out2: Where to write the second result, like input; may be input itself.

    Returns:
        (first, second), contiguous, in the input's dtype; the given tensors where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or an output is given where a gradient is needed.
        ValueError: An unknown ``rounding``.

    Source: LTX2VideoTransformerBlock (diffusers), from the attention to text to both attentions to the other stream.
    """
    mode = choice("rounding", ROUNDING, rounding)
    outs = None if out is None and out2 is None else given_or_new(input, out, out2)
    eps = FLOAT32_EPS if eps is None else eps
    tables = scale_table, shift_table, scale2_table, shift2_table
    tensors = weight, None, scale, shift, scale2, shift2
    return _adaln_norm_pair(outs, input, *tensors, *tables, index, eps, RMS, mode)


def adaln_layernorm_pair(
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
    rounding: str = "fp32",
    out: Tensor | None = None,
    out2: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """LayerNorm with two modulations: one pass over the rows for both results.

    Equivalent to::

        n = torch.nn.functional.layer_norm(input.float(), (H,), weight, bias, eps)
        first = n * (1 + scale_table + scale) + shift_table + shift
        second = n * (1 + scale2_table + scale2) + shift2_table + shift2
        first.to(input.dtype), second.to(input.dtype)

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
        rounding: "fp32" rounds each result once, at the end; "eager" rounds as ``adaln_layernorm`` does.
        out: Where to write the first result, like input; may be input itself.
        out2: Where to write the second result, like input; may be input itself.

    Returns:
        (first, second), contiguous, in the input's dtype; the given tensors where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or an output is given where a gradient is needed.
        ValueError: An unknown ``rounding``.

    Source: SD35AdaLayerNormZeroX (diffusers), whose block has two attentions.
    """
    mode = choice("rounding", ROUNDING, rounding)
    outs = None if out is None and out2 is None else given_or_new(input, out, out2)
    tables = scale_table, shift_table, scale2_table, shift2_table
    tensors = weight, bias, scale, shift, scale2, shift2
    return _adaln_norm_pair(outs, input, *tensors, *tables, index, eps, LAYER, mode)


def gated_residual_adaln_rmsnorm_pair(
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
    rounding: str = "fp32",
    out: Tensor | None = None,
    out2: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds a gated branch to the residual stream, and normalises (RMSNorm) the sum, with two modulations.

    Equivalent to::

        h = residual.float() + input.float() * (gate_table + gate)
        n = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight
        first = n * (1 + scale_table + scale) + shift_table + shift
        second = n * (1 + scale2_table + scale2) + shift2_table + shift2
        first.to(input.dtype), second.to(input.dtype), h.to(input.dtype)

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
        rounding: "fp32" rounds each result once, at the end; "eager" rounds as ``gated_residual_adaln_rmsnorm`` does.
        out: Where to write the first result, like input; may be input or residual itself.
        out2: Where to write the second result, like input; may be input or residual itself.
        residual_out: Where to write the sum, like input; may be input or residual itself.

    Returns:
        (first, second, sum), contiguous, in the input's dtype; the given tensors where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or an output is given where a gradient is needed.
        ValueError: An unknown ``rounding``.

    Source: LTX2VideoTransformerBlock (diffusers), from the attention to text to both attentions to the other stream.
    """
    mode = choice("rounding", ROUNDING, rounding)
    outs = (
        None if out is None and out2 is None and residual_out is None else given_or_new(input, out, out2, residual_out)
    )
    eps = FLOAT32_EPS if eps is None else eps
    tables = gate_table, scale_table, shift_table, scale2_table, shift2_table
    tensors = gate, weight, None, scale, shift, scale2, shift2
    return _residual_norm_pair(outs, input, residual, *tensors, *tables, index, eps, RMS, mode)


def gated_residual_adaln_layernorm_pair(
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
    rounding: str = "fp32",
    out: Tensor | None = None,
    out2: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds a gated branch to the residual stream, and normalises (LayerNorm) the sum, with two modulations.

    Equivalent to::

        h = residual.float() + input.float() * (gate_table + gate)
        n = torch.nn.functional.layer_norm(h, (H,), weight, bias, eps)
        first = n * (1 + scale_table + scale) + shift_table + shift
        second = n * (1 + scale2_table + scale2) + shift2_table + shift2
        first.to(input.dtype), second.to(input.dtype), h.to(input.dtype)

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
        rounding: "fp32" rounds each result once, at the end; "eager" rounds as ``gated_residual_adaln_layernorm`` does.
        out: Where to write the first result, like input; may be input or residual itself.
        out2: Where to write the second result, like input; may be input or residual itself.
        residual_out: Where to write the sum, like input; may be input or residual itself.

    Returns:
        (first, second, sum), contiguous, in the input's dtype; the given tensors where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or an output is given where a gradient is needed.
        ValueError: An unknown ``rounding``.

    Source: SD35AdaLayerNormZeroX (diffusers), whose block has two attentions.
    """
    mode = choice("rounding", ROUNDING, rounding)
    outs = (
        None if out is None and out2 is None and residual_out is None else given_or_new(input, out, out2, residual_out)
    )
    tables = gate_table, scale_table, shift_table, scale2_table, shift2_table
    tensors = gate, weight, bias, scale, shift, scale2, shift2
    return _residual_norm_pair(outs, input, residual, *tensors, *tables, index, eps, LAYER, mode)
