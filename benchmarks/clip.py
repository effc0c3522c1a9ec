"""Times whole clips of LTX-Video 2B and LTX-2: prompt, denoising steps and decoding, in several configurations.

    python tools/build.py
    python benchmarks/clip.py [--recipes distilled guided] [--sizes 49x512x768 121x704x1216] [--configs stock kernels]
    python benchmarks/clip.py --update --recipes guided --configs stock compile kernels --idle   # adds to the file
    python benchmarks/clip.py --update --models ltx2 --recipes distilled --sizes 121x512x768

A clip is one call of a pipeline with the prompt as text and the video as a tensor on the device. Every part has its
released shape and random weights. "ltx" is LTXPipeline with T5-XXL, the transformer of the 2B model and the VAE of
LTX-Video 0.9.5. "ltx2" is LTX2Pipeline, whose clips have sound, with the language model of Gemma 3 12B and the parts of
LTX-2.0. "distilled" is 8 steps without guidance, "guided" 30 steps with it. The configurations share one set of weights
and take turns.

"compile" compiles the transformer's blocks, the decoder of the video and the text encoder. "kernels" is `optimize` of
these three components, "kernels_fp8" the same with the transformer in fp8, "_graphs" adds `graphs=True`, and "_auto"
`graphs="auto"`. The other parts of LTX-2, which are the connectors after the text encoder and the decoder of the
sound, are the stock ones.

`clip_ms` is the whole call, `text_ms` the prompt, `step_ms` one step (median), `decode_ms` the decoders with what
follows them. `idle_ms`, with --idle, is what the kernels of one clip leave of `clip_ms`: the GPU waits for the host
then. `first_s` counts from the call that makes a configuration to the end of its first clip; compiled configurations
have none where other benchmarks use the GPU meanwhile. `capture_s` is what the slowest capture of a CUDA graph took,
which a new shape pays once for each component, and `graph_gb` what the graphs hold. `peak_gb` is the most memory that a
clip takes, weights included; the other configurations' own weights are not counted.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
import time
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import vae
from model_shapes import LTX2, LTX2_TINY
from result_files import DTYPES, REPOSITORY, kept_records, write
from rich.console import Console
from rich.progress import Progress
from runs import add_options, begin, empty_table
from sharing import share
from steps import COLUMNS, options_of, synchronize, view_of
from whole import Model, graphs_option, measure, random_pipeline

sys.path.insert(0, str(REPOSITORY / "examples"))
import command_line
import ltx_pipeline
import transformers
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    AutoencoderKLLTXVideo,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from image_pipeline import GATED, T5_XXL
from llm_shapes import SHAPES

CONFIGS = ("stock", "compile", "kernels", "kernels_graphs", "kernels_auto")
CONFIGS += ("kernels_fp8", "kernels_fp8_graphs", "kernels_fp8_auto")
COMPONENTS = ("text_encoder", "transformer", "vae")
IDENTITY = ("model", "recipe", "frames", "height", "width", "config")  # what a record measures


@dataclass(frozen=True)
class Recipe:
    steps: int
    guidance: float  # 1: none


RECIPES = {"distilled": Recipe(8, 1.0), "guided": Recipe(30, 3.0)}

# As the pages of the released models state them.
GEMMA_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 512}
GEMMA_TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "query_pre_attn_scalar": 32}
SIGLIP_TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
CONNECTORS_TINY = {f"{stream}_connector_num_attention_heads": 2 for stream in ("video", "audio")}
CONNECTORS_TINY |= {f"{stream}_connector_attention_head_dim": 32 for stream in ("video", "audio")}
SOUND_TINY = {"base_channels": 32, "mel_bins": 16, "num_res_blocks": 1}
LTX2_PROMPT = 1024  # tokens, padding among them


def ltx_video(tiny: bool, device: torch.device) -> Any:
    pipe = ltx_pipeline.random_pipeline("tiny" if tiny else "random", device, seed=0)
    if not tiny:
        with device:
            config = transformers.T5Config(vocab_size=len(pipe.tokenizer), **T5_XXL, **GATED)
            pipe.text_encoder = transformers.T5EncoderModel(config)
            pipe.vae = AutoencoderKLLTXVideo(**vae.LTX)
            ltx_pipeline.smooth_upsampling(pipe.vae)
    return pipe


def ltx_2(tiny: bool, device: torch.device) -> Any:
    """LTX-2.0. A prompt of text does not run the text encoder's part for images, which is small here."""
    text = {**SHAPES["gemma3-12b"][1], **(GEMMA_TINY if tiny else {})}
    video = {**vae.MODELS["ltx2"][1], **(vae.SMALL["ltx2"] if tiny else {})}
    tokenizer = ltx_pipeline.byte_tokenizer()
    tokenizer.model_max_length = LTX2_PROMPT
    torch.manual_seed(0)
    with device:
        decoder = AutoencoderKLLTX2Video(**video)
        sound = AutoencoderKLLTX2Audio(**(SOUND_TINY if tiny else {}))
        channels = {"in_channels": decoder.config.latent_channels, "out_channels": decoder.config.latent_channels}
        spectrum = sound.config.latent_channels * sound.config.mel_bins // sound.mel_compression_ratio
        channels |= {"audio_in_channels": spectrum, "audio_out_channels": spectrum}
        return LTX2Pipeline(
            scheduler=ltx_pipeline.make_scheduler(),
            vae=decoder,
            audio_vae=sound,
            text_encoder=transformers.Gemma3ForConditionalGeneration(
                transformers.Gemma3Config(text_config=text, vision_config=SIGLIP_TINY)
            ),
            tokenizer=tokenizer,
            connectors=LTX2TextConnectors(
                caption_channels=text["hidden_size"],
                text_proj_in_factor=text["num_hidden_layers"] + 1,
                **LTX2,
                **(CONNECTORS_TINY if tiny else {}),
            ),
            transformer=LTX2VideoTransformer3DModel(**channels, **LTX2, **(LTX2_TINY if tiny else {})),
            vocoder=LTX2Vocoder(
                in_channels=sound.config.output_channels * sound.config.mel_bins,
                **({"hidden_channels": 32} if tiny else {}),
            ),
        )


MODELS = {"ltx": Model("LTX-Video 2B", ltx_video), "ltx2": Model("LTX-2", ltx_2)}


def configured(config: str, pipe: Any, ltx: ModuleType) -> Any:
    """A pipeline with views of the same weights, prepared as `config` says."""
    parts = {**pipe.components, **{name: view_of(getattr(pipe, name)) for name in COMPONENTS}}
    if config not in ("stock", "compile"):
        parts["vae"] = copy.deepcopy(pipe.vae)  # its weights change their memory order
    made = type(pipe)(**parts)
    if config == "compile":
        made.transformer.compile_repeated_blocks(fullgraph=True)
        made.vae.decoder.compile()
        made.text_encoder.compile()
    elif config != "stock":
        graphs = graphs_option(config)
        ltx.optimize(made, components=("text_encoder", "vae"), graphs=graphs)
        ltx.optimize(made, components=("transformer",), **{**options_of(config), "graphs": graphs})
    return made


def make_clip(pipe: Any, recipe: Recipe, size: tuple[int, int, int], device: str) -> dict[str, Any]:
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


def measure_clips(
    model: str,
    pipe: Any,
    ltx: ModuleType,
    recipe: str,
    size: tuple[int, int, int],
    options: argparse.Namespace,
    progress: Progress,
) -> list[dict[str, Any]]:
    frames, height, width = size
    common = {"model": model, "recipe": recipe, "frames": frames, "height": height, "width": width}
    common["steps"] = RECIPES[recipe].steps
    records = measure(
        f"{model}, {recipe}, {frames} frames",
        options.configs,
        lambda config: configured(config, pipe, ltx),
        lambda made: make_clip(made, RECIPES[recipe], size, options.device),
        ltx,
        options.clips,
        options,
        progress,
    )
    return [{**common, "config": config, **record} for config, record in records]


def clip_of(record: dict[str, Any]) -> str:
    return f"{record['recipe']}, {record['frames']} frames of {record['height']}x{record['width']}"


def print_table(records: list[dict[str, Any]], console: Console) -> None:
    texts = "model", "clip", "configuration"
    numbers = "ms", "x stock", "text", "step", "decoding", "idle", "peak GiB", "first s"
    table = empty_table("Whole clips", texts, numbers)
    stock = {(r["model"], clip_of(r)): r["clip_ms"] for r in records if r["config"] == "stock"}
    for record in records:
        baseline = stock.get((record["model"], clip_of(record)))
        table.add_row(
            record["model"],
            clip_of(record),
            record["config"],
            f"{record['clip_ms']:.1f}",
            f"{baseline / record['clip_ms']:.2f}" if baseline else "",
            f"{record['text_ms']:.1f}",
            f"{record['step_ms']:.2f}",
            f"{record['decode_ms']:.1f}",
            f"{record['idle_ms']:.1f}" if "idle_ms" in record else "",
            f"{record['peak_gb']:.1f}" if "peak_gb" in record else "",
            f"{record['first_s']:.1f}" if "first_s" in record else "",
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
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["ltx"], help="(default: ltx)")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="(default: all)")
    sizes = [(49, 512, 768), (121, 704, 1216)]
    parser.add_argument("--sizes", type=clip_size, nargs="+", metavar="FRAMESxHEIGHTxWIDTH", default=sizes)
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS), help="(default: all)")
    parser.add_argument("--clips", type=int, default=4, help="timed clips of each configuration (default: 4)")
    parser.add_argument("--idle", action="store_true", help="profile one clip of each configuration on a GPU")
    parser.add_argument("--update", action="store_true", help="keep what the file says of all else")
    add_options(parser, "clip", "small parts of the same kinds")
    options = parser.parse_args(arguments)
    ltx_pipeline.quiet()
    facts = {"weights": "random", "dtype": options.dtype, "clips": options.clips}
    share()
    ltx, output, meta, console = begin("clip", options, **facts)
    records: list[dict[str, Any]] = []
    with torch.no_grad(), Progress(*COLUMNS, console=console) as progress:
        for model in options.models:
            pipe = random_pipeline(MODELS[model], options.tiny, torch.device(options.device), DTYPES[options.dtype])
            for recipe, size in itertools.product(options.recipes, options.sizes):
                torch.compiler.reset()  # a second shape would be compiled for all sizes, and slower
                records += measure_clips(model, pipe, ltx, recipe, size, options, progress)
                shown = kept_records(output, meta, records, IDENTITY) if options.update else records
                write(output, meta, shown)
            del pipe  # the parts of two models do not fit into one GPU's memory
    print_table(shown, console)
    console.print(str(output), highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
