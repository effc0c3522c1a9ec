"""What clip.py and image.py share: pipelines with random weights, timed as whole calls in several configurations."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from rich.progress import Progress
from sharing import is_shared, timed
from steps import kernel_times, synchronize, weight_bytes
from torch import nn

COMPILED = ("compile", "flux_fast")  # how the names of configurations begin that use torch.compile
WARM_UP = 2  # calls before those that are timed; the second may capture graphs
WARM_UP_AUTO = 12  # with graphs="auto": a text encoder runs once a call, so that its graph pays late


@dataclass(frozen=True)
class Model:
    name: str
    make: Callable[[bool, torch.device], Any]  # a pipeline with random weights: (small or as released, device)


def modules_of(pipe: Any) -> list[nn.Module]:
    return [part for part in pipe.components.values() if isinstance(part, nn.Module)]


def random_pipeline(model: Model, tiny: bool, device: torch.device, dtype: torch.dtype) -> Any:
    torch.set_default_dtype(dtype)
    try:
        pipe = model.make(tiny, device)
    finally:
        torch.set_default_dtype(torch.float32)
    pipe.to(dtype=dtype)
    for module in modules_of(pipe):
        module.eval().requires_grad_(False)
    return pipe


def graphs_option(config: str) -> bool | str:
    """`optimize`'s argument `graphs`, by the last word of a configuration."""
    return {"graphs": True, "auto": "auto"}.get(config.rpartition("_")[2], False)


def captured(pipe: Any, ltx: ModuleType) -> list[Any]:
    """The CUDA graphs of a pipeline."""
    graphs = [
        ltx.integrations.replay.cuda_graphs.graphs_of(module) for part in modules_of(pipe) for module in part.modules()
    ]
    return [one for of in graphs if of is not None for one in of.captured.values() if one is not None]


def measure(
    what: str,
    configs: Sequence[str],
    configured: Callable[[str], Any],
    call: Callable[[Any], dict[str, float]],
    ltx: ModuleType,
    calls: int,
    options: argparse.Namespace,
    progress: Progress,
    check: Callable[[Any], dict[str, Any]] = lambda pipe: {},
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A record of each configuration. They take turns, forwards and backwards.

    A compiled configuration has no `first_s` where other programs use the GPU while it compiles.

    call: One call of a pipeline; its milliseconds by part, the whole first.
    check: What else a record says of a pipeline that is warm.
    """
    device = options.device
    task = progress.add_task(what, total=len(configs) * (calls + 1))
    made: dict[str, Any] = {}
    records: dict[str, dict[str, Any]] = {}
    for config in configs:
        synchronize(device)
        start = time.perf_counter()
        made[config] = configured(config)
        call(made[config])
        records[config] = {"first_s": round(time.perf_counter() - start, 3)}
        for _ in range(1, WARM_UP_AUTO if graphs_option(config) == "auto" else WARM_UP):
            call(made[config])
        if graphs := captured(made[config], ltx):
            records[config]["capture_s"] = round(max(one.seconds for one in graphs), 3)
            records[config]["graph_gb"] = round(sum(one.bytes for one in graphs) / 2**30, 3)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call(made[config])
            weights = sum(map(weight_bytes, modules_of(made[config])))
            records[config]["peak_gb"] = round((weights + torch.cuda.max_memory_allocated() - before) / 2**30, 3)
            if options.idle:
                by_kind, _ = kernel_times(lambda c=config: call(made[c]), 1)
                records[config]["kernels_ms"] = round(sum(by_kind.values()), 2)
        records[config].update(check(made[config]))
        progress.console.print(f"{what}, {config}: first call {records[config]['first_s']} s")
        if config.startswith(COMPILED) and is_shared():  # it waited for other programs
            del records[config]["first_s"]
        progress.advance(task)
    times: dict[str, list[dict[str, float]]] = {config: [] for config in made}
    for turn in range(calls):
        for config in list(made)[:: -1 if turn % 2 else 1]:
            with timed():
                times[config].append(call(made[config]))
            progress.advance(task)
    for config, record in records.items():
        parts = {key: round(statistics.median(one[key] for one in times[config]), 2) for key in times[config][0]}
        record.update(parts)
        if "kernels_ms" in record:
            record["idle_ms"] = round(max(0.0, next(iter(parts.values())) - record["kernels_ms"]), 2)
        yield config, record
