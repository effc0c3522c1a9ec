"""Times a request to a pipeline that a serving engine has loaded, with and without this project's plug-in for it.

    python tools/build.py
    pip install ./engines && pip install --no-deps sglang vllm-omni
    python benchmarks/engines.py [--engines sglang vllm_omni] [--blocks 4] [--tiny]

The pipeline is FLUX.1-schnell of the released widths, with the first `--blocks` double blocks, twice as many single
blocks, a small text encoder in the place of T5, and random weights. It lies in a folder, from which the engine's own
class for pipelines of diffusers loads it. Of the engine this class and its plug-in mechanism run, from the installed
wheel, and nothing else: no HTTP, no scheduler and no worker processes (tests/helpers/engine_servers.py).

A request is one image of 4 steps as PIL. "plain" has the plug-in turned off, "plugin" its default options, and
"plugin_fp8" precision="fp8". The configurations of an engine take turns. `same_image` says whether the image has the
bits of the one that the same pipeline makes in a program of its own that calls `optimize` with the same options.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from result_files import DTYPES, REPO_ID, REPOSITORY, write
from rich.console import Console
from runs import add_options, begin, empty_table
from steps import free_memory, synchronize
from torch import nn

sys.path.insert(0, str(REPOSITORY / "examples"))
sys.path.insert(0, str(REPOSITORY / "tests"))
import command_line
import diffusers
from helpers import engine_servers
from image_pipeline import CLIP_L, FLUX_TINY, VAE, VAE_TINY, clip_encoder, t5_encoder, tokenizer

START = {"sglang": engine_servers.start_sglang_wheel, "vllm_omni": engine_servers.start_vllm_omni_wheel}
OPTIONS: dict[str, dict[str, Any] | None] = {"plain": None, "plugin": {}, "plugin_fp8": {"precision": "fp8"}}
STEPS, WARM_UP = 4, 3


def make_pipeline(blocks: int, tiny: bool, device: torch.device) -> Any:
    config = FLUX_TINY if tiny else {"joint_attention_dim": 32}
    depth = {"num_layers": blocks, "num_single_layers": 2 * blocks}
    with device:
        return diffusers.FluxPipeline(
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
            vae=diffusers.AutoencoderKL(**{**VAE, **(VAE_TINY if tiny else {})}),
            text_encoder=clip_encoder(CLIP_L, tiny, projected=False),
            tokenizer=tokenizer(77),
            text_encoder_2=t5_encoder(tiny=True),
            tokenizer_2=tokenizer(512),
            transformer=diffusers.FluxTransformer2DModel(**{**config, **depth}),
        )


def request(pipe: Any, size: int) -> np.ndarray[Any, Any]:
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    (image,) = pipe(
        command_line.PROMPT,
        height=size,
        width=size,
        num_inference_steps=STEPS,
        guidance_scale=0.0,
        max_sequence_length=256,
        generator=generator,
    ).images
    return np.asarray(image)


def own_image(folder: str, config: str, ltx: ModuleType, options: argparse.Namespace, size: int) -> Any:
    """The image of a program that loads the folder itself."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=DTYPES[options.dtype]).to(options.device)
    given = OPTIONS[config]
    if given is not None:
        ltx.optimize(pipe, **{"graphs": False, **given})  # as the plug-ins do
    image = request(pipe, size)
    del pipe
    free_memory(options.device)
    return image


def served(engine: str, folder: str, config: str, options: argparse.Namespace) -> Any:
    given = OPTIONS[config]
    text = "0" if given is None else json.dumps(given)
    with mock.patch.dict(os.environ, LTX_KERNELS_OPTIMIZE=text, LTX_KERNELS_REPO=REPO_ID):
        return START[engine](folder, device=torch.device(options.device), dtype=DTYPES[options.dtype])


def measure_engine(
    engine: str, folder: str, images: dict[str, Any], options: argparse.Namespace, size: int
) -> list[dict[str, Any]]:
    pipes = {config: served(engine, folder, config, options) for config in OPTIONS}
    times: dict[str, list[float]] = {config: [] for config in pipes}
    records = []
    for pipe in pipes.values():
        for _ in range(WARM_UP):
            request(pipe, size)
    for turn in range(options.requests):
        for config in list(pipes)[:: -1 if turn % 2 else 1]:
            synchronize(options.device)
            start = time.perf_counter()
            request(pipes[config], size)
            times[config].append(time.perf_counter() - start)
    for config, pipe in pipes.items():
        report = getattr(pipe, "_ltx_report", None)
        records.append(
            {
                "engine": engine,
                "version": engine_servers.version_of(engine),
                "config": config,
                "height": size,
                "width": size,
                "steps": STEPS,
                "request_ms": round(statistics.median(times[config]) * 1e3, 2),
                "same_image": bool(np.array_equal(request(pipe, size), images[config])),
                "replaced": sum(report.replaced.values()) if report is not None else 0,
                "fallbacks": sum(sum(reasons.values()) for reasons in report.fallbacks.values())
                if report is not None
                else 0,
            }
        )
    pipes.clear()
    free_memory(options.device)
    return records


def print_table(records: list[dict[str, Any]], console: Console) -> None:
    table = empty_table("Requests", ("engine", "config", "same image"), ("ms", "x plain", "replaced", "fallbacks"))
    plain = {record["engine"]: record["request_ms"] for record in records if record["config"] == "plain"}
    for record in records:
        ratio = f"{plain[record['engine']] / record['request_ms']:.2f}"
        cells = (record["engine"], record["config"], str(record["same_image"]), str(record["request_ms"]), ratio)
        table.add_row(*cells, str(record["replaced"]), str(record["fallbacks"]))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", choices=START, default=list(START), help="(default: all)")
    parser.add_argument("--blocks", type=int, default=4, help="double blocks (default: 4)")
    parser.add_argument("--requests", type=int, default=6, help="timed requests of each configuration (default: 6)")
    add_options(parser, "engines", tiny="a small pipeline and images of 64x64")
    options = parser.parse_args()
    size = 64 if options.tiny else 1024
    facts = {"model": "FLUX.1-schnell", "blocks": [options.blocks, 2 * options.blocks]}
    ltx, path, meta, console = begin("engines", options, **facts)
    torch.manual_seed(0)
    pipe = make_pipeline(options.blocks, options.tiny, torch.device(options.device)).to(dtype=DTYPES[options.dtype])
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        pipe.save_pretrained(folder)
        parts = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
        console.print(f"{sum(p.numel() for part in parts for p in part.parameters()) / 1e9:.1f} G parameters")
        del pipe, parts
        free_memory(options.device)
        images = {config: own_image(folder, config, ltx, options, size) for config in OPTIONS}
        for engine in options.engines:
            records += measure_engine(engine, folder, images, options, size)
            write(path, meta, records)
    print_table(records, console)


if __name__ == "__main__":
    main()
