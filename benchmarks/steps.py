"""Times the steps of a model in several configurations; shared by the scripts that time whole models.

The configurations share one set of weights and take turns, forwards and backwards: each leaves the chip warm or cool
for the next one.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import itertools
import math
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sharing import give_turn, is_shared, released, timed
from torch import Tensor, nn

Step = Callable[[], Tensor]

CONFIGS = ("baseline", "kernels", "compile", "kernels_compile")
FP8_CONFIGS = ("kernels_fp8", "torchao_fp8_compile", "kernels_fp8_compile")
INT8_CONFIGS = ("kernels_int8", "kernels_fp8_int8")  # attention in 8 bits
LOW = "kernels_fp8_low"  # optimize(memory="low")
PROFILED_STEPS = 5
WARM_UP_S = 1.0  # of each turn on a GPU: until then its clock is what the configuration before has left
STEPS_AHEAD = 3  # that the host launches before those that are timed
FIRST_STEPS, FIRST_STEPS_S = 3, 1.0  # after the first one and before the timed ones: at most so many, for so long
COLUMNS = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()

# Device kernels by what they do, the first that fits; what is left is elementwise work of torch and torch.compile.
KINDS = {
    "elementwise": re.compile(r"^triton_"),  # torch.compile names them after all that they touch
    "attention": re.compile(r"fmha|flash|sdpa|attention|cudnn.*sm\d+.*knob", re.IGNORECASE),
    "GEMM": re.compile(r"gemm|nvjet|cutlass|xmma|cublas|splitK|addmm", re.IGNORECASE),
    "this package": re.compile(r"\bltx::"),
}

# What torchao sets in inductor for these layers: by itself it would, for all that the process compiles later.
TORCHAO_INDUCTOR = {"coordinate_descent_tuning": True, "coordinate_descent_check_all_directions": True}


@dataclass
class Turns:
    """How often and how long each configuration is timed."""

    rounds: int = 4
    steps: int = 10  # timed steps of a turn
    seconds: float = math.inf  # a turn has fewer steps where these would take longer
    warm_up_s: float = WARM_UP_S
    profiled: int = PROFILED_STEPS  # steps that run under the profiler; 0: none
    graph_s: float = math.inf  # where every configuration takes longer, none is captured: the host does not limit them

    def steps_of(self, step_s: float) -> int:
        return max(1, int(min(self.steps, self.seconds / step_s)))


@dataclass
class Measured:
    """One configuration: its step, its result, and what is known about it so far."""

    step: Step
    result: Tensor
    record: dict[str, Any]
    step_s: float
    graph: Step | None = None
    times: list[float] = field(default_factory=list)
    graph_times: list[float] = field(default_factory=list)


def view_of(model: nn.Module) -> nn.Module:
    """Another model that shares all parameters but those of convolutions, whose memory order may change."""
    own = {id(p) for part in model.modules() if isinstance(part, nn.Conv2d) for p in part.parameters()}
    shared = {id(p): p for p in [*model.parameters(), *model.buffers()] if id(p) not in own}
    return copy.deepcopy(model, shared)


def options_of(config: str) -> dict[str, Any]:
    """`optimize`'s arguments for a `view_of` a model: launched calls; in fp8 the parameters keep the stock weights."""
    memory = {"memory": "low"} if config == LOW else {}
    precision = {"precision": "fp8", "stock_weights": "beside"} if "fp8" in config else {}
    return {"graphs": False, **precision, **memory}


def quantise_with_torchao(model: nn.Module, blocks: Sequence[nn.Module] | None = None) -> None:
    """Dynamic quantisation per row of the linear layers of the blocks; of LTX-Video's unless others are given."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)
    for block in model.transformer_blocks if blocks is None else blocks:
        quantize_(block, config)


def weight_bytes(model: nn.Module) -> int:
    """What a model's parameters and buffers take; a storage that several share counts once."""
    storages = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        parts = [getattr(tensor, name) for name in getattr(tensor, "tensor_data_names", ())] or [tensor]
        for part in parts:
            storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(storages.values())


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def free_memory(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def warm_up(step: Step, seconds: float) -> None:
    """Runs steps on the GPU for so long, at least one unless it is 0."""
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        step()
        torch.cuda.synchronize()


def time_steps(step: Step, steps: int, device: str, warm_up_s: float = WARM_UP_S) -> list[float]:
    """Milliseconds of each; on a GPU device time, launched ahead."""
    if device != "cuda":
        if warm_up_s:
            step()
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            step()
            times.append((time.perf_counter() - start) * 1e3)
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    with timed():
        warm_up(step, warm_up_s)
        for _ in range(STEPS_AHEAD if steps > 1 else 0):
            step()
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def as_graph(step: Step) -> Step:
    """A step whose kernels the host launches all at once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


def kernel_times(
    step: Step, steps: int = PROFILED_STEPS, running: Callable[[], None] = lambda: None
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """(milliseconds of a step by kind of kernel, all kernels with their milliseconds and launches).

    Of steps that follow one another: alone, a step finds a cooler chip and a higher clock. `running` is called when all
    steps are launched, while the last ones run.
    """
    give_turn()
    warm_up(step, WARM_UP_S)
    # Events of the host are left out, since nothing here reads them.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        running()
        torch.cuda.synchronize()
    by_name: dict[str, list[float]] = defaultdict(list)
    with released():
        events = profile.events()
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            by_name[event.name].append(event.device_time_total / 1e3)
    by_kind: dict[str, float] = defaultdict(float)
    kernels = []
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1])):
        kind = next((kind for kind, pattern in KINDS.items() if pattern.search(name)), "elementwise")
        ms, launches = sum(times) / steps, round(len(times) / steps)
        by_kind[kind] += ms
        kernels.append({"kernel": name, "kind": kind, "ms": round(ms, 3), "launches": launches})
    return {kind: round(ms, 3) for kind, ms in by_kind.items()}, kernels


def clock_and_power() -> dict[str, float]:
    """The multiprocessors' clock and the power, over up to a second; nothing where the package pynvml is missing."""
    if importlib.util.find_spec("pynvml") is None:
        return {}
    return {"clock_mhz": torch.cuda.clock_rate(), "power_w": round(torch.cuda.power_draw() / 1000, 1)}


def error(got: Tensor, expected: Tensor) -> float:
    """The relative L2 distance."""
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def psnr(got: Tensor, expected: Tensor) -> float | None:
    mean_square = (got.double() - expected.double()).square().mean().item()
    span = (expected.max() - expected.min()).item()
    return 10 * math.log10(span * span / mean_square) if mean_square else None


def prepare(made: nn.Module, step: Step, start: float, device: str) -> Measured:
    """Runs a configuration's first steps. `start`: when the making of `made` began."""
    step()
    synchronize(device)
    record: dict[str, Any] = {"first_step_s": round(time.perf_counter() - start, 3)}
    begin = time.perf_counter()
    for _ in range(FIRST_STEPS):
        step()
        synchronize(device)
        if time.perf_counter() - begin > FIRST_STEPS_S:
            break
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    begin = time.perf_counter()
    result = step().clone()
    synchronize(device)
    measured = Measured(step, result, record, time.perf_counter() - begin)
    if device == "cuda":
        record["peak_gb"] = round((weight_bytes(made) + torch.cuda.max_memory_allocated() - before) / 2**30, 3)
    return measured


def profile(measured: Measured, steps: int) -> None:
    """Adds what a step's kernels take to a configuration's record; a model of thousands of kernels needs seconds."""
    record = measured.record
    by_kind, record["kernels"] = kernel_times(measured.step, steps, lambda: record.update(clock_and_power()))
    # Of the step as it was timed: under the profiler the host is slower, and the device waits for it.
    idle = max(0.0, record["step_ms"] - sum(by_kind.values()))
    record["ms_by_kind"] = {**by_kind, "idle": round(idle, 3)}


def measure(
    title: str,
    make: Callable[[str], nn.Module],
    step_of: Callable[[nn.Module], Step],
    configs: Sequence[str],
    turns: Turns,
    device: str,
    progress: Progress,
    failed: dict[str, str] | None = None,
) -> dict[str, Measured]:
    """Every configuration that `make` makes, timed in turns. `step_of` gives a model's step.

    A compiled configuration has no `first_step_s` where other programs use the GPU while it compiles.

    A configuration that fails is named in `failed` where that is given, and the others are measured.
    """
    task = progress.add_task(title, total=len(configs) * (turns.rounds + 1))
    all_measured: dict[str, Measured] = {}
    for config in configs:
        synchronize(device)
        give_turn()
        start = time.perf_counter()
        try:
            made = make(config)
            measured = prepare(made, step_of(made), start, device)
        except Exception as reason:
            if failed is None:
                raise
            failed[config] = first_line(reason)
            progress.console.print(f"[red]{title}, {label(config)} failed[/red]: {failed[config]}")
            continue
        all_measured[config] = measured
        progress.console.print(f"{title}, {label(config)}: first step {measured.record['first_step_s']} s")
        if config.endswith("compile") and is_shared():  # it waited for other programs
            del measured.record["first_step_s"]
        progress.advance(task)
    fastest_s = min((measured.step_s for measured in all_measured.values()), default=math.inf)
    for measured in all_measured.values():  # not before: `optimize` may move parameters that another one shares
        if device == "cuda" and fastest_s <= turns.graph_s:
            measured.graph = as_graph(measured.step)
    for turn in range(turns.rounds):
        for measured in list(all_measured.values())[:: -1 if turn % 2 else 1]:
            for step, times in ((measured.step, measured.times), (measured.graph, measured.graph_times)):
                if step is not None:
                    give_turn()
                    times += time_steps(step, turns.steps_of(measured.step_s), device, turns.warm_up_s)
            progress.advance(task)
    for measured in all_measured.values():
        record = measured.record
        record["step_ms"] = round(statistics.median(measured.times), 3)
        if len(measured.times) > 1:
            record["p90_ms"] = round(statistics.quantiles(measured.times, n=10)[-1], 3)
        if measured.graph is not None:
            record["graph_ms"] = round(statistics.median(measured.graph_times), 3)
        if device == "cuda" and turns.profiled:
            profile(measured, turns.profiled)
    return all_measured


def first_line(reason: BaseException) -> str:
    return f"{type(reason).__name__}: {str(reason).splitlines()[0] if str(reason) else ''}"


def label(config: str) -> str:
    return config.replace("_fp8", " fp8").replace("_int8", " int8").replace("_", " + ")
