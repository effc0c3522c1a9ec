"""Runs many random calls of every op (helpers/fuzz.py) in parallel, and writes what they measured to a JSON file.

python tests/fuzz.py --cases 50000          # or make fuzz N=50000

On GPUs where there are any and a CUDA build, else on the CPU. Truth and expectations are computed on the CPU. A failure
prints the smallest call that hypothesis found for it, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "benchmarks")]

import torch  # noqa: E402
from helpers import fuzz  # noqa: E402
from helpers.build import REPO_ID, build_directory, use_own_build_by_default  # noqa: E402
from helpers.gpus import name_gpus, take_turns  # noqa: E402
from helpers.tally import Tally  # noqa: E402

CHUNK = 500


def load() -> tuple[Any, dict[str, Any]]:
    """The package as users load it, and its metadata."""
    from kernels import get_kernel

    ltx = get_kernel(REPO_ID, version=1)
    return ltx, json.loads((Path(ltx.__file__).parent / "metadata.json").read_text())


def begin(started: Any) -> None:
    """In each process, before it looks for a GPU."""
    with started.get_lock():
        os.environ.update(take_turns(started.value))
        started.value += 1


def run_chunk(device: str, shrink: bool, family: str, cases: int, seed: int) -> tuple[list[dict[str, Any]], str | None]:
    tally, failure = Tally(), None
    ltx, _ = load()
    try:
        fuzz.run(ltx, device, family, cases, tally, seed, shrink=shrink)
    except Exception as error:  # whatever an op may do
        each = getattr(error, "exceptions", [error])  # hypothesis groups failures that differ
        failure = "\n".join(line for e in each for line in (f"{type(e).__name__}: {e}", *getattr(e, "__notes__", ())))
    return tally.records(), failure


def chunks(cases: int, seed: int) -> list[tuple[str, int, int]]:
    """(family, cases, seed) of every chunk; the families advance side by side."""
    found = []
    for family, (_, part) in fuzz.FAMILIES.items():
        total = round(cases * part)
        for begin in range(0, total, CHUNK):
            found.append((begin / total, family, min(CHUNK, total - begin)))
    return [(family, count, seed + i) for i, (_, family, count) in enumerate(sorted(found))]


def spans(numbers: list[int]) -> list[str]:
    """Runs of consecutive numbers, as "first-last"."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return [f"{first}-{last}" for first, last in found]


def numbers(spans: list[str]) -> list[int]:
    """What `spans` made text of."""
    return [n for span in spans for first, last in [span.split("-")] for n in range(int(first), int(last) + 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=50000)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0, help="of the first chunk of 500 cases (default: 0)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing more after this long")
    parser.add_argument("--no-shrink", action="store_true", help="print failing calls as they were drawn, at once")
    parser.add_argument("--resume", action="store_true", help="only what the output does not hold of this build yet")
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="results of other seeds, to count with these")
    parser.add_argument("--output", type=Path, help="JSON (default: benchmarks/results/fuzz-<device>.json)")
    options = parser.parse_args()

    use_own_build_by_default()
    directory = build_directory()
    if directory is None or not directory.exists():
        sys.exit(f"{directory} does not exist: run `make build`")
    _, package = load()
    device = "cuda" if package["backend"]["type"] == "cuda" and torch.cuda.is_available() else "cpu"
    from result_files import common_meta, slug_of, write

    meta = {**common_meta(package, device), "threads": options.jobs, "package_id": package["id"]}
    if device == "cuda":
        meta["devices"] = torch.cuda.device_count()

    slug = slug_of(meta["device"]) if device == "cuda" else "cpu"
    output = options.output or REPOSITORY / f"benchmarks/results/fuzz-{slug}.json"
    tally, failures, seeds, other_seeds = Tally(), [], [], []
    for path in options.add:
        other = json.loads(path.read_text())
        tally.merge(other["records"])
        failures += other["failures"]
        other_seeds += other["meta"]["seeds"]
    before = json.loads(output.read_text()) if options.resume and output.exists() else {"meta": {}}
    seconds = 0.0
    if before["meta"].get("package_id") == package["id"]:
        tally.merge(before["records"])
        failures += before["failures"]
        seeds += numbers(before["meta"]["seeds"])
        seconds = before["meta"]["seconds"]
    start = time.perf_counter() - seconds
    work = [chunk for chunk in chunks(options.cases, options.seed) if chunk[2] not in seeds]
    context = multiprocessing.get_context("spawn")
    name_gpus()
    with concurrent.futures.ProcessPoolExecutor(options.jobs, context, begin, (context.Value("i", 0),)) as pool:
        running = {pool.submit(run_chunk, device, not options.no_shrink, *chunk): chunk for chunk in work}
        for future in concurrent.futures.as_completed(running):
            if time.perf_counter() - start > options.seconds:
                for other in running:
                    other.cancel()
            if future.cancelled():
                continue
            records, failure = future.result()
            tally.merge(records)
            seeds.append(running[future][2])
            if failure is not None:
                failure = failure.replace(f"{REPOSITORY}/", "")  # a path of this machine tells others nothing
                failures.append(failure)
                print(failure, flush=True)
            if len(seeds) % max(1, len(work) // 10) == 0:
                print(f"{tally.cases} cases, {len(failures)} failures", flush=True)
            # After every chunk, for a run may be ended from outside.
            meta |= {"seeds": other_seeds + spans(seeds), "seconds": round(time.perf_counter() - start, 1)}
            write(output, meta, tally.records(), cases=tally.cases, failures=failures)
    print(f"{tally.cases} cases, {len(failures)} failures, {time.perf_counter() - start:.1f} s: {output}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
