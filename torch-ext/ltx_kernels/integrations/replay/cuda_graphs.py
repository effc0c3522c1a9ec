"""CUDA graphs of whole modules: ``optimize(..., graphs=True)`` and ``graphs="auto"``.

A step of a diffusion transformer is several hundred launches, and on a slow host the GPU waits for them. A CUDA graph
launches them all at once. The first call of an input signature runs ordinarily, the second is captured, and later calls
copy their inputs in, replay, and return copies of the results. With "auto" a signature is captured when that pays
(rent_or_buy.py).

A signature is the shapes, dtypes and strides of all tensors and the values of all other arguments. Graphs read the
parameters where they lay at the capture: where the module or a parameter has changed, all graphs are dropped.
A call that a graph cannot hold runs ordinarily, and the report counts it with the reason.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Callable

import torch
from torch import Tensor, nn

from ..._torch_private import (
    COMPILED_CALL,
    dispatch_modes,
    function_modes,
    has_global_hooks,
    pytree,
)
from ..engine.guards import class_of, has_changing_hooks, has_hooks, hooked, is_capturing, is_ordinary
from ..engine.kept import read_by
from ..engine.signature import signature
from ..engine.sites import Entry, site_of
from ..engine.state import HELD, Held, Snapshot, held
from .rent_or_buy import NO_GAIN, Price, RentOrBuy

DEVICE = "cuda"
LIMIT = 8  # graphs of a module: the one that was used least recently goes first
FIRST = "the first call of its shapes"

Function = Callable[..., Any]

_one_capture = threading.Lock()  # torch can have one at a time in a process


class Captured:
    """One graph, with the tensors that it reads and writes."""

    def __init__(self, function: Function, leaves: Sequence[Any], spec: pytree.TreeSpec, pool: Any) -> None:
        self.inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(self.inputs, spec)
        torch.cuda.synchronize()  # a capture begins with it; done here, earlier work is not part of its time
        start = time.perf_counter()
        torch.cuda.empty_cache()  # a capture begins with it, too; done there alone, it would make `bytes` too small
        before = torch.cuda.memory_reserved()
        self.graph, self.pool = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream()
        torch.cuda.current_blas_handle()  # a thread makes its own at its first product, which no capture permits
        # autocast caches what it casts until its end, and a graph would go on reading that memory.
        autocast = torch.autocast(
            DEVICE, torch.get_autocast_dtype(DEVICE), torch.is_autocast_enabled(DEVICE), cache_enabled=False
        )
        self.reads: list[Any] = []
        try:
            with (
                autocast,
                _one_capture,
                read_by(self.reads),
                torch.cuda.graph(self.graph, pool=self.pool, capture_error_mode="thread_local"),
            ):
                self.outputs = function(*args, **kwargs)
        except BaseException:
            try:
                _end_capturing()
            finally:
                torch.cuda.set_stream(stream)  # torch stays in the stream of a capture that has failed
            raise
        self.bytes = torch.cuda.memory_reserved() - before
        self.seconds = time.perf_counter() - start

    def __call__(self, leaves: Sequence[Any]) -> Any:
        for mine, given in zip(self.inputs, leaves):
            if isinstance(mine, Tensor):
                mine.copy_(given)
        self.graph.replay()
        return pytree.tree_map(_copy, self.outputs)


def _copy(part: Any) -> Any:
    """A part of a result with memory of its own; of an object, such as a cache of keys, with all that it holds."""
    return part.clone() if isinstance(part, Tensor) else copy.deepcopy(part)


def _end_capturing() -> None:
    """Captures one op after a failed capture. Until a capture succeeds, torch refuses random numbers and replays."""
    with _one_capture, torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device=DEVICE)


@dataclass
class Pool:
    """Memory that graphs share, and the graphs that hold it."""

    handle: Any
    graphs: weakref.WeakSet[Captured] = field(default_factory=weakref.WeakSet)


class Plan:
    """What all modules of one `optimize` share.

    Their graphs take their memory from one pool for each stream, so that one graph overwrites what another has left
    there. The lock makes this safe: only one call at a time copies its inputs, launches and copies its results.
    """

    def __init__(self, auto: bool = False) -> None:
        self.auto = auto
        self.price = Price()
        self.lock = threading.Lock()
        self.pools: dict[Any, Pool] = {}  # by stream

    def capture(self, stream: Any, function: Function, leaves: Sequence[Any], spec: pytree.TreeSpec) -> Captured:
        pool = self.pools.pop(stream, None)  # torch regards the pool of a failed capture as in use
        if pool is not None and not pool.graphs:
            pool = None  # torch does not reuse a pool that no graph holds
        captured = Captured(function, leaves, spec, pool and pool.handle)
        pool = self.pools[stream] = pool or Pool(captured.pool)
        pool.graphs.add(captured)
        return captured


class Graphs:
    """The graphs of one module, by signature."""

    def __init__(self, plan: Plan | None = None) -> None:
        self.plan = plan or Plan()
        self.rule = RentOrBuy(self.plan.price) if self.plan.auto else None
        self.captured: OrderedDict[Any, Captured | None] = OrderedDict()
        self.refused: dict[Any, str] = {}  # signatures that are not captured again, and why
        self.ordinary: Counter[str] = Counter()  # calls that were not replayed, by reason
        self.replayed = 0
        self.state: Snapshot | None = None  # of the module that the graphs are of
        self.stream: Any = None

    def run(self, module: nn.Module, function: Function, *args: Any, **kwargs: Any) -> Any:
        """What ``function(*args, **kwargs)`` returns; the module holds the parameters that it reads."""
        if is_capturing():
            return function(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        with self.plan.lock:  # one call's inputs, launch and results at a time
            reason = _why_not_call(leaves) or self._why_not_module(module)
            if not reason:
                try:
                    key = spec, *_product_settings(), *signature(leaves, [])
                    hash(key)
                except (TypeError, RuntimeError):
                    reason = _why_not_comparable(leaves)
            if not reason:
                reason = self._why_not_signature(key, function, leaves, spec)
                if not reason:
                    replay = self.captured[key]
                    assert replay is not None
                    self.replayed += 1
                    with self._timed(key, True):
                        return replay(leaves)
                timed = self._timed(key, False)
            else:
                timed = nullcontext()
            self.ordinary[reason] += 1
        with timed:
            return function(*args, **kwargs)

    def _timed(self, key: Any, replayed: bool) -> AbstractContextManager[None]:
        return nullcontext() if self.rule is None else self.rule.call(key, replayed)

    def _why_not_signature(self, key: Any, function: Function, leaves: Sequence[Any], spec: pytree.TreeSpec) -> str:
        """Captures a signature if that is due. Returns why it has no graph then; empty if it has one."""
        for poor in [] if self.rule is None else self.rule.read():
            self._drop([poor])
            self.refused[poor] = NO_GAIN
        if key in self.refused:
            return self.refused[key]
        if self.captured.get(key) is not None:
            self.captured.move_to_end(key)
            return ""
        if self.rule is not None:
            reason = self.rule.why_not(key)
        else:
            reason = "" if key in self.captured else FIRST
            self._keep(key, None)
        return reason or self._capture(key, function, leaves, spec)

    def _keep(self, key: Any, captured: Captured | None) -> None:
        self.captured[key] = captured
        self.captured.move_to_end(key)
        while len(self.captured) > LIMIT:
            self._drop([next(iter(self.captured))])

    def _drop(self, keys: Sequence[Any]) -> None:
        held = [key for key in keys if self.captured.pop(key, None) is not None]
        if self.rule is not None:
            self.rule.dropped(held)

    def _capture(self, key: Any, function: Function, leaves: Sequence[Any], spec: pytree.TreeSpec) -> str:
        """Captures a signature; returns why it cannot stay, empty where it can."""
        try:
            captured = self.plan.capture(self.stream, function, leaves, spec)
        except RuntimeError as error:
            self.captured.pop(key, None)
            first = error.__context__ or error  # the capture's end fails, too, and says only that
            reason = f"its capture failed: {str(first).splitlines()[0]}"
        else:
            reason = "" if self.rule is None else self.rule.bought(captured.seconds, captured.bytes)
            if not reason:
                self._keep(key, captured)
        if reason:
            self.refused[key] = reason
            if self.rule is not None:
                self.rule.dropped([key])
        return reason

    def _why_not_module(self, module: nn.Module) -> str:
        """Why the module's state keeps its calls from being captured."""
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        if self.stream is None:
            self.stream = stream
        if stream != self.stream:
            return "another stream than that of the first call"
        if self.state is None or not self.state.holds(module):
            self._drop(list(self.captured))
            self.refused.clear()
            obstacle = _obstacle(module)
            self.state = None if obstacle else Snapshot(module)
            return obstacle
        return ""

    def lines(self, name: str) -> list[str]:
        """What the report says of a module's graphs."""
        held = [captured for captured in self.captured.values() if captured is not None]
        size = sum(captured.bytes for captured in held) / 2**20
        slowest = f" captured in {max(one.seconds for one in held):.2f} s or less;" if held else ""
        auto = "" if self.rule is None else " where they pay"
        if self.rule is not None and not self.replayed and not held:
            calls = "; ".join(f"{count} x {reason}" for reason, count in self.ordinary.items())
            return [f"graphs of {name} where they pay: none; {calls}"]
        lines = [f"graphs of {name}{auto}: {len(held)}, {size:.0f} MiB;{slowest} {self.replayed} calls replayed"]
        return lines + [f"not replayed, {count} x: {reason}" for reason, count in self.ordinary.items()]


def graphs_of(module: nn.Module) -> Graphs | None:
    found: Held | None = module.__dict__.get(HELD)
    graphs: Graphs | None = None if found is None else found.graphs
    return graphs


def with_graphs(module: nn.Module, entry: Entry | None, plan: Plan) -> Entry:
    """The entry of a module whose calls are replayed: what it was replaced by, or else its stock forward."""
    compute = None if entry is None else entry.forward

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        function = compute
        if function is None:
            site = site_of(module)
            site.count_call()
            function = site.stock
        if torch.compiler.is_compiling() or (plan.auto and not torch.get_device_module(DEVICE).is_available()):
            return function(module, *args, **kwargs)
        place = held(module)
        if place.graphs is None:
            place.graphs = Graphs(plan)
        graphs: Graphs = place.graphs
        if entry is not None and entry.why_no_graph:
            graphs.ordinary[entry.why_no_graph] += 1
            return function(module, *args, **kwargs)
        return graphs.run(module, functools.partial(function, module), *args, **kwargs)

    def release(module: nn.Module) -> None:
        held(module).graphs = None
        if entry is not None:
            entry.release(module)

    if entry is not None:
        return replace(entry, forward=forward, release=release)
    parameters = tuple(inspect.signature(type(module).forward).parameters)[1:]
    return Entry((class_of(module),), forward, (), parameters, release=release, around=True)


def _product_settings() -> tuple[Hashable, ...]:
    """The settings by which torch chooses kernels of products and convolutions. A graph never changes its kernels."""
    backends: Any = torch.backends  # its types lack some of these
    matmul, conv = backends.cuda.matmul, backends.cudnn.conv
    reductions = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    return backends.fp32_precision, matmul.fp32_precision, conv.fp32_precision, *reductions


def _why_not_call(leaves: Sequence[Any]) -> str:
    """Why a call cannot be captured, whatever the module's state."""
    if torch.is_grad_enabled():
        return "gradients are on"
    if has_global_hooks():
        return "a hook of all modules is registered"
    if function_modes() or dispatch_modes():
        return "a mode that watches torch's functions is active"
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if capturing is not None and capturing._active_collector.get():
        return "a model around it notes hidden states or attentions"
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        return "no tensor among its arguments"
    for tensor in tensors:
        if type(tensor) is not Tensor:
            return f"an argument is a {type(tensor).__name__}"
        if not _is_here(tensor):
            return f"an argument is on {tensor.device}, not on the current GPU"
    return ""


def _why_not_comparable(leaves: Sequence[Any]) -> str:
    """Which argument no signature tells of: an object that a call may read or write, or a nested tensor."""
    for leaf in leaves:
        try:
            signature([leaf], [])
        except TypeError:
            return f"an argument is a {type(leaf).__name__}"
        except RuntimeError:
            break
    return "an argument that cannot be compared"


def _is_here(tensor: Tensor) -> bool:
    """Whether a tensor is on the device whose stream is captured."""
    current = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return tensor.device.type == DEVICE and (tensor.device.index or 0) == current


def _obstacle(module: nn.Module) -> str:
    """Why no call of a module in this state can be captured."""
    if getattr(module, "_parallel_config", None) is not None:
        return "the model is parallel"
    for part in module.modules():
        if part is not module and hooked(part, has_changing_hooks):
            return f"a hook on a {type(part).__name__}"
        if part.__dict__.get(COMPILED_CALL) is not None:
            return "torch.compile"
        if type(part).__module__.startswith("peft."):
            return "LoRA layers: fuse them, and call optimize again"
        if part.training:
            return "training mode"
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None and not is_ordinary(tensor) and type(tensor) is not Tensor:
                return f"a parameter is a {type(tensor).__name__}"
            if tensor is not None and not _is_here(tensor):
                return f"a parameter is on {tensor.device}, not on the current GPU"
    return "a hook on the module" if has_hooks(module) else ""
