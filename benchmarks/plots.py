"""Draws the results of benchmarks/ops.py, as PNG and SVG beside the JSON:

    python benchmarks/plots.py [benchmarks/results/h200-ops.json]

`<gpu>-ops-floor`: the time of every case over that of a copy of the same bytes, by size. `<gpu>-ops-peers`: how many
times as fast as each peer, family by family (geometric mean, and the range from the worst case to the best).
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
QUANTISED, ATTENTION = "quantised to fp8", "q/k norm + attention to a text"
FAMILIES = {  # how the names of the ops begin
    "plain and residual norms": ("rmsnorm", "layernorm"),
    "norm + modulation": ("adaln",),
    "gated residual (+ norm + modulation)": ("gated_residual",),
    "q/k norm + rotary": ("qk_norm_rope",),
    "rotary": ("apply_rotary", "rope"),
    "GLU and GELU": ("swiglu", "geglu", "gelu"),
    ATTENTION: ("qk_norm_cross_attention",),
    QUANTISED: ("quant",),
}


def family(op: str) -> str:
    return next(name for name, starts in FAMILIES.items() if op.startswith(starts))


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def measured(records: Sequence[dict[str, Any]]) -> list[str]:
    """The families that there are results of."""
    return [name for name in FAMILIES if any(family(record["op"]) == name for record in records)]


def draw_floor(axes: Any, records: Sequence[dict[str, Any]]) -> None:
    for name in measured(records):
        members = [record for record in records if family(record["op"]) == name]
        axes.scatter(
            [record["bytes"] / 1e6 for record in members],
            [record["us"]["ours"] / record["us"]["copy"] for record in members],
            s=18,
            alpha=0.8,
            label=name,
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_ylim(0.9, max(2.0, 1.05 * max(record["us"]["ours"] / record["us"]["copy"] for record in records)))
    axes.set_xlabel("MB read and written")
    axes.set_ylabel("time over that of a copy of the same bytes")
    axes.legend(fontsize=8)


def draw_peers(axes: Any, records: Sequence[dict[str, Any]]) -> None:
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
                axes.barh(y, mean, height, color=f"C{i}", label=label if row == 0 else None)
                axes.plot([min(ratios), max(ratios)], [y, y], color="black", linewidth=0.8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(families)), families, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xticks([0.8, 1, 1.5, 2, 3, 5], ["0.8", "1", "1.5", "2", "3", "5"])
    axes.minorticks_off()
    axes.set_xlabel("the peer's time over this package's (right of 1: this package is faster)")
    axes.legend(fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, nargs="?", default=RESULTS / "h200-ops.json")
    path = parser.parse_args().json
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "ltx-kernels"  # the same file from the same results
    from matplotlib import pyplot

    results = json.loads(path.read_text())
    records = [record for record in results["records"] if record["dtype"] == "bf16"]
    title = f"{results['meta']['device']}, torch {results['meta']['torch']}, bf16"
    for name, draw, size in (("floor", draw_floor, (8, 4.5)), ("peers", draw_peers, (8, 4.5))):
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        axes.set_title(title, fontsize=10)
        draw(axes, records)
        for kind in ("png", "svg"):
            target = path.with_name(f"{path.stem}-{name}.{kind}")
            figure.savefig(target, dpi=150, metadata={"Date": None} if kind == "svg" else None)
            print(target)


if __name__ == "__main__":
    main()
