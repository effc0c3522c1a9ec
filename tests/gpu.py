"""Everything that this project says of a GPU's correctness, in one command; results go to benchmarks/results/.

python tests/gpu.py --ptx build-7.5 build-8.0 --mutations mutants

With the build that LOCAL_KERNELS names (default: build/), one after another, for processes that share a GPU wait for
their turns: 50000 random calls; compute-sanitizer's four tools; the tests, those of more than 2^31 elements, and those
of a second GPU where there is one; and planted defects (tests/mutations.py --backend cuda --build-only mutants). Beside
the first of them, a part of the tests with builds that hold PTX alone, which the driver compiles for long: the code of
older GPUs (python tools/build.py --backend cuda --arch 7.5+PTX-only --output build-7.5). Each part writes its file as
it goes or ends, so that a run that is ended early leaves what it had.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Iterable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "benchmarks")]

PARTS = ["fuzz", "ptx", "sanitizers", "tests", "large", "devices", "mutations"]
FILES = ["norm", "adaln", "rope", "glu", "quant", "regressions", "properties", "inputs", "errors", "tensor_kinds"]
FILES += ["processes", "compile", "forced", "parity", "sass"]
TWO_DEVICES_FILES = ["norm", "rope", "glu", "quant", "processes"]
LARGE_FILES = ["norm", "rope", "glu", "quant"]  # with tests of more than 2^31 elements, which are marked slow
PTX_FILES = ["sanitize", "regressions"]


def pytest(files: Iterable[str], *arguments: str) -> list[str]:
    paths = [f"tests/test_{file}.py" for file in files]
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, *paths]


def run(name: str, command: list[str], limit: float, logs: Path, **environment: str) -> dict[str, Any]:
    """Runs a command; what came of it, and of each file of tests where it writes a report."""
    start = time.perf_counter()
    log, report = logs / f"{name.replace(' ', '-')}.log", logs / f"{name.replace(' ', '-')}.xml"
    if "pytest" in command:
        command = [*command, f"--junitxml={report}"]
    with open(log, "w") as file:
        try:
            status = subprocess.run(
                command,
                cwd=REPOSITORY,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                stdout=file,
                stderr=file,
                timeout=limit,
            ).returncode
        except subprocess.TimeoutExpired:
            status = None
    result: dict[str, Any] = {"status": status, "seconds": round(time.perf_counter() - start, 1)}
    if report.exists():
        result["files"] = counts(report)
    print(name, result, flush=True)
    if status != 0:
        lines = log.read_text().splitlines()
        print(
            "\n".join(line[:300] for line in lines if line.startswith(("FAILED", "ERROR", "E  ")))[-3000:], flush=True
        )
    return result


def counts(report: Path) -> dict[str, dict[str, int]]:
    """Of a JUnit report: tests passed, failed and skipped of each file."""
    found: dict[str, collections.Counter[str]] = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        outcomes = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcome = "skipped" if outcomes == {"skipped"} else "failed" if outcomes else "passed"
        file = case.get("classname", "").rpartition(".")[2]
        found.setdefault(file, collections.Counter())[outcome] += 1
    return {file: dict(numbers) for file, numbers in sorted(found.items())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ptx", nargs="*", default=[], metavar="DIR", help="builds that hold PTX alone")
    parser.add_argument("--mutations", metavar="DIR", help="what tests/mutations.py --build-only made")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="in this order (default: all)")
    parser.add_argument("--files", nargs="+", default=FILES, help=f"tests to run (default: {' '.join(FILES)})")
    parser.add_argument("--ptx-files", nargs="+", default=PTX_FILES, help=f"(default: {' '.join(PTX_FILES)})")
    parser.add_argument("--cases", type=int, default=50000, help="random calls")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for each part")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results")
    options = parser.parse_args()

    import torch
    from cpu import meta as common_meta
    from helpers.build import REPO_ID, build_directory, use_own_build_by_default

    use_own_build_by_default()
    build = build_directory()
    if not torch.cuda.is_available() or build is None:
        sys.exit("tests/gpu.py needs an NVIDIA GPU and a CUDA build")
    options.output.mkdir(parents=True, exist_ok=True)
    logs = options.output / "logs"
    logs.mkdir(exist_ok=True)
    slug = torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "-")

    def script(name: str, output: str, *arguments: str) -> list[str]:
        return [sys.executable, str(REPOSITORY / "tests" / name), "--output", str(options.output / output), *arguments]

    jobs, spread = str(options.jobs), ["-n", str(options.jobs), "--dist", "worksteal"]
    commands = {
        "fuzz": script("fuzz.py", f"fuzz-{slug}.json", "--cases", str(options.cases), "--jobs", jobs),
        "sanitizers": script("sanitize.py", f"sanitize-{slug}.json", "--jobs", jobs),
        "tests": pytest(options.files, "-m", "not slow", *spread),
        "large": pytest(LARGE_FILES, "-m", "slow", "-k", "more_than"),
    }
    if torch.cuda.device_count() > 1:
        commands["devices"] = pytest(TWO_DEVICES_FILES, "-k", "second_device")
    if options.mutations:
        arguments = ["--backend", "cuda", "--built", options.mutations, "--jobs", jobs]
        commands["mutations"] = script("mutations.py", "mutations-cuda.json", *arguments)
    ptx = {}
    for directory in options.ptx if "ptx" in options.parts else []:
        (metadata,) = Path(directory).glob("*/metadata.json")
        ptx[f"PTX of {json.loads(metadata.read_text())['backend']['archs'][0].removesuffix('+PTX')}"] = directory

    package = json.loads(next(build.glob("*-cu*/metadata.json")).read_text())
    meta = {
        **common_meta(),
        "device": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "commit": package["provenance"].get("kernel", {}).get("commit"),
        "package_id": package["id"],
    }
    results: dict[str, dict[str, Any]] = {}

    def record(name: str, result: dict[str, Any]) -> None:
        results[name] = result
        meta["seconds"] = round(time.perf_counter() - start, 1)
        suites = {key: value for key, value in results.items() if "files" in value}
        path = options.output / f"suites-{slug}.json"
        before = json.loads(path.read_text()) if path.exists() else {"meta": {}}
        if before["meta"].get("package_id") == meta["package_id"]:  # other parts and files, of the same build
            for key, value in before["suites"].items():
                suites[key] = {**value, **suites.get(key, {})}
                suites[key]["files"] = {**value["files"], **suites[key]["files"]}
        path.write_text(json.dumps({"meta": meta, "suites": suites}, indent=1) + "\n")

    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = {}
        for name, directory in ptx.items():  # one process each: the driver compiles once
            own_build = f"{REPO_ID}={Path(directory).resolve()}"
            command = pytest(options.ptx_files, "-m", "not slow")
            compiled[pool.submit(run, name, command, options.limit, logs, LOCAL_KERNELS=own_build)] = name
        for name in options.parts:
            if name in commands:
                record(name, run(name, commands[name], options.limit, logs))
        for future in concurrent.futures.as_completed(compiled):
            record(compiled[future], future.result())
    failed = [name for name, result in results.items() if result["status"] != 0]
    print(f"{meta['seconds']} s; " + (f"failed: {', '.join(failed)}" if failed else "all good"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
