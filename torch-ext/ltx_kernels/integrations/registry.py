"""Finds the model families: every module of a package is one, and lists what it knows in ``ENTRIES``.

A module with a leading underscore is no family: families share it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from typing import Union

from torch import nn

from .attention.description import Attention
from .attention.engine import entry_of as entry_of_attention
from .blocks.autoencoder import Autoencoder
from .blocks.block import Block
from .blocks.gated_mlp import GatedMLP
from .blocks.image_module import ImageModule
from .blocks.mixture import Mixture
from .causal.engine import CausalAttention
from .engine.guards import class_of
from .engine.sites import Entry
from .parallel.context import Parallel

Known = Union[Entry, Block, Attention, CausalAttention, GatedMLP, Mixture, Autoencoder, ImageModule]


def entries_of(package: str, path: Iterable[str]) -> dict[str, Entry]:
    """The entries of all modules of a package, by the keys that `key_of` gives modules of their classes."""
    found: dict[str, Entry] = {}
    names = sorted(info.name for info in pkgutil.iter_modules(path))
    for module in (name for name in names if not name.startswith("_")):
        name = f"{package}.{module}"
        known: Iterable[Known] = importlib.import_module(name).ENTRIES
        for description in known:
            entry = entry_of(description)
            for key in entry.classes:
                if key in found:
                    raise RuntimeError(f"{name}: {key} is known to another family already")
                found[key] = entry
    return found


def entry_of(known: Known) -> Entry:
    """What `optimize` installs for what a family describes."""
    if isinstance(known, Entry):
        return known
    return entry_of_attention(known) if isinstance(known, Attention) else known.entry()


def plans_of(package: str, path: Iterable[str]) -> dict[str, Parallel]:
    """The plans of all modules of a package for several ranks, by the class of the model."""
    modules = (importlib.import_module(f"{package}.{info.name}") for info in pkgutil.iter_modules(path))
    return {plan.model: plan for module in modules for plan in getattr(module, "PLANS", ())}


def entry_for(entries: dict[str, Entry], module: nn.Module) -> Entry | None:
    """What is known about a module; of an attention class that many models share, by its processor."""
    name = class_of(module)
    found = entries.get(name)
    if found is None and "processor" in module.__dict__:
        found = entries.get(f"{name} + {class_of(module.processor)}")
    return found
