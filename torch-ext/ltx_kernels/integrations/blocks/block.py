"""What a model family says about its transformer blocks, and the guards that follow from it."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Callable, Protocol

import torch
from torch import Tensor, nn

from ..._checks import LAYER, RMS
from ..engine.autocast import autocast_dtype, remark_autocast
from ..engine.guards import (
    ATTRIBUTE,
    class_of,
    fits_batch,
    follows_shared,
    hooked,
    submodule,
    why_not_input,
    why_not_norm_weight,
    why_not_tensor,
)
from ..engine.marks import first_with_gradient, marked
from ..engine.norm_forms import FORMS, statistic
from ..engine.recording import Live
from ..engine.sites import Entry, parameters_of, site_of, stock_forward, why_stock
from ..engine.state import remember
from ..linear.linears import linears_of
from ..linear.lora import adapters_state, is_lora
from ..replay.calls import replayed
from .feed_forward import FEED_FORWARD, readers


class Part(Protocol):
    """What describes a part of a block with linear layers: an attention, or an MLP."""

    def groups(self, module: nn.Module, prefix: str) -> list[tuple[str, ...]]: ...


def _way(module: nn.Module) -> Hashable:
    """What tells this way of computing a block from others: see `marked`."""
    site = site_of(module)
    return site.name, site.rounding, *map(adapters_state, filter(is_lora, module.modules()))


@dataclass(frozen=True)
class Block:
    """A class of transformer blocks, and the forward that takes its place.

    classes: Names of the classes, with their modules. Several where the bodies of their forwards are the same.
    forward: The whole block on a `Stream`, with the stock signature. It calls submodules by the stock keyword names,
        since hooks look for them.
    parameters: Names of the stock forward's, without self, where `forward` does not spell them out.
    renames: Parameters of `forward` to the stock forward's names for them, where these differ.
    children: Names of submodules that every block has, beside those that the fields below name.
    optional_children: Names of submodules that some blocks have; also paths of `norms` and `modules`.
    streams: Arguments that are residual streams.
    tensors: Arguments and parameters of the block that ops read beside the streams: modulation and its table.
    unbatched: Arguments that may have another first dimension than the first stream, whose first one is the batch.
    norms: By path, the classes that a norm may have. `forward` reads its parameters and does not call it.
    modules: By path, the classes that another module may have. `forward` reads its parts and does not call it.
    attentions: By name, the description of each attention, or of another child that has an entry of its own.
    feed_forwards: Names of modules that the forward hands to `feed_forward`.
    linears: Groups of other linear layers that share an input, for fp8. A block may lack some of them.
    never_fp8: Paths of linear layers in no group, each with the reason.
    fp8_skip: Patterns of linear layers that fp8 leaves alone unless told otherwise, since they cost more than they
        save.
    fp8_skip_low: The patterns in their place with memory="low". None: the same.
    modulation: Paths of linear layers in no group that read one row of each sample. With memory="low" their weights
        alone are in fp8.
    casts: The stock forward casts results to the stream's dtype, so that `tensors` and norms may have another dtype.
    promotes: Under autocast the first stream, `tensors` and norms may be in float32, and the results are promoted as
        the stock forward's. `forward` has a `Stream` that says so.
    live: Arguments that may be others at every recorded call, such as keys and values of earlier tokens.
    plain, asks: As in `Entry`.
    check: A further reason why a call has to run stock: (block, arguments by name) to a reason or "".
    ops: The public functions that `forward` may call. Empty: those for modulated norms.
    roundings: As in `Entry`.
    names: `parameters`, or what `forward` spells out.
    """

    classes: tuple[str, ...]
    forward: Callable[..., Any]
    parameters: tuple[str, ...] = ()
    renames: Mapping[str, str] = field(default_factory=dict)
    children: frozenset[str] = frozenset()
    optional_children: frozenset[str] = frozenset()
    streams: tuple[str, ...] = ("hidden_states",)
    tensors: tuple[str, ...] = ()
    unbatched: tuple[str, ...] = ()
    norms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    attentions: Mapping[str, Part] = field(default_factory=dict)
    feed_forwards: tuple[str, ...] = ()
    linears: tuple[tuple[str, ...], ...] = ()
    never_fp8: tuple[tuple[str, str], ...] = ()
    fp8_skip: tuple[str, ...] = ()
    fp8_skip_low: tuple[str, ...] | None = None
    modulation: tuple[str, ...] = ()
    casts: bool = False
    promotes: bool = False
    live: Live | None = None
    plain: tuple[str, ...] = ()
    asks: Callable[[nn.Module], Any] | None = None
    check: Callable[[Any, Mapping[str, Any]], str] = lambda block, arguments: ""
    ops: tuple[str, ...] = ()
    roundings: tuple[str, ...] = ("fp32", "eager")
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", self.parameters or parameters_of(self.forward))

    def entry(self) -> Entry:
        """What `optimize` installs."""
        compute, parameters = self.forward, self.names
        own_names = {stock: name for name, stock in self.renames.items()}

        def ordinary(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            named = {own_names.get(name, name): x for name, x in kwargs.items()} if own_names else kwargs
            arguments = {**dict(zip(parameters, args)), **named} if args else named
            reason = self._why_not_call(module, arguments)
            if reason:
                return stock_forward(module, reason, *args, **kwargs)
            site = site_of(module)
            site.count_call()
            input = arguments[self.streams[0]]
            remark_autocast(site.remark, input)
            if not torch.is_grad_enabled():
                return compute(module, *args, **named)
            result = marked(functools.partial(_way, module), input, compute, module, *args, **named)
            if first_with_gradient(result) is not None:
                site.count("gradients")
            return result

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return replayed(module, ordinary, args, kwargs, self.live)

        return Entry(
            self.classes,
            forward,
            self.ops or self._ops(),
            tuple(self.renames.get(name, name) for name in parameters),
            self._children(),
            self.optional_children,
            roundings=self.roundings,
            why_not=self._why_not_module,
            fp8=self._fp8_groups,
            never_fp8=self.never_fp8,
            fp8_skip=self.fp8_skip,
            fp8_skip_low=self.fp8_skip if self.fp8_skip_low is None else self.fp8_skip_low,
            weight_only=self.modulation,
            apart=frozenset((*self.attentions, *self.feed_forwards)),
            plain=self.plain,
            asks=self.asks,
            guarded=True,
            takes_rows=self.takes_rows,
        )

    def takes_rows(self, module: nn.Module, names: str | tuple[str, ...], like: Tensor) -> bool:
        """Whether all these children, which read one result, may be handed quantised rows of it instead of a tensor.

        like: A tensor of the result's dtype and device.
        """
        for name in (names,) if isinstance(names, str) else names:
            child: Any = module._modules[name]
            if name in self.attentions:
                replaced = ATTRIBUTE in child.__dict__
                linears = site_of(child).entry.readers(self.attentions[name], child, like) if replaced else None
            elif name in self.feed_forwards:
                linears = readers(child, like)
            else:
                linears = linears_of(module, (name,), like)
            if linears is None or not linears.fp8:
                return False
        return True

    def _ops(self) -> tuple[str, ...]:
        kinds = {FORMS[name].statistic for classes in self.norms.values() for name in classes if name in FORMS}
        norms = [name for kind, name in ((RMS, "rmsnorm"), (LAYER, "layernorm")) if kind in kinds]
        forms = ("adaln", "gated_residual_adaln")
        return tuple(sorted(["gated_residual", *(f"{form}_{norm}" for form in forms for norm in norms)]))

    def _children(self) -> frozenset[str]:
        """Names of the submodules that every block has."""
        linears = (name for group in self.linears for name in group)
        paths = (*self.norms, *self.modules, *self.attentions, *self.feed_forwards, *linears)
        return self.children | {path.partition(".")[0] for path in paths} - self.optional_children

    def _fp8_groups(self, module: nn.Module) -> list[tuple[str, ...]]:
        """The linear layers that fp8 takes, those that share an input together."""
        groups: list[tuple[str, ...]] = []
        for name, spec in self.attentions.items():
            attention = submodule(module, name)
            groups += spec.groups(attention, name) if attention is not None else []
        for name in self.feed_forwards:
            if class_of(submodule(module, name)) == FEED_FORWARD:
                groups += [(f"{name}.net.0.proj",), (f"{name}.net.2",)]
        found = (tuple(path for path in group if submodule(module, path) is not None) for group in self.linears)
        return [*groups, *filter(None, found)]

    def _why_not_module(self, module: nn.Module) -> str:
        return self._why_not_norms(module) or self._why_not_tables(module)

    def _why_not_norms(self, module: nn.Module) -> str:
        for path, expected in self.modules.items():
            passed = submodule(module, path)
            if passed is None and path in self.optional_children:
                continue
            if class_of(passed) not in expected:
                return f"{path} is {class_of(passed)}"
        for path, classes in self.norms.items():
            norm = submodule(module, path)
            if norm is None and path in self.optional_children:
                continue
            if norm is None or class_of(norm) not in classes:
                return f"{path} is {class_of(norm)}"
            if statistic(norm) and len(getattr(norm, "normalized_shape", (1,))) != 1:
                return f"{path} normalises several dimensions"
            if statistic(norm) == RMS and norm._parameters.get("bias") is not None:
                return f"{path} has a bias"
        return ""

    def _why_not_tables(self, module: nn.Module) -> str:
        for name in self.tensors:
            if name not in self.names and name not in module._parameters:
                return f"it has no parameter {name}"
        return ""

    def _mixes(self, input: Tensor) -> bool:
        """Whether `tensors` and norms may have another dtype than the stream."""
        return self.casts or (self.promotes and autocast_dtype(input) is not None)

    def _why_not_state(self, module: nn.Module, input: Tensor) -> str:
        """Why the block's own parameters and norms keep a call from running ops."""
        reason = why_stock(module) or self._why_not_module(module)
        if reason:
            return reason
        for name in self.tensors:
            table = module._parameters.get(name)
            if table is not None:
                reason = why_not_tensor(name, table, input, self._mixes(input), gradient=follows_shared())
                if reason:
                    return reason
        for path in (*self.modules, *self.norms):
            passed = submodule(module, path)
            if passed is not None and hooked(passed):
                return f"{path} {hooked(passed)}"
        for path in self.norms:
            norm = submodule(module, path)
            if norm is None:
                continue
            reason = why_not_norm_weight(norm, input, self._mixes(input), follows_shared())  # type: ignore[arg-type]
            if reason:
                return f"{path}: {reason}"
        return ""

    def _why_not_call(self, module: nn.Module, arguments: Mapping[str, Any]) -> str:
        """Why a call has to run stock: tensors and modes are checked at every call, modules once for each state."""
        input: Tensor = arguments[self.streams[0]]
        reason = why_not_input(input, site_of(module).rounding, gradient=True, promotes=self.promotes)
        if reason:
            return reason
        for name in self.streams[1:] + self.tensors:
            tensor = arguments.get(name)
            if tensor is not None:
                beside = name in self.tensors
                gradient = not beside or follows_shared()
                reason = why_not_tensor(name, tensor, input, beside and self._mixes(input), gradient)
                if reason:
                    return reason
                fits = tensor.dim() < 2 or (fits_batch(tensor, len(input)) if beside else len(tensor) == len(input))
                if input.dim() > 2 and not fits and name not in self.unbatched:
                    return f"{name} has batch size {len(tensor)}, {self.streams[0]} has {len(input)}"
        key = "block", input.dtype, input.device
        return remember(module, key, self._why_not_state, input) or self.check(module, arguments)
