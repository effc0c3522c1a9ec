"""vllm-omni: a wrapper around the method by which its diffusers adapter loads a pipeline."""

from __future__ import annotations

import functools
from typing import Any

from ._optimize import optimize


def register() -> None:
    """The entry point, which may be called more than once in a process.

    The adapter itself refuses caches and parallelism, and compiles nothing, so that nothing remains to be refused here.
    """
    from vllm_omni.diffusion.models.diffusers_adapter.pipeline_diffusers_adapter import DiffusersAdapterPipeline

    load = DiffusersAdapterPipeline.load_weights
    if hasattr(load, "_ltx_kernels"):
        return

    @functools.wraps(load)
    def load_and_optimize(self: Any) -> None:
        load(self)
        # TORCH_SDPA becomes "native". The adapter always sets a backend: this is how to ask for diffusers' default.
        optimize(self._pipeline, "vllm_omni", {}, "--diffusion-attention-backend TORCH_SDPA", "native")

    load_and_optimize._ltx_kernels = True  # type: ignore[attr-defined]
    DiffusersAdapterPipeline.load_weights = load_and_optimize
