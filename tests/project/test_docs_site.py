"""The site of docs/: `make docs` makes it without a warning, and its links lead somewhere."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from urllib.parse import unquote

import pytest
from helpers.build_checks import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import docs_site


@pytest.mark.parametrize(
    ("page", "target", "on_the_site"),
    [
        ("README.md", "docs/ops.md#numerics", "ops.md#numerics"),
        ("README.md", "LICENSE", "SOURCE/blob/main/LICENSE"),
        ("docs/ops.md", "guarantees.md", "guarantees.md"),
        (
            "docs/faq.md",
            "../skills/cuda-kernels/references/t4-optimization-guide.md#dtypes",
            "t4-optimization-guide.md#dtypes",
        ),
        ("skills/cuda-kernels/references/t4-optimization-guide.md", "diffusers-h100.md", "diffusers-h100.md"),
        ("docs/ops.md", "#numerics", "#numerics"),
        ("docs/ops.md", "../README.md", "index.md"),
        ("docs/ops.md", "../benchmarks/results", "SOURCE/tree/main/benchmarks/results"),
        ("docs/ops.md", "../benchmarks/ops.py#L1", "SOURCE/blob/main/benchmarks/ops.py#L1"),
        ("docs/ops.md", "../benchmarks/results/h200-ltx.png", "benchmarks/results/h200-ltx.png"),
        ("docs/ops.md", "measured/ops.md#all", "measured/ops.md#all"),
        ("docs/measured/ops.md", "../ops.md#numerics", "../ops.md#numerics"),
        ("docs/measured/ops.md", "fp8.md", "fp8.md"),
        ("docs/measured/ops.md", "../../README.md", "../index.md"),
        ("docs/measured/ops.md", "../../benchmarks/ops.py", "SOURCE/blob/main/benchmarks/ops.py"),
        ("docs/measured/ops.md", "../../benchmarks/results/h200-ltx.png", "../benchmarks/results/h200-ltx.png"),
        ("docs/ops.md", "https://huggingface.co/docs", "https://huggingface.co/docs"),
    ],
)
def test_targets_of_links(page: str, target: str, on_the_site: str) -> None:
    expected = on_the_site.replace("SOURCE", docs_site.source())
    assert docs_site.site_target(page, target) == expected
    assert docs_site.for_site(page, f'[a]({target}) <img src="{target}">') == f'[a]({expected}) <img src="{expected}">'


def test_links_show_titles_and_not_files() -> None:
    text = "[fp8.md](fp8.md#layers), [docs/hub.md](hub.md), [own words](hub.md), [none.md](none.md)"
    assert docs_site.for_site("docs/faq.md", text) == (
        f"[{title('docs/fp8.md')}](fp8.md#layers), [{title('docs/hub.md')}](hub.md), [own words](hub.md), "
        f"[none.md](none.md)"
    )


def title(page: str) -> str:
    return (ROOT / page).read_text().partition("# ")[2].partition("\n")[0]


def test_the_navigation() -> None:
    """Every page of docs/ and of the skill stands in it once, and the repository has a name."""
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\nvalidation:")[0]
    named = re.findall(r"([\w/-]+\.md)$", text, re.MULTILINE)
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    pages |= {"index.md", *docs_site.GUIDES.values()}
    assert sorted(named) == sorted(pages)
    config = SimpleNamespace(site_name="ltx-kernels")
    assert docs_site.on_config(config).repo_name == "ltx-kernels"


class Page(HTMLParser):
    """The identifiers of a page, and what it links to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.identifiers: set[str] = set()
        self.targets: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.identifiers |= {value for name in ("id", "name") if (value := values.get(name))}
        self.targets |= {value for name in ("href", "src") if (value := values.get(name))}


@pytest.mark.slow
def test_the_site(ltx: ModuleType, tmp_path: Path) -> None:
    """Without a warning; every page is in the navigation, every link leads somewhere, every function is described."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "PIP_INDEX_URL") if name in os.environ}
    command = ["make", "docs", f"SITE={tmp_path}"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    pages = {path: Page(path.read_text()) for path in tmp_path.rglob("*.html")}
    assert len(pages) > len(list((ROOT / "docs").rglob("*.md")))  # and the front page
    texts = {path: re.sub(r"<(pre|code)\b.*?</\1>", "", path.read_text(), flags=re.DOTALL) for path in pages}
    assert [name for name, text in texts.items() if re.search(r"^\|.*\|$", text, re.MULTILINE)] == []  # tables as text
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links are for a server
            continue
        for target in page.targets:
            if re.match(r"(https?|mailto|data|javascript):", target):
                continue
            file, _, identifier = unquote(target).partition("#")
            linked = (path.parent / file).resolve() if file and file != "." else path
            linked = linked / "index.html" if linked.is_dir() else linked
            if not linked.exists() or (identifier and identifier not in pages[linked].identifiers):
                broken.append(f"{path.name}: {target}")
    assert broken == []
    described = {name.rpartition(".")[2] for name in pages[tmp_path / "api.html"].identifiers}
    assert {name for name in ltx.__all__ if inspect.isfunction(getattr(ltx, name))} <= described
