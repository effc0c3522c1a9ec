"""Tensors in guarded memory: inputs between NaNs, outputs between canaries, in the memory layouts that callers have."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .numeric import BITS, to_compare

# Elements before and after, a number that keeps the alignment of what lies between. LTX_TEST_GUARD=0 leaves the ends of
# buffers to AddressSanitizer or compute-sanitizer, which see every access past them.
GUARD = int(os.environ.get("LTX_TEST_GUARD", "64"))
CANARY = {  # NaNs that no op makes
    torch.float64: 0x7FF8DEADBEEFCAFE,
    torch.float32: 0x7FC0BEEF,
    torch.float16: 0x7E5A,
    torch.bfloat16: 0x7FDA,
}
ODD_STRIDE = 977  # of dimensions of size 1, where a stride means nothing


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the elements of a shape lie in memory."""

    offset: int = 0  # elements before the first one
    row_gap: int = 0  # elements between the end of a row and the next
    column_stride: int = 1
    leading_reversed: bool = False  # the first dimension varies fastest among the leading ones
    columns_slowest: bool = False  # the last dimension varies slowest

    def strides(self, shape: Sequence[int]) -> list[int]:
        leading = list(range(len(shape) - 1))
        if not self.leading_reversed:
            leading.reverse()
        columns = [len(shape) - 1] if shape else []
        strides = [0] * len(shape)
        step = self.column_stride
        for dim in leading + columns if self.columns_slowest else columns + leading:
            strides[dim] = step
            step *= max(shape[dim], 1)
            if dim == len(shape) - 1:
                step += self.row_gap
        if self != Layout():
            strides = [ODD_STRIDE if size == 1 else stride for size, stride in zip(shape, strides, strict=True)]
        return strides


LAYOUTS = {
    "contiguous": Layout(),
    "misaligned": Layout(offset=1),
    "rows apart": Layout(row_gap=16),
    "rows misaligned": Layout(offset=1, row_gap=3),
    "permuted": Layout(leading_reversed=True),
    "permuted, rows apart": Layout(leading_reversed=True, row_gap=8),
    "columns strided": Layout(column_stride=2),
    "columns strided, misaligned": Layout(offset=3, column_stride=3, row_gap=1),
    "columns slowest": Layout(columns_slowest=True),
}


class Guarded:
    """A tensor (`view`) in a buffer whose other elements hold the canary."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: str, layout: Layout | None = None):
        layout = layout or Layout()
        strides = layout.strides(shape)
        extent = 0 if 0 in shape else 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        self._bits = torch.full(
            (2 * GUARD + layout.offset + extent,), CANARY[dtype], dtype=BITS[dtype.itemsize], device=device
        )
        self._where = (tuple(shape), tuple(strides), GUARD + layout.offset)
        self.view = self._bits.view(dtype).as_strided(*self._where)

    def check(self, what: str = "output", view: Tensor | None = None) -> None:
        """Nothing but the view has been written to; or nothing but `view`, which is a `copied` one."""
        bits = self._bits if view is None else _storage(view).view(self._bits.dtype)
        outside = torch.ones_like(bits, dtype=torch.bool)
        outside.as_strided(*self._where).fill_(False)
        touched = outside & (bits != CANARY[self.view.dtype])
        if bool(touched.any()):
            places = (touched.nonzero().flatten() - self._where[2]).tolist()
            raise AssertionError(
                f"{what}: wrote outside {list(self._where[0])} with strides {list(self._where[1])}, at elements "
                f"{places[:8]} from its first one ({len(places)} in all)"
            )


def place(values: Tensor, layout: Layout | str) -> Tensor:
    """The same values in another memory layout, with NaN in all gaps and around."""
    layout = LAYOUTS[layout] if isinstance(layout, str) else layout
    if not values.is_floating_point():
        return values
    guarded = Guarded(values.shape, values.dtype, str(values.device), layout)
    guarded.view.copy_(values)
    return guarded.view


def guarded_output(like: Tensor, layout: Layout | str, device: str | None = None) -> Guarded:
    layout = LAYOUTS[layout] if isinstance(layout, str) else layout
    return Guarded(like.shape, like.dtype, device or str(like.device), layout)


def copied(device: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with all of their memory, gaps included, on a device; those that share memory still do.

    All of it crosses to the device as one: each transfer waits for the GPU, and for a turn where processes share it.
    """
    whole = {tensor.untyped_storage().data_ptr(): _storage(tensor) for tensor in tensors}
    memory = list(whole.values())
    if len(memory) > 1 and memory[0].device.type != torch.device(device).type:
        sizes = [bits.numel() for bits in memory]
        memory = list(_joined(memory).to(device).split(sizes))
    elif memory:
        memory = [bits.to(device) for bits in memory]
    storages = {pointer: bits.clone().untyped_storage() for pointer, bits in zip(whole, memory, strict=True)}
    copies = []
    for tensor in tensors:
        flat = torch.empty(0, dtype=tensor.dtype, device=device)
        flat.set_(storages[tensor.untyped_storage().data_ptr()])
        copies.append(flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
    return tuple(copies)


def _joined(parts: list[Tensor]) -> Tensor:
    """One after another, by copies alone: torch.cat would be a kernel."""
    whole = torch.empty(sum(part.numel() for part in parts), dtype=torch.uint8, device=parts[0].device)
    for part, place in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
        place.copy_(part)
    return whole


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _storage(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@contextlib.contextmanager
def unchanged(**tensors: Tensor) -> Iterator[None]:
    """Fails if the block changes a byte of the tensors' memory, gaps between rows included."""
    before = {name: _storage(tensor).clone() for name, tensor in tensors.items()}
    yield
    for name, tensor in tensors.items():
        assert torch.equal(*map(to_compare, (_storage(tensor), before[name]))), f"{name}: its memory was modified"


def assert_same_memory(actual: Tensor, expected: Tensor, what: str) -> None:
    """Every byte of the tensors' memory, gaps included."""
    assert torch.equal(_storage(actual), _storage(expected)), f"{what}: its memory was modified"
