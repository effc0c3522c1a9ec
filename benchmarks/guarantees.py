"""Writes the measured parts of docs/guarantees.md from benchmarks/results/*.json.

python benchmarks/guarantees.py [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "tests"))

from mutations import MUTATIONS  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results"
DTYPES = ["float32", "float16", "bfloat16"]
EXPONENTIAL = {"attention", "qk_norm_cross_attention"}  # of sums, so that no number of ulps bounds their errors
MISSING = "Not measured yet.\n"
SUITES = {  # in this order; others, which name themselves, follow
    "tests": "this GPU's code",
    "models": "models",
    "forced": "every kernel and geometry",
    "large": "more than 2³¹ elements",
    "devices": "two GPUs",
}


def load(name: str) -> dict[str, Any] | None:
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]) + "\n"


def source(name: str, meta: dict[str, Any]) -> str:
    commit = str(meta.get("commit") or "unknown")[:9]
    device = f"{meta['devices']} {meta['device']}" if meta.get("devices", 1) > 1 else meta["device"]
    return f"[{name}](../benchmarks/results/{name}): {device}, torch {meta['torch']}, commit {commit}, " + (
        f"{meta['date'][:10]}."
    )


def fuzz(name: str) -> str:
    """Cases, failures, and the largest errors of each op and dtype."""
    result = load(name)
    if result is None:
        return MISSING
    records = {(record["op"], record["dtype"]): record for record in result["records"]}
    rows = []
    for op in sorted({op for op, _ in records}):
        cells = [f"`{op}`"]
        for dtype in DTYPES:
            record = records.get((op, dtype))
            if record is None or record["elements"] == 0:  # fp8: within one rounding, which is checked as it is
                cells.append("" if record is None else "one rounding")
            elif op in EXPONENTIAL:
                cells.append(f"({100 * record['share']:.0f} %)")
            else:
                cells.append(f"{record['ulp']:.2f} ({100 * record['share']:.0f} %)")
        cells.append(str(sum(records[op, dtype]["cases"] for dtype in DTYPES if (op, dtype) in records)))
        rows.append(cells)
    elements = sum(record["elements"] for record in records.values())
    repeats = sum(record["repeats"] for record in records.values())
    different = sum(r["eager_different"] for r in records.values() if r["dtype"] != "float32")
    compared = sum(r["eager_elements"] for r in records.values() if r["dtype"] != "float32")
    found = f"{len(result['failures'])} failure{'s' * (len(result['failures']) != 1)}"
    head = ["op", *(f"{dtype}: ulp (part of the bound)" for dtype in DTYPES), "cases"]
    return (
        f"{source(name, result['meta'])} **{result['cases']} cases, {found}**, "
        f"{elements / 1e6:.0f} million numbers compared with fp64. {repeats} repeated calls, whole or one batch alone, "
        f'gave the same bits. With `rounding="eager"`, {different} of {compared / 1e6:.0f} million 16-bit numbers '
        f"differ from those of plain torch.\n\n{table(head, rows)}"
    )


def sanitizers(name: str) -> str:
    result = load(name)
    if result is None:
        return MISSING
    rows = []
    all_processes = result["meta"]["processes"] // len(result["tools"])
    for tool, processes in result["tools"].items():
        faults = [process["faults"] for process in processes.values()]
        tests = sum(process["tests"] for process in processes.values())
        seconds = [process["seconds"] for process in processes.values()]
        found = "did not finish" if None in faults else str(sum(faults))
        ended, took = f"{len(processes)} of {all_processes}", f"{sum(seconds):.0f} s ({max(seconds):.0f} s)"
        rows.append([tool, ended, str(tests), found, took])
    version, only = result["meta"]["sanitizer"], result["meta"]["only"]
    part = f" **A part of the tests alone** (`-k '{only}'`)." if only else ""
    return (
        f"{source(name, result['meta'])} compute-sanitizer {version}. All four tools: "
        f"{result['meta']['seconds']:.0f} s, beside other tests.{part}\n\n"
    ) + table(["tool", "processes that ended", "tests", "faults", "their time (the longest's)"], rows)


def suites(name: str) -> str:
    result = load(name)
    if result is None:
        return MISSING
    rows = []
    for suite in [*filter(result["suites"].get, SUITES), *sorted(result["suites"].keys() - SUITES.keys())]:
        counts = result["suites"][suite]
        for file, numbers in sorted(counts["files"].items()):
            cells = [str(numbers.get(key, 0)) for key in ("passed", "failed", "skipped")]
            unfinished = ", **which did not finish**" if numbers.get("status", 0) is None else ""
            rows.append([SUITES.get(suite, suite), f"`{file}.py`{unfinished}", *cells])
    seconds = result["meta"]["seconds_of_calls"]
    took = ", ".join(f"{call:.0f} s" for call in seconds)
    head = f"{source(name, result['meta'])} `tests/gpu.py` ran these in {len(seconds)} calls ({took})."
    return f"{head}\n\n" + table(["run", "tests", "passed", "failed", "skipped"], rows)


def mutations() -> str:
    """Each defect with the first test that fails: in CPU sources, in CUDA sources, in what is not compiled."""
    head, rows, counts = ["defect", "planted in"], [[m.defect, f"`{m.file}`"] for m in MUTATIONS], []
    for backend in ("cpu", "cuda", "tools"):
        result = load(f"mutations-{backend}.json") or {"meta": {}, "records": []}
        found = {record["defect"]: record for record in result["records"]}
        planted = [m for m in MUTATIONS if backend in m.backends]
        for mutation, row in zip(MUTATIONS, rows, strict=True):
            test = found.get(mutation.defect, {}).get("caught_by", "not run yet")
            told = f"`{test}`" if test and "test_" in test else test or "**nothing**"
            row.append(told if mutation in planted else "")
        caught = sum(bool(found.get(m.defect, {}).get("caught_by")) for m in planted)
        commits = ", ".join(sorted({re.sub("^([0-9a-f]{9})[0-9a-f]+", r"\1", r["commit"]) for r in found.values()}))
        path = f"mutations-{backend}.json"
        where = (
            f"[{path}](../benchmarks/results/{path}): {result['meta']['device']}, commit {commits}" if found else path
        )
        counts.append(f"- {len(planted)} defects, **{caught} caught**, {where}")
        head.append(f"first test that fails: {backend if backend == 'tools' else backend.upper()}")
    return "\n".join(counts) + "\n\n" + table(head, rows)


PARTS: dict[str, Callable[[], str]] = {
    "fuzz-cpu": lambda: fuzz("fuzz-cpu.json"),
    "fuzz-gpu": lambda: fuzz("fuzz-h200.json"),
    "sanitizers": lambda: sanitizers("sanitize-h200.json"),
    "suites": lambda: suites("suites-h200.json"),
    "mutations": mutations,
}


def written(text: str) -> str:
    """The page with every part made anew."""
    for name, part in PARTS.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        if not re.search(pattern, text, re.DOTALL):
            sys.exit(f"docs/guarantees.md: no part named {name}")
        text = re.sub(pattern, lambda m, part=part: m[1] + part() + m[2], text, flags=re.DOTALL)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if the page is not what the results say")
    arguments = parser.parse_args()
    page = REPOSITORY / "docs" / "guarantees.md"
    text = page.read_text()
    wanted = written(text)
    if arguments.check:
        if wanted != text:
            print("docs/guarantees.md does not match benchmarks/results; run python benchmarks/guarantees.py")
        return int(wanted != text)
    page.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
