"""sglang-diffusion: a hook after its diffusers backend has loaded a pipeline."""

from __future__ import annotations

from typing import Any

from ._optimize import optimize

TARGET = "sglang.multimodal_gen.runtime.pipelines.diffusers_pipeline.DiffusersPipeline._load_diffusers_pipeline"


def register() -> None:
    """The entry point. sglang imports the target when it applies the hooks, and not here."""
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    HookRegistry.register(TARGET, after_load, HookType.AFTER)


def after_load(pipe: Any, pipeline: Any, model_path: str, server_args: Any) -> None:
    """Changes the pipeline in place; sglang goes on with the same object, because this returns None."""
    refused = {
        "--cache-dit-config": server_args.cache_dit_config,  # cache-dit has replaced the forwards of models and blocks
        "--enable-torch-compile": server_args.enable_torch_compile,  # costs a compilation at the start for no gain
    }
    optimize(pipe, "sglang", refused, "--attention-backend left out")
