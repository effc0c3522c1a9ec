"""One thread at a time changes models, and it changes none that another thread is calling."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from .guards import ATTRIBUTE, class_of

LIMIT = 60.0  # seconds that a change waits for calls in other threads

_lock = threading.RLock()
_changes: list[_Change] = []  # of one thread, each within the one before
_waiting: set[int] = set()  # threads whose calls wait for the changes to end


@contextlib.contextmanager
def alone(roots: Iterable[nn.Module]) -> Iterator[None]:
    """Waits until no other thread is inside a call of these models, and lets calls that begin later wait.

    Raises:
        RuntimeError: A call did not end within `LIMIT` seconds.
    """
    with _lock:
        roots = list(roots)
        change = _Change({id(part): part for root in roots for part in root.modules()})
        # A pipeline calls the encoder and the decoder of an autoencoder, not the autoencoder itself.
        sites = ((part, part.__dict__.get(ATTRIBUTE)) for part in change.parts.values())
        halves = (part for part, site in sites if site is not None and site.entry.alone)
        _changes.append(change)
        hooks = [module.register_forward_pre_hook(_wait) for module in dict.fromkeys([*roots, *halves])]
        try:
            change.wait_for_calls()
            yield
        finally:
            _changes.remove(change)
            for hook in hooks:
                hook.remove()


class _Change:
    def __init__(self, parts: Mapping[int, nn.Module]) -> None:
        self.parts = parts
        self.owner = threading.get_ident()
        self.closed = False  # for calls from within these modules as well

    def wait_for_calls(self) -> None:
        """Returns when no other thread is inside, and none can get in."""
        deadline = time.monotonic() + LIMIT
        while (module := self._find_call()) is not None:
            self.closed = False  # what is inside has to come out
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"another thread has been in a call of {class_of(module)} for {LIMIT:.0f} s, and nothing was "
                    "changed: call again when that call has ended"
                )
            time.sleep(0.001)

    def _find_call(self) -> nn.Module | None:
        """A module that another thread is calling now; nothing gets further meanwhile."""
        self.closed = True
        apart = {self.owner, *_waiting}
        frames = [frame for thread, frame in sys._current_frames().items() if thread not in apart]
        calls = (self.called_in(frame) for frame in frames)
        return next((module for module in calls if module is not None), None)

    def called_in(self, frame: types.FrameType | None, but: nn.Module | None = None) -> nn.Module | None:
        """The outermost of the modules, without `but`, whose method runs in a frame or in one that has called it."""
        found = None
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module is not but and id(module) in self.parts:
                found = module
            frame = frame.f_back
        return found


def _wait(module: nn.Module, arguments: Any) -> None:
    """A hook before a module's forward."""
    thread = threading.get_ident()
    while True:
        while changes := _changes_of_others(thread):
            if all(change.called_in(sys._getframe(1), module) is None for change in changes):
                _waiting.add(thread)
            elif not any(change.closed for change in changes):
                break
            time.sleep(0.001)
        _waiting.discard(thread)
        if changes or not _changes_of_others(thread):
            return
        # A change began before this thread was no longer taken for a waiting one.


def _changes_of_others(thread: int) -> list[_Change]:
    return [change for change in list(_changes) if change.owner != thread]
