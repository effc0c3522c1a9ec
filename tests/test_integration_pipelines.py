"""`optimize` on pipelines of diffusers, end to end: what each hands its transformer and its autoencoder."""

from __future__ import annotations

import copy
import inspect
import sys
import types
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import ltx_pipeline  # noqa: E402
from families import qwenimage, wan  # noqa: E402
from helpers import language_models  # noqa: E402
from PIL import Image  # noqa: E402
from test_vae import make_vae  # noqa: E402

HEIGHT, WIDTH, FRAMES, STEPS = 64, 96, 9, 2


@pytest.fixture(scope="module")
def components(device: str) -> dict[str, Any]:
    ltx_pipeline.quiet()
    return ltx_pipeline.load_pipeline("tiny", torch.device(device), torch.float32).components


def with_plain_scheduler(pipeline: type) -> Any:
    """For the pipelines whose noise levels are not shifted by the number of tokens."""
    return lambda parts: pipeline(**{**parts, "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()})


picture = Image.linear_gradient("L").convert("RGB").resize((WIDTH, HEIGHT))
# (pipeline, its image argument, whether each token has a timestep of its own)
KINDS = {
    "text": (lambda parts: diffusers.LTXPipeline(**parts), {}, False),
    "image": (lambda parts: diffusers.LTXImageToVideoPipeline(**parts), {"image": picture}, True),
    "condition": (with_plain_scheduler(diffusers.LTXConditionPipeline), {"image": picture}, True),
    "long": (with_plain_scheduler(diffusers.LTXI2VLongMultiPromptPipeline), {"cond_image": picture}, True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pipeline(ltx: ModuleType, device: str, components: dict[str, Any], kind: str) -> None:
    make, arguments, per_token = KINDS[kind]
    pipe = make(components)
    pipe.set_progress_bar_config(disable=True)
    shapes: list[int] = []
    hook = pipe.transformer.transformer_blocks[0].register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["temb"].shape[1]), with_kwargs=True
    )

    def generate() -> Tensor:
        with torch.no_grad():
            return pipe(
                prompt="a kite",
                negative_prompt="blurry",
                height=HEIGHT,
                width=WIDTH,
                num_frames=FRAMES,
                num_inference_steps=STEPS,
                guidance_scale=3.0,
                generator=torch.Generator().manual_seed(0),
                output_type="latent",
                return_dict=False,
                **arguments,
            )[0]

    stock = generate()
    report = ltx.optimize(pipe)
    assert report.target.startswith(type(pipe).__name__) and report.left_alone == {}
    ours = generate()
    ltx.restore(pipe)
    hook.remove()
    assert torch.equal(generate(), stock)
    assert all((count > 1) == per_token for count in shapes)
    assert report.fallbacks == {}
    assert {site.name: site.calls for site in report.sites}["diffusers.LTXVideoTransformerBlock"] >= STEPS
    assert ((ours - stock).norm() / stock.norm()).item() < 1e-4


def touched(components: dict[str, Any]) -> set[str]:
    """The components that hold a replaced module."""
    parts = {name: part for name, part in components.items() if isinstance(part, torch.nn.Module)}
    return {name for name, part in parts.items() if any("forward" in module.__dict__ for module in part.modules())}


def with_half_vae(components: dict[str, Any]) -> dict[str, Any]:
    """The components with an autoencoder in bfloat16."""
    return {**components, "vae": copy.deepcopy(components["vae"]).to(torch.bfloat16)}


def test_components(ltx: ModuleType, components: dict[str, Any]) -> None:
    pipe = diffusers.LTXPipeline(**components)
    report = ltx.optimize(pipe)
    assert touched(components) == {"transformer", "text_encoder"}  # an autoencoder in float32 has to be named
    report.restore()
    components = with_half_vae(components)
    pipe = diffusers.LTXPipeline(**components)
    report = ltx.optimize(pipe)
    assert touched(components) == {"transformer", "text_encoder", "vae"}
    report.restore()
    assert not touched(components)
    ltx.optimize(pipe, level="norms")
    assert touched(components) == {"transformer"}
    ltx.restore(pipe)
    small = {"encoder_block_out_channels": (8,), "decoder_block_out_channels": (8,)}
    tiny = diffusers.AutoencoderTiny(**small, num_encoder_blocks=(1,), num_decoder_blocks=(1,)).to(torch.bfloat16)
    with_other_vae = types.SimpleNamespace(components={**components, "vae": tiny})
    ltx.optimize(with_other_vae)
    assert touched(with_other_vae.components) == {"transformer", "text_encoder"}
    ltx.restore(with_other_vae)
    both = ltx.optimize(pipe, components=["transformer", "text_encoder"])
    assert both.left_alone == {}
    assert {"diffusers.LTXVideoTransformerBlock", "transformers.T5Block"} <= {site.name for site in both.sites}
    ltx.restore(pipe)
    for name in ("transformer_2", "transformer_ref", "unconditional_transformer"):  # second models of a pipeline
        second = types.SimpleNamespace(components={name: copy.deepcopy(pipe.transformer)})
        assert ltx.optimize(second).replaced["diffusers.LTXVideoTransformerBlock"] == len(
            pipe.transformer.transformer_blocks
        )
    with_controlnet = types.SimpleNamespace(components={**components, "controlnet": copy.deepcopy(pipe.transformer)})
    assert ltx.optimize(with_controlnet).replaced["diffusers.LTXVideoTransformerBlock"] == 2 * len(
        pipe.transformer.transformer_blocks
    )
    ltx.restore(with_controlnet)
    with pytest.raises(ValueError, match=r"components: expected names among .*transformer.*, got 'decoder'"):
        ltx.optimize(pipe, components=["decoder"])


def with_clip(components: dict[str, Any], device: str) -> Any:
    """A pipeline with the text encoders of FLUX.1: CLIP, whose blocks are not known, and T5."""
    config = transformers.CLIPTextConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=99)
    clip = transformers.CLIPTextModel(config).to(device)
    models = {
        "transformer": components["transformer"],
        "text_encoder": clip,
        "text_encoder_2": components["text_encoder"],
    }
    return types.SimpleNamespace(components={name: copy.deepcopy(model).eval() for name, model in models.items()})


def test_text_encoders(ltx: ModuleType, device: str, components: dict[str, Any]) -> None:
    """They are taken where their blocks are known, and unless `graphs` is False in any case."""
    pipe = with_clip(components, device)
    report = ltx.optimize(pipe, graphs=False)
    assert touched(pipe.components) == {"transformer", "text_encoder_2"} and report.left_alone == {}
    for options in ({}, {"graphs": True}):
        report = ltx.optimize(pipe, **options)
        assert touched(pipe.components) == {"transformer", "text_encoder", "text_encoder_2"}
        assert report.left_alone == {}
    ltx.optimize(pipe, graphs=False)
    assert touched(pipe.components) == {"transformer", "text_encoder_2"}
    ltx.optimize(pipe, level="norms")
    assert touched(pipe.components) == {"transformer"}


def test_text_encoders_in_fp8(ltx: ModuleType, fp8_device: str, components: dict[str, Any]) -> None:
    """Text encoders stay in their own precision unless they are named."""
    encoder = language_models.make_model(fp8_device, torch.bfloat16, "Qwen3")
    transformer = copy.deepcopy(components["transformer"]).to(torch.bfloat16)
    pipe = types.SimpleNamespace(components={"transformer": transformer, "text_encoder": encoder})
    quantised = ltx.integrations.linear.fp8.in_fp8

    def of_fp8() -> set[str]:
        models = pipe.components.items()
        return {name for name, model in models if any(map(quantised, model.modules()))}

    report = ltx.optimize(pipe, precision="fp8")
    assert touched(pipe.components) == {"transformer", "text_encoder"} and of_fp8() == {"transformer"}
    assert "not in fp8, since `components` does not name them: text_encoder" in str(report)
    ltx.optimize(pipe, precision="fp8", components=["transformer", "text_encoder"])
    assert of_fp8() == {"transformer", "text_encoder"}


def test_another_level_leaves_nothing_of_the_first(ltx: ModuleType, components: dict[str, Any]) -> None:
    """Level "norms" takes out what level "block" put into the autoencoder and the text encoder."""
    components = with_half_vae(components)
    pipe = diffusers.LTXPipeline(**components)
    ltx.optimize(pipe)
    assert touched(components) == {"transformer", "text_encoder", "vae"}
    with ltx.optimize(pipe, level="norms"):
        assert touched(components) == {"transformer"}
    assert not touched(components)


def test_nothing_was_replaced(ltx: ModuleType, components: dict[str, Any]) -> None:
    """An autoencoder that is replaced hides no model that is not; alone in its pipeline it is all there is."""
    components = with_half_vae(components)
    unknown = types.SimpleNamespace(components={**components, "transformer": torch.nn.Linear(2, 2)})
    with pytest.warns(UserWarning, match="nothing was replaced in transformer\n") as warned:
        report = ltx.optimize(unknown)
    assert "left alone: transformer: nothing in torch.nn.modules.linear.Linear" in str(warned[0].message)
    report.restore()
    alone = types.SimpleNamespace(components={"vae": components["vae"]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ltx.optimize(alone, strict=True).restore()
    with pytest.warns(
        UserWarning, match="nothing was replaced\n.*\n.*\n.*no vae or text encoder that is known at level norms"
    ):
        ltx.optimize(alone, level="norms")


# ---- Other families: the autoencoder goes with the transformer


def assembled(name: str, **parts: Any) -> Any:
    """A pipeline of some components, without the others; prompts are given as embeddings."""
    cls = getattr(diffusers, name)
    required = [key for key, p in inspect.signature(cls.__init__).parameters.items() if p.default is p.empty]
    missing = dict.fromkeys(key for key in required if key != "self")
    return cls(**{**missing, "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(), **parts})


def of_wan(name: str, device: str, vae: str = "wan 2.1", **config: Any) -> Any:
    transformer = wan.make(**{"in_channels": 8, "out_channels": 8, **config}).to(device).eval()
    options = {"expand_timesteps": True} if vae == "wan 2.2" else {}
    return assembled(name, transformer=transformer, vae=make_vae(vae, device, torch.float32), **options)


def of_qwen(name: str, device: str) -> Any:
    vae = diffusers.AutoencoderKLQwenImage(base_dim=8, z_dim=2, latents_mean=[0.0] * 2, latents_std=[1.0] * 2)
    return assembled(name, transformer=qwenimage.make().to(device).eval(), vae=vae.to(device).eval())


def upsampler(device: str) -> Any:
    model = diffusers.pipelines.ltx.modeling_latent_upsampler.LTXLatentUpsamplerModel
    upsampler = model(in_channels=8, mid_channels=32, num_blocks_per_stage=1).to(device).eval()
    vae = make_vae("ltx 0.9.5", device, torch.float32)
    return diffusers.LTXLatentUpsamplePipeline(vae=vae, latent_upsampler=upsampler)


square = picture.resize((64, 64))
VACE = {"cls": diffusers.WanVACETransformer3DModel, "vace_layers": [0, 1], "vace_in_channels": 80}
# (pipeline, its arguments beside the prompt's, the replaced halves of the autoencoder that it calls)
OTHERS = {
    "wan": (lambda device: of_wan("WanPipeline", device), {}, "Decoder"),
    "wan 2.2": (lambda device: of_wan("WanPipeline", device, "wan 2.2"), {}, "Decoder"),
    "wan image": (
        lambda device: of_wan("WanImageToVideoPipeline", device, in_channels=20),
        {"image": square},
        "Encoder Decoder",
    ),
    "wan vace": (
        lambda device: of_wan("WanVACEPipeline", device, **VACE),
        {"video": [square] * 5, "mask": [square] * 5},
        "Encoder Decoder",
    ),
    "qwen": (lambda device: of_qwen("QwenImagePipeline", device), {}, "Decoder"),
    "qwen edit": (lambda device: of_qwen("QwenImageEditPipeline", device), {"image": square}, "Encoder Decoder"),
    "upsampler": (upsampler, {"video": [square] * 9}, "Encoder Decoder"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_autoencoder_of_other_pipelines(ltx: ModuleType, device: str, kind: str) -> None:
    make, arguments, halves = OTHERS[kind]
    torch.manual_seed(0)
    pipe = make(device)
    pipe.set_progress_bar_config(disable=True)
    prompt = {"prompt_embeds": torch.randn(1, 5, 32, device=device), "num_inference_steps": STEPS}
    prompt |= {"num_frames": 5, "guidance_scale": 1.0} if "wan" in kind else {"true_cfg_scale": 1.0}
    prompt |= {"prompt_embeds_mask": torch.ones(1, 5, dtype=torch.long, device=device)} if "qwen" in kind else {}

    def generate() -> Tensor:
        torch.manual_seed(1)
        options = {"height": 64, "width": 64, "output_type": "pt", "return_dict": False, **arguments}
        return pipe(**options, **({} if kind == "upsampler" else prompt))[0]

    stock = generate()
    parts = [name for name in ("transformer", "vae") if name in pipe.components]
    report = ltx.optimize(pipe, components=parts, strict=True)
    ours = generate()
    calls = {site.name: site.calls for site in report.sites}
    report.restore()
    assert torch.equal(generate(), stock)
    assert report.fallbacks == {}
    assert {half for half in ("Encoder", "Decoder") for name in calls if f"{half}3d" in name and calls[name]} == set(
        halves.split()
    )
    assert ((ours - stock).norm() / stock.norm()).item() < 1e-4


# ---- Images, with default options


def image_vae(latents: int, device: str, dtype: torch.dtype, **config: Any) -> Any:
    stages = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    config = {"block_out_channels": (32, 64), "latent_channels": latents, **stages, **config}
    return diffusers.AutoencoderKL(**config).to(device, dtype).eval()


def of_flux(name: str, device: str, components: dict[str, Any]) -> Any:
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=components["text_encoder"].config.d_model,
        pooled_projection_dim=8,
        axes_dims_rope=[4, 4, 8],
    ).to(device, torch.bfloat16)
    quant = {"use_quant_conv": False, "use_post_quant_conv": False, "force_upcast": False, "shift_factor": 0.1}
    encoder = copy.deepcopy(components["text_encoder"]).to(torch.bfloat16)
    parts = {"transformer": transformer.eval(), "vae": image_vae(4, device, torch.bfloat16, **quant)}
    return assembled(name, **parts, text_encoder_2=encoder, tokenizer_2=components["tokenizer"])


UNET: dict[str, Any] = {
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "cross_attention_dim": 32,
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
}


def of_sdxl(name: str, device: str, components: dict[str, Any]) -> Any:
    """In float16, as it is usually loaded: its pipelines cast the autoencoder to float32 for a call, and back."""
    unet = diffusers.UNet2DConditionModel(
        **UNET,
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 16,
    )
    vae = image_vae(4, device, torch.float16)
    scheduler = diffusers.EulerDiscreteScheduler()
    return assembled(name, unet=unet.to(device, torch.float16).eval(), vae=vae, scheduler=scheduler)


def of_controlnet(name: str, device: str, components: dict[str, Any]) -> Any:
    parts = of_sdxl("StableDiffusionXLPipeline", device, components).components
    options: dict[str, Any] = {"conditioning_embedding_out_channels": (16, 32)}
    if "Union" in name:
        options |= {"num_trans_channel": 32, "num_trans_head": 2, "num_proj_channel": 32}
    model = diffusers.ControlNetUnionModel if "Union" in name else diffusers.ControlNetModel
    controlnet = model.from_config(parts["unet"].config, **options)
    for parameter in controlnet.parameters():  # zeros, where its results are added to the UNet's
        parameter.data.normal_(0, 0.05)
    return assembled(name, **parts, controlnet=controlnet.to(device, torch.float16).eval())


def of_sd15(name: str, device: str, components: dict[str, Any]) -> Any:
    """Its blocks stand between convolutions of one pixel, and it has as many heads in each."""
    unet = diffusers.UNet2DConditionModel(**UNET, sample_size=32, attention_head_dim=4)
    vae = image_vae(4, device, torch.float16)
    parts = {
        "unet": unet.to(device, torch.float16).eval(),
        "vae": vae,
        "scheduler": diffusers.EulerDiscreteScheduler(steps_offset=1),
    }
    return assembled(name, **parts, requires_safety_checker=False)


IMAGES: dict[str, tuple[Any, dict[str, Any], set[str]]] = {
    "FluxPipeline": (of_flux, {}, {"Decoder"}),
    "FluxImg2ImgPipeline": (of_flux, {"image": square, "strength": 0.5}, {"Decoder", "Encoder"}),
    "StableDiffusionXLPipeline": (of_sdxl, {}, {"Decoder"}),
    "StableDiffusionPipeline": (of_sd15, {}, {"Decoder"}),
    "StableDiffusionXLControlNetPipeline": (of_controlnet, {"image": square}, {"Decoder"}),
    "StableDiffusionXLControlNetUnionPipeline": (
        of_controlnet,
        {"control_image": [square], "control_mode": [0]},
        {"Decoder"},
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.extended if "ControlNet" in name else ()) for name in IMAGES]
)
def test_images(ltx: ModuleType, device: str, components: dict[str, Any], name: str) -> None:
    """From the prompt to the picture, with default options: text encoder, denoiser and autoencoder run the ops."""
    make, arguments, halves = IMAGES[name]
    torch.manual_seed(0)
    pipe = make(name, device, components)
    pipe.set_progress_bar_config(disable=True)
    dtype = pipe.vae.dtype

    def embedded() -> dict[str, Tensor]:
        if "Stable" in name:
            pooled = {"pooled_prompt_embeds": torch.ones(1, 16, device=device, dtype=dtype)} if "XL" in name else {}
            return {"prompt_embeds": torch.ones(1, 5, 32, device=device, dtype=dtype), **pooled}
        embeds = pipe._get_t5_prompt_embeds("a kite", max_sequence_length=16, device=device, dtype=dtype)
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": torch.ones(1, 8, device=device, dtype=dtype)}

    def generate() -> Tensor:
        torch.manual_seed(1)
        options = {"height": 64, "width": 64, "output_type": "pt", "return_dict": False, "guidance_scale": 1.0}
        with torch.no_grad():
            return pipe(**embedded(), **options, num_inference_steps=2, **arguments)[0]

    stock = generate()
    report = ltx.optimize(pipe)
    ours = generate()
    calls = {site.name: site.calls for site in report.sites}
    report.restore()
    assert torch.equal(generate(), stock)
    assert report.fallbacks == {} and pipe.vae.dtype == dtype
    assert {half for half in ("Decoder", "Encoder") if calls[f"diffusers.{half}"]} == halves
    of_unet = ("BasicTransformerBlock", "ResnetBlock2D", "Transformer2DModel", "Upsample2D")
    blocks = of_unet if "Stable" in name else ("FluxTransformerBlock",)
    assert all(calls[f"diffusers.{block}"] >= 1 for block in blocks)
    assert calls.get("transformers.T5Block", 0) >= ("Flux" in name)
    assert ((ours - stock).norm() / stock.norm()).item() < 0.02
