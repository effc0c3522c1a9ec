"""HunyuanImage 2.1: HunyuanVideo's blocks, of an image."""

from __future__ import annotations

from dataclasses import replace

from .hunyuan_video import ATTENTION as VIDEO_ATTENTION
from .hunyuan_video import DOUBLE as VIDEO_DOUBLE
from .hunyuan_video import SINGLE as VIDEO_SINGLE

HUNYUAN = "diffusers.models.transformers.transformer_hunyuanimage.HunyuanImage"

ATTENTION = replace(VIDEO_ATTENTION, processor=HUNYUAN + "AttnProcessor")
DOUBLE = replace(
    VIDEO_DOUBLE,
    classes=(HUNYUAN + "TransformerBlock",),
    renames={"freqs_cis": "image_rotary_emb"},
    attentions={"attn": ATTENTION},
)
SINGLE = replace(VIDEO_SINGLE, classes=(HUNYUAN + "SingleTransformerBlock",), attentions={"attn": ATTENTION})

ENTRIES = (ATTENTION, DOUBLE, SINGLE)
