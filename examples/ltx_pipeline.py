"""What the examples share: LTX-Video pipelines (with random weights, or loaded), timed clips, videos.

Nothing here is about this package; `inject_ltx.py` shows how it is used.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import inspect
import json
import math
import platform
import re
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from command_line import DTYPES as DTYPE_NAMES
from command_line import PROMPT, ExampleError, metadata_of
from command_line import load_kernels as load_kernels
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from diffusers.hooks import apply_group_offloading
from PIL import Image
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

FRAME_RATE = 25
DTYPES = {name: getattr(torch, name) for name in DTYPE_NAMES}


# ---- Arguments


def device_of(parser: argparse.ArgumentParser, device: str | None) -> str:
    """The device that was asked for; a GPU where none was and torch sees one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        parser.error(f"argument --device: expected cuda, cuda:<number> or cpu, got {device}")
    kind, _, number = device.partition(":")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        parser.error(
            f"argument --device: {device}, but torch {torch.__version__} sees {torch.cuda.device_count()} GPUs"
        )
    return device


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """The parser's arguments, with what depends on the device: the device itself, the model and the clip's size.

    A folder that train_demo.py wrote says for itself which clips the model knows.
    """
    args = parser.parse_args(arguments)
    args.device = device_of(parser, args.device)
    kind = args.device.partition(":")[0]
    args.model = args.model or ("random" if kind == "cuda" else "tiny")
    trained = trained_clips(args.model)
    for name, small, large in (
        ("prompt", PROMPT, PROMPT),
        ("frames", 25, 49),
        ("height", 128, 512),
        ("width", 192, 768),
        ("steps", 8, 20),
    ):
        if getattr(args, name) is None:
            setattr(args, name, trained.get(name, large if kind == "cuda" else small))
    return args


def trained_clips(model: str) -> dict[str, Any]:
    """What the recipe of train_demo.py says of the clips that a model knows; nothing for any other model."""
    path = Path(model) / "recipe.json"
    if not path.is_file():
        return {}
    try:
        recipe = json.loads(path.read_text())
    except ValueError as error:
        raise ExampleError(f"{path}: expected JSON, as train_demo.py writes it: {error}; mend or remove it") from error
    clips = recipe.get("clips") if isinstance(recipe, dict) else None
    return clips if isinstance(clips, dict) else {}


# ---- The pipeline


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer that needs no download: one token per byte, with T5's special tokens."""
    from tokenizers import decoders, pre_tokenizers
    from tokenizers.models import BPE

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _tokenizer(
        lambda vocabulary: BPE(vocab=vocabulary, merges=[], unk_token="<unk>"),
        symbols,
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )


def word_tokenizer(words: list[str]) -> transformers.PreTrainedTokenizerFast:
    """One token for each of these words, and T5's special tokens; every other word is <unk>."""
    from tokenizers import pre_tokenizers
    from tokenizers.models import WordLevel

    return _tokenizer(lambda vocabulary: WordLevel(vocabulary, unk_token="<unk>"), words, pre_tokenizers.Whitespace())


def _tokenizer(
    make_model: Callable[[dict[str, int]], Any], symbols: list[str], pre_tokenizer: Any, decoder: Any = None
) -> transformers.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, processors

    vocabulary = {symbol: i for i, symbol in enumerate(["<pad>", "</s>", "<unk>", *symbols])}
    tokenizer = Tokenizer(make_model(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=128
    )


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """The scheduler with the settings of the released LTX-Video and LTX-2."""
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        base_shift=0.95,
        max_shift=2.05,
        shift_terminal=0.1,
    )


def scheduler_shift(tokens: int) -> float:
    """The logarithm by which LTXPipeline shifts the noise levels of a clip of so many tokens."""
    config = make_scheduler().config
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    return config.base_shift + slope * (tokens - config.base_image_seq_len)


def random_pipeline(model: str, device: torch.device, seed: int) -> LTXPipeline:
    """LTX-Video from its configuration, with random weights.

    "random" has the transformer and the VAE of the 2B model, "tiny" small ones; the text encoder is small in either.
    """
    if model == "random":
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
            scheduler=make_scheduler(),
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


def load_pipeline(
    model: str, device: torch.device, dtype: torch.dtype, seed: int = 0, offload: str = "none"
) -> LTXPipeline:
    """A pipeline for inference; `model` is "random", "tiny", a folder, or a Hub id."""
    if model in ("random", "tiny"):
        pipe = random_pipeline(model, device if offload == "none" else torch.device("cpu"), seed).to(dtype=dtype)
    else:
        try:
            pipe = LTXPipeline.from_pretrained(model, dtype=dtype)
        except AttributeError:  # the VAE of another pipeline may lack what an LTXPipeline reads
            check_transformer(model)
            raise
        except (OSError, ValueError, ImportError) as error:
            raise ExampleError(
                f"{model}: {error}\nA Hub id needs the network, and its tokenizer `pip install sentencepiece`; "
                "--model tiny and --model random make a model with random weights"
            ) from error
        if not isinstance(pipe.transformer, LTXVideoTransformer3DModel):
            check_transformer(model)
    for component in (pipe.transformer, pipe.vae, pipe.text_encoder):
        component.eval().requires_grad_(False)
    if offload == "none":
        return pipe.to(device)
    start_offload(pipe, offload, device)
    return pipe


def check_transformer(model: str) -> None:
    """Raises an error where the model_index.json of a folder or of a Hub id is not of LTX-Video."""
    index, expected = LTXPipeline.load_config(model), LTXVideoTransformer3DModel.__name__
    if expected not in index.get("transformer", ()):
        name = index.get("_class_name", "no pipeline")
        raise ExampleError(f"{model}: expected an LTXPipeline, or another pipeline with {expected}, got {name}")


def start_offload(pipe: LTXPipeline, offload: str, device: torch.device) -> None:
    """Keeps the weights on the CPU but for the part that computes: a whole model, a layer, or a block."""
    if offload == "group":
        pipe.transformer.enable_group_offload(
            onload_device=device,
            offload_type="block_level",
            num_blocks_per_group=1,
            use_stream=device.type == "cuda",  # the next block comes while this one computes
        )
        for component in (pipe.text_encoder, pipe.vae):
            apply_group_offloading(component, onload_device=device, offload_type="leaf_level")
        return
    enable = pipe.enable_model_cpu_offload if offload == "model" else pipe.enable_sequential_cpu_offload
    try:
        enable(device=device)
    except ImportError as error:
        raise ExampleError(f"--offload {offload}: {error} `pip install accelerate`") from error


# ---- Clips


@dataclasses.dataclass
class Clip:
    latents: Tensor  # float32, as the scheduler left them
    frames: np.ndarray  # [batch, frames, height, width, 3] in 0..1, unless another output_type was asked for
    seconds: float  # the whole pipeline call but the text encoder
    steps: list[float]  # seconds of each denoising step
    decode: float  # seconds of the VAE
    history: list[Tensor]  # latents after each step, where they were asked for


class Stopwatch:
    """Times between marks: device events on a GPU, so that nothing waits for it, and the host's clock elsewhere."""

    def __init__(self, device: torch.device):
        self.device, self.cuda = device, device.type == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record(torch.cuda.current_stream(self.device))
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        pairs = list(zip(self.marks, self.marks[1:]))
        if not self.cuda:
            return [b - a for a, b in pairs]
        torch.cuda.synchronize(self.device)
        return [a.elapsed_time(b) / 1e3 for a, b in pairs]


def progress_bar(console: Any) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console)


# The scales at which a guidance runs no forward of its own. LTX2Pipeline has all of them, LTXPipeline the first.
NO_GUIDANCE = {"guidance_scale": 1.0, "stg_scale": 0.0, "modality_scale": 1.0}
NO_GUIDANCE |= {f"audio_{name}": scale for name, scale in NO_GUIDANCE.items()}


class Generator:
    """Makes clips from the same arguments and the same noise again and again, and times them."""

    def __init__(
        self,
        pipe: LTXPipeline,
        args: argparse.Namespace,
        progress: Progress,
        batch: int = 1,
        output_type: str = "np",
    ):
        self.pipe, self.args, self.progress, self.batch, self.output_type = pipe, args, progress, batch, output_type
        self.device = torch.device(args.device)
        self.text_seconds = self.encode()

    def encode(self) -> float:
        """Encodes the prompts for the clips to come; the seconds that it takes."""
        stopwatch = Stopwatch(self.device)
        stopwatch.mark()
        with torch.no_grad():
            encoded = self.pipe.encode_prompt(
                [self.args.prompt] * self.batch,
                [self.args.negative_prompt] * self.batch,
                do_classifier_free_guidance=self.args.guidance_scale > 1,
                device=self.device,
            )
        stopwatch.mark()
        names = "prompt_embeds", "prompt_attention_mask", "negative_prompt_embeds", "negative_prompt_attention_mask"
        self.text = {name: value for name, value in zip(names, encoded) if value is not None}
        return stopwatch.seconds()[0]

    def guidance(self) -> dict[str, float]:
        """Every scale of the pipeline that is not its default."""
        if self.args.guidance_scale > 1:
            return {"guidance_scale": self.args.guidance_scale}
        return {
            name: scale
            for name, scale in NO_GUIDANCE.items()
            if name in inspect.signature(self.pipe.__call__).parameters
        }

    def __call__(self, label: str, steps: int, keep_history: bool = False) -> Clip:
        task = self.progress.add_task(label, total=steps)
        stopwatch, last, history = Stopwatch(self.device), {}, []

        @contextlib.contextmanager
        def denoising(total: int) -> Iterator[Any]:
            stopwatch.mark()
            yield SimpleNamespace(update=lambda: self.progress.advance(task))

        def on_step_end(
            pipe: LTXPipeline, step: int, timestep: Tensor, tensors: dict[str, Tensor]
        ) -> dict[str, Tensor]:
            stopwatch.mark()
            last.update(tensors)
            if keep_history:
                history.append(tensors["latents"].clone())
            return {}

        dtype = self.pipe.transformer.dtype
        text = {k: v.to(dtype) if v.is_floating_point() else v for k, v in self.text.items()}
        self.pipe.progress_bar = denoising  # what the pipeline enters right before its first step
        stopwatch.mark()
        clip = self.pipe(
            **text,
            num_frames=self.args.frames,
            height=self.args.height,
            width=self.args.width,
            frame_rate=FRAME_RATE,
            num_inference_steps=steps,
            **self.guidance(),
            # Drawn on the CPU: the same noise on every device; one seed a clip: the same clip in every batch.
            generator=[torch.Generator().manual_seed(self.args.seed + i) for i in range(self.batch)],
            # For VAEs that are told how noisy the latents are (LTX-Video 0.9.1 and later).
            decode_timestep=0.05,
            decode_noise_scale=0.025,
            output_type=self.output_type,
            callback_on_step_end=on_step_end,
        ).frames
        stopwatch.mark()
        del self.pipe.progress_bar
        _, *per_step, decode = seconds = stopwatch.seconds()
        return Clip(last["latents"], clip, sum(seconds), per_step, decode, history)


def write_gif(images: np.ndarray, path: Path) -> None:
    first, *rest = (Image.fromarray(image) for image in images)
    first.save(path, save_all=True, append_images=rest, duration=1000 / FRAME_RATE, loop=0)


def write_video(frames: np.ndarray, path: Path, gif: bool = False) -> tuple[list[Path], str]:
    """Writes an MP4, with `gif` or where imageio-ffmpeg is not installed a GIF; the paths, and what to say about them.

    Args:
        frames: [frames, height, width, 3] in 0..1.
        path: Without suffix.
        gif: Write one in any case.
    """
    images = (frames * 255).round().astype(np.uint8)
    files, note = [], ""
    if importlib.util.find_spec("imageio") and importlib.util.find_spec("imageio_ffmpeg"):
        import imageio

        files.append(path.with_name(f"{path.name}.mp4"))
        imageio.mimwrite(files[0], list(images), fps=FRAME_RATE, quality=8)
    elif not gif:
        note = "a GIF, with its palette of 256 colours: `pip install imageio imageio-ffmpeg` makes it an MP4"
    if gif or not files:
        files.append(path.with_name(f"{path.name}.gif"))
        write_gif(images, files[-1])
    return files, note


# ---- What a result says of its origin


def origin(device: torch.device, ltx: ModuleType | None) -> dict[str, Any]:
    """When and where a result was made, and with which build of the package."""
    packages = "torch", "diffusers", "transformers"
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})",
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in packages},
        },
    }
    if ltx is not None:
        metadata = metadata_of(ltx)
        commit = metadata.get("provenance", {}).get("kernel", {})
        result["kernels"] = {"variant": Path(str(ltx.__file__)).parent.name, "id": metadata["id"], **commit}
    return result


def suffix(optimized: bool, compiled: bool) -> str:
    if compiled:
        return "_optimized_compile" if optimized else "_compile"
    return "_optimized" if optimized else "_baseline"


def peak_memory(device: torch.device) -> int:
    """Bytes: of tensors on a GPU since the last reset, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def quiet() -> None:
    """Hides the libraries' warnings about random weights and missing packages."""
    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
