"""Loading into fp8 by diffusers' from_pretrained and from_single_file, and saving what was loaded."""

from __future__ import annotations

import copy
import gc
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")
pytest.importorskip("accelerate")
pytest.importorskip("safetensors")
from helpers.checkpoints import PREFIX, comfy_quant, in_original_names, scaled, write
from test_checkpoints import assert_means, convert, narrow, quantised_layers  # noqa: F401
from test_families import FAMILIES, cast, make, run
from test_integration import LAYERS, distance, make_inputs, make_model
from test_integration_fp8 import LINEARS

pytestmark = pytest.mark.usefixtures("no_grad", "fp8_device")

TO_Q = "transformer_blocks.0.attn1.to_q"


@pytest.fixture
def model(device: str) -> nn.Module:
    return make_model(device, torch.bfloat16)


@pytest.fixture
def inputs(device: str) -> dict[str, Any]:
    return make_inputs(device, torch.bfloat16)


def from_pretrained(ltx: ModuleType, model: nn.Module, folder: Path, device: str, **options: Any) -> Any:
    given = {"quantization_config": ltx.LTXKernelsFp8Config(), "torch_dtype": torch.bfloat16, **options}
    return type(model).from_pretrained(folder, device_map=device, **given)


def assert_same_bits(ltx: ModuleType, one: nn.Module, other: nn.Module) -> None:
    layers, others = quantised_layers(ltx, one), quantised_layers(ltx, other)
    assert layers.keys() == others.keys() and layers
    for name, (values, scales) in layers.items():
        assert torch.equal(values.float(), others[name][0].float()) and torch.equal(scales, others[name][1]), name


@pytest.mark.parametrize("skip", [None, [], ["*.attn2.*"]], ids=str)
@pytest.mark.parametrize("shard", ["10GB", "30KB"])
def test_a_checkpoint_in_bfloat16(
    ltx: ModuleType,
    device: str,
    model: nn.Module,
    inputs: dict[str, Any],
    tmp_path: Path,
    shard: str,
    skip: list[str] | None,
) -> None:
    """The bits of a model that is loaded and then optimized; saved in fp8 and loaded again, the same ones."""
    model.save_pretrained(tmp_path / "stock", max_shard_size=shard)
    expected = ltx.optimize(model, precision="fp8", skip=skip)
    want = model(**inputs)[0]
    config = ltx.LTXKernelsFp8Config(skip=skip)
    loaded = from_pretrained(ltx, model, tmp_path / "stock", device, quantization_config=config)
    assert_same_bits(ltx, loaded, model)
    assert torch.equal(loaded(**inputs)[0], want)
    report = loaded.hf_quantizer.report
    assert report.replaced == expected.replaced and report.fallbacks == {} and "one by one" not in str(report)
    assert loaded.dtype == torch.bfloat16
    loaded.save_pretrained(tmp_path / "fp8", max_shard_size=shard)
    said = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert said == {"quant_method": "ltx_kernels_fp8", "skip": skip, "memory": None}
    files = sorted((tmp_path / "fp8").glob("*.safetensors"))
    assert (len(files) > 1) == (shard == "30KB")
    assert sum(f.stat().st_size for f in files) < 0.8 * sum(
        f.stat().st_size for f in (tmp_path / "stock").glob("*.safetensors")
    )
    again = type(model).from_pretrained(tmp_path / "fp8", device_map=device)
    assert_same_bits(ltx, again, model)
    assert torch.equal(again(**inputs)[0], want)
    # The same file is one of those that `weights` takes.
    fresh = make_model(device, torch.bfloat16)
    ltx.optimize(fresh, precision="fp8", weights=tmp_path / "fp8")
    assert torch.equal(fresh(**inputs)[0], want)


def test_no_weight_is_there_in_bfloat16(
    ltx: ModuleType, device: str, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a weight is quantised, those before it are in fp8 already and those after it have no data."""
    model.save_pretrained(tmp_path)
    seen: list[list[str]] = []
    home = ltx.integrations.quantizer.diffusers
    create, quantize = home.DiffusersQuantizer.create_quantized_param, home.quantize_weight
    loading: list[nn.Module] = []

    def record(self: Any, model: nn.Module, *arguments: Any, **options: Any) -> None:
        loading[:] = [model]
        create(self, model, *arguments, **options)

    def count(weight: Tensor) -> Any:
        named = loading[0].named_parameters()
        seen.append(
            [
                n
                for n, p in named
                if ".ff." in n
                and p.dim() == 2
                and p.is_floating_point()
                and p.device.type != "meta"
                and p.dtype != torch.float8_e4m3fn
            ]
        )
        return quantize(weight)

    monkeypatch.setattr(home.DiffusersQuantizer, "create_quantized_param", record)
    monkeypatch.setattr(home, "quantize_weight", count)
    loaded = from_pretrained(ltx, model, tmp_path, device)
    assert len(seen) == len(quantised_layers(ltx, loaded)) and all(names == [] for names in seen)


@pytest.mark.parametrize("spelling", ["comfy old", "comfy", "fp8r"])
@pytest.mark.parametrize("name", ["ltx", "wan-t2v", "ltx2", "flux", "z_image", "hunyuan_video", "cosmos-per_frame"])
def test_single_files(ltx: ModuleType, device: str, tmp_path: Path, name: str, spelling: str) -> None:
    """Scaled fp8 in original names: scales go with their rows, also those of layers that stay in bf16 or float32."""
    model = make(FAMILIES[name], "cpu", torch.bfloat16)
    model.save_config(tmp_path)
    file, meant, metadata = scaled(in_original_names(name, model.state_dict()), spelling, "row")
    path = write(tmp_path / "model.safetensors", {PREFIX + key: tensor for key, tensor in file.items()}, metadata)
    loaded = type(model).from_single_file(
        str(path), config=str(tmp_path), quantization_config=ltx.LTXKernelsFp8Config(), device=device
    )
    layers = assert_means(ltx, loaded, convert(model, meant))
    report = loaded.hf_quantizer.report
    assert report.replaced["torch.Linear"] == len(layers) > 0
    assert "fp8 layers multiplied by their scales, because they stay in bf16" in str(report)
    inputs = cast(FAMILIES[name].inputs(1), device, torch.bfloat16)
    assert all(output.isfinite().all() for output in run(loaded, inputs))
    assert "torch.Linear" not in report.fallbacks
    loaded.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved", device_map=device)
    assert_same_bits(ltx, again, loaded)


def test_a_single_file_in_bfloat16(
    ltx: ModuleType, device: str, model: nn.Module, inputs: dict[str, Any], tmp_path: Path
) -> None:
    model.save_config(tmp_path)
    path = write(tmp_path / "model.safetensors", in_original_names("ltx", model.cpu().state_dict()))
    model.to(device)
    loaded = type(model).from_single_file(
        str(path), config=str(tmp_path), quantization_config=ltx.LTXKernelsFp8Config(), device=device
    )
    ltx.optimize(model, precision="fp8")
    assert torch.equal(loaded(**inputs)[0], model(**inputs)[0])
    assert loaded.hf_quantizer.report.replaced["torch.Linear"] < LINEARS * LAYERS + 1


@pytest.mark.parametrize("spelling", ["fp8r", "wan2gp"])
@pytest.mark.parametrize("said", [True, False], ids=["config.json says so", "config.json says nothing"])
def test_a_scale_in_another_shard(
    ltx: ModuleType,
    device: str,
    model: nn.Module,
    inputs: dict[str, Any],
    tmp_path: Path,
    said: bool,
    spelling: str,
) -> None:
    """As other programs may write a folder: every second tensor is in another file."""
    file, meant, metadata = scaled(model.cpu().state_dict(), spelling, "row", only=lambda name: ".ff." in name)
    index = write(tmp_path / "diffusion_pytorch_model.safetensors", file, metadata, shards=2)
    config = {**dict(model.config), **({"quantization_config": {"quant_method": "ltx_kernels_fp8"}} if said else {})}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    loaded = from_pretrained(ltx, model, tmp_path, device)
    assert len(assert_means(ltx, loaded, meant)) == 2 * LAYERS
    found = json.loads(index.read_text())
    scale = f"transformer_blocks.0.ff.net.2.{'weight_scale' if spelling == 'fp8r' else 'scale_weight'}"
    shard = tmp_path / found["weight_map"].pop(scale)
    index.write_text(json.dumps(found))
    from safetensors.torch import load_file

    kept = {n: t for n, t in load_file(shard).items() if n != scale}
    write(shard, kept, {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"^weights: transformer_blocks.0.ff.net.2.weight: expected .*weight_scale besi"
    ):
        from_pretrained(ltx, model, tmp_path, device)


def test_a_copy_saves_its_scales(ltx: ModuleType, device: str, model: nn.Module, tmp_path: Path) -> None:
    """Also when the model that it was copied from is gone."""
    model.save_pretrained(tmp_path / "stock")
    loaded = from_pretrained(ltx, model, tmp_path / "stock", device)
    copied = copy.deepcopy(loaded)
    expected = {name: (m.weight.detach().clone()) for name, m in loaded.named_modules() if type(m) is nn.Linear}
    del loaded
    gc.collect()
    copied.save_pretrained(tmp_path / "copy")
    again = from_pretrained(ltx, model, tmp_path / "copy", device)
    for name, weight in expected.items():
        assert torch.equal(again.get_submodule(name).weight.view(torch.uint8), weight.view(torch.uint8)), name


@pytest.mark.host
def test_errors(
    ltx: ModuleType, device: str, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^torch_dtype: expected torch.bfloat16 with LTXKernelsFp8Config, got .*16$"):
        from_pretrained(ltx, model, tmp_path, device, torch_dtype=torch.float16)
    for skip, error in (("*.ff.*", ValueError), ([3], TypeError)):
        with pytest.raises(error, match=r"^skip: expected a list of patterns, got "):
            ltx.LTXKernelsFp8Config(skip=skip)
    with monkeypatch.context() as patch:
        patch.setattr(ltx.integrations.selection, "fp8_obstacle", lambda device: "NVIDIA A100 (8.0)")
        with pytest.raises(RuntimeError, match=r"^precision: expected a GPU of compute capability 8.9 .* A100"):
            type(model).from_pretrained(
                tmp_path, quantization_config=ltx.LTXKernelsFp8Config(), torch_dtype=torch.bfloat16, device_map="cuda"
            )
    file, _, metadata = scaled(model.cpu().state_dict(), "fp8r", "row")
    file.update(comfy_quant(TO_Q, format="nvfp4"))
    path = write(tmp_path / "model.safetensors", file, metadata)
    with pytest.raises(ValueError, match=rf"^weights: {TO_Q}: expected e4m3 values .*, got the format 'nvfp4'"):
        type(model).from_single_file(
            str(path), config=str(tmp_path), quantization_config=ltx.LTXKernelsFp8Config(), device=device
        )
    del file[f"{TO_Q}.comfy_quant"], file[f"{TO_Q}.bias"]
    write(path, file, metadata)
    with pytest.raises(ValueError, match=rf"^weights: {TO_Q}.bias: expected a tensor, got nothing in the checkpoint"):
        type(model).from_single_file(
            str(path), config=str(tmp_path), quantization_config=ltx.LTXKernelsFp8Config(), device=device
        )


def test_pipelines(ltx: ModuleType, device: str, model: nn.Module, inputs: dict[str, Any], tmp_path: Path) -> None:
    """diffusers' configuration of a pipeline names it by component."""
    from diffusers import PipelineQuantizationConfig

    model.save_pretrained(tmp_path)
    mapping = PipelineQuantizationConfig(quant_mapping={"transformer": ltx.LTXKernelsFp8Config()})
    config = mapping._resolve_quant_config(is_diffusers=True, module_name="transformer")
    loaded = from_pretrained(ltx, model, tmp_path, device, quantization_config=config)
    ltx.optimize(model, precision="fp8")
    assert (
        torch.equal(loaded(**inputs)[0], model(**inputs)[0])
        and distance(loaded(**inputs)[0], 0 * inputs["hidden_states"]) > 0
    )
