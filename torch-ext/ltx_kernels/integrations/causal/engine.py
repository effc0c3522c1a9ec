"""Attention of language models: packed products, norm and rotation of query and key in one launch, a KV cache.

`CausalAttention` describes one class, as `Attention` does for diffusion transformers. The cache of keys and values, the
mask and the attention function stay the model's: the function is looked up at every call, as the stock forward does.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, cast

from torch import Tensor, nn

from ...glu import gate_heads
from ...rope import apply_rotary, apply_rotary_qk, qk_norm_rope
from ..blocks.gated_mlp import Projections, arguments_by_name
from ..engine.guards import (
    ATTRIBUTE,
    class_of,
    follows_shared,
    hooked,
    why_not_input,
    why_not_norm_weight,
    why_not_tensor,
)
from ..engine.norm_forms import form_of
from ..engine.recording import Live, as_one, refuse
from ..engine.rotary_tables import Tables
from ..engine.sites import Entry, site_of, stock_forward
from ..linear.fp8 import in_fp8
from ..linear.linears import Linears, kept_layers
from ..linear.packing import unpack
from ..linear.products import Input, as_tensor, like_of, may_overwrite
from . import causal_mask, flash, masked_tokens, own_kernel
from .call import FunctionCall
from .kv_cache import CACHE, EARLIER, cache_of, empty_layer, fill, heads_first, is_filled, is_large, update


@dataclass(frozen=True)
class CausalAttention(Projections):
    """One class of attention modules with a cache, as `_attention` computes it.

    classes: Names of the classes, with their modules.
    parameters: Those of the stock forward, without self.
    projections: Names of the layers for query, key and value; one name where a layer holds all three.
    norms: Names of the norms of query and key, and of the value's norm if the class has one; empty if it has none. If
        there are three, a module may lack the layer for the value. The layer for the key makes the value then.
    across_heads: A norm's mean is taken over all heads of a token.
    gated: The layer for the query makes a gate after each head, whose sigmoid the head's output is multiplied by.
    half_tables: The model's tables hold each angle once. Otherwise their width is that of the columns that turn.
    casts: The stock rotation casts its result to the input's dtype, so that the tables may have another one.
    shares: Name of an argument, a dictionary of keys and values by ``layer_type``; empty where there is none. Modules
        with ``store_full_length_kv`` leave theirs in it, and those with ``is_kv_shared_layer`` make none and read it.
    turn: What the stock forward does with query and key [B, S, heads, D] where that is no rotation by tables (cos, sin)
        after the norms: (module, query, key, rotary argument, cache) to new tensors or the same.
    turns_by: The public functions that ``turn`` may call.
    scales: What the stock forward multiplies the turned query [B, S, heads, D] by, from the module and
        ``position_ids``.
    optional_children: Names of further submodules that some modules have; ``turn`` calls them.
    options: What the stock forward gives to the attention function beside scale, dropout and its own keywords, from
        the module and the arguments of its forward.
    """

    classes: tuple[str, ...]
    parameters: tuple[str, ...] = (
        "hidden_states",
        "position_embeddings",
        "attention_mask",
        CACHE,
        "kwargs",
    )
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    norms: tuple[str, ...] = ()
    across_heads: bool = False
    gated: bool = False
    half_tables: bool = False
    casts: bool = False
    shares: str = ""
    turn: Callable[[Any, Tensor, Tensor, Any, Any], tuple[Tensor, Tensor]] | None = None
    turns_by: tuple[str, ...] = ()
    scales: Callable[[Any, Tensor], Tensor] | None = None
    optional_children: tuple[str, ...] = ()
    options: Callable[[Any, Mapping[str, Any]], dict[str, Any]] = lambda module, arguments: {}

    def groups(self, module: nn.Module, prefix: str) -> list[tuple[str, ...]]:
        """The linear layers of a module that share an input, by their names after a prefix, for fp8."""
        groups = self.present(module), ("o_proj",) if "o_proj" in module._modules else ()
        return [tuple(f"{prefix}.{name}" for name in names) for names in groups if names]

    def present(self, module: nn.Module) -> tuple[str, ...]:
        """Names the layers among `projections` that a module has."""
        return tuple(name for name in self.projections if module._modules.get(name) is not None)

    def packs(self, module: nn.Module) -> tuple[tuple[str, ...], ...]:
        """Groups of linear layers whose weights should lie side by side."""
        present = self.present(module)
        return (present,) if len(present) > 1 else ()

    def readers(self, module: nn.Module, input: Tensor) -> Linears | None:
        """As `Entry.readers`."""
        first = module._modules.get(self.projections[0])
        if first is None or not in_fp8(first) or hooked(module):
            return None
        layers = kept_layers("attention", module, input, CausalLayers, self)
        return None if layers.reason else layers.projections

    def entry(self) -> Entry:
        """What `optimize` installs."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return _attention(self, module, arguments_by_name(self.parameters, args, kwargs))

        lacking = frozenset((*self.projections[1:], *self.norms[1:]) if self.shares else ())
        turns_by = self.turns_by or ("qk_norm_rope" if self.norms else "apply_rotary_qk",)
        shared = ("rmsnorm", "apply_rotary") if self.shares else ()
        return Entry(
            self.classes,
            forward,
            (*turns_by, *(("gate_heads",) if self.gated else ()), *shared),
            self.parameters,
            frozenset((*self.projections, *self.norms, "o_proj")) - lacking,
            lacking.union(self.optional_children),
            packs=self.packs,
            release=lambda module: unpack(module, self.packs(module)),
            readers=CausalAttention.readers,
        )


class CausalLayers:
    """The layers of an attention in the forms that their state allows, or the reason why its calls run stock."""

    __slots__ = ("norms", "output", "projections", "reason", "site", "spec")

    def __init__(self, module: nn.Module, spec: CausalAttention, input: Tensor) -> None:
        modules = module._modules
        self.spec, self.site = spec, site_of(module)
        self.norms = [cast(nn.Module, modules[name]) for name in spec.norms if modules.get(name) is not None]
        self.reason = _why_not_norms(spec, self.norms, input)
        site = self.site
        pack = site.rounding == "fp32"
        self.projections = Linears([cast(nn.Linear, modules[name]) for name in spec.present(module)], input, site, pack)
        self.output = Linears((cast(nn.Linear, modules["o_proj"]),), input, site)


def _why_not_norms(spec: CausalAttention, norms: list[nn.Module], input: Tensor) -> str:
    for name, norm in zip(spec.norms, norms):
        if form_of(norm) is None:
            return f"{name} is {class_of(norm)}"
        if hooked(norm):
            return f"{name} {hooked(norm)}"
        reason = why_not_norm_weight(norm, input, gradient=follows_shared())  # type: ignore[arg-type]
        if reason:
            return f"{name}: {reason}"
    return "" if len({form_of(norm) for norm in norms}) < 2 else "its norms are of different classes"


def _why_not_tables(spec: CausalAttention, rope: Tables | None, input: Tensor) -> str:
    if rope is None:
        return "no rotary tables"
    if spec.turn is not None:
        return ""
    for name, table in zip(("cos", "sin"), rope):
        reason = why_not_tensor(name, table, input, spec.casts)
        if reason:
            return reason
    return ""


_READ = ("hidden_states", "position_embeddings")  # arguments that query, key and value are made of


def _attention(spec: CausalAttention, module: Any, arguments: dict[str, Any]) -> Any:
    """The stock forward; a layer that asked `Entry.readers` may hand over rows of fp8."""
    input: Input = arguments["hidden_states"]
    rope: Tables | None = arguments.get("position_embeddings")
    like = like_of(input)
    reason = why_not_input(like, site_of(module).rounding, gradient=True) or _why_not_tables(spec, rope, like)
    if not reason:
        layers = kept_layers("attention", module, input, CausalLayers, spec)
        reason = layers.reason or _why_not_counts(spec, module)
    if reason:
        return stock_forward(module, reason, **{**arguments, "hidden_states": as_tensor(input)})
    assert rope is not None
    others = {name: value for name, value in arguments.items() if name not in _READ}
    if any(map(_may_be_written, others.values())):
        refuse("the attention function may write to a list or a dict")
    attend = functools.partial(as_one, functools.partial(_attend, spec), module)
    if spec.shares and module.is_kv_shared_layer:
        output, weights = attend(_query(layers, module, input, rope), None, None, None, others)
        return layers.output(output.flatten(2))[0], weights
    query, key, value, gate = _heads(layers, module, input)
    for norm in layers.norms[2:]:  # before the key turns, which may be the value as well
        form = form_of(norm)
        assert form is not None
        value = form.rms(norm, value, layers.site.rounding)
    cache = cache_of(arguments)
    # What the layers made is new, unless something else than this package called them.
    fresh = layers.projections.packed or layers.projections.plain or layers.projections.scaled
    out, empty, one_token = None, None, False
    if fresh and may_overwrite():
        empty = None if cache is None else empty_layer(cache, module.layer_idx, layers.site.remark)
        # torch chooses the kernels of attention and of the cache's torch.cat by strides. One token of each of several
        # samples therefore gets the strides of the stock forward, where the cache is large.
        one_token = query.shape[1] == 1 < query.shape[0] and is_large(cache, module.layer_idx)
        # A cached view of a packed product would keep the query as well.
        new_key = one_token or empty is not None
        if spec.turn is None:
            out = _heads_first_like(query) if one_token else query, _heads_first_like(key) if new_key else key
    contiguous = empty is not None or one_token
    if spec.turn is None:
        query, key = _norm_and_rotate(layers, query, key, rope, out)
        if spec.scales is not None:
            query = query * as_one(spec.scales, module, arguments["position_ids"]).to(query.dtype)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
    else:
        query, key = spec.turn(module, query, key, rope, cache)
        query, key = query.transpose(1, 2), as_one(heads_first, key) if contiguous else key.transpose(1, 2)
    value = as_one(heads_first, value) if contiguous else value.transpose(1, 2)
    output, weights = attend(query, key, value, empty, others)
    if gate is not None:
        layers.site.count_call("gate_heads")
        # Each head is a row of its own, since the gates of a token do not lie side by side.
        output = gate_heads(output.unsqueeze(-2), gate, rounding=layers.site.rounding)
    return layers.output(output.flatten(2))[0], weights


def _may_be_written(argument: Any) -> bool:
    """Whether an argument is, or holds, a list or a dict. A recording would hand a copy of it to the function."""
    return type(argument) in (list, dict) or (type(argument) is tuple and any(map(_may_be_written, argument)))


# What may compute attention in the place of the model's function, in this order: each says for itself whether it does.
CANDIDATES = (own_kernel, flash, causal_mask, masked_tokens)


def _attend(
    spec: CausalAttention,
    module: Any,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    empty: Any,
    arguments: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Updates the cache and attends: (output [B, S, heads, D], what the model's function says of the weights).

    query, key, value: [B, heads, S, D]; no key and value where an earlier layer has left them in `arguments`.
    empty: The layer of the cache that takes keys and values as they are, or None.
    arguments: Of the stock forward, without those that query, key and value were made of.
    """
    cache = cache_of(arguments)
    options = {name: value for name, value in arguments.items() if name not in spec.parameters and name != EARLIER}
    if key is None or value is None:
        key, value = (heads.to(query.device) for heads in arguments[spec.shares][module.layer_type])
    elif empty is not None:
        key, value = fill(empty, key, value)
    elif cache is not None:
        key, value = update(cache, key, value, module.layer_idx, options)
    if spec.shares and module.store_full_length_kv:
        arguments[spec.shares][module.layer_type] = key, value
    home: Any = sys.modules[site_of(module).cls.__module__]  # where the stock forward looks the functions up
    function = home.ALL_ATTENTION_FUNCTIONS.get_interface(
        module.config._attn_implementation, home.eager_attention_forward
    )
    options.update(spec.options(module, arguments))
    mask: Tensor | None = arguments.get("attention_mask")  # another function may have a mask of its own kind
    if not module.training and (mask is None or isinstance(mask, Tensor)):
        call = FunctionCall(site_of(module), module, function, query, key, value, mask, module.scaling, options)
        for candidate in CANDIDATES:
            output = candidate.attend(call)
            if output is not None:
                return output, None
    dropout = module.attention_dropout if module.training else 0.0
    attended: tuple[Tensor, Tensor | None] = function(
        module, query, key, value, mask, dropout=dropout, scaling=module.scaling, **options
    )
    return attended


def input_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The stream [B, S, H] that a decoder layer is called with."""
    input: Tensor = args[0] if args else kwargs["hidden_states"]
    return input


def _token_form(block: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """What a recorded call of a decoder layer depends on of its cache; None where it is not one token of each sample.

    What is done before the attention depends on the cache if that is empty, or large and for several samples.
    """
    cache, attention = cache_of(kwargs), block._modules["self_attn"]
    if cache is None:
        return False
    samples, tokens, _ = input_of(args, kwargs).shape
    if tokens > 1 or ATTRIBUTE not in attention.__dict__ or not is_filled(cache, attention.layer_idx):
        return None
    return samples > 1 and is_large(cache, attention.layer_idx)


# Of decoder layers: a token's cache is another one for every text, and its mask grows from token to token.
LIVE = Live((CACHE, "attention_mask"), _token_form)


def _heads_first_like(heads: Tensor) -> Tensor:
    """New memory for [B, S, heads, D], with all tokens of a head one after another."""
    batch, rows, count, width = heads.shape
    return heads.new_empty(batch, count, rows, width).transpose(1, 2)


def _counts(module: Any) -> tuple[int, int, int]:
    """How many heads of query, key and value a layer makes that holds all three, by what the stock forward reads."""
    return module.config.num_attention_heads, module.num_key_value_heads, module.num_key_value_heads


def _why_not_counts(spec: CausalAttention, module: Any) -> str:
    if len(spec.projections) > 1:
        return ""
    (name,) = spec.projections
    counts = _counts(module)
    fits = getattr(module._modules[name], "out_features", None) in (None, sum(counts) * module.head_dim)
    return "" if fits else f"its {name} makes no {counts} heads"


def _heads(layers: CausalLayers, module: Any, input: Input) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, key, value and gate, [B, S, heads, D]: views of one new tensor where one product makes them."""
    outputs = layers.projections(input)
    width = module.head_dim
    if len(outputs) == 1:
        outputs = outputs[0].split_with_sizes([count * width for count in _counts(module)], -1)
    elif not layers.projections.packed and layers.site.rounding == "fp32":
        layers.site.count("unpacked")
    # `Tensor.unflatten` and `Tensor.split` are Python functions, which take the host longer.
    query, key, *values = (output.view(*output.shape[:-1], -1, width) for output in outputs)
    value = values[0] if values else key
    if not layers.spec.gated:
        return query, key, value, None
    return query[..., ::2, :], key, value, query[..., 1::2, :]


def _query(layers: CausalLayers, module: Any, input: Input, rope: Tables) -> Tensor:
    """The query [B, heads, S, D] of a module that makes nothing else."""
    (output,), (norm,), site = layers.projections(input), layers.norms, layers.site
    form = form_of(norm)
    assert form is not None
    site.count_call("rmsnorm", "apply_rotary")
    query = form.rms(norm, output.view(*output.shape[:-1], -1, module.head_dim), site.rounding)
    query = apply_rotary(query, *rope, layout="half", rotary_dim=rope[0].shape[-1], rounding=site.rounding)
    return query.transpose(1, 2)


def _norm_and_rotate(
    layers: CausalLayers, query: Tensor, key: Tensor, rope: Tables, out: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    spec, site = layers.spec, layers.site
    rotation: dict[str, Any] = {"layout": "half", "rotary_dim": None if spec.half_tables else rope[0].shape[-1]}
    if not spec.norms:
        site.count_call("apply_rotary_qk")
        return apply_rotary_qk(query, key, *rope, **rotation, rounding=site.rounding, out=out)
    query_norm, key_norm, *_ = layers.norms
    form = form_of(query_norm)
    assert form is not None
    site.count_call("qk_norm_rope")
    return qk_norm_rope(
        query,
        key,
        query_norm._parameters["weight"],
        key_norm._parameters["weight"],
        *rope,
        (form.eps_of(query_norm), form.eps_of(key_norm)),
        across_heads=spec.across_heads,
        weight_offset=form.offset,
        cast_before_weight=form.twice,
        **rotation,
        rounding=site.rounding,
        out=out,
    )
