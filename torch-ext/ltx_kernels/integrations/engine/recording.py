"""The contract of recordings: what code that a recorded call may run has to declare.

A block's call is recorded as its torch functions (replay/recorder.py), and later calls run these functions alone: no
other Python code of the block runs again. Code that decides by shapes, dtypes, strides, the state of modules or the
values of plain arguments declares nothing. Other code does, and docs/adding-a-model.md has an example of each:

- A tensor's contents, address or identity decides: call `refuse` with a reason, or
- run that code in a function that `as_one` calls, which every replay calls again.
- A value is kept from call to call for some tensors: use `kept` (engine/kept.py), which refuses recordings itself.
- Something outside of the block's modules and arguments decides: name the question in `Entry.asks`.
- A module of another library runs below the block: name its class in `Entry.plain` if it runs torch functions alone.
- An argument changes from call to call, such as a KV cache: name it in `Live`, and read it within `as_one` alone.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Callable, NamedTuple

import torch
from torch import nn

from ..._torch_private import DeviceContext, function_mode_at, function_modes

thread = threading.local()  # its `recorder` traces the current call of this thread


class Live(NamedTuple):
    """Arguments of a block that may differ between calls, such as a KV cache or a mask. `as_one` alone reads them.

    names: The arguments. A call gives them by name, or it is not recorded.
    signature: (block, args, kwargs) to what a recorded call depends on of them; None where the call is not to be
        recorded.
    """

    names: tuple[str, ...]
    signature: Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], Hashable]


def recorder_of_thread() -> Any:
    """The recorder of the current call; None where it is not recorded."""
    return getattr(thread, "recorder", None)


def refuse(reason: str) -> None:
    """Ends the recording of the current call: something that no guard checks decides what the call does."""
    recorder = None if torch.compiler.is_compiling() else recorder_of_thread()
    if recorder is not None and not recorder.paused:
        recorder.reason = recorder.reason or reason


def as_one(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``; a recording holds it as one line.

    It is for functions that decide by more than the shapes, strides and dtypes of their tensors: every replay calls
    them again.
    """
    recorder = None if torch.compiler.is_compiling() else recorder_of_thread()
    return function(*args) if recorder is None else recorder.as_one(function, args)


def others_take_functions() -> bool:
    """Whether a torch function mode other than a recorder is active, and not for new tensors alone."""
    depth = function_modes()
    recorder = recorder_of_thread()
    if depth <= (0 if recorder is None else 1):
        return False
    if torch.compiler.is_compiling():
        return True
    modes = map(function_mode_at, range(depth))
    return not all(mode is recorder or type(mode) is DeviceContext for mode in modes)
