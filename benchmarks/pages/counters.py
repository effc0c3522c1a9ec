"""What Nsight Compute reads while one launch runs: h200-counters.json."""

from counters import COUNTERS

from pages.writing import across, block, grid, link, load, text


@block("docs/profiling.md", "counters")
def counters() -> str:
    """A column of counters for each launch."""
    meta, records = (load("h200-counters")[key] for key in ("meta", "records"))
    head = f"| counter | {across('`@`', (record['case'].removesuffix(' bf16') for record in records))} |"
    shown = {name: (form, meaning) for name, (_, form, meaning) in COUNTERS.items() if meaning}
    rows = [[meaning, *(form.format(record[name]) for record in records)] for name, (form, meaning) in shown.items()]
    return text(f"{meta['device']} ({link('h200-counters')}, `python benchmarks/counters.py`):", grid(head, rows))
