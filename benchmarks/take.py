"""Takes what `measure.py --output FOLDER` measured, on another machine or another GPU, into benchmarks/results.

    python benchmarks/take.py FOLDER [FOLDER ...]
    python benchmarks/readme.py

Only what the folder's ledger names is taken, with the commit that it is of; all other records stay. The record here
also stays, and the program says so, where it is newer than the folder's, or where the folder's lacks a time that it
has, because a peer was not installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from records import PROGRAMS, WHOLE, Job, Program, Record, is_ledger, jobs_of, program_of, records_in
from result_files import REPOSITORY, stamped, write
from sources import History
from staleness import time_of

RESULTS = REPOSITORY / "benchmarks/results"


def finished_in(folder: Path) -> dict[str, str]:
    """When the calls in a folder finished each job, by its title."""
    ledgers = [path for path in sorted(folder.glob("*.json")) if is_ledger(path.stem)]
    calls = [call for path in ledgers for call in records_in(path) if "sources" in call]
    return {call["job"]: call["date"] for call in calls if "failed" not in call and not call.get("stopped")}


def measured_in(
    folder: Path, programs: Iterable[Program], finished: Mapping[str, str]
) -> dict[tuple[Program, str], list[Job]]:
    """The jobs of a folder that are `finished_in` it, by program and machine."""
    files = [path.stem for path in sorted(folder.glob("*.json"))]
    found = {}
    for program in programs:
        mine = [file for file in files if program_of(file) in (program, None)]
        machines = dict.fromkeys(machine for file in mine if (machine := program.machine_of(file)))
        for machine in machines:
            found[program, machine] = [job for job in jobs_of(program, machine, folder) if job.title in finished]
    return found


def missing_peers(old: Sequence[Record], new: Sequence[Record]) -> list[str]:
    """What the old records of a job have a time of, and the new ones do not: an op's peers, a configuration's times."""

    def timed(records: Sequence[Record]) -> set[str]:
        tables = [record[unit] for record in records for unit in ("us", "ms") if isinstance(record.get(unit), dict)]
        peers = {name for times in tables for name in times if times[name] is not None}
        made = [record for record in records if "config" in record]
        return peers | {f"{record['config']} ({key})" for record in made for key in record if key.endswith("_ms")}

    return sorted(timed(old) - timed(new))


def take(file: str, jobs: Sequence[Job], folder: Path, results: Path, date: str) -> None:
    """Replaces the records of a program's jobs in a result file, at their place, or adds them at the end.

    date: When the last of these jobs was measured. Some programs leave the date of their first run in a file.
    """
    source, target = folder / f"{file}.json", results / f"{file}.json"
    new, job_of = json.loads(source.read_text()), jobs[0].program.job_of
    if any(job.name == WHOLE for job in jobs):
        target.write_text(source.read_text())
        return
    old = json.loads(target.read_text()) if target.exists() else {**new, "records": []}
    fresh: dict[str, list[Record]] = {job.name: [] for job in jobs}
    for record in stamped(new):
        if job_of(record) in fresh:
            fresh[job_of(record)].append(record)
    names = set(fresh)
    kept: list[Record] = []
    for record in stamped(old):
        kept += fresh.pop(job_of(record), []) if job_of(record) in names else [record]
    for added in fresh.values():
        kept += added
    parts = {key: value for key, value in old.items() if key not in ("meta", "records")}
    write(target, {**new["meta"], "date": max(date, new["meta"].get("date", ""))}, kept, **parts)


def take_files(program: Program, machine: str, jobs: Sequence[Job], folder: Path, results: Path, date: str) -> None:
    """Takes jobs of a program in all of its result files."""
    for pattern in filter(None, (program.file, program.also)):
        file = pattern.replace("{machine}", machine)
        if (folder / f"{file}.json").exists():
            take(file, jobs, folder, results, date)


def is_of_earlier_commit(new: Job, known: Job, history: History) -> bool:
    """Whether all records are of earlier commits than those that are known here, as far as the history tells."""
    if not history.is_whole:
        return False
    order = {commit: place for place, commit in enumerate(history.commits)}  # the newest stands first
    of_new, of_known = (
        [order.get(history.named(str(commit)) or "", -1) for commit in job.commits] for job in (new, known)
    )
    return bool(of_new and of_known) and min(of_new + of_known) >= 0 and min(of_new) > max(of_known)


def why_left(new: Job, known: Job | None, history: History) -> str:
    """Why new records do not replace those that are known here; empty if they do."""
    if known is None:
        return ""
    if time_of(new, history) < time_of(known, history):
        return "the record here is newer"
    if is_of_earlier_commit(new, known, history):
        return "the record here is of a newer commit"
    missing = missing_peers(known.records, new.records)
    return f"no time of {', '.join(missing)}, which the record has here" if missing else ""


def take_all(
    folder: Path, results: Path, history: History, programs: Iterable[Program] = PROGRAMS
) -> tuple[list[Job], dict[str, str]]:
    """(the jobs that were taken, why others were left by their titles)."""
    taken: dict[tuple[Program, str], list[Job]] = {}
    left = {}
    dates = finished_in(folder)
    for (program, machine), jobs in measured_in(folder, programs, dates).items():
        known = {job.name: job for job in jobs_of(program, machine, results)}
        for job in jobs:
            if reason := why_left(job, known.get(job.name), history):
                left[job.title] = reason
            else:
                taken.setdefault((program, machine), []).append(job)
    for (program, machine), jobs in taken.items():
        take_files(program, machine, jobs, folder, results, max(dates[job.title] for job in jobs))
    return [job for jobs in taken.values() for job in jobs], left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="what measure.py --output was given")
    for folder in parser.parse_args().folders:
        taken, left = take_all(folder, RESULTS, History())
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
