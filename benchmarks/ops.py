"""Times the ops on an NVIDIA GPU beside a copy of the same bytes, plain torch, torch.compile, Liger and QuACK.

    python tools/build.py --backend cuda
    python benchmarks/ops.py [--dtype bf16] [--only PART] [--cases NAME] [--no-compile] [--jobs N] [--output PATH]
    python benchmarks/ops.py --update --only rmsnorm    # the file keeps its other cases

Columns: `ours`, in the default rounding; `copy`, a device copy that reads and writes as many bytes in all, in whole
pages, the fastest that a copy gets; `eager`, the package's reference in plain torch, rounding in the input's dtype as
model code does, or the models' own chain of ops; `compile`, torch.compile of that; `native`, torch's own op; `liger`
and `quack`, where installed. The result of every column is compared with `eager` before it is timed. Times are of the
device, with a cold L2 cache. The JSON is rewritten after every case. Processes, --jobs of them, compile the columns
`compile` ahead, into torch's cache on the disk, and end before the first timing; what has not compiled by --limit is
left out, and named.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from op_cases import HOST_CASE, Case, Inputs, Make, cases
from plots import case_name
from result_files import DTYPES, common_meta, load_package, result_file, write
from timing import Timer, host_us
from torch import Tensor

COLUMNS = ["ours", "copy", "eager", "compile", "native", "liger", "quack"]
PEERS = COLUMNS[2:]
PEER_MODULES = {"liger": "liger_kernel.transformers.functional", "quack": "quack.rmsnorm"}
COPY_PAGE = 4096
TOLERANCE = 8.0  # relative error in norm, in machine epsilons: eager rounds several times


def calls(ltx: ModuleType, case: Case, inputs: Inputs, compiled: bool) -> dict[str, Callable[[], Any]]:
    """Everything that computes the case's result, by column."""
    ours = inputs.ours or getattr(ltx, case.function)
    reference = inputs.stock or getattr(ltx.reference, case.function)
    eager = {**inputs.options, **({"rounding": "eager"} if inputs.rounds else {})}
    found = {
        "ours": lambda: ours(*inputs.arguments, **inputs.options),
        "eager": lambda: reference(*inputs.arguments, **eager),
    }
    if compiled:
        torch.compiler.reset()  # or the reference falls back to eager after a few shapes
        function = torch.compile(reference, dynamic=False)
        found["compile"] = lambda: function(*inputs.arguments, **eager)
    return {**found, **inputs.peers}


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def dequantised(results: list[Tensor]) -> list[Tensor]:
    """Results that can be compared: a value next to a tie may be rounded either way, and its scale tells nothing."""
    if results[0].dtype != torch.float8_e4m3fn:
        return results
    values, scales, *others = results
    return [(values.float() * scales).bfloat16(), *(dequantised(others) if others else [])]


def assert_same(result: Any, expected: list[Tensor]) -> None:
    for a, b in zip(dequantised(tensors(result)), dequantised(expected), strict=True):
        error = ((a.float() - b.float()).norm() / b.float().norm()).item()
        limit = TOLERANCE * torch.finfo(b.dtype).eps
        if not error <= limit:
            raise AssertionError(f"relative error {error:.2g} to eager, limit {limit:.2g}")


def traffic(inputs: Inputs, outputs: list[Tensor]) -> int:
    """The bytes that an op has to read and write at least."""
    read = [x for x in (*inputs.arguments, *inputs.options.values(), inputs.again) if isinstance(x, Tensor)]
    return sum(x.nbytes for x in (*read, *outputs))


def copied(size: int) -> int:
    """What a copy that moves `size` bytes reads: in whole pages, as others take up to 3 us longer (H200: 67 MB)."""
    return -(-size // 2 // COPY_PAGE) * COPY_PAGE


def measure(ltx: ModuleType, timer: Timer, case: Case, make: Make, compiled: bool) -> dict[str, Any]:
    inputs = case.build(make)
    found = calls(ltx, case, inputs, compiled)
    expected = tensors(found["eager"]())
    failed = {}
    for name, call in list(found.items()):
        try:
            assert_same(call(), expected)
        except Exception as error:
            if name == "ours":
                raise
            failed[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            del found[name]
    size = traffic(inputs, expected)
    source = torch.randint(256, (copied(size),), dtype=torch.uint8, device=make.device)
    target = torch.empty_like(source)
    found["copy"] = lambda: target.copy_(source)
    times = timer.measure(found)
    record = {
        "op": case.op,
        "shape": list(case.shape),
        "dtype": case.dtype,
        "bytes": size,
        "us": {name: times[name].median if name in times else None for name in COLUMNS},
        "p90": {name: times[name].p90 if name in times else None for name in COLUMNS},
        "host_us": {name: host_us(call) for name, call in found.items() if name != "copy"}
        if (case.op, case.shape, case.dtype) == HOST_CASE
        else None,
    }
    return {**record, "failed": failed} if failed else record


def compile_case(name: str) -> str:
    """In a process of its own: calls what compiles at its first call."""
    ltx, _ = load_package()
    modules, _ = load_peers()
    (case,) = [case for case in cases() if case.name == name]
    with torch.no_grad():
        found = calls(ltx, case, case.build(Make(DTYPES[case.dtype], "cuda", modules)), compiled=True)
        for column in ("compile", *modules):
            with contextlib.suppress(Exception):  # measure() reports it
                found.get(column, lambda: None)()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return name


def compile_ahead(selected: Sequence[Case], jobs: int, limit: float) -> set[str]:
    """The names of the cases that compiled within `limit` seconds; the other processes are ended."""
    deadline = time.monotonic() + limit
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # the pool's processes may start no others
    ready: set[str] = set()
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        names = pool.imap_unordered(compile_case, [case.name for case in selected])
        while True:
            try:
                ready.add(names.next(max(deadline - time.monotonic(), 0)))
            except (StopIteration, multiprocessing.TimeoutError):
                break
            except Exception as error:  # of one case, which is left out
                print(f"{type(error).__name__} while compiling ahead: {error}", flush=True)
    pool.join()  # the processes take their time to leave the GPU
    return ready


@functools.cache
def load_peers() -> tuple[dict[str, ModuleType], dict[str, str]]:
    """(modules, why each of the others is missing)."""
    modules, missing = {}, {}
    for name, module in PEER_MODULES.items():
        try:
            modules[name] = importlib.import_module(module)
        except Exception as error:  # a package that is installed may still fail, for want of its compiler
            missing[name] = f"{type(error).__name__}: {error}"
    return modules, missing


def earlier(path: Path, meta: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(what an earlier result says of its run, its cases)."""
    if not path.exists():
        return meta, []
    result = json.loads(path.read_text())
    for key in ("device", "torch", "cuda"):
        if result["meta"][key] != meta[key]:
            sys.exit(f"--update: {path} is of {key} {result['meta'][key]}, this machine has {meta[key]}")
    return result["meta"], result["records"]


def in_order(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As the table has them, of each case the last record; cases that the table does not have are dropped."""
    by_name = {case_name(record): record for record in records}
    return [by_name[case.name] for case in cases() if case.name in by_name]


def progress(selected: list[Case]) -> Iterator[Case]:
    try:
        from rich.progress import track
    except ImportError:
        for index, case in enumerate(selected, 1):
            print(f"[{index}/{len(selected)}] {case.name}", file=sys.stderr, flush=True)
            yield case
    else:
        yield from track(selected, description="ops")


def print_table(records: list[dict[str, Any]]) -> None:
    columns = "".join(f"{name:>9}" for name in COLUMNS)
    print(f"{'op':42}{'shape':16}{columns}{'x copy':>8}{'peer/ours':>17}")
    for record in records:
        us = record["us"]
        times = "".join(f"{'-' if us[name] is None else format(us[name], '.1f'):>9}" for name in COLUMNS)
        peer = min((name for name in PEERS if us[name] is not None), key=us.__getitem__)
        fastest = f"{peer} {us[peer] / us['ours']:.2f}"
        shape = "x".join(map(str, record["shape"]))
        print(f"{record['op']:42}{shape:16}{times}{us['ours'] / us['copy']:8.2f}{fastest:>17}")
    for record in records:
        shape = "x".join(map(str, record["shape"]))
        for name, error in record.get("failed", {}).items():
            print(f"failed: {name} on {record['op']} {shape}: {error}")
        if record["host_us"]:
            host = ", ".join(f"{name} {us}" for name, us in record["host_us"].items())
            print(f"host us per call, {record['op']} {shape}: {host}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=DTYPES, help="only cases of this one")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="SUBSTRING", help="only cases with one of these in `op shape`"
    )
    parser.add_argument("--cases", nargs="+", metavar="NAME", help='only these, such as "rmsnorm 1024x2048 bf16"')
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile, which takes most of the time")
    jobs = min(os.cpu_count() or 1, 16)
    parser.add_argument(
        "--jobs", type=int, default=jobs, metavar="N", help=f"processes that compile ahead; 0: none ({jobs})"
    )
    parser.add_argument("--limit", type=float, default=120, metavar="SECONDS", help="for what compiles ahead (120)")
    parser.add_argument("--output", type=Path, help="JSON (default: benchmarks/results/<gpu>-ops.json)")
    parser.add_argument("--update", action="store_true", help="keep the other cases that the JSON has")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.version.cuda is None:
        sys.exit("benchmarks/ops.py needs an NVIDIA GPU and a torch that can use it; for the CPU: benchmarks/cpu.py")
    selected = [case for case in cases() if options.dtype in (None, case.dtype)]
    selected = [case for case in selected if any(part in case.name for part in options.only)]
    if options.cases is not None:
        if unknown := set(options.cases) - {case.name for case in selected}:
            parser.error(f"--cases: expected names of cases, got {', '.join(sorted(unknown))}")
        selected = [case for case in selected if case.name in options.cases]
    if not selected:
        sys.exit("no such case")
    ltx, package = load_package()
    if package["backend"]["type"] != "cuda":
        sys.exit(f"{package['id']} is not for CUDA: run `python tools/build.py --backend cuda`")

    modules, missing = load_peers()
    for name, error in missing.items():
        print(f"missing: {name}: {error}", flush=True)
    meta = {**common_meta(package, "cuda"), "missing": missing}
    output = options.output or result_file("ops")
    ready = set() if options.no_compile else {case.name for case in selected}
    if options.jobs and len(ready) > 1:
        start = time.monotonic()
        ready = compile_ahead(selected, options.jobs, options.limit)
        print(f"compiled {len(ready)} of {len(selected)} in {time.monotonic() - start:.0f} s", flush=True)
    commit, kept = meta["commit"], []
    if options.update:
        meta, kept = earlier(output, meta)
    torch.manual_seed(0)
    timer = Timer(calls=10)
    records: list[dict[str, Any]] = []
    with torch.no_grad():
        for case in progress(selected):
            make = Make(DTYPES[case.dtype], "cuda", modules)
            record = measure(ltx, timer, case, make, compiled=case.name in ready)
            if case.name not in ready:
                left_out = "left out: --no-compile" if options.no_compile else ""
                reason = left_out or f"did not compile in {options.limit:.0f} s"
                record.setdefault("failed", {})["compile"] = reason
            records.append(record if commit == meta["commit"] else {**record, "commit": commit})
            write(output, meta, in_order([*kept, *records]))
    print_table(records)
    print(output)


if __name__ == "__main__":
    main()
