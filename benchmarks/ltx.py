"""Times a denoising step of LTX-Video: stock, with this package, with torch.compile, with both, and all that in fp8.

    python tools/build.py
    python benchmarks/ltx.py [--frames 49 161] [--configs baseline kernels] [--model random|tiny|ID] [--output PATH]

A step is one forward of the transformer with the batch that guidance makes, timed among others as in denoising. The
configurations share one set of weights and take turns, forwards and backwards: each leaves the chip warm or cool for
the next one. fp8 is optimize(precision="fp8"), and torchao's dynamic quantisation per row of the same blocks' linear
layers (where torchao is installed), compiled block by block.

`step_ms` times steps as a program launches them, `graph_ms` the same kernels in a CUDA graph: where `graph_ms` is much
less, the step waits for the host. `first_step_s` is what it takes from the call that makes a configuration to the
end of its first step; `peak_gb` its weights and what a step needs beside them; `error_vs_fp32` the relative L2 error of
the result against the stock model in float32, and `psnr_vs_baseline` its likeness to the stock result in decibels.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import sys
from collections.abc import Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch
from diffusers import LTXVideoTransformer3DModel
from result_files import DTYPES, kept_records, write
from rich.console import Console
from rich.progress import Progress
from runs import add_options, begin, empty_table
from sharing import share
from steps import (
    COLUMNS,
    CONFIGS,
    FP8_CONFIGS,
    TORCHAO_INDUCTOR,
    Turns,
    error,
    label,
    measure,
    options_of,
    psnr,
    quantise_with_torchao,
    view_of,
)
from torch import Tensor, nn

TINY = {"num_layers": 2, "num_attention_heads": 4, "cross_attention_dim": 256, "caption_channels": 64}
TEXT_TOKENS = 128
IDENTITY = ("frames", "height", "width", "batch", "config")  # what a record measures
PROMPTS = 10, 60  # how many of them are not padding: a short negative prompt and an ordinary one
TEMPORAL, SPATIAL, FRAME_RATE = 8, 32, 25  # the VAE's compression


def load_model(name: str, dtype: torch.dtype, device: str) -> LTXVideoTransformer3DModel:
    if name in ("random", "tiny"):
        torch.manual_seed(0)
        with torch.device(device):
            model = LTXVideoTransformer3DModel(**(TINY if name == "tiny" else {}))
        for key, parameter in model.named_parameters():
            if key.endswith(("norm_q.weight", "norm_k.weight")):
                nn.init.normal_(parameter, 1.0, 0.1)  # as constructed they are all one
        model = model.to(dtype)
    else:
        model = LTXVideoTransformer3DModel.from_pretrained(name, subfolder="transformer", torch_dtype=dtype).to(device)
    return model.eval().requires_grad_(False)


def make_inputs(
    model: nn.Module, batch: int, frames: int, height: int, width: int, prompts: Sequence[int] = PROMPTS
) -> dict[str, Any]:
    """What LTXPipeline hands the transformer. `prompts`: tokens of the negative prompt and of the other."""
    grid = (frames - 1) // TEMPORAL + 1, height // SPATIAL, width // SPATIAL
    options = {"device": model.device, "dtype": model.dtype}
    mask = torch.ones(batch, TEXT_TOKENS, device=model.device, dtype=torch.int64)
    mask[0, prompts[0] :] = 0
    mask[-1, prompts[-1] :] = 0
    return {
        "hidden_states": torch.randn(batch, math.prod(grid), model.config.in_channels, **options),
        "encoder_hidden_states": torch.randn(batch, TEXT_TOKENS, model.config.caption_channels, **options),
        "timestep": torch.full((batch,), 500.0, device=model.device),
        "encoder_attention_mask": mask,
        "num_frames": grid[0],
        "height": grid[1],
        "width": grid[2],
        "rope_interpolation_scale": (TEMPORAL / FRAME_RATE, SPATIAL, SPATIAL),
        "return_dict": False,
    }


def make_model(config: str, model: nn.Module, ltx: ModuleType) -> nn.Module:
    model = view_of(model)
    if config.startswith("kernels"):
        ltx.optimize(model, **options_of(config))
    elif config.startswith("torchao"):
        quantise_with_torchao(model)
    if config == "torchao_fp8_compile":  # block by block: whole, that takes minutes
        model.compile_repeated_blocks(fullgraph=True, options=TORCHAO_INDUCTOR)
    elif config.endswith("compile"):
        model.compile()
    return model


def measure_frames(
    model: nn.Module,
    exact: nn.Module,
    ltx: ModuleType,
    inputs: dict[str, Any],
    frames: int,
    configs: list[str],
    options: Any,
    progress: Progress,
) -> list[dict[str, Any]]:
    upcast = {k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    expected = exact(**upcast)[0]
    measured = measure(
        f"{frames} frames",
        lambda config: make_model(config, model, ltx),
        lambda made: lambda: made(**inputs)[0],
        configs,
        Turns(options.rounds, options.steps),
        options.device,
        progress,
    )
    baseline = measured.get("baseline")
    for one in measured.values():
        one.record["error_vs_fp32"] = float(f"{error(one.result, expected):.4g}")
        one.record["psnr_vs_baseline"] = None if baseline is None else psnr(one.result, baseline.result)
    return [{"config": config, **one.record} for config, one in measured.items()]


def print_table(records: list[dict[str, Any]], console: Console) -> None:
    numbers = "ms", "p90", "speed-up", "graph ms", "first step s", "peak GiB", "error", "PSNR dB"
    table = empty_table("LTX-Video, one denoising step", ("frames", "configuration"), numbers)
    for record in records:
        stock = [r for r in records if r["frames"] == record["frames"] and r["config"] == "baseline"]
        table.add_row(
            str(record["frames"]),
            label(record["config"]),
            f"{record['step_ms']:.2f}",
            f"{record['p90_ms']:.2f}",
            f"{stock[0]['step_ms'] / record['step_ms']:.3f}" if stock else "",
            f"{record['graph_ms']:.2f}" if "graph_ms" in record else "",
            f"{record['first_step_s']:.1f}" if "first_step_s" in record else "",
            f"{record['peak_gb']:.2f}" if "peak_gb" in record else "",
            f"{record['error_vs_fp32']:.2e}",
            "" if record["psnr_vs_baseline"] is None else f"{record['psnr_vs_baseline']:.1f}",
        )
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, nargs="+", default=[49, 161])
    parser.add_argument("--height", type=int, default=512)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=2, help="2 is one clip with guidance (default: 2)")
    parser.add_argument("--configs", nargs="+", choices=CONFIGS + FP8_CONFIGS, help="(default: all)")
    parser.add_argument(
        "--skip", nargs="+", default=[], metavar="FRAMES:CONFIG", help="leave out, to save its compilation"
    )
    parser.add_argument("--model", default="random", help="random (the 2B shape), tiny, a folder, or a Hub id")
    parser.add_argument(
        "--prompts",
        type=int,
        nargs=2,
        metavar="TOKENS",
        default=PROMPTS,
        help=f"tokens of the negative prompt and of the other, of {TEXT_TOKENS} (default: {PROMPTS})",
    )
    parser.add_argument("--rounds", type=int, default=4, help="turns of a configuration (default: 4)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a turn (default: 10)")
    add_options(parser, "ltx")
    options = parser.parse_args(arguments)
    torchao = version("torchao") if importlib.util.find_spec("torchao") else None
    if options.configs is None:
        options.configs = [*CONFIGS, *FP8_CONFIGS]
        if torchao is None:
            options.configs.remove("torchao_fp8_compile")
            print("missing: torchao, and with it torchao_fp8_compile")

    facts = {
        "model": options.model,
        "dtype": options.dtype,
        "torchao": torchao,
        "skipped": options.skip,
        "prompts": list(options.prompts),
        "psnr": "of the transformer's output, peak: the range of the stock output",
    }
    share()
    ltx, output, meta, console = begin("ltx", options, **facts)
    records: list[dict[str, Any]] = []
    with torch.no_grad(), Progress(*COLUMNS, console=console) as progress:
        model = load_model(options.model, DTYPES[options.dtype], options.device)
        exact = copy.deepcopy(model).float()
        for frames in options.frames:
            chosen = [config for config in options.configs if f"{frames}:{config}" not in options.skip]
            torch.compiler.reset()  # a second shape would be compiled for all sizes, and slower
            torch.manual_seed(frames)
            inputs = make_inputs(model, options.batch, frames, options.height, options.width, options.prompts)
            shape = {"frames": frames, "height": options.height, "width": options.width, "batch": options.batch}
            measured = measure_frames(model, exact, ltx, inputs, frames, chosen, options, progress)
            records += [{**shape, **record} for record in measured]
            write(output, meta, kept_records(output, meta, records, IDENTITY))
    print_table(records, console)
    console.print(str(output), highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
