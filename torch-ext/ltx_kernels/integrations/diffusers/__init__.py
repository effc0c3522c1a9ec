"""Models of diffusers, recognised by the names of their classes: nothing of diffusers is imported.

One module holds one family, or the norms and activations that all share. Each lists what it knows in ``ENTRIES``, and
in ``PLANS`` how it is split over several ranks where diffusers' own plan does not do.
"""

from __future__ import annotations

from torch import nn

from ..registry import entries_of, plans_of

ENTRIES = entries_of(__name__, __path__)
PLANS = plans_of(__name__, __path__)


def is_block(root: nn.Module, module: nn.Module) -> bool:
    """Whether a model of diffusers lists a module's class among its repeated blocks; this decides a report alone."""
    name = type(module).__name__
    return name.endswith("Block") and name in (getattr(root, "_repeated_blocks", None) or ())
