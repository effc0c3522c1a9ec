"""Everything that this project says of a GPU's correctness, in one command; results go to benchmarks/results/.

python tests/gpu.py --ptx build-7.5 build-8.0 --mutations mutants

Side by side: the tests with the build that LOCAL_KERNELS names (default: build/), each file in a process of its own,
and those of more than 2^31 elements; a part of them with builds that hold PTX alone, which the driver compiles: the
code of older GPUs (python tools/build.py --backend cuda --arch 7.5+PTX-only --output build-7.5); 50000 random calls;
compute-sanitizer's four tools; and planted defects (tests/mutations.py --backend cuda --build-only mutants). Each part
writes its file as it goes, so that a run that is ended early leaves what it had.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "benchmarks")]

FILES = ["norm", "rope", "forced", "compile", "adaln", "glu", "quant", "regressions", "inputs", "errors"]
FILES += ["tensor_kinds", "processes", "parity", "properties"]
SPLIT = ["norm", "rope", "compile"]  # the longest
LARGE_FILES = ["norm", "rope", "glu", "quant"]  # with tests of more than 2^31 elements, which are marked slow
PTX_FILES = ["regressions", "sanitize", "adaln", "glu"]

Part = tuple[str, list[str], dict[str, str]]  # name, command, environment


def pytest(name: str, files: list[str], build: str, extra: list[str]) -> Part:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *extra]
    command += [f"tests/test_{file}.py" for file in files]
    return name, command, {"LOCAL_KERNELS": f"org/ltx-kernels={Path(build).resolve()}", "OMP_NUM_THREADS": "1"}


def run(name: str, command: list[str], environment: dict[str, str], limit: float, logs: Path) -> dict[str, Any]:
    start = time.perf_counter()
    log = logs / f"{name.replace(' ', '-')}.log"
    with open(log, "w") as file:
        try:
            status = subprocess.run(
                command, cwd=REPOSITORY, env={**os.environ, **environment}, stdout=file, stderr=file, timeout=limit
            ).returncode
        except subprocess.TimeoutExpired:
            status = None
    text = log.read_text()
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|error)", text[-2000:])}
    result = {"status": status, **counts, "seconds": round(time.perf_counter() - start, 1)}
    print(name, *(f"{key} {value}" for key, value in result.items()), flush=True)
    if status != 0:
        print("\n".join(line for line in text.splitlines() if line.startswith(("FAILED", "ERROR", "E  ")))[-1500:])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ptx", nargs="*", default=[], metavar="DIR", help="builds that hold PTX alone")
    parser.add_argument("--mutations", metavar="DIR", help="what tests/mutations.py --build-only made")
    parser.add_argument("--cases", type=int, default=50000, help="random calls (0: none)")
    parser.add_argument("--fuzz-jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 3), help="test files at a time")
    parser.add_argument("--files", nargs="*", default=FILES, help=f"tests to run (default: {' '.join(FILES)})")
    parser.add_argument("--ptx-files", nargs="*", default=PTX_FILES, help=f"(default: {' '.join(PTX_FILES)})")
    parser.add_argument("--no-sanitizer", action="store_true")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for each process")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("-m", default="not slow", metavar="MARKERS", help="handed to pytest")
    options = parser.parse_args()

    import torch
    from cpu import meta as common_meta
    from helpers.build import build_directory, use_own_build_by_default

    use_own_build_by_default()
    build = build_directory()
    if not torch.cuda.is_available() or build is None:
        sys.exit("tests/gpu.py needs an NVIDIA GPU and a CUDA build")
    options.output.mkdir(parents=True, exist_ok=True)
    logs = options.output / "logs"
    logs.mkdir(exist_ok=True)
    slug = torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "-")
    python, tests = sys.executable, REPOSITORY / "tests"

    work: list[Part] = []
    for directory in options.ptx:  # one process each: the driver compiles once
        (metadata,) = Path(directory).glob("*/metadata.json")
        arch = json.loads(metadata.read_text())["backend"]["archs"][0].removesuffix("+PTX")
        work.append(pytest(f"PTX of {arch}", options.ptx_files, directory, ["-m", "not slow"]))
    for name in options.files:
        extra = ["-n", "4"] if name in SPLIT else []
        work.append(pytest(f"test_{name}.py", [name], str(build), ["-m", options.m, *extra]))
    if set(LARGE_FILES) <= set(options.files):
        extra = ["-m", "slow", "-k", "more_than"]
        work.append(pytest("more than 2^31 elements", LARGE_FILES, str(build), extra))
    other: list[Part] = []
    if not options.no_sanitizer:
        output = options.output / f"sanitize-{slug}.json"
        other.append(("sanitizers", [python, str(tests / "sanitize.py"), "--output", str(output)], {}))
    if options.cases:
        output = options.output / f"fuzz-{slug}.json"
        fuzz = [python, str(tests / "fuzz.py"), "--cases", str(options.cases), "--jobs", str(options.fuzz_jobs)]
        # Behind all others, for it fills the processors that they leave idle.
        other.append(("fuzz", ["nice", *fuzz, "--output", str(output)], {}))
    if options.mutations:
        output = options.output / "mutations-cuda.json"
        mutations = [python, str(tests / "mutations.py"), "--backend", "cuda", "--built", options.mutations]
        other.append(("mutations", [*mutations, "--output", str(output)], {}))

    package = json.loads(next(build.glob("*-cu*/metadata.json")).read_text())
    meta = {
        **common_meta(),
        "device": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "commit": package["provenance"].get("kernel", {}).get("commit"),
        "package_id": package["id"],
    }
    suites_file = options.output / f"suites-{slug}.json"
    results: dict[str, dict[str, Any]] = {}
    start = time.perf_counter()
    with (
        concurrent.futures.ThreadPoolExecutor(len(other) or 1) as pool,
        concurrent.futures.ThreadPoolExecutor(options.jobs) as suites,
    ):
        running = {pool.submit(run, name, *rest, options.limit, logs): name for name, *rest in other}
        running |= {suites.submit(run, name, *rest, options.limit, logs): name for name, *rest in work}
        for future in concurrent.futures.as_completed(running):
            results[running[future]] = future.result()
            meta["seconds"] = round(time.perf_counter() - start, 1)
            records = {name: results[name] for name, *_ in work if name in results}
            suites_file.write_text(json.dumps({"meta": meta, "suites": records}, indent=1) + "\n")
    failed = [name for name, result in results.items() if result["status"] != 0]
    print(f"{meta['seconds']} s; " + (f"failed: {', '.join(failed)}" if failed else "all good"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
