"""Lumina-Image 2.0: one stream, norms around attention and SwiGLU MLP, modulation by scale and tanh gate.

Keys and values have fewer heads than queries. The refiner of the caption has no modulation.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..attention.description import Attention
from ..attention.masks import KeyMask
from ..blocks.block import Block
from ..blocks.gated_mlp import GatedMLP
from ..blocks.stream import RMSNORM, Mod, Stream, modulation_by
from ..engine.guards import children
from ..engine.rotary_tables import of_complex

ATTENTION = Attention(
    processor="diffusers.models.transformers.transformer_lumina2.Lumina2AttnProcessor2_0",
    norm=RMSNORM,
    scale="scale",
    mask=KeyMask(),
    tables=of_complex,
)
MLP = GatedMLP(
    ("diffusers.models.attention.LuminaFeedForward",),
    projections=("linear_1", "linear_3"),
    activation="silu",
    down="linear_2",
)


def block_forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    image_rotary_emb: Tensor,
    temb: Tensor | None = None,
) -> Tensor:
    attn, feed_forward = children(self, "attn", "feed_forward")
    norm1, norm2, ffn_norm1, ffn_norm2 = children(self, "norm1", "norm2", "ffn_norm1", "ffn_norm2")
    scale1 = gate1 = scale2 = gate2 = None
    if self.modulation:
        assert temb is not None
        scale1, gate1, scale2, gate2 = modulation_by(norm1, temb, 4)
        gate1, gate2 = Mod(gate1.value.tanh()), Mod(gate2.value.tanh())
        norm1 = norm1._modules["norm"]
    h = Stream(self, hidden_states)
    x = h.norm(norm1, None, scale1, into="attn")
    options = {"attention_mask": attention_mask, "image_rotary_emb": image_rotary_emb}
    h.add(attn(hidden_states=x, encoder_hidden_states=x, **options), gate1, norm2)
    x = h.norm(ffn_norm1, None, scale2, into="feed_forward")
    h.add(feed_forward(x), gate2, ffn_norm2)
    return h.value()


BLOCK = Block(
    classes=("diffusers.models.transformers.transformer_lumina2.Lumina2TransformerBlock",),
    forward=block_forward,
    optional_children=frozenset({"norm1.norm"}),
    modulation=("norm1.linear",),
    tensors=("temb",),
    norms={
        "norm1": ("diffusers.models.normalization.LuminaRMSNormZero", RMSNORM),
        **dict.fromkeys(("norm1.norm", "norm2", "ffn_norm1", "ffn_norm2"), (RMSNORM,)),
    },
    attentions={"attn": ATTENTION, "feed_forward": MLP},
    ops=("adaln_rmsnorm", "norm_gated_residual_norm", "norm_residual", "rmsnorm"),
)

ENTRIES = (ATTENTION, MLP, BLOCK)
