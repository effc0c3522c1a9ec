"""What the scripts that time ops share: cases of benchmarks/op_cases.py timed here, judged, and shown in a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ops
import torch
from op_cases import Make
from result_files import DTYPES, load_package, write
from rich.console import Console
from rich.table import Table
from timing import HostTimer, Timer

# (package, case, inputs) -> (errors by heading, whether they are within the script's bound)
Judge = Callable[[Any, Any, Any], tuple[dict[str, float], bool]]


def in_float64(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def truth_of(ltx: Any, case: Any, inputs: Any) -> list[torch.Tensor]:
    """The results of the package's reference in float64."""
    options = {key: in_float64(value) for key, value in inputs.options.items()}
    return ops.tensors(getattr(ltx.reference, case.function)(*map(in_float64, inputs.arguments), **options))


def time_cases(cases: Sequence[Any], judge: Judge, compiled: bool, path: Path | None) -> int:
    """Time every case beside a copy and its peers, print a table, write the records to `path`; the exit status."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ltx, _ = load_package()
    peers, missing = ops.load_peers() if device == "cuda" else ({}, dict.fromkeys(ops.PEER_MODULES, "needs a GPU"))
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(f"{name}, torch {torch.__version__}, times in us")
    for peer, why in missing.items():
        console.print(f"missing: {peer}: {why}")

    timer = Timer(calls=10) if device == "cuda" else HostTimer()
    rows, records, right = [], [], True
    torch.manual_seed(0)
    with torch.no_grad():
        for case in cases:
            make = Make(DTYPES[case.dtype], device, peers)
            record = ops.measure(ltx, timer, case, make, compiled)
            errors, passed = judge(ltx, case, case.build(make))
            right = right and passed
            records.append({**record, "errors": errors, "passed": passed})
            us = record["us"]
            rows.append([
                case.name,
                *("" if us[column] is None else f"{us[column]:.1f}" for column in ops.COLUMNS),
                f"{record['bytes'] / us['ours'] / 1e3:.0f}",
                f"{us['copy'] / us['ours']:.0%}",
                *(f"{error:.3g}" for error in errors.values()),
                "PASS" if passed else "FAIL",
            ])  # fmt: skip
            for column, why in record.get("failed", {}).items():
                console.print(f"left out: {column} of {case.name}: {why}")
    table = Table("case", *ops.COLUMNS, "GB/s", "of copy", *errors, "")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if path:
        meta = {"device": name, "torch": torch.__version__, "missing": missing}
        write(path, meta, records)
    return 0 if right else 1
