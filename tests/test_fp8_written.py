"""Weights in fp8 that are written to, exchanged, merged or trained after they were quantised."""

from __future__ import annotations

import copy
import threading
import time
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")
from test_integration import distance, make_inputs, make_model

pytestmark = pytest.mark.usefixtures("no_grad", "fp8_device")

CHANGED = "the weight has changed or was trained since it was quantised: call optimize again"


@pytest.fixture
def model(device: str) -> nn.Module:
    return make_model(device, torch.bfloat16)


@pytest.fixture
def inputs(device: str) -> dict[str, Any]:
    return make_inputs(device, torch.bfloat16)


def changed(model: nn.Module) -> nn.Module:
    """A copy with other weights."""
    other = copy.deepcopy(model)
    torch.manual_seed(5)
    for parameter in other.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)
    return other


@pytest.mark.parametrize("stock_weights", ["beside", "cpu"])
def test_two_adapters_of_one_name(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], stock_weights: str
) -> None:
    """peft calls each "default". The second is merged before the model is called with the first."""
    peft = pytest.importorskip("peft")
    stock = copy.deepcopy(model)
    report = ltx.optimize(model, precision="fp8", stock_weights=stock_weights)
    outputs = []
    for part in stock, model:
        merged: Any = part
        for seed in (3, 4):
            torch.manual_seed(seed)
            targets = ["attn1.to_q", "attn1.to_k", "ff.net.0.proj", "ff.net.2"]
            config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=targets, init_lora_weights=False)
            merged = peft.PeftModel(merged, config).merge_and_unload()
        outputs.append(merged(**inputs)[0])
    assert distance(outputs[1], outputs[0]) < 0.1
    assert report.fallbacks == {}


def test_writes_into_a_state_dict(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    """Scripts that merge adapters add to its tensors. They are the stock weights in the host's memory."""
    want = changed(model)
    report = ltx.optimize(model, precision="fp8", stock_weights="cpu")
    for _ in range(3):
        model(**inputs)
    copied = copy.deepcopy(model)
    for name, tensor in model.state_dict().items():
        tensor.copy_(want.state_dict()[name])
    with pytest.raises(
        RuntimeError, match=r"^weight: expected the stock weight that was quantised, got other values, wr"
    ):
        model(**inputs)
    with pytest.raises(
        RuntimeError, match=r"^weight: expected the stock weight that was quantised, got other values, wr"
    ):
        copy.deepcopy(model)(**inputs)
    with pytest.raises(RuntimeError, match=r"^save_weights: .* which has changed since"):
        report.save_weights("unused")
    ltx.restore(model)
    assert torch.equal(model(**inputs)[0], want(**inputs)[0])
    copied(**inputs)  # its stock weights are its own


def swapped(weight: Tensor, along: str) -> Tensor:
    """The halves of a weight's rows or columns in the other order."""
    return torch.cat(weight.chunk(2, dim=0 if along == "rows" else 1)[::-1], dim=0 if along == "rows" else 1)


@pytest.mark.parametrize("along", ["rows", "columns"])
def test_halves_that_change_places(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], along: str) -> None:
    """As gate and up or scale and shift do where a checkpoint has them in the other order."""
    stock = copy.deepcopy(model)
    report = ltx.optimize(model, precision="fp8", stock_weights="beside")
    model(**inputs)
    for part in stock, model:
        weight = part.get_submodule("transformer_blocks.0.ff.net.0.proj").weight
        weight.data = swapped(weight.data, along)
    assert distance(model(**inputs)[0], stock(**inputs)[0]) < 0.03
    assert report.fallbacks == {"torch.Linear": {CHANGED: 1}}
    ltx.restore(model)
    ltx.optimize(model, precision="fp8", stock_weights="cpu")
    weight = model.get_submodule("transformer_blocks.0.ff.net.0.proj").weight
    weight.copy_(swapped(weight.view(torch.int8), along).view(weight.dtype))
    with pytest.raises(
        RuntimeError, match=r"^weight: expected values that were quantised, got others, written into fp8"
    ):
        model(**inputs)


@pytest.mark.host
def test_an_interrupt_while_weights_come_back(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before an adapter is merged. The model goes on as it was, and `restore` gives the stock weights back."""
    stock = model(**inputs)[0]
    ltx.optimize(model, precision="fp8")
    want = model(**inputs)[0]
    written = ltx.integrations.linear.written
    own, asked = written._sums, list[int]()

    def interrupted(values: Tensor) -> Tensor:
        asked.append(1)
        if len(asked) == 3:
            raise KeyboardInterrupt
        sums: Tensor = own(values)
        return sums

    with monkeypatch.context() as patch:
        patch.setattr(written, "_sums", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.fuse_lora()  # type: ignore[operator]
    assert len(asked) == 3
    assert distance(model(**inputs)[0], want) < 0.01
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16}
    ltx.restore(model)
    assert torch.equal(model(**inputs)[0], stock)


@pytest.mark.host
def test_threads_after_other_data(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads find new stock values at once. One quantises them, and none takes fp8 values for stock ones."""
    stock = changed(model)
    want = stock(**inputs)[0]
    ltx.optimize(model, precision="fp8", stock_weights="cpu")
    model(**inputs)
    for parameter, other in zip(model.parameters(), stock.parameters()):
        parameter.data = other.data.clone()
    home = ltx.integrations.linear.fp8_weights
    quantize, outputs = home.quantize_weight, list[Tensor]()

    def slowly(weight: Tensor) -> Any:
        quantised = quantize(weight)
        time.sleep(0.02)
        return quantised

    def call() -> None:
        with torch.no_grad():
            outputs.append(model(**inputs)[0])

    monkeypatch.setattr(home, "quantize_weight", slowly)
    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 3 and all(distance(output, want) < 0.05 for output in outputs)
    ltx.restore(model)
    assert torch.equal(model(**inputs)[0], want)


def test_a_copy_that_is_written_to(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    """A copied tensor counts its writes anew, and may reach the number that the original had."""
    name = "transformer_blocks.0.ff.net.2"
    while model.get_submodule(name).weight._version < 3:
        model.get_submodule(name).weight.mul_(1)
    ltx.optimize(model, precision="fp8")
    assert model.get_submodule(name).weight._version == 3
    copied = copy.deepcopy(model)
    assert distance(copy.deepcopy(copied)(**inputs)[0], model(**inputs)[0]) < 0.01
    weight = copied.get_submodule(name).weight
    for _ in range(3):
        weight.copy_(-weight.float())
    with pytest.raises(RuntimeError, match=r"^weight: expected values that were quantised, got others, written into"):
        copied(**inputs)


@pytest.mark.parametrize("how", ["loaded", "trained"])
def test_compiled_calls_after_other_weights(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], how: str
) -> None:
    """torch.compile cannot ask how often a weight was written to. Fused optimizers do not count it either."""
    report = ltx.optimize(model, precision="fp8", stock_weights="beside")
    compiled = torch.compile(model, backend="eager")
    before = compiled(**inputs)[0]
    if how == "loaded":
        model.load_state_dict(changed(make_model(before.device.type, torch.bfloat16)).state_dict())
    else:
        model.requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
        with torch.enable_grad():
            compiled(**inputs)[0].float().pow(2).mean().backward()
        optimizer.step()
        model.requires_grad_(False)
    stock = make_model(before.device.type, torch.bfloat16)
    stock.load_state_dict(model.state_dict())
    want = stock(**inputs)[0]
    assert distance(before, want) > 0.1
    for run in compiled, model:
        assert distance(run(**inputs)[0], want) < 0.02
    assert CHANGED in report.fallbacks["torch.Linear"] and f"{CHANGED} (compiled)" in report.fallbacks["torch.Linear"]
    torch.compiler.reset()


@pytest.mark.parametrize("stock_weights", ["beside", "cpu", "free"])
def test_weights_made_in_inference_mode(ltx: ModuleType, device: str, stock_weights: str) -> None:
    """Torch does not count writes into them, which the report says."""
    with torch.inference_mode():
        model = make_model(device, torch.bfloat16)
    report = ltx.optimize(model, precision="fp8", stock_weights=stock_weights)
    count = sum("ltx_fp8_scales" in module._buffers for module in model.modules())
    assert f"({count} made in inference mode, so that later writes into them are not noticed)" in str(report)
    ordinary = ltx.optimize(make_model(device, torch.bfloat16), precision="fp8", stock_weights=stock_weights)
    assert "inference mode" not in str(ordinary)


def test_loading_after_weights_were_brought_back(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    """Adapters that are fused and unfused leave nothing behind that would look at a restored layer."""
    want, state = model(**inputs)[0], {name: value.clone() for name, value in model.state_dict().items()}
    ltx.optimize(model, precision="fp8")
    home = ltx.integrations.linear.fp8_weights
    linears = [module for module in model.modules() if home.STOCK in module.__dict__]
    for linear in linears:
        home.bring_back(linear)
        home.hold(linear)
    ltx.restore(model)
    model.load_state_dict(state)
    assert linears and torch.equal(model(**inputs)[0], want)
    assert not any(linear._load_state_dict_post_hooks for linear in linears)
