"""Layers of transformers whose forward is a checkpoint by itself, as from transformers 5.24 on."""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

transformers = pytest.importorskip("transformers")
from helpers.language_models import make_ids, make_model  # noqa: E402
from transformers import modeling_layers  # noqa: E402
from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaDecoderLayer  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def of_a_checkpoint(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward as from 5.24 on. It is transformers' code: a function of other files is taken for a patch."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            kwargs.update({name: None for name in ("past_key_values", "cache") if name in kwargs})
            return self._gradient_checkpointing_func(partial(stock, self, **kwargs), *args)
        return stock(self, *args, **kwargs)

    made = types.FunctionType(forward.__code__, vars(modeling_layers), "forward", None, forward.__closure__)
    return functools.update_wrapper(made, stock)


@pytest.fixture(autouse=True)
def as_from_5_24_on(monkeypatch: pytest.MonkeyPatch) -> None:
    if "__call__" in vars(GradientCheckpointingLayer):
        monkeypatch.delattr(GradientCheckpointingLayer, "__call__")
        monkeypatch.setattr(LlamaDecoderLayer, "forward", of_a_checkpoint(LlamaDecoderLayer.forward))


@pytest.fixture
def model(device: str) -> Any:
    """In training, with checkpoints that count their calls in `model.checkpoints`."""
    made = make_model(device, torch.float32, num_hidden_layers=3)
    made.train().requires_grad_(True)
    made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    made.checkpoints = 0

    def counted(function: Callable[..., Any], *args: Any) -> Any:
        made.checkpoints += 1
        return checkpoint(function, *args, use_reentrant=False)

    for layer in made.model.layers:
        assert layer.gradient_checkpointing
        layer._gradient_checkpointing_func = counted
    return made


def gradients(model: Any, ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for got, want in zip(found, expected, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()


def layers_of(report: Any) -> Any:
    (site,) = [site for site in report.sites if site.name.endswith("DecoderLayer")]
    return site


def test_every_layer_that_checkpoints_itself_is_known_as_one(ltx: ModuleType) -> None:
    root = ltx.integrations.transformers
    found = 0
    for key, entry in root.ENTRIES.items():
        module, _, name = key.rpartition(".")
        if module.startswith("transformers."):
            cls = getattr(importlib.import_module(module), name)
            checkpoints = any("checkpoints_itself" in code for code in names_in(entry.forward))
            assert issubclass(cls, GradientCheckpointingLayer) == checkpoints, key
            found += checkpoints
    assert found > 15


def names_in(function: Any) -> Iterator[tuple[str, ...]]:
    """The names that a function reads, and those that it holds read."""
    yield function.__code__.co_names
    for cell in function.__closure__ or ():
        if callable(cell.cell_contents) and hasattr(cell.cell_contents, "__code__"):
            yield from names_in(cell.cell_contents)


def test_the_layers_are_checkpoints(ltx: ModuleType, device: str, model: Any) -> None:
    """Once in each step, and not where no gradient is needed or the model is not in training."""
    ids = make_ids(device, 40)
    expected = gradients(model, ids)
    model.checkpoints = 0
    report = ltx.optimize(model)
    site = layers_of(report)
    for steps in (1, 2, 3):
        assert_close(gradients(model, ids), expected)
        assert model.checkpoints == site.calls == site.recomputed == 3 * steps and site.fallbacks == {}
        assert all(layer.gradient_checkpointing for layer in model.model.layers)
    with torch.no_grad():
        model(ids)
    model.eval()
    model(ids)
    assert model.checkpoints == 9


def test_a_layer_that_runs_stock_is_one_checkpoint(ltx: ModuleType, device: str, model: Any) -> None:
    """Not a checkpoint within another one."""
    ids = make_ids(device, 40)
    expected = gradients(model, ids)
    model.checkpoints = 0
    report = ltx.optimize(model)
    model.model.layers[1].input_layernorm.register_forward_hook(lambda *arguments: None)
    assert_close(gradients(model, ids), expected)
    site = layers_of(report)
    assert model.checkpoints == 3 and sum(site.fallbacks.values()) == 1
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


def test_a_cache_runs_stock(ltx: ModuleType, device: str, model: Any) -> None:
    """The stock layer drops it, since its second run would add to it once more."""
    report = ltx.optimize(model)
    layer, site = model.model.layers[0], layers_of(report)
    hidden = torch.randn(1, 8, model.config.hidden_size, device=device, requires_grad=True)
    tables = model.model.rotary_emb(hidden, torch.arange(8, device=device)[None])
    expected = layer(hidden, position_embeddings=tables)
    cache = transformers.DynamicCache(config=model.config)
    found = layer(hidden, position_embeddings=tables, **{ltx.integrations.causal.kv_cache.CACHE: cache})
    torch.testing.assert_close(found, expected)
    assert cache.get_seq_length() == 0
    assert site.fallbacks == {"a cache under a checkpoint": 1} and site.calls == 1


def test_a_model_that_is_restored_before_its_backward(ltx: ModuleType, device: str, model: Any) -> None:
    ids = make_ids(device, 40)
    expected = gradients(model, ids)
    ltx.optimize(model)
    loss = model(ids, labels=ids, use_cache=False).loss
    ltx.restore(model)
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        loss.backward()
    assert_close(gradients(model, ids), expected)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


def test_an_error_leaves_the_layers_as_they_were(ltx: ModuleType, device: str, model: Any) -> None:
    ltx.optimize(model)

    def fail(*arguments: Any) -> None:
        raise RuntimeError("of a hook")

    handle = model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="of a hook"):
        model(make_ids(device, 40), use_cache=False)
    handle.remove()
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
