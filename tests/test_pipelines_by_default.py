"""`optimize(pipe)` with default options on tiny pipelines of the families: prompt, denoiser and autoencoder run ops."""

from __future__ import annotations

import ast
import inspect
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
import test_integration_pipelines  # noqa: E402
import test_vae  # noqa: E402
import test_vae_images  # noqa: E402
from families import families, random_  # noqa: E402
from families.left import OF_UNETS  # noqa: E402
from helpers import language_models  # noqa: E402
from helpers.diffusers_models import BLOCK_NAMES, known_models  # noqa: E402
from helpers.versions import pinned  # noqa: E402
from PIL import Image  # noqa: E402
from test_integration_pipelines import assembled, touched  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 32  # pixels of an image's edge
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
ENCODERS = "T5", "UMT5"  # text encoders that are not causal language models
KNOWN = families()


def embedded(embeds: Tensor) -> dict[str, Any]:
    return {"prompt_embeds": embeds}


@dataclass(frozen=True)
class Pipeline:
    """A tiny pipeline, whose prompt is given as the embeddings that its text encoder makes.

    family: The family of its transformer, in tests/families.
    text: The family of its text encoder, one of ENCODERS or a language model; empty where it has none.
    width: How many features of an embedding the transformer takes.
    vae: Makes its autoencoder.
    prompt: The arguments that a prompt becomes, from its embeddings [1, tokens, width].
    arguments: Other arguments of a call.
    attributes: What the pipeline holds because its released models are larger.
    config: What of the transformer's configuration differs from the family's.
    component: The name of its text encoder.
    clips: The names of its other text encoders, CLIP's, which `optimize` leaves as they are.
    controlnet: The family of its ControlNet; empty where it has none.
    parts: Makes its other models, which `optimize` leaves as they are, and what else differs from `assembled`.
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
    controlnet: str = ""
    parts: Callable[[], dict[str, Any]] = dict
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


def cogvideox_vae() -> Any:
    stages = {"down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4}
    sizes = {"latent_channels": 4, "block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 2}
    return diffusers.AutoencoderKLCogVideoX(**sizes, **stages)


def cosmos_vae() -> Any:
    widths = {"encoder_block_out_channels": (8, 8, 8, 8), "decode_block_out_channels": (8, 8, 8, 8)}
    sizes = {"latent_channels": 4, "attention_resolutions": (8,), "resolution": 64, "num_layers": 2}
    ratios = {"patch_size": 4, "spatial_compression_ratio": 8, "temporal_compression_ratio": 8}
    return diffusers.AutoencoderKLCosmos(**widths, **sizes, **ratios, latents_mean=None, latents_std=None)


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


def of_hunyuan15(embeds: Tensor) -> dict[str, Any]:
    """HunyuanVideo 1.5's second prompt is the quoted text, in other embeddings."""
    return {**two_prompts(embeds), "prompt_embeds_2": embeds[..., :24]}


def of_fibo2(embeds: Tensor) -> dict[str, Any]:
    """It takes the embeddings of several layers of its text encoder."""
    return {**with_mask(torch.int64, "prompt_embeds_mask")(embeds), "prompt_embeds": embeds.expand(1, 2, -1, -1)}


def of_krea2(embeds: Tensor) -> dict[str, Any]:
    return with_mask(torch.bool, "prompt_embeds_mask")(embeds.unsqueeze(2).expand(-1, -1, 3, -1))


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


class Checker:
    """Stands for Cosmos' safety checker, a package of its own that downloads its models."""

    def to(self, device: Any) -> None: ...

    def check_video_safety(self, video: Any) -> Any:
        return video


def of_cosmos(scheduler: str, **config: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"safety_checker": Checker(), "scheduler": getattr(diffusers, scheduler)(**config)}


class Words:
    """A tokenizer whose texts and chats are always these tokens, and a processor of chats that has it."""

    tokens = (3, 14, 15, 9, 26)
    eos_token_id = 1

    @property
    def tokenizer(self) -> Words:
        return self

    def encode(self, text: str) -> list[int]:
        return list(self.tokens)

    def convert_tokens_to_ids(self, token: str) -> int:
        return 2

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        tokens = list(self.tokens)
        return transformers.BatchEncoding({"input_ids": tokens}) if options["return_dict"] else [tokens]


def of_cosmos3() -> dict[str, Any]:
    scheduler = diffusers.UniPCMultistepScheduler(**FLOW)
    return {"text_tokenizer": Words(), "safety_checker": Checker(), "scheduler": scheduler}


def of_ltx2() -> dict[str, Any]:
    """What stands between the text encoder and the transformer, and the decoders of sound."""
    heads = {"num_attention_heads": 3, "attention_head_dim": 16, "num_layers": 1, "num_learnable_registers": None}
    connectors = {f"{kind}_connector_{key}": value for kind in ("video", "audio") for key, value in heads.items()}
    audio = {"latent_channels": 2, "mel_bins": 16, "resolution": 32, "mid_block_add_attention": False}
    upsample = {"upsample_kernel_sizes": [4, 4], "upsample_factors": [2, 2]}
    resnet = {"resnet_kernel_sizes": [3], "resnet_dilations": [[1]]}
    models = {
        "connectors": diffusers.pipelines.ltx2.LTX2TextConnectors(
            caption_channels=48, text_proj_in_factor=1, rope_type="split", **connectors
        ),
        "audio_vae": diffusers.AutoencoderKLLTX2Audio(base_channels=8, ch_mult=(1, 1, 1), num_res_blocks=1, **audio),
        "vocoder": diffusers.pipelines.ltx2.LTX2Vocoder(32, hidden_channels=8, **upsample, **resnet),
    }
    return {name: random_(model).to(torch.bfloat16) for name, model in models.items()}


def of_kandinsky(embeds: Tensor) -> dict[str, Any]:
    bounds = torch.tensor([0, embeds.shape[1]], dtype=torch.int32, device=embeds.device)
    pooled = embeds.new_ones(1, 12)
    return {"prompt_embeds_qwen": embeds, "prompt_embeds_clip": pooled, "prompt_cu_seqlens": bounds}


PICTURE = torch.linspace(0, 1, 3 * SIZE * SIZE).view(1, 3, SIZE, SIZE)
EMBEDDED = torch.ones(1, 3, 16, dtype=torch.bfloat16)  # what an image encoder would make of it
# Arguments of pipelines that begin with an image.
OF_IMAGE = {"guidance_scale": 1.0, "image": PICTURE, "strength": 1.0}
COSMOS = {"guidance_scale": 1.0, "num_frames": 5}
SOUND = {"audio_guidance_scale": 1.0, "stg_scale": 0.0, "modality_scale": 1.0}
SOUND |= {f"audio_{name}": value for name, value in SOUND.items() if not name.startswith("audio")}
VIDEO = torch.linspace(0, 1, 9 * 3 * SIZE * SIZE).view(1, 9, 3, SIZE, SIZE)


def ltx2(**arguments: Any) -> Pipeline:
    given = {**SOUND, "guidance_scale": 1.0, "num_frames": 9, "height": 64, "width": 64, **arguments}
    vae = video_vae("ltx2 2.0")
    return Pipeline("ltx2", "Gemma3", 48, vae, with_mask(torch.int64), arguments=given, parts=of_ltx2)


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
        cogvideox_vae,
        lambda embeds: embedded(embeds[:, :5]),  # as many as the transformer has places for
        arguments={"guidance_scale": 1.0, "num_frames": 5},
        attributes={"scheduler": diffusers.CogVideoXDDIMScheduler()},
        known_vae=False,
    ),
    "ZImagePipeline": Pipeline("z_image", "Qwen3", 24, image_vae(4), listed, arguments={"guidance_scale": 0.0}),
    "Flux2Pipeline": Pipeline("flux2", "Mistral", 32, flux2_vae(2)),
    "Flux2KleinPipeline": Pipeline("flux2-klein", "Qwen3", 32, flux2_vae(2)),
    "Flux2KleinKVPipeline": Pipeline(
        "flux2-klein", "Qwen3", 32, flux2_vae(2), arguments={"image": Image.linear_gradient("L").convert("RGB")}
    ),
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
    "MochiPipeline": Pipeline(
        "mochi",
        "T5",
        32,
        lambda: diffusers.AutoencoderKLMochi(
            encoder_block_out_channels=(32, 32, 32, 32),  # its norms have 32 groups
            decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
        ),
        with_mask(torch.int64),
        arguments={"guidance_scale": 1.0, "num_frames": 1, "height": 16, "width": 16},
        config={"in_channels": 12},
        known_vae=False,
    ),
    "CosmosTextToWorldPipeline": Pipeline(
        "cosmos", "T5", 32, cosmos_vae, arguments=COSMOS, parts=of_cosmos("EDMEulerScheduler"), known_vae=False
    ),
    "CosmosVideoToWorldPipeline": Pipeline(
        "cosmos",
        "T5",
        32,
        cosmos_vae,
        arguments={**COSMOS, "video": VIDEO},
        config={"in_channels": 5},
        parts=lambda: {**of_cosmos("EDMEulerScheduler")(), "vae": cosmos_vae().eval()},  # torch pools no bfloat16 here
        known_vae=False,
    ),
    "Cosmos2TextToImagePipeline": Pipeline(
        "cosmos",
        "T5",
        32,
        video_vae("wan 2.1"),
        config={"in_channels": 8, "out_channels": 8, "extra_pos_embed_type": None},
        parts=of_cosmos("FlowMatchEulerDiscreteScheduler", use_karras_sigmas=True),
    ),
    "Cosmos2VideoToWorldPipeline": Pipeline(
        "cosmos-per_frame",
        "T5",
        32,
        video_vae("wan 2.1"),
        arguments={**COSMOS, "image": PICTURE},
        config={"in_channels": 9, "out_channels": 8},
        parts=of_cosmos("FlowMatchEulerDiscreteScheduler", use_karras_sigmas=True),
    ),
    "Cosmos2_5_PredictBasePipeline": Pipeline(
        "cosmos-per_frame",
        "Qwen2_5_VL",
        32,
        video_vae("wan 2.1"),
        arguments=COSMOS,
        config={"in_channels": 9, "out_channels": 8},
        parts=of_cosmos("UniPCMultistepScheduler", **FLOW),
    ),
    "Cosmos3OmniPipeline": Pipeline(
        "cosmos3",
        "",
        0,
        video_vae("wan 2.1"),
        prompt=lambda embeds: {"prompt": "a kite"},
        arguments={"guidance_scale": 1.0, "num_frames": 5},
        config={"latent_channel": 8, "patch_latent_dim": 32},
        parts=of_cosmos3,
    ),
    "AuraFlowPipeline": Pipeline(
        "auraflow",
        "UMT5",
        24,
        image_vae(4),
        with_mask(torch.int64),
        arguments={"guidance_scale": 1.0, "height": 16, "width": 16},  # as many patches as it has places for
    ),
    "Krea2Pipeline": Pipeline(
        "krea2",
        "Qwen3",
        32,
        qwen_vae,
        of_krea2,
        arguments={"guidance_scale": 0.0},
        config={"in_channels": 8},
        distance=0.1,  # as Qwen-Image's, of the same autoencoder
    ),
    "PixArtSigmaPipeline": Pipeline(
        "basic_transformer-pixart",
        "T5",
        24,
        image_vae(4),
        with_mask(torch.int64),
        arguments={"guidance_scale": 1.0, "negative_prompt": None, "use_resolution_binning": False},
        parts=lambda: {"scheduler": diffusers.DPMSolverMultistepScheduler()},
    ),
    "DiTPipeline": Pipeline(
        "basic_transformer-dit",
        "",
        0,
        image_vae(4),
        lambda embeds: {"class_labels": [1]},
        parts=lambda: {"scheduler": diffusers.DDIMScheduler()},
    ),
    "LattePipeline": Pipeline(
        "basic_transformer-latte",
        "T5",
        24,
        image_vae(4),
        arguments={"guidance_scale": 1.0, "negative_prompt": None, "video_length": 2, "mask_feature": False},
        parts=lambda: {"scheduler": diffusers.DDIMScheduler()},
    ),
    "SkyReelsV2Pipeline": Pipeline(
        "wan-skyreels",
        "UMT5",
        32,
        video_vae("wan 2.1"),
        arguments={"guidance_scale": 1.0, "num_frames": 5},
        config={"in_channels": 8, "out_channels": 8},
        parts=lambda: {"scheduler": diffusers.UniPCMultistepScheduler(**FLOW)},
    ),
    "SkyReelsV2ImageToVideoPipeline": Pipeline(
        "wan-skyreels",
        "UMT5",
        32,
        video_vae("wan 2.1"),
        arguments={"guidance_scale": 1.0, "num_frames": 5, "image": PICTURE, "image_embeds": EMBEDDED},
        attributes={"check_inputs": lambda *args: None},  # which refuses an image beside its embeddings
        config={"in_channels": 20, "out_channels": 8, "image_dim": 16, "added_kv_proj_dim": 32},
        parts=lambda: {"scheduler": diffusers.UniPCMultistepScheduler(**FLOW)},
    ),
    "SkyReelsV2DiffusionForcingPipeline": Pipeline(
        "wan-skyreels",
        "UMT5",
        32,
        video_vae("wan 2.1"),
        lambda embeds: {"prompt": None, "prompt_embeds": embeds},
        arguments={"guidance_scale": 1.0, "num_frames": 5, "base_num_frames": 5},
        config={"in_channels": 8, "out_channels": 8},
        parts=lambda: {"scheduler": diffusers.UniPCMultistepScheduler(**FLOW)},
    ),
    "ChronoEditPipeline": Pipeline(
        "wan-chronoedit",
        "UMT5",
        32,
        video_vae("wan 2.1"),
        arguments={"guidance_scale": 1.0, "image": PICTURE, "image_embeds": EMBEDDED},
        attributes={"check_inputs": lambda *args: None},  # which refuses an image beside its embeddings
        config={"in_channels": 20, "out_channels": 8, "image_dim": 16, "added_kv_proj_dim": 32},
    ),
    "StableDiffusion3ControlNetPipeline": Pipeline(
        "sd3",
        "T5",
        32,
        image_vae(4),
        with_pooled(16),
        arguments={"guidance_scale": 1.0, "control_image": PICTURE},
        component="text_encoder_3",
        clips=("text_encoder", "text_encoder_2"),
        controlnet="controlnet-sd3",
    ),
    "FluxControlNetPipeline": Pipeline(
        "flux",
        "T5",
        32,
        image_vae(2),
        with_pooled(32),
        arguments={"guidance_scale": 1.0, "control_image": PICTURE},
        component="text_encoder_2",
        clips=("text_encoder",),
        controlnet="controlnet-flux",
    ),
    "QwenImageControlNetPipeline": Pipeline(
        "qwenimage",
        "Qwen2_5_VL",
        32,
        qwen_vae,
        with_mask(torch.int64, "prompt_embeds_mask"),
        arguments={"true_cfg_scale": 1.0, "control_image": PICTURE},
        controlnet="controlnet-qwenimage",
        distance=0.1,
    ),
    "ZImageControlNetPipeline": Pipeline(
        "z_image",
        "Qwen3",
        24,
        image_vae(4),
        listed,
        arguments={"guidance_scale": 0.0, "control_image": PICTURE},
        controlnet="controlnet-z_image",
    ),
    "HunyuanVideo15Pipeline": Pipeline(
        "hunyuan_video-15",
        "Qwen2_5_VL",
        32,
        lambda: diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1
        ),
        of_hunyuan15,
        arguments={"num_frames": 5},
        config={"in_channels": 9, "out_channels": 4},
        known_vae=False,
        parts=lambda: {"guider": diffusers.ClassifierFreeGuidance(1.0)},
    ),
    "BriaFibo2Pipeline": Pipeline("bria_fibo2", "Qwen3", 32, flux2_vae(4), of_fibo2),
    "QwenImage21Pipeline": Pipeline(
        "qwenimage21",
        "Qwen3",
        24,
        lambda: diffusers.AutoencoderKLQwenImage21(
            base_dim=8, decoder_base_dim=8, z_dim=4, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
        ),
        with_mask(torch.int64, "prompt_embeds_mask"),
        arguments={"true_cfg_scale": 1.0},
        parts=lambda: {"processor": Words()},
        known_vae=False,
    ),
    "LTX2ConditionPipeline": ltx2(),
    "CogVideoXImageToVideoPipeline": Pipeline(
        "cogvideox-5b",
        "T5",
        32,
        cogvideox_vae,
        lambda embeds: embedded(embeds[:, :5]),  # as many as the transformer has places for
        arguments={"guidance_scale": 1.0, "num_frames": 5, "image": PICTURE},
        attributes={"scheduler": diffusers.CogVideoXDDIMScheduler()},
        config={"in_channels": 8, "ofs_embed_dim": 32},
        known_vae=False,
    ),
    "LTX2Pipeline": ltx2(),
    "LTX2ImageToVideoPipeline": ltx2(image=PICTURE, image_crf=0),
}


def clip(device: str) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPTextConfig(**sizes, projection_dim=16, vocab_size=99, max_position_embeddings=16)
    return transformers.CLIPTextModelWithProjection(config).to(device, torch.bfloat16).eval()


def make(name: str, case: Pipeline, device: str) -> Any:
    """The pipeline in bfloat16, as it is usually loaded."""
    torch.manual_seed(0)
    models: dict[str, Any] = {component: clip(device) for component in case.clips}
    if case.text in ENCODERS:
        models[case.component] = language_models.make_encoder(case.text, device, torch.bfloat16)
    elif case.text:
        models[case.component] = language_models.make_model(device, torch.bfloat16, case.text)
    models["transformer"] = random_(KNOWN[case.family].make(**case.config)).to(device, torch.bfloat16)
    if case.controlnet:
        models["controlnet"] = random_(KNOWN[case.controlnet].make()).to(device, torch.bfloat16)
        models["controlnet"]._forward_hooks.clear()  # the family's tests compare its results as a tuple
    models["vae"] = case.vae().to(device, torch.bfloat16).eval()
    pipe = assembled(name, **{**models, **case.parts()}).to(device)
    pipe.set_progress_bar_config(disable=True)
    for attribute, value in case.attributes.items():
        assert hasattr(pipe, attribute)
        setattr(pipe, attribute, value)
    return pipe


def generate(pipe: Any, case: Pipeline) -> Tensor:
    encoder = getattr(pipe, case.component, None)
    tokens = torch.arange(1, 7, device=pipe.device)[None]
    with torch.no_grad():
        if encoder is None:
            embeds = tokens
        elif case.text in ENCODERS:
            embeds = encoder(tokens).last_hidden_state
        else:
            embeds = encoder(tokens, output_hidden_states=True).hidden_states[-1]
        torch.manual_seed(1)
        options = {"height": SIZE, "width": SIZE, "output_type": "pt", "return_dict": False, "num_inference_steps": 2}
        options = {
            name: value for name, value in options.items() if name in inspect.signature(pipe.__call__).parameters
        }
        given = dict(case.arguments)
        if "image_embeds" in given:  # pipelines leave these where they are
            given["image_embeds"] = given["image_embeds"].to(pipe.device)
        return pipe(**case.prompt(embeds[..., : case.width]), **{**options, **given})[0].float()


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
# They take seconds, most of them in stock modules, and their blocks run in the pipelines above them too.
EXTENDED = {
    "Flux2KleinKVPipeline",
    "CosmosVideoToWorldPipeline",
    "Cosmos2VideoToWorldPipeline",
    "Cosmos2_5_PredictBasePipeline",
    "SkyReelsV2ImageToVideoPipeline",
    "SkyReelsV2DiffusionForcingPipeline",
    "ChronoEditPipeline",
    "StableDiffusion3ControlNetPipeline",
    "FluxControlNetPipeline",
    "ZImageControlNetPipeline",
    "HunyuanVideo15Pipeline",
    "CogVideoXImageToVideoPipeline",
    "LTX2ConditionPipeline",
    "LTX2ImageToVideoPipeline",
}
MARKS = {**dict.fromkeys(SLOW, pytest.mark.slow), **dict.fromkeys(EXTENDED, pytest.mark.extended)}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in PIPELINES])
def test_default_options(ltx: ModuleType, device: str, name: str) -> None:
    case = PIPELINES[name]
    pipe = make(name, case, device)
    stock = generate(pipe, case)
    report = ltx.optimize(pipe)
    known = {"transformer", *case.clips, *(("vae",) if case.known_vae else ())}
    known |= {case.component} if case.text else set()
    known |= {"controlnet"} if case.controlnet else set()
    assert touched(pipe.components) == known and report.left_alone == {}
    ours = generate(pipe, case)
    calls = {site.name: site.calls for site in report.sites}
    report.restore()
    assert torch.equal(generate(pipe, case), stock)
    assert report.fallbacks == {}
    layer = f"transformers.{case.text}{'Block' if case.text in ENCODERS else 'DecoderLayer'}"
    blocks = [block for block in KNOWN[case.family].blocks if block.endswith(BLOCK_NAMES)]
    decoders = [site for site in calls if re.search(r"^diffusers\.\w*Decoder(2D|3d)?$", site)]
    assert calls.get(layer) == (language_models.LAYERS if case.text else None)
    assert all(calls[site] >= 1 for site in decoders)
    assert bool(decoders) == case.known_vae
    assert blocks and all(calls[block] >= 2 for block in blocks)
    assert ((ours - stock).norm() / (stock - stock.mean()).norm()).item() < case.distance


# ---- Every pipeline of diffusers with a known denoiser

VISION, TEXT_ALONE = "it needs a vision model", "it takes a prompt as text alone"
# Pipelines whose models or arguments no test runs, and why. tests/test_families.py runs their transformers.
NOT_RUN = {
    "AceStepPipeline": TEXT_ALONE,
    "BriaFiboPipeline": TEXT_ALONE,
    "BriaFiboEditPipeline": TEXT_ALONE,
    "Ideogram4Pipeline": TEXT_ALONE,
    "Cosmos2_5_TransferPipeline": "it needs torchvision",
    "HunyuanVideoFramepackPipeline": VISION,
    "HunyuanVideo15ImageToVideoPipeline": VISION,
    "WanAnimatePipeline": VISION,
    "ZImageOmniPipeline": VISION,
    "QwenImageLayeredPipeline": "its smallest image has an edge of 640 pixels",
    "AnimateDiffSparseControlNetPipeline": "its UNet has motion modules, which no description fits",
    "VQDiffusionPipeline": "deprecated; its transformer has tokens of a codebook",
    **dict.fromkeys(
        ("StableDiffusionControlNetXSPipeline", "StableDiffusionXLControlNetXSPipeline"),
        "its blocks join those of the UNet and of the ControlNet, and stay stock",
    ),
    **dict.fromkeys(("LTX2DFRPipeline", "LTX2DFRTemporalRefinePipeline"), "its second stage refines another clip"),
    **dict.fromkeys(("LTX2HDRPipeline", "LTX2InContextPipeline"), "it needs a LoRA"),
}


def models_of(pipeline: type) -> set[str]:
    """The classes of a pipeline's transformer, UNet and ControlNet."""
    types = pipeline._get_signature_types()
    return {cls.__name__ for name in ("transformer", "unet", "controlnet") for cls in types.get(name, ())}


def handed_over(pipeline: type) -> set[str]:
    """The keywords with which a pipeline's own functions call its transformer and ControlNet."""
    names = {"transformer", "controlnet", "current_model"}  # the last is one of Wan's two transformers
    functions = (inspect.unwrap(function) for function in vars(pipeline).values() if inspect.isfunction(function))
    calling = [f for f in functions if names & {*f.__code__.co_names, *f.__code__.co_varnames}]
    trees = (ast.parse(f"class Pipeline:\n{inspect.getsource(function)}") for function in calling)
    calls = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    known = (call for call in calls if getattr(call.func, "attr", getattr(call.func, "id", "")) in names)
    return {keyword.arg for call in known for keyword in call.keywords if keyword.arg}


@pytest.mark.extended
@pytest.mark.skipif(not pinned(), reason="NOT RUN: the list is that of another diffusers")
def test_every_pipeline(ltx: ModuleType) -> None:
    """A pipeline of a known model is run, or others that run its models with the same arguments, or it is in `NOT_RUN`.

    A pipeline of a UNet counts as run if others run its models: its UNet hands its blocks the same for every argument.
    """
    known = {name for name in known_models(ltx) if not name.startswith("Autoencoder")}
    known |= {"UNet2DConditionModel", *OF_UNETS}
    found = {name: getattr(diffusers, name) for name in dir(diffusers) if name.endswith("Pipeline")}
    found = {name: cls for name, cls in found.items() if hasattr(cls, "_get_signature_types")}
    models = {name: {model for model in models_of(cls) & known if "Multi" not in model} for name, cls in found.items()}
    models = {name: of for name, of in models.items() if of}
    assert len(models) > 180
    in_other_tests = inspect.getsource(test_integration_pipelines)
    run = {name for name in models if name in PIPELINES or re.search(rf"\b{name}\b", in_other_tests)}
    arguments = {n: set() if "UNet2DConditionModel" in of else handed_over(found[n]) for n, of in models.items()}
    missing = set()
    for name in models.keys() - run:
        alike = [other for other in run if models[other] & models[name]]
        others = (set[str]().union(*(of[other] for other in alike)) for of in (models, arguments))
        if not (models[name] <= next(others) and arguments[name] <= next(others)):
            missing.add(name)
    assert sorted(missing ^ NOT_RUN.keys()) == [], "neither run nor in NOT_RUN, or in NOT_RUN without need"
