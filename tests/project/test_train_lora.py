"""examples/train_lora.py: its losses beside stock ones, checkpoints and resumed runs, its data, and what it writes."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

for package in ("accelerate", "diffusers", "imageio", "peft", "rich", "transformers"):
    pytest.importorskip(package)
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import train_lora  # noqa: E402
from command_line import TRAINED, ExampleError  # noqa: E402
from diffusers import LTXPipeline  # noqa: E402
from helpers.trainers import forget_accelerator  # noqa: E402
from ltx_pipeline import load_pipeline  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "one_accelerator", "without_cudnn_attention")

BLOCKS = 3
SIZE = "--num-frames 9 --height 64 --width 64"
SMALL = f"{SIZE} --clips 2 --rank 4 --warmup-steps 2 --learning-rate 1e-3".split()
STEPS, EVERY = 4, 2
FILE = "pytorch_lora_weights.safetensors"


@pytest.fixture
def one_accelerator() -> Iterator[None]:
    """accelerate keeps its settings for all of the process."""
    yield
    forget_accelerator()


class Run:
    """One run of main: its losses, adapters and last lines."""

    def __init__(self, capsys: pytest.CaptureFixture[str], device: str, folder: Path, *options: str):
        forget_accelerator()
        capsys.readouterr()
        cpu = ["--cpu"] if device == "cpu" else []
        assert train_lora.main([*SMALL, *cpu, "--output", str(folder), *options]) == 0
        self.folder, self.lines = folder, capsys.readouterr().out.splitlines()
        self.losses = json.loads((folder / "losses.json").read_text())
        self.adapters = load_file(folder / FILE)

    @property
    def fused(self) -> str:
        (line,) = [line for line in self.lines if line.startswith("fused: ")]
        return line.removeprefix("fused: ")


def blocks(steps: int, again: str = "") -> str:
    calls = steps * BLOCKS
    return f"{BLOCKS} x diffusers.LTXVideoTransformerBlock: {calls} calls with gradients{again}, stock calls: none"


def assert_same(run: Run, other: Run, device: str) -> None:
    """To the bit on a CPU. On a GPU the backward of torch's attention adds in another order each time."""
    assert run.losses == pytest.approx(other.losses, rel=0 if device == "cpu" else 1e-3)
    assert run.adapters.keys() == other.adapters.keys()
    for name, adapter in run.adapters.items():
        assert device != "cpu" or torch.equal(adapter, other.adapters[name]), name


def test_losses_as_stock_and_a_resumed_run(ltx: ModuleType, device: str, tmp_path: Path, capsys: Any) -> None:
    precision = ["--mixed-precision", "no", "--checkpoint-every", str(EVERY)]
    whole = Run(capsys, device, tmp_path / "whole", *precision, "--steps", str(STEPS))
    assert whole.fused == blocks(STEPS) and len(whole.losses) == STEPS
    assert sorted(path.name for path in whole.folder.iterdir()) == [
        "checkpoint-000002", "checkpoint-000004", "loss.png", "losses.json", FILE, "settings.json",
    ]  # fmt: skip

    stock = Run(capsys, device, tmp_path / "stock", *precision, "--steps", str(STEPS), "--stock")
    assert stock.fused == "nothing (--stock)"
    assert whole.losses == pytest.approx(stock.losses, rel=1e-4)
    assert whole.adapters.keys() == stock.adapters.keys() and len(whole.adapters) == BLOCKS * 2 * 4 * 2

    capsys.readouterr()
    options = [*SMALL, "--mixed-precision", "no", "--steps", str(STEPS - 1), "--resume", "--output", str(whole.folder)]
    assert train_lora.main([*options, *(["--cpu"] if device == "cpu" else [])]) == 0
    assert capsys.readouterr().out.startswith(f"the run already has {STEPS} steps: ")

    # A run that ended after its first checkpoint goes on as if it had not.
    shutil.copytree(whole.folder, tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoint-000004")
    resumed = Run(capsys, device, tmp_path / "resumed", *precision, "--steps", str(STEPS), "--resume")
    assert resumed.fused == blocks(STEPS - EVERY)
    assert_same(resumed, whole, device)
    assert any(adapter.any() for name, adapter in resumed.adapters.items() if "lora_B" in name)  # it has learned


def test_bf16_checkpointing_and_accumulation(ltx: ModuleType, device: str, tmp_path: Path, capsys: Any) -> None:
    options = ["--mixed-precision", "bf16", "--steps", "2", "--gradient-accumulation", "2", "--batch-size", "2"]
    plain = Run(capsys, device, tmp_path / "plain", *options)
    assert plain.fused == blocks(4) and len(plain.losses) == 2
    again = Run(capsys, device, tmp_path / "again", *options, "--checkpointing")
    assert again.fused == blocks(4, f", {4 * BLOCKS} computed again by checkpoints")
    assert_same(again, plain, device)
    stock = Run(capsys, device, tmp_path / "stock", *options, "--stock")
    assert plain.losses == pytest.approx(stock.losses, rel=1e-2)
    assert all(adapter.dtype == torch.float32 for adapter in plain.adapters.values())


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    """Two GIFs of other sizes than the training's, with captions."""
    folder = tmp_path / "videos"
    folder.mkdir()
    for name, (height, width) in {"wide": (80, 160), "high": (150, 100)}.items():
        frames = [np.full((height, width, 3), (20 * i, 100, 200), dtype=np.uint8) for i in range(10)]
        for frame in frames:
            frame[:, : (width - height) // 2 if width > height else 0] = 255  # what is cut off
        first, *rest = (Image.fromarray(frame) for frame in frames)
        first.save(folder / f"{name}.gif", save_all=True, append_images=rest)
        (folder / f"{name}.txt").write_text(f"a {name} sky\n")
    return folder


def test_a_folder_of_videos(ltx: ModuleType, device: str, videos: Path, tmp_path: Path, capsys: Any) -> None:
    """The adapters that it writes change what a pipeline generates."""
    args = train_lora.make_parser().parse_args([*SMALL, "--data", str(videos)])
    (high, caption), (wide, other) = train_lora.captioned_clips(args)
    assert (caption, other) == ("a high sky", "a wide sky") and high.shape == wide.shape == (3, 9, 64, 64)
    expected = torch.tensor([20.0 * i for i in range(9)]) / 127.5 - 1
    for clip in (high, wide):
        torch.testing.assert_close(clip[0].mean((1, 2)), expected, atol=0.05, rtol=0)
        torch.testing.assert_close(clip[2].mean(), torch.tensor(200 / 127.5 - 1), atol=0.05, rtol=0)

    options = ["--data", str(videos), "--steps", "1", "--warmup-steps", "0"]
    run = Run(capsys, device, tmp_path / "lora", *options)
    assert run.fused == blocks(1)
    with Image.open(run.folder / "loss.png") as picture:
        assert picture.width > 500 and len(picture.convert("RGB").getcolors(2**16)) > 10

    pipe = load_pipeline("tiny", torch.device(device), torch.float32)
    clips = []
    for loaded in (False, True):
        if loaded:
            pipe.load_lora_weights(run.folder)
            assert pipe.transformer.peft_config["default_0"].lora_alpha == 4
        generator = torch.Generator().manual_seed(0)
        size = {"num_frames": 9, "height": 64, "width": 64, "num_inference_steps": 2, "output_type": "latent"}
        clips.append(pipe("a kite", **size, generator=generator).frames)
    assert clips[0].isfinite().all() and not torch.equal(*clips)


def test_a_model_that_is_loaded(ltx: ModuleType, device: str, tmp_path: Path, capsys: Any) -> None:
    """From a folder, as from the Hub. It was trained on such clips: its loss is low where latents, noise levels, places
    and texts are what it knows. One that says nothing has a loss of 2."""
    size = ["--num-frames", "25", "--height", "128", "--width", "192", "--clips", "1"]
    run = Run(capsys, device, tmp_path, "--model", str(TRAINED), *size, "--steps", "1")
    assert run.fused == "4 x diffusers.LTXVideoTransformerBlock: 4 calls with gradients, stock calls: none"
    assert 0 < run.losses[0] < 0.5


@pytest.mark.host
def test_a_clean_first_frame() -> None:
    """Its tokens are clean, at timestep 0 and not counted; every other token has its sample's timestep."""
    trainer = object.__new__(train_lora.Trainer)
    trainer.args = train_lora.make_parser().parse_args(["--first-frame", "1", "--batch-size", "2"])
    trainer.model = nn.Identity()
    trainer.model.device, trainer.model.dtype = torch.device("cpu"), torch.float32
    trainer.size = {"num_frames": 3, "height": 2, "width": 3}
    trainer.data = {"latents": torch.randn(1, 18, 4), "text": torch.randn(1, 5, 8), "mask": torch.ones(1, 5)}
    inputs, target, counted = trainer.make_batch()
    clean, sigma = trainer.data["latents"], inputs["timestep"] / 1000
    assert sigma.shape == counted.shape == (2, 18)
    assert not sigma[:, :6].any() and not counted[:, :6].any() and (counted[:, 6:] == 1).all()
    assert torch.equal(inputs["hidden_states"][:, :6], clean[:, :6].expand(2, -1, -1))
    assert (sigma[:, 6:] == sigma[:, 6:7]).all() and sigma[0, 6] != sigma[1, 6] and sigma[:, 6:].min() > 0
    torch.testing.assert_close(inputs["hidden_states"], clean + sigma[..., None] * target)
    trainer.size["num_frames"] = 1  # nothing would be left to learn
    assert (trainer.make_batch()[2] == 1).all()
    trainer.args.first_frame, trainer.size["num_frames"] = 0, 3
    assert (trainer.make_batch()[2] == 1).all()


def test_adapters_that_are_read_back_otherwise(
    ltx: ModuleType, device: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = LTXPipeline.save_lora_weights.__func__

    def wrong(cls: Any, folder: Any, layers: dict[str, torch.Tensor], **options: Any) -> None:
        saved(cls, folder, {name: 2 * x for name, x in layers.items()}, **options)

    monkeypatch.setattr(LTXPipeline, "save_lora_weights", classmethod(wrong))
    with pytest.raises(ExampleError, match="are not those that were trained"):
        Run(capsys, device, tmp_path, "--steps", "1")


@pytest.mark.host
def test_wrong_arguments(tmp_path: Path, videos: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def refused(*options: str, output: Path = tmp_path / "none") -> str:
        with pytest.raises(ExampleError) as raised:
            train_lora.main([*SMALL, "--cpu", "--output", str(output), *options])
        return str(raised.value)

    assert refused("--first-frame", "1.5") == "argument --first-frame: expected 0 to 1, got 1.5"
    assert refused("--learning-rate", "0") == "argument --learning-rate: expected more than 0, got 0.0"
    assert refused("--data", "nowhere") == "argument --data: nowhere is no folder"
    assert refused("--resume").startswith("argument --resume: expected a checkpoint in ")
    assert not (tmp_path / "none").exists()
    with pytest.raises(SystemExit):
        train_lora.make_parser().parse_args(["--seed", str(2**31)])
    assert "argument --seed: expected 0 to 2^31 - 1, got 2147483648" in capsys.readouterr().err

    before = tmp_path / "before"
    (before / "checkpoint-000001").mkdir(parents=True)
    assert "has checkpoints: add --resume" in refused(output=before)
    args = train_lora.make_parser().parse_args([*SMALL, "--rank", "8"])
    args.output = tmp_path / "other"
    assert train_lora.prepare_output(args) is None
    (args.output / "checkpoint-000001").mkdir()
    assert refused("--resume", output=args.output) == "argument --rank: the run to resume has 8, got 4"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (
        refused("--rank", "8", "--resume", output=args.output) == "number of processes: the run to resume has 1, got 2"
    )


@pytest.mark.host
def test_wrong_videos(tmp_path: Path, videos: Path) -> None:
    def refused(*options: str) -> str:
        args = train_lora.make_parser().parse_args([*SMALL, "--data", str(videos), *options])
        with pytest.raises(ExampleError) as raised:
            list(train_lora.captioned_clips(args))
        return str(raised.value)

    gif = videos / "high.gif"
    assert refused("--num-frames", "17") == f"argument --num-frames: {gif} has 10 frames, and 17 are asked for"
    (videos / "high.txt").unlink()
    assert refused() == f"argument --data: high.gif has no caption: write one into {videos / 'high.txt'}"
    gif.write_bytes(b"no video")
    (videos / "high.txt").touch()
    assert refused().startswith(f"argument --data: {gif} cannot be read: ")
    assert "expected a folder with videos (.mp4, " in refused("--data", str(tmp_path))


def test_a_loss_that_is_not_finite(ltx: ModuleType, device: str, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(ExampleError, match=r"^argument --learning-rate: 1e\+30 is too high: the loss is "):
        Run(capsys, device, tmp_path, "--learning-rate", "1e30", "--warmup-steps", "0", "--steps", "20")
