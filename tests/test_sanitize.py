"""Every op, dtype and geometry in small, for compute-sanitizer:

    LTX_TEST_GUARD=0 PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
        compute-sanitizer --tool memcheck --kernel-name kns=ltx python -m pytest tests/test_sanitize.py

and the same with racecheck, initcheck and synccheck. Nothing but this package's kernels and copies runs on the device:
tensors are made and compared on the CPU. So initcheck knows every write, although it looks at these kernels alone.
"""

from __future__ import annotations

import pytest
import torch
from helpers import (
    ACTIVATIONS,
    DTYPES,
    MODULATORS,
    NORM_OPS,
    TABLES,
    Case,
    Make,
    activation_case,
    assert_close_to_fp64,
    assert_same_bits,
    guarded_output,
    norm_case,
    qk_norm_rope_case,
    rope_case,
    rotary_case,
)
from torch import Tensor

pytestmark = pytest.mark.sanitize

# One row length, or head width, for each way that rows are shared out among threads: see kernel_src/*.cu.
NORM_WIDTHS = [1, 3, 8, 64, 250, 256, 512, 1024, 2050, 4096, 8192, 16384, 40000]
GLU_WIDTHS = [1, 7, 8, 250, 1024, 4096, 5001]
HEAD_WIDTHS = [2, 6, 8, 10, 64, 66, 96, 128, 256, 512, 1026, 4096]
ROWS = 3
WORKING_LAYOUTS = ["contiguous", "rows misaligned", "columns strided", "permuted"]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def copied(tensor: Tensor, device: str) -> Tensor:
    """The tensor with all of its storage on the device, gaps included, by one copy."""
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return flat.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def copied_back(tensor: Tensor) -> Tensor:
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    return flat.cpu().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def run(ltx, device: str, case: Case) -> None:
    """In each layout: new outputs against the fp64 truth, given ones against those, bit by bit."""
    truths, terms = case.truth(ltx), case.terms(ltx)
    eager = case.map(lambda tensor: tensor.float()).eager() if case.op in ("geglu", "swiglu", "gelu") else None
    for layout in WORKING_LAYOUTS:
        moved = case.in_layout(layout).map(lambda tensor: copied(tensor, device))
        outputs = [copied_back(output) for output in moved.run(ltx)]
        for i, output in enumerate(outputs):
            reference = None if eager is None else lambda i=i: eager[i]
            assert_close_to_fp64(output, truths[i], terms[i], eager=reference, what=f"{case.op} output {i}, {layout}")
        given = [guarded_output(output, layout) for output in outputs]
        views = [copied(guarded.view, device) for guarded in given]
        if case.output_names == ("out", "residual_out"):
            moved.run(ltx, out=views[0], residual_out=views[1])
        else:
            moved.run(ltx, out=tuple(views) if len(views) > 1 else views[0])
        for view, output in zip(views, outputs, strict=True):
            assert_same_bits(copied_back(view).contiguous(), output.contiguous(), f"{case.op} into {layout}")
        if "rounding" not in case.kwargs and case.op not in ("rope_1d", "rope_3d"):
            moved.replace(rounding="eager").run(ltx)


@pytest.mark.parametrize("op", NORM_OPS)
@every_dtype
def test_norms(ltx, device, op, dtype):
    tables = [name for name in MODULATORS if name in NORM_OPS[op]]
    for width in NORM_WIDTHS:
        make = Make("cpu", dtype, seed=width)
        run(ltx, device, norm_case(op, make, (2, ROWS, width), tables=tables))
        run(ltx, device, norm_case(op, make, (2, ROWS, width), param_dtype=torch.float32, modulation="[B, S, H]"))


@pytest.mark.parametrize("name", ACTIVATIONS)
@every_dtype
def test_activations(ltx, device, name, dtype):
    for width in GLU_WIDTHS:
        run(ltx, device, activation_case(name, Make("cpu", dtype, seed=width), (2, ROWS, width)))


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@every_dtype
def test_rotations(ltx, device, layout, dtype):
    for width in HEAD_WIDTHS:
        make = Make("cpu", dtype, seed=width)
        run(ltx, device, rotary_case(make, (2, 5, 3, width), layout=layout))
        run(ltx, device, rotary_case(make, (2, 5, 3, width), key=(4, 2), table="[S, D/2]", layout=layout))
        if width <= 512:
            run(ltx, device, rope_case(make, (2, 3, width), sequence=5, key_heads=1, layout=layout))
            run(ltx, device, rope_case(make, (2, 3, width), grid=(2, 1, 3), key_heads=1, layout=layout))
    for table in TABLES:
        run(ltx, device, rotary_case(Make("cpu", dtype), (2, 5, 3, 16), table=table, layout=layout))
    case = rotary_case(Make("cpu", dtype), (2, 5, 3, 80), rotary_dim=20, layout=layout)
    run(ltx, device, case.replace(rotary_dim=20))


@pytest.mark.parametrize("across_heads", [True, False])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@every_dtype
def test_norms_and_rotations(ltx, device, across_heads, layout, dtype):
    options = {"across_heads": across_heads, "layout": layout}
    for width in HEAD_WIDTHS:
        make = Make("cpu", dtype, seed=width)
        run(ltx, device, qk_norm_rope_case(make, (2, 5, 3, width), **options))
        run(ltx, device, qk_norm_rope_case(make, (1, 2, 3, width), key=(3, 1), weights=False, **options))
    for heads in (32, 100):
        table = "[S, H*D]" if across_heads else "[S, D/2]"
        run(ltx, device, qk_norm_rope_case(Make("cpu", dtype), (1, 2, heads, 64), table=table, **options))
