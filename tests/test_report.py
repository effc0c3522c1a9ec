"""The report of `optimize`: what it counts, and that it shows all of it."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

AUTOCAST = "autocast is on in torch.bfloat16, the input has dtype torch.float32"


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
    report = ltx.optimize(model, graphs=False)
    with torch.no_grad():
        for _ in range(3):
            model(x)
        with torch.autocast(device, torch.bfloat16):
            model(x)
    for _ in range(2):
        model(x)
    (site,) = report.sites
    assert (site.modules, site.calls, site.traces) == (1, 3, 0)
    assert report.fallbacks == {"torch.RMSNorm": {AUTOCAST: 1, "a gradient of its weight is needed": 2}}
    header, row, *reasons = str(report).splitlines()[1:]
    assert header.split()[:5] == ["modules", "class", "calls", "traced", "stock"]
    assert row.split()[:5] == ["1", "torch.RMSNorm", "3", "0", "3"]
    assert reasons == [
        "stock call of torch.RMSNorm, 1 x: " + AUTOCAST,
        "stock call of torch.RMSNorm, 2 x: a gradient of its weight is needed",
    ]
    report.restore()


def test_stock_calls_of_all_sites_of_a_class_are_added_up(report: Any) -> None:
    """Modules of one class may be of two sites, by their processors."""
    counts = {AUTOCAST: 1}, {AUTOCAST: 2, "a gradient is needed": 3}
    report.sites = [SimpleNamespace(name="torch.RMSNorm", fallbacks=Counter(count)) for count in counts]
    assert report.fallbacks == {"torch.RMSNorm": {AUTOCAST: 3, "a gradient is needed": 3}}


@pytest.fixture
def report(ltx: ModuleType) -> Any:
    return importlib.import_module(f"{ltx.__name__}.integrations.report").Report("Model")


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


def idle_module(ltx: ModuleType) -> Any:
    return importlib.import_module(f"{ltx.__name__}.integrations.idle")


@pytest.mark.parametrize(
    ("spans", "expected"),
    [([], 0), ([(0, 2), (5, 6)], 3), ([(5, 6), (0, 2), (1, 4)], 5), ([(0, 10), (2, 3), (10, 11)], 11)],
)
def test_device_time_that_overlaps_counts_once(ltx: ModuleType, spans: Any, expected: float) -> None:
    assert idle_module(ltx).covered(spans) == expected


@pytest.mark.parametrize(
    ("wall_us", "graphs", "share", "text"),
    [
        (10.0, False, 0.7, "the GPU is idle for 70% of a call: optimize(..., graphs=True) may save that"),
        (3.2, False, 0.0625, "the GPU is idle for 6% of a call: CUDA graphs would not help"),
        (2.9, False, 0.0, "the GPU is idle for 0% of a call: CUDA graphs would not help"),
        (10.0, True, 0.7, "the GPU is idle for 70% of a call: with CUDA graphs on"),
    ],
)
def test_idle_share(
    ltx: ModuleType, monkeypatch: pytest.MonkeyPatch, wall_us: float, graphs: bool, share: float, text: str
) -> None:
    """The clock of the ordinary call and the kernels of the profiled one, both made up here."""
    module, order = idle_module(ltx), []

    def wall(call: Any) -> float:
        call()
        return wall_us

    def work(call: Any) -> list[tuple[float, float]]:
        call()
        return [(100.0, 102.0), (101.0, 102.0), (200.0, 201.0)]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "_wall_us", wall)
    monkeypatch.setattr(module, "_device_work", work)
    report = importlib.import_module(f"{ltx.__name__}.integrations.report").Report("Model")
    found = SimpleNamespace(replayed=3, lines=lambda name: [f"graphs of {name}: 1"])
    monkeypatch.setattr(type(report), "_graphs", lambda self: [("Model", found)] if graphs else [])
    assert "idle" not in str(report)
    assert report.idle_share(lambda: order.append("call")) == pytest.approx(share)
    assert len(order) == 4 and text in str(report).splitlines()


def test_idle_share_of_what_cannot_be_measured(ltx: ModuleType, report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"^call: expected a function without arguments, got int$"):
        report.idle_share(3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"^call: expected a GPU to run on, got none$"):
        report.idle_share(lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(idle_module(ltx), "_wall_us", lambda call: 5.0)
    monkeypatch.setattr(idle_module(ltx), "_device_work", lambda call: [])
    with pytest.raises(RuntimeError, match=r"^call: expected work on the GPU, got none$"):
        report.idle_share(lambda: None)


def test_idle_share_on_a_gpu(ltx: ModuleType, cuda: str) -> None:
    """A kernel that takes far longer than its launch leaves the GPU busy; a host that sleeps leaves it idle."""
    x = torch.randn(8192, 8192, device=cuda)
    report = ltx.optimize(Model().to(cuda))
    assert report.idle_share(lambda: x @ x) < 0.3
    assert report.idle_share(lambda: (time.sleep(0.2), x.sum())) > 0.5

    def part_of_a_program() -> None:
        with torch.profiler.record_function("a part"):
            x.sum()
            time.sleep(0.2)
            x.sum()

    assert report.idle_share(part_of_a_program) > 0.5


def test_a_name_that_the_host_gives_is_no_work(ltx: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiler lists a part of the program as an event on the GPU, from its first kernel to its last."""

    def event(start: float, end: float, named: bool) -> SimpleNamespace:
        span = SimpleNamespace(start=start, end=end)
        device = torch.autograd.DeviceType.CUDA
        return SimpleNamespace(device_type=device, is_user_annotation=named, time_range=span)

    profile = SimpleNamespace(events=lambda: [event(0, 9, True), event(0, 1, False), event(8, 9, False)])
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: contextlib.nullcontext(profile))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert idle_module(ltx)._device_work(lambda: None) == [(0, 1), (8, 9)]
