"""FLUX.3: blocks of one kind of tokens and joint blocks of all kinds, attention beside SwiGLU MLP.

Text, image and reference images first go through blocks of their own. Each token has a modulation, which the model
makes once for all blocks of a kind. No layer has a bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention.description import Attention
from ..attention.masks import ScoresMask
from ..blocks.block import Block
from ..blocks.gated_mlp import GatedMLP
from ..blocks.stream import TORCH_LAYERNORM, Stream, joint, modulation
from ..engine.guards import children
from ..engine.kept import kept
from ..engine.recording import as_one
from ..engine.rotary_tables import Tables, halves
from ..engine.sites import site_of

FLUX3 = "diffusers.models.transformers.transformer_flux3.Flux3"

ATTENTION = Attention(
    classes=(FLUX3 + "Attention",),
    processor=FLUX3 + "AttnProcessor",
    parameters=("hidden_states", "attention_mask", "image_rotary_emb"),
    fuses=True,
    mask=ScoresMask(),
    tables=halves,
    casts=True,
)
MLP = GatedMLP((FLUX3 + "FeedForward",), projections=("linear_in",), down="linear_out")


def _both(block: Any, text: Tensor, content: Tensor) -> Tensor:
    """The modulation of the text's tokens and of the others, [B, T + S, 3 H]; blocks that get the same share it."""

    return kept(site_of(block), "modulation", (text, content), lambda: torch.cat((text, content), 1))


def _body(block: Any, tokens: Tensor, temb_mod: Tensor, rope: Tables) -> Tensor:
    norm, attn, ff = children(block, "norm", "attn", "ff")
    shift, scale, gate = modulation(temb_mod, 3)
    h = Stream(block, tokens)
    x = h.norm(norm, shift, scale, into=("attn", "ff"))
    h.add(attn(hidden_states=x, image_rotary_emb=rope) + ff(x), gate)
    return h.value()


def mode_forward(self: Any, hidden_states: Tensor, temb_mod: Tensor, image_rotary_emb: Tables) -> Tensor:
    return _body(self, hidden_states, temb_mod, image_rotary_emb)


def single_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb_mod: Tensor,
    temb_mod_context: Tensor,
    image_rotary_emb: Tables,
) -> tuple[Tensor, Tensor]:
    both = joint(encoder_hidden_states, hidden_states)
    result = _body(self, both, as_one(_both, self, temb_mod_context, temb_mod), image_rotary_emb)
    text = encoder_hidden_states.shape[1]
    return result[:, :text], result[:, text:]


MODE = Block(
    classes=(FLUX3 + "ModeTransformerBlock",),
    forward=mode_forward,
    tensors=("temb_mod",),
    norms={"norm": (TORCH_LAYERNORM,)},
    attentions={"attn": ATTENTION, "ff": MLP},
)
SINGLE = Block(
    classes=(FLUX3 + "SingleTransformerBlock",),
    forward=single_forward,
    streams=("hidden_states", "encoder_hidden_states"),
    tensors=("temb_mod", "temb_mod_context"),
    norms={"norm": (TORCH_LAYERNORM,)},
    attentions={"attn": ATTENTION, "ff": MLP},
)

ENTRIES = (ATTENTION, MLP, MODE, SINGLE)
