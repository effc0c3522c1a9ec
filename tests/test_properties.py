"""Random calls: see helpers/fuzz.py. The examples are the same in every run; `make fuzz N=50000` takes others."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("hypothesis")

from helpers import fuzz
from helpers.memory import GUARD, LAYOUTS, Guarded
from helpers.tally import Tally

CASES = 2400


@pytest.mark.parametrize("family", fuzz.FAMILIES)
def test_random_calls(ltx, device, family):
    tally = Tally()
    fuzz.run(ltx, device, family, int(CASES * fuzz.FAMILIES[family][1]), tally)
    assert tally.cases >= 0.9 * CASES * fuzz.FAMILIES[family][1]


def test_every_function_is_called(ltx, device, monkeypatch):
    """But those that call others of them, or torch's own products. The calls are drawn, and most are not made."""
    found = set()
    monkeypatch.setattr(fuzz, "check_everywhere", lambda _, case, *args, **options: found.add(case.op))
    for family in fuzz.FAMILIES:
        tally = Tally()
        fuzz.run(ltx, device, family, 1800 if family in ("norms", "quantised") else 300, tally)
        found |= {op for op, _ in tally.figures}
    others = {"LTXKernelsFp8Config", "kernel_mapping", "layers", "optimize", "restore", "split_batch", "reference"}
    others |= {"quantize_weight", "scaled_linear", "linear_cat"}
    assert set(ltx.__all__) - others == found


def norm(op: str, shape: tuple[int, ...], dtype: torch.dtype, values: str, **options: object) -> fuzz.Norm:
    memory = fuzz.Memory((), "contiguous", (), False, values, seed=0)
    defaults = {"param_dtype": torch.float32, "modulation_dtype": torch.float32, "modulations": ("vector",) * 3}
    defaults |= {"packed": False, "without": (), "tables": (), "same_residual": False, "weight_offset": 0.0}
    return fuzz.Norm(**{"op": op, "shape": shape, "dtype": dtype, "eps": None, "memory": memory, **defaults, **options})


FOUND = {
    "denormal products, which round in steps of 2^-149": norm(
        "gated_residual_adaln_rmsnorm", (1, 1, 127), torch.float32, "denormal", without=("shift",)
    ),
    "a weight half-way between two numbers, times rows of 1 and -1": norm(
        "rmsnorm", (3, 3, 3, 3, 1), torch.bfloat16, "normal", param_dtype=torch.float16, weight_offset=1.0
    ),
    "rows of one number, of which a rounded mean is another": norm(
        "layernorm", (3, 976), torch.bfloat16, "offset", eps=0.0
    ),
}


@pytest.mark.parametrize("what", FOUND)
def test_calls_that_random_ones_found(ltx, device, what):
    FOUND[what].check(ltx, device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shapes_without_elements_take_no_memory(layout):
    """Their strides may be as large as any."""
    shape = (65, 49, 70, 0, 254)
    assert Guarded(shape, torch.float32, "cpu", LAYOUTS[layout])._bits.numel() <= 2 * GUARD + 3
    assert math.prod(max(size, 1) for size in fuzz.bounded(shape)) <= fuzz.ELEMENTS


@pytest.mark.parametrize("shrink", [True, False])
def test_a_failure_names_its_call(shrink):
    """As Python that makes it again."""

    class Broken:
        def __getattr__(self, name):
            raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel") as error:
        fuzz.run(Broken(), "cpu", "activations", 50, Tally(), 3, shrink=shrink)
    assert any("example=Activation(name=" in note for note in error.value.__notes__)
