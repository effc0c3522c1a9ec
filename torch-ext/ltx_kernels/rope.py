"""Rotary position embeddings: angles computed on the way, tables given, and fused with the norm of query and key."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ._call import op
from ._checks import FLOAT32_EPS, INTERLEAVED, ROUNDING, STATISTIC, choice, eps_pair, heads, rope_axes, table_pair

_rope = op("rope", grid=("num_frames", "height", "width"))
_apply_rotary = op("apply_rotary")
_apply_rotary_qk = op("apply_rotary_qk")
_qk_norm_rope = op("qk_norm_rope")

Pair = tuple[Tensor, Tensor]


def rope_1d(
    query: Tensor,
    key: Tensor,
    theta_base: float = 10000.0,
    *,
    layout: str = "interleaved",
    positions: Tensor | None = None,
    out: Pair | None = None,
) -> Pair:
    """Rotates query and key by angles of their position in the sequence.

    Equivalent to::

        inverse_frequency = (1 / theta_base ** (torch.arange(0, D, 2).double() / D)).float()
        angle = positions.float()[..., None, None] * inverse_frequency      # positions: arange(S) if None
        a, b = x[..., 0::2], x[..., 1::2]                   # layout="half": x[..., :D // 2], x[..., D // 2:]
        a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()    # in the places of a and b

    Args:
        query: [B, S, heads, D], D even and at most 1024; float32, float16 or bfloat16; any strides.
        key: [B, S, heads, D] with query's B, D, dtype and device, heads and (without positions) S of its own.
        theta_base: The base of the frequencies, > 0.
        layout: "interleaved" pairs elements (2i, 2i + 1), "half" pairs (i, i + D / 2), as rotate-half does.
        positions: [S] or [B or 1, S], int64, int32 or float32, shared by query and key; None: 0, 1, ..., S - 1.
        out: (query, key) to write into, each like its input; may be the inputs themselves.

    Returns:
        (query, key), each in the shape, dtype and memory order of its input; ``out`` where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or ``out`` is given where a gradient is needed.
        ValueError: An unknown ``layout``.

    Source: Su et al., "RoFormer" (arXiv:2104.09864); LlamaRotaryEmbedding (transformers).
    """
    interleaved = choice("layout", INTERLEAVED, layout)
    tokens, width = heads("query", query)
    return _rope(out, query, key, positions, (tokens,), (width,), (theta_base,), interleaved)


def rope_3d(
    query: Tensor,
    key: Tensor,
    num_frames: int,
    height: int,
    width: int,
    theta_base: float | Sequence[float] = 10000.0,
    *,
    rope_dims: Sequence[int] | None = None,
    layout: str = "interleaved",
    out: Pair | None = None,
) -> Pair:
    """Rotates query and key of a video by angles of their place in time, height and width.

    Equivalent to::

        t, h, w = torch.cartesian_prod(arange(num_frames), arange(height), arange(width)).unbind(-1)
        angle = torch.cat([                                 # for the axes t, h, w with d = rope_dims[axis] channels
            axis.float()[:, None, None] / theta_base ** (torch.arange(0, d, 2) / d) for axis, d in ...], -1)
        a, b = x[..., 0::2], x[..., 1::2]                   # layout="half": x[..., :D // 2], x[..., D // 2:]
        a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()    # in the places of a and b

    Args:
        query: [B, num_frames * height * width, heads, D], frames slowest; D even and at most 1024; float32, float16
            or bfloat16; any strides.
        key: Like query, with heads of its own.
        num_frames: Frames (of the latent video, not of the clip).
        height: Rows of tokens in a frame.
        width: Tokens in a row.
        theta_base: The base of the frequencies, > 0: one for all axes, or three (t, h, w).
        rope_dims: Channels of the axes (t, h, w), even, D in sum. None: 2 * (D // 3 // 2) for t and h, the rest for w.
        layout: "interleaved" pairs elements (2i, 2i + 1), "half" pairs (i, i + D / 2). Pairs are dealt to t, h and w
            in this order.
        out: (query, key) to write into, each like its input; may be the inputs themselves.

    Returns:
        (query, key), each in the shape, dtype and memory order of its input; ``out`` where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or ``out`` is given where a gradient is needed.
        ValueError: An unknown ``layout``, or other than three ``rope_dims`` or one or three ``theta_base``.

    Source: the axis split of CogVideoX and Wan (get_3d_rotary_pos_embed, WanRotaryPosEmbed of diffusers).
    """
    interleaved = choice("layout", INTERLEAVED, layout)
    dims, theta = rope_axes(query, rope_dims, theta_base)
    return _rope(out, query, key, None, (num_frames, height, width), dims, theta, interleaved)


def apply_rotary(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    sequence_dim: int = 1,
    rotary_dim: int | None = None,
    layout: str = "interleaved",
    rounding: str = "fp32",
    out: Tensor | None = None,
) -> Tensor:
    """Rotates a query or a key by the angles of a table.

    Equivalent to::

        a, b = x[..., 0::2], x[..., 1::2]                   # layout="half": x[..., :D // 2], x[..., D // 2:]
        a * cos_a - b * sin_a, b * cos_b + a * sin_b        # in the places of a and b

    where cos_a, cos_b are the entries of a full-width table at the places of a and b, and both cos for a half-width
    table. Columns past rotary_dim pass through.

    Args:
        input: [B, S, heads, D], [B, heads, S, D], [B, S, D] or [S, D], by sequence_dim; D even; float32, float16 or
            bfloat16; any strides.
        cos: [S, W], [B, S, W], [B, heads, S, W] or [B, S, heads, W], any leading size may be 1, any strides; float32
            or the input's dtype. Where S and heads are equal, four dimensions are [B, heads, S, W]. W is D, or D / 2
            with one entry per pair; heads * D or half of it where every head has its own angles ([S, W] or
            [B, S, W]); or an even number below D, which is then rotary_dim.
        sin: Like cos in shape and dtype.
        sequence_dim: Which dimension of input is S: 1, or 2 for [B, heads, S, D], or 0 for [S, D] and [S, heads, D];
            negative counts from the end.
        rotary_dim: How many columns of each head turn, where the width of the table does not say; None: it says.
        layout: "interleaved" pairs elements (2i, 2i + 1), "half" pairs (i, i + rotary_dim / 2), as rotate-half does.
        rounding: "fp32" rounds once, at the end; "eager" rounds products and sum to the promoted dtype of input and
            table, as apply_rotary_pos_emb does.
        out: Where to write, like input; may be input itself.

    Returns:
        The shape, dtype and memory order of input; ``out`` where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or ``out`` is given where a gradient is needed.
        ValueError: An unknown ``layout`` or ``rounding``.

    Source: apply_rotary_emb (diffusers: interleaved), apply_rotary_pos_emb (transformers: half); arXiv:2104.09864.
    """
    interleaved = choice("layout", INTERLEAVED, layout)
    mode = choice("rounding", ROUNDING, rounding)
    return _apply_rotary(out, input, cos, sin, sequence_dim, 0 if rotary_dim is None else rotary_dim, interleaved, mode)


def apply_rotary_qk(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    sequence_dim: int = 1,
    rotary_dim: int | None = None,
    layout: str = "interleaved",
    rounding: str = "fp32",
    out: Pair | None = None,
) -> Pair:
    """Rotates query and key by the angles of one table, in one launch.

    Equivalent to::

        apply_rotary(query, cos[:Sq], sin[:Sq]), apply_rotary(key, cos[:Sk], sin[:Sk])

    Args:
        query: As the input of ``apply_rotary``.
        key: Like query in rank, B, D, dtype and device, with S and heads of its own.
        cos: As in ``apply_rotary``, with max(Sq, Sk) rows: the shorter of query and key uses the first ones.
        sin: Like cos in shape and dtype.
        sequence_dim: As in ``apply_rotary``.
        rotary_dim: As in ``apply_rotary``.
        layout: As in ``apply_rotary``.
        rounding: As in ``apply_rotary``.
        out: (query, key) to write into, each like its input; may be the inputs themselves.

    Returns:
        (query, key), each in the shape, dtype and memory order of its input; ``out`` where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or ``out`` is given where a gradient is needed.
        ValueError: An unknown ``layout`` or ``rounding``.

    Source: apply_rotary_pos_emb (transformers); arXiv:2104.09864.
    """
    interleaved = choice("layout", INTERLEAVED, layout)
    mode = choice("rounding", ROUNDING, rounding)
    return _apply_rotary_qk(
        out, query, key, cos, sin, sequence_dim, 0 if rotary_dim is None else rotary_dim, interleaved, mode
    )


def qk_norm_rope(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor | Pair,
    sin: Tensor | Pair,
    eps: float | Sequence[float | None] | None = 1e-6,
    *,
    across_heads: bool,
    norm: str = "rms",
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
    rotary_dim: int | None = None,
    layout: str = "interleaved",
    rounding: str = "fp32",
    out: Pair | None = None,
) -> Pair:
    """The norm of query and key, then their rotation, in one launch.

    Rows whose table has cos = 1 and sin = 0 are normalised and not rotated. The two streams of a joint attention, each
    with weights of its own, take a call each, on the rows of one buffer that belong to the stream.

    Equivalent to::

        def normalise(x, weight, bias):                     # x: [B, S, heads, D]
            n = x.flatten(-2) if across_heads else x
            if norm == "rms":
                n = torch.nn.functional.rms_norm(n, n.shape[-1:], weight_offset + weight, eps)
            else:
                n = torch.nn.functional.layer_norm(n, n.shape[-1:], weight_offset + weight, bias, eps)
            return n.view(B, S, heads, D)
        apply_rotary(normalise(query, query_weight, query_bias), cos, sin)
        apply_rotary(normalise(key, key_weight, key_bias), cos, sin)

    Args:
        query: [B, S, heads, D], D even; float32, float16 or bfloat16; any strides, so also a view of a packed qkv.
        key: Like query in B, D, dtype and device, with S and heads of its own.
        query_weight: [heads * D] with across_heads, else [D]; any of these dtypes; None: no weight.
        key_weight: The same for key and its heads.
        cos: A table as in ``apply_rotary`` for query and key, or a (query, key) pair of tables. One table has
            max(Sq, Sk) rows: the shorter of query and key uses the first ones.
        sin: Like cos in shape and dtype; a pair where cos is one.
        eps: Added to the mean square, or to the variance of a layer norm. None: the machine epsilon of float32, as in
            torch.nn.RMSNorm. A (query, key) pair where the two differ.
        across_heads: The mean is taken over all heads of a token (LTX-Video, Wan) instead of over each (FLUX, Qwen3).
        norm: "rms" or "layer" (CogVideoX, Phi).
        query_bias: Like query_weight, of a layer norm; None adds nothing.
        key_bias: Like key_weight, of a layer norm; None adds nothing.
        weight_offset: Added to the weights; 1.0 where a model stores weight - 1 (Gemma 3, Qwen3-Next, Krea 2).
        cast_before_weight: Where rounding="eager" rounds an rms norm: True rounds to the input's dtype before the
            weight as well (diffusers' RMSNorm, Llama, Qwen3), False once after it (torch.nn.RMSNorm, Gemma, OLMo 2).
        rotary_dim: As in ``apply_rotary``.
        layout: As in ``apply_rotary``.
        rounding: "fp32" rounds once, at the end; "eager" rounds the normalised and weighted value to the input's dtype
            (``cast_before_weight`` says how often), and then as ``apply_rotary`` does.
        out: (query, key) to write into, each like its input; may be the inputs themselves.

    Returns:
        (query, key), each in the shape, dtype and memory order of its input; ``out`` where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or ``out`` is given where a gradient is needed.
        ValueError: An unknown ``layout``, ``norm`` or ``rounding``, or a pair of other than two numbers.

    Source: LTXVideoAttnProcessor, FluxAttnProcessor and CogVideoXAttnProcessor2_0 (diffusers): norm_q, norm_k,
        apply_rotary_emb.
    """
    interleaved = choice("layout", INTERLEAVED, layout)
    mode = choice("rounding", ROUNDING, rounding)
    statistic = choice("norm", STATISTIC, norm)
    query_eps, key_eps = eps_pair(eps, FLOAT32_EPS)
    query_cos, key_cos = table_pair("cos", cos)
    query_sin, key_sin = table_pair("sin", sin)
    return _qk_norm_rope(
        out,
        query,
        key,
        query_weight,
        key_weight,
        query_bias,
        key_bias,
        query_cos,
        query_sin,
        key_cos,
        key_sin,
        query_eps,
        key_eps,
        weight_offset,
        statistic,
        across_heads,
        cast_before_weight,
        0 if rotary_dim is None else rotary_dim,
        interleaved,
        mode,
    )
