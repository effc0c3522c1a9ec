#!/usr/bin/env python3
"""Generate videos with LTX-Video, with this package's kernels or without, compiled or not, and say where the time went.

    python examples/generate_video.py --use-optimized-kernels
    python examples/generate_video.py --no-optimized-kernels --compile --num-frames 49 --height 512 --width 768

    torchrun --nproc-per-node 2 examples/generate_video.py --parallel ulysses

With --parallel every process of torchrun takes a GPU, and they share each step; the first one prints and writes.

Without --model the weights are random, which needs no network, and the video shows nothing. On a GPU this model has the
shape of the 2B model and takes as long; on a CPU it is small. `--model Lightricks/LTX-Video` loads the real one. The
video's name ends in what made it: `_optimized`, `_baseline`, `_optimized_compile` or, without the kernels, `_compile`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from types import ModuleType
from typing import Any

from command_line import (
    OFFLOADS,
    ROOT,
    ExampleError,
    add_arguments,
    add_kernel_arguments,
    at_least,
    check_kernel_arguments,
    file_that_ends_in,
    new_file,
    start,
)

COMPONENTS = "text_encoder", "transformer", "vae"
FORMATS = ".mp4", ".gif"
PARALLEL = "ulysses", "ring", "guidance"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_kernel_arguments(parser)
    parser.add_argument(
        "--components", nargs="+", choices=COMPONENTS, default=list(COMPONENTS), metavar="NAME",
        help=f"of the pipeline, to optimize: {', '.join(COMPONENTS)} (default: all)",
    )  # fmt: skip
    add_arguments(parser)
    parser.add_argument("--batch-size", type=at_least(1), default=1, help="clips, of one seed after the other")
    parser.add_argument(
        "--parallel", choices=PARALLEL,
        help="under torchrun: split a step's tokens over the GPUs (ulysses, ring), or the two halves of guidance",
    )  # fmt: skip
    parser.add_argument("--offload", choices=OFFLOADS, default="none", help="what is on the GPU only while it computes")
    parser.add_argument(
        "--output", type=file_that_ends_in(*FORMATS), default=ROOT / "demo" / "video.mp4", metavar="PATH",
        help="of the video; what made it is added to its name (default: demo/video.mp4)",
    )  # fmt: skip
    parser.add_argument("--gif", action="store_true", help="write a GIF too")
    parser.add_argument("--json", type=new_file, metavar="PATH", help="write all that is printed to this file")
    return parser


if __name__ == "__main__":
    start(make_parser())  # before the imports below, which take seconds

# ruff: noqa: E402
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from ltx_pipeline import (
    DTYPES,
    Clip,
    Generator,
    load_kernels,
    load_pipeline,
    origin,
    parse,
    peak_memory,
    progress_bar,
    quiet,
    suffix,
    write_video,
)
from rich.console import Console
from rich.table import Table
from run_report import failed, finished, of_report


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser()
    args = parse(parser, arguments)
    check_kernel_arguments(parser, args)
    if args.offload != "none" and args.device == "cpu":
        parser.error(f"argument --offload: {args.offload} needs a GPU, and --device is cpu")
    if args.parallel:
        check_parallel(parser, args)
    if args.offload in ("sequential", "group") and args.compile:
        parser.error(f"argument --offload: {args.offload} moves weights within what --compile compiles")
    return args


def check_parallel(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program where processes cannot share the steps of these arguments."""
    ranks, batch = ranks_of_torchrun(), (2 if args.guidance_scale > 1 else 1) * args.batch_size
    if ranks < 2:
        parser.error("argument --parallel: expected several processes, as of torchrun --nproc-per-node 2")
    if not args.optimized:
        parser.error("argument --parallel: needs the optimized kernels, since the stock LTX-Video fails with it")
    if args.offload != "none":
        parser.error(f"argument --parallel: does not go with --offload {args.offload}")
    if args.parallel == "guidance" and batch % ranks:
        parser.error(f"argument --parallel: {ranks} processes cannot share a batch of {batch} evenly")
    tokens = (1 + args.frames // 8) * (args.height // 32) * (args.width // 32)
    if args.parallel != "guidance" and tokens % ranks:
        parser.error(
            f"argument --parallel: {ranks} processes cannot share the {tokens} tokens of a clip evenly; choose another "
            "--num-frames, --height or --width"
        )


def ranks_of_torchrun() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_of_torchrun() -> int:
    return int(os.environ.get("RANK", "0"))


def join(args: argparse.Namespace) -> None:
    """Makes this process one of torchrun's ranks, with a GPU of its own."""
    if args.device == "cpu":
        torch.accelerator.device_count = lambda: 1  # diffusers divides by it, and a torch for CPUs has none
        dist.init_process_group("gloo")
    else:
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(args.device)
        dist.init_process_group("cpu:gloo,cuda:nccl")


def share(pipe: Any, mode: str, ltx: ModuleType) -> None:
    """Has the ranks share each step of a pipeline."""
    if mode == "guidance":
        ltx.split_batch(pipe.transformer)
        return
    ranks, heads = ranks_of_torchrun(), pipe.transformer.config.num_attention_heads
    if mode == "ulysses" and heads % ranks:
        raise ExampleError(f"--parallel: {ranks} processes cannot share the model's {heads} heads evenly; choose ring")
    pipe.transformer.enable_parallelism(config=ContextParallelConfig(**{f"{mode}_degree": ranks}))


def optimize(ltx: ModuleType, pipe: Any, args: argparse.Namespace) -> Any:
    try:
        return ltx.optimize(pipe, components=args.components, precision=args.precision, graphs=args.graphs)
    except RuntimeError as error:
        raise ExampleError(str(error)) from error


def generate(args: argparse.Namespace, console: Console) -> tuple[Clip, dict[str, Any]]:
    """One clip, or a batch of them, and what is to be said about it."""
    if args.parallel:
        join(args)
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    ltx = load_kernels(device) if args.optimized else None
    result = origin(device, ltx)
    console.print(
        f"{result['machine']['device']}, {args.dtype}, {args.frames} frames of {args.height}x{args.width}, "
        f"{args.steps} steps, batch {args.batch_size}, model {args.model}, "
        f"{'optimized kernels' if args.optimized else 'stock modules'}"
        f"{', fp8' if args.precision == 'fp8' else ''}"
        f"{', CUDA graphs' if args.graphs else ''}"
        f"{', torch.compile' if args.compile else ''}"
        f"{f', {args.offload} offload' if args.offload != 'none' else ''}"
        f"{f', {args.parallel} on {ranks_of_torchrun()} processes' if args.parallel else ''}",
        highlight=False,
    )
    pipe = load_pipeline(args.model, device, dtype, args.seed, args.offload)
    report = optimize(ltx, pipe, args) if ltx else None
    if args.parallel and ltx:
        share(pipe, args.parallel, ltx)
    if args.compile:
        pipe.transformer.compile()

    with progress_bar(console) as progress:
        start = time.perf_counter()
        generator = Generator(pipe, args, progress, args.batch_size)
        for i in range(args.warmup_iterations):
            generator.encode()
            generator(f"warm-up {i + 1}", 2)
        warm_up = time.perf_counter() - start
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        text = generator.encode()
        clip = generator("denoising", args.steps)

    total, denoise = text + clip.seconds, sum(clip.steps)
    settings = "model", "frames", "height", "width", "steps", "guidance_scale", "batch_size", "seed", "dtype", "offload"
    how = "optimized", "components", "precision", "graphs", "compile", "parallel"
    result["run"] = {key: getattr(args, key) for key in (*how, *settings, "warmup_iterations")}
    result["run"]["processes"] = ranks_of_torchrun() if args.parallel else 1
    result["seconds"] = {
        "warm_up": warm_up,
        "total": total,
        "per_frame": total / (args.batch_size * args.frames),
        "text": text,
        "denoise": denoise,
        "step_median": statistics.median(clip.steps),
        "steps": clip.steps,
        "vae": clip.decode,
    }
    result["iterations_per_second"] = len(clip.steps) / denoise
    result["peak_memory_bytes"] = peak_memory(device)
    result["report"] = of_report(report)
    return clip, result


def make_table(result: dict[str, Any]) -> Table:
    seconds, run = result["seconds"], result["run"]
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    compiled = ", compilation included" if run["compile"] and run["warmup_iterations"] else ""
    for label, value in (
        (f"warm-up{compiled} (not in the total)", f"{seconds['warm_up']:.2f} s"),
        ("total", f"{seconds['total']:.3f} s"),
        ("per frame", f"{seconds['per_frame'] * 1e3:.1f} ms"),
        ("text encoder", f"{seconds['text'] * 1e3:.1f} ms"),
        ("denoising", f"{seconds['denoise']:.3f} s"),
        ("per step (median)", f"{seconds['step_median'] * 1e3:.1f} ms"),
        ("iterations per second", f"{result['iterations_per_second']:.2f}"),
        ("VAE", f"{seconds['vae'] * 1e3:.1f} ms"),
        ("peak memory", f"{result['peak_memory_bytes'] / 2**30:.2f} GiB"),
    ):
        table.add_row(label, value)
    return table


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    quiet()
    first = not args.parallel or rank_of_torchrun() == 0
    console = Console(width=None if sys.stdout.isatty() else 120, quiet=not first)
    try:
        clip, result = generate(args, console)
    except (ExampleError, torch.OutOfMemoryError) as error:
        console.quiet = False  # any process may be the one that fails
        return failed(error, console, "--offload, fewer frames, a smaller size or a smaller batch")
    if args.parallel:
        dist.destroy_process_group()
    if not first:
        return 0
    args.output.parent.mkdir(parents=True, exist_ok=True)
    files, note = [], ""
    for i, frames in enumerate(clip.frames):
        number = f"_{i}" if args.batch_size > 1 else ""
        name = f"{args.output.stem}{number}{suffix(args.optimized, args.compile)}"
        written, note = write_video(frames, args.output.with_name(name), args.gif)
        files += written
    result["files"] = [str(path) for path in files]
    return finished(result, make_table(result), console, args.json, note)


if __name__ == "__main__":
    sys.exit(main())
