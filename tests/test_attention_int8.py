"""attention with precision="int8" against fp64, its recipe in plain torch, and itself.

On the CPU plain torch computes the recipe, on a Hopper GPU the kernel; other GPUs have neither.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from helpers import LAYOUTS, Case, Make, assert_same_bits, check_out, check_streams, plain_attention_case
from helpers.attention import has_kernel
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

SIZES = (2, 200, 3, 128)
NORMAL = 0.02  # relative L2 error of random normal inputs: about 1.1e-2
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.fixture
def place(ltx: Any, device: str) -> str:
    """A device that has the recipe."""
    if device != "cpu" and not has_kernel(ltx, device):
        pytest.skip("the kernel is for Hopper alone")
    return device


@pytest.fixture
def kernel(ltx: Any, cuda: str) -> str:
    if not has_kernel(ltx, cuda):
        pytest.skip("the kernel is for Hopper alone")
    return cuda


def int8_case(make: Make, sizes: tuple[int, int, int, int] = SIZES, keys: int = 300, **options: Any) -> Case:
    return plain_attention_case(make, sizes, keys, precision="int8", **options)


def exact(case: Case, *, keys: int | None = None) -> Tensor:
    query, key, value = (case.kwargs[name].double().transpose(1, 2) for name in ("query", "key", "value"))
    scale = case.kwargs.get("scale")
    scores = query @ key[:, :, :keys].transpose(2, 3) * (128**-0.5 if scale is None else scale)
    return (scores.softmax(-1) @ value[:, :, :keys]).transpose(1, 2)


def error(output: Tensor, wanted: Tensor) -> float:
    return float((output.double() - wanted).norm() / wanted.norm())


def check(ltx: Any, case: Case, most: float = NORMAL) -> Tensor:
    (output,) = case.run(ltx)
    assert output.dtype == case.kwargs["query"].dtype and output.is_contiguous()
    assert error(output, exact(case)) <= most
    return output


# ---- Shapes


@pytest.mark.kernels_ci
@every_dtype
@pytest.mark.parametrize("keys", [1, 2, 31, 127, 128, 129, 300, 513, 1000])
def test_keys(ltx, place, dtype, keys):
    check(ltx, int8_case(Make(place, dtype, seed=keys), keys=keys))


@every_dtype
@pytest.mark.parametrize("queries", [1, 15, 63, 64, 65, 127, 128, 129, 300])
def test_queries(ltx, place, dtype, queries):
    check(ltx, int8_case(Make(place, dtype, seed=queries), (1, queries, 2, 128), 200))


def test_more_tiles_than_multiprocessors(ltx, kernel):
    """Blocks have several tiles, and share the last ones."""
    for batch, heads, tokens in ((1, 133, 100), (3, 40, 700), (1, 24, 1500), (2, 7, 2500)):
        check(ltx, int8_case(Make(kernel, torch.bfloat16, seed=heads), (batch, tokens, heads, 128), tokens))


@every_dtype
def test_no_keys_or_no_elements(ltx, place, dtype):
    (output,) = int8_case(Make(place, dtype), keys=0).run(ltx)
    assert output.shape == SIZES and not output.any()
    for sizes in ((0, 5, 3, 128), (2, 0, 3, 128), (2, 5, 0, 128)):
        assert int8_case(Make(place, dtype), sizes, 7).run(ltx)[0].shape == sizes


@pytest.mark.parametrize("scale", [1.0, 0.1, -0.1, 0.0, 1e-9])
def test_scale(ltx, place, scale):
    check(ltx, int8_case(Make(place, torch.bfloat16), scale=scale), 0.08 if scale == 1.0 else NORMAL)


# ---- The recipe


@pytest.mark.parametrize("keys", [100, 1500])
def test_the_kernel_computes_the_recipe(ltx, kernel, keys):
    """Apart from what rounds to the other side."""
    case = int8_case(Make(kernel, torch.bfloat16, seed=keys), keys=keys)
    assert error(case.run(ltx)[0], case.run(ltx.reference)[0].double()) <= 4e-3


def test_each_key_has_its_value(ltx, place):
    """Query i sees one key alone, in an order of its own: a value in another key's place would show."""
    make = Make(place, torch.bfloat16)
    case = int8_case(make, (1, 384, 1, 128), 384)
    order = torch.randperm(384, generator=torch.Generator().manual_seed(0)).to(place)
    key = torch.nn.functional.normalize(case.kwargs["key"].float(), dim=-1)
    case = case.replace(key=(20 * key).bfloat16(), query=(20 * key[:, order]).bfloat16())
    value = case.kwargs["value"][:, order].float()
    assert float((check(ltx, case).float() - value).abs().max()) <= 0.15


def test_the_mean_of_the_keys_costs_nothing(ltx, place):
    """It changes all scores of a query alike; left in, it would take the bits from what differs between keys."""
    make = Make(place, torch.bfloat16)
    case = int8_case(make, keys=1000)
    check(ltx, case.replace(key=(case.kwargs["key"] + 30 * make(2, 1, 3, 128)).bfloat16()), 2 * NORMAL)


def test_outlier_columns(ltx, place):
    """The rotation spreads them over all columns. Without it they would take the digits from the others."""
    case = int8_case(Make(place, torch.bfloat16), keys=1000)
    for name in ("query", "key"):
        case.kwargs[name][..., ::16] *= 8
    check(ltx, case.replace(scale=0.02), 2 * NORMAL)


@pytest.mark.parametrize("at", [0, 5, 400, 999])
def test_a_key_far_above_the_others(ltx, place, at):
    """The weights of the other tiles keep their digits, and the sums fit, wherever it is."""
    case = int8_case(Make(place, torch.bfloat16), keys=1000)
    key = case.kwargs["key"].clone()
    key[:, at] = 3 * case.kwargs["query"][:, 0]
    for factor in (1.0, 10.0):
        check(ltx, case.replace(key=(key * factor).bfloat16()), 3 * NORMAL if factor == 1.0 else 0.3)


def test_rows_and_columns_of_zeros(ltx, place):
    for name in ("query", "key", "value"):
        case = int8_case(Make(place, torch.bfloat16))
        case.kwargs[name][:, 1:4] = 0
        case.kwargs[name][..., 7] = 0
        output = check(ltx, case)
        assert name != "value" or not output[..., 7].any()
        case.kwargs[name].zero_()
        assert bool(case.run(ltx)[0].isfinite().all())


@pytest.mark.parametrize("power", [-60, -12, 12, 60])
def test_large_and_small_numbers(ltx, place, power):
    case = int8_case(Make(place, torch.bfloat16))
    case = case.replace(query=case.kwargs["query"] * 2.0**-power, key=case.kwargs["key"] * 2.0**power)
    check(ltx, case.replace(value=case.kwargs["value"] * 2.0**power))


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite(ltx, place, special):
    """Rows that meet it have the bits of the native precision; the others keep theirs."""
    case = int8_case(Make(place, torch.bfloat16))
    (expected,) = case.run(ltx)
    for name in ("query", "key", "value"):
        touched = case.replace(**{name: case.kwargs[name].clone()})
        touched.kwargs[name][1, 17, 1, 3] = special
        (output,) = touched.run(ltx)
        (native,) = touched.replace(precision="native").run(ltx.reference)
        assert torch.equal(output.isfinite(), native.isfinite()), name
        where = (1, 17, 1) if name == "query" else (1, slice(None), 1)
        torch.testing.assert_close(output[where], native[where], atol=0.02, rtol=0.02, equal_nan=True)
        elsewhere = torch.ones(output.shape, dtype=torch.bool, device=place)
        elsewhere[where] = False
        assert_same_bits(output[elsewhere], expected[elsewhere], name)


# ---- Key lengths


@pytest.mark.parametrize("finite", [True, False])
def test_key_lengths(ltx, place, finite):
    """Finite values after them change no bit, and numbers out of range stand for the nearest. A row that meets other
    values there is computed again from the inputs themselves, which is right within the error."""
    case = int8_case(Make(place, torch.bfloat16), (5, 70, 2, 128), 300)
    lengths = torch.tensor([300, 129, 1, -3, 500], dtype=torch.int32, device=place)
    for i, length in enumerate((300, 129, 1, 0, 300)):
        case.kwargs["key"][i, length:] = math.nan
        case.kwargs["value"][i, length:] = 1e4 if finite else math.inf
    (output,) = case.replace(key_lengths=lengths).run(ltx)
    for i, length in enumerate((300, 129, 1, 0, 300)):
        if length == 0:
            assert not output[i].any()
            continue
        one = case.map(lambda tensor, i=i: tensor[i : i + 1])
        assert error(output[i : i + 1], exact(one, keys=length)) <= NORMAL
        if finite:
            alone = one.replace(**{name: one.kwargs[name][:, :length] for name in ("key", "value")})
            assert_same_bits(output[i : i + 1], alone.run(ltx)[0])


# ---- Memory and bits


@pytest.mark.parametrize("memory", LAYOUTS)
def test_layouts(ltx, place, memory):
    case = int8_case(Make(place, torch.bfloat16), (2, 70, 3, 128), 140)
    check_out(ltx, case, memory)
    assert_same_bits(case.in_layout(memory).run(ltx)[0], case.run(ltx)[0])


def test_same_row_same_bits(ltx, kernel):
    """On a CPU the products are torch's, which add up in an order of their own for each size."""
    case = int8_case(Make(kernel, torch.bfloat16), (3, 300, 3, 128), 400)
    (expected,) = case.run(ltx)
    assert_same_bits(case.run(ltx)[0], expected)
    for batch, rows, head in itertools.product((0, 2), (slice(0, 1), slice(63, 200)), (0, 2)):
        one = case.map(lambda tensor, batch=batch, head=head: tensor[batch : batch + 1, :, head : head + 1])
        part = one.replace(query=one.kwargs["query"][:, rows])
        assert_same_bits(part.run(ltx)[0], expected[batch : batch + 1, rows, head : head + 1].contiguous())


def test_on_a_side_stream(ltx, kernel):
    check_streams(ltx, [int8_case(Make(kernel, torch.bfloat16, seed=seed), (2, 500, 8, 128), 700) for seed in range(2)])


# ---- torch


def test_opcheck(ltx, place):
    case = int8_case(Make(place, torch.bfloat16), (2, 70, 3, 128), 40)
    tensors, lengths = tuple(case.tensors.values()), torch.tensor([40, 7], dtype=torch.int32, device=place)
    out = torch.empty_like(case.kwargs["query"])
    for more in ((None, None), (lengths, 0.3)):
        torch.library.opcheck(ltx._ops.ops.attention_int8.default, (*tensors, *more))
        torch.library.opcheck(ltx._ops.ops.attention_int8_out.default, (out, *tensors, *more))


def test_compile(ltx, place):
    torch.compiler.reset()
    case = int8_case(Make(place, torch.bfloat16), (2, 70, 3, 128), 130)
    compiled = torch.compile(
        lambda q, k, v: ltx.attention(q, k, v, precision="int8"), backend="aot_eager", fullgraph=True
    )
    assert_same_bits(compiled(*case.tensors.values()), case.run(ltx)[0])


# ---- Errors


Q, K = (2, 6, 3, 128), (2, 4, 3, 128)
ERRORS: list[tuple[str, tuple[Any, ...], torch.dtype, dict[str, Any]]] = [
    ("query: expected 4 dimensions, got shape [2, 6, 128]", ((2, 6, 128), K, K), torch.bfloat16, {}),
    ("query: expected dtype float16 or bfloat16, got float32", (Q, K, K), torch.float32, {}),
    ("query: expected a last dimension of 128, got shape [2, 6, 3, 64]", ((2, 6, 3, 64), K, K), torch.bfloat16, {}),
    ("scale: expected a finite number, got inf", (Q, K, K), torch.bfloat16, {"scale": math.inf}),
    ("value: expected shape [2, 4, 3, 128], got [2, 5, 3, 128]", (Q, K, (2, 5, 3, 128)), torch.bfloat16, {}),
    ("key_lengths: expected shape [2], got [1]", (Q, K, K), torch.bfloat16, {"key_lengths": 1}),
    (
        'mask: expected None with precision "int8"; key_lengths leaves out keys, got a tensor',
        (Q, K, K),
        torch.bfloat16,
        {"mask": True},
    ),
    (
        "key: expected the batch size, heads and last dimension of query [2, 6, 3, 128], got shape [2, 4, 1, 128]",
        (Q, (2, 4, 1, 128), (2, 4, 1, 128)),
        torch.bfloat16,
        {},
    ),
    ('is_causal: expected False with precision "int8", got True', (Q, K, K), torch.bfloat16, {"is_causal": True}),
    ('return_lse: expected False with precision "int8", got True', (Q, K, K), torch.bfloat16, {"return_lse": True}),
]


@pytest.mark.host
@pytest.mark.parametrize(("text", "shapes", "dtype", "options"), ERRORS, ids=[error[0][:60] for error in ERRORS])
def test_errors(ltx, place, text, shapes, dtype, options):
    def call(f: Any, device: str) -> None:
        keywords = dict(options)
        if "mask" in keywords:
            keywords["mask"] = torch.ones(2, 4, dtype=torch.bool, device=device)
        if "key_lengths" in keywords:
            keywords["key_lengths"] = torch.ones(keywords["key_lengths"], dtype=torch.int32, device=device)
        tensors = (torch.ones(shape, dtype=dtype, device=device) for shape in shapes)
        f.attention(*tensors, precision="int8", **keywords)

    for f, device in ((ltx, place), (ltx.reference, place), (ltx, "meta")):
        with pytest.raises(RuntimeError) as raised:
            call(f, device)
        assert str(raised.value) == text
    with FakeTensorMode(), pytest.raises(RuntimeError) as raised:
        call(ltx, place)
    assert str(raised.value) == text


@pytest.mark.host
def test_gradients_and_unknown_precisions(ltx, place):
    case = int8_case(Make(place, torch.bfloat16), (1, 6, 1, 128), 4)
    with pytest.raises(ValueError, match='precision: expected "native" or "int8", got \'fp8\''):
        case.replace(precision="fp8").run(ltx)
    case.kwargs["value"].requires_grad_()
    for f in (ltx, ltx.reference):
        with pytest.raises(RuntimeError, match="expected no gradient to be needed"):
            case.run(f)
        with torch.no_grad():
            case.run(f)


def test_native_is_the_default(ltx, device):
    case = plain_attention_case(Make(device, torch.bfloat16), SIZES, 140)
    assert_same_bits(case.replace(precision="native").run(ltx)[0], case.run(ltx)[0])
