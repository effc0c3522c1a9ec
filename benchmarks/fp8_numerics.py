"""What quantisation does to one matrix product: relative errors of recipes, on rows of several kinds. Needs no GPU.

    python benchmarks/fp8_numerics.py [--output PATH]

A [1024, 2048] input times a normal [2048, 2048] weight, quantised and multiplied out in float32, against the product of
the unquantised matrices. The JSON has the relative L2 error of every recipe for every kind of input.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from result_files import REPOSITORY, common_meta, write
from torch import Tensor

ROWS, WIDTH = 1024, 2048
E4M3_MAX, INT8_MAX = 448, 127
CANDIDATES = 12  # of the scale of an output channel, within a factor of two

Quantise = Callable[[Tensor], Tensor]  # to the values that the tensor is taken for


def e4m3(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale


def row_scale(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True) / E4M3_MAX


def per_row(x: Tensor) -> Tensor:
    return e4m3(x, row_scale(x))


def per_tensor(x: Tensor) -> Tensor:
    return e4m3(x, x.abs().max() / E4M3_MAX)


def per_row_power_of_two(x: Tensor) -> Tensor:
    return e4m3(x, torch.exp2(torch.ceil(torch.log2(row_scale(x)))))


def per_row_best(x: Tensor) -> Tensor:
    """The scale with the least error of each row."""
    found = per_row(x)
    for i in range(1, CANDIDATES):
        other = e4m3(x, row_scale(x) * 2 ** (i / CANDIDATES))
        better = (other - x).square().sum(-1, keepdim=True) < (found - x).square().sum(-1, keepdim=True)
        found = torch.where(better, other, found)
    return found


def rounded_first(x: Tensor) -> Tensor:
    return per_row(x.bfloat16().float())


def int8(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / INT8_MAX
    return (x / scale).round() * scale


def bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def exact(x: Tensor) -> Tensor:
    return x


# What is done to the input's rows, and to the weight's.
RECIPES: dict[str, tuple[Quantise, Quantise]] = {
    "bf16": (bfloat16, bfloat16),
    "fp8, a scale per row and per output channel": (per_row, per_row),
    "fp8 activations alone": (per_row, exact),
    "fp8 weights alone": (exact, per_row),
    "activations rounded to bf16 first": (rounded_first, per_row),
    "one scale per tensor": (per_tensor, per_tensor),
    "scales that are powers of two": (per_row_power_of_two, per_row_power_of_two),
    "the best scale per output channel": (per_row, per_row_best),
    "int8, a scale per row and per output channel": (int8, int8),
}


def inputs() -> dict[str, Tensor]:
    normal = torch.randn(ROWS, WIDTH)
    loud = torch.where(torch.rand(WIDTH) < 0.01, 20.0, 1.0)
    return {
        "normal": normal,
        "GELU of normal": F.gelu(torch.randn(ROWS, WIDTH), approximate="tanh"),
        "normal, 1 % of the channels 20 times as loud": normal * loud,
        "normal, some rows 100 times as loud": normal * torch.where(torch.rand(ROWS, 1) < 0.01, 100.0, 1.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks/results/fp8-numerics.json")
    output = parser.parse_args().output
    torch.manual_seed(0)
    weight = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
    records = []
    for kind, x in inputs().items():
        product = x @ weight.t()
        # Of a row by its own norm: a loud row must not hide what happens to the others.
        norms = product.norm(dim=-1)
        for recipe, (quantise_input, quantise_weight) in RECIPES.items():
            difference = quantise_input(x) @ quantise_weight(weight).t() - product
            error = (difference.norm(dim=-1) / norms).square().mean().sqrt().item()
            records.append({"input": kind, "recipe": recipe, "relative_error": error})
            print(f"{kind:46}{recipe:46}{error:8.4f}", flush=True)
    write(output, common_meta(), records)
    print(output)


if __name__ == "__main__":
    main()
