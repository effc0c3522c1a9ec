#!/usr/bin/env python3
"""Train a LoRA of LTX-Video through fused blocks, with accelerate and peft.

    python examples/train_lora.py                 # a tiny random model on drawn clips
    python examples/train_lora.py --model Lightricks/LTX-Video --data videos --num-frames 49 --height 512 --width 768

`--data` is a folder of videos with captions beside them: kite.mp4 and kite.txt. Each clip is encoded once. A step mixes
latents with noise and compares the model's output with noise minus latents. Each token has a timestep of its own: in
some samples the first frame stays clean, so that the adapter also learns to continue an image.

`--output` then holds pytorch_lora_weights.safetensors for `LTXPipeline.load_lora_weights`, losses.json, loss.png and
checkpoints. `--resume` goes on from the last checkpoint. `--stock` trains without this package, for comparison.
`accelerate launch examples/train_lora.py ...` trains on several GPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from command_line import ExampleError, at_least, directory, finite, frames, load_kernels, pixels, seed, start


def small_seed(text: str) -> int:
    """accelerate adds the number of the process, and numpy takes the sum, in 32 bits."""
    return seed(text, bits=31)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny, random, a folder or a Hub id (default: tiny)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="videos with captions (default: drawn clips)")
    parser.add_argument("--clips", type=at_least(1), default=8, help="how many to draw without --data (default: 8)")
    parser.add_argument("--num-frames", type=frames, default=25, help="a multiple of 8, plus 1 (default: 25)")
    parser.add_argument("--height", type=pixels, default=128, help="a multiple of 32 (default: 128)")
    parser.add_argument("--width", type=pixels, default=192, help="a multiple of 32 (default: 192)")
    parser.add_argument("--output", type=directory, default=Path("lora"), metavar="DIR", help="(default: lora)")
    parser.add_argument("--steps", type=at_least(1), default=100, help="of the optimizer (default: 100)")
    parser.add_argument("--batch-size", type=at_least(1), default=1, help="clips in a forward (default: 1)")
    parser.add_argument("--gradient-accumulation", type=at_least(1), default=1, help="forwards in a step (default: 1)")
    parser.add_argument("--checkpointing", action="store_true", help="compute blocks again in the backward")
    parser.add_argument("--mixed-precision", choices=("no", "bf16"), default="bf16", help="(default: bf16)")
    parser.add_argument("--rank", type=at_least(1), default=16, help="of the adapters (default: 16)")
    parser.add_argument("--learning-rate", type=finite, default=1e-4, help="(default: 0.0001)")
    parser.add_argument("--warmup-steps", type=at_least(0), default=10, help="(default: 10)")
    parser.add_argument(
        "--first-frame", type=finite, default=0.1, help="part of samples with a clean one (default: 0.1)"
    )
    parser.add_argument("--checkpoint-every", type=at_least(1), default=50, help="steps (default: 50)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    parser.add_argument("--stock", action="store_true", help="train without this package's ops")
    parser.add_argument("--seed", type=small_seed, default=0)
    parser.add_argument("--cpu", action="store_true", help="train on the CPU, though there is a GPU")
    return parser


if __name__ == "__main__":
    start(make_parser())  # before the imports below, which take seconds

# ruff: noqa: E402
import imageio.v3
import peft
import scenes
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import LTXPipeline
from diffusers.optimization import get_constant_schedule_with_warmup
from diffusers.training_utils import cast_training_params
from ltx_pipeline import FRAME_RATE, load_pipeline, progress_bar, quiet, scheduler_shift
from rich.console import Console
from torch import Tensor
from torch.nn.functional import interpolate

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
VIDEOS = (".mp4", ".mov", ".webm", ".mkv", ".gif")
FREE = ("output", "steps", "checkpointing", "checkpoint_every", "resume", "stock", "cpu")  # may differ in a resumed run


def read_video(path: Path, args: argparse.Namespace) -> Tensor:
    """The first frames, scaled and cut to the size: [3, frames, height, width] in -1..1."""
    try:
        read = [torch.from_numpy(frame[..., :3].copy()) for frame in islice(imageio.v3.imiter(path), args.num_frames)]
    except Exception as error:  # each plug-in of imageio has errors of its own
        raise ExampleError(f"argument --data: {path} cannot be read: {error}") from error
    if len(read) < args.num_frames:
        raise ExampleError(f"argument --num-frames: {path} has {len(read)} frames, and {args.num_frames} are asked for")
    clip, wanted = torch.stack(read).movedim(3, 1) / 127.5 - 1, (args.height, args.width)
    scale = max(new / old for new, old in zip(wanted, clip.shape[2:]))
    clip = interpolate(clip, [round(scale * old) for old in clip.shape[2:]], mode="bilinear", antialias=True)
    top, left = ((old - new) // 2 for new, old in zip(wanted, clip.shape[2:]))
    return clip[..., top : top + args.height, left : left + args.width].movedim(1, 0)


def captioned_clips(args: argparse.Namespace) -> Iterator[tuple[Tensor, str]]:
    if args.data is None:
        size, generator = (args.height, args.width), torch.Generator().manual_seed(args.seed)
        drawn = scenes.random_scenes(args.clips, args.num_frames, *size, generator)
        yield from zip(scenes.draw(drawn, *size), (scenes.PROMPTS[i] for i in drawn.prompts))
        return
    videos = sorted(path for path in args.data.glob("*") if path.suffix.lower() in VIDEOS)
    if not videos:
        raise ExampleError(f"argument --data: expected a folder with videos ({', '.join(VIDEOS)}), got {args.data}")
    for path in videos:
        caption = path.with_suffix(".txt")
        if not caption.is_file():
            raise ExampleError(f"argument --data: {path.name} has no caption: write one into {caption}")
        yield read_video(path, args), caption.read_text().strip()


@torch.no_grad()
def encode(pipe: LTXPipeline, args: argparse.Namespace) -> dict[str, Tensor]:
    """Latents [clips, tokens, channels], texts and their masks, on the CPU."""
    vae, found = pipe.vae, []
    mean, std = (x.view(-1, 1).float() for x in (vae.latents_mean, vae.latents_std))
    for clip, caption in captioned_clips(args):
        latents = vae.encode(clip[None].to(vae.device, vae.dtype)).latent_dist.mode()[0].float().flatten(1)
        text, mask, *_ = pipe.encode_prompt(caption, do_classifier_free_guidance=False)
        found.append(((latents - mean) / std * vae.config.scaling_factor, text[0], mask[0]))
    latents, text, mask = (torch.stack(each).cpu() for each in zip(*found))
    return {"latents": latents.mT.contiguous(), "text": text, "mask": mask}


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.losses, self.report = args, [], None
        self.accelerator = Accelerator(
            cpu=args.cpu,
            mixed_precision=args.mixed_precision,
            gradient_accumulation_steps=args.gradient_accumulation,
            step_scheduler_with_optimizer=False,  # once a step, however many processes there are
        )
        device, dtype = self.accelerator.device, torch.bfloat16 if args.mixed_precision == "bf16" else torch.float32
        self.pipe = load_pipeline(args.model, device, dtype, args.seed)
        self.data = encode(self.pipe, args)
        time, space = self.pipe.vae.temporal_compression_ratio, self.pipe.vae.spatial_compression_ratio
        self.size = {
            "num_frames": (args.num_frames - 1) // time + 1,
            "height": args.height // space,
            "width": args.width // space,
            "rope_interpolation_scale": (time / FRAME_RATE, space, space),
        }
        self.pipe.vae = self.pipe.text_encoder = None  # their memory is free from here on

        # The order matters: adapters, then optimize, then accelerate's wrapper.
        set_seed(args.seed)
        model = self.model = self.pipe.transformer.train()
        model.add_adapter(peft.LoraConfig(r=args.rank, lora_alpha=args.rank, target_modules=TARGETS))
        cast_training_params(model, torch.float32)  # bfloat16 would lose small updates
        if args.checkpointing:
            model.enable_gradient_checkpointing()
        if not args.stock:
            self.report = load_kernels(device).optimize(model)
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(self.trained, lr=args.learning_rate)
        schedule = get_constant_schedule_with_warmup(optimizer, args.warmup_steps)
        self.wrapped, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)
        self.accelerator.register_for_checkpointing(self)
        self.accelerator.register_save_state_pre_hook(self.save_adapters_alone)
        self.accelerator.register_load_state_pre_hook(self.load_adapters_alone)
        set_seed(args.seed, device_specific=True)

    def make_batch(self) -> tuple[dict[str, Any], Tensor, Tensor]:
        """The transformer's inputs, the target of its output, and 1 for each token that counts in the loss.

        Drawn on the CPU: a run has the same batches on every device, and a checkpoint has the generator's state.
        """
        count, device, dtype = self.args.batch_size, self.model.device, self.model.dtype
        chosen = torch.randint(len(self.data["latents"]), (count,))
        clean = self.data["latents"][chosen]
        noise, tokens = torch.randn(clean.shape), clean.shape[1]
        # More noise in longer clips, as in the sampler.
        sigma = torch.sigmoid(torch.randn(count, 1) + scheduler_shift(tokens)).repeat(1, tokens)
        is_clean = (torch.rand(count) < self.args.first_frame) & (self.size["num_frames"] > 1)
        sigma[is_clean, : self.size["height"] * self.size["width"]] = 0
        inputs = {
            "hidden_states": torch.lerp(clean, noise, sigma[..., None]).to(device, dtype),
            "encoder_hidden_states": self.data["text"][chosen].to(device, dtype),
            "encoder_attention_mask": self.data["mask"][chosen].to(device),
            "timestep": (sigma * 1000).to(device),  # [clips, tokens]
            **self.size,
        }
        return inputs, (noise - clean).to(device), (sigma > 0).float().to(device)

    def step(self) -> float:
        losses = []
        for _ in range(self.args.gradient_accumulation):
            inputs, target, counted = self.make_batch()
            with self.accelerator.accumulate(self.wrapped):
                output = self.wrapped(**inputs, return_dict=False)[0]
                loss = ((output.float() - target).square().mean(2) * counted).sum() / counted.sum()
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.trained, 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.detach())
        self.schedule.step()
        mean = self.accelerator.reduce(torch.stack(losses).mean(), "mean").item()
        if not math.isfinite(mean):
            raise ExampleError(f"argument --learning-rate: {self.args.learning_rate} is too high: the loss is {mean}")
        return mean

    # ---- Checkpoints: adapters, optimizer, schedule, random numbers, and losses, which count the steps

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = state["losses"]

    def adapters(self, name: str = "default") -> dict[str, Tensor]:
        return peft.get_peft_model_state_dict(self.model, adapter_name=name)

    def save_adapters(self, folder: str | Path) -> None:
        metadata = self.model.peft_config["default"].to_dict()
        LTXPipeline.save_lora_weights(folder, self.adapters(), transformer_lora_adapter_metadata=metadata)

    def save_adapters_alone(self, models: list[Any], weights: list[Any], folder: str) -> None:
        weights.clear()  # of the whole model
        if self.accelerator.is_main_process:
            self.save_adapters(folder)

    def load_adapters_alone(self, models: list[Any], folder: str) -> None:
        models.clear()
        saved = LTXPipeline.lora_state_dict(folder)
        peft.set_peft_model_state_dict(self.model, {k.removeprefix("transformer."): v for k, v in saved.items()})

    def save_checkpoint(self) -> None:
        """Writes a checkpoint whole or not at all: the folder has another name until all is written."""
        part = self.args.output / "unfinished"
        self.accelerator.save_state(str(part))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            os.replace(part, self.args.output / f"checkpoint-{len(self.losses):06d}")

    # ---- Results

    def fused_line(self) -> str:
        """Which blocks ran fused."""
        if self.report is None:
            return "fused: nothing (--stock)"
        parts = []
        for site in self.report.sites:
            if site.class_name.endswith("Block"):
                stock = ", ".join(f"{count} x {reason}" for reason, count in site.fallbacks.items())
                part = f"{site.modules} x {site.name}: {site.gradients} calls with gradients"
                again = f", {site.recomputed} computed again by checkpoints" if site.recomputed else ""
                parts.append(f"{part}{again}, stock calls: {stock or 'none'}")
        return f"fused: {'; '.join(parts) or 'no blocks'}"

    def load_back(self) -> None:
        """Reads the file as a user does, into a stock model, and compares it with what was trained."""
        if self.report is not None:
            self.report.restore()
        trained = self.adapters()
        self.model.delete_adapters("default")
        self.pipe.load_lora_weights(self.args.output, adapter_name="saved")
        saved = self.adapters("saved")
        if saved.keys() != trained.keys() or any(not torch.equal(x, trained[k].to(x.dtype)) for k, x in saved.items()):
            raise ExampleError(f"argument --output: the adapters in {self.args.output} are not those that were trained")


def plot(losses: list[float], path: Path) -> None:
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("Agg")
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    window = max(1, len(losses) // 10)
    recent = [losses[max(0, end - window) : end] for end in range(1, len(losses) + 1)]
    axes.plot(range(1, len(losses) + 1), losses, ".-", color="0.75", linewidth=1, label="loss of a step")
    axes.plot(range(1, len(losses) + 1), [sum(of) / len(of) for of in recent], label=f"mean of {window}")
    axes.set_xlabel("step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def prepare_output(args: argparse.Namespace) -> Path | None:
    """The checkpoint to go on from; an error where this run does not fit what --output holds."""
    settings = {name: str(value) for name, value in vars(args).items() if name not in FREE}
    settings["processes"] = os.environ.get("WORLD_SIZE", "1")  # each draws its own batches
    file, checkpoints = args.output / "settings.json", sorted(args.output.glob("checkpoint-*"))
    if checkpoints and not args.resume:
        raise ExampleError(f"argument --output: {args.output} has checkpoints: add --resume, or name another folder")
    if args.resume and not checkpoints:
        raise ExampleError(f"argument --resume: expected a checkpoint in {args.output}, and there is none")
    if args.resume:
        for name, before in json.loads(file.read_text()).items():
            if settings[name] != before:
                option = f"argument --{name.replace('_', '-')}" if name in args else f"number of {name}"
                raise ExampleError(f"{option}: the run to resume has {before}, got {settings[name]}")
        return checkpoints[-1]
    args.output.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings, indent=1) + "\n")
    return None


def main(arguments: list[str] | None = None) -> int:
    args = make_parser().parse_args(arguments)
    if not 0 <= args.first_frame <= 1:
        raise ExampleError(f"argument --first-frame: expected 0 to 1, got {args.first_frame}")
    if args.learning_rate <= 0:
        raise ExampleError(f"argument --learning-rate: expected more than 0, got {args.learning_rate}")
    if args.data is not None and not args.data.is_dir():
        raise ExampleError(f"argument --data: {args.data} is no folder")
    checkpoint = prepare_output(args)
    if checkpoint is not None and (done := int(checkpoint.name.removeprefix("checkpoint-"))) > args.steps:
        if os.environ.get("RANK", "0") == "0":
            print(f"the run already has {done} steps: --steps counts those too; give more of them to go on")
        return 0
    quiet()
    torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients are wrong for some numbers of keys (pytorch#196678)
    trainer = Trainer(args)
    accelerator, output = trainer.accelerator, args.output
    console = Console(width=None if sys.stdout.isatty() else 160, quiet=not accelerator.is_main_process)
    if checkpoint is not None:
        accelerator.load_state(str(checkpoint))
        console.print(f"resumed from {checkpoint}", highlight=False, soft_wrap=True)
    with progress_bar(console) as progress:
        task = progress.add_task("training", total=args.steps, completed=len(trainer.losses))
        while len(trainer.losses) < args.steps:
            trainer.losses.append(trainer.step())
            progress.update(task, advance=1, description=f"loss {trainer.losses[-1]:.4f}")
            if len(trainer.losses) % args.checkpoint_every == 0 or len(trainer.losses) == args.steps:
                trainer.save_checkpoint()
    console.print(trainer.fused_line(), highlight=False, soft_wrap=True)
    if accelerator.is_main_process:
        trainer.save_adapters(output)
        trainer.load_back()
        (output / "losses.json").write_text(json.dumps(trainer.losses) + "\n")
        plot(trainer.losses, output / "loss.png")
    first, *_, last = [*trainer.losses[:1], *trainer.losses]
    console.print(f"wrote {output}: loss {first:.4f} to {last:.4f}", highlight=False, soft_wrap=True)
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    sys.exit(main())
