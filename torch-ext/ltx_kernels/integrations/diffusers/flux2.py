"""FLUX.2 (dev, klein): double blocks as FLUX.1's, and single blocks whose attention and MLP share both linear layers.

The model makes the modulation once for all double blocks, and once for all single blocks. The MLPs are SwiGLU, and no
layer has a bias.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..blocks.block import Block
from ..blocks.gated_mlp import GatedMLP
from ..blocks.stream import TORCH_LAYERNORM, Stream, clipped, joint, modulation
from ..engine.guards import children
from ..engine.rotary_tables import Tables
from ._double_block import IMAGE, TEXT, Tokens, double_block
from .flux import ATTENTION as FLUX1_ATTENTION

FLUX2 = "diffusers.models.transformers.transformer_flux2."


ATTENTION = replace(
    FLUX1_ATTENTION,
    classes=(FLUX2 + "Flux2Attention",),
    processor=FLUX2 + "Flux2AttnProcessor",
    other_processors=(FLUX2 + "Flux2KVAttnProcessor",),
)
PARALLEL = replace(
    ATTENTION,
    classes=(FLUX2 + "Flux2ParallelSelfAttention",),
    processor=FLUX2 + "Flux2ParallelSelfAttnProcessor",
    other_processors=(FLUX2 + "Flux2KVParallelSelfAttnProcessor",),
    parameters=("hidden_states", "attention_mask", "image_rotary_emb", "kwargs"),
    projections=("to_qkv_mlp_proj",),
    mlp="mlp_act_fn",
    added=False,
)
MLP = GatedMLP((FLUX2 + "Flux2FeedForward",), projections=("linear_in",), down="linear_out")


def double_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb_mod_img: Tensor,
    temb_mod_txt: Tensor,
    image_rotary_emb: Tables | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    image = Tokens(self, hidden_states, IMAGE, modulation(temb_mod_img, 6))
    text = Tokens(self, encoder_hidden_states, TEXT, modulation(temb_mod_txt, 6))
    options = {"image_rotary_emb": image_rotary_emb, **(joint_attention_kwargs or {})}
    hidden_states, encoder_hidden_states = double_block(self, image, text, options)
    return clipped(encoder_hidden_states), hidden_states


def single_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None,
    temb_mod: Tensor,
    image_rotary_emb: Tables | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    split_hidden_states: bool = False,
    text_seq_len: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    norm, attn = children(self, "norm", "attn")
    if encoder_hidden_states is not None:
        text_seq_len = encoder_hidden_states.shape[1]
        hidden_states = joint(encoder_hidden_states, hidden_states)
    shift, scale, gate = modulation(temb_mod, 3)
    h = Stream(self, hidden_states)
    x = h.norm(norm, shift, scale, into="attn")
    h.add(attn(hidden_states=x, image_rotary_emb=image_rotary_emb, **(joint_attention_kwargs or {})), gate)
    result = clipped(h.value())
    return (result[:, :text_seq_len], result[:, text_seq_len:]) if split_hidden_states else result


DOUBLE = Block(
    classes=(FLUX2 + "Flux2TransformerBlock",),
    forward=double_forward,
    streams=("hidden_states", "encoder_hidden_states"),
    tensors=("temb_mod_img", "temb_mod_txt"),
    norms=dict.fromkeys(("norm1", "norm1_context", "norm2", "norm2_context"), (TORCH_LAYERNORM,)),
    attentions={"attn": ATTENTION, "ff": MLP, "ff_context": MLP},
    fp8_skip=("*.add_*_proj", "*.to_added_qkv", "*.to_add_out", "*.ff_context.*"),
    fp8_skip_low=(),
)
SINGLE = Block(
    classes=(FLUX2 + "Flux2SingleTransformerBlock",),
    forward=single_forward,
    streams=("hidden_states", "encoder_hidden_states"),
    tensors=("temb_mod",),
    norms={"norm": (TORCH_LAYERNORM,)},
    attentions={"attn": PARALLEL},
)

ENTRIES = (ATTENTION, PARALLEL, MLP, DOUBLE, SINGLE)
