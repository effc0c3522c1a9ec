"""What the programs that time models share: their common options, what a run begins with, and how its table looks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from result_files import DTYPES, common_meta, load_package, result_file
from rich.console import Console
from rich.table import Table


def add_options(parser: argparse.ArgumentParser, about: str, tiny: str = "") -> None:
    """--dtype, --device and --output of a program that writes <gpu>-ABOUT.json; --tiny, where `tiny` describes it."""
    if tiny:
        parser.add_argument("--tiny", action="store_true", help=f"{tiny}, to try the script")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help=f"JSON (default: benchmarks/results/<gpu>-{about}.json)")


def make_console(quiet: bool = False) -> Console:
    return Console(width=None if sys.stdout.isatty() else 150, quiet=quiet)


def begin(about: str, options: argparse.Namespace, **facts: Any) -> tuple[ModuleType, Path, dict[str, Any], Console]:
    """(the package, the result file, its `meta`, which ends with `facts`, the console)."""
    ltx, metadata = load_package()
    meta = {**common_meta(metadata, options.device), **facts}
    return ltx, options.output or result_file(about, options.device), meta, make_console()


def empty_table(title: str, texts: Iterable[str], numbers: Iterable[str]) -> Table:
    """A table without rows: columns of texts, then columns of numbers."""
    table = Table(title=title)
    for column in texts:
        table.add_column(column)
    for column in numbers:
        table.add_column(column, justify="right")
    return table
