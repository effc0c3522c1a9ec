"""HunyuanVideo 1.5: HunyuanVideo's double blocks, and no single ones.

The mask is of the text alone, and the attention gives nothing for padding.
"""

from __future__ import annotations

from dataclasses import replace

from ..attention.masks import PaddingMask
from .hunyuan_video import ATTENTION as VIDEO_ATTENTION
from .hunyuan_video import DOUBLE as VIDEO_DOUBLE

HUNYUAN = "diffusers.models.transformers.transformer_hunyuan_video15.HunyuanVideo15"

ATTENTION = replace(
    VIDEO_ATTENTION, processor=HUNYUAN + "AttnProcessor2_0", shared=False, mask=PaddingMask(of_text=True)
)
DOUBLE = replace(VIDEO_DOUBLE, classes=(HUNYUAN + "TransformerBlock",), attentions={"attn": ATTENTION})

ENTRIES = (ATTENTION, DOUBLE)
