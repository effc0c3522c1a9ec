"""Recorded calls under gradient checkpointing: both runs of a call go one way, with the bits of ordinary calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")
pytest.importorskip("peft")
from test_families import FAMILIES, cast, flat, make
from test_replay_gradients import assert_same, calls, not_recorded, tiny
from test_training import CHANGES, HANDLES, TRAINED, step, step_under, with_adapters
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop

pytestmark = pytest.mark.usefixtures("one_thread", "same_attention")

Step = tuple[Tensor, dict[str, Tensor]]


def recordings(ltx: ModuleType, model: nn.Module) -> list[Any]:
    """The calls of a model's blocks that are recorded with gradients; no call has a reason against it."""
    found = calls(ltx.integrations.replay.calls, model)
    assert not any(isinstance(call, str) and call for call in found), found
    return [call for call in found if isinstance(call, ltx.integrations.replay.gradients.GradientRecording)]


def with_checkpoints(model: Any, reentrant: bool = False) -> Any:
    model.enable_gradient_checkpointing(functools.partial(checkpoint, use_reentrant=reentrant))
    return model.train()


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_and_counts(ltx: ModuleType, device: str, name: str, reentrant: bool, dtype: torch.dtype) -> None:
    """Steps with other inputs and adapters that an optimizer writes to, as without recordings."""
    family, found = FAMILIES[name], []
    for recorded in (False, True):
        model = with_checkpoints(with_adapters(make(family, device, dtype), family), reentrant)
        report = ltx.optimize(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer, steps = torch.optim.SGD(trained, lr=1e-2), []
        for seed in range(4):
            inputs = cast(family.inputs(2), device, dtype)
            torch.manual_seed(seed)
            inputs["hidden_states"] = torch.randn_like(inputs["hidden_states"]).requires_grad_(reentrant)
            if recorded:
                steps.append(step_under(device, dtype, model, inputs))
            else:
                with not_recorded(ltx.integrations.replay.calls):
                    steps.append(step_under(device, dtype, model, inputs))
            optimizer.step()
        counts = {
            site.name: (site.calls, site.gradients, site.recomputed, site.unpacked, dict(site.remarks))
            for site in report.sites
        }
        found.append((steps, counts, recordings(ltx, model)))
    (want, counts, none), (got, counts_too, some) = found
    assert some and not none
    assert counts == counts_too and any(recomputed for _, _, recomputed, _, _ in counts.values())
    for one, other in zip(got, want):
        assert_same(one, other)


def ordinary_steps(ltx: ModuleType, count: int, one_step: Callable[[], Any]) -> list[Any]:
    with not_recorded(ltx.integrations.replay.calls):
        return [one_step() for _ in range(count)]


def assert_as_ordinary(ltx: ModuleType, model: nn.Module, one_step: Callable[[], Step], count: int = 4) -> None:
    want = ordinary_steps(ltx, count, one_step)
    for one, other in zip([one_step() for _ in range(count)], want):
        assert_same(one, other)
    assert recordings(ltx, model)


Through = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def _all_in_one(both: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(both, x, use_reentrant=False)


def _nested(both: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(lambda x: checkpoint(both, x.sin(), use_reentrant=False).cos(), x, use_reentrant=False)


def _in_a_reentrant_one(both: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(lambda x: checkpoint(both, x, use_reentrant=False), x, use_reentrant=True)


def _to_the_end(both: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return checkpoint(both, x, use_reentrant=False)


def _gradient_inside(both: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    def penalised(x: Tensor) -> Tensor:
        result = both(x)
        (gradient,) = torch.autograd.grad(result.square().mean(), x, retain_graph=True)
        return result + gradient

    return checkpoint(penalised, x, use_reentrant=False)


def _twice(both: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return _all_in_one(both, _all_in_one(both, x))


THROUGH = {
    "two blocks in one": _all_in_one,
    "nested": _nested,
    "in a reentrant one": _in_a_reentrant_one,
    "no early stop": _to_the_end,
    "a gradient inside": _gradient_inside,
    "blocks used twice": _twice,
}


@pytest.mark.parametrize("through", THROUGH)
def test_kinds_of_checkpoints(ltx: ModuleType, device: str, through: str) -> None:
    model, inputs, _ = tiny(ltx, device)
    blocks, given = list(model.transformer_blocks), {}
    handle = blocks[0].register_forward_pre_hook(lambda module, args, kwargs: given.update(kwargs), with_kwargs=True)
    model(**inputs)
    handle.remove()
    given = {name: value.detach() if isinstance(value, Tensor) else value for name, value in given.items()}

    def both(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(**{**given, "hidden_states": x})
        return x

    def one_step() -> Step:
        model.zero_grad()
        loss = THROUGH[through](both, given["hidden_states"].clone().requires_grad_()).square().mean()
        loss.backward()
        return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    assert_as_ordinary(ltx, model, one_step)


def test_a_recording_that_is_made_between_two_runs(ltx: ModuleType, device: str) -> None:
    """The second run of an ordinary call stays ordinary, and each graph has its own way."""
    model, inputs, _ = tiny(ltx, device)
    with_checkpoints(model)

    def one_step(count: int = 4) -> Step:
        model.zero_grad()
        losses = [flat(model(**inputs, return_dict=False))[0].square().mean() * (i + 1) for i in range(count)]
        for loss in losses[::-1]:
            loss.backward()
        return torch.stack(losses).detach(), {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }

    assert_as_ordinary(ltx, model, one_step, count=1)


def test_two_backwards_and_none(ltx: ModuleType, device: str) -> None:
    """One call's graph is dropped. The other's is kept: it gives one gradient, and then all of them twice."""
    model, inputs, _ = tiny(ltx, device)
    with_checkpoints(model)
    last = next(p for name, p in model.named_parameters() if "blocks.1.attn2.to_out.0.lora_B" in name)

    def one_step() -> Step:
        model.zero_grad()
        model(**inputs)
        loss = model(**inputs)[0].square().mean()
        (part,) = torch.autograd.grad(loss, last, retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return loss.detach(), {**grads, "part": part}

    assert_as_ordinary(ltx, model, one_step)


def test_adapters_that_draw_random_numbers(ltx: ModuleType, device: str) -> None:
    """The call that would be recorded leaves the generators as they were."""
    model, inputs, report = tiny(ltx, device, lora_dropout=0.5)
    with_checkpoints(model)
    wanted = []
    for recorded in (False, True):
        torch.manual_seed(5)
        for _ in range(4):
            if recorded:
                wanted.append(step(model, inputs))
            else:
                with not_recorded(ltx.integrations.replay.calls):
                    wanted.append(step(model, inputs))
    for one, other in zip(wanted[4:], wanted[:4]):
        assert_same(one, other)
    (site,) = [site for site in report.sites if site.name.endswith("Block")]
    assert site.calls == site.gradients == site.recomputed == 2 * 4 * 2
    assert "peft computes adapters" in str(report)


def test_merged_adapters_that_are_disabled(ltx: ModuleType, device: str) -> None:
    """peft takes them out of the weights in the first run, so that the second one finds other adapters."""
    found = []
    for optimized in (False, True):
        family = FAMILIES["ltx"]
        model = with_checkpoints(with_adapters(make(family, device), family))
        model.proj_out.requires_grad_(True)
        model.transformer_blocks[0].ff.net[2].weight.requires_grad_(True)
        if optimized:
            ltx.optimize(model)
        layers = [module for module in model.modules() if hasattr(module, "merge")]
        for _ in range(3):
            for layer in layers:
                layer.enable_adapters(True)
                layer.merge()
                layer.enable_adapters(False)
            found.append(step(model, cast(family.inputs(1), device, torch.float32)))
    for (loss, gradients), (stock, wanted) in zip(found[3:], found[:3]):
        torch.testing.assert_close(loss, stock)
        torch.testing.assert_close(gradients, wanted)


@pytest.mark.parametrize("change", CHANGES)
def test_another_way_in_the_backward_is_an_error(ltx: ModuleType, device: str, change: str) -> None:
    family = FAMILIES["ltx"]
    model = with_checkpoints(with_adapters(make(family, device), family, ("one", "two")))
    inputs = cast(family.inputs(1), device, torch.float32)
    ltx.optimize(model)
    for _ in range(3):
        step(model, inputs)
    try:
        loss = model(**inputs, return_dict=False)[0].square().mean()
        CHANGES[change](model)
        with pytest.raises(CheckpointError):
            loss.backward()
    finally:
        while HANDLES:
            HANDLES.pop().remove()


def test_another_scaling_in_the_backward_is_an_error(ltx: ModuleType, device: str) -> None:
    """Also where a weight has moved, so that the call is traced once more."""
    model, inputs, _ = tiny(ltx, device)
    with_checkpoints(model)
    for move in (False, True):
        for _ in range(3):
            step(model, inputs)
        loss = model(**inputs)[0].square().mean()
        layer = model.transformer_blocks[1].attn1.to_q
        layer.scaling["default"] *= 2
        if move:
            layer.base_layer.weight.data = layer.base_layer.weight.data.clone()
        with pytest.raises(CheckpointError):
            loss.backward()


def test_weights_that_move_between_the_runs(ltx: ModuleType, device: str) -> None:
    """FSDP frees weights after the first run, and gathers them again. An offload makes new parameters."""
    model, inputs, _ = tiny(ltx, device)
    with_checkpoints(model)
    names = ("ff.net.2.weight", "norm_k.weight", "scale_shift_table", "to_out.0.lora_A.default.weight")
    moved = [name for name, _ in model.named_parameters() if name.endswith(names)]
    assert len(moved) == 2 + 4 + 3 + 4

    def put(name: str, parameter: nn.Parameter) -> None:
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, parameter)

    def one_step() -> Step:
        model.zero_grad()
        loss = model(**inputs)[0].square().mean()
        old = {name: model.get_parameter(name) for name in moved}
        kept = {name: parameter.detach().clone() for name, parameter in old.items()}
        for name, parameter in old.items():
            with torch.no_grad():
                parameter.data, memory = kept[name].clone(), parameter.data
                memory.fill_(float("nan"))  # nothing may read what lay here
                if not parameter.requires_grad:
                    put(name, nn.Parameter(kept[name].clone(), requires_grad=False))
                    parameter.data = memory
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        for name, parameter in old.items():
            parameter.data = kept[name]
            put(name, parameter)
        return loss.detach(), grads

    want = ordinary_steps(ltx, 4, one_step)
    for i in range(4):
        for _ in range(3):
            step(model, inputs)  # weights lie elsewhere than in the step before
        assert recordings(ltx, model)
        assert_same(one_step(), want[i])


def test_replays_are_checked(ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, _ = tiny(ltx, device)
    with_checkpoints(model)
    for _ in range(3):
        want = step(model, inputs)
    monkeypatch.setattr(ltx.integrations.replay.calls, "RECORD", "check")
    assert_same(step(model, inputs), want)
    recording = recordings(ltx, model)[0]
    function = recording.function

    def wrong(*given: Tensor) -> Any:
        result, saved = function(*given)
        return result * 1.001, saved

    recording.function = wrong
    with pytest.raises(RuntimeError, match=r"LTXVideoTransformerBlock transformer_blocks\.0: result"):
        step(model, inputs)


def test_what_the_first_run_keeps(ltx: ModuleType, device: str) -> None:
    """One empty tensor for a block; the second run's tensors go with the backward that reads them."""
    model, inputs, _ = tiny(ltx, device)
    with_checkpoints(model)
    for _ in range(3):
        step(model, inputs)
    loss = model(**inputs)[0].square().mean()
    nodes: list[Any] = [loss.grad_fn]
    for node in nodes:
        nodes += [other for other, _ in node.next_functions if other is not None and other not in nodes]
    ways = [node.way for node in nodes if node.name() == "_ReplayBackward"]
    assert len(ways) == 2 and all(way.saved is None and way.recording in recordings(ltx, model) for way in ways)
    loss.backward(retain_graph=True)
    assert all(way.saved is None for way in ways)


def peak(device: str, function: Callable[[], object]) -> int:
    """The bytes that a function takes at once, beside those that it was called with."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    taken = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        taken += event.nbytes()
        highest = max(highest, taken)
    return highest


def test_memory(ltx: ModuleType, device: str) -> None:
    """A step takes no more memory at once than one without recordings. The one that records has a block's twice."""
    family, peaks = FAMILIES["ltx"], []
    inputs = cast(family.inputs(16), device, torch.float32)
    for recorded in (False, True):
        model = with_checkpoints(with_adapters(make(family, device), family))
        ltx.optimize(model)
        one_step = functools.partial(peak, device, functools.partial(step, model, inputs))
        peaks.append([one_step() for _ in range(4)] if recorded else ordinary_steps(ltx, 4, one_step))
    want, got = peaks
    assert got[1] <= 1.3 * want[1] and got[3] <= 1.02 * want[3], peaks
