"""examples/generate_video.py, inject_ltx.py, inject_llm.py: what they write and print, and that their numbers hold."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("rich")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import command_line  # noqa: E402
import generate_video  # noqa: E402
import image_pipeline  # noqa: E402
import inject_llm  # noqa: E402
import inject_ltx  # noqa: E402
import llm_models  # noqa: E402
import ltx_pipeline  # noqa: E402
import numpy as np  # noqa: E402
from diffusers import LTXPipeline  # noqa: E402
from helpers.build import installed_by_pip  # noqa: E402
from helpers.video import decoded  # noqa: E402
from rich.console import Console  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRMSNorm  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

# Without the encoder every video is a GIF.
VIDEO = "mp4" if importlib.util.find_spec("imageio") and importlib.util.find_spec("imageio_ffmpeg") else "gif"
FRAMES, HEIGHT, WIDTH, STEPS, LAYERS = 9, 64, 96, 3, 3
TINY = f"--model tiny --num-frames {FRAMES} --height {HEIGHT} --width {WIDTH} --steps {STEPS}".split()
CALLS = {  # in one forward
    "diffusers.LTXVideoRotaryPosEmbed": 1,
    "diffusers.LTXVideoTransformerBlock": LAYERS,
    "diffusers.RMSNorm": 0,
    "diffusers.LTXAttention": 2 * LAYERS,
    "torch.RMSNorm": 0,
    "diffusers.GELU": LAYERS,
    "torch.LayerNorm": 1,
}
CLIP_CALLS = {  # in a run of one warm-up and one clip: prompts are encoded three times, of two texts each
    "transformers.T5Block": 12,
    "transformers.T5LayerNorm": 6,
    "diffusers.LTXVideoEncoder3d": 0,
    "diffusers.LTXVideoDecoder3d": 2,
}
COMPILED_CALLS = {**CALLS, "torch.LayerNorm": 0}  # torch.compile fuses it with what follows


class Run:
    """One run of generate_video.py's main: its files, its JSON, what it printed, how long it took."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path, device: str, *options: str):
        files = ["--output", str(folder / "clip.mp4"), "--json", str(folder / "result.json")]
        capsys.readouterr()
        start = time.perf_counter()
        self.status = generate_video.main([*TINY, "--device", device, *files, *options])
        self.wall = time.perf_counter() - start
        self.output = capsys.readouterr().out
        self.result = json.loads((folder / "result.json").read_text())
        self.names = sorted(Path(path).name for path in self.result["files"])

    def calls(self, key: str = "calls") -> dict[str, int]:
        """By class, in the report."""
        rows = self.result["report"]["replaced"]
        return {f"{row['class'].split('.')[0]}.{row['class'].split('.')[-1]}": row[key] for row in rows}


def clip(device: str, *options: str, offload: str = "none") -> np.ndarray:
    """The clips themselves, in float32 unless told otherwise."""
    args = generate_video.parse_arguments([*TINY, "--device", device, "--dtype", "float32", *options])
    args.offload = offload
    return generate_video.generate(args, Console(quiet=True))[0].frames


def assert_numbers_hold(run: Run, clips: int = 1) -> None:
    seconds = run.result["seconds"]
    assert len(seconds["steps"]) == STEPS and min(seconds["steps"]) > 0
    assert seconds["denoise"] == pytest.approx(sum(seconds["steps"]))
    assert seconds["step_median"] == statistics.median(seconds["steps"])
    assert run.result["iterations_per_second"] == pytest.approx(STEPS / seconds["denoise"])
    assert seconds["per_frame"] == pytest.approx(seconds["total"] / (clips * FRAMES))
    parts = seconds["text"] + seconds["denoise"] + seconds["vae"]
    assert min(seconds["text"], seconds["vae"]) > 0 and parts < seconds["total"] < parts + 1
    assert seconds["total"] + seconds["warm_up"] < run.wall
    assert 2**20 < run.result["peak_memory_bytes"] < 2**40
    for label, text in (
        ("total", f"{seconds['total']:.3f} s"),
        ("per frame", f"{seconds['per_frame'] * 1e3:.1f} ms"),
        ("per step (median)", f"{seconds['step_median'] * 1e3:.1f} ms"),
        ("denoising", f"{seconds['denoise']:.3f} s"),
        ("text encoder", f"{seconds['text'] * 1e3:.1f} ms"),
        ("VAE", f"{seconds['vae'] * 1e3:.1f} ms"),
        ("iterations per second", f"{run.result['iterations_per_second']:.2f}"),
        ("peak memory", f"{run.result['peak_memory_bytes'] / 2**30:.2f} GiB"),
    ):
        (line,) = [line for line in run.output.splitlines() if line.startswith(f"│ {label} ")]
        assert line.split("│")[2].strip() == text


def test_optimized_and_baseline(
    ltx: ModuleType, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optimized = Run(capsys, tmp_path, device, "--use-optimized-kernels", "--gif")
    assert optimized.status == 0 and optimized.names == sorted({"clip_optimized.gif", f"clip_optimized.{VIDEO}"})
    assert f"{FRAMES} frames of {HEIGHT}x{WIDTH}, {STEPS} steps" in optimized.output
    assert "bfloat16" in optimized.output and "optimized kernels" in optimized.output
    assert_numbers_hold(optimized)
    # The report is of the whole run: two steps of warm-up, and those of the clip.
    assert optimized.calls() == {**{name: (2 + STEPS) * calls for name, calls in CALLS.items()}, **CLIP_CALLS}
    assert not any(optimized.calls("fallbacks").values()) and optimized.result["report"]["left_alone"] == {}
    assert optimized.result["report"]["text"] in optimized.output
    assert optimized.result["kernels"]["id"] == ltx._ops.ops.name

    baseline = Run(capsys, tmp_path, device, "--no-optimized-kernels", "--warmup-iterations", "0")
    assert baseline.status == 0 and baseline.names == [f"clip_baseline.{VIDEO}"]
    assert "stock modules" in baseline.output and "ltx-kernels:" not in baseline.output
    assert_numbers_hold(baseline)
    assert baseline.result["report"] is None and "kernels" not in baseline.result

    for run in (optimized, baseline):
        assert all(f"wrote {tmp_path / name}" in run.output for name in (*run.names, "result.json"))
    # In float32: the steps of a random model multiply the roundings of bf16.
    for option in ("--use-optimized-kernels", "--no-optimized-kernels"):
        assert Run(capsys, tmp_path, device, option, "--gif", "--dtype", "float32").status == 0
    ours, stock = (decoded(tmp_path / f"clip_{name}.{VIDEO}").astype(int) for name in ("optimized", "baseline"))
    assert ours.shape == stock.shape == decoded(tmp_path / "clip_optimized.gif").shape == (FRAMES, HEIGHT, WIDTH, 3)
    assert all(frame.std() > 5 for frame in stock)
    assert np.abs(stock - ours).mean() < 0.25 * np.abs(stock - stock[::-1]).mean()


def test_baseline_needs_no_build(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("LOCAL_KERNELS", f"org/ltx-kernels={tmp_path}")
    assert Run(capsys, tmp_path, device, "--no-optimized-kernels").status == 0
    assert generate_video.main([*TINY, "--device", device]) == 1
    assert "make build" in capsys.readouterr().out


def test_the_installed_package_serves_where_nothing_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`import ltx_fused`, and not Lightricks' `ltx_kernels`, which is another package. It has no metadata.json."""
    for name in ("ltx_kernels", "ltx_fused"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(command_line, "NAMED", False)
    monkeypatch.setattr(command_line, "BUILD", tmp_path / "build")
    monkeypatch.setenv("LOCAL_KERNELS", f"org/ltx-kernels={tmp_path / 'build'}")
    (tmp_path / "ltx_kernels.py").touch()
    with pytest.raises(command_line.ExampleError, match=r"pip has not installed .*`pip install \.` installs"):
        command_line.load_kernels("cpu")
    installed_by_pip(tmp_path)
    ltx = command_line.load_kernels("cpu")
    assert ltx.__file__ == str(tmp_path / "ltx_fused" / "__init__.py")
    assert ltx_pipeline.origin(torch.device("cpu"), ltx)["kernels"] == {"variant": "ltx_fused", "id": "_pip_ops"}
    del sys.modules["ltx_fused"]


def test_same_clip_with_and_without(device: str) -> None:
    np.testing.assert_allclose(clip(device), clip(device, "--no-optimized-kernels"), atol=2e-3)


def test_fp8(device: str, tmp_path: Path, capsys: Any) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        assert generate_video.main([*TINY, "--device", device, "--precision", "fp8"]) == 1
        assert "error: precision: expected a GPU of compute capability 8.9" in capsys.readouterr().out
        return
    run = Run(capsys, tmp_path, device, "--precision", "fp8")
    assert run.status == 0 and run.result["run"]["precision"] == "fp8" and ", fp8" in run.output
    assert run.calls()["torch.Linear"] > 0 and run.result["report"]["notes"][0].startswith("fp8: ")
    native, fp8 = (clip(device, "--dtype", "bfloat16", *p) for p in ([], ["--precision", "fp8"]))
    assert np.abs(fp8 - native).max() > 1e-3 and np.square(fp8 - native).mean() < 1e-3


def test_graphs(cuda_graphs: str, tmp_path: Path, capsys: Any) -> None:
    run = Run(capsys, tmp_path, cuda_graphs, "--graphs", "--guidance-scale", "1")
    assert run.status == 0 and run.result["run"]["warmup_iterations"] == 2 and ", CUDA graphs" in run.output
    lines = [line for line in run.result["report"]["text"].splitlines() if line.startswith("graphs of ")]
    replayed = {line.split(":")[0].split()[-1]: int(line.split(";")[1].split()[0]) for line in lines}
    # Two warm-ups of two steps, and a clip. The first call runs ordinarily, the second is captured and replayed.
    assert replayed["LTXVideoTransformer3DModel"] == 2 * 2 + STEPS - 1 and replayed["LTXVideoDecoder3d"] == 2


def test_batch_is_of_one_seed_after_the_other(device: str, tmp_path: Path, capsys: Any) -> None:
    run = Run(capsys, tmp_path, device, "--batch-size", "2", "--seed", "5")
    assert run.names == [f"clip_{i}_optimized.{VIDEO}" for i in range(2)]
    assert_numbers_hold(run, clips=2)
    both = clip(device, "--batch-size", "2", "--model", "tiny")
    assert both.shape == (2, FRAMES, HEIGHT, WIDTH, 3)
    assert np.abs(both[0] - both[1]).max() > 0.05
    np.testing.assert_allclose(both[:1], clip(device), atol=1e-2)


@pytest.mark.parametrize(
    "option", ["--prompt=A blue whale", "--negative-prompt=sharp", "--guidance-scale=7", "--seed=1", "--steps=4"]
)
def test_options_have_an_effect(device: str, option: str) -> None:
    assert np.abs(clip(device, option) - clip(device)).max() > 2e-2


def test_without_guidance(device: str) -> None:
    """No batch of two, and no negative prompt."""
    alone = clip(device, "--guidance-scale", "1")
    np.testing.assert_allclose(alone, clip(device, "--guidance-scale", "1", "--negative-prompt", "sharp"), atol=1e-5)
    assert np.abs(alone - clip(device)).max() > 2e-2


@pytest.mark.extended
@pytest.mark.parametrize("optimized", [True, False])
def test_compile(device: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, optimized: bool) -> None:
    """Traced and run, but not compiled, which takes minutes; the test below compiles."""
    compiled: list[nn.Module] = []
    stock_compile = nn.Module.compile

    def traced(module: nn.Module) -> None:
        compiled.append(module)
        stock_compile(module, backend="eager", fullgraph=True)

    monkeypatch.setattr(nn.Module, "compile", traced)
    torch.compiler.reset()
    run = Run(capsys, tmp_path, device, "--compile", *([] if optimized else ["--no-optimized-kernels"]))
    assert run.status == 0 and run.names == [f"clip_{'optimized_' if optimized else ''}compile.{VIDEO}"]
    assert [type(module).__name__ for module in compiled] == ["LTXVideoTransformer3DModel"]
    assert_numbers_hold(run)
    assert "compilation included" in run.output
    if optimized:
        assert run.calls("traces") == {**COMPILED_CALLS, **dict.fromkeys(CLIP_CALLS, 0)}
        assert {name: calls for name, calls in run.calls().items() if calls} == {
            k: v for k, v in CLIP_CALLS.items() if v
        }


@pytest.mark.slow
def test_compile_for_real(device: str, tmp_path: Path, capsys: Any) -> None:
    torch.compiler.reset()
    run = Run(capsys, tmp_path, device, "--compile", "--dtype", "float32")
    assert run.status == 0 and run.calls("traces") == {**COMPILED_CALLS, **dict.fromkeys(CLIP_CALLS, 0)}
    assert_numbers_hold(run)
    compiled = decoded(tmp_path / f"clip_optimized_compile.{VIDEO}").astype(int)
    assert Run(capsys, tmp_path, device, "--dtype", "float32").status == 0
    assert np.abs(compiled - decoded(tmp_path / f"clip_optimized.{VIDEO}")).mean() < 1


@pytest.mark.parametrize("offload", ["model", "sequential", "group"])
def test_offload(device: str, monkeypatch: pytest.MonkeyPatch, offload: str) -> None:
    """The same clip; on a CPU, which main refuses, all of the machinery but the moves between devices runs too."""
    if offload != "group":
        accelerate = pytest.importorskip("accelerate")
    if (device, offload) == ("cpu", "sequential"):

        def enable(pipe: LTXPipeline, device: torch.device) -> None:
            for model in (pipe.transformer, pipe.vae, pipe.text_encoder):
                accelerate.cpu_offload(model, device)  # diffusers would call the device cpu:0, which is not cpu

        monkeypatch.setattr(LTXPipeline, "enable_sequential_cpu_offload", enable)
    options = ["--warmup-iterations", "0"]
    np.testing.assert_allclose(clip(device, *options, offload=offload), clip("cpu", *options), atol=1e-2)


PROGRAMS = [
    "demo",
    "generate_image",
    "generate_video",
    "hub_kernels",
    "inject_llm",
    "inject_ltx",
    "kernels_demo",
    "serve_ray",
    "train_demo",
    "train_lora",
]


def test_every_program_is_tested() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert sorted(scripts) == PROGRAMS


def run_program(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_and_wrong_arguments_are_answered_at_once(name: str) -> None:
    """Before torch and diffusers are imported, which takes ten seconds and more."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        help = run_program(name, "--help")
        times.append(time.perf_counter() - start)
        assert help.returncode == 0 and help.stdout.startswith(f"usage: {name}.py") and help.stderr == ""
    assert min(times) < 2
    wrong = run_program(name, "--no-such-option")
    usage, error = wrong.stderr.rsplit("\n", 2)[:2]
    assert wrong.returncode == 2 and usage.startswith("usage: ") and error.startswith(f"{name}.py: error: ")


@pytest.fixture
def ignored_interrupts() -> Iterator[None]:
    """As under nohup and in the background of a script: programs inherit that SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ignored_interrupts")
@pytest.mark.parametrize("name", PROGRAMS)
def test_ctrl_c(name: str) -> None:
    """Status 130 and one word, also while the libraries are imported."""
    command = [sys.executable, "-X", "importtime", str(EXAMPLES / f"{name}.py")]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    for line in process.stderr:  # up to torch, whose first modules are loaded then
        if re.search(r"\| +torch\.", line):
            break
    process.send_signal(signal.SIGINT)
    errors = [line for line in process.communicate(timeout=60)[1].splitlines() if not line.startswith("import time:")]
    assert (process.returncode, errors) == (130, ["interrupted"])


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        ("command_line.ExampleError('none: no such model')", 1, "error: none: no such model"),
        ("FileNotFoundError(2, 'No such file', 'none')", 1, "error: [Errno 2] No such file: 'none'"),
        ("ModuleNotFoundError(\"No module named 'diffusers'\")", 1, "error: No module named 'diffusers': `pip install"),
        ("KeyboardInterrupt()", 130, "interrupted"),
        ("ZeroDivisionError()", 1, "Traceback (most recent call last):"),  # a fault of the example's own
    ],
)
def test_what_the_user_can_mend_is_one_line(error: str, status: int, line: str) -> None:
    code = f"import sys; sys.path.append({str(EXAMPLES)!r}); import command_line; sys.argv = ['x']\n"
    code += f"command_line.start(command_line.argparse.ArgumentParser())\nraise {error}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = result.stderr.splitlines()
    assert result.returncode == status and lines[0].startswith(line) and (len(lines) == 1) == ("Zero" not in error)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(command_line.ExampleError, match=f"^{tmp_path}/none: "):
        llm_models.load_model(f"{tmp_path}/none", torch.float32, "cpu")


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("--num-frames 10", "--num-frames/--frames: expected a multiple of 8, plus 1, got 10"),
        ("--height 100", "--height: expected a multiple of 32, got 100"),
        ("--width 0", "--width: expected a multiple of 32, got 0"),
        ("--steps 1", "--steps: expected at least 2, got 1"),
        ("--batch-size 0", "--batch-size: expected at least 1, got 0"),
        ("--warmup-iterations -1", "--warmup-iterations: expected at least 0, got -1"),
        ("--device cpu --offload model", "--offload: model needs a GPU, and --device is cpu"),
        ("--offload some", "--offload: invalid choice: 'some'"),
        ("--device cpu --graphs", "--graphs: it needs a GPU and the optimized kernels"),
        ("--output a.webm", "--output: expected a name that ends in .mp4, .gif, got a.webm"),
        ("--components text", "--components: invalid choice: 'text'"),
        ("--no-optimized-kernels --precision fp8", "--precision: fp8 needs the optimized kernels"),
        ("--use-optimized-kernels --no-optimized-kernels", "--no-optimized-kernels: not allowed with argument"),
    ],
)
def test_wrong_arguments(wrong: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        generate_video.parse_arguments(wrong.split())
    assert raised.value.code == 2 and f"error: argument {expected}" in capsys.readouterr().err


def test_an_empty_prompt_is_a_prompt() -> None:
    assert generate_video.parse_arguments(["--device", "cpu", "--prompt", ""]).prompt == ""
    assert generate_video.parse_arguments(["--device", "cpu"]).prompt == command_line.PROMPT


def test_recipes_of_other_programs(tmp_path: Path) -> None:
    """A file without clips is ignored. The error for a file that is not JSON names it."""
    recipe = tmp_path / "recipe.json"
    for text in ('{"name": "soup"}', '{"clips": 3}', "[]"):
        recipe.write_text(text)
        assert generate_video.parse_arguments(["--device", "cpu", "--model", str(tmp_path)]).frames == 25
    recipe.write_text("soup")
    with pytest.raises(command_line.ExampleError, match=f"^{recipe}: expected JSON, as train_demo.py writes it: "):
        generate_video.parse_arguments(["--device", "cpu", "--model", str(tmp_path)])


def test_a_folder_of_another_pipeline(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image_pipeline.random_flux(False, True, torch.device("cpu")).save_pretrained(tmp_path)
    options = ["--device", device, "--model", str(tmp_path), "--no-optimized-kernels"]
    assert generate_video.main([*TINY, *options]) == 1
    output = capsys.readouterr().out
    assert f"error: {tmp_path}: expected an LTXPipeline" in output and "got FluxPipeline" in output


def test_no_compile_below_offload(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    options = ["--device", "cuda", "--compile", "--offload"]
    assert generate_video.parse_arguments([*options, "model"]).compile
    for offload in ("sequential", "group"):
        with pytest.raises(SystemExit):
            generate_video.parse_arguments([*options, offload])
        assert f"--offload: {offload} moves weights within" in capsys.readouterr().err


def test_says_so_if_no_op_runs(
    ltx: ModuleType, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(generate_video, "load_kernels", lambda device: ltx)
    parts = ltx.integrations
    for module in (parts.blocks.block, parts.attention.engine, parts.engine.guards, parts.diffusers.norms):
        monkeypatch.setattr(module, "why_not_input", lambda *tensor, **options: "it is Saturday")
    run = Run(capsys, tmp_path, device, "--components", "transformer")
    assert run.status == 1
    assert "fault: none of the package's ops ran" in run.output
    assert "stock call of diffusers.LTXVideoTransformerBlock, 15 x: it is Saturday" in run.output


def test_out_of_memory(device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(generate_video, "load_pipeline", full)
    assert generate_video.main([*TINY, "--device", device]) == 1
    output = capsys.readouterr().out
    assert "error: CUDA out of memory. Tried to allocate 2.00 GiB" in output and "--offload" in output


def test_inject(device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints what its docstring says, and is as short as a minimal integration has to be."""
    monkeypatch.setattr(sys, "argv", ["inject_ltx.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    inject_ltx.main()
    assert inject_ltx.__doc__ is not None
    documented = inject_ltx.__doc__.split("For the tiny model:\n\n")[1]
    assert capsys.readouterr().out == "".join(f"{line[4:]}\n" for line in documented.splitlines())
    assert len((EXAMPLES / "inject_ltx.py").read_text().splitlines()) < 60


def test_same_tokens_end_at_the_first_other_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What follows another token is an answer to another text. Each text of a batch is counted by itself."""
    stock = [[1, 2, 3, 4], [5, 6, 7, 8]]
    answers = iter(torch.tensor([stock, stock, [[1, 2, 9, 4], [9, 6, 7, 8]]]))  # of the stock model, and of each way
    monkeypatch.setattr(inject_llm, "generate", lambda *_: next(answers))
    options = ["--tokens", "4", "--batch", "2", "--no-float32", "--json", str(tmp_path / "result.json")]
    inject_llm.main(["tiny", *options])
    records = json.loads((tmp_path / "result.json").read_text())["records"]
    assert [record["same_tokens"] for record in records] == [8, 2]


def test_tokens_of_every_text_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three texts that get a token in 4 ms get 750 a second."""
    monkeypatch.setattr(inject_llm, "milliseconds", lambda *_: 4.0)
    record = inject_llm.measure(mock.Mock(), torch.zeros(3, 8, dtype=torch.int64), 2, "cpu")
    assert record == {"prefill_ms": 4.0, "decode_ms": 4.0, "tokens_per_s": 750.0}


@pytest.mark.parametrize("options", [[], ["--rounding", "eager"], ["--kernelize", "--no-float32"]], ids=" ".join)
def test_inject_llm(
    device: str, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if "--kernelize" in options and not hasattr(LlamaRMSNorm, "kernel_layer_name"):
        pytest.skip("NOT RUN: this transformers does not take this kernels")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    llm_models.load_model("tiny", torch.float32, "cpu").save_pretrained(tmp_path / "model")
    for model in ("tiny", str(tmp_path / "model")):
        inject_llm.main([model, "--tokens", "8", "--json", str(tmp_path / "out" / "result.json"), *options])
        result = json.loads((tmp_path / "out" / "result.json").read_text())
        eager, kernels = result["records"]
        assert (result["model"], eager["config"], kernels["config"]) == (model, "eager", "kernels")
        assert eager["from_stock"] == 0 and eager["same_tokens"] == 8 and not eager["replaced"]
        assert ("9 x LlamaRMSNorm" if "--kernelize" in options else "transformers.LlamaRMSNorm") in kernels["replaced"]
        assert (0 if "eager" in options else 1e-4) <= kernels["from_stock"] < 2e-2 and kernels["same_tokens"] <= 8
        if "--no-float32" not in options:
            assert 1e-3 < kernels["error_vs_fp32"] < 1.3 * eager["error_vs_fp32"] < 2e-2
        for record in (eager, kernels):
            assert record["prefill_ms"] > 0 and record["tokens_per_s"] == pytest.approx(
                1e3 / record["decode_ms"], rel=0.02
            )
        printed = capsys.readouterr().out
        assert kernels["replaced"].splitlines()[-1] in printed and f"{kernels['decode_ms']:.2f}" in printed
