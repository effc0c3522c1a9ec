"""LoRA adapters of peft on a model in fp8: beside the fp8 weights, in any order, without quantising again."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.dispatch import PackageOps
from torch import Tensor, nn

peft = pytest.importorskip("peft")
diffusers = pytest.importorskip("diffusers")
from diffusers.hooks import group_offloading  # noqa: E402
from test_families import FAMILIES, cast, every_path, make, run  # noqa: E402
from test_families import distance as distances  # noqa: E402
from test_integration import (  # noqa: E402
    LAYERS,
    distance,
    exactly,
    make_inputs,
    make_model,
    offload_groups,
    patched,
)
from test_integration_fp8 import SKIPPED, with_quantised_weights  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_grad", "fp8_device")

TARGETS = ["attn1.to_q", "attn1.to_k", "attn1.to_out.0", "attn2.to_q", "attn2.to_k", "ff.net.0.proj", "ff.net.2"]
IN_FP8 = sum(name not in SKIPPED for name in TARGETS)
LINEAR = "torch.Linear"


@pytest.fixture
def model(device: str) -> nn.Module:
    return make_model(device, torch.bfloat16)


@pytest.fixture
def inputs(device: str) -> dict[str, Any]:
    return make_inputs(device, torch.bfloat16)


@pytest.fixture
def quantised(ltx: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The weights that are quantised while a test runs."""
    seen: list[Tensor] = []
    home = ltx.integrations.linear.fp8_weights
    stock = home.quantize_weight

    def record(weight: Tensor) -> Any:
        seen.append(weight)
        return stock(weight)

    monkeypatch.setattr(home, "quantize_weight", record)
    return seen


def add(model: nn.Module, name: str = "default", seed: int = 3, **options: Any) -> None:
    """A random adapter that moves the model's output by more than fp8 does."""
    torch.manual_seed(seed)
    config = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "init_lora_weights": False, **options}
    model.add_adapter(peft.LoraConfig(**config), adapter_name=name)
    model.requires_grad_(False)
    for key, parameter in model.named_parameters():
        if f".{name}." in key and "lora_" in key and parameter.dim() == 2:
            parameter.copy_(torch.randn(parameter.shape) * 0.6 * parameter.shape[1] ** -0.5)  # the same on any device


def optimize_in_training(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> Any:
    """The report of optimizing to fp8, after which all adapters get gradients close to those before."""
    trained = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}

    def gradients() -> dict[str, Tensor]:
        with torch.enable_grad():
            for parameter in trained.values():
                parameter.requires_grad_(True).grad = None
            model(**inputs)[0].float().square().mean().backward()
        return {name: parameter.grad for name, parameter in trained.items() if parameter.grad is not None}

    stock = gradients()
    report = ltx.optimize(model, precision="fp8")
    ours = gradients()
    assert ours.keys() == stock.keys() == trained.keys()
    assert max(distance(ours[name], stock[name]) for name in stock) < 0.2
    return report


def remarks(report: Any) -> dict[str, int]:
    (site,) = (site for site in report.sites if site.name == LINEAR)
    return dict(site.remarks)


# ---- One layer


@pytest.mark.parametrize("targets", [["attn1.to_q", "attn1.to_v"], ["attn1.to_q"], ["ff.net.2"]], ids="+".join)
def test_layers_against_fp64(ltx: ModuleType, device: str, model: nn.Module, targets: list[str]) -> None:
    """Within bfloat16's rounding of the result and of the low-rank product: the rest is the fp8 product's own."""
    ltx.optimize(model, precision="fp8")
    add(model, target_modules=targets)
    block = model.transformer_blocks[1]
    names = ["ff.net.2"] if "ff.net.2" in targets else [f"attn1.to_{x}" for x in "qkv"]
    layers = [block.get_submodule(name) for name in names]
    x = torch.randn(2, 5, layers[0].in_features, device=device).bfloat16()
    linears = ltx.integrations.linear.linears.Linears(layers, x, block.attn1._ltx_kernels)
    assert linears.scaled and not linears.fp8 and linears.packed == (len(layers) > 1)
    values, scales = ltx.quantize_rows(x)
    for name, layer, output in zip(names, layers, linears(x)):
        base = layer.base_layer if name in targets else layer
        weight = base.weight.double() * base.ltx_fp8_scales.double()[:, None]
        want = nn.functional.linear(values.double() * scales.double(), weight, base.bias.double())
        slack = want.abs() + base.bias.double().abs()
        if name in targets:
            down, up = (adapters["default"].weight.double() for adapters in (layer.lora_A, layer.lora_B))
            low_rank = nn.functional.linear(x.double(), down)
            want = want + 2 * nn.functional.linear(low_rank, up)
            slack = slack + 2 * nn.functional.linear(low_rank.abs() + x.double().abs() @ down.abs().t(), up.abs())
        assert ((output.double() - want).abs() <= 2**-8 * (want.abs() + slack) + 1e-6).all(), name


# ---- A model


def test_no_active_adapter_gives_the_same_bits(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], quantised: list[Tensor]
) -> None:
    """Loaded, disabled, enabled, deleted, unloaded; no weight is quantised again."""
    report = ltx.optimize(model, precision="fp8")
    plain = model(**inputs)[0]
    quantised.clear()
    add(model)
    beside = model(**inputs)[0]
    assert distance(beside, plain) > 0.01
    assert remarks(report) == {"adapters beside fp8": IN_FP8 * LAYERS}
    model.disable_lora()
    assert torch.equal(model(**inputs)[0], plain)
    model.enable_lora()
    assert torch.equal(model(**inputs)[0], beside)
    model.delete_adapters("default")
    assert torch.equal(model(**inputs)[0], plain)
    model.unload_lora()
    assert torch.equal(model(**inputs)[0], plain)
    assert quantised == [] and report.fallbacks == {}
    assert remarks(report) == {"adapters beside fp8": 2 * IN_FP8 * LAYERS}
    assert "adapters beside fp8, torch.Linear" in str(report)
    report.restore()
    assert patched(model) == [] and not {"fuse_lora", "unfuse_lora", "unload_lora"} & set(vars(model))


def test_either_order_gives_the_same_bits(ltx: ModuleType, device: str, inputs: dict[str, Any]) -> None:
    first, second = make_model(device, torch.bfloat16), make_model(device, torch.bfloat16)
    targets = [name for name in TARGETS if name not in SKIPPED]
    ltx.optimize(first, precision="fp8")
    add(first, target_modules=targets)
    add(second, target_modules=targets)
    report = ltx.optimize(second, precision="fp8")
    assert report.left_alone == {} and not any("not packed" in note for note in report.notes)
    assert torch.equal(first(**inputs)[0], second(**inputs)[0])
    assert report.fallbacks == {} and "one by one" not in str(report)
    for model in first, second:
        model.unload_lora()
    assert torch.equal(first(**inputs)[0], second(**inputs)[0])


def test_error_is_that_of_fp8(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against dequantised weights with the adapter in float32, no further off than peft's own layers on fp8 ones."""
    reference = with_quantised_weights(ltx, model)
    bare = exactly(reference, inputs)
    report = ltx.optimize(model, precision="fp8")
    without = distance(model(**inputs)[0], bare)
    for part in model, reference:
        add(part)
    want = exactly(reference, inputs)
    error = distance(model(**inputs)[0], want)
    with monkeypatch.context() as patched_lora:
        patched_lora.setattr(ltx.integrations.linear.linears, "adapters_of", lambda *_: ("a test", []))
        by_peft = distance(model(**inputs)[0], want)
    assert distance(want, bare) > 0.05
    assert without < error < 1.1 * by_peft < 1.6 * without
    assert report.fallbacks == {}


def test_several_adapters(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], quantised: list[Tensor]) -> None:
    """Switched, weighted and scaled per call as the stock model has it."""
    reference = with_quantised_weights(ltx, model)
    report = ltx.optimize(model, precision="fp8")
    without = distance(model(**inputs)[0], exactly(reference, inputs))
    quantised.clear()
    for part in model, reference:
        add(part, "one")
        add(part, "two", seed=4, r=8, target_modules=TARGETS[:3])
    seen: list[Tensor] = []
    for names, weights, scale in (
        ("one", None, 1.0),
        (["one", "two"], [0.7, -1.2], 1.0),
        ("two", None, 1.0),
        (["one", "two"], [1.0, {"transformer_blocks.0": 0.0}], 1.0),
        ("one", None, 0.3),
        ("one", None, 1.0),
    ):
        for part in model, reference:
            part.set_adapters(names, weights)
        arguments = {**inputs, "attention_kwargs": {"scale": scale}}
        seen.append(model(**arguments)[0])
        assert distance(seen[-1], exactly(reference, arguments)) < 1.6 * without
    assert torch.equal(seen[0], seen[-1])
    assert all(distance(a, b) > 0.01 for i, a in enumerate(seen[:-1]) for b in seen[:i])
    assert quantised == [] and report.fallbacks == {}


def test_rows_are_quantised_once(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    """An adapter on one of query, key and value keeps the input in bfloat16 for all, and one launch quantises it."""
    ltx.optimize(model, precision="fp8")
    with PackageOps(ltx) as plain:
        model(**inputs)
    add(model, target_modules=["attn1.to_k"])
    with PackageOps(ltx) as adapted:
        model(**inputs)
    assert len(adapted.quantising()) == len(plain.quantising())


def stock_state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model, by the names that they have without adapters."""
    return {name.replace("base_layer.", ""): tensor.clone() for name, tensor in model.state_dict().items()}


BY_PEFT = {"adapters called by themselves: DoraLinearVariant of peft": (IN_FP8 + 1) * LAYERS}  # to_v beside to_q
READ = "adapters that read them, such as DoRA"
BACK = {f"stock weights on the device again for {READ}": IN_FP8 * LAYERS}


@pytest.mark.parametrize("order", ["adapter first", "optimize first"])
@pytest.mark.parametrize("stock_weights", ["beside", "cpu"])
def test_other_kinds_of_adapters_are_called_by_themselves(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], stock_weights: str, order: str
) -> None:
    """DoRA reads the stock weight, also as it is loaded: peft computes it, on the fp8 layer, and the report says so."""
    before, reference = stock_state(model), copy.deepcopy(model)
    plain = reference(**inputs)[0]
    add(reference, use_dora=True)
    if order == "adapter first":
        add(model, use_dora=True)
    report = ltx.optimize(model, precision="fp8", stock_weights=stock_weights)
    if order == "optimize first":
        add(model, use_dora=True)
    ours, want = model(**inputs)[0], reference(**inputs)[0]
    assert distance(ours, want) < 0.1 < distance(plain, want)
    assert remarks(report) == {**BY_PEFT, **(BACK if stock_weights == "cpu" else {})}
    assert torch.equal(model(**inputs)[0], ours)
    model.disable_lora()
    assert distance(model(**inputs)[0], plain) < 0.1
    model.enable_lora()
    assert torch.equal(model(**inputs)[0], ours)
    ltx.restore(model)
    restored = stock_state(model)
    assert all(torch.equal(restored[name], tensor) for name, tensor in before.items())
    assert "W_q" not in vars(model.transformer_blocks[0].attn1.to_q.base_layer)
    assert "merge" not in vars(model.transformer_blocks[0].attn1.to_q)


@pytest.mark.parametrize("order", ["adapter first", "optimize first"])
def test_freed_weights_and_adapters_that_read_them(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], order: str
) -> None:
    text = (
        r"^stock_weights: expected 'cpu' or 'beside' for adapters that read them, such as DoRA, got a weight in fp8 al"
    )
    if order == "adapter first":
        add(model, use_dora=True)
    ltx.optimize(model, precision="fp8", stock_weights="free")
    with pytest.raises(RuntimeError, match=text):
        if order == "optimize first":
            add(model, use_dora=True)
        model(**inputs)


def test_adapters_that_read_weights_in_training(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    """peft computes adapters that read the stock weight as well, of query, key and value one by one."""
    add(model, use_dora=True, target_modules=["to_q"])
    report = optimize_in_training(ltx, model, inputs)
    assert remarks(report) == {  # of both attentions
        f"stock weights on the device again for {READ}": 2 * LAYERS,
        "adapters called by themselves: DoraLinearVariant of peft": 4 * LAYERS,
    }


@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
@pytest.mark.parametrize("order", ["offload first", "optimize first"])
def test_adapters_that_read_offloaded_weights(
    ltx: ModuleType, device: str, inputs: dict[str, Any], kind: str, order: str
) -> None:
    """Under an offload each call copies the stock weights that it needs, and what moves stays the fp8 weights."""
    wanted = make_model(device, torch.bfloat16)
    ltx.optimize(wanted, precision="fp8")
    model = make_model("cpu", torch.bfloat16)
    if order == "offload first":
        offload_groups(kind)(model, device)
    report = ltx.optimize(model, precision="fp8")
    for part in model, wanted:
        add(part, use_dora=True)
    if order == "offload first":  # as diffusers does after it has loaded an adapter
        group_offloading._maybe_remove_and_reapply_group_offloading(model)
    if order == "optimize first":
        offload_groups(kind)(model, device)
    for _ in range(2):
        assert distance(model(**inputs)[0], wanted(**inputs)[0]) < 0.05
    linear = model.transformer_blocks[0].attn1.to_q.base_layer
    back = order == "optimize first"  # for the loading, before the offload
    assert (linear.weight.dtype == torch.bfloat16) == back
    copied = remarks(report).get(f"stock weights copied from the host for {READ}", 0)
    assert copied == (0 if back else 3 * IN_FP8 * LAYERS) and LINEAR not in report.fallbacks


@pytest.mark.extended
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_adapters_that_read_weights_compiled(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], compiler: str
) -> None:
    add(model, use_dora=True)
    ltx.optimize(model, precision="fp8")
    compiled = torch.compile(copy.deepcopy(model), backend=compiler)
    want = model(**inputs)[0]
    for _ in range(2):
        assert distance(compiled(**inputs)[0], want) < 0.02


def test_a_hooked_adapter_is_called(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    report = ltx.optimize(model, precision="fp8")
    add(model, target_modules=["ff.net.2"])
    calls: list[int] = []
    adapter = model.transformer_blocks[0].ff.net[2].lora_A["default"]
    handle = adapter.register_forward_hook(lambda *_: calls.append(1))
    want = model(**inputs)[0]
    assert calls == [1] and remarks(report)["adapters beside fp8"] == LAYERS - 1
    handle.remove()
    assert distance(model(**inputs)[0], want) < 0.02 and calls == [1]


# ---- Merged adapters


def unmerge(model: nn.Module) -> None:
    """As a pipeline's unfuse_lora does, past the model's own method."""
    for module in model.modules():
        if hasattr(module, "merged_adapters"):
            module.unmerge()


@pytest.mark.parametrize("stock_weights", ["beside", "cpu"])
@pytest.mark.parametrize("undo", [lambda model: model.unfuse_lora(), unmerge], ids=["model", "pipeline"])
def test_fused_and_unfused(
    ltx: ModuleType,
    model: nn.Module,
    inputs: dict[str, Any],
    undo: Callable[[nn.Module], None],
    stock_weights: str,
) -> None:
    """The fp8 weights follow, since they are quantised again; whether or not a call comes between."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = ltx.optimize(model, precision="fp8", stock_weights=stock_weights)
    plain = model(**inputs)[0]
    add(model)
    beside = model(**inputs)[0]
    model.fuse_lora()
    fused = model(**inputs)[0]
    assert distance(fused, beside) < 0.05 < distance(fused, plain)
    undo(model)
    assert distance(model(**inputs)[0], beside) < 0.02
    model.fuse_lora()
    model.unload_lora()
    assert distance(model(**inputs)[0], fused) < 0.02
    again = "weights quantised again, since adapters were merged or taken out"
    assert remarks(report)[again] == 3 * IN_FP8 * LAYERS
    assert report.fallbacks == {}
    optimized = model(**inputs)[0]
    assert (model.transformer_blocks[0].attn1.to_q.weight.dtype == torch.float8_e4m3fn) == (stock_weights == "cpu")
    ltx.optimize(model, precision="fp8")
    assert torch.equal(model(**inputs)[0], optimized)
    ltx.restore(model)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed and all(
        name.endswith(("to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight", "proj.weight"))
        or ".net.2." in name
        for name in changed
    )


def test_diffusers_sees_what_methods_take(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    """It looks for `adapter_names` in a layer's `merge`, and for `variant` in a model's `save_pretrained`."""
    add(model)
    ltx.optimize(model, precision="fp8")
    layer = next(module for module in model.modules() if "merge" in vars(module))
    for part, name in ((layer, "merge"), (layer, "update_layer"), (model, "save_pretrained"), (model, "fuse_lora")):
        assert name in vars(part)
        stock = inspect.signature(getattr(type(part), name).__get__(part))
        assert inspect.signature(getattr(part, name)) == stock
    beside = model(**inputs)[0]
    model.fuse_lora(adapter_names=["default"])
    assert distance(model(**inputs)[0], beside) < 0.05


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("stock_weights", ["beside", "cpu"])
def test_merged_by_peft(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], stock_weights: str, options: dict[str, Any]
) -> None:
    """peft's own functions, right after it has put its layers in: the next call has the adapter in its weights."""
    reference = copy.deepcopy(model)
    ltx.optimize(model, precision="fp8", stock_weights=stock_weights)
    plain, outputs = model(**inputs)[0], []
    for part in reference, model:
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False, **options)
        adapted = peft.inject_adapter_in_model(config, part)
        torch.manual_seed(4)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name and parameter.dim() == 2:
                parameter.normal_(0, 0.6 * parameter.shape[1] ** -0.5)
        layers = [module for module in adapted.modules() if hasattr(module, "merged_adapters")]
        for layer in layers:
            layer.merge()
        outputs.append(part(**inputs)[0])
    assert distance(outputs[1], outputs[0]) < 0.1 < distance(outputs[1], plain)
    for layer in layers:
        layer.unmerge()
    model.disable_lora()
    assert distance(model(**inputs)[0], plain) < 0.05
    ltx.restore(model)
    assert not any({"merge", "unmerge"} & set(vars(layer)) for layer in layers)


def test_merged_and_unloaded_by_peft(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    reference = copy.deepcopy(model)
    report = ltx.optimize(model, precision="fp8")
    plain, outputs = model(**inputs)[0], []
    for part in reference, model:
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=TARGETS, init_lora_weights=False)
        outputs.append(peft.PeftModel(part, config).merge_and_unload()(**inputs)[0])
    assert distance(outputs[1], outputs[0]) < 0.1 < distance(outputs[1], plain)
    assert remarks(report) == {
        "stock weights on the device again, since adapters are merged into them": IN_FP8 * LAYERS,
        "weights quantised again, since adapters were merged or taken out": IN_FP8 * LAYERS,
    }


@pytest.mark.parametrize("stock_weights", ["beside", "cpu"])
def test_adapters_taken_out_by_peft(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], stock_weights: str
) -> None:
    """Merged again with another scale, and taken out by peft's own forward: no call has the weights of before."""
    reference = copy.deepcopy(model)
    ltx.optimize(model, precision="fp8", stock_weights=stock_weights)
    layers = []
    for part in reference, model:
        add(part)
        layers.append([module for module in part.modules() if hasattr(module, "merged_adapters")])
    for of_part in layers:
        for layer in of_part:
            layer.merge()
            layer.unmerge()
            layer.scaling["default"] *= -1
            layer.merge()
    assert distance(model(**inputs)[0], reference(**inputs)[0]) < 0.05
    for part in reference, model:
        part.disable_adapters()
    assert distance(model(**inputs)[0], reference(**inputs)[0]) < 0.05


OTHER_KINDS = {
    "HRA": lambda: peft.HRAConfig(r=8, target_modules=TARGETS, init_weights=False),
    "LoHa": lambda: peft.LoHaConfig(r=4, alpha=100, target_modules=TARGETS, init_weights=False),
    "OFT": lambda: peft.OFTConfig(oft_block_size=8, r=0, target_modules=TARGETS, init_weights=False),
}


@pytest.mark.parametrize("first", [False, True], ids=["adapters last", "adapters first"])
@pytest.mark.parametrize("stock_weights", ["beside", "cpu", "free"])
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_kinds_of_adapters_that_read_and_merge_weights(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], kind: str, stock_weights: str, first: bool
) -> None:
    """They read stock weights, and what they merge into them is quantised again."""
    reference = copy.deepcopy(model)

    def inject(part: nn.Module) -> None:
        torch.manual_seed(5)
        peft.inject_adapter_in_model(OTHER_KINDS[kind](), part)
        part.eval()

    inject(reference)
    if first:
        inject(model)
    ltx.optimize(model, precision="fp8", stock_weights=stock_weights)
    if not first and stock_weights == "free":
        with pytest.raises(RuntimeError, match=r"expected stock weights, which are freed: LoRA adapters run beside"):
            inject(model)
        return
    if not first:
        inject(model)
    assert distance(model(**inputs)[0], reference(**inputs)[0]) < 0.05
    for part in reference, model:
        for layer in part.modules():
            if hasattr(layer, "merged_adapters"):
                layer.merge()
    assert distance(model(**inputs)[0], reference(**inputs)[0]) < 0.05


@pytest.mark.parametrize("stock_weights", ["cpu", "beside"])
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_adapters_that_are_taken_from_the_weight(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], init: str, stock_weights: str
) -> None:
    reference = copy.deepcopy(model)
    report = ltx.optimize(model, precision="fp8", stock_weights=stock_weights)
    for part in reference, model:
        torch.manual_seed(5)
        part.add_adapter(peft.LoraConfig(r=8, lora_alpha=32, target_modules=TARGETS, init_lora_weights=init))
    assert distance(model(**inputs)[0], reference(**inputs)[0]) < 0.03
    assert report.fallbacks == {}  # the weights are quantised again, and no product is of the stock ones


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_adapters_that_are_taken_from_a_freed_weight(ltx: ModuleType, model: nn.Module, init: str) -> None:
    ltx.optimize(model, precision="fp8", stock_weights="free")
    with pytest.raises(RuntimeError, match=f"^{init}: expected stock weights, which are freed"):
        model.add_adapter(peft.LoraConfig(r=8, target_modules=TARGETS, init_lora_weights=init))


def _fuse(model: nn.Module) -> None:
    add(model)
    model.fuse_lora()


def _fuse_and_unfuse(model: nn.Module) -> None:
    _fuse(model)
    model.unfuse_lora()
    model.unload_lora()


def _convert_while_fused(model: nn.Module) -> None:
    _fuse(model)
    model.to(torch.bfloat16)
    model.unfuse_lora()
    model.unload_lora()


@pytest.mark.parametrize("options", [{}, {"memory": "low"}, {"stock_weights": "beside"}], ids=str)
@pytest.mark.parametrize(
    "call", [_fuse, _fuse_and_unfuse, _convert_while_fused, lambda model: model.fuse_qkv_projections()]
)
@pytest.mark.parametrize("dtypes", [[torch.bfloat16], [torch.float16, torch.bfloat16]], ids=str)
def test_stock_weights_after_a_conversion(
    ltx: ModuleType,
    model: nn.Module,
    inputs: dict[str, Any],
    options: dict[str, Any],
    call: Callable[[nn.Module], None],
    dtypes: list[torch.dtype],
) -> None:
    """The fp8 values in a parameter are converted as well. They are no stock weight then."""
    stock = copy.deepcopy(model)
    ltx.optimize(model, precision="fp8", **options)
    for m in (stock, model):
        for dtype in dtypes:
            m.to(dtype)
        call(m)
    assert distance(model(**inputs)[0], stock(**inputs)[0]) < 0.05
    ltx.restore(model)
    for name, tensor in stock.state_dict().items():  # float16 rounds what is near to 0
        assert torch.allclose(model.state_dict()[name], tensor, rtol=0, atol=1e-6), name


def test_adapters_beside_freed_weights_are_saved(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], tmp_path: Path
) -> None:
    stock = copy.deepcopy(model)
    ltx.optimize(model, precision="fp8", stock_weights="free")
    add(model)
    expected = model(**inputs)[0]
    with pytest.raises(RuntimeError, match="save_pretrained: expected stock weights, which are freed"):
        model.save_pretrained(tmp_path / "whole")
    model.save_lora_adapter(tmp_path)
    assert peft.get_peft_model_state_dict(model).keys() and not (tmp_path / "whole").exists()
    (file,) = tmp_path.glob("*.safetensors")
    stock.load_lora_adapter(tmp_path, weight_name=file.name, prefix=None)
    ltx.optimize(stock, precision="fp8", stock_weights="free")
    assert distance(stock(**inputs)[0], expected) < 1e-3


def test_adapters_that_read_converted_weights(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    """The fp8 values in another dtype are no stock weights."""
    reference = copy.deepcopy(model)
    ltx.optimize(model, precision="fp8")
    model.to(torch.bfloat16)
    for part in reference, model:
        add(part, use_dora=True)
    assert distance(model(**inputs)[0], reference(**inputs)[0]) < 0.05


def test_copies_know_which_weights_were_quantised(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], tmp_path: Path
) -> None:
    """A copy of changed weights has changed, and a change of a copy is seen; neither can be saved as it was."""
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.copy_(parameter.flip(0))
    report = ltx.optimize(model, precision="fp8", stock_weights="beside")
    loaded = copy.deepcopy(model)
    loaded.load_state_dict(other.state_dict())
    assert distance(loaded(**inputs)[0], other(**inputs)[0]) < 0.05
    for parameter in model.parameters():
        parameter.mul_(1.5)
    changed = copy.deepcopy(model)
    ltx.restore(stock := copy.deepcopy(model))
    assert distance(changed(**inputs)[0], stock(**inputs)[0]) < 0.05
    with pytest.raises(
        RuntimeError, match=r"^save_weights: expected weights as they were quantised, got .* optimize ag"
    ):
        report.save_weights(tmp_path)


@pytest.mark.host
def test_merging_that_cannot_be(ltx: ModuleType, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    ltx.optimize(model, precision="fp8", stock_weights="free")
    add(model)
    with pytest.raises(
        RuntimeError, match=r"^merge: expected stock weights, which are freed: LoRA adapters run beside"
    ):
        model.transformer_blocks[0].attn1.to_q.merge()
    other = make_model(next(model.parameters()).device, torch.bfloat16)
    ltx.optimize(other, precision="fp8")
    add(other)
    monkeypatch.setattr(ltx.integrations.linear.merged_adapters, "keeps_copies", lambda root: True)
    with pytest.raises(RuntimeError, match=r"^merge: expected no group offload with a stream, .* call fuse_lora of"):
        other.transformer_blocks[0].attn1.to_q.merge()
    assert other.transformer_blocks[0].attn1.to_q.base_layer.weight.dtype == torch.float8_e4m3fn


def test_weights_are_held_again(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    """The stock weights are on the device while adapters are merged into them, and on the host before and after."""
    linear = model.transformer_blocks[0].attn1.to_q
    before = linear.weight.detach().clone()
    ltx.optimize(model, precision="fp8")
    plain = model(**inputs)[0]
    add(model)
    for _ in range(2):
        assert linear.weight.dtype == torch.float8_e4m3fn
        model.fuse_lora()
        assert linear.weight.dtype == torch.bfloat16 and not torch.equal(linear.weight, before)
        model.unfuse_lora()
    model.unload_lora()
    assert linear.weight.dtype == torch.float8_e4m3fn
    state = model.state_dict()["transformer_blocks.0.attn1.to_q.weight"]
    assert distance(state.to(before.device), before) < 0.01
    with pytest.raises(RuntimeError, match="expected no stock weights of layers in fp8, got weight"):
        linear.load_state_dict({"weight": before}, strict=False)
    assert distance(model(**inputs)[0], plain) < 0.05
    ltx.restore(model)
    assert distance(linear.weight, before) < 0.01
    assert "_ltx_fp8_back" not in vars(linear) and not linear._state_dict_hooks


def test_fused_before(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    """Adapters that are in the weights already when these are quantised are not added again."""
    add(model)
    model.fuse_lora()
    stock = model(**inputs)[0]
    report = ltx.optimize(model, precision="fp8")
    assert distance(model(**inputs)[0], stock) < 0.1
    assert remarks(report) == {}
    model.unload_lora()
    assert distance(model(**inputs)[0], stock) < 0.1
    assert report.fallbacks == {}


def test_freed_weights(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    """Adapters run beside fp8 weights without the stock ones; merging them is one error."""
    ltx.optimize(model, precision="fp8")
    add(model)
    want = model(**inputs)[0]
    model.unload_lora()
    ltx.optimize(model, precision="fp8", stock_weights="free")
    add(model)
    assert torch.equal(model(**inputs)[0], want)
    with pytest.raises(RuntimeError, match=r"^fuse_lora: expected stock weights, which are freed: adapters run beside"):
        model.fuse_lora()
    assert torch.equal(model(**inputs)[0], want)


@pytest.mark.parametrize("hotswap", [False, True])
def test_files_of_adapters_beside_freed_weights(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], hotswap: bool
) -> None:
    """People load one adapter after another into a model that has weights in fp8 alone."""
    files, want = [], []
    for seed in 3, 4:
        trained = copy.deepcopy(model)
        add(trained, seed=seed)
        files.append({k: v.clone() for k, v in peft.get_peft_model_state_dict(trained).items()})
        ltx.optimize(trained, precision="fp8")
        want.append(trained(**inputs)[0])
    ltx.optimize(model, precision="fp8", stock_weights="free")
    if hotswap:
        model.enable_lora_hotswap(target_rank=4)
    for name, file, expected in zip("ab", files, want):
        name = "a" if hotswap else name
        model.load_lora_adapter(dict(file), adapter_name=name, prefix=None, hotswap=hotswap and file is files[1])
        model.set_adapters(name)
        # A file without its configuration has alpha = rank.
        for part in model.modules():
            if hasattr(part, "scaling") and name in part.scaling:
                part.scaling[name] = 2.0
        assert distance(model(**inputs)[0], expected) < 1e-2
    model.unload_lora()
    with pytest.raises(RuntimeError, match="cannot be saved as a stock weight"):
        model.state_dict()


def test_files_of_adapters_in_a_pipeline(ltx: ModuleType, device: str) -> None:
    """The pipelines of FLUX read the shapes of the stock weights before they load an adapter."""
    transformer = make(FAMILIES["flux"], device, torch.bfloat16)
    pipe = diffusers.FluxPipeline(*[None] * 6, transformer)
    ltx.optimize(pipe, precision="fp8", stock_weights="free")
    linear = transformer.transformer_blocks[0].attn.to_q
    path, rank = "transformer.transformer_blocks.0.attn.to_q", 4
    file = {
        f"{path}.lora_A.weight": torch.randn(rank, linear.in_features),
        f"{path}.lora_B.weight": torch.randn(linear.out_features, rank),
    }
    for name in "ab":
        pipe.load_lora_weights(dict(file), adapter_name=name)
    assert set(transformer.transformer_blocks[0].attn.to_q.scaling) == {"a", "b"}


@pytest.mark.parametrize("target", ["to_q", "net.0.proj"])
def test_adapters_in_training(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], target: str) -> None:
    """Beside the fp8 products, as without gradients."""
    add(model, target_modules=[target])
    report = optimize_in_training(ltx, model, inputs)
    assert LINEAR not in report.fallbacks
    assert remarks(report) == {"adapters beside fp8": (2 if target == "to_q" else 1) * LAYERS}


# ---- Compiled, and other families


@pytest.mark.extended
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], compiler: str) -> None:
    report = ltx.optimize(model, precision="fp8")
    plain = model(**inputs)[0]
    add(model)
    want = model(**inputs)[0]
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    assert distance(compiled(**inputs)[0], want) < 0.02
    assert remarks(report)["adapters beside fp8 (compiled)"] == IN_FP8 * LAYERS
    model.disable_lora()
    assert distance(compiled(**inputs)[0], plain) < 0.02
    assert LINEAR not in report.fallbacks


@every_path
def test_families(ltx: ModuleType, device: str, family: Any) -> None:
    """Every layer that fp8 takes has its adapter beside it, in both orders, and the bare bits come back.

    In a module that is left alone peft adds them.
    """
    if family.idle:
        pytest.skip("calls leave out some of its blocks")
    inputs = cast(family.inputs(1), device, torch.bfloat16)
    outputs = []
    for first in (True, False):
        model = make(family, device, torch.bfloat16)
        if not hasattr(model, "add_adapter"):
            pytest.skip(f"NOT RUN: {type(model).__name__} has no adapters in this diffusers")
        if first:
            report = ltx.optimize(model, precision="fp8")
            plain = run(model, inputs)
        torch.manual_seed(0)
        model.add_adapter(peft.LoraConfig(r=4, target_modules=list(family.lora), init_lora_weights=False))
        model.requires_grad_(False)
        if not first:
            stock = run(model, inputs)
            report = ltx.optimize(model, precision="fp8")
        outputs.append(run(model, inputs))
        assert LINEAR not in report.fallbacks
        layers = [m for m in model.modules() if type(m).__name__ == "Linear" and hasattr(m, "base_layer")]
        wrapped = sum("_ltx_kernels" in vars(layer.base_layer) for layer in layers)
        assert wrapped > 0
        assert remarks(report) == ({} if family.left_alone else {"adapters beside fp8": wrapped})
        model.unload_lora()
        assert all(torch.equal(a, b) for a, b in zip(run(model, inputs), plain))
    assert distances(outputs[0], stock) < 0.2 * max(1.0, distances(plain, stock))
    assert all(torch.equal(a, b) for a, b in zip(*outputs))
