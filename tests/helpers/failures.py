"""A file that names each test that fails, as it fails: a run that is interrupted keeps what it has."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

FAILURES = "LTX_TEST_FAILURES"  # the environment variable with the file's path
LINES, COLUMNS = 4, 240


def first_lines(report: Any) -> list[str]:
    """What went wrong in a test that failed."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:  # of a worker that died, or of a file that cannot be imported
        lines = report.longreprtext.strip().splitlines()[-1:]
    else:
        lines = [f"{Path(crash.path).name}:{crash.lineno}: {line}" for line in crash.message.splitlines()[:LINES]]
    return [line[:COLUMNS] for line in lines]


class Failures:
    """The plugin of pytest that writes the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            with self.path.open("a") as file:
                file.write(json.dumps([report.nodeid, first_lines(report)]) + "\n")

    pytest_collectreport = pytest_runtest_logreport


def name_failures(config: pytest.Config) -> None:
    """Begins to write where the environment says so. No worker inherits that, and no pytest that a test starts."""
    path = os.environ.pop(FAILURES, None)
    if path:
        config.pluginmanager.register(Failures(Path(path)))


def read_failures(path: Path) -> dict[str, list[str]]:
    """The first lines of what went wrong, by the tests' names; empty where there is no file."""
    if not path.exists():
        return {}
    return dict(json.loads(line) for line in path.read_text().splitlines())
