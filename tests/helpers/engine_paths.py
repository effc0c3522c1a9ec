"""Which models take the same path through the engine, told by the descriptions of their blocks.

Hooks, adapters, offload, caches and torch.compile meet code that blocks share. One model of each path tests that code
in `make test`, and the others are marked slow. torch.compile takes seconds for each model: `make test` compiles a few
models that together have every part of every path. Tests of the numbers run on every model.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Hashable, Iterable, Mapping
from types import ModuleType
from typing import Any

import pytest

# What decides which functions compute an attention, beside its projections.
ATTENTION_FIELDS = ("cross", "added", "shared", "image", "mlp", "gate", "half_tables")


def block_descriptions(ltx: ModuleType, library: str) -> dict[str, list[Any]]:
    """The descriptions of blocks of "diffusers" or "transformers", by the names that a report gives their classes."""
    home, found = getattr(ltx.integrations, library), dict[str, list[Any]]()
    for info in pkgutil.iter_modules(home.__path__):
        for description in getattr(importlib.import_module(f"{home.__name__}.{info.name}"), "ENTRIES", ()):
            if isinstance(description, ltx.integrations.blocks.block.Block):
                for name in description.classes:
                    found.setdefault(ltx.integrations.engine.sites.short_name(name), []).append(description)
    return found


def _ops(part: Any) -> tuple[str, ...]:
    return getattr(part, "ops", ()) or part.entry().ops


def path_of(block: Any) -> Hashable:
    """What computes a block: its streams, the public functions, its attentions and MLPs, other linear layers."""

    def kind(part: Any) -> tuple[Hashable, ...]:
        fields = (field for field in ATTENTION_FIELDS if getattr(part, field, None))
        return type(part).__name__, _ops(part), len(part.projections), *fields

    parts = tuple(sorted(map(kind, block.attentions.values())))
    return len(block.streams), _ops(block), parts, len(block.feed_forwards), bool(block.linears)


def paths_of(descriptions: Mapping[str, list[Any]], blocks: Iterable[str]) -> set[Hashable]:
    """The paths of a model that has these blocks, by their names in a report."""
    return {path_of(block) for name in blocks for block in descriptions.get(name, ())}


def parts_of(path: Any) -> set[Hashable]:
    """What a path is made of: each choice that the descriptions make, whatever stands beside it."""
    streams, ops, attentions, feed_forwards, linears = path
    fields = {(kind, field) for kind, own_ops, *others in attentions for field in (*own_ops, *others)}
    return {("streams", streams), ("feed-forwards", feed_forwards), ("linears", linears), *ops, *fields}


def few_with_every_part(
    descriptions: Mapping[str, list[Any]], models: Mapping[str, Iterable[str]], chosen: set[str]
) -> set[str]:
    """Of the chosen models, with the names of their blocks, few that together have every part of every path."""

    def parts(name: str) -> set[Hashable]:
        return set[Hashable]().union(*map(parts_of, paths_of(descriptions, models[name])))

    left, few = {name: parts(name) for name in sorted(chosen)}, set[str]()
    while any(left.values()):
        most = max(left, key=lambda name: len(left[name]))
        few.add(most)
        left = {name: others - left[most] for name, others in left.items()}
    return few


def one_of_each_path(descriptions: Mapping[str, list[Any]], models: Mapping[str, Iterable[str]]) -> set[str]:
    """Of models, with the names of their blocks, those that together take every path; short names come first."""
    chosen, taken = set[str](), set[Hashable]()
    for name in sorted(models, key=lambda name: (len(name), name)):
        paths = paths_of(descriptions, models[name])
        if not paths <= taken:
            chosen.add(name)
            taken |= paths
    return chosen


def of_each_path(
    argument: str, models: Mapping[str, Any], chosen: set[str], others: pytest.MarkDecorator = pytest.mark.slow
) -> pytest.MarkDecorator:
    """Runs a test on every model; those that are not chosen are marked slow, or as `others` says."""
    marked = [pytest.param(model, marks=[] if n in chosen else others) for n, model in models.items()]
    return pytest.mark.parametrize(argument, marked, ids=models)
