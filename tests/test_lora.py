"""LoRA adapters of peft on layers that are not in fp8: few passes over the outputs, and never further off than peft."""

from __future__ import annotations

import importlib
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.ltx_video import make_inputs, make_model
from torch import Tensor, nn

peft = pytest.importorskip("peft")
pytest.importorskip("diffusers")

pytestmark = pytest.mark.usefixtures("no_grad")

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]
BESIDE = "adapters beside"


# ---- Layers


def layers(
    device: str, dtype: torch.dtype, names: str, targets: str, bias: bool, ranks: tuple[int, ...], **options: Any
) -> nn.Module:
    """Linear layers of 64 inputs, those in `targets` with an adapter of each rank; the scales differ."""
    torch.manual_seed(1)
    module = nn.ModuleDict({name: nn.Linear(64, 96, bias) for name in names})
    for number, rank in enumerate(ranks):
        config = {"r": rank, "lora_alpha": (0.7 + number) * rank, "init_lora_weights": False, **options}
        peft.inject_adapter_in_model(peft.LoraConfig(target_modules=list(targets), **config), module, f"a{number}")
    for layer in module.modules():
        if isinstance(layer, peft.tuners.lora.layer.Linear):
            layer.set_adapter([f"a{number}" for number in range(len(ranks))])
    return module.to(device, dtype).requires_grad_(False).eval()


def site(rounding: str = "fp32") -> Any:
    remarks: Counter[str] = Counter()
    return SimpleNamespace(rounding=rounding, remarks=remarks, remark=lambda text, n=1: remarks.update({text: n}))


def distance(one: Tensor, other: Tensor) -> float:
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [(8,), (4,), (8, 16)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("targets", ["qkv", "k", "q"])
@pytest.mark.parametrize("rows", [4, 400])
def test_no_further_from_fp64_than_peft(
    ltx: ModuleType, device: str, rows: int, targets: str, bias: bool, ranks: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Several layers in one product and one by itself; few rows, and so many that input and weight are widened.

    With few rows the layers are compared together, because one layer has too few numbers for the bound.
    """
    names = "q" if targets == "q" else "qkv"
    module = layers(device, dtype, names, targets, bias, ranks)
    x = torch.randn(2, rows, 64, device=device).to(dtype)
    peft_results = [module[name](x) for name in names]
    for parameter in ("weight", "bias") if bias and len(names) > 1 else ("weight",) if len(names) > 1 else ():
        bases = [getattr(module[name], "base_layer", module[name]) for name in names]
        importlib.import_module(f"{ltx.__name__}._linear").make_adjacent([getattr(base, parameter) for base in bases])
    home, owner = ltx.integrations.linear.linears, site()
    linears = home.Linears([module[name] for name in names], x, owner)
    assert linears.plain and not linears.direct and linears.packed == (len(names) > 1)
    results = linears(x)
    assert owner.remarks == {BESIDE: len(targets)}
    if len(names) > 1:
        assert torch.equal(linears.together(x), torch.cat(results, -1))
    exact = [layer(x.double()) for layer in module.double().values()]
    for ours, want in zip(results, exact):
        assert ours.dtype == dtype and ours.shape == want.shape
    compared = list(zip(results, peft_results, exact))
    if rows == 4:
        compared = [tuple(torch.cat(list(outputs), -1) for outputs in (results, peft_results, exact))]
    for ours, theirs, want in compared:
        # float32's sums differ by their order as well.
        assert distance(ours, want) <= (1.05 if dtype == torch.bfloat16 else 1.3) * distance(theirs, want) < 0.01


@pytest.mark.parametrize("rows", [4, 400])
@pytest.mark.parametrize("rank", [4, 8])
def test_gelu(ltx: ModuleType, device: str, rows: int, rank: int) -> None:
    """With many rows and a rank that keeps them aligned, one product still has the GELU; the layer is called else."""
    module = layers(device, torch.bfloat16, "q", "q", True, (rank,))
    x = torch.randn(rows, 64, device=device).bfloat16()
    theirs = nn.functional.gelu(module["q"](x), approximate="tanh")
    home, owner = ltx.integrations.linear.linears, site()
    output = home.linear_gelu_of(home.Linears([module["q"]], x, owner), x, "tanh")
    if rows == 4 or rank == 4:
        assert output is None and not owner.remarks
        return
    want = nn.functional.gelu(module.double()["q"](x.double()), approximate="tanh")
    assert distance(output, want) <= 1.05 * distance(theirs, want) < 0.01
    assert owner.remarks == {BESIDE: 1}


def test_eager_rounding_keeps_the_bits(ltx: ModuleType, device: str) -> None:
    module = layers(device, torch.bfloat16, "q", "q", True, (8, 16))
    x = torch.randn(400, 64, device=device).bfloat16()
    linears = ltx.integrations.linear.linears.Linears([module["q"]], x, site("eager"))
    assert torch.equal(linears(x)[0], module["q"](x))


def test_adapters_of_another_dtype(ltx: ModuleType, device: str) -> None:
    """As peft makes them for a model in bfloat16 unless told otherwise."""
    module = layers(device, torch.bfloat16, "q", "q", True, (8,))
    for name, parameter in module.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    x = torch.randn(400, 64, device=device).bfloat16()
    linears = ltx.integrations.linear.linears.Linears([module["q"]], x, site())
    assert torch.equal(linears(x)[0], module["q"](x))


def test_adapters_with_a_bias(ltx: ModuleType, device: str) -> None:
    """peft adds it in its own order, and so do the fused layers; beside one without, too."""
    module = layers(device, torch.bfloat16, "qkv", "qk", True, (8,), lora_bias=True)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.add_(torch.randn_like(parameter))
    x = torch.randn(400, 64, device=device).bfloat16()
    results = ltx.integrations.linear.linears.Linears(list(module.values()), x, site())(x)
    assert all(torch.equal(ours, layer(x)) for ours, layer in zip(results, module.values(), strict=True))


# ---- A model


def add(model: nn.Module, name: str = "default", seed: int = 3, **options: Any) -> None:
    torch.manual_seed(seed)
    config = {"r": 8, "lora_alpha": 8, "target_modules": TARGETS, "init_lora_weights": False, **options}
    model.add_adapter(peft.LoraConfig(**config), adapter_name=name)
    model.requires_grad_(False)


def remarks(report: Any) -> Counter[str]:
    found: Counter[str] = Counter()
    for part in report.sites:
        found.update(part.remarks)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_active_adapter_gives_the_same_bits(ltx: ModuleType, device: str, dtype: torch.dtype) -> None:
    """Loaded, disabled, enabled, fused, unfused and deleted; the adapters of every layer are counted."""
    model, inputs = make_model(device, dtype), make_inputs(device, dtype=dtype)
    report = ltx.optimize(model)
    plain = model(**inputs)[0]
    add(model)
    layers = sum(hasattr(module, "base_layer") for module in model.modules())
    beside = model(**inputs)[0]
    assert distance(beside, plain) > 0.01 and remarks(report) == {BESIDE: layers}
    model.disable_lora()
    assert torch.equal(model(**inputs)[0], plain)
    model.enable_lora()
    assert torch.equal(model(**inputs)[0], beside)
    assert remarks(report) == {BESIDE: 2 * layers}
    model.fuse_lora()
    assert distance(model(**inputs)[0], beside) < 0.05
    model.unfuse_lora()
    assert distance(model(**inputs)[0], beside) < 0.05
    model.delete_adapters("default")
    assert distance(model(**inputs)[0], plain) < 0.05
    assert report.fallbacks == {} and "adapters beside, " in str(report)
    assert "one by one" not in str(report)
    ltx.restore(model)


def test_adapters_before_optimize(ltx: ModuleType, device: str) -> None:
    """The layers below them are packed all the same, and unpacked by restore."""
    first, second = make_model(device, torch.bfloat16), make_model(device, torch.bfloat16)
    inputs = make_inputs(device, dtype=torch.bfloat16)
    ltx.optimize(first)
    add(first)
    add(second)
    report = ltx.optimize(second)
    assert not any("not packed" in note for note in report.notes)
    assert torch.equal(first(**inputs)[0], second(**inputs)[0])
    bases = [second.transformer_blocks[0].attn1.get_submodule(name).base_layer for name in ("to_q", "to_k", "to_v")]
    assert len({base.weight.untyped_storage().data_ptr() for base in bases}) == 1
    ltx.restore(second)
    assert len({base.weight.untyped_storage().data_ptr() for base in bases}) == 3


def test_error_is_not_above_pefts(ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = make_model(device, torch.bfloat16), make_inputs(device, dtype=torch.bfloat16)
    ltx.optimize(model)
    for name, seed in (("one", 3), ("two", 4)):
        add(model, name, seed)
    model.set_adapters(["one", "two"], [0.7, -1.2])
    ours = model(**inputs)[0]
    with monkeypatch.context() as patched:
        patched.setattr(ltx.integrations.linear.linears, "adapters_of", lambda *_: ("a test", []))
        theirs = model(**inputs)[0]
    ltx.restore(model)
    doubles = {
        key: value.double() if value.is_floating_point() else value
        for key, value in inputs.items()
        if isinstance(value, Tensor)
    }
    want = model.double()(**{**inputs, **doubles})[0]
    assert distance(ours, want) < 1.1 * distance(theirs, want) < 0.1


def test_other_kinds_are_called_by_themselves(ltx: ModuleType, device: str) -> None:
    model, inputs = make_model(device), make_inputs(device)
    report = ltx.optimize(model)
    add(model, use_dora=True)
    ours = model(**inputs)[0]
    assert set(remarks(report)) == {"adapters called by themselves: DoraLinearVariant of peft"}
    ltx.restore(model)
    assert distance(ours, model(**inputs)[0]) < 1e-5


def test_trained_adapters_get_their_gradients(ltx: ModuleType, device: str) -> None:
    """Those that are trained are peft's own; a frozen one of an earlier layer hands a gradient on."""
    grads = []
    for optimized in (True, False):
        model, inputs = make_model(device), make_inputs(device)
        if optimized:
            ltx.optimize(model)
        add(model, "frozen", target_modules=["attn1.to_out.0"])
        add(model, "trained", seed=4, target_modules=["attn1.to_q", "ff.net.2"])
        model.set_adapters(["frozen", "trained"])
        trained = {name: p for name, p in model.named_parameters() if ".trained." in name}
        for parameter in trained.values():
            parameter.requires_grad_()
        with torch.enable_grad():
            model(**inputs)[0].square().sum().backward()
        grads.append({name: parameter.grad for name, parameter in trained.items()})
    assert all(distance(grads[0][name], grads[1][name]) < 1e-4 for name in grads[1])


@pytest.mark.extended
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile(ltx: ModuleType, device: str, compiler: str) -> None:
    model, inputs = make_model(device), make_inputs(device)
    report = ltx.optimize(model)
    add(model)
    want = model(**inputs)[0]
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    assert distance(compiled(**inputs)[0], want) < 1e-4
    assert remarks(report)[f"{BESIDE} (compiled)"] == remarks(report)[BESIDE] > 0


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
@pytest.mark.parametrize("precision", ["native", "fp8"])
def test_a_pruned_adapter(ltx: ModuleType, device: str, part: str, precision: str) -> None:
    """torch.nn.utils.prune takes the parameter away, and sets a tensor before each call: peft's own layer runs."""
    from torch.nn.utils import prune

    model, inputs = make_model(device), make_inputs(device)
    add(model)
    prune.l1_unstructured(getattr(model.transformer_blocks[0].attn1.to_q, part)["default"], "weight", 0.5)
    want = model(**inputs)[0]
    ltx.optimize(model, precision=precision)
    assert distance(model(**inputs)[0], want) < (1e-5 if precision == "native" else 0.1)
