"""Times the linear layers of LTX-Video on an NVIDIA GPU: bf16, and fp8 by this package and by torch._scaled_mm.

    python tools/build.py
    python benchmarks/fp8_gemm.py [--output PATH]

Random normal inputs and weights with a bias. `us` is the device's time for a call where another kernel comes before it,
as in a model: a CUDA graph of such pairs less one of the other kernels alone. The forms take turns; the median of 7.
`rounding` is the relative L2 error against the product of the very same quantised matrices in float64 (accumulation
and the rounding to bf16), `error` that against the product of the unquantised ones. `host_us`, of a few tokens, is what
the host takes to launch a call, the least of three turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from result_files import common_meta, load_package, result_file, write
from timing import host_us
from torch import Tensor

TOKENS = (5376, 16128)  # 49 and 161 frames of 512x768, two samples
LAYERS = ((2048, 2048), (2048, 6144), (2048, 8192), (8192, 2048))  # in, out
E4M3_MAX = 448
HOST_TOKENS = 32
CALLS, ROUNDS = 20, 7


def quantise(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).to(torch.float8_e4m3fn)


def graph_of(*calls: Callable[[], Any]) -> Callable[[], float]:
    """What replays a graph of several such calls, and tells the microseconds of one round of them."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            for call in calls:
                call()

    def replay() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / CALLS * 1e3

    return replay


def microseconds(calls: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    x = torch.zeros(4096, device="cuda")

    def other() -> Tensor:
        return x.add_(1)

    graphs = {"": graph_of(other), **{name: graph_of(other, call) for name, call in calls.items()}}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(ROUNDS):
        for name in list(graphs)[:: -1 if turn % 2 else 1]:
            graphs[name]()  # for the clock
            times[name].append(graphs[name]())
    alone = statistics.median(times.pop(""))
    return {name: round(statistics.median(us) - alone, 1) for name, us in times.items()}


def distance(result: Tensor, truth: Tensor) -> float:
    return ((result.double() - truth).norm() / truth.norm()).item()


def measure(ltx: ModuleType, tokens: int, width: int, channels: int) -> list[dict[str, Any]]:
    x = torch.randn(tokens, width, device="cuda").bfloat16()
    weight = (torch.randn(channels, width, device="cuda") / width**0.5).bfloat16()
    bias = torch.randn(channels, device="cuda").bfloat16()
    row, channel = (t.float().abs().amax(-1, keepdim=True) / E4M3_MAX for t in (x, weight))
    whole_x, whole_weight = (t.float().abs().max() / E4M3_MAX for t in (x, weight))
    exact = x.double() @ weight.double().t()

    def product(
        x_scale: Tensor, weight_scale: Tensor, package: bool = False, **options: Any
    ) -> tuple[Callable[[], Tensor], Tensor]:
        """A product, and what it should give."""
        a, b = quantise(x, x_scale), quantise(weight, weight_scale)
        added = options.get("bias")
        truth = (a.double() * x_scale) @ (b.double() * weight_scale).t()
        truth = truth if added is None else truth + added.double()
        if package:
            scales = weight_scale.flatten()
            return lambda: ltx.scaled_linear(a, x_scale, b, scales, **options), truth
        scales = weight_scale.t() if weight_scale.dim() else weight_scale
        return lambda: torch._scaled_mm(a, b.t(), x_scale, scales, out_dtype=torch.bfloat16, **options), truth

    forms = {
        "bf16": (lambda: F.linear(x, weight, bias), exact + bias.double()),
        "fp8 per row": product(row, channel, package=True, bias=bias),
        "fp8 per row, slow accumulation": product(row, channel, package=True, bias=bias, use_fast_accum=False),
        "torch._scaled_mm": product(row, channel, bias=bias, use_fast_accum=True),
        "torch._scaled_mm, no bias": product(row, channel, use_fast_accum=True),
        "torch._scaled_mm, slow accumulation": product(row, channel, bias=bias, use_fast_accum=False),
        "torch._scaled_mm per tensor": product(whole_x, whole_weight, bias=bias, use_fast_accum=True),
        "torch._scaled_mm per tensor, slow accumulation": product(
            whole_x, whole_weight, bias=bias, use_fast_accum=False
        ),
    }
    calls = {name: call for name, (call, _) in forms.items()}
    if tokens == HOST_TOKENS:
        shared: dict[str, Any] = {"shape": [tokens, width, channels]}
        turns = [{name: host_us(call) for name, call in calls.items()} for _ in range(3)]
        return [{**shared, "form": name, "host_us": min(turn[name] for turn in turns)} for name in calls]
    us = microseconds(calls)
    records = []
    for name, (call, truth) in forms.items():
        result = call()
        records.append(
            {
                "shape": [tokens, width, channels],
                "form": name,
                "us": us[name],
                "rounding": distance(result, truth),
                "error": distance(result, exact if name.endswith("no bias") else exact + bias.double()),
            }
        )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON (default: benchmarks/results/<gpu>-fp8-gemm.json)")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        sys.exit("benchmarks/fp8_gemm.py needs an NVIDIA GPU of compute capability 8.9 or newer")
    torch.manual_seed(0)
    ltx, package = load_package()
    meta = {
        **common_meta(package, "cuda"),
    }
    output = options.output or result_file("fp8-gemm")
    records: list[dict[str, Any]] = []
    with torch.no_grad():
        records += measure(ltx, HOST_TOKENS, *LAYERS[0])
        for tokens in TOKENS:
            for width, channels in LAYERS:
                records += measure(ltx, tokens, width, channels)
                write(output, meta, records)
    for r in records:
        shape = "x".join(map(str, r["shape"]))
        if "host_us" in r:
            print(f"{shape:18}{r['form']:48}{r['host_us']:8.1f} us of the host")
        else:
            print(f"{shape:18}{r['form']:48}{r['us']:8.1f} us  rounding {r['rounding']:.2e}  error {r['error']:.2e}")
    print(output)


if __name__ == "__main__":
    main()
