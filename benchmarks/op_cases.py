"""The calls of every op that are timed: `OPS` has them by op, `cases()` one by one.

`recorded()` are those that models make (benchmarks/op_calls.py) and the table does not have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from result_files import DTYPES, load_package
from torch import Tensor

EAGER = 1  # the code of rounding="eager" in the ops

Peers = dict[str, Callable[[], Any]]  # native, liger, quack


@dataclass(frozen=True)
class Inputs:
    arguments: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    rounds: bool = True  # whether the function has a ``rounding``
    stock: Callable[..., Any] | None = None  # what `eager` and `compile` run in place of the package's reference
    peers: Peers = field(default_factory=dict)
    ours: Callable[..., Any] | None = None  # the op itself, where the case is a call of no public function
    again: Tensor | None = None  # what any implementation reads twice, because a statistic of all of it comes first


@dataclass(frozen=True)
class Make:
    """Random tensors, and the packages to compare with."""

    dtype: torch.dtype
    device: str
    modules: dict[str, ModuleType] = field(default_factory=dict)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def table(self, *shape: int, layout: str | None, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """cos and sin, each angle at both places of its pair; once where there is no layout."""
        *leading, width = shape
        angle = torch.randn(*leading, width if layout is None else width // 2, device=self.device)
        if layout == "half":
            angle = torch.cat([angle, angle], -1)
        elif layout == "interleaved":
            angle = angle.repeat_interleave(2, -1)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def peers(self, **calls: Callable[[ModuleType], Any]) -> Peers:
        return {name: partial(call, self.modules[name]) for name, call in calls.items() if name in self.modules}


@dataclass(frozen=True)
class Case:
    op: str
    shape: tuple[int, ...]
    function: str
    build: Callable[[Make], Inputs]
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        return f"{self.op} {'x'.join(map(str, self.shape))} {self.dtype}"


def rmsnorm(make: Make, rows: int, width: int) -> Inputs:
    return rmsnorm_of(make, make(rows, width))


def rmsnorm_slice(make: Make, rows: int, width: int) -> Inputs:
    """The query in a packed projection of query, key and value."""
    return rmsnorm_of(make, make(rows, 3 * width)[:, :width])


def rmsnorm_of(make: Make, x: Tensor) -> Inputs:
    weight = make(x.shape[-1])
    return Inputs((x, weight), peers=rmsnorm_peers(make, x, weight, 1e-6))


def rmsnorm_peers(make: Make, x: Tensor, weight: Tensor | None, eps: float) -> Peers:
    peers = {} if weight is None else make.peers(liger=lambda liger: liger.liger_rms_norm(x, weight, eps))
    peers |= make.peers(quack=lambda quack: quack.rmsnorm(x, weight, eps=eps))
    return {"native": lambda: F.rms_norm(x, (x.shape[-1],), weight, eps), **peers}


def layernorm(make: Make, rows: int, width: int) -> Inputs:
    x, weight, bias = make(rows, width), make(width), make(width)
    return Inputs((x, weight, bias), peers=layernorm_peers(make, x, weight, bias, 1e-5))


def layernorm_peers(make: Make, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Peers:
    peers: Peers = {}
    if weight is not None and bias is not None:
        wide = [parameter.float() for parameter in (weight, bias)]  # QuACK takes no others
        peers = make.peers(
            liger=lambda liger: liger.liger_layer_norm(x, weight, bias, eps),
            quack=lambda quack: quack.layernorm_fwd(x, *wide, eps=eps),
        )
    return {"native": lambda: F.layer_norm(x, (x.shape[-1],), weight, bias, eps), **peers}


def rmsnorm_residual(make: Make, rows: int, width: int) -> Inputs:
    x, residual, weight = make(rows, width), make(rows, width), make(width)
    return Inputs((x, residual, weight), peers=rmsnorm_residual_peers(make, x, residual, weight, 1e-6))


def rmsnorm_residual_peers(make: Make, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Peers:
    return make.peers(
        liger=lambda liger: liger.liger_fused_add_rms_norm(x, residual, weight, eps),
        quack=lambda quack: quack.rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True),
    )


def modulated(make: Make, batch: int, tokens: int, width: int, function: str) -> Inputs:
    x, residual = make(batch, tokens, width), make(batch, tokens, width)
    scale, shift, gate, scale2, shift2 = (make(batch, 1, width) for _ in range(5))
    arguments: dict[str, tuple[Tensor | None, ...]] = {
        "adaln_rmsnorm": (x, None, scale, shift),
        "adaln_layernorm": (x, None, scale, shift),
        "adaln_zero": (x, None, scale, shift, gate),
        "gated_residual": (x, residual, gate),
        "gated_residual_adaln_rmsnorm": (x, residual, gate, None, scale, shift),
        "gated_residual_adaln_layernorm": (x, residual, gate, None, scale, shift),
        "adaln_rmsnorm_pair": (x, None, scale, shift, scale2, shift2),
        "adaln_layernorm_pair": (x, None, scale, shift, scale2, shift2),
        "gated_residual_adaln_rmsnorm_pair": (x, residual, gate, None, scale, shift, scale2, shift2),
        "gated_residual_adaln_layernorm_pair": (x, residual, gate, None, scale, shift, scale2, shift2),
    }
    return Inputs(arguments[function])


def by_index(make: Make, batch: int, tokens: int, width: int, function: str, per_token: bool = False) -> Inputs:
    """As Qwen-Image-Edit's blocks, or Z-Image's: half of the tokens take the first of two rows of modulation, the
    others the second.

    per_token: The same modulation as a row for each token, which somebody wrote before.
    """
    x, residual = make(batch, tokens, width), make(batch, tokens, width)
    shift, scale, gate = make(batch, 2, 6 * width).unflatten(-1, (6, width)).unbind(-2)[:3]
    index = (torch.arange(tokens, device=make.device) >= tokens // 2).int().expand(batch, tokens)
    if per_token:
        rows = torch.stack((shift, scale, gate), -2)[:, index[0].long()]  # [B, S, 3, H]: views of it have gaps
        shift, scale, gate = rows.unbind(-2)
    options: dict[str, Any] = {} if per_token else {"index": index}
    if function == "norm_residual":
        options["gate"] = gate
    weight = make(width)
    arguments: dict[str, tuple[Any, ...]] = {
        "adaln_layernorm": (x, None, scale, shift),
        "gated_residual": (x, residual, gate),
        "gated_residual_adaln_layernorm": (x, residual, gate, None, scale, shift),
        "adaln_rmsnorm": (x, weight, scale),
        "norm_residual": (x, residual, weight),
        "norm_gated_residual_norm": (x, residual, gate, weight, 1e-6, make(width), scale),
    }
    return Inputs(arguments[function], options)


def norm_residual(make: Make, rows: int, width: int) -> Inputs:
    return Inputs((make(rows, width), make(rows, width), make(width)))


def norm_residual_norm(make: Make, batch: int, tokens: int, width: int) -> Inputs:
    """As Z-Image's blocks: two weights, a gate and a scale."""
    x, residual = make(batch, tokens, width), make(batch, tokens, width)
    gate, scale = make(batch, 1, width), make(batch, 1, width)
    return Inputs((x, residual, gate, make(width), 1e-6, make(width), scale))


def qk_norm_rope(
    make: Make, batch: int, tokens: int, heads: int, width: int, key_heads: int = 0, across: bool = False,
    table: str = "full", layout: str = "interleaved", packed: bool = False, layer: bool = False,
) -> Inputs:  # fmt: skip
    """`table`: full or half width of all heads across which it norms, or of one "head". `layer`: a layer norm."""
    inner = heads * width if across else width
    if packed:
        query, key = make(batch, tokens, 3, heads, width).unbind(2)[:2]
    else:
        query, key = make(batch, tokens, heads, width), make(batch, tokens, key_heads or heads, width)
    if table == "half":
        cos, sin = make.table(1, tokens, inner // 2, layout=None)
    elif table == "full":
        cos, sin = make.table(1, tokens, inner, layout=layout)
    else:
        cos, sin = (
            make.table(1, tokens, 1, width, layout=layout) if across else make.table(tokens, width, layout=layout)
        )
    options: dict[str, Any] = {"across_heads": across, "layout": layout}
    if layer:
        options |= {"norm": "layer", "query_bias": make(inner), "key_bias": make(inner)}
    return Inputs((query, key, make(inner), make(inner), cos, sin), options)


def apply_rotary(make: Make, batch: int, tokens: int, width: int) -> Inputs:
    return Inputs((make(batch, tokens, width), *make.table(1, tokens, width, layout="interleaved")))


def apply_rotary_qk(
    make: Make, batch: int, tokens: int, heads: int, key_heads: int, width: int, layout: str = "half"
) -> Inputs:
    query, key = make(batch, tokens, heads, width), make(batch, tokens, key_heads, width)
    table = make.table(tokens, width, layout=layout, dtype=make.dtype if layout == "half" else torch.float32)
    return Inputs((query, key, *table), {"layout": layout})


def rope_1d(make: Make, batch: int, tokens: int, heads: int, key_heads: int, width: int) -> Inputs:
    query, key = make(batch, tokens, heads, width), make(batch, tokens, key_heads, width)
    return Inputs((query, key), {"layout": "half"}, rounds=False)


def rope_3d(make: Make, batch: int, frames: int, rows: int, columns: int, heads: int, width: int) -> Inputs:
    shape = (batch, frames * rows * columns, heads, width)
    return Inputs((make(*shape), make(*shape), frames, rows, columns), rounds=False)


def glu(make: Make, rows: int, width: int, options: dict[str, Any], liger_name: str | None) -> Inputs:
    x = make(rows, 2 * width)
    return Inputs((x,), options, peers={} if liger_name is None else glu_peers(make, x, liger_name))


def glu_peers(make: Make, x: Tensor, liger_name: str) -> Peers:
    if "liger" not in make.modules:
        return {}
    gate, up = (part.contiguous() for part in x.chunk(2, dim=-1))  # it would copy the packed halves
    return make.peers(liger=lambda liger: getattr(liger, liger_name)(gate, up))


def gate_heads(make: Make, batch: int, tokens: int, heads: int, width: int, per_head: bool) -> Inputs:
    logits = make(batch, tokens, heads if per_head else heads * width)
    return Inputs((make(batch, tokens, heads, width), logits, 2.0 if per_head else 1.0))


def swiglu_clamped(make: Make, rows: int, width: int) -> Inputs:
    return Inputs((make(rows, 2 * width),))


def gelu(make: Make, rows: int, width: int, approximate: str, bias: bool = False) -> Inputs:
    x = make(rows, width)
    if bias:
        return Inputs((x,), {"approximate": approximate, "bias": make(width)})
    native = {"native": lambda: F.gelu(x, approximate=approximate)}
    return Inputs((x,), {"approximate": approximate}, peers=native)


def cross_attention(
    make: Make, batch: int, tokens: int, keys: int, heads: int, width: int, valid: Sequence[int] = ()
) -> Inputs:
    """`valid`: how many keys of each batch the mask leaves in, where not all."""
    query, key, value = (
        make(batch, tokens, heads, width),
        make(batch, keys, heads, width),
        make(batch, keys, heads, width),
    )
    mask = torch.zeros(batch, keys, device=make.device, dtype=make.dtype)
    for row, count in zip(mask, valid):
        row[count:] = -10000  # as pipelines write it
    inner = heads * width

    def stock(query: Tensor, key: Tensor, value: Tensor, *weights: Tensor, mask: Tensor) -> Tensor:
        """What the models' attention does."""
        normalised = (
            F.rms_norm(x.flatten(-2), (inner,), weight, 1e-6).view_as(x)
            for x, weight in zip((query, key), weights, strict=True)
        )
        q, k, v = (x.transpose(1, 2) for x in (*normalised, value))
        scores = mask[:, None, None].expand(batch, heads, 1, keys)
        return F.scaled_dot_product_attention(q, k, v, scores).transpose(1, 2)

    arguments = (query, key, value, make(inner), make(inner))
    native = {"native": lambda: stock(*arguments, mask=mask)}
    return Inputs(arguments, {"mask": mask}, rounds=False, peers=native, stock=stock)


def self_attention(make: Make, batch: int, tokens: int, heads: int, width: int) -> Inputs:
    query, key, value = make(batch, tokens, 3, heads, width).unbind(2)  # of one projection, as models have it

    def stock(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)

    native = {"native": lambda: stock(query, key, value)}  # on an H200 cuDNN's kernel
    return Inputs((query, key, value), rounds=False, peers=native, stock=stock)


def group_norm(make: Make, channels: int, height: int, width: int, residual: bool = False) -> Inputs:
    """A convolution's bias, the residual, the norm and SiLU between two convolutions of an autoencoder.

    `native` is the same chain in contiguous memory, which the models' own code has.
    """
    x, other = (make(1, channels, height, width).to(memory_format=torch.channels_last) for _ in range(2))
    weight, bias_norm, bias = make(channels), make(channels), make(channels)
    groups = min(32, channels)
    options: dict[str, Any] = {"bias": bias, "activation": "silu", **({"residual": other} if residual else {})}

    def stock(x: Tensor, groups: int, weight: Tensor, bias_norm: Tensor, **options: Any) -> Any:
        h = x + options["bias"].view(-1, 1, 1)
        h = h + options["residual"] if residual else h
        y = F.silu(F.group_norm(h, groups, weight, bias_norm, 1e-6))
        return (y, h) if residual else y

    plain = {name: value.contiguous() if isinstance(value, Tensor) else value for name, value in options.items()}
    contiguous = x.contiguous()
    native = {"native": lambda: stock(contiguous, groups, weight, bias_norm, **plain)}
    return Inputs((x, groups, weight, bias_norm), options, rounds=False, stock=stock, peers=native, again=x)


def upsample_nearest(make: Make, channels: int, height: int, width: int) -> Inputs:
    x, residual = (make(1, channels, height, width).to(memory_format=torch.channels_last) for _ in range(2))

    def stock(x: Tensor, scale: tuple[int, int], bias: Tensor, residual: Tensor) -> Tensor:
        return F.interpolate(x + bias.view(-1, 1, 1) + residual, scale_factor=scale, mode="nearest")

    return Inputs((x, (2, 2)), {"bias": make(channels), "residual": residual}, rounds=False, stock=stock)


def rows_alone(make: Make, *shape: int) -> Inputs:
    return Inputs((make(*shape),), rounds=False)


def quantised(make: Make, *shape: int, build: Callable[..., Inputs]) -> Inputs:
    """The arguments of the op whose result is quantised. No other package does it in one pass."""
    inputs = build(make, *shape)
    return Inputs(inputs.arguments, inputs.options, rounds=False)


def after_prefix(make: Make, rows: int, before: int, width: int, gated: bool) -> Inputs:
    """As attention's output beside an MLP: its columns and the activated ones are quantised as one row."""
    options = {"prefix": make(rows, before)}
    x = make(rows, 2 * width if gated else width)
    return Inputs((x,), options if gated else {"approximate": "tanh", **options}, rounds=False)


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Op:
    function: str
    build: Callable[..., Inputs]  # of a Make and a shape
    shapes: Sequence[Shape]
    small: Shape
    name: str = ""
    dtypes: Sequence[Shape] = ()  # shapes that are timed in fp16 and fp32 too

    def case(self, shape: Shape, dtype: str = "bf16") -> Case:
        def build(make: Make) -> Inputs:
            return self.build(make, *shape)

        return Case(self.name or self.function, shape, self.function, build, dtype)


# LTX-Video (hidden 2048, at 49 and at 161 frames of 512x768), LTX-2 (4096), FLUX (3072), Wan (1536 and 5120), LLaMA 8B
# (4096), one attention head (64, 128), and rows that are longer than a block holds.
FEW = (1, 8, 64, 512)
ROWS = [
    *((rows, 2048) for rows in (1024, 5376, 16128)),
    *((8192, 3072), (16384, 3072), (4096, 4096), (16384, 4096), (8192, 8192), (2048, 16384)),
    *((131072, 128), (262144, 64)),
]  # fmt: skip
FEW_ROWS = [(rows, 2048) for rows in FEW]
LONG = [(8, 65536), (1, 262144)]
TOKENS = [(1, 64, 2048), (2, 2688, 2048), (2, 8064, 2048), (2, 8064, 4096)]
FEW_TOKENS = [(1, tokens, 2048) for tokens in (1, 8, 512)]  # beside TOKENS
OTHER_TOKENS = [(1, 4608, 3072), (1, 32760, 1536), (1, 8190, 5120)]
HEADS = [*((1, tokens, 32, 64) for tokens in FEW), (2, 2688, 32, 64), (2, 8064, 32, 64), (2, 8064, 32, 128)]
WAN_HEADS = [(1, 32760, 12, 128)]
FLUX_HEADS = [(1, 64, 24, 128), (1, 4608, 24, 128)]
LLAMA_HEADS = [(64, 1, 32, 8, 128), (1, 512, 32, 8, 128), (4, 4096, 32, 8, 128)]
QUOTED_ROWS, QUOTED_GLU = (2048, 2048), (2048, 4096)  # 2x1024x2048 and 2x1024x4096, which other guides time
FEED_FORWARD = [*((rows, 8192) for rows in (*FEW, 5376, 16128)), (4096, 14336)]

PAIRS = {  # LTX-2, Stable Diffusion 3.5 medium
    "adaln_rmsnorm_pair": [(2, 6144, 4096)],
    "adaln_layernorm_pair": [(8, 4096, 1536)],
    "gated_residual_adaln_rmsnorm_pair": [(2, 6144, 4096)],
    "gated_residual_adaln_layernorm_pair": [(8, 4096, 1536)],
}

GATED_HEADS = [(1, 126, 32, 64), (1, 6144, 32, 128), (2, 8064, 32, 64)]  # LTX-2.3: audio, video
BY_INDEX = {  # Qwen-Image-Edit with one input of 1328x1328, Z-Image's omni mode with one of 1024x1024
    "adaln_layernorm": (1, 13778, 3072),
    "gated_residual": (1, 13778, 3072),
    "gated_residual_adaln_layernorm": (1, 13778, 3072),
    "adaln_rmsnorm": (1, 8704, 3840),
    "norm_residual": (1, 8704, 3840),
    "norm_gated_residual_norm": (1, 8704, 3840),
}

# FLUX.1's decoder at 1024x1024, the wide stage of FLUX.2's small decoder, and the middle of the first.
IMAGES = [(128, 1024, 1024), (256, 1024, 1024), (512, 512, 512), (512, 256, 256), (512, 128, 128), (96, 1024, 1024)]

OPS = [
    Op("rmsnorm", rmsnorm, [*FEW_ROWS, QUOTED_ROWS, *ROWS, *LONG], (3, 128), dtypes=[(16128, 2048)]),
    Op("rmsnorm", rmsnorm_slice, [(16128, 2048), (16384, 4096)], (3, 64), "rmsnorm of a slice"),
    Op("layernorm", layernorm, [(64, 2048), *ROWS, *LONG], (3, 128), dtypes=[(16128, 2048)]),
    Op("rmsnorm_residual", rmsnorm_residual, [*FEW_ROWS, *ROWS], (3, 128), dtypes=[(16128, 2048)]),
    *(
        Op(
            function, partial(modulated, function=function), [*FEW_TOKENS, *TOKENS, *OTHER_TOKENS], (2, 5, 64),
            dtypes=[(2, 8064, 2048)],
        )
        for function in ("adaln_rmsnorm", "gated_residual_adaln_rmsnorm")
    ),
    *(
        Op(function, partial(modulated, function=function), [*TOKENS, *OTHER_TOKENS], (2, 5, 64))
        for function in ("adaln_layernorm", "adaln_zero", "gated_residual", "gated_residual_adaln_layernorm")
    ),
    *(
        Op(function, partial(modulated, function=function), shapes, (2, 5, 64)) for function, shapes in PAIRS.items()
    ),
    *(
        Op(
            function, partial(by_index, function=function, per_token=per_token), [shape], (2, 6, 64),
            f"{function} {'per token' if per_token else 'by index'}",
        )
        for function, shape in BY_INDEX.items()
        for per_token in (False, True)
    ),
    Op("norm_residual", norm_residual, [(16384, 3840), (16384, 4096)], (3, 128)),
    Op("norm_gated_residual_norm", norm_residual_norm, [(4, 4352, 3840), (2, 8064, 3072)], (2, 5, 64)),
    Op(
        "qk_norm_rope", partial(qk_norm_rope, across=True), HEADS, (2, 5, 4, 16),
        "qk_norm_rope across heads, full table", dtypes=HEADS[-2:-1],
    ),
    Op(
        "qk_norm_rope", partial(qk_norm_rope, across=True, table="half"), HEADS[-3:], (2, 5, 4, 16),
        "qk_norm_rope across heads, half table",
    ),
    Op(
        "qk_norm_rope", partial(qk_norm_rope, across=True, packed=True), HEADS[-3:], (2, 5, 4, 16),
        "qk_norm_rope across heads, slices",
    ),
    Op(
        "qk_norm_rope", partial(qk_norm_rope, across=True, table="head"), WAN_HEADS, (1, 5, 4, 16),
        "qk_norm_rope across heads, table of a head",
    ),
    Op("qk_norm_rope", partial(qk_norm_rope, table="head"), FLUX_HEADS, (1, 6, 3, 32), "qk_norm_rope per head"),
    Op(
        "qk_norm_rope", lambda make, batch, tokens, heads, keys, width: qk_norm_rope(
            make, batch, tokens, heads, width, keys, table="head", layout="half"
        ),
        LLAMA_HEADS, (2, 7, 4, 2, 32), "qk_norm_rope per head, half layout",
    ),
    Op(
        "qk_norm_rope", partial(qk_norm_rope, table="head", layer=True), [(1, 17776, 48, 64)], (1, 6, 3, 32),
        "qk_norm_rope per head, layer norm",
    ),
    Op("apply_rotary", apply_rotary, [*TOKENS, *OTHER_TOKENS], (2, 5, 64), dtypes=[(2, 8064, 2048)]),
    Op("apply_rotary_qk", apply_rotary_qk, LLAMA_HEADS, (2, 7, 4, 2, 32)),
    Op(
        "apply_rotary_qk", partial(apply_rotary_qk, layout="interleaved"),
        [(1, 4608, 24, 24, 128), (1, 32760, 12, 12, 128)], (2, 7, 4, 2, 32), "apply_rotary_qk interleaved",
    ),
    Op("rope_1d", rope_1d, LLAMA_HEADS, (2, 7, 4, 2, 32)),
    Op("rope_3d", rope_3d, [(2, 7, 16, 24, 32, 64), (1, 21, 30, 52, 12, 128)], (2, 2, 2, 3, 2, 32)),
    *(
        Op(function, partial(glu, options=options, liger_name=liger), shapes, (9, 64), name)
        for name, function, options, liger, shapes in (
            ("swiglu", "swiglu", {}, "liger_swiglu", FEED_FORWARD),
            ("geglu tanh", "geglu", {"approximate": "tanh"}, "liger_geglu", [QUOTED_GLU, *FEED_FORWARD]),
            ("geglu erf", "geglu", {"approximate": "none"}, None, FEED_FORWARD[-2:]),
        )
    ),
    Op("swiglu_clamped", swiglu_clamped, [(64, 2880), (16384, 2880)], (9, 64)),
    *(
        Op(
            "gate_heads", partial(gate_heads, per_head=per_head), shapes, (2, 5, 4, 16),
            f"gate_heads per {'head' if per_head else 'column'}",
        )
        for per_head, shapes in (
            (True, GATED_HEADS),
            (False, [(1, 4608, 48, 128)]),
        )
    ),
    Op("gelu", partial(gelu, approximate="tanh"), FEED_FORWARD, (9, 64), "gelu tanh"),
    *(
        Op("gelu", partial(gelu, approximate=approximate, bias=bias), FEED_FORWARD[-2:], (9, 64), name)
        for name, approximate, bias in (
            ("gelu erf", "none", False), ("gelu tanh bias", "tanh", True), ("gelu erf bias", "none", True),
        )
    ),
    # The text of a prompt: as many of its 128 tokens as two prompts have, and all.
    Op(
        "qk_norm_cross_attention", cross_attention,
        [(2, 2688, 128, 32, 64), (2, 8064, 128, 32, 64), (2, 8064, 256, 32, 64), (2, 8064, 128, 32, 128)],
        (2, 5, 16, 4, 64),
    ),
    Op(
        "qk_norm_cross_attention", partial(cross_attention, valid=(10, 60)),
        [(2, 2688, 128, 32, 64), (2, 8064, 128, 32, 64)], (2, 5, 16, 4, 64),
        "qk_norm_cross_attention, 10 and 60 keys valid",
    ),
    Op("attention", self_attention, [(2, 2688, 32, 64), (1, 2688, 32, 64), (2, 8064, 32, 64)], (2, 5, 4, 64)),
    Op("group_norm", group_norm, IMAGES, (64, 7, 5), dtypes=IMAGES[:1]),
    Op("group_norm_residual", partial(group_norm, residual=True), IMAGES, (64, 7, 5), dtypes=IMAGES[:1]),
    Op("upsample_nearest", upsample_nearest, [(512, 128, 128), (512, 256, 256), (256, 512, 512)], (16, 5, 3)),
    Op("quantize_rows", rows_alone, [*TOKENS, (131072, 128)], (2, 5, 64)),
    *(
        Op(f"{function}_quant", partial(quantised, build=build), shapes, small, f"quantised {function}")
        for function, build, shapes, small in (
            ("rmsnorm", rmsnorm, [(16128, 2048), (16384, 4096), (8192, 8192)], (3, 128)),
            ("rmsnorm_residual", rmsnorm_residual, [(16128, 2048), (16384, 4096), (8192, 8192)], (3, 128)),
            *(
                (function, partial(modulated, function=function), TOKENS, (2, 5, 64))
                for function in ("adaln_rmsnorm", "gated_residual", "gated_residual_adaln_rmsnorm")
            ),
            ("layernorm", layernorm, [(16128, 2048), (16384, 3072)], (3, 128)),
            *(
                (function, partial(modulated, function=function), [(2, 8064, 2048), *OTHER_TOKENS], (2, 5, 64))
                for function in ("adaln_layernorm", "gated_residual_adaln_layernorm")
            ),
            *(
                (function, partial(modulated, function=function), shapes, (2, 5, 64))
                for function, shapes in PAIRS.items()
            ),
            ("norm_gated_residual_norm", norm_residual_norm, [(4, 4352, 3840), (2, 8064, 3072)], (2, 5, 64)),
            ("swiglu", partial(glu, options={}, liger_name=None), FEED_FORWARD[-3:], (9, 64)),
            ("geglu", partial(glu, options={"approximate": "tanh"}, liger_name=None), FEED_FORWARD[-3:], (9, 64)),
            ("gelu", partial(gelu, approximate="tanh"), FEED_FORWARD[-3:], (9, 64)),
            ("gate_heads", partial(gate_heads, per_head=True), GATED_HEADS, (2, 5, 4, 16)),
        )
    ),
    *(
        Op(
            f"{function}_quant", partial(quantised, build=partial(by_index, function=function)), [BY_INDEX[function]],
            (2, 6, 64), f"quantised {function} by index",
        )
        for function in (
            "adaln_layernorm", "gated_residual_adaln_layernorm", "adaln_rmsnorm", "norm_gated_residual_norm"
        )
    ),
    *(
        Op(f"{function}_quant", partial(after_prefix, gated=gated), [shape], (9, 16, 64),
           f"quantised {function} after a prefix")
        for function, gated, shape in (("gelu", False, (4608, 3072, 12288)), ("swiglu", True, (4608, 6144, 18432)))
    ),
]  # fmt: skip
CALLS = Path(__file__).resolve().parent / "op_calls.json"


def tensor_of(description: dict[str, Any], device: str) -> Tensor:
    """A random tensor of a shape, strides and a dtype, in a storage of its own."""
    shape, stride = description["shape"], description["stride"]
    size = 1 + sum((n - 1) * step for n, step in zip(shape, stride))
    dtype = getattr(torch, description["dtype"])
    values = torch.randn(size, device=device) if dtype.is_floating_point else torch.zeros(size, device=device)
    return values.to(dtype).as_strided(shape, stride)


def called(make: Make, record: dict[str, Any]) -> Inputs:
    """The call of an op as a model makes it; its results are new tensors also where the model's call is in place."""
    ltx, _ = load_package()
    op: Any = getattr(ltx._ops.ops, record["op"])
    plain = ltx._fakes.in_torch(record["op"])
    mode = ltx._fakes.Mode(compute=True)
    values = [
        tensor_of(value, make.device) if isinstance(value, dict) else value for value in record["arguments"].values()
    ]
    eager = {i: EAGER for i, name in enumerate(record["arguments"]) if name == "rounding"}

    def stock(*arguments: Any) -> Any:
        return plain(mode, *(eager.get(i, value) for i, value in enumerate(arguments)))

    arguments = dict(zip(record["arguments"], values))
    peers = peers_of_call(make, ltx._checks, record["op"], arguments)
    return Inputs(tuple(values), rounds=False, stock=stock, ours=op.default, peers=peers)


def peers_of_call(make: Make, codes: ModuleType, op: str, arguments: dict[str, Any]) -> Peers:
    """What torch and other packages have for a call of an op; nothing where they lack what the call asks for.

    codes: The module that names the codes of statistics and activations.
    """
    accepted = {  # by a function of another package
        "norm": {"input", "weight", "bias", "eps", "statistic"},
        "residual_norm": {"input", "residual", "weight", "eps", "statistic"},
        "glu": {"input", "activation", "gate_first"},
        "gelu": {"input", "activation"},
        "group_norm": {"input", "weight", "bias_norm", "groups", "eps", "silu"},
        "upsample_nearest": {"input", "scale"},
    }
    given = {name for name, value in arguments.items() if isinstance(value, Tensor) or value not in (None, 0)}
    if op not in accepted or not given <= accepted[op]:
        return {}
    x, weight, eps = arguments["input"], arguments.get("weight"), arguments.get("eps")
    statistic, activation = arguments.get("statistic"), arguments.get("activation")
    if op == "norm" and statistic == codes.LAYER:
        return layernorm_peers(make, x, weight, arguments["bias"], eps)
    if op == "norm":
        return rmsnorm_peers(make, x, weight, eps) if arguments["bias"] is None else {}
    if op == "residual_norm":
        is_plain = statistic == codes.RMS and weight is not None
        return rmsnorm_residual_peers(make, x, arguments["residual"], weight, eps) if is_plain else {}
    if op == "glu":
        liger_name = {codes.SILU: "liger_swiglu", codes.GELU_TANH: "liger_geglu"}.get(activation)
        return glu_peers(make, x, liger_name) if liger_name and arguments["gate_first"] else {}
    if op == "gelu":
        approximate = "tanh" if activation == codes.GELU_TANH else "none"
        return {"native": lambda: F.gelu(x, approximate=approximate)}
    if op == "group_norm":
        act = F.silu if arguments["silu"] else lambda y: y
        return {"native": lambda: act(F.group_norm(x, arguments["groups"], weight, arguments["bias_norm"], eps))}
    return {"native": lambda: F.interpolate(x, scale_factor=tuple(arguments["scale"]), mode="nearest")}


def recorded() -> list[Case]:
    """A case for each distinct call of a model that no case of the table covers."""
    found: list[Case] = []
    for record in json.loads(CALLS.read_text())["records"] if CALLS.exists() else []:
        if record["case"] is None:
            first = next(iter(record["arguments"].values()))
            base = record["op"].removesuffix("_quant")
            name = f"{base} as in {record['models'][0]}, {record['id']}"
            name = name if base == record["op"] else f"quantised {name}"
            dtype = next(short for short, one in DTYPES.items() if str(one)[6:] == first["dtype"])
            found.append(Case(name, tuple(first["shape"]), record["op"], partial(called, record=record), dtype))
    return found


HOST_CASE = ("rmsnorm", (8, 2048), "bf16")  # whose cost on the host is measured too


def cases() -> list[Case]:
    """The whole table; what is quantised, which no other package does, comes last."""
    found = [op.case(shape) for op in OPS for shape in op.shapes]
    found += [op.case(shape, dtype) for op in OPS for shape in op.dtypes for dtype in ("fp16", "fp32")]
    found += recorded()
    return sorted(found, key=lambda case: "quanti" in case.op)
