"""Checkpoints in scaled fp8 of other programs: every spelling means its values times its scales, or is refused."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("diffusers")
pytest.importorskip("safetensors")
accelerate = pytest.importorskip("accelerate")
from diffusers.loaders import single_file_model  # noqa: E402
from helpers import checkpoints  # noqa: E402
from helpers.checkpoints import PREFIX, SPELLINGS, comfy_quant, in_original_names, scaled, stock_of, write  # noqa: E402
from test_families import FAMILIES, cast, make, run  # noqa: E402
from test_integration import distance, make_inputs, make_model, patched  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_grad", "fp8_device")

KNOWN = single_file_model.SINGLE_FILE_LOADABLE_CLASSES
TO_Q = "transformer_blocks.0.attn1.to_q"


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers' converters for FLUX.1, Chroma and HunyuanVideo, for models of 32 columns instead of 3072."""
    for name in ("FluxTransformer2DModel", "ChromaTransformer2DModel", "HunyuanVideoTransformer3DModel"):
        entry = KNOWN[name]
        converter = checkpoints.with_constant(entry["checkpoint_mapping_fn"], 3072, 32)
        monkeypatch.setitem(KNOWN, name, {**entry, "checkpoint_mapping_fn": converter})


def convert(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """diffusers' own conversion, of tensors with data."""
    converter = KNOWN[type(model).__name__]["checkpoint_mapping_fn"]
    return dict(converter(config=dict(model.config), checkpoint=dict(state)))


def empty_like(model: nn.Module) -> nn.Module:
    with accelerate.init_empty_weights():
        return type(model).from_config(model.config).eval()


def quantised_layers(ltx: ModuleType, model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    fp8, weights = ltx.integrations.linear.fp8, ltx.integrations.linear.fp8_weights
    named = model.named_modules()
    return {name: weights.quantised_weight(m) for name, m in named if type(m) is nn.Linear and fp8.in_fp8(m)}


def assert_means(ltx: ModuleType, model: nn.Module, meant: dict[str, Tensor]) -> set[str]:
    """Every tensor of a model has the bits that a file means; returns the names of the layers in fp8."""
    layers = quantised_layers(ltx, model)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    stock = stock_of(model, meant)
    for name, want in meant.items():
        layer = name[: -len(".weight")]
        if name.endswith(".weight") and layer in layers:
            values, scales = layers[layer]
            assert values.dtype == torch.float8_e4m3fn and torch.equal(
                (values.float() * scales[:, None]).cpu(), want.cpu()
            ), name
        else:
            assert state[name].dtype == stock[name].dtype, (name, state[name].dtype)
            assert torch.equal(state[name].cpu(), stock[name].cpu()), name
    return set(layers)


@pytest.fixture
def ltx_model() -> nn.Module:
    return make_model("cpu", torch.bfloat16)


def load(ltx: ModuleType, model: nn.Module, device: str, path: Path, **options: Any) -> tuple[nn.Module, Any]:
    loaded = empty_like(model)
    with torch.device(device):
        return loaded, ltx.optimize(loaded, precision="fp8", weights=path, **options)


@pytest.mark.parametrize("names", ["diffusers", "original"])
@pytest.mark.parametrize("per", ["tensor", "row"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(
    ltx: ModuleType, device: str, ltx_model: nn.Module, tmp_path: Path, spelling: str, per: str, names: str
) -> None:
    """Layers of the blocks keep the file's bits; all others are multiplied by their scales."""
    state = ltx_model.state_dict()
    if names == "original":
        state = in_original_names("ltx", state)
        assert convert(ltx_model, state).keys() == ltx_model.state_dict().keys()
    file, meant, metadata = scaled(state, spelling, per)
    if names == "original":
        file = {PREFIX + name: tensor for name, tensor in file.items()}
        file["vae.decoder.weight"] = torch.zeros(3)
        meant = convert(ltx_model, meant)
    loaded, report = load(ltx, ltx_model, device, write(tmp_path / "model.safetensors", file, metadata))
    layers = assert_means(ltx, loaded, meant)
    assert len(layers) == report.replaced["torch.Linear"] == sum(".attn" in n or ".ff." in n for n in layers) == 20
    inputs = make_inputs(device, torch.bfloat16)
    stock = empty_like(ltx_model)
    stock.load_state_dict(stock_of(stock, meant), assign=True)
    assert 0 < distance(loaded(**inputs)[0], stock.to(device)(**inputs)[0]) < 0.05
    assert report.fallbacks == {}
    notes = "\n".join(report.notes)
    count = sum(name.endswith(("input_scale", "scale_input")) for name in file)
    assert (f"weights: {count} static scales of inputs not used" in notes) == (count > 0)
    assert ("1 tensors of other models left in the file (vae.decoder.weight)" in notes) == (names == "original")
    assert "fp8 layers multiplied by their scales, because they stay in bf16 (" in notes
    assert "weights: 6 layers in fp8 because the file has them so" in notes  # attn2: key, value, output of two blocks


def test_a_tokenizer_in_the_file(ltx: ModuleType, device: str, ltx_model: nn.Module, tmp_path: Path) -> None:
    """ComfyUI's text encoders have one, in bytes."""
    file, meant, metadata = scaled(ltx_model.state_dict(), "comfy", "tensor")
    file["spiece_model"] = torch.arange(100, dtype=torch.uint8)
    loaded, report = load(ltx, ltx_model, device, write(tmp_path / "model.safetensors", file, metadata))
    assert_means(ltx, loaded, meant)
    assert "1 tensors of other models left in the file (spiece_model)" in "\n".join(report.notes)


@pytest.mark.parametrize("per", ["tensor", "row"])
@pytest.mark.parametrize("spelling", ["comfy old", "comfy", "fp8r"])
@pytest.mark.parametrize("name", checkpoints.ORIGINAL_NAMES)
def test_original_names(ltx: ModuleType, device: str, tmp_path: Path, name: str, spelling: str, per: str) -> None:
    """Of checkpoints with joined, swapped and renamed layers: what diffusers makes of the values times the scales."""
    model = make(FAMILIES[name], "cpu", torch.bfloat16)
    state = in_original_names(name, model.state_dict())
    again = convert(model, state)
    assert again.keys() == model.state_dict().keys()
    assert all(torch.equal(again[key], tensor) for key, tensor in model.state_dict().items())
    file, meant, metadata = scaled(state, spelling, per)
    path = write(tmp_path / "model.safetensors", {PREFIX + key: tensor for key, tensor in file.items()}, metadata)
    loaded, report = load(ltx, model, device, path)
    assert_means(ltx, loaded, convert(model, meant))
    assert report.replaced["torch.Linear"] == len(quantised_layers(ltx, loaded)) > 0
    inputs = cast(FAMILIES[name].inputs(1), device, torch.bfloat16)
    assert all(output.isfinite().all() for output in run(loaded, inputs))
    assert "torch.Linear" not in report.fallbacks


def test_a_scale_of_two_is_noticed(
    ltx: ModuleType, device: str, ltx_model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer's scale doubled by a fault: the comparison of these tests fails, and names the layer."""
    file, meant, metadata = scaled(ltx_model.state_dict(), "comfy", "row")
    path = write(tmp_path / "model.safetensors", file, metadata)
    reader = ltx.integrations.linear.scaled_weights.ScaledWeights
    stock = reader.scales

    def doubled(self: Any, name: str, start: int, stop: int) -> Tensor:
        return stock(self, name, start, stop) * (2 if name == f"{TO_Q}.weight" else 1)

    monkeypatch.setattr(reader, "scales", doubled)
    loaded, _ = load(ltx, ltx_model, device, path)
    with pytest.raises(AssertionError, match=TO_Q):
        assert_means(ltx, loaded, meant)


def test_shards(ltx: ModuleType, device: str, ltx_model: nn.Module, tmp_path: Path) -> None:
    """A weight and its scale may be in two shards; a folder with an index is the same as the index."""
    file, meant, metadata = scaled(ltx_model.state_dict(), "lightricks", "row")
    index = write(tmp_path / "model.safetensors", file, metadata, shards=3)
    for path in (index, tmp_path):
        assert_means(ltx, load(ltx, ltx_model, device, path)[0], meant)
    found = json.loads(index.read_text())
    for change, text in (
        ({f"{TO_Q}.weight": "../x.safetensors"}, rf"{TO_Q}.weight: expected a file beside .*, got ../x.safetensors"),
        ({"more": "model-00001-of-00003.safetensors"}, "more: expected it in model-00001-of-00003.safetensors"),
    ):
        index.write_text(json.dumps({"weight_map": {**found["weight_map"], **change}}))
        assert_refused(ltx, ltx_model, index, f"weights: {text}")
    index.write_text("{}")
    assert_refused(ltx, ltx_model, index, "weights: expected an index with a weight_map, got")
    index.write_text(json.dumps(found))
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert_refused(ltx, ltx_model, index, "weights: expected a safetensors file, got .*00002.*, which does not exist")


def test_into_a_model_with_data(ltx: ModuleType, device: str, ltx_model: nn.Module, tmp_path: Path) -> None:
    """Its parameters stay the ones that they are, where they are."""
    file, meant, metadata = scaled(ltx_model.state_dict(), "comfy", "tensor")
    path = write(tmp_path / "model.safetensors", file, metadata)
    other = make_model(device, torch.bfloat16)
    for parameter in other.parameters():
        parameter.mul_(0.5)
    before = {name: id(parameter) for name, parameter in other.named_parameters()}
    ltx.optimize(other, precision="fp8", weights=path)
    assert_means(ltx, other, meant)
    assert {name: id(parameter) for name, parameter in other.named_parameters()} == before
    assert {p.device.type for p in other.parameters()} == {device}
    with pytest.raises(RuntimeError, match="cannot be restored"):
        ltx.restore(other)


def test_into_a_model_in_float32(ltx: ModuleType, device: str, ltx_model: nn.Module, tmp_path: Path) -> None:
    """Its calls could not run, since there are no stock weights to go back to."""
    file, _, metadata = scaled(ltx_model.state_dict(), "comfy", "tensor")
    path = write(tmp_path / "model.safetensors", file, metadata)
    model = make_model(device, torch.float32)
    with pytest.raises(ValueError, match=r"\.weight: expected a model in bfloat16, got float32: call model\.bfloat16"):
        ltx.optimize(model, precision="fp8", weights=path)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_saved_again(ltx: ModuleType, device: str, ltx_model: nn.Module, tmp_path: Path) -> None:
    """What was loaded is saved in this package's own format, and loaded from there with the same bits."""
    file, meant, metadata = scaled(ltx_model.state_dict(), "comfy old", "tensor")
    loaded, report = load(ltx, ltx_model, device, write(tmp_path / "model.safetensors", file, metadata))
    report.save_weights(tmp_path / "own")
    again, _ = load(ltx, ltx_model, device, tmp_path / "own")
    assert assert_means(ltx, again, meant) == set(quantised_layers(ltx, loaded))
    by_file, _ = load(ltx, ltx_model, device, tmp_path / "own" / "ltx_kernels_fp8.safetensors")
    assert_means(ltx, by_file, meant)


def test_e5m2(ltx: ModuleType, device: str, ltx_model: nn.Module, tmp_path: Path) -> None:
    """Multiplied in float32 and quantised again by row, which the report says; layers in bf16 lose nothing."""
    file, meant, metadata = scaled(ltx_model.state_dict(), "comfy old", "tensor", dtype=torch.float8_e5m2)
    loaded, report = load(ltx, ltx_model, device, write(tmp_path / "model.safetensors", file, metadata))
    layers = quantised_layers(ltx, loaded)
    for layer, (values, scales) in layers.items():
        want = ltx.quantize_weight(meant[f"{layer}.weight"].to(device))
        assert torch.equal(values.float(), want[0].float()) and torch.equal(scales, want[1])
        meant[f"{layer}.weight"] = (want[0].float() * want[1][:, None]).cpu()
    assert_means(ltx, loaded, meant)
    assert "weights: 20 layers in e5m2 quantised to e4m3, by row" in report.notes


def test_full_precision(ltx: ModuleType, device: str, ltx_model: nn.Module, tmp_path: Path) -> None:
    """Layers that ask for products in full precision are multiplied by their scales, unless skip=[] is given."""
    file, meant, metadata = scaled(ltx_model.state_dict(), "comfy", "row")
    file.update(comfy_quant(TO_Q, full_precision_matrix_mult=True))
    path = write(tmp_path / "model.safetensors", file, metadata)
    loaded, report = load(ltx, ltx_model, device, path)
    assert TO_Q not in assert_means(ltx, loaded, meant)
    assert (
        "weights: 1 fp8 layers multiplied by their scales, because the file asks for it (skip=[] keeps them)"
        in report.notes
    )
    loaded, report = load(ltx, ltx_model, device, path, skip=[])
    assert TO_Q in assert_means(ltx, loaded, meant) and "asks for it" not in str(report)
    loaded, _ = load(ltx, ltx_model, device, path, skip=["*.attn1.*"])
    assert not any(".attn1." in name for name in assert_means(ltx, loaded, meant))
    file, meant, metadata = scaled(ltx_model.state_dict(), "comfy old", "tensor")
    file["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    loaded, report = load(ltx, ltx_model, device, write(tmp_path / "model.safetensors", file, metadata))
    assert assert_means(ltx, loaded, meant) == set() and "because the file asks for it" in str(report)


def test_only_some_layers_in_fp8(ltx: ModuleType, device: str, ltx_model: nn.Module, tmp_path: Path) -> None:
    """The file says which layers are in fp8; norms and biases in fp8, of a plain cast, are converted."""
    file, meant, metadata = scaled(ltx_model.state_dict(), "fp8r", "row", only=lambda name: ".attn1." in name)
    loaded, report = load(ltx, ltx_model, device, write(tmp_path / "model.safetensors", file, metadata))
    assert len(assert_means(ltx, loaded, meant)) == 8 and "stay in bf16 (" not in str(report)
    cast_all = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in ltx_model.state_dict().items()}
    loaded, _ = load(ltx, ltx_model, device, write(tmp_path / "model.safetensors", cast_all))
    assert_means(ltx, loaded, {name: tensor.float() for name, tensor in cast_all.items()})


@pytest.mark.parametrize("spelling", ["comfy old", "comfy"])
def test_language_models(ltx: ModuleType, device: str, tmp_path: Path, spelling: str) -> None:
    """A model of transformers without data; its embedding and last layer are one parameter, once in the file."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).bfloat16().eval()
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    file, meant, metadata = scaled(state, spelling, "tensor", only=lambda name: "_proj" in name)
    with accelerate.init_empty_weights():
        loaded = transformers.LlamaForCausalLM(config).eval()
    loaded.tie_weights()
    loaded.model.rotary_emb.to(device)
    with torch.device(device):
        report = ltx.optimize(loaded, precision="fp8", weights=write(tmp_path / "a.safetensors", file, metadata))
    assert len(assert_means(ltx, loaded, meant)) == report.replaced["torch.Linear"] == 2 * 7
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    model.load_state_dict(stock_of(model, meant), strict=False)
    tokens = torch.arange(8, device=device)[None]
    assert 0 < distance(loaded(tokens).logits, model.to(device)(tokens).logits) < 0.05


class Pipeline:
    def __init__(self, **components: Any) -> None:
        self.components = components


def test_pipelines(ltx: ModuleType, device: str, ltx_model: nn.Module, tmp_path: Path) -> None:
    file, meant, metadata = scaled(ltx_model.state_dict(), "comfy", "row")
    path = write(tmp_path / "model.safetensors", file, metadata)
    loaded = empty_like(ltx_model)
    with torch.device(device):
        report = ltx.optimize(Pipeline(transformer=loaded), precision="fp8", weights={"transformer": path})
    assert_means(ltx, loaded, meant)
    assert "weights: 6 layers in fp8 because" in str(report)
    two = Pipeline(transformer=empty_like(ltx_model), transformer_2=empty_like(ltx_model))
    for pipeline, weights, text in (
        (two, {"transformer": path}, "expected a path for each of transformer, transformer_2, got transformer"),
        (two, path, 'expected a folder or {"transformer": FILE, "transformer_2": FILE} for a pipeline, got the file'),
        (empty_like(ltx_model), {"transformer": path}, "expected a path, as obj is no pipeline, got transformer"),
    ):
        with pytest.raises(ValueError, match=f"^weights: {text}"):
            ltx.optimize(pipeline, precision="fp8", weights=weights)
    with pytest.raises(TypeError, match=r"^weights: expected a path, or a path for each component, got "):
        ltx.optimize(two, precision="fp8", weights={"transformer": 3})


class Allocated(TorchDispatchMode):
    """The bytes of all tensors that ops make, but of views."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {a.untyped_storage()._cdata for a in torch.utils._pytree.tree_leaves(args) if isinstance(a, Tensor)}
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self.bytes += tensor.nbytes * (tensor.untyped_storage()._cdata not in given)
        return result


def test_no_copy_in_bfloat16(ltx: ModuleType, device: str, ltx_model: nn.Module, tmp_path: Path) -> None:
    """Loading allocates what the model holds then, and small change: no layer is ever there in another dtype."""
    state = in_original_names("ltx", ltx_model.state_dict())
    file, _, metadata = scaled(state, "comfy", "tensor", only=lambda name: "transformer_blocks" in name)
    path = write(tmp_path / "model.safetensors", file, metadata)
    loaded = empty_like(ltx_model)
    with torch.device(device), Allocated() as allocated:
        ltx.optimize(loaded, precision="fp8", weights=path)
    tensors = {id(t): t for t in (*loaded.parameters(), *loaded.buffers())}
    held = sum(tensor.nbytes for tensor in tensors.values())
    small = sum(tensor.nbytes for name, tensor in file.items() if not name.endswith(".weight"))
    in_bf16 = 2 * sum(values.numel() for values, _ in quantised_layers(ltx, loaded).values())
    assert held <= allocated.bytes < held + 2 * small < held + in_bf16
    plain, _, metadata = scaled(state, "comfy", "tensor")
    with torch.device(device), Allocated() as allocated:
        ltx.optimize(empty_like(ltx_model), precision="fp8", weights=write(path, plain, metadata))
    assert allocated.bytes > held + 2 * small  # layers that stay in bf16 are multiplied in float32, and counted


# ---- Codes without their scales

IN_A_BLOCK = "transformer_blocks.0.attn1.to_q: its weights look like fp8 codes without their scales"


@pytest.mark.parametrize("options", [{}, {"precision": "fp8"}], ids=str)
@pytest.mark.parametrize("per", ["tensor", "row"])
def test_codes_without_scales(
    ltx: ModuleType, device: str, ltx_model: nn.Module, tmp_path: Path, per: str, options: dict[str, Any]
) -> None:
    """What diffusers makes of a scaled file: the values in bfloat16, without a word but a warning."""
    file, _, metadata = scaled(in_original_names("ltx", ltx_model.state_dict()), "comfy old", per)
    path = write(tmp_path / "model.safetensors", file, metadata)
    ltx_model.save_config(tmp_path)
    wrong = type(ltx_model).from_single_file(str(path), config=str(tmp_path), torch_dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=f"^ltx-kernels: {IN_A_BLOCK}, so that results are wrong: load the file with"):
        report = ltx.optimize(wrong.to(device), **options)
    assert [note for note in report.notes if note.startswith(IN_A_BLOCK)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_codes_of_layerwise_casting(ltx: ModuleType, device: str, ltx_model: nn.Module, dtype: torch.dtype) -> None:
    """Weights in e4m3 that were cast, and those that need scales; scales that are powers of two."""
    model = ltx_model.to(device)
    linear = model.get_submodule(TO_Q)
    for factor, noticed in ((1, False), (300 / linear.weight.abs().max().item(), True)):
        linear.weight.data = (linear.weight.float() * factor).to(torch.float8_e4m3fn).to(dtype)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = ltx.optimize(model)
        assert [IN_A_BLOCK in str(w.message) for w in caught] == [True] * noticed
        assert (IN_A_BLOCK in str(report)) == noticed
        linear.weight.data = linear.weight.data.bfloat16()


def test_true_weights_are_no_codes(ltx: ModuleType, device: str) -> None:
    """Not random ones, also where one is 448; and not a model's own fp8 values, whose scales are there."""
    model = make_model(device, torch.bfloat16)
    model.get_submodule(TO_Q).weight.data[0, 0] = 448.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "look like" not in str(ltx.optimize(model, precision="fp8", stock_weights="cpu"))
        assert "look like" not in str(ltx.optimize(model, precision="fp8", stock_weights="free"))
        with pytest.raises(RuntimeError, match="cannot be restored"):
            ltx.optimize(model)


# ---- Refusals


def assert_refused(ltx: ModuleType, model: nn.Module, path: Path, text: str) -> None:
    """One error of one line, before anything is changed: of a model on meta and of one with data."""
    for other in (empty_like(model), make_model("cpu", torch.bfloat16)):
        state = other.state_dict(keep_vars=True)
        before = {key: (id(t), t._version) for key, t in state.items()}
        with pytest.raises((ValueError, FileNotFoundError), match=text) as caught:
            ltx.optimize(other, precision="fp8", weights=path)
        assert "\n" not in str(caught.value)
        assert {key: (id(t), t._version) for key, t in other.state_dict(keep_vars=True).items()} == before
        assert patched(other) == []


WAY_ON = 'load it with diffusers\' quantization_config, without precision="fp8"$'
VALUES = r"expected e4m3 values with one scale a tensor or a row, got "
SHAPE = (64, 64)
E4M3 = torch.float8_e4m3fn
IN_INT8 = torch.zeros(SHAPE, dtype=torch.int8)
PACKED = torch.zeros(64, 32, dtype=torch.uint8)
OTHER_FORMATS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "nvfp4": (
        {"weight": PACKED, "weight_scale": torch.ones(64, 4).to(E4M3), "weight_scale_2": torch.tensor(1.0)},
        rf"NVFP4 \({TO_Q}.weight_scale_2: \[\] of float32\)",
    ),
    "4 bits": ({"weight": PACKED}, r"4-bit values, packed \(\[64, 32\] of uint8, scales \[64\] of float32\)"),
    "mxfp8": (
        {"weight_scale": torch.zeros(64, 2, dtype=torch.uint8)},
        r"MXFP8 \(\[64, 64\] of float8_e4m3fn, scales of blocks \[64, 2\] of uint8\)",
    ),
    "int8": ({"weight": IN_INT8}, r"int8 \(\[64, 64\] of int8, scales \[64\] of float32\)"),
    "blocks": ({"weight_scale": torch.ones(1, 2)}, r"\[64, 64\] of float8_e4m3fn with scales of blocks \[1, 2\]"),
    "columns": ({"weight_scale": torch.ones(1, 64)}, r"\[64, 64\] of .* with scales of blocks \[1, 64\]"),
    "scales of int32": ({"weight_scale": torch.ones(64).int()}, r"\[64, 64\] of .*, scales \[64\] of int32"),
    "output scale": ({"output_scale": torch.tensor(1.0)}, rf"a scale of outputs \({TO_Q}.output_scale"),
    "pre_quant_scale": ({"pre_quant_scale": torch.ones(64)}, "NVFP4 or int4 with scales of inputs"),
    "torchao": ({"_weight_qdata": IN_INT8}, "a tensor of torchao"),
    "bitsandbytes": ({"weight.absmax": torch.ones(8)}, "4 bits of bitsandbytes"),
    "quanto": ({"weight._data": IN_INT8}, "a tensor of quanto"),
    "bf16 with scales": ({"weight": torch.zeros(SHAPE).bfloat16()}, r"no fp8 \(\[64, 64\] of bfloat16, scales"),
    "two spellings": ({"scale_weight": torch.ones(64)}, "two scales"),
}


@pytest.mark.host
@pytest.mark.parametrize("case", OTHER_FORMATS)
def test_other_formats(ltx: ModuleType, ltx_model: nn.Module, tmp_path: Path, case: str) -> None:
    tensors, found = OTHER_FORMATS[case]
    file, _, metadata = scaled(ltx_model.state_dict(), "fp8r", "row")
    file.update({f"{TO_Q}.{key}": tensor for key, tensor in tensors.items()})
    path = write(tmp_path / "model.safetensors", file, metadata)
    assert_refused(ltx, ltx_model, path, rf"^weights: {TO_Q}: {VALUES}{found}.*: {WAY_ON}")


DAMAGED: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "no weight": ({"weight": None}, rf"{TO_Q}.weight: expected it beside {TO_Q}.weight_scale, got nothing"),
    "no scale": (
        {"weight_scale": None},
        f"{TO_Q}.weight: expected a scale beside it, as other layers of the file have one, got nothing",
    ),
    "said but no scale": (
        {"weight_scale": None, "comfy_quant": comfy_quant("x")["x.comfy_quant"]},
        f"{TO_Q}.weight: expected a scale beside it, got nothing",
    ),
    "no bias": ({"bias": None}, rf"{TO_Q}.bias: expected \[64\], got nothing in "),
    "more": ({"more": torch.zeros(3)}, rf"{TO_Q}.more: expected nothing, got \[3\] of float32 in "),
    "shape": ({"weight": torch.zeros(64, 80).to(E4M3)}, rf"{TO_Q}.weight: expected \[64, 64\], got \[64, 80\] of "),
    "dtype": ({"bias": torch.zeros(64).int()}, rf"{TO_Q}.bias: {VALUES}\[64\] of int32, where the model has \[64\]"),
    "scale of 0": ({"weight_scale": torch.zeros(64)}, f"{TO_Q}: expected scales above 0 and finite, got 0.0 in "),
    "negative": ({"weight_scale": -torch.ones(64)}, f"{TO_Q}: expected scales above 0 and finite, got -1.0 in "),
    "infinite": ({"weight_scale": torch.tensor(torch.inf)}, f"{TO_Q}: expected scales above 0 and finite, got inf"),
    "not a number": ({"weight_scale": torch.full((64,), torch.nan)}, f"{TO_Q}: expected scales above 0 .*, got nan"),
    "description": ({"comfy_quant": torch.tensor([1], dtype=torch.uint8)}, rf"{TO_Q}.comfy_quant: expected JSON, got"),
    "long description": (
        {"comfy_quant": torch.zeros(1 << 17, dtype=torch.uint8)},
        rf"{TO_Q}.comfy_quant: expected JSON, got .*131072\] of uint8",
    ),
}


@pytest.mark.host
@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_layers(ltx: ModuleType, ltx_model: nn.Module, tmp_path: Path, case: str) -> None:
    tensors, text = DAMAGED[case]
    file, _, metadata = scaled(ltx_model.state_dict(), "fp8r", "row")
    changed = {**file, **{f"{TO_Q}.{key}": tensor for key, tensor in tensors.items()}}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    assert_refused(ltx, ltx_model, write(tmp_path / "model.safetensors", kept, metadata), f"^weights: {text}")


@pytest.mark.host
@pytest.mark.parametrize("transport", ["tensor", "metadata"])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "int8_tensorwise", "convrot_w4a4", None])
def test_formats_by_name(
    ltx: ModuleType, ltx_model: nn.Module, tmp_path: Path, transport: str, name: str | None
) -> None:
    """ComfyUI's description decides, whatever the tensors look like."""
    file, _, metadata = scaled(ltx_model.state_dict(), "fp8r", "row")
    if transport == "tensor":
        file.update(comfy_quant(TO_Q, format=name))
    else:
        metadata["_quantization_metadata"] = json.dumps({"layers": {TO_Q: {"format": name}}})
    path = write(tmp_path / "model.safetensors", file, metadata)
    text = rf"^weights: {TO_Q}: {VALUES}the format {name!r} \(\[64, 64\] of float8_e4m3fn\): {WAY_ON}"
    assert_refused(ltx, ltx_model, path, text)


@pytest.mark.host
def test_transposed(ltx: ModuleType, ltx_model: nn.Module, tmp_path: Path) -> None:
    name = "transformer_blocks.0.ff.net.0.proj"
    file, _, metadata = scaled(ltx_model.state_dict(), "comfy old", "tensor")
    file[f"{name}.weight"] = file[f"{name}.weight"].float().t().to(E4M3)
    path = write(tmp_path / "model.safetensors", file, metadata)
    text = rf"^weights: {name}.weight: expected \[256, 64\], got \[64, 256\] of float8_e4m3fn, which is the transposed"
    assert_refused(ltx, ltx_model, path, text)


@pytest.mark.host
def test_other_models(ltx: ModuleType, ltx_model: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for name, text in (
        ("flux", "weights: caption_projection.linear_1.bias: expected nothing|weights: .*: expected nothing, got"),
        ("wan-t2v", "weights: .*: expected nothing, got"),
    ):
        state = in_original_names(name, make(FAMILIES[name], "cpu", torch.bfloat16).state_dict())
        file, _, metadata = scaled(state, "comfy", "tensor")
        assert_refused(ltx, ltx_model, write(path, file, metadata), f"^{text}")
    file, _, _ = scaled(ltx_model.state_dict(), "comfy", "tensor", only=lambda name: False)
    assert_refused(
        ltx, ltx_model, write(path, file), "^weights: expected layers in fp8, got none in .*: load it as its"
    )
    flux = make(FAMILIES["flux"], "cpu", torch.bfloat16)
    file, _, metadata = scaled(ltx_model.state_dict(), "comfy", "tensor")
    with pytest.raises(ValueError, match=r"^weights: .* of .*FluxTransformer2DModel, got .* failed with "):
        ltx.optimize(empty_like(flux), precision="fp8", weights=write(path, {"a.weight": torch.zeros(2)}))


def truncated(file: bytes) -> bytes:
    return file[:-5]


def longer(file: bytes) -> bytes:
    return file + b"more"


def huge_header(file: bytes) -> bytes:
    return (1 << 40).to_bytes(8, "little") + file[8:]


def other_header(file: bytes) -> bytes:
    return file.replace(b'"shape":[64,64]', b'"shape":[64,65]', 1)


def pickled(file: bytes) -> bytes:
    return pickle.dumps({"a": 1})


def zipped(file: bytes) -> bytes:
    return b"PK\x03\x04" + bytes(100)


def gguf(file: bytes) -> bytes:
    return b"GGUF" + bytes(100)


@pytest.mark.host
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (truncated, "incomplete metadata, file not fully covered"),
        (longer, "incomplete metadata, file not fully covered"),
        (huge_header, "header too large"),
        (other_header, ""),
        (pickled, "a pickle, which can run code: write its tensors with safetensors.torch.save_file$"),
        (zipped, "a pickle, which can run code"),
        (gguf, "a GGUF file: load it with diffusers' GGUFQuantizationConfig, and optimize without"),
        (lambda file: b"", "header too small"),
    ],
    ids=["truncated", "longer", "huge header", "other header", "pickled", "zipped", "gguf", "empty"],
)
def test_damaged_files(
    ltx: ModuleType, ltx_model: nn.Module, tmp_path: Path, damage: Callable[[bytes], bytes], text: str
) -> None:
    file, _, metadata = scaled(ltx_model.state_dict(), "comfy", "tensor")
    path = write(tmp_path / "model.safetensors", file, metadata)
    path.write_bytes(damage(path.read_bytes()))
    assert_refused(ltx, ltx_model, path, f"^weights: expected a safetensors file, got {path}: .*{text}")


@pytest.mark.host
def test_paths(ltx: ModuleType, ltx_model: nn.Module, tmp_path: Path) -> None:
    assert_refused(ltx, ltx_model, tmp_path, "^weights: expected a folder with ltx_kernels_fp8.safetensors that")
    assert_refused(
        ltx, ltx_model, tmp_path / "none.safetensors", r"^weights: expected a folder .*, which does not exist$"
    )
    for name in ("a", "b"):
        write(tmp_path / f"{name}.safetensors", {"x": torch.zeros(1)})
    assert_refused(ltx, ltx_model, tmp_path, r"^weights: .*, got .* with a.safetensors, b.safetensors$")
