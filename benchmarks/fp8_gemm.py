"""Times the linear layers of LTX-Video on an NVIDIA GPU: bf16, and fp8 in the forms that torch._scaled_mm offers.

    python benchmarks/fp8_gemm.py [--output PATH]

Random normal inputs and weights with a bias; the median of 5 times 10 calls, back to back as in a model. `rounding` is
the relative L2 error against the product of the very same quantised matrices in float64 (accumulation and the rounding
to bf16), `error` that against the product of the unquantised ones.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cpu import REPOSITORY
from cpu import meta as common_meta
from ops import driver_version, write
from torch import Tensor

TOKENS = (5376, 16128)  # 49 and 161 frames of 512x768, two samples
LAYERS = ((2048, 2048), (2048, 6144), (2048, 8192), (8192, 2048))  # in, out
E4M3_MAX = 448
CALLS, ROUNDS = 10, 5


def quantise(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).to(torch.float8_e4m3fn)


def microseconds(call: Callable[[], Tensor]) -> float:
    for _ in range(3):
        call()
    rounds = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        torch.cuda.synchronize()
        rounds.append(start.elapsed_time(end) / CALLS * 1e3)
    return statistics.median(rounds)


def distance(result: Tensor, truth: Tensor) -> float:
    return ((result.double() - truth).norm() / truth.norm()).item()


def measure(tokens: int, width: int, channels: int) -> list[dict[str, Any]]:
    x = torch.randn(tokens, width, device="cuda").bfloat16()
    weight = (torch.randn(channels, width, device="cuda") / width**0.5).bfloat16()
    bias = torch.randn(channels, device="cuda").bfloat16()
    row, channel = (t.float().abs().amax(-1, keepdim=True) / E4M3_MAX for t in (x, weight))
    whole_x, whole_weight = (t.float().abs().max() / E4M3_MAX for t in (x, weight))

    def product(x_scale: Tensor, weight_scale: Tensor, **options: Any) -> tuple[Callable[[], Tensor], Tensor]:
        """A call of torch._scaled_mm, and what it should give."""
        a, b = quantise(x, x_scale), quantise(weight, weight_scale)
        added = options.get("bias")
        truth = (a.double() * x_scale) @ (b.double() * weight_scale).t()
        scales = x_scale, weight_scale.t() if weight_scale.dim() else weight_scale
        options["out_dtype"] = torch.bfloat16
        return lambda: torch._scaled_mm(
            a, b.t(), *scales, **options
        ), truth if added is None else truth + added.double()

    exact = x.double() @ weight.double().t()
    calls = {
        "bf16": (lambda: F.linear(x, weight, bias), exact + bias.double()),
        "fp8 per row": product(row, channel, bias=bias, use_fast_accum=True),
        "fp8 per row, no bias": product(row, channel, use_fast_accum=True),
        "fp8 per row, slow accumulation": product(row, channel, bias=bias, use_fast_accum=False),
        "fp8 per tensor": product(whole_x, whole_weight, bias=bias, use_fast_accum=True),
        "fp8 per tensor, slow accumulation": product(whole_x, whole_weight, bias=bias, use_fast_accum=False),
    }
    records = []
    for name, (call, truth) in calls.items():
        result = call()
        records.append(
            {
                "shape": [tokens, width, channels],
                "form": name,
                "us": round(microseconds(call), 1),
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
    device = torch.cuda.get_device_name()
    meta = {**common_meta(), "device": device, "driver": driver_version(), "cuda": torch.version.cuda}
    slug = device.removeprefix("NVIDIA ").lower().replace(" ", "-")
    output = options.output or REPOSITORY / f"benchmarks/results/{slug}-fp8-gemm.json"
    records: list[dict[str, Any]] = []
    for tokens in TOKENS:
        for width, channels in LAYERS:
            records += measure(tokens, width, channels)
            write(output, meta, records)
    for r in records:
        shape = "x".join(map(str, r["shape"]))
        print(f"{shape:18}{r['form']:36}{r['us']:8.1f} us  rounding {r['rounding']:.2e}  error {r['error']:.2e}")
    print(output)


if __name__ == "__main__":
    main()
