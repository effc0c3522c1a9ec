"""Z-Image and its ControlNet: one stream, norms around attention and SwiGLU MLP, modulation by scale and tanh gate.

The refiner of the caption has no modulation. In the omni mode each token takes one of two modulations. A block of the
ControlNet gives all streams so far, one for each block, and a projection of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..attention.description import Attention
from ..attention.masks import KeyMask
from ..blocks.block import Block
from ..blocks.gated_mlp import GatedMLP
from ..blocks.stream import RMSNORM, Mod, Stream, chosen, modulation
from ..engine.guards import children
from ..engine.rotary_tables import of_complex

Z_IMAGE = "diffusers.models.transformers.transformer_z_image."
CONTROLNET = "diffusers.models.controlnets.controlnet_z_image."


ATTENTION = Attention(
    processor=Z_IMAGE + "ZSingleStreamAttnProcessor",
    rope="freqs_cis",
    norm=RMSNORM,
    mask=KeyMask(),
    tables=of_complex,
)
CONTROLNET_ATTENTION = replace(ATTENTION, processor=CONTROLNET + "ZSingleStreamAttnProcessor")
MLP = GatedMLP(
    (Z_IMAGE + "FeedForward", CONTROLNET + "FeedForward"), projections=("w1", "w3"), activation="", down="w2"
)


def modulation_of_tokens(
    linear: Any, temb: Tensor | None, noise_mask: Tensor | None, noisy: Tensor | None, clean: Tensor | None
) -> tuple[list[Mod], Tensor | None]:
    """Scale and gate of the attention and of the MLP, and the index of the omni mode: clean tokens and noisy ones."""
    index = None
    if noise_mask is None:
        values = linear(temb)
    else:
        values, index = chosen(torch.stack((linear(clean), linear(noisy)), 1), noise_mask == 1)
    scale1, gate1, scale2, gate2 = modulation(values, 4)
    return [scale1, Mod(gate1.value.tanh()), scale2, Mod(gate2.value.tanh())], index


def block_forward(
    self: Any,
    x: Tensor,
    attn_mask: Tensor | None,
    freqs_cis: Tensor,
    adaln_input: Tensor | None = None,
    noise_mask: Tensor | None = None,
    adaln_noisy: Tensor | None = None,
    adaln_clean: Tensor | None = None,
) -> Tensor:
    attention, feed_forward = children(self, "attention", "feed_forward")
    norm1, norm2, ffn_norm1, ffn_norm2 = children(self, "attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")
    mods: list[Any] = [None] * 4
    index = None
    if self.modulation:
        linear = self._modules["adaLN_modulation"]
        mods, index = modulation_of_tokens(linear, adaln_input, noise_mask, adaln_noisy, adaln_clean)
    scale1, gate1, scale2, gate2 = mods
    h = Stream(self, x, index)
    rows = h.norm(norm1, None, scale1, into="attention")
    h.add(attention(rows, attention_mask=attn_mask, freqs_cis=freqs_cis), gate1, norm2)
    rows = h.norm(ffn_norm1, None, scale2, into="feed_forward")
    h.add(feed_forward(rows), gate2, ffn_norm2)
    return h.value()


def control_forward(
    self: Any,
    c: Tensor,
    x: Tensor,
    attn_mask: Tensor | None,
    freqs_cis: Tensor,
    adaln_input: Tensor | None = None,
) -> Tensor:
    before: tuple[Tensor, ...] = ()
    if self.block_id == 0:
        c = self.before_proj(c) + x
    else:
        streams = c.unbind()
        before, c = streams[:-1], streams[-1]
    c = block_forward(self, c, attn_mask, freqs_cis, adaln_input)
    return torch.stack((*before, self.after_proj(c), c))


BLOCK = Block(
    classes=(Z_IMAGE + "ZImageTransformerBlock",),
    forward=block_forward,
    optional_children=frozenset({"adaLN_modulation"}),
    modulation=("adaLN_modulation.0",),
    streams=("x",),
    tensors=("adaln_input", "adaln_noisy", "adaln_clean"),
    norms=dict.fromkeys(("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"), (RMSNORM,)),
    attentions={"attention": ATTENTION, "feed_forward": MLP},
    ops=("adaln_rmsnorm", "norm_gated_residual_norm", "norm_residual", "rmsnorm"),
)
CONTROLNET_BLOCK = replace(
    BLOCK,
    classes=(CONTROLNET + "ZImageTransformerBlock",),
    attentions={**BLOCK.attentions, "attention": CONTROLNET_ATTENTION},
)
CONTROL_BLOCK = replace(
    CONTROLNET_BLOCK,
    classes=(CONTROLNET + "ZImageControlTransformerBlock",),
    forward=control_forward,
    children=frozenset({"after_proj"}),
    optional_children=BLOCK.optional_children | {"before_proj"},
    streams=("c", "x"),
    tensors=("adaln_input",),
    unbatched=("x", "adaln_input"),  # `c` holds the results of all blocks so far, [blocks, B, S, H]
)

ENTRIES = (ATTENTION, CONTROLNET_ATTENTION, MLP, BLOCK, CONTROLNET_BLOCK, CONTROL_BLOCK)
