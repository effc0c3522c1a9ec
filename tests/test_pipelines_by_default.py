"""`optimize(pipe)` with default options on tiny pipelines of the families: prompt, denoiser and autoencoder run ops."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
import test_vae  # noqa: E402
import test_vae_images  # noqa: E402
from families import families, random_  # noqa: E402
from helpers import language_models  # noqa: E402
from helpers.diffusers_models import BLOCK_NAMES  # noqa: E402
from test_integration_pipelines import assembled, touched  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 32  # pixels of an image's edge
ENCODERS = "T5", "UMT5"  # text encoders that are not causal language models
KNOWN = families()


def embedded(embeds: Tensor) -> dict[str, Any]:
    return {"prompt_embeds": embeds}


@dataclass(frozen=True)
class Pipeline:
    """A tiny pipeline, whose prompt is given as the embeddings that its text encoder makes.

    family: The family of its transformer, in tests/families.
    text: The family of its text encoder, one of ENCODERS or a language model.
    width: How many features of an embedding the transformer takes.
    vae: Makes its autoencoder.
    prompt: The arguments that a prompt becomes, from its embeddings [1, tokens, width].
    arguments: Other arguments of a call.
    attributes: What the pipeline holds because its released models are larger.
    config: What of the transformer's configuration differs from the family's.
    component: The name of its text encoder.
    clips: The names of its other text encoders, CLIP's, which `optimize` leaves as they are.
    known_vae: `optimize` knows its autoencoder.
    distance: How far results may be from stock ones, relative to the stock result's deviation from its mean.
    """

    family: str
    text: str
    width: int
    vae: Callable[[], Any]
    prompt: Callable[[Tensor], dict[str, Any]] = embedded
    arguments: dict[str, Any] = field(default_factory=lambda: {"guidance_scale": 1.0})
    attributes: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    component: str = "text_encoder"
    clips: tuple[str, ...] = ()
    known_vae: bool = True
    distance: float = 0.05


def image_vae(latents: int) -> Callable[[], Any]:
    config = test_vae_images.kl((32, 64), latents, layers_per_block=1, shift_factor=0.1)
    return lambda: diffusers.AutoencoderKL(**config)


def flux2_vae(latents: int) -> Callable[[], Any]:
    return lambda: diffusers.AutoencoderKLFlux2(**test_vae_images.kl((32, 64), latents, layers_per_block=1))


def video_vae(name: str) -> Callable[[], Any]:
    return lambda: test_vae.make_vae(name, "cpu", torch.float32)


def qwen_vae() -> Any:
    return diffusers.AutoencoderKLQwenImage(base_dim=8, z_dim=2, latents_mean=[0.0] * 2, latents_std=[1.0] * 2)


def hunyuan_vae() -> Any:
    _, config = test_vae_images.CONFIGS["hunyuan image"]
    return diffusers.AutoencoderKLHunyuanImage(**{**config, "latent_channels": 4, "scaling_factor": 0.5})


def with_pooled(width: int) -> Callable[[Tensor], dict[str, Any]]:
    return lambda embeds: {"prompt_embeds": embeds, "pooled_prompt_embeds": embeds.new_ones(1, width)}


def with_mask(dtype: torch.dtype, name: str = "prompt_attention_mask") -> Callable[[Tensor], dict[str, Any]]:
    return lambda embeds: {
        "prompt_embeds": embeds,
        name: torch.ones(embeds.shape[:2], dtype=dtype, device=embeds.device),
    }


def two_prompts(embeds: Tensor) -> dict[str, Any]:
    """HunyuanImage's second one is the quoted text."""
    mask = torch.ones(embeds.shape[:2], dtype=torch.int64, device=embeds.device)
    return {
        "prompt_embeds": embeds,
        "prompt_embeds_mask": mask,
        "prompt_embeds_2": embeds,
        "prompt_embeds_mask_2": mask,
    }


def listed(embeds: Tensor) -> dict[str, Any]:
    return {"prompt_embeds": list(embeds)}


def with_words(embeds: Tensor) -> dict[str, Any]:
    """LongCat's pipeline counts the prompts in words even where it gets embeddings, though its check refuses both."""
    return {"prompt": ["a kite"], "prompt_embeds": embeds}


def of_hidream(embeds: Tensor) -> dict[str, Any]:
    layers = embeds[..., :20].expand(3, 1, -1, -1)
    pooled = embeds.new_ones(1, 12)
    return {"prompt_embeds_t5": embeds, "prompt_embeds_llama3": layers, "pooled_prompt_embeds": pooled}


def of_kandinsky(embeds: Tensor) -> dict[str, Any]:
    bounds = torch.tensor([0, embeds.shape[1]], dtype=torch.int32, device=embeds.device)
    pooled = embeds.new_ones(1, 12)
    return {"prompt_embeds_qwen": embeds, "prompt_embeds_clip": pooled, "prompt_cu_seqlens": bounds}


# Arguments of pipelines that begin with an image.
OF_IMAGE = {
    "guidance_scale": 1.0,
    "image": torch.linspace(0, 1, 3 * SIZE * SIZE).view(1, 3, SIZE, SIZE),
    "strength": 1.0,
}

PIPELINES = {
    "StableDiffusion3Pipeline": Pipeline(
        "sd3-35large",
        "T5",
        32,
        image_vae(4),
        with_pooled(16),
        component="text_encoder_3",
        clips=("text_encoder", "text_encoder_2"),
    ),
    "StableDiffusion3Img2ImgPipeline": Pipeline(
        "sd3-35large",
        "T5",
        32,
        image_vae(4),
        with_pooled(16),
        arguments=OF_IMAGE,
        component="text_encoder_3",
        clips=("text_encoder", "text_encoder_2"),
    ),
    "FluxPipeline": Pipeline(
        "flux", "T5", 32, image_vae(2), with_pooled(32), component="text_encoder_2", clips=("text_encoder",)
    ),
    "FluxImg2ImgPipeline": Pipeline(
        "flux",
        "T5",
        32,
        image_vae(2),
        with_pooled(32),
        arguments=OF_IMAGE,
        component="text_encoder_2",
        clips=("text_encoder",),
    ),
    "HunyuanVideoPipeline": Pipeline(
        "hunyuan_video",
        "Llama",
        32,
        lambda: diffusers.AutoencoderKLHunyuanVideo(
            latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
        ),
        lambda embeds: {**with_pooled(16)(embeds), **with_mask(torch.int64)(embeds)},
        arguments={"num_frames": 5},
        clips=("text_encoder_2",),
        known_vae=False,
    ),
    "CogVideoXPipeline": Pipeline(
        "cogvideox-2b",
        "T5",
        32,
        lambda: diffusers.AutoencoderKLCogVideoX(
            latent_channels=4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            norm_num_groups=2,
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
        ),
        lambda embeds: embedded(embeds[:, :5]),  # as many as the transformer has places for
        arguments={"guidance_scale": 1.0, "num_frames": 5},
        attributes={"scheduler": diffusers.CogVideoXDDIMScheduler()},
        known_vae=False,
    ),
    "ZImagePipeline": Pipeline("z_image", "Qwen3", 24, image_vae(4), listed, arguments={"guidance_scale": 0.0}),
    "Flux2Pipeline": Pipeline("flux2", "Mistral", 32, flux2_vae(2)),
    "Flux2KleinPipeline": Pipeline("flux2-klein", "Qwen3", 32, flux2_vae(2)),
    "ChromaPipeline": Pipeline("chroma", "T5", 32, image_vae(2), with_mask(torch.bfloat16)),
    "HunyuanImagePipeline": Pipeline("hunyuan_video-image", "Qwen2_5_VL", 32, hunyuan_vae, two_prompts, arguments={}),
    "Lumina2Pipeline": Pipeline(
        "lumina2", "Gemma2", 24, image_vae(4), with_mask(torch.int64), attributes={"vae_scale_factor": 2}
    ),
    "ErnieImagePipeline": Pipeline("ernie_image", "Ministral3", 24, flux2_vae(1), listed),
    "OvisImagePipeline": Pipeline("flux-ovis", "Qwen3", 32, image_vae(2), config={"out_channels": 8}),
    "LongCatImagePipeline": Pipeline(
        "flux-longcat",
        "Qwen2_5_VL",
        32,
        image_vae(16),
        with_words,
        arguments={"guidance_scale": 1.0, "enable_prompt_rewrite": False},
        attributes={"check_inputs": lambda *args, **kwargs: None},
        config={"in_channels": 64},  # the pipeline takes an autoencoder of 16 channels for granted
    ),
    "BriaPipeline": Pipeline("flux-bria", "T5", 32, image_vae(2)),
    "HiDreamImagePipeline": Pipeline(
        "hidream",
        "Llama",
        24,
        image_vae(4),
        of_hidream,
        attributes={"default_sample_size": SIZE // 2},
        component="text_encoder_4",
    ),
    "Kandinsky5T2IPipeline": Pipeline(
        "kandinsky5", "Qwen2_5_VL", 24, image_vae(4), of_kandinsky, attributes={"resolutions": [(SIZE, SIZE)]}
    ),
    "QwenImagePipeline": Pipeline(
        "qwenimage",
        "Qwen2_5_VL",
        32,
        qwen_vae,
        with_mask(torch.int64, "prompt_embeds_mask"),
        arguments={"true_cfg_scale": 1.0},
        distance=0.1,  # the contrast is a third of the other images', and bfloat16 rounds as coarsely
    ),
    "LTXPipeline": Pipeline(
        "ltx",
        "T5",
        48,
        video_vae("ltx 0.9.5"),
        with_mask(torch.int64),
        arguments={"guidance_scale": 1.0, "num_frames": 9, "height": 64, "width": 64},
    ),
    "WanPipeline": Pipeline(
        "wan-t2v",
        "UMT5",
        32,
        video_vae("wan 2.1"),
        arguments={"guidance_scale": 1.0, "num_frames": 5},
        config={"in_channels": 8, "out_channels": 8},
    ),
}


def clip(device: str) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPTextConfig(**sizes, projection_dim=16, vocab_size=99, max_position_embeddings=16)
    return transformers.CLIPTextModelWithProjection(config).to(device, torch.bfloat16).eval()


def make(name: str, case: Pipeline, device: str) -> Any:
    """The pipeline in bfloat16, as it is usually loaded."""
    torch.manual_seed(0)
    if case.text in ENCODERS:
        encoder = language_models.make_encoder(case.text, device, torch.bfloat16)
    else:
        encoder = language_models.make_model(device, torch.bfloat16, case.text)
    transformer = random_(KNOWN[case.family].make(**case.config)).to(device, torch.bfloat16)
    vae = case.vae().to(device, torch.bfloat16).eval()
    clips = {component: clip(device) for component in case.clips}
    pipe = assembled(name, transformer=transformer, vae=vae, **{case.component: encoder}, **clips)
    pipe.set_progress_bar_config(disable=True)
    for attribute, value in case.attributes.items():
        assert hasattr(pipe, attribute)
        setattr(pipe, attribute, value)
    return pipe


def generate(pipe: Any, case: Pipeline) -> Tensor:
    encoder = getattr(pipe, case.component)
    tokens = torch.arange(1, 7, device=encoder.device)[None]
    with torch.no_grad():
        if case.text in ENCODERS:
            embeds = encoder(tokens).last_hidden_state
        else:
            embeds = encoder(tokens, output_hidden_states=True).hidden_states[-1]
        torch.manual_seed(1)
        options = {"height": SIZE, "width": SIZE, "output_type": "pt", "return_dict": False, "num_inference_steps": 2}
        return pipe(**case.prompt(embeds[..., : case.width]), **{**options, **case.arguments})[0].float()


# Their blocks, text encoders and autoencoders run in the other pipelines too, or are tested by themselves.
SLOW = {
    "StableDiffusion3Img2ImgPipeline",
    "FluxImg2ImgPipeline",
    "Flux2KleinPipeline",
    "ChromaPipeline",
    "Lumina2Pipeline",
    "ErnieImagePipeline",
    "OvisImagePipeline",
    "LongCatImagePipeline",
    "BriaPipeline",
    "HiDreamImagePipeline",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in PIPELINES]
)
def test_default_options(ltx: ModuleType, device: str, name: str) -> None:
    case = PIPELINES[name]
    pipe = make(name, case, device)
    stock = generate(pipe, case)
    report = ltx.optimize(pipe)
    known = {"transformer", case.component, *case.clips, *(("vae",) if case.known_vae else ())}
    assert touched(pipe.components) == known and report.left_alone == {}
    ours = generate(pipe, case)
    calls = {site.name: site.calls for site in report.sites}
    report.restore()
    assert torch.equal(generate(pipe, case), stock)
    assert report.fallbacks == {}
    layer = f"transformers.{case.text}{'Block' if case.text in ENCODERS else 'DecoderLayer'}"
    blocks = [block for block in KNOWN[case.family].blocks if block.endswith(BLOCK_NAMES)]
    decoders = [site for site in calls if re.search(r"^diffusers\.\w*Decoder(2D|3d)?$", site)]
    assert calls[layer] == language_models.LAYERS and all(calls[site] >= 1 for site in decoders)
    assert bool(decoders) == case.known_vae
    assert blocks and all(calls[block] >= 2 for block in blocks)
    assert ((ours - stock).norm() / (stock - stock.mean()).norm()).item() < case.distance
