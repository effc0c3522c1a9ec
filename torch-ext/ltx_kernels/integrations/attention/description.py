"""What a family says about one class of attention modules: data, which attention/engine.py computes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Protocol, cast

from torch import Tensor, nn

from ..._checks import LAYER
from ..blocks.stream import TORCH_RMSNORM
from ..engine.guards import submodule
from ..engine.norm_forms import FORMS
from ..engine.rotary_tables import Tables
from .masks import KeyBias, ScoresMask

# The layers of a joint attention's second stream, in most classes.
ADDED = ("add_q_proj", "add_k_proj", "add_v_proj")
ADDED_NORMS = ("norm_added_q", "norm_added_k")
ADDED_OUTPUT = "to_add_out"
# Attention classes that many models share. The processor decides what they compute, so an entry names both.
SHARED = ("diffusers.models.attention_processor.Attention",)
# Norms of query and key that round once, as `qk_norm_rope` does in both roundings.
ROUND_ONCE = tuple(name for name, form in FORMS.items() if not form.twice)
# Groups of layers with one input, and the layer that diffusers' fuse_qkv_projections makes of each group.
FUSED = {
    ("to_q", "to_k", "to_v"): "to_qkv",
    ("to_k", "to_v"): "to_kv",
    ADDED: "to_added_qkv",
    ("add_k_proj", "add_v_proj"): "to_added_kv",
}
# The arguments of a stock forward that hold input, context and mask, in most classes.
INPUTS = ("hidden_states", "encoder_hidden_states", "attention_mask")


def _same_tables(module: AttentionModule, rope: Any) -> Any:
    return rope


@dataclass(frozen=True)
class Attention:
    """One class of attention modules with one processor class, as attention/engine.py computes it.

    processor: Name of the processor's class.
    classes: Names of the classes, with their modules. Modules of a class in `SHARED` are known by their processor.
    parameters: Names of the stock forward's parameters, without self.
    inputs: Those among them of the input, of the context or second stream, and of the mask.
    other_processors: Names of processor classes that compute the same unless they are given more arguments.
    rope: The argument that holds the rotary tables; empty for an attention without any.
    key_rope: The argument that holds other tables for the keys; then `tables` gets both arguments as a pair.
    layout_of: The layout of a module, where modules of the class differ in it.
    gate, gate_scale: A linear layer that gives every head of a row a logit, or every column of the heads; the output is
        multiplied by the sigmoid of it and by the scale.
    norm: Class of the norms of query and key, where a module has any; None: it may have none.
    across_heads: A norm's mean is taken over all heads of a token.
    layout: Of the rotation, as in `qk_norm_rope`: "interleaved" or "half".
    heads: The attribute with the number of the query's heads. Keys and values may have fewer, which queries share.
    scale: The attribute that the stock processor scales the scores by; empty where it leaves the scale to torch.
    projections, norms: Names of submodules.
    output: The path of the output layer, or of a list that holds it and the dropout after it. Modules may lack it. Name
        the layer itself, as in "to_out.0", where the stock processor calls no dropout.
    added: Modules may have layers for the second stream (the text) of a joint attention.
    added_projections, added_norms, added_output: The names of these layers.
    text_first: The rows of the second stream come before those of the first in the joint order.
    fuses: The stock processor calls the layers that `fuse_qkv_projections` adds instead of those that they are made of.
    batched: The streams have a batch, [B, S, H]. Otherwise they are [S, H], the tokens of one sample.
    second_first: The stock forward returns the second stream of a joint attention before the first.
    grouped: The stock processor gives diffusers' dispatch keys and values of fewer heads, without a copy for each head
        of the query.
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
    casts: The stock processor casts query and key to the value's dtype after norm and rotation, so that the norms'
        weights may have another dtype than the input.
    attends: Computes an attention that keeps keys and values, or attends in several calls: (call, query, key, value),
        after norm and rotation, to the output [B, S, heads, D], or to a pair of a joint attention's first and second
        stream. `attend` of attention/choice.py computes each call. A recorded call does not run it again: it calls
        `refuse` where it reads or writes what is kept.
    arguments: Names of the stock forward's further arguments, which `attends` reads from `Call.further`. A
        call without any of them attends as other classes do.
    check: A further reason why a call has to run stock: (module, hidden_states, encoder_hidden_states, rope) to a
        reason, or "".
    why_not: A further reason why a module cannot be replaced, or "". Processors that many models share need it.
    together_with: As in `Entry`.
    """

    processor: str
    classes: tuple[str, ...] = SHARED
    parameters: tuple[str, ...] = (*INPUTS, "cross_attention_kwargs")
    inputs: tuple[str, str, str] = INPUTS
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
    heads: str = "heads"
    scale: str = ""
    output: str = "to_out"
    added: bool = False
    added_projections: tuple[str, ...] = ADDED
    added_norms: tuple[str, str] = ADDED_NORMS
    added_output: str = ADDED_OUTPUT
    text_first: bool = True
    fuses: bool = False
    batched: bool = True
    second_first: bool = False
    grouped: bool = False
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
    casts: bool = False
    attends: Callable[[Any, Tensor, Tensor, Tensor], Any] | None = None
    arguments: tuple[str, ...] = ()
    check: Callable[[Any, Tensor, Tensor | None, Any], str] = lambda *_: ""
    why_not: Callable[[Any], str] = lambda _: ""
    together_with: str = ""

    def __post_init__(self) -> None:
        if self.across_heads and self.norm and FORMS[self.norm].statistic == LAYER:
            raise ValueError("across_heads: expected an RMS norm of query and key with it, which alone has an op")

    @property
    def children(self) -> frozenset[str]:
        """Submodules that every module of the class has."""
        return frozenset(self.projections)

    def groups(self, module: nn.Module, prefix: str) -> list[tuple[str, ...]]:
        """The linear layers of a module that share an input, by their names after a prefix, for fp8."""
        q, *kv = self.projections
        groups: list[tuple[str, ...]] = [(q,), tuple(kv)] if self.cross else [self.projections]
        gate = module._modules.get(self.gate)
        if gate is not None and out_features(gate) == out_features(module._modules[q]):  # one for each column
            groups[0] = (*groups[0], self.gate)
        groups += [self.image[:2], (self.output_layer(module),)]
        groups += [self.added_projections, (self.added_output,)] if self.added else []
        return [
            tuple(f"{prefix}.{name}" for name in self.called(module, group))
            for group in groups
            if group and all(name and submodule(module, name) is not None for name in group)
        ]

    def output_layer(self, module: nn.Module) -> str:
        """The path of the output layer."""
        first = f"{self.output}.0"
        return self.output if submodule(module, first) is None else first

    def called(self, module: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
        """The layers that stand for some with the same input: the one that was fused from them, or themselves."""
        fused = FUSED.get(names, "") if self.fuses and module.__dict__.get("fused_projections") else ""
        return (fused,) if module._modules.get(fused) is not None else names

    @property
    def ops(self) -> tuple[str, ...]:
        """The public functions that calls may run."""
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
        others = (self.added_projections if self.added else (), self.image[:2])
        return (main, *(names for names in others if names and all(module._modules.get(name) for name in names)))


def in_features(linear: nn.Module | None) -> object:
    return getattr(linear, "in_features", None)


def out_features(linear: nn.Module | None) -> int | None:
    return getattr(linear, "out_features", None)


class Processor(Protocol):
    """What diffusers' attention processors hold."""

    _attention_backend: Any
    _parallel_config: Any


class AttentionModule(Protocol):
    """What diffusers' attention modules hold, beside their submodules."""

    processor: Processor
    training: bool
    _modules: dict[str, nn.Module]
    __dict__: dict[str, Any]
