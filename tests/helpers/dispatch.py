"""Which ops run, as torch's dispatcher sees them."""

from __future__ import annotations

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
