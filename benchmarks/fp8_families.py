"""Which layers of each family carry the error of fp8: one forward of the first blocks, with one kind of layers in fp8.

    python tools/build.py
    python benchmarks/fp8_families.py [--models zimage flux] [--blocks 2] [--tiny] [--output PATH]

The models have released widths, inputs as their pipelines pass them, random weights, and the first `--blocks` blocks of
each kind. `error` is the relative L2 distance of the result from the same blocks in float32. A record names the layers
that are in fp8: "none (bf16)", "the default" of `optimize`, "memory low", "all", or those that share an input in one
kind of block. With `--few-tokens` the inputs are small enough for a CPU, and a model has these four records alone.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import torch
from model_shapes import MODELS, Inputs, Make, of_few_blocks
from models import block_lists, first_blocks, floats, one_tensor
from result_files import kept_records, write
from runs import begin
from sharing import share
from steps import error, first_line, free_memory
from torch import nn

# The largest sizes of inputs with few tokens.
FEW = {
    "frames": 17,
    "height": 256,
    "width": 256,
    "seconds": 4,
    "audio": 32,
    "image": 16,
    "text": 64,
    "text2": 16,
    "valid": 30,
}


def shallow_model(
    name: str, blocks: int, tiny: bool, device: str, few_tokens: bool = False
) -> tuple[nn.Module, Inputs]:
    known = MODELS[name]
    if few_tokens:
        known = replace(known, shape={key: min(value, FEW.get(key, value)) for key, value in known.shape.items()})
    # A list of one block is not taken for a list of repeated blocks.
    model = of_few_blocks(known, max(blocks, 2)).construct(tiny, torch.bfloat16, device)
    torch.manual_seed(1)
    inputs = known.inputs(model, Make(torch.bfloat16, device), **(known.tiny_shape if tiny else known.shape))
    return first_blocks(model, blocks), inputs


def groups_of(model: nn.Module, ltx: ModuleType) -> dict[str, set[str]]:
    """The layers that "fp8" can take, by the kind of block and the names of those that share an input in it."""
    entries = ltx.integrations.ENTRIES
    found: dict[str, set[str]] = defaultdict(set)
    for kind, blocks in block_lists(model).items():
        for number, block in enumerate(blocks):
            entry = entries.get(f"{type(block).__module__}.{type(block).__qualname__}")
            for paths in entry.fp8(block) if entry else ():
                found[f"{kind}: {', '.join(paths)}"] |= {f"{kind}.{number}.{path}" for path in paths}
    return found


def recipes(model: nn.Module, ltx: ModuleType, each_kind: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is in fp8, and the options of `optimize` for it."""
    groups = groups_of(model, ltx)
    every = set().union(*groups.values())
    yield "the default", {}
    yield "memory low", {"memory": "low"}
    yield "all", {"skip": []}
    for name, layers in groups.items() if each_kind else ():
        yield name, {"skip": sorted(every - layers)}


def measure(name: str, ltx: ModuleType, options: argparse.Namespace) -> list[dict[str, Any]]:
    model, inputs = shallow_model(name, options.blocks, options.tiny, options.device, options.few_tokens)
    exact = copy.deepcopy(model).float()
    expected = one_tensor(exact(**{key: floats(value) for key, value in inputs.items()}, return_dict=False))
    del exact

    def record(layers: str) -> dict[str, Any]:
        found = error(one_tensor(model(**inputs, return_dict=False)), expected)
        print(f"{name:12}{found:.3e}  {layers}", flush=True)
        return {"model": name, "blocks": options.blocks, "layers": layers, "error": float(f"{found:.4g}")}

    with ltx.optimize(model, graphs=False):
        records = [record("none (bf16)")]
    for layers, recipe in recipes(model, ltx, not options.few_tokens):
        with ltx.optimize(model, precision="fp8", graphs=False, **recipe):
            records.append(record(layers))
    return records


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)")
    parser.add_argument("--blocks", type=int, default=2, help="blocks of each kind (default: 2)")
    parser.add_argument("--tiny", action="store_true", help="models of seconds on a CPU, to try the script")
    parser.add_argument("--few-tokens", action="store_true", help="small inputs, and no kinds of layers one by one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="JSON (default: benchmarks/results/<gpu>-fp8-families.json)")
    options = parser.parse_args(arguments)
    facts = {"diffusers": diffusers.__version__, "weights": "random"}
    share()
    ltx, output, meta, console = begin("fp8-families", options, **facts)
    records: list[dict[str, Any]] = []
    failed = False
    for name in options.models:
        try:
            records += measure(name, ltx, options)
        except Exception as reason:  # the others are still measured; the exit status says that one was not
            failed = True
            console.print(f"[red]{name} failed[/red]: {first_line(reason)}")
        write(output, meta, kept_records(output, meta, records, ("model",)))
        free_memory(options.device)
    console.print(str(output), highlight=False, soft_wrap=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
