"""Times whole images of FLUX.1, FLUX.2, Stable Diffusion 3.5, Z-Image and Qwen-Image, in several configurations.

    python tools/build.py
    python benchmarks/image.py [--models schnell dev] [--configs stock compile kernels kernels_fp8_auto]
    python benchmarks/image.py --update --models zimage --idle    # adds to the file

An image is one call of a pipeline with the prompt as text and the result in PIL's form. Every part has its released
shape and random weights: schnell and dev are FLUX.1 with 4 and 28 steps, flux2_klein is FLUX.2 klein 4B (4 steps),
sd35 Stable Diffusion 3.5 large (28, with guidance), zimage Z-Image-Turbo (8), and qwen is Qwen-Image with 8 steps, as
with a Lightning LoRA. The configurations share one set of weights and take turns.

"compile" compiles the transformer's blocks, the decoder and the text encoders. "kernels" is `optimize(pipe)`,
"kernels_fp8" the same with precision="fp8", "_graphs" adds `graphs=True`, and "_auto" `graphs="auto"`. "_fbc" and
"_taylor" add diffusers' FirstBlockCache and TaylorSeer to "stock" or "kernels". They skip work, and `error_vs_fp32`
says what that costs. How much FirstBlockCache skips depends on the weights, and these are random.

"flux_fast" is the recipe of the project flux-fast: fused projections, the decoder in channels-last memory, and
torch.compile of transformer and decoder with max-autotune. "flux_fast_fp8" adds torchao's dynamic fp8 with one scale
for each tensor, "flux_fast_fp8_rows" with one for each row. torch 2.11 takes very long to compile these.
"flux_fast_fp8_blocks" is the last with less to search: the transformer is compiled block by block without CUDA graphs,
products are tuned, elementwise kernels and convolutions are not. Attention is torch's in all four, where flux-fast has
FlashAttention 3 in fp8 without scales.

`image_ms` is the whole call and `tensor_ms` the same without the conversion to PIL, which is `post_ms`. `text_ms` is
the prompt, `decode_ms` the decoder, `steps_ms` all that lies between, and `step_ms` that for each step.

`error_vs_fp32` compares the latents after all steps with those of the stock pipeline in float32. It is the norm of the
difference divided by the norm of the latents. `psnr` compares the images, in dB. A pipeline that does not fit into
memory in float32 has neither. The other columns are clip.py's.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import vae
from model_shapes import MODELS as TRANSFORMERS
from result_files import DTYPES, REPOSITORY, kept_records, write
from rich.console import Console
from rich.progress import Progress
from runs import add_options, begin, empty_table
from sharing import is_shared, share
from steps import COLUMNS, TORCHAO_INDUCTOR, free_memory, options_of, synchronize, view_of
from torch import Tensor
from whole import Model, graphs_option, measure, modules_of, random_pipeline

sys.path.insert(0, str(REPOSITORY / "examples"))
import command_line
import diffusers
import ltx_pipeline
import transformers
from image_pipeline import (
    CLIP_L,
    clip_encoder,
    instead,
    random_flux,
    t5_encoder,
    timed_parts,
    tokenizer,
)
from llm_shapes import SHAPES

CONFIGS = ("stock", "compile", "kernels", "kernels_graphs", "kernels_auto")
CONFIGS += ("kernels_fp8", "kernels_fp8_graphs", "kernels_fp8_auto")
CACHES = ("stock_fbc", "kernels_fbc", "stock_taylor", "kernels_taylor")
FLUX_FAST = ("flux_fast", "flux_fast_fp8", "flux_fast_fp8_rows", "flux_fast_fp8_blocks")
IDENTITY = ("model", "height", "width", "config")  # what a record measures

# As the pages of the released models state them.
CLIP_G = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
TEXT_TINY = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
QWEN3_4B = {**SHAPES["qwen3-8b"][1], "hidden_size": 2560, "intermediate_size": 9728}
KLEIN = {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680}


@dataclass(frozen=True)
class ImageModel(Model):
    steps: int
    size: int = 1024
    options: dict[str, Any] = field(default_factory=dict)  # of the call
    configs: tuple[str, ...] = CONFIGS


def qwen3_encoder(tiny: bool, layers: int) -> Any:
    config = {**QWEN3_4B, **({**TEXT_TINY, "head_dim": 16, "num_hidden_layers": layers} if tiny else {})}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config))


def image_vae(name: str, tiny: bool) -> Any:
    cls, config = vae.MODELS[name]
    return cls(**{**config, **(vae.SMALL[name] if tiny else {})})


def transformer(name: str, tiny: bool, **config: Any) -> Any:
    model = TRANSFORMERS[name]
    return getattr(diffusers, model.cls)(**{**model.config, **(model.tiny if tiny else {}), **config})


def scheduler(**config: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**config)


def flux2_klein(tiny: bool, device: torch.device) -> Any:
    with device:
        config = {"joint_attention_dim": 96} if tiny else KLEIN
        return diffusers.Flux2KleinPipeline(
            scheduler=scheduler(shift=3.0, use_dynamic_shifting=True),
            vae=image_vae("flux2", tiny),
            text_encoder=qwen3_encoder(tiny, 28),  # the pipeline reads layers 9, 18 and 27
            tokenizer=tokenizer(512),
            transformer=transformer("flux2", tiny, guidance_embeds=False, **config),
            is_distilled=True,
        )


def stable_diffusion_3(tiny: bool, device: torch.device) -> Any:
    with device:
        widths = {"joint_attention_dim": 32, "pooled_projection_dim": 32} if tiny else {}
        return diffusers.StableDiffusion3Pipeline(
            transformer=transformer("sd35", tiny, **widths),
            scheduler=scheduler(shift=3.0),
            vae=image_vae("flux", tiny),
            text_encoder=clip_encoder(CLIP_L, tiny, projected=True),
            tokenizer=tokenizer(77),
            text_encoder_2=clip_encoder({**CLIP_G, "hidden_act": "gelu"}, tiny, projected=True),
            tokenizer_2=tokenizer(77),
            text_encoder_3=t5_encoder(tiny),
            tokenizer_3=tokenizer(256),
        )


def z_image(tiny: bool, device: torch.device) -> Any:
    with device:
        return diffusers.ZImagePipeline(
            scheduler=scheduler(shift=3.0),
            vae=image_vae("flux", tiny),
            text_encoder=qwen3_encoder(tiny, 2),
            tokenizer=tokenizer(512),
            transformer=transformer("zimage", tiny),
        )


def qwen_image(tiny: bool, device: torch.device) -> Any:
    """A prompt of text does not run the text encoder's part for images, which is small here."""
    text = {**SHAPES["qwen2-7b"][1], **({**TEXT_TINY, "num_hidden_layers": 2} if tiny else {})}
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [2, 3, 3] if tiny else [16, 24, 24]}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "depth": 1, "out_hidden_size": 32}
    with device:
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
        return diffusers.QwenImagePipeline(
            scheduler=scheduler(shift=3.0, use_dynamic_shifting=True, base_shift=math.log(3), max_shift=math.log(3)),
            vae=image_vae("qwen", tiny),
            text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(config),
            tokenizer=tokenizer(1024),
            transformer=transformer("qwen", tiny),
        )


MODELS = {
    "schnell": ImageModel(
        "FLUX.1-schnell", lambda *given: random_flux(False, *given), 4,
        options={"guidance_scale": 0.0, "max_sequence_length": 256}, configs=CONFIGS + FLUX_FAST,
    ),
    "dev": ImageModel(
        "FLUX.1-dev", lambda *given: random_flux(True, *given), 28,
        options={"guidance_scale": 3.5, "max_sequence_length": 512}, configs=CONFIGS + CACHES + FLUX_FAST,
    ),
    "flux2_klein": ImageModel("FLUX.2 klein 4B", flux2_klein, 4, options={"guidance_scale": 1.0}),
    "sd35": ImageModel("Stable Diffusion 3.5 large", stable_diffusion_3, 28, options={"guidance_scale": 4.5}),
    "zimage": ImageModel("Z-Image-Turbo", z_image, 8, options={"guidance_scale": 0.0}),
    "qwen": ImageModel("Qwen-Image", qwen_image, 8, 1328, {"true_cfg_scale": 1.0}, CONFIGS + CACHES),
}  # fmt: skip


def configured(config: str, pipe: Any, ltx: ModuleType) -> Any:
    """A pipeline with views of the same weights, prepared as `config` says."""
    names = [name for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)]
    parts = {**pipe.components, **{name: view_of(getattr(pipe, name)) for name in names}}
    if config.startswith(("kernels", "flux_fast")):
        parts["vae"] = copy.deepcopy(pipe.vae)  # its weights change their memory order
    made = type(pipe)(**parts)
    if "is_distilled" in pipe.config:  # what FLUX.2 klein's constructor takes beside its components
        made.register_to_config(is_distilled=pipe.config.is_distilled)
    if config.endswith("_fbc"):
        made.transformer.enable_cache(diffusers.FirstBlockCacheConfig())
    elif config.endswith("_taylor"):
        made.transformer.enable_cache(diffusers.TaylorSeerCacheConfig())
    if config == "compile":
        made.transformer.compile_repeated_blocks(fullgraph=True)
        made.vae.decoder.compile()
        for name in names:
            if name.startswith("text_encoder"):
                getattr(made, name).compile()
    elif config.startswith("flux_fast"):
        flux_fast(made, config)
    elif config.startswith("kernels"):
        ltx.optimize(made, **{**options_of(config), "graphs": graphs_option(config)})
    return made


def flux_fast(pipe: Any, config: str) -> None:
    """Prepares a pipeline by flux-fast's recipe, without its attention."""
    pipe.transformer.fuse_qkv_projections()
    pipe.vae.fuse_qkv_projections()
    pipe.vae.to(memory_format=torch.channels_last)
    if "fp8" in config:
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, PerTensor, quantize_

        granularity = PerRow() if config.endswith(("rows", "blocks")) else PerTensor()
        quantize_(
            pipe.transformer,
            Float8DynamicActivationFloat8WeightConfig(granularity=granularity, set_inductor_config=False),
        )
    options = {"conv_1x1_as_mm": True, "epilogue_fusion": False}
    # With worker processes, torch 2.11 compiles each kernel that it tunes there first, and then here again.
    tuned: dict[str, Any] = {**options, "compile_threads": 1}
    if config.endswith("blocks"):
        pipe.transformer.compile_repeated_blocks(fullgraph=True, options={**tuned, "max_autotune_gemm": True})
    else:
        options = {**tuned, **TORCHAO_INDUCTOR, "max_autotune": True, "triton.cudagraphs": True}
        pipe.transformer.compile(fullgraph=True, options=options)
    pipe.vae.decode = torch.compile(pipe.vae.decode, fullgraph=True, options=options)


@contextlib.contextmanager
def same_noise(pipe: Any) -> Iterator[None]:
    """The first latents have the same values in every dtype, up to its rounding."""
    prepare = pipe.prepare_latents

    def prepared(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(prepare).bind(*args, **kwargs)
        dtype, given.arguments["dtype"] = given.arguments["dtype"], torch.float32
        made = prepare(*given.args, **given.kwargs)
        rounded = lambda tensor: tensor.to(torch.bfloat16).to(dtype)  # noqa: E731
        return rounded(made) if isinstance(made, Tensor) else (rounded(made[0]), *made[1:])

    with instead(pipe, "prepare_latents", prepared):
        yield


def generate(pipe: Any, model: ImageModel, size: tuple[int, int], form: str) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe(
        prompt=command_line.PROMPT,
        height=size[0],
        width=size[1],
        num_inference_steps=model.steps,
        generator=torch.Generator().manual_seed(0),
        output_type=form,
        **model.options,
    ).images


def make_image(pipe: Any, model: ImageModel, size: tuple[int, int], device: str) -> dict[str, float]:
    """One call; its milliseconds by part."""
    with same_noise(pipe), timed_parts(pipe, torch.device(device)) as parts:
        synchronize(device)
        start = time.perf_counter()
        generate(pipe, model, size, "pil")
        synchronize(device)
        whole = time.perf_counter() - start
    steps = whole - sum(parts.values())
    seconds = {"image": whole, "tensor": whole - parts["conversion"], "text": parts["text"], "decode": parts["vae"]}
    seconds |= {"post": parts["conversion"], "steps": steps, "step": steps / model.steps}
    return {f"{part}_ms": value * 1e3 for part, value in seconds.items()}


def results(pipe: Any, model: ImageModel, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The latents after all steps, and the image between 0 and 1."""
    with same_noise(pipe):
        latents, image = (torch.as_tensor(generate(pipe, model, size, form)).float() for form in ("latent", "pt"))
    return latents, image


def exact_results(pipe: Any, model: ImageModel, size: tuple[int, int], device: str) -> tuple[Tensor, Tensor] | None:
    """The same in float32; None where that does not fit into memory. The weights come back without a change."""
    dtype = pipe.transformer.dtype
    try:
        for module in modules_of(pipe):
            module.float()
        return results(pipe, model, size)
    except torch.cuda.OutOfMemoryError:
        if is_shared():  # others have part of the memory
            raise
        return None
    finally:
        for module in modules_of(pipe):
            module.to(dtype)
        free_memory(device)


def errors(found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> dict[str, Any]:
    (latents, image), (true_latents, true_image) = found, exact
    distance = (latents - true_latents).norm() / true_latents.norm()
    square = (image - true_image).square().mean().item()
    return {"error_vs_fp32": distance.item(), "psnr": round(-10 * math.log10(square), 2) if square else None}


def measure_images(
    name: str, pipe: Any, ltx: ModuleType, size: tuple[int, int], options: argparse.Namespace, progress: Progress
) -> list[dict[str, Any]]:
    model, device = MODELS[name], options.device
    configs = [config for config in options.configs or model.configs if config in model.configs]
    exact = None if options.no_errors else exact_results(pipe, model, size, device)
    if exact is None and not options.no_errors:
        progress.console.print(f"{name}: no errors, since the pipeline in float32 does not fit into memory")
    records = measure(
        name,
        configs,
        lambda config: configured(config, pipe, ltx),
        lambda made: make_image(made, model, size, device),
        ltx,
        options.images,
        options,
        progress,
        lambda made: {} if exact is None else errors(results(made, model, size), exact),
    )
    common = {"model": name, "height": size[0], "width": size[1], "steps": model.steps}
    return [{**common, "config": config, **record} for config, record in records]


def print_table(records: list[dict[str, Any]], console: Console) -> None:
    numbers = (
        "ms",
        "x stock",
        "text",
        "step",
        "decoding",
        "to PIL",
        "idle",
        "peak GiB",
        "graphs GiB",
        "first s",
        "error",
    )
    table = empty_table("Whole images", ("model", "configuration"), numbers)
    stock = {(r["model"], r["height"], r["width"]): r["image_ms"] for r in records if r["config"] == "stock"}
    for record in records:
        baseline = stock.get((record["model"], record["height"], record["width"]))
        table.add_row(
            f"{record['model']}, {record['height']}x{record['width']}",
            record["config"],
            f"{record['image_ms']:.1f}",
            f"{baseline / record['image_ms']:.2f}" if baseline else "",
            f"{record['text_ms']:.1f}",
            f"{record['step_ms']:.2f}",
            f"{record['decode_ms']:.1f}",
            f"{record['post_ms']:.1f}",
            f"{record['idle_ms']:.1f}" if "idle_ms" in record else "",
            f"{record['peak_gb']:.1f}" if "peak_gb" in record else "",
            f"{record['graph_gb']:.2f}" if "graph_gb" in record else "",
            f"{record['first_s']:.1f}" if "first_s" in record else "",
            f"{record['error_vs_fp32']:.3g}" if "error_vs_fp32" in record else "",
        )
    console.print(table)


def image_size(text: str) -> tuple[int, int]:
    try:
        height, width = map(int, text.split("x"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected HEIGHTxWIDTH, got {text}") from error
    return command_line.pixels(str(height)), command_line.pixels(str(width))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)")
    parser.add_argument("--size", type=image_size, metavar="HEIGHTxWIDTH", help="(default: each model's own)")
    choices = CONFIGS + CACHES + FLUX_FAST
    parser.add_argument("--configs", nargs="+", choices=choices, help="(default: all that the model has)")
    parser.add_argument("--images", type=int, default=4, help="timed images of each configuration (default: 4)")
    parser.add_argument("--no-errors", action="store_true", help="leave out the pipeline in float32")
    parser.add_argument("--idle", action="store_true", help="profile one image of each configuration on a GPU")
    parser.add_argument("--update", action="store_true", help="keep what the file says of all else")
    add_options(parser, "image", "small parts of the same kinds")
    options = parser.parse_args(arguments)
    ltx_pipeline.quiet()
    facts = {"weights": "random", "dtype": options.dtype, "images": options.images}
    share()
    ltx, output, meta, console = begin("image", options, **facts)
    records: list[dict[str, Any]] = []
    with torch.no_grad(), Progress(*COLUMNS, console=console) as progress:
        for name in options.models:
            torch.compiler.reset()
            pipe = random_pipeline(MODELS[name], options.tiny, torch.device(options.device), DTYPES[options.dtype])
            size = options.size or (MODELS[name].size,) * 2
            records += measure_images(name, pipe, ltx, size, options, progress)
            shown = kept_records(output, meta, records, IDENTITY) if options.update else records
            write(output, meta, shown)
            del pipe  # the parts of two models do not fit into one GPU's memory
            free_memory(options.device)
    print_table(shown, console)
    console.print(str(output), highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
