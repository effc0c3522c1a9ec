"""ERNIE-Image: one stream of image and text, self-attention and MLP with a GELU gate, modulated by the model.

The stock stream is [S, B, D], and the model writes each modulation out for all tokens. The blocks compute [B, S, D],
also in the MLP, and read one row of each modulation where all rows are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._checks import requires_grad
from ..attention.description import Attention
from ..attention.masks import PaddingMask
from ..blocks.block import Block
from ..blocks.gated_mlp import ERF, GatedMLP
from ..blocks.stream import RMSNORM, Stream, modulation_of
from ..engine.guards import children, follows_shared, why_not_tensor
from ..engine.kept import kept, may_read
from ..engine.recording import as_one
from ..engine.rotary_tables import Tables
from ..engine.sites import Site, site_of

ERNIE_IMAGE = "diffusers.models.transformers.transformer_ernie_image.ErnieImage"


def _tables(attention: Any, rope: Tensor) -> Tables:
    """cos and sin [B, S, D] of angles [B, S, 1, D]. The columns i and i + D / 2 turn by angles of their own."""

    def make() -> Tables:
        angles = rope.squeeze(2)
        return angles.cos(), angles.sin()

    return kept(site_of(attention), "of angles", (rope,), make)


def _why_not_attention(attention: Any, hidden_states: Any, context: Tensor | None, rope: Tensor | None) -> str:
    return "" if context is None else "a context, which the stock processor does not read"


ATTENTION = Attention(
    classes=(ERNIE_IMAGE + "Attention",),
    processor=ERNIE_IMAGE + "SingleStreamAttnProcessor",
    parameters=("hidden_states", "encoder_hidden_states", "attention_mask", "image_rotary_emb", "kwargs"),
    output="to_out.0",
    layout="half",
    mask=PaddingMask(),
    tables=_tables,
    check=_why_not_attention,
)
MLP = GatedMLP((ERNIE_IMAGE + "FeedForward",), activation="", kind=ERF, down="linear_fc2")


def _modulation(site: Site, *temb: Tensor) -> tuple[Tensor, ...]:
    """Modulations [S, B, D] as [B, S, D]; all tokens share one row in memory where the host finds the rows equal."""

    def equal() -> bool:
        return bool(torch.stack([(value == value[:1]).all() for value in temb]).all())

    if all(map(may_read, temb)) and kept(site, "equal rows", temb, equal):
        temb = tuple(value[:1].expand_as(value) for value in temb)
    return tuple(value.transpose(0, 1) for value in temb)


def block_forward(
    self: Any,
    x: Tensor,
    rotary_pos_emb: Tensor,
    temb: Sequence[Tensor],
    attention_mask: Tensor | None = None,
) -> Tensor:
    norm1, attention, norm2, mlp = children(self, "adaLN_sa_ln", "self_attention", "adaLN_mlp_ln", "mlp")
    if torch.is_grad_enabled() and requires_grad(*temb):  # each token's row gets a gradient of its own
        mods = modulation_of(tuple(value.transpose(0, 1) for value in temb))
    else:
        mods = modulation_of(as_one(_modulation, site_of(self), *temb))
    shift1, scale1, gate1, shift2, scale2, gate2 = mods
    h = Stream(self, x.transpose(0, 1))
    rows = h.norm(norm1, shift1, scale1, into="self_attention")
    h.add(attention(rows, attention_mask=attention_mask, image_rotary_emb=rotary_pos_emb), gate1)
    h.add(mlp(h.norm(norm2, shift2, scale2, into="mlp")), gate2)
    return h.value().transpose(0, 1)


def _why_not_block(block: Any, arguments: Mapping[str, Any]) -> str:
    x = arguments["x"]
    for value in arguments["temb"]:
        reason = why_not_tensor("temb", value, x, gradient=follows_shared()) or (
            "" if value.shape == x.shape else "temb has not a row for each token"
        )
        if reason:
            return reason
    return ""


BLOCK = Block(
    classes=(ERNIE_IMAGE + "SharedAdaLNBlock",),
    forward=block_forward,
    streams=("x",),
    norms={"adaLN_sa_ln": (RMSNORM,), "adaLN_mlp_ln": (RMSNORM,)},
    attentions={"self_attention": ATTENTION, "mlp": MLP},
    check=_why_not_block,
)

ENTRIES = (ATTENTION, MLP, BLOCK)
