"""flake.nix and flake.lock, as far as that can be told without the network."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from build_checks import ROOT, builder, built_variant, release

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


LOCK = json.loads((ROOT / "flake.lock").read_text())


def test_lock_pins_the_builder():
    assert LOCK["version"] == 7
    assert LOCK["nodes"]["kernel-builder"]["locked"]["rev"] == KERNEL_BUILDER


def test_lock_matches_the_inputs():
    """Each input of flake.nix is locked to what its URL names, and nothing else is, or nix would write another lock."""
    expression = f"(import {ROOT / 'flake.nix'}).inputs"
    inputs = json.loads(nix_instantiate("--eval", "--strict", "--json", "-E", expression))
    assert lock_problems(inputs, LOCK) == []


def lock_problems(inputs: dict[str, dict[str, str]], lock: dict) -> list[str]:
    nodes, root = lock["nodes"], lock["nodes"][lock["root"]]
    problems = [f"{name} is not locked" for name in inputs.keys() - root["inputs"].keys()]
    problems += [f"{name} is locked, and no input" for name in root["inputs"].keys() - inputs.keys()]
    for name in inputs.keys() & root["inputs"].keys():
        kind, _, path = inputs[name]["url"].partition(":")
        names = dict(zip(("owner", "repo", "ref"), path.split("/"), strict=False))
        if nodes[root["inputs"][name]]["original"] != {"type": kind, **names}:
            problems.append(f"{name}: locked for {nodes[root['inputs'][name]]['original']}, not {inputs[name]['url']}")
    reached, waiting = set(), [lock["root"]]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            # A list is a path from the root, for an input that follows another.
            waiting += [target for target in nodes[node].get("inputs", {}).values() if isinstance(target, str)]
    problems += [f"{node} is not reached from an input" for node in nodes.keys() - reached]
    for name, node in nodes.items():
        if name == lock["root"]:
            continue
        locked, original = node["locked"], node["original"]
        if any(locked.get(key) != original[key] for key in ("type", "owner", "repo")):
            problems.append(f"{name}: locked to another repository than its input names")
        if not re.fullmatch(r"[0-9a-f]{40}", locked["rev"]) or locked["rev"] != original.get("rev", locked["rev"]):
            problems.append(f"{name}: {locked['rev']} is no revision of its input")
        if not re.fullmatch(r"sha256-[A-Za-z0-9+/]{43}=", locked["narHash"]):
            problems.append(f"{name}: no hash of its content")
    return problems


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda inputs, lock: inputs["kernel-builder"].update(url="github:huggingface/kernels/v1"), "locked for"),
        (lambda inputs, lock: inputs.update(nixpkgs={"url": "github:NixOS/nixpkgs"}), "nixpkgs is not locked"),
        (lambda inputs, lock: inputs.pop("kernel-builder"), "kernel-builder is locked, and no input"),
        (lambda inputs, lock: lock["nodes"]["systems"]["locked"].update(owner="other"), "another repository"),
        (lambda inputs, lock: lock["nodes"]["nixpkgs"]["locked"].update(rev="0" * 40), "no revision of its input"),
        (lambda inputs, lock: lock["nodes"].update(more=lock["nodes"]["systems"]), "more is not reached"),
    ],
)
def test_a_lock_that_does_not_match_is_found(change, problem: str):
    inputs, lock = {"kernel-builder": {"url": "github:huggingface/kernels"}}, copy.deepcopy(LOCK)
    assert lock_problems(inputs, lock) == []
    change(inputs, lock)
    assert any(problem in found for found in lock_problems(inputs, lock))


def test_variants_are_those_of_the_project():
    """Two backends, the stable ABI of torch 2.11: with the pinned kernel-builder that makes these eight."""
    computes = ("cpu", "cu126", "cu130", "cu132")
    expected = {f"torch-stable-abi211-{c}-{system}-linux" for c in computes for system in ("x86_64", "aarch64")}
    assert set(release.variants(builder.load_project())) == expected


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
