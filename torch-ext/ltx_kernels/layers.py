"""Layers for ``kernels.kernelize``: their forward takes the place of the forward of a module with the same attributes.

A layer has no constructor and no attributes of its own. What is declared here belongs to the module that it stands in
for. `kernel_mapping` has the names that transformers gives those modules. The layers with weights of their own, which
``KernelConfig`` builds into a model, are in `packed_layers`.

The plain layers round once, at the end. The layers with ``Eager`` in their name round where transformers' modules do.

Every ``forward`` takes float32, float16 or bfloat16 tensors of any strides, on CUDA or CPU: [..., H], and query and key
as RotaryPosEmb says. It returns new tensors of the shape and dtype of its input. A shape, dtype or device that does not
fit is a RuntimeError that names the argument, what was expected and what came.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .glu import gelu, swiglu, swiglu_clamped
from .norm import rmsnorm
from .packed_layers import GeGLUMLP, RMSNormSwiGLUMLP, SwiGLUMLP
from .rope import apply_rotary_qk

__all__ = [
    "GeGLUMLP",
    "GeLU",
    "GeluTanh",
    "QuickGELU",
    "RMSNorm",
    "RMSNormEager",
    "RMSNormGated",
    "RMSNormSwiGLUMLP",
    "RMSNormZeroCentered",
    "RotaryPosEmb",
    "RotaryPosEmbEager",
    "SiLU",
    "SwiGLUMLP",
]


class RMSNorm(nn.Module):
    """Normalises rows by their root mean square, and multiplies by a weight.

    It fits every module that transformers decorates with ``use_kernel_forward_from_hub("RMSNorm")``: norms of Llama,
    Mistral, Qwen2, Qwen3 and many other models. The result is rounded once, as in OLMo 2 and GPT-OSS. Most modules
    round twice, before the weight and after it: `RMSNormEager` does that.

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


class RMSNormEager(nn.Module):
    """`RMSNorm` with the two roundings of LlamaRMSNorm.

    Equivalent to::

        x = hidden_states.float()
        n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        (self.weight * n.to(hidden_states.dtype)).to(hidden_states.dtype)
    """

    has_backward = True
    can_torch_compile = True

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rmsnorm(hidden_states, self.weight, self.variance_epsilon, rounding="eager")


class RMSNormZeroCentered(nn.Module):
    """Normalises rows by their root mean square, and multiplies by one plus a weight.

    It fits the modules that transformers decorates with "RMSNormZeroCentered", which are norms of Qwen3.5. Like them it
    rounds once.

    Equivalent to::

        n = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        (n * (1.0 + self.weight.float())).to(x.dtype)
    """

    has_backward = True
    can_torch_compile = True

    weight: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return rmsnorm(x, self.weight, self.eps, weight_offset=1.0)


class RMSNormGated(nn.Module):
    """`RMSNorm`, and then a gate with an activation.

    It fits the modules that transformers decorates with "RMSNormGated": norms of Qwen3-Next and Qwen3.5 (SiLU), Kimi
    Linear and GLM 5 (sigmoid). With SiLU the normalised rows are rounded to the input's dtype first, as these modules
    do; with sigmoid only the result is rounded.

    Equivalent to::

        n = rmsnorm(hidden_states, self.weight, self.variance_epsilon).float()
        (n * torch.nn.functional.silu(gate.float())).to(hidden_states.dtype)

        n = rmsnorm(hidden_states.float(), self.weight, self.variance_epsilon)
        (n * torch.sigmoid(gate.float())).to(hidden_states.dtype)

    Raises:
        ValueError: The module's ``activation`` is neither SiLU nor sigmoid.
    """

    has_backward = True
    can_torch_compile = True

    weight: Tensor
    variance_epsilon: float
    activation: str

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        if self.activation in ("silu", "swish"):
            normalised = rmsnorm(hidden_states, self.weight, self.variance_epsilon)
            return swiglu(gate.to(hidden_states.dtype), normalised)
        if self.activation == "sigmoid":
            normalised = rmsnorm(hidden_states.float(), self.weight, self.variance_epsilon)
            return (normalised * torch.sigmoid(gate.float())).to(hidden_states.dtype)
        raise ValueError(f'activation: expected "silu", "swish" or "sigmoid", got {self.activation!r}')


class RotaryPosEmb(nn.Module):
    """Rotates query and key by the angles of a table, in one launch.

    It fits the functions ``apply_rotary_pos_emb`` that transformers decorates with "rotary_pos_emb" and that rotate
    halves. In transformers 5.22.2 these are all of them but two: openai_privacy_filter rotates interleaved pairs, and
    NanoChat rotates by the negative angles. Leave "rotary_pos_emb" out of the mapping for these models. NanoChat's is
    not decorated in 5.24.0. ``kernelize`` replaces the function for all models of that kind in the process. Query and
    key are [B, heads, S, D], or [B, S, heads, D] with ``unsqueeze_dim=2``; the tables are [B or 1, S, D] or [B or 1, S,
    D / 2].

    Equivalent to::

        def rotate(x, cos, sin):                 # tables of the width of a head, or of half of it (GPT-OSS)
            a, b = x.float().chunk(2, -1)
            return (x * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)
        cos, sin = cos.float().unsqueeze(unsqueeze_dim), sin.float().unsqueeze(unsqueeze_dim)
        rotate(q, cos, sin), rotate(k, cos, sin)
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        return _rotate(q, k, cos, sin, unsqueeze_dim, "fp32")


class RotaryPosEmbEager(nn.Module):
    """`RotaryPosEmb` that rounds both products and their sum, as LlamaAttention does.

    Equivalent to::

        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        (q * cos + rotate_half(q) * sin).to(q.dtype), (k * cos + rotate_half(k) * sin).to(k.dtype)
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        return _rotate(q, k, cos, sin, unsqueeze_dim, "eager")


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, rounding: str) -> tuple[Tensor, Tensor]:
    if cos.dtype != q.dtype:
        cos, sin = cos.float(), sin.float()
    # The new dimension of the tables stands for the heads. Positions come before or after it.
    heads_dim = unsqueeze_dim % (cos.dim() + 1)
    sequence_dim = -3 if heads_dim == cos.dim() - 1 else -2
    return apply_rotary_qk(q, k, cos, sin, sequence_dim=sequence_dim, layout="half", rounding=rounding)


class SiLU(nn.Module):
    """The SiLU of transformers' SiLUActivation. It is torch's own, which is one launch already.

    Equivalent to ``torch.nn.functional.silu(input)``.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return F.silu(input)


class GeLU(nn.Module):
    """The exact GELU of transformers' GELUActivation.

    Equivalent to ``torch.nn.functional.gelu(input)``.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return gelu(input)


class GeluTanh(nn.Module):
    """The tanh form of GELU, rounded once.

    It fits GELUTanh of transformers, and NewGELUActivation and FastGELUActivation, which compute it in several steps.

    Equivalent to ``torch.nn.functional.gelu(input, approximate="tanh")``.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return gelu(input, approximate="tanh")


class QuickGELU(nn.Module):
    """GELU by a sigmoid, as in transformers' QuickGELUActivation, rounded once.

    Equivalent to ``input * torch.sigmoid(1.702 * input)``.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        # The linear part is 1 + 0, and one zero serves all elements.
        return swiglu_clamped(input, input.new_zeros(()).expand_as(input), alpha=1.702, limit=math.inf)
