"""Writes the notebooks from their sources, notebooks/*.py, and runs them:

    python notebooks/make.py               # write what has changed; outputs of unchanged notebooks stay
    python notebooks/make.py --check       # fail if a notebook is not what its source says
    python notebooks/make.py --execute     # run all on this machine, and store the outputs (needs a GPU)
    python notebooks/make.py --execute --only beginner

The sources are Python with a line `# %%` before each cell (jupytext's percent format), and run as scripts too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat

NOTEBOOKS = Path(__file__).resolve().parent
NOT_RUN = "*The outputs of a GPU are not stored yet. `make notebooks` on a machine with a GPU makes them.*"
HOW_TO_OPEN = (
    "To run it yourself: in a clone of the repository `make demo` makes an environment and a build for this machine. "
    "Then choose `.venv` as the kernel in an editor, or `.venv/bin/pip install jupyterlab` and "
    "`.venv/bin/jupyter lab notebooks`."
)
OFFLINE = (
    "The machine that made the outputs had no network, so that the cell on the Hub names this package's build. With a "
    "network it prints `fetched`, and the kernel of kernels-community takes part in the race."
)


def sources() -> list[Path]:
    return sorted(path for path in NOTEBOOKS.glob("*.py") if path != Path(__file__).resolve())


def notebook_of(source: Path, note: str = NOT_RUN) -> Any:
    """The source as a notebook without outputs, with a note below its title: where it ran, and how to open it."""
    notebook = jupytext.read(source)
    notebook.cells.insert(1, nbformat.v4.new_markdown_cell(f"{note}\n\n{HOW_TO_OPEN}"))
    for number, cell in enumerate(notebook.cells):
        cell.id = f"{source.stem}-{number}"
    notebook.metadata = nbformat.from_dict({
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    })  # fmt: skip
    return notebook


def same_cells(stored: Any, wanted: Any) -> bool:
    """Whether two notebooks have the same cells, but for their outputs and the note."""
    cells = [[(cell.cell_type, cell.source) for cell in book.cells] for book in (stored, wanted)]
    return [*cells[0][:1], *cells[0][2:]] == [*cells[1][:1], *cells[1][2:]]


def is_current(source: Path) -> bool:
    path = source.with_suffix(".ipynb")
    return path.exists() and same_cells(nbformat.read(path, as_version=4), notebook_of(source))


def outputs_of(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def tidy(notebook: Any) -> None:
    """Drops warnings of libraries, and what names this machine's folders."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    for output in outputs_of(notebook):
        text = output.get("data", {}).get("text/plain")
        if text is not None:
            output.data["text/plain"] = text.replace(f"{NOTEBOOKS.parent}/", "")


def execute(source: Path, short: bool) -> Any:
    """The notebook with its outputs. `short`: few and small sizes."""
    import torch
    from nbclient import NotebookClient

    sys.path.insert(0, str(NOTEBOOKS.parent / "benchmarks"))
    from result_files import common_meta, load_package

    facts = common_meta(load_package()[1], "cuda" if torch.cuda.is_available() else "cpu")
    commit = (facts["commit"] or "unknown")[:7]
    note = f"*The outputs are of {facts['device']}, torch {facts['torch']}, commit {commit}, {facts['date'][:10]}.*"
    notebook = notebook_of(source, note)
    if short:
        for cell in notebook.cells:
            if "parameters" in cell.metadata.get("tags", ()):
                cell.source = "SHORT = True"
    NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
    if any("going on with this package's build" in output.get("text", "") for output in outputs_of(notebook)):
        notebook.cells[1].source += f" {OFFLINE}"
    tidy(notebook)
    return notebook


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="fail if a notebook is not what its source says")
    action.add_argument("--execute", action="store_true", help="run the notebooks and store their outputs")
    parser.add_argument("--short", action="store_true", help="with --execute: few and small sizes, also without a GPU")
    names = [source.stem for source in sources()]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these notebooks (default: all)")
    parser.add_argument("--output", type=Path, default=NOTEBOOKS, metavar="DIR", help="(default: notebooks)")
    options = parser.parse_args(arguments)
    if options.execute and not options.short:
        import torch

        if not torch.cuda.is_available():
            parser.error("argument --execute: expected a GPU, got none: times on a CPU say nothing about the kernels")
    if options.short and options.output == NOTEBOOKS:
        parser.error("argument --short: expected an --output of its own: the short form is not stored")
    chosen = [source for source in sources() if source.stem in options.only]
    stale = [source for source in chosen if not is_current(source)]
    if options.check:
        for source in stale:
            print(f"{source.with_suffix('.ipynb').name}: not what {source.name} says: run python notebooks/make.py")
        return 1 if stale else 0
    try:  # before the notebooks run, which takes minutes
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --output: {error}")
    for source in chosen if options.execute else stale:
        notebook = execute(source, options.short) if options.execute else notebook_of(source)
        path = options.output / source.with_suffix(".ipynb").name
        nbformat.write(notebook, path)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
