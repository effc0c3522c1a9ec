"""FLUX.2 (dev, klein): double blocks as FLUX.1's, and single blocks whose attention and MLP share both linear layers.

The model makes the modulation once for all double blocks, and once for all single blocks. The MLPs are SwiGLU, and no
layer has a bias.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from .._block import Block
from .._decoder import GatedMLP
from .._guards import children
from .._rotary import Tables
from .._stream import TORCH_LAYERNORM, Stream, clipped, joint, modulation
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
    norm1, norm1_context, attn = children(self, "norm1", "norm1_context", "attn")
    norm2, ff, norm2_context, ff_context = children(self, "norm2", "ff", "norm2_context", "ff_context")
    shift1, scale1, gate1, shift2, scale2, gate2 = modulation(temb_mod_img, 6)
    c_shift1, c_scale1, c_gate1, c_shift2, c_scale2, c_gate2 = modulation(temb_mod_txt, 6)
    h, c = Stream(self, hidden_states), Stream(self, encoder_hidden_states)
    attended, c_attended = attn(
        hidden_states=h.norm(norm1, shift1, scale1, into=ATTENTION.readers(attn, hidden_states)),
        encoder_hidden_states=c.norm(norm1_context, c_shift1, c_scale1),
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
    )
    h.add(attended, gate1)
    h.add(ff(h.norm(norm2, shift2, scale2, into=MLP.readers(ff, hidden_states))), gate2)
    c.add(c_attended, c_gate1)
    into = MLP.readers(ff_context, encoder_hidden_states)
    c.add(ff_context(c.norm(norm2_context, c_shift2, c_scale2, into=into)), c_gate2)
    return clipped(c.value()), h.value()


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
    x = h.norm(norm, shift, scale, into=PARALLEL.readers(attn, hidden_states))
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
    fp8_skip=("*.add_*_proj", "*.to_add_out", "*.ff_context.*"),
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
