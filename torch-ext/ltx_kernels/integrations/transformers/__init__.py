"""Models of transformers, recognised by the names of their classes: nothing of transformers is imported.

One module holds one family, or the norms. Each lists what it knows in ``ENTRIES``.
"""

from __future__ import annotations

from ..registry import entries_of
from .norms import DIFFERENT as DIFFERENT
from .norms import why_unknown as why_unknown

ENTRIES = entries_of(__name__, __path__)
