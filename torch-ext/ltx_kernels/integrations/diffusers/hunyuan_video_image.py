"""HunyuanVideo from an image: HunyuanVideo's blocks, in which the first frame's tokens have a modulation of their own.

The first frame is the image. The ops choose between the two modulations by an index of the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._double import IMAGE, TEXT, Tokens, double_block
from .._guards import children
from .._rotary import Tables
from .._stream import Mod, Stream, joint, modulation, modulation_by
from .hunyuan_video import ATTENTION, MODELS, NORMS, single
from .hunyuan_video import DOUBLE as VIDEO_DOUBLE
from .hunyuan_video import SINGLE as VIDEO_SINGLE

REPLACE = MODELS + "hunyuan_video.HunyuanVideoTokenReplace"


def _modulation(norm: Any, first: Tensor, rest: Tensor, count: int) -> list[Mod]:
    """[B, 2, H] each: of the first frame, then of the other tokens."""
    silu, linear = children(norm, "silu", "linear")
    return modulation(torch.stack((linear(silu(first)), linear(silu(rest))), 1), count)


def _index(rows: Tensor, first: int) -> Tensor:
    """[S]: 0 for the first frame's tokens, 1 for the others."""
    return torch.arange(rows.shape[1], device=rows.device) >= first


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
    mods = _modulation(norm1, token_replace_emb, temb, 6)
    video = Tokens(self, hidden_states, IMAGE, mods, _index(hidden_states, num_tokens))
    text = Tokens(self, encoder_hidden_states, TEXT, modulation_by(norm1_context, temb, 6))
    options = {"attention_mask": attention_mask, "image_rotary_emb": freqs_cis}
    return double_block(ATTENTION, self._modules["attn"], video, text, options)


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
    mods = _modulation(self._modules["norm"], token_replace_emb, temb, 3)
    both, rows = joint(hidden_states, encoder_hidden_states), hidden_states.shape[1]
    options = {"attention_mask": attention_mask, "image_rotary_emb": image_rotary_emb}
    return single(self, both, rows, Stream(self, both, _index(both, num_tokens)), mods, options)


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
