"""Every kernel and geometry of the CUDA code, chosen by LTX_KERNELS_FORCE (kernel_src/ltx/force.cuh).

The variable is read once a process, so each choice has one; there the outputs are checked against fp64. Kernels of one
geometry share the ownership of elements, so their bits are the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import assert_same_bits

CHILD = Path(__file__).parent / "helpers" / "forced.py"
Results = dict[str, "list[torch.Tensor] | str"]


def run_all(family: str, choices: list[str], directory: Path) -> list[Results]:
    with ThreadPoolExecutor(len(choices)) as pool:
        return list(pool.map(lambda choice: run(family, choice, directory), choices))


def run(family: str, choice: str, directory: Path) -> Results:
    path = directory / f"{choice or 'free'}.pt"
    process = subprocess.run(
        [sys.executable, str(CHILD), family, str(path)],
        env={**os.environ, "LTX_KERNELS_FORCE": choice},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, f"{choice}:\n{process.stdout[-2000:]}{process.stderr[-4000:]}"
    return torch.load(path)


def assert_alike(one: Results, other: Results, what: str, only: str = "") -> int:
    """The same bits where both ran; how many outputs that were."""
    compared = 0
    for key, outputs in one.items():
        if isinstance(outputs, str) or isinstance(other[key], str) or not key.startswith(only):
            continue
        for a, b in zip(outputs, other[key], strict=True):
            assert_same_bits(a, b, f"{key}, {what}")
            compared += 1
    return compared


def errors(results: Results) -> set[str]:
    return {outputs for outputs in results.values() if isinstance(outputs, str)}


def ran(results: Results, only: str, least: int = 1) -> bool:
    """Whether the calls with this in their name ran, all of them, and how many these are at least."""
    found = [outputs for key, outputs in results.items() if only in key]
    return len(found) >= least and not any(isinstance(outputs, str) for outputs in found)


def refused(choice: str) -> str:
    return f"LTX_KERNELS_FORCE: expected a kernel that takes this call's shapes, strides and dtypes, got {choice}"


@pytest.mark.parametrize("packs", [0, 1, 2, 4])
def test_norm(cuda: str, packs: int, tmp_path: Path) -> None:
    shared = f",norm_packs={packs}" if packs else ""
    kernels = ("general", "elements", "packed")
    general, *others = run_all("norm", [f"norm={kernel}{shared}" for kernel in kernels], tmp_path)
    for kernel, results in zip(kernels[1:], others, strict=True):
        assert assert_alike(results, general, f"{kernel} against general, {packs or 'any'} packs") > 100
        fits = f"LTX_KERNELS_FORCE: expected rows that fit, got norm_packs={packs}"
        allowed = {fits} if packs else set()
        if kernel == "packed":  # rows longer than the registers hold
            allowed.add(refused("norm=packed"))
        assert errors(results) <= allowed
        if not packs:
            assert ran(results, " by index", least=4)
            for op in ("adaln_layernorm", "gated_residual", "gated_residual_adaln_layernorm"):
                assert ran(results, f"{op} 2048 fp32 parameters")
            assert not isinstance(results["gated_residual_adaln_layernorm_pair torch.bfloat16 2048"], str)
    if not packs:
        assert assert_alike(run("norm", "", tmp_path), general, "free against general") == sum(
            map(len, general.values())
        )
        assert not errors(general)


def test_rotary(cuda: str, tmp_path: Path) -> None:
    kernels = ("general", "elements", "packed", "single")
    general, *others = run_all("rotary", [f"rotary={kernel}" for kernel in kernels], tmp_path)
    assert not errors(general)
    for kernel, results in zip(kernels[1:], others, strict=True):
        # One element a pack is another order of the norm's sums.
        assert assert_alike(results, general, f"{kernel} against general", only="ro" if kernel == "single" else "") > 50
        assert kernel == "packed" or not errors(results)
        assert ran(results, "qk_norm_rope [1, H, S, D/2]")
        assert ran(results, "qk_norm_rope [B, S, H*D]")


def test_glu(cuda: str, tmp_path: Path) -> None:
    general, packed, free = run_all("glu", ["glu=general", "glu=packed", ""], tmp_path)
    assert not errors(general)
    assert errors(packed) == {refused("glu=packed")}  # short rows that are not one long one: most of a block would idle
    assert assert_alike(packed, general, "packed against general") > 100
    assert assert_alike(free, general, "free against general") == sum(map(len, general.values()))


def test_attention(cuda: str, tmp_path: Path) -> None:
    """Tensor cores add in another order than the general kernel: each has its own bits, within the same bound."""
    general, packed, free = run_all("attention", ["attention=general", "attention=packed", ""], tmp_path)
    assert not errors(general)
    assert errors(packed) == {refused("attention=packed")}  # float32
    assert {key for key, outputs in packed.items() if isinstance(outputs, str)} == {k for k in packed if "float32" in k}
    assert not errors(free)
    assert assert_alike(free, packed, "free against packed") == 2 * len(packed) // 3
    assert assert_alike(free, general, "free against general", only="torch.float32") == len(packed) // 3


@pytest.mark.parametrize("packs", [0, 1, 2, 4])
def test_quantised(cuda: str, packs: int, tmp_path: Path) -> None:
    """The largest of a row is the same in any order; what the norm's sums give is, in one geometry."""
    shared = f",norm_packs={packs},quant_packs={packs}" if packs else ""
    choices = [f"norm={kernel},quant={kernel}{shared}" for kernel in ("general", "packed")]
    general, packed = run_all("quant", choices, tmp_path)
    assert assert_alike(packed, general, f"packed against general, {packs or 'any'} packs") > 20
    if not packs:
        assert ran(packed, " by index", least=5)
        assert ran(packed, "gate_heads False torch.bfloat16", least=5)
        free = run("quant", "", tmp_path)
        assert assert_alike(free, general, "free against general") == sum(map(len, general.values()))


@pytest.mark.parametrize("choice", ["norm=fast", "norm_packs=3", "nonsense", "norm=packed,", ",", "norm = packed"])
def test_unknown_choice(cuda: str, choice: str) -> None:
    code = (
        "import torch, kernels; ltx = kernels.get_kernel('org/ltx-kernels', version=1)\n"
        "ltx.rmsnorm(torch.ones(2, 64, device='cuda'))"
    )
    environment = {**os.environ, "LTX_KERNELS_FORCE": choice}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if choice == "norm=packed,":  # a trailing comma is no item
        assert process.returncode == 0
        return
    assert process.returncode != 0
    assert "LTX_KERNELS_FORCE: expected a choice that kernel_src/ltx/force.cuh lists, got '" in process.stderr


@pytest.mark.parametrize(
    ("choice", "call"),
    [
        ("norm=packed", "ltx.rmsnorm(torch.ones(2, 65, device='cuda')[:, 1:])"),
        ("norm=packed", "ltx.rmsnorm(torch.ones(2, 63, device='cuda'))"),
        ("norm_packs=1", "ltx.rmsnorm(torch.ones(2, 40000, device='cuda'))"),
        ("rotary=packed", "ltx.rope_1d(*2 * [torch.ones(1, 2, 1, 6, device='cuda', dtype=torch.bfloat16)])"),
        ("rotary=general", "ltx.rope_1d(*2 * [torch.ones(1, 2, 1, 6, device='cuda', dtype=torch.bfloat16)])"),
        ("glu=packed", "ltx.gelu(torch.ones(2, 65, device='cuda')[:, 1:])"),
        (
            "attention=packed",
            "x = torch.ones(1, 2, 1, 64, device='cuda'); ltx.qk_norm_cross_attention(x, x, x, None, None)",
        ),
    ],
)
def test_choice_that_a_call_cannot_use(cuda: str, choice: str, call: str) -> None:
    code = f"import torch, kernels; ltx = kernels.get_kernel('org/ltx-kernels', version=1)\n{call}"
    environment = {**os.environ, "LTX_KERNELS_FORCE": choice}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert process.returncode != 0
    assert "RuntimeError: LTX_KERNELS_FORCE: expected " in process.stderr
