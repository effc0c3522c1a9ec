"""Falcon: norms, attention and MLP, one after another or side by side, and the additions after them.

The attention rotates in one launch, and one key head serves all queries without copies of it. Stock attention hands
scaled_dot_product_attention fewer heads of keys than of queries, for which torch has its slowest implementation alone.
The MLP and the linear layers, which are of a class of Falcon's own, stay the model's.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...rope import apply_rotary_qk
from ..blocks.stream import Stream
from ..causal import flash, masked_tokens
from ..causal.engine import input_of
from ..engine.guards import children, why_not_input, why_not_tensor
from ..engine.norm_forms import TORCH_LAYERNORM
from ..engine.norm_forms import transformers_class as _class
from ..engine.recording import Live, as_one
from ..engine.rotary_tables import Tables
from ..engine.signature import attention_is_replaced
from ..engine.sites import Entry, Site, site_of, stock_forward
from ._layer import Layer


def _heads(self: Any, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as they lie in one tensor, [B, S, heads, D]: views, but for the queries of a group."""
    if self.new_decoder_architecture:
        groups = packed.unflatten(-1, (self.num_kv_heads, -1, self.head_dim))
        return groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
    if not self.multi_query:
        query, key, value = packed.unflatten(-1, (self.num_heads, 3, self.head_dim)).unbind(-2)
        return query, key, value
    heads = packed.unflatten(-1, (-1, self.head_dim))
    return heads[..., :-2, :], heads[..., -2:-1, :], heads[..., -1:, :]


def _why_not_call(self: Any, input: Tensor, alibi: Tensor | None, output_attentions: bool, rope: Tables | None) -> str:
    if alibi is not None or rope is None:
        return "positions by alibi"
    if output_attentions or self.config._attn_implementation != "sdpa":
        return "another attention than sdpa"
    reason = why_not_input(input, site_of(self).rounding)
    for name, table in zip(("cos", "sin"), rope):
        reason = reason or why_not_tensor(name, table, input)
    if not reason and torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
        reason = "a gradient is needed"
    return reason


def _token(site: Site, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor | None:
    """The attention [B, 1, heads, D] of one token without cuDNN's plan for its number of keys; None: torch chooses."""
    if query.shape[2] > 1 or torch.compiler.is_compiling() or attention_is_replaced() or site.rounding != "fp32":
        return None
    if mask is None:
        return flash.attention(query, key, value, is_causal=False) if flash.takes(query, key, value) else None
    if not masked_tokens.takes(site, query, key, value, mask):
        return None
    return masked_tokens.attention(site, query, key, value, mask, query.shape[-1] ** -0.5)


def attention_forward(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: Tables | None = None,
    **kwargs: Any,
) -> Any:
    reason = _why_not_call(self, hidden_states, alibi, output_attentions, position_embeddings)
    if reason:
        return stock_forward(
            self,
            reason,
            hidden_states,
            alibi,
            attention_mask,
            position_ids,
            layer_past,
            use_cache,
            output_attentions,
            position_embeddings,
            **kwargs,
        )
    assert position_embeddings is not None
    site = site_of(self)
    site.count_call()
    projection, output = children(self, "query_key_value", "dense")
    query, key, value = _heads(self, projection(hidden_states))
    query, key = apply_rotary_qk(query, key, *position_embeddings, layout="half", rounding=site.rounding)
    if self.new_decoder_architecture:  # the stock cache holds a key for every query head
        key, value = (x.repeat_interleave(self.num_heads // self.num_kv_heads, 2) for x in (key, value))
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return output(as_one(_attend, self, query, key, value, attention_mask, layer_past)), None


def _attend(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
    """Updates the cache and attends: [B, S, heads * D] of [B, heads, S, D]."""
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx)
    token = _token(site_of(self), query, key, value, mask)
    if token is not None:
        return token.flatten(2)
    grouped = key.shape[1] != query.shape[1] and mask is None
    if key.shape[1] != query.shape[1] and not grouped:  # with a mask, torch has no fast attention of groups
        key, value = (x.expand(-1, query.shape[1], -1, -1) for x in (key, value))
    attended = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=self.is_causal and mask is None and query.shape[2] > 1,
        enable_gqa=bool(grouped),  # under torch.jit.trace a comparison of sizes is a tensor
    )
    return attended.transpose(1, 2).flatten(2)


def _form(block: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """What a recorded call of a layer depends on of its cache: nothing. A layer with a cache records tokens alone."""
    return False if kwargs.get("layer_past") is None or input_of(args, kwargs).shape[1] == 1 else None


def _why_not_layer(block: Any, arguments: Mapping[str, Any]) -> str:
    config = block.config
    drops = block.training and (config.hidden_dropout or config.attention_dropout)
    return "a dropout is active" if drops else ""


def layer_forward(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: Tables | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    norms, (attention, mlp) = self._modules, children(self, "self_attention", "mlp")
    h = Stream(self, hidden_states)
    rows = h.norm(norms.get("ln_attn") or norms["input_layernorm"])
    attended, weights = attention(
        rows,
        layer_past=layer_past,
        attention_mask=attention_mask,
        position_ids=position_ids,
        alibi=alibi,
        use_cache=use_cache,
        output_attentions=output_attentions,
        position_embeddings=position_embeddings,
    )
    if "post_attention_layernorm" in norms:
        h.add(attended)
        h.add(mlp(h.norm(norms["post_attention_layernorm"])))
    else:  # attention and MLP side by side, of one norm or of two
        h.add(mlp(h.norm(norms["ln_mlp"]) if "ln_mlp" in norms else rows) + attended)
    return h.value(), weights


NORMS = ("input_layernorm", "post_attention_layernorm", "ln_attn", "ln_mlp")

ENTRIES = (
    Entry(
        (_class("falcon", "FalconAttention"),),
        attention_forward,
        ("apply_rotary_qk",),
        (
            "hidden_states",
            "alibi",
            "attention_mask",
            "position_ids",
            "layer_past",
            "use_cache",
            "output_attentions",
            "position_embeddings",
            "kwargs",
        ),
        frozenset({"query_key_value", "dense", "attention_dropout"}),
    ),
    Layer(
        (_class("falcon", "FalconDecoderLayer"),),
        layer_forward,
        children=frozenset({"self_attention", "mlp"}),
        optional_children=frozenset(NORMS),
        norms=dict.fromkeys(NORMS, (TORCH_LAYERNORM,)),
        live=Live(("layer_past", "attention_mask"), _form),
        plain=(_class("falcon", "FalconMLP"), _class("falcon", "FalconLinear")),
        check=_why_not_layer,
        ops=("layernorm", "gated_residual_adaln_layernorm"),
    ),
)
