"""The sentence below a table whose figures are older than their sources.

A record is compared with the sources of the newest commit that was measured, and not with the checked-out sources. So
a page depends on the result files and the history alone, and an edit of a kernel changes no page.
"""

import functools
from collections.abc import Iterable

from plots import RESULTS
from records import Job, records_in
from sources import History
from staleness import Age, jobs_in

MOST_NAMES = 4
# What has a column for it, or a table of the same figures on its page.
TOLD = {("docs/measured/index.md", "files"), ("README.md", "chart")}


@functools.cache
def _jobs() -> dict[str, dict[Job, bool]]:
    """For each result file its jobs, and whether they are older than their sources."""
    jobs = jobs_in(RESULTS)
    age = Age(History(), folder=RESULTS)
    found: dict[str, dict[Job, bool]] = {}
    for job in jobs:
        files = {job.file, (job.program.also or job.program.file).replace("{machine}", job.machine)}
        for file in files:
            found.setdefault(file, {})[job] = bool(age.changed(job))
    return found


def of_file(file: str) -> str:
    """How many of the records of a result file are older than their sources; empty for trials by hand."""
    jobs = _jobs().get(file, {})
    changed = {job.name: jobs[job] for job in jobs}
    records = [
        changed[job.program.job_of(record)] for job in [*jobs][:1] for record in records_in(RESULTS / f"{file}.json")
    ]
    return f"{sum(records)} of {len(records)}" if any(records) else "none" if records else ""


def mark(files: Iterable[str]) -> str:
    """The sentence below a table that these result files were read for; empty where all of them are up to date."""
    jobs = [(file, job, changed) for file in sorted(files) for job, changed in _jobs().get(file, {}).items()]
    if not any(changed for _, _, changed in jobs):
        return ""
    if all(changed for _, _, changed in jobs):
        return "*The code has changed since these figures were measured.*\n"
    parts = []
    for file in sorted({file for file, _, changed in jobs if changed}):
        names = [job.name for of, job, changed in jobs if of == file and changed]
        count = sum(of == file for of, _, _ in jobs)
        if len(names) == count:
            parts.append(f"all of {file}")
        else:
            shown = ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} of the {count} measurements"
            parts.append(f"{shown} in {file}")
    return f"*The code has changed since some of these figures were measured: {'; '.join(parts)}.*\n"
