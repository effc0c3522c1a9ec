"""This package's own programs, for the scripts beside this file.

`examples` and `benchmarks` beside this file are links to the repository's directories. A copy of the skill made with
`cp -rL` has the programs themselves in their place. Only the standard library is imported, so that `--help` answers at
once. The build that the programs load is the one that LOCAL_KERNELS names, in a checkout build/ unless it is set.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

SCRIPTS = Path(__file__).absolute().parent


def add_programs() -> None:
    """Let the modules of examples/ and benchmarks/ be imported."""
    for name in ("benchmarks", "examples"):
        folder = (SCRIPTS / name).resolve()
        if not folder.is_dir():
            sys.exit(f"error: {SCRIPTS / name}: expected a directory, got none: install the skill with `cp -rL`")
        sys.path.insert(0, str(folder))


def asks_for_help() -> bool:
    return bool({"-h", "--help"} & set(sys.argv[1:]))


def run_example(name: str, defaults: Sequence[str], about: str | None) -> None:
    """Run a program of examples/ under this script's name, with `defaults` before the arguments that were given.

    With --help, `about` is printed before the program's own help.
    """
    if asks_for_help():
        print(f"{about}\nWhat follows is the help of examples/{name}, which this script runs.\n", flush=True)
    sys.argv[1:] = [*defaults, *sys.argv[1:]]
    program = (SCRIPTS / "examples" / name).resolve()
    code = compile(program.read_text(), str(program), "exec", dont_inherit=True)
    exec(code, {"__name__": "__main__", "__file__": str(program)})  # unlike runpy it leaves sys.argv[0] alone
