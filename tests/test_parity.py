"""The CPU and the CUDA variant, loaded in one process, on the same calls: each within its bound of fp64, so within both
of each other; and the same text for the same mistake."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from helpers import DTYPES, Case, Make, check, check_out, copied, every_case, norm_case, qk_norm_rope_case
from helpers.build import build_directory
from helpers.numeric import bound


@pytest.fixture(scope="module")
def on_cpu(cuda: str) -> ModuleType:
    from kernels import get_local_kernel

    directory = build_directory()
    assert directory is not None
    if not list(directory.glob("*-cpu-*")):
        pytest.skip(f"NOT RUN: no CPU variant in {directory}")
    return get_local_kernel(directory, backend="cpu")


def cases(dtype: torch.dtype) -> dict[str, Case]:
    make = Make("cpu", dtype)
    wide = {f"wide {op}": norm_case(op, make, (2, 9, 3072)) for op in ("rmsnorm", "gated_residual_adaln_layernorm")}
    heads = {"32 heads": qk_norm_rope_case(make, (2, 9, 32, 64), across_heads=True)}
    return {**every_case(make), **wide, **heads}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounding", ["fp32", "eager"])
@pytest.mark.parametrize("name", list(cases(torch.float32)))
def test_results(ltx: ModuleType, on_cpu: ModuleType, name: str, rounding: str, dtype: torch.dtype) -> None:
    case = cases(dtype)[name]
    if rounding == "eager":
        if not case.takes_rounding:
            pytest.skip("rounds once in any case")
        case = case.replace(rounding=rounding)
    there = copied("cpu", *case.on("cuda").run(ltx))
    for here, other, truth, terms in zip(case.run(on_cpu), there, case.truth(ltx), case.terms(ltx), strict=True):
        allowed = 2 * bound(truth, terms, dtype)
        if rounding == "eager":  # a number may round the other way in one of the steps
            allowed = allowed + 4 * torch.finfo(dtype).eps * (terms + truth.abs())
        if case.is_activation:  # where 1 + erf has few digits
            allowed = allowed + 2.0**-20
        assert bool(((here.double() - other.double()).abs() <= allowed).all())


def test_errors(ltx: ModuleType, on_cpu: ModuleType) -> None:
    for name, case in cases(torch.float32).items():
        first = next(iter(case.tensors))
        bad = case.replace(**{first: case.kwargs[first].long()})
        texts = []
        for module, call in ((on_cpu, bad), (ltx, bad.on("cuda"))):
            with pytest.raises(RuntimeError) as error:
                call.run(module)
            texts.append(str(error.value))
        assert texts[0] == texts[1], name


@pytest.mark.parametrize("name", list(cases(torch.float32)))
@pytest.mark.filterwarnings("ignore:ltx-kernels")
def test_cpu_tensors_with_cuda_variant(ltx: ModuleType, cuda: str, name: str) -> None:
    """The reference stands in on the device that the variant has no kernel for."""
    case = cases(torch.bfloat16)[name]
    check(ltx, case)
    check_out(ltx, case, "contiguous" if case.is_rotary else "rows misaligned")
