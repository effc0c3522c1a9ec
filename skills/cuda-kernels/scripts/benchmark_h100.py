#!/usr/bin/env python3
"""Time ops at the shapes that diffusers' models have, beside a copy, torch.compile and peers, and judge their errors.

    python benchmark_h100.py                     # on a GPU
    python benchmark_h100.py --only geglu        # cases whose name contains this
    python benchmark_h100.py --tiny              # small shapes, seconds on a CPU
    python benchmark_h100.py --json h100.json    # the records too

benchmarks/ops.py times the cases, and compares every column with plain torch first. benchmark_rmsnorm.py describes the
columns.

PASS: the relative error of the op against the result in float64 is at most that of plain torch in the tensors' dtype.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from programs import add_programs

add_programs()
from command_line import new_file, start

# Name, and shape; those of GLUs are rows x columns of the result.
CASES = [
    ("rmsnorm", (2048, 2048)),  # other guides quote this shape and the next one for an H100
    ("geglu tanh", (2048, 4096)),
    ("rmsnorm", (5376, 2048)),  # from here on LTX-Video with guidance, 49 and 161 frames of 512x768
    ("adaln_rmsnorm", (2, 2688, 2048)),
    ("adaln_rmsnorm", (2, 8064, 2048)),
    ("gated_residual_adaln_rmsnorm", (2, 2688, 2048)),
    ("gated_residual_adaln_rmsnorm", (2, 8064, 2048)),
    ("qk_norm_rope across heads, full table", (2, 2688, 32, 64)),
    ("qk_norm_rope across heads, full table", (2, 8064, 32, 64)),
]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="cases whose name contains this")
    parser.add_argument("--tiny", action="store_true", help="the ops' small shapes, without torch.compile")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile, which takes most of the time")
    parser.add_argument("--json", type=new_file, metavar="PATH", help="write the records to this file")
    return parser


if __name__ == "__main__":
    start(make_parser())  # before the imports below, which take seconds

# ruff: noqa: E402
import op_cases
import ops
from measuring import time_cases, truth_of


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    chosen = [(op, shape) for op, shape in CASES if args.only in op]
    if not chosen:
        parser.error(f"argument --only: expected a part of {', '.join(dict.fromkeys(op for op, _ in CASES))}")

    def judge(ltx: Any, case: Any, inputs: Any) -> tuple[dict[str, float], bool]:
        """The largest relative error of any result, of the op and of plain torch."""
        truth = truth_of(ltx, case, inputs)

        def error(got: Any) -> float:
            return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(ops.tensors(got), truth))

        found = ops.calls(ltx, case, inputs, compiled=False)
        errors = {"error": error(found["ours"]()), "of plain torch": error(found["eager"]())}
        return errors, errors["error"] <= errors["of plain torch"]

    known = {op.name or op.function: op for op in op_cases.OPS}
    if args.tiny:
        chosen = [(op, known[op].small) for op in dict.fromkeys(op for op, _ in chosen)]
    cases = [known[op].case(shape) for op, shape in chosen]
    return time_cases(cases, judge, not (args.no_compile or args.tiny), args.json)


if __name__ == "__main__":
    sys.exit(main())
