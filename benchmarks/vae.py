"""Times the decoders and encoders of autoencoders, and the ops between their convolutions.

    python tools/build.py
    python benchmarks/vae.py [--models ltx ltx2 wan wan22] [--halves decode encode] [--sizes 49x512x768 121x704x1216]
    python benchmarks/vae.py --models flux flux2 qwen --sizes 1x1024x1024     # images: one frame
    python benchmarks/vae.py --update --models wan --no-ops   # adds to the file, or replaces what it measures again

Autoencoders have their released shape and random weights, which the configurations share; they take turns. "compile"
is torch.compile of the decoder and the encoder, "kernels" is `optimize` of the autoencoder. "channels_last" and
"channels_last_compile" have the weights of an image autoencoder in that memory format. `decode_ms` and `encode_ms`
are the medians of whole calls of `vae.decode` and `vae.encode`, `peak_gb` the most memory that a call takes, weights
included. At the smallest size of a call `error_vs_fp32` is the largest error against the stock modules in float32 as a
part of their largest value, `rms_vs_fp32` the root mean square error as a part of their root mean square, and `equal`
the part of the elements that are the stock modules' own. LTX-Video 0.9.1's decoder adds noise, and its error is not
measured. An image-to-video pipeline encodes one frame: `--halves encode --sizes 1x512x768`.

Ops are timed at the shapes of LTX-Video's last three stages, beside a copy that moves the same bytes, plain torch and
torch.compile of it: microseconds on the device.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLLTX2Video,
    AutoencoderKLLTXVideo,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
)
from pages.names import AUTOENCODERS
from result_files import DTYPES, REPOSITORY, kept_records, write
from rich.console import Console
from rich.progress import Progress
from runs import add_options, begin, empty_table
from sharing import share, timed
from steps import COLUMNS, synchronize, view_of, weight_bytes
from timing import Timer
from torch import Tensor, nn

sys.path.insert(0, str(REPOSITORY / "examples"))
import image_pipeline

CONFIGS = ("stock", "compile", "channels_last", "channels_last_compile", "kernels")
HALVES = ("decode", "encode")
IDENTITY = ("model", "half", "frames", "height", "width", "dtype", "config", "op", "shape")  # what a record measures
TIMESTEP = 0.05

COMPRESSION = {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
LTX = {
    "block_out_channels": (128, 256, 512, 1024, 2048),
    "down_block_types": ("LTXVideo095DownBlock3D",) * 4,
    "decoder_block_out_channels": (256, 512, 1024),
    "layers_per_block": (4, 6, 6, 2, 2),
    "decoder_layers_per_block": (5, 5, 5, 5),
    "spatio_temporal_scaling": (True,) * 4,
    "decoder_spatio_temporal_scaling": (True,) * 3,
    "decoder_inject_noise": (False,) * 4,
    "downsample_type": ("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
    "upsample_residual": (True,) * 3,
    "upsample_factor": (2, 2, 2),
    "timestep_conditioning": True,
    "decoder_causal": False,
    **COMPRESSION,
}
# Of the 5B model; the latents' means and deviations do not matter here.
WAN22 = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
}
LTX091 = {
    **LTX,
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("LTXVideoDownBlock3D",) * 4,
    "layers_per_block": (4, 3, 3, 3, 4),
    "spatio_temporal_scaling": (True, True, True, False),
    "downsample_type": ("conv",) * 4,
    "decoder_layers_per_block": (5, 6, 7, 8),
    "decoder_inject_noise": (True, True, True, False),
}
LTX23 = {
    "decoder_block_out_channels": (256, 512, 512, 1024),
    "decoder_layers_per_block": (4, 6, 4, 2, 2),
    "decoder_spatio_temporal_scaling": (True,) * 4,
    "decoder_inject_noise": (False,) * 5,
    "upsample_type": ("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
    "upsample_factor": (2, 2, 1, 2),
    "upsample_residual": (False,) * 4,
    "decoder_spatial_padding_mode": "zeros",
    "decoder_causal": False,
    **COMPRESSION,
}
TINY = {"decoder_block_out_channels": (16, 32, 64), "decoder_layers_per_block": (1,) * 4, "layers_per_block": (1,) * 5}
MODELS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "ltx090": (AutoencoderKLLTXVideo, COMPRESSION),
    "ltx091": (AutoencoderKLLTXVideo, LTX091),
    "ltx": (AutoencoderKLLTXVideo, LTX),
    "ltx2": (AutoencoderKLLTX2Video, {"decoder_causal": False, **COMPRESSION}),
    "ltx23": (AutoencoderKLLTX2Video, LTX23),
    "wan": (AutoencoderKLWan, {}),
    "wan22": (AutoencoderKLWan, WAN22),
    "qwen": (AutoencoderKLQwenImage, {}),
    "flux": (AutoencoderKL, image_pipeline.VAE),
    "flux2": (AutoencoderKLFlux2, {}),
    "flux2_small": (AutoencoderKLFlux2, {"decoder_block_out_channels": (96, 192, 384, 384)}),
}
IMAGE_MODELS = tuple(model for model, (cls, _) in MODELS.items() if cls in (AutoencoderKL, AutoencoderKLFlux2))
SMALL_BLOCKS = {"block_out_channels": (8,) * 4, "layers_per_block": (1,) * 5}
SMALL: dict[str, dict[str, Any]] = {
    "ltx090": {**SMALL_BLOCKS, "decoder_block_out_channels": (8,) * 4, "decoder_layers_per_block": (1,) * 5},
    "ltx091": {**TINY, **SMALL_BLOCKS},
    "ltx": {**TINY, "block_out_channels": (8,) * 5},
    "ltx2": {**TINY, "block_out_channels": (8,) * 4, "latent_channels": 8},
    "ltx23": {**SMALL_BLOCKS, "decoder_block_out_channels": (8, 16, 16, 32), "decoder_layers_per_block": (1,) * 5},
    "wan": {"base_dim": 8},
    "wan22": {"base_dim": 8, "decoder_base_dim": 8},
    "qwen": {"base_dim": 8},
    "flux": {"block_out_channels": (32,) * 4, "layers_per_block": 1},
    "flux2": {"block_out_channels": (32,) * 4, "layers_per_block": 1},
    "flux2_small": {"block_out_channels": (64,) * 4, "decoder_block_out_channels": (32,) * 4, "layers_per_block": 1},
}

SIZES, IMAGE_SIZES = [(49, 512, 768), (121, 704, 1216)], [(1, 1024, 1024)]

# Channels, frames, rows and columns of the stages, at 49 frames of 512x768.
STAGES = [(512, 13, 32, 48), (256, 25, 64, 96), (128, 49, 128, 192)]


def random_vae(model: str, tiny: bool, device: str, dtype: torch.dtype) -> Any:
    cls, config = MODELS[model]
    if tiny:
        config = {**config, **SMALL[model]}
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            vae = cls(**config)
    finally:
        torch.set_default_dtype(torch.float32)
    return vae.to(device, dtype).eval().requires_grad_(False)


def request(vae: Any, half: str, size: tuple[int, int, int]) -> list[Tensor]:
    """The arguments of `vae.decode` or `vae.encode` for a video of a size, or for the image that one frame is."""
    frames, height, width = size
    parameter = next(vae.parameters())
    shape: tuple[int, ...] = (1, 3, frames, height, width)
    timestep = []
    if isinstance(vae, (AutoencoderKL, AutoencoderKLFlux2)):
        space = 2 ** (len(vae.config.block_out_channels) - 1)
        latents = (vae.config.latent_channels, height // space, width // space)
        shape = (1, *(latents if half == "decode" else (3, height, width)))
    elif half == "decode":
        wan = isinstance(vae, (AutoencoderKLWan, AutoencoderKLQwenImage))
        channels, seconds = (vae.config.z_dim, 4) if wan else (vae.config.latent_channels, 8)
        space = vae.spatial_compression_ratio
        shape = (1, channels, (frames - 1) // seconds + 1, height // space, width // space)
        timestep = [torch.full((1,), TIMESTEP).to(parameter)] if vae.config.get("timestep_conditioning") else []
    return [torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(parameter), *timestep]


def run(vae: Any, half: str, given: list[Tensor]) -> Tensor:
    """The video, or the latents' means and logarithms of variances."""
    if half == "decode":
        return vae.decode(*given, return_dict=False)[0]
    return vae.encode(*given, return_dict=False)[0].parameters


def configured(config: str, vae: Any, ltx: Any) -> Any:
    """A VAE with the same weights, prepared as `config` says. Optimized ones change the memory order of theirs."""
    made = copy.deepcopy(vae) if config == "kernels" or "channels_last" in config else view_of(vae)
    if "channels_last" in config:
        made.to(memory_format=torch.channels_last)
    if "compile" in config:
        made.decoder.compile()
        made.encoder.compile()
    elif config == "kernels":
        ltx.optimize(made, strict=True, graphs=False)
    return made


def milliseconds(call: Callable[[], Any], device: str) -> float:
    with timed():
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
    return (time.perf_counter() - began) * 1e3


def measure(
    model: str, half: str, size: tuple[int, int, int], options: Any, ltx: Any, smallest: bool
) -> list[dict[str, Any]]:
    device, dtype = options.device, DTYPES[options.dtype]
    vae = random_vae(model, options.tiny, device, dtype)
    given = request(vae, half, size)
    configs = [
        config
        for config in options.configs
        if ("compile" not in config or model in options.compiled)
        and ("channels_last" not in config or model in IMAGE_MODELS)
    ]
    made = {config: configured(config, vae, ltx) for config in configs}
    truth = stock = None
    noisy = any(vae.config.get("decoder_inject_noise") or ()) and half == "decode"  # in bf16 and float32 another one
    if smallest and dtype != torch.float32 and not noisy:
        exact = random_vae(model, options.tiny, device, torch.float32)
        exact.load_state_dict(vae.state_dict())
        truth = run(exact, half, [tensor.float() for tensor in given])
        del exact
    records = []
    for config, prepared in made.items():
        for _ in range(3):
            run(prepared, half, given)
        record: dict[str, Any] = {"model": model, "half": half, "frames": size[0], "height": size[1], "width": size[2]}
        record.update(dtype=options.dtype, config=config)
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        result = run(prepared, half, given)
        if device == "cuda":
            record["peak_gb"] = round((torch.cuda.max_memory_allocated() - before + weight_bytes(vae)) / 2**30, 3)
        if truth is not None:
            error = result.float() - truth
            record["error_vs_fp32"] = float(error.abs().max() / truth.abs().max())
            record["rms_vs_fp32"] = float(error.square().mean().sqrt() / truth.square().mean().sqrt())
            if config == "stock":
                stock = result
            elif stock is not None:
                record["equal"] = float((result == stock).float().mean())
        records.append(record)
        del result
    times: dict[str, list[float]] = {config: [] for config in made}
    for turn in range(options.rounds):
        for config in list(made)[:: -1 if turn % 2 else 1]:
            run(made[config], half, given)
            times[config].append(milliseconds(lambda config=config: run(made[config], half, given), device))
    for record in records:
        record[f"{half}_ms"] = round(statistics.median(times[record["config"]]), 3)
    return records


def op_cases(ltx: Any, device: str) -> list[tuple[str, str, int, Callable[[], Any], Callable[[], Any]]]:
    """(op, shape, bytes that it moves, the op, the same in plain torch)."""
    found = []

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16).to(memory_format=torch.channels_last_3d)

    for channels, frames, height, width in STAGES:
        shape = f"{channels}x{frames}x{height}x{width}"
        x, residual = new(1, channels, frames, height, width), new(1, channels, frames, height, width)
        size, frame = x.numel() * 2, x.numel() * 2 // frames

        def vector(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16)

        bias, tables = vector(channels), vector(2, channels)
        both = vector(1, 2, channels)
        modulated = {"scale": both[:, 0], "shift": both[:, 1], "scale_table": tables[0], "shift_table": tables[1]}
        options = {"eps": 1e-8, "bias": bias, "activation": "silu", "padding": (1, 1)}
        stepwise = {**options, "norm": "rms_stepwise"}
        calls: list[tuple[str, int, str, tuple[Any, ...], dict[str, Any]]] = [
            ("norm, modulation, SiLU, padding", 2 * size + 2 * frame, "channel_norm", (x,), {**options, **modulated}),
            (
                "residual, norm, modulation, SiLU, padding",
                4 * size + 2 * frame,
                "channel_norm_residual",
                (x, residual),
                {**options, **modulated},
            ),
            ("stepwise norm, SiLU, padding", 2 * size + 2 * frame, "channel_norm", (x,), stepwise),
            (
                "stepwise norm, SiLU, reflected edges",
                2 * size + 2 * frame,
                "channel_norm",
                (x,),
                {**stepwise, "reflect": True},
            ),
            (
                "residual, padding",
                3 * size + 2 * frame,
                "channel_norm",
                (x,),
                {"norm": "none", "bias": bias, "residual": residual, "padding": (1, 1)},
            ),
        ]
        wide = new(1, 8 * channels, (frames + 1) // 2, height // 2, width // 2)
        shuffled = {"bias": vector(8 * channels), "residual": wide[:, : 2 * channels].contiguous(
            memory_format=torch.channels_last_3d), "skip_frames": 1}  # fmt: skip
        moved = wide.numel() * 2 * 2 + shuffled["residual"].numel() * 2
        calls.append(("pixel shuffle, residual", moved, "pixel_shuffle_3d", (wide, (2, 2, 2)), shuffled))
        for name, moves, op, arguments, keywords in calls:
            found.append(
                (
                    name,
                    shape,
                    moves,
                    lambda op=op, a=arguments, k=keywords: getattr(ltx, op)(*a, **k),
                    lambda op=op, a=arguments, k=keywords: getattr(ltx.reference, op)(*a, **k),
                )
            )
    x = new(1, 48, 49, 128, 192)
    bias = torch.randn(48, device=device, dtype=torch.bfloat16)
    found.append(
        (
            "unpatchify",
            "48x49x128x192",
            x.numel() * 4,
            lambda: ltx.unpatchify(x, 4, bias=bias),
            lambda: ltx.reference.unpatchify(x, 4, bias=bias),
        )
    )
    return found


def measure_ops(ltx: Any, options: Any) -> list[dict[str, Any]]:
    timer = Timer(rounds=3, calls=10)
    records = []
    for name, shape, moves, op, plain in op_cases(ltx, "cuda"):
        source = torch.empty(moves // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        calls = {"kernels": op, "copy": lambda source=source, target=target: target.copy_(source), "torch": plain}
        if options.compile_ops:
            torch.compiler.reset()
            calls["compile"] = torch.compile(plain, dynamic=False)
        got, wanted = op(), plain()
        pairs = zip(got, wanted) if isinstance(got, tuple) else [(got, wanted)]
        equal = min(float((a == b).float().mean()) for a, b in pairs)
        us = {key: timing.median for key, timing in timer.measure(calls).items()}
        times = {f"{key}_us": value for key, value in us.items()}
        ratio = round(us["kernels"] / us["copy"], 3)
        records.append({"op": name, "shape": shape, "bytes": moves, "of_a_copy": ratio, **times, "equal": equal})
    return records


def half_of(record: dict[str, Any]) -> str:
    return "encode" if "encode_ms" in record else "decode"


def scene(record: dict[str, Any]) -> tuple[Any, ...]:
    """What the configurations of a comparison have in common."""
    return half_of(record), *(record.get(key) for key in ("model", "frames", "height", "width", "dtype"))


def print_tables(records: list[dict[str, Any]], console: Console) -> None:
    texts = "autoencoder", "call", "configuration"
    numbers = "ms", "x stock", "peak GiB", "error", "rms error", "equal"
    table = empty_table("Decoding and encoding", texts, numbers)
    whole = [record for record in records if "model" in record]
    stock = {scene(r): r[f"{half_of(r)}_ms"] for r in whole if r["config"] == "stock"}
    for r in whole:
        ms, baseline = r[f"{half_of(r)}_ms"], stock.get(scene(r))
        table.add_row(
            f"{AUTOENCODERS[r['model']].title}, {r['frames']}x{r['height']}x{r['width']} {r.get('dtype', 'bf16')}",
            half_of(r),
            r["config"],
            f"{ms:.2f}",
            f"{baseline / ms:.2f}" if baseline else "",
            f"{r['peak_gb']:.2f}" if "peak_gb" in r else "",
            f"{r['error_vs_fp32']:.2e}" if "error_vs_fp32" in r else "",
            f"{r['rms_vs_fp32']:.2e}" if "rms_vs_fp32" in r else "",
            f"{r['equal']:.4f}" if "equal" in r else "",
        )
    console.print(table)
    texts, numbers = ("op", "shape"), ("kernels", "x copy", "copy", "torch", "compile", "equal")
    table = empty_table("Ops, us", texts, numbers)
    for r in records:
        if "op" in r:
            times = [f"{r[f'{key}_us']:.1f}" if f"{key}_us" in r else "" for key in ("copy", "torch", "compile")]
            row = (r["op"], r["shape"], f"{r['kernels_us']:.1f}", f"{r['of_a_copy']:.3f}", *times, f"{r['equal']:.6f}")
            table.add_row(*row)
    console.print(table)


def video_size(text: str) -> tuple[int, int, int]:
    try:
        frames, height, width = map(int, text.split("x"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected FRAMESxHEIGHTxWIDTH, got {text}") from error
    return frames, height, width


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), help="(default: all)")
    size = {"type": video_size, "nargs": "+", "metavar": "FRAMESxHEIGHTxWIDTH"}
    parser.add_argument("--sizes", **size, help="(default: 49x512x768 121x704x1216; of images 1x1024x1024)")
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS), help="(default: all)")
    parser.add_argument("--halves", nargs="+", choices=HALVES, default=["decode"], help="(default: decode)")
    # Wan's calls change a list, and each of its states would be compiled anew.
    compiled = ["ltx", "ltx2", *IMAGE_MODELS]
    parser.add_argument("--compiled", nargs="*", choices=MODELS, default=compiled, help="models to compile, too")
    parser.add_argument("--compile-ops", action="store_true", help="compile plain torch beside each op")
    parser.add_argument("--rounds", type=int, default=6, help="timed calls of each configuration (default: 6)")
    parser.add_argument("--no-ops", action="store_true", help="autoencoders alone")
    parser.add_argument("--update", action="store_true", help="keep what the file says of all else")
    add_options(parser, "vae", "small autoencoders")
    options = parser.parse_args(arguments)
    images = [model for model in options.models if model in IMAGE_MODELS]
    if images and any(frames != 1 for frames, _, _ in options.sizes or ()):
        parser.error(f"expected --sizes of 1 frame for {' '.join(images)}, got {options.sizes}")
    if options.device != "cuda" and not options.no_ops:
        parser.error("expected --no-ops without a GPU: ops are timed on one")
    facts = {"cudnn": torch.backends.cudnn.version(), "rounds": options.rounds}
    share()
    ltx, output, meta, console = begin("vae", options, **facts)
    records: list[dict[str, Any]] = []

    def save(measured: list[dict[str, Any]]) -> None:
        records.extend(measured)
        write(output, meta, kept_records(output, meta, records, IDENTITY) if options.update else records)

    torch.backends.cudnn.allow_tf32 = False  # for the modules in float32 that errors are taken against
    with torch.no_grad(), Progress(*COLUMNS, console=console) as progress:
        sizes = {
            m: options.sizes or IMAGE_SIZES if m in IMAGE_MODELS else options.sizes or SIZES for m in options.models
        }
        runs = [(m, half, size) for m, half in itertools.product(options.models, options.halves) for size in sizes[m]]
        task = progress.add_task("autoencoders and ops", total=len(runs) + (not options.no_ops))
        for model, half, size in runs:
            torch.compiler.reset()  # a second shape would be compiled for all sizes, and slower
            save(measure(model, half, size, options, ltx, size == min(sizes[model])))
            if options.device == "cuda":
                torch.cuda.empty_cache()
            progress.advance(task)
        if not options.no_ops:
            save(measure_ops(ltx, options))
            progress.advance(task)
    print_tables(records, console)
    console.print(str(output), highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
