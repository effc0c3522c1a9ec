"""Calls and changes in several threads: no module is changed while another thread is inside its call."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Container, Iterable, Iterator

from torch import nn

LIMIT = 60.0  # seconds that a change waits for a call in another thread

_lock = threading.RLock()  # one thread at a time changes modules
_inside: dict[int, nn.Module] = {}  # by thread, the outermost replaced module that it is calling


class _Change:
    """Modules that one thread is changing."""

    def __init__(self, modules: Container[nn.Module]) -> None:
        self.modules = modules
        self.owner = threading.get_ident()


class _All:
    """Contains every module."""

    def __contains__(self, module: object) -> bool:
        return True


_change: _Change | None = None


def enter() -> int:
    """The thread's number where its outermost call of a replaced module begins, else 0."""
    thread = threading.get_ident()
    return 0 if thread in _inside else thread


def begin(thread: int, module: nn.Module) -> None:
    """Waits until no other thread is changing a module, and notes that this one is calling it."""
    while True:
        _inside[thread] = module
        change = _change
        if change is None or module not in change.modules or change.owner == thread:
            return
        del _inside[thread]
        time.sleep(0.001)


def end(thread: int) -> None:
    del _inside[thread]


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Holds back changes in other threads."""
    with _lock:
        yield


@contextlib.contextmanager
def alone_with(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Waits until no other thread is inside a call of these modules, and holds back calls that begin later.

    Raises:
        RuntimeError: A call did not end within `LIMIT` seconds.
    """
    global _change
    with _lock:
        outer, _change = _change, _Change(frozenset(modules))
        try:
            _wait_for_calls(_change)
            yield
        finally:
            _change = outer


@contextlib.contextmanager
def if_alone() -> Iterator[bool]:
    """Whether no other thread is inside a call or changes modules. If so, calls that begin meanwhile wait.

    It does not wait itself, so that a call may ask.
    """
    global _change
    if not _lock.acquire(blocking=False):
        yield False
        return
    try:
        outer, _change = _change, _Change(_All())
        try:
            yield all(thread == threading.get_ident() for thread in list(_inside))
        finally:
            _change = outer
    finally:
        _lock.release()


def _wait_for_calls(change: _Change) -> None:
    deadline = time.monotonic() + LIMIT
    while True:
        calls = [module for thread, module in list(_inside.items()) if thread != change.owner]
        module = next((module for module in calls if module in change.modules), None)
        if module is None:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"another thread has been in a call of a {type(module).__name__} for {LIMIT:.0f} s, so that nothing "
                "was changed: call again when that call has ended"
            )
        time.sleep(0.001)
