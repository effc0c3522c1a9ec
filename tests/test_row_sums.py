"""Sums over the rows of groups, of a gradient and of its products with a norm, against float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import LAYOUTS, Make, assert_same_bits, place
from torch import Tensor

OPS = ["row_sums"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NONE, RMS, LAYER = 0, 1, 2
EPS = 0.3
# Groups, rows and columns: of one row, of several parts, with a part that is not whole, of odd columns, of more columns
# than two threads, a warp, half a block, a block and a tile own.
SHAPES = [(1, 1, 8), (3, 70, 8), (1, 2100, 6), (2, 300, 64), (2, 65, 130), (1, 200, 264), (2, 3, 1000), (1, 130, 2048)]
SHAPES += [(2, 19, 2312), (1, 40, 8192), (1, 18, 8200)]


def truth(grad: Tensor, rows: Tensor, statistic: int) -> tuple[list[Tensor], list[Tensor]]:
    """The sums in float64, and the same sums of the terms' magnitudes."""
    grad, rows = grad.double(), rows.double()
    if statistic == LAYER:
        rows = rows - rows.mean(-1, keepdim=True)
    if statistic != NONE:
        rows = rows / (rows.square().mean(-1, keepdim=True) + EPS).sqrt()
    terms = [grad * rows, grad]
    return [each.sum(1) for each in terms], [each.abs().sum(1) for each in terms]


def check(ltx: Any, grad: Tensor, rows: Tensor, statistic: int) -> tuple[Tensor, Tensor]:
    products, sums = ltx._ops.ops.row_sums.default(grad, rows, EPS, statistic)
    for got, want, size in zip((products, sums), *truth(grad, rows, statistic), strict=True):
        assert got.dtype == torch.float32 and got.shape == want.shape
        # A mean in float32 moves the differences from it.
        allowed = 2.0**-20 * size + 2.0**-21 * grad.double().abs().sum(1)
        assert ((got.double() - want).abs() <= allowed).all()
    return products, sums


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("statistic", [NONE, RMS, LAYER])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_row_sums(ltx: Any, device: str, shape: tuple[int, ...], statistic: int, dtype: torch.dtype) -> None:
    """The same bits from any layout, from single groups, and in every run."""
    make = Make(device, dtype, seed=shape[-1])
    grad, rows = make(*shape), make(*shape)
    found = check(ltx, grad, rows, statistic)
    for layout in LAYOUTS:
        for again in (
            check(ltx, place(grad, layout), rows, statistic),
            check(ltx, grad, place(rows, layout), statistic),
        ):
            for got, want in zip(again, found, strict=True):
                assert_same_bits(got, want, layout)
    for group in range(shape[0]):
        for got, want in zip(check(ltx, grad[group:][:1], rows[group:][:1], statistic), found, strict=True):
            assert_same_bits(got, want[group:][:1], f"group {group}")


@pytest.mark.parametrize("statistic", [NONE, RMS, LAYER])
def test_two_dtypes(ltx: Any, device: str, statistic: int) -> None:
    for first, second in itertools.permutations(DTYPES, 2):
        check(ltx, Make(device, first)(2, 70, 40), Make(device, second, seed=1)(2, 70, 40), statistic)


def test_large_means(ltx: Any, device: str) -> None:
    """A sum of squares less the square of the mean would lose all digits."""
    make = Make(device, torch.float32)
    grad, rows = make(1, 130, 264), make(1, 130, 264) + 1000.0
    products, _ = ltx._ops.ops.row_sums.default(grad, rows, EPS, LAYER)
    (want, _), _ = truth(grad, rows, LAYER)
    assert (products.double() - want).abs().max() <= 1e-3 * want.abs().max()


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (2, 3, 0)], ids=str)
def test_nothing_to_add_up(ltx: Any, device: str, shape: tuple[int, ...]) -> None:
    empty = torch.empty(shape, device=device)
    for found in ltx._ops.ops.row_sums.default(empty, empty, EPS, RMS):
        assert found.shape == (shape[0], shape[2]) and not found.any()


def test_rows_that_are_not_numbers(ltx: Any, device: str) -> None:
    """A gradient that is infinite or NaN makes the sums of its column so, and a gradient scaler sees it."""
    for bad in (float("inf"), float("nan")):
        make = Make(device, torch.float32)
        grad, rows = make(2, 70, 64), make(2, 70, 64)
        grad[1, 69, 5] = bad
        products, sums = ltx._ops.ops.row_sums.default(grad, rows, EPS, RMS)
        assert not products[1, 5].isfinite() and not sums[1, 5].isfinite()
        assert products.isfinite().sum() == sums.isfinite().sum() == 2 * 64 - 1


def test_what_is_asked_for_wrongly(ltx: Any, device: str) -> None:
    op, rows = ltx._ops.ops.row_sums.default, torch.zeros(2, 3, 8, device=device)
    for arguments, expected in [
        ((rows[0], rows[0], EPS, RMS), "grad: expected shape"),
        ((rows, rows[:, :2], EPS, RMS), "input: expected shape"),
        ((rows, rows, -1.0, RMS), "eps: expected a finite number"),
        ((rows, rows, EPS, 3), "statistic: expected"),
        ((rows.double(), rows, EPS, RMS), "grad: expected"),
    ]:
        with pytest.raises(RuntimeError, match=expected):
            op(*arguments)


@pytest.mark.extended
@pytest.mark.parametrize("statistic", [NONE, RMS, LAYER])
def test_opcheck(ltx: Any, device: str, statistic: int) -> None:
    make = Make(device, torch.bfloat16)
    torch.library.opcheck(ltx._ops.ops.row_sums.default, (make(2, 70, 40), make(2, 70, 40), EPS, statistic))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("statistic", [NONE, RMS, LAYER])
def test_plain_torch_of_the_op(ltx: Any, device: str, statistic: int, dtype: torch.dtype) -> None:
    """What runs on the device that the variant has no kernels for."""
    grad, rows = Make(device, dtype)(2, 70, 40), Make(device, dtype, seed=1)(2, 70, 40)
    results = ltx._ops.ops.row_sums.default(grad, rows, EPS, statistic)
    expected = ltx._fakes.in_torch("row_sums")(ltx._fakes.Mode(compute=True), grad, rows, EPS, statistic)
    for got, want in zip(results, expected, strict=True):
        assert got.dtype == want.dtype and got.stride() == want.stride()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("name", "shape"), [("shift", (2, 3, 8)), ("bias", (8,))])
def test_a_gradient_has_memory_of_its_own(ltx: Any, device: str, name: str, shape: tuple[int, ...]) -> None:
    """The gradient of such a shift or bias has the values of the result's gradient. It must be a copy."""
    x, scale, grad = (torch.randn(shape, device=device) for _ in range(3))
    added = [torch.randn(shape, device=device, requires_grad=True) for _ in range(2)]

    def result(one: Tensor) -> Tensor:
        return ltx.adaln_rmsnorm(x, None, scale, one) if name == "shift" else ltx.layernorm(x, None, one)

    for _ in range(2):
        sum(result(one) for one in added).backward(grad)
    assert added[0].grad.data_ptr() not in (added[1].grad.data_ptr(), grad.data_ptr())
    for one in added:
        assert torch.equal(one.grad, 2 * grad)


def test_named_rows_of_one_column(ltx: Any, device: str) -> None:
    x = torch.randn(2, 5, 8, device=device)
    index = torch.tensor([[0, 1, 2, 1, 0], [2, 2, 1, 0, 1]], device=device)
    start = torch.randn(3, 1, device=device)
    grads = []
    for module in (ltx, ltx.reference):
        scale = start.clone().requires_grad_()
        module.adaln_rmsnorm(x, None, scale, index=index).square().sum().backward()
        grads.append(scale.grad)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)
