"""Whether a weight, or the fp8 values in its place, are still as they were when it was quantised."""

from __future__ import annotations

import torch
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


class Values:
    """The fp8 values that a parameter was given, which is asked about them after a write.

    Some writes change nothing: DistributedDataParallel sends every parameter to all processes. An offload and a
    conversion give the parameter other data, which stands for the same values.
    """

    def __init__(self, weight: Tensor) -> None:
        self._number, self._shape, self._sums = version_of(weight) or 0, weight.shape, _sums(weight.data)

    def were_written(self, weight: Tensor) -> bool:
        """Whether the parameter itself was written to since, with other values. Writes through `.data` are not seen."""
        number = version_of(weight) or 0
        if number == self._number:
            return False
        if not self.are_in(weight):
            return True
        self._number = number
        return False

    def are_in(self, weight: Tensor) -> bool:
        """Whether a tensor, perhaps of another dtype, holds these values."""
        if weight.device.type == "meta":
            return True
        if weight.shape != self._shape:
            return False
        values = weight.detach().to(torch.float8_e4m3fn, copy=True, memory_format=torch.contiguous_format)
        return torch.equal(_sums(values).to(self._sums.device), self._sums)


def _sums(values: Tensor) -> Tensor:
    """Two sums over the words of fp8 values [out, in], in which each row, and each column of words, has its factor."""
    words = values.view(torch.int64)
    by_row, by_column = words.sum(1), words.sum(0)
    return torch.stack([_weighted(by_row), _weighted(by_column)])


def _weighted(sums: Tensor) -> Tensor:
    return (sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum()
