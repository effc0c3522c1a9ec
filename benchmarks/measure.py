"""Measures again what is older than its sources, the oldest first, and says what is left.

    python benchmarks/measure.py --list                   # this machine's records, and why each would be measured
    python benchmarks/measure.py --list --machine h200    # another machine's
    python tools/build.py && python benchmarks/measure.py --seconds 560
    python benchmarks/measure.py --like h200              # what an H200's files have, on this machine

benchmarks/records.py knows which program makes each record, and benchmarks/sources.py what the record depends on. A
record is measured again if one of its sources has changed since its commit, or if it has none yet: records of new cases
come first, then the oldest. One process measures several where the program can. What has been measured is in the file
at once, so that a call that ends early, or is killed, loses one record at most, and the next call goes on from there. A
program that fails does not stop the others, and is tried last in the next call. The last lines of one that failed or
was stopped are printed.

`<machine>-queue.json` has a line for each call: its seconds, which the estimates come from, and the digest of the
sources that it measured. Without the history of the repository, as on a machine that got a copy of the files, this
digest alone tells what is up to date. `--output DIR` writes everything to a folder and reads there what earlier calls
wrote; benchmarks/take.py brings it back. Several GPUs of a host share the work, each with a call and a folder of its
own:

    CUDA_VISIBLE_DEVICES=0 taskset -c 0-15 python benchmarks/measure.py --share 1/2 --output first &
    CUDA_VISIBLE_DEVICES=1 taskset -c 16-31 python benchmarks/measure.py --share 2/2 --output second; wait
    python benchmarks/take.py first second

Most of the time of whole models is torch.compile's, which leaves the GPU idle. Calls on one GPU with the same --lock
compile side by side, and only one of them uses the GPU at a time (benchmarks/sharing.py). Their models have to fit into
its memory together. The first steps of compiled configurations, which then waited for others, are not written:

    taskset -c 0-7 python benchmarks/measure.py --share 1/2 --lock gpu.lock --output first &
    taskset -c 8-15 python benchmarks/measure.py --share 2/2 --lock gpu.lock --output second; wait
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import operator
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from records import LEDGER, PROGRAMS, Job, Program, jobs_of, records_in
from result_files import REPOSITORY, slug_of, write
from sharing import VARIABLE, Lock
from sources import History, Sources, digest, working_tree
from staleness import NEVER, Age, time_of

POLL_S = 0.2
TOGETHER = 160  # jobs of one process at most: what it compiles ahead is lost if the process is stopped
TAIL = 12  # the last lines of a program that are printed where it failed or was stopped
MARGIN = 1.2  # a call that was stopped after so many seconds needs more: how much more is a guess
RESULTS = REPOSITORY / "benchmarks/results"


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
    lock: The file by which calls share the GPU (sharing.py).
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
        lock: Path | None = None,
    ) -> None:
        self.share, self.lock = share, Lock(lock) if lock else None
        self.root, self.output, self.machines, self.like, self.programs = root, output, machines, like, programs
        output.mkdir(parents=True, exist_ok=True)
        if output.resolve() != results.resolve():
            for path in results.glob("*.json"):
                if not (output / path.name).exists():
                    (output / path.name).write_bytes(path.read_bytes())
        self.history = History(root)
        self.sources = Sources(working_tree(root))
        self.age = Age(self.history, self.sources)
        self.ledger_path = output / f"{LEDGER.replace('{machine}', machines[0])}.json"
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
        self.calls[job.title] = {**kept, "job": job.title, **facts, "date": now}
        write(self.ledger_path, {"device": self.machines[0], "date": now}, list(self.calls.values()))

    def run(self, batch: Sequence[Job], limit: float) -> tuple[set[str], dict[str, str]]:
        """Measures jobs of one program in one process: (the titles of those that it did, why one of them failed)."""
        first, program = batch[0], batch[0].program
        target = self.output / f"{first.file}.json"
        with tempfile.TemporaryDirectory() as folder:
            written = target if program.in_place else Path(folder) / target.name
            command = command_of(batch, self.root, self.output if program.folder else written)
            variables = {**os.environ, "PYTHONUNBUFFERED": "1"}  # what a program printed stays if it is stopped
            if self.lock and program.shares:
                variables[VARIABLE] = str(self.lock.path)
            log = Path(folder) / "log"
            with log.open("wb") as file:
                process = subprocess.Popen(
                    command, stdout=file, stderr=file, cwd=self.root, env=variables, start_new_session=True
                )
            before = {job.title: self.texts(job) for job in batch}
            done: set[str] = set()
            start = last = time.monotonic()

            def look(ended: bool = False) -> None:
                nonlocal last
                for job in batch:
                    texts = self.texts(job)
                    # A program with two files writes them one after the other.
                    is_old = any(map(operator.eq, texts, before[job.title]))
                    if job.title in done or not texts or (is_old and (by_steps or not ended)):
                        continue
                    done.add(job.title)
                    now = time.monotonic()
                    self.finish(job, now - last)
                    last = now

            # A program that writes a file at once, or goes on where it stopped, has measured it when it has ended.
            by_steps = program.in_place and program.name_of is not None
            stopped = True
            try:
                while process.poll() is None and time.monotonic() - start < limit:
                    time.sleep(POLL_S)
                    if by_steps:
                        look()
                stopped = process.poll() is None
            finally:  # it has a session of its own, which an interrupted call would leave running
                if stopped:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
            if status == 0 and not program.in_place and written.exists():
                shutil.copyfile(written, target)
            if by_steps or status == 0:
                look(ended=status == 0)
            missing = next((job for job in batch if job.title not in done), None)
            lines = log.read_text(errors="replace").strip().splitlines()
            last_line = lines[-1].strip()[:300] if lines else "no output"
            failures = [line for line in lines[:-TAIL] if " failed: " in line]  # a program goes on with its other jobs
            end = "".join(f"\n    {line}" for line in [*failures[-TAIL:], *lines[-TAIL:]])
            if missing is None:
                if status and not stopped:  # such as a planted defect that no test noticed
                    print(f"{batch[-1].title}: measured, with status {status}: {last_line}{end}", flush=True)
                return done, {}
            if stopped:
                seconds = time.monotonic() - last
                self.note(missing, seconds=round(seconds, 1), stopped=True)
                print(f"{missing.title}: stopped after {seconds:.0f} s{end}", flush=True)
                return done, {}
            reason = f"status {status}: {last_line}" if status else f"no record of it was written: {last_line}"
            self.note(missing, failed=reason)
            print(f"{missing.title}: failed, {reason}{end}", flush=True)
            return done, {missing.title: reason}

    def gpu_for(self, program: Program) -> contextlib.AbstractContextManager[None]:
        """What a program runs in: it has the GPU to itself, or takes it by itself."""
        return self.lock.held() if self.lock and not program.shares else contextlib.nullcontext()

    def texts(self, job: Job) -> list[str]:
        """The records of a job as they stand in its files."""
        found = []
        for file in filter(None, (job.program.file, job.program.also)):
            records = records_in(self.output / f"{file.replace('{machine}', job.machine)}.json")
            found.append(json.dumps([one for one in records if job.program.job_of(one) == job.name]))
        return [] if "[]" in found else found

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


def left(waiting: Sequence[Waiting], jobs: Sequence[Job], machine: str) -> str:
    """The line that ends a call: what is still to be measured and how long it takes, or the commit of all records."""
    if not waiting:
        records = [record for job in jobs for record in job.records]
        commits = {commit[:7]: None for record in records if (commit := record.get("commit"))}
        if len(commits) == 1:
            return f"all {len(records)} records of {machine} are of commit {next(iter(commits))}"
        return (
            f"all {len(records)} records of {machine} are as new as their sources, of the commits {', '.join(commits)}"
        )
    known = [one.seconds for one in waiting if one.seconds is not None]
    unknown = len(waiting) - len(known)
    text = f"left on {machine}: {len(waiting)} of {len(jobs)} jobs, about {sum(known):.0f} s"
    return text + (f", and {unknown} whose time is unknown" if unknown else "")


def machines_here() -> list[str]:
    """What the result files call this machine: a GPU by its name, several of them with their number, or cpu."""
    import torch

    if not torch.cuda.is_available():
        return ["cpu"]
    name, count = slug_of(torch.cuda.get_device_name()), torch.cuda.device_count()
    return [name, "cuda", *([f"{name}x{count}"] if count > 1 else [])]


def stale_builds(root: Path) -> list[str]:
    """The variants in build/ that were made from other sources, or of another commit, which records would name."""
    spec = importlib.util.spec_from_file_location("build_of_the_package", root / "tools/build.py")
    assert spec is not None and spec.loader is not None
    builder = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = builder
    spec.loader.exec_module(builder)
    project = builder.load_project(root)
    variants = [path.parent for path in sorted((root / "build").glob("*/metadata.json"))]
    stale = [variant.name for variant in variants if builder.is_stale(project, variant)]
    history = History(root)
    if not history.is_whole:
        return stale
    head = history.git("rev-parse", "HEAD").strip()
    for variant in variants:
        made_of = json.loads((variant / "metadata.json").read_text()).get("provenance", {}).get("kernel", {})
        if variant.name not in stale and made_of.get("commit", head) != head:
            stale.append(variant.name)
    return stale


def print_list(waiting: Iterable[Waiting]) -> None:
    for one in waiting:
        seconds = "? s" if one.seconds is None else f"{one.seconds:.0f} s"
        failed = f"; the last call failed: {one.failed}" if one.failed else ""
        print(f"{seconds:>7}  {one.job.title} ({one.reason}{failed})")


def share(text: str) -> tuple[int, int]:
    """(i, n) of I/N."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"expected I/N with 1 <= I <= N, such as 1/2, got {text}")
    return int(number), int(of)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin and run nothing after this long")
    parser.add_argument("--list", action="store_true", help="print what would be measured and why, and run nothing")
    parser.add_argument("--dry-run", action="store_true", help="print the calls, and run nothing")
    parser.add_argument("--machine", help="with --list or --dry-run: another machine, such as h200 (default: this one)")
    parser.add_argument("--like", default="", metavar="MACHINE", help="also measure what this machine's files have")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="PART",
        help="only jobs with one of these in the title, or of this title",
    )
    parser.add_argument(
        "--share", type=share, default=(1, 1), metavar="I/N", help="the I-th of N calls that divide the jobs among them"
    )
    parser.add_argument("--lock", type=Path, metavar="FILE", help="share the GPU with other calls that name this file")
    parser.add_argument("--output", type=Path, default=RESULTS, help="(default: benchmarks/results)")
    options = parser.parse_args(arguments)
    start = time.monotonic()  # `--seconds` counts what comes before the first measurement, too
    runs = not (options.list or options.dry_run)
    if options.machine and runs:
        parser.error("--machine: expected --list or --dry-run with it, since only this machine can be measured")
    if runs and options.share[1] > 1 and options.output.resolve() == RESULTS.resolve():
        parser.error("--share: expected --output FOLDER, another one for each call, since calls would overwrite a file")
    machines = [options.machine] if options.machine else machines_here()
    if runs and (stale := stale_builds(REPOSITORY)):
        sys.exit(f"{', '.join(stale)}: made from other sources or of another commit; run python tools/build.py")
    with tempfile.TemporaryDirectory() as folder:  # what only looks writes nothing
        output = options.output if runs else Path(folder)
        queue = Queue(REPOSITORY, RESULTS, output, machines, options.like, PROGRAMS, options.share, options.lock)
        seconds = options.seconds - (time.monotonic() - start)
        return work(queue, seconds, options.only, options.list, options.dry_run)


def work(queue: Queue, seconds: float, only: Sequence[str] = ("",), listed: bool = False, dry: bool = False) -> int:
    """Measures until the time is over or nothing is left; the exit status: 1 where something failed."""
    deadline = time.monotonic() + seconds
    failed: dict[str, str] = {}
    attempted: set[str] = set()
    found = queue.waiting(only)
    if listed:
        print_list(found)
    while not listed:
        remaining = deadline - time.monotonic()
        batch = next_batch([one for one in found if one.job.title not in attempted], remaining)
        if not batch or remaining <= 0:
            break
        if dry:
            target = queue.output / f"{batch[0].file}.json"
            print(" ".join(command_of(batch, queue.root, target)))
            attempted |= {job.title for job in batch}
            continue
        with queue.gpu_for(batch[0].program):
            done, failures = queue.run(batch, deadline - time.monotonic())
        failed |= failures
        attempted |= done | failures.keys()
        found = queue.waiting(only)
    for title, reason in failed.items():
        print(f"failed: {title}: {reason}")
    print(left(found, queue.jobs(only), queue.machines[0]))
    too_long = [one for one in found if one.seconds is not None and one.seconds > seconds]
    for one in too_long:
        print(f"{one.job.title} takes about {one.seconds:.0f} s: call with more --seconds")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
