"""Ovis-Image: FLUX.1's double blocks, and single blocks whose MLP is SwiGLU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from .._rotary import Tables
from .flux import ATTENTION as FLUX_ATTENTION
from .flux import DOUBLE as FLUX_DOUBLE
from .flux import SINGLE as FLUX_SINGLE
from .flux import single_forward as flux_single_forward

OVIS = "diffusers.models.transformers.transformer_ovis_image.OvisImage"

ATTENTION = replace(FLUX_ATTENTION, classes=(OVIS + "Attention",), processor=OVIS + "AttnProcessor")


def single_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Tables | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    arguments = hidden_states, encoder_hidden_states, temb, image_rotary_emb, joint_attention_kwargs
    return flux_single_forward(self, *arguments, activation="swiglu")


DOUBLE = replace(FLUX_DOUBLE, classes=(OVIS + "TransformerBlock",), attentions={"attn": ATTENTION})
SINGLE = replace(
    FLUX_SINGLE,
    classes=(OVIS + "SingleTransformerBlock",),
    forward=single_forward,
    modules={**FLUX_SINGLE.modules, "act_mlp": ("torch.nn.modules.activation.SiLU",)},
    attentions={"attn": ATTENTION},
)

ENTRIES = (ATTENTION, DOUBLE, SINGLE)
