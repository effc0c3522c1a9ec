"""What the examples and benchmarks of images share: FLUX.1 pipelines with random weights, or any that is loaded."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from command_line import ExampleError
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from ltx_pipeline import byte_tokenizer

# As the pages of the released models state them.
T5_XXL = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
T5_TINY = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
GATED = {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new"}
CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
CLIP_TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
# FLUX.1's autoencoder, and SD3's. Neither has convolutions of the latents alone.
VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
}
VAE_TINY = {"block_out_channels": (32,) * 4, "layers_per_block": 1}
FLUX_TINY = {"num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16}
FLUX_TINY |= {"axes_dims_rope": (4, 6, 6), "joint_attention_dim": 32, "pooled_projection_dim": 16}
TIMED = ("encode_prompt", "vae", "image_processor")  # parts of a pipeline
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def tokenizer(length: int) -> Any:
    """A tokenizer that needs no download, for prompts of so many tokens at most."""
    made = byte_tokenizer()
    made.model_max_length, made.chat_template = length, CHAT
    return made


def clip_encoder(config: dict[str, Any], tiny: bool, projected: bool) -> Any:
    config = {**config, **(CLIP_TINY if tiny else {})}
    cls = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    return cls(transformers.CLIPTextConfig(**config, projection_dim=config["hidden_size"], vocab_size=49408))


def t5_encoder(tiny: bool) -> Any:
    return transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=32128, **(T5_TINY if tiny else T5_XXL), **GATED)
    )


def random_flux(guidance: bool, tiny: bool, device: torch.device) -> FluxPipeline:
    """FLUX.1 with random weights: dev, which is told a guidance, or schnell."""
    with device:
        return FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0 if guidance else 1.0, use_dynamic_shifting=guidance),
            vae=AutoencoderKL(**{**VAE, **(VAE_TINY if tiny else {})}),
            text_encoder=clip_encoder(CLIP_L, tiny, projected=False),
            tokenizer=tokenizer(77),
            text_encoder_2=t5_encoder(tiny),
            tokenizer_2=tokenizer(512),
            transformer=FluxTransformer2DModel(guidance_embeds=guidance, **(FLUX_TINY if tiny else {})),
        )


def load_pipeline(model: str, device: torch.device, dtype: torch.dtype, offload: str = "none") -> Any:
    """A pipeline of images for inference; `model` is "random" or "tiny" (FLUX.1-schnell), a folder, or a Hub id."""
    if model in ("random", "tiny"):
        torch.manual_seed(0)
        made_on = device if offload == "none" else torch.device("cpu")
        pipe = random_flux(False, model == "tiny", made_on).to(dtype=dtype)
    else:
        try:
            pipe = DiffusionPipeline.from_pretrained(model, dtype=dtype)
        except (OSError, ValueError, ImportError) as error:
            raise ExampleError(
                f"{model}: {error}\nA Hub id needs the network; --model tiny and --model random make a model with "
                "random weights"
            ) from error
        if not all(hasattr(pipe, name) for name in TIMED):
            raise ExampleError(
                f"{model}: expected a pipeline that makes images from prompts, such as FluxPipeline, "
                f"got {type(pipe).__name__}"
            )
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            component.eval().requires_grad_(False)
    if offload == "none":
        return pipe.to(device)
    enable = pipe.enable_model_cpu_offload if offload == "model" else pipe.enable_sequential_cpu_offload
    try:
        enable(device=device)
    except ImportError as error:
        raise ExampleError(f"--offload {offload}: {error} `pip install accelerate`") from error
    return pipe


@contextlib.contextmanager
def instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of this one object, and puts back what was there before at the end."""
    before = owner.__dict__.get(name)
    owner.__dict__[name] = value
    try:
        yield
    finally:
        if before is None:
            del owner.__dict__[name]
        else:
            owner.__dict__[name] = before


@contextlib.contextmanager
def timed_parts(pipe: Any, device: torch.device) -> Iterator[dict[str, float]]:
    """The seconds of a call's text encoders, its VAE and its conversion, each from one synchronization to the next."""
    parts = {"text": 0.0, "vae": 0.0, "conversion": 0.0}

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def timed(function: Any, part: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            synchronize()
            start = time.perf_counter()
            result = function(*args, **kwargs)
            synchronize()
            parts[part] += time.perf_counter() - start
            return result

        return call

    with (
        instead(pipe, "encode_prompt", timed(pipe.encode_prompt, "text")),
        instead(pipe.vae, "decode", timed(pipe.vae.decode, "vae")),
        instead(pipe.image_processor, "postprocess", timed(pipe.image_processor.postprocess, "conversion")),
    ):
        yield parts
