"""Models of diffusers, recognised by the names of their classes: nothing of diffusers is imported.

One module holds one family, or the norms and activations that all share. Each lists what it knows in ``ENTRIES``.
"""

from __future__ import annotations

from .._registry import entries_of

ENTRIES = entries_of(__name__, __path__)
