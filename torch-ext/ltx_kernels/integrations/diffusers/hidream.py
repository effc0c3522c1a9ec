"""HiDream-I1: blocks of two streams, image and text, that meet in one attention, and blocks of one stream.

The MLP of the image is a mixture of experts, which grouped products compute together (blocks/mixture.py). Where they
cannot, each expert is called. That asks the host how many tokens each gets, so that such calls are not recorded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..attention.description import Attention
from ..attention.masks import KeyFactor
from ..blocks.block import Block
from ..blocks.gated_mlp import GatedMLP
from ..blocks.mixture import Mixture
from ..blocks.stream import TORCH_LAYERNORM, Stream, modulation
from ..engine.guards import children
from ..engine.rotary_tables import of_matrices
from ._double_block import Tokens

HIDREAM = "diffusers.models.transformers.transformer_hidream_image."

ATTENTION = Attention(
    classes=(HIDREAM + "HiDreamAttention",),
    processor=HIDREAM + "HiDreamAttnProcessor",
    parameters=("norm_hidden_states", "hidden_states_masks", "norm_encoder_hidden_states", "image_rotary_emb"),
    inputs=("norm_hidden_states", "norm_encoder_hidden_states", "hidden_states_masks"),
    norms=("q_rms_norm", "k_rms_norm"),
    across_heads=True,
    added=True,
    added_projections=("to_q_t", "to_k_t", "to_v_t"),
    added_norms=("q_rms_norm_t", "k_rms_norm_t"),
    added_output="to_out_t",
    text_first=False,
    mask=KeyFactor(),
    tables=of_matrices,
)
MLP = GatedMLP(
    (HIDREAM + "HiDreamImageFeedForwardSwiGLU",),
    projections=("w1", "w3"),
    activation="",
    down="w2",
    mixtures=(HIDREAM + "MOEFeedForwardSwiGLU",),
)
MIXTURE = Mixture(MLP.mixtures, MLP)


def double_forward(
    self: Any,
    hidden_states: Tensor,
    hidden_states_masks: Tensor | None = None,
    encoder_hidden_states: Any = None,
    temb: Any = None,
    image_rotary_emb: Any = None,
) -> tuple[Tensor, Tensor]:
    attn1, adaln = children(self, "attn1", "adaLN_modulation")
    mods = modulation(adaln(temb), 12)
    image = Tokens(self, hidden_states, ("norm1_i", "norm3_i", "ff_i"), mods[:6])
    text = Tokens(self, encoder_hidden_states, ("norm1_t", "norm3_t", "ff_t"), mods[6:])
    attended, text_attended = attn1(
        norm_hidden_states=image.attention_input(into="attn1"),
        hidden_states_masks=hidden_states_masks,
        norm_encoder_hidden_states=text.attention_input(),
        image_rotary_emb=image_rotary_emb,
    )
    return image.finish(attended), text.finish(text_attended)


def single_forward(
    self: Any,
    hidden_states: Tensor,
    hidden_states_masks: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    temb: Any = None,
    image_rotary_emb: Any = None,
) -> Tensor:
    norm1, attn1, norm3, ff, adaln = children(self, "norm1_i", "attn1", "norm3_i", "ff_i", "adaLN_modulation")
    shift1, scale1, gate1, shift2, scale2, gate2 = modulation(adaln(temb), 6)
    h = Stream(self, hidden_states)
    attended = attn1(
        norm_hidden_states=h.norm(norm1, shift1, scale1, into="attn1"),
        hidden_states_masks=hidden_states_masks,
        image_rotary_emb=image_rotary_emb,
    )
    h.add(attended, gate1)
    h.add(ff(h.norm(norm3, shift2, scale2, into="ff_i")), gate2)
    return h.value()


DOUBLE = Block(
    classes=(HIDREAM + "HiDreamImageTransformerBlock",),
    forward=double_forward,
    children=frozenset({"adaLN_modulation"}),
    streams=("hidden_states", "encoder_hidden_states"),
    tensors=("temb",),
    norms=dict.fromkeys(("norm1_i", "norm3_i", "norm1_t", "norm3_t"), (TORCH_LAYERNORM,)),
    attentions={"attn1": ATTENTION, "ff_i": MLP, "ff_t": MLP},
    fp8_skip=("*.attn1.to_*_t", "*.ff_t.*"),
    fp8_skip_low=(),
    modulation=("adaLN_modulation.1",),
    plain=(HIDREAM + "MoEGate",),
)
SINGLE = replace(
    DOUBLE,
    classes=(HIDREAM + "HiDreamImageSingleTransformerBlock",),
    forward=single_forward,
    streams=("hidden_states",),
    norms=dict.fromkeys(("norm1_i", "norm3_i"), (TORCH_LAYERNORM,)),
    attentions={"attn1": ATTENTION, "ff_i": MLP},
)

ENTRIES = (ATTENTION, MLP, MIXTURE, DOUBLE, SINGLE)
