"""examples/train_demo.py and its clips: what a clip shows is recognised, losses fall, and what is stored runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("rich")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import command_line  # noqa: E402
import demo  # noqa: E402
import ltx_pipeline  # noqa: E402
import numpy as np  # noqa: E402
import scenes  # noqa: E402
import train_demo  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

STORED = command_line.TRAINED / "recipe.json"


def clips(prompts: list[int], height: int = 128, width: int = 192) -> np.ndarray:
    generator = torch.Generator().manual_seed(0)
    chosen = scenes.random_scenes(len(prompts), 25, height, width, generator, torch.tensor(prompts))
    drawn = scenes.draw(chosen, height, width)
    return ((drawn + 1) / 2).permute(0, 2, 3, 4, 1).numpy()


@pytest.mark.host
def test_every_prompt_is_recognised_in_its_clip() -> None:
    assert len(scenes.PROMPTS) == 72 and scenes.PROMPTS[0] == "a red ball bounces"
    assert "an orange ball bounces" in scenes.PROMPTS and not [p for p in scenes.PROMPTS if p.startswith("a orange")]
    assert [scenes.recognise(clip) for clip in clips(list(range(72)), 64, 96)] == scenes.PROMPTS


@pytest.mark.host
def test_what_shows_no_shape_is_not_recognised() -> None:
    (clip,) = clips([5])
    grey = clip.mean(-1, keepdims=True).repeat(3, -1)
    noise = np.random.default_rng(0).random(clip.shape)
    half = np.concatenate((clip[:12], grey[12:]))  # the shape vanishes
    assert scenes.recognise(clip) == "a red square moves left"
    assert [scenes.recognise(frames) for frames in (grey, half)] == [None, None]
    assert scenes.recognise(noise) != "a red square moves left"
    assert scenes.recognise(clip[::-1]) == "a red square moves right"
    assert scenes.recognise(clip[..., ::-1]) == "a blue square moves left"


@pytest.mark.host
def test_a_window_is_a_part_of_the_picture() -> None:
    drawn = scenes.random_scenes(2, 9, 64, 96, torch.Generator().manual_seed(1), torch.tensor([4, 70]))
    whole, window = scenes.draw(drawn, 64, 96), scenes.draw(drawn, 64, 96, 48)
    for clip, part in zip(whole, window):
        assert any(torch.equal(clip[..., left : left + 48], part) for left in range(49))


@pytest.mark.host
def test_words_are_tokens() -> None:
    tokenizer = ltx_pipeline.word_tokenizer(scenes.WORDS)
    ids = tokenizer(["a red ball bounces", "a kite?"]).input_ids
    assert tokenizer.convert_ids_to_tokens(ids[0]) == ["a", "red", "ball", "bounces", "</s>"]
    assert tokenizer.convert_ids_to_tokens(ids[1]) == ["a", "<unk>", "<unk>", "</s>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a short training of small clips on the CPU leaves."""
    path = tmp_path_factory.mktemp("trained")
    size = "--frames 9 --height 64 --width 64 --clips 32 --vae-batch 2 --batch 8 --sample-steps 2 --sample-prompts 2"
    steps = "--vae-steps 40 --steps 40 --seconds 600 --device cpu"
    assert train_demo.main([*size.split(), *steps.split(), "--output", str(path)]) == 0
    return path


@pytest.mark.host
def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for device, expected in (("bogus", "expected cuda, cuda:<number> or cpu, got bogus"), ("cuda", "cuda, but torch ")):
        with pytest.raises(SystemExit):
            train_demo.main(["--device", device])
        assert f"error: argument --device: {expected}" in capsys.readouterr().err


@pytest.mark.host
def test_the_stored_model_is_not_replaced_by_default() -> None:
    assert train_demo.make_parser().parse_args([]).output == command_line.ROOT / "demo" / "trained"


@pytest.mark.extended
def test_losses_fall(folder: Path) -> None:
    recipe = json.loads((folder / "recipe.json").read_text())
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    for part, steps, fallen in (("autoencoder", 40, 0.7), ("transformer", 40, 0.8)):
        record = recipe[part]
        assert record["steps"] == steps and record["last_loss"] < fallen * record["first_loss"]
        losses = [line["loss"] for line in log if line["part"] == part]
        assert (losses[0], losses[-1]) == pytest.approx((record["first_loss"], record["last_loss"]), abs=1e-6)
    assert recipe["bytes"] < 8e6 and recipe["recognised"]["of"] == 2
    assert {"samples.png", "sample.gif", "model_index.json"} <= {path.name for path in folder.iterdir()}


@pytest.mark.extended
def test_latents_are_normalised(folder: Path) -> None:
    """With the mean and deviation that the stored autoencoder has, which LTXPipeline undoes."""
    pipe = ltx_pipeline.load_pipeline(str(folder), torch.device("cpu"), torch.float32)
    args = train_demo.make_parser().parse_args(["--frames=9", "--height=64", "--width=64", "--clips=32"])
    mean, std = pipe.vae.latents_mean.clone(), pipe.vae.latents_std.clone()
    latents, prompts = train_demo.encode_clips(pipe.vae, args, torch.Generator().manual_seed(0))
    assert latents.shape == (32, 3 * 4 * 4, 32) and prompts.shape == (32,)
    assert latents.mean((0, 1)).abs().max() < 1e-4 and (latents.std((0, 1)) - 1).abs().max() < 1e-3
    # Other clips than those of the training, and weights that were rounded.
    assert (pipe.vae.latents_std / std - 1).abs().mean() < 0.3 and (pipe.vae.latents_mean - mean).abs().mean() < 0.5


@pytest.mark.extended
def test_the_demo_shows_what_was_trained(folder: Path, device: str, tmp_path: Path, capsys: Any) -> None:
    """Its prompt and the size of its clips come from the recipe; bf16 and fp8 stand beside stock."""
    assert demo.main(["--model", str(folder), "--device", device, "--output", str(tmp_path)]) == 0
    result, output = json.loads((tmp_path / "result.json").read_text()), capsys.readouterr().out
    run = result["run"]
    assert (run["frames"], run["height"], run["width"], run["steps"]) == (9, 64, 64, 2)
    assert min(seconds["text"] for seconds in result["seconds"].values()) > 0
    assert {"stock", "ltx_kernels"} <= result["shows"].keys() and "what the clip shows" in output
    if "fp8" in result["seconds"]:
        bf16, fp8 = (result["errors"][f"{key}_to_float32"]["forward"]["relative_l2"] for key in ("ltx_kernels", "fp8"))
        assert bf16 < fp8 < 0.2 and "linear layers in fp8" in output


def test_a_clip_that_shows_something_else_is_a_fault() -> None:
    errors = {"forward": {"relative_l2": 1e-3}}
    result = {
        "compiled_calls": {"rmsnorm": 1},
        "without_compiled_call": [],
        "fallbacks": {},
        "restored_to_same_bits": True,
        "errors": {"stock_to_float32": errors, "ltx_kernels_to_float32": errors},
        "shows": {"stock": "a red ball bounces", "ltx_kernels": "a red ball bounces", "fp8": None},
    }
    assert demo.faults(result) == ["the clip of fp8 shows nothing it knows, and stock's a red ball bounces"]
    result["shows"]["fp8"] = "a red ball bounces"
    assert demo.faults(result) == []


# ---- The stored model


@pytest.mark.extended
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_the_stored_model(ltx: Any, device: str, dtype: torch.dtype) -> None:
    """It shows what its prompts say, by stock modules, the package's ops, and fp8. Its own bfloat16 takes minutes on a
    CPU."""
    recipe = json.loads(STORED.read_text())
    assert recipe["bytes"] < 8e6 and recipe["recognised"]["right"] >= 0.8 * recipe["recognised"]["of"] >= 50
    pipe = ltx_pipeline.load_pipeline(str(STORED.parent), torch.device(device), dtype)
    args = train_demo.make_parser().parse_args(["--sample-steps", str(recipe["clips"]["steps"])])
    prompts = ["a red ball bounces", "a blue square moves left", "a green triangle rises"]
    stock = train_demo.sample(pipe, prompts, args)
    assert [scenes.recognise(clip) for clip in stock] == prompts
    for options in ({}, {"precision": "fp8"}):
        with ltx.optimize(pipe, **options):
            ours = train_demo.sample(pipe, prompts, args)
        assert [scenes.recognise(clip) for clip in ours] == prompts
        psnr = -10 * np.log10(np.square(ours - stock).mean((1, 2, 3, 4)))
        assert psnr.min() > 20, psnr
