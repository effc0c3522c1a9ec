"""Rows quantised to fp8: every `*_quant` function and quantize_rows."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    ACTIVATIONS,
    DTYPES,
    LAYOUTS,
    MODEL_INDEX,
    MODULATORS,
    NORM_OPS,
    QUANTISED_NORMS,
    Case,
    Make,
    activation_case,
    assert_same_bits,
    eps_names,
    gate_and_up,
    gate_heads_case,
    index_case,
    kernels_of,
    model_index_case,
    norm_case,
    offers_offset,
    optional,
    place,
    torch_threads,
    unchanged,
    without_index,
)
from helpers.numeric import SUM_ERROR, report
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

E4M3 = torch.float8_e4m3fn
MAX, MIN_SCALE = 448.0, 2.0**-120
# One row length for each way that rows are shared out among threads, and lengths that are no whole packs.
WIDTHS = [1, 2, 3, 7, 8, 33, 64, 250, 256, 264, 512, 520, 1024, 1536, 1985, 2048, 4096, 8192]
WIDTHS += [16384, 16392, 18432, 40000]
# The activations of 16-bit rows take the special function unit on CUDA.
APPROXIMATION = {torch.float32: 2.0**-20, torch.float16: 5e-5, torch.bfloat16: 5e-5}

every_norm = pytest.mark.parametrize("op", QUANTISED_NORMS)
every_activation = pytest.mark.parametrize("name", ACTIVATIONS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def run(module: Any, case: Case, **options: Any) -> tuple[Tensor, ...]:
    return getattr(module, f"{case.op}_quant")(**case.kwargs, **options)


def codes(values: Tensor) -> Tensor:
    """The bits; those of NaN without its sign, which has no meaning."""
    bits = values.contiguous().view(torch.uint8)
    return torch.where((bits & 0x7F) == 0x7F, 0x7F, bits)


def exactly(x: Tensor, static_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """torch's own conversion of fp32 rows."""
    x = x.float().cpu()
    scales = x.abs().amax(-1, keepdim=True) / MAX
    if static_scale is not None:
        scales = static_scale.cpu().reshape(()).expand_as(scales).contiguous()
    scales = scales.clamp(min=MIN_SCALE)
    return (x * (1 / scales)).clamp(-MAX, MAX).to(E4M3), scales


def assert_exactly(result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], what: str = "") -> None:
    values, scales = (tensor.cpu() for tensor in result)
    assert values.dtype == E4M3 and scales.dtype == torch.float32
    assert values.is_contiguous() and scales.is_contiguous()
    assert torch.equal(scales.isnan(), expected[1].isnan())
    assert_same_bits(scales.nan_to_num(nan=-1.0), expected[1].nan_to_num(nan=-1.0), f"scales {what}")
    assert_same_bits(codes(values), codes(expected[0]), f"values {what}")


def spacing(x: Tensor) -> Tensor:
    """Of e4m3 numbers at each fp64 number."""
    _, exponent = torch.frexp(x.abs().clamp(2.0**-6, MAX))
    return torch.ldexp(torch.ones_like(x), exponent - 4)


def approximation(case: Case, truth: Tensor) -> Tensor:
    """What the arithmetic of an op may be off by, beside the errors of its sums."""
    if case.op in NORM_OPS:
        return 2.0**-22 * truth.abs()
    x = case.inputs[0]
    error = APPROXIMATION[x.dtype] * truth.abs()
    if case.op != "gate_heads" and x.device.type == "cuda" and x.dtype != torch.float32:
        # tanh-GELU by the hardware's tanh: |x| * 2^-12 of the input, which is a bound for the other activations too.
        gate, up = gate_and_up(case.op, case.kwargs)
        bias = case.kwargs.get("bias")
        gate = (gate.double() if bias is None else gate.double() + bias.double()).abs() * 2.0**-12
        error = error + (gate if up is None else gate * up.double().abs())
    return error


def quantised_outputs(case: Case) -> int:
    """How many outputs come as values and scales."""
    return 2 if case.op.endswith("_pair") else 1


def check(ltx: Any, case: Case, static_scale: Tensor | None = None) -> tuple[Tensor, ...]:
    """Scales and values within one rounding of the fp64 truth; the residual stream as the unquantised op has it."""
    tensors = dict(case.tensors) if static_scale is None else {**case.tensors, "static_scale": static_scale}
    with unchanged(**tensors):
        outputs = run(ltx, case, static_scale=static_scale)
    quantised = quantised_outputs(case)
    truths, all_terms = case.truth(ltx), case.terms(ltx)
    for i in range(quantised):
        values, scales = outputs[2 * i : 2 * i + 2]
        truth, terms = truths[i], all_terms[i]
        if case.op == "gate_heads":  # the heads of a token are one quantised row
            truth, terms = truth.flatten(-2), terms.flatten(-2)
        assert values.dtype == E4M3 and values.shape == truth.shape and values.is_contiguous()
        assert scales.dtype == torch.float32 and scales.shape == (*truth.shape[:-1], 1) and scales.is_contiguous()
        slack = 2 * SUM_ERROR * terms + approximation(case, truth) + 1e-37
        if static_scale is None:
            most = truth.abs().amax(-1, keepdim=True)
            expected = (most / MAX).clamp(min=MIN_SCALE)
            allowed = slack.amax(-1, keepdim=True) / MAX + expected * 2.0**-22
            error = (scales.double() - expected).abs()
            assert not bool((error > allowed).any()), report(
                scales, expected, error > allowed, "scales", error, allowed
            )
            assert bool(((values.float().abs().amax(-1) == MAX) | (truth == 0).all(-1)).all())
        else:
            assert bool((scales == static_scale).all())
        scale = scales.double()
        quotient = (truth / scale).clamp(-MAX, MAX)
        error = (values.double() - quotient).abs()
        allowed = spacing(quotient * (1 + 2.0**-20)) / 2 + slack / scale + quotient.abs() * 2.0**-22
        assert not bool((error > allowed).any()), report(
            values.float(), quotient, error > allowed, f"{case.op} values", error, allowed
        )
    if len(outputs) > 2 * quantised:
        assert_same_bits(outputs[-1], case.run(ltx)[-1], "residual_out")
        assert outputs[-1].is_contiguous()
    return outputs


# ---- quantize_rows: the bits of torch's own conversion


@pytest.mark.kernels_ci
@every_dtype
def test_bits(ltx, device, dtype):
    static_scale = torch.tensor(0.003, device=device)
    for width in WIDTHS:
        x = Make(device, dtype, seed=width)(5, width, std=3.0)
        assert_exactly(ltx.quantize_rows(x), exactly(x), str(width))
        result = ltx.quantize_rows(x, static_scale=static_scale)
        assert_exactly(result, exactly(x, static_scale), f"{width}, static")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_bits_of_every_number(ltx, device, dtype):
    """As one row, and with scales that saturate most and denormalise most of them; as fp32 too."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.isfinite()].reshape(2, -1).to(device)
    for static in (None, 1.0, 2.0**-10, 1000.0, 3e-38):
        static_scale = None if static is None else torch.tensor([static], device=device)
        for y in (x, x.float()):
            assert_exactly(ltx.quantize_rows(y, static_scale=static_scale), exactly(y, static_scale), str(static))


def test_bits_at_every_tie(ltx, device):
    """Halfway between neighbouring e4m3 numbers, and one fp32 number to either side."""
    numbers = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    middle = (numbers[1:] + numbers[:-1]) / 2
    middle = torch.cat((middle, torch.tensor([2.0**-10, 456.0, 464.0, 480.0, 512.0])))
    zero, top = torch.zeros(()), torch.tensor(math.inf)
    x = torch.stack((middle.nextafter(zero), middle, middle.nextafter(top), -middle)).to(device)
    one = torch.ones((), device=device)
    assert_exactly(ltx.quantize_rows(x, static_scale=one), exactly(x, one))
    assert ltx.quantize_rows(x, static_scale=one)[0].float().abs().max() == MAX


@every_dtype
@every_layout
def test_layouts_of_rows(ltx, device, dtype, layout):
    for shape in ((2, 3, 4, 40), (2, 5, 264), (3, 1, 17), (2, 2, 2048)):
        x = Make(device, dtype)(*shape, layout=layout)
        assert_exactly(ltx.quantize_rows(x), exactly(x), str(shape))


@pytest.mark.parametrize("shape", [(40,), (1, 40), (2, 3, 4, 40), (300, 8), (5, 1, 1), (70000, 1), (3, 70001, 8)])
@every_dtype
def test_shapes(ltx, device, shape, dtype):
    x = Make(device, dtype)(*shape)
    assert_exactly(ltx.quantize_rows(x), exactly(x))
    if len(shape) > 2:
        x = x.transpose(0, 1)
        assert_exactly(ltx.quantize_rows(x), exactly(x))


@pytest.mark.parametrize("shape", [(0,), (0, 40), (2, 0, 40), (3, 0)])
def test_empty(ltx, device, shape):
    make = Make(device, torch.bfloat16)
    x = make(*shape)
    results = [
        ltx.quantize_rows(x),
        ltx.rmsnorm_quant(x),
        ltx.gelu_quant(x),
        ltx.swiglu_quant(x, x),
        ltx.gated_residual_quant(x, x, x),
        ltx.gate_heads_quant(x.unsqueeze(-2), x),
    ]
    for values, scales, *residual in results:
        assert values.shape == shape and values.dtype == E4M3
        assert scales.shape == (*shape[:-1], 1) and bool((scales == MIN_SCALE).all())
        assert all(r.shape == shape and r.dtype == x.dtype for r in residual)


@every_dtype
def test_special_rows(ltx, device, dtype):
    """Zeros (and denormals alone) give zeros, an infinity becomes NaN beside zeros, a NaN takes its row along."""
    width = 264
    x = torch.ones(6, width, dtype=dtype)
    x[0] = 0
    x[1, 7] = math.inf
    x[2, 100] = math.nan
    x[3] = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * 3
    x[4, 1::2] = -0.0
    x[5, 200] = -math.inf
    for rows in (x.to(device), place(x.to(device), "columns strided")):
        values, scales = ltx.quantize_rows(rows)
        assert_exactly((values, scales), exactly(x))
        scales, dequantised = scales.cpu().flatten(), values.cpu().float() * scales.cpu()
        assert scales[0] == MIN_SCALE and scales[1] == math.inf and scales[2].isnan() and scales[5] == math.inf
        assert bool((dequantised[0] == 0).all()) and bool(dequantised[2].isnan().all())
        assert bool(values[1, 7].float().isnan()) and bool((values.cpu().float()[1, 8:] == 0).all())
        torch.testing.assert_close(dequantised[3], x[3].float(), rtol=1e-6, atol=1e-37)
        static_scale = torch.ones((), device=device)
        assert_exactly(ltx.quantize_rows(rows, static_scale=static_scale), exactly(x, static_scale))


def test_special_rows_of_other_ops(ltx, device):
    x = torch.ones(4, 64, device=device, dtype=torch.bfloat16)
    x[0] = 0
    x[1, 3] = math.nan
    for values, scales, *_ in (
        ltx.rmsnorm_quant(x),
        ltx.gelu_quant(x),
        ltx.swiglu_quant(x, x),
        ltx.gated_residual_quant(x, x, x),
        ltx.rmsnorm_residual_quant(x, x),
        ltx.gate_heads_quant(x.unsqueeze(-2), x[:, :1]),
    ):
        assert bool((values[0].float() == 0).all()) and scales[0] == MIN_SCALE
        assert bool(values[1].float().isnan().all()) and bool(scales[1].isnan())
        assert bool(values[2:].float().isfinite().all())


def test_least_static_scale(ltx, device):
    x = torch.ones(2, 64, device=device)
    for number in (0.0, -1.0, 1e-40):
        values, scales = ltx.quantize_rows(x, static_scale=torch.tensor(number, device=device))
        assert bool((scales == MIN_SCALE).all()) and bool((values.float() == MAX).all())


@pytest.mark.parametrize("static", [None, 3.0, 0.0])
def test_rows_without_columns(ltx, device, static):
    """They have the scale of rows of zeros, of every op."""
    given = None if static is None else torch.tensor(static, device=device)
    x, heads = torch.zeros(2, 3, 0, device=device), torch.zeros(2, 3, 4, 0, device=device)
    for values, scales, *_ in (
        ltx.quantize_rows(x, static_scale=given),
        ltx.rmsnorm_quant(x, static_scale=given),
        ltx.rmsnorm_residual_quant(x, x, static_scale=given),
        ltx.gelu_quant(x, static_scale=given),
        ltx.swiglu_quant(x, static_scale=given),
        ltx.gate_heads_quant(heads, heads[..., :1].sum(-1), static_scale=given),
    ):
        assert values.shape == (2, 3, 0) and scales.shape == (2, 3, 1)
        assert bool((scales == max(static or 0.0, MIN_SCALE)).all())


# ---- The other ops: one rounding from the fp64 truth


@pytest.mark.kernels_ci
@every_norm
@every_dtype
def test_norms(ltx, device, op, dtype):
    for modulation in ("[B, 1, H]", "per batch", "[B, S, H]", "vector", "[B, S, 1]"):
        check(ltx, norm_case(op, Make(device, dtype), (2, 7, 256), modulation=modulation))


@every_norm
@every_dtype
def test_norm_row_lengths(ltx, device, op, dtype):
    tables = [name for name in MODULATORS if name in NORM_OPS[op]]
    for width in WIDTHS:
        check(ltx, norm_case(op, Make(device, dtype, seed=width), (2, 3, width)))
        check(ltx, norm_case(op, Make(device, dtype, seed=width), (2, 3, width), tables=tables, without=["weight"]))
        check(ltx, norm_case(op, Make(device, dtype, seed=width), (2, 3, width), without=["weight"]))


@every_norm
@every_dtype
def test_norm_dtypes(ltx, device, op, dtype):
    for param_dtype in DTYPES:
        for modulation_dtype in DTYPES:
            make = Make(device, dtype)
            case = norm_case(op, make, (2, 3, 264), param_dtype=param_dtype, modulation_dtype=modulation_dtype)
            check(ltx, case)


@every_norm
def test_norm_options(ltx, device, op):
    make = Make(device, torch.bfloat16)
    for eps in eps_names(op):
        check(ltx, norm_case(op, make, (2, 3, 64), **{eps: 0.3}))
        if "layernorm" not in op:
            check(ltx, norm_case(op, make, (2, 3, 64), **{eps: None}))
    if offers_offset(op):
        for width in (64, 2048):
            check(ltx, norm_case(op, make, (2, 3, width), weight_offset=1.0))
    for without in [[name] for name in optional(op)] + [optional(op)]:
        for width in (64, 65, 2048):
            check(ltx, norm_case(op, make, (2, 3, width), without=without))


@every_norm
@every_dtype
@every_layout
def test_norm_layouts(ltx, device, op, dtype, layout):
    """The bits of contiguous tensors, within the bounds."""
    tables = [name for name in MODULATORS if name in NORM_OPS[op]]
    for shape in ((2, 3, 4, 40), (2, 5, 264), (3, 1, 17)):
        case = norm_case(op, Make(device, dtype), shape, tables=tables)
        outputs = check(ltx, case.in_layout(layout))
        for output, plain in zip(outputs, run(ltx, case), strict=True):
            assert_same_bits(output, plain, layout)


@every_activation
@every_dtype
def test_activations(ltx, device, name, dtype):
    for width in WIDTHS:
        check(ltx, activation_case(name, Make(device, dtype, seed=width), (3, width)))


@every_activation
@every_dtype
@every_layout
def test_activation_layouts(ltx, device, name, dtype, layout):
    for shape in ((2, 3, 4, 40), (2, 5, 264), (3, 1, 17)):
        case = activation_case(name, Make(device, dtype), shape)
        outputs = check(ltx, case.in_layout(layout))
        for output, plain in zip(outputs, run(ltx, case), strict=True):
            assert_same_bits(output, plain, layout)


def check_prefix(ltx: Any, case: Case, prefix: Tensor) -> tuple[Tensor, Tensor]:
    """The larger scale of the two parts, and with it the bits of each part by itself."""
    with unchanged(**case.tensors, prefix=prefix):
        values, scales = run(ltx, case, prefix=prefix)
    assert values.dtype == E4M3 and values.is_contiguous() and scales.is_contiguous()
    parts = ltx.quantize_rows(prefix), run(ltx, case)
    assert_same_bits(scales, torch.maximum(parts[0][1], parts[1][1]), "scales")

    def codes_of(row: int, quantised: tuple[Tensor, ...]) -> Tensor:
        return codes(quantised[0].reshape(-1, quantised[0].shape[-1])[row])

    for row in range(min(scales.numel(), 3)):
        scale = scales.flatten()[row]
        first, second = ltx.quantize_rows(prefix, static_scale=scale), run(ltx, case, static_scale=scale)
        expected = torch.cat((codes_of(row, first), codes_of(row, second)))
        assert_same_bits(codes_of(row, (values,)), expected, f"row {row}")
        static = run(ltx, case, prefix=prefix, static_scale=scale)
        assert_same_bits(codes_of(row, static), expected, f"row {row}, static")
    return values, scales


# Columns before and after: whole packs or not, for fewer and for all threads of a row, and more than a row holds.
PREFIXES = [(8, 8), (1, 7), (40, 5), (24, 1000), (264, 33), (3072, 12288), (6144, 18432), (8, 27648), (1032, 27648)]


@every_activation
@every_dtype
def test_prefix(ltx, device, name, dtype):
    for before, width in PREFIXES:
        make = Make(device, dtype, seed=width)
        check_prefix(ltx, activation_case(name, make, (3, width)), make(3, before, std=3.0))


@every_activation
@every_dtype
@every_layout
def test_prefix_layouts(ltx, device, name, dtype, layout):
    for shape, before in (((2, 3, 4, 40), 24), ((2, 5, 264), 8), ((3, 1, 17), 40)):
        make = Make(device, dtype)
        case, prefix = activation_case(name, make, shape), make(*shape[:-1], before)
        expected = run(ltx, case, prefix=prefix)
        assert expected[0].shape == (*shape[:-1], before + shape[-1])
        for one, other in ((case, place(prefix, layout)), (case.in_layout(layout), prefix)):
            for output, plain in zip(run(ltx, one, prefix=other), expected, strict=True):
                assert_same_bits(output, plain, layout)
        wide = make(*shape[:-1], before + 24)  # columns of more
        for output, plain in zip(
            run(ltx, case, prefix=wide[..., 16 : 16 + before]),
            run(ltx, case, prefix=wide[..., 16 : 16 + before].contiguous()),
            strict=True,
        ):
            assert_same_bits(output, plain, "columns of more")


def test_prefix_without_columns(ltx, device):
    make = Make(device, torch.bfloat16)
    x, nothing = make(3, 40), make(3, 0)
    for output, plain in zip(ltx.gelu_quant(x, prefix=nothing), ltx.gelu_quant(x), strict=True):
        assert_same_bits(output, plain)
    for output, plain in zip(ltx.swiglu_quant(nothing, prefix=x), ltx.quantize_rows(x), strict=True):
        assert_same_bits(output, plain)
    assert ltx.gelu_quant(x[:0], prefix=nothing[:0])[0].shape == (0, 40)


def test_prefixes_of_models_stay_in_registers(ltx, cuda):
    make = Make(cuda, torch.bfloat16)
    for before, width in ((3072, 12288), (6144, 18432)):  # FLUX.1's and FLUX.2's single blocks
        for name in ("gelu tanh", "swiglu"):
            case, prefix = activation_case(name, make, (3, width)), make(3, before)
            (kernel,) = kernels_of(functools.partial(run, ltx, case, prefix=prefix))
            assert "::glu_quant_kernel<" in kernel


@pytest.mark.sanitize
@pytest.mark.parametrize("per_head", [True, False])
@every_dtype
@pytest.mark.parametrize(
    "shape",
    [
        (2, 7, 32, 64),
        (1, 6, 32, 128),
        (3, 5, 10),
        (4, 8),
        (2, 3, 1, 64),
        (2, 3, 5, 1),
        (2, 3, 4, 2, 33),
        (2, 3, 64, 512),
    ],
)
def test_gates_of_heads(ltx, device, dtype, per_head, shape):
    for scale in (1.0, 2.0):
        case = gate_heads_case(Make(device, dtype), shape, per_head=per_head, scale=scale)
        check(ltx, case)
        check(ltx, case, torch.tensor(0.02, device=device))


@pytest.mark.parametrize("per_head", [True, False])
@every_dtype
@every_layout
def test_layouts_of_gates(ltx, device, dtype, per_head, layout):
    """The bits of contiguous tensors, also where the heads lie before the tokens."""
    for shape in ((2, 5, 4, 64), (2, 3, 3, 10)):
        case = gate_heads_case(Make(device, dtype), shape, per_head=per_head, scale=2.0)
        expected = check(ltx, case)
        heads_first = case.replace(input=case.kwargs["input"].transpose(1, 2).contiguous().transpose(1, 2))
        for moved in (case.in_layout(layout), heads_first):
            for output, plain in zip(run(ltx, moved), expected, strict=True):
                assert_same_bits(output, plain, layout)


def test_gates_of_models_stay_in_registers(ltx, cuda):
    for heads, width, per_head in ((32, 64, True), (32, 128, True), (48, 128, False)):  # LTX-2.3 and Krea 2
        case = gate_heads_case(Make(cuda, torch.bfloat16), (1, 3, heads, width), per_head=per_head, scale=2.0)
        (kernel,) = kernels_of(functools.partial(run, ltx, case))
        assert "::head_gates_quant_kernel<" in kernel


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if "bias" in name])
@every_dtype
def test_bias_dtypes(ltx, device, name, dtype):
    for param_dtype in DTYPES:
        check(ltx, activation_case(name, Make(device, dtype), (4, 264), param_dtype=param_dtype))


@every_dtype
def test_static_scale(ltx, device, dtype):
    make = Make(device, dtype)
    for number in (0.002, 0.05):  # one that saturates, one that does not
        static_scale = torch.tensor([number], device=device)
        for op in QUANTISED_NORMS:
            for width in (64, 250, 2048, 20000):
                check(ltx, norm_case(op, make, (2, 3, width)), static_scale)
        for name in ACTIVATIONS:
            for width in (64, 250, 2048, 20000):
                check(ltx, activation_case(name, make, (3, width)), static_scale)


def test_residual_is_not_quantised(ltx, device):
    """The values come from the unrounded sum, the residual stream is the sum rounded to the input's dtype."""
    x = torch.full((1, 64), 2.0**-9, device=device, dtype=torch.bfloat16)
    r = torch.ones(1, 64, device=device, dtype=torch.bfloat16)
    for values, scales, residual in (
        ltx.gated_residual_quant(x, r, torch.ones(64, device=device)),
        ltx.gated_residual_quant(place(x, "misaligned"), r, torch.ones(64, device=device)),
    ):
        assert scales.item() == torch.tensor(1 + 2.0**-9) / MAX
        assert bool((values.float() == MAX).all()) and bool((residual == 1).all())


# ---- For compute-sanitizer: nothing but own kernels and copies on the device (see test_sanitize.py)


def assert_like_the_reference(ltx: Any, device: str, case: Case, layout: str) -> None:
    expected = run(ltx.reference, case)
    ours = [output.cpu() for output in run(ltx, case.in_layout(layout).on(device))]
    quantised = 2 * quantised_outputs(case)
    for i in range(0, quantised, 2):
        (values, scales), (our_values, our_scales) = expected[i : i + 2], ours[i : i + 2]
        numbers = values.float() * scales
        error = (our_values.float() * our_scales - numbers).abs()
        assert bool((error <= torch.maximum(numbers.abs() / 7, 1.01 * scales * 2.0**-9)).all()), case.op
    for a, b in zip(ours[quantised:], expected[quantised:], strict=True):
        torch.testing.assert_close(a, b, rtol=2.0**-7, atol=1e-5)


@pytest.mark.sanitize
@every_dtype
def test_every_kernel_in_small(ltx, device, dtype):
    for width in (1, 8, 250, 256, 512, 1024, 2048, 8192, 16392):
        make = Make("cpu", dtype, seed=width)
        cases = [activation_case(name, make, (2, 3, width)) for name in ACTIVATIONS]
        cases += [case.replace(prefix=make(2, 3, min(width, 1032))) for case in cases]
        for op in QUANTISED_NORMS:
            tables = [name for name in MODULATORS if name in NORM_OPS[op]]
            cases.append(norm_case(op, make, (2, 3, width), tables=tables))
            cases.append(norm_case(op, make, (2, 3, width), param_dtype=torch.float32, modulation="[B, S, H]"))
        for i, case in enumerate(cases):
            for layout in ("contiguous", ("rows misaligned", "columns strided")[i % 2]):
                assert_like_the_reference(ltx, device, case, layout)


@pytest.mark.sanitize
@every_dtype
def test_many_rows(ltx, device, dtype):
    """More blocks than run at a time, for kernels that fetch what a later block reads."""
    make, rows = Make("cpu", dtype), (2, 700, 2048)
    cases = [norm_case(op, make, rows, modulation="vector") for op in QUANTISED_NORMS]
    for case in [*cases, activation_case("swiglu", make, rows)]:
        assert_like_the_reference(ltx, device, case, "contiguous")


MODULATED = [op for op in QUANTISED_NORMS if set(NORM_OPS[op]) & set(MODULATORS)]


@pytest.mark.sanitize
@every_dtype
def test_rows_by_index_in_small(ltx, device, dtype):
    for op in MODULATED:
        if op in MODEL_INDEX:
            for index_dtype in (torch.int64, torch.int32, torch.bool):
                case = model_index_case(op, Make("cpu", dtype), index_dtype=index_dtype)
                assert_like_the_reference(ltx, device, case, "contiguous")


@pytest.mark.sanitize
@every_dtype
def test_weight_only_in_small(ltx, device, dtype):
    """One row and several; channels and columns that are no whole number of tiles."""
    for rows, channels, width in ((1, 77, 1040), (3, 77, 1040), (4, 5, 16), (9, 64, 512)):
        make = Make("cpu", dtype, seed=width)
        input, bias = make(rows, width), make(channels)
        scales = make(channels, dtype=torch.float32).abs() / 64
        weight = make(channels, width, std=64, dtype=torch.float32).to(torch.float8_e4m3fn)
        expected = torch.nn.functional.linear(input.float(), weight.float() * scales[:, None], bias.float()).to(dtype)
        there = [tensor.to(device) for tensor in (input, weight, scales, bias)]
        ours = ltx.quant.weight_only_linear(*there).cpu()
        torch.testing.assert_close(ours, expected, rtol=2.0**-7, atol=2.0**-7 * width**0.5)


@pytest.mark.parametrize("op", [op for op in MODULATED if op in MODEL_INDEX])
@every_dtype
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32, torch.bool], ids=str)
def test_rows_by_index_as_models_pass_them(ltx, device, op, dtype, index_dtype):
    for width in (None, 3584):
        case = model_index_case(op, Make(device, dtype), width, index_dtype=index_dtype)
        for output, want in zip(check(ltx, case), run(ltx, without_index(case)), strict=True):
            assert_same_bits(output, want, op)


@pytest.mark.parametrize("op", MODULATED)
@every_dtype
@pytest.mark.parametrize("width", [40, 264, 2048, 3072, 2050])
def test_rows_by_index(ltx, device, op, dtype, width):
    """The bits of the call with a modulation for each row, written out."""
    make = Make(device, dtype, seed=width)
    tables = [name for name in MODULATORS if name in NORM_OPS[op]]
    for per_batch, index_dtype in ((False, torch.int64), (True, torch.int32)):
        case = index_case(op, make, (2, 9, width), per_batch=per_batch, index_dtype=index_dtype)
        for output, want in zip(check(ltx, case), run(ltx, without_index(case)), strict=True):
            assert_same_bits(output, want, op)
    case = index_case(op, make, (2, 9, width), rows=2, index_shape=(9,), index_dtype=torch.bool, tables=tables)
    for output, want in zip(check(ltx, case), run(ltx, without_index(case)), strict=True):
        assert_same_bits(output, want, op)


# ---- The same row, the same bits


@every_dtype
def test_rows_do_not_depend_on_their_batch(ltx, device, dtype):
    for width in (40, 264, 2048, 20000):
        make = Make(device, dtype, seed=width)
        x, r, gate, scale, shift = (make(1, 9, width) for _ in range(5))
        whole = ltx.gated_residual_adaln_rmsnorm_quant(x, r, gate, None, scale, shift)
        for rows in (slice(0, 1), slice(3, 8), slice(1, 9, 3)):
            parts = [tensor[:, rows] for tensor in (x, r, gate, scale, shift)]
            part = ltx.gated_residual_adaln_rmsnorm_quant(*parts[:3], None, *parts[3:])
            for one, all_rows in zip(part, whole, strict=True):
                assert_same_bits(one, all_rows[:, rows].contiguous(), f"rows {rows} of width {width}")


def test_modulated_rows_of_known_lengths(ltx, cuda):
    """Models' lengths, and whole warps, have instances of the row kernel; with tables, which change nothing, rows go
    through another kernel."""
    many = 60 * torch.cuda.get_device_properties(cuda).multi_processor_count
    for width, rows in itertools.product((2048, 3072, 4096, 5120, 8192), (1, 7, many + 1)):
        make = Make(cuda, torch.bfloat16, seed=width)
        x, modulation = make(2, rows, width), make(2, 6, width)
        vectors = (None, modulation[:, 1], modulation[:, 4])
        nothing = torch.zeros(width, device=cuda, dtype=torch.bfloat16)
        for static in (None, torch.tensor(0.01, device=cuda)):
            call = functools.partial(ltx.adaln_rmsnorm_quant, x, *vectors, static_scale=static)
            call_with_tables = functools.partial(call, scale_table=nothing, shift_table=nothing)
            known, other = call(), call_with_tables()
            if rows > 1:  # a single row of each batch is a row with vectors of its own
                (name,) = kernels_of(call)
                assert "::norm_kernel<" in name
                assert f" {width // 32 if width <= 4096 else -1}>" in name
                (name,) = kernels_of(call_with_tables)
                assert "::modulate_held_kernel<" in name
            for output, expected in zip(known, other, strict=True):
                assert_same_bits(output.view(torch.uint8), expected.view(torch.uint8), f"{rows} rows of {width}")


def test_threads_change_nothing(ltx, device):
    if device != "cpu":
        pytest.skip("threads of the CPU")
    case = norm_case("gated_residual_adaln_rmsnorm", Make(device, torch.bfloat16), (2, 130, 1000))
    with torch_threads(1):
        expected = run(ltx, case)
    with torch_threads(4):
        for output, one in zip(run(ltx, case), expected, strict=True):
            assert_same_bits(output, one)


# ---- Large


def test_strides_above_int32(ltx, device):
    """Two rows, or two columns, more than 2^31 elements apart, in memory that is mostly never touched."""
    width, apart = 264, 2**31 + 8
    try:
        flat = torch.empty(apart + width, dtype=torch.bfloat16, device=device)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        pytest.skip(f"not enough memory: {error}")
    make = Make(device, torch.bfloat16)
    for case in (norm_case("rmsnorm", make, (2, width)), activation_case("swiglu", make, (2, width // 2))):
        expected = run(ltx, case)
        for strides in ((apart, 1), (1, apart // width)):
            far = flat.as_strided((2, width), strides)
            far.copy_(case.kwargs["input"])
            for output, want in zip(run(ltx, case.replace(input=far)), expected, strict=True):
                assert_same_bits(output, want, f"{case.op}, strides {strides}")


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 4096])
def test_more_than_2_31_elements(ltx, cuda, width):
    rows = 2**31 // width + 3
    try:
        x = torch.empty(rows, width, dtype=torch.bfloat16, device=cuda)
        results = ltx.quantize_rows(x.normal_(generator=torch.Generator(cuda).manual_seed(1)))
    except torch.OutOfMemoryError as error:
        pytest.skip(f"not enough memory: {error}")
    for first in (0, rows // 2, rows - 8):
        for output, want in zip(results, ltx.quantize_rows(x[first : first + 8]), strict=True):
            assert_same_bits(output[first : first + 8], want, f"rows from {first}")


# ---- Errors, fakes and torch.compile


def ones(device: str) -> Callable[..., Tensor]:
    return lambda *shape, dtype=torch.float32: torch.ones(shape, dtype=dtype, device=device)


FLOAT32 = "dtype float32"
FLOATS = f"{FLOAT32}, float16 or bfloat16"
ERRORS: dict[str, list[Callable[[Any, Any], Any]]] = {
    "input: expected at least 1 dimension, got shape []": [
        lambda f, t: f.quantize_rows(t()),
        lambda f, t: f.gelu_quant(t()),
    ],
    f"input: expected {FLOATS}, got int64": [
        lambda f, t: f.quantize_rows(t(2, 8, dtype=torch.int64)),
        lambda f, t: f.rmsnorm_quant(t(2, 8, dtype=torch.int64)),
        lambda f, t: f.swiglu_quant(t(2, 8, dtype=torch.int64)),
    ],
    f"input: expected {FLOATS}, got float8_e4m3fn": [lambda f, t: f.quantize_rows(t(2, 8, dtype=E4M3))],
    "input: expected an even last dimension (gate and up packed), got shape [2, 7]": [
        lambda f, t: f.geglu_quant(t(2, 7)),
    ],
    "up: expected shape [2, 8], got [2, 7]": [lambda f, t: f.swiglu_quant(t(2, 8), t(2, 7))],
    f"up: expected {FLOAT32} (that of input), got float16": [
        lambda f, t: f.swiglu_quant(t(2, 8), t(2, 8, dtype=torch.float16)),
    ],
    "bias: expected shape [8], got [7]": [lambda f, t: f.gelu_quant(t(2, 8), bias=t(7))],
    "prefix: expected the leading sizes of input [2, 8], got shape [3, 8]": [
        lambda f, t: f.gelu_quant(t(2, 8), prefix=t(3, 8)),
        lambda f, t: f.swiglu_quant(t(2, 8), prefix=t(3, 8)),
    ],
    "prefix: expected the leading sizes of input [2, 8], got shape [8]": [
        lambda f, t: f.geglu_quant(t(2, 8), t(2, 8), prefix=t(8)),
    ],
    f"prefix: expected {FLOAT32} (that of input), got float16": [
        lambda f, t: f.gelu_quant(t(2, 8), prefix=t(2, 8, dtype=torch.float16)),
    ],
    "weight: expected shape [8], got [7]": [
        lambda f, t: f.rmsnorm_quant(t(2, 8), t(7)),
        lambda f, t: f.rmsnorm_residual_quant(t(2, 8), t(2, 8), t(7)),
    ],
    "residual: expected shape [2, 3, 8], got [3, 8]": [
        lambda f, t: f.gated_residual_quant(t(2, 3, 8), t(3, 8), t(8)),
        lambda f, t: f.gated_residual_adaln_rmsnorm_quant(t(2, 3, 8), t(3, 8)),
    ],
    "scale: expected a shape that broadcasts to [2, 3, 8] (or [2, 8], per batch), got [5, 8]": [
        lambda f, t: f.adaln_rmsnorm_quant(t(2, 3, 8), None, t(5, 8), t(8)),
        lambda f, t: f.gated_residual_adaln_rmsnorm_quant(t(2, 3, 8), t(2, 3, 8), scale=t(5, 8)),
    ],
    "shift_table: expected shift to be given too, got a table alone": [
        lambda f, t: f.gated_residual_adaln_rmsnorm_quant(t(2, 8), t(2, 8), shift_table=t(8)),
    ],
    "eps: expected a finite number >= 0, got -1": [
        lambda f, t: f.rmsnorm_quant(t(2, 8), eps=-1.0),
        lambda f, t: f.gated_residual_adaln_rmsnorm_quant(t(2, 8), t(2, 8), eps=-1.0),
    ],
    "static_scale: expected dtype float32, got float16": [
        lambda f, t: f.quantize_rows(t(2, 8), static_scale=t(dtype=torch.float16)),
        lambda f, t: f.gelu_quant(t(2, 8), static_scale=t(dtype=torch.float16)),
        lambda f, t: f.rmsnorm_residual_quant(t(2, 8), t(2, 8), static_scale=t(dtype=torch.float16)),
    ],
    "static_scale: expected one element, got shape [2, 1]": [
        lambda f, t: f.adaln_rmsnorm_quant(t(2, 8), None, t(8), t(8), static_scale=t(2, 1)),
        lambda f, t: f.geglu_quant(t(2, 8), static_scale=t(2, 1)),
        lambda f, t: f.gate_heads_quant(t(2, 3, 8), t(2, 3), static_scale=t(2, 1)),
    ],
    "input: expected at least 2 dimensions, got shape [8]": [lambda f, t: f.gate_heads_quant(t(8), t(1))],
    "logits: expected shape [2, 3] (one per head) or [2, 24] (one per column), got [2, 4]": [
        lambda f, t: f.gate_heads_quant(t(2, 3, 8), t(2, 4)),
    ],
    "scale: expected a finite number, got inf": [lambda f, t: f.gate_heads_quant(t(2, 3, 8), t(2, 3), math.inf)],
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors(ltx, device, text):
    """The same text from the compiled op, the fake and the reference."""
    for call in ERRORS[text]:
        for package, make in ((ltx, ones(device)), (ltx.reference, ones(device)), (ltx, ones("meta"))):
            with pytest.raises(RuntimeError) as error:
                call(package, make)
            assert str(error.value) == text
        with FakeTensorMode(), pytest.raises(RuntimeError) as error:
            call(ltx, ones(device))
        assert str(error.value) == text


def test_error_of_a_code(ltx, device):
    for t in (ones(device), ones("meta")):
        with pytest.raises(RuntimeError, match=r"^statistic: expected a code from 0 to 2, got 3$"):
            ltx._ops.ops.norm_quant(t(2, 8), None, None, None, None, None, None, None, None, 1e-6, 0.0, 3)
        with pytest.raises(RuntimeError, match=r"^activation: expected a code from 0 to 2, got 3$"):
            ltx._ops.ops.gelu_quant(t(2, 8), None, None, None, 3)


def test_error_of_a_choice(ltx, device):
    for f in (ltx, ltx.reference):
        for call in (f.geglu_quant, f.gelu_quant):
            with pytest.raises(ValueError, match=r"^approximate: expected"):
                call(ones(device)(2, 8), approximate="erf")


def test_error_where_a_gradient_is_needed(ltx, device):
    x = torch.ones(2, 8, device=device)
    needs = torch.ones(2, 8, device=device, requires_grad=True)
    calls = [
        lambda a, b: ltx.quantize_rows(b),
        lambda a, b: ltx.rmsnorm_quant(a, b[0]),
        lambda a, b: ltx.rmsnorm_residual_quant(a, b),
        lambda a, b: ltx.adaln_rmsnorm_quant(a, None, a, b),
        lambda a, b: ltx.gated_residual_quant(a, a, b),
        lambda a, b: ltx.gated_residual_adaln_rmsnorm_quant(a, a, scale=b),
        lambda a, b: ltx.geglu_quant(b),
        lambda a, b: ltx.swiglu_quant(a, b),
        lambda a, b: ltx.gelu_quant(a, bias=b[0]),
        lambda a, b: ltx.gelu_quant(a, prefix=b),
        lambda a, b: ltx.gate_heads_quant(a, b[:, 0]),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"^input: expected no gradient to be needed, got a tensor that"):
            call(x, needs)
        with torch.no_grad():
            outputs = call(x, needs)
        assert not any(output.requires_grad for output in outputs)


OPS = ["norm_quant", "residual_norm_quant", "norm_residual_norm_quant", "adaln_norm_pair_quant"]
OPS += ["residual_norm_pair_quant", "glu_quant", "gelu_quant", "gate_heads_quant", "scaled_linear"]
OPS += ["weight_only_linear"]


def op_samples(name: str, device: str, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    make = Make(device, dtype)
    x, w, v, s = make(2, 6, 24), make(24), make(2, 1, 24), torch.tensor(0.1, device=device)
    row = make(2, 3, 16).to(E4M3), torch.ones(2, 3, 1, device=device)
    weight = make(32, 16).to(E4M3), torch.ones(32, device=device)
    rows, i = make(3, 24), torch.arange(6, device=device) % 3
    return {
        "norm_quant": [
            (x, None, None, None, None, None, None, None, None, 0.0, 0.0, 0),
            (x.transpose(0, 1), w, None, w, v[:1], w, w, s, None, 1e-6, 0.0, 1),
            (x, None, None, rows, rows, w, w, s, i, 1e-6, 0.0, 1),
            (x, w, w, None, None, None, None, None, None, 1e-5, 0.0, 2),
        ],
        "residual_norm_quant": [
            (x, x, v, None, None, None, None, w, None, None, s, None, 0.0, 0.0, 0),
            (x, x, None, w, None, v, v, None, None, w, None, None, 1e-6, 0.0, 1),
            (x, x, rows, None, None, rows, rows, None, None, None, None, i, 1e-6, 0.0, 2),
            (x, x, v, w, w, None, None, None, None, None, None, None, 1e-6, 0.0, 2),
        ],
        "norm_residual_norm_quant": [
            (x, x, v, w, w, v, None, None, None, None, None, None, 1e-6, 1e-5, 0.0),
            (x, x, None, w, w, None, None, None, None, None, s, None, 1e-6, 1e-5, 1.0),
        ],
        "adaln_norm_pair_quant": [
            (x, None, None, v, v, v, None, None, None, None, None, None, None, 1e-6, 1),
            (x, w, w, v, v, v, v, w, w, w, w, s, None, 1e-5, 2),
        ],
        "residual_norm_pair_quant": [
            (x, x, v, None, None, v, v, v, v, w, w, w, w, w, None, None, 1e-6, 1),
            (x, x, None, w, w, v, v, v, v, None, None, None, None, None, s, None, 1e-5, 2),
        ],
        "glu_quant": [(x, None, None, None, 1, True), (x, x, v.expand_as(x), s, 2, True)],
        "gelu_quant": [(x, None, x[..., :8], s, 0), (x, w, None, None, 1)],
        "gate_heads_quant": [(x, x[..., 0], None, 2.0), (x.transpose(0, 1), make(6, 48), s, 1.0)],
        "scaled_linear": [
            (*row, *weight, None, None, True),
            (*row, *weight, make(32).bfloat16(), make(*row[0].shape[:-1], 32).bfloat16(), False),
        ],
        "weight_only_linear": [(make(2, 3, 16), *weight, None), (make(5, 16), *weight, make(32))],
    }[name]


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    "dtype", [DTYPES[0], *(pytest.param(dtype, marks=pytest.mark.extended) for dtype in DTYPES[1:])], ids=str
)
def test_opcheck(ltx, device, name, dtype):
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    for sample in op_samples(name, device, dtype):
        takes_fp8 = name in ("scaled_linear", "weight_only_linear")  # which test_schema cannot compare
        torch.library.opcheck(getattr(ltx._ops.ops, name).default, sample, test_utils=tests[takes_fp8:])


def test_opcheck_of_a_given_output(ltx, device):
    for sample in op_samples("scaled_linear", device, torch.bfloat16):
        out = torch.empty_like(ltx._ops.ops.scaled_linear(*sample))
        tests = ["test_autograd_registration", "test_faketensor"]
        torch.library.opcheck(ltx._ops.ops.scaled_linear_out.default, (out, *sample), test_utils=tests)


@pytest.mark.parametrize("name", OPS)
def test_both_devices_have_kernels(ltx, name):
    op = f"{ltx.__name__}::{name}"
    for key in ("CPU", "CUDA"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(op, key)


def block(ltx: Any, x: Tensor, r: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    values, scales = ltx.adaln_rmsnorm_quant(x, None, v, v)
    y = values.to(x.dtype) * scales.to(x.dtype)
    *first, r = ltx.gated_residual_quant(y, r, v)
    *second, r = ltx.gated_residual_adaln_rmsnorm_quant(y, r, v, None, v, v)
    *third, r = ltx.rmsnorm_residual_quant(y, r)
    return (
        *first,
        *second,
        *third,
        r,
        *ltx.rmsnorm_quant(r),
        *ltx.geglu_quant(r),
        *ltx.swiglu_quant(r, r),
        *ltx.gelu_quant(r),
        *ltx.gelu_quant(r, prefix=y[..., :8]),
        *ltx.quantize_rows(r),
    )


@pytest.mark.kernels_ci
def test_compiles(ltx, device):
    """Without a break, and once for all sizes."""
    torch.compiler.reset()
    make = Make(device, torch.bfloat16)
    function = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    try:
        for batch, tokens in ((5, 12), (4, 10), (7, 28)):
            arguments = make(batch, tokens, 24), make(batch, tokens, 24), make(batch, 1, 24)
            for output, expected in zip(function(ltx, *arguments), block(ltx, *arguments), strict=True):
                assert_same_bits(output, expected)
            torch.compiler.set_stance("fail_on_recompile")
    finally:
        torch.compiler.set_stance("default")
