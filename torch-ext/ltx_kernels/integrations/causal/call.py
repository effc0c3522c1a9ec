"""The call of a model's attention function, which a kernel of this package or of torch may compute in its place."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple

from torch import Tensor

from ..engine.code import is_code_of
from ..engine.signature import attention_is_replaced
from ..engine.sites import Site

HOME = "transformers.integrations.sdpa_attention"
# What changes the result of transformers' function beside its own arguments.
CHANGES = ("softcap", "is_causal", "position_bias", "cache", "s_aux")


class FunctionCall(NamedTuple):
    """``function(module, query, key, value, mask, scaling=scale, **options)`` of a module that is not in training.

    A candidate (`CANDIDATES` in causal/engine.py) has ``attend(call)``. It returns the output [B, S, heads, D], or None
    where it does not compute such a call.
    """

    site: Site
    module: Any
    function: Callable[..., Any]
    query: Tensor  # [B, heads, S, D], and the others too, with as many tokens as are in the cache
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    options: Mapping[str, Any]

    def is_plain(self) -> bool:
        """Whether the function is transformers' own for torch's attention, and no option changes its result."""
        home = sys.modules.get(HOME)
        if home is None or self.function is not home.sdpa_attention_forward or attention_is_replaced():
            return False
        if not is_code_of(self.function, home):
            return False
        return all(self.options.get(name) is None for name in CHANGES)
