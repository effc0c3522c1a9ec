"""Calls of blocks as straight lines of torch functions, so that a step asks its questions once for each block.

What a block's forward launches follows from the state of its modules, the modes of the process, and the form of its
arguments. Finding that out again costs as much of the host's time as the launches. So the second call with the same
answers to all three is recorded: every torch function that it calls, with its arguments. Later calls run these
functions alone, one after the other.

A call is recorded only where nothing else decides: not the contents or the address of a tensor, not a cache that knows
tensors by their identity, not a module of another library. `refuse` and `as_one` are for code where one of these does.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Callable, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules import module as nn_module
from torch.overrides import TorchFunctionMode

from .._variant import COMPILED_DEVICE
from ._guards import ATTRIBUTE, REPLAYS, SIGNATURES, State, hooked, is_capturing
from ._lora import adapters_state, is_lora
from ._sites import Site

CHANGES = 8  # of a block's state without a replay between: its weights move at every call
REFUSED = 100  # calls of a block that may not be recorded, until it is looked at again
LIBRARIES = ("torch", "diffusers")

Function = TypeVar("Function", bound=Callable[..., Any])
Call = Callable[..., Any]

# What may be asked of a tensor: it follows from its form. Any other question ends a recording.
_FORM = frozenset(
    {
        *("shape", "dtype", "device", "ndim", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested", "is_quantized"),
        *("itemsize", "nbytes", "layout", "requires_grad", "is_leaf", "grad_fn", "is_mps", "is_xpu", "__len__"),
        *("dim", "ndimension", "size", "stride", "numel", "nelement", "is_contiguous", "is_floating_point"),
        *("is_complex", "element_size", "is_inference", "is_conj", "is_neg", "is_signed"),
    }
)

# Functions that look at memory in another way, or copy it where they cannot.
_VIEWS = frozenset(
    {
        *("as_strided", "chunk", "contiguous", "expand", "flatten", "narrow", "permute", "reshape", "select", "split"),
        *("split_with_sizes", "squeeze", "t", "to", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as"),
        "__getitem__",
    }
)
_PURE = _VIEWS | {"new_empty"}  # functions that do nothing where nothing reads their result
SMALL = 2**17  # bytes of a weight's memory that a recorded call may keep when an offload takes the weight away

# What a function may be given beside tensors: nothing that holds any.
_CONSTANTS = (
    *(float, str, slice, type(...), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(nn.Module, Site),  # as_one's
)

_PLAIN = (bool, int, float, str)

_NO_MARKS = str.maketrans("(),", "   ")

_local = threading.local()


class _Line(NamedTuple):
    """One line of a recorded call."""

    text: str
    reads: set[str]  # variables
    makes: set[str]
    pure: bool  # it may go where nothing reads what it makes


class _Recorder(TorchFunctionMode):
    """Writes down the torch functions that run while it is on, as lines of a Python function.

    Views are written in fewer lines than calls made them. A view of a weight's small memory is held, as the weight is.
    A view of what the call itself has made is one call of torch.as_strided, however many views lie between, before the
    line that first reads it.
    """

    def __init__(self, given: Sequence[Tensor], held: Sequence[Tensor]) -> None:
        super().__init__()
        self.reason = ""  # why what was called cannot be replayed
        self.paused = False
        self.names: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self.globals: dict[str, Any] = {}
        self.lines: list[_Line] = []
        self.roots: dict[str, str] = {}  # the tensor that a line made, of every tensor in its memory
        self.small: set[str] = set()  # weights whose memory is small, and their views
        self.whole: dict[str, tuple[Any, ...]] = {}  # elements and beginning of contiguous roots, given or made
        self.views: dict[str, tuple[Call, str]] = {}  # how to make those that no line has read yet
        self.others = {_storage(tensor) for tensor in (*given, *held)}
        self.given = [self._name(tensor, f"given{i}") for i, tensor in enumerate(given)]
        for name, tensor in zip(self.given, given):
            self._note_whole(name, tensor)
            self.roots[name] = name
        for i, tensor in enumerate(held):
            name = self._name(tensor, f"held{i}")
            self.globals[name] = tensor
            if tensor.untyped_storage().nbytes() <= SMALL:
                self.small.add(name)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not self.paused and not self.reason:
            self._record(function, args, kwargs or {}, result)
        return result

    def as_one(self, function: Call, args: Sequence[Any]) -> Any:
        """Calls a function and writes it down as one line."""
        if self.paused:
            return function(*args)
        self.paused = True
        try:
            result = function(*args)
        finally:
            self.paused = False
        if not self.reason:
            self._record(function, args, {}, result, whole=True)
        return result

    def function(self, result: Any) -> Call | str:
        """The function of the tensors that were given, or the reason why there is none."""
        read: set[str] = set()
        returned = self._text(result, read)
        if self.reason:
            return self.reason
        lines: list[_Line] = []
        done: list[set[str]] = []  # the variables that no later line reads
        for line in reversed(self.lines):
            if line.pure and not line.makes & read:
                continue
            lines.append(line)
            done.append((line.reads | line.makes) - read)
            read |= line.reads
        body = []
        for line, names in zip(reversed(lines), reversed(done)):
            deleted = ", ".join(sorted(names.difference(self.given)))
            body.append(f"    {line.text}; del {deleted}" if deleted else f"    {line.text}")
        source = "\n".join((f"def replay({', '.join(self.given)}):", *body, f"    return {returned}"))
        exec(_compiled(source), self.globals)  # names alone: every value is in the globals
        return cast(Call, self.globals.pop("replay"))

    def _name(self, tensor: Tensor, name: str) -> str:
        self.names[id(tensor)] = weakref.ref(tensor), name
        return name

    def _record(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, whole: bool = False
    ) -> None:
        name = getattr(function, "__name__", "")
        if name == "__get__":  # of a property
            name = function.__self__.__name__
        writes = isinstance(function, OpOverload) or name == "__setitem__"
        if not isinstance(result, (Tensor, tuple, list)) and not (result is None and writes):
            if name not in _FORM:
                self.reason = f"a call asks for {name}"
            return
        if name in _FORM:  # a shape or strides
            return
        if not whole and name in _VIEWS and args and self._is_view(result, args[0]):
            return
        read: set[str] = set()
        values = [self._text(value, read) for value in args]
        values += [f"{key}={self._text(value, read)}" for key, value in kwargs.items()]
        call = function._op if isinstance(function, OpOverload) else function
        line = f"{self._constant(call)}({', '.join(values)})"
        made = self._targets(result)
        makes = set(made.translate(_NO_MARKS).split())
        if not whole:
            self._note_roots(result, (*args, *kwargs.values()))
        self.lines.append(_Line(f"{made} = {line}" if made else line, read, makes, not whole and name in _PURE))

    def _note_roots(self, result: Any, arguments: Sequence[Any]) -> None:
        """Notes new tensors. `as_strided` may make their views: they always begin at the same place in their memory."""
        taken = {_storage(tensor): self._name_of(tensor) for tensor in arguments if type(tensor) is Tensor}
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if type(tensor) is Tensor and _storage(tensor) not in self.others:
                name = self._name_of(tensor)
                root = self.roots.get(taken[_storage(tensor)]) if _storage(tensor) in taken else name
                if root is not None:
                    self.roots[name] = root
                if root == name:
                    self._note_whole(name, tensor)

    def _note_whole(self, name: str, tensor: Tensor) -> None:
        """Notes a tensor whose views of all elements, in their order, need no strides."""
        if _is_packed(tensor):
            self.whole[name] = tensor.numel(), tensor.storage_offset()

    def _is_view(self, result: Any, base: Any) -> bool:
        """Whether views of a tensor need no line now: they are held, or the first line that reads one has it made."""
        if result is base:
            return True
        views = result if isinstance(result, (tuple, list)) else (result,)
        known = self._name_of(base)
        if not all(type(view) is Tensor and _storage(view) == _storage(base) for view in views):
            return False
        if known in self.small:
            for view in views:
                name = self._name(view, f"held{len(self.globals)}_")
                self.globals[name] = view
                self.small.add(name)
            return True
        root = self.roots.get(known, "")
        whole = [self.whole.get(root) == (view.numel(), view.storage_offset()) and _is_packed(view) for view in views]
        if not root or (root in self.given and not all(whole)):  # an argument may begin elsewhere in its memory
            return False
        for view, is_whole in zip(views, whole):
            name = self._name(view, f"view{len(self.roots)}")
            self.roots[name] = root
            form = f"({root}, {tuple(view.shape)}"
            if is_whole:
                self.views[name] = Tensor.view, f"{form})"
            else:
                self.views[name] = torch.as_strided, f"{form}, {view.stride()}, {view.storage_offset()})"
        return True

    def _name_of(self, tensor: Tensor) -> str:
        """The name of a tensor, empty where it is not known."""
        known = self.names.get(id(tensor))
        return "" if known is None or known[0]() is not tensor else known[1]

    def _targets(self, result: Any, place: str = "") -> str:
        """The variables that a line makes, in the form of its result."""
        name = f"t{len(self.lines)}{place}"
        if isinstance(result, Tensor):
            return self._name(result, name)
        if result is None:
            return name if place else ""
        if not isinstance(result, (tuple, list)):
            self.reason = self.reason or f"a call returns a {type(result).__name__}"
            return ""
        parts = (self._targets(part, f"{place}_{i}") for i, part in enumerate(result))
        return f"({''.join(f'{part}, ' for part in parts)})"

    def _text(self, value: Any, read: set[str]) -> str:
        """A value as an expression."""
        if isinstance(value, Tensor):
            name = self._name_of(value)
            if not name:
                self.reason = self.reason or "a call reads a tensor that comes from elsewhere"
                return "None"
            if name in self.views:
                call, arguments = self.views.pop(name)
                line = f"{name} = {self._constant(call)}{arguments}"
                self.lines.append(_Line(line, {self.roots[name]}, {name}, True))
            if name not in self.globals:
                read.add(name)
            return name
        if type(value) in (tuple, list):
            inside = "".join(f"{self._text(part, read)}, " for part in value)
            return f"({inside})" if type(value) is tuple else f"[{inside}]"
        if value is None or type(value) in (bool, int):
            return repr(value)
        if not isinstance(value, _CONSTANTS):
            self.reason = self.reason or f"a call hands on a {type(value).__name__}"
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"value{len(self.globals)}"
        self.globals[name] = value
        return name


def _storage(tensor: Tensor) -> int:
    """A number for the memory that a tensor and its views share, while one of them lives."""
    return tensor.untyped_storage()._cdata


def _is_packed(tensor: Tensor) -> bool:
    """Whether all strides of a tensor are a new tensor's strides, also in dimensions of one element."""
    return tensor.stride() == torch.empty(tensor.shape, device="meta").stride()


@functools.lru_cache(maxsize=SIGNATURES)
def _compiled(source: str) -> types.CodeType:
    """Blocks of one class run the same lines, each on values of its own."""
    return compile(source, "<recorded call>", "exec")


def _recorder() -> _Recorder | None:
    return getattr(_local, "recorder", None)


def refuse(reason: str) -> None:
    """The call that runs now must not be replayed: what decides is in no guard."""
    recorder = None if torch.compiler.is_compiling() else _recorder()
    if recorder is not None and not recorder.paused:
        recorder.reason = recorder.reason or reason


def as_one(function: Call, *args: Any) -> Any:
    """``function(*args)``, which a replay calls again as a whole, since it looks at more than its tensors' form."""
    recorder = None if torch.compiler.is_compiling() else _recorder()
    return function(*args) if recorder is None else recorder.as_one(function, args)


def others_take_functions() -> bool:
    """Whether a torch function mode of somebody else is active."""
    depth: int = torch._C._len_torch_function_stack()
    return depth > (0 if _recorder() is None else 1)


class _Replay:
    """A recorded call: its function, what it counts, and what it asked of the process."""

    __slots__ = ("answers", "calls", "facts", "function", "remarks", "unpacked")

    def __init__(self, function: Call, before: Mapping[Site, _Counts], facts: list[Call], answers: list[Any]) -> None:
        after = {site: _Counts(site) for site in before}
        self.function, self.facts, self.answers = function, facts, answers
        calls = [(site, after[site].calls - counts.calls) for site, counts in before.items()]
        unpacked = [(site, after[site].unpacked - counts.unpacked) for site, counts in before.items()]
        self.calls = [(site, number) for site, number in calls if number]
        self.unpacked = [(site, number) for site, number in unpacked if number]
        self.remarks = [
            (site, text, number)
            for site, counts in before.items()
            for text, number in (after[site].remarks - counts.remarks).items()
        ]

    def holds(self) -> bool:
        """Whether the process still answers as it did."""
        return [fact() for fact in self.facts] == self.answers

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        # Gradients are off, so nobody asks which tensors are views. Where torch does not note it, views take less time.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            result = self.function(*tensors)
        for site, calls in self.calls:
            site.calls += calls
        for site, unpacked in self.unpacked:
            site.unpacked += unpacked
        for site, text, number in self.remarks:
            site.remark(text, number)
        return result


class _Counts:
    def __init__(self, site: Site) -> None:
        self.calls, self.unpacked, self.remarks = site.calls, site.unpacked, Counter(site.remarks)
        self.others = site.traces, site.gradients, sum(site.fallbacks.values())


class Replays:
    """The recorded calls of one block, and the state of its modules that they hold for."""

    def __init__(self, module: nn.Module, changes: int) -> None:
        self.state = State(module)
        self._adapted = [part for part in self.state.modules if is_lora(part)]
        self._adapters = self._active()
        self.changes = changes
        # By signature: a replay, or why there is none; empty after the first call.
        self.calls: dict[Hashable, _Replay | str] = {}
        self._of_adapters = {
            self._adapters: self.calls
        }  # `calls` for each choice of adapters; a switch back finds its own
        parts = [module, *self.state.modules]
        self.sites = list(dict.fromkeys(part.__dict__[ATTRIBUTE] for part in parts if ATTRIBUTE in part.__dict__))
        self.reason = ""  # why no call is recorded
        if changes > CHANGES:
            self.reason = "its modules or weights change between calls"
        elif any(map(_does_more, parts[1:])):
            self.reason = "it holds a module that may run other kernels"
        elif any(type(tensor) not in (nn.Parameter, Tensor) for tensor in self.state.present):
            self.reason = "it holds tensors of another kind"
        self.refused = REFUSED if self.reason else 0

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def _active(self) -> tuple[Hashable, ...]:
        return tuple(map(adapters_state, self._adapted))

    def holds(self, module: nn.Module) -> bool:
        """Whether the block is as it was. `calls` then belongs to the adapters that are active in it."""
        if not self.state.holds(module):
            return False
        active = self._active()
        if active != self._adapters:
            if len(self._of_adapters) >= SIGNATURES:
                self._of_adapters.clear()
            self._adapters, self.calls = active, self._of_adapters.setdefault(active, {})
        return True

    def record(self, key: Hashable, compute: Call, tensors: Sequence[Tensor]) -> Any:
        """The call's result; it is recorded on the way."""
        held = self.state.present
        self.calls[key] = "a call has failed"
        known = {id(tensor) for tensor in (*tensors, *held)}
        if len(known) < len(tensors) + len({id(tensor) for tensor in held}):
            self.calls[key] = "an argument is given twice"
            return compute()
        before = {site: _Counts(site) for site in self.sites}
        facts = _facts(self.sites)
        answers = [fact() for fact in facts]
        recorder = _local.recorder = _Recorder(tensors, held)
        try:
            with recorder:
                result = compute()
        finally:
            _local.recorder = None
        if any(_Counts(site).others != counts.others for site, counts in before.items()):
            recorder.reason = recorder.reason or "a call ran a stock forward"
        function = recorder.function(result)
        self.calls[key] = function if isinstance(function, str) else _Replay(function, before, facts, answers)
        return result


def lines(root: nn.Module) -> list[str]:
    """What the report says of recorded calls: how many blocks of a class have any, or why they have none."""
    blocks: Counter[str] = Counter()
    recorded: Counter[str] = Counter()
    reasons: Counter[tuple[str, str]] = Counter()
    for module in root.modules():
        replays: Replays | None = module.__dict__.get(REPLAYS)
        if replays is None:
            continue
        name = module.__dict__[ATTRIBUTE].name
        blocks[name] += 1
        recorded[name] += any(isinstance(call, _Replay) for call in replays.calls.values())
        why = [replays.reason] if replays.reason else [call for call in replays.calls.values() if isinstance(call, str)]
        reasons.update((name, reason) for reason in set(why) if reason)
    return [
        *(f"recorded calls: {count} of {blocks[name]} {name}" for name, count in recorded.items() if count),
        *(f"not recorded, {name}, {count} x: {reason}" for (name, reason), count in reasons.items()),
    ]


def _does_more(part: nn.Module) -> bool:
    """Whether a module below a block may run what a function mode does not see, such as a kernel of Triton."""
    return (
        not (type(part).__module__.split(".")[0] in LIBRARIES or is_lora(part))
        or hooked(part)
        or part.__dict__.get("_compiled_call_impl") is not None
        or ("processor" in part.__dict__ and ATTRIBUTE not in part.__dict__)
    )


def _facts(sites: Sequence[Site]) -> list[Call]:
    """What the forwards ask of diffusers' registry of attention backends."""
    registries = {id(found): found for found in (site.settings.get("backends") for site in sites) if found is not None}
    return [found.get_active_backend for found in registries.values()]


def replayed(module: nn.Module, compute: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``compute(module, *args, **kwargs)``; the second call of a signature is recorded, and later ones are replayed."""
    if torch.compiler.is_compiling() or not _is_ordinary():
        return compute(module, *args, **kwargs)
    tensors: list[Tensor] = []
    try:
        key = torch.is_inference_mode_enabled(), *kwargs, *_forms((*args, *kwargs.values()), tensors)
    except TypeError:  # an argument of another kind
        return compute(module, *args, **kwargs)
    replays: Replays | None = module.__dict__.get(REPLAYS)
    if replays is not None and replays.refused:
        replays.refused -= 1
        if not replays.refused:
            module.__dict__[REPLAYS] = None
        return compute(module, *args, **kwargs)
    if replays is None or not replays.holds(module):
        result = compute(module, *args, **kwargs)  # leaves answers with the modules, which their state holds
        module.__dict__[REPLAYS] = None
        module.__dict__[REPLAYS] = replays = Replays(module, 0 if replays is None else replays.changes + 1)
        replays.calls[key] = ""
        return result
    found = replays.calls.get(key)
    if found is None:  # the first call
        if len(replays.calls) >= SIGNATURES:
            replays.calls.clear()
        replays.calls[key] = ""
    elif found == "":  # the second one
        return replays.record(key, lambda: compute(module, *args, **kwargs), tensors)
    elif not isinstance(found, str):
        if found.holds():
            try:
                result = found(tensors)
            except RuntimeError as error:  # as of layers whose weights an offload has brought back apart
                replays.calls[key] = f"a replay failed: {error}"
                module.__dict__[ATTRIBUTE].remark(f"a recorded call failed, and ran ordinarily: {error}")
            else:
                replays.changes = 0
                return result
        else:
            del replays.calls[key]
    return compute(module, *args, **kwargs)


def _is_ordinary() -> bool:
    """Whether no mode of the process changes what torch functions do."""
    return not (
        COMPILED_DEVICE is None
        or torch.is_grad_enabled()
        or torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch.is_autocast_enabled(COMPILED_DEVICE)
        or torch._C._functorch.peek_interpreter_stack() is not None
        or nn_module._global_forward_hooks
        or nn_module._global_forward_pre_hooks
        or is_capturing()
    )


def _forms(values: Iterable[Any], tensors: list[Tensor]) -> list[Hashable]:
    """What of arguments belongs to the signature; the tensors in them are appended to a list.

    It is written for speed, since every call of every block asks.
    """
    forms: list[Hashable] = []
    for value in values:
        kind = type(value)
        if kind is Tensor:
            tensors.append(value)
            forms.append((value.shape, value.stride(), value.dtype, value.device, value.is_inference()))
        elif value is None or kind in _PLAIN:
            forms.append((kind, value))
        elif kind in (tuple, list):
            forms.append((kind, *_forms(value, tensors)))
        elif kind is dict:
            forms.append((kind, *value, *_forms(value.values(), tensors)))
        else:
            raise TypeError
    return forms
