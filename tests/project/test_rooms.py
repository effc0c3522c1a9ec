"""The rooms of ltx_kernels/integrations: which file may import which, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "torch-ext" / "ltx_kernels" / "integrations"
# From the ground up. A room imports from its own files and from rooms before it. The registry finds the families, and
# belongs to their floor.
FLOORS = (
    ("engine",),
    ("linear", "parallel"),
    ("replay",),
    ("blocks",),
    ("attention", "causal"),
    ("diffusers", "transformers", "registry", "hub_layers", "idle"),
    ("report", "selection"),
    ("quantizer",),
    ("",),
)
LINES = 450  # of a file at most: a longer one holds two subjects


def files(package: Path) -> dict[str, Path]:
    """The files by their names as modules below the package, without a name for the package itself."""
    names = {path: path.relative_to(package).with_suffix("").parts for path in package.rglob("*.py")}
    return {".".join(part for part in parts if part != "__init__"): path for path, parts in names.items()}


def imports(name: str, path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """The files of the package that a file imports from, also where it is for types alone."""
    home = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    home = [part for part in home if part]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and 0 < node.level <= len(home) + 1:
            start = home[: len(home) + 1 - node.level]
            source = ".".join([*start, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                inner = f"{source}.{alias.name}".strip(".")
                yield inner if inner in known else source


def arrows(package: Path) -> dict[str, set[str]]:
    known = files(package)
    return {
        name: {other for other in imports(name, path, known) if other in known and other != name}
        for name, path in known.items()
    }


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Names that lead back to the first of them; empty where there are none."""
    done: set[str] = set()

    def walk(name: str, way: list[str]) -> list[str]:
        if name in way:
            return way[way.index(name) :]
        if name in done:
            return []
        found = next(filter(None, (walk(other, [*way, name]) for other in sorted(graph.get(name, ())))), [])
        done.add(name)
        return found

    return next(filter(None, (walk(name, []) for name in sorted(graph))), [])


def too_long(package: Path) -> dict[str, int]:
    """The lines of the files that have more than `LINES`."""
    lines = {name: len(path.read_text().splitlines()) for name, path in files(package).items()}
    return {name: count for name, count in lines.items() if count > LINES}


def upwards(graph: Mapping[str, set[str]]) -> list[str]:
    """Imports from a room of the same floor or of one above."""
    floor = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
    pairs = ((name, other) for name, others in graph.items() for other in sorted(others))
    return [
        f"{name} -> {other}"
        for name, other in pairs
        if (one := name.split(".")[0]) != (two := other.split(".")[0]) and floor[one] <= floor[two]
        if {one, two} != {"diffusers", "registry"} and {one, two} != {"transformers", "registry"}
    ]


def test_no_circle_of_files() -> None:
    assert circle(arrows(PACKAGE)) == []


def test_no_arrow_upwards() -> None:
    assert upwards(arrows(PACKAGE)) == []


def test_no_file_is_too_long() -> None:
    assert too_long(PACKAGE) == {}


def test_a_file_that_is_too_long_is_found(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("\n" * (LINES + 1))
    (tmp_path / "short.py").write_text("\n" * LINES)
    assert too_long(tmp_path) == {"long": LINES + 1}


def test_names() -> None:
    """Files of families that are shared by families begin with an underscore (registry.py); no others do."""
    found = files(PACKAGE)
    assert [
        name
        for name in found
        if name.rpartition(".")[2].startswith("_") and name.split(".")[0] not in ("diffusers", "transformers")
    ] == []


@pytest.mark.parametrize(
    ("file", "line", "expected"),
    [
        ("engine/kept.py", "from ..replay.calls import x", ["engine.kept -> replay.calls"]),
        ("linear/lora.py", "from ..parallel import context", ["linear.lora -> parallel.context"]),
        (
            "blocks/block.py",
            "if TYPE_CHECKING:\n    from ..attention import engine",
            ["blocks.block -> attention.engine"],
        ),
    ],
)
def test_an_arrow_upwards_is_found(tmp_path: Path, file: str, line: str, expected: list[str]) -> None:
    for name in ("engine/kept", "replay/calls", "linear/lora", "parallel/context", "blocks/block", "attention/engine"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (tmp_path / file).write_text(line)
    assert upwards(arrows(tmp_path)) == expected


def test_a_circle_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from .b import x")
    (tmp_path / "b.py").write_text("def f():\n    from . import a")
    assert sorted(circle(arrows(tmp_path))) == ["a", "b"]
