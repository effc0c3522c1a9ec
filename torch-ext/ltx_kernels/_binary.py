"""Loads the compiled library, once in a process for each build.

torch registers the ops of a build once, and ends the process at the second time. But a process may import one build
from several folders, such as two snapshots in the Hub's cache. The first import loads its library, and notes the file
at the namespace of the ops. Later imports use that file, if theirs is the same byte for byte.
"""

from __future__ import annotations

import filecmp
import sys
from importlib import import_module
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import torch

_SUFFIX = ".abi3.so"


def _own_library() -> Path:
    folder = Path(__file__).absolute().parent
    found = sorted(folder.glob(f"*{_SUFFIX}"))
    if len(found) != 1:
        names = " and ".join(file.name for file in found) or "none"
        raise ImportError(
            f"{folder}: expected one compiled library (*{_SUFFIX}), got {names}: build or install it again"
        )
    return found[0]


def _load(library: Path) -> None:
    ops = library.name[: -len(_SUFFIX)]
    module = f"{__package__}.{ops}"
    namespace = vars(getattr(torch.ops, ops))
    first = namespace.get("library")
    if first is None:
        import_module(module)
        namespace["library"] = library
        return
    if not (first.is_file() and filecmp.cmp(first, library, shallow=False)):
        raise ImportError(
            f"{library}: expected the library that this process has loaded under the same name, got another one than "
            f"{first}: import the package from one of the two folders alone, or start another process for the second",
        )
    spec = spec_from_loader(module, ExtensionFileLoader(module, str(first)))
    assert spec is not None and spec.loader is not None
    sys.modules[module] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[module])
    setattr(sys.modules[__package__], ops, sys.modules[module])  # where _ops.py imports it from


_load(_own_library())
