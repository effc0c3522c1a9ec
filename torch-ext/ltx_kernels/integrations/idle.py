"""How much of a call the GPU waits for the host, which is what CUDA graphs can save."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Callable

import torch

WORTH_A_GRAPH = 0.1  # idle part of a call; a replay copies inputs and results, which takes time too


def idle_share(call: Callable[[], Any]) -> float:
    """The part of a call's time in which the GPU runs nothing, between 0 and 1.

    The call runs four times: twice to warm up (the second call captures graphs), once against the clock, and once under
    torch.profiler for the times of its kernels. Under the profiler the host is slower, so that run is not timed.
    """
    if not callable(call):
        raise TypeError(f"call: expected a function without arguments, got {type(call).__name__}")
    if not torch.cuda.is_available():
        raise RuntimeError("call: expected a GPU to run on, got none")
    call()
    call()
    wall, busy = _wall_us(call), covered(_device_work(call))
    if not busy:
        raise RuntimeError("call: expected work on the GPU, got none")
    return max(0.0, 1 - busy / wall)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much lies within any of some spans (start, end), which may overlap."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def advice(share: float, has_graphs: bool) -> str:
    """What the report says about an idle share."""
    if has_graphs:
        what = "with CUDA graphs on"
    elif share < WORTH_A_GRAPH:
        what = "CUDA graphs would not help"
    else:
        what = "optimize(..., graphs=True) may save that"
    return f"the GPU is idle for {share:.0%} of a call: {what}"


def _wall_us(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6


def _device_work(call: Callable[[], Any]) -> list[tuple[float, float]]:
    """When each kernel and copy of a call ran, in microseconds.

    What the host calls a part of the program, such as an optimizer's step, is no work: the GPU may wait in it.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
