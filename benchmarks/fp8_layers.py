"""Which layers of LTX-Video carry the error of fp8: one forward of the 2B model, with some layers left in bf16.

    python tools/build.py
    python benchmarks/fp8_layers.py [--model random|tiny|ID] [--device cpu] [--output PATH]

The error is the relative L2 distance of the result from the stock model's in float32. Without a GPU it takes a minute
or two, and 14 GB: the clip is small.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from fp8 import CROSS_OUTPUT, TEXT
from ltx import load_model, make_inputs
from result_files import REPOSITORY, common_meta, load_package, write
from steps import error
from torch import Tensor

FRAMES, HEIGHT, WIDTH = 9, 128, 128


def blocks(*numbers: int) -> tuple[str, ...]:
    return tuple(f"transformer_blocks.{number}.*" for number in numbers)


def recipes(default: tuple[str, ...], count: int) -> dict[str, tuple[str, ...]]:
    """What is left in bf16, by a name for the rest, of `count` blocks; `default`: by optimize itself."""
    middle = count // 2
    return {
        "all": (),
        "all but self-attention's query, key, value": ("*.attn1.to_q", "*.attn1.to_k", "*.attn1.to_v"),
        "all but self-attention's output": ("*.attn1.to_out.0",),
        "all but cross-attention's query": ("*.attn2.to_q",),
        "all but cross-attention's key and value": TEXT,
        "all but cross-attention's output": (CROSS_OUTPUT,),
        "all but the feed-forward's first layer": ("*.ff.net.0.proj",),
        "all but the feed-forward's second layer": ("*.ff.net.2",),
        "the default": default,
        "the default, but not in the first two blocks": (*default, *blocks(0, 1)),
        "the default, but not in two blocks in the middle": (*default, *blocks(middle - 1, middle)),
        "the default, but not in the last two blocks": (*default, *blocks(count - 2, count - 1)),
    }


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random", help="random (the 2B shape), tiny, a folder, or a Hub id")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks/results/fp8-layers.json")
    options = parser.parse_args(arguments)
    ltx, metadata = load_package()
    model = load_model(options.model, torch.bfloat16, options.device)
    torch.manual_seed(0)
    inputs = make_inputs(model, 2, FRAMES, HEIGHT, WIDTH)
    upcast = {k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    exact = copy.deepcopy(model).float()(**upcast)[0]
    meta = {
        **common_meta(metadata, options.device),
        "model": options.model,
        "tokens": inputs["hidden_states"].shape[1],
    }
    records: list[dict[str, Any]] = []

    def add(recipe: str) -> None:
        records.append({"recipe": recipe, "error": float(f"{error(model(**inputs)[0], exact):.4g}")})
        print(f"{recipe:52}{records[-1]['error']:.2e}", flush=True)
        write(options.output, meta, records)

    add("none (bf16)")
    default = ltx.integrations.diffusers.ltx.BLOCK.fp8_skip
    for recipe, skip in recipes(default, len(model.transformer_blocks)).items():
        with ltx.optimize(model, precision="fp8", skip=skip, graphs=False):
            add(recipe)
    print(options.output)


if __name__ == "__main__":
    main()
