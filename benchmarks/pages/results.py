"""What concerns every result file: the list of them, and the tests in short."""

from pathlib import Path

from plots import RESULTS
from records import is_ledger, program_of

from pages.marks import of_file
from pages.writing import Record, block, commits_of, device_of, load, table, text


def script_of(name: str) -> str:
    """The program that writes a result file; empty for trials that have none."""
    if is_ledger(name):
        return "benchmarks/measure.py"
    program = program_of(name)
    return program.script if program else ""


@block("docs/measured/index.md", "files")
def files() -> str:
    """Every result file: its program, device, commits and date, and how much of it is older than its sources."""

    def row(path: Path) -> Record:
        meta = load(path.stem)["meta"]
        program = script_of(path.stem)
        return {
            "name": path.name,
            "program": f"[{program}](../{program})" if program else "trials by hand",
            "device": device_of(meta),
            "torch": meta.get("torch"),
            "commits": commits_of(path.stem),
            "date": meta.get("date", "")[:10],
            "older": of_file(path.stem),
        }

    head = "| file | written by | on | torch | commits | date | older than their sources |"
    cells = "| [{name}](../benchmarks/results/{name}) | {program} | {device} | {torch} | {commits} | {date} | {older} |"
    return text(table(head, cells, map(row, sorted(RESULTS.glob("*.json")))))


@block("docs/guarantees.md", "trust")
def trust() -> str:
    """What tests found, in short."""
    runs = [load("fuzz-h200"), load("fuzz-cpu")]
    calls = ", ".join(f"{len(run['failures'])} of {run['cases']:,} on {run['meta']['device']}" for run in runs)
    tools = load("sanitize-h200")["tools"]
    faults = [process["faults"] for tool in tools.values() for process in tool.values()]
    found = "not all of them ended" if None in faults else sum(faults)
    places = {"cuda": "the CUDA build", "cpu": "the CPU build", "tools": "what is not compiled"}
    planted = {place: load(f"mutations-{name}")["records"] for name, place in places.items()}
    caught = ", ".join(
        f"{sum(bool(record['caught_by']) for record in records)} of {len(records)} in {place}"
        for place, records in planted.items()
    )
    return text(
        f"Random calls that failed: {calls}. Faults that the {len(tools)} tools of compute-sanitizer found, over every "
        f"kernel: {found}. Planted defects that the tests noticed: {caught}."
    )
