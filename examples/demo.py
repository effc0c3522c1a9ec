#!/usr/bin/env python3
"""Generate one LTX-Video clip twice, with stock modules and with this package's ops in place of the norms and the
rotary embedding, compare the two, and write both videos, a picture of the difference and result.json.

The default needs no network: the model is built from its configuration with random weights (small on a CPU, of the 2B
model's shape on a GPU), so the clip shows nothing, but every computation is the model's. `--model Lightricks/LTX-Video`
loads the real one.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPO_ID = "org/ltx-kernels"
os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={ROOT / 'build'}")

import diffusers  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from diffusers import (  # noqa: E402
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from kernels import get_kernel  # noqa: E402
from ltx_video import OpCounter, Report, replace_norms_and_rope  # noqa: E402
from PIL import Image, ImageDraw, ImageFont  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import Tensor  # noqa: E402

PROMPT = "A red kite over a beach at sunset, waves rolling in, slow camera pan"
NEGATIVE_PROMPT = "worst quality, inconsistent motion, blurry, jittery, distorted"
FRAME_RATE = 25
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# How much further from float32 than the stock modules the package's ops may be before the demo calls it a fault.
ERROR_LIMIT = 1.5


class DemoError(RuntimeError):
    """What stops the demo; the message says what to do."""


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer that needs no download: one token per byte, with T5's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    symbols = ["<pad>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=128
    )


def random_pipeline(size: str, device: torch.device, seed: int) -> LTXPipeline:
    """LTX-Video from its configuration, with random weights.

    Size "2b" is the transformer and the VAE of the 2B model; the text encoder is small in either.
    """
    if size == "2b":
        caption_channels, shape, vae = 4096, {}, {}
    else:
        caption_channels = 64
        shape = {"num_layers": 3, "num_attention_heads": 4, "cross_attention_dim": 256}
        vae = {
            "block_out_channels": (8, 16, 16, 16),
            "decoder_block_out_channels": (16, 32, 32, 32),
            "layers_per_block": (1, 1, 1, 1, 1),
            "decoder_layers_per_block": (1, 1, 1, 1, 1),
        }
    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    with device:
        pipe = LTXPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True,
                base_image_seq_len=1024,
                max_image_seq_len=4096,
                base_shift=0.95,
                max_shift=2.05,
                shift_terminal=0.1,
            ),
            vae=AutoencoderKLLTXVideo(**vae),
            text_encoder=transformers.T5EncoderModel(
                transformers.T5Config(
                    vocab_size=len(tokenizer), d_model=caption_channels, d_kv=16, d_ff=256, num_layers=2, num_heads=4
                )
            ),
            tokenizer=tokenizer,
            transformer=LTXVideoTransformer3DModel(caption_channels=caption_channels, **shape),
        )
        # As constructed, the weights of norm_q and norm_k are all one, which would hide that they are left out.
        for name, parameter in pipe.transformer.named_parameters():
            if name.endswith(("norm_q.weight", "norm_k.weight")):
                torch.nn.init.normal_(parameter, 1.0, 0.1)
        smooth_upsampling(pipe.vae)
    return pipe


@torch.no_grad()
def smooth_upsampling(vae: AutoencoderKLLTXVideo) -> None:
    """Makes a random decoder draw patches of colour, on which a difference can be seen, instead of single pixels.

    A convolution before a pixel shuffle gets the same weights for every place it is shuffled to (ICNR,
    arXiv:1707.02937), and the last one more contrast.
    """
    shuffled = [(vae.decoder.conv_out.conv, vae.config.patch_size_t * vae.config.patch_size**2)]
    for block in vae.decoder.up_blocks:
        for upsampler in block.upsamplers or ():
            shuffled.append((upsampler.conv.conv, math.prod(upsampler.stride)))
    for conv, places in shuffled:
        for parameter in (conv.weight, conv.bias):
            parameter.copy_(parameter[::places].repeat_interleave(places, 0))
    shuffled[0][0].weight.mul_(2)


def load_pipeline(model: str, size: str, device: torch.device, dtype: torch.dtype, seed: int) -> LTXPipeline:
    if model == "random":
        pipe = random_pipeline(size, device, seed).to(dtype=dtype)
    else:
        try:
            pipe = LTXPipeline.from_pretrained(model, dtype=dtype)
        except (OSError, ValueError, ImportError) as error:
            raise DemoError(
                f"{model}: {error}\nA Hub id needs the network, and its tokenizer `pip install sentencepiece`; "
                "without --model (MODEL=) the demo makes a model with random weights"
            ) from error
    for component in (pipe.transformer, pipe.vae, pipe.text_encoder):
        component.eval().requires_grad_(False)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


@dataclasses.dataclass
class Clip:
    latents: Tensor  # float32, as the scheduler left them
    frames: np.ndarray  # [frames, height, width, 3] in 0..1
    seconds: float  # the whole pipeline call but the text encoder
    steps: list[float]  # seconds of each denoising step after the first


class Stopwatch:
    """Times between marks: device events on a GPU, so that nothing waits for it, and the host's clock elsewhere."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        pairs = list(zip(self.marks, self.marks[1:]))
        if not self.cuda:
            return [b - a for a, b in pairs]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairs]


class Generator:
    """Makes clips from one prompt and one noise: everything but the transformer's modules and dtype stays the same."""

    def __init__(self, pipe: LTXPipeline, args: argparse.Namespace, device: torch.device, progress: Progress):
        self.pipe, self.args, self.device, self.progress = pipe, args, device, progress
        with torch.no_grad():
            names = "prompt_embeds", "prompt_attention_mask", "negative_prompt_embeds", "negative_prompt_attention_mask"
            self.text = dict(zip(names, pipe.encode_prompt(args.prompt, NEGATIVE_PROMPT, device=device)))

    def __call__(self, label: str, steps: int) -> Clip:
        task = self.progress.add_task(label, total=steps)
        stopwatch, last = Stopwatch(self.device), {}

        def on_step_end(
            pipe: LTXPipeline, step: int, timestep: Tensor, tensors: dict[str, Tensor]
        ) -> dict[str, Tensor]:
            stopwatch.mark()
            last.update(tensors)
            self.progress.advance(task)
            return {}

        dtype = self.pipe.transformer.dtype
        text = {k: v.to(dtype) if v.is_floating_point() else v for k, v in self.text.items()}
        start = time.perf_counter()
        frames = self.pipe(
            **text,
            num_frames=self.args.frames,
            height=self.args.height,
            width=self.args.width,
            frame_rate=FRAME_RATE,
            num_inference_steps=steps,
            # Drawn on the CPU: the same noise on every device.
            generator=torch.Generator().manual_seed(self.args.seed),
            # For VAEs that are told how noisy the latents are (LTX-Video 0.9.1 and later).
            decode_timestep=0.05,
            decode_noise_scale=0.025,
            output_type="np",
            callback_on_step_end=on_step_end,
        ).frames[0]
        return Clip(last["latents"], frames, time.perf_counter() - start, stopwatch.seconds())


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


def write_video(frames: np.ndarray, path: Path) -> tuple[Path, str]:
    """Writes an MP4, or a GIF where imageio-ffmpeg is not installed; the path, and what is to be said about it."""
    images = (frames * 255).round().astype(np.uint8)
    if importlib.util.find_spec("imageio") and importlib.util.find_spec("imageio_ffmpeg"):
        import imageio

        path = path.with_suffix(".mp4")
        imageio.mimwrite(path, list(images), fps=FRAME_RATE, quality=8)
        return path, ""
    path = path.with_suffix(".gif")
    first, *rest = (Image.fromarray(image) for image in images)
    first.save(path, save_all=True, append_images=rest, duration=1000 / FRAME_RATE, loop=0)
    return path, "a GIF, with its palette of 256 colours: `pip install imageio imageio-ffmpeg` makes it an MP4"


def write_picture(stock: np.ndarray, ours: np.ndarray, path: Path, columns: int = 4) -> int:
    """Frames of both clips and their amplified difference, one below the other; the amplification."""
    difference = np.abs(ours.astype(np.float64) - stock)
    # A power of two, so that the largest difference is between half and full brightness.
    gain = 2 ** int(max(0, np.floor(-np.log2(max(difference.max(), 2**-16)))))
    chosen = np.linspace(0, len(stock) - 1, min(columns, len(stock))).round().astype(int)
    scale = min(1, 384 / stock.shape[2])
    width, height = round(stock.shape[2] * scale), round(stock.shape[1] * scale)
    font, margin, header = ImageFont.load_default(14), 6, 22
    rows = {"stock": stock, "ltx-kernels": ours, f"|difference| x {gain}": difference * gain}
    picture = Image.new(
        "RGB", (len(chosen) * (width + margin) + margin, len(rows) * (height + header) + margin), "white"
    )
    draw = ImageDraw.Draw(picture)
    for row, (label, frames) in enumerate(rows.items()):
        top = row * (height + header)
        for column, index in enumerate(chosen):
            left = margin + column * (width + margin)
            draw.text((left, top + 3), f"{label}, frame {index}", fill="black", font=font)
            image = Image.fromarray((frames[index].clip(0, 1) * 255).round().astype(np.uint8))
            picture.paste(image.resize((width, height)), (left, top + header))
    picture.save(path)
    return gain


def replaced_rows(report: Report, calls: dict[str, int]) -> list[dict[str, Any]]:
    """Replaced modules by kind, with the calls of compiled ops that were seen in one forward."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for r in report.replaced:
        row = rows.setdefault(
            (r.stock, r.op), {"parts": [], "class": r.stock, "op": r.op, "modules": 0, "calls_per_forward": 0}
        )
        row["parts"] += [part for part in r.parts if part not in row["parts"]]
        row["modules"] += 1
        row["calls_per_forward"] += calls.get(r.name, 0)
    return list(rows.values())


def make_table(result: dict[str, Any]) -> Table:
    run, times, errors = result["run"], result["seconds"], result["errors"]
    on_gpu = not result["machine"]["device"].startswith("CPU")
    table = Table(
        title=f"LTX-Video, {run['model']} ({run['parameters'] / 1e9:.2g} B), {run['frames']} frames of "
        f"{run['height']}x{run['width']}, {run['steps']} steps, {run['dtype']}, {result['machine']['device']}",
        title_justify="left",
        show_header=False,
    )
    for justify in ("left", "right", "right", "right"):
        table.add_column(justify=justify)

    def section(*cells: str) -> None:
        table.add_section()
        table.add_row(*(f"[bold]{cell}[/]" for cell in cells))

    section("replaced", "stock modules", "compiled calls a forward", "")
    for row in result["replaced"]:
        stock = row["class"].rsplit(".", 1)[-1]
        calls = row["calls_per_forward"]
        table.add_row(", ".join(row["parts"]), f"{row['modules']} {stock}", f"{calls} {row['op']}")
    for name, why in result["left_alone"].items():
        table.add_row(name, f"left alone: {why}")

    section("time", "stock", "ltx-kernels", "speedup" if on_gpu else "")
    for label, key, unit, factor in (
        ("denoising step (median)", "step_median", "ms", 1e3),
        ("whole clip with the VAE", "total", "s", 1),
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
    return table


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=os.environ.get("MODEL") or "random", metavar="MODEL",
        help="random, a folder, or a Hub id such as Lightricks/LTX-Video (default: $MODEL, else random)",
    )  # fmt: skip
    parser.add_argument("--size", choices=("small", "2b"), help="of the random model (default: small; on a GPU 2b)")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--frames", type=int, help="a multiple of 8, plus 1 (default: 25; on a GPU 49)")
    parser.add_argument("--height", type=int, help="a multiple of 32 (default: 128; on a GPU 512)")
    parser.add_argument("--width", type=int, help="a multiple of 32 (default: 192; on a GPU 768)")
    parser.add_argument("--steps", type=int, help="at least 2 (default: 8; on a GPU 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "demo", metavar="DIR", help="(default: demo)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--rounding", default="fp32", choices=("fp32", "eager"), help="of the package's ops")
    args = parser.parse_args(arguments)
    gpu = torch.device(args.device).type == "cuda"
    for name, small, large in (
        ("size", "small", "2b"),
        ("frames", 25, 49),
        ("height", 128, 512),
        ("width", 192, 768),
        ("steps", 8, 20),
    ):
        if getattr(args, name) is None:
            setattr(args, name, large if gpu else small)
    if args.frames % 8 != 1:
        parser.error(f"--frames {args.frames}: expected a multiple of 8, plus 1")
    if args.height % 32 or args.width % 32 or args.height < 32 or args.width < 32:
        parser.error(f"--height {args.height} --width {args.width}: expected multiples of 32")
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: expected at least 2")
    return args


def load_kernels(device: torch.device) -> ModuleType:
    try:
        return get_kernel(REPO_ID, version=1, backend="cpu" if device.type == "cpu" else None)
    except Exception as error:
        raise DemoError(
            f"{REPO_ID} could not be loaded: {error}\n"
            f"LOCAL_KERNELS is {os.environ['LOCAL_KERNELS']}; `make build` or `python tools/build.py` fills build/"
        ) from error


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    ltx = load_kernels(device)
    variant = Path(ltx.__file__).parent
    metadata = json.loads((variant / "metadata.json").read_text())
    console.print(f"{REPO_ID} version {metadata['version']}: {variant}", highlight=False, soft_wrap=True)
    pipe = load_pipeline(args.model, args.size, device, dtype, args.seed)
    transformer = pipe.transformer

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        generate = Generator(pipe, args, device, progress)
        call = first_call(transformer, generate)
        stock_forward = forward(transformer, call)
        stock = generate("stock", args.steps)

        report = replace_norms_and_rope(transformer, ltx, args.rounding)
        with OpCounter(ltx, report) as counter:
            our_forward = forward(transformer, call)
        replaced = replaced_rows(report, counter.calls)
        silent = [r.name for r in report.replaced if not counter.calls[r.name]]
        generate("warm-up, ltx-kernels", 2)
        ours = generate("ltx-kernels", args.steps)
        report.restore()
        restored = torch.equal(forward(transformer, call), stock_forward)

        pairs = {"ltx_kernels_to_stock": (our_forward, ours, stock_forward, stock)}
        if dtype != torch.float32:
            # To float32 and back leaves the weights as they were, and needs no second copy of them.
            transformer.float()
            exact_forward, exact = forward(transformer, call), generate("stock in float32", args.steps)
            transformer.to(dtype)
            pairs["stock_to_float32"] = stock_forward, stock, exact_forward, exact
            pairs["ltx_kernels_to_float32"] = our_forward, ours, exact_forward, exact

    def errors(got_forward: Tensor, got: Clip, expected_forward: Tensor, expected: Clip) -> dict[str, Any]:
        return {"forward": error(got_forward, expected_forward), **clip_error(got, expected)}

    args.output.mkdir(parents=True, exist_ok=True)
    name = args.model if args.model == "random" else Path(args.model).name
    files, note = {}, ""
    for key, clip in (("stock", stock), ("ltx_kernels", ours)):
        files[key], note = write_video(clip.frames, args.output / f"{name}_{key}")
    files["comparison"] = args.output / "comparison.png"
    gain = write_picture(stock.frames, ours.frames, files["comparison"])

    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})",
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in ("torch", "diffusers", "transformers")},
        },
        "kernels": {"variant": variant.name, "id": metadata["id"], **metadata.get("provenance", {}).get("kernel", {})},
        "run": {
            "model": "random weights" if args.model == "random" else args.model,
            "parameters": sum(p.numel() for p in transformer.parameters()),
            **{key: getattr(args, key) for key in ("frames", "height", "width", "steps", "seed", "dtype", "rounding")},
        },
        "replaced": replaced,
        "left_alone": report.left_alone,
        "without_compiled_call": silent,
        "restored_to_same_bits": restored,
        "seconds": {
            key: {"step_median": statistics.median(clip.steps), "total": clip.seconds, "steps": clip.steps}
            for key, clip in (("stock", stock), ("ltx_kernels", ours))
        },
        "errors": {
            key: errors(*pairs[key]) if key in pairs else None
            for key in ("stock_to_float32", "ltx_kernels_to_float32", "ltx_kernels_to_stock")
        },
        "files": {key: str(path) for key, path in files.items()},
        "picture_gain": gain,
        "note": note,
    }


def faults(result: dict[str, Any]) -> list[str]:
    """Why this run does not show what it is meant to; empty if it does."""
    found = []
    if not result["replaced"]:
        found.append("nothing was replaced")
    if result["without_compiled_call"]:
        found.append(f"replaced without a call of a compiled op: {', '.join(result['without_compiled_call'])}")
    if not result["restored_to_same_bits"]:
        found.append("after restore, a forward does not give the stock modules' bits")
    stock, ours = (result["errors"][f"{key}_to_float32"] for key in ("stock", "ltx_kernels"))
    if stock is None:
        ours, limit = result["errors"]["ltx_kernels_to_stock"], 1e-4
    else:
        limit = ERROR_LIMIT * stock["forward"]["relative_l2"]
    if not ours["forward"]["relative_l2"] <= limit:
        found.append(f"the error of one forward, {ours['forward']['relative_l2']:.2e}, is above {limit:.2e}")
    return found


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        result = run(args, console)
    except DemoError as error:
        console.print(f"error: {error}", style="red", highlight=False, soft_wrap=True)
        return 1
    (args.output / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    console.print()
    console.print(make_table(result))
    if result["machine"]["device"].startswith("CPU"):
        console.print("On a CPU the times are not the point: the package is for GPUs, and this shows that it is right.")
    elif result["run"]["model"] == "random weights":
        console.print("The weights are random: the times are the model's, the clip shows nothing.")
    for path in (*result["files"].values(), args.output / "result.json"):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    if result["note"]:
        console.print(result["note"], highlight=False)
    for fault in faults(result):
        console.print(f"fault: {fault}", style="red", highlight=False, soft_wrap=True)
    return 1 if faults(result) else 0


if __name__ == "__main__":
    sys.exit(main())
