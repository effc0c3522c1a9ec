"""`optimize(memory="low")`: fewer layers in bfloat16, and modulation whose weights alone are in fp8."""

from __future__ import annotations

import copy
import fnmatch
import re
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers")
from test_families import FAMILIES, cast, distance, make, run
from test_integration import patched

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad", "fp8_device")

# One for each way to make modulation, and the families with a list of their own of what stays in bfloat16.
CASES = {name: FAMILIES[name] for name in ("flux", "qwenimage", "sd3", "z_image", "ltx2", "wan") if name in FAMILIES}
every_case = pytest.mark.parametrize("family", CASES.values(), ids=CASES)
# Of LTX-2.3: a few numbers for each token.
NEVER = ("*.to_gate_logits",)


def modulation_of(ltx: ModuleType, model: nn.Module) -> dict[str, nn.Module]:
    """The layers whose weights alone are in fp8."""
    entry = ltx.integrations.linear.weight_only.WEIGHT_ONLY
    named = model.named_modules()
    return {name: m for name, m in named if getattr(vars(m).get("_ltx_kernels"), "entry", None) is entry}


def in_fp8(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if "ltx_fp8_scales" in module._buffers}


def flux(device: str) -> nn.Module:
    return make(CASES["flux"], device, torch.bfloat16)


def inputs_of_flux(device: str) -> dict[str, Any]:
    return cast(CASES["flux"].inputs(1), device, torch.bfloat16)


@pytest.mark.parametrize("shape", [(2, 64), (1, 3, 64), (3, 9, 64)], ids=str)
@pytest.mark.parametrize("part_bytes", [32 * 2**20, 4096])
def test_product_against_fp64(
    ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], part_bytes: int
) -> None:
    """Within the rounding of a bfloat16 product and of its result: neither the weight nor the input loses anything."""
    home = ltx.integrations.linear.weight_only
    monkeypatch.setattr(home, "PART_BYTES", part_bytes)
    torch.manual_seed(0)
    linear = nn.Linear(64, 112, device=device).bfloat16()
    values, scales = ltx.quantize_weight(linear.weight)
    bias = linear.bias.detach()
    input = torch.randn(shape, device=device).bfloat16()
    weight = values.double() * scales.double()[:, None]
    want = nn.functional.linear(input.double(), weight, bias.double())
    slack = nn.functional.linear(input.double().abs(), weight.abs(), bias.double().abs())
    output = home.product(input, values, scales, bias)
    assert output.dtype == torch.bfloat16 and output.shape == (*shape[:-1], 112)
    assert ((output.double() - want).abs() <= 2**-8 * want.abs() + 2**-7.5 * slack).all()


@every_case
def test_families(ltx: ModuleType, device: str, family: Any) -> None:
    """Near the stock model, all layers but those that the report names in fp8, and the stock bits at the end."""
    model = make(family, device, torch.bfloat16)
    inputs = cast(family.inputs(1), device, torch.bfloat16)
    stock = run(model, inputs)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = ltx.optimize(model, precision="fp8")
    error, before = distance(run(model, inputs), stock), in_fp8(model)
    assert modulation_of(ltx, model) == {} and "memory low" not in str(plain)
    report = ltx.optimize(model, memory="low")
    assert distance(run(model, inputs), stock) < 1.5 * error + 0.01
    assert distance(run(model, inputs), run(model, inputs)) == 0 and report.fallbacks == {}
    assert before <= in_fp8(model)
    ltx.restore(model)
    assert patched(model) == []
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert distance(run(model, inputs), stock) == 0


@pytest.mark.host
def test_first_line(ltx: ModuleType, device: str) -> None:
    """What was saved is what the model carries less; the layers that stay in bfloat16 are named."""
    model = flux(device)

    def carried() -> float:
        return sum(t.nbytes for t in (*model.parameters(), *model.buffers())) / 2**20

    before = carried()
    report = ltx.optimize(model, memory="low")
    first, *_, last = str(report).splitlines()
    assert first.endswith(f"; memory low: {before:.2f} -> {carried():.2f} MiB of weights")
    assert last == "memory low leaves in bf16, of the blocks' linear layers: none"
    with_skip = ltx.optimize(model, memory="low", skip=["*.norm1.linear", "*.ff.*"])
    assert str(with_skip).endswith("linear layers: *.norm1.linear, *.ff.*")
    assert not {name for name in in_fp8(model) if fnmatch.fnmatch(name, "*.norm1.linear") or ".ff." in name}
    assert {name.rpartition("s.")[2] for name in modulation_of(ltx, model)} == {"0.norm1_context.linear"} | {
        f"{i}.norm.linear" for i in range(len(model.single_transformer_blocks))
    } | {f"{i}.norm1_context.linear" for i in range(len(model.transformer_blocks))}


@pytest.mark.parametrize("name", CASES)
def test_every_linear_layer_of_a_block_is_offered(ltx: ModuleType, name: str) -> None:
    """With skip=[] no linear layer of a block stays in bfloat16 that has a form in fp8."""
    model = make(CASES[name], "cpu", torch.bfloat16)
    blocks = [path for path, m in model.named_modules() if isinstance(m, nn.ModuleList) and "blocks" in path]
    ltx.optimize(model, memory="low", skip=[])
    left = [
        path
        for path, module in model.named_modules()
        if type(module) is nn.Linear
        and path.startswith(tuple(f"{block}." for block in blocks))
        and path not in in_fp8(model)
        and not (module.in_features % 16 or module.out_features % 16)
        and not any(fnmatch.fnmatch(path, pattern) for pattern in NEVER)
    ]
    assert left == []


def test_dtypes_run_stock(ltx: ModuleType, device: str) -> None:
    model, inputs = flux(device), inputs_of_flux(device)
    report = ltx.optimize(model, memory="low")
    (linear, *_) = modulation_of(ltx, model).values()
    rows = torch.randn(2, linear.in_features, device=device)
    assert linear(rows.bfloat16()).dtype == torch.bfloat16 and report.fallbacks == {}
    with pytest.raises(RuntimeError, match="dtype"):
        linear(rows)
    assert report.fallbacks["torch.Linear"] == {"fp8 takes bfloat16 activations, not torch.float32": 1}
    assert distance(run(model, inputs), run(model, inputs)) == 0


def test_adapters(ltx: ModuleType, device: str) -> None:
    """peft's layers on modulation run beside it, and are merged into it."""
    peft = pytest.importorskip("peft")
    model, inputs = flux(device), inputs_of_flux(device)
    reference = copy.deepcopy(model)
    ltx.optimize(model, memory="low")
    bare, outputs = run(model, inputs), []
    for part in reference, model:
        torch.manual_seed(3)
        part.add_adapter(peft.LoraConfig(r=4, lora_alpha=16, target_modules=["norm1.linear"], init_lora_weights=False))
        part.requires_grad_(False)
        outputs.append(run(part, inputs))
    assert distance(outputs[1], outputs[0]) < 0.1 < distance(outputs[1], bare)
    model.fuse_lora()
    assert distance(run(model, inputs), outputs[1]) < 0.1 < distance(run(model, inputs), bare)
    model.unfuse_lora()
    model.unload_lora()
    assert distance(run(model, inputs), bare) < 0.05


def test_saved_and_loaded(ltx: ModuleType, device: str, tmp_path: Any) -> None:
    """The file says what is in fp8, also of modulation."""
    model, inputs = flux(device), inputs_of_flux(device)
    report = ltx.optimize(model, memory="low")
    want = run(model, inputs)
    report.save_weights(tmp_path)
    for options in ({}, {"memory": "low"}):
        other = flux(device)
        loaded = ltx.optimize(other, precision="fp8", weights=tmp_path, **options)
        assert distance(run(other, inputs), want) == 0
        assert modulation_of(ltx, other).keys() == modulation_of(ltx, model).keys()
        first = str(loaded).splitlines()[0]
        assert bool(re.search(r"memory low: [0-9.]+ MiB of weights$", first)) == bool(options)


def test_quantizer(ltx: ModuleType, device: str, tmp_path: Any) -> None:
    """diffusers' own loading makes the same model, and its folder says that it is one of memory="low"."""
    model, inputs = flux(device), inputs_of_flux(device)
    model.save_pretrained(tmp_path / "stock")
    ltx.optimize(model, memory="low")
    want = run(model, inputs)
    load = type(model).from_pretrained
    options = {"torch_dtype": torch.bfloat16, "device_map": device}
    other = load(tmp_path / "stock", quantization_config=ltx.LTXKernelsFp8Config(memory="low"), **options)
    assert distance(run(other, inputs), want) == 0 and in_fp8(other) == in_fp8(model)
    other.save_pretrained(tmp_path / "low")
    again = load(tmp_path / "low", **options)
    assert distance(run(again, inputs), want) == 0 and in_fp8(again) == in_fp8(model)
    assert again.hf_quantizer.report.target.endswith("MiB of weights")


@pytest.mark.host
def test_wrong_options(ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = flux(device)
    for options, text in (
        ({"memory": "high"}, "^memory: expected None or \"low\", got 'high'$"),
        ({"memory": "low", "level": "norms"}, "goes with level"),
        ({"memory": "low", "rounding": "eager"}, "goes with level"),
    ):
        with pytest.raises(ValueError, match=text):
            ltx.optimize(model, **options)
    with pytest.raises(ValueError, match=r"^memory: expected None"):
        ltx.LTXKernelsFp8Config(memory="high")
    monkeypatch.setattr(ltx.integrations.selection, "fp8_obstacle", lambda device: "NVIDIA A100 (8.0)")
    with pytest.raises(RuntimeError, match=r"^precision: expected .* 8.9 or newer .* got NVIDIA A100 \(8.0\)"):
        ltx.optimize(model, memory="low")
    assert patched(model) == []


@pytest.mark.extended
def test_compile(ltx: ModuleType, device: str) -> None:
    model, inputs = flux(device), inputs_of_flux(device)
    ltx.optimize(model, memory="low")
    want = run(model, inputs)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert distance(run(compiled, inputs), want) < 0.01
