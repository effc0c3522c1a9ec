#!/usr/bin/env python3
"""Generate one LTX-Video clip twice, with stock modules and after `ltx.optimize`, compare the two, and write both
videos, a picture of the difference and result.json.

The default needs no network. It is a small LTX-Video in examples/demo_model, which `train_demo.py` trained on moving
shapes: its prompts are such as "a blue square moves left". `--model random` has the shape of the 2B model and random
weights, so the times are the model's and the clip shows nothing; `--model Lightricks/LTX-Video` loads the real one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from command_line import REPO_ID, ROOT, TRAINED, ExampleError, add_arguments, directory, start


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    if (TRAINED / "recipe.json").is_file():
        parser.set_defaults(model=os.environ.get("MODEL") or str(TRAINED))
    parser.add_argument("--output", type=directory, default=ROOT / "demo", metavar="DIR", help="(default: demo)")
    parser.add_argument("--rounding", default="fp32", choices=("fp32", "eager"), help="of the package's ops")
    parser.add_argument("--graphs", action="store_true", help="replay the optimized clip as CUDA graphs")
    return parser


if __name__ == "__main__":
    start(make_parser())  # before the imports below, which take seconds

# ruff: noqa: E402
import numpy as np
import torch
from ltx_pipeline import (
    DTYPES,
    Clip,
    Generator,
    load_kernels,
    load_pipeline,
    origin,
    parse,
    progress_bar,
    quiet,
    write_video,
)
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.table import Table
from run_report import replaced
from scenes import PROMPTS, recognise
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

TRANSFORMER = ["transformer"]
BESIDE = ["text_encoder", "vae"]  # components that the transformer's forward does not show

# How much further from float32 than the stock modules the package's ops may be before the demo calls it a fault.
ERROR_LIMIT = 1.5
LEAST_ERROR = 1e-4  # that is a fault, also where the stock modules are exact, as in float32
RANDOM_WEIGHTS = "random weights"

# Ops that serve several functions, by the one that the model calls; the blank is for the statistic.
FUNCTIONS = {"norm": "{}norm", "adaln_norm": "adaln_{}norm", "residual_norm": "gated_residual_adaln_{}norm"}
STATISTICS = {1: "rms", 2: "layer"}


class OpCounter(TorchDispatchMode):
    """Counts the calls of the package's compiled ops as torch's dispatcher sees them, by the function they serve.

    Only such a count says that a kernel ran; that a module was replaced does not.
    """

    def __init__(self, ltx: ModuleType):
        super().__init__()
        self.namespace = ltx._ops.ops.name
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == self.namespace and any("Tensor" in str(a.type) for a in func._schema.arguments):
            op = func._schema.name.split("::")[1].removesuffix("_out")
            given = dict(zip((a.name for a in func._schema.arguments), args))
            self.calls[FUNCTIONS.get(op, op).format(STATISTICS.get(given.get("statistic")))] += 1
        elif func is torch.ops.aten._addmm_activation.default:
            self.calls["gelu"] += 1  # on a GPU it is in its GEMM's epilogue, which no stock module asks for
        return func(*args, **(kwargs or {}))


def first_call(transformer: torch.nn.Module, generate: Generator) -> dict[str, Any]:
    """The arguments of the transformer's first call in a generation; it serves as the warm-up too."""
    calls: list[dict[str, Any]] = []
    hook = transformer.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True)
    generate("warm-up, stock", 2)
    hook.remove()
    return calls[0]


def forward(transformer: torch.nn.Module, call: dict[str, Any]) -> Tensor:
    """One forward with the recorded arguments, in the transformer's dtype."""
    names = "hidden_states", "encoder_hidden_states"
    with torch.no_grad():
        return transformer(**{**call, **{n: call[n].to(transformer.dtype) for n in names}})[0]


def error(got: Tensor, expected: Tensor) -> dict[str, float]:
    got, expected = got.double(), expected.double()
    difference = got - expected
    return {
        "relative_l2": (difference.norm() / expected.norm()).item(),
        "max_abs": difference.abs().max().item(),
    }


def clip_error(got: Clip, expected: Clip) -> dict[str, Any]:
    difference = got.frames.astype(np.float64) - expected.frames
    mean_square = np.square(difference).mean()
    return {
        "latents": error(got.latents, expected.latents),
        "frames": {
            "psnr_db": float(-10 * np.log10(mean_square)) if mean_square else None,
            "max_abs": float(np.abs(difference).max()),
        },
    }


def clip_title(result: dict[str, Any]) -> str:
    run = result["run"]
    return (
        f"LTX-Video, {run['model']} ({run['parameters'] / 1e9:.2g} B), {run['frames']} frames of "
        f"{run['height']}x{run['width']}, {run['steps']} steps, {run['dtype']}, {result['machine']['device']}"
    )


def picture_title(result: dict[str, Any]) -> list[str]:
    """What the picture shows and how far the two clips are apart, a line each."""
    errors = result["errors"]["ltx_kernels_to_stock"]
    psnr = errors["frames"]["psnr_db"]
    lines = [
        clip_title(result),
        f"ltx-kernels to stock: latents {errors['latents']['relative_l2']:.1e} (relative L2), frames "
        + (
            "equal"
            if psnr is None
            else f"{psnr:.1f} dB PSNR, largest difference {errors['frames']['max_abs']:.1e} of 1"
        ),
    ]
    if result["run"]["model"] == RANDOM_WEIGHTS:
        lines.append("Random weights: the clip shows nothing. The first two rows should look alike.")
    return lines


def write_picture(
    stock: np.ndarray, ours: np.ndarray, path: Path, title: list[str], columns: int = 4, tile_width: int = 384
) -> int:
    """Frames of both clips and their amplified difference, one below the other; the amplification."""
    difference = np.abs(ours.astype(np.float64) - stock)
    # A power of two, so that the largest difference is between half and full brightness.
    gain = 2 ** int(max(0, np.floor(-np.log2(max(difference.max(), 2**-16)))))
    chosen = np.linspace(0, len(stock) - 1, min(columns, len(stock))).round().astype(int)
    scale = tile_width / stock.shape[2]
    size = tile_width, round(stock.shape[1] * scale)
    resampling = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BICUBIC  # enlarged pixels stay pixels
    font, margin, line = ImageFont.load_default(16), 8, 24
    rows = {"stock": stock, "ltx-kernels": ours, f"|difference| x {gain}": difference * gain}
    top = len(title) * line + margin
    picture = Image.new(
        "RGB", (len(chosen) * (size[0] + margin) + margin, top + len(rows) * (size[1] + line) + margin), "white"
    )
    draw = ImageDraw.Draw(picture)
    for number, text in enumerate(title):
        draw.text((margin, margin // 2 + number * line), text, fill="black", font=font)
    for row, (label, frames) in enumerate(rows.items()):
        above = top + row * (size[1] + line)
        for column, index in enumerate(chosen):
            left = margin + column * (size[0] + margin)
            draw.text((left, above + 3), f"{label}, frame {index}", fill="black", font=font)
            image = Image.fromarray((frames[index].clip(0, 1) * 255).round().astype(np.uint8))
            picture.paste(image.resize(size, resampling), (left, above + line))
    picture.save(path)
    return gain


def make_table(result: dict[str, Any]) -> Table:
    times, errors = result["seconds"], result["errors"]
    on_gpu = not result["machine"]["device"].startswith("CPU")
    table = Table(
        title=clip_title(result),
        title_justify="left",
        show_header=False,
    )
    for justify in ("left", "right", "right", "right"):
        table.add_column(justify=justify)

    def section(*cells: str) -> None:
        table.add_section()
        table.add_row(*(f"[bold]{cell}[/]" for cell in cells))

    section("replaced", "modules", "calls a forward", "")
    for row in result["replaced"]:
        library, *_, name = row["class"].split(".")
        # The forward of a block or an attention does what its norms did, and does not call them.
        table.add_row(f"{library}.{name}", str(row["modules"]), str(row["calls"] or "fused"))
    section("in text encoder and VAE", "modules", "calls in all", "")
    for row in result["replaced_beside"]:
        library, *_, name = row["class"].split(".")
        table.add_row(f"{library}.{name}", str(row["modules"]), str(row["calls"]))
    for name, why in result["left_alone"].items():
        table.add_row(name, f"left alone: {why}")
    section("compiled op", "", "calls a forward", "")
    for op, calls in result["compiled_calls"].items():
        table.add_row(op, "", str(calls))

    section("time", "stock", "ltx-kernels", "speedup" if on_gpu else "")
    for label, key, unit, factor in (
        ("text encoder", "text", "ms", 1e3),
        ("denoising step (median)", "step_median", "ms", 1e3),
        ("VAE", "vae", "ms", 1e3),
        ("whole clip", "total", "s", 1),
    ):
        stock, ours = times["stock"][key], times["ltx_kernels"][key]
        speedup = f"{stock / ours:.2f}" if on_gpu else ""
        table.add_row(label, f"{stock * factor:.1f} {unit}", f"{ours * factor:.1f} {unit}", speedup)

    section("error", "stock to float32", "ltx-kernels to float32", "ltx-kernels to stock")
    for label, form, *keys in (
        ("one forward, relative L2", "{:.2e}", "forward", "relative_l2"),
        ("one forward, largest", "{:.2e}", "forward", "max_abs"),
        ("latents, relative L2", "{:.2e}", "latents", "relative_l2"),
        ("latents, largest", "{:.2e}", "latents", "max_abs"),
        ("frames (0 to 1), largest", "{:.2e}", "frames", "max_abs"),
        ("frames, PSNR", "{:.1f} dB", "frames", "psnr_db"),
    ):
        cells = []
        for pair in ("stock_to_float32", "ltx_kernels_to_float32", "ltx_kernels_to_stock"):
            value = errors[pair]
            for key in keys:
                value = value and value[key]
            cells.append("" if errors[pair] is None else form.format(value) if value else "none")
        table.add_row(label, *cells)
    if "fp8" in times:
        section("linear layers in fp8", "time of a step", "forward to float32", "frames to float32")
        found = errors["fp8_to_float32"]
        table.add_row(
            "ltx-kernels, precision fp8",
            f"{times['fp8']['step_median'] * 1e3:.1f} ms",
            f"{found['forward']['relative_l2']:.2e}",
            f"{found['frames']['psnr_db']:.1f} dB",
        )
    if result["shows"]:
        section("what the clip shows", "stock", "ltx-kernels", "ltx-kernels, fp8" if "fp8" in result["shows"] else "")
        table.add_row("as a program recognises it", *(text or "nothing it knows" for text in result["shows"].values()))
    return table


@dataclass(frozen=True)
class Outcome:
    """What one configuration made: one forward's output, a clip, and the seconds of the text encoder."""

    forward: Tensor
    clip: Clip
    text: float = 0.0

    def errors(self, expected: Outcome) -> dict[str, Any]:
        return {"forward": error(self.forward, expected.forward), **clip_error(self.clip, expected.clip)}

    def seconds(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "step_median": statistics.median(self.clip.steps),
            "vae": self.clip.decode,
            "total": self.text + self.clip.seconds,
            "steps": self.clip.steps,
        }


def run_optimized(
    pipe: Any, args: argparse.Namespace, ltx: ModuleType, call: dict[str, Any], generate: Generator
) -> tuple[Outcome, dict[str, Any]]:
    """What the optimized pipeline makes, and what the package says of it. The pipeline is stock again afterwards."""
    report = ltx.optimize(pipe, components=TRANSFORMER, rounding=args.rounding, graphs=False)
    with OpCounter(ltx) as counter:
        output = forward(pipe.transformer, call)
    rows = replaced(report)
    claimed = {op for row in rows if row["calls"] for op in row["ops"]}
    beside = ltx.optimize(pipe, components=BESIDE, rounding=args.rounding, graphs=args.graphs)
    if args.graphs:
        report = ltx.optimize(pipe, components=TRANSFORMER, rounding=args.rounding, graphs=True)
    for i in range(2 if args.graphs else 1):  # a signature's second call is captured
        generate.encode()
        generate(f"warm-up {i + 1}, ltx-kernels", 2)
    text = generate.encode()
    outcome = Outcome(output, generate("ltx-kernels", args.steps), text)
    facts = {
        "replaced": rows,
        "replaced_beside": replaced(beside),
        "left_alone": {**report.left_alone, **beside.left_alone},
        "fallbacks": {**report.fallbacks, **beside.fallbacks},
        "compiled_calls": dict(counter.calls),
        "without_compiled_call": sorted(claimed - counter.calls.keys()),
    }
    report.restore()
    beside.restore()
    generate.encode()
    return outcome, facts


def run_fp8(pipe: Any, args: argparse.Namespace, ltx: ModuleType, call: dict[str, Any], generate: Generator) -> Outcome:
    """What the pipeline makes with the linear layers of its transformer in fp8. It is stock again afterwards."""
    with ltx.optimize(pipe, components=TRANSFORMER, precision="fp8", graphs=False):
        output = forward(pipe.transformer, call)
        text = generate.encode()  # as the stock pipeline does
        return Outcome(output, generate("ltx-kernels, fp8", args.steps), text)


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    ltx = load_kernels(device)
    console.print(f"{REPO_ID}: {Path(ltx.__file__).parent}", highlight=False, soft_wrap=True)
    pipe = load_pipeline(args.model, device, dtype, args.seed)
    transformer = pipe.transformer

    with progress_bar(console) as progress:
        generate = Generator(pipe, args, progress)
        call = first_call(transformer, generate)
        stock_forward, stock_text = forward(transformer, call), generate.encode()
        stock = Outcome(stock_forward, generate("stock", args.steps), stock_text)
        ours, facts = run_optimized(pipe, args, ltx, call, generate)
        sides = {"stock": stock, "ltx_kernels": ours}
        known = args.prompt in PROMPTS and (Path(args.model) / "recipe.json").is_file()
        if known and dtype == torch.bfloat16 and ltx.quant.fp8_obstacle(device) is None:
            sides["fp8"] = run_fp8(pipe, args, ltx, call, generate)
        restored = torch.equal(forward(transformer, call), stock.forward)
        exact = None
        if dtype != torch.float32:
            # To float32 and back leaves the weights as they were, and needs no second copy of them.
            transformer.float()
            exact = Outcome(forward(transformer, call), generate("stock in float32", args.steps))
            transformer.to(dtype)

    args.output.mkdir(parents=True, exist_ok=True)
    files, note = {}, ""
    for key, side in sides.items():
        (files[key],), note = write_video(side.clip.frames[0], args.output / f"{Path(args.model).name}_{key}")
    files["comparison"] = args.output / "comparison.png"

    shown = ("frames", "height", "width", "steps", "seed", "dtype", "rounding", "graphs")
    result = {
        **origin(device, ltx),
        "run": {
            "model": RANDOM_WEIGHTS if args.model in ("random", "tiny") else args.model,
            "parameters": sum(p.numel() for p in transformer.parameters()),
            **{key: getattr(args, key) for key in shown},
        },
        **facts,
        "restored_to_same_bits": restored,
        "seconds": {key: side.seconds() for key, side in sides.items()},
        "errors": {
            **{f"{key}_to_float32": side.errors(exact) if exact else None for key, side in sides.items()},
            "ltx_kernels_to_stock": ours.errors(stock),
        },
        # What a clip shows, as a program sees it, where the model was trained to show the prompt.
        "shows": {key: recognise(side.clip.frames[0]) for key, side in sides.items()} if known else {},
        "files": {key: str(path) for key, path in files.items()},
        "note": note,
    }
    title = picture_title(result)
    result["picture_gain"] = write_picture(stock.clip.frames[0], ours.clip.frames[0], files["comparison"], title)
    return result


def faults(result: dict[str, Any]) -> list[str]:
    """Why this run does not show what it is meant to; empty if it does."""
    found = []
    if not result["compiled_calls"]:
        found.append("no compiled op ran")
    if result["without_compiled_call"]:
        found.append(f"said to run, but no compiled op did: {', '.join(result['without_compiled_call'])}")
    for name, reasons in result["fallbacks"].items():
        if not name.startswith("transformers."):
            found.append(f"stock calls of {name}: {', '.join(reasons)}")
    if not result["restored_to_same_bits"]:
        found.append("after restore, a forward does not give the stock modules' bits")
    stock, ours = (result["errors"][f"{key}_to_float32"] for key in ("stock", "ltx_kernels"))
    if stock is None:
        ours, limit = result["errors"]["ltx_kernels_to_stock"], LEAST_ERROR
    else:
        limit = ERROR_LIMIT * stock["forward"]["relative_l2"]
    shows = result["shows"]
    for key in shows:
        if shows["stock"] is not None and shows[key] != shows["stock"]:
            found.append(f"the clip of {key} shows {shows[key] or 'nothing it knows'}, and stock's {shows['stock']}")
    if not ours["forward"]["relative_l2"] <= limit:
        found.append(f"the error of one forward, {ours['forward']['relative_l2']:.2e}, is above {limit:.2e}")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser()
    args = parse(parser, arguments)
    if args.graphs and not args.device.startswith("cuda"):
        parser.error("argument --graphs: it needs a GPU")
    quiet()
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        result = run(args, console)
    except ExampleError as error:
        console.print(f"error: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
        return 1
    (args.output / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    console.print()
    console.print(make_table(result))
    if result["machine"]["device"].startswith("CPU"):
        console.print("On a CPU the times are not the point: the package is for GPUs, and this shows that it is right.")
    elif result["run"]["model"] == RANDOM_WEIGHTS:
        console.print("The weights are random: the times are the model's, the clip shows nothing.")
    elif result["shows"]:
        console.print("The model is small: `--model random` has the times of the 2B model's shape.")
    for path in (*result["files"].values(), args.output / "result.json"):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    if result["note"]:
        console.print(result["note"], highlight=False)
    for name, reasons in result["fallbacks"].items():
        if name.startswith("transformers."):  # no fault: T5 clamps its stream in float16, which blocks here do not
            console.print(f"stock calls of {name}: {', '.join(reasons)}", highlight=False, soft_wrap=True)
    for fault in faults(result):
        console.print(f"fault: {fault}", style="red", highlight=False, soft_wrap=True)
    return 1 if faults(result) else 0


if __name__ == "__main__":
    sys.exit(main())
