"""Argument checks in plain Python: the texts and the order of torch-ext/*.cpp.

The compiled kernels check their own arguments. The fake and the reference implementations run without these kernels,
and call the checks here. These raise RuntimeError with the same text: ``name: expected ..., got ...``. Whether tensors
overlap is not checked here: fake tensors have no addresses. Sizes may be symbolic; comparing them adds a guard only
where the answer decides what is computed.

``float64=True`` admits a float64 input, and then float64 for everything, for the reference in double precision.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from ._torch_private import forward_ad

# The int codes of the op schemas (kernel_src/ltx/params.h).
NONE, RMS, LAYER = 0, 1, 2
FP32, EAGER, EAGER_WEIGHT = 0, 1, 2  # the last one for norms alone
GELU, GELU_TANH, SILU = 0, 1, 2
ROUNDING = {"fp32": FP32, "eager": EAGER}
APPROXIMATE = {"none": GELU, "tanh": GELU_TANH}
INTERLEAVED = {"interleaved": True, "half": False}
STATISTIC = {"rms": RMS, "layer": LAYER}
CHANNEL_NORM = {"none": 0, "rms": 1, "rms_stepwise": 2, "l2": 3}
CHANNEL_ACTIVATION = {"none": False, "silu": True}

FLOAT32_EPS = torch.finfo(torch.float32).eps

# The largest number of float8_e4m3fn, and the least scale (kernel_src/ltx/params.h).
E4M3_MAX, MIN_SCALE = 448.0, 2.0**-120
INT8_HEAD_DIM = 128  # kIntegerColumns of ltx/attention_integers.cuh

Code = TypeVar("Code", int, bool)
Function = TypeVar("Function", bound=Callable[..., Any])

# Columns of one head of an attention (kMaxHeadDim).
_MAX_HEAD_DIM = 256

# Pairs of one head whose angles fit in a launch's parameters (kMaxPairs).
_MAX_PAIRS = 512

# What an axis of a video is multiplied by, or padded with, at most (kMaxGrowth).
_MAX_GROWTH = 65536


def choice(name: str, codes: Mapping[str, Code], value: str) -> Code:
    """The code of a mode given by name."""
    try:
        return codes[value]
    except (KeyError, TypeError):  # TypeError: what has no hash
        names = " or ".join(f'"{known}"' for known in codes)
        raise ValueError(f"{name}: expected {names}, got {value!r}") from None


def eps_pair(eps: float | Sequence[float | None] | None, none: float) -> tuple[float, float]:
    """eps of query and key; ``none`` stands for None."""
    if not isinstance(eps, (tuple, list)):
        both: Any = none if eps is None else eps
        return both, both
    if len(eps) != 2:
        raise ValueError(f"eps: expected a number, None or a (query, key) pair of them, got {len(eps)}")
    return none if eps[0] is None else eps[0], none if eps[1] is None else eps[1]


def norm_rounding(rounding: str, cast_before_weight: bool) -> int:
    """The code of a norm's rounding, where a model's norm may multiply with its weight before or after it rounds."""
    mode = choice("rounding", ROUNDING, rounding)
    if cast_before_weight not in (True, False):
        check_type("cast_before_weight", "bool", cast_before_weight)
    return mode if cast_before_weight or mode == FP32 else EAGER_WEIGHT


def table_pair(name: str, table: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """The tables of query and key; None: they share one."""
    if isinstance(table, Tensor):
        return table, None
    if not isinstance(table, (tuple, list)) or len(table) != 2:
        check_type(name, "Tensor | Pair", table)
    return table[0], table[1]


def heads(name: str, tensor: Tensor) -> tuple[int, int]:
    """The sequence length and the width of a head of a [batch, sequence, heads, width] tensor."""
    try:
        _dim(name, tensor, 4)
    except AttributeError:
        check_type(name, "Tensor", tensor)
        raise
    shape = tensor.shape
    return shape[1], shape[3]


def rope_axes(
    query: Tensor, rope_dims: Sequence[int] | None, theta_base: float | Sequence[float]
) -> tuple[Sequence[int], Sequence[float]]:
    """Channels and theta of the three axes of rope_3d."""
    if rope_dims is None:
        head_dim = heads("query", query)[1]
        side = head_dim // 3 // 2 * 2
        rope_dims = (side, side, head_dim - 2 * side)
    else:
        if not isinstance(rope_dims, (tuple, list)):
            check_type("rope_dims", "Sequence[int] | None", rope_dims)
        if len(rope_dims) != 3:
            raise ValueError(f"rope_dims: expected three numbers, got {rope_dims!r}")
    if isinstance(theta_base, (int, float)):
        return rope_dims, (theta_base, theta_base, theta_base)
    if not isinstance(theta_base, (tuple, list)):
        check_type("theta_base", "float | Sequence[float]", theta_base)
        return rope_dims, (float(cast(float, theta_base)),) * 3  # a number of numpy, or a tensor
    if len(theta_base) != 3:
        raise ValueError(f"theta_base: expected one number or three, got {theta_base!r}")
    return rope_dims, theta_base


def requires_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd has to follow a call: a gradient is needed, or forward-mode differentiation is on."""
    if forward_ad._current_level >= 0:  # what carries a tangent cannot be told for the wrappers of torch.func
        return True
    for tensor in tensors:  # noqa: SIM110 (any() over a generator takes twice as long, in every call)
        if tensor is not None and tensor.requires_grad:
            return True
    return False


# Where gradients are off, an op would run its kernel and lose the tangents. torch.no_grad() leaves forward mode on.
NO_TANGENTS = "forward-mode differentiation: expected gradients to be on, got none; call under torch.enable_grad()"


def no_given_outputs(*outs: object) -> None:
    """Raises where a call that autograd follows is given outputs to write into."""
    if any(out is not None for out in outs):
        raise RuntimeError(
            "out: expected no gradient to be needed, got an input that requires grad; "
            "call without out= or under torch.no_grad()"
        )


def no_gradient(*tensors: Tensor | None) -> None:
    """Raises where a call with a quantised result needs a gradient."""
    if torch.is_grad_enabled() and requires_grad(*tensors):
        raise RuntimeError(
            "input: expected no gradient to be needed, got a tensor that requires grad; "
            "quantised results have none: call under torch.no_grad()"
        )


# ---- Types

# What an annotation takes, and its name in errors. A mode given by name is `choice`'s.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "Tensor": ((Tensor,), "a tensor"),
    "float": ((numbers.Real, torch.SymInt, torch.SymFloat, Tensor), "a number"),
    "int": ((numbers.Integral, torch.SymInt, Tensor), "an integer"),
    "bool": ((numbers.Integral,), "True or False"),
    "torch.dtype": ((torch.dtype,), "a torch.dtype"),
}
_PLURALS = {"Tensor": "tensors", "float": "numbers", "int": "integers", "float | None": "numbers or None"}


def _kinds(annotation: str) -> list[str]:
    """The types of a union. torch.compile traces this, which it cannot do for a regular expression in torch 2.11."""
    kinds: list[str] = []
    for part in annotation.split(" | "):
        if kinds and kinds[-1].count("[") > kinds[-1].count("]"):  # inside of Sequence[...]
            kinds[-1] += f" | {part}"
        else:
            kinds.append(part)
    return kinds


def _fits(annotation: str, value: object) -> bool:
    for kind in _kinds(annotation):
        if kind == "None":
            fits = value is None
        elif kind == "Pair":
            fits = isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(x, Tensor) for x in value)
        elif kind.startswith("Sequence["):
            fits = isinstance(value, (tuple, list)) and all(_fits(kind[len("Sequence[") : -1], x) for x in value)
        else:
            fits = kind not in _TYPES or isinstance(value, _TYPES[kind][0])
        if fits:
            return True
    return False


def check_type(name: str, annotation: str, value: object) -> None:
    """Raises TypeError where the value is of none of the annotation's types, RuntimeError beyond 64 bits."""
    if _fits(annotation, value):
        for element in value if isinstance(value, (tuple, list)) else (value,):
            if type(element) is int and not -(2**63) <= element < 2**63 and annotation != "bool":
                _fail(name, "numbers of 64 bits", f"one of {element.bit_length() + 1} bits")
        return
    texts = {kind: text for kind, (_, text) in _TYPES.items()} | {"Pair": "a (query, key) pair of tensors"}
    expected = [
        _PLURALS[kind[len("Sequence[") : -1]] if kind.startswith("Sequence[") else texts[kind]
        for kind in _kinds(annotation)
        if kind != "None"
    ]
    got = "None" if value is None else type(value).__name__
    if isinstance(value, (tuple, list)):
        got += " of " + (", ".join(type(element).__name__ for element in value) or "nothing")
    raise TypeError(f"{name}: expected {' or '.join(expected)}, got {got}") from None


def check_types(function: Callable[..., Any], *arguments: object, **options: object) -> None:
    """Raises TypeError for the first argument of a call whose type its annotation does not allow."""
    signature = inspect.signature(function)
    for name, value in signature.bind_partial(*arguments, **options).arguments.items():
        check_type(name, signature.parameters[name].annotation, value)


def checks_types(function: Function) -> Function:
    """Checks the types of every call, in functions that take long anyway."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            check_types(function, *arguments, **options)
        return function(*arguments, **options)

    return cast(Function, call)


# ---- Texts


def _fail(name: str, expected: str, got: str) -> NoReturn:
    raise RuntimeError(f"{name}: expected {expected}, got {got}")


def _shape_text(shape: Sequence[int]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "")


# ---- The checks of tensor_checks.h


def _float_dtype(
    name: str, tensor: Tensor, float64: bool, expected: str = "dtype float32, float16 or bfloat16"
) -> None:
    dtype = tensor.dtype
    if dtype == torch.bfloat16 or dtype == torch.float16 or dtype == torch.float32:
        return
    if not (float64 and dtype == torch.float64):
        _fail(name, expected, _dtype_text(dtype))


def _same_dtype(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.dtype != like.dtype:
        _fail(name, f"dtype {_dtype_text(like.dtype)} (that of {like_name})", _dtype_text(tensor.dtype))


def _same_device(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.device != like.device:
        _fail(name, f"device {like.device} (that of {like_name})", str(tensor.device))


def _min_dim(name: str, tensor: Tensor, dim: int) -> None:
    if tensor.dim() < dim:
        dimensions = "dimension" if dim == 1 else "dimensions"
        _fail(name, f"at least {dim} {dimensions}", "shape " + _shape_text(tensor.shape))


def _dim(name: str, tensor: Tensor, dim: int) -> None:
    if tensor.dim() != dim:
        _fail(name, f"{dim} dimensions", "shape " + _shape_text(tensor.shape))


def _shape(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    same = tensor.dim() == len(shape)
    if same:
        for size, wanted in zip(tensor.shape, shape):
            same = same and size == wanted
    if not same:
        _fail(name, "shape " + _shape_text(shape), _shape_text(tensor.shape))


def _eps(eps: float, name: str = "eps") -> None:
    if not 0 <= eps < math.inf:
        _fail(name, "a finite number >= 0", format(eps, "g"))


def _finite(name: str, value: float) -> None:
    if not -math.inf < value < math.inf:  # math.isfinite of a symbolic number cannot be traced
        _fail(name, "a finite number", format(value, "g"))


def _code(name: str, value: int, first: int, last: int) -> None:
    if value < first or value > last:
        _fail(name, f"a code from {first} to {last}", str(value))


def _own_memory(name: str, out: Tensor) -> None:
    """Raises where two elements lie in one place; strides that do not nest count as if some did.

    Under torch.compile the strides may be symbolic, and are not looked at.
    """
    if torch.compiler.is_compiling() or out.is_contiguous():
        return
    steps = [(stride, size) for stride, size in zip(out.stride(), out.shape) if size > 1]
    if any(type(number) is not int for step in steps for number in step) or out.numel() == 0:
        return
    reach = 0
    for stride, size in sorted(steps):
        if stride <= reach:
            _fail(name, "memory of its own for every element", f"strides {_shape_text(out.stride())}")
        reach += (size - 1) * stride


def _output(name: str, out: Tensor | None, like_name: str, like: Tensor, shape: Sequence[int]) -> None:
    if out is not None:
        _shape(name, out, shape)
        _same_dtype(name, out, like_name, like)
        _same_device(name, out, like_name, like)
        _own_memory(name, out)


def _vector(name: str, vector: Tensor | None, input: Tensor, width: int, float64: bool) -> None:
    """A vector of ``width`` elements, the same for every row."""
    if vector is not None:
        _same_device(name, vector, "input", input)
        _float_dtype(name, vector, float64)
        _shape(name, vector, (width,))


def is_per_batch(value: Tensor, input: Tensor) -> bool:
    """Two dimensions beside an input of three or more: one vector per batch."""
    return value.dim() == 2 and input.dim() >= 3


def _modulation(
    name: str,
    value: Tensor | None,
    table: Tensor | None,
    input: Tensor,
    float64: bool,
    index: Tensor | None,
) -> None:
    """Anything that broadcasts to the input, or the rows that the index names, and the vector added to it."""
    if value is None:
        if table is not None:
            _fail(f"{name}_table", f"{name} to be given too", "a table alone")
        return
    _same_device(name, value, "input", input)
    _float_dtype(name, value, float64)
    if index is not None:
        _rows(name, value, input)
    else:
        _broadcasts(name, value, input)
    _vector(f"{name}_table", table, input, input.shape[-1], float64)


def _broadcast_fits(shape: Sequence[int], full: Sequence[int]) -> bool:
    """Whether a shape broadcasts to another."""
    fits = len(shape) <= len(full)
    for back in range(1, len(shape) + 1):
        fits = fits and (shape[-back] == 1 or shape[-back] == full[-back])
    return fits


def _broadcasts(name: str, value: Tensor, input: Tensor) -> None:
    """Anything that broadcasts to the input."""
    shape = input.shape
    if is_per_batch(value, input):
        shape = torch.Size((input.shape[0], input.shape[-1]))
    if not _broadcast_fits(value.shape, shape):
        expected = "a shape that broadcasts to " + _shape_text(input.shape)
        if input.dim() >= 3:
            expected += f" (or {_shape_text((input.shape[0], input.shape[-1]))}, per batch)"
        _fail(name, expected, _shape_text(value.shape))


def _rows(name: str, value: Tensor, input: Tensor) -> None:
    """The rows that an index names."""
    width = input.shape[-1]
    per_batch = value.dim() == 3 and input.dim() >= 2
    fits = (per_batch or value.dim() == 2) and _broadcast_fits(value.shape[-1:], (width,))
    if not fits or (per_batch and not _broadcast_fits(value.shape[:1], input.shape[:1])):
        expected = f"shape [rows, {width}]"
        if input.dim() >= 2:
            expected += f" or [{input.shape[0]}, rows, {width}]"
        _fail(name, expected + " with index", _shape_text(value.shape))


def _index(index: Tensor | None, input: Tensor) -> None:
    if index is not None:
        _same_device("index", index, "input", input)
        if index.dtype not in (torch.int64, torch.int32, torch.bool):
            _fail("index", "dtype int64, int32 or bool", _dtype_text(index.dtype))
        if not _broadcast_fits(index.shape, input.shape[:-1]):
            expected = "a shape that broadcasts to " + _shape_text(input.shape[:-1])
            _fail("index", expected, _shape_text(index.shape))


def _same_rows(**values: Tensor | None) -> None:
    """All have as many rows for an index to name."""
    first, rows = "", 0
    for name, value in values.items():
        if value is not None:
            if first and value.shape[-2] != rows:
                _fail(name, f"{rows} rows, as {first} has", "shape " + _shape_text(value.shape))
            first, rows = first or name, value.shape[-2]


# ---- norm.cpp


def check_norm(
    input: Tensor,
    *,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    gate_table: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    scale_table: Tensor | None = None,
    shift: Tensor | None = None,
    shift_table: Tensor | None = None,
    out_gate: Tensor | None = None,
    out_gate_table: Tensor | None = None,
    scale2: Tensor | None = None,
    scale2_table: Tensor | None = None,
    shift2: Tensor | None = None,
    shift2_table: Tensor | None = None,
    branch_weight: Tensor | None = None,
    index: Tensor | None = None,
    branch_eps: float | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,
    statistic: int | None = RMS,
    rounding: int = FP32,
    out: Tensor | None = None,
    out2: Tensor | None = None,
    residual_out: Tensor | None = None,
    float64: bool = False,
) -> None:
    """The arguments of every op of the norm family, those of ``_formulas.norm_family``."""
    if statistic is not None:
        _code("statistic", statistic, RMS, LAYER)
    _code("rounding", rounding, FP32, EAGER_WEIGHT)
    _min_dim("input", input, 1)
    _float_dtype("input", input, float64)
    float64 = input.dtype == torch.float64
    # An op with two norms numbers their arguments.
    two = branch_eps is not None and statistic is not None
    if branch_eps is not None:
        _eps(branch_eps, "eps1" if two else "eps")
    _eps(eps, "eps2" if two else "eps")
    width = input.shape[-1]
    _index(index, input)
    if residual is not None:
        _same_device("residual", residual, "input", input)
        _same_dtype("residual", residual, "input", input)
        _shape("residual", residual, input.shape)
    _modulation("gate", gate, gate_table, input, float64, index)
    _vector("weight1" if two else "weight", branch_weight, input, width, float64)
    _vector("weight2" if two else "weight", weight, input, width, float64)
    _vector("bias", bias, input, width, float64)
    _modulation("scale", scale, scale_table, input, float64, index)
    _modulation("shift", shift, shift_table, input, float64, index)
    _modulation("gate", out_gate, out_gate_table, input, float64, index)
    _modulation("scale2", scale2, scale2_table, input, float64, index)
    _modulation("shift2", shift2, shift2_table, input, float64, index)
    if index is not None:
        _same_rows(gate=out_gate if gate is None else gate, scale=scale, shift=shift, scale2=scale2, shift2=shift2)
    _output("out", out, "input", input, input.shape)
    _output("out2", out2, "input", input, input.shape)
    _output("residual_out", residual_out, "input", input, input.shape)


# ---- glu.cpp


def check_glu(
    input: Tensor,
    *,
    up: Tensor | None = None,
    bias: Tensor | None = None,
    gated: bool,
    gate_first: bool = True,
    activation: int,
    rounding: int = FP32,
    out: Tensor | None = None,
    float64: bool = False,
) -> tuple[int, ...]:
    """The arguments of glu and gelu; returns the shape of the output."""
    _code("activation", activation, GELU, SILU)
    _code("rounding", rounding, FP32, EAGER)
    _min_dim("input", input, 1)
    width = input.shape[-1]
    if gated and up is None:
        if width % 2 != 0:
            _fail("input", "an even last dimension (gate and up packed)", "shape " + _shape_text(input.shape))
        width = width // 2
    _float_dtype("input", input, float64)
    float64 = input.dtype == torch.float64
    if up is not None:
        _same_device("up", up, "input", input)
        _same_dtype("up", up, "input", input)
        _shape("up", up, input.shape)
    _vector("bias", bias, input, width, float64)
    shape = (*input.shape[:-1], width)
    _output("out", out, "input", input, shape)
    return shape


def check_swiglu_clamped(
    input: Tensor, *, alpha: float, limit: float, interleaved: bool, rounding: int, **arguments: Any
) -> tuple[int, ...]:
    """The arguments of swiglu_clamped; returns the shape of the output."""
    _code("rounding", rounding, FP32, EAGER)
    _finite("alpha", alpha)
    if not limit >= 0:
        _fail("limit", "a number >= 0", format(limit, "g"))
    return check_glu(input, gated=True, activation=SILU, rounding=rounding, **arguments)


def check_gate_heads(
    input: Tensor,
    logits: Tensor,
    *,
    scale: float,
    rounding: int = FP32,
    out: Tensor | None = None,
    float64: bool = False,
) -> None:
    _finite("scale", scale)
    _code("rounding", rounding, FP32, EAGER)
    _min_dim("input", input, 2)
    _float_dtype("input", input, float64)
    _same_device("logits", logits, "input", input)
    _same_dtype("logits", logits, "input", input)
    *leading, heads, width = input.shape
    fits = logits.dim() == len(leading) + 1
    for size, wanted in zip(logits.shape, leading):
        fits = fits and size == wanted
    if not fits or not (logits.shape[-1] == heads or logits.shape[-1] == heads * width):
        shapes = [_shape_text((*leading, columns)) for columns in (heads, heads * width)]
        _fail("logits", f"shape {shapes[0]} (one per head) or {shapes[1]} (one per column)", _shape_text(logits.shape))
    _output("out", out, "input", input, input.shape)


def _grad(grad: Tensor, input: Tensor, shape: Sequence[int], name: str = "grad") -> None:
    """The gradient of a result of ``shape``."""
    _same_device(name, grad, "input", input)
    _same_dtype(name, grad, "input", input)
    _shape(name, grad, shape)


def check_norm_backward(
    grad: Tensor,
    input: Tensor,
    *,
    grad2: Tensor | None = None,
    grad_residual: Tensor | None = None,
    branch: Tensor | None = None,
    **arguments: Any,
) -> None:
    """``check_norm`` and what has the input's shape."""
    check_norm(input, **arguments)
    named = {"grad": grad, "grad2": grad2, "grad_residual": grad_residual, "branch": branch}
    for name, tensor in named.items():
        if tensor is not None:
            _grad(tensor, input, input.shape, name)


def check_row_sums(grad: Tensor, input: Tensor, *, eps: float, statistic: int, float64: bool) -> tuple[int, int]:
    """Returns the shape of the results."""
    if grad.dim() != 3:
        _fail("grad", "shape [groups, rows, H]", _shape_text(grad.shape))
    for name, tensor in (("grad", grad), ("input", input)):
        _float_dtype(name, tensor, float64)
    _same_device("input", input, "grad", grad)
    _shape("input", input, grad.shape)
    _code("statistic", statistic, NONE, LAYER)
    _eps(eps)
    return grad.shape[0], grad.shape[2]


def _side_by_side(input: Tensor, up: Tensor | None) -> tuple[int, ...]:
    return (*input.shape,) if up is None else (2, *input.shape)


def check_glu_backward(grad: Tensor, input: Tensor, **arguments: Any) -> tuple[int, ...]:
    """``check_glu`` and the gradient; returns the shape of the result."""
    _grad(grad, input, check_glu(input, **arguments))
    return _side_by_side(input, arguments.get("up"))


def check_swiglu_clamped_backward(grad: Tensor, input: Tensor, **arguments: Any) -> tuple[int, ...]:
    _grad(grad, input, check_swiglu_clamped(input, rounding=FP32, **arguments))
    return _side_by_side(input, arguments["up"])


def check_gate_heads_backward(grad: Tensor, input: Tensor, logits: Tensor, **arguments: Any) -> None:
    check_gate_heads(input, logits, **arguments)
    _grad(grad, input, input.shape)


# ---- quant.cpp


def _static_scale(static_scale: Tensor | None, input: Tensor) -> None:
    if static_scale is not None:
        _same_device("static_scale", static_scale, "input", input)
        if static_scale.dtype != torch.float32:
            _fail("static_scale", "dtype float32", _dtype_text(static_scale.dtype))
        if static_scale.numel() != 1:
            _fail("static_scale", "one element", "shape " + _shape_text(static_scale.shape))


def check_norm_quant(input: Tensor, *, static_scale: Tensor | None, statistic: int, **arguments: Any) -> None:
    """``check_norm``, where statistic NONE quantises the row itself, and the scale."""
    _code("statistic", statistic, RMS if "scale2" in arguments else NONE, LAYER)
    check_norm(input, statistic=statistic or None, **arguments)
    _static_scale(static_scale, input)


def check_glu_quant(
    input: Tensor, *, prefix: Tensor | None, static_scale: Tensor | None, **arguments: Any
) -> tuple[int, ...]:
    """``check_glu``, the prefix and the scale; returns the shape of the values."""
    *leading, width = check_glu(input, **arguments)
    if prefix is not None:
        _same_device("prefix", prefix, "input", input)
        _same_dtype("prefix", prefix, "input", input)
        if prefix.dim() != input.dim() or prefix.shape[:-1] != input.shape[:-1]:
            expected = f"the leading sizes of input {_shape_text(input.shape)}"
            _fail("prefix", expected, "shape " + _shape_text(prefix.shape))
        width = prefix.shape[-1] + width
    _static_scale(static_scale, input)
    return (*leading, width)


def check_gate_heads_quant(
    input: Tensor, logits: Tensor, *, static_scale: Tensor | None, scale: float, float64: bool = False
) -> tuple[int, ...]:
    """``check_gate_heads`` and the scale of the rows; returns the shape of the values."""
    check_gate_heads(input, logits, scale=scale, float64=float64)
    _static_scale(static_scale, input)
    *leading, heads, width = input.shape
    return (*leading, heads * width)


# ---- quant.py


def check_weight(weight: Tensor) -> None:
    _dim("weight", weight, 2)
    if weight.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        _float_dtype("weight", weight, False)


def check_linear_cat(
    inputs: Sequence[Tensor] | Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None
) -> None:
    if isinstance(inputs, Tensor):
        _fail("inputs", "a sequence of tensors", "a tensor")
    if len(inputs) == 0:
        _fail("inputs", "a sequence of tensors", "none")
    _dim("weight", weight, 2)
    channels, width = weight.shape
    first = inputs[0]
    _min_dim("inputs[0]", first, 1)
    for i, tensor in enumerate(inputs):
        name = f"inputs[{i}]"
        _same_device(name, tensor, "weight", weight)
        _same_dtype(name, tensor, "weight", weight)
        if tensor.shape[:-1] != first.shape[:-1]:
            expected = f"the leading sizes of inputs[0] {_shape_text(first.shape)}"
            _fail(name, expected, "shape " + _shape_text(tensor.shape))
    widths = [tensor.shape[-1] for tensor in inputs]
    if sum(widths) != width:
        expected = f"last dimensions that add up to {width} (that of weight)"
        _fail("inputs", expected, " + ".join(str(size) for size in widths))
    if bias is not None:
        _same_device("bias", bias, "weight", weight)
        _same_dtype("bias", bias, "weight", weight)
        _shape("bias", bias, (channels,))
    _output("out", out, "weight", weight, (*first.shape[:-1], channels))


def check_scaled_linear(
    values: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None
) -> None:
    _dim("weight", weight, 2)
    for name, tensor in (("values", values), ("weight", weight)):
        if tensor.dtype != torch.float8_e4m3fn:
            _fail(name, "dtype float8_e4m3fn", _dtype_text(tensor.dtype))
    for name, tensor in (("scales", scales), ("weight_scales", weight_scales)):
        if tensor.dtype != torch.float32:
            _fail(name, "dtype float32", _dtype_text(tensor.dtype))
    channels, width = weight.shape
    if channels % 16 != 0 or width % 16 != 0:
        _fail("weight", "sizes that are multiples of 16", "shape " + _shape_text(weight.shape))
    if not weight.is_contiguous():
        _fail("weight", "a contiguous tensor", f"strides {_shape_text(weight.stride())}")
    _min_dim("values", values, 1)
    if values.shape[-1] != width:
        _fail("values", f"a last dimension of {width} (that of weight)", "shape " + _shape_text(values.shape))
    _shape("scales", scales, (*values.shape[:-1], 1))
    _shape("weight_scales", weight_scales, (channels,))
    if bias is not None:
        _shape("bias", bias, (channels,))
        _same_device("bias", bias, "values", values)
    for name, tensor in (("scales", scales), ("weight", weight), ("weight_scales", weight_scales)):
        _same_device(name, tensor, "values", values)


def check_product_options(out_dtype: torch.dtype, use_fast_accum: object) -> None:
    if use_fast_accum is not True and use_fast_accum is not False:
        check_type("use_fast_accum", "bool", use_fast_accum)
    if out_dtype is not torch.bfloat16:
        check_type("out_dtype", "torch.dtype", out_dtype)
        if out_dtype not in (torch.float16, torch.float32):
            _fail("out_dtype", "bfloat16, float16 or float32", _dtype_text(out_dtype))


def check_sum(values: Tensor, weight: Tensor, dtype: torch.dtype, *, addend: Tensor | None, out: Tensor | None) -> None:
    """An operand and an output of the result's shape and dtype."""
    for name, tensor in (("addend", addend), ("out", out)):
        if tensor is not None:
            if tensor.dtype != dtype:
                _fail(name, "dtype " + _dtype_text(dtype), _dtype_text(tensor.dtype))
            _shape(name, tensor, (*values.shape[:-1], weight.shape[0]))
            _same_device(name, tensor, "values", values)
    if out is not None:
        _own_memory("out", out)


def check_product(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    addend: Tensor | None = None,
    out: Tensor | None = None,
) -> None:
    """What the op asks: more than ``check_scaled_linear``."""
    check_scaled_linear(values, scales, weight, weight_scales, bias)
    if bias is not None and bias.dtype != torch.bfloat16:
        _fail("bias", "dtype bfloat16", _dtype_text(bias.dtype))
    for name, tensor in (("values", values), ("scales", scales), ("weight_scales", weight_scales), ("bias", bias)):
        if tensor is not None and not tensor.is_contiguous():
            _fail(name, "a contiguous tensor", f"strides {_shape_text(tensor.stride())}")
    check_sum(values, weight, torch.bfloat16, addend=addend, out=out)


def check_weight_only_linear(
    input: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, float64: bool = False
) -> None:
    _float_dtype("input", input, float64)
    _dim("weight", weight, 2)
    if weight.dtype != torch.float8_e4m3fn:
        _fail("weight", "dtype float8_e4m3fn", _dtype_text(weight.dtype))
    if weight_scales.dtype != torch.float32:
        _fail("weight_scales", "dtype float32", _dtype_text(weight_scales.dtype))
    channels, width = weight.shape
    if width == 0 or width % 16 != 0:
        _fail("weight", "a last dimension that is a positive multiple of 16", "shape " + _shape_text(weight.shape))
    _min_dim("input", input, 1)
    if input.shape[-1] != width:
        _fail("input", f"a last dimension of {width} (that of weight)", "shape " + _shape_text(input.shape))
    _shape("weight_scales", weight_scales, (channels,))
    if bias is not None:
        _same_dtype("bias", bias, "input", input)
        _shape("bias", bias, (channels,))
        _same_device("bias", bias, "input", input)
    for name, tensor in (("weight", weight), ("weight_scales", weight_scales)):
        _same_device(name, tensor, "input", input)
    operands = (("input", input), ("weight", weight), ("weight_scales", weight_scales), ("bias", bias))
    for name, operand in operands:
        if operand is not None and not operand.is_contiguous():
            _fail(name, "a contiguous tensor", f"strides {_shape_text(operand.stride())}")


# ---- rope.cpp


class HeadDims(NamedTuple):
    """Where batch, sequence and heads are among a tensor's dimensions; -1: it has none of that kind."""

    batch: int
    sequence: int
    head: int


class TableForm(NamedTuple):
    """How a table is read: the rotated width, one entry per pair or per element, and whether each head has its own."""

    rotary_dim: int
    half_width: bool
    whole_width: bool


class RotaryTable(NamedTuple):
    """cos and sin as [batch, sequence, heads, columns], each leading size the input's or 1."""

    cos: Tensor
    sin: Tensor
    form: TableForm


def _size(tensor: Tensor, dim: int) -> int:
    return 1 if dim < 0 else tensor.shape[dim]


def heads_last(tensor: Tensor, dims: HeadDims) -> Tensor:
    """A view as [batch, sequence, heads, columns]."""
    if dims.batch < 0:
        tensor = tensor.unsqueeze(0)
        dims = HeadDims(0, dims.sequence + 1, dims.head if dims.head < 0 else dims.head + 1)
    if dims.head < 0:
        return tensor.unsqueeze(2)
    return tensor if dims.sequence == 1 else tensor.transpose(1, 2)


def head_dims(name: str, tensor: Tensor, sequence_dim: int) -> HeadDims:
    dim = tensor.dim()
    if dim < 2 or dim > 4:
        _fail(name, "2, 3 or 4 dimensions", "shape " + _shape_text(tensor.shape))
    sequence = sequence_dim + dim if sequence_dim < 0 else sequence_dim
    if sequence < 0 or sequence > dim - 2 or (dim == 4 and sequence == 0):
        expected = {4: "1 or 2 (of 4 dimensions)", 3: "0 or 1 (of 3 dimensions)", 2: "0 (of 2 dimensions)"}[dim]
        _fail("sequence_dim", expected, str(sequence_dim))
    if dim == 2:
        return HeadDims(-1, 0, -1)
    if dim == 3:
        return HeadDims(0, 1, -1) if sequence == 1 else HeadDims(-1, 0, 1)
    return HeadDims(0, 1, 2) if sequence == 1 else HeadDims(0, 2, 1)


def _table_form(name: str, table: Tensor, head_dim: int, heads: int, rotary_dim: int) -> TableForm:
    width = table.shape[-1]
    # The size of the heads decides nothing for a table as wide as one head: compare it last.
    per_head = table.dim() < 4
    if rotary_dim != 0:
        if rotary_dim < 0 or rotary_dim % 2 != 0 or rotary_dim > head_dim:
            _fail("rotary_dim", f"an even number up to {head_dim}", str(rotary_dim))
        if width == rotary_dim:
            return TableForm(rotary_dim, False, False)
        if 2 * width == rotary_dim:
            return TableForm(rotary_dim, True, False)
        if per_head and rotary_dim == head_dim and heads > 1:
            if width == heads * head_dim:
                return TableForm(rotary_dim, False, True)
            if 2 * width == heads * head_dim:
                return TableForm(rotary_dim, True, True)
        expected = f"a last dimension of {rotary_dim} or {rotary_dim // 2} (rotary_dim or half of it)"
        _fail(name, expected, "shape " + _shape_text(table.shape))
    if width == head_dim:
        return TableForm(head_dim, False, False)
    if 2 * width == head_dim:
        return TableForm(head_dim, True, False)
    if per_head and heads > 1:
        if width == heads * head_dim:
            return TableForm(head_dim, False, True)
        if 2 * width == heads * head_dim:
            return TableForm(head_dim, True, True)
    if not (width < head_dim and width % 2 == 0 and width > 0):
        expected = f"a last dimension of {head_dim} or {head_dim // 2}"
        if per_head and heads > 1:
            expected += f", {heads * head_dim} or {heads * head_dim // 2} (own angles per head)"
        expected += ", or an even one below " + str(head_dim) + " (partial rotary)"
        _fail(name, expected, "shape " + _shape_text(table.shape))
    return TableForm(width, False, False)


def _table_view(name: str, table: Tensor, form: TableForm, batch: int, rows: int, heads: int) -> Tensor:
    """The table as [batch or 1, rows or 1, heads or 1, columns]."""
    if table.dim() == 2:
        dims = HeadDims(-1, 0, -1)
    elif table.dim() == 3:
        dims = HeadDims(0, 1, -1)
    elif table.dim() == 4:
        # [B, H, S, W] unless only the second dimension can be the sequence.
        heads_first = table.shape[2] == rows or table.shape[1] != rows
        dims = HeadDims(0, 2, 1) if heads_first else HeadDims(0, 1, 2)
    else:
        _fail(name, "2, 3 or 4 dimensions", "shape " + _shape_text(table.shape))
    fits = True
    for dim, size in ((dims.batch, batch), (dims.sequence, rows), (dims.head, heads)):
        fits = fits and (dim < 0 or table.shape[dim] == 1 or table.shape[dim] == size)
    if not fits:
        w = table.shape[-1]
        expected = (
            f"shape [{rows}, {w}], [{batch}, {rows}, {w}], [{batch}, {heads}, {rows}, {w}] or "
            f"[{batch}, {rows}, {heads}, {w}] (any leading size may be 1)"
        )
        _fail(name, expected, _shape_text(table.shape))
    view = heads_last(table, dims)
    return view.unflatten(-1, (heads, -1)).squeeze(2) if form.whole_width else view


class RotaryInput(NamedTuple):
    """The query or the key of a rotary op, with the names that errors use."""

    name: str
    tensor: Tensor
    dims: HeadDims
    prefix: str = ""  # of the names of its norm's arguments, weight and bias
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps_name: str = "eps"
    eps: float = 0.0

    @property
    def sequence(self) -> int:
        return _size(self.tensor, self.dims.sequence)

    @property
    def heads(self) -> int:
        return _size(self.tensor, self.dims.head)


def _norm_vector(name: str, vector: Tensor | None, operand: RotaryInput, across_heads: bool, float64: bool) -> None:
    if vector is not None:
        _same_device(name, vector, operand.name, operand.tensor)
        _float_dtype(name, vector, float64)
        head_dim = operand.tensor.shape[-1]
        _shape(name, vector, (operand.heads * head_dim if across_heads else head_dim,))


def _check_inputs(
    operands: list[RotaryInput],
    float64: bool,
    *,
    across_heads: bool = False,
    statistic: int = RMS,
    cast_before_weight: bool = False,
) -> None:
    query = operands[0]
    _float_dtype(query.name, query.tensor, float64)
    float64 = query.tensor.dtype == torch.float64
    if statistic == LAYER and cast_before_weight:
        _fail("cast_before_weight", "False with a layer norm", "True")
    batch = _size(query.tensor, query.dims.batch)
    head_dim = query.tensor.shape[-1]
    if head_dim % 2 != 0:
        _fail(query.name, "an even last dimension", "shape " + _shape_text(query.tensor.shape))
    for operand in operands:
        name, tensor = operand.name, operand.tensor
        if operand is not query:
            _same_device(name, tensor, query.name, query.tensor)
            _same_dtype(name, tensor, query.name, query.tensor)
            _dim(name, tensor, query.tensor.dim())
            if tensor.shape[-1] != head_dim or _size(tensor, operand.dims.batch) != batch:
                expected = f"the batch size and last dimension of {query.name} {_shape_text(query.tensor.shape)}"
                _fail(name, expected, "shape " + _shape_text(tensor.shape))
        _eps(operand.eps, operand.eps_name)
        _norm_vector(operand.prefix + "weight", operand.weight, operand, across_heads, float64)
        if operand.bias is not None and statistic != LAYER:
            _fail(operand.prefix + "bias", "None with an rms norm", "a tensor")
        _norm_vector(operand.prefix + "bias", operand.bias, operand, across_heads, float64)


def _check_tables(
    operands: list[RotaryInput],
    tables: list[tuple[str, Tensor, str, Tensor]],
    rotary_dim: int,
) -> list[RotaryTable]:
    """Reads one table per operand, or one for all of them."""
    query = operands[0]
    first_name, first_cos = tables[0][0], tables[0][1]
    shared = len(tables) < len(operands)
    views: list[RotaryTable] = []
    for i, operand in enumerate(operands):
        cos_name, cos, sin_name, sin = tables[0 if shared else i]
        tensor = operand.tensor
        _same_device(cos_name, cos, operand.name, tensor)
        _same_device(sin_name, sin, operand.name, tensor)
        _float_dtype(cos_name, cos, query.tensor.dtype == torch.float64)
        if cos.dtype != torch.float32 and cos.dtype != query.tensor.dtype:
            expected = f"dtype float32 or {_dtype_text(tensor.dtype)} (that of {operand.name})"
            _fail(cos_name, expected, _dtype_text(cos.dtype))
        _same_dtype(sin_name, sin, first_name, first_cos)
        _same_dtype(cos_name, cos, first_name, first_cos)
        _shape(sin_name, sin, cos.shape)
        _min_dim(cos_name, cos, 2)
        heads = operand.heads
        form = _table_form(cos_name, cos, tensor.shape[-1], heads, rotary_dim)
        if i > 0 and (form.rotary_dim != views[0].form.rotary_dim or form.half_width != views[0].form.half_width):
            expected = f"a table of the same kind as {first_name} {_shape_text(first_cos.shape)}"
            _fail(cos_name, expected, "shape " + _shape_text(cos.shape))
        rows = operand.sequence
        if shared:
            for other in operands:
                rows = other.sequence if other.sequence > rows else rows
        batch = _size(tensor, operand.dims.batch)
        views.append(
            RotaryTable(
                _table_view(cos_name, cos, form, batch, rows, heads),
                _table_view(sin_name, sin, form, batch, rows, heads),
                form,
            )
        )
    return views


def _check_outputs(operands: list[RotaryInput], outs: Sequence[Tensor] | None) -> None:
    if outs is not None:
        for i, operand in enumerate(operands):
            name = "out" if len(operands) == 1 else f"out[{i}]"
            _output(name, outs[i], operand.name, operand.tensor, operand.tensor.shape)


def check_apply_rotary(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    sequence_dim: int,
    rotary_dim: int,
    rounding: int,
    out: Tensor | None = None,
    float64: bool = False,
) -> tuple[list[RotaryInput], list[RotaryTable]]:
    operands = [RotaryInput("input", input, head_dims("input", input, sequence_dim))]
    _code("rounding", rounding, FP32, EAGER)
    _check_inputs(operands, float64)
    tables = _check_tables(operands, [("cos", cos, "sin", sin)], rotary_dim)
    _check_outputs(operands, None if out is None else (out,))
    return operands, tables


def check_apply_rotary_qk(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    sequence_dim: int,
    rotary_dim: int,
    rounding: int,
    out: Sequence[Tensor] | None = None,
    float64: bool = False,
) -> tuple[list[RotaryInput], list[RotaryTable]]:
    operands = [
        RotaryInput("query", query, head_dims("query", query, sequence_dim)),
        RotaryInput("key", key, head_dims("key", key, sequence_dim)),
    ]
    _code("rounding", rounding, FP32, EAGER)
    _check_inputs(operands, float64)
    tables = _check_tables(operands, [("cos", cos, "sin", sin)], rotary_dim)
    _check_outputs(operands, out)
    return operands, tables


def check_qk_norm_rope(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    key_cos: Tensor | None,
    key_sin: Tensor | None,
    *,
    query_bias: Tensor | None,
    key_bias: Tensor | None,
    eps: float,
    key_eps: float,
    weight_offset: float,
    statistic: int,
    across_heads: bool,
    cast_before_weight: bool,
    rotary_dim: int,
    rounding: int,
    out: Sequence[Tensor] | None = None,
    float64: bool = False,
) -> tuple[list[RotaryInput], list[RotaryTable]]:
    _dim("query", query, 4)
    query_dims, key_dims = head_dims("query", query, 1), head_dims("key", key, 1)
    operands = [
        RotaryInput("query", query, query_dims, "query_", query_weight, query_bias, "eps", eps),
        RotaryInput("key", key, key_dims, "key_", key_weight, key_bias, "key_eps", key_eps),
    ]
    _code("rounding", rounding, FP32, EAGER)
    _code("statistic", statistic, RMS, LAYER)
    tables = [("cos", cos, "sin", sin)]
    if key_cos is not None and key_sin is not None:
        tables.append(("key_cos", key_cos, "key_sin", key_sin))
    elif key_cos is not None or key_sin is not None:
        name = "key_cos" if key_cos is None else "key_sin"
        _fail(name, "both key_cos and key_sin, or neither", "None")
    _check_inputs(
        operands, float64, across_heads=across_heads, statistic=statistic, cast_before_weight=cast_before_weight
    )
    views = _check_tables(operands, tables, rotary_dim)
    _check_outputs(operands, out)
    return operands, views


def check_rotary_backward(operands: list[RotaryInput], grads: Sequence[Tensor]) -> None:
    """The gradients of the results, one for each operand."""
    for operand, grad in zip(operands, grads):
        name = f"grad_{operand.name}" if len(grads) == 2 else "grad"
        _same_device(name, grad, operand.name, operand.tensor)
        _same_dtype(name, grad, operand.name, operand.tensor)
        _shape(name, grad, operand.tensor.shape)


def check_rope(
    query: Tensor,
    key: Tensor,
    positions: Tensor | None,
    grid: Sequence[int],
    rope_dims: Sequence[int],
    theta_base: Sequence[float],
    *,
    out: Sequence[Tensor] | None = None,
    float64: bool = False,
) -> list[RotaryInput]:
    _dim("query", query, 4)
    operands = [
        RotaryInput("query", query, head_dims("query", query, 1)),
        RotaryInput("key", key, head_dims("key", key, 1)),
    ]
    _check_inputs(operands, float64)
    axes = len(grid)
    if axes not in (1, 3) or len(rope_dims) != axes or len(theta_base) != axes:
        _fail("grid", "1 or 3 axes, with as many rope_dims and theta_base", str(axes))
    tokens = 1
    for name, size, dim, base in zip(("num_frames", "height", "width"), grid, rope_dims, theta_base):
        tokens *= size
        if axes == 3 and size < 0:
            _fail(name, "a number >= 0", str(size))
        if dim < 0 or dim % 2 != 0:
            _fail("rope_dims", "even numbers >= 0", _shape_text(rope_dims))
        if not 0 < base < math.inf:
            _fail("theta_base", "finite numbers > 0", format(base, "g"))
    head_dim = query.shape[-1]
    if sum(rope_dims) != head_dim:
        _fail("rope_dims", f"a sum of {head_dim} (the last dimension of query)", _shape_text(rope_dims))
    if head_dim > 2 * _MAX_PAIRS:
        _fail("query", f"a last dimension of at most {2 * _MAX_PAIRS}", "shape " + _shape_text(query.shape))
    if axes == 3:
        for operand in operands:
            if operand.sequence != tokens:
                frames, height, width = grid
                expected = f"a sequence of {frames} * {height} * {width} = {tokens} (num_frames * height * width)"
                _fail(operand.name, expected, "shape " + _shape_text(operand.tensor.shape))
    if positions is not None:
        if axes != 1:
            _fail("positions", "None with a 3-D grid", "a tensor")
        _same_device("positions", positions, "query", query)
        if positions.dtype not in (torch.int64, torch.int32, torch.float32):
            _fail("positions", "dtype int64, int32 or float32", _dtype_text(positions.dtype))
        batch, rows = query.shape[0], query.shape[1]
        if key.shape[1] != rows:
            expected = f"the sequence length of query {_shape_text(query.shape)} (positions are shared)"
            _fail("key", expected, "shape " + _shape_text(key.shape))
        fits = positions.dim() in (1, 2) and positions.shape[-1] == rows
        if fits and positions.dim() == 2:
            fits = positions.shape[0] == 1 or positions.shape[0] == batch
        if not fits:
            _fail("positions", f"shape [{rows}] or [{batch}, {rows}]", _shape_text(positions.shape))
    _check_outputs(operands, out)
    return operands


# ---- attention.cpp


def _scale(scale: float | None) -> None:
    if scale is not None:
        _finite("scale", scale)


def _key_and_value(query: Tensor, key: Tensor, value: Tensor, grouped: bool = False) -> None:
    """grouped: Several heads of the query may share one of key and value."""
    _same_device("key", key, "query", query)
    _same_dtype("key", key, "query", query)
    _dim("key", key, 4)
    heads, key_heads = query.shape[2], key.shape[2]
    fits = heads == key_heads or (grouped and key_heads > 0 and heads % key_heads == 0)
    if key.shape[0] != query.shape[0] or not fits or key.shape[3] != query.shape[3]:
        if grouped:
            expected = (
                f"the batch size and last dimension of query {_shape_text(query.shape)} and heads that divide its"
            )
        else:
            expected = f"the batch size, heads and last dimension of query {_shape_text(query.shape)}"
        _fail("key", expected, "shape " + _shape_text(key.shape))
    _same_device("value", value, "query", query)
    _same_dtype("value", value, "query", query)
    _shape("value", value, key.shape)


def _mask_shape(mask: Tensor, key: Tensor) -> None:
    batch, keys = key.shape[:2]
    if mask.dim() != 2 or mask.shape[1] != keys or (mask.shape[0] != batch and mask.shape[0] != 1):
        other = "" if batch == 1 else f" or [1, {keys}]"
        _fail("mask", f"shape [{batch}, {keys}]{other}", _shape_text(mask.shape))


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    *,
    scale: float | None,
    is_causal: bool,
    grouped: bool = True,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    float64: bool = False,
) -> None:
    _dim("query", query, 4)
    _float_dtype("query", query, float64)
    _scale(scale)
    _key_and_value(query, key, value, grouped)
    if mask is not None:
        if is_causal:
            _fail("mask", "None with is_causal; key_lengths leaves out keys", "a tensor")
        _same_device("mask", mask, "query", query)
        if mask.dtype != torch.bool:
            _float_dtype("mask", mask, query.dtype == torch.float64, "dtype bool, float32, float16 or bfloat16")
        _mask_shape(mask, key)
    if key_lengths is not None:
        _same_device("key_lengths", key_lengths, "query", query)
        if key_lengths.dtype != torch.int32:
            _fail("key_lengths", "dtype int32", _dtype_text(key_lengths.dtype))
        _shape("key_lengths", key_lengths, (query.shape[0],))
    _output("out", out, "query", query, query.shape)
    if lse is not None:
        _same_device("lse", lse, "query", query)
        if lse.dtype != torch.float32:
            _fail("lse", "dtype float32", _dtype_text(lse.dtype))
        _shape("lse", lse, (query.shape[0], query.shape[2], query.shape[1]))
        if not lse.is_contiguous():
            _fail("lse", "a contiguous tensor", f"strides {_shape_text(lse.stride())}")


ATTENTION_PRECISION = {"native": False, "int8": True}


def is_int8(precision: str, mask: Tensor | None, is_causal: bool, return_lse: bool) -> bool:
    """Whether an attention is to be computed in 8 bits."""
    if not choice("precision", ATTENTION_PRECISION, precision):
        return False
    if mask is not None:
        _fail("mask", 'None with precision "int8"; key_lengths leaves out keys', "a tensor")
    if is_causal:
        _fail("is_causal", 'False with precision "int8"', "True")
    if return_lse:
        _fail("return_lse", 'False with precision "int8"', "True")
    return True


def check_attention_int8(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_lengths: Tensor | None = None,
    *,
    scale: float | None,
    out: Tensor | None = None,
    float64: bool = False,
) -> None:
    _dim("query", query, 4)
    _float_dtype("query", query, float64)
    if query.dtype == torch.float32:
        _fail("query", "dtype float16 or bfloat16", "float32")
    _scale(scale)
    if query.shape[-1] != INT8_HEAD_DIM:
        _fail("query", f"a last dimension of {INT8_HEAD_DIM}", "shape " + _shape_text(query.shape))
    check_attention(
        query,
        key,
        value,
        None,
        key_lengths,
        scale=scale,
        is_causal=False,
        grouped=False,
        out=out,
        float64=float64,
    )


def check_qk_norm_cross_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    mask: Tensor | None,
    *,
    eps: float,
    scale: float | None,
    out: Tensor | None = None,
    float64: bool = False,
) -> None:
    _dim("query", query, 4)
    _float_dtype("query", query, float64)
    float64 = query.dtype == torch.float64
    _eps(eps)
    _scale(scale)
    _, _, heads, head_dim = query.shape
    if head_dim > _MAX_HEAD_DIM:
        _fail("query", f"a last dimension of at most {_MAX_HEAD_DIM}", "shape " + _shape_text(query.shape))
    _key_and_value(query, key, value)
    for name, weight in (("query_weight", query_weight), ("key_weight", key_weight)):
        if weight is not None:
            _same_device(name, weight, "query", query)
            _float_dtype(name, weight, float64)
            _shape(name, weight, (heads * head_dim,))
    if mask is not None:
        _same_device("mask", mask, "query", query)
        _float_dtype("mask", mask, float64)
        _mask_shape(mask, key)
    _output("out", out, "query", query, query.shape)


# ---- channels_last.cpp


def _video(input: Tensor, float64: bool) -> None:
    _dim("input", input, 5)
    _float_dtype("input", input, float64)


def _like_input(name: str, tensor: Tensor | None, input: Tensor, shape: Sequence[int]) -> None:
    """An operand, or none, of the input's device and dtype, and of a shape."""
    if tensor is not None:
        _same_device(name, tensor, "input", input)
        _same_dtype(name, tensor, "input", input)
        _shape(name, tensor, shape)


def _together(first: str, second: str, one: object, other: object) -> None:
    if (one is None) != (other is None):
        _fail(first if one is None else second, f"{first} and {second} together", "None")


def channel_norm_shape(input: Tensor, padding: Sequence[int], float64: bool = False) -> tuple[int, ...]:
    """The shape of a channel norm's result."""
    _video(input, float64)
    if len(padding) != 3 or not all(0 <= size <= most for size, most in zip(padding, (_MAX_GROWTH, _MAX_GROWTH, 1))):
        expected = f"frames before and after, 0 to {_MAX_GROWTH}, and 0 or 1 for reflected edges"
        _fail("padding", expected, _shape_text(padding))
    batch, channels, frames, height, width = input.shape
    front, back, reflect = padding
    padded = frames if frames == 0 else frames + front + back
    return batch, channels, padded, height + 2 * reflect, width + 2 * reflect


def check_channel_norm(
    input: Tensor,
    *,
    bias: Tensor | None,
    noise: Tensor | None,
    noise_scale: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    scale_table: Tensor | None,
    shift_table: Tensor | None,
    eps: float,
    norm: int,
    silu: bool,
    padding: Sequence[int],
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    float64: bool = False,
) -> tuple[int, ...]:
    """Returns the shape of the result."""
    shape = channel_norm_shape(input, padding, float64)
    _code("norm", norm, 0, 3)
    _eps(eps)
    batch, channels, _, height, width = input.shape
    if padding[2] and (height < 2 or width < 2):
        _fail("input", "a height and a width of at least 2 (reflected edges)", "shape " + _shape_text(input.shape))
    _like_input("residual", residual, input, input.shape)
    _like_input("bias", bias, input, (channels,))
    _like_input("weight", weight, input, (channels,))
    _together("noise", "noise_scale", noise, noise_scale)
    _like_input("noise", noise, input, (height, width))
    _like_input("noise_scale", noise_scale, input, (channels,))
    _together("scale", "shift", scale, shift)
    for name, value, table in (("scale", scale, scale_table), ("shift", shift, shift_table)):
        if table is not None and value is None:
            _fail(f"{name}_table", "its modulation input to be given too", "a table alone")
        _like_input(name, value, input, (batch, channels))
    _like_input("scale_table", scale_table, input, (channels,))
    _like_input("shift_table", shift_table, input, (channels,))
    _output("out", out, "input", input, shape)
    _output("residual_out", residual_out, "input", input, input.shape)
    return shape


def check_pixel_shuffle(
    input: Tensor,
    *,
    bias: Tensor | None,
    residual: Tensor | None,
    upscale: Sequence[int],
    skip_frames: int,
    out: Tensor | None = None,
    float64: bool = False,
) -> tuple[int, ...]:
    """Returns the shape of the result."""
    _video(input, float64)
    if len(upscale) != 3 or not all(1 <= factor <= _MAX_GROWTH for factor in upscale):
        _fail("upscale", f"three numbers from 1 to {_MAX_GROWTH}", _shape_text(upscale))
    batch, channels, frames, height, width = input.shape
    parts = math.prod(upscale)
    if channels % parts != 0:
        _fail("input", f"channels that are a multiple of {parts}", "shape " + _shape_text(input.shape))
    if not 0 <= skip_frames < upscale[0]:
        _fail("skip_frames", f"a number from 0 to {upscale[0] - 1}", str(skip_frames))
    _like_input("bias", bias, input, (channels,))
    if residual is not None:
        _same_device("residual", residual, "input", input)
        _same_dtype("residual", residual, "input", input)
        _dim("residual", residual, 5)
        held = residual.shape[1]
        if held == 0 or held % parts != 0 or channels % held != 0:
            expected = f"channels that are a multiple of {parts} and divide those of input {_shape_text(input.shape)}"
            _fail("residual", expected, "shape " + _shape_text(residual.shape))
        _shape("residual", residual, (batch, held, frames, height, width))
    time, rows, columns = upscale
    shape = (
        batch,
        channels // parts,
        frames if frames == 0 else frames * time - skip_frames,
        height * rows,
        width * columns,
    )
    _output("out", out, "input", input, shape)
    return shape


def check_unpatchify(
    input: Tensor,
    *,
    bias: Tensor | None,
    patch_size: int,
    clamp: bool,
    out: Tensor | None = None,
    float64: bool = False,
) -> tuple[int, ...]:
    """Returns the shape of the result."""
    _video(input, float64)
    if not 1 <= patch_size <= _MAX_GROWTH:
        _fail("patch_size", f"a number from 1 to {_MAX_GROWTH}", str(patch_size))
    batch, channels, frames, height, width = input.shape
    if channels % patch_size**2 != 0:
        expected = f"channels that are a multiple of {patch_size**2}"
        _fail("input", expected, "shape " + _shape_text(input.shape))
    _like_input("bias", bias, input, (channels,))
    shape = batch, channels // patch_size**2, frames, height * patch_size, width * patch_size
    _output("out", out, "input", input, shape)
    return shape


# ---- group_norm.cpp


def _hidden(input: Tensor, bias: Tensor | None, residual: Tensor | None, residual_bias: Tensor | None) -> None:
    """The operands of the sum that is normalised or upsampled, but for the input."""
    _bias("bias", bias, input)
    _like_input("residual", residual, input, input.shape)
    _bias("residual_bias", residual_bias, input)


def _bias(name: str, bias: Tensor | None, input: Tensor) -> None:
    if bias is not None:
        _same_device(name, bias, "input", input)
        _same_dtype(name, bias, "input", input)
        batch, channels = input.shape[:2]
        if tuple(bias.shape) not in ((channels,), (batch, channels)):
            expected = f"shape {_shape_text((channels,))} or {_shape_text((batch, channels))}"
            _fail(name, expected, _shape_text(bias.shape))


def channels_last_order(x: Tensor) -> torch.memory_format:
    """Of an image, or of a video."""
    return torch.channels_last_3d if x.dim() == 5 else torch.channels_last


def check_image_or_video(input: Tensor, float64: bool = False) -> None:
    if input.dim() not in (4, 5):
        _fail("input", "4 or 5 dimensions", "shape " + _shape_text(input.shape))
    _float_dtype("input", input, float64)


def check_group_norm(
    input: Tensor,
    *,
    bias: Tensor | None,
    residual: Tensor | None,
    residual_bias: Tensor | None,
    weight: Tensor | None,
    bias_norm: Tensor | None,
    groups: int,
    eps: float,
    silu: bool,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    float64: bool = False,
) -> None:
    check_image_or_video(input, float64)
    channels = input.shape[1]
    if groups < 1 or channels % groups != 0:
        _fail("groups", f"a divisor of the {channels} channels of input", str(groups))
    _eps(eps)
    _hidden(input, bias, residual, residual_bias)
    _like_input("weight", weight, input, (channels,))
    _like_input("bias_norm", bias_norm, input, (channels,))
    _output("out", out, "input", input, input.shape)
    _output("residual_out", residual_out, "input", input, input.shape)


def check_upsample_nearest(
    input: Tensor,
    *,
    bias: Tensor | None,
    residual: Tensor | None,
    residual_bias: Tensor | None,
    scale: Sequence[int],
    out: Tensor | None = None,
    float64: bool = False,
) -> tuple[int, ...]:
    """Returns the shape of the result."""
    check_image_or_video(input, float64)
    if len(scale) != 2 or not all(1 <= factor <= _MAX_GROWTH for factor in scale):
        _fail("scale", f"two numbers from 1 to {_MAX_GROWTH}", _shape_text(scale))
    _hidden(input, bias, residual, residual_bias)
    *leading, height, width = input.shape
    shape = (*leading, height * scale[0], width * scale[1])
    _output("out", out, "input", input, shape)
    return shape
