"""How `optimize` puts a function in the place of a module's forward, and what it remembers.

A module that is replaced keeps its class, its parameters and its place. It gets a bound method as its ``forward``,
below whatever hooks wrap it (accelerate's, diffusers'), and ``_ltx_kernels``: the site, which it shares with the other
modules of its class. Both travel with a deepcopy, and ``restore`` takes both away.
"""

from __future__ import annotations

import inspect
import itertools
import pickle
import types
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
from torch import Tensor, nn

from .._variant import COMPILED_DEVICE, constant_when_compiled

ATTRIBUTE = "_ltx_kernels"

_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, Site] = weakref.WeakValueDictionary()


def name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def class_of(value: object) -> str:
    return name_of(type(value))


@dataclass(frozen=True)
class Entry:
    """What is known about one class: how to compute its forward, and which modules of it that fits."""

    forward: Callable[..., Any]
    ops: tuple[str, ...]  # the public functions that it calls
    parameters: tuple[str, ...]  # of the stock forward, without self
    children: frozenset[str] = frozenset()  # the names of the modules that the stock forward knows
    level: str = "block"
    roundings: tuple[str, ...] = ("fp32", "eager")
    # Why this module cannot be replaced, empty if it can; what may change later is asked at every call instead.
    why_not: Callable[[nn.Module], str] = lambda module: ""
    # What the site has to know beside the rounding, from the first module of the class.
    settings: Callable[[nn.Module], Mapping[str, Any]] = lambda module: {}
    # Why `restore` cannot put this module back, and what it has to undo beside the forward.
    why_not_restored: Callable[[nn.Module], str] = lambda module: ""
    release: Callable[[nn.Module], None] = lambda module: None
    # The class whose replacement only modules of this class understand: where both were replaced, both go together.
    together_with: str = ""
    # The linear layers below such a module that precision="fp8" quantises, those that share an input together, and
    # patterns of those that it leaves in their own precision unless told otherwise.
    fp8: tuple[tuple[str, ...], ...] = ()
    fp8_skip: tuple[str, ...] = ()


@dataclass
class Plan:
    """What an `optimize` would do, by the modules' names."""

    modules: dict[str, tuple[nn.Module, Entry]] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)


class Site:
    """The modules of one class in one optimized object: their settings, and what has happened at run time."""

    def __init__(
        self, entry: Entry, stock: Callable[..., Any], class_name: str, rounding: str, settings: Mapping[str, Any]
    ) -> None:
        self.entry, self.class_name, self.rounding, self.settings = entry, class_name, rounding, settings
        # The class's forward. torch.compile cannot take it from a class that diffusers marks allow_in_graph, a block's.
        self.stock = stock
        self.modules = 0
        self.together = False  # a module of entry.together_with was replaced as well
        self.unpacked = 0  # calls of an attention whose projections ran one by one, and not by one GEMM
        self.calls = 0  # that ran the package's ops
        self.traces = 0  # by torch.compile, of calls that will run them
        self.chosen: set[str] = set()  # ops that calls named, of a class whose calls differ
        self.fallbacks: Counter[str] = Counter()  # calls that ran the stock forward instead, by reason
        self.cache: dict[Any, Any] = {}
        # A number instead of a reference: torch.compile takes it for a constant, which all modules of a site share.
        self.number = next(_numbers)
        _by_number[self.number] = self

    @property
    def name(self) -> str:
        """The class with its library, for people: torch.RMSNorm is not diffusers.RMSNorm."""
        parts = self.class_name.split(".")
        return f"{parts[0]}.{parts[-1]}"

    @property
    def ops(self) -> tuple[str, ...]:
        """Those that calls have run; before the first call, all that they may run."""
        return tuple(op for op in self.entry.ops if not self.chosen or op in self.chosen)

    def __deepcopy__(self, memo: dict[int, Any]) -> Site:
        copied = Site(self.entry, self.stock, self.class_name, self.rounding, self.settings)
        copied.modules, copied.together = self.modules, self.together
        memo[id(self)] = copied
        return copied

    def __reduce__(self) -> Any:
        raise pickle.PicklingError("an optimized model cannot be pickled: restore it first, or save its state_dict")

    def count_call(self, *ops: str) -> None:
        if torch.compiler.is_compiling():
            _count_trace(self.number, "", *ops)
        else:
            self.calls += 1
            self.chosen.update(ops)

    def count_fallback(self, reason: str) -> None:
        if torch.compiler.is_compiling():
            _count_trace(self.number, reason)
        else:
            self.fallbacks[reason] += 1


def stock_forward(module: Any, reason: str, *arguments: Any, **options: Any) -> Any:
    """What the stock module would do, counted as a fallback."""
    site = module._ltx_kernels
    site.count_fallback(reason)
    return site.stock(module, *arguments, **options)


@constant_when_compiled
def _count_trace(number: int, reason: str, *ops: str) -> None:
    """Runs while torch.compile traces, and leaves nothing in the graph."""
    site = _by_number.get(number)
    if site is None:
        return
    if reason:
        site.fallbacks[f"{reason} (compiled)"] += 1
    else:
        site.traces += 1
        site.chosen.update(ops)


def hooked(module: nn.Module) -> bool:
    """Whether calling the module does more than its forward, or another one than its class's or ours."""
    if module._forward_hooks or module._forward_pre_hooks:
        return True
    forward = module.__dict__.get("forward")
    if forward is None:
        return False
    site = module.__dict__.get(ATTRIBUTE)
    if site is None or type(forward) is not types.MethodType:  # hooks are functools.partial
        return True
    # torch.compile of torch 2.11 takes one function for two, so there the type has to do.
    return not torch.compiler.is_compiling() and forward.__func__ is not site.entry.forward


def children(module: nn.Module, *names: str) -> tuple[Any, ...]:
    """Submodules by name, where attribute access by nn.Module's __getattr__ is too slow: it takes ten times as long."""
    modules = module._modules
    return tuple(modules[name] for name in names)


def plain_linear(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a module is nn.Linear and nothing else, with ordinary parameters (not quantised, not distributed) that
    need no gradient."""
    if type(module) is not nn.Linear or "forward" in module.__dict__ or hooked(module):
        return False
    grad = torch.is_grad_enabled()
    for parameter in module._parameters.values():
        if parameter is not None and (
            type(parameter) is not nn.Parameter or parameter.dtype != dtype or (grad and parameter.requires_grad)
        ):
            return False
    return True


_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def why_not_input(tensor: Tensor) -> str:
    """Why ops cannot take a module's input now; empty if they can."""
    if tensor.dtype not in _DTYPES:
        return f"dtype {tensor.dtype}"
    if torch.is_grad_enabled() and tensor.requires_grad:
        return "a gradient is needed"
    device = tensor.device.type
    if device != COMPILED_DEVICE:
        return f"the input is on {device}, and this build holds the kernels for {COMPILED_DEVICE}"
    if torch.is_autocast_enabled(device):
        return "autocast is on"
    if not torch.compiler.is_compiling() and type(tensor) is not Tensor:
        return f"the input is a {type(tensor).__name__}"
    return ""


def why_not_norm_weight(module: nn.Module, input: Tensor) -> str:
    """Why a norm's weight and bias cannot go with an input now; empty if they can."""
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        if type(parameter) is not nn.Parameter or parameter.device != input.device or parameter.dtype != input.dtype:
            return f"its weight is not an ordinary one of {input.dtype} on {input.device}"
        if parameter.requires_grad and torch.is_grad_enabled():
            return "a gradient is needed"
    return ""


def why_not_norm_call(module: nn.Module, input: Tensor) -> str:
    return why_not_input(input) or why_not_norm_weight(module, input)


# ---- Installing and removing


def _slots(module: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """(holder, key, forward): everywhere that a forward of this module is kept; hooks keep the one that they wrap."""
    for key in ("forward", "_old_forward"):  # accelerate
        if key in module.__dict__:
            yield module.__dict__, key, module.__dict__[key]
    registry = module.__dict__.get("_diffusers_hook")
    for reference in getattr(registry, "_fn_refs", ()):
        for key in ("forward", "original_forward"):
            yield reference, key, getattr(reference, key, None)


def _put(holder: Any, key: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[key] = value
    else:
        setattr(holder, key, value)


def _is_bound(forward: Any, module: nn.Module, function: Any) -> bool:
    return getattr(forward, "__func__", None) is function and getattr(forward, "__self__", None) is module


def why_not(module: nn.Module, entry: Entry) -> str:
    """Why a module of a known class has to stay as it is; empty if it need not."""
    stock = type(module).forward
    found = tuple(inspect.signature(stock).parameters)[1:]
    if found != entry.parameters:
        return f"its forward takes ({', '.join(found)}), expected ({', '.join(entry.parameters)})"
    children = frozenset(name for name, _ in module.named_children())
    if entry.children and children != entry.children:
        return f"it holds the modules {', '.join(sorted(children))}; expected {', '.join(sorted(entry.children))}"
    if "forward" in module.__dict__ and not any(
        _is_bound(forward, module, function) for _, _, forward in _slots(module) for function in (stock, entry.forward)
    ):
        return "its forward is patched already"
    return entry.why_not(module)


def install(module: nn.Module, site: Site) -> None:
    stock, ours = type(module).forward, types.MethodType(site.entry.forward, module)
    if "forward" not in module.__dict__:
        module.__dict__["forward"] = ours
    else:
        for holder, key, forward in list(_slots(module)):
            if _is_bound(forward, module, stock):
                _put(holder, key, ours)
    module.__dict__[ATTRIBUTE] = site
    site.modules += 1


def uninstall(module: nn.Module) -> None:
    site = module.__dict__.pop(ATTRIBUTE)
    site.entry.release(module)
    for holder, key, forward in list(_slots(module)):
        if not _is_bound(forward, module, site.entry.forward):
            continue
        if holder is module.__dict__ and key == "forward":
            del holder[key]
        else:
            _put(holder, key, types.MethodType(type(module).forward, module))


def uninstall_all(root: nn.Module) -> None:
    ours = {name: module for name, module in root.named_modules() if ATTRIBUTE in module.__dict__}
    for name, module in ours.items():
        reason = module.__dict__[ATTRIBUTE].entry.why_not_restored(module)
        if reason:
            raise RuntimeError(f"{name or class_of(module)} cannot be restored, and nothing was: {reason}")
    found = {class_of(module) for module in ours.values()}
    for name, module in ours.items():
        site = module.__dict__[ATTRIBUTE]
        if site.together and site.entry.together_with not in found:
            raise RuntimeError(
                f"{name or class_of(module)} was optimized together with {site.entry.together_with}, which is not in "
                "the part that was given, and nothing was changed: give the whole model"
            )
    for module in ours.values():
        uninstall(module)


# ---- The report


def _columns(rows: list[tuple[str, ...]], right: tuple[int, ...]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]


@dataclass(eq=False)
class Report:
    """What `optimize` replaced and left alone, and what has happened since; print it for a table.

    As a context manager it restores the modules at its end.

    Attributes:
        target: What was optimized, by class and component.
        sites: One for every replaced class: `class_name`, `modules`, `calls` that ran the package's ops, `traces` by
            torch.compile, and `fallbacks`, the calls that ran the stock forward instead, by reason.
        left_alone: Modules of a known class, or whole components, that stay as they were, and why.
        notes: Other things to know, such as parameters that could not be packed.
    """

    target: str
    sites: list[Site] = field(default_factory=list)
    left_alone: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _roots: list[weakref.ref[nn.Module]] = field(default_factory=list, repr=False)

    @property
    def replaced(self) -> dict[str, int]:
        """How many modules of each class were replaced."""
        return {site.name: site.modules for site in self.sites}

    @property
    def fallbacks(self) -> dict[str, dict[str, int]]:
        """Calls that ran the stock forward instead, by class and reason."""
        return {site.name: dict(site.fallbacks) for site in self.sites if site.fallbacks}

    def restore(self) -> None:
        """Gives every module of what was optimized its stock forward back."""
        for reference in self._roots:
            root = reference()
            if root is not None:
                uninstall_all(root)

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def __str__(self) -> str:
        lines = [f"ltx-kernels: {self.target}"]
        if self.sites:
            rows: list[tuple[str, ...]] = [("modules", "class", "calls", "traced", "stock calls", "ops")]
            for s in self.sites:
                numbers = str(s.modules), str(s.calls), str(s.traces), str(sum(s.fallbacks.values()))
                rows.append((numbers[0], s.name, *numbers[1:], ", ".join(s.ops)))
            lines += _columns(rows, right=(0, 2, 3, 4))
        else:
            lines.append("nothing was replaced")
        for name, reasons in self.fallbacks.items():
            lines += [f"stock call of {name}, {count} x: {reason}" for reason, count in reasons.items()]
        for s in self.sites:
            if s.unpacked:
                lines.append(
                    f"projections of {s.name} one by one, {s.unpacked} x: their weights lie apart (optimize again), or "
                    "they are no plain linear layers"
                )
        grouped: dict[str, list[str]] = {}
        for name, reason in self.left_alone.items():
            grouped.setdefault(reason, []).append(name or "the model")
        for reason, names in grouped.items():
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            lines.append(f"left alone: {shown}: {reason}")
        return "\n".join(lines + self.notes)
