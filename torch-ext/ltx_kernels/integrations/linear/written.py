"""Whether a weight is still as it was when it was quantised."""

from __future__ import annotations

from torch import Tensor

from ..engine.guards import version_of


class Version:
    """How often a weight had been written to when it was quantised. A copy counts anew, and remembers a change."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.number = weight, version_of(weight) or 0

    def __getstate__(self) -> tuple[Tensor, bool]:
        return self.weight, (version_of(self.weight) or 0) > self.number

    def __setstate__(self, state: tuple[Tensor, bool]) -> None:
        self.weight, has_changed = state
        self.number = -1 if has_changed else version_of(self.weight) or 0
