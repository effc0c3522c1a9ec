"""Ideogram 4: one stream of text and image, norms around attention and MLP, modulation by scale and tanh gate."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..attention.description import Attention
from ..attention.masks import SegmentMask
from ..blocks.block import Block
from ..blocks.gated_mlp import GatedMLP
from ..blocks.stream import RMSNORM, Mod, Stream, modulation
from ..engine.guards import children
from ..engine.rotary_tables import Tables, first_halves

IDEOGRAM4 = "diffusers.models.transformers.transformer_ideogram4.Ideogram4"

ATTENTION = Attention(
    classes=(IDEOGRAM4 + "Attention",),
    processor=IDEOGRAM4 + "AttnProcessor",
    parameters=("hidden_states", "attention_mask", "image_rotary_emb", "kwargs"),
    norm=RMSNORM,
    heads="num_heads",
    output="to_out.0",
    layout="half",
    mask=SegmentMask(),
    tables=first_halves,
)
MLP = GatedMLP((IDEOGRAM4 + "MLP",), projections=("w1", "w3"), activation="", down="w2")


def block_forward(
    self: Any, hidden_states: Tensor, attention_mask: Tensor, image_rotary_emb: Tables, adaln_input: Tensor
) -> Tensor:
    attention, feed_forward, linear = children(self, "attention", "feed_forward", "adaln_modulation")
    norm1, norm2, ffn_norm1, ffn_norm2 = children(self, "attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")
    scale1, gate1, scale2, gate2 = modulation(linear(adaln_input), 4)
    h = Stream(self, hidden_states)
    x = h.norm(norm1, None, scale1, into="attention")
    options = {"attention_mask": attention_mask, "image_rotary_emb": image_rotary_emb}
    h.add(attention(x, **options), Mod(gate1.value.tanh()), norm2)
    x = h.norm(ffn_norm1, None, scale2, into="feed_forward")
    h.add(feed_forward(x), Mod(gate2.value.tanh()), ffn_norm2)
    return h.value()


BLOCK = Block(
    classes=(IDEOGRAM4 + "TransformerBlock",),
    forward=block_forward,
    children=frozenset({"adaln_modulation"}),
    modulation=("adaln_modulation",),
    tensors=("adaln_input",),
    norms=dict.fromkeys(("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"), (RMSNORM,)),
    attentions={"attention": ATTENTION, "feed_forward": MLP},
    ops=("adaln_rmsnorm", "norm_gated_residual_norm", "norm_residual"),
)

ENTRIES = (ATTENTION, MLP, BLOCK)
