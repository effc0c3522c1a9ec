"""Offloads of accelerate and diffusers: which hooks they are, and how they learn of parameters that were exchanged."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn


def is_offloaded(root: nn.Module) -> bool:
    """Whether weights of a model wait in the host's memory for their turn on the device."""
    return any(is_offload(hook) for module in root.modules() for hook in hooks_of(module))


def hooks_of(module: nn.Module) -> Iterable[Any]:
    """The hooks of accelerate and diffusers on a module."""
    hook = module.__dict__.get("_hf_hook")
    if hook is not None:
        yield from getattr(hook, "hooks", (hook,))
    registry = module.__dict__.get("_diffusers_hook")
    if registry is not None:
        yield from registry.hooks.values()


def is_offload(hook: Any) -> bool:
    name = type(hook).__name__
    return name in ("CpuOffload", "GroupOffloadingHook") or (name == "AlignDevicesHook" and hook.offload)


def keeps_copies(root: nn.Module) -> bool:
    """Whether a group offload with a stream holds copies of the parameters that it found."""
    hooks = (hook for module in root.modules() for hook in hooks_of(module))
    return any(hasattr(hook, "group") and hook.group.stream is not None for hook in hooks)


def is_on_disk(root: nn.Module) -> bool:
    """Whether a group offload has written weights of a model to files, which it reads again at each call."""
    hooks = (hook for module in root.modules() for hook in hooks_of(module))
    return any(getattr(getattr(hook, "group", None), "offload_to_disk_path", None) is not None for hook in hooks)


def check_in_memory(roots: Iterable[nn.Module]) -> None:
    """RuntimeError where the parameters of a model hold no data that could be quantised."""
    if any(map(is_on_disk, roots)):
        raise RuntimeError(
            "optimize: expected weights in memory for fp8, got a group offload to disk, and nothing was changed: "
            "call optimize before the offload, or offload without offload_to_disk_path"
        )


def tell_offload(root: nn.Module) -> None:
    """Applies a group offload that `keeps_copies` again."""
    home = sys.modules.get("diffusers.hooks.group_offloading")
    again = getattr(home, "_maybe_remove_and_reapply_group_offloading", None)
    if again is not None and keeps_copies(root):
        again(root)


def carried_bytes(roots: Iterable[nn.Module]) -> int:
    """The size of all parameters and buffers of models: what an offload moves."""
    tensors = {id(t): t for root in roots for t in (*root.parameters(), *root.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())
