"""When a CUDA graph pays: the rule of ``optimize(..., graphs="auto")``.

This is the rent-or-buy problem. The rent is the time that the GPU waits for the host in each call of a signature. The
price is the time of a capture, after which these waits end. A signature is captured once its waits have added up to the
price. Waits and capture together then cost at most twice as much as the best choice would have, however often the
signature comes back.

Two events of the stream and the host's clock time a call, without waiting for the GPU. The GPU waited if it needed less
than 1.15 times as long as the host took to launch. The events do not tell how long it waited: half of the call's time
counts, until replays of the module have shown which part a graph saves. A graph that saves less than 2 % is dropped,
and so is one that holds too much memory.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

WARM_UP = 2  # calls of a signature that do not count: they allocate memory and record
WAITS = 1.15  # the GPU waits where it needs less than this many times the host's time of a launch
SHARE = 0.5  # part of a waiting call that counts as its wait, until replays have shown the true part
PRICE = 0.05  # seconds of a capture, before the first (h200-clip.json has those of a clip)
GAIN = 0.02  # the least part of a call that a graph has to save
REPLAYS = 3  # after which the gain is known; the first one uploads the graph
FREE = 2 * 2**30  # bytes to leave to others
LARGEST = 0.1  # of the device's memory that one graph may hold
LARGEST_OF_FREE = 0.25  # of what was free before the capture
SHORT_LIVED = 8  # so many graphs dropped with fewer than USED replays mean that signatures do not recur
USED = 20
KEPT = 64  # signatures that are remembered

WARMING = "the first two calls of its shapes"
KEEPS_UP = "the host keeps up with the GPU"
NOT_YET = "its waits for the host have not yet cost as much as a capture"
NO_MEMORY = "too little memory is free for a graph"
NO_RETURN = f"{SHORT_LIVED} graphs were dropped before {USED} replays: signatures do not recur"
NO_GAIN = f"its graph was dropped: it gained less than {GAIN:.0%}"


class Timed:
    """A call between two events of the current stream. Nothing waits: `elapsed` is there once the GPU is through."""

    def __init__(self) -> None:
        self._start, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._start.record()
        self._began = time.perf_counter()

    def stop(self) -> None:
        self.host = time.perf_counter() - self._began
        self._end.record()

    def is_done(self) -> bool:
        return bool(self._end.query())

    @property
    def elapsed(self) -> float:
        return float(self._start.elapsed_time(self._end)) / 1000


@dataclass
class Price:
    """The seconds of the last capture, which the modules of one `optimize` share."""

    seconds: float = PRICE


@dataclass
class Tenant:
    """What is known of one signature, in seconds."""

    calls: int = 0
    used: int = 0  # replays
    waited: float = 0.0
    waits: bool = False  # the last call that was read
    ordinary: list[float] = field(default_factory=list)  # the last few calls
    replays: list[float] = field(default_factory=list)


class RentOrBuy:
    """The rule for one module."""

    def __init__(self, price: Price | None = None) -> None:
        self.tenants: OrderedDict[Any, Tenant] = OrderedDict()
        self.timed: deque[tuple[Any, Tenant, Timed, bool]] = deque(maxlen=KEPT)
        self.price, self.gain = price or Price(), SHARE
        self.largest = 0  # bytes of the last graph
        self.free = 0  # bytes, before the last capture
        self.short_lived = 0

    def _tenant(self, key: Any) -> Tenant:
        tenant = self.tenants.setdefault(key, Tenant())
        self.tenants.move_to_end(key)
        while len(self.tenants) > KEPT:
            self.tenants.popitem(last=False)
        return tenant

    @contextmanager
    def call(self, key: Any, replayed: bool) -> Iterator[None]:
        """Times a call. One that raises is not counted, nor one of a signature that is not known or is refused."""
        tenant = self.tenants.get(key)
        if tenant is None:
            yield
            return
        tenant.used += replayed
        timed = Timed()
        yield
        timed.stop()
        self.timed.append((key, tenant, timed, replayed))

    def read(self) -> list[Any]:
        """Takes up what the GPU has finished; returns the signatures whose graphs gain too little."""
        poor = []
        while self.timed and self.timed[0][2].is_done():
            key, tenant, timed, replayed = self.timed.popleft()
            if self.tenants.get(key) is not tenant:  # its graph is gone since, or it was forgotten
                continue
            if replayed:
                if len(tenant.replays) < REPLAYS:
                    tenant.replays.append(timed.elapsed)
                    if len(tenant.replays) == REPLAYS and not self._gains(tenant):
                        poor.append(key)
                continue
            tenant.calls += 1
            if tenant.calls <= WARM_UP:
                continue
            tenant.ordinary = [*tenant.ordinary[-REPLAYS + 1 :], timed.elapsed]
            tenant.waits = timed.elapsed < WAITS * timed.host
            tenant.waited += self.gain * timed.elapsed if tenant.waits else 0.0
        return poor

    def _gains(self, tenant: Tenant) -> bool:
        """Whether the graph saves enough. The part of a call that it saves then counts as the wait in later calls."""
        gain = 1 - min(tenant.replays) / min(tenant.ordinary)
        if gain >= GAIN:
            self.gain = gain
        return gain >= GAIN

    def why_not(self, key: Any) -> str:
        """Why a signature is not captured now; empty where it is."""
        tenant = self._tenant(key)
        if self.short_lived >= SHORT_LIVED:
            return NO_RETURN
        if tenant.calls < WARM_UP:
            return WARMING
        if tenant.waited < self.price.seconds:
            return NOT_YET if tenant.waits else KEEPS_UP
        self.free = torch.cuda.mem_get_info()[0]
        return NO_MEMORY if self.free < FREE + 2 * self.largest else ""

    def bought(self, seconds: float, size: int) -> str:
        """Takes up what a capture cost; returns why the graph cannot stay, empty where it can."""
        self.price.seconds, self.largest = seconds, size
        limit = min(LARGEST * torch.cuda.mem_get_info()[1], LARGEST_OF_FREE * self.free)
        return "" if size <= limit else f"its graph was dropped: it held {size / 2**20:.0f} MiB"

    def dropped(self, keys: Iterable[Any]) -> None:
        """Forgets signatures whose graphs are gone or whose captures gave none. Their waits add up from zero again."""
        for key in keys:
            tenant = self.tenants.pop(key, None)
            self.short_lived += tenant is not None and tenant.used < USED
