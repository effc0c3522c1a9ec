"""The models of the installed diffusers, those that the package knows, and the files of their tests in its source."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

PACKAGES = ("transformers", "controlnets", "autoencoders")
BLOCK_NAMES = ("Block", "DecoderLayer")  # ends of the names of classes of whole blocks


def models_of_diffusers(*packages: str) -> dict[type, set[str]]:
    """The classes of models in some packages of `diffusers.models`, and the names of the modules' classes beside each.

    These are classes that a model's module defines or imports, with their modules' names.
    """
    base = importlib.import_module("diffusers.models.modeling_utils").ModelMixin
    found: dict[type, set[str]] = {}
    for package in (importlib.import_module(f"diffusers.models.{name}") for name in packages):
        for info in pkgutil.iter_modules(package.__path__):
            module = importlib.import_module(f"{package.__name__}.{info.name}")
            classes = {name: cls for name, cls in vars(module).items() if inspect.isclass(cls)}
            parts = {f"{cls.__module__}.{name}" for name, cls in classes.items() if issubclass(cls, nn.Module)}
            own = (cls for cls in classes.values() if issubclass(cls, base) and cls.__module__ == module.__name__)
            found.update(dict.fromkeys(own, parts))
    return found


def known_models(ltx: Any) -> dict[str, type]:
    """The models that `optimize` does more in than norms and activations, by name.

    Their modules hold a known class of blocks, or of encoders and decoders of autoencoders.
    """
    known = {
        name
        for name, entry in ltx.integrations.diffusers.ENTRIES.items()
        if entry.alone or (entry.level == "block" and name.endswith(BLOCK_NAMES))
    }
    return {cls.__name__: cls for cls, parts in models_of_diffusers(*PACKAGES).items() if parts & known}


def files_of_tests(source: Path, models: Iterable[str]) -> dict[Path, list[str]]:
    """The files of tests in diffusers' source that name one of some models, and the models that each names."""
    names = re.compile(rf"\b({'|'.join(map(re.escape, models))})\b")
    found = {file: sorted(set(names.findall(file.read_text()))) for file in source.glob("tests/models/*/test_*.py")}
    return {file: found[file] for file in sorted(found) if found[file]}
