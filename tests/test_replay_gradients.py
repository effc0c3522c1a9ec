"""Calls of blocks that are recorded with gradients: the bits of calls and backwards that are not."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")
pytest.importorskip("peft")
from helpers import Make
from test_families import FAMILIES, cast, make
from test_training import TRAINED, blocks_of, step, step_under, with_adapters

pytestmark = pytest.mark.usefixtures("one_thread", "same_attention")


@pytest.fixture
def replay(ltx: ModuleType) -> ModuleType:
    return importlib.import_module(f"{ltx.__name__}.integrations.replay.calls")


@pytest.fixture
def kind(ltx: ModuleType) -> Any:
    """The class of calls that are recorded with gradients."""
    return importlib.import_module(f"{ltx.__name__}.integrations.replay.gradients").GradientRecording


def calls(replay: ModuleType, model: nn.Module) -> list[Any]:
    """What the blocks hold of their calls: a recording, or the reason why there is none."""
    found = [part.__dict__[replay.HELD].replays for part in model.modules() if replay.HELD in part.__dict__]
    return [call for replays in found if replays is not None for call in replays.calls.values()]


@contextmanager
def not_recorded(replay: ModuleType) -> Iterator[None]:
    old, replay.RECORD = replay.RECORD, "0"
    try:
        yield
    finally:
        replay.RECORD = old


def tiny(ltx: ModuleType, device: str, name: str = "ltx", **config: Any) -> tuple[Any, dict[str, Any], Any]:
    """(an optimized model with trained adapters, its inputs, its report)."""
    family = FAMILIES[name]
    model = with_adapters(make(family, device), family, **config)
    return model, cast(family.inputs(2), device, torch.float32), ltx.optimize(model)


def assert_same(got: Any, want: Any) -> None:
    assert torch.equal(got[0], want[0]) and got[1].keys() == want[1].keys() and got[1]
    assert all(torch.equal(grad, want[1][name]) for name, grad in got[1].items())


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_and_counts(
    ltx: ModuleType, replay: ModuleType, kind: Any, device: str, name: str, dtype: torch.dtype
) -> None:
    """Losses and gradients, of steps with other inputs and adapters that an optimizer writes to."""
    family = FAMILIES[name]
    found = []
    for recorded in (False, True):
        model = with_adapters(make(family, device, dtype), family)
        report = ltx.optimize(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer, steps = torch.optim.SGD(trained, lr=1e-2), []
        for seed in range(5):
            inputs = cast(family.inputs(2), device, dtype)
            torch.manual_seed(seed)
            inputs["hidden_states"] = torch.randn_like(inputs["hidden_states"])
            if recorded:
                steps.append(step_under(device, dtype, model, inputs))
            else:
                with not_recorded(replay):
                    steps.append(step_under(device, dtype, model, inputs))
            optimizer.step()
        counts = {site.name: (site.calls, site.gradients, dict(site.remarks)) for site in report.sites}
        found.append((steps, counts, calls(replay, model)))
    (want, counts, none), (got, counts_too, recordings) = found
    assert not none and recordings and all(isinstance(call, kind) for call in recordings), recordings
    assert counts == counts_too
    for one, other in zip(got, want):
        assert_same(one, other)
    assert sum(count > 0 for _, count, _ in counts.values()) == len(blocks_of(report, family))


def test_gradients_of_other_parameters(ltx: ModuleType, replay: ModuleType, kind: Any, device: str) -> None:
    """What is frozen and trained in turn belongs to the signature; a frozen parameter gets no gradient."""
    model, inputs, _ = tiny(ltx, device)
    parameter = next(p for name, p in model.named_parameters() if "blocks.0.attn1.to_q.lora_A" in name)
    with not_recorded(replay):
        wanted = {True: step(model, inputs)}
        parameter.requires_grad_(False)
        wanted[False] = step(model, inputs)
    for trained in (True, True, True, False, False, False, True, False):
        parameter.requires_grad_(trained)
        assert_same(step(model, inputs), wanted[trained])
    assert sum(isinstance(call, kind) for call in calls(replay, model)) == 3  # two of block 0


def test_buffers_are_written_once_a_step(ltx: ModuleType, device: str) -> None:
    """The call that runs for its recording alone does not move the vectors of a spectral norm, which are buffers."""
    found = []
    for optimized in (False, True):
        model = make(FAMILIES["ltx"], device).train().requires_grad_(True)
        torch.manual_seed(0)
        layer = torch.nn.utils.parametrizations.spectral_norm(model.transformer_blocks[0].ff.net[2])
        if optimized:
            ltx.optimize(model)
        inputs = cast(FAMILIES["ltx"].inputs(2), device, torch.float32)
        for _ in range(4):
            model(**inputs, return_dict=False)[0].sum().backward()
        found.append(layer.parametrizations.weight[0]._u)
    assert not torch.equal(found[0], torch.zeros_like(found[0]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


def test_a_parameter_of_two_layers(ltx: ModuleType, replay: ModuleType, kind: Any, device: str) -> None:
    """It has one gradient, the sum of both."""
    model, inputs, _ = tiny(ltx, device)
    for block in model.transformer_blocks:
        block.attn1.to_k.lora_A["default"].weight = block.attn1.to_q.lora_A["default"].weight
    with not_recorded(replay):
        want = step(model, inputs)
    for _ in range(3):
        assert_same(step(model, inputs), want)
    assert calls(replay, model) and all(isinstance(call, kind) for call in calls(replay, model))


def test_a_result_that_nothing_reads(ltx: ModuleType, replay: ModuleType, kind: Any, device: str) -> None:
    """Parameters that only the other result depends on get no gradient, not zeros."""
    model, inputs, _ = tiny(ltx, device, "flux")
    block, given = model.transformer_blocks[0], {}
    handle = block.register_forward_pre_hook(lambda module, args, kwargs: given.update(kwargs), with_kwargs=True)
    model(**inputs)
    handle.remove()
    given = {name: value.detach() if isinstance(value, Tensor) else value for name, value in given.items()}

    def gradients(chosen: tuple[int, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        results = block(**given)
        loss = torch.stack([results[i].square().mean() for i in chosen]).sum()
        loss.backward()
        return loss, {name: p.grad.clone() for name, p in block.named_parameters() if p.grad is not None}

    for chosen in ((0,), (1,), (0, 1)):
        with not_recorded(replay):
            want = gradients(chosen)
        for _ in range(3):
            assert_same(gradients(chosen), want)
    assert any(isinstance(call, kind) for call in block.__dict__[replay.HELD].replays.calls.values())


@pytest.mark.parametrize("kind_of_hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_without_a_gradient(
    ltx: ModuleType, replay: ModuleType, kind: Any, device: str, kind_of_hook: str
) -> None:
    """LTX-2's last block makes sound that a loss of the pictures does not read: hooks there are not called."""
    model, inputs, _ = tiny(ltx, device, "ltx2")
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def backward() -> None:
        model.zero_grad()
        model(**inputs)[0].square().mean().backward()

    for _ in range(3):
        backward()
    assert any(isinstance(call, kind) for call in calls(replay, model))
    want = {name for parameter, name in names.items() if parameter.grad is not None}
    assert len(want) < len(names)
    seen: list[str] = []
    for parameter, name in names.items():

        def note(found: Tensor, name: str = name) -> None:
            assert found is not None
            seen.append(name)

        getattr(parameter, kind_of_hook)(note)
    for _ in range(3):
        seen.clear()
        backward()
        assert sorted(seen) == sorted(want)


@pytest.mark.parametrize("name", ["ltx2", "flux"])
@pytest.mark.parametrize("trained", ["adapters", "adapters beside fp8", "everything"])
def test_hooks_of_blocks_without_a_gradient(ltx: ModuleType, device: str, name: str, trained: str) -> None:
    """Such a hook makes autograd walk what the loss does not read, without gradients. They are None then, not zeros."""
    found = []
    for optimized in (False, True):
        family, dtype = FAMILIES[name], torch.bfloat16 if "fp8" in trained else torch.float32
        model = make(family, device).to(dtype)
        model = model.requires_grad_(True) if trained == "everything" else with_adapters(model, family)
        if optimized:
            ltx.optimize(model, precision="fp8" if "fp8" in trained else "native")
        for part in list(model.modules()):
            if type(part).__name__.endswith("Block"):
                part.register_full_backward_hook(lambda *given: None)
        for _ in range(3):
            model.zero_grad()
            model(**cast(family.inputs(2), device, dtype))[0].square().mean().backward()
            found.append({key for key, parameter in model.named_parameters() if parameter.grad is None})
    assert all(missing == found[0] for missing in found)  # of ordinary and of recorded calls


def test_an_argument_that_is_made_of_another(ltx: ModuleType, replay: ModuleType, device: str) -> None:
    """The backward that is traced ends at the arguments."""
    model, inputs, _ = tiny(ltx, device)
    block, given = model.transformer_blocks[0], {}
    handle = block.register_forward_pre_hook(lambda module, args, kwargs: given.update(kwargs), with_kwargs=True)
    args: list[Any] = []
    other = block.register_forward_pre_hook(lambda module, found: args.extend(found))
    model(**inputs)
    handle.remove()
    other.remove()
    names = ("hidden_states", "encoder_hidden_states")
    for name, value in zip((*names, "temb", "image_rotary_emb", "encoder_attention_mask"), args):
        given[name] = value

    def gradient() -> Tensor:
        first = given["hidden_states"].detach().requires_grad_()
        second = first[:, :4] * 2
        block(**{**given, names[0]: first, names[1]: second, "encoder_attention_mask": None}).square().mean().backward()
        return first.grad

    with not_recorded(replay):
        want = gradient()
    for _ in range(3):
        torch.testing.assert_close(gradient(), want, rtol=1e-5, atol=1e-7)
    assert block.__dict__[replay.HELD].replays is not None


def written_to(model: nn.Module, name: str) -> None:
    with torch.no_grad():
        next(p for key, p in model.named_parameters() if f"blocks.1.attn1.{name}" in key).mul_(2)


@pytest.mark.parametrize("name", ["to_out.0.lora_B", "to_v.base_layer.weight"])
def test_a_weight_written_to_before_the_backward(ltx: ModuleType, device: str, name: str) -> None:
    model, inputs, _ = tiny(ltx, device)
    for _ in range(3):
        step(model, inputs)
    loss = model(**inputs)[0].square().mean()
    written_to(model, name)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ["to_v.lora_A", "to_v.lora_B"])
def test_an_adapter_that_was_copied_before_it_was_written_to(ltx: ModuleType, device: str, name: str) -> None:
    """Adapters of one product are copied side by side. The backward reads the copies, with what the forward read."""
    model, inputs, _ = tiny(ltx, device)
    _, want = [step(model, inputs) for _ in range(3)][-1]
    model.zero_grad()
    loss = model(**inputs)[0].double().square().mean()
    written_to(model, name)
    loss.backward()
    found = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    assert found.keys() == want.keys()
    for key, grad in found.items():
        assert torch.equal(grad, want[key])


def test_two_backwards_of_one_call(ltx: ModuleType, device: str) -> None:
    model, inputs, _ = tiny(ltx, device)
    _, once = [step(model, inputs) for _ in range(3)][-1]
    model.zero_grad()
    loss = torch.stack([model(**inputs)[0].double().square().mean()]).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, 2 * once[name])
    inputs["hidden_states"].requires_grad_()
    model(**inputs)[0].square().mean().backward()
    for power in (1, 2):
        loss = model(**inputs)[0].pow(power).mean()
        (first,) = torch.autograd.grad(loss, inputs["hidden_states"], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            torch.autograd.grad(first.square().sum(), inputs["hidden_states"])


def test_calls_that_are_not_recorded(ltx: ModuleType, replay: ModuleType, kind: Any, device: str) -> None:
    """Each has the gradients that it had, and a reason in the report."""
    model, inputs, report = tiny(ltx, device)
    want = [step(model, inputs) for _ in range(3)][-1]
    with torch.autograd.graph.save_on_cpu():
        got = [step(model, inputs) for _ in range(3)][-1]
    assert_same(got, want)
    assert "not recorded: hooks, and no checkpoint's, take what is saved for the backward" in str(report)

    model, inputs, report = tiny(ltx, device, lora_dropout=0.5)
    model.train()
    wanted = []
    for recorded in (False, True):
        torch.manual_seed(5)
        for _ in range(4):
            if recorded:
                wanted.append(step(model, inputs))
            else:
                with not_recorded(replay):
                    wanted.append(step(model, inputs))
    for one, other in zip(wanted[:4], wanted[4:]):
        assert_same(one, other)
    assert "not recorded" in str(report) and "peft computes adapters" in str(report)

    model, inputs, report = tiny(ltx, device)
    parameter = next(p for name, p in model.named_parameters() if "blocks.0.attn1.to_q.lora_A" in name)
    seen: list[Tensor] = []
    parameter.register_hook(seen.append)
    for _ in range(4):
        step(model, inputs)
    assert len(seen) == 4 and "a parameter has a hook for its gradient" in str(report)


def test_other_backends_of_attention_are_not_traced(
    ltx: ModuleType, replay: ModuleType, kind: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flex_attention does not run below a dispatch mode, and torch.compile would not forget the attempt."""
    dispatch = importlib.import_module("diffusers.models.attention_dispatch")
    registry, name = dispatch._AttentionBackendRegistry, dispatch.AttentionBackendName._NATIVE_MATH
    stock = registry._backends[name]

    def untraced(*args: Any, **kwargs: Any) -> Any:
        assert torch._C._len_torch_dispatch_stack() == 0
        return stock(*args, **kwargs)

    monkeypatch.setitem(registry._backends, name, untraced)
    model, inputs, report = tiny(ltx, device)
    for backend in ("native", "_native_math", "native"):
        model.set_attention_backend(backend)
        for _ in range(3):
            step(model, inputs)
        recorded = {isinstance(call, kind) for call in calls(replay, model)}
        assert recorded == {backend == "native"}
        assert ("a backend of attention may run kernels" in str(report)) is (backend != "native")


def test_replays_with_gradients_are_checked(
    ltx: ModuleType, replay: ModuleType, kind: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs, _ = tiny(ltx, device)
    for _ in range(3):
        want = step(model, inputs)
    monkeypatch.setattr(replay, "RECORD", "check")
    assert_same(step(model, inputs), want)
    recording = next(call for call in calls(replay, model) if isinstance(call, kind))
    for choice, function in list(recording.backwards.items()):

        def wrong(*given: Tensor, function: Any = function) -> Any:
            return tuple(None if gradient is None else gradient * 1.001 for gradient in function(*given))

        recording.backwards[choice] = wrong
    with pytest.raises(RuntimeError, match=r"LTXVideoTransformerBlock transformer_blocks\.0: gradient"):
        step(model, inputs)


def test_what_is_saved(ltx: ModuleType, replay: ModuleType, device: str) -> None:
    """A recorded call keeps no more memory for its backward than the call that is not recorded."""
    model, inputs, _ = tiny(ltx, device)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def kept(tensors: list[Tensor]) -> int:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(size for address, size in storages.items() if address not in weights)

    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda x: x):
        model(**inputs)
    for _ in range(2):
        step(model, inputs)
    found, nodes = [], [model(**inputs)[0].grad_fn]
    for node in nodes:
        nodes += [other for other, _ in node.next_functions if other is not None and other not in nodes]
        if node.name() == "_ReplayBackward":
            found += node.saved_tensors
    assert found and kept(found) <= kept(saved)


@pytest.mark.parametrize("record", ["1", "check"])
@pytest.mark.parametrize("of", ["a table", "a bias"])
def test_an_argument_that_is_made_of_the_blocks_own_weight(
    ltx: ModuleType, replay: ModuleType, device: str, of: str, record: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient that goes through the argument is autograd's, and is not counted in the block's a second time."""
    from helpers.ltx_video import make_model

    monkeypatch.setattr(replay, "RECORD", record)
    stock = make_model(device).requires_grad_(True)
    model = copy.deepcopy(stock)
    ltx.optimize(model, graphs=False)
    make = Make(device, torch.float32)
    x, text, time = make(1, 6, 64), make(1, 5, 64), make(1, 1, 6 * 64)
    rope = make(1, 6, 64), make(1, 6, 64)

    def gradients(model: nn.Module) -> Tensor:
        block = model.transformer_blocks[0]
        model.zero_grad()
        added = block.scale_shift_table.view(1, 1, -1) if of == "a table" else block.attn1.to_out[0].bias
        given = (x, text, time + added, rope) if of == "a table" else (x + added, text, time, rope)
        block(*given).square().sum().backward()
        return torch.cat([part.grad.flatten() for part in block.parameters() if part.grad is not None])

    expected = gradients(stock)
    for _ in range(4):
        assert (gradients(model) - expected).norm() < 1e-4 * expected.norm()


def test_a_weight_that_is_made_of_another(ltx: ModuleType, device: str) -> None:
    """Its gradient goes on to what it is made of, which only autograd can follow."""
    from helpers.ltx_video import make_model

    stock = make_model(device).requires_grad_(True)
    model = copy.deepcopy(stock)
    ltx.optimize(model, graphs=False)
    make = Make(device, torch.float32)
    given = make(1, 6, 64), make(1, 5, 64), make(1, 1, 6 * 64), (make(1, 6, 64), make(1, 6, 64))
    start = stock.transformer_blocks[0].attn1.to_q.weight.detach()

    def gradients(model: nn.Module) -> list[Tensor]:
        weight = start.clone().requires_grad_()
        own, found = {"attn1.to_q.weight": weight, "attn1.to_k.weight": 2 * weight}, []
        for _ in range(5):
            result = torch.func.functional_call(model.transformer_blocks[0], own, given)
            found += torch.autograd.grad(result.square().sum(), weight, retain_graph=True)
        return found

    for got, want in zip(gradients(model), gradients(stock)):
        assert (got - want).norm() < 1e-4 * want.norm()
