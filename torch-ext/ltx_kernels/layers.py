"""Layers for ``kernels.kernelize``: their forward takes the place of the forward of a module with the same attributes.

A layer has no constructor and no attributes of its own; what is declared here belongs to the module that it stands in
for. `kernel_mapping` has the names that transformers gives those modules.
"""

from __future__ import annotations

from torch import Tensor, nn

from .glu import gelu
from .norm import rmsnorm

__all__ = ["GeLU", "GeluTanh", "RMSNorm"]


class RMSNorm(nn.Module):
    """Normalises rows by their root mean square, and multiplies by a weight.

    It fits every module that transformers decorates with ``use_kernel_forward_from_hub("RMSNorm")``: those of Llama,
    Mistral, Qwen2, Qwen3 and some 130 others. The result is rounded once; most of those modules round twice, before the
    weight and after it.

    Equivalent to::

        x = hidden_states.float()
        n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon) * self.weight.float()
        n.to(hidden_states.dtype)
    """

    has_backward = True
    can_torch_compile = True

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rmsnorm(hidden_states, self.weight, self.variance_epsilon)


class GeLU(nn.Module):
    """The exact GELU.

    Equivalent to ``torch.nn.functional.gelu(input)``.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return gelu(input)


class GeluTanh(nn.Module):
    """The tanh form of GELU, rounded once. transformers also has it as NewGELU and FastGELU, in eight steps of torch.

    Equivalent to ``torch.nn.functional.gelu(input, approximate="tanh")``.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return gelu(input, approximate="tanh")
