"""Calls of blocks that are recorded and replayed: the same bits as without, and nothing that changes is missed."""

from __future__ import annotations

import copy
import importlib
import re
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.ltx_video import TINY, make_inputs, make_model
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("diffusers")

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def replay(ltx: ModuleType) -> ModuleType:
    return importlib.import_module(f"{ltx.__name__}.integrations.replay.calls")


@pytest.fixture
def recorders(ltx: ModuleType) -> ModuleType:
    return importlib.import_module(f"{ltx.__name__}.integrations.replay.recorder")


def found(replay: ModuleType, model: nn.Module) -> list[Any]:
    """What the blocks hold of their calls, of each signature: a replay, or the reason why there is none."""
    blocks = [replay.held(block).replays for block in model.transformer_blocks]
    return [call for block in blocks if block is not None for call in block.calls.values()]


def replays(replay: ModuleType, model: nn.Module) -> int:
    return sum(not isinstance(call, str) for call in found(replay, model))


def warm(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    for _ in range(3):
        result = model(**inputs)[0]
    return result


def ordinary(replay: ModuleType, model: nn.Module, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The model's result without replays."""
    with monkeypatch.context() as patch:
        patch.setattr(replay, "RECORD", "0")
        return model(**inputs)[0]


@pytest.mark.parametrize("precision", ["native", "fp8"])
def test_same_bits_and_counts(
    ltx: ModuleType, replay: ModuleType, device: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if precision == "fp8" and device != "cpu" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs a GPU of compute capability 8.9")
    dtype = torch.bfloat16 if precision == "fp8" else torch.float32
    model = make_model(device, dtype)
    report = ltx.optimize(model, precision=precision)
    expected = [
        ordinary(replay, model, make_inputs(device, frames, seed, dtype), monkeypatch)
        for seed in range(5)
        for frames in (1, 2)
    ]
    counts = {site.name: site.calls for site in report.sites}
    results = [model(**make_inputs(device, frames, seed, dtype))[0] for seed in range(5) for frames in (1, 2)]
    assert replays(replay, model) == 2 * TINY["num_layers"], found(replay, model)
    assert all(torch.equal(one, other) for one, other in zip(results, expected))
    assert {site.name: site.calls for site in report.sites} == {name: 2 * count for name, count in counts.items()}
    assert not any(site.fallbacks for site in report.sites)


class Apart(TorchDispatchMode):
    """Collects the ops of this package that read rows whose columns lie apart in memory."""

    def __init__(self, ltx: ModuleType) -> None:
        super().__init__()
        self.namespace, self.ops = ltx._ops.ops.name, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == self.namespace:
            self.ops += [func._opname for x in args if isinstance(x, Tensor) and x.dim() == 3 and x.stride(-1) != 1]
        return func(*args, **kwargs or {})


def test_columns_that_lie_apart(ltx: ModuleType, replay: ModuleType, device: str) -> None:
    """As after the transpose of a patch embedding: the first block copies its rows, and every op reads the copy."""
    model, inputs = make_model(device), make_inputs(device)
    report = ltx.optimize(model, graphs=False)
    expected = warm(model, inputs)
    forward = model.proj_in.forward
    model.proj_in.forward = lambda x: forward(x).transpose(1, 2).contiguous().transpose(1, 2)
    with Apart(ltx) as apart:
        results = [model(**inputs)[0]]
    results += [warm(model, inputs)]
    assert not apart.ops
    assert all(torch.equal(result, expected) for result in results)
    assert replays(replay, model) == TINY["num_layers"] + 1  # the first block has calls of both memory orders
    assert not any(site.fallbacks for site in report.sites)


def _hook(model: nn.Module) -> None:
    model.transformer_blocks[0].attn1.to_q.register_forward_hook(lambda module, args, output: 2 * output)


def _hook_on_attention(model: nn.Module) -> None:
    model.transformer_blocks[0].attn2.register_forward_hook(lambda module, args, output: 2 * output)


def _forward(model: nn.Module) -> None:
    down = model.transformer_blocks[1].ff.net[2]
    down.forward = lambda input: 2 * type(down).forward(down, input)


def _module(model: nn.Module) -> None:
    model.transformer_blocks[1].attn1.to_out[0] = nn.Linear(64, 64).to(model.device)


def _parameter(model: nn.Module) -> None:
    to_k = model.transformer_blocks[0].attn1.to_k
    to_k.weight = nn.Parameter(2 * to_k.weight, requires_grad=False)


def _data(model: nn.Module) -> None:
    to_v = model.transformer_blocks[0].attn2.to_v
    to_v.weight.data = 2 * to_v.weight.data


def _in_place(model: nn.Module) -> None:
    model.transformer_blocks[0].scale_shift_table.mul_(2)


def _eps(model: nn.Module) -> None:
    model.transformer_blocks[0].norm1.eps = 0.3


def _processor(model: nn.Module) -> None:
    class Twice(type(model.transformer_blocks[0].attn1.processor)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
            return 2 * super().__call__(*args, **kwargs)

    model.transformer_blocks[0].attn1.set_processor(Twice())


def _training(model: nn.Module) -> None:
    dropout = model.transformer_blocks[0].attn1.to_out[1]
    dropout.p = 1.0
    dropout.train()


CHANGES = [_hook, _hook_on_attention, _forward, _module, _parameter, _data, _in_place, _eps, _processor, _training]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
def test_changes_are_seen(
    ltx: ModuleType, replay: ModuleType, device: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = make_model(device), make_inputs(device)
    ltx.optimize(model, graphs=False)
    before = warm(model, inputs)
    assert replays(replay, model) == TINY["num_layers"]
    change(model)
    after = [model(**inputs)[0] for _ in range(4)]
    expected = ordinary(replay, model, inputs, monkeypatch)
    assert not torch.allclose(before, expected)
    assert all(torch.equal(result, expected) for result in after)


def test_modes_of_the_process(ltx: ModuleType, replay: ModuleType, device: str) -> None:
    """Autocast, gradients, a function mode, and a graph of torch.compile run the forward."""

    class Count(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return function(*args, **(kwargs or {}))

    model, inputs = make_model(device), make_inputs(device)
    report = ltx.optimize(model, graphs=False)
    expected = warm(model, inputs)
    (site,) = (site for site in report.sites if site.name.endswith("TransformerBlock"))
    with torch.autocast(device, torch.bfloat16):
        rounded = model(**inputs)[0].float()
    assert site.fallbacks == {} and not torch.equal(rounded, expected)
    torch.testing.assert_close(rounded, expected, rtol=0.1, atol=0.1)
    with Count() as mode:
        torch.testing.assert_close(model(**inputs)[0], expected)
    assert mode.calls > 100
    with torch.enable_grad():
        given = inputs["hidden_states"].clone().requires_grad_()
        model(**{**inputs, "hidden_states": given})[0].sum().backward()
    assert given.grad is not None and given.grad.isfinite().all()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**inputs)[0], expected)
    assert torch.equal(model(**inputs)[0], expected)


def test_keywords_in_another_order(ltx: ModuleType, device: str) -> None:
    """Tensors of one form, so that their names alone tell them apart. A replay reads its arguments by position."""
    model, stock = make_model(device), make_model(device).transformer_blocks[0]
    report = ltx.optimize(model, graphs=False)
    block = model.transformer_blocks[0]
    one, other, cos, sin = torch.randn(4, 1, 6, 64, generator=torch.Generator().manual_seed(1)).to(device)
    more = {"temb": torch.ones(1, 1, 6 * 64, device=device), "image_rotary_emb": (cos, sin)}
    for first, second in (("hidden_states", "encoder_hidden_states"), ("encoder_hidden_states", "hidden_states")):
        call = {first: one, second: other, **more}
        for _ in range(4):
            torch.testing.assert_close(block(**call), stock(**call), rtol=1e-4, atol=1e-5)
    assert "recorded calls: 1 of 1 " in str(report)


def test_attention_that_is_replaced(
    ltx: ModuleType, replay: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that is put in the place of torch's attention is called, and neither recorded nor passed by."""
    model, inputs = make_model(device), make_inputs(device)
    ltx.optimize(model, graphs=False)
    expected, asked, own = warm(model, inputs), [], F.scaled_dot_product_attention

    def counted(*args: Any, **options: Any) -> Tensor:
        asked.append(args)
        return own(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", counted)
        for _ in range(3):
            asked.clear()
            torch.testing.assert_close(model(**inputs)[0], expected)
            assert len(asked) == 2 * TINY["num_layers"]
    asked.clear()
    assert torch.equal(model(**inputs)[0], expected) and asked == []


def test_backends_of_attention(
    ltx: ModuleType, replay: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay is of one backend, and one that torch does not know is not recorded."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, attention_backend

    model, inputs = make_model(device), make_inputs(device)
    ltx.optimize(model, graphs=False)
    expected = warm(model, inputs)
    asked: list[str] = []
    backends = _AttentionBackendRegistry._backends
    math, name = backends[AttentionBackendName._NATIVE_MATH], AttentionBackendName.SAGE

    def counted(*args: Any, **options: Any) -> Tensor:
        asked.append("math")
        return math(*args, **options)

    monkeypatch.setitem(backends, name, counted)
    accepted = _AttentionBackendRegistry._supported_arg_names
    monkeypatch.setitem(accepted, name, accepted[AttentionBackendName._NATIVE_MATH])
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", name)
    for _ in range(4):
        torch.testing.assert_close(model(**inputs)[0], expected)
    assert len(asked) == 4 * 2 * TINY["num_layers"]
    assert all("backend" in call for call in found(replay, model)), found(replay, model)
    with attention_backend("_native_math"):  # torch's attention in a mode that the backend sets
        results = [model(**inputs)[0] for _ in range(4)]
        assert all(torch.equal(result, ordinary(replay, model, inputs, monkeypatch)) for result in results)


def test_replays_are_checked(ltx: ModuleType, replay: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LTX_KERNELS_RECORD=check: the same results, and an error that names block, line and tensor at a difference."""
    model, inputs = make_model(device), make_inputs(device)
    ltx.optimize(model, graphs=False)
    expected = warm(model, inputs)
    monkeypatch.setattr(replay, "RECORD", replay.CHECK)
    assert all(torch.equal(model(**inputs)[0], expected) for _ in range(3))
    assert replays(replay, model) == TINY["num_layers"]
    (call,) = replay.held(model.transformer_blocks[1]).replays.calls.values()
    values = call.function.__globals__
    products = [
        line for line in call.source.splitlines() if any(f"{f}(" in line for f in values if values[f] is F.linear)
    ]
    name = next(name for line in products for name in re.findall(r"held\w+", line))
    values[name] = values[name] * 2
    with pytest.raises(RuntimeError, match=rf"TransformerBlock transformer_blocks.1: result.*line \d+ .* {name}$"):
        model(**inputs)


def test_recording_can_be_turned_off(
    ltx: ModuleType, replay: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "RECORD", "0")
    model, inputs = make_model(device), make_inputs(device)
    ltx.optimize(model, graphs=False)
    warm(model, inputs)
    assert found(replay, model) == []


def test_kernels_of_attention(
    ltx: ModuleType, replay: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay is of torch's settings for attention: its kernels differ in the strides of their results."""
    model, inputs = make_model(device), make_inputs(device)
    ltx.optimize(model, graphs=False)
    expected = warm(model, inputs)
    with sdpa_kernel(SDPBackend.MATH):
        results = [model(**inputs)[0] for _ in range(4)]
        assert all(torch.equal(result, ordinary(replay, model, inputs, monkeypatch)) for result in results)
    assert torch.equal(model(**inputs)[0], expected)
    assert replays(replay, model) == 2 * TINY["num_layers"], found(replay, model)


def test_restore_and_copies(ltx: ModuleType, replay: ModuleType, device: str) -> None:
    model, inputs = make_model(device), make_inputs(device)
    stock = model(**inputs)[0]
    ltx.optimize(model, graphs=False)
    warm(model, inputs)
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.mul_(0.5)
    assert not torch.allclose(warm(copied, inputs), stock)
    ltx.restore(model)
    assert not found(replay, model) and torch.equal(model(**inputs)[0], stock)


def test_weights_that_move_at_every_call(ltx: ModuleType, replay: ModuleType, device: str) -> None:
    """As under an offload: the forward runs, and recording is given up."""
    model, inputs = make_model(device), make_inputs(device)
    ltx.optimize(model, graphs=False)
    expected = warm(model, inputs)
    for _ in range(replay.CHANGES + 2):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        torch.testing.assert_close(model(**inputs)[0], expected)
    assert all(replay.held(block).replays.refused for block in model.transformer_blocks)
    torch.testing.assert_close(model(**inputs)[0], expected)


def test_changes_with_replays_between_them(ltx: ModuleType, replay: ModuleType, device: str) -> None:
    """However often the weights move: recording goes on while its calls are replayed."""
    model, inputs = make_model(device), make_inputs(device)
    ltx.optimize(model, graphs=False)
    expected = warm(model, inputs)
    for _ in range(replay.CHANGES + 2):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        for _ in range(3):
            torch.testing.assert_close(model(**inputs)[0], expected)
        assert replays(replay, model) == TINY["num_layers"]


def test_a_block_that_was_refused_is_looked_at_again(ltx: ModuleType, replay: ModuleType, device: str) -> None:
    model, inputs = make_model(device), make_inputs(device)
    handle = model.transformer_blocks[0].attn1.to_q.register_forward_hook(lambda module, args, output: output)
    ltx.optimize(model, graphs=False)
    expected = warm(model, inputs)
    assert replays(replay, model) == TINY["num_layers"] - 1
    handle.remove()
    for _ in range(replay.REFUSED + 3):
        torch.testing.assert_close(model(**inputs)[0], expected)
    assert replays(replay, model) == TINY["num_layers"]


def test_views_in_a_recorded_call(recorders: ModuleType, device: str) -> None:
    """Views of arguments, weights and results are of the memory that the replay finds, wherever it begins."""
    small = nn.Parameter(torch.randn(3, 4, 8, device=device), False)
    large = nn.Parameter(torch.randn(recorders.SMALL, device=device), False)
    arguments = torch.randn(4, 2, 3, 8, device=device)

    def compute(x: Tensor) -> tuple[Tensor, ...]:
        half, other = x.unflatten(-1, (2, 4)).unbind(-2)
        one, two, _ = small.unbind(0)
        made = half + other.contiguous().to(x.dtype) + x.view(-1, 4)[0]
        copied = made.transpose(0, 1).reshape(3, 8)
        first, second = made.unflatten(-1, (2, 2)).unbind(-2)
        second.mul_(3)  # seen by every view of the same memory
        made.new_empty(0).view(-1)
        many = large.view(4, -1)[:, :4].t()
        return first @ one[:2], made[1:], copied, made.permute(2, 0, 1) + two[0, 0], many * second.sum(), second

    given = arguments[0]
    recorder = recorders.Recorder([given], [small, large], {})
    with recorder:
        result = compute(given)
    recording = recorder.recording(result)
    assert not isinstance(recording, str), recording
    function = recording.function
    for i in (3, 1):
        for weight in (small, large):
            weight.mul_(0.5)
        expected, found = compute(arguments[i]), function(arguments[i])
        assert all(torch.equal(*pair) and pair[0].stride() == pair[1].stride() for pair in zip(found, expected))
    held = [value for value in function.__globals__.values() if isinstance(value, Tensor) and value is not large]
    assert len(held) > 1 and all(tensor.untyped_storage().nbytes() <= recorders.SMALL for tensor in held)
    called = [function.__globals__[name] for name in function.__code__.co_names]
    assert called.count(torch.as_strided) == 5  # made's transpose, first, second, made[1:] and the last permutation
    assert Tensor.mul_ in called and Tensor.new_empty not in called


def test_views_of_another_dtype(recorders: ModuleType, device: str) -> None:
    """The bits of an argument, of a result and of a weight as integers, in every replay."""
    weight = nn.Parameter(torch.randn(4, device=device), False)

    def compute(x: Tensor) -> tuple[Tensor, ...]:
        return x.view(torch.int32) + 1, (2 * x).view(torch.int32)[0] + 1, weight.view(torch.int32) + 1

    first, second = torch.randn(2, 3, 4, device=device).unbind()
    recorder = recorders.Recorder([first], [weight], {})
    with recorder:
        result = compute(first)
    recording = recorder.recording(result)
    assert not isinstance(recording, str), recording
    for given in (first, second):
        assert all(torch.equal(*both) for both in zip(recording.function(given), compute(given)))


@pytest.mark.host
def test_what_cannot_be_written_down(recorders: ModuleType) -> None:
    """A failure of the recorder is a reason, and never an error of the call that it watches."""
    given = torch.eye(3)
    recorder = recorders.Recorder([given], [], {})
    with recorder:
        result = given.to_sparse() @ given  # a sparse tensor has no storage
    assert torch.equal(result, given)
    assert recorder.recording(result).startswith("a call cannot be written down: ")
    nested: Any = given
    for _ in range(300):
        nested = (nested,)
    assert recorders.Recorder([given], [], {}).recording(nested).startswith("its lines cannot be compiled: ")


@pytest.mark.host
def test_a_recorder_that_fails(
    ltx: ModuleType, recorders: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("no such line")

    model, inputs = make_model(device), make_inputs(device)
    report = ltx.optimize(model, graphs=False)
    expected = model(**inputs)[0]
    monkeypatch.setattr(recorders.Recorder, "_write", fail)
    assert all(torch.equal(model(**inputs)[0], expected) for _ in range(3))
    assert "a call cannot be written down: 'no such line'" in str(report)


@pytest.mark.host
@pytest.mark.parametrize("error", [RuntimeError, ValueError, KeyError])
def test_a_replay_that_fails_is_not_tried_again(
    ltx: ModuleType, replay: ModuleType, device: str, error: type[Exception]
) -> None:
    tried = []

    def fail(*_: Any) -> None:
        tried.append(1)
        raise error("gone")

    model, inputs = make_model(device), make_inputs(device)
    report = ltx.optimize(model, graphs=False)
    expected = warm(model, inputs)
    for call in found(replay, model):
        call.function = fail
    assert all(torch.equal(model(**inputs)[0], expected) for _ in range(3))
    assert len(tried) == TINY["num_layers"] and "a replay failed: " in str(report)
    (site,) = (site for site in report.sites if site.name.endswith("TransformerBlock"))
    assert sum(count for text, count in site.remarks.items() if "ran ordinarily" in text) == TINY["num_layers"]


@pytest.mark.host
@pytest.mark.parametrize("kind", ["sparse", "nested", "mkldnn"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_an_address_or_strides(ltx: ModuleType, replay: ModuleType, kind: str) -> None:
    """On a module beside its parameters they change nothing; among the parameters the block is not recorded."""
    make = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "mkldnn": lambda: torch.eye(3).to_mkldnn(),
    }[kind]
    model, inputs = make_model("cpu"), make_inputs("cpu")
    ltx.optimize(model, graphs=False)
    expected = model(**inputs)[0]
    model.transformer_blocks[0].note = make()
    assert torch.equal(warm(model, inputs), expected) and replays(replay, model) == TINY["num_layers"]
    model.transformer_blocks[0].register_buffer("further", make())
    assert torch.equal(warm(model, inputs), expected) and replays(replay, model) == TINY["num_layers"] - 1


def test_adapters_that_come_back(
    ltx: ModuleType, replay: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A switch back finds the calls that were recorded before, and they read the weights as these are now."""
    peft = pytest.importorskip("peft")
    model, inputs = make_model(device), make_inputs(device)
    ltx.optimize(model, graphs=False)
    for name in ("one", "two"):
        model.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q"], init_lora_weights=False), adapter_name=name)
    model.requires_grad_(False)
    for name in ("one", "two"):
        model.set_adapters(name)
        warm(model, inputs)
    with monkeypatch.context() as patch:
        patch.setattr(replay, "Recorder", None)
        patch.setattr(replay, "Snapshot", None)
        for name in ("one", "two", "one"):
            model.set_adapters(name)
            model.transformer_blocks[0].attn1.to_q.lora_B[name].weight.data.mul_(2)
            result = model(**inputs)[0]
            assert replays(replay, model) == len(model.transformer_blocks)
            assert torch.equal(result, ordinary(replay, model, inputs, monkeypatch))
    for i in range(2 * replay.SIGNATURES):
        model.set_adapters("one", 0.1 * i)
        model(**inputs)
    assert all(len(replay.held(block).replays._of_adapters) <= replay.SIGNATURES for block in model.transformer_blocks)


@pytest.mark.parametrize("precision", ["native", "fp8"])
def test_adapters(
    ltx: ModuleType, replay: ModuleType, device: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks with active adapters are recorded; whatever changes these makes another recording, with its own bits."""
    peft = pytest.importorskip("peft")
    if precision == "fp8" and device != "cpu" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs a GPU of compute capability 8.9")
    dtype = torch.bfloat16 if precision == "fp8" else torch.float32
    model, inputs = make_model(device, dtype), make_inputs(device, dtype=dtype)
    report = ltx.optimize(model, precision=precision)
    for name in ("one", "two"):
        config = peft.LoraConfig(r=4, target_modules=["to_q", "to_v", "ff.net.2"], init_lora_weights=False)
        model.add_adapter(config, adapter_name=name)
    model.requires_grad_(False)
    blocks = len(model.transformer_blocks)
    adapter = model.transformer_blocks[0].attn1.to_q.lora_B["one"]
    seen: list[Tensor] = []
    for change in (
        lambda: model.set_adapters("one"),
        lambda: model.set_adapters("two"),
        lambda: model.set_adapters("two", 0.5),
        lambda: model.set_adapters(["one", "two"], [0.5, 1.0]),
        lambda: adapter.weight.data.mul_(2),
        lambda: setattr(adapter, "weight", nn.Parameter(-adapter.weight, requires_grad=False)),
        model.disable_lora,
        model.enable_lora,
        lambda: model.fuse_lora(),
        lambda: model.unfuse_lora(),
        lambda: model.delete_adapters(["one", "two"]),
    ):
        change()
        result = warm(model, inputs)
        assert torch.equal(result, ordinary(replay, model, inputs, monkeypatch))
        assert replays(replay, model) == blocks, found(replay, model)
        assert all(not torch.equal(result, other) for other in seen[-1:])
        seen.append(result)
    text = "adapters beside fp8" if precision == "fp8" else "adapters beside"
    remarks = sum(site.remarks[text] for site in report.sites)
    assert remarks > 0 and not any(site.fallbacks for site in report.sites)
