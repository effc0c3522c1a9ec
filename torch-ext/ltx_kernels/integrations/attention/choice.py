"""Who computes attention of query, key and value: this package's op, several ranks, or what the stock module calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._checks import INT8_HEAD_DIM, requires_grad
from ...attention import attention, runs_kernel
from ..blocks.stream import TORCH_RMSNORM
from ..engine.guards import has_tensor_cores, has_torch_backend
from ..engine.kept import kept, may_read
from ..engine.recording import others_take_functions, refuse
from ..engine.signature import attention_is_replaced
from ..linear.products import may_overwrite
from ..parallel import attention as rank_attention
from ..parallel.ranks import context_of
from .call import Call
from .masks import ALL_KEYS, PaddingMask, Seen

# Elements of a head's keys up to which qk_norm_cross_attention is the faster way: 256 keys of 64 columns, 128 of 128.
# (h200-tuning.json, 2 x 8064 queries of 32 heads: 128 keys of 64 columns 73 us with masked keys and 93 without, where
# two norms and cuDNN's attention take 157; 256 keys 104 and 181 of 213; 128 keys of 128 columns, no mask, 163 of 181.)
MOST_KEYS = 16384


def _op_pays(query: Tensor, keys: int, head_dim: int) -> bool:
    """Whether qk_norm_cross_attention is the faster way: where it has tensor cores."""
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and head_dim in (64, 128)
        and head_dim * keys <= MOST_KEYS
        and has_tensor_cores(query.device)
    )


def _kernel_pays(query: Tensor, keys: int, masked: bool) -> bool:
    """Whether a cross-attention takes the kernel of `attention`: where it was faster than torch's (h200-tuning.json).

    Where samples and heads are few, the kernel is faster for at most 192 queries, because it divides their keys. With
    more queries torch is faster with heads of 128 columns, unless it has to add a mask.
    """
    batch, queries, heads, width = query.shape
    if queries <= 192 and not masked:
        return batch * heads <= 64
    return width == 64 or (masked and keys >= 256)


def in_one_op(call: Call, query: Tensor, key: Tensor) -> bool:
    """Whether a masked cross-attention goes through qk_norm_cross_attention."""
    return (
        call.spec.norm == TORCH_RMSNORM
        and call.spec.across_heads
        and query.shape[2] == key.shape[2]
        and parallel_config(call) is None
        and not _needs_gradient(query, key, *call.layers.weights)
        and _op_pays(query, key.shape[1], query.shape[-1])
        and _may_attend(call)
    )


def without_padding(
    call: Call, spec: PaddingMask, query: Tensor, key: Tensor, value: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, key and value without padding as far as it is the same for all samples, and the mask for the rest."""
    valid = spec.valid(mask, key.shape[1])
    lengths = _valid_lengths(call, mask, valid) if _may_read(call, mask) else ()
    if lengths:
        longest = max(lengths)
        key, value, valid = key[:, :longest], value[:, :longest], valid[:, :longest]
        if spec.of_text:
            query = query[:, :longest]
        if min(lengths) == longest:
            return query, key, value, None
    return query, key, value, valid[:, None, None]


def _may_read(call: Call, mask: Tensor) -> bool:
    """Whether the host may ask for a mask's contents, and rows be left out for them."""
    return may_read(mask) and getattr(call.module.processor, "_parallel_config", None) is None


def _valid_lengths(call: Call, mask: Tensor, valid: Tensor) -> tuple[int, ...]:
    """The number of valid rows of each sample, read once for a mask; empty where these are not the first rows."""

    def make() -> tuple[int, ...]:
        counts = valid.sum(-1)
        first = torch.arange(valid.shape[1], device=valid.device) < counts.unsqueeze(-1)
        in_order, *lengths = torch.cat(((first == valid).all().view(1), counts)).tolist()
        return tuple(lengths) if in_order else ()

    return kept(call.site, ("valid lengths", valid.shape), (mask,), make)


def _may_attend(call: Call) -> bool:
    """Whether an attention may go through an op of this package.

    It goes through diffusers' dispatch where the user chose a backend there, and where other code intercepts torch
    functions. Perturbed attention guidance does so, for example, and so does a replaced scaled_dot_product_attention.
    """
    return (
        call.site.rounding == "fp32"
        and getattr(call.module.processor, "_attention_backend", None) is None
        and has_torch_backend(call.module)
        and not others_take_functions()
        and not attention_is_replaced()
    )


def attend(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Seen,
    out: Tensor | None = None,
    ahead: rank_attention.Ahead | None = None,
    is_causal: bool = False,
) -> tuple[Tensor, bool]:
    """(attention of [B, S, heads, D] to [B, T, heads, D], whether an op of this package computed it).

    key, value: They may have fewer heads, which the query's heads share.
    out: Where this package's op, or an exchange by copies, may write the result. Others return a tensor of their own.
    ahead: The values, where `values_ahead` has sent them.
    is_causal: Each row sees itself and those before it, on one rank and without a mask.
    """
    form, parallel = call.spec.mask, parallel_config(call)
    scores_mask = None if seen.mask is None or form is None else form.for_scores(seen.mask)
    if parallel is None:
        pays = not call.cross or _kernel_pays(query, key.shape[1], seen.mask is not None)
        if seen.of_keys and pays and runs_kernel(query, key, value) and _may_attend(call):
            return _own_attention(call, query, key, value, seen.keys, out, is_causal), True
    if not call.spec.grouped:
        key, value = _for_each_head(query, key), _for_each_head(query, value)
    if parallel is None:
        _remark_native(call, "not this package's kernel")
        return _dispatched(call, query, key, value, scores_mask, None, is_causal), False
    context = context_of(parallel)
    if context is None or not seen.of_keys or _needs_gradient(query, key, value):
        _remark_native(call, "several ranks")
        rank_attention.check_dispatch(context, seen.mask)
        return _dispatched(call, query, key, value, scores_mask, parallel), False

    # Ranks may hold different numbers of keys, and have to decide alike.
    may_attend = not call.cross and _may_attend(call)

    def overlaps(query: Tensor, key: Tensor, value: Tensor) -> bool:
        return may_attend and runs_kernel(query, key, value)

    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, out: Tensor | None) -> Tensor:
        if overlaps(query, key, value):
            return _own_attention(call, query, key, value, mask, out)
        _remark_native(call, "not this package's kernel")
        scores_mask = None if mask is None else mask[:, None, None]
        output = _dispatched(call, query, key, value, scores_mask, None)
        return output if out is None else out.copy_(output)

    output = rank_attention.attend(
        context,
        query,
        key,
        value,
        seen.keys,
        ahead=ahead,
        out=out,
        cross=call.cross,
        compute=compute,
        overlaps=overlaps,
        in_place=may_overwrite(),
    )
    return output, overlaps(query, key, value)


def attend_noted(
    call: Call, query: Tensor, key: Tensor, value: Tensor, seen: Seen = ALL_KEYS, is_causal: bool = False
) -> Tensor:
    """`attend` for the `attends` of a description: the site notes whether an op of this package computed it."""
    output, own = attend(call, query, key, value, seen, is_causal=is_causal)
    if own:
        call.site.chosen.add("attention")
    return output


def attend_read(call: Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Self-attention [B, S, heads, D] with a `PaddingMask` or a `SegmentMask`, whose contents the host reads.

    Keys of padding are left out. If there are one or two segments, each attends by itself, without the mask.
    """
    if isinstance(call.spec.mask, PaddingMask):
        query, key, value, rest = without_padding(call, call.spec.mask, query, key, value, mask)
        output, own = attend(call, query, key, value, call.seen(rest))
        if own:
            call.site.chosen.add("attention")
        return output
    start = _last_segment(call, mask)
    if start is None:
        return attend(call, query, key, value, Seen(mask, None, False))[0]
    parts = [
        attend(call, query[:, rows], key[:, rows], value[:, rows], ALL_KEYS)
        for rows in ([slice(0, start)] if start else []) + [slice(start, None)]
    ]
    if any(own for _, own in parts):
        call.site.chosen.add("attention")
    return parts[0][0] if len(parts) == 1 else torch.cat([part for part, _ in parts], 1)


def _last_segment(call: Call, mask: Tensor) -> int | None:
    """Where the last of two segments of every sample begins, read once for a mask [B, 1, S, S]; 0 where there is one.

    None: the segments are others, or the host may not read the mask.
    """
    if not len(mask) or not _may_read(call, mask):
        return None

    def make() -> int | None:
        first = mask[:, 0, 0]  # the rows that row 0 sees
        start = first[0].sum()
        two = (torch.arange(first.shape[1], device=mask.device) < start) == first
        found = two.all() & ((first.unsqueeze(-1) == first.unsqueeze(-2)) == mask[:, 0]).all()
        fits, length = torch.stack((found.to(start.dtype), start)).tolist()
        return length % first.shape[1] if fits else None

    return kept(call.site, "first segment", (mask,), make)


def _for_each_head(query: Tensor, x: Tensor) -> Tensor:
    """Keys or values [B, T, key heads, D] with a copy for each head of the query, as the stock processors make them."""
    times = query.shape[2] // x.shape[2]
    return x if times == 1 else x.repeat_interleave(times, 2)


def values_ahead(call: Call, value: Tensor, seen: Seen) -> rank_attention.Ahead | None:
    """The values of a self-attention, sent ahead of query and key, or None where they travel together."""
    parallel = parallel_config(call)
    if parallel is None or not seen.of_keys:
        return None
    return rank_attention.send_ahead(context_of(parallel), value)


# From so many tokens on int8 scores are faster than the model's dtype; fewer have not been timed (h200-attention.json).
_INT8_TOKENS = 4608


def _own_attention(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor | None,
    is_causal: bool = False,
) -> Tensor:
    """This package's attention, in 8 bits where `optimize` was told so, the op takes the call and the call gains."""
    if call.site.settings["attention"] == "int8" and not call.cross:
        columns, tokens = query.shape[-1], key.shape[1]
        if mask is not None or is_causal:
            _remark_native(call, "a mask")
        elif key.shape[2] != query.shape[2]:
            _remark_native(call, "fewer heads of keys than of queries")
        elif columns != INT8_HEAD_DIM:
            _remark_native(call, f"heads of {columns} columns")
        elif tokens < _INT8_TOKENS:
            _remark_native(call, f"fewer than {_INT8_TOKENS} tokens")
        else:
            return attention(query, key, value, out=out, precision="int8")
    return attention(query, key, value, mask=mask, is_causal=is_causal, out=out)


def _remark_native(call: Call, reason: str) -> None:
    """Counts a self-attention that `optimize` was asked to compute in int8, and that runs otherwise."""
    if not call.cross and call.site.settings["attention"] == "int8":
        call.site.remark(f"attention not in int8: {reason}")


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and requires_grad(*tensors)


def parallel_config(call: Call) -> Any:
    """How the tokens of an attention lie on several ranks; None where this rank has all that it needs."""
    if call.cross and not call.spec.parallel_cross:
        return None
    config = getattr(call.module.processor, "_parallel_config", None)
    if config is not None:
        refuse("ranks exchange tokens")
    return config


def _dispatched(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    parallel: Any,
    is_causal: bool = False,
) -> Tensor:
    """Attention as the stock processor would have it computed."""
    grouped = {"enable_gqa": True} if call.spec.grouped else {}
    dispatch = call.site.settings["dispatch"]
    if dispatch is None:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, **grouped).transpose(1, 2)
    output: Tensor = dispatch(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=0.0,
        is_causal=is_causal,
        backend=getattr(call.module.processor, "_attention_backend", None),
        parallel_config=parallel,
        **grouped,
    )
    return output.to(query.dtype)
