"""Draws results as PNG beside their files. benchmarks/readme.py calls it where a picture is of other records.

`h200-ops-floor`: the time of every case, and of its fastest peer, divided by the time of a copy of the same bytes,
by size and family. `h200-ops-peers`: how many times as fast as each peer, family by family (geometric mean, and the
range from the worst case to the best). `h200-ltx`: where the time of a step goes on the GPU. `h200-fp8`: errors, times
and memory of each recipe.
"""

from __future__ import annotations

import hashlib
import json
import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).resolve().parent / "results"
PEERS = {"native": "torch's own op", "compile": "torch.compile", "liger": "Liger", "quack": "QuACK"}
QUANTISED, CROSS_ATTENTION, ATTENTION = "quantised to fp8", "q/k norm + attention to a text", "attention"
FAMILIES = {  # how the names of the ops begin
    "plain and residual norms": ("rmsnorm", "layernorm", "norm_", "norm "),
    "norm + modulation": ("adaln",),
    "gated residual (+ norm + modulation)": ("gated_residual", "residual_norm"),
    "q/k norm + rotary": ("qk_norm_rope",),
    "rotary": ("apply_rotary", "rope"),
    "GLU and GELU": ("swiglu", "geglu", "glu", "gelu", "gate_heads"),
    "group norms and upsampling": ("group_norm", "upsample_nearest"),
    CROSS_ATTENTION: ("qk_norm_cross_attention",),
    ATTENTION: ("attention",),
    QUANTISED: ("quant",),
}
PRODUCTS = (CROSS_ATTENTION, ATTENTION)  # of matrices: no copy is their floor

BOTTOM, TOP = 0.9, 2.0  # where the scale of times in copies ends
# Kinds of kernels, and the time in which no kernel runs.
COLOURS = {"GEMM": "#4C72B0", "attention": "#8172B3", "this package": "#55A868", "elementwise": "#DD8452"}
COLOURS["idle"] = "#CCCCCC"


READ: set[str] = set()  # the files that `load` has read


def load(name: str) -> Any:
    """A file of results."""
    READ.add(name)
    return json.loads((RESULTS / f"{name}.json").read_text())


def case_name(record: dict[str, Any]) -> str:
    return f"{record['op']} {'x'.join(map(str, record['shape']))} {record['dtype']}"


def family(op: str) -> str:
    found = next((name for name, starts in FAMILIES.items() if op.startswith(starts)), None)
    if found is None:
        raise ValueError(f"op: expected one of a family, got {op}: name it in FAMILIES of benchmarks/plots.py")
    return found


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def fastest(record: dict[str, Any]) -> tuple[str, float]:
    """(its name, its time), of the peers."""
    us = record["us"]
    peer = min((key for key in PEERS if us.get(key)), key=us.__getitem__)
    return PEERS[peer], us[peer]


def measured(records: Sequence[dict[str, Any]]) -> list[str]:
    """The families that there are results of."""
    return [name for name in FAMILIES if any(family(record["op"]) == name for record in records)]


def begin_ops(figure: Any, result: dict[str, Any]) -> list[dict[str, Any]]:
    """The cases that a picture of ops shows, below its title."""
    figure.set_size_inches(9, 4.5)
    figure.suptitle(f"{result['meta']['device']}, torch {result['meta']['torch']}, bf16", fontsize=10)
    return [record for record in result["records"] if record["dtype"] == "bf16"]


def draw_floor(figure: Any, result: dict[str, Any]) -> None:
    """A panel a family: this package and its fastest peer over a copy, by size; what exceeds the scale, at its ends."""
    records = begin_ops(figure, result)
    families = [name for name in measured(records) if name not in PRODUCTS]
    columns = (len(families) + 2) // 2  # one place for the legend
    grid = figure.subplots(2, columns, sharex=True, sharey=True).flatten()
    for axes, name in zip(grid, families):
        members = [record for record in records if family(record["op"]) == name]
        size = [record["bytes"] / 1e6 for record in members]
        for key, style in (("peer", {"marker": "x", "color": "0.6"}), ("ours", {"marker": "o", "color": "C0"})):
            times = [fastest(record)[1] if key == "peer" else record["us"]["ours"] for record in members]
            ratio = [
                max(BOTTOM, min(us / record["us"]["copy"], TOP)) for us, record in zip(times, members, strict=True)
            ]
            axes.scatter(size, ratio, s=14, linewidths=1, clip_on=False, **style)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_title(textwrap.fill(name, 24), fontsize=8)
        axes.set_xscale("log")
        axes.set_xticks([0.01, 1, 100], ["10 kB", "1 MB", "100 MB"], fontsize=8)
        axes.minorticks_off()
        axes.set_ylim(BOTTOM, TOP)
        axes.set_yticks([1, 1.2, 1.4, 1.6, 1.8, TOP], ["1", "1.2", "1.4", "1.6", "1.8", f"{TOP:g}+"], fontsize=8)
    for axes in grid[len(families) :]:
        axes.axis("off")
    grid[-1].scatter([], [], marker="o", color="C0", label="this package")
    grid[-1].scatter([], [], marker="x", color="0.6", label="the fastest peer")
    grid[-1].legend(loc="center", fontsize=9, frameon=False)
    figure.supxlabel("read and written", fontsize=9)
    figure.supylabel("time over that of a copy of the same bytes", fontsize=9)


def draw_peers(figure: Any, result: dict[str, Any]) -> None:
    records = begin_ops(figure, result)
    axes = figure.subplots()
    height, families = 0.8 / len(PEERS), measured(records)
    for i, (peer, label) in enumerate(PEERS.items()):
        for row, name in enumerate(families):
            ratios = [
                record["us"][peer] / record["us"]["ours"]
                for record in records
                if family(record["op"]) == name and record["us"].get(peer)
            ]
            if ratios:
                mean, y = geometric_mean(ratios), row + (i - (len(PEERS) - 1) / 2) * height
                axes.plot([min(ratios), max(ratios)], [y, y], color=f"C{i}", linewidth=1.5, alpha=0.5)
                axes.plot(mean, y, "o", markersize=5, color=f"C{i}")
                axes.text(max(ratios) * 1.04, y, f"{mean:.2f}", va="center", fontsize=7, color=f"C{i}")
        axes.plot([], [], "o-", color=f"C{i}", markersize=5, label=label)
    axes.axvline(1, color="black", linewidth=0.8)
    for row in range(1, len(families)):
        axes.axhline(row - 0.5, color="0.9", linewidth=0.8)
    axes.set_yticks(range(len(families)), families, fontsize=8)
    axes.set_ylim(len(families) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.margins(x=0.08)
    axes.set_xticks([0.8, 1, 1.5, 2, 3, 5, 10], ["0.8", "1", "1.5", "2", "3", "5", "10"])
    axes.minorticks_off()
    axes.set_xlabel("times as fast as the peer: geometric mean (dot), worst and best case")
    axes.legend(fontsize=8, loc="lower right")


def draw_steps(figure: Any, result: dict[str, Any]) -> None:
    """A panel for each number of frames: where the time of a step goes on the device, by configuration."""
    meta, records = result["meta"], result["records"]
    sizes = sorted({record["frames"] for record in records})
    figure.set_size_inches((6.4 if len(sizes) < 3 else 4.8) * len(sizes), 3.8)
    panels = figure.subplots(1, len(sizes), squeeze=False)[0]
    for axes, frames in zip(panels, sizes):
        shown = [record for record in records if record["frames"] == frames]
        bottom = [0.0] * len(shown)
        names = [record["config"].replace("_fp8", " fp8").replace("_", "\n+ ") for record in shown]
        for kind, colour in COLOURS.items():
            heights = [record["ms_by_kind"].get(kind, 0.0) for record in shown]
            axes.bar(names, heights, bottom=bottom, color=colour, label=kind, width=0.7)
            bottom = [b + h for b, h in zip(bottom, heights)]
        for i, record in enumerate(shown):
            axes.text(i, bottom[i], f"{record['step_ms']:.1f} ms", ha="center", va="bottom", fontsize=9)
        axes.set_title(f"{frames} frames")
        axes.set_ylim(0, max(bottom) * 1.12)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", labelsize=8)
    panels[0].set_ylabel("ms a denoising step")
    panels[-1].legend(frameon=False, fontsize=8, loc="upper right")
    first = records[0]
    size = f"batch {first['batch']}, {first['height']}x{first['width']}, {meta['dtype']}"
    figure.suptitle(f"LTX-Video 2B, {size}, {meta['device']}", fontsize=10)


def draw_recipes(figure: Any, result: dict[str, Any]) -> None:
    """Errors by step, error against time, and memory, of each recipe in fp8."""
    meta, records = result["meta"], result["records"]
    figure.set_size_inches(15, 4)
    by_step, by_time, memory = figure.subplots(1, 3)
    for record in records:
        steps = range(1, len(record["error_by_step"]) + 1)
        (line,) = by_step.plot(steps, record["error_by_step"], label=record["recipe"])
        color = line.get_color()
        memory.barh(record["recipe"], record["weights_gb"], color=color, alpha=0.35 if "freed_gb" in record else 1)
        if "freed_gb" in record:
            memory.barh(record["recipe"], record["freed_gb"], color=color)
        if "graph_ms" not in record:
            continue
        place = record["graph_ms"], record["latents_error"]
        by_time.plot(*place, "o", color=color)
        by_time.annotate(record["recipe"], place, (5, 4), textcoords="offset points", fontsize=8, rotation=35)
    by_step.set_xlabel("denoising step")
    by_step.set_ylabel("relative error of the latents against float32")
    by_step.set_yscale("log")
    by_step.legend(frameon=False, fontsize=8)
    by_time.margins(x=0.2)
    by_time.set_xlabel("ms a step")
    by_time.set_ylabel("error after the last step")
    by_time.set_ylim(0, 1.25 * max(record["latents_error"] for record in records))
    memory.set_xlabel("GiB of weights; pale: unless the stock ones are freed")
    memory.invert_yaxis()
    for axes in (by_step, by_time, memory):
        axes.spines[["top", "right"]].set_visible(False)
    clip = f"{meta['frames']} frames of {meta['height']}x{meta['width']}, {meta['steps']} steps"
    figure.suptitle(f"LTX-Video, {clip}, {meta['device']}", fontsize=10)


class Picture(NamedTuple):
    """What a PNG beside the result files shows."""

    file: str
    draw: Callable[[Any, dict[str, Any]], None]


PNGS = {
    "h200-ops-floor": Picture("h200-ops", draw_floor),
    "h200-ops-peers": Picture("h200-ops", draw_peers),
    "h200-ltx": Picture("h200-ltx", draw_steps),
    "h200-fp8": Picture("h200-fp8", draw_recipes),
}


def digest(result: dict[str, Any]) -> str:
    """A name of what a picture shows and of this file, which draws it. Its PNG has it as its description."""
    return hashlib.sha256((json.dumps(result) + Path(__file__).read_text()).encode()).hexdigest()[:16]


def outdated() -> list[str]:
    """The pictures that are missing, show something else than their files have, or were drawn in another way."""
    return [name for name, one in PNGS.items() if _description(name) != digest(load(one.file))]


def _description(name: str) -> str | None:
    from PIL import Image

    path = RESULTS / f"{name}.png"
    if not path.exists():
        return None
    with Image.open(path) as image:
        return image.info.get("Description")


def redraw(names: Sequence[str]) -> None:
    """Draws these pictures of the records that their files have."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name in names:
        result = load(PNGS[name].file)
        figure = pyplot.figure(layout="constrained")
        PNGS[name].draw(figure, result)
        figure.savefig(RESULTS / f"{name}.png", dpi=150, metadata={"Description": digest(result)})
        pyplot.close(figure)
