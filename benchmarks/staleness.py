"""Which measurements are older than their sources."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterable
from pathlib import Path

from records import Job, Program, is_by_hand, is_ledger, jobs_of, program_of
from sources import History, Sources

NEVER = "never measured"


def jobs_in(folder: Path) -> list[Job]:
    """The jobs of all result files of a folder, for the machines that the files name."""
    programs: dict[tuple[str, str], tuple[Program, str]] = {}
    for path in sorted(folder.glob("*.json")):
        program = program_of(path.stem)
        machine = program.machine_of(path.stem) if program else None
        if program and machine:
            programs[program.file, machine] = program, machine
    return [
        job for program, machine in programs.values() for job in jobs_of(program, machine, folder) if job.records
    ]  # fmt: skip


class Age:
    """How measurements stand to a version of the sources.

    sources: The version; None: the newest commit that a record of a folder is of.
    """

    def __init__(self, history: History, sources: Sources | None = None, folder: Path | None = None) -> None:
        self.history = history
        self.of_commit = functools.cache(lambda commit: Sources(history.tree(commit)))
        if sources is None:
            assert folder is not None
            sources = self.of_commit(self.newest(jobs_in(folder)))
        self.sources = sources

    def newest(self, jobs: Iterable[Job]) -> str:
        """The newest commit that anything is of."""
        named = {self.history.named(commit or "") for job in jobs for commit in job.commits} - {None}
        return max((commit for commit in named if commit), key=self.history.commits.__getitem__)

    def changed(self, job: Job) -> str:
        """Why a job is older than its sources; empty where none of them has changed."""
        if not job.records:
            return NEVER
        subject = job.subject
        parts = self.sources.of(subject)
        for commit in sorted(job.commits, key=str):
            name = self.history.named(commit or "")
            if name is None:
                return f"of {commit or 'a commit that its file does not name'}, which is not in the history"
            if not self.of_commit(name).unchanged(subject, parts):
                return f"its sources changed after {name[:7]}"
        return ""


def time_of(job: Job, history: History) -> float:
    """When a job's oldest record was made, or else its commit, in seconds; 0 where neither is known."""
    times = [0.0 if record.get("date") is None else seconds(record["date"]) for record in job.records]
    if history.is_whole and job.records:
        names = (history.named(record.get("commit") or "") for record in job.records)
        made = [float(history.commits[name]) if name else 0.0 for name in names]
        times = [one or other for one, other in zip(times, made)]
    return min(times, default=0.0)


def seconds(date: str) -> float:
    return datetime.datetime.fromisoformat(date).timestamp()


def is_unknown(file: str) -> bool:
    """Whether neither a program nor a trial by hand is known to have written a result file."""
    return not (is_by_hand(file) or is_ledger(file) or program_of(file))
