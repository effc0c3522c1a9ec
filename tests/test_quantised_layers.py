"""Linear layers that other libraries have quantised: they run as they are, and the ops of their blocks around them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers")
from helpers.checkpoints import in_original_names
from test_integration import ATTENTION, BLOCK, LAYERS, distance, make_inputs, make_model, patched

pytestmark = pytest.mark.usefixtures("no_grad")

PREFIX = "model.diffusion_model."


def by_gguf(model: nn.Module, device: str, folder: Path) -> nn.Module:
    """A GGUF file in 8 bits with the authors' names, as diffusers loads it."""
    gguf = pytest.importorskip("gguf", reason="NOT RUN: the package gguf is not installed")
    from diffusers import GGUFQuantizationConfig

    writer, kind = gguf.GGUFWriter(folder / "model.gguf", "ltxv"), gguf.GGMLQuantizationType.Q8_0
    for name, tensor in in_original_names("ltx", model.state_dict()).items():
        values = tensor.float().cpu().numpy()
        if "transformer_blocks" in name and values.ndim == 2 and values.shape[1] % 32 == 0 and "table" not in name:
            writer.add_tensor(PREFIX + name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(PREFIX + name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.save_config(folder)
    config = GGUFQuantizationConfig(compute_dtype=torch.bfloat16)
    options = {"config": str(folder), "quantization_config": config, "torch_dtype": torch.bfloat16}
    return type(model).from_single_file(str(folder / "model.gguf"), **options).to(device)


def by_torchao(model: nn.Module, device: str, folder: Path) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization", reason="NOT RUN: the package torchao is not installed")
    quantization.quantize_(model.transformer_blocks, quantization.Int8WeightOnlyConfig())
    return model


def by_quanto(model: nn.Module, device: str, folder: Path) -> nn.Module:
    quanto = pytest.importorskip("optimum.quanto", reason="NOT RUN: the package optimum-quanto is not installed")
    quanto.quantize(model.transformer_blocks, weights=quanto.qint8)
    quanto.freeze(model.transformer_blocks)
    return model


def by_bitsandbytes(model: nn.Module, device: str, folder: Path) -> nn.Module:
    """Layers in 4 bits, put in as diffusers does; its own loading demands a GPU."""
    library = pytest.importorskip("bitsandbytes", reason="NOT RUN: the package bitsandbytes is not installed")
    for block in model.transformer_blocks:
        for name, linear in [(n, m) for n, m in block.named_modules() if type(m) is nn.Linear]:
            options = {"compute_dtype": torch.bfloat16, "quant_type": "nf4", "device": "meta"}
            made = library.nn.Linear4bit(linear.in_features, linear.out_features, linear.bias is not None, **options)
            made.weight = library.nn.Params4bit(linear.weight.data.cpu(), requires_grad=False, quant_type="nf4")
            made.bias = linear.bias
            parent, _, child = name.rpartition(".")
            setattr(block.get_submodule(parent), child, made.to(device))
    return model


LIBRARIES = {"gguf": by_gguf, "torchao": by_torchao, "quanto": by_quanto, "bitsandbytes": by_bitsandbytes}


@pytest.mark.parametrize("quantise", LIBRARIES.values(), ids=LIBRARIES)
def test_blocks_run_around_them(
    ltx: ModuleType, device: str, tmp_path: Path, quantise: Callable[[nn.Module, str, Path], nn.Module]
) -> None:
    """The quantised model's result, by fused blocks; the report says which layers are called one by one."""
    bare = make_model(device, torch.bfloat16)
    inputs: dict[str, Any] = make_inputs(device, torch.bfloat16)
    in_bf16 = bare(**inputs)[0]
    model = quantise(bare, device, tmp_path).eval().requires_grad_(False)
    stock = model(**inputs)[0]
    assert distance(stock, in_bf16) > 1e-3  # its layers are quantised
    report = ltx.optimize(model)
    for _ in range(2):
        assert distance(model(**inputs)[0], stock) < 0.02
    calls = {site.class_name.rpartition(".")[2]: site.calls for site in report.sites}
    assert calls[BLOCK.rpartition(".")[2]] == 2 * LAYERS and calls[ATTENTION.rpartition(".")[2]] == 4 * LAYERS
    assert report.fallbacks == {}
    text = str(report)
    assert f"not packed, {2 * LAYERS} attentions: to_q, to_k or to_v" in text and "one by one" in text
    # fp8 takes none of them, and says why.
    in_fp8 = ltx.optimize(model, precision="fp8")
    assert "torch.Linear" not in in_fp8.replaced
    assert {name.split(".", 2)[2] for name in in_fp8.left_alone} >= {"attn1.to_q", "ff.net.2"}
    assert distance(model(**inputs)[0], stock) < 0.02
    ltx.restore(model)
    assert patched(model) == [] and torch.equal(model(**inputs)[0], stock)
