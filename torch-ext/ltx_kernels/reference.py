"""Every public function in plain torch: differentiable, on any device, with the errors of the compiled ops.

The signatures are the package's, without ``out=``. Tests and benchmarks use these functions as the definition. Math is
in float32, or in float64 when the input is float64, which the compiled ops do not take.

A function here is the public function with the mathematics of `_formulas.py` in the place of its op. `attention` is
written out, because the public one chooses among kernels.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any, Callable, TypeVar, cast

from torch import Tensor

from . import _checks, _formulas, adaln, channels_last, glu, norm, quant, rope
from ._checks import checks_types
from ._fakes import BODIES, Mode, argument_names, in_torch
from .attention import qk_norm_cross_attention as _cross_attention

Function = TypeVar("Function", bound=Callable[..., Any])


def _formula(name: str) -> Callable[..., Any]:
    """What stands for an op of `_call.op`. It is given ``eps=None`` as it is, since the value depends on the dtype."""
    run, is_eps = in_torch(name), ["eps" in argument for argument in argument_names(name)]

    def call(outs: object, *arguments: Any) -> Any:
        if outs is not None:
            raise TypeError("out: expected no output to write into, got one")
        eps = _formulas.rms_eps(arguments[0])
        values = [eps if value is None and fills else value for value, fills in zip(arguments, is_eps)]
        return run(Mode(compute=True, float64=True), *values)

    return call


# The modules of the public functions name their ops like this.
_FORMULAS = {f"_{name}": _formula(name) for name in BODIES}
_OUTPUTS = ("out", "out2", "residual_out")


def _in_torch(function: Function) -> Function:
    """A public function with the formulas in the place of its ops, and without outputs to write into."""
    assert _FORMULAS.keys() & function.__code__.co_names, f"{function.__name__} calls no op by its name"
    names = {**function.__globals__, **_FORMULAS, "FLOAT32_EPS": None}
    del names["__name__"]  # torch.compile would look for the formulas in the module of this name
    # torch.compile keeps what it has compiled with the code, which is therefore a copy.
    twin = FunctionType(function.__code__.replace(), names, function.__name__, function.__defaults__)
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__annotations__ = {key: value for key, value in function.__annotations__.items() if key not in _OUTPUTS}
    signature = inspect.signature(function)
    parameters = [value for key, value in signature.parameters.items() if key not in _OUTPUTS]
    vars(twin)["__signature__"] = signature.replace(parameters=parameters)
    twin.__module__ = __name__
    twin.__doc__ = (
        f"`{function.__name__}` of the package in plain torch, without outputs to write into.\n\n    {function.__doc__}"
    )
    return cast(Function, checks_types(twin))


rmsnorm = _in_torch(norm.rmsnorm)
rmsnorm_residual = _in_torch(norm.rmsnorm_residual)
layernorm = _in_torch(norm.layernorm)
norm_residual = _in_torch(norm.norm_residual)
norm_gated_residual_norm = _in_torch(norm.norm_gated_residual_norm)

adaln_rmsnorm = _in_torch(adaln.adaln_rmsnorm)
adaln_layernorm = _in_torch(adaln.adaln_layernorm)
adaln_zero = _in_torch(adaln.adaln_zero)
gated_residual = _in_torch(adaln.gated_residual)
gated_residual_adaln_rmsnorm = _in_torch(adaln.gated_residual_adaln_rmsnorm)
gated_residual_adaln_layernorm = _in_torch(adaln.gated_residual_adaln_layernorm)
adaln_rmsnorm_pair = _in_torch(adaln.adaln_rmsnorm_pair)
adaln_layernorm_pair = _in_torch(adaln.adaln_layernorm_pair)
gated_residual_adaln_rmsnorm_pair = _in_torch(adaln.gated_residual_adaln_rmsnorm_pair)
gated_residual_adaln_layernorm_pair = _in_torch(adaln.gated_residual_adaln_layernorm_pair)

quantize_rows = _in_torch(quant.quantize_rows)
rmsnorm_quant = _in_torch(quant.rmsnorm_quant)
rmsnorm_residual_quant = _in_torch(quant.rmsnorm_residual_quant)
adaln_rmsnorm_quant = _in_torch(quant.adaln_rmsnorm_quant)
gated_residual_quant = _in_torch(quant.gated_residual_quant)
gated_residual_adaln_rmsnorm_quant = _in_torch(quant.gated_residual_adaln_rmsnorm_quant)
layernorm_quant = _in_torch(quant.layernorm_quant)
adaln_layernorm_quant = _in_torch(quant.adaln_layernorm_quant)
gated_residual_adaln_layernorm_quant = _in_torch(quant.gated_residual_adaln_layernorm_quant)
norm_gated_residual_norm_quant = _in_torch(quant.norm_gated_residual_norm_quant)
adaln_rmsnorm_pair_quant = _in_torch(quant.adaln_rmsnorm_pair_quant)
adaln_layernorm_pair_quant = _in_torch(quant.adaln_layernorm_pair_quant)
gated_residual_adaln_rmsnorm_pair_quant = _in_torch(quant.gated_residual_adaln_rmsnorm_pair_quant)
gated_residual_adaln_layernorm_pair_quant = _in_torch(quant.gated_residual_adaln_layernorm_pair_quant)
geglu_quant = _in_torch(quant.geglu_quant)
swiglu_quant = _in_torch(quant.swiglu_quant)
gelu_quant = _in_torch(quant.gelu_quant)
gate_heads_quant = _in_torch(quant.gate_heads_quant)

geglu = _in_torch(glu.geglu)
swiglu = _in_torch(glu.swiglu)
gelu = _in_torch(glu.gelu)
swiglu_clamped = _in_torch(glu.swiglu_clamped)
gate_heads = _in_torch(glu.gate_heads)

rope_1d = _in_torch(rope.rope_1d)
rope_3d = _in_torch(rope.rope_3d)
apply_rotary = _in_torch(rope.apply_rotary)
apply_rotary_qk = _in_torch(rope.apply_rotary_qk)
qk_norm_rope = _in_torch(rope.qk_norm_rope)

qk_norm_cross_attention = _in_torch(_cross_attention)

channel_norm = _in_torch(channels_last.channel_norm)
channel_norm_residual = _in_torch(channels_last.channel_norm_residual)
pixel_shuffle_3d = _in_torch(channels_last.pixel_shuffle_3d)
unpatchify = _in_torch(channels_last.unpatchify)
group_norm = _in_torch(channels_last.group_norm)
group_norm_residual = _in_torch(channels_last.group_norm_residual)
upsample_nearest = _in_torch(channels_last.upsample_nearest)


@checks_types
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    precision: str = "native",
) -> Tensor | tuple[Tensor, Tensor]:
    _checks.check_type("return_lse", "bool", return_lse)
    _checks.check_type("is_causal", "bool", is_causal)
    if _checks.is_int8(precision, mask, is_causal, return_lse):
        _checks.no_gradient(query, key, value)
        _checks.check_attention_int8(query, key, value, key_lengths, scale=scale, float64=True)
        return _formulas.attention_int8(query, key, value, key_lengths, scale)
    _checks.check_attention(query, key, value, mask, key_lengths, scale=scale, is_causal=is_causal, float64=True)
    output, lse = _formulas.attention_with_lse(query, key, value, mask, key_lengths, scale, is_causal)
    return (output, lse) if return_lse else output


__all__ = sorted(
    name
    for name, value in list(globals().items())
    if getattr(value, "__module__", "") == __name__ and hasattr(value, "__wrapped__")
)
