"""One planted defect."""

from __future__ import annotations

import dataclasses
import re

# In this order until one fails: the named regressions of other packages' defects come first.
TESTS = ("regressions", "norm", "adaln", "rope", "glu", "inputs", "properties")


@dataclasses.dataclass(frozen=True)
class Mutation:
    """`old`, which stands in `file` once, becomes `new`; `tests` are modules, or tests of one as `module::test`."""

    defect: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = TESTS
    backends: tuple[str, ...] = ("cpu",)

    @property
    def slug(self) -> str:
        """The name of the directory that it is built into."""
        return re.sub(r"\W+", "-", self.defect).strip("-")
