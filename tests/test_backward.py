"""The gradients that kernels give: of every op with an autograd.Function, against float64 autograd of the formulas."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import (
    LAYOUTS,
    NORM_OPS,
    Case,
    Make,
    assert_same_bits,
    every_case,
    norm_case,
    place,
    qk_norm_rope_case,
    rotary_case,
)
from helpers.cases import MODULATORS, eps_names, index_case, offers_offset, optional
from helpers.numeric import OUTPUT_ULPS, SUM_ERROR, report, ulp
from helpers.registry import SCHEMAS
from torch import Tensor
from torch.utils.checkpoint import CheckpointError, checkpoint

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Backward ops, which have no `_out` twins. Their calls are those that the Functions make.
OPS = [name for name in SCHEMAS if name.endswith("_backward")]
# The public functions whose ops have a Function, and the arguments that it gives gradients of.
GIVEN = {
    **{op: ("input", "residual") if "residual" in tensors else ("input",) for op, tensors in NORM_OPS.items()},
    "apply_rotary": ("input",),
    "apply_rotary_qk": ("query", "key"),
    "qk_norm_rope": ("query", "key"),
    "geglu": ("input", "up"),
    "swiglu": ("input", "up"),
    "swiglu_clamped": ("input", "up"),
    "gelu": ("input",),
    "gate_heads": ("input", "logits"),
}
CASES = [name for name, case in every_case(Make("cpu", torch.float32)).items() if case.op in GIVEN]
# Approximations of 16-bit rows, in the largest number of the gradient's row: exponentials and polynomials.
APPROXIMATION = 2.0**-13


def case_of(name: str, device: str, dtype: torch.dtype) -> Case:
    return every_case(Make(device, dtype))[name]


def given(case: Case) -> list[str]:
    return [name for name in GIVEN[case.op] if isinstance(case.kwargs.get(name), Tensor)]


def with_needs(case: Case, needs: Sequence[str]) -> Case:
    """The same call, whose arguments of these names need a gradient."""
    fresh = {
        name: value.detach().requires_grad_(name in needs)
        for name, value in case.kwargs.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    return case.replace(**fresh)


def random_like(outputs: Sequence[Tensor], seed: int = 7) -> list[Tensor]:
    make = Make(str(outputs[0].device), outputs[0].dtype, seed=seed)
    return [make(*output.shape) for output in outputs]


def gradients(module: Any, case: Case, needs: Sequence[str], grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """The gradients of the arguments `needs`, given those of the outputs (None: nothing reads the output)."""
    case = with_needs(case, needs)
    results = zip(case.run(module), grads, strict=True)
    pairs = [(out, grad) for out, grad in results if grad is not None and out.requires_grad]
    found = torch.autograd.grad(
        [out for out, _ in pairs], [case.kwargs[name] for name in needs], [grad for _, grad in pairs], allow_unused=True
    )
    return {name: grad for name, grad in zip(needs, found, strict=True) if grad is not None}


def clamp(self: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """torch.clamp, with a gradient at a bound itself, which torch gives none from 2.14 on."""
    result = self if max is None else torch.where(self > max, max, self)
    return result if min is None else torch.where(result < min, min, result)


def truth(ltx: Any, case: Case, needs: Sequence[str], grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """The same of the formulas in float64, at the numbers that the Function has saved."""
    wide = case.map(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    wide.kwargs.pop("rounding", None)
    if "residual_out" in case.output_names:  # the sum that the Function keeps is rounded
        with torch.no_grad():
            rounding = case.run(ltx)[-1].double() - wide.run(ltx.reference)[-1]
        wide = wide.replace(residual=wide.kwargs["residual"] + rounding)
    with mock.patch.object(Tensor, "clamp", clamp):
        return gradients(ltx.reference, wide, needs, [None if grad is None else grad.double() for grad in grads])


def assert_right(actual: dict[str, Tensor], expected: dict[str, Tensor], case: Case) -> None:
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        got, dtype = actual[name], case.kwargs[name].dtype
        assert got.dtype == dtype and got.shape == want.shape
        largest = want.abs().amax(-1, keepdim=True) if want.dim() else want.abs()
        unit = 4 * SUM_ERROR if dtype == torch.float32 else APPROXIMATION
        error, allowed = (got.double() - want).abs(), OUTPUT_ULPS[dtype] * ulp(want, dtype) + unit * largest
        allowed += torch.finfo(torch.float32).tiny  # what is smaller may become 0
        wrong = ~(error <= allowed)
        assert not wrong.any(), report(got, want, wrong, f"{case.op}: gradient of {name}", error, allowed)


def check(ltx: Any, case: Case, needs: Sequence[str] | None = None) -> dict[str, Tensor]:
    needs = given(case) if needs is None else needs
    with torch.no_grad():
        outputs = case.run(ltx)
    grads = random_like(outputs)
    found = gradients(ltx, case, needs, grads)
    assert_right(found, truth(ltx, case, needs, grads), case)
    return found


def runs_function(case: Case, ltx: Any) -> bool:
    """Whether the results come from a Function of this package."""
    found = type(case.run(ltx)[0].grad_fn)
    return found.__module__ == "torch.autograd.function" and "Backward" in found.__name__


every_case_of = pytest.mark.parametrize("name", CASES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def test_the_table_is_whole(ltx: Any) -> None:
    """Every Function has a case here, and gives what this table says."""
    functions = ltx._autograd.FUNCTIONS
    names = {name for function in functions.values() for name in function.given}
    assert all(not set(function.given) & set(function.shared) for function in functions.values())
    assert {name for given_names in GIVEN.values() for name in given_names} == names
    assert {case_of(name, "cpu", torch.float32).op for name in CASES} == set(GIVEN)


def test_every_function_has_a_mark_of_its_own(ltx: Any, device: str) -> None:
    marks: dict[int, set[str]] = {}
    for name in CASES:
        case = case_of(name, device, torch.float32)
        case = with_needs(case, given(case))
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            (out, *_) = case.run(ltx)
        assert saved[-1].numel() == 0
        marks.setdefault(saved[-1].shape[1] & 255, set()).add(type(out.grad_fn).__name__)
    assert all(len(functions) == 1 for functions in marks.values())
    assert len(marks) == len(ltx._autograd.FUNCTIONS)


# ---- float64


@every_case_of
@every_dtype
def test_every_op_and_need(ltx: Any, device: str, name: str, dtype: torch.dtype) -> None:
    case = case_of(name, device, dtype)
    names = given(case)
    whole = check(ltx, case)
    assert runs_function(with_needs(case, names), ltx)
    for count in range(1, len(names)):
        for needs in itertools.combinations(names, count):
            for name, grad in check(ltx, case, needs).items():
                assert_same_bits(grad, whole[name], f"{name} alone")


ROTARY = {
    "full table": {"table": "[S, D]"},
    "half table": {"table": "[S, D/2]"},
    "halves": {"table": "[S, D]", "layout": "half"},
    "halves, half table": {"table": "[S, D/2]", "layout": "half"},
}
# Of a sum over rows as a whole: what is multiplied was rounded to the rows' dtype, and so is the sum.
SHARED_ERROR = {torch.float32: 2.0**-18, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
WITH_SHARED = [name for name in CASES if case_of(name, "cpu", torch.float32).op in (*NORM_OPS, "qk_norm_rope")]


def shared_by_rows(case: Case) -> list[str]:
    """Weights, biases, scales, shifts, gates and tables."""
    tensors = (name for name, value in case.kwargs.items() if isinstance(value, Tensor) and value.is_floating_point())
    return [name for name in tensors if name not in GIVEN[case.op] and not name.endswith(("cos", "sin"))]


def rows_of(case: Case) -> Tensor:
    rows: Tensor = case.kwargs[GIVEN[case.op][0]]
    return rows


def check_shared(ltx: Any, case: Case) -> None:
    """All at once, one alone, and beside the gradients of rows: the same bits in each."""
    names, dtype = shared_by_rows(case), rows_of(case).dtype
    with torch.no_grad():
        grads = random_like(case.run(ltx))
    assert runs_function(with_needs(case, names), ltx)
    whole = gradients(ltx, case, names, grads)
    assert_near(whole, truth(ltx, case, names, grads), case, dtype)
    beside = gradients(ltx, case, [*given(case), *names], grads)
    for key, grad in whole.items():
        assert_same_bits(gradients(ltx, case, [key], grads)[key], grad, f"{key} alone")
    for key, grad in {**check(ltx, case), **whole}.items():
        assert_same_bits(beside[key], grad, f"{key} beside all others")
    for i in range(len(grads)) if len(grads) > 1 else ():
        one = [grad if i == j else None for j, grad in enumerate(grads)]
        want = {key: grad for key, grad in truth(ltx, case, names, one).items() if grad.any()}
        found = gradients(ltx, case, names, one)
        assert_near({key: found[key] for key in want}, want, case, dtype)


def assert_near(found: dict[str, Tensor], want: dict[str, Tensor], case: Case, dtype: torch.dtype) -> None:
    assert found.keys() == want.keys()
    for key, grad in found.items():
        own = case.kwargs[key].dtype
        assert grad.dtype == own and grad.shape == want[key].shape
        size = max(want[key].norm().item(), rows_of(case).numel() ** 0.5)  # terms of about 1 may cancel
        error = (grad.double() - want[key]).norm()
        exact = key.startswith(("shift", "bias"))  # sums of the gradients themselves
        bound = SHARED_ERROR[own] if exact else max(SHARED_ERROR[dtype], SHARED_ERROR[own])
        assert error <= bound * size, f"{case.op}: {key}"


@pytest.mark.parametrize("name", WITH_SHARED)
@every_dtype
def test_what_rows_share(ltx: Any, device: str, name: str, dtype: torch.dtype) -> None:
    case = case_of(name, device, dtype)
    if not shared_by_rows(case):
        pytest.skip("rows share nothing in this call")
    check_shared(ltx, case)


@pytest.mark.parametrize("form", ROTARY)
@pytest.mark.parametrize("across_heads", [True, False])
@every_dtype
def test_weights_of_query_and_key(ltx: Any, device: str, form: str, across_heads: bool, dtype: torch.dtype) -> None:
    """Whose results turn, by tables of their own or one; a pair's entries differ in a full table."""
    make = Make(device, dtype)
    norm = {"across_heads": across_heads, "eps": 0.3, "weight_offset": 1.0, **ROTARY[form]}
    check_shared(ltx, qk_norm_rope_case(make, (2, 5, 3, 16), **norm))
    check_shared(ltx, qk_norm_rope_case(make, (2, 5, 3, 16), key=(4, 7), **norm))
    check_shared(ltx, qk_norm_rope_case(make, (2, 5, 3, 16), norm="layer", biases=True, key=(4, 7), **norm))


@pytest.mark.parametrize("op", NORM_OPS)
def test_forms_of_what_rows_share(ltx: Any, device: str, op: str) -> None:
    """Vectors of every shape and dtype, with tables, or in rows that an index names; eps and offsets that count."""
    eps = dict.fromkeys(eps_names(op), 0.3)
    offset = {"weight_offset": 1.0} if offers_offset(op) else {}
    modulators = [name for name in MODULATORS if name in NORM_OPS[op]]
    shape = (3, 40, 64)
    for dtype in (torch.float32, torch.bfloat16):
        make = Make(device, dtype)
        cases = [norm_case(op, make, shape, tables=modulators, **eps, **offset)]
        cases.append(norm_case(op, make, shape, param_dtype=torch.float32, modulation_dtype=torch.float32, **eps))
        if modulators:
            for modulation in ("per batch", "vector", "[B, S, H]", "[B, S, 1]", "one number"):
                cases.append(norm_case(op, make, shape, modulation=modulation, tables=modulators, **eps))
            for per_batch in (False, True):
                cases.append(index_case(op, make, shape, per_batch=per_batch, **eps))
        for case in cases:
            check_shared(ltx, case)


WIDTHS = [2, 6, 8, 34, 64, 130, 256, 1024, 2050, 4096]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["geglu erf", "swiglu", "swiglu_clamped", "gelu tanh, bias", "gate_heads"])
def test_row_lengths_of_activations(ltx: Any, device: str, name: str, width: int) -> None:
    from helpers import activation_case, gate_heads_case

    for dtype in DTYPES:
        make = Make(device, dtype, seed=width)
        if name == "gate_heads":
            check(ltx, gate_heads_case(make, (3, 2, 3, width), scale=2.0))
            check(ltx, gate_heads_case(make, (3, 2, 3, width), per_head=False))
        else:
            check(ltx, activation_case(name, make, (3, 2, width)))


def test_large_arguments_of_activations(ltx: Any, device: str) -> None:
    """As torch has them: 0 or 1 far out, and what is clamped has none, but at the bound itself."""
    for dtype in DTYPES:
        x = torch.tensor([-3e4, -200.0, -90.0, -20.0, -7.0, -0.0, 0.0, 1.0, 7.0, 20.0, 90.0, 200.0, 3e4], device=device)
        x = x.to(dtype)
        up = torch.ones_like(x)
        for case in (
            Case("gelu", {"input": x}),
            Case("gelu", {"input": x, "approximate": "tanh"}),
            Case("swiglu", {"input": x, "up": up}),
            Case("swiglu_clamped", {"input": x, "up": x.flip(0)}),
            Case("gate_heads", {"input": up[:, None], "logits": x}),
        ):
            check(ltx, case)


@pytest.mark.parametrize("width", [34, 64, 130, 256, 1000, 1024, 2048, 2056, 3072, 6144, 20000])
@pytest.mark.parametrize("op", NORM_OPS)
def test_row_lengths_of_norms(ltx: Any, device: str, op: str, width: int) -> None:
    tables = [name for name in ("scale", "gate") if name in NORM_OPS[op]]
    for dtype in DTYPES:
        check(ltx, norm_case(op, Make(device, dtype, seed=width), (2, 3, width), tables=tables if width > 2000 else ()))


@pytest.mark.parametrize("op", NORM_OPS)
def test_forms_of_modulation(ltx: Any, device: str, op: str) -> None:
    """Vectors of every shape and dtype, or none; eps and offsets that count."""
    eps = dict.fromkeys(eps_names(op), 0.3)
    offset = {"weight_offset": 1.0} if offers_offset(op) else {}
    for dtype in (torch.float32, torch.bfloat16):
        make = Make(device, dtype)
        check(ltx, norm_case(op, make, (2, 3, 64), **eps, **offset))
        check(ltx, norm_case(op, make, (2, 3, 64), without=optional(op), **eps))
        check(ltx, norm_case(op, make, (2, 3, 64), param_dtype=torch.float32, modulation_dtype=torch.float32, **eps))
        check(ltx, norm_case(op, make, (2, 3, 64), param_dtype=torch.float16, **eps))
        for modulation in ("per batch", "vector", "[B, S, H]", "[B, S, 1]", "one number"):
            if any(name in NORM_OPS[op] for name in MODULATORS):
                check(ltx, norm_case(op, make, (2, 3, 64), modulation=modulation, **eps))


@pytest.mark.parametrize(
    "op", [op for op in NORM_OPS if len(norm_case(op, Make("cpu", torch.float32), (1, 8)).output_names) > 1]
)
def test_outputs_that_nothing_reads(ltx: Any, device: str, op: str) -> None:
    """Their gradient is None."""
    for dtype in (torch.float32, torch.bfloat16):
        case = norm_case(op, Make(device, dtype), (2, 3, 64))
        needs, outputs = given(case), case.run(ltx)
        grads = random_like(outputs)
        for read in itertools.product((False, True), repeat=len(outputs)):
            if any(read):
                some = [grad if reads else None for grad, reads in zip(grads, read, strict=True)]
                assert_right(gradients(ltx, case, needs, some), truth(ltx, case, needs, some), case)


@pytest.mark.parametrize("rounding", ["fp32", "eager"])
def test_gradients_are_those_of_the_fp32_formula(ltx: Any, device: str, rounding: str) -> None:
    """Straight through the roundings of eager code."""
    for name in CASES:
        case = case_of(name, device, torch.bfloat16)
        needs, outputs = given(case), case.run(ltx)
        grads = random_like(outputs)
        if "residual_out" not in case.output_names:  # whose roundings differ
            expected = gradients(ltx, case, needs, grads)
            for key, grad in gradients(ltx, case.replace(rounding=rounding), needs, grads).items():
                assert_same_bits(grad, expected[key], f"{name}: {key}")


def test_gradients_of_one_sum_lie_apart(ltx: Any, device: str) -> None:
    """The gradients of bias, shift and table are one sum. Each may be written to."""
    case = norm_case("adaln_layernorm", Make(device, torch.float32), (1, 3, 64), tables=("shift",))
    needs = [name for name in shared_by_rows(case) if name in ("bias", "shift") or "table" in name]
    found = gradients(ltx, case, needs, random_like(case.run(ltx)))
    assert len(found) == 3
    assert len({grad.untyped_storage().data_ptr() for grad in found.values()}) == 3


def test_input_and_residual_are_one_tensor(ltx: Any, device: str) -> None:
    x = Make(device, torch.float32)(2, 3, 64).requires_grad_()
    out, hidden = ltx.rmsnorm_residual(x, x)
    (grad,) = torch.autograd.grad((out.cos().sum() + hidden.sin().sum()), x)
    out, hidden = ltx.reference.rmsnorm_residual(x, x)
    (expected,) = torch.autograd.grad((out.cos().sum() + hidden.sin().sum()), x)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("form", ROTARY)
@every_dtype
def test_forms_of_rotation(ltx: Any, device: str, form: str, dtype: torch.dtype) -> None:
    """Each element of a full table has an entry of its own: those of a pair differ."""
    make = Make(device, dtype)
    for width in (8, 16, 64, 128, 6):
        sizes = (2, 5, 3, width)
        check(ltx, rotary_case(make, sizes, **ROTARY[form]))
        check(ltx, rotary_case(make, sizes, key=(4, 7), table_dtype=dtype, **ROTARY[form]))
        for across_heads in (True, False):
            norm = {"across_heads": across_heads, "eps": 0.3, "key": (4, 7), "weight_offset": 1.0}
            check(ltx, qk_norm_rope_case(make, sizes, **norm, **ROTARY[form]))
            if width > 6:
                check(ltx, qk_norm_rope_case(make, sizes, norm="layer", biases=True, **norm, **ROTARY[form]))


# ---- Gradients in other forms


@every_case_of
def test_gradients_of_any_layout(ltx: Any, device: str, name: str) -> None:
    """Expanded, as `.sum()` gives them, strided, transposed, misaligned: the bits of contiguous ones."""
    case = case_of(name, device, torch.bfloat16)
    needs = given(case)
    outputs = case.run(ltx)
    grads = random_like(outputs)
    expected = gradients(ltx, case, needs, grads)
    for layout in LAYOUTS:
        found = gradients(ltx, case, needs, [place(grad, layout) for grad in grads])
        for key, grad in found.items():
            assert_same_bits(grad, expected[key], f"{key}, {layout}")
        found = gradients(ltx, case.in_layout(layout), needs, grads)
        for key, grad in found.items():
            assert_same_bits(grad, expected[key], f"{key} of inputs, {layout}")
    ones = [torch.ones((), dtype=out.dtype, device=device).expand(out.shape) for out in outputs]
    whole = gradients(ltx, case, needs, [one.contiguous() for one in ones])
    for key, grad in gradients(ltx, case, needs, ones).items():
        assert_same_bits(grad, whole[key], f"{key}, expanded")


@every_case_of
def test_the_same_bits_in_every_run_and_batch(ltx: Any, device: str, name: str) -> None:
    case = case_of(name, device, torch.bfloat16)
    needs, outputs = given(case), case.run(ltx)
    grads = random_like(outputs)
    expected = gradients(ltx, case, needs, grads)
    for _ in range(20):
        for key, grad in gradients(ltx, case, needs, grads).items():
            assert_same_bits(grad, expected[key], key)
    last = case.batch(1)
    assert last is not None
    for key, grad in gradients(ltx, last, needs, [grad[1:] for grad in grads]).items():
        if grad.dim() == expected[key].dim() and grad.shape[0] == 1:
            assert_same_bits(grad, expected[key][1:], f"{key} of the last batch")


@every_case_of
def test_special_numbers(ltx: Any, device: str, name: str) -> None:
    """An infinity or NaN in the gradient reaches the gradients of its row, for GradScaler to see; zeros give zeros."""
    case = case_of(name, device, torch.float16)
    needs, outputs = given(case), case.run(ltx)
    zeros = [torch.zeros_like(out) for out in outputs]
    assert all(not grad.any() for grad in gradients(ltx, case, needs, zeros).values())
    for value in (torch.inf, torch.nan):
        grads = random_like(outputs)
        for grad in grads:
            grad.view(-1)[3] = value
        assert all(not grad.isfinite().all() for grad in gradients(ltx, case, needs, grads).values())


def test_empty(ltx: Any, device: str) -> None:
    x = torch.empty(2, 0, 64, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(ltx.swiglu(x).sum(), x)
    assert grad.shape == x.shape
    heads = torch.empty(2, 3, 0, device=device, requires_grad=True)
    logits = torch.ones(2, 3, device=device, requires_grad=True)
    _, grad = torch.autograd.grad(ltx.gate_heads(heads, logits).sum(), (heads, logits))
    assert not grad.any()


@pytest.mark.parametrize("across", [False, True], ids=["per head", "across heads"])
def test_empty_key(ltx: Any, device: str, across: bool) -> None:
    """The query's gradient has the bits that it has beside another key."""
    make = Make(device, torch.float32, seed=5)
    query, width = make(1, 3, 2, 16).requires_grad_(), 32 if across else 16
    cos, sin = make(3, width), make(3, width)
    found = []
    for tokens in (0, 5):
        key, table = make(1, tokens, 2, 16).requires_grad_(), make(tokens, width)
        outputs = ltx.qk_norm_rope(query, key, None, None, (cos, table), (sin, table), across_heads=across)
        grads = torch.autograd.grad(outputs, (query, key), [torch.ones_like(output) for output in outputs])
        assert grads[1].shape == key.shape
        found.append(grads[0])
    assert torch.equal(*found)


# ---- Who computes the gradient


@every_case_of
@pytest.mark.host
def test_plain_torch_where_the_function_has_no_gradient(ltx: Any, device: str, name: str) -> None:
    """One argument that the Function does not give: the formula, whose gradients are all right."""
    case = case_of(name, device, torch.float32)
    names = given(case)
    others = [
        key
        for key, value in case.kwargs.items()
        if isinstance(value, Tensor) and value.is_floating_point() and key not in names
    ]
    if name in WITH_SHARED:
        others = [key for key in others if key not in shared_by_rows(case)]
    for other in others:
        needs = [*names, other]
        assert not runs_function(with_needs(case, needs), ltx)
        check(ltx, case, needs)


@pytest.mark.host
def test_forward_mode_and_transforms_run_plain_torch(ltx: Any, device: str) -> None:
    x = Make(device, torch.float32)(2, 3, 64)
    expected = torch.func.grad(lambda x: ltx.reference.swiglu(x).square().sum())(x)
    torch.testing.assert_close(torch.func.grad(lambda x: ltx.swiglu(x).square().sum())(x), expected)
    per_row = torch.func.vmap(torch.func.grad(lambda x: ltx.swiglu(x).square().sum()))(x)
    torch.testing.assert_close(per_row, expected)
    _, tangent = torch.func.jvp(ltx.swiglu, (x,), (x,))
    torch.testing.assert_close(tangent, torch.func.jvp(ltx.reference.swiglu, (x,), (x,))[1])


def test_forward_mode_without_gradients_is_an_error(ltx: Any, device: str) -> None:
    """torch.no_grad() leaves forward mode on. A kernel would lose the tangents."""
    x, query = Make(device, torch.float32)(2, 3, 64), Make(device, torch.float32)(1, 4, 1, 64)
    calls = (
        ltx.swiglu,
        lambda x: ltx.linear_cat([x, x], x.new_ones(8, 128)),
        lambda x: ltx.attention(query, query, query),
    )
    for call in calls:
        with torch.no_grad(), pytest.raises(RuntimeError, match="forward-mode differentiation: expected gradients"):
            torch.func.jvp(call, (x,), (x,))


@every_case_of
@pytest.mark.host
def test_a_second_derivative_is_an_error(ltx: Any, device: str, name: str) -> None:
    """Never zeros, also where the first gradient does not depend on the result, or has other parts."""
    case = case_of(name, device, torch.float32)
    needs = given(case)
    case = with_needs(case, needs)
    x = case.kwargs[needs[0]]

    def first_gradient(package: Any, squared: bool, other: bool) -> Tensor:
        outs = [(out.square() if squared else out).sum() for out in case.run(package)]
        total = sum(outs, x.square().sum() if other else torch.zeros((), device=device))
        return torch.autograd.grad(total, x, create_graph=True)[0]

    for squared, other in itertools.product((True, False), (False, True)):
        if not squared and not first_gradient(ltx.reference, squared, False).requires_grad:
            continue  # of an op that is linear in this argument
        penalty = first_gradient(ltx, squared, other).square().sum()
        for differentiate in (
            lambda penalty=penalty: penalty.backward(retain_graph=True),
            lambda penalty=penalty: penalty.backward(inputs=[x], retain_graph=True),
            lambda penalty=penalty: torch.autograd.grad(penalty, x),
        ):
            with pytest.raises(RuntimeError, match="once_differentiable"):
                differentiate()


@pytest.mark.host
def test_saved_tensors(ltx: Any, device: str) -> None:
    """The inputs and a mark without contents: what autograd saves of eager code is several times as much."""
    saved: list[Tensor] = []
    x = Make(device, torch.bfloat16)(2, 3, 64).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        ltx.gelu(x, bias=torch.ones(64, device=device))
    assert sum(tensor.numel() for tensor in saved) == x.numel() + 64
    assert [tensor.shape[0] for tensor in saved] == [2, 64, 0]


# ---- Checkpoints


@every_case_of
def test_checkpoints(ltx: Any, device: str, name: str) -> None:
    """Computed again, with the same bits."""
    case = case_of(name, device, torch.bfloat16)
    needs = given(case)
    outputs = case.run(ltx)
    grads = random_like(outputs)
    expected = gradients(ltx, case, needs, grads)
    leaves = with_needs(case, needs)
    results = checkpoint(lambda: leaves.run(ltx), use_reentrant=False)
    found = torch.autograd.grad(results, [leaves.kwargs[key] for key in needs], grads)
    for key, grad in zip(needs, found, strict=True):
        assert_same_bits(grad, expected[key], key)


@pytest.mark.host
def test_another_path_in_a_checkpoint_is_an_error(ltx: Any, device: str) -> None:
    """The tensors of both paths have the same shapes: the mark tells them apart."""
    make = Make(device, torch.float32)
    x, up = make(2, 3, 64).requires_grad_(), make(2, 3, 64)
    for first, second in (
        (lambda: ltx.swiglu(x, up), lambda: ltx.swiglu_clamped(x, up)),
        (lambda: ltx.gelu(x), lambda: ltx.reference.gelu(x)),
    ):
        paths = iter((first, second))
        out = checkpoint(lambda paths=paths: next(paths)(), use_reentrant=False)
        with pytest.raises(CheckpointError):
            out.sum().backward()


# ---- torch.compile


@pytest.mark.extended
@every_case_of
def test_compiled(ltx: Any, device: str, name: str) -> None:
    """The whole call and its backward in one graph each."""
    case = case_of(name, device, torch.bfloat16)
    needs = given(case)
    grads = random_like(case.run(ltx))
    expected = gradients(ltx, case, needs, grads)
    leaves = with_needs(case, needs)
    compiled = torch.compile(leaves.run, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(ltx), [leaves.kwargs[key] for key in needs], grads)
    torch.compiler.reset()
    for key, grad in zip(needs, found, strict=True):
        assert_same_bits(grad, expected[key], key)


# ---- The ops themselves


@pytest.fixture(scope="module")
def samples(ltx: Any, device: str) -> dict[str, list[tuple[Any, ...]]]:
    """The arguments that backward ops get from the cases, by the op's name."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: dict[str, list[tuple[Any, ...]]] = {}

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == ltx.__name__:
                plain = tuple(arg.detach() if isinstance(arg, Tensor) else arg for arg in args)
                calls.setdefault(func._schema.name.partition("::")[2], []).append(plain)
            return func(*args, **(kwargs or {}))

    for name in CASES:
        case = case_of(name, device, torch.bfloat16)
        with Recorder():
            outputs = with_needs(case, given(case)).run(ltx)
            torch.autograd.backward(outputs[-1:], random_like(outputs[-1:]), retain_graph=True)
            torch.autograd.backward(outputs, random_like(outputs))
    return {name: calls.get(name, []) for name in OPS}


@pytest.mark.extended
@pytest.mark.parametrize("name", OPS)
def test_opcheck(ltx: Any, samples: dict[str, list[tuple[Any, ...]]], name: str) -> None:
    assert samples[name]
    for arguments in samples[name]:
        torch.library.opcheck(getattr(ltx._ops.ops, name).default, arguments)


@pytest.mark.parametrize("name", OPS)
def test_plain_torch_of_the_ops(ltx: Any, samples: dict[str, list[tuple[Any, ...]]], name: str) -> None:
    """What runs on the device that the variant has no kernels for."""
    for arguments in samples[name]:
        results = getattr(ltx._ops.ops, name).default(*arguments)
        expected = ltx._fakes.in_torch(name)(ltx._fakes.Mode(compute=True), *arguments)
        for got, want in zip(*((x,) if isinstance(x, Tensor) else x for x in (results, expected)), strict=True):
            assert got.shape == want.shape and got.stride() == want.stride()
            largest = want.float().abs().max()
            torch.testing.assert_close(got, want, rtol=2**-7, atol=float(largest) * 2**-8)


@pytest.mark.host
@pytest.mark.parametrize("name", OPS)
def test_errors_of_the_ops(ltx: Any, samples: dict[str, list[tuple[Any, ...]]], name: str) -> None:
    """The gradient's shape, dtype and kind, in the same words from the kernel and from the fake."""
    op, plain = getattr(ltx._ops.ops, name).default, ltx._fakes.in_torch(name)
    if name in ("gated_residual_backward", "apply_rotary_backward", "apply_rotary_qk_backward"):
        pytest.skip("it has nothing to compare the gradient with")
    for grad, *rest in samples[name][:1]:
        for wrong, text in (
            (grad[..., :-1], r"grad(_query)?: expected shape \["),
            (grad.float(), r"grad(_query)?: expected dtype bfloat16 \(that of "),
        ):
            messages = []
            for call in (lambda *a: op(*a), lambda *a: plain(ltx._fakes.Mode(compute=False), *a)):
                with pytest.raises(RuntimeError, match=text) as error:
                    call(wrong, *rest)
                messages.append(str(error.value))
            assert messages[0] == messages[1]
