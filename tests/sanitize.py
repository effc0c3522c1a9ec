"""Runs the tools of compute-sanitizer over the tests marked `sanitize` and writes what they found to a JSON file.

python tests/sanitize.py                   # or make sanitize; needs a GPU and a CUDA build
python tests/sanitize.py --tools memcheck -k activations

Every tool looks at this package's kernels alone. The runs go in parallel, one for each tool, dtype and two test
functions: what takes the time is the start of a process, where the tool rewrites every kernel.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "benchmarks")]

from helpers.gpus import name_gpus, take_turns  # noqa: E402

WHOLE_FILE = "pytestmark = pytest.mark.sanitize"
ONE_TEST = re.compile(r"^@pytest\.mark\.sanitize\n(?:@.*\n)*def (test_\w+)", re.MULTILINE)
TOGETHER = 2  # functions in one process
TOOLS = ["memcheck", "racecheck", "initcheck", "synccheck"]
SLOWEST_FIRST = ["initcheck", "racecheck", "memcheck", "synccheck"]
DTYPES = ["float32", "float16", "bfloat16"]
FAULTS = re.compile(r"^========= (?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", re.MULTILINE)
ENVIRONMENT = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # or what lies past a tensor is torch's memory, too
    "LTX_TEST_GUARD": "0",  # and so that nothing of ours lies there
}


def marked_tests() -> list[list[str]]:
    """file::function of the tests that are marked, as processes run them; found in the text, for pytest would take a
    process and torch."""
    found = []
    for file in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        text = file.read_text()
        names = re.findall(r"^def (test_\w+)", text, re.MULTILINE) if WHOLE_FILE in text else ONE_TEST.findall(text)
        found += [[f"{file}::{name}" for name in names[i : i + TOGETHER]] for i in range(0, len(names), TOGETHER)]
    return found


def command(sanitizer: str, tool: str, tests: list[str], dtype: str, only: str) -> list[str]:
    chosen = ["-k", f"torch.{dtype} and ({only})" if only else f"torch.{dtype}"]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, *chosen]
    return [sanitizer, "--tool", tool, "--kernel-regex", "kns=ltx", "--error-exitcode", "99", *pytest]


def run(turn: int, arguments: list[str]) -> tuple[dict[str, Any], str]:
    start = time.perf_counter()
    environment = {**os.environ, **ENVIRONMENT, **take_turns(turn)}
    process = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    output = process.stdout + process.stderr
    passed = re.search(r"(\d+) passed", output)
    faults = [int(a or b) for a, b in FAULTS.findall(output)]
    result = {
        "tests": int(passed[1]) if passed else 0,
        "faults": sum(faults) if faults else None,  # None: the tool did not come to its summary
        "status": process.returncode,
        "seconds": round(time.perf_counter() - start, 1),
    }
    return result, output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", default=TOOLS, choices=TOOLS)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, help="JSON (default: benchmarks/results/sanitize-<device>.json)")
    parser.add_argument("--resume", action="store_true", help="only what the output does not hold of this build yet")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="handed to pytest")
    options = parser.parse_args()

    import torch
    from helpers.build import build_directory, use_own_build_by_default
    from result_files import common_meta, slug_of, write

    use_own_build_by_default()
    if not torch.cuda.is_available():
        sys.exit("tests/sanitize.py needs an NVIDIA GPU")
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if sanitizer is None:
        sys.exit("tests/sanitize.py needs compute-sanitizer, of the CUDA toolkit, in PATH")
    device = torch.cuda.get_device_name()
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=False).stdout
    directory = build_directory()
    assert directory is not None
    (metadata,) = directory.glob("*-cu*/metadata.json")
    package = json.loads(metadata.read_text())
    meta = {
        **common_meta(package, "cuda"),
        "devices": torch.cuda.device_count(),
        "sanitizer": (re.findall(r"Version (\S+)", version) or [None])[0],
        "package_id": package["id"],
        "only": options.k,
    }
    slug = slug_of(device)
    output_file = options.output or REPOSITORY / f"benchmarks/results/sanitize-{slug}.json"
    tools: dict[str, Any] = {tool: {} for tool in options.tools}
    before = json.loads(output_file.read_text()) if options.resume and output_file.exists() else {"meta": {}}
    seconds = 0.0
    if before["meta"].get("package_id") == package["id"]:
        tools |= before["tools"]
        seconds = before["meta"]["seconds"]
    start = time.perf_counter() - seconds
    good = True
    name_gpus()
    work = [
        (tool, f"{' '.join(test.rpartition('/')[2] for test in tests)} {dtype}", tests, dtype)
        for tool in sorted(options.tools, key=SLOWEST_FIRST.index)
        for tests in marked_tests()
        for dtype in DTYPES
    ]
    meta["processes"] = len(work)  # all that there should be
    work = [(tool, name, *rest) for tool, name, *rest in work if tools[tool].get(name, {}).get("faults") is None]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        running = {
            pool.submit(run, turn, command(sanitizer, tool, tests, dtype, options.k)): (tool, name)
            for turn, (tool, name, tests, dtype) in enumerate(work)
        }
        for future in concurrent.futures.as_completed(running):
            tool, name = running[future]
            result, output = future.result()
            tools[tool][name] = result
            print(tool, name, *(f"{name} {value}" for name, value in result.items()), flush=True)
            if result["status"] != 0 or result["faults"] != 0:
                good = False
                lines = [line for line in output.splitlines() if "Host Frame" not in line]
                print("\n".join(lines[:100] + lines[-40:]), flush=True)  # what it found first, and the summary
            meta["seconds"] = round(time.perf_counter() - start, 1)
            write(output_file, meta, tools=tools)
    print(f"{'clean' if good else 'NOT CLEAN'}, {time.perf_counter() - start:.1f} s: {output_file}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
