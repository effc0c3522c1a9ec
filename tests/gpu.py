"""Everything that this project says of a GPU's correctness, in two calls; results go to benchmarks/results/.

python tests/gpu.py --call 1 --ptx build-7.5 build-8.0 --mutations mutants
python tests/gpu.py --call 2

On a machine with one H200 and 16 cores each call takes up to 560 seconds, which --limit changes; without --call it is
all one. Four builds are made beforehand, on any machine with an nvcc, from the same commit:

python tools/build.py --backend cuda --arch 9.0 --output build
python tools/build.py --backend cuda --arch 7.5+PTX-only --output build-7.5
python tools/build.py --backend cuda --arch 8.0+PTX-only --output build-8.0
python tests/mutations.py --backend cuda --build-only mutants --build-args "--arch 9.0"

With the build that LOCAL_KERNELS names (default: build/): 50000 random calls; compute-sanitizer's four tools; the tests
of ops and models, but for those that a CPU proves as well (--on-device in tests/conftest.py); those of more than 2^31
elements, and those of a second GPU where there is one; a part of the tests with the builds that hold PTX alone, the
code of older GPUs, which the driver compiles for long; and planted defects, each of which a test must notice.

python tests/gpu.py --parts models tests --files linear families --jobs 8 --limit 540 runs these files alone.

All of it runs side by side, in --jobs processes that take turns at which GPU is their first one. What took longest in
the last results begins first. Each part writes what it has as it goes, and each file of tests is a process of its own:
one that hangs or dies takes nothing else with it. When --limit seconds are over, what still runs is ended, and counted
as far as it came; --resume goes on from there, also in the second of two calls. suites-<GPU>.json names the tests that
failed and says why in a few lines; the rest of their output is in logs/.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "benchmarks")]

from helpers.failures import FAILURES, read_failures  # noqa: E402
from helpers.files import path_of  # noqa: E402
from helpers.gpus import name_gpus, take_turns  # noqa: E402

PARTS = ["mutations", "forced", "models", "ptx", "fuzz", "sanitizers", "tests", "large", "devices"]
# About as many core-seconds each, as far as earlier results tell.
CALLS = {1: PARTS[:5], 2: PARTS[5:]}
CALL_SECONDS = 560  # of --call, with which a limit of 600 leaves time to begin and to end
# Files of tests, and how many processes share each. To begin takes a process 10 seconds: one does the work of a minute.
FILES = {"norm": 4, "plain_attention": 4, "compile": 3, "quant": 3, "rope": 3, "adaln": 3, "inputs": 3, "processes": 3}
FILES |= dict.fromkeys(["properties", "linear", "glu", "attention", "backward"], 2)
FILES |= dict.fromkeys(["tensor_kinds", "wrong_types", "benchmarks", "regressions", "errors", "parity", "sass"], 1)
FILES |= dict.fromkeys(["channels_last", "group_norm", "attention_int8", "report", "loading"], 1)
FILES |= dict.fromkeys(["op_calls", "row_sums"], 1)
MODELS_FILES = {"families": 5, "language_models": 4, "integration": 2, "layers": 2, "models": 2, "integration_fp8": 2}
MODELS_FILES |= dict.fromkeys(
    ["fp8_memory", "tokens", "causal_prompts", "vae", "fp8_lora", "lora", "fp8_files", "fp8_written"], 1
)
MODELS_FILES |= dict.fromkeys(
    [
        "integration_pipelines",
        "pipelines_by_default",
        "graphs",
        "graphs_that_pay",
        "kv_cache",
        "appended_tokens",
        "sliding_windows",
        "replay",
    ],
    1,
)
MODELS_FILES |= dict.fromkeys(["processors", "state", "threads", "checkpoints", "quantizer", "autocast", "training"], 1)
MODELS_FILES |= dict.fromkeys(
    [
        *("replay_gradients", "replay_checkpoints", "memory_low", "quantised_layers", "quantizer_text", "vae_images"),
        *("unet", "training_steps", "captured_training", "fp8_training", "mixture", "layer_checkpoints"),
    ],
    1,
)
# What these look at is the variant, whatever they take: its machine code, and how it is loaded.
OF_THE_VARIANT = {"sass", "loading"}
# Of the others that take a device: parts of their own, what runs the code of pages, examples and notebooks, and what
# is marked `host` as a whole.
ELSEWHERE = {
    "completeness",
    "forced",
    "sanitize",
    "demo",
    "docs",
    "examples",
    "notebooks",
    "parallel",
    "project_files",
    "skills",
    "diffusers_trainers",
    "generate_image",
    "train_lora",
    "train_demo",
}
# Their tests of more than 2^31 elements are marked slow.
LARGE_FILES = ["norm", "rope", "glu", "attention", "plain_attention", "quant", "linear", "group_norm"]
PTX_FILES = ["sanitize", "quant", "regressions", "plain_attention"]
# What pytest -v says of each test as it ends, also where others run it for it (xdist): an interrupted run is countable.
ENDED = "(PASSED|FAILED|SKIPPED|ERROR)"
OUTCOME = re.compile(
    rf"^(?:\[gw\d+\] \[ *\d+%\] {ENDED} tests/|tests/.*::.* {ENDED}(?: \(.*\))? +\[ *\d+%\]$)", re.MULTILINE
)


@dataclasses.dataclass
class Job:
    """A command that takes the room of so many processes; of tests, each file in a suite has its own."""

    suite: str
    name: str
    command: list[str]
    processes: int = 1
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    def start(self, logs: Path, turn: int) -> None:
        self.log = logs / (f"{self.suite} {self.name}".strip().replace(" ", "-") + ".log")
        self.failures = self.log.with_suffix(".failures")
        self.failures.unlink(missing_ok=True)
        self.started = time.perf_counter()
        with open(self.log, "w") as file:
            self.process = subprocess.Popen(
                self.command,
                cwd=REPOSITORY,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # or every process starts as many more as there are cores
                    FAILURES: str(self.failures.absolute()),
                    **take_turns(turn),
                    **self.environment,
                },
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def result(self, stopped: bool) -> dict[str, Any]:
        """What came of it; of tests, how many passed, failed and were skipped, and which failed. No status: it was
        stopped."""
        status = None if stopped else self.process.returncode
        log = self.log.read_text(errors="replace")
        result: dict[str, Any] = {"status": status, "seconds": round(time.perf_counter() - self.started, 1)}
        if "pytest" in self.command:
            result |= counts(log)
        print(f"{self.suite} {self.name}:", *(f"{key} {value}" for key, value in result.items()), flush=True)
        failures = read_failures(self.failures)
        if failures:
            result["failures"] = failures
            print("\n".join(f"  {test}: {lines[0]}" for test, lines in failures.items()), flush=True)
        elif status != 0:
            told = ("FAILED", "ERROR", "E  ", "Error", "NOT CLEAN", "Fatal", "Traceback")
            lines = [line[:300] for line in log.splitlines()]
            print("\n".join([line for line in lines if line.startswith(told)][-12:] or lines[-6:]), flush=True)
        return result


def counts(log: str) -> dict[str, int]:
    """Of the output of `pytest -v`: how many tests passed, failed and were skipped."""
    outcomes = collections.Counter(one or other for one, other in OUTCOME.findall(log))
    failed = outcomes["FAILED"] + outcomes["ERROR"]
    return {"passed": outcomes["PASSED"], "failed": failed, "skipped": outcomes["SKIPPED"]}


def chosen(file: str) -> list[str]:
    """What pytest is told to choose the tests of a file by."""
    return ["-m", "not slow", *([] if file in OF_THE_VARIANT else ["--on-device"])]


def longest_first(jobs: Sequence[Job], suites: dict[str, dict[str, dict[str, Any]]]) -> list[Job]:
    """By the seconds of earlier results. What they do not hold comes first, in its order: it may take longest."""

    def seconds(job: Job) -> float:
        result = suites.get(job.suite, {}).get("files", {}).get(job.name, {})
        return result["seconds"] if result.get("status") is not None else math.inf

    return sorted(jobs, key=seconds, reverse=True)


def run_all(
    jobs: Sequence[Job], processes: int, limit: float, logs: Path, record: Callable[[Job, dict[str, Any]], None]
) -> None:
    """Begins the jobs in their order, each as soon as so many processes leave it room; records each as it ends."""
    waiting, running = collections.deque(jobs), list[Job]()
    deadline = time.perf_counter() + limit
    while (waiting or running) and time.perf_counter() < deadline:
        while waiting and (not running or waiting[0].processes + sum(job.processes for job in running) <= processes):
            job = waiting.popleft()
            job.start(logs, turn=len(jobs) - len(waiting))
            running.append(job)
        for job in [job for job in running if job.process.poll() is not None]:
            running.remove(job)
            record(job, job.result(stopped=False))
        time.sleep(0.1)
    for job in running:
        kill(job.process)
        record(job, job.result(stopped=True))
    for job in waiting:
        print(f"{job.suite} {job.name}: not begun", flush=True)
        record(job, {"status": None, "seconds": 0})


def kill(process: subprocess.Popen[bytes]) -> None:
    """With all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ptx", nargs="*", default=[], type=Path, metavar="DIR", help="builds that hold PTX alone")
    parser.add_argument("--mutations", type=Path, metavar="DIR", help="what tests/mutations.py --build-only made")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--call", type=int, choices=list(CALLS), help=f"one half of it, in {CALL_SECONDS} seconds")
    which.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="some of it (default: all)")
    every_file = [*FILES, *MODELS_FILES]
    parser.add_argument("--files", nargs="+", default=every_file, choices=every_file, help="of models and tests")
    parser.add_argument("--cases", type=int, default=50000, help="random calls")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument("--resume", action="store_true", help="only what the output does not hold of this build yet")
    parser.add_argument("--limit", type=float, help=f"seconds (default: 3600, with --call {CALL_SECONDS})")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()
    parts: list[str] = CALLS.get(options.call, options.parts)
    limit: float = options.limit or (CALL_SECONDS if options.call else 3600)
    for part, given in (("mutations", options.mutations), ("ptx", options.ptx)):
        if part in parts and not given:
            print(f"{part}: left out without --{part}", flush=True)

    import torch
    from helpers.build import REPO_ID, build_directory, use_own_build_by_default
    from result_files import common_meta, slug_of, write

    use_own_build_by_default()
    build = build_directory()
    if not torch.cuda.is_available() or build is None:
        sys.exit("tests/gpu.py needs an NVIDIA GPU and a CUDA build")
    name_gpus()
    output = options.output.resolve()
    logs = output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    slug = slug_of(torch.cuda.get_device_name())

    def share(part: float) -> int:
        return max(1, round(options.jobs * part))

    def script(part: str, path: str, result: str, processes: int, *arguments: str) -> Job:
        command = [sys.executable, path, "--output", str(output / result), "--jobs", str(processes), *arguments]
        command += ["--resume"] if options.resume else []
        return Job(part, "", command, processes)

    def tests(suite: str, file: str, *arguments: str, processes: int = 1, room: int = 1, **environment: str) -> Job:
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", path_of(file), *arguments]
        if processes > 1:
            command += ["-n", str(processes), "--dist", "worksteal"]
        return Job(suite, f"test_{file}", command, max(processes, room), environment)

    def jobs_of(part: str) -> list[Job]:
        if part == "fuzz":
            arguments = ["--cases", str(options.cases), "--no-shrink"]
            return [script(part, "tests/fuzz.py", f"fuzz-{slug}.json", share(0.31), *arguments)]
        if part == "sanitizers":
            return [script(part, "tests/sanitize.py", f"sanitize-{slug}.json", share(0.38))]
        if part == "mutations" and options.mutations:
            built = ["--backend", "cuda", "--built", str(options.mutations.resolve())]
            return [script(part, "tests/mutations.py", "mutations-cuda.json", share(0.31), *built)]
        if part == "devices" and torch.cuda.device_count() > 1:
            second = [tests(part, file, "-k", "second_device") for file in ("processes", "linear")]
            return [*second, tests(part, "parallel", "-k", "test_benchmark")]
        if part == "forced":  # each of its tests begins several processes, and waits for them
            return [tests(part, "forced", processes=share(0.12))]
        if part == "large":
            # Four at a time: one may take a quarter of a GPU's memory, and skips where there is not enough.
            size = share(0.25)
            return [tests(part, file, "-m", "slow", "-k", "more_than", room=size) for file in LARGE_FILES]
        if part == "ptx":
            found = []
            for directory in options.ptx:
                (metadata,) = directory.glob("*/metadata.json")
                arch = json.loads(metadata.read_text())["backend"]["archs"][0].removesuffix("+PTX")
                own_build = f"{REPO_ID}={directory.resolve()}"
                found += [tests(f"PTX of {arch}", file, "--on-device", LOCAL_KERNELS=own_build) for file in PTX_FILES]
            return found
        files = {"tests": FILES, "models": MODELS_FILES}.get(part, {})
        return [
            tests(part, file, *chosen(file), processes=min(processes, options.jobs))
            for file, processes in files.items()
            if file in options.files
        ]

    package = json.loads(next(build.glob("*-cu*/metadata.json")).read_text())
    meta = {
        **common_meta(package, "cuda"),
        "devices": torch.cuda.device_count(),
        "package_id": package["id"],
    }
    unfinished: list[str] = []
    path = output / f"suites-{slug}.json"
    before = json.loads(path.read_text()) if path.exists() else {"meta": {}}
    same_build = before["meta"].get("package_id") == meta["package_id"]  # what other calls ran stays
    suites: dict[str, dict[str, dict[str, Any]]] = before["suites"] if same_build else {}
    earlier: list[float] = before["meta"].get("seconds_of_calls", []) if same_build else []

    def record(job: Job, result: dict[str, Any]) -> None:
        if result["status"] != 0:
            unfinished.append(f"{job.suite} {job.name}".strip())
        meta["seconds"] = round(time.perf_counter() - start, 1)
        meta["seconds_of_calls"] = [*earlier, meta["seconds"]]
        if "pytest" in job.command:
            suites.setdefault(job.suite, {"files": {}})["files"][job.name] = result
        write(path, meta, suites=suites)

    start = time.perf_counter()
    jobs = longest_first([job for part in parts for job in jobs_of(part)], before.get("suites", {}))
    if options.resume:
        done = {
            (suite, name)
            for suite, counts in suites.items()
            for name, result in counts["files"].items()
            if result["status"] is not None
        }
        jobs = [job for job in jobs if (job.suite, job.name) not in done]
    run_all(jobs, options.jobs, limit, logs, record)
    print(f"{meta['seconds']} s; " + (f"failed: {', '.join(unfinished)}" if unfinished else "all good"))
    return 1 if unfinished else 0


if __name__ == "__main__":
    sys.exit(main())
