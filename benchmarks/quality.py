"""Compares clips of the demo's trained model with those of the stock model in float32. fp8 and caches are among them.

    python tools/build.py
    python benchmarks/quality.py [--clips 24] [--configs stock kernels_fp8]

The model is examples/demo_model, a small LTX-Video that is trained on moving shapes. Each prompt has a seed of its own,
and each configuration makes the same clips. "stock" is the model in bfloat16, "kernels" is `optimize(pipe)`, and
"kernels_fp8" adds precision="fp8", and "kernels_fp8_low" memory="low". "_fbc" adds diffusers' FirstBlockCache, which
skips blocks.

The PSNR of a clip, in dB, is that of its frames to the frames of the stock model in float32. `psnr` is the median of
all clips, and `least_psnr` is the lowest. examples/scenes.py reads what a clip shows. `recognised` counts the clips
that show what their prompt says.

int8 attention is not among the configurations: it needs heads of 128 columns, and this model's have 64.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from types import ModuleType
from typing import Any

import numpy as np
import torch
from result_files import DTYPES, REPOSITORY, write
from rich.console import Console
from rich.progress import Progress
from runs import add_options, begin, empty_table
from steps import COLUMNS, LOW, options_of, view_of

sys.path.insert(0, str(REPOSITORY / "examples"))
import diffusers
import ltx_pipeline
import scenes
import train_demo

CONFIGS = ("stock", "kernels", "kernels_fp8", LOW, "stock_fbc", "kernels_fbc", "kernels_fp8_fbc")
MODEL = REPOSITORY / "examples/demo_model"
SMALLEST = 1e-12  # mean square of a difference: equal clips have 120 dB
THRESHOLD = 0.1  # of FirstBlockCache: how much the first block's residual may change from one step to the next


def configured(config: str, pipe: Any, ltx: ModuleType) -> Any:
    """A pipeline of the same weights, prepared as `config` says."""
    made = type(pipe)(**{**pipe.components, "transformer": view_of(pipe.transformer)})
    if config.endswith("_fbc"):
        made.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=THRESHOLD))
    if config.startswith("kernels"):
        ltx.optimize(made, components=["transformer"], **options_of(config))
    return made


def psnr(clips: np.ndarray[Any, Any], exact: np.ndarray[Any, Any]) -> list[float]:
    """Of each clip, in dB."""
    squares = np.square(clips.astype(np.float64) - exact).mean((1, 2, 3, 4))
    return [float(value) for value in -10 * np.log10(np.maximum(squares, SMALLEST))]


def right(clips: np.ndarray[Any, Any], prompts: list[str]) -> int:
    return sum(scenes.recognise(clip) == prompt for clip, prompt in zip(clips, prompts))


def measure(options: argparse.Namespace, ltx: ModuleType, progress: Progress) -> list[dict[str, Any]]:
    device = torch.device(options.device)
    step = max(1, len(scenes.PROMPTS) // options.clips)
    prompts = scenes.PROMPTS[::step][: options.clips]
    arguments = train_demo.make_parser().parse_args(["--sample-steps", str(options.steps)])
    task = progress.add_task("clips", total=len(options.configs) + 1)
    exact = train_demo.sample(ltx_pipeline.load_pipeline(str(MODEL), device, torch.float32), prompts, arguments)
    progress.advance(task)
    records = [{"config": "float32", "clips": len(prompts), "recognised": right(exact, prompts)}]
    pipe = ltx_pipeline.load_pipeline(str(MODEL), device, DTYPES[options.dtype])
    for config in options.configs:
        clips = train_demo.sample(configured(config, pipe, ltx), prompts, arguments)
        found = psnr(clips, exact)
        records.append(
            {
                "config": config,
                "clips": len(prompts),
                "recognised": right(clips, prompts),
                "psnr": round(statistics.median(found), 2),
                "least_psnr": round(min(found), 2),
            }
        )
        progress.advance(task)
    return records


def print_table(records: list[dict[str, Any]], console: Console) -> None:
    table = empty_table("Clips beside float32", ("configuration",), ("PSNR, dB", "least", "recognised", "of"))
    for record in records:
        numbers = (f"{record[key]:.1f}" if key in record else "" for key in ("psnr", "least_psnr"))
        table.add_row(record["config"], *numbers, str(record["recognised"]), str(record["clips"]))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS), help="(default: all)")
    parser.add_argument("--clips", type=int, default=24, help="prompts, at most 72 (default: 24)")
    parser.add_argument("--steps", type=int, default=20, help="of a clip (default: 20)")
    add_options(parser, "quality")
    options = parser.parse_args()
    ltx_pipeline.quiet()
    ltx, path, meta, console = begin("quality", options, dtype=options.dtype, steps=options.steps, threshold=THRESHOLD)
    with torch.no_grad(), Progress(*COLUMNS, console=console) as progress:
        records = measure(options, ltx, progress)
    write(path, meta, records)
    print_table(records, console)


if __name__ == "__main__":
    main()
