"""One op: a squared ReLU as a gate."""

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops

__all__ = ["relu_squared_gate"]


def relu_squared_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Squared ReLU of a gate times a linear part.

    Equivalent to::

        (torch.relu(gate.float()).square() * up.float()).to(gate.dtype)

    Args:
        gate: Any shape, contiguous, float32 or bfloat16.
        up: Like gate in shape, dtype and device; contiguous.

    Returns:
        Like gate.

    Raises:
        RuntimeError: A shape, dtype, device or memory layout does not fit, the text names the argument; or a gradient
            is needed, which this op does not have.

    Source: So et al., "Primer" (arXiv:2109.08668), as the gate of a gated linear unit (arXiv:2002.05202).
    """
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        raise RuntimeError("relu_squared_gate: expected a call under torch.no_grad(), since it has no gradient")
    return ops.relu_squared_gate(gate, up)


@torch.library.register_fake(add_op_namespace_prefix("relu_squared_gate"))
def _(gate: Tensor, up: Tensor) -> Tensor:
    """The shape of the result: all that torch.compile has to know of the op."""
    return torch.empty_like(gate)
