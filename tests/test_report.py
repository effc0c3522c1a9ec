"""The report of `optimize`: what it counts, and that it shows all of it."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def test_op_calls_and_stock_calls_are_told_apart(ltx: ModuleType, device: str) -> None:
    """Each call is counted once: as one of the ops, or as a stock call with its reason."""
    model = Model().to(device)
    x = torch.randn(2, 16, device=device)
    report = ltx.optimize(model)
    with torch.no_grad():
        for _ in range(3):
            model(x)
        with torch.autocast(device, torch.bfloat16):
            model(x)
    for _ in range(2):
        model(x)
    (site,) = report.sites
    assert (site.modules, site.calls, site.traces) == (1, 3, 0)
    assert report.fallbacks == {"torch.RMSNorm": {"autocast is on": 1, "a gradient is needed": 2}}
    header, row, *reasons = str(report).splitlines()[1:]
    assert header.split()[:5] == ["modules", "class", "calls", "traced", "stock"]
    assert row.split()[:5] == ["1", "torch.RMSNorm", "3", "0", "3"]
    assert reasons == [
        "stock call of torch.RMSNorm, 1 x: autocast is on",
        "stock call of torch.RMSNorm, 2 x: a gradient is needed",
    ]
    report.restore()


@pytest.fixture
def report(ltx: ModuleType) -> Any:
    return importlib.import_module(f"{ltx.__name__}.integrations._report").Report("Model")


def test_what_is_left_alone_is_grouped_by_its_reason(report: Any) -> None:
    report.left_alone = {**{f"a.{i}": "quantised" for i in range(5)}, "b": "quantised too", "": "a subclass"}
    report.notes = ["a note", "another"]
    assert str(report).splitlines() == [
        "ltx-kernels: Model",
        "nothing was replaced",
        "left alone: a.0, a.1, a.2 and 2 more: quantised",
        "left alone: b: quantised too",
        "left alone: the model: a subclass",
        "a note",
        "another",
    ]
