"""HunyuanVideo from an image: HunyuanVideo's blocks, in which the first frame's tokens have a modulation of their own.

The first frame is the image. Its rows and the others are two streams here, which meet in the linear layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from .._feed_forward import beside_mlp, feed_forward, ff_input
from .._guards import children
from .._linear import linears_of
from .._rotary import Tables
from .._stream import Mod, Stream, joint, modulation_by
from .hunyuan_video import DOUBLE as VIDEO_DOUBLE
from .hunyuan_video import MODELS, NORMS
from .hunyuan_video import SINGLE as VIDEO_SINGLE

REPLACE = MODELS + "hunyuan_video.HunyuanVideoTokenReplace"


class _Frames:
    """The residual stream of a block whose first rows have other modulations than the rest."""

    def __init__(self, block: Any, value: Tensor, first: int) -> None:
        self.first = first
        self.streams = Stream(block, value[:, :first]), Stream(block, value[:, first:])

    def norm(self, norm: Any, shifts: tuple[Mod, Mod], scales: tuple[Mod, Mod]) -> Tensor:
        rows = map(Stream.norm, self.streams, (norm, norm), shifts, scales)
        return torch.cat(cast("list[Tensor]", list(rows)), 1)

    def add(self, branch: Tensor, gates: tuple[Mod, Mod]) -> None:
        parts = branch[:, : self.first], branch[:, self.first :]
        for stream, part, gate in zip(self.streams, parts, gates):
            stream.add(part, gate)

    def value(self) -> Tensor:
        first, rest = self.streams
        return torch.cat((first.value(), rest.value()), 1)


def double_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    freqs_cis: Tables | None = None,
    token_replace_emb: Any = None,
    num_tokens: Any = None,
) -> tuple[Tensor, Tensor]:
    norm1, norm1_context, attn = children(self, "norm1", "norm1_context", "attn")
    norm2, ff, norm2_context, ff_context = children(self, "norm2", "ff", "norm2_context", "ff_context")
    mods = (modulation_by(norm1, embedding, 6) for embedding in (token_replace_emb, temb))
    shift1, scale1, gate1, shift2, scale2, gate2 = zip(*mods)
    c_shift1, c_scale1, c_gate1, c_shift2, c_scale2, c_gate2 = modulation_by(norm1_context, temb, 6)
    h, c = _Frames(self, hidden_states, num_tokens), Stream(self, encoder_hidden_states)
    attended, c_attended = attn(
        hidden_states=h.norm(norm1._modules["norm"], shift1, scale1),
        encoder_hidden_states=c.norm(norm1_context._modules["norm"], c_shift1, c_scale1),
        attention_mask=attention_mask,
        image_rotary_emb=freqs_cis,
    )
    h.add(attended, gate1)
    c.add(c_attended, c_gate1)
    h.add(feed_forward(ff, h.norm(norm2, shift2, scale2)), gate2)
    text = c.norm(norm2_context, c_shift2, c_scale2, into=ff_input(ff_context, encoder_hidden_states))
    c.add(feed_forward(ff_context, text), c_gate2)
    return h.value(), c.value()


def single_forward(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    attention_mask: Tensor | None = None,
    image_rotary_emb: Tables | None = None,
    token_replace_emb: Any = None,
    num_tokens: Any = None,
) -> tuple[Tensor, Tensor]:
    norm, attn, act_mlp = children(self, "norm", "attn", "act_mlp")
    shift, scale, gate = zip(*(modulation_by(norm, embedding, 3) for embedding in (token_replace_emb, temb)))
    both, video = joint(hidden_states, encoder_hidden_states), hidden_states.shape[1]
    h = _Frames(self, both, num_tokens)
    up, out = linears_of(self, ("proj_mlp",), both), linears_of(self, ("proj_out",), both)
    x = h.norm(norm._modules["norm"], shift, scale)
    attended = attn(
        hidden_states=x[:, :video],
        encoder_hidden_states=x[:, video:],
        attention_mask=attention_mask,
        image_rotary_emb=image_rotary_emb,
    )
    h.add(beside_mlp(out, joint(*attended), up, x, act_mlp), gate)
    result = h.value()
    return result[:, :video], result[:, video:]


def _why_not_call(block: Any, arguments: Mapping[str, Any]) -> str:
    given = arguments.get("token_replace_emb"), arguments.get("num_tokens")
    return "token_replace_emb or num_tokens is missing" if any(value is None for value in given) else ""


ZERO = REPLACE + "AdaLayerNormZero"

ENTRIES = (
    replace(
        VIDEO_DOUBLE,
        classes=(REPLACE + "TransformerBlock",),
        forward=double_forward,
        tensors=("temb", "token_replace_emb"),
        modules={"norm1": (ZERO,), "norm1_context": (NORMS + "AdaLayerNormZero",)},
        check=_why_not_call,
    ),
    replace(
        VIDEO_SINGLE,
        classes=(REPLACE + "SingleTransformerBlock",),
        forward=single_forward,
        tensors=("temb", "token_replace_emb"),
        modules={**VIDEO_SINGLE.modules, "norm": (ZERO + "Single",)},
        check=_why_not_call,
    ),
)
