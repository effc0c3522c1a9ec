"""The attention of diffusion transformers: project, normalise and rotate query and key, attend, project.

`Attention` describes one class of attention modules; this module computes any of them, with the layers that
attention/plan.py finds and the kernel that attention/choice.py chooses. Query, key and value come out of one product
where their weights lie side by side; two streams of tokens are projected into the rows of one buffer, so that nothing
is concatenated; norm and rotation are one launch, in place.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Callable, cast

import torch
from torch import Tensor, nn

from ...attention import qk_norm_cross_attention
from ...glu import gate_heads, swiglu
from ...norm import rmsnorm
from ...quant import gate_heads_quant, swiglu_quant
from ...rope import apply_rotary, qk_norm_rope
from ..blocks.stream import RMSNORM, TORCH_LAYERNORM, TORCH_RMSNORM, joint
from ..engine.guards import ATTRIBUTE, hooked, submodule, why_not_input
from ..engine.kept import kept
from ..engine.rotary_tables import Tables, with_identity_rows
from ..engine.sites import Entry, Site, site_of, stock_forward
from ..engine.state import recall
from ..linear.fp8 import in_fp8
from ..linear.linears import Input, Linears, dequantised, joined, unpack
from ..parallel import context as context_parallel
from ..replay.calls import as_one
from .choice import AttentionModule, attend, in_one_op, parallel_config, values_ahead, without_padding
from .masks import KeyBias, PaddingMask, ScoresMask
from .plan import ADDED, ADDED_NORMS, ADDED_OUTPUT, AttentionPlan, in_features, plan_of, settings_of, why_not_module

# Attention classes that many models share. The processor decides what they compute, so an entry names both.
SHARED = ("diffusers.models.attention_processor.Attention",)
# Norms of query and key that round once, as `qk_norm_rope` does in both roundings.
ROUND_ONCE = (TORCH_RMSNORM, TORCH_LAYERNORM)
# Groups of layers with one input, and the layer that diffusers' fuse_qkv_projections makes of each group.
FUSED = {
    ("to_q", "to_k", "to_v"): "to_qkv",
    ("to_k", "to_v"): "to_kv",
    ADDED: "to_added_qkv",
    ("add_k_proj", "add_v_proj"): "to_added_kv",
}
# Names of arguments that mean the same in the stock forward of every description.
INPUTS = ("hidden_states", "encoder_hidden_states", "attention_mask")


def _same_tables(module: AttentionModule, rope: Any) -> Any:
    return rope


@dataclass(frozen=True)
class Attention:
    """One class of attention modules with one processor class, as this module computes it.

    processor: Name of the processor's class.
    classes: Names of the classes, with their modules. Modules of a class in `SHARED` are known by their processor.
    parameters: Names of the stock forward's parameters, without self.
    other_processors: Names of processor classes that compute the same unless they are given more arguments.
    rope: The argument that holds the rotary tables; empty for an attention without any.
    key_rope: The argument that holds other tables for the keys; then `tables` gets both arguments as a pair.
    layout_of: The layout of a module, where modules of the class differ in it.
    gate, gate_scale: A linear layer that gives every head of a row a logit; the head's output is multiplied by the
        sigmoid of it and by the scale.
    norm: Class of the norms of query and key, where a module has any; None: it may have none.
    across_heads: A norm's mean is taken over all heads of a token.
    layout: Of the rotation, as in `qk_norm_rope`: "interleaved" or "half".
    projections, norms, output: Names of submodules; an output that a module does not have is left out.
    added: Modules may have the layers of diffusers' names in `ADDED`, `ADDED_NORMS` and `ADDED_OUTPUT`, for the second
        stream (the text) of a joint attention.
    text_first: The rows of the second stream come before those of the first in the joint order.
    fuses: The stock processor calls the layers that `fuse_qkv_projections` adds instead of those that they are made of.
    shared: In a module without such projections, the second stream of a joint attention goes through the layers of
        the first. A context is otherwise the keys and values of a cross-attention.
    rotates_text: The rotation covers the second stream of a joint attention. Otherwise the tables hold the rows of the
        first stream alone.
    image: Names of the key projection, the value projection and the norm of an image. The queries attend to the image's
        keys apart from the text's, and both results are added. Modules may lack these submodules.
    text: With `image`, the number of text tokens: the context is the image's tokens and then these.
    mlp: The SwiGLU module of an MLP beside the attention. Then `projections` names one layer, whose output holds query,
        key, value, gate and linear part, and `output` names one layer, which reads heads and MLP side by side.
    ignored: Arguments that the stock processor takes and does not read.
    optional_children: Names of further submodules that some modules have.
    mask: The form of the mask; None: a call with a mask runs stock.
    tables: Turns the rope argument into (cos, sin) for the ops. For a joint attention that rotates both streams they
        hold all rows, in joint order.
    stock_rope: Turns the rope argument into what the stock forward takes, where another module was replaced to make
        another form of it.
    cross: The modules read keys and values from their second input; it decides which layers share an input in fp8.
    parallel_cross: The stock processor hands the parallel configuration to a cross-attention as well.
    check: A further reason why a call has to run stock: (module, hidden_states, encoder_hidden_states, rope) to a
        reason, or "".
    together_with: As in `Entry`.
    """

    processor: str
    classes: tuple[str, ...] = SHARED
    parameters: tuple[str, ...] = (*INPUTS, "cross_attention_kwargs")
    other_processors: tuple[str, ...] = ()
    rope: str = "image_rotary_emb"
    key_rope: str = ""
    layout_of: Callable[[Any], str] | None = None
    gate: str = ""
    gate_scale: float = 1.0
    norm: str | None = TORCH_RMSNORM
    across_heads: bool = False
    layout: str = "interleaved"
    projections: tuple[str, ...] = ("to_q", "to_k", "to_v")
    norms: tuple[str, str] = ("norm_q", "norm_k")
    output: str = "to_out"
    added: bool = False
    text_first: bool = True
    fuses: bool = False
    shared: bool = False
    rotates_text: bool = True
    image: tuple[str, ...] = ()
    text: int = 0
    mlp: str = ""
    ignored: tuple[str, ...] = ()
    optional_children: tuple[str, ...] = ()
    mask: KeyBias | ScoresMask | None = None
    tables: Callable[[Any, Any], Tables] = _same_tables
    stock_rope: Callable[[Any, Any], Any] = _same_tables
    cross: bool = False
    parallel_cross: bool = True
    check: Callable[[Any, Tensor, Tensor | None, Any], str] = lambda *_: ""
    together_with: str = ""

    @property
    def children(self) -> frozenset[str]:
        """Submodules that every module of the class has."""
        return frozenset(self.projections)

    def groups(self, module: nn.Module, prefix: str) -> list[tuple[str, ...]]:
        """The linear layers of a module that share an input, by their names behind a prefix, for fp8."""
        q, *kv = self.projections
        groups: list[tuple[str, ...]] = [(q,), tuple(kv)] if self.cross else [self.projections]
        groups += [self.image[:2], (self.output if self.mlp else f"{self.output}.0",)]
        groups += [ADDED, (ADDED_OUTPUT,)] if self.added else []
        return [
            tuple(f"{prefix}.{name}" for name in self.called(module, group))
            for group in groups
            if group and all(name and submodule(module, name) is not None for name in group)
        ]

    def called(self, module: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
        """The layers that stand for some with the same input: the one that was fused from them, or themselves."""
        fused = FUSED.get(names, "") if self.fuses and module.__dict__.get("fused_projections") else ""
        return (fused,) if module._modules.get(fused) is not None else names

    def readers(self, module: nn.Module, hidden_states: Tensor) -> Linears | None:
        """The linear layers that read a module's first input, if they may be handed quantised rows instead of it."""
        site = module.__dict__.get(ATTRIBUTE)
        if site is None or hooked(module):
            return None
        first = module._modules[self.called(module, self.projections[:1] if self.cross else self.projections)[0]]
        if first is None or not in_fp8(first):
            return None
        plan = plan_of(site.entry.description, module, hidden_states)
        if plan.reason or (plan.gate is not None and not plan.gate.fp8) or (self.shared and plan.added is None):
            return None
        return plan.query if self.cross else plan.all

    def entry(self) -> Entry:
        """What `optimize` installs."""

        def forward(module: nn.Module, *arguments: Any, **options: Any) -> Any:
            if arguments:
                options = {**dict(zip(self.parameters, arguments)), **options}
            input, context, mask = map(options.pop, INPUTS, (None, None, None))
            return _forward(self, module, input, context, mask, options)

        shared = {name: f"{name} + {self.processor}" for name in self.classes if name in SHARED}
        return Entry(
            tuple(shared.get(name, name) for name in self.classes),
            forward,
            self._ops(),
            self.parameters,
            self.children,
            frozenset(
                (
                    *(self.output, *self.norms, *((*ADDED, *ADDED_NORMS, ADDED_OUTPUT) if self.added else ())),
                    *(*self.image, self.gate, self.mlp, *self.optional_children, *FUSED.values()),
                    "processor",  # a module, as an IP-Adapter's processor is
                )
            ),
            why_not=functools.partial(why_not_module, self),
            settings=settings_of,
            together_with=self.together_with,
            packs=self.packs,
            release=lambda module: unpack(module, self.packs(module)),
            description=self,
        )

    def _ops(self) -> tuple[str, ...]:
        apart = ("apply_rotary",) if self.rope and self.norm not in ROUND_ONCE else ()
        gate = ("gate_heads",) if self.gate else ()
        mlp = ("swiglu",) if self.mlp else ()
        return ("qk_norm_rope", "attention", "qk_norm_cross_attention", "rmsnorm", *apart, *gate, *mlp)

    def packs(self, module: nn.Module) -> tuple[tuple[str, ...], ...]:
        """Groups of linear layers whose weights should lie side by side."""
        if self.mlp:
            return ()
        to_q, to_k, _ = (cast(nn.Linear, module._modules[name]) for name in self.projections)
        # A cross-attention finds the last two adjacent as well.
        main = self.projections if in_features(to_q) == in_features(to_k) else self.projections[1:]
        others = (ADDED if self.added else (), self.image[:2])
        return (main, *(names for names in others if names and all(module._modules.get(name) for name in names)))


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

    A block that asked `Attention.readers` may hand over quantised rows instead of a tensor.
    """
    rope = options.pop(spec.rope, None)
    key_rope = options.pop(spec.key_rope, None)
    if key_rope is not None:
        rope = rope, key_rope
    site = site_of(module)
    if isinstance(input, tuple):  # `readers` has found the plan and checked the module; the arguments are checked here
        like = dequantised(input) if torch.compiler.is_compiling() else input[1]
        plan = recall(module, ("attention", torch.bfloat16, input[1].device)) or plan_of(
            spec, module, dequantised(input)
        )
        reason = plan.reason or _why_not_call(spec, module, like, context, mask, rope, options)
    else:
        reason = _why_not_call(spec, module, input, context, mask, rope, options)
        if not reason:
            plan = plan_of(spec, module, input)
            reason = plan.reason
    if reason:
        parallel = parallel_config(spec, cast(AttentionModule, module), context is not None)
        if parallel is not None:
            masks = (mask, options.get("encoder_hidden_states_mask"))
            context_parallel.check_dispatch(context_parallel.context_of(parallel), *masks)
        tensor = dequantised(input) if isinstance(input, tuple) else input
        tables = (rope, None) if key_rope is None else rope
        named = {
            name: spec.stock_rope(module, table)
            for name, table in zip((spec.rope, spec.key_rope), tables)
            if table is not None
        }
        inputs = {name: value for name, value in zip(INPUTS, (tensor, context, mask)) if name in spec.parameters}
        return stock_forward(module, reason, **inputs, **named, **options)
    if context is not None and (plan.added is not None or spec.shared):
        return _joint(spec, site, module, plan, input, context, mask, rope)
    return _single(spec, site, module, plan, input, context, mask, rope)


def _project(site: Site, linears: Linears, input: Input, heads: int) -> tuple[Tensor, ...]:
    """The output of each layer, [B, S, heads, D]; views of one new tensor where the layers are packed."""
    if linears.even:
        return linears.together(input).unflatten(-1, (len(linears.sizes), heads, -1)).unbind(-3)
    if not linears.packed and len(linears.modules) > 1 and site.rounding == "fp32":
        site.count_unpacked()
    return tuple([x.unflatten(-1, (heads, -1)) for x in linears(input)])


def _norm_and_rotate(
    spec: Attention,
    site: Site,
    plan: AttentionPlan,
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
    normed = len(plan.eps) > stream
    places = slice(2 * stream, 2 * stream + 2)
    query_weight, key_weight = plan.weights[places] if normed else (None, None)
    eps = plan.eps[stream] if normed else None
    out = (query, key) if fresh and plan.in_place else None
    one_op = _rotates_in_one_op(spec, site)
    if one_op and normed and rope is None and not spec.across_heads:
        # One launch for both norms; the table is one row, which stays in the cache.
        rope = as_one(_identity, site, query)
    if rope is not None and one_op and normed:
        layer = spec.norm == TORCH_LAYERNORM
        query_bias, key_bias = plan.biases[places] if layer else (None, None)
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
            layout=plan.layout,
            rounding=site.rounding,
            out=out,
        )
    return tuple(  # type: ignore[return-value]
        _norm_then_rotate(spec, site, plan, x, weight, eps, rope, normed)
        for x, weight in ((query, query_weight), (key, key_weight))
    )


def _rotates_in_one_op(spec: Attention, site: Site) -> bool:
    """Whether norm and rotation are one launch."""
    # In "eager" the op rounds once after the weight, as torch's norm does and diffusers' does not.
    return spec.norm in ROUND_ONCE or (spec.norm == RMSNORM and site.rounding == "fp32")


def _ops_before(spec: Attention, site: Site, plan: AttentionPlan, rotated: bool) -> tuple[str, ...]:
    """The ops that `_norm_and_rotate` runs."""
    if plan.eps and (rotated or not spec.across_heads) and _rotates_in_one_op(spec, site):
        return ("qk_norm_rope",)
    return (*(("rmsnorm",) if plan.eps else ()), *(("apply_rotary",) if rotated else ()))


def _identity(site: Site, query: Tensor) -> Tables:
    """Tables of a rotation by angle 0, [S, D / 2], for a query [B, S, heads, D]."""
    width, device = query.shape[-1] // 2, query.device

    def make() -> Tables:
        return torch.ones(1, width, device=device), torch.zeros(1, width, device=device)

    cos, sin = kept(site, ("identity", width, device), (), make)
    return cos.expand(query.shape[1], width), sin.expand(query.shape[1], width)


def _norm_then_rotate(
    spec: Attention,
    site: Site,
    plan: AttentionPlan,
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
        x = apply_rotary(x, *rope, layout=plan.layout, rounding=site.rounding)
    return x


def _single(
    spec: Attention,
    site: Site,
    module: Any,
    plan: AttentionPlan,
    input: Input,
    context: Tensor | None,
    mask: Tensor | None,
    rope: Any,
) -> Tensor:
    """Self-attention, and cross-attention to a context."""
    heads = module.heads
    image: tuple[Tensor, ...] = ()
    if plan.image is not None and context is not None:
        length = context.shape[1] - spec.text
        image = _project(site, plan.image, context[:, :length], heads)
        context = context[:, length:]
    gate_up: Tensor | None = None
    both: Tensor | None = None
    out: Tensor | None = None
    if spec.mlp:
        (outputs,) = plan.all(input)
        qkv, gate_up = outputs.split([3 * module.inner_dim, outputs.shape[-1] - 3 * module.inner_dim], -1)
        query, key, value = qkv.unflatten(-1, (3, heads, -1)).unbind(-3)
        fresh = plan.all.plain or plan.all.scaled
        assert plan.out is not None
        if plan.in_place and not plan.out.fp8:
            both = outputs.new_empty(*outputs.shape[:-1], module.inner_dim + gate_up.shape[-1] // 2)
            out = both[..., : module.inner_dim].unflatten(-1, (heads, -1))
    elif context is None:
        query, key, value = _project(site, plan.all, input, heads)
        fresh = plan.all.packed
    else:
        (query,) = _project(site, plan.query, input, heads)
        key, value = _project(site, plan.context, context, heads)
        fresh = plan.context.packed
    tables = None if rope is None else as_one(spec.tables, module, rope)
    keys = None if mask is None or spec.mask is None else spec.mask.of_keys(mask)
    if keys is not None and tables is None and in_one_op(spec, site, module, query, key):
        site.count_call("qk_norm_cross_attention", *(("gate_heads",) if plan.gate is not None else ()))
        query_weight, key_weight = plan.weights
        output = qk_norm_cross_attention(query, key, value, query_weight, key_weight, plan.eps[0], mask=keys)
        return _output(plan, _gated(spec, site, plan, input, output))
    ahead = None if context is not None else values_ahead(spec, module, value, mask, keys)
    query, key = _norm_and_rotate(spec, site, plan, 0, query, key, tables, fresh)
    output, own = attend(spec, site, module, query, key, value, mask, keys, context is not None, out, ahead)
    if image:
        key = _norm_then_rotate(spec, site, plan, image[0], plan.weights[-1], plan.eps[-1], None, spec.norm is not None)
        output = output + attend(spec, site, module, query, key, image[1], None, None, True)[0]
    _count(spec, site, plan, tables is not None, own)
    if gate_up is None:
        return _output(plan, _gated(spec, site, plan, input, output))
    return _output_beside_mlp(site, plan, output, gate_up, both, out)


def _output_beside_mlp(
    site: Site, plan: AttentionPlan, heads: Tensor, gate_up: Tensor, both: Tensor | None, out: Tensor | None
) -> Tensor:
    """The output layer's result, where the layer reads heads [B, S, heads, D] and an MLP's SwiGLU side by side.

    gate_up: The input of the SwiGLU, [B, S, 2 I].
    both: Memory for the layer's input, [B, S, heads * D + I], or None.
    out: The columns of `both` for the heads, in which the attention may have written them already.
    """
    assert plan.out is not None
    if plan.out.fp8:
        return plan.out(swiglu_quant(gate_up, prefix=heads.flatten(2)))[0]
    if both is None or out is None:
        both = torch.cat((heads.flatten(2), swiglu(gate_up, rounding=site.rounding)), -1)
    else:
        if heads is not out:
            out.copy_(heads)
        swiglu(gate_up, rounding=site.rounding, out=both[..., -(gate_up.shape[-1] // 2) :])
    return plan.out(both)[0]


def _gated(spec: Attention, site: Site, plan: AttentionPlan, input: Input, output: Tensor) -> Input:
    """The output [B, S, heads, D], each head times its gate; quantised rows where the output layer reads these."""
    if plan.gate is None:
        return output
    (logits,) = plan.gate(input)
    if plan.out is not None and plan.out.fp8:
        return gate_heads_quant(output, logits, spec.gate_scale)
    return gate_heads(output, logits, spec.gate_scale, rounding=site.rounding)


def _joint(
    spec: Attention,
    site: Site,
    module: Any,
    plan: AttentionPlan,
    input: Input,
    context: Tensor,
    mask: Tensor | None,
    rope: Any,
) -> tuple[Tensor, Tensor]:
    """Attention of two streams to both; (first, second) as the stock processors return them."""
    heads, added = module.heads, plan.added
    second = context.shape[1]
    first = (input[0] if isinstance(input, tuple) else input).shape[1]
    rows, rows2 = slice(0, first), slice(first, first + second)
    if spec.text_first:
        rows, rows2 = slice(second, first + second), slice(0, second)
    tables = None if rope is None else as_one(spec.tables, module, rope)
    if tables is not None and not spec.rotates_text:
        tables = as_one(with_identity_rows, site, tables, second, spec.text_first)
    if added is None:
        query, key, value = _project_both(site, plan, cast(Tensor, input), rows, context, rows2, heads)
        query, key = _norm_and_rotate(spec, site, plan, 0, query, key, tables, plan.all.packed)
    elif plan.in_place and plan.all.even and added.even and plan.all.sizes == added.sizes:
        packed = joined(plan.all, input, rows, added, context, rows2, first + second)
        query, key, value = packed.unflatten(-1, (3, heads, -1)).unbind(-3)
        for stream, part in enumerate((rows, rows2)):
            mine = None if tables is None else (_rows(tables[0], part), _rows(tables[1], part))
            query_part, key_part = query[:, part], key[:, part]
            new = _norm_and_rotate(spec, site, plan, stream, query_part, key_part, mine, True)
            if new[0] is not query_part:
                query_part.copy_(new[0])
                key_part.copy_(new[1])
    else:
        streams = []
        for stream, (linears, tokens, part) in enumerate(((plan.all, input, rows), (added, context, rows2))):
            q, k, v = _project(site, linears, tokens, heads)
            mine = None if tables is None else (_rows(tables[0], part), _rows(tables[1], part))
            streams.append((*_norm_and_rotate(spec, site, plan, stream, q, k, mine, linears.packed), v))
        order = reversed(streams) if spec.text_first else streams
        query, key, value = (torch.cat(parts, 1) for parts in zip(*order))
    if mask is not None and isinstance(spec.mask, PaddingMask):
        query, key, value, seen = without_padding(spec.mask, site, module, query, key, value, mask)
    else:
        seen = mask
    keys = None if seen is None or spec.mask is None else spec.mask.of_keys(seen)
    output, own = attend(spec, site, module, query, key, value, seen, keys, False)
    _count(spec, site, plan, tables is not None, own)
    if added is None:
        both = _output(plan, output)
        return both[:, rows], both[:, rows2]
    result = _output(plan, output[:, rows])
    text = output[:, rows2].flatten(2)
    if mask is not None and isinstance(spec.mask, PaddingMask):
        text = spec.mask.text_of(text, mask)
    if plan.added_out is not None:
        (text,) = plan.added_out(text)
    return result, text


def _project_both(
    site: Site, plan: AttentionPlan, input: Tensor, rows: slice, context: Tensor, rows2: slice, heads: int
) -> tuple[Tensor, ...]:
    """Query, key and value, [B, S + T, heads, D], of two streams that go through the same layers."""
    linears = plan.all
    if plan.in_place and linears.even and linears.direct:
        packed = joined(linears, input, rows, linears, context, rows2, input.shape[1] + context.shape[1])
        return packed.unflatten(-1, (len(linears.sizes), heads, -1)).unbind(-3)
    streams = (input, context) if rows.start == 0 else (context, input)
    return _project(site, linears, joint(*streams), heads)


def _rows(table: Tensor, rows: slice) -> Tensor:
    """Rows of a table [S, W], [B, S, W], or [B, heads, S, W]."""
    return table[..., rows, :]


def _output(plan: AttentionPlan, heads: Input) -> Tensor:
    """The output layer's result, of heads [B, S, heads, D] or of their quantised rows."""
    rows = heads.flatten(2) if isinstance(heads, Tensor) else heads
    if plan.out is None:
        assert isinstance(rows, Tensor)
        return rows
    (output,) = plan.out(rows)
    return output if plan.dropout is None else plan.dropout(output)


def _count(spec: Attention, site: Site, plan: AttentionPlan, rotated: bool, own: bool) -> None:
    ops = plan.ops.get((rotated, own))
    if ops is None:
        mlp = ("swiglu",) if spec.mlp else ()
        ops = (*_ops_before(spec, site, plan, rotated), *(("attention",) if own else ()), *mlp)
        plan.ops[rotated, own] = ops
    site.count_call(*ops)
