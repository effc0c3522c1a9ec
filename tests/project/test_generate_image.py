"""examples/generate_image.py: what it writes and prints, with the kernels and without."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("diffusers")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import generate_image  # noqa: E402
import image_pipeline  # noqa: E402

TINY = ["--model", "tiny", "--height", "64", "--width", "48", "--steps", "2", "--dtype", "float32", "--images", "2"]
LAYERS = ("FluxTransformerBlock", "FluxSingleTransformerBlock", "T5Block")


@pytest.fixture(autouse=True)
def kernels(ltx: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_image, "load_kernels", lambda device: ltx)


def run(device: str, folder: Path, *options: str) -> dict[str, Any]:
    files = ["--output", str(folder / "image.png"), "--json", str(folder / "result.json")]
    assert generate_image.main([*TINY, "--device", device, *files, *options]) == 0
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def test_optimized_and_baseline(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same image to a level or two; every part is timed."""
    images = []
    for options, name in (((), "image_optimized.png"), (("--no-optimized-kernels",), "image_baseline.png")):
        result = run(device, tmp_path, *options)
        (path,) = result["files"]
        assert Path(path) == tmp_path / name and f"wrote {path}" in capsys.readouterr().out.replace("\n", "")
        images.append(np.asarray(Image.open(path)).astype(int))
        seconds = result["seconds"]
        assert min(seconds.values()) > 0
        parts = sum(seconds[part] for part in ("text", "denoise", "vae", "conversion"))
        assert parts == pytest.approx(seconds["total"], rel=0.5)  # medians of each by itself
        if options:
            assert result["report"] is None
        else:
            calls = {row["class"].rpartition(".")[2]: row["calls"] for row in result["report"]["replaced"]}
            assert [calls[layer] for layer in LAYERS] == [2 * 2 * 3, 2 * 2 * 3, 2 * 3]  # layers, steps, images
    assert images[0].shape == (64, 48, 3) and np.abs(images[0] - images[1]).max() <= 2 and images[0].std() > 1


def test_a_folder_is_loaded(device: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    pipe = image_pipeline.random_flux(False, True, torch.device("cpu"))
    pipe.save_pretrained(tmp_path / "model")
    result = run(device, tmp_path, "--model", str(tmp_path / "model"), "--components", "transformer")
    assert {row["class"].split(".")[0] for row in result["report"]["replaced"]} <= {"diffusers", "torch"}


@pytest.mark.host
def test_a_part_is_as_before_after_it_was_timed() -> None:
    pipe = image_pipeline.random_flux(False, True, torch.device("cpu"))
    pipe.vae.decode = decode = lambda *args: None
    with image_pipeline.timed_parts(pipe, torch.device("cpu")):
        assert pipe.vae.decode is not decode and "encode_prompt" in vars(pipe)
    assert pipe.vae.decode is decode and "encode_prompt" not in vars(pipe)


@pytest.mark.host
@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("--height 20", "--height: expected a multiple of 16, got 20"),
        ("--images 0", "--images: expected at least 1, got 0"),
        ("--device cpu --graphs auto", "--graphs: it needs a GPU and the optimized kernels"),
        ("--device cpu --graphs soon", '--graphs: expected nothing or "auto", got soon'),
        ("--device cpu --offload model", "--offload: model needs a GPU, and --device is cpu"),
        ("--no-optimized-kernels --precision fp8", "--precision: fp8 needs the optimized kernels"),
        (
            "--output x.xyz",
            "--output: expected a name that ends in .png, .jpg, .jpeg, .webp, .bmp, .gif, .tif, .tiff, ",
        ),
        ("--device tpu", "--device: expected cuda, cuda:<number> or cpu, got tpu"),
    ],
)
def test_wrong_arguments(wrong: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        generate_image.parse_arguments(wrong.split())
    assert raised.value.code == 2 and f"error: argument {expected}" in capsys.readouterr().err


@pytest.mark.host
def test_every_format_can_be_written(tmp_path: Path) -> None:
    for suffix in (*generate_image.FORMATS, ".PNG"):
        path = tmp_path / f"image{suffix}"
        assert generate_image.parse_arguments(["--output", str(path)]).output == path
        Image.new("RGB", (16, 16)).save(path)


@pytest.mark.host
def test_calls_that_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for options, expected in (
        ("", 1),
        ("--graphs", 2),
        ("--graphs auto", 6),
        ("--graphs auto --warmup-iterations 3", 3),
    ):
        assert generate_image.parse_arguments(["--device", "cuda", *options.split()]).warmup_iterations == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--model", "no/such/folder"], "a Hub id needs the network"),
        (["--components", "unet"], "components: expected names among"),
        (
            ["--model", str(EXAMPLES / "demo_model")],
            "expected a pipeline that makes images from prompts, such as FluxPipeline, got LTXPipeline",
        ),
    ],
)
@pytest.mark.usefixtures("offline")
def test_one_clear_error(device: str, options: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate_image.main([*TINY, "--device", device, *options]) == 1
    assert expected.lower() in " ".join(capsys.readouterr().out.split()).lower()
