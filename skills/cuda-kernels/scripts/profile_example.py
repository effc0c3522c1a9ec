#!/usr/bin/env python3
"""Profile one denoising step of LTX-Video: the kinds of work, modules and torch ops that its time goes to.

    python profile_example.py                                  # the stock modules
    python profile_example.py --use-optimized-kernels          # what is left after `optimize`
    python profile_example.py --num-frames 9 --height 64 --width 96     # seconds on a CPU

What is neither a matrix product nor attention is what fusing can take away: its bytes and its launches. The second
table, of the stock modules alone, has each class of modules that is a norm, an activation, an attention, or without
children; a class that holds another one includes its time. On a GPU the times are the device's. On a CPU they are the
host's, and say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from typing import Any

from programs import add_programs

add_programs()
from command_line import add_arguments, start

# torch ops by what they do, the first that fits.
KINDS = {
    "this package": ("ltx_kernels",),
    "attention": ("attention",),
    "matrix product": ("mm", "linear", "matmul", "bmm"),
    "copy": ("copy_", "cat", "clone", "contiguous"),
}
REST = "norm, activation, elementwise"
SHOWN = 12


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    kernels = parser.add_mutually_exclusive_group()
    kernels.add_argument("--use-optimized-kernels", dest="optimized", action="store_true")
    kernels.add_argument("--no-optimized-kernels", dest="optimized", action="store_false", help="(default)")
    return parser


if __name__ == "__main__":
    start(make_parser())  # before the imports below, which take seconds

# ruff: noqa: E402
import torch
from demo import first_call, forward
from ltx_pipeline import DTYPES, Generator, load_kernels, load_pipeline, parse, progress_bar, quiet
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

MODULE = "module "


def mark_modules(model: nn.Module) -> None:
    """Every call of these modules shows in a profile under its class."""
    for module in model.modules():
        named = any(part in type(module).__name__ for part in ("Attention", "Norm", "GELU", "GLU"))
        if named or next(module.children(), None) is None:
            marks: list[Any] = []

            def enter(module: nn.Module, args: Any, marks: list[Any] = marks) -> None:
                marks.append(record_function(MODULE + type(module).__name__))
                marks[-1].__enter__()

            def leave(module: nn.Module, args: Any, output: Any, marks: list[Any] = marks) -> None:
                marks.pop().__exit__(None, None, None)

            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)


def kind_of(op: str) -> str:
    name = op.removeprefix("aten::")
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), REST)


def tables(events: Any, gpu: bool) -> tuple[Table, Table, Table]:
    """By kind, by class of module, and the ops that take longest."""
    own = "self_device_time_total" if gpu else "self_cpu_time_total"
    whole = "device_time_total" if gpu else "cpu_time_total"
    events = [event for event in events if event.device_type == DeviceType.CPU]  # of the host, with their device time
    ops = [event for event in events if "::" in event.key and getattr(event, own) > 0]
    total = sum(getattr(event, own) for event in ops)
    by_kind: dict[str, float] = defaultdict(float)
    for event in ops:
        by_kind[kind_of(event.key)] += getattr(event, own)

    kinds = Table("kind", "ms", "share")
    for kind, us in sorted(by_kind.items(), key=lambda item: -item[1]):
        kinds.add_row(kind, f"{us / 1e3:.3f}", f"{us / total:.1%}")
    classes = Table("modules of class", "calls", "ms", "share")
    marked = [event for event in events if event.key.startswith(MODULE)]
    for event in sorted(marked, key=lambda event: -getattr(event, whole))[:SHOWN]:
        us = getattr(event, whole)
        classes.add_row(event.key.removeprefix(MODULE), str(event.count), f"{us / 1e3:.3f}", f"{us / total:.1%}")
    longest = Table("op", "calls", "ms", "share", "kind")
    for event in sorted(ops, key=lambda event: -getattr(event, own))[:SHOWN]:
        us = getattr(event, own)
        longest.add_row(event.key, str(event.count), f"{us / 1e3:.3f}", f"{us / total:.1%}", kind_of(event.key))
    return kinds, classes, longest


def main(arguments: list[str] | None = None) -> int:
    args = parse(make_parser(), arguments)
    quiet()
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    device = torch.device(args.device)
    pipe = load_pipeline(args.model, device, DTYPES[args.dtype], args.seed)
    with progress_bar(console) as progress:
        call = first_call(pipe.transformer, Generator(pipe, args, progress))
    if args.optimized:
        report = load_kernels(device).optimize(pipe)
    else:
        mark_modules(pipe.transformer)
    forward(pipe.transformer, call)  # warm-up
    gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as found:
        forward(pipe.transformer, call)
        if gpu:
            torch.cuda.synchronize(device)
    kinds, classes, longest = tables(found.key_averages(), gpu)
    console.print(kinds)
    if args.optimized:
        console.print(str(report), soft_wrap=True, markup=False)
    else:
        console.print(classes)
    console.print(longest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
