"""Calls of the public functions: seeded inputs, fp64 truth, the terms of the error bound, and eager torch.

A case is a function's name and its arguments by name. `eager` is plain torch as model code writes it, in the tensors'
own dtypes; `terms` evaluates the formula with every summand replaced by its absolute value, which is what the rounding
errors of the sums are measured in.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import Truth, attention_eager
from .memory import Layout, copied, place

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# The tensors each function of the norm family takes beside its input.
NORM_OPS: dict[str, tuple[str, ...]] = {
    "rmsnorm": ("weight",),
    "rmsnorm_residual": ("residual", "weight"),
    "layernorm": ("weight", "bias"),
    "adaln_rmsnorm": ("weight", "scale", "shift"),
    "adaln_layernorm": ("weight", "bias", "scale", "shift"),
    "adaln_zero": ("weight", "scale", "shift", "gate"),
    "gated_residual": ("residual", "gate"),
    "gated_residual_adaln_rmsnorm": ("residual", "gate", "weight", "scale", "shift"),
    "gated_residual_adaln_layernorm": ("residual", "gate", "weight", "bias", "scale", "shift"),
    "norm_residual": ("residual", "gate", "weight"),
    "norm_gated_residual_norm": ("residual", "gate", "weight1", "weight2", "scale", "shift"),
    "adaln_rmsnorm_pair": ("weight", "scale", "shift", "scale2", "shift2"),
    "adaln_layernorm_pair": ("weight", "bias", "scale", "shift", "scale2", "shift2"),
    "gated_residual_adaln_rmsnorm_pair": ("residual", "gate", "weight", "scale", "shift", "scale2", "shift2"),
    "gated_residual_adaln_layernorm_pair": ("residual", "gate", "weight", "bias", "scale", "shift", "scale2", "shift2"),
}
MODULATORS = ("scale", "shift", "gate", "scale2", "shift2")
WEIGHTS = ("weight", "weight1", "weight2")
# Those with a `_quant` twin.
QUANTISED_NORMS = (
    "rmsnorm",
    "rmsnorm_residual",
    "layernorm",
    "adaln_rmsnorm",
    "adaln_layernorm",
    "gated_residual",
    "gated_residual_adaln_rmsnorm",
    "gated_residual_adaln_layernorm",
    "norm_gated_residual_norm",
    "adaln_rmsnorm_pair",
    "adaln_layernorm_pair",
    "gated_residual_adaln_rmsnorm_pair",
    "gated_residual_adaln_layernorm_pair",
)


def offers_offset(op: str) -> bool:
    return op in ("rmsnorm", "rmsnorm_residual", "norm_residual", "norm_gated_residual_norm")


def eps_names(op: str) -> tuple[str, ...]:
    if op == "gated_residual":
        return ()
    return ("eps1", "eps2") if op == "norm_gated_residual_norm" else ("eps",)


def optional(op: str) -> list[str]:
    """The tensors of a norm that may be None or left out."""
    required = {"residual", *(("scale", "scale2") if "adaln" in op and not _may_be_plain(op) else ())}
    if op in ("adaln_zero", "gated_residual"):
        required.add("gate")
    return [name for name in NORM_OPS[op] if name not in required]


def _may_be_plain(op: str) -> bool:
    return op.startswith("gated_residual_adaln") and not op.endswith("_pair")


TINY = torch.finfo(torch.float32).smallest_normal  # smaller numbers are no closer together than those just above it

# Name of the function, its own arguments, and whether it takes two tensors, one packed, or one.
ACTIVATIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "geglu tanh": ("geglu", {"approximate": "tanh"}, "packed"),
    "geglu erf": ("geglu", {"approximate": "none"}, "packed"),
    "geglu erf, gate last": ("geglu", {"approximate": "none", "gate_first": False}, "packed"),
    "geglu of two": ("geglu", {}, "two"),
    "swiglu": ("swiglu", {}, "packed"),
    "swiglu, gate last": ("swiglu", {"gate_first": False}, "packed"),
    "swiglu of two": ("swiglu", {}, "two"),
    "gelu erf": ("gelu", {}, "one"),
    "gelu tanh": ("gelu", {"approximate": "tanh"}, "one"),
    "gelu erf, bias": ("gelu", {"approximate": "none"}, "bias"),
    "gelu tanh, bias": ("gelu", {"approximate": "tanh"}, "bias"),
}
# The same of swiglu_clamped, which has no quantising twin.
CLAMPED: dict[str, tuple[str, dict[str, Any], str]] = {
    "swiglu_clamped": ("swiglu_clamped", {}, "packed"),
    "swiglu_clamped, halves": ("swiglu_clamped", {"layout": "half", "alpha": 1.3, "limit": 2.5}, "packed"),
    "swiglu_clamped of two": ("swiglu_clamped", {"limit": 1.0}, "two"),
}


class Make:
    """Seeded normal tensors of one device, the same on every device."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int = 0):
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        std: float = 1.0,
        mean: float = 0.0,
        layout: Layout | str = "contiguous",
    ) -> Tensor:
        values = torch.randn(shape, generator=self._generator) * std + mean
        return place(values.to(device=self.device, dtype=dtype or self.dtype), layout)

    def integers(self, *shape: int, low: int = -4, high: int = 5, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randint(low, high, shape, generator=self._generator)
        return values.to(device=self.device, dtype=dtype or self.dtype)


@dataclasses.dataclass
class Case:
    op: str
    kwargs: dict[str, Any]
    # The table that rope_1d and rope_3d stand for, and other arguments that only the expectation needs.
    table: tuple[Tensor, Tensor] | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        found = {}
        for name, value in self.kwargs.items():
            for i, item in enumerate(value if isinstance(value, tuple) else (value,)):
                if isinstance(item, Tensor):
                    found[name if not isinstance(value, tuple) else f"{name}[{i}]"] = item
        return found

    @property
    def is_activation(self) -> bool:
        return self.op in ("geglu", "swiglu", "gelu")

    @property
    def packs_gate_and_up(self) -> bool:
        return self.op in ("geglu", "swiglu", "swiglu_clamped") and self.kwargs.get("up") is None

    @property
    def is_rotary(self) -> bool:
        return self.op.startswith(("apply_rotary", "rope", "qk_norm_rope"))

    @property
    def is_attention(self) -> bool:
        return self.op in ("attention", "qk_norm_cross_attention")

    @property
    def takes_rounding(self) -> bool:
        return self.op not in ("rope_1d", "rope_3d") and not self.is_attention

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that outputs are like."""
        if self.is_attention:
            return (self.kwargs["query"],)
        if "query" in self.kwargs:
            return self.kwargs["query"], self.kwargs["key"]
        return (self.kwargs["input"],)

    @property
    def output_names(self) -> tuple[str, ...]:
        """How outputs are handed in: `out=` (a pair for query and key), `residual_out=`."""
        names = ("out", "out2") if self.op.endswith("_pair") else ("out",)
        returns_residual = "residual" in self.kwargs and self.op not in ("gated_residual", "norm_residual")
        return (*names, "residual_out") if returns_residual else names

    def replace(self, **kwargs: Any) -> Case:
        return dataclasses.replace(self, kwargs={**self.kwargs, **kwargs})

    def map(self, function: Any) -> Case:
        """The same call with `function` applied to every tensor."""

        def mapped(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(mapped(item) for item in value)
            return function(value) if isinstance(value, Tensor) else value

        return dataclasses.replace(self, kwargs={name: mapped(value) for name, value in self.kwargs.items()})

    def on(self, device: str) -> Case:
        """The same call on copies of all memory."""
        copies = iter(copied(device, *self.tensors.values()))
        return self.map(lambda _: next(copies))

    def batch(self, index: int) -> Case | None:
        """The same call on one entry of the first dimension, in views; None where there is but one."""
        first = self.inputs[0]
        count = first.shape[0] if first.dim() > 1 else 1
        if count < 2:
            return None

        def narrowed(name: str, value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(narrowed(name, item) for item in value)
            if name == "index":
                return value[index : index + 1] if value.dim() == first.dim() - 1 and value.shape[0] == count else value
            if name == "key_lengths" and value is not None:  # [B], unlike all other operands of one dimension
                return value[index : index + 1]
            if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[0] != count:
                return value
            if self.is_rotary:
                has_batch = name in ("input", "query", "key") or value.dim() > 2 or name == "positions"
            elif "index" in self.kwargs and name in MODULATORS:  # [rows, H] or [B, rows, H]
                has_batch = value.dim() == 3
            else:  # two dimensions are per batch, all others broadcast
                has_batch = self.op.startswith("gate_heads") or value.dim() == 2 or value.dim() == first.dim()
            return value[index : index + 1] if has_batch else value

        return dataclasses.replace(self, kwargs={name: narrowed(name, value) for name, value in self.kwargs.items()})

    def in_layout(self, layout: Layout | str) -> Case:
        return self.map(lambda tensor: place(tensor, layout))

    def run(self, module: Any, **outputs: Any) -> tuple[Tensor, ...]:
        result = getattr(module, self.op)(**self.kwargs, **outputs)
        return result if isinstance(result, tuple) else (result,)

    def truth(self, ltx: Any) -> tuple[Tensor, ...]:
        """The formula in fp64 on the same values."""
        if self.is_attention:
            return (Truth(self.kwargs).output(),)
        wide = self.map(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
        if "positions" in self.kwargs:  # a dtype of its own, which is part of the formula
            wide = wide.replace(positions=self.kwargs["positions"])
        for name in {"eps", "eps1", "eps2"} & set(self.kwargs):
            eps = self.kwargs[name]  # None means the compute dtype's
            pair = isinstance(eps, tuple)
            wide = wide.replace(
                **{name: tuple(_eps({"eps": e}, self.op) for e in eps) if pair else _eps(self.kwargs, self.op, name)}
            )
        for name in ("rounding", "cast_before_weight"):
            wide.kwargs.pop(name, None)
        return wide.run(ltx.reference)

    def terms(self, ltx: Any) -> tuple[Tensor, ...]:
        if self.op in NORM_OPS:
            return _norm_terms(self.op, self.kwargs)
        if self.is_activation:
            return (_activation_terms(self.op, self.kwargs),)
        if self.op == "swiglu_clamped":
            return (_clamped_terms(self.kwargs),)
        if self.op == "gate_heads":
            return (_head_gate_terms(self.kwargs),)
        if self.is_attention:
            return (Truth(self.kwargs).terms(ltx._variant.COMPILED_DEVICE == "cuda"),)
        return _rotary_terms(self, ltx)

    def eager(self) -> tuple[Tensor, ...]:
        """Plain torch in the tensors' own dtypes, as the model libraries write it."""
        if self.op in NORM_OPS:
            return _norm_eager(self.op, self.kwargs)
        if self.is_activation:
            return (activation_eager(self.op, self.kwargs),)
        if self.op == "swiglu_clamped":
            return (_clamped_eager(self.kwargs),)
        if self.op == "gate_heads":
            return (self.kwargs["input"] * _head_gates(self.kwargs),)
        if self.is_attention:
            return (attention_eager(self.kwargs),)
        return _rotary_eager(self)


# ---- Norms


def modulator_shape(kind: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The forms that a modulation input comes in, for an input of `shape` [B, ..., H]."""
    batch, hidden = shape[0], shape[-1]
    ones = (1,) * (len(shape) - 2)
    return {
        "per batch": (batch, hidden),
        "one for all batches": (1, hidden),
        "vector": (hidden,),
        "[B, 1, H]": (batch, *ones, hidden),
        "[1, S, H]": (1, *shape[1:]),
        "[B, S, H]": tuple(shape),
        "[S, H]": tuple(shape[1:]),
        "[B, S, 1]": (*shape[:-1], 1),
        "one number": (1,),
    }[kind]


def norm_case(
    op: str,
    make: Make,
    shape: Sequence[int],
    *,
    param_dtype: torch.dtype | None = None,
    modulation_dtype: torch.dtype | None = None,
    table_dtype: torch.dtype | None = None,
    modulation: str = "[B, 1, H]",
    tables: Sequence[str] = (),
    without: Sequence[str] = (),
    **options: Any,
) -> Case:
    """A call of `op` on an input of `shape`; `tables` and `without` name its modulation inputs.

    table_dtype: None: modulation_dtype.
    """
    hidden = shape[-1]
    kwargs: dict[str, Any] = {"input": make(*shape)}
    for name in NORM_OPS[op]:
        if name in without:
            if name in ("weight", "shift", "shift2", "gate") and (op.startswith("adaln") or op.endswith("_pair")):
                kwargs[name] = None  # in front of arguments that must be given
            continue
        if name == "residual":
            kwargs[name] = make(*shape)
        elif name in MODULATORS:
            kwargs[name] = make(*modulator_shape(modulation, shape), dtype=modulation_dtype)
        else:
            kwargs[name] = make(hidden, dtype=param_dtype, mean=1.0 if name in WEIGHTS else 0.0)
    for name in tables:
        kwargs[f"{name}_table"] = make(hidden, dtype=table_dtype or modulation_dtype)
    return Case(op, {**kwargs, **options})


def fp32_parameters_case(op: str, make: Make, shape: Sequence[int], **options: Any) -> Case:
    """Weights, biases and tables in fp32 beside a modulation of each token in the input's dtype, as in Wan 2.2 5B."""
    tables = [name for name in MODULATORS if name in NORM_OPS[op]]
    fp32 = {"param_dtype": torch.float32, "table_dtype": torch.float32}
    return norm_case(op, make, shape, modulation="[B, S, H]", tables=tables, **fp32, **options)


def index_case(
    op: str,
    make: Make,
    shape: Sequence[int],
    *,
    rows: int = 3,
    per_batch: bool = False,
    index_shape: Sequence[int] | None = None,
    index_dtype: torch.dtype = torch.int64,
    modulation_dtype: torch.dtype | None = None,
    **options: Any,
) -> Case:
    """A call of `op` whose modulations are `rows` rows, [rows, H] or [B, rows, H], and whose index names one for each
    row of the input: [B, S], or `index_shape`."""
    case = norm_case(op, make, shape, modulation_dtype=modulation_dtype, **options)
    size = (shape[0], rows, shape[-1]) if per_batch else (rows, shape[-1])
    for name in MODULATORS:
        if case.kwargs.get(name) is not None:
            case.kwargs[name] = make(*size, dtype=modulation_dtype)
    high = min(rows, 2) if index_dtype == torch.bool else rows
    index = make.integers(*(shape[:-1] if index_shape is None else index_shape), low=0, high=high, dtype=index_dtype)
    return case.replace(index=index)


# Calls with an index that models make: columns, and what they leave out. Qwen-Image-Edit has 3072 columns, Z-Image
# 3840.
MODEL_INDEX: dict[str, tuple[int, tuple[str, ...]]] = {
    "adaln_layernorm": (3072, ("weight", "bias")),
    "gated_residual": (3072, ()),
    "gated_residual_adaln_layernorm": (3072, ("weight", "bias")),
    "adaln_rmsnorm": (3840, ("shift",)),
    "norm_residual": (3840, ()),
    "norm_gated_residual_norm": (3840, ("shift",)),
}


def model_index_case(op: str, make: Make, width: int | None = None, **options: Any) -> Case:
    """A call of MODEL_INDEX, with two samples of nine tokens, or of another width."""
    own, without = MODEL_INDEX[op]
    return index_case(op, make, (2, 9, width or own), per_batch=True, without=without, **options)


def without_index(case: Case) -> Case:
    """The same call with a modulation for each row, written out."""
    kwargs = {name: value for name, value in case.kwargs.items() if name != "index"}
    device = case.inputs[0].device
    # Written out on the host: compute-sanitizer would not know what a kernel of torch writes.
    on_host = {name: value.cpu() for name, value in case.kwargs.items() if isinstance(value, Tensor)}
    return dataclasses.replace(case, kwargs=kwargs).replace(
        **{
            name: _broadcast(on_host[name], on_host).contiguous().to(device)
            for name in MODULATORS
            if kwargs.get(name) is not None
        }
    )


def _broadcast(value: Tensor, kwargs: dict[str, Any]) -> Tensor:
    input, index = kwargs["input"], kwargs.get("index")
    if index is not None:
        rows = index.long().expand(input.shape[:-1])
        if value.dim() == 2:
            return value[rows]
        batch = torch.arange(input.shape[0], device=value.device).view(-1, *(1,) * (input.dim() - 2))
        return value.expand(input.shape[0], -1, -1)[batch, rows]
    if value.dim() == 2 and input.dim() >= 3:
        return value.view(value.shape[0], *(1,) * (input.dim() - 2), value.shape[1])
    return value


def _eps(kwargs: dict[str, Any], op: str, name: str = "eps") -> float:
    eps = kwargs.get(name, 1e-5 if "layernorm" in op else 1e-6)
    return torch.finfo(torch.float32).eps if eps is None else eps


def _norm_terms(op: str, kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    def wide(name: str) -> Tensor | None:
        return None if kwargs.get(name) is None else kwargs[name].double()

    def modulator(name: str, signed: bool = False) -> Tensor | float:
        value, table = wide(name), wide(f"{name}_table")
        assert value is not None
        value = _broadcast(value, kwargs)
        if signed:
            return value if table is None else value + table
        return value.abs() if table is None else value.abs() + table.abs()

    def weighed(n: Tensor, weight: Tensor | None) -> Tensor:
        return n if weight is None else n * (weight.abs() + abs(kwargs.get("weight_offset", 0.0)))

    h = kwargs["input"].double()
    magnitude = h.abs()
    residual = wide("residual")
    two_norms = op == "norm_gated_residual_norm"
    if op.startswith("norm_"):
        weight, eps = wide("weight1" if two_norms else "weight"), _eps(kwargs, op, "eps1" if two_norms else "eps")
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
        magnitude = weighed(h.abs(), weight)
        h = h if weight is None else h * (weight + kwargs.get("weight_offset", 0.0))
    if residual is not None:
        if kwargs.get("gate") is not None:
            h = h * modulator("gate", signed=True)
            magnitude = (magnitude * modulator("gate")).clamp(min=TINY)
        h = residual + h
        magnitude = residual.abs() + magnitude
    if op in ("gated_residual", "norm_residual"):
        return (magnitude,)
    n = magnitude
    if "layernorm" in op:
        n = n + magnitude.mean(-1, keepdim=True).clamp(min=TINY)
        h = h - h.mean(-1, keepdim=True)
    variance = h.square().mean(-1, keepdim=True) + _eps(kwargs, op, "eps2" if two_norms else "eps")
    if residual is not None:  # where residual and input cancel, so does the statistic
        n = n + h.abs() * (h.abs() * magnitude).mean(-1, keepdim=True) / variance
    n = (n * torch.rsqrt(variance)).clamp(min=TINY)
    bias = wide("bias")
    n = weighed(n, wide("weight2" if two_norms else "weight"))
    if bias is not None:
        n = n + bias.abs()
    results = []
    for scale, shift in (("scale", "shift"), ("scale2", "shift2"))[: 2 if op.endswith("_pair") else 1]:
        result = n
        if kwargs.get(scale) is not None:
            result = result * (1 + modulator(scale))
        if kwargs.get(shift) is not None:
            result = result + modulator(shift)
        if op == "adaln_zero":
            result = result * modulator("gate")
        results.append(result)
    return (*results, magnitude) if residual is not None else tuple(results)


def _norm_eager(op: str, kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    def modulator(name: str) -> Tensor | None:
        value, table = kwargs.get(name), kwargs.get(f"{name}_table")
        if value is None:
            return None
        value = _broadcast(value, kwargs)
        return value if table is None else table + value

    x, residual = kwargs["input"], kwargs.get("residual")
    dtype, bias, offset = x.dtype, kwargs.get("bias"), kwargs.get("weight_offset", 0.0)
    two_norms = op == "norm_gated_residual_norm"

    def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        if weight is None:
            return n.to(dtype)
        if offset or not kwargs.get("cast_before_weight", True):
            return (n * (offset + weight.float())).to(dtype)
        return n.to(dtype) * weight

    if op.startswith("norm_"):
        x = rms(x, kwargs.get("weight1" if two_norms else "weight"), _eps(kwargs, op, "eps1" if two_norms else "eps"))
    gate = modulator("gate")
    if residual is not None:
        x = (residual + (x if gate is None else x * gate)).to(dtype)
    h = x
    if op in ("gated_residual", "norm_residual"):
        return (h,)
    weight, eps = kwargs.get("weight2" if two_norms else "weight"), _eps(kwargs, op, "eps2" if two_norms else "eps")
    if "layernorm" in op:
        wide = [None if p is None else p.float() for p in (weight, bias)]
        n = F.layer_norm(h.float(), h.shape[-1:], *wide, eps).to(dtype)
    else:
        n = rms(h, weight, eps)
    results = []
    for scale, shift in (("scale", "shift"), ("scale2", "shift2"))[: 2 if op.endswith("_pair") else 1]:
        result, factor, addend = n, modulator(scale), modulator(shift)
        if factor is not None:
            result = result * (1 + factor)
        if addend is not None:
            result = result + addend
        if op == "adaln_zero":
            result = result * gate
        results.append(result.to(dtype))
    return (*results, h) if residual is not None else tuple(results)


# ---- Activations


def activation_case(name: str, make: Make, shape: Sequence[int], **options: Any) -> Case:
    """`shape` is that of the output."""
    op, own, form = {**ACTIVATIONS, **CLAMPED}[name]
    width = shape[-1]
    kwargs: dict[str, Any] = {"input": make(*shape[:-1], 2 * width if form == "packed" else width, std=2.0)}
    if form == "two":
        kwargs["up"] = make(*shape)
    if form == "bias":
        kwargs["bias"] = make(width, dtype=options.pop("param_dtype", None))
    return Case(op, {**kwargs, **own, **options})


def gate_and_up(op: str, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    if op == "gelu" or kwargs.get("up") is not None:
        return kwargs["input"], kwargs.get("up")
    first, second = kwargs["input"].chunk(2, -1)
    return (first, second) if kwargs.get("gate_first", True) else (second, first)


def _is_tanh(op: str, kwargs: dict[str, Any]) -> bool:
    return op != "swiglu" and kwargs.get("approximate", "none" if op == "gelu" else "tanh") == "tanh"


def _activation_terms(op: str, kwargs: dict[str, Any]) -> Tensor:
    gate, up = gate_and_up(op, kwargs)
    x = gate.double()
    total = torch.zeros_like(x)
    magnitude = x.abs()
    if kwargs.get("bias") is not None:
        magnitude = magnitude + kwargs["bias"].double().abs()
        x = x + kwargs["bias"].double()
        total = 1.2 * magnitude  # no activation is steeper
    if _is_tanh(op, kwargs):
        # The argument of the sigmoid is a sum; its error counts as much as the sigmoid is steep there.
        argument = 2 * math.sqrt(2 / math.pi) * (magnitude + 0.044715 * magnitude**3)
        sigmoid = torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
        total = total + x.abs() * sigmoid * (1 - sigmoid) * argument
    return total if up is None else total * up.double().abs()


def activation_eager(op: str, kwargs: dict[str, Any], compute: torch.dtype | None = None) -> Tensor:
    """Eager torch's result; with `compute`, the activation is computed in that dtype and rounded to the gate's."""
    gate, up = gate_and_up(op, kwargs)
    if kwargs.get("bias") is not None:
        gate = (gate + kwargs["bias"]).to(gate.dtype)
    approximate = "tanh" if _is_tanh(op, kwargs) else "none"
    x = gate.to(compute or gate.dtype)
    activated = (F.silu(x) if op == "swiglu" else F.gelu(x, approximate=approximate)).to(gate.dtype)
    return activated if up is None else activated * up


def _clamped_gate_and_up(kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    gate, up = kwargs["input"], kwargs.get("up")
    if up is None:
        half = kwargs.get("layout") == "half"
        gate, up = gate.chunk(2, -1) if half else gate.unflatten(-1, (-1, 2)).unbind(-1)
    limit = kwargs.get("limit", 7.0)
    return gate.clamp(max=limit), up.clamp(-limit, limit)


def _clamped_eager(kwargs: dict[str, Any]) -> Tensor:
    gate, up = _clamped_gate_and_up(kwargs)
    return (up + 1) * (gate * torch.sigmoid(gate * kwargs.get("alpha", 1.702)))


def _clamped_terms(kwargs: dict[str, Any]) -> Tensor:
    gate, up = (x.double() for x in _clamped_gate_and_up(kwargs))
    argument = gate * kwargs.get("alpha", 1.702)
    return gate.abs() * torch.sigmoid(argument) * (1 + argument.abs()) * (up.abs() + 1)


def gate_heads_case(make: Make, shape: Sequence[int], *, per_head: bool = True, **options: Any) -> Case:
    """gate_heads of an input [..., heads, D]."""
    *leading, heads, width = shape
    logits = make(*leading, heads if per_head else heads * width, std=3.0)
    return Case("gate_heads", {"input": make(*shape), "logits": logits, **options})


def _head_gates(kwargs: dict[str, Any], sigmoid: Any = torch.sigmoid) -> Tensor:
    heads = kwargs["input"].shape[-2:]
    logits = kwargs["logits"]
    logits = logits[..., None] if logits.shape[-1] == heads[0] else logits.unflatten(-1, heads)
    return kwargs.get("scale", 1.0) * sigmoid(logits)


def _head_gate_terms(kwargs: dict[str, Any]) -> Tensor:
    def steep(logits: Tensor) -> Tensor:
        return torch.sigmoid(logits.double()) * (1 + logits.double().abs())

    return kwargs["input"].double().abs() * _head_gates(kwargs, steep).abs()


# ---- Rotary

# Shapes of a table for heads of width D, by (batch, sequence, heads, D). None of the sizes may equal another.
TABLES = {
    "[S, D]": lambda b, s, h, d: (s, d),
    "[S, D/2]": lambda b, s, h, d: (s, d // 2),
    "[B, S, D]": lambda b, s, h, d: (b, s, d),
    "[1, S, D/2]": lambda b, s, h, d: (1, s, d // 2),
    "[B, H, S, D]": lambda b, s, h, d: (b, h, s, d),
    "[B, H, S, D/2]": lambda b, s, h, d: (b, h, s, d // 2),
    "[B, 1, S, D]": lambda b, s, h, d: (b, 1, s, d),
    "[1, H, S, D/2]": lambda b, s, h, d: (1, h, s, d // 2),
    "[B, S, H, D/2]": lambda b, s, h, d: (b, s, h, d // 2),
    "[B, S, 1, D]": lambda b, s, h, d: (b, s, 1, d),
    "[1, S, 1, D]": lambda b, s, h, d: (1, s, 1, d),
    "[1, D]": lambda b, s, h, d: (1, d),
    "[S, H*D]": lambda b, s, h, d: (s, h * d),
    "[B, S, H*D]": lambda b, s, h, d: (b, s, h * d),
    "[B, S, H*D/2]": lambda b, s, h, d: (b, s, h * d // 2),
    "[1, S, H*D]": lambda b, s, h, d: (1, s, h * d),
}


def rotary_case(
    make: Make,
    sizes: tuple[int, int, int, int],
    *,
    table: str = "[S, D]",
    table_dtype: torch.dtype = torch.float32,
    key: tuple[int, int] | None = None,
    heads_first: bool = False,
    rotary_dim: int | None = None,
    **options: Any,
) -> Case:
    """apply_rotary, or apply_rotary_qk with `key` = its (sequence, heads), of [B, S, heads, D] or [B, heads, S, D].

    The tables hold random numbers, not cosines: any mistaken index shows.
    """
    batch, sequence, heads, width = sizes

    def tensor(s: int, h: int) -> Tensor:
        return make(batch, h, s, width) if heads_first else make(batch, s, h, width)

    kwargs: dict[str, Any] = {"query" if key else "input": tensor(sequence, heads)}
    if key:
        kwargs["key"] = tensor(*key)
    shape = TABLES[table](batch, max(sequence, key[0]) if key else sequence, heads, rotary_dim or width)
    kwargs["cos"], kwargs["sin"] = make(*shape, dtype=table_dtype), make(*shape, dtype=table_dtype)
    if heads_first:
        kwargs["sequence_dim"] = 2
    return Case("apply_rotary_qk" if key else "apply_rotary", {**kwargs, **options})


def qk_norm_rope_case(
    make: Make,
    sizes: tuple[int, int, int, int],
    *,
    across_heads: bool,
    key: tuple[int, int] | None = None,
    table: str = "[S, D]",
    key_table: bool = False,
    table_dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = None,
    weights: bool = True,
    biases: bool = False,
    **options: Any,
) -> Case:
    """qk_norm_rope of [B, S, heads, D]; `key` = its (sequence, heads); `key_table`: the key has tables of its own.

    `biases`: the layer norm that `options` ask for has them.
    """
    batch, sequence, heads, width = sizes
    key_sequence, key_heads = key or (sequence, heads)

    def weight(h: int, mean: float = 1.0) -> Tensor | None:
        return make(h * width if across_heads else width, dtype=weight_dtype, mean=mean) if weights else None

    def tables(s: int, h: int) -> tuple[Tensor, Tensor]:
        shape = TABLES[table](batch, s, h, width)
        return make(*shape, dtype=table_dtype), make(*shape, dtype=table_dtype)

    kwargs: dict[str, Any] = {
        "query": make(batch, sequence, heads, width),
        "key": make(batch, key_sequence, key_heads, width),
        "query_weight": weight(heads),
        "key_weight": weight(key_heads),
    }
    if key_table:
        pairs = tables(sequence, heads), tables(key_sequence, key_heads)
        kwargs["cos"], kwargs["sin"] = tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)
    else:
        kwargs["cos"], kwargs["sin"] = tables(max(sequence, key_sequence), heads)
    if biases:
        kwargs["query_bias"], kwargs["key_bias"] = weight(heads, 0.0), weight(key_heads, 0.0)
    return Case("qk_norm_rope", {**kwargs, "across_heads": across_heads, **options})


def angle_table(positions: Sequence[Tensor], widths: Sequence[int], bases: Sequence[float]) -> tuple[Tensor, Tensor]:
    """cos and sin [..., D / 2] in fp64 of the fp32 angles of rope_1d and rope_3d, one axis after another."""
    angles = []
    for position, width, base in zip(positions, widths, bases, strict=True):
        inverse = torch.tensor([1.0 / base ** (2 * j / width) for j in range(width // 2)], dtype=torch.float64)
        angles.append(position.float().cpu()[..., None] * inverse.float())
    angle = torch.cat(angles, -1).double()
    return angle.cos(), angle.sin()


def rope_case(
    make: Make,
    sizes: tuple[int, int, int],
    *,
    sequence: int | None = None,
    grid: tuple[int, int, int] | None = None,
    key_heads: int | None = None,
    **options: Any,
) -> Case:
    """rope_1d over `sequence` tokens or rope_3d over a `grid`, of sizes (batch, heads, D)."""
    batch, heads, width = sizes
    tokens = sequence if grid is None else math.prod(grid)
    assert tokens is not None
    kwargs: dict[str, Any] = {"query": make(batch, tokens, heads, width)}
    kwargs["key"] = make(batch, tokens, key_heads or heads, width)
    base = options.get("theta_base", 10000.0)
    if grid is None:
        positions = options.get("positions")
        axes, widths, bases = [torch.arange(tokens) if positions is None else positions], [width], [base]
    else:
        kwargs.update(zip(("num_frames", "height", "width"), grid, strict=True))
        axes = list(torch.cartesian_prod(*(torch.arange(n) for n in grid)).reshape(-1, 3).unbind(-1))
        third = 2 * (width // 3 // 2)
        widths = list(options.get("rope_dims") or (third, third, width - 2 * third))
        bases = [base] * 3 if isinstance(base, float | int) else list(base)
    table = angle_table(axes, widths, bases)
    device = kwargs["query"].device
    return Case(
        "rope_1d" if grid is None else "rope_3d",
        {**kwargs, **options},
        table=(table[0].to(device), table[1].to(device)),
    )


# Which keys a mask leaves to the queries of each batch.
MASKS = ["none", "addends", "text", "least numbers", "one for all batches", "left out", "nothing left"]


def attention_mask(make: Make, batch: int, keys: int, kind: str, dtype: torch.dtype | None) -> Tensor | None:
    """[B or 1, T] addends: any numbers; -10000 after a text; -inf for some keys; or in the last batch for all of them
    -inf, or the least number that there is."""
    if kind == "none":
        return None
    batch = 1 if kind == "one for all batches" else batch
    values = make(batch, keys, dtype=dtype)
    place = torch.arange(keys, device=values.device)
    if kind == "left out":
        return values.masked_fill((values > 0) & (place > 0), -math.inf)
    after = {"text": -10000.0, "least numbers": torch.finfo(values.dtype).min, "nothing left": -math.inf}.get(kind)
    if after is None:
        return values
    parts, batches_behind = (batch + 1, 1) if kind == "text" else (batch, 0)
    kept = (torch.arange(batch, device=values.device).flip(0)[:, None] + batches_behind) * keys // parts
    return torch.where(place < kept, 0.0, after).to(values.dtype)


def plain_attention_case(
    make: Make,
    sizes: tuple[int, int, int, int],
    keys: int,
    *,
    key_heads: int | None = None,
    packed: bool = False,
    **options: Any,
) -> Case:
    """attention of a query [B, S, heads, D] to `keys` keys; `packed`: key and value are one tensor."""
    batch, _, heads, width = sizes
    kwargs: dict[str, Any] = {"query": make(*sizes)}
    heads = heads if key_heads is None else key_heads
    if packed:
        both = make(batch, keys, 2 * heads * width)
        kwargs["key"], kwargs["value"] = (part.unflatten(-1, (heads, width)) for part in both.chunk(2, -1))
    else:
        kwargs["key"], kwargs["value"] = make(batch, keys, heads, width), make(batch, keys, heads, width)
    return Case("attention", {**kwargs, **options})


def attention_case(
    make: Make,
    sizes: tuple[int, int, int, int],
    keys: int,
    *,
    mask: str = "none",
    mask_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    weights: bool = True,
    packed: bool = False,
    **options: Any,
) -> Case:
    """qk_norm_cross_attention of a query [B, S, heads, D] to `keys` keys; `packed`: key and value are one tensor."""
    batch, _, heads, width = sizes
    kwargs = plain_attention_case(make, sizes, keys, packed=packed).kwargs
    for name in ("query_weight", "key_weight"):
        kwargs[name] = make(heads * width, dtype=weight_dtype, mean=1.0) if weights else None
    kwargs["mask"] = attention_mask(make, batch, keys, mask, mask_dtype)
    return Case("qk_norm_cross_attention", {**kwargs, **options})


def every_case(make: Make) -> dict[str, Case]:
    """One small call of every op, by name, with all the tensors that it takes."""
    found = {}
    for op, tensors in NORM_OPS.items():
        tables = [name for name in MODULATORS if name in tensors]
        found[op] = norm_case(op, make, (2, 3, 64), tables=tables)
    for op, per_batch in (("adaln_layernorm", False), ("gated_residual_adaln_rmsnorm", True)):
        found[f"{op} by index"] = index_case(op, make, (2, 3, 64), per_batch=per_batch, tables=["scale"])
    for name in ("geglu of two", "swiglu of two", "geglu erf", "gelu tanh, bias"):
        found[name] = activation_case(name, make, (2, 3, 64))
    found["swiglu_clamped"] = activation_case("swiglu_clamped", make, (2, 3, 64))
    sizes = (2, 5, 3, 16)
    for per_head in (True, False):
        found[f"gate_heads per {'head' if per_head else 'column'}"] = gate_heads_case(
            make, sizes, per_head=per_head, scale=2.0
        )
    found["apply_rotary"] = rotary_case(make, sizes)
    found["apply_rotary_qk"] = rotary_case(make, sizes, key=(4, 7), table="[S, D/2]")
    for across_heads in (True, False):
        name = f"qk_norm_rope {'across heads' if across_heads else 'per head'}"
        found[name] = qk_norm_rope_case(make, sizes, across_heads=across_heads, key=(4, 7), key_table=True)
        layer = {"norm": "layer", "biases": True, "weight_offset": 1.0}
        found[f"{name}, layer"] = qk_norm_rope_case(make, sizes, across_heads=across_heads, key=(4, 7), **layer)
    found["qk_norm_cross_attention"] = attention_case(make, sizes, 7, mask="addends")
    positions = torch.arange(5, device=make.device)
    found["rope_1d"] = rope_case(make, (2, 3, 16), sequence=5, key_heads=1, positions=positions)
    found["rope_3d"] = rope_case(make, (2, 3, 16), grid=(1, 5, 1), key_heads=1)
    return found


# Ops that have a quantising twin, `<op>_quant`.
QUANTISING = [*QUANTISED_NORMS, "geglu", "swiglu", "gelu", "gate_heads"]


def every_quantising_case(make: Make) -> dict[str, Case]:
    """One small call of every quantising op, as in every_case; and of one with a scale that is given."""
    cases = {name: case for name, case in every_case(make).items() if case.op in QUANTISING}
    found = {f"{name}, quantised": dataclasses.replace(case, op=f"{case.op}_quant") for name, case in cases.items()}
    found["quantize_rows"] = Case("quantize_rows", {"input": make(2, 3, 64)})
    scale = torch.tensor([0.01], device=make.device)
    found["gelu, scale given"] = found["gelu tanh, bias, quantised"].replace(static_scale=scale)
    for name in ("gelu tanh, bias", "swiglu of two"):
        found[f"{name}, quantised after a prefix"] = found[f"{name}, quantised"].replace(prefix=make(2, 3, 24))
    return found


def every_op(make: Make) -> dict[str, Case]:
    return {**every_case(make), **every_quantising_case(make)}


def every_function(make: Make) -> dict[str, Case]:
    """One small call of every public function that computes something, by its name.

    tests/test_completeness.py compares it with the package's __all__: a new function needs its line in every_case.
    """
    found = {case.op: case for case in every_op(make).values()}
    x, vector = make(2, 8, 3, 2, 4).contiguous(memory_format=torch.channels_last_3d), make(8)
    video = {"input": x, "bias": vector, "residual": make(2, 8, 3, 2, 4)}
    modulation = {"scale": make(2, 8), "shift": make(2, 8), "scale_table": vector, "shift_table": vector}
    norm = {**video, **modulation, "weight": vector, "noise": make(2, 4), "noise_scale": vector}
    found["channel_norm"] = Case("channel_norm", norm)
    found["channel_norm_residual"] = Case("channel_norm_residual", norm)
    found["pixel_shuffle_3d"] = Case("pixel_shuffle_3d", {**video, "upscale": (2, 2, 2)})
    found["unpatchify"] = Case("unpatchify", {"input": x, "bias": vector, "patch_size": 2})
    hidden = {**video, "residual_bias": make(2, 8)}
    group = {**hidden, "weight": vector, "bias_norm": vector, "groups": 4}
    found["group_norm"] = Case("group_norm", group)
    found["group_norm_residual"] = Case("group_norm_residual", group)
    found["upsample_nearest"] = Case("upsample_nearest", {**hidden, "scale": (2, 3)})
    found["attention"] = plain_attention_case(make, (2, 5, 3, 16), 7)
    found["quantize_weight"] = Case("quantize_weight", {"weight": make(16, 32)})
    values, weight = (make(rows, 32).to(torch.float8_e4m3fn) for rows in (4, 16))
    scales = {"scales": make(4, 1, dtype=torch.float32), "weight_scales": make(16, dtype=torch.float32)}
    tensors = {"values": values, "weight": weight, **scales, "bias": make(16, dtype=torch.bfloat16)}
    found["scaled_linear"] = Case("scaled_linear", tensors)
    parts = [make(4, width) for width in (16, 8)]
    found["linear_cat"] = Case("linear_cat", {"inputs": parts, "weight": make(8, 24), "bias": make(8)})
    return found


def _with_tables(case: Case) -> Case:
    """rope_1d and rope_3d as apply_rotary_qk with the fp64 table that they stand for."""
    assert case.table is not None
    kwargs = {name: case.kwargs[name] for name in ("query", "key", "layout") if name in case.kwargs}
    return Case("apply_rotary_qk", {**kwargs, "cos": case.table[0], "sin": case.table[1]})


def _rotary_terms(case: Case, ltx: Any) -> tuple[Tensor, ...]:
    """|x[a] * cos| + |x[b] * sin|: the rotation by each of the two tables alone, the other one being zero."""
    case = case if case.table is None else _with_tables(case)
    zeros = case.map(torch.zeros_like)
    parts = case.replace(sin=zeros.kwargs["sin"]), case.replace(cos=zeros.kwargs["cos"])
    if case.op == "qk_norm_rope":
        rotated = [_rotated(part.map(torch.Tensor.double), _heads_magnitude) for part in parts]
    else:
        rotated = [part.truth(ltx) for part in parts]
    return tuple(cos.abs() + sin.abs() for cos, sin in zip(*rotated, strict=True))


def _rotary_eager(case: Case) -> tuple[Tensor, ...]:
    return _rotated(case if case.table is None else _with_tables(case), _heads_normalised)


def _rotated(case: Case, normalise: Any) -> tuple[Tensor, ...]:
    """The rotation of what `normalise` makes of query and key, in the tensors' own dtypes."""
    kwargs = case.kwargs
    rows = max(x.shape[kwargs.get("sequence_dim", 1)] for x in case.inputs)
    outs = []
    for i, x in enumerate(case.inputs):
        cos, sin = (t[i] if isinstance(t, tuple) else t for t in (kwargs["cos"], kwargs["sin"]))
        heads_first = kwargs.get("sequence_dim", 1) == 2
        x = x.transpose(1, 2) if heads_first else x
        if case.op == "qk_norm_rope":
            vectors = [kwargs.get(f"{'key' if i else 'query'}_{name}") for name in ("weight", "bias")]
            n = normalise(x.flatten(-2) if kwargs["across_heads"] else x, *vectors, _eps_of(kwargs, i), kwargs)
            x = n.view(x.shape)
        own = isinstance(kwargs["cos"], tuple)
        tables = [_table_rows(t, x, x.shape[1] if own else rows) for t in (cos, sin)]
        out = _rotate(x, *tables, kwargs.get("rotary_dim"), kwargs.get("layout", "interleaved"))
        outs.append(out.transpose(1, 2) if heads_first else out)
    return tuple(outs)


def _eps_of(kwargs: dict[str, Any], operand: int) -> float:
    eps = kwargs.get("eps", 1e-6)
    eps = eps[operand] if isinstance(eps, tuple) else eps
    return torch.finfo(torch.float32).eps if eps is None else eps


def _heads_normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kwargs: dict[str, Any]
) -> Tensor:
    """torch.nn.RMSNorm, which rounds once after the weight, diffusers' RMSNorm, or torch.nn.LayerNorm."""
    factor = None if weight is None else weight.float() + kwargs.get("weight_offset", 0.0)
    if kwargs.get("norm") == "layer":
        return F.layer_norm(x.float(), x.shape[-1:], factor, None if bias is None else bias.float(), eps).to(x.dtype)
    n = x.float()
    n = n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + eps)
    if kwargs.get("cast_before_weight"):
        n = n.to(x.dtype)
        if weight is not None:  # in torch's own promotion
            n = n * (factor if kwargs.get("weight_offset") else weight)
    elif factor is not None:
        n = n * factor
    return n.to(x.dtype)


def _heads_magnitude(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kwargs: dict[str, Any]
) -> Tensor:
    """The norm with every summand replaced by its absolute value."""
    magnitude = x.abs()
    if kwargs.get("norm") == "layer":
        x = x - x.mean(-1, keepdim=True)
        magnitude = magnitude + magnitude.mean(-1, keepdim=True).clamp(min=TINY)
    n = magnitude * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        n = n * (weight.abs() + abs(kwargs.get("weight_offset", 0.0)))
    return n if bias is None else n + bias.abs()


def _table_rows(table: Tensor, x: Tensor, rows: int) -> Tensor:
    """The table, which has `rows` rows, as [B, S, heads, W] for x [B, S, heads, D]."""
    _, sequence, heads, width = x.shape
    if table.dim() == 4:
        table = table.transpose(1, 2) if table.shape[2] == rows or table.shape[1] != rows else table
    else:
        table = table if table.dim() == 3 else table[None]
        whole = heads > 1 and table.shape[-1] in (heads * width, heads * width // 2) and table.shape[-1] != width
        table = table.unflatten(-1, (heads, -1)) if whole else table[:, :, None]
    return table[:, :sequence]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int | None, layout: str) -> Tensor:
    """x * cos + rotated(x) * sin in torch's own promotion, as apply_rotary_emb and apply_rotary_pos_emb have it."""
    half = cos.shape[-1] * 2 == (rotary_dim or x.shape[-1])
    rotary_dim = cos.shape[-1] * (2 if half else 1)
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if half:
        cos, sin = (torch.cat((t, t), -1) if layout == "half" else t.repeat_interleave(2, -1) for t in (cos, sin))
    if layout == "half":
        a, b = turned.chunk(2, -1)
        rotated = torch.cat((-b, a), -1)
    else:
        a, b = turned.unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack((-b, a), -1).flatten(-2)
    out = (turned * cos + rotated * sin).to(x.dtype)
    return torch.cat((out, rest), -1)
