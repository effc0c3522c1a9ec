"""qk_norm_cross_attention against fp64, torch's attention, and itself."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    DTYPES,
    LAYOUTS,
    MASKS,
    Case,
    Make,
    assert_close_to_fp64,
    assert_same_bits,
    attention_case,
    check,
    check_out,
    check_streams,
    place,
    torch_threads,
)

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_memory_layout = pytest.mark.parametrize("memory", LAYOUTS)
SIZES = (2, 5, 3, 64)
KEYS = [1, 7, 31, 64, 77, 127, 128, 129, 256, 300, 512, 600]


# ---- Shapes


@pytest.mark.kernels_ci
@every_dtype
@pytest.mark.parametrize("width", [24, 64, 128])
@pytest.mark.parametrize("mask", MASKS)
def test_basic(ltx, device, dtype, width, mask):
    check(ltx, attention_case(Make(device, dtype, seed=width), (2, 19, 3, width), 140, mask=mask))


@every_dtype
@pytest.mark.parametrize("keys", KEYS)
def test_keys(ltx, device, dtype, keys):
    for width in (64, 128, 40):
        check(ltx, attention_case(Make(device, dtype, seed=keys), (2, 19, 3, width), keys, mask="addends"))


@every_dtype
@pytest.mark.parametrize("width", [1, 2, 3, 8, 16, 31, 32, 33, 63, 64, 65, 72, 96, 100, 127, 128, 129, 160, 255, 256])
def test_head_widths(ltx, device, dtype, width):
    for keys in (7, 77, 140):
        check(ltx, attention_case(Make(device, dtype, seed=width), (2, 9, 3, width), keys))


@every_dtype
@pytest.mark.parametrize("queries", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000])
def test_queries(ltx, device, dtype, queries):
    for width in (64, 128, 24):
        check(ltx, attention_case(Make(device, dtype, seed=queries), (2, queries, 2, width), 77, mask="left out"))


@every_dtype
@pytest.mark.parametrize("heads", [1, 2, 5, 16, 24, 32])
def test_heads(ltx, device, dtype, heads):
    for width in (64, 128, 8):
        check(ltx, attention_case(Make(device, dtype, seed=heads), (3, 7, heads, width), 33))


@every_dtype
def test_as_ltx_video_calls_it(ltx, device, dtype):
    """32 heads of 64, a padded text, more queries than a block; and the 4096 channels of the large model."""
    for heads, width in ((32, 64), (32, 128)):
        case = attention_case(Make(device, dtype), (1, 400, heads, width), 256, mask="text", mask_dtype=dtype)
        check(ltx, case)


@every_dtype
def test_many_queries_and_many_keys(ltx, device, dtype):
    check(ltx, attention_case(Make(device, dtype), (1, 5000, 2, 64), 130))
    check(ltx, attention_case(Make(device, dtype), (1, 70, 1, 64), 5000))


@every_dtype
def test_without_elements(ltx, device, dtype):
    make = Make(device, dtype)
    for sizes in ((0, 5, 3, 64), (2, 0, 3, 64), (2, 5, 0, 64), (2, 5, 3, 0)):
        (output,) = attention_case(make, sizes, 7, mask="addends").run(ltx)
        assert output.shape == sizes and output.dtype == dtype


@every_dtype
def test_no_keys(ltx, device, dtype):
    """Zeros, as scaled_dot_product_attention gives."""
    for mask in ("none", "addends"):
        case = attention_case(Make(device, dtype), SIZES, 0, mask=mask)
        (output,) = check(ltx, case)
        assert not output.any()
        q, k, v = (case.kwargs[name].transpose(1, 2) for name in ("query", "key", "value"))
        assert not F.scaled_dot_product_attention(q, k, v).any()
        for memory in LAYOUTS:
            check_out(ltx, case, memory)
        query = case.kwargs["query"]
        assert case.run(ltx, out=query)[0] is query
        assert not query.any()


# ---- Memory


@every_dtype
@every_memory_layout
def test_layouts(ltx, device, dtype, memory):
    for sizes, keys in ((SIZES, 9), ((2, 3, 2, 10), 4), ((1, 4, 3, 128), 130)):
        case = attention_case(Make(device, dtype), sizes, keys, mask="addends", mask_dtype=torch.float32)
        expected = check(ltx, case)
        for output, want in zip(check(ltx, case.in_layout(memory)), expected, strict=True):
            assert_same_bits(output, want)
        for name, tensor in case.tensors.items():  # one of them alone
            for output, want in zip(case.replace(**{name: place(tensor, memory)}).run(ltx), expected, strict=True):
                assert_same_bits(output, want, name)


@every_dtype
@every_memory_layout
def test_out(ltx, device, dtype, memory):
    for sizes in (SIZES, (2, 3, 2, 10), (1, 70, 2, 128)):
        check_out(ltx, attention_case(Make(device, dtype), sizes, 9), memory)


@every_dtype
@pytest.mark.parametrize("memory", ["contiguous", "permuted", "rows misaligned", "columns strided"])
def test_in_place_of_the_query(ltx, device, dtype, memory):
    for sizes in (SIZES, (2, 3, 2, 10), (1, 300, 4, 64), (1, 70, 2, 128)):
        case = attention_case(Make(device, dtype), sizes, 140, mask="left out")
        expected = case.run(ltx)[0]
        again = case.in_layout(memory)
        query = again.kwargs["query"]
        assert again.run(ltx, out=query)[0] is query
        assert_same_bits(query, expected)


@every_dtype
@pytest.mark.parametrize("width", [64, 128, 24])
def test_views_of_packed_projections(ltx, device, dtype, width):
    """key and value as halves of one tensor; the query and its output as slices of a wider one."""
    make = Make(device, dtype)
    packed = attention_case(make, (2, 20, 3, width), 77, packed=True)
    assert packed.kwargs["key"].stride(1) == 2 * 3 * width
    expected = check(ltx, packed)[0]
    apart = packed.map(lambda tensor: tensor.clone())
    assert_same_bits(apart.run(ltx)[0], expected)
    both = make(2, 20, 2 * 3 * width)
    query, target = (part.unflatten(-1, (3, width)) for part in both.chunk(2, -1))
    query.copy_(packed.kwargs["query"])
    packed.replace(query=query).run(ltx, out=target)
    assert_same_bits(target.contiguous(), expected)
    assert_same_bits(query.contiguous(), packed.kwargs["query"])


@every_dtype
def test_expanded(ltx, device, dtype):
    """One text for all batches, one query for all tokens, one head, one addend: strides of zero."""
    make = Make(device, dtype)
    for name, dims in {"query": (0, 1, 2), "key": (0, 1, 2), "value": (0, 1, 2), "mask": (0, 1)}.items():
        for dim in dims:
            case = attention_case(make, SIZES, 9, mask="addends")
            tensor = case.kwargs[name]
            check(ltx, case.replace(**{name: tensor.narrow(dim, 0, 1).expand(tensor.shape)}))
    weight = make(1, mean=1.0).expand(3 * 64)
    check(ltx, attention_case(make, SIZES, 9).replace(query_weight=weight, key_weight=weight))


# ---- Mask, scale, weights, eps


@every_dtype
@pytest.mark.parametrize("mask_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(ltx, device, dtype, mask_dtype, mask):
    for width, keys in ((64, 20), (128, 300), (24, 130)):
        for batch in (1, 3):
            make = Make(device, dtype, seed=width)
            case = attention_case(make, (batch, 18, 2, width), keys, mask=mask, mask_dtype=mask_dtype)
            (output,) = check(ltx, case)
            if mask == "nothing left":
                assert not output[-1].any()


@every_dtype
@pytest.mark.parametrize("width", [64, 128, 24])
def test_a_key_that_is_left_out_counts_nothing(ltx, device, dtype, width):
    """The same bits, whatever it holds, for addends of -inf and for such as are far below the others."""
    for keys, kept in ((20, 11), (300, 140), (256, 128)):
        case = attention_case(Make(device, dtype, seed=keys), (2, 18, 2, width), keys)
        for low in (-math.inf, -10000.0, torch.finfo(torch.float32).min):
            mask = torch.zeros(1, keys, device=device)
            mask[:, kept:] = low
            expected = case.replace(mask=mask).run(ltx)[0]
            other = case.on(device)
            for name in ("key", "value"):
                other.kwargs[name][:, kept:] = 3
            assert_same_bits(other.replace(mask=mask).run(ltx)[0], expected)


@every_dtype
def test_addends_that_are_alike_change_nothing(ltx, device, dtype):
    case = attention_case(Make(device, dtype), (2, 18, 2, 64), 130, weights=False, scale=0.0)
    mean = case.kwargs["value"].double().mean(1, keepdim=True).expand(-1, 18, -1, -1)
    for addend in (0.0, -10000.0, torch.finfo(torch.float32).min, torch.finfo(torch.float32).max):
        mask = torch.full((2, 130), addend, device=device)
        (output,) = case.replace(mask=mask).run(ltx)
        terms = case.kwargs["value"].double().abs().mean(1, keepdim=True).expand(mean.shape)
        assert_close_to_fp64(output, mean, terms)


@every_dtype
@pytest.mark.parametrize("width", [64, 24])
@pytest.mark.parametrize("addend", [math.inf, math.nan])
def test_addends_that_are_no_numbers(ltx, device, dtype, width, addend):
    """NaN, as softmax gives, in that batch alone."""
    case = attention_case(Make(device, dtype), (2, 18, 2, width), 130, mask="addends", mask_dtype=torch.float32)
    (expected,) = case.run(ltx)
    case.kwargs["mask"][1, 3] = addend
    (output,) = case.run(ltx)
    assert_same_bits(output[0], expected[0])
    assert bool(output[1].isnan().all()) and bool(case.truth(ltx)[0][1].isnan().all())


@every_dtype
@pytest.mark.parametrize("scale", [1.0, 0.3, 0.0, -0.2, 1e-9])
def test_scale(ltx, device, dtype, scale):
    for width in (64, 128, 24):
        check(ltx, attention_case(Make(device, dtype), (2, 18, 2, width), 40, mask="addends", scale=scale))


@every_dtype
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_weights(ltx, device, dtype, weight_dtype):
    for width in (64, 128, 24):
        case = attention_case(Make(device, dtype), (2, 18, 2, width), 40, weight_dtype=weight_dtype)
        check(ltx, case)
        for without in ("query_weight", "key_weight"):
            check(ltx, case.replace(**{without: None}))
        check(ltx, case.replace(query_weight=case.kwargs["query_weight"].float()))
        check(ltx, case.replace(key_weight=case.kwargs["key_weight"].half()))


@every_dtype
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3, 10.0, None])
def test_eps(ltx, device, dtype, eps):
    for width in (64, 24):
        case = attention_case(Make(device, dtype), (2, 9, 3, width), 20, eps=eps)
        for name in ("query", "key"):
            case.kwargs[name] *= 0.02
        check(ltx, case)


# ---- Against torch's own


@every_dtype
def test_closer_to_the_truth_than_plain_torch(ltx, device, dtype):
    """Root of the mean square of the error; in float32 both are as close as fp32 sums are."""
    for width in (64, 128):
        case = attention_case(Make(device, dtype), (2, 200, 8, width), 256, mask="text")
        truth = case.truth(ltx)[0]
        own, eager = ((outputs[0].double() - truth).square().mean().sqrt() for outputs in (case.run(ltx), case.eager()))
        assert own <= (eager if dtype != torch.float32 else 2 * eager + 1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reference_is_plain_torch(ltx, dtype):
    """The formula of the docstring."""
    case = attention_case(Make("cpu", dtype), SIZES, 9, mask="addends", weight_dtype=dtype)
    query, key, value, query_weight, key_weight, mask = case.kwargs.values()

    def normalise(x, weight):
        return F.rms_norm(x.flatten(-2), (3 * 64,), weight, 1e-6).view_as(x)

    q, k = normalise(query, query_weight), normalise(key, key_weight)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, value)), mask[:, None, None]
    ).transpose(1, 2)
    near = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(case.run(ltx.reference)[0], expected, rtol=near, atol=near)


# ---- Bits: a row depends on its query, and the keys and values of its batch, alone


def rows_of(case: Case, batches: slice, queries: slice, memory: str = "contiguous") -> Case:
    own = {name: case.kwargs[name][batches] for name in ("query", "key", "value", "mask")}
    own["query"] = own["query"][:, queries]
    return case.replace(**{name: place(tensor, memory) for name, tensor in own.items()})


@every_dtype
@pytest.mark.parametrize("width", [10, 64, 128])
@pytest.mark.parametrize("keys", [9, 300])
def test_same_row_same_bits(ltx, device, dtype, width, keys):
    case = attention_case(Make(device, dtype, seed=width), (3, 140, 2, width), keys, mask="addends")
    (expected,) = case.run(ltx)
    for _ in range(3):
        assert_same_bits(case.run(ltx)[0], expected, "another run")
    for memory in LAYOUTS:
        for batches, queries in (
            (slice(0, 1), slice(0, 140)),
            (slice(2, 3), slice(7, 8)),
            (slice(1, 3), slice(63, 129)),
        ):
            part = rows_of(case, batches, queries, memory).run(ltx)[0]
            assert_same_bits(part, expected[batches, queries].contiguous(), f"{batches}, {queries}, {memory}")
    many = case.map(lambda tensor: tensor if tensor.dim() == 1 else tensor.repeat(9, *[1] * (tensor.dim() - 1)))
    assert_same_bits(many.run(ltx)[0], expected.repeat(9, 1, 1, 1), "in nine times as many batches")
    longer = case.replace(query=case.kwargs["query"].repeat(1, 9, 1, 1))
    assert_same_bits(longer.run(ltx)[0], expected.repeat(1, 9, 1, 1), "in nine times as many rows")


@pytest.mark.parametrize("width", [64, 40])
def test_same_bits_with_any_number_of_threads(ltx, device, width):
    case = attention_case(Make(device, torch.bfloat16), (2, 300, 3, width), 140)
    (expected,) = case.run(ltx)
    for count in (1, 3):
        with torch_threads(count):
            assert_same_bits(case.run(ltx)[0], expected, f"{count} threads")


# ---- Values


@every_dtype
def test_zero_tokens(ltx, device, dtype):
    for name in ("query", "key", "value"):
        case = attention_case(Make(device, dtype), SIZES, 9)
        case.kwargs[name][:, 1:3] = 0
        check(ltx, case)


@every_dtype
@pytest.mark.parametrize("width", [64, 128, 24])
@pytest.mark.parametrize("special", [math.inf, math.nan])
def test_inf_and_nan_stay_where_they_belong(ltx, device, dtype, width, special):
    """Of a query in its row, of a key in its batch, of a value in its column of the batch and head."""
    touched = {"query": (1, 17), "key": (1,), "value": (1, slice(None), 1, 3)}
    for name, where in touched.items():
        case = attention_case(Make(device, dtype), (2, 40, 3, width), 140, mask="addends")
        (expected,) = case.run(ltx)
        case.kwargs[name][1, 17, 1, 3] = special
        (output,) = case.run(ltx)
        assert bool((~output[where].isfinite()).any()), name
        elsewhere = torch.ones(output.shape, dtype=torch.bool, device=device)
        elsewhere[where] = False
        assert_same_bits(output[elsewhere], expected[elsewhere], name)
        if name != "value":  # a weight too small for the dtype makes NaN of an infinite value
            assert bool((output.isnan() == case.truth(ltx)[0].isnan()).all()), name


@every_dtype
def test_large_and_small_numbers(ltx, device, dtype):
    """Norms take away how large query and key are; values keep it."""
    for width in (64, 128, 24):
        for power in (-12, 8):
            case = attention_case(Make(device, dtype), (2, 18, 2, width), 40)
            for name in ("query", "key", "value"):
                case.kwargs[name] *= 2.0**power
            check(ltx, case)


@every_dtype
def test_scores_far_apart(ltx, device, dtype):
    """Weights of 8 make scores of hundreds: one key takes all, the others' exponentials vanish."""
    for width in (64, 128, 24):
        case = attention_case(Make(device, dtype), (2, 40, 2, width), 300)
        check(ltx, case.replace(query_weight=8 * case.kwargs["query_weight"]))
        ascending = torch.arange(300, device=device).float()[None] * 3 - 400
        check(ltx, case.replace(mask=ascending))
        check(ltx, case.replace(mask=ascending.flip(1)))


@every_dtype
@pytest.mark.parametrize("width", [64, 128, 24])
@pytest.mark.parametrize("keys", [70, 300])
def test_a_key_that_its_mask_almost_leaves_out(ltx, device, dtype, width, keys):
    """Its score makes up for an addend of -72, with the largest product that normalised rows can have: no padding."""
    case = attention_case(Make(device, dtype), (1, 20, 1, width), keys, weights=False, scale=68.0 / width)
    values = case.kwargs["value"]
    case.kwargs["query"].zero_()[..., 0] = 1.0  # width ** 0.5 after the norm, as is the key's
    weight = torch.sigmoid(torch.tensor(68.0 - 72.0, dtype=torch.float64, device=device))
    for counts, other in ((3, keys - 4), (keys - 4, 3)):
        key, value = torch.zeros_like(values), torch.zeros_like(values)
        key[:, counts, :, 0] = 1.0
        value[:, counts] = values[:, counts]
        mask = torch.full((1, keys), -300.0, device=device)
        mask[:, counts], mask[:, other] = -72.0, 0.0
        (output,) = check(ltx, case.replace(key=key, value=value, mask=mask))
        expected = weight * value[0, counts, 0].double()
        assert bool(((output[0, :, 0].double() - expected).abs() <= 0.3 * expected.abs()).all())


# ---- Large


def test_strides_above_int32(ltx, device):
    """Batches, tokens, heads and columns more than 2^31 elements apart, in memory that is mostly never touched."""
    heads, width, apart = 2, 64, 2**31 + 8
    try:
        flat = torch.empty(apart + 4096, dtype=torch.bfloat16, device=device)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        pytest.skip(f"not enough memory: {error}")
    case = attention_case(Make(device, torch.bfloat16), (2, 2, heads, width), 2, mask="addends")
    (expected,) = case.run(ltx)
    for strides in (
        (apart, heads * width, width, 1),
        (heads * width, apart, width, 1),
        (2 * width, width, apart, 1),
        (4, 2, 1, apart // width),
    ):
        far = flat.as_strided((2, 2, heads, width), strides)
        for name in ("query", "key", "value"):
            far.copy_(case.kwargs[name])
            assert_same_bits(case.replace(**{name: far}).run(ltx)[0], expected, name)
        case.run(ltx, out=far)
        assert_same_bits(far.contiguous(), expected, "out")


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 40])
def test_more_than_2_31_elements(ltx, cuda, width):
    heads = 32
    sequence = 2**31 // (heads * width) + 3
    try:
        query = torch.empty(1, sequence, heads, width, dtype=torch.bfloat16, device=cuda)
    except torch.OutOfMemoryError as error:
        pytest.skip(f"not enough memory: {error}")
    query.normal_(generator=torch.Generator(cuda).manual_seed(1))
    case = attention_case(Make(cuda, torch.bfloat16), (1, 1, heads, width), 7)
    (output,) = case.replace(query=query).run(ltx)
    for first in (0, sequence // 2, 2**31 // (heads * width) - 2, sequence - 5):
        rows = slice(first, first + 5)
        assert_same_bits(output[:, rows], case.replace(query=query[:, rows]).run(ltx)[0])


# ---- Streams


def test_on_a_side_stream(ltx, cuda):
    """Its memory for the statistics is that stream's, too: calls of two streams do not share it."""
    cases = [attention_case(Make(cuda, torch.bfloat16, seed=seed), (2, 2000, 8, 64), 256) for seed in range(2)]
    check_streams(ltx, cases)
