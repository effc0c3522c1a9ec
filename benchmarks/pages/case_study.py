"""The tables of docs/case-study.md; `benchmarks/case_study.py` runs the programs that they quote."""

import re
from collections.abc import Mapping
from typing import Any

from case_study import FRAMES, PARTS
from plots import PEERS

from pages.names import by_config
from pages.writing import Record, across, block, commits_of, grid, link, load, records_of, sizes, text

# What an example of kernels for LTX-Video reports, on an H100; it is not measured here.
REPORTED = {"kernel": 2.67, "clip": 1.06, "compile": 1.34}


@block("docs/case-study.md", "claim")
def claim() -> str:
    """The reported figures, and the part of the time that they imply."""
    part = (1 - 1 / REPORTED["clip"]) / (1 - 1 / REPORTED["kernel"])
    kernel, clip, compiled = REPORTED["kernel"], REPORTED["clip"], REPORTED["compile"]
    return text(
        f"An example of kernels for LTX-Video reports, for an H100, an RMSNorm kernel {kernel} times as fast as "
        f"its baseline, a clip {clip} times as fast with it, and {compiled} times as fast with torch.compile. These "
        "figures are quoted, not measured here. A part p of the time that becomes k times as fast makes the whole "
        "1 / (1 - p + p / k) times as fast. The two figures fit together if the norms took "
        f"{part * 100:.0f} % of that clip."
    )


def steps() -> dict[str, Record]:
    """The denoising step by configuration."""
    return by_config(records_of("h200-ltx", frames=FRAMES))


@block("docs/case-study.md", "norm")
def norm() -> str:
    """RMSNorm alone, in every way."""
    records = records_of("h200-ops", op="rmsnorm", dtype="bf16")
    shown = [record for record in records if record["shape"] in ([1024, 2048], [5376, 2048])]  # the second: the model's
    ways = {"eager": "as model code writes it", **PEERS, "ours": "this package", "copy": "a copy of the same bytes"}

    def cells(us: Mapping[str, float], way: str) -> list[str]:
        return [f"{us[way]:.1f}", f"{us['copy'] / us[way] * 100:.0f} %"]

    rows = [
        [name, *(cell for record in shown for cell in cells(record["us"], way))]
        for way, name in ways.items()
        if all(record["us"].get(way) for record in shown)
    ]
    head = across("@ | of the copy's bandwidth", map(sizes, shown))
    return text(grid(f"| RMSNorm, bf16, µs | {head} |", rows))


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


@block("docs/case-study.md", "budget")
def budget() -> str:
    """Where the time of a stock step is, and what a kernel that took no time would gain."""
    step = steps()["baseline"]
    whole, parts = step["step_ms"], work(step)
    sums = {
        "all norms by these names": NORMS,
        "everything but matrix products and attention": [n for n in parts if n not in ("matrix products", "attention")],
    }
    found = dict(parts)
    for name, members in sums.items():
        found[f"**{name}**"] = sum(parts[name][0] for name in members), sum(parts[name][1] for name in members)
    rows = [
        f"| {name} | {ms:.1f} | {ms / whole * 100:.1f} % | {launches:,} | {whole / (whole - ms):.2f} |"
        for name, (ms, launches) in found.items()
    ]
    return text(grid("| a stock step | ms | of the step | launches | the step's speed-up if it took no time |", rows))


# Result files, what the page takes from them, and the program that writes them.
SOURCES = {
    "h200-ops": ("kernels alone", "ops"),
    "h200-ltx": ("a guided step", "ltx"),
    "h200-fp8": ("errors over 30 steps", "fp8"),
    "h200-vae": ("decoding alone", "vae"),
    "h200-clip": ("whole clips", "clip"),
}


@block("docs/case-study.md", "sources")
def sources() -> str:
    """The result files with their machine, commits and date."""
    rows = []
    for file, (what, part) in SOURCES.items():
        meta = load(file)["meta"]
        machine = f"{meta['device'].removeprefix('NVIDIA ')}, torch {meta['torch']}"
        program = f"`benchmarks/{PARTS[part][0]}`"
        rows.append([what, link(file), program, machine, commits_of(file), meta["date"][:10]])
    return text(grid("| what | file | program | machine | commits | date |", rows))


# What the command measures and a file may lack, because it was made in a shorter run.
WHOLE: list[tuple[str, str, dict[str, Any]]] = [
    ("the guided clip of 30 steps as a whole", "h200-clip", {"model": "ltx", "recipe": "guided"}),
    ("torch.compile of the distilled clip", "h200-clip", {"model": "ltx", "recipe": "distilled", "config": "compile"}),
    ("torch.compile of the guided clip", "h200-clip", {"model": "ltx", "recipe": "guided", "config": "compile"}),
    ("torch.compile of longer clips", "h200-clip", {"model": "ltx", "frames": 121, "config": "compile"}),
    ("the decoder under torch.compile", "h200-vae", {"config": "compile"}),
    ("longer and larger clips as a whole", "h200-clip", {"model": "ltx", "frames": 121}),
]


@block("docs/case-study.md", "gaps")
def gaps() -> str:
    """What the page's question would take and its files do not have."""
    missing = [what for what, file, wanted in WHOLE if not records_of(file, **wanted)]
    return text(f"Not measured in these files: {', '.join([*missing, 'any GPU but an H200'])}.")
