"""torch.compile, fakes and gradients: what the ops and their Python functions do besides running eagerly."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from helpers import Make, assert_same_bits, every_function
from helpers.registry import CALLED_EVERYWHERE, FUNCTIONS, WITH_OUT, WITHOUT_GRADIENT, op_samples
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]
BATCH, TOKENS, HEADS, WIDTH = 2, 6, 3, 8
HIDDEN = HEADS * WIDTH
# (batch, tokens) of calls that share one compilation. The first two differ from each other and from every fixed size,
# because torch takes sizes that are equal at first for one size.
SIZES = [(5, 12), (4, 10), (7, 28)]


class Inputs:
    """Seeded tensors on one device, in one dtype unless told otherwise."""

    def __init__(self, device: str, dtype: torch.dtype = torch.float32, grad: bool = False) -> None:
        self.device, self.dtype, self.grad = device, dtype, grad
        self.generator = torch.Generator().manual_seed(1)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(shape, generator=self.generator).to(self.device, dtype or self.dtype)
        return values.requires_grad_(self.grad)

    def rows(self) -> Tensor:
        return self(BATCH, TOKENS, HIDDEN)

    def vector(self) -> Tensor:
        return self(HIDDEN, dtype=torch.float32)

    def heads(self, tokens: int = TOKENS, heads: int = HEADS) -> Tensor:
        return self(BATCH, tokens, heads, WIDTH)


@pytest.fixture(scope="module")
def samples(ltx: Any, device: str) -> dict[torch.dtype, dict[str, list[tuple[Any, ...]]]]:
    return {dtype: op_samples(ltx, device, dtype) for dtype in DTYPES}


@pytest.mark.extended
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", CALLED_EVERYWHERE)
def test_opcheck(ltx: Any, samples: Any, name: str, dtype: torch.dtype) -> None:
    """The last one compiles the op, which takes as long as all others: in float32 for the first and the last call."""
    op, calls = getattr(ltx._ops.ops, name).default, samples[dtype][name]
    assert len(calls) > 1
    for number, arguments in enumerate(calls):
        tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        if dtype == torch.float32 and 0 < number < len(calls) - 1:
            tests.pop()
        torch.library.opcheck(op, arguments, test_utils=tests)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLED_EVERYWHERE)
def test_opcheck_out(ltx: Any, samples: Any, name: str) -> None:
    for arguments in samples[torch.bfloat16][name]:
        results = getattr(ltx._ops.ops, name)(*arguments)
        outs = [torch.empty_like(result) for result in (results if isinstance(results, tuple) else (results,))]
        torch.library.opcheck(getattr(ltx._ops.ops, name + "_out").default, (*outs, *arguments))


# ---- The Python functions, each with a plain torch formula for the same tensors


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def layer(x: Tensor, eps: float = 1e-5) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps)


def turn(x: Tensor, angle_cos: Tensor, angle_sin: Tensor, interleaved: bool = True) -> Tensor:
    """Rotation by complex multiplication; x is [B, S, heads, D], the tables broadcast to [B, S, heads, D / 2]."""
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else torch.stack(x.chunk(2, -1), -1)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.complex(angle_cos, angle_sin)
    turned = torch.view_as_real(turned)
    return turned.flatten(-2) if interleaved else torch.cat(turned.unbind(-1), -1)


def angles(positions: Tensor, channels: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    frequency = (1 / theta ** (torch.arange(0, channels, 2, dtype=torch.float64) / channels)).to(
        like.device, torch.float32
    )
    angle = (positions.to(like.device, torch.float32)[:, None, None] * frequency).to(like.dtype)
    return angle.cos(), angle.sin()


def rope_3d_formula(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    frames, height, width = 1, 2, q.shape[1] // 2
    grid = torch.cartesian_prod(torch.arange(frames), torch.arange(height), torch.arange(width))
    tables = [angles(grid[:, axis], d, theta, q) for axis, d, theta in ((0, 2, 1e4), (1, 2, 1e3), (2, 4, 1e2))]
    cos, sin = (torch.cat(parts, -1) for parts in zip(*tables))
    return turn(q, cos, sin), turn(k, cos, sin)


def qk_norm_rope_formula(q: Tensor, k: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    cos, sin = cos[:, None], sin[:, None]
    return tuple(turn((rms(x.flatten(-2)) * w).view_as(x), cos, sin) for x, w in ((q, wq), (k, wk)))


def attention_formula(q: Tensor, k: Tensor, v: Tensor, wq: Tensor, wk: Tensor, mask: Tensor) -> Tensor:
    q, k = ((rms(x.flatten(-2)) * w).view_as(x) for x, w in ((q, wq), (k, wk)))
    scores = torch.einsum("bshd,bthd->bhst", q, k) / WIDTH**0.5 + mask[:, None, None]
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v)


def channel_norm_formula(x: Tensor, w: Tensor, c: Tensor, scale: Tensor, shift: Tensor, t: Tensor) -> Tensor:
    y = rms((x + c.view(-1, 1, 1, 1)).movedim(1, -1)) * w
    y = y * (1 + t + scale[:, None, None, None]) + shift[:, None, None, None]
    y = torch.nn.functional.silu(y).movedim(-1, 1)
    return torch.cat([y[:, :, :1], y, y[:, :, -1:], y[:, :, -1:]], 2)


def group_norm_formula(x: Tensor, r: Tensor, w: Tensor, b: Tensor, c: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    h = x + c.view(-1, 1, 1) + (r + t[:, :, None, None])
    grouped = h.unflatten(1, (2, 4)).flatten(2)
    centred = grouped - grouped.mean(2, keepdim=True)
    y = (centred / (centred.square().mean(2, keepdim=True) + 1e-6).sqrt()).view(h.shape)
    y = y * w.view(-1, 1, 1) + b.view(-1, 1, 1)
    return y * torch.sigmoid(y), h


def group_norm_tensors(m: Any, b: int, s: int) -> tuple[Tensor, ...]:
    return m(b, 8, s, 3), m(b, 8, s, 3), m(8), m(8), m(8), m(b, 8)


def every_third(x: Tensor) -> Tensor:
    """[S], the numbers 0, 1, 2, 0, 1, ..."""
    return torch.arange(x.shape[1], device=x.device) % 3


class Case:
    """A function of the package (or of its reference) applied to seeded tensors, and what it should compute."""

    def __init__(
        self,
        tensors: Callable[[Inputs, int, int], tuple[Tensor, ...]],
        call: Callable[..., Any],
        formula: Callable[..., Any],
    ) -> None:
        self.tensors, self.call, self.formula = tensors, call, formula


CASES = {
    "rmsnorm": Case(
        lambda m, b, s: (m(b, s, HIDDEN), m(HIDDEN)),
        lambda f, x, w: f.rmsnorm(x, w, weight_offset=1.0),
        lambda x, w: rms(x) * (1 + w),
    ),
    "rmsnorm_residual": Case(
        lambda m, b, s: (m(b, s, HIDDEN), m(b, s, HIDDEN), m(HIDDEN)),
        lambda f, x, r, w: f.rmsnorm_residual(x, r, w),
        lambda x, r, w: (rms(x + r) * w, x + r),
    ),
    "layernorm": Case(
        lambda m, b, s: (m(b, s, HIDDEN), m(HIDDEN), m(HIDDEN)),
        lambda f, x, w, c: f.layernorm(x, w, c),
        lambda x, w, c: layer(x) * w + c,
    ),
    "adaln_rmsnorm": Case(
        lambda m, b, s: (m(b, s, HIDDEN), m(HIDDEN), m(b, HIDDEN), m(b, 1, 6, HIDDEN)[:, :, 2], m(HIDDEN), m(HIDDEN)),
        lambda f, x, w, scale, shift, t, u: f.adaln_rmsnorm(x, w, scale, shift, scale_table=t, shift_table=u),
        lambda x, w, scale, shift, t, u: rms(x) * w * (1 + t + scale[:, None]) + u + shift,
    ),
    "adaln_rmsnorm by index": Case(
        lambda m, b, s: (m(b, s, HIDDEN), m(3, HIDDEN), m(3, HIDDEN)),
        lambda f, x, scale, shift: f.adaln_rmsnorm(x, None, scale, shift, index=every_third(x)),
        lambda x, scale, shift: rms(x) * (1 + scale[every_third(x)]) + shift[every_third(x)],
    ),
    "adaln_layernorm": Case(
        lambda m, b, s: (m(b, s, HIDDEN), m(HIDDEN), m(b, 1, HIDDEN), m(b, s, HIDDEN), m(HIDDEN)),
        lambda f, x, w, scale, shift, c: f.adaln_layernorm(x, w, scale, shift, c),
        lambda x, w, scale, shift, c: (layer(x) * w + c) * (1 + scale) + shift,
    ),
    "adaln_zero": Case(
        lambda m, b, s: (m(b, s, HIDDEN), m(b, HIDDEN), m(b, HIDDEN), m(b, HIDDEN), m(HIDDEN)),
        lambda f, x, scale, shift, gate, t: f.adaln_zero(x, None, scale, shift, gate, gate_table=t),
        lambda x, scale, shift, gate, t: (rms(x) * (1 + scale[:, None]) + shift[:, None]) * (t + gate[:, None]),
    ),
    "gated_residual": Case(
        lambda m, b, s: (m(b, s, HIDDEN), m(b, s, HIDDEN), m(b, 1, HIDDEN), m(HIDDEN)),
        lambda f, x, r, gate, t: f.gated_residual(x, r, gate, gate_table=t),
        lambda x, r, gate, t: r + x * (t + gate),
    ),
    "gated_residual_adaln_rmsnorm": Case(
        lambda m, b, s: (m(b, s, HIDDEN), m(b, s, HIDDEN), *(m(b, 1, HIDDEN) for _ in range(3)), m(HIDDEN)),
        lambda f, x, r, gate, scale, shift, w: f.gated_residual_adaln_rmsnorm(x, r, gate, w, scale, shift),
        lambda x, r, gate, scale, shift, w: (rms(r + x * gate) * w * (1 + scale) + shift, r + x * gate),
    ),
    "gated_residual_adaln_layernorm": Case(
        lambda m, b, s: (m(b, s, HIDDEN), m(b, s, HIDDEN), m(b, s, HIDDEN), m(b, HIDDEN)),
        lambda f, x, r, gate, scale: f.gated_residual_adaln_layernorm(x, r, gate, None, scale),
        lambda x, r, gate, scale: (layer(r + x * gate) * (1 + scale[:, None]), r + x * gate),
    ),
    "norm_residual": Case(
        lambda m, b, s: (m(b, s, HIDDEN), m(b, s, HIDDEN), m(b, HIDDEN), m(HIDDEN)),
        lambda f, x, r, gate, w: f.norm_residual(x, r, w, gate=gate, weight_offset=1.0),
        lambda x, r, gate, w: r + rms(x) * (1 + w) * gate[:, None],
    ),
    "norm_gated_residual_norm": Case(
        lambda m, b, s: (m(b, s, HIDDEN), m(b, s, HIDDEN), m(b, 1, HIDDEN), m(HIDDEN), m(HIDDEN), m(b, 1, HIDDEN)),
        lambda f, x, r, gate, w1, w2, scale: f.norm_gated_residual_norm(x, r, gate, w1, 1e-6, w2, scale),
        lambda x, r, gate, w1, w2, scale: (
            rms(r + rms(x) * w1 * gate) * w2 * (1 + scale),
            r + rms(x) * w1 * gate,
        ),
    ),
    "adaln_rmsnorm_pair": Case(
        lambda m, b, s: (m(b, s, HIDDEN), m(HIDDEN), *(m(b, HIDDEN) for _ in range(3))),
        lambda f, x, w, scale, scale2, shift2: f.adaln_rmsnorm_pair(x, w, scale, None, scale2, shift2),
        lambda x, w, scale, scale2, shift2: (
            rms(x) * w * (1 + scale[:, None]),
            rms(x) * w * (1 + scale2[:, None]) + shift2[:, None],
        ),
    ),
    "gated_residual_adaln_layernorm_pair": Case(
        lambda m, b, s: (m(b, s, HIDDEN), m(b, s, HIDDEN), *(m(b, 1, HIDDEN) for _ in range(3)), m(HIDDEN)),
        lambda f, x, r, gate, scale, scale2, c: f.gated_residual_adaln_layernorm_pair(
            x, r, gate, None, scale, None, scale2, None, c
        ),
        lambda x, r, gate, scale, scale2, c: (
            (layer(r + x * gate) + c) * (1 + scale),
            (layer(r + x * gate) + c) * (1 + scale2),
            r + x * gate,
        ),
    ),
    "adaln_layernorm_pair": Case(
        lambda m, b, s: (m(b, s, HIDDEN), *(m(b, 1, HIDDEN) for _ in range(4)), m(HIDDEN)),
        lambda f, x, scale, shift, scale2, shift2, t: f.adaln_layernorm_pair(
            x, None, scale, shift, scale2, shift2, scale2_table=t
        ),
        lambda x, scale, shift, scale2, shift2, t: (
            layer(x) * (1 + scale) + shift,
            layer(x) * (1 + t + scale2) + shift2,
        ),
    ),
    "gated_residual_adaln_rmsnorm_pair": Case(
        lambda m, b, s: (m(b, s, HIDDEN), m(b, s, HIDDEN), *(m(b, 1, HIDDEN) for _ in range(5))),
        lambda f, x, r, gate, scale, shift, scale2, shift2: f.gated_residual_adaln_rmsnorm_pair(
            x, r, gate, None, scale, shift, scale2, shift2
        ),
        lambda x, r, gate, scale, shift, scale2, shift2: (
            rms(r + x * gate) * (1 + scale) + shift,
            rms(r + x * gate) * (1 + scale2) + shift2,
            r + x * gate,
        ),
    ),
    "geglu": Case(
        lambda m, b, s: (m(b, s, 2 * HIDDEN),),
        lambda f, x: f.geglu(x, approximate="none", gate_first=False),
        lambda x: torch.nn.functional.gelu(x[..., HIDDEN:]) * x[..., :HIDDEN],
    ),
    "swiglu": Case(
        lambda m, b, s: (m(b, s, HIDDEN), m(b, s, HIDDEN)),
        lambda f, x, up: f.swiglu(x, up),
        lambda x, up: torch.nn.functional.silu(x) * up,
    ),
    "swiglu_clamped": Case(
        lambda m, b, s: (m(b, s, 2 * HIDDEN),),
        lambda f, x: f.swiglu_clamped(x, limit=1.0),
        lambda x: (
            (x[..., 1::2].clamp(-1, 1) + 1)
            * x[..., 0::2].clamp(max=1.0)
            * torch.sigmoid(1.702 * x[..., 0::2].clamp(max=1.0))
        ),
    ),
    "gate_heads": Case(
        lambda m, b, s: (m(b, s, HEADS, WIDTH), m(b, s, HEADS)),
        lambda f, x, gate: f.gate_heads(x, gate, 2.0),
        lambda x, gate: x * 2 * torch.sigmoid(gate)[..., None],
    ),
    "gate_heads per column": Case(
        lambda m, b, s: (m(b, s, HEADS, WIDTH), m(b, s, HIDDEN)),
        lambda f, x, gate: f.gate_heads(x, gate),
        lambda x, gate: x * torch.sigmoid(gate).view_as(x),
    ),
    "gelu": Case(
        lambda m, b, s: (m(b, s, HIDDEN), m(HIDDEN)),
        lambda f, x, c: f.gelu(x, bias=c, approximate="tanh"),
        lambda x, c: torch.nn.functional.gelu(x + c, approximate="tanh"),
    ),
    "rope_1d": Case(
        lambda m, b, s: (m(b, s, HEADS, WIDTH), m(b, s, 1, WIDTH)),
        lambda f, q, k: f.rope_1d(q, k, 500.0, layout="half"),
        lambda q, k: tuple(turn(x, *angles(torch.arange(x.shape[1]), WIDTH, 500.0, x), False) for x in (q, k)),
    ),
    "rope_3d": Case(
        lambda m, b, s: (m(b, s, HEADS, WIDTH), m(b, s, HEADS, WIDTH)),
        lambda f, q, k: f.rope_3d(q, k, 1, 2, q.shape[1] // 2, (1e4, 1e3, 1e2), rope_dims=(2, 2, 4)),
        rope_3d_formula,
    ),
    "apply_rotary": Case(
        lambda m, b, s: (m(b, HEADS, s, WIDTH), m(b, 1, s, WIDTH // 2), m(b, 1, s, WIDTH // 2)),
        lambda f, x, cos, sin: f.apply_rotary(x, cos, sin, sequence_dim=2, layout="half"),
        lambda x, cos, sin: turn(x, cos.expand(-1, HEADS, -1, -1), sin.expand(-1, HEADS, -1, -1), False),
    ),
    "apply_rotary_qk": Case(
        lambda m, b, s: (m(b, s, HEADS, WIDTH), m(b, s - 1, 2, WIDTH), m(s, WIDTH // 2), m(s, WIDTH // 2)),
        lambda f, q, k, cos, sin: f.apply_rotary_qk(q, k, cos, sin),
        lambda q, k, cos, sin: tuple(turn(x, cos[: x.shape[1], None], sin[: x.shape[1], None]) for x in (q, k)),
    ),
    "qk_norm_rope": Case(
        lambda m, b, s: (
            m(b, s, HEADS, WIDTH),
            m(b, s, 3 * WIDTH)[..., WIDTH:].unflatten(-1, (2, WIDTH)),
            m(HIDDEN),
            m(2 * WIDTH),
            m(s, WIDTH // 2),
            m(s, WIDTH // 2),
        ),
        lambda f, q, k, wq, wk, cos, sin: f.qk_norm_rope(q, k, wq, wk, cos, sin, across_heads=True),
        qk_norm_rope_formula,
    ),
    "qk_norm_rope, layer": Case(
        lambda m, b, s: (
            *(m(b, s, HEADS, WIDTH) for _ in "qk"),
            m(WIDTH),
            m(WIDTH),
            m(s, WIDTH // 2),
            m(s, WIDTH // 2),
        ),
        lambda f, q, k, w, c, cos, sin: f.qk_norm_rope(
            q, k, w, w, cos, sin, across_heads=False, norm="layer", query_bias=c, key_bias=c, weight_offset=1.0
        ),
        lambda q, k, w, c, cos, sin: tuple(
            turn(layer(x, 1e-6) * (1 + w) + c, cos[:, None], sin[:, None]) for x in (q, k)
        ),
    ),
    "qk_norm_cross_attention": Case(
        lambda m, b, s: (
            m(b, s, HEADS, WIDTH),
            m(b, s - 1, HEADS, WIDTH),
            m(b, s - 1, 2 * HIDDEN)[..., HIDDEN:].unflatten(-1, (HEADS, WIDTH)),
            m(HIDDEN),
            m(HIDDEN),
            m(b, s - 1),
        ),
        lambda f, q, k, v, wq, wk, mask: f.qk_norm_cross_attention(q, k, v, wq, wk, mask=mask),
        attention_formula,
    ),
    "channel_norm": Case(
        lambda m, b, s: (m(b, 8, s, 2, 3), m(8), m(8), m(b, 8), m(b, 8), m(8)),
        lambda f, x, w, c, scale, shift, t: f.channel_norm(
            x, w, bias=c, scale=scale, shift=shift, scale_table=t, activation="silu", padding=(1, 2)
        ),
        channel_norm_formula,
    ),
    "channel_norm_residual": Case(
        lambda m, b, s: (m(b, 8, s, 2, 3), m(b, 8, s, 2, 3)),
        lambda f, x, r: f.channel_norm_residual(x, r),
        lambda x, r: (rms((x + r).movedim(1, -1)).movedim(-1, 1), x + r),
    ),
    "pixel_shuffle_3d": Case(
        lambda m, b, s: (m(b, 8, s, 2, 3), m(8)),
        lambda f, x, c: f.pixel_shuffle_3d(x, (1, 2, 2), bias=c),
        lambda x, c: torch.nn.functional.pixel_shuffle((x + c.view(-1, 1, 1, 1)).movedim(2, 1), 2).movedim(1, 2),
    ),
    "unpatchify": Case(
        lambda m, b, s: (m(b, 8, s, 2, 3),),
        lambda f, x: f.unpatchify(x, 2),
        lambda x: torch.nn.functional.pixel_shuffle(
            x.unflatten(1, (2, 2, 2)).transpose(2, 3).flatten(1, 3).movedim(2, 1), 2
        ).movedim(1, 2),
    ),
    "group_norm": Case(
        group_norm_tensors,
        lambda f, x, r, w, b, c, t: f.group_norm(x, 2, w, b, bias=c, residual=r, residual_bias=t, activation="silu"),
        lambda *tensors: group_norm_formula(*tensors)[0],
    ),
    "group_norm_residual": Case(
        group_norm_tensors,
        lambda f, x, r, w, b, c, t: f.group_norm_residual(
            x, 2, w, b, bias=c, residual=r, residual_bias=t, activation="silu"
        ),
        group_norm_formula,
    ),
    "upsample_nearest": Case(
        lambda m, b, s: (m(b, 8, s, 3), m(b, 8)),
        lambda f, x, t: f.upsample_nearest(x, (2, 3), residual_bias=t),
        lambda x, t: (
            (x + t[:, :, None, None])[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 3).flatten(4).flatten(2, 3)
        ),
    ),
}

# One of each way in which a function's gradient is computed: norms, modulation for each batch or row, pairs, gated and
# plain activations, rotation, both in one, channels, groups and plain torch.
DIFFERENT = ("rmsnorm_residual", "layernorm", "adaln_rmsnorm by index", "gated_residual_adaln_layernorm")
DIFFERENT += ("adaln_rmsnorm_pair", "gate_heads", "geglu", "gelu", "apply_rotary", "qk_norm_rope", "channel_norm")
DIFFERENT += ("pixel_shuffle_3d", "group_norm", "upsample_nearest")


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.set_stance("default")


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def gradients(results: Any, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Of a sum of the results with fixed weights."""
    make = Inputs("cpu", torch.float64)
    total = sum((result * make(*result.shape).to(result)).sum() for result in as_tuple(results))
    assert isinstance(total, Tensor)
    return torch.autograd.grad(total, tensors)


def compiled_ops(ltx: Any, counter: Any) -> list[str]:
    namespace = ltx._ops.add_op_namespace_prefix("").rstrip(":")
    return [
        node.target.__name__
        for graph in counter.graphs
        for node in graph.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == namespace
    ]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiles_without_a_break_to_one_op(ltx: Any, device: str, case: Case, dtype: torch.dtype) -> None:
    tensors = case.tensors(Inputs(device, dtype), BATCH, TOKENS)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *t: case.call(ltx, *t), backend=counter, fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), case.call(ltx, *tensors), rtol=0, atol=0)
    assert len(compiled_ops(ltx, counter)) == 1


def test_inductor_compiles_it(ltx: Any, device: str) -> None:
    case = CASES["rmsnorm"]
    tensors = case.tensors(Inputs(device, torch.bfloat16), BATCH, TOKENS)
    compiled = torch.compile(lambda *t: case.call(ltx, *t), fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), case.call(ltx, *tensors), rtol=0, atol=0)


@pytest.mark.extended
@pytest.mark.host
def test_dynamic_shapes_compile_once(ltx: Any, device: str, case: Case) -> None:
    compiled = torch.compile(lambda *t: case.call(ltx, *t), backend="aot_eager", fullgraph=True, dynamic=True)
    for batch, tokens in SIZES:
        tensors = case.tensors(Inputs(device), batch, tokens)
        torch.testing.assert_close(compiled(*tensors), case.call(ltx, *tensors), rtol=0, atol=0)
        torch.compiler.set_stance("fail_on_recompile")


@pytest.mark.host
@pytest.mark.parametrize("grad", [False, True], ids=["op", "gradient"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_regular_expressions_where_it_compiles(
    ltx: Any, device: str, name: str, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11 cannot trace the making of a pattern: whether a call compiles would depend on the cache of `re`.

    Newer versions call these functions while they trace, unless they are told not to.
    """
    if grad and name in WITHOUT_GRADIENT:
        pytest.skip("it has no gradient")
    case = every_function(Make(device, torch.float32))[name]
    if grad:
        case = case.map(lambda tensor: tensor.requires_grad_() if tensor.is_floating_point() else tensor)
    for pattern in ("compile", "search", "match", "fullmatch", "split", "findall", "finditer", "sub", "subn", "escape"):
        monkeypatch.setattr(re, pattern, torch.compiler.disable(getattr(re, pattern)))
    function = getattr(ltx, name)
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**case.kwargs), function(**case.kwargs))


@pytest.mark.host
def test_runs_on_meta_tensors(ltx: Any, device: str, case: Case) -> None:
    tensors = case.tensors(Inputs(device), BATCH, TOKENS)
    results = as_tuple(case.call(ltx, *tensors))
    metas = as_tuple(case.call(ltx, *(tensor.to("meta") for tensor in tensors)))
    assert [(m.shape, m.dtype, m.stride()) for m in metas] == [(r.shape, r.dtype, r.stride()) for r in results]


def test_memory_order_of_results(ltx: Any, device: str) -> None:
    """Contiguous for rows, the input's order for heads: op, fake and reference alike."""

    def strides(package: Any, device: str) -> list[tuple[int, ...]]:
        x = torch.zeros(TOKENS, BATCH, HIDDEN, device=device).transpose(0, 1)
        q = torch.zeros(BATCH, HEADS, TOKENS, WIDTH, device=device).transpose(1, 2)
        sliced = torch.zeros(BATCH, TOKENS, 3, HEADS, WIDTH, device=device)[:, :, 1]
        cos = torch.zeros(TOKENS, WIDTH, device=device)
        results = [package.rmsnorm(x), *package.rmsnorm_residual(x, x), package.gated_residual(x, x, x[:1])]
        results += [package.swiglu(x), package.gelu(x), package.adaln_layernorm(x, None, x, x)]
        results += [package.qk_norm_cross_attention(q, sliced, sliced, None, None)]
        assert all(result.is_contiguous() for result in results)
        rotated = [package.apply_rotary(q, cos, cos), *package.rope_1d(q, sliced)]
        assert [result.stride() for result in rotated] == [torch.empty_like(t).stride() for t in (q, q, sliced)]
        return [result.stride() for result in results + rotated]

    assert strides(ltx, device) == strides(ltx, "meta") == strides(ltx.reference, device)


# ---- Gradients


@pytest.mark.host
def test_reference_is_the_formula_and_so_are_its_gradients(ltx: Any, device: str, case: Case) -> None:
    tensors = case.tensors(Inputs(device, torch.float64, grad=True), BATCH, TOKENS)
    results, expected = case.call(ltx.reference, *tensors), case.formula(*tensors)
    torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(results, tensors), gradients(expected, tensors), rtol=1e-11, atol=1e-11)


def test_gradcheck_of_the_reference(ltx: Any, case: Case) -> None:
    tensors = case.tensors(Inputs("cpu", torch.float64, grad=True), 1, 4)
    assert torch.autograd.gradcheck(lambda *t: case.call(ltx.reference, *t), tensors, fast_mode=True)


def test_gradients_are_those_of_the_formula(ltx: Any, device: str, case: Case) -> None:
    tensors = case.tensors(Inputs(device, grad=True), BATCH, TOKENS)
    doubles = case.tensors(Inputs(device, torch.float64, grad=True), BATCH, TOKENS)
    results, expected = case.call(ltx, *tensors), case.formula(*doubles)
    for got, want in zip(
        as_tuple(results) + gradients(results, tensors), as_tuple(expected) + gradients(expected, doubles)
    ):
        torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_16_bit_tensors(ltx: Any, device: str, case: Case, dtype: torch.dtype) -> None:
    """Computed in fp32 and rounded where autograd hands them on: once for each use of a tensor."""
    tensors = case.tensors(Inputs(device, dtype, grad=True), BATCH, TOKENS)
    doubles = tuple(tensor.detach().double().requires_grad_() for tensor in tensors)
    results = as_tuple(case.call(ltx, *tensors))
    make = Inputs("cpu", torch.float64)
    weights = [make(*result.shape).to(dtype).to(device) for result in results]
    expected = torch.autograd.grad(as_tuple(case.formula(*doubles)), doubles, [w.double() for w in weights])
    eps = torch.finfo(dtype).eps
    for got, want in zip(torch.autograd.grad(results, tensors, weights), expected):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=2 * eps, atol=eps * want.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_have_the_same_bits_in_every_run(ltx: Any, device: str, case: Case, dtype: torch.dtype) -> None:
    """Those of weights and modulators too, which are sums over many rows."""
    tensors = case.tensors(Inputs(device, dtype, grad=True), 3, 200)
    first = gradients(case.call(ltx, *tensors), tensors)
    for _ in range(4):
        for again, want in zip(gradients(case.call(ltx, *tensors), tensors), first):
            assert_same_bits(again, want)


def test_gradients_compile(ltx: Any, device: str, case: Case) -> None:
    tensors = case.tensors(Inputs(device, grad=True), BATCH, TOKENS)
    compiled = torch.compile(lambda *t: case.call(ltx, *t), backend="aot_eager", fullgraph=True)
    results, expected = compiled(*tensors), case.call(ltx, *tensors)
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(gradients(results, tensors), gradients(expected, tensors))


@pytest.mark.extended
@pytest.mark.host
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if name in DIFFERENT else pytest.mark.repeated) for name, c in CASES.items()],
    ids=CASES,
)
def test_gradients_compile_once_for_dynamic_shapes(ltx: Any, device: str, case: Case) -> None:
    compiled = torch.compile(lambda *t: case.call(ltx, *t), backend="aot_eager", fullgraph=True, dynamic=True)
    for batch, tokens in SIZES:
        tensors = case.tensors(Inputs(device, grad=True), batch, tokens)
        torch.testing.assert_close(compiled(*tensors), case.call(ltx, *tensors))
        torch.compiler.set_stance("fail_on_recompile")


@pytest.mark.host
def test_the_op_runs_where_no_gradient_is_needed(ltx: Any, device: str) -> None:
    x = Inputs(device).rows()
    w = Inputs(device, grad=True).vector()
    assert ltx.rmsnorm(x, w).grad_fn is not None
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert ltx.rmsnorm(x, w).grad_fn is None
    assert ltx.rmsnorm(x, w.detach()).grad_fn is None


def test_a_dispatcher_op_by_itself_has_no_gradient(ltx: Any, device: str) -> None:
    """torch warns where one is asked for; an error at each call would cost every call. The functions have gradients."""
    x = Inputs(device, grad=True).rows()
    result = ltx._ops.ops.norm(x, None, None, 1e-6, 0.0, 1, 0)
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        result.sum().backward()
    assert x.grad is None


@pytest.mark.host
def test_second_derivatives_through_a_custom_function(ltx: Any, device: str) -> None:
    """forward runs without gradients, as any custom function does; backward differentiates the reference."""

    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return ltx.rmsnorm(x).square()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            y = ltx.reference.rmsnorm(x).square()
            (gradient,) = torch.autograd.grad(y, x, grad, create_graph=torch.is_grad_enabled())
            return gradient

    def second(function: Callable[[Tensor], Tensor]) -> Tensor:
        x = Inputs(device, torch.float32, grad=True).rows()
        weight = torch.linspace(-1, 1, x.numel(), device=device).view_as(x)
        (first,) = torch.autograd.grad((function(x) * weight).sum(), x, create_graph=True)
        return torch.autograd.grad((first * weight).sum(), x)[0]

    expected = second(lambda x: ltx.reference.rmsnorm(x).square())
    assert expected.abs().max() > 1e-2
    torch.testing.assert_close(second(Squared.apply), expected)


@pytest.mark.host
def test_given_outputs_under_vmap_are_an_error(ltx: Any, device: str) -> None:
    """As torch's own functions have it; without given outputs vmap works."""
    x = Inputs(device).rows()
    with pytest.raises(RuntimeError, match="doesn't work on out= or view ops"):
        torch.vmap(lambda row: ltx.rmsnorm(row, out=torch.empty_like(row)))(x)
    torch.testing.assert_close(torch.vmap(ltx.rmsnorm)(x), ltx.rmsnorm(x), rtol=0, atol=0)


# ---- out=


def test_out_is_written_and_returned(ltx: Any, device: str) -> None:
    make = Inputs(device)
    x, r, w = make.rows(), make.rows(), make.vector()
    out, residual_out = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    assert ltx.rmsnorm(x, w, out=out) is out
    torch.testing.assert_close(out, ltx.rmsnorm(x, w), rtol=0, atol=0)
    expected = ltx.rmsnorm_residual(x, r, w)
    results = ltx.rmsnorm_residual(x, r, w, residual_out=residual_out)
    assert results[1] is residual_out
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
    q, k, cos, sin = make.heads(), make.heads(), make(TOKENS, WIDTH), make(TOKENS, WIDTH)
    rotated = ltx.apply_rotary_qk(q, k, cos, sin)
    pair = (q, k)
    assert ltx.apply_rotary_qk(q, k, cos, sin, out=pair) is pair
    torch.testing.assert_close(pair, rotated, rtol=0, atol=0)


def test_out_compiles(ltx: Any, device: str) -> None:
    def in_place(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        ltx.rmsnorm_residual(x, r, w, out=x, residual_out=r)
        return ltx.gelu(x, out=x) + r

    make = Inputs(device)
    x, r, w = make.rows(), make.rows(), make.vector()
    eager, compiled = (x.clone(), r.clone()), (x.clone(), r.clone())
    expected = in_place(*eager, w)
    result = torch.compile(in_place, backend="aot_eager", fullgraph=True)(*compiled, w)
    torch.testing.assert_close((result, *compiled), (expected, *eager), rtol=0, atol=0)


@pytest.mark.host
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_out_where_a_gradient_is_needed_raises(ltx: Any, device: str, compiled: bool) -> None:
    make = Inputs(device)
    x, out = make.rows(), torch.zeros(BATCH, TOKENS, HIDDEN, device=device)
    w = make.vector().requires_grad_()
    call = torch.compile(ltx.rmsnorm, backend="aot_eager") if compiled else ltx.rmsnorm
    text = (
        "out: expected no gradient to be needed, got an input that requires grad; "
        "call without out= or under torch.no_grad()"
    )
    with pytest.raises(RuntimeError) as error:
        call(x, w, out=out)
    assert str(error.value).startswith(text)
    assert not out.any()
    with torch.no_grad():
        ltx.rmsnorm(x, w, out=out)
    assert out.any()


# ---- The variant's other device


@pytest.mark.parametrize("name", WITH_OUT)
def test_both_devices_have_kernels(ltx: Any, name: str) -> None:
    for op in (name, name + "_out"):
        for key in ("CPU", "CUDA", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(ltx._ops.add_op_namespace_prefix(op), key)


def test_the_other_device_runs_the_reference_and_says_so_once(ltx: Any, backend: str) -> None:
    other = {"cpu": "cuda", "cuda": "cpu"}[backend]
    if other == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    make = Inputs(other)
    q, k = make.heads(), make.heads()
    ltx._fakes._warned.clear()
    with pytest.warns(UserWarning, match=f"rope on a {other} tensor runs the plain torch reference") as caught:
        results = ltx.rope_1d(q, k)
        outs = ltx.rope_1d(q, k, out=(torch.empty_like(q), torch.empty_like(k)))
    assert len(caught) == 1
    expected = ltx.reference.rope_1d(q, k)
    torch.testing.assert_close((*results, *outs), (*expected, *expected), rtol=0, atol=0)
