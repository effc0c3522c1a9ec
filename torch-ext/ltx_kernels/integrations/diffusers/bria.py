"""Bria 3.2 and Bria FIBO: FLUX.1's blocks; FIBO's single blocks take text and image as one tensor.

FIBO's pipeline masks the padding of prompts, and hands the mask to the attention by way of every block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..attention.description import Attention
from ..blocks.stream import RMSNORM, modulation_by
from ..engine.rotary_tables import Tables
from .flux import ATTENTION as FLUX_ATTENTION
from .flux import DOUBLE as FLUX_DOUBLE
from .flux import SINGLE as FLUX_SINGLE
from .flux import single

BRIA = "diffusers.models.transformers.transformer_bria.Bria"
FIBO = "diffusers.models.transformers.transformer_bria_fibo.BriaFibo"

ATTENTION = replace(FLUX_ATTENTION, classes=(BRIA + "Attention",), processor=BRIA + "AttnProcessor")
FIBO_ATTENTION = replace(FLUX_ATTENTION, classes=(FIBO + "Attention",), processor=FIBO + "AttnProcessor")
FIBO_SINGLE_ATTENTION = Attention(
    processor=BRIA + "AttnProcessor", norm=RMSNORM, mask=FLUX_ATTENTION.mask, tables=FLUX_ATTENTION.tables
)


def fibo_single_forward(
    self: Any,
    hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Tables | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> Tensor:
    options = {"image_rotary_emb": image_rotary_emb, **(joint_attention_kwargs or {})}
    return single(self, hidden_states, modulation_by(self._modules["norm"], temb, 3), options)


NAMES = {"joint_attention_kwargs": "attention_kwargs"}
DOUBLE = replace(FLUX_DOUBLE, classes=(BRIA + "TransformerBlock",), renames=NAMES, attentions={"attn": ATTENTION})
SINGLE = replace(FLUX_SINGLE, classes=(BRIA + "SingleTransformerBlock",), renames=NAMES, attentions={"attn": ATTENTION})
FIBO_DOUBLE = replace(FLUX_DOUBLE, classes=(FIBO + "TransformerBlock",), attentions={"attn": FIBO_ATTENTION})
FIBO_SINGLE = replace(
    FLUX_SINGLE,
    classes=(FIBO + "SingleTransformerBlock",),
    forward=fibo_single_forward,
    streams=("hidden_states",),
    attentions={"attn": FIBO_SINGLE_ATTENTION},
)

ENTRIES = (ATTENTION, FIBO_ATTENTION, FIBO_SINGLE_ATTENTION, DOUBLE, SINGLE, FIBO_DOUBLE, FIBO_SINGLE)
