"""Where the weights of a model in fp8 are: stock ones held in the host's memory, offload, and the bytes that move."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")
from diffusers.hooks import group_offloading
from test_families import cast, every_path, make, run
from test_families import distance as distances
from test_integration import (
    LAYERS,
    distance,
    make_inputs,
    make_model,
    offload_groups,
    offload_model,
    offload_sequentially,
    patched,
)
from test_integration_fp8 import LINEARS

pytestmark = pytest.mark.usefixtures("no_grad", "fp8_device")


@pytest.fixture
def model(device: str) -> nn.Module:
    return make_model(device, torch.bfloat16)


@pytest.fixture
def inputs(device: str) -> dict[str, Any]:
    return make_inputs(device, torch.bfloat16)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(one[name].dtype == other[name].dtype for name in one)
    assert all(torch.equal(one[name].cpu(), other[name].cpu()) for name in one)


def carried(model: nn.Module) -> int:
    """The bytes that moving a model moves."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def quantised_bytes(model: nn.Module) -> tuple[int, int]:
    """(of the stock weights of the quantised layers, of their fp8 weights and scales)."""
    linears = [m for m in model.modules() if type(m) is nn.Linear and "_ltx_kernels" in vars(m)]
    stock = sum(2 * linear.in_features * linear.out_features for linear in linears)
    return stock, stock // 2 + sum(4 * linear.out_features for linear in linears)


# ---- Stock weights in the host's memory


def test_held(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    """The bits of fp8 with the stock weights beside; the model carries fp8 weights alone, and gets its own back."""
    before, size = state(model), carried(model)
    ltx.optimize(model, precision="fp8", stock_weights="beside")
    want = model(**inputs)[0]
    stock, fp8 = quantised_bytes(model)
    assert carried(model) == size + fp8
    report = ltx.optimize(model, precision="fp8")
    assert torch.equal(model(**inputs)[0], want)
    assert carried(model) == size - stock + fp8
    assert report.fallbacks == {} and "one by one" not in str(report) and "in the host's memory" in str(report)
    assert model.dtype == torch.bfloat16
    assert_same(state(model), before)
    report.restore()
    assert_same(state(model), before)
    assert {tensor.device for tensor in state(model).values()} == {tensor.device for tensor in before.values()}
    assert carried(model) == size and patched(model) == []
    linear = model.transformer_blocks[0].attn1.to_q
    assert vars(linear).keys() == vars(nn.Linear(1, 1)).keys()
    assert not (linear._state_dict_hooks or linear._load_state_dict_pre_hooks or linear._state_dict_pre_hooks)


@pytest.mark.parametrize("stock_weights", ["cpu", "free"])
def test_shared_weights_stay(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], stock_weights: str) -> None:
    """A parameter that another module reads as well keeps its data, of the device and the dtype that it has."""
    first, second = (block.attn1 for block in model.transformer_blocks)
    second.to_q.weight = first.to_q.weight
    first.norm_of_weights = nn.Module()
    first.norm_of_weights.weight = first.to_k.weight
    ltx.optimize(model, precision="fp8", stock_weights="beside")
    want = model(**inputs)[0]
    report = ltx.optimize(model, precision="fp8", stock_weights=stock_weights)
    assert torch.equal(model(**inputs)[0], want)
    dtypes = [attention.get_submodule(name).weight.dtype for attention in (first, second) for name in ("to_q", "to_k")]
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float8_e4m3fn]
    assert "(3 beside the stock ones, which other modules read)" in str(report)


def test_held_weights_are_saved(ltx: ModuleType, model: nn.Module, tmp_path: Any) -> None:
    before = state(model)
    ltx.optimize(model, precision="fp8", stock_weights="cpu")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert_same(state(loaded.to(next(iter(before.values())).device)), before)


@pytest.mark.host
@pytest.mark.parametrize("options", [{}, {"strict": False}, {"assign": True}], ids=str)
@pytest.mark.parametrize(
    "part", ["", "transformer_blocks", "transformer_blocks.0.attn1", "transformer_blocks.1.ff.net.2"]
)
@pytest.mark.parametrize("stock_weights", ["cpu", "free"])
def test_replaced_weights_are_not_loaded_over(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], stock_weights: str, part: str, options: dict[str, bool]
) -> None:
    """Refused before anything is written, whatever part of the model loads; other tensors load."""
    state = model.get_submodule(part).state_dict()
    weights = {name: 0.5 * tensor for name, tensor in state.items()}
    ltx.optimize(model, precision="fp8", stock_weights=stock_weights)
    loading, want = model.get_submodule(part), model(**inputs)[0]
    tensors = {name: (id(t), t._version) for name, t in model.named_parameters()}
    name = next(
        f"{path}.weight" if path else "weight" for path, m in loading.named_modules() if "_ltx_fp8_of" in vars(m)
    )
    do = "restore the model, load, and optimize again" if stock_weights == "cpu" else "load them into a new model"
    text = f"^state_dict: expected no stock weights of layers in fp8, got {name}, and nothing was loaded: {do}$"
    with pytest.raises(RuntimeError, match=text):
        loading.load_state_dict(weights, **options)
    assert {name: (id(t), t._version) for name, t in model.named_parameters()} == tensors
    assert torch.equal(model(**inputs)[0], want)
    # What holds no weight of a quantised layer is loaded.
    norm = model.transformer_blocks[0].attn1.norm_q
    model.load_state_dict({"transformer_blocks.0.attn1.norm_q.weight": norm.weight * 0.5}, strict=False)
    assert not torch.equal(model(**inputs)[0], want)
    if stock_weights == "cpu":
        ltx.restore(model)
        assert not any(m._load_state_dict_pre_hooks or "_ltx_fp8_handles" in vars(m) for m in model.modules())
        loading.load_state_dict(weights, **options)


@pytest.mark.host
def test_restore_that_runs_out_of_memory(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that cannot get its stock weight back stays in fp8 and works; a second restore finishes."""
    before, stock = state(model), model(**inputs)[0]
    ltx.optimize(model, precision="fp8", stock_weights="cpu")
    part, full = ltx.integrations.linear.fp8_weights, model.transformer_blocks[0].attn1.to_q
    held = part.held_weight

    def no_memory(linear: nn.Module) -> Tensor:
        if linear is full:
            raise torch.OutOfMemoryError("no memory")
        return held(linear)

    with monkeypatch.context() as patch:
        patch.setattr(part, "held_weight", no_memory)
        with pytest.raises(RuntimeError, match=r"^1 modules were not restored, .*transformer_blocks.0.attn1.to_q: no "):
            ltx.restore(model)
    assert patched(model) == ["transformer_blocks.0.attn1.to_q"]
    assert 0 < distance(model(**inputs)[0], stock) < 0.05
    assert_same(state(model), before)
    with pytest.raises(RuntimeError, match="expected no stock weights of layers in fp8, got transformer_blocks"):
        model.load_state_dict(before)
    ltx.restore(model)
    assert_same(state(model), before)
    assert torch.equal(model(**inputs)[0], stock) and patched(model) == []


def test_deepcopy_of_held(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    before = state(model)
    ltx.optimize(model, precision="fp8", stock_weights="cpu")
    want = model(**inputs)[0]
    copied = copy.deepcopy(model)
    ltx.restore(model)
    assert torch.equal(copied(**inputs)[0], want)
    assert_same(state(copied), before)
    ltx.restore(copied)
    assert_same(state(copied), before)
    assert not copied.transformer_blocks[0].attn1.to_q._state_dict_hooks
    assert not any(module._load_state_dict_pre_hooks for module in copied.modules())


def test_calls_that_fp8_cannot_run_take_the_held_weight(ltx: ModuleType, device: str) -> None:
    model, inputs = make_model(device), make_inputs(device)
    stock = model(**inputs)[0]
    report = ltx.optimize(model, precision="fp8", stock_weights="cpu")
    assert distance(model(**inputs)[0], stock) < 1e-5
    ((reason, count),) = report.fallbacks["torch.Linear"].items()
    assert "bfloat16" in reason and count == LINEARS * LAYERS


@pytest.mark.slow
def test_compile_of_held(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    ltx.optimize(model, precision="fp8", stock_weights="cpu")
    want = model(**inputs)[0]
    assert distance(torch.compile(model, fullgraph=True)(**inputs)[0], want) < 0.02


@pytest.mark.parametrize("stock_weights", ["cpu", "free"])
def test_adapters_beside_replaced_weights(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], stock_weights: str
) -> None:
    """peft makes them in bfloat16, whatever the dtype of the weight."""
    lora = pytest.importorskip("test_fp8_lora")
    ltx.optimize(model, precision="fp8")
    lora.add(model)
    want = model(**inputs)[0]
    model.unload_lora()
    ltx.optimize(model, precision="fp8", stock_weights=stock_weights)
    lora.add(model)
    assert model.transformer_blocks[0].attn1.to_q.lora_A["default"].weight.dtype == torch.bfloat16
    assert torch.equal(model(**inputs)[0], want)
    if stock_weights == "free":
        with pytest.raises(RuntimeError, match=r"^fuse_lora: expected stock weights, which are freed"):
            model.fuse_lora()


# ---- Offload


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> dict[Any, int]:
    """By place in the model, the bytes that group offload brings to the device. Of FLUX.3 it brings some twice.

    A buffer is another tensor after each offload, since `nn.Module.to` makes it anew.
    """
    seen: dict[Any, int] = {}
    stock = group_offloading.ModuleGroup._transfer_tensor_to_device

    def record(self: Any, tensor: Tensor, source: Tensor, stream: Any) -> None:
        places = (
            (part, name)
            for module in self.modules
            for part in module.modules()
            for name, held in (*part._parameters.items(), *part._buffers.items())
            if held is tensor
        )
        seen[next(places, tensor)] = source.nbytes
        stock(self, tensor, source, stream)

    monkeypatch.setattr(group_offloading.ModuleGroup, "_transfer_tensor_to_device", record)
    return seen


@pytest.mark.parametrize("order", ["offload first", "optimize first"])
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_group_offload_moves_fp8(
    ltx: ModuleType, device: str, inputs: dict[str, Any], moved: dict[Any, int], kind: str, order: str
) -> None:
    stock_model = make_model("cpu", torch.bfloat16)
    before = state(stock_model)
    offload_groups(kind)(stock_model, device)
    moved.clear()
    stock_model(**inputs)
    in_bf16 = sum(moved.values())
    model = make_model("cpu", torch.bfloat16)
    if order == "offload first":
        offload_groups(kind)(model, device)
        report = ltx.optimize(model, precision="fp8", stock_weights="beside")
    else:
        report = ltx.optimize(model, precision="fp8", stock_weights="cpu")
        offload_groups(kind)(model, device)
    stock, fp8 = quantised_bytes(model)
    reference = make_model(device, torch.bfloat16)
    ltx.optimize(reference, precision="fp8")
    want = reference(**inputs)[0]
    for _ in range(2):
        moved.clear()
        assert distance(model(**inputs)[0], want) < 0.02
        assert sum(moved.values()) == in_bf16 - stock + fp8
    assert "torch.Linear" not in report.fallbacks and "in the host's memory" in str(report)
    ltx.restore(model)
    assert_same({name: tensor.cpu() for name, tensor in state(model).items()}, before)
    moved.clear()
    assert distance(model(**inputs)[0], stock_model(**inputs)[0]) < 1e-6 and sum(moved.values()) == 2 * in_bf16


@pytest.mark.parametrize("order", ["offload first", "optimize first"])
@pytest.mark.parametrize("offload", [offload_model, offload_sequentially], ids=["model", "sequential"])
def test_model_offload_moves_fp8(
    ltx: ModuleType, device: str, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, offload: Any, order: str
) -> None:
    """A sequential offload keeps what a model's state_dict holds, its stock weights, and leaves them to stock calls."""
    model = make_model("cpu", torch.bfloat16)
    before, in_bf16, stock = state(model), carried(model), model(**make_inputs("cpu", torch.bfloat16))[0]
    seen: list[int] = []
    to = type(model).to

    def record(self: nn.Module, *arguments: Any, **options: Any) -> nn.Module:
        seen.append(carried(self))
        return to(self, *arguments, **options)

    if order == "offload first":
        offload(model, device)
        report = ltx.optimize(model, precision="fp8")
    else:
        report = ltx.optimize(model, precision="fp8", stock_weights="cpu")
        offload(model, device)
    monkeypatch.setattr(type(model), "to", record)
    for _ in range(2):
        assert distance(model(**inputs)[0].cpu(), stock) < 0.1
    if offload is offload_model:
        of_stock, fp8 = quantised_bytes(model)
        assert set(seen) == {in_bf16 - of_stock + fp8}
        assert "torch.Linear" not in report.fallbacks
        ltx.restore(model)
        assert_same({name: tensor.cpu() for name, tensor in state(model).items()}, before)
    elif order == "optimize first":
        assert "another parameter is in the place" in next(iter(report.fallbacks["torch.Linear"]))
        ltx.restore(model)
        assert distance(model(**inputs)[0].cpu(), stock) < 1e-2
    else:
        assert "its weight is no ordinary parameter" in str(report)


def offload_to_disk(model: nn.Module, device: str, folder: Path) -> None:
    model.enable_group_offload(torch.device(device), num_blocks_per_group=1, offload_to_disk_path=str(folder))


@pytest.mark.parametrize("options", [{"precision": "fp8"}, {"memory": "low"}, {"stock_weights": "beside"}])
def test_optimize_after_an_offload_to_disk(
    ltx: ModuleType, device: str, inputs: dict[str, Any], tmp_path: Path, options: dict[str, str]
) -> None:
    """People offload a large model to disk, and its parameters hold no data then that fp8 could be made of."""
    model = make_model("cpu", torch.bfloat16)
    want = model(**make_inputs("cpu", torch.bfloat16))[0]
    offload_to_disk(model, device, tmp_path)
    hooked = patched(model)
    with pytest.raises(
        RuntimeError, match=r"^optimize: expected weights in memory .* call optimize before the offload"
    ):
        ltx.optimize(model, **{"precision": "fp8", **options})
    assert patched(model) == hooked
    assert distance(model(**inputs)[0].cpu(), want) < 0.01


def test_offload_to_disk_after_optimize(ltx: ModuleType, device: str, inputs: dict[str, Any], tmp_path: Path) -> None:
    """The files hold fp8 weights. `restore` of the model and of a part of it is one error, and the model still runs."""
    model = make_model("cpu", torch.bfloat16)
    report = ltx.optimize(model, precision="fp8")
    want = model(**make_inputs("cpu", torch.bfloat16))[0]
    offload_to_disk(model, device, tmp_path)
    assert distance(model(**inputs)[0].cpu(), want) < 0.01
    for call in (
        lambda: ltx.restore(model),
        lambda: ltx.restore(model.transformer_blocks[0].ff),
        lambda: ltx.optimize(model),
    ):
        with pytest.raises(RuntimeError, match=r"cannot be restored, and nothing was: its fp8 weights are on disk"):
            call()
    with pytest.raises(RuntimeError, match=r"^save_weights: expected weights in memory, got a group offload to disk"):
        report.save_weights(tmp_path / "saved")
    assert distance(model(**inputs)[0].cpu(), want) < 0.01


class Stream:
    """What group offload asks of a stream, on a machine without any."""

    def synchronize(self) -> None:
        pass


def test_group_offload_with_a_stream(
    ltx: ModuleType, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """It copies all parameters once and hands out the copies; optimize and restore have it copy the new ones."""
    if device == "cuda":
        monkeypatch.undo()
    model = make_model("cpu", torch.bfloat16)
    before = state(model)
    if device == "cpu":
        monkeypatch.setattr(Tensor, "pin_memory", lambda self: self.clone())
        monkeypatch.setattr(Tensor, "is_pinned", lambda self: True)

        class Accelerator:
            stream = staticmethod(lambda stream: contextlib.nullcontext())
            current_stream = staticmethod(Stream)

        monkeypatch.setattr(group_offloading, "TorchDeviceBackend", lambda device: Accelerator)
        config = group_offloading.GroupOffloadingConfig(
            onload_device=torch.device("cpu"),
            offload_device=torch.device("cpu"),
            offload_type=group_offloading.GroupOffloadingType.LEAF_LEVEL,
            non_blocking=False,
            record_stream=False,
            low_cpu_mem_usage=False,
            stream=Stream(),
        )
        group_offloading._apply_group_offloading(model, config)
    else:
        model.enable_group_offload(
            onload_device=torch.device(device), offload_type="leaf_level", use_stream=True, record_stream=False
        )
    stock = model(**inputs)[0]
    report = ltx.optimize(model, precision="fp8")
    linear = model.transformer_blocks[0].attn1.to_q
    outputs = [model(**inputs)[0] for _ in range(3)]
    assert "torch.Linear" not in report.fallbacks and report.replaced["torch.Linear"] == LINEARS * LAYERS
    assert linear.weight.dtype == torch.float8_e4m3fn and linear.weight.device.type == "cpu"
    assert all(1e-3 < distance(output, stock) < 0.1 for output in outputs)
    ltx.restore(model)
    assert all(distance(model(**inputs)[0], stock) < 1e-6 for _ in range(2))
    assert_same({name: tensor.cpu() for name, tensor in state(model).items()}, before)


@every_path
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_families(ltx: ModuleType, device: str, family: Any, moved: dict[Any, int], kind: str) -> None:
    """Every family's fp8 weights move in place of the stock ones, and its dtype is what it was."""
    if family.idle:
        pytest.skip("calls leave out some of its blocks")
    inputs = cast(family.inputs(1), device, torch.bfloat16)
    reference = make(family, device, torch.bfloat16)
    ltx.optimize(reference, precision="fp8")
    want = run(reference, inputs)
    model = make(family, "cpu", torch.bfloat16)
    if not getattr(model, "_supports_group_offloading", True):
        pytest.skip("diffusers has no group offload of it")
    dtype, before = model.dtype, state(model)
    offload_groups(kind)(model, device)
    report = ltx.optimize(model, precision="fp8")
    assert model.dtype == dtype
    stock, fp8 = quantised_bytes(model)
    run(model, inputs)  # an offload makes buffers anew, and later moves those that it made before as well
    moved.clear()
    assert distances(run(model, inputs), want) < 0.1  # a leaf that is hooked is called: fewer ops are fused
    assert "torch.Linear" not in report.fallbacks
    in_fp8 = sum(moved.values())
    ltx.restore(model)
    moved.clear()
    run(model, inputs)
    assert sum(moved.values()) - in_fp8 == stock - fp8
    assert_same({name: tensor.cpu() for name, tensor in state(model).items()}, before)
