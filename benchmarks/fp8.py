"""How far recipes of precision take LTX-Video from float32, over whole denoising loops, and what they cost and save.

    python tools/build.py
    python benchmarks/fp8.py [--seeds 3] [--steps 30] [--model random|tiny|ID] [--output PATH]

Each recipe denoises the same noise with diffusers' LTXPipeline, guidance and all; the stock model in float32 does it
too, and its latents after every step and its decoded frames are what the others are compared with: relative L2 error of
the latents, PSNR and SSIM of the frames (SSIM where scikit-image is installed). With random weights the frames show
nothing, but their differences are the model's. The JSON has the means over the seeds, and the time of a step,
replayed as a CUDA graph: a clip this short would wait for the host. torchao's recipe has no such time, since it is made
for torch.compile: benchmarks/ltx.py has it.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import statistics
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from ltx import make_inputs
from result_files import REPOSITORY, common_meta, load_package, result_file, write
from rich.console import Console
from runs import empty_table, make_console
from steps import as_graph, error, options_of, quantise_with_torchao, time_steps, view_of, weight_bytes
from torch import nn

sys.path.insert(0, str(REPOSITORY / "examples"))
import command_line
import ltx_pipeline

# optimize()'s arguments; the recipes between "kernels" and "fp8, all" are the frontier of time against error.
TEXT = ("*.attn2.to_k", "*.attn2.to_v")
CROSS_OUTPUT = "*.attn2.to_out.0"
RECIPES: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "kernels": {},
    "fp8": {"precision": "fp8"},
    "fp8, feed-forward alone": {"precision": "fp8", "skip": ("*.attn*",)},
    "fp8, no cross-attention": {"precision": "fp8", "skip": ("*.attn2.*",)},
    "fp8, cross output too": {"precision": "fp8", "skip": TEXT},
    "fp8, all": {"precision": "fp8", "skip": ()},
}
TORCHAO = "torchao fp8"


def make_transformer(recipe: str, transformer: nn.Module, ltx: ModuleType) -> nn.Module:
    model = view_of(transformer)
    if recipe == TORCHAO:
        quantise_with_torchao(model)
    elif RECIPES[recipe] is not None:
        ltx.optimize(model, **{**RECIPES[recipe], **options_of(recipe)})
    return model


def likeness(frames: np.ndarray, expected: np.ndarray) -> dict[str, float | None]:
    mean_square = np.square(frames.astype(np.float64) - expected).mean()
    found: dict[str, float | None] = {"psnr_db": float(-10 * np.log10(mean_square)), "ssim": None}
    if importlib.util.find_spec("skimage"):
        from skimage.metrics import structural_similarity

        pairs = [(a, b) for clip, other in zip(frames, expected) for a, b in zip(clip, other)]
        found["ssim"] = statistics.mean(
            float(structural_similarity(a, b, channel_axis=-1, data_range=1.0))
            for a, b in pairs[:: len(pairs) // 8 or 1]
        )
    return found


def measure(
    ltx: ModuleType, pipe: Any, args: argparse.Namespace, recipes: list[str], console: Console
) -> Iterator[dict[str, Any]]:
    stock = pipe.transformer
    seeds = range(args.seed, args.seed + args.seeds)
    with ltx_pipeline.progress_bar(console) as progress:
        generate = ltx_pipeline.Generator(pipe, args, progress)

        def clips(label: str) -> list[ltx_pipeline.Clip]:
            found = []
            for seed in seeds:
                args.seed = seed
                found.append(generate(f"{label}, seed {seed}", args.steps, keep_history=True))
            return found

        pipe.transformer = copy.deepcopy(stock).float()
        expected = clips("float32")
        pipe.transformer = None
        for recipe in recipes:
            pipe.transformer = make_transformer(recipe, stock, ltx)
            generate("warm-up", 2)
            found = clips(recipe)
            by_step = [[error(a, b) for a, b in zip(c.history, e.history)] for c, e in zip(found, expected)]
            frames = [likeness(c.frames, e.frames) for c, e in zip(found, expected)]
            mean = {key: [f[key] for f in frames] for key in ("psnr_db", "ssim")}
            yield {
                "recipe": recipe,
                "weights_gb": round(weight_bytes(pipe.transformer) / 2**30, 3),
                "latents_error": statistics.mean(errors[-1] for errors in by_step),
                "latents_error_by_seed": [errors[-1] for errors in by_step],
                "error_by_step": [statistics.mean(at) for at in zip(*by_step)],
                **{key: None if None in values else statistics.mean(values) for key, values in mean.items()},
            }
            pipe.transformer = None


def measure_costs(ltx: ModuleType, stock: nn.Module, args: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    """Adds to each record the GiB of its weights without the stock ones, and on a GPU the milliseconds of a step."""
    on_gpu = stock.device.type == "cuda"
    inputs = make_inputs(stock, 2, args.frames, args.height, args.width) if on_gpu else {}
    for record in records:
        if record["recipe"] == TORCHAO:
            continue
        options = RECIPES[record["recipe"]]
        if options and options.get("precision") == "fp8":
            model = copy.deepcopy(stock)
            ltx.optimize(model, **options, stock_weights="free", graphs=False)
            record["freed_gb"] = round(weight_bytes(model) / 2**30, 3)
        if on_gpu:
            model = make_transformer(record["recipe"], stock, ltx)
            model(**inputs)
            times = time_steps(as_graph(lambda model=model: model(**inputs)[0]), 20, "cuda")
            record["graph_ms"] = round(statistics.median(times), 3)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    command_line.add_arguments(parser)
    parser.add_argument("--seeds", type=command_line.at_least(1), default=3, metavar="N", help="(default: 3)")
    parser.add_argument("--recipes", nargs="+", choices=[*RECIPES, TORCHAO], help="(default: all)")
    parser.add_argument("--output", type=Path, help="JSON (default: benchmarks/results/<gpu>-fp8.json)")
    parser.add_argument(
        "--only", choices=["errors", "costs"], help="costs: time and memory, of the recipes in an earlier result"
    )
    parser.set_defaults(steps=30)
    args = ltx_pipeline.parse(parser, arguments)
    ltx_pipeline.quiet()
    console = make_console()
    torchao = version("torchao") if importlib.util.find_spec("torchao") else None
    recipes = args.recipes or [*RECIPES, *([TORCHAO] if torchao and args.device != "cpu" else [])]
    if TORCHAO not in recipes:
        console.print("not run: torchao, which needs a GPU and to be installed")
    device = torch.device(args.device)
    ltx, metadata = load_package()
    pipe = ltx_pipeline.load_pipeline(args.model, device, ltx_pipeline.DTYPES[args.dtype], args.seed)
    meta = {
        **common_meta(metadata, device.type),
        "torchao": torchao,
        **{key: getattr(args, key) for key in ("model", "dtype", "frames", "height", "width", "steps", "seeds")},
    }
    output = args.output or result_file("fp8", device.type)
    records: list[dict[str, Any]] = []
    stock = pipe.transformer
    with torch.no_grad():
        if args.only == "costs":
            if not output.exists():
                parser.error(f"--only costs: expected an earlier result, got none at {output}; run without --only")
            earlier = json.loads(output.read_text())
            for key in ("device", "torch", "commit", "model", "dtype", "frames", "height", "width"):
                if earlier["meta"][key] != meta[key]:
                    parser.error(
                        f"--only costs: expected an earlier result of {key} {meta[key]}, got {earlier['meta'][key]} "
                        f"in {output}; run without --only"
                    )
            records, meta = earlier["records"], earlier["meta"]
        else:
            for record in measure(ltx, pipe, args, recipes, console):
                records.append(record)
                write(output, meta, records)
        if args.only != "errors":
            measure_costs(ltx, stock, args, records)
            write(output, meta, records)
    texts, numbers = ("recipe",), ("graph ms", "weights GiB", "freed GiB", "error of the latents", "PSNR dB", "SSIM")
    table = empty_table("Distance from the stock model in float32", texts, numbers)
    for record in records:
        table.add_row(
            record["recipe"],
            f"{record['graph_ms']:.2f}" if "graph_ms" in record else "",
            f"{record['weights_gb']:.2f}",
            f"{record['freed_gb']:.2f}" if "freed_gb" in record else "",
            f"{record['latents_error']:.3e}",
            f"{record['psnr_db']:.1f}",
            "" if record["ssim"] is None else f"{record['ssim']:.4f}",
        )
    console.print(table)
    console.print(str(output), highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
