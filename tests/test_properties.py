"""Random calls over shape, stride, offset, dtype mixture, broadcast and eps.

Every example is a frozen dataclass of plain numbers and names, which hypothesis prints as Python that runs it again:
`Norm(op="rmsnorm", ...).check(ltx, device)`. The examples are the same in every run; LTX_EXAMPLES=1000 takes more.
"""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from helpers import (
    ACTIVATIONS,
    DTYPES,
    LAYOUTS,
    MODULATORS,
    NORM_OPS,
    TABLES,
    Case,
    Make,
    activation_case,
    check,
    check_eager,
    check_out,
    modulator_shape,
    norm_case,
    place,
    qk_norm_rope_case,
    rope_case,
    rotary_case,
)

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

EXAMPLES = int(os.environ.get("LTX_EXAMPLES", "150"))


def examples(count: int):
    return hypothesis.settings(
        max_examples=count,
        derandomize="LTX_EXAMPLES" not in os.environ,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


dtypes = st.sampled_from(DTYPES)
layouts = st.sampled_from(list(LAYOUTS))
seeds = st.integers(0, 2**16)
widths = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 250, 264, 1000, 1024, 2050, 4096, 5000]))
eps = st.sampled_from([None, 0.0, 1e-12, 1e-6, 1e-5, 0.3, 7.0])


def check_everything(ltx, case: Case, moved: tuple[str, ...], out_layout: str) -> None:
    """fp64 truth, eager rounding, and given outputs, of a case whose tensors are first put into layouts."""
    names = list(case.tensors)
    for i, layout in enumerate(moved):
        name = names[i % len(names)]
        if name in case.kwargs:  # not one of a pair of tables
            case = case.replace(**{name: place(case.kwargs[name], layout)})
    check(ltx, case)
    check_out(ltx, case, out_layout)
    if not case.op.startswith("rope") and case.op not in ("geglu", "swiglu", "gelu"):
        check_eager(ltx, case)


@dataclasses.dataclass(frozen=True)
class Norm:
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    param_dtype: torch.dtype
    modulation_dtype: torch.dtype
    modulations: tuple[str, str, str]
    without: tuple[str, ...]
    tables: tuple[str, ...]
    eps: float | None
    weight_offset: float
    layouts: tuple[str, ...]
    out_layout: str
    seed: int

    def check(self, ltx, device: str) -> None:
        required = set() if self.op.startswith("gated_residual_adaln") else set(MODULATORS)
        without = [name for name in self.without if name not in required]
        make = Make(device, self.dtype, self.seed)
        case = norm_case(
            self.op,
            make,
            self.shape,
            param_dtype=self.param_dtype,
            modulation_dtype=self.modulation_dtype,
            modulation="vector",
            without=without,
        )
        for name, kind in zip(MODULATORS, self.modulations, strict=True):
            if case.kwargs.get(name) is not None:
                case.kwargs[name] = make(*modulator_shape(kind, self.shape), dtype=self.modulation_dtype)
                if name in self.tables:
                    case.kwargs[f"{name}_table"] = make(self.shape[-1])
        if self.op != "gated_residual":
            case.kwargs["eps"] = self.eps if self.eps is not None or "layernorm" not in self.op else 1e-5
        if self.op in ("rmsnorm", "rmsnorm_residual"):
            case.kwargs["weight_offset"] = self.weight_offset
        check_everything(ltx, case, self.layouts, self.out_layout)


@st.composite
def norms(draw) -> Norm:
    leading = draw(st.lists(st.integers(0 if draw(st.integers(0, 9)) == 0 else 1, 4), max_size=4))
    shape = (*leading, draw(widths))
    kinds = {
        1: ["vector", "one number"],
        2: ["vector", "one number", "one for all batches", "[B, S, H]", "[B, S, 1]"],
        3: ["vector", "one number", "per batch", "one for all batches", "[B, 1, H]", "[1, S, H]", "[B, S, H]"],
    }.get(len(shape), ["vector", "per batch", "[B, 1, H]", "[1, S, H]", "[S, H]", "[B, S, H]", "[B, S, 1]"])
    return Norm(
        op=draw(st.sampled_from(list(NORM_OPS))),
        shape=shape,
        dtype=draw(dtypes),
        param_dtype=draw(dtypes),
        modulation_dtype=draw(dtypes),
        modulations=tuple(draw(st.sampled_from(kinds)) for _ in MODULATORS),
        without=tuple(draw(st.sets(st.sampled_from(["weight", "bias", *MODULATORS]), max_size=2))),
        tables=tuple(draw(st.sets(st.sampled_from(MODULATORS)))),
        eps=draw(eps),
        weight_offset=draw(st.sampled_from([0.0, 1.0, -0.5])),
        layouts=tuple(draw(st.lists(layouts, max_size=8))),
        out_layout=draw(layouts),
        seed=draw(seeds),
    )


@examples(2 * EXAMPLES)
@hypothesis.given(example=norms())
def test_norm_family(ltx, device, example):
    example.check(ltx, device)


@dataclasses.dataclass(frozen=True)
class Activation:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    param_dtype: torch.dtype
    layouts: tuple[str, ...]
    out_layout: str
    seed: int

    def check(self, ltx, device: str) -> None:
        make = Make(device, self.dtype, self.seed)
        options = {"param_dtype": self.param_dtype} if "bias" in self.name else {}
        case = activation_case(self.name, make, self.shape, **options)
        check_everything(ltx, case, self.layouts, self.out_layout)


@examples(EXAMPLES)
@hypothesis.given(
    example=st.builds(
        Activation,
        name=st.sampled_from(list(ACTIVATIONS)),
        shape=st.tuples(st.lists(st.integers(0, 4), max_size=4), widths).map(lambda s: (*s[0], s[1])),
        dtype=dtypes,
        param_dtype=dtypes,
        layouts=st.lists(layouts, max_size=3).map(tuple),
        out_layout=layouts,
        seed=seeds,
    )
)
def test_activations(ltx, device, example):
    example.check(ltx, device)


@dataclasses.dataclass(frozen=True)
class Rotary:
    kind: str  # apply_rotary, apply_rotary_qk, per head, across heads
    sizes: tuple[int, int, int, int]  # batch, sequence, heads, half of D
    key: tuple[int, int]
    table: str
    key_table: bool
    layout: str
    heads_first: bool
    dtype: torch.dtype
    table_is_fp32: bool
    weight_dtype: torch.dtype
    eps: float | None
    layouts: tuple[str, ...]
    out_layout: str
    seed: int

    def check(self, ltx, device: str) -> None:
        make = Make(device, self.dtype, self.seed)
        batch, sequence, heads, half = self.sizes
        # Heads and sequence must differ, or [B, S, H, W] and [B, H, S, W] are one shape.
        key = (self.key[0], heads if "H" in self.table else self.key[1])
        if self.kind == "apply_rotary":
            key = (sequence, heads)
        lengths = {sequence, key[0], max(sequence, key[0])}
        hypothesis.assume(not lengths & {heads, key[1], 1})
        sizes = (batch, sequence, heads, 2 * half)
        options = {
            "table": self.table,
            "table_dtype": torch.float32 if self.table_is_fp32 else self.dtype,
            "layout": self.layout,
        }
        if self.kind == "apply_rotary":
            case = rotary_case(make, sizes, heads_first=self.heads_first, **options)
        elif self.kind == "apply_rotary_qk":
            case = rotary_case(make, sizes, key=key, heads_first=self.heads_first, **options)
        else:
            case = qk_norm_rope_case(
                make,
                sizes,
                key=key,
                across_heads=self.kind == "across heads",
                key_table=self.key_table,
                weight_dtype=self.weight_dtype,
                eps=self.eps,
                **options,
            )
        check_everything(ltx, case, self.layouts, self.out_layout)


@examples(2 * EXAMPLES)
@hypothesis.given(
    example=st.builds(
        Rotary,
        kind=st.sampled_from(["apply_rotary", "apply_rotary_qk", "per head", "across heads"]),
        sizes=st.tuples(st.integers(1, 3), st.integers(2, 9), st.integers(1, 6), st.integers(1, 70)),
        key=st.tuples(st.integers(2, 9), st.integers(1, 6)),
        table=st.sampled_from([name for name in TABLES if name != "[1, D]"]),
        key_table=st.booleans(),
        layout=st.sampled_from(["interleaved", "half"]),
        heads_first=st.booleans(),
        dtype=dtypes,
        table_is_fp32=st.booleans(),
        weight_dtype=dtypes,
        eps=eps,
        layouts=st.lists(layouts, max_size=6).map(tuple),
        out_layout=layouts,
        seed=seeds,
    )
)
def test_rotary_with_tables(ltx, device, example):
    example.check(ltx, device)


@dataclasses.dataclass(frozen=True)
class Rope:
    sizes: tuple[int, int, int]  # batch, heads, half of D
    key_heads: int
    sequence: int
    grid: tuple[int, int, int] | None
    theta_base: float
    positions: str
    layout: str
    dtype: torch.dtype
    layouts: tuple[str, ...]
    out_layout: str
    seed: int

    def check(self, ltx, device: str) -> None:
        make = Make(device, self.dtype, self.seed)
        batch, heads, half = self.sizes
        options = {"layout": self.layout, "theta_base": self.theta_base, "key_heads": self.key_heads}
        if self.grid is not None:
            case = rope_case(make, (batch, heads, 2 * half), grid=self.grid, **options)
        else:
            generator = torch.Generator().manual_seed(self.seed)
            positions = torch.randint(-50, 5000, (batch, self.sequence), generator=generator).to(device)
            given = {
                "none": None,
                "int64": positions,
                "int32": positions[0].int(),
                "float32": positions[:1].float() / 7,
            }[self.positions]
            if given is not None:
                options["positions"] = given
            case = rope_case(make, (batch, heads, 2 * half), sequence=self.sequence, **options)
        check_everything(ltx, case, self.layouts, self.out_layout)


@examples(EXAMPLES)
@hypothesis.given(
    example=st.builds(
        Rope,
        sizes=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 70)),
        key_heads=st.integers(1, 5),
        sequence=st.integers(1, 12),
        grid=st.none() | st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
        theta_base=st.sampled_from([1.0, 10.0, 10000.0, 1e6]),
        positions=st.sampled_from(["none", "int64", "int32", "float32"]),
        layout=st.sampled_from(["interleaved", "half"]),
        dtype=dtypes,
        layouts=st.lists(layouts, max_size=4).map(tuple),
        out_layout=layouts,
        seed=seeds,
    )
)
def test_rope(ltx, device, example):
    example.check(ltx, device)
