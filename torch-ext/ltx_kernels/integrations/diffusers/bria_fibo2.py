"""Bria FIBO 2: Z-Image's blocks, of which some attend to the prompt between attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..blocks.stream import RMSNORM, Mod, Stream
from ..engine.guards import children
from .z_image import ATTENTION, BLOCK, MLP, modulation_of_tokens

FIBO2 = "diffusers.models.transformers.transformer_bria_fibo2."

SELF = replace(
    ATTENTION,
    classes=(FIBO2 + "BriaFibo2Attention",),
    processor=FIBO2 + "BriaFibo2AttnProcessor",
    parameters=("hidden_states", "encoder_hidden_states", "attention_mask", "freqs_cis"),
    output="to_out.0",
)
CROSS = replace(SELF, cross=True)
FEED_FORWARD = replace(MLP, classes=(FIBO2 + "FeedForward",))


def block_forward(
    self: Any,
    x: Tensor,
    attn_mask: Tensor | None,
    freqs_cis: Tensor,
    adaln_input: Tensor | None = None,
    noise_mask: Tensor | None = None,
    adaln_noisy: Tensor | None = None,
    adaln_clean: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
) -> Tensor:
    attention, feed_forward, linear = children(self, "attention", "feed_forward", "adaLN_modulation")
    norm1, norm2, ffn_norm1, ffn_norm2 = children(self, "attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")
    mods, index = modulation_of_tokens(linear, adaln_input, noise_mask, adaln_noisy, adaln_clean)
    scale1, gate1, scale2, gate2 = mods
    h = Stream(self, x, index)
    rows = h.norm(norm1, None, scale1, into="attention")
    h.add(attention(rows, attention_mask=attn_mask, freqs_cis=freqs_cis), gate1, norm2)
    cross = self._modules.get("cross_attention")
    if cross is not None:
        cross_norm1, cross_norm2 = children(self, "cross_attn_norm1", "cross_attn_norm2")
        rows = h.norm(cross_norm1, into="cross_attention")
        options = {"encoder_hidden_states": encoder_hidden_states, "attention_mask": encoder_attention_mask}
        # One number, written out in the form of the other gates.
        gate = Mod(self.cross_attn_gate.tanh().expand_as(gate1.value).contiguous())
        h.add(cross(rows, **options), gate, cross_norm2)
    rows = h.norm(ffn_norm1, None, scale2, into="feed_forward")
    h.add(feed_forward(rows), gate2, ffn_norm2)
    return h.value()


def _why_not_block(block: Any, arguments: Mapping[str, Any]) -> str:
    gate = block._parameters.get("cross_attn_gate")
    return "" if gate is None or gate.dtype == arguments["x"].dtype else f"cross_attn_gate has dtype {gate.dtype}"


CROSS_NORMS = ("cross_attn_norm1", "cross_attn_norm2")

FIBO2_BLOCK = replace(
    BLOCK,
    classes=(FIBO2 + "BriaFibo2TransformerBlock",),
    forward=block_forward,
    children=frozenset({"adaLN_modulation"}),
    optional_children=frozenset({"cross_attention", *CROSS_NORMS}),
    norms={**BLOCK.norms, **dict.fromkeys(CROSS_NORMS, (RMSNORM,))},
    attentions={"attention": SELF, "cross_attention": CROSS, "feed_forward": FEED_FORWARD},
    fp8_skip=("*.cross_attention.to_k", "*.cross_attention.to_v"),
    check=_why_not_block,
)

ENTRIES = (SELF, FEED_FORWARD, FIBO2_BLOCK)
