#!/usr/bin/env python3
"""Time RMSNorm beside a copy of the same bytes, torch's own op, torch.compile and other packages, and judge its error.

    python benchmark_rmsnorm.py                              # on a GPU: all shapes; on a CPU: two
    python benchmark_rmsnorm.py --dtype fp16 --no-compile
    python benchmark_rmsnorm.py --shapes 2x1024x2048 8x64    # your own, each batch x tokens x hidden or rows x hidden
    python benchmark_rmsnorm.py --shapes 64x256 --no-compile # seconds on a CPU

Columns, in microseconds: `ours`; `copy`, a copy that reads and writes as many bytes; `eager`, RMSNorm written in plain
torch; `compile`, torch.compile of that; `native`, `F.rms_norm`; `liger` and `quack`, where they are installed. `GB/s`
is the bytes that the op must move over its time, `of copy` the share of the copy's bandwidth. On a GPU the times are
the device's, with a cold L2 cache (benchmarks/timing.py). On a CPU they are the host's, and say nothing about a GPU.

PASS: every element of `ours` is within 1 ulp (bf16, fp16) or 8 ulp (fp32) of the result in float64.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from programs import add_programs

add_programs()
from command_line import new_file, start

# The shapes that the benchmark of Hugging Face's skill times, and those of this package's models: LTX-Video at 49 and
# 161 frames of 512x768 with guidance, FLUX at 1024x1024, and Llama 8B.
THEIR_SHAPES = "1x1024x2048 2x1024x2048 4x1024x2048 1x4096x2048 1x8192x2048 2x4096x3072 4x4096x3072"
OUR_SHAPES = "2x2688x2048 2x8064x2048 1x4608x3072 4x4096x4096"
ON_A_CPU = "64x2048 1x1024x2048"
DTYPES = ("bf16", "fp16", "fp32")
ULPS = {"bf16": 1, "fp16": 1, "fp32": 8}


def shape(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split("x"))
    if len(sizes) < 2 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"expected rows x hidden, such as 2x1024x2048, got {text}")
    return sizes


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", type=shape, metavar="BxTxH", help=f"(default on a CPU: {ON_A_CPU})")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile, which takes most of the time")
    parser.add_argument("--json", type=new_file, metavar="PATH", help="write the records to this file")
    return parser


if __name__ == "__main__":
    start(make_parser())  # before the imports below, which take seconds

# ruff: noqa: E402
import op_cases
import torch
from measuring import time_cases, truth_of


def main() -> int:
    args = make_parser().parse_args()

    def judge(ltx: Any, case: Any, inputs: Any) -> tuple[dict[str, float], bool]:
        """The largest distance of an element from the result in float64, in units in the last place."""
        got, (truth,) = ltx.rmsnorm(*inputs.arguments), truth_of(ltx, case, inputs)
        info = torch.finfo(got.dtype)
        _, exponent = torch.frexp(truth.abs().clamp(min=info.smallest_normal))
        spacing = torch.ldexp(torch.full_like(truth, info.eps), exponent - 1)
        largest = ((got.double() - truth).abs() / spacing).max().item()
        return {"error, ulp": largest}, largest <= ULPS[args.dtype]

    def case_of(sizes: tuple[int, ...]) -> Any:
        rows, width = math.prod(sizes[:-1]), sizes[-1]
        return op_cases.Case("RMSNorm", sizes, "rmsnorm", lambda make: op_cases.rmsnorm(make, rows, width), args.dtype)

    texts = f"{THEIR_SHAPES} {OUR_SHAPES}" if torch.cuda.is_available() else ON_A_CPU
    shapes = args.shapes or [shape(text) for text in texts.split()]
    return time_cases([case_of(sizes) for sizes in shapes], judge, not args.no_compile, args.json)


if __name__ == "__main__":
    sys.exit(main())
