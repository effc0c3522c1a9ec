"""What the ops do without their compiled kernel: shapes for torch.compile, and the reference on the other device.

A variant holds the kernels of one backend. For tensors on the other device (CPU tensors in a CUDA variant, and the
reverse) its ops run the reference, and warn at the first use of each op. The Python functions run the reference, too,
where a gradient is needed.

`BODIES` has one function for each schema of torch-ext/torch_binding.cpp: ``body(outs, compute, **arguments)`` with the
names of the schema. It checks the arguments, and returns the results, without contents unless ``compute``. ``outs``
holds the given outputs by the names that the schema of the ``_out`` twin gives them. All else is read from the schema.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Callable

import torch
from torch import Tensor

from . import _checks, reference
from ._checks import RotaryInput, RotaryTable
from ._ops import add_op_namespace_prefix, ops
from ._torch_private import has_kernel
from ._variant import COMPILED_DEVICE

Outs = dict[str, Any]  # tensors
Results = Sequence[Tensor]


# ---- Norms


def _norm(outs: Outs, compute: bool, *, input: Tensor, **arguments: Any) -> Results:
    _checks.check_norm(input, **outs, **arguments)
    if compute:
        return reference.norm_family(input, **arguments)
    return [input.new_empty(input.shape) for _ in range(3)]


def _adaln_norm(outs: Outs, compute: bool, *, gate: Any, gate_table: Any, **arguments: Any) -> Results:
    return _norm(outs, compute, out_gate=gate, out_gate_table=gate_table, **arguments)


def _gated_residual(outs: Outs, compute: bool, **arguments: Any) -> Results:
    return _norm(outs, compute, statistic=None, **arguments)


def _norm_residual(outs: Outs, compute: bool, *, weight: Any, eps: float, **arguments: Any) -> Results:
    return _norm(outs, compute, branch_weight=weight, branch_eps=eps, statistic=None, **arguments)


def _two_norms(weight1: Any, weight2: Any, eps1: float, eps2: float) -> dict[str, Any]:
    return {"branch_weight": weight1, "branch_eps": eps1, "weight": weight2, "eps": eps2, "statistic": _checks.RMS}


def _norm_residual_norm(
    outs: Outs, compute: bool, *, weight1: Any, weight2: Any, eps1: float, eps2: float, **arguments: Any
) -> Results:
    return _norm(outs, compute, **_two_norms(weight1, weight2, eps1, eps2), **arguments)


def _quantised(input: Tensor, shape: Sequence[int]) -> Results:
    return (
        input.new_empty(shape, dtype=torch.float8_e4m3fn),
        input.new_empty((*shape[:-1], 1), dtype=torch.float32),
        input.new_empty(shape),
    )


def _norm_quant(outs: Outs, compute: bool, *, input: Tensor, **arguments: Any) -> Results:
    _checks.check_norm_quant(input, **arguments)
    if compute:
        return reference.norm_family_quant(input, **arguments)
    *first, residual_out = _quantised(input, input.shape)
    second = _quantised(input, input.shape)[:2] if "scale2" in arguments else ()
    return (*first, *second, residual_out)


def _norm_residual_norm_quant(
    outs: Outs, compute: bool, *, weight1: Any, weight2: Any, eps1: float, eps2: float, **arguments: Any
) -> Results:
    return _norm_quant(outs, compute, **_two_norms(weight1, weight2, eps1, eps2), **arguments)


# ---- Activations


def _glu(outs: Outs, compute: bool, *, input: Tensor, gated: bool = True, **arguments: Any) -> Results:
    shape = _checks.check_glu(input, gated=gated, **outs, **arguments)
    return (reference.gated_unit(input, gated=gated, **arguments) if compute else input.new_empty(shape),)


def _swiglu_clamped(outs: Outs, compute: bool, *, input: Tensor, **arguments: Any) -> Results:
    shape = _checks.check_swiglu_clamped(input, **outs, **arguments)
    return (reference.clamped_unit(input, **arguments) if compute else input.new_empty(shape),)


def _gate_heads(outs: Outs, compute: bool, **arguments: Any) -> Results:
    _checks.check_gate_heads(**arguments, **outs)
    input = arguments["input"]
    return (reference.head_gates(**arguments) if compute else input.new_empty(input.shape),)


def _gelu(outs: Outs, compute: bool, **arguments: Any) -> Results:
    return _glu(outs, compute, gated=False, **arguments)


def _glu_quant(outs: Outs, compute: bool, *, input: Tensor, gated: bool = True, **arguments: Any) -> Results:
    shape = _checks.check_glu_quant(input, gated=gated, **arguments)
    return reference.gated_unit_quant(input, gated=gated, **arguments) if compute else _quantised(input, shape)


def _gelu_quant(outs: Outs, compute: bool, **arguments: Any) -> Results:
    return _glu_quant(outs, compute, gated=False, **arguments)


def _gate_heads_quant(outs: Outs, compute: bool, *, input: Tensor, **arguments: Any) -> Results:
    shape = _checks.check_gate_heads_quant(input, **arguments)
    return reference.head_gates_quant(input, **arguments) if compute else _quantised(input, shape)


# ---- Linear layers


def _scaled_linear(outs: Outs, compute: bool, *, use_fast_accum: bool, **arguments: Any) -> Results:
    _checks.check_product(**arguments, **outs)
    if compute:
        return (reference.product(**arguments),)
    values, weight = arguments["values"], arguments["weight"]
    return (values.new_empty((*values.shape[:-1], weight.shape[0]), dtype=torch.bfloat16),)


# ---- Rotary


def _rotary(compute: bool, operands: list[RotaryInput], tables: list[RotaryTable], **arguments: Any) -> Results:
    if compute:
        return reference.rotary(operands, tables, **arguments)
    return [torch.empty_like(operand.tensor) for operand in operands]


def _rope(outs: Outs, compute: bool, *, interleaved: bool, **arguments: Any) -> Results:
    operands = _checks.check_rope(**arguments, out=tuple(outs.values()) or None)
    angles = {name: arguments[name] for name in ("positions", "grid", "rope_dims", "theta_base")}
    tables = [reference.computed_table(operand, **angles) for operand in operands] if compute else []
    return _rotary(compute, operands, tables, interleaved=interleaved)


def _apply_rotary(outs: Outs, compute: bool, *, interleaved: bool, **arguments: Any) -> Results:
    operands, tables = _checks.check_apply_rotary(**arguments, **outs)
    return _rotary(compute, operands, tables, interleaved=interleaved, rounding=arguments["rounding"])


def _apply_rotary_qk(outs: Outs, compute: bool, *, interleaved: bool, **arguments: Any) -> Results:
    operands, tables = _checks.check_apply_rotary_qk(**arguments, out=tuple(outs.values()) or None)
    return _rotary(compute, operands, tables, interleaved=interleaved, rounding=arguments["rounding"])


def _qk_norm_rope(outs: Outs, compute: bool, *, interleaved: bool, **arguments: Any) -> Results:
    operands, tables = _checks.check_qk_norm_rope(**arguments, out=tuple(outs.values()) or None)
    names = ("across_heads", "weight_offset", "statistic", "cast_before_weight", "rounding")
    norm = {name: arguments[name] for name in names}
    return _rotary(compute, operands, tables, interleaved=interleaved, normalised=True, **norm)


# ---- Attention


def _qk_norm_cross_attention(outs: Outs, compute: bool, **arguments: Any) -> Results:
    _checks.check_qk_norm_cross_attention(**arguments, **outs)
    query = arguments["query"]
    return (reference.cross_attention(**arguments) if compute else query.new_empty(query.shape),)


def _attention(outs: Outs, compute: bool, *, query: Tensor, **arguments: Any) -> Results:
    _checks.check_attention(query, **arguments, **outs)
    if compute:
        return reference.attention_with_lse(query, **arguments)
    batch, queries, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((batch, heads, queries), dtype=torch.float32)


def _attention_int8(outs: Outs, compute: bool, **arguments: Any) -> Results:
    _checks.check_attention_int8(**arguments, **outs)
    query = arguments["query"]
    return (reference.attention_int8(**arguments) if compute else query.new_empty(query.shape),)


# ---- Channels-last video


def _channel_norm(outs: Outs, compute: bool, *, input: Tensor, **arguments: Any) -> Results:
    shape = _checks.check_channel_norm(input, **outs, **arguments)
    if compute:
        return reference.channel_norm_family(input, **arguments)
    return _new_video(input, shape), _new_video(input, input.shape)


def _new_video(input: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.empty(shape, dtype=input.dtype, device=input.device, memory_format=torch.channels_last_3d)


def _pixel_shuffle(outs: Outs, compute: bool, *, input: Tensor, **arguments: Any) -> Results:
    shape = _checks.check_pixel_shuffle(input, **outs, **arguments)
    return (reference.shuffled(input, **arguments) if compute else _new_video(input, shape),)


def _unpatchify(outs: Outs, compute: bool, *, input: Tensor, **arguments: Any) -> Results:
    shape = _checks.check_unpatchify(input, **outs, **arguments)
    return (reference.unpatched(input, **arguments) if compute else input.new_empty(shape),)


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
    "glu_quant": _glu_quant,
    "gelu_quant": _gelu_quant,
    "gate_heads_quant": _gate_heads_quant,
    "scaled_linear": _scaled_linear,
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


def _argument_names(name: str) -> list[str]:
    return [argument.name for argument in getattr(ops, name).default._schema.arguments]


def in_torch(name: str) -> Callable[..., Any]:
    """An op in plain torch, ``run(outs, compute, *arguments)`` with the arguments of its schema, in their order."""
    names, results, body = _argument_names(name), len(getattr(ops, name).default._schema.returns), BODIES[name]

    def run(outs: Outs, compute: bool, *arguments: Any) -> Any:
        outcome = body(outs, compute, **dict(zip(names, arguments)))
        return outcome[0] if results == 1 else tuple(outcome[:results])

    return run


def _register(name: str) -> None:
    run = in_torch(name)
    # The `_out` twin takes its outputs and then the op's arguments. Quantising ops have no such twin.
    has_out = hasattr(ops, name + "_out")
    count = len(getattr(ops, name).default._schema.returns)
    out_names = _argument_names(name + "_out")[:count] if has_out else []
    functional, into_outs = add_op_namespace_prefix(name), add_op_namespace_prefix(name + "_out")

    def run_into(compute: bool, *arguments: Any) -> None:
        outs = dict(zip(out_names, arguments))
        results = run(outs, compute, *arguments[count:])
        if compute:
            for out, result in zip(outs.values(), (results,) if count == 1 else results):
                out.copy_(result)

    torch.library.register_fake(functional, lambda *arguments: run({}, False, *arguments))
    if has_out:
        torch.library.register_fake(into_outs, lambda *arguments: run_into(False, *arguments))

    for device in ("cuda", "cpu"):
        if has_kernel(functional, device.upper()):
            continue

        def kernel(*arguments: Any, device: str = device) -> Any:
            _warn_once(name, device)
            with torch.no_grad():
                return run({}, True, *arguments)

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
