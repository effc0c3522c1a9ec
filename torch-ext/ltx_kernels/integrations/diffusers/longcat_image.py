"""LongCat-Image: FLUX.1's blocks."""

from __future__ import annotations

from dataclasses import replace

from .flux import ATTENTION as FLUX_ATTENTION
from .flux import DOUBLE as FLUX_DOUBLE
from .flux import SINGLE as FLUX_SINGLE

LONGCAT = "diffusers.models.transformers.transformer_longcat_image.LongCatImage"

ATTENTION = replace(FLUX_ATTENTION, classes=(LONGCAT + "Attention",), processor=LONGCAT + "AttnProcessor")
DOUBLE = replace(FLUX_DOUBLE, classes=(LONGCAT + "TransformerBlock",), attentions={"attn": ATTENTION})
SINGLE = replace(FLUX_SINGLE, classes=(LONGCAT + "SingleTransformerBlock",), attentions={"attn": ATTENTION})

ENTRIES = (ATTENTION, DOUBLE, SINGLE)
