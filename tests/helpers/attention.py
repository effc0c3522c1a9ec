"""What attention and qk_norm_cross_attention should give, in fp64, how far fp32 math may be from it, and the same in
plain torch.

An error d of a score changes its weight by a factor of e^d. The math is in fp32; but tensor cores, on CUDA, take keys
and weights in the dtype: with norms the key times both weights of the norms and the scale, rounded once; and the
weights of the values, with norms relative to the largest of a row and their sum of what is rounded.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .numeric import SUM_ERROR

TENSOR_CORES = {torch.float16: (64, 128), torch.bfloat16: (64, 128)}  # widths of a head, by dtype


def has_kernel(ltx: Any, device: str) -> bool:
    """Whether attention of 16-bit heads of 64 and 128 columns has a kernel of this package there."""
    x = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16, device=device)
    return importlib.import_module(f"{ltx.__name__}.attention").runs_kernel(x, x, x)


def normalised(kwargs: dict[str, Any], name: str, dtype: torch.dtype) -> Tensor:
    """RMSNorm over all heads in `dtype`, rounded no further."""
    x, weight, eps = kwargs[name].to(dtype), kwargs.get(f"{name}_weight"), kwargs.get("eps", 1e-6)
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    n = x.flatten(-2)
    n = n * torch.rsqrt(n.square().mean(-1, keepdim=True) + eps)
    return (n if weight is None else n * weight.to(dtype)).view(x.shape)


def operands(kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Query and key [B, heads, S, D] as they are multiplied."""
    normed = "query_weight" in kwargs
    both = ("query", "key")
    return tuple((normalised(kwargs, x, dtype) if normed else kwargs[x].to(dtype)).transpose(1, 2) for x in both)


def key_addends(kwargs: dict[str, Any], dtype: torch.dtype) -> Tensor | None:
    """[B or 1, T] of mask and key_lengths: what is added to the scores of a key."""
    mask, lengths = kwargs.get("mask"), kwargs.get("key_lengths")
    if mask is not None:
        mask = torch.where(mask, 0.0, -torch.inf).to(dtype) if mask.dtype == torch.bool else mask.to(dtype)
    if lengths is None:
        return mask
    counts = torch.arange(kwargs["key"].shape[1], device=lengths.device) < lengths[:, None]
    return torch.where(
        counts, torch.zeros((), dtype=dtype, device=lengths.device) if mask is None else mask, -torch.inf
    )


def score_addends(kwargs: dict[str, Any], dtype: torch.dtype) -> Tensor | None:
    """[B or 1, 1, S or 1, T] of mask, key_lengths and is_causal: what is added to the scores."""
    addends = key_addends(kwargs, dtype)
    addends = None if addends is None else addends[:, None, None]
    if not kwargs.get("is_causal"):
        return addends
    query = kwargs["query"]
    sees = torch.ones(query.shape[1], kwargs["key"].shape[1], dtype=torch.bool, device=query.device).tril()
    zero = torch.zeros(1, 1, 1, 1, dtype=dtype, device=query.device)
    return torch.where(sees, zero if addends is None else addends, -torch.inf)


def attention_eager(kwargs: dict[str, Any]) -> Tensor:
    dtype = kwargs["query"].dtype
    query, key = (x.to(dtype) for x in operands(kwargs, torch.float32))
    value, scale = kwargs["value"].transpose(1, 2), kwargs.get("scale")
    addends = score_addends(kwargs, dtype)
    return F.scaled_dot_product_attention(query, key, value, addends, scale=scale, enable_gqa=True).transpose(1, 2)


class Truth:
    """fp64 [B, heads, S, T] weights, and what bounds the errors of them."""

    def __init__(self, kwargs: dict[str, Any]):
        self.kwargs = kwargs
        self.dtype = kwargs["query"].dtype
        self.value = kwargs["value"].double().transpose(1, 2)
        self.width = self.value.shape[-1]
        scale = kwargs.get("scale")
        self.scale: float = max(self.width, 1) ** -0.5 if scale is None else scale
        self.normed = "query_weight" in kwargs
        self.query, self.key = operands(kwargs, torch.float64)
        if self.key.shape[1] != self.query.shape[1]:
            group = self.query.shape[1] // self.key.shape[1]
            self.key, self.value = (x.repeat_interleave(group, 1) for x in (self.key, self.value))
        self.mask = score_addends(kwargs, torch.float64)
        scores = self.query @ self.key.mT * self.scale
        if self.mask is not None:
            scores = (scores + self.mask).masked_fill((self.mask == -torch.inf).all(-1, keepdim=True), -torch.inf)
        self.lse = scores.logsumexp(-1)
        nothing = (scores == -torch.inf).all(-1, keepdim=True)
        self.weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)

    def output(self) -> Tensor:
        return (self.weights @ self.value).transpose(1, 2)

    def magnitude(self) -> Tensor:
        return (self.weights @ self.value.abs()).transpose(1, 2)

    def terms(self, tensor_cores: bool) -> Tensor:
        """Whose SUM_ERROR-th part is the bound but for the rounding of the output."""
        # Of the two norms, and of the sum of products.
        error = (1 + self.normed) * SUM_ERROR * abs(self.scale) * (self.query.abs() @ self.key.abs().mT)
        if self.mask is not None:  # numbers so low that they swallow the scores do so in fp64, too
            lowest = torch.finfo(torch.float16).min
            error = error + SUM_ERROR * torch.where(self.mask < lowest, 0.0, self.mask.abs())
        half_ulp = torch.finfo(self.dtype).eps / 2
        smallest = torch.finfo(self.dtype).smallest_normal * 2 * half_ulp
        rounds = tensor_cores and self.width in TENSOR_CORES.get(self.dtype, ())
        if rounds and self.normed:
            weight = self.kwargs.get("query_weight")
            unweighted = normalised({**self.kwargs, "query_weight": None}, "query", torch.float64).transpose(1, 2)
            folded = self.key * self.scale
            if weight is not None:
                folded = folded * weight.double().view(1, -1, 1, self.width)
            error = error + unweighted.abs() @ (folded.abs() * half_ulp + smallest / 2).mT
        p = self.weights
        of_sum = torch.log1p((p * error.expm1()).sum(-1, keepdim=True))  # how much their sum may be off
        errors = p * ((error + of_sum).expm1() + SUM_ERROR)
        total = errors @ self.value.abs()
        if rounds and p.numel():
            of_weights = p * half_ulp + p.amax(-1, keepdim=True) * smallest / 2
            total = total + of_weights @ self.value.abs()
            if self.normed:
                total = total + of_weights.sum(-1, keepdim=True) * (p @ self.value).abs()
        return (total / SUM_ERROR).transpose(1, 2)
