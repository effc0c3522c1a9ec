"""optimize(..., graphs="auto"): what is captured, when, and what is dropped again.

Without a GPU, `Again` stands in for the graph, and a clock that a test sets for the events.
"""

from __future__ import annotations

import gc
import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.ltx_video import make_inputs, make_model
from test_graphs import Again
from test_vae import decode, make_vae
from torch import Tensor, nn

diffusers = pytest.importorskip("diffusers")

pytestmark = pytest.mark.usefixtures("no_grad")

MIB, GIB = 2**20, 2**30


class Clock:
    """What the next calls take, in seconds, and the memory of the device."""

    host, ordinary, replay = 0.1, 0.1, 0.02  # the GPU needs what the host needs: it waits
    done = True  # whether the GPU has finished
    free, total, size, capture = 60 * GIB, 80 * GIB, 100 * MIB, 0.05
    is_replay = False


@pytest.fixture
def clock(ltx: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock, replay = Clock(), ltx.integrations.replay

    class Timed:
        def __init__(self) -> None:
            clock.is_replay = False

        def stop(self) -> None:
            self.host, self.elapsed = clock.host, clock.replay if clock.is_replay else clock.ordinary

        def is_done(self) -> bool:
            return clock.done

    class Captured(Again):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.bytes, self.seconds = clock.size, clock.capture

        def __call__(self, leaves: Any) -> Any:
            result = super().__call__(leaves)
            clock.is_replay = True
            return result

    monkeypatch.setattr(replay.rent_or_buy, "Timed", Timed)
    monkeypatch.setattr(replay.cuda_graphs, "DEVICE", "cpu")
    monkeypatch.setattr(replay.cuda_graphs, "Captured", Captured)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (clock.free, clock.total))
    return clock


def graphs(ltx: ModuleType) -> Any:
    module = ltx.integrations.replay.cuda_graphs
    plan = module.Plan(auto=True)
    plan.price.seconds = 0.1
    return module.Graphs(plan)


def until_replayed(held: Any, module: nn.Module, size: int = 1, limit: int = 50) -> int | None:
    """How many ordinary calls come before the first replay; None: it never comes."""
    for calls in range(limit):
        before = held.replayed
        held.run(module, torch.neg, torch.ones(size))
        if held.replayed > before:
            return calls
    return None


@pytest.fixture
def module() -> nn.Module:
    return nn.Identity().eval()


def test_a_signature_is_captured_when_its_waits_have_cost_a_capture(
    ltx: ModuleType, clock: Clock, module: nn.Module
) -> None:
    """Two calls do not count, and of each later one half: 0.1 s of a capture are two calls of 0.1 s."""
    held, rule = graphs(ltx), ltx.integrations.replay.rent_or_buy
    assert until_replayed(held, module) == rule.WARM_UP + 2
    assert dict(held.ordinary) == {rule.WARMING: 2, rule.KEEPS_UP: 1, rule.NOT_YET: 1}


def test_the_price_and_the_gain_are_those_of_the_last_graph(ltx: ModuleType, clock: Clock, module: nn.Module) -> None:
    """A replay takes 0.02 s instead of 0.1 s: 0.08 s of a call are a wait. The capture took 0.3 s: four calls."""
    held, rule = graphs(ltx), ltx.integrations.replay.rent_or_buy
    clock.capture = 0.3
    until_replayed(held, module)
    for _ in range(rule.REPLAYS):
        held.run(module, torch.neg, torch.ones(1))
    assert until_replayed(held, module, size=2) == rule.WARM_UP + 4
    assert held.rule.gain == pytest.approx(0.8) and held.rule.price.seconds == 0.3


def test_the_modules_of_a_plan_know_what_a_capture_costs(ltx: ModuleType, clock: Clock, module: nn.Module) -> None:
    """0.05 s of the first module's are one call of the second's, and 0.2 s four."""
    first, rule = graphs(ltx), ltx.integrations.replay.rent_or_buy
    for capture, calls in ((0.05, 1), (0.2, 4)):
        clock.capture = capture
        assert until_replayed(first, module, calls) is not None
        second = ltx.integrations.replay.cuda_graphs.Graphs(first.plan)
        assert until_replayed(second, nn.Identity().eval()) == rule.WARM_UP + calls


def test_a_gpu_that_is_the_limit_is_never_captured(ltx: ModuleType, clock: Clock, module: nn.Module) -> None:
    held, rule = graphs(ltx), ltx.integrations.replay.rent_or_buy
    clock.host = clock.ordinary / rule.WAITS * 0.99
    assert until_replayed(held, module) is None
    assert set(held.ordinary) == {rule.WARMING, rule.KEEPS_UP}
    clock.host = clock.ordinary / rule.WAITS * 1.01
    assert until_replayed(held, module) == 2  # the third finds that both have waited


def test_nothing_waits_for_the_gpu(ltx: ModuleType, clock: Clock, module: nn.Module) -> None:
    """A call is counted when a later one finds it finished."""
    held = graphs(ltx)
    clock.done = False
    assert until_replayed(held, module) is None
    clock.done = True
    assert until_replayed(held, module) == 0


def test_a_graph_that_gains_nothing_is_dropped(ltx: ModuleType, clock: Clock, module: nn.Module) -> None:
    held, rule = graphs(ltx), ltx.integrations.replay.rent_or_buy
    clock.replay = 0.99 * clock.ordinary
    until_replayed(held, module)
    for _ in range(10):
        assert torch.equal(held.run(module, torch.neg, torch.ones(1)), -torch.ones(1))
    assert held.replayed == rule.REPLAYS and not held.captured and held.ordinary[rule.NO_GAIN] == 8
    assert held.rule.gain == rule.SHARE  # says nothing of other signatures
    clock.replay = 0.97 * clock.ordinary
    until_replayed(held, module, size=2)
    for _ in range(10):
        held.run(module, torch.neg, torch.ones(2))
    assert len(held.captured) == 1


@pytest.mark.parametrize(
    ("free", "total", "size", "stays"),
    [
        (60 * GIB, 80 * GIB, 8 * GIB, True),
        (60 * GIB, 80 * GIB, 8 * GIB + MIB, False),  # more than a tenth of the device
        (20 * GIB, 80 * GIB, 5 * GIB, True),
        (20 * GIB, 80 * GIB, 5 * GIB + MIB, False),  # more than a quarter of what was free
    ],
)
def test_a_graph_that_holds_too_much_is_dropped(
    ltx: ModuleType, clock: Clock, module: nn.Module, free: int, total: int, size: int, stays: bool
) -> None:
    held = graphs(ltx)
    clock.free, clock.total, clock.size = free, total, size
    assert (until_replayed(held, module) is not None) is stays
    reason = f"its graph was dropped: it held {size // MIB} MiB"
    assert bool(held.captured) is stays and (reason in held.ordinary) is not stays


def test_no_capture_without_memory(ltx: ModuleType, clock: Clock, module: nn.Module) -> None:
    """2 GiB and twice the last graph of the module stay free."""
    held, rule = graphs(ltx), ltx.integrations.replay.rent_or_buy
    clock.free = 2 * GIB - MIB
    assert until_replayed(held, module) is None and held.ordinary[rule.NO_MEMORY] == 46
    clock.free = 2 * GIB
    assert until_replayed(held, module) == 0
    clock.free = 2 * GIB + 2 * clock.size - MIB
    assert until_replayed(held, module, size=2) is None
    clock.free += MIB
    assert until_replayed(held, module, size=2) == 0


def test_signatures_that_do_not_recur_end_it(ltx: ModuleType, clock: Clock, module: nn.Module) -> None:
    """As prompts of their own lengths do: each is captured and soon gone."""
    held, rule = graphs(ltx), ltx.integrations.replay.rent_or_buy
    limit = ltx.integrations.replay.cuda_graphs.LIMIT
    sizes = iter(range(1, 100))
    for size in (next(sizes) for _ in range(limit + rule.SHORT_LIVED)):
        assert until_replayed(held, module, size) is not None
    assert held.rule.short_lived == rule.SHORT_LIVED and len(held.captured) == limit
    assert until_replayed(held, module, next(sizes)) is None and held.ordinary[rule.NO_RETURN] == 50
    assert until_replayed(held, module, limit + rule.SHORT_LIVED) == 0  # what is captured stays


@pytest.mark.parametrize("why", ["no gain", "too large", "fails"])
def test_captures_in_vain_end_it(
    ltx: ModuleType, clock: Clock, module: nn.Module, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Each signature would pay for one of its own."""
    held, rule = graphs(ltx), ltx.integrations.replay.rent_or_buy
    if why == "no gain":
        clock.replay = clock.ordinary
    elif why == "too large":
        clock.size = clock.total
        monkeypatch.setattr(rule, "FREE", -10 * clock.total)
    else:
        monkeypatch.setattr(held.plan, "capture", lambda *args: torch.ones(2) @ torch.ones(3))
    for size in range(1, rule.SHORT_LIVED + 1):
        for _ in range(20):
            held.run(module, torch.neg, torch.ones(size))
    assert held.rule.short_lived == rule.SHORT_LIVED and len(held.refused) == rule.SHORT_LIVED
    assert until_replayed(held, module, size=99) is None and held.ordinary[rule.NO_RETURN] == 50


def test_replays_that_are_read_after_their_graph_is_gone(ltx: ModuleType, clock: Clock, module: nn.Module) -> None:
    """They say nothing of the next graph of the signature."""
    held, rule = graphs(ltx), ltx.integrations.replay.rent_or_buy
    until_replayed(held, module)
    clock.done, clock.replay = False, 2 * clock.ordinary
    for _ in range(rule.REPLAYS):
        held.run(module, torch.neg, torch.ones(1))
    module.register_buffer("new", torch.ones(1))  # the state has changed, and the GPU is not through
    held.run(module, torch.neg, torch.ones(1))
    clock.done, clock.replay = True, 0.02
    assert until_replayed(held, module) is not None
    for _ in range(10):
        held.run(module, torch.neg, torch.ones(1))
    assert len(held.captured) == 1 and not held.refused


def test_a_captured_signature_among_many_others(ltx: ModuleType, clock: Clock, module: nn.Module) -> None:
    """More of them than are remembered."""
    held, rule = graphs(ltx), ltx.integrations.replay.rent_or_buy
    until_replayed(held, module)
    for size in range(2, rule.KEPT + 3):
        held.run(module, torch.neg, torch.ones(size))
    for _ in range(10):
        assert torch.equal(held.run(module, torch.neg, torch.ones(1)), -torch.ones(1))
    assert held.replayed == 11


def test_graphs_that_were_used_do_not_count_as_short_lived(ltx: ModuleType, clock: Clock, module: nn.Module) -> None:
    held, rule = graphs(ltx), ltx.integrations.replay.rent_or_buy
    for size in range(1, 20):
        until_replayed(held, module, size)
        for _ in range(rule.USED):
            held.run(module, torch.neg, torch.ones(size))
    assert held.rule.short_lived == 0


def test_signatures_that_are_seen_once_cost_no_memory(ltx: ModuleType, clock: Clock, module: nn.Module) -> None:
    held, rule = graphs(ltx), ltx.integrations.replay.rent_or_buy
    for size in range(1, 3 * rule.KEPT):
        held.run(module, torch.neg, torch.ones(size))
    assert len(held.rule.tenants) == rule.KEPT and not held.captured and len(held.rule.timed) <= rule.KEPT


def test_a_call_that_raises_is_not_counted(ltx: ModuleType, clock: Clock, module: nn.Module) -> None:
    held = graphs(ltx)

    def fails(x: Tensor) -> Tensor:
        raise ArithmeticError

    for _ in range(5):
        with pytest.raises(ArithmeticError):
            held.run(module, fails, torch.ones(1))
    assert not held.rule.timed


def test_results_and_the_report(ltx: ModuleType, clock: Clock) -> None:
    model = make_model("cpu")
    ltx.optimize(model)
    expected = [model(**make_inputs("cpu", seed=seed))[0] for seed in range(8)]
    report = ltx.optimize(model, graphs="auto")
    for seed in range(8):
        assert torch.equal(model(**make_inputs("cpu", seed=seed))[0], expected[seed])
    line = (
        "graphs of LTXVideoTransformer3DModel where they pay: 1, 100 MiB; captured in 0.05 s or less; 5 calls replayed"
    )
    assert line in str(report), report
    to_q = model.transformer_blocks[0].attn1.to_q
    to_q.weight = nn.Parameter(0.5 * to_q.weight, requires_grad=False)
    held = ltx.integrations.replay.cuda_graphs.graphs_of(model)
    model(**make_inputs("cpu"))
    assert not held.captured and held.rule.short_lived == 1  # the state has changed
    ltx.restore(model)
    assert ltx.integrations.replay.cuda_graphs.graphs_of(model) is None


def test_autoencoders_are_left_out_and_text_encoders_taken(ltx: ModuleType, clock: Clock) -> None:
    """Also text encoders without known blocks."""
    parts = {
        "transformer": make_model("cpu"),
        "vae": make_vae("ltx 0.9.0", "cpu", torch.bfloat16),
        "text_encoder": nn.Sequential(nn.Linear(2, 2)).eval().requires_grad_(False),
    }
    for graphs, names in (("auto", {"transformer", "text_encoder"}), (True, {"transformer", "text_encoder", "vae"})):
        report = ltx.optimize(SimpleNamespace(components=parts), graphs=graphs)
        parts["transformer"](**make_inputs("cpu"))
        parts["text_encoder"](torch.ones(1, 2))
        decode(parts["vae"])
        graphs_of = ltx.integrations.replay.cuda_graphs.graphs_of
        held = {name for name, root in parts.items() if any(graphs_of(part) for part in root.modules())}
        assert held == names and str(report).count("graphs of ") == len(names)


def test_modules_share_a_pool(ltx: ModuleType, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their graphs hold as much as the largest; a pool that no graph holds is not given again."""
    module = ltx.integrations.replay.cuda_graphs
    given = []

    class Captured(module.Captured):  # type: ignore[misc, name-defined]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            given.append(args[-1])
            self.pool = args[-1] or object()

    monkeypatch.setattr(module, "Captured", Captured)
    plan = module.Plan()
    parts = [(module.Graphs(plan), nn.Linear(2, 2).eval().requires_grad_(False)) for _ in range(2)]
    for held, part in parts:
        for _ in range(3):
            held.run(part, part, torch.ones(1, 2))
    (pool,) = plan.pools.values()
    assert given == [None, pool.handle] and len(pool.graphs) == 2
    parts[0][0].captured.clear()
    gc.collect()  # `Again` holds itself
    assert len(pool.graphs) == 1
    parts[1][0].captured.clear()
    gc.collect()  # `Again` holds itself
    held, part = parts[0]
    for _ in range(2):
        held.run(part, part, torch.ones(1, 2))
    assert given[2] is None
    assert module.Graphs(module.Plan()).plan is not plan


def test_threads_on_modules_of_one_plan(ltx: ModuleType, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time copies its inputs, launches and copies its results, whatever its module."""
    module = ltx.integrations.replay.cuda_graphs
    inside, wrong = [], []

    class Captured(module.Captured):  # type: ignore[misc, name-defined]
        def __call__(self, leaves: Any) -> Any:
            inside.append(1)
            time.sleep(0.001)
            wrong.extend([1] * (len(inside) > 1))
            result = super().__call__(leaves)
            inside.pop()
            return result

    monkeypatch.setattr(module, "Captured", Captured)
    plan = module.Plan()

    def work(size: int) -> None:
        held, part = module.Graphs(plan), nn.Identity().eval()
        with torch.no_grad():
            for value in range(20):
                x = torch.full((size,), float(value))
                if not torch.equal(held.run(part, torch.neg, x), -x):
                    wrong.append(size)

    threads = [threading.Thread(target=work, args=(size,)) for size in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_on_a_gpu(ltx: ModuleType, cuda_graphs: str) -> None:
    """Many small launches wait for the host and are captured; one long kernel keeps the GPU busy and is not."""
    module = nn.Identity().eval()
    x = torch.ones(1, device=cuda_graphs)

    def launches(x: Tensor) -> Tensor:
        for _ in range(2000):
            x = x + 1
        return x

    def sleeps(x: Tensor) -> Tensor:
        torch.cuda._sleep(10**7)
        return x + 1

    for function, is_captured in ((launches, True), (sleeps, False)):
        held = graphs(ltx)
        for _ in range(60):
            result = held.run(module, function, x)
        assert (held.replayed > 0) is is_captured, held.ordinary
        assert torch.equal(result, function(x))
