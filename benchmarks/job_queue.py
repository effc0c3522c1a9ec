"""What measure.py measures: the jobs of a machine, which of them wait, and the calls of their programs."""

from __future__ import annotations

import contextlib
import datetime
import json
import operator
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from records import LEDGER, PROGRAMS, Job, Program, Record, jobs_of, records_in
from result_files import stamped, write
from sharing import VARIABLE, Lock
from sources import History, Sources, digest, working_tree
from staleness import NEVER, Age, time_of

POLL_S = 0.2
TOGETHER = 160  # jobs of one process at most: what it compiles ahead is lost if the process is stopped
TAIL = 12  # the last lines of a program that are printed where it failed or was stopped
MARGIN = 1.2  # a call that was stopped after so many seconds needs more: how much more is a guess


@dataclass
class Waiting:
    """A job that is to be measured."""

    job: Job
    reason: str
    seconds: float | None  # how long it takes, as far as that is known
    failed: str = ""  # how its last call failed


class Queue:
    """The jobs of one machine.

    root: The repository.
    results: Where the result files are.
    output: Where new ones are written; a file that is there is newer than that in `results`.
    share: (i, n): The i-th of n calls that divide the jobs among them.
    """

    def __init__(
        self,
        root: Path,
        results: Path,
        output: Path,
        machines: Sequence[str],
        like: str = "",
        programs: Sequence[Program] = PROGRAMS,
        share: tuple[int, int] = (1, 1),
    ) -> None:
        self.share = share
        self.root, self.machines, self.like, self.programs = root, machines, like, programs
        self.history = History(root)
        self.sources = Sources(working_tree(root))
        self.age = Age(self.history, self.sources)
        self.lock: Lock | None = None  # by which the programs share the GPU
        self.prefix: list[str] = []  # what the programs are called with, such as taskset
        self.stop = threading.Event()  # ends the program that runs
        self.write_to(output, results)

    def write_to(self, output: Path, results: Path) -> None:
        """Writes to this folder from now on. It gets the result files that it lacks from `results`."""
        output.mkdir(parents=True, exist_ok=True)
        if output.resolve() != results.resolve():
            for path in results.glob("*.json"):
                if not (output / path.name).exists():
                    (output / path.name).write_bytes(path.read_bytes())
        self.output = output
        self.ledger_path = output / f"{LEDGER.replace('{machine}', self.machines[0])}.json"
        self.calls = {record["job"]: record for record in records_in(self.ledger_path)}

    def jobs(self, only: Sequence[str] = ("",)) -> list[Job]:
        """The jobs of this share whose titles have one of the parts in `only`; a whole title names that job alone."""
        found = []
        for machine in self.machines:
            for program in self.programs:
                found += jobs_of(program, machine, self.output, self.like)
        number, of = self.share
        mine = {job.title for job in sorted(found, key=lambda job: job.title)[number - 1 :: of]}
        titles = {job.title for job in found}
        chosen = {title for part in only for title in titles if (title == part if part in titles else part in title)}
        return [job for job in found if job.title in mine & chosen]

    def reason(self, job: Job) -> str:
        """Why a job is to be measured; empty where it is up to date."""
        if not job.records:
            return NEVER
        if job.lacking:
            return f"no record of {', '.join(job.lacking)}"
        call = self.calls.get(job.title, {})
        if "sources" in call and job.commits == {call["commit"]}:
            if call["sources"] == digest(self.sources.of(job.subject)):
                return ""
            if not self.history.is_whole:
                return f"its sources changed after {str(call['commit'])[:7]}"
        if not self.history.is_whole:
            return "not measured by this command, and the repository's history is not here"
        return self.age.changed(job)

    def estimate(self, job: Job) -> float | None:
        """The seconds that a job, or jobs of its program, took. A stopped call counts as longer than it ran."""
        call = self.calls.get(job.title, {})
        if "seconds" in call:
            return float(call["seconds"]) * (MARGIN if call.get("stopped") else 1.0)
        alike = [
            float(one["seconds"])
            for title, one in self.calls.items()
            if title.split(":")[0] == job.program.about and "seconds" in one and not one.get("stopped")
        ]
        return statistics.median(alike) if alike else None

    def waiting(self, only: Sequence[str] = ("",)) -> list[Waiting]:
        """What is to be measured: what never was, then the oldest first; what failed last time comes at the end."""
        found = [(job, self.reason(job)) for job in self.jobs(only)]
        listed = [
            Waiting(job, reason, self.estimate(job), self.calls.get(job.title, {}).get("failed", ""))
            for job, reason in found
            if reason
        ]
        times = {id(one): time_of(one.job, self.history) for one in listed}

        def order(one: Waiting) -> tuple[bool, bool, float, float]:
            stopped = bool(self.calls.get(one.job.title, {}).get("stopped"))
            return bool(one.failed) or stopped, bool(one.job.records), times[id(one)], one.seconds or 0.0

        return sorted(listed, key=order)

    def note(self, job: Job, **facts: Any) -> None:
        """Writes what is known of a job's last call."""
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        kept = {key: value for key, value in self.calls.get(job.title, {}).items() if key not in ("failed", "stopped")}
        self.keep({**kept, "job": job.title, **facts, "date": now})

    def keep(self, call: Record) -> None:
        """Writes a job's line into the ledger."""
        self.calls[call["job"]] = call
        write(self.ledger_path, {"device": self.machines[0], "date": call["date"]}, list(self.calls.values()))

    def run(self, batch: Sequence[Job], limit: float) -> tuple[set[str], dict[str, str]]:
        """Measures jobs of one program in one process: (the titles of those that it did, why one of them failed)."""
        first, program = batch[0], batch[0].program
        target = self.output / f"{first.file}.json"
        with tempfile.TemporaryDirectory() as folder:
            written = target if program.in_place else Path(folder) / target.name
            command = [*self.prefix, *command_of(batch, self.root, self.output if program.folder else written)]
            variables = {**os.environ, "PYTHONUNBUFFERED": "1"}  # what a program printed stays if it is stopped
            if self.lock and program.shares:
                variables[VARIABLE] = str(self.lock.path)
            log = Path(folder) / "log"
            with log.open("wb") as file:
                process = subprocess.Popen(
                    command, stdout=file, stderr=file, cwd=self.root, env=variables, start_new_session=True
                )
            before = {job.title: self.texts(job) for job in batch}
            looked: list[int] = []  # when the files were written that were looked at last
            done: set[str] = set()
            start = last = time.monotonic()

            def is_new(job: Job) -> bool:
                """Whether a job's records have changed. A program with two files writes them one after the other."""
                texts = self.texts(job)
                return bool(texts) and not any(map(operator.eq, texts, before[job.title]))

            def look(ended: bool = False) -> None:
                nonlocal last, looked
                written_at = [path.stat().st_mtime_ns for path in self.paths(first) if path.exists()]
                if written_at == looked and not ended:  # to read the files takes time from what is measured
                    return
                looked = written_at
                new = [job for job in batch if is_new(job)]
                for job in new if by_steps else batch:
                    is_whole = job is not new[-1] if program.in_parts else not self.lost(job, before[job.title])
                    if job.title in done or not self.texts(job) or not (ended or is_whole):
                        continue
                    done.add(job.title)
                    now = time.monotonic()
                    self.finish(job, now - last)
                    last = now

            # A program that writes a file at once, or goes on where it stopped, has measured it when it has ended.
            by_steps = program.in_place and program.name_of is not None
            stopped = True
            try:
                while process.poll() is None and time.monotonic() - start < limit and not self.stop.is_set():
                    time.sleep(POLL_S)
                    if by_steps:
                        look()
                stopped = process.poll() is None
            finally:  # it has a session of its own, in which what it has started may still run
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
            if status == 0 and not program.in_place and written.exists():
                shutil.copyfile(written, target)
            if by_steps or status == 0:
                look(ended=status == 0)
            for job in batch if by_steps else ():
                if job.title not in done and is_new(job):  # what it has written of a job is not all of it
                    self.put_back(job, before[job.title])
            missing = next((job for job in batch if job.title not in done), None)
            lines = log.read_text(errors="replace").strip().splitlines()
            last_line = lines[-1].strip()[:300] if lines else "no output"
            # A program may have gone on with its other jobs.
            failures = [line for line in lines[:-TAIL] if " failed: " in line]
            end = "".join(f"\n    {line}" for line in [*failures[-TAIL:], *lines[-TAIL:]])
            if missing is None:
                if status and not stopped:  # such as a planted defect that no test noticed
                    print(f"{batch[-1].title}: measured, with status {status}: {last_line}{end}", flush=True)
                return done, {}
            if stopped:
                seconds = time.monotonic() - last
                least = float(self.calls.get(missing.title, {}).get("seconds", 0.0))
                self.note(missing, seconds=max(least, round(seconds, 1)), stopped=True)
                print(f"{missing.title}: stopped after {seconds:.0f} s{end}", flush=True)
                return done, {}
            reason = f"status {status}: {last_line}" if status else f"no record of it was written: {last_line}"
            self.note(missing, failed=reason)
            print(f"{missing.title}: failed, {reason}{end}", flush=True)
            return done, {missing.title: reason}

    def gpu_for(self, program: Program) -> contextlib.AbstractContextManager[None]:
        """What a program runs in: it has the GPU to itself, or takes it by itself."""
        return self.lock.held() if self.lock and not program.shares else contextlib.nullcontext()

    def paths(self, job: Job) -> list[Path]:
        """The files that have a job's records."""
        files = filter(None, (job.program.file, job.program.also))
        return [self.output / f"{file.replace('{machine}', job.machine)}.json" for file in files]

    def texts(self, job: Job) -> list[str]:
        """The records of a job as they stand in its files; nothing where one has none."""
        found = []
        for path in self.paths(job):
            found.append(json.dumps([one for one in records_in(path) if job.program.job_of(one) == job.name]))
        return [] if "[]" in found else found

    def lost(self, job: Job, before: Sequence[str]) -> list[str]:
        """The configurations that a job's call measures and that have no new record in its file."""
        old, new = ([one for text in texts[:1] for one in json.loads(text)] for texts in (before, self.texts(job)))
        known = {record.get("config") for record in new if record not in old}
        return [config for config in job.configs if config not in known]

    def put_back(self, job: Job, texts: Sequence[str]) -> None:
        """Replaces the records of a job in its files by those that stood there before."""
        for place, path in enumerate(path for path in self.paths(job) if path.exists()):
            result = json.loads(path.read_text())
            others = [record for record in stamped(result) if job.program.job_of(record) != job.name]
            parts = {key: value for key, value in result.items() if key not in ("meta", "records")}
            write(path, result["meta"], [*others, *(json.loads(texts[place]) if texts else [])], **parts)

    def finish(self, job: Job, seconds: float) -> None:
        commits = {record.get("commit") for text in self.texts(job) for record in json.loads(text)}
        sources = digest(self.sources.of(job.subject))
        self.note(job, seconds=round(seconds, 1), commit=next(iter(commits)), sources=sources)
        print(f"{job.title}: {seconds:.0f} s", flush=True)


def command_of(batch: Sequence[Job], root: Path, output: Path) -> list[str]:
    """The call that measures these jobs."""
    first, program = batch[0], batch[0].program
    values = [program.value_of(job.name) for job in batch]
    command = [sys.executable, str(root / program.script), "--output", str(output), *first.options]
    return [*command, program.flag, *values] if program.flag else command


def next_batch(waiting: Sequence[Waiting], limit: float) -> list[Job]:
    """The first job for which there is time, and those that the same process can measure after it."""
    fitting = [one for one in waiting if one.seconds is None or one.seconds <= limit]
    if not fitting:
        return []
    first = fitting[0]
    batch, total = [first.job], first.seconds or 0.0
    for one in fitting[1:] if first.job.program.flag else ():
        same = (one.job.program, one.job.machine, one.job.options) == (
            first.job.program,
            first.job.machine,
            first.job.options,
        )
        if len(batch) < TOGETHER and same and not one.failed and total + (one.seconds or 0.0) <= limit:
            batch.append(one.job)
            total += one.seconds or 0.0
    return batch
