"""Models that one thread changes while another thread calls them, or changes them too."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.ltx_video import make_inputs, make_model
from test_vae import decode, make_vae
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("one_thread")


def call(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(**inputs)[0]
        return result


def close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def switching() -> Any:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def transformer(device: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    model, inputs = make_model(device), make_inputs(device)
    return model, lambda: call(model, inputs)


def autoencoder(device: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Its `decode` calls the decoder once for each frame. It keeps frames on itself, so that one thread can call it."""
    vae = make_vae("wan 2.1", device, torch.float32)
    return vae, lambda: decode(vae, size=(2, 2))


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize(("make", "callers"), [(transformer, 2), (autoencoder, 1)])
def test_restore_while_other_threads_call(ltx: ModuleType, device: str, make: Any, callers: int) -> None:
    model, run = make(device)
    expected = run()

    def generate(ended: threading.Event) -> None:
        while not ended.is_set():
            close(run(), expected)

    with ThreadPoolExecutor(callers) as pool:
        for _ in range(20):
            ended, report = threading.Event(), ltx.optimize(model)
            calls = [pool.submit(generate, ended) for _ in range(callers)]
            while not any(site.calls for site in report.sites):
                time.sleep(0.001)
            ltx.restore(model)
            ended.set()
            for future in calls:
                future.result()
    assert not any("_ltx_kernels" in part.__dict__ for part in model.modules())
    close(run(), expected)


def test_restore_waits_for_the_call_that_makes_a_table(
    ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of the whole model begins after `restore` did. `restore` waits until it has left the rotary embedding."""
    integrations = f"{ltx.__name__}.integrations"
    sites = importlib.import_module(f"{integrations}.engine.sites")
    rope = importlib.import_module(f"{integrations}.diffusers._ltx_rope")
    model, run = transformer(device)
    expected = run()
    inside = threading.Event()
    uninstall, has_stock_reader = sites._uninstall_maker, rope._has_stock_reader

    def stop(module: nn.Module) -> bool:
        inside.set()
        time.sleep(0.3)
        answer: bool = has_stock_reader(module)
        return answer

    with ThreadPoolExecutor(1) as pool:
        futures = []

        def uninstall_while_called(*arguments: Any) -> None:
            futures.append(pool.submit(run))
            assert inside.wait(60)
            uninstall(*arguments)

        ltx.optimize(model)
        monkeypatch.setattr(rope, "_has_stock_reader", stop)
        monkeypatch.setattr(sites, "_uninstall_maker", uninstall_while_called)
        ltx.restore(model)
        close(futures[0].result(), expected)
    assert not any("_ltx_kernels" in part.__dict__ for part in model.modules())


def test_restore_waits_for_a_table_that_is_no_longer_kept(ltx: ModuleType, device: str) -> None:
    """As where two threads make the table of one shape: the site keeps one of them."""
    model, inputs = make_model(device), make_inputs(device)
    report = ltx.optimize(model)
    call(model, inputs)
    released: list[float] = []
    hidden = torch.zeros(1, 8, 64, device=device)
    held = [model.rope(hidden, num_frames=2, height=2, width=2)]
    for number in range(3, 9):  # the site keeps a few shapes
        model.rope(hidden, num_frames=number, height=2, width=2)

    def release() -> None:
        time.sleep(0.3)
        released.append(time.monotonic())
        held.clear()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(release)
        report.restore()
        ended = time.monotonic()
        future.result()
    assert ended >= released[0] and ended - released[0] < 5


@pytest.mark.usefixtures("switching")
def test_two_threads_optimize_and_restore(ltx: ModuleType, device: str) -> None:
    model, inputs = make_model(device), make_inputs(device)
    expected = call(model, inputs)
    names = sorted(len(part.__dict__) for part in model.modules())

    def change() -> None:
        for _ in range(5):
            ltx.optimize(model)
            ltx.restore(model)

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(change) for _ in range(3)]:
            future.result()
    assert sorted(len(part.__dict__) for part in model.modules()) == names
    assert torch.equal(call(model, inputs), expected)
    with ThreadPoolExecutor(2) as pool:
        *_, report = [future.result() for future in [pool.submit(ltx.optimize, model) for _ in range(2)]]
    close(call(model, inputs), expected)
    assert report.sites


def test_a_call_that_does_not_end(ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`restore` waits for it, and then changes nothing."""
    monkeypatch.setattr(importlib.import_module(f"{ltx.__name__}.integrations.engine.threads"), "LIMIT", 0.2)
    model, inputs = make_model(device), make_inputs(device)
    report = ltx.optimize(model)
    expected = call(model, inputs)
    inside, ended = threading.Event(), threading.Event()

    def stop(module: nn.Module, arguments: Any) -> None:
        inside.set()
        assert ended.wait(60)

    hook = model.transformer_blocks[1].ff.register_forward_pre_hook(stop)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call, model, inputs)
        assert inside.wait(60)
        for change in (ltx.restore, ltx.optimize, lambda model: report.restore()):
            with pytest.raises(
                RuntimeError, match=r"another thread has been in a call of a LTXVideoTransformer3DModel"
            ):
                change(model)
        ended.set()
        close(future.result(), expected)
    hook.remove()
    calls = sum(site.calls for site in report.sites)
    assert torch.equal(call(model, inputs), expected) and sum(site.calls for site in report.sites) > calls
    ltx.restore(model)


def test_restore_within_a_call(ltx: ModuleType, device: str) -> None:
    """A hook of the thread that calls the model does not wait for itself."""
    model, inputs = make_model(device), make_inputs(device)
    expected = call(model, inputs)
    ltx.optimize(model)
    hook = model.transformer_blocks[1].register_forward_hook(lambda *_: ltx.restore(model))
    close(call(model, inputs), expected)
    hook.remove()
    assert torch.equal(call(model, inputs), expected)


def test_an_error_of_a_users_own_is_raised_as_it_is(ltx: ModuleType, device: str) -> None:
    model, inputs = make_model(device), make_inputs(device)
    ltx.optimize(model)

    def fail(module: nn.Module, arguments: Any) -> None:
        raise ValueError("mine")

    model.transformer_blocks[0].ff.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match=r"^mine$"):
        call(model, inputs)
