"""The ops on channels-last video against plain torch, which rounds at the same places, and against fp64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import DTYPES, Make
from helpers.channels_last import LAYOUTS, NORMS, Video

# Channels that take the kernels for whole packs with one to four packs a lane, and those that do not.
CHANNELS = [1, 7, 8, 12, 48, 96, 128, 200, 256, 384, 512, 1024, 2048]
EVERYTHING = ("bias", "noise", "residual", "weight", "modulation", "tables")


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("channels", CHANNELS)
def test_channel_norm(ltx, device, channels, norm, dtype):
    options = {"norm": norm, "operands": EVERYTHING, "silu": True, "given_out": True}
    Video("channel_norm", (2, 3, 4, 5), channels, dtype, padding=(1, 1), **options).check(ltx, device)
    options |= {"in_place": "input", "eps": 0.25}
    Video("channel_norm_residual", (1, 2, 3, 2), channels, dtype, reflect=True, **options).check(ltx, device)


@pytest.mark.parametrize("operands", [c for n in range(4) for c in itertools.combinations(EVERYTHING[:5], n)], ids=str)
def test_operands(ltx, device, operands):
    for op in ("channel_norm", "channel_norm_residual"):
        Video(op, (2, 2, 3, 3), 64, torch.bfloat16, operands=operands).check(ltx, device)


@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (2, 0), (0, 3)])
@pytest.mark.parametrize("reflect", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 2, 2), (2, 3, 2, 3), (1, 2, 5, 4), (3, 1, 3, 7)])
def test_padding(ltx, device, sizes, reflect, padding):
    """What lies in the padding is a copy of the result without it."""
    make = Make(device, torch.bfloat16)
    batch, frames, height, width = sizes
    for channels in (5, 24):
        x = make(batch, channels, frames, height, width).to(memory_format=torch.channels_last_3d)
        plain = ltx.channel_norm(x, activation="silu")
        padded = torch.cat([plain[:, :, :1]] * padding[0] + [plain] + [plain[:, :, -1:]] * padding[1], 2)
        if reflect:
            padded = F.pad(padded, (1, 1, 1, 1, 0, 0), mode="reflect")
        result = ltx.channel_norm(x, activation="silu", padding=padding, reflect=reflect)
        assert torch.equal(result, padded)
        assert result.is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["channel_norm", "channel_norm_residual", "pixel_shuffle_3d", "unpatchify"])
def test_any_layout(ltx, device, op, layout):
    for channels in (3, 16):
        video = Video(op, (2, 3, 4, 5), channels, torch.float32, operands=("bias", "residual"), layout=layout)
        video.check(ltx, device)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("upscale", [(2, 2, 2), (1, 2, 2), (2, 1, 1), (1, 1, 2), (3, 1, 2), (1, 1, 1)])
@pytest.mark.parametrize("channels", [1, 6, 16, 128])
def test_pixel_shuffle_3d(ltx, device, channels, upscale, dtype):
    """Every element keeps its bits: the additions round as plain torch's do."""
    for skip, parts in ((0, 1), (1, 2)):
        skip = min(skip, upscale[0] - 1)
        video = Video(
            "pixel_shuffle_3d", (2, 3, 2, 5), channels, dtype, operands=("bias", "residual"), upscale=upscale,
            skip_frames=skip, residual_parts=parts,
        )  # fmt: skip
        arguments, keywords = video.arguments(device)
        result = ltx.pixel_shuffle_3d(*arguments, **keywords)
        assert torch.equal(result, ltx.reference.pixel_shuffle_3d(*arguments, **keywords))
        assert torch.equal(result, ltx.pixel_shuffle_3d(*arguments, **keywords, out=torch.empty_like(result)))


def test_pixel_shuffle_is_torchs(ltx, device):
    """Of single frames it is torch.nn.functional.pixel_shuffle."""
    x = Make(device, torch.float32)(2, 24, 1, 3, 5)
    assert torch.equal(ltx.pixel_shuffle_3d(x, (1, 2, 2))[:, :, 0], F.pixel_shuffle(x[:, :, 0], 2))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("patch", [1, 2, 3, 4])
def test_unpatchify(ltx, device, patch, dtype):
    make = Make(device, dtype)
    x, bias = make(2, 3 * patch**2, 3, 4, 5), make(3 * patch**2)
    result = ltx.unpatchify(x, patch, bias=bias)
    assert result.is_contiguous() and torch.equal(result, ltx.reference.unpatchify(x, patch, bias=bias))
    wanted = torch.empty(2, 3, 3, 4 * patch, 5 * patch, dtype=dtype, device=device)
    for j, k in itertools.product(range(patch), repeat=2):
        wanted[..., j::patch, k::patch] = (x + bias[:, None, None, None])[:, k * patch + j :: patch**2]
    assert torch.equal(result, wanted)
    x[0, 0, 0, 0, 0] = torch.nan
    clamped, limited = ltx.unpatchify(x, patch, clamp=True), ltx.reference.unpatchify(x, patch).clamp(-1, 1)
    assert torch.equal(clamped.nan_to_num(7), limited.nan_to_num(7))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_silu_of_every_number(ltx, device, dtype):
    """The bits of torch's SiLU: on a GPU for every 16-bit number, on the CPU within a step."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    x = numbers.view(1, 8, 1, 64, 128).contiguous(memory_format=torch.channels_last_3d)
    result, wanted = ltx.channel_norm(x, norm="none", activation="silu"), F.silu(x)
    same = (result == wanted) | (result.isnan() & wanted.isnan())
    if device == "cuda":
        assert same.all()
    else:
        assert same.float().mean() > 0.999
        finite = ~same & wanted.isfinite()
        assert ((result - wanted).double().abs()[finite] <= 2**-7 * wanted.double().abs()[finite] + 1e-7).all()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("channels", [7, 64])
def test_nan_and_infinity_stay_in_their_voxel(ltx, device, channels, special, norm):
    """They make of their voxel what they make of it in plain torch, and nothing of any other."""
    for dtype in DTYPES:
        x = Make(device, dtype)(1, channels, 2, 2, 3).to(memory_format=torch.channels_last_3d)
        clean = ltx.channel_norm(x, norm=norm)
        x[0, 3, 1, 0, 2] = special
        result, wanted = ltx.channel_norm(x, norm=norm), ltx.reference.channel_norm(x, norm=norm)
        voxel = result[0, :, 1, 0, 2].clone()
        assert torch.equal(voxel.isnan(), wanted[0, :, 1, 0, 2].isnan())
        assert torch.equal(voxel.isinf(), wanted[0, :, 1, 0, 2].isinf())
        result[0, :, 1, 0, 2] = clean[0, :, 1, 0, 2]
        assert torch.equal(result, clean)


def test_empty(ltx, device):
    for shape in ((0, 8, 2, 3, 3), (1, 0, 2, 3, 3), (1, 8, 0, 3, 3), (1, 8, 2, 0, 3)):
        x = torch.empty(shape, device=device)
        assert ltx.channel_norm(x, padding=(1, 1)).numel() == 0
        out, h = ltx.channel_norm_residual(x, x)
        assert out.shape == h.shape == shape
        assert ltx.pixel_shuffle_3d(x, (2, 2, 2), skip_frames=1).numel() == 0
        assert ltx.unpatchify(x, 2).numel() == 0


def test_gradients(ltx, device):
    """A call that needs a gradient runs the reference: its gradients are those of fp64, up to fp32's error."""
    make = Make(device, torch.float32)
    x, residual, scale = make(1, 6, 2, 3, 3), make(1, 6, 2, 3, 3), make(1, 6)

    def loss(f: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (x, residual, scale)]
        y, h = f.channel_norm_residual(
            leaves[0], leaves[1], scale=leaves[2], shift=leaves[2], activation="silu", padding=(1, 1), reflect=True
        )
        wide = torch.cat([h] * 4, 1)
        z = f.pixel_shuffle_3d(wide, (2, 2, 2), skip_frames=1).sum() * 0.3 + f.unpatchify(wide, 2).square().sum()
        return list(torch.autograd.grad(y.square().sum() + z, leaves))

    for got, wanted in zip(loss(ltx, torch.float32), loss(ltx.reference, torch.float64)):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


def test_out_with_a_gradient_is_an_error(ltx, device):
    x = torch.ones(1, 8, 1, 2, 2, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="out: expected no gradient"):
        ltx.channel_norm(x, out=torch.empty_like(x))


def test_outputs_that_overlap_are_an_error(ltx, device):
    make = Make(device, torch.float32)
    x = make(1, 8, 2, 3, 3).to(memory_format=torch.channels_last_3d)
    with pytest.raises(RuntimeError, match="out: expected memory apart from that of input, got an overlap"):
        ltx.channel_norm(x, out=x)
    both = torch.empty_like(x)
    with pytest.raises(RuntimeError, match="residual_out: expected memory apart from that of out"):
        ltx.channel_norm_residual(x, out=both, residual_out=both)
    with pytest.raises(RuntimeError, match="out: expected channels-last memory"):
        ltx.channel_norm(x, out=torch.empty(x.shape, device=device))
    with pytest.raises(RuntimeError, match="out: expected contiguous memory"):
        ltx.unpatchify(make(1, 12, 2, 3, 3), 2, out=torch.empty(1, 3, 2, 6, 6, device=device).transpose(3, 4))


def test_one_output_given(ltx, device):
    x = Make(device, torch.bfloat16)(1, 8, 2, 3, 3).to(memory_format=torch.channels_last_3d)
    wanted = ltx.channel_norm_residual(x, x, padding=(1, 1), reflect=True)
    for name, index in (("out", 0), ("residual_out", 1)):
        given = torch.empty_like(wanted[index])
        got = ltx.channel_norm_residual(x, x, padding=(1, 1), reflect=True, **{name: given})
        assert got[index] is given and torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])


def test_unknown_choices(ltx, device):
    x = torch.ones(1, 8, 1, 2, 2, device=device)
    with pytest.raises(ValueError, match='norm: expected "none" or "rms" or "rms_stepwise" or "l2", got \'layer\''):
        ltx.channel_norm(x, norm="layer")
    with pytest.raises(ValueError, match='activation: expected "none" or "silu", got \'gelu\''):
        ltx.channel_norm(x, activation="gelu")


def test_compiles(ltx, device):
    """Without a graph break, with the layouts that the fakes promise."""
    make = Make(device, torch.float32)
    x, wide = make(1, 8, 3, 4, 4), make(1, 64, 3, 4, 4)

    def chain(x: torch.Tensor, wide: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, h = ltx.channel_norm_residual(x, x, activation="silu", padding=(1, 1), reflect=True)
        z = ltx.pixel_shuffle_3d(wide, (2, 2, 2), residual=wide, skip_frames=1)
        return ltx.channel_norm(y) + 1, h * 2, z - 1, ltx.unpatchify(wide, 4) * 2

    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")(x, wide)
    for got, wanted in zip(compiled, chain(x, wide)):
        assert torch.equal(got, wanted) and got.stride() == wanted.stride()
