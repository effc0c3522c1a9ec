"""rmsnorm, rmsnorm_residual and layernorm; what holds for the whole norm family is parametrised over all of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    DTYPES,
    LAYOUTS,
    MODULATORS,
    NORM_OPS,
    WEIGHTS,
    Case,
    Make,
    assert_close_to_eager,
    assert_close_to_fp64,
    assert_same_bits,
    check,
    check_eager,
    check_out,
    eps_names,
    norm_case,
    offers_offset,
    optional,
    place,
    torch_threads,
)

# Every number of packs a thread may own, whole and ragged rows, one thread to more than the registers of sixteen blocks
# hold.
WIDTHS = [1, 2, 3, 5, 7, 8, 17, 33, 64, 127, 128, 250, 512, 1000, 1024, 1985, 2048, 2050, 3072, 4096, 8192, 12288]
WIDTHS += [16384, 32768, 40000, 70000, 300000]

every_op = pytest.mark.parametrize("op", NORM_OPS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


# ---- The definition itself: ltx.reference against torch and against formulas written here


@pytest.mark.host
@every_dtype
@pytest.mark.parametrize("eps", [1e-6, 0.3, None])
def test_reference_is_torch_rms_norm(ltx, device, dtype, eps):
    make = Make(device, dtype)
    x, weight = make(4, 40), make(40)
    wide_eps = torch.finfo(torch.float32).eps if eps is None else eps
    expected = F.rms_norm(x.double(), (40,), weight.double(), wide_eps)
    assert_close_to_fp64(ltx.reference.rmsnorm(x, weight, eps), expected, expected.abs())
    assert_close_to_fp64(ltx.rmsnorm(x, weight, eps), expected, expected.abs())


@every_dtype
def test_eps_none_is_that_of_torch(ltx, device, dtype):
    """A row so small that eps decides: torch.nn.RMSNorm takes the machine epsilon of the dtype it computes in."""
    x = Make(device, dtype)(3, 64, std=1e-4)
    expected = F.rms_norm(x, (64,), None, None)
    assert_close_to_fp64(ltx.rmsnorm(x, eps=None), expected.double(), 4 * expected.double().abs())
    given = ltx.rmsnorm(x, eps=torch.finfo(torch.float32).eps)
    assert_same_bits(ltx.rmsnorm(x, eps=None), given)
    assert not torch.equal(given, ltx.rmsnorm(x, eps=1e-6))


@pytest.mark.host
@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_reference_is_torch_layer_norm(ltx, device, eps):
    make = Make(device, torch.float64)
    x, weight, bias = make(4, 40), make(40), make(40)
    torch.testing.assert_close(
        ltx.reference.layernorm(x, weight, bias, eps), F.layer_norm(x, (40,), weight, bias, eps), rtol=1e-12, atol=1e-12
    )


@pytest.mark.host
def test_reference_residual_and_offset(ltx, device):
    make = Make(device, torch.float64)
    x, residual, weight = make(2, 3, 16), make(2, 3, 16), make(16)
    h = x + residual
    n = h / (h.pow(2).mean(-1, keepdim=True) + 0.3).sqrt() * (1 + weight)
    got = ltx.reference.rmsnorm_residual(x, residual, weight, 0.3, weight_offset=1.0)
    for value, expected in zip(got, (n, h), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def test_defaults(ltx, device):
    """eps where it is not given, on rows that it decides."""
    x = Make(device, torch.float32)(4, 32, std=1e-3)
    assert_same_bits(ltx.rmsnorm(x), ltx.rmsnorm(x, None, 1e-6))
    assert_same_bits(ltx.rmsnorm_residual(x, x)[0], ltx.rmsnorm_residual(x, x, None, 1e-6)[0])
    assert_same_bits(ltx.layernorm(x), ltx.layernorm(x, None, None, 1e-5))
    assert not torch.equal(ltx.layernorm(x), ltx.layernorm(x, eps=1e-6))


# ---- fp64 truth over the whole family


@pytest.mark.kernels_ci
@every_op
@every_dtype
def test_basic(ltx, device, op, dtype):
    check(ltx, norm_case(op, Make(device, dtype), (2, 7, 256)))


@every_op
@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
def test_row_lengths(ltx, device, op, dtype, width):
    check(ltx, norm_case(op, Make(device, dtype, seed=width), (2, 3, width)))


@every_op
@pytest.mark.parametrize("shape", [(64,), (1, 64), (1, 1, 64), (300, 64), (2, 3, 4, 64), (1, 2, 1, 3, 1, 8), (5, 1, 1)])
def test_shapes(ltx, device, op, shape):
    for dtype in DTYPES:
        modulation = "vector" if len(shape) == 1 else "[B, 1, H]"
        check(ltx, norm_case(op, Make(device, dtype), shape, modulation=modulation))


@every_op
@pytest.mark.parametrize("shape", [(0,), (0, 64), (2, 0, 64), (3, 0), (0, 5, 0)])
def test_empty(ltx, device, op, shape):
    """Nothing to compute: empty outputs of the right shape and dtype, also into given ones."""
    modulation = "vector" if len(shape) == 1 else "[B, S, H]"
    case = norm_case(op, Make(device, torch.bfloat16), shape, modulation=modulation)
    for output in case.run(ltx):
        assert output.shape == shape
        assert output.dtype == torch.bfloat16
    check_out(ltx, case, "rows apart")


@every_op
def test_many_rows(ltx, device, op):
    check(ltx, norm_case(op, Make(device, torch.bfloat16), (3, 1111, 72)))
    check(ltx, norm_case(op, Make(device, torch.float32), (2, 70000, 2)))


@every_op
@every_dtype
@pytest.mark.parametrize("param_dtype", DTYPES, ids=str)
def test_param_dtypes(ltx, device, op, dtype, param_dtype):
    """Weights, modulators and tables of any dtype beside any input, and of different ones."""
    make = Make(device, dtype)
    tables = [name for name in MODULATORS if name in NORM_OPS[op]]
    for modulation_dtype in DTYPES:
        for width in (33, 256):
            check(
                ltx,
                norm_case(
                    op, make, (2, 3, width), param_dtype=param_dtype, modulation_dtype=modulation_dtype, tables=tables
                ),
            )


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in NORM_OPS for name in eps_names(op)])
@pytest.mark.parametrize("eps", [0.0, 1e-12, 0.3, 10.0])
def test_eps(ltx, device, op, name, eps):
    for dtype in DTYPES:
        check(ltx, norm_case(op, Make(device, dtype), (2, 3, 96), **{name: eps}))


@pytest.mark.parametrize("op", [op for op in NORM_OPS if {"bias", *WEIGHTS} & set(optional(op))])
def test_without_parameters(ltx, device, op):
    parameters = [name for name in ("bias", *WEIGHTS) if name in NORM_OPS[op]]
    for dtype in DTYPES:
        for without in [[name] for name in parameters] + [parameters]:
            check(ltx, norm_case(op, Make(device, dtype), (2, 3, 96), without=without, **{eps_names(op)[0]: 0.3}))


@pytest.mark.parametrize("op", [op for op in NORM_OPS if offers_offset(op)])
@every_dtype
def test_weight_offset(ltx, device, op, dtype):
    """Gemma multiplies by 1 + weight, formed in fp32."""
    make = Make(device, dtype)
    weights = [name for name in WEIGHTS if name in NORM_OPS[op]]
    case = norm_case(op, make, (4, 96), weight_offset=1.0, **dict.fromkeys(eps_names(op), 0.3))
    check(ltx, case)
    check(ltx, case.replace(weight_offset=-0.25))
    check(ltx, case.replace(**{name: make(96, dtype=torch.bfloat16, std=1e-3) for name in weights}))
    # Without a weight there is nothing to add it to.
    without = case.replace(**dict.fromkeys(weights))
    check(ltx, without.replace(weight_offset=0.0))
    assert_same_bits(without.run(ltx)[0], without.replace(weight_offset=0.0).run(ltx)[0])


@pytest.mark.parametrize("op", [op for op in NORM_OPS if offers_offset(op)])
@every_dtype
def test_weight_before_the_rounding(ltx, device, op, dtype):
    """OLMo 2 and torch.nn.RMSNorm round once, after the weight, which may be of another dtype."""
    for param_dtype in DTYPES:
        case = norm_case(op, Make(device, dtype), (3, 5, 96), param_dtype=param_dtype)
        check_eager(ltx, case.replace(cast_before_weight=False))
        check(ltx, case.replace(cast_before_weight=False))
    once, twice = (
        norm_case("rmsnorm", Make(device, torch.bfloat16), (64, 96), rounding="eager", cast_before_weight=first)
        for first in (False, True)
    )
    assert not torch.equal(once.run(ltx)[0], twice.run(ltx)[0])


# ---- Memory


@every_op
@every_dtype
@every_layout
def test_layouts(ltx, device, op, dtype, layout):
    """All tensors in the layout, NaN in every gap."""
    for shape in ((2, 3, 4, 40), (2, 5, 264), (3, 1, 17)):
        tables = [name for name in MODULATORS if name in NORM_OPS[op]]
        case = norm_case(op, Make(device, dtype), shape, modulation="[B, S, H]", tables=tables)
        check(ltx, case.in_layout(layout))


@pytest.mark.parametrize(("op", "moved"), [(op, name) for op in NORM_OPS for name in ("input", *NORM_OPS[op])])
def test_layout_of_one_operand(ltx, device, op, moved):
    for dtype in DTYPES:
        case = norm_case(op, Make(device, dtype), (2, 3, 264), modulation="[B, S, H]")
        expected = case.run(ltx)
        for layout in LAYOUTS:
            outputs = case.replace(**{moved: place(case.kwargs[moved], layout)}).run(ltx)
            for i, (output, want) in enumerate(zip(outputs, expected, strict=True)):
                assert_same_bits(output, want, f"output {i} with {moved} {layout}")


@every_op
@every_layout
def test_out(ltx, device, op, layout):
    for dtype in DTYPES:
        for shape in ((2, 3, 264), (2, 3, 33), (2, 3, 4, 8), (70, 1), (2, 5000)):
            check_out(ltx, norm_case(op, Make(device, dtype), shape, modulation="[B, S, H]"), layout)


@every_op
@every_dtype
@pytest.mark.parametrize("width", [33, 264, 4096, 20000])
def test_in_place(ltx, device, op, dtype, width):
    """out= may be the input or the residual itself; so may residual_out=."""
    make = Make(device, dtype)
    case = norm_case(op, make, (2, 3, width), modulation="[B, S, H]")
    expected = case.run(ltx)
    operands = [name for name in ("input", "residual") if name in case.kwargs]
    targets = [{name: operand} for name in case.output_names for operand in operands]
    if len(operands) == 2 and len(case.output_names) > 1:
        first, *_, last = case.output_names
        targets += [{first: "input", last: "residual"}, {first: "residual", last: "input"}]
    for target in targets:
        for layout in ("contiguous", "rows misaligned", "columns strided"):
            again = case.in_layout(layout)
            given = {name: again.kwargs[operand] for name, operand in target.items()}
            outputs = again.run(ltx, **given)
            for name, output, want in zip(case.output_names, outputs, expected, strict=True):
                assert name not in given or output is given[name]
                assert_same_bits(output, want, f"{name} with {target}, {layout}")


@pytest.mark.parametrize("op", [op for op in NORM_OPS if op.endswith("_pair") or "residual" in NORM_OPS[op]])
def test_one_of_the_outputs_given(ltx, device, op):
    case = norm_case(op, Make(device, torch.bfloat16), (2, 3, 40))
    expected = case.run(ltx)
    for position, name in enumerate(case.output_names):
        given = torch.empty_like(expected[position])
        outputs = case.run(ltx, **{name: given})
        assert outputs[position] is given
        for output, want in zip(outputs, expected, strict=True):
            assert_same_bits(output, want)


@every_op
def test_expanded_input(ltx, device, op):
    """Rows that share memory: stride 0 in the leading dimensions."""
    for dtype in DTYPES:
        make = Make(device, dtype)
        case = norm_case(op, make, (4, 3, 40), modulation="[B, S, H]")
        expanded = case.map(lambda t: t[:1].expand(4, *t.shape[1:]) if t.dim() == 3 else t)
        check(ltx, expanded)
        one = case.map(lambda t: t[:, :, :1].expand(t.shape) if t.dim() == 3 else t[:1].expand(t.shape))
        check(ltx, one)


# ---- Bits: a row's result depends on the row alone


@pytest.mark.parametrize(
    ("op", "modulation"),
    [(op, "[B, S, H]") for op in NORM_OPS]
    + [(op, "vector") for op, tensors in NORM_OPS.items() if set(tensors) & set(MODULATORS)],
)
@every_dtype
@pytest.mark.parametrize(
    "width",
    [
        1,
        3,
        33,
        64,
        250,
        1024,
        2050,
        4096,
        8192,
        pytest.param(16384, marks=pytest.mark.extended),
        *(pytest.param(n, marks=pytest.mark.repeated) for n in (40000, 70000)),  # on a CPU the path of 16384
    ],
)
def test_same_row_same_bits(ltx, device, op, modulation, dtype, width):
    """Each row with modulators of its own, and all with the same."""
    rows = 9
    case = norm_case(op, Make(device, dtype, seed=3), (rows, width), modulation=modulation)
    expected = case.run(ltx)

    def same(other: Case, first: int, last: int, what: str) -> None:
        for output, want in zip(other.run(ltx), expected, strict=True):
            assert_same_bits(output.reshape(last - first, width), want[first:last], what)

    same(case, 0, rows, "second run")
    for first, last in ((0, 1), (4, 5), (rows - 1, rows), (2, 7)):
        part = case.map(lambda t, first=first, last=last: t[first:last] if t.dim() == 2 else t)
        same(part, first, last, f"rows {first}:{last} alone")
        for layout in LAYOUTS:
            same(part.in_layout(layout), first, last, f"rows {first}:{last} alone, {layout}")
    many = case.map(lambda t: t.repeat(40, 1) if t.dim() == 2 else t)
    for output, want in zip(many.run(ltx), expected, strict=True):
        assert_same_bits(output, want.repeat(40, 1), "in a batch 40 times as large")
    if modulation == "vector":  # the same numbers, said otherwise
        full = case.map(lambda t: t)
        for name in MODULATORS:
            if name in full.kwargs:
                full.kwargs[name] = full.kwargs[name].repeat(rows, 1)
        same(full, 0, rows, "modulators repeated for every row")
        first_name = next(name for name in MODULATORS if name in full.kwargs)
        mixed = full.replace(**{first_name: case.kwargs[first_name]})
        same(mixed, 0, rows, "one modulator repeated, one not")


@every_op
def test_same_bits_from_every_thread(ltx, device, op):
    """Any number of torch's threads, and several calls at once."""
    case = norm_case(op, Make(device, torch.float32), (300, 264), modulation="[B, S, H]")
    expected = case.run(ltx)
    for count in (1, 3):
        with torch_threads(count):
            for output, want in zip(case.run(ltx), expected, strict=True):
                assert_same_bits(output, want, f"{count} threads")
    with ThreadPoolExecutor(4) as pool:
        for outputs in pool.map(lambda _: case.run(ltx), range(20)):
            for output, want in zip(outputs, expected, strict=True):
                assert_same_bits(output, want, "several calls at once")


# ---- Values


@every_op
@every_dtype
def test_zero_rows(ltx, device, op, dtype):
    """Zero rows give zero (times weight, plus bias and shift), not NaN."""
    case = norm_case(op, Make(device, dtype), (4, 40))
    case.kwargs["input"][1:3] = 0
    if "residual" in case.kwargs:
        case.kwargs["residual"][2] = 0
    for output in check(ltx, case):
        assert bool(output.isfinite().all())


@every_op
@every_dtype
@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("width", [40, 2050])
def test_inf_and_nan_stay_in_their_row(ltx, device, op, dtype, special, width):
    case = norm_case(op, Make(device, dtype), (3, width))
    case.kwargs["input"][1, 7] = special
    outputs = case.run(ltx)
    truths, eager = case.truth(ltx), case.eager()
    for output, truth, like, terms in zip(outputs, truths, eager, case.terms(ltx), strict=True):
        assert_close_to_fp64(output[::2], truth[::2], terms[::2])
        # inf / inf is NaN; a finite number divided by inf is zero: what torch makes of it.
        assert torch.equal(output[1].isnan(), like[1].isnan())
        assert torch.equal(output[1].isinf(), like[1].isinf())


@every_op
def test_denormals(ltx, device, op):
    """Inputs below the smallest normal number are numbers, not zero."""
    for dtype in DTYPES:
        tiny = torch.finfo(dtype).smallest_normal
        make = Make(device, dtype)
        case = norm_case(op, make, (3, 40))
        for name in ("input", "residual"):
            if name in case.kwargs:
                case.kwargs[name] = make.integers(3, 40, low=-8, high=9) * (tiny / 16)
        if op == "gated_residual":
            check(ltx, case)
        else:
            check(ltx, case.replace(**dict.fromkeys(eps_names(op), 0.0 if dtype == torch.float16 else 1e-30)))


@every_op
def test_float16_overflow(ltx, device, op):
    """A sum of squares far past 65504 is no overflow in fp32; a result past it is infinite."""
    case = norm_case(op, Make(device, torch.float16), (3, 4096))
    case.kwargs["input"].mul_(15000)
    check(ltx, case)
    if op != "gated_residual":
        weights = [name for name in WEIGHTS if name in case.kwargs]
        check(ltx, case.replace(**{name: torch.full_like(case.kwargs[name], 60000) for name in weights}))


@pytest.mark.parametrize("op", [op for op in NORM_OPS if "layernorm" in op])
@every_dtype
def test_mean_much_larger_than_deviation(ltx, device, op, dtype):
    """Variance in two passes: E[x^2] - mean^2 would lose every digit."""
    make = Make(device, dtype)
    mean = 1000.0 if dtype == torch.float16 else 10000.0
    for width in (250, 2048, 20000):
        case = norm_case(op, make, (3, width), eps=1e-6)
        case.kwargs["input"] = make(3, width, mean=mean, std=mean * torch.finfo(dtype).eps * 8)
        if "residual" in case.kwargs:
            case.kwargs["gate"] = torch.ones_like(case.kwargs["gate"])
            case.kwargs["residual"] = torch.zeros_like(case.kwargs["residual"])
        outputs = check(ltx, case)
        eager = case.eager()
        # And the deviation is there at all.
        assert_close_to_eager(outputs[0], eager[0], case.terms(ltx)[0], flipped=1.0, steps=8)


@every_dtype
def test_rows_whose_parts_have_means_of_their_own(ltx, device, dtype):
    """What each thread, warp or block has of a row is far from the row's mean, and varies little."""
    for width in (64, 2050, 20000, 100000, 300000):
        case = norm_case("layernorm", Make(device, dtype), (3, width), eps=1e-6)
        ramp = torch.linspace(-60, 100, width, device=device)
        case.kwargs["input"] = (case.kwargs["input"] * 0.1 + torch.stack([ramp, ramp.flip(0), ramp.sign() * 30])).to(
            dtype
        )
        check(ltx, case)


@every_dtype
def test_constant_rows(ltx, device, dtype):
    """No variance: eps alone stands below the root. Values whose mean is exact in any order."""
    for width in (64, 2048):
        x = torch.tensor([3.0, -0.5, 0.0], device=device, dtype=dtype)[:, None].expand(3, width)
        assert bool((ltx.layernorm(x, eps=1e-5) == 0).all())


@every_dtype
@pytest.mark.parametrize("magnitude", [1e-20, 1e-12, 1e10, 1e18, 3e37])
def test_magnitudes(ltx, device, dtype, magnitude):
    """Squares that leave the range of fp32 cost no more than in torch."""
    if dtype == torch.float16:
        magnitude = min(max(magnitude, 1e-7), 3e4)
    make = Make(device, dtype)
    x = make(3, 64, std=magnitude / 4)
    for eps in (0.0, 1e-6):
        for op in ("rmsnorm", "layernorm"):
            case = Case(op, {"input": x, "eps": eps})
            output = case.run(ltx)[0]
            assert_close_to_fp64(output, case.truth(ltx)[0], case.terms(ltx)[0], eager=lambda c=case: c.eager()[0])


# ---- rounding="eager"


def _exact_sums(op: str, make: Make, shape: tuple[int, ...], **options) -> Case:
    """Small integers in rows of a power of two: whatever the order, the sum of squares is the same."""
    case = norm_case(op, make, shape, **options)
    case.kwargs["input"] = make.integers(*shape)
    if "residual" in case.kwargs:
        case.kwargs["residual"] = make.integers(*shape)
    if "residual" in case.kwargs and "gate" in case.kwargs:
        case.kwargs["gate"] = make.integers(*case.kwargs["gate"].shape, dtype=case.kwargs["gate"].dtype)
    return case


@pytest.mark.parametrize("op", [op for op in NORM_OPS if "layernorm" not in op and len(eps_names(op)) < 2])
@every_dtype
@pytest.mark.parametrize("param_dtype", DTYPES, ids=str)
def test_eager_bitwise(ltx, device, op, dtype, param_dtype):
    """Where the order of the sum cannot matter, every bit of the eager chain, in all mixtures of dtypes.

    The second of two norms sums what the first one rounded: no integers.
    """
    make = Make(device, dtype)
    tables = [name for name in MODULATORS if name in NORM_OPS[op]]
    for modulation_dtype in DTYPES:
        dtypes = {"param_dtype": param_dtype, "modulation_dtype": modulation_dtype}
        for width in (8, 64, 1024):
            case = _exact_sums(op, make, (2, 3, width), **dtypes)
            if case.op == "gated_residual":
                case = norm_case(op, make, (2, 3, width), **dtypes)  # no statistic: any numbers
            check_eager(ltx, case, exact=True)
            with_tables = case.replace(**{f"{name}_table": make(width, dtype=modulation_dtype) for name in tables})
            if "residual" in case.kwargs and "gate" in case.kwargs and op != "gated_residual":
                with_tables.kwargs["gate_table"] = make.integers(width, dtype=modulation_dtype)
            check_eager(ltx, with_tables, exact=True)


@pytest.mark.parametrize("op", ["rmsnorm", "rmsnorm_residual"])
@every_dtype
def test_eager_weight_offset_bitwise(ltx, device, op, dtype):
    make = Make(device, dtype)
    for param_dtype in DTYPES:
        check_eager(ltx, _exact_sums(op, make, (6, 64), param_dtype=param_dtype, weight_offset=1.0), exact=True)


@every_op
@every_dtype
@pytest.mark.parametrize("width", [33, 64, 250, 2048, 4096, 20000])
def test_eager(ltx, device, op, dtype, width):
    """Any rows: few elements differ, by what rounding the other way can do."""
    make = Make(device, dtype, seed=width)
    rows = max(4, 20000 // width)
    check_eager(ltx, norm_case(op, make, (2, rows, width), modulation="[B, S, H]"))
    check_eager(ltx, norm_case(op, make, (2, rows, width), without=("weight", "bias")))
    tables = [name for name in MODULATORS if name in NORM_OPS[op]]
    check_eager(ltx, norm_case(op, make, (2, rows, width), tables=tables))


@every_op
@every_layout
def test_eager_layouts_and_out(ltx, device, op, layout):
    for dtype in DTYPES:
        case = norm_case(op, Make(device, dtype), (2, 3, 264), modulation="[B, S, H]", rounding="eager")
        expected = case.run(ltx)
        for output, want in zip(case.in_layout(layout).run(ltx), expected, strict=True):
            assert_same_bits(output, want, layout)
        check_out(ltx, case, layout)


@pytest.mark.parametrize("op", [op for op in NORM_OPS if op != "layernorm"])
def test_roundings_differ(ltx, device, op):
    """The two modes are not one."""
    case = norm_case(op, Make(device, torch.bfloat16), (2, 30, 256))
    assert not torch.equal(case.run(ltx)[0], case.replace(rounding="eager").run(ltx)[0])


# ---- Large


@pytest.mark.parametrize("op", ["rmsnorm", "layernorm", "rmsnorm_residual", "adaln_zero"])
def test_strides_above_int32(ltx, device, op):
    """Two rows more than 2^31 elements apart, in memory that is reserved but never touched in between."""
    width, apart = 264, 2**31 + 8
    flat = _reserve(apart + width, device)
    # A modulator for each row: rows that share their operands are walked in another way.
    case = norm_case(op, Make(device, torch.bfloat16), (2, width), modulation="[B, S, H]")
    expected = case.run(ltx)
    far = flat.as_strided((2, width), (apart, 1))
    far.copy_(case.kwargs["input"])
    for output, want in zip(case.replace(input=far).run(ltx), expected, strict=True):
        assert_same_bits(output, want)
    columns = flat.as_strided((2, width), (1, apart // width))
    columns.copy_(case.kwargs["input"])
    for output, want in zip(case.replace(input=columns).run(ltx), expected, strict=True):
        assert_same_bits(output, want)
    far.zero_()
    outputs = case.run(ltx, out=far)
    assert_same_bits(outputs[0], expected[0])


def _reserve(elements: int, device: str) -> torch.Tensor:
    try:
        return torch.empty(elements, dtype=torch.bfloat16, device=device)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        pytest.skip(f"not enough memory for {elements} elements: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("op", ["rmsnorm", "gated_residual"])
@pytest.mark.parametrize("width", [1, 64, 4096])
def test_more_than_2_31_elements(ltx, device, op, width):
    if device == "cpu" and width != 4096:
        pytest.skip("minutes on a CPU")
    rows = 2**31 // width + 3
    x, out = (_reserve(rows * width, device).view(rows, width) for _ in range(2))
    x.fill_(0.5)
    places = (0, rows // 2, rows - 8)  # the last ones straddle element 2^31
    for first in places:
        x[first : first + 8] = Make(device, torch.bfloat16, seed=first)(8, width)
    kwargs = {"input": x}
    if op == "gated_residual":
        kwargs |= {"residual": x, "gate": torch.full((width,), 0.5, dtype=x.dtype, device=device)}
    Case(op, kwargs).run(ltx, out=out)
    for first in places:
        part = Case(op, {name: t[first : first + 8] if t.dim() == 2 else t for name, t in kwargs.items()})
        assert_same_bits(out[first : first + 8], part.run(ltx)[0], f"rows from {first}")


@pytest.mark.slow
def test_more_than_2_32_rows(ltx, cuda):
    """Rows past uint32 that do not merge into one dimension: a gate per batch, and inputs that are one number."""
    try:
        out = torch.empty(3, 2**31, 1, dtype=torch.bfloat16, device=cuda)
    except torch.OutOfMemoryError as error:
        pytest.skip(f"not enough memory: {error}")
    x = torch.full((1, 1, 1), 2.0, dtype=torch.bfloat16, device=cuda).expand(out.shape)
    gate = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16, device=cuda)[:, None]
    ltx.gated_residual(x, x, gate, out=out)
    for batch in range(3):
        assert out[batch].min().item() == out[batch].max().item() == 2 + 2 * (batch + 1)
