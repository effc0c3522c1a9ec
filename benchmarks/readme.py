"""Writes the results of README.md, docs/ and skills/ from benchmarks/results, and tables of models from the build.

    python benchmarks/readme.py [--check]

A part of a page between <!-- NAME --> and <!-- /NAME --> is written whole. A figure in a sentence carries a comment
with the file and the key that it comes from, and its digits are written anew:

    20.3<!-- h200-ltx-batch1 config=kernels step_ms --> ms

`key=value` picks the one record with this value (`key~text`: whose value contains the text; a shape is 2x8064x2048),
and the last word names the field, with dots for what lies deeper. Without a `key=` the field is one of the whole file.
Fields and numbers may be joined by ` / ` and ` * `, from left to right; what picks the record stands before the first.
"""

from __future__ import annotations

import argparse
import collections
import functools
import importlib
import math
import pkgutil
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import case_study
from ops import load_package
from plots import PEERS, QUANTISED, RESULTS, case_name, family, fastest, geometric_mean, load, measured

REPOSITORY = Path(__file__).resolve().parents[1]
# What the table of ops shows; all cases are in the file, and the losses below the table.
SHOWN = [
    ("qk_norm_rope across heads, full table", [2, 8064, 32, 64], "q/k norm + rotary, LTX-Video"),
    ("qk_norm_rope per head", [1, 4608, 24, 128], "q/k norm + rotary, FLUX"),
    ("qk_norm_rope across heads, table of a head", [1, 32760, 12, 128], "q/k norm + rotary, Wan"),
    ("gated_residual_adaln_rmsnorm", [2, 8064, 2048], "gated residual + norm + modulation, LTX-Video"),
    ("adaln_rmsnorm", [2, 8064, 2048], "RMSNorm + modulation, LTX-Video"),
    ("adaln_layernorm", [2, 8064, 2048], "LayerNorm + modulation"),
    ("rmsnorm", [16384, 4096], "RMSNorm"),
    ("swiglu", [16128, 8192], "SwiGLU"),
    ("gelu erf", [16128, 8192], "GELU"),
]


def behind(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases in which a peer is ahead by more than noise."""

    def is_behind(record: dict[str, Any]) -> bool:
        _, us = fastest(record)
        return record["us"]["ours"] > us + max(0.02 * us, 0.3)

    return [record for record in records if is_behind(record)]


# How many times a copy's time an op may take, by how its name begins, in the cases that move this much: there the time
# of a launch no longer counts. Attention multiplies matrices.
AIMS = {
    "qk_norm_cross_attention": None,
    "attention": None,
    "qk_norm_rope": 1.10,
    "apply_rotary": 1.08,
    "rope": 1.08,
    "quant": 1.08,
    "rmsnorm_residual": 1.05,
    "gated_residual": 1.05,
    "": 1.03,
}
LARGE = 40e6  # bytes
# The geometric mean of the fastest peer's time over this package's that a family should reach.
PEER_AIMS = {
    "plain and residual norms": 0.99,
    "norm + modulation": 1.15,
    "gated residual (+ norm + modulation)": 1.02,
    "q/k norm + rotary": 1.8,
    "GLU and GELU": 0.99,
}


def aim(record: dict[str, Any]) -> float | None:
    return next(value for start, value in AIMS.items() if record["op"].startswith(start))


def over_copy(record: dict[str, Any]) -> float:
    return record["us"]["ours"] / record["us"]["copy"]


def large(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["bytes"] >= LARGE and aim(record)]


def slow(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The large cases that take longer than they should."""
    return [record for record in large(records) if over_copy(record) > (aim(record) or math.inf)]


def families(records: list[dict[str, Any]]) -> list[str]:
    """How each family does against its aims."""
    lines = [
        "| | cases | speed-up over the fastest peer | large cases near a copy | a peer is ahead |",
        "|---|---|---|---|---|",
    ]
    for name in measured(records):
        members = [record for record in records if family(record["op"]) == name]
        mean = geometric_mean([fastest(record)[1] / record["us"]["ours"] for record in members])
        goal = f" (aim {PEER_AIMS[name]})" if name in PEER_AIMS else ""
        limits = " or ".join(f"{limit:.2f}" for limit in sorted({aim(record) or 0 for record in members}))
        moved = large(members)
        kept = f"{len(moved) - len(slow(members))} of {len(moved)} (within {limits} x)" if moved else ""
        lines.append(f"| {name} | {len(members)} | {mean:.2f} x{goal} | {kept} | {len(behind(members))} |")
    return lines


def of_commits(ops: dict[str, Any]) -> str:
    """Which kernels were timed: of the commit of most records, those of some families, and of single ops in these."""
    commits = [record.get("commit", ops["meta"]["commit"]) or "unknown" for record in ops["records"]]
    timed = [(record["op"], commit) for record, commit in zip(ops["records"], commits)]
    usual = collections.Counter(commit for _, commit in timed).most_common(1)[0][0]
    of_family: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for op, commit in timed:
        of_family[family(op)][commit] += 1
    others: dict[str, dict[str, None]] = {}
    for op, commit in timed:
        expected = of_family[family(op)].most_common(1)[0][0]
        if commit != expected or expected != usual:
            others.setdefault(commit, {})[family(op) if commit == expected else op] = None
    names = "; ".join(f"{', '.join(sorted(found))} of {commit[:7]}" for commit, found in others.items())
    return f"of commit {usual[:7]}" + (f" ({names})" if names else "")


def losses(records: list[dict[str, Any]]) -> list[str]:
    lines = ["| case | this package | the fastest peer | |", "|---|---|---|---|"]
    for record in behind(records):
        peer, us = fastest(record)
        lines.append(f"| {case_name(record)} | {record['us']['ours']:.1f} | {us:.1f} | {peer} |")
    return lines


def slower(records: list[dict[str, Any]]) -> list[str]:
    lines = ["| case | times the copy | aim |", "|---|---|---|"]
    return lines + [f"| {case_name(r)} | {over_copy(r):.3f} | {aim(r):.2f} |" for r in slow(records)]


# The configurations of benchmarks/ltx.py, in the order of the table.
CONFIGS = {
    "baseline": "diffusers",
    "compile": "torch.compile",
    "kernels": "`ltx.optimize(pipe)`",
    "kernels_compile": "`ltx.optimize(pipe)` and torch.compile",
    "kernels_fp8": '`ltx.optimize(pipe, precision="fp8")`',
    "kernels_fp8_compile": '`ltx.optimize(pipe, precision="fp8")` and torch.compile',
    "torchao_fp8_compile": "torchao's fp8 and torch.compile",
    "kernels_int8": '`ltx.optimize(pipe, attention="int8")`',
    "kernels_fp8_int8": '`ltx.optimize(pipe, precision="fp8", attention="int8")`',
}
# What a row shows besides.
RECORDED = {"graph_ms": ".1f", "first_step_s": ".1f", "error_vs_fp32": ".2e"}


def _cells(record: dict[str, Any], baseline: dict[str, Any]) -> str:
    """The numbers of one configuration of benchmarks/ltx.py."""
    ms, speed_up = f"{record['step_ms']:.1f}", f"{baseline['step_ms'] / record['step_ms']:.2f}"
    if record["ms_by_kind"]["idle"] > record["step_ms"] / 4:  # the host's time, not the device's
        ms, speed_up = f"({ms})", f"({speed_up})"
    elif record["config"].startswith("kernels"):
        ms, speed_up = f"**{ms}**", f"**{speed_up}**"
    graph, first, error = (f"{record[key]:{form}}" for key, form in RECORDED.items())
    return f"{ms} | {speed_up} | {graph} | {first} s | {error} |"


def _by_config() -> list[dict[str, dict[str, Any]]]:
    """What benchmarks/ltx.py measured: for each number of frames its records by configuration, in the table's order."""
    records = load("h200-ltx")["records"]
    return [
        {config: r for config in CONFIGS for r in records if (r["config"], r["frames"]) == (config, frames)}
        for frames in sorted({r["frames"] for r in records})
    ]


def _steps() -> list[str]:
    lines = [
        "| frames | | ms | speed-up | ms as a CUDA graph | first step | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for of_config in _by_config():
        baseline = of_config["baseline"]
        lines += [
            f"| {record['frames']} | {CONFIGS[config]} | {_cells(record, baseline)}"
            for config, record in of_config.items()
        ]
    return lines


def step() -> str:
    """A denoising step, whole."""
    meta = load("h200-ltx")["meta"]
    cold = ""
    if "cold" in meta:  # another run had filled the caches
        cold = f"Compilation found its caches warm here; with cold ones the first step took {meta['cold']}. "
    note = f"{meta['note']} " if "note" in meta else ""
    prompts = " and ".join(map(str, meta["prompts"]))
    lines = [
        f"A denoising step of LTX-Video 2B (batch 2, 512x768, bf16, prompts of {prompts} tokens) on one "
        f"{meta['device']}, torch {meta['torch']}, commit {meta['commit'][:7]}; the error is the distance of one "
        "forward from the model in fp32, with random weights:",
        "",
        *_steps(),
        "",
        '<img src="../benchmarks/results/h200-ltx.png" width="100%" alt="Where the time of a step goes">',
        "",
        f"{cold}{note}A CUDA graph does not wait for the host, whose speed differs from machine to machine.",
        "",
    ]
    return "\n".join(lines)


# Result files that are not named after their program.
PROGRAMS = {"suites": "tests/gpu.py", "gates": "benchmarks/ops.py"}


def program_of(name: str) -> str:
    """The program that writes a result file, by the file's name; empty for trials that have none."""
    words = [word for word in name.split("-") if not re.fullmatch(r"h\d00(x\d)?|cpu|cuda|tools", word)]
    if "tuning" in words:
        return ""
    for count in range(len(words), 0, -1):
        found = "_".join(words[:count])
        paths = [PROGRAMS.get(found, ""), f"benchmarks/{found}.py", f"tests/{found}.py"]
        for path in filter(None, paths):
            if (REPOSITORY / path).exists():
                return path
    return ""


def files() -> str:
    """Every result file, with its program, machine and date."""
    lines = ["| file | written by | on | torch | commit | date |", "|---|---|---|---|---|---|"]
    for path in sorted(RESULTS.glob("*.json")):
        meta = load(path.stem)["meta"]
        program = program_of(path.stem)
        cells = [
            f"[{path.name}](../benchmarks/results/{path.name})",
            f"[{program}](../{program})" if program else "trials by hand",
            f"{meta['devices']} {meta['device']}" if meta.get("devices", 1) > 1 else meta["device"],
            meta.get("torch", ""),
            str(meta.get("commit") or "")[:7],
            meta.get("date", "")[:10],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


# The first screen's rows: configurations of benchmarks/ltx.py, and of benchmarks/clip.py as launched and as graphs.
HEADLINE = {
    "baseline": ("stock", ""),
    "compile": ("compile", ""),
    "kernels": ("kernels", "kernels_graphs"),
    "kernels_fp8": ("kernels_fp8", "kernels_fp8_graphs"),
}
HEADLINE_CLIP = {"model": "ltx", "recipe": "distilled", "frames": 49}


def figures() -> str:
    """The first screen's table: a step of LTX-Video 2B and a whole clip, of four configurations."""
    meta = load("h200-ltx")["meta"]
    by_frames = {next(iter(of_config.values()))["frames"]: of_config for of_config in _by_config()}
    clip = {r["config"]: r for r in load("h200-clip")["records"] if HEADLINE_CLIP.items() <= r.items()}
    steps = " | ".join(f"guided step, {frames} frames" for frames in by_frames)
    lines = [
        f"| | {steps} | distilled clip, {HEADLINE_CLIP['frames']} frames | the clip, `graphs=True` | error of a step |",
        "|---" * (4 + len(by_frames)) + "|",
    ]

    def cell(ms: float, stock: float, digits: int) -> str:
        return f"{ms:.{digits}f} ms ({stock / ms:.2f} x)"

    for config, clip_configs in HEADLINE.items():
        records = {frames: of_config[config] for frames, of_config in by_frames.items()}
        cells = [cell(r["step_ms"], by_frames[frames]["baseline"]["step_ms"], 1) for frames, r in records.items()]
        for name in clip_configs:
            cells.append(cell(clip[name]["clip_ms"], clip["stock"]["clip_ms"], 0) if name in clip else "")
        error = max(record["error_vs_fp32"] for record in records.values())
        lines.append(f"| {CONFIGS[config]} | {' | '.join(cells)} | {error:.2e} |")
    launched, graphs = zip(*HEADLINE.values())
    return "\n".join(
        [
            f"LTX-Video 2B (512x768, bf16) on one {meta['device']}: a denoising step with guidance (batch 2), and a "
            f"whole clip of {clip['stock']['steps']} steps without guidance, from the prompt to the decoded video. The "
            "error is the relative distance from the model in float32, with random weights:",
            "",
            *lines,
            "",
            "In the clip the text encoder and the video's decoder are compiled too, or optimized with "
            '`components=["text_encoder", "transformer", "vae"]`. The GPU waits for the host during '
            f"{_idle(clip[name] for name in launched)} of a clip, and during "
            f"{_idle(clip[name] for name in graphs if name)} with `graphs=True`. How long it waits depends on "
            "the host.",
            "",
        ]
    )


def _idle(records: Iterable[dict[str, Any]]) -> str:
    """The share of clips in which the GPU waits for the host: from the least to the most."""
    shares = sorted(round(record["idle_ms"] / record["clip_ms"] * 100) for record in records)
    return f"{shares[0]} to {shares[-1]} %"


def kinds() -> str:
    """Where the time of a step goes on the device."""
    names = ["GEMM", "attention", "this package", "elementwise", "idle"]
    lines = [f"| frames | | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for of_config in _by_config():
        for config, record in of_config.items():
            cells = " | ".join(f"{record['ms_by_kind'].get(name, 0):.1f}" for name in names)
            lines.append(f"| {record['frames']} | {CONFIGS[config]} | {cells} |")
    return "\n".join(["Milliseconds of a step, by kind of kernel:", "", *lines, ""])


PROFILED = ("baseline", "kernels")  # configurations of a step whose kernels docs/profiling.md shows
PROFILED_FRAMES, PROFILED_KERNELS = 49, 10


def profile() -> str:
    """The kernels that take most of a step, before and after `optimize`."""
    (of_config,) = [found for found in _by_config() if found["baseline"]["frames"] == PROFILED_FRAMES]
    lines = [
        f"The {PROFILED_KERNELS} kernels that take most of a step of LTX-Video 2B at {PROFILED_FRAMES} frames "
        "([h200-ltx.json](../benchmarks/results/h200-ltx.json), `python benchmarks/ltx.py`):",
    ]
    for config in PROFILED:
        record = of_config[config]
        kinds_ms = ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in record["ms_by_kind"].items())
        lines += ["", f"{CONFIGS[config]}: {record['step_ms']:.1f} ms, of these {kinds_ms}", ""]
        lines += ["| ms | launches | kind | kernel |", "|---|---|---|---|"]
        for kernel in record["kernels"][:PROFILED_KERNELS]:
            name = kernel["kernel"].replace("|", "/").removeprefix("void ")
            short = name if len(name) <= 90 else f"{name[:89]}…"
            lines.append(f"| {kernel['ms']:.2f} | {kernel['launches']} | {kernel['kind']} | `{short}` |")
    return "\n".join([*lines, ""])


COUNTERS = {  # how a counter is written, and what it is
    "us": ("{:.1f} µs", "time"),
    "dram_percent": ("{:.0f} %", "DRAM throughput, of its peak"),
    "sm_percent": ("{:.0f} %", "multiprocessors' throughput, of its peak"),
    "read_bytes": ("{:,.0f}", "bytes read from DRAM"),
    "written_bytes": ("{:,.0f}", "bytes written to DRAM"),
    "registers": ("{:.0f}", "registers of a thread"),
    "blocks": ("{:,.0f}", "blocks"),
    "waves": ("{:.1f}", "waves"),
    "warps_percent": ("{:.0f} %", "warps on a multiprocessor, of those it holds"),
    "warps_possible_percent": ("{:.0f} %", "the same, as registers and blocks allow"),
    "issue_percent": ("{:.0f} %", "issue slots in use"),
    "memory_stall": ("{:.1f}", "warps that wait for memory, for each instruction issued"),
    "barrier_stall": ("{:.1f}", "warps that wait at a barrier, likewise"),
    "sectors_per_request": ("{:.1f}", "sectors of 32 bytes a load"),
}


def counters() -> str:
    """What ncu reads while one launch runs."""
    result = load("h200-counters")
    lines = [
        f"{result['meta']['device']} ([h200-counters.json](../benchmarks/results/h200-counters.json), "
        "`python benchmarks/counters.py`):",
        "",
        "| counter | " + " | ".join(f"`{r['case'].removesuffix(' bf16')}`" for r in result["records"]) + " |",
        "|---" * (len(result["records"]) + 1) + "|",
    ]
    for name, (form, meaning) in COUNTERS.items():
        lines.append(f"| {meaning} | " + " | ".join(form.format(r[name]) for r in result["records"]) + " |")
    return "\n".join([*lines, ""])


SHOWN_KINDS = 4  # of layers, in the table of what adds fp8's error
FAMILIES = REPOSITORY / "torch-ext/ltx_kernels/integrations"
# The models of benchmarks/models.py: their names for people, and the files of the families that know their blocks.
MODELS = {
    "ltx13b": ("LTX-Video 13B", "ltx"),
    "ltx2": ("LTX-2 19B", "ltx2"),
    "ltx23": ("LTX-2.3", "ltx2"),
    "flux": ("FLUX.1 dev", "flux"),
    "chroma": ("Chroma", "chroma"),
    "flux2": ("FLUX.2 dev", "flux2"),
    "wan": ("Wan 2.1 14B", "wan"),
    "wan_ti2v": ("Wan 2.2 TI2V 5B", "wan"),
    "qwen": ("Qwen-Image", "qwenimage"),
    "sd35": ("Stable Diffusion 3.5 large", "sd3"),
    "hyvideo15": ("HunyuanVideo 1.5", "hunyuan_video15"),
    "cogvideox": ("CogVideoX-5B", "cogvideox"),
    "zimage": ("Z-Image", "z_image"),
}
# The language models of benchmarks/llm.py, likewise.
LANGUAGE_MODELS = {
    "llama-8b": ("Llama 8B", "llama"),
    "mistral-7b": ("Mistral 7B", "llama"),
    "qwen3-8b": ("Qwen3 8B", "qwen3"),
    "gemma3-12b": ("Gemma 3 12B", "gemma"),
    "falcon-7b": ("Falcon 7B", "falcon"),
}


# The module of each library that knows norms and activations by themselves, and no family.
NORMS = "norms"


@functools.cache
def families_of(library: str) -> dict[str, ModuleType]:
    """The modules of the built package that each know one family of a library's models, by name; NORMS comes last."""
    ltx, _ = load_package()
    package = importlib.import_module(f"{ltx.__name__}.integrations.{library}")
    found = (info.name for info in pkgutil.iter_modules(package.__path__) if not info.name.startswith("_"))
    names = sorted(found, key=lambda name: (name == NORMS, name))
    return {name: importlib.import_module(f"{package.__name__}.{name}") for name in names}


def first_sentence(module: ModuleType) -> str:
    return " ".join((module.__doc__ or "").split("\n\n")[0].split())


def known_families(library: str) -> str:
    """The model families that `optimize` knows whole, from the first sentence of each family's file."""
    lines = []
    for name, module in families_of(library).items():
        path = (FAMILIES / library / f"{name}.py").relative_to(REPOSITORY)
        if name != NORMS:
            lines.append(f"- {first_sentence(module)} ([{name}.py](../{path}))")
    return "\n".join(lines) + "\n"


def _blocks(module: ModuleType) -> list[Any]:
    """What a family says about transformer blocks; of a family without any, all that it replaces."""
    blocks = [known for known in module.ENTRIES if type(known).__name__ == "Block"]
    return blocks or list(module.ENTRIES)


def _level(known: Any) -> str:
    """The level of `optimize` from which on a description counts."""
    return (known.entry() if hasattr(known, "entry") else known).level


def _has_fp8(known: Any) -> bool:
    return any(getattr(known, name, None) for name in ("attentions", "feed_forwards", "linears"))


def left_in_bf16() -> str:
    """The linear layers of each family's blocks that precision="fp8" leaves in bf16 by itself."""
    lines = ["| family | layers of its blocks that stay in bf16 |", "|---|---|"]
    for library in ("diffusers", "transformers"):
        for name, module in families_of(library).items():
            known = [one for one in _blocks(module) if _has_fp8(one)]
            if name != NORMS and known:
                patterns = dict.fromkeys(p for one in known for p in getattr(one, "fp8_skip", ()))
                path = (FAMILIES / library / f"{name}.py").relative_to(REPOSITORY)
                lines.append(f"| [{name}](../{path}) | {', '.join(f'`{p}`' for p in patterns) or 'none'} |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Measurement:
    """Where a result file has the times of a family's model: `key` in the records with the values of `where`.

    stock: The configuration to compare with; "kernels" and "kernels_fp8" are this package's.
    """

    family: str
    model: str
    file: str
    stock: str
    key: str
    where: dict[str, Any]

    def gain(self) -> str:
        """How many times as fast as stock, by precision; empty where the file has no such records."""
        records = load(self.file)["records"]
        found = {r["config"]: r for r in records if all(r.get(name) == value for name, value in self.where.items())}
        configs = {"bf16": "kernels", "fp8": "kernels_fp8"}
        gains = [
            f"{name} {found[self.stock][self.key] / found[config][self.key]:.2f} x"
            for name, config in configs.items()
            if {self.stock, config} <= found.keys()
        ]
        depth = _depth(found[self.stock], found[self.stock].get("shallow", False)) if self.stock in found else ""
        return f"{self.model}{depth}: {', '.join(gains)}" if gains else ""


def measurements() -> list[Measurement]:
    """What the last column of the table of models is made of."""
    found = [Measurement("ltx", "2B, a step of 49 frames", "h200-ltx", "baseline", "step_ms", {"frames": 49})]
    found += [
        Measurement(family, title, "h200-models", "baseline", "step_ms", {"model": model})
        for model, (title, family) in MODELS.items()
    ]
    found += [
        Measurement(
            f"vae_{'wan' if 'wan' in model else 'ltx'}{'_encoder' if half == 'encode' else ''}",
            f"{title}, 49 frames",
            "h200-vae",
            "stock",
            f"{half}_ms",
            {"model": model, "half": half, "frames": 49, "dtype": "bf16"},
        )
        for model, title in AUTOENCODERS.items()
        for half in ("decode", "encode")
    ]
    found += [
        Measurement(family, f"{title}, {what}", "h200-llm", "eager", key, {"model": model, "tokens": 8192, "batch": 1})
        for model, (title, family) in LANGUAGE_MODELS.items()
        for key, what in (("prefill_ms", "prompt of 8192 tokens"), ("decode_ms", "token"))
    ]
    return found


def supported() -> str:
    """The families by what is replaced in them, whether fp8 knows them, and what was measured."""
    lines = ["| models | classes that get another forward | level | fp8 | times as fast as stock, on one H200 |"]
    lines.append("|---|---|---|---|---|")
    gains: dict[str, list[str]] = {}
    for measurement in measurements():
        gains.setdefault(measurement.family, []).append(measurement.gain())
    for library in ("diffusers", "transformers"):
        rows: dict[str, dict[str, ModuleType]] = {}  # files whose names begin with the same word share a row
        for name, module in families_of(library).items():
            if name != NORMS:  # of any model: the README says so below the table
                rows.setdefault(name.split("_")[0], {})[name] = module
        for row in rows.values():
            blocks = [block for module in row.values() for block in _blocks(module)]
            classes = dict.fromkeys(known.split(".")[-1] for block in blocks for known in block.classes)
            cells = [
                "; ".join(first_sentence(module).rstrip(".").partition(":")[0] for module in row.values()),
                ", ".join(f"`{known}`" for known in classes),
                ", ".join(sorted({_level(block) for block in blocks})),
                "yes" if any(map(_has_fp8, blocks)) else "no",
                "; ".join(gain for name in row for gain in gains.get(name, []) if gain) or "not measured",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        if library == "diffusers":
            left = left_at_norm_level()
            known = ", ".join(f"`{name}`" for name in left["WELL_KNOWN"])
            others = len(left["LEFT"]) - len(left["WELL_KNOWN"])
            lines.append(
                f"| {known} and {others} other [models of diffusers](docs/models.md#left-at-norm-level) "
                "| norms and activations alone | norms | no | not measured |"
            )
    shallow = any(", first" in gain for of_family in gains.values() for gain in of_family)
    note = ['"First" blocks: the time of a shallow model, not of the whole one.', ""] if shallow else []
    return "\n".join([*lines, "", *note])


def left_at_norm_level() -> dict[str, Any]:
    """What tests/families/left.py lists."""
    return runpy.run_path(str(REPOSITORY / "tests/families/left.py"))


def left_models() -> str:
    """The models of diffusers whose blocks stay stock, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_at_norm_level()["LEFT"].items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    return "\n".join(f"- {reason}: {', '.join(sorted(names))}." for reason, names in by_reason.items()) + "\n"


def _depth(record: dict[str, Any], shallow: bool) -> str:
    return f", first {max(record['blocks'].values())} blocks" if shallow else ""


def models() -> str:
    """One forward of each model, by configuration."""
    result = load("h200-models")
    meta = result["meta"]
    steps = max(r.get("loop_steps", 0) for r in result["records"])
    lines = [
        "| model | shape | | ms | x diffusers | x torch.compile | first step | peak GiB | error | "
        f"after {steps} steps |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    whole: dict[tuple[str, str], dict[str, float]] = {}
    notes: dict[str, dict[str, None]] = {}
    for name, (title, _) in MODELS.items():
        records = {
            config: r for config in CONFIGS for r in result["records"] if (r["model"], r["config"]) == (name, config)
        }
        for config, record in records.items():
            if "note" in record:
                notes.setdefault(record["note"], {})[title] = None
            gains = {
                other: records[other]["step_ms"] / record["step_ms"]
                for other in ("baseline", "compile")
                if other in records
            }
            if not record.get("shallow", False):
                for other, gain in gains.items():
                    whole.setdefault((config, other), {})[title] = gain
            ratios = [f"{gains[other]:.2f}" if other in gains else "" for other in ("baseline", "compile")]
            error = " | ".join(
                f"{record[key]:.2e}" if key in record else "" for key in ("error_vs_fp32", "loop_error_vs_fp32")
            )
            ms = f"{record['step_ms']:.1f}"
            lines.append(
                f"| {title} | {record['shape']}{_depth(record, record.get('shallow', False))} | {CONFIGS[config]} | "
                f"{f'**{ms}**' if config.startswith('kernels') else ms} | {' | '.join(ratios)} | "
                f"{record['first_step_s']:.1f} s | {record.get('peak_gb', 0):.1f} | {error} |"
            )
    head = (
        f"One forward on one {meta['device']}, torch {meta['torch']}, diffusers {meta['diffusers']}, {meta['dtype']}, "
        "random weights, batch as the pipelines pass it ([h200-models.json](../benchmarks/results/h200-models.json), "
        "`python benchmarks/models.py`). The error compares the first blocks of each kind with float32, after "
        f"one forward and in the latents after {steps} steps."
    )

    def spread(gains: dict[str, float]) -> str:
        least, most = (pick(gains, key=lambda title: gains[title]) for pick in (min, max))
        mean = geometric_mean(list(gains.values()))
        return f"{gains[least]:.2f} ({least}) to {gains[most]:.2f} ({most}), geometric mean {mean:.2f}"

    summary = [
        f"- {CONFIGS[config]} beside {CONFIGS[other]}, over {len(gains)} whole models: {spread(gains)}."
        for config in ("kernels", "kernels_fp8")
        for other in ("baseline", "compile")
        if (gains := whole.get((config, other)))
    ]
    late = [title for title, gain in whole.get(("kernels", "compile"), {}).items() if gain < 1]
    summary += [f"- Behind torch.compile: {', '.join(late)}."] if late else []
    described = [f"{', '.join(titles)}: {note}" for note, titles in notes.items()]
    return "\n".join([head, "", *lines, "", "Times as fast:", "", *summary, "", *described, *[""][: len(described)]])


def model_kinds() -> str:
    """Where the time of one forward of a model goes on the device. docs/models.md."""
    records = load("h200-models-profile")["records"]
    names = ["GEMM", "attention", "this package", "elementwise"]
    lines = [f"| model | | {' | '.join(names)} | all kernels |", "|---" * (len(names) + 3) + "|"]
    for name, (title, _) in MODELS.items():
        for config in CONFIGS:
            for record in (r for r in records if (r["model"], r["config"]) == (name, config)):
                ms = [record["ms_by_kind"].get(kind, 0.0) for kind in names]
                cells = " | ".join(f"{x:.1f}" for x in (*ms, sum(ms)))
                lines.append(f"| {title} | {CONFIGS[config]} | {cells} |")
    head = (
        "Milliseconds of one forward, by kind of kernel "
        "([h200-models-profile.json](../benchmarks/results/h200-models-profile.json), "
        "`python benchmarks/models.py --profile`):"
    )
    return "\n".join([head, "", *lines, ""])


CLOSE = 1.1  # how many times the error of bf16 counts as close to it


def fp8_models() -> str:
    """Whole models in fp8 beside bf16: times, errors and memory. docs/fp8.md."""
    records = load("h200-models")["records"]
    steps = max(r.get("loop_steps", 0) for r in records)
    growth: dict[str, float] = {}
    lines = [
        f"| model | bf16, ms | fp8, ms | ratio | error: stock | bf16 | fp8 | after {steps} steps: stock | bf16 | fp8 | "
        "GiB: bf16 | fp8 |",
        "|---" * 12 + "|",
    ]
    for name, (title, _) in MODELS.items():
        found = {r["config"]: r for r in records if r["model"] == name}
        stock, bf16, fp8 = (found.get(config) for config in ("baseline", "kernels", "kernels_fp8"))
        if stock and bf16 and fp8:
            errors = [
                f"{r[key]:.2e}" if key in r else ""
                for key in ("error_vs_fp32", "loop_error_vs_fp32")
                for r in (stock, bf16, fp8)
            ]
            keys = ("error_vs_fp32", "loop_error_vs_fp32")
            growth[title] = max(fp8[key] / bf16[key] for key in keys if key in fp8 and key in bf16)
            lines.append(
                f"| {title}{_depth(fp8, fp8.get('shallow', False))} | {bf16['step_ms']:.1f} | {fp8['step_ms']:.1f} | "
                f"{bf16['step_ms'] / fp8['step_ms']:.2f} | {' | '.join(errors)} | {bf16['peak_gb']:.1f} | "
                f"{fp8['peak_gb']:.1f} |"
            )
    head = (
        "One forward, from [h200-models.json](../benchmarks/results/h200-models.json), beside the same model in bf16 "
        "with this package. The error is the distance of the first blocks of each kind from the model in float32:"
    )
    close = [ratio for ratio in growth.values() if ratio <= CLOSE]
    apart = [f"{title} ({ratio:.1f} times)" for title, ratio in growth.items() if ratio > CLOSE]
    summary = f"In {len(close)} of these models fp8 has at most {max(close):.2f} times the error of bf16."
    summary += f" It has more than {CLOSE} times the error in {' and '.join(apart)}." if apart else ""
    return "\n".join([head, "", *lines, "", summary, ""])


CLIP_CONFIGS = {
    "stock": "diffusers",
    "compile": "torch.compile of these three",
    "kernels": "`optimize`",
    "kernels_graphs": "`optimize(graphs=True)`",
    "kernels_fp8": '`optimize(precision="fp8")`',
    "kernels_fp8_graphs": '`optimize(precision="fp8", graphs=True)`',
}


CLIP_MODELS = {"ltx": "LTX-Video 2B", "ltx2": "LTX-2, with sound"}


def clips(models: Sequence[str] = tuple(CLIP_MODELS)) -> str:
    """Whole clips of some models, by part."""

    def clip(record: dict[str, Any]) -> str:
        size = f"{record['frames']} frames of {record['height']}x{record['width']}"
        return f"{CLIP_MODELS[record['model']]}, {record['recipe']}, {size}"

    result = load("h200-clip")
    meta, records = result["meta"], [r for r in result["records"] if r["model"] in models]
    lines = [
        "| clip | | ms | x diffusers | waiting for the host | prompt | a step | decoding | peak GiB | first clip |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    stock = {clip(r): r["clip_ms"] for r in records if r["config"] == "stock"}
    for record in records:
        baseline = stock.get(clip(record))
        gain = f"{baseline / record['clip_ms']:.2f}" if baseline else ""
        idle = f"{record['idle_ms']:.0f}" if "idle_ms" in record else ""
        lines.append(
            f"| {clip(record)} | {CLIP_CONFIGS[record['config']]} | {record['clip_ms']:.0f} | {gain} | {idle} | "
            f"{record['text_ms']:.1f} | {record['step_ms']:.1f} | {record['decode_ms']:.1f} | "
            f"{record['peak_gb']:.1f} | {record['first_s']:.1f} s |"
        )
    head = (
        f"Whole calls of the pipelines with prompt, steps and decoding, on one {meta['device']}, torch "
        f"{meta['torch']}, {meta['dtype']}, random weights ([h200-clip.json](../benchmarks/results/h200-clip.json), "
        "`python benchmarks/clip.py`). The text encoder, the transformer and the video's decoder are optimized. "
        "Distilled: 8 steps without guidance. Guided: 30 steps with it. Times are in ms. Waiting for the host is the "
        "part of a clip in which no kernel runs."
    )
    return "\n".join([head, *([meta["note"]] if "note" in meta else []), "", *lines, ""])


def of_ops(ops: dict[str, Any], shown: list[tuple[str, list[int], str]], form: str) -> list[str]:
    """A table of some ops, beside a copy and their peers."""
    peers = {key: name for key, name in PEERS.items() if any(r["us"].get(key) for r in ops["records"])}
    lines = [
        f"The ops on one {ops['meta']['device']}, torch {ops['meta']['torch']}, bf16, in µs:",
        "",
        "| op | shape | this package | copy of the same bytes | " + " | ".join(peers.values()) + " | plain torch |",
        "|---" * (5 + len(peers)) + "|",
    ]
    for op, shape, name in shown:
        (record,) = [r for r in ops["records"] if (r["op"], r["shape"], r["dtype"]) == (op, shape, "bf16")]
        us = record["us"]
        cells = [f"{us[key]:{form}}" if us.get(key) else "" for key in ("ours", "copy", *peers, "eager")]
        lines.append(f"| {name} | {'x'.join(map(str, shape))} | **{cells[0]}** | " + " | ".join(cells[1:]) + " |")
    return lines


# What the pages of skills/ show: rows from small to large, and shapes of diffusers' models.
SKILL_ROWS = [
    *(("rmsnorm", [rows, 2048], "RMSNorm") for rows in (64, 512, 1024, 5376, 16128)),
    *(("rmsnorm", shape, "RMSNorm") for shape in ([16384, 4096], [8192, 8192], [131072, 128], [8, 65536])),
]
# Tokens 2x1024 as rows.
QUOTED = [("rmsnorm", [2048, 2048], "RMSNorm 2x1024x2048"), ("geglu tanh", [2048, 4096], "GEGLU 2x1024x4096")]
SKILL_SHAPES = [
    *QUOTED,
    ("rmsnorm", [1024, 2048], "RMSNorm"),
    ("rmsnorm", [5376, 2048], "RMSNorm, LTX-Video"),
    ("geglu tanh", [512, 8192], "GEGLU"),
    ("geglu tanh", [5376, 8192], "GEGLU"),
    *(
        (op, [2, tokens, 2048], f"{name}, LTX-Video")
        for op, name in (
            ("adaln_rmsnorm", "norm + modulation"),
            ("gated_residual_adaln_rmsnorm", "gated residual + norm + modulation"),
        )
        for tokens in (2688, 8064)
    ),
    ("qk_norm_rope across heads, full table", [2, 2688, 32, 64], "q/k norm + rotary, LTX-Video"),
    ("qk_norm_rope across heads, full table", [2, 8064, 32, 64], "q/k norm + rotary, LTX-Video"),
    ("qk_norm_rope per head", [1, 4608, 24, 128], "q/k norm + rotary, FLUX"),
    ("qk_norm_rope across heads, table of a head", [1, 32760, 12, 128], "q/k norm + rotary, Wan"),
]


def skill_ops(shown: list[tuple[str, list[int], str]], name: str = "h200-ops") -> str:
    ops = load(name)
    measured = {(r["op"], tuple(r["shape"])) for r in ops["records"]}
    there = [(op, shape, name) for op, shape, name in shown if (op, tuple(shape)) in measured]
    lines = [*of_ops(ops, there, ".1f"), "", f"All cases, {of_commits(ops)}: `benchmarks/results/{name}.json`.", ""]
    missing = [name for op, shape, name in shown if (op, tuple(shape)) not in measured]
    if missing:
        lines += [f"Not in that file: {', '.join(missing)}.", ""]
    return "\n".join(lines)


def on_h100() -> str:
    """What was measured on an H100: rows, attention and a step of FLUX.1."""
    slug = "h100-80gb-hbm3"
    models, attention = load(f"{slug}-models"), load(f"{slug}-attention")
    ops = {(r["op"], tuple(r["shape"])) for r in load(f"{slug}-ops")["records"]}
    lines = [skill_ops([row for row in (*SKILL_ROWS, *SKILL_SHAPES) if (row[0], tuple(row[1])) in ops], f"{slug}-ops")]
    columns = ["ours", "cudnn", "flash2"]
    lines += [
        f"Self-attention in ms (`benchmarks/results/{slug}-attention.json`):",
        "",
        "| | B, S, heads, D | " + " | ".join(ATTENTION[column] for column in columns) + " |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for r in attention["records"]:
        if r["mask"] is None:
            cells = " | ".join(f"{r['ms'][column]:.3f}" for column in columns)
            lines.append(f"| {ATTENTION_SHAPES[r['name']]} | {', '.join(map(str, r['shape']))} | {cells} |")
    lines += [
        "",
        f"One forward in bf16 with random weights (`benchmarks/results/{slug}-models.json`):",
        "",
        "| model | | ms | x diffusers | x torch.compile | error |",
        "|---" * 6 + "|",
    ]
    by_config = {(r["model"], r["config"]): r for r in models["records"]}
    for (model, config), r in by_config.items():
        gains = " | ".join(
            f"{by_config[model, other]['step_ms'] / r['step_ms']:.2f}" for other in ("baseline", "compile")
        )
        error = f"{r['error_vs_fp32']:.2e}" if "error_vs_fp32" in r else ""
        lines.append(
            f"| {MODELS[model][0]}, {r['shape']} | {CONFIGS[config]} | {r['step_ms']:.1f} | {gains} | {error} |"
        )
    return "\n".join([*lines, ""])


def ops_table() -> str:
    """The ops one by one, beside a copy and their peers."""
    ops = load("h200-ops")
    records = ops["records"]
    lines = of_ops(ops, SHOWN, ".0f")
    (host,) = [r["host_us"] for r in records if r["host_us"]]
    missing = "".join(f" {PEERS[key]} was not installed." for key in ops["meta"]["missing"])
    lines += [
        "",
        f"All {len(records)} cases, {of_commits(ops)}, are in "
        f"[h200-ops.json](../benchmarks/results/h200-ops.json).{missing} One `rmsnorm` of 8x2048 costs the host "
        f"{host['ours']} µs, `F.rms_norm` {host['native']} µs.",
        "",
        '<img src="../benchmarks/results/h200-ops-floor.png" width="100%" '
        'alt="Time over that of a copy, of this package and of its fastest peer, by size">',
        "",
        *families(records),
        "",
        "Speed-up: geometric mean of the fastest peer's time over this package's, of all cases in bf16, fp16 and fp32. "
        "Large: 40 MB or more. A peer is ahead: by more than 2 % and 0.3 µs. What was tried for the kernels, by "
        "question: [h200-tuning.json](../benchmarks/results/h200-tuning.json).",
        "",
        f"<details><summary>The {len(behind(records))} cases in which a peer is ahead, in µs</summary>",
        "",
        *losses(records),
        "",
        "</details>",
        "",
        f"<details><summary>The {len(slow(records))} large cases that take longer than their aim</summary>",
        "",
        *slower(records),
        "",
        "</details>",
        "",
        "<details><summary>How many times as fast as each peer</summary>",
        "",
        '<img src="../benchmarks/results/h200-ops-peers.png" width="100%" alt="How many times as fast as each peer">',
        "",
        "</details>",
        "",
    ]
    return "\n".join(lines)


def shown(number: float | None, digits: int) -> str:
    return "" if number is None else f"{number:.{digits}f}"


def loop() -> str:
    """What fp8 costs over a whole denoising loop: h200-fp8.json."""
    result = load("h200-fp8")
    meta = result["meta"]
    lines = [
        f"{meta['steps']} steps at {meta['frames']} frames of {meta['height']}x{meta['width']}, random weights, "
        f"{meta['seeds']} seeds, against the stock model in float32:",
        "",
        "| recipe | error of the latents | PSNR of the frames | SSIM | ms a step | GiB of weights | stock ones freed |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {r['recipe']} | {r['latents_error']:.2e} | {r['psnr_db']:.1f} dB | {r['ssim']:.4f} | "
            f"{shown(r.get('graph_ms'), 1)} | {r['weights_gb']:.2f} | {shown(r.get('freed_gb'), 2)} |"
            for r in result["records"]
        ),
        "",
        '<img src="../benchmarks/results/h200-fp8.png" width="100%" alt="Error by step, error against time, memory">',
        "",
        "" if meta["torchao"] else "torchao was not part of this run.",
    ]
    return "\n".join(lines).rstrip() + "\n"


def layers() -> str:
    """Which layers carry fp8's error: fp8-layers.json."""
    result = load("fp8-layers")
    lines = ["| in fp8 | error |", "|---|---|"]
    lines += [f"| {r['recipe']} | {r['error']:.2e} |" for r in result["records"]]
    head = (
        f"One forward of the 2B model with {result['meta']['tokens']} tokens of a clip, against the model in float32 "
        "(`python benchmarks/fp8_layers.py`, on a CPU, [fp8-layers.json](../benchmarks/results/fp8-layers.json)):"
    )
    return "\n".join([head, "", *lines, ""])


def family_layers() -> str:
    """Which layers carry fp8's error in each family: h200-fp8-families.json."""
    result = load("h200-fp8-families")
    errors: dict[str, dict[str, float]] = {}
    for record in result["records"]:
        errors.setdefault(record["model"], {})[record["layers"]] = record["error"]
    lines = ["| model | bf16 | the default | all | kinds of layers that add most |", "|---|---|---|---|---|"]
    for model, of in errors.items():
        bf16, default, every = (of.pop(name) for name in ("none (bf16)", "the default", "all"))
        added = {name: math.sqrt(max(0.0, error**2 - bf16**2)) for name, error in of.items()}
        most = sorted(added, key=lambda name: -added[name])[:SHOWN_KINDS]
        kinds = "; ".join(f"`{name}` {added[name]:.1e}" for name in most)
        lines.append(f"| {MODELS[model][0]} | {bf16:.2e} | {default:.2e} | {every:.2e} | {kinds} |")
    head = (
        f"One forward of the first {result['records'][0]['blocks']} blocks of each kind at released widths and shapes, "
        f"with random weights, on one {result['meta']['device']}, against the same blocks in float32 "
        "(`python benchmarks/fp8_families.py`, "
        "[h200-fp8-families.json](../benchmarks/results/h200-fp8-families.json)). "
        "The last column has the error that a kind of layers adds when it alone is in fp8:"
    )
    return "\n".join([head, "", *lines, ""])


def numerics() -> str:
    """The error of one product by recipe: fp8-numerics.json."""
    records = load("fp8-numerics")["records"]
    inputs = {"normal": "normal", "GELU of normal": "GELU of normal", "normal, 1 %": "1 % loud channels"}
    by_recipe: dict[str, list[float]] = {}
    for start in inputs:
        of_input = [r for r in records if r["input"] == start or ("%" in start and r["input"].startswith(start))]
        for r in of_input:
            by_recipe.setdefault(r["recipe"], []).append(100 * r["relative_error"])
    return "\n".join(
        [
            "Relative error of one product of a 1024x2048 input and a normal 2048x2048 weight, row by row "
            "(`python benchmarks/fp8_numerics.py`, [fp8-numerics.json](../benchmarks/results/fp8-numerics.json)):",
            "",
            f"| recipe | {' | '.join(inputs.values())} |",
            "|---" * (1 + len(inputs)) + "|",
            *(f"| {name} | {' | '.join(f'{e:.2f} %' for e in errors)} |" for name, errors in by_recipe.items()),
            "",
        ]
    )


# The columns of docs/fp8.md from benchmarks/fp8_gemm.py.
PRODUCTS = {
    "bf16": "bf16",
    "fp8 per row": "fp8 per row",
    "fp8 per row, slow accumulation": "slow accumulation",
    "torch._scaled_mm": "torch._scaled_mm",
    "torch._scaled_mm per tensor": "per tensor",
}


def products() -> str:
    """Linear layers by form: h200-fp8-gemm.json."""
    result = load("h200-fp8-gemm")
    records = [r for r in result["records"] if "us" in r]
    us = {(tuple(r["shape"]), r["form"]): r["us"] for r in records}
    lines = [f"| tokens x in x out | {' | '.join(PRODUCTS.values())} |", "|---" * (1 + len(PRODUCTS)) + "|"]
    for shape in dict.fromkeys(tuple(r["shape"]) for r in records):
        cells = [f"{us[shape, form]:.0f}" for form in PRODUCTS]
        cells[1] = f"**{cells[1]}**"
        lines.append(f"| {'x'.join(map(str, shape))} | {' | '.join(cells)} |")

    def between(key: str, form: str) -> str:
        found = [r[key] for r in records if r["form"] == form]
        return f"{min(found):.1e} to {max(found):.1e}"

    return "\n".join(
        [
            f"Linear layers with bias on one {result['meta']['device']}, torch {result['meta']['torch']}, in µs "
            "(`python benchmarks/fp8_gemm.py`, [h200-fp8-gemm.json](../benchmarks/results/h200-fp8-gemm.json)):",
            "",
            *lines,
            "",
            "Relative error against the exact product of the same quantised matrices, with the rounding to bf16: "
            f"{between('rounding', 'fp8 per row')}, with slow accumulation "
            f"{between('rounding', 'fp8 per row, slow accumulation')}. Against the product of the matrices before "
            f"quantisation: {between('error', 'fp8 per row')}, without a bias "
            f"{between('error', 'torch._scaled_mm, no bias')}.",
            "",
        ]
    )


# Ops of docs/fp8.md, with a shape of LTX-Video.
QUANTISING = [
    ("quantize_rows", [2, 8064, 2048]),
    ("quantised rmsnorm", [16128, 2048]),
    ("quantised rmsnorm_residual", [16128, 2048]),
    ("quantised adaln_rmsnorm", [2, 8064, 2048]),
    ("quantised gated_residual", [2, 8064, 2048]),
    ("quantised gated_residual_adaln_rmsnorm", [2, 8064, 2048]),
    ("quantised gelu", [16128, 8192]),
    ("quantised swiglu", [16128, 8192]),
]


def quantising() -> str:
    """Ops that quantise, beside a copy and torch.compile."""
    result = load("h200-ops")
    records = [r for r in result["records"] if family(r["op"]) == QUANTISED]
    lines = ["| op | shape | this package | copy | ratio | torch.compile |", "|---|---|---|---|---|---|"]
    for op, shape in QUANTISING:
        (us,) = [r["us"] for r in records if (r["op"], r["shape"]) == (op, shape)]
        lines.append(
            f"| {op.removeprefix('quantised ')} | {'x'.join(map(str, shape))} | **{us['ours']:.1f}** | "
            f"{us['copy']:.1f} | {us['ours'] / us['copy']:.2f} | {us['compile']:.1f} |"
        )
    late = [
        f"{r['op'].removeprefix('quantised ')} {'x'.join(map(str, r['shape']))} {over_copy(r):.3f}"
        for r in slow(records)
    ]
    return "\n".join(
        [
            f"Ops that quantise, beside a copy of the same bytes, {of_commits({**result, 'records': records})} "
            "([h200-ops.json](../benchmarks/results/h200-ops.json)):",
            "",
            *lines,
            "",
            f"Cases that move 40 MB or more: {len(large(records))}. Longer than {AIMS['quant']} times the copy: "
            f"{', '.join(late) or 'none'}.",
            "",
        ]
    )


# What a model's prompt was to gain, x stock and x Liger.
PROMPT_AIMS: dict[str, tuple[float, float | None]] = {
    "llama-8b": (1.23, 1.02),
    "mistral-7b": (1.23, 1.02),
    "qwen3-8b": (1.31, 1.02),
    "gemma3-12b": (1.36, 1.02),
    "falcon-7b": (1.0, None),
}
# And a decoded token in bf16, and a prompt in fp8, x stock.
TOKEN_AIM, FP8_AIM = 1.25, 1.5


def language_models() -> str:
    """Prompts and tokens of language models by configuration: h200-llm.json."""
    result = load("h200-llm")
    meta = result["meta"]
    head = (
        "Whole models with random weights, at their released depth unless the row says else, on one "
        f"{meta['device'].split()[-1]}, {meta['dtype']}, transformers {meta['transformers']}, Liger {meta['liger']} "
        "(`python benchmarks/llm.py`, [h200-llm.json](../benchmarks/results/h200-llm.json)):"
    )
    lines = [
        "| model | tokens | configuration | prompt, ms | x stock | x Liger | token, ms | x stock | x Liger | error |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    by_key = {(r["model"], r["layers"], r["tokens"], r["batch"], r["config"]): r for r in result["records"]}
    depth = {
        r["model"]: max(o["layers"] for o in result["records"] if o["model"] == r["model"]) for r in result["records"]
    }

    def ratio(record: dict[str, Any], other: str, key: str) -> str:
        found = by_key.get((record["model"], record["layers"], record["tokens"], record["batch"], other))
        return "" if found is None else f"{found[key] / record[key]:.2f}"

    order = list(depth)
    rows = sorted(
        result["records"],
        key=lambda r: (-(r["layers"] // depth[r["model"]]), order.index(r["model"]), -r["tokens"], r["batch"]),
    )
    for r in rows:
        times = [
            cell
            for key in ("prefill_ms", "decode_ms")
            for cell in (f"{r[key]:.2f}", ratio(r, "eager", key), ratio(r, "liger", key))
        ]
        error = f"{r['error_vs_fp32']:.1e}" if "error_vs_fp32" in r else ""
        name = r["model"] if r["layers"] == depth[r["model"]] else f"{r['model']}, {r['layers']} layers"
        cells = [name, f"{r['batch']} x {r['tokens']}", label_of(r["config"]), *times, error]
        lines.append(f"| {' | '.join(cells)} |")
    missed = []
    for r in (r for r in rows if r["layers"] == depth[r["model"]]):
        stock, liger = PROMPT_AIMS.get(r["model"], (None, None))
        aims: list[tuple[str, str, str, float | None]] = []
        if r["tokens"] == 8192 and r["config"] == "kernels":
            aims += [("prompt", "eager", "prefill_ms", stock), ("prompt", "liger", "prefill_ms", liger)]
        if r["config"] == "kernels" and r["model"] != "falcon-7b":
            aims.append(("token", "eager", "decode_ms", TOKEN_AIM))
        if r["config"] == "kernels_fp8" and r["tokens"] == 8192:
            aims.append(("prompt in fp8", "eager", "prefill_ms", FP8_AIM))
        for what, other, key, aimed in aims:
            gain = ratio(r, other, key)
            if aimed is not None and gain and float(gain) < aimed:
                missed.append(f"{r['model']}, {r['tokens']} tokens, {what}: {gain} x {label_of(other)}, aim {aimed}")
    behind_aims = [f"Behind the aims: {'; '.join(missed)}.", ""] if missed else []
    kinds = ["GEMM", "attention", "this package", "elementwise"]
    profiled = [r for r in rows if "ms_by_kind" in r]
    by_kind = [
        "Milliseconds of one prompt by kind of kernel (`--profile`):",
        "",
        "| model | tokens | configuration | " + " | ".join(kinds) + " |",
        "|---" * (3 + len(kinds)) + "|",
    ]
    for r in profiled:
        cells = " | ".join(f"{r['ms_by_kind'].get(kind, 0.0):.1f}" for kind in kinds)
        by_kind.append(f"| {r['model']} | {r['batch']} x {r['tokens']} | {label_of(r['config'])} | {cells} |")
    return "\n".join([head, "", *lines, "", *behind_aims, *([*by_kind, ""] if profiled else [])])


def label_of(config: str) -> str:
    return {"eager": "stock", "liger": "Liger"}.get(config, config.replace("_", " + ").replace("+ fp8", "fp8"))


# Of vae.py, which imports diffusers.
AUTOENCODERS = {  # of benchmarks/vae.py
    "ltx090": "LTX-Video 0.9.0",
    "ltx091": "LTX-Video 0.9.1",
    "ltx": "LTX-Video 0.9.5",
    "ltx2": "LTX-2.0",
    "ltx23": "LTX-2.3",
    "wan": "Wan 2.1",
    "wan22": "Wan 2.2",
    "qwen": "Qwen-Image",
}


def _coded(record: dict[str, Any]) -> tuple[Any, ...]:
    """What the configurations of an autoencoder's call have in common."""
    return tuple(record[key] for key in ("half", "model", "frames", "height", "width", "dtype"))


def decoders() -> str:
    """Decoders and encoders of video: docs/vae.md."""
    lines = [
        "| autoencoder, video | configuration | ms | x stock | peak GiB | rms error |",
        "|---|---|---|---|---|---|",
    ]
    found = [record for record in load("h200-vae")["records"] if "model" in record]
    order = list(AUTOENCODERS)
    records = sorted(found, key=lambda r: (order.index(r["model"]), r["half"], r["frames"], r["height"]))
    stock = {_coded(r): r for r in records if r["config"] == "stock"}
    for r in records:
        half, *_, dtype = _coded(r)
        coder = {"decode": "decoder", "encode": "encoder"}[half]
        video = f"{AUTOENCODERS[r['model']]} {coder}, {r['frames']} frames {r['height']}x{r['width']}, {dtype}"
        gain = stock[_coded(r)][f"{half}_ms"] / r[f"{half}_ms"]
        error = f"{r['rms_vs_fp32']:.2e}" if "rms_vs_fp32" in r else ""
        config = {"compile": "torch.compile", "kernels": "**this package**"}.get(r["config"], r["config"])
        lines.append(f"| {video} | {config} | {r[f'{half}_ms']:.1f} | {gain:.2f} | {r['peak_gb']:.2f} | {error} |")
    return "\n".join([*lines, ""])


def video_ops() -> str:
    """Ops between convolutions: docs/vae.md."""
    lines = ["| op | channels x frames x height x width | µs | x copy | plain torch |", "|---|---|---|---|---|"]
    for r in load("h200-vae")["records"]:
        if "op" in r:
            times = f"{r['kernels_us']:.0f} | {r['of_a_copy']:.2f} | {r['torch_us']:.0f}"
            lines.append(f"| {r['op']} | {r['shape']} | {times} |")
    return "\n".join([*lines, ""])


# The columns of benchmarks/attention.py, and its shapes.
ATTENTION = {
    "ours": "this package",
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN",
    "flash2": "torch's flash attention",
}
ATTENTION_SHAPES = {
    **{model: title for model, (title, _) in MODELS.items()},
    "ltx49": "LTX-Video 2B, 49 frames",
    "ltx161": "LTX-Video 2B, 161 frames",
    "cog": MODELS["cogvideox"][0],
    "few64": "few queries",
    "few128": "few queries",
    "few64_8": "few queries, eight samples",
    "few128_8": "few queries, eight samples",
    "ltx2_audio": "LTX-2, sound to video",
    "ltx2_video": "LTX-2, video to sound",
    "ltx2_audio_text": "LTX-2, sound to prompt",
    "ltx2_text": "LTX-2, video to prompt",
    "ltx13b_text": "LTX-Video 13B, video to prompt",
    "wan_text": "Wan 2.1 14B, video to prompt",
    "wan_image": "Wan 2.1 14B, video to image",
}


def _between(values: Iterable[float]) -> str:
    """The range of some factors; one figure where they are alike."""
    ordered = sorted(values)
    return " to ".join(dict.fromkeys(f"{value:.2f}" for value in (ordered[0], ordered[-1])))


def _gains(records: list[dict[str, Any]]) -> str:
    """How attention compares with the others, by width of the heads."""
    sentences = []
    for width in sorted({r["shape"][3] for r in records}):
        ms = [r["ms"] for r in records if r["shape"][3] == width]
        others = [
            f"{_between(times[name] / times['ours'] for times in ms)} times as fast as {ATTENTION[name]}"
            for name in ATTENTION
            if name != "ours" and all(name in times for times in ms)
        ]
        sentences.append(f"With heads of {width} columns the kernel is {' and '.join(others)}.")
    return " ".join(sentences)


def attention_speed() -> str:
    """Attention beside torch's backends, with masks, and of few queries."""
    result = load("h200-attention")
    plain = [r for r in result["records"] if "tflops" in r]
    columns = [name for name in ATTENTION if any(name in r["ms"] for r in plain)]
    lines = [
        f"One {result['meta']['device']}, torch {result['meta']['torch']}, bf16, random normal inputs, in ms "
        "(`python benchmarks/attention.py`, [h200-attention.json](../benchmarks/results/h200-attention.json)). "
        f"{result['meta'].get('note', '')}".rstrip(),
        "",
        f"| | B, S, heads, D | {' | '.join(ATTENTION[name] for name in columns)} | TFLOP/s | over cuDNN |",
        "|---" * (len(columns) + 4) + "|",
    ]
    for r in plain:
        cells = " | ".join(f"{r['ms'][name]:.3f}" for name in columns)
        over = r["ms"]["cudnn"] / r["ms"]["ours"]
        lines.append(
            f"| {ATTENTION_SHAPES[r['name']]} | {', '.join(map(str, r['shape']))} | {cells} | {r['tflops']['ours']} | "
            f"{over:.2f} x |"
        )
    masked = [r for r in result["records"] if r["mask"] == "keys"]
    ways = ("ours", "ours_lengths")
    lines += [
        "",
        _gains(plain),
        "",
        "With the last 40 keys left out, by a bool mask or by key lengths, beside attention to the other keys alone:",
        "",
        "| | mask | key lengths | the other keys alone | torch with the mask |",
        "|---|---|---|---|---|",
    ]
    for r in masked:
        cells = " | ".join(f"{r['ms'][name]:.3f}" for name in (*ways, "ours_valid", "default"))
        lines.append(f"| {ATTENTION_SHAPES[r['name']]} | {cells} |")
    lines += [
        "",
        "With a mask or with lengths the kernel takes "
        f"{_between(r['ms'][way] / r['ms']['ours_valid'] for r in masked for way in ways)} times as long as for the "
        "other keys alone. torch with the mask takes "
        f"{_between(r['ms']['default'] / r['ms']['ours'] for r in masked)} times as long as the kernel with the mask.",
    ]
    cross = [r for r in result["records"] if "keys" in r]
    lines += [
        "",
        "Few queries to many keys, and cross-attentions:",
        "",
        f"| | B, S, heads, D | keys | {' | '.join(ATTENTION[c] for c in columns)} |",
        "|---" * (len(columns) + 3) + "|",
    ]
    for r in cross:
        if r["mask"] is None:
            cells = " | ".join(f"{r['ms'][name]:.3f}" for name in columns)
            shape = ", ".join(map(str, r["shape"]))
            lines.append(f"| {ATTENTION_SHAPES[r['name']]} | {shape} | {r['keys']} | {cells} |")
    lines += [
        "",
        "With zeros added to the scores of the keys, as LTX-2 and LTX-Video do for a prompt without padding:",
        "",
        "| | this package | torch |",
        "|---|---|---|",
    ]
    for r in cross:
        if r["mask"] == "addends":
            lines.append(f"| {ATTENTION_SHAPES[r['name']]} | {r['ms']['ours']:.3f} | {r['ms']['default']:.3f} |")
    halves = [r for r in result["records"] if r.get("dtype") == "float16"]
    if halves:
        lines += [
            "",
            "In float16:",
            "",
            f"| | B, S, heads, D | {' | '.join(ATTENTION[c] for c in columns)} |",
            "|---" * (len(columns) + 2) + "|",
        ]
    for r in halves:
        cells = " | ".join(f"{r['ms'][name]:.3f}" for name in columns)
        lines.append(f"| {ATTENTION_SHAPES[r['name']]} | {', '.join(map(str, r['shape']))} | {cells} |")
    return "\n".join([*lines, ""])


def attention_error() -> str:
    """The errors of attention and of torch's backends, by kind of input."""
    result = load("h200-attention")
    shown_names = ("ltx49", "flux")
    records = [r for r in result["records"] if "err" in r and r["name"] in shown_names]
    columns = [name for name in ATTENTION if all(name in r["err"]["normal"] for r in records)]
    lines = [
        "Relative L2 error against float64. Peaked: queries and keys of standard deviation 2. Outliers: every 16th "
        "channel eight times as large. Copied keys: 40 times the queries as keys.",
        "",
        f"| | inputs | {' | '.join(ATTENTION[name] for name in columns)} |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for r in records:
        for kind, err in r["err"].items():
            errors = " | ".join(f"{err[name]:.2e}" for name in columns)
            lines.append(f"| {ATTENTION_SHAPES[r['name']]}, heads of {r['shape'][3]} | {kind} | {errors} |")
    return "\n".join([*lines, ""])


HOST_MODELS = {"ltx": "LTX-Video 2B", "flux": "FLUX.1", "wan": "Wan 1.3B", "qwen": "Qwen-Image"}


def host_times() -> str:
    """What Python and torch take to launch a step, with recorded calls and before there were any."""
    result, before = load("h200-host"), load("h200-host-start")
    configs = ("baseline", "kernels", "kernels_fp8")
    by_config = {(r["model"], r["config"]): r for r in result["records"] if "model" in r}
    earlier = {r["config"]: r["ratio_to_baseline"] for r in before["records"]}
    lines = [
        "The host's time to launch one step, without waiting for the GPU: one "
        f"{result['meta']['device']}, models of all their blocks and few columns, in ms "
        "([h200-host.json](../benchmarks/results/h200-host.json)):",
        "",
        "| blocks of | " + " | ".join(CONFIGS[config] for config in configs) + " |",
        "|---" * (len(configs) + 1) + "|",
    ]
    for model, title in HOST_MODELS.items():
        records = [by_config[model, config] for config in configs]
        cells = [f"{r['host_ms']:.1f} ({r['ratio_to_baseline']:.2f} x)" for r in records]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    lines += [
        "",
        f"Before calls were recorded, LTX-Video's step took {earlier['kernels']:.2f} times diffusers' time in bf16 and "
        f"{earlier['kernels_fp8']:.2f} times in fp8 "
        "([h200-host-start.json](../benchmarks/results/h200-host-start.json)).",
    ]
    return "\n".join([*lines, ""])


def attention_int8() -> str:
    """Time and error of attention in 8 bits beside bf16: the op's, and of whole models."""
    result = load("h200-attention")
    records = [r for r in result["records"] if "ours_8bit" in r.get("ms", {})]
    kinds = list(records[0]["err"]) if records else []
    lines = [
        f"One {result['meta']['device']}, bf16, in ms "
        "([h200-attention.json](../benchmarks/results/h200-attention.json)). "
        "The time of int8 includes its quantising. Errors are relative L2 errors against float64, first of bf16 and "
        "then of int8, on inputs as above.",
        "",
        f"| | B, S, heads, D | bf16 | int8 | gain | {' | '.join(kinds)} |",
        "|---" * (5 + len(kinds)) + "|",
    ]
    for r in records:
        ours, int8 = r["ms"]["ours"], r["ms"]["ours_8bit"]
        errors = " | ".join(f"{r['err'][kind]['ours']:.1e}, {r['err'][kind]['ours_8bit']:.1e}" for kind in kinds)
        lines.append(
            f"| {ATTENTION_SHAPES[r['name']]} | {', '.join(map(str, r['shape']))} | {ours:.3f} | {int8:.3f} | "
            f"{ours / int8:.2f} x | {errors} |"
        )
    others = [r for r in result["records"] if "cudnn_fp8" in r["ms"]]
    if others:
        lines += [
            "",
            "cuDNN with e4m3 inputs and scales of one, in ms without the time of its cast, and its errors on the same "
            "inputs:",
            "",
            f"| | B, S, heads, D | cuDNN fp8 | this package, bf16 | this package, int8 | {' | '.join(kinds)} |",
            "|---" * (5 + len(kinds)) + "|",
        ]
    for r in others:
        ms = r["ms"]
        int8 = f"{ms['ours_8bit']:.3f}" if "ours_8bit" in ms else ""
        errors = " | ".join(f"{r['err'][kind]['cudnn_fp8']:.1e}" for kind in kinds)
        lines.append(
            f"| {ATTENTION_SHAPES[r['name']]} | {', '.join(map(str, r['shape']))} | {ms['cudnn_fp8']:.3f} | "
            f"{ms['ours']:.3f} | {int8} | {errors} |"
        )
    models = load("h200-models")["records"]
    pairs = [("kernels", "kernels_int8"), ("kernels_fp8", "kernels_fp8_int8")]
    found = {(r["model"], r["config"]): r for r in models}
    rows = []
    for model, (title, _) in MODELS.items():
        for config, int8 in pairs:
            if (model, int8) not in found or (model, config) not in found:
                continue
            one, other = found[model, config], found[model, int8]
            errors = [
                ", ".join(f"{r[key]:.1e}" for r in (one, other) if key in r)
                for key in ("error_vs_fp32", "loop_error_vs_fp32")
            ]
            rows.append(
                f"| {title} | {CONFIGS[config]} | {one['step_ms']:.1f} | {other['step_ms']:.1f} | "
                f"{one['step_ms'] / other['step_ms']:.2f} x | {' | '.join(errors)} |"
            )
    if rows:
        lines += [
            "",
            'Whole models, without and with `attention="int8"`, ms of a step '
            "([h200-models.json](../benchmarks/results/h200-models.json)). The errors are relative L2 errors against "
            "float32, of one forward and of the latents after 8 steps:",
            "",
            "| | | without | with | gain | forward | 8 steps |",
            "|---" * 7 + "|",
            *rows,
        ]
    return "\n".join([*lines, ""])


def attention_of_few_queries() -> str:
    """Few queries of many keys: the kernel, and what was tried in its place."""
    records = load("h200-attention-few-tuning")["records"]
    columns = list(records[0]["ms"])
    titles = {"ours": "this package", "cudnn": "cuDNN", "copy": "a copy of key and value"}
    lines = [
        "In ms ([h200-attention-few-tuning.json](../benchmarks/results/h200-attention-few-tuning.json)):",
        "",
        f"| B, queries, heads, D | keys | {' | '.join(titles.get(column, column) for column in columns)} |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for r in records:
        cells = " | ".join(f"{r['ms'][column]:.3f}" for column in columns)
        lines.append(f"| {', '.join(map(str, r['shape']))} | {r['keys']} | {cells} |")
    return "\n".join([*lines, ""])


def attention_int8_parts() -> str:
    """What attention in 8 bits spends on its quantising."""
    lines = [
        "In µs ([h200-attention-parts-tuning.json](../benchmarks/results/h200-attention-parts-tuning.json)):",
        "",
        "| | B, S, heads, D | mean of the keys | query and key as integers | attention | quantising of the whole |",
        "|---|---|---|---|---|---|",
    ]
    for r in load("h200-attention-parts-tuning")["records"]:
        us = r["us"]
        cells = " | ".join(f"{us[name]:.1f}" for name in ("sample_keys", "quantise_rows", "hopper_attention"))
        share = 1 - us["hopper_attention"] / us["all"]
        lines.append(f"| {ATTENTION_SHAPES[r['name']]} | {', '.join(map(str, r['shape']))} | {cells} | {share:.1%} |")
    return "\n".join([*lines, ""])


def attention_in_8_bits() -> str:
    """Time and error of trials with 8-bit integers, beside the attention that the package has."""
    result = load("h200-attention-8bit-tuning")
    parts = result["parts_us"]
    lines = [
        f"One {result['meta']['device']}, bf16, random normal inputs, in ms, trial and kernel in the same run "
        "([h200-attention-8bit-tuning.json](../benchmarks/results/h200-attention-8bit-tuning.json)).",
        "",
        "All products of integers:",
        "",
        "| B, S, heads, D | this package | int8 | gain |",
        "|---|---|---|---|",
    ]
    for r in result["records"]:
        ours, int8 = r["ms"]["ours"], r["ms"]["int8"]
        lines.append(f"| {', '.join(map(str, r['shape']))} | {ours:.3f} | {int8:.3f} | {ours / int8:.2f} x |")
    lines += [
        "",
        f"The times of int8 include quantising: with {parts['tokens']} tokens {parts['quantising']} µs, beside "
        f"{parts['attention']} µs of attention.",
        "",
        "Relative L2 error against float64 with 4608 tokens, inputs as above:",
        "",
        "| inputs | this package | int8 |",
        "|---|---|---|",
        *(f"| {kind} | {err['ours']:.2e} | {err['int8']:.2e} |" for kind, err in result["err"].items()),
    ]
    lines += [
        "",
        "Scores of integers, by what the exponentials are relative to; `attention` is without the quantising:",
        "",
        "| B, S, heads, D | relative to | this package | int8 scores | attention | gain | gain of attention |",
        "|---" * 7 + "|",
    ]
    for trial in result["scores"]:
        for r in trial["records"]:
            ours, *parts_ms = (r["ms"][name] for name in ("ours", "int8_scores", "attention"))
            cells = " | ".join([f"{x:.3f}" for x in (ours, *parts_ms)] + [f"{ours / x:.2f} x" for x in parts_ms])
            lines.append(f"| {', '.join(map(str, r['shape']))} | {trial['weights']} | {cells} |")
    names = [trial["weights"] for trial in result["scores"]]
    lines += [
        "",
        "Their relative L2 error, by what the exponentials are relative to:",
        "",
        f"| inputs | this package | {' | '.join(names)} |",
        "|---" * (len(names) + 2) + "|",
    ]
    for kind, err in result["scores"][0]["err"].items():
        errors = " | ".join(f"{trial['err'][kind]['int8_scores']:.2e}" for trial in result["scores"])
        lines.append(f"| {kind} | {err['ours']:.2e} | {errors} |")
    recipes = list(result["recipes"]["normal"])
    lines += [
        "",
        "The error of recipes alone, computed in float32 by plain torch on a CPU:",
        "",
        f"| inputs | {' | '.join(recipes)} |",
        "|---" * (len(recipes) + 1) + "|",
    ]
    for kind, err in result["recipes"].items():
        lines.append(f"| {kind} | {' | '.join(f'{err[name]:.2e}' for name in recipes)} |")
    return "\n".join([*lines, ""])


# The models of benchmarks/parallel.py, and the gain over one GPU that a configuration should reach on two.
PARALLEL = {"ltx": "LTX-Video 2B", **{model: title for model, (title, _) in MODELS.items()}}
PARALLEL_AIMS = {(model, "kernels", "ulysses"): aim for model, aim in (("ltx", 1.78), ("ltx13b", 1.85), ("wan", 1.85))}
PARALLEL_MODES = {"ulysses": "Ulysses", "ring": "ring", "guidance": "guidance split"}


def _way(record: dict[str, Any]) -> str:
    configuration, mode = CLIP_CONFIGS[record["config"]], PARALLEL_MODES[record["mode"]]
    return f"{PARALLEL[record['model']]}, {record['shape']} | {configuration} | {mode}"


@dataclass(frozen=True)
class Split:
    """A step on two GPUs, in ms: half of one GPU's step, the exchanges, and the rest.

    The records that model more GPUs take the same exchanges and the same rest; benchmarks/parallel.py has the formula.
    """

    step: float
    alone: float
    rest: float | None

    @property
    def exchanges(self) -> float | None:
        return None if self.rest is None else self.step - self.alone / 2 - self.rest


def _split(records: list[dict[str, Any]], record: dict[str, Any]) -> Split:
    """The parts of a step on two GPUs."""

    def like(*keys: str) -> list[dict[str, Any]]:
        return [r for r in records if all(r.get(key) == record.get(key) for key in ("model", "shape", "config", *keys))]

    (alone,) = [r["step_ms"] for r in like() if r["gpus"] == 1]
    rests = [r["modelled_ms"] - alone / r["gpus"] - r["exchange_ms"] for r in like("mode") if "modelled_ms" in r]
    return Split(record["step_ms"], alone, rests[0] if rests else None)


def two_gpus() -> str:
    """Steps on two GPUs beside one, and what the exchanges take of them: docs/parallel.md."""
    result = load("h200x2-parallel")
    meta, records = result["meta"], result["records"]
    lines = [
        "| model | configuration | mode | one GPU | two GPUs | x one GPU | x stock on two | exchanges | rest | error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    timed = [r for r in records if "step_ms" in r and r["gpus"] == 2]
    stock = {(r["model"], r["mode"]): r["step_ms"] for r in timed if r["config"] == "stock"}
    behind_aims = []
    for r in timed:
        split = _split(records, r)
        gain = split.alone / split.step
        over = f"{stock[r['model'], r['mode']] / split.step:.2f}" if (r["model"], r["mode"]) in stock else ""
        lines.append(
            f"| {_way(r)} | {split.alone:.1f} | {split.step:.1f} | {gain:.2f} | {over} | "
            f"{shown(split.exchanges, 1)} | {shown(split.rest, 1)} | {r['error_vs_one_gpu'] or 0:.1e} |"
        )
        aimed = PARALLEL_AIMS.get((r["model"], r["config"], r["mode"]))
        if aimed and gain < aimed and split.exchanges is not None:
            behind_aims += [
                f"Behind its aim: {PARALLEL[r['model']]} with {CLIP_CONFIGS[r['config']]} under "
                f"{PARALLEL_MODES[r['mode']]} is {gain:.2f} times as fast as on one GPU, and the aim is {aimed}, a "
                f"step of {split.alone / aimed:.1f} ms. Half of one GPU's step is {split.alone / 2:.1f} ms, the "
                f"exchanges take {split.exchanges:.1f} ms, and the rest is {split.rest:.1f} ms. Without the rest the "
                f"step would be {split.alone / (split.alone / 2 + split.exchanges):.2f} times as fast.",
                "",
            ]
    head = (
        f"One forward on {meta['device']} in one host, torch {meta['torch']}, NCCL {meta['nccl']}, diffusers "
        f"{meta['diffusers']}, {meta['dtype']}, random weights, in ms (`python benchmarks/parallel.py`, "
        "[h200x2-parallel.json](../benchmarks/results/h200x2-parallel.json)). LTX-Video has a batch of two, the halves "
        "of guidance. Exchanges: what the exchanges of a step take as bare exchanges of the same bytes. Rest: what "
        "the step takes beyond that and half of one GPU's step. Error: relative distance from the result of one GPU."
    )
    notes = [f"Failed: {what}: `{reason}`" for what, reason in meta["failed"].items()]
    collectives = [
        f"{PARALLEL[r['model']]} with {CLIP_CONFIGS[r['config']]}"
        for r in timed
        if any(one["exchange"] == "all_to_all_single" for one in r["exchanges_by_size"])
    ]
    if collectives:
        notes = [f"Measured with collectives under Ulysses: {', '.join(collectives)}.", "", *notes]
    return "\n".join([head, "", *lines, "", *behind_aims, *notes, *([""] if notes else [])])


def more_gpus() -> str:
    """Steps on four and eight GPUs, by a model of them: docs/parallel.md."""
    records = load("h200x2-parallel")["records"]
    lines = [
        "| model | configuration | mode | GPUs | modelled ms | modelled x one GPU | exchanges of these, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in [r for r in records if "modelled_ms" in r]:
        (alone,) = [
            a["step_ms"]
            for a in records
            if a.get("gpus") == 1 and all(a[key] == r[key] for key in ("model", "shape", "config"))
        ]
        lines.append(
            f"| {_way(r)} | {r['gpus']} | {r['modelled_ms']:.1f} | {alone / r['modelled_ms']:.2f} | "
            f"{r['exchange_ms']:.1f} |"
        )
    return "\n".join([*lines, ""])


def exchanges() -> str:
    """Bare exchanges between two GPUs: docs/parallel.md."""
    of_bytes: dict[int, dict[str, float]] = {}
    for r in load("h200x2-parallel")["records"]:
        if "exchange" in r:
            of_bytes.setdefault(r["bytes"], {})[r["exchange"]] = r["us"]
    names = list(dict.fromkeys(name for of in of_bytes.values() for name in of))
    lines = [
        "| MB that leave a GPU | " + " | ".join(f"`{name}`, µs | GB/s" for name in names) + " |",
        "|---" * (1 + 2 * len(names)) + "|",
    ]
    for size, us in of_bytes.items():
        cells = " | ".join(f"{us[name]:.0f} | {size / us[name] / 1e3:.0f}" for name in names)
        lines.append(f"| {size / 1e6:.0f} | {cells} |")
    return "\n".join([*lines, ""])


def trust() -> str:
    """What tests found: docs/guarantees.md in short."""
    runs = [load("fuzz-h200"), load("fuzz-cpu")]
    calls = ", ".join(f"{len(run['failures'])} of {run['cases']:,} on {run['meta']['device']}" for run in runs)
    tools = load("sanitize-h200")["tools"]
    faults = [process["faults"] for tool in tools.values() for process in tool.values()]
    found = "not all of them ended" if None in faults else sum(faults)
    places = {"cuda": "the CUDA build", "cpu": "the CPU build", "tools": "tools, workflows, docs and examples"}
    planted = {place: load(f"mutations-{name}")["records"] for name, place in places.items()}
    caught = ", ".join(
        f"{sum(bool(r['caught_by']) for r in of)} of {len(of)} in {where}" for where, of in planted.items()
    )
    return (
        f"Random calls that failed: {calls}. Faults that the {len(tools)} tools of compute-sanitizer found, over every "
        f"kernel: {found}. Planted defects that the tests noticed: {caught}.\n"
    )


# What is written where: between <!-- NAME --> and <!-- /NAME -->.
BLOCKS: list[tuple[str, str, Callable[[], str]]] = [
    ("README.md", "figures", figures),
    ("README.md", "supported", supported),
    ("README.md", "trust", trust),
    ("docs/benchmarks.md", "step", step),
    ("docs/benchmarks.md", "ops", ops_table),
    ("docs/benchmarks.md", "files", files),
    ("docs/profiling.md", "profile", profile),
    ("docs/profiling.md", "counters", counters),
    ("docs/optimize.md", "kinds", kinds),
    ("docs/layers.md", "language models", language_models),
    ("docs/models.md", "diffusers", lambda: known_families("diffusers")),
    ("docs/models.md", "transformers", lambda: known_families("transformers")),
    ("docs/models.md", "left", left_models),
    ("docs/models.md", "models", models),
    ("docs/models.md", "kinds", model_kinds),
    ("docs/optimize.md", "clips", clips),
    ("docs/fp8.md", "numerics", numerics),
    ("docs/fp8.md", "products", products),
    ("docs/fp8.md", "left in bf16", left_in_bf16),
    ("docs/fp8.md", "layers", layers),
    ("docs/fp8.md", "family layers", family_layers),
    ("docs/fp8.md", "models", fp8_models),
    ("docs/fp8.md", "loop", loop),
    ("docs/fp8.md", "ops", quantising),
    ("docs/vae.md", "decoders", decoders),
    ("docs/vae.md", "ops", video_ops),
    ("docs/parallel.md", "two GPUs", two_gpus),
    ("docs/parallel.md", "more GPUs", more_gpus),
    ("docs/parallel.md", "exchanges", exchanges),
    ("docs/attention.md", "speed", attention_speed),
    ("docs/attention.md", "error", attention_error),
    ("docs/optimize.md", "host", host_times),
    ("docs/attention.md", "int8", attention_int8),
    ("docs/attention.md", "few queries", attention_of_few_queries),
    ("docs/attention.md", "int8 parts", attention_int8_parts),
    ("docs/attention.md", "8 bits", attention_in_8_bits),
    ("skills/cuda-kernels/SKILL.md", "figures", figures),
    ("skills/cuda-kernels/references/h100-optimization-guide.md", "figures", figures),
    ("skills/cuda-kernels/references/h100-optimization-guide.md", "rows", lambda: skill_ops(SKILL_ROWS)),
    ("skills/cuda-kernels/references/h100-optimization-guide.md", "h100", on_h100),
    ("skills/cuda-kernels/references/diffusers-h100.md", "shapes", lambda: skill_ops(SKILL_SHAPES)),
    ("skills/h100-diffusers-kernels/SKILL.md", "figures", figures),
    ("skills/h100-diffusers-kernels/SKILL.md", "shapes", lambda: skill_ops(SKILL_SHAPES)),
    ("docs/case-study.md", "claim", case_study.claim),
    ("docs/case-study.md", "configurations", lambda: case_study.configurations(CONFIGS)),
    ("docs/case-study.md", "norm", case_study.norm),
    ("docs/case-study.md", "budget", case_study.budget),
    ("docs/case-study.md", "clips", functools.partial(clips, ["ltx"])),
    ("docs/case-study.md", "sources", case_study.sources),
    ("docs/case-study.md", "gaps", case_study.gaps),
]


# ---- Figures in sentences

FIGURE = re.compile(r"(?P<number>[\d.,]+(?:e[-+]?\d+)?)<!-- (?P<file>[\w-]+) (?P<source>[^>]+?) -->")


def _pages() -> list[Path]:
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "skills").rglob("*.md")]
    return sorted(pages)


def _shown(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list) else str(value)


def _record(content: Any, conditions: list[str]) -> Any:
    """The one record that all conditions fit."""
    records = content["records"]
    for condition in conditions:
        key, relation, wanted = re.split("([=~])", condition, maxsplit=1)
        of_key = [(r, _shown(r[key])) for r in records if key in r]
        records = [r for r, value in of_key if (value == wanted if relation == "=" else wanted in value)]
    if len(records) != 1:
        raise ValueError(f"{' '.join(conditions)}: expected one record, got {len(records)}")
    return records[0]


def figure(file: str, source: str) -> float:
    """What a result file says where a figure's comment points; the conditions of the first term hold for all."""
    found = content = load(file)
    result, operator = 1.0, "*"
    for term in re.split(r" ([/*]) ", source):
        if term in ("/", "*"):
            operator = term
            continue
        *conditions, path = shlex.split(term)
        if conditions:
            found = _record(content, conditions)
        if re.fullmatch(r"[\d.]+", path):
            number = float(path)
        else:
            value = found
            for key in path.split("."):
                value = value[int(key)] if isinstance(value, list) else value[key]
            number = float(value)
        result = result / number if operator == "/" else result * number
    return result


def with_figures(text: str) -> str:
    """A page with the digits of each figure as its result file has them, as many as stand there."""

    def written(match: re.Match[str]) -> str:
        number, value = match["number"], figure(match["file"], match["source"])
        mantissa, _, exponent = number.partition("e")
        digits = len(mantissa.partition(".")[2])
        form = f".{digits}e" if exponent else f",.{digits}f" if "," in number else f".{digits}f"
        shown = re.sub(r"e([-+])0?(\d+)", lambda m: f"e{m[1].replace('+', '')}{m[2]}", f"{value:{form}}")
        return match[0].replace(number, shown, 1)

    return FIGURE.sub(written, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if a page is not what the results say")
    arguments = parser.parse_args()
    wanted = {page: page.read_text() for page in _pages()}
    for name, block, make in BLOCKS:
        begin, end = f"<!-- {block} -->\n", f"<!-- /{block} -->"
        before, rest = wanted[REPOSITORY / name].split(begin)
        wanted[REPOSITORY / name] = before + begin + make() + end + rest.split(end, 1)[1]
    wanted = {page: with_figures(text) for page, text in wanted.items()}
    stale = {page: text for page, text in wanted.items() if page.read_text() != text}
    if arguments.check and stale:
        names = ", ".join(str(page.relative_to(REPOSITORY)) for page in stale)
        print(f"{names}: not what benchmarks/results says; run python benchmarks/readme.py")
        return 1
    for page, text in stale.items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
