"""Fused norm, modulation, rotary and activation kernels for diffusion transformers and LLMs.

Every function takes tensors of any leading shape and any strides, on CUDA or CPU, in float32, float16 or bfloat16
(mixed dtypes between input and weights too), accumulates in float32, works under torch.compile and has gradients.
``reference`` holds the same functions in plain torch.

``rounding`` says where results are rounded to the tensors' dtype: "fp32" once, at the end; "eager" wherever the plain
torch code of the model libraries rounds, to reproduce a stock model.
"""

from . import _fakes as _fakes  # registers fakes, and kernels for the variant's other device
from . import reference
from .adaln import (
    adaln_layernorm,
    adaln_rmsnorm,
    adaln_zero,
    gated_residual,
    gated_residual_adaln_layernorm,
    gated_residual_adaln_rmsnorm,
)
from .glu import geglu, gelu, swiglu
from .norm import layernorm, rmsnorm, rmsnorm_residual
from .rope import apply_rotary, apply_rotary_qk, qk_norm_rope, rope_1d, rope_3d

__all__ = [
    "adaln_layernorm",
    "adaln_rmsnorm",
    "adaln_zero",
    "apply_rotary",
    "apply_rotary_qk",
    "gated_residual",
    "gated_residual_adaln_layernorm",
    "gated_residual_adaln_rmsnorm",
    "geglu",
    "gelu",
    "layernorm",
    "qk_norm_rope",
    "reference",
    "rmsnorm",
    "rmsnorm_residual",
    "rope_1d",
    "rope_3d",
    "swiglu",
]
