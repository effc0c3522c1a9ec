"""Encoders and decoders of image autoencoders, optimized, against the stock modules: every released form."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.autoencoders import calls, close, error, reason_of
from torch import Tensor, nn

diffusers = pytest.importorskip("diffusers")

pytestmark = pytest.mark.usefixtures("one_thread")


def kl(channels: tuple[int, ...], latents: int, **config: Any) -> dict[str, Any]:
    """The configuration of an AutoencoderKL with this many channels in its stages, from the image to the latents."""
    return {
        "block_out_channels": channels,
        "down_block_types": ("DownEncoderBlock2D",) * len(channels),
        "up_block_types": ("UpDecoderBlock2D",) * len(channels),
        "layers_per_block": 2,
        "latent_channels": latents,
        "sample_size": 32,
        **config,
    }


NO_QUANT = {"use_quant_conv": False, "use_post_quant_conv": False}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": ("AutoencoderKL", kl((32, 64, 64), 16, **NO_QUANT)),
    "sd 1.5": ("AutoencoderKL", kl((32, 64), 4, layers_per_block=1)),
    "flux2": ("AutoencoderKLFlux2", kl((32, 64), 32)),
    "flux2 small": ("AutoencoderKLFlux2", kl((32, 64), 32, decoder_block_out_channels=(96, 192))),
    "cogview4": ("AutoencoderKL", kl((32, 64), 16, layers_per_block=3, mid_block_add_attention=False, **NO_QUANT)),
    "hunyuan image": (
        "AutoencoderKLHunyuanImage",
        {
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": 8,
            "block_out_channels": (32, 64, 128),
            "layers_per_block": 1,
            "spatial_compression_ratio": 4,
            "sample_size": 32,
        },
    ),
}
CASES = [(name, half) for name in CONFIGS for half in ("decoder", "encoder")]


def random_norms(module: nn.Module) -> None:
    """Norms whose weights are not ones and whose biases are not zeros, which would hide that they are left out."""
    for part in module.modules():
        if isinstance(part, nn.GroupNorm):
            nn.init.normal_(part.weight, 1.0, 0.2)
            nn.init.normal_(part.bias, 0.0, 0.2)


def make_vae(name: str, device: str, dtype: torch.dtype) -> Any:
    cls, config = CONFIGS[name]
    torch.manual_seed(0)
    vae = getattr(diffusers, cls)(**config)
    random_norms(vae)
    return vae.to(device, dtype).eval().requires_grad_(False)


def noise(vae: Any, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(next(vae.parameters()))


def decode(vae: Any, batch: int = 1, size: tuple[int, int] = (5, 6)) -> Tensor:
    with torch.no_grad():
        return vae.decode(noise(vae, batch, vae.config.latent_channels, *size), return_dict=False)[0]


def encode(vae: Any, batch: int = 1, size: tuple[int, int] = (5, 6)) -> Tensor:
    """Mean and logarithm of the variance."""
    times = 2 ** (len(vae.config.block_out_channels) - 1)
    with torch.no_grad():
        return vae.encode(noise(vae, batch, 3, size[0] * times, size[1] * times), return_dict=False)[0].parameters


RUN: dict[str, Callable[..., Tensor]] = {"decoder": decode, "encoder": encode}


@pytest.mark.parametrize(("name", "half"), CASES)
def test_float32(ltx, device, name, half):
    vae = make_vae(name, device, torch.float32)
    stock = RUN[half](vae, batch=2)
    report = ltx.optimize(vae, strict=True)
    result = RUN[half](vae, batch=2)
    assert calls(report, half) == 1 and not report.fallbacks
    assert error(result, stock.double()) < 1e-5
    assert result.is_contiguous()


@pytest.mark.parametrize(("name", "half"), CASES)
def test_bfloat16_error(ltx, device, name, half, request):
    """Not further from the modules in fp64 than the stock modules in bfloat16 are."""
    if device == "cpu":  # there torch adds the bias within the convolution, before its result is rounded
        request.getfixturevalue("exact_convolutions")
    vae = make_vae(name, device, torch.bfloat16)
    stock, truth = RUN[half](vae, batch=8), RUN[half](copy.deepcopy(vae).double(), batch=8)
    ltx.optimize(vae, strict=True)
    assert error(RUN[half](vae, batch=8), truth) <= 1.1 * error(stock, truth)


@pytest.mark.parametrize("half", RUN)
@pytest.mark.parametrize("name", ["flux", "sd 1.5", "flux2", "hunyuan image"])
@pytest.mark.parametrize("how", ["tiling", "slicing"])
def test_tiles_and_slices(ltx, device, name, half, how):
    """Tiles overlap, and those at the lower and right edges are smaller. They are blended in place."""
    if (name, half, how) == ("hunyuan image", "encoder", "tiling"):
        pytest.skip("the stock method expects a video")
    vae = make_vae(name, device, torch.float32)
    batch, size = (2, (3, 4)) if how == "slicing" else (1, (vae.tile_latent_min_size + 1, vae.tile_latent_min_size + 3))
    getattr(vae, f"enable_{how}")()
    stock = RUN[half](vae, batch, size)
    report = ltx.optimize(vae)
    result = RUN[half](vae, batch, size)
    assert calls(report, half) == (2 if how == "slicing" else 4) and not report.fallbacks
    close(result, stock)


@pytest.mark.parametrize("half", RUN)
@pytest.mark.parametrize("size", [(1, 2), (1, 7), (33, 2)])
def test_sizes(ltx, device, half, size):
    vae = make_vae("sd 1.5", device, torch.float32)
    stock = RUN[half](vae, size=size)
    report = ltx.optimize(vae)
    close(RUN[half](vae, size=size), stock)
    assert calls(report, half) == 1 and not report.fallbacks


def test_results_are_tensors_of_their_own(ltx, device):
    vae = make_vae("flux", device, torch.float32)
    ltx.optimize(vae)
    for run in RUN.values():
        first = run(vae)
        kept = first.clone()
        run(vae).zero_()
        assert torch.equal(first, kept)


def test_latents_keep_their_values(ltx, device):
    """The sum may take the memory of a convolution's result, and never that of what was given."""
    vae = make_vae("flux", device, torch.float32)
    ltx.optimize(vae)
    z = noise(vae, 1, 16, 4, 4).to(memory_format=torch.channels_last)
    kept = z.clone()
    with torch.no_grad():
        vae.decode(z)
    assert torch.equal(z, kept)


@pytest.mark.host
def test_restore_gives_everything_back(ltx, device):
    vae = make_vae("flux2", device, torch.bfloat16)
    before = {key: (value.stride(), value.clone()) for key, value in vae.state_dict().items()}
    parameters = dict(vae.named_parameters())
    stock = [run(vae) for run in RUN.values()]
    report = ltx.optimize(vae)
    for run in RUN.values():
        run(vae)
    for half in (vae.decoder, vae.encoder):
        moved = [m for m in half.modules() if isinstance(m, nn.Conv2d) and not m.weight.is_contiguous()]
        assert moved and all(m.weight.is_contiguous(memory_format=torch.channels_last) for m in moved)
    report.restore()
    assert all(torch.equal(run(vae), result) for run, result in zip(RUN.values(), stock))
    for key, (stride, value) in before.items():
        assert vae.state_dict()[key].stride() == stride and torch.equal(vae.state_dict()[key], value)
    assert all(parameter is parameters[key] for key, parameter in vae.named_parameters())
    assert not any(key.startswith("_ltx") for module in vae.modules() for key in module.__dict__)


def test_weights_that_are_loaded_later(ltx, device):
    vae, other = (make_vae("flux", device, torch.float32) for _ in range(2))
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


@pytest.mark.host
def test_save_pretrained(ltx, device, tmp_path: Path):
    """It saves weights in either memory order. `save_file` of safetensors asks for contiguous ones."""
    safetensors = pytest.importorskip("safetensors.torch")
    vae = make_vae("sd 1.5", device, torch.float32)
    ltx.optimize(vae)
    decode(vae)
    with pytest.raises(ValueError, match="non contiguous"):
        safetensors.save_file(vae.state_dict(), tmp_path / "weights.safetensors")
    vae.save_pretrained(tmp_path / "vae")
    loaded = diffusers.AutoencoderKL.from_pretrained(tmp_path / "vae")
    ltx.restore(vae)
    assert all(torch.equal(value.to(device), vae.state_dict()[key]) for key, value in loaded.state_dict().items())


@pytest.mark.host
@pytest.mark.parametrize("half", RUN)
def test_hooks_on_every_module(ltx, device, half):
    """A hook on any module inside runs, because the stock forward does."""
    vae = make_vae("sd 1.5", device, torch.float32)
    stock = RUN[half](vae)
    module = getattr(vae, half)
    report = ltx.optimize(vae)
    RUN[half](vae)
    called: list[str] = []
    inside = [(name, part) for name, part in module.named_modules() if name and not isinstance(part, nn.ModuleList)]
    for name, part in inside:
        handle = part.register_forward_hook(lambda *_, name=name: called.append(name))
        assert torch.equal(RUN[half](vae), stock)
        handle.remove()
    assert set(called) == {name for name, _ in inside} and calls(report, half) == 1
    close(RUN[half](vae), stock)
    assert calls(report, half) == 2


def test_fallbacks(ltx, device):
    """Calls that the ops cannot take run the stock forward, with its results, and are counted."""
    vae = make_vae("flux", device, torch.float32)
    stock = decode(vae)

    def why() -> str:
        report = ltx.optimize(vae)
        assert torch.equal(decode(vae), stock) and calls(report) == 0
        return reason_of(report)

    attn = vae.decoder.mid_block.attentions[0]
    attn.processor = diffusers.models.attention_processor.AttnProcessor()
    stock = decode(copy.deepcopy(vae))
    assert why() == "its attention's processor is diffusers.models.attention_processor.AttnProcessor"
    vae.fuse_qkv_projections()
    stock = decode(copy.deepcopy(vae))
    assert why() == "its attention's processor is diffusers.models.attention_processor.FusedAttnProcessor2_0"
    attn.processor = diffusers.models.attention_processor.AttnProcessor2_0()
    vae.decoder.mid_block.resnets[0].norm1.weight.data = vae.decoder.mid_block.resnets[0].norm1.weight.data.double()
    report = ltx.optimize(vae)
    with pytest.raises(RuntimeError):  # of the stock model
        decode(vae)
    assert reason_of(report) == f"a weight is not an ordinary parameter of torch.float32 on {attn.to_q.weight.device}"


def test_processors_that_change_between_calls(ltx, device):
    vae = make_vae("flux", device, torch.float32)
    stock = decode(vae)
    report = ltx.optimize(vae)
    vae.fuse_qkv_projections()
    decode(vae)
    vae.unfuse_qkv_projections()
    close(decode(vae), stock)
    assert calls(report) == 1 and "FusedAttnProcessor2_0" in reason_of(report)


def test_a_patched_attention_function_is_called(ltx, device, monkeypatch):
    """As users of other attention kernels install it."""
    vae = make_vae("flux", device, torch.float32)
    stock = decode(vae)
    report = ltx.optimize(vae)
    attends = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *given, **options: 2 * attends(*given, **options))
    result = decode(vae)
    assert calls(report) == 1 and not report.fallbacks
    ltx.restore(vae)
    close(result, decode(vae))
    assert error(result, stock.double()) > 0.01


@pytest.mark.parametrize("shape", [(2, 1, 4096, 512), (1, 5000, 1024), (1, 1, 9000, 384)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_of_wide_heads(ltx, cuda, monkeypatch, shape, dtype):
    """As two products, one part of the queries after another; the error is about that of torch's kernel."""
    autoencoder = ltx.integrations.blocks.autoencoder
    monkeypatch.setattr(autoencoder, "_SCORES", 3_000_000)
    rows = torch.randn((*shape[:-1], 3 * shape[-1]), device=cuda, dtype=dtype)
    query, key, value = rows.chunk(3, -1)
    exact = F.scaled_dot_product_attention(*(x.double() for x in (query, key, value)))
    stock = F.scaled_dot_product_attention(query, key, value)
    result = autoencoder.attention_between_pixels(query, key, value)
    assert result.is_contiguous() and result.dtype == dtype
    assert error(result, exact) <= 1.5 * error(stock, exact)
    if torch.cuda.get_device_capability(cuda)[0] == 9:
        assert not torch.equal(result, stock)


def test_gradients(ltx, device):
    vae = make_vae("flux", device, torch.float32)
    weight = vae.decoder.conv_out.weight.requires_grad_()
    report = ltx.optimize(vae)
    vae.decode(noise(vae, 1, 16, 2, 2)).sample.sum().backward()
    assert weight.grad is not None and reason_of(report) == "a gradient is needed"
    weight.requires_grad_(False)
    z = noise(vae, 1, 16, 2, 2).requires_grad_()
    report = ltx.optimize(vae)
    vae.decode(z).sample.sum().backward()
    assert z.grad is not None and reason_of(report) == "a gradient is needed"


def test_autocast(ltx, device):
    vae = make_vae("flux", device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        stock = decode(vae)
        report = ltx.optimize(vae)
        assert torch.equal(decode(vae), stock)
    assert "autocast is on in torch.bfloat16" in reason_of(report)


def test_force_upcast(ltx, device):
    """Pipelines of SDXL cast an autoencoder in float16 to float32 for each decode, and back."""
    vae = make_vae("sd 1.5", device, torch.float16)
    report = ltx.optimize(vae)
    wanted = decode(copy.deepcopy(vae).to(torch.float32))
    kept = {key: value.clone() for key, value in vae.state_dict().items()}
    for _ in range(2):
        vae.to(torch.float32)
        close(decode(vae), wanted)
        vae.to(torch.float16)
        assert all(torch.equal(value, kept[key]) for key, value in vae.state_dict().items())
    assert calls(report) == 2 and not report.fallbacks
    decode(vae)
    assert calls(report) == 3
    report.restore()
    assert all(parameter.is_contiguous() for parameter in vae.parameters())


def test_lora(ltx, device):
    """With an adapter in it the stock modules run, whether it is loaded before `optimize` or after it."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False)
    vae = make_vae("flux", device, torch.float32)
    report = ltx.optimize(vae)
    plain = decode(vae)
    torch.manual_seed(0)
    vae.add_adapter(config)
    vae.requires_grad_(False)
    adapted = decode(vae)
    assert reason_of(report) == "it holds a peft.tuners.lora.layer.Linear" and calls(report) == 1
    report.restore()
    assert torch.equal(decode(vae), adapted) and not torch.equal(adapted, plain)
    report = ltx.optimize(vae)
    assert torch.equal(decode(vae), adapted)
    assert report.left_alone["decoder"] == "it holds a peft.tuners.lora.layer.Linear"


@pytest.mark.parametrize("before", [False, True])
def test_layerwise_casting(ltx, device, before):
    """Weights are stored in fp8 and cast for each module's call, by hooks: the stock modules run."""
    vae, other = make_vae("flux", device, torch.float32), make_vae("flux", device, torch.float32)
    options = {"storage_dtype": torch.float8_e4m3fn, "compute_dtype": torch.float32}
    other.enable_layerwise_casting(**options)
    if before:
        vae.enable_layerwise_casting(**options)
    report = ltx.optimize(vae)
    if not before:
        vae.enable_layerwise_casting(**options)
    z = torch.randn(1, 16, 4, 4, generator=torch.Generator().manual_seed(1)).to(device)
    with torch.no_grad():
        assert torch.equal(vae.decode(z).sample, other.decode(z).sample)
    assert calls(report) == 0 and "hook" in reason_of(report)


@pytest.mark.host
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_group_offload(ltx, device, kind):
    """Its hooks on the modules inside run, with the stock modules, and the report says so."""
    vae = make_vae("sd 1.5", "cpu", torch.float32)
    stock = decode(copy.deepcopy(vae).to(device))
    report = ltx.optimize(vae)
    vae.enable_group_offload(
        onload_device=torch.device(device),
        offload_device=torch.device("cpu"),
        offload_type=kind,
        num_blocks_per_group=1 if kind == "block_level" else None,
    )
    z = noise(vae, 1, 4, 5, 6).to(device)
    for _ in range(2):
        with torch.no_grad():
            close(vae.decode(z).sample, stock)
    assert calls(report) == 0 and "has a hook" in str(report.fallbacks)


def test_model_offload(ltx, cuda):
    """Model offload moves the whole autoencoder to the GPU; its weights stay in channels-last memory."""
    accelerate = pytest.importorskip("accelerate")
    vae = make_vae("flux", "cpu", torch.bfloat16)
    stock = decode(copy.deepcopy(vae).to(cuda))
    report = ltx.optimize(vae)
    accelerate.cpu_offload_with_hook(vae.decoder, cuda)
    result = decode(vae)
    assert calls(report) == 1 and (result.float() - stock.float()).abs().max() < 0.1


def test_deepcopy(ltx, device):
    vae = make_vae("flux", device, torch.float32)
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
    vae = make_vae("sd 1.5", device, torch.float32)
    stock = decode(vae)
    report = ltx.optimize(vae)
    decode(vae)
    vae.decode = torch.compile(vae.decode, backend="aot_eager")
    close(decode(vae), stock)
    assert calls(report) == 1 and "torch.compile" in str(report.fallbacks)


def test_graphs(ltx, cuda):
    vae = make_vae("flux", cuda, torch.bfloat16)
    ltx.optimize(vae)
    wanted = decode(vae)
    report = ltx.optimize(vae, graphs=True)
    for _ in range(4):
        assert torch.equal(decode(vae), wanted)
    assert "2 calls replayed" in str(report)  # the first call moves the weights, and the next is the first of its state


@pytest.mark.host
def test_other_structures_are_left_alone(ltx, device):
    def why(change: Callable[[Any], None]) -> str:
        vae = make_vae("sd 1.5", device, torch.float32)
        change(vae.decoder)
        report = ltx.optimize(vae)
        assert report.replaced == {"diffusers.Encoder": 1}
        return str(report.left_alone["decoder"])

    def set_attribute(path: str, name: str, value: Any) -> Callable[[Any], None]:
        return lambda decoder: setattr(decoder.get_submodule(path), name, value)

    resnet, attn, up = "up_blocks.0.resnets.0", "mid_block.attentions.0", "up_blocks.0.upsamplers.0"
    assert why(set_attribute("", "conv_act", nn.GELU())) == "conv_act is torch.nn.modules.activation.GELU"
    for name, value in (("output_scale_factor", 2.0), ("upsample", lambda x: x)):
        assert "change the size or the scale" in why(set_attribute(resnet, name, value))
    assert why(set_attribute(resnet, "time_emb_proj", nn.Linear(4, 64))) == "its blocks take a timestep"
    for name, value in (("heads", 2), ("residual_connection", False), ("group_norm", None)):
        assert "several heads, no norm, or no residual" in why(set_attribute(attn, name, value))
    assert "scales its result" in why(set_attribute(attn, "rescale_output_factor", 2.0))
    assert "its upsamplers" in why(set_attribute(up, "interpolate", False))
    assert "pad with something else" in why(set_attribute("conv_in", "padding_mode", "reflect"))
    cls, config = CONFIGS["hunyuan image"]
    report = ltx.optimize(getattr(diffusers, cls)(**config, downsample_match_channel=False))
    assert report.left_alone == {"encoder": "a residual block changes the number of channels"}


VQ = {"block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2}
OTHERS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "vq": ("VQModel", {**VQ, "up_block_types": ("UpDecoderBlock2D",) * 2}, {"Encoder", "Decoder"}),
    "spatial norms": (
        "VQModel",
        {**VQ, "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_type": "spatial", "latent_channels": 4},
        {"Encoder"},
    ),
    "inpainting": (
        "AsymmetricAutoencoderKL",
        {
            **VQ,
            "down_block_out_channels": (32, 64),
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "up_block_out_channels": (32, 64),
        },
        {"Encoder"},
    ),
    "video frames": ("AutoencoderKLTemporalDecoder", VQ, {"Encoder"}),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_models_of_these_halves(ltx, device, kind):
    """The halves that other classes share with AutoencoderKL run the ops; what they do not share stays stock."""
    name, config, known = OTHERS[kind]
    torch.manual_seed(0)
    config.pop("block_out_channels") if name == "AsymmetricAutoencoderKL" else None
    vae = getattr(diffusers, name)(**config).to(device).eval().requires_grad_(False)
    random_norms(vae)
    image = noise(vae, 1, 3, 16, 16)
    extra = {"num_frames": 1} if name == "AutoencoderKLTemporalDecoder" else {}
    with torch.no_grad():
        stock = vae(image, **extra).sample
        report = ltx.optimize(vae)
        result = vae(image, **extra).sample
    assert {site.name.removeprefix("diffusers.") for site in report.sites} == known
    assert all(site.calls == 1 for site in report.sites) and not report.fallbacks
    close(result, stock)


@pytest.mark.host
def test_nothing_else_is_replaced(ltx, device):
    report = ltx.optimize(make_vae("flux2", device, torch.float32))
    assert report.replaced == {"diffusers.Encoder": 1, "diffusers.Decoder": 1}
