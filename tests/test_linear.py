"""Linear layers of quantised rows: quantize_weight and scaled_linear."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Make, assert_close_to_fp64, assert_same_bits, guarded_output, kernels_of, place
from test_quant import E4M3, FLOATS, assert_exactly, exactly
from torch import Tensor


def linear_inputs(ltx: Any, device: str, rows: tuple[int, ...] = (2, 5)) -> tuple[Tensor, ...]:
    make = Make(device, torch.bfloat16)
    x, weight, bias = make(*rows, 64), make(96, 64, std=0.1), make(96)
    return (*ltx.quantize_rows(x), *ltx.quantize_weight(weight), bias, x, weight)


def test_weight(ltx, device):
    weight = torch.nn.Parameter(Make(device, torch.bfloat16)(96, 64))
    values, scales = ltx.quantize_weight(weight)
    expected = exactly(weight.detach())
    assert_exactly((values, scales[:, None]), expected)
    assert scales.shape == (96,) and not values.requires_grad
    assert_exactly((*ltx.quantize_weight(weight.detach().float())[:1], scales[:, None]), expected)


def test_weight_that_is_stored_in_fp8(ltx, device):
    weight = Make(device, torch.bfloat16)(96, 64)
    stored = weight.to(E4M3)
    values, scales = ltx.quantize_weight(stored)
    assert torch.equal(values.float() * scales[:, None], stored.float())
    stored = weight.to(torch.float8_e5m2)
    values, scales = ltx.quantize_weight(stored)
    assert_exactly((values, scales[:, None]), exactly(stored))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("rows", [(2, 5), (7,), (), (2, 3, 4)])
def test_linear(ltx, device, rows):
    if ltx.quant.fp8_obstacle(torch.device(device)):
        pytest.skip("no fp8 matrix products")
    values, scales, weight, weight_scales, bias, x, original = linear_inputs(ltx, device, rows)
    exact_x, exact_w = values.double() * scales, weight.double() * weight_scales[:, None]
    for own_bias in (None, bias, bias.float()):
        output = ltx.scaled_linear(values, scales, weight, weight_scales, own_bias)
        assert output.dtype == torch.bfloat16 and output.shape == (*rows, 96) and output.is_contiguous()
        exact = F.linear(exact_x, exact_w, None if own_bias is None else own_bias.double())
        magnitude = F.linear(exact_x.abs(), exact_w.abs()) + 4
        assert bool(((output - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-11 * magnitude).all())
        wanted = F.linear(x.double(), original.double(), None if own_bias is None else own_bias.double())
        assert (output - wanted).norm() < 0.06 * wanted.norm()


@pytest.mark.parametrize("rows", [(2, 5), (7,), (), (2, 3, 4), (0, 4)], ids=str)
def test_addend_and_out(ltx, device, rows):
    """A product and an addend, into tensors of any strides, in place of the addend too."""
    if ltx.quant.fp8_obstacle(torch.device(device)):
        pytest.skip("no fp8 matrix products")
    values, scales, weight, weight_scales, bias, *_ = linear_inputs(ltx, device, rows)
    generator = torch.Generator().manual_seed(3)
    addend = torch.randn((*rows, 96), generator=generator).to(device).bfloat16()
    exact_x, exact_w = values.double() * scales, weight.double() * weight_scales[:, None]
    exact = F.linear(exact_x, exact_w, bias.double()) + addend.double()
    magnitude = F.linear(exact_x.abs(), exact_w.abs()) + 4 + addend.double().abs()
    arguments = values, scales, weight, weight_scales, bias
    output = ltx.scaled_linear(*arguments, addend=addend)
    assert output.dtype == torch.bfloat16 and output.shape == (*rows, 96) and output.is_contiguous()
    own = torch.device(device).type == "cpu" or ltx.quant.has_own_product(torch.device(device))
    bound = (1 if own else 2) * 2.0**-8 * magnitude + 2.0**-11 * magnitude
    assert bool(((output - exact).abs() <= bound).all())
    plain = ltx.scaled_linear(*arguments)
    for add, wanted in ((None, plain), (addend, output)):
        for layout in ("contiguous", "rows apart", "rows misaligned", "columns strided", "permuted"):
            moved = None if add is None else place(add, layout)
            given = guarded_output(wanted, layout)
            assert ltx.scaled_linear(*arguments, addend=moved, out=given.view) is given.view
            assert bool(((given.view.double() - wanted.double()).abs() <= 2.0**-7 * magnitude).all()), layout
            given.check(layout)
    again = addend.clone()
    assert ltx.scaled_linear(*arguments, addend=again, out=again) is again
    assert bool(((again.double() - output.double()).abs() <= 2.0**-7 * magnitude).all())


def test_out_beside_the_weight(ltx, device):
    """An output right after fp8 weights in one allocation shares no byte with them."""
    if ltx.quant.fp8_obstacle(torch.device(device)):
        pytest.skip("no fp8 matrix products")
    values, scales, weight, weight_scales, bias, *_ = linear_inputs(ltx, device, (16,))
    bytes_ = torch.empty(weight.numel() + 2 * 16 * 96, dtype=torch.uint8, device=device)
    beside = bytes_[: weight.numel()].view(weight.dtype).view(weight.shape).copy_(weight)
    out = bytes_[weight.numel() :].view(torch.bfloat16).view(16, 96)
    assert ltx.scaled_linear(values, scales, beside, weight_scales, bias, out=out) is out
    assert_same_bits(out, ltx.scaled_linear(values, scales, weight, weight_scales, bias))


def test_linear_compiles(ltx, device):
    if ltx.quant.fp8_obstacle(torch.device(device)):
        pytest.skip("no fp8 matrix products")
    torch.compiler.reset()
    values, scales, weight, weight_scales, bias, *_ = linear_inputs(ltx, device)
    function = torch.compile(lambda *args: ltx.scaled_linear(*args), fullgraph=True, backend="aot_eager")
    arguments = values, scales, weight, weight_scales, bias
    assert_same_bits(function(*arguments), ltx.scaled_linear(*arguments))


def linear_errors(t: Callable[..., Tensor]) -> dict[str, tuple[Tensor, ...]]:
    q, s, w, ws = t(2, 32, dtype=E4M3), t(2, 1), t(16, 32, dtype=E4M3), t(16)
    return {
        "values: expected dtype float8_e4m3fn, got float32": (t(2, 32), s, w, ws),
        "weight: expected dtype float8_e4m3fn, got bfloat16": (q, s, t(16, 32, dtype=torch.bfloat16), ws),
        "weight: expected 2 dimensions, got shape [16]": (q, s, t(16, dtype=E4M3), ws),
        "scales: expected dtype float32, got float16": (q, t(2, 1, dtype=torch.float16), w, ws),
        "weight: expected sizes that are multiples of 16, got shape [15, 32]": (q, s, t(15, 32, dtype=E4M3), t(15)),
        "weight: expected a contiguous tensor, got strides [1, 16]": (q, s, t(32, 16, dtype=E4M3).t(), ws),
        "values: expected a last dimension of 32 (that of weight), got shape [2, 16]": (t(2, 16, dtype=E4M3), s, w, ws),
        "values: expected at least 1 dimension, got shape []": (t(dtype=E4M3), s, w, ws),
        "scales: expected shape [2, 1], got [2]": (q, t(2), w, ws),
        "weight_scales: expected shape [16], got [16, 1]": (q, s, w, t(16, 1)),
        "bias: expected shape [16], got [15]": (q, s, w, ws, t(15)),
    }


def test_errors_of_linear_layers(ltx, device):
    """From Python's checks, from the op and from its fake."""

    def t(*shape: int, dtype: torch.dtype = torch.float32, on: str = device) -> Tensor:
        return torch.ones(shape, device=on).to(dtype)

    def op(*tensors: Tensor) -> Tensor:
        return ltx._ops.ops.scaled_linear(*(*tensors, None)[:5], None, True)

    for function, on in ((ltx.scaled_linear, device), (op, device), (op, "meta")):
        for text, arguments in linear_errors(functools.partial(t, on=on)).items():
            with pytest.raises(RuntimeError) as error:
                function(*arguments)
            assert str(error.value) == text
    q, s, w, ws, bias = t(2, 32, dtype=E4M3), t(2, 1), t(16, 32, dtype=E4M3), t(16), t(16, dtype=torch.bfloat16)
    beyond = {
        "bias: expected dtype bfloat16, got float32": (q, s, w, ws, t(16)),
        "bias: expected a contiguous tensor, got strides [2]": (q, s, w, ws, bias.repeat(2)[::2]),
        "values: expected a contiguous tensor, got strides [64, 1]": (q.repeat(1, 2)[:, :32], s, w, ws),
        "scales: expected a contiguous tensor, got strides [2, 1]": (q, s.repeat(1, 2)[:, :1], w, ws),
        "weight_scales: expected a contiguous tensor, got strides [2]": (q, s, w, ws.repeat(2)[::2]),
    }
    expected = ltx._formulas.product(q, s, w, ws, bias)
    for text, arguments in beyond.items():
        with pytest.raises(RuntimeError) as error:
            op(*arguments)
        assert str(error.value) == text
        if ltx.quant.fp8_obstacle(torch.device(device)) is None:  # the function copies what lies apart
            output = ltx.scaled_linear(*(*arguments, bias)[:5])
            assert_same_bits(output, expected)
    for text, weight in {
        "weight: expected 2 dimensions, got shape [16]": t(16),
        f"weight: expected {FLOATS}, got int64": t(16, 16, dtype=torch.int64),
    }.items():
        with pytest.raises(RuntimeError) as error:
            ltx.quantize_weight(weight)
        assert str(error.value) == text


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"addend": torch.ones(3)}, RuntimeError, "addend: expected dtype bfloat16, got float32"),
        ({"out": torch.ones(3, dtype=torch.bfloat16)}, RuntimeError, "out: expected shape [2, 5, 96], got [3]"),
        ({"out_dtype": torch.int8}, RuntimeError, "out_dtype: expected bfloat16, float16 or float32, got int8"),
        ({"out_dtype": 2.5}, TypeError, "out_dtype: expected a torch.dtype, got float"),
        ({"out_dtype": None}, TypeError, "out_dtype: expected a torch.dtype, got None"),
        ({"use_fast_accum": "x"}, TypeError, "use_fast_accum: expected True or False, got str"),
    ],
)
def test_errors_of_options(ltx, device, options, kind, text):
    with pytest.raises(kind) as error:
        ltx.scaled_linear(*linear_inputs(ltx, device)[:4], **options)
    assert str(error.value) == text


# ---- linear_cat


def parts_of(whole: Tensor, widths: Sequence[int], *, apart: bool) -> list[Tensor]:
    """The columns of a tensor as several: views, or tensors of their own."""
    return [part.contiguous() if apart else part for part in whole.split(list(widths), -1)]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("widths", [(48, 80), (128,), (16, 96, 16)], ids=str)
@pytest.mark.parametrize("shape", [(5,), (2, 7), (), (2, 3, 4), (0, 3)], ids=str)
def test_linear_cat(ltx, device, dtype, widths, shape):
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    whole, weight, own_bias = normal(*shape, 128), normal(72, 128), normal(72)
    for bias in (own_bias, None):
        exact = F.linear(whole.double(), weight.double(), None if bias is None else bias.double())
        magnitude = F.linear(whole.double().abs(), weight.double().abs()) + 4
        for apart in (False, True):
            output = ltx.linear_cat(parts_of(whole, widths, apart=apart), weight, bias)
            assert output.shape == (*shape, 72) and output.is_contiguous() and output.dtype == dtype
            # A rounding for each product, and those of the sums in fp32.
            bound = (
                len(widths) * torch.finfo(dtype).eps * exact.abs()
                + (2.0**-9 if dtype != torch.float32 else 2.0**-20) * magnitude
            )
            assert bool(((output - exact).abs() <= bound).all())


def test_linear_cat_where_tensors_have_no_address(ltx, device):
    """Under torch.func, in traces, of lazily negated views, and under autocast, as the documented torch calls."""
    x, weight = torch.randn(3, 4, 16, device=device), torch.randn(8, 16, device=device)

    def product(first: Tensor, second: Tensor) -> Tensor:
        return ltx.linear_cat([first, second], weight)

    def halves(whole: Tensor) -> Tensor:
        return product(*whole.split(8, -1))

    expected = F.linear(x, weight)
    torch.testing.assert_close(torch.func.vmap(halves)(x), expected)
    torch.testing.assert_close(torch.func.functionalize(halves)(x), expected)
    traced = torch.jit.trace(product, x.split(8, -1), check_trace=False)
    apart = (torch.randn(3, 4, 16, device=device)[..., :8], torch.randn(3, 4, 8, device=device))
    torch.testing.assert_close(traced(*apart), F.linear(torch.cat(apart, -1), weight))
    negated = (torch._neg_view(x)[..., :8], x[..., 8:])
    torch.testing.assert_close(product(*negated), F.linear(torch.cat(negated, -1), weight))
    with torch.autocast(device, torch.bfloat16):
        assert halves(x).dtype == halves(x.clone().requires_grad_()).dtype == torch.bfloat16


def test_linear_cat_of_neighbours_is_one_product(ltx, device):
    """The bits of the layer on the whole; and those of the layer itself for one input."""
    generator = torch.Generator().manual_seed(0)
    whole, weight, bias = (
        torch.randn(*s, generator=generator).to(device).bfloat16() for s in ((3, 9, 128), (64, 128), (64,))
    )
    expected = F.linear(whole, weight, bias)
    assert_same_bits(ltx.linear_cat(whole.split((48, 80), -1), weight, bias), expected)
    assert_same_bits(ltx.linear_cat([whole], weight, bias), expected)
    swapped = ltx.linear_cat(whole.split((64, 64), -1)[::-1], weight, bias)  # neighbours, but in the other order
    wanted = F.linear(torch.cat(whole.split((64, 64), -1)[::-1], -1), weight, bias)
    assert (swapped.double() - wanted.double()).norm() < 0.01 * wanted.double().norm()


@pytest.mark.parametrize("sizes", [(0, 8, 6), (4, 0, 6), (4, 8, 0), (4, 0, 0), (0, 0, 0)], ids=str)
def test_linear_cat_of_empty_tensors(ltx, device, sizes):
    """No rows, an input without columns, beside another one or alone, and no channels."""
    rows, width, channels = sizes
    inputs = [torch.randn(rows, width, device=device), torch.randn(rows, 16, device=device)]
    weight, bias = torch.randn(channels, width + 16, device=device), torch.randn(channels, device=device)
    for parts, part_weight in ((inputs, weight), (inputs[:1], weight[:, :width])):
        expected = F.linear(torch.cat(parts, -1), part_weight, bias)
        assert_same_bits(ltx.linear_cat(parts, part_weight, bias), expected)
        out = torch.empty_like(expected)
        assert ltx.linear_cat(parts, part_weight, bias, out=out) is out
        assert_same_bits(out, expected)


@pytest.mark.parametrize("apart", [False, True])
def test_linear_cat_into_a_larger_tensor(ltx, device, apart):
    """Rows of each sample, columns, and both: what lies beside them stays."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    whole, weight, bias = normal(2, 5, 48), normal(32, 48), normal(32)
    parts = parts_of(whole, (16, 32), apart=apart)
    expected = ltx.linear_cat(parts, weight, bias)
    for part in (
        lambda big: big[:2, :5, :32],
        lambda big: big[:2, 3:8, 8:40],
        lambda big: big.transpose(0, 1)[:2, 1:6, :32],
    ):
        big = torch.full((8, 9, 48), 7.0, device=device)
        out = part(big)
        assert ltx.linear_cat(parts, weight, bias, out=out) is out
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        out.fill_(7.0)
        assert bool((big == 7.0).all())


def test_linear_cat_gradients_and_compile(ltx, device):
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(s, generator=generator).to(device).requires_grad_()
        for s in ((2, 5, 16), (2, 5, 32), (24, 48), (24,))
    ]
    a, m, weight, bias = tensors
    gradients = torch.autograd.grad(ltx.linear_cat((a, m), weight, bias).square().sum(), tensors)
    wanted = torch.autograd.grad(F.linear(torch.cat((a, m), -1), weight, bias).square().sum(), tensors)
    for gradient, want in zip(gradients, wanted, strict=True):
        assert_same_bits(gradient, want)
    with pytest.raises(RuntimeError, match=r"^out: expected no gradient to be needed"):
        ltx.linear_cat((a, m), weight, bias, out=torch.empty(2, 5, 24, device=device))
    with torch.no_grad():
        compiled = torch.compile(lambda *args: ltx.linear_cat(args[:2], *args[2:]), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*tensors), ltx.linear_cat((a, m), weight, bias))


def test_errors_of_linear_cat(ltx, device):
    def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(shape, device=device, dtype=dtype)

    for text, arguments, options in (
        (
            "inputs: expected last dimensions that add up to 32 (that of weight), got 16 + 8",
            ([t(2, 16), t(2, 8)], t(4, 32)),
            {},
        ),
        (
            "inputs[1]: expected the leading sizes of inputs[0] [2, 16], got shape [3, 16]",
            ([t(2, 16), t(3, 16)], t(4, 32)),
            {},
        ),
        (
            "inputs[0]: expected dtype float32 (that of weight), got bfloat16",
            ([t(2, 32, dtype=torch.bfloat16)], t(4, 32)),
            {},
        ),
        ("weight: expected 2 dimensions, got shape [32]", ([t(2, 32)], t(32)), {}),
        ("bias: expected shape [4], got [5]", ([t(2, 32)], t(4, 32), t(5)), {}),
        ("out: expected shape [2, 4], got [2, 5]", ([t(2, 32)], t(4, 32)), {"out": t(2, 5)}),
        ("inputs: expected a sequence of tensors, got none", ([], t(4, 32)), {}),
        ("inputs: expected a sequence of tensors, got a tensor", (t(2, 32), t(4, 32)), {}),
    ):
        with pytest.raises(RuntimeError) as error:
            ltx.linear_cat(*arguments, **options)
        assert str(error.value) == text
    for arguments, options in (
        (([t(2, 32), 3], t(4, 32)), {}),
        ((3, t(4, 32)), {}),
        (([t(2, 32)], "x"), {}),
        (([t(2, 32)], t(4, 32)), {"out": 3}),
    ):
        with pytest.raises(TypeError, match=r"^(inputs|weight|out): expected "):
            ltx.linear_cat(*arguments, **options)


def test_error_of_an_old_gpu(ltx, monkeypatch):
    class Properties:
        name, major, minor = "NVIDIA A100-SXM4-80GB", 8, 0

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert ltx.quant.fp8_obstacle(torch.device("cuda:0")) == "NVIDIA A100-SXM4-80GB (8.0)"
    monkeypatch.setattr(ltx.quant, "_known_obstacle", lambda device: "NVIDIA A100-SXM4-80GB (8.0)")
    values, scales, weight, weight_scales, *_ = linear_inputs(ltx, "cpu")
    with pytest.raises(RuntimeError, match=r"^values: expected a GPU of compute capability 8.9 .* got NVIDIA A100"):
        ltx.scaled_linear(values, scales, weight, weight_scales)


# ---- The package's own call of cuBLASLt


@pytest.fixture
def hopper(ltx: Any, cuda: str) -> str:
    if not ltx.quant.has_own_product(torch.device(cuda, torch.cuda.current_device())):
        pytest.skip("NOT RUN: not a Hopper GPU with CUDA 12.9 or newer")
    return cuda


def layer(device: str, rows: int, width: int, channels: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Values, scales, weight, weight_scales, bias."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    def scale(count: int) -> Tensor:
        return torch.rand(count, device=device, generator=generator) + 0.5

    values, weight = (normal(n, width).mul(30).to(E4M3) for n in (rows, channels))
    return values, scale(rows)[:, None] / 30, weight, scale(channels) / 30 / width**0.5, normal(channels).bfloat16()


def by_torch(
    values: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, fast: bool = True
) -> Tensor:
    options = {"bias": bias, "out_dtype": torch.bfloat16, "use_fast_accum": fast}
    return torch._scaled_mm(values, weight.t(), scale_a=scales, scale_b=weight_scales[None], **options)


LAYERS = [(1, 16, 16), (7, 64, 48), (50, 2048, 2048), (256, 4096, 2048), (1344, 2048, 6144), (5376, 8192, 2048)]


@pytest.mark.parametrize("shape", LAYERS, ids=str)
@pytest.mark.parametrize("fast", [True, False])
def test_own_product_is_as_near_as_torchs(ltx, hopper, shape, fast):
    arguments = layer(hopper, *shape)
    values, scales, weight, weight_scales, bias = arguments
    exact = (values.double() * scales) @ (weight.double() * weight_scales[:, None]).t()
    for own_bias in (None, bias):
        truth = exact if own_bias is None else exact + own_bias.double()
        outputs = (
            ltx.scaled_linear(*arguments[:4], own_bias, use_fast_accum=fast),
            by_torch(*arguments[:4], own_bias, fast),
        )
        own, torchs = (((output - truth).norm() / truth.norm()).item() for output in outputs)
        assert own <= 1.05 * torchs + 1e-6


def test_own_products_of_one_shape(ltx, hopper):
    """One plan serves them all, with the operands of each."""
    layers = [layer(hopper, 48, 64, 96, seed=seed) for seed in range(3)]
    for arguments in (*layers, *layers):
        output, wanted = ltx.scaled_linear(*arguments), by_torch(*arguments)
        assert ((output - wanted).norm() / wanted.norm()).item() < 4e-3


@pytest.mark.slow
def test_more_than_2_31_elements(ltx, hopper):
    rows, channels = 2**17 + 5, 2**14
    values, scales, *weight = layer(hopper, rows, 16, channels)
    try:
        output = ltx.scaled_linear(values, scales, *weight)
    except torch.OutOfMemoryError as error:
        pytest.skip(f"not enough memory: {error}")
    for first in (0, 2**16, rows - 5):
        part = slice(first, first + 5)
        wanted = ltx.scaled_linear(values[part], scales[part], *weight)
        assert ((output[part] - wanted).norm() / wanted.norm()).item() < 4e-3


def test_own_product_clears_no_memory(ltx, hopper):
    """One kernel a product: what torch._scaled_mm spends on clearing cuBLASLt's workspace is the reason for it."""
    arguments = layer(hopper, 5376, 2048, 2048)
    ltx.scaled_linear(*arguments)
    names = kernels_of(lambda: ltx.scaled_linear(*arguments))
    assert len(names) == 1 and "Memset" not in names[0], names


def test_own_product_of_empty_rows(ltx, hopper):
    values, scales, *weight = layer(hopper, 4, 64, 48)
    assert ltx.scaled_linear(values[:0], scales[:0], *weight).shape == (0, 48)
    assert ltx.scaled_linear(values[:0].view(0, 1, 64), scales[:0].view(0, 1, 1), *weight).shape == (0, 1, 48)


def test_own_product_of_any_alignment(ltx, hopper):
    """Operands that begin at multiples of 16 bytes, as torch asks, and scales that begin anywhere."""
    values, scales, weight, weight_scales, bias = layer(hopper, 40, 80, 96)
    expected = ltx.scaled_linear(values, scales, weight, weight_scales, bias)[3:, 16:].double()
    apart = torch.cat((weight_scales[:1], weight_scales[16:]))[1:]
    output = ltx.scaled_linear(values[3:], scales[3:], weight[16:], apart, bias[16:])
    assert ((output.double() - expected).norm() / expected.norm()).item() < 4e-3
    given = torch.empty_like(output)
    ltx.scaled_linear(values[3:], scales[3:], weight[16:], apart, bias[16:], out=given)
    assert_same_bits(given, output)


def test_own_products_of_many_shapes(ltx, hopper):
    """More than the plans that are kept."""
    arguments = layer(hopper, 4200, 16, 16)
    values, scales, *weight = arguments
    first = ltx.scaled_linear(values[:1], scales[:1], *weight)
    for rows in range(2, 4200):
        output = ltx.scaled_linear(values[:rows], scales[:rows], *weight)
    assert_same_bits(ltx.scaled_linear(values[:1], scales[:1], *weight), first)
    assert ((output - by_torch(values[:rows], scales[:rows], *weight)).norm() / output.norm()).item() < 4e-3


def test_own_product_in_a_graph(ltx, hopper):
    """Of a shape that was never seen before the capture, replayed with other values."""
    shape = 72, 2048, 96
    arguments, other = layer(hopper, *shape), layer(hopper, *shape, seed=1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = ltx.scaled_linear(*arguments)
    for tensor, value in zip(arguments, other, strict=True):
        tensor.copy_(value)
    graph.replay()
    assert_same_bits(output, ltx.scaled_linear(*other))


def test_own_products_in_threads(ltx, hopper):
    """Several shapes at once, each thread on a stream of its own."""
    layers = [layer(hopper, rows, 2048, 256, seed=rows) for rows in (8, 100, 1000)]
    expected = [ltx.scaled_linear(*arguments) for arguments in layers]
    torch.cuda.synchronize()

    def work(thread: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for i in range(60):
                output = ltx.scaled_linear(*layers[(thread + i) % 3])
                stream.synchronize()
                assert_same_bits(output, expected[(thread + i) % 3])

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, thread) for thread in range(8)]:
            future.result()


def test_own_product_on_a_second_device(ltx, hopper):
    """The tensors' device is where it runs, after what was put there, while another one is current and stays so."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    arguments = layer("cuda:0", 300, 2048, 256)
    there = [tensor.to("cuda:1") for tensor in arguments]
    late = [torch.ones_like(tensor) for tensor in there]
    torch.cuda.synchronize(1)
    with torch.cuda.device(1):
        torch.cuda._sleep(20_000_000)
        for tensor, value in zip(late, there, strict=True):
            tensor.copy_(value)
    torch.cuda.set_device(0)
    output = ltx.scaled_linear(*late)
    assert output.device == torch.device("cuda:1")
    assert_same_bits(output.to("cuda:0"), ltx.scaled_linear(*arguments))
    assert torch.cuda.current_device() == 0


def test_own_product_compiles(ltx, hopper):
    torch.compiler.reset()
    arguments = layer(hopper, 40, 64, 96)
    function = torch.compile(lambda *args: ltx.scaled_linear(*args), fullgraph=True, backend="aot_eager")
    assert_same_bits(function(*arguments), ltx.scaled_linear(*arguments))


CHILD = """
import sys, torch, kernels
sys.path.insert(0, sys.argv[1])
from test_linear import by_torch, layer
ltx = kernels.get_kernel("org/ltx-kernels", version=1)
arguments = layer("cuda", 48, 2048, 96)
if sys.argv[2] == "graph":
    by_torch(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = ltx.scaled_linear(*arguments)
    graph.replay()
    assert torch.equal(output, ltx.scaled_linear(*arguments))
else:
    output = ltx.scaled_linear(*(t.view(2, 24, -1) if i < 2 else t for i, t in enumerate(arguments)))
    assert output.shape == (2, 24, 96)
    assert torch.equal(output.view(48, 96), by_torch(*arguments))
"""


@pytest.mark.parametrize(("what", "choice"), [("torch", "linear=torch"), ("graph", "linear=cublaslt"), ("graph", "")])
def test_own_product_in_a_process_of_its_own(ltx, hopper, what, choice):
    """Without a cuBLASLt that fits the op is torch._scaled_mm, bit for bit; its first call may be within a capture."""
    command = [sys.executable, "-c", CHILD, os.path.dirname(__file__), what]
    environment = {**os.environ, "LTX_KERNELS_FORCE": choice}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_a_trained_bias_gets_torchs_error(ltx, hopper):
    """Not a gradient of nothing."""
    values, scales, weight, weight_scales, bias = layer(hopper, 48, 64, 96)
    multiply = ltx.quant.multiply
    bias.requires_grad_(True)
    output = multiply(values, scales, weight, weight_scales, bias)
    assert_same_bits(output.detach(), by_torch(values, scales, weight, weight_scales, bias.detach()))
    with pytest.raises(RuntimeError, match=r"derivative|not implemented"):
        output.sum().backward()
    with torch.no_grad():
        assert not multiply(values, scales, weight, weight_scales, bias).requires_grad


def test_an_older_cuda_takes_torchs_product(ltx, hopper, monkeypatch):
    arguments = layer(hopper, 48, 2048, 96)
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    ltx.quant._calls_cublaslt.cache_clear()
    try:
        assert_same_bits(ltx.scaled_linear(*arguments), by_torch(*arguments))
    finally:
        ltx.quant._calls_cublaslt.cache_clear()


@pytest.mark.parametrize(
    ("variant", "cuda_version", "major", "own"),
    [
        ("cuda", "12.9", 9, True),
        ("cuda", "13.0", 9, True),
        ("cuda", "12.8", 9, False),
        ("cuda", "12.10.1", 9, True),
        ("cuda", "13.0", 8, False),
        ("cuda", "13.0", 10, False),
        ("cuda", None, 9, False),
        ("cpu", "13.0", 9, False),
    ],
)
def test_where_the_package_calls_cublaslt(ltx, monkeypatch, variant, cuda_version, major, own):
    class Properties:
        pass

    Properties.major = major
    monkeypatch.setattr(ltx.quant, "COMPILED_DEVICE", variant)
    monkeypatch.setattr(torch.version, "cuda", cuda_version)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert ltx.quant._calls_cublaslt.__wrapped__(torch.device("cuda:0")) == own
    assert not ltx.quant.has_own_product(torch.device("cpu"))


@pytest.mark.parametrize("start", [0, 1, 8, 16])
def test_linear_cat_into_columns_that_overlap_its_input(ltx, device, start):
    both, weight = torch.randn(4, 64, device=device), torch.randn(16, 16, device=device)
    expected = ltx.linear_cat([both[:, :16].clone()], weight)
    out = both[:, start : start + 16]
    assert ltx.linear_cat([both[:, :16]], weight, out=out) is out
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


# ---- weight_only_linear


def weight_only_inputs(
    ltx: Any, device: str, dtype: torch.dtype, rows: int, channels: int = 77, width: int = 1040
) -> dict[str, Tensor]:
    values, scales = ltx.quantize_weight(torch.randn(channels, width, device=device))
    bias = torch.randn(channels, device=device).to(dtype)
    return {
        "input": torch.randn(rows, width, device=device).to(dtype),
        "weight": values,
        "weight_scales": scales,
        "bias": bias,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9])
@pytest.mark.parametrize(("channels", "width"), [(77, 1040), (5, 16), (64, 512)])
def test_weight_only(ltx, device, dtype, rows, channels, width):
    """Against float64, with a row's bits as they are when it comes alone."""
    given = weight_only_inputs(ltx, device, dtype, rows, channels, width)
    output = ltx.quant.weight_only_linear(**given)
    exact = {name: tensor.double() for name, tensor in given.items()}
    weight = exact["weight"] * exact["weight_scales"][:, None]
    truth = torch.nn.functional.linear(exact["input"], weight, exact["bias"])
    terms = torch.nn.functional.linear(exact["input"].abs(), weight.abs(), exact["bias"].abs())
    assert_close_to_fp64(output, truth, terms)
    if device == "cuda":
        for row in range(rows):
            alone = ltx.quant.weight_only_linear(**{**given, "input": given["input"][row : row + 1].clone()})
            assert_same_bits(output[row : row + 1], alone)


def test_every_e4m3_value_of_a_weight(ltx, device):
    """Each of the 256 codes is converted exactly; NaN stays NaN."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    weight = torch.zeros(256, 16, device=device).to(torch.float8_e4m3fn)
    weight[:, 3] = codes
    input = torch.zeros(1, 16, device=device)
    input[:, 3] = 1
    output = ltx.quant.weight_only_linear(input, weight, torch.ones(256, device=device))
    wanted = codes.float()
    assert torch.equal(output[0].isnan(), wanted.isnan())
    assert torch.equal(output[0].nan_to_num(), wanted.nan_to_num())


def test_weight_only_at_an_odd_address(ltx, device):
    given = weight_only_inputs(ltx, device, torch.bfloat16, 3)
    storage = torch.zeros(given["weight"].numel() + 16, dtype=torch.uint8, device=device)
    moved = storage[3 : 3 + given["weight"].numel()].view(torch.float8_e4m3fn).view_as(given["weight"])
    moved.copy_(given["weight"])
    rows = torch.zeros(given["input"].numel() + 8, dtype=torch.bfloat16, device=device)
    own = rows[1 : 1 + given["input"].numel()].view_as(given["input"])
    own.copy_(given["input"])
    wanted = ltx.quant.weight_only_linear(**given)
    assert_same_bits(ltx.quant.weight_only_linear(**{**given, "weight": moved, "input": own}), wanted)


WRONG = {
    "weight: expected dtype float8_e4m3fn, got bfloat16": lambda given: {"weight": given["weight"].bfloat16()},
    "weight: expected a last dimension that is a positive multiple of 16, got shape [77, 8]": lambda given: {
        "weight": given["weight"][:, :8].contiguous(),
        "input": given["input"][:, :8].contiguous(),
    },
    "input: expected a last dimension of 1040 (that of weight), got shape [2, 16]": lambda given: {
        "input": given["input"][:, :16].contiguous()
    },
    "input: expected a contiguous tensor, got strides [2080, 1]": lambda given: {
        "input": given["input"].repeat(1, 2)[:, :1040]
    },
    "weight_scales: expected shape [77], got [76]": lambda given: {"weight_scales": given["weight_scales"][:76]},
    "weight_scales: expected dtype float32, got float64": lambda given: {
        "weight_scales": given["weight_scales"].double()
    },
    "bias: expected dtype bfloat16 (that of input), got float32": lambda given: {"bias": given["bias"].float()},
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_arguments_of_weight_only(ltx, device, text):
    """The op and its fake say the same."""
    given = weight_only_inputs(ltx, device, torch.bfloat16, 2)
    for on in (device, "meta"):
        moved = {name: tensor.to(on) for name, tensor in given.items()}
        with pytest.raises(RuntimeError, match=re.escape(text)):
            ltx.quant.weight_only_linear(**{**moved, **WRONG[text](moved)})
