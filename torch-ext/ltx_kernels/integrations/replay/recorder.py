"""Writes the torch functions of one call down as a Python function, which later calls run in the place of the block.

Three phases make it. A `Recorder` traces a call: each torch function becomes a line, and a chain of views becomes one.
`simplify` drops the lines that nothing reads, and finds where each variable is read last. `emit` prints the lines as
the source of a function, which is compiled. The result is a `Recording`.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Callable, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..._torch_private import OpOverload, below_autograd, op_of, storage_number
from ..engine.sites import Site
from ..engine.state import SIGNATURES

Call = Callable[..., Any]

# A recorded call holds views of weights whose storage has at most so many bytes. An offload cannot free those.
SMALL = 2**17

# Attributes and methods of a tensor whose answer follows from its shape, strides, dtype and device. A question about
# anything else, such as `item`, ends the recording.
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
_PURE = _VIEWS | {"new_empty"}  # functions whose only effect is their result: lines of unread results are left out

# Types of arguments that a line may hold as they are, because none of them holds a tensor that could change.
_CONSTANTS = (
    *(float, str, slice, type(...), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(nn.Module, Site),  # arguments of functions that `as_one` records
)

_BEGUN = "begun"  # the variable of a recorded call's list that says whether a line may have read a live argument

_NO_MARKS = str.maketrans("(),", "   ")  # leaves the names of a nested tuple of targets


class Recording:
    """A recorded call: a function of the call's tensors, its source, and what it adds to the sites' counters.

    live: The function has live arguments too, and a list that it appends to before it reads one of them.
    answer: What `Entry.asks` answered in the recorded call.
    """

    __slots__ = ("answer", "calls", "function", "gradients", "live", "remarks", "source", "unpacked")

    def __init__(
        self, function: Call, source: str, live: bool, counts: Mapping[tuple[Site, str, str], int], answer: Any
    ) -> None:
        self.function, self.source, self.live, self.answer = function, source, live, answer
        self.calls = [(site, number) for (site, counter, _), number in counts.items() if counter == "calls"]
        self.unpacked = [(site, number) for (site, counter, _), number in counts.items() if counter == "unpacked"]
        self.remarks = [(site, text, n) for (site, counter, text), n in counts.items() if counter == "remarks"]
        self.gradients = [(site, number) for (site, counter, _), number in counts.items() if counter == "gradients"]

    def run(self, arguments: Sequence[Any]) -> Any:
        """The recorded call's result, without its counts."""
        if self.live:  # what reads them may be any code
            return self.function(*arguments)
        # Below autograd torch does not track which tensors are views, which makes views faster. Gradients are off, so
        # that nothing needs to know.
        with below_autograd():
            return self.function(*arguments)

    def count(self) -> None:
        """Adds what the recorded call counts to the sites' counters."""
        for site, calls in self.calls:
            site.calls += calls
        for site, unpacked in self.unpacked:
            site.unpacked += unpacked
        for site, text, number in self.remarks:
            site.remark(text, number)
        for site, number in self.gradients:
            site.gradients += number


class Line(NamedTuple):
    """One line of a recorded call."""

    target: str  # the left side of the assignment; empty where there is none
    call: str
    reads: set[str]  # names of the variables in its arguments
    makes: set[str]  # names of the variables that it assigns
    pure: bool  # it is left out where no later line reads what it assigns
    view: bool = False  # what it assigns lies in memory of what it reads


# ---- trace


class Trace:
    """What a call runs, as lines of a Python function.

    Tensors are variables of that function: ``given0``, ... are its arguments, ``held0``, ... weights in its globals,
    ``t0``, ... results of lines, and ``view0``, ... views. A live argument is ``live_`` and its name. Views take fewer
    lines than the calls that made them. A view of a small weight is held in the globals. A view of a tensor that the
    call made is one torch.as_strided, however long the chain of views was.
    """

    apart = False  # whether the call runs for the recording alone, and does not count

    def __init__(self, given: Sequence[Tensor], held: Sequence[Tensor], live: Mapping[str, Any]) -> None:
        # By site, counter and text: what the call counts, but for what functions of `as_one` count at every replay.
        self.counts: Counter[tuple[Site, str, str]] = Counter()
        self.live = {id(value): f"live_{name}" for name, value in live.items()}
        self.reason = ""  # why the call cannot be replayed; empty as long as it can
        self.paused = False
        self.names: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # tensor and variable, by the tensor's id
        self.globals: dict[str, Any] = {}
        self.lines: list[Line] = []
        self.prefix = "t"  # begins the names of what lines assign
        self.reads_held = False  # tensors of the globals are variables too
        # The variable that a view is made of, for all tensors in storages that the call was given or has allocated.
        self.roots: dict[str, str] = {}
        self.small: set[str] = set()  # held tensors of small storages, and their views
        self.whole: dict[str, tuple[Any, ...]] = {}  # numel and storage offset of contiguous roots
        self.others = {storage_number(tensor) for tensor in (*given, *held)}  # storages from before the call
        self.given = [self._note_name(tensor, f"given{i}") for i, tensor in enumerate(given)]
        for name, tensor in zip(self.given, given):
            self._note_whole(name, tensor)
            self.roots[name] = name
        for i, tensor in enumerate(held):
            name = self._note_name(tensor, f"held{i}")
            self.globals[name] = tensor
            followed = torch.is_grad_enabled() and tensor.requires_grad  # its views belong to the graph of one call
            if tensor.untyped_storage().nbytes() <= SMALL and not followed:
                self.small.add(name)

    def as_one(self, function: Call, args: Sequence[Any]) -> Any:
        """Calls a function and writes it down as one line."""
        if self.paused:
            return function(*args)
        self.paused = True
        try:
            result = function(*args)
        finally:
            self.paused = False
        replayed = self._replayed(function, result)
        if not self.reason:
            self._trace(replayed, args, {}, result, whole=True)
        return result

    def _replayed(self, function: Call, result: Any) -> Call:
        """What replays call in the place of a function that `as_one` has called. It may set a `reason`."""
        return function

    def recording(self, result: Any, answer: Any = None) -> Recording | str:
        """The recorded call, which returned `result`; or the reason why there is none."""
        read: set[str] = set()
        try:
            returned = self._text(result, read)
            if self.reason:
                return self.reason
            parameters = (*self.given, *self.live.values(), *((_BEGUN,) if self.live else ()))
            source = emit(parameters, simplify(self.lines, read), returned, self.given)
            function = self._function(source)
        except Exception as error:  # Python limits how deep expressions nest
            return f"its lines cannot be compiled: {error}"
        return Recording(function, source, bool(self.live), self.counts, answer)

    def _function(self, source: str) -> Call:
        for name, value in self.globals.items():
            if type(value) is Tensor and value._base is not None and not value.requires_grad:
                # Without its base, so that nothing but the model holds the parameter, and torch may exchange it.
                self.globals[name] = value.data
        exec(compiled(source), self.globals)  # names alone: every value is in the globals
        return cast(Call, self.globals.pop("replay"))

    def _note_name(self, tensor: Tensor, name: str) -> str:
        self.names[id(tensor)] = weakref.ref(tensor), name
        return name

    def _trace(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, whole: bool = False
    ) -> None:
        """Writes one call down. A failure becomes the reason why there is no recording: the call itself has run."""
        try:
            self._write(function, args, kwargs, result, whole)
        except Exception as error:
            self.reason = f"a call cannot be written down: {error}"

    def _write(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, whole: bool) -> None:
        name = _function_name(function)
        if self._is_question(function, args, result):
            return
        if not whole and name in _VIEWS and args and self._is_view(result, args[0]):
            return
        self._add_line(function, args, kwargs, result, name in _PURE and not whole, name == "as_strided", whole)

    def _add_line(
        self,
        function: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        pure: bool,
        strides: bool,
        whole: bool = False,
    ) -> None:
        """strides: The function is as_strided."""
        read: set[str] = set()
        values = [self._text(value, read, whole) for value in args]
        values += [f"{key}={self._text(value, read)}" for key, value in kwargs.items()]
        call = (
            f"{self._constant(op_of(function) if isinstance(function, OpOverload) else function)}({', '.join(values)})"
        )
        written = isinstance(result, Tensor) and any(result is value for value in (*args, *kwargs.values()))
        target = "" if written and not whole else self._target(result)
        if whole and self.live:
            call = f"{_BEGUN}.append(True) or {call}"
        if not whole:
            self._note_roots(result, (*args, *kwargs.values()))
        makes = set(target.translate(_NO_MARKS).split())
        line = Line(target, call, read, makes, pure, pure and _lies_in(result, args))
        if strides and not read.difference(self.globals):  # of weights: it fails before the call has changed anything
            self.lines.insert(0, line)
        else:
            self.lines.append(line)

    def _is_question(self, function: Any, args: Sequence[Any], result: Any) -> bool:
        """Whether a call asks something of a tensor. An answer that does not follow from its form is a `reason`."""
        name = _function_name(function)
        writes = isinstance(function, OpOverload) or name == "__setitem__"
        answers = not isinstance(result, (Tensor, tuple, list)) and not (result is None and writes)
        if not answers and name not in _FORM:  # a shape or strides are tuples
            return False
        if name not in _FORM:
            self.reason = self.reason or f"a call asks for {name}"
        elif args and id(args[0]) in self.live:
            self.reason = self.reason or f"a call asks for {name} of an argument that changes"
        return True

    def _note_roots(self, result: Any, arguments: Sequence[Any]) -> None:
        """Notes tensors in storages that the call allocated itself.

        Their storage offset is the same in every replay, so that `as_strided` may make views of them.
        """
        taken = {storage_number(tensor): tensor for tensor in arguments if type(tensor) is Tensor}
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if type(tensor) is Tensor and storage_number(tensor) not in self.others:
                name = self._name_of(tensor)
                source = taken.get(storage_number(tensor))
                root: str | None = name
                if source is not None:  # views of a root have its dtype
                    root = self.roots.get(self._name_of(source)) if source.dtype == tensor.dtype else None
                if root is not None:
                    self.roots[name] = root
                if root == name:
                    self._note_whole(name, tensor)

    def _note_whole(self, name: str, tensor: Tensor) -> None:
        """Notes a contiguous tensor. Views of all its elements in their order are `Tensor.view`, without strides."""
        if _is_packed(tensor):
            self.whole[name] = tensor.numel(), tensor.storage_offset()

    def _is_view(self, result: Any, base: Any) -> bool:
        """Whether a result is a view of a known tensor. A line then makes the view from the tensor's root.

        A view of a small weight is held in the globals instead. A result that is the tensor itself needs no line.
        """
        if result is base:
            return True
        views = result if isinstance(result, (tuple, list)) else (result,)
        known = self._name_of(base)
        if not all(type(view) is Tensor and storage_number(view) == storage_number(base) for view in views):
            return False
        if any(view.dtype != base.dtype for view in views):  # `Tensor.view(dtype)`, which the line itself repeats
            return False
        if known in self.small:
            for view in views:
                name = self._note_name(view, f"held{len(self.globals)}_")
                self.globals[name] = view
                self.small.add(name)
            return True
        root = self.roots.get(known, "")
        whole = [self.whole.get(root) == (view.numel(), view.storage_offset()) and _is_packed(view) for view in views]
        if not root or (root in self.given and not all(whole)):  # an argument may begin elsewhere in its memory
            return False
        for view, is_whole in zip(views, whole):
            name = self._note_name(view, f"view{len(self.roots)}")
            self.roots[name] = root
            place = f"{root}, {tuple(view.shape)}"
            if is_whole:
                call = f"{self._constant(Tensor.view)}({place})"
            else:
                call = f"{self._constant(torch.as_strided)}({place}, {view.stride()}, {view.storage_offset()})"
            self.lines.append(Line(name, call, {root}, {name}, True, True))
        return True

    def _name_of(self, tensor: Tensor) -> str:
        """The name of a tensor, empty where it is not known."""
        known = self.names.get(id(tensor))
        return "" if known is None or known[0]() is not tensor else known[1]

    def _target(self, result: Any, place: str = "") -> str:
        """The variables that a line assigns, nested as its result is; the left side of the assignment."""
        name = f"{self.prefix}{len(self.lines)}{place}"
        if isinstance(result, Tensor):
            return self._note_name(result, name)
        if result is None:
            return name if place else ""
        if not isinstance(result, (tuple, list)):
            self.reason = self.reason or f"a call returns a {type(result).__name__}"
            return ""
        parts = (self._target(part, f"{place}_{i}") for i, part in enumerate(result))
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
            if self.reads_held or name not in self.globals:
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


class Recorder(TorchFunctionMode, Trace):
    """Traces a call: writes down the torch functions that run while it is on."""

    def __init__(self, given: Sequence[Tensor], held: Sequence[Tensor], live: Mapping[str, Any]) -> None:
        TorchFunctionMode.__init__(self)
        Trace.__init__(self, given, held, live)

    def tracing(self) -> Recorder:
        """A context in which calls are traced."""
        return self

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not self.paused and not self.reason:
            self._trace(function, args, kwargs or {}, result)
        return result


def _function_name(function: Any) -> str:
    """The name of a torch function, or of the property that it gets."""
    name: str = getattr(function, "__name__", "")
    return cast(str, function.__self__.__name__) if name == "__get__" else name


def _lies_in(result: Any, args: Sequence[Any]) -> bool:
    """Whether a function has returned nothing but tensors in the memory of the first tensor that it reads."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    base = args[0] if args and isinstance(args[0], Tensor) else None
    return base is not None and all(
        isinstance(part, Tensor) and storage_number(part) == storage_number(base) for part in results
    )


def _is_packed(tensor: Tensor) -> bool:
    """Whether a tensor has the strides of a new tensor of its shape, also in dimensions of size 1."""
    return tensor.stride() == torch.empty(tensor.shape, device="meta").stride()


def same_constant(one: Any, other: Any) -> bool:
    """Whether lines of two recordings hold the same value, which is no tensor."""
    one, other = (getattr(value, "__wrapped__", value) for value in (one, other))
    return one is other or (type(one) is type(other) and not isinstance(one, Tensor) and bool(one == other))


# ---- simplify


def simplify(lines: Sequence[Line], returned: Iterable[str]) -> list[tuple[Line, set[str]]]:
    """The lines that a call needs, each with the variables that no later line reads.

    Pure lines without a later reader are left out. `returned` are the variables that the function returns.
    """
    read, needed = set(returned), []
    for line in reversed(lines):
        if line.pure and not line.makes & read:
            continue
        needed.append((line, (line.reads | line.makes) - read))
        read |= line.reads
    return needed[::-1]


# ---- emit


def emit(
    parameters: Sequence[str], lines: Iterable[tuple[Line, set[str]]], returned: str, given: Collection[str]
) -> str:
    """The source of the function ``replay``.

    Each variable but the `given` ones is deleted at the end of the last line that reads it, so that memory is freed as
    early as in the recorded call.
    """
    body = []
    for line, done in lines:
        text = f"{line.target} = {line.call}" if line.target else line.call
        deleted = ", ".join(sorted(done.difference(given)))
        body.append(f"    {text}; del {deleted}" if deleted else f"    {text}")
    return "\n".join((f"def replay({', '.join(parameters)}):", *body, f"    return {returned}"))


@functools.lru_cache(maxsize=SIGNATURES)
def compiled(source: str) -> types.CodeType:
    """Compiles a recorded call. Blocks of one class share the code object; their values are in the globals of each."""
    return compile(source, "<recorded call>", "exec")
