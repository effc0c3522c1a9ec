"""Defects found in other packages' ops, each as a test that would have caught it.

Integration and benchmark defects of the same list are tested where those parts are: class matching by name, "kernels
enabled" without the op, baselines that time themselves.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    DTYPES,
    NORM_OPS,
    Case,
    Make,
    activation_case,
    assert_close_to_fp64,
    assert_same_bits,
    attention_case,
    check,
    check_out,
    every_op,
    norm_case,
    place,
    qk_norm_rope_case,
    rope_case,
    rotary_case,
)

pytestmark = pytest.mark.kernels_ci


def test_rope_exponent_is_over_the_whole_dimension(ltx, device):
    """theta^(-2i / D); a kernel used theta^(-4i / D)."""
    width, theta = 8, 100.0
    q = torch.zeros(1, 3, 1, width, device=device)
    q[..., 0::2] = 1.0
    out, _ = ltx.rope_1d(q, q, theta)
    for i in range(width // 2):
        angle = 2 * theta ** (-2 * i / width)
        assert out[0, 2, 0, 2 * i].item() == pytest.approx(math.cos(angle), abs=1e-6)
        assert out[0, 2, 0, 2 * i + 1].item() == pytest.approx(math.sin(angle), abs=1e-6)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rope_3d_every_axis_starts_at_frequency_one(ltx, device, axis, layout):
    """The first pair of each axis turns by the coordinate itself; h and w began at the second frequency elsewhere."""
    width, theta = 18, 50.0  # D // 3 = 6 for every axis
    grid = [1, 1, 1]
    grid[axis] = 4
    make = Make(device, torch.float32)
    q = make(1, 4, 2, width)
    out, _ = ltx.rope_3d(q, q, *grid, theta)
    same, _ = ltx.rope_3d(q, q, *grid, theta, layout=layout)
    for pair in range(width // 2):
        own = 3 * axis <= pair < 3 * axis + 3
        for token in range(4):
            angle = token * theta ** (-2 * (pair - 3 * axis) / 6) if own else 0.0
            for result, a, b in ((out, 2 * pair, 2 * pair + 1),) + (
                ((same, pair, pair + width // 2),) if layout == "half" else ()
            ):
                x, y = q[0, token, 1, a].double().item(), q[0, token, 1, b].double().item()
                assert result[0, token, 1, a].item() == pytest.approx(
                    x * math.cos(angle) - y * math.sin(angle), abs=1e-5
                )
                assert result[0, token, 1, b].item() == pytest.approx(
                    y * math.cos(angle) + x * math.sin(angle), abs=1e-5
                )


@pytest.mark.parametrize("width", [4, 8, 10, 14, 16, 20, 32, 64])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rope_3d_with_odd_third(ltx, device, width, layout):
    """D // 3 odd: the axes get even numbers of channels, and kernel and reference agree on which."""
    case = rope_case(Make(device, torch.float32), (2, 2, width), grid=(3, 2, 4), layout=layout)
    check(ltx, case)
    for output, want in zip(case.run(ltx), case.run(ltx.reference), strict=True):
        torch.testing.assert_close(output, want, rtol=1e-6, atol=1e-6)


def test_non_contiguous_input_gives_contiguous_output(ltx, device):
    """An output that keeps permuted strides, written as if it were row-major, is scrambled."""
    for op in NORM_OPS:
        case = norm_case(op, Make(device, torch.float32), (3, 4, 40), modulation="[B, S, H]")
        permuted = case.map(lambda t: place(t, "permuted"))
        assert not permuted.kwargs["input"].is_contiguous()
        for output in check(ltx, permuted):
            assert output.is_contiguous()
    for name in ("swiglu", "geglu tanh", "gelu erf"):
        case = activation_case(name, Make(device, torch.float32), (3, 4, 40))
        (output,) = check(ltx, case.in_layout("permuted"))
        assert output.is_contiguous()
        # A transposed matrix: even the last dimension is strided.
        case = case.replace(input=case.kwargs["input"][0].t().contiguous().t())
        (output,) = check(ltx, case)
        assert output.is_contiguous()


def test_rotary_of_a_sliced_qkv_view(ltx, device):
    """Split heads of a packed projection [B, S, 3, H, D], taken as [B, H, S, D] views."""
    make = Make(device, torch.bfloat16)
    packed = make(2, 6, 3, 4, 16)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    cos, sin = make(2, 4, 6, 8), make(2, 4, 6, 8)
    case = Case("apply_rotary_qk", {"query": q, "key": k, "cos": cos, "sin": sin, "sequence_dim": 2, "layout": "half"})
    outputs = check(ltx, case)
    dense = case.replace(query=q.contiguous(), key=k.contiguous()).run(ltx)
    for output, want in zip(outputs, dense, strict=True):
        assert_same_bits(output.contiguous(), want)
    before = v.clone()
    ltx.apply_rotary_qk(q, k, cos, sin, sequence_dim=2, layout="half", out=(q, k))
    assert_same_bits(q.contiguous(), dense[0])
    assert torch.equal(v, before)


@pytest.mark.parametrize(("apart", "tokens"), [(2**31 + 64, 2), (2**30 + 64, 3)])
def test_row_offsets_above_int32(ltx, device, apart, tokens):
    """The last token lies more than 2^31 elements after the first; each two of them do, or do not."""
    shape = (1, tokens, 2, 32)
    try:
        flat = torch.empty((tokens - 1) * apart + 64, dtype=torch.float16, device=device)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        pytest.skip(f"not enough memory: {error}")
    make = Make(device, torch.float16)
    case = rotary_case(make, shape)
    expected = case.run(ltx)[0]
    far = flat.as_strided(shape, (64, apart, 32, 1))
    far.copy_(case.kwargs["input"])
    assert_same_bits(case.replace(input=far).run(ltx)[0].contiguous(), expected)


@pytest.mark.parametrize("across_heads", [True, False])
def test_zero_row_in_norm_and_rope_is_zero(ltx, device, across_heads):
    """No eps made 0 / 0."""
    make = Make(device, torch.bfloat16)
    case = qk_norm_rope_case(make, (1, 3, 2, 16), across_heads=across_heads)
    case.kwargs["query"].zero_()
    query, key = case.run(ltx)
    assert bool((query == 0).all())
    assert bool(key.isfinite().all())


def test_norm_and_rope_eps_is_an_argument(ltx, device):
    """A hard-coded eps would make all of these equal."""
    case = qk_norm_rope_case(Make(device, torch.float32), (1, 3, 2, 16), across_heads=True)
    case.kwargs["query"] *= 0.01
    results = [check(ltx, case.replace(eps=eps))[0] for eps in (1e-6, 1e-5, 1e-2, 0.3)]
    for a, b in itertools.pairwise(results):
        assert not torch.equal(a, b)


@pytest.mark.parametrize("table", ["[1, S, D/2]", "[1, H, S, D/2]", "[1, S, 1, D]", "[1, S, H*D]"])
def test_table_of_one_batch_serves_all(ltx, device, table):
    """B = 1 in the table beside B = 2 read past its end. NaN stands there."""
    make = Make(device, torch.float32)
    for case in (
        rotary_case(make, (3, 5, 2, 8), table=table),
        qk_norm_rope_case(make, (3, 5, 2, 8), across_heads=True, table=table),
    ):
        guarded = case.replace(cos=place(case.kwargs["cos"], "misaligned"), sin=place(case.kwargs["sin"], "misaligned"))
        check(ltx, guarded)


@pytest.mark.parametrize("op", NORM_OPS)
def test_fp32_parameters_beside_bf16_input(ltx, device, op):
    """fp32 weights were read as if they were bf16."""
    make = Make(device, torch.bfloat16)
    check(ltx, norm_case(op, make, (2, 3, 256), param_dtype=torch.float32, modulation_dtype=torch.float32))


def test_scale_per_token(ltx, device):
    """[B, S, H] was read as [B, H]."""
    make = Make(device, torch.float32)
    x, scale, shift = make(2, 3, 40), make(2, 3, 40), make(2, 3, 40)
    truth = F.rms_norm(x.double(), (40,), None, 1e-6) * (1 + scale.double()) + shift.double()
    assert_close_to_fp64(ltx.adaln_rmsnorm(x, None, scale, shift), truth, truth.abs() + 2 * shift.double().abs())


def test_scale_of_one_batch_serves_all(ltx, device):
    """[1, H] beside B > 1 read out of bounds. NaN stands there."""
    make = Make(device, torch.float32)
    for op in ("adaln_rmsnorm", "adaln_layernorm", "adaln_zero", "gated_residual", "gated_residual_adaln_rmsnorm"):
        check(ltx, norm_case(op, make, (3, 5, 40), modulation="one for all batches").in_layout("misaligned"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_unsupported_dtype_is_an_error(ltx, device, dtype):
    """An uninitialised output came back."""
    make = Make(device, torch.float32)
    for case in every_op(make).values():
        spoiled = case.map(lambda tensor: tensor.to(dtype))
        with pytest.raises(RuntimeError, match=r"expected .*dtype"):
            spoiled.run(ltx)


@pytest.mark.parametrize("op", NORM_OPS)
def test_out_is_written_and_returned(ltx, device, op):
    """`out` was ignored, or bound to a new tensor."""
    check_out(ltx, norm_case(op, Make(device, torch.bfloat16), (2, 3, 40)), "contiguous")


def test_out_of_rotary_and_activations_is_written_and_returned(ltx, device):
    make = Make(device, torch.bfloat16)
    check_out(ltx, rotary_case(make, (2, 3, 2, 8)), "contiguous")
    check_out(ltx, rotary_case(make, (2, 3, 2, 8), key=(3, 1)), "contiguous")
    check_out(ltx, qk_norm_rope_case(make, (2, 3, 2, 8), across_heads=True), "contiguous")
    check_out(ltx, rope_case(make, (2, 2, 8), sequence=3), "contiguous")
    for name in ("swiglu", "geglu tanh", "gelu erf", "gelu tanh, bias"):
        check_out(ltx, activation_case(name, make, (2, 3, 8)), "contiguous")


@pytest.mark.parametrize("width", [33, 65, 127, 129, 255, 511, 513, 1023, 1025, 1985])
def test_odd_row_lengths(ltx, device, width):
    """Shared memory was sized for fewer threads than ran."""
    for op in ("rmsnorm", "layernorm", "gated_residual_adaln_layernorm"):
        for dtype in DTYPES:
            check(ltx, norm_case(op, Make(device, dtype), (3, width)))


@pytest.mark.parametrize("offset", range(1, 8))
def test_misaligned_views(ltx, device, offset):
    """16-byte loads at addresses that are not multiples of 16 fault."""
    for dtype in DTYPES:
        make = Make(device, dtype)
        flat = make(2 * 264 + 8)
        x = flat[offset : offset + 2 * 264].view(2, 264)
        weight = make(272)[offset : offset + 264]
        check(ltx, Case("rmsnorm", {"input": x, "weight": weight}))
        check(ltx, Case("swiglu", {"input": x}))
        cos, sin = (make(3 * 64 + 8, dtype=torch.float32)[offset : offset + 3 * 64].view(3, 64) for _ in range(2))
        q = flat[offset : offset + 2 * 3 * 64].view(1, 3, 2, 64)
        check(ltx, Case("apply_rotary", {"input": q, "cos": cos, "sin": sin}))


def test_empty_tensors(ltx, device):
    """Division by zero, or a grid of no blocks."""
    for dtype in DTYPES:
        make = Make(device, dtype)
        for op in NORM_OPS:
            for shape in ((0, 3, 40), (2, 0, 40), (2, 3, 0)):
                for output in norm_case(op, make, shape).run(ltx):
                    assert output.shape == shape
        for shape in ((0, 40), (3, 0)):
            assert activation_case("swiglu", make, shape).run(ltx)[0].shape == shape
        assert rope_case(make, (0, 2, 8), sequence=3).run(ltx)[0].shape == (0, 3, 2, 8)
        assert rope_case(make, (2, 2, 8), sequence=0).run(ltx)[0].shape == (2, 0, 2, 8)


def test_more_than_2_31_elements(ltx, cuda):
    """Element counts past int32: the last rows of one large tensor against the same rows alone."""
    width = 4096
    rows = 2**31 // width + 2
    try:
        x = torch.empty(rows, width, dtype=torch.bfloat16, device=cuda)
        out = torch.empty_like(x)
    except torch.OutOfMemoryError as error:
        pytest.skip(f"not enough memory: {error}")
    x.fill_(0.5)
    x[-4:] = Make(cuda, torch.bfloat16)(4, width)
    ltx.rmsnorm(x, out=out)
    assert_same_bits(out[-4:], ltx.rmsnorm(x[-4:]))
    assert_same_bits(out[: rows - 4 : 50000], ltx.rmsnorm(x[: rows - 4 : 50000]))


def test_bfloat16_does_something(ltx, device):
    """On sm_75 the bf16 path of a fused q/k-norm + rope did silently nothing."""
    make = Make(device, torch.bfloat16)
    case = qk_norm_rope_case(make, (1, 3, 2, 64), across_heads=False)
    outputs = check(ltx, case)
    for output, like in zip(outputs, case.inputs, strict=True):
        assert not torch.equal(output, like)
    # Written in place, the input is no longer what it was.
    before = [tensor.clone() for tensor in case.inputs]
    case.run(ltx, out=case.inputs)
    for tensor, old, want in zip(case.inputs, before, outputs, strict=True):
        assert not torch.equal(tensor, old)
        assert_same_bits(tensor, want)


@pytest.mark.parametrize("op", ["rmsnorm", "layernorm", "gated_residual_adaln_rmsnorm"])
def test_number_of_rows_changes_no_bit(ltx, device, op):
    """The launch geometry was chosen by the number of rows, and with it the order of the sums."""
    for width in (96, 2048, 5120):
        case = norm_case(op, Make(device, torch.float32), (700, width), modulation="[B, S, H]")
        expected = case.run(ltx)
        for rows in (1, 2, 7, 64, 300):
            part = case.map(lambda t, rows=rows: t[:rows] if t.dim() == 2 else t)
            for output, want in zip(part.run(ltx), expected, strict=True):
                assert_same_bits(output, want[:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_variance_with_a_large_mean(ltx, device, dtype):
    """E[x^2] - mean^2 in fp32 has no correct digit here, or is negative."""
    x = Make(device, torch.float32)(4, 2048) * 0.5 + 4096
    x = (x * 8).round() / 8 if dtype == torch.float32 else (x / 16).round() * 16
    x[:, :64] += 32
    x = x.to(dtype)
    naive = x.float().square().mean(-1) - x.float().mean(-1).square()
    truth = F.layer_norm(x.double(), (2048,), None, None, 1e-6)
    rstd = torch.rsqrt(x.double().var(-1, unbiased=False, keepdim=True) + 1e-6)
    terms = (x.double().abs() + x.double().abs().mean(-1, keepdim=True)) * rstd
    assert bool(((naive - x.double().var(-1, unbiased=False)).abs() > 0.01 * x.double().var(-1)).any())
    assert_close_to_fp64(ltx.layernorm(x, eps=1e-6), truth, terms)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_eager_weight_multiplies_the_rounded_row(ltx, device, dtype):
    """Llama's and diffusers' order: cast, then times weight. The sum of squares is 3 a column, whatever its order."""
    make = Make(device, dtype)
    x = make.integers(5, 512, low=0, high=2) * 2 - 1
    x[:, ::4] *= 3
    for weight_dtype in DTYPES:
        weight = make(512, dtype=weight_dtype, mean=1.0)
        case = Case("rmsnorm", {"input": x, "weight": weight, "eps": 0.0, "rounding": "eager"})
        row = (x.float() * torch.rsqrt(torch.tensor(3.0, device=device))).to(dtype)
        assert_same_bits(case.run(ltx)[0], (row * weight).to(dtype), f"weight of {weight_dtype}")
        at_once = (x.float() * torch.rsqrt(torch.tensor(3.0, device=device)) * weight.float()).to(dtype)
        assert not torch.equal(case.run(ltx)[0], at_once)


def test_capture_of_every_function(ltx, cuda_graphs):
    """cudaMalloc or cudaFuncSetAttribute at every launch breaks graph capture, the first call included."""
    make = Make(cuda_graphs, torch.bfloat16)
    calls = list(every_op(make).values())
    calls += [norm_case(op, make, (2, 3, 2048)) for op in NORM_OPS]
    calls += [norm_case(op, make, (2, 3, 300000)) for op in ("rmsnorm", "layernorm", "adaln_zero")]
    calls += [activation_case(name, make, (6, 512)) for name in ("swiglu", "geglu tanh", "gelu tanh, bias")]
    calls += [
        rotary_case(make, (2, 3, 8, 64), key=(3, 2)),
        qk_norm_rope_case(make, (2, 3, 32, 64), across_heads=True),
        qk_norm_rope_case(make, (2, 3, 32, 64), across_heads=False),
        rope_case(make, (2, 8, 64), grid=(1, 3, 2)),
        attention_case(make, (2, 3, 8, 64), 9, mask="left out"),
    ]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [case.run(ltx) for case in calls]
    graph.replay()
    torch.cuda.synchronize()
    for case, outputs in zip(calls, captured, strict=True):
        for output, want in zip(outputs, case.run(ltx), strict=True):
            assert_same_bits(output, want, case.op)


def test_fakes_of_any_rank(ltx, device):
    """A fake that knows two dimensions only: shapes, dtypes and strides are those of the real op for every rank."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    make = Make(device, torch.bfloat16)
    calls = [
        norm_case(op, make, shape, modulation="vector")
        for op in NORM_OPS
        for shape in ((8,), (2, 8), (2, 3, 8), (2, 3, 4, 8), (2, 1, 3, 1, 8))
    ]
    calls += [activation_case(name, make, shape) for name in ("swiglu", "gelu erf") for shape in ((8,), (2, 3, 4, 8))]
    calls += [
        rotary_case(make, (2, 3, 4, 8)).in_layout("permuted"),
        rotary_case(make, (2, 3, 4, 8), key=(5, 2)),
        qk_norm_rope_case(make, (2, 3, 4, 8), across_heads=True).in_layout("permuted"),
        rope_case(make, (2, 4, 8), sequence=3),
        rope_case(make, (2, 4, 8), grid=(1, 3, 1)),
    ]
    for case in calls:
        expected = case.run(ltx)
        with FakeTensorMode() as mode:
            fakes = case.map(mode.from_tensor).run(ltx)
        for fake, real in zip(fakes, expected, strict=True):
            assert fake.shape == real.shape, case.op
            assert fake.dtype == real.dtype, case.op
            assert fake.stride() == real.stride(), case.op


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", ["rmsnorm", "rmsnorm_residual", "gelu", "apply_rotary", "group_norm", "attention"])
def test_out_counts_as_a_write(ltx, device, name):
    """Autograd raises where a tensor that it has saved was written to, as after `torch.mul(out=)`."""
    x = torch.randn(1, 4, 8, 16, device=device)
    arguments = {
        "rmsnorm_residual": (x, x.clone()),
        "apply_rotary": (x, torch.ones(4, 16, device=device), torch.zeros(4, 16, device=device)),
        "group_norm": (x, 2),
        "attention": (x, x, x),
    }.get(name, (x,))
    options = {"out": torch.empty_like(x)}
    if name == "rmsnorm_residual":
        options["residual_out"] = torch.empty_like(x)
    if name == "group_norm":
        options["out"] = options["out"].to(memory_format=torch.channels_last)
    getattr(ltx, name)(*arguments, **options)
    assert all(out._version == 1 for out in options.values())
    saved = torch.ones_like(options["out"], requires_grad=True) * 1
    result = saved.sin().sum()
    with torch.no_grad():
        getattr(ltx, name)(*arguments, **{**options, "out": saved})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()
    with torch.inference_mode():  # such tensors have no version
        getattr(ltx, name)(*arguments, **{name: torch.empty_like(out) for name, out in options.items()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_no_formula(ltx, device, dtype):
    """What plain torch computes, since no kernel does or a gradient is needed, has the same bits."""
    q, k, v = (torch.randn(1, 64, 2, 64, device=device) for _ in range(3))
    needed = q.clone().requires_grad_()
    calls = [
        lambda: ltx.attention(q, k, v, return_lse=True)[1],
        lambda: ltx.qk_norm_cross_attention(needed, k, v, None, None),
    ]
    for call in calls:
        expected = call()
        with torch.autocast(device, dtype):
            assert_same_bits(call(), expected)


def test_no_queries_and_gradients_of_the_keys(ltx, device):
    for batch, queries in ((1, 0), (0, 3)):
        query, key = torch.randn(batch, queries, 2, 8, device=device), torch.randn(batch, 4, 2, 8, device=device)
        key.requires_grad_()
        ltx.attention(query, key, key).sum().backward()
        assert key.grad is not None and not key.grad.any()


def test_gradients_of_each_sample_of_group_norm(ltx, device):
    x = torch.randn(3, 2, 8, 4, 4, device=device)

    def gradients(norm):
        return torch.func.vmap(torch.func.grad(lambda sample: norm(sample, 2).sin().sum()))(x)

    torch.testing.assert_close(gradients(ltx.group_norm), gradients(F.group_norm), rtol=1e-4, atol=1e-4)


def test_sizes_whose_product_is_too_large(ltx, device):
    q = torch.randn(1, 5, 2, 8, device=device)
    with pytest.raises(RuntimeError, match="query: expected a sequence of"):
        ltx.rope_3d(q, q, 1, 3, 6148914691236517207)
    with pytest.raises(RuntimeError, match="rope_dims: expected a sum of 8"):
        ltx.rope_3d(q, q, 1, 1, 5, rope_dims=(2**63 - 2, 2**63 - 2, 12))
