"""Whether the ops can stand in for modules at a call: hooks, parameters, modes; and how long an answer stands.

A call's guards ask about its tensors, the modes of the process (autocast, gradients, torch.func) and the modules that
the fused code reads past their ``forward``. The first two are asked at every call. What is found out about modules is
kept in a `Memory` on the module, together with all that the answers depend on; a later call compares that in a few
microseconds and asks again where anything differs.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Container, Hashable, Iterator
from operator import is_, itemgetter
from typing import Any, Callable, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from .._variant import COMPILED_DEVICE, constant_when_compiled

ATTRIBUTE = "_ltx_kernels"  # the site of a replaced module
MEMORY = "_ltx_kernels_memory"
REPLAYS = "_ltx_kernels_replays"
RELEASE = "_ltx_kernels_release"  # a function of a whole model: what `restore` undoes there beside the forwards
_NOT_WATCHED = (REPLAYS, "_is_full_backward_hook")  # where a state is held, and what gradients alone ask for
SIGNATURES = 64  # answers, or recorded calls, that are held for a module; a model is called with few shapes

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Answer = TypeVar("Answer")


class NormModule(Protocol):
    """A norm as torch and diffusers make it."""

    eps: float | None
    _parameters: dict[str, Tensor | None]


def name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def class_of(value: object) -> str:
    return name_of(type(value))


def children(module: nn.Module, *names: str) -> tuple[Any, ...]:
    """Submodules by name, where attribute access by nn.Module's __getattr__ is too slow: it takes ten times as long."""
    return tuple(map(module._modules.__getitem__, names))


def submodule(module: nn.Module, path: str) -> nn.Module | None:
    """The submodule at a dotted path, None where there is none."""
    found: nn.Module | None = module
    for name in path.split("."):
        found = None if found is None else found._modules.get(name)
    return found


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


def is_ordinary(parameter: Tensor) -> bool:
    """Whether a parameter is one of torch's own kind: not quantised, not distributed."""
    return type(parameter) is nn.Parameter


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_capability = functools.cache(torch.cuda.get_device_capability)


@constant_when_compiled
def has_tensor_cores(device: torch.device) -> bool:
    """Whether a GPU is of compute capability 8.0 or newer, as torch's flash attention and this package's want it."""
    return _capability(device) >= (8, 0)


def plain_linear(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a module is nn.Linear and nothing else, with ordinary parameters that need no gradient."""
    if type(module) is not nn.Linear or "forward" in module.__dict__ or hooked(module):
        return False
    grad = torch.is_grad_enabled()
    for parameter in module._parameters.values():
        if parameter is not None and (
            not is_ordinary(parameter) or parameter.dtype != dtype or (grad and parameter.requires_grad)
        ):
            return False
    return True


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
    if not torch.compiler.is_compiling():
        if type(tensor) is not Tensor:
            return f"the input is a {type(tensor).__name__}"
        if nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks:
            return "a global forward hook is registered"
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return "a transformation of torch.func is active"
    return ""


def why_not_tensor(name: str, tensor: Tensor, input: Tensor, casts: bool = False) -> str:
    """Why ops cannot read a parameter or an argument beside an input; empty if they can.

    casts: The stock module casts its results to the input's dtype, so that the tensor may have another one.
    """
    if type(tensor) not in (Tensor, nn.Parameter) and not torch.compiler.is_compiling():
        return f"{name} is a {type(tensor).__name__}"
    if tensor.device != input.device:
        return f"{name} is on {tensor.device}, not on {input.device}"
    if tensor.dtype != input.dtype if not casts else tensor.dtype not in _DTYPES:
        return f"{name} has dtype {tensor.dtype}, the input {input.dtype}"
    if torch.is_grad_enabled() and tensor.requires_grad:
        return "a gradient is needed"
    return ""


def why_not_norm_weight(module: NormModule, input: Tensor, casts: bool = False) -> str:
    """Why a norm's weight and bias cannot go with an input now; empty if they can."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            reason = why_not_tensor(f"its {name}", parameter, input, casts)
            if reason:
                return reason
    return ""


def why_not_norm_call(module: nn.Module, input: Tensor) -> str:
    """Why a norm's own call cannot run an op; empty if it can."""
    return why_not_input(input) or why_not_norm_weight(module, input)  # type: ignore[arg-type]


# ---- What stands from call to call

# Attributes that answers depend on, beside the modules, their classes, forwards and parameters.
_WATCHED = ("forward", "eps", "processor", "approximate", "training", "p", "fused_projections")


def _walk(module: nn.Module, apart: Container[str] = ()) -> Iterator[tuple[dict[str, Any], str, nn.Module]]:
    """(parent's modules, name, module) of all below a module, but for what lies below the children named `apart`."""
    for name, child in module._modules.items():
        if child is not None:
            yield module._modules, name, child
            if name not in apart:
                yield from _walk(child)


def _below(module: nn.Module) -> list[tuple[dict[str, Any], str, nn.Module]]:
    site = module.__dict__.get(ATTRIBUTE)
    return list(_walk(module, () if site is None else site.entry.apart))


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was written to; None where torch does not count, as of tensors made in inference mode."""
    try:
        return tensor._version
    except RuntimeError:
        return None


class State:
    """A module and all below it as they are now: what answers about them, and recorded calls, depend on."""

    def __init__(self, module: nn.Module) -> None:
        below = self._below(module)
        self.module = module
        self.modules = [child for _, _, child in below]
        self.classes = [type(child) for child in self.modules]
        self.sizes = self._sized()
        self.counts = list(map(len, self.sizes))
        self.hooks: list[Any] = [
            hooks for child in self.modules for hooks in (child._forward_hooks, child._forward_pre_hooks)
        ]
        watched = self._watched()
        tensors = [
            (tensors, name)
            for child in (module, *self.modules)
            for tensors in (child._parameters, child._buffers)
            for name in tensors
        ]
        # Numbers, texts and flags: how to take them out of a dict, the dict, and what comes out.
        plain: dict[int, tuple[dict[str, Any], list[str]]] = {}
        for place, name in watched:
            if name in place and _is_plain(place[name]):
                plain.setdefault(id(place), (place, []))[1].append(name)
        self.plain = [(itemgetter(*names), place) for place, names in plain.values()]
        self.values = [get(place) for get, place in self.plain]
        # Where modules, other attributes and tensors are held, by which names, and what is there.
        others = [(place, name) for place, name in watched if not (name in place and _is_plain(place[name]))]
        places = [*((modules, name) for modules, name, _ in below), *others, *tensors]
        self.places, self.names = [place for place, _ in places], [name for _, name in places]
        self.held = list(map(dict.get, self.places, self.names))
        present = [tensor for place, name in tensors if (tensor := place[name]) is not None]
        self.present = present
        self.addresses = list(map(Tensor.data_ptr, present))
        self.dtypes = [tensor.dtype for tensor in present]
        # Writing into a weight leaves its address as it is, and what was quantised from it behind.
        weights = [
            cast(Tensor, child._parameters["weight"])
            for child in self.modules
            if ATTRIBUTE in child.__dict__ and child._buffers
        ]
        self.quantised = [weight for weight in weights if version_of(weight) is not None]
        self.versions = [tensor._version for tensor in self.quantised]

    def holds(self, module: nn.Module) -> bool:
        """Whether all is as it was; written for speed, since every call of every block asks."""
        return (
            self.module is module
            and not any(self.hooks)
            and all(map(is_, map(dict.get, self.places, self.names), self.held))
            and self._has_values()
            and list(map(type, self.modules)) == self.classes
            and list(map(len, self.sizes)) == self.counts
            and list(map(Tensor.data_ptr, self.present)) == self.addresses
            and [tensor.dtype for tensor in self.present] == self.dtypes
            and [tensor._version for tensor in self.quantised] == self.versions
        )

    def _has_values(self) -> bool:
        try:
            return [get(place) for get, place in self.plain] == self.values
        except Exception:  # an attribute is gone, or is something now that cannot be compared
            return False

    def _below(self, module: nn.Module) -> list[tuple[dict[str, Any], str, nn.Module]]:
        """What `_walk` gives of the modules that belong to the state."""
        return list(_walk(module))

    def _sized(self) -> list[dict[str, Any]]:
        """The dicts that nothing may be added to: modules' children and attributes."""
        parts = (self.module, *self.modules)
        return [part._modules for part in parts if part._modules] + [part.__dict__ for part in parts]

    def _watched(self) -> list[tuple[dict[str, Any], str]]:
        """The attributes beside modules, parameters and hooks: all numbers, texts and flags, and processors'."""
        watched = []
        for part in (self.module, *self.modules):
            own = part.__dict__
            # The list is made at once: another thread may put answers into the dict meanwhile.
            plain = [key for key, value in list(own.items()) if _is_plain(value) and key not in _NOT_WATCHED]
            watched += [(own, key) for key in (*plain, "processor") if key in own]
            processor = getattr(own.get("processor"), "__dict__", {})
            watched += [(processor, key) for key in processor]
            if part is not self.module:
                # An attribute that is set later changes the number of attributes.
                watched += [(own, key) for key in ("forward", "_compiled_call_impl") if key in own]
        return watched

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # of other modules, and soon made again


class Memory(State):
    """Answers about a module, and the state that they were found in, without children that have guards of their own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.answers: dict[Hashable, Any] = {}

    def _below(self, module: nn.Module) -> list[tuple[dict[str, Any], str, nn.Module]]:
        return _below(module)

    def _sized(self) -> list[dict[str, Any]]:
        return [part._modules for part in (self.module, *self.modules) if part._modules]

    def _watched(self) -> list[tuple[dict[str, Any], str]]:
        watched = [(child.__dict__, key) for child in self.modules for key in _WATCHED]
        watched = [(state, key) for state, key in watched if key == "forward" or key in state]
        return watched + [(self.module.__dict__, key) for key in _WATCHED[1:] if key in self.module.__dict__]


def _is_plain(value: object) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _new_memory(module: nn.Module) -> Memory | None:
    module.__dict__.pop(MEMORY, None)  # or `recall` would find it
    parts = [module, *(child for _, _, child in _below(module))]
    if any(part._forward_hooks or part._forward_pre_hooks for part in parts[1:]):
        return None
    tensors = [t for part in parts for held in (part._parameters, part._buffers) for t in held.values()]
    if any(t is not None and type(t) not in (nn.Parameter, Tensor) for t in tensors):
        return None
    memory = module.__dict__[MEMORY] = Memory(module)
    return memory


def remember(module: nn.Module, key: Hashable, ask: Callable[..., Answer], *arguments: Any) -> Answer:
    """``ask(module, *arguments)``, or what it said in the same state of the module for the same key.

    Nothing is kept under torch.compile, where gradients are on, and where a submodule has a hook.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return ask(module, *arguments)
    if not torch._C._len_torch_function_stack():
        return _remember(module, key, ask, *arguments)
    with torch._C.DisableTorchFunction():  # what a function mode sees are a call's own functions
        return _remember(module, key, ask, *arguments)


def _remember(module: nn.Module, key: Hashable, ask: Callable[..., Answer], *arguments: Any) -> Answer:
    memory = module.__dict__.get(MEMORY)
    if memory is None or not memory.holds(module):
        memory = _new_memory(module)
        if memory is None:
            return ask(module, *arguments)
    answers = memory.answers
    try:
        return answers[key]
    except KeyError:
        if len(answers) >= SIGNATURES:
            answers.clear()
    answer = answers[key] = ask(module, *arguments)
    return answer


def recall(module: nn.Module, key: Hashable) -> Any:
    """What `remember` kept under a key a moment ago, without another look at the module; None if nothing."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    memory = module.__dict__.get(MEMORY)
    return None if memory is None else memory.answers.get(key)


def forget(module: nn.Module) -> None:
    """Takes what `remember` kept, and recorded calls, away from a module and all below it."""
    for part in module.modules():
        part.__dict__.pop(MEMORY, None)
        part.__dict__.pop(REPLAYS, None)
