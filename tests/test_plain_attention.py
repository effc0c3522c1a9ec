"""attention against fp64, torch's attention, and itself.

On a Hopper GPU 16-bit heads of 64 and 128 columns take this package's kernel; all else is torch's, which these tests
hold to no bits. The kernel computes a row once more where its sum or its output is not finite: the tests under Values
make it do so.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    DTYPES,
    LAYOUTS,
    Case,
    Make,
    assert_same_bits,
    check,
    check_out,
    check_streams,
    kernels_of,
    place,
    plain_attention_case,
)
from helpers.attention import Truth, has_kernel, score_addends
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Of those that the kernel takes.
bf16 = pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
every_kernel = pytest.mark.parametrize(
    ("dtype", "width"), list(itertools.product((torch.bfloat16, torch.float16), (64, 128))), ids=str
)
SIZES = (2, 200, 3, 64)
KEYS = [1, 2, 8, 63, 127, 128, 129, 193, 256, 300, 513]


@pytest.fixture
def kernel(ltx: Any, cuda: str) -> str:
    """The device, if it is one that the kernel runs on."""
    if not has_kernel(ltx, cuda):
        pytest.skip("the kernel is for Hopper alone")
    return cuda


def in_torch(case: Case, dtype: torch.dtype) -> Tensor:
    q, k, v = (case.kwargs[name].to(dtype).transpose(1, 2) for name in ("query", "key", "value"))
    addends, scale = score_addends(case.kwargs, dtype), case.kwargs.get("scale")
    return F.scaled_dot_product_attention(q, k, v, addends, scale=scale, enable_gqa=True).transpose(1, 2)


def by_the_formula(case: Case) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return in_torch(case, torch.float32)


# ---- Shapes


@pytest.mark.kernels_ci
@every_dtype
@pytest.mark.parametrize("width", [64, 40])
def test_basic(ltx, device, dtype, width):
    check(ltx, plain_attention_case(Make(device, dtype, seed=width), (2, 70, 3, width), 140))


@bf16
@pytest.mark.parametrize("keys", KEYS)
def test_keys(ltx, device, dtype, keys):
    check(ltx, plain_attention_case(Make(device, dtype, seed=keys), SIZES, keys))


@bf16
@pytest.mark.parametrize("queries", [1, 2, 15, 63, 64, 65, 127, 128, 129, 191, 192, 193, 400])
def test_queries(ltx, device, dtype, queries):
    for keys in (1, 130, queries):
        check(ltx, plain_attention_case(Make(device, dtype, seed=queries), (2, queries, 2, 64), keys))


@bf16
@pytest.mark.parametrize("heads", [1, 2, 5, 16, 32])
def test_heads_and_batches(ltx, device, dtype, heads):
    """More of them than a GPU has multiprocessors, too: a block then has several tiles."""
    for batch in (1, 3, 9):
        check(ltx, plain_attention_case(Make(device, dtype, seed=heads), (batch, 70, heads, 64), 150))


@bf16
def test_as_ltx_video_calls_it(ltx, device, dtype):
    """32 heads in one projection of query, key and value."""
    check(ltx, of_packed_projection(Make(device, dtype), 2, 400, 32))


def of_packed_projection(make: Make, batch: int, tokens: int, heads: int) -> Case:
    packed = make(batch, tokens, 3 * heads * 64).unflatten(-1, (3, heads, 64))
    return Case("attention", dict(zip(("query", "key", "value"), packed.unbind(2), strict=True)))


@every_dtype
def test_without_elements(ltx, device, dtype):
    for sizes in ((0, 5, 3, 64), (2, 0, 3, 64), (2, 5, 0, 64), (2, 5, 3, 0)):
        (output,) = plain_attention_case(Make(device, dtype), sizes, 7).run(ltx)
        assert output.shape == sizes and output.dtype == dtype


@every_dtype
def test_no_keys(ltx, device, dtype):
    """Zeros, as scaled_dot_product_attention gives."""
    case = plain_attention_case(Make(device, dtype), SIZES, 0)
    assert not check(ltx, case)[0].any() and not in_torch(case, dtype).any()


@every_dtype
@pytest.mark.parametrize("scale", [1.0, 0.3, 0.0, -0.0, -0.2, 1e-9])
def test_scale(ltx, device, dtype, scale):
    """Any: torch's own attention may give NaN on a GPU where it is not positive."""
    for keys, head_dim in itertools.product((40, 300), (64, 40)):
        case = plain_attention_case(Make(device, dtype), (*SIZES[:3], head_dim), keys, scale=scale)
        (output,) = check(ltx, case)
        assert output.isfinite().all() and check(ltx, case.replace(is_causal=True))[0].isfinite().all()
        if head_dim == 64 and dtype == torch.bfloat16 and has_kernel(ltx, device):  # by itself it takes any, too
            heads = (case.kwargs[name] for name in ("query", "key", "value"))
            torch.testing.assert_close(
                ltx._ops.ops.attention.default(*heads, None, None, scale, False), output, rtol=0.02, atol=0.01
            )


@every_dtype
def test_a_scale_of_zero_hides_nothing(ltx, device, dtype):
    """A query that is not finite has no weights, as in plain arithmetic; an infinite key leaves none to any query."""
    case = plain_attention_case(Make(device, dtype), SIZES, 40, scale=0.0)
    query, key = case.kwargs["query"].clone(), case.kwargs["key"].clone()
    query[0, 3, 0, 5], query[0, 4, 1, 0] = math.inf, math.nan
    key[1, 7, 1, 2] = -math.inf
    output = ltx.attention(query, key, case.kwargs["value"], scale=0.0)
    lost = torch.zeros(output.shape[:3], dtype=torch.bool, device=device)
    lost[0, 3, 0] = lost[0, 4, 1] = True
    lost[1, :, 1] = True
    assert torch.equal(output.isnan().any(-1), lost)


@every_kernel
@pytest.mark.parametrize("keys", KEYS)
def test_keys_of_every_kernel(ltx, kernel, dtype, width, keys):
    for queries in (1, 63, 64, 65, 191, 193):
        check(ltx, plain_attention_case(Make(kernel, dtype, seed=keys), (2, queries, 3, width), keys))


@every_kernel
def test_more_tiles_than_multiprocessors(ltx, kernel, dtype, width):
    """The last ones are cut between two blocks: the bits of each head are those of the head alone, which is not cut."""
    for heads in (45, 67, 133):
        case = plain_attention_case(Make(kernel, dtype, seed=heads), (1, 600, heads, width), 500)
        output = check(ltx, case)[0]
        for head in range(0, heads, 7):
            alone = case.map(lambda tensor, head=head: tensor[:, :, head : head + 1])
            assert_same_bits(alone.run(ltx)[0], output[:, :, head : head + 1].contiguous(), f"head {head}")


# ---- Few queries of many keys, whose keys are split into pieces


FEW = [1, 17, 64, 65, 128, 192]


@every_kernel
@pytest.mark.parametrize("keys", [959, 961, 1024, 1025, 2000, 5000])
def test_few_queries(ltx, kernel, dtype, width, keys):
    for queries in FEW:
        check(ltx, plain_attention_case(Make(kernel, dtype, seed=keys), (2, queries, 3, width), keys))


@every_kernel
def test_few_queries_have_the_same_bits_in_every_call(ltx, kernel, dtype, width):
    """Whatever the other samples, heads and queries are, as long as the queries are few."""
    case = plain_attention_case(Make(kernel, dtype), (3, 190, 5, width), 3000)
    (expected,) = case.run(ltx)
    for _ in range(5):
        assert_same_bits(case.run(ltx)[0], expected, "another run")
    for batches, queries, heads in (
        (slice(0, 1), slice(0, 190), slice(0, 5)),
        (slice(2, 3), slice(63, 64), slice(4, 5)),
        (slice(1, 3), slice(60, 150), slice(1, 3)),
    ):
        part = case.map(lambda tensor, batches=batches, heads=heads: tensor[batches, :, heads])
        part = part.replace(query=part.kwargs["query"][:, queries])
        wanted = expected[batches, queries, heads].contiguous()
        assert_same_bits(part.run(ltx)[0], wanted, f"{batches}, {queries}, {heads}")
    many = case.map(lambda tensor: tensor.repeat(17, 1, 1, 1))
    assert_same_bits(many.run(ltx)[0], expected.repeat(17, 1, 1, 1), "in seventeen times as many samples")


@every_kernel
def test_few_queries_with_keys_that_do_not_count(ltx, kernel, dtype, width):
    """Lengths give the bits of the keys alone, with and without a whole piece; masks; sums of exponentials."""
    keys = 3000
    case = plain_attention_case(Make(kernel, dtype), (3, 100, 2, width), keys)
    for mask in key_masks(kernel, keys).values():
        check(ltx, case.replace(mask=mask))
        check(ltx, case.replace(mask=mask, key_lengths=lengths_of(kernel, keys, 3 * keys // 4, 1)))
    for lengths in ((keys, 500, 1), (1024, 0, 960), (2049, 1921, 1030)):
        other = case.replace(key_lengths=lengths_of(kernel, *lengths))
        output, lse = other.run(ltx, return_lse=True)
        check(ltx, other)
        torch.testing.assert_close(lse.double(), Truth(other.kwargs).lse, rtol=1e-5, atol=2e-5)
        for sample, length in enumerate(lengths):
            alone = case.map(lambda tensor, sample=sample: tensor[sample : sample + 1])
            alone = alone.replace(**{name: alone.kwargs[name][:, :length] for name in ("key", "value")})
            for got, wanted in zip((output, lse), alone.run(ltx, return_lse=True)):
                assert_same_bits(got[sample : sample + 1].contiguous(), wanted, f"{length} keys")


@every_kernel
def test_few_queries_with_scores_far_apart(ltx, kernel, dtype, width):
    """One piece takes all, or a key leaves the range of fp32; sums of exponentials of any size."""
    keys = 2500
    case = plain_attention_case(Make(kernel, dtype), (1, 70, 2, width), keys, scale=1.0)
    query, key = 0.1 * case.kwargs["query"], case.kwargs["key"].clone()
    query[..., 0] = 0.0
    query[:, 3::7, :, 0] = 1.0
    for at, logit in itertools.product((5, 1300, 2499), (-1e4, 50.0, 130.0, 1e4)):
        key[..., 0] = 0.0
        key[:, at, :, 0] = logit
        other = case.replace(query=query, key=key)
        check(ltx, other)
        torch.testing.assert_close(
            other.run(ltx, return_lse=True)[1].double(), Truth(other.kwargs).lse, rtol=1e-5, atol=2e-5
        )
    key[..., 0] = torch.linspace(-300, 300, keys, device=kernel).to(dtype)[None, :, None]
    check(ltx, case.replace(query=query, key=key))


@every_kernel
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_few_queries_with_inf_and_nan(ltx, kernel, dtype, width, name, special):
    """In the last piece of the keys, as in torch."""
    case = plain_attention_case(Make(kernel, dtype), (2, 70, 3, width), 2100)
    plain = case.run(ltx)[0]
    case.kwargs[name][1, 17 if name == "query" else 2099, 1, 3] = special
    (output,) = case.run(ltx)
    torch.testing.assert_close(output.float(), by_the_formula(case), rtol=0.02, atol=0.02, equal_nan=True)
    assert_same_bits(output[:, :, ::2].contiguous(), plain[:, :, ::2].contiguous(), "other heads")


@every_kernel
def test_few_queries_into_given_outputs_and_graphs(ltx, kernel, dtype, width):
    """Into the columns of a wider row, without a copy; a graph computes again what its inputs are then."""
    case = plain_attention_case(Make(kernel, dtype), (2, 70, 3, width), 2100)
    (expected,) = case.run(ltx)
    row = torch.full((2, 70, 3 * width + 64), math.nan, dtype=dtype, device=kernel)
    out = row[..., : 3 * width].unflatten(-1, (3, width))
    names = kernels_of(lambda: case.run(ltx, out=out))
    assert sum("combine_pieces" in name for name in names) == 1, names
    assert not [name for name in names if not any(x in name for x in ("hopper_attention", "combine_pieces", "Memset"))]
    assert_same_bits(out.contiguous(), expected)
    assert row[..., 3 * width :].isnan().all()
    query = case.kwargs["query"]
    first = query.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (output,) = case.run(ltx)
    for given in (first.flip(1), first):
        query.copy_(given)
        graph.replay()
        assert_same_bits(output, case.run(ltx)[0])
    assert_same_bits(output, expected)


# ---- Which keys count


def lengths_of(device: str, *lengths: int) -> Tensor:
    return torch.tensor(lengths, dtype=torch.int32, device=device)


# ---- Causal attention, and fewer heads of keys


@every_dtype
@pytest.mark.parametrize("width", [64, 40])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("key_heads", [1, 3, 6])
def test_causal_and_fewer_key_heads(ltx, device, dtype, width, is_causal, key_heads):
    """With as many keys as queries, more and fewer, with lengths, given outputs, and sums of exponentials."""
    make = Make(device, dtype, seed=width)
    for queries, keys in ((70, 70), (70, 150), (70, 33), (1, 5), (5, 1)):
        case = plain_attention_case(make, (2, queries, 6, width), keys, key_heads=key_heads, is_causal=is_causal)
        for lengths in (None, lengths_of(device, keys // 2, 0), lengths_of(device, keys + 3, 1)):
            other = case.replace(key_lengths=lengths)
            (expected,) = check(ltx, other)
            given = torch.empty_like(expected).transpose(1, 2).contiguous().transpose(1, 2)
            output, lse = other.run(ltx, return_lse=True, out=given)
            assert output is given
            torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)
            torch.testing.assert_close(lse.double(), Truth(other.kwargs).lse, rtol=1e-5, atol=2e-5)
            if lengths is not None and dtype == torch.float32:
                wanted, sums = other.run(ltx.reference, return_lse=True)
                torch.testing.assert_close(output, wanted)
                torch.testing.assert_close(lse, sums)


def test_causal_sees_what_torch_sees(ltx, device):
    """Equivalent to torch's is_causal and enable_gqa, in float64 too."""
    for dtype, function in ((torch.float32, ltx.attention), (torch.float64, ltx.reference.attention)):
        make = Make(device, dtype)
        for queries, keys in ((9, 9), (9, 20), (20, 9)):
            heads = make(2, queries, 4, 16), make(2, keys, 2, 16), make(2, keys, 2, 16)
            q, k, v = (x.transpose(1, 2) for x in heads)
            wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
            torch.testing.assert_close(function(*heads, is_causal=True, scale=0.3), wanted.transpose(1, 2))


def test_gradients_of_causal_attention(ltx, device):
    case = plain_attention_case(Make(device, torch.float32), (2, 20, 6, 64), 20, key_heads=2, is_causal=True)
    case = case.map(lambda tensor: tensor.requires_grad_())
    tensors = tuple(case.tensors.values())
    for options in ({}, {"key_lengths": lengths_of(device, 20, 7)}):
        other = case.replace(**options)
        for output in (other.run(ltx)[0], other.run(ltx, return_lse=True)[0]):
            for got, want in zip(
                torch.autograd.grad(output.square().sum(), tensors),
                torch.autograd.grad(in_torch(other, torch.float32).square().sum(), tensors),
                strict=True,
            ):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@bf16
def test_compiled_causal_attention(ltx, device, dtype):
    """For other lengths without compiling anew."""
    torch.compiler.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ltx.attention(q, k, v, is_causal=True)

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    for tokens in (70, 75, 90):
        case = plain_attention_case(Make(device, dtype), (2, tokens, 6, 64), tokens, key_heads=2)
        with torch.compiler.set_stance("fail_on_recompile" if tokens == 90 else "default"):
            output = compiled(*case.tensors.values())
        torch.testing.assert_close(output, attend(*case.tensors.values()), rtol=0.02, atol=0.02)


def test_compiled_for_any_number_of_heads(ltx, device):
    """With all sizes dynamic, whether the attention is grouped and causal is a question to these sizes."""
    torch.compiler.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ltx.attention(q, k, v, is_causal=q.shape[1] > 1)

    compiled = torch.compile(attend, backend="eager", fullgraph=True, dynamic=True)
    for tokens, key_heads in ((20, 2), (30, 3), (1, 2), (20, 6)):
        case = plain_attention_case(Make(device, torch.float32), (2, tokens, 6, 64), 20, key_heads=key_heads)
        tensors = case.tensors.values()
        torch.testing.assert_close(compiled(*tensors), attend(*tensors), rtol=1e-4, atol=1e-4)


def test_is_causal_may_be_a_number(ltx, device):
    case = plain_attention_case(Make(device, torch.float32), (2, 20, 6, 64), 20, key_heads=2)
    for number in (0, 1):
        for options in ({}, {"return_lse": True}, {"key_lengths": lengths_of(device, 20, 7)}):
            given, wanted = (case.replace(is_causal=flag, **options).run(ltx)[0] for flag in (number, bool(number)))
            assert torch.equal(given, wanted)


def test_fakes_of_causal_attention(ltx, device):
    """The ops on fakes and in plain torch: their shapes, and their errors."""
    case = plain_attention_case(Make(device, torch.bfloat16), (2, 70, 6, 64), 70, key_heads=2, is_causal=True)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in case.tensors.values()]
        output, lse = ltx._ops.ops.attention_lse.default(*fakes, None, None, None, True)
        assert output.shape == (2, 70, 6, 64) and lse.shape == (2, 6, 70)
        with pytest.raises(RuntimeError, match="None with is_causal"):
            ltx._ops.ops.attention.default(*fakes, fakes[0].new_ones(2, 70), None, None, True)


LENGTHS = [1, 2, 63, 64, 65, 79, 80, 81, 191, 192, 193, 500, 1000]


@every_kernel
@pytest.mark.parametrize("tokens", LENGTHS)
def test_causal_kernels(ltx, kernel, dtype, width, tokens):
    for group in (1, 4, 7):
        case = plain_attention_case(
            Make(kernel, dtype, seed=tokens), (2, tokens, 2 * group, width), tokens, key_heads=2, is_causal=True
        )
        check(ltx, case)
        check(ltx, case.replace(key_lengths=lengths_of(kernel, tokens // 2, tokens)))
        for keys in (tokens // 2 + 1, 2 * tokens):
            key, value = (Make(kernel, dtype, seed=seed)(2, keys, 2, width) for seed in (1, 2))
            check(ltx, case.replace(key=key, value=value))


@every_kernel
def test_causal_kernels_with_many_tokens(ltx, kernel, dtype, width):
    """More tiles than multiprocessors, in several rounds."""
    for batch, heads, key_heads in ((1, 8, 1), (3, 16, 2)):
        case = plain_attention_case(
            Make(kernel, dtype), (batch, 4097, heads, width), 4097, key_heads=key_heads, is_causal=True
        )
        (output,) = case.run(ltx)
        for tokens in (slice(0, 700), slice(3900, 4097)):  # whose truth fits memory
            part = case.replace(query=case.kwargs["query"][:, tokens], is_causal=False)
            places = torch.arange(4097, device=kernel)
            q, k, v = (part.kwargs[name].transpose(1, 2).float() for name in ("query", "key", "value"))
            wanted = F.scaled_dot_product_attention(q, k, v, places <= places[tokens, None], enable_gqa=True)
            torch.testing.assert_close(output[:, tokens].float(), wanted.transpose(1, 2), rtol=0.02, atol=0.01)


@every_kernel
def test_fewer_key_heads_have_the_bits_of_repeated_ones(ltx, kernel, dtype, width):
    """In every kernel: whole, in pieces, causal, and with a mask of addends."""
    for queries, keys, group in ((300, 500, 8), (100, 2500, 4), (300, 300, 7)):
        case = plain_attention_case(Make(kernel, dtype), (2, queries, 2 * group, width), keys, key_heads=2)
        addends = Make(kernel, torch.float32)(2, keys)
        for options in ({}, {"is_causal": True}, {"mask": addends}):
            grouped = case.replace(**options)
            repeated = grouped.replace(
                **{name: case.kwargs[name].repeat_interleave(group, 2) for name in ("key", "value")}
            )
            for got, wanted in zip(grouped.run(ltx, return_lse=True), repeated.run(ltx, return_lse=True)):
                assert_same_bits(got, wanted, f"{queries} queries, {keys} keys, {options}")


@every_kernel
def test_causal_rows_have_the_same_bits_in_every_call(ltx, kernel, dtype, width):
    """Whatever the other samples and heads are, whatever tokens follow, and with fewer tiles than multiprocessors."""
    case = plain_attention_case(Make(kernel, dtype), (3, 900, 6, width), 900, key_heads=3, is_causal=True)
    (expected,) = case.run(ltx)
    for _ in range(5):
        assert_same_bits(case.run(ltx)[0], expected, "another run")
    for sample in range(3):
        alone = case.map(lambda tensor, sample=sample: tensor[sample : sample + 1])
        assert_same_bits(alone.run(ltx)[0], expected[sample : sample + 1], f"sample {sample}")
    head = case.replace(
        query=case.kwargs["query"][:, :, 2:4], key=case.kwargs["key"][:, :, 1:2], value=case.kwargs["value"][:, :, 1:2]
    )
    assert_same_bits(head.run(ltx)[0], expected[:, :, 2:4].contiguous(), "two heads")
    for tokens in (1, 65, 200, 899):
        first = case.map(lambda tensor, tokens=tokens: tensor[:, :tokens])
        assert_same_bits(first.run(ltx)[0], expected[:, :tokens].contiguous(), f"{tokens} tokens")
    many = case.map(lambda tensor: tensor.repeat(20, 1, 1, 1))
    assert_same_bits(many.run(ltx)[0], expected.repeat(20, 1, 1, 1), "in twenty times as many samples")


@every_kernel
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_causal_rows_do_not_see_what_follows(ltx, kernel, dtype, width, name, special):
    """Whatever stands in later keys and values. Rows that see it are as in torch."""
    case = plain_attention_case(Make(kernel, dtype), (2, 300, 4, width), 300, key_heads=2, is_causal=True)
    (plain,) = case.run(ltx)
    place = 130
    case.kwargs[name][1, place, 1, 3] = special
    (output,) = case.run(ltx)
    head = slice(1, 2) if name == "query" else slice(2, 4)  # those that share a head of the key
    rows = slice(place, place + 1 if name == "query" else None)  # that see it
    unseen = torch.ones(output.shape, dtype=torch.bool, device=kernel)
    unseen[1, rows, head] = False
    if name == "query":
        assert_same_bits(output[unseen], plain[unseen])
    torch.testing.assert_close(output[unseen], plain[unseen], rtol=0.01, atol=0.01)
    wanted = by_the_formula(case)[1, rows, head]
    torch.testing.assert_close(output[1, rows, head].float(), wanted, rtol=0.02, atol=0.02, equal_nan=True)


@every_kernel
def test_causal_scores_far_apart(ltx, kernel, dtype, width):
    """One key takes all, logits that rise and fall by more than fp32 holds, and keys far above the first ones."""
    tokens = 400
    case = plain_attention_case(Make(kernel, dtype), (1, tokens, 4, width), tokens, key_heads=1, is_causal=True)
    for factor in (4.0, 64.0, 1000.0):
        check(ltx, case.replace(query=factor * case.kwargs["query"]))
    ramp = torch.linspace(0, 1, tokens, device=kernel)[None, :, None]
    for slope in (300.0, -300.0, 3000.0, -3000.0):
        query, key = case.kwargs["query"].clone(), case.kwargs["key"].clone()
        query[..., 0], key[..., 0] = 1.0, (slope * ramp).to(dtype)
        check(ltx, case.replace(query=query, key=key, scale=1.0))


def test_causal_opcheck(ltx, kernel):
    case = plain_attention_case(Make(kernel, torch.bfloat16), (2, 70, 6, 64), 70, key_heads=2)
    tensors = tuple(case.tensors.values())
    for more in ((None, None, None, True), (None, lengths_of(kernel, 70, 5), 0.3, True), (None, None, None, False)):
        torch.library.opcheck(ltx._ops.ops.attention.default, (*tensors, *more))
        torch.library.opcheck(ltx._ops.ops.attention_lse.default, (*tensors, *more))


def test_causal_in_graphs(ltx, kernel):
    """A graph computes again what its inputs are then."""
    case = plain_attention_case(Make(kernel, torch.bfloat16), (2, 500, 8, 128), 500, key_heads=2, is_causal=True)
    query = case.kwargs["query"]
    case.run(ltx)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (output,) = case.run(ltx)
    for _ in range(2):
        query.copy_(query.flip(1))
        graph.replay()
        assert_same_bits(output, case.run(ltx)[0])


def key_masks(device: str, keys: int) -> dict[str, Tensor]:
    """[3 or 1, keys], by name."""
    random = Make(device, torch.float32, seed=keys)(3, keys)
    place = torch.arange(keys, device=device)
    counts = torch.ones(3, keys, dtype=torch.bool, device=device)
    counts[0, keys // 3 :] = False  # a prompt and its padding
    counts[1, : keys // 2] = False  # padding in front
    counts[2, 1::2] = False
    middle = (place < keys // 4) | (place >= 3 * keys // 4)
    return {
        "bool": counts,
        "of one sample": counts[:1],
        "middle": middle[None],
        "addends": random,
        "addends and -inf": random.masked_fill(~counts, -math.inf),
        "-10000": torch.where(counts, 0.0, -10000.0),
        "least numbers": torch.where(counts, 0.0, torch.finfo(torch.float32).min).to(torch.bfloat16),
        "none counts": counts & (torch.arange(3, device=device)[:, None] != 1),
    }


@every_dtype
@pytest.mark.parametrize("keys", [7, 300])
def test_masks(ltx, device, dtype, keys):
    for name, mask in key_masks(device, keys).items():
        (output,) = check(ltx, plain_attention_case(Make(device, dtype, seed=keys), (3, 70, 2, 64), keys, mask=mask))
        assert output.isfinite().all(), name
        assert (output[1] == 0).all() == (name == "none counts")


@every_kernel
@pytest.mark.parametrize("keys", [80, 128, 1000])
def test_masks_of_every_kernel(ltx, kernel, dtype, width, keys):
    for mask in key_masks(kernel, keys).values():
        case = plain_attention_case(Make(kernel, dtype, seed=keys), (3, 200, 3, width), keys)
        check(ltx, case.replace(mask=mask))
        check(ltx, case.replace(mask=mask.t().contiguous().t(), key_lengths=lengths_of(kernel, keys, 3 * keys // 4, 1)))


@every_dtype
def test_key_lengths(ltx, device, dtype):
    """Beyond the number of keys and below zero they stand for these; strides; no key at all gives zeros."""
    for lengths in ((300, 1, 150), (128, 0, 256), (-5, 301, 2**31 - 1)):
        given = torch.stack((lengths_of(device, *lengths), lengths_of(device, 0, 0, 0)), -1)[:, 0]
        case = plain_attention_case(Make(device, dtype), (3, 70, 2, 64), 300, key_lengths=given)
        (output,) = check(ltx, case)
        for sample, length in enumerate(lengths):
            assert (output[sample] == 0).all() == (length <= 0)
            if length > 0:
                kept = case.map(lambda tensor, sample=sample: tensor[sample : sample + 1])
                kept = kept.replace(key=kept.kwargs["key"][:, :length], value=kept.kwargs["value"][:, :length])
                alone = Case("attention", {**kept.kwargs, "key_lengths": None}).run(ltx)[0]
                torch.testing.assert_close(output[sample : sample + 1], alone, rtol=0.02, atol=0.01)


@every_dtype
def test_no_key_counts_for_special_queries(ltx, device, dtype):
    """A NaN or an infinity has nothing to attend to either: zeros, as the reference gives."""
    case = plain_attention_case(Make(device, dtype), (2, 5, 2, 64), 40, key_lengths=lengths_of(device, 0, 40))
    case.kwargs["query"][0, 1:3, :, 7] = torch.tensor([torch.nan, torch.inf], device=device, dtype=dtype)[:, None]
    for module in (ltx, ltx.reference):
        (output,) = case.run(module)
        assert bool((output[0] == 0).all()) and bool(output[1].isfinite().all())


@every_kernel
def test_keys_that_do_not_count_change_no_bits(ltx, kernel, dtype, width):
    """As key lengths, as a prefix of a mask, and as keys that are not there."""
    keys, length = 900, 437
    case = plain_attention_case(Make(kernel, dtype), (2, 300, 3, width), keys)
    kept = case.replace(key=case.kwargs["key"][:, :length], value=case.kwargs["value"][:, :length])
    (expected,) = kept.run(ltx)
    assert_same_bits(case.replace(key_lengths=lengths_of(kernel, length, length)).run(ltx)[0], expected)
    mask = (torch.arange(keys, device=kernel) < length)[None]
    torch.testing.assert_close(case.replace(mask=mask).run(ltx)[0], expected, rtol=0.01, atol=0.001)


@every_dtype
def test_a_mask_that_needs_a_gradient(ltx, dtype):
    """Of torch's attention: on the CPU, for on a GPU it has none for some lengths (torch 2.11)."""
    mask = torch.randn(2, 30, requires_grad=True)
    case = plain_attention_case(Make("cpu", dtype), (2, 20, 3, 64), 30, mask=mask)
    (gradient,) = torch.autograd.grad(case.run(ltx)[0].float().square().sum(), mask)
    (wanted,) = torch.autograd.grad(in_torch(case, torch.float32).square().sum(), mask)
    torch.testing.assert_close(gradient, wanted, rtol=0.05, atol=0.05 * float(wanted.abs().max()))


# ---- Sums of exponentials


@every_dtype
@pytest.mark.parametrize("width", [64, 128, 40])
def test_logarithms_of_the_sums(ltx, device, dtype, width):
    """[B, heads, S] in float32: with masks, lengths, no key that counts, logits far from zero, and given outputs."""
    make = Make(device, dtype, seed=width)
    case = plain_attention_case(make, (3, 70, 2, width), 300)
    plain = check(ltx, case)[0]
    far = case.replace(query=30 * case.kwargs["query"])
    masks = key_masks(device, 300)
    for other in (
        case,
        far,
        case.replace(scale=0.3),
        case.replace(key_lengths=lengths_of(device, 300, 0, 133)),
        case.replace(mask=masks["addends and -inf"]),
        case.replace(mask=masks["none counts"]),
        case.replace(key=case.kwargs["key"][:, :0], value=case.kwargs["value"][:, :0]),
    ):
        output, lse = other.run(ltx, return_lse=True)
        assert lse.dtype == torch.float32 and lse.is_contiguous()
        wanted = Truth(other.kwargs).lse
        torch.testing.assert_close(lse.double(), wanted, rtol=1e-5, atol=2e-5 * (30 if other is far else 1))
        if device == "cuda" and has_kernel(ltx, device) and width != 40 and dtype != torch.float32:
            assert_same_bits(output, other.run(ltx)[0])
            given = torch.empty_like(plain).transpose(1, 2).contiguous().transpose(1, 2)
            same, again = other.run(ltx, return_lse=True, out=given)
            assert same is given
            assert_same_bits(given.contiguous(), output)
            assert_same_bits(again, lse)


def test_sums_of_heads_without_columns(ltx, device):
    """All their scores are 0."""
    query, key = torch.zeros(2, 4, 3, 0, device=device), torch.zeros(2, 5, 3, 0, device=device)
    for f in (ltx, ltx.reference):
        output, lse = f.attention(query, key, key, return_lse=True)
        assert output.shape == query.shape
        torch.testing.assert_close(lse, torch.full((2, 3, 4), 5.0, device=device).log())


@every_kernel
def test_parts_of_the_keys_put_together(ltx, kernel, dtype, width):
    """As ring attention does: outputs of parts, weighted by their sums."""
    case = plain_attention_case(Make(kernel, dtype), (2, 300, 3, width), 700)
    total, output = None, torch.zeros(2, 300, 3, width, device=kernel)
    for part in (slice(0, 200), slice(200, 201), slice(201, 700)):
        here = case.replace(key=case.kwargs["key"][:, part], value=case.kwargs["value"][:, part])
        partial, lse = here.run(ltx, return_lse=True)
        both = lse if total is None else torch.logaddexp(total, lse)
        old = torch.zeros_like(both) if total is None else (total - both).exp()
        output = output * old.mT.unsqueeze(-1) + partial * (lse - both).exp().mT.unsqueeze(-1)
        total = both
    torch.testing.assert_close(output.to(dtype), case.run(ltx)[0], rtol=0.02, atol=0.004)


# ---- Memory


@bf16
@pytest.mark.parametrize("memory", LAYOUTS)
def test_into_given_outputs(ltx, device, dtype, memory):
    check_out(ltx, plain_attention_case(Make(device, dtype), SIZES, 140), memory)


@every_kernel
def test_into_a_wider_row(ltx, kernel, dtype, width):
    """The first columns of a joint row, beside what the MLP of a single-stream block writes; no copy is made."""
    case = plain_attention_case(Make(kernel, dtype), (2, 300, 3, width), 200)
    (expected,) = case.run(ltx)
    row = torch.full((2, 300, 3 * width + 64), math.nan, dtype=dtype, device=kernel)
    out = row[..., : 3 * width].unflatten(-1, (3, width))
    names = kernels_of(lambda: case.run(ltx, out=out))
    assert len([name for name in names if "hopper_attention" not in name and "Memset" not in name]) == 0, names
    assert_same_bits(out.contiguous(), expected)
    assert row[..., 3 * width :].isnan().all()


@bf16
@pytest.mark.parametrize("memory", LAYOUTS)
def test_layouts(ltx, device, dtype, memory):
    case = plain_attention_case(Make(device, dtype), SIZES, 140)
    expected = check(ltx, case)[0]
    for other in (case.in_layout(memory), *(case.replace(**{n: place(t, memory)}) for n, t in case.tensors.items())):
        (output,) = check(ltx, other)
        if has_kernel(ltx, device):
            assert_same_bits(output, expected)


@bf16
def test_views_of_packed_projections(ltx, device, dtype):
    """Of one tensor, also with heads before tokens, and of a wider one."""
    case = of_packed_projection(Make(device, dtype), 2, 150, 3)
    apart = case.map(lambda tensor: tensor.clone())
    heads_first = case.map(lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2))
    wider = case.map(lambda tensor: F.pad(tensor, (8, 8))[..., 8:-8])
    expected = check(ltx, case)[0]
    for other in (apart, heads_first, wider):
        (output,) = check(ltx, other)
        if has_kernel(ltx, device):
            assert_same_bits(output, expected)


@bf16
def test_expanded(ltx, device, dtype):
    """One sample, token or head for all: strides of zero."""
    for name in ("query", "key", "value"):
        for dim in range(3):
            case = plain_attention_case(Make(device, dtype), SIZES, 9)
            tensor = case.kwargs[name]
            check(ltx, case.replace(**{name: tensor.narrow(dim, 0, 1).expand(tensor.shape)}))


class OnGpu(torch.Tensor):
    """A CPU tensor that says that it is on a GPU."""

    @property
    def is_cuda(self) -> bool:
        return True


@pytest.mark.parametrize("on_gpu", [True, False])
def test_what_torchs_attention_gets(ltx, monkeypatch, on_gpu):
    """On a GPU, where its kernels may give NaN for others, heads that begin at multiples of 16 bytes."""
    got: list[Tensor] = []

    def spy(*tensors: Tensor, **_: Any) -> Tensor:
        got.extend(tensors)
        return torch.empty_like(tensors[0])

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    wide = torch.randn(2, 6, 3, 96, dtype=torch.float16)
    odd = wide[..., :63].contiguous()  # no head but the first
    for aligned, tensor in (
        (True, wide[..., :40]),
        (True, wide.transpose(1, 2)[..., 8:48]),
        (True, odd[:1, :1, :1, :40]),  # strides of one head, token or sample do not count
        (False, wide[..., 1:41]),
        (False, wide[..., 4:44]),
        (False, odd[..., :40]),
        (False, odd.transpose(1, 2)[:1, :, :1, :40]),
    ):
        tensor = tensor.as_subclass(OnGpu) if on_gpu else tensor
        ltx.attention(tensor, tensor, tensor)
        for passed in got:
            assert torch.equal(passed.as_subclass(Tensor), tensor.as_subclass(Tensor).transpose(1, 2))
            same = passed.data_ptr() == tensor.data_ptr() and passed.stride() == tensor.transpose(1, 2).stride()
            assert same is (aligned or not on_gpu)
            assert same or (passed.transpose(1, 2).is_contiguous() and passed.storage_offset() == 0)
        assert len(got) == 3
        got.clear()


@pytest.mark.parametrize(("scale", "factor", "passed"), [(-0.5, -1.0, 0.5), (0.0, 0.0, 1.0), (0.5, 1.0, 0.5)])
def test_scale_that_torchs_attention_gets(ltx, monkeypatch, scale, factor, passed):
    """On a GPU a positive one, with the same scores."""
    query = torch.randn(1, 2, 3, 40).as_subclass(OnGpu)

    def spy(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, **_: Any) -> Tensor:
        assert scale == passed
        assert torch.equal(q.as_subclass(Tensor), factor * query.as_subclass(Tensor).transpose(1, 2))
        return torch.empty_like(q)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    ltx.attention(query, query, query, scale=scale)


# ---- Values


@bf16
@pytest.mark.parametrize("keys", [100, 128, 129, 300, 700])
def test_scores_far_apart(ltx, device, dtype, keys):
    """One key takes all, the others' exponentials vanish; wherever it is."""
    case = plain_attention_case(Make(device, dtype), (2, 200, 2, 64), keys)
    for factor in (4.0, 64.0, 1000.0):
        check(ltx, case.replace(query=factor * case.kwargs["query"]))
    ramp = torch.linspace(0, 1, keys, device=device)[None, :, None]
    for slope in (300.0, -300.0, 3000.0, -3000.0, 1e30, -1e30):
        key = case.kwargs["key"].clone()
        key[..., 0] = (slope * ramp).to(dtype)
        query = case.kwargs["query"].clone()
        query[..., 0] = 1.0
        check(ltx, case.replace(query=query, key=key, scale=1.0))


@bf16
@pytest.mark.parametrize("logit", [50.0, 110.0, 128.0, 130.0, 300.0, 1e4, 1e9, 1e30])
@pytest.mark.parametrize("at", [128, 299])
def test_one_key_far_above_the_first(ltx, device, dtype, logit, at):
    """Above the first 128 by so much that sums relative to these leave the range of fp32; for some of the queries."""
    case = plain_attention_case(Make(device, dtype), (1, 200, 2, 64), 300, scale=1.0)
    query, key = 0.1 * case.kwargs["query"], case.kwargs["key"].clone()
    query[..., 0] = 0.0
    query[:, 3::7, :, 0] = 1.0
    key[..., 0] = 0.0
    key[:, at, :, 0] = logit
    case = case.replace(query=query, key=key)
    check(ltx, case)
    large = 2.0**100 * case.kwargs["value"]  # so that the product leaves it, though the sum does not
    check(ltx, case.replace(value=large))


@every_kernel
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 17, 140])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_inf_and_nan_are_as_in_torch(ltx, kernel, dtype, width, name, place, special):
    case = plain_attention_case(Make(kernel, dtype), (2, 200, 3, width), 150)
    plain = case.run(ltx)[0]
    case.kwargs[name][1, place, 1, 3] = special
    (output,) = case.run(ltx)
    expected = by_the_formula(case)
    assert bool((output.isnan() == expected.isnan()).all())
    infinite = expected.isinf()
    assert bool((output.isinf() == infinite).all())
    assert torch.equal(output[infinite].float(), expected[infinite])
    finite = expected.isfinite()
    torch.testing.assert_close(output[finite].float(), expected[finite], rtol=0.02, atol=0.02)
    touched = {"query": (1, place, 1), "key": (1, slice(None), 1), "value": (1, slice(None), 1, 3)}[name]
    elsewhere = torch.ones(output.shape, dtype=torch.bool, device=kernel)
    elsewhere[touched] = False
    if name == "query":  # nor in the other rows of a tile
        assert_same_bits(output[elsewhere], plain[elsewhere])
    assert bool(output[elsewhere].isfinite().all())


@every_kernel
def test_special_keys(ltx, kernel, dtype, width):
    """Logits of infinity in one, some and all keys, and in the first ones alone."""
    for special in (math.inf, -math.inf):
        for where in (slice(0, 1), slice(0, 128), slice(128, 300), slice(None), slice(5, 300, 9)):
            case = plain_attention_case(Make(kernel, dtype), (1, 70, 2, width), 300)
            case.kwargs["query"][..., 2] = 1.0
            case.kwargs["key"][:, where, :, 2] = special
            (output,) = case.run(ltx)
            torch.testing.assert_close(output.float(), by_the_formula(case), rtol=0.02, atol=0.02, equal_nan=True)


@bf16
def test_large_and_small_numbers(ltx, device, dtype):
    for power in (-60, -20, 20, 60):
        case = plain_attention_case(Make(device, dtype), SIZES, 140)
        check(ltx, case.replace(value=2.0**power * case.kwargs["value"]))
        check(ltx, case.replace(query=2.0**power * case.kwargs["query"], key=2.0**-power * case.kwargs["key"]))


@every_kernel
@pytest.mark.parametrize("inputs", ["normal", "peaked", "outliers", "keys of the queries"])
def test_near_torch(ltx, kernel, dtype, width, inputs):
    """Root of the mean square of the error, against that of torch's attention in the same dtype: also where few keys
    have all the weight, with outlying channels, and where one key has all of it, which is exact."""
    case = plain_attention_case(Make(kernel, dtype), (2, 1000, 4, width), 1000)
    query, key, value = case.kwargs.values()
    outlying = torch.ones(width, dtype=dtype, device=kernel)
    outlying[::16] = 8.0
    case = {
        "normal": case,
        "peaked": case.replace(query=2 * query, key=2 * key),
        "outliers": case.replace(query=outlying * query, key=outlying * key, value=outlying * value),
        "keys of the queries": case.replace(key=40 * query),
    }[inputs]
    truth = case.truth(ltx)[0]
    own, torchs = ((out.double() - truth).square().mean().sqrt() for out in (case.run(ltx)[0], in_torch(case, dtype)))
    if (dtype, width) == (torch.bfloat16, 64):  # the weight of the largest logit is rounded like the others
        assert own <= 1.5 * torchs + 5e-4
    else:
        assert own <= 1.05 * torchs + 1e-9


# ---- Bits: a row depends on its query, and the keys and values of its sample and head, alone


@every_kernel
@pytest.mark.parametrize("keys", [9, 300])
def test_same_row_same_bits(ltx, kernel, dtype, width, keys):
    case = plain_attention_case(Make(kernel, dtype), (3, 400, 2, width), keys)
    (expected,) = case.run(ltx)
    for _ in range(5):
        assert_same_bits(case.run(ltx)[0], expected, "another run")
    for batches, queries in (
        (slice(0, 1), slice(0, 400)),
        (slice(2, 3), slice(7, 8)),
        (slice(1, 3), slice(63, 333)),
    ):
        part = case.map(lambda tensor, batches=batches: tensor[batches])
        part = part.replace(query=part.kwargs["query"][:, queries])
        assert_same_bits(part.run(ltx)[0], expected[batches, queries].contiguous(), f"{batches}, {queries}")
    one_head = case.map(lambda tensor: tensor[:, :, 1:])
    assert_same_bits(one_head.run(ltx)[0], expected[:, :, 1:].contiguous(), "one head")
    many = case.map(lambda tensor: tensor.repeat(30, 1, 1, 1))
    assert_same_bits(many.run(ltx)[0], expected.repeat(30, 1, 1, 1), "in thirty times as many samples")


# ---- Large


def test_strides_above_int32(ltx, kernel):
    """Samples, tokens, heads and columns more than 2^31 elements apart, in memory that is mostly never touched."""
    apart = 2**31 + 8
    try:
        flat = torch.empty(apart + 4096, dtype=torch.bfloat16, device=kernel)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        pytest.skip(f"not enough memory: {error}")
    case = plain_attention_case(Make(kernel, torch.bfloat16), (2, 2, 2, 64), 2)
    (expected,) = case.run(ltx)
    for strides in ((apart, 128, 64, 1), (128, apart, 64, 1), (256, 128, apart, 1), (4, 2, 1, apart // 64)):
        far = flat.as_strided((2, 2, 2, 64), strides)
        for name in ("query", "key", "value"):
            far.copy_(case.kwargs[name])
            assert_same_bits(case.replace(**{name: far}).run(ltx)[0], expected, name)


@pytest.mark.slow
def test_more_than_2_31_elements(ltx, kernel):
    heads = 32
    sequence = 2**31 // (heads * 64) + 3
    try:
        query = torch.empty(1, sequence, heads, 64, dtype=torch.bfloat16, device=kernel)
        query.normal_(generator=torch.Generator(kernel).manual_seed(1))
        case = plain_attention_case(Make(kernel, torch.bfloat16), (1, 1, heads, 64), 7)
        (output,) = case.replace(query=query).run(ltx)
    except torch.OutOfMemoryError as error:
        pytest.skip(f"not enough memory: {error}")
    for first in (0, sequence // 2, 2**31 // (heads * 64) - 2, sequence - 5):
        rows = slice(first, first + 5)
        assert_same_bits(output[:, rows], case.replace(query=query[:, rows]).run(ltx)[0])


# ---- Gradients, torch.compile


@every_dtype
def test_gradients_are_torchs(ltx, device, dtype):
    case = plain_attention_case(Make(device, dtype), (2, 20, 3, 64), 30).map(lambda tensor: tensor.requires_grad_())
    weights = Make(device, dtype, seed=1)(2, 20, 3, 64)
    tensors = tuple(case.tensors.values())
    (output,) = case.run(ltx)
    assert output.is_contiguous()
    for got, want in zip(
        torch.autograd.grad((output * weights).sum(), tensors),
        torch.autograd.grad((in_torch(case, dtype) * weights).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
    with torch.no_grad():
        assert not case.run(ltx)[0].requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reference(ltx, device, dtype):
    case = plain_attention_case(Make(device, dtype), (2, 20, 3, 64), 30, scale=0.3)
    output = case.run(ltx.reference)[0]
    torch.testing.assert_close(output, in_torch(case, torch.float32).to(dtype))
    assert output.is_contiguous()


def test_autocast_keeps_the_dtype(ltx, device):
    case = plain_attention_case(Make(device, torch.float32), (1, 5, 2, 64), 7)
    with torch.autocast(device, torch.bfloat16):
        assert case.run(ltx)[0].dtype == torch.float32


@every_dtype
def test_compile(ltx, device, dtype):
    """Without graph breaks, an opaque op where the kernel runs, and for other lengths without compiling anew."""
    torch.compiler.reset()
    graphs = []

    def keep(graph, example_inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda q, k, v: ltx.attention(q, k, v, scale=0.2), backend=keep, fullgraph=True)
    for tokens, keys in ((70, 130), (75, 140), (90, 40)):
        case = plain_attention_case(Make(device, dtype), (2, tokens, 3, 64), keys, scale=0.2)
        if tokens == 90:
            torch.compiler.set_stance("fail_on_recompile")
        try:
            torch.testing.assert_close(compiled(*case.tensors.values()), case.run(ltx)[0], rtol=0.02, atol=0.02)
        finally:
            torch.compiler.set_stance("default")
    own = [node for node in graphs[0].graph.nodes if ltx._ops.ops.name in str(node.target)]
    assert len(own) == (dtype != torch.float32 and has_kernel(ltx, device))


def test_opcheck(ltx, kernel):
    for packed in (False, True):
        case = plain_attention_case(Make(kernel, torch.bfloat16), (2, 70, 3, 64), 40, packed=packed)
        tensors = tuple(case.tensors.values())
        out, mask = torch.empty_like(case.kwargs["query"]), torch.ones(2, 40, dtype=torch.bool, device=kernel)
        lse = torch.empty(2, 3, 70, device=kernel)
        lengths = mask.sum(-1, dtype=torch.int32)
        for more in (
            (None, None, None, False),
            (mask, None, 0.3, False),
            (None, lengths, 0.3, False),
            (None, lengths, None, True),
        ):
            torch.library.opcheck(ltx._ops.ops.attention.default, (*tensors, *more))
            torch.library.opcheck(ltx._ops.ops.attention_lse.default, (*tensors, *more))
            torch.library.opcheck(ltx._ops.ops.attention_out.default, (out, *tensors, *more))
            torch.library.opcheck(ltx._ops.ops.attention_lse_out.default, (out, lse, *tensors, *more))


def test_which_gpus_have_the_kernel(ltx, cuda):
    """Of the GPUs only those of compute capability 9.0; and of the builds, those with code for it."""
    metadata = json.loads((Path(ltx.__file__).parent / "metadata.json").read_text())
    built = any(arch.startswith("9.0") for arch in metadata["backend"]["archs"])
    for index in range(torch.cuda.device_count()):
        has = ltx._ops.ops.has_attention(index)
        assert has is (built and torch.cuda.get_device_capability(index) == (9, 0))
        with FakeTensorMode():
            assert ltx._ops.ops.has_attention(index) is has


class Named(torch.Tensor):
    """A subclass that adds nothing."""


@bf16
@pytest.mark.filterwarnings("ignore")
def test_kinds_of_tensors(ltx, device, dtype):
    """Subclasses, views whose numbers are not those in memory, inference tensors, and what torch.func makes of them."""
    case = plain_attention_case(Make(device, dtype), (2, 70, 3, 64), 40)
    (expected,) = case.run(ltx)
    query = case.kwargs["query"]

    def attend(query: Tensor) -> Tensor:
        return case.replace(query=query).run(ltx)[0]

    def near(output: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(output, wanted, rtol=0.02, atol=0.02)

    (named,) = case.map(lambda tensor: tensor.as_subclass(Named)).run(ltx)
    assert type(named) is Named
    near(named.as_subclass(Tensor), expected)
    near(attend(torch._neg_view(query)), attend(-query))
    with torch.inference_mode():
        inference = case.map(lambda tensor: tensor.clone())
    near(inference.run(ltx)[0], expected)
    near(torch.func.functionalize(attend)(query), expected)
    near(torch.vmap(attend)(torch.stack((query, -query))), torch.stack((expected, attend(-query))))
    gradient = torch.func.grad(lambda query: attend(query).float().square().sum())(query)
    wanted = query.clone().requires_grad_()
    in_torch(case.replace(query=wanted), dtype).float().square().sum().backward()
    near(gradient, wanted.grad)


# ---- Errors


FLOATS = "dtype float32, float16 or bfloat16"
LIKE_QUERY = (
    "key: expected the batch size and last dimension of query [2, 6, 3, 64] and heads that divide its, got shape "
)
Q, K = (2, 6, 3, 64), (2, 4, 3, 64)
F16, BF16, I64 = torch.float16, torch.bfloat16, torch.int64
ERRORS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("query: expected 4 dimensions, got shape [2, 6, 192]", ((2, 6, 192), K, K), {}),
    ("query: expected 4 dimensions, got shape []", ((), K, K), {}),
    (f"query: expected {FLOATS}, got int64", ((*Q, I64), K, K), {}),
    ("scale: expected a finite number, got inf", (Q, K, K), {"scale": math.inf}),
    ("scale: expected a finite number, got nan", (Q, K, K), {"scale": math.nan}),
    ("key: expected dtype bfloat16 (that of query), got float16", (Q, (*K, F16), K), {}),
    ("key: expected 4 dimensions, got shape [2, 4, 192]", (Q, (2, 4, 192), K), {}),
    (f"{LIKE_QUERY}[1, 4, 3, 64]", (Q, (1, 4, 3, 64), K), {}),
    (f"{LIKE_QUERY}[2, 4, 2, 64]", (Q, (2, 4, 2, 64), (2, 4, 2, 64)), {}),
    (f"{LIKE_QUERY}[2, 4, 6, 64]", (Q, (2, 4, 6, 64), (2, 4, 6, 64)), {}),
    (f"{LIKE_QUERY}[2, 4, 0, 64]", (Q, (2, 4, 0, 64), (2, 4, 0, 64)), {}),
    (f"{LIKE_QUERY}[2, 4, 3, 32]", (Q, (2, 4, 3, 32), K), {}),
    ("value: expected dtype bfloat16 (that of query), got float16", (Q, K, (*K, F16)), {}),
    ("value: expected shape [2, 4, 3, 64], got [2, 5, 3, 64]", (Q, K, (2, 5, 3, 64)), {}),
    ("value: expected shape [2, 4, 3, 64], got [2, 4, 3, 128]", (Q, K, (2, 4, 3, 128)), {}),
    ("value: expected shape [2, 4, 1, 64], got [2, 4, 3, 64]", (Q, (2, 4, 1, 64), K), {}),
    (
        "mask: expected None with is_causal; key_lengths leaves out keys, got a tensor",
        (Q, K, K),
        {"mask": (2, 4, torch.bool), "is_causal": True},
    ),
    ("mask: expected dtype bool, float32, float16 or bfloat16, got int64", (Q, K, K), {"mask": (2, 4, I64)}),
    ("mask: expected shape [2, 4] or [1, 4], got [2, 1, 1, 4]", (Q, K, K), {"mask": (2, 1, 1, 4)}),
    ("mask: expected shape [2, 4] or [1, 4], got [3, 4]", (Q, K, K), {"mask": (3, 4)}),
    ("mask: expected shape [2, 4] or [1, 4], got [2, 6]", (Q, K, K), {"mask": (2, 6)}),
    ("mask: expected shape [1, 4], got [1, 3]", ((1, 2, 3, 64), (1, 4, 3, 64), (1, 4, 3, 64)), {"mask": (1, 3)}),
    ("key_lengths: expected dtype int32, got int64", (Q, K, K), {"key_lengths": (2, I64)}),
    ("key_lengths: expected shape [2], got [1]", (Q, K, K), {"key_lengths": (1, torch.int32)}),
]


def raised(call: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as error:
        call()
    return str(error.value)


@pytest.mark.host
@pytest.mark.kernels_ci
@pytest.mark.parametrize(("text", "shapes", "options"), ERRORS, ids=[error[0][:60] for error in ERRORS])
def test_errors(ltx, device, text, shapes, options):
    """The same from the kernel, from what stands in for it, from fakes and under torch.compile."""

    def call(f: Any, device: str) -> Any:
        def tensor(shape: tuple[Any, ...]) -> Tensor:
            *sizes, dtype = shape if shape and isinstance(shape[-1], torch.dtype) else (*shape, BF16)
            return torch.ones(sizes, dtype=dtype, device=device)

        keywords = {name: tensor(value) if isinstance(value, tuple) else value for name, value in options.items()}
        return f.attention(*map(tensor, shapes), **keywords)

    for f in (ltx, ltx.reference):
        assert raised(lambda f=f: call(f, device)) == text
    assert raised(lambda: call(ltx, "meta")) == text
    with FakeTensorMode():
        assert raised(lambda: call(ltx, device)) == text
    torch.compiler.reset()
    assert text in raised(torch.compile(lambda: call(ltx, device), backend="eager", fullgraph=True))


def test_devices(ltx, device):
    here, there = (torch.ones(Q, dtype=BF16, device=d) for d in (device, "meta"))
    for f in (ltx, ltx.reference):
        for argument, tensors in (("key", (here, there, here)), ("value", (here, here, there))):
            text = f"{argument}: expected device {here.device} (that of query), got meta"
            assert raised(lambda f=f, tensors=tensors: f.attention(*tensors)) == text


def test_what_the_op_takes(ltx, kernel):
    """Of the Python function it gets nothing else."""
    op = ltx._ops.ops.attention
    x = torch.ones(1, 2, 1, 64, device=kernel)
    assert (
        raised(lambda: op(x, x, x, None, None, None, False)) == "query: expected dtype float16 or bfloat16, got float32"
    )
    y = x.bfloat16()[..., :32]
    text = "query: expected a last dimension of 64 or 128, got shape [1, 2, 1, 32]"
    assert raised(lambda: op(y, y, y, None, None, None, False)) == text


@pytest.mark.host
def test_float64_is_for_the_reference(ltx, device):
    x = torch.ones(Q, dtype=torch.float64, device=device)
    assert raised(lambda: ltx.attention(x, x, x)) == f"query: expected {FLOATS}, got float64"
    torch.testing.assert_close(ltx.reference.attention(x, x, x), x)


# ---- Streams


def test_on_a_side_stream(ltx, kernel):
    cases = [plain_attention_case(Make(kernel, torch.bfloat16, seed=seed), (2, 1000, 8, 64), 1000) for seed in range(2)]
    check_streams(ltx, cases)
