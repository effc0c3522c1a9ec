"""What a run of many cases has measured: how close to the truth each op came, in each dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .numeric import errors, ulp


@dataclasses.dataclass
class Figures:
    """Of one op and dtype. `ulp`: where no terms cancel, else a relative error has no limit."""

    cases: int = 0
    elements: int = 0
    ulp: float = 0.0  # largest error in ulps of the result, of elements that are no less than half of their terms
    share: float = 0.0  # largest error as a part of what the bound allows
    eager_elements: int = 0  # compared with eager torch, rounding="eager"
    eager_different: int = 0
    repeats: int = 0  # of a case, whole or one batch of it, that had to give the same bits

    def add(self, other: Figures) -> None:
        for field in dataclasses.fields(self):
            mine, others = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, max(mine, others) if isinstance(mine, float) else mine + others)


class Tally:
    def __init__(self) -> None:
        self.figures: dict[tuple[str, str], Figures] = {}

    def of(self, op: str, dtype: torch.dtype) -> Figures:
        return self.figures.setdefault((op, str(dtype).removeprefix("torch.")), Figures())

    @property
    def cases(self) -> int:
        return sum(figures.cases for figures in self.figures.values())

    def add_outputs(self, op: str, outputs: Iterable[tuple[Tensor, Tensor, Tensor, Tensor]]) -> None:
        """A case's outputs, each with its truth, the absolute terms that it is made of, and the error allowed."""
        figures = None
        for output, truth, terms, allowed in outputs:
            figures = self.of(op, output.dtype)
            figures.elements += output.numel()
            error, _ = errors(output, truth)
            finite = truth.isfinite()
            share = torch.where(finite, error / allowed, 0.0)
            whole = finite & (terms <= 2 * truth.abs())
            in_ulps = torch.where(whole, error / ulp(truth, output.dtype), 0.0)
            if output.numel():
                figures.share = max(figures.share, share.max().item())
                figures.ulp = max(figures.ulp, in_ulps.max().item())
        if figures is not None:
            figures.cases += 1

    def add_eager(self, op: str, outputs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """A case's outputs, each with that of eager torch."""
        for output, eager in outputs:
            figures = self.of(op, output.dtype)
            figures.eager_elements += output.numel()
            figures.eager_different += int(((output != eager) & ~(output.isnan() & eager.isnan())).sum())

    def add_repeats(self, op: str, dtype: torch.dtype, count: int) -> None:
        self.of(op, dtype).repeats += count

    def merge(self, records: Iterable[dict[str, Any]]) -> None:
        for record in records:
            numbers = {k: v for k, v in record.items() if k not in ("op", "dtype")}
            self.figures.setdefault((record["op"], record["dtype"]), Figures()).add(Figures(**numbers))

    def records(self) -> list[dict[str, Any]]:
        return [
            {"op": op, "dtype": dtype, **dataclasses.asdict(figures)}
            for (op, dtype), figures in sorted(self.figures.items())
        ]
