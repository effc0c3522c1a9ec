"""Times LoRA adapters of peft on LTX-Video 2B: loading, switching, weighting, unloading, and a step with one active.

    python tools/build.py
    python benchmarks/lora.py [--configs baseline kernels kernels_fp8] [--rank 32] [--tiny] [--output PATH]

A user waits for a change of adapters: for the call that makes it, and for what the next steps take longer than later
ones. The sum of all that is given for each change, as the median over --rounds:

    switch_ms   from one adapter to another
    weight_ms   a new weight of the active one
    both_ms     a second one beside it
    load_ms     a new adapter; peft makes its random weights in that time
    unload_ms   no adapter again

`step_ms` is a step without adapters, `lora_step_ms` with one active. `quantised` counts the weights that are quantised
during all of this: 0 where adapters stand beside the fp8 weights.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import peft
import torch
from ltx import load_model, make_inputs, make_model
from result_files import DTYPES, write
from rich.console import Console
from runs import add_options, begin, empty_table
from steps import label, synchronize, time_steps
from torch import nn

CONFIGS = ("baseline", "kernels", "kernels_fp8")
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]
SHAPE, TINY_SHAPE = (49, 512, 768), (9, 64, 64)
UNSETTLED = 3  # steps after a change that may take longer: a block runs one call ordinarily, and records the next
CHANGES = ("switch", "weight", "both", "load", "unload")


def add_adapter(model: Any, name: str, rank: int) -> None:
    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS, init_lora_weights=False)
    model.add_adapter(config, adapter_name=name)
    model.requires_grad_(False)


@contextlib.contextmanager
def count_quantised(ltx: ModuleType) -> Iterator[list[int]]:
    """A list that gets one element for each weight that is quantised."""
    home, seen = ltx.integrations.linear.fp8_weights, list[int]()
    stock = home.quantize_weight

    def record(weight: torch.Tensor) -> Any:
        seen.append(weight.numel())
        return stock(weight)

    with mock.patch.object(home, "quantize_weight", record):
        yield seen


def measure(config: str, model: nn.Module, ltx: ModuleType, inputs: dict[str, Any], options: Any) -> dict[str, Any]:
    made: Any = make_model(config, model, ltx)
    device = options.device

    def step() -> Any:
        return made(**inputs)[0]

    def median_step() -> float:
        return round(statistics.median(time_steps(step, options.steps, device)), 3)

    def ms(call: Callable[[], Any]) -> float:
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        return (time.perf_counter() - start) * 1e3

    record: dict[str, Any] = {"config": config, "rank": options.rank, "step_ms": median_step()}
    with count_quantised(ltx) as quantised:
        for name in ("first", "second"):
            add_adapter(made, name, options.rank)
        made.set_adapter("first")
        record["lora_step_ms"] = median_step()
        changes: dict[str, Callable[[], Any]] = {
            "switch": lambda: made.set_adapter("second"),
            "weight": lambda: made.set_adapters("second", 0.5),
            "both": lambda: made.set_adapters(["first", "second"], [0.5, 1.0]),
            "load": lambda: (add_adapter(made, "third", options.rank), made.set_adapter("third")),
            "unload": lambda: made.delete_adapters(["first", "second", "third"]),
        }
        times: dict[str, list[float]] = {name: [] for name in changes}
        for turn in range(options.rounds):
            if turn:
                for name in ("first", "second"):
                    add_adapter(made, name, options.rank)
                made.set_adapter("first")
                step()
            for name, change in changes.items():
                taken = ms(change) + sum(ms(step) for _ in range(UNSETTLED))
                times[name].append(taken - UNSETTLED * statistics.median(ms(step) for _ in range(3)))
    record |= {f"{name}_ms": round(statistics.median(taken), 3) for name, taken in times.items()}
    record["quantised"] = len(quantised)
    return record


def print_table(records: list[dict[str, Any]], console: Console) -> None:
    numbers = ["step_ms", "lora_step_ms", *(f"{name}_ms" for name in CHANGES), "quantised"]
    headings = [column.replace("_", " ") for column in numbers]
    table = empty_table("LoRA adapters on LTX-Video 2B, milliseconds", ["config"], headings)
    for record in records:
        table.add_row(label(record["config"]), *(str(record[column]) for column in numbers))
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS), help="(default: all)")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5, help="times that each change is made (default: 5)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps (default: 20)")
    add_options(parser, "lora", "a model of seconds on a CPU")
    options = parser.parse_args(arguments)
    facts = {"peft": peft.__version__, "targets": TARGETS, "dtype": options.dtype}
    ltx, output, meta, console = begin("lora", options, **facts)
    shape = TINY_SHAPE if options.tiny else SHAPE
    records = []
    with torch.no_grad():
        for config in options.configs:
            model = load_model("tiny" if options.tiny else "random", DTYPES[options.dtype], options.device)
            records.append(measure(config, model, ltx, make_inputs(model, 2, *shape), options))
            write(output, meta, records)
    print_table(records, console)
    console.print(str(output), highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
