"""Times the CPU backend against the plain torch code that each op replaces.

    python tools/build.py --backend cpu
    python benchmarks/cpu.py [--kernel PATH] [--threads 2] [--only NAME] [--rounds 15]

Ours and eager take turns within each round, so that both see the same machine; a row shows the median times and the
median over the rounds of ours / eager. Both allocate their outputs, as callers do. Exits with 1 and the list of rows
where a limit is missed: 1.1 for every op, 0.5 for the fused ones (norm + modulate, rotary), on inputs of 1 MB and more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from result_files import DTYPES, common_meta, write
from torch import Tensor

LIMIT = 1.1
FUSED_LIMIT = 0.5
LIMIT_BYTES = 1_000_000  # smaller inputs fit the caches, and the call itself counts
SECONDS_PER_SAMPLE = 0.01

# (batch, tokens, width): LTX-Video's hidden size, long rows, and rows of one attention head.
ROWS = [(1, 1024, 2048), (2, 32, 32768), (1, 32768, 64), (1, 16384, 128)]
WIDE = [(1, 512, 8192)]
HEADS = [(1, 512, 32, 64), (1, 256, 32, 128)]


@dataclass(frozen=True)
class Case:
    op: str
    dtype: str
    shape: tuple[int, ...]
    limit: float
    ours: Callable[[], Any]
    eager: Callable[[], Any]
    bytes: int


@dataclass(frozen=True)
class Row:
    op: str
    dtype: str
    shape: tuple[int, ...]
    ours_us: float
    eager_us: float
    ratio: float
    limit: float | None  # None below LIMIT_BYTES


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """diffusers' apply_rotary_emb with use_real, as LTX-Video, FLUX and Wan call it."""
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack([-imaginary, real], dim=-1).flatten(-2)
    return (x.float() * cos + rotated.float() * sin).to(x.dtype)


def half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """transformers' rotate_half, with tables in the input's dtype."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def computed(x: Tensor, layout: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """rope_1d as models write it: angles from the positions, then the rotation."""
    length, width = x.shape[1], x.shape[-1]
    frequency = 1.0 / 10000.0 ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency).repeat_interleave(2, dim=-1)
    return layout(x, angle.cos()[:, None], angle.sin()[:, None])


def norm_cases(ltx: ModuleType, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Iterator[Case]:
    batch, _, width = shape
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight, bias = torch.randn(width).to(dtype), torch.randn(width).to(dtype)
    scale, shift, gate = (torch.randn(batch, 1, width).to(dtype) for _ in range(3))

    def case(op: str, limit: float, ours: Callable[[], Any], eager: Callable[[], Any]) -> Case:
        return Case(op, name, shape, limit, ours, eager, x.nbytes)

    def rms(x: Tensor) -> Tensor:
        return F.rms_norm(x, (width,), weight, 1e-6)

    def layer(x: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), weight, bias, 1e-5)

    def residual_rms() -> tuple[Tensor, Tensor]:
        h = residual + x
        return rms(h), h

    def block() -> tuple[Tensor, Tensor]:
        h = residual + x * gate
        return F.rms_norm(h, (width,), None, 1e-6) * (1 + scale) + shift, h

    def layer_block() -> tuple[Tensor, Tensor]:
        h = residual + x * gate
        return F.layer_norm(h, (width,), None, None, 1e-5) * (1 + scale) + shift, h

    yield case("rmsnorm", LIMIT, lambda: ltx.rmsnorm(x, weight), lambda: rms(x))
    yield case("layernorm", LIMIT, lambda: ltx.layernorm(x, weight, bias), lambda: layer(x))
    yield case("rmsnorm_residual", LIMIT, lambda: ltx.rmsnorm_residual(x, residual, weight), residual_rms)
    yield case(
        "adaln_rmsnorm",
        FUSED_LIMIT,
        lambda: ltx.adaln_rmsnorm(x, None, scale, shift),
        lambda: F.rms_norm(x, (width,), None, 1e-6) * (1 + scale) + shift,
    )
    yield case(
        "adaln_layernorm",
        FUSED_LIMIT,
        lambda: ltx.adaln_layernorm(x, None, scale, shift),
        lambda: F.layer_norm(x, (width,), None, None, 1e-5) * (1 + scale) + shift,
    )
    yield case(
        "adaln_zero",
        FUSED_LIMIT,
        lambda: ltx.adaln_zero(x, weight, scale, shift, gate),
        lambda: (rms(x) * (1 + scale) + shift) * gate,
    )
    yield case("gated_residual", LIMIT, lambda: ltx.gated_residual(x, residual, gate), lambda: residual + x * gate)
    yield case(
        "gated_residual_adaln_rmsnorm",
        FUSED_LIMIT,
        lambda: ltx.gated_residual_adaln_rmsnorm(x, residual, gate, None, scale, shift),
        block,
    )
    yield case(
        "gated_residual_adaln_layernorm",
        FUSED_LIMIT,
        lambda: ltx.gated_residual_adaln_layernorm(x, residual, gate, None, scale, shift),
        layer_block,
    )
    yield case(
        "adaln_rmsnorm eager rounding",
        FUSED_LIMIT,
        lambda: ltx.adaln_rmsnorm(x, None, scale, shift, rounding="eager"),
        lambda: F.rms_norm(x, (width,), None, 1e-6) * (1 + scale) + shift,
    )


def unit_cases(ltx: ModuleType, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Iterator[Case]:
    x, up = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    bias = torch.randn(shape[-1]).to(dtype)
    packed = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)

    def case(op: str, ours: Callable[[], Any], eager: Callable[[], Any]) -> Case:
        return Case(op, name, shape, LIMIT, ours, eager, x.nbytes)

    def packed_silu() -> Tensor:
        gate, up = packed.chunk(2, dim=-1)
        return F.silu(gate) * up

    yield case("gelu", lambda: ltx.gelu(x), lambda: F.gelu(x))
    yield case("gelu tanh", lambda: ltx.gelu(x, approximate="tanh"), lambda: F.gelu(x, approximate="tanh"))
    yield case("gelu bias", lambda: ltx.gelu(x, bias=bias), lambda: F.gelu(x + bias))
    yield case("geglu", lambda: ltx.geglu(x, up, approximate="none"), lambda: F.gelu(x) * up)
    yield case("geglu tanh", lambda: ltx.geglu(x, up), lambda: F.gelu(x, approximate="tanh") * up)
    yield case("swiglu", lambda: ltx.swiglu(x, up), lambda: F.silu(x) * up)
    yield case("swiglu packed", lambda: ltx.swiglu(packed), packed_silu)


def rotary_cases(ltx: ModuleType, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Iterator[Case]:
    batch, length, heads, width = shape
    query, key = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    query_weight, key_weight = torch.randn(heads * width).to(dtype), torch.randn(heads * width).to(dtype)
    angle = torch.randn(length, width // 2)
    shared_cos, shared_sin = angle.cos().repeat_interleave(2, -1), angle.sin().repeat_interleave(2, -1)
    angle = torch.randn(batch, length, heads * width // 2)
    cos, sin = angle.cos().repeat_interleave(2, -1), angle.sin().repeat_interleave(2, -1)
    half_cos, half_sin = shared_cos.to(dtype), shared_sin.to(dtype)

    def case(op: str, ours: Callable[[], Any], eager: Callable[[], Any]) -> Case:
        return Case(op, name, shape, FUSED_LIMIT, ours, eager, query.nbytes)

    def norm_rope(x: Tensor, weight: Tensor) -> Tensor:
        return interleaved(F.rms_norm(x.flatten(2), (heads * width,), weight, 1e-6), cos, sin).view(shape)

    yield case(
        "apply_rotary",
        lambda: ltx.apply_rotary(query, shared_cos, shared_sin),
        lambda: interleaved(query, shared_cos[:, None], shared_sin[:, None]),
    )
    yield case(
        "apply_rotary, own angles per head",
        lambda: ltx.apply_rotary(query, cos, sin),
        lambda: interleaved(query.flatten(2), cos, sin),
    )
    transposed, half_table = query.transpose(1, 2).contiguous(), (half_cos[None, None], half_sin[None, None])
    yield case(
        "apply_rotary half, [B,H,S,D]",
        lambda: ltx.apply_rotary(transposed, half_cos, half_sin, sequence_dim=2, layout="half"),
        lambda: half(transposed, *half_table),
    )
    yield case(
        "qk_norm_rope across heads",
        lambda: ltx.qk_norm_rope(query, key, query_weight, key_weight, cos, sin, across_heads=True),
        lambda: (norm_rope(query, query_weight), norm_rope(key, key_weight)),
    )
    yield case(
        "qk_norm_rope per head",
        lambda: ltx.qk_norm_rope(
            query, key, query_weight[:width], key_weight[:width], shared_cos, shared_sin, across_heads=False
        ),
        lambda: tuple(
            interleaved(F.rms_norm(x, (width,), w[:width], 1e-6), shared_cos[:, None], shared_sin[:, None])
            for x, w in ((query, query_weight), (key, key_weight))
        ),
    )
    yield case(
        "rope_1d",
        lambda: ltx.rope_1d(query, key),
        lambda: (computed(query, interleaved), computed(key, interleaved)),
    )


def cases(ltx: ModuleType) -> Iterator[Case]:
    for name, dtype in DTYPES.items():
        for shape in ROWS:
            yield from norm_cases(ltx, name, dtype, shape)
        for shape in WIDE:
            yield from unit_cases(ltx, name, dtype, shape)
        for shape in HEADS:
            yield from rotary_cases(ltx, name, dtype, shape)


def seconds(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def measure(case: Case, rounds: int) -> Row:
    for call in (case.ours, case.eager):
        call()
    repeats = {call: max(1, round(SECONDS_PER_SAMPLE / seconds(call, 3))) for call in (case.ours, case.eager)}
    ours, eager = [], []
    for _ in range(rounds):
        ours.append(seconds(case.ours, repeats[case.ours]))
        eager.append(seconds(case.eager, repeats[case.eager]))
    return Row(
        op=case.op,
        dtype=case.dtype,
        shape=case.shape,
        ours_us=round(statistics.median(ours) * 1e6, 1),
        eager_us=round(statistics.median(eager) * 1e6, 1),
        ratio=round(statistics.median(a / b for a, b in zip(ours, eager)), 3),
        limit=case.limit if case.bytes >= LIMIT_BYTES else None,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", type=Path, help="repository or variant (default: build/, or pip's package)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="only ops whose name contains this")
    parser.add_argument("--output", type=Path, help="JSON (default: the table alone)")
    options = parser.parse_args()

    from command_line import load_kernels, metadata_of

    if options.kernel is None:
        ltx = load_kernels("cpu")
    else:
        from kernels import get_local_kernel

        ltx = get_local_kernel(options.kernel)
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    rows = []
    print(f"{'op':36}{'dtype':6}{'shape':20}{'ours us':>10}{'eager us':>10}{'ratio':>8}{'limit':>7}")
    with torch.inference_mode():
        for case in cases(ltx):
            if options.only not in case.op:
                continue
            row = measure(case, options.rounds)
            rows.append(row)
            shape = "x".join(map(str, row.shape))
            print(
                f"{row.op:36}{row.dtype:6}{shape:20}{row.ours_us:10.1f}{row.eager_us:10.1f}{row.ratio:8.3f}"
                f"{row.limit or '':>7}",
                flush=True,
            )
    if options.output is not None:
        write(options.output, common_meta(metadata_of(ltx)), rows=[asdict(row) for row in rows])
    missed = [row for row in rows if row.limit is not None and row.ratio > row.limit]
    for row in missed:
        shape = "x".join(map(str, row.shape))
        print(f"{row.op} {row.dtype} {shape}: took {row.ratio} of eager's time, limit {row.limit}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
