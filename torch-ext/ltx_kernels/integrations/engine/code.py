"""Which code a stock forward runs: its own library's, or what somebody has put in its place.

A class's ``forward``, a processor's ``__call__``, and the functions and class attributes that these look up by name can
be exchanged at any time: ``nn.Linear.forward = ...`` or ``torch.nn.functional.linear = ...``. A fused forward computes
what the library's code computes, and has to notice when that is no longer what the stock module would run. `Code` finds
the names that a class's code looks up by reading its bytecode, so that there is no list of them.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Iterator
from itertools import repeat
from operator import is_
from typing import Any

from torch import nn

from ..._variant import constant_when_compiled

# Libraries whose functions count as stock, beside the library of the class itself and Python's own modules.
LIBRARIES = frozenset({"torch", "diffusers", "transformers", "kernels"})
_PYTHON = frozenset(getattr(sys, "stdlib_module_names", ("contextlib", "functools", "typing", "warnings")))
# Functions that the fused forwards look up and call as the stock forwards do, whoever wrote them.
FOLLOWED = frozenset(
    {"scaled_dot_product_attention", "dispatch_attention_fn", "eager_attention_forward", "conv2d", "conv3d"}
)
_BASES = (nn.Module, object)
# A method that this package sets on a module computes what the class's own method does.
_PACKAGE = __name__.partition(".integrations.")[0] + "."


class Code:
    """The code that instances of a class run, and what is found under the names that it looks up.

    reason: What of it is not the library's own; empty if all of it is.
    helpers: The names of the methods that its forward may call, without those that all modules have, such as ``to``.
    """

    __slots__ = ("attributes", "classes", "found", "functions", "helpers", "names", "places", "reason")

    def __init__(self, cls: type) -> None:
        self.classes: list[type] = []
        self.attributes: list[str] = []
        self.places: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.reason = ""
        self._read(cls)
        self.found = list(map(getattr, self.classes, self.attributes, repeat(None)))
        self.functions = list(map(dict.get, self.places, self.names))
        methods = [name for name, value in zip(self.attributes, self.found) if callable(value)]
        self.helpers = tuple(name for name in methods if not hasattr(nn.Module, name))

    def holds(self) -> bool:
        """Whether every name still leads to what it led to; written for speed."""
        return all(map(is_, map(getattr, self.classes, self.attributes, repeat(None)), self.found)) and all(
            map(is_, map(dict.get, self.places, self.names), self.functions)
        )

    def _read(self, cls: type) -> None:
        todo: list[tuple[Any, str]] = [
            (cls, name) for name in ("__call__", "forward") if any(name in vars(base) for base in cls.__mro__)
        ]
        seen: set[Any] = set()
        while todo:
            place, name = todo.pop()
            if (id(place), name) in seen:
                continue
            seen.add((id(place), name))
            value = self._watch(cls, place, name)
            for function in _chain(value):
                todo += [(cls, other) for other in _names_in(function.__code__) if _is_watched(cls, other)]
                todo += list(_looked_up(function, isinstance(place, type)))

    def _watch(self, cls: type, place: Any, name: str) -> Any:
        """Notes a name, and why its function is not the library's own; returns what it leads to."""
        if isinstance(place, type):
            home = _home_of(cls, name) or place
            value = getattr(cls, name, None)
            self.classes.append(cls)
            self.attributes.append(name)
            expected, described = home.__module__, f"{cls.__name__}.{name}"
        else:
            value = place[name]
            self.places.append(place)
            self.names.append(name)
            expected, described = "", f"{place.get('__name__', '')}.{name}"
        if name not in FOLLOWED:
            self.reason = self.reason or _why_foreign(value, cls.__module__, expected, described)
        return value


def _home_of(cls: type, name: str) -> type | None:
    """The class that defines an attribute, None where none does but those that all modules share."""
    for base in cls.__mro__:
        if base in _BASES:
            return None
        if name in vars(base):
            return base
    return None


def _is_watched(cls: type, name: str) -> bool:
    """Whether a class defines an attribute that is the same object whenever it is looked up."""
    home = _home_of(cls, name)
    return home is not None and not isinstance(vars(home)[name], classmethod)


def _chain(function: Any) -> Iterator[types.FunctionType]:
    """A function, and those that its decorators have wrapped: in attributes, in closures, or in a module's forward."""
    todo, seen = [function], set()
    while todo:
        function = todo.pop()
        if isinstance(function, nn.Module):
            function = type(function).forward
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        yield function
        todo.append(getattr(function, "__wrapped__", None))
        for cell in function.__closure__ or ():
            try:
                todo.append(cell.cell_contents)
            except ValueError:  # it is empty
                continue


def _names_in(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


def _paths_in(code: types.CodeType) -> Iterator[list[str]]:
    """The global names that code reads, each with the attributes that it reads of it: ["F", "linear"]."""
    path: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield path
            path = [instruction.argval]
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path.append(instruction.argval)
        elif instruction.opname not in ("CACHE", "PUSH_NULL"):
            yield path
            path = []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _paths_in(constant)


def _looked_up(function: types.FunctionType, method: bool) -> Iterator[tuple[dict[str, Any], str]]:
    """(dictionary, name) of the functions that a function finds in its file and in the modules of torch there.

    method: The function belongs to a class. Of other functions those of the libraries' models are read, and not those
        of torch.
    """
    if not method and function.__globals__.get("__name__", "").split(".")[0] in ("torch", "kernels"):
        return
    for path in _paths_in(function.__code__):
        place = function.__globals__
        for name in path:
            value = place.get(name)
            if isinstance(value, types.ModuleType) and value.__name__.split(".")[0] == "torch":
                place = vars(value)
                continue
            if callable(value) and not isinstance(value, type):
                yield place, name
            break


def _why_foreign(value: Any, library: str, expected: str, described: str) -> str:
    """What makes a function somebody else's; empty if it is the library's.

    expected: The module that has to define one of the functions; empty for any of the libraries.
    """
    homes = []
    for function in _chain(value):
        home = function.__globals__.get("__name__", "")
        top = home.split(".")[0]
        if top not in LIBRARIES and top not in _PYTHON and top != library.split(".")[0]:
            return f"{described} was replaced by a function of {function.__code__.co_filename}"
        homes.append(home)
    if expected and homes and not any(home == expected or home.startswith("torch.") for home in homes):
        return f"{described} was replaced by a function of {homes[0]}"
    return ""


def is_code_of(function: Any, home: types.ModuleType) -> bool:
    """Whether a function is defined in a file, and is neither a patch nor wrapped by one."""
    return isinstance(function, types.FunctionType) and function.__globals__ is vars(home)


_codes: dict[type, Code] = {}


def code_of(cls: type) -> Code:
    """The code of a class as it is now."""
    code = _codes.get(cls)
    if code is None or not code.holds():
        code = _codes[cls] = Code(cls)
    return code


def exchanged(module: nn.Module, cls: type) -> str:
    """The name of a method that a class's forward may call and that is another one of this module; empty if none is.

    Somebody may set one on the module, or make the module one of a subclass. Written for speed.

    cls: The class that the module had when it was replaced.
    """
    own = module.__dict__
    for name in _helpers_of(cls):
        if name in own and not _is_own(own[name]):
            return name
    return "" if type(module) is cls else _overridden(type(module), cls)


@constant_when_compiled
def _helpers_of(cls: type) -> tuple[str, ...]:
    return (_codes.get(cls) or code_of(cls)).helpers


@constant_when_compiled
def _is_own(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith(_PACKAGE)


@constant_when_compiled
def _overridden(now: type, cls: type) -> str:
    """The name of a method that a class's forward may call and that is another one of another class."""
    names = ("__call__", *_helpers_of(cls))
    return next((name for name in names if getattr(now, name, None) is not getattr(cls, name, None)), "")


@constant_when_compiled
def patched(cls: type) -> str:
    """Why instances of a class run other code than their library's; empty if they do not."""
    return code_of(cls).reason
