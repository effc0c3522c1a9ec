"""What recorded calls, captured graphs and kept answers depend on, and whether it is still as it was.

A `Snapshot` is a copy of everything that decides what a module's call runs: of every module at or below it the class
and all attributes by name; hooks, submodules, parameters and buffers; where each tensor lies and how; the objects that
attributes hold, such as a processor or a configuration; the functions that the stock code looks up (`engine/code.py`);
and diffusers' choice of an attention backend. Nothing of it is listed by name, so nothing can be missing from a list.

What lasts for the whole process is asked at every call instead: see `signature.py`.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Hashable, Iterator
from enum import Enum
from itertools import repeat
from operator import is_
from typing import Any, Callable, TypeVar, cast

import torch
from torch import Tensor, nn

from ..._torch_private import function_modes, storage_number, storage_reference, without_function_modes
from .autocast import autocast_state
from .code import code_of
from .guards import ATTRIBUTE, class_of, has_hooks, version_of

HELD = "_ltx_kernels_held"  # the attribute with a module's `Held`
SIGNATURES = 64  # answers, or recorded calls, that are held for a module; a model is called with few shapes

Answer = TypeVar("Answer")


class Held:
    """What calls leave on a module. It is one object for good, so that the module's attributes stay as they are.

    memory: The answers of `remember`, with the snapshot that they hold for.
    replays: The recorded calls of a block.
    graphs: The CUDA graphs of a module.
    parent: The model that a module makes tables for.
    """

    __slots__ = ("graphs", "memory", "parent", "replays")

    def __init__(self) -> None:
        self.memory: Memory | None = None
        self.replays: Any = None
        self.graphs: Any = None
        self.parent: weakref.ref[nn.Module] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Held:
        return Held()


def held(module: nn.Module) -> Held:
    found: Held | None = module.__dict__.get(HELD)
    if found is None:
        found = module.__dict__[HELD] = Held()
    return found


def forget(root: nn.Module) -> None:
    """Takes answers, recorded calls and graphs away from a module and all below it."""
    for part in root.modules():
        part.__dict__.pop(HELD, None)


# ---- A module's state


class _Anything:
    """Equal to whatever it is compared with."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


# Attributes that may change between calls, by class, because something else looks at them: `adapters_state`.
_APART = {"peft.tuners.lora.layer.Linear": ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")}
_OWN = "_ltx_kernels"  # begins the names of this package's attributes
# Objects on a block that wrap its forward, and may count calls. What they run lies outside of the block.
_WRAPPERS = ("_hf_hook", "_diffusers_hook")

# What an attribute may hold that is no object to look into: it is looked at otherwise, or nothing of it can change.
_SEEN_OTHERWISE = (nn.Module, Tensor, type, Enum, dict, list, set, types.FunctionType, types.MethodType)

# Dictionaries of nn.Module, of which only these decide what a call runs.
_READ = (
    *("_parameters", "_buffers", "_modules"),
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
)
_UNREAD = frozenset(
    name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set)) and name not in _READ
)


class Snapshot:
    """A module and all below it as they are now.

    apart: Names of children whose own submodules have snapshots of their own, and are left out.
    """

    def __init__(self, module: nn.Module, apart: frozenset[str] = frozenset()) -> None:
        self._module = weakref.ref(module)  # the module holds the snapshot
        self.modules = list(_below(module, apart))
        own = [module, *self.modules]
        for part in own:
            held(part)  # a call that adds it later would change the attributes
        objects = list(_objects_of(own))
        number = {id(part): i for i, part in enumerate((*own, *(value for _, _, value in objects)))}
        self._parts = [*self.modules, *(value for _, _, value in objects)]
        self._count = len(own)
        parts = [module, *self._parts]
        self._classes = list(map(type, parts))
        attributes: list[dict[str, Any]] = [part.__dict__ for part in parts]
        self._attributes = list(map(_copied, parts, attributes))
        # By the number of the part and the name of the attribute. `holds` compares these by identity, not by equality.
        self._held = [(number[id(holder)], name) for holder, name, _ in objects]
        self._objects = [value for _, _, value in objects]
        self._read_code()
        named = [
            (i, kind, name, tensor)
            for i, place in enumerate(attributes[: self._count])
            for kind in ("_parameters", "_buffers")
            for name, tensor in place[kind].items()
            if tensor is not None
        ]
        # `==` on tensors of one element raises no error, so that it would accept another tensor with the same value.
        self._places_of_single = [tuple(place) for *place, tensor in named if tensor.numel() == 1]
        self._single = [tensor for *_, tensor in named if tensor.numel() == 1]
        self.tensors = [entry[-1] for entry in named]
        loose = [tensor for part in parts for tensor in _loose(part)]
        self._watched = [tensor for tensor in (*self.tensors, *loose) if is_strided(tensor)]
        self._addresses = list(map(Tensor.data_ptr, self._watched))
        self._strides = list(map(Tensor.stride, self._watched))
        self._sizes = list(map(Tensor.numel, self._watched))
        self._dtypes = [tensor.dtype for tensor in self._watched]
        # Writing into a weight leaves its address as it is, and what was quantised from it out of date. So does other
        # data that gets the same address.
        quantised = filter(_is_quantised, self.modules)
        weights = [tensor for child in quantised for tensor in (child._parameters["weight"], *_loose(child))]
        self._quantised = [weight for weight in weights if weight is not None and version_of(weight) is not None]
        self._versions = [weight._version for weight in self._quantised]
        self._copied = [cast(Tensor, child._parameters["weight"]) for child in self.modules if _has_fp8_copy(child)]
        self._memories = list(map(storage_number, self._copied))
        self._references = list(map(storage_reference, self._copied))  # no other memory gets these numbers
        self._registries = _registries(own)
        self._backends = [registry.get_active_backend() for registry in self._registries]

    def _read_code(self) -> None:
        """Notes the functions and class attributes that the code of all parts looks up."""
        codes = [code_of(cls) for cls in dict.fromkeys(self._classes)]
        looked_up = dict.fromkeys(pair for code in codes for pair in zip(code.classes, code.attributes))
        self._code_classes, self._code_names = [cls for cls, _ in looked_up], [name for _, name in looked_up]
        self._code = list(map(getattr, self._code_classes, self._code_names, repeat(None)))
        places = {(id(place), name): (place, name) for code in codes for place, name in zip(code.places, code.names)}
        self._places, self._names = [place for place, _ in places.values()], [name for _, name in places.values()]
        self._functions = list(map(dict.get, self._places, self._names))

    def gradients(self) -> tuple[bool, ...] | None:
        """Which of the tensors need a gradient; None where gradients are off."""
        return tuple([tensor.requires_grad for tensor in self._watched]) if torch.is_grad_enabled() else None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # of other modules, and soon made again

    def holds(self, module: nn.Module) -> bool:
        """Whether all is as it was; written for speed, since every call of every block asks."""
        if self._module() is not module:
            return False
        attributes = [vars(module), *map(vars, self._parts)]
        watched = self._watched
        try:
            return (
                attributes == self._attributes
                and [type(module), *map(type, self._parts)] == self._classes
                and all(map(is_, [attributes[i][name] for i, name in self._held], self._objects))
                and all(map(is_, [attributes[i][kind][name] for i, kind, name in self._places_of_single], self._single))
                and all(map(is_, map(dict.get, self._places, self._names), self._functions))
                and all(map(is_, map(getattr, self._code_classes, self._code_names, repeat(None)), self._code))
                and list(map(Tensor.data_ptr, watched)) == self._addresses
                and list(map(Tensor.stride, watched)) == self._strides
                and list(map(Tensor.numel, watched)) == self._sizes
                and [tensor.dtype for tensor in watched] == self._dtypes
                and [weight._version for weight in self._quantised] == self._versions
                and list(map(storage_number, self._copied)) == self._memories
                and [registry.get_active_backend() for registry in self._registries] == self._backends
            )
        except Exception:  # something was exchanged for what cannot be compared, such as a tensor for another one
            return False


def _loose(part: Any) -> list[Tensor]:
    """The tensors among the attributes of a part that are neither its parameters nor its buffers."""
    return [value for value in list(part.__dict__.values()) if isinstance(value, Tensor)]


def is_strided(tensor: Tensor) -> bool:
    """Whether a tensor has an address and strides: sparse ones lack the one, nested ones the other."""
    return tensor.layout is torch.strided and not tensor.is_nested


def is_watched(tensor: Tensor) -> bool:
    """Whether a snapshot sees when a parameter or a buffer gets other data."""
    return type(tensor) in (nn.Parameter, Tensor) and is_strided(tensor)


def _below(module: nn.Module, apart: frozenset[str] = frozenset()) -> Iterator[nn.Module]:
    """All modules below a module, but for what lies below the children named `apart`."""
    for name, child in module._modules.items():
        if child is not None:
            yield child
            if name not in apart:
                yield from _below(child)


def _objects_of(modules: list[nn.Module]) -> Iterator[tuple[Any, str, Any]]:
    """(holder, name, object) of the objects that modules hold beside modules and tensors, and of what these hold."""
    seen: set[int] = set()
    holders: list[Any] = list(modules)
    for _ in range(2):
        found = []
        for holder in holders:
            # The list is made at once: another thread may set attributes meanwhile.
            for name, value in list(vars(holder).items()):
                if id(value) not in seen and not name.startswith(_OWN) and name not in _WRAPPERS and _is_object(value):
                    seen.add(id(value))
                    yield holder, name, value
                    found.append(value)
        holders = found


def _is_object(value: Any) -> bool:
    """Whether a value has attributes that stock code may read, and is none of those that are looked at otherwise."""
    if isinstance(value, _SEEN_OTHERWISE):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def _copied(part: Any, attributes: dict[str, Any]) -> dict[str, Any]:
    """A copy of attributes and of the containers among them, in which those of `_APART` are equal to anything."""
    apart = _APART.get(class_of(part), ())
    return {
        name: _Anything() if name in apart else value if name in _UNREAD else _content(value)
        for name, value in list(attributes.items())
    }


def _content(value: Any) -> Any:
    """A copy of a container, which compares by what it contains; other values are what they are."""
    copies = ((dict, dict), (list, list), (set, set))
    return next((copy(value) for kind, copy in copies if isinstance(value, kind)), value)


def _is_quantised(module: nn.Module) -> bool:
    return ATTRIBUTE in module.__dict__ and bool(module._buffers) and "weight" in module._parameters


def _has_fp8_copy(module: nn.Module) -> bool:
    """Whether products read an fp8 copy that lies beside the weight."""
    buffers = (buffer for buffer in module._buffers.values() if buffer is not None)
    return _is_quantised(module) and any(buffer.dtype == torch.float8_e4m3fn for buffer in buffers)


def _registries(modules: list[nn.Module]) -> list[Any]:
    """Diffusers' registries of attention backends that replaced modules look into."""
    sites = [module.__dict__[ATTRIBUTE] for module in modules if ATTRIBUTE in module.__dict__]
    found = (site.settings.get("backends") for site in sites)
    return list({id(registry): registry for registry in found if registry is not None}.values())


# ---- Answers about a module


class Memory:
    """Answers about a module, and the snapshot that they hold for, without children that have guards of their own."""

    __slots__ = ("answers", "snapshot")

    def __init__(self, module: nn.Module, apart: frozenset[str]) -> None:
        self.snapshot = Snapshot(module, apart)
        self.answers: dict[Hashable, Any] = {}


def _new_memory(module: nn.Module) -> Memory | None:
    found = held(module)
    found.memory = None  # or `recall` would find it
    site = module.__dict__.get(ATTRIBUTE)
    apart = frozenset() if site is None else site.entry.apart
    parts = [module, *_below(module, apart)]
    if any(map(has_hooks, parts[1:])):
        return None
    tensors = [t for part in parts for place in (part._parameters, part._buffers) for t in place.values()]
    if any(t is not None and not is_watched(t) for t in tensors):
        return None
    found.memory = memory = Memory(module, apart)
    return memory


def remember(module: nn.Module, key: Hashable, ask: Callable[..., Answer], *arguments: Any) -> Answer:
    """``ask(module, *arguments)``, or what it returned in the same state of the module for the same key.

    Nothing is kept under torch.compile and torch.jit.trace, and where a submodule has a hook.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return ask(module, *arguments)
    if not function_modes():
        return _remember(module, key, ask, *arguments)
    with without_function_modes():  # what a function mode sees are a call's own functions
        return _remember(module, key, ask, *arguments)


def _remember(module: nn.Module, key: Hashable, ask: Callable[..., Answer], *arguments: Any) -> Answer:
    memory = held(module).memory
    if memory is None or not memory.snapshot.holds(module):
        memory = _new_memory(module)
        if memory is None:
            return ask(module, *arguments)
    answers, key = memory.answers, (key, autocast_state(), memory.snapshot.gradients())
    try:
        return cast(Answer, answers[key])
    except KeyError:
        if len(answers) >= SIGNATURES:
            answers.clear()
    answer = answers[key] = ask(module, *arguments)
    return answer


def recall(module: nn.Module, key: Hashable) -> Any:
    """What `remember` kept under a key a moment ago, without another look at the module; None if nothing."""
    if torch.compiler.is_compiling():
        return None
    found: Held | None = module.__dict__.get(HELD)
    if found is None or found.memory is None:
        return None
    return found.memory.answers.get((key, autocast_state(), found.memory.snapshot.gradients()))
