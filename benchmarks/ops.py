"""Times the ops on an NVIDIA GPU beside a copy of the same bytes, plain torch, torch.compile, Liger and QuACK.

    python tools/build.py --backend cuda
    python benchmarks/ops.py [--dtype bf16] [--only NAME] [--no-compile] [--output PATH]

Columns: `ours`, in the default rounding; `copy`, a device copy that reads and writes as many bytes in all; `eager`, the
package's reference in plain torch, rounding in the input's dtype as model code does; `compile`, torch.compile of that;
`native`, torch's own op; `liger` and `quack`, where installed. The result of every column is compared with `eager`
before it is timed. Times are of the device, with a cold L2 cache. The JSON is rewritten after every case.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from cpu import DTYPES, REPOSITORY
from cpu import meta as common_meta
from timing import Timer, host_us
from torch import Tensor

REPO_ID = "org/ltx-kernels"
COLUMNS = ["ours", "copy", "eager", "compile", "native", "liger", "quack"]
PEERS = COLUMNS[2:]
PEER_MODULES = {"liger": "liger_kernel.transformers.functional", "quack": "quack.rmsnorm"}
TOLERANCE = 8.0  # relative error in norm, in machine epsilons: eager rounds several times


@dataclass(frozen=True)
class Sizes:
    host: tuple[int, int]
    rows: Sequence[tuple[int, int]]
    batch: int
    tokens: Sequence[int]
    heads: tuple[int, int]
    flux: tuple[int, int, int, int]  # batch, tokens, heads, width
    llm: tuple[int, int, int, int, int]  # batch, tokens, query heads, key heads, width
    feed_forward: tuple[int, int]


# Rows of LTX-Video's width, of larger models, and of one attention head; tokens of two resolutions.
FULL = Sizes(
    host=(8, 2048),
    rows=[
        *[(rows, 2048) for rows in (1, 64, 1024, 5376, 16128)],
        (16384, 3072),
        (16384, 4096),
        (8192, 8192),
        (131072, 128),
    ],
    batch=2,
    tokens=[2688, 8064],
    heads=(32, 64),
    flux=(1, 4608, 24, 128),
    llm=(4, 4096, 32, 8, 128),
    feed_forward=(16128, 8192),
)
SMALL = Sizes(
    host=(2, 64),
    rows=[(1, 64), (3, 128)],
    batch=2,
    tokens=[5],
    heads=(4, 16),
    flux=(1, 6, 3, 32),
    llm=(2, 7, 4, 2, 32),
    feed_forward=(9, 64),
)


@dataclass(frozen=True)
class Inputs:
    arguments: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    rounds: bool = True  # whether the function has a ``rounding``
    peers: dict[str, Callable[[], Any]] = field(default_factory=dict)  # native, liger, quack


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

    def peers(self, **calls: Callable[[ModuleType], Any]) -> dict[str, Callable[[], Any]]:
        return {name: partial(call, self.modules[name]) for name, call in calls.items() if name in self.modules}


@dataclass(frozen=True)
class Case:
    op: str
    shape: tuple[int, ...]
    function: str
    build: Callable[[Make], Inputs]
    host: bool = False

    @property
    def name(self) -> str:
        return f"{self.op} {'x'.join(map(str, self.shape))}"


def rmsnorm(make: Make, rows: int, width: int) -> Inputs:
    x, weight = make(rows, width), make(width)
    peers = make.peers(
        liger=lambda liger: liger.liger_rms_norm(x, weight, 1e-6),
        quack=lambda quack: quack.rmsnorm(x, weight, eps=1e-6),
    )
    return Inputs((x, weight), peers={"native": lambda: F.rms_norm(x, (width,), weight, 1e-6), **peers})


def layernorm(make: Make, rows: int, width: int) -> Inputs:
    x, weight, bias = make(rows, width), make(width), make(width)
    peers = make.peers(liger=lambda liger: liger.liger_layer_norm(x, weight, bias, 1e-5))
    return Inputs((x, weight, bias), peers={"native": lambda: F.layer_norm(x, (width,), weight, bias, 1e-5), **peers})


def rmsnorm_residual(make: Make, rows: int, width: int) -> Inputs:
    x, residual, weight = make(rows, width), make(rows, width), make(width)
    peers = make.peers(
        liger=lambda liger: liger.liger_fused_add_rms_norm(x, residual, weight, 1e-6),
        quack=lambda quack: quack.rmsnorm(x, weight, residual=residual, eps=1e-6, prenorm=True),
    )
    return Inputs((x, residual, weight), peers=peers)


MODULATED = ["adaln_rmsnorm", "adaln_layernorm", "adaln_zero", "gated_residual", "gated_residual_adaln_rmsnorm"]


def modulated(make: Make, function: str, shape: tuple[int, int, int]) -> Inputs:
    batch, _, width = shape
    x, residual = make(*shape), make(*shape)
    scale, shift, gate = (make(batch, 1, width) for _ in range(3))
    arguments: dict[str, tuple[Tensor | None, ...]] = {
        "adaln_rmsnorm": (x, None, scale, shift),
        "adaln_layernorm": (x, None, scale, shift),
        "adaln_zero": (x, None, scale, shift, gate),
        "gated_residual": (x, residual, gate),
        "gated_residual_adaln_rmsnorm": (x, residual, gate, None, scale, shift),
    }
    return Inputs(arguments[function])


def qk_norm_rope(make: Make, shape: tuple[int, int, int, int], across_heads: bool, half_width: bool) -> Inputs:
    _, tokens, heads, width = shape
    inner = heads * width if across_heads else width
    query, key, query_weight, key_weight = make(*shape), make(*shape), make(inner), make(inner)
    leading = (1, tokens) if across_heads else (tokens,)
    table = make.table(*leading, inner // 2, layout=None) if half_width else None
    cos, sin = table or make.table(*leading, inner, layout="interleaved")
    return Inputs((query, key, query_weight, key_weight, cos, sin), {"across_heads": across_heads})


def apply_rotary(make: Make, shape: tuple[int, int, int]) -> Inputs:
    return Inputs((make(*shape), *make.table(1, *shape[1:], layout="interleaved")))


def query_and_key(make: Make, llm: tuple[int, int, int, int, int]) -> tuple[Tensor, Tensor]:
    batch, tokens, query_heads, key_heads, width = llm
    return make(batch, tokens, query_heads, width), make(batch, tokens, key_heads, width)


def apply_rotary_qk(make: Make, llm: tuple[int, int, int, int, int]) -> Inputs:
    table = make.table(llm[1], llm[4], layout="half", dtype=make.dtype)
    return Inputs((*query_and_key(make, llm), *table), {"layout": "half"})


def rope_1d(make: Make, llm: tuple[int, int, int, int, int]) -> Inputs:
    return Inputs(query_and_key(make, llm), {"layout": "half"}, rounds=False)


def glu(make: Make, rows: int, width: int, options: dict[str, Any], liger_name: str | None) -> Inputs:
    x = make(rows, 2 * width)
    if liger_name is None or "liger" not in make.modules:
        return Inputs((x,), options)
    gate, up = (part.contiguous() for part in x.chunk(2, dim=-1))  # it would copy the packed halves
    return Inputs((x,), options, peers=make.peers(liger=lambda liger: getattr(liger, liger_name)(gate, up)))


def gelu(make: Make, rows: int, width: int, approximate: str, bias: bool) -> Inputs:
    x = make(rows, width)
    if bias:
        return Inputs((x,), {"approximate": approximate, "bias": make(width)})
    native = {"native": lambda: F.gelu(x, approximate=approximate)}
    return Inputs((x,), {"approximate": approximate}, peers=native)


def cases(sizes: Sizes) -> list[Case]:
    batch, (heads, head_width), (rows, width) = sizes.batch, sizes.heads, sizes.feed_forward
    found = [
        Case("rmsnorm", sizes.host, "rmsnorm", partial(rmsnorm, rows=sizes.host[0], width=sizes.host[1]), host=True)
    ]
    for function, build in (("rmsnorm", rmsnorm), ("layernorm", layernorm), ("rmsnorm_residual", rmsnorm_residual)):
        found += [
            Case(function, shape, function, partial(build, rows=shape[0], width=shape[1])) for shape in sizes.rows
        ]
    inner = [(batch, tokens, heads * head_width) for tokens in sizes.tokens]
    for function in MODULATED:
        found += [
            Case(function, shape, function, partial(modulated, function=function, shape=shape)) for shape in inner
        ]
    for half_width in (False, True):
        op = f"qk_norm_rope across heads, {'half' if half_width else 'full'} table"
        for tokens in sizes.tokens:
            shape = (batch, tokens, heads, head_width)
            build = partial(qk_norm_rope, shape=shape, across_heads=True, half_width=half_width)
            found.append(Case(op, shape, "qk_norm_rope", build))
    build = partial(qk_norm_rope, shape=sizes.flux, across_heads=False, half_width=False)
    found.append(Case("qk_norm_rope per head", sizes.flux, "qk_norm_rope", build))
    found += [Case("apply_rotary", shape, "apply_rotary", partial(apply_rotary, shape=shape)) for shape in inner]
    found.append(Case("apply_rotary_qk", sizes.llm, "apply_rotary_qk", partial(apply_rotary_qk, llm=sizes.llm)))
    found.append(Case("rope_1d", sizes.llm, "rope_1d", partial(rope_1d, llm=sizes.llm)))
    for op, function, options, liger_name in (
        ("swiglu", "swiglu", {}, "liger_swiglu"),
        ("geglu tanh", "geglu", {"approximate": "tanh"}, "liger_geglu"),
        ("geglu erf", "geglu", {"approximate": "none"}, None),
    ):
        build = partial(glu, rows=rows, width=width, options=options, liger_name=liger_name)
        found.append(Case(op, (rows, 2 * width), function, build))
    for kind, approximate in (("tanh", "tanh"), ("erf", "none")):
        for bias in (False, True):
            build = partial(gelu, rows=rows, width=width, approximate=approximate, bias=bias)
            found.append(Case(f"gelu {kind}{' bias' if bias else ''}", (rows, width), "gelu", build))
    return found


def calls(ltx: ModuleType, case: Case, inputs: Inputs, compiled: bool) -> dict[str, Callable[[], Any]]:
    """Everything that computes the case's result, by column."""
    ours, reference = getattr(ltx, case.function), getattr(ltx.reference, case.function)
    eager = {**inputs.options, **({"rounding": "eager"} if inputs.rounds else {})}
    found = {
        "ours": lambda: ours(*inputs.arguments, **inputs.options),
        "eager": lambda: reference(*inputs.arguments, **eager),
    }
    if compiled:
        torch.compiler.reset()  # or the reference falls back to eager after a few shapes
        function = torch.compile(reference, dynamic=False)
        found["compile"] = lambda: function(*inputs.arguments, **eager)
    return {**found, **inputs.peers}


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def assert_same(result: Any, expected: list[Tensor]) -> None:
    for a, b in zip(tensors(result), expected, strict=True):
        error = ((a.float() - b.float()).norm() / b.float().norm()).item()
        limit = TOLERANCE * torch.finfo(b.dtype).eps
        if not error <= limit:
            raise AssertionError(f"relative error {error:.2g} to eager, limit {limit:.2g}")


def traffic(inputs: Inputs, outputs: list[Tensor]) -> int:
    """The bytes that an op has to read and write at least."""
    read = [x for x in (*inputs.arguments, *inputs.options.values()) if isinstance(x, Tensor)]
    return sum(x.nbytes for x in (*read, *outputs))


def measure(ltx: ModuleType, timer: Timer, case: Case, make: Make, dtype: str, compiled: bool) -> dict[str, Any]:
    inputs = case.build(make)
    found = calls(ltx, case, inputs, compiled)
    expected = tensors(found["eager"]())
    failed = {}
    for name, call in list(found.items()):
        try:
            assert_same(call(), expected)
        except Exception as error:
            if name == "ours":
                raise
            failed[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            del found[name]
    size = traffic(inputs, expected)
    source = torch.randint(256, (size // 2,), dtype=torch.uint8, device=make.device)
    target = torch.empty_like(source)
    found["copy"] = lambda: target.copy_(source)
    times = timer.measure(found)
    record = {
        "op": case.op,
        "shape": list(case.shape),
        "dtype": dtype,
        "bytes": size,
        "us": {name: times[name].median if name in times else None for name in COLUMNS},
        "p90": {name: times[name].p90 if name in times else None for name in COLUMNS},
        "host_us": {name: host_us(found[name]) for name in ("ours", "native")} if case.host else None,
    }
    return {**record, "failed": failed} if failed else record


def load_peers() -> tuple[dict[str, ModuleType], dict[str, str]]:
    """(modules, why each of the others is missing)."""
    modules, missing = {}, {}
    for name, module in PEER_MODULES.items():
        try:
            modules[name] = importlib.import_module(module)
        except Exception as error:  # a package that is installed may still fail, for want of its compiler
            missing[name] = f"{type(error).__name__}: {error}"
    return modules, missing


def load_package() -> tuple[ModuleType, dict[str, Any]]:
    """(the package as users load it, its metadata.json)."""
    os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={REPOSITORY / 'build'}")
    from kernels import get_kernel

    ltx = get_kernel(REPO_ID, version=1)
    return ltx, json.loads((Path(ltx.__file__).parent / "metadata.json").read_text())


def driver_version() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def write(path: Path, meta: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """Replaces the file in one step, so that there is a whole one whenever the run is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps({"meta": meta, "records": records}, indent=1) + "\n")
    partial.replace(path)


def progress(selected: list[Case]) -> Iterator[Case]:
    try:
        from rich.progress import track
    except ImportError:
        for index, case in enumerate(selected, 1):
            print(f"[{index}/{len(selected)}] {case.name}", file=sys.stderr, flush=True)
            yield case
    else:
        yield from track(selected, description="ops")


def print_table(records: list[dict[str, Any]]) -> None:
    columns = "".join(f"{name:>9}" for name in COLUMNS)
    print(f"{'op':42}{'shape':16}{columns}{'x copy':>8}{'peer/ours':>17}")
    for record in records:
        us = record["us"]
        times = "".join(f"{'-' if us[name] is None else format(us[name], '.1f'):>9}" for name in COLUMNS)
        peer = min((name for name in PEERS if us[name] is not None), key=us.__getitem__)
        fastest = f"{peer} {us[peer] / us['ours']:.2f}"
        shape = "x".join(map(str, record["shape"]))
        print(f"{record['op']:42}{shape:16}{times}{us['ours'] / us['copy']:8.2f}{fastest:>17}")
    for record in records:
        shape = "x".join(map(str, record["shape"]))
        for name, error in record.get("failed", {}).items():
            print(f"failed: {name} on {record['op']} {shape}: {error}")
        if record["host_us"]:
            host = ", ".join(f"{name} {us}" for name, us in record["host_us"].items())
            print(f"host us per call, {record['op']} {shape}: {host}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only cases with this in `op shape`")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile, which takes most of the time")
    parser.add_argument("--output", type=Path, help="JSON (default: benchmarks/results/<gpu>-ops.json)")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.version.cuda is None:
        sys.exit("benchmarks/ops.py needs an NVIDIA GPU and a torch that can use it; for the CPU: benchmarks/cpu.py")
    selected = [case for case in cases(FULL) if options.only in case.name]
    if not selected:
        sys.exit(f"--only {options.only}: no such case")
    ltx, package = load_package()
    if package["backend"]["type"] != "cuda":
        sys.exit(f"{package['id']} is not for CUDA: run `python tools/build.py --backend cuda`")

    modules, missing = load_peers()
    for name, error in missing.items():
        print(f"missing: {name}: {error}", flush=True)
    device = torch.cuda.get_device_name()
    meta = {
        "device": device,
        "driver": driver_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": package["provenance"]["kernel"]["commit"],
        "dirty": package["provenance"]["kernel"]["dirty"],
        "date": common_meta()["date"],
        "missing": missing,
        "package_id": package["id"],
    }
    slug = device.removeprefix("NVIDIA ").lower().replace(" ", "-")
    output = options.output or REPOSITORY / f"benchmarks/results/{slug}-ops.json"
    torch.manual_seed(0)
    timer = Timer()
    make = Make(DTYPES[options.dtype], "cuda", modules)
    records: list[dict[str, Any]] = []
    with torch.no_grad():
        for case in progress(selected):
            records.append(measure(ltx, timer, case, make, options.dtype, compiled=not options.no_compile))
            write(output, meta, records)
    print_table(records)
    print(output)


if __name__ == "__main__":
    main()
