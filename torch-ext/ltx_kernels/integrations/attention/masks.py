"""The masks of attention modules: what each means, and the forms that the ops and torch take it in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Seen(NamedTuple):
    """The keys that queries see: all of them, or those of a mask."""

    mask: Tensor | None
    keys: Tensor | None  # the mask as one of keys, [B, T]; None where it cannot be written so
    of_keys: bool  # ops that read a mask of keys, or none, can compute this


ALL_KEYS = Seen(None, None, True)


@dataclass(frozen=True)
class KeyBias:
    """A mask [B, 1, T] that is added to the scores of each key."""

    def why_not(self, mask: Tensor, keys: int | None) -> str:
        """keys: The length of a cross-attention's context; None for a self-attention."""
        fits = mask.dim() == 3 and mask.shape[1] == 1 and mask.shape[2] == keys
        return "" if fits else "a mask of another shape than [B, 1, text]"

    def for_scores(self, mask: Tensor) -> Tensor:
        """[B, 1, 1, T], to broadcast over heads and queries."""
        return mask.unsqueeze(1)

    def of_keys(self, mask: Tensor) -> Tensor | None:
        """[B, T], to be added to the scores of a key; None where the mask cannot be written so."""
        return mask.squeeze(1) if mask.is_floating_point() else None


@dataclass(frozen=True)
class KeyOrScoreBias(KeyBias):
    """As `KeyBias`, or a mask [B, 1, S, S] of a self-attention's scores, bool or to be added."""

    def why_not(self, mask: Tensor, keys: int | None) -> str:
        of_scores = keys is None and mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[2] == mask.shape[3]
        return "" if of_scores else super().why_not(mask, keys)

    def for_scores(self, mask: Tensor) -> Tensor:
        return mask if mask.dim() == 4 else super().for_scores(mask)

    def of_keys(self, mask: Tensor) -> Tensor | None:
        return None if mask.dim() == 4 else super().of_keys(mask)


@dataclass(frozen=True)
class ScoresMask:
    """A mask as torch's scaled_dot_product_attention takes it, that the stock processor hands on as it is."""

    def why_not(self, mask: Tensor, keys: int | None) -> str:
        return ""

    def for_scores(self, mask: Tensor) -> Tensor:
        return mask

    def of_keys(self, mask: Tensor) -> Tensor | None:
        return mask[:, 0, 0] if mask.dim() == 4 and mask.shape[1:3] == (1, 1) else None


@dataclass(frozen=True)
class KeyMask(ScoresMask):
    """A mask [B, S] that says which keys are seen, as bool or as integers, or a mask of scores."""

    def for_scores(self, mask: Tensor) -> Tensor:
        seen = mask if mask.is_floating_point() else mask.bool()
        return seen[:, None, None, :] if mask.dim() == 2 else seen

    def of_keys(self, mask: Tensor) -> Tensor | None:
        return super().of_keys(self.for_scores(mask))


@dataclass(frozen=True)
class KeyFactor(ScoresMask):
    """A mask [B, S] that multiplies the keys, of the first stream alone in a joint attention; no key is hidden."""

    def why_not(self, mask: Tensor, keys: int | None) -> str:
        return "" if mask.dim() == 2 else "a mask of another shape than [B, rows]"

    def times(self, key: Tensor, mask: Tensor, first: int = 0) -> Tensor:
        """Keys [B, T, heads, D] times the mask, whose rows begin at `first`; the other keys as they are."""
        after = key.shape[1] - first - mask.shape[1]
        factors = F.pad(mask.to(key.dtype), (first, after), value=1)
        return key * factors[:, :, None, None]


@dataclass(frozen=True)
class SegmentMask(ScoresMask):
    """A bool mask [B, 1, S, S] of a self-attention that lets each row see the rows of its own segment.

    Where every sample has one segment, or padding of the same length and then one segment, each attends without a mask.
    """

    def why_not(self, mask: Tensor, keys: int | None) -> str:
        fits = mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[2] == mask.shape[3] and mask.dtype == torch.bool
        return "" if fits else "a mask of another form than bool [B, 1, rows, rows]"


@dataclass(frozen=True)
class PaddingMask(ScoresMask):
    """A bool mask that leaves out padding of the text, whose rows come last, of a joint attention or a self-attention.

    Where the valid rows of every sample come first, keys are trimmed instead of masked.

    of_text: The mask is [B, T], of the text's rows alone of a joint attention, whose output for padding is 0. Otherwise
        it is [B, 1, 1, S + T], and padding attends as other rows do.
    """

    of_text: bool = False

    def why_not(self, mask: Tensor, keys: int | None) -> str:
        if self.of_text:
            fits = mask.dim() == 2 and mask.shape[1] == keys
            return "" if fits else "a mask of another shape than [B, text]"
        fits = mask.dim() == 4 and mask.shape[1:3] == (1, 1) and mask.dtype == torch.bool
        return "" if fits else "a mask of another form than bool [B, 1, 1, keys]"

    def valid(self, mask: Tensor, rows: int) -> Tensor:
        """Which of the joint rows are valid, bool [B, S + T]."""
        if self.of_text:
            return F.pad(mask.bool(), (rows - mask.shape[1], 0), value=True)
        return mask[:, 0, 0]

    def text_of(self, text: Tensor, mask: Tensor) -> Tensor:
        """The text's rows [B, T, H] of the output, from what is left of them after trimming."""
        if not self.of_text:
            return text
        padding = ~mask[:, : text.shape[1]].bool().unsqueeze(-1)
        return F.pad(text.masked_fill(padding, 0), (0, 0, 0, mask.shape[1] - text.shape[1]))
