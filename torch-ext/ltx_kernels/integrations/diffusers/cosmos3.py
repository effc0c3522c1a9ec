"""Cosmos 3: two streams of one sample, text and what is generated, with norm, attention, norm, SwiGLU MLP each.

The text attends to itself, each token to those before it. What is generated attends to all tokens. Nothing is
modulated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention.call import Call
from ..attention.choice import attend_noted
from ..attention.description import ADDED, ADDED_NORMS, ADDED_OUTPUT, Attention
from ..blocks.block import Block
from ..blocks.gated_mlp import GatedMLP
from ..blocks.stream import RMSNORM, Stream
from ..engine.guards import children
from ..engine.kept import kept
from ..engine.norm_forms import COSMOS3_RMSNORM
from ..engine.rotary_tables import Tables
from ..engine.sites import site_of

COSMOS3 = "diffusers.models.transformers.transformer_cosmos3.Cosmos3"
Rope = tuple[Tensor, Tensor, Tensor, Tensor]  # cos and sin of the text, then of what is generated, [S, D] each


def _tables(attention: Any, rope: Rope) -> Tables:
    """cos and sin of all tokens, [S, D / 2]; the stock tables hold each angle twice."""
    width = rope[0].shape[-1] // 2

    def make() -> Tables:
        cos, sin = (torch.cat([part[:, :width] for part in parts]) for parts in (rope[::2], rope[1::2]))
        return cos, sin

    return kept(site_of(attention), "tables of both streams", rope, make)


def _attends(call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of what is generated and of the text, whose rows come first."""
    assert call.context is not None
    rows = call.context.shape[1]
    text = attend_noted(call, query[:, :rows], key[:, :rows], value[:, :rows], is_causal=True)
    return attend_noted(call, query[:, rows:], key, value), text


def _why_not_module(attention: Any) -> str:
    return (
        "" if attention.k_norm_und_for_gen is None else "the generated tokens read keys of the text with another norm"
    )


ATTENTION = Attention(
    classes=(COSMOS3 + "PackedMoTAttention",),
    processor=COSMOS3 + "AttnProcessor",
    parameters=("und_seq", "gen_seq", "rotary_emb"),
    inputs=("gen_seq", "und_seq", "attention_mask"),
    rope="rotary_emb",
    norm=RMSNORM,
    layout="half",
    heads="num_attention_heads",
    projections=ADDED,
    norms=ADDED_NORMS,
    output=ADDED_OUTPUT,
    added=True,
    added_projections=("to_q", "to_k", "to_v"),
    added_norms=("norm_q", "norm_k"),
    added_output="to_out",
    batched=False,
    second_first=True,
    grouped=True,
    optional_children=("k_norm_und_for_gen",),
    tables=_tables,
    attends=_attends,
    why_not=_why_not_module,
)
MLP = GatedMLP((COSMOS3 + "VLTextMLP",))


def _through_mlp(block: Any, h: Stream, norm_name: str, name: str) -> Tensor:
    norm, mlp = children(block, norm_name, name)
    rows = h.norm(norm, into=name)
    own = h.own()
    if own is not None and MLP.adds(mlp):
        added: Tensor = mlp(rows, addend=own)
        return added
    h.add(mlp(rows))
    return h.value()


def block_forward(self: Any, und_seq: Tensor, gen_seq: Tensor, rotary_emb: Rope) -> tuple[Tensor, Tensor]:
    text_norm, norm, attn = children(self, "input_layernorm", "input_layernorm_moe_gen", "self_attn")
    text, h = Stream(self, und_seq), Stream(self, gen_seq)
    text_attended, attended = attn(text.norm(text_norm), h.norm(norm, into="self_attn"), rotary_emb)
    text.add(text_attended)
    h.add(attended)
    return (
        _through_mlp(self, text, "post_attention_layernorm", "mlp"),
        _through_mlp(self, h, "post_attention_layernorm_moe_gen", "mlp_moe_gen"),
    )


NORMS = ("input_layernorm", "post_attention_layernorm")

BLOCK = Block(
    classes=(COSMOS3 + "VLTextMoTDecoderLayer",),
    forward=block_forward,
    streams=("gen_seq", "und_seq"),
    norms=dict.fromkeys((*NORMS, *(f"{name}_moe_gen" for name in NORMS)), (RMSNORM, COSMOS3_RMSNORM)),
    attentions={"self_attn": ATTENTION, "mlp": MLP, "mlp_moe_gen": MLP},
    fp8_skip=("*.self_attn.to_[qkv]", "*.self_attn.to_out", "*.mlp.*"),
    fp8_skip_low=(),
    ops=("rmsnorm", "rmsnorm_residual"),
)

ENTRIES = (ATTENTION, MLP, BLOCK)
