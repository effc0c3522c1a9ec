"""What all pages use: records of result files, cells, tables, and the blocks that functions write."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from plots import load

REPOSITORY = Path(__file__).resolve().parents[2]
Record = dict[str, Any]
Cell = Callable[[Any], str]  # makes a row's cell from what the row shows
Column = tuple[str, Cell]  # the head, and what makes the cells
Writer = TypeVar("Writer", bound=Callable[..., str])

# What writes the text between <!-- NAME --> and <!-- /NAME -->, by page and NAME.
BLOCKS: dict[tuple[str, str], Callable[[], str]] = {}


def block(page: str, name: str, **arguments: Any) -> Callable[[Writer], Writer]:
    """Makes a function the writer of a page's block; it is called with these arguments."""

    def register(writer: Writer) -> Writer:
        if (page, name) in BLOCKS:
            raise ValueError(f"{page}: expected one writer of <!-- {name} -->, got two")
        BLOCKS[page, name] = functools.partial(writer, **arguments)
        return writer

    return register


# ---- Results


def records_of(file: str, **values: Any) -> list[Record]:
    """The records of a result file that have these values."""
    return [record for record in load(file)["records"] if values.items() <= record.items()]


def at(content: Any, path: str) -> Any:
    """What a path such as `ms.ours` or `prompts.1` leads to."""
    for key in path.split("."):
        content = content[int(key)] if isinstance(content, list) else content[key]
    return content


# ---- Cells


def formed(value: Any, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def number(path: str, form: str, unit: str = "") -> Cell:
    """A cell with one number of a record."""
    return lambda record: formed(at(record, path), form, unit)


def optional(path: str, form: str, unit: str = "") -> Cell:
    """The same, empty where a record does not have the number."""

    def cell(record: Record) -> str:
        try:
            return formed(at(record, path), form, unit)
        except KeyError:
            return ""

    return cell


def ratio(numerator: str, denominator: str, unit: str = "") -> Cell:
    """A cell with one number of a record over another."""
    return lambda record: f"{at(record, numerator) / at(record, denominator):.2f}{unit}"


def kinds_of_kernels(*names: str) -> list[Column]:
    """The milliseconds of a profiled record in these kinds of kernels."""
    return [(name, lambda record, name=name: f"{record['ms_by_kind'].get(name, 0.0):.1f}") for name in names]


def sizes(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))


def link(file: str) -> str:
    """A result file, for a page of docs/."""
    return f"[{file}.json](../benchmarks/results/{file}.json)"


# ---- Text


def grid(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of these cells."""
    head = "".join(f" {head} |" if head else " |" for head in heads)
    return "\n".join([f"|{head}", "|---" * len(heads) + "|", *(f"| {' | '.join(row)} |" for row in rows)])


def table(columns: Sequence[Column], rows: Iterable[Any]) -> str:
    """A table that shows one thing a row, by what each column makes of it."""
    return grid([head for head, _ in columns], [[cell(row) for _, cell in columns] for row in rows])


def text(*parts: str) -> str:
    """Paragraphs and tables, with an empty line between them; empty parts are left out."""
    return "\n\n".join(filter(None, parts)) + "\n"
