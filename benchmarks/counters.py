"""Reads the GPU's hardware counters while one launch of an op runs, with Nsight Compute (ncu).

    python tools/build.py
    python benchmarks/counters.py [--output PATH]

Each case runs as `benchmarks/ops.py` runs it, and ncu measures its launch number LAUNCH. The clocks stay as they are.
ncu empties the caches before a launch, so `us` is close to the time in the table of ops and not the same. The counters
are in the units of their names: bytes, per cent of what the GPU can do, warps that wait for each instruction issued.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cpu import REPOSITORY, result_file
from cpu import meta as common_meta
from ops import load_package, write

# What is measured, and the part of the kernel's name by which ncu finds its launch.
CASES = {
    "adaln_rmsnorm 2x8064x2048 bf16": "norm_kernel",
    "qk_norm_rope across heads, full table 2x8064x32x64 bf16": "row_kernel",
    "rmsnorm 1x2048 bf16": "norm_kernel",
}
LAUNCH = 20  # the first ones load the kernel
LIMIT = 120  # seconds


@dataclass(frozen=True)
class Counter:
    """A counter: its name in ncu, and how docs/profiling.md shows it; without a meaning it is in the file alone."""

    metric: str
    form: str = ""
    meaning: str = ""


STALLED = "smsp__average_warps_issue_stalled_"
COUNTERS = {
    "us": Counter("gpu__time_duration.sum", "{:.1f} µs", "time"),
    "dram_percent": Counter(
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", "{:.0f} %", "DRAM throughput, of its peak"
    ),
    "sm_percent": Counter(
        "sm__throughput.avg.pct_of_peak_sustained_elapsed", "{:.0f} %", "multiprocessors' throughput, of its peak"
    ),
    "read_bytes": Counter("dram__bytes_read.sum", "{:,.0f}", "bytes read from DRAM"),
    "written_bytes": Counter("dram__bytes_write.sum", "{:,.0f}", "bytes written to DRAM"),
    "registers": Counter("launch__registers_per_thread", "{:.0f}", "registers of a thread"),
    "threads": Counter("launch__block_size"),
    "blocks": Counter("launch__grid_size", "{:,.0f}", "blocks"),
    "waves": Counter("launch__waves_per_multiprocessor", "{:.1f}", "waves"),
    "warps_percent": Counter(
        "sm__warps_active.avg.pct_of_peak_sustained_active", "{:.0f} %", "warps on a multiprocessor, of those it holds"
    ),
    "warps_possible_percent": Counter(
        "sm__maximum_warps_per_active_cycle_pct", "{:.0f} %", "the same, as registers and blocks allow"
    ),
    "issue_percent": Counter("smsp__issue_active.avg.pct_of_peak_sustained_active", "{:.0f} %", "issue slots in use"),
    "memory_stall": Counter(
        f"{STALLED}long_scoreboard_per_issue_active.ratio",
        "{:.1f}",
        "warps that wait for memory, for each instruction issued",
    ),
    "barrier_stall": Counter(
        f"{STALLED}barrier_per_issue_active.ratio", "{:.1f}", "warps that wait at a barrier, likewise"
    ),
    "sectors_per_request": Counter(
        "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
        "{:.1f}",
        "sectors of 32 bytes a load",
    ),
}


def counted(lines: Iterable[str]) -> dict[str, Any]:
    """The counters of the first launch in what `ncu --csv --page raw --print-units base` prints."""
    rows = list(csv.DictReader(line for line in lines if line.startswith('"')))
    if len(rows) < 2:
        raise ValueError("ncu measured no launch")
    launch = rows[1]  # row 0 has the units
    record: dict[str, Any] = {"kernel": launch["Kernel Name"]}
    for name, counter in COUNTERS.items():
        record[name] = float(launch[counter.metric].replace(",", ""))
    record["us"] /= 1000  # ncu's base unit of time is the nanosecond
    return record


def measure(case: str, kernel: str, folder: Path) -> dict[str, Any]:
    log = folder / "ncu.csv"
    ncu = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--log-file", str(log)]
    ncu += ["--metrics", ",".join(counter.metric for counter in COUNTERS.values()), "--kernel-name", f"regex:^{kernel}"]
    ncu += ["--launch-skip", str(LAUNCH), "--launch-count", "1"]
    ops = [sys.executable, str(REPOSITORY / "benchmarks/ops.py"), "--only", case, "--no-compile"]
    command = [*ncu, *ops, "--output", str(folder / "ops.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=os.environ)
    if done.returncode:
        said = (log.read_text() if log.exists() else "") + done.stdout + done.stderr
        sys.exit(f"{case}: ncu failed with status {done.returncode}:\n{said[-2000:]}")
    return {"case": case, **counted(log.read_text().splitlines())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON (default: benchmarks/results/<gpu>-counters.json)")
    options = parser.parse_args()
    if not torch.cuda.is_available() or shutil.which("ncu") is None:
        sys.exit("benchmarks/counters.py needs an NVIDIA GPU and ncu, which comes with the CUDA toolkit")
    _, metadata = load_package()
    output = options.output or result_file("counters")
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for case, kernel in CASES.items():
            records.append(measure(case, kernel, Path(folder)))
            write(output, common_meta(metadata, "cuda"), records)
            print(records[-1], flush=True)
    print(output)


if __name__ == "__main__":
    main()
