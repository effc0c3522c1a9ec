"""rope_1d, rope_3d, apply_rotary, apply_rotary_qk and qk_norm_rope."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    DTYPES,
    LAYOUTS,
    TABLES,
    Case,
    Make,
    angle_table,
    assert_close_to_fp64,
    assert_same_bits,
    check,
    check_eager,
    check_out,
    place,
    qk_norm_rope_case,
    rope_case,
    rotary_case,
    torch_threads,
)

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_pairing = pytest.mark.parametrize("layout", ["interleaved", "half"])
every_memory_layout = pytest.mark.parametrize("memory", LAYOUTS)

HEAD_WIDTHS = [2, 4, 6, 8, 10, 16, 30, 34, 64, 66, 96, 100, 128, 130, 256, 512]
SIZES = (2, 5, 3, 8)  # batch, sequence, heads, D: no two alike, so that no two table forms look alike


def cases(make: Make, layout: str = "interleaved", sizes: tuple[int, int, int, int] = (2, 5, 3, 16)) -> dict[str, Case]:
    """One call of each function on tensors of the same sizes."""
    b, s, h, d = sizes
    return {
        "apply_rotary": rotary_case(make, sizes, layout=layout),
        "apply_rotary, heads first": rotary_case(make, sizes, heads_first=True, layout=layout),
        "apply_rotary_qk": rotary_case(make, sizes, key=(s + 2, h + 1), table="[S, D/2]", layout=layout),
        "qk_norm_rope across heads": qk_norm_rope_case(
            make, sizes, across_heads=True, table="[S, H*D]", eps=0.01, layout=layout
        ),
        "qk_norm_rope per head": qk_norm_rope_case(
            make, sizes, across_heads=False, key=(s + 2, h + 1), eps=0.01, layout=layout
        ),
        "qk_norm_rope per head, layer": qk_norm_rope_case(
            make, sizes, across_heads=False, norm="layer", biases=True, key=(s + 2, h + 1), eps=0.01, layout=layout
        ),
        "rope_1d": rope_case(make, (b, h, d), sequence=s, key_heads=h + 1, layout=layout),
        "rope_3d": rope_case(make, (b, h, d), grid=(1, s, 1), key_heads=h + 1, layout=layout),
    }


every_function = pytest.mark.parametrize("name", cases(Make("cpu", torch.float32)))


def rotate(x: torch.Tensor, angle: torch.Tensor, layout: str) -> torch.Tensor:
    """x [..., D] turned pair by pair by angle [..., D / 2], as multiplication of complex numbers."""
    if layout == "interleaved":
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    else:
        pairs = torch.complex(*x.chunk(2, -1))
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    if layout == "interleaved":
        return torch.view_as_real(turned).flatten(-2)
    return torch.cat((turned.real, turned.imag), -1)


# ---- The definition: ltx.reference against complex numbers


@every_pairing
def test_reference_rope_1d(ltx, device, layout):
    """angle = position * theta^(-2i / D)."""
    make = Make(device, torch.float64)
    q, k = make(2, 9, 3, 12), make(2, 9, 1, 12)
    for theta in (10000.0, 50.0):
        inverse = torch.tensor([theta ** (-2 * i / 12) for i in range(6)], device=device, dtype=torch.float64)
        angle = torch.arange(9, device=device, dtype=torch.float64)[:, None, None] * inverse
        got = ltx.reference.rope_1d(q, k, theta, layout=layout)
        for output, x in zip(got, (q, k), strict=True):
            torch.testing.assert_close(output, rotate(x, angle, layout), rtol=1e-5, atol=1e-5)


@every_pairing
@pytest.mark.parametrize("width", [6, 12, 16, 64, 128])
def test_reference_rope_3d(ltx, device, layout, width):
    """Frames slowest; each axis has its own exponent; two thirds of the channels for t and h, the rest for w."""
    make = Make(device, torch.float64)
    grid = (2, 3, 4)
    q, k = make(2, 24, 3, width), make(2, 24, 3, width)
    third = 2 * (width // 3 // 2)
    for dims in (None, (2, width - 4, 2)):
        for theta in (10000.0, (10000.0, 100.0, 7.0)):
            bases = theta if isinstance(theta, tuple) else (theta,) * 3
            angles = torch.zeros((*grid, width // 2), device=device, dtype=torch.float64)
            begin = 0
            for axis, channels in enumerate(dims or (third, third, width - 2 * third)):
                for j in range(channels // 2):
                    shape = [1, 1, 1]
                    shape[axis] = grid[axis]
                    position = torch.arange(grid[axis], device=device, dtype=torch.float64).view(shape)
                    angles[..., begin + j] = position * bases[axis] ** (-2 * j / channels)
                begin += channels // 2
            got = ltx.reference.rope_3d(q, k, *grid, theta, rope_dims=dims, layout=layout)
            for output, x in zip(got, (q, k), strict=True):
                expected = rotate(x, angles.reshape(24, 1, -1), layout)
                torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@every_pairing
def test_reference_apply_rotary(ltx, device, layout):
    make = Make(device, torch.float64)
    x, angle = make(2, 5, 3, 8), make(5, 4)
    expected = rotate(x, angle[:, None], layout)
    cos, sin = angle.cos(), angle.sin()
    got = ltx.reference.apply_rotary(x, cos, sin, layout=layout)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    if layout == "interleaved":
        full = [t.repeat_interleave(2, -1) for t in (cos, sin)]
    else:
        full = [torch.cat((t, t), -1) for t in (cos, sin)]
    torch.testing.assert_close(ltx.reference.apply_rotary(x, *full, layout=layout), expected, rtol=1e-12, atol=1e-12)
    first = ltx.reference.apply_rotary(x.transpose(1, 2), *full, sequence_dim=2, layout=layout)
    torch.testing.assert_close(first, expected.transpose(1, 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("across_heads", [True, False])
def test_reference_qk_layer_norm_rope(ltx, device, across_heads):
    make = Make(device, torch.float64)
    q, k, angle = make(2, 5, 3, 8), make(2, 5, 2, 8), make(5, 4)
    widths = (24, 16) if across_heads else (8, 8)
    weights, biases = [make(n) for n in widths], [make(n) for n in widths]
    got = ltx.reference.qk_norm_rope(
        q, k, *weights, angle.cos(), angle.sin(), (0.3, 0.7), across_heads=across_heads, norm="layer",
        query_bias=biases[0], key_bias=biases[1], weight_offset=0.5,
    )  # fmt: skip
    for output, x, weight, bias, eps in zip(got, (q, k), weights, biases, (0.3, 0.7), strict=True):
        flat = x.flatten(-2) if across_heads else x
        n = F.layer_norm(flat, flat.shape[-1:], weight + 0.5, bias, eps).view(x.shape)
        torch.testing.assert_close(output, rotate(n, angle[:, None], "interleaved"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("across_heads", [True, False])
def test_reference_qk_norm_rope(ltx, device, across_heads):
    make = Make(device, torch.float64)
    q, k, angle = make(2, 5, 3, 8), make(2, 5, 2, 8), make(5, 4)
    weights = (make(24), make(16)) if across_heads else (make(8), make(8))
    got = ltx.reference.qk_norm_rope(q, k, *weights, angle.cos(), angle.sin(), 0.3, across_heads=across_heads)
    for output, x, weight in zip(got, (q, k), weights, strict=True):
        flat = x.flatten(-2) if across_heads else x
        n = F.rms_norm(flat, flat.shape[-1:], weight, 0.3).view(x.shape)
        torch.testing.assert_close(output, rotate(n, angle[:, None], "interleaved"), rtol=1e-12, atol=1e-12)


def test_defaults(ltx, device):
    """theta 10000, interleaved, sequence_dim 1, eps 1e-6."""
    make = Make(device, torch.float32)
    q, k = make(2, 6, 3, 8), make(2, 6, 3, 8)

    def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> None:
        for x, y in zip(a, b, strict=True):
            assert_same_bits(x, y)

    same(ltx.rope_1d(q, k), ltx.rope_1d(q, k, 10000.0, layout="interleaved", positions=torch.arange(6, device=device)))
    same(ltx.rope_3d(q, k, 1, 2, 3), ltx.rope_3d(q, k, 1, 2, 3, (1e4, 1e4, 1e4), rope_dims=(2, 2, 4)))
    cos, sin = make(6, 8), make(6, 8)
    same((ltx.apply_rotary(q, cos, sin),), (ltx.apply_rotary(q, cos, sin, sequence_dim=-3, layout="interleaved"),))
    small = q * 1e-3
    explicit = ltx.qk_norm_rope(small, k, None, None, cos, sin, 1e-6, across_heads=True, layout="interleaved")
    same(ltx.qk_norm_rope(small, k, None, None, cos, sin, across_heads=True), explicit)
    other = ltx.qk_norm_rope(small, k, None, None, cos, sin, None, across_heads=True)
    assert not torch.equal(other[0], explicit[0])


# ---- fp64 truth


@pytest.mark.kernels_ci
@every_function
@every_dtype
@every_pairing
def test_basic(ltx, device, name, dtype, layout):
    check(ltx, cases(Make(device, dtype), layout)[name])


@every_dtype
@every_pairing
@pytest.mark.parametrize("width", HEAD_WIDTHS)
def test_head_widths(ltx, device, dtype, layout, width):
    for case in cases(Make(device, dtype), layout, (2, 3, 3, width)).values():
        check(ltx, case)


@every_dtype
@every_pairing
@pytest.mark.parametrize("width", [768, 1026, 2048, 2050, 6144, 12288, 40000])
def test_very_wide_heads(ltx, device, dtype, layout, width):
    """Inner widths before the heads are split, and more columns than a block has threads."""
    make = Make(device, dtype)
    check(ltx, rotary_case(make, (2, 3, 1, width), layout=layout))
    check(ltx, rotary_case(make, (1, 2, 2, width), table="[S, D/2]", layout=layout))
    for across_heads in (True, False):
        check(ltx, qk_norm_rope_case(make, (1, 2, 2, width), key=(3, 1), across_heads=across_heads, layout=layout))


@every_dtype
@pytest.mark.parametrize(
    ("heads", "width"),
    [
        (1, 64),
        (2, 2),
        (3, 10),
        (5, 64),
        (32, 64),
        (32, 128),
        (24, 128),
        (1, 2048),
        (64, 128),
        (40, 128),
        (100, 130),
        (7, 1024),
        (313, 128),
        (2000, 4),
    ],
)
def test_rows_across_heads(ltx, device, dtype, heads, width):
    """LTX-Video is 32 x 64, LTX-2 and Wan 14B are 32 x 128 and 40 x 128."""
    make = Make(device, dtype)
    for table in ("[S, H*D]", "[S, D]") if heads > 1 else ("[S, D]",):
        for layout in ("interleaved", "half"):
            check(ltx, qk_norm_rope_case(make, (2, 3, heads, width), across_heads=True, table=table, layout=layout))
    check(ltx, qk_norm_rope_case(make, (2, 3, heads, width), across_heads=True, key=(5, heads // 2 + 1)))


@every_dtype
@every_pairing
@pytest.mark.parametrize("table", TABLES)
def test_table_forms(ltx, device, dtype, layout, table):
    """Every shape of table, fp32 or in the input's dtype, for both orders of dimensions and each function."""
    make = Make(device, dtype)
    per_head = "H" in table
    for table_dtype in {torch.float32, dtype}:
        options = {"table": table, "table_dtype": table_dtype, "layout": layout}
        check(ltx, rotary_case(make, SIZES, **options))
        check(ltx, rotary_case(make, SIZES, heads_first=True, **options))
        key = None if table == "[1, D]" else (4, 3 if per_head else 7)
        if key:
            check(ltx, rotary_case(make, SIZES, key=key, **options))
            check(ltx, rotary_case(make, SIZES, key=key, heads_first=True, **options))
        check(ltx, qk_norm_rope_case(make, SIZES, across_heads=True, key=key, **options))
        check(ltx, qk_norm_rope_case(make, SIZES, across_heads=False, key=key, **options))


@every_dtype
@every_pairing
@pytest.mark.parametrize("table", TABLES)
def test_table_forms_of_whole_packs(ltx, device, dtype, layout, table):
    """Heads that whole packs make up, also with weights in fp32."""
    make = Make(device, dtype)
    sizes = (2, 6, 3, 64)
    for table_dtype in {torch.float32, dtype}:
        options = {"table": table, "table_dtype": table_dtype, "layout": layout}
        check(ltx, rotary_case(make, sizes, **options))
        for weight_dtype in {torch.float32, dtype}:
            check(ltx, qk_norm_rope_case(make, sizes, across_heads=False, weight_dtype=weight_dtype, **options))


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("name", ["cos", "sin"])
def test_tables_that_are_no_pair(ltx, device, count, name):
    query, key = torch.randn(2, 1, 5, 2, 16, device=device).unbind()
    tables = {"cos": torch.ones(5, 8, device=device), "sin": torch.zeros(5, 8, device=device)}
    tables[name] = (tables[name],) * count
    got = f"got tuple of {', '.join(['Tensor'] * count) or 'nothing'}"
    for functions in (ltx, ltx.reference):
        with pytest.raises(TypeError, match=rf"^{name}: expected a tensor or a \(query, key\) pair of tensors, {got}$"):
            functions.qk_norm_rope(query, key, None, None, *tables.values(), across_heads=False)


def test_a_table_of_as_many_heads_as_tokens(ltx, device):
    """It is [B, H, S, D]: no shape tells it from [B, S, H, D]."""
    sizes = (2, 4, 4, 8)
    make = Make(device, torch.float32)
    for heads_first in (False, True):
        check(ltx, rotary_case(make, sizes, heads_first=heads_first, table="[B, H, S, D/2]"))
    check(ltx, qk_norm_rope_case(make, sizes, across_heads=False, table="[B, H, S, D/2]"))


@every_dtype
@pytest.mark.parametrize("across_heads", [True, False])
@pytest.mark.parametrize(
    "table", ["[S, D]", "[B, S, D]", "[B, H, S, D/2]", "[1, S, 1, D]", "[S, H*D]", "[B, S, H*D/2]"]
)
def test_own_table_of_the_key(ltx, device, dtype, across_heads, table):
    """Audio and video streams of LTX-2: query and key differ in length, heads and angles."""
    make = Make(device, dtype)
    for key in ((7, 3), (4, 5), (5, 3)):
        check(ltx, qk_norm_rope_case(make, SIZES, across_heads=across_heads, key=key, table=table, key_table=True))


@every_pairing
def test_tables_that_share_memory(ltx, device, layout):
    """cos expanded where sin is not, and the reverse; pairs of tables with one cos or one sin; both in one tensor."""
    make = Make(device, torch.float32)
    apply, norm = (
        rotary_case(make, SIZES, layout=layout),
        qk_norm_rope_case(make, SIZES, across_heads=True, layout=layout),
    )
    cos, sin = make(5, 8), make(5, 8)
    for c, s in ((cos[:1].expand(5, 8), sin), (cos, sin[:1].expand(5, 8)), (cos[:, :1].expand(5, 8), sin), (cos, cos)):
        check(ltx, apply.replace(cos=c, sin=s))
        check(ltx, norm.replace(cos=c, sin=s))
    other = make(5, 8)
    for c, s in (((cos, cos), (sin, other)), ((cos, other), (sin, sin)), ((cos, sin), (sin, cos))):
        check(ltx, norm.replace(cos=c, sin=s))
    both = make(5, 8, 2)
    strided = both.view(5, 16)[:, ::2], both.view(5, 16)[:, :8]  # one first element, two column strides
    check(ltx, norm.replace(cos=strided, sin=(sin, sin)))
    check(ltx, norm.replace(cos=both[..., 0], sin=both[..., 1]))


@every_dtype
@every_pairing
def test_key_longer_or_shorter(ltx, device, dtype, layout):
    """One table serves both: the shorter one takes its first rows."""
    make = Make(device, dtype)
    for key in ((1, 3), (4, 1), (9, 2), (0, 3)):
        check(ltx, rotary_case(make, SIZES, key=key, layout=layout))
        for across_heads in (True, False):
            check(ltx, qk_norm_rope_case(make, SIZES, across_heads=across_heads, key=key, layout=layout))


@every_dtype
@every_pairing
@pytest.mark.parametrize(("width", "rotary_dim"), [(16, 2), (16, 6), (16, 12), (64, 32), (80, 20), (128, 64), (10, 4)])
def test_partial_rotary(ltx, device, dtype, layout, width, rotary_dim):
    """The columns past rotary_dim pass through (with qk_norm_rope: normalised). Bits of pass-through are exact."""
    make = Make(device, dtype)
    sizes = (2, 5, 3, width)
    # A narrower full-width table says rotary_dim by itself, unless it could be a half-width one.
    if 2 * rotary_dim != width:
        case = rotary_case(make, sizes, rotary_dim=rotary_dim, layout=layout)
        check(ltx, case)
        same = case.replace(rotary_dim=rotary_dim).run(ltx)
        assert_same_bits(same[0], case.run(ltx)[0])
    for table in ("[S, D]", "[S, D/2]", "[B, 1, S, D]", "[1, S, D/2]"):
        case = rotary_case(make, sizes, table=table, rotary_dim=rotary_dim, layout=layout)
        case.kwargs["rotary_dim"] = rotary_dim
        (output,) = check(ltx, case)
        assert_same_bits(output[..., rotary_dim:].contiguous(), case.kwargs["input"][..., rotary_dim:].contiguous())
        check_eager(ltx, case, exact=True)
    for across_heads in (True, False):
        case = qk_norm_rope_case(make, sizes, across_heads=across_heads, layout=layout)
        cos, sin = make(5, rotary_dim // 2, dtype=torch.float32), make(5, rotary_dim // 2, dtype=torch.float32)
        case = case.replace(cos=cos, sin=sin, rotary_dim=rotary_dim)
        check(ltx, case)
        check_eager(ltx, case)


@every_dtype
@every_pairing
def test_ranks(ltx, device, dtype, layout):
    """[S, D], [B, S, D] and [S, heads, D] beside the four-dimensional ones."""
    make = Make(device, dtype)
    cos, sin = make(5, 16, dtype=torch.float32), make(5, 16, dtype=torch.float32)
    x = make(2, 5, 3, 16)
    expected = check(ltx, Case("apply_rotary", {"input": x, "cos": cos, "sin": sin, "layout": layout}))[0]

    def run(part: torch.Tensor, **options) -> torch.Tensor:
        return ltx.apply_rotary(part.contiguous(), cos, sin, layout=layout, **options)

    assert_same_bits(run(x[:, :, 1]), expected[:, :, 1].contiguous())
    assert_same_bits(run(x[1, :, 1], sequence_dim=0), expected[1, :, 1].contiguous())
    assert_same_bits(run(x[1], sequence_dim=0), expected[1].contiguous())
    assert_same_bits(run(x.transpose(1, 2), sequence_dim=2), expected.transpose(1, 2).contiguous())
    assert_same_bits(run(x.transpose(1, 2), sequence_dim=-2), expected.transpose(1, 2).contiguous())


@every_dtype
def test_whole_width_of_three_dimensions(ltx, device, dtype):
    """LTX-Video before its heads are split: [B, S, heads * D] with a table of the whole width."""
    make = Make(device, dtype)
    x = make(2, 5, 24)
    cos, sin = make(2, 5, 24, dtype=torch.float32), make(2, 5, 24, dtype=torch.float32)
    (flat,) = check(ltx, Case("apply_rotary", {"input": x, "cos": cos, "sin": sin}))
    (split,) = check(ltx, Case("apply_rotary", {"input": x.unflatten(-1, (3, 8)), "cos": cos, "sin": sin}))
    assert_same_bits(flat, split.flatten(-2))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"theta_base": 10000.0},
        {"theta_base": 500000.0},
        {"theta_base": 1.0},
        {"theta_base": 0.5},
        {"positions": "int64"},
        {"positions": "int32"},
        {"positions": "float32"},
        {"positions": "per batch"},
        {"positions": "[1, S]"},
        {"positions": "strided"},
        {"positions": "far"},
    ],
    ids=str,
)
@every_dtype
@every_pairing
def test_rope_1d_positions(ltx, device, kwargs, dtype, layout):
    make = Make(device, dtype)
    order = torch.tensor([5, 0, 3, 100000, 7, 1, 2], device=device)
    positions = {
        "int64": order,
        "int32": order.int(),
        "float32": order.float() * 0.37 - 2,
        "per batch": torch.stack((order, order.flip(0) + 11)),
        "[1, S]": order[None],
        "strided": torch.stack((order, order + 1), -1)[:, 0],
        "far": order + 2**24,  # fp32 no longer has every integer; the formula says fp32(position)
    }
    options = {**kwargs, "layout": layout}
    if "positions" in kwargs:
        options["positions"] = positions[kwargs["positions"]]
    case = rope_case(make, (2, 3, 16), sequence=7, key_heads=1, **options)
    outputs = check(ltx, case)
    # And against the table written in the helpers, which shares no code with the package.
    for output, x, terms in zip(outputs, case.inputs, case.terms(ltx), strict=True):
        cos, sin = (t[:, None] if t.dim() == 2 else t[:, :, None] for t in case.table)
        expected = rotate(x.double(), torch.atan2(sin, cos), layout)
        assert_close_to_fp64(output, expected, terms)


@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 3, 4), (5, 1, 2), (1, 7, 1), (3, 2, 300), (7, 16, 24)])
@every_dtype
@every_pairing
def test_rope_3d_grids(ltx, device, grid, dtype, layout):
    make = Make(device, dtype)
    check(ltx, rope_case(make, (2, 2, 64), grid=grid, key_heads=1, layout=layout))


@pytest.mark.parametrize("width", [2, 4, 6, 8, 10, 14, 16, 20, 34, 64, 66, 128])
@every_pairing
def test_rope_3d_splits(ltx, device, width, layout):
    """2 * (D // 3 // 2) channels for t and for h, the rest for w: also where D // 3 is odd or nothing."""
    for dtype in DTYPES:
        case = rope_case(Make(device, dtype), (1, 2, width), grid=(3, 4, 5), layout=layout)
        outputs = check(ltx, case)
        for output, x, terms in zip(outputs, case.inputs, case.terms(ltx), strict=True):
            expected = rotate(x.double(), torch.atan2(case.table[1], case.table[0])[:, None], layout)
            assert_close_to_fp64(output, expected, terms)


@every_pairing
def test_rope_3d_options(ltx, device, layout):
    make = Make(device, torch.bfloat16)
    for dims in ((4, 6, 6), (0, 0, 16), (16, 0, 0), (2, 12, 2)):
        for theta in (10000.0, 77.0, (10000.0, 500.0, 3.0), [1e6, 1e4, 1e2]):
            check(ltx, rope_case(make, (2, 2, 16), grid=(2, 3, 4), rope_dims=dims, theta_base=theta, layout=layout))


def test_rope_angles_follow_their_arguments(ltx, device):
    """Frequencies may be kept between calls, but never the wrong ones."""
    make = Make(device, torch.float32)
    grid_cases = [rope_case(make, (1, 1, 16), grid=(2, 3, 2), theta_base=theta) for theta in (10.0, 1000.0)]
    line_cases = [rope_case(make, (1, 1, width), sequence=12, theta_base=10.0) for width in (16, 8, 32)]
    for case in (*grid_cases, *line_cases, *grid_cases, *reversed(line_cases), grid_cases[0]):
        check(ltx, case)


def test_widest_rope_head(ltx, device):
    check(ltx, rope_case(Make(device, torch.float32), (1, 1, 1024), sequence=3))


@every_function
@pytest.mark.parametrize("sizes", [(70000, 1, 1, 4), (1, 70000, 1, 4), (1, 1, 70000, 4)])
def test_many_batches_tokens_or_heads(ltx, device, name, sizes):
    """Past 65535, the most blocks that two of a grid's dimensions have."""
    check(ltx, cases(Make(device, torch.bfloat16), sizes=sizes)[name])


@every_function
@pytest.mark.parametrize("sizes", [(0, 5, 3, 16), (2, 0, 3, 16)])
def test_empty(ltx, device, name, sizes):
    make = Make(device, torch.bfloat16)
    case = cases(make, sizes=sizes)[name]
    outputs = check(ltx, case)
    for output, like in zip(outputs, case.inputs, strict=True):
        assert output.shape == like.shape
    check_out(ltx, case, "contiguous")


def test_no_heads(ltx, device):
    make = Make(device, torch.bfloat16)
    for name, case in cases(make, sizes=(2, 5, 0, 16)).items():
        if name == "qk_norm_rope across heads":  # its table is as wide as all heads
            case = qk_norm_rope_case(make, (2, 5, 0, 16), across_heads=True)
        assert [output.shape for output in case.run(ltx)] == [like.shape for like in case.inputs]


# ---- Memory


@every_function
@every_dtype
@every_memory_layout
@every_pairing
def test_layouts(ltx, device, name, dtype, memory, layout):
    for sizes in ((2, 5, 3, 16), (2, 3, 2, 10)):
        check(ltx, cases(Make(device, dtype), layout, sizes)[name].in_layout(memory))


@every_function
def test_layout_of_one_operand(ltx, device, name):
    for dtype in DTYPES:
        case = cases(Make(device, dtype), sizes=(2, 5, 3, 64))[name]
        expected = case.run(ltx)
        for operand, tensor in case.tensors.items():
            for memory in LAYOUTS:
                moved = case.replace(**{operand: place(tensor, memory)})
                for output, want in zip(moved.run(ltx), expected, strict=True):
                    assert_same_bits(output, want, f"{operand} {memory}")


@every_function
@every_memory_layout
def test_out(ltx, device, name, memory):
    for dtype in DTYPES:
        for sizes in ((2, 5, 3, 64), (2, 3, 2, 10)):
            check_out(ltx, cases(Make(device, dtype), sizes=sizes)[name], memory)


@every_function
@every_dtype
@every_pairing
@pytest.mark.parametrize("memory", ["contiguous", "permuted", "rows misaligned", "columns strided"])
def test_in_place(ltx, device, name, dtype, layout, memory):
    """out=(query, key), exactly the inputs."""
    for sizes in ((2, 5, 3, 64), (2, 3, 2, 10)):
        case = cases(Make(device, dtype), layout, sizes)[name]
        expected = case.run(ltx)
        again = case.in_layout(memory)
        given = again.inputs if len(again.inputs) > 1 else again.inputs[0]
        outputs = again.run(ltx, out=given)
        for output, like, want in zip(outputs, again.inputs, expected, strict=True):
            assert output is like
            assert_same_bits(output, want)


@every_dtype
@pytest.mark.parametrize("across_heads", [True, False])
def test_views_of_packed_qkv(ltx, device, dtype, across_heads):
    """query and key as slices of one projection, read where they are and written back there; value is untouched."""
    make = Make(device, dtype)
    batch, sequence, heads, width = 2, 5, 3, 64
    qkv = make(batch, sequence, 3 * heads * width)
    q, k, v = (t.unflatten(-1, (heads, width)) for t in qkv.chunk(3, -1))
    case = qk_norm_rope_case(make, (batch, sequence, heads, width), across_heads=across_heads)
    case = case.replace(query=q, key=k)
    expected = check(ltx, case)
    value = v.clone()
    case.run(ltx, out=(q, k))
    for output, want in zip((q, k), expected, strict=True):
        assert_same_bits(output.contiguous(), want.contiguous())
    assert torch.equal(v, value)


@every_function
def test_expanded_input(ltx, device, name):
    case = cases(Make(device, torch.bfloat16))[name]
    expanded = {}
    for operand in ("input", "query", "key"):
        if operand in case.kwargs:
            x = case.kwargs[operand]
            expanded[operand] = x[:1].expand(x.shape)
    check(ltx, case.replace(**expanded))
    heads = {operand: x[:, :, :1].expand(x.shape) for operand, x in expanded.items()}
    check(ltx, case.replace(**heads))


# ---- Bits: a token's result depends on the token and its angles alone


@every_function
@every_dtype
@pytest.mark.parametrize("width", [2, 10, 64, 128])
def test_same_token_same_bits(ltx, device, name, dtype, width):
    case = cases(Make(device, dtype, seed=width), sizes=(4, 5, 3, width))[name]
    expected = case.run(ltx)
    for output, want in zip(case.run(ltx), expected, strict=True):
        assert_same_bits(output, want, "second run")
    operands = [operand for operand in ("input", "query", "key") if operand in case.kwargs]
    for memory in LAYOUTS:
        for first, last in ((0, 1), (3, 4), (1, 4)):
            part = {operand: place(case.kwargs[operand][first:last], memory) for operand in operands}
            for output, want in zip(case.replace(**part).run(ltx), expected, strict=True):
                assert_same_bits(output, want[first:last], f"batches {first}:{last}, {memory}")
    many = case.replace(**{operand: case.kwargs[operand].repeat(30, 1, 1, 1) for operand in operands})
    for output, want in zip(many.run(ltx), expected, strict=True):
        assert_same_bits(output, want.repeat(30, 1, 1, 1), "in a batch 30 times as large")
    for operand, want in zip(operands, expected, strict=True):
        # The other operand's size changes nothing either.
        if len(operands) == 2 and "norm" in name:
            other = operands[1 - operands.index(operand)]
            less = case.replace(**{other: case.kwargs[other][:, : case.kwargs[other].shape[1] - 1]})
            if max(less.kwargs["query"].shape[1], less.kwargs["key"].shape[1]) == case.kwargs["cos"].shape[0]:
                assert_same_bits(less.run(ltx)[operands.index(operand)], want, f"{other} shorter")


@every_dtype
@pytest.mark.parametrize("across_heads", [True, False])
def test_same_token_same_bits_any_place(ltx, device, dtype, across_heads):
    """Any sequence length, any place in it."""
    make = Make(device, dtype)
    case = qk_norm_rope_case(make, (1, 40, 4, 64), across_heads=across_heads)
    expected = case.run(ltx)
    for first, last in ((0, 1), (7, 8), (3, 39)):
        part = {name: case.kwargs[name][:, first:last].contiguous() for name in ("query", "key")}
        tables = {name: case.kwargs[name][first:last].contiguous() for name in ("cos", "sin")}
        for output, want in zip(case.replace(**part, **tables).run(ltx), expected, strict=True):
            assert_same_bits(output, want[:, first:last].contiguous())


@every_dtype
@every_pairing
@pytest.mark.parametrize("across_heads", [True, False])
@pytest.mark.parametrize("table", ["[S, D]", "[S, D/2]"])
def test_many_tokens_give_the_bits_of_few(ltx, device, dtype, layout, across_heads, table):
    """On a GPU a thread has several heads of many tokens, and blocks bring later ones into the L2."""
    case = qk_norm_rope_case(
        Make(device, dtype), (1, 20011, 5, 64), across_heads=across_heads, table=table, layout=layout
    )
    many = case.run(ltx)
    for first, last in ((0, 3), (9999, 10010), (20008, 20011)):
        part = {name: case.kwargs[name][:, first:last].contiguous() for name in ("query", "key")}
        tables = {name: case.kwargs[name][first:last].contiguous() for name in ("cos", "sin")}
        for output, want in zip(case.replace(**part, **tables).run(ltx), many, strict=True):
            assert_same_bits(output, want[:, first:last].contiguous(), f"{first}:{last}")


@every_function
def test_same_bits_from_every_thread(ltx, device, name):
    """Any number of torch's threads, and several calls at once (rope_1d and rope_3d keep frequencies per thread)."""
    case = cases(Make(device, torch.float32), sizes=(2, 300, 3, 64))[name]
    expected = case.run(ltx)
    other = cases(Make(device, torch.float32), sizes=(2, 300, 3, 32))[name]
    for count in (1, 3):
        with torch_threads(count):
            for output, want in zip(case.run(ltx), expected, strict=True):
                assert_same_bits(output, want, f"{count} threads")
    with ThreadPoolExecutor(4) as pool:
        both = list(pool.map(lambda i: (other if i % 2 else case).run(ltx), range(20)))
    for outputs in both[::2]:
        for output, want in zip(outputs, expected, strict=True):
            assert_same_bits(output, want, "several calls at once")


# ---- Values


@every_dtype
@pytest.mark.parametrize("across_heads", [True, False])
def test_zero_tokens(ltx, device, dtype, across_heads):
    case = qk_norm_rope_case(Make(device, dtype), (2, 5, 3, 16), across_heads=across_heads)
    for name in ("query", "key"):
        case.kwargs[name][:, 1:3] = 0
    for output in check(ltx, case):
        assert bool((output[:, 1:3] == 0).all())


@every_function
@every_dtype
@pytest.mark.parametrize("special", [math.inf, math.nan])
def test_inf_and_nan_stay_in_their_token(ltx, device, name, dtype, special):
    case = cases(Make(device, dtype))[name]
    first = case.inputs[0]
    tokens_last = "heads first" in name
    where = (1, slice(None), 2) if tokens_last else (1, 2)
    case.inputs[0][(*where, 1, 3) if not tokens_last else (1, 1, 2, 3)] = special
    outputs, truths, terms = case.run(ltx), case.truth(ltx), case.terms(ltx)
    elsewhere = torch.ones(first.shape, dtype=torch.bool, device=device)
    elsewhere[where] = False
    assert_close_to_fp64(outputs[0][elsewhere], truths[0][elsewhere], terms[0][elsewhere])
    assert bool((~outputs[0][where].isfinite()).any())
    for output, truth, term in zip(outputs[1:], truths[1:], terms[1:], strict=True):
        assert_close_to_fp64(output, truth, term)


@every_function
def test_denormals(ltx, device, name):
    for dtype in DTYPES:
        make = Make(device, dtype)
        case = cases(make)[name]
        tiny = torch.finfo(dtype).smallest_normal / 16
        for operand in ("input", "query", "key"):
            if operand in case.kwargs:
                case.kwargs[operand] = make.integers(*case.kwargs[operand].shape, low=-8, high=9) * tiny
        check(ltx, case)


def test_float16_overflow(ltx, device):
    make = Make(device, torch.float16)
    case = rotary_case(make, (2, 5, 3, 16))
    check(ltx, case.replace(input=case.kwargs["input"] * 30000))
    case = qk_norm_rope_case(make, (2, 5, 3, 16), across_heads=True)
    case.kwargs["query"] *= 15000
    check(ltx, case)


@pytest.mark.parametrize("across_heads", [True, False])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3, 10.0, None])
def test_eps(ltx, device, across_heads, eps):
    for dtype in DTYPES:
        case = qk_norm_rope_case(Make(device, dtype), (2, 5, 3, 16), across_heads=across_heads, eps=eps)
        for name in ("query", "key"):
            case.kwargs[name] *= 0.02
        check(ltx, case)


@every_dtype
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("across_heads", [True, False])
def test_weight_dtypes(ltx, device, dtype, weight_dtype, across_heads):
    make = Make(device, dtype)
    for table_dtype in {torch.float32, dtype}:
        options = {"weight_dtype": weight_dtype, "table_dtype": table_dtype, "eps": 0.3}
        case = qk_norm_rope_case(make, (2, 5, 3, 64), across_heads=across_heads, **options)
        check(ltx, case)
        check(ltx, case.replace(key_weight=None))
        check(ltx, case.replace(query_weight=None, key_weight=None))


@every_dtype
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("across_heads", [True, False])
@pytest.mark.parametrize("width", [64, 128, 10])
def test_options_of_the_norm(ltx, device, dtype, norm, across_heads, width):
    """1 + weight (Gemma 3, Krea 2), biases, an eps each, weights and biases of another dtype or none."""
    make = Make(device, dtype)
    for weight_dtype in {torch.float32, dtype}:
        for layout in ("interleaved", "half"):
            options = {"norm": norm, "biases": norm == "layer", "weight_dtype": weight_dtype, "layout": layout}
            options |= {"weight_offset": 1.0, "eps": (0.3, 1e-6)}
            case = qk_norm_rope_case(make, (2, 5, 4, width), across_heads=across_heads, key=(7, 2), **options)
            check(ltx, case)
            check_eager(ltx, case)
            check(ltx, case.replace(query_weight=None, eps=(None, 0.3)))
            check(ltx, case.replace(query_bias=None, key_bias=None))
            for name in ("query", "key"):  # a mean far above the deviation
                case.kwargs[name] += 3
            check(ltx, case)


@every_dtype
@pytest.mark.parametrize("across_heads", [True, False])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_an_eps_each(ltx, device, dtype, norm, across_heads):
    """A pair of equal numbers is the number, and each of two is its operand's."""
    case = qk_norm_rope_case(Make(device, dtype), (2, 5, 3, 64), across_heads=across_heads, norm=norm)
    first, second = (case.replace(eps=eps).run(ltx) for eps in (0.5, 1e-6))
    for eps, wanted in (
        ((0.5, 0.5), first),
        ((0.5, 1e-6), (first[0], second[1])),
        ((1e-6, 0.5), (second[0], first[1])),
    ):
        for output, want in zip(case.replace(eps=eps).run(ltx), wanted, strict=True):
            assert_same_bits(output, want, str(eps))
    assert not torch.equal(first[0], second[0])


@every_dtype
@every_pairing
@pytest.mark.parametrize("across_heads", [True, False])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_rows_that_do_not_turn(ltx, device, dtype, layout, across_heads, norm):
    """cos = 1 and sin = 0 leave the norm alone, exactly: the text rows of a joint attention."""
    make = Make(device, dtype)
    for table in ("[S, D]", "[S, D/2]"):
        case = qk_norm_rope_case(make, (2, 6, 4, 64), across_heads=across_heads, norm=norm, table=table, layout=layout)
        case.kwargs["cos"][:4], case.kwargs["sin"][:4] = 1, 0
        ones = case.replace(cos=torch.ones_like(case.kwargs["cos"]), sin=torch.zeros_like(case.kwargs["sin"]))
        check(ltx, case)
        for output, normed in zip(case.run(ltx), ones.run(ltx), strict=True):
            assert_same_bits(output[:, :4].contiguous(), normed[:, :4].contiguous())
        if norm == "rms":
            integers = {name: make.integers(2, 6, 4, 64) for name in ("query", "key")}
            outputs = case.replace(**integers, rounding="eager").run(ltx)
            for output, (name, x) in zip(outputs, integers.items(), strict=True):
                flat = x.flatten(-2) if across_heads else x
                weight = case.kwargs[f"{name}_weight"].float()
                rstd = torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + 1e-6)
                expected = (flat.float() * rstd * weight).to(dtype).view(x.shape)
                assert torch.equal(output[:, :4], expected[:, :4])


def test_weights_of_different_dtypes(ltx, device):
    case = qk_norm_rope_case(Make(device, torch.bfloat16), (2, 5, 3, 64), across_heads=True)
    check(ltx, case.replace(query_weight=case.kwargs["query_weight"].float()))
    check(ltx, case.replace(key_weight=case.kwargs["key_weight"].half()))


# ---- rounding="eager"


@every_dtype
@every_pairing
@pytest.mark.parametrize("table", TABLES)
def test_eager_rotation_bitwise(ltx, device, dtype, layout, table):
    """No statistic, so every bit of x * cos + rotated(x) * sin in torch."""
    make = Make(device, dtype)
    for table_dtype in {torch.float32, dtype}:
        for sizes in (SIZES, (2, 5, 3, 128)):
            options = {"table": table, "table_dtype": table_dtype, "layout": layout}
            check_eager(ltx, rotary_case(make, sizes, **options), exact=True)
            check_eager(ltx, rotary_case(make, sizes, heads_first=True, **options), exact=True)
            if table != "[1, D]":
                check_eager(ltx, rotary_case(make, sizes, key=(7, 3), **options), exact=True)


@every_dtype
@every_pairing
@pytest.mark.parametrize("across_heads", [True, False])
def test_eager_norm_and_rotation_bitwise(ltx, device, dtype, layout, across_heads):
    """Small integers: whatever its order, the sum of squares is the same."""
    make = Make(device, dtype)
    for weight_dtype in DTYPES:
        for table_dtype in {torch.float32, dtype}:
            options = {"weight_dtype": weight_dtype, "table_dtype": table_dtype, "layout": layout, "eps": 1e-5}
            case = qk_norm_rope_case(make, (2, 5, 4, 64), across_heads=across_heads, **options)
            integers = {name: make.integers(2, 5, 4, 64) for name in ("query", "key")}
            found = []
            for choice in (
                {},
                {"cast_before_weight": True},
                {"weight_offset": 1.0},
                {"weight_offset": 1.0, "cast_before_weight": True},
            ):
                found.append(check_eager(ltx, case.replace(**integers, **choice), exact=True)[0])
            if dtype != torch.float32:
                assert not torch.equal(found[0], found[1]) and not torch.equal(found[2], found[3])


@every_dtype
@every_pairing
@pytest.mark.parametrize("across_heads", [True, False])
@pytest.mark.parametrize(("heads", "width"), [(3, 10), (4, 64), (32, 64), (24, 128)])
def test_eager(ltx, device, dtype, layout, across_heads, heads, width):
    for table_dtype in {torch.float32, dtype}:
        sizes = (2, 20, heads, width)
        options = {"table_dtype": table_dtype, "layout": layout}
        check_eager(ltx, qk_norm_rope_case(Make(device, dtype), sizes, across_heads=across_heads, **options))


@pytest.mark.parametrize("name", [name for name in cases(Make("cpu", torch.float32)) if not name.startswith("rope")])
@every_memory_layout
def test_eager_layouts_and_out(ltx, device, name, memory):
    for dtype in DTYPES:
        case = cases(Make(device, dtype))[name].replace(rounding="eager")
        expected = case.run(ltx)
        for output, want in zip(case.in_layout(memory).run(ltx), expected, strict=True):
            assert_same_bits(output, want)
        check_out(ltx, case, memory)


# ---- Large


def test_strides_above_int32(ltx, device):
    """Batches, tokens, heads and columns more than 2^31 elements apart, in memory that is mostly never touched."""
    heads, width, apart = 2, 64, 2**31 + 8
    try:
        flat = torch.empty(apart + 4096, dtype=torch.bfloat16, device=device)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        pytest.skip(f"not enough memory: {error}")
    make = Make(device, torch.bfloat16)
    shape = (2, 2, heads, width)
    for strides in (
        (apart, heads * width, width, 1),
        (heads * width, apart, width, 1),
        (2 * width, width, apart, 1),
        (4, 2, 1, apart // width),
    ):
        for across_heads in (True, False):
            case = qk_norm_rope_case(make, shape, across_heads=across_heads)
            expected = case.run(ltx)
            for operand, want in zip(("query", "key"), expected, strict=True):
                far = flat.as_strided(shape, strides)
                far.copy_(case.kwargs[operand])
                position = 0 if operand == "query" else 1
                assert_same_bits(case.replace(**{operand: far}).run(ltx)[position].contiguous(), want.contiguous())
                case.replace(**{operand: far}).run(ltx, out=(far, expected[1]) if position == 0 else (expected[0], far))
                assert_same_bits(far.contiguous(), want.contiguous())
                expected = case.run(ltx)


@pytest.mark.slow
def test_more_than_2_31_elements(ltx, cuda):
    heads, width = 32, 64
    sequence = 2**31 // (heads * width) + 3
    try:
        x = torch.empty(1, sequence, heads, width, dtype=torch.bfloat16, device=cuda)
        cos, sin = (torch.empty(sequence, width, device=cuda) for _ in range(2))
    except torch.OutOfMemoryError as error:
        pytest.skip(f"not enough memory: {error}")
    generator = torch.Generator(cuda).manual_seed(1)
    for tensor in (x, cos, sin):
        tensor.normal_(generator=generator)
    key = x[:, :5].contiguous()
    rotated = ltx.apply_rotary(x, cos, sin)
    normed, _ = ltx.qk_norm_rope(x, key, None, None, cos, sin, across_heads=True)
    for first in (0, sequence // 2, 2**31 // (heads * width) - 2, sequence - 5):
        rows = slice(first, first + 5)
        part = x[:, rows].contiguous()
        assert_same_bits(rotated[:, rows].contiguous(), ltx.apply_rotary(part, cos[rows], sin[rows]))
        expected, _ = ltx.qk_norm_rope(part, key, None, None, cos[rows], sin[rows], across_heads=True)
        assert_same_bits(normed[:, rows].contiguous(), expected)


def test_helper_table(device):
    """angle_table, which expectations rest on, at angles anyone can check."""
    cos, sin = angle_table([torch.tensor([0.0, math.pi])], [4], [1.0])
    torch.testing.assert_close(cos, torch.tensor([[1.0, 1.0], [-1.0, -1.0]]).double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, torch.zeros(2, 2).double(), rtol=0, atol=1e-6)
    cos, _ = angle_table([torch.tensor([2])], [4], [16.0])
    torch.testing.assert_close(cos, torch.tensor([[2.0, 0.5]]).double().cos())
