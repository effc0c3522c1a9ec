"""group_norm, group_norm_residual and upsample_nearest against fp64 and against the chain of plain torch ops."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Make, assert_same_bits, torch_threads
from helpers.cases import DTYPES
from helpers.channels_last import LAYOUTS, order_of
from helpers.group_norm import OPERANDS, OPS, Image, assert_close_to_silu

EVERYTHING = tuple(OPERANDS)
# Groups of 1 to 32 channels, in packs of 16 bytes that are parts of a group, groups, and neither; channels that are no
# whole packs; groups of more channels than one part has, in whole packs (512, 320) and not (1001).
SHAPES = [
    (32, 32), (64, 32), (96, 32), (128, 32), (160, 32), (256, 32), (320, 32), (384, 32), (512, 32), (1024, 32),
    (128, 8), (96, 8), (64, 1), (512, 1), (320, 2), (64, 64), (104, 8), (7, 7), (30, 5), (1001, 1), (36, 12),
]  # fmt: skip
# The last pixels of a chunk of 256, and the first ones of the next.
PIXELS = [(1, 1), (1, 3), (31, 3), (255, 1), (16, 16), (257, 1), (64, 31)]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels, groups", SHAPES)
def test_group_norm(ltx, device, channels, groups, dtype):
    options: dict[str, Any] = {"operands": EVERYTHING, "silu": True, "given_out": True}
    Image("group_norm", (2, 17, 16), channels, groups, dtype, **options).check(ltx, device)
    options |= {"in_place": "input", "eps": 0.3, "per_image": True}
    Image("group_norm_residual", (2, 3, 5, 7), channels, groups, dtype, **options).check(ltx, device)


@pytest.mark.parametrize("pixels", PIXELS, ids=str)
@pytest.mark.parametrize("channels, groups", [(96, 32), (128, 32), (6, 2), (160, 1)])
def test_pixels(ltx, device, channels, groups, pixels):
    for op, dtype in itertools.product(OPS[:2], (torch.float32, torch.bfloat16)):
        Image(op, (3, *pixels), channels, groups, dtype, EVERYTHING[:4], mean=2.0).check(ltx, device)


@pytest.mark.extended
@pytest.mark.parametrize("pixels", [(257, 129), (512, 512), (1024, 257), (1031, 521)], ids=str)
def test_many_chunks(ltx, device, pixels):
    """Up to 1024 chunks of 256 pixels, and chunks of more pixels."""
    for dtype in (torch.float32, torch.bfloat16):
        Image("group_norm_residual", (1, *pixels), 16, 4, dtype, EVERYTHING, mean=1.0).check(ltx, device)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mean", [0.0, 1.0, 10.0, 1000.0])
def test_mean_beside_deviation(ltx, device, mean, dtype):
    """The bound holds where a sum of squares in float32 would have no correct digit."""
    for channels, groups, pixels in ((128, 32, (64, 65)), (64, 8, (9, 7)), (8, 1, (300, 301)), (30, 5, (40, 50))):
        for op in OPS[:2]:
            Image(op, (2, *pixels), channels, groups, dtype, ("weight", "bias_norm"), mean=mean).check(ltx, device)


@pytest.mark.parametrize("place", ["first", "last", "first of a chunk"])
def test_outliers(ltx, device, place):
    """One pixel far from all others, also where the sums begin."""
    image = Image("group_norm", (1, 40, 40), 64, 32, torch.float32)
    given = image.arguments(device)
    x = given["input"].permute(0, 2, 3, 1).flatten(1, 2)
    x[:, {"first": 0, "last": -1, "first of a chunk": 256}[place]] = 100.0
    image.check_norm(ltx, given, given["input"], ltx.group_norm(**given))


@pytest.mark.parametrize("operands", [c for n in range(4) for c in itertools.combinations(EVERYTHING, n)], ids=str)
def test_operands(ltx, device, operands):
    for op, per_image in itertools.product(OPS, (False, True)):
        image = Image(op, (2, 5, 3), 64, 32, torch.bfloat16, operands, per_image, given_out=True)
        image.check(ltx, device)


@pytest.mark.parametrize("in_place", ["input", "residual"])
@pytest.mark.parametrize("op", OPS[:2])
@pytest.mark.parametrize("channels, groups", [(128, 32), (9, 3)])
def test_in_place(ltx, device, channels, groups, op, in_place):
    for dtype in DTYPES:
        Image(op, (2, 33, 20), channels, groups, dtype, EVERYTHING, in_place=in_place, silu=True).check(ltx, device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_any_layout(ltx, device, op, layout):
    for size in ((2, 4, 5), (2, 3, 4, 5)):
        for channels in (6, 16):
            options: dict[str, Any] = {"operands": EVERYTHING, "layout": layout, "given_out": True}
            Image(op, size, channels, 2, torch.float32, **options).check(ltx, device)
            Image(op, size, channels, 2, torch.bfloat16, **options).check(ltx, device)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pixels", [(3, 5), (16, 17), (70, 41)], ids=str)
@pytest.mark.parametrize("channels, groups", [(128, 32), (96, 32), (14, 7)])
def test_batch_changes_no_bit(ltx, device, channels, groups, pixels, dtype):
    """Nor does it matter how the pixels are arranged, or whether the sum is written."""
    image = Image("group_norm", (3, *pixels), channels, groups, dtype, EVERYTHING, silu=True, mean=3.0)
    given = image.arguments(device)
    together = ltx.group_norm(**given)
    for i in range(3):
        alone = {name: value[i : i + 1] if name in ("input", "residual") else value for name, value in given.items()}
        assert_same_bits(ltx.group_norm(**alone), together[i : i + 1], f"image {i} alone")
    frames = {name: given[name].unflatten(2, (1, -1)) for name in ("input", "residual")}
    assert_same_bits(ltx.group_norm(**{**given, **frames}).flatten(2, 3), together, "as a video")
    assert_same_bits(ltx.group_norm_residual(**given)[0], together, "beside the sum")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels, groups", [(128, 32), (24, 8), (14, 7)])
def test_alignment_changes_no_bit(ltx, device, channels, groups, dtype):
    image = Image("group_norm_residual", (2, 33, 31), channels, groups, dtype, EVERYTHING, silu=True)
    misaligned = dataclasses.replace(image, layout="misaligned")
    for got, wanted in zip(misaligned.run(ltx, device), image.run(ltx, device)):
        assert_same_bits(got, wanted, "of memory that is not aligned")
    dataclasses.replace(misaligned, in_place="input").check(ltx, device)


def test_threads_change_no_bit(ltx, device):
    image = Image("group_norm_residual", (2, 130, 67), 96, 32, torch.float32, EVERYTHING, silu=True)
    results = []
    for count in (1, 2, 5):
        with torch_threads(count):
            results.append(image.run(ltx, device))
    for result in results[1:]:
        for got, wanted in zip(result, results[0]):
            assert_same_bits(got, wanted, "with more threads")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_groups_of_equal_numbers(ltx, device, dtype, eps):
    """The variance is zero: the result is the norm's bias, up to the rounding of the shift."""
    for channels, groups, pixels in ((64, 32, (1, 1)), (64, 4, (300, 3)), (6, 3, (17, 5))):
        make = Make(device, dtype)
        x = make(2, groups).repeat_interleave(channels // groups, 1)[..., None, None].expand(-1, -1, *pixels)
        weight, bias = make(channels), make(channels)
        result = ltx.group_norm(x, groups, weight, bias, eps)
        rounding = 2.0**-22 * (x.double().abs() * eps**-0.5 * weight.double().abs()[:, None, None])
        allowed = rounding + torch.finfo(dtype).eps * bias.double().abs()[:, None, None]
        assert ((result.double() - bias.double()[:, None, None]).abs() <= allowed).all()


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("channels, groups", [(64, 32), (96, 32), (14, 7), (512, 1)])
def test_nan_and_infinity_stay_in_their_group(ltx, device, channels, groups, special):
    """They make NaN of their group, as in torch, and change no bit of another group or image."""
    for dtype, pixel in itertools.product(DTYPES, ((0, 0), (16, 2), (18, 16))):
        x = Make(device, dtype)(2, channels, 19, 17).to(memory_format=torch.channels_last)
        clean = ltx.group_norm(x, groups, activation="silu")
        x[(1, channels // 2, *pixel)] = special
        result = ltx.group_norm(x, groups, activation="silu")
        hit = channels // 2 // (channels // groups)
        parts, unhurt = result.unflatten(1, (groups, -1)), clean.unflatten(1, (groups, -1))
        assert parts[1, hit].isnan().all()
        parts[1, hit] = unhurt[1, hit]
        assert_same_bits(result, clean, f"other groups, {dtype}")


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [(2, 2), (1, 1), (1, 3), (3, 2)], ids=str)
@pytest.mark.parametrize("channels", [1, 6, 16, 128, 192])
def test_upsample_nearest(ltx, device, channels, scale, dtype):
    for size, operands in (((2, 3, 5), EVERYTHING), ((2, 2, 3, 4), ("bias",)), ((1, 1, 1), ())):
        image = Image("upsample_nearest", size, channels, 1, dtype, operands, scale=scale, given_out=True)
        image.check(ltx, device)


def test_upsample_nearest_is_torchs(ltx, device):
    x = Make(device, torch.float16)(2, 24, 7, 5)
    assert torch.equal(ltx.upsample_nearest(x, (2, 3)), F.interpolate(x, scale_factor=(2, 3), mode="nearest"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_like_torch(ltx, device, dtype):
    """torch's own group norm differs in few elements, by a step; in float32 each of both may err by four."""
    x = Make(device, dtype)(2, 64, 24, 25, mean=0.5)
    weight, bias = Make(device, dtype, 1)(64), Make(device, dtype, 2)(64)
    result, wanted = ltx.group_norm(x, 32, weight, bias), F.group_norm(x, 32, weight, bias, 1e-6)
    step = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 1)
    torch.testing.assert_close(result, wanted, rtol=step, atol=step)
    silu = ltx.group_norm(x, 32, weight, bias, activation="silu")
    assert_close_to_silu(silu, result)
    assert not torch.equal(silu, result)


def test_empty(ltx, device):
    for shape in ((0, 8, 3, 3), (1, 0, 3, 3), (1, 8, 0, 3), (1, 8, 2, 3, 0)):
        x = torch.empty(shape, device=device)
        assert ltx.group_norm(x, 4).shape == shape
        out, h = ltx.group_norm_residual(x, 4, residual=x)
        assert out.shape == h.shape == shape
        assert ltx.upsample_nearest(x, (2, 2)).shape == (*shape[:-2], 2 * shape[-2], 2 * shape[-1])


def test_gradients(ltx, device):
    """A call that needs a gradient runs the reference: its gradients are those of fp64, up to fp32's error."""
    make = Make(device, torch.float32)
    tensors = make(2, 6, 4, 3), make(2, 6, 4, 3), make(2, 6), make(6), make(6)

    def loss(f: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        x, residual, bias, weight, bias_norm = leaves
        options: dict[str, Any] = {"bias": bias, "residual": residual, "activation": "silu"}
        y, h = f.group_norm_residual(x, 3, weight, bias_norm, **options)
        z = f.upsample_nearest(f.group_norm(h, 2), (1, 2), residual_bias=bias_norm)
        return list(torch.autograd.grad((y * y).sum() + (z.flatten(1)[:, ::3] ** 2).sum(), leaves))

    for got, wanted in zip(loss(ltx, torch.float32), loss(ltx.reference, torch.float64)):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


def test_out_with_a_gradient_is_an_error(ltx, device):
    x = torch.ones(1, 8, 2, 2, device=device, requires_grad=True)
    for call in (lambda out: ltx.group_norm(x, 2, out=out), lambda out: ltx.upsample_nearest(x, (1, 1), out=out)):
        with pytest.raises(RuntimeError, match="out: expected no gradient"):
            call(torch.empty_like(x, memory_format=torch.channels_last))


def test_outputs_that_overlap_are_an_error(ltx, device):
    make = Make(device, torch.float32)
    x = make(2, 8, 3, 3).to(memory_format=torch.channels_last)
    both = torch.empty_like(x)
    with pytest.raises(RuntimeError, match="residual_out: expected memory apart from that of out"):
        ltx.group_norm_residual(x, 2, out=both, residual_out=both)
    flat = make(2 * 8 * 9 + 8)
    shifted = [flat[i : i + 144].view(2, 3, 3, 8).permute(0, 3, 1, 2) for i in (0, 8)]
    with pytest.raises(RuntimeError, match="out: expected exactly the memory of input or none of it"):
        ltx.group_norm(shifted[0], 2, out=shifted[1])
    with pytest.raises(RuntimeError, match="out: expected memory apart from that of weight"):
        ltx.group_norm(x, 2, flat[:8], out=shifted[0])
    with pytest.raises(RuntimeError, match="out: expected memory apart from that of input"):
        ltx.upsample_nearest(x, (1, 1), out=x)
    with pytest.raises(RuntimeError, match=r"out: expected channels-last memory \(torch.channels_last\)"):
        ltx.group_norm(x, 2, out=torch.empty(x.shape, device=device))
    video = make(2, 8, 2, 3, 3)
    with pytest.raises(RuntimeError, match=r"out: expected channels-last memory \(torch.channels_last_3d\)"):
        ltx.upsample_nearest(video, (1, 1), out=torch.empty_like(video))


def test_one_output_given(ltx, device):
    for x in (Make(device, torch.bfloat16)(2, 8, 3, 3), Make(device, torch.bfloat16)(2, 8, 2, 3, 3)):
        wanted = ltx.group_norm_residual(x, 2, residual=x)
        for name, index in (("out", 0), ("residual_out", 1)):
            given = torch.empty_like(wanted[index])
            got = ltx.group_norm_residual(x, 2, residual=x, **{name: given})
            assert got[index] is given and torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
    with pytest.raises(RuntimeError, match=r"input: expected 4 or 5 dimensions, got shape \[8\]"):
        ltx.group_norm_residual(x.new_ones(8), 2, out=x)


def test_unknown_activation(ltx, device):
    with pytest.raises(ValueError, match='activation: expected "none" or "silu", got \'gelu\''):
        ltx.group_norm(torch.ones(1, 8, 2, 2, device=device), 2, activation="gelu")


def test_compiles(ltx, device):
    """Without a graph break, with the layouts that the fakes promise."""
    make = Make(device, torch.float32)

    def chain(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, h = ltx.group_norm_residual(x, 2, residual=x, activation="silu")
        return ltx.group_norm(y, 4) + 1, h * 2, ltx.upsample_nearest(y, (2, 1), bias=x.new_ones(8)) - 1

    for x in (make(2, 8, 4, 3), make(1, 8, 2, 4, 3)):
        compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")(x)
        for got, wanted in zip(compiled, chain(x)):
            assert torch.equal(got, wanted) and got.stride() == wanted.stride()
            assert got.is_contiguous(memory_format=order_of(x))


@pytest.mark.slow
def test_more_than_2_31_elements(ltx, cuda):
    channels, side = 32, 8200
    try:
        x = torch.empty(1, channels, side, side, dtype=torch.bfloat16, device=cuda, memory_format=torch.channels_last)
        x.normal_(3.0, generator=torch.Generator(cuda).manual_seed(1))
        y, h = ltx.group_norm_residual(x, 8, bias=x.new_zeros(channels))
        large = ltx.upsample_nearest(x[:, :, :4100], (2, 1))
    except torch.OutOfMemoryError as error:
        pytest.skip(f"not enough memory: {error}")
    assert torch.equal(h, x)
    for group in range(8):
        part = x[:, 4 * group : 4 * group + 4].double()
        variance, mean = torch.var_mean(part, correction=0)
        for rows in (slice(0, 8), slice(side // 2, side // 2 + 8), slice(-8, None)):
            wanted = (part[:, :, rows] - mean) * torch.rsqrt(variance + 1e-6)
            got = y[:, 4 * group : 4 * group + 4, rows].double()
            assert ((got - wanted).abs() <= 2.0**-8 * wanted.abs() + 1e-5).all()
    for row in (0, 4099, 8199):
        assert torch.equal(large[:, :, row], x[:, :, row // 2])
