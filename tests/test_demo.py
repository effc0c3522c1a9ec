"""examples/demo.py: what it writes and prints, and that it would notice ops that compute something else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("rich")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import demo  # noqa: E402
import ltx_video  # noqa: E402
import numpy as np  # noqa: E402
from diffusers import LTXVideoTransformer3DModel  # noqa: E402
from ltx_video import OpCounter, replace_norms_and_rope  # noqa: E402
from PIL import Image  # noqa: E402

FRAMES, HEIGHT, WIDTH, STEPS, LAYERS = 9, 64, 96, 2, 3
TINY = f"--size small --frames {FRAMES} --height {HEIGHT} --width {WIDTH} --steps {STEPS}".split()


def decoded(path: Path) -> np.ndarray:
    """[frames, height, width, 3] of a video, in 0..255."""
    if path.suffix == ".mp4":
        imageio = pytest.importorskip("imageio.v2")
        return np.stack(imageio.mimread(path, memtest=False))
    with Image.open(path) as image:
        frames = []
        for index in range(image.n_frames):
            image.seek(index)
            frames.append(np.asarray(image.convert("RGB")))
        return np.stack(frames)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, device: str) -> tuple[Path, dict[str, Any], str]:
    """The folder that one tiny run filled, its result.json, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    process = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py"), *TINY, "--device", device, "--output", str(folder)],
        env={**os.environ, "MODEL": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return folder, json.loads((folder / "result.json").read_text()), process.stdout


def test_videos_and_picture_are_real(finished: tuple[Path, dict[str, Any], str]) -> None:
    folder, result, output = finished
    assert {path.name for path in folder.iterdir()} == {
        "result.json", "comparison.png", *(Path(result["files"][key]).name for key in ("stock", "ltx_kernels"))
    }  # fmt: skip
    stock, ours = (decoded(Path(result["files"][key])).astype(int) for key in ("stock", "ltx_kernels"))
    assert stock.shape == ours.shape == (FRAMES, HEIGHT, WIDTH, 3)
    assert all(frame.std() > 5 for frame in stock)
    # Encoders change the frames a little; frames that have nothing to do with each other are much further apart.
    assert np.abs(stock - ours).mean() < 0.25 * np.abs(stock - stock[::-1]).mean()
    with Image.open(folder / "comparison.png") as picture:
        picture.load()
        assert picture.width >= 4 * WIDTH and picture.height >= 3 * HEIGHT
    for path in folder.iterdir():
        assert f"wrote {path}" in output


def test_table_names_what_was_replaced(finished: tuple[Path, dict[str, Any], str]) -> None:
    _, result, output = finished
    expected = [
        (["norm1", "norm2"], "RMSNorm", "rmsnorm", 2 * LAYERS),
        (["attn1.norm_q", "attn1.norm_k", "rotary"], "LTXVideoAttnProcessor", "qk_norm_rope", LAYERS),
        (["attn2.norm_q", "attn2.norm_k"], "RMSNorm", "rmsnorm", 2 * LAYERS),
        (["norm_out"], "LayerNorm", "layernorm", 1),
    ]
    assert result["left_alone"] == {} and result["without_compiled_call"] == []
    for row, (parts, stock, op, count) in zip(result["replaced"], expected, strict=True):
        assert (row["parts"], row["op"]) == (parts, op) and row["class"].endswith(f".{stock}")
        assert row["modules"] == row["calls_per_forward"] == count
        (line,) = [line for line in output.splitlines() if line.startswith(f"│ {', '.join(parts)} ")]
        assert f" {count} {stock} " in line and f" {count} {op} " in line
    for label in ("denoising step (median)", "one forward, relative L2", "frames, PSNR"):
        assert sum(label in line for line in output.splitlines()) == 1


def test_error_is_rounding_noise(finished: tuple[Path, dict[str, Any], str]) -> None:
    errors = finished[1]["errors"]
    for what, key in (("forward", "relative_l2"), ("latents", "relative_l2")):
        stock, ours, between = (
            errors[pair][what][key] for pair in ("stock_to_float32", "ltx_kernels_to_float32", "ltx_kernels_to_stock")
        )
        assert 1e-4 < stock < 5e-2
        assert ours < 1.3 * stock and between < 1.5 * stock
    assert errors["ltx_kernels_to_stock"]["frames"]["psnr_db"] > 30
    assert finished[1]["restored_to_same_bits"]


def test_times_are_of_every_step(finished: tuple[Path, dict[str, Any], str]) -> None:
    for times in finished[1]["seconds"].values():
        assert len(times["steps"]) == STEPS - 1
        assert 0 < times["step_median"] < times["total"]


def test_model_from_a_folder(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    demo.load_pipeline("random", "small", torch.device("cpu"), torch.float32, seed=3).save_pretrained(
        tmp_path / "saved"
    )
    monkeypatch.setenv("MODEL", str(tmp_path / "saved"))
    assert demo.main([*TINY, "--device", device, "--dtype", "float32", "--output", str(tmp_path / "out")]) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["run"]["model"] == str(tmp_path / "saved")
    assert Path(result["files"]["stock"]).stem == "saved_stock"
    assert result["errors"]["ltx_kernels_to_stock"]["forward"]["relative_l2"] < 1e-5
    assert result["errors"]["stock_to_float32"] is None


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
    assert f"error: {tmp_path / 'none'}" in output and "without --model" in output


@pytest.mark.parametrize("wrong", ["--frames 10", "--height 100", "--width 0", "--steps 1"])
def test_wrong_arguments(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        demo.parse_arguments(wrong.split())
    assert raised.value.code == 2 and wrong in capsys.readouterr().err


def test_gif_where_there_is_no_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    frames = np.random.default_rng(0).random((5, 32, 48, 3))
    path, note = demo.write_video(frames, tmp_path / "clip")
    assert path.suffix == ".gif" and "imageio-ffmpeg" in note
    assert decoded(path).shape == frames.shape


class Stand:
    """A small transformer with real arguments for it; the same forward again and again."""

    def __init__(self, device: str, **config: Any):
        torch.manual_seed(0)
        self.transformer = LTXVideoTransformer3DModel(
            num_layers=2, num_attention_heads=3, attention_head_dim=16, cross_attention_dim=48, caption_channels=24,
            **config,
        ).to(device).eval()  # fmt: skip
        for name, parameter in self.transformer.named_parameters():
            if "norm" in name:
                nn.init.normal_(parameter, 1.0, 0.3)
        frames, height, width, batch = 2, 3, 5, 2
        self.arguments = {
            "hidden_states": torch.randn(batch, frames * height * width, 128, device=device),
            "encoder_hidden_states": torch.randn(batch, 7, 24, device=device),
            "timestep": torch.tensor([600.0, 600.0], device=device),
            "encoder_attention_mask": torch.ones(batch, 7, device=device),
            "num_frames": frames,
            "height": height,
            "width": width,
            "rope_interpolation_scale": (8 / 25, 32, 32),
            "return_dict": False,
        }

    def __call__(self) -> Tensor:
        with torch.no_grad():
            return self.transformer(**self.arguments)[0]


@pytest.fixture
def stand(device: str) -> Stand:
    return Stand(device)


@pytest.mark.parametrize("rounding", ["fp32", "eager"])
def test_same_forward_in_float32(stand: Stand, ltx: ModuleType, rounding: str) -> None:
    expected = stand()
    report = replace_norms_and_rope(stand.transformer, ltx, rounding)
    with OpCounter(ltx, report) as counter:
        got = stand()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert report.left_alone == {}
    assert Counter(r.op for r in report.replaced) == {"rmsnorm": 8, "qk_norm_rope": 2, "layernorm": 1}
    assert counter.calls == {r.name: 1 for r in report.replaced}


def test_classes_and_parameters_stay(stand: Stand, ltx: ModuleType) -> None:
    def state() -> list[tuple[str, type, list[str]]]:
        return [(n, type(m), list(m.state_dict())) for n, m in stand.transformer.named_modules()]

    before = state()
    report = replace_norms_and_rope(stand.transformer, ltx)
    assert state() == before
    report.restore()
    assert state() == before


def test_restore_puts_everything_back(stand: Stand, ltx: ModuleType) -> None:
    expected = stand()
    attributes = {name: set(vars(module)) for name, module in stand.transformer.named_modules()}
    processors = dict(stand.transformer.attn_processors)
    report = replace_norms_and_rope(stand.transformer, ltx)
    assert any(p is not processors[name] for name, p in stand.transformer.attn_processors.items())
    report.restore()
    report.restore()
    assert {name: set(vars(module)) for name, module in stand.transformer.named_modules()} == attributes
    assert all(p is processors[name] for name, p in stand.transformer.attn_processors.items())
    with OpCounter(ltx, report) as counter:
        assert torch.equal(stand(), expected)
    assert not counter.calls


def test_attention_backend_is_kept(stand: Stand, ltx: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    stand.transformer.set_attention_backend("_native_math")
    seen = []
    dispatch = ltx_video.dispatch_attention_fn
    monkeypatch.setattr(
        ltx_video, "dispatch_attention_fn", lambda *a, **k: (seen.append(k["backend"]), dispatch(*a, **k))[1]
    )
    replace_norms_and_rope(stand.transformer, ltx)
    stand()
    assert [backend.value for backend in seen] == ["_native_math"] * 2


def test_two_transformers_are_independent(stand: Stand, device: str, ltx: ModuleType) -> None:
    other = Stand(device)
    report = replace_norms_and_rope(stand.transformer, ltx)
    with OpCounter(ltx, report) as counter:
        other()
    assert not counter.calls


def test_left_alone_and_said_so(device: str, ltx: ModuleType) -> None:
    stand = Stand(device, norm_elementwise_affine=True)
    blocks = stand.transformer.transformer_blocks

    class Processor(type(blocks[0].attn1.processor)):
        pass

    class Norm(nn.RMSNorm):
        pass

    blocks[0].attn1.set_processor(Processor())
    blocks[1].attn1.norm_k.eps = 1e-3
    blocks[0].attn2.norm_q.forward = blocks[0].attn2.norm_q.forward
    blocks[1].attn2.norm_q.__class__ = Norm
    expected = stand()
    report = replace_norms_and_rope(stand.transformer, ltx)
    assert sorted(report.left_alone) == [
        "transformer_blocks.0.attn1",
        "transformer_blocks.0.attn2.norm_q",
        "transformer_blocks.0.norm1",
        "transformer_blocks.0.norm2",
        "transformer_blocks.1.attn1",
        "transformer_blocks.1.norm1",
        "transformer_blocks.1.norm2",
    ]
    assert "Processor" in report.left_alone["transformer_blocks.0.attn1"]
    assert "eps" in report.left_alone["transformer_blocks.1.attn1"]
    assert "weight" in report.left_alone["transformer_blocks.0.norm1"]
    assert "patched" in report.left_alone["transformer_blocks.0.attn2.norm_q"]
    names = ["transformer_blocks.0.attn2.norm_k", "transformer_blocks.1.attn2.norm_k", "norm_out"]
    assert [r.name for r in report.replaced] == names
    torch.testing.assert_close(stand(), expected, rtol=1e-4, atol=1e-5)


def test_other_models_are_refused(stand: Stand, ltx: ModuleType) -> None:
    class Other(LTXVideoTransformer3DModel):
        pass

    stand.transformer.__class__ = Other
    with pytest.raises(TypeError, match=r"expected diffusers\..*LTXVideoTransformer3DModel, got .*Other"):
        replace_norms_and_rope(stand.transformer, ltx)


def faulty(ltx: ModuleType, fault: str) -> SimpleNamespace:
    """The package with one fault in it."""
    package = SimpleNamespace(**vars(ltx))
    if fault == "half layout":
        package.qk_norm_rope = lambda *a, **k: ltx.qk_norm_rope(*a, **{**k, "layout": "half"})
    elif fault == "no rotation":
        package.qk_norm_rope = lambda q, k, wq, wk, cos, sin, *a, **o: ltx.qk_norm_rope(
            q, k, wq, wk, torch.ones_like(cos), torch.zeros_like(sin), *a, **o
        )
    elif fault == "no weights":
        package.qk_norm_rope = lambda q, k, wq, wk, *a, **o: ltx.qk_norm_rope(q, k, None, None, *a, **o)
    elif fault == "eps":
        package.rmsnorm = lambda x, w, eps, **o: ltx.rmsnorm(x, w, 0.5, **o)
    elif fault == "no mean":
        package.layernorm = lambda x, w, b, eps, **o: ltx.rmsnorm(x, w, eps, **o)
    else:
        assert fault == "not compiled"
        for op in ("rmsnorm", "layernorm", "qk_norm_rope"):
            setattr(package, op, getattr(ltx.reference, op))
    return package


@pytest.mark.parametrize("fault", ["half layout", "no rotation", "no weights", "eps", "no mean"])
def test_comparison_sees_faults(stand: Stand, ltx: ModuleType, fault: str) -> None:
    expected = stand()
    replace_norms_and_rope(stand.transformer, faulty(ltx, fault))
    assert demo.error(stand(), expected)["relative_l2"] > 1e-3


@pytest.mark.parametrize(
    ("fault", "message"),
    [("half layout", "the error of one forward"), ("not compiled", "without a call of a compiled op")],
)
def test_demo_fails_on_faults(
    ltx: ModuleType,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: str,
    message: str,
) -> None:
    monkeypatch.setattr(demo, "load_kernels", lambda device: faulty(ltx, fault))
    monkeypatch.setenv("MODEL", "")
    assert demo.main([*TINY, "--device", device, "--output", str(tmp_path)]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fault: ")]
    assert message in line


README = (EXAMPLES.parent / "README.md").read_text()


def test_readme_example_runs(ltx: ModuleType) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    expected = ltx.reference.adaln_rmsnorm(names["x"], None, names["scale"], names["shift"])
    torch.testing.assert_close(names["y"], expected)


def test_readme_has_every_function(ltx: ModuleType) -> None:
    table = README.split("## Operations")[1].split("## ")[0]
    assert {name for name in re.findall(r"`(\w+)\(\w+, |`(\w+)\((?:input|weight)", table) for name in name if name} >= {
        name for name in ltx.__all__ if callable(getattr(ltx, name))
    }
