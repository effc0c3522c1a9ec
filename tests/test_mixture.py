"""Mixtures of experts of diffusion transformers: HiDream-I1's, by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

hidream = pytest.importorskip("diffusers.models.transformers.transformer_hidream_image")
import families.hidream  # noqa: E402
from families import random_  # noqa: E402

EXPERTS, CHOSEN, WIDTH = 4, 2, 32


def make(device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A mixture that never chooses its last expert for the tokens of `tokens`."""
    mixture = random_(hidream.MOEFeedForwardSwiGLU(WIDTH, 48, EXPERTS, CHOSEN))
    mixture.gate.weight.data[-1] = -9
    return mixture.to(device, dtype)


def tokens(device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.rand(2, 23, WIDTH, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def error(mixture: Any, stock: Any) -> float:
    """Relative to what the stock mixture returns."""
    x = tokens(next(mixture.parameters()).device.type)
    with torch.no_grad():
        expected = stock(x)
        return ((mixture(x) - expected).float().norm() / expected.float().norm()).item()


def remarks(report: Any) -> str:
    return "; ".join(text for site in report.sites for text in site.remarks)


@pytest.fixture
def grouped(device: str) -> None:
    if device == "cuda" and torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("torch has no grouped product for this GPU")


def test_experts_at_once(ltx: ModuleType, device: str, grouped: None) -> None:
    """Tokens of one expert, of several and of none: all in two products, and none of them by an expert itself."""
    mixture = make(device)
    stock = copy.deepcopy(mixture)
    index = stock.gate(tokens(device))[0]
    assert set(index.flatten().tolist()) == set(range(EXPERTS - 1))
    report = ltx.optimize(mixture, strict=True)
    for expert in mixture.experts:  # a grouped product does not call them
        expert.__dict__["forward"] = None
    assert error(mixture, stock) < 0.01 and remarks(report) == "" and report.fallbacks == {}


def test_without_a_question_to_the_host(ltx: ModuleType, cuda: str, grouped: None) -> None:
    mixture, x = make(cuda), tokens(cuda)
    report = ltx.optimize(mixture)
    with torch.no_grad():
        mixture(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            mixture(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert remarks(report) == ""


def hook(mixture: Any) -> None:
    mixture.experts[1].register_forward_hook(lambda *_: None)


def hook_of_layer(mixture: Any) -> None:
    mixture.experts[1].w2.register_forward_hook(lambda *_: None)


def move(mixture: Any) -> None:
    weight = mixture.experts[1].w3.weight
    weight.data = weight.data.clone()


ONE_BY_ONE = {
    "a hook": (hook, "an expert has a hook, or was restored"),
    "a hook of a layer": (hook_of_layer, "adapters, hooks, or weights that lie apart"),
    "a weight of its own": (move, "adapters, hooks, or weights that lie apart"),
}


@pytest.mark.parametrize("case", ONE_BY_ONE)
def test_experts_one_by_one(ltx: ModuleType, device: str, grouped: None, case: str) -> None:
    change, reason = ONE_BY_ONE[case]
    mixture = make(device)
    stock = copy.deepcopy(mixture)
    report = ltx.optimize(mixture)
    assert error(mixture, stock) < 0.01 and remarks(report) == ""
    change(mixture)
    assert error(mixture, stock) < 0.01 and remarks(report) == f"experts one by one: {reason}"


def test_eager_rounding(ltx: ModuleType, device: str) -> None:
    mixture = make(device)
    stock = copy.deepcopy(mixture)
    report = ltx.optimize(mixture, rounding="eager")
    assert error(mixture, stock) < 0.01 and remarks(report) == "experts one by one: rounding eager"


def test_fp8(ltx: ModuleType, fp8_device: str) -> None:
    """Of a whole model: blocks offer the layers of their experts."""
    model = random_(families.hidream.make()).to(fp8_device, torch.bfloat16)
    inputs = in_bfloat16(families.hidream.inputs(1), fp8_device)
    with torch.no_grad():
        stock = model(**inputs, return_dict=False)[0]
        report = ltx.optimize(model, precision="fp8")
        ours = model(**inputs, return_dict=False)[0]
    assert ((ours - stock).float().norm() / stock.float().norm()).item() < 0.1
    assert remarks(report) == "experts one by one: in fp8" and report.fallbacks == {}


def in_bfloat16(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, torch.bfloat16 if value.is_floating_point() else value.dtype)
    if isinstance(value, dict):
        return {name: in_bfloat16(part, device) for name, part in value.items()}
    return [in_bfloat16(part, device) for part in value]


@pytest.mark.parametrize("prepare", [torch.nn.Module.train, torch.nn.Module.eval], ids=["train", "eval"])
def test_gradients(ltx: ModuleType, device: str, prepare: Callable[[Any], Any]) -> None:
    """The model's own code computes them, which gives experts a gradient where it is trained alone."""
    mixture = prepare(make(device, torch.float32))
    stock = copy.deepcopy(mixture)
    report = ltx.optimize(mixture)
    gradients = []
    for module in (stock, mixture):
        x = tokens(device, torch.float32).requires_grad_()
        module(x).square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)
    assert remarks(report) == "experts called by the model's own code: a gradient is needed"


def test_weights_of_their_own_after_restore(ltx: ModuleType, device: str) -> None:
    mixture = make(device)
    weights = [parameter.clone() for parameter in mixture.parameters()]
    ltx.optimize(mixture).restore()
    experts = list(mixture.experts.parameters())
    assert len({p.untyped_storage().data_ptr() for p in experts}) == len(experts)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in experts)
    assert all(map(torch.equal, mixture.parameters(), weights))
