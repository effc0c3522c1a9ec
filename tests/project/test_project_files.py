"""What stands around the code: licence, citation, issue forms, metadata of the package, its diagnosis of a machine."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.build_checks import PACKAGE, ROOT, builder, built_variant

PROJECT = builder.load_project()
DOCS = sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "docs").rglob("*.md"))


def test_licence():
    """The text of the Apache License 2.0 as it is published, its heading and its appendix too."""
    text = (ROOT / "LICENSE").read_bytes()
    assert hashlib.sha256(text).hexdigest() == "c71d239df91726fc519c6eb72d318ec65820627232b2f796219e87dcf35d0ab4"
    toml = builder.read_toml(ROOT / "pyproject.toml")["project"]
    assert toml["license"] == PROJECT.license == "Apache-2.0" and toml["license-files"] == ["LICENSE"]


def test_one_version(ltx: ModuleType):
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert ltx.__version__ == citation["version"] == str(PROJECT.version)
    assert citation["license"] == PROJECT.license and citation["repository-code"] == PROJECT.source


def test_urls_and_classifiers():
    toml = builder.read_toml(ROOT / "pyproject.toml")["project"]
    classifiers = pytest.importorskip("trove_classifiers").classifiers
    assert set(toml["classifiers"]) <= classifiers
    assert toml["urls"]["Source"] == PROJECT.source
    for url in toml["urls"].values():
        assert url.startswith(f"{PROJECT.source}") and (url.count("/") == 4 or "issues" in url or "/main/" in url)
        _, _, path = url.partition("/main/")
        assert (ROOT / path).exists()


def test_typed():
    assert (PACKAGE / "py.typed").read_text() == ""
    wheel = builder.read_toml(ROOT / "pyproject.toml")["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert not [pattern for pattern in wheel["exclude"] if "typed" in pattern]


def test_issue_forms():
    yaml = pytest.importorskip("yaml")
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert [form.stem for form in forms] == ["config", "model", "slow", "wrong-result"]
    for form in forms:
        content = yaml.safe_load(form.read_text())
        if form.stem == "config":
            assert content["contact_links"][0]["url"].endswith("/security/advisories/new")
            continue
        assert {"name", "description", "labels", "body"} == set(content)
        identifiers = [field["id"] for field in content["body"]]
        assert len(set(identifiers)) == len(identifiers)
        assert all(field["type"] in ("input", "textarea") for field in content["body"])


@pytest.mark.parametrize("file", ["SECURITY.md", "README.md", "CONTRIBUTING.md", *DOCS])
def test_links_lead_somewhere(file: str):
    """Files and headings of this repository; pages elsewhere are not fetched."""
    text = (ROOT / file).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text):
        path, _, heading = (target[0] or target[1]).partition("#")
        if path.startswith(("http:", "https:")):
            continue
        linked = (ROOT / file).parent / path if path else ROOT / file
        assert linked.exists(), f"{file}: {path}"
        if heading:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings], (
                f"{file}: {heading}"
            )


def test_readme_example():
    """Its inline requirements are all that it imports, and it runs on the local build."""
    path = ROOT / "examples" / "readme_example.py"
    text = path.read_text()
    inline = re.search(r"^# /// script\n(.*?)^# ///$", text, re.MULTILINE | re.DOTALL)
    assert inline is not None
    needed = re.findall(r'"([a-z]+)(?:[>=.0-9]*)"', inline[1].partition("dependencies")[2])
    assert (
        set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)) <= set(needed) == {"kernels", "numpy", "torch"}
    )
    assert "torch>=" + ".".join(map(str, min(PROJECT.stable_abi.values()))) in inline[1]
    environment = {**os.environ, "LOCAL_KERNELS": f"org/ltx-kernels={ROOT / 'build'}"}
    result = subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "adaln_rmsnorm on " in result.stdout, result.stdout + result.stderr


# ---- python -m ltx_fused


def diagnose(directory: Path, **environment: str) -> tuple[int, dict[str, str], str]:
    """Status, facts and errors of `python -m ltx_fused`, with the built variant under that name."""
    (directory / "ltx_fused").symlink_to(built_variant("cpu"))
    command = [sys.executable, "-m", "ltx_fused"]
    variables = {**os.environ, "PYTHONPATH": str(directory), **environment}
    result = subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True, check=False)
    facts = re.findall(r"^(\S+) +(.*)$", result.stdout, re.MULTILINE)
    return result.returncode, dict(facts), result.stderr


def test_diagnosis(tmp_path: Path):
    status, facts, errors = diagnose(tmp_path, CUDA_VISIBLE_DEVICES="")
    assert (status, errors) == (0, "")
    metadata = json.loads((built_variant("cpu") / "metadata.json").read_text())
    assert facts["ltx-kernels"].startswith(f"version {PROJECT.version}, ") and metadata["id"] in facts["ltx-kernels"]
    assert facts["torch"].startswith(torch.__version__) and facts["GPU"] == "none that torch can use"
    assert facts["backend"] == "compiled kernels run on cpu" and re.match(r"\d", facts["kernels"])
    assert {"location", "Python", "fp8", "diffusers", "transformers"} <= facts.keys() and "namesake" not in facts


@pytest.mark.parametrize("page", ["docs/hub.md", "docs/troubleshooting.md"])
def test_diagnosis_of_a_local_build(page: str):
    """The command of the pages, with the name of the folder that this machine has, runs the build that lies there."""
    variant = built_variant("cpu")
    (named,) = re.findall(r"`cd build && python -m (\S+)`", (ROOT / page).read_text())
    assert named.split("-")[:-2] == variant.name.split("-")[:-2]
    command = [sys.executable, "-m", variant.name]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, cwd=variant.parent, env=variables, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and str(variant) in result.stdout, result.stdout + result.stderr


def test_diagnosis_beside_another_package_of_the_kernels_name(tmp_path: Path):
    (tmp_path / "ltx_kernels").mkdir()
    (tmp_path / "ltx_kernels" / "__init__.py").write_text("raise RuntimeError('it is not imported')\n")
    status, facts, errors = diagnose(tmp_path, CUDA_VISIBLE_DEVICES="")
    assert (status, errors) == (0, "") and facts["location"] == str(tmp_path / "ltx_fused")
    assert facts["namesake"] == f"another package, ltx_kernels, in {tmp_path / 'ltx_kernels'}"


def test_diagnosis_of_arguments(diagnosis: Any, capsys: Any):
    """An option that there is not is an error, and --help says what the command prints."""
    with pytest.raises(SystemExit) as ended:
        diagnosis.main(["--no-such-option"])
    assert ended.value.code == 2 and "unrecognized arguments: --no-such-option" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        diagnosis.main(["--help"])
    assert ended.value.code == 0 and "which kernels run here" in capsys.readouterr().out


@pytest.fixture
def diagnosis(ltx: ModuleType) -> Any:
    return importlib.import_module(f"{ltx.__name__}.__main__")


def test_diagnosis_of_another_device(diagnosis: Any, backend: str, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    """A build for the other device is named, with what to do about it."""
    other = "cuda" if backend == "cpu" else "cpu"
    assert (
        diagnosis.what_is_wrong(other) == f"this build holds the kernels for {backend}: on {other} plain torch computes"
    )
    monkeypatch.setattr(diagnosis, "gpu_names", lambda: ["A GPU, compute capability 9.0"] if other == "cuda" else [])
    monkeypatch.setattr(diagnosis, "fp8_obstacle", lambda device: None)
    assert diagnosis.main() == 1
    output = capsys.readouterr().out
    assert f"backend      NOT on {other}: this build" in output
    assert ("install the CUDA toolkit" if other == "cuda" else "nvidia-smi") in output.splitlines()[-1]


def test_diagnosis_of_a_wrong_or_failing_op(diagnosis: Any, backend: str, device: str, monkeypatch: pytest.MonkeyPatch):
    if device != backend:
        pytest.skip("NOT RUN: this variant has no kernels for this machine")
    assert diagnosis.what_is_wrong(device) is None
    monkeypatch.setattr(diagnosis, "rmsnorm", lambda x: x)
    assert diagnosis.what_is_wrong(device).startswith("rmsnorm is ")

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image is available\nmore")

    monkeypatch.setattr(diagnosis, "rmsnorm", fails)
    assert diagnosis.what_is_wrong(device) == "CUDA error: no kernel image is available"
