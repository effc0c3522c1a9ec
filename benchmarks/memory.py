"""Measures the peak memory of one forward, by model, configuration and offload mode, with random weights.

    python tools/build.py
    python benchmarks/memory.py [--models flux wan] [--offload none blocks] [--tiny] [--output PATH]

`peak_gb` is the most that the GPU held while a fifth forward ran, those before having set up what stays and recorded
calls, and `step_ms` its time; on a CPU both are left out. `moved_gb` is what an offload brings to the GPU in a
forward: all parameters and buffers. `host_gb` is what waits in the host's memory beside them: the stock weights of
quantised layers. A card needs RESERVE_GB beside the peak for everything else.

In fp8 without an offload, `optimize_s` and `restore_s` are the seconds of these calls on a model that is on the GPU,
and `optimize_peak_gb` and `restore_peak_gb` the most that it held meanwhile. "kernels_fp8" is the default,
which copies the stock weights of quantised layers to the host. "kernels_fp8_beside" leaves them on the GPU.
"kernels_fp8_low" is `optimize(memory="low")`.

With `--blocks` a group offload is measured with the first blocks alone. With all blocks the peak is the same, since the
GPU never holds more than two groups. Time, `moved_gb` and `host_gb` are left out of these records.

The VAE and the text encoder are not part of it: an offload moves them away. The file is written after each model, and
keeps what is not measured again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import diffusers
import torch
from model_shapes import MODELS, Make
from models import first_blocks
from result_files import DTYPES, earlier_records, of_the_run, write
from rich.console import Console
from runs import add_options, begin, empty_table
from steps import LOW, first_line, free_memory, label
from torch import nn

BESIDE = "kernels_fp8_beside"
CONFIGS = ("baseline", "kernels", "kernels_fp8", LOW, BESIDE)
FORWARDS = 5  # the last one counts
RESERVE_GB = 1.5  # the CUDA context, the allocator's gaps and what the desktop takes


def offload(model: nn.Module, mode: str, device: str) -> None:
    """Puts a model that is in the host's memory on its way to the device."""
    if mode == "none":
        model.to(device)
        return
    if mode == "model":
        from accelerate import cpu_offload_with_hook

        cpu_offload_with_hook(model, execution_device=torch.device(device))
        return
    stream = device == "cuda"
    model.enable_group_offload(
        onload_device=torch.device(device),
        offload_device=torch.device("cpu"),
        offload_type="block_level" if mode == "blocks" else "leaf_level",
        num_blocks_per_group=1 if mode == "blocks" else None,
        use_stream=stream,
        low_cpu_mem_usage=stream,
    )


OFFLOADS = ("none", "model", "blocks", "leaves")
GROUPED = ("blocks", "leaves")


def timed(what: str, call: Callable[[], Any], device: str) -> dict[str, float]:
    """The seconds of a call on a GPU, and the most memory that it held; nothing on a CPU."""
    if device != "cuda":
        call()
        return {}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    seconds, peak = time.perf_counter() - start, torch.cuda.max_memory_allocated()
    return {f"{what}_s": round(seconds, 2), f"{what}_peak_gb": round(peak / 2**30, 3)}


def prepare(model: nn.Module, config: str, mode: str, device: str, ltx: ModuleType) -> dict[str, float]:
    found: dict[str, float] = {}
    if config.startswith("kernels_fp8"):
        options = {BESIDE: {"stock_weights": "beside"}, LOW: {"memory": "low"}}.get(config, {})
        measured = timed("optimize", lambda: ltx.optimize(model, precision="fp8", graphs=False, **options), device)
        found = measured if mode == "none" else {}  # with an offload the model is in the host's memory
    offload(model, mode, device)
    if config == "kernels":
        ltx.optimize(model, graphs=False)
    return found


def held(model: nn.Module, ltx: ModuleType) -> int:
    """The bytes of stock weights in the host's memory."""
    stock = ltx.integrations.linear.fp8_weights.STOCK
    return sum(module.__dict__[stock].nbytes for module in model.modules() if stock in module.__dict__)


def record(name: str, config: str, mode: str, options: argparse.Namespace, ltx: ModuleType) -> dict[str, Any]:
    known, device, dtype = MODELS[name], options.device, DTYPES[options.dtype]
    model = known.construct(options.tiny, dtype, device)  # random numbers are made faster on the device
    shallow = options.blocks > 0 and mode in GROUPED
    if shallow:
        model = first_blocks(model, options.blocks)
    if mode != "none":
        model.to("cpu")
    free_memory(device)
    of_optimize = prepare(model, config, mode, device, ltx)
    torch.manual_seed(1)
    inputs = known.inputs(model, Make(dtype, device), **(known.tiny_shape if options.tiny else known.shape))
    found: dict[str, Any] = {
        "model": name,
        "shape": "tiny" if options.tiny else known.shape_name,
        "config": config,
        "offload": mode,
    }
    if shallow:
        found["blocks"] = options.blocks
    else:
        moved = sum(tensor.nbytes for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())
        found["moved_gb"] = round(moved / 2**30, 6)
        found["host_gb"] = round(held(model, ltx) / 2**30, 6)
    for _ in range(FORWARDS):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        model(**inputs, return_dict=False)
        if device == "cuda":
            torch.cuda.synchronize()
            if not shallow and not options.no_times:
                found["step_ms"] = round(1e3 * (time.perf_counter() - start), 2)
            found["peak_gb"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
    if of_optimize:
        of_optimize |= timed("restore", lambda: ltx.restore(model), device)
    kept = {key: value for key, value in of_optimize.items() if not (options.no_times and key.endswith("_s"))}
    return {**found, **kept}


def print_table(records: list[dict[str, Any]], console: Console) -> None:
    texts, numbers = ("model", "configuration", "offload"), ("moved GiB", "host GiB", "peak GiB", "ms")
    table = empty_table("Peak memory of one forward", texts, numbers)
    for one in records:
        table.add_row(
            one["model"],
            label(one["config"]),
            one["offload"],
            *(f"{one[key]:.3g}" if key in one else "" for key in ("moved_gb", "host_gb", "peak_gb", "step_ms")),
        )
    console.print(table)


def of_one(record: dict[str, Any]) -> tuple[str, ...]:
    """What a record measures."""
    return record["model"], record["config"], record["offload"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)")
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS), help="(default: all)")
    parser.add_argument("--offload", nargs="+", choices=OFFLOADS, default=list(OFFLOADS), help="(default: all)")
    parser.add_argument("--blocks", type=int, default=0, help="with groups, only the first blocks (default: all)")
    parser.add_argument("--no-times", action="store_true", help="leave the times out: something else uses the GPU")
    add_options(parser, "memory", "models of seconds on a CPU")
    options = parser.parse_args(arguments)
    facts = {"diffusers": diffusers.__version__, "dtype": options.dtype, "weights": "random", "reserve_gb": RESERVE_GB}
    ltx, output, meta, console = begin("memory", options, **facts)
    records, failed = earlier_records(output, meta), False
    with torch.no_grad():
        for model in options.models:
            measured = []
            for config in options.configs:
                for mode in options.offload if config != BESIDE else [m for m in options.offload if m == "none"]:
                    try:
                        measured.append({**record(model, config, mode, options, ltx), **of_the_run(meta)})
                    except Exception as reason:  # the others are still measured; the exit status says that one was not
                        failed = True
                        console.print(f"[red]{model}, {label(config)}, {mode} failed[/red]: {first_line(reason)}")
                    free_memory(options.device)
            again = {of_one(one) for one in measured}
            records = [one for one in records if of_one(one) not in again] + measured
            write(output, meta, records)
    print_table(records, console)
    console.print(str(output), highlight=False, soft_wrap=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
