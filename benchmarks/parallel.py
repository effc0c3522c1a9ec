"""Times one forward of diffusion transformers on several GPUs of one host, inside diffusers' context parallelism.

    python tools/build.py
    python benchmarks/parallel.py [--models ltx wan] [--configs stock kernels] [--modes ulysses] [--tiny]
    python benchmarks/parallel.py --update --models wan   # adds to the file, or replaces what it measures again

The program starts a process for each GPU. The weights are random; model_shapes.py has the models. "ulysses"
and "ring" split the tokens of a call over all GPUs. "guidance" splits the batch of two in halves and, with more than
two GPUs, the tokens of each half (Ulysses). Records with `"gpus": 1` are of the same model with nothing split, which
every rank computes by itself at the same time.

A rank's time is the median of its steps, and `step_ms` the median over the ranks. `error_vs_one_gpu` is the relative L2
distance between the results on several GPUs and on one. `exchanges` and `exchange_mb` are this package's
exchanges in a step and what they send from a rank to others. Records with `exchange` time bare exchanges by the bytes
that leave a rank: collectives, and "peer_copies" of one tensor between the memories of GPUs. Records with `modelled_ms`
are no measurements: they say what 4 and 8 GPUs would take if

    step(W) = step(1) / W + exchange(W) + rest,    rest = step(2) - step(1) / 2 - exchange(2)

holds with the exchange times that were measured here. What fails is listed in the file's meta with the reason: stock
LTX-Video and LTX-2 do. The file is written after each model.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import functools
import gc
import json
import logging
import os
import socket
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import diffusers
import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import attention_backend
from model_shapes import MODELS, Inputs, Make, Model
from models import block_lists, first_blocks, one_tensor
from result_files import DTYPES, REPOSITORY, common_meta, kept_records, load_package, slug_of, write
from rich.console import Console
from runs import empty_table, make_console
from steps import error, first_line, options_of, time_steps, view_of
from torch import Tensor, nn

CONFIGS = ("stock", "kernels", "kernels_fp8")
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
EXCHANGES = ("all_to_all_single", GATHER)
PEER_COPIES = "peer_copies"  # of this package, where GPUs reach each other's memory
MODES = ("ulysses", "ring", "guidance")
MODELLED = (4, 8)
WARM_UP, ROUNDS, STEPS, SECONDS = 3, 2, 10, 2.0
EXCHANGE_MB = (1, 4, 16, 64, 256)
TINY_MB = (0.01, 0.1)
EXCHANGE_CALLS = 20
SLEEP_CYCLES = 2_000_000
IDENTITY = ("exchange", "bytes", "model", "shape", "batch", "config", "gpus", "mode")  # what a record measures


@dataclass(frozen=True)
class Case:
    """A model, and whether a step of it has the two halves of guidance as a batch."""

    model: Model
    guided: bool


CASES = {
    "ltx": Case(
        replace(
            MODELS["ltx13b"],
            shape_name="161 frames 512x768",
            config={},
            shape={"frames": 161, "height": 512, "width": 768, "text": 128, "valid": 60},
            tiny={**MODELS["ltx13b"].tiny, "cross_attention_dim": 128},
        ),
        guided=True,
    ),
    "ltx13b": Case(MODELS["ltx13b"], guided=True),
    "ltx2": Case(MODELS["ltx2"], guided=True),
    "wan": Case(MODELS["wan"], guided=False),
    "flux": Case(MODELS["flux"], guided=False),
}


@dataclass(frozen=True)
class Way:
    """One configuration of a model on this many GPUs."""

    config: str
    gpus: int
    mode: str

    @property
    def label(self) -> str:
        return f"{self.config}, {self.gpus} GPU{'s' if self.gpus > 1 else ''}{f', {self.mode}' if self.mode else ''}"


def two_samples(value: Any) -> Any:
    """The inputs of a batch of one as a batch of two different samples."""
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != 1:
        return value
    return torch.cat((value, value.flip(1) if value.dim() > 2 else value))


def make_mesh(mode: str, world: int, device: str) -> dist.DeviceMesh:
    """The ranks of a mode: halves of the batch by ring by Ulysses."""
    shapes = {"ulysses": (1, 1, world), "ring": (1, world, 1), "guidance": (2, 1, world // 2)}
    return dist.init_device_mesh(device, shapes[mode], mesh_dim_names=("guidance", "ring", "ulysses"))


def split(model: Any, mesh: dist.DeviceMesh, ltx: ModuleType) -> None:
    """Has the ranks share a model's calls."""
    degrees = {f"{name}_degree": mesh[name].size() for name in ("ring", "ulysses")}
    if max(degrees.values()) > 1:
        model.enable_parallelism(config=diffusers.ContextParallelConfig(mesh=mesh, **degrees))
    if mesh["guidance"].size() > 1:
        ltx.split_batch(model, mesh["guidance"].get_group())


@contextlib.contextmanager
def exchanges_of(calls: list[tuple[str, int]], peers: ModuleType) -> Iterator[None]:
    """Notes the exchanges of this package: (name, bytes that leave a rank).

    peers: The package's module of exchanges by copies.
    """
    world = dist.get_world_size()
    stock = {name: getattr(peers.Transfer, name) for name in ("put", "take")}

    def put(transfer: Any, part: int, x: Tensor) -> None:
        calls.append((PEER_COPIES, x.nbytes * (transfer.peers.size - 1) // transfer.peers.size))
        stock["put"](transfer, part, x)

    def take(transfer: Any, out: Tensor) -> Tensor:
        calls.append((PEER_COPIES, out.nbytes * (transfer.peers.size - 1) // transfer.peers.size))
        return stock["take"](transfer, out)

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(output: Tensor, input: Tensor, *arguments: Any, **options: Any) -> Any:
            gathers = name == GATHER
            calls.append((name, input.nbytes * (world - 1) // (1 if gathers else world)))
            return function(output, input, *arguments, **options)

        return call

    with contextlib.ExitStack() as stack:
        for name in EXCHANGES:
            stack.enter_context(mock.patch.object(dist, name, noted(name, getattr(dist, name))))
        stack.enter_context(mock.patch.object(peers.Transfer, "put", put))
        stack.enter_context(mock.patch.object(peers.Transfer, "take", take))
        yield


class Run:
    """What one rank measures with."""

    def __init__(self, options: argparse.Namespace, rank: int, world: int) -> None:
        self.options, self.rank, self.world = options, rank, world
        self.device = options.device
        self.ltx, self.metadata = load_package()
        self.peers = sys.modules[f"{self.ltx.__name__}.integrations.parallel.peer_memory"]
        # Each mesh has communicators of its own, which are made once.
        self.meshes = {mode: make_mesh(mode, world, options.device) for mode in options.modes}
        self.records: list[dict[str, Any]] = []
        self.failed: dict[str, str] = {}

    def of_all(self, value: Any) -> list[Any]:
        """The value of every rank."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def failed_anywhere(self, name: str, reason: str) -> bool:
        """Whether any rank failed; all have to stop then, or the others would wait."""
        reasons = list(filter(None, self.of_all(reason)))
        if reasons:
            self.failed[name] = reasons[0]
        return bool(reasons)

    def make(self, way: Way, model: nn.Module) -> nn.Module:
        made = view_of(model)
        if way.config != "stock":
            self.ltx.optimize(made, **options_of(way.config))
        if way.mode:
            split(made, self.meshes[way.mode], self.ltx)
        return made

    def backend(self, way: Way) -> contextlib.AbstractContextManager[Any]:
        """Stock ring attention needs a backend that returns a log-sum-exp, and the default does not."""
        needs = way.config == "stock" and way.mode == "ring" and self.device == "cuda"
        return attention_backend("_native_cudnn") if needs else contextlib.nullcontext()

    def model(self, name: str) -> None:
        """Adds the records of one model."""
        case, options = CASES[name], self.options
        dtype = DTYPES[options.dtype]
        whole = case.model.construct(options.tiny, dtype, self.device)
        model = first_blocks(whole, options.blocks) if options.blocks else whole
        torch.manual_seed(1)
        shape = case.model.tiny_shape if options.tiny else case.model.shape
        inputs: Inputs = case.model.inputs(model, Make(dtype, self.device), **shape)
        if case.guided:
            inputs = {key: two_samples(value) for key, value in inputs.items()}
        common = {
            "model": name,
            "shape": "tiny" if options.tiny else case.model.shape_name,
            "batch": 2 if case.guided else 1,
            "blocks": {key: len(blocks) for key, blocks in block_lists(model).items()},
        }
        found: dict[Way, dict[str, Any]] = {}
        steps: dict[Way, Callable[[], Tensor]] = {}
        results: dict[str, Tensor] = {}
        modes = [mode for mode in options.modes if mode != "guidance" or case.guided]
        for config in options.configs:
            for way in (Way(config, 1, ""), *(Way(config, self.world, mode) for mode in modes)):
                calls: list[tuple[str, int]] = []
                reason = ""
                try:
                    made = self.make(way, model)
                    step = self.step(way, made, inputs)
                    with exchanges_of(calls, self.peers):
                        result = step()
                    if way.gpus == 1:
                        results[config] = result
                except Exception as problem:  # the others are still measured
                    reason = first_line(problem)
                if self.failed_anywhere(f"{name}, {way.label}", reason):
                    continue
                steps[way] = step
                found[way] = {**common, "config": config, "gpus": way.gpus}
                if way.gpus > 1:
                    distance = float(f"{error(result, results[config]):.4g}") if config in results else None
                    found[way].update(mode=way.mode, error_vs_one_gpu=distance)
                    found[way].update(exchanges=len(calls), exchange_mb=round(sum(b for _, b in calls) / 1e6, 3))
                    counts = collections.Counter(calls)
                    found[way]["exchanges_by_size"] = [
                        {"exchange": kind, "bytes": size, "count": count} for (kind, size), count in counts.items()
                    ]
        times = self.time(steps)
        for way, record in found.items():
            by_rank = self.of_all(statistics.median(times[way]))
            record["step_ms"] = round(statistics.median(by_rank), 3)
            record["step_ms_by_rank"] = [round(ms, 3) for ms in by_rank]
        self.records += found.values()

    def step(self, way: Way, made: nn.Module, inputs: Inputs) -> Callable[[], Tensor]:
        def step() -> Tensor:
            with self.backend(way):
                return one_tensor(made(**inputs, return_dict=False))

        return step

    def time(self, steps: dict[Way, Callable[[], Tensor]]) -> dict[Way, list[float]]:
        """Milliseconds of the steps of every configuration, which take turns. All ranks take equally many steps."""
        options = self.options
        counts: dict[Way, int] = {}
        for way, step in steps.items():
            longest = max(self.of_all(time_steps(step, 1, self.device, 0.0)[0])) / 1e3
            counts[way] = max(1, int(min(options.steps, options.seconds / longest)))
        times: dict[Way, list[float]] = {way: [] for way in steps}
        for turn in range(options.rounds):
            for way in list(steps)[:: 1 if turn % 2 == 0 else -1]:
                dist.barrier()
                time_steps(steps[way], min(WARM_UP, counts[way]), self.device, 0.0)
                times[way] += time_steps(steps[way], counts[way], self.device, 0.0)
        return times

    def bare(self, call: Callable[[], Any], name: str, sent: int) -> None:
        """Adds the time of a bare exchange, that sends so many bytes from a rank."""
        time_steps(call, WARM_UP, self.device, 0.0)
        ms = statistics.median([self.time_together(call) for _ in range(EXCHANGE_CALLS)])
        us = round(statistics.median(self.of_all(ms)) * 1e3, 2)
        self.records.append({"exchange": name, "gpus": self.world, "bytes": sent, "us": us})

    def time_together(self, call: Callable[[], Any]) -> float:
        """Milliseconds of a call that all ranks begin together, launched while the GPU is busy, as in a step."""
        if self.device != "cuda":
            dist.barrier()
            return time_steps(call, 1, self.device, 0.0)[0]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)  # meanwhile the host launches all that follows
        dist.all_reduce(torch.zeros(1, device=self.device))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    def exchange(self) -> None:
        """Adds the times of bare exchanges, by what leaves a rank."""
        for mb in TINY_MB if self.options.tiny else EXCHANGE_MB:
            # What stays on the rank is not counted: one part of `world` in an all-to-all, the rank's own in a gather.
            rows = max(1, int(mb * 1e6) // 16 // (self.world - 1)) * 8
            whole = torch.zeros(rows * self.world, dtype=torch.bfloat16, device=self.device)
            output, part = torch.empty_like(whole), whole[:rows]
            for name, input in zip(EXCHANGES, (whole, part)):
                self.bare(functools.partial(getattr(dist, name), output, input), name, part.nbytes * (self.world - 1))
            x = whole.view(1, -1, self.world, 8)
            if self.peers.peers_of(dist.group.WORLD, x) is not None:
                self.bare(functools.partial(copy_once, self.peers, x), PEER_COPIES, part.nbytes * (self.world - 1))


def copy_once(peers: ModuleType, x: Tensor) -> None:
    """One tensor [B, S, heads, D] exchanged by copies, as a part of an attention's."""
    transfer = peers.Transfer(peers.peers_of(dist.group.WORLD, x), x)
    transfer.put(0, x)
    transfer.wait()


def exchange_us(records: list[dict[str, Any]], name: str, size: float) -> float:
    """The time of a collective that sends so many bytes from a rank, between those that were measured."""
    points = sorted((r["bytes"], r["us"]) for r in records if r.get("exchange") == name)
    below = [p for p in points if p[0] <= size] or points[:1]
    above = [p for p in points if p[0] > size] or points[-2:]
    (x0, y0), (x1, y1) = (below[-1], above[0]) if below[-1][0] < above[0][0] else points[-2:]
    return max(points[0][1], y0 + (y1 - y0) * (size - x0) / (x1 - x0))


def modelled(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What 4 and 8 GPUs would take, from records of one and two: see the text at the top of this file."""
    result = []
    for record in [r for r in records if r.get("gpus") == 2 and r.get("mode") in ("ulysses", "ring")]:
        same = ("model", "shape", "config")
        alone = [r for r in records if r.get("gpus") == 1 and all(r.get(key) == record[key] for key in same)]
        if not alone or not record["exchanges"]:
            continue

        def exchange_ms(world: int, record: dict[str, Any] = record) -> float:
            total = 0.0
            for one in record["exchanges_by_size"]:
                # Two ranks send half of an all-to-all's buffer, which shrinks with the ranks, and all of a gather's.
                gathers = one["exchange"] == GATHER
                size = one["bytes"] * (2 / world * (world - 1) if gathers else 4 * (world - 1) / world**2)
                total += one["count"] * exchange_us(records, one["exchange"], size) / 1e3
            return total

        rest = record["step_ms"] - alone[0]["step_ms"] / 2 - exchange_ms(2)
        for world in MODELLED:
            ms = alone[0]["step_ms"] / world + exchange_ms(world) + rest
            named = {key: record[key] for key in ("commit", *same, "mode") if key in record}
            result.append({**named, "gpus": world, "modelled_ms": round(ms, 3), "exchange_ms": exchange_ms(world)})
    return result


def in_order(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bare exchanges, then models and configurations as this file lists them, and what is modelled at the end."""

    def place(record: dict[str, Any]) -> tuple[int, ...]:
        if "exchange" in record:
            return 0, -1
        mode = MODES.index(record["mode"]) if "mode" in record else -1
        model, config = list(CASES).index(record["model"]), CONFIGS.index(record["config"])
        return int("modelled_ms" in record), model, config, record.get("gpus", 1), mode

    return sorted(records, key=place)


def with_modelled(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The measured ones of the records, and what follows from them, in order."""
    measured = [record for record in records if "modelled_ms" not in record]
    return in_order([*measured, *modelled(measured)])


def of_this_package(failed: dict[str, str]) -> dict[str, str]:
    """The failures of all but the stock modules, which cannot do everything."""
    return {what: reason for what, reason in failed.items() if ", stock, " not in what}


def failures_kept(output: Path, options: argparse.Namespace) -> dict[str, str]:
    """What an earlier run noted as failed, but for what this run tries again."""
    if not output.exists():
        return {}
    failed: dict[str, str] = json.loads(output.read_text())["meta"]["failed"]

    def is_tried_again(what: str) -> bool:
        model, *way = what.split(", ")  # a model as a whole, or "model, config, GPUs" and the mode, if it has one
        return model in options.models and (not way or (way[0] in options.configs and {*way[2:]} <= {*options.modes}))

    return {what: reason for what, reason in failed.items() if not is_tried_again(what)}


def print_table(records: list[dict[str, Any]], console: Console) -> None:
    texts, numbers = ("model", "configuration", "GPUs", "mode"), ("ms", "x one GPU", "x stock", "sent MB", "error")
    table = empty_table("One forward", texts, numbers)
    timed = [r for r in records if "step_ms" in r]

    def ratio(record: dict[str, Any], **other: Any) -> str:
        wanted = {"model": record["model"], "config": record["config"], "gpus": record["gpus"], **other}
        if wanted["gpus"] > 1:
            wanted["mode"] = record["mode"]
        found = [r for r in timed if all(r.get(key) == value for key, value in wanted.items())]
        return f"{found[0]['step_ms'] / record['step_ms']:.3f}" if found else ""

    for record in timed:
        table.add_row(
            record["model"],
            record["config"],
            str(record["gpus"]),
            record.get("mode", ""),
            f"{record['step_ms']:.2f}",
            ratio(record, gpus=1),
            ratio(record, config="stock"),
            f"{record['exchange_mb']:.1f}" if "mode" in record else "",
            f"{record['error_vs_one_gpu']:.2e}" if record.get("error_vs_one_gpu") is not None else "",
        )
    console.print(table)


def worker(rank: int, world: int, port: int, options: argparse.Namespace, failures: Any) -> None:
    """One rank's part. `failures` counts what failed."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    logging.disable(logging.WARNING)
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
        torch.accelerator.device_count = lambda: 1  # diffusers divides by it, and a torch for CPUs has none
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=options.timeout))
    run = Run(options, rank, world)
    console = make_console(quiet=rank > 0)
    name = torch.cuda.get_device_name() if cuda else "cpu"
    slug = slug_of(name)
    output = options.output or REPOSITORY / f"benchmarks/results/{slug}x{world}-parallel.json"
    meta = {
        **common_meta(run.metadata, "cuda" if cuda else "cpu"),
        "device": f"{world} x {name}",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "diffusers": diffusers.__version__,
        "dtype": options.dtype,
        "weights": "random",
    }
    earlier_failures = failures_kept(output, options) if options.update else {}

    def save() -> None:
        if rank == 0:
            shown = kept_records(output, meta, run.records, IDENTITY) if options.update else run.records
            write(output, {**meta, "failed": {**earlier_failures, **run.failed}}, with_modelled(shown))

    with torch.no_grad():
        run.exchange()
        save()
        for model in options.models:
            console.print(f"{model}: {', '.join(options.configs)}", highlight=False)
            reason = ""
            try:
                run.model(model)
            except Exception as problem:
                reason = first_line(problem)
            run.failed_anywhere(model, reason)
            save()
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
    print_table(run.records, console)
    failures.value = len(of_this_package(run.failed))  # the same on all ranks
    for what, reason in run.failed.items():
        console.print(f"failed: {what}: {reason}", highlight=False, soft_wrap=True, markup=False)
    console.print(str(output), highlight=False, soft_wrap=True)
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES), help="(default: all)")
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS), help="(default: all)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="(default: all)")
    parser.add_argument("--blocks", type=int, default=0, help="only the first blocks of each kind (default: all)")
    parser.add_argument("--tiny", action="store_true", help="models of seconds on a CPU, to try the script")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gpus", type=int, help="ranks (default: the GPUs of this machine, 2 on a CPU)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"turns of a configuration (default: {ROUNDS})")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"timed steps of a turn at most (default: {STEPS})")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of a turn's steps (default: {SECONDS})")
    parser.add_argument("--update", action="store_true", help="keep what the file says of all else")
    parser.add_argument("--timeout", type=float, default=120, help="seconds until a rank gives the others up")
    parser.add_argument("--output", type=Path, help="JSON (default: benchmarks/results/<gpu>x<ranks>-parallel.json)")
    options = parser.parse_args(arguments)
    world = options.gpus or (torch.cuda.device_count() if options.device == "cuda" else 2)
    if world < 2 or world % 2:
        parser.error(f"--gpus: expected an even number of ranks, got {world}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    failures = torch.multiprocessing.get_context("spawn").Value("i", 0)
    torch.multiprocessing.spawn(worker, (world, port, options, failures), nprocs=world)
    return int(failures.value > 0)


if __name__ == "__main__":
    sys.exit(main())
