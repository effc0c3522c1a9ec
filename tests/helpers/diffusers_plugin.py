"""A pytest plugin: diffusers' own tests on optimized models (tests/diffusers_tests.py starts pytest with it).

Every model of a known class that a test constructs or loads goes through `optimize`, as a user's would: one that is
constructed at once, one that is loaded when it has its weights. STOCK=1 leaves them alone. Both import the installed
diffusers before a conftest.py can put another one in its place.

The file that LTX_TEST_OUTCOMES names gets one line of JSON for each test that begins, for each phase of a test that
ends, and for the models at the end, so that a process that dies leaves what it has.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from diffusers.loaders.single_file_model import FromOriginalModelMixin
from diffusers.models.modeling_utils import ModelMixin
from kernels import get_kernel

from .build import BACKEND, REPO_ID, use_own_build_by_default
from .diffusers_models import known_models
from .failures import first_lines

OUTCOMES = Path(os.environ["LTX_TEST_OUTCOMES"])
STOCK = bool(os.environ.get("STOCK"))

_reports: list[Any] = []
_models: Counter[str] = Counter()
_making = 0  # constructors and loaders that are running, one inside another


def _optimize_all_models() -> None:
    use_own_build_by_default()
    ltx = get_kernel(REPO_ID, version=1, backend=BACKEND)
    models = known_models(ltx)

    def outermost(make: Callable[..., Any], model_of: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        """A constructor or loader, which optimizes what it has made unless another one has called it."""

        @functools.wraps(make)
        def made(owner: Any, *args: Any, **options: Any) -> Any:
            global _making
            _making += 1
            try:
                result = make(owner, *args, **options)
            finally:
                _making -= 1
            model = model_of(owner, result)
            if not _making and type(model) in models.values():
                _reports.append(ltx.optimize(model))
                _models[type(model).__name__] += 1
            return result

        return made

    for cls in models.values():
        cls.__init__ = outermost(cls.__init__, lambda model, _: model)
    for mixin, name in ((ModelMixin, "from_pretrained"), (FromOriginalModelMixin, "from_single_file")):
        load = getattr(mixin, name).__func__
        setattr(mixin, name, classmethod(outermost(load, lambda _, got: got[0] if isinstance(got, tuple) else got)))


if not STOCK:
    _optimize_all_models()


def _write(**line: Any) -> None:
    with OUTCOMES.open("a") as file:
        file.write(json.dumps(line) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(test=nodeid, outcome="begun")


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or not report.passed:
        _write(test=report.nodeid, outcome=report.outcome, lines=first_lines(report) if report.failed else [])


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        pytest_runtest_logreport(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    sites = [site for report in _reports for site in report.sites]
    stock_calls: Counter[str] = Counter()
    for site in sites:
        stock_calls.update({f"{site.name}: {reason}": count for reason, count in site.fallbacks.items()})
    _write(
        models=_models,
        calls=sum(site.calls for site in sites),
        traces=sum(site.traces for site in sites),
        stock_calls=stock_calls,
    )
