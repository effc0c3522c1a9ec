"""Measures several jobs at a time on one GPU: `measure.py --slots N`.

A slot has its part of the cores and runs one program at a time, in a folder of its own. Programs that share the GPU
(benchmarks/sharing.py) compile side by side, and one of them uses it at a time. Of the others one runs at a time, with
the GPU to itself. What a program has measured is in the output's files when the program has ended.

A job begins when a slot is free and the GPU has memory for it beside the jobs that run. How much it needs follows from
the peaks of its records. A job that fails runs once more at the end, alone. A program that times the host runs alone,
before the others.
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from job_queue import Queue, Waiting, next_batch
from records import Job
from sharing import Lock
from take import take_files

PEAKS, REST_GB = 1.2, 5.0  # a guess: a program needs so many times its peaks, and so much more
SHARE = 4  # a job whose peak is not known counts as a fourth of the memory
KEPT_GB = 6.0  # of the GPU's memory, for the contexts of the programs


def free_gb() -> float:
    """Returns how many GiB the jobs can use: of the GPU, or of the host if there is no GPU."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[1] / 2**30 - KEPT_GB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def core_groups(count: int) -> list[list[int]]:
    """Divides the cores of this process into `count` groups. A group that would be empty gets all cores."""
    cores = sorted(os.sched_getaffinity(0))
    return [cores[i * len(cores) // count : (i + 1) * len(cores) // count] or cores for i in range(count)]


@dataclass(frozen=True)
class Running:
    """What a slot does."""

    slot: int
    batch: Sequence[Waiting]
    memory_gb: float


Result = tuple[set[str], dict[str, str]]  # of Queue.run


class Slots:
    """The slots of a queue.

    queue: What waits, and the output.
    memory_gb: The memory that all jobs have together.
    """

    def __init__(self, queue: Queue, count: int, memory_gb: float) -> None:
        self.queue, self.count, self.memory_gb = queue, count, memory_gb

    def needs_gb(self, jobs: Sequence[Job]) -> float:
        """How much of the GPU's memory a program of these jobs needs.

        Its configurations share one set of weights, but for torchao's, which it keeps beside them.
        """
        peaks = {False: 0.0, True: 0.0}
        for record in (record for job in jobs for record in job.records if record.get("peak_gb")):
            apart = str(record.get("config")).startswith("torchao")
            peaks[apart] = max(peaks[apart], record["peak_gb"])
        held = jobs[0].program.copies * sum(peaks.values())
        needed = PEAKS * held + REST_GB if held else self.memory_gb / SHARE
        return min(needed, self.memory_gb)

    def work(self, seconds: float, only: Sequence[str] = ("",)) -> dict[str, str]:
        """Measures until the time is over or nothing is left: why jobs failed, by their titles."""
        deadline = time.monotonic() + seconds
        waiting, failed = self.queue.waiting(only), dict[str, str]()
        # Those that run alone begin first, then those that need most: small ones find room beside them.
        waiting.sort(key=lambda one: (not one.job.program.times_host, -self.needs_gb([one.job])))
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(self.count) as pool:
            queues = self._queues(Path(folder))
            try:
                self._run(pool, queues, waiting, deadline, failed)
                again = [one for one in waiting if one.job.title in failed]
                self._run(pool, queues[:1], again, deadline, failed)
            finally:  # an interrupted call leaves no program behind
                self.queue.stop.set()
        return failed

    def _queues(self, folder: Path) -> list[Queue]:
        """A queue for each slot, with the lock that they share."""
        lock, queues = Lock(folder / "gpu.lock"), []
        for number, cores in enumerate(core_groups(self.count)):
            queue = copy.copy(self.queue)
            queue.write_to(folder / str(number), self.queue.output)
            queue.lock, queue.prefix = lock, ["taskset", "--cpu-list", ",".join(map(str, cores))]
            queues.append(queue)
        return queues

    def _run(
        self,
        pool: ThreadPoolExecutor,
        queues: Sequence[Queue],
        waiting: Sequence[Waiting],
        deadline: float,
        failed: dict[str, str],
    ) -> None:
        running: dict[Future[Result], Running] = {}
        waiting = list(waiting)
        while True:
            while found := self._next(waiting, running.values(), len(queues), deadline - time.monotonic()):
                waiting = [one for one in waiting if one not in found.batch]
                name = found.batch[0].job.title + (f" and {len(found.batch) - 1} more" if found.batch[1:] else "")
                print(f"{name}: slot {found.slot + 1}, {found.memory_gb:.0f} GiB", flush=True)
                running[pool.submit(self._measure, queues[found.slot], found, deadline)] = found
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                ended = running.pop(future)
                done, failures = future.result()
                for title in done:
                    failed.pop(title, None)
                failed |= failures
                self._keep(queues[ended.slot], [one.job for one in ended.batch])
                if failures:  # the program may have ended there, and the other jobs of its batch wait again
                    waiting += [one for one in ended.batch if one.job.title not in done | failures.keys()]

    def _next(
        self, waiting: Sequence[Waiting], running: Collection[Running], slots: int, seconds: float
    ) -> Running | None:
        """What begins now: the first job for which there is a slot, time and memory."""
        taken = {one.slot for one in running}
        slot = next((number for number in range(slots) if number not in taken), None)
        if slot is None or seconds <= 0:
            return None
        programs = [one.batch[0].job.program for one in running]
        one_is_alone = any(not program.shares for program in programs)
        if any(program.times_host for program in programs):
            return None
        left_gb = self.memory_gb - sum(one.memory_gb for one in running)
        for place, first in enumerate(waiting):
            shares = first.job.program.shares
            if (one_is_alone and not shares) or (first.job.program.times_host and running):
                continue
            # A program that shares the GPU gets one job, so that the others can go to other slots.
            jobs = next_batch([first] if shares else waiting[place:], seconds)
            if first.job in jobs and (needed := self.needs_gb(jobs)) <= left_gb:
                return Running(slot, [one for one in waiting if one.job in jobs], needed)
        return None

    def _measure(self, queue: Queue, running: Running, deadline: float) -> Result:
        jobs = [one.job for one in running.batch]
        with queue.gpu_for(jobs[0].program):  # which may wait until the time is over
            seconds = deadline - time.monotonic()
            return (set(), {}) if seconds <= 0 or queue.stop.is_set() else queue.run(jobs, seconds)

    def _keep(self, slot: Queue, jobs: Sequence[Job]) -> None:
        """Brings what a slot has measured into the output."""
        for job in jobs:
            call = slot.calls.get(job.title)
            if call is None or call == self.queue.calls.get(job.title):
                continue
            if "failed" not in call and not call.get("stopped"):
                take_files(job.program, job.machine, [job], slot.output, self.queue.output, call["date"])
            self.queue.keep(call)
