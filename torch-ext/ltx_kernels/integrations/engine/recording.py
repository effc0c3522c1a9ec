"""What code that a recorded call may run has to say of itself: the contract of recordings.

A block's call is recorded as its torch functions (replay/calls.py), and later calls run these alone. Python code that
decides by shapes, dtypes, strides, the state of modules or the arguments' signature needs nothing. Other code does:

- A tensor's contents, its address or its identity decides: call `refuse` with a reason, or
- run that code in a function that `as_one` calls, which every replay calls again.
- A value is kept from call to call for some tensors: use `kept` (engine/kept.py), which refuses recordings itself.
- Other attributes than those of modules decide: name the question in `Entry.asks`.
- A module of another library runs below the block: name its class in `Entry.plain` if it runs torch functions alone.
- An argument is another one at every call, such as a KV cache: name it in `Live`, and read it within `as_one` alone.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Callable, NamedTuple

import torch
from torch import nn
from torch.utils._device import DeviceContext  # of a default device

thread = threading.local()  # its `recorder` writes down the call that this thread records


class Live(NamedTuple):
    """Arguments of a block that may be others at every call: `as_one` hands them on, and no other line may read them.

    names: The arguments. A call gives them by name, or it is not recorded.
    form: (block, args, kwargs) to what a recorded call depends on of them; None where the call is not to be recorded.
    """

    names: tuple[str, ...]
    form: Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], Hashable]


def recorder_of_thread() -> Any:
    """The recorder of the call that runs now; None where it is not recorded."""
    return getattr(thread, "recorder", None)


def refuse(reason: str) -> None:
    """Ends the recording of the call that runs now: something that no guard checks decides what it does."""
    recorder = None if torch.compiler.is_compiling() else recorder_of_thread()
    if recorder is not None and not recorder.paused:
        recorder.reason = recorder.reason or reason


def as_one(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``; a recording holds it as one line.

    It is for functions that decide by more than the form of their tensors, because every replay calls them again.
    """
    recorder = None if torch.compiler.is_compiling() else recorder_of_thread()
    return function(*args) if recorder is None else recorder.as_one(function, args)


def others_take_functions() -> bool:
    """Whether a torch function mode other than a recorder is active, and not for new tensors alone."""
    depth: int = torch._C._len_torch_function_stack()
    recorder = recorder_of_thread()
    if depth <= (0 if recorder is None else 1):
        return False
    if torch.compiler.is_compiling():
        return True
    modes = map(torch._C._get_function_stack_at, range(depth))
    return not all(mode is recorder or type(mode) is DeviceContext for mode in modes)
