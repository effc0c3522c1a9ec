"""torch.autocast of either device: on the CPU also with the lists of functions that CUDA's autocast has."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class CudaLists(TorchFunctionMode):
    """Runs torch's functions on the CPU in the dtypes in which CUDA's autocast runs them.

    torch itself tells these: each function runs for fake tensors of a GPU, with autocast and without.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.known: dict[Hashable, torch.dtype | None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if any(map(is_float, leaves)):
            key = func, *(leaf for leaf in leaves if isinstance(leaf, torch.dtype))
            if key not in self.known:
                self.known[key] = self.ask(func, args, kwargs)
            dtype = self.known[key]
            if dtype is not None:
                args, kwargs = tree_map_only(Tensor, lambda x: x.to(dtype) if is_float(x) else x, (args, kwargs))
        return func(*args, **kwargs)

    def ask(self, func: Any, args: Any, kwargs: Any) -> torch.dtype | None:
        """The dtype that autocast casts all floating-point arguments of a function to; None where it casts nothing."""
        for given, cast_to in ((self.dtype, torch.float32), (torch.float32, self.dtype)):
            results = [self.result(func, args, kwargs, given, autocast) for autocast in (False, True)]
            if results == [given, cast_to]:
                return cast_to
        return None

    def result(self, func: Any, args: Any, kwargs: Any, given: torch.dtype, autocast: bool) -> torch.dtype | None:
        """The dtype of what a function returns for arguments of a dtype; None where it fails, or returns no tensor."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)

        def fake(x: Tensor) -> Tensor:
            dtype = given if is_float(x) else x.dtype
            shape = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta")
            return FakeTensor(mode, shape, torch.device("cuda:0"))

        with mode, of_cuda(self.dtype if autocast else None), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fake tensors have no address
            try:
                result = func(*tree_map_only(Tensor, fake, args), **tree_map_only(Tensor, fake, kwargs))
            except Exception:  # it takes another dtype alone, or has no form for fake tensors
                return None
        return result.dtype if isinstance(result, Tensor) else None


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in FLOATS


@contextlib.contextmanager
def of_cuda(dtype: torch.dtype | None) -> Iterator[None]:
    """CUDA's autocast, also where there is no GPU; None: off."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", dtype is not None)
    torch.set_autocast_dtype("cuda", dtype or before[1])
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


@contextlib.contextmanager
def autocast(device: str, dtype: torch.dtype, lists: str) -> Iterator[None]:
    """Autocast on a device; with lists "cuda" on a CPU too, by `CudaLists`."""
    with torch.autocast(device, dtype), CudaLists(dtype) if lists != device else contextlib.nullcontext():
        yield
