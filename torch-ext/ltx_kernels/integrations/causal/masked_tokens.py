"""Attention of one token of each sample, or of a few, with a mask, in products of groups of heads.

With a mask, transformers repeats keys and values for every head of the queries, which copies a whole KV cache at every
token, and cuDNN plans for the new number of keys (see causal/flash.py). Here the queries that share a head of keys
(GQA) are the rows of a product with the keys as they lie.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..engine.guards import has_tensor_cores
from ..engine.kept import kept
from ..engine.recording import others_take_functions
from ..engine.sites import Site
from .call import FunctionCall

FEW = 16  # tokens of a sample at most: their scores lie in memory


def attend(call: FunctionCall) -> Tensor | None:
    """The attention of one token of each sample, or of a few."""
    mask = call.mask
    if mask is None or torch.compiler.is_compiling():
        return None
    site, query, key, value = call.site, call.query, call.key, call.value
    if not takes(site, query, key, value, mask):
        return None
    window = call.options.get("sliding_window")
    if window is not None and key.shape[2] >= window:  # few keys, and always the same number of them
        return None
    if not call.is_plain():
        return None
    tokens = "a token" if query.shape[2] == 1 else "a few tokens"
    site.remark(f"attention of {tokens} with a mask in groups of heads")
    return attention(site, query, key, value, mask, call.scale)


def takes(site: Site, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Whether `attention` takes these tensors."""
    if query.shape[2] > FEW or torch.is_grad_enabled() or site.rounding != "fp32":
        return False
    shapes = [torch.Size((batch, 1, query.shape[2], key.shape[2])) for batch in (1, query.shape[0])]
    if type(mask) is not Tensor or mask.shape not in shapes:
        return False
    heads = query.shape[1] % key.shape[1] == 0 and key.shape == value.shape and key.shape[3] == query.shape[3]
    return heads and mask.dtype in (torch.bool, query.dtype) and _has_products(query) and not others_take_functions()


def _has_products(query: Tensor) -> bool:
    """Whether torch has products of a query's dtype and device with results in float32."""
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and has_tensor_cores(query.device)


def attention(site: Site, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """[B, S, heads, D] of query [B, heads, S, D], and key and value [B, groups, T, D]; the scores are in float32.

    mask: [B or 1, 1, S, T], True or a number to be added to the score. A token that sees nothing gets zeros.
    """
    batch, heads, tokens, width = query.shape
    groups, length = key.shape[1:3]
    shared = heads // groups
    rows = 1 if tokens == 1 else shared  # the row of one token serves all heads of a group

    def make() -> tuple[Tensor, Tensor]:
        """The bias of the scores, and the factor of the weights: 0 for a token that sees nothing, otherwise 1."""
        if mask.dtype == torch.bool:
            bias = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
        else:
            bias = mask.float()
        sees_nothing = (bias == -torch.inf).all(-1, keepdim=True)
        bias = bias.masked_fill(sees_nothing, 0.0)  # or the weights are NaN

        def of_rows(x: Tensor) -> Tensor:
            return x.unsqueeze(2).expand(batch, groups, rows, tokens, -1).reshape(batch * groups, rows * tokens, -1)

        return of_rows(bias), of_rows((~sees_nothing).float())

    bias, factor = kept(site, ("bias of tokens", batch, groups, rows), (mask,), make)
    queries = query.reshape(-1, shared * tokens, width)
    scores = _scores(bias, queries, key.reshape(-1, length, width), scale)
    weights = torch.mul(scores.softmax(-1), factor, out=scores.new_empty(scores.shape, dtype=query.dtype))
    output = torch.bmm(weights, value.reshape(-1, length, width))
    return output.view(batch, heads, tokens, width).transpose(1, 2)


def _scores(bias: Tensor, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    operands = bias.expand(-1, queries.shape[1], -1), queries, keys.transpose(1, 2)
    if queries.dtype == torch.float32:
        return torch.baddbmm(*operands, alpha=scale)
    return torch.baddbmm(*operands, out_dtype=torch.float32, alpha=scale)
