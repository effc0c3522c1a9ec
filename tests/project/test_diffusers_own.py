"""tests/diffusers_tests.py: that it finds what fails on optimized models alone, and a part of diffusers' own tests.

The part runs from the folder that the environment variable DIFFUSERS names. `make test-diffusers` runs all of them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("kernels")
import diffusers_tests
from diffusers_tests import SIDES, Run, compare, verdict
from families.left import LEFT
from helpers.build import ROOT
from helpers.diffusers_models import files_of_tests, known_models

# At most two minutes on two cores: blocks in one stream and in two, an encoder and a decoder.
PART = ("transformer_ltx.py", "transformer_chroma.py", "autoencoder_ltx2_video.py")

FAKES = {
    "good": """
import os
import torch
from diffusers import AutoModel, LTXVideoTransformer3DModel
from helpers.ltx_video import make_inputs, make_model

DEVICE = os.environ["DIFFUSERS_TEST_DEVICE"]

def is_optimized(model):
    return [module for module in model.modules() if "_ltx_kernels" in vars(module)] != []

def test_forward():
    with torch.no_grad():
        assert make_model(DEVICE)(**make_inputs(DEVICE))[0].isfinite().all()

def test_every_way_to_a_model(tmp_path):
    model = make_model(DEVICE)
    model.save_pretrained(tmp_path)
    loaded, info = LTXVideoTransformer3DModel.from_pretrained(tmp_path, output_loading_info=True)
    again = LTXVideoTransformer3DModel.from_config(model.config)
    made = [model, loaded, again, AutoModel.from_pretrained(str(tmp_path))]
    assert [is_optimized(model) for model in made] == [not os.environ["STOCK"]] * 4
    assert not info["missing_keys"]
""",
    "bad": """
import os
import pytest
from diffusers import LTXVideoTransformer3DModel

STOCK = bool(os.environ["STOCK"])

@pytest.fixture
def teardown_fails():
    yield
    assert STOCK, "a teardown"

def test_passes(): pass
def test_both(): assert False, "on purpose"
def test_optimized(): assert STOCK, "planted"
def test_teardown(teardown_fails): pass
def test_stock(): assert not STOCK
def test_skipped_when_optimized():
    if not STOCK:
        pytest.skip("no pass")
def test_skipped(): pytest.skip("as ever")
if STOCK:
    def test_gone(): pass
""",
    "dies": """
import os
from diffusers import LTXVideoTransformer3DModel

def test_before(): pass
def test_dies():
    if not os.environ["STOCK"]:
        os._exit(3)
def test_after(): pass
""",
    "broken": "from diffusers import LTXVideoTransformer3DModel, NoSuchName",
    "other": "from diffusers import SomethingElse",
}


def name_of(fake: str) -> str:
    return f"tests/models/transformers/test_models_transformer_{fake}.py"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as diffusers' source, with tests that pass or fail for known reasons."""
    folder = tmp_path_factory.mktemp("source")
    for fake, text in FAKES.items():
        file = folder / name_of(fake)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


needs_runs = pytest.mark.slow  # seven processes of half a minute in all


@pytest.fixture(scope="module")
def runs(source: Path, device: str) -> dict[tuple[str, str], Run]:
    """What the runner's processes find in each fake file, with stock and with optimized models."""
    options = argparse.Namespace(jobs=2, device=device, timeout=300, k="")
    work = [(name_of(fake), side) for fake in ("good", "bad", "dies") for side in SIDES]
    work.append((name_of("broken"), "optimized"))
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        running = {key: pool.submit(diffusers_tests.run, source, source / key[0], key[1], 0, options) for key in work}
        return {key: future.result() for key, future in running.items()}


@pytest.fixture
def judge(
    source: Path, runs: dict[tuple[str, str], Run], device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Any:
    """The whole program on some fake files, with the processes' findings: its exit status, and what it writes."""

    def main(*files: str) -> tuple[int, dict[str, Any]]:
        output = tmp_path / "result.json"
        monkeypatch.setattr(
            diffusers_tests, "run", lambda _, file, side, *rest: runs[str(file.relative_to(source)), side]
        )
        monkeypatch.setattr(diffusers_tests, "name_gpus", lambda: None)  # it writes into the environment
        arguments = ["--diffusers", str(source), "--output", str(output), "--device", device, "--files", *files]
        monkeypatch.setattr(sys, "argv", ["diffusers_tests.py", *arguments])
        return diffusers_tests.main(), json.loads(output.read_text())

    return main


@needs_runs
def test_what_passes_on_both(judge: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, result = judge("good")
    assert status == 0
    assert result["counts"] == {"stock": {"passed": 2}, "optimized": {"passed": 2}}
    assert result["only_optimized"] == result["both"] == result["only_stock"] == {}
    assert result["models"] == {"LTXVideoTransformer3DModel": 5} and result["calls"] > 0  # no model twice
    assert "Pass with stock models alone: none" in capsys.readouterr().out


@needs_runs
def test_what_fails_on_optimized_models_alone(judge: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, result = judge("good", "bad")
    assert status == 1
    found = {
        key: {test.rpartition("::")[2] for test in result[key]} for key in ("both", "only_optimized", "only_stock")
    }
    assert found == {
        "both": {"test_both"},
        "only_optimized": {"test_optimized", "test_teardown", "test_skipped_when_optimized", "test_gone"},
        "only_stock": {"test_stock"},
    }
    text = capsys.readouterr().out
    assert "planted" in text and "on purpose" in text and "NOT GOOD" in text


@needs_runs
def test_a_process_that_dies(judge: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, result = judge("good", "dies")
    assert status == 1
    assert result["unfinished"] == [f"{name_of('dies')} (optimized)"]
    assert {test.rpartition("::")[2]: lines for test, lines in result["only_optimized"].items()} == {
        "test_dies": ["begun"],
        "test_after": ["not run"],
    }
    assert "DID NOT END" in capsys.readouterr().out


def test_where_nothing_ran_the_ops() -> None:
    runs = {side: Run(outcomes={"test": "passed"}, end={"calls": 0, "traces": 0}) for side in SIDES}
    text, values, good = verdict({"file": runs})
    assert not good and "no call ran the ops: file" in text and values["only_optimized"] == {}
    runs["optimized"].end["traces"] = 1
    assert verdict({"file": runs})[2]


@needs_runs
def test_a_file_that_cannot_be_imported(runs: dict[tuple[str, str], Run]) -> None:
    broken = runs[name_of("broken"), "optimized"]
    assert broken.outcomes == {name_of("broken"): "failed"} and "NoSuchName" in broken.lines[name_of("broken")][0]
    assert list(compare(Run(), broken).only_optimized) == [name_of("broken")]


def test_a_process_that_hangs(source: Path) -> None:
    options = argparse.Namespace(jobs=1, device="cpu", timeout=0.1, k="")
    assert diffusers_tests.run(source, source / name_of("good"), "optimized", 0, options).end == {}


@pytest.mark.parametrize(
    ("stock", "optimized", "where"),
    [
        ("passed", "passed", None),
        ("passed", "failed", "only_optimized"),
        ("passed", "skipped", "only_optimized"),
        ("passed", "begun", "only_optimized"),
        ("passed", None, "only_optimized"),
        ("skipped", "failed", "only_optimized"),
        ("skipped", "skipped", None),
        ("failed", "failed", "both"),
        ("begun", None, "both"),
        ("failed", "passed", "only_stock"),
        (None, "failed", "only_optimized"),
    ],
)
def test_compare(stock: str | None, optimized: str | None, where: str | None) -> None:
    found = compare(*(Run(outcomes={} if outcome is None else {"test": outcome}) for outcome in (stock, optimized)))
    assert [name for name, tests in vars(found).items() if tests] == ([where] if where else [])


@needs_runs
def test_no_file_is_an_error(source: Path, judge: Any) -> None:
    with pytest.raises(SystemExit, match="expected files"):
        judge("no such file")


def test_files_and_models(ltx: ModuleType, source: Path) -> None:
    """The known models are those with a family or an autoencoder of the package."""
    models = known_models(ltx)
    known = {"LTXVideoTransformer3DModel", "FluxControlNetModel", "SD3Transformer2DModel"}
    assert known | {"AutoencoderKLWan", "AutoencoderKL"} <= set(models)
    assert not {*LEFT, "AutoencoderKLMochi"} & set(models)
    expected = [source / name_of(fake) for fake in sorted(FAKES) if fake != "other"]
    assert files_of_tests(source, models) == {file: ["LTXVideoTransformer3DModel"] for file in expected}


def test_a_part_of_diffusers_own_tests() -> None:
    source = os.environ.get("DIFFUSERS")
    if not source:
        pytest.skip("NOT RUN: DIFFUSERS names no folder with diffusers' source (make test-diffusers clones it)")
    command = [sys.executable, str(ROOT / "tests/diffusers_tests.py"), "--diffusers", source, "--files", *PART]
    result = subprocess.run([*command, "--timeout", "300"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
