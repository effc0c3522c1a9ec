"""Which of the known classes the installed diffusers and transformers have, and which stay stock under them."""

from __future__ import annotations

import functools
import importlib
import json
import re
from importlib.metadata import version
from types import ModuleType

from .build import ROOT

REASONS = {"absent": "this version has no such class", "stock": "the forward of this version has other arguments"}


def pinned() -> bool:
    """Whether the installed diffusers is the one that this package is written for, of requirements/dev.txt."""
    pins = (ROOT / "requirements" / "dev.txt").read_text()
    return f"diffusers=={version('diffusers')}\n" in pins


@functools.cache
def states(ltx: ModuleType) -> dict[str, str]:
    """For each class that `optimize` knows: "optimized", "stock" or "absent".

    As `optimize` does, this compares the arguments of the forward. What else it compares, such as names of submodules,
    is in the hands of the families' tests.
    """
    sites = importlib.import_module(ltx.integrations.engine.sites.__name__)
    found = {}
    for name, entry in ltx.integrations.ENTRIES.items():
        module, _, cls = name.partition(" + ")[0].rpartition(".")
        try:
            forward = getattr(importlib.import_module(module), cls).forward
        except (ImportError, AttributeError):
            found[name] = "absent"
        else:
            found[name] = "optimized" if sites.parameters_of(forward) == entry.parameters else "stock"
    return found


def recorded() -> dict[str, list[str]] | None:
    """Names of classes in these states under the installed versions, as the table of docs/serving.md has them."""
    records = json.loads((ROOT / "benchmarks" / "results" / "engine-versions.json").read_text())["records"]
    names = "diffusers", "transformers"
    fits = (record for record in records if all(record[name] == version(name) for name in names))
    return next(({state: record[state] for state in REASONS} for record in fits), None)


def unfit(ltx: ModuleType, blocks: dict[str, int]) -> str:
    """Why a family with these blocks cannot be tested under this version; empty if it can."""
    by_name: dict[str, list[str]] = {}
    for name, state in states(ltx).items():  # classes of several models may have one name
        by_name.setdefault(ltx.integrations.engine.sites.short_name(name), []).append(state)
    for name in blocks:
        found = by_name.get(name, ["optimized"])  # an attention of many models is known by its processor too
        if "optimized" not in found:
            return f"{name}: {REASONS[found[0]]}"
    return ""


def missing_class(error: ImportError) -> str:
    """The class that an import of diffusers did not find; the error is raised where it is about something else."""
    match = re.match(r"cannot import name '(\w+)' from 'diffusers", str(error))
    if match is None or pinned():
        raise error
    return match[1]
