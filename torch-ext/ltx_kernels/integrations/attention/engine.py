"""The attention of diffusion transformers: project, normalise and rotate query and key, attend, project.

`Attention` (attention/description.py) describes one class of attention modules; this module computes any of them, with
the layers that attention/layers.py finds and the kernel that attention/choice.py chooses. Query, key and value come out
of one product where their weights lie side by side; two streams of tokens are projected into the rows of one buffer, so
that nothing is concatenated; norm and rotation are one launch, in place.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...attention import qk_norm_cross_attention
from ...glu import gate_heads, swiglu
from ...norm import rmsnorm
from ...quant import gate_heads_quant, swiglu_quant
from ...rope import apply_rotary, qk_norm_rope
from ..blocks.stream import RMSNORM, TORCH_LAYERNORM, TORCH_RMSNORM, joint
from ..engine.guards import hooked, why_not_input
from ..engine.kept import kept
from ..engine.recording import as_one
from ..engine.rotary_tables import Tables, with_identity_rows
from ..engine.sites import Entry, Site, site_of, stock_forward
from ..engine.state import recall
from ..linear.fp8 import in_fp8
from ..linear.linears import Linears, joined
from ..linear.packing import unpack
from ..linear.products import Input, dequantised
from ..parallel import attention as rank_attention
from ..parallel.ranks import context_of
from .choice import attend, attend_segments, in_one_op, parallel_config, values_ahead, without_padding
from .description import ADDED, ADDED_NORMS, ADDED_OUTPUT, FUSED, INPUTS, ROUND_ONCE, SHARED, Attention, AttentionModule
from .layers import AttentionLayers, layers_of, settings_of, why_not_module
from .masks import PaddingMask, SegmentMask


def _readers(spec: Attention, described: Attention, module: nn.Module, input: Tensor) -> Linears | None:
    """As `Entry.readers`: the block's description tells whether the context goes to other layers than the input."""
    first = module._modules[spec.called(module, spec.projections[:1] if described.cross else spec.projections)[0]]
    if first is None or not in_fp8(first) or hooked(module):
        return None
    layers = layers_of(spec, module, input)
    if layers.reason or (layers.gate is not None and not layers.gate.fp8) or (spec.shared and layers.added is None):
        return None
    return layers.query if described.cross else layers.all


def entry_of(spec: Attention) -> Entry:
    """What `optimize` installs for a class of attention modules."""

    def forward(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        if arguments:
            options = {**dict(zip(spec.parameters, arguments)), **options}
        input, context, mask = map(options.pop, INPUTS, (None, None, None))
        return _forward(spec, module, input, context, mask, options)

    shared = {name: f"{name} + {spec.processor}" for name in spec.classes if name in SHARED}
    return Entry(
        tuple(shared.get(name, name) for name in spec.classes),
        forward,
        spec.ops,
        spec.parameters,
        spec.children,
        frozenset(
            (
                *(
                    spec.output.partition(".")[0],
                    *spec.norms,
                    *((*ADDED, *ADDED_NORMS, ADDED_OUTPUT) if spec.added else ()),
                ),
                *(*spec.image, spec.gate, spec.mlp, *spec.optional_children, *FUSED.values()),
                "processor",  # a module, as an IP-Adapter's processor is
            )
        ),
        why_not=functools.partial(why_not_module, spec),
        settings=settings_of,
        together_with=spec.together_with,
        packs=spec.packs,
        release=lambda module: unpack(module, spec.packs(module)),
        readers=functools.partial(_readers, spec),
    )


# ---- The call


def _why_not_call(
    spec: Attention, module: Any, input: Tensor, context: Tensor | None, mask: Tensor | None, rope: Any, more: Any
) -> str:
    reason = why_not_input(input)
    if reason:
        return reason
    if more:
        unset = (None, False)
        given = [n for n, v in more.items() if not any(v is u for u in unset) and n not in spec.ignored]
        if given:
            return f"arguments {', '.join(given)}"
    if mask is not None:
        if spec.mask is None:
            return "a mask"
        reason = spec.mask.why_not(mask, None if context is None else context.shape[1])
    return reason or spec.check(module, input, context, rope)


def _forward(
    spec: Attention, module: nn.Module, input: Input, context: Tensor | None, mask: Tensor | None, options: Any
) -> Any:
    """Computes a call of a module, or runs its stock forward for a reason.

    A block that asked `Entry.readers` may hand over quantised rows instead of a tensor. A self-attention may get its
    input a second time, as the context.
    """
    twice = context is not None and context is input and not (spec.added or spec.shared)
    if twice:
        context = None
    rope = options.pop(spec.rope, None)
    key_rope = options.pop(spec.key_rope, None)
    if key_rope is not None:
        rope = rope, key_rope
    site = site_of(module)
    if isinstance(
        input, tuple
    ):  # `readers` has found the layers and checked the module; the arguments are checked here
        like = dequantised(input) if torch.compiler.is_compiling() else input[1]
        layers = recall(module, ("attention", torch.bfloat16, input[1].device)) or layers_of(
            spec, module, dequantised(input)
        )
        reason = layers.reason or _why_not_call(spec, module, like, context, mask, rope, options)
    else:
        reason = _why_not_call(spec, module, input, context, mask, rope, options)
        if not reason:
            layers = layers_of(spec, module, input)
            reason = layers.reason
    if reason:
        parallel = parallel_config(spec, cast(AttentionModule, module), context is not None)
        if parallel is not None:
            masks = (mask, options.get("encoder_hidden_states_mask"))
            rank_attention.check_dispatch(context_of(parallel), *masks)
        tensor = dequantised(input) if isinstance(input, tuple) else input
        tables = (rope, None) if key_rope is None else rope
        named = {
            name: spec.stock_rope(module, table)
            for name, table in zip((spec.rope, spec.key_rope), tables)
            if table is not None
        }
        given = tensor, tensor if twice else context, mask
        inputs = {name: value for name, value in zip(INPUTS, given) if name in spec.parameters}
        return stock_forward(module, reason, **inputs, **named, **options)
    if context is not None and (layers.added is not None or spec.shared):
        return _joint(spec, site, module, layers, input, context, mask, rope)
    return _single(spec, site, module, layers, input, context, mask, rope)


def _project(site: Site, linears: Linears, input: Input, heads: int, width: int = 0) -> tuple[Tensor, ...]:
    """The output of each layer, [B, S, heads, D]; views of one new tensor where the layers are packed.

    heads: Of the first layer. The others have as many as their width gives.
    width: D, where the first layer may have fewer heads.
    """
    if linears.even:
        shape = len(linears.sizes), -1 if width else heads, width or -1
        return linears.together(input).unflatten(-1, shape).unbind(-3)
    if not linears.packed and len(linears.modules) > 1 and site.rounding == "fp32":
        site.count_unpacked()
    outputs = linears(input)
    width = width or outputs[0].shape[-1] // heads
    return tuple([x.unflatten(-1, (-1, width)) for x in outputs])


def _norm_and_rotate(
    spec: Attention,
    site: Site,
    layers: AttentionLayers,
    stream: int,
    query: Tensor,
    key: Tensor,
    rope: Tables | None,
    fresh: bool,
) -> tuple[Tensor, Tensor]:
    """Norm and rotation of query and key, [B, S, heads, D].

    stream: 0, or 1 for the second stream of a joint attention, which has norms of its own.
    fresh: The caller owns the memory of query and key, so that it may be overwritten.
    """
    normed = len(layers.eps) > stream
    places = slice(2 * stream, 2 * stream + 2)
    query_weight, key_weight = layers.weights[places] if normed else (None, None)
    eps = layers.eps[stream] if normed else None
    out = (query, key) if fresh and layers.in_place else None
    one_op = _rotates_in_one_op(spec, site)
    if one_op and normed and rope is None and not spec.across_heads:
        # One launch for both norms; the table is one row, which stays in the cache.
        rope = as_one(_identity, site, query, key)
    if rope is not None and one_op and normed:
        layer = spec.norm == TORCH_LAYERNORM
        query_bias, key_bias = layers.biases[places] if layer else (None, None)
        return qk_norm_rope(
            query,
            key,
            query_weight,
            key_weight,
            *rope,
            eps,
            across_heads=spec.across_heads,
            norm="layer" if layer else "rms",
            query_bias=query_bias,
            key_bias=key_bias,
            layout=layers.layout,
            rounding=site.rounding,
            out=out,
        )
    return tuple(  # type: ignore[return-value]
        _norm_then_rotate(spec, site, layers, x, weight, eps, rope, normed)
        for x, weight in ((query, query_weight), (key, key_weight))
    )


def _rotates_in_one_op(spec: Attention, site: Site) -> bool:
    """Whether norm and rotation are one launch."""
    # In "eager" the op rounds once after the weight, as torch's norm does and diffusers' does not.
    return spec.norm in ROUND_ONCE or (spec.norm == RMSNORM and site.rounding == "fp32")


def _ops_before(spec: Attention, site: Site, layers: AttentionLayers, rotated: bool) -> tuple[str, ...]:
    """The ops that `_norm_and_rotate` runs."""
    if layers.eps and (rotated or not spec.across_heads) and _rotates_in_one_op(spec, site):
        return ("qk_norm_rope",)
    return (*(("rmsnorm",) if layers.eps else ()), *(("apply_rotary",) if rotated else ()))


def _identity(site: Site, query: Tensor, key: Tensor) -> Tables:
    """Tables of a rotation by angle 0, [rows, D / 2], for the rows of a query and a key [B, S, heads, D]."""
    width, device = query.shape[-1] // 2, query.device
    rows = max(query.shape[1], key.shape[1])

    def make() -> Tables:
        return torch.ones(1, width, device=device), torch.zeros(1, width, device=device)

    cos, sin = kept(site, ("identity", width, device), (), make)
    return cos.expand(rows, width), sin.expand(rows, width)


def _norm_then_rotate(
    spec: Attention,
    site: Site,
    layers: AttentionLayers,
    x: Tensor,
    weight: Tensor | None,
    eps: float | None,
    rope: Tables | None,
    normed: bool,
) -> Tensor:
    if normed:
        rows = x.flatten(-2) if spec.across_heads else x
        # torch.nn.RMSNorm rounds once, as "fp32" does.
        rounding = "fp32" if spec.norm == TORCH_RMSNORM else site.rounding
        x = rmsnorm(rows, weight, eps, rounding=rounding).view_as(x)
    if rope is not None:
        x = apply_rotary(x, *rope, layout=layers.layout, rounding=site.rounding)
    return x


def _single(
    spec: Attention,
    site: Site,
    module: Any,
    layers: AttentionLayers,
    input: Input,
    context: Tensor | None,
    mask: Tensor | None,
    rope: Any,
) -> Tensor:
    """Self-attention, and cross-attention to a context."""
    heads = layers.heads
    image: tuple[Tensor, ...] = ()
    if layers.image is not None and context is not None:
        length = context.shape[1] - spec.text
        image = _project(site, layers.image, context[:, :length], heads)
        context = context[:, length:]
    gate_up: Tensor | None = None
    both: Tensor | None = None
    out: Tensor | None = None
    if spec.mlp:
        (outputs,) = layers.all(input)
        qkv, gate_up = outputs.split([3 * module.inner_dim, outputs.shape[-1] - 3 * module.inner_dim], -1)
        query, key, value = qkv.unflatten(-1, (3, heads, -1)).unbind(-3)
        fresh = layers.all.plain or layers.all.scaled
        assert layers.out is not None
        if layers.in_place and not layers.out.fp8:
            both = outputs.new_empty(*outputs.shape[:-1], module.inner_dim + gate_up.shape[-1] // 2)
            out = both[..., : module.inner_dim].unflatten(-1, (heads, -1))
    elif context is None:
        query, key, value = _project(site, layers.all, input, heads)
        fresh = layers.all.packed
    else:
        (query,) = _project(site, layers.query, input, heads)
        key, value = _project(site, layers.context, context, heads, query.shape[-1])
        fresh = layers.context.packed
    tables = None if rope is None else as_one(spec.tables, module, rope)
    keys = None if mask is None or spec.mask is None else spec.mask.of_keys(mask)
    if keys is not None and tables is None and in_one_op(spec, site, module, query, key):
        site.count_call("qk_norm_cross_attention", *(("gate_heads",) if layers.gate is not None else ()))
        query_weight, key_weight = layers.weights
        output = qk_norm_cross_attention(query, key, value, query_weight, key_weight, layers.eps[0], mask=keys)
        return _output(layers, _gated(spec, site, layers, input, output))
    fewer = key.shape[2] != heads  # ranks exchange them with a copy for each head of the query
    ahead = None if context is not None or fewer else values_ahead(spec, module, value, mask, keys)
    query, key = _norm_and_rotate(spec, site, layers, 0, query, key, tables, fresh)
    if mask is not None and isinstance(spec.mask, SegmentMask):
        output = as_one(functools.partial(attend_segments, spec, site, module), query, key, value, mask)
        _count(spec, site, layers, tables is not None, False)
        return _output(layers, _gated(spec, site, layers, input, output))
    output, own = attend(spec, site, module, query, key, value, mask, keys, context is not None, out, ahead)
    if image:
        key = _norm_then_rotate(
            spec, site, layers, image[0], layers.weights[-1], layers.eps[-1], None, spec.norm is not None
        )
        output = output + attend(spec, site, module, query, key, image[1], None, None, True)[0]
    _count(spec, site, layers, tables is not None, own)
    if gate_up is None:
        return _output(layers, _gated(spec, site, layers, input, output))
    return _output_beside_mlp(site, layers, output, gate_up, both, out)


def _output_beside_mlp(
    site: Site, layers: AttentionLayers, heads: Tensor, gate_up: Tensor, both: Tensor | None, out: Tensor | None
) -> Tensor:
    """The output layer's result, where the layer reads heads [B, S, heads, D] and an MLP's SwiGLU side by side.

    gate_up: The input of the SwiGLU, [B, S, 2 I].
    both: Memory for the layer's input, [B, S, heads * D + I], or None.
    out: The columns of `both` for the heads, in which the attention may have written them already.
    """
    assert layers.out is not None
    if layers.out.fp8:
        return layers.out(swiglu_quant(gate_up, prefix=heads.flatten(2)))[0]
    if both is None or out is None:
        both = torch.cat((heads.flatten(2), swiglu(gate_up, rounding=site.rounding)), -1)
    else:
        if heads is not out:
            out.copy_(heads)
        swiglu(gate_up, rounding=site.rounding, out=both[..., -(gate_up.shape[-1] // 2) :])
    return layers.out(both)[0]


def _gated(spec: Attention, site: Site, layers: AttentionLayers, input: Input, output: Tensor) -> Input:
    """The output [B, S, heads, D], each head times its gate; quantised rows where the output layer reads these."""
    if layers.gate is None:
        return output
    (logits,) = layers.gate(input)
    if layers.out is not None and layers.out.fp8:
        return gate_heads_quant(output, logits, spec.gate_scale)
    return gate_heads(output, logits, spec.gate_scale, rounding=site.rounding)


def _joint(
    spec: Attention,
    site: Site,
    module: Any,
    layers: AttentionLayers,
    input: Input,
    context: Tensor,
    mask: Tensor | None,
    rope: Any,
) -> tuple[Tensor, Tensor]:
    """Attention of two streams to both; (first, second) as the stock processors return them."""
    heads, added = layers.heads, layers.added
    second = context.shape[1]
    first = (input[0] if isinstance(input, tuple) else input).shape[1]
    rows, rows2 = slice(0, first), slice(first, first + second)
    if spec.text_first:
        rows, rows2 = slice(second, first + second), slice(0, second)
    tables = None if rope is None else as_one(spec.tables, module, rope)
    if tables is not None and not spec.rotates_text:
        tables = as_one(with_identity_rows, site, tables, second, spec.text_first)
    if added is None:
        query, key, value = _project_both(site, layers, cast(Tensor, input), rows, context, rows2, heads)
        query, key = _norm_and_rotate(spec, site, layers, 0, query, key, tables, layers.all.packed)
    elif layers.in_place and layers.all.even and added.even and layers.all.sizes == added.sizes:
        packed = joined(layers.all, input, rows, added, context, rows2, first + second)
        query, key, value = packed.unflatten(-1, (3, heads, -1)).unbind(-3)
        for stream, part in enumerate((rows, rows2)):
            mine = None if tables is None else (_rows(tables[0], part), _rows(tables[1], part))
            query_part, key_part = query[:, part], key[:, part]
            new = _norm_and_rotate(spec, site, layers, stream, query_part, key_part, mine, True)
            if new[0] is not query_part:
                query_part.copy_(new[0])
                key_part.copy_(new[1])
    else:
        streams = []
        for stream, (linears, tokens, part) in enumerate(((layers.all, input, rows), (added, context, rows2))):
            q, k, v = _project(site, linears, tokens, heads)
            mine = None if tables is None else (_rows(tables[0], part), _rows(tables[1], part))
            streams.append((*_norm_and_rotate(spec, site, layers, stream, q, k, mine, linears.packed), v))
        order = reversed(streams) if spec.text_first else streams
        query, key, value = (torch.cat(parts, 1) for parts in zip(*order))
    if mask is not None and isinstance(spec.mask, PaddingMask):
        query, key, value, seen = without_padding(spec.mask, site, module, query, key, value, mask)
    else:
        seen = mask
    keys = None if seen is None or spec.mask is None else spec.mask.of_keys(seen)
    output, own = attend(spec, site, module, query, key, value, seen, keys, False)
    _count(spec, site, layers, tables is not None, own)
    if added is None:
        both = _output(layers, output)
        return both[:, rows], both[:, rows2]
    result = _output(layers, output[:, rows])
    text = output[:, rows2].flatten(2)
    if mask is not None and isinstance(spec.mask, PaddingMask):
        text = spec.mask.text_of(text, mask)
    if layers.added_out is not None:
        (text,) = layers.added_out(text)
    return result, text


def _project_both(
    site: Site, layers: AttentionLayers, input: Tensor, rows: slice, context: Tensor, rows2: slice, heads: int
) -> tuple[Tensor, ...]:
    """Query, key and value, [B, S + T, heads, D], of two streams that go through the same layers."""
    linears = layers.all
    if layers.in_place and linears.even and linears.direct:
        packed = joined(linears, input, rows, linears, context, rows2, input.shape[1] + context.shape[1])
        return packed.unflatten(-1, (len(linears.sizes), heads, -1)).unbind(-3)
    streams = (input, context) if rows.start == 0 else (context, input)
    return _project(site, linears, joint(*streams), heads)


def _rows(table: Tensor, rows: slice) -> Tensor:
    """Rows of a table [S, W], [B, S, W], or [B, heads, S, W]."""
    return table[..., rows, :]


def _output(layers: AttentionLayers, heads: Input) -> Tensor:
    """The output layer's result, of heads [B, S, heads, D] or of their quantised rows."""
    rows = heads.flatten(2) if isinstance(heads, Tensor) else heads
    if layers.out is None:
        assert isinstance(rows, Tensor)
        return rows
    (output,) = layers.out(rows)
    return output if layers.dropout is None else layers.dropout(output)


def _count(spec: Attention, site: Site, layers: AttentionLayers, rotated: bool, own: bool) -> None:
    ops = layers.ops.get((rotated, own))
    if ops is None:
        mlp = ("swiglu",) if spec.mlp else ()
        ops = (*_ops_before(spec, site, layers, rotated), *(("attention",) if own else ()), *mlp)
        layers.ops[rotated, own] = ops
    site.count_call(*ops)
