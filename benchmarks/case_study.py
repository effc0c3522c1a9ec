"""Measures what docs/case-study.md quotes, and writes the page's tables.

    python tools/build.py --this-machine
    python benchmarks/case_study.py [--parts ops ltx fp8 vae clip]
    python benchmarks/case_study.py --tiny --output DIR     # a small model on a CPU, to try the command

Each part is a program of this directory, run as its own process; it writes its JSON to benchmarks/results/. When all
have ended, benchmarks/readme.py writes the pages anew.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from plots import RESULTS

BENCHMARKS = Path(__file__).resolve().parent
FRAMES = 49  # of the clip; its transformer sees 2688 tokens, twice with guidance

# The programs, and what they are asked to measure.
PARTS: dict[str, list[str]] = {
    "ops": ["ops.py", "--update", "--only", "rmsnorm"],
    "ltx": ["ltx.py"],
    "fp8": ["fp8.py"],
    "vae": ["vae.py", "--update"],
    "clip": ["clip.py", "--update"],
}
TINY: dict[str, list[str]] = {
    "ltx": [
        "ltx.py", "--model", "tiny", "--device", "cpu", "--configs", "baseline", "kernels", "--frames", "9",
        "--height", "64", "--width", "96", "--rounds", "1", "--steps", "2",
    ],
    "clip": [
        "clip.py", "--tiny", "--device", "cpu", "--configs", "stock", "kernels", "--recipes", "distilled",
        "--sizes", "9x64x96", "--clips", "1",
    ],
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU, to try the command")
    parser.add_argument("--output", type=Path, metavar="DIR", help="with --tiny: where the results go")
    options = parser.parse_args(arguments)
    if options.tiny != (options.output is not None):
        parser.error("argument --output: expected together with --tiny: other results belong to benchmarks/results")
    failed = []
    for part in options.parts:
        if options.tiny and part not in TINY:
            print(f"{part}: NOT RUN: {PARTS[part][0]} needs a GPU, or has no small form", flush=True)
            continue
        script, *rest = (TINY if options.tiny else PARTS)[part]
        output = ["--output", str(options.output / f"{part}.json")] if options.tiny else []
        print(f"{part}: {' '.join([script, *rest])}", flush=True)
        if subprocess.run([sys.executable, str(BENCHMARKS / script), *rest, *output], check=False).returncode:
            failed.append(part)
    if not options.tiny:
        print(f"{RESULTS}: writing the pages from it", flush=True)
        failed += ["readme"] * bool(subprocess.run([sys.executable, str(BENCHMARKS / "readme.py")]).returncode)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
