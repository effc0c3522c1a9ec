"""Qwen-Image (also Edit and Layered): blocks of two streams, image and text, that meet in the attention.

The rotary tables are complex, one for each stream; their real and imaginary parts are put together once per forward, in
the order of the joint rows.

Edit 2511 (`zero_cond_t`) doubles the batch of the timestep's embedding. The first half is of the timestep, the second
half is of timestep 0. Tokens of the image that is made, and the text, take their modulation from the first half. Tokens
of input images take it from the second half. `modulate_index` is 0 or 1 for each image token:
the row of its modulation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..attention.description import Attention
from ..blocks.block import Block
from ..blocks.stream import RMSNORM, TORCH_LAYERNORM, Stream, chosen, clipped, modulation
from ..engine.guards import children
from ..engine.kept import kept
from ..engine.rotary_tables import Tables
from ..engine.sites import site_of
from ._double_block import Tokens, double_block

# Names of a stream's first norm, second norm and feed-forward.
IMAGE = ("img_norm1", "img_norm2", "img_mlp")
TEXT = ("txt_norm1", "txt_norm2", "txt_mlp")
QWEN = "diffusers.models.transformers.transformer_qwenimage."


def _tables(attention: Any, rope: Tables) -> Tables:
    """cos and sin of all rows, [text + image, D / 2], of the complex tables of image and text."""
    image, text = rope

    def make() -> Tables:
        angles = torch.view_as_real(torch.cat([text, image]))
        return angles[..., 0].contiguous(), angles[..., 1].contiguous()

    if torch.compiler.is_compiling():  # tensors of a graph have no address
        return make()
    # The text's table is a slice, a new tensor at each forward, of one that lasts.
    return kept(site_of(attention), "joint", (image,), make, views=(text,))


ATTENTION = Attention(
    processor=QWEN + "QwenDoubleStreamAttnProcessor2_0",
    norm=RMSNORM,
    added=True,
    tables=_tables,
)


def block_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    encoder_hidden_states_mask: Tensor | None,
    temb: Tensor,
    image_rotary_emb: Tables | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    modulate_index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    img_mod, txt_mod = children(self, "img_mod", "txt_mod")
    values = img_mod(temb)
    if modulate_index is not None:
        values, modulate_index = chosen(values.unflatten(0, (2, -1)).transpose(0, 1), modulate_index)  # of [B, 2, 6 H]
        temb = temb.chunk(2)[0]
    stream = Stream(self, hidden_states, modulate_index)
    image = Tokens(self, hidden_states, IMAGE, modulation(values, 6), stream)
    text = Tokens(self, encoder_hidden_states, TEXT, modulation(txt_mod(temb), 6))
    options = {"encoder_hidden_states_mask": encoder_hidden_states_mask, "image_rotary_emb": image_rotary_emb}
    options.update(joint_attention_kwargs or {})
    hidden_states, encoder_hidden_states = double_block(self, image, text, options)
    return clipped(encoder_hidden_states), clipped(hidden_states)


def _why_not_block(block: Any, arguments: Mapping[str, Any]) -> str:
    given = arguments.get("modulate_index") is not None
    return "" if given == block.zero_cond_t else f"modulate_index {'given' if given else 'missing'}"


BLOCK = Block(
    classes=(QWEN + "QwenImageTransformerBlock",),
    forward=block_forward,
    children=frozenset({"img_mod", "txt_mod"}),
    streams=("hidden_states", "encoder_hidden_states"),
    norms=dict.fromkeys(("img_norm1", "img_norm2", "txt_norm1", "txt_norm2"), (TORCH_LAYERNORM,)),
    attentions={"attn": ATTENTION},
    feed_forwards=("img_mlp", "txt_mlp"),
    fp8_skip=("*.attn.add_*_proj", "*.attn.to_add_out", "*.txt_mlp.*"),
    fp8_skip_low=(),
    modulation=("img_mod.1", "txt_mod.1"),
    check=_why_not_block,
)

ENTRIES = (BLOCK, ATTENTION)
