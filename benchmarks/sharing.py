"""Lets several benchmarks share a GPU: one has it, and the others compile meanwhile.

Most of the time of a benchmark of a whole model is torch.compile's, which needs the host alone. `measure.py
--slots N` starts programs that call `share` before they use the GPU. A program that has the lock of a file has the GPU
to itself. It gives the lock away while libraries are imported and while torch.compile traces and compiles. It takes the
lock again for torch.compile's own timings, by which it chooses among kernels. Between its own timings it gives the
others a turn. What a program times is therefore timed on a GPU that no other program uses. How long compiling took is
not known then, since the program also waited for the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import importlib.util
import inspect
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch

VARIABLE = "LTX_BENCHMARKS_LOCK"  # the lock file's path, from measure.py to the programs that it starts
LIBRARIES = ("diffusers", "transformers")  # that import the modules of a model when its class is asked for
TURN_S = 0.01  # a program that takes the lock again at once is faster than those that wait for it

_shared: list[Lock] = []  # what `share` took


class Lock:
    """A lock between processes. A process that ends without giving it back loses it."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.file: IO[bytes] = self.path.open("ab")
        self.is_held = self.is_kept = False

    @contextlib.contextmanager
    def _block(self, held: bool) -> Iterator[None]:
        before = self.is_held
        self.turn(held)
        try:
            yield
        finally:
            self.turn(before)

    def held(self) -> contextlib.AbstractContextManager[None]:
        """In its block this process has the lock, also where the block around it has given it away."""
        return self._block(True)

    def released(self) -> contextlib.AbstractContextManager[None]:
        """In its block other processes can have the lock, unless this one keeps it. What it has launched has ended."""
        return contextlib.nullcontext() if self.is_kept else self._block(False)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """In its block this process does not give the lock away."""
        before, self.is_kept = self.is_kept, True
        try:
            yield
        finally:
            self.is_kept = before

    def turn(self, held: bool) -> None:
        """Takes the lock, which can wait for another process, or gives it back."""
        if held and not self.is_held:
            fcntl.lockf(self.file, fcntl.LOCK_EX)
        elif self.is_held and not held:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            fcntl.lockf(self.file, fcntl.LOCK_UN)
        self.is_held = held


def is_shared() -> bool:
    """Whether other benchmarks use this GPU while this one compiles."""
    return VARIABLE in os.environ


def released() -> contextlib.AbstractContextManager[None]:
    """For a block that needs the host alone: other benchmarks can use the GPU meanwhile. Nothing before `share`."""
    return _shared[0].released() if _shared else contextlib.nullcontext()


def timed() -> contextlib.AbstractContextManager[None]:
    """For a block that is timed: the GPU is not given away in it, even if torch.compile compiles again."""
    return _shared[0].kept() if _shared else contextlib.nullcontext()


def give_turn() -> None:
    """Lets those that wait for the GPU use it first. What follows warms the GPU up by itself, or times nothing."""
    if _shared:
        with released():
            time.sleep(TURN_S)


def share() -> None:
    """Takes the GPU until this process ends, but for imports and the times in which torch.compile traces and compiles.

    Nothing where `is_shared` is False. torch.compile has no public way to learn when it compiles and when it times.
    """
    if not is_shared():
        return
    from torch._dynamo import convert_frame
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.runtime import benchmarking, compile_tasks
    from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    # torch.compile's workers use torch's ptxas. This process would use Triton's, and Triton keeps the kernels of two
    # versions apart. "max-autotune" would then compile each kernel again, while this process has the GPU.
    compile_tasks._set_triton_ptxas_path()
    lock = Lock(Path(os.environ[VARIABLE]))
    lazy = [
        (importlib.import_module(f"{library}.utils.import_utils")._LazyModule, "_get_module", lock.released)
        for library in LIBRARIES
        if importlib.util.find_spec(library)
    ]

    def within(
        block: Callable[[], contextlib.AbstractContextManager[None]], function: Callable[..., Any]
    ) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with block():
                return function(*args, **kwargs)

        return called

    timer = type(benchmarking.benchmarker)
    # Each is called for its work alone, and none in the steps that are timed. "max-autotune" times all kernels for a
    # product in one turn: with a turn for each, it would wait dozens of times.
    for owner, name, block in (
        *lazy,
        (convert_frame, "_compile", lock.released),
        (CoordescTuner, "autotune", lock.released),
        (AlgorithmSelectorCache, "benchmark_in_current_process", lock.held),
        (TritonScheduling, "benchmark_codegened_module", lock.held),
        (pad_mm, "_should_pad", lock.held),
        (timer, "benchmark_gpu", lock.held),
    ):
        original = getattr(owner, name)
        replaced = within(block, original)
        setattr(owner, name, staticmethod(replaced) if inspect.ismethod(original) else replaced)
    _shared[:] = [lock]
    lock.turn(True)
