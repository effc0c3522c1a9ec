"""examples/demo.py: what it writes and prints, and that it would notice ops that compute something else."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("rich")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import demo  # noqa: E402
import ltx_pipeline  # noqa: E402
import numpy as np  # noqa: E402
from helpers.video import decoded  # noqa: E402
from PIL import Image  # noqa: E402
from rich.progress import Progress  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

FRAMES, HEIGHT, WIDTH, STEPS, LAYERS = 9, 64, 96, 2, 3
TINY = f"--model tiny --frames {FRAMES} --height {HEIGHT} --width {WIDTH} --steps {STEPS}".split()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, device: str) -> tuple[Path, dict[str, Any], str]:
    """The folder that one tiny run filled, its result.json, and what it printed."""
    return run_demo(tmp_path_factory.mktemp("demo"), device)


def run_demo(folder: Path, device: str, *options: str) -> tuple[Path, dict[str, Any], str]:
    process = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py"), *TINY, "--device", device, "--output", str(folder), *options],
        env={**os.environ, "MODEL": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "torchao" not in process.stdout + process.stderr  # its start-up notes
    return folder, json.loads((folder / "result.json").read_text()), process.stdout


def videos(result: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """With stock modules, and with the ops."""
    stock, ours = (decoded(Path(result["files"][key])).astype(int) for key in ("stock", "ltx_kernels"))
    assert stock.shape == ours.shape == (FRAMES, HEIGHT, WIDTH, 3)
    return stock, ours


def test_videos_are_alike(tmp_path: Path, device: str) -> None:
    """In float32: the steps of a random model multiply the roundings of bf16."""
    stock, ours = videos(run_demo(tmp_path, device, "--dtype", "float32")[1])
    # Encoders change the frames a little; frames that have nothing to do with each other are much further apart.
    assert np.abs(stock - ours).mean() < 0.25 * np.abs(stock - stock[::-1]).mean()


def test_videos_and_picture_are_real(finished: tuple[Path, dict[str, Any], str]) -> None:
    folder, result, output = finished
    assert output.startswith("org/ltx-kernels: ") and result["kernels"]["variant"] in output
    assert {path.name for path in folder.iterdir()} == {
        "result.json", "comparison.png", *(Path(result["files"][key]).name for key in ("stock", "ltx_kernels"))
    }  # fmt: skip
    stock, _ = videos(result)
    assert all(frame.std() > 5 for frame in stock)
    with Image.open(folder / "comparison.png") as picture:
        picture.load()
        tile = 384, 384 * HEIGHT // WIDTH
        assert picture.width > 4 * tile[0] and picture.height > 3 * tile[1]
        pixels = np.asarray(picture.convert("L"))
        title = pixels[: 3 * 24]
        assert (title < 128).any() and (title[:, -8:] == 255).all()  # all of it fits
        stock_tile, our_tile = (
            pixels[top : top + tile[1], 8 : 8 + tile[0]].astype(int) for top in (104, 128 + tile[1])
        )
        assert stock_tile.std() > 5 and np.abs(stock_tile - our_tile).mean() < 0.25 * stock_tile.std()
    *_, error, random = demo.picture_title(result)
    assert f"{result['errors']['ltx_kernels_to_stock']['frames']['psnr_db']:.1f} dB PSNR" in error
    assert random.startswith("Random weights: ")
    for path in folder.iterdir():
        assert f"wrote {path}" in output


def cells(output: str, label: str) -> list[str]:
    """The one row of the table with this label."""
    (line,) = [line for line in output.splitlines() if line.startswith(f"│ {label} ")]
    return [cell.strip() for cell in line.split("│")[2:] if cell.strip()]


def test_table_names_what_was_replaced(finished: tuple[Path, dict[str, Any], str]) -> None:
    _, result, output = finished
    modules = [  # class, how many, calls in a forward
        ("diffusers.LTXVideoRotaryPosEmbed", 1, 1),
        ("diffusers.LTXVideoTransformerBlock", LAYERS, LAYERS),
        ("diffusers.RMSNorm", 2 * LAYERS, 0),
        ("diffusers.LTXAttention", 2 * LAYERS, 2 * LAYERS),
        ("torch.RMSNorm", 4 * LAYERS, 0),
        ("diffusers.GELU", LAYERS, LAYERS),
        ("torch.LayerNorm", 1, 1),
    ]
    assert result["left_alone"] == {} and result["fallbacks"] == {} and result["without_compiled_call"] == []
    for row, (name, count, calls) in zip(result["replaced"], modules, strict=True):
        library, stock = name.split(".")
        assert row["class"].startswith(f"{library}.") and row["class"].endswith(f".{stock}")
        assert (row["modules"], row["calls"]) == (count, calls)
        assert cells(output, name) == [str(count), str(calls or "fused")]
    beside = {row["class"].split(".")[-1]: (row["modules"], row["calls"]) for row in result["replaced_beside"]}
    # One warm-up and one clip. Prompts are encoded before each, of two texts, by two layers.
    assert beside["T5Block"] == (2, 8) and beside["LTXVideoDecoder3d"] == (1, 2)
    assert cells(output, "diffusers.LTXVideoDecoder3d") == ["1", "2"]
    assert result["compiled_calls"] == {
        "adaln_rmsnorm": LAYERS,
        "qk_norm_rope": LAYERS,
        "gated_residual": 2 * LAYERS,
        "rmsnorm": 2 * LAYERS,
        "gated_residual_adaln_rmsnorm": LAYERS,
        "gelu": LAYERS,
        "layernorm": 1,
    }
    for op, calls in result["compiled_calls"].items():
        assert cells(output, op) == [str(calls)]
    for label in ("denoising step (median)", "one forward, relative L2", "frames, PSNR"):
        assert cells(output, label)


def test_error_is_rounding_noise(finished: tuple[Path, dict[str, Any], str]) -> None:
    errors = finished[1]["errors"]
    for what, key in (("forward", "relative_l2"), ("latents", "relative_l2")):
        stock, ours, between = (
            errors[pair][what][key] for pair in ("stock_to_float32", "ltx_kernels_to_float32", "ltx_kernels_to_stock")
        )
        assert 1e-4 < stock < 5e-2
        assert 0.7 * stock < ours < 1.3 * stock and between < 1.5 * stock
    assert errors["ltx_kernels_to_stock"]["frames"]["psnr_db"] > 30
    assert finished[1]["restored_to_same_bits"]


def test_error_of_clips() -> None:
    """A tenth of the range everywhere is 20 dB."""
    first = ltx_pipeline.Clip(torch.tensor([3.0, 4.0]), np.full((1, 2, 4, 4, 3), 0.5, np.float32), 1.0, [], 1.0, [])
    other = dataclasses.replace(first, latents=torch.tensor([3.0, 4.5]), frames=first.frames + np.float32(0.1))
    found = demo.clip_error(other, first)
    assert found["frames"] == pytest.approx({"psnr_db": 20.0, "max_abs": 0.1}, rel=1e-5)
    assert found["latents"] == pytest.approx({"relative_l2": 0.1, "max_abs": 0.5})
    assert demo.clip_error(first, first)["frames"] == {"psnr_db": None, "max_abs": 0.0}


def test_faults_are_reported(finished: tuple[Path, dict[str, Any], str]) -> None:
    result = finished[1]
    assert demo.faults(result) == []
    for key, value, fault in (
        ("restored_to_same_bits", False, "after restore, a forward does not give the stock modules' bits"),
        ("compiled_calls", {}, "no compiled op ran"),
        ("without_compiled_call", ["gelu"], "said to run, but no compiled op did: gelu"),
        ("fallbacks", {"torch.RMSNorm": {"a": 1, "b": 2}}, "stock calls of torch.RMSNorm: a, b"),
    ):
        assert demo.faults({**result, key: value}) == [fault]
    assert demo.faults({**result, "fallbacks": {"transformers.T5Block": {"a": 1}}}) == []


def test_rows_of_the_picture(tmp_path: Path) -> None:
    """Stock, this package, and their difference, amplified as it says."""
    clips = [np.full((3, 32, 48, 3), value) for value in (0.25, 0.375)]
    gain = demo.write_picture(*clips, tmp_path / "picture.png", ["one line"])
    assert gain == 8
    with Image.open(tmp_path / "picture.png") as picture:
        column = np.asarray(picture.convert("L"))[:, 100]
    shown = [value for value, count in zip(*np.unique(column, return_counts=True), strict=True) if count > 200]
    assert [int(value) for value in shown] == [64, 96, 255] and (column == 255).sum() > 256
    assert [int(column[32 + 24 + 128 + row * (256 + 24)]) for row in range(3)] == [64, 96, 255]


def test_times_are_of_every_step(finished: tuple[Path, dict[str, Any], str]) -> None:
    for times in finished[1]["seconds"].values():
        assert len(times["steps"]) == STEPS
        assert 0 < times["step_median"] < sum(times["steps"])
        assert min(times["text"], times["vae"]) > 0
        assert times["text"] + sum(times["steps"]) + times["vae"] < times["total"]


def test_model_from_a_folder(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "saved-0.9"  # what follows the point is no suffix
    ltx_pipeline.load_pipeline("tiny", torch.device("cpu"), torch.float32, seed=3).save_pretrained(folder)
    monkeypatch.setenv("MODEL", str(folder))
    arguments = [*TINY[2:], "--device", device, "--dtype", "float32", "--output", str(tmp_path / "out")]
    assert demo.main(arguments) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["run"]["model"] == str(folder)
    for key in ("stock", "ltx_kernels"):
        assert Path(result["files"][key]).stem == f"saved-0.9_{key}"
        assert decoded(Path(result["files"][key])).shape == (FRAMES, HEIGHT, WIDTH, 3)
    assert result["errors"]["ltx_kernels_to_stock"]["forward"]["relative_l2"] < 1e-5
    assert result["errors"]["stock_to_float32"] is None


def test_eager_rounding(device: str, tmp_path: Path) -> None:
    """It leaves out the GELU in the GEMM's epilogue, and is closer to the stock modules than to float32."""
    assert demo.main([*TINY, "--device", device, "--rounding", "eager", "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert "gelu" not in result["compiled_calls"] and result["compiled_calls"]["qk_norm_rope"] == LAYERS
    between, exact = (
        result["errors"][f"ltx_kernels_to_{key}"]["forward"]["relative_l2"] for key in ("stock", "float32")
    )
    assert between < 0.5 * exact


def test_missing_build_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_KERNELS", f"org/ltx-kernels={tmp_path}")
    assert demo.main([*TINY, "--device", "cpu"]) == 1
    output = capsys.readouterr().out
    assert str(tmp_path) in output and "make build" in output


def test_missing_model_says_what_to_do(tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main([*TINY, "--device", device, "--model", str(tmp_path / "none")]) == 1
    output = capsys.readouterr().out
    assert f"error: {tmp_path / 'none'}" in output and "--model tiny" in output


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("--frames 10", "--num-frames/--frames: expected a multiple of 8, plus 1, got 10"),
        ("--frames -7", "--num-frames/--frames: expected a multiple of 8, plus 1, got -7"),
        ("--frames ten", "--num-frames/--frames: invalid frames value: 'ten'"),
        ("--height 100", "--height: expected a multiple of 32, got 100"),
        ("--width 0", "--width: expected a multiple of 32, got 0"),
        ("--steps 1", "--steps: expected at least 2, got 1"),
        ("--device tpu", "--device: expected cuda, cuda:<number> or cpu, got tpu"),
        ("--device cuda:99", "--device: cuda:99, but torch "),
        ("--device cuda:x", "--device: expected cuda, cuda:<number> or cpu, got cuda:x"),
        ("--guidance-scale nan", "--guidance-scale: expected a finite number, got nan"),
        ("--seed -1", "--seed: expected 0 to 2^63 - 1, got -1"),
        ("--output=", "--output: expected a directory, got an empty text"),
        ("--output /dev/null", "--output: /dev/null is not a directory"),
        ("--output /dev/null/demo", "--output: /dev/null is not a directory that can be written to"),
    ],
)
def test_wrong_arguments(wrong: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        ltx_pipeline.parse(demo.make_parser(), wrong.split())
    assert raised.value.code == 2 and f"error: argument {expected}" in capsys.readouterr().err


def test_gif_where_there_is_no_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ltx_pipeline.importlib.util, "find_spec", lambda name: None)
    frames = np.random.default_rng(0).random((5, 32, 48, 3))
    (path,), note = ltx_pipeline.write_video(frames, tmp_path / "clip")
    assert path.suffix == ".gif" and "imageio-ffmpeg" in note
    assert decoded(path).shape == frames.shape
    assert ltx_pipeline.write_video(frames, tmp_path / "clip", gif=True) == ([path], "")


class Recorded:
    """The tiny model in float32, and what the pipeline hands its transformer."""

    def __init__(self, device: str):
        args = ltx_pipeline.parse(demo.make_parser(), [*TINY, "--device", device])
        self.pipe = ltx_pipeline.load_pipeline("tiny", torch.device(device), torch.float32)
        with Progress(disable=True) as progress:
            self.call = demo.first_call(self.pipe.transformer, ltx_pipeline.Generator(self.pipe, args, progress))
        self.stock = self.forward()

    def forward(self) -> Tensor:
        return demo.forward(self.pipe.transformer, self.call)


@pytest.fixture(scope="module")
def recorded(device: str) -> Recorded:
    return Recorded(device)


@pytest.mark.parametrize("rounding", ["fp32", "eager"])
def test_same_forward_in_float32(recorded: Recorded, ltx: ModuleType, rounding: str) -> None:
    with ltx.optimize(recorded.pipe, rounding=rounding), demo.OpCounter(ltx) as counter:
        assert demo.error(recorded.forward(), recorded.stock)["relative_l2"] < 1e-5
    assert counter.calls["qk_norm_rope"] == LAYERS
    with demo.OpCounter(ltx) as counter:
        assert torch.equal(recorded.forward(), recorded.stock)
    assert not counter.calls


FAULTS: dict[str, tuple[str, Callable[..., Callable[..., Any]]]] = {
    # name: the function of the package in which it is, and what is there instead
    "half layout": ("qk_norm_rope", lambda op: lambda *a, **k: op(*a, **{**k, "layout": "half"})),
    "no rotation": (
        "qk_norm_rope",
        lambda op: (
            lambda q, k, wq, wk, cos, sin, *a, **o: op(
                q, k, wq, wk, torch.ones_like(cos), torch.zeros_like(sin), *a, **o
            )
        ),
    ),
    "no weights": ("qk_norm_rope", lambda op: lambda q, k, wq, wk, *a, **o: op(q, k, None, None, *a, **o)),
    "eps": ("rmsnorm", lambda op: lambda x, w, eps, **o: op(x, w, 0.5, **o)),
    "no mean": (
        "layernorm",
        lambda op: lambda x, w, b, eps, **o: x.float() * x.float().square().mean(-1, True).rsqrt(),
    ),
    # Of fused_norm(input, statistic, weight, bias, eps, weight_offset, scale, shift, residual, ...).
    "scale for shift": ("fused_norm", lambda op: lambda *a, **k: op(*a[:6], *a[7:5:-1], *a[8:], **k)),
    "no table": (
        "fused_norm",
        lambda op: lambda *a, **k: op(*a, **{**k, "gate": (k["gate"][0], None)}) if k.get("gate") else op(*a, **k),
    ),
    "residual of before": (
        "fused_norm",
        lambda op: lambda *a, **k: op(*a, **k) if len(a) < 9 or a[8] is None else (op(*a, **k)[0], a[8]),
    ),
    "relu": ("linear_gelu", lambda op: lambda x, w, b: torch.nn.functional.linear(x, w, b).relu()),
}


def plant(ltx: ModuleType, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    name, make = FAULTS[fault]
    parts = ltx.integrations
    for module in (
        parts.attention.engine,
        parts.attention.choice,
        parts.blocks.stream,
        parts.linear.linears,
        parts.diffusers.norms,
    ):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, make(getattr(module, name)))


@pytest.mark.parametrize("fault", FAULTS)
def test_comparison_sees_faults(
    recorded: Recorded, ltx: ModuleType, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    plant(ltx, monkeypatch, fault)
    with ltx.optimize(recorded.pipe):
        assert demo.error(recorded.forward(), recorded.stock)["relative_l2"] > 1e-3


def run_with_fault(ltx: ModuleType, device: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> str:
    """What a run of the demo that must fail says about it."""
    monkeypatch.setattr(demo, "load_kernels", lambda device: ltx)
    assert demo.main([*TINY, "--device", device, "--output", str(folder)]) == 1
    return "\n".join(line for line in capsys.readouterr().out.splitlines() if line.startswith("fault: "))


def test_demo_fails_on_a_wrong_result(
    ltx: ModuleType, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(ltx, monkeypatch, "half layout")
    assert "the error of one forward" in run_with_fault(ltx, device, tmp_path, monkeypatch, capsys)


def test_demo_fails_where_no_compiled_op_runs(
    ltx: ModuleType, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An op that is there, right, and not compiled, for one class of modules alone."""
    monkeypatch.setattr(ltx.integrations.diffusers.norms, "layernorm", ltx.reference.layernorm)
    found = run_with_fault(ltx, device, tmp_path, monkeypatch, capsys)
    assert found == "fault: said to run, but no compiled op did: layernorm"


def test_demo_fails_where_stock_modules_run(
    ltx: ModuleType, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = ltx.integrations
    for module in (parts.blocks.block, parts.attention.engine, parts.engine.guards, parts.diffusers.norms):
        monkeypatch.setattr(module, "why_not_input", lambda *tensor, **options: "it is Saturday")
    found = run_with_fault(ltx, device, tmp_path, monkeypatch, capsys)
    assert "fault: no compiled op ran" in found
    assert "fault: stock calls of diffusers.LTXVideoTransformerBlock: it is Saturday" in found
