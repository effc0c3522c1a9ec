"""Takes what `measure.py --output FOLDER` measured, on another machine or another GPU, into benchmarks/results.

    python benchmarks/take.py FOLDER [FOLDER ...]
    python benchmarks/readme.py

Only what the folder's ledger names is taken, with the commit that it is of; all other records stay. A new record that
lacks the time of a peer which the old one has, because the peer was not installed, is left and named.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from records import PROGRAMS, WHOLE, Job, Program, Record, is_ledger, jobs_of, program_of, records_in
from result_files import REPOSITORY, write

RESULTS = REPOSITORY / "benchmarks/results"


def measured_in(folder: Path, programs: Iterable[Program]) -> list[Job]:
    """The jobs that calls in a folder have finished."""
    ledgers = [path for path in sorted(folder.glob("*.json")) if is_ledger(path.stem)]
    finished = {call["job"] for path in ledgers for call in records_in(path) if "sources" in call}
    files = [path.stem for path in sorted(folder.glob("*.json"))]
    found = []
    for program in programs:
        mine = [file for file in files if program_of(file) in (program, None)]
        machines = dict.fromkeys(machine for file in mine if (machine := program.machine_of(file)))
        found += [job for machine in machines for job in jobs_of(program, machine, folder) if job.title in finished]
    return found


def missing_peers(old: Sequence[Record], new: Sequence[Record]) -> list[str]:
    """What the old records of a job have a time for, and the new ones do not."""

    def timed(records: Sequence[Record]) -> set[str]:
        return {name for record in records for name, us in record.get("us", {}).items() if us is not None}

    return sorted(timed(old) - timed(new))


def stamped(result: dict[str, Any]) -> list[Record]:
    """The records of a result file, each with the commit and the date of its run."""
    run = {key: result["meta"][key] for key in ("commit", "date") if key in result["meta"]}
    return [record if "commit" in record else {**run, **record} for record in result["records"]]


def take(job: Job, file: str, folder: Path, results: Path) -> None:
    """Replaces the records of a job in a result file, at their place, or adds them at the end."""
    source, target = folder / f"{file}.json", results / f"{file}.json"
    new = json.loads(source.read_text())
    if job.name == WHOLE or not target.exists():
        target.write_text(source.read_text())
        return
    old = json.loads(target.read_text())
    fresh = [record for record in stamped(new) if job.program.job_of(record) == job.name]
    kept: list[Record] = []
    for record in stamped(old):
        if job.program.job_of(record) != job.name:
            kept.append(record)
        elif fresh:
            kept += fresh
            fresh = []
    parts = {key: value for key, value in old.items() if key not in ("meta", "records")}
    write(target, new["meta"], [*kept, *fresh], **parts)


def take_all(folder: Path, results: Path, programs: Iterable[Program] = PROGRAMS) -> tuple[list[Job], dict[str, str]]:
    """(the jobs that were taken, why others were left by their titles)."""
    taken, left = [], {}
    for job in measured_in(folder, programs):
        known = {one.name: one for one in jobs_of(job.program, job.machine, results)}
        missing = missing_peers(known[job.name].records, job.records) if job.name in known else []
        if missing:
            left[job.title] = f"no time of {', '.join(missing)}, which the record has here"
            continue
        for pattern in filter(None, (job.program.file, job.program.also)):
            file = pattern.replace("{machine}", job.machine)
            if (folder / f"{file}.json").exists():
                take(job, file, folder, results)
        taken.append(job)
    return taken, left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="what measure.py --output was given")
    for folder in parser.parse_args().folders:
        taken, left = take_all(folder, RESULTS)
        if not taken and not left:
            sys.exit(
                f"{folder}: expected a ledger and result files of `python benchmarks/measure.py --output {folder}`"
            )
        for title, reason in left.items():
            print(f"left: {title}: {reason}")
        print(f"{len(taken)} measurements taken from {folder}, {len(left)} left; now run python benchmarks/readme.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
