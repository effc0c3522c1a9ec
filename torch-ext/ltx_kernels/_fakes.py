"""What the ops do without their compiled kernel: shapes for torch.compile, and the reference on the other device.

A variant holds the kernels of one backend. For tensors on the other device (CPU tensors in a CUDA variant, and the
reverse) its ops run the reference, and warn at the first use of each op. The Python functions run the reference, too,
where a gradient is needed.

`BODIES` has one function for each schema of torch-ext/torch_binding.cpp: ``body(mode, **arguments)`` with the names of
the schema. It checks the arguments, and returns the results. All else is read from the schema.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor

from . import _checks, _formulas
from ._checks import RotaryInput, RotaryTable
from ._ops import add_op_namespace_prefix, ops
from ._torch_private import has_kernel
from ._variant import COMPILED_DEVICE

Results = Sequence[Tensor]


class Mode(NamedTuple):
    """How a body runs.

    compute: Whether the results have contents.
    outs: The given outputs, by the names that the schema of the `_out` twin gives them.
    float64: Whether float64 tensors are admitted.
    """

    compute: bool
    outs: Mapping[str, Tensor] = {}
    float64: bool = False


def _checked(mode: Mode) -> dict[str, Any]:
    """What the checks are told beside the arguments."""
    return {**mode.outs, "float64": mode.float64}


def _checked_pair(mode: Mode) -> dict[str, Any]:
    """The same for ops whose outputs are a query and a key."""
    return {"out": tuple(mode.outs.values()) or None, "float64": mode.float64}


# ---- Norms


def _norm(mode: Mode, *, input: Tensor, **arguments: Any) -> Results:
    _checks.check_norm(input, **_checked(mode), **arguments)
    if mode.compute:
        return _formulas.norm_family(input, **arguments)
    return [input.new_empty(input.shape) for _ in range(3)]


def _adaln_norm(mode: Mode, *, gate: Any, gate_table: Any, **arguments: Any) -> Results:
    return _norm(mode, out_gate=gate, out_gate_table=gate_table, **arguments)


def _gated_residual(mode: Mode, **arguments: Any) -> Results:
    return _norm(mode, statistic=None, **arguments)


def _norm_residual(mode: Mode, *, weight: Any, eps: float, **arguments: Any) -> Results:
    return _norm(mode, branch_weight=weight, branch_eps=eps, statistic=None, **arguments)


def _two_norms(weight1: Any, weight2: Any, eps1: float, eps2: float) -> dict[str, Any]:
    return {"branch_weight": weight1, "branch_eps": eps1, "weight": weight2, "eps": eps2, "statistic": _checks.RMS}


def _norm_residual_norm(
    mode: Mode, *, weight1: Any, weight2: Any, eps1: float, eps2: float, **arguments: Any
) -> Results:
    return _norm(mode, **_two_norms(weight1, weight2, eps1, eps2), **arguments)


def _quantised(input: Tensor, shape: Sequence[int]) -> Results:
    return (
        input.new_empty(shape, dtype=torch.float8_e4m3fn),
        input.new_empty((*shape[:-1], 1), dtype=torch.float32),
        input.new_empty(shape),
    )


def _norm_quant(mode: Mode, *, input: Tensor, **arguments: Any) -> Results:
    _checks.check_norm_quant(input, float64=mode.float64, **arguments)
    if mode.compute:
        return _formulas.norm_family_quant(input, **arguments)
    *first, residual_out = _quantised(input, input.shape)
    second = _quantised(input, input.shape)[:2] if "scale2" in arguments else ()
    return (*first, *second, residual_out)


def _norm_residual_norm_quant(
    mode: Mode, *, weight1: Any, weight2: Any, eps1: float, eps2: float, **arguments: Any
) -> Results:
    return _norm_quant(mode, **_two_norms(weight1, weight2, eps1, eps2), **arguments)


def _norm_backward(mode: Mode, *, grad: Tensor, input: Tensor, gate: Any, gate_table: Any, **arguments: Any) -> Results:
    out_gate = {"out_gate": gate, "out_gate_table": gate_table}
    _checks.check_norm_backward(grad, input, float64=mode.float64, **out_gate, **arguments)
    if mode.compute:
        return _formulas.norm_backward(grad, input, gate=gate, gate_table=gate_table, **arguments)
    return (input.new_empty(input.shape),)


def _residual_norm_backward(mode: Mode, *, grad: Tensor, input: Tensor, **arguments: Any) -> Results:
    _checks.check_norm_backward(grad, input, float64=mode.float64, **arguments)
    if mode.compute:
        return _formulas.residual_norm_backward(grad, input, **arguments)
    return input.new_empty(input.shape), input.new_empty(input.shape)


def _gated_residual_backward(mode: Mode, *, grad: Tensor, **arguments: Any) -> Results:
    _checks.check_norm(grad, statistic=None, float64=mode.float64, **arguments)
    return _formulas.gated_residual_backward(grad, **arguments) if mode.compute else (grad.new_empty(grad.shape),)


def _norm_residual_norm_backward(
    mode: Mode, *, grad: Tensor, input: Tensor, branch: Tensor, weight1: Any, weight2: Any, eps1: float, eps2: float,
    **arguments: Any,
) -> Results:  # fmt: skip
    norms = _two_norms(weight1, weight2, eps1, eps2)
    _checks.check_norm_backward(grad, input, branch=branch, float64=mode.float64, **norms, **arguments)
    if not mode.compute:
        return input.new_empty(input.shape), input.new_empty(input.shape)
    arguments |= {"grad2": None, "weight": weight2, "eps": eps2, "branch": branch, "weight1": weight1, "eps1": eps1}
    return _formulas.residual_norm_backward(grad, input, **arguments)


def _row_sums(mode: Mode, *, grad: Tensor, input: Tensor, **arguments: Any) -> Results:
    groups, width = _checks.check_row_sums(grad, input, float64=mode.float64, **arguments)
    if mode.compute:
        return _formulas.row_sums(grad, input, **arguments)
    return [grad.new_empty((groups, width), dtype=torch.float32) for _ in range(2)]


# ---- Activations


def _glu(mode: Mode, *, input: Tensor, gated: bool = True, **arguments: Any) -> Results:
    shape = _checks.check_glu(input, gated=gated, **_checked(mode), **arguments)
    return (_formulas.gated_unit(input, gated=gated, **arguments) if mode.compute else input.new_empty(shape),)


def _swiglu_clamped(mode: Mode, *, input: Tensor, **arguments: Any) -> Results:
    shape = _checks.check_swiglu_clamped(input, **_checked(mode), **arguments)
    return (_formulas.clamped_unit(input, **arguments) if mode.compute else input.new_empty(shape),)


def _gate_heads(mode: Mode, **arguments: Any) -> Results:
    _checks.check_gate_heads(**arguments, **_checked(mode))
    input = arguments["input"]
    return (_formulas.head_gates(**arguments) if mode.compute else input.new_empty(input.shape),)


def _gelu(mode: Mode, **arguments: Any) -> Results:
    return _glu(mode, gated=False, **arguments)


def _glu_quant(mode: Mode, *, input: Tensor, gated: bool = True, **arguments: Any) -> Results:
    shape = _checks.check_glu_quant(input, gated=gated, float64=mode.float64, **arguments)
    return _formulas.gated_unit_quant(input, gated=gated, **arguments) if mode.compute else _quantised(input, shape)


def _gelu_quant(mode: Mode, **arguments: Any) -> Results:
    return _glu_quant(mode, gated=False, **arguments)


def _gate_heads_quant(mode: Mode, *, input: Tensor, **arguments: Any) -> Results:
    shape = _checks.check_gate_heads_quant(input, float64=mode.float64, **arguments)
    return _formulas.head_gates_quant(input, **arguments) if mode.compute else _quantised(input, shape)


def _glu_backward(mode: Mode, *, grad: Tensor, input: Tensor, gated: bool = True, **arguments: Any) -> Results:
    shape = _checks.check_glu_backward(grad, input, gated=gated, float64=mode.float64, **arguments)
    if mode.compute:
        return (_formulas.gated_unit_backward(grad, input, gated=gated, **arguments),)
    return (input.new_empty(shape),)


def _gelu_backward(mode: Mode, **arguments: Any) -> Results:
    return _glu_backward(mode, gated=False, **arguments)


def _swiglu_clamped_backward(mode: Mode, *, grad: Tensor, input: Tensor, **arguments: Any) -> Results:
    shape = _checks.check_swiglu_clamped_backward(grad, input, float64=mode.float64, **arguments)
    if mode.compute:
        return (_formulas.clamped_unit_backward(grad, input, **arguments),)
    return (input.new_empty(shape),)


def _gate_heads_backward(mode: Mode, *, grad: Tensor, input: Tensor, logits: Tensor, scale: float) -> Results:
    _checks.check_gate_heads_backward(grad, input, logits, scale=scale, float64=mode.float64)
    if mode.compute:
        return _formulas.head_gates_backward(grad, input, logits, scale=scale)
    return input.new_empty(input.shape), logits.new_empty(logits.shape)


# ---- Linear layers


def _scaled_linear(mode: Mode, *, use_fast_accum: bool, **arguments: Any) -> Results:
    _checks.check_product(**arguments, **mode.outs)
    if mode.compute:
        return (_formulas.product(**arguments),)
    values, weight = arguments["values"], arguments["weight"]
    return (values.new_empty((*values.shape[:-1], weight.shape[0]), dtype=torch.bfloat16),)


def _weight_only_linear(mode: Mode, *, input: Tensor, weight: Tensor, **arguments: Any) -> Results:
    _checks.check_weight_only_linear(input, weight, **arguments, float64=mode.float64)
    if mode.compute:
        return (_formulas.weight_only_product(input, weight, **arguments),)
    return (input.new_empty((*input.shape[:-1], weight.shape[0])),)


# ---- Rotary


def _rotary(mode: Mode, operands: list[RotaryInput], tables: list[RotaryTable], **arguments: Any) -> Results:
    if mode.compute:
        return _formulas.rotary(operands, tables, **arguments)
    return [torch.empty_like(operand.tensor) for operand in operands]


def _rope(mode: Mode, *, interleaved: bool, **arguments: Any) -> Results:
    operands = _checks.check_rope(**arguments, **_checked_pair(mode))
    angles = {name: arguments[name] for name in ("positions", "grid", "rope_dims", "theta_base")}
    tables = [_formulas.computed_table(operand, **angles) for operand in operands] if mode.compute else []
    return _rotary(mode, operands, tables, interleaved=interleaved)


def _apply_rotary(mode: Mode, *, interleaved: bool, **arguments: Any) -> Results:
    operands, tables = _checks.check_apply_rotary(**arguments, **_checked(mode))
    return _rotary(mode, operands, tables, interleaved=interleaved, rounding=arguments["rounding"])


def _apply_rotary_qk(mode: Mode, *, interleaved: bool, **arguments: Any) -> Results:
    operands, tables = _checks.check_apply_rotary_qk(**arguments, **_checked_pair(mode))
    return _rotary(mode, operands, tables, interleaved=interleaved, rounding=arguments["rounding"])


def _qk_norm_rope(mode: Mode, *, interleaved: bool, **arguments: Any) -> Results:
    operands, tables = _checks.check_qk_norm_rope(**arguments, **_checked_pair(mode))
    names = ("across_heads", "weight_offset", "statistic", "cast_before_weight", "rounding")
    norm = {name: arguments[name] for name in names}
    return _rotary(mode, operands, tables, interleaved=interleaved, normalised=True, **norm)


def _rotary_backward(
    mode: Mode, operands: list[RotaryInput], tables: list[RotaryTable], grads: Sequence[Tensor], **arguments: Any
) -> Results:
    _checks.check_rotary_backward(operands, grads)
    if mode.compute:
        return _formulas.rotary_backward(operands, tables, grads, **arguments)
    return [torch.empty_like(operand.tensor) for operand in operands]


def _apply_rotary_backward(mode: Mode, *, grad: Tensor, interleaved: bool, **arguments: Any) -> Results:
    float64, rounding = mode.float64, _checks.FP32
    operands, tables = _checks.check_apply_rotary(input=grad, float64=float64, rounding=rounding, **arguments)
    return _rotary_backward(mode, operands, tables, [grad], interleaved=interleaved)


def _apply_rotary_qk_backward(
    mode: Mode, *, grad_query: Tensor, grad_key: Tensor, interleaved: bool, **arguments: Any
) -> Results:
    float64, rounding = mode.float64, _checks.FP32
    operands, tables = _checks.check_apply_rotary_qk(
        query=grad_query, key=grad_key, float64=float64, rounding=rounding, **arguments
    )
    return _rotary_backward(mode, operands, tables, [grad_query, grad_key], interleaved=interleaved)


def _qk_norm_rope_backward(
    mode: Mode, *, grad_query: Tensor, grad_key: Tensor, interleaved: bool, **arguments: Any
) -> Results:
    none: dict[str, Any] = {"query_bias": None, "key_bias": None, "cast_before_weight": False, "rounding": _checks.FP32}
    operands, tables = _checks.check_qk_norm_rope(float64=mode.float64, **none, **arguments)
    norm = {name: arguments[name] for name in ("across_heads", "weight_offset", "statistic")}
    grads = [grad_query, grad_key]
    return _rotary_backward(mode, operands, tables, grads, interleaved=interleaved, normalised=True, **norm)


# ---- Attention


def _qk_norm_cross_attention(mode: Mode, **arguments: Any) -> Results:
    _checks.check_qk_norm_cross_attention(**arguments, **_checked(mode))
    query = arguments["query"]
    return (_formulas.cross_attention(**arguments) if mode.compute else query.new_empty(query.shape),)


def _attention(mode: Mode, *, query: Tensor, **arguments: Any) -> Results:
    _checks.check_attention(query, **arguments, **_checked(mode))
    if mode.compute:
        return _formulas.attention_with_lse(query, **arguments)
    batch, queries, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((batch, heads, queries), dtype=torch.float32)


def _attention_int8(mode: Mode, **arguments: Any) -> Results:
    _checks.check_attention_int8(**arguments, **_checked(mode))
    query = arguments["query"]
    return (_formulas.attention_int8(**arguments) if mode.compute else query.new_empty(query.shape),)


# ---- Channels-last images and videos


def _channel_norm(mode: Mode, *, input: Tensor, **arguments: Any) -> Results:
    shape = _checks.check_channel_norm(input, **_checked(mode), **arguments)
    if mode.compute:
        return _formulas.channel_norm_family(input, **arguments)
    return _new_channels_last(input, shape), _new_channels_last(input, input.shape)


def _new_channels_last(input: Tensor, shape: Sequence[int]) -> Tensor:
    order = _checks.channels_last_order(input)
    return torch.empty(shape, dtype=input.dtype, device=input.device, memory_format=order)


def _pixel_shuffle(mode: Mode, *, input: Tensor, **arguments: Any) -> Results:
    shape = _checks.check_pixel_shuffle(input, **_checked(mode), **arguments)
    return (_formulas.shuffled(input, **arguments) if mode.compute else _new_channels_last(input, shape),)


def _unpatchify(mode: Mode, *, input: Tensor, **arguments: Any) -> Results:
    shape = _checks.check_unpatchify(input, **_checked(mode), **arguments)
    return (_formulas.unpatched(input, **arguments) if mode.compute else input.new_empty(shape),)


def _group_norm(mode: Mode, *, input: Tensor, **arguments: Any) -> Results:
    _checks.check_group_norm(input, **_checked(mode), **arguments)
    if mode.compute:
        return _formulas.group_norm_family(input, **arguments)
    return [_new_channels_last(input, input.shape) for _ in range(2)]


def _upsample_nearest(mode: Mode, *, input: Tensor, **arguments: Any) -> Results:
    shape = _checks.check_upsample_nearest(input, **_checked(mode), **arguments)
    return (_formulas.upsampled(input, **arguments) if mode.compute else _new_channels_last(input, shape),)


BODIES: dict[str, Callable[..., Results]] = {
    "norm": _norm,
    "adaln_norm": _adaln_norm,
    "residual_norm": _norm,
    "gated_residual": _gated_residual,
    "norm_residual": _norm_residual,
    "norm_residual_norm": _norm_residual_norm,
    "adaln_norm_pair": _norm,
    "residual_norm_pair": _norm,
    "norm_quant": _norm_quant,
    "residual_norm_quant": _norm_quant,
    "norm_residual_norm_quant": _norm_residual_norm_quant,
    "adaln_norm_pair_quant": _norm_quant,
    "residual_norm_pair_quant": _norm_quant,
    "glu": _glu,
    "swiglu_clamped": _swiglu_clamped,
    "gate_heads": _gate_heads,
    "gelu": _gelu,
    "apply_rotary_backward": _apply_rotary_backward,
    "apply_rotary_qk_backward": _apply_rotary_qk_backward,
    "qk_norm_rope_backward": _qk_norm_rope_backward,
    "norm_backward": _norm_backward,
    "residual_norm_backward": _residual_norm_backward,
    "gated_residual_backward": _gated_residual_backward,
    "norm_residual_norm_backward": _norm_residual_norm_backward,
    "row_sums": _row_sums,
    "glu_backward": _glu_backward,
    "swiglu_clamped_backward": _swiglu_clamped_backward,
    "gelu_backward": _gelu_backward,
    "gate_heads_backward": _gate_heads_backward,
    "glu_quant": _glu_quant,
    "gelu_quant": _gelu_quant,
    "gate_heads_quant": _gate_heads_quant,
    "scaled_linear": _scaled_linear,
    "weight_only_linear": _weight_only_linear,
    "rope": _rope,
    "apply_rotary": _apply_rotary,
    "apply_rotary_qk": _apply_rotary_qk,
    "qk_norm_rope": _qk_norm_rope,
    "qk_norm_cross_attention": _qk_norm_cross_attention,
    "attention": _attention,
    "attention_lse": _attention,
    "attention_int8": _attention_int8,
    "channel_norm": _channel_norm,
    "channel_norm_residual": _channel_norm,
    "pixel_shuffle": _pixel_shuffle,
    "unpatchify": _unpatchify,
    "group_norm": _group_norm,
    "group_norm_residual": _group_norm,
    "upsample_nearest": _upsample_nearest,
}


# ---- Registration

_warned: set[str] = set()


def _warn_once(name: str, device: str) -> None:
    if name in _warned or device == COMPILED_DEVICE:
        return
    _warned.add(name)
    holds = f"the kernels for {COMPILED_DEVICE}" if COMPILED_DEVICE else "no kernel"
    warnings.warn(
        f"ltx-kernels: {name} on a {device} tensor runs the plain torch reference, because this variant holds {holds}. "
        f'Load the {device} variant, get_kernel(..., backend="{device}"), for the compiled kernel.',
        stacklevel=6,  # the caller of the Python function
    )


def argument_names(name: str) -> list[str]:
    return [argument.name for argument in getattr(ops, name).default._schema.arguments]


def in_torch(name: str) -> Callable[..., Any]:
    """An op in plain torch, ``run(mode, *arguments)`` with the arguments of its schema, in their order."""
    names, results, body = argument_names(name), len(getattr(ops, name).default._schema.returns), BODIES[name]

    def run(mode: Mode, *arguments: Any) -> Any:
        outcome = body(mode, **dict(zip(names, arguments)))
        return outcome[0] if results == 1 else tuple(outcome[:results])

    return run


def _register(name: str) -> None:
    run = in_torch(name)
    # The `_out` twin takes its outputs and then the op's arguments. Quantising ops have no such twin.
    has_out = hasattr(ops, name + "_out")
    count = len(getattr(ops, name).default._schema.returns)
    out_names = argument_names(name + "_out")[:count] if has_out else []
    functional, into_outs = add_op_namespace_prefix(name), add_op_namespace_prefix(name + "_out")

    def run_into(compute: bool, *arguments: Any) -> None:
        outs = dict(zip(out_names, arguments))
        results = run(Mode(compute, outs), *arguments[count:])
        if compute:
            for out, result in zip(outs.values(), (results,) if count == 1 else results):
                out.copy_(result)

    torch.library.register_fake(functional, lambda *arguments: run(Mode(False), *arguments))
    if has_out:
        torch.library.register_fake(into_outs, lambda *arguments: run_into(False, *arguments))

    for device in ("cuda", "cpu"):
        if has_kernel(functional, device.upper()):
            continue

        def kernel(*arguments: Any, device: str = device) -> Any:
            _warn_once(name, device)
            with torch.no_grad():
                return run(Mode(True), *arguments)

        def kernel_out(*arguments: Any, device: str = device) -> None:
            _warn_once(name, device)
            with torch.no_grad():
                run_into(True, *arguments)

        torch.library.impl(functional, device)(kernel)
        if has_out:
            torch.library.impl(into_outs, device)(kernel_out)


if not vars(ops).setdefault("registered", False):  # an earlier import of the build, from another folder, has done it
    for _name in BODIES:
        _register(_name)
    vars(ops)["registered"] = True
