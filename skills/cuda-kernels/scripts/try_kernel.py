#!/usr/bin/env python3
"""Verify a kernel of your own against float64, then time it beside plain torch, torch.compile, peers and a copy.

    python try_kernel.py                                   # trial.py, the file to copy; it loads ltx-kernels
    python try_kernel.py my_trial.py --no-compile
    python try_kernel.py my_trial.py --log trials.jsonl --question "one launch for norm and residual?"

A trial is a Python file. It has `inputs(random, size)`, the tensors of one size, where `random(*shape)` makes one in
the dtype and on the device of the moment; `plain(*tensors)`, the result in plain torch; `kernel(*tensors)`, yours;
`SIZES`, which are timed on a GPU; `SMALL`, which are compared everywhere and timed on a CPU; `LABEL`, what a size
counts. `PEERS`, where it is there, maps names to other functions of the same tensors.

The kernel is right where its relative error against float64 is at most 1.5 times plain torch's error, in every dtype
and size of SMALL, for contiguous tensors and for views, where zeros and infinities give what plain torch gives, and
where its results have the shapes and dtypes of plain torch's. It may not write to its inputs. It may refuse a dtype or
a view with an error, which is printed, but not the tensors that are timed: those in bfloat16 on a GPU, in float32 on a
CPU. The script ends with status 1 where the kernel is wrong. --log appends a line of JSON for each size that was timed.
It says to keep the kernel where no other way is as fast, and leaves that open on a CPU. Only what the trial loads has
to be built.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from programs import SCRIPTS, add_programs

add_programs()
from command_line import HOW_TO_BUILD, REPO_ID, ExampleError, new_file, start

NAMES = ("inputs", "plain", "kernel", "SIZES", "SMALL", "LABEL")
YOURS = "this kernel"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trial", nargs="?", type=Path, default=SCRIPTS / "trial.py", help="a Python file")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile, which takes most of the time")
    parser.add_argument("--log", type=new_file, metavar="PATH", help="append what was timed to this file")
    parser.add_argument("--question", help="what the trial is about; with --log")
    return parser


if __name__ == "__main__":
    start(make_parser())  # before the imports below, which take seconds

# ruff: noqa: E402
import kernels_demo as demo
import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS = ("contiguous", "views", "zeros", "one infinity")
REFUSALS = (AssertionError, RuntimeError, TypeError, ValueError)


def load(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    if not path.is_file():
        parser.error(f"argument trial: expected a Python file, got {path}")
    try:
        trial = runpy.run_path(str(path))
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        how = f"\n{HOW_TO_BUILD}" if REPO_ID in path.read_text() else ""
        sys.exit(f"error: {path}: {str(error).strip()}{how}")
    missing = [name for name in NAMES if name not in trial]
    if missing:
        parser.error(f"argument trial: expected {', '.join(NAMES)} in {path}, got no {', '.join(missing)}")
    for name in ("SIZES", "SMALL"):
        if not isinstance(trial[name], Sequence) or not trial[name]:
            parser.error(f"argument trial: expected a size or more in {name} of {path}, got {trial[name]!r}")
    return trial


def random_of(kind: str, dtype: torch.dtype, device: str, *shape: int) -> Tensor:
    """A tensor as the kind of comparison has it."""
    values = torch.zeros(shape, device=device) if kind == "zeros" else torch.randn(shape, device=device)
    if kind == "one infinity":
        values.view(-1)[:1] = float("inf")
    if kind != "views":
        return values.to(dtype)
    wider = torch.empty(*shape[:-1], shape[-1] + 3, dtype=dtype, device=device)
    return wider[..., 1:-2].copy_(values)  # rows that begin anywhere


def reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def results(name: str, made: Any) -> list[Tensor]:
    """What a function of the trial has returned."""
    listed = list(made) if isinstance(made, (tuple, list)) else [made]
    if not listed or not all(isinstance(x, Tensor) for x in listed):
        got = ", ".join(type(x).__name__ for x in listed) or "no result"
        raise ExampleError(f"{name}: expected a tensor, or a tuple or list of tensors, got {got}")
    return listed


def special(x: Tensor) -> Tensor:
    """1 and -1 where a number is infinite, 2 where it is NaN, else 0."""
    return (x.isposinf().int() - x.isneginf().int()).masked_fill(x.isnan(), 2)


def compare(trial: dict[str, Any], kind: str, dtype: torch.dtype, device: str, size: int) -> str:
    """The largest error of the kernel, or why it refuses such tensors."""
    given = trial["inputs"](lambda *shape: random_of(kind, dtype, device, *shape), size)
    # On the CPU, where plain torch computes step by step: its fused CUDA kernels spread an infinity further.
    expected = [x.to(device) for x in results("plain", trial["plain"](*(x.double().cpu() for x in given)))]
    before = [x.clone() for x in given]
    try:
        made = trial["kernel"](*given)
    except REFUSALS as error:
        return f"refused: {reason(error)}"
    result = results("kernel", made)
    if not all(map(torch.equal, given, before)):
        raise ExampleError(f"{dtype}, {kind}, size {size}: expected the inputs as they were, the kernel wrote to one")
    shapes = [[list(x.shape) for x in tensors] for tensors in (expected, result)]
    if shapes[0] != shapes[1]:
        raise ExampleError(f"{dtype}, size {size}: expected results of shapes {shapes[0]}, got {shapes[1]}")
    dtypes = [x.dtype for x in results("plain", trial["plain"](*given))]
    if dtypes != (got := [x.dtype for x in result]):
        raise ExampleError(f"{dtype}, size {size}: expected results of dtypes {dtypes}, as plain torch's, got {got}")
    if not all(torch.equal(special(a), special(b.to(dtype))) for a, b in zip(result, expected)):
        raise ExampleError(f"{dtype}, {kind}, size {size}: expected NaN and each infinity where plain torch has them")
    if kind in ("zeros", "one infinity"):
        pairs = [(a[a.isfinite()].double(), b[a.isfinite()]) for a, b in zip(result, expected)]
        limit = 8 * torch.finfo(dtype).eps
        if not all(torch.allclose(a, b, rtol=limit, atol=limit) for a, b in pairs):
            raise ExampleError(f"{dtype}, {kind}, size {size}: expected the numbers of plain torch")
        return "as plain torch"
    entry = demo.Entry(given, {demo.PLAIN: trial["plain"]}, exact=trial["plain"])
    try:
        errors = demo.verify(entry, {demo.PLAIN: lambda: trial["plain"](*given), YOURS: lambda: result})
    except ExampleError as error:
        raise ExampleError(f"{dtype}, {kind}, size {size}: {error}") from None
    return f"error {errors[YOURS]:.1e}"


def check_timed(ways: dict[str, demo.Way], given: Sequence[Tensor], size: int) -> None:
    """Raises an error where a way refuses the tensors that are timed."""
    for name, way in ways.items():
        try:
            made = way(*given)
        except REFUSALS as error:
            where = f"{name}, {given[0].dtype}, size {size}"
            raise ExampleError(f"{where}: expected a result, since this is timed, got {reason(error)}") from error
        results(name, made)


def trial_line(question: str, record: demo.Record, bench: demo.Bench) -> str:
    """One line of the log."""
    others = {name: us for name, us in record.us.items() if name != YOURS}
    best = min(others, key=lambda name: others[name])
    return json.dumps({
        "question": question,
        "shape": record.size,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "device": bench.name,
        "us": {**record.us, record.floor: record.floor_us},
        "error": record.error[YOURS],
        # The times of a CPU say nothing about a GPU.
        "kept": record.us[YOURS] * demo.NOISE < others[best] if bench.device == "cuda" else None,
        "why": f"the best of the others, {best}, takes {others[best] / record.us[YOURS]:.2f} times as long",
    })  # fmt: skip


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    if (args.log is None) != (args.question is None):
        parser.error("arguments --log and --question: expected both or neither")
    trial = load(args.trial, parser)
    bench = demo.prepare(compiles=not args.no_compile, package=False)
    print(bench.name)

    def entry(bench: demo.Bench, size: int) -> demo.Entry:
        ways = {demo.PLAIN: trial["plain"], **trial.get("PEERS", {}), YOURS: trial["kernel"]}
        given = trial["inputs"](bench.random, size)
        check_timed(ways, given, size)
        return demo.Entry(given, ways, exact=trial["plain"])

    try:
        with torch.no_grad():
            for dtype in DTYPES:
                for kind in KINDS:
                    found = [compare(trial, kind, dtype, bench.device, size) for size in trial["SMALL"]]
                    print(f"{str(dtype).removeprefix('torch.')}, {kind}: {'; '.join(dict.fromkeys(found))}")
        records = demo.race(bench, entry, bench.sizes(trial["SIZES"], trial["SMALL"]))
    except ExampleError as error:
        print(f"FAIL: {error}")
        return 1
    for record in records:
        times = ", ".join(f"{name} {us:.1f}" for name, us in {**record.us, record.floor: record.floor_us}.items())
        print(f"{record.size:,} {trial['LABEL']}, us: {times}")
    print(f"{demo.verdict(records, trial['LABEL'], ours=YOURS)}\nPASS")
    if args.log:
        args.log.parent.mkdir(parents=True, exist_ok=True)
        with args.log.open("a") as file:
            file.writelines(trial_line(args.question, record, bench) + "\n" for record in records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
