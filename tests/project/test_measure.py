"""benchmarks/measure.py: what is older than its sources, in which order it is measured, and what ends a call."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
BENCHMARKS = REPOSITORY / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import job_queue  # noqa: E402
import measure  # noqa: E402
import op_cases  # noqa: E402
import records  # noqa: E402
import result_files  # noqa: E402
import sharing  # noqa: E402
import slots  # noqa: E402
import sources  # noqa: E402
import staleness  # noqa: E402
import take  # noqa: E402

RESULTS = BENCHMARKS / "results"
FILES = {
    "build.toml": """
        [kernel.norm]
        backend = "cuda"
        src = ["kernel_src/norm.cu", "kernel_src/ltx/rows.cuh"]
        [kernel.rope]
        backend = "cuda"
        src = ["kernel_src/rope.cu"]
        [kernel.norm_backward]
        backend = "cuda"
        src = ["kernel_src/norm_backward.cu"]
    """,
    "kernel_src/norm.cu": "namespace ltx {\nvoid norm(const Params& p) {\n  launch(p);  // once\n}\n}\n",
    "kernel_src/norm_backward.cu": "namespace ltx {\nvoid norm_backward(const Params& p) {\n}\n}\n",
    "kernel_src/rope.cu": "namespace ltx {\nvoid rotary(const Params& p) {\n}\n}\n",
    "kernel_src/ltx/rows.cuh": "constexpr int kRows = 4;\n",
    "torch-ext/norm.cpp": "Tensor norm(const Tensor& x) {\n  ltx::norm(p);\n  ltx::norm_backward(p);\n}\n",
    "torch-ext/rope.cpp": "Tensor rope(const Tensor& x) {\n  ltx::rotary(p);\n}\n",
    "torch-ext/ltx_kernels/norm.py": '''
        """Norms."""

        from . import _words
        from ._checks import choice
        from ._fakes import in_torch
        from ._sums import total

        _norm = op("norm")


        def rmsnorm(x):
            return _norm(x)


        class _Norm(Function):
            def forward(ctx, x):
                return rmsnorm(x)

            def backward(ctx, grad):
                return _of_weight(grad)


        def _of_weight(grad):
            return total(grad)
    ''',
    "torch-ext/ltx_kernels/_words.py": '"""A file without code."""\n',
    "torch-ext/ltx_kernels/_checks.py": """
        from ._torch_private import forward_ad, pytree

        CODES = {"a": 1}


        def choice(x):
            return look_up(x) if forward_ad and pytree else x


        def look_up(x):
            try:
                return CODES[x]
            except KeyError:
                return 0


        def check_rope(x):
            raise TypeError(x)
    """,
    "torch-ext/ltx_kernels/_torch_private.py": """
        from torch.autograd import forward_ad as forward_ad
        from torch.utils import _pytree as pytree

        REPLICATE = "replicate"
    """,
    "torch-ext/ltx_kernels/_fakes.py": """
        from . import _checks


        def in_torch(name):
            return _checks.check_rope(name)


        for name in ():
            in_torch(name)
    """,
    "torch-ext/ltx_kernels/_sums.py": "def total(x):\n    return x.sum(0)\n",
    "torch-ext/ltx_kernels/rope.py": '_rope = op("rope")\n\n\ndef rope_1d(x):\n    return _rope(x)\n',
    "benchmarks/shared.py": "def helper():\n    return 1\n\n\ndef other():\n    return 2\n",
    "benchmarks/result_files.py": "def save(path, text):\n    path.write_text(text)\n",
    "benchmarks/sharing.py": "def share():\n    return 1\n",
    # Writes after each case, as the real programs do. A case may fail, or take its time.
    "benchmarks/program.py": '''
        """A program."""
        import argparse, json, pathlib, sys, time
        from result_files import save
        from shared import helper
        from sharing import share

        CASES = {
            "a": ("rmsnorm", 0),
            "b": ("rmsnorm", 0),
            "slow": ("rmsnorm", 60),
            "bad": ("rmsnorm", 0),
            "flawed": ("rmsnorm", 0),
        }


        def main():
            parser = argparse.ArgumentParser()
            parser.add_argument("--cases", nargs="+")
            parser.add_argument("--output", type=pathlib.Path)
            options = parser.parse_args()
            helper()
            share()
            for case in options.cases:
                print(case, "begins")
                if case == "bad":
                    sys.exit("ValueError: a bad case")
                if case == "silent":
                    continue
                time.sleep(CASES[case][1])
                path = options.output
                result = json.loads(path.read_text()) if path.exists() else {"records": []}
                kept = [record for record in result["records"] if record["name"] != case]
                commit = (pathlib.Path(__file__).parent / "commit").read_text()
                new = {"name": case, "commit": commit, "date": f"2026-01-02T00:00:0{len(kept)}+00:00"}
                save(path, json.dumps({"meta": {"device": "gpu"}, "records": [*kept, new]}))
                if case == "flawed":
                    sys.exit("a flaw")


        if __name__ == "__main__":
            main()
    ''',
}


class Fake:
    """A repository with a program of four cases, of which a machine has measured what `measured` says."""

    def __init__(self, root: Path) -> None:
        self.root, self.results = root, root / "benchmarks/results"
        for name, text in FILES.items():
            self.write(name, textwrap.dedent(text))
        self.cases = ["a", "b"]

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.root / name).read_text()
        assert old in text
        self.write(name, text.replace(old, new))

    def git(self, *arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(self.root), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self) -> str:
        """The sources as a commit, which is what the program then names."""
        if not (self.root / ".git").exists():
            self.git("init", "-q")
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "x")
        commit = self.git("rev-parse", "HEAD")
        self.write("benchmarks/commit", commit)
        return commit

    def measured(self, **dates: str) -> None:
        commit = (self.root / "benchmarks/commit").read_text()
        of = [{"name": name, "commit": commit, "date": date} for name, date in dates.items()]
        self.write("benchmarks/results/gpu-program.json", json.dumps({"meta": {"device": "gpu"}, "records": of}))

    def program(self, shares: bool = False) -> records.Program:
        program = records.Program(
            "benchmarks/program.py",
            "{machine}-program",
            lambda record: str(record["name"]),
            flag="--cases",
            keys=lambda name: (name,),
            functions=lambda name, of: {"rmsnorm"},
            shares=shares,
        )
        cases = self.cases

        class Listed(records.Program):
            def listed(self) -> list[str]:
                return cases

        return Listed(**{field: getattr(program, field) for field in program.__dataclass_fields__})

    def queue(self, output: Path | None = None, shares: bool = False, **options: Any) -> measure.Queue:
        output = output or self.results
        return measure.Queue(self.root, self.results, output, ["gpu"], programs=[self.program(shares)], **options)

    def reasons(self) -> dict[str, str]:
        return {one.job.name: one.reason for one in self.queue().waiting()}


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    fake = Fake(tmp_path)
    fake.commit()
    fake.measured(a="2026-01-01T00:00:00+00:00", b="2026-01-01T00:00:00+00:00")
    return fake


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("kernel_src/norm.cu", "launch(p);", "launch(p, 2);"),
        ("kernel_src/ltx/rows.cuh", "4", "8"),
        ("torch-ext/norm.cpp", "ltx::norm(p)", "ltx::norm(q)"),
        ("torch-ext/ltx_kernels/norm.py", "return _norm(x)", "return _norm(x.contiguous())"),
        (
            "torch-ext/ltx_kernels/norm.py",
            "return _norm(x)",
            "if x := 2 * x:\n        raise TypeError(x)\n    return _norm(x)",
        ),
        ("torch-ext/ltx_kernels/norm.py", "return _norm(x)", "if x:\n        x = -x\n    return _norm(x)"),
        ("torch-ext/ltx_kernels/norm.py", "return _norm(x)", "if x:\n        raise TypeError\n    return _norm(x)"),
        (
            "torch-ext/ltx_kernels/_checks.py",
            "return CODES[x]",
            "if not x:\n            raise KeyError(x)\n        return CODES[x]",
        ),
        ("torch-ext/ltx_kernels/_checks.py", "return CODES[x]", "return CODES[x] + 1"),
        ("torch-ext/ltx_kernels/_checks.py", '{"a": 1}', '{"a": 2}'),
        ("torch-ext/ltx_kernels/_checks.py", "CODES =", "print()\nCODES ="),
        ("torch-ext/ltx_kernels/_torch_private.py", "from torch.autograd", "from torch.func"),
        ("torch-ext/ltx_kernels/_torch_private.py", "import _pytree", "import pytree"),
        ("benchmarks/shared.py", "return 1", "return 3"),
        ("benchmarks/program.py", "    helper()\n", "    helper(share())\n"),
        ("benchmarks/program.py", "    helper()\n", "    share(helper())\n"),
        ("benchmarks/program.py", "from sharing import share", "from shared import other as share"),
        ("build.toml", '"kernel_src/ltx/rows.cuh"', '"kernel_src/ltx/rows.cuh", "kernel_src/rope.cu"'),
    ],
)
def test_a_change_of_a_source_makes_a_record_stale(fake: Fake, name: str, old: str, new: str) -> None:
    assert fake.reasons() == {}
    fake.edit(name, old, new)
    assert fake.reasons().keys() == {"a", "b"}
    assert all(re.fullmatch("its sources changed after [0-9a-f]{7}", reason) for reason in fake.reasons().values())


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("kernel_src/norm.cu", "// once", "// one time"),
        ("kernel_src/rope.cu", "rotary(const Params& p) {", "rotary(const Params& p) {\n  launch(p);"),
        ("torch-ext/ltx_kernels/norm.py", '"""Norms."""', '"""RMSNorm."""'),
        (
            "torch-ext/ltx_kernels/norm.py",
            "return _norm(x)",
            "if not x:\n        raise TypeError(x)\n    return _norm(x)",
        ),
        (
            "torch-ext/ltx_kernels/norm.py",
            "def rmsnorm(x):\n",
            "def _text(x):\n    return str(x)\n\n\n"
            "def rmsnorm(x):\n    if bad := x.isnan():\n        raise TypeError(_text(bad))\n",
        ),
        ("torch-ext/ltx_kernels/_words.py", "without code", "of words"),
        ("benchmarks/result_files.py", "text)\n", "text + '')\n"),
        ("benchmarks/sharing.py", "return 1", "return 2"),
        ("benchmarks/program.py", "    share()\n", ""),
        ("benchmarks/program.py", "    helper()\n", "    with share():\n        helper()\n"),
        ("torch-ext/ltx_kernels/rope.py", "return _rope(x)", "return _rope(x, 1)"),
        ("torch-ext/ltx_kernels/_checks.py", "raise TypeError(x)", "raise ValueError(x)"),
        ("torch-ext/ltx_kernels/_torch_private.py", '"replicate"', '"copy"'),
        ("torch-ext/ltx_kernels/_fakes.py", "in ():", "in (1,):"),
        ("benchmarks/shared.py", "return 2", "return 4"),
        ("benchmarks/program.py", '"slow": ("rmsnorm", 60)', '"slow": ("rmsnorm", 61)'),
    ],
)
def test_other_changes_do_not(fake: Fake, name: str, old: str, new: str) -> None:
    """Comments, docstrings, other kernels, other functions of shared files, other entries, the writing, the sharing.

    And what no op call on a GPU runs: checks that it does not import, and fakes. And what can only raise.
    """
    fake.edit(name, old, new)
    assert fake.reasons() == {}


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("torch-ext/ltx_kernels/norm.py", "return _of_weight(grad)", "return _of_weight(2 * grad)"),
        ("torch-ext/ltx_kernels/norm.py", "return total(grad)", "return total(2 * grad)"),
        ("torch-ext/ltx_kernels/_sums.py", "x.sum(0)", "x.sum(1)"),
        ("torch-ext/ltx_kernels/_fakes.py", "in ():", "in (1,):"),
        ("torch-ext/ltx_kernels/_checks.py", "raise TypeError(x)", "raise ValueError(x)"),
        ("kernel_src/norm_backward.cu", "Params& p) {", "Params& p) {\n  launch(p);"),
    ],
)
@pytest.mark.parametrize("call", ["helper().backward()", "torch.autograd.grad(helper(), [])"])
def test_what_gradients_need_counts_where_a_program_has_them(
    fake: Fake, name: str, old: str, new: str, call: str
) -> None:
    fake.edit(name, old, new)
    assert fake.reasons() == {}
    fake.edit(name, new, old)
    fake.edit("benchmarks/program.py", "    helper()", f"    {call}")
    fake.commit()
    fake.measured(a="2026-01-01T00:00:00+00:00", b="2026-01-01T00:00:00+00:00")
    assert fake.reasons() == {}
    fake.edit(name, old, new)
    assert fake.reasons().keys() == {"a", "b"}


def test_an_entry_of_a_table_is_of_its_own_case(fake: Fake) -> None:
    fake.edit("benchmarks/program.py", '"a": ("rmsnorm", 0)', '"a": ("rmsnorm", 0.5)')
    assert fake.reasons().keys() == {"a"}


def test_a_commit_that_the_history_lacks(fake: Fake) -> None:
    fake.write("benchmarks/commit", "0" * 40)
    fake.measured(a="2026-01-01T00:00:00+00:00", b="2026-01-01T00:00:00+00:00")
    assert set(fake.reasons().values()) == {f"of {'0' * 40}, which is not in the history"}


def test_what_was_never_measured_comes_first_and_then_the_oldest(fake: Fake) -> None:
    fake.cases = ["a", "b", "new"]
    shutil.rmtree(fake.root / ".git")
    fake.measured(a="2026-01-03T00:00:00+00:00", b="2026-01-02T00:00:00+00:00")
    assert [one.job.name for one in fake.queue().waiting()] == ["new", "b", "a"]


def test_a_call_measures_and_says_of_which_commit_all_records_are(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.edit("kernel_src/norm.cu", "launch(p);", "launch(p, 2);")
    commit = fake.commit()
    assert measure.work(fake.queue(), 60) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"all 2 records of gpu are of commit {commit[:7]}"
    assert fake.reasons() == {}
    calls = json.loads((fake.results / "gpu-queue.json").read_text())["records"]
    assert [call["job"] for call in calls] == ["program: a", "program: b"]
    assert all(call["commit"] == commit and call["seconds"] >= 0 for call in calls)


def test_records_of_several_commits_that_hold(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    first = fake.git("rev-parse", "HEAD")
    fake.edit("kernel_src/rope.cu", "rotary", "turning")
    second = fake.commit()
    fake.cases = ["a", "b", "slow"]
    fake.edit("benchmarks/program.py", '"slow": ("rmsnorm", 60)', '"slow": ("rmsnorm", 0)')
    assert measure.work(fake.queue(), 60) == 0
    text = f"all 3 records of gpu are as new as their sources, of the commits {first[:7]}, {second[:7]}"
    assert capsys.readouterr().out.splitlines()[-1] == text


def test_the_next_call_goes_on_where_the_limit_ended_one(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.cases = ["a", "b", "slow", "other"]
    fake.edit("benchmarks/program.py", '"bad": (', '"other": (')
    fake.edit("kernel_src/norm.cu", "launch(p);", "launch(p, 2);")
    fake.commit()
    names = [one.job.name for one in fake.queue().waiting()]
    assert names == ["slow", "other", "a", "b"]
    assert measure.work(fake.queue(), 4) == 0
    printed = capsys.readouterr().out
    assert "program: slow: stopped after" in printed and "left on gpu: 4 of 4 jobs, about" in printed
    assert "\n    slow begins\n" in printed
    assert "3 whose time is unknown" in printed
    # What was stopped waits until the others are measured, and until there is more time.
    assert [one.job.name for one in fake.queue().waiting()] == ["other", "a", "b", "slow"]
    assert measure.work(fake.queue(), 60, only=["other", ": a", ": b"]) == 0
    assert "all 3 records of gpu are of commit" in capsys.readouterr().out
    (left,) = fake.queue().waiting()
    assert left.job.name == "slow" and left.seconds is not None and left.seconds > 1
    assert measure.work(fake.queue(), 1) == 0
    assert "program: slow takes about" in capsys.readouterr().out


def test_a_kill_loses_what_runs_and_nothing_before(fake: Fake) -> None:
    """The first case is in the file, and up to date, though the process that measured it was killed in the second."""
    fake.cases = ["a", "slow"]
    fake.edit("kernel_src/norm.cu", "launch(p);", "launch(p, 2);")
    fake.commit()
    queue = fake.queue()
    jobs = {job.name: job for job in queue.jobs()}
    done, failed = queue.run([jobs["a"], jobs["slow"]], 4)
    assert (done, failed) == ({"program: a"}, {})
    assert fake.reasons().keys() == {"b", "slow"}


def test_a_failure_does_not_end_the_call(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.cases = ["bad", "a", "b"]
    fake.edit("kernel_src/norm.cu", "launch(p);", "launch(p, 2);")
    fake.commit()
    assert measure.work(fake.queue(), 60) == 1
    printed = capsys.readouterr().out
    assert "failed: program: bad: status 1: ValueError: a bad case" in printed
    assert "\n    bad begins\n    ValueError: a bad case\n" in printed  # the end of what the program printed
    assert "left on gpu: 1 of 3 jobs" in printed
    fake.edit("kernel_src/norm.cu", "launch(p, 2);", "launch(p, 3);")
    waiting = fake.queue().waiting()
    assert [one.job.name for one in waiting][-1] == "bad" and waiting[-1].failed
    assert measure.work(fake.queue(), 60, listed=True) == 0
    assert "the last call failed: status 1" in capsys.readouterr().out


def test_why_one_of_several_jobs_failed_is_printed(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    """Programs go on with their other jobs, and end with a long table."""
    fake.cases = ["bad"]
    table = 'print("a bad case failed: why\\n" + "a row\\n" * 20); sys.exit(1)'
    fake.edit("benchmarks/program.py", 'sys.exit("ValueError: a bad case")', table)
    fake.commit()
    assert measure.work(fake.queue(), 60) == 1
    assert "\n    a bad case failed: why\n    a row\n" in capsys.readouterr().out


def test_a_peer_without_a_record_is_measured() -> None:
    (program,) = [one for one in records.PROGRAMS if one.file == "{machine}-models"]
    made = [{"model": "zimage", "config": config, "blocks": {"layers": 30}} for config in ("baseline", "compile")]
    assert records.Job(program, "h200", "zimage", made).lacking == [records.AUTOTUNED]
    assert records.Job(program, "h200", "zimage", [*made, {**made[0], "config": records.AUTOTUNED}]).lacking == []
    assert records.Job(program, "h200", "zimage").lacking == []


def test_a_job_without_a_new_record_has_failed(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the program says that all is well, and an old record is there."""
    fake.cases = ["a", "silent"]
    fake.measured(a="2026-01-01T00:00:00+00:00", silent="2026-01-01T00:00:00+00:00")
    fake.edit("kernel_src/norm.cu", "launch(p);", "launch(p, 2);")
    fake.commit()
    assert measure.work(fake.queue(), 60) == 1
    assert "failed: program: silent: no record of it was written" in capsys.readouterr().out
    assert fake.reasons().keys() == {"silent"}


def test_what_a_program_says_of_its_records_is_shown(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as a planted defect that no test noticed."""
    fake.cases = ["flawed"]
    assert measure.work(fake.queue(), 60) == 0
    assert "program: flawed: measured, with status 1: a flaw" in capsys.readouterr().out


def test_an_interrupted_call_leaves_no_program_behind(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.cases = ["slow"]
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def noted(*args: Any, **options: Any) -> Any:
        started.append(popen(*args, **options))
        return started[-1]

    def interrupted(queue: measure.Queue, job: records.Job) -> list[str]:
        if looks:  # while the program runs
            raise Interrupted
        looks.append(job)
        return []

    class Interrupted(Exception):
        pass

    looks: list[records.Job] = []
    queue = fake.queue()
    monkeypatch.setattr(job_queue.subprocess, "Popen", noted)
    monkeypatch.setattr(measure.Queue, "texts", interrupted)
    with pytest.raises(Interrupted):
        measure.work(queue, 60)
    (program,) = [one for one in started if "program.py" in str(one.args)]
    assert program.wait(10) == -signal.SIGKILL


def test_what_a_program_started_ends_with_it(fake: Fake) -> None:
    """It could use the GPU while another program times something."""
    fake.cases = ["flawed"]
    child = "import subprocess; path.with_name('pid').write_text(str(subprocess.Popen(['sleep', '60']).pid))"
    fake.edit("benchmarks/program.py", 'sys.exit("a flaw")', f'{child}; sys.exit("a flaw")')
    assert measure.work(fake.queue(), 60, only=[": flawed"]) == 0
    stat = Path("/proc", (fake.results / "pid").read_text(), "stat")
    deadline = time.monotonic() + 10
    while stat.exists() and stat.read_text().rsplit(") ", 1)[1][0] != "Z" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert time.monotonic() < deadline


CONFIGURED = """
    import argparse, json, pathlib, sys

    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--configs", nargs="+")
        parser.add_argument("--cases", nargs="+")
        parser.add_argument("--output", type=pathlib.Path)
        options = parser.parse_args()
        commit = (pathlib.Path(__file__).parent / "commit").read_text()
        for case in options.cases:
            for config in options.configs:
                if config == "failing":
                    continue
                result = json.loads(options.output.read_text())
                kept = [one for one in result["records"] if (one["name"], one["config"]) != (case, config)]
                new = {"name": case, "config": config, "commit": commit, "date": "2026-01-02T00:00:00+00:00"}
                options.output.write_text(json.dumps({**result, "records": [*kept, new]}))
                if config == "crashing":
                    sys.exit("a crash")
        return int("failing" in options.configs)

    if __name__ == "__main__":
        sys.exit(main())
"""  # a program that goes on after a configuration that fails, and ends at one that crashes


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("config, in_parts", [("failing", False), ("crashing", True), ("sound", True)])
def test_a_job_without_one_of_its_configurations_has_failed(
    fake: Fake, config: str, in_parts: bool, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its records of before stay, all of them: else the next call would not know what was lost."""
    fake.write("benchmarks/program.py", textwrap.dedent(CONFIGURED))
    commit, path = fake.commit(), fake.results / "gpu-program.json"
    names = ["stock", config, "peer"]
    before = [{"name": "a", "config": name, "commit": "0" * 40, "date": "2026-01-01T00:00:00+00:00"} for name in names]
    path.write_text(json.dumps({"meta": {"device": "gpu"}, "records": before}))
    fake.cases = ["a"]
    program = dataclasses.replace(
        fake.program(shares=True), options=lambda name, of: records.configs(of), in_parts=in_parts
    )
    queue = measure.Queue(fake.root, fake.results, fake.results, ["gpu"], programs=[program])
    failed = config != "sound"
    assert measure.work(queue, 60, slots=count) == int(failed)
    after = json.loads(path.read_text())["records"]
    assert {one["config"] for one in after} == set(names)
    assert {one["commit"] for one in after} == {"0" * 40 if failed else commit}
    assert ("failed: program: a:" in capsys.readouterr().out) == failed
    assert bool(queue.waiting()) == failed


def test_without_the_history_the_digests_of_earlier_calls_count(fake: Fake) -> None:
    """A machine may have a copy of the files alone."""
    fake.edit("kernel_src/norm.cu", "launch(p);", "launch(p, 2);")
    fake.commit()
    assert measure.work(fake.queue(), 60) == 0
    shutil.rmtree(fake.root / ".git")
    assert fake.reasons() == {}
    fake.edit("kernel_src/norm.cu", "// once", "// twice")
    assert fake.reasons() == {}
    fake.edit("kernel_src/norm.cu", "launch(p, 2);", "launch(p, 3);")
    assert fake.reasons().keys() == {"a", "b"}
    (fake.results / "gpu-queue.json").unlink()
    assert set(fake.reasons().values()) == {"not measured by this command, and the repository's history is not here"}


def test_calls_that_share_the_work_are_taken_together(fake: Fake, tmp_path: Path) -> None:
    fake.edit("kernel_src/norm.cu", "launch(p);", "launch(p, 2);")
    commit = fake.commit()
    folders = [tmp_path / "first", tmp_path / "second"]
    for number, folder in enumerate(folders, 1):
        assert measure.work(fake.queue(folder, share=(number, 2)), 60) == 0
    assert fake.reasons().keys() == {"a", "b"}  # nothing was written there
    taken = [take.take_all(folder, fake.results, sources.History(fake.root), [fake.program()]) for folder in folders]
    assert [([job.name for job in jobs], left) for jobs, left in taken] == [(["a"], {}), (["b"], {})]
    assert fake.reasons() == {}
    file = json.loads((fake.results / "gpu-program.json").read_text())
    written = file["records"]
    assert [record["name"] for record in written] == ["a", "b"] and {record["commit"] for record in written} == {commit}
    assert file["meta"]["date"] == take.finished_in(folders[1])["program: b"]


def test_a_job_of_two_files_has_ended_when_both_are_written(fake: Fake) -> None:
    """The ledger names the commit of all records, and the time of both."""
    both = "path.write_text(text)\n    time.sleep(1.5)\n    path.with_name('gpu-profile.json').write_text(text)"
    fake.edit("benchmarks/result_files.py", "path.write_text(text)", both)
    fake.edit("benchmarks/result_files.py", "def save", "import time\n\n\ndef save")
    fake.edit("kernel_src/norm.cu", "launch(p);", "launch(p, 2);")
    commit = fake.commit()
    profile = fake.results / "gpu-profile.json"
    profile.write_text((fake.results / "gpu-program.json").read_text())
    program = dataclasses.replace(fake.program(), also="{machine}-profile")
    queue = measure.Queue(fake.root, fake.results, fake.results, ["gpu"], programs=[program])
    assert measure.work(queue, 60) == 0
    calls = {call["job"]: call for call in records.records_in(fake.results / "gpu-queue.json")}
    assert {call["commit"] for call in calls.values()} == {commit}
    assert all(call["seconds"] >= 1.4 for call in calls.values())


def test_a_record_that_is_older_is_left(fake: Fake, tmp_path: Path) -> None:
    """Such as in the folder of an earlier session."""
    fake.edit("kernel_src/norm.cu", "launch(p);", "launch(p, 2);")
    fake.commit()
    assert measure.work(fake.queue(tmp_path / "old"), 60) == 0
    fake.edit("kernel_src/norm.cu", "launch(p, 2);", "launch(p, 3);")
    fake.edit("benchmarks/program.py", "2026-01-02", "2026-01-03")
    newer = fake.commit()
    assert measure.work(fake.queue(), 60, only=[": a"]) == 0
    jobs, left = take.take_all(tmp_path / "old", fake.results, sources.History(fake.root), [fake.program()])
    assert [job.name for job in jobs] == ["b"] and left == {"program: a": "the record here is newer"}
    written = json.loads((fake.results / "gpu-program.json").read_text())["records"]
    assert {record["name"]: record["commit"] == newer for record in written} == {"a": True, "b": False}


def test_a_record_of_an_earlier_commit_is_left(fake: Fake, tmp_path: Path) -> None:
    """Though it was measured later. And a call that failed, or was stopped, has none."""
    fake.edit("kernel_src/norm.cu", "launch(p);", "launch(p, 2);")
    fake.edit("benchmarks/program.py", "2026-01-02", "2026-01-09")
    fake.commit()
    assert measure.work(fake.queue(tmp_path / "old"), 60) == 0
    fake.edit("kernel_src/norm.cu", "launch(p, 2);", "launch(p, 3);")
    fake.edit("benchmarks/program.py", "2026-01-09", "2026-01-02")
    fake.commit()
    assert measure.work(fake.queue(), 60, only=[": a"]) == 0
    history, program = sources.History(fake.root), fake.program()
    jobs, left = take.take_all(tmp_path / "old", fake.results, history, [program])
    assert [job.name for job in jobs] == ["b"] and left == {"program: a": "the record here is of a newer commit"}
    queue = fake.queue(tmp_path / "old")
    queue.note(queue.jobs([": b"])[0], failed="a reason")
    (fake.results / "gpu-program.json").unlink()
    jobs, _ = take.take_all(tmp_path / "old", fake.results, history, [program])
    assert [job.name for job in jobs] == ["a"]  # and no other record comes into a file that is not there
    assert [one["name"] for one in json.loads((fake.results / "gpu-program.json").read_text())["records"]] == ["a"]


@pytest.mark.parametrize("dirty, changes, named", [(True, None, False), (False, " M f.py", False), (False, None, True)])
def test_records_of_sources_without_a_commit_name_none(
    monkeypatch: pytest.MonkeyPatch, dirty: bool, changes: str | None, named: bool
) -> None:
    """Of a build with changes, and of a checkout with some: such a record is never up to date."""
    monkeypatch.setattr(result_files, "output_of", lambda command: changes if command == result_files.CHANGES else "x")
    package = {"id": "x", "provenance": {"kernel": {"commit": "f" * 40, "dirty": dirty}}}
    commit = result_files.common_meta(package)["commit"]
    assert (commit == "f" * 40) == named and (named or commit == "f" * 40 + "-dirty")


@pytest.mark.parametrize("unit", ["us", "ms"])
def test_a_record_without_a_peer_of_the_old_one_is_left(fake: Fake, tmp_path: Path, unit: str) -> None:
    path = fake.results / "gpu-program.json"
    result = json.loads(path.read_text())
    result["records"][0][unit] = {"ours": 1.0, "peer": 2.0, "absent": None}
    result["records"][0] |= {"config": "compile", "graph_ms": 3.0}
    path.write_text(json.dumps(result))
    fake.edit("kernel_src/norm.cu", "launch(p);", "launch(p, 2);")
    fake.commit()
    assert measure.work(fake.queue(tmp_path / "other"), 60) == 0
    jobs, left = take.take_all(tmp_path / "other", fake.results, sources.History(fake.root), [fake.program()])
    assert [job.name for job in jobs] == ["b"]
    assert left == {"program: a": "no time of compile (graph_ms), ours, peer, which the record has here"}
    assert json.loads(path.read_text())["records"][0] == result["records"][0]


def test_a_record_with_one_time_is_taken(fake: Fake, tmp_path: Path) -> None:
    """Some programs have the microseconds of one call in a record, and no table of peers."""
    path = fake.results / "gpu-program.json"
    result = json.loads(path.read_text())
    result["records"][0]["us"] = 3.0
    path.write_text(json.dumps(result))
    fake.edit("kernel_src/norm.cu", "launch(p);", "launch(p, 2);")
    fake.commit()
    assert measure.work(fake.queue(tmp_path / "other"), 60) == 0
    jobs, left = take.take_all(tmp_path / "other", fake.results, sources.History(fake.root), [fake.program()])
    assert [job.name for job in jobs] == ["a", "b"]
    assert not left


def test_a_folder_without_calls_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["take.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="expected a ledger"):
        take.main()


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b"])
def test_a_share_is_one_of_all(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected I/N"):
        measure.share(text)


@pytest.mark.parametrize("name, compiled", [("flux", ["compile", "autotune_compile"]), ("auraflow", ["compile"])])
def test_the_call_of_a_model_names_what_is_compiled(name: str, compiled: list[str]) -> None:
    """README's models are also timed beside torch.compile at its best, though no record has that yet."""
    (program,) = [one for one in records.PROGRAMS if one.file == "{machine}-models"]
    of = [{"model": name, "config": config} for config in ("baseline", "compile", "kernels")]
    batch = [records.Job(program, "h200", name, of)]

    command = " ".join(measure.command_of(batch, Path(), Path())) + " "
    configs = re.findall("[^ ]+", command.partition("--configs ")[2].partition("--")[0])
    assert configs == ["baseline", "compile", "kernels", *compiled[1:]]


def test_only_a_whole_title_or_all_with_a_part(fake: Fake) -> None:
    """A title can be the beginning of others: models: flux, models: flux2."""
    fake.cases = ["a", "ab", "b"]
    queue = fake.queue()
    for only, expected in ((": a", {"a", "ab"}), ("program: a", {"a"}), ("program", {"a", "ab", "b"})):
        assert {job.name for job in queue.jobs([only])} == expected


def is_free(path: Path) -> bool:
    """Whether another process could take the lock."""
    script = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'ab'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    return subprocess.run([sys.executable, "-c", script, path], capture_output=True).returncode == 0


def test_one_program_at_a_time_has_the_gpu(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = sharing.Lock(path)
    assert is_free(path)
    with lock.held():
        assert not is_free(path)
        with lock.released():
            assert is_free(path)
            with lock.held():
                assert not is_free(path)
            assert is_free(path)
        with lock.held():
            assert not is_free(path)
        assert not is_free(path)
    assert is_free(path)


def test_others_get_their_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that waits gets the lock at the first call, though the other one takes it again."""
    path, lock = tmp_path / "lock", sharing.Lock(tmp_path / "lock")
    monkeypatch.setattr(sharing, "_shared", [])
    sharing.give_turn()  # of a program that does not share
    monkeypatch.setattr(sharing, "_shared", [lock])
    monkeypatch.setattr(sharing, "TURN_S", 1.0)
    script = "import fcntl, sys; print('waits', flush=True); fcntl.lockf(open(sys.argv[1], 'ab'), fcntl.LOCK_EX)"
    with lock.held():
        waiting = subprocess.Popen([sys.executable, "-c", script, path], stdout=subprocess.PIPE)
        assert waiting.stdout and waiting.stdout.readline() == b"waits\n"
        time.sleep(0.2)
        assert waiting.poll() is None
        sharing.give_turn()
        assert waiting.wait(20) == 0 and not is_free(path)
    assert is_free(path)


@pytest.fixture
def lock_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock's file of a program that shares the GPU. What `share` replaces is put back when the test ends."""
    from torch._dynamo import convert_frame
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.runtime import benchmarking
    from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    lazy = [importlib.import_module(f"{name}.utils.import_utils")._LazyModule for name in sharing.LIBRARIES]
    for owner, name in (
        *((owner, "_get_module") for owner in lazy),
        (convert_frame, "_compile"),
        (CoordescTuner, "autotune"),
        (AlgorithmSelectorCache, "benchmark_in_current_process"),
        (TritonScheduling, "benchmark_codegened_module"),
        (pad_mm, "_should_pad"),
        (type(benchmarking.benchmarker), "benchmark_gpu"),
    ):
        monkeypatch.setattr(owner, name, vars(owner)[name])
    monkeypatch.setattr(sharing, "_shared", [])
    monkeypatch.setenv(sharing.VARIABLE, str(tmp_path / "lock"))
    return tmp_path / "lock"


def test_others_have_the_gpu_while_libraries_are_imported(lock_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers and transformers import what a model needs when its class is asked for."""
    found = []
    lazy = [importlib.import_module(f"{name}.utils.import_utils")._LazyModule for name in sharing.LIBRARIES]
    for one in lazy:
        monkeypatch.setattr(one, "_get_module", lambda module, name: found.append(is_free(lock_file)))
    sharing.share()
    for one in lazy:
        one("a_library", "a_library.py", {})._get_module("a_model")
        assert not is_free(lock_file)
    assert found == [True] * 2


def test_others_have_the_gpu_while_torch_compiles(lock_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not while it times kernels, which it does within its compiling and its tuning."""
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.runtime import benchmarking
    from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner, HeuristicType
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    found = []
    timer = type(benchmarking.benchmarker)

    def times(*arguments: Any) -> None:
        found.append(("times", is_free(lock_file)))

    def compiles(graph: Any, *arguments: Any) -> Any:
        found.append(("compiles", is_free(lock_file)))
        benchmarking.benchmarker.benchmark_gpu()
        found.append(("compiles", is_free(lock_file)))
        return graph

    monkeypatch.setattr(timer, "benchmark_gpu", times)
    monkeypatch.setattr(CoordescTuner, "autotune", compiles)
    monkeypatch.setattr(AlgorithmSelectorCache, "benchmark_in_current_process", classmethod(times))
    monkeypatch.setattr(TritonScheduling, "benchmark_codegened_module", times)
    monkeypatch.setattr(pad_mm, "_should_pad", times)
    monkeypatch.delenv(sharing.VARIABLE)
    sharing.share()
    with sharing.released():
        assert CoordescTuner.autotune is compiles and not lock_file.exists()
    monkeypatch.setenv(sharing.VARIABLE, str(lock_file))
    sharing.share()
    assert not is_free(lock_file)
    with sharing.released():
        assert is_free(lock_file)
    for call in (torch.compile(lambda x: x + 1, backend=compiles), CoordescTuner.autotune):
        call(torch.ones(2))
        assert found == [("compiles", True), ("times", False), ("compiles", True)]
        assert not is_free(lock_file)
        found.clear()
    with sharing.released():
        AlgorithmSelectorCache.benchmark_in_current_process([])
        TritonScheduling.benchmark_codegened_module(None)
        pad_mm._should_pad()
    assert found == [("times", False)] * 3
    found.clear()
    with sharing.timed():  # no other program runs, even while this one compiles
        CoordescTuner.autotune(torch.ones(2))
    assert found == [("compiles", False), ("times", False), ("compiles", False)]
    with sharing.released():
        assert is_free(lock_file)
    # Each launch of a template asks for a tuning that it does not need. Others would get the GPU in timed steps.
    monkeypatch.setattr(sharing.Lock, "turn", lambda *arguments: pytest.fail("the lock was given away"))
    template = CachingAutotuner.__new__(CachingAutotuner)
    template.heuristic_type, launcher = HeuristicType.TEMPLATE, object()
    assert template.coordinate_descent_tuning(launcher) is launcher


def test_a_program_that_does_not_share_has_the_gpu_to_itself(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others get the lock's file and take it themselves."""
    path, given = fake.root / "lock", []

    def popen(command: list[str], **options: Any) -> Any:
        given.append((options["env"].get(sharing.VARIABLE), is_free(path)))
        return subprocess.Popen(command, **options)

    fake.cases = ["flawed", "bad"]
    for case, shares, expected in (("flawed", False, (None, False)), ("bad", True, (str(path), True))):
        queue = fake.queue(shares=shares)
        queue.lock = sharing.Lock(path)
        running = slots.Running(0, queue.waiting([f": {case}"]), 1.0)
        with monkeypatch.context() as patched:
            patched.setattr(job_queue, "subprocess", types.SimpleNamespace(Popen=popen))
            slots.Slots(queue, 1, 1.0)._measure(queue, running, time.monotonic() + 60)
        assert given.pop() == expected and not given and is_free(path)


PAIRS = """
                if case[:4] in ("meet", "lone"):
                    begun = options.output.parent.parent / "begun"
                    begun.mkdir(exist_ok=True)
                    (begun / case).touch()
                    deadline = time.monotonic() + (20 if case[:4] == "meet" else 2)
                    while len([*begun.iterdir()]) < 2 and time.monotonic() < deadline:
                        time.sleep(0.1)
                    both = len([*begun.iterdir()]) == 2
                    if case[:4] == "lone":
                        (begun / case).unlink()
                    if both != (case[:4] == "meet"):
                        sys.exit(f"{case} ran alone" if case[:4] == "meet" else f"{case} did not run alone")
                time.sleep(CASES.get(case, (0, 0))[1])
"""  # of the fake program: cases that another one has to run beside, and cases that none may


@pytest.mark.parametrize("kind, shares", [("meet", True), ("lone", False)])
def test_slots_measure_side_by_side(fake: Fake, kind: str, shares: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """But only programs that share the GPU. The output has the records and the ledger, and is gone on with."""
    fake.cases = [f"{kind} {name}" for name in "cd"]
    fake.edit(
        "benchmarks/program.py", "time.sleep(CASES[case][1])", textwrap.indent(textwrap.dedent(PAIRS), " " * 8).strip()
    )
    commit = fake.commit()
    output = fake.root / "measured"
    queue = fake.queue(output, shares=shares)
    if not shares:  # which would run in one process
        alone = {"flag": "", "options": lambda name, records: ["--cases", name]}
        queue.programs = [dataclasses.replace(one, **alone) for one in queue.programs]
    assert measure.work(queue, 60, [f": {kind}"], slots=2) == 0
    printed = capsys.readouterr().out
    assert "failed" not in printed
    found = json.loads((output / "gpu-program.json").read_text())["records"]
    assert {record["name"]: record["commit"] for record in found}.items() >= dict.fromkeys(fake.cases, commit).items()
    assert {record["name"] for record in found} == {"a", "b", *fake.cases}
    ledger = {call["job"]: call for call in records.records_in(output / "gpu-queue.json")}
    assert set(ledger) == {f"program: {case}" for case in fake.cases} and all(
        "sources" in ledger[job] for job in ledger
    )
    assert {one.job.name for one in fake.queue(output, shares=shares).waiting()} == {"a", "b"}
    assert f"all 2 records of gpu are of commit {commit[:7]}" in printed


def test_a_job_that_fails_in_a_slot_runs_again_alone(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.cases = ["bad", "a", "b"]
    fake.edit("kernel_src/norm.cu", "launch(p);", "launch(p, 2);")
    fake.commit()
    assert measure.work(fake.queue(), 60, slots=2) == 1
    printed = capsys.readouterr().out
    assert printed.count("program: bad: failed, status 1: ValueError: a bad case") == 2
    assert printed.count("failed: program: bad:") == 1 and "left on gpu: 1 of 3 jobs" in printed
    assert fake.reasons().keys() == {"bad"}


def test_jobs_begin_where_they_fit(fake: Fake) -> None:
    """The first one that fits, and nothing where there is no slot, no time and no memory."""
    fake.cases = ["a", "b", "c"]
    queue = fake.queue(shares=True)
    waiting = [measure.Waiting(job, "", seconds) for job, seconds in zip(queue.jobs(), (10.0, 20.0, 10.0))]
    for one, peak in zip(waiting, (10.0, 2.0, None)):
        one.job.records[:] = [{"config": "baseline"}, {"config": "kernels", "peak_gb": peak}]
    waiting[0].job.records.extend({"config": name, "peak_gb": 4.0} for name in ("compile", "torchao_fp8_compile"))
    first, second, third = waiting
    made = slots.Slots(queue, 2, 40.0)
    needs = [made.needs_gb([one.job]) for one in waiting]
    assert needs == pytest.approx([1.2 * (10 + 4) + 5, 1.2 * 2 + 5, 40 / 4])
    assert slots.Slots(queue, 2, 8.0).needs_gb([first.job]) == 8.0  # alone on a GPU that may be too small

    def begins(running: list[slots.Running], seconds: float = 60.0) -> tuple[Any, ...] | None:
        found = made._next(waiting, running, 2, seconds)
        return found and (found.slot, *found.batch)

    assert begins([]) == (0, first) and begins([], 5.0) is None and begins([], 0.0) is None
    assert begins([slots.Running(0, [third], 15.0)]) == (1, first)
    assert begins([slots.Running(1, [third], 25.0)]) == (0, second)
    assert begins([slots.Running(1, [third], 25.0)], 15.0) == (0, third)
    assert begins([slots.Running(0, [third], 39.0)]) is None
    assert begins([slots.Running(0, [third], 1.0), slots.Running(1, [second], 1.0)]) is None


def test_a_program_that_times_the_host_runs_alone(fake: Fake) -> None:
    fake.cases = ["c", "d"]
    queue = fake.queue(shares=True)
    first, second = queue.waiting()
    alone = dataclasses.replace(second.job, program=dataclasses.replace(fake.program(), times_host=True))
    second = dataclasses.replace(second, job=alone)
    made = slots.Slots(queue, 2, 40.0)
    found = made._next([first, second], [], 2, 60.0)
    assert found and found.batch == [first]
    assert made._next([second], [found], 2, 60.0) is None
    found = made._next([second], [], 2, 60.0)
    assert found and found.batch == [second] and made._next([first], [found], 2, 60.0) is None


def test_what_failed_is_told_where_no_time_is_left(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing begins after the end of the time, such as what has waited for the GPU."""
    fake.cases = ["bad"]
    queue = fake.queue(shares=True)
    (one,) = queue.waiting()
    made = slots.Slots(queue, 2, 40.0)
    assert made._measure(queue, slots.Running(0, [one], 1.0), time.monotonic() - 1) == (set(), {})
    assert not queue.calls
    runs = iter([{"program: bad": "a reason"}, {}])
    monkeypatch.setattr(made, "_run", lambda pool, queues, waiting, deadline, failed: failed.update(next(runs)))
    assert made.work(60) == {"program: bad": "a reason"}


def test_cores_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots.os, "sched_getaffinity", lambda process: {4, 5, 6, 7, 9})
    assert slots.core_groups(2) == [[4, 5], [6, 7, 9]]
    assert slots.core_groups(6)[0] == [4, 5, 6, 7, 9] and all(slots.core_groups(6))


def test_an_interrupted_call_leaves_no_slot_behind(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.cases = ["slow", "slower"]
    fake.edit("benchmarks/program.py", "CASES[case][1]", "60")
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def noted(*args: Any, **options: Any) -> Any:
        started.append(popen(*args, **options))
        return started[-1]

    def interrupted(*arguments: Any, **options: Any) -> Any:
        while len(started) < 2:
            time.sleep(0.1)
        raise KeyboardInterrupt

    queue = fake.queue(shares=True)
    queue.waiting()  # calls git
    monkeypatch.setattr(job_queue.subprocess, "Popen", noted)
    monkeypatch.setattr(slots, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure.work(queue, 60, slots=2)
    assert [one.wait(10) for one in started if "program.py" in str(one.args)] == [-signal.SIGKILL] * 2


def test_estimates_are_of_earlier_calls(fake: Fake) -> None:
    fake.cases = ["a", "b", "slow"]
    queue = fake.queue()
    jobs = {job.name: job for job in queue.jobs()}
    assert queue.estimate(jobs["a"]) is None
    queue.note(jobs["a"], seconds=10.0)
    queue.note(jobs["b"], seconds=30.0, stopped=True)
    queue = fake.queue()
    assert queue.estimate(jobs["a"]) == 10
    assert queue.estimate(jobs["b"]) == pytest.approx(36)
    assert queue.estimate(jobs["slow"]) == 10  # the median of the same program's that ended


def test_a_dry_run_prints_the_calls(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.edit("kernel_src/norm.cu", "launch(p);", "launch(p, 2);")
    before = (fake.results / "gpu-program.json").read_text()
    assert measure.work(fake.queue(), 60, dry=True) == 0
    call, left = capsys.readouterr().out.splitlines()
    assert call.endswith(f"--output {fake.results / 'gpu-program.json'} --cases a b") and left.startswith(
        "left on gpu: 2"
    )
    assert (fake.results / "gpu-program.json").read_text() == before


def test_every_result_file_is_known() -> None:
    unknown = [path.name for path in RESULTS.glob("*.json") if staleness.is_unknown(path.stem)]
    assert not unknown, "name the program in PROGRAMS of benchmarks/records.py, or the trial in its BY_HAND"
    assert staleness.is_unknown("h200-no-such-program")
    assert records.is_by_hand("h200-gemm-tuning") and not records.is_by_hand("h200-ops")


def test_every_record_has_a_job() -> None:
    """Each record of a program's file is what one of its calls measures, with options that the program has."""
    jobs = staleness.jobs_in(RESULTS)
    found = {(job.file, job.name) for job in jobs}
    for path in RESULTS.glob("*.json"):
        program = records.program_of(path.stem)
        if program is not None and path.stem.removesuffix("-profile") == path.stem:
            assert {(path.stem, program.job_of(record)) for record in records.records_in(path)} <= found, path
    shared = (BENCHMARKS / "runs.py").read_text()
    for job in jobs:
        program = (REPOSITORY / job.program.script).read_text() + shared
        for option in filter(None, (*job.options, job.program.flag, "--output")):
            assert not option.startswith("--") or f'"{option.partition("=")[0]}"' in program, (job.title, option)


def test_the_function_of_a_case_is_in_its_name() -> None:
    """Its sources are found by it."""
    assert {case.name for case in op_cases.cases() if records.function_of(case.op) != case.function} == set()


@pytest.fixture(scope="module")
def present() -> sources.Sources:
    return sources.Sources(sources.working_tree())


def test_every_function_leads_to_its_kernel(present: sources.Sources) -> None:
    kernels = {
        "rmsnorm": "norm", "layernorm": "norm", "adaln_rmsnorm_pair": "norm_pair",
        "norm_gated_residual_norm": "norm_branch",
        "qk_norm_rope": "rope", "apply_rotary": "rope", "rope_3d": "rope", "attention": "attention_hopper",
        "qk_norm_cross_attention": "attention", "swiglu": "glu", "gate_heads": "glu", "gelu": "glu",
        "rmsnorm_quant": "norm_quant", "quantize_rows": "quant", "gelu_quant": "quant", "channel_norm": "channels_last",
        "group_norm_residual": "group_norm", "upsample_nearest": "group_norm",
    }  # fmt: skip
    for function, kernel in kernels.items():
        assert f"kernel_src/{kernel}.cu" in present.of_functions(frozenset([function]), frozenset(), "cuda"), function
    files = present.of_functions(frozenset(["rmsnorm"]), frozenset(), "cuda")
    assert not files & {"kernel_src/rope.cu", "kernel_src/glu.cu", "kernel_src/attention.cu"}
    assert "kernel_src/cpu/norm.cpp" in present.of_functions(frozenset(["rmsnorm"]), frozenset(), "cpu")
    assert "kernel_src/norm_pair.cu" in present.of_functions(frozenset(["residual_norm_pair"]), frozenset(), "cuda")
    functions = {case.function for case in op_cases.cases()}
    assert functions <= present.public.keys()


@pytest.mark.parametrize(
    "program, name, family",
    [
        ("models", "flux", "diffusers/flux.py"),
        ("models", "sd35", "diffusers/sd3.py"),
        ("models", "hyvideo15", "diffusers/hunyuan_video15.py"),
        ("models", "cogvideox", "diffusers/cogvideox.py"),
        ("vae", "wan decode 49x512x768 bf16", "diffusers/vae_wan.py"),
        ("llm", "gemma3-12b 512x1 of 48 layers", "transformers/gemma.py"),
        ("train-llm", "qwen3-8b 1x4096", "transformers/qwen3.py"),
        ("clip", "ltx2 distilled 121x512x768", "diffusers/ltx2.py"),
    ],
)
def test_a_model_leads_to_its_family(present: sources.Sources, program: str, name: str, family: str) -> None:
    (known,) = [one for one in records.PROGRAMS if one.file == f"{{machine}}-{program}"]
    parts = present.of(records.Job(known, "h200", name).subject)
    assert sources.INTEGRATIONS + family in parts
    assert sources.INTEGRATIONS + "diffusers/bria.py" not in parts  # another family
    assert "kernel_src/rope.cu" in parts and "benchmarks/steps.py: synchronize" in parts
    assert (
        ("kernel_src/row_sums.cu" in parts) == ("kernel_src/norm_backward.cu" in parts) == program.startswith("train")
    )


def test_list_runs() -> None:
    command = [
        sys.executable,
        str(BENCHMARKS / "measure.py"),
        "--list",
        "--machine",
        "h100-80gb-hbm3",
        "--only",
        "attention",
    ]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert "attention: ltx49 (" in process.stdout and "attention: wan (never measured)" in process.stdout
    assert re.search(r"^left on h100-80gb-hbm3: \d+ of \d+ jobs", process.stdout, re.MULTILINE)
    assert not list(RESULTS.glob("*-queue.json"))


def test_only_this_machine_can_be_measured() -> None:
    with pytest.raises(SystemExit):
        measure.main(["--machine", "h200"])


def test_a_call_that_is_ended_ends_its_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM raises, as an interrupt does, and does not end Python at once."""
    monkeypatch.setattr(measure, "stale_builds", lambda *arguments: [])
    monkeypatch.setattr(measure, "work", lambda *arguments: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="stopped by SIGTERM"):
            measure.main(["--output", str(tmp_path)])
    finally:
        signal.signal(signal.SIGTERM, before)


def test_builds_of_other_sources_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "stale_builds", lambda *arguments: ["torch-cpu"])
    with pytest.raises(
        SystemExit, match=r"torch-cpu: made from other sources or of another commit; run python tools/build.py"
    ):
        measure.main([])


def test_builds_of_another_commit_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their records would name it, although the benchmarks are of this one."""
    made = {path.parent.name: json.loads(path.read_text()) for path in REPOSITORY.glob("build/*/metadata.json")}
    known = {name: metadata for name, metadata in made.items() if "kernel" in metadata["provenance"]}
    if not known:
        pytest.skip("build/ was made without git")
    history = types.SimpleNamespace(is_whole=True, git=lambda *arguments: f"{'f' * 40}\n")
    monkeypatch.setattr(measure, "History", lambda root: history)
    for device in ("cpu", "cuda"):
        of_another = {name for name, metadata in known.items() if metadata["backend"]["type"] == device}
        assert (
            of_another <= set(measure.stale_builds(REPOSITORY, device)) <= {name for name in made if device[:2] in name}
        )


PYTHON = "torch-ext/ltx_kernels/integrations/engine/sites.py"


@pytest.mark.parametrize("place", ["kernel_src/rope.cu", pytest.param(PYTHON, marks=pytest.mark.repeated)])
def test_an_edit_changes_no_page(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page says of stale figures follows from the result files and the history alone."""
    import readme
    from pages import marks

    if not sources.History().is_whole:
        pytest.skip("needs the repository with all of its commits")
    read: Callable[..., str] = Path.read_text
    opened = []

    def edited(path: Path, *arguments: object, **options: object) -> str:
        opened.append(str(path))
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", edited)
    marks._jobs.cache_clear()
    assert "h200-counters.json" in readme.marked("docs/profiling.md", "counters")
    assert not any(path.endswith(place) for path in opened)
    assert any(path.endswith(".json") for path in opened)


def test_a_file_is_written_as_others_are(tmp_path: Path) -> None:
    program = records.Program("benchmarks/ops.py", "{machine}-ops")
    queue = measure.Queue(REPOSITORY, tmp_path, tmp_path, ["gpu"], programs=[program])
    queue.note(records.Job(program, "gpu", ""), seconds=1.0)
    text = (tmp_path / "gpu-queue.json").read_text()
    assert text == result_files.as_text(json.loads(text)) and records.is_ledger("gpu-queue")
