"""geglu, swiglu, swiglu_clamped, gelu and gate_heads."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ACTIVATIONS,
    CLAMPED,
    DTYPES,
    LAYOUTS,
    Case,
    Make,
    activation_case,
    activation_eager,
    assert_same_bits,
    check,
    check_eager,
    check_out,
    gate_and_up,
    gate_heads_case,
    place,
    torch_threads,
)

WIDTHS = [1, 2, 3, 5, 7, 8, 17, 33, 64, 127, 128, 250, 1000, 1024, 1985, 2048, 2050, 4096, 8192, 16384, 32768, 40000]
FORMS = {**ACTIVATIONS, **CLAMPED}
every_activation = pytest.mark.parametrize("name", FORMS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


# ---- The definition: ltx.reference against torch


def test_reference_is_torch(ltx, device):
    x = torch.linspace(-40, 40, 4002, dtype=torch.float64, device=device)
    up = Make(device, torch.float64)(4002)
    r = ltx.reference
    for approximate in ("none", "tanh"):
        expected = F.gelu(x, approximate=approximate)
        torch.testing.assert_close(r.gelu(x, approximate=approximate), expected, rtol=1e-9, atol=1e-15)
        torch.testing.assert_close(r.geglu(x, up, approximate=approximate), expected * up, rtol=1e-9, atol=1e-15)
        packed = torch.cat((x, up))
        torch.testing.assert_close(r.geglu(packed, approximate=approximate), expected * up, rtol=1e-9, atol=1e-15)
        packed = torch.cat((up, x))
        got = r.geglu(packed, approximate=approximate, gate_first=False)
        torch.testing.assert_close(got, expected * up, rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(r.swiglu(x, up), F.silu(x) * up, rtol=1e-12, atol=0)
    torch.testing.assert_close(r.swiglu(torch.cat((up, x)), gate_first=False), F.silu(x) * up, rtol=1e-12, atol=0)
    torch.testing.assert_close(r.gelu(x, bias=up), F.gelu(x + up), rtol=1e-9, atol=1e-15)


def test_defaults(ltx, device):
    """geglu is tanh and gate first; gelu is erf."""
    packed = torch.linspace(-4, 4, 64, device=device)
    gate, up = packed.chunk(2)
    assert_same_bits(ltx.geglu(packed), ltx.geglu(gate, up, approximate="tanh"))
    assert_same_bits(ltx.swiglu(packed), ltx.swiglu(gate, up))
    assert_same_bits(ltx.gelu(packed), ltx.gelu(packed, approximate="none"))
    assert not torch.equal(ltx.gelu(packed), ltx.gelu(packed, approximate="tanh"))


# ---- fp64 truth


@pytest.mark.kernels_ci
@every_activation
@every_dtype
def test_basic(ltx, device, name, dtype):
    check(ltx, activation_case(name, Make(device, dtype), (2, 7, 256)))


@every_activation
@every_dtype
def test_row_lengths(ltx, device, name, dtype):
    for width in WIDTHS:
        check(ltx, activation_case(name, Make(device, dtype, seed=width), (3, width)))


@every_activation
@pytest.mark.parametrize("shape", [(40,), (1, 40), (1, 1, 40), (2, 3, 4, 40), (300, 8), (5, 1, 1), (70000, 1)])
def test_shapes(ltx, device, name, shape):
    for dtype in DTYPES:
        check(ltx, activation_case(name, Make(device, dtype), shape))


@every_activation
@pytest.mark.parametrize("shape", [(0,), (0, 40), (2, 0, 40), (3, 0)])
def test_empty(ltx, device, name, shape):
    case = activation_case(name, Make(device, torch.float16), shape)
    (output,) = case.run(ltx)
    assert output.shape == shape
    assert output.dtype == torch.float16
    check_out(ltx, case, "rows apart")


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if "bias" in name])
@every_dtype
@pytest.mark.parametrize("param_dtype", DTYPES, ids=str)
def test_bias_dtypes(ltx, device, name, dtype, param_dtype):
    for width in (1, 33, 264, 5000):
        check(ltx, activation_case(name, Make(device, dtype), (4, width), param_dtype=param_dtype))


# Every number of a range, so that no piece of an approximation goes unseen.
@pytest.mark.parametrize("name", ["swiglu of two", "geglu of two", "gelu erf", "gelu tanh"])
def test_every_float16(ltx, device, name):
    """All finite fp16 numbers, in fp16 and as fp32."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.float16)
    x = x[x.isfinite()].to(device)
    op, own, form = ACTIVATIONS[name]
    for values in (x, x.float(), x.float() * 0.001):
        extra = {"up": torch.ones_like(values)} if form == "two" else {}
        check(ltx, Case(op, {"input": values, **extra, **own}))


@pytest.mark.parametrize("name", ["swiglu of two", "geglu of two", "gelu erf", "gelu tanh"])
def test_every_bfloat16(ltx, device, name):
    """All bf16 numbers up to 1e9 (past that the cube of tanh-GELU overflows, in torch too), in bf16 and as fp32."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)
    x = x[x.abs() < 1e9].to(device)
    op, own, form = ACTIVATIONS[name]
    for values in (x, x.float()):
        extra = {"up": torch.ones_like(values)} if form == "two" else {}
        check(ltx, Case(op, {"input": values, **extra, **own}))


@pytest.mark.parametrize("name", ["swiglu of two", "geglu of two", "gelu erf", "gelu tanh"])
@every_dtype
def test_infinities_and_nan(ltx, device, name, dtype):
    """activation(inf) = inf and NaN stays; -inf * 0 may be NaN, as in torch, or its limit 0."""
    op, own, form = ACTIVATIONS[name]
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, 3.0e38, -3.0e38], device=device).to(dtype)
    extra = {"up": torch.ones_like(x)} if form == "two" else {}
    for rounding in ("fp32", "eager"):
        output = Case(op, {"input": x, **extra, **own, "rounding": rounding}).run(ltx)[0].tolist()
        assert output[0] == math.inf
        assert math.isnan(output[1]) or output[1] == 0
        assert math.isnan(output[2])
        assert output[3] == 0
        assert output[4] == x[4].item()
        assert output[5] == 0 or dtype == torch.float16


@pytest.mark.parametrize("name", ["swiglu of two", "geglu of two"])
def test_up_special_values(ltx, device, name):
    op, own, _ = ACTIVATIONS[name]
    gate = torch.tensor([1.0, 0.0, -2.0, 1.0, 60000.0], device=device, dtype=torch.float16)
    up = torch.tensor([math.inf, math.inf, -math.inf, math.nan, 2.0], device=device, dtype=torch.float16)
    output = Case(op, {"input": gate, "up": up, **own}).run(ltx)[0].tolist()
    assert output[0] == math.inf
    assert math.isnan(output[1])
    assert output[2] == math.inf
    assert math.isnan(output[3])
    assert output[4] == math.inf


@every_activation
def test_denormals(ltx, device, name):
    for dtype in DTYPES:
        make = Make(device, dtype)
        case = activation_case(name, make, (3, 40))
        case.kwargs["input"] = make.integers(*case.kwargs["input"].shape) * (torch.finfo(dtype).smallest_normal / 16)
        check(ltx, case)


def test_small_results_are_kept(ltx, device):
    """Far down the negative side results are small, then zero, never of the wrong sign; 1 + erf is zero below -5.6."""
    x = torch.linspace(-30.0, -5.0, 2001, device=device)
    for case in (
        Case("gelu", {"input": x}),
        Case("gelu", {"input": x, "approximate": "tanh"}),
        Case("swiglu", {"input": 4 * x, "up": torch.ones_like(x)}),
    ):
        (output,) = check(ltx, case)
        assert bool((output <= 0).all())
        (truth,) = case.truth(ltx)
        normal = truth.abs() > 1e-12
        assert bool(((output - truth).abs()[normal] < 1e-3 * truth.abs()[normal]).all())


# ---- Memory


@every_activation
@every_dtype
@every_layout
def test_layouts(ltx, device, name, dtype, layout):
    for shape in ((2, 3, 4, 40), (2, 5, 264), (3, 1, 17)):
        check(ltx, activation_case(name, Make(device, dtype), shape).in_layout(layout))


@pytest.mark.parametrize("name", ["geglu of two", "swiglu of two", "gelu erf, bias"])
def test_layout_of_one_operand(ltx, device, name):
    for dtype in DTYPES:
        case = activation_case(name, Make(device, dtype), (2, 3, 264))
        expected = case.run(ltx)[0]
        for operand in case.tensors:
            for layout in LAYOUTS:
                moved = case.replace(**{operand: place(case.kwargs[operand], layout)})
                assert_same_bits(moved.run(ltx)[0], expected, f"{operand} {layout}")


@every_activation
@every_layout
def test_out(ltx, device, name, layout):
    for dtype in DTYPES:
        for shape in ((2, 3, 264), (2, 3, 33), (70, 1), (2, 5000)):
            check_out(ltx, activation_case(name, Make(device, dtype), shape), layout)


@pytest.mark.parametrize("name", [name for name, (_, _, form) in FORMS.items() if form != "packed"])
@every_dtype
def test_in_place(ltx, device, name, dtype):
    for width in (33, 5000):
        case = activation_case(name, Make(device, dtype), (2, 3, width))
        expected = case.run(ltx)[0]
        for operand in ("input", "up"):
            if operand not in case.kwargs:
                continue
            for layout in ("contiguous", "rows misaligned", "columns strided"):
                again = case.in_layout(layout)
                (output,) = again.run(ltx, out=again.kwargs[operand])
                assert output is again.kwargs[operand]
                assert_same_bits(output, expected, f"in place of {operand}, {layout}")


@every_activation
def test_expanded_input(ltx, device, name):
    case = activation_case(name, Make(device, torch.bfloat16), (4, 3, 40))
    check(ltx, case.map(lambda t: t[:1].expand(t.shape) if t.dim() == 3 else t))
    check(ltx, case.map(lambda t: t[..., :1].expand(t.shape)))


@every_activation
@every_dtype
def test_same_element_same_bits(ltx, device, name, dtype):
    """Alone, in a row of any length, at any place: the same result."""
    case = activation_case(name, Make(device, dtype), (64, 264))
    expected = case.run(ltx)[0]
    assert_same_bits(case.run(ltx)[0], expected, "second run")
    for first, last in ((0, 1), (5, 6), (3, 60)):
        rows = case.map(lambda t, first=first, last=last: t[first:last] if t.dim() == 2 else t)
        for layout in LAYOUTS:
            assert_same_bits(rows.in_layout(layout).run(ltx)[0], expected[first:last], f"{first}:{last}, {layout}")
    if FORMS[name][2] != "packed":
        columns = case.map(lambda t: t[..., 7:40].contiguous())
        assert_same_bits(columns.run(ltx)[0], expected[:, 7:40].contiguous(), "columns 7:40")


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@every_dtype
def test_many_rows_share_a_bias(ltx, device, dtype, approximate):
    """On a GPU a thread takes two of them: an odd number, the same bits as a few, and the definition."""
    make = Make(device, dtype)
    x, bias = make(20001, 256), make(256)
    output = ltx.gelu(x, bias=bias, approximate=approximate)
    for first, last in ((0, 3), (9999, 10000), (19999, 20001)):
        few = ltx.gelu(x[first:last], bias=bias, approximate=approximate)
        assert_same_bits(output[first:last], few, f"{first}:{last}")
    truth = F.gelu(x.double() + bias.double(), approximate=approximate)
    torch.testing.assert_close(output.double(), truth, rtol=4 * torch.finfo(dtype).eps, atol=1e-4)


@every_activation
def test_same_bits_from_every_thread(ltx, device, name):
    case = activation_case(name, Make(device, torch.float32), (300, 1000))
    expected = case.run(ltx)[0]
    for count in (1, 3):
        with torch_threads(count):
            assert_same_bits(case.run(ltx)[0], expected, f"{count} threads")


# ---- rounding="eager"


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if "bias" not in name])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_eager(ltx, device, name, dtype):
    """Eager torch with an exact activation gives the same bits, but for few. torch's own activations err more."""
    case = activation_case(name, Make(device, dtype), (40, 1000))
    (output,) = check_eager(ltx, case)
    same = (output == activation_eager(case.op, case.kwargs, torch.float64)).double().mean().item()
    assert same > 0.999, f"{1 - same:.2%} of the elements differ"


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_eager_float32(ltx, device, name):
    """There is nothing to round."""
    case = activation_case(name, Make(device, torch.float32), (40, 264))
    assert_same_bits(case.replace(rounding="eager").run(ltx)[0], case.run(ltx)[0])


@pytest.mark.parametrize("name", ["swiglu", "geglu tanh", "geglu erf, gate last", "swiglu of two"])
def test_eager_rounds_the_activation(ltx, device, name):
    """out = round(round(activation(gate)) * up), step by step with this package's own activation."""
    op, own, _ = ACTIVATIONS[name]
    for dtype in (torch.float16, torch.bfloat16):
        case = activation_case(name, Make(device, dtype), (40, 264))
        output = case.replace(rounding="eager").run(ltx)[0]
        gate, up = gate_and_up(op, case.kwargs)
        if op == "swiglu":
            activated = ltx.swiglu(gate, torch.ones_like(gate), rounding="eager")
        else:
            activated = ltx.gelu(gate, approximate=own.get("approximate", "tanh"), rounding="eager")
        assert_same_bits(output, activated * up)
        assert not torch.equal(output, case.run(ltx)[0])


@pytest.mark.parametrize("param_dtype", DTYPES, ids=str)
@every_dtype
def test_eager_rounds_the_biased_input(ltx, device, dtype, param_dtype):
    make = Make(device, dtype)
    x, bias = make(40, 264), make(264, dtype=param_dtype)
    for approximate in ("none", "tanh"):
        output = ltx.gelu(x, bias=bias, approximate=approximate, rounding="eager")
        assert_same_bits(output, ltx.gelu((x + bias).to(dtype), approximate=approximate, rounding="eager"))


# ---- swiglu_clamped


def test_reference_swiglu_clamped(ltx, device):
    """GPT-OSS's experts: gates in the even columns, ups in the odd ones."""
    x = torch.linspace(-30, 30, 602, dtype=torch.float64, device=device).view(7, 86)
    for alpha, limit in ((1.702, 7.0), (0.5, 2.0)):
        gate, up = x[:, 0::2].clamp(max=limit), x[:, 1::2].clamp(-limit, limit)
        expected = (up + 1) * gate / (1 + torch.exp(-alpha * gate))
        got = ltx.reference.swiglu_clamped(x, alpha=alpha, limit=limit)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-15)
        halves = torch.cat((x[:, 0::2], x[:, 1::2]), -1)
        for again in (
            ltx.reference.swiglu_clamped(halves, alpha=alpha, limit=limit, layout="half"),
            ltx.reference.swiglu_clamped(*halves.chunk(2, -1), alpha=alpha, limit=limit),
        ):
            assert torch.equal(again, got)
    assert_same_bits(ltx.swiglu_clamped(x.float()), ltx.swiglu_clamped(x.float(), alpha=1.702, limit=7.0))


@pytest.mark.parametrize("name", CLAMPED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_clamped_eager(ltx, device, name, dtype):
    case = activation_case(name, Make(device, dtype), (40, 1000))
    for layout in ("contiguous", "rows misaligned", "columns strided"):
        (output,) = check_eager(ltx, case.in_layout(layout), flipped=0.03)
        same = (output == case.eager()[0]).double().mean().item()
        assert same > 0.97, f"{1 - same:.2%} of the elements are not torch's"


@every_dtype
def test_clamped_special_values(ltx, device, dtype):
    """NaN stays; infinities are clamped but for a gate of -inf, of which torch makes NaN."""
    gate = torch.tensor([math.nan, 1.0, math.inf, 100.0, 1.0, 0.0], device=device, dtype=dtype)
    up = torch.tensor([1.0, math.nan, 1.0, -math.inf, math.inf, 5.0], device=device, dtype=dtype)
    for form in ({"input": gate, "up": up}, {"input": torch.stack((gate, up), -1).flatten()}):
        for rounding in ("fp32", "eager"):
            output = ltx.swiglu_clamped(**form, limit=2.0, rounding=rounding)
            expected = ltx.reference.swiglu_clamped(**form, limit=2.0)
            torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02, equal_nan=True)
            assert output[:2].isnan().all() and output[2:].isfinite().all()


# ---- gate_heads

every_gating = pytest.mark.parametrize("per_head", [True, False])


@every_gating
def test_reference_gate_heads(ltx, device, per_head):
    case = gate_heads_case(Make(device, torch.float64), (2, 5, 3, 8), per_head=per_head, scale=2.0)
    x, logits = case.kwargs["input"], case.kwargs["logits"]
    gates = logits.view(2, 5, 3, -1).expand(2, 5, 3, 8)
    torch.testing.assert_close(case.run(ltx.reference)[0], x * 2 / (1 + torch.exp(-gates)), rtol=1e-12, atol=0)


@every_gating
@every_dtype
@pytest.mark.parametrize(
    "shape",
    [(2, 7, 32, 64), (1, 6, 24, 128), (3, 5, 10), (4, 8), (2, 3, 1, 64), (2, 3, 5, 1), (2, 3, 4, 2, 33), (9, 1, 1)],
)
def test_gate_heads(ltx, device, dtype, per_head, shape):
    for scale in (1.0, 2.0, 0.3):
        case = gate_heads_case(Make(device, dtype), shape, per_head=per_head, scale=scale)
        check(ltx, case)
        check_eager(ltx, case)


@every_gating
@every_layout
def test_gate_heads_layouts(ltx, device, per_head, layout):
    for dtype in DTYPES:
        for shape in ((2, 5, 4, 64), (2, 3, 3, 10)):
            case = gate_heads_case(Make(device, dtype), shape, per_head=per_head, scale=2.0)
            check(ltx, case.in_layout(layout))
            check_out(ltx, case, layout)
            expected = case.run(ltx)[0]
            for operand in ("input", "logits"):
                moved = case.replace(**{operand: place(case.kwargs[operand], layout)})
                assert_same_bits(moved.run(ltx)[0], expected, operand)
            again = case.in_layout(layout)
            (output,) = again.run(ltx, out=again.kwargs["input"])
            assert output is again.kwargs["input"]
            assert_same_bits(output, expected, "in place")


@every_gating
@every_dtype
def test_gate_heads_in_one_projection(ltx, device, dtype, per_head):
    """Logits as further columns of the product that makes query, key and value; heads that lie before the tokens."""
    make = Make(device, dtype)
    heads, width = 4, 64
    columns = heads if per_head else heads * width
    product = make(2, 6, 3 * heads * width + columns)
    case = gate_heads_case(make, (2, 6, heads, width), per_head=per_head, scale=2.0)
    case = case.replace(logits=product[..., -columns:])
    (expected,) = check(ltx, case)
    heads_first = case.kwargs["input"].transpose(1, 2).contiguous().transpose(1, 2)
    assert_same_bits(case.replace(input=heads_first).run(ltx)[0], expected)
    joint = make(2, 6, heads * width + 40)
    view = joint[..., 8 : 8 + heads * width].unflatten(-1, (heads, width))
    before = joint.clone()
    case.run(ltx, out=view)
    assert_same_bits(view.contiguous(), expected)
    assert torch.equal(joint[..., :8], before[..., :8]) and torch.equal(joint[..., -32:], before[..., -32:])


@every_gating
def test_gate_heads_special_values(ltx, device, per_head):
    x = torch.tensor([[1.0, math.inf, -2.0, math.nan, 0.0, 3.0]], device=device).view(1, 6, 1)
    logits = torch.tensor([[math.inf, 0.0, -math.inf, 1.0, math.nan, -200.0]], device=device)
    for dtype in DTYPES:
        for rounding in ("fp32", "eager"):
            output = ltx.gate_heads(x.to(dtype), logits.to(dtype), 2.0, rounding=rounding).flatten().tolist()
            assert output[:2] == [2.0, math.inf] and abs(output[2]) == 0 and abs(output[5]) == 0
            assert math.isnan(output[3]) and math.isnan(output[4])


# ---- Large


def test_strides_above_int32(ltx, device):
    width, apart = 264, 2**31 + 8
    try:
        flat = torch.empty(apart + width, dtype=torch.bfloat16, device=device)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        pytest.skip(f"not enough memory: {error}")
    for name in ("swiglu", "geglu erf", "gelu tanh"):
        case = activation_case(name, Make(device, torch.bfloat16), (2, width // 2))
        expected = case.run(ltx)[0]
        columns = case.kwargs["input"].shape[-1]
        for strides in ((apart, 1), (1, apart // columns)):
            far = flat.as_strided((2, columns), strides)
            far.copy_(case.kwargs["input"])
            assert_same_bits(case.replace(input=far).run(ltx)[0], expected, name)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 4096])
def test_more_than_2_31_elements(ltx, cuda, width):
    rows = 2**31 // width + 3
    try:
        x = torch.empty(rows, 2 * width, dtype=torch.bfloat16, device=cuda)
    except torch.OutOfMemoryError as error:
        pytest.skip(f"not enough memory: {error}")
    x.normal_(generator=torch.Generator(cuda).manual_seed(1))
    output = ltx.swiglu(x)
    flat = ltx.gelu(x)
    for first in (0, rows // 2, rows - 8):
        part = x[first : first + 8]
        assert_same_bits(output[first : first + 8], ltx.swiglu(part), f"rows from {first}")
        assert_same_bits(flat[first : first + 8], ltx.gelu(part), f"rows from {first}")
