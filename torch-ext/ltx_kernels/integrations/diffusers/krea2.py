"""Krea 2: one stream of text and image, self-attention with a gate and SwiGLU MLP, modulated by a table.

Each column of the attention has a gate. Keys and values have fewer heads than queries. Weights of norms count from one,
and are kept in float32. The blocks that fuse the text have no modulation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..attention.description import Attention
from ..attention.masks import ScoresMask
from ..blocks.block import Block
from ..blocks.gated_mlp import GatedMLP
from ..blocks.stream import Stream, modulation, modulation_of
from ..engine.guards import children
from ..engine.norm_forms import KREA2_RMSNORM
from ..engine.rotary_tables import Tables, halves

KREA2 = "diffusers.models.transformers.transformer_krea2.Krea2"

ATTENTION = Attention(
    classes=(KREA2 + "Attention",),
    processor=KREA2 + "AttnProcessor",
    parameters=("hidden_states", "attention_mask", "image_rotary_emb", "kwargs"),
    norm=KREA2_RMSNORM,
    heads="num_heads",
    output="to_out.0",
    gate="to_gate",
    mask=ScoresMask(),
    tables=halves,
    casts=True,
)
MLP = GatedMLP((KREA2 + "SwiGLU",), parameter="hidden_states", projections=("gate", "up"), activation="", down="down")


def block_forward(
    self: Any, hidden_states: Tensor, temb: Tensor, image_rotary_emb: Tables, attention_mask: Tensor | None = None
) -> Tensor:
    norm1, attn, norm2, ff = children(self, "norm1", "attn", "norm2", "ff")
    table = self.scale_shift_table
    if norm1._parameters["weight"].dtype == temb.dtype:
        mods = modulation(temb, 6, table)
    else:  # the row kernel takes vectors of one dtype, and `from_pretrained` keeps the norms in float32
        mods = modulation_of((temb.float().unflatten(-1, (6, -1)) + table.float()).unbind(-2))
    scale1, shift1, gate1, scale2, shift2, gate2 = mods
    h = Stream(self, hidden_states)
    x = h.norm(norm1, shift1, scale1, into="attn")
    h.add(attn(x, attention_mask=attention_mask, image_rotary_emb=image_rotary_emb), gate1)
    h.add(ff(h.norm(norm2, shift2, scale2, into="ff")), gate2)
    return h.value()


def text_forward(self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    norm1, attn, norm2, ff = children(self, "norm1", "attn", "norm2", "ff")
    h = Stream(self, hidden_states)
    h.add(attn(h.norm(norm1, into="attn"), attention_mask=attention_mask))
    h.add(ff(h.norm(norm2, into="ff")))
    return h.value()


def _why_not_block(block: Any, arguments: Mapping[str, Any]) -> str:
    temb: Tensor = arguments["temb"]
    fits = temb.dim() == 3 and temb.shape[-1] == block.scale_shift_table.numel()
    return "" if fits else f"a timestep embedding of shape {list(temb.shape)}"


BLOCK = Block(
    classes=(KREA2 + "TransformerBlock",),
    forward=block_forward,
    tensors=("temb", "scale_shift_table"),
    norms={"norm1": (KREA2_RMSNORM,), "norm2": (KREA2_RMSNORM,)},
    attentions={"attn": ATTENTION, "ff": MLP},
    casts=True,
    check=_why_not_block,
)
TEXT = Block(
    classes=(KREA2 + "TextFusionBlock",),
    forward=text_forward,
    norms=BLOCK.norms,
    attentions=BLOCK.attentions,
    fp8_skip=("text_fusion.*",),
    casts=True,
    ops=("rmsnorm", "rmsnorm_residual"),
)

ENTRIES = (ATTENTION, MLP, BLOCK, TEXT)
