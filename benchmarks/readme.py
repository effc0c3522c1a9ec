"""Writes the results of README.md, docs/ and skills/ from benchmarks/results, and tables of models from the build.

    python benchmarks/readme.py [--check]

A part of a page between <!-- NAME --> and <!-- /NAME --> is written whole, by a function of pages/, and so is an SVG
(`picture` in pages/writing.py). A PNG of other records than its file has is drawn anew (plots.py). A figure in a
sentence carries a comment with the file and the key that it comes from, and its digits are written anew:

    20.3<!-- h200-ltx-batch1 config=kernels step_ms --> ms

`key=value` picks the one record with this value (`key~text`: whose value contains the text; `key=`: which lacks it; a
shape is 2x8064x2048), and the last word names the field, with dots for what lies deeper. Without a `key=` the field is
one of the whole file.
Most tables stand in docs/measured/, one page for each subject.
Below a table whose figures are older than their sources a sentence says so (pages/marks.py).
Fields and numbers may be joined by ` / ` and ` * `, from left to right; what picks the record stands before the first.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pages
from pages.marks import TOLD, mark
from pages.writing import BLOCKS, PICTURES, REPOSITORY, at, load
from plots import READ, RESULTS, outdated, redraw
from sources import HistoryError

for module in pkgutil.iter_modules(pages.__path__):  # each adds its functions to BLOCKS
    importlib.import_module(f"{pages.__name__}.{module.name}")

FIGURE = re.compile(r"(?P<number>[\d.,]+(?:e[-+]?\d+)?)?<!-- (?P<file>[\w-]+) (?P<source>[^>]+?) -->")


def _pages() -> list[Path]:
    return sorted(
        [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "skills").rglob("*.md")]
    )


def _shown(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list) else str(value)


def _record(file: str, conditions: list[str]) -> Any:
    """The one record that all conditions fit."""
    records = load(file)["records"]
    for condition in conditions:
        key, relation, wanted = re.split("([=~])", condition, maxsplit=1)
        values = [(record, _shown(record.get(key, ""))) for record in records]
        records = [record for record, value in values if (value == wanted if relation == "=" else wanted in value)]
    if len(records) != 1:
        raise ValueError(f"{file} {' '.join(conditions)}: expected one record, got {len(records)}")
    return records[0]


def figure(file: str, source: str) -> float:
    """What a result file says where a figure's comment points; the conditions of the first term hold for all."""
    found = load(file)
    result, operator = 1.0, "*"
    for term in re.split(r" ([/*]) ", source):
        if term in ("/", "*"):
            operator = term
            continue
        *conditions, path = shlex.split(term)
        if conditions:
            found = _record(file, conditions)
        number = float(path if re.fullmatch(r"[\d.]+", path) else at(found, path))
        result = result / number if operator == "/" else result * number
    return result


def with_figures(text: str) -> str:
    """A page with the digits of each figure as its result file has them, as many as stand there."""

    def written(match: re.Match[str]) -> str:
        number = match["number"]
        if not number:
            if (RESULTS / f"{match['file']}.json").exists():
                raise ValueError(f"{match[0]}: expected a number before this comment, such as 0.0")
            return match[0]  # a comment for readers of the source
        value = figure(match["file"], match["source"])
        mantissa, _, exponent = number.partition("e")
        digits = len(mantissa.partition(".")[2])
        form = f".{digits}e" if exponent else f",.{digits}f" if "," in number else f".{digits}f"
        shown = re.sub(r"e([-+])0?(\d+)", lambda m: f"e{m[1].replace('+', '')}{m[2]}", f"{value:{form}}")
        return match[0].replace(number, shown, 1)

    return FIGURE.sub(written, text)


def with_block(text: str, name: str, written: str) -> str:
    """A page with this between <!-- NAME --> and <!-- /NAME -->."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed or begin in after:
        raise ValueError(f"<!-- {name} -->: expected it once in the page, and <!-- /{name} --> behind it")
    return before + begin + written + end + after


def marked(page: str, name: str) -> str:
    """The text of a page's block, with a sentence about the figures in it that are older than their sources."""
    READ.clear()
    written = BLOCKS[page, name]()
    if page.startswith("docs/measured/"):  # writers give targets as from a page of docs/
        written = re.sub(r"(\]\(|src=\")(?=\.\./|[\w-]+\.md)", r"\1../", written)
        written = written.replace("](measured/", "](")
    sentence = "" if (page, name) in TOLD else mark(READ)
    return f"{written}\n{sentence}" if sentence else written


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if a page is not what the results say")
    arguments = parser.parse_args()
    wanted = {page: page.read_text() for page in _pages()}
    try:
        for name, block in BLOCKS:
            wanted[REPOSITORY / name] = with_block(wanted[REPOSITORY / name], block, marked(name, block))
    except HistoryError as error:
        sys.exit(f"benchmarks/readme.py needs the repository with all of its commits (git fetch --unshallow): {error}")
    wanted = {page: with_figures(text) for page, text in wanted.items()}
    wanted |= {REPOSITORY / path: draw() for path, draw in PICTURES.items()}
    stale = {page: text for page, text in wanted.items() if not page.exists() or page.read_text() != text}
    pictures = outdated()
    if arguments.check and (stale or pictures):
        names = ", ".join(
            [*(str(page.relative_to(REPOSITORY)) for page in stale), *(f"{name}.png" for name in pictures)]
        )
        print(f"{names}: not what benchmarks/results says; run python benchmarks/readme.py")
        return 1
    for page, text in stale.items():
        page.write_text(text)
    redraw(pictures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
