"""Models in fp8 on disk: saved once, loaded without stock weights, and one error for files that do not fit."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")
safetensors = pytest.importorskip("safetensors.torch")
accelerate = pytest.importorskip("accelerate")
from test_families import FAMILIES, cast, every_changed_family, make, run  # noqa: E402
from test_integration import LAYERS, make_inputs, make_model, patched  # noqa: E402
from test_integration_fp8 import LINEARS  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_grad", "fp8_device")

FILE = "ltx_kernels_fp8.safetensors"


@pytest.fixture
def inputs(device: str) -> dict[str, Any]:
    return make_inputs(device, torch.bfloat16)


def empty_like(model: nn.Module) -> nn.Module:
    """A model of the same configuration without data."""
    with accelerate.init_empty_weights():
        return type(model).from_config(model.config).eval()


def stock_config(model: nn.Module, folder: Path) -> Path:
    model.save_config(folder / "stock")
    return folder / "stock"


class Pipeline:
    def __init__(self, **components: Any) -> None:
        self.components = components


@pytest.mark.parametrize("stock_weights", ["beside", "cpu", "free"])
def test_saved_and_loaded(
    ltx: ModuleType, device: str, inputs: dict[str, Any], tmp_path: Path, stock_weights: str
) -> None:
    """The same bits from a model that never had the stock weights of the quantised layers."""
    model = make_model(device, torch.bfloat16)
    size = sum(p.nbytes for p in model.parameters())
    report = ltx.optimize(model, precision="fp8", stock_weights=stock_weights)
    want = model(**inputs)[0]
    report.save_weights(tmp_path / "here")
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["config.json", FILE]
    assert (tmp_path / "here" / FILE).stat().st_size < 0.8 * size
    assert type(model).load_config(tmp_path / "here") == type(model).load_config(stock_config(model, tmp_path))
    loaded = empty_like(model)
    with torch.device(device):
        report = ltx.optimize(loaded, precision="fp8", weights=tmp_path / "here")
    assert report.replaced["torch.Linear"] == LINEARS * LAYERS and "were loaded" in str(report)
    assert {p.device.type for p in loaded.parameters()} == {device} and loaded.dtype == torch.bfloat16
    assert torch.equal(loaded(**inputs)[0], want)
    assert report.fallbacks == {} and "one by one" not in str(report)
    with pytest.raises(RuntimeError, match="cannot be restored, and nothing was: its weight is in fp8 alone"):
        report.restore()
    report.save_weights(tmp_path / "again")
    again, here = (safetensors.load_file(tmp_path / name / FILE) for name in ("again", "here"))
    assert again.keys() == here.keys()
    assert all(torch.equal(again[name].float(), here[name].float()) for name in here)


def test_nothing_is_quantised_on_loading(
    ltx: ModuleType, device: str, inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a model with other weights as well, whose parameters stay the ones that they are."""
    model, other = make_model(device, torch.bfloat16), make_model(device, torch.bfloat16)
    ltx.optimize(model, precision="fp8").save_weights(tmp_path)
    want = model(**inputs)[0]
    for parameter in other.parameters():
        parameter.mul_(0.5)
    before = {name: id(parameter) for name, parameter in other.named_parameters()}
    monkeypatch.setattr(ltx.integrations.linear.fp8_weights, "quantize_weight", None)
    ltx.optimize(other, precision="fp8", weights=str(tmp_path))
    assert torch.equal(other(**inputs)[0], want)
    assert {name: id(parameter) for name, parameter in other.named_parameters()} == before


@pytest.mark.parametrize("on_meta", [False, True], ids=["with data", "on meta"])
def test_loading_keeps_requires_grad(ltx: ModuleType, device: str, tmp_path: Path, on_meta: bool) -> None:
    model = make_model(device, torch.bfloat16)
    with ltx.optimize(model, precision="fp8", stock_weights="cpu") as report:
        report.save_weights(tmp_path)
    loaded = empty_like(model) if on_meta else model
    for i, parameter in enumerate(loaded.parameters()):
        parameter.requires_grad_(i % 2 == 0)
    before = {name: parameter.requires_grad for name, parameter in loaded.named_parameters()}
    with torch.device(device):
        ltx.optimize(loaded, precision="fp8", weights=tmp_path)
    assert {name: parameter.requires_grad for name, parameter in loaded.named_parameters()} == before


def test_pipeline(ltx: ModuleType, device: str, inputs: dict[str, Any], tmp_path: Path) -> None:
    """Each component goes into a folder of its name; the autoencoder, which has no layers in fp8, stays out."""
    models = [make_model(device, torch.bfloat16, num_layers=layers) for layers in (1, 2)]
    vae = pytest.importorskip("test_vae").make_vae("ltx 0.9.5", device, torch.bfloat16)
    pipeline = Pipeline(transformer=models[0], transformer_2=models[1], vae=vae)
    report = ltx.optimize(pipeline, precision="fp8")
    report.save_weights(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["transformer", "transformer_2"]
    want = [model(**inputs)[0] for model in models]
    loaded = [empty_like(model) for model in models]
    pipeline = Pipeline(transformer=loaded[0], transformer_2=loaded[1], vae=vae)
    with torch.device(device):
        again = ltx.optimize(pipeline, precision="fp8", weights=tmp_path)
    assert again.replaced == report.replaced and "diffusers.LTXVideoDecoder3d" in again.replaced
    assert all(torch.equal(model(**inputs)[0], output) for model, output in zip(loaded, want))


def test_offloaded_autoencoder(ltx: ModuleType, device: str) -> None:
    """An autoencoder that is offloaded does not move the stock weights of a transformer that is not."""
    vae = pytest.importorskip("test_vae").make_vae("ltx 0.9.5", "cpu", torch.bfloat16)
    accelerate.cpu_offload_with_hook(vae, device)
    pipeline = Pipeline(transformer=make_model(device, torch.bfloat16), vae=vae)
    report = ltx.optimize(pipeline, precision="fp8", stock_weights="beside")
    assert "beside the stock ones" in str(report) and "diffusers.LTXVideoDecoder3d" in report.replaced


@every_changed_family
def test_families(ltx: ModuleType, device: str, family: Any, tmp_path: Path) -> None:
    inputs = cast(family.inputs(1), device, torch.bfloat16)
    model = make(family, device, torch.bfloat16)
    first = ltx.optimize(model, precision="fp8")
    first.save_weights(tmp_path)
    want = run(model, inputs)
    loaded = family.make().eval().to("meta")
    for mine, others in zip(loaded.modules(), model.modules()):  # buffers that no file holds
        for name in mine._non_persistent_buffers_set:
            mine._buffers[name] = others._buffers[name]
    with torch.device(device):
        report = ltx.optimize(loaded, precision="fp8", weights=tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(run(loaded, inputs), want))
    assert report.left_alone == first.left_alone and "torch.Linear" not in report.fallbacks


def test_a_table_in_the_dtype_of_the_model(ltx: ModuleType, device: str, tmp_path: Path) -> None:
    """A model that is made without data has a table in float32, which from_pretrained casts."""
    family = FAMILIES["sd3"]
    inputs = cast(family.inputs(1), device, torch.bfloat16)
    model = make(family, device, torch.bfloat16)
    assert model.pos_embed.pos_embed.dtype == torch.bfloat16
    ltx.optimize(model, precision="fp8").save_weights(tmp_path)
    loaded = empty_like(model)
    assert loaded.pos_embed.pos_embed.dtype == torch.float32 and loaded.pos_embed.pos_embed.device.type != "meta"
    with torch.device(device):
        ltx.optimize(loaded, precision="fp8", weights=tmp_path)
    assert loaded.pos_embed.pos_embed.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(run(loaded, inputs), run(model, inputs)))


def test_skip_is_saved(ltx: ModuleType, device: str, inputs: dict[str, Any], tmp_path: Path) -> None:
    """The file says which layers are in fp8, whatever the default is."""
    model = make_model(device, torch.bfloat16)
    ltx.optimize(model, precision="fp8", skip=["*.attn*"]).save_weights(tmp_path)
    loaded = empty_like(model)
    with torch.device(device):
        report = ltx.optimize(loaded, precision="fp8", weights=tmp_path)
    assert report.replaced["torch.Linear"] == 2 * LAYERS
    assert torch.equal(loaded(**inputs)[0], model(**inputs)[0])


# ---- Errors


def change(path: Path, metadata: dict[str, str] | None = None, **tensors: Tensor | None) -> None:
    """Rewrites a file with other tensors, or without those that are None."""
    with safetensors.safe_open(path, framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = {**file.metadata(), **(metadata or {})}
    found = {name: tensor for name, tensor in {**found, **tensors}.items() if tensor is not None}
    safetensors.save_file(found, path, metadata=metadata)


@pytest.mark.host
def test_files_that_do_not_fit(ltx: ModuleType, device: str, tmp_path: Path) -> None:
    """One error that says what was expected and what came; nothing is changed."""
    model = make_model(device, torch.bfloat16)
    ltx.optimize(model, precision="fp8").save_weights(tmp_path)
    good = (tmp_path / FILE).read_bytes()

    def fails(error: type[Exception], text: str, to: nn.Module | None = None) -> None:
        other = empty_like(model) if to is None else to
        with pytest.raises(error, match=text) as caught:
            ltx.optimize(other, precision="fp8", weights=tmp_path)
        assert "\n" not in str(caught.value)
        assert patched(other) == [] and all(p.device.type == "meta" for p in other.parameters() if to is None)
        (tmp_path / FILE).write_bytes(good)

    path = tmp_path / FILE
    change(path, more=torch.zeros(1))
    fails(ValueError, r"weights: more: expected nothing, got \[1\]")
    values = torch.zeros(8, 64, dtype=torch.float8_e4m3fn)
    change(path, **{"proj_out.weight": values, "proj_out.ltx_fp8_scales": torch.zeros(8)})
    fails(ValueError, "weights: proj_out is in fp8 in the file and cannot be here: it is in no block that is known")
    change(path, metadata={"ltx_kernels": "ltx-kernels fp8, version 9"})
    fails(ValueError, "weights: expected a file of ltx-kernels fp8, version 1, got .* version 9")
    change(path, metadata={"class": "a.B"})
    fails(ValueError, "weights: expected those of diffusers.*LTXVideoTransformer3DModel, got a.B")
    fails(ValueError, "weights: transformer_blocks.2", to=make_model(device, torch.bfloat16, num_layers=3))
    path.write_bytes(good[:100])
    fails(ValueError, "weights: expected a safetensors file, got")
    path.unlink()
    fails(FileNotFoundError, "weights: expected a folder with ltx_kernels_fp8.safetensors")
    with torch.device("meta"):
        bare = type(model).from_config(model.config)
    bare.register_buffer("table", torch.empty(2, device="meta"), persistent=False)
    fails(ValueError, "weights: expected buffers that no file holds to have data, got table on meta", to=bare)


TO_Q = "transformer_blocks.0.attn1.to_q"
SCALES = f"{TO_Q}.ltx_fp8_scales"


@pytest.mark.host
@pytest.mark.parametrize("on_meta", [False, True], ids=["with data", "on meta"])
@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        (
            "proj_in.weight",
            torch.zeros(3, 8).bfloat16(),
            r"expected \[64, 8\] of .*bfloat16.*, got \[3, 8\] of bfloat16",
        ),
        ("proj_in.weight", torch.zeros(64, 8).half(), r"expected \[64, 8\] of .*bfloat16.*, got \[64, 8\] of float16"),
        ("proj_in.weight", torch.zeros(64, 8).int(), r"expected \[64, 8\] of .*bfloat16.*, got \[64, 8\] of int32"),
        (
            "proj_in.bias",
            torch.zeros(64).to(torch.float8_e4m3fn),
            "expected .* of .*bfloat16.*, got .* of float8_e4m3fn",
        ),
        (f"{TO_Q}.weight", None, r"expected \[64, 64\] of float8_e4m3fn, got nothing"),
        (f"{TO_Q}.weight", torch.zeros(64, 64).bfloat16(), "expected .* of float8_e4m3fn, got .* of bfloat16"),
        (f"{TO_Q}.weight", torch.zeros(64, 64).to(torch.int8), "expected .* of float8_e4m3fn, got .* of int8"),
        (f"{TO_Q}.weight", torch.zeros(64, 64).to(torch.float8_e5m2), "expected .*_e4m3fn, got .* of float8_e5m2"),
        (SCALES, None, r"expected \[64\] of float32, got nothing"),
        (SCALES, torch.ones(128), r"expected \[64\] of float32, got \[128\] of float32"),
        (SCALES, torch.ones(1), r"expected \[64\] of float32, got \[1\] of float32"),
        (SCALES, torch.ones(1, 64), r"expected \[64\] of float32, got \[1, 64\] of float32"),
        (SCALES, torch.ones(64).int(), r"expected \[64\] of float32, got \[64\] of int32"),
        (SCALES, torch.ones(64).half(), r"expected \[64\] of float32, got \[64\] of float16"),
        (f"{TO_Q}.bias", None, r"expected \[64\] of .*bfloat16.*, got nothing"),
    ],
    ids=[
        *("shape", "float16", "int32", "e4m3 without scales"),
        *("no weight", "bfloat16 with scales", "int8 with scales", "e5m2 with scales"),
        *("no scales", "long scales", "one scale", "scales of two dimensions", "scales of int32", "scales of float16"),
        "no bias",
    ],
)
def test_tensors_that_do_not_fit(
    ltx: ModuleType, device: str, tmp_path: Path, name: str, tensor: Tensor | None, text: str, on_meta: bool
) -> None:
    """Every tensor's shape and dtype is compared before any is read; of two components the second changes neither."""
    models = [make_model(device, torch.bfloat16) for _ in range(2)]
    with ltx.optimize(Pipeline(transformer=models[0], transformer_2=models[1]), precision="fp8") as report:
        report.save_weights(tmp_path)
        report.save_weights(tmp_path)  # over itself
    change(tmp_path / "transformer_2" / FILE, **{name: tensor})
    others = [empty_like(model) for model in models] if on_meta else models
    before = [{key: (id(t), t._version) for key, t in model.state_dict(keep_vars=True).items()} for model in others]
    pipeline = Pipeline(transformer=others[0], transformer_2=others[1])
    with pytest.raises(ValueError, match=rf"^weights: {name}: {text} in ") as caught:
        ltx.optimize(pipeline, precision="fp8", weights=tmp_path)
    assert "\n" not in str(caught.value)
    after = [{key: (id(t), t._version) for key, t in model.state_dict(keep_vars=True).items()} for model in others]
    assert after == before and [patched(model) for model in others] == [[], []]


def test_a_held_weight_has_its_own_dtype(ltx: ModuleType, device: str, inputs: dict[str, Any], tmp_path: Path) -> None:
    """A model whose parameters hold fp8 values, stock weights on the host, loads a file with fewer layers in fp8."""
    model = make_model(device, torch.bfloat16)
    ltx.optimize(model, precision="fp8", skip=["*.attn*"]).save_weights(tmp_path)
    want = model(**inputs)[0]
    ltx.optimize(model, precision="fp8", skip=[], stock_weights="cpu")
    ltx.optimize(model, precision="fp8", weights=tmp_path)
    assert torch.equal(model(**inputs)[0], want)


@pytest.mark.host
def test_a_file_that_cannot_be_read_to_its_end(
    ltx: ModuleType, device: str, inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is read before anything is put in its place, so that the model keeps its own weights."""
    model, other = make_model(device, torch.bfloat16), make_model(device, torch.bfloat16)
    other.proj_out.weight.mul_(0.5)
    stock = other(**inputs)[0]
    ltx.optimize(model, precision="fp8").save_weights(tmp_path)
    stop, read = f"transformer_blocks.{LAYERS - 1}.ff.net.2.bias", ltx.integrations.linear.fp8_files._read

    def interrupted(file: Any, slot: Any) -> Tensor:
        if slot.name == stop:
            raise KeyboardInterrupt
        return read(file, slot)

    monkeypatch.setattr(ltx.integrations.linear.fp8_files, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ltx.optimize(other, precision="fp8", weights=tmp_path)
    assert patched(other) == [] and list(other.named_buffers()) == []
    assert torch.equal(other(**inputs)[0], stock)
    monkeypatch.undo()
    ltx.optimize(other, precision="fp8", weights=tmp_path)
    assert torch.equal(other(**inputs)[0], model(**inputs)[0])


@pytest.mark.host
def test_options(ltx: ModuleType, device: str, tmp_path: Path) -> None:
    model = make_model(device, torch.bfloat16)
    with ltx.optimize(model, precision="fp8") as report:
        report.save_weights(tmp_path)
    for options, error, text in (
        ({"weights": tmp_path}, ValueError, 'skip, stock_weights and weights: expected precision "fp8"'),
        ({"precision": "fp8", "weights": tmp_path, "skip": []}, ValueError, "weights: expected no skip with it"),
        (
            {"precision": "fp8", "weights": tmp_path, "stock_weights": "beside"},
            ValueError,
            "weights: expected no stock_w",
        ),
        ({"precision": "fp8", "weights": 3}, TypeError, "weights: expected a path, or a path for each component, got"),
    ):
        with pytest.raises(error, match=text):
            ltx.optimize(model, **options)
    assert patched(model) == []


@pytest.mark.host
def test_what_cannot_be_saved(ltx: ModuleType, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(device, torch.bfloat16)
    with pytest.raises(RuntimeError, match='save_weights: expected a model with precision "fp8", got'):
        ltx.optimize(model).save_weights(tmp_path)
    report = ltx.optimize(model, precision="fp8")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="expected the package safetensors"):
        report.save_weights(tmp_path)
    monkeypatch.undo()
    pytest.importorskip("test_fp8_lora").add(model)
    with pytest.raises(RuntimeError, match="save_weights: expected a model without adapters, got"):
        report.save_weights(tmp_path)
    model.unload_lora()
    with pytest.raises(TypeError, match=r"^folder: expected a folder, got None$"):
        report.save_weights(None)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("a file")
    for name in ("file", "file/below/it"):
        with pytest.raises(ValueError, match=r"^folder: expected a folder, got the file .*file$"):
            report.save_weights(tmp_path / name)
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match=r"^save_weights: expected a model, got one that is gone$"):
        report.save_weights(tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["a file"]


@pytest.mark.host
@pytest.mark.parametrize("fault", ["adapters", "file", "disk"])
def test_all_or_nothing_is_saved(
    ltx: ModuleType, device: str, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the second of two components cannot be written, earlier files of both stay as they are."""
    pipeline = Pipeline(
        transformer=make_model(device, torch.bfloat16), transformer_2=make_model(device, torch.bfloat16)
    )
    report = ltx.optimize(pipeline, precision="fp8")
    report.save_weights(tmp_path)
    if fault == "file":
        for path in (tmp_path / "transformer_2").iterdir():
            path.unlink()
        (tmp_path / "transformer_2").rmdir()
        (tmp_path / "transformer_2").write_text("a file")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    ltx.optimize(pipeline, precision="fp8", skip=["*.attn*"])
    if fault == "adapters":
        pytest.importorskip("test_fp8_lora").add(pipeline.components["transformer_2"])
    elif fault == "disk":
        write = safetensors.save_file

        def full(tensors: dict[str, Tensor], path: Path, **options: Any) -> None:
            write(tensors, path, **options)
            if "transformer_2" in path.parts:
                raise OSError("no space left on device")

        monkeypatch.setattr(safetensors, "save_file", full)
    error = {"adapters": RuntimeError, "file": ValueError, "disk": OSError}[fault]
    with pytest.raises(error, match=r"without adapters|got the file|no space left"):
        report.save_weights(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["transformer", "transformer_2"]


@pytest.mark.host
def test_stock_files_stay_stock(ltx: ModuleType, device: str, inputs: dict[str, Any], tmp_path: Path) -> None:
    """``save_pretrained`` of an optimized model writes what diffusers reads: the stock weights, with their bits."""
    model = make_model(device, torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for stock_weights in ("beside", "cpu"):
        ltx.optimize(model, precision="fp8", stock_weights=stock_weights)
        model.save_pretrained(tmp_path)
        found = safetensors.load_file(tmp_path / "diffusion_pytorch_model.safetensors", device=device)
        assert found.keys() == before.keys()
        assert all(torch.equal(found[name], before[name]) for name in before)
        assert json.loads((tmp_path / "config.json").read_text())["_class_name"] == type(model).__name__


def test_layers_that_share_a_weight(ltx: ModuleType, device: str, inputs: dict[str, Any], tmp_path: Path) -> None:
    """Two layers in fp8 may share one. A module that is not in fp8 may not: it would read the fp8 values."""

    def shared(inside: bool) -> nn.Module:
        model = make_model(device, torch.bfloat16)
        first = model.transformer_blocks[0].attn1.to_q
        if inside:
            model.transformer_blocks[1].attn1.to_q.weight = first.weight
        else:
            model.extra = nn.Linear(64, 64, dtype=torch.bfloat16, device=device)
            model.extra.weight = first.weight
        return model

    model = shared(True)
    report = ltx.optimize(model, precision="fp8")
    expected = model(**inputs)[0]
    report.save_weights(tmp_path)
    loaded = shared(True)
    ltx.optimize(loaded, precision="fp8", weights=tmp_path)
    assert torch.equal(loaded(**inputs)[0], expected)
    ltx.optimize(shared(False), precision="fp8").save_weights(tmp_path)
    outside = shared(False)
    before = outside.extra.weight.clone()
    with pytest.raises(ValueError, match=r"to_q\.weight: expected .*, but extra\.weight is it, too"):
        ltx.optimize(outside, precision="fp8", weights=tmp_path)
    assert torch.equal(outside.extra.weight, before)


@pytest.mark.host
def test_loaded_tensors_are_no_views_of_the_file(ltx: ModuleType, device: str, tmp_path: Path) -> None:
    ltx.optimize(make_model(device, torch.bfloat16), precision="fp8").save_weights(tmp_path)
    model = make_model(device, torch.bfloat16)
    ltx.optimize(model, precision="fp8", weights=tmp_path)
    kept = {name: parameter.clone() for name, parameter in model.named_parameters()}
    (file,) = tmp_path.glob("*.safetensors")
    with file.open("r+b") as opened:
        start = 8 + int.from_bytes(opened.read(8), "little")
        opened.seek(start)
        opened.write(b"\x11" * (file.stat().st_size - start))
    assert all(torch.equal(parameter, kept[name]) for name, parameter in model.named_parameters())
