"""benchmarks/case_study.py: the tables of docs/case-study.md, and the command that measures them."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers.build_checks import ROOT

BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import case_study  # noqa: E402
from pages import case_study as page  # noqa: E402
from pages import ltx, writing  # noqa: E402
from pages.names import CONFIGS  # noqa: E402
from plots import load  # noqa: E402


def test_the_norms_share_explains_both_figures() -> None:
    part = int(re.search(r"took (\d+) %", page.claim())[1]) / 100
    kernel, clip = page.REPORTED["kernel"], page.REPORTED["clip"]
    assert 1 / (1 - part + part / kernel) == pytest.approx(clip, abs=0.005)


@pytest.mark.parametrize("config", ["baseline", "kernels", "compile"])
def test_every_kernel_is_in_one_row(config: str) -> None:
    """Products and attention are those of `ms_by_kind`, which knows more names."""
    step: dict[str, Any] = next(r for r in load("h200-ltx")["records"] if (r["config"], r["frames"]) == (config, 49))
    if config != "baseline":
        step = {**step, "kernels": [k for k in step["kernels"] if k["kind"] in ("GEMM", "attention")]}
    parts = page.work(step)
    assert sum(ms for ms, _ in parts.values()) == pytest.approx(sum(k["ms"] for k in step["kernels"]))
    assert sum(n for _, n in parts.values()) == sum(k["launches"] for k in step["kernels"])
    if config == "baseline":
        assert parts["matrix products"][0] == pytest.approx(step["ms_by_kind"]["GEMM"], abs=0.01)
        assert parts["attention"][0] == pytest.approx(step["ms_by_kind"]["attention"], abs=0.01)
        assert parts[page.REST][0] < 0.03 * step["step_ms"]


def cells(table: str, label: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_what_a_row_could_gain() -> None:
    """The last column is the speed-up of a step without the row."""
    step = page.steps()["baseline"]
    table, parts = page.budget(), page.work(step)
    parts["**all norms by these names**"] = tuple(map(sum, zip(*(parts[name] for name in page.NORMS))))
    assert len(page.NORMS) == 2
    for name, (part_ms, launches) in parts.items():
        ms, share, shown_launches, gain = (float(c.rstrip(" %").replace(",", "")) for c in cells(table, name))
        assert ms == pytest.approx(part_ms, abs=0.051) and shown_launches == launches
        assert share == pytest.approx(100 * part_ms / step["step_ms"], abs=0.051)
        assert gain == pytest.approx(1 / (1 - part_ms / step["step_ms"]), abs=0.0051)


def test_ratios_of_configurations() -> None:
    records = page.steps()
    table = ltx.step()
    for config in ("baseline", "compile", "kernels"):
        row = [cell.strip("*") for cell in cells(table, f"{case_study.FRAMES} | {CONFIGS[config]}")[1:]]
        ms, over_stock, over_compile, _, launches, *_ = row
        assert float(over_stock) == pytest.approx(records["baseline"]["step_ms"] / float(ms), abs=0.01)
        assert float(over_compile) == pytest.approx(records["compile"]["step_ms"] / float(ms), abs=0.01)
        assert int(launches.replace(",", "")) == sum(k["launches"] for k in records[config]["kernels"])


def test_the_copy_is_the_whole_bandwidth() -> None:
    table = page.norm()
    assert cells(table, "a copy of the same bytes")[1::2] == ["100 %", "100 %"]
    us, share, *_ = cells(table, "torch's own op")
    copy = float(cells(table, "a copy of the same bytes")[0])
    assert float(share.rstrip(" %")) == pytest.approx(100 * copy / float(us), abs=1.5)


def test_sources_are_the_files_that_the_page_quotes() -> None:
    text = (ROOT / "docs" / "case-study.md").read_text()
    quoted = set(re.findall(r"<!-- (h200-[\w-]+) ", text)) | {"h200-clip", "h200-ltx", "h200-ops"}
    assert quoted == set(page.SOURCES)
    for name in page.SOURCES:
        commits = {record.get("commit", load(name)["meta"]["commit"])[:7] for record in load(name)["records"]}
        (row,) = (line for line in page.sources().splitlines() if f"{name}.json" in line)
        assert commits == set(row.split(" | ")[4].split(", "))


def test_gaps_close_with_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [
        {"model": "ltx", "recipe": "guided", "config": "compile", "frames": 49},
        {"model": "ltx2", "recipe": "guided", "config": "compile", "frames": 121},
    ]
    monkeypatch.setattr(writing, "load", lambda name: {"records": records if name == "h200-clip" else []})
    assert page.gaps() == (
        "Not measured in these files: torch.compile of the distilled clip, torch.compile of longer clips, "
        "the decoder under torch.compile, longer and larger clips as a whole, any GPU but an H200.\n"
    )


class Runs:
    """Takes the place of subprocess.run: lists the commands, and lets some scripts fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: str = "") -> None:
        self.commands: list[list[str]] = []
        self.failing = failing
        monkeypatch.setattr(case_study.subprocess, "run", self)

    def __call__(self, command: list[str], check: bool = False) -> SimpleNamespace:
        self.commands.append([Path(command[1]).name, *command[2:]])
        return SimpleNamespace(returncode=int(Path(command[1]).name == self.failing))


def test_every_part_is_a_program_with_these_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = Runs(monkeypatch)
    assert case_study.main([]) == 0
    assert [command[0] for command in runs.commands] == ["ops.py", "ltx.py", "fp8.py", "vae.py", "clip.py", "readme.py"]
    assert case_study.main(["--tiny", "--output", str(tmp_path)]) == 0
    assert Counter(command[0] for command in runs.commands[6:]) == Counter(["ltx.py", "clip.py"])
    for script, *arguments in runs.commands:
        text = (BENCHMARKS / script).read_text() + (BENCHMARKS / "runs.py").read_text()  # the common options
        for option in (argument for argument in arguments if argument.startswith("--")):
            assert f'"{option}"' in text, f"{script} {option}"


def test_a_part_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    runs = Runs(monkeypatch, failing="fp8.py")
    assert case_study.main(["--parts", "fp8", "clip"]) == 1
    assert [command[0] for command in runs.commands] == ["fp8.py", "clip.py", "readme.py"]
    assert capsys.readouterr().err == "failed: fp8\n"


@pytest.mark.parametrize("arguments", [["--tiny"], ["--output", "x"]])
def test_small_results_stay_out_of_the_repository(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        case_study.main(arguments)
    assert "argument --output: expected together with --tiny" in capsys.readouterr().err


@pytest.mark.slow
def test_tiny(ltx: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    assert case_study.main(["--tiny", "--output", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["clip.json", "ltx.json"]
