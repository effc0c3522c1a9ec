"""Draws the results of benchmarks/ops.py, as PNG beside the JSON:

    python benchmarks/plots.py [benchmarks/results/h200-ops.json]

`<gpu>-ops-floor`: the time of every case, and of its fastest peer, divided by the time of a copy of the same bytes,
by size and family. `<gpu>-ops-peers`: how many times as fast as each peer, family by family (geometric mean, and the
range from the worst case to the best).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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

TOP = 2.0  # where the scale of times in copies ends


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


def draw_floor(figure: Any, records: Sequence[dict[str, Any]]) -> None:
    """A panel a family: this package and its fastest peer over a copy, by size; what exceeds the scale, at its top."""
    families = [name for name in measured(records) if name not in PRODUCTS]
    columns = (len(families) + 2) // 2  # one place for the legend
    grid = figure.subplots(2, columns, sharex=True, sharey=True).flatten()
    for axes, name in zip(grid, families):
        members = [record for record in records if family(record["op"]) == name]
        size = [record["bytes"] / 1e6 for record in members]
        for key, style in (("peer", {"marker": "x", "color": "0.6"}), ("ours", {"marker": "o", "color": "C0"})):
            times = [fastest(record)[1] if key == "peer" else record["us"]["ours"] for record in members]
            ratio = [min(us / record["us"]["copy"], TOP) for us, record in zip(times, members, strict=True)]
            axes.scatter(size, ratio, s=14, linewidths=1, clip_on=False, **style)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_title(name, fontsize=8)
        axes.set_xscale("log")
        axes.set_xticks([0.01, 1, 100], ["10 kB", "1 MB", "100 MB"], fontsize=8)
        axes.minorticks_off()
        axes.set_ylim(0.9, TOP)
        axes.set_yticks([1, 1.2, 1.4, 1.6, 1.8, TOP], ["1", "1.2", "1.4", "1.6", "1.8", f"{TOP:g}+"], fontsize=8)
    for axes in grid[len(families) :]:
        axes.axis("off")
    grid[-1].scatter([], [], marker="o", color="C0", label="this package")
    grid[-1].scatter([], [], marker="x", color="0.6", label="the fastest peer")
    grid[-1].legend(loc="center", fontsize=9, frameon=False)
    figure.supxlabel("read and written", fontsize=9)
    figure.supylabel("time over that of a copy of the same bytes", fontsize=9)


def draw_peers(figure: Any, records: Sequence[dict[str, Any]]) -> None:
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
    axes.set_xticks([0.8, 1, 1.5, 2, 3, 5, 10], ["0.8", "1", "1.5", "2", "3", "5", "10"])
    axes.minorticks_off()
    axes.set_xlabel("times as fast as the peer: geometric mean (dot), worst and best case")
    axes.legend(fontsize=8, loc="lower right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, nargs="?", default=RESULTS / "h200-ops.json")
    path = parser.parse_args().json
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = json.loads(path.read_text())
    records = [record for record in results["records"] if record["dtype"] == "bf16"]
    title = f"{results['meta']['device']}, torch {results['meta']['torch']}, bf16"
    for name, draw in (("floor", draw_floor), ("peers", draw_peers)):
        figure = pyplot.figure(figsize=(9, 4.5), layout="constrained")
        figure.suptitle(title, fontsize=10)
        draw(figure, records)
        target = path.with_name(f"{path.stem}-{name}.png")
        figure.savefig(target, dpi=150)
        print(target)


if __name__ == "__main__":
    main()
