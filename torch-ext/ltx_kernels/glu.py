"""Gated linear units, GELU, and gates of attention heads."""

from __future__ import annotations

from torch import Tensor

from ._call import op
from ._checks import APPROXIMATE, INTERLEAVED, ROUNDING, SILU, choice

_glu = op("glu")
_swiglu_clamped = op("swiglu_clamped")
_gate_heads = op("gate_heads")
_gelu = op("gelu")


def geglu(
    input: Tensor,
    up: Tensor | None = None,
    *,
    approximate: str = "tanh",
    gate_first: bool = True,
    rounding: str = "fp32",
    out: Tensor | None = None,
) -> Tensor:
    """GELU of a gate times a linear part, packed in one tensor or given as two.

    Equivalent to::

        gate, up = input.float().chunk(2, -1)     # gate_first=False: up, gate; with up: input, up
        (torch.nn.functional.gelu(gate, approximate=approximate) * up).to(input.dtype)

    Args:
        input: [..., 2N], gate and up side by side; with ``up``: the gate, [..., N]. float32, float16 or bfloat16.
        up: None, or the linear part, like input in shape, dtype and device.
        approximate: "tanh" or "none" (erf, diffusers' GEGLU).
        gate_first: The order in a packed input; diffusers packs (up, gate): False.
        rounding: "fp32" rounds once, at the end; "eager" rounds the activated gate to the input's dtype as well.
        out: Where to write, [..., N], of the input's dtype and device; with ``up`` it may be input or up itself.

    Returns:
        [..., N], contiguous, in the input's dtype; ``out`` where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or ``out`` is given where a gradient is needed.
        ValueError: An unknown ``approximate`` or ``rounding``.

    Source: Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202); diffusers' GEGLU.
    """
    activation = choice("approximate", APPROXIMATE, approximate)
    return _glu(out, input, up, activation, gate_first, choice("rounding", ROUNDING, rounding))


def swiglu(
    input: Tensor,
    up: Tensor | None = None,
    *,
    gate_first: bool = True,
    rounding: str = "fp32",
    out: Tensor | None = None,
) -> Tensor:
    """SiLU of a gate times a linear part, packed in one tensor or given as two.

    Equivalent to::

        gate, up = input.float().chunk(2, -1)     # gate_first=False: up, gate; with up: input, up
        (torch.nn.functional.silu(gate) * up).to(input.dtype)

    Args:
        input: [..., 2N], gate and up side by side; with ``up``: the gate, [..., N]. float32, float16 or bfloat16.
        up: None, or the linear part, like input in shape, dtype and device.
        gate_first: The order in a packed input; diffusers packs (up, gate): False.
        rounding: "fp32" rounds once, at the end; "eager" rounds the activated gate to the input's dtype as well.
        out: Where to write, [..., N], of the input's dtype and device; with ``up`` it may be input or up itself.

    Returns:
        [..., N], contiguous, in the input's dtype; ``out`` where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or ``out`` is given where a gradient is needed.
        ValueError: An unknown ``rounding``.

    Source: Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202); LlamaMLP (transformers).
    """
    return _glu(out, input, up, SILU, gate_first, choice("rounding", ROUNDING, rounding))


def gelu(
    input: Tensor,
    *,
    bias: Tensor | None = None,
    approximate: str = "none",
    rounding: str = "fp32",
    out: Tensor | None = None,
) -> Tensor:
    """GELU, with an optional bias added first.

    Equivalent to::

        torch.nn.functional.gelu(input.float() + bias.float(), approximate=approximate).to(input.dtype)

    Args:
        input: [..., N], float32, float16 or bfloat16.
        bias: [N], any of these dtypes; None adds nothing.
        approximate: "none" (erf) or "tanh".
        rounding: "fp32" rounds once, at the end; "eager" rounds input + bias to the input's dtype as well.
        out: Where to write, [..., N] like input, of its dtype and device; may be input itself.

    Returns:
        [..., N], contiguous, in the input's dtype; ``out`` where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or ``out`` is given where a gradient is needed.
        ValueError: An unknown ``approximate`` or ``rounding``.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (arXiv:1606.08415); torch.nn.functional.gelu.
    """
    activation = choice("approximate", APPROXIMATE, approximate)
    return _gelu(out, input, bias, activation, choice("rounding", ROUNDING, rounding))


def swiglu_clamped(
    input: Tensor,
    up: Tensor | None = None,
    *,
    alpha: float = 1.702,
    limit: float = 7.0,
    layout: str = "interleaved",
    rounding: str = "fp32",
    out: Tensor | None = None,
) -> Tensor:
    """SwiGLU of clamped inputs, with a linear part that is centred at one.

    Equivalent to::

        gate, up = input.float()[..., 0::2], input.float()[..., 1::2]   # layout="half": input.float().chunk(2, -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(input.dtype)

    What lies beyond a limit has no gradient; at a limit itself it has one, as in torch before 2.14.

    Args:
        input: [..., 2N], gate and up in one tensor; with ``up``: the gate, [..., N]. float32, float16 or bfloat16.
        up: None, or the linear part, like input in shape, dtype and device.
        alpha: What the gate is multiplied by inside the sigmoid.
        limit: The largest gate, and the largest magnitude of up; >= 0.
        layout: How gate and up lie in one tensor: "interleaved" as g0, u0, g1, u1, ..., "half" as two halves, the gate
            first.
        rounding: "fp32" rounds once, at the end; "eager" rounds every step to the input's dtype.
        out: Where to write, [..., N], of the input's dtype and device; with ``up`` it may be input or up itself.

    Returns:
        [..., N], contiguous, in the input's dtype; ``out`` where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or ``out`` is given where a gradient is needed.
        ValueError: An unknown ``layout`` or ``rounding``.

    Source: GptOssExperts (transformers): gate_up, alpha 1.702, limit 7.
    """
    interleaved = choice("layout", INTERLEAVED, layout)
    return _swiglu_clamped(out, input, up, alpha, limit, interleaved, choice("rounding", ROUNDING, rounding))


def gate_heads(
    input: Tensor, logits: Tensor, scale: float = 1.0, *, rounding: str = "fp32", out: Tensor | None = None
) -> Tensor:
    """Gates the heads of an attention's output.

    Equivalent to::

        gate = scale * torch.sigmoid(logits.float())
        gate = gate[..., None] if gate.shape[-1] == heads else gate.unflatten(-1, (heads, D))
        (input.float() * gate).to(input.dtype)

    Args:
        input: [..., heads, D], float32, float16 or bfloat16; any strides.
        logits: [..., heads], a gate for each head (LTX-2.3, with a scale of 2), or [..., heads * D], a gate for each
            column (Krea 2); input's leading sizes, dtype and device; any strides, so also columns of a wider product.
        scale: What the gates are multiplied by.
        rounding: "fp32" rounds once, at the end; "eager" rounds the sigmoid and the scaled gate as well.
        out: Where to write, like input; may be input itself.

    Returns:
        [..., heads, D], contiguous, in the input's dtype; ``out`` where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or ``out`` is given where a gradient is needed.
        ValueError: An unknown ``rounding``.

    Source: LTX2Attention (diffusers): to_gate_logits.
    """
    return _gate_heads(out, input, logits, scale, choice("rounding", ROUNDING, rounding))
