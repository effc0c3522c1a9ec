"""`optimize` on diffusers' LTX-Video: parity with the stock model, and everything that goes on around a model.

The model is small and random, of diffusers' own classes. Most tests compare three forwards: stock, optimized, and the
stock model in float32.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import itertools
import pickle
import types
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import helpers.attention
import pytest
import torch
from helpers.dispatch import PackageOps
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel

diffusers = pytest.importorskip("diffusers")
from diffusers import LTXVideoTransformer3DModel  # noqa: E402
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_grad")

LAYERS = 2
TEXT = 8
GRID = 2, 3, 4  # latent frames, height, width
BLOCK, ATTENTION = "diffusers.LTXVideoTransformerBlock", "diffusers.LTXAttention"
FUSED_BY_COMPILE = {
    "torch.LayerNorm": {"torch.compile fuses it with what follows (compiled)": 1}
}  # the model's last norm
HALF = [torch.bfloat16, torch.float16]


def make_model(device: str, dtype: torch.dtype = torch.float32, **config: Any) -> LTXVideoTransformer3DModel:
    torch.manual_seed(0)
    shape = {"num_layers": LAYERS, "num_attention_heads": 4, "attention_head_dim": 16, "cross_attention_dim": 64}
    model = LTXVideoTransformer3DModel(
        **{**shape, "in_channels": 8, "out_channels": 8, "caption_channels": 48, **config}
    )
    for name, parameter in model.named_parameters():
        if name.endswith(("norm_q.weight", "norm_k.weight")):
            nn.init.normal_(parameter, 1.0, 0.2)  # as constructed they are all one
        if name.endswith("bias"):
            nn.init.normal_(parameter, 0.0, 0.1)
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def make_inputs(
    device: str,
    dtype: torch.dtype = torch.float32,
    grid: tuple[int, int, int] = GRID,
    per_token: bool = False,
    **more: Any,
) -> dict[str, Any]:
    torch.manual_seed(1)
    tokens = grid[0] * grid[1] * grid[2]
    mask = torch.ones(2, TEXT, dtype=torch.int64)
    mask[0, 3:] = 0
    timestep = torch.rand(2, tokens) * 1000 if per_token else torch.tensor([500.0, 300.0])
    tensors = {
        "hidden_states": torch.randn(2, tokens, 8).to(dtype),
        "encoder_hidden_states": torch.randn(2, TEXT, 48).to(dtype),
        "timestep": timestep,
        "encoder_attention_mask": mask,
    }
    sizes = dict(zip(("num_frames", "height", "width"), grid))
    scale = {"rope_interpolation_scale": (8 / 25, 32, 32)}
    return {**{k: v.to(device) for k, v in tensors.items()}, **sizes, **scale, "return_dict": False, **more}


def coordinates(device: str) -> Tensor:
    torch.manual_seed(2)
    return (torch.rand(2, 3, GRID[0] * GRID[1] * GRID[2]) * 500).to(device)


def exactly(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The stock forward in float32 of the same weights and inputs."""
    model = copy.deepcopy(model).float()
    return model(**{k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()})[
        0
    ]


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def assert_close(got: Tensor, stock: Tensor) -> None:
    """Not further from stock than the order of sums in float32, or a few roundings to half precision, can take it."""
    assert got.dtype == stock.dtype and got.shape == stock.shape
    limit = 1e-5 if got.dtype == torch.float32 else 2 * torch.finfo(got.dtype).eps
    assert distance(got, stock) < limit


def patched(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if "_ltx_kernels" in m.__dict__ or "forward" in m.__dict__]


# ---- Parity


@pytest.mark.parametrize("per_token", [False, True], ids=["timestep", "timestep per token"])
@pytest.mark.parametrize("coords", [False, True], ids=["grid", "coordinates"])
@pytest.mark.parametrize("rounding", ["fp32", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_forward(
    ltx: ModuleType, device: str, dtype: torch.dtype, rounding: str, coords: bool, per_token: bool
) -> None:
    model = make_model(device, dtype)
    more = {"video_coords": coordinates(device), "rope_interpolation_scale": None} if coords else {}
    inputs = make_inputs(device, dtype, per_token=per_token, **more)
    stock, exact = model(**inputs)[0], exactly(model, inputs)
    report = ltx.optimize(model, rounding=rounding)
    ours = model(**inputs)[0]
    assert report.fallbacks == {} and report.left_alone == {}
    assert_close(ours, stock)
    if dtype != torch.float32:
        assert distance(ours, exact) <= 1.15 * distance(stock, exact)  # one small model: the ratio has its own noise
    if dtype != torch.float32 and rounding == "eager":
        # Only sums differ, so most elements of the result are the same to the bit.
        assert distance(ours, stock) < 0.6 * distance(stock, exact)
    report.restore()
    assert torch.equal(model(**inputs)[0], stock) or dtype == torch.float32
    assert patched(model) == []


def test_error_over_seeds(ltx: ModuleType, device: str) -> None:
    """Averaged over inputs and weights, the error against float32 is that of the stock model."""
    stock_errors, our_errors = [], []
    for seed in range(6):
        model = make_model(device, torch.bfloat16, num_attention_heads=8, cross_attention_dim=128)
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
        inputs = make_inputs(device, torch.bfloat16)
        inputs["hidden_states"] = torch.randn_like(inputs["hidden_states"])
        exact = exactly(model, inputs)
        stock_errors.append(distance(model(**inputs)[0], exact))
        ltx.optimize(model)
        our_errors.append(distance(model(**inputs)[0], exact))
    assert sum(our_errors) <= 1.05 * sum(stock_errors)


@pytest.mark.host
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_any_number_of_heads(ltx: ModuleType, device: str, heads: int) -> None:
    """With two heads, half the width of the rotary table is one head's whole width."""
    model = make_model(device, num_attention_heads=heads, attention_head_dim=32, cross_attention_dim=32 * heads)
    inputs = make_inputs(device)
    stock = model(**inputs)[0]
    ltx.optimize(model)
    assert_close(model(**inputs)[0], stock)


@pytest.mark.host
@pytest.mark.parametrize("level", ["norms", "block"])
def test_faults_would_show(ltx: ModuleType, device: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is not blind: weights that a fused path might forget move the result far more than rounding."""
    model, inputs = make_model(device), make_inputs(device)
    stock = model(**inputs)[0]
    ltx.optimize(model, level=level)
    for name in (
        "attn1.norm_q.weight",
        "attn2.norm_k.weight",
        "attn1.to_k.bias",
        "ff.net.0.proj.bias",
        "scale_shift_table",
    ):
        parameter = model.transformer_blocks[0].get_parameter(name)
        kept = parameter.clone()
        parameter.add_(0.1 * torch.randn_like(parameter))
        assert distance(model(**inputs)[0], stock) > 1e-4, name
        parameter.copy_(kept)
    assert_close(model(**inputs)[0], stock)


def test_no_mask_and_no_text_padding(ltx: ModuleType, device: str) -> None:
    model = make_model(device)
    inputs = make_inputs(device, encoder_attention_mask=None)
    stock = model(**inputs)[0]
    report = ltx.optimize(model)
    assert_close(model(**inputs)[0], stock)
    assert report.fallbacks == {}


# ---- The report, and taking it back


def test_report(ltx: ModuleType, device: str) -> None:
    model = make_model(device)
    report = ltx.optimize(model)
    assert report.replaced == {
        BLOCK: LAYERS,
        ATTENTION: 2 * LAYERS,
        "diffusers.LTXVideoRotaryPosEmbed": 1,
        "diffusers.GELU": LAYERS,
        "diffusers.RMSNorm": 2 * LAYERS,
        "torch.RMSNorm": 4 * LAYERS,
        "torch.LayerNorm": 1,
    }
    assert all(site.calls == 0 for site in report.sites)  # nothing has run, and nothing is claimed
    model(**make_inputs(device))
    calls = {site.name: site.calls for site in report.sites}
    # The block does the work of its norms, and the attentions that of theirs.
    assert (calls[BLOCK], calls[ATTENTION], calls["torch.RMSNorm"], calls["torch.LayerNorm"]) == (
        LAYERS,
        2 * LAYERS,
        0,
        1,
    )
    lines = str(report).splitlines()
    (line,) = [line for line in lines if BLOCK in line]
    assert line.split()[:5] == [str(LAYERS), BLOCK, str(LAYERS), "0", "0"] and "adaln_rmsnorm" in line


def test_level_norms(ltx: ModuleType, device: str) -> None:
    model, inputs = make_model(device, torch.bfloat16), make_inputs(device, torch.bfloat16)
    stock = model(**inputs)[0]
    report = ltx.optimize(model, level="norms")
    assert set(report.replaced) == {"diffusers.RMSNorm", "torch.RMSNorm", "torch.LayerNorm"}
    assert_close(model(**inputs)[0], stock)
    assert sum(site.calls for site in report.sites) == 6 * LAYERS + 1


def test_compiled_ops_run(ltx: ModuleType, device: str) -> None:
    """What the report counts as calls are calls of compiled ops, as torch's dispatcher sees them."""
    model = make_model(device)
    ltx.optimize(model)
    with PackageOps(ltx) as ops:
        model(**make_inputs(device))
    in_block = ["adaln_norm", "gated_residual", "gated_residual", "residual_norm", "norm", "norm"]
    found = {name: ops.names.count(name) for name in set(ops.names)}
    assert found.pop("qk_norm_rope", 0) + found.pop("qk_norm_rope_out", 0) == LAYERS
    assert found.pop("gelu", 0) == (LAYERS if device == "cpu" else 0)
    assert found == {name: in_block.count(name) * LAYERS + (name == "norm") for name in in_block}


def test_context_manager_and_second_optimize(ltx: ModuleType, device: str) -> None:
    model, inputs = make_model(device, torch.bfloat16), make_inputs(device, torch.bfloat16)
    stock = model(**inputs)[0]
    classes = {name: type(m) for name, m in model.named_modules()}
    parameters = dict(model.named_parameters())
    with ltx.optimize(model, rounding="eager") as first:
        eager = model(**inputs)[0]
        second = ltx.optimize(model)  # other settings: replaces the first
        assert second.replaced[BLOCK] == first.replaced[BLOCK] == LAYERS
        fp32 = model(**inputs)[0]
        assert not torch.equal(eager, fp32)
        assert {name: type(m) for name, m in model.named_modules()} == classes
        assert all(p is parameters[name] for name, p in model.named_parameters())
    assert patched(model) == []
    assert torch.equal(model(**inputs)[0], stock)
    ltx.restore(model)  # nothing to do is no error


def test_two_models_are_independent(ltx: ModuleType, device: str) -> None:
    one, other, inputs = make_model(device), make_model(device), make_inputs(device)
    first, second = ltx.optimize(one), ltx.optimize(other, rounding="eager")
    one(**inputs)
    assert first.sites[0].calls == 1 and second.sites[0].calls == 0
    first.restore()
    assert patched(one) == [] and patched(other)


def test_deepcopy(ltx: ModuleType, device: str) -> None:
    model, inputs = make_model(device), make_inputs(device)
    report = ltx.optimize(model)
    want = model(**inputs)[0]
    counted = {site.name: site.calls for site in report.sites}
    copied = copy.deepcopy(model)
    assert_close(copied(**inputs)[0], want)
    assert {site.name: site.calls for site in report.sites} == counted  # the copy has a report of its own
    assert all(m.forward.__self__ is m for m in copied.modules() if "forward" in m.__dict__)
    ltx.restore(copied)
    assert patched(copied) == [] and patched(model)
    assert torch.equal(model(**inputs)[0], want)


def test_pickle_asks_for_restore(ltx: ModuleType, device: str) -> None:
    model, inputs = make_model(device), make_inputs(device)
    ltx.optimize(model)
    with pytest.raises(pickle.PicklingError, match="restore it first"):
        pickle.dumps(model)
    ltx.restore(model)
    assert_close(pickle.loads(pickle.dumps(model))(**inputs)[0], model(**inputs)[0])


def test_report_does_not_keep_the_model(ltx: ModuleType, device: str) -> None:
    model = make_model(device)
    report = ltx.optimize(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    report.restore()


def test_strict_changes_nothing(ltx: ModuleType, device: str) -> None:
    model = make_model(device)
    model.transformer_blocks[1].attn1.forward = lambda *args, **kwargs: None
    before = patched(model)
    with pytest.raises(RuntimeError, match=r"transformer_blocks.1.attn1: its forward is patched already"):
        ltx.optimize(model, strict=True)
    assert patched(model) == before
    report = ltx.optimize(model)
    # The rotary table stays at full width for it.
    assert set(report.left_alone) == {"transformer_blocks.1.attn1", "rope"}
    assert "transformer_blocks.1.attn1: its forward is patched already" in str(report)


def test_changed_classes_are_left_alone(ltx: ModuleType, device: str) -> None:
    class Norm(nn.RMSNorm):
        pass

    model, inputs = make_model(device), make_inputs(device)
    stock = model(**inputs)[0]
    block = model.transformer_blocks[0]
    block.attn2.norm_q.__class__ = Norm
    block.extra = nn.Identity()
    report = ltx.optimize(model)
    assert "norm_q or norm_k is not torch.nn.RMSNorm" in report.left_alone["transformer_blocks.0.attn2"]
    assert "extra" in report.left_alone["transformer_blocks.0"]
    assert_close(model(**inputs)[0], stock)


def test_changed_signature_is_left_alone(ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(device)
    block = type(model.transformer_blocks[0])
    stock = block.forward

    def forward(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, mask=None, added=None):
        return stock(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb, mask)

    monkeypatch.setattr(block, "forward", forward)
    report = ltx.optimize(model)
    assert BLOCK not in report.replaced and report.replaced[ATTENTION] == 2 * LAYERS
    assert "its forward takes (hidden_states" in report.left_alone["transformer_blocks.0"]


def test_parts_that_share_a_rotary_table(ltx: ModuleType, device: str) -> None:
    """Its compact form is for optimized attentions alone."""
    model, inputs = make_model(device), make_inputs(device)
    stock = model(**inputs)[0]
    with pytest.warns(UserWarning, match="nothing was replaced"):
        ltx.optimize(model.rope)
    ltx.optimize(model)
    for act in (ltx.restore, lambda part: ltx.optimize(part, level="norms")):
        with pytest.raises(RuntimeError, match=r"together with .*LTXVideoRotaryPosEmbed.*: give the whole model"):
            act(model.transformer_blocks[0])
    assert_close(model(**inputs)[0], stock)
    ltx.restore(model)
    ltx.optimize(model.transformer_blocks[0])  # alone, with the table at full width
    assert_close(model(**inputs)[0], stock)
    ltx.restore(model.transformer_blocks[0])
    assert patched(model) == []


def test_wrong_arguments(ltx: ModuleType, device: str) -> None:
    model = make_model(device)
    for arguments, error, text in (
        ({"level": "all"}, ValueError, "level: expected"),
        ({"rounding": "bf16"}, ValueError, "rounding: expected"),
        ({"components": ["transformer"]}, ValueError, "components: expected None with a module"),
        ({"components": "transformer"}, ValueError, "components: expected a list of names, got the string"),
        ({"components": 3}, TypeError, "components: expected a list of names, got 3"),
        ({"components": [None]}, TypeError, r"components: expected a list of names, got \[None\]"),
        ({"level": ["block"]}, ValueError, "level: expected"),
        ({"level": None}, ValueError, "level: expected"),
        ({"precision": {}}, ValueError, "precision: expected"),
        ({"rounding": ["fp32"]}, ValueError, "rounding: expected"),
        ({"skip": 5, "precision": "fp8"}, TypeError, "skip: expected a list of patterns, got 5"),
        ({"skip": [5], "precision": "fp8"}, TypeError, r"skip: expected a list of patterns, got \[5\]"),
        ({"strict": 1}, TypeError, "strict: expected True or False, got 1"),
        ({"stock_weights": True, "precision": "fp8"}, ValueError, "stock_weights: expected"),
        (
            {"skip": ["no_such*"], "precision": "fp8"},
            ValueError,
            "skip: expected patterns .* got no_such.*, which fits",
        ),
        ({"weights": "", "precision": "fp8"}, ValueError, "weights: expected a path, got an empty text"),
        ({"components": []}, ValueError, "components: expected the name of a component, got an empty list"),
        ({"memory": "low", "level": "norms"}, ValueError, 'precision: "fp8", which memory="low" sets, goes with'),
    ):
        with pytest.raises(error, match=text):
            ltx.optimize(model, **arguments)
    for wrong in ("model", None, 3, {"transformer": model}):
        for function in (ltx.optimize, ltx.restore):
            with pytest.raises(TypeError, match=r"obj: expected a torch.nn.Module or a pipeline"):
                function(wrong)
    with pytest.raises(ValueError, match="components: expected a list of names, got the string"):
        ltx.restore(model, components="transformer")
    assert patched(model) == []
    with pytest.warns(UserWarning, match="nothing was replaced"):
        ltx.optimize(nn.Linear(2, 2))


# ---- Calls that the ops cannot take


def test_gradients_of_a_whole_model(ltx: ModuleType, device: str) -> None:
    model, inputs = make_model(device).requires_grad_(True), make_inputs(device)
    report = ltx.optimize(model)

    def gradients() -> list[Tensor]:
        with torch.enable_grad():
            loss = model(**inputs)[0].square().sum()
        return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

    ours = gradients()
    assert BLOCK not in report.fallbacks
    model.enable_gradient_checkpointing()
    checkpointed = gradients()
    model.disable_gradient_checkpointing()
    report.restore()
    for got, again, want in zip(ours, checkpointed, gradients()):
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(again, want, rtol=1e-4, atol=1e-5)


def test_gradient_of_one_weight(ltx: ModuleType, device: str) -> None:
    """The rest is frozen, so that the blocks take the ops: the gradient goes through them."""
    names = [f"transformer_blocks.0.{n}" for n in ("attn1.to_k.weight", "attn2.to_v.bias", "ff.net.0.proj.weight")]
    for name in names:
        model = make_model(device)
        parameter = model.get_parameter(name).requires_grad_(True)

        def gradient(model: nn.Module = model, parameter: nn.Parameter = parameter) -> Tensor:
            with torch.enable_grad():
                loss = model(**make_inputs(device))[0].square().sum()
            return torch.autograd.grad(loss, parameter)[0]

        ltx.optimize(model)
        ours = gradient()
        ltx.restore(model)
        torch.testing.assert_close(ours, gradient(), rtol=1e-4, atol=1e-5)


def test_other_processor_runs_stock(ltx: ModuleType, device: str) -> None:
    """Set after `optimize`: the attention falls back, and sees the rotary table at full width."""

    class Processor(LTXVideoAttnProcessor):
        def __call__(self, attn: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            return super().__call__(attn, *args, **kwargs)

    model, inputs = make_model(device), make_inputs(device)
    stock = model(**inputs)[0]
    report = ltx.optimize(model)
    model.transformer_blocks[0].attn1.set_processor(Processor())
    assert_close(model(**inputs)[0], stock)
    ((reason, count),) = report.fallbacks[ATTENTION].items()
    assert count == 1 and "Processor" in reason and "stock call of diffusers.LTXAttention, 1 x" in str(report)


def test_hooks_on_modules_still_run(ltx: ModuleType, device: str) -> None:
    model, inputs = make_model(device), make_inputs(device)
    stock = model(**inputs)[0]
    ltx.optimize(model)
    block = model.transformer_blocks[0]
    seen: list[str] = []
    for name in ("norm1", "attn1", "attn1.norm_q", "attn1.to_q", "attn1.to_out.1", "ff", "ff.net.0.proj", "attn2.to_v"):
        block.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    assert_close(model(**inputs)[0], stock)
    assert sorted(seen) == sorted(
        ["norm1", "attn1", "attn1.norm_q", "attn1.to_q", "attn1.to_out.1", "ff", "ff.net.0.proj", "attn2.to_v"]
    )


def test_tensor_subclass_runs_stock(ltx: ModuleType, device: str) -> None:
    class Marked(Tensor):
        pass

    model, inputs = make_model(device), make_inputs(device)
    stock = model(**inputs)[0]
    report = ltx.optimize(model)
    inputs["hidden_states"] = inputs["hidden_states"].as_subclass(Marked)
    assert_close(model(**inputs)[0].as_subclass(Tensor), stock)
    assert report.fallbacks[BLOCK] == {"the input is a Marked": LAYERS}


# ---- Modules and models that change after `optimize`, and what interrupts it


class Halved(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 0.5 * self.module(*args, **kwargs)


@pytest.mark.host
@pytest.mark.parametrize(
    "path, make",
    [
        ("norm1", lambda: nn.LayerNorm(64, elementwise_affine=False)),
        ("norm2", lambda: nn.RMSNorm(64, eps=1e-6)),
        ("attn1.norm_q", lambda: nn.LayerNorm(64, bias=False)),
        ("norm1", nn.Identity),
        ("attn1.norm_q", nn.Identity),
    ],
)
def test_exchanged_norm(ltx: ModuleType, device: str, path: str, make: Callable[[], nn.Module]) -> None:
    model, stock_model, inputs = make_model(device), make_model(device), make_inputs(device)
    report = ltx.optimize(model)
    model(**inputs)
    for m in (model, stock_model):
        torch.manual_seed(5)
        norm = make().to(device).requires_grad_(False)
        for parameter in norm.parameters():
            parameter.normal_(1, 0.3)
        m.transformer_blocks[0].set_submodule(path, norm)
    assert_close(model(**inputs)[0], stock_model(**inputs)[0])
    (reasons,) = report.fallbacks.values()
    assert list(reasons.values()) == [1] and path.rpartition(".")[2] in next(iter(reasons))


@pytest.mark.host
@pytest.mark.parametrize("path", ["norm1", "norm2", "attn1.norm_q", "attn1.norm_k", "attn2.norm_q"])
def test_changed_eps(ltx: ModuleType, device: str, path: str) -> None:
    """Each norm's own eps is asked at the call, before and after it changes."""
    model, stock_model, inputs = make_model(device), make_model(device), make_inputs(device)
    ltx.optimize(model)
    want = model(**inputs)[0]
    for m in (model, stock_model):
        m.transformer_blocks[1].get_submodule(path).eps = 0.5
    changed = model(**inputs)[0]
    assert distance(changed, want) > 1e-4
    assert_close(changed, stock_model(**inputs)[0])


def test_dropout_of_another_class(ltx: ModuleType, device: str) -> None:
    model, stock_model, inputs = make_model(device), make_model(device), make_inputs(device)
    for m in (model, stock_model):
        m.transformer_blocks[0].attn1.to_out[1] = Halved(nn.Dropout())
        m.eval()
    ltx.optimize(model, strict=True)
    assert_close(model(**inputs)[0], stock_model(**inputs)[0])


def test_dropout_in_training(ltx: ModuleType, device: str) -> None:
    """Without gradients, but with training on, dropout drops."""
    model, inputs = make_model(device), make_inputs(device)
    ltx.optimize(model)
    want = model(**inputs)[0]
    for block in model.transformer_blocks:
        block.attn1.to_out[1].p = block.ff.net[1].p = 0.5
    assert torch.equal(model(**inputs)[0], want)
    for path in ("attn1.to_out.1", "ff.net.1"):
        model.transformer_blocks[0].get_submodule(path).train()
        assert distance(model(**inputs)[0], want) > 1e-3, path
        model.eval()


def test_gelu_around_another_module(ltx: ModuleType, device: str) -> None:
    model, inputs = make_model(device), make_inputs(device)
    stock = model(**inputs)[0]
    for block in model.transformer_blocks:
        block.ff.net[0].proj = nn.Sequential(block.ff.net[0].proj)
    ltx.optimize(model)
    assert_close(model(**inputs)[0], stock)


def test_restore_of_a_part_that_shares_a_table(ltx: ModuleType, device: str) -> None:
    model, inputs = make_model(device), make_inputs(device)
    stock = model(**inputs)[0]
    for act in (ltx.restore, ltx.optimize):
        ltx.optimize(model)
        with pytest.raises(RuntimeError, match=r"was optimized together with .*: give the whole model"):
            act(model.rope)
        assert_close(model(**inputs)[0], stock)
        ltx.restore(model)
        assert patched(model) == []


def test_restore_of_a_part_of_a_copy(ltx: ModuleType, device: str) -> None:
    """A deepcopy knows as well as its original what has to be restored together."""
    model, inputs = make_model(device), make_inputs(device)
    stock = model(**inputs)[0]
    ltx.optimize(model)
    copied = copy.deepcopy(model)
    for one in (model, copied):
        with pytest.raises(RuntimeError, match=r"was optimized together with .*: give the whole model"):
            ltx.restore(one.transformer_blocks[0])
        assert_close(one(**inputs)[0], stock)
        ltx.restore(one)
        assert patched(one) == []


@pytest.mark.host
@pytest.mark.parametrize("before", ["in its model", "restored", "gone"])
def test_a_block_that_left_its_model(ltx: ModuleType, device: str, before: str) -> None:
    """It can be restored by itself, and so can a model that it joins, which can be optimized too."""
    model, other, inputs = make_model(device), make_model(device), make_inputs(device)
    stock = other(**inputs)[0]
    ltx.optimize(model)
    block = model.transformer_blocks[0]
    other.transformer_blocks[0] = block
    with pytest.raises(RuntimeError, match="was optimized together with"):
        ltx.optimize(other)  # its table's maker is in the other model, as the block still is
    del model.transformer_blocks[0]
    if before == "restored":
        ltx.restore(model)
    elif before == "gone":
        del model
        gc.collect()
    report = ltx.optimize(other)
    assert report.left_alone == {} and report.replaced[BLOCK] == LAYERS
    assert_close(other(**inputs)[0], stock)
    del other.transformer_blocks[0]
    ltx.restore(block)
    assert patched(block) == []
    other.transformer_blocks.insert(0, block)
    ltx.restore(other)
    assert patched(other) == [] and torch.equal(other(**inputs)[0], stock)


def test_restore_after_the_table_was_exchanged(ltx: ModuleType, device: str) -> None:
    model = make_model(device)
    report = ltx.optimize(model)
    model.rope = make_model(device).rope
    report.restore()
    assert patched(model) == []


def test_restore_below_a_wrapper(ltx: ModuleType, device: str) -> None:
    """Somebody wrapped the forwards in between, and calls what was there."""
    model, inputs = make_model(device), make_inputs(device)
    stock = model(**inputs)[0]
    ltx.optimize(model)
    wrapped = [model.transformer_blocks[0], model.transformer_blocks[1].attn1, model.transformer_blocks[0].ff.net[0]]
    for module in wrapped:
        module.forward = lambda *args, ours=module.forward, **kwargs: ours(*args, **kwargs)
    assert_close(model(**inputs)[0], stock)
    ltx.restore(model)
    assert_close(model(**inputs)[0], stock)


def test_restore_is_all_or_nothing(ltx: ModuleType, device: str) -> None:
    class Pipeline:
        def __init__(self, **components: nn.Module) -> None:
            self.components = components

    one, other = make_model(device), make_model(device)
    ltx.optimize(one)
    ltx.optimize(other)
    with pytest.raises(RuntimeError, match="give the whole model"):
        ltx.restore(Pipeline(transformer=one, transformer_2=other.transformer_blocks))
    assert patched(one) and patched(other)


@pytest.mark.host
@pytest.mark.parametrize("precision", ["native", "fp8"])
@pytest.mark.parametrize("where", ["install", "pack", "quantise_weights"])
def test_optimize_is_all_or_nothing(
    ltx: ModuleType, device: str, where: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "quantise_weights" and precision == "native":
        pytest.skip("quantises nothing")
    model, inputs = make_model(device), make_inputs(device)
    stock = model(**inputs)[0]
    parts = ltx.integrations
    holder = {"install": parts, "pack": parts, "quantise_weights": parts.fp8_weights}[where]
    function, calls = getattr(holder, where), itertools.count()

    def interrupted(*args: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return function(*args)

    monkeypatch.setattr(holder, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        ltx.optimize(model, precision=precision)
    assert patched(model) == [] and list(model.named_buffers()) == []
    assert_close(model(**inputs)[0], stock)


def test_one_model_under_two_names(ltx: ModuleType, device: str) -> None:
    class Pipeline:
        components = dict.fromkeys(("transformer", "transformer_2"), make_model(device))

    assert ltx.optimize(Pipeline()).replaced[BLOCK] == LAYERS


def test_saved_as_safetensors(ltx: ModuleType, device: str, tmp_path: Any) -> None:
    """Packed weights share one storage. A program that saves them must still find each weight."""
    from safetensors.torch import load_model, save_model

    def saved(name: str) -> bytes:
        save_model(model, str(tmp_path / name))
        return (tmp_path / name).read_bytes()

    model = make_model(device)
    stock = saved("stock")
    ltx.optimize(model)
    query, key = (model.transformer_blocks[0].attn1._modules[name].weight for name in ("to_q", "to_k"))
    assert query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
    assert saved("packed") == stock
    with torch.no_grad():
        key.zero_()
    load_model(model, str(tmp_path / "packed"))
    assert saved("loaded") == stock
    ltx.restore(model)
    assert saved("restored") == stock
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


@pytest.mark.parametrize("precision", ["native", "fp8"])
def test_a_state_dict_reads_and_writes_packed_weights(ltx: ModuleType, device: str, precision: str) -> None:
    """Each tensor has a storage of its own, over the memory of its parameter; also in a copy of the model."""
    dtype = torch.float32 if precision == "native" else torch.bfloat16
    model = make_model(device).to(dtype)
    ltx.optimize(model, precision=precision)
    for one in (model, copy.deepcopy(model)):
        state = one.state_dict()
        addresses = {tensor.untyped_storage().data_ptr() for tensor in state.values() if tensor.numel()}
        assert len(addresses) == sum(tensor.numel() > 0 for tensor in state.values())
        name, parameter = next((n, p) for n, p in one.named_parameters() if n.endswith("attn1.to_k.bias"))
        written = parameter._version
        state[name].fill_(3)
        assert parameter._version > written
        assert parameter.eq(3).all() and state[name].dtype == dtype
        assert one.state_dict(keep_vars=True)[name] is parameter
    ltx.restore(model)
    assert not any(module._state_dict_hooks for module in model.modules())


@pytest.mark.parametrize("part", ["state_dict", "restore"])
def test_packed_weights_under_inference_mode(ltx: ModuleType, device: str, part: str) -> None:
    """A script that runs under inference mode hands on tensors that can be trained, as the stock model's."""
    model = make_model(device)
    ltx.optimize(model)
    with torch.inference_mode():
        state = model.state_dict()
        if part == "restore":
            ltx.restore(model)
    assert not any(tensor.is_inference() for tensor in (*state.values(), *model.parameters()))
    written = (parameter := model.transformer_blocks[0].attn1.to_k.bias)._version
    if part == "state_dict":
        state["transformer_blocks.0.attn1.to_k.bias"].fill_(3)
        assert parameter.eq(3).all() and parameter._version > written


def test_a_state_dict_outlives_packed_weights(ltx: ModuleType, device: str) -> None:
    """A program that offloads a model keeps its state dict, and the parameters go."""
    model = make_model(device)
    ltx.optimize(model)
    stock = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    addresses = {tensor.data_ptr() for tensor in model.state_dict().values()}  # of parameters: no memory is added
    assert addresses == {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    packed = StorageWeakRef(model.transformer_blocks[0].attn1.to_k.weight.untyped_storage())
    state = model.state_dict()
    del model
    gc.collect()
    others = [torch.full_like(tensor, float("nan")) for tensor in stock.values()]  # in memory that was given back
    assert all(torch.equal(state[name], tensor) for name, tensor in stock.items()) and others
    del state
    gc.collect()
    assert packed.expired()


def test_what_accelerate_saves(ltx: ModuleType, tmp_path: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = make_model("cpu")
    stock = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ltx.optimize(model)
    accelerator.prepare(model)
    accelerator.save_state(str(tmp_path / "state"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path / "state"))
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stock.items())


def test_parameters_in_a_flat_buffer_stay_there(ltx: ModuleType, device: str) -> None:
    model, inputs = make_model(device), make_inputs(device)
    stock = model(**inputs)[0]
    attention = model.transformer_blocks[0].attn1
    flat = torch.cat([p.detach().flatten() for p in (attention.to_v.weight, attention.to_q.weight)])
    attention.to_v.weight.data, attention.to_q.weight.data = flat.view(2, *attention.to_q.weight.shape).unbind(0)
    report = ltx.optimize(model)
    assert attention.to_q.weight.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    assert "somebody else" in report.notes[0] and "not packed, 1 attentions" in report.notes[0]
    assert_close(model(**inputs)[0], stock)
    ltx.restore(model)
    assert attention.to_q.weight.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


@pytest.mark.host
@pytest.mark.parametrize("missing", [("to_k",), ("to_q", "to_v")])
def test_biases_of_some_projections(ltx: ModuleType, device: str, missing: tuple[str, ...]) -> None:
    model, inputs = make_model(device), make_inputs(device)
    for block in model.transformer_blocks:
        for name in missing:
            linear = block.attn1._modules[name]
            linear.register_parameter("bias", None)
    stock = model(**inputs)[0]
    ltx.optimize(model)
    assert_close(model(**inputs)[0], stock)


def test_global_hooks_run_stock(ltx: ModuleType, device: str) -> None:
    from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook

    model, stock_model, inputs = make_model(device), make_model(device), make_inputs(device)
    report = ltx.optimize(model)
    handle = register_module_forward_hook(lambda m, args, output: output * 1.01 if type(m) is nn.Linear else None)
    try:
        assert_close(model(**inputs)[0], stock_model(**inputs)[0])
    finally:
        handle.remove()
    reason = "a hook of all modules is registered"
    assert report.fallbacks[BLOCK] == {reason: LAYERS}
    handle = register_module_full_backward_hook(lambda *_: None)
    try:
        model(**inputs)
    finally:
        handle.remove()
    assert report.fallbacks[BLOCK] == {reason: 2 * LAYERS}


def test_vmap_runs_stock(ltx: ModuleType, device: str) -> None:
    model, inputs = make_model(device), make_inputs(device)
    several = torch.stack([inputs["hidden_states"], 2 * inputs["hidden_states"]])

    def run(hidden_states: Tensor) -> Tensor:
        return model(**{**inputs, "hidden_states": hidden_states})[0]

    with sdpa_kernel(SDPBackend.MATH):  # on a GPU torch's others refuse a mask under vmap
        stock = torch.func.vmap(run)(several)
        ltx.optimize(model)
        assert_close(torch.func.vmap(run)(several), stock)


def test_scale_as_a_list(ltx: ModuleType, device: str) -> None:
    model = make_model(device)
    inputs = make_inputs(device, rope_interpolation_scale=[8 / 25, 32, 32])
    stock = model(**inputs)[0]
    ltx.optimize(model)
    assert_close(model(**inputs)[0], stock)


@pytest.mark.parametrize("way", ["mode", "function"])
def test_attention_that_is_replaced(
    ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch, attends: Attends, has_kernel: bool, way: str
) -> None:
    """The package's op must not pass by what somebody has put in the place of scaled_dot_product_attention.

    Perturbed attention guidance does so by a mode, and SageAttention's users by another function.
    """
    from torch.overrides import TorchFunctionMode

    own = torch.nn.functional.scaled_dot_product_attention

    def perturbed(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return value

    class Perturbed(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return (perturbed if func is own else func)(*args, **(kwargs or {}))

    dtype = torch.bfloat16
    model, inputs = make_model(device, dtype, **HEADS_OF_64), make_inputs(device, dtype, encoder_attention_mask=None)
    stock_model = make_model(device, dtype, **HEADS_OF_64)
    for m in (model, stock_model):
        for block in m.transformer_blocks:
            block.attn2.processor = block.attn2.processor
            block.attn2.forward = lambda hidden_states, **_: torch.zeros_like(hidden_states)
    ltx.optimize(model)
    if way == "function":
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", perturbed)
    with Perturbed() if way == "mode" else contextlib.nullcontext():
        want = stock_model(**inputs)[0]
        assert attends(lambda: assert_close(model(**inputs)[0], want)) == (0, 0)


def test_gradients_are_reported(ltx: ModuleType, device: str) -> None:
    """A gradient goes through a block with a layer in training and the blocks after it, and the report says so."""
    model, inputs = make_model(device), make_inputs(device)
    report = ltx.optimize(model)
    model.transformer_blocks[0].attn1.to_q.weight.requires_grad_()
    with torch.enable_grad():
        model(**inputs)
    (site,) = (site for site in report.sites if site.name == BLOCK)
    assert site.calls == site.gradients == LAYERS and f"gradients through {BLOCK}, {LAYERS} x" in str(report)
    assert site.fallbacks == {} and site.recomputed == 0


def test_coordinates_written_through_data(ltx: ModuleType, device: str) -> None:
    """docs/optimize.md says so: torch does not count such writes, and the table stays that of before."""
    model, coords = make_model(device), coordinates(device)
    ltx.optimize(model)
    arguments = {"hidden_states": make_inputs(device)["hidden_states"], "video_coords": coords}
    first = model.rope(**arguments)[0]
    coords.data.mul_(2)
    assert model.rope(**arguments)[0] is first
    coords.mul_(1)
    assert not torch.equal(model.rope(**arguments)[0], first)


def test_shallow_copy(ltx: ModuleType, device: str) -> None:
    """docs/optimize.md says so: copy.copy shares the original's forward, copy.deepcopy does not."""
    model = make_model(device)
    ltx.optimize(model)
    gelu = model.transformer_blocks[0].ff.net[0]
    assert copy.copy(gelu).forward.__self__ is gelu and copy.deepcopy(gelu).forward.__self__ is not gelu


def test_blocks_that_are_not_known_are_named(ltx: ModuleType, device: str) -> None:
    """A block that keeps its own forward is not passed over in silence."""

    class OtherTransformerBlock(type(make_model(device).transformer_blocks[0])):  # type: ignore[misc]
        pass

    model = make_model(device)
    model._repeated_blocks = [OtherTransformerBlock.__name__]
    model.transformer_blocks[1].__class__ = OtherTransformerBlock
    report = ltx.optimize(model)
    assert list(report.left_alone) == ["transformer_blocks.1"]
    assert "OtherTransformerBlock is not known" in report.left_alone["transformer_blocks.1"]
    with pytest.raises(RuntimeError, match="OtherTransformerBlock is not known"):
        ltx.optimize(model, strict=True)


def test_report_shows_every_reason(ltx: ModuleType, device: str) -> None:
    model, inputs = make_model(device), make_inputs(device)
    report = ltx.optimize(model)
    model.transformer_blocks[0].norm2.register_forward_hook(lambda *_: None)
    model.transformer_blocks[1].norm1.register_forward_hook(lambda *_: None)
    model(**inputs)
    model(**inputs)
    (site,) = (site for site in report.sites if site.name == BLOCK)
    assert site.fallbacks == {"norm2 has a hook": 2, "norm1 has a hook": 2} and site.calls == 2 * (LAYERS - 2)
    for reason, count in site.fallbacks.items():
        assert f"stock call of {BLOCK}, {count} x: {reason}" in str(report)
    (line,) = [line for line in str(report).splitlines() if line.split()[:2] == [str(LAYERS), BLOCK]]
    assert line.split()[2:5] == [str(2 * (LAYERS - 2)), "0", "4"]


# ---- Weights


def adjacent(attention: nn.Module) -> bool:
    weights = [attention.to_q.weight, attention.to_k.weight, attention.to_v.weight]
    return all(b.data_ptr() == a.data_ptr() + a.nbytes for a, b in itertools.pairwise(weights))


def test_packed_weights_are_the_parameters(ltx: ModuleType, device: str, tmp_path: Any) -> None:
    model, inputs = make_model(device, torch.bfloat16), make_inputs(device, torch.bfloat16)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    ltx.optimize(model)
    assert all(adjacent(block.attn1) and adjacent(block.attn2) for block in model.transformer_blocks)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    want = model(**inputs)[0]
    # What is written into the parameters is what runs.
    model.load_state_dict({name: value * 0.5 for name, value in state.items()})
    changed = model(**inputs)[0]
    assert distance(changed, want) > 0.01
    model.load_state_dict(state)
    assert torch.equal(model(**inputs)[0], want)
    model.save_pretrained(tmp_path)
    loaded = LTXVideoTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16).to(device)
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    ltx.optimize(loaded)
    assert torch.equal(loaded(**inputs)[0], want)


def test_projections_with_a_hook_are_noticed(ltx: ModuleType, device: str) -> None:
    model, inputs = make_model(device), make_inputs(device)
    report = ltx.optimize(model)
    model.transformer_blocks[0].attn1.to_k.register_forward_hook(lambda module, args, output: output * 0.5)
    ours = model(**inputs)[0]
    assert "projections of diffusers.LTXAttention one by one, 1 x" in str(report)
    ltx.restore(model)
    assert_close(ours, model(**inputs)[0])


def test_lost_packing_is_noticed(ltx: ModuleType, device: str) -> None:
    model, inputs = make_model(device), make_inputs(device)
    report = ltx.optimize(model)
    want = model(**inputs)[0]
    assert "one by one" not in str(report)
    attention = model.transformer_blocks[0].attn1
    attention.to_k.weight.data = attention.to_k.weight.data.clone() * 2
    assert not adjacent(attention)
    stretched = model(**inputs)[0]
    assert "projections of diffusers.LTXAttention one by one, 1 x" in str(report)
    assert distance(stretched, want) > 1e-5  # the new weight runs, not the one after to_q
    attention.to_k.weight.data.mul_(0.5)
    assert_close(model(**inputs)[0], want)


def test_neighbours_in_storages_of_their_own(ltx: ModuleType, device: str) -> None:
    """At the same addresses as before: an offload that goes and comes may leave them so."""
    model, inputs = make_model(device), make_inputs(device)
    ltx.optimize(model)
    want = model(**inputs)[0]
    attention = model.transformer_blocks[0].attn1
    storage = attention.to_q.weight.untyped_storage()
    for name in ("to_q", "to_k", "to_v"):
        weight = attention._modules[name].weight
        start = weight.data_ptr() - storage.data_ptr()
        own = storage[start : start + weight.nbytes]
        assert own.data_ptr() == weight.data_ptr() and own.nbytes() == weight.nbytes
        weight.data = torch.tensor([], dtype=weight.dtype, device=device).set_(own).view(weight.shape)
    assert_close(model(**inputs)[0], want)


def test_projection_without_bias(ltx: ModuleType, device: str) -> None:
    model = make_model(device, attention_bias=False, attention_out_bias=False)
    inputs = make_inputs(device)
    stock = model(**inputs)[0]
    report = ltx.optimize(model)
    assert adjacent(model.transformer_blocks[0].attn1) and report.notes == []
    assert_close(model(**inputs)[0], stock)


def test_cross_attention_of_another_width(ltx: ModuleType, device: str) -> None:
    model = make_model(device, num_attention_heads=8)  # of 16
    block = model.transformer_blocks[0]
    block.attn2.to_k = nn.Linear(128, 128, device=device).requires_grad_(False)
    assert ltx.optimize(model).notes == []


def test_lora(ltx: ModuleType, device: str) -> None:
    peft = pytest.importorskip("peft")
    model, inputs = make_model(device), make_inputs(device)
    bare = model(**inputs)[0]
    report = ltx.optimize(model)
    targets = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj"]
    model.add_adapter(peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    model.requires_grad_(False)
    ours = model(**inputs)[0]
    ltx.restore(model)
    stock = model(**inputs)[0]
    assert distance(stock, bare) > 0.01
    assert_close(ours, stock)
    ltx.optimize(model)  # with the adapter in place
    assert_close(model(**inputs)[0], stock)
    model.fuse_lora()
    assert_close(model(**inputs)[0], stock)
    model.unfuse_lora()
    assert_close(model(**inputs)[0], stock)
    model.delete_adapters("default")
    assert_close(model(**inputs)[0], bare)
    assert report.left_alone == {}


def test_quantised_linears(ltx: ModuleType, device: str) -> None:
    """A linear layer of another class, and one whose weight is another kind of tensor, are called as modules."""
    quantization = pytest.importorskip("torchao.quantization")
    model, inputs = make_model(device, torch.bfloat16), make_inputs(device, torch.bfloat16)
    ltx.optimize(model)
    quantization.quantize_(model.transformer_blocks, quantization.Int8WeightOnlyConfig())
    ours = model(**inputs)[0]
    ltx.restore(model)
    assert_close(ours, model(**inputs)[0])
    report = ltx.optimize(model)
    assert "ordinary parameters" in report.notes[0]
    assert_close(model(**inputs)[0], ours)


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_layerwise_casting(ltx: ModuleType, device: str, before: bool) -> None:
    def cast(model: nn.Module) -> None:
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)

    inputs = make_inputs(device, torch.bfloat16)
    stock_model, model = make_model(device, torch.bfloat16), make_model(device, torch.bfloat16)
    cast(stock_model)
    stock = stock_model(**inputs)[0]
    if before:
        cast(model)
    report = ltx.optimize(model)
    if not before:
        cast(model)
    assert_close(model(**inputs)[0], stock)
    assert BLOCK not in report.fallbacks


# ---- Offload


def offload_model(model: nn.Module, device: str) -> None:
    pytest.importorskip("accelerate").cpu_offload_with_hook(model, execution_device=device)


def offload_sequentially(model: nn.Module, device: str) -> None:
    pytest.importorskip("accelerate").cpu_offload(model, execution_device=device)


def offload_groups(kind: str) -> Callable[[nn.Module, str], None]:
    def offload(model: nn.Module, device: str) -> None:
        model.enable_group_offload(
            onload_device=torch.device(device),
            offload_device=torch.device("cpu"),
            offload_type=kind,
            num_blocks_per_group=1 if kind == "block_level" else None,
        )

    return offload


@pytest.mark.parametrize("order", ["offload first", "optimize first"])
@pytest.mark.parametrize(
    "offload",
    [offload_model, offload_sequentially, offload_groups("block_level"), offload_groups("leaf_level")],
    ids=["model", "sequential", "group, blocks", "group, leaves"],
)
def test_offload(ltx: ModuleType, device: str, offload: Callable[[nn.Module, str], None], order: str) -> None:
    inputs = make_inputs(device)
    stock = make_model(device)(**inputs)[0]
    model = make_model("cpu")
    if order == "offload first":
        offload(model, device)
        report = ltx.optimize(model)
    else:
        report = ltx.optimize(model)
        offload(model, device)
    for _ in range(2):
        assert_close(model(**inputs)[0], stock)
    assert report.sites[0].calls > 0
    ltx.restore(model)
    assert_close(model(**inputs)[0], stock)
    assert not any("_ltx_kernels" in m.__dict__ for m in model.modules())


def test_restore_below_a_hook_and_above(ltx: ModuleType, device: str) -> None:
    """accelerate's hooks that come and go leave the ops in place, or the stock forward."""
    accelerate = pytest.importorskip("accelerate")
    model, inputs = make_model(device), make_inputs(device)
    stock = model(**inputs)[0]
    report = ltx.optimize(model)
    accelerate.cpu_offload(model, execution_device=device)
    accelerate.hooks.remove_hook_from_submodules(model)
    model.to(device)
    report.sites[0].calls = 0
    assert_close(model(**inputs)[0], stock)
    assert {site.name: site.calls for site in report.sites}[BLOCK] > 0
    ltx.restore(model)
    assert torch.equal(model(**inputs)[0], stock)


def test_accelerate_takes_its_wrapper_of_the_forward_away(ltx: ModuleType, device: str) -> None:
    """It puts what it finds below its own wrapper in the place of the forward."""
    utils = pytest.importorskip("accelerate.utils")
    model, inputs = make_model(device), make_inputs(device)
    stock = model(**inputs)[0]
    ltx.optimize(model)
    model._original_forward = model.forward  # as `Accelerator.prepare` with mixed_precision="bf16"
    autocast = torch.autocast(torch.device(device).type, torch.bfloat16)
    model.forward = types.MethodType(utils.convert_outputs_to_fp32(autocast(model.forward.__func__)), model)
    assert not torch.equal(model(**inputs)[0], stock)
    utils.extract_model_from_parallel(model, keep_fp32_wrapper=False)
    assert_close(model(**inputs)[0], stock)
    ltx.restore(model)
    assert torch.equal(model(**inputs)[0], stock)


# ---- Caches, attention backends


@pytest.mark.parametrize("order", ["cache first", "optimize first"])
@pytest.mark.parametrize("kind", ["first block", "attention broadcast"])
def test_caches(ltx: ModuleType, device: str, kind: str, order: str) -> None:
    def enable(model: nn.Module) -> None:
        if kind == "first block":
            model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.05))
        else:
            step = [700]
            model.enable_cache(
                diffusers.PyramidAttentionBroadcastConfig(
                    spatial_attention_block_skip_range=2,
                    cross_attention_block_skip_range=2,
                    spatial_attention_timestep_skip_range=(100, 800),
                    cross_attention_timestep_skip_range=(100, 800),
                    spatial_attention_block_identifiers=["transformer_blocks.*attn1"],
                    cross_attention_block_identifiers=["transformer_blocks.*attn2"],
                    current_timestep_callback=lambda: step[0],
                )
            )

    def run(model: nn.Module) -> list[Tensor]:
        outputs = []
        for step in range(3):
            inputs = make_inputs(device)
            inputs["hidden_states"] = inputs["hidden_states"] * (1 + 0.01 * step)
            with model.cache_context("cond"):
                outputs.append(model(**inputs)[0])
        return outputs

    bare, stock_model, model = make_model(device), make_model(device), make_model(device)
    enable(stock_model)
    if order == "cache first":
        enable(model)
    report = ltx.optimize(model)
    if order == "optimize first":
        enable(model)
    stock = run(stock_model)
    inputs = make_inputs(device)
    inputs["hidden_states"] = inputs["hidden_states"] * 1.01
    assert distance(stock[1], bare(**inputs)[0]) > 1e-6  # the cache was used
    for got, want in zip(run(model), stock):
        assert_close(got, want)
    calls = {site.name: site.calls for site in report.sites}
    assert 0 < calls[BLOCK if kind == "first block" else ATTENTION] < 3 * LAYERS * (1 if kind == "first block" else 2)
    assert report.fallbacks == {}


def test_attention_backend_and_parallel_config_are_kept(
    ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers.models.transformers import transformer_ltx

    seen: list[tuple[Any, Any]] = []
    stock = transformer_ltx.dispatch_attention_fn

    def watch(*args: Any, **kwargs: Any) -> Tensor:
        seen.append((kwargs["backend"], kwargs["parallel_config"]))
        return stock(*args, **{**kwargs, "parallel_config": None})

    monkeypatch.setattr(transformer_ltx, "dispatch_attention_fn", watch)
    model, inputs = make_model(device), make_inputs(device)
    want = model(**inputs)[0]
    ltx.optimize(model)
    model.set_attention_backend("_native_math")
    marker = object()
    model.transformer_blocks[0].attn1.processor._parallel_config = marker
    seen.clear()
    assert_close(model(**inputs)[0], want)
    assert [str(getattr(backend, "value", backend)) for backend, _ in seen] == ["_native_math"] * 2 * LAYERS
    assert [config is marker for _, config in seen] == [True] + [False] * (2 * LAYERS - 1)


# ---- Attention in ops of this package

Attends = Callable[[Callable[[], Any]], "tuple[int, int]"]


@pytest.fixture
def attends(ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch) -> Attends:
    """Counts the calls of attention and qk_norm_cross_attention, which are used on the CPU too."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    # set_attention_backend of one model is for all of the process.
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", AttentionBackendName.NATIVE)
    call, dispatch = ltx.integrations.attention.engine, ltx.integrations.attention.choice
    if device == "cpu":
        monkeypatch.setattr(dispatch, "_op_pays", lambda query, *_: dispatch.has_tensor_cores(query.device))
        monkeypatch.setattr(ltx.integrations.engine.guards, "_capability", lambda _: (8, 0))
        monkeypatch.setattr(dispatch, "runs_kernel", lambda query, *_: query.dtype != torch.float32)
    calls = {"attention": 0, "qk_norm_cross_attention": 0}

    def counted(home: ModuleType, name: str) -> Callable[..., Tensor]:
        op = getattr(home, name)

        def count_and_call(*args: Any, **kwargs: Any) -> Tensor:
            calls[name] += 1
            return op(*args, **kwargs)

        return count_and_call

    for home, name in ((dispatch, "attention"), (call, "qk_norm_cross_attention")):
        monkeypatch.setattr(home, name, counted(home, name))
    replay = importlib.import_module(f"{ltx.__name__}.integrations.replay.calls")
    monkeypatch.setattr(replay, "RECORD", "0")  # a replay calls ops without these functions

    def count(run: Callable[[], Any]) -> tuple[int, int]:
        calls.update(dict.fromkeys(calls, 0))
        run()
        return calls["attention"], calls["qk_norm_cross_attention"]

    return count


@pytest.fixture
def has_kernel(ltx: ModuleType, device: str) -> bool:
    """Whether self-attention in 16 bits has a kernel of this package, or `attends` pretends so."""
    return device == "cpu" or helpers.attention.has_kernel(ltx, device)


HEADS_OF_64 = {"num_attention_heads": 2, "attention_head_dim": 64, "cross_attention_dim": 128}


@pytest.mark.parametrize("precision", ["native", "fp8"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_attention_in_ops(
    ltx: ModuleType, device: str, dtype: torch.dtype, precision: str, attends: Attends, has_kernel: bool
) -> None:
    model = make_model(device, dtype, **HEADS_OF_64)
    inputs = make_inputs(device, dtype)
    stock, exact = model(**inputs)[0], exactly(model, inputs)
    if precision == "fp8" and (device == "cpu" or torch.cuda.get_device_capability() < (8, 9)):
        pytest.skip("fp8 needs a GPU of compute capability 8.9")
    ltx.optimize(model, precision=precision)
    ours: list[Tensor] = []
    assert attends(lambda: ours.append(model(**inputs)[0])) == (LAYERS * has_kernel, LAYERS)
    if precision == "native":
        assert_close(ours[0], stock)
        assert distance(ours[0], exact) <= 1.15 * distance(stock, exact)
    padded = {**inputs, "encoder_attention_mask": torch.ones_like(inputs["encoder_attention_mask"])}
    assert distance(model(**padded)[0], ours[0]) > 1e-3  # the mask is heeded


@pytest.mark.parametrize(("columns", "tokens"), [(128, 0), (64, 0), (128, 4608)])
def test_attention_in_int8(
    ltx: ModuleType,
    device: str,
    columns: int,
    tokens: int,
    attends: Attends,
    has_kernel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Self-attention of many tokens with heads of 128 columns takes it, and the report counts what does not."""
    assert ltx.integrations.attention.choice._INT8_TOKENS == 4608
    monkeypatch.setattr(ltx.integrations.attention.choice, "_INT8_TOKENS", tokens)
    heads = {"num_attention_heads": 2, "attention_head_dim": columns, "cross_attention_dim": 2 * columns}
    model, inputs = make_model(device, torch.bfloat16, **heads), make_inputs(device, torch.bfloat16)
    ltx.optimize(model)
    native = model(**inputs)[0]
    report = ltx.optimize(model, attention="int8")
    assert "attention int8" in report.target
    ours: list[Tensor] = []
    assert attends(lambda: ours.append(model(**inputs)[0])) == (LAYERS * has_kernel, LAYERS)
    (site,) = (site for site in report.sites if site.name == ATTENTION)
    reason = f"heads of {columns} columns" if columns != 128 else f"fewer than {tokens} tokens"
    reason = reason if has_kernel else "not this package's kernel"
    taken = has_kernel and (columns, tokens) == (128, 0)
    assert site.remarks == ({} if taken else {f"attention not in int8: {reason}": LAYERS})
    assert taken == (not torch.equal(ours[0], native))
    assert distance(ours[0], native) <= 0.02
    assert taken or f"{reason}, {ATTENTION}, {LAYERS} x" in str(report)


def test_options_of_attention_in_int8(ltx: ModuleType) -> None:
    model = make_model("cpu")
    for other in ({"level": "norms"}, {"rounding": "eager"}):
        with pytest.raises(ValueError, match='attention: "int8" goes with level "block" and rounding "fp32"'):
            ltx.optimize(model, attention="int8", **other)
    with pytest.raises(ValueError, match='attention: expected "native" or "int8", got \'fp8\''):
        ltx.optimize(model, attention="fp8")


def test_attention_follows_what_is_asked_of_diffusers(
    ltx: ModuleType, device: str, attends: Attends, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers.models.attention_dispatch import attention_backend
    from diffusers.models.transformers import transformer_ltx

    dtype = torch.bfloat16
    model, inputs = make_model(device, dtype, **HEADS_OF_64), make_inputs(device, dtype)
    stock = model(**inputs)[0]

    def run() -> None:
        assert_close(model(**inputs)[0], stock)

    report = ltx.optimize(model)
    (site,) = (site for site in report.sites if site.name == ATTENTION)
    assert site.ops == ("qk_norm_rope", "attention", "qk_norm_cross_attention", "rmsnorm")  # what may run
    in_kernel = LAYERS * has_kernel
    assert attends(run) == (in_kernel, LAYERS)
    assert site.ops == ("qk_norm_rope", *["attention"] * has_kernel, "qk_norm_cross_attention")
    with attention_backend("_native_math"):
        assert attends(run) == (0, 0)
    model.set_attention_backend("native")
    assert attends(run) == (0, 0)
    model.reset_attention_backend()
    assert attends(run) == (in_kernel, LAYERS)
    unmasked = {**inputs, "encoder_attention_mask": None}
    assert attends(lambda: model(**unmasked)) == (2 * in_kernel, 0)
    with monkeypatch.context() as slower:
        slower.setattr(ltx.integrations.attention.choice, "_kernel_pays", lambda *_: False)
        assert attends(lambda: model(**unmasked)) == (in_kernel, 0)
    ltx.optimize(model, rounding="eager")
    assert attends(run) == (0, 0)
    ltx.restore(model)
    dispatch = transformer_ltx.dispatch_attention_fn
    monkeypatch.setattr(transformer_ltx, "dispatch_attention_fn", lambda *a, **k: dispatch(*a, **k))
    ltx.optimize(model)
    assert attends(run) == (0, 0)


def test_self_attention_that_needs_a_gradient(ltx: ModuleType, device: str, attends: Attends) -> None:
    """As of LoRA's weights: torch's attention, which has one."""
    if device == "cpu":
        pytest.skip("needs the choice that a GPU makes")
    model, inputs = make_model(device, torch.bfloat16, **HEADS_OF_64), make_inputs(device, torch.bfloat16)
    report = ltx.optimize(model)
    model.transformer_blocks[0].attn1.to_v.weight.requires_grad_()
    with torch.enable_grad():
        assert attends(lambda: model(**inputs)[0].sum().backward())[0] == 0
    assert model.transformer_blocks[0].attn1.to_v.weight.grad.isfinite().all()
    assert report.sites[0].calls > 0


@pytest.mark.extended
def test_attention_in_ops_compiles(ltx: ModuleType, device: str, attends: Attends) -> None:
    dtype = torch.bfloat16
    model, inputs = make_model(device, dtype, **HEADS_OF_64), make_inputs(device, dtype)
    ltx.optimize(model)
    eager = model(**inputs)[0]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(**inputs)[0], eager)


# ---- The rotary table


def test_rotary_table_is_made_once_per_shape(ltx: ModuleType, device: str) -> None:
    model, inputs = make_model(device), make_inputs(device)
    ltx.optimize(model)

    def table(**more: Any) -> tuple[Tensor, Tensor]:
        names = "hidden_states", "num_frames", "height", "width", "rope_interpolation_scale"
        return model.rope(**{**{name: inputs[name] for name in names}, **more})

    first = table()
    assert first[0].shape == (1, 24, 32)
    assert table()[0] is first[0]
    assert table(rope_interpolation_scale=(1.0, 2.0, 3.0))[0] is not first[0]
    assert table(num_frames=1, height=6)[0] is not first[0]
    scale = torch.tensor(0.5, device=device)
    by_tensor = [table(rope_interpolation_scale=(scale, 32, 32))[0] for _ in range(2)]
    assert by_tensor[0] is not by_tensor[1]  # its value may change unseen
    coords = coordinates(device)
    given = table(video_coords=coords)[0]
    assert given.shape == (2, 24, 32) and table(video_coords=coords)[0] is given
    coords += 1
    assert not torch.equal(table(video_coords=coords)[0], given)


def test_a_kept_value_goes_with_its_tensors(ltx: ModuleType) -> None:
    """Its memory is free when one of them is gone, also where nothing asks for it again."""
    kept, limit = ltx.integrations.engine.kept.kept, ltx.integrations.engine.kept.KEPT
    site = type("Site", (), {"cache": {}})()
    first, *sources = (torch.zeros(1) for _ in range(limit + 2))
    tables = [kept(site, "table", (first, source), object) for source in sources]
    assert len(site.cache) == limit  # the oldest went
    assert all(kept(site, "table", (first, sources[i]), object) is tables[i] for i in range(1, limit + 1))
    sources.pop()
    assert len(site.cache) == limit - 1
    del first
    assert not site.cache


def test_nothing_is_kept_of_an_earlier_address(ltx: ModuleType) -> None:
    """An allocator gives the address of a tensor's earlier data to its next ones."""
    kept, site = ltx.integrations.engine.kept.kept, type("Site", (), {"cache": {}})()
    memory = torch.zeros(4)
    source = torch.from_dlpack(memory)
    address, made = source.data_ptr(), kept(site, "table", (source,), object)
    assert kept(site, "table", (source,), object) is made
    source.data = torch.ones(4)
    source.data = torch.from_dlpack(memory.fill_(2))
    assert source.data_ptr() == address and kept(site, "table", (source,), object) is not made


def test_nothing_of_fake_tensors_is_kept(ltx: ModuleType) -> None:
    """A call of the model's first shape by a program that only asks for shapes leaves later calls as they are."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, inputs = make_model("cpu"), make_inputs("cpu")
    want = model(**inputs)[0]
    ltx.optimize(model)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        assert model(**fake)[0].shape == want.shape
    assert_close(model(**inputs)[0], want)
    torch.func.functionalize(lambda hidden: model(**{**inputs, "hidden_states": hidden})[0])(inputs["hidden_states"])
    assert_close(model(**inputs)[0], want)


def test_what_is_kept_of_views(ltx: ModuleType, device: str) -> None:
    """A new view of the same memory finds it, one of another place or form does not, and a write is seen."""
    kept, site = ltx.integrations.engine.kept.kept, type("Site", (), {"cache": {}})()
    source, whole = torch.zeros(1, device=device), torch.arange(8.0, device=device)

    def make(view: Callable[[], Tensor]) -> object:
        return kept(site, "sums", (source,), object, views=(view(),))

    first = make(lambda: whole[:4])
    assert make(lambda: whole[:4]) is first
    others = [make(lambda: whole[4:]), make(lambda: whole[:8:2]), make(lambda: whole[:4].view(torch.int32))]
    assert first not in others and len(set(others)) == 3
    assert make(lambda: whole[:4]) is first
    whole[:4] += 1
    second = make(lambda: whole[:4])
    assert second is not first and make(lambda: whole[:4]) is second
    source += 1
    assert make(lambda: whole[:4]) is not second


# ---- torch.compile, CUDA graphs


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["fp32", "eager"])
def test_compile_whole(ltx: ModuleType, device: str, rounding: str) -> None:
    model, inputs = make_model(device, torch.bfloat16), make_inputs(device, torch.bfloat16)
    stock = model(**inputs)[0]
    report = ltx.optimize(model, rounding=rounding)
    compiled = torch.compile(model, fullgraph=True)
    assert_close(compiled(**inputs)[0], stock)
    traced = {site.name: site.traces for site in report.sites}
    assert report.fallbacks == FUSED_BY_COMPILE
    assert traced[BLOCK] == LAYERS and traced[ATTENTION] == 2 * LAYERS
    # Other lengths: once more for sizes that vary, and then never again.
    compiled(**make_inputs(device, torch.bfloat16, grid=(3, 3, 4)))
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(**make_inputs(device, torch.bfloat16, grid=(5, 3, 4)))


@pytest.mark.parametrize("in_one_op", [False, True], ids=["norms and attention", "cross-attention in one op"])
def test_every_op_comes_first_in_the_first_block(
    ltx: ModuleType, device: str, in_one_op: bool, attends: Attends
) -> None:
    """At an op's first call, inductor of torch 2.11 writes down the expression of each argument, back to the model's
    inputs: exponentially long, and so for ever, after many blocks."""
    model, inputs = make_model(device, torch.bfloat16, **HEADS_OF_64), make_inputs(device, torch.bfloat16)
    if not in_one_op:
        inputs["encoder_attention_mask"] = None
    ltx.optimize(model)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, example_inputs: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compile(model, fullgraph=True, backend=keep)(**inputs)
    ops = [str(node.target) for node in graphs[0].graph.nodes if ltx._ops.ops.name in str(node.target)]
    assert any("qk_norm_cross_attention" in op for op in ops) == in_one_op
    assert max(map(ops.index, ops)) < len(ops) / LAYERS


def test_compiled_blocks_share_the_table(ltx: ModuleType, device: str) -> None:
    """It is the result of an op, or torch.compile would make it anew for blocks that read it."""
    model, inputs = make_model(device), make_inputs(device)
    ltx.optimize(model)
    graphs = []

    def keep(graph: torch.fx.GraphModule, example_inputs: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compile(model, fullgraph=True, backend=keep)(**inputs)
    (graph,) = graphs
    tables = [node for node in graph.graph.nodes if "compact_table" in str(node.target)]
    readers = [node for node in graph.graph.nodes if "qk_norm_rope" in str(node.target)]
    assert len(tables) == 2 and len(readers) == LAYERS
    assert all(table in reader.all_input_nodes for table in tables for reader in readers)


@pytest.mark.slow
def test_compile_repeated_blocks(ltx: ModuleType, device: str) -> None:
    model = make_model(device, torch.bfloat16, num_layers=4)
    inputs = make_inputs(device, torch.bfloat16)
    stock = model(**inputs)[0]
    report = ltx.optimize(model)
    model.compile_repeated_blocks(fullgraph=True)
    assert_close(model(**inputs)[0], stock)
    assert report.fallbacks == {}
    # One compilation serves all blocks.
    assert {site.name: site.traces for site in report.sites}[BLOCK] == 1


ROUNDS = "autocast is on in torch.bfloat16, and rounds in other places than 'eager'"


@pytest.mark.parametrize("reason", ["a gradient of temb is needed", ROUNDS])
def test_compile_of_stock_calls(ltx: ModuleType, device: str, reason: str) -> None:
    """Without graph breaks too, though diffusers marks its blocks allow_in_graph, which hides their class."""
    grad = reason != ROUNDS
    model, inputs = make_model(device).requires_grad_(grad), make_inputs(device)
    with torch.set_grad_enabled(grad), torch.autocast(device, torch.bfloat16, enabled=not grad):
        stock = model(**inputs)[0]
        report = ltx.optimize(model, rounding="fp32" if grad else "eager")
        assert_close(torch.compile(model, fullgraph=True, backend="eager")(**inputs)[0], stock)
    assert report.fallbacks[BLOCK] == {f"{reason} (compiled)": LAYERS}


@pytest.mark.extended
def test_optimize_after_compile(ltx: ModuleType, device: str) -> None:
    """A compiled model that is optimized, and restored, runs what it holds at the time."""
    model, inputs = make_model(device), make_inputs(device)
    compiled = torch.compile(model, backend="eager")
    stock = compiled(**inputs)[0]
    report = ltx.optimize(compiled)
    assert_close(compiled(**inputs)[0], stock)
    assert {site.name: site.traces for site in report.sites}[BLOCK] == LAYERS
    ltx.restore(compiled)
    assert_close(compiled(**inputs)[0], stock)


def test_cuda_graph(ltx: ModuleType, cuda_graphs: str) -> None:
    model, inputs = make_model("cuda", torch.bfloat16), make_inputs("cuda", torch.bfloat16)
    ltx.optimize(model)
    want = model(**inputs)[0]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model(**inputs)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = model(**inputs)[0]
    # Shapes that come later do not take away the table that the graph reads.
    for frames in range(1, 9):
        model(**make_inputs("cuda", torch.bfloat16, grid=(frames, 2, 2)))
    inputs["hidden_states"].mul_(1)
    graph.replay()
    assert torch.equal(got, want)
    inputs["hidden_states"].mul_(2)
    graph.replay()
    assert torch.equal(got, model(**inputs)[0]) and not torch.equal(got, want)
