"""Every op, dtype and geometry in small, for compute-sanitizer: tests/sanitize.py (make sanitize) runs its tools.

Nothing but this package's kernels and copies runs on the device: tensors are made and compared on the CPU. So initcheck
knows every write, although it looks at these kernels alone.
"""

from __future__ import annotations

import pytest
import torch
from helpers import (
    ACTIVATIONS,
    CLAMPED,
    DTYPES,
    MASKS,
    MODEL_INDEX,
    MODULATORS,
    NORM_OPS,
    TABLES,
    Case,
    Make,
    activation_case,
    assert_close_to_fp64,
    assert_same_bits,
    attention_case,
    check_everywhere,
    gate_heads_case,
    model_index_case,
    norm_case,
    plain_attention_case,
    qk_norm_rope_case,
    rope_case,
    rotary_case,
    torch_threads,
)
from helpers.attention import has_kernel
from helpers.channels_last import order_of
from helpers.group_norm import OPERANDS, Image

pytestmark = pytest.mark.sanitize

# One row length, or head width, for each way that rows are shared out among threads: see kernel_src/*.cu.
NORM_WIDTHS = [3, 64, 250, 512, 2050, 4096, 8192, 16384, 40000, 70000]
GLU_WIDTHS = [1, 7, 8, 250, 1024, 4096, 5001]
HEAD_WIDTHS = [2, 6, 8, 64, 66, 128, 256, 1026, 4096]
ROWS = 3
OTHER_LAYOUTS = ["rows misaligned", "columns strided", "permuted"]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def run(ltx, device: str, *cases: Case, contiguous_alone: bool = False) -> None:
    """Contiguous; the first also in one of the other layouts in turn."""
    turn = sum(cases[0].inputs[0].shape) % len(OTHER_LAYOUTS)
    calls = [("contiguous", case) for case in cases]
    if not contiguous_alone:
        calls.append((OTHER_LAYOUTS[turn], cases[0]))
    with torch_threads(1):  # small tensors, and many processes
        for layout, case in calls:
            check_everywhere(ltx, case.in_layout(layout), device, out_layout=layout, repeat=False, eager=False)


@pytest.mark.slow
@pytest.mark.parametrize("op", NORM_OPS)
@every_dtype
def test_norms(ltx, device, op, dtype):
    tables = [name for name in MODULATORS if name in NORM_OPS[op]]
    for width in NORM_WIDTHS:
        make = Make("cpu", dtype, seed=width)
        mixed = norm_case(op, make, (2, ROWS, width), param_dtype=torch.float32, modulation="[B, S, H]")
        run(ltx, device, norm_case(op, make, (2, ROWS, width), tables=tables), mixed)


@pytest.mark.parametrize("op", MODEL_INDEX)
@every_dtype
def test_rows_by_index(ltx, device, op, dtype):
    for index_dtype in (torch.int64, torch.int32, torch.bool):
        run(ltx, device, model_index_case(op, Make("cpu", dtype), index_dtype=index_dtype))


@every_dtype
@pytest.mark.parametrize("per_head", [True, False])
def test_gates_of_heads(ltx, device, dtype, per_head):
    for width in HEAD_WIDTHS:
        run(ltx, device, gate_heads_case(Make("cpu", dtype, seed=width), (2, 5, 3, width), per_head=per_head))


@pytest.mark.parametrize("name", [*ACTIVATIONS, *CLAMPED])
@every_dtype
def test_activations(ltx, device, name, dtype):
    for width in GLU_WIDTHS:
        run(ltx, device, activation_case(name, Make("cpu", dtype, seed=width), (2, ROWS, width)))


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@every_dtype
def test_rotations(ltx, device, layout, dtype):
    for width in HEAD_WIDTHS:
        make = Make("cpu", dtype, seed=width)
        cases = [
            rotary_case(make, (2, 5, 3, width), key=(4, 2), table="[S, D/2]", layout=layout),
            rotary_case(make, (2, 5, 3, width), layout=layout),
        ]
        if width <= 512:
            cases.append(rope_case(make, (2, 3, width), sequence=5, key_heads=1, layout=layout))
            cases.append(rope_case(make, (2, 3, width), grid=(2, 1, 3), key_heads=1, layout=layout))
        run(ltx, device, *cases)
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
        other = qk_norm_rope_case(make, (1, 2, 3, width), key=(3, 1), weights=False, **options)
        run(ltx, device, qk_norm_rope_case(make, (2, 5, 3, width), **options), other)
    for heads in (32, 100):
        table = "[S, H*D]" if across_heads else "[S, D/2]"
        run(ltx, device, qk_norm_rope_case(Make("cpu", dtype), (1, 2, heads, 64), table=table, **options))


@every_dtype
def test_attention(ltx, device, dtype):
    """Widths that tensor cores take and others; less than a chunk of 128 keys, and several.

    Other layouts are copied for tensor cores, by kernels of torch, whose writes initcheck would not know."""
    for width in (1, 64, 72, 128, 256):
        alone = {"contiguous_alone": dtype != torch.float32 and width in (64, 128)}
        for keys, mask in ((7, "none"), (128, "left out"), (300, "addends")):
            make = Make("cpu", dtype, seed=width)
            packed = attention_case(make, (1, 3, 2, width), keys, packed=True, weights=False)
            run(ltx, device, attention_case(make, (2, 17, 3, width), keys, mask=mask), packed, **alone)
    for mask in MASKS:
        case = attention_case(Make("cpu", dtype), (2, 5, 3, 64), 20, mask=mask, mask_dtype=torch.float32)
        run(ltx, device, case, contiguous_alone=dtype != torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [64, 128])
def test_plain_attention(ltx, device, dtype, width):
    """The kernel that such heads have on Hopper: parts of tiles, several tiles for a block, tiles cut between blocks,
    masks, keys in pieces, and rows that it computes once more, for an infinite key."""
    if device == "cuda" and not has_kernel(ltx, device):
        pytest.skip("the kernel is for Hopper alone")
    for sizes, keys in (((2, 1, 3, width), 1), ((2, 70, 3, width), 140), ((1, 193, 2, width), 128)):
        make = Make("cpu", dtype, seed=keys)
        cases = [plain_attention_case(make, sizes, keys, packed=packed) for packed in (False, True)]
        run(ltx, device, *cases, contiguous_alone=True)
    run(ltx, device, plain_attention_case(Make("cpu", dtype), (1, 400, 67, width), 300), contiguous_alone=True)
    for sizes, key_heads in (((2, 65, 6, width), 2), ((1, 400, 67, width), 1)):
        causal = plain_attention_case(Make("cpu", dtype), sizes, sizes[1], key_heads=key_heads, is_causal=True)
        run(ltx, device, causal, contiguous_alone=True)
    mask = torch.ones(2, 300, dtype=torch.bool)
    mask[0, 130:] = mask[1, :200] = False
    masked = plain_attention_case(Make("cpu", dtype), (2, 70, 3, width), 300, mask=mask)
    lengths = masked.replace(mask=None, key_lengths=torch.tensor([300, 77], dtype=torch.int32))
    run(ltx, device, masked, lengths, contiguous_alone=True)
    pieces = plain_attention_case(Make("cpu", dtype), (2, 70, 3, width), 2100)
    lengths = pieces.replace(key_lengths=torch.tensor([1030, 77], dtype=torch.int32))
    run(ltx, device, pieces, lengths, contiguous_alone=True)


@every_dtype
def test_group_norms(ltx, device, dtype):
    """Groups in slices of packs, with and without idle threads, parts of a large group, and single elements."""
    for channels, groups, pixels in ((64, 32, (20, 15)), (96, 32, (5, 3)), (320, 2, (17, 16)), (30, 5, (257, 1))):
        for op in ("group_norm_residual", "group_norm", "upsample_nearest"):
            image = Image(op, (2, *pixels), channels, groups, dtype, tuple(OPERANDS))
            given = {
                name: value.contiguous(memory_format=order_of(value) if value.dim() > 2 else torch.contiguous_format)
                if isinstance(value, torch.Tensor)
                else value
                for name, value in image.arguments("cpu").items()
            }
            moved = {
                name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given.items()
            }
            result, h = getattr(ltx, op)(**moved), image.sum(given)
            if op == "upsample_nearest":
                assert_same_bits(result.cpu(), h.repeat_interleave(2, -2).repeat_interleave(2, -1), op)
                continue
            if op == "group_norm_residual":
                result, total = result
                assert_same_bits(total.cpu(), h, "sum")
            assert_close_to_fp64(result.cpu(), *image.truth(given, h), what=op)


@pytest.mark.slow
@every_dtype
def test_many_rows(ltx, device, dtype):
    """More blocks than run at a time, for kernels that fetch what a later block reads."""
    make = Make("cpu", dtype)
    rows = (2, 700, 2048)
    for op in ("rmsnorm", "gated_residual_adaln_rmsnorm"):
        run(ltx, device, norm_case(op, make, rows, modulation="vector"), contiguous_alone=True)
    run(ltx, device, activation_case("swiglu", make, rows), contiguous_alone=True)
    heads = (2, 700, 32, 64)
    run(ltx, device, qk_norm_rope_case(make, heads, across_heads=True, table="[S, H*D]"), contiguous_alone=True)
    run(ltx, device, rotary_case(make, heads, table="[S, D/2]", layout="half"), contiguous_alone=True)
