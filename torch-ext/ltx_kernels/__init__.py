"""Fused norm, modulation, rotary and activation kernels for diffusion transformers and LLMs.

Every function takes tensors of any leading shape and any strides, on CUDA or CPU, in float32, float16 or bfloat16
(weights may have another dtype than the input), accumulates in float32 and works under torch.compile. Functions have
gradients. Functions with quantised rows (``*_quant``, ``quantize_rows``, ``scaled_linear``) have no gradients and raise
where one is needed; ``quantize_weight`` detaches. ``reference`` holds the same functions in plain torch.

``rounding`` says where results are rounded to the tensors' dtype: "fp32" once, at the end; "eager" wherever the plain
torch code of the model libraries rounds, to reproduce a stock model.
"""

from . import _binary as _binary  # loads the library, before anything asks for its ops
from . import _fakes as _fakes  # registers fakes, and kernels for the variant's other device
from . import layers, reference
from ._linear import linear_cat
from .adaln import (
    adaln_layernorm,
    adaln_layernorm_pair,
    adaln_rmsnorm,
    adaln_rmsnorm_pair,
    adaln_zero,
    gated_residual,
    gated_residual_adaln_layernorm,
    gated_residual_adaln_layernorm_pair,
    gated_residual_adaln_rmsnorm,
    gated_residual_adaln_rmsnorm_pair,
)
from .attention import attention, qk_norm_cross_attention
from .channels_last import (
    channel_norm,
    channel_norm_residual,
    group_norm,
    group_norm_residual,
    pixel_shuffle_3d,
    unpatchify,
    upsample_nearest,
)
from .glu import gate_heads, geglu, gelu, swiglu, swiglu_clamped
from .integrations import LTXKernelsFp8Config, kernel_mapping, optimize, restore, split_batch
from .norm import (
    layernorm,
    norm_gated_residual_norm,
    norm_residual,
    rmsnorm,
    rmsnorm_residual,
)
from .quant import (
    adaln_layernorm_pair_quant,
    adaln_layernorm_quant,
    adaln_rmsnorm_pair_quant,
    adaln_rmsnorm_quant,
    gate_heads_quant,
    gated_residual_adaln_layernorm_pair_quant,
    gated_residual_adaln_layernorm_quant,
    gated_residual_adaln_rmsnorm_pair_quant,
    gated_residual_adaln_rmsnorm_quant,
    gated_residual_quant,
    geglu_quant,
    gelu_quant,
    layernorm_quant,
    norm_gated_residual_norm_quant,
    quantize_rows,
    quantize_weight,
    rmsnorm_quant,
    rmsnorm_residual_quant,
    scaled_linear,
    swiglu_quant,
)
from .rope import apply_rotary, apply_rotary_qk, qk_norm_rope, rope_1d, rope_3d

__version__ = "1"  # `version` in build.toml: the version of the API

__all__ = [
    "LTXKernelsFp8Config",
    "adaln_layernorm",
    "adaln_layernorm_pair",
    "adaln_layernorm_pair_quant",
    "adaln_layernorm_quant",
    "adaln_rmsnorm",
    "adaln_rmsnorm_pair",
    "adaln_rmsnorm_pair_quant",
    "adaln_rmsnorm_quant",
    "adaln_zero",
    "apply_rotary",
    "apply_rotary_qk",
    "attention",
    "channel_norm",
    "channel_norm_residual",
    "gate_heads",
    "gate_heads_quant",
    "gated_residual",
    "gated_residual_adaln_layernorm",
    "gated_residual_adaln_layernorm_pair",
    "gated_residual_adaln_layernorm_pair_quant",
    "gated_residual_adaln_layernorm_quant",
    "gated_residual_adaln_rmsnorm",
    "gated_residual_adaln_rmsnorm_pair",
    "gated_residual_adaln_rmsnorm_pair_quant",
    "gated_residual_adaln_rmsnorm_quant",
    "gated_residual_quant",
    "geglu",
    "geglu_quant",
    "gelu",
    "gelu_quant",
    "group_norm",
    "group_norm_residual",
    "kernel_mapping",
    "layernorm",
    "layernorm_quant",
    "layers",
    "linear_cat",
    "norm_gated_residual_norm",
    "norm_gated_residual_norm_quant",
    "norm_residual",
    "optimize",
    "pixel_shuffle_3d",
    "qk_norm_cross_attention",
    "qk_norm_rope",
    "quantize_rows",
    "quantize_weight",
    "reference",
    "restore",
    "rmsnorm",
    "rmsnorm_quant",
    "rmsnorm_residual",
    "rmsnorm_residual_quant",
    "rope_1d",
    "rope_3d",
    "scaled_linear",
    "split_batch",
    "swiglu",
    "swiglu_clamped",
    "swiglu_quant",
    "unpatchify",
    "upsample_nearest",
]
