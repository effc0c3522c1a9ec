"""CUDA kernels compute what fp64 says: the general one of the norms, the row kernel by index, gradients, group norms.

No GPU is needed. A copy of the sources is built for the CPU, whose norms are these kernels as g++ compiles them: a
thread of the host for each of the GPU's (helpers/cuda_on_host.h). This shows wrong arithmetic and wrong columns; races
show only on a GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import test_backward
import test_quant
import test_row_sums
import torch
from helpers import (
    ACTIVATIONS,
    CLAMPED,
    DTYPES,
    MODEL_INDEX,
    MODULATORS,
    NORM_OPS,
    QUANTISED_NORMS,
    Make,
    activation_case,
    assert_same_bits,
    check,
    check_everywhere,
    gate_heads_case,
    index_case,
    model_index_case,
    norm_case,
    place,
    qk_norm_rope_case,
    rotary_case,
    without_index,
)
from helpers.build_checks import ROOT, builder
from helpers.group_norm import OPERANDS, Image
from mutations import copy_sources

pytestmark = pytest.mark.slow

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
HELPERS = ROOT / "tests" / "helpers"
WIDTHS = [8, 40, 250, 264, 1000]  # several rows a warp; a part of a pack; more than one warp
# What g++ does not take: launches, and four instructions of the GPU. The host runs launches of norm_kernel by index and
# of the kernels of gradients.
EDITS = [
    (
        "kernel_src/ltx/row/kernel.cuh",
        r"(norm_kernel<T, T, S, F, O, kOne\..*?>)\s*<<<grid, block, 0, stream>>>\(p\)",
        r"host::launch(grid, block, \1, p)",
    ),
    ("kernel_src/ltx/vec.cuh", r'(?s)P pack;\s*asm volatile\("ld\.global\.L1.*?\);', "P pack = *from;"),
    ("kernel_src/ltx/vec.cuh", r'(?s)asm volatile\("st\.global\.v4.*?\);', "*to = pack;"),
    ("kernel_src/ltx/row/kernel.cuh", r"<<<.*?>>>", ""),
    (
        "kernel_src/norm_backward.cu",
        r"(norm_backward_kernel<[^;]*?>)<<<grid, block, 0, stream>>>\(q\)",
        r"host::launch(grid, block, \1, q)",
    ),
    (
        "kernel_src/norm_backward.cu",
        r"(?s)(norm_backward_general<T, S>)<<<(.*?), block, 0, stream>>>\(",
        r"host::launch(dim3(\2), block, \1, ",
    ),
    (
        "kernel_src/glu_backward.cu",
        r"kernel<<<(.*), kThreads, 0, stream>>>\(",
        r"host::launch(dim3(\1), dim3(kThreads), kernel, ",
    ),
    (
        "kernel_src/row_sums.cu",
        r"(\w+_kernel(?:<T>)?)\s*<<<(\w+), (\w+), 0, stream>>>\(",
        r"host::launch(\2, dim3(\3), \1, ",
    ),
    (
        "kernel_src/rope_backward.cu",
        r"kernel<<<grid, block, 0, stream>>>\(",
        "host::launch(dim3(grid), block, kernel, ",
    ),
    ("kernel_src/ltx/activation.cuh", r'asm\("ex2.*;', "y = std::exp2(x);"),
    ("kernel_src/ltx/activation.cuh", r'asm\("rcp.*;', "y = 1.f / x;"),
    (
        "kernel_src/group_norm.cu",
        r"(\w+_kernel<[^<>]*>)\s*<<<(.+?), (k\w*Threads), 0, stream>>>\(a\)",
        r"host::launch(dim3(\2), dim3(\3), \1, a)",
    ),
    ("kernel_src/cpu/quant.cpp", r"void norm_quant(\(.*LTX_DISPATCH)", r"void rows_quant_on_cpu\1"),
]


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    from kernels import get_local_kernel

    toolkit = builder.find_cuda()
    if toolkit is None:
        pytest.skip("NOT RUN: CUDA's headers not found (python tools/build.py --cuda-from-pypi)")
    copy = tmp_path_factory.mktemp("on_host")
    copy_sources(copy)
    for name, old, new in EDITS:
        text, count = re.subn(old, new, (copy / name).read_text())
        assert count > 0, f"{name}: {old} not found"
        (copy / name).write_text(text)
    shutil.copy(HELPERS / "cuda_on_host.h", copy / "kernel_src" / "cpu" / "cuda_on_host.h")
    shutil.copy(HELPERS / "norm_on_host.cpp", copy / "kernel_src" / "cpu" / "norm.cpp")
    for name in ("norm_backward", "rope_backward", "row_sums", "glu_backward", "group_norm"):
        kernels = f'#include "cuda_on_host.h"\n#include "{name}.cu"\n'
        (copy / "kernel_src" / "cpu" / f"{name}.cpp").write_text(kernels)
    table, include = copy / "build.toml", toolkit.nvcc.parent.parent / "include"
    for name in ("norm", "norm_backward", "rope_backward", "row_sums", "glu_backward", "group_norm"):
        parts = re.split(rf"(\[kernel\.{name}_cpu\].*?cxx-flags = \[)", table.read_text(), flags=re.DOTALL)
        before, kernel, after = parts
        table.write_text(f'{before}{kernel}"-I{include}", "-pthread", "-fno-strict-aliasing", {after}')
    process = subprocess.run(
        [sys.executable, "tools/build.py", "--backend", "cpu"], cwd=copy, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one launch at a time
    yield get_local_kernel(copy / "build", backend="cpu")
    torch.set_num_threads(threads)


@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("op", sorted(NORM_OPS))
def test_rounded(on_host: ModuleType, op: str, width: int, dtype: torch.dtype) -> None:
    make = Make("cpu", dtype, seed=width)
    check_everywhere(on_host, norm_case(op, make, (2, 3, width)), "cpu", repeat=False)
    strided = norm_case(op, make, (2, 3, width), param_dtype=torch.float32).in_layout("columns strided")
    check_everywhere(on_host, strided, "cpu", repeat=False)


@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("op", sorted(NORM_OPS))
def test_eager(on_host: ModuleType, op: str, width: int, dtype: torch.dtype) -> None:
    """The reference rounds wherever the chain of torch ops does; a sum in another order moves few of its bits."""
    case = norm_case(op, Make("cpu", dtype, seed=width), (2, 3, width)).replace(rounding="eager")
    for got, expected in zip(case.run(on_host), case.run(on_host.reference), strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        else:
            assert (got != expected).float().mean() < 0.03
            torch.testing.assert_close(got.float(), expected.float(), rtol=0.02, atol=0.02)


@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("op", [op for op in NORM_OPS if set(NORM_OPS[op]) & set(MODULATORS)])
def test_rows_by_index(on_host: ModuleType, op: str, width: int, dtype: torch.dtype) -> None:
    """The bits of the call with a modulation for each row, written out."""
    make, tables = Make("cpu", dtype, seed=width), [name for name in MODULATORS if name in NORM_OPS[op]]
    for case in (
        index_case(op, make, (2, 5, width), tables=tables),
        index_case(op, make, (2, 5, width), per_batch=True, index_dtype=torch.int32),
        index_case(op, make, (2, 5, width), rows=2, index_shape=(5,), index_dtype=torch.bool),
        index_case(op, make, (2, 5, width), modulation_dtype=torch.float32).in_layout("columns strided"),
    ):
        check_everywhere(on_host, case, "cpu", repeat=False)
        calls = case, without_index(case)
        results = [call.run(on_host) for call in calls]
        if op in QUANTISED_NORMS and op != "gated_residual":  # which quant.cu has
            test_quant.check(on_host, case)
            results = [(*result, *test_quant.run(on_host, call)) for result, call in zip(results, calls, strict=True)]
        for output, want in zip(*results, strict=True):
            assert_same_bits(output, want, op)


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize(("op", "width"), [*((op, None) for op in MODEL_INDEX), ("adaln_rmsnorm", 3584)])
def test_row_kernel_by_index(on_host: ModuleType, op: str, width: int | None, index_dtype: torch.dtype) -> None:
    """The bits of the general kernel, which runs where a modulation for each row is written out."""
    case = model_index_case(op, Make("cpu", torch.bfloat16), width, index_dtype=index_dtype)
    results = [check(on_host, case), without_index(case).run(on_host)]
    if op in QUANTISED_NORMS and op != "gated_residual":  # which quant.cu has
        results[0] = (*results[0], *test_quant.check(on_host, case))
        results[1] = (*results[1], *test_quant.run(on_host, without_index(case)))
    for output, want in zip(*results, strict=True):
        assert_same_bits(output, want, op)


@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("op", [op for op in QUANTISED_NORMS if op != "gated_residual"])  # which quant.cu has
def test_quantised(on_host: ModuleType, op: str, width: int, dtype: torch.dtype) -> None:
    make, tables = Make("cpu", dtype, seed=width), [name for name in MODULATORS if name in NORM_OPS[op]]
    test_quant.check(on_host, norm_case(op, make, (2, 3, width)))
    test_quant.check(on_host, norm_case(op, make, (2, 3, width), tables=tables).in_layout("rows misaligned"))
    each = norm_case(op, make, (2, 3, width), param_dtype=torch.float32, modulation="[B, S, H]")
    test_quant.check(on_host, each.in_layout("columns strided"), torch.tensor(0.02))


@every_dtype
@pytest.mark.parametrize("width", [*WIDTHS, 2048])
@pytest.mark.parametrize("op", sorted(NORM_OPS))
def test_gradients_of_norms(on_host: ModuleType, op: str, width: int, dtype: torch.dtype) -> None:
    """Whole packs, and the general kernel with the same bits."""
    make, tables = Make("cpu", dtype, seed=width), [name for name in MODULATORS if name in NORM_OPS[op]]
    for case in (norm_case(op, make, (2, 3, width)), norm_case(op, make, (2, 3, width), tables=tables)):
        packed = test_backward.check(on_host, case)
        general = test_backward.check(on_host, case.in_layout("columns strided"))
        for name, gradient in general.items():
            assert_same_bits(gradient, packed[name], name)
    each = norm_case(op, make, (2, 3, width), param_dtype=torch.float32, modulation_dtype=torch.float32)
    test_backward.check(on_host, each)
    if set(NORM_OPS[op]) & set(MODULATORS):
        test_backward.check(on_host, norm_case(op, make, (2, 3, width), modulation="[B, S, H]"))
        test_backward.check(on_host, index_case(op, make, (2, 5, width), tables=tables))


@every_dtype
@pytest.mark.parametrize("statistic", [test_row_sums.NONE, test_row_sums.RMS, test_row_sums.LAYER])
def test_sums_over_rows(on_host: ModuleType, statistic: int, dtype: torch.dtype) -> None:
    """Whole packs, and single columns with the same bits."""
    for shape in ((2, 130, 64), (1, 3, 264), (3, 70, 8)):
        make = Make("cpu", dtype, seed=shape[-1])
        grad, rows = make(*shape), make(*shape)
        packed = test_row_sums.check(on_host, grad, rows, statistic)
        general = test_row_sums.check(on_host, place(grad, "columns strided"), rows, statistic)
        for got, want in zip(general, packed, strict=True):
            assert_same_bits(got, want, str(shape))


@every_dtype
@pytest.mark.parametrize("form", test_backward.ROTARY)
def test_gradients_of_rotations(on_host: ModuleType, form: str, dtype: torch.dtype) -> None:
    """Whole packs, and single elements with the same bits; a key of other tokens and heads; two packs a thread."""
    rotary, make = test_backward.ROTARY[form], Make("cpu", dtype)
    cases = [rotary_case(make, (2, 5, 3, 16), key=(4, 7), **rotary)]
    for norm in ({"across_heads": True}, {"across_heads": False}, {"across_heads": True, "norm": "layer"}):
        cases.append(qk_norm_rope_case(make, (2, 5, 3, 16), key=(4, 7), weight_offset=1.0, **norm, **rotary))
    cases.append(qk_norm_rope_case(make, (2, 2, 3, 704), key=(3, 1), across_heads=True, **rotary))
    for case in cases:
        packed = test_backward.check(on_host, case)
        for name, gradient in test_backward.check(on_host, case.in_layout("columns strided")).items():
            assert_same_bits(gradient, packed[name], name)


@pytest.mark.parametrize("across", [False, True], ids=["per head", "across heads"])
def test_rotation_of_an_empty_key(on_host: ModuleType, across: bool) -> None:
    test_backward.test_empty_key(on_host, "cpu", across)


@every_dtype
@pytest.mark.parametrize("name", [*ACTIVATIONS, *CLAMPED, "gate_heads per head", "gate_heads per column"])
def test_gradients_of_activations(on_host: ModuleType, name: str, dtype: torch.dtype) -> None:
    for width in (8, 34, 64, 512, 520):
        make = Make("cpu", dtype, seed=width)
        if name.startswith("gate_heads"):
            case = gate_heads_case(make, (2, 3, 5, width), per_head=name.endswith("head"), scale=2.0)
        else:
            case = activation_case(name, make, (2, 3, width))
        packed = test_backward.check(on_host, case)
        general = test_backward.check(on_host, case.in_layout("columns strided"))
        for key, gradient in general.items():
            assert_same_bits(gradient, packed[key], key)


@every_dtype
def test_group_norm(on_host: ModuleType, dtype: torch.dtype) -> None:
    """Whole groups in slices, parts of a large group, and single elements; two chunks; a mean that is large."""
    every = tuple(OPERANDS)
    for channels, groups in ((24, 8), (320, 2), (10, 2), (261, 1)):
        options = {"operands": every, "silu": True, "per_image": True, "in_place": "input"}
        Image("group_norm_residual", (2, 5, 3), channels, groups, dtype, **options).check(on_host, "cpu")
        Image("group_norm", (1, 20, 15), channels, groups, dtype, every[:4], mean=1000.0).check(on_host, "cpu")
    for channels in (16, 3):
        Image("upsample_nearest", (2, 2, 3, 2), channels, 1, dtype, every[:3], scale=(3, 2)).check(on_host, "cpu")


def test_group_norm_of_outliers(on_host: ModuleType) -> None:
    for pixel in (0, -1, 256):
        image = Image("group_norm", (1, 40, 40), 8, 2, torch.float32)
        given = image.arguments("cpu")
        given["input"].permute(0, 2, 3, 1).flatten(1, 2)[:, pixel] = 100.0
        image.check_norm(on_host, given, given["input"], on_host.group_norm(**given))
