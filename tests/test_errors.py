"""Every error: the same text from the compiled op, from its fake and from the reference, and outputs left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

F32, F16, BF16, F64, I64 = torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64

Make = Callable[..., Tensor]


def maker(device: str) -> Make:
    def make(*shape: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    return make


@dataclass(frozen=True)
class Error:
    """A call that raises. ``call(f, t, **out)``: f the package or its reference, t makes tensors, out= as ``outs``."""

    text: str
    call: Callable[..., Any]
    outs: Callable[[Make], dict[str, Any]]


def one(*shape: int) -> Callable[[Make], dict[str, Any]]:
    return lambda t: {"out": t(*shape)}


def two(*shape: int) -> Callable[[Make], dict[str, Any]]:
    return lambda t: {"out": t(*shape), "residual_out": t(*shape)}


def pair(first: tuple[int, ...], second: tuple[int, ...]) -> Callable[[Make], dict[str, Any]]:
    return lambda t: {"out": (t(*first), t(*second))}


FLOATS = "dtype float32, float16 or bfloat16"
ROWS = (2, 3, 8)
HEADS = (2, 6, 3, 8)
VIDEO = (2, 8, 3, 4, 5)
IMAGE = (2, 8, 4, 5)


def rows_of_pair(first: str, norm: str) -> list[Error]:
    """A pair of norms with an index, one of whose modulations has another number of rows than the others."""
    name = f"{first}adaln_{norm}norm_pair"
    names = ["scale", "shift", "scale2", "shift2"]

    def call(wrong: str) -> Callable[..., Any]:
        def run(f: Any, t: Make, **out: Any) -> Any:
            residual = {"residual": t(*ROWS), "gate": t(2, 8)} if first else {}
            modulation = {modulator: t(3 if modulator == wrong else 2, 8) for modulator in names}
            return getattr(f, name)(t(*ROWS), weight=None, index=t(3, dtype=I64), **residual, **modulation, **out)

        return run

    def outs(t: Make) -> dict[str, Any]:
        return {out: t(*ROWS) for out in ("out", "out2", *(["residual_out"] if first else []))}

    leader = "gate" if first else "scale"
    return [
        Error(f"{wrong}: expected 2 rows, as {leader} has, got shape [3, 8]", call(wrong), outs)
        for wrong in (names if first else names[1:])
    ]


def norm_errors() -> list[Error]:
    return [
        Error(
            "input: expected at least 1 dimension, got shape []",
            lambda f, t, **out: f.rmsnorm(t(), **out),
            one(),
        ),
        Error(
            f"input: expected {FLOATS}, got int64",
            lambda f, t, **out: f.rmsnorm(t(*ROWS, dtype=I64), **out),
            one(*ROWS),
        ),
        Error(
            f"input: expected {FLOATS}, got complex64",
            lambda f, t, **out: f.layernorm(t(*ROWS, dtype=torch.complex64), **out),
            one(*ROWS),
        ),
        Error(
            "eps: expected a finite number >= 0, got -1",
            lambda f, t, **out: f.rmsnorm(t(*ROWS), eps=-1.0, **out),
            one(*ROWS),
        ),
        Error(
            "eps: expected a finite number >= 0, got nan",
            lambda f, t, **out: f.layernorm(t(*ROWS), eps=float("nan"), **out),
            one(*ROWS),
        ),
        Error(
            "eps: expected a finite number >= 0, got inf",
            lambda f, t, **out: f.rmsnorm_residual(t(*ROWS), t(*ROWS), eps=float("inf"), **out),
            two(*ROWS),
        ),
        Error(
            "weight: expected shape [8], got [7]",
            lambda f, t, **out: f.rmsnorm(t(*ROWS), t(7), **out),
            one(*ROWS),
        ),
        Error(
            "weight: expected shape [8], got [1, 8]",
            lambda f, t, **out: f.rmsnorm(t(*ROWS), t(1, 8), **out),
            one(*ROWS),
        ),
        Error(
            "weight: expected shape [8], got [1]",
            lambda f, t, **out: f.rmsnorm(t(*ROWS), t(1), **out),
            one(*ROWS),
        ),
        Error(
            f"weight: expected {FLOATS}, got int64",
            lambda f, t, **out: f.layernorm(t(*ROWS), t(8, dtype=I64), **out),
            one(*ROWS),
        ),
        Error(
            f"weight: expected {FLOATS}, got float64",
            lambda f, t, **out: f.rmsnorm(t(*ROWS), t(8, dtype=F64), **out),
            one(*ROWS),
        ),
        Error(
            "bias: expected shape [8], got [9]",
            lambda f, t, **out: f.layernorm(t(*ROWS), t(8), t(9), **out),
            one(*ROWS),
        ),
        Error(
            f"bias: expected {FLOATS}, got bool",
            lambda f, t, **out: f.layernorm(t(*ROWS), None, t(8, dtype=torch.bool), **out),
            one(*ROWS),
        ),
        Error(
            "residual: expected shape [2, 3, 8], got [3, 8]",
            lambda f, t, **out: f.rmsnorm_residual(t(*ROWS), t(3, 8), **out),
            two(*ROWS),
        ),
        Error(
            "residual: expected dtype float16 (that of input), got bfloat16",
            lambda f, t, **out: f.gated_residual(t(*ROWS, dtype=F16), t(*ROWS, dtype=BF16), t(8), **out),
            lambda t: {"out": t(*ROWS, dtype=F16)},
        ),
        Error(
            "gate: expected a shape that broadcasts to [2, 3, 8] (or [2, 8], per batch), got [3, 8]",
            lambda f, t, **out: f.gated_residual(t(*ROWS), t(*ROWS), t(3, 8), **out),
            one(*ROWS),
        ),
        Error(
            "scale: expected a shape that broadcasts to [2, 3, 8] (or [2, 8], per batch), got [2, 2, 8]",
            lambda f, t, **out: f.adaln_rmsnorm(t(*ROWS), None, t(2, 2, 8), t(8), **out),
            one(*ROWS),
        ),
        Error(
            "shift: expected a shape that broadcasts to [2, 3, 8] (or [2, 8], per batch), got [1, 2, 3, 8]",
            lambda f, t, **out: f.adaln_layernorm(t(*ROWS), None, t(8), t(1, 2, 3, 8), **out),
            one(*ROWS),
        ),
        Error(
            "scale: expected a shape that broadcasts to [3, 8], got [2, 8]",
            lambda f, t, **out: f.adaln_rmsnorm(t(3, 8), None, t(2, 8), t(8), **out),
            one(3, 8),
        ),
        Error(
            f"shift: expected {FLOATS}, got int64",
            lambda f, t, **out: f.adaln_zero(t(*ROWS), None, t(8), t(8, dtype=I64), t(8), **out),
            one(*ROWS),
        ),
        Error(
            "gate: expected a shape that broadcasts to [2, 3, 8] (or [2, 8], per batch), got [4]",
            lambda f, t, **out: f.adaln_zero(t(*ROWS), None, t(8), t(8), t(4), **out),
            one(*ROWS),
        ),
        Error(
            "index: expected dtype int64, int32 or bool, got float32",
            lambda f, t, **out: f.adaln_rmsnorm(t(*ROWS), None, t(2, 8), index=t(2, 3), **out),
            one(*ROWS),
        ),
        Error(
            "index: expected a shape that broadcasts to [2, 3], got [2]",
            lambda f, t, **out: f.gated_residual(t(*ROWS), t(*ROWS), t(2, 8), index=t(2, dtype=I64), **out),
            one(*ROWS),
        ),
        Error(
            "scale: expected shape [rows, 8] or [2, rows, 8] with index, got [8]",
            lambda f, t, **out: f.adaln_layernorm(t(*ROWS), None, t(8), index=t(3, dtype=I64), **out),
            one(*ROWS),
        ),
        Error(
            "gate: expected shape [rows, 8] or [2, rows, 8] with index, got [3, 2, 8]",
            lambda f, t, **out: f.adaln_zero(
                t(*ROWS), None, t(2, 8), t(2, 8), t(3, 2, 8), index=t(3, dtype=I64), **out
            ),
            one(*ROWS),
        ),
        Error(
            "scale: expected shape [rows, 8] with index, got [1, 2, 8]",
            lambda f, t, **out: f.adaln_rmsnorm(t(8), None, t(1, 2, 8), index=t(dtype=I64), **out),
            one(8),
        ),
        Error(
            "shift: expected 2 rows, as scale has, got shape [3, 8]",
            lambda f, t, **out: f.adaln_rmsnorm(t(*ROWS), None, t(2, 8), t(3, 8), index=t(3, dtype=I64), **out),
            one(*ROWS),
        ),
        *(
            error
            for first in ("", "gated_residual_")
            for norm in ("rms", "layer")
            for error in rows_of_pair(first, norm)
        ),
        Error(
            "scale_table: expected shape [8], got [1, 8]",
            lambda f, t, **out: f.adaln_rmsnorm(t(*ROWS), None, t(8), t(8), scale_table=t(1, 8), **out),
            one(*ROWS),
        ),
        Error(
            f"shift_table: expected {FLOATS}, got int64",
            lambda f, t, **out: f.adaln_layernorm(t(*ROWS), None, t(8), t(8), shift_table=t(8, dtype=I64), **out),
            one(*ROWS),
        ),
        Error(
            "gate_table: expected shape [8], got [4]",
            lambda f, t, **out: f.adaln_zero(t(*ROWS), None, t(8), t(8), t(8), gate_table=t(4), **out),
            one(*ROWS),
        ),
        *(
            Error(
                f"{name}_table: expected {name} to be given too, got a table alone",
                lambda f, t, name=name, **out: f.gated_residual_adaln_rmsnorm(
                    t(*ROWS), t(*ROWS), **{f"{name}_table": t(8)}, **out
                ),
                two(*ROWS),
            )
            for name in ("gate", "scale", "shift")
        ),
        # The first thing wrong in the order of the checks is the one reported.
        Error(
            "residual: expected shape [2, 3, 8], got [1]",
            lambda f, t, **out: f.gated_residual_adaln_layernorm(
                t(*ROWS), t(1), t(9), t(9), t(9), t(9), t(9), scale_table=t(9), **out
            ),
            two(*ROWS),
        ),
        Error(
            "gate: expected a shape that broadcasts to [2, 3, 8] (or [2, 8], per batch), got [9]",
            lambda f, t, **out: f.gated_residual_adaln_layernorm(
                t(*ROWS), t(*ROWS), t(9), t(9), t(9), t(9), t(9), scale_table=t(9), **out
            ),
            two(*ROWS),
        ),
        Error(
            "weight: expected shape [8], got [9]",
            lambda f, t, **out: f.gated_residual_adaln_layernorm(
                t(*ROWS), t(*ROWS), t(8), t(9), t(9), t(9), t(9), scale_table=t(9), **out
            ),
            two(*ROWS),
        ),
        Error(
            "bias: expected shape [8], got [9]",
            lambda f, t, **out: f.gated_residual_adaln_layernorm(
                t(*ROWS), t(*ROWS), t(8), t(8), t(9), t(9), t(9), scale_table=t(9), **out
            ),
            two(*ROWS),
        ),
        Error(
            "scale_table: expected shape [8], got [9]",
            lambda f, t, **out: f.gated_residual_adaln_layernorm(
                t(*ROWS), t(*ROWS), t(8), t(8), t(8), t(9), t(8), scale_table=t(9), **out
            ),
            two(*ROWS),
        ),
    ]


def glu_errors() -> list[Error]:
    return [
        Error(
            "input: expected at least 1 dimension, got shape []",
            lambda f, t, **out: f.swiglu(t(), **out),
            one(),
        ),
        Error(
            "input: expected an even last dimension (gate and up packed), got shape [2, 7]",
            lambda f, t, **out: f.geglu(t(2, 7), **out),
            one(2, 3),
        ),
        Error(
            f"input: expected {FLOATS}, got int64",
            lambda f, t, **out: f.gelu(t(2, 8, dtype=I64), **out),
            one(2, 8),
        ),
        Error(
            "up: expected shape [2, 8], got [2, 4]",
            lambda f, t, **out: f.geglu(t(2, 8), t(2, 4), **out),
            one(2, 8),
        ),
        Error(
            "up: expected dtype float32 (that of input), got bfloat16",
            lambda f, t, **out: f.swiglu(t(2, 8), t(2, 8, dtype=BF16), **out),
            one(2, 8),
        ),
        Error(
            "input: expected an even last dimension (gate and up packed), got shape [2, 7]",
            lambda f, t, **out: f.swiglu_clamped(t(2, 7), **out),
            one(2, 3),
        ),
        Error(
            "limit: expected a number >= 0, got -1",
            lambda f, t, **out: f.swiglu_clamped(t(2, 8), limit=-1.0, **out),
            one(2, 4),
        ),
        Error(
            "alpha: expected a finite number, got inf",
            lambda f, t, **out: f.swiglu_clamped(t(2, 8), alpha=float("inf"), **out),
            one(2, 4),
        ),
        Error(
            "logits: expected shape [2, 6, 3] (one per head) or [2, 6, 24] (one per column), got [2, 6, 8]",
            lambda f, t, **out: f.gate_heads(t(*HEADS), t(2, 6, 8), **out),
            one(*HEADS),
        ),
        Error(
            "logits: expected dtype float32 (that of input), got bfloat16",
            lambda f, t, **out: f.gate_heads(t(*HEADS), t(2, 6, 3, dtype=BF16), **out),
            one(*HEADS),
        ),
        Error(
            "input: expected at least 2 dimensions, got shape [8]",
            lambda f, t, **out: f.gate_heads(t(8), t(1), **out),
            one(8),
        ),
        Error(
            "scale: expected a finite number, got nan",
            lambda f, t, **out: f.gate_heads(t(*HEADS), t(2, 6, 3), float("nan"), **out),
            one(*HEADS),
        ),
        Error(
            "bias: expected shape [8], got [4]",
            lambda f, t, **out: f.gelu(t(2, 8), bias=t(4), **out),
            one(2, 8),
        ),
        Error(
            f"bias: expected {FLOATS}, got int64",
            lambda f, t, **out: f.gelu(t(2, 8), bias=t(8, dtype=I64), **out),
            one(2, 8),
        ),
    ]


def rope_errors() -> list[Error]:
    rotary, qk = one(*HEADS), pair(HEADS, HEADS)

    def apply(
        text: str, shape: tuple[int, ...], cos: tuple[int, ...], sin: tuple[int, ...] | None = None, **keywords: Any
    ) -> Error:
        return Error(
            text,
            lambda f, t, **out: f.apply_rotary(t(*shape), t(*cos), t(*(sin or cos)), **keywords, **out),
            one(*shape),
        )

    def rope_3d(text: str, *grid: int, query: tuple[int, ...] = HEADS, **keywords: Any) -> Error:
        return Error(
            text,
            lambda f, t, **out: f.rope_3d(t(*query), t(*HEADS), *grid, **keywords, **out),
            pair(query, HEADS),
        )

    def rope_1d(text: str, query: tuple[int, ...], key: tuple[int, ...], *theta: float) -> Error:
        return Error(text, lambda f, t, **out: f.rope_1d(t(*query), t(*key), *theta, **out), pair(query, key))

    def positions(text: str, *shape: int, dtype: torch.dtype = I64, key: tuple[int, ...] = HEADS) -> Error:
        return Error(
            text,
            lambda f, t, **out: f.rope_1d(t(*HEADS), t(*key), positions=t(*shape, dtype=dtype), **out),
            pair(HEADS, key),
        )

    def qk_norm(text: str, *weights: tuple[int, ...] | None, **keywords: Any) -> Error:
        keywords.setdefault("across_heads", True)
        return Error(
            text,
            lambda f, t, **out: f.qk_norm_rope(
                t(*HEADS), t(*HEADS), *(w and t(*w) for w in weights), t(6, 8), t(6, 8), **keywords, **out
            ),
            qk,
        )

    any_leading = " (any leading size may be 1)"
    return [
        apply("input: expected 2, 3 or 4 dimensions, got shape [8]", (8,), (6, 8)),
        apply("input: expected 2, 3 or 4 dimensions, got shape [1, 1, 6, 3, 8]", (1, 1, 6, 3, 8), (6, 8)),
        apply("sequence_dim: expected 1 or 2 (of 4 dimensions), got 0", HEADS, (6, 8), sequence_dim=0),
        apply("sequence_dim: expected 1 or 2 (of 4 dimensions), got 3", HEADS, (6, 8), sequence_dim=3),
        apply("sequence_dim: expected 1 or 2 (of 4 dimensions), got -1", HEADS, (6, 8), sequence_dim=-1),
        apply("sequence_dim: expected 0 or 1 (of 3 dimensions), got 2", (2, 6, 8), (6, 8), sequence_dim=2),
        apply("sequence_dim: expected 0 (of 2 dimensions), got 1", (6, 8), (6, 8)),
        apply("input: expected an even last dimension, got shape [2, 6, 3, 7]", (2, 6, 3, 7), (6, 8)),
        Error(
            f"input: expected {FLOATS}, got int64",
            lambda f, t, **out: f.apply_rotary(t(*HEADS, dtype=I64), t(6, 8), t(6, 8), **out),
            rotary,
        ),
        Error(
            f"cos: expected {FLOATS}, got int64",
            lambda f, t, **out: f.apply_rotary(t(*HEADS), t(6, 8, dtype=I64), t(6, 8), **out),
            rotary,
        ),
        Error(
            "cos: expected dtype float32 or float16 (that of input), got bfloat16",
            lambda f, t, **out: f.apply_rotary(t(*HEADS, dtype=F16), t(6, 8, dtype=BF16), t(6, 8, dtype=BF16), **out),
            lambda t: {"out": t(*HEADS, dtype=F16)},
        ),
        Error(
            "sin: expected dtype float32 (that of cos), got bfloat16",
            lambda f, t, **out: f.apply_rotary(t(*HEADS, dtype=BF16), t(6, 8), t(6, 8, dtype=BF16), **out),
            lambda t: {"out": t(*HEADS, dtype=BF16)},
        ),
        apply("sin: expected shape [6, 8], got [6, 4]", HEADS, (6, 8), (6, 4)),
        apply("cos: expected at least 2 dimensions, got shape [8]", HEADS, (8,)),
        apply("cos: expected 2, 3 or 4 dimensions, got shape [1, 1, 1, 6, 8]", HEADS, (1, 1, 1, 6, 8)),
        apply(
            "cos: expected a last dimension of 8 or 4, 24 or 12 (own angles per head), or an even one below 8 "
            "(partial rotary), got shape [6, 7]",
            HEADS,
            (6, 7),
        ),
        apply(
            "cos: expected a last dimension of 8 or 4, or an even one below 8 (partial rotary), got shape [6, 16]",
            (2, 6, 8),
            (6, 16),
        ),
        apply(
            "cos: expected a last dimension of 8 or 4, or an even one below 8 (partial rotary), "
            "got shape [1, 6, 1, 24]",
            HEADS,
            (1, 6, 1, 24),
        ),
        apply("rotary_dim: expected an even number up to 8, got 3", HEADS, (6, 8), rotary_dim=3),
        apply("rotary_dim: expected an even number up to 8, got 10", HEADS, (6, 8), rotary_dim=10),
        apply("rotary_dim: expected an even number up to 8, got -2", HEADS, (6, 8), rotary_dim=-2),
        apply(
            "cos: expected a last dimension of 4 or 2 (rotary_dim or half of it), got shape [6, 8]",
            HEADS,
            (6, 8),
            rotary_dim=4,
        ),
        apply(
            f"cos: expected shape [6, 8], [2, 6, 8], [2, 3, 6, 8] or [2, 6, 3, 8]{any_leading}, got [5, 8]",
            HEADS,
            (5, 8),
        ),
        apply(
            f"cos: expected shape [6, 4], [2, 6, 4], [2, 3, 6, 4] or [2, 6, 3, 4]{any_leading}, got [3, 6, 4]",
            HEADS,
            (3, 6, 4),
        ),
        apply(
            f"cos: expected shape [6, 8], [2, 6, 8], [2, 3, 6, 8] or [2, 6, 3, 8]{any_leading}, got [2, 2, 6, 8]",
            HEADS,
            (2, 2, 6, 8),
        ),
        Error(
            "key: expected dtype float32 (that of query), got float16",
            lambda f, t, **out: f.apply_rotary_qk(t(*HEADS), t(*HEADS, dtype=F16), t(6, 8), t(6, 8), **out),
            lambda t: {"out": (t(*HEADS), t(*HEADS, dtype=F16))},
        ),
        Error(
            "key: expected 4 dimensions, got shape [2, 6, 8]",
            lambda f, t, **out: f.apply_rotary_qk(t(*HEADS), t(2, 6, 8), t(6, 8), t(6, 8), **out),
            pair(HEADS, (2, 6, 8)),
        ),
        Error(
            "key: expected the batch size and last dimension of query [2, 6, 3, 8], got shape [1, 6, 3, 8]",
            lambda f, t, **out: f.apply_rotary_qk(t(*HEADS), t(1, 6, 3, 8), t(6, 8), t(6, 8), **out),
            pair(HEADS, (1, 6, 3, 8)),
        ),
        Error(
            f"cos: expected shape [7, 8], [2, 7, 8], [2, 3, 7, 8] or [2, 7, 3, 8]{any_leading}, got [6, 8]",
            lambda f, t, **out: f.apply_rotary_qk(t(*HEADS), t(2, 7, 3, 8), t(6, 8), t(6, 8), **out),
            pair(HEADS, (2, 7, 3, 8)),
        ),
        Error(
            "cos: expected a table of the same kind as cos [6, 16], got shape [6, 16]",
            lambda f, t, **out: f.apply_rotary_qk(t(2, 6, 2, 8), t(2, 6, 4, 8), t(6, 16), t(6, 16), **out),
            pair((2, 6, 2, 8), (2, 6, 4, 8)),
        ),
        qk_norm("query_weight: expected shape [24], got [8]", (8,), None),
        qk_norm("key_weight: expected shape [8], got [24]", (8,), (24,), across_heads=False),
        qk_norm("eps: expected a finite number >= 0, got -0.5", None, None, eps=-0.5),
        qk_norm("key_eps: expected a finite number >= 0, got nan", None, None, eps=(0.5, float("nan"))),
        qk_norm(
            "cast_before_weight: expected False with a layer norm, got True",
            None,
            None,
            norm="layer",
            cast_before_weight=True,
        ),
        Error(
            "key_bias: expected None with an rms norm, got a tensor",
            lambda f, t, **out: f.qk_norm_rope(
                t(*HEADS), t(*HEADS), None, None, t(6, 8), t(6, 8), across_heads=True, key_bias=t(24), **out
            ),
            qk,
        ),
        Error(
            "query_bias: expected shape [8], got [24]",
            lambda f, t, **out: f.qk_norm_rope(
                *(t(*HEADS), t(*HEADS), None, None, t(6, 8), t(6, 8)),
                **{"across_heads": False, "norm": "layer", "query_bias": t(24), **out},
            ),
            qk,
        ),
        Error(
            f"key_weight: expected {FLOATS}, got int64",
            lambda f, t, **out: f.qk_norm_rope(
                t(*HEADS), t(*HEADS), None, t(24, dtype=I64), t(6, 8), t(6, 8), across_heads=True, **out
            ),
            qk,
        ),
        Error(
            "query: expected 4 dimensions, got shape [2, 6, 24]",
            lambda f, t, **out: f.qk_norm_rope(
                t(2, 6, 24), t(*HEADS), None, None, t(6, 8), t(6, 8), across_heads=True, **out
            ),
            pair((2, 6, 24), HEADS),
        ),
        Error(
            "key_sin: expected both key_cos and key_sin, or neither, got None",
            lambda f, t, **out: f.qk_norm_rope(
                t(*HEADS), t(*HEADS), None, None, (t(6, 8), t(6, 8)), t(6, 8), across_heads=True, **out
            ),
            qk,
        ),
        Error(
            "key_cos: expected a table of the same kind as cos [6, 8], got shape [6, 4]",
            lambda f, t, **out: f.qk_norm_rope(
                t(*HEADS), t(*HEADS), None, None, (t(6, 8), t(6, 4)), (t(6, 8), t(6, 4)), across_heads=True, **out
            ),
            qk,
        ),
        Error(
            "key_sin: expected shape [6, 8], got [6, 4]",
            lambda f, t, **out: f.qk_norm_rope(
                t(*HEADS), t(*HEADS), None, None, (t(6, 8), t(6, 8)), (t(6, 8), t(6, 4)), across_heads=True, **out
            ),
            qk,
        ),
        Error(
            "key_cos: expected dtype float32 (that of cos), got bfloat16",
            lambda f, t, **out: f.qk_norm_rope(
                t(*HEADS, dtype=BF16),
                t(*HEADS, dtype=BF16),
                None,
                None,
                (t(6, 8), t(6, 8, dtype=BF16)),
                (t(6, 8), t(6, 8)),
                across_heads=True,
                **out,
            ),
            lambda t: {"out": (t(*HEADS, dtype=BF16), t(*HEADS, dtype=BF16))},
        ),
        rope_1d("query: expected 4 dimensions, got shape [2, 6, 8]", (2, 6, 8), HEADS),
        rope_1d("query: expected 4 dimensions, got shape [8]", (8,), HEADS),
        rope_3d("query: expected 4 dimensions, got shape []", 1, 2, 3, query=()),
        rope_1d("query: expected an even last dimension, got shape [2, 6, 3, 7]", (2, 6, 3, 7), (2, 6, 3, 7)),
        rope_1d(
            "query: expected a last dimension of at most 1024, got shape [1, 2, 1, 1026]",
            (1, 2, 1, 1026),
            (1, 2, 1, 1026),
        ),
        rope_1d(
            "key: expected the batch size and last dimension of query [2, 6, 3, 8], got shape [2, 6, 3, 4]",
            HEADS,
            (2, 6, 3, 4),
        ),
        rope_1d("theta_base: expected finite numbers > 0, got 0", HEADS, HEADS, 0.0),
        rope_1d("theta_base: expected finite numbers > 0, got inf", HEADS, HEADS, float("inf")),
        rope_1d("theta_base: expected finite numbers > 0, got nan", HEADS, HEADS, float("nan")),
        positions("positions: expected dtype int64, int32 or float32, got float16", 6, dtype=F16),
        positions("positions: expected shape [6] or [2, 6], got [5]", 5),
        positions("positions: expected shape [6] or [2, 6], got [3, 6]", 3, 6),
        positions("positions: expected shape [6] or [2, 6], got []"),
        positions("positions: expected shape [6] or [2, 6], got [1, 1, 6]", 1, 1, 6),
        positions(
            "key: expected the sequence length of query [2, 6, 3, 8] (positions are shared), got shape [2, 5, 3, 8]",
            6,
            key=(2, 5, 3, 8),
        ),
        rope_3d(
            "query: expected a sequence of 2 * 2 * 2 = 8 (num_frames * height * width), got shape [2, 6, 3, 8]",
            2,
            2,
            2,
        ),
        rope_3d(
            "key: expected a sequence of 2 * 2 * 2 = 8 (num_frames * height * width), got shape [2, 6, 3, 8]",
            2,
            2,
            2,
            query=(2, 8, 3, 8),
        ),
        rope_3d("num_frames: expected a number >= 0, got -2", -2, -3, 1),
        rope_3d("width: expected a number >= 0, got -3", 1, 2, -3),
        rope_3d("rope_dims: expected even numbers >= 0, got [3, 3, 2]", 1, 2, 3, rope_dims=(3, 3, 2)),
        rope_3d("rope_dims: expected even numbers >= 0, got [-2, 8, 2]", 1, 2, 3, rope_dims=(-2, 8, 2)),
        rope_3d(
            "rope_dims: expected a sum of 8 (the last dimension of query), got [2, 2, 2]", 1, 2, 3, rope_dims=(2, 2, 2)
        ),
        rope_3d("theta_base: expected finite numbers > 0, got -1", 1, 2, 3, (1e4, -1.0, 1e4)),
    ]


def attention_errors() -> list[Error]:
    text = (2, 4, 3, 8)

    def attention(
        expected: str,
        *shapes: tuple[int, ...],
        weights: tuple[tuple[int, ...] | None, ...] = (None, None),
        mask: tuple[int, ...] | None = None,
        dtypes: tuple[torch.dtype, ...] = (F32,) * 6,
        **keywords: Any,
    ) -> Error:
        shapes = (*shapes, *(HEADS, text, text)[len(shapes) :])
        given = (*shapes, *weights, mask)

        def call(f: Any, t: Make, **out: Any) -> Any:
            *tensors, addends = (None if s is None else t(*s, dtype=d) for s, d in zip(given, dtypes, strict=True))
            return f.qk_norm_cross_attention(*tensors, mask=addends, **keywords, **out)

        return Error(expected, call, lambda t: {"out": t(*shapes[0])})

    def of(dtype: torch.dtype, argument: int) -> tuple[torch.dtype, ...]:
        return tuple(dtype if i == argument else F32 for i in range(6))

    like_query = "key: expected the batch size, heads and last dimension of query [2, 6, 3, 8], got shape "
    return [
        attention("query: expected 4 dimensions, got shape [2, 6, 24]", (2, 6, 24)),
        attention("query: expected 4 dimensions, got shape []", ()),
        attention(f"query: expected {FLOATS}, got int64", dtypes=of(I64, 0)),
        attention("eps: expected a finite number >= 0, got -1", eps=-1.0),
        attention("eps: expected a finite number >= 0, got nan", eps=float("nan")),
        attention("scale: expected a finite number, got inf", scale=float("inf")),
        attention("scale: expected a finite number, got nan", scale=float("nan")),
        attention(
            "query: expected a last dimension of at most 256, got shape [1, 2, 1, 257]",
            *[(1, 2, 1, 257)] * 3,
        ),
        attention("key: expected dtype float32 (that of query), got bfloat16", dtypes=of(BF16, 1)),
        attention("key: expected 4 dimensions, got shape [2, 4, 24]", HEADS, (2, 4, 24)),
        attention(f"{like_query}[1, 4, 3, 8]", HEADS, (1, 4, 3, 8)),
        attention(f"{like_query}[2, 4, 1, 8]", HEADS, (2, 4, 1, 8)),
        attention(f"{like_query}[2, 4, 3, 4]", HEADS, (2, 4, 3, 4)),
        attention("value: expected dtype float32 (that of query), got float16", dtypes=of(F16, 2)),
        attention("value: expected shape [2, 4, 3, 8], got [2, 5, 3, 8]", HEADS, text, (2, 5, 3, 8)),
        attention("value: expected shape [2, 4, 3, 8], got [2, 4, 3, 16]", HEADS, text, (2, 4, 3, 16)),
        attention("query_weight: expected shape [24], got [8]", weights=((8,), None)),
        attention("key_weight: expected shape [24], got [3, 8]", weights=((24,), (3, 8))),
        attention(f"query_weight: expected {FLOATS}, got int64", weights=((24,), None), dtypes=of(I64, 3)),
        attention(f"key_weight: expected {FLOATS}, got float64", weights=((24,), (24,)), dtypes=of(F64, 4)),
        attention(f"mask: expected {FLOATS}, got bool", mask=(2, 4), dtypes=of(torch.bool, 5)),
        attention("mask: expected shape [2, 4] or [1, 4], got [4]", mask=(4,)),
        attention("mask: expected shape [2, 4] or [1, 4], got [2, 6]", mask=(2, 6)),
        attention("mask: expected shape [2, 4] or [1, 4], got [3, 4]", mask=(3, 4)),
        attention("mask: expected shape [2, 4] or [1, 4], got [2, 1, 1, 4]", mask=(2, 1, 1, 4)),
    ]


def video_errors() -> list[Error]:
    def norm(text: str, **arguments: Any) -> Error:
        def call(f: Any, t: Make, **out: Any) -> Any:
            given = {name: t(*value) if isinstance(value, list) else value for name, value in arguments.items()}
            return f.channel_norm(t(*VIDEO), **given, **out)

        return Error(text, call, one(*VIDEO))

    together = "expected {0} and {1} together, got None"
    return [
        Error(
            "input: expected 5 dimensions, got shape [2, 3, 8]",
            lambda f, t, **out: f.channel_norm(t(*ROWS), **out),
            one(*ROWS),
        ),
        Error(
            f"input: expected {FLOATS}, got int64",
            lambda f, t, **out: f.channel_norm(t(*VIDEO, dtype=I64), **out),
            one(*VIDEO),
        ),
        norm("eps: expected a finite number >= 0, got -1", eps=-1.0),
        norm("bias: expected shape [8], got [7]", bias=[7]),
        norm("weight: expected shape [8], got [8, 1]", weight=[8, 1]),
        norm("residual: expected shape [2, 8, 3, 4, 5], got [2, 8, 3, 4, 4]", residual=[2, 8, 3, 4, 4]),
        norm("noise: expected shape [4, 5], got [5, 4]", noise=[5, 4], noise_scale=[8]),
        norm("noise_scale: " + together.format("noise", "noise_scale"), noise=[4, 5]),
        norm("noise: " + together.format("noise", "noise_scale"), noise_scale=[8]),
        norm("shift: " + together.format("scale", "shift"), scale=[2, 8]),
        norm("scale: expected shape [2, 8], got [1, 8]", scale=[1, 8], shift=[2, 8]),
        norm("scale_table: expected its modulation input to be given too, got a table alone", scale_table=[8]),
        norm("shift_table: expected shape [8], got [3]", scale=[2, 8], shift=[2, 8], shift_table=[3]),
        norm(
            "padding: expected frames before and after, 0 to 65536, and 0 or 1 for reflected edges, got [-1, 0, 0]",
            padding=(-1, 0),
        ),
        norm(
            "padding: expected frames before and after, 0 to 65536, and 0 or 1 for reflected edges, "
            "got [4611686018427387904, 4611686018427387904, 0]",
            padding=(2**62, 2**62),
        ),
        Error(
            "weight: expected dtype float32 (that of input), got bfloat16",
            lambda f, t, **out: f.channel_norm(t(*VIDEO), t(8, dtype=BF16), **out),
            one(*VIDEO),
        ),
        Error(
            "input: expected a height and a width of at least 2 (reflected edges), got shape [1, 8, 2, 1, 5]",
            lambda f, t, **out: f.channel_norm(t(1, 8, 2, 1, 5), reflect=True, **out),
            one(1, 8, 2, 3, 7),
        ),
        Error(
            "input: expected channels that are a multiple of 8, got shape [2, 12, 3, 4, 5]",
            lambda f, t, **out: f.pixel_shuffle_3d(t(2, 12, 3, 4, 5), (2, 2, 2), **out),
            one(*VIDEO),
        ),
        Error(
            "upscale: expected three numbers from 1 to 65536, got [2, 0, 2]",
            lambda f, t, **out: f.pixel_shuffle_3d(t(*VIDEO), (2, 0, 2), **out),
            one(*VIDEO),
        ),
        Error(
            "upscale: expected three numbers from 1 to 65536, got [4611686018427387904, 2, 2]",
            lambda f, t, **out: f.pixel_shuffle_3d(t(*VIDEO), (2**62, 2, 2), **out),
            one(*VIDEO),
        ),
        Error(
            "upscale: expected three numbers from 1 to 65536, got [2, 2]",
            lambda f, t, **out: f.pixel_shuffle_3d(t(*VIDEO), (2, 2), **out),
            one(*VIDEO),
        ),
        Error(
            "skip_frames: expected a number from 0 to 1, got 2",
            lambda f, t, **out: f.pixel_shuffle_3d(t(*VIDEO), (2, 2, 2), skip_frames=2, **out),
            one(*VIDEO),
        ),
        Error(
            "residual: expected channels that are a multiple of 8 and divide those of input [1, 16, 1, 1, 1], "
            "got shape [1, 12, 1, 1, 1]",
            lambda f, t, **out: f.pixel_shuffle_3d(t(1, 16, 1, 1, 1), (2, 2, 2), residual=t(1, 12, 1, 1, 1), **out),
            one(1, 2, 2, 2, 2),
        ),
        Error(
            "residual: expected shape [1, 16, 1, 1, 1], got [1, 16, 1, 1, 2]",
            lambda f, t, **out: f.pixel_shuffle_3d(t(1, 16, 1, 1, 1), (2, 2, 2), residual=t(1, 16, 1, 1, 2), **out),
            one(1, 2, 2, 2, 2),
        ),
        Error(
            "patch_size: expected a number from 1 to 65536, got 4294967296",
            lambda f, t, **out: f.unpatchify(t(*VIDEO), 2**32, **out),
            one(*VIDEO),
        ),
        Error(
            "patch_size: expected a number from 1 to 65536, got 0",
            lambda f, t, **out: f.unpatchify(t(*VIDEO), 0, **out),
            one(*VIDEO),
        ),
        Error(
            "input: expected channels that are a multiple of 9, got shape [2, 8, 3, 4, 5]",
            lambda f, t, **out: f.unpatchify(t(*VIDEO), 3, **out),
            one(*VIDEO),
        ),
        Error(
            "bias: expected shape [8], got [2]",
            lambda f, t, **out: f.unpatchify(t(*VIDEO), 2, bias=t(2), **out),
            one(2, 2, 3, 8, 10),
        ),
    ]


def image_errors() -> list[Error]:
    def norm(text: str, groups: int = 2, **arguments: Any) -> Error:
        def call(f: Any, t: Make, **out: Any) -> Any:
            given = {name: t(*value) if isinstance(value, list) else value for name, value in arguments.items()}
            return f.group_norm(t(*IMAGE), groups, **given, **out)

        return Error(text, call, one(*IMAGE))

    def upsampling(text: str, scale: tuple[int, ...], **arguments: list[int]) -> Error:
        def call(f: Any, t: Make, **out: Any) -> Any:
            return f.upsample_nearest(t(*IMAGE), scale, **{k: t(*v) for k, v in arguments.items()}, **out)

        return Error(text, call, one(2, 8, 8, 10))

    return [
        Error(
            "input: expected 4 or 5 dimensions, got shape [2, 3, 8]",
            lambda f, t, **out: f.group_norm(t(*ROWS), 2, **out),
            one(*ROWS),
        ),
        Error(
            f"input: expected {FLOATS}, got int64",
            lambda f, t, **out: f.group_norm(t(*IMAGE, dtype=I64), 2, **out),
            one(*IMAGE),
        ),
        norm("groups: expected a divisor of the 8 channels of input, got 3", 3),
        norm("groups: expected a divisor of the 8 channels of input, got 0", 0),
        norm("groups: expected a divisor of the 8 channels of input, got -2", -2),
        norm("eps: expected a finite number >= 0, got -1", eps=-1.0),
        norm("bias: expected shape [8] or [2, 8], got [1, 8]", bias=[1, 8]),
        norm("residual: expected shape [2, 8, 4, 5], got [2, 8, 5, 4]", residual=[2, 8, 5, 4]),
        norm("residual_bias: expected shape [8] or [2, 8], got [8, 1, 1]", residual_bias=[8, 1, 1]),
        norm("weight: expected shape [8], got [2, 8]", weight=[2, 8]),
        norm("bias_norm: expected shape [8], got []", bias_norm=[]),
        Error(
            "bias_norm: expected dtype float32 (that of input), got bfloat16",
            lambda f, t, **out: f.group_norm_residual(t(*IMAGE), 2, None, t(8, dtype=BF16), **out),
            two(*IMAGE),
        ),
        upsampling("scale: expected two numbers from 1 to 65536, got [2, 0]", (2, 0)),
        upsampling("scale: expected two numbers from 1 to 65536, got [1, 2, 2]", (1, 2, 2)),
        upsampling("bias: expected shape [8] or [2, 8], got [7]", (2, 2), bias=[7]),
        Error(
            "input: expected 4 or 5 dimensions, got shape [2, 3, 8]",
            lambda f, t, **out: f.upsample_nearest(t(*ROWS), (1, 1), **out),
            one(*ROWS),
        ),
    ]


ERRORS = [
    *norm_errors(), *glu_errors(), *rope_errors(), *attention_errors(), *video_errors(), *image_errors(),
]  # fmt: skip


def raised(call: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as error:
        call()
    return str(error.value)


@pytest.fixture(params=ERRORS, ids=lambda error: error.text[:60])
def error(request: pytest.FixtureRequest) -> Error:
    return request.param


@pytest.mark.kernels_ci
def test_op(ltx: Any, device: str, error: Error) -> None:
    make = maker(device)
    assert raised(lambda: error.call(ltx, make)) == error.text


def test_op_leaves_its_outputs_alone(ltx: Any, device: str, error: Error) -> None:
    make = maker(device)
    outs = error.outs(lambda *shape, **dtype: make(*shape, **dtype).fill_(torch.nan))
    assert raised(lambda: error.call(ltx, make, **outs)) == error.text
    tensors = [t for value in outs.values() for t in (value if isinstance(value, tuple) else (value,))]
    assert all(tensor.isnan().all() for tensor in tensors)


@pytest.mark.host
@pytest.mark.kernels_ci
def test_reference(ltx: Any, device: str, error: Error) -> None:
    assert raised(lambda: error.call(ltx.reference, maker(device))) == error.text


@pytest.mark.host
def test_fake(ltx: Any, device: str, error: Error) -> None:
    make = maker(device)
    with FakeTensorMode():
        assert raised(lambda: error.call(ltx, make)) == error.text
        assert raised(lambda: error.call(ltx, make, **error.outs(make))) == error.text


def test_meta(ltx: Any, error: Error) -> None:
    assert raised(lambda: error.call(ltx, maker("meta"))) == error.text


@pytest.mark.extended
@pytest.mark.host
def test_compile(ltx: Any, device: str, error: Error) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda: error.call(ltx, maker(device)), backend="eager", fullgraph=True)
    assert error.text in raised(compiled)


# ---- Memory, which only the compiled op sees


def memory_errors(t: Make) -> list[tuple[str, Callable[[Any], Any]]]:
    x, w = t(4, 8), t(8)
    q, cos = t(*HEADS), t(6, 8)
    k, v, u = t(*HEADS), t(*HEADS), t(24)
    return [
        (
            "out: expected exactly the memory of input or none of it, got an overlap",
            lambda f: f.gelu(x[1:], out=x[:-1]),
        ),
        (
            "out: expected memory apart from that of weight, got an overlap",
            lambda f: f.rmsnorm(x[:1], w, out=w.view(1, 8)),
        ),
        (
            "out: expected memory apart from that of input, got an overlap",
            lambda f: f.swiglu(x, out=x.view(-1)[:16].view(4, 4)),
        ),
        (
            "residual_out: expected memory apart from that of out, got an overlap",
            lambda f: f.rmsnorm_residual(x, t(4, 8), out=x, residual_out=x),
        ),
        (
            "out[0]: expected memory apart from that of cos, got an overlap",
            lambda f: f.apply_rotary_qk(cos[None, :, None], q[:1], cos, t(6, 8), out=(cos[None, :, None], q[:1])),
        ),
        (
            "out[1]: expected memory apart from that of query, got an overlap",
            lambda f: f.rope_1d(q, t(*HEADS), out=(t(*HEADS), q)),
        ),
        (
            "out: expected exactly the memory of query or none of it, got an overlap",
            lambda f: f.qk_norm_cross_attention(
                q[:1], q[1:], t(1, 6, 3, 8), None, None, out=q.flatten()[8:152].view(1, 6, 3, 8)
            ),
        ),
        (
            "out: expected memory apart from that of key, got an overlap",
            lambda f: f.qk_norm_cross_attention(q, k, v, None, None, out=k),
        ),
        (
            "out: expected memory apart from that of key, got an overlap",
            lambda f: f.qk_norm_cross_attention(q, q, v, None, None, out=q),
        ),
        (
            "out: expected memory apart from that of value, got an overlap",
            lambda f: f.qk_norm_cross_attention(q, k, v, None, None, out=v),
        ),
        (
            "out: expected memory apart from that of query_weight, got an overlap",
            lambda f: f.qk_norm_cross_attention(q[:1, :1], k[:1], v[:1], u, None, out=u.view(1, 1, 3, 8)),
        ),
        (
            "out: expected memory apart from that of key_weight, got an overlap",
            lambda f: f.qk_norm_cross_attention(q[:1, :1], k[:1], v[:1], None, u, out=u.view(1, 1, 3, 8)),
        ),
        (
            "out: expected memory apart from that of mask, got an overlap",
            lambda f: f.qk_norm_cross_attention(
                q[:1, :1], t(1, 24, 3, 8), t(1, 24, 3, 8), None, None, mask=u[None], out=u.view(1, 1, 3, 8)
            ),
        ),
    ]


@pytest.mark.parametrize("index", range(len(memory_errors(maker("meta")))))
def test_outputs_that_share_memory(ltx: Any, backend: str, device: str, index: int) -> None:
    if backend != device:
        pytest.skip("the reference does not look at memory")
    text, call = memory_errors(maker(device))[index]
    assert raised(lambda: call(ltx)) == text


# ---- Devices


def test_devices(ltx: Any, device: str) -> None:
    here, there = maker(device), maker("meta")
    name = str(here(1).device)
    rows, heads = here(*ROWS), here(*HEADS)
    calls = {
        "weight": ("input", lambda f: f.rmsnorm(rows, there(8))),
        "residual": ("input", lambda f: f.rmsnorm_residual(rows, there(*ROWS))),
        "scale": ("input", lambda f: f.adaln_rmsnorm(rows, None, there(8), here(8))),
        "gate_table": ("input", lambda f: f.gated_residual(rows, rows, here(8), gate_table=there(8))),
        "up": ("input", lambda f: f.swiglu(rows, there(*ROWS))),
        "bias": ("input", lambda f: f.gelu(rows, bias=there(8))),
        "key": ("query", lambda f: f.rope_1d(heads, there(*HEADS))),
        "positions": ("query", lambda f: f.rope_1d(heads, heads, positions=there(6, dtype=I64))),
        "cos": ("input", lambda f: f.apply_rotary(heads, there(6, 8), here(6, 8))),
        "sin": ("query", lambda f: f.apply_rotary_qk(heads, heads, here(6, 8), there(6, 8))),
        "key_weight": (
            "key",
            lambda f: f.qk_norm_rope(heads, heads, None, there(8), here(6, 8), here(6, 8), across_heads=False),
        ),
        "value": ("query", lambda f: f.qk_norm_cross_attention(heads, heads, there(*HEADS), None, None)),
        "query_weight": ("query", lambda f: f.qk_norm_cross_attention(heads, heads, heads, there(24), None)),
        "mask": ("query", lambda f: f.qk_norm_cross_attention(heads, heads, heads, None, None, mask=there(2, 6))),
    }
    for argument, (of, call) in calls.items():
        text = f"{argument}: expected device {name} (that of {of}), got meta"
        assert raised(lambda call=call: call(ltx)) == text
        assert raised(lambda call=call: call(ltx.reference)) == text


def test_devices_of_the_compiled_op(ltx: Any, cuda: str) -> None:
    x = maker(cuda)(*ROWS)
    text = "weight: expected device cuda:0 (that of input), got cpu"
    assert raised(lambda: ltx.rmsnorm(x, torch.ones(8))) == text
    assert raised(lambda: ltx.reference.rmsnorm(x, torch.ones(8))) == text
    text = "out: expected device cuda:0 (that of input), got cpu"
    assert raised(lambda: ltx.rmsnorm(x, out=torch.ones(ROWS))) == text


# ---- float64: the reference's alone


@pytest.mark.parametrize("grad", [False, True])
def test_float64_is_for_the_reference(ltx: Any, device: str, grad: bool) -> None:
    x, q, table = (maker(device)(*shape, dtype=F64) for shape in (ROWS, HEADS, (6, 8)))
    calls = {
        "input": [
            lambda f: f.rmsnorm(x),
            lambda f: f.adaln_zero(x, None, x, x, x),
            lambda f: f.swiglu(x),
            lambda f: f.apply_rotary(q, table, table),
        ],
        "query": [
            lambda f: f.rope_1d(q, q),
            lambda f: f.qk_norm_rope(q, q, None, None, table, table, across_heads=True),
            lambda f: f.qk_norm_cross_attention(q, q, q, None, None),
        ],
    }
    for tensor in (x, q):
        tensor.requires_grad_(grad)
    for name, functions in calls.items():
        for call in functions:
            assert raised(lambda call=call: call(ltx)) == f"{name}: expected {FLOATS}, got float64"
            call(ltx.reference)


# ---- Codes, which the Python functions never get wrong


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("norm", "statistic: expected a code from 1 to 2, got 0", (None, None, 1e-6, 0.0, 0, 0)),
        ("norm", "rounding: expected a code from 0 to 2, got 3", (None, None, 1e-6, 0.0, 1, 3)),
        ("glu", "activation: expected a code from 0 to 2, got 3", (None, 3, True, 0)),
        ("gelu", "activation: expected a code from 0 to 2, got -1", (None, -1, 0)),
    ],
)
def test_codes(ltx: Any, device: str, name: str, text: str, arguments: tuple[Any, ...]) -> None:
    op = getattr(ltx._ops.ops, name)
    assert raised(lambda: op(maker(device)(*ROWS), *arguments)) == text
    assert raised(lambda: op(maker("meta")(*ROWS), *arguments)) == text


def test_none_for_a_tensor_of_an_op(ltx: Any, backend: str, device: str) -> None:
    """The dispatcher takes it for any tensor but the first; the Python functions name the argument in a TypeError."""
    if backend != device:
        pytest.skip("the compiled op's text")
    x = maker(device)(*ROWS)
    text = "scale: expected a tensor, got None"
    assert raised(lambda: ltx._ops.ops.adaln_norm(x, None, None, None, x, *[None] * 5, 1e-6, 1, 0)) == text


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_axes_of_the_rope_op(ltx: Any, device: str) -> None:
    q = maker(device)(*HEADS)
    text = "grid: expected 1 or 3 axes, with as many rope_dims and theta_base, got 2"
    assert raised(lambda: ltx._ops.ops.rope(q, q, None, [2, 3], [4, 4], [1e4, 1e4], True)) == text
    text = "positions: expected None with a 3-D grid, got a tensor"
    positions = maker(device)(6, dtype=I64)
    assert raised(lambda: ltx._ops.ops.rope(q, q, positions, [1, 2, 3], [2, 2, 4], [1e4] * 3, True)) == text


# ---- Choices of the Python functions


@pytest.mark.parametrize("grad", [False, True])
def test_choices(ltx: Any, device: str, grad: bool) -> None:
    make = maker(device)
    x, q, table = make(*ROWS).requires_grad_(grad), make(*HEADS).requires_grad_(grad), make(6, 8)
    calls = {
        'rounding: expected "fp32" or "eager", got \'bf16\'': [
            lambda f: f.rmsnorm(x, rounding="bf16"),
            lambda f: f.gated_residual_adaln_layernorm(x, x, rounding="bf16"),
            lambda f: f.gelu(x, rounding="bf16"),
            lambda f: f.apply_rotary(q, table, table, rounding="bf16"),
        ],
        'layout: expected "interleaved" or "half", got \'split\'': [
            lambda f: f.rope_1d(q, q, layout="split"),
            lambda f: f.rope_3d(q, q, 1, 2, 3, layout="split"),
            lambda f: f.qk_norm_rope(q, q, None, None, table, table, across_heads=True, layout="split"),
        ],
        'norm: expected "rms" or "layer", got \'batch\'': [
            lambda f: f.qk_norm_rope(q, q, None, None, table, table, across_heads=True, norm="batch"),
        ],
        "eps: expected a number, None or a (query, key) pair of them, got 3": [
            lambda f: f.qk_norm_rope(q, q, None, None, table, table, (1.0, 1.0, 1.0), across_heads=True),
        ],
        'approximate: expected "none" or "tanh", got \'erf\'': [
            lambda f: f.geglu(x, approximate="erf"),
            lambda f: f.gelu(x, approximate="erf"),
        ],
        "rope_dims: expected three numbers, got (4, 4)": [lambda f: f.rope_3d(q, q, 1, 2, 3, rope_dims=(4, 4))],
        "theta_base: expected one number or three, got (1.0, 2.0)": [lambda f: f.rope_3d(q, q, 1, 2, 3, (1.0, 2.0))],
    }
    for text, functions in calls.items():
        for call in functions:
            for package in (ltx, ltx.reference):
                with pytest.raises(ValueError) as error:
                    call(package)
                assert str(error.value) == text
