#!/usr/bin/env python3
"""Generate images with a pipeline of diffusers, with this package's kernels or without, and say where the time went.

    python examples/generate_image.py --use-optimized-kernels
    python examples/generate_image.py --model black-forest-labs/FLUX.1-schnell --steps 4 --precision fp8 --graphs auto

Without --model the weights are random, which needs no network, and the image shows nothing. On a GPU this model has the
shape of FLUX.1-schnell and takes as long; on a CPU it is small. The image's name ends in what made it: `_optimized`,
`_baseline`, `_optimized_compile` or, without the kernels, `_compile`.
"""

from __future__ import annotations

import argparse
import inspect
import os
import statistics
import sys
import time
from typing import Any

from command_line import (
    DTYPES,
    PROMPT,
    ROOT,
    ExampleError,
    add_kernel_arguments,
    at_least,
    check_kernel_arguments,
    file_that_ends_in,
    finite,
    new_file,
    seed,
    start,
)

OFFLOADS = ("none", "model", "sequential")
FORMATS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


def side(text: str) -> int:
    value = int(text)
    if value < 16 or value % 16:
        raise argparse.ArgumentTypeError(f"expected a multiple of 16, got {value}")
    return value


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_kernel_arguments(parser)
    parser.add_argument(
        "--components", nargs="+", metavar="NAME",
        help="of the pipeline, to optimize (default: what `optimize` takes by itself)",
    )  # fmt: skip
    parser.add_argument(
        "--model", default=os.environ.get("MODEL"), metavar="MODEL",
        help="random (weights; the shape of FLUX.1-schnell), tiny (random, and small), a folder, or a Hub id such as "
        "black-forest-labs/FLUX.1-schnell (default: $MODEL; without it tiny, on a GPU random)",
    )  # fmt: skip
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--height", type=side, help="a multiple of 16 (default: 64; on a GPU 1024)")
    parser.add_argument("--width", type=side, help="a multiple of 16 (default: 64; on a GPU 1024)")
    parser.add_argument("--steps", type=at_least(1), default=4, help="of denoising (default: 4)")
    parser.add_argument("--guidance-scale", type=finite, help="(default: the pipeline's own)")
    parser.add_argument("--images", type=at_least(1), default=3, help="that are timed, all of one seed (default: 3)")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: cuda where torch sees a GPU, else cpu)")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--offload", choices=OFFLOADS, default="none", help="what is on the GPU only while it computes")
    parser.add_argument(
        "--output", type=file_that_ends_in(*FORMATS), default=ROOT / "demo" / "image.png", metavar="PATH",
        help="of the image; what made it is added to its name (default: demo/image.png)",
    )  # fmt: skip
    parser.add_argument("--json", type=new_file, metavar="PATH", help="write all that is printed to this file")
    return parser


if __name__ == "__main__":
    start(make_parser())  # before the imports below, which take seconds

# ruff: noqa: E402
import torch
from image_pipeline import load_pipeline, timed_parts
from ltx_pipeline import (
    device_of,
    load_kernels,
    origin,
    peak_memory,
    progress_bar,
    quiet,
    suffix,
)
from rich.console import Console
from rich.table import Table
from run_report import failed, finished, of_report


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(arguments)
    args.device = device_of(parser, args.device)
    check_kernel_arguments(parser, args)
    cuda = args.device.startswith("cuda")
    if args.offload != "none" and not cuda:
        parser.error(f"argument --offload: {args.offload} needs a GPU, and --device is cpu")
    args.model = args.model or ("random" if cuda else "tiny")
    args.height, args.width = (side or (1024 if cuda else 64) for side in (args.height, args.width))
    return args


def call(pipe: Any, args: argparse.Namespace) -> tuple[Any, dict[str, float]]:
    """One image, and its seconds by part."""
    device = torch.device(args.device)
    given = {} if args.guidance_scale is None else {"guidance_scale": args.guidance_scale}
    if given and "guidance_scale" not in inspect.signature(pipe.__call__).parameters:
        raise ExampleError(f"--guidance-scale: {type(pipe).__name__} has none")
    with timed_parts(pipe, device) as parts:
        start = time.perf_counter()
        (image,) = pipe(
            prompt=args.prompt,
            height=args.height,
            width=args.width,
            num_inference_steps=args.steps,
            generator=torch.Generator().manual_seed(args.seed),  # on the CPU: the same noise on every device
            **given,
        ).images
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        total = time.perf_counter() - start
    return image, {"total": total, **parts, "denoise": total - sum(parts.values())}


def generate(args: argparse.Namespace, console: Console) -> tuple[Any, dict[str, Any]]:
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    ltx = load_kernels(device) if args.optimized else None
    result = origin(device, ltx)
    console.print(
        f"{result['machine']['device']}, {args.dtype}, {args.height}x{args.width}, {args.steps} steps, model "
        f"{args.model}, {'optimized kernels' if args.optimized else 'stock modules'}"
        f"{', fp8' if args.precision == 'fp8' else ''}"
        f"{f', CUDA graphs: {args.graphs}' if args.graphs else ''}"
        f"{', torch.compile' if args.compile else ''}"
        f"{f', {args.offload} offload' if args.offload != 'none' else ''}",
        highlight=False,
    )
    pipe = load_pipeline(args.model, device, dtype, args.offload)
    pipe.set_progress_bar_config(disable=True)
    report = None
    if ltx:
        try:
            report = ltx.optimize(pipe, components=args.components, precision=args.precision, graphs=args.graphs)
        except (RuntimeError, ValueError) as error:
            raise ExampleError(str(error)) from error
    if args.compile:
        pipe.transformer.compile()
    with progress_bar(console) as progress:
        task = progress.add_task("warm-up", total=args.warmup_iterations)
        start = time.perf_counter()
        for _ in range(args.warmup_iterations):
            call(pipe, args)
            progress.advance(task)
        warm_up = time.perf_counter() - start
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        task = progress.add_task("images", total=args.images)
        found = []
        for _ in range(args.images):
            image, seconds = call(pipe, args)
            found.append(seconds)
            progress.advance(task)
    how = "optimized", "components", "precision", "graphs", "compile", "warmup_iterations"
    settings = "model", "height", "width", "steps", "guidance_scale", "images", "seed", "dtype", "offload"
    result["run"] = {key: getattr(args, key) for key in (*how, *settings)}
    result["seconds"] = {part: statistics.median(one[part] for one in found) for part in found[0]}
    result["seconds"]["warm_up"] = warm_up
    result["peak_memory_bytes"] = peak_memory(device)
    result["report"] = of_report(report)
    return image, result


def make_table(result: dict[str, Any]) -> Table:
    seconds, steps = result["seconds"], result["run"]["steps"]
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for label, value in (
        ("warm-up (not in the total)", f"{seconds['warm_up']:.2f} s"),
        ("an image (median)", f"{seconds['total'] * 1e3:.1f} ms"),
        ("text encoders", f"{seconds['text'] * 1e3:.1f} ms"),
        ("denoising", f"{seconds['denoise'] * 1e3:.1f} ms"),
        ("a step", f"{seconds['denoise'] / steps * 1e3:.1f} ms"),
        ("VAE", f"{seconds['vae'] * 1e3:.1f} ms"),
        ("conversion", f"{seconds['conversion'] * 1e3:.1f} ms"),
        ("peak memory", f"{result['peak_memory_bytes'] / 2**30:.2f} GiB"),
    ):
        table.add_row(label, value)
    return table


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    quiet()
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        image, result = generate(args, console)
    except (ExampleError, torch.OutOfMemoryError) as error:
        return failed(error, console, "--offload, --precision fp8 or a smaller size")
    name = f"{args.output.stem}{suffix(args.optimized, args.compile)}{args.output.suffix or '.png'}"
    path = args.output.with_name(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    result["files"] = [str(path)]
    return finished(result, make_table(result), console, args.json)


if __name__ == "__main__":
    sys.exit(main())
