"""tests/gpu.py and tests/sanitize.py, without a GPU: what they do with jobs that end, hang, fail or find no room."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import sanitize
from gpu import (
    CALLS,
    ELSEWHERE,
    FILES,
    MODELS_FILES,
    OF_THE_VARIANT,
    PARTS,
    Job,
    chosen,
    counts,
    longest_first,
    run_all,
)
from helpers.failures import FAILURES, read_failures
from helpers.files import TESTS as DIRECTORY
from helpers.files import path_of
from helpers.gpus import VISIBLE, take_turns

TESTS = """
import pytest

@pytest.mark.parametrize("x", ["a", "b b"])
def test_good(x): print("tests/test_it.py::no_test PASSED [ 1%]")
def test_bad(): assert False
@pytest.fixture
def broken(): raise OSError
def test_broken(broken): pass
@pytest.mark.skip(reason="for a reason (and another)")
def test_skipped(): pass
"""


def python(suite: str, code: str, processes: int = 1) -> Job:
    return Job(suite, "job", [sys.executable, "-c", code], processes)


def results(tmp_path: Path, jobs: list[Job], limit: float) -> dict[str, int | None]:
    found: dict[str, dict[str, Any]] = {}
    run_all(jobs, 2, limit, tmp_path, lambda job, result: found.update({job.suite: result}))
    assert set(found) == {job.suite for job in jobs}
    return {suite: result["status"] for suite, result in found.items()}


def test_a_job_that_hangs_takes_nothing_with_it(tmp_path: Path) -> None:
    mark = tmp_path / "child"
    child = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    hangs = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    jobs = [python("hangs", hangs), python("fails", "1 / 0"), python("ends", ""), python("too late", "", 2)]
    statuses = results(tmp_path, jobs, limit=12)  # a busy machine takes seconds to start Python
    assert statuses == {"hangs": None, "fails": 1, "ends": 0, "too late": None}
    assert "ZeroDivisionError" in (tmp_path / "fails-job.log").read_text()
    pid = int(mark.read_text())
    for _ in range(100):  # what a job started is ended with it
        if not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} outlived its job")


def test_no_more_processes_than_there_is_room_for(tmp_path: Path) -> None:
    """Each writes when it ran; those of two processes ran alone."""
    code = "import time; a = time.time(); time.sleep(0.3); print(a, time.time())"
    jobs = [python(name, code, size) for name, size in (("a", 1), ("b", 2), ("c", 1), ("d", 1))]
    assert set(results(tmp_path, jobs, limit=60).values()) == {0}
    (_, a), (b, b_end), (c, c_end), (d, d_end) = (
        map(float, (tmp_path / f"{name}-job.log").read_text().split()) for name in "abcd"
    )
    assert a <= b < b_end <= c < d_end
    assert d < c_end


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([], id="alone"),
        pytest.param(["-n", "2", "--dist", "worksteal"], id="xdist", marks=pytest.mark.extended),
    ],
)
def test_counts_and_names_of_tests(tmp_path: Path, arguments: list[str]) -> None:
    """Each failure is named as it happens, that of a worker which dies too."""
    dies = ""
    if arguments:
        pytest.importorskip("xdist")
        dies = "def test_dies(): import os; os._exit(3)\n"
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(TESTS + dies)
    path = f"import sys; sys.path.insert(0, {str(DIRECTORY)!r})\n"
    (tmp_path / "tests" / "conftest.py").write_text(
        path + "from helpers.failures import name_failures as pytest_configure\n"
    )
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/test_it.py", *arguments]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment[FAILURES] = str(tmp_path / "failures")
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert counts(process.stdout) == {"passed": 2, "failed": 2 + bool(dies), "skipped": 1}
    failures = read_failures(tmp_path / "failures")
    named = {"test_bad": "test_it.py:6: assert False", "test_broken": "test_it.py:8: OSError"}
    if dies:
        named["test_dies"] = "crashed while running"
    assert failures.keys() == {f"tests/test_it.py::{test}" for test in named}
    assert all(named[test.partition("::")[2]] in lines[0] for test, lines in failures.items()), failures
    assert read_failures(tmp_path / "nothing") == {}


def test_every_file_that_takes_a_device_is_run() -> None:
    takes_device = re.compile(r"def test_\w+\([^)]*\b(device|cuda|cuda_graphs)\b")
    found = {
        path.stem.removeprefix("test_")
        for path in DIRECTORY.rglob("test_*.py")
        if takes_device.search(path.read_text())
    }
    assert found - {*FILES, *MODELS_FILES} == ELSEWHERE & found
    assert not ELSEWHERE & {*FILES, *MODELS_FILES}


@pytest.mark.extended
def test_every_file_has_tests_for_a_gpu() -> None:
    """What --on-device leaves of them: not those that take no device, nor those that are marked `host`."""
    files = {file for file in [*FILES, *MODELS_FILES] if file not in OF_THE_VARIANT}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *chosen("")]
    paths = [path_of(file) for file in sorted({*files, *ELSEWHERE & {"completeness"}})]
    process = subprocess.run([*command, *paths], cwd=DIRECTORY.parent, capture_output=True, text=True, check=True)
    tests = {line.partition("[")[0] for line in process.stdout.splitlines() if "::" in line}
    assert {re.split(r"test_|\.py", test)[1] for test in tests} == files
    assert "tests/test_errors.py::test_op" in tests
    assert not {f"tests/test_errors.py::test_{name}" for name in ("meta", "reference")} & tests
    assert chosen("sass") == ["-m", "not slow"]


def test_two_calls_make_one() -> None:
    assert [part for parts in CALLS.values() for part in parts] == PARTS


def test_what_took_longest_begins_first() -> None:
    names = ["short", "unknown", "long", "stopped"]
    files = {name: {"status": 0, "seconds": len(name)} for name in ("short", "long")}
    files["short"]["seconds"], files["stopped"] = 1, {"status": None, "seconds": 2}
    jobs = longest_first([Job("tests", name, []) for name in names], {"tests": {"files": files}})
    assert [job.name for job in jobs] == ["unknown", "stopped", "long", "short"]


@pytest.mark.parametrize(
    ("summary", "faults"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0),
        ("========= ERROR SUMMARY: 3 errors", 3),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)", 2),
        ("========= Error: No attachable process found", None),  # it did not come to a summary
    ],
)
def test_what_a_sanitizer_says(summary: str, faults: int | None) -> None:
    result, output = sanitize.run(
        0, [sys.executable, "-c", f"print('2 passed in 1 s\\n{summary}'); exit({faults or 0})"]
    )
    assert summary in output
    assert (result["tests"], result["faults"], result["status"]) == (2, faults, faults or 0)


def test_what_sanitizers_look_at() -> None:
    """The marked tests, as found in the text, are those that pytest finds; each process takes one dtype of them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "sanitize", "-p", "no:cacheprovider"]
    files = {test.partition("::")[0] for tests in sanitize.marked_tests() for test in tests}
    process = subprocess.run([*command, *files], capture_output=True, text=True, check=True)
    collected = {line for line in process.stdout.splitlines() if "::" in line}
    assert {line.partition("[")[0].partition("::")[2] for line in collected} == {
        test.partition("::")[2] for tests in sanitize.marked_tests() for test in tests
    }
    assert all(sum(f"torch.{dtype}" in line for dtype in sanitize.DTYPES) == 1 for line in collected)
    command = sanitize.command("compute-sanitizer", "memcheck", ["tests/test_sanitize.py::test_norms"], "float16", "")
    assert command[1:5] == ["--tool", "memcheck", "--kernel-regex", "kns=ltx"]


def test_gpus_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, turns in (("0,1,5", ["0,1,5", "1,5,0", "5,0,1", "0,1,5"]), ("3", []), ("", [])):
        monkeypatch.setenv(VISIBLE, gpus)
        assert [take_turns(turn) for turn in range(len(turns) or 2)] == ([{VISIBLE: t} for t in turns] or [{}, {}])
    monkeypatch.delenv(VISIBLE)
    assert take_turns(1) == {}
