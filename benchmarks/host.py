"""Times the host's part of a step: what Python and torch take to launch it, at full depth and tiny width.

    python tools/build.py
    python benchmarks/host.py [--models ltx flux] [--configs baseline kernels kernels_fp8] [--output PATH]

The models have all their blocks, and so few columns and tokens that a device is done with a kernel before the next one
is launched. `host_ms` is the time of a step on the host, without a wait for the device; on a CPU the small products are
in it. `python_calls` and `c_calls` are the function calls of a step that Python's profiler sees: they do not depend on
the machine. The configurations take turns, and a record has the median of the turns and the ratio to the stock model.
Records of ops compare one call with what it replaces, in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from model_shapes import MODELS, Make, Model
from models import make_model, one_tensor
from result_files import DTYPES, kept_records, write
from rich.console import Console
from runs import add_options, begin, empty_table
from steps import label, synchronize

CONFIGS = ("baseline", "kernels", "kernels_fp8")
# Depth as released; heads of the width that this package's attention takes, and no more than the layers need.
TINY = {"num_attention_heads": 4, "attention_head_dim": 64}
DEEP: dict[
    str, tuple[str, dict[str, Any]]
] = {  # the model of benchmarks/model_shapes.py, and what differs from its tiny form
    "ltx": ("ltx13b", {"num_layers": 28, **TINY, "cross_attention_dim": 256}),
    "flux": ("flux", {"num_layers": 19, "num_single_layers": 38, **TINY, "axes_dims_rope": (16, 24, 24)}),
    "wan": ("wan", {"num_layers": 30, **TINY}),
    "qwen": ("qwen", {"num_layers": 60, **TINY, "axes_dims_rope": (16, 24, 24)}),
}
WARM_UP = 5
IDENTITY = ("model", "config", "op")  # what a record measures


def deep(name: str) -> Model:
    """A model of all its blocks and few columns."""
    of, config = DEEP[name]
    return replace(MODELS[of], tiny={**MODELS[of].tiny, **config})


def calls_of(step: Callable[[], Any]) -> Counter[str]:
    """The function calls of a step, of Python and of C."""
    counts: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        counts[event] += 1

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return counts


def host_s(step: Callable[[], Any], device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure(name: str, ltx: ModuleType, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of one model."""
    dtype, device = DTYPES[options.dtype], options.device
    known = deep(name)
    model = known.construct(True, dtype, device)
    inputs = known.inputs(model, Make(dtype, device), **known.tiny_shape)
    steps: dict[str, Callable[[], Any]] = {}
    for config in options.configs:
        made = make_model(config, model, ltx)
        steps[config] = lambda made=made: one_tensor(made(**inputs, return_dict=False))
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    times: dict[str, list[float]] = {config: [] for config in steps}
    for _ in range(options.rounds):
        for config, step in steps.items():
            times[config].append(host_s(step, device))
    records = []
    for config, step in steps.items():
        counts = calls_of(step)
        record = {
            "model": name,
            "config": config,
            "host_ms": round(statistics.median(times[config]) * 1e3, 3),
            "least_ms": round(min(times[config]) * 1e3, 3),
            "python_calls": counts["call"],
            "c_calls": counts["c_call"],
        }
        if "baseline" in times:
            ratios = [mine / stock for mine, stock in zip(times[config], times["baseline"])]
            record["ratio_to_baseline"] = round(statistics.median(ratios), 3)
        records.append(record)
    return records


def op_calls(
    ltx: ModuleType, dtype: torch.dtype, device: str
) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """(one call of ours, what it replaces) by name, on few small rows."""
    width, heads = 256, 4
    x, residual = torch.randn(2, 1, 4, width, dtype=dtype, device=device)
    weight = torch.ones(width, dtype=dtype, device=device)
    scale, shift, gate = torch.randn(3, 1, 1, width, dtype=dtype, device=device)
    table = torch.randn(3, width, dtype=dtype, device=device)
    query, key = torch.randn(2, 1, 4, heads, width // heads, dtype=dtype, device=device)
    cos, sin = torch.randn(2, 1, 4, width // 2, device=device)

    def stock_adaln() -> torch.Tensor:
        return F.rms_norm(x, (width,), None, 1e-6) * (1 + (table[0] + scale)) + (table[1] + shift)

    def stock_residual() -> torch.Tensor:
        h = residual + x * (table[2] + gate)
        return F.rms_norm(h, (width,), None, 1e-6) * (1 + (table[0] + scale)) + (table[1] + shift)

    tables = {"scale_table": table[0], "shift_table": table[1]}
    return {
        "rmsnorm": (lambda: ltx.rmsnorm(x, weight, 1e-6), lambda: F.rms_norm(x, (width,), weight, 1e-6)),
        "adaln_rmsnorm": (lambda: ltx.adaln_rmsnorm(x, None, scale, shift, 1e-6, **tables), stock_adaln),
        "gated_residual_adaln_rmsnorm": (
            lambda: ltx.gated_residual_adaln_rmsnorm(
                x, residual, gate, None, scale, shift, 1e-6, gate_table=table[2], **tables
            ),
            stock_residual,
        ),
        "qk_norm_rope": (
            lambda: ltx.qk_norm_rope(query, key, weight, weight, cos, sin, 1e-6, across_heads=True),
            lambda: [F.rms_norm(t.flatten(-2), (width,), weight, 1e-6) for t in (query, key)],
        ),
        "gelu": (lambda: ltx.gelu(x, approximate="tanh"), lambda: F.gelu(x, approximate="tanh")),
    }


def measure_ops(ltx: ModuleType, options: argparse.Namespace, calls: int = 200) -> list[dict[str, Any]]:
    records = []
    for name, (ours, stock) in op_calls(ltx, DTYPES[options.dtype], options.device).items():
        us: dict[str, list[float]] = {"ours": [], "stock": []}
        for _ in range(options.rounds):
            for which, call in (("ours", ours), ("stock", stock)):
                synchronize(options.device)
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                us[which].append((time.perf_counter() - start) / calls * 1e6)
        found = {f"{which}_us": round(statistics.median(samples), 2) for which, samples in us.items()}
        records.append({"op": name, **found})
    return records


def print_tables(records: list[dict[str, Any]], console: Console) -> None:
    for key, title in (("model", "A step on the host"), ("op", "A call on the host")):
        shown = [record for record in records if key in record]
        if not shown:
            continue
        columns = [column.replace("_", " ") for column in shown[0]]
        texts = 2 if key == "model" else 1
        table = empty_table(title, columns[:texts], columns[texts:])
        for record in shown:
            table.add_row(*(label(str(value)) if name == "config" else str(value) for name, value in record.items()))
        console.print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=DEEP, default=["ltx", "flux"], help="(default: ltx flux)")
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS), help="(default: all)")
    parser.add_argument("--no-ops", action="store_true", help="whole models alone")
    parser.add_argument("--rounds", type=int, default=30, help="timed steps of a configuration (default: 30)")
    add_options(parser, "host")
    options = parser.parse_args(arguments)
    ltx, output, meta, console = begin("host", options, dtype=options.dtype, rounds=options.rounds)
    records: list[dict[str, Any]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the small products of a CPU would wait for threads
    try:
        with torch.no_grad():
            for model in options.models:
                records += measure(model, ltx, options)
                write(output, meta, kept_records(output, meta, records, IDENTITY))
            if not options.no_ops:
                records += measure_ops(ltx, options)
                write(output, meta, kept_records(output, meta, records, IDENTITY))
    finally:
        torch.set_num_threads(threads)
    print_tables(records, console)
    console.print(str(output), highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
