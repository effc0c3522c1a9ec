"""Writes a call with gradients and its backward down as Python functions.

A call whose result needs a gradient is traced below autograd. Its backward is traced at once, with gradients of zeros,
so that the lines of both are the ops that autograd itself runs. Views that the backward reads are made in it again, so
that what they are made of is saved once.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..._ops import ops
from ..._torch_private import DispatchMode, OpOverload, storage_number, storage_uses, without_function_modes
from .gradients import DEVICES, GradientRecording, choices, without_autocast
from .recorder import Line, Recording, Trace, emit, simplify

RESULTS = 2  # a block with more results has too many choices of those that a gradient comes from

# Of other libraries an op may do more than its schema says.
_LIBRARIES = ("aten", "prims", ops.norm.default.namespace)


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

    Autograd makes new tensor objects of the tensors that it saves. They are found by their `_Form`. The number of a
    storage is unique only while the storage lives, so that the trace holds all storages until it ends. It frees the
    memory of those that nothing else holds.
    """

    apart = True

    def __init__(self, given: Sequence[Tensor], held: Sequence[Tensor]) -> None:
        DispatchMode.__init__(self)
        self.forms: dict[_Form, str] = {}
        self.storages: dict[int, torch.UntypedStorage] = {}  # by their number
        self.numbers: dict[str, int] = {}  # of the storage of each variable
        self.allocated: set[int] = set()  # storages of the call itself that have their memory
        self.parameters: list[str] = []  # of the function whose lines are traced
        self.autocast = [device for device in DEVICES if torch.is_autocast_enabled(device)]
        self.arguments, self.weights = given, held
        Trace.__init__(self, given, held, {})
        self.reads_held = True
        # In these storages a form may belong to one tensor in this call and to another one in the next call.
        times = Counter(storage_number(tensor) for tensor in given)
        weights = {storage_number(tensor) for tensor in held}
        self.ambiguous = {storage for storage, count in times.items() if count > 1 or storage in weights}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not self.paused and not self.reason:
            self._trace(function, args, kwargs or {}, result)
            self._free()
        return result

    def _free(self) -> None:
        """Frees memory that nothing will read."""
        for number in list(self.allocated):
            if storage_uses(self.storages[number]) == 1:
                self.storages[number].resize_(0)
                self.allocated.remove(number)

    def _replayed(self, function: Callable[..., Any], result: Any) -> Callable[..., Any]:
        if any(tensor.requires_grad for tensor in _tensors_in(result)):
            self.reason = self.reason or "a gradient goes through a function that every replay calls again"
        devices = self.autocast
        if not devices:
            return function

        @functools.wraps(function)
        def as_called(*arguments: Any) -> Any:
            for device in devices:
                torch.set_autocast_enabled(device, True)
            try:
                return function(*arguments)
            finally:
                for device in devices:
                    torch.set_autocast_enabled(device, False)

        return as_called

    @contextmanager
    def tracing(self) -> Iterator[None]:
        with _Questions(self), self:
            yield

    def recording(self, result: Any, answer: Any = None) -> GradientRecording | str:
        """The recorded call, which returned `result`, and its backward; or the reason why there is none."""
        given, weights = self.arguments, self.weights
        # A parameter that several layers hold is one tensor, with one gradient.
        followed = list({id(tensor): tensor for tensor in (*given, *weights) if tensor.requires_grad}.values())
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
        self.lines, self.prefix = [], f"back{sum(choice[i] << i for i in range(len(choice)))}_"
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
        return _Backward(parameters, [line for line, _ in lines], names, read - made)

    def _compiled(
        self,
        result: Any,
        answer: Any,
        given: Sequence[Tensor],
        followed: Sequence[Tensor],
        forward: Sequence[Line],
        backwards: Mapping[tuple[bool, ...], _Backward],
    ) -> GradientRecording | str:
        read: set[str] = set()
        returned = self._text(result, read)
        results = (result,) if isinstance(result, Tensor) else result
        own = {self._name_of(part) for part in results}
        needed = set().union(*(backward.needed for backward in backwards.values()))
        views: list[Line] = []
        for line in reversed(forward):
            if line.view and line.makes & needed and not line.makes & own:
                views.insert(0, line)
                needed = needed - line.makes | line.reads
        saved = sorted(needed.difference(self.globals))
        theirs = {storage_number(part) for part in results}
        if any(self.numbers[name] in theirs for name in saved if name not in own):
            return "the backward reads memory of a result"
        # Autograd raises its error where one of them was written to meanwhile.
        storages = {self.numbers[name] for name in needed.intersection(self.globals)}
        weights = [weight for weight in self.weights if storage_number(weight) in storages]
        inputs = {id(tensor) for tensor in given}
        gets = [any(found) for found in zip(*(backward.gradients for backward in backwards.values()))]
        trained = [tensor for tensor, gradient in zip(followed, gets) if gradient and id(tensor) not in inputs]
        place = {id(tensor): i for i, tensor in enumerate(followed)}
        functions = {}
        sources = []
        for choice, backward in backwards.items():
            ordered = [backward.gradients[place[id(t)]] if id(t) in place else "" for t in (*given, *trained)]
            values = f"(None, None, None, {', '.join(name or 'None' for name in ordered)})"
            unpacked = Line(f"({''.join(f'{name}, ' for name in saved)})", "saved", {"saved"}, set(saved), False)
            lines = [unpacked, Line("", "saved.clear()", {"saved"}, set(), False), *views, *backward.lines]
            sources.append(self._source([*backward.parameters, "saved"], lines, values, {*ordered}))
            functions[choice] = self._function(sources[-1])
        values = f"{returned}, ({''.join(f'{name}, ' for name in saved)})"
        sources.insert(0, self._source(self.given[: len(given)], forward, values, read.union(saved)))
        recording = Recording(self._function(sources[0]), "\n".join(sources), False, self.counts, answer)
        gradients = [tensor.requires_grad for tensor in given]
        places = frozenset(saved.index(name) for name in own.intersection(saved))
        partial = [t for t in trained if not all(back.gradients[place[id(t)]] for back in backwards.values())]
        return GradientRecording(recording, functions, gradients, trained, partial, weights, places, self.autocast)

    def _source(self, parameters: Sequence[str], lines: Sequence[Line], returned: str, read: set[str]) -> str:
        """read: The variables that the function returns."""
        return emit(parameters, simplify(lines, read), returned, {*parameters, *self.globals})

    def _note_name(self, tensor: Tensor, name: str) -> str:
        self.forms.setdefault(_form(tensor), name)
        self.numbers[name] = number = storage_number(tensor)
        if number not in self.storages:
            self.storages[number] = tensor.untyped_storage()
            self.allocated |= {number} - self.others
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
    lines: Those that it needs.
    gradients: For each tensor that may get one the name of its gradient, or "".
    needed: The names of what it reads of the call.
    """

    parameters: list[str]
    lines: list[Line]
    gradients: list[str]
    needed: set[str]


def _why_not_parameters(weights: Sequence[Tensor]) -> str:
    """A hook would run while the backward is traced, and the gradient of a weight would go on to what it is made of."""
    if any(weight._backward_hooks for weight in weights):
        return "a parameter has a hook for its gradient"
    made = any(weight.requires_grad and not weight.is_leaf for weight in weights)
    return "a weight is computed from other tensors" if made else ""


def _parts_of(value: Any) -> list[Any]:
    """What is in nested tuples and lists, but for None; or the value itself."""
    if isinstance(value, (tuple, list)):
        return [part for each in value for part in _parts_of(each)]
    return [] if value is None else [value]


def _tensors_in(value: Any) -> list[Tensor]:
    return [part for part in _parts_of(value) if isinstance(part, Tensor)]


def _form(tensor: Tensor) -> _Form:
    return _Form(storage_number(tensor), int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype)


def exchanged(value: Any, tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Any:
    """A value, or nested tuples, lists and dictionaries, with other tensors in the place of given ones."""
    kind = type(value)
    if kind is Tensor:
        return next((other for tensor, other in zip(tensors, others) if tensor is value), value)
    if kind in (tuple, list):
        return kind(exchanged(part, tensors, others) for part in value)
    return {key: exchanged(part, tensors, others) for key, part in value.items()} if kind is dict else value
