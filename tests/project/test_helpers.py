"""The test library itself: what it is there to notice, it notices, and says where."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import (
    LAYOUTS,
    Case,
    Guarded,
    Make,
    assert_close_to_eager,
    assert_close_to_fp64,
    assert_same_bits,
    build_checks,
    check,
    check_everywhere,
    check_out,
    norm_case,
    place,
    plain_attention_case,
    ulp,
    unchanged,
)
from helpers.files import TESTS
from helpers.memory import GUARD
from torch import Tensor

SHAPE = (3, 4, 10)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_canaries(layout: str) -> None:
    """One number written outside of a view, wherever that is, is found; all of its own may be."""
    guarded = Guarded(SHAPE, torch.bfloat16, "cpu", LAYOUTS[layout])
    guarded.view.zero_()
    guarded.check()
    bits = guarded._bits
    inside = torch.zeros_like(bits, dtype=torch.bool)
    inside.as_strided(*guarded._where).fill_(True)
    outside = (~inside).nonzero().flatten().tolist()
    assert outside[0] == 0 and outside[-1] == len(bits) - 1 and len(outside) >= 2 * GUARD
    for element in outside:
        before = bits[element].clone()
        bits[element] = 0
        with pytest.raises(AssertionError, match=rf"at elements \[{element - guarded._where[2]}\] from its first"):
            guarded.check()
        bits[element] = before


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "contiguous"])
def test_poison(layout: str) -> None:
    """All memory around an input and between its rows is NaN."""
    x = place(torch.ones(SHAPE), layout)
    everything = torch.empty(0).set_(x.untyped_storage())
    assert int(everything.isnan().sum()) == everything.numel() - x.numel() >= 2 * GUARD


def test_an_input_that_was_written() -> None:
    """Even where it is no element of the tensor."""
    rows = torch.zeros(4, 8)
    with pytest.raises(AssertionError, match="x: its memory was modified"), unchanged(x=rows[:, :5]):
        rows[2, 6] = 1


def test_first_mismatch() -> None:
    """How many, the first, the worst, the numbers there and the bound."""
    truth = torch.ones(2, 3, dtype=torch.float64)
    wrong = truth.bfloat16()
    wrong[0, 2] += 2.0**-6
    wrong[1, 1] = math.nan
    with pytest.raises(AssertionError) as error:
        assert_close_to_fp64(wrong, truth, what="out")
    lines = str(error.value).splitlines()
    assert lines[0] == "out: 2 of 6 elements differ ((2, 3), torch.bfloat16)"
    assert lines[1].startswith("  first at [0, 2]: got 1.015625, expected 1.0; error 0.0156 (2 ulp), allowed 0.0078")
    assert lines[2].startswith("  worst at [")
    with pytest.raises(AssertionError, match=r"1 of 6 .*\n  first at \[1, 0\]: got -0\.0, expected 0\.0"):
        assert_same_bits(torch.tensor([[0, 0, 0], [-0.0, 0, 0]]), torch.zeros(2, 3))


@pytest.mark.parametrize(("dtype", "ulps"), [(torch.float32, 8), (torch.float16, 1), (torch.bfloat16, 1)])
def test_the_bound_is_as_wide_as_the_page_says(dtype: torch.dtype, ulps: int) -> None:
    x = torch.tensor([1.0, -3.0, 0.11, 2.0**-14], dtype=torch.float64).to(dtype).double()
    unit = ulp(x, dtype)
    assert_close_to_fp64((x + ulps * unit).to(dtype), x)
    with pytest.raises(AssertionError, match="4 of 4 elements"):
        assert_close_to_fp64((x + (ulps + 1) * unit).to(dtype), x)
    terms = unit * 2.0**21  # 8 * 2^-24 of them: one ulp
    assert_close_to_fp64((x + (ulps + 1) * unit).to(dtype), x, terms)
    with pytest.raises(AssertionError):
        assert_close_to_fp64((x + (ulps + 2) * unit).to(dtype), x, terms)


def test_flips_are_counted() -> None:
    """One of 10000 numbers may round the other way, if its terms allow; many may not, nor may one be far off."""
    eager = torch.ones(10000, dtype=torch.bfloat16)
    flipped = eager.clone()
    flipped[7] += 2.0**-7
    assert_close_to_eager(flipped, eager, torch.ones(10000).double())
    with pytest.raises(AssertionError, match="1 of 10000"):
        assert_close_to_eager(flipped, eager)
    flipped[7] = 1.25
    with pytest.raises(AssertionError, match="far from eager"):
        assert_close_to_eager(flipped, eager, torch.ones(10000).double())
    with pytest.raises(AssertionError, match="round otherwise"):
        assert_close_to_eager(eager + 2.0**-7, eager, torch.ones(10000).double())


def test_one_batch_of_a_call(ltx: Any) -> None:
    """With all that belongs to it, the number of its keys too."""
    lengths = torch.tensor([2, 4], dtype=torch.int32)
    case = plain_attention_case(Make("cpu", torch.float32), (2, 3, 2, 64), 5).replace(key_lengths=lengths)
    (whole,) = case.run(ltx.reference)
    for i in range(2):
        part = case.batch(i)
        assert part is not None
        torch.testing.assert_close(part.run(ltx.reference)[0], whole[i : i + 1])


# ---- Ops with a fault, each of another kind; the reference stands for the op


def scaled(x: Tensor, **_: Any) -> Tensor:
    return x * 1.01


def given_back(x: Tensor, **_: Any) -> Tensor:
    return x


def in_double(x: Tensor, **_: Any) -> Tensor:
    return x.double()


def columns_first(x: Tensor, **_: Any) -> Tensor:
    return x.mT.contiguous().mT


def not_repeatable(x: Tensor, calls: list[int], **_: Any) -> Tensor:
    calls.append(0)
    return torch.nextafter(x, x + len(calls) % 2)


def by_batch(x: Tensor, **_: Any) -> Tensor:
    return x if len(x) > 1 else torch.nextafter(x, x + 1)


def faulty(ltx: Any, fault: Any) -> Any:
    """A package whose rmsnorm has the fault."""
    calls: list[int] = []

    def rmsnorm(input: Tensor, weight: Tensor, out: Tensor | None = None, **options: Any) -> Tensor:
        result = fault(ltx.reference.rmsnorm(input, weight, **options), calls=calls)
        return result if out is None else out.copy_(result)

    return SimpleNamespace(rmsnorm=rmsnorm, reference=ltx.reference)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (scaled, "elements differ"),
        (in_double, "float64, expected torch.float32"),
        (columns_first, "memory order"),
        (not_repeatable, "of a second run|of the last batch alone"),
        (by_batch, "of the last batch alone"),
    ],
)
def test_faults_of_an_op(ltx: Any, fault: Any, told: str) -> None:
    case = norm_case("rmsnorm", Make("cpu", torch.float32), (2, 3, 16))
    check_everywhere(faulty(ltx, given_back), case, "cpu")
    with pytest.raises(AssertionError, match=told):
        check_everywhere(faulty(ltx, fault), case, "cpu")


def test_faults_of_outputs(ltx: Any) -> None:
    """An output that is the input's memory; one that is not the tensor that was given; one that runs over it."""
    case = Case("rmsnorm", {"input": torch.ones(2, 16)})
    aliased = SimpleNamespace(rmsnorm=lambda input: input, reference=ltx.reference)
    with pytest.raises(AssertionError, match="shares memory with input"):
        check(aliased, case)

    def another(input: Tensor, out: Tensor | None = None) -> Tensor:
        return ltx.reference.rmsnorm(input)

    with pytest.raises(AssertionError, match="not the tensor that was given"):
        check_out(SimpleNamespace(rmsnorm=another), case, "contiguous")

    def too_wide(input: Tensor, out: Tensor | None = None) -> Tensor:
        result = ltx.reference.rmsnorm(input)
        if out is None:
            return result
        out.as_strided((2, 17), out.stride()).fill_(0)
        return out.copy_(result)

    with pytest.raises(AssertionError, match="wrote outside"):
        check_out(SimpleNamespace(rmsnorm=too_wide), case, "contiguous")


PROGRAM = """
import signal, subprocess, sys

def test_program():
    code = "import signal; exit(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

def test_this_process():
    signal.raise_signal(signal.SIGINT)
"""


def test_programs_take_interrupts_where_they_are_ignored(tmp_path: Path) -> None:
    """As under nohup: the programs that tests start can be interrupted, and the tests go on."""
    (tmp_path / "test_it.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "test_it.py"]
    process = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN),
    )
    assert process.returncode == 0 and "2 passed" in process.stdout, process.stdout + process.stderr


def test_variants_that_a_run_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing variant is a failure, but one that `make test` does not build is a skip with its reason."""
    monkeypatch.setattr(build_checks, "ROOT", tmp_path)
    monkeypatch.setattr(build_checks, "VARIANTS", tmp_path / "build")
    monkeypatch.setattr(build_checks, "THIS_MACHINE", False)
    monkeypatch.setenv("CI", "true")
    for backend in ("cpu", "cuda"):
        with pytest.raises(pytest.fail.Exception, match=f"^no {backend} variant"):
            build_checks.built_variant(backend)
    monkeypatch.setattr(build_checks, "THIS_MACHINE", True)
    with pytest.raises(pytest.skip.Exception, match=r"^NOT RUN: no cuda variant in .* \(make test-variants\)"):
        build_checks.built_variant("cuda")
    variant = tmp_path / "build" / "torch-stable-abi211-cu130-x86_64-linux"
    variant.mkdir(parents=True)
    every = build_checks.builder.load_project().capabilities((13, 0))
    for archs, told in ((["9.0"], r"^NOT RUN: .* has the code of 9\.0 alone"), (every, None)):
        (variant / "metadata.json").write_text(json.dumps({"backend": {"type": "cuda", "archs": archs}}))
        if told is None:
            assert build_checks.built_variant("cuda") == variant
            continue
        with pytest.raises(pytest.skip.Exception, match=told):
            build_checks.built_variant("cuda")
    monkeypatch.setattr(build_checks.builder, "is_stale", lambda *_: True)
    with pytest.raises(pytest.skip.Exception, match=r"^NOT RUN: .* was made from other sources"):
        build_checks.built_variant("cuda")
    monkeypatch.setattr(build_checks, "THIS_MACHINE", False)
    assert build_checks.built_variant("cuda") == variant
