"""Times whole clips of LTX-Video 2B: prompt, denoising steps and decoding, in several configurations.

    python tools/build.py
    python benchmarks/clip.py [--recipes distilled guided] [--sizes 49x512x768 121x704x1216] [--configs stock kernels]
    python benchmarks/clip.py --update --recipes guided --configs stock compile kernels --idle   # adds to the file

A clip is one call of LTXPipeline with the prompt as text and the video as a tensor on the device. Every part has its
released shape and random weights: T5-XXL, the transformer of the 2B model, the VAE of LTX-Video 0.9.5. "distilled" is
8 steps without guidance, "guided" 30 steps with it. The configurations share one set of weights and take turns.

"compile" compiles the transformer's blocks, the decoder and the text encoder. "kernels" is `optimize` of all three
components, "kernels_fp8" the same with the transformer in fp8, and "_graphs" adds `graphs=True`.

`clip_ms` is the whole call, `text_ms` the prompt, `step_ms` one step (median), `decode_ms` the VAE with what follows
it. `idle_ms`, with --idle, is what the kernels of one clip leave of `clip_ms`: the GPU waits for the host then.
`first_s` counts from the call that makes a configuration to the end of its first clip. `peak_gb` is the most memory
that a clip takes, weights included; the other configurations' own weights are not counted.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from cpu import DTYPES, REPOSITORY, slug_of
from cpu import meta as common_meta
from ops import kept_records, load_package, write
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from steps import COLUMNS, kernel_times, synchronize, view_of, weight_bytes
from vae import LTX as VAE_095

sys.path.insert(0, str(REPOSITORY / "examples"))
import command_line
import ltx_pipeline
import transformers
from diffusers import AutoencoderKLLTXVideo, LTXPipeline

CONFIGS = ("stock", "compile", "kernels", "kernels_graphs", "kernels_fp8", "kernels_fp8_graphs")
COMPONENTS = ("text_encoder", "transformer", "vae")
IDENTITY = ("recipe", "frames", "height", "width", "config")  # what a record measures
COLOURS = {"prompt": "#8172B3", "steps": "#4C72B0", "decoding": "#55A868", "rest": "#CCCCCC"}


@dataclass(frozen=True)
class Recipe:
    steps: int
    guidance: float  # 1: none


RECIPES = {"distilled": Recipe(8, 1.0), "guided": Recipe(30, 3.0)}

# As the pages of the released models state them.
T5_XXL = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
GATED = {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new"}


def released_pipeline(model: str, device: torch.device, dtype: torch.dtype) -> LTXPipeline:
    """A pipeline with every part at its released shape; "tiny" has small parts of the same kinds."""
    torch.set_default_dtype(dtype)
    try:
        pipe = ltx_pipeline.random_pipeline(model, device, seed=0)
        if model == "random":
            with device:
                config = transformers.T5Config(vocab_size=len(pipe.tokenizer), **T5_XXL, **GATED)
                pipe.text_encoder = transformers.T5EncoderModel(config)
                pipe.vae = AutoencoderKLLTXVideo(**VAE_095)
                ltx_pipeline.smooth_upsampling(pipe.vae)
    finally:
        torch.set_default_dtype(torch.float32)
    pipe.to(dtype=dtype)
    for name in COMPONENTS:
        getattr(pipe, name).eval().requires_grad_(False)
    return pipe


def configured(config: str, pipe: LTXPipeline, ltx: ModuleType) -> LTXPipeline:
    """A pipeline with views of the same weights, prepared as `config` says."""
    parts = {name: view_of(getattr(pipe, name)) for name in COMPONENTS}
    if config not in ("stock", "compile"):
        parts["vae"] = copy.deepcopy(pipe.vae)  # its weights change their memory order
    made = LTXPipeline(scheduler=pipe.scheduler, tokenizer=pipe.tokenizer, **parts)
    if config == "compile":
        made.transformer.compile_repeated_blocks(fullgraph=True)
        made.vae.decoder.compile()
        made.text_encoder.compile()
    elif config != "stock":
        precision = "fp8" if "fp8" in config else "native"  # of the transformer: the others have no such layers
        ltx.optimize(made, components=COMPONENTS, precision=precision, graphs=config.endswith("graphs"))
    return made


def make_clip(pipe: LTXPipeline, recipe: Recipe, size: tuple[int, int, int], device: str) -> dict[str, Any]:
    """One call; its milliseconds by part."""
    frames, height, width = size
    args = SimpleNamespace(
        prompt=command_line.PROMPT,
        negative_prompt=command_line.NEGATIVE_PROMPT,
        frames=frames,
        height=height,
        width=width,
        guidance_scale=recipe.guidance,
        seed=0,
        device=device,
    )
    synchronize(device)
    start = time.perf_counter()
    generator = ltx_pipeline.Generator(pipe, args, Progress(disable=True), output_type="pt")
    clip = generator("", recipe.steps)
    synchronize(device)
    whole = (time.perf_counter() - start) * 1e3
    text, steps, decode = generator.text_seconds * 1e3, [s * 1e3 for s in clip.steps], clip.decode * 1e3
    return {
        "clip_ms": whole,
        "text_ms": text,
        "step_ms": statistics.median(steps),
        "steps_ms": sum(steps),
        "decode_ms": decode,
    }


def measure(
    pipe: LTXPipeline, ltx: ModuleType, recipe: str, size: tuple[int, int, int], options: Any, progress: Progress
) -> list[dict[str, Any]]:
    device = options.device
    task = progress.add_task(f"{recipe}, {size[0]} frames", total=len(options.configs) * (options.clips + 1))
    made: dict[str, LTXPipeline] = {}
    records: dict[str, dict[str, Any]] = {}
    for config in options.configs:
        synchronize(device)
        start = time.perf_counter()
        made[config] = configured(config, pipe, ltx)
        make_clip(made[config], RECIPES[recipe], size, device)
        records[config] = {"first_s": round(time.perf_counter() - start, 3)}
        make_clip(made[config], RECIPES[recipe], size, device)  # may capture graphs; the third is like all that follow
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            make_clip(made[config], RECIPES[recipe], size, device)
            weights = sum(weight_bytes(getattr(made[config], name)) for name in COMPONENTS)
            records[config]["peak_gb"] = round((weights + torch.cuda.max_memory_allocated() - before) / 2**30, 3)
            if options.idle:
                by_kind, _ = kernel_times(lambda c=config: make_clip(made[c], RECIPES[recipe], size, device), 1)
                records[config]["kernels_ms"] = round(sum(by_kind.values()), 2)
        progress.console.print(f"{recipe}, {size[0]} frames, {config}: first clip {records[config]['first_s']} s")
        progress.advance(task)
    clips: dict[str, list[dict[str, float]]] = {config: [] for config in made}
    for turn in range(options.clips):
        for config in list(made)[:: -1 if turn % 2 else 1]:
            clips[config].append(make_clip(made[config], RECIPES[recipe], size, device))
            progress.advance(task)
    for config, record in records.items():
        record.update({key: round(statistics.median(c[key] for c in clips[config]), 2) for key in clips[config][0]})
        if "kernels_ms" in record:
            record["idle_ms"] = round(max(0.0, record["clip_ms"] - record["kernels_ms"]), 2)
    frames, height, width = size
    common = {"recipe": recipe, "frames": frames, "height": height, "width": width, "steps": RECIPES[recipe].steps}
    return [{**common, "config": config, **record} for config, record in records.items()]


def draw(records: list[dict[str, Any]], path: Path, title: str) -> None:
    """Where the time of a clip goes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        name = f"{record['recipe']}, {record['frames']} frames {record['height']}x{record['width']}"
        groups.setdefault(name, []).append(record)
    figure, axes = pyplot.subplots(1, len(groups), figsize=(5.2 * len(groups), 4), squeeze=False)
    for axis, (name, shown) in zip(axes[0], groups.items()):
        labels = [record["config"].replace("_", "\n+ ") for record in shown]
        parts = {
            "prompt": [record["text_ms"] for record in shown],
            "steps": [record["steps_ms"] for record in shown],
            "decoding": [record["decode_ms"] for record in shown],
        }
        parts["rest"] = [max(0.0, record["clip_ms"] - sum(values)) for record, *values in zip(shown, *parts.values())]
        bottom = [0.0] * len(shown)
        for part, colour in COLOURS.items():
            axis.bar(labels, parts[part], bottom=bottom, color=colour, label=part, width=0.7)
            bottom = [b + value for b, value in zip(bottom, parts[part])]
        for i, record in enumerate(shown):
            axis.text(i, bottom[i], f"{record['clip_ms']:.0f}", ha="center", va="bottom", fontsize=9)
        axis.set_title(name, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="x", labelsize=8)
    axes[0][0].set_ylabel("ms a clip")
    axes[0][-1].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=150)
    pyplot.close(figure)


def print_table(records: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="LTX-Video 2B, whole clips")
    columns = ("clip", "configuration", "clip ms", "x stock", "text", "step", "decoding", "idle", "peak GiB", "first s")
    for column in columns:
        table.add_column(column, justify="left" if column in ("clip", "configuration") else "right")
    stock = {(r["recipe"], r["frames"]): r["clip_ms"] for r in records if r["config"] == "stock"}
    for record in records:
        baseline = stock.get((record["recipe"], record["frames"]))
        table.add_row(
            f"{record['recipe']} {record['frames']}x{record['height']}x{record['width']}",
            record["config"],
            f"{record['clip_ms']:.1f}",
            f"{baseline / record['clip_ms']:.2f}" if baseline else "",
            f"{record['text_ms']:.1f}",
            f"{record['step_ms']:.2f}",
            f"{record['decode_ms']:.1f}",
            f"{record['idle_ms']:.1f}" if "idle_ms" in record else "",
            f"{record['peak_gb']:.1f}" if "peak_gb" in record else "",
            f"{record['first_s']:.1f}",
        )
    console.print(table)


def clip_size(text: str) -> tuple[int, int, int]:
    try:
        frames, height, width = map(int, text.split("x"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected FRAMESxHEIGHTxWIDTH, got {text}") from error
    return command_line.frames(str(frames)), command_line.pixels(str(height)), command_line.pixels(str(width))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="(default: all)")
    sizes = [(49, 512, 768), (121, 704, 1216)]
    parser.add_argument("--sizes", type=clip_size, nargs="+", metavar="FRAMESxHEIGHTxWIDTH", default=sizes)
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS), help="(default: all)")
    parser.add_argument("--model", choices=("random", "tiny"), default="random")
    parser.add_argument("--clips", type=int, default=4, help="timed clips of each configuration (default: 4)")
    parser.add_argument("--idle", action="store_true", help="profile one clip of each configuration on a GPU")
    parser.add_argument("--update", action="store_true", help="keep what the file says of all else")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="JSON (default: benchmarks/results/<gpu>-clip.json)")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 130)
    ltx_pipeline.quiet()
    ltx, metadata = load_package()
    cuda = options.device == "cuda"
    name = torch.cuda.get_device_name() if cuda else "cpu"
    slug = slug_of(name)
    output = options.output or REPOSITORY / f"benchmarks/results/{slug}-clip.json"
    meta = {
        **common_meta(metadata, options.device),
        "model": options.model,
        "dtype": options.dtype,
        "clips": options.clips,
    }
    records: list[dict[str, Any]] = []
    with torch.no_grad(), Progress(*COLUMNS, console=console) as progress:
        pipe = released_pipeline(options.model, torch.device(options.device), DTYPES[options.dtype])
        for recipe, size in itertools.product(options.recipes, options.sizes):
            torch.compiler.reset()  # a second shape would be compiled for all sizes, and slower
            records += measure(pipe, ltx, recipe, size, options, progress)
            shown = kept_records(output, meta, records, IDENTITY) if options.update else records
            write(output, meta, shown)
    draw(shown, output, f"LTX-Video 2B, {options.dtype}, {name}")
    print_table(shown, console)
    console.print(str(output), highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
