"""Loading language models and text encoders into fp8 by transformers' from_pretrained, and saving what was loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
safetensors = pytest.importorskip("safetensors.torch")
pytest.importorskip("transformers.core_model_loading", reason="transformers loads by operations from its version 5 on")
from helpers.language_models import LAYERS, make_encoder, make_ids, make_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad", "fp8_device")

# How many linear layers are in fp8.
FAMILIES = {"Llama": 14, "Qwen3": 14, "Gemma3": 14, "T5": 12, "UMT5": 12}
every_family = pytest.mark.parametrize("family", FAMILIES)

reads_fp8 = pytest.mark.skipif(
    not hasattr(transformers.quantizers.HfQuantizer, "get_new_dtype"),
    reason="this release of transformers cannot read a folder in fp8, which test_releases_that_cannot_read_fp8 is of",
)


def save_stock(family: str, folder: Path, **options: Any) -> type[nn.Module]:
    """Writes a small model in bfloat16; returns its class."""
    of_encoder = family.endswith("T5")
    model = (
        make_encoder(family, "cpu", torch.bfloat16) if of_encoder else make_model("cpu", torch.bfloat16, family=family)
    )
    model.save_pretrained(folder, **options)
    return type(model)


def load(loader: Any, folder: Path, device: str, **options: Any) -> Any:
    return loader.from_pretrained(folder, device_map=device, **{"dtype": torch.bfloat16, **options})


def output(model: nn.Module, device: str) -> Tensor:
    found = model(make_ids(device))
    return found.logits if "logits" in found else found.last_hidden_state


def quantised(ltx: ModuleType, model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    fp8 = ltx.integrations.linear.fp8_weights
    linears = {n: m for n, m in model.named_modules() if type(m) is nn.Linear and fp8.holds_fp8(m)}
    return {name: fp8.quantised_weight(linear) for name, linear in linears.items()}


def assert_same(ltx: ModuleType, one: nn.Module, other: nn.Module, device: str) -> None:
    ours, theirs = quantised(ltx, one), quantised(ltx, other)
    assert ours.keys() == theirs.keys() and ours
    for name, (values, scales) in ours.items():
        assert torch.equal(values.float(), theirs[name][0].float()) and torch.equal(scales, theirs[name][1]), name
    assert torch.equal(output(one, device), output(other, device))


@reads_fp8
@pytest.mark.parametrize("skip", [None, ["*[sk].1.*"]], ids=["default", "layers.1, block.1"])
@every_family
def test_a_checkpoint_in_bfloat16(
    ltx: ModuleType, device: str, tmp_path: Path, family: str, skip: list[str] | None
) -> None:
    """The bits of a model that is loaded and then optimized; saved in fp8 and loaded again, the same ones."""
    cls = save_stock(family, tmp_path / "stock", max_shard_size="30KB")
    model = load(cls, tmp_path / "stock", device)
    expected = ltx.optimize(model, precision="fp8", skip=skip, stock_weights="free")
    config = ltx.LTXKernelsFp8Config(skip=skip)
    loaded = load(cls, tmp_path / "stock", device, quantization_config=config)
    report = loaded.hf_quantizer.report
    assert report.replaced == expected.replaced
    assert report.replaced["torch.Linear"] == FAMILIES[family] // (1 if skip is None else 2)
    assert_same(ltx, loaded, model, device)
    assert report.fallbacks == {} and "one by one" not in str(report)
    assert not any("weight_scale" in name for name in loaded.state_dict())
    loaded.save_pretrained(tmp_path / "fp8", max_shard_size="30KB")
    said = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert said == {"quant_method": "ltx_kernels_fp8", "skip": skip, "memory": None}
    sizes = [sum(f.stat().st_size for f in (tmp_path / n).glob("*.safetensors")) for n in ("fp8", "stock")]
    assert sizes[0] < 0.9 * sizes[1]
    again = load(cls, tmp_path / "fp8", device)
    assert_same(ltx, again, model, device)
    assert again.hf_quantizer.report.replaced == expected.replaced
    again.save_pretrained(tmp_path / "again", max_shard_size="30KB")
    assert_same(ltx, load(cls, tmp_path / "again", device), model, device)


@reads_fp8
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_auto_model(ltx: ModuleType, device: str, tmp_path: Path, family: str) -> None:
    """The model without its head, of a checkpoint with one: transformers renames the tensors, and scales with them."""
    cls = save_stock(family, tmp_path / "stock")
    auto = transformers.AutoModel
    model = load(auto, tmp_path / "stock", device)
    ltx.optimize(model, precision="fp8", stock_weights="free")
    config = ltx.LTXKernelsFp8Config()
    loaded = load(auto, tmp_path / "stock", device, quantization_config=config)
    assert_same(ltx, loaded, model, device)
    loaded.save_pretrained(tmp_path / "fp8")
    assert_same(ltx, load(auto, tmp_path / "fp8", device), model, device)
    load(cls, tmp_path / "stock", device, quantization_config=config).save_pretrained(tmp_path / "with head")
    assert_same(ltx, load(auto, tmp_path / "with head", device), model, device)


def test_releases_that_cannot_read_fp8(
    ltx: ModuleType, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would cast the values and drop the scales; loading a checkpoint in bfloat16 works there."""
    cls = save_stock("Llama", tmp_path / "stock")
    monkeypatch.delattr(transformers.quantizers.HfQuantizer, "get_new_dtype", raising=False)
    loaded = load(cls, tmp_path / "stock", device, quantization_config=ltx.LTXKernelsFp8Config())
    assert len(quantised(ltx, loaded)) == FAMILIES["Llama"]
    loaded.save_pretrained(tmp_path / "fp8")
    with pytest.raises(ImportError, match=r"install transformers 5\.22 or newer"):
        load(cls, tmp_path / "fp8", device)


@every_family
def test_one_weight_at_a_time(
    ltx: ModuleType, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """When a weight is quantised, those before it are in fp8 already and those after it have no data."""
    cls = save_stock(family, tmp_path)
    home = ltx.integrations.quantizer.transformers
    before, quantize = home.TransformersQuantizer._process_model_before_weight_loading, home.quantize_weight
    planned: list[nn.Linear] = []
    seen: list[list[nn.Linear]] = []

    def plan(self: Any, model: nn.Module, **options: Any) -> None:
        before(self, model, **options)
        planned[:] = [model.get_submodule(name) for name in self._layers]

    def count(weight: Tensor) -> Any:
        assert weight.dtype == torch.bfloat16 and weight.dim() == 2
        with_data = [linear for linear in planned if linear.weight.device.type != "meta"]
        seen.append([linear for linear in with_data if linear.weight.dtype != torch.float8_e4m3fn])
        return quantize(weight)

    monkeypatch.setattr(home.TransformersQuantizer, "_process_model_before_weight_loading", plan)
    monkeypatch.setattr(home, "quantize_weight", count)
    loaded = load(cls, tmp_path, device, quantization_config=ltx.LTXKernelsFp8Config())
    assert len(seen) == len(planned) == len(quantised(ltx, loaded)) == FAMILIES[family]
    assert all(left == [] for left in seen)


@pytest.mark.host
def test_what_is_left(ltx: ModuleType, device: str, tmp_path: Path) -> None:
    """Each linear layer and embedding that is not in fp8 is in the report, with the reason."""
    config = ltx.LTXKernelsFp8Config(skip=["*.k_proj"])
    cls = save_stock("Llama", tmp_path / "llama")
    notes = load(cls, tmp_path / "llama", device, quantization_config=config).hf_quantizer.report.notes
    assert "not in fp8: model.embed_tokens: a table, of which rows are read" in notes
    assert "not in fp8: lm_head: in no block that is known" in notes
    assert "not in fp8: model.layers.*.self_attn.k_proj: skip names it" in notes
    cls = save_stock("T5", tmp_path / "t5")
    loaded = load(cls, tmp_path / "t5", device, quantization_config=ltx.LTXKernelsFp8Config())
    wo = "encoder.block.*.layer.*.DenseReluDense.wo"
    text = f"not in fp8: {wo}: the stock MLP casts its input to the dtype of this weight"
    assert text in loaded.hf_quantizer.report.notes
    assert loaded.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.bfloat16
    left = [n for n, m in loaded.named_modules() if type(m) is nn.Linear and n not in quantised(ltx, loaded)]
    assert len(left) == LAYERS and all(name.endswith(".wo") for name in left)


@pytest.mark.host
def test_layers_that_the_class_keeps_in_float32(
    ltx: ModuleType, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = save_stock("Llama", tmp_path)
    monkeypatch.setattr(cls, "_keep_in_fp32_modules_strict", {"down_proj"})
    loaded = load(cls, tmp_path, device, quantization_config=ltx.LTXKernelsFp8Config())
    assert loaded.model.layers[0].mlp.down_proj.weight.dtype == torch.float32
    assert loaded.hf_quantizer.report.replaced["torch.Linear"] == FAMILIES["Llama"] - LAYERS
    assert "not in fp8: model.layers.*.mlp.down_proj: its class keeps it in float32" in str(loaded.hf_quantizer.report)


@pytest.mark.host
def test_errors(ltx: ModuleType, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = save_stock("Llama", tmp_path / "stock")
    given = {"quantization_config": ltx.LTXKernelsFp8Config()}
    with pytest.raises(ValueError, match=r"^dtype: expected torch.bfloat16 with LTXKernelsFp8Config, got torch.flo"):
        load(cls, tmp_path / "stock", device, dtype=torch.float16, **given)
    with pytest.raises(ValueError, match=r"^device_map: expected devices that hold the model, got disk$"):
        cls.from_pretrained(tmp_path / "stock", dtype=torch.bfloat16, device_map={"": "disk"}, **given)
    with pytest.raises(ValueError, match=r"^quantization_config: expected a model with linear layers for fp8, got Lla"):
        config = ltx.LTXKernelsFp8Config(skip=["*"])
        load(cls, tmp_path / "stock", device, quantization_config=config)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.CLIPTextModel(transformers.CLIPTextConfig(**sizes)).save_pretrained(tmp_path / "clip")
    with pytest.raises(ValueError, match=r"^quantization_config: expected .*, got CLIPTextModel: its blocks are not"):
        load(transformers.CLIPTextModel, tmp_path / "clip", device, **given)
    with monkeypatch.context() as patch:
        patch.setattr(ltx.integrations.selection, "fp8_obstacle", lambda device: "NVIDIA A100 (8.0)")
        with pytest.raises(RuntimeError, match=r"^precision: expected a GPU of compute capability 8.9 .* A100"):
            cls.from_pretrained(tmp_path / "stock", dtype=torch.bfloat16, device_map={"": 0}, **given)


OF_LAYER, EMBEDDING = "model.layers.1.self_attn.q_proj", "model.embed_tokens.weight"
SCALES = f"{OF_LAYER}.weight_scale"
DAMAGES: dict[str, tuple[str, Callable[[Tensor], Tensor | None], str]] = {
    "no scale": (SCALES, lambda t: None, "expected a weight in e4m3 and weight_scale beside it, got nothing"),
    "scale of 0": (SCALES, torch.zeros_like, "expected 64 finite numbers above 0"),
    "one number": (SCALES, lambda t: t[:1], "expected 64 finite numbers above 0"),
    "embedding": (
        EMBEDDING,
        lambda t: t.to(torch.float8_e4m3fn),
        "expected a layer that can be in fp8, got torch.float8_e4m3fn",
    ),
}


@reads_fp8
@pytest.mark.host
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folders(ltx: ModuleType, device: str, tmp_path: Path, damage: str) -> None:
    name, change, text = DAMAGES[damage]
    cls = save_stock("Llama", tmp_path / "stock")
    config = ltx.LTXKernelsFp8Config()
    load(cls, tmp_path / "stock", device, quantization_config=config).save_pretrained(tmp_path / "fp8")
    file = tmp_path / "fp8" / "model.safetensors"
    tensors = safetensors.load_file(file)
    changed = {**tensors, name: change(tensors[name])}
    kept = {key: tensor for key, tensor in changed.items() if tensor is not None}
    safetensors.save_file(kept, file, metadata={"format": "pt"})
    message = rf"^weights: {name.removesuffix('_scale').removesuffix('.weight')}.*{text}"
    if damage == "one number":  # transformers 5.24 compares shapes first
        message += "|ignore_mismatched_sizes"
    with pytest.raises((ValueError, RuntimeError), match=message):
        load(cls, tmp_path / "fp8", device)


@reads_fp8
@pytest.mark.host
def test_a_folder_whose_weight_is_bfloat16_again(ltx: ModuleType, device: str, tmp_path: Path) -> None:
    """The file decides: a layer that somebody put back stays as it is, and scales without values are an error."""
    cls = save_stock("Llama", tmp_path / "stock")
    config = ltx.LTXKernelsFp8Config()
    load(cls, tmp_path / "stock", device, quantization_config=config).save_pretrained(tmp_path / "fp8")
    file, name = tmp_path / "fp8" / "model.safetensors", OF_LAYER
    tensors = safetensors.load_file(file)
    tensors[f"{name}.weight"] = torch.ones(64, 64).bfloat16()
    safetensors.save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"^weights: {name}: expected a weight in e4m3 .*, got a weight in torch.b"):
        load(cls, tmp_path / "fp8", device)
    del tensors[f"{name}.weight_scale"]
    safetensors.save_file(tensors, file, metadata={"format": "pt"})
    loaded = load(cls, tmp_path / "fp8", device)
    assert torch.equal(loaded.get_submodule(name).weight.cpu(), tensors[f"{name}.weight"])
    assert loaded.hf_quantizer.report.replaced["torch.Linear"] == FAMILIES["Llama"] - 1
    assert f"not in fp8: {name.replace('.1.', '.*.')}: the checkpoint has it so" in loaded.hf_quantizer.report.notes
