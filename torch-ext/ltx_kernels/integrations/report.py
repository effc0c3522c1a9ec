"""What `optimize` tells: what was replaced and left alone, and what has happened at run time since."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

from torch import nn

from .engine.sites import Site, uninstall_all
from .idle import advice, idle_share
from .linear.fp8_files import save
from .linear.fp8_weights import is_freed
from .parallel import context, guidance
from .replay import calls
from .replay.cuda_graphs import Graphs, graphs_of


def _columns(rows: list[tuple[str, ...]], right: tuple[int, ...]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]


@dataclass(eq=False)
class Report:
    """What `optimize` replaced and left alone, and what has happened since; print it for a table.

    As a context manager it restores the modules at its end.

    Attributes:
        target: What was optimized, by class and component.
        sites: One for every replaced class: `class_name`, `modules`, `calls` that ran the package's ops, `traces` by
            torch.compile, `gradients`, calls among these through which a gradient goes, `recomputed`, further calls in
            which a checkpoint computed one again, `fallbacks`, the calls that ran the stock forward instead, by
            reason, and `remarks`, what else happened at calls, such as adapters that ran beside fp8 weights.
        left_alone: Modules of a known class, or whole components, that stay as they were, and why.
        notes: Other things to know, such as parameters that could not be packed.
    """

    target: str
    sites: list[Site] = field(default_factory=list)
    left_alone: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _around: list[Site] = field(default_factory=list, repr=False)  # of models whose calls are replayed
    _roots: list[weakref.ref[nn.Module]] = field(default_factory=list, repr=False)
    _in_files: dict[str, Any] = field(default_factory=dict, repr=False)  # the components that `save_weights` writes
    _idle: float | None = field(default=None, repr=False)

    @property
    def replaced(self) -> dict[str, int]:
        """How many modules of each class were replaced."""
        modules: Counter[str] = Counter()  # modules of one class may do different things, by their processors
        for site in self.sites:
            modules[site.name] += site.modules
        return dict(modules)

    @property
    def fallbacks(self) -> dict[str, dict[str, int]]:
        """Calls that ran the stock forward instead, by class and reason."""
        found: dict[str, Counter[str]] = {}
        for site in (*self.sites, *self._around):
            if site.fallbacks:
                found.setdefault(site.name, Counter()).update(site.fallbacks)
        return {name: dict(reasons) for name, reasons in found.items()}

    def restore(self) -> None:
        """Gives every module of what was optimized its stock forward back."""
        roots = (reference() for reference in self._roots)
        uninstall_all(root for root in roots if root is not None)

    def save_weights(self, folder: str | os.PathLike[str]) -> None:
        """Writes what was optimized with ``precision="fp8"``, for ``optimize(..., weights=folder)``.

        Each component of a pipeline goes into a folder of its name: all its tensors as safetensors, the weights of the
        quantised layers in fp8 alone, and its ``config.json``. An autoencoder has no layers in fp8 and is left out.

        Args:
            folder: Where to write; it is made. Earlier files there are replaced when all new ones are written.

        Raises:
            TypeError: ``folder`` is no path.
            ValueError: ``folder`` is empty, or it, or what stands in a component's place there, is a file.
            RuntimeError: Something was not optimized with "fp8", has adapters, or its tensors are on "meta", where a
                sequential offload puts them; or what was optimized is gone.
            ImportError: The package safetensors is not installed.
        """
        if not isinstance(folder, (str, os.PathLike)):
            raise TypeError(f"folder: expected a folder, got {folder!r}")
        if not os.fspath(folder):
            raise ValueError("folder: expected a folder, got an empty text; '.' is the one that you are in")
        models: dict[str, nn.Module] = {}
        for component, reference in self._in_files.items():
            root = reference()
            if root is None:
                raise RuntimeError(f"save_weights: expected a model, got {component or 'one'} that is gone")
            models[component] = root
        save(models, Path(folder))

    def idle_share(self, call: Callable[[], Any]) -> float:
        """The part of a call's time in which the GPU waits for the host; the report says it from then on.

        CUDA graphs (``optimize(..., graphs=True)``) can save that part, and nothing beyond it. The call runs four
        times, the last time under torch.profiler, so a short one is best::

            report.idle_share(lambda: pipe(prompt, num_inference_steps=2))

        Args:
            call: A function without arguments that calls what was optimized.

        Returns:
            Between 0 (the GPU always has work) and 1.

        Raises:
            TypeError: ``call`` is no function.
            RuntimeError: There is no GPU, or the call runs nothing on it.
        """
        self._idle = idle_share(call)
        return self._idle

    def __enter__(self) -> Report:
        roots = (root for reference in self._roots if (root := reference()) is not None)
        if any(is_freed(module) for root in roots for module in root.modules()):
            raise RuntimeError('with: expected stock weights to restore at its end, got none (stock_weights="free")')
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def _graphs(self) -> list[tuple[str, Graphs]]:
        """The graphs of every module that has some, with the name of its class."""
        roots = (reference() for reference in self._roots)
        modules = (module for root in roots if root is not None for module in root.modules())
        found = ((type(module).__name__, graphs_of(module)) for module in modules)
        return [(name, graphs) for name, graphs in found if graphs is not None]

    def __str__(self) -> str:
        lines = [f"ltx-kernels: {self.target}"]
        if self.sites:
            rows: list[tuple[str, ...]] = [("modules", "class", "calls", "traced", "stock calls", "ops")]
            for s in self.sites:
                numbers = str(s.modules), str(s.calls), str(s.traces), str(sum(s.fallbacks.values()))
                rows.append((numbers[0], s.name, *numbers[1:], ", ".join(s.ops)))
            lines += _columns(rows, right=(0, 2, 3, 4))
        else:
            lines.append("nothing was replaced")
        for name, reasons in self.fallbacks.items():
            lines += [f"stock call of {name}, {count} x: {reason}" for reason, count in reasons.items()]
        for s in self.sites:
            if s.gradients:
                lines.append(f"gradients through {s.name}, {s.gradients} x")
            if s.recomputed:
                lines.append(f"calls of {s.name} computed again in a backward, {s.recomputed} x")
            lines += [f"{text}, {s.name}, {count} x" for text, count in s.remarks.items()]
            if s.unpacked:
                lines.append(
                    f"projections of {s.name} one by one, {s.unpacked} x: their weights lie apart (optimize again), or "
                    "they are no plain linear layers"
                )
        graphs = self._graphs()
        lines += [line for name, of_module in graphs for line in of_module.lines(name)]
        if self._idle is not None:
            lines.append(
                advice(self._idle, any(of_module.replayed or of_module.rule is None for _, of_module in graphs))
            )
        for root in (reference() for reference in self._roots):
            lines += [] if root is None else [*calls.lines(root), *context.lines(root), *guidance.lines(root)]
        grouped: dict[str, list[str]] = {}
        for name, reason in self.left_alone.items():
            grouped.setdefault(reason, []).append(name or "the model")
        for reason, names in grouped.items():
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            lines.append(f"left alone: {shown}: {reason}")
        return "\n".join(lines + self.notes)
