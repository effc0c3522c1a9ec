"""docs/guarantees.md and its measured page name tests that exist, and each planted defect has its result."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.files import path_of
from mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def test_the_tests_that_the_pages_name_exist() -> None:
    pages = ("guarantees.md", "measured/guarantees.md")
    text = "".join((ROOT / "docs" / page).read_text() for page in pages)
    named = re.findall(r"`test_(\w+)\.py::(test_\w+)", text)
    assert len(named) > 60
    for file, test in named:
        assert f"\ndef {test}(" in (ROOT / path_of(file)).read_text(), f"{file}::{test}"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.defect)
def test_planted_defects_can_be_planted(mutation) -> None:
    """Their text stands in the sources once; if the code there changes, so must the mutation."""
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1


@pytest.mark.parametrize("backend", ["cpu", "cuda", "tools"])
def test_every_planted_defect_was_caught(backend: str) -> None:
    path = RESULTS / f"mutations-{backend}.json"
    if not path.exists():
        pytest.skip(f"NOT RUN: {path.name} has not been made")
    caught = {record["defect"]: record["caught_by"] for record in json.loads(path.read_text())["records"]}
    assert all(caught.values())
    assert {m.defect for m in MUTATIONS if backend in m.backends} == set(caught)
