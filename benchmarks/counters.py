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
from pathlib import Path
from typing import Any

import torch
from result_files import REPOSITORY, common_meta, load_package, result_file, write

# What is measured, and the part of the kernel's name by which ncu finds its launch.
CASES = {
    "adaln_rmsnorm 2x8064x2048 bf16": "norm_kernel",
    "qk_norm_rope across heads, full table 2x8064x32x64 bf16": "row_kernel",
    "rmsnorm 1x2048 bf16": "norm_kernel",
}
LAUNCH = 20  # the first ones load the kernel
LIMIT = 120  # seconds
ELAPSED, ACTIVE = "pct_of_peak_sustained_elapsed", "pct_of_peak_sustained_active"
STALLED, PER_ISSUE = "smsp__average_warps_issue_stalled", "per_issue_active.ratio"
# For each counter its name in ncu, and how docs/profiling.md writes it and what it means; one without a meaning is not
# shown there.
COUNTERS = {
    "us": ("gpu__time_duration.sum", "{:.1f} µs", "time"),
    "dram_percent": (f"gpu__dram_throughput.avg.{ELAPSED}", "{:.0f} %", "DRAM throughput, of its peak"),
    "sm_percent": (f"sm__throughput.avg.{ELAPSED}", "{:.0f} %", "multiprocessors' throughput, of its peak"),
    "read_bytes": ("dram__bytes_read.sum", "{:,.0f}", "bytes read from DRAM"),
    "written_bytes": ("dram__bytes_write.sum", "{:,.0f}", "bytes written to DRAM"),
    "registers": ("launch__registers_per_thread", "{:.0f}", "registers of a thread"),
    "threads": ("launch__block_size", "", ""),
    "blocks": ("launch__grid_size", "{:,.0f}", "blocks"),
    "waves": ("launch__waves_per_multiprocessor", "{:.1f}", "waves"),
    "warps_percent": (
        f"sm__warps_active.avg.{ACTIVE}",
        "{:.0f} %",
        "warps on a multiprocessor, of those it holds",
    ),
    "warps_possible_percent": (
        "sm__maximum_warps_per_active_cycle_pct",
        "{:.0f} %",
        "the same, as registers and blocks allow",
    ),
    "issue_percent": (f"smsp__issue_active.avg.{ACTIVE}", "{:.0f} %", "issue slots in use"),
    "memory_stall": (
        f"{STALLED}_long_scoreboard_{PER_ISSUE}",
        "{:.1f}",
        "warps that wait for memory, for each instruction issued",
    ),
    "barrier_stall": (f"{STALLED}_barrier_{PER_ISSUE}", "{:.1f}", "warps that wait at a barrier, likewise"),
    "sectors_per_request": (
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
    for name, (metric, *_) in COUNTERS.items():
        record[name] = float(launch[metric].replace(",", ""))
    record["us"] /= 1000  # ncu's base unit of time is the nanosecond
    return record


def measure(case: str, kernel: str, folder: Path) -> dict[str, Any]:
    log = folder / "ncu.csv"
    ncu = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--log-file", str(log)]
    ncu += ["--metrics", ",".join(metric for metric, *_ in COUNTERS.values()), "--kernel-name", f"regex:^{kernel}"]
    ncu += ["--launch-skip", str(LAUNCH), "--launch-count", "1"]
    ops = [sys.executable, str(REPOSITORY / "benchmarks/ops.py"), "--cases", case, "--no-compile"]
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
