#!/usr/bin/env python3
"""Train the small LTX-Video that `examples/demo.py` shows, on synthetic clips that are named by their prompts.

First the autoencoder learns to draw coloured shapes, then the transformer learns by flow matching which clip a prompt
such as "a red ball bounces" names. The classes are diffusers' own (LTXVideoTransformer3DModel, AutoencoderKLLTXVideo);
the text encoder is a fixed random table of words. `--output` then holds the pipeline for
`LTXPipeline.from_pretrained`, a sheet and a GIF of samples, recipe.json, and log.jsonl with the losses. With
`--output examples/demo_model` it replaces the model that the demo shows; `demo.py --model DIR` shows another.

It is meant for one GPU and takes `--seconds` there, whichever GPU it is. On a CPU use small numbers to see it run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from command_line import ROOT, at_least, directory, frames, pixels, seed, start


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    output = ROOT / "demo" / "trained"
    parser.add_argument("--output", type=directory, default=output, metavar="DIR", help="(default: demo/trained)")
    parser.add_argument("--seconds", type=at_least(1), default=440, help="of training, both parts (default: 440)")
    parser.add_argument("--vae-steps", type=at_least(1), default=6000, help="of the autoencoder, at most")
    parser.add_argument("--steps", type=at_least(1), default=40000, help="of the transformer, at most")
    parser.add_argument("--vae-batch", type=at_least(1), default=8, help="clips a step (default: 8)")
    parser.add_argument("--batch", type=at_least(1), default=64, help="clips a step (default: 64)")
    parser.add_argument("--clips", type=at_least(2), default=8192, help="that the transformer sees (default: 8192)")
    parser.add_argument("--num-frames", "--frames", type=frames, dest="frames", default=25, metavar="N")
    parser.add_argument("--height", type=pixels, default=128)
    parser.add_argument("--width", type=pixels, default=192)
    parser.add_argument("--sample-steps", type=at_least(2), default=20, help="of denoising in the samples")
    parser.add_argument("--sample-prompts", type=at_least(1), default=72, help="how many of the 72 prompts to sample")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: cuda where torch sees a GPU, else cpu)")
    return parser


if __name__ == "__main__":
    start(make_parser())  # before the imports below, which take seconds

# ruff: noqa: E402
import diffusers
import numpy as np
import torch
import transformers
from diffusers import AutoencoderKLLTXVideo, LTXPipeline, LTXVideoTransformer3DModel
from ltx_pipeline import device_of, make_scheduler, quiet, scheduler_shift, word_tokenizer, write_gif
from PIL import Image, ImageDraw, ImageFont
from scenes import PROMPTS, WORDS, draw, random_scenes, recognise
from torch import Tensor, nn

VAE_SHARE = 0.45  # of --seconds
SHAPES_A_CLIP = 4  # in the clips that the autoencoder is trained on
WINDOW = 96  # columns of a picture that the autoencoder is trained on
TEXT_TOKENS = 16
UNCONDITIONAL = 0.1  # part of the clips whose prompt is replaced by words that are not in the table
# The autoencoder learns latents of a size of about one, and to decode them in spite of small errors.
LATENT_NOISE, SIZE_WEIGHT = 0.05, 1e-4
DTYPE = torch.bfloat16  # of the stored weights


def make_pipeline(device: torch.device) -> LTXPipeline:
    """The untrained pipeline, of 3.9 million parameters; latents have a pixel for 4 frames of 16x16."""
    levels = 3
    width, caption_channels, latent_channels = 192, 64, 32
    tokenizer = word_tokenizer(WORDS)
    with device:
        vae = AutoencoderKLLTXVideo(
            latent_channels=latent_channels,
            block_out_channels=(16, 24, 32),
            decoder_block_out_channels=(24, 32, 48),
            down_block_types=("LTXVideoDownBlock3D",) * levels,
            downsample_type=("conv",) * levels,
            spatio_temporal_scaling=(True, True, False),
            decoder_spatio_temporal_scaling=(True, True, False),
            layers_per_block=(1,) * (levels + 1),
            decoder_layers_per_block=(1,) * (levels + 1),
            decoder_inject_noise=(False,) * (levels + 1),
            upsample_residual=(False,) * levels,
            upsample_factor=(1,) * levels,
        )
        transformer = LTXVideoTransformer3DModel(
            in_channels=latent_channels,
            out_channels=latent_channels,
            num_layers=4,
            num_attention_heads=width // 64,
            cross_attention_dim=width,
            caption_channels=caption_channels,
        )
        # Without a layer, T5's encoder is its table of words, each scaled to a mean square of 1.
        config = transformers.T5Config(
            vocab_size=len(tokenizer), d_model=caption_channels, d_kv=16, d_ff=64, num_layers=0, num_heads=4
        )
        text_encoder = transformers.T5EncoderModel(config).requires_grad_(False).eval()
    return LTXPipeline(
        scheduler=make_scheduler(), vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, transformer=transformer
    )


class Training:
    """Steps of AdamW until `steps` are done or `seconds` have passed, with a warm-up, a cosine decay by whichever of
    the two is nearer to its end, and an average of the weights, which `finish` leaves in the model."""

    def __init__(self, label: str, model: nn.Module, rate: float, steps: int, seconds: float, log: Any):
        self.label, self.rate, self.steps, self.seconds, self.log = label, rate, steps, seconds, log
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.average = [p.detach().clone() for p in self.parameters]
        fused = self.parameters[0].is_cuda
        self.optimizer = torch.optim.AdamW(self.parameters, lr=rate, betas=(0.9, 0.99), weight_decay=0.01, fused=fused)
        self.done, self.losses = 0, [math.nan]

    def __iter__(self) -> Iterator[int]:
        started = time.perf_counter()
        recent: list[Tensor] = []
        while True:
            elapsed = time.perf_counter() - started
            progress = max(self.done / self.steps, elapsed / self.seconds)
            if recent and (progress >= 1 or self.done in (1, 10) or self.done % 50 == 0):
                # Reading the losses waits for the device, so that `elapsed` does not run ahead of it.
                self.losses.append(torch.stack(recent).mean().item())
                recent.clear()
                record = {
                    "part": self.label,
                    "step": self.done,
                    "seconds": round(time.perf_counter() - started, 2),
                    "loss": round(self.losses[-1], 6),
                }
                self.log(record)
            if progress >= 1:
                break
            for group in self.optimizer.param_groups:
                group["lr"] = (
                    self.rate
                    * min(1, (self.done + 1) / min(200, self.steps / 10))
                    * (1 + math.cos(math.pi * progress))
                    / 2
                )
            yield self.done
            recent.append(self.loss)
        self.elapsed = time.perf_counter() - started

    def step(self, loss: Tensor) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        self.loss = loss.detach()
        # Young averages follow quickly: what they started from is random.
        torch._foreach_lerp_(
            self.average, [p.detach() for p in self.parameters], 1 - min(0.998, self.done / (self.done + 9))
        )

    @torch.no_grad()
    def finish(self) -> dict[str, Any]:
        for parameter, average in zip(self.parameters, self.average):
            parameter.copy_(average)
        return {
            "steps": self.done,
            "seconds": round(self.elapsed, 1),
            "first_loss": self.losses[min(1, len(self.losses) - 1)],
            "last_loss": self.losses[-1],
        }


def colourfulness(clips: Tensor) -> Tensor:
    """0 where a clip is grey, up to 2 where a shape is."""
    return clips.amax(1, keepdim=True) - clips.amin(1, keepdim=True)


def crowded_clips(args: argparse.Namespace, window: int, generator: torch.Generator) -> Tensor:
    """Clips of several shapes each: with one, nine tenths of a picture are wall, and an autoencoder draws that alone
    for hundreds of steps."""
    layers = [
        draw(
            random_scenes(args.vae_batch, args.frames, args.height, args.width, generator),
            args.height, args.width, window,
        )
        for _ in range(SHAPES_A_CLIP)
    ]  # fmt: skip
    clips = layers[0]
    for layer in layers[1:]:
        clips = torch.where(colourfulness(layer) > colourfulness(clips), layer, clips)
    return clips


def train_vae(vae: AutoencoderKLLTXVideo, args: argparse.Namespace, generator: torch.Generator, log: Any) -> Any:
    """The distance of the pictures, more of it where there is colour, and a small penalty for large latents.

    The encoder's variance is not used: noise as large as the latents hides the shapes from an untrained decoder.
    """
    training = Training("autoencoder", vae, 1e-3, args.vae_steps, VAE_SHARE * args.seconds, log)
    window = min(WINDOW, args.width)
    # Start from the wall's grey. The way there from zero would move all weights in one direction, so far that latents
    # and pictures no longer depend on the clip.
    with torch.no_grad():
        vae.decoder.conv_out.conv.bias.fill_(crowded_clips(args, window, generator).mean().item())
        vae.decoder.conv_out.conv.weight.mul_(0.1)
    for _ in training:
        clips = crowded_clips(args, window, generator)
        latents = vae.encode(clips).latent_dist.mode()
        noise = torch.randn(latents.shape, generator=generator, device=latents.device)
        decoded = vae.decode(latents + LATENT_NOISE * noise).sample
        distance = decoded - clips
        weighted = (distance.abs() + distance.square()) * (1 + 2 * colourfulness(clips))
        training.step(weighted.mean() + SIZE_WEIGHT * latents.square().mean())
    return training.finish()


@torch.no_grad()
def encode_clips(
    vae: AutoencoderKLLTXVideo, args: argparse.Namespace, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Latents of random clips, [clips, tokens, channels] with a mean of 0 and a deviation of 1 in each channel, and
    the indices of their prompts. The autoencoder keeps mean and deviation, as LTXPipeline expects."""
    latents, prompts = [], []
    for first in range(0, args.clips, 32):
        scenes = random_scenes(min(32, args.clips - first), args.frames, args.height, args.width, generator)
        latents.append(vae.encode(draw(scenes, args.height, args.width)).latent_dist.mode())
        prompts.append(scenes.prompts)
    packed = torch.cat(latents)
    vae.latents_mean.copy_(packed.mean((0, 2, 3, 4)))
    vae.latents_std.copy_(packed.std((0, 2, 3, 4)))
    mean, std = (x.view(1, -1, 1, 1, 1) for x in (vae.latents_mean, vae.latents_std))
    return ((packed - mean) / std).flatten(2).transpose(1, 2).contiguous(), torch.cat(prompts)


def train_transformer(
    pipe: LTXPipeline,
    latents: Tensor,
    prompts: Tensor,
    args: argparse.Namespace,
    generator: torch.Generator,
    seconds: float,
    log: Any,
) -> Any:
    """Flow matching: from a clip mixed with noise to the direction from clip to noise."""
    device, vae = latents.device, pipe.vae
    tokens = pipe.tokenizer(PROMPTS, padding="max_length", max_length=TEXT_TOKENS, return_tensors="pt").to(device)
    unknown = pipe.tokenizer(
        ["? " * count for count in range(TEXT_TOKENS - 1)],
        padding="max_length", max_length=TEXT_TOKENS, return_tensors="pt",
    ).to(device)  # fmt: skip
    with torch.no_grad():
        table, unknown_table = (pipe.text_encoder(t.input_ids)[0] for t in (tokens, unknown))
    table, mask = torch.cat((table, unknown_table)), torch.cat((tokens.attention_mask, unknown.attention_mask)).bool()
    shape = {
        "num_frames": (args.frames - 1) // vae.temporal_compression_ratio + 1,
        "height": args.height // vae.spatial_compression_ratio,
        "width": args.width // vae.spatial_compression_ratio,
        "rope_interpolation_scale": (vae.temporal_compression_ratio / 25, *(vae.spatial_compression_ratio,) * 2),
    }
    shift = math.exp(scheduler_shift(latents.shape[1]))
    training = Training("transformer", pipe.transformer, 1e-3, args.steps, seconds, log)
    for _ in training:
        chosen = torch.randint(len(latents), (args.batch,), generator=generator, device=device)
        clean = latents[chosen]
        noise = torch.randn(clean.shape, generator=generator, device=device)
        uniform = torch.rand(args.batch, 1, 1, generator=generator, device=device)
        sigma = shift * uniform / (1 + (shift - 1) * uniform)  # as often as the sampler asks for it
        text = prompts[chosen]
        other = len(PROMPTS) + torch.randint(len(unknown_table), text.shape, generator=generator, device=device)
        dropped = torch.rand(text.shape, generator=generator, device=device) < UNCONDITIONAL
        text = torch.where(dropped, other, text)
        predicted = pipe.transformer(
            hidden_states=torch.lerp(clean, noise, sigma),
            encoder_hidden_states=table[text],
            timestep=sigma[:, 0, 0] * 1000,
            encoder_attention_mask=mask[text],
            return_dict=False,
            **shape,
        )[0]
        training.step(nn.functional.mse_loss(predicted, noise - clean))
    return training.finish()


@torch.no_grad()
def reconstruction_psnr(vae: AutoencoderKLLTXVideo, args: argparse.Namespace, generator: torch.Generator) -> float:
    """The PSNR in decibels of clips that the autoencoder has not seen."""
    scenes = random_scenes(8, args.frames, args.height, args.width, generator)
    clips = draw(scenes, args.height, args.width)
    decoded = vae.decode(vae.encode(clips).latent_dist.mode()).sample.clamp(-1, 1)
    return -10 * math.log10((decoded - clips).div(2).square().mean().item())


def sample(pipe: LTXPipeline, prompts: list[str], args: argparse.Namespace) -> np.ndarray:
    """Clips of the prompts as LTXPipeline makes them, [n, frames, height, width, 3] in 0..1."""
    pipe.set_progress_bar_config(disable=True)
    clips = []
    for first in range(0, len(prompts), 12):
        batch = prompts[first : first + 12]
        clips.append(
            pipe(
                prompt=batch,
                negative_prompt=[""] * len(batch),
                num_frames=args.frames,
                height=args.height,
                width=args.width,
                num_inference_steps=args.sample_steps,
                generator=[torch.Generator().manual_seed(args.seed + first + i) for i in range(len(batch))],
                output_type="np",
            ).frames
        )
    return np.concatenate(clips)


def write_sheet(clips: np.ndarray, prompts: list[str], path: Path, columns: int = 6) -> None:
    """A row for each clip: its prompt, and frames from first to last."""
    chosen = np.linspace(0, clips.shape[1] - 1, columns).round().astype(int)
    _, _, height, width, _ = clips.shape
    line, font = 18, ImageFont.load_default(14)
    picture = Image.new("RGB", (columns * (width + 2), len(clips) * (height + line)), "white")
    canvas = ImageDraw.Draw(picture)
    for row, (clip, prompt) in enumerate(zip(clips, prompts)):
        canvas.text((2, row * (height + line)), prompt, fill="black", font=font)
        for column, index in enumerate(chosen):
            image = Image.fromarray((clip[index] * 255).round().astype(np.uint8))
            picture.paste(image, (column * (width + 2), row * (height + line) + line))
    picture.save(path)


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(arguments)
    device = torch.device(device_of(parser, args.device))
    quiet()
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    generator = torch.Generator(device).manual_seed(args.seed)
    args.output.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with (args.output / "log.jsonl").open("w") as file:

        def log(record: dict[str, Any]) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()
            if record["step"] % 250 == 0 or record["step"] <= 100:
                print("{part}: step {step}, {seconds:.0f} s, loss {loss:.4f}".format(**record), flush=True)

        pipe = make_pipeline(device)
        vae_result = train_vae(pipe.vae, args, generator, log)
        pipe.vae.requires_grad_(False).eval()
        psnr = reconstruction_psnr(pipe.vae, args, generator)
        print(f"autoencoder: {vae_result['steps']} steps, {psnr:.1f} dB on new clips", flush=True)
        latents, prompts = encode_clips(pipe.vae, args, generator)
        left = max(1.0, args.seconds - (time.perf_counter() - started))
        transformer_result = train_transformer(pipe, latents, prompts, args, generator, left, log)
    trained_seconds = time.perf_counter() - started

    pipe.transformer.requires_grad_(False).eval()
    pipe.to(dtype=DTYPE).save_pretrained(args.output)
    pipe = LTXPipeline.from_pretrained(args.output, dtype=DTYPE).to(device)  # what a user of the folder has
    named = PROMPTS[: args.sample_prompts]
    clips = sample(pipe, named, args)
    right = [recognise(clip) == prompt for clip, prompt in zip(clips, named)]
    shown = list(range(0, len(named), 5))
    write_sheet(clips[shown], [named[i] for i in shown], args.output / "samples.png")
    write_gif((clips[0] * 255).round().astype(np.uint8), args.output / "sample.gif")
    options = {key: value for key, value in vars(args).items() if key not in ("output", "device")}
    recipe = {
        "command": "python examples/train_demo.py",
        "options": options,
        "clips": {"prompt": PROMPTS[0], "steps": args.sample_steps}  # what ltx_pipeline.parse reads
        | {name: options[name] for name in ("frames", "height", "width")},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "versions": {module.__name__: module.__version__ for module in (torch, diffusers, transformers)},
        "parameters": {
            name: sum(p.numel() for p in getattr(pipe, name).parameters())
            for name in ("transformer", "vae", "text_encoder")
        },
        "autoencoder": {**vae_result, "psnr_db": round(psnr, 2)},
        "transformer": transformer_result,
        "training_seconds": round(trained_seconds, 1),
        "recognised": {"right": sum(right), "of": len(right)},
        "bytes": sum(file.stat().st_size for file in args.output.glob("*/*.safetensors")),
    }
    (args.output / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n")
    print(
        f"{sum(right)} of {len(right)} samples show what their prompt says; {recipe['bytes'] / 1e6:.2f} MB of weights"
    )
    print(f"wrote {args.output} in {time.perf_counter() - started:.0f} s, {trained_seconds:.0f} s of them training")
    return 0


if __name__ == "__main__":
    sys.exit(main())
