"""Encoders and decoders of video autoencoders, optimized, against the stock modules: every released form."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.autoencoders import calls, close, error, reason_of
from torch import Tensor, nn

diffusers = pytest.importorskip("diffusers")

pytestmark = pytest.mark.usefixtures("one_thread")

LATENTS = 8
ENCODER = {
    "layers_per_block": (1,) * 5,
    "latent_channels": LATENTS,
    "decoder_causal": False,
    "spatial_compression_ratio": 32,
    "temporal_compression_ratio": 8,
}
LTX = {
    **ENCODER,
    "block_out_channels": (8, 16, 32, 64, 64),
    "down_block_types": ("LTXVideo095DownBlock3D",) * 4,
    "spatio_temporal_scaling": (True,) * 4,
    "downsample_type": ("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
    "decoder_block_out_channels": (8, 16, 32),
    "decoder_layers_per_block": (1, 2, 1, 1),
    "decoder_spatio_temporal_scaling": (True,) * 3,
    "decoder_inject_noise": (False,) * 4,
    "upsample_residual": (True,) * 3,
    "upsample_factor": (2, 2, 2),
    "timestep_conditioning": True,
}
LTX2 = {
    **ENCODER,
    "block_out_channels": (16, 32, 32, 64),
    "decoder_block_out_channels": (8, 16, 32),
    "decoder_layers_per_block": (1, 2, 1, 1),
}
WAN = {"base_dim": 8, "z_dim": LATENTS, "latents_mean": [0.0] * LATENTS, "latents_std": [1.0] * LATENTS}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "ltx 0.9.0": (
        "AutoencoderKLLTXVideo",
        {
            "block_out_channels": (8, 8, 16, 16),
            "layers_per_block": (1,) * 5,
            "latent_channels": LATENTS,
            "decoder_causal": False,
            "spatial_compression_ratio": 32,
            "temporal_compression_ratio": 8,
            "decoder_block_out_channels": (8, 8, 16, 16),
            "decoder_layers_per_block": (1, 1, 1, 1, 2),
            "decoder_spatio_temporal_scaling": (True, True, True, False),
            "decoder_inject_noise": (False,) * 5,
            "upsample_residual": (False,) * 4,
            "upsample_factor": (1,) * 4,
            "timestep_conditioning": False,
        },
    ),
    "ltx 0.9.1": ("AutoencoderKLLTXVideo", {**LTX, "decoder_inject_noise": (True, True, True, False)}),
    "ltx 0.9.5": ("AutoencoderKLLTXVideo", LTX),
    "ltx causal": (
        "AutoencoderKLLTXVideo",
        {**LTX, "decoder_causal": True, "encoder_causal": False, "timestep_conditioning": False},
    ),
    "ltx2 2.0": ("AutoencoderKLLTX2Video", LTX2),
    "ltx2 causal": (
        "AutoencoderKLLTX2Video",
        {**LTX2, "decoder_causal": True, "encoder_spatial_padding_mode": "reflect"},
    ),
    "ltx2 2.3": (
        "AutoencoderKLLTX2Video",
        {
            **LTX2,
            "decoder_block_out_channels": (8, 16, 16, 32),
            "decoder_layers_per_block": (1, 1, 1, 1, 1),
            "decoder_spatio_temporal_scaling": (True,) * 4,
            "decoder_inject_noise": (False,) * 5,
            "upsample_type": ("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
            "upsample_factor": (2, 2, 1, 2),
            "upsample_residual": (False,) * 4,
            "decoder_spatial_padding_mode": "zeros",
        },
    ),
    "wan 2.1": ("AutoencoderKLWan", WAN),
    "wan 2.2": (
        "AutoencoderKLWan",
        {
            **WAN,
            "is_residual": True,
            "in_channels": 12,
            "out_channels": 12,
            "patch_size": 2,
            "scale_factor_spatial": 16,
        },
    ),
    "qwen image": ("AutoencoderKLQwenImage", WAN),
    "wan spatial first": ("AutoencoderKLWan", {**WAN, "temperal_downsample": [True, False, True]}),
}
CASES = [(name, half) for name in CONFIGS for half in ("decoder", "encoder")]
ONE_OF_EACH_CLASS = ("ltx 0.9.5", "ltx2 2.0", "wan 2.1", "qwen image")
every_class = pytest.mark.parametrize(
    ("name", "half"),
    [pytest.param(*case, marks=[] if case[0] in ONE_OF_EACH_CLASS else pytest.mark.repeated) for case in CASES],
)


def make_vae(name: str, device: str, dtype: torch.dtype) -> Any:
    cls, config = CONFIGS[name]
    torch.manual_seed(0)
    vae = getattr(diffusers, cls)(**config)
    for parameter_name, parameter in vae.named_parameters():
        if "per_channel_scale" in parameter_name:  # zeros, so that noise would change nothing
            nn.init.normal_(parameter)
        if parameter_name.endswith("gamma"):  # ones, which would hide that they are left out
            nn.init.normal_(parameter, 1.0, 0.2)
    return vae.to(device, dtype).eval().requires_grad_(False)


def timestep(vae: Any, batch: int, like: Tensor) -> list[Tensor]:
    return [torch.full((batch,), 0.05).to(like)] if vae.config.get("timestep_conditioning") else []


def decode(vae: Any, frames: int = 3, batch: int = 1, size: tuple[int, int] = (4, 5)) -> Tensor:
    parameter = next(vae.decoder.parameters())
    z = torch.randn(batch, LATENTS, frames, *size, generator=torch.Generator().manual_seed(1)).to(parameter)
    torch.manual_seed(2)  # of injected noise
    with torch.no_grad():
        return vae.decode(z, *timestep(vae, batch, z), return_dict=False)[0]


def encode(vae: Any, frames: int = 3, batch: int = 1, size: tuple[int, int] = (2, 3)) -> Tensor:
    """Mean and logarithm of the variance of `frames` latent frames."""
    parameter = next(vae.encoder.parameters())
    seconds, space = (8 if "LTX" in type(vae).__name__ else 4), vae.spatial_compression_ratio
    shape = batch, 3, 1 + seconds * (frames - 1), size[0] * space, size[1] * space
    video = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(parameter)
    with torch.no_grad():
        return vae.encode(video, return_dict=False)[0].parameters


RUN = {"decoder": decode, "encoder": encode}
# Where errors are compared. A latent holds few numbers: with one video the ratio of two errors is a matter of chance.
BATCH = {"decoder": 1, "encoder": 4}


def expected_calls(name: str, frames: int = 3) -> int:
    return 1 if "ltx" in name else frames


@pytest.mark.parametrize(("name", "half"), CASES)
def test_float32(ltx, device, name, half):
    vae = make_vae(name, device, torch.float32)
    stock = RUN[half](vae, batch=2)
    report = ltx.optimize(vae, strict=True)
    result = RUN[half](vae, batch=2)
    assert calls(report, half) == expected_calls(name) and not report.fallbacks
    close(result, stock)
    assert result.stride() == stock.stride()


def in_fp64(vae: Any, name: str, half: str, batch: int = 1) -> Tensor | None:
    """What the stock modules give in fp64; None where they add noise, which differs from dtype to dtype."""
    noisy = name == "ltx 0.9.1" and half == "decoder"
    return None if noisy else RUN[half](copy.deepcopy(vae).double(), batch=batch)


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize(("name", "half"), CASES)
def test_float32_on_a_gpu(ltx, cuda, name, half, tf32):
    """Without TensorFloat-32 the result is stock's; with it, cuDNN chooses other algorithms, of the same error.

    For some shapes cuDNN has none in TensorFloat-32. The error is then that of another order of sums in float32.
    """
    vae = make_vae(name, cuda, torch.float32)
    truth = in_fp64(vae, name, half)
    if truth is None:
        pytest.skip("its noise differs from dtype to dtype")
    with torch.backends.cudnn.flags(allow_tf32=tf32):
        stock = RUN[half](vae)
        report = ltx.optimize(vae, strict=True)
        result = RUN[half](vae)
    assert not report.fallbacks
    if tf32:
        assert error(result, truth) <= max(1.1 * error(stock, truth), 1e-5)
    else:
        assert error(result, stock.double()) < 1e-5 and error(result, truth) < 1e-5


@pytest.mark.parametrize(("name", "half"), CASES)
def test_bfloat16_bits(ltx, device, name, half, exact_convolutions):
    """With the same convolutions, the bits of the stock modules, but where another order of a channel sum shows."""
    vae = make_vae(name, device, torch.bfloat16)
    stock, truth = RUN[half](vae), in_fp64(vae, name, half) if device == "cuda" else None
    report = ltx.optimize(vae, strict=True)
    result = RUN[half](vae)
    assert calls(report, half) == expected_calls(name) and not report.fallbacks
    if device == "cpu":
        assert torch.equal(result, stock)
    else:
        # A few numbers round otherwise, and the convolutions spread that: the results are up to 0.65 of bfloat16's own
        # error apart. If all numbers rounded otherwise, it would be 1.4 times that error.
        assert error(result, stock.double()) < (1e-2 if truth is None else error(stock, truth))


@every_class
def test_bfloat16_error(ltx, device, name, half):
    """Not further from the modules in fp64 than the stock modules in bfloat16 are."""
    vae, batch = make_vae(name, device, torch.bfloat16), BATCH[half]
    stock, truth = RUN[half](vae, batch=batch), in_fp64(vae, name, half, batch)
    ltx.optimize(vae, strict=True)
    result = RUN[half](vae, batch=batch)
    if truth is None:
        assert error(result, stock.double()) < 0.02
    else:
        # On the CPU torch adds the bias within the convolution, before its result is rounded. cuDNN does not.
        limit = 1.1 if device == "cuda" else 1.3
        assert error(result, truth) <= limit * error(stock, truth)


@pytest.mark.parametrize("half", RUN)
@pytest.mark.parametrize("name", ["ltx 0.9.5", "ltx2 2.0", "wan 2.1", "wan 2.2"])
@pytest.mark.parametrize("how", ["tiling", "slicing", "framewise"])
def test_tiles_slices_and_frames(ltx, device, name, half, how):
    vae = make_vae(name, device, torch.float32)
    batch, frames, size = 1, 2, (4, 5)
    if how == "tiling":
        vae.enable_tiling(128, 128, 96, 96)
        tile = 128 * (2 if name == "wan 2.2" else 1) // vae.spatial_compression_ratio  # it tiles patches of 2 pixels
        size = tile + 1, tile + 1
    elif how == "slicing":
        vae.enable_slicing()
        # Stock cannot slice with a timestep.
        batch, size = 1 if half == "decoder" and timestep(vae, 1, torch.ones(1)) else 2, (2, 3)
    elif "wan" in name:
        pytest.skip("it always goes frame by frame")
    else:
        vae.use_framewise_decoding, frames, size = True, 6, (2, 3)
        vae.tile_sample_min_num_frames, vae.tile_sample_stride_num_frames = 16, 8
    stock = RUN[half](vae, frames, batch, size)
    report = ltx.optimize(vae)
    result = RUN[half](vae, frames, batch, size)
    more = how != "slicing" or batch > 1
    assert calls(report, half) >= (2 if more else 1) * expected_calls(name, frames) and not report.fallbacks
    close(result, stock)


@pytest.mark.host
@pytest.mark.parametrize("name", ["ltx 0.9.5", "ltx2 2.0", "wan 2.1", "wan 2.2"])
def test_restore_gives_everything_back(ltx, device, name):
    vae = make_vae(name, device, torch.bfloat16)
    before = {key: (value.stride(), value.clone()) for key, value in vae.state_dict().items()}
    parameters = dict(vae.named_parameters())
    stock = decode(vae), encode(vae)
    report = ltx.optimize(vae)
    decode(vae)
    encode(vae)
    for half, kind, order in (
        (vae.decoder, nn.Conv3d, torch.channels_last_3d),
        (vae.encoder, nn.Conv3d, torch.channels_last_3d),
        *([(vae.decoder, nn.Conv2d, torch.channels_last)] if "wan" in name else []),
    ):
        moved = [m for m in half.modules() if isinstance(m, kind) and not m.weight.is_contiguous()]
        assert moved and all(m.weight.is_contiguous(memory_format=order) for m in moved)
    report.restore()
    assert torch.equal(decode(vae), stock[0]) and torch.equal(encode(vae), stock[1])
    for key, (stride, value) in before.items():
        assert vae.state_dict()[key].stride() == stride and torch.equal(vae.state_dict()[key], value)
    assert all(parameter is parameters[key] for key, parameter in vae.named_parameters())
    assert not any(key.startswith("_ltx") for module in vae.modules() for key in module.__dict__)
    assert "forward" not in vae.decoder.__dict__ and "forward" not in vae.encoder.__dict__


@pytest.mark.parametrize("name", ["ltx 0.9.5", "ltx2 2.0", "wan 2.1", "wan 2.2", "qwen image"])
def test_made_in_inference_mode(ltx, device, name):
    """Its weights stay inference tensors in either memory order, of which torch makes views in either mode."""
    with torch.inference_mode():
        vae = make_vae(name, device, torch.float32)
        stock = decode(vae), encode(vae)
        report = ltx.optimize(vae)
        results = [run(vae) for run in (decode, encode)]
    results += [decode(vae), encode(vae)]
    assert calls(report) == calls(report, "encoder") == 2 * expected_calls(name) and not report.fallbacks
    for result, wanted in zip(results, 2 * stock):
        close(result, wanted)
    assert all(parameter.is_inference() for parameter in vae.parameters())
    report.restore()
    with torch.inference_mode():
        assert torch.equal(decode(vae), stock[0]) and torch.equal(encode(vae), stock[1])
    assert torch.equal(decode(vae), stock[0]) and all(parameter.is_inference() for parameter in vae.parameters())


def test_weights_of_the_users_own_order_stay(ltx, device):
    vae = make_vae("ltx2 2.0", device, torch.float32).to(memory_format=torch.channels_last_3d)
    weight = vae.decoder.conv_in.conv.weight
    address = weight.data_ptr()
    with ltx.optimize(vae):
        decode(vae)
    assert weight.data_ptr() == address and weight.is_contiguous(memory_format=torch.channels_last_3d)


def test_weights_that_are_loaded_later(ltx, device):
    """A state dict loaded into an optimized model, in place or by assignment, is what it decodes with."""
    vae, other = (make_vae("ltx 0.9.5", device, torch.float32) for _ in range(2))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    wanted = decode(other)
    for assign in (False, True):
        with ltx.optimize(vae) as report:
            decode(vae)
            vae.load_state_dict(other.state_dict(), assign=assign)
            close(decode(vae), wanted)
            assert calls(report) == 2 and not report.fallbacks


@pytest.mark.parametrize("name", ["ltx 0.9.5", "wan 2.1"])
def test_results_are_tensors_of_their_own(ltx, device, name):
    vae = make_vae(name, device, torch.float32)
    ltx.optimize(vae)
    first = decode(vae)
    kept = first.clone()
    decode(vae, frames=2).zero_()
    assert torch.equal(first, kept)


def fallback(ltx: Any, vae: Any, call: Any) -> str:
    report = ltx.optimize(vae)
    call()
    assert calls(report) == 0
    return reason_of(report)


def test_fallbacks(ltx, device):
    """Calls that the ops cannot take run the stock forward, with its results, and are counted."""
    vae = make_vae("ltx 0.9.5", device, torch.float32)
    stock = decode(vae)

    def check() -> None:
        assert torch.equal(decode(vae), stock)

    handle = vae.decoder.mid_block.resnets[0].conv1.register_forward_hook(lambda *_: None)
    assert "hook" in fallback(ltx, vae, check)
    handle.remove()
    vae.decoder.mid_block.resnets[0].dropout.p = 0.5
    vae.decoder.train()
    assert fallback(ltx, vae, lambda: decode(vae)) == "dropout is on"
    vae.decoder.eval()
    norm = vae.decoder.norm_out
    norm.forward = lambda x: x * 2
    changed = decode(copy.deepcopy(vae))
    assert "forward" in fallback(ltx, vae, lambda: decode(vae)) and not torch.equal(changed, stock)
    del norm.forward
    z = torch.randn(1, LATENTS, 2, 2, 2, device=device, requires_grad=True)
    with torch.enable_grad():
        temb = torch.ones(1, device=device)
        assert fallback(ltx, vae, lambda: vae.decode(z, temb)) == "a gradient is needed"
    if device == "cuda":
        autocast = "autocast is on in torch.bfloat16, the input has dtype torch.float32"
        with torch.autocast(device, torch.bfloat16):
            assert fallback(ltx, vae, lambda: decode(vae)) == autocast
    ltx.restore(vae)
    check()


def test_gradients_of_parameters(ltx, device):
    vae = make_vae("ltx2 2.3", device, torch.float32)
    weight = vae.decoder.conv_out.conv.weight.requires_grad_()
    z = torch.randn(1, LATENTS, 1, 2, 2, device=device)
    report = ltx.optimize(vae)
    vae.decode(z).sample.sum().backward()
    assert weight.grad is not None and "a gradient is needed" in report.fallbacks["diffusers.LTX2VideoDecoder3d"]


@pytest.mark.host
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "kind, path, name, make",
    [
        ("ltx 0.9.5", "", "conv_act", nn.Dropout),
        ("ltx 0.9.5", "mid_block.resnets.0", "nonlinearity", nn.Dropout),
        ("ltx 0.9.5", "mid_block.resnets.0", "dropout", nn.SiLU),
        ("ltx 0.9.5", "mid_block.resnets.0", "norm1", nn.SiLU),
        ("wan 2.1", "", "nonlinearity", nn.Identity),
        ("wan 2.1", "mid_block.resnets.0", "norm1", nn.Identity),
        ("wan 2.1", "mid_block.resnets.0", "dropout", nn.Identity),
    ],
)
def test_exchanged_modules_without_parameters(ltx, device, when, kind, path, name, make):
    """Each is of a class that the decoder has elsewhere."""
    vae, stock = make_vae(kind, device, torch.float32), make_vae(kind, device, torch.float32)
    if when == "after":
        ltx.optimize(vae)
        decode(vae)
    for one in (vae, stock):
        setattr(one.decoder.get_submodule(path), name, make())
        one.eval()
    report = ltx.optimize(vae) if when == "before" else None
    assert error(decode(vae), decode(stock).double()) < 1e-5
    if report is not None:
        exchanged = name != "dropout" or make is not nn.Identity
        assert ("decoder" in report.left_alone) == exchanged


@pytest.mark.host
def test_other_structures_are_left_alone(ltx, device):
    vae = make_vae("ltx 0.9.5", device, torch.float32)
    vae.decoder.conv_act = nn.GELU()
    report = ltx.optimize(vae)
    assert report.left_alone == {"decoder": "conv_act is torch.nn.modules.activation.GELU"}
    assert report.replaced == {"diffusers.LTXVideoEncoder3d": 1}
    vae.encoder.conv_in.conv = nn.Conv3d(48, 8, 3, padding=(0, 1, 1), dilation=(1, 2, 2))
    with pytest.warns(UserWarning, match="nothing was replaced"):
        report = ltx.optimize(vae)
    assert report.left_alone["encoder"] == "it holds a convolution with a stride, dilation or groups"


@pytest.mark.host
def test_nothing_else_is_replaced(ltx, device):
    """Norms of an autoencoder see channels as strided rows, so that the ops for rows are not for them."""
    report = ltx.optimize(make_vae("ltx 0.9.5", device, torch.float32))
    assert report.replaced == {"diffusers.LTXVideoEncoder3d": 1, "diffusers.LTXVideoDecoder3d": 1}


@pytest.mark.parametrize("half", RUN)
@pytest.mark.parametrize("name", ["wan 2.1", "wan 2.2"])
@pytest.mark.parametrize("first", [0, 1])
def test_stock_and_own_calls_share_the_cache_of_frames(ltx, device, name, half, first):
    """One video, every other frame of which the stock modules take."""
    vae = make_vae(name, device, torch.float32)
    stock = RUN[half](vae, frames=5)
    report = ltx.optimize(vae)
    module = getattr(vae, half)
    handles: list[Any] = []

    def alternate(*_: Any) -> None:
        count = calls(report, half) + sum(sum(found.values()) for found in report.fallbacks.values())
        if count % 2 == first:
            handles.append(module.norm_out.register_forward_hook(lambda *_: None))
        elif handles:
            handles.pop().remove()

    handle = module.register_forward_pre_hook(alternate)
    result = RUN[half](vae, frames=5)
    handle.remove()
    (reasons,) = report.fallbacks.values()
    assert reasons == {"a WanRMS_norm has a hook or another forward": 3 - first} and calls(report, half) == 2 + first
    close(result, stock)


@pytest.mark.parametrize("half", RUN)
@pytest.mark.parametrize("name", ["qwen image", "wan 2.2"])
def test_a_frame_that_follows_no_others(ltx, device, name, half, monkeypatch):
    """It is convolved in two dimensions, and leaves the list of frames as the stock modules leave it."""
    vae = make_vae(name, device, torch.float32)
    module = getattr(vae, half)
    options = {"first_chunk": True} if (name, half) == ("wan 2.2", "decoder") else {}
    frame = torch.randn(1, module.conv_in.in_channels, 1, 16, 24, generator=torch.Generator().manual_seed(1)).to(device)
    kernels: list[tuple[int, ...]] = []
    conv3d = F.conv3d

    def count(x: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
        kernels.append(tuple(weight.shape[2:]))
        return conv3d(x, weight, *arguments)

    def run() -> tuple[Tensor, list[Any]]:
        kept: list[Any] = [None] * vae._cached_conv_counts[half]
        with torch.no_grad():
            return module(frame, feat_cache=kept, feat_idx=[0], **options), kept

    stock, stock_kept = run()
    report = ltx.optimize(vae, strict=True)
    monkeypatch.setattr(F, "conv3d", count)
    result, kept = run()
    assert calls(report, half) == 1 and not report.fallbacks
    assert set(kernels) <= {(1, 1, 1)}  # shortcuts
    close(result, stock)
    for mine, theirs in zip(kept, stock_kept):
        if isinstance(theirs, Tensor):
            close(mine, theirs)
        else:
            assert mine == theirs


def test_wan_without_a_cache_of_frames(ltx, device):
    vae = make_vae("wan 2.1", device, torch.float32)
    z = torch.randn(1, LATENTS, 2, 3, 4, device=device)
    with torch.no_grad():
        stock = vae.decoder(z)
        report = ltx.optimize(vae)
        assert torch.equal(vae.decoder(z), stock)
    assert report.fallbacks == {"diffusers.WanDecoder3d": {"no cache of frames": 1}}


def test_wan_is_not_replayed(ltx, device):
    """A graph would miss that the list of frames changes."""
    vae = make_vae("wan 2.1", device, torch.float32)
    stock = decode(vae)
    report = ltx.optimize(vae, graphs=True)
    for _ in range(3):
        close(decode(vae), stock)
    assert "not replayed, 9 x: it writes into a list that it is given" in str(report)


def test_component_of_a_pipeline(ltx, device):
    """By its name."""
    vae = make_vae("ltx 0.9.5", device, torch.float32)
    pipe = SimpleNamespace(components={"vae": vae, "transformer": nn.Linear(2, 2)})
    report = ltx.optimize(pipe, components=["vae"])
    decode(vae)
    assert calls(report) == 1
    ltx.restore(pipe)
    assert "forward" not in vae.decoder.__dict__


def test_deepcopy(ltx, device):
    vae = make_vae("ltx 0.9.5", device, torch.float32)
    stock = decode(vae)
    ltx.optimize(vae)
    result = decode(vae)
    copied = copy.deepcopy(vae)
    assert torch.equal(decode(copied), result)
    ltx.restore(copied)
    assert torch.equal(decode(copied), stock) and torch.equal(decode(vae), result)


@pytest.mark.slow
def test_compile(ltx, device):
    """torch.compile fuses the decoder by itself: the stock forward is traced, and counted."""
    vae = make_vae("ltx2 2.3", device, torch.float32)
    stock = decode(vae)
    report = ltx.optimize(vae)
    vae.decoder.compile(backend="aot_eager")
    close(decode(vae), stock)
    assert "torch.compile" in str(report.fallbacks)


def test_offload(ltx, cuda):
    """Model offload moves the whole decoder to the GPU for a call; its weights stay in channels-last memory."""
    accelerate = pytest.importorskip("accelerate")
    vae = make_vae("ltx 0.9.5", "cpu", torch.bfloat16)
    stock = decode(copy.deepcopy(vae).to(cuda))
    report = ltx.optimize(vae)
    accelerate.cpu_offload_with_hook(vae.decoder, cuda)
    result = decode(vae)
    assert calls(report) == 1 and (result.float() - stock.float()).abs().max() < 0.1
