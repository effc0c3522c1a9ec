#!/usr/bin/env python3
"""LTX-Video with this package's ops: load, optimize, offload, in both orders; verify, run, report, undo.

    python ltx_kernel_injection_example.py                    # random weights: tiny on a CPU, the 2B shape on a GPU
    python ltx_kernel_injection_example.py --model Lightricks/LTX-Video --offload model
    python ltx_kernel_injection_example.py --num-frames 9 --height 64 --width 96 --steps 2    # seconds on a CPU

Two orders are tried: optimize the model on its device and offload it then; offload it first and optimize it then. In
each, one forward is compared with the model in float32. It is right where its relative error is at most 1.5 times that
of the stock modules, and where the stock modules give their own bits again after `restore`. The script ends with status
1 where one of the two does not hold.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from programs import add_programs

add_programs()
from command_line import OFFLOADS, add_arguments, start

ORDERS = ("optimize, then offload", "offload, then optimize")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--offload", choices=OFFLOADS, help="(default: model; on a CPU group, the only one there)")
    return parser


if __name__ == "__main__":
    start(make_parser())  # before the imports below, which take seconds

# ruff: noqa: E402
import torch
from demo import ERROR_LIMIT, LEAST_ERROR, error, first_call, forward
from ltx_pipeline import DTYPES, Generator, load_kernels, load_pipeline, parse, progress_bar, quiet, start_offload
from rich.console import Console
from torch import Tensor


def in_order(order: str, args: argparse.Namespace, ltx: Any) -> tuple[Any, Any]:
    """A pipeline that was optimized and offloaded in this order, and the report."""
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    if order == ORDERS[0]:
        pipe = load_pipeline(args.model, device, dtype, args.seed)
        report = ltx.optimize(pipe)
        if args.offload != "none":
            start_offload(pipe, args.offload, device)
    else:
        pipe = load_pipeline(args.model, device, dtype, args.seed, args.offload)
        report = ltx.optimize(pipe)
    return pipe, report


def stock_results(args: argparse.Namespace, console: Console) -> tuple[dict[str, Any], Tensor, Tensor]:
    """The arguments of one call of the transformer, its result with the stock modules, and that in float32."""
    pipe = load_pipeline(args.model, torch.device(args.device), DTYPES[args.dtype], args.seed)
    with progress_bar(console) as progress:
        call = first_call(pipe.transformer, Generator(pipe, args, progress))
    stock = forward(pipe.transformer, call)
    return call, stock, forward(pipe.transformer.float(), call)


def try_order(
    order: str, args: argparse.Namespace, ltx: Any, call: dict[str, Any], stock: Tensor, exact: Tensor, console: Console
) -> bool:
    console.print(f"\n{order} ({args.offload})")
    pipe, report = in_order(order, args, ltx)
    ours, of_stock = error(forward(pipe.transformer, call), exact)["relative_l2"], error(stock, exact)["relative_l2"]
    limit = max(ERROR_LIMIT * of_stock, LEAST_ERROR)
    with progress_bar(console) as progress:
        clip = Generator(pipe, args, progress)(order, args.steps)
    console.print(str(report), soft_wrap=True, markup=False)
    report.restore()
    restored = torch.equal(forward(pipe.transformer, call), stock)
    right = ours <= limit and restored
    console.print(
        f"{'PASS' if right else 'FAIL'}: error {ours:.2e}, of the stock modules {of_stock:.2e}, limit "
        f"{limit:.2e}; after restore {'the stock bits' if restored else 'OTHER BITS than the stock modules'}; "
        f"{args.frames} frames in {clip.seconds:.2f} s",
        soft_wrap=True,
    )
    return right


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser()
    args = parse(parser, arguments)
    cpu = args.device == "cpu"
    args.offload = args.offload or ("group" if cpu else "model")
    if cpu and args.offload in ("model", "sequential"):
        parser.error(f"argument --offload: {args.offload} needs a GPU, and --device is cpu")
    quiet()
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    ltx = load_kernels(torch.device(args.device))
    call, stock, exact = stock_results(args, console)
    passed = [try_order(order, args, ltx, call, stock, exact, console) for order in ORDERS]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
