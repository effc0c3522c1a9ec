"""UNets and ControlNets, optimized, against the stock modules: what takes images, beside the transformer blocks."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.autoencoders import close, error
from torch import Tensor, nn

diffusers = pytest.importorskip("diffusers")
from families import basic_transformer, randn, random_  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SD15: dict[str, Any] = {
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "cross_attention_dim": 24,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "attention_head_dim": 2,
}
# Of Kandinsky 2 and unCLIP: blocks that change the size, and time embeddings that scale.
KANDINSKY2: dict[str, Any] = {
    **SD15,
    "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
    "resnet_time_scale_shift": "scale_shift",
    "attention_head_dim": 16,
}
UP = {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
MAKE: dict[str, Callable[..., Any]] = {
    "sdxl": basic_transformer.unet,
    "sd 1.5": lambda: diffusers.UNet2DConditionModel(**SD15, **UP),
    "kandinsky 2": lambda: diffusers.UNet2DConditionModel(**KANDINSKY2),
    "controlnet": lambda: diffusers.ControlNetModel(**SD15, conditioning_embedding_out_channels=(8, 16)),
}
# How many of them there are; what a ControlNet has is what a UNet has on its way down.
COUNTS = {
    "sdxl": {"ResnetBlock2D": 8, "Transformer2DModel": 4, "Upsample2D": 1},
    "sd 1.5": {"ResnetBlock2D": 8, "Transformer2DModel": 4, "Upsample2D": 1},
    "kandinsky 2": {"ResnetBlock2D": 10, "Upsample2D": 1},
    "controlnet": {"ResnetBlock2D": 4, "Transformer2DModel": 2},
}
# Of these, the calls of a forward: a residual block that enlarges images calls no module for it.
CALLS = {**COUNTS, "kandinsky 2": {"ResnetBlock2D": 10, "Upsample2D": 0}}
SIZES = [(8, 8), (6, 10), (7, 9)]
IMAGE_MODULES = ("ResnetBlock2D", "Transformer2DModel", "Upsample2D")
every_model = pytest.mark.parametrize("name", MAKE)


def make(name: str, device: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return random_(MAKE[name]()).to(device, dtype)


def inputs_of(name: str, model: Any, batch: int = 2, size: tuple[int, int] = (8, 8)) -> dict[str, Any]:
    parameter = next(model.parameters())
    inputs: dict[str, Any] = {
        "sample": randn(batch, 4, *size),
        "encoder_hidden_states": randn(batch, 5, 24, seed=2),
    }
    if name == "sdxl":
        inputs["added_cond_kwargs"] = basic_transformer.unet_inputs(batch)["added_cond_kwargs"]
    if name == "controlnet":
        inputs["controlnet_cond"] = randn(batch, 3, size[0] * 2, size[1] * 2, seed=3)

    def convert(value: Any) -> Any:
        return {key: convert(x) for key, x in value.items()} if isinstance(value, dict) else value.to(parameter)

    return {**convert(inputs), "timestep": torch.linspace(900, 300, batch, device=parameter.device)}


def run(name: str, model: Any, batch: int = 2, size: tuple[int, int] = (8, 8), **more: Any) -> Tensor:
    """All results of a forward, side by side."""
    with torch.no_grad():
        result = model(**inputs_of(name, model, batch, size), **more, return_dict=False)
    tensors = [x for part in result for x in (part if isinstance(part, (list, tuple)) else [part])]
    return torch.cat([x.flatten() for x in tensors])


def image_calls(report: Any) -> dict[str, int]:
    names = {f"diffusers.{name}": name for name in IMAGE_MODULES}
    return {names[site.name]: site.calls for site in report.sites if site.name in names}


def image_modules(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__ in IMAGE_MODULES]


def reasons_of(report: Any, name: str = "ResnetBlock2D") -> set[str]:
    return set(report.fallbacks.get(f"diffusers.{name}", {}))


@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name in MAKE for size in SIZES[: 2 if name == "kandinsky 2" else 3]], ids=str
)
def test_float32(ltx: ModuleType, device: str, name: str, size: tuple[int, int]) -> None:
    """Odd sizes are halved upwards, and doubled to a size that the model asks for: one Upsample2D runs stock.

    Blocks that change the size by themselves take even sizes alone.
    """
    model = make(name, device)
    stock = run(name, model, 3, size)
    report = ltx.optimize(model, strict=True)
    close(run(name, model, 3, size), stock)
    odd = name != "controlnet" and size == (7, 9)
    assert report.fallbacks == ({"diffusers.Upsample2D": {"an output of (7, 9)": 1}} if odd else {})
    assert image_calls(report) == {**CALLS[name], **({"Upsample2D": 0} if odd else {})}
    assert {key: report.replaced[f"diffusers.{key}"] for key in COUNTS[name]} == COUNTS[name]


@every_model
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_error(ltx: ModuleType, device: str, name: str, dtype: torch.dtype, request: Any) -> None:
    """Not further from the model in fp64 than the stock model is."""
    if device == "cpu":  # there torch adds the bias within the convolution, before its result is rounded
        request.getfixturevalue("exact_convolutions")
    model = make(name, device, dtype)
    stock, truth = run(name, model, 8), run(name, copy.deepcopy(model).double(), 8)
    report = ltx.optimize(model, strict=True)
    assert error(run(name, model, 8), truth) <= 1.1 * error(stock, truth)
    assert report.fallbacks == {} and image_calls(report) == CALLS[name]


@pytest.mark.parametrize("name", ["sdxl", "sd 1.5"])
def test_memory_order(ltx: ModuleType, device: str, name: str) -> None:
    """After the first module all images are in channels-last memory, so that none is copied; weights are too."""
    model = make(name, device)
    ltx.optimize(model)
    seen: list[tuple[bool, bool]] = []

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        image = [*args, *kwargs.values()][0]
        result = output[0] if isinstance(output, tuple) else output
        seen.append(tuple(x.is_contiguous(memory_format=torch.channels_last) for x in (image, result)))  # type: ignore[arg-type]

    for module in image_modules(model):
        module.register_forward_hook(note, with_kwargs=True)
    run(name, model)
    assert all(result for _, result in seen)
    # The first one reads the first convolution's result, which the last skip connection joins too.
    assert [given for given, _ in seen].count(False) == 2 and not seen[0][0]
    convolutions = [m for part in image_modules(model) for m in part.modules() if isinstance(m, nn.Conv2d)]
    assert all(m.weight.is_contiguous(memory_format=torch.channels_last) for m in convolutions)


@pytest.mark.host
@every_model
def test_restore_gives_everything_back(ltx: ModuleType, device: str, name: str) -> None:
    model = make(name, device)
    before = {key: (value.stride(), value.clone()) for key, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    stock = run(name, model)
    report = ltx.optimize(model)
    for _ in range(3):
        run(name, model)
    assert any(value.stride() != before[key][0] for key, value in model.state_dict().items())
    report.restore()
    assert torch.equal(run(name, model), stock)
    for key, (stride, value) in before.items():
        assert model.state_dict()[key].stride() == stride and torch.equal(model.state_dict()[key], value)
    assert all(parameter is parameters[key] for key, parameter in model.named_parameters())
    assert not any(key.startswith("_ltx") for module in model.modules() for key in module.__dict__)


def test_recorded_calls(ltx: ModuleType, device: str) -> None:
    """The third call replays functions of the second, and gives its bits."""
    model = make("sdxl", device)
    report = ltx.optimize(model)
    first, second, third = (run("sdxl", model) for _ in range(3))
    assert torch.equal(first, second) and torch.equal(first, third)
    told = str(report)
    assert "recorded calls: 8 of 8 diffusers.ResnetBlock2D" in told
    assert "recorded calls: 1 of 1 diffusers.Upsample2D" in told
    assert image_calls(report) == {key: 3 * count for key, count in COUNTS["sdxl"].items()}


def test_inputs_keep_their_values(ltx: ModuleType, device: str) -> None:
    """The sum of a block may take the memory of a convolution's result, and never that of what was given."""
    model = make("sd 1.5", device)
    ltx.optimize(model)
    block = model.up_blocks[0].resnets[0]
    image = randn(2, block.in_channels, 5, 6).to(device).to(memory_format=torch.channels_last)
    temb, kept = randn(2, 128).to(device), image.clone()
    with torch.no_grad():
        results = [block(image, temb) for _ in range(3)]
    assert torch.equal(image, kept)
    assert len({result.data_ptr() for result in results}) == 3 and torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", ["sdxl", "sd 1.5"])
def test_residuals_of_a_controlnet(ltx: ModuleType, device: str, name: str) -> None:
    model = make(name, device)
    widths = (16, 16, 16, 32) if name == "sdxl" else (32, 32, 32, 64)
    sizes = (8, 8, 4, 4)
    more = {
        "down_block_additional_residuals": tuple(
            randn(2, width, size, size, seed=seed).to(device) for seed, (width, size) in enumerate(zip(widths, sizes))
        ),
        "mid_block_additional_residual": randn(2, widths[-1], 4, 4, seed=9).to(device),
    }
    stock = run(name, model, **more)
    report = ltx.optimize(model)
    close(run(name, model, **more), stock)
    assert report.fallbacks == {} and image_calls(report) == COUNTS[name]
    assert error(stock, run(name, model).double()) > 0.01


def test_free_u(ltx: ModuleType, device: str) -> None:
    model = make("sdxl", device)
    report = ltx.optimize(model)
    without = run("sdxl", model)
    model.enable_freeu(s1=0.9, s2=0.2, b1=1.3, b2=1.4)
    ours = run("sdxl", model)
    assert report.fallbacks == {}
    report.restore()
    close(ours, run("sdxl", model))
    assert error(ours, without.double()) > 0.001


def test_motion_modules(ltx: ModuleType, device: str) -> None:
    """AnimateDiff's UNet: time embeddings are repeated for the frames; the motion modules stay diffusers'."""
    torch.manual_seed(0)
    config = {key: value for key, value in SD15.items() if key != "attention_head_dim"}
    model = random_(
        diffusers.UNetMotionModel(
            **{**config, "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion")},
            up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"),
            num_attention_heads=2,
            motion_num_attention_heads=2,
        )
    ).to(device)
    inputs = {
        "sample": randn(1, 4, 3, 8, 8).to(device),
        "timestep": torch.tensor([500.0], device=device),
        "encoder_hidden_states": randn(3, 5, 24, seed=2).to(device),
    }
    with torch.no_grad():
        stock = model(**inputs, return_dict=False)[0]
        report = ltx.optimize(model)
        close(model(**inputs, return_dict=False)[0], stock)
    assert report.fallbacks == {} and all(image_calls(report).values())


@pytest.mark.host
@pytest.mark.parametrize("name", ["sdxl", "sd 1.5"])
def test_hooks_on_every_module(ltx: ModuleType, device: str, name: str) -> None:
    """A hook on any module runs as often as in the stock model, and its changes count."""
    stock_model, model = make(name, device), make(name, device)
    stock = run(name, stock_model)
    ltx.optimize(model)
    run(name, model)
    first = image_modules(model)
    chosen = {type(m).__name__: n for n, m in reversed(list(model.named_modules())) if any(m is part for part in first)}
    for module in chosen.values():
        for inside, part in model.get_submodule(module).named_modules(prefix=module):
            if isinstance(part, nn.ModuleList) or ".transformer_blocks." in inside:
                continue
            count: dict[str, int] = {"stock": 0, "ours": 0}

            def halved(_: Any, args: Any, output: Any, where: str) -> Any:
                count[where] += 1  # noqa: B023
                return (0.5 * output[0],) if isinstance(output, tuple) else 0.5 * output

            handles = [
                m.get_submodule(inside).register_forward_hook(lambda *given, where=where: halved(*given, where=where))
                for where, m in (("stock", stock_model), ("ours", model))
            ]
            close(run(name, model), run(name, stock_model))
            assert count["ours"] == count["stock"] > 0, inside
            for handle in handles:
                handle.remove()
    close(run(name, model), stock)


@pytest.mark.parametrize("name", ["sdxl", "sd 1.5"])
def test_lora_of_convolutions(ltx: ModuleType, device: str, name: str) -> None:
    """As LCM-LoRA's, which adapts the convolutions and the layers around the transformer blocks as well."""
    peft = pytest.importorskip("peft")
    model = make(name, device)
    bare = run(name, model)
    report = ltx.optimize(model)
    run(name, model)
    layers = ["conv1", "conv2", "time_emb_proj", "conv_shortcut", "proj_in", "proj_out", "upsamplers.0.conv", "to_q"]
    torch.manual_seed(0)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=layers, init_lora_weights=False))
    model.requires_grad_(False)
    ours = [run(name, model) for _ in range(3)]
    assert report.fallbacks == {} and image_calls(report) == {key: 4 * n for key, n in COUNTS[name].items()}
    report.restore()
    stock = run(name, model)
    assert error(stock, bare.double()) > 0.01
    for result in ours:
        close(result, stock)


@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_group_offload(ltx: ModuleType, device: str, kind: str) -> None:
    stock = run("sd 1.5", make("sd 1.5", device))
    model = make("sd 1.5", "cpu")
    ltx.optimize(model)
    model.enable_group_offload(
        onload_device=torch.device(device),
        offload_device=torch.device("cpu"),
        offload_type=kind,
        num_blocks_per_group=1 if kind == "block_level" else None,
    )
    inputs = inputs_of("sd 1.5", make("sd 1.5", device))
    for _ in range(2):
        with torch.no_grad():
            close(model(**inputs, return_dict=False)[0].flatten(), stock)


def test_dtypes_that_change_between_calls(ltx: ModuleType, device: str) -> None:
    model = make("sdxl", device, torch.bfloat16)
    report = ltx.optimize(model)
    first = run("sdxl", model)
    wanted = run("sdxl", make("sdxl", device, torch.bfloat16).to(torch.float32))
    close(run("sdxl", model.to(torch.float32)), wanted)
    assert torch.equal(run("sdxl", model.to(torch.bfloat16)), first) and report.fallbacks == {}


def test_gradients(ltx: ModuleType, device: str) -> None:
    """A call that needs one runs stock, in the memory order that it had."""
    model = make("sd 1.5", device)
    report = ltx.optimize(model)
    run("sd 1.5", model)
    parameter = model.down_blocks[0].resnets[0].conv1.weight.requires_grad_()
    inputs = inputs_of("sd 1.5", model)
    with torch.enable_grad():
        model(**inputs, return_dict=False)[0].sum().backward()
    ours = parameter.grad.clone()
    assert reasons_of(report) == {"a gradient is needed"} == reasons_of(report, "Transformer2DModel")
    assert not any("_ltx_kernels_moved" in vars(module) for module in model.modules())
    report.restore()
    parameter.grad = None
    with torch.enable_grad():
        model(**inputs, return_dict=False)[0].sum().backward()
    close(ours, parameter.grad)


def test_autocast(ltx: ModuleType, device: str) -> None:
    """On a GPU torch's GroupNorm returns float32 then, which an op does not."""
    model = make("sd 1.5", device)
    with torch.autocast(device, torch.bfloat16):
        stock = run("sd 1.5", model)
        report = ltx.optimize(model)
        result = run("sd 1.5", model)
    told = {"autocast returns torch.float32 for an input of torch.bfloat16"} if device == "cuda" else set()
    assert told <= reasons_of(report) and error(result, stock.double()) < 0.02


def test_compile(ltx: ModuleType, device: str) -> None:
    """The compiler gets the stock code of these modules, and fuses it."""
    model = make("sd 1.5", device)
    stock = run("sd 1.5", model)
    report = ltx.optimize(model)
    compiled = torch.compile(model, backend="eager")
    close(run("sd 1.5", compiled), stock)
    assert reasons_of(report) == {"torch.compile fuses what stands between convolutions itself (compiled)"}


def stock_resnet(**options: Any) -> Any:
    config = {"in_channels": 32, "out_channels": 64, "temb_channels": 16, "groups": 8, **options}
    return random_(diffusers.models.resnet.ResnetBlock2D(**config))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"up": True, "kernel": "fir"}, "its upsample computes with a kernel, or more than one step"),
        ({"down": True, "kernel": "fir"}, "its downsample computes with a kernel, or more than one step"),
        ({"non_linearity": "mish"}, "nonlinearity is torch.nn.modules.activation.Mish"),
    ],
    ids=str,
)
def test_residual_blocks_that_are_left_alone(ltx: ModuleType, options: dict[str, Any], reason: str) -> None:
    assert ltx.optimize(stock_resnet(**options)).left_alone[""] == reason


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"skip_time_act": True},
        {"conv_shortcut_bias": False},
        {"eps": 0.3},
        {"time_embedding_norm": "scale_shift"},
        {"up": True},
        {"down": True},
        {"up": True, "time_embedding_norm": "scale_shift", "out_channels": 32},
        {"output_scale_factor": 2.0},
        {"non_linearity": "gelu"},
        {"non_linearity": "gelu", "time_embedding_norm": "scale_shift", "skip_time_act": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("contiguous", [False, True])
def test_residual_block(ltx: ModuleType, device: str, options: dict[str, Any], contiguous: bool) -> None:
    block = stock_resnet(**options).to(device)
    order = torch.contiguous_format if contiguous else torch.channels_last
    given = {"input_tensor": randn(2, 32, 5, 6).to(device).to(memory_format=order), "temb": randn(2, 16).to(device)}
    with torch.no_grad():
        stock = block(**given)
        report = ltx.optimize(block, strict=True)
        for _ in range(3):
            result = block(**given)
            close(result, stock)
            assert result.is_contiguous(memory_format=torch.channels_last)
    assert report.fallbacks == {}
    assert "recorded calls: 1 of 1 diffusers.ResnetBlock2D" in str(report)


@pytest.mark.parametrize("options", [{"time_embedding_norm": "scale_shift"}, {"up": True}, {"down": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_error_of_a_residual_block(
    ltx: ModuleType, device: str, dtype: torch.dtype, options: dict[str, Any], request: Any
) -> None:
    """Not further from the block in fp64 than the stock block is."""
    if device == "cpu":
        request.getfixturevalue("exact_convolutions")
    block = stock_resnet(**options).to(device, dtype)
    image, temb = randn(8, 32, 10, 12).to(device, dtype), randn(8, 16).to(device, dtype)
    with torch.no_grad():
        stock, truth = block(image, temb), copy.deepcopy(block).double()(image.double(), temb.double())
        report = ltx.optimize(block)
        assert error(block(image, temb), truth) <= 1.1 * error(stock, truth)
    assert report.fallbacks == {}


def test_reasons_of_a_residual_block(ltx: ModuleType, device: str) -> None:
    block = stock_resnet(dropout=0.5).to(device)
    image, temb = randn(2, 32, 5, 6).to(device), randn(2, 16).to(device)

    def why(*given: Tensor, **options: Any) -> str:
        stock_block = copy.deepcopy(block)
        report = ltx.optimize(block)
        with torch.no_grad():
            torch.manual_seed(0)
            ours = block(*given, **options)
            torch.manual_seed(0)
            assert torch.equal(ours, stock_block(*given, **options))
        report.restore()
        (reason,) = reasons_of(report)
        return reason

    assert why(image, temb[:1]) == "a time embedding of shape [1, 16]"
    assert why(image, temb, scale=1.0) == "arguments scale"
    block.conv1.weight.data = block.conv1.weight.data.double()
    block.conv1.bias.data = block.conv1.bias.data.double()
    report = ltx.optimize(block)
    with torch.no_grad(), pytest.raises(RuntimeError):  # of the stock module
        block(image, temb)
    assert reasons_of(report) == {"a weight has dtype torch.float64, the input torch.float32"}
    report.restore()
    block.float().train()
    assert why(image, temb) == "dropout is on, or has a hook"
    block.eval()
    block.time_emb_proj = None
    assert "a time embedding without a layer" in why(image, randn(2, 64, 1, 1).to(device))


@pytest.mark.parametrize("options", [{"up": True}, {"down": True}], ids=str)
def test_hooks_of_a_change_of_size(ltx: ModuleType, device: str, options: dict[str, Any]) -> None:
    block = stock_resnet(**options).to(device)
    (name,) = (f"{name}sample" for name in options)
    block.get_submodule(name).register_forward_hook(lambda _, __, output: 2 * output)
    given = randn(2, 32, 6, 8).to(device), randn(2, 16).to(device)
    with torch.no_grad():
        stock = block(*given)
        report = ltx.optimize(block)
        close(block(*given), stock)
    assert reasons_of(report) == {f"{name} has a hook"}


def test_a_scale_without_a_time_embedding(ltx: ModuleType, device: str) -> None:
    """The stock block refuses it."""
    block = stock_resnet(time_embedding_norm="scale_shift", temb_channels=None).to(device)
    ltx.optimize(block)
    with torch.no_grad(), pytest.raises(ValueError, match="temb"):
        block(randn(2, 32, 6, 8).to(device), None)


def test_convolutions_that_pad_otherwise(ltx: ModuleType, device: str) -> None:
    """As users make textures that repeat: the convolution is called."""
    block = stock_resnet().to(device)
    image, temb = randn(2, 32, 5, 6).to(device), randn(2, 16).to(device)
    with torch.no_grad():
        zeros = block(image, temb)
        block.conv1.padding_mode = "circular"
        block.conv1._reversed_padding_repeated_twice = [1, 1, 1, 1]
        stock = block(image, temb)
        report = ltx.optimize(block)
        close(block(image, temb), stock)
    assert report.fallbacks == {} and error(stock, zeros.double()) > 0.01


def _dilated(block: nn.Module) -> None:
    for conv in (block.conv1, block.conv2):
        conv.dilation, conv.padding = (2, 2), "same"


def _grouped(block: nn.Module) -> None:
    conv = block.conv2
    conv.groups, conv.weight.data = 2, conv.weight.data[:, : conv.in_channels // 2].contiguous()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("change", [_dilated, _grouped])
def test_convolutions_of_another_form(
    ltx: ModuleType, device: str, change: Callable[[nn.Module], None], before: bool
) -> None:
    """Changed before `optimize`, or between calls."""
    block = stock_resnet().to(device)
    other, given = copy.deepcopy(block), (randn(2, 32, 5, 6).to(device), randn(2, 16).to(device))
    change(other)
    with torch.no_grad():
        plain, changed = block(*given), other(*given)
        if before:
            change(block)
        report = ltx.optimize(block)
        results = [block(*given) for _ in range(3)]
        if not before:
            change(block)
            results = [block(*given) for _ in range(3)]
    for result in results:
        close(result, changed)
    assert report.fallbacks == {} and error(changed, plain.double()) > 0.01


def test_a_projection_in_groups(ltx: ModuleType, device: str) -> None:
    """A convolution of single pixels is no linear layer then."""
    model = make("sd 1.5", device)
    for module in model.modules():
        if type(module).__name__ == "Transformer2DModel":
            conv = module.proj_in
            conv.groups, conv.weight.data = 2, conv.weight.data[:, : conv.in_channels // 2].contiguous()
    stock = run("sd 1.5", model)
    report = ltx.optimize(model)
    close(run("sd 1.5", model), stock)
    assert report.fallbacks == {}


def test_weights_stay_where_another_thread_reads_them(ltx: ModuleType, device: str) -> None:
    """A call moves weights into the order of its convolutions only while no other thread is in a call."""
    block = stock_resnet().to(device)
    given, weight = (randn(2, 32, 5, 6).to(device), randn(2, 16).to(device)), block.conv1.weight
    entered, leave = threading.Event(), threading.Event()
    results: list[Tensor] = []

    def call(gradient: bool) -> None:
        with torch.set_grad_enabled(gradient):
            results.append(block(*given).detach())

    def wait(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            leave.wait(60)

    call(False)
    report = ltx.optimize(block)
    assert weight.is_contiguous(memory_format=torch.channels_last)
    weight.requires_grad_()
    block.conv2.register_forward_hook(wait)
    for gradient, order in ((True, torch.contiguous_format), (False, torch.channels_last)):
        entered.clear()
        leave.clear()
        other, address = threading.Thread(target=call, args=(not gradient,)), weight.data_ptr()
        other.start()
        assert entered.wait(60)
        call(gradient)
        stayed = weight.data_ptr() == address
        leave.set()
        other.join()
        assert stayed
        call(gradient)
        assert weight.is_contiguous(memory_format=order)
    for result in results[1:]:
        close(result, results[0])
    assert report.fallbacks


def test_masks_and_scales_of_a_transformer(ltx: ModuleType, device: str) -> None:
    model = make("sdxl", device)
    transformer = next(m for m in model.modules() if type(m).__name__ == "Transformer2DModel")
    image, text = randn(2, 32, 4, 4).to(device), randn(2, 5, 24).to(device)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], device=device)
    given = {"hidden_states": image, "encoder_hidden_states": text}
    bias = ((1 - mask.float()) * -10000.0).unsqueeze(1)
    with torch.no_grad():
        stock = transformer(**given, encoder_attention_mask=mask).sample
        report = ltx.optimize(transformer)
        close(transformer(**given, encoder_attention_mask=bias).sample, stock)
        assert report.fallbacks == {}
        close(transformer(**given, encoder_attention_mask=mask).sample, stock)
    assert reasons_of(report, "Transformer2DModel") == {"encoder_attention_mask of two dimensions"}
