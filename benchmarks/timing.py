"""Times GPU calls as a model sees them: launched ahead of the device, with inputs that are not in the L2 cache.

On a CPU a timer of the same form reads the host's clock.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]

FLUSH_BYTES = 512 << 20  # several times the L2 of any GPU, and so long that the host launches the next kernel meanwhile
HOST_CALLS, HOST_ROUNDS = 2000, 5


@dataclass(frozen=True)
class Timing:
    """Microseconds."""

    median: float
    p90: float


class Timer:
    def __init__(self, rounds: int = 5, calls: int = 20, warm_up: int = 5) -> None:
        self.rounds, self.calls, self.warm_up = rounds, calls, warm_up
        self.buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.buffer.zero_()
        self.flush_us = statistics.median(self._samples(self.buffer.zero_, flushes=0))

    def measure(self, calls: dict[str, Call]) -> dict[str, Timing]:
        """The time on the device of every call; they take turns, so that all see the same clocks."""
        flushes = {name: self._flushes(call) for name, call in calls.items()}
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self.rounds):
            for name, call in calls.items():
                samples[name] += self._samples(call, flushes[name])
        return {
            name: Timing(round(statistics.median(us), 2), round(statistics.quantiles(us, n=10)[-1], 2))
            for name, us in samples.items()
        }

    def _flushes(self, call: Call) -> int:
        """How many flushes the device needs to be busy until the call is launched: chains of kernels need several."""
        call()  # its first call may compile or allocate
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(self.warm_up):
            call()
        host_us = (time.perf_counter() - start) / self.warm_up * 1e6
        torch.cuda.synchronize()
        return min(8, 1 + math.ceil(host_us / self.flush_us))

    def _samples(self, call: Call, flushes: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.calls)]
        for start, end in events:
            for _ in range(flushes):
                self.buffer.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in events]


class HostTimer:
    """`Timer` for a machine without a GPU: the host's clock, and whatever the caches hold."""

    def __init__(self, rounds: int = 5, seconds: float = 0.01) -> None:
        self.rounds, self.seconds = rounds, seconds  # `seconds`: how long a sample takes

    def measure(self, calls: dict[str, Call]) -> dict[str, Timing]:
        """The time of every call; they take turns, so that all see the same machine."""
        repeats, samples = {}, {name: [] for name in calls}
        for name, call in calls.items():
            call()  # its first call may compile or allocate
            repeats[name] = max(1, round(self.seconds * 1e6 / self._sample(call, 1)))
        for _ in range(self.rounds):
            for name, call in calls.items():
                samples[name].append(self._sample(call, repeats[name]))
        return {
            name: Timing(round(statistics.median(us), 2), round(statistics.quantiles(us, n=10)[-1], 2))
            for name, us in samples.items()
        }

    def _sample(self, call: Call, repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats * 1e6


def host_us(call: Call) -> float:
    """Microseconds that the host spends per call, without waiting for the device."""
    rounds = []
    for _ in range(HOST_ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        rounds.append((time.perf_counter() - start) / HOST_CALLS * 1e6)
    torch.cuda.synchronize()
    return round(statistics.median(rounds), 2)
