"""Measures what docs/case-study.md quotes, and writes the page's tables.

    python tools/build.py --this-machine
    python benchmarks/case_study.py [--parts ops ltx fp8 vae clip]
    python benchmarks/case_study.py --tiny --output DIR     # a small model on a CPU, to try the command

Each part is a program of this directory, run as its own process; it writes its JSON to benchmarks/results/. When all
have ended, benchmarks/readme.py writes the pages anew.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plots import PEERS, RESULTS, load

BENCHMARKS = Path(__file__).resolve().parent
FRAMES = 49  # of the clip; its transformer sees 2688 tokens, twice with guidance

# The programs, and what they are asked to measure.
PARTS: dict[str, list[str]] = {
    "ops": ["ops.py", "--update", "--only", "rmsnorm"],
    "ltx": ["ltx.py"],
    "fp8": ["fp8.py"],
    "vae": ["vae.py"],
    "clip": ["clip.py"],
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

# ---- The page

# What an example of kernels for LTX-Video reports, on an H100; it is not measured here.
REPORTED = {"kernel": 2.67, "clip": 1.06, "compile": 1.34}


def claim() -> str:
    """The reported figures, and the part of the time that they imply."""
    part = (1 - 1 / REPORTED["clip"]) / (1 - 1 / REPORTED["kernel"])
    kernel, clip, compiled = REPORTED["kernel"], REPORTED["clip"], REPORTED["compile"]
    return (
        f"An example of kernels for LTX-Video reports, for an H100, an RMSNorm kernel {kernel} times as fast as "
        f"its baseline, a clip {clip} times as fast with it, and {compiled} times as fast with torch.compile. These "
        "figures are quoted, not measured here. A part p of the time that becomes k times as fast makes the whole "
        "1 / (1 - p + p / k) times as fast. The two figures fit together if the norms took "
        f"{part * 100:.0f} % of that clip.\n"
    )


def _steps() -> dict[str, dict[str, Any]]:
    """The denoising step by configuration."""
    return {r["config"]: r for r in load("h200-ltx")["records"] if r["frames"] == FRAMES}


def configurations(names: Mapping[str, str]) -> str:
    """One denoising step in every configuration; `names` for people."""
    meta, steps = load("h200-ltx")["meta"], _steps()
    lines = [
        "| | ms a step | x diffusers | x torch.compile | kernels launched | error |",
        "|---|---|---|---|---|---|",
    ]
    for config, name in names.items():
        if config in steps:
            step = steps[config]
            ratios = [f"{steps[other]['step_ms'] / step['step_ms']:.2f}" for other in ("baseline", "compile")]
            launches = sum(k["launches"] for k in step["kernels"])
            times = " | ".join([f"{step['step_ms']:.1f}", *ratios])
            lines.append(f"| {name} | {times} | {launches:,} | {step['error_vs_fp32']:.2e} |")
    head = (
        f"A denoising step with guidance (batch 2) at {FRAMES} frames of 512x768, {meta['device']}, torch "
        f"{meta['torch']}, {meta['dtype']}, random weights, commit {meta['commit'][:7]}. The error is measured over "
        "one forward against the model in float32:"
    )
    return "\n".join([head, "", *lines, ""])


def norm() -> str:
    """RMSNorm alone, in every way."""
    records = [r for r in load("h200-ops")["records"] if (r["op"], r["dtype"]) == ("rmsnorm", "bf16")]
    shown = [r for r in records if r["shape"] in ([1024, 2048], [5376, 2048])]  # the second is the model's
    ways = {"eager": "as model code writes it", **PEERS, "ours": "this package", "copy": "a copy of the same bytes"}
    head = "| RMSNorm, bf16, µs | " + " | ".join(
        f"{'x'.join(map(str, r['shape']))} | of the copy's bandwidth" for r in shown
    )
    lines = [f"{head} |", "|---" * (1 + 2 * len(shown)) + "|"]
    for key, name in ways.items():
        if all(r["us"].get(key) for r in shown):
            cells = [f"{r['us'][key]:.1f} | {r['us']['copy'] / r['us'][key] * 100:.0f} %" for r in shown]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


# What a step's kernels do, by their names; the first that fits.
WORK = {
    "matrix products": r"nvjet|gemm|cutlass",
    "attention": r"sdpa|fmha|flash",
    "norms of query and key (torch's own op)": r"layer_norm_kernel",
    "power, mean and square root of the blocks' norms": r"pow_tensor|MeanOps|rsqrt",
    "GELU": r"GeluCUDA",
    "copies between dtypes and memory orders, concatenations": r"copy_kernel|CatArray|bfloat16_copy",
    "multiplications (norms, modulation, gates, rotation)": r"MulFunctor",
    "additions (residuals, modulation, rotation)": r"add<|Functor_add|OnSelf_add",
}
NORMS = [name for name in WORK if "norms of" in name or "blocks' norms" in name]
REST = "the rest"


def work(step: Mapping[str, Any]) -> dict[str, tuple[float, int]]:
    """Milliseconds and launches of a step by what its kernels do."""
    found = dict.fromkeys((*WORK, REST), (0.0, 0))
    for kernel in step["kernels"]:
        name = next((name for name, pattern in WORK.items() if re.search(pattern, kernel["kernel"])), REST)
        ms, launches = found[name]
        found[name] = ms + kernel["ms"], launches + kernel["launches"]
    return found


def budget() -> str:
    """Where the time of a stock step is, and what a kernel that took no time would gain."""
    step = _steps()["baseline"]
    whole, parts = step["step_ms"], work(step)
    elementwise = [name for name in parts if name not in ("matrix products", "attention")]
    sums = {
        "all norms by these names": NORMS,
        "everything but matrix products and attention": elementwise,
    }
    rows = [(name, *parts[name]) for name in parts]
    for name, members in sums.items():
        rows.append((f"**{name}**", sum(parts[m][0] for m in members), sum(parts[m][1] for m in members)))
    lines = [
        "| a stock step | ms | of the step | launches | the step's speed-up if it took no time |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {ms:.1f} | {ms / whole * 100:.1f} % | {n:,} | {whole / (whole - ms):.2f} |" for name, ms, n in rows
    ]
    return "\n".join([*lines, ""])


# Result files, what the page takes from them, and the program that writes them.
SOURCES = {
    "h200-ops": ("kernels alone", "ops"),
    "h200-ltx": ("a guided step", "ltx"),
    "h200-fp8": ("errors over 30 steps", "fp8"),
    "h200-vae": ("decoding alone", "vae"),
    "h200-clip": ("whole clips", "clip"),
}


def sources() -> str:
    """The result files with their machine, commit and date."""
    lines = ["| what | file | program | machine | commit | date |", "|---|---|---|---|---|---|"]
    for name, (what, part) in SOURCES.items():
        meta = load(name)["meta"]
        link = f"[{name}.json](../benchmarks/results/{name}.json)"
        device = f"{meta['device'].removeprefix('NVIDIA ')}, torch {meta['torch']}"
        origin = f"{device} | {meta['commit'][:7]} | {meta['date'][:10]}"
        lines.append(f"| {what} | {link} | `benchmarks/{PARTS[part][0]}` | {origin} |")
    return "\n".join([*lines, ""])


# What the command measures and a file may lack, because it was made in a shorter run.
WHOLE: list[tuple[str, str, dict[str, Any]]] = [
    ("the guided clip of 30 steps as a whole", "h200-clip", {"model": "ltx", "recipe": "guided"}),
    ("torch.compile of a whole clip", "h200-clip", {"model": "ltx", "config": "compile"}),
    ("the decoder under torch.compile", "h200-vae", {"config": "compile"}),
    ("longer and larger clips as a whole", "h200-clip", {"model": "ltx", "frames": 121}),
]


def gaps() -> str:
    """What the page's question would take and its files do not have."""
    missing = [
        what for what, name, wanted in WHOLE if not any(wanted.items() <= r.items() for r in load(name)["records"])
    ]
    return f"Not measured in these files: {', '.join([*missing, 'any GPU but an H200'])}.\n"


# ---- The command


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
