"""Times the backward of single ops on an NVIDIA GPU beside a copy of the same bytes, torch, torch.compile and Liger.

    python tools/build.py --backend cuda
    python benchmarks/backward.py [--only SUBSTRING ...] [--no-compile] [--output PATH]

Only inputs need a gradient, as in the training of adapters in a frozen model; in the cases with "sums over rows" only
what rows share does: a norm's weight, scale, shift and gate. Every column times `torch.autograd.grad`
of outputs that were computed before: `ours` by the public function, `eager` by the package's reference in plain torch,
`compile` by torch.compile of that, `native` by torch's own op, `liger` by Liger, where it has the op. `copy` moves as
many bytes as `ours` has to: gradients, what its Function saved, and results. Gradients are compared with `eager` before
they are timed. Times are of the device, with a cold L2 cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from op_cases import OPS, Case, Make, Op
from ops import COLUMNS, TOLERANCE, calls, copied, load_peers, print_table, tensors
from result_files import DTYPES, common_meta, load_package, result_file, write
from timing import Timer
from torch import Tensor

TOKENS = [(2, 2688, 2048), (2, 8064, 2048), (1, 4608, 3072), (2, 8064, 4096), (1, 8190, 5120)]
ROWS = [(5376, 2048), (16128, 2048), (8192, 3072), (16384, 4096), (8192, 8192)]
SHAPES: dict[str, Sequence[tuple[int, ...]]] = {
    "rmsnorm": ROWS,
    "layernorm": ROWS,
    "rmsnorm_residual": ROWS,
    "adaln_rmsnorm": TOKENS,
    "adaln_layernorm": TOKENS,
    "adaln_zero": TOKENS,
    "gated_residual": TOKENS,
    "gated_residual_adaln_rmsnorm": TOKENS,
    "gated_residual_adaln_layernorm": TOKENS,
    "adaln_rmsnorm_pair": [(2, 6144, 4096)],
    "gated_residual_adaln_rmsnorm_pair": [(2, 6144, 4096)],
    "norm_residual": [(16384, 3840)],
    "norm_gated_residual_norm": [(4, 4352, 3840)],
    "qk_norm_rope": [(2, 2688, 32, 64), (2, 8064, 32, 64)],
    "swiglu": [(16128, 8192), (4096, 14336)],
    "geglu": [(16128, 8192)],
    "gelu": [(5376, 8192), (16128, 8192)],
    "gate_heads": [(2, 8064, 32, 64), (1, 6144, 32, 128)],
}
SHARED = ("rmsnorm", "layernorm", "adaln_rmsnorm", "adaln_layernorm", "gated_residual")  # whose sums are timed


def cases() -> list[tuple[Case, bool]]:
    """The plain case of an op in the table of benchmarks/op_cases.py, or its first one, in other shapes.

    Beside it: whether what rows share is to be differentiated, in place of the rows.
    """
    first: dict[str, Op] = {}
    for op in sorted(OPS, key=lambda op: bool(op.name)):
        first.setdefault(op.function, op)
    of_rows = [(first[function].case(shape), False) for function, shapes in SHAPES.items() for shape in shapes]
    return of_rows + [(case, True) for case, _ in of_rows if case.function in SHARED]


def leaves_of(arguments: Sequence[Any], function: str, shared: bool) -> list[Tensor]:
    """The input, and residual stream, gates of heads or key, whose gradients kernels give; or what rows share."""
    both = "residual" in function or function in ("gate_heads", "qk_norm_rope")
    count = 2 if both else 1
    chosen = arguments[count:] if shared else arguments[:count]
    return [leaf.requires_grad_() for leaf in chosen if leaf is not None]


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        error = ((a.float() - b.float()).norm() / b.float().norm()).item()
        if not error <= TOLERANCE * torch.finfo(b.dtype).eps:
            raise AssertionError(f"relative error {error:.2g} to eager")


def saved_bytes(call: Callable[[], Any]) -> int:
    """Of the tensors that autograd keeps for a call, each once."""
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call()
    return sum(saved.values())


def measure(ltx: ModuleType, timer: Timer, case: Case, shared: bool, make: Make, compiled: bool) -> dict[str, Any]:
    inputs = case.build(make)
    leaves = leaves_of(inputs.arguments, case.function, shared)
    found, failed, size, expected = {}, {}, 0, []
    grads: list[Tensor] = []
    forwards = calls(ltx, case, inputs, compiled)
    for name in ("eager", *(name for name in forwards if name != "eager")):
        try:
            outputs = tensors(forwards[name]())
            grads = grads or [torch.randn_like(output) for output in outputs]

            def backward(outputs: list[Tensor] = outputs, grads: list[Tensor] = grads) -> tuple[Tensor, ...]:
                return torch.autograd.grad(outputs, leaves, grads, retain_graph=True)

            results = backward()
            expected = expected or list(results)
            assert_close(results, expected)
        except Exception as error:
            if name in ("ours", "eager"):
                raise
            failed[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            continue
        found[name] = backward
        if name == "ours":
            given = {grad.data_ptr() for grad in grads}  # of a residual: the gradient itself, which nobody writes
            written = {result.data_ptr(): result.nbytes for result in results if result.data_ptr() not in given}
            size = saved_bytes(forwards[name]) + sum(grad.nbytes for grad in grads) + sum(written.values())
    source = torch.randint(256, (copied(size),), dtype=torch.uint8, device=make.device)
    target = torch.empty_like(source)
    times = timer.measure({**found, "copy": lambda: target.copy_(source)})
    record = {
        "op": f"{case.op}, sums over rows" if shared else f"{case.op} backward",
        "shape": list(case.shape),
        "dtype": case.dtype,
        "bytes": size,
        "us": {name: times[name].median if name in times else None for name in COLUMNS},
        "p90": {name: times[name].p90 if name in times else None for name in COLUMNS},
        "host_us": None,
    }
    return {**record, "failed": failed} if failed else record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="SUBSTRING", help="cases with one of these in the name"
    )
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile, which takes most of the time")
    parser.add_argument("--output", type=Path, help="JSON (default: benchmarks/results/<gpu>-backward.json)")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.version.cuda is None:
        sys.exit("benchmarks/backward.py needs an NVIDIA GPU and a torch that can use it")
    named = [(f"{case.name}{', sums over rows' * shared}", case, shared) for case, shared in cases()]
    selected = [each for each in named if any(part in each[0] for part in options.only)]
    if not selected:
        sys.exit("no such case")
    ltx, package = load_package()
    if package["backend"]["type"] != "cuda":
        sys.exit(f"{package['id']} is not for CUDA: run `python tools/build.py --backend cuda`")
    modules, missing = load_peers()
    meta = {**common_meta(package, "cuda"), "missing": missing}
    output = options.output or result_file("backward")
    torch.manual_seed(0)
    timer, records = Timer(calls=10), []
    for name, case, shared in selected:
        print(name, file=sys.stderr, flush=True)
        make = Make(DTYPES[case.dtype], "cuda", modules)
        records.append(measure(ltx, timer, case, shared, make, compiled=not options.no_compile))
        write(output, meta, records)
    print_table(records)
    print(output)


if __name__ == "__main__":
    main()
