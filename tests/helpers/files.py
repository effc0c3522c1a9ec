"""Where a file of tests is: tests/ has those of ops, models and the engine, tests/project/ all others."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def path_of(name: str) -> str:
    """tests/test_norm.py of "norm", tests/project/test_docs.py of "docs"."""
    (path,) = TESTS.rglob(f"test_{name}.py")
    return path.relative_to(TESTS.parent).as_posix()
