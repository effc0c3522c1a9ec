"""Ovis-Image: FLUX.1's double blocks, and single blocks whose MLP is SwiGLU."""

from __future__ import annotations

from dataclasses import replace

from .flux import ATTENTION as FLUX_ATTENTION
from .flux import DOUBLE as FLUX_DOUBLE
from .flux import SINGLE as FLUX_SINGLE

OVIS = "diffusers.models.transformers.transformer_ovis_image.OvisImage"

ATTENTION = replace(FLUX_ATTENTION, classes=(OVIS + "Attention",), processor=OVIS + "AttnProcessor")
DOUBLE = replace(FLUX_DOUBLE, classes=(OVIS + "TransformerBlock",), attentions={"attn": ATTENTION})
SINGLE = replace(
    FLUX_SINGLE,
    classes=(OVIS + "SingleTransformerBlock",),
    modules={**FLUX_SINGLE.modules, "act_mlp": ("torch.nn.modules.activation.SiLU",)},
    attentions={"attn": ATTENTION},
)

ENTRIES = (ATTENTION, DOUBLE, SINGLE)
