"""Attention: of any heads, and to few keys, such as the tokens of a prompt, with the norm of query and key."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled

from ._call import op
from ._checks import FLOAT32_EPS, check_attention, check_types, requires_grad
from ._ops import ops
from ._variant import COMPILED_DEVICE, constant_when_compiled

_qk_norm_cross_attention = op("qk_norm_cross_attention")
_attention = ops.attention.default


@functools.cache
def _has_attention(device: int) -> bool:
    return ops.has_attention(device)


@constant_when_compiled
def _has_code_for(device: torch.device) -> bool:
    return COMPILED_DEVICE == "cuda" and _has_attention(device.index)


def runs_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether ``attention`` runs this package's kernel, and not torch's."""
    return (
        query.is_cuda
        and query.dtype == torch.bfloat16
        and query.dim() == 4
        and query.shape[-1] == 64
        and _has_code_for(query.device)
        and not (is_grad_enabled() and requires_grad(query, key, value))
    )


def _aligned(x: Tensor) -> Tensor:
    """A tensor for torch's attention, which may give NaN on a GPU where heads do not begin at multiples of 16 bytes
    (torch 2.11, bfloat16). Where its place is not known, under torch.compile and torch.func, it stays as it is."""
    if not x.is_cuda or torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return x
    steps = [x.storage_offset(), *(x.stride(d) for d in range(3) if x.shape[d] > 1)]
    if all(step * x.element_size() % 16 == 0 for step in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None) -> Tensor:
    """Softmax attention of every query to every key.

    Equivalent to::

        torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (query, key, value)), scale=scale).transpose(1, 2)

    which is what runs, too, but for heads of 64 columns in bfloat16 on a Hopper GPU (compute capability 9.0) where no
    gradient is needed: these have a kernel of this package. It computes scores, exponentials and their sums in float32
    and rounds the exponentials to bfloat16 for their product with the values, as flash attention does. NaN, infinities
    and scores of any size give what they give in torch; values below 2^-66 may lose digits. It is made for many
    queries: a few leave most of the GPU idle, however many keys they have.

    Args:
        query: [B, S, heads, D]; float32, float16 or bfloat16; any strides.
        key: [B, T, heads, D] with query's dtype and device; any strides, so also a view of a packed query, key and
            value.
        value: Like key.
        scale: What the scores are multiplied by; None: D ** -0.5.

    Returns:
        [B, S, heads, D] of query's dtype, contiguous. Zeros where there is no key (T = 0).

    Raises:
        RuntimeError: A shape, dtype or device does not fit; the text names the argument, what was expected and what
            came.

    Source: scaled_dot_product_attention of torch, called as by LTXVideoAttnProcessor (diffusers).
    """
    try:
        own = runs_kernel(query, key, value)
        if not own:
            check_attention(query, key, value, scale=scale)
    except Exception:
        check_types(attention, query, key, value, scale=scale)
        raise
    if query.is_cuda and scale is not None and -math.inf < scale <= 0:
        # The same scores by a positive scale: with another one torch's attention gives NaN (2.11, 16 bits, GPU), and
        # this package's kernel computes rows twice.
        query, scale = (-query, -scale) if scale < 0 else (0 * query, 1.0)
    if own:
        return _attention(query, key, value, scale)
    if query.numel() == 0:  # torch's may return None
        return query.clone(memory_format=torch.contiguous_format)
    q, k, v = (_aligned(x).transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).to(query.dtype).contiguous()


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

    but in float32 from the norms to the sums: unlike torch's, neither the normalised query nor the key is rounded to
    the dtype. On CUDA a head of 64 or 128 columns in float16 or bfloat16 goes through tensor cores, which take the key
    (times both weights and the scale) and the weights of the values in that dtype.

    Args:
        query: [B, S, heads, D], D at most 256; float32, float16 or bfloat16; any strides.
        key: [B, T, heads, D] with query's dtype and device; any strides, so also a view of a packed key and value.
            Made for few keys (a text); works with any number.
        value: Like key.
        query_weight: [heads * D], any of these dtypes, any stride; None multiplies by nothing.
        key_weight: The same for key.
        eps: Added to the mean square. None: the machine epsilon of float32, as in torch.nn.RMSNorm.
        mask: [B, T] or [1, T], any of these dtypes, any strides: added to the scores of a key. -inf leaves the key
            out; finite numbers, however low, do so beside a higher one alone.
        scale: What the scores are multiplied by; None: D ** -0.5.
        out: Where to write, like query, any strides; may be the query itself.

    Returns:
        [B, S, heads, D] of query's dtype, contiguous; ``out`` where given. Zeros where there is no key (T = 0), or
        none that the mask does not leave out.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or ``out`` is given where a gradient is needed.

    Source: LTXVideoAttnProcessor (diffusers): norm_q, norm_k, scaled_dot_product_attention.
    """
    eps = FLOAT32_EPS if eps is None else eps
    return _qk_norm_cross_attention(out, query, key, value, query_weight, key_weight, mask, eps, scale)
