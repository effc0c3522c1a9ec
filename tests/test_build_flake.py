"""flake.nix and flake.lock, as far as that can be told without the network."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from build_checks import ROOT

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


def test_lock_pins_the_builder():
    lock = json.loads(Path(ROOT / "flake.lock").read_text())
    assert lock["version"] == 7
    assert lock["nodes"]["root"]["inputs"] == {"kernel-builder": "kernel-builder"}
    node = lock["nodes"]["kernel-builder"]
    assert node["locked"]["rev"] == KERNEL_BUILDER
    assert (node["original"]["owner"], node["original"]["repo"]) == ("huggingface", "kernels")
