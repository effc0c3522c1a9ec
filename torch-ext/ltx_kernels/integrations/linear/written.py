"""Whether a weight, or the fp8 values in its place, are still as they were when it was quantised."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._torch_private import storage_number, storage_reference
from ..engine.guards import version_of


class Version:
    """A stock weight as it was quantised: how often it had been written to, and what it holds.

    A copy counts anew, and remembers a change.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.number, self._sums = weight, version_of(weight) or 0, _sums(weight.data)
        self._stands_in(weight)

    def __getstate__(self) -> tuple[Tensor, bool, Tensor]:
        return self.weight, (version_of(self.weight) or 0) > self.number, self._sums

    def __setstate__(self, state: tuple[Tensor, bool, Tensor]) -> None:
        self.weight, has_changed, self._sums = state
        self.number = -1 if has_changed else version_of(self.weight) or 0
        self._place: tuple[int, int] | None = None

    def is_of(self, weight: Tensor) -> bool:
        """Whether a parameter holds what was quantised. Writes through `.data` into the same memory are not seen."""
        if (version_of(weight) or 0) > self.number:
            return False
        if self._place == (storage_number(weight), weight.data_ptr()):
            return True
        if not torch.equal(_sums(weight.data).to(self._sums.device), self._sums):
            return False
        self._stands_in(weight)
        return True

    def _stands_in(self, weight: Tensor) -> None:
        """Notes the memory that holds the weight. Other memory may get its address later, but not its number."""
        self._memory = storage_reference(weight)
        self._place = storage_number(weight), weight.data_ptr()


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
    """Sums over the words of a weight [out, in]: of all, and of every second row and column, as rows may be moved."""
    if values.device.type == "meta" or not values.numel():
        return torch.zeros(3, dtype=torch.int64)
    if not values.is_contiguous() or values.storage_offset() * values.element_size() % 8:
        values = values.clone(memory_format=torch.contiguous_format)
    words = values.view(torch.int64)
    return torch.stack([part.sum() for part in (words, words[::2], words[:, ::2])])
