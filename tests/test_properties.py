"""Random calls: see helpers/fuzz.py. The examples are the same in every run; `make fuzz N=50000` takes others."""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis")

from helpers import fuzz
from helpers.tally import Tally

CASES = 2400


@pytest.mark.parametrize("family", fuzz.FAMILIES)
def test_random_calls(ltx, device, family):
    tally = Tally()
    fuzz.run(ltx, device, family, int(CASES * fuzz.FAMILIES[family][1]), tally)
    assert tally.cases >= 0.9 * CASES * fuzz.FAMILIES[family][1]


def test_every_function_is_called(ltx, device):
    """But those that call others of them, or torch's own matrix products."""
    found = set()
    for family in fuzz.FAMILIES:
        tally = Tally()
        fuzz.run(ltx, device, family, 300, tally)
        found |= {op for op, _ in tally.figures}
    others = {"kernel_mapping", "layers", "optimize", "restore", "reference", "quantize_weight", "scaled_linear"}
    assert set(ltx.__all__) - others == found
