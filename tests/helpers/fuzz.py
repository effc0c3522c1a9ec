"""Random calls of every function, over shapes, layouts, dtypes, broadcasts, options, values and aliasing.

A family is a frozen dataclass of plain numbers and names with a hypothesis strategy, so that hypothesis shrinks a
failure and prints it as Python that runs it again: `Norm(op="rmsnorm", ...).check(ltx, device)`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import torch
from torch import Tensor

from .attention import has_kernel
from .cases import (
    ACTIVATIONS,
    CLAMPED,
    DTYPES,
    MASKS,
    MODULATORS,
    NORM_OPS,
    QUANTISED_NORMS,
    TABLES,
    WEIGHTS,
    Case,
    Make,
    activation_case,
    attention_case,
    attention_mask,
    eps_names,
    gate_heads_case,
    index_case,
    modulator_shape,
    norm_case,
    offers_offset,
    optional,
    plain_attention_case,
    qk_norm_rope_case,
    rope_case,
    rotary_case,
)
from .channels_last import LAYOUTS as VIDEO_LAYOUTS
from .channels_last import NORMS, OPERANDS, Video
from .check import check_everywhere
from .group_norm import OPERANDS as IMAGE_OPERANDS
from .group_norm import OPS as IMAGE_OPS
from .group_norm import Image
from .memory import LAYOUTS, place, torch_threads
from .tally import Tally

MAIN = ("input", "residual", "query", "key", "up")
# How the values of the main tensors are spread.
VALUES = ["normal", "integers", "small", "large", "offset", "zero rows", "denormal", "special"]
ELEMENTS = 2**16  # of the input, so that a case takes milliseconds

dtypes = st.sampled_from(DTYPES)
layouts = st.sampled_from(list(LAYOUTS))
seeds = st.integers(0, 2**16)
values = st.one_of(st.just("normal"), st.sampled_from(VALUES))
widths = st.one_of(
    st.integers(1, 70),
    st.sampled_from([127, 128, 250, 264, 512, 1000, 1024, 2048, 2050, 4096, 5120, 8192, 16384, 32768]),
    st.integers(71, 32768),
)
head_halves = st.one_of(st.integers(1, 70), st.sampled_from([32, 64, 128, 256, 512]))
eps = st.sampled_from([None, 0.0, 1e-12, 1e-6, 1e-5, 0.3, 7.0])


@dataclasses.dataclass(frozen=True)
class Memory:
    """Layouts of the tensors in turn, of the outputs, what to overwrite, and how the values are spread."""

    layouts: tuple[str, ...]
    out_layout: str
    in_place: tuple[str, ...]
    expanded: bool
    values: str
    seed: int

    def prepare(self, case: Case) -> Case:
        """The case with its values spread, and its tensors expanded and in their layouts."""
        for name in MAIN:
            if name in case.kwargs:
                case = case.replace(**{name: spread(case.kwargs[name], self.values, self.seed)})
        least = []
        for name in eps_names(case.op) if case.op in NORM_OPS else ("eps",):
            eps = case.kwargs.get(name)
            least += [e for e in (eps if isinstance(eps, tuple) else (eps,)) if e is not None]
            if self.values == "denormal" and least and min(least) <= 1e-12:  # their squares are zero in fp32
                case = case.replace(**{name: 1e-6})
        constant = self.values == "offset" and case.inputs[0].dtype == torch.bfloat16  # all elements are 64
        layer = "layernorm" in case.op or case.kwargs.get("norm") == "layer"
        if (constant or case.inputs[0].shape[-1:] == (1,)) and layer and least and min(least) == 0.0:  # 0 / 0
            case = case.replace(eps=1e-6)
        if self.expanded:
            for name in MAIN:
                if name in case.kwargs and case.kwargs[name].dim() > 1 and case.kwargs[name].shape[0] > 1:
                    case = case.replace(**{name: case.kwargs[name][:1].expand(case.kwargs[name].shape)})
        names = list(case.tensors)
        for i, layout in enumerate(self.layouts):
            name = names[i % len(names)]
            # Not one of a pair of tables, and no memory that tensors share.
            if name in case.kwargs and not (self.expanded and name in MAIN):
                case = case.replace(**{name: place(case.kwargs[name], layout)})
        return case

    def check(self, ltx: Any, device: str, case: Case, tally: Tally | None, *, repeat: bool = True) -> None:
        # A mean far above the deviation: what the order of its sum changes, every element of the row shows. And rows of
        # few integers, or of one number, repeat one another: if one rounds the other way, it does so in many rows.
        repeating = self.values == "integers" or case.inputs[0].shape[-1:] == (1,)
        tolerance = {"flipped": 1.0, "steps": 8} if self.values == "offset" else {"flipped": 1.0} if repeating else {}
        check_everywhere(
            ltx,
            self.prepare(case),
            device,
            out_layout=self.out_layout,
            in_place=self.in_place,
            tally=tally,
            repeat=repeat,
            eager=self.values != "denormal",  # plain torch's own denormals differ from release to release
            **tolerance,
        )


memories = st.builds(
    Memory,
    layouts=st.lists(layouts, max_size=8).map(tuple),
    out_layout=layouts,
    in_place=st.sets(st.sampled_from(["input", "residual", "query", "up"]), max_size=2).map(lambda s: tuple(sorted(s))),
    expanded=st.sampled_from([False, False, False, True]),
    values=values,
    seed=seeds,
)


def spread(x: Tensor, kind: str, seed: int) -> Tensor:
    half = x.dtype == torch.float16
    if kind == "integers":
        return (2 * x).round()
    if kind == "small":
        return x * 2.0 ** (-10 if half else -20)
    if kind == "large":
        return x * 2.0 ** (8 if half else 20)
    if kind == "offset":
        return x * 0.01 + 64
    if kind == "denormal":
        return x * (torch.finfo(x.dtype).smallest_normal / 4)
    x = x.clone()
    if kind == "zero rows" and x.dim() > 1:
        x[:1] = 0
    if kind == "special" and x.numel():
        generator = torch.Generator().manual_seed(seed)
        places = torch.randint(x.numel(), (2,), generator=generator)
        x.view(-1)[places] = torch.tensor([math.inf, math.nan], dtype=x.dtype)
    return x


def bounded(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with leading sizes halved until it is small enough, strides of empty ones included."""
    sizes = list(shape)
    while math.prod(max(size, 1) for size in sizes) > ELEMENTS and max(sizes[:-1], default=1) > 1:
        largest = sizes.index(max(sizes[:-1]))
        sizes[largest] = (sizes[largest] + 1) // 2
    return tuple(sizes)


@st.composite
def shapes(draw: Any) -> tuple[int, ...]:
    smallest = 0 if draw(st.integers(0, 19)) == 0 else 1
    leading = draw(st.lists(st.integers(smallest, draw(st.sampled_from([4, 4, 4, 70]))), max_size=4))
    return bounded((*leading, draw(widths)))


@dataclasses.dataclass(frozen=True)
class Norm:
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    param_dtype: torch.dtype
    modulation_dtype: torch.dtype
    modulations: tuple[str, ...]  # of the first MODULATORS
    packed: bool  # modulators that are views of one [B, n, H], as LTX-Video's are
    without: tuple[str, ...]
    tables: tuple[str, ...]
    same_residual: bool
    eps: float | None
    weight_offset: float
    memory: Memory
    # dtype, rows, whether they are [B, rows, H], and whether each row of the input has a number of its own
    index: tuple[torch.dtype, int, bool, bool] | None = None

    def check(self, ltx: Any, device: str, tally: Tally | None = None) -> None:
        self.memory.check(ltx, device, self.case(), tally)

    def case(self) -> Case:
        make = Make("cpu", self.dtype, self.memory.seed)
        case = norm_case(
            self.op,
            make,
            self.shape,
            param_dtype=self.param_dtype,
            modulation="vector",
            without=[name for name in self.without if name in optional(self.op)],
        )
        hidden = self.shape[-1]
        if self.index is not None and any(case.kwargs.get(name) is not None for name in MODULATORS):
            index_dtype, rows, per_batch, whole = self.index
            indexed = index_case(
                self.op,
                make,
                self.shape,
                rows=rows,
                per_batch=per_batch,
                index_shape=None if whole else self.shape[-2:-1],
                index_dtype=index_dtype,
                modulation_dtype=self.modulation_dtype,
            ).kwargs
            given = [name for name in MODULATORS if case.kwargs.get(name) is not None]
            case = case.replace(index=indexed["index"], **{name: indexed[name] for name in given})
        count = len(self.modulations)
        packed = make(self.shape[0], count, hidden, dtype=self.modulation_dtype) if self.packed else None
        for i, (name, kind) in enumerate(zip(MODULATORS, self.modulations, strict=False)):
            if case.kwargs.get(name) is not None:
                if "index" not in case.kwargs:
                    shape = modulator_shape(kind, self.shape)
                    case.kwargs[name] = make(*shape, dtype=self.modulation_dtype) if packed is None else packed[:, i]
                if name in self.tables:
                    case.kwargs[f"{name}_table"] = make(hidden)
        for name in eps_names(self.op):
            case.kwargs[name] = self.eps if self.eps is not None or "layernorm" not in self.op else 1e-5
        if offers_offset(self.op):
            case.kwargs["weight_offset"] = self.weight_offset
        if self.same_residual and "residual" in case.kwargs:
            case.kwargs["residual"] = case.kwargs["input"]
        return case


indices = st.tuples(
    st.sampled_from([torch.int64, torch.int32, torch.bool]), st.integers(2, 5), st.booleans(), st.booleans()
)


@st.composite
def norms(draw: Any) -> Norm:
    shape = draw(shapes())
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
        packed=len(shape) > 2 and draw(st.booleans()),
        index=draw(st.none() | indices) if len(shape) > 1 else None,
        without=tuple(sorted(draw(st.sets(st.sampled_from([*WEIGHTS, "bias", *MODULATORS]), max_size=2)))),
        tables=tuple(sorted(draw(st.sets(st.sampled_from(MODULATORS))))),
        same_residual=draw(st.sampled_from([False, False, False, True])),
        eps=draw(eps),
        weight_offset=draw(st.sampled_from([0.0, 1.0, -0.5])),
        memory=draw(memories),
    )


@dataclasses.dataclass(frozen=True)
class Activation:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    param_dtype: torch.dtype
    memory: Memory

    def check(self, ltx: Any, device: str, tally: Tally | None = None) -> None:
        self.memory.check(ltx, device, self.case(), tally)

    def case(self) -> Case:
        make = Make("cpu", self.dtype, self.memory.seed)
        options = {"param_dtype": self.param_dtype} if "bias" in self.name else {}
        return activation_case(self.name, make, self.shape, **options)


def activations(names: list[str]) -> st.SearchStrategy[Activation]:
    return st.builds(
        Activation,
        name=st.sampled_from(names),
        shape=shapes(),
        dtype=dtypes,
        param_dtype=dtypes,
        memory=memories,
    )


@dataclasses.dataclass(frozen=True)
class HeadGates:
    leading: tuple[int, ...]
    heads: tuple[int, int]  # heads, D
    per_head: bool
    scale: float
    dtype: torch.dtype
    memory: Memory

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.leading, *self.heads)

    def case(self) -> Case:
        make = Make("cpu", self.dtype, self.memory.seed)
        return gate_heads_case(make, self.shape, per_head=self.per_head, scale=self.scale)

    def check(self, ltx: Any, device: str, tally: Tally | None = None) -> None:
        self.memory.check(ltx, device, self.case(), tally)


head_gates = st.builds(
    HeadGates,
    leading=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    heads=st.tuples(
        st.one_of(st.integers(1, 6), st.sampled_from([24, 32])), st.one_of(st.integers(1, 70), st.just(128))
    ),
    per_head=st.booleans(),
    scale=st.sampled_from([1.0, 2.0, 0.3]),
    dtype=dtypes,
    memory=memories,
)


@dataclasses.dataclass(frozen=True)
class Rotary:
    kind: str  # apply_rotary, apply_rotary_qk, per head, across heads
    sizes: tuple[int, int, int, int]  # batch, sequence, heads, half of D
    key: tuple[int, int]
    packed: bool  # query and key are views of one projection [B, S, query | key]
    table: str
    key_table: bool
    rotary_half: int | None
    layout: str
    heads_first: bool
    dtype: torch.dtype
    table_is_fp32: bool
    weight_dtype: torch.dtype
    weights: bool
    eps: float | tuple[float | None, float | None] | None
    norm: str
    biases: bool
    weight_offset: float
    cast_before_weight: bool
    memory: Memory

    def check(self, ltx: Any, device: str, tally: Tally | None = None) -> None:
        make = Make("cpu", self.dtype, self.memory.seed)
        batch, sequence, heads, half = self.sizes
        # Heads and sequence must differ, or [B, S, H, W] and [B, H, S, W] are one shape.
        key = (self.key[0], heads if "H" in self.table else self.key[1])
        if self.packed or self.kind == "apply_rotary":
            key = (sequence, key[1])
        if self.kind == "apply_rotary":
            key = (sequence, heads)
        hypothesis.assume(not {sequence, key[0], max(sequence, key[0])} & {heads, key[1], 1})
        sizes = (batch, sequence, heads, 2 * half)
        options: dict[str, Any] = {
            "table": self.table,
            "table_dtype": torch.float32 if self.table_is_fp32 else self.dtype,
            "layout": self.layout,
        }
        partial = self.rotary_half is not None and self.rotary_half < half and "H" not in self.table
        if self.kind.startswith("apply"):
            options["rotary_dim"] = 2 * self.rotary_half if partial and self.rotary_half else None
            if self.kind == "apply_rotary_qk":
                options["key"] = key
            case = rotary_case(make, sizes, heads_first=self.heads_first, **options)
            if options["rotary_dim"]:
                case = case.replace(rotary_dim=options["rotary_dim"])
        else:
            case = qk_norm_rope_case(
                make,
                sizes,
                key=key,
                across_heads=self.kind == "across heads",
                key_table=self.key_table,
                weight_dtype=self.weight_dtype,
                weights=self.weights,
                eps=self.eps,
                norm=self.norm,
                biases=self.biases and self.norm == "layer",
                weight_offset=self.weight_offset,
                cast_before_weight=self.cast_before_weight and self.norm == "rms",
                **options,
            )
        if self.packed and "query" in case.kwargs and not case.kwargs.get("sequence_dim"):
            whole = torch.cat((case.kwargs["query"], case.kwargs["key"]), 2)
            query, key_view = whole.split((heads, key[1]), 2)
            case = case.replace(query=query, key=key_view)
        self.memory.check(ltx, device, case, tally)


rotaries = st.builds(
    Rotary,
    kind=st.sampled_from(["apply_rotary", "apply_rotary_qk", "per head", "across heads"]),
    sizes=st.tuples(
        st.integers(1, 3), st.integers(2, 9), st.one_of(st.integers(1, 6), st.sampled_from([24, 32])), head_halves
    ),
    key=st.tuples(st.integers(2, 9), st.integers(1, 6)),
    packed=st.booleans(),
    table=st.sampled_from([name for name in TABLES if name != "[1, D]"]),
    key_table=st.booleans(),
    rotary_half=st.none() | st.integers(1, 64),
    layout=st.sampled_from(["interleaved", "half"]),
    heads_first=st.booleans(),
    dtype=dtypes,
    table_is_fp32=st.booleans(),
    weight_dtype=dtypes,
    weights=st.sampled_from([True, True, False]),
    eps=eps | st.tuples(eps, eps),
    norm=st.sampled_from(["rms", "rms", "layer"]),
    biases=st.booleans(),
    weight_offset=st.sampled_from([0.0, 0.0, 1.0, -0.5]),
    cast_before_weight=st.booleans(),
    memory=memories,
)


@dataclasses.dataclass(frozen=True)
class Rope:
    sizes: tuple[int, int, int]  # batch, heads, half of D
    key_heads: int
    sequence: int
    grid: tuple[int, int, int] | None
    theta_base: float | tuple[float, float, float]
    positions: str
    layout: str
    dtype: torch.dtype
    memory: Memory

    def check(self, ltx: Any, device: str, tally: Tally | None = None) -> None:
        make = Make("cpu", self.dtype, self.memory.seed)
        batch, heads, half = self.sizes
        options: dict[str, Any] = {"layout": self.layout, "theta_base": self.theta_base, "key_heads": self.key_heads}
        if self.grid is not None:
            case = rope_case(make, (batch, heads, 2 * half), grid=self.grid, **options)
        else:
            if isinstance(self.theta_base, tuple):
                options["theta_base"] = self.theta_base[0]
            generator = torch.Generator().manual_seed(self.memory.seed)
            positions = torch.randint(-50, 5000, (batch, self.sequence), generator=generator)
            given = {
                "none": None,
                "int64": positions,
                "int32": positions[0].int(),
                "float32": positions[:1].float() / 7,
            }[self.positions]
            if given is not None:
                options["positions"] = given
            case = rope_case(make, (batch, heads, 2 * half), sequence=self.sequence, **options)
        self.memory.check(ltx, device, case, tally)


thetas = st.sampled_from([1.0, 10.0, 10000.0, 1e6])
ropes = st.builds(
    Rope,
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 5), head_halves),
    key_heads=st.integers(1, 5),
    sequence=st.integers(1, 12),
    grid=st.none() | st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    theta_base=thetas | st.tuples(thetas, thetas, thetas),
    positions=st.sampled_from(["none", "int64", "int32", "float32"]),
    layout=st.sampled_from(["interleaved", "half"]),
    dtype=dtypes,
    memory=memories,
)


@dataclasses.dataclass(frozen=True)
class Attention:
    sizes: tuple[int, int, int, int]  # batch, queries, heads, D
    keys: int
    packed: bool  # key and value are views of one projection
    mask: str
    mask_dtype: torch.dtype
    dtype: torch.dtype
    weight_dtype: torch.dtype
    weights: bool
    eps: float | None
    scale: float | None
    memory: Memory

    def check(self, ltx: Any, device: str, tally: Tally | None = None) -> None:
        batch, queries, heads, width = self.sizes
        # The truth holds the weights of all queries, and numbers of all keys, in fp64.
        keys = min(self.keys, max(1, ELEMENTS // (batch * heads * max(width, queries))))
        case = attention_case(
            Make("cpu", self.dtype, self.memory.seed),
            self.sizes,
            keys,
            mask=self.mask,
            mask_dtype=self.mask_dtype,
            weight_dtype=self.weight_dtype,
            weights=self.weights,
            packed=self.packed,
            eps=self.eps,
            scale=self.scale,
        )
        self.memory.check(ltx, device, case, tally)


attentions = st.builds(
    Attention,
    sizes=st.tuples(
        st.integers(1, 3),
        st.one_of(st.integers(1, 9), st.integers(1, 140)),
        st.one_of(st.integers(1, 4), st.sampled_from([8, 24, 32])),
        st.one_of(st.sampled_from([64, 128]), st.integers(1, 256)),
    ),
    keys=st.one_of(st.integers(0, 40), st.sampled_from([77, 127, 128, 129, 256, 257, 512]), st.integers(1, 600)),
    packed=st.booleans(),
    mask=st.sampled_from(MASKS),
    mask_dtype=dtypes,
    dtype=dtypes,
    weight_dtype=dtypes,
    weights=st.sampled_from([True, True, False]),
    eps=eps,
    scale=st.sampled_from([None, None, 1.0, 0.0, -0.25]),
    memory=memories,
)


@dataclasses.dataclass(frozen=True)
class PlainAttention:
    """Of the heads that have a kernel on some GPUs. Elsewhere it is torch's attention, which promises no bits."""

    sizes: tuple[int, int, int, int]  # batch, queries, key heads, D
    group: int  # heads of the query that share one of key and value
    keys: int
    packed: bool  # key and value are views of one projection
    is_causal: bool
    mask: str  # where it is not causal
    bool_mask: bool
    lengths: tuple[int, int, int] | None  # of the first samples, in hundredths of the keys
    dtype: torch.dtype
    scale: float | None
    memory: Memory

    def check(self, ltx: Any, device: str, tally: Tally | None = None) -> None:
        batch, queries, key_heads, width = self.sizes
        heads = key_heads * self.group
        keys = min(self.keys, max(1, 4 * ELEMENTS // (batch * heads * max(width, queries))))
        make = Make("cpu", self.dtype, self.memory.seed)
        case = plain_attention_case(
            make,
            (batch, queries, heads, width),
            keys,
            key_heads=key_heads,
            packed=self.packed,
            is_causal=self.is_causal,
            scale=self.scale,
        )
        mask = attention_mask(make, batch, keys, "none" if self.is_causal else self.mask, torch.float32)
        if mask is not None:
            case = case.replace(mask=mask > -1 if self.bool_mask else mask)
        if self.lengths is not None:
            lengths = torch.tensor([keys * part // 100 for part in self.lengths[:batch]], dtype=torch.int32)
            case = case.replace(key_lengths=lengths)
        memory = self.memory
        if memory.values == "special" and (mask is not None or self.lengths is not None or self.is_causal):
            memory = dataclasses.replace(memory, values="normal")  # keys that are left out must be finite
        memory.check(ltx, device, case, tally, repeat=has_kernel(ltx, device))


SPECIAL_KEYS = [79, 80, 127, 128, 129, 160, 256, 257, 961, 1025, 2500]  # around whole tiles and pieces of keys

plain_attentions = st.builds(
    PlainAttention,
    sizes=st.tuples(
        st.integers(1, 3),
        st.one_of(st.integers(1, 9), st.integers(1, 200)),
        st.one_of(st.integers(1, 4), st.sampled_from([8, 32])),
        st.sampled_from([64, 128]),
    ),
    group=st.sampled_from([1, 1, 2, 7]),
    keys=st.one_of(st.integers(0, 40), st.sampled_from(SPECIAL_KEYS), st.integers(1, 600)),
    packed=st.booleans(),
    is_causal=st.booleans(),
    mask=st.one_of(st.just("none"), st.sampled_from(MASKS)),
    bool_mask=st.booleans(),
    lengths=st.one_of(st.none(), st.tuples(*[st.integers(0, 110)] * 3)),
    dtype=st.sampled_from([torch.bfloat16, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([None, None, 1.0, 0.0, -0.25]),
    memory=memories,
)


@dataclasses.dataclass(frozen=True)
class Quantised:
    """A call of a `_quant` function, or of quantize_rows, with the checkers of tests/test_quant.py."""

    of: Norm | Activation | HeadGates
    rows_alone: bool
    static_scale: float | None

    @property
    def prefix(self) -> int:
        """How many columns of a prefix stand before the activated ones."""
        return (0, 0, 1, 8, 136, 1500)[self.of.memory.seed % 6] if isinstance(self.of, Activation) else 0

    def check(self, ltx: Any, device: str, tally: Tally | None = None) -> None:
        import test_quant

        case = self.of.memory.prepare(self.of.case()).on(device)
        static = None if self.static_scale is None else torch.tensor(self.static_scale, device=device)
        if self.rows_alone:
            x = case.kwargs["input"]
            result = ltx.quantize_rows(x, static_scale=static)
            test_quant.assert_exactly(result, test_quant.exactly(x, static))
        elif self.prefix:
            gate = case.kwargs["input"]
            before = Make(device, gate.dtype, seed=self.prefix)(*gate.shape[:-1], self.prefix)
            test_quant.check_prefix(ltx, case, before)
        else:
            test_quant.check(ltx, case, static)
        if tally is not None:
            op = "quantize_rows" if self.rows_alone else f"{case.op}_quant"
            tally.of(op, case.inputs[0].dtype).cases += 1


def quantisable(of: Norm | Activation | HeadGates) -> Norm | Activation | HeadGates:
    """The example with an op that has a quantising twin, and values of which fp8 keeps something."""
    spread_as = of.memory.values if of.memory.values in ("normal", "integers", "zero rows") else "normal"
    of = dataclasses.replace(of, memory=dataclasses.replace(of.memory, values=spread_as))
    if isinstance(of, Norm) and of.eps == 0.0:  # rows of zeros would be NaN
        of = dataclasses.replace(of, eps=1e-6)
    if isinstance(of, Norm) and of.op not in QUANTISED_NORMS:
        return dataclasses.replace(of, op="adaln_rmsnorm")
    return of


def has_whole_rows(of: Norm | Activation | HeadGates) -> bool:
    """A row whose largest number is in the tail of an activation would have no digits to compare."""
    return 0 not in of.shape and (not isinstance(of, Activation) or of.shape[-1] >= 16)


quantised = st.builds(
    Quantised,
    of=st.one_of(norms(), activations(list(ACTIVATIONS)), head_gates).map(quantisable).filter(has_whole_rows),
    rows_alone=st.sampled_from([False, False, True]),
    static_scale=st.sampled_from([None, None, 0.01, 3.0]),
)

videos = st.builds(
    Video,
    op=st.sampled_from(["channel_norm", "channel_norm_residual", "pixel_shuffle_3d", "unpatchify"]),
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 6), st.integers(1, 6)),
    channels=st.one_of(st.integers(1, 70), st.sampled_from([8, 16, 48, 96, 128, 256])),
    dtype=dtypes,
    norm=st.sampled_from(NORMS),
    operands=st.sets(st.sampled_from(OPERANDS)).map(lambda s: tuple(sorted(s))),
    eps=st.sampled_from([1e-8, 1e-6, 0.25]),
    silu=st.booleans(),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    reflect=st.booleans(),
    upscale=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2)),
    residual_parts=st.sampled_from([1, 2, 4]),
    skip_frames=st.integers(0, 2),
    clamp=st.booleans(),
    layout=st.sampled_from(VIDEO_LAYOUTS),
    given_out=st.booleans(),
    in_place=st.sampled_from(["", "input", "residual"]),
    seed=seeds,
)


@st.composite
def images(draw: st.DrawFn) -> Image:
    group_channels = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 12, 16, 32, 130]))
    groups = draw(st.sampled_from([1, 2, 3, 8, 32] if group_channels <= 16 else [1, 2, 3]))
    pixels = st.one_of(
        st.lists(st.integers(1, 9), min_size=2, max_size=3).map(tuple), st.sampled_from([(17, 16), (33, 31)])
    )
    return draw(
        st.builds(
            Image,
            op=st.sampled_from(IMAGE_OPS),
            size=st.tuples(st.integers(1, 3), pixels).map(lambda size: (size[0], *size[1])),
            channels=st.just(group_channels * groups),
            groups=st.just(groups),
            dtype=dtypes,
            operands=st.sets(st.sampled_from(IMAGE_OPERANDS)).map(lambda s: tuple(sorted(s))),
            per_image=st.booleans(),
            mean=st.sampled_from([0.0, 1.0, 1000.0]),
            eps=st.sampled_from([1e-6, 1e-5, 0.25]),
            silu=st.booleans(),
            scale=st.tuples(st.integers(1, 3), st.integers(1, 3)),
            layout=st.sampled_from(VIDEO_LAYOUTS),
            given_out=st.booleans(),
            in_place=st.sampled_from(["", "input", "residual"]),
            seed=seeds,
        )
    )


# Each with its part of the cases.
FAMILIES = {
    "norms": (norms(), 0.2),
    "channels-last video": (videos, 0.05),
    "group norms and upsampling": (images(), 0.05),
    "activations": (activations([*ACTIVATIONS, *CLAMPED]), 0.13),
    "gates of heads": (head_gates, 0.04),
    "rotary": (rotaries, 0.2),
    "rope": (ropes, 0.08),
    "attention": (attentions, 0.1),
    "plain attention": (plain_attentions, 0.05),
    "quantised": (quantised, 0.1),
}


SHRINKING = {hypothesis.Phase.shrink, hypothesis.Phase.explain}


def run(
    ltx: Any, device: str, family: str, cases: int, tally: Tally, seed: int | None = None, *, shrink: bool = True
) -> None:
    """Runs at least `cases` of a family: the same ones every time, or those of a seed.

    Fails with the smallest call that hypothesis finds, which may take minutes, or with the one that it drew first.
    """
    strategy, _ = FAMILIES[family]
    phases = [phase for phase in hypothesis.Phase if shrink or phase not in SHRINKING]
    settings = hypothesis.settings(
        max_examples=cases,
        derandomize=seed is None,
        database=None,
        deadline=None,
        print_blob=False,
        phases=phases,
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    @settings
    @hypothesis.given(example=strategy)
    def each(example: Any) -> None:
        example.check(ltx, device, tally)

    with torch_threads(1):  # the tensors are small, and other workers have the other cores
        (each if seed is None else hypothesis.seed(seed)(each))()
