"""Modulation and gated residuals: the shapes a modulator comes in, tables, and what may be left out.

Row lengths, layouts, in-place use, bits and special values of these functions are in test_norm.py, with all norms.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    DTYPES,
    LAYOUTS,
    MODEL_INDEX,
    MODULATORS,
    NORM_OPS,
    Case,
    Make,
    assert_close_to_fp64,
    assert_same_bits,
    check,
    check_eager,
    eps_names,
    fp32_parameters_case,
    index_case,
    model_index_case,
    modulator_shape,
    norm_case,
    optional,
    place,
    without_index,
)

MODULATED = [op for op, tensors in NORM_OPS.items() if set(tensors) & set(MODULATORS)]
every_op = pytest.mark.parametrize("op", MODULATED)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def modulators(op: str) -> list[str]:
    return [name for name in NORM_OPS[op] if name in MODULATORS]


# ---- The definition: ltx.reference against formulas written here


def _double(make: Make, *shape: int) -> torch.Tensor:
    return make(*shape, dtype=torch.float64)


@pytest.mark.host
@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_reference_formulas(ltx, device, eps):
    make = Make(device, torch.float64)
    x, residual = _double(make, 2, 5, 16), _double(make, 2, 5, 16)
    weight, bias = _double(make, 16), _double(make, 16)
    scale, shift, gate = (_double(make, 2, 1, 16) for _ in range(3))
    tables = [_double(make, 16) for _ in range(3)]

    def rms(h: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(h, (16,), weight, eps)

    def layer(h: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(h, (16,), weight, bias, eps)

    h = residual + x * gate
    h_table = residual + x * (gate + tables[2])
    named = dict(zip(("scale_table", "shift_table"), tables[:2], strict=True))
    factor, offset = 1 + scale + tables[0], shift + tables[1]
    r = ltx.reference
    pairs = [
        (r.adaln_rmsnorm(x, weight, scale, shift, eps), rms(x) * (1 + scale) + shift),
        (r.adaln_layernorm(x, weight, scale, shift, bias, eps), layer(x) * (1 + scale) + shift),
        (r.adaln_zero(x, weight, scale, shift, gate, eps), (rms(x) * (1 + scale) + shift) * gate),
        (r.gated_residual(x, residual, gate), h),
        (r.gated_residual_adaln_rmsnorm(x, residual, gate, weight, scale, shift, eps)[0], rms(h) * (1 + scale) + shift),
        (r.gated_residual_adaln_rmsnorm(x, residual, gate, weight, scale, shift, eps)[1], h),
        (
            r.gated_residual_adaln_layernorm(x, residual, gate, weight, scale, shift, bias, eps)[0],
            layer(h) * (1 + scale) + shift,
        ),
        (r.adaln_rmsnorm(x, weight, scale, shift, eps, **named), rms(x) * factor + offset),
        (r.adaln_layernorm(x, weight, scale, shift, bias, eps, **named), layer(x) * factor + offset),
        (
            r.adaln_zero(x, weight, scale, shift, gate, eps, **named, gate_table=tables[2]),
            (rms(x) * factor + offset) * (gate + tables[2]),
        ),
        (r.gated_residual(x, residual, gate, gate_table=tables[2]), h_table),
        (
            r.gated_residual_adaln_rmsnorm(x, residual, gate, weight, scale, shift, eps, **named, gate_table=tables[2])[
                0
            ],
            rms(h_table) * factor + offset,
        ),
    ]
    for value, expected in pairs:
        torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-11)


def test_defaults(ltx, device):
    """eps where it is not given, on rows that it decides."""
    for op in MODULATED:
        if op == "gated_residual":
            continue
        case = norm_case(op, Make(device, torch.float32), (2, 3, 32))
        for name in ("input", "residual"):
            if name in case.kwargs:
                case.kwargs[name] = case.kwargs[name] * 1e-3
        eps = 1e-5 if "layernorm" in op else 1e-6
        for name in eps_names(op):
            assert_same_bits(case.run(ltx)[0], case.replace(**{name: eps}).run(ltx)[0])
            assert not torch.equal(case.run(ltx)[0], case.replace(**{name: 2 * eps}).run(ltx)[0])


def test_eps_none(ltx, device):
    """As in torch.nn.RMSNorm; LayerNorm has no such meaning."""
    for op in MODULATED:
        if "layernorm" not in op and op != "gated_residual":
            case = norm_case(op, Make(device, torch.bfloat16), (2, 3, 32))
            case.kwargs["input"] *= 1e-4
            check(ltx, case.replace(**dict.fromkeys(eps_names(op))))


# ---- Shapes of modulators


@every_op
@every_dtype
@pytest.mark.parametrize(
    ("shape", "modulation"),
    [
        ((2, 6, 40), "per batch"),
        ((2, 6, 40), "one for all batches"),
        ((2, 6, 40), "vector"),
        ((2, 6, 40), "[B, 1, H]"),
        ((2, 6, 40), "[1, S, H]"),
        ((2, 6, 40), "[B, S, H]"),
        ((2, 6, 40), "[B, S, 1]"),
        ((2, 6, 40), "one number"),
        ((2, 3, 4, 264), "per batch"),
        ((2, 3, 4, 264), "one for all batches"),
        ((2, 3, 4, 264), "[B, 1, H]"),
        ((2, 3, 4, 264), "[1, S, H]"),
        ((2, 3, 4, 264), "[S, H]"),
        ((2, 3, 4, 264), "[B, S, H]"),
        ((2, 3, 4, 264), "[B, S, 1]"),
        ((6, 40), "vector"),
        ((6, 40), "one for all batches"),
        ((6, 40), "per batch"),
        ((3, 3, 40), "per batch"),  # [B, H], not [S, H]
        ((40,), "vector"),
        ((40,), "one number"),
    ],
)
def test_modulator_shapes(ltx, device, op, dtype, shape, modulation):
    make = Make(device, dtype)
    case = norm_case(op, make, shape, modulation=modulation)
    check(ltx, case)
    tables = {f"{name}_table": make(shape[-1]) for name in modulators(op)}
    check(ltx, case.replace(**tables))
    check_eager(ltx, case.replace(**tables))


@every_op
def test_modulators_of_different_shapes(ltx, device, op):
    """Each modulator broadcasts by itself."""
    make = Make(device, torch.bfloat16)
    names, kinds = modulators(op), ["per batch", "[B, S, H]", "vector", "[1, S, H]", "[B, S, 1]"]
    for chosen in itertools.islice(itertools.product(kinds, repeat=len(names)), 0, None, 1 + 5 ** len(names) // 150):
        case = norm_case(op, make, (2, 3, 40))
        for name, kind in zip(names, chosen, strict=True):
            case.kwargs[name] = make(*modulator_shape(kind, (2, 3, 40)))
        check(ltx, case)


@every_op
def test_zero_dimensional_modulator(ltx, device, op):
    case = norm_case(op, Make(device, torch.float32), (2, 3, 40))
    for name in modulators(op):
        value = torch.tensor(0.625, device=device)
        expected = case.replace(**{name: value.expand(2, 1, 40).clone()}).run(ltx)
        for output, want in zip(case.replace(**{name: value}).run(ltx), expected, strict=True):
            assert_same_bits(output, want, name)


@pytest.mark.parametrize("tokens", [1, 7])
@every_dtype
def test_modulation_views_of_ltx(ltx, device, dtype, tokens):
    """LTX-Video's [B, T, 6, H] unbound into strided views, T = 1 or one per token, plus rows of a [6, H] table."""
    make = Make(device, dtype)
    batch, sequence, hidden = 2, 7, 128
    temb, table = make(batch, tokens, 6 * hidden), make(6, hidden, std=hidden**-0.5)
    views = temb.view(batch, tokens, 6, hidden).unbind(2)
    assert not views[0].is_contiguous()
    shift, scale, gate = views[:3]
    x, residual = make(batch, sequence, hidden), make(batch, sequence, hidden)
    scale_shift = {"scale": scale, "shift": shift, "scale_table": table[1], "shift_table": table[0]}
    norm = Case("adaln_rmsnorm", {"input": x, "weight": None, **scale_shift})
    gated = {"input": x, "residual": residual, "gate": gate, "gate_table": table[2]}
    for case in (norm, Case("gated_residual", gated), Case("gated_residual_adaln_rmsnorm", {**gated, **scale_shift})):
        outputs = check(ltx, case)
        check_eager(ltx, case)
        # The sum of table and views made first, as the stock model does, is the same modulation.
        ada = table[None, None] + temb.view(batch, tokens, 6, hidden)
        made = {"shift": ada[:, :, 0], "scale": ada[:, :, 1], "gate": ada[:, :, 2]}
        without_tables = Case(
            case.op,
            {name: made.get(name, value) for name, value in case.kwargs.items() if not name.endswith("_table")},
        )
        eager = case.replace(rounding="eager").run(ltx)
        for output, want in zip(eager, without_tables.replace(rounding="eager").run(ltx), strict=True):
            assert_same_bits(output, want, case.op)
        assert len(outputs) == len(eager)


@every_op
@pytest.mark.parametrize("layout", LAYOUTS)
def test_table_layouts(ltx, device, op, layout):
    make = Make(device, torch.float16)
    tables = {f"{name}_table": make(264, dtype=torch.float32) for name in modulators(op)}
    case = norm_case(op, make, (2, 3, 264)).replace(**tables)
    expected = case.run(ltx)
    outputs = case.replace(**{name: place(table, layout) for name, table in tables.items()}).run(ltx)
    for output, want in zip(outputs, expected, strict=True):
        assert_same_bits(output, want)


@every_op
@pytest.mark.parametrize("width", [8, 64, 1024, 2048, 3072, 5120, 9216])
def test_fp32_parameters(ltx, device, op, width):
    """The row kernel reads these on a GPU, too."""
    make = Make(device, torch.bfloat16)
    check(ltx, fp32_parameters_case(op, make, (2, 3, width)))
    check(ltx, fp32_parameters_case(op, make, (3, width)))


# ---- Rows of modulation that an index names


@every_op
@every_dtype
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 6, 40), {}),
        ((2, 6, 40), {"per_batch": True, "index_dtype": torch.int32}),
        ((2, 6, 40), {"index_shape": (6,), "index_dtype": torch.bool, "rows": 2}),
        ((2, 6, 40), {"index_shape": (2, 1), "per_batch": True}),
        ((2, 1, 40), {"per_batch": True}),
        ((3, 3, 40), {"per_batch": True, "index_shape": (3,)}),
        ((2, 3, 4, 264), {"per_batch": True, "index_shape": (4,)}),
        ((2, 3, 4, 264), {"index_dtype": torch.int32}),
        ((6, 40), {}),
        ((6, 40), {"per_batch": True}),
        ((40,), {}),
    ],
    ids=str,
)
def test_rows_by_index(ltx, device, op, dtype, shape, options):
    """The bits of the call with a modulation for each row, written out."""
    make = Make(device, dtype)
    case = index_case(op, make, shape, **options)
    for name in [None, *modulators(op)]:
        with_table = case if name is None else case.replace(**{f"{name}_table": make(shape[-1])})
        for output, want in zip(check(ltx, with_table), without_index(with_table).run(ltx), strict=True):
            assert_same_bits(output, want, op)
    check_eager(ltx, case)


@every_op
@pytest.mark.parametrize("width", [2048, 3072, 5120, 2050])
@pytest.mark.parametrize("modulation_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_by_index_of_wide_rows(ltx, device, op, width, modulation_dtype):
    """The lengths of models: the whole packs of a thread, and a row that has none."""
    make = Make(device, torch.bfloat16)
    options = {"per_batch": True, "index_dtype": torch.int32, "modulation_dtype": modulation_dtype}
    case = index_case(op, make, (2, 9, width), **options)
    for output, want in zip(check(ltx, case), without_index(case).run(ltx), strict=True):
        assert_same_bits(output, want, op)


@pytest.mark.parametrize("op", MODEL_INDEX)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32, torch.bool], ids=str)
def test_rows_by_index_as_models_pass_them(ltx, device, op, dtype, index_dtype):
    """The row kernel reads these on a GPU, where they are bfloat16."""
    case = model_index_case(op, Make(device, dtype), index_dtype=index_dtype)
    for output, want in zip(check(ltx, case), without_index(case).run(ltx), strict=True):
        assert_same_bits(output, want, op)


@every_op
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_an_index(ltx, device, op, layout):
    case = index_case(op, Make(device, torch.bfloat16), (2, 7, 264), per_batch=True)
    expected = case.run(ltx)
    for name in ["index", *modulators(op)]:
        outputs = case.replace(**{name: place(case.kwargs[name], layout)}).run(ltx)
        for output, want in zip(outputs, expected, strict=True):
            assert_same_bits(output, want, name)


@every_op
@pytest.mark.parametrize("number", [3, -1, 2**32])
def test_a_number_that_names_no_row(ltx, backend, device, op, number):
    """It raises on the CPU, and leaves outputs alone. On a GPU the kernel stops, and no call can follow."""
    if backend != "cpu":
        pytest.skip("the process could not go on")
    case = index_case(op, Make(device, torch.float32), (2, 3, 40))
    case.kwargs["index"][1, 2] = number
    with pytest.raises(RuntimeError, match=f"index: expected numbers from 0 to 2, got {number}"):
        case.run(ltx)
    with pytest.raises(IndexError, match="index out of range"):
        case.run(ltx.reference)


def test_reference_looks_in_the_own_table_of_a_sample(ltx, device):
    """A number past its end is an error, and no row of the next sample's."""
    if device != "cpu":
        pytest.skip("the process could not go on")
    x, scale, shift = torch.randn(2, 3, 8), torch.randn(2, 4, 8), torch.randn(2, 4, 8)
    index = torch.tensor([[0, 1, 3], [3, 2, 0]])
    rows = [values[torch.arange(2)[:, None], index] for values in (scale, shift)]
    expected = ltx.reference.adaln_rmsnorm(x, None, *rows)
    assert_same_bits(ltx.reference.adaln_rmsnorm(x, None, scale, shift, index=index), expected)
    for sample, number in ((0, 4), (1, -1)):
        wrong = index.clone()
        wrong[sample, 1] = number
        with pytest.raises(IndexError, match="index out of range"):
            ltx.reference.adaln_rmsnorm(x, None, scale, shift, index=wrong)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in MODULATED for name in modulators(op)])
def test_rows_of_one_sample_serve_all(ltx, device, op, name):
    """[1, rows, H] beside a batch of two whose numbers differ: with a gradient and in plain torch as without."""
    case = index_case(op, Make(device, torch.float32), (2, 6, 40), per_batch=True)
    case = case.replace(**{name: case.kwargs[name][:1]})
    assert not torch.equal(*case.kwargs["index"])
    expected = case.run(ltx)
    followed = case.replace(input=case.kwargs["input"].clone().requires_grad_()).run(ltx)
    assert followed[0].requires_grad
    for results in (followed, case.run(ltx.reference)):
        torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)


# ---- What may be absent


@pytest.mark.parametrize("op", [op for op in MODULATED if optional(op)])
def test_every_combination_of_absent_operands(ltx, device, op):
    may_be_absent = optional(op)
    for count in range(min(len(may_be_absent), 4) + 1):
        for without in itertools.combinations(may_be_absent, count):
            for dtype in (torch.float32, torch.bfloat16):
                case = norm_case(
                    op, Make(device, dtype), (2, 3, 40), without=without, **dict.fromkeys(eps_names(op), 0.3)
                )
                check(ltx, case)
                check_eager(ltx, case)


@every_dtype
def test_relations_between_functions(ltx, device, dtype):
    """One kernel, many names: the same arguments give the same bits."""
    make = Make(device, dtype)
    x, residual, weight, bias = make(2, 3, 40), make(2, 3, 40), make(40), make(40)
    zeros = torch.zeros_like(x)
    # The output gate 1 and the modulation 0 change no bit.
    assert_same_bits(ltx.adaln_rmsnorm(x, weight, zeros, zeros), ltx.rmsnorm(x, weight))
    assert_same_bits(ltx.adaln_layernorm(x, weight, zeros, zeros, bias), ltx.layernorm(x, weight, bias))
    scale, shift = make(2, 40), make(2, 40)
    modulated = ltx.adaln_rmsnorm(x, weight, scale, shift)
    assert_same_bits(ltx.adaln_zero(x, weight, scale, shift, torch.ones_like(x)), modulated)
    normalised, h = ltx.gated_residual_adaln_rmsnorm(x, residual, weight=weight)
    expected = ltx.rmsnorm_residual(x, residual, weight)
    assert_same_bits(normalised, expected[0])
    assert_same_bits(h, expected[1])
    gate = make(2, 40)
    assert_same_bits(ltx.gated_residual_adaln_layernorm(x, residual, gate)[1], ltx.gated_residual(x, residual, gate))


@every_dtype
def test_norm_sees_the_unrounded_sum(ltx, device, dtype):
    """rounding="fp32": the statistic and the normalised value come from the sum as it is before it is rounded."""
    x = torch.full((1, 64), 2.0**-13, device=device, dtype=dtype)
    residual = torch.tensor([1.0, -1.0], device=device, dtype=dtype).repeat(32)[None]
    if dtype == torch.float32:
        x = x * 2**-12
    normalised, h = ltx.rmsnorm_residual(x, residual, torch.full((64,), 64.0, device=device), eps=0.0)
    truth = residual.double() + x.double()
    assert torch.equal(h, residual), "the small addend is lost where the sum is rounded"
    expected = 64 * truth / truth.square().mean(-1, keepdim=True).sqrt()
    assert_close_to_fp64(normalised, expected, 64 * (truth.abs()))


def test_positional_arguments(ltx, device):
    """The order is the public contract."""
    make = Make(device, torch.bfloat16)
    x, residual, weight, bias, scale, shift, gate = (
        make(2, 3, 40),
        make(2, 3, 40),
        make(40),
        make(40),
        make(2, 40),
        make(2, 40),
        make(2, 40),
    )
    calls = [
        (("rmsnorm", x, weight, 0.3), {"weight": weight, "eps": 0.3}),
        (("rmsnorm_residual", x, residual, weight, 0.3), {"residual": residual, "weight": weight, "eps": 0.3}),
        (("layernorm", x, weight, bias, 0.3), {"weight": weight, "bias": bias, "eps": 0.3}),
        (
            ("adaln_rmsnorm", x, weight, scale, shift, 0.3),
            {"weight": weight, "scale": scale, "shift": shift, "eps": 0.3},
        ),
        (
            ("adaln_layernorm", x, weight, scale, shift, bias, 0.3),
            {"weight": weight, "scale": scale, "shift": shift, "bias": bias, "eps": 0.3},
        ),
        (
            ("adaln_zero", x, weight, scale, shift, gate, 0.3),
            {"weight": weight, "scale": scale, "shift": shift, "gate": gate, "eps": 0.3},
        ),
        (("gated_residual", x, residual, gate), {"residual": residual, "gate": gate}),
        (
            ("gated_residual_adaln_rmsnorm", x, residual, gate, weight, scale, shift, 0.3),
            {"residual": residual, "gate": gate, "weight": weight, "scale": scale, "shift": shift, "eps": 0.3},
        ),
        (
            ("gated_residual_adaln_layernorm", x, residual, gate, weight, scale, shift, bias, 0.3),
            {
                "residual": residual,
                "gate": gate,
                "weight": weight,
                "scale": scale,
                "shift": shift,
                "bias": bias,
                "eps": 0.3,
            },
        ),
    ]
    for (op, *arguments), named in calls:
        for module in (ltx, ltx.reference):
            result = getattr(module, op)(*arguments)
            result = result if isinstance(result, tuple) else (result,)
            for output, want in zip(result, Case(op, {"input": x, **named}).run(module), strict=True):
                assert_same_bits(output, want, op)
