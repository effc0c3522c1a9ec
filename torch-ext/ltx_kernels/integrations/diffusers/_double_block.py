"""Double blocks: two streams of tokens, image and text, that meet in one attention.

Each stream is normalised and modulated, attends to both, and has a feed-forward of its own. Families differ in where
the modulation comes from, in the names of the modules, and in the arguments of the attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from ..blocks.feed_forward import feed_forward
from ..blocks.stream import Readers, Stream
from ..engine.guards import children
from ..linear.products import Input

# Names of a stream's first norm, second norm and feed-forward, in most families.
IMAGE = ("norm1", "norm2", "ff")
TEXT = ("norm1_context", "norm2_context", "ff_context")


class Residual(Protocol):
    """A residual stream: a `Stream`, or several of them for parts of the rows."""

    def norm(self, norm: nn.Module, shift: Any, scale: Any, into: Readers = None, /) -> Input: ...

    def add(self, branch: Tensor, gate: Any, /) -> None: ...

    def value(self) -> Tensor: ...


class Tokens:
    """One stream of a double block, with the modules and the modulation that it has for itself."""

    def __init__(
        self,
        block: nn.Module,
        value: Tensor,
        names: tuple[str, str, str],
        mods: Sequence[Any],
        stream: Residual | None = None,
    ) -> None:
        """The stream as a block gets it.

        value: [B, S, H].
        names: Of the block's modules, as `IMAGE` and `TEXT`. The first norm may lie in a module that makes modulation.
        mods: Shift, scale and gate of the attention, then of the feed-forward, as the stream takes them.
        stream: What holds the rows, where it is no `Stream`.
        """
        norm1, self.norm2, self.ff = children(block, *names)
        self.norm1, self.ff_name = norm1._modules.get("norm", norm1), names[2]
        self.shift1, self.scale1, self.gate1, self.shift2, self.scale2, self.gate2 = mods
        self.stream: Residual = Stream(block, value) if stream is None else stream

    def attention_input(self, into: Readers = None) -> Input:
        return self.stream.norm(self.norm1, self.shift1, self.scale1, into)

    def finish(self, attended: Tensor) -> Tensor:
        """The stream after the attention's result and the feed-forward."""
        self.stream.add(attended, self.gate1)
        rows = self.stream.norm(self.norm2, self.shift2, self.scale2, self.ff_name)
        self.stream.add(feed_forward(self.ff, rows), self.gate2)
        return self.stream.value()


def double_block(block: nn.Module, image: Tokens, text: Tokens, options: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(image, text) after a block. `options` are further arguments of its attention, ``attn``."""
    (attn,) = children(block, "attn")
    attended, text_attended = attn(
        hidden_states=image.attention_input(into="attn"),
        encoder_hidden_states=text.attention_input(),
        **options,
    )
    return image.finish(attended), text.finish(text_attended)
