"""Everything that this project says of a GPU's correctness, in one command; results go to benchmarks/results/.

python tests/gpu.py --ptx build-7.5 build-8.0 --mutations mutants

Side by side: the tests with the build that LOCAL_KERNELS names (default: build/), each file in a process of its own; a
part of them with builds that hold PTX alone, which the driver compiles: the code of older GPUs (python tools/build.py
--backend cuda --arch 7.5+PTX-only --output build-7.5); 50000 random calls; compute-sanitizer's four tools; and planted
defects (tests/mutations.py --backend cuda --build-only mutants).
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

FILES = ["norm", "adaln", "rope", "glu", "quant", "regressions", "inputs", "errors", "tensor_kinds", "processes"]
FILES += ["compile", "forced", "parity", "properties"]
SPLIT = ["norm", "rope", "forced"]  # the longest
PTX_FILES = ["regressions", "sanitize", "glu", "adaln"]


def pytest(name: str, build: str, extra: list[str]) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *extra, f"tests/test_{name}.py"]
    return command, {"LOCAL_KERNELS": f"org/ltx-kernels={Path(build).resolve()}", "OMP_NUM_THREADS": "1"}


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

    work: list[tuple[str, list[str], dict[str, str]]] = []
    for name in options.files:
        extra = ["-n", "4"] if name in SPLIT else []
        work.append((name, *pytest(name, str(build), ["-m", options.m, *extra])))
    for directory in options.ptx:
        (metadata,) = Path(directory).glob("*/metadata.json")
        arch = json.loads(metadata.read_text())["backend"]["archs"][0].removesuffix("+PTX")
        work += [(f"PTX {arch} {name}", *pytest(name, directory, ["-m", "not slow"])) for name in options.ptx_files]
    large: list[tuple[str, list[str], dict[str, str]]] = []
    if not options.no_sanitizer:
        output = options.output / f"sanitize-{slug}.json"
        large.append(("sanitizers", [python, str(tests / "sanitize.py"), "--output", str(output)], {}))
    if options.cases:
        output = options.output / f"fuzz-{slug}.json"
        fuzz = [python, str(tests / "fuzz.py"), "--cases", str(options.cases), "--jobs", str(options.fuzz_jobs)]
        large.append(("fuzz", [*fuzz, "--output", str(output)], {}))
    if options.mutations:
        output = options.output / "mutations-cuda.json"
        mutations = [python, str(tests / "mutations.py"), "--backend", "cuda", "--built", options.mutations]
        large.append(("mutations", [*mutations, "--output", str(output)], {}))

    start = time.perf_counter()
    with (
        concurrent.futures.ThreadPoolExecutor(len(large) or 1) as pool,
        concurrent.futures.ThreadPoolExecutor(options.jobs) as suites,
    ):
        running = {name: pool.submit(run, name, *rest, options.limit, logs) for name, *rest in large}
        running |= {name: suites.submit(run, name, *rest, options.limit, logs) for name, *rest in work}
        results = {name: future.result() for name, future in running.items()}
    package = json.loads(next(build.glob("*-cu*/metadata.json")).read_text())
    meta = {
        **common_meta(),
        "device": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "commit": package["provenance"].get("kernel", {}).get("commit"),
        "package_id": package["id"],
        "seconds": round(time.perf_counter() - start, 1),
    }
    suites_file = options.output / f"suites-{slug}.json"
    records = {name: results[name] for name, *_ in work}
    suites_file.write_text(json.dumps({"meta": meta, "suites": records}, indent=1) + "\n")
    failed = [name for name, result in results.items() if result["status"] != 0]
    print(f"{meta['seconds']} s; " + (f"failed: {', '.join(failed)}" if failed else "all good"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
