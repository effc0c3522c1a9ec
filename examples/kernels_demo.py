#!/usr/bin/env python3
"""Races that show where a fused kernel is faster than plain torch, where torch.compile is as fast, and where all lose.

    python examples/kernels_demo.py                        # on a GPU: every race; seconds to minutes of compilation
    python examples/kernels_demo.py --only rmsnorm --no-compile
    python examples/kernels_demo.py --short                # few and small sizes, as on a machine without a GPU

A race computes one result in several ways at several sizes. Every way is first compared with float64. The times then
stand beside the time of a copy that moves the same bytes, or, where matrix products take the time, of the products
alone. Pictures and results.json go to demo/kernels/. The notebooks in notebooks/ are made of the same races.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from command_line import ROOT, ExampleError, directory, load_kernels, silence_other_packages, start

NAMES = ("gelu", "swiglu", "rmsnorm", "rmsnorm_residual", "norm_linear", "mlp", "layer")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), help="(default: all)")
    parser.add_argument("--short", action="store_true", help="few and small sizes; without a GPU it is always so")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile, which takes most of the time")
    output = ROOT / "demo" / "kernels"
    parser.add_argument("--output", type=directory, default=output, metavar="DIR", help="(default: demo/kernels)")
    return parser


if __name__ == "__main__":
    start(make_parser())  # before the imports below, which take seconds
silence_other_packages()

# ruff: noqa: E402
import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from hub_kernels import fetch_community
from llm_shapes import SHAPES
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(ROOT / "benchmarks"))
from op_cases import Inputs
from ops import copied, tensors, traffic
from result_files import device_name
from steps import view_of
from timing import HostTimer, Timer

Way = Callable[..., Any]  # a function of the race's tensors

PLAIN, NATIVE, COMPILED, OURS = "plain torch", "torch's own op", "torch.compile", "this package"
OURS_COMPILED, OURS_FP8, HUB = "this package and torch.compile", "this package, fp8", "kernels-community/activation"
COPY, PRODUCTS = "a copy of the same bytes", "its matrix products alone"
COLOURS = {
    PLAIN: "0.55", NATIVE: "#8172B3", COMPILED: "#DD8452", OURS: "#55A868", OURS_COMPILED: "#937860",
    OURS_FP8: "#4C72B0", HUB: "#DA8BC3",
}  # fmt: skip

# How much further from float64 than plain torch a way may be, the least that is always allowed (in machine epsilons of
# the dtype), and what fp8 may be.
ERROR_LIMIT, LEAST_EPSILONS, FP8_LIMIT = 1.5, 1, 5e-2
EXACT_TOKENS = 2048  # of a causal layer that are compared with float64, where attention to more takes too much memory
NOISE = 1.02  # a way that is ahead by less is not called faster


# ---- Where and how


@dataclass(frozen=True)
class Bench:
    """The machine, the package, and the sizes of the layers that the races take from a language model."""

    ltx: Any  # the package
    device: str
    dtype: torch.dtype
    short: bool
    compiles: bool
    timer: Any  # timing.Timer, or HostTimer
    shape: str  # of examples/llm_shapes.py

    def random(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device).to(self.dtype)

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        if self.device == "cuda":
            return f"{torch.cuda.get_device_name()}, {dtype}, torch {torch.__version__}"
        return f"{device_name()}, {dtype}: times on a CPU say nothing about a GPU"

    def sizes(self, long: Sequence[int], short: Sequence[int]) -> Sequence[int]:
        return short if self.short else long

    def config(self) -> Any:
        """The configuration of the language model."""
        import transformers

        kind, sizes = SHAPES[self.shape]
        config = getattr(transformers, kind)(**sizes)
        config._attn_implementation = "sdpa"
        return config

    @property
    def hidden(self) -> int:
        return SHAPES[self.shape][1]["hidden_size"]

    @property
    def inner(self) -> int:
        return SHAPES[self.shape][1]["intermediate_size"]


def prepare(short: bool | None = None, compiles: bool = True, package: bool = True) -> Bench:
    """What every race needs. `short` None: where there is no GPU. Without `package`, `ltx` is None."""
    torch.manual_seed(0)
    cuda = torch.cuda.is_available()
    short = not cuda if short is None else short
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    timer = Timer(calls=10) if cuda else HostTimer(seconds=1e-3)
    return Bench(
        load_kernels(device) if package else None,
        device,
        dtype,
        short,
        compiles,
        timer,
        "tiny" if short else "llama-8b",
    )


# ---- A race


@dataclass(frozen=True)
class Entry:
    """One result of one size, and the ways to compute it; each takes the tensors.

    exact: What is compared with, given the tensors in float64. None: the first way.
    compiled: What torch.compile gets, by name. None: the first way.
    products: The matrix products alone, for results that take their time from these; else a copy is the floor.
    compared: How many rows of the result are compared: the first ones of a causal layer do not depend on the others.
    """

    tensors: tuple[Tensor, ...]
    ways: dict[str, Way]
    exact: Way | None = None
    compiled: dict[str, Way] | None = None
    products: Way | None = None
    compared: int | None = None


@dataclass(frozen=True)
class Record:
    """What a race found at one size: microseconds and relative L2 errors against float64, by way."""

    size: int
    bytes: int  # that every way has to read and write at least
    us: dict[str, float]
    floor_us: float
    floor: str
    error: dict[str, float] = field(default_factory=dict)


def distance(result: Any, exact: Any) -> float:
    """The relative L2 error, of the worst where there are several results."""
    pairs = zip(tensors(result), tensors(exact), strict=True)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)


def verify(entry: Entry, calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The error of every call against float64."""
    first = next(iter(entry.ways))
    exact = (entry.exact or entry.ways[first])(*(x.double() for x in entry.tensors))
    errors = {}
    for name, call in calls.items():
        result = call()
        errors[name] = distance(result if entry.compared is None else result[:, : entry.compared], exact)
    least = LEAST_EPSILONS * torch.finfo(entry.tensors[0].dtype).eps
    for name, error in errors.items():
        limit = FP8_LIMIT if name == OURS_FP8 else max(ERROR_LIMIT * errors[first], least)
        if not error <= limit:
            raise ExampleError(f"{name}: expected an error of at most {limit:.1e} against float64, got {error:.1e}")
    return errors


def copy_of(size: int, device: str) -> Callable[[], Any]:
    """A copy that reads and writes `size` bytes in all."""
    source = torch.zeros(copied(size), dtype=torch.uint8, device=device)
    return partial(torch.empty_like(source).copy_, source)


@torch.no_grad()
def race(bench: Bench, make: Callable[[Bench, int], Entry], sizes: Sequence[int]) -> list[Record]:
    """Every way at every size, compared with float64 and then timed in turns."""
    records = []
    for size in sizes:
        torch.compiler.reset()  # or a function is compiled for all sizes, and slower
        entry = make(bench, size)
        first = next(iter(entry.ways))
        ways = dict(entry.ways)
        if bench.compiles:
            for name, way in (entry.compiled or {COMPILED: entry.ways[first]}).items():
                ways[name] = torch.compile(way, dynamic=False)
        calls = {name: partial(way, *entry.tensors) for name, way in ways.items()}
        errors = verify(entry, calls)
        moved = traffic(Inputs(entry.tensors), tensors(calls[first]()))
        if entry.products is None:
            floor, alone = COPY, copy_of(moved, bench.device)
        else:
            floor, alone = PRODUCTS, partial(entry.products, *entry.tensors)
        times = bench.timer.measure({**calls, floor: alone})
        us = {name: time.median for name, time in times.items()}
        records.append(Record(size, moved, us, us.pop(floor), floor, errors))
    return records


class _Counter(TorchDispatchMode):
    """Adds up what each op reads and writes; an op that returns a view of its input moves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)]
        written = [x for x in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(x, Tensor)]
        inputs = {x.untyped_storage().data_ptr() for x in read}
        if not all(x.untyped_storage().data_ptr() in inputs for x in written) or func._schema.is_mutable:
            self.bytes += sum(x.nbytes for x in (*read, *written))
        return result


@torch.no_grad()
def bytes_moved(call: Callable[[], Any]) -> int:
    """How many bytes the ops of a call read and write, each as if no cache held the result of the one before."""
    with _Counter() as counter:
        call()
    return counter.bytes


# ---- The results


def gelu_written_out(x: Tensor) -> Tensor:
    """The tanh form of GELU, an op of torch for each step."""
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def gelu(bench: Bench, elements: int, hub: ModuleType | None = None) -> Entry:
    """Of the Hub's kernels, `gelu_fast` is the tanh form too; the erf form would be another function."""
    ways: dict[str, Way] = {
        PLAIN: gelu_written_out,
        NATIVE: partial(F.gelu, approximate="tanh"),
        OURS: partial(bench.ltx.gelu, approximate="tanh"),
    }
    if hub is not None:
        ways[HUB] = lambda x: _written(hub.gelu_fast, torch.empty_like(x), x)
    return Entry((bench.random(elements // 256, 256),), ways, exact=ways[NATIVE])


def _written(function: Way, out: Tensor, x: Tensor) -> Tensor:
    function(out, x)
    return out


def silu_and_mul(packed: Tensor) -> Tensor:
    gate, up = packed.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu(bench: Bench, tokens: int, hub: ModuleType | None = None) -> Entry:
    ways: dict[str, Way] = {PLAIN: silu_and_mul, OURS: bench.ltx.swiglu}
    if hub is not None:
        ways[HUB] = lambda x: _written(hub.silu_and_mul, x.new_empty(tokens, bench.inner), x)
    return Entry((bench.random(tokens, 2 * bench.inner),), ways)


def model_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm as the code of many language models has it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def native_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def rmsnorm(bench: Bench, tokens: int) -> Entry:
    ways = {PLAIN: model_norm, NATIVE: native_norm, OURS: bench.ltx.rmsnorm}
    return Entry((bench.random(tokens, bench.hidden), bench.random(bench.hidden)), ways, exact=native_norm)


def _after_addition(norm: Way) -> Way:
    """The residual is added once: the sum is normalised, and goes on as the residual stream."""

    def way(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        stream = x + residual
        return norm(stream, weight), stream

    return way


def rmsnorm_residual(bench: Bench, tokens: int) -> Entry:
    native = _after_addition(native_norm)
    ways = {PLAIN: _after_addition(model_norm), NATIVE: native, OURS: bench.ltx.rmsnorm_residual}
    rows = [bench.random(tokens, bench.hidden) for _ in range(2)]
    return Entry((*rows, bench.random(bench.hidden)), ways, exact=native)


def norm_linear(bench: Bench, tokens: int) -> Entry:
    """RMSNorm and the projection to query, key and value after it."""
    ltx, config = bench.ltx, SHAPES[bench.shape][1]
    outputs = (config["num_attention_heads"] + 2 * config["num_key_value_heads"]) * config["head_dim"]
    projection = bench.random(outputs, bench.hidden) / bench.hidden**0.5

    def of(norm: Way) -> Way:
        return lambda x, weight, projection: F.linear(norm(x, weight), projection)

    ways = {PLAIN: of(model_norm), NATIVE: of(native_norm), OURS: of(ltx.rmsnorm)}
    if bench.device == "cuda" and torch.cuda.get_device_capability() >= (8, 9):
        quantised = ltx.quantize_weight(projection)
        ways[OURS_FP8] = lambda x, weight, projection: ltx.scaled_linear(*ltx.rmsnorm_quant(x, weight), *quantised)
    return Entry(
        (bench.random(tokens, bench.hidden), bench.random(bench.hidden), projection),
        ways,
        exact=ways[NATIVE],
        products=lambda x, weight, projection: F.linear(x, projection),
    )


def llama_mlp(bench: Bench) -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaMLP

    with torch.device(bench.device):
        return LlamaMLP(bench.config()).to(bench.dtype).eval().requires_grad_(False)


def patch_mlp(ltx: ModuleType, mlp: Any) -> None:
    """Gate and up become one product, SiLU and the multiplication one kernel. `del mlp.forward` undoes it."""
    packed = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    mlp.forward = lambda x: F.linear(ltx.swiglu(F.linear(x, packed)), mlp.down_proj.weight)


def mlp(bench: Bench, tokens: int) -> Entry:
    stock: Any = llama_mlp(bench)
    patched = view_of(stock)
    patch_mlp(bench.ltx, patched)
    exact = copy.deepcopy(stock).double()
    x, packed = bench.random(tokens, bench.hidden), torch.cat([stock.gate_proj.weight, stock.up_proj.weight])
    inner = bench.random(tokens, bench.inner)
    return Entry(
        (x,),
        {PLAIN: lambda x: stock(x), OURS: lambda x: patched(x)},
        exact=lambda x: exact(x),
        products=lambda x: (F.linear(x, packed), F.linear(inner, stock.down_proj.weight)),
    )


def layer(bench: Bench, tokens: int) -> Entry:
    """A whole decoder layer of a prompt, with attention; the package's by one call of `optimize`."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = bench.config()
    with torch.device(bench.device):
        stock = LlamaDecoderLayer(config, 0).to(bench.dtype).eval().requires_grad_(False)
        x = bench.random(1, tokens, bench.hidden)
        cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(tokens)[None])
    ours, exact = view_of(stock), copy.deepcopy(stock).double()
    report = bench.ltx.optimize(ours, graphs=False)
    attention, rows = stock.self_attn, x[0]
    packed = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    gate_up = torch.cat([stock.mlp.gate_proj.weight, stock.mlp.up_proj.weight])
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    query, key = (bench.random(1, count, tokens, config.head_dim) for count in (heads, key_heads))
    inner, outputs = bench.random(tokens, bench.inner), bench.random(tokens, heads * config.head_dim)

    def products(*_: Tensor) -> None:
        F.linear(rows, packed)
        F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
        for x, weight in ((outputs, attention.o_proj.weight), (rows, gate_up), (inner, stock.mlp.down_proj.weight)):
            F.linear(x, weight)

    def of(model: nn.Module) -> Way:
        return lambda x, cos, sin: tensors(model(x, position_embeddings=(cos, sin)))[0]

    def optimized(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        result = of(ours)(x, cos, sin)
        if not torch.compiler.is_compiling() and report.fallbacks:
            raise ExampleError(f"layer: the stock forward ran: {report.fallbacks}")
        return result

    return Entry(
        (x, cos, sin),
        {PLAIN: of(stock), OURS: optimized},
        exact=lambda *inputs: of(exact)(*(tensor[:, :EXACT_TOKENS] for tensor in inputs)),
        compiled={COMPILED: of(stock), OURS_COMPILED: of(ours)},
        products=products,
        compared=EXACT_TOKENS,
    )


ELEMENTS, SHORT_ELEMENTS = [2**n for n in (10, 13, 16, 19, 22, 25, 28)], [2**10, 2**14]
TOKENS, SHORT_TOKENS = (64, 256, 512, 1024, 2048, 4096, 8192), (4, 32)


@dataclass(frozen=True)
class Race:
    title: str
    make: Callable[[Bench, int], Entry]
    label: str = "tokens"
    sizes: Sequence[int] = TOKENS
    short: Sequence[int] = SHORT_TOKENS

    def run(self, bench: Bench) -> list[Record]:
        return race(bench, self.make, bench.sizes(self.sizes, self.short))


RACES = {
    "gelu": Race("GELU (tanh form)", gelu, "elements", ELEMENTS, SHORT_ELEMENTS),
    "swiglu": Race("SwiGLU: SiLU and multiplication", swiglu),
    "rmsnorm": Race("RMSNorm", rmsnorm),
    "rmsnorm_residual": Race("Residual addition and RMSNorm", rmsnorm_residual),
    "norm_linear": Race("RMSNorm and a linear layer", norm_linear),
    "mlp": Race("LLaMA's MLP", mlp),
    "layer": Race("A decoder layer of LLaMA", layer),
}


# ---- What is shown


@dataclass(frozen=True)
class Verdict:
    """Sentences; a notebook shows them as text."""

    lines: list[str]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def _repr_markdown_(self) -> str:
        return "\n".join(f"- {line}" for line in self.lines)


@dataclass(frozen=True)
class Source:
    """A function of a source file, from the line that begins with `start` to its closing brace."""

    path: Path
    start: str

    def __str__(self) -> str:
        _, begin, rest = self.path.read_text().partition(f"\n{self.start}")
        return begin.lstrip("\n") + rest[: rest.index("\n}\n") + 3]

    def _repr_markdown_(self) -> str:
        return f"```cpp\n{self}```"


def verdict(records: Sequence[Record], label: str = "tokens", ours: str = OURS) -> Verdict:
    """How near the floor `ours` is at the largest size, and every size at which another way is faster."""
    last = records[-1]
    lines = [
        f"{last.size:,} {label}: {ours} takes {last.us[ours]:,.1f} µs, {last.floor} {last.floor_us:,.1f} µs; "
        f"plain torch takes {last.us[next(iter(last.us))] / last.us[ours]:.2f} times as long."
    ]
    for record in records:
        name, us = min(record.us.items(), key=lambda item: item[1])
        if us * NOISE < record.us[ours]:
            lines.append(f"{record.size:,} {label}: {name} is faster, {us:,.1f} µs against {record.us[ours]:,.1f} µs.")
    if len(lines) == 1:
        lines.append(f"At no size is another way faster than {ours} by more than {NOISE - 1:.0%}.")
    worst = max(record.error[ours] for record in records)
    lines.append(f"The largest error of {ours} against float64 is {worst:.1e}.")
    return Verdict(lines)


def draw_times(axes: Any, records: Sequence[Record]) -> None:
    """Microseconds by size."""
    sizes = [record.size for record in records]
    for name in records[0].us:
        axes.plot(sizes, [r.us[name] for r in records], "o-", markersize=4, color=COLOURS.get(name), label=name)
    axes.plot(sizes, [r.floor_us for r in records], "--", color="black", linewidth=1, label=records[0].floor)
    axes.set_yscale("log")
    axes.set_ylabel("µs")
    axes.set_title("time")


def draw_bandwidth(axes: Any, records: Sequence[Record]) -> None:
    """Bytes that have to be moved over the time; the copy's is the bandwidth that was measured."""
    sizes = [record.size for record in records]
    for name in records[0].us:
        speed = [r.bytes / r.us[name] / 1e3 for r in records]
        axes.plot(sizes, speed, "o-", markersize=4, color=COLOURS.get(name), label=name)
    axes.plot(sizes, [r.bytes / r.floor_us / 1e3 for r in records], "--", color="black", linewidth=1)
    axes.set_ylabel("GB/s")
    axes.set_title("achieved bandwidth")


def draw_speedups(axes: Any, records: Sequence[Record], ours: str) -> None:
    """How many times as fast as plain torch; a ring where `ours` is not the fastest."""
    sizes = [record.size for record in records]
    plain = next(iter(records[0].us))
    for name in records[0].us:
        axes.plot(sizes, [r.us[plain] / r.us[name] for r in records], "o-", markersize=4, color=COLOURS.get(name))
    lost = [r for r in records if min(r.us.values()) * NOISE < r.us[ours]]
    axes.plot(
        [r.size for r in lost], [r.us[plain] / r.us[ours] for r in lost], "o", markersize=11, fillstyle="none",
        color="#C44E52", label="another way is faster",
    )  # fmt: skip
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("times as fast as plain torch")
    axes.set_title("speed-up")
    axes.legend(fontsize=8, frameon=False)


def _scale(axes: Any, records: Sequence[Record], label: str) -> None:
    axes.set_xscale("log", base=2)
    if records[-1].size < 1e5:
        axes.set_xticks([r.size for r in records], [f"{r.size:,}" for r in records], fontsize=8)
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)


def plot(bench: Bench, records: Sequence[Record], title: str, label: str = "tokens", ours: str = OURS) -> Any:
    """Time, bandwidth (where a copy is the floor) and speed-up by size."""
    from matplotlib import pyplot

    panels: list[Callable[..., None]] = [draw_times, draw_bandwidth, partial(draw_speedups, ours=ours)]
    if records[0].floor != COPY:
        panels.remove(draw_bandwidth)
    figure, grid = pyplot.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.8), layout="constrained")
    for axes, draw in zip(grid, panels):
        draw(axes, records)
        _scale(axes, records, label)
    grid[0].legend(fontsize=8, frameon=False)
    figure.suptitle(f"{title}\n{bench.name}", fontsize=10)
    return figure


def plot_errors(bench: Bench, records: Sequence[Record], title: str, label: str = "tokens") -> Any:
    """The relative error of every way against float64, by size."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    for name in records[0].error:
        errors = [r.error[name] for r in records]
        axes.plot([r.size for r in records], errors, "o-", markersize=4, color=COLOURS.get(name), label=name)
    _scale(axes, records, label)
    axes.set_yscale("log")
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(f"{title}\n{bench.name}", fontsize=9)
    return figure


def plot_ahead(bench: Bench, races: dict[str, Sequence[Record]]) -> Any:
    """The time of the fastest other way over this package's, for races of the same sizes; below 1 in red."""
    from matplotlib import pyplot

    ways = (PLAIN, NATIVE, COMPILED, HUB)
    ratios = [[min(r.us[w] for w in ways if w in r.us) / r.us[OURS] for r in records] for records in races.values()]
    sizes = [record.size for record in next(iter(races.values()))]
    figure, axes = pyplot.subplots(figsize=(2.6 + 0.9 * len(sizes), 0.9 + 0.5 * len(races)), layout="constrained")
    axes.imshow(ratios, cmap="RdYlGn", vmin=0.5, vmax=1.5, aspect="auto")
    for row, values in enumerate(ratios):
        for column, value in enumerate(values):
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=9)
    axes.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
    axes.set_yticks(range(len(races)), list(races))
    axes.set_xlabel("tokens")
    axes.set_title(f"The fastest other way over this package\n{bench.name}", fontsize=9)
    return figure


def plot_bytes(calls: dict[str, dict[str, Callable[[], Any]]], title: str = "") -> Any:
    """Bars of the bytes that the ops of each call move: {what: {way: call}}."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 0.9 + 0.7 * len(calls)), layout="constrained")
    ways = list(dict.fromkeys(way for of in calls.values() for way in of))
    height = 0.8 / len(ways)
    for i, way in enumerate(ways):
        places = [row + i * height for row, of in enumerate(calls.values()) if way in of]
        moved = [bytes_moved(of[way]) / 1e6 for of in calls.values() if way in of]
        bars = axes.barh(places, moved, height, color=COLOURS.get(way), label=way)
        axes.bar_label(bars, fmt="%.3g", fontsize=8, padding=2)
    axes.set_yticks([row + (len(ways) - 1) * height / 2 for row in range(len(calls))], list(calls))
    axes.invert_yaxis()
    axes.set_xlabel("MB read and written")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(title, fontsize=10)
    return figure


def make_table(records: Sequence[Record], title: str, label: str) -> Table:
    table = Table(title=f"{title}, µs", title_justify="left")
    for column in (label, *records[0].us, records[0].floor, "error"):
        table.add_column(column, justify="right")
    for r in records:
        times = [f"{us:,.1f}" for us in (*r.us.values(), r.floor_us)]
        table.add_row(f"{r.size:,}", *times, f"{r.error[OURS]:.1e}")
    return table


def main(arguments: list[str] | None = None) -> int:
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("Agg")
    args = make_parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    bench = prepare(args.short or None, not args.no_compile)
    hub, why = fetch_community()
    console.print(bench.name, soft_wrap=True)
    if hub is None:
        console.print(f"{HUB} left out: {why}", soft_wrap=True, markup=False)
    results: dict[str, Any] = {"device": bench.name, "short": bench.short, "races": {}}
    args.output.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        chosen = RACES[name]
        if name in ("gelu", "swiglu"):
            chosen = dataclasses.replace(chosen, make=partial(chosen.make, hub=hub))
        records = chosen.run(bench)
        results["races"][name] = [dataclasses.asdict(record) for record in records]
        console.print(make_table(records, chosen.title, chosen.label))
        console.print(str(verdict(records, chosen.label)), soft_wrap=True)
        figure = plot(bench, records, chosen.title, chosen.label)
        figure.savefig(args.output / f"{name}.png", dpi=120)
        pyplot.close(figure)
        (args.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"wrote {args.output}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
