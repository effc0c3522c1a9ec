"""Whether the ops can stand in for modules at a call: hooks, parameters, modes.

A call's guards ask about its tensors, the modes of the process (autocast, gradients, torch.func) and the modules that
the fused code reads past their ``forward``. The first two are asked at every call. What is found out about modules is
kept with all that it depends on: see `remember` in engine/state.py.
"""

from __future__ import annotations

import functools
import types
from typing import Any, Callable, Protocol

import torch
from torch import Tensor, nn

from ..._torch_private import backward_number, forward_ad, func_interpreter, has_global_hooks
from ..._variant import COMPILED_DEVICE, constant_when_compiled
from .autocast import why_not_autocast
from .code import exchanged, patched

ATTRIBUTE = "_ltx_kernels"  # the site of a replaced module
RELEASE = "_ltx_kernels_release"  # a function of a whole model: what `restore` undoes there beside the forwards

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class NormModule(Protocol):
    """A norm as torch and diffusers make it."""

    eps: float | None
    _modules: dict[str, nn.Module | None]
    _parameters: dict[str, Tensor | None]
    _buffers: dict[str, Tensor | None]


def name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def class_of(value: object) -> str:
    return name_of(type(value))


def children(module: nn.Module, *names: str) -> tuple[Any, ...]:
    """Submodules by name, because attribute access by nn.Module's __getattr__ takes ten times as long."""
    return tuple(map(module._modules.__getitem__, names))


def fits_batch(tensor: Tensor, size: int) -> bool:
    """Whether torch broadcasts a tensor to a batch size. `in` is wrong of the symbolic sizes of torch.compile."""
    return len(tensor) == size or len(tensor) == 1


def submodule(module: nn.Module, path: str) -> nn.Module | None:
    """The submodule at a dotted path, None where there is none."""
    found: nn.Module | None = module
    for name in path.split("."):
        found = None if found is None else found._modules.get(name)
    return found


HOOK = "has a hook"


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks wrap a module's forward, or what its gradients go through."""
    return has_changing_hooks(module) or bool(module._forward_hooks)


def has_changing_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks that may do more than note its result for the caller.

    transformers leaves such a note-taking hook on layers and attentions from the first call on that asks the model for
    hidden states or attentions. The notes become part of what the model returns.
    """
    before = module._forward_pre_hooks or module._backward_pre_hooks or module._backward_hooks
    return bool(before) or not all(map(_takes_notes, module._forward_hooks.values()))


def _takes_notes(hook: Any) -> bool:
    name = getattr(hook, "__module__", ""), getattr(hook, "__qualname__", "")
    return name == (
        "transformers.utils.output_capturing",
        "install_output_capuring_hook.<locals>.output_capturing_hook",
    )


def hooked(module: nn.Module, has_hooks: Callable[[nn.Module], bool] = has_hooks) -> str:
    """Why calling the module does more than its class's own forward, or ours; empty if it does not."""
    if has_hooks(module):
        return HOOK
    code = patched(type(module))
    if code:
        return f"is patched: {code}"
    site = module.__dict__.get(ATTRIBUTE)
    name = exchanged(module, type(module) if site is None else site.cls)
    if name:
        return f"has another {name} than its class"
    forward = module.__dict__.get("forward")
    if forward is None:
        return ""
    if site is not None and not torch.compiler.is_compiling() and type(module).forward is not site.stock:
        return "is of a class with another forward"
    if site is None or type(forward) is not types.MethodType:  # hooks are functools.partial
        return HOOK
    # torch.compile of torch 2.11 makes two functions of one, so that under it the type has to do.
    return HOOK if not torch.compiler.is_compiling() and forward.__func__ is not site.forward else ""


DROPOUT = "torch.nn.modules.dropout.Dropout"


def is_idle(dropout: nn.Module) -> bool:
    """Whether a dropout is torch's own, drops nothing now, and has no hook."""
    idle = not dropout.training or dropout.__dict__.get("p") == 0
    return idle and class_of(dropout) == DROPOUT and not hooked(dropout)


def is_ordinary(parameter: Tensor) -> bool:
    """Whether a parameter is one of torch's own kind: not quantised, not distributed."""
    return type(parameter) is nn.Parameter


def has_torch_backend(attention: nn.Module) -> bool:
    """Whether diffusers' dispatch of a replaced attention, if it has one, leads to torch's attention."""
    return attention.__dict__[ATTRIBUTE].settings.get("dispatch") is None or backend_of(attention) == "native"


def backend_of(attention: Any) -> str | None:
    """The backend that diffusers' dispatch calls for a replaced attention, a str and an Enum; None if it is unknown."""
    backend: str | None = getattr(attention.processor, "_attention_backend", None)
    backends = attention.__dict__[ATTRIBUTE].settings.get("backends")
    return backends.get_active_backend()[0] if backend is None and backends is not None else backend


def is_recomputation() -> bool:
    """Whether a checkpoint computes a call again, in a backward."""
    return torch.is_grad_enabled() and backward_number() >= 0


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_capability = functools.cache(torch.cuda.get_device_capability)


@constant_when_compiled
def has_tensor_cores(device: torch.device) -> bool:
    """Whether a GPU is of compute capability 8.0 or newer, as torch's flash attention and this package's want it."""
    return _capability(device) >= (8, 0)


def is_hopper(device: torch.device) -> bool:
    """Whether a GPU is of compute capability 9.x, on which what torch lacks for it was measured."""
    return _capability(device)[0] == 9


def plain_linear(module: nn.Module, dtype: torch.dtype, trained: bool = False) -> bool:
    """Whether a module is nn.Linear and nothing else, with ordinary parameters, which need no gradient.

    trained: They may need one.
    """
    if type(module) is not nn.Linear or "forward" in module.__dict__ or hooked(module):
        return False
    if "weight" not in module._parameters or "bias" not in module._parameters:  # they are tensors of another kind
        return False
    grad = not trained and torch.is_grad_enabled()
    for parameter in module._parameters.values():
        if parameter is not None and (
            not is_ordinary(parameter) or parameter.dtype != dtype or (grad and parameter.requires_grad)
        ):
            return False
    return True


def why_not_input(tensor: Tensor, rounding: str = "fp32", gradient: bool = False, promotes: bool = False) -> str:
    """Why ops do not support a module's input in this call; empty if they do.

    rounding: Of the module's site, where it supports more than one.
    gradient: The input may need one: the ops hand it on.
    promotes: Under autocast the input may be in float32.
    """
    if tensor.dtype not in _DTYPES:
        return f"dtype {tensor.dtype}"
    if not gradient and torch.is_grad_enabled() and tensor.requires_grad:
        return "a gradient is needed"
    device = tensor.device.type
    if device != COMPILED_DEVICE:
        return f"the input is on {device}, and this build holds the kernels for {COMPILED_DEVICE}"
    reason = why_not_autocast(tensor, rounding, promotes)
    if reason:
        return reason
    if not torch.compiler.is_compiling():
        if type(tensor) is not Tensor:
            return f"the input is a {type(tensor).__name__}"
        if has_global_hooks():
            return "a hook of all modules is registered"
        if func_interpreter() is not None:
            return "a transformation of torch.func is active"
        if forward_ad._current_level >= 0:
            return "forward-mode differentiation is on"
    return ""


def follows_shared() -> bool:
    """Whether ops have gradients of what rows share, such as weights of norms and scales; torch.compile runs none."""
    return not torch.compiler.is_compiling()


def why_not_tensor(name: str, tensor: Tensor, input: Tensor, casts: bool = False, gradient: bool = False) -> str:
    """Why ops cannot read a parameter or an argument beside an input; empty if they can.

    casts: The stock module casts its results to the input's dtype, so that the tensor may have another one.
    gradient: The tensor may need one.
    """
    if type(tensor) not in (Tensor, nn.Parameter) and not torch.compiler.is_compiling():
        return f"{name} is a {type(tensor).__name__}"
    if tensor.device != input.device:
        return f"{name} is on {tensor.device}, not on {input.device}"
    if tensor.dtype != input.dtype if not casts else tensor.dtype not in _DTYPES:
        return f"{name} has dtype {tensor.dtype}, the input {input.dtype}"
    if not gradient and torch.is_grad_enabled() and tensor.requires_grad:
        return f"a gradient of {name} is needed"
    return ""


def why_not_norm_weight(module: NormModule, input: Tensor, casts: bool = False, gradient: bool = False) -> str:
    """Why a norm's weight and bias cannot go with an input now; empty if they can. The last two as `why_not_tensor`."""
    for name in ("weight", "bias"):  # as pruning, weight norm, some kinds of FSDP and frozen buffers leave them
        if isinstance(module.__dict__.get(name), Tensor) or module._buffers.get(name) is not None:
            return f"its {name} is no parameter"
    if "parametrizations" in module._modules:
        return "its weight is parametrized"
    if not module.__dict__.get("with_scale", True) and module._parameters.get("weight") is not None:  # Gemma's
        return "its with_scale is off"
    for name, parameter in module._parameters.items():
        if parameter is not None:
            reason = why_not_tensor(f"its {name}", parameter, input, casts, gradient)
            if reason:
                return reason
    return ""


def why_not_norm_call(module: nn.Module, input: Tensor, rounding: str = "fp32") -> str:
    """Why a norm's own call cannot run an op; empty if it can."""
    return why_not_input(input, rounding) or why_not_norm_weight(module, input)  # type: ignore[arg-type]


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was written to; None where torch does not count, as of tensors made in inference mode."""
    try:
        return tensor._version
    except RuntimeError:
        return None
