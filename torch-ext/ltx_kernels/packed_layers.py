"""Layers with weights of their own, which transformers builds into a model through ``KernelConfig``.

A layer here is two classes: the layer, pure as those in `layers`, and ``<Layer>Layout``, the module with the weights.
transformers finds the second by its name, puts it in the place of the modules that the configuration names, and gives
it the layer's forward. ``conversion_mapping`` says how a checkpoint's weights become the layout's, and back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .glu import geglu, swiglu
from .norm import rmsnorm

SILU = ("silu", "swish")
GELU_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")


class SwiGLUMLP(nn.Module):
    """A gated MLP with SiLU, as LlamaMLP of transformers. One product makes gate and up, from ``x`` [..., H].

    Equivalent to::

        gate, up = self.gate_up_proj(x).float().chunk(2, -1)
        self.down_proj((torch.nn.functional.silu(gate) * up).to(x.dtype))
    """

    has_backward = True
    can_torch_compile = True

    gate_up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_up_proj(x)))


class GeGLUMLP(nn.Module):
    """A gated MLP with the tanh form of GELU, as GemmaMLP of transformers. One product makes gate and up, from ``x``
    [..., H].

    Equivalent to::

        gate, up = self.gate_up_proj(x).float().chunk(2, -1)
        self.down_proj((torch.nn.functional.gelu(gate, approximate="tanh") * up).to(x.dtype))
    """

    has_backward = True
    can_torch_compile = True

    gate_up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(geglu(self.gate_up_proj(x)))


class RMSNormSwiGLUMLP(nn.Module):
    """`RMSNorm` of `layers` and then `SwiGLUMLP`, in the place of a norm and the MLP after it.

    Equivalent to::

        SwiGLUMLP.forward(self, RMSNorm.forward(self, hidden_states))
    """

    has_backward = True
    can_torch_compile = True

    weight: Tensor
    variance_epsilon: float
    gate_up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, hidden_states: Tensor) -> Tensor:
        normalised = rmsnorm(hidden_states, self.weight, self.variance_epsilon)
        return self.down_proj(swiglu(self.gate_up_proj(normalised)))


class Conversion:
    """How transformers makes the packed projection of a checkpoint's two, and moves ``down_proj`` where it has to.

    It is a list that is made when transformers reads it, because nothing here imports transformers.
    """

    def __init__(self, mlp: str, packed: str) -> None:
        self.mlp, self.packed = mlp, packed

    def __iter__(self) -> Iterator[Any]:
        loading = sys.modules["transformers.core_model_loading"]
        for kind in ("weight", "bias"):
            yield loading.WeightConverter(
                [f"{self.mlp}.gate_proj.{kind}", f"{self.mlp}.up_proj.{kind}"],
                f"{self.packed}.gate_up_proj.{kind}",
                [loading.Concatenate(dim=0)],
            )
            if self.mlp != self.packed:
                yield loading.WeightRenaming(f"{self.mlp}.down_proj.{kind}", f"{self.packed}.down_proj.{kind}")


def _check_activation(layer: str, found: str, expected: tuple[str, ...]) -> None:
    if found not in expected:
        names = ", ".join(f'"{name}"' for name in expected)
        raise ValueError(f"{layer}: expected a model whose activation is one of {names}, got {found!r}")


class SwiGLUMLPLayout(nn.Module):
    """The weights of `SwiGLUMLP`, made from what the constructor of LlamaMLP and its like takes."""

    conversion_mapping = Conversion("mlp", "mlp")
    activations: tuple[str, ...] = SILU

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__()
        activation = getattr(config, "hidden_act", None) or config.hidden_activation
        _check_activation(type(self).__name__, activation, self.activations)
        width, hidden = intermediate_size or config.intermediate_size, config.hidden_size
        bias = getattr(config, "mlp_bias", False)
        self.gate_up_proj = nn.Linear(hidden, 2 * width, bias=bias)
        self.down_proj = nn.Linear(width, hidden, bias=bias)


class GeGLUMLPLayout(SwiGLUMLPLayout):
    """The weights of `GeGLUMLP`, made from what the constructor of GemmaMLP and its like takes."""

    activations = GELU_TANH


class RMSNormSwiGLUMLPLayout(nn.Module):
    """The weights of `RMSNormSwiGLUMLP`, made from the norm and the MLP that it stands in for."""

    conversion_mapping = Conversion("mlp", "post_attention_layernorm")

    def __init__(self, norm: Any, mlp: Any) -> None:
        super().__init__()
        _check_activation(type(self).__name__, mlp.config.hidden_act, SILU)
        self.weight = nn.Parameter(torch.ones_like(norm.weight))
        self.variance_epsilon = norm.variance_epsilon
        gate = mlp.gate_proj
        options = {"bias": gate.bias is not None, "device": gate.weight.device, "dtype": gate.weight.dtype}
        self.gate_up_proj = nn.Linear(gate.in_features, 2 * gate.out_features, **options)
        self.down_proj = mlp.down_proj
