"""What has happened at the calls of replaced modules, for the report."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter

import torch

from ..._torch_private import saved_tensors_hooks
from ..._variant import constant_when_compiled
from .guards import is_recomputation
from .recording import recorder_of_thread

_numbers = itertools.count()
_by_key: weakref.WeakValueDictionary[str, Counts] = weakref.WeakValueDictionary()


class Counts:
    """Counters of the calls of some modules."""

    def __init__(self) -> None:
        self.unpacked = 0  # calls of an attention in which projections ran one by one instead of as one GEMM
        self.calls = 0  # calls that ran the package's ops
        self.gradients = 0  # the part of `calls` through which a gradient goes
        self.recomputed = 0  # further calls, of ops or stock, in which a checkpoint computed a call again in a backward
        self.traces = 0  # traces of torch.compile that put the ops into a graph
        self.chosen: set[str] = set()  # ops that `count_call` was told of, where calls of a class run different ones
        self.fallbacks: Counter[str] = Counter()  # calls that ran the stock forward, by reason
        self.remarks: Counter[str] = Counter()  # other events at calls, by text
        # torch.compile treats a text as a constant, where a number may become a dynamic one. All modules of a site
        # share it, and `_count_trace` finds the site by it.
        self.key = str(next(_numbers))
        _by_key[self.key] = self

    def count_call(self, *ops: str) -> None:
        if torch.compiler.is_compiling():
            _count_trace(self.key, "", *ops)
        else:
            self.count("calls")
            self.chosen.update(ops)

    def count(self, counter: str) -> None:
        if not torch.compiler.is_compiling() and _note(self, counter):
            self.add(counter, 1)

    def add(self, counter: str, number: int) -> None:
        """Adds to a counter. Calls that a checkpoint computes again count as `recomputed`, without their gradients."""
        again = is_recomputation()
        if again and counter == "gradients" and saved_tensors_hooks() is not None:
            return
        counter = "recomputed" if again and counter == "calls" else counter
        setattr(self, counter, getattr(self, counter) + number)

    def count_fallback(self, reason: str) -> None:
        if torch.compiler.is_compiling():
            _count_trace(self.key, reason)
        elif _note(self, "fallbacks"):
            if is_recomputation():
                self.recomputed += 1
            else:
                self.fallbacks[reason] += 1

    def remark(self, text: str, count: int = 1) -> None:
        """Counts something that happened at calls and is neither an op nor a stock forward."""
        if torch.compiler.is_compiling():
            for _ in range(count):  # one at a time: a count that has changed is a symbol for torch.compile
                _count_remark(self.key, f"{text} (compiled)")
        elif _note(self, "remarks", text, count) and not is_recomputation():
            self.remarks[text] += count


def _note(site: Counts, counter: str, text: str = "", count: int = 1) -> bool:
    """Adds a count to the current recording, if there is one. Returns whether the site itself has to count it, too."""
    recorder = recorder_of_thread()
    if recorder is None:
        return True
    if not recorder.paused:
        recorder.counts[site, counter, text] += count
    return not recorder.apart


@constant_when_compiled
def _count_trace(key: str, reason: str, *ops: str) -> None:
    """Runs while torch.compile traces, and leaves nothing in the graph."""
    site = _by_key.get(key)
    if site is None:
        return
    if reason:
        site.fallbacks[f"{reason} (compiled)"] += 1
    else:
        site.traces += 1
        site.chosen.update(ops)
    _note(site, "traces")


@constant_when_compiled
def _count_remark(key: str, text: str) -> None:
    site = _by_key.get(key)
    if site is not None:
        site.remarks[text] += 1
