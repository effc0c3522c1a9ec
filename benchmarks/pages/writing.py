"""What all pages use: records of result files, tables, and the blocks that functions write."""

import functools
import string
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from plots import load

REPOSITORY = Path(__file__).resolve().parents[2]
KINDS = ("GEMM", "attention", "this package", "elementwise")  # of kernels: keys of `ms_by_kind`
Record = dict[str, Any]
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


# What draws a picture as SVG, by its path.
PICTURES: dict[str, Callable[[], str]] = {}


def picture(path: str) -> Callable[[Writer], Writer]:
    """Makes a function the one that draws the picture of this path."""

    def register(writer: Writer) -> Writer:
        PICTURES[path] = writer
        return writer

    return register


def records_of(file: str, **values: Any) -> list[Record]:
    """The records of a result file that have these values."""
    return [record for record in load(file)["records"] if values.items() <= record.items()]


def commits_of(file: str) -> str:
    """The commits of the kernels that a result file's records were measured with, in seven digits."""
    result = load(file)
    of_file = result["meta"].get("commit")
    commits = [record.get("commit", of_file) for record in result.get("records", [])]
    return ", ".join(dict.fromkeys(commit[:7] for commit in commits or [of_file] if commit))


def device_of(meta: Record) -> str:
    """What a result was measured on, with the number of GPUs where there were several."""
    return f"{meta['devices']} {meta['device']}" if meta.get("devices", 1) > 1 else meta["device"]


def at(content: Any, path: str) -> Any:
    """What a path such as `ms.ours` or `prompts.1` leads to."""
    for key in path.split("."):
        content = content[int(key)] if isinstance(content, list) else content[key]
    return content


class _Cells(string.Formatter):
    """Fills in {ms.ours:.1f}, a path; {ms.cudnn/ms.ours:.2f}, a ratio; {error?:.2e}, empty where a row lacks it."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        try:
            value, *divisor = (at(kwargs, path) for path in field_name.removesuffix("?").split("/"))
        except KeyError:
            if not field_name.endswith("?"):
                raise
            return None, field_name
        return value / divisor[0] if divisor and value is not None else value, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        return "" if value is None else super().format_field(value, format_spec)


def table(head: str, row: str, records: Iterable[Record], **cells: Callable[[Any], Any]) -> str:
    """A table with a row for each record.

    row: What stands in a row, with fields of the record in braces (_Cells). cells: More fields, made from the record.
    """
    if head.count("|") != row.count("|"):
        raise ValueError(f"{row}: expected a cell for each column of {head}")
    made = ({**record, **{name: cell(record) for name, cell in cells.items()}} for record in records)
    return grid(head, (_Cells().vformat(row, (), fields) for fields in made))


def grid(head: str, rows: Iterable[str | Sequence[str]]) -> str:
    """A table of these rows, or rows of cells."""
    lines = [row if isinstance(row, str) else f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *lines])


def across(cell: str, names: Iterable[str]) -> str:
    """The same cell in several columns, with their names in the place of @."""
    return " | ".join(cell.replace("@", name) for name in names)


def table_of_kinds(
    head: str, row: str, records: Iterable[Record], kinds: Sequence[str] = KINDS, **cells: Callable[[Any], Any]
) -> str:
    """A table of profiled records that ends with their milliseconds in these kinds of kernels."""

    def ms(record: Record) -> dict[str, float]:
        return {kind: record["ms_by_kind"][kind] for kind in kinds if kind in record["ms_by_kind"]}

    head, row = f"{head} {across('@', kinds)} |", f"{row} {across('{ms.@?:.1f}', kinds)} |"
    return table(head, row, records, ms=ms, **cells)


def sizes(record: Record) -> str:
    return "x".join(map(str, record["shape"]))


def between(values: Iterable[float]) -> str:
    """The range of some factors; one figure where they are alike."""
    ordered = sorted(values)
    return " to ".join(dict.fromkeys(f"{value:.2f}" for value in (ordered[0], ordered[-1])))


def link(file: str) -> str:
    """A result file, for a page of docs/."""
    return f"[{file}.json](../benchmarks/results/{file}.json)"


def titled(title: str, table: str) -> str:
    """A table after its title; nothing if the table has no rows."""
    return f"{title}\n\n{table}" if table.count("\n") > 1 else ""


def text(*parts: str) -> str:
    """Paragraphs and tables, with an empty line between them; empty parts are left out."""
    return "\n\n".join(filter(None, parts)) + "\n"
