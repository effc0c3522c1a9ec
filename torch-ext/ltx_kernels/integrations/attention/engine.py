"""The attention of diffusion transformers: project, normalise and rotate query and key, attend, project.

`Attention` (attention/description.py) describes one class of attention modules; this module computes a `Call` of any of
them, with the layers that attention/layers.py finds and the kernel that attention/choice.py chooses. Query, key and
value come out of one product where their weights lie side by side; two streams of tokens are projected into the rows of
one buffer, so that nothing is concatenated; norm and rotation are one launch, in place.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, Callable, cast

import torch
from torch import Tensor, nn

from ..._checks import LAYER
from ...attention import qk_norm_cross_attention
from ...glu import gate_heads, swiglu
from ...norm import rmsnorm
from ...quant import gate_heads_quant, swiglu_quant
from ...rope import apply_rotary, qk_norm_rope
from ..blocks.stream import RMSNORM, joint
from ..engine.guards import hooked, why_not_input
from ..engine.kept import kept
from ..engine.marks import marked
from ..engine.norm_forms import FORMS
from ..engine.recording import as_one
from ..engine.rotary_tables import Tables, with_identity_rows
from ..engine.sites import Entry, Site, stock_forward
from ..linear.fp8 import in_fp8
from ..linear.linears import Linears, joined, kept_layers
from ..linear.packing import unpack
from ..linear.products import Input, as_tensor
from ..parallel import attention as rank_attention
from ..parallel.ranks import context_of
from .call import Call
from .choice import attend, attend_read, in_one_op, parallel_config, values_ahead, without_padding
from .description import FUSED, ROUND_ONCE, SHARED, Attention
from .layers import AttentionLayers, settings_of, why_not_module
from .masks import ALL_KEYS, PaddingMask, SegmentMask


def _readers(spec: Attention, described: Attention, module: nn.Module, input: Tensor) -> Linears | None:
    """As `Entry.readers`: the block's description tells whether the context goes to other layers than the input."""
    first = module._modules[spec.called(module, spec.projections[:1] if described.cross else spec.projections)[0]]
    if first is None or not in_fp8(first) or hooked(module):
        return None
    layers = kept_layers("attention", module, input, AttentionLayers, spec)
    if layers.reason or (layers.gate is not None and not layers.gate.fp8) or (spec.shared and layers.added is None):
        return None
    return layers.query if described.cross else layers.all


def entry_of(spec: Attention) -> Entry:
    """What `optimize` installs for a class of attention modules."""

    def forward(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        if arguments:
            options = {**dict(zip(spec.parameters, arguments)), **options}
        input, context, mask = map(options.pop, spec.inputs, (None, None, None))
        ropes = options.pop(spec.rope, None), options.pop(spec.key_rope, None)
        further = {name: options.pop(name) for name in spec.arguments if name in options}
        return _forward(Call(spec, module, input, context, mask, ropes, further), options)

    shared = {name: f"{name} + {spec.processor}" for name in spec.classes if name in SHARED}
    return Entry(
        tuple(shared.get(name, name) for name in spec.classes),
        forward,
        spec.ops,
        spec.parameters,
        spec.children,
        frozenset(
            (
                *(spec.output.partition(".")[0], *spec.norms),
                *((*spec.added_projections, *spec.added_norms, spec.added_output) if spec.added else ()),
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


def _forward(call: Call, options: dict[str, Any]) -> Any:
    """Computes a call of a module, or runs its stock forward for a reason.

    A block that asked `Entry.readers` may hand over quantised rows instead of a tensor. A self-attention may get its
    input a second time, as the context.

    options: Further arguments.
    """
    spec = call.spec
    reason = _why_not(call, options)
    if not reason:
        call.layers = kept_layers("attention", call.module, call.input, AttentionLayers, spec)
        reason = call.layers.reason
    if reason:
        return _stock(call, reason, options)
    joint = call.context is not None and (call.layers.added is not None or spec.shared)
    call.cross = call.cross and not joint
    compute: Callable[[Call], Any] = _joint if joint else _single
    if not spec.batched:
        compute = functools.partial(_of_one_sample, compute)
    if not torch.is_grad_enabled() or isinstance(call.input, tuple):
        return compute(call)
    return marked(functools.partial(_way, call), call.input, compute, call)


def _of_one_sample(compute: Callable[[Call], Any], call: Call) -> Any:
    """``compute(call)`` of streams [S, H]."""
    input = call.input
    call.input = (input[0].unsqueeze(0), input[1].unsqueeze(0)) if isinstance(input, tuple) else input.unsqueeze(0)
    call.context = None if call.context is None else call.context.unsqueeze(0)
    output = compute(call)
    return output.squeeze(0) if isinstance(output, Tensor) else tuple([stream.squeeze(0) for stream in output])


def _way(call: Call) -> Hashable:
    """What tells this way of computing a call from others: see `marked`."""
    return call.site.name, call.layers.all.packed, call.layers.query.packed


def _why_not(call: Call, options: dict[str, Any]) -> str:
    """Why the arguments of a call keep it from running ops."""
    spec, context, mask = call.spec, call.context, call.mask
    if isinstance(call.input, tuple):  # of a block, which has just asked
        input, reason = call.input[1], ""  # the scales are on the rows' device, too
    else:
        input, reason = call.input, why_not_input(call.input, call.site.rounding, gradient=True)
    if reason:
        return reason
    if options:
        unset = (None, False)
        given = [n for n, v in options.items() if not any(v is u for u in unset) and n not in spec.ignored]
        if given:
            return f"arguments {', '.join(given)}"
    if mask is not None:
        if spec.mask is None or not isinstance(mask, Tensor):
            return "a mask"
        reason = spec.mask.why_not(mask, None if context is None else context.shape[1])
    if call.attends is not None and parallel_config(call) is not None:
        return "ranks exchange tokens"
    return reason or call.why_not_batch() or spec.check(call.module, input, context, call.rope)


def _stock(call: Call, reason: str, options: dict[str, Any]) -> Any:
    """The stock forward, counted as a fallback."""
    spec = call.spec
    parallel = parallel_config(call)
    if parallel is not None:
        rank_attention.check_dispatch(context_of(parallel), call.mask, options.get("encoder_hidden_states_mask"))
    tensor = as_tensor(call.input)
    inputs = zip(spec.inputs, (tensor, tensor if call.twice else call.context, call.mask))
    any_name = "kwargs" in spec.parameters
    named = {name: value for name, value in inputs if name in spec.parameters or (any_name and value is not None)}
    ropes = zip((spec.rope, spec.key_rope), call.ropes)
    named.update({name: spec.stock_rope(call.module, rope) for name, rope in ropes if rope is not None})
    return stock_forward(call.module, reason, **named, **call.further, **options)


def _project(call: Call, linears: Linears, input: Input, width: int = 0) -> tuple[Tensor, ...]:
    """The output of each layer, [B, S, heads, D]; views of one new tensor where the layers are packed.

    width: D, where the first layer is not the query's and may have fewer heads.
    """
    if linears.even:
        return _cut(call, linears, linears.together(input), width)
    if not linears.packed and len(linears.modules) > 1 and call.site.rounding == "fp32":
        call.site.count("unpacked")
    outputs = linears(input)
    width = width or outputs[0].shape[-1] // call.layers.heads
    return tuple([x.unflatten(-1, (-1, width)) for x in outputs])


def _cut(call: Call, linears: Linears, packed: Tensor, width: int = 0) -> tuple[Tensor, ...]:
    """The output of each layer, [B, S, heads, D]: views of all outputs side by side. `width` is as in `_project`."""
    if linears.even:
        return packed.unflatten(-1, (len(linears.sizes), -1 if width else call.layers.heads, width or -1)).unbind(-3)
    width = width or linears.sizes[0] // call.layers.heads
    return tuple([x.unflatten(-1, (-1, width)) for x in packed.split_with_sizes(linears.sizes, -1)])


def _norm_and_rotate(
    call: Call, stream: int, query: Tensor, key: Tensor, rope: Tables | None, fresh: bool
) -> tuple[Tensor, Tensor]:
    """Norm and rotation of query and key, [B, S, heads, D].

    stream: 0, or 1 for the second stream of a joint attention, which has norms of its own.
    fresh: The caller owns the memory of query and key, so that it may be overwritten.
    """
    spec, layers = call.spec, call.layers
    normed = len(layers.eps) > stream
    places = slice(2 * stream, 2 * stream + 2)
    query_weight, key_weight = layers.weights[places] if normed else (None, None)
    eps = layers.eps[stream] if normed else None
    out = (query, key) if fresh and layers.in_place else None
    one_op = normed and _rotates_in_one_op(call)
    if one_op and rope is None and not spec.across_heads:
        # One launch for both norms; the table is one row, which stays in the cache.
        rope = as_one(_identity, call.site, query, key)
    if one_op and rope is not None:
        form = FORMS[cast(str, spec.norm)]
        layer = form.statistic == LAYER
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
            weight_offset=form.offset,
            layout=layers.layout,
            rounding=call.site.rounding,
            out=out,
        )
    if normed:
        query, key = _normed(call, query, query_weight, eps), _normed(call, key, key_weight, eps)
    if rope is not None:
        query, key = (apply_rotary(x, *rope, layout=layers.layout, rounding=call.site.rounding) for x in (query, key))
    return query, key


def _rotates_in_one_op(call: Call) -> bool:
    """Whether norm and rotation are one launch."""
    # In "eager" the op rounds once after the weight, as torch's norm does and diffusers' does not.
    return call.spec.norm in ROUND_ONCE or (call.spec.norm == RMSNORM and call.site.rounding == "fp32")


def _ops_before(call: Call, rotated: bool) -> tuple[str, ...]:
    """The ops that `_norm_and_rotate` runs."""
    normed = bool(call.layers.eps)
    if normed and (rotated or not call.spec.across_heads) and _rotates_in_one_op(call):
        return ("qk_norm_rope",)
    return (*(("rmsnorm",) if normed else ()), *(("apply_rotary",) if rotated else ()))


def _identity(site: Site, query: Tensor, key: Tensor) -> Tables:
    """Tables of a rotation by angle 0, [rows, D / 2], for the rows of a query and a key [B, S, heads, D]."""
    width, device = query.shape[-1] // 2, query.device
    rows = max(query.shape[1], key.shape[1])

    def make() -> Tables:
        return torch.ones(1, width, device=device), torch.zeros(1, width, device=device)

    cos, sin = kept(site, ("identity", width, device), (), make)
    return cos.expand(rows, width), sin.expand(rows, width)


def _normed(call: Call, x: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
    """Query or key [B, S, heads, D] after its norm; weight: None where the norm has none."""
    rows, form = x.flatten(-2) if call.spec.across_heads else x, FORMS[cast(str, call.spec.norm)]
    rounding = form.rounding(call.site.rounding)
    return rmsnorm(rows, weight, eps, weight_offset=form.offset, rounding=rounding).view_as(x)


def _single(call: Call) -> Tensor:
    """Self-attention, and cross-attention to a context."""
    layers, module, context = call.layers, call.module, call.context
    image: tuple[Tensor, ...] = ()
    if layers.image is not None and context is not None:
        length = context.shape[1] - call.spec.text
        image = _project(call, layers.image, context[:, :length])
        context = context[:, length:]
    gate_up: Tensor | None = None
    both: Tensor | None = None
    out: Tensor | None = None
    if call.spec.mlp:
        (outputs,) = layers.all(call.input)
        width: int = module.inner_dim
        qkv, gate_up = outputs.split([3 * width, outputs.shape[-1] - 3 * width], -1)
        query, key, value = qkv.unflatten(-1, (3, layers.heads, -1)).unbind(-3)
        fresh = layers.all.plain or layers.all.scaled
        assert layers.out is not None
        if layers.in_place and not layers.out.fp8:
            both = outputs.new_empty(*outputs.shape[:-1], width + gate_up.shape[-1] // 2)
            out = both[..., :width].unflatten(-1, (layers.heads, -1))
    elif context is None:
        query, key, value = _project(call, layers.all, call.input)
        fresh = layers.all.packed
    else:
        (query,) = _project(call, layers.query, call.input)
        key, value = _project(call, layers.context, context, query.shape[-1])
        fresh = layers.context.packed
    tables = None if call.rope is None else as_one(call.spec.tables, module, call.rope)
    seen = call.seen(call.mask)
    if seen.keys is not None and tables is None and in_one_op(call, query, key):
        call.site.count_call("qk_norm_cross_attention", *(("gate_heads",) if layers.gate is not None else ()))
        query_weight, key_weight = layers.weights
        output = qk_norm_cross_attention(query, key, value, query_weight, key_weight, layers.eps[0], mask=seen.keys)
        return _output(call, _gated(call, output))
    fewer = key.shape[2] != layers.heads  # ranks exchange them with a copy for each head of the query
    ahead = None if call.cross or fewer or call.attends is not None else values_ahead(call, value, seen)
    query, key = _norm_and_rotate(call, 0, query, key, tables, fresh)
    key = call.keys(key)
    reads = call.attends is None and isinstance(call.spec.mask, (PaddingMask, SegmentMask))
    if call.mask is not None and reads and parallel_config(call) is None:
        attend_now = functools.partial(attend_read, call.without_arguments())
        output = as_one(attend_now, query, key, value, call.mask)
        _count(call, tables is not None, False)
        return _output(call, _gated(call, output))
    if call.attends is not None:
        output, own = call.attends(call, query, key, value), False  # it says so itself
    else:
        output, own = attend(call, query, key, value, seen, out, ahead)
    if image:
        key = _normed(call, image[0], layers.weights[-1], layers.eps[-1])
        output = output + attend(call, query, key, image[1], ALL_KEYS)[0]
    _count(call, tables is not None, own)
    if gate_up is None:
        return _output(call, _gated(call, output))
    return _output_beside_mlp(call, output, gate_up, both, out)


def _output_beside_mlp(call: Call, heads: Tensor, gate_up: Tensor, both: Tensor | None, out: Tensor | None) -> Tensor:
    """The output layer's result, where the layer reads heads [B, S, heads, D] and an MLP's SwiGLU side by side.

    gate_up: The input of the SwiGLU, [B, S, 2 I].
    both: Memory for the layer's input, [B, S, heads * D + I], or None.
    out: The columns of `both` for the heads, in which the attention may have written them already.
    """
    output, rounding = call.layers.out, call.site.rounding
    assert output is not None
    if output.fp8:
        return output(swiglu_quant(gate_up, prefix=heads.flatten(2)))[0]
    if both is None or out is None:
        both = torch.cat((heads.flatten(2), swiglu(gate_up, rounding=rounding)), -1)
    else:
        if heads is not out:
            out.copy_(heads)
        swiglu(gate_up, rounding=rounding, out=both[..., -(gate_up.shape[-1] // 2) :])
    return output(both)[0]


def _gated(call: Call, output: Tensor) -> Input:
    """The output [B, S, heads, D], each head times its gate; quantised rows where the output layer reads these."""
    layers, scale = call.layers, call.spec.gate_scale
    if layers.gate is None:
        return output
    (logits,) = layers.gate(call.input)
    if layers.out is not None and layers.out.fp8:
        return gate_heads_quant(output, logits, scale)
    return gate_heads(output, logits, scale, rounding=call.site.rounding)


def _joint(call: Call) -> tuple[Tensor, Tensor]:
    """Attention of two streams to both; the outputs in the order in which the stock processor returns them."""
    spec, layers = call.spec, call.layers
    input, added, context = call.input, layers.added, cast(Tensor, call.context)
    second = context.shape[1]
    first = (input[0] if isinstance(input, tuple) else input).shape[1]
    rows, rows2 = slice(0, first), slice(first, first + second)
    if spec.text_first:
        rows, rows2 = slice(second, first + second), slice(0, second)
    tables = None if call.rope is None else as_one(spec.tables, call.module, call.rope)
    if tables is not None and not spec.rotates_text:
        tables = as_one(with_identity_rows, call.site, tables, second, spec.text_first)
    if tables is not None and (given := tables[0].shape[-2]) > first + second:  # a stream's part of them would fit
        raise RuntimeError(f"{spec.rope}: expected {first + second} rows, as both streams have, got {given}")
    if added is None:
        query, key, value = _project_both(call, rows, rows2)
        query, key = _norm_and_rotate(call, 0, query, key, tables, layers.all.packed)
    elif layers.in_place and layers.all.packed and added.packed and layers.all.sizes == added.sizes:
        packed = joined(layers.all, input, rows, added, context, rows2, first + second)
        query, key, value = _cut(call, layers.all, packed)
        for stream, part in enumerate((rows, rows2)):
            query_part, key_part = query[:, part], key[:, part]
            new = _norm_and_rotate(call, stream, query_part, key_part, _rows(tables, part), True)
            if new[0] is not query_part:
                query_part.copy_(new[0])
                key_part.copy_(new[1])
    else:
        streams = []
        for stream, (linears, tokens, part) in enumerate(((layers.all, input, rows), (added, context, rows2))):
            q, k, v = _project(call, linears, tokens)
            streams.append((*_norm_and_rotate(call, stream, q, k, _rows(tables, part), linears.packed), v))
        order = reversed(streams) if spec.text_first else streams
        query, key, value = (torch.cat(parts, 1) for parts in zip(*order))
    key = call.keys(key, rows.start)
    mask, padding = call.mask, spec.mask if isinstance(spec.mask, PaddingMask) else None
    if mask is not None and padding is not None:
        query, key, value, mask = without_padding(call, padding, query, key, value, mask)
    if call.attends is not None:
        heads, text_heads = call.attends(call, query, key, value)
        own = False  # it says so itself
    else:
        output, own = attend(call, query, key, value, call.seen(mask))
        heads, text_heads = output[:, rows], output[:, rows2]
    _count(call, tables is not None, own)
    if added is None:
        both = _output(call, output)
        return both[:, rows], both[:, rows2]
    result = _output(call, heads)
    text = text_heads.flatten(2)
    if call.mask is not None and padding is not None:
        text = padding.text_of(text, call.mask)
    if layers.added_out is not None:
        (text,) = layers.added_out(text)
    return (text, result) if spec.second_first else (result, text)


def _project_both(call: Call, rows: slice, rows2: slice) -> tuple[Tensor, ...]:
    """Query, key and value, [B, S + T, heads, D], of two streams that go through the same layers.

    rows, rows2: The places of the first stream and of the second in the joint order.
    """
    linears, input, context = call.layers.all, cast(Tensor, call.input), cast(Tensor, call.context)
    if call.layers.in_place and linears.even and linears.direct:
        packed = joined(linears, input, rows, linears, context, rows2, input.shape[1] + context.shape[1])
        return packed.unflatten(-1, (len(linears.sizes), call.layers.heads, -1)).unbind(-3)
    streams = (input, context) if rows.start == 0 else (context, input)
    return _project(call, linears, joint(*streams))


def _rows(tables: Tables | None, rows: slice) -> Tables | None:
    """Rows of tables [S, W], [B, S, W], or [B, heads, S, W]."""
    return None if tables is None else (tables[0][..., rows, :], tables[1][..., rows, :])


def _output(call: Call, heads: Input) -> Tensor:
    """The output layer's result, of heads [B, S, heads, D] or of their quantised rows."""
    layers, rows = call.layers, heads.flatten(2) if isinstance(heads, Tensor) else heads
    if layers.out is None:
        assert isinstance(rows, Tensor)
        return rows
    (output,) = layers.out(rows)
    return output if layers.dropout is None else layers.dropout(output)


def _count(call: Call, rotated: bool, own: bool) -> None:
    ops = call.layers.ops.get((rotated, own))
    if ops is None:
        mlp = ("swiglu",) if call.spec.mlp else ()
        ops = (*_ops_before(call, rotated), *(("attention",) if own else ()), *mlp)
        call.layers.ops[rotated, own] = ops
    call.site.count_call(*ops)
