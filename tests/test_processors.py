"""Attention processors that are asked for: what the ops do not compute runs stock, and the report says so."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers")
from diffusers.models import attention_processor
from diffusers.models.transformers import transformer_flux
from families import families, randn
from test_families import CLOSE, cast, distance, make, run

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")

FAMILIES = families()


def set_processors(model: nn.Module, maker: Any, blocks: int = 2) -> None:
    torch.manual_seed(0)
    for block in list(model.transformer_blocks)[:blocks]:
        processor = maker()
        block.attn.set_processor(processor.to(model.device) if isinstance(processor, nn.Module) else processor)


def flux_ip_adapter(model: nn.Module) -> None:
    set_processors(model, lambda: transformer_flux.FluxIPAdapterAttnProcessor(32, 32, num_tokens=(3,)))


def sd3_ip_adapter(model: nn.Module) -> None:
    # Of all blocks: the stock processors know none of the arguments, and warn.
    set_processors(model, lambda: attention_processor.SD3IPAdapterJointAttnProcessor2_0(32, 32, 16, 32, 0.5), 3)


def perturbed(model: nn.Module) -> None:
    set_processors(model, attention_processor.PAGJointAttnProcessor2_0)


IP_FLUX = {"joint_attention_kwargs": {"ip_hidden_states": [randn(2, 3, 32)]}}
IP_SD3 = {"joint_attention_kwargs": {"ip_hidden_states": randn(2, 3, 32), "temb": randn(2, 32, seed=2)}}
CASES = [
    ("flux", flux_ip_adapter, IP_FLUX, "FluxIPAdapterAttnProcessor"),
    ("chroma", flux_ip_adapter, IP_FLUX, "FluxIPAdapterAttnProcessor"),
    ("sd3", sd3_ip_adapter, IP_SD3, "SD3IPAdapterJointAttnProcessor2_0"),
    ("sd3", perturbed, {}, "PAGJointAttnProcessor2_0"),
]


@pytest.mark.host
@pytest.mark.parametrize("order", ["processor first", "optimize first"])
@pytest.mark.parametrize(
    ("name", "prepare", "more", "processor"), CASES, ids=[f"{case[0]}-{case[3]}" for case in CASES]
)
def test_other_processors(
    ltx: ModuleType, device: str, name: str, prepare: Any, more: dict[str, Any], processor: str, order: str
) -> None:
    model = make(FAMILIES[name], device)
    inputs = cast({**FAMILIES[name].inputs(2), **more}, device, torch.float32)
    if order == "processor first":
        prepare(model)
    report = ltx.optimize(model)
    if order == "optimize first":
        prepare(model)
    ours = run(model, inputs)
    told = [reason for reasons in report.fallbacks.values() for reason in reasons] + list(report.left_alone.values())
    assert any(processor in reason or "arguments ip_hidden_states" in reason for reason in told)
    ltx.restore(model)
    assert distance(ours, run(model, inputs)) < CLOSE


# Families that exchange the processor for a class of its own, and how its name begins.
PROCESSORS_CHANGE = {"sd3": "FusedJoint", "cogvideox-5b": "FusedCogVideoX", "auraflow": "FusedAuraFlow"}


@pytest.mark.parametrize("order", ["fused first", "optimize first"])
@pytest.mark.parametrize("name", ["flux", "flux2", "wan-t2v", "wan-i2v", "qwenimage", *PROCESSORS_CHANGE])
def test_fused_projections(ltx: ModuleType, device: str, name: str, order: str) -> None:
    """FLUX, FLUX.2 and Wan call them; the others' processors change or, as Qwen-Image's, know none."""
    model = make(FAMILIES[name], device)
    inputs = cast(FAMILIES[name].inputs(1), device, torch.float32)
    stock = run(model, inputs)
    if order == "fused first":
        model.fuse_qkv_projections()
    report = ltx.optimize(model)
    if order == "optimize first":
        model.fuse_qkv_projections()
    assert distance(run(model, inputs), stock) < CLOSE
    told = [reason for reasons in report.fallbacks.values() for reason in reasons] + list(report.left_alone.values())
    fused = [reason for reason in told if ".Fused" in reason]
    assert all(PROCESSORS_CHANGE.get(name, "no class") in reason for reason in fused)
    assert bool(fused) == (name in PROCESSORS_CHANGE)
    if name in ("flux", "flux2", "wan-t2v", "wan-i2v"):
        assert report.fallbacks == report.left_alone == {} and "not packed" not in str(report)
        single = [m.to_v.weight for m in model.modules() if vars(m).get("fused_projections")]
        kept = [weight.clone() for weight in single]
        for weight in single:
            weight.zero_()
        assert single and distance(run(model, inputs), stock) < CLOSE  # they are not read
        for weight, values in zip(single, kept):
            weight.copy_(values)
    ltx.restore(model)
    assert distance(run(model, inputs), stock) < CLOSE


@pytest.mark.parametrize("name", ["flux", "flux2", "wan-t2v", "wan-i2v"])
def test_fused_projections_are_unfused(ltx: ModuleType, device: str, name: str) -> None:
    """Calls go on with the single layers, and stock gets its bits back."""
    model = make(FAMILIES[name], device, torch.bfloat16)
    inputs = cast(FAMILIES[name].inputs(1), device, torch.bfloat16)
    stock = run(model, inputs)
    report = ltx.optimize(model)
    ours = run(model, inputs)
    model.fuse_qkv_projections()
    assert distance(run(model, inputs), ours) < 1e-2
    model.unfuse_qkv_projections()
    assert all(torch.equal(a, b) for a, b in zip(run(model, inputs), ours))
    assert report.fallbacks == {}
    ltx.restore(model)
    assert all(torch.equal(a, b) for a, b in zip(run(model, inputs), stock))


@pytest.mark.parametrize(
    "name", ["flux", *(pytest.param(n, marks=pytest.mark.slow) for n in ("flux2", "wan-t2v", "wan-i2v"))]
)
def test_fused_projections_under_compile(ltx: ModuleType, device: str, name: str) -> None:
    model = make(FAMILIES[name], device)
    inputs = cast(FAMILIES[name].inputs(1), device, torch.float32)
    stock = run(model, inputs)
    model.fuse_qkv_projections()
    report = ltx.optimize(model)
    assert distance(run(torch.compile(model, fullgraph=True, backend="eager"), inputs), stock) < CLOSE
    assert not any("Attention" in name or "Block" in name for name in report.fallbacks)


@pytest.mark.parametrize("name", ["flux", "flux2", "wan-t2v", "wan-i2v"])
def test_fused_projections_in_fp8(ltx: ModuleType, device: str, name: str, request: pytest.FixtureRequest) -> None:
    """One fp8 weight for the fused layer, with the bits of the single ones; fused later, it stays in bf16."""
    request.getfixturevalue("fp8_device")
    inputs = cast(FAMILIES[name].inputs(1), device, torch.bfloat16)
    model = make(FAMILIES[name], device, torch.bfloat16)
    report = ltx.optimize(model, precision="fp8")
    apart = run(model, inputs)
    model.fuse_qkv_projections()
    assert distance(run(model, inputs), apart) < 0.1
    assert "to_qkv in its own precision: it was fused after optimize" in str(report)
    model = make(FAMILIES[name], device, torch.bfloat16)
    model.fuse_qkv_projections()
    report = ltx.optimize(model, precision="fp8")
    fused = [m for n, m in model.named_modules() if n.endswith(("attn.to_qkv", "attn1.to_qkv"))]
    assert fused and all("ltx_fp8_scales" in m._buffers for m in fused)
    assert all(torch.equal(a, b) for a, b in zip(run(model, inputs), apart))
    assert report.fallbacks == {}
