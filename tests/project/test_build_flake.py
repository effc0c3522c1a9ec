"""flake.nix and flake.lock, as far as that can be told without the network."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.build_checks import ROOT, builder, built_variant, release

# The revision of huggingface/kernels whose build.toml edition and contract this project is written to.
KERNEL_BUILDER = "8ac69fc542a4306eade0759ef7c45b4f2ae57df0"

STUB = """
let flake = import %s; in {
  inherit (flake) inputs;
  outputs = flake.outputs {
    self = { outPath = "x"; shortRev = "abc"; };
    kernel-builder.lib.genKernelFlakeOutputs = a: {
      arguments = builtins.attrNames a;
      toml = builtins.pathExists (a.path + "/build.toml");
      self = a.self.outPath;
    };
  };
}
"""


def nix_instantiate(*arguments: str) -> str:
    if shutil.which("nix-instantiate") is None:
        pytest.skip("NOT RUN: nix-instantiate not found (Debian: apt-get install nix-bin)")
    command = ["nix-instantiate", "--store", "dummy://", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_flake_parses():
    assert "genKernelFlakeOutputs" in nix_instantiate("--parse", str(ROOT / "flake.nix"))


def test_flake_outputs():
    expression = STUB % (ROOT / "flake.nix")
    flake = json.loads(nix_instantiate("--eval", "--strict", "--json", "-E", expression))
    assert flake["inputs"] == {"kernel-builder": {"url": "github:huggingface/kernels"}}
    assert flake["outputs"] == {"arguments": ["path", "self"], "toml": True, "self": "x"}


def flake_metadata(directory: Path) -> subprocess.CompletedProcess[str]:
    """What nix says of the flake there, without a network; an error if it would write another lock file."""
    if shutil.which("nix") is None:
        pytest.skip("NOT RUN: nix not found (Debian: apt-get install nix-bin)")
    features = ["--extra-experimental-features", "nix-command", "--extra-experimental-features", "flakes"]
    where = ["--offline", "--store", str(directory / "store")]
    command = [
        "nix",
        *features,
        *where,
        "flake",
        "metadata",
        f"path:{directory}/flake",
        "--json",
        "--no-update-lock-file",
    ]
    environment = {**os.environ, "HOME": str(directory)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def flake(tmp_path: Path) -> Path:
    """A copy of flake.nix and flake.lock, in a directory to give to flake_metadata."""
    (tmp_path / "flake").mkdir()
    for name in ("flake.nix", "flake.lock"):
        shutil.copyfile(ROOT / name, tmp_path / "flake" / name)
    return tmp_path


def test_lock_matches_the_inputs(flake: Path):
    result = flake_metadata(flake)
    assert result.returncode == 0, result.stderr
    nodes = json.loads(result.stdout)["locks"]["nodes"]
    assert nodes["kernel-builder"]["locked"]["rev"] == KERNEL_BUILDER
    for name, node in nodes.items():
        assert name == "root" or re.fullmatch(r"sha256-[A-Za-z0-9+/]{43}=", node["locked"]["narHash"]), name


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("flake.nix", "github:huggingface/kernels", "github:huggingface/kernels/v1"),
        ("flake.nix", "github:huggingface/kernels", "github:someone/kernels"),
        ("flake.nix", "inputs = {", 'inputs = {\n    nixpkgs.url = "github:NixOS/nixpkgs";'),
        ("flake.lock", '"repo": "kernels",', '"repo": "kernel-builder",'),
        ("flake.lock", '"systems": "systems"', '"systems": "nixpkgs"'),
    ],
)
def test_a_lock_that_does_not_match_is_found(flake: Path, name: str, old: str, new: str):
    file = flake / "flake" / name
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    assert flake_metadata(flake).returncode != 0


def test_variants_are_those_of_the_project():
    """Two backends, the stable ABI of torch 2.11: with the pinned kernel-builder that makes these eight."""
    computes = ("cpu", "cu126", "cu130", "cu132")
    expected = {f"torch-stable-abi211-{c}-{system}-linux" for c in computes for system in ("x86_64", "aarch64")}
    assert set(release.variants(builder.load_project())) == expected


@pytest.mark.slow
def test_ci_test_of_a_nix_build(tmp_path: Path):
    """`nix run .#ci-test`: tests and torch-ext and nothing else, with pytest, torch and kernels and nothing else."""
    for name in ("tests", "torch-ext"):
        shutil.copytree(ROOT / name, tmp_path / "source" / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copyfile(ROOT / "build.toml", tmp_path / "source" / "build.toml")
    for module in ("hypothesis", "diffusers", "transformers", "xdist"):
        (tmp_path / f"{module}.py").write_text("raise ImportError('not in a Nix build')\n")
    environment = {
        **os.environ,
        "LOCAL_KERNELS": f"someone/ltx-kernels={built_variant('cpu').parent}",
        "PYTHONPATH": str(tmp_path),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", str(tmp_path / "source" / "tests"), "-m", "kernels_ci"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-4000:]
    assert re.search(r"\b[1-9]\d\d+ passed", result.stdout)


def test_sources_of_a_nix_build():
    """A Nix build sees the files that build.toml lists, and Python files: the compiler opened no others.

    By the compiler's own account, for the CPU variant; test_build_config.py reads the includes of both backends.
    """
    project = builder.load_project()
    variant = built_variant("cpu")
    listed = {path.relative_to(ROOT).as_posix() for path in project.input_files("cpu")}
    ninja = ROOT / "build" / ".cache" / variant.name
    if not ninja.is_dir():
        pytest.skip(f"NOT RUN: {variant} was not built here")
    deps = subprocess.run([builder.find_ninja(), "-C", str(ninja), "-t", "deps"], capture_output=True, text=True).stdout
    opened = {Path(line.strip()) for line in deps.splitlines() if line.startswith(" ")}
    own = {p.relative_to(ROOT).as_posix() for p in opened if p.is_relative_to(ROOT) and ".cache" not in p.parts}
    own = {name for name in own if not name.startswith(".")}  # an environment in the checkout: torch's headers
    if not own:
        pytest.skip(f"NOT RUN: {variant} was built in another directory")
    assert own <= listed
