"""Records the torch functions that a block's call runs, and replays them without its Python code.

What a block's forward launches follows from three things: the state of its modules, the modes of the process, and the
form of its arguments. Python takes as long to find this out as to launch. So the second call in which all three are the
same is recorded as a generated Python function: a line for each torch function, with its arguments. Later calls
run that function.

A call is not recorded where something else decides: the contents or the address of a tensor, a cache that looks
tensors up by their identity, or a module of another library. Code of this package that decides by one of these says
so: `refuse` ends the recording, and `as_one` records a whole Python function as one line, which every replay calls
again. Such functions alone may read arguments that are others at every call (`Live`), such as keys and values of
earlier tokens.

`replayed` is the entry point. `_Recorder` writes the lines of one call, `_Replay` is a recorded call, and `Replays`
holds all recorded calls of a block.
"""

from __future__ import annotations

import copy
import functools
import os
import re
import types
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Callable, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules import module as nn_module
from torch.overrides import TorchFunctionMode

from ..._variant import COMPILED_DEVICE
from ..engine.guards import ATTRIBUTE, class_of, hooked, is_capturing
from ..engine.recording import Live, thread
from ..engine.sites import Site
from ..engine.state import HELD, SIGNATURES, Held, Snapshot, attention_is_replaced, choices, held
from ..linear.fp8 import in_fp8, is_behind
from ..linear.lora import adapters_state, is_lora

# LTX_KERNELS_RECORD: "1" records calls and replays them, "0" does neither, and "check" runs each replay beside the
# ordinary call and compares the bits of both.
CHECK = "check"
RECORD = os.environ.get("LTX_KERNELS_RECORD", "1")
if RECORD not in ("0", "1", CHECK):
    raise ValueError(f"LTX_KERNELS_RECORD: expected 0, 1 or check, got {RECORD!r}")

# After so many changes of a block's state without a replay between them, the block counts as one that changes at every
# call, as under an offload, and is not recorded.
CHANGES = 8
REFUSED = 100  # so many calls later, a block that may not be recorded is examined again
LIBRARIES = ("torch", "diffusers")
ACTIVATIONS = "transformers.activations"  # of transformers' other modules, replaced ones and `Entry.plain` are recorded

Function = TypeVar("Function", bound=Callable[..., Any])
Call = Callable[..., Any]

# Attributes and methods of a tensor whose answer follows from its form. A question about anything else, such as `item`,
# ends the recording.
_FORM = frozenset(
    {
        *("shape", "dtype", "device", "ndim", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested", "is_quantized"),
        *("itemsize", "nbytes", "layout", "requires_grad", "is_leaf", "grad_fn", "is_mps", "is_xpu", "__len__"),
        *("dim", "ndimension", "size", "stride", "numel", "nelement", "is_contiguous", "is_floating_point"),
        *("is_complex", "element_size", "is_inference", "is_conj", "is_neg", "is_signed"),
    }
)

# Functions that return a view of their first argument, or a copy where no view is possible.
_VIEWS = frozenset(
    {
        *("as_strided", "chunk", "contiguous", "expand", "flatten", "narrow", "permute", "reshape", "select", "split"),
        *("split_with_sizes", "squeeze", "t", "to", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as"),
        "__getitem__",
    }
)
_PURE = _VIEWS | {"new_empty"}  # functions without an effect beside their result: unread results are left out
# A recorded call holds views of weights whose storage has at most so many bytes. An offload cannot free those.
SMALL = 2**17

# Types of arguments that a line may hold as they are, because none of them holds a tensor that could change.
_CONSTANTS = (
    *(float, str, slice, type(...), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(nn.Module, Site),  # arguments of functions that `as_one` records
)

_PLAIN = (type(None), bool, int, float, str)

_OTHERS = ("fallbacks", "gradients", "traces")  # counters of calls that ran a stock forward, or were traced

_BEGUN = "begun"  # the variable of a recorded call's list that says whether a line may have read a live argument

_NO_MARKS = str.maketrans("(),", "   ")  # leaves the names of a nested tuple of targets


class _Line(NamedTuple):
    """One line of a recorded call."""

    text: str
    reads: set[str]  # names of the variables in its arguments
    makes: set[str]  # names of the variables that it assigns
    pure: bool  # it is left out where no later line reads what it assigns


class _Recorder(TorchFunctionMode):
    """Writes down the torch functions that run while it is on, as lines of a Python function.

    Tensors are variables of that function: ``given0``, ... are its arguments, ``held0``, ... weights in its globals,
    ``t0``, ... results of lines, and ``view0``, ... views. A live argument is ``live_`` and its name. Views take fewer
    lines than the calls that made them. A view of a small weight is held in the globals. A view of a tensor that the
    call made is one torch.as_strided, however long the chain of views was, and stands right before the first line that
    reads it.
    """

    def __init__(self, given: Sequence[Tensor], held: Sequence[Tensor], live: Mapping[str, Any]) -> None:
        super().__init__()
        # By site, counter and text: what the call counts, but for what functions of `as_one` count at every replay.
        self.counts: Counter[tuple[Site, str, str]] = Counter()
        self.live = {id(value): f"live_{name}" for name, value in live.items()}
        self.reason = ""  # why the call cannot be replayed; empty as long as it can
        self.paused = False
        self.names: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # tensor and variable, by the tensor's id
        self.source = ""  # of the function, once it is written
        self.globals: dict[str, Any] = {}
        self.lines: list[_Line] = []
        # The variable that a view is made of, for all tensors in storages that the call was given or has allocated.
        self.roots: dict[str, str] = {}
        self.small: set[str] = set()  # held tensors of small storages, and their views
        self.whole: dict[str, tuple[Any, ...]] = {}  # numel and storage offset of contiguous roots
        self.views: dict[str, tuple[Call, str]] = {}  # function and arguments of views that no line has read yet
        self.others = {_storage(tensor) for tensor in (*given, *held)}  # storages from before the call
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
        """The replay as a function of the given tensors, or the reason why there is none.

        Lines are read backwards: pure lines without a later reader are left out, and each variable is deleted at the
        end of the last line that reads it, so that memory is freed as early as in the recorded call.
        """
        read: set[str] = set()
        returned = self._text(result, read)
        if self.reason:
            return self.reason
        lines: list[_Line] = []
        done: list[set[str]] = []  # for each of these lines, the variables that no later line reads
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
        parameters = ", ".join((*self.given, *self.live.values(), *((_BEGUN,) if self.live else ())))
        self.source = "\n".join((f"def replay({parameters}):", *body, f"    return {returned}"))
        try:
            exec(_compiled(self.source), self.globals)  # names alone: every value is in the globals
        except Exception as error:  # Python limits how deep expressions nest
            return f"its lines cannot be compiled: {error}"
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
        answers = not isinstance(result, (Tensor, tuple, list)) and not (result is None and writes)
        if answers or name in _FORM:  # a shape or strides are tuples
            if name not in _FORM:
                self.reason = f"a call asks for {name}"
            elif args and id(args[0]) in self.live:
                self.reason = f"a call asks for {name} of an argument that changes"
            return
        if not whole and name in _VIEWS and args and self._is_view(result, args[0]):
            return
        read: set[str] = set()
        values = [self._text(value, read, whole) for value in args]
        values += [f"{key}={self._text(value, read)}" for key, value in kwargs.items()]
        call = function._op if isinstance(function, OpOverload) else function
        line = f"{self._constant(call)}({', '.join(values)})"
        made = self._targets(result)
        if whole and self.live:
            line = f"{_BEGUN}.append(True) or {line}"
        makes = set(made.translate(_NO_MARKS).split())
        if not whole:
            self._note_roots(result, (*args, *kwargs.values()))
        new = _Line(f"{made} = {line}" if made else line, read, makes, not whole and name in _PURE)
        if name == "as_strided" and not read:  # of weights: it fails before the call has changed anything
            self.lines.insert(0, new)
        else:
            self.lines.append(new)

    def _note_roots(self, result: Any, arguments: Sequence[Any]) -> None:
        """Notes tensors in storages that the call allocated itself.

        Their storage offset is the same in every replay, so that `as_strided` may make views of them.
        """
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
        """Notes a contiguous tensor. Views of all its elements in their order are `Tensor.view`, without strides."""
        if _is_packed(tensor):
            self.whole[name] = tensor.numel(), tensor.storage_offset()

    def _is_view(self, result: Any, base: Any) -> bool:
        """Whether a result is a view of a tensor that needs no line of its own; then it is noted here.

        Views of small weights are held. Others get their line from `_text`, when another line first reads them.
        """
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
        """The variables that a line assigns, nested as its result is; the left side of the assignment."""
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

    def _text(self, value: Any, read: set[str], whole: bool = False) -> str:
        """An argument as a Python expression; the variables in it are added to `read`.

        whole: Of a function that `as_one` calls.
        """
        if whole and id(value) in self.live:
            return self.live[id(value)]
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
            inside = "".join(f"{self._text(part, read, whole)}, " for part in value)
            return f"({inside})" if type(value) is tuple else f"[{inside}]"
        if type(value) is dict:
            return f"{{{', '.join(f'{key!r}: {self._text(part, read, whole)}' for key, part in value.items())}}}"
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
    """Whether a tensor has the strides of a new tensor of its shape, also in dimensions of size 1."""
    return tensor.stride() == torch.empty(tensor.shape, device="meta").stride()


@functools.lru_cache(maxsize=SIGNATURES)
def _compiled(source: str) -> types.CodeType:
    """Compiles a recorded call. Blocks of one class share the code object; their values are in the globals of each."""
    return compile(source, "<recorded call>", "exec")


class _Replay:
    """A recorded call: its function, what it adds to the sites' counters, and what `Entry.asks` answered."""

    __slots__ = ("answer", "asks", "calls", "function", "live", "remarks", "source", "unpacked")

    def __init__(
        self,
        function: Call,
        source: str,
        live: bool,
        counts: Mapping[tuple[Site, str, str], int],
        asks: Callable[[nn.Module], Any] | None,
        answer: Any,
    ) -> None:
        """live: The function takes live arguments, and a list that it appends to before it reads one of them."""
        self.function, self.source, self.live, self.asks, self.answer = function, source, live, asks, answer
        self.calls = [(site, number) for (site, counter, _), number in counts.items() if counter == "calls"]
        self.unpacked = [(site, number) for (site, counter, _), number in counts.items() if counter == "unpacked"]
        self.remarks = [(site, text, n) for (site, counter, text), n in counts.items() if counter == "remarks"]

    def holds(self, module: nn.Module) -> bool:
        """Whether what `Entry.asks` asks of the block has the answer that it had in the recording."""
        return self.asks is None or bool(self.asks(module) == self.answer)

    def run(self, arguments: Sequence[Any]) -> Any:
        """The recorded call's result, without its counts."""
        if self.live:  # what reads them may be any code
            return self.function(*arguments)
        # Below autograd torch does not track which tensors are views, which makes views faster. Gradients are off, so
        # that nothing needs to know.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return self.function(*arguments)

    def __call__(self, arguments: Sequence[Any]) -> Any:
        result = self.run(arguments)
        for site, calls in self.calls:
            site.calls += calls
        for site, unpacked in self.unpacked:
            site.unpacked += unpacked
        for site, text, number in self.remarks:
            site.remark(text, number)
        return result


class Replays:
    """The recorded calls of one block, and the state of its modules that they hold for."""

    def __init__(self, module: nn.Module, changes: int) -> None:
        self.state = Snapshot(module)
        self._asks = module.__dict__[ATTRIBUTE].entry.asks
        self._adapted = [part for part in self.state.modules if is_lora(part)]
        self._quantised = [part for part in self._adapted if in_fp8(part)]
        self._adapters = self._active()
        self.changes = changes
        # By signature: a replay, or the reason why there is none. An empty reason means that the next call is recorded.
        self.calls: dict[Hashable, _Replay | str] = {}
        # `calls` for each choice of active adapters, so that a switch back finds its recordings again.
        self._of_adapters = {self._adapters: self.calls}
        plain = module.__dict__[ATTRIBUTE].entry.plain
        # Why no call is recorded.
        self.reason = next((why for why in (_does_more(part, plain) for part in self.state.modules) if why), "")
        if changes > CHANGES:
            self.reason = "its modules or weights change between calls"
        elif not self.reason and any(type(tensor) not in (nn.Parameter, Tensor) for tensor in self.state.tensors):
            self.reason = "it holds tensors of another kind"
        self.refused = REFUSED if self.reason else 0

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def _active(self) -> tuple[Hashable, ...]:
        return tuple(map(adapters_state, self._adapted))

    def holds(self, module: nn.Module) -> bool:
        """Whether the block is as it was. `calls` then belongs to the adapters that are active in it."""
        if not self.state.holds(module) or any(map(is_behind, self._quantised)):
            return False
        active = self._active()
        if active != self._adapters:
            if len(self._of_adapters) >= SIGNATURES:
                self._of_adapters.clear()
            self._adapters, self.calls = active, self._of_adapters.setdefault(active, {})
        return True

    def record(
        self, module: nn.Module, compute: Call, tensors: Sequence[Tensor], live: Mapping[str, Any]
    ) -> tuple[Any, _Replay | str]:
        """Runs a call; returns its result, and the recorded call or the reason why there is none."""
        weights = self.state.tensors
        known = {id(value) for value in (*tensors, *weights, *live.values())}
        if len(known) < len(tensors) + len({id(tensor) for tensor in weights}) + len(live):
            return compute(), "an argument is given twice"
        recorder = _Recorder(tensors, weights, live)
        try:
            thread.recorder = recorder
            answer = None if self._asks is None else self._asks(module)
            with recorder:
                result = compute()
        finally:
            thread.recorder = None
        if any(counter in _OTHERS for _, counter, _ in recorder.counts):
            recorder.reason = recorder.reason or "a call ran a stock forward"
        function = recorder.function(result)
        if isinstance(function, str):
            return result, function
        return result, _Replay(function, recorder.source, bool(live), recorder.counts, self._asks, answer)


def lines(root: nn.Module) -> list[str]:
    """What the report says of recorded calls: how many blocks of a class have any, or why they have none."""
    blocks: Counter[str] = Counter()
    recorded: Counter[str] = Counter()
    reasons: Counter[tuple[str, str]] = Counter()
    for module in root.modules():
        found: Held | None = module.__dict__.get(HELD)
        replays: Replays | None = None if found is None else found.replays
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


def _does_more(part: nn.Module, plain: Sequence[str]) -> str:
    """Why a module below a block may launch something that a torch function mode does not see, such as Triton.

    plain: The block's `Entry.plain`.
    """
    name = type(part).__name__
    if hooked(part):
        return f"a {name} {hooked(part)}"
    if part.__dict__.get("_compiled_call_impl") is not None:
        return f"a {name} is compiled"
    home, ours = type(part).__module__, ATTRIBUTE in part.__dict__
    known = home.split(".")[0] in LIBRARIES or home == ACTIVATIONS or class_of(part) in plain
    if not (known or ours or is_lora(part)) or ("processor" in part.__dict__ and not ours):
        return f"it holds a {name}, which may run other kernels"
    return ""


# ---- LTX_KERNELS_RECORD=check


def compare(
    module: nn.Module,
    replays: Replays,
    found: _Replay,
    compute: Call,
    tensors: Sequence[Tensor],
    live: Mapping[str, Any],
) -> Any:
    """The ordinary call's result; RuntimeError where a recorded call on copies of the arguments has another one."""
    storages: dict[int, torch.UntypedStorage] = {}
    given = [_copy_of(tensor, storages) for tensor in tensors]
    mine = [_copy_of(value, storages) if type(value) is Tensor else copy.deepcopy(value) for value in live.values()]
    replayed = found.run([*given, *mine, []] if live else given)
    result, now = replays.record(module, compute, tensors, live)
    pairs = list(_pairs(replayed, result, "result"))
    for i, both in enumerate(zip(given, tensors)):
        pairs += _pairs(*both, f"argument {i}")
    for name, mine_too, theirs in zip(live, mine, live.values()):
        pairs += _pairs(mine_too, theirs, name)
    for place, one, other in pairs:
        if not _same_bits(one, other):
            why = f"{place}, {_form_text(one)} replayed and {_form_text(other)} computed"
            raise RuntimeError(f"LTX_KERNELS_RECORD: {_path_of(module)}: {why}; {_first_difference(found, now)}")
    return result


def _copy_of(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    """A copy at the same place of a copy of its memory, which tensors that share it share again."""
    number = _storage(tensor)
    if number not in storages:
        storages[number] = tensor.untyped_storage().clone()
    return tensor.new_empty(0).set_(storages[number], tensor.storage_offset(), tensor.size(), tensor.stride())


def _pairs(one: Any, other: Any, place: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(place, tensor, tensor) of the tensors in two results, or in two caches, of the same structure."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        yield place, one, other
    elif isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        for i, pair in enumerate(zip(one, other)):
            yield from _pairs(*pair, f"{place}[{i}]", depth)
    elif isinstance(one, dict) and isinstance(other, dict):
        for name in one.keys() & other.keys():
            yield from _pairs(one[name], other[name], f"{place}.{name}", depth)
    elif depth < 3 and type(one) is type(other) and hasattr(one, "__dict__"):
        yield from _pairs(vars(one), vars(other), place, depth + 1)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype, one.stride()) != (other.shape, other.dtype, other.stride()):
        return False
    bits = (tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in (one, other))
    return torch.equal(*bits)


def _form_text(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} with strides {list(tensor.stride())}"


def _path_of(module: nn.Module) -> str:
    """A block's class, and its place in the model that was optimized."""
    roots = (reference() for reference in module.__dict__[ATTRIBUTE].roots)
    names = (name for root in roots if root is not None for name, part in root.named_modules() if part is module)
    return f"{type(module).__name__} {next(names, '')}".strip()


def _first_difference(then: _Replay, now: _Replay | str) -> str:
    """Where a recording and another one of the same call differ."""
    if isinstance(now, str):
        return f"the call is no longer recorded: {now}"
    lines = zip_longest(then.source.splitlines(), now.source.splitlines(), fillvalue="nothing")
    for number, (old, new) in enumerate(lines):
        if old != new:
            return f"line {number} of the recording is {old.strip()!r}, and would be {new.strip()!r}"
        for name in re.findall(r"\w+", old):
            one, other = then.function.__globals__.get(name), now.function.__globals__.get(name)
            same = one is other or (type(one) is type(other) and not isinstance(one, Tensor) and one == other)
            if isinstance(one, Tensor) and isinstance(other, Tensor):
                same = one.data_ptr() == other.data_ptr() and _same_bits(one, other)
            if not same:
                return f"line {number} of the recording, {old.strip()!r}, holds another {name}"
    return "the recording would have the same lines"


def replayed(
    module: nn.Module, compute: Call, args: Sequence[Any], kwargs: Mapping[str, Any], live: Live | None = None
) -> Any:
    """``compute(module, *args, **kwargs)``; the second call of a signature is recorded, and later ones are replayed."""
    if torch.compiler.is_compiling() or RECORD == "0" or not _is_ordinary():
        return compute(module, *args, **kwargs)
    handed: dict[str, Any] = {}
    form: Hashable = None
    if live is not None:
        handed = {name: kwargs[name] for name in live.names if type(kwargs.get(name)) not in _PLAIN}
        if handed:
            form = live.form(module, args, kwargs)
            if form is None:
                return compute(module, *args, **kwargs)
    fixed = {name: value for name, value in kwargs.items() if name not in handed} if handed else kwargs
    tensors: list[Tensor] = []
    try:
        key = *choices(), *handed, form, *fixed, *_forms((*args, *fixed.values()), tensors)
    except TypeError:  # `_forms` does not know the type of an argument
        return compute(module, *args, **kwargs)
    place = held(module)
    replays: Replays | None = place.replays
    if replays is not None and replays.refused:
        replays.refused -= 1
        if not replays.refused:
            place.replays = None
        return compute(module, *args, **kwargs)
    if replays is None or not replays.holds(module):
        # The call comes first: it puts a `Held` on modules, which the snapshot of `Replays` has to contain.
        result = compute(module, *args, **kwargs)
        place.replays = replays = Replays(module, 0 if replays is None else replays.changes + 1)
        replays.calls[key] = ""
        return result
    found = replays.calls.get(key)
    if found is None:  # the first call
        if len(replays.calls) >= SIGNATURES:
            replays.calls.clear()
        replays.calls[key] = ""
    elif found == "":  # the second call
        replays.calls[key] = "a call has failed"  # unless it does not
        result, replays.calls[key] = replays.record(
            module, functools.partial(compute, module, *args, **kwargs), tensors, handed
        )
        return result
    elif not isinstance(found, str):
        if found.holds(module):
            if RECORD == CHECK:
                ordinary = functools.partial(compute, module, *args, **kwargs)
                return compare(module, replays, found, ordinary, tensors, handed)
            begun: list[bool] = []
            try:
                result = found((*tensors, *handed.values(), begun) if handed else tensors)
            # For example, an offload has put weights that lay side by side into separate storages.
            except Exception as error:
                replays.calls[key] = f"a replay failed: {error}"
                if begun:  # the keys and values of a token are in their cache, and must not get there twice
                    raise
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
        or attention_is_replaced()
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
    """The signature of arguments; the tensors in them are appended to `tensors`.

    It is written for speed, because every call of every block needs it.
    """
    forms: list[Hashable] = []
    for value in values:
        kind = type(value)
        if kind is Tensor:
            tensors.append(value)
            forms.append((value.shape, value.stride(), value.dtype, value.device, value.is_inference()))
        elif kind in _PLAIN:
            forms.append((kind, value))
        elif kind in (tuple, list):
            forms.append((kind, *_forms(value, tensors)))
        elif kind is dict:
            forms.append((kind, *value, *_forms(value.values(), tensors)))
        else:
            raise TypeError
    return forms
