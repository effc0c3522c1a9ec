"""Which ops run, as torch's dispatcher sees them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Namespaces(TorchDispatchMode):
    """The namespaces of all ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.namespace)
        return func(*args, **(kwargs or {}))


class PackageOps(TorchDispatchMode):
    """The names of the package's own ops that run, in order."""

    def __init__(self, ltx: ModuleType) -> None:
        super().__init__()
        self.namespace = ltx._ops.ops.name
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == self.namespace:
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))

    def quantising(self) -> list[str]:
        return [name for name in self.names if "quant" in name]
