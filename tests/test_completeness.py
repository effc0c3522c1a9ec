"""A new op or function that was forgotten somewhere: each test names what is missing, and where.

tests/test_properties.py does the same for the random calls.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from helpers import Make, every_function
from helpers.build import ROOT
from helpers.registry import FUNCTIONS, SCHEMAS, WITH_OUT, WITHOUT_GRADIENT

# Products of torch and cuBLASLt, which are no ops of their own: tests/test_linear.py and benchmarks/fp8_gemm.py.
LINEAR = {"linear_cat", "quantize_weight", "scaled_linear"}


def test_every_schema_has_its_plain_torch(ltx: Any) -> None:
    """Fakes, the reference on the other device, and gradients: all from `BODIES`."""
    ops = {name for name in SCHEMAS if not name.endswith("_out")} - {"has_attention"}  # which takes no tensor
    assert set(ltx._fakes.BODIES) == ops


def test_every_function_has_a_case() -> None:
    assert set(every_function(Make("cpu", torch.float32))) == set(FUNCTIONS)


def test_every_function_has_its_reference(ltx: Any) -> None:
    assert set(ltx.reference.__all__) == set(FUNCTIONS) - LINEAR
    assert ltx.__all__ == sorted(ltx.__all__)
    assert ltx.reference.__all__ == sorted(ltx.reference.__all__)
    assert all(hasattr(module, name) for module in (ltx, ltx.reference) for name in module.__all__)


def test_every_function_has_a_formula_for_its_gradients() -> None:
    import test_compile

    functions = {re.split(r"\W", name)[0] for name in test_compile.CASES}
    assert functions == set(FUNCTIONS) - WITHOUT_GRADIENT - LINEAR - {"attention"}  # see test_plain_attention.py


@pytest.mark.host
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_gradient_or_an_error(ltx: Any, device: str, name: str) -> None:
    """As the package's docstring says. quantize_weight detaches."""
    case = every_function(Make(device, torch.float32))[name]
    for tensor in case.tensors.values():
        if tensor.dtype in (torch.float32, torch.bfloat16):
            tensor.requires_grad_()
    if name in WITHOUT_GRADIENT:
        with pytest.raises(RuntimeError, match="expected no gradient to be needed"):
            case.run(ltx)
    else:
        assert all(result.requires_grad == (name != "quantize_weight") for result in case.run(ltx))


def test_every_op_is_checked_by_opcheck() -> None:
    """Ops with an `_out` twin in test_compile.py, which needs no list."""
    import test_backward
    import test_quant
    import test_row_sums

    listed = {*test_quant.OPS, *test_backward.OPS, *test_row_sums.OPS}
    checked = {*WITH_OUT, *listed, *(name for name in SCHEMAS if "attention" in name)}
    assert {name for name in SCHEMAS if not name.endswith("_out")} <= checked


@pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="a Nix build has no benchmarks")
def test_every_function_is_measured() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import op_cases
    import plots

    measured = {op.function for op in op_cases.OPS}
    # vae.py measures what decoders of video need.
    video = {"channel_norm", "channel_norm_residual", "pixel_shuffle_3d", "unpatchify"}
    assert set(FUNCTIONS) - measured == LINEAR | video
    assert all(plots.family(op.name or op.function) for op in op_cases.OPS)


@pytest.mark.skipif(not (ROOT / "README.md").is_file(), reason="a Nix build has no documents")
def test_every_function_is_documented() -> None:
    text = "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    assert [name for name in FUNCTIONS if f"`{name}" not in text and f"ltx.{name}" not in text] == []
