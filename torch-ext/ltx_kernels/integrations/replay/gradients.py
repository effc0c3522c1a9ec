"""Recorded calls with gradients: the ops of a call and of its backward, as two Python functions.

A call whose result needs a gradient is traced below autograd, by a `GradientRecorder`. Its backward is traced at once,
with gradients of zeros, so that the lines of both are the ops that autograd itself runs. A replay is one
autograd.Function: its forward runs the lines of the call, and saves what the lines of the backward read. Autograd then
has one node for the block, and one for each parameter that is trained.

What the backward reads is saved as any Function saves it, weights too: autograd sees when one of them was written to
meanwhile, and raises its error. The gradient of a result that nothing reads is None: each choice of results with a
gradient has a backward of its own, so that a parameter gets None where autograd gives None.

Autocast has chosen the dtypes of the recorded ops, and is off while they run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from ..._ops import ops
from ..._torch_private import (
    DispatchMode,
    OpOverload,
    below_autograd,
    forward_ad,
    saved_tensors_hooks,
    storage_number,
    without_function_modes,
)
from .recorder import Line, Recording, Trace, compiled, emit, simplify

DEVICES = ("cuda", "cpu")  # whose autocast the signature of a call has
RESULTS = 2  # a block with more results has too many choices of those that a gradient comes from

# Of other libraries an op may do more than its schema says.
_LIBRARIES = ("aten", "prims", ops.norm.default.namespace)


def why_not() -> str:
    """Why calls with gradients are neither recorded nor replayed now; empty if they are."""
    if saved_tensors_hooks() is not None:  # a checkpoint compares what both of its runs save
        return "a checkpoint, or another hook, takes what is saved for the backward"
    return "forward-mode differentiation is on" if forward_ad._current_level >= 0 else ""


class GradientRecording(Recording):
    """A recorded call and its backward.

    inputs: For each argument, whether it gets a gradient.
    trained: The parameters that get one.
    backwards: The functions of the backward, by the choice of results that a gradient comes from.
    autocast: The devices whose autocast is on in the call.
    """

    __slots__ = ("autocast", "backwards", "inputs", "trained")

    def __init__(
        self,
        recording: Recording,
        backwards: Mapping[tuple[bool, ...], Callable[..., Any]],
        inputs: Sequence[bool],
        trained: Sequence[Tensor],
        autocast: Sequence[str],
    ) -> None:
        for name in Recording.__slots__:
            setattr(self, name, getattr(recording, name))
        self.backwards, self.inputs, self.trained, self.autocast = backwards, inputs, trained, autocast

    def run(self, arguments: Sequence[Any]) -> Any:
        return _Replay.apply(self, *arguments, *self.trained)


class _Replay(Function):
    """One call of a `GradientRecording`."""

    @staticmethod
    def forward(ctx: Any, recording: GradientRecording, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.recording = recording
        for device in recording.autocast:
            torch.set_autocast_enabled(device, False)
        try:
            with below_autograd():
                result, saved = recording.function(*tensors[: len(recording.inputs)])
        finally:
            for device in recording.autocast:
                torch.set_autocast_enabled(device, True)
        ctx.save_for_backward(*saved)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        recording: GradientRecording = ctx.recording
        function = recording.backwards.get(tuple([gradient is not None for gradient in gradients]))
        if function is None:  # nothing reads a result
            return (None,) * (1 + len(recording.inputs) + len(recording.trained))
        given = [gradient.contiguous() for gradient in gradients if gradient is not None]
        with without_autocast(), below_autograd():
            return cast("tuple[Tensor | None, ...]", function(*given, *ctx.saved_tensors))


@contextmanager
def without_autocast() -> Iterator[None]:
    """As outside of autocast, where a backward belongs."""
    enabled = [device for device in DEVICES if torch.is_autocast_enabled(device)]
    for device in enabled:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in enabled:
            torch.set_autocast_enabled(device, True)


# ---- Recording


class _Form(NamedTuple):
    """Where a tensor lies in memory and how. Two of one form are the same for every reader."""

    storage: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Questions(TorchFunctionMode):
    """Ends a recording where Python code asks for more than a tensor's form: no op tells of such a question."""

    def __init__(self, recorder: GradientRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        recorder = self.recorder
        of_tensors = bool(
            _tensors_in((args, tuple((kwargs or {}).values())))
        )  # else the answer follows from plain values
        if of_tensors and not recorder.paused and not recorder.reason:
            is_question = recorder._is_question(function, args, result)
            if not is_question and not all(isinstance(part, Tensor) for part in _parts_of(result)):
                recorder.reason = f"a call asks for {getattr(function, '__name__', function)}"
        return result


class GradientRecorder(DispatchMode, Trace):
    """Traces a call and its backward: writes down the ops that run while it is on.

    Autograd makes further tensor objects of what it saves. They are found by their `_Form`; the trace holds all tensors
    until it ends, so that no memory gets a second meaning.
    """

    def __init__(self, given: Sequence[Tensor], held: Sequence[Tensor]) -> None:
        DispatchMode.__init__(self)
        self.forms: dict[_Form, str] = {}
        self.tensors: dict[str, Tensor] = {}
        self.parameters: list[str] = []  # of the function whose lines are traced
        self.autocast = [device for device in DEVICES if torch.is_autocast_enabled(device)]
        self.arguments, self.weights = given, held
        Trace.__init__(self, given, held, {})
        # Here forms may mean one tensor in this call and another one in the next.
        times = Counter(storage_number(tensor) for tensor in given)
        weights = {storage_number(tensor) for tensor in held}
        self.ambiguous = {storage for storage, count in times.items() if count > 1 or storage in weights}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not self.paused and not self.reason:
            self._trace(function, args, kwargs or {}, result)
        return result

    def as_one(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        autocast = self.autocast

        def as_called(*arguments: Any) -> Any:
            for device in autocast:
                torch.set_autocast_enabled(device, True)
            try:
                return function(*arguments)
            finally:
                for device in autocast:
                    torch.set_autocast_enabled(device, False)

        if self.paused:
            return function(*args)
        self.paused = True
        try:
            result = function(*args)
        finally:
            self.paused = False
        if any(tensor.requires_grad for tensor in _tensors_in(result)):
            self.reason = self.reason or "a gradient goes through a function that every replay calls again"
        if not self.reason:
            self._trace(as_called if autocast else function, args, {}, result, whole=True)
        return result

    @contextmanager
    def tracing(self) -> Iterator[None]:
        with _Questions(self), self:
            yield

    def recording(self, result: Any, answer: Any = None) -> GradientRecording | str:
        """The recorded call, which returned `result`, and its backward; or the reason why there is none."""
        given, weights = self.arguments, self.weights
        followed = [tensor for tensor in (*given, *weights) if tensor.requires_grad]
        reason = self.reason or self._why_not_result(result) or _why_not_parameters(weights)
        if reason:
            return reason
        forward = self.lines
        results = (result,) if isinstance(result, Tensor) else result
        try:
            backwards = {choice: self._backward(results, choice, followed) for choice in choices(len(results))}
            return self.reason or self._compiled(result, answer, given, followed, forward, backwards)
        except Exception as error:
            return f"its lines cannot be compiled: {error}"

    def _why_not_result(self, result: Any) -> str:
        results = (result,) if isinstance(result, Tensor) else result
        if type(results) is not tuple or not all(type(part) is Tensor for part in results):
            return f"a call returns a {type(result).__name__} of other values"
        if not any(part.requires_grad for part in results):
            return "gradients are on, and none goes through it"
        if len(results) > RESULTS or not all(part.requires_grad for part in results):
            return "a gradient goes through some of its results"
        if any(storage_number(part) in self.others for part in results):
            return "a call returns memory of its arguments"
        return ""

    def _backward(self, results: Sequence[Tensor], choice: tuple[bool, ...], followed: Sequence[Tensor]) -> _Backward:
        """Traces one backward, of the results of a choice."""
        chosen = [result for result, is_chosen in zip(results, choice) if is_chosen]
        gradients = [torch.zeros(part.shape, dtype=part.dtype, device=part.device) for part in chosen]
        self.lines, self.prefix, self.reads_held = [], f"back{sum(choice[i] << i for i in range(len(choice)))}_", True
        parameters = [self._note_name(gradient, f"{self.prefix}given{i}") for i, gradient in enumerate(gradients)]
        for name, gradient in zip(parameters, gradients):
            self.others.add(storage_number(gradient))
            self.given.append(name)
            self.roots[name] = name
            self._note_whole(name, gradient)
        with without_autocast(), self:
            found = torch.autograd.grad(chosen, followed, gradients, retain_graph=True, allow_unused=True)
        read: set[str] = set()
        names = ["" if gradient is None else self._text(gradient, read) for gradient in found]
        lines = simplify(self.lines, read)
        made = {name for line, _ in lines for name in line.makes}.union(parameters)
        for line, _ in lines:
            read |= line.reads
        return _Backward(parameters, lines, names, read - made)

    def _compiled(
        self,
        result: Any,
        answer: Any,
        given: Sequence[Tensor],
        followed: Sequence[Tensor],
        forward: Sequence[Line],
        backwards: Mapping[tuple[bool, ...], _Backward],
    ) -> GradientRecording | str:
        saved = sorted(set().union(*(backward.saved for backward in backwards.values())))
        results = (result,) if isinstance(result, Tensor) else result
        theirs = {storage_number(part) for part in results}
        read = {self._name_of(part) for part in results}
        if any(storage_number(self.tensors[name]) in theirs for name in saved if name not in read):
            return "the backward reads memory of a result"
        # Views have been made where autograd does not track them. What they are made of is saved as well, so that
        # autograd raises its error where a parameter or an argument was written to meanwhile.
        storages = {storage_number(self.tensors[name]) for name in saved}.intersection(self.others)
        before = [*self.given[: len(given)], *(name for name in self.globals if name.startswith("held"))]
        named = ((name, self.tensors[name]) for name in before)
        saved = sorted({*saved, *(name for name, tensor in named if storage_number(tensor) in storages)})
        inputs = {id(tensor) for tensor in given}
        gets = [any(found) for found in zip(*(backward.gradients for backward in backwards.values()))]
        trained = [tensor for tensor, gradient in zip(followed, gets) if gradient and id(tensor) not in inputs]
        place = {id(tensor): i for i, tensor in enumerate(followed)}
        functions = {}
        sources = []
        for choice, backward in backwards.items():
            ordered = [backward.gradients[place[id(t)]] if id(t) in place else "" for t in (*given, *trained)]
            returned = f"(None, {', '.join(name or 'None' for name in ordered)})"
            parameters = [*backward.parameters, *saved]
            sources.append(emit(parameters, backward.lines, returned, parameters))
            functions[choice] = self._function(sources[-1])
        self.reads_held = False
        returned = f"{self._text(result, set())}, ({''.join(f'{name}, ' for name in saved)})"
        arguments = self.given[: len(given)]
        sources.insert(0, emit(arguments, simplify(forward, read.union(saved)), returned, arguments))
        recording = Recording(self._function(sources[0]), "\n".join(sources), False, self.counts, answer)
        return GradientRecording(recording, functions, [t.requires_grad for t in given], trained, self.autocast)

    def _function(self, source: str) -> Callable[..., Any]:
        exec(compiled(source), self.globals)  # names alone: every value is in the globals
        return cast("Callable[..., Any]", self.globals.pop("replay"))

    def _note_name(self, tensor: Tensor, name: str) -> str:
        self.forms.setdefault(_form(tensor), name)
        self.tensors[name] = tensor
        return super()._note_name(tensor, name)

    def _name_of(self, tensor: Tensor) -> str:
        name = super()._name_of(tensor)
        if name or storage_number(tensor) in self.ambiguous:
            return name
        return self.forms.get(_form(tensor), "")

    def _target(self, result: Any, place: str = "") -> str:
        if type(result) is int and place:  # such as a length that attention returns: readers hold its value
            return f"{self.prefix}{len(self.lines)}{place}"
        return super()._target(result, place)

    def _trace(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, whole: bool = False
    ) -> None:
        with without_function_modes():  # the questions here are the recorder's own
            super()._trace(function, args, kwargs, result, whole)

    def _write(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, whole: bool) -> None:
        if whole:
            super()._write(function, args, kwargs, result, whole)
            return
        op: OpOverload = function
        if not isinstance(result, (Tensor, tuple, list)) and not _tensors_in((args, tuple(kwargs.values()))):
            return  # it asks for what follows from plain values, such as a dtype
        self.reason = self._why_not_op(op, args, kwargs)
        if self.reason:
            return
        writes = op._schema.is_mutable
        if not writes and args and type(args[0]) is Tensor and self._is_view(result, args[0]):
            return
        self._add_line(op, args, kwargs, result, not writes, op is torch.ops.aten.as_strided.default)

    def _why_not_op(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Why a replay cannot run an op."""
        name = op.name()
        if op.namespace not in _LIBRARIES:
            return f"it runs {name}"
        arguments = op._schema.arguments
        named = {**dict(zip((argument.name for argument in arguments), args)), **kwargs}
        if torch.Tag.nondeterministic_seeded in op.tags:
            attends = any(argument.name == "dropout_p" for argument in arguments)
            if not attends or named.get("dropout_p", 0.0) != 0.0:
                return f"{name} draws random numbers"
        for argument in arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = named.get(argument.name)
                if any(storage_number(tensor) in self.others for tensor in _tensors_in(written)):
                    return f"{name} writes to an argument or a weight"
        return ""


class _Backward(NamedTuple):
    """What a trace has found of one backward.

    parameters: The names of the gradients that it is given.
    lines: As `simplify` returns them.
    gradients: For each tensor that may get one the name of its gradient, or "".
    saved: The names of what it reads of the call.
    """

    parameters: list[str]
    lines: list[tuple[Line, set[str]]]
    gradients: list[str]
    saved: set[str]


def choices(results: int) -> list[tuple[bool, ...]]:
    """The choices of some results: for each whether it is one of them."""
    return [choice for choice in itertools.product((False, True), repeat=results) if any(choice)]


def _why_not_parameters(weights: Sequence[Tensor]) -> str:
    """A hook would run while the backward is traced."""
    return "a parameter has a hook for its gradient" if any(weight._backward_hooks for weight in weights) else ""


def _parts_of(value: Any) -> list[Any]:
    """What is in nested tuples and lists, but for None; or the value itself."""
    if isinstance(value, (tuple, list)):
        return [part for each in value for part in _parts_of(each)]
    return [] if value is None else [value]


def _tensors_in(value: Any) -> list[Tensor]:
    return [part for part in _parts_of(value) if isinstance(part, Tensor)]


def _form(tensor: Tensor) -> _Form:
    return _Form(storage_number(tensor), int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype)


def as_inputs(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors for a call that is traced. Those that need a gradient are views, at which its backward ends.

    One argument may be made of another one, so that the gradient of the first goes on to the second.
    """
    return [tensor.view_as(tensor) if tensor.requires_grad else tensor for tensor in tensors]


def exchanged(value: Any, tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Any:
    """A value, or nested tuples, lists and dictionaries, with other tensors in the place of given ones."""
    kind = type(value)
    if kind is Tensor:
        return next((other for tensor, other in zip(tensors, others) if tensor is value), value)
    if kind in (tuple, list):
        return kind(exchanged(part, tensors, others) for part in value)
    return {key: exchanged(part, tensors, others) for key, part in value.items()} if kind is dict else value
