"""HunyuanVideo from an image: HunyuanVideo's blocks, in which the first frame's tokens have a modulation of their own.

The first frame is the image. Its rows and the others are two streams here, which meet in the linear layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ..blocks.stream import Mod, Readers, Stream, joint, modulation_by
from ..engine.guards import children
from ..engine.rotary_tables import Tables
from ._double_block import IMAGE, TEXT, Tokens, double_block
from .hunyuan_video import DOUBLE as VIDEO_DOUBLE
from .hunyuan_video import MODELS, NORMS, single
from .hunyuan_video import SINGLE as VIDEO_SINGLE

Pair = tuple[Mod, Mod]  # of the first frame, and of the rest
REPLACE = MODELS + "hunyuan_video.HunyuanVideoTokenReplace"


class _Frames:
    """The residual stream of a block whose first rows have other modulations than the rest."""

    def __init__(self, block: Any, value: Tensor, first: int) -> None:
        self.first = first
        self.streams = Stream(block, value[:, :first]), Stream(block, value[:, first:])

    def norm(self, norm: Any, shifts: Pair, scales: Pair, into: Readers = None) -> Tensor:
        """The rows as a tensor, whatever reads them: two launches write them."""
        rows = map(Stream.norm, self.streams, (norm, norm), shifts, scales)
        return torch.cat(cast("list[Tensor]", list(rows)), 1)

    def add(self, branch: Tensor, gates: Pair) -> None:
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
    norm1, norm1_context = children(self, "norm1", "norm1_context")
    mods = list(zip(*(modulation_by(norm1, embedding, 6) for embedding in (token_replace_emb, temb))))
    video = Tokens(self, hidden_states, IMAGE, mods, _Frames(self, hidden_states, num_tokens))
    text = Tokens(self, encoder_hidden_states, TEXT, modulation_by(norm1_context, temb, 6))
    options = {"attention_mask": attention_mask, "image_rotary_emb": freqs_cis}
    return double_block(self, video, text, options)


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
    norm = self._modules["norm"]
    mods = list(zip(*(modulation_by(norm, embedding, 3) for embedding in (token_replace_emb, temb))))
    both, rows = joint(hidden_states, encoder_hidden_states), hidden_states.shape[1]
    options = {"attention_mask": attention_mask, "image_rotary_emb": image_rotary_emb}
    return single(self, both, rows, _Frames(self, both, num_tokens), mods, options)


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
