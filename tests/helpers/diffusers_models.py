"""A pytest plugin: diffusers' own tests of its LTX-Video transformer, on optimized models (`make test-diffusers`).

Every model that a test constructs or loads goes through `optimize`, as a user's would: one that is constructed at once,
one that is loaded when `from_pretrained` returns it. STOCK=1 leaves them alone: a test that fails there as well is not
this package's. At the end stands how many models were optimized, and what their calls ran; where nothing ran the ops,
the tests have shown nothing and count as failed.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from typing import Any

import pytest
from diffusers import LTXVideoTransformer3DModel
from kernels import get_kernel

from .build import BACKEND, REPO_ID, use_own_build_by_default

_reports: list[Any] = []
_loading = 0


def _optimize_all_models() -> None:
    use_own_build_by_default()
    ltx = get_kernel(REPO_ID, version=1, backend=BACKEND)
    construct, load = LTXVideoTransformer3DModel.__init__, LTXVideoTransformer3DModel.from_pretrained.__func__

    @functools.wraps(construct)
    def constructed(self: Any, *args: Any, **options: Any) -> None:
        construct(self, *args, **options)
        if not _loading:
            _reports.append(ltx.optimize(self))

    @functools.wraps(load)
    def loaded(cls: type, *args: Any, **options: Any) -> Any:
        global _loading
        _loading += 1  # also its configuration is what constructs it
        try:
            model = load(cls, *args, **options)
        finally:
            _loading -= 1
        _reports.append(ltx.optimize(model[0] if isinstance(model, tuple) else model))
        return model

    LTXVideoTransformer3DModel.__init__ = constructed
    LTXVideoTransformer3DModel.from_pretrained = classmethod(loaded)


if not os.environ.get("STOCK"):
    _optimize_all_models()


def _count() -> tuple[int, int, Counter[str]]:
    """(calls that ran the ops, calls that torch.compile traced with them, calls of stock modules by reason)."""
    sites = [site for report in _reports for site in report.sites]
    fallbacks: Counter[str] = Counter()
    for site in sites:
        fallbacks.update({f"{site.name}: {reason}": count for reason, count in site.fallbacks.items()})
    return sum(site.calls for site in sites), sum(site.traces for site in sites), fallbacks


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        raise pytest.UsageError("-n: expected one process, whose models are counted; got several")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    calls, traces, fallbacks = _count()
    terminalreporter.section("ltx-kernels")
    terminalreporter.line(f"{len(_reports)} models optimized; {calls} calls ran the ops, {traces} more were traced")
    for reason, count in fallbacks.most_common():
        terminalreporter.line(f"stock calls, {count}: {reason}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if not os.environ.get("STOCK") and not session.config.option.collectonly and not sum(_count()[:2]):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
