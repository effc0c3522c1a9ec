"""Whether a weight, or the fp8 values in its place, are still as they were when it was quantised."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._torch_private import storage_number, storage_reference
from ..engine.guards import version_of

# `_sums` adds every word, every 11th and every 13th. Hardly any weight has rows that move by a multiple of both.
STEPS = (1, 11, 13)


class Version:
    """A stock weight as it was quantised: how often it had been written to, and what it holds.

    A copy counts anew, and remembers a change.
    """

    def __init__(self, weight: Tensor, data: Tensor) -> None:
        """data: What the weight holds, or will hold as its `.data`."""
        self.weight, self.number, self._sums = weight, _writes(weight), _sums(data)
        self._stands_in(data)

    def __getstate__(self) -> tuple[Tensor, bool, Tensor]:
        return self.weight, _writes(self.weight) > self.number, self._sums

    def __setstate__(self, state: tuple[Tensor, bool, Tensor]) -> None:
        self.weight, has_changed, self._sums = state
        self.number = -1 if has_changed else _writes(self.weight)
        self._place: tuple[int, int] | None = None

    def is_of(self, weight: Tensor) -> bool:
        """Whether a parameter holds what was quantised. Writes through `.data` into the same memory are not seen."""
        if _writes(weight) > self.number:
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

    stock: The weight that was quantised, if it is in the host's memory.
    """

    def __init__(self, weight: Tensor, stock: Tensor | None) -> None:
        self._number, self._shape, self._sums = _writes(weight), weight.shape, _sums(weight.data)
        self._stock, self._stock_number = stock, _writes(stock)

    def __getstate__(self) -> tuple[torch.Size, Tensor, Tensor | None, bool]:
        return self._shape, self._sums, self._stock, self.stock_was_written()

    def __setstate__(self, state: tuple[torch.Size, Tensor, Tensor | None, bool]) -> None:
        self._shape, self._sums, self._stock, was_written = state
        self._number = -1  # a copied parameter counts anew: its values are compared once
        self._stock_number = -1 if was_written else _writes(self._stock)

    def stock_was_written(self) -> bool:
        return _writes(self._stock) != self._stock_number

    def were_written(self, weight: Tensor) -> bool:
        """Whether the parameter itself was written to since, with other values. Writes through `.data` are not seen."""
        number = _writes(weight)
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


def _writes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else version_of(tensor) or 0


def _sums(values: Tensor) -> Tensor:
    """Sums over the words of a weight [out, in]: of all, and of a part that changes where rows or columns move."""
    if values.device.type == "meta" or not values.numel():
        return torch.zeros(len(STEPS), dtype=torch.int64)
    if not values.is_contiguous() or values.storage_offset() * values.element_size() % 8:
        values = values.clone(memory_format=torch.contiguous_format)
    words = values.view(torch.int64).flatten()
    return torch.stack([words[::step].sum() for step in STEPS])
