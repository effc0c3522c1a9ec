"""What Nsight Compute reads while one launch runs: h200-counters.json."""

from __future__ import annotations

from counters import COUNTERS

from pages.writing import block, grid, link, load, text


@block("docs/profiling.md", "counters")
def counters() -> str:
    """A column of counters for each launch."""
    result = load("h200-counters")
    rows = [
        [counter.meaning, *(counter.form.format(record[name]) for record in result["records"])]
        for name, counter in COUNTERS.items()
        if counter.meaning
    ]
    heads = ["counter", *(f"`{record['case'].removesuffix(' bf16')}`" for record in result["records"])]
    return text(
        f"{result['meta']['device']} ({link('h200-counters')}, `python benchmarks/counters.py`):", grid(heads, rows)
    )
