"""The Makefile: a path with a space, what `make help` lists, what a demo leaves for lint."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.build_checks import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)


def make(directory: Path, *arguments: str) -> str:
    """Its output; variables that `make test` was given do not reach it."""
    command = ["make", "--no-print-directory", *arguments]
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    result = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a space in its name, with all that make itself reads."""
    directory = tmp_path_factory.mktemp("a checkout")
    for name in ("Makefile", "requirements/torch.txt", "requirements/dev.txt"):
        (directory / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, directory / name)
    return directory


@pytest.mark.parametrize("target", TARGETS)
def test_a_path_with_a_space_is_one_word(spaced: Path, target: str):
    """In what make would run; nothing is run."""
    output = make(spaced, "--dry-run", "VARIANTS=a path/build", f"PYTHON={sys.executable}", target)
    for command in output.replace("\\\n", "").splitlines():
        for word in shlex.split(command):
            assert not re.fullmatch(r"\S*/a", word) and not word.startswith(("checkout", "path/")), command
            assert "a path" not in word or word.endswith("a path/build"), command


@pytest.mark.parametrize(("target", "variable"), [("test-torch", "TORCH"), ("nix-build", "VARIANT")])
def test_a_variable_that_is_missing_is_named(target: str, variable: str):
    command = ["make", target, f"{variable}="]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode != 0 and result.stderr.startswith(f"error: {variable}: expected ")
    assert "Traceback" not in result.stderr and not (ROOT / ".venv-torch-").exists()


def test_help_lists_every_target(spaced: Path):
    output = make(spaced)
    groups = re.findall(r"^(\w+).*\n((?:  .*\n)+)", output, re.MULTILINE)
    assert [name for name, _ in groups] == ["Try", "Develop", "Release"]
    listed = [re.findall(r"^  ([a-z-]+) ", text, re.MULTILINE) for _, text in groups]
    assert listed[0] == ["demo", "test"]
    assert sorted(["help", *(name for names in listed for name in names)]) == sorted(TARGETS)
    phony = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert sorted(" ".join(phony).split()) == sorted(TARGETS)


def test_the_demo_builds_what_this_machine_runs(spaced: Path):
    build = r"^\S*python\S* tools/build\.py (.*?) *$"
    assert re.findall(build, make(spaced, "-n", "demo"), re.M) == ["--this-machine"]
    assert re.findall(build, make(spaced, "-n", "demo", "BACKEND=cuda"), re.M) == ["--backend cuda"]
    assert re.findall(build, make(spaced, "-n", "test"), re.M) == ["--this-machine"]
    assert re.findall(build, make(spaced, "-n", "test", "BACKEND=cpu"), re.M) == ["--backend cpu"]
    assert re.findall(build, make(spaced, "-n", "test-variants"), re.M) == [""]


def test_lint_after_a_demo(tmp_path: Path):
    """The directory demo/ does not make `import demo`, of examples/, a module of another kind."""
    pytest.importorskip("ruff")
    (tmp_path / "demo").mkdir()
    (tmp_path / "tests").mkdir()
    shutil.copyfile(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    shutil.copyfile(Path(__file__).with_name("test_demo.py"), tmp_path / "tests" / "test_demo.py")
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select=I", "tests"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.slow
def test_checkout_in_a_path_with_a_space(tmp_path: Path):
    """Demo, tests and fuzz of a copy of the sources, with this environment."""
    pytest.importorskip("rich")
    if not (ROOT / ".git").exists():
        pytest.skip("NOT RUN: it needs a git checkout")
    checkout = tmp_path / "a checkout"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(checkout)], check=True)
    options = ["SYSTEM=1", f"PYTHON={sys.executable}", "BACKEND=cpu", "MODEL=tiny", "N=50"]
    tests = "PYTEST_ARGS=tests/test_loading.py tests/project/test_build_variants.py -k cpu"
    given = ("LOCAL_KERNELS", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL")
    environment = {k: v for k, v in os.environ.items() if k not in given}
    for target in ("demo", "test", "fuzz"):
        command = ["make", target, *options, tests, "FUZZ_ARGS=--output fuzz.json"]
        result = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    assert (checkout / "demo" / "result.json").is_file() and (checkout / "fuzz.json").is_file()
