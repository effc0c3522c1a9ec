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

`--slots N` measures N jobs at a time on one GPU (benchmarks/slots.py). Most of the time of whole models is
torch.compile's, which needs the host alone:

    python benchmarks/measure.py --slots 4 --output measured
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from job_queue import Queue, Waiting, command_of, next_batch
from records import PROGRAMS, Job
from result_files import REPOSITORY, slug_of
from slots import Slots, free_gb
from sources import History

RESULTS = REPOSITORY / "benchmarks/results"


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


def stale_builds(root: Path, device: str) -> list[str]:
    """The variants for a device in build/ that were made from other sources, or of another commit.

    Records would name the commit of the build.
    """
    spec = importlib.util.spec_from_file_location("build_of_the_package", root / "tools/build.py")
    assert spec is not None and spec.loader is not None
    builder = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = builder
    spec.loader.exec_module(builder)
    project, history, stale = builder.load_project(root), History(root), []
    head = history.git("rev-parse", "HEAD").strip() if history.is_whole else None
    for path in sorted((root / "build").glob("*/metadata.json")):
        metadata = json.loads(path.read_text())
        commit = metadata.get("provenance", {}).get("kernel", {}).get("commit")
        of_another = None not in (head, commit) and commit != head
        if metadata["backend"]["type"] == device and (builder.is_stale(project, path.parent) or of_another):
            stale.append(path.parent.name)
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
    parser.add_argument("--slots", type=int, default=1, metavar="N", help="measure N jobs at a time (default: 1)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="(default: benchmarks/results)")
    options = parser.parse_args(arguments)
    start = time.monotonic()  # `--seconds` counts what comes before the first measurement, too
    runs = not (options.list or options.dry_run)
    if options.machine and runs:
        parser.error("--machine: expected --list or --dry-run with it, since only this machine can be measured")
    if runs and options.share[1] > 1 and options.output.resolve() == RESULTS.resolve():
        parser.error("--share: expected --output FOLDER, another one for each call, since calls would overwrite a file")
    if options.slots < 1:
        parser.error(f"--slots: expected 1 or more, got {options.slots}")
    machines = [options.machine] if options.machine else machines_here()
    if runs and (stale := stale_builds(REPOSITORY, "cpu" if machines == ["cpu"] else "cuda")):
        sys.exit(f"{', '.join(stale)}: made from other sources or of another commit; run python tools/build.py")
    if runs:  # the programs that run are ended, too
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    with tempfile.TemporaryDirectory() as folder:  # what only looks writes nothing
        output = options.output if runs else Path(folder)
        queue = Queue(REPOSITORY, RESULTS, output, machines, options.like, PROGRAMS, options.share)
        seconds = options.seconds - (time.monotonic() - start)
        return work(queue, seconds, options.only, options.list, options.dry_run, options.slots)


def one_by_one(queue: Queue, seconds: float, only: Sequence[str], dry: bool) -> dict[str, str]:
    """Measures until the time is over or nothing is left: why jobs failed, by their titles. `dry`: prints the calls."""
    deadline = time.monotonic() + seconds
    failed: dict[str, str] = {}
    attempted: set[str] = set()
    while (remaining := deadline - time.monotonic()) > 0:
        found = [one for one in queue.waiting(only) if one.job.title not in attempted]
        batch = next_batch(found, remaining)
        if not batch:
            break
        if dry:
            print(" ".join(command_of(batch, queue.root, queue.output / f"{batch[0].file}.json")))
            attempted |= {job.title for job in batch}
            continue
        done, failures = queue.run(batch, deadline - time.monotonic())
        failed |= failures
        attempted |= done | failures.keys()
    return failed


def work(
    queue: Queue,
    seconds: float,
    only: Sequence[str] = ("",),
    listed: bool = False,
    dry: bool = False,
    slots: int = 1,
) -> int:
    """Measures until the time is over or nothing is left; the exit status: 1 where something failed."""
    failed: dict[str, str] = {}
    if listed:
        print_list(queue.waiting(only))
    elif slots == 1 or dry:
        failed = one_by_one(queue, seconds, only, dry)
    else:
        failed = Slots(queue, slots, free_gb()).work(seconds, only)
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
