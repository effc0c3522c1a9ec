"""A call of an attention module: what the steps of attention/engine.py and attention/choice.py share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..engine.guards import fits_batch
from ..engine.sites import site_of
from ..linear.products import Input
from .description import Attention
from .layers import AttentionLayers
from .masks import ALL_KEYS, KeyFactor, Seen


class Call:
    """A call of an attention module.

    spec: The description of the module's class.
    module: The attention.
    site: The replaced modules of that class, with their settings and counters.
    layers: The module's layers in the forms that its state allows; they are set after the call's guards.
    input, context, mask: The arguments of these meanings (`inputs` of the description).
    twice: The context that was given is the input itself, so that this is a self-attention.
    ropes: The arguments that hold rotary tables for query and key, and for the key alone; None where not given.
    rope: The same as the functions of the description get it: one argument, or both where the key has its own.
    cross: Keys and values come from the context alone.
    further: The arguments that the description's `arguments` name, as far as they were given.
    attends: The description's `attends`; None where it reads arguments and none of these was given.
    """

    __slots__ = (
        *("attends", "context", "cross", "further", "input", "layers", "mask", "module", "rope", "ropes", "site"),
        *("spec", "twice"),
    )

    layers: AttentionLayers

    def __init__(
        self,
        spec: Attention,
        module: nn.Module,
        input: Input,
        context: Tensor | None,
        mask: Tensor | None,
        ropes: tuple[Any, Any],
        further: Mapping[str, Any] | None = None,
    ) -> None:
        self.spec, self.site = spec, site_of(module)
        self.module: Any = module
        self.twice = context is not None and context is input and not (spec.added or spec.shared)
        self.input, self.context, self.mask = input, None if self.twice else context, mask
        self.ropes, self.rope = ropes, ropes[0] if ropes[1] is None else ropes
        self.cross = self.context is not None
        self.further = further or {}
        given = not spec.arguments or any(value is not None for value in self.further.values())
        self.attends = spec.attends if given else None

    def why_not_batch(self) -> str:
        """Why the batch sizes of a call keep it from running ops, which do not broadcast them; empty if they agree."""
        size = len(self.input[0] if isinstance(self.input, tuple) else self.input)
        if not self.spec.batched:
            return ""
        if self.context is not None and len(self.context) != size:
            return f"a context of batch size {len(self.context)} for an input of {size}"
        if self.mask is not None and self.mask.dim() > 1 and not fits_batch(self.mask, size):
            return f"a mask of batch size {len(self.mask)} for an input of {size}"
        return ""

    def without_arguments(self) -> Call:
        """A call for `attend` in a recording, which must hold neither the tensors of this call nor the layers."""
        nothing: Any = None
        call = Call(self.spec, self.module, nothing, None, None, (None, None))
        call.cross = self.cross
        return call

    def keys(self, key: Tensor, first: int = 0) -> Tensor:
        """The keys as a mask that multiplies them leaves them; its rows begin at `first`."""
        mask = self.spec.mask
        return mask.times(key, self.mask, first) if isinstance(mask, KeyFactor) and self.mask is not None else key

    def seen(self, mask: Tensor | None) -> Seen:
        """What a mask lets the queries see."""
        if mask is None or isinstance(self.spec.mask, KeyFactor):
            return ALL_KEYS
        keys = None if self.spec.mask is None else self.spec.mask.of_keys(mask)
        return Seen(mask, keys, keys is not None)
