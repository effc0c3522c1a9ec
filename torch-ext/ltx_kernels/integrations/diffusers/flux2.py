"""FLUX.2 (dev, klein): double blocks as FLUX.1's, and single blocks whose attention and MLP share both linear layers.

The model makes the modulation once for all double blocks, and once for all single blocks. The MLPs are SwiGLU, and no
layer has a bias. The KV pipeline of klein keeps keys and values of reference images from the first step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..attention.call import Call
from ..attention.choice import attend_noted
from ..attention.kept_keys import with_kept
from ..blocks.block import Block
from ..blocks.gated_mlp import GatedMLP
from ..blocks.stream import TORCH_LAYERNORM, Stream, clipped, joint, modulation
from ..engine.guards import children
from ..engine.recording import refuse
from ..engine.rotary_tables import Tables
from ._double_block import IMAGE, TEXT, Tokens, double_block
from .flux import ATTENTION as FLUX1_ATTENTION

FLUX2 = "diffusers.models.transformers.transformer_flux2."


def _attends(call: Call, query: Tensor, key: Tensor, value: Tensor) -> Any:
    """The first step's tokens of reference images see themselves alone; later steps read the keys that it kept."""
    cache, mode = call.further.get("kv_cache"), call.further.get("kv_cache_mode")
    text = call.context.shape[1] if call.context is not None else call.further.get("num_txt_tokens") or 0
    end = text + (call.further.get("num_ref_tokens") or 0)
    if cache is not None:
        refuse("keys and values of reference images are kept")
    if mode == "extract" and end > text:
        references = slice(text, end)
        if cache is not None:
            cache.store(key[:, references].clone(), value[:, references].clone())
        output = torch.cat(
            [
                attend_noted(call, query[:, :text], key, value),
                attend_noted(call, query[:, references], key[:, references], value[:, references]),
                attend_noted(call, query[:, end:], key, value),
            ],
            1,
        )
    elif mode == "cached" and cache is not None:
        key, value = (with_kept(*pair) for pair in zip(cache.get(), (key, value)))
        output = attend_noted(call, query, key, value)
    else:
        output = attend_noted(call, query, key, value, call.seen(call.mask))
    return (output[:, text:], output[:, :text]) if call.context is not None else output


ATTENTION = replace(
    FLUX1_ATTENTION,
    classes=(FLUX2 + "Flux2Attention",),
    processor=FLUX2 + "Flux2AttnProcessor",
    other_processors=(FLUX2 + "Flux2KVAttnProcessor",),
    attends=_attends,
    arguments=("kv_cache", "kv_cache_mode", "num_ref_tokens"),
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
    arguments=(*ATTENTION.arguments, "num_txt_tokens"),
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
