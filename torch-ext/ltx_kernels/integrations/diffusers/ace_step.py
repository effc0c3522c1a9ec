"""ACE-Step 1.5: self-attention, every second one in a window, cross-attention and SwiGLU MLP, modulated by a table.

Keys and values have fewer heads than queries. The window is a mask, unless a flash backend of attention is chosen: the
stock processor hands that the window itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..attention.description import Attention
from ..attention.masks import ScoresMask
from ..blocks.block import Block
from ..blocks.gated_mlp import GatedMLP
from ..blocks.stream import RMSNORM, Stream, modulation_of
from ..engine.guards import backend_of, children
from ..engine.rotary_tables import Tables, first_halves

ACE_STEP = "diffusers.models.transformers.ace_step_transformer.AceStep"


def _why_not_attention(attention: Any, hidden_states: Tensor, context: Tensor | None, rope: Any) -> str:
    if (context is not None) != attention.is_cross_attention or (context is not None and rope is not None):
        return "a context for a self-attention, none for a cross-attention, or one with a rotary table"
    if attention.training and attention.dropout:
        return "dropout"
    backend = backend_of(attention)
    flash = backend is not None and "flash" in str(getattr(backend, "value", backend))
    return "a flash backend of attention" if flash else ""


SELF = Attention(
    classes=(ACE_STEP + "Attention",),
    processor=ACE_STEP + "AttnProcessor2_0",
    parameters=("hidden_states", "encoder_hidden_states", "attention_mask", "image_rotary_emb", "kwargs"),
    norm=RMSNORM,
    layout="half",
    scale="scaling",
    mask=ScoresMask(),
    tables=first_halves,
    check=_why_not_attention,
)
CROSS = replace(SELF, cross=True)
MLP = GatedMLP((ACE_STEP + "MLP",), activation="")


def block_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Tables,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
) -> Tensor:
    norm1, attn1, norm3, mlp = children(self, "self_attn_norm", "self_attn", "mlp_norm", "mlp")
    mods = modulation_of(temb.unbind(1), self.scale_shift_table[0])
    shift1, scale1, gate1, shift2, scale2, gate2 = mods
    h = Stream(self, hidden_states)
    x = h.norm(norm1, shift1, scale1, into="self_attn")
    h.add(attn1(hidden_states=x, image_rotary_emb=position_embeddings, attention_mask=attention_mask), gate1)
    if self.use_cross_attention and encoder_hidden_states is not None:
        norm2, attn2 = children(self, "cross_attn_norm", "cross_attn")
        x = h.norm(norm2, into="cross_attn")
        options = {"encoder_hidden_states": encoder_hidden_states, "attention_mask": encoder_attention_mask}
        h.add(attn2(hidden_states=x, **options))
    h.add(mlp(h.norm(norm3, shift2, scale2, into="mlp")), gate2)
    return h.value()


def _why_not_block(block: Any, arguments: Mapping[str, Any]) -> str:
    temb: Tensor = arguments["temb"]
    return "" if temb.dim() == 3 and temb.shape[1] == 6 else f"a timestep embedding of shape {list(temb.shape)}"


BLOCK = Block(
    classes=(ACE_STEP + "TransformerBlock",),
    forward=block_forward,
    optional_children=frozenset({"cross_attn", "cross_attn_norm"}),
    tensors=("temb", "scale_shift_table"),
    norms=dict.fromkeys(("self_attn_norm", "cross_attn_norm", "mlp_norm"), (RMSNORM,)),
    attentions={"self_attn": SELF, "cross_attn": CROSS, "mlp": MLP},
    fp8_skip=("*.cross_attn.to_k", "*.cross_attn.to_v", "*.cross_attn.to_out.0"),
    check=_why_not_block,
)

ENTRIES = (SELF, MLP, BLOCK)
