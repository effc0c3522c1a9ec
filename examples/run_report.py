"""How the examples that time a pipeline end: the report of `optimize`, a table, the files, and what failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table


def of_report(report: Any) -> dict[str, Any] | None:
    """A report, for JSON; None without one."""
    if report is None:
        return None
    return {
        "replaced": replaced(report),
        "left_alone": report.left_alone,
        "notes": report.notes,
        "text": str(report),
    }


def ran(report: dict[str, Any]) -> bool:
    """Whether the package's ops did anything; a replaced module that never ran them says nothing."""
    return any(site["calls"] + site["traces"] for site in report["replaced"] if site["ops"])


def failed(error: Exception, console: Console, memory: str) -> int:
    """Prints why nothing was made; the exit status.

    memory: What takes less memory.
    """
    console.print(f"error: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
    if isinstance(error, torch.OutOfMemoryError):
        console.print(f"{memory} take less memory.", highlight=False)
    return 1


def finished(result: dict[str, Any], table: Table, console: Console, json_path: Path | None, note: str = "") -> int:
    """Prints a run's report, its table and its files, and writes all of it to `json_path`; the exit status."""
    report, files = result["report"], list(result["files"])
    if report:
        console.print(f"\n{report['text']}", highlight=False, soft_wrap=True, markup=False)
    console.print(table)
    if json_path:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(result, indent=2) + "\n")
        files.append(str(json_path))
    for path in files:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True, markup=False)
    if note:
        console.print(note, highlight=False)
    if report and not ran(report):
        console.print("fault: none of the package's ops ran; the report says why", style="red", highlight=False)
        return 1
    return 0


def replaced(report: Any) -> list[dict[str, Any]]:
    """The sites of a report, for JSON."""
    return [
        {
            "class": site.class_name,
            "modules": site.modules,
            "calls": site.calls,
            "traces": site.traces,
            "fallbacks": dict(site.fallbacks),
            "ops": list(site.ops),
        }
        for site in report.sites
    ]
