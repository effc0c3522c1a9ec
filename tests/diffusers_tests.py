"""Runs diffusers' own tests of the models that the package knows, on stock models and on optimized ones.

python tests/diffusers_tests.py --diffusers DIR          # or make test-diffusers; DIR holds diffusers' folder tests/
python tests/diffusers_tests.py --diffusers DIR --files transformer_ltx autoencoder_wan --device cpu

The tests come from DIR, everything else from the diffusers that is installed. Each file of tests runs in two processes,
one with stock models and one with optimized models. It ends with two lists: what fails with both, and what passes with
stock models alone. The exit status is 1 where the second list is not empty, where a process did not come to its end,
and where no call ran the ops.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "benchmarks")]

from gpu import kill  # noqa: E402
from helpers.build import BACKEND, REPO_ID, use_own_build_by_default  # noqa: E402
from helpers.gpus import name_gpus, take_turns  # noqa: E402

SIDES = ("stock", "optimized")
WORST_LAST = ("begun", "passed", "skipped", "failed")
_running: set[Any] = set()  # processes


@dataclass
class Run:
    """What one process has found: the outcomes of its tests by name, and what it wrote at its end."""

    outcomes: dict[str, str] = field(default_factory=dict)  # "begun": the process died in it
    lines: dict[str, list[str]] = field(default_factory=dict)  # what went wrong in those that failed
    end: dict[str, Any] = field(default_factory=dict)  # empty: the process did not come to its end
    seconds: float = 0.0
    output: str = ""

    def read(self, file: Path) -> Run:
        for line in map(json.loads, file.read_text().splitlines() if file.exists() else []):
            if "test" not in line:
                self.end = line
                continue
            test = line["test"]
            self.outcomes[test] = max(line["outcome"], self.outcomes.get(test, "begun"), key=WORST_LAST.index)
            if line["outcome"] == "failed":
                self.lines.setdefault(test, line["lines"])
        return self

    def __str__(self) -> str:
        counts = Counter(self.outcomes.values())
        shown = [f"{counts[outcome]} {outcome}" for outcome in reversed(WORST_LAST) if counts[outcome]]
        return ", ".join(shown or ["no test"]) + ("" if self.end else ", DID NOT END")


@dataclass
class Comparison:
    """Tests by where they do not pass, each with what went wrong."""

    both: dict[str, list[str]] = field(default_factory=dict)
    only_optimized: dict[str, list[str]] = field(default_factory=dict)
    only_stock: dict[str, list[str]] = field(default_factory=dict)


def compare(stock: Run, optimized: Run) -> Comparison:
    """A test that passes with stock models has to pass with optimized ones: to be skipped or not to run is no pass."""
    found = Comparison()
    for test in {**stock.outcomes, **optimized.outcomes}:
        before, after = stock.outcomes.get(test, "not run"), optimized.outcomes.get(test, "not run")
        lines = optimized.lines.get(test, [after])
        if before == "passed" and after != "passed":
            found.only_optimized[test] = lines
        elif before in ("failed", "begun") and after in ("failed", "begun", "not run"):
            found.both[test] = lines
        elif before in ("failed", "begun"):
            found.only_stock[test] = stock.lines.get(test, [before])
        elif after in ("failed", "begun"):  # not skipped, as it is with stock models
            found.only_optimized[test] = lines
    return found


def backend_for(device: str) -> str | None:
    """A CUDA torch takes the CPU variant only where it is told to."""
    return BACKEND or ("cpu" if device == "cpu" else None)


def run(source: Path, file: Path, side: str, turn: int, options: argparse.Namespace) -> Run:
    """One file of tests in a process."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder) / "outcomes"
        environment = {
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // options.jobs)),
            **os.environ,
            **take_turns(turn),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH")])),
            "LTX_TEST_OUTCOMES": str(outcomes),
            "STOCK": "1" if side == "stock" else "",
            "LTX_KERNELS_BACKEND": backend_for(options.device) or "",
            "DIFFUSERS_TEST_DEVICE": options.device,
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        # No configuration: that of a repository around the folder would not be diffusers'.
        command = [sys.executable, "-m", "pytest", "-q", "-p", "helpers.diffusers_plugin", "-p", "no:cacheprovider"]
        command += ["-c", os.devnull, "--rootdir", str(source), "--basetemp", str(Path(folder) / "files")]
        command += [str(file), *(["-k", options.k] if options.k else [])]
        start = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=source,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        _running.add(process)
        try:
            output, _ = process.communicate(timeout=options.timeout)
        except subprocess.TimeoutExpired:
            kill(process)
            output, _ = process.communicate()
        finally:
            _running.discard(process)
        found = Run(seconds=round(time.perf_counter() - start, 1), output=output)
        return found.read(outcomes)


def listed(title: str, tests: Mapping[str, list[str]]) -> str:
    lines = [f"{title}: {len(tests) or 'none'}"]
    for test, wrong in tests.items():
        lines += [f"  {test}", *(f"      {line}" for line in wrong)]
    return "\n".join(lines)


def total(runs: list[Run], key: str) -> int:
    return sum(run.end.get(key, 0) for run in runs)


def by_name(runs: list[Run], key: str) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for run in runs:
        counts.update(run.end.get(key, {}))
    return dict(counts.most_common())


def verdict(files: dict[str, dict[str, Run]]) -> tuple[str, dict[str, Any], bool]:
    """(text, the same as values, whether all is well) of the runs of some files, by the side."""
    found = [compare(runs["stock"], runs["optimized"]) for runs in files.values()]
    merged = Comparison()
    for each in found:
        for name, tests in vars(each).items():
            getattr(merged, name).update(tests)
    unfinished = [f"{name} ({side})" for name, runs in files.items() for side in SIDES if not runs[side].end]
    optimized = [runs["optimized"] for runs in files.values()]
    calls, traces = total(optimized, "calls"), total(optimized, "traces")
    models, stock_calls = by_name(optimized, "models"), by_name(optimized, "stock_calls")
    idle = [name for name, runs in files.items() if not total([runs["optimized"]], "calls")]
    counts = {side: dict(Counter(o for runs in files.values() for o in runs[side].outcomes.values())) for side in SIDES}
    text = [
        listed("Fail with stock models and with optimized ones", merged.both),
        listed("Fail with stock models alone", merged.only_stock),
        listed("Pass with stock models alone", merged.only_optimized),
        *(f"stock calls, {count}: {reason}" for reason, count in stock_calls.items()),
        *(f"{side}: {', '.join(f'{n} {outcome}' for outcome, n in counts[side].items())}" for side in SIDES),
        f"{sum(models.values())} models of {len(models)} classes were optimized; {calls} calls ran the ops, "
        f"{traces} more were traced",
        *(f"no call ran the ops: {name}" for name in idle),
        *(f"DID NOT END: {name}" for name in unfinished),
    ]
    values = {
        "counts": counts,
        "models": models,
        "calls": calls,
        "traces": traces,
        "stock_calls": stock_calls,
        "unfinished": unfinished,
        **asdict(merged),
    }
    return "\n".join(text), values, not merged.only_optimized and not unfinished and calls + traces > 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--diffusers", type=Path, required=True, metavar="DIR", help="the folder of diffusers' tests/")
    parser.add_argument(
        "--files", nargs="+", default=[""], metavar="PART", help="files with one of these in their name"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="the first N files alone")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    parser.add_argument("--timeout", type=float, default=3600, metavar="SECONDS", help="of a process (3600)")
    parser.add_argument("--output", type=Path, help="JSON to write, after each process")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="handed to pytest")
    return parser.parse_args()


def main() -> int:
    options = arguments()

    import torch
    from helpers.diffusers_models import files_of_tests, known_models
    from kernels import get_kernel
    from result_files import common_meta, write

    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    use_own_build_by_default()
    ltx = get_kernel(REPO_ID, version=1, backend=backend_for(options.device))
    metadata = json.loads((Path(ltx.__file__).parent / "metadata.json").read_text())
    source = options.diffusers.resolve()
    models = known_models(ltx)
    tested = files_of_tests(source, models)
    chosen = [file for file in tested if any(part in file.name for part in options.files)][: options.limit]
    if not chosen:
        sys.exit(f"{source}: expected files tests/models/*/test_*.py that name a known model, found {len(tested)}")
    untested = sorted(set(models) - {model for named in tested.values() for model in named})
    print(f"{len(models)} known models; diffusers has no tests of {', '.join(untested) or 'none'}", flush=True)
    name_gpus()
    start = time.perf_counter()
    runs: dict[str, dict[str, Run]] = {}

    def write_output() -> None:
        if options.output:
            meta = {**common_meta(metadata, options.device), "k": options.k, "files": len(chosen)}
            meta |= {"diffusers": version("diffusers"), "seconds": round(time.perf_counter() - start, 1)}
            files = {
                name: {side: {"seconds": run.seconds, "outcomes": run.outcomes} for side, run in sides.items()}
                for name, sides in runs.items()
            }
            whole = {name: sides for name, sides in runs.items() if len(sides) == len(SIDES)}
            write(options.output, meta, **verdict(whole)[1], files=files)

    largest_first = sorted(chosen, key=lambda file: -file.stat().st_size)  # what takes long begins early
    work = [(file, side) for file in largest_first for side in SIDES]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        running = {
            pool.submit(run, source, file, side, turn, options): (str(file.relative_to(source)), side)
            for turn, (file, side) in enumerate(work)
        }
        try:
            for done, future in enumerate(concurrent.futures.as_completed(running), 1):
                name, side = running[future]
                found = runs.setdefault(name, {})[side] = future.result()
                print(f"[{done}/{len(work)}] {name}, {side}: {found}, {found.seconds} s", flush=True)
                if not found.end:
                    print(found.output[-6000:], flush=True)
                write_output()
        except BaseException:  # an interrupt as well: no process stays behind
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                kill(process)
            raise
    text, _, good = verdict(runs)
    seconds = round(time.perf_counter() - start, 1)
    print(f"\n{text}\n{'good' if good else 'NOT GOOD'}, {len(chosen)} files on {options.device}, {seconds} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
