"""Facts of the built variant. They hold for the whole process, and torch.compile may take them for constants."""

from __future__ import annotations

from typing import Callable, TypeVar

from ._ops import add_op_namespace_prefix, ops
from ._torch_private import MARKED_CONSTANT, has_kernel

Function = TypeVar("Function", bound=Callable[..., object])


def _compiled_device() -> str | None:
    name = add_op_namespace_prefix("norm")
    return next((device for device in ("cuda", "cpu") if has_kernel(name, device.upper())), None)


# The device whose kernels this variant holds, as the first import of the build has found it: _fakes.py then registers
# kernels for the other device.
COMPILED_DEVICE: str | None = vars(ops).setdefault("compiled_device", _compiled_device())


def constant_when_compiled(function: Function) -> Function:
    """torch.compile calls the function while it traces, and leaves nothing of the call in the graph.

    This is what torch.compiler.assume_constant_result does, which would import torch._dynamo: 2 s for every user.
    """
    vars(function)[MARKED_CONSTANT] = True
    return function
