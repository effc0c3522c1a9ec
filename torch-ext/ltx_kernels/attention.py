"""Attention without a matrix of scores, and cross-attention to a short prompt with the norms of query and key."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled

from . import _formulas
from ._call import op
from ._checks import FLOAT32_EPS, NO_TANGENTS, check_attention, check_type, check_types, is_int8, requires_grad
from ._ops import ops
from ._torch_private import forward_ad, is_func_wrapper
from ._variant import COMPILED_DEVICE, constant_when_compiled

_qk_norm_cross_attention = op("qk_norm_cross_attention")
_attention = op("attention")
_attention_lse = op("attention_lse")
_attention_int8 = op("attention_int8", gradient=False)

_HEAD_DIMS = (64, 128)  # that the kernel is compiled for


@functools.cache
def _has_attention(device: int) -> bool:
    return ops.has_attention(device)


@constant_when_compiled
def _has_code_for(device: torch.device) -> bool:
    return COMPILED_DEVICE == "cuda" and _has_attention(device.index)


def runs_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether ``attention`` runs this package's kernel, and not torch's: heads of 64 or 128 columns in bfloat16 or
    float16, on a Hopper GPU, where no gradient is needed."""
    return (
        query.is_cuda
        and (query.dtype == torch.bfloat16 or query.dtype == torch.float16)
        and query.dim() == 4
        and query.shape[-1] in _HEAD_DIMS
        and _has_code_for(query.device)
        and not (is_grad_enabled() and requires_grad(query, key, value))
    )


def _aligned(x: Tensor) -> Tensor:
    """A tensor for torch's attention, which may give NaN on a GPU where heads do not begin at multiples of 16 bytes
    (torch 2.11, bfloat16). Where its place is not known, under torch.compile and torch.func, it stays as it is."""
    if not x.is_cuda or torch.compiler.is_compiling() or is_func_wrapper(x):
        return x
    steps = [x.storage_offset(), *(x.stride(d) for d in range(3) if x.shape[d] > 1)]
    if all(step * x.element_size() % 16 == 0 for step in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _decided(flag: bool) -> bool:
    """A flag as True or False, which torch's attention needs. With dynamic sizes torch.compile makes a SymBool of a
    flag, which ``bool`` would leave as it is."""
    if flag:  # noqa: SIM103
        return True
    return False


def _torchs_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    scale: float | None,
    is_causal: bool,
) -> Tensor:
    if query.numel() == 0:  # torch's may return None
        nothing = (key.sum() + value.sum()).to(query.dtype) if requires_grad(key, value) else 0
        return query.clone(memory_format=torch.contiguous_format) + nothing  # key and value have gradients of zeros
    q, k, v = (_aligned(x).transpose(1, 2) for x in (query, key, value))
    grouped = _decided(query.shape[2] != key.shape[2])
    mask = _formulas.key_mask(mask, key_lengths, key.shape[1])
    if mask is None:
        output = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=grouped)
        return output.transpose(1, 2).to(query.dtype).contiguous()
    counts = mask if mask.dtype == torch.bool else mask != -math.inf
    addends = (mask if mask.dtype == torch.bool else mask.to(query.dtype))[:, None, None]
    if is_causal:
        # Only lengths come with it, so the mask is bool. A query that sees any key sees the first one.
        addends = addends & _formulas.causal_mask(query, key)
    output = F.scaled_dot_product_attention(q, k, v, addends, scale=scale, enable_gqa=grouped).transpose(1, 2)
    # Some of torch's kernels give other numbers than zeros where no key counts.
    return output.to(query.dtype).where(counts.any(1)[:, None, None, None], 0.0).contiguous()


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    out: Tensor | None = None,
    return_lse: Literal[False] = False,
    precision: str = "native",
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    out: Tensor | None = None,
    return_lse: Literal[True],
    precision: str = "native",
) -> tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    precision: str = "native",
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of every query to every key that counts.

    Equivalent to::

        torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (query, key, value)), mask[:, None, None], is_causal=is_causal, scale=scale,
            enable_gqa=True).transpose(1, 2)

    The package has a kernel for heads of 64 or 128 columns in bfloat16 or float16, on a Hopper GPU (compute capability
    9.0) and where no gradient is needed. Every other call runs the code above. The kernel computes scores, exponentials
    and their sums in float32 and rounds the exponentials to the dtype for their product with the values, as flash
    attention does. NaN, infinities and scores of any size give what they give in torch; with heads of 64 columns in
    bfloat16, values below 2^-66 may lose digits. A row has the same bits whatever other rows, heads and samples the
    call has. One thing makes a difference: calls of at most 192 queries divide their keys among more multiprocessors,
    and may give a row other bits than calls of more queries; with ``is_causal`` they do not. Keys that do not count
    cost almost nothing where they come in runs of 128 or more, as after a padded prompt.

    Args:
        query: [B, S, heads, D]; float32, float16 or bfloat16; any strides.
        key: [B, T, key heads, D] with query's dtype and device; any strides, so also a view of a packed query, key and
            value. The number of heads is a multiple of the number of key heads. Head h of the query uses key head
            h // (heads // key heads), as in grouped-query attention.
        value: Like key.
        mask: [B, T] or [1, T], any strides. bool: which keys count. Any of the float dtypes: added to the scores of a
            key, and -inf leaves the key out. Keys that are left out must be finite.
        key_lengths: [B] int32: how many of the first keys of a sample count. A number below 0 means 0, one above T
            means T. Together with a mask, a key counts where both say so.
        is_causal: Query i sees keys 0 to i alone, whatever S and T are, and of these the keys that count by
            ``key_lengths``. It comes without a mask. Without the kernel, an infinite or NaN value may reach the rows
            before it.
        scale: What the scores are multiplied by; None: D ** -0.5.
        out: Where to write, like query, any strides: for example the first columns of a wider row. It must not
            overlap an input.
        return_lse: Also return the logarithm of each row's sum of exponentials. Without the kernel this computes all
            scores in memory.
        precision: "native" computes with query's dtype. "int8" multiplies query and key as integers of 8 bits, which
            is faster with many tokens and less exact (docs/attention.md has both). Both rows are multiplied by an
            orthogonal matrix first, and the key is taken less the mean of up to 256 of its rows. Each row of the query
            has a scale, and each 80 rows of the key have four. The product with the value stays in query's dtype. This
            is for heads of 128 columns in bfloat16 or float16 and as many key heads as heads, without mask, is_causal,
            return_lse and gradients. On a GPU it needs Hopper; on the CPU plain torch computes the same recipe, to try
            it out.

    Returns:
        [B, S, heads, D] of query's dtype, contiguous; ``out`` where given. Zeros where no key counts. With
        ``return_lse`` a pair: this, and [B, heads, S] float32, the natural logarithm of the sum over the keys of
        exp(scale * score + mask); -inf where no key counts.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), ``is_causal`` comes with a mask, or ``out`` is given where a gradient is needed; with "int8" also a
            GPU without the kernel, a mask, ``is_causal``, ``return_lse``, or a gradient that is needed.
        ValueError: ``precision`` is neither "native" nor "int8".

    Source: scaled_dot_product_attention of torch, called as by LTXVideoAttnProcessor (diffusers). The kernel computes
    in the order of FlashAttention-3 (Shah et al., 2024).
    """
    if forward_ad._current_level >= 0 and not is_grad_enabled():
        raise RuntimeError(NO_TANGENTS)
    if return_lse is not False:
        check_type("return_lse", "bool", return_lse)
    if is_causal is not False:
        check_type("is_causal", "bool", is_causal)
        is_causal = _decided(is_causal)
    if precision != "native" and is_int8(precision, mask, is_causal, return_lse):
        return _attention_int8(out, query, key, value, key_lengths, scale)
    try:
        number: Any = scale
        if isinstance(number, int):
            scale = float(number)  # which fails for what torch's attention cannot take
        needs_gradient = is_grad_enabled() and requires_grad(query, key, value, mask)
        own = not needs_gradient and runs_kernel(query, key, value)
        if not own:
            check_attention(query, key, value, mask, key_lengths, scale=scale, is_causal=is_causal, out=out)
    except Exception:
        options = {"mask": mask, "key_lengths": key_lengths, "scale": scale, "out": out, "return_lse": return_lse}
        check_types(attention, query, key, value, **options)
        raise
    if (query.is_cuda or is_causal) and scale is not None and -math.inf < scale <= 0:
        # The scale is made positive, with the same scores. With a scale of 0 or less torch's attention gives NaN (torch
        # 2.11 in 16 bits on a GPU, 2.13 in causal attention on the CPU), and this package's kernel computes rows twice.
        query, scale = (-query, -scale) if scale < 0 else (0 * query, 1.0)
    arguments = (query, key, value, mask, key_lengths, scale, is_causal)
    if own or (needs_gradient and out is not None):  # which the ops refuse
        if not return_lse:
            return _attention(out, *arguments)
        if out is None:
            return _attention_lse(None, *arguments)
        lse = query.new_empty((query.shape[0], query.shape[2], query.shape[1]), dtype=torch.float32)
        return _attention_lse((out, lse), *arguments)
    if return_lse:
        output, lse = _formulas.attention_with_lse(*arguments)
        return (output if out is None else out.copy_(output)), lse
    output = _torchs_attention(*arguments)
    return output if out is None else out.copy_(output)


def qk_norm_cross_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float | None = 1e-6,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """RMSNorm of query and key over all heads of a token, then attention.

    Equivalent to::

        def normalise(x, weight):                           # x: [B, S, heads, D]
            return torch.nn.functional.rms_norm(x.flatten(-2), (heads * D,), weight, eps).view_as(x)
        q, k = normalise(query, query_weight), normalise(key, key_weight)
        torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, value)), mask[:, None, None], scale=scale).transpose(1, 2)

    The op computes in float32 from the norms to the sums, and does not round the normalised query and key to the dtype
    as this code does. On CUDA a head of 64 or 128 columns in float16 or bfloat16 goes through tensor cores, which take
    the key (times both weights and the scale) and the weights of the values in that dtype.

    Args:
        query: [B, S, heads, D], D at most 256; float32, float16 or bfloat16; any strides.
        key: [B, T, heads, D] with query's dtype and device; any strides, so also a view of a packed key and value.
            Made for few keys (a text); works with any number.
        value: Like key.
        query_weight: [heads * D], any of these dtypes, any stride; None: no weight.
        key_weight: The same for key.
        eps: Added to the mean square. None: the machine epsilon of float32, as in torch.nn.RMSNorm.
        mask: [B, T] or [1, T], any of these dtypes, any strides: added to the scores of a key. -inf leaves the key
            out; finite numbers, however low, do so beside a higher one alone.
        scale: What the scores are multiplied by; None: D ** -0.5.
        out: Where to write, like query, any strides; may be the query itself.

    Returns:
        [B, S, heads, D] of query's dtype, contiguous; ``out`` where given. Zeros where there is no key (T = 0), or the
        mask leaves out every key.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or ``out`` is given where a gradient is needed.

    Source: LTXVideoAttnProcessor (diffusers): norm_q, norm_k, scaled_dot_product_attention.
    """
    eps = FLOAT32_EPS if eps is None else eps
    return _qk_norm_cross_attention(out, query, key, value, query_weight, key_weight, mask, eps, scale)
