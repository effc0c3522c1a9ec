#!/usr/bin/env python3
"""Write the project of references/kernel-templates.md into a new folder: seven kernels, binding, package, build.toml.

    python new_project.py my-kernels

The folder's name is the project's: lowercase letters, digits and -. Build it with `python build.py --project my-kernels
--this-machine`, build.py beside this file, or with Nix and kernel-builder. Then take out what you do not need: a kernel
is its file, its lines in kernels.h and in build.toml, and, where it is bound, its schema and its function.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

PAGE = Path(__file__).absolute().parents[1] / "references" / "kernel-templates.md"


def project() -> dict[str, str]:
    """The files of the page by their paths: the first line of each block names its own."""
    blocks = re.findall(r"^```\w+\n(?://|#) file: (\S+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return dict(blocks)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the project; it must be empty, or not there")
    return parser


def main() -> int:
    parser = make_parser()
    folder = parser.parse_args().folder
    name = folder.resolve().name
    if not re.fullmatch("[a-z][a-z0-9-]*[a-z0-9]", name):
        parser.error(f"argument folder: expected a name of lowercase letters, digits and -, got {name}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        parser.error(f"argument folder: expected a new or an empty folder, got {folder}")
    renamed = {"my-kernels": name, "my_kernels": name.replace("-", "_")}
    for file, text in project().items():
        for old, new in renamed.items():
            file, text = file.replace(old, new), text.replace(old, new)
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
