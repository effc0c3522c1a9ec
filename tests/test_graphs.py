"""optimize(..., graphs=True): which calls are replayed, which run ordinarily, and that the results are the same.

Without a GPU, a function that runs again on the captured inputs stands in for the graph. graphs="auto" is in
test_graphs_that_pay.py.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.ltx_video import make_inputs, make_model
from torch import Tensor, nn

diffusers = pytest.importorskip("diffusers")

pytestmark = pytest.mark.usefixtures("no_grad")


class Again:
    """What a captured graph does, without a GPU: the same launches on the inputs of the capture."""

    pool, bytes, seconds = None, 0, 1.25

    def __init__(self, function: Callable[..., Any], leaves: Sequence[Any], spec: Any, pool: Any) -> None:
        from torch.utils import _pytree as pytree

        self.inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.call = lambda: function(*(arguments := pytree.tree_unflatten(self.inputs, spec))[0], **arguments[1])

    def __call__(self, leaves: Sequence[Any]) -> Any:
        for mine, given in zip(self.inputs, leaves):
            if isinstance(mine, Tensor):
                mine.copy_(given)
        return self.call()


@pytest.fixture(autouse=True)
def graphs(ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ltx.integrations.replay.cuda_graphs
    if device == "cpu":
        monkeypatch.setattr(module, "DEVICE", "cpu")
        monkeypatch.setattr(module, "Captured", Again)
    return module


def state(graphs: ModuleType, module: nn.Module) -> Any:
    return graphs.graphs_of(module)


def test_second_call_is_captured_and_later_ones_replayed(ltx: ModuleType, graphs: ModuleType, device: str) -> None:
    model = make_model(device)
    ltx.optimize(model, graphs=False)
    expected = [model(**make_inputs(device, seed=seed))[0] for seed in range(4)]
    report = ltx.optimize(model, graphs=True)
    found = [model(**make_inputs(device, seed=seed))[0] for seed in range(4)]
    for one, other in zip(found, expected):
        assert torch.equal(one, other)
    assert len({result.data_ptr() for result in found}) == 4  # copies: a replay writes over its own
    held = state(graphs, model)
    assert (held.replayed, dict(held.ordinary)) == (3, {graphs.FIRST: 1})
    (captured,) = held.captured.values()
    capture = f"captured in {captured.seconds:.2f} s or less; 3 calls replayed"
    assert "graphs of LTXVideoTransformer3DModel: 1" in str(report) and capture in str(report)


def test_values_and_shapes_have_graphs_of_their_own(ltx: ModuleType, graphs: ModuleType, device: str) -> None:
    model = make_model(device)
    stock = [model(**make_inputs(device, frames))[0] for frames in (2, 3, 2)]
    ltx.optimize(model, graphs=True)
    for _ in range(3):
        for frames, expected in zip((2, 3, 2), stock):
            assert (model(**make_inputs(device, frames))[0] - expected).norm() < 1e-5 * expected.norm()
    assert len(state(graphs, model).captured) == 2
    scaled = {**make_inputs(device), "rope_interpolation_scale": (1.0, 2.0, 2.0)}
    ltx.restore(model)
    expected = model(**scaled)[0]
    ltx.optimize(model, graphs=True)
    for _ in range(3):
        model(**make_inputs(device))
        assert (model(**scaled)[0] - expected).norm() < 1e-5 * expected.norm()


def test_equal_values_of_other_types_have_graphs_of_their_own(graphs: ModuleType, device: str) -> None:
    held, module = graphs.Graphs(), nn.Identity().eval()
    x = torch.tensor([5.0], device=device)

    def add(x: Tensor, value: Any) -> Tensor:
        return x + {bool: 1, int: 2, float: 3}[type(value)]

    for _ in range(3):
        assert [held.run(module, add, x, value).item() for value in (True, 1, 1.0)] == [6, 7, 8]
    assert held.replayed == 2 * 3


@pytest.mark.host
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_arguments_that_cannot_be_compared(graphs: ModuleType, device: str) -> None:
    """A set has no hash, and a nested tensor no strides."""
    held, module = graphs.Graphs(), nn.Identity().eval()
    x = torch.eye(3, device=device)
    for given in ({1}, torch.nested.nested_tensor([x, x[:2]])):
        assert held.run(module, lambda x, given: x, x, given) is x
    assert held.ordinary == {"an argument is a set": 1, "an argument that cannot be compared": 1}


def test_an_object_among_the_arguments_is_refused_and_copied_in_a_result(graphs: ModuleType, device: str) -> None:
    """A call may change it, as a language model changes its KV cache; a replay would change the graph's own."""

    class Cache:
        def __init__(self, x: Tensor) -> None:
            self.keys = [x]

    x = torch.ones(3, device=device)
    held, module, cache = graphs.Graphs(), nn.Identity().eval(), Cache(x)
    for _ in range(3):
        held.run(module, lambda x, cache: cache.keys.append(x), x, cache)
    assert len(cache.keys) == 4 and held.ordinary == {"an argument is a Cache": 3}
    held = graphs.Graphs()
    results = [held.run(module, lambda x: (x + 1, Cache(x + 2)), x * i) for i in range(4)]
    assert held.replayed == 3
    for i, (value, made) in enumerate(results):
        assert value[0] == i + 1 and made.keys[0][0] == i + 2


@pytest.mark.host
def test_values_that_never_change_are_part_of_the_signature(graphs: ModuleType, device: str) -> None:
    held, module = graphs.Graphs(), nn.Identity().eval()
    x = torch.ones(3, device=device)
    for _ in range(2):
        for dtype in (torch.float32, torch.float64):
            assert held.run(module, lambda x, dtype: x.to(dtype), x, dtype).dtype == dtype
    assert held.replayed == 2


def test_a_bounded_number_is_kept(ltx: ModuleType, graphs: ModuleType, device: str) -> None:
    model = make_model(device)
    ltx.optimize(model, graphs=True)
    for frames in range(1, graphs.LIMIT + 3):
        for _ in range(2):
            model(**make_inputs(device, frames))
    assert len(state(graphs, model).captured) == graphs.LIMIT


def test_the_graph_that_was_used_least_recently_goes(graphs: ModuleType, device: str) -> None:
    held, module = graphs.Graphs(), nn.Identity().eval()

    def is_replayed(size: int) -> bool:
        before = held.replayed
        held.run(module, torch.neg, torch.ones(size, device=device))
        return bool(held.replayed > before)

    for size in range(1, graphs.LIMIT + 1):
        assert [is_replayed(size) for _ in range(2)] == [False, True]
    assert is_replayed(1)
    assert not is_replayed(graphs.LIMIT + 1)
    assert is_replayed(1) and not is_replayed(2)


def test_what_a_graph_cannot_hold_runs_ordinarily(ltx: ModuleType, graphs: ModuleType, device: str) -> None:
    model = make_model(device)
    inputs = make_inputs(device)
    expected = model(**inputs)[0]
    ltx.optimize(model, graphs=True)

    def reason() -> str:
        before = state(graphs, model).ordinary.copy()
        assert (model(**inputs)[0] - expected).norm() < 1e-5 * expected.norm()
        ((found, _),) = (state(graphs, model).ordinary - before).items()
        return found

    for _ in range(2):
        model(**inputs)
    block = model.transformer_blocks[0]
    handle = block.ff.register_forward_hook(lambda *_: None)
    assert reason() == "a hook on a FeedForward"
    handle.remove()
    assert reason() == graphs.FIRST  # the state has changed, so the graphs are gone
    with torch.enable_grad():
        assert reason() == "gradients are on"
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert reason() == "a hook of all modules is registered"
    handle.remove()
    products = torch.backends.cuda.matmul
    was, products.allow_tf32 = products.allow_tf32, not products.allow_tf32
    try:
        assert reason() == graphs.FIRST
    finally:
        products.allow_tf32 = was
    block.attn1.to_q.weight = nn.Parameter(block.attn1.to_q.weight.clone(), requires_grad=False)
    assert reason() == graphs.FIRST
    block.train()
    assert reason() == "training mode"
    block.eval()
    assert reason() == graphs.FIRST
    block.compile()
    assert reason() == "torch.compile"


PROMPT_WITH_PADDING = {"input_ids": [[3, 5, 7, 11, 13, 17, 0, 0]], "attention_mask": [[1] * 6 + [0] * 2]}


def hidden_states(model: nn.Module, device: str, first: int) -> tuple[Tensor, ...]:
    """What pipelines of FLUX.2, Z-Image and Qwen-Image ask their text encoders for."""
    prompt = {name: torch.tensor(rows, device=device) for name, rows in PROMPT_WITH_PADDING.items()}
    prompt["input_ids"][0, 0] = first
    states: tuple[Tensor, ...] = model(**prompt, output_hidden_states=True, use_cache=False).hidden_states
    return states


def test_hidden_states_of_a_text_encoder(ltx: ModuleType, graphs: ModuleType, device: str) -> None:
    """transformers notes them by hooks that stay on the layers, and returns them with the result."""
    language_models = pytest.importorskip("helpers.language_models")
    model = language_models.make_model(device, family="Qwen3")
    stock = [hidden_states(model, device, first) for first in range(3, 7)]
    report = ltx.optimize(model, graphs=True)
    found = [hidden_states(model, device, first) for first in range(3, 7)]
    for mine, theirs in zip(found, stock):
        assert len(mine) == len(theirs) == language_models.LAYERS + 1
        for one, other in zip(mine, theirs):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    addresses = {held.data_ptr() for states in found for held in states}
    assert len(addresses) == len(found) * len(found[0])  # copies
    assert state(graphs, model).replayed == 3 and not report.fallbacks
    model.model.layers[0].register_forward_hook(lambda *_: None)
    hidden_states(model, device, 3)
    assert state(graphs, model).ordinary["a hook on a Qwen3DecoderLayer"] == 1


def test_hidden_states_of_a_model_around_a_graph(ltx: ModuleType, graphs: ModuleType, device: str) -> None:
    """Replays run no hooks, so that the model around would miss what they note."""
    language_models = pytest.importorskip("helpers.language_models")
    model = language_models.make_model(device, family="Qwen3")
    stock = hidden_states(model, device, 3)
    layer = model.model.layers[0]
    ltx.optimize(layer, graphs=True)
    for _ in range(3):
        for one, other in zip(hidden_states(model, device, 3), stock):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert state(graphs, layer).ordinary["a model around it notes hidden states or attentions"] == 3


def test_lora_layers_run_ordinarily(ltx: ModuleType, graphs: ModuleType, device: str) -> None:
    peft = pytest.importorskip("peft")
    model = make_model(device)
    ltx.optimize(model, graphs=True)
    for _ in range(2):
        model(**make_inputs(device))
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    model.requires_grad_(False)
    ours = model(**make_inputs(device))[0]
    assert state(graphs, model).ordinary["LoRA layers: fuse them, and call optimize again"] == 1
    ltx.restore(model)
    stock = model(**make_inputs(device))[0]
    assert (ours - stock).norm() < 1e-5 * stock.norm()


def test_a_capture_that_fails_is_not_tried_again(
    ltx: ModuleType, graphs: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fail(*_: Any) -> None:
        tried.append(1)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graphs, "Captured", fail)
    model = make_model(device)
    report = ltx.optimize(model, graphs=True)
    results = [model(**make_inputs(device))[0] for _ in range(4)]
    assert len(tried) == 1 and all(torch.equal(result, results[0]) for result in results)
    assert "not replayed, 3 x: its capture failed: operation not permitted when stream is capturing" in str(report)


def test_a_capture_that_fails_leaves_nothing_behind(ltx: ModuleType, graphs: ModuleType, cuda_graphs: str) -> None:
    """The stream is the caller's again, random numbers can be had, and other graphs are captured and replayed."""
    held, module = graphs.Graphs(), nn.Linear(4, 4).to(cuda_graphs).eval().requires_grad_(False)
    stream = torch.cuda.current_stream()
    x, y, z = (torch.ones(rows, 4, device=cuda_graphs) for rows in (1, 2, 3))

    def waits(value: Tensor) -> Tensor:
        return value * value.sum().item()  # the host waits, which no capture permits

    for function, value in ((module, x), (waits, y), (module, x), (module, z)):
        for _ in range(3):
            assert torch.equal(held.run(module, function, value), function(value))
            assert torch.cuda.current_stream() == stream
    assert torch.rand(1, device=cuda_graphs).item() < 1
    assert held.replayed == 2 + 0 + 3 + 2, held.refused
    assert held.ordinary[graphs.FIRST] == 3
    ((reason, count),) = [(reason, n) for reason, n in held.ordinary.items() if reason != graphs.FIRST]
    assert count == 2 and reason.startswith("its capture failed: ") and "previous error" not in reason


def test_graphs_are_captured_again(ltx: ModuleType, graphs: ModuleType, device: str) -> None:
    """After a change of the model has dropped them all."""
    model, inputs = make_model(device), make_inputs(device)
    ltx.optimize(model, graphs=True)
    to_q = model.transformer_blocks[0].attn1.to_q
    for factor in (1.5, 0.5):
        to_q.weight = nn.Parameter(factor * to_q.weight, requires_grad=False)
        for _ in range(3):
            found = model(**inputs)[0]
        (captured,) = state(graphs, model).captured.values()
        assert captured is not None
        (pool,) = state(graphs, model).plan.pools.values()
        assert pool.handle is captured.pool and captured in pool.graphs
    ltx.restore(model)
    assert (found - model(**inputs)[0]).norm() < 1e-5 * found.norm()


def test_another_device_than_the_current_one(
    ltx: ModuleType, graphs: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture holds what is launched on the current device alone."""
    model = make_model(device)
    ltx.optimize(model, graphs=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert graphs._why_not_call([torch.zeros(1, device=device)]).endswith("not on the current GPU")
    assert graphs._obstacle(model).endswith("not on the current GPU")


def test_restore_and_copies(ltx: ModuleType, graphs: ModuleType, device: str) -> None:
    model = make_model(device)
    stock = model(**make_inputs(device))[0]
    ltx.optimize(model, graphs=True)
    for _ in range(3):
        model(**make_inputs(device))
    copied = copy.deepcopy(model)
    assert state(graphs, copied) is None and state(graphs, model).captured
    for parameter in copied.parameters():
        parameter.data.mul_(0.5)
    for _ in range(3):
        changed = copied(**make_inputs(device))[0]
    assert not torch.allclose(changed, stock)
    ltx.restore(model)
    assert state(graphs, model) is None
    assert torch.equal(model(**make_inputs(device))[0], stock)


def test_a_part_and_then_the_whole(ltx: ModuleType, graphs: ModuleType, device: str) -> None:
    model = make_model(device)
    ltx.optimize(model.transformer_blocks[0], graphs=True)
    report = ltx.optimize(model, graphs=True)
    assert report.replaced["diffusers.LTXVideoTransformerBlock"] == len(model.transformer_blocks)
    assert "patched" not in str(report)


def test_threads_share_a_model(ltx: ModuleType, graphs: ModuleType, device: str) -> None:
    model = make_model(device)
    ltx.optimize(model, graphs=False)
    expected = [model(**make_inputs(device, seed=seed))[0] for seed in range(4)]
    ltx.optimize(model, graphs=True)
    wrong = []

    def work(seed: int) -> None:
        with torch.no_grad():
            for _ in range(5):
                if not torch.equal(model(**make_inputs(device, seed=seed))[0], expected[seed]):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_where_they_pay_by_default_and_checked(ltx: ModuleType, graphs: ModuleType, device: str) -> None:
    model = make_model(device)
    report = ltx.optimize(model, graphs=False)
    model(**make_inputs(device))
    assert state(graphs, model) is None and "graphs" not in str(report)
    report = ltx.optimize(model)
    with torch.enable_grad():
        model(**make_inputs(device))
    assert state(graphs, model).rule is not None
    assert "graphs of LTXVideoTransformer3DModel where they pay: none; 1 x gradients are on" in str(report)
    assert "diffusers.LTXVideoTransformer3DModel" not in report.replaced
    with pytest.raises(TypeError, match='graphs: expected True, False or "auto", got 1'):
        ltx.optimize(model, graphs=1)
    with pytest.raises(ValueError, match="graphs: expected True, False or \"auto\", got 'yes'"):
        ltx.optimize(model, graphs="yes")


def test_in_fp8(ltx: ModuleType, graphs: ModuleType, device: str) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs a GPU of compute capability 8.9")
    dtype = torch.bfloat16
    model = make_model(device, dtype)
    ltx.optimize(model, precision="fp8", graphs=False)
    expected = [model(**make_inputs(device, seed=seed, dtype=dtype))[0] for seed in range(3)]
    ltx.optimize(model, precision="fp8", graphs=True)
    for seed in range(3):
        assert torch.equal(model(**make_inputs(device, seed=seed, dtype=dtype))[0], expected[seed])
    assert state(graphs, model).replayed == 2
