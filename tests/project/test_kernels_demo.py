"""examples/kernels_demo.py: its races run, each way computes what it says, and a wrong one is noticed."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.dispatch import Namespaces
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import kernels_demo as demo  # noqa: E402
from command_line import ExampleError  # noqa: E402
from timing import HostTimer, Timing  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def bench(ltx: ModuleType) -> demo.Bench:
    return demo.prepare(short=True, compiles=False)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "fetch_community", lambda: (None, "no network here"))


@pytest.mark.extended
def test_every_race(
    ltx: ModuleType, traced_compile: list[Any], offline: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--short", "--output", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "left out: no network here" in output
    races = json.loads((tmp_path / "results.json").read_text())["races"]
    assert tuple(races) == demo.NAMES == tuple(demo.RACES)
    for name, records in races.items():
        assert demo.RACES[name].title in output
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        for record in records:
            assert {demo.PLAIN, demo.OURS, demo.COMPILED} <= record["us"].keys() == record["error"].keys()
            assert min(*record["us"].values(), record["floor_us"]) > 0
    assert races["mlp"][0]["floor"] == races["layer"][0]["floor"] == demo.PRODUCTS
    assert demo.OURS_COMPILED in races["layer"][0]["us"]
    assert races["gelu"][0]["floor"] == demo.COPY
    # Two sizes of seven races, and of the layer the optimized one as well.
    assert len(traced_compile) == 16


@pytest.mark.parametrize("name", demo.NAMES)
def test_the_package_alone_runs_its_ops(bench: demo.Bench, ltx: ModuleType, backend: str, name: str) -> None:
    if backend != bench.device:
        pytest.skip("without a GPU the CUDA variant runs the reference")
    entry = demo.RACES[name].make(bench, demo.RACES[name].short[0])
    for way, function in entry.ways.items():
        with torch.no_grad(), Namespaces() as namespaces:
            function(*entry.tensors)
        assert (ltx._ops.ops.name in namespaces.seen) == way.startswith("this package"), way


def doubled_residual(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The fault of a published benchmark: the sum is normalised and gets the residual again."""
    stream = x + residual
    return demo.native_norm(stream + residual, weight), stream


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "the erf form": ("gelu", F.gelu),
    "the residual twice": ("rmsnorm_residual", doubled_residual),
    "no weight": ("rmsnorm", lambda x, weight: F.rms_norm(x, weight.shape, None, 1e-6)),
    "halves exchanged": ("swiglu", lambda x: demo.silu_and_mul(torch.cat(x.chunk(2, -1)[::-1], -1))),
    "not a number": ("rmsnorm", lambda x, weight: x * float("nan")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_way_is_noticed(bench: demo.Bench, fault: str) -> None:
    name, wrong = FAULTS[fault]

    def make(bench: demo.Bench, size: int) -> demo.Entry:
        entry = demo.RACES[name].make(bench, size)
        return dataclasses.replace(entry, ways={**entry.ways, "wrong": wrong})

    with pytest.raises(ExampleError, match=r"^wrong: expected an error of at most .* against float64, got "):
        demo.race(bench, make, [demo.RACES[name].short[1]])


def test_hub_kernels_write_into_an_output(bench: demo.Bench) -> None:
    """`gelu_fast` is compared with the tanh form."""
    hub = ModuleType("activation")
    hub.gelu_fast = lambda out, x: out.copy_(F.gelu(x, approximate="tanh"))  # type: ignore[attr-defined]
    hub.silu_and_mul = lambda out, x: out.copy_(demo.silu_and_mul(x))  # type: ignore[attr-defined]
    for make, size in ((demo.gelu, 1024), (demo.swiglu, 4)):
        (record,) = demo.race(bench, partial(make, hub=hub), [size])
        assert record.error[demo.HUB] < 1e-6 and demo.HUB in record.us


def test_a_stock_forward_is_no_result(bench: demo.Bench, ltx: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that fell back would be compared with itself."""
    monkeypatch.setattr(ltx.integrations.blocks.block, "why_not_input", lambda *tensor, **options: "it is Saturday")
    with pytest.raises(ExampleError, match=r"^layer: the stock forward ran: .*it is Saturday"):
        demo.race(bench, demo.layer, [4])


def test_first_tokens_of_a_layer_stand_for_all(bench: demo.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "EXACT_TOKENS", 5)
    (record,) = demo.race(bench, demo.layer, [8])
    assert 0 < record.error[demo.OURS] < 1e-6

    def not_causal(bench: demo.Bench, tokens: int) -> demo.Entry:
        entry = demo.layer(bench, tokens)
        mixed = lambda *tensors: entry.ways[demo.PLAIN](*tensors) + entry.tensors[0].mean()  # noqa: E731
        return dataclasses.replace(entry, ways={**entry.ways, "mixed": mixed})

    with pytest.raises(ExampleError, match=r"^mixed: expected an error"):
        demo.race(bench, not_causal, [8])


def test_patched_mlp(bench: demo.Bench) -> None:
    mlp: Any = demo.llama_mlp(bench)
    x = bench.random(3, bench.hidden)
    stock = mlp(x)
    demo.patch_mlp(bench.ltx, mlp)
    torch.testing.assert_close(mlp(x), stock)
    assert demo.bytes_moved(lambda: bench.ltx.swiglu(torch.cat([x, x], -1))) > 0
    del mlp.forward
    assert torch.equal(mlp(x), stock)


def test_bytes_moved(bench: demo.Bench) -> None:
    """An op reads its inputs and writes its result; views move nothing."""
    x = bench.random(8, 64)
    half = x.nbytes // 2
    assert demo.bytes_moved(lambda: x.chunk(2, -1)[0].view(8, 32)) == 0
    assert demo.bytes_moved(lambda: x + 1) == 2 * x.nbytes
    assert demo.bytes_moved(lambda: x.clone().add_(x)) == 2 * x.nbytes + 3 * x.nbytes
    # SiLU reads a half and writes one, the product reads two and writes one; in one kernel two are read, one written.
    assert demo.bytes_moved(lambda: demo.silu_and_mul(x)) == 5 * half
    assert demo.bytes_moved(lambda: bench.ltx.swiglu(x)) == 3 * half


def record(size: int, plain: float, ours: float, compiled: float) -> demo.Record:
    us = {demo.PLAIN: plain, demo.OURS: ours, demo.COMPILED: compiled}
    return demo.Record(size, size * 1000, us, 1.0, demo.COPY, dict.fromkeys(us, 1e-3))


def test_verdict_names_every_loss() -> None:
    lines = demo.verdict([record(64, 5, 6, 5.5), record(8192, 100, 10, 10.1)]).lines
    assert lines == [
        "8,192 tokens: this package takes 10.0 µs, a copy of the same bytes 1.0 µs; "
        "plain torch takes 10.00 times as long.",
        "64 tokens: plain torch is faster, 5.0 µs against 6.0 µs.",
        "The largest error of this package against float64 is 1.0e-03.",
    ]
    assert "At no size" in str(demo.verdict([record(64, 6, 5, 5)]))


def test_plots_ring_the_losses(bench: demo.Bench) -> None:
    from matplotlib import pyplot

    figure = demo.plot(bench, [record(64, 5, 6, 5.5), record(8192, 100, 10, 10.1)], "A race")
    times, bandwidth, speedups = figure.axes
    assert [line.get_label() for line in times.lines] == [demo.PLAIN, demo.OURS, demo.COMPILED, demo.COPY]
    ours = dict(zip((line.get_label() for line in bandwidth.lines), (line.get_ydata() for line in bandwidth.lines)))
    assert list(ours[demo.OURS]) == pytest.approx([64 / 6, 819.2])  # GB/s
    (ring,) = [line for line in speedups.lines if line.get_label() == "another way is faster"]
    assert list(ring.get_xdata()) == [64] and list(ring.get_ydata()) == [pytest.approx(5 / 6)]
    pyplot.close(figure)


def test_table_of_losses(bench: demo.Bench) -> None:
    from matplotlib import pyplot

    races = {
        "one": [record(64, 5, 6, 5.5), record(8192, 100, 10, 10.1)],
        "two": [record(64, 6, 3, 7), record(8192, 8, 4, 6)],
    }
    figure = demo.plot_ahead(bench, races)
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["0.83", "1.01", "2.00", "1.50"]
    pyplot.close(figure)


def test_bars_of_bytes(bench: demo.Bench) -> None:
    from matplotlib import pyplot

    x = bench.random(1000, 250)
    calls = {"a": {demo.PLAIN: lambda: demo.silu_and_mul(x), demo.OURS: lambda: bench.ltx.swiglu(x)}}
    figure = demo.plot_bytes(calls)
    half = x.nbytes / 2e6
    assert [bar.get_width() for bar in figure.axes[0].patches] == pytest.approx([5 * half, 3 * half])
    pyplot.close(figure)


def test_source(tmp_path: Path) -> None:
    path = tmp_path / "file.cu"
    path.write_text("int a() {\n  return 1;\n}\n\nint b() {\n  if (1) {\n  }\n  return 2;\n}\n\nint c();\n")
    assert str(demo.Source(path, "int b()")) == "int b() {\n  if (1) {\n  }\n  return 2;\n}\n"


def test_host_timer() -> None:
    """The median of samples in turns; what a first call does once is not in them."""
    order: list[str] = []
    timer = HostTimer(rounds=3, seconds=0)
    measured = timer.measure({name: partial(order.append, name) for name in "ab"})
    assert order == [*"aabb", *3 * ["a", "b"]]
    assert all(isinstance(time, Timing) and 0 < time.median <= time.p90 for time in measured.values())


@pytest.mark.slow
def test_compiled_for_real(ltx: ModuleType, offline: None, tmp_path: Path) -> None:
    torch.compiler.reset()
    assert demo.main(["--short", "--output", str(tmp_path)]) == 0
