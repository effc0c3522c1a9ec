"""Language models of transformers: `optimize` on their norms, and the layers through the functions of kernels.

The models are small and random, of transformers' own classes.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import assert_close_to_eager, assert_close_to_fp64
from helpers.build import REPO_ID, ROOT
from helpers.language_models import (
    LAYERS,
    WIDTH,
    assert_close,
    distance,
    forget_kernelized,
    gradients,
    make_ids,
    make_model,
)
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
kernels = pytest.importorskip("kernels")
from kernels import LayerRepository, LocalLayerRepository, Mode, kernelize, use_kernel_mapping  # noqa: E402
from transformers import KernelConfig  # noqa: E402
from transformers.integrations import hub_kernels  # noqa: E402
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRMSNorm  # noqa: E402
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")

# By library name; Qwen3 also normalises queries and keys.
NORMS = {"Llama": 2 * LAYERS + 1, "Mistral": 2 * LAYERS + 1, "Qwen2": 2 * LAYERS + 1, "Qwen3": 4 * LAYERS + 1}
HALF = [torch.bfloat16, torch.float16]
# Each transformers takes some versions of kernels; for others it decorates nothing, and refuses use_kernels.
TAKES_KERNELS = hasattr(LlamaRMSNorm, "kernel_layer_name")
if not TAKES_KERNELS:
    for norm_class in (LlamaRMSNorm, Qwen3RMSNorm):
        kernels.replace_kernel_forward_from_hub(norm_class, "RMSNorm")
through_transformers = pytest.mark.skipif(
    not TAKES_KERNELS,
    reason=f"NOT RUN: transformers {transformers.__version__} does not take kernels {kernels.__version__}",
)
PACKED = ("SwiGLUMLP", "GeGLUMLP", "RMSNormSwiGLUMLP")
MODES = [Mode.INFERENCE, Mode.INFERENCE | Mode.TORCH_COMPILE, Mode.TRAINING, Mode.TRAINING | Mode.TORCH_COMPILE]


@pytest.fixture(autouse=True)
def stock_functions():
    yield
    forget_kernelized()


def norms(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if "RMSNorm" in type(m).__name__]


# ---- optimize


@pytest.mark.parametrize("rounding", ["fp32", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("family", NORMS)
def test_forward(ltx: ModuleType, device: str, family: str, dtype: torch.dtype, rounding: str) -> None:
    model, ids = make_model(device, dtype, family), make_ids(device)
    stock, exact = model(ids).logits, copy.deepcopy(model).float()(ids).logits
    report = ltx.optimize(model, level="norms", rounding=rounding, strict=True)
    ours = model(ids).logits
    assert report.replaced == {f"transformers.{family}RMSNorm": NORMS[family]}
    assert report.sites[0].calls == NORMS[family] and report.fallbacks == {}
    assert_close(ours, stock)
    if dtype != torch.float32:
        assert distance(ours, exact) <= 1.15 * distance(stock, exact)  # one small model: the ratio has its own noise
        if rounding == "eager":
            # Sums of 64 and of 16 numbers seldom round to another side: most of the result is the same to the bit.
            assert distance(ours, stock) < 0.5 * distance(stock, exact)
    report.restore()
    assert torch.equal(model(ids).logits, stock) and not any("forward" in m.__dict__ for m in model.modules())


@pytest.mark.parametrize("family", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_one_norm(ltx: ModuleType, device: str, dtype: torch.dtype, family: str) -> None:
    """By itself: "eager" has the stock module's bits, "fp32" is as close to float64 as one rounding gets."""
    norm = make_model(device, dtype, family, rms_norm_eps=0.3).model.norm
    torch.manual_seed(2)
    x = torch.randn(3, 7, WIDTH).to(device, dtype)
    stock = norm(x)
    wide = x.double()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 0.3)
    truth = normalised * norm.weight.double()
    ltx.optimize(norm, rounding="eager")
    assert_close_to_eager(norm(x), stock, truth.abs())
    ltx.optimize(norm)
    assert_close_to_fp64(norm(x), truth, truth.abs())
    if dtype != torch.float32:
        assert (norm(x) != stock).double().mean() > 0.05  # the stock module rounds twice
        with pytest.raises(AssertionError):
            assert_close_to_fp64(stock, truth, truth.abs())


@pytest.mark.host
def test_faults_would_show(ltx: ModuleType, device: str) -> None:
    """A weight or an eps that was forgotten moves the result far more than rounding does."""
    model, ids = make_model(device), make_ids(device)
    stock = model(ids).logits
    ltx.optimize(model)
    norm = model.model.layers[0].input_layernorm
    kept = norm.weight.clone()
    norm.weight.mul_(torch.rand_like(kept) + 0.5)
    assert distance(model(ids).logits, stock) > 1e-3
    norm.weight.copy_(kept)
    norm.variance_epsilon += 0.01
    assert distance(model(ids).logits, stock) > 1e-3
    norm.variance_epsilon = model.config.rms_norm_eps
    assert_close(model(ids).logits, stock)


@pytest.mark.parametrize("length", [1, 0])
def test_short_inputs(ltx: ModuleType, device: str, length: int) -> None:
    norm = norms(make_model(device))[0]
    ltx.optimize(norm)
    x = torch.randn(2, length, WIDTH, device=device)
    assert_close_to_fp64(norm(x), type(norm).forward(norm, x).double(), 1.0)


@pytest.mark.host
def test_other_norms_are_named(ltx: ModuleType, device: str) -> None:
    """What nobody has looked at, or what computes something else, stays as it is, whatever its class is called."""
    name = "transformers.models.kimi_linear.modeling_kimi_linear.KimiLinearRMSNormGated"
    gated = nn.Sequential(class_named(name)(WIDTH)).to(device)
    with pytest.warns(UserWarning, match="nothing was replaced"):
        report = ltx.optimize(gated)
    assert report.left_alone["0"] == f"{name}: its gate is a sigmoid" in str(report) and report.sites == []
    with pytest.raises(RuntimeError, match=r"0: .*KimiLinearRMSNormGated: its gate is a sigmoid"):
        ltx.optimize(gated, strict=True)

    class OwnNorm(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return 2 * super().forward(hidden_states)

    model, ids = make_model(device), make_ids(device)
    model.model.norm = OwnNorm(WIDTH).to(device)
    model.model.layers[0].input_layernorm = GemmaRMSNorm(WIDTH).to(device)
    stock = model(ids).logits
    report = ltx.optimize(model)
    assert report.replaced["transformers.LlamaRMSNorm"] == NORMS["Llama"] - 2
    assert report.replaced["transformers.GemmaRMSNorm"] == report.replaced["transformers.LlamaDecoderLayer"] == 1
    assert report.left_alone["model.layers.0"].endswith("input_layernorm is " + class_of(GemmaRMSNorm))
    assert "OwnNorm is a subclass of transformers.models.llama" in report.left_alone["model.norm"]
    assert_close(model(ids).logits, stock)
    with pytest.raises(RuntimeError, match="strict"):
        ltx.optimize(model, strict=True)

    other = nn.Sequential(class_named("transformers.models.glm4.modeling_glm4.Glm4RMSNorm")(WIDTH))
    with pytest.warns(UserWarning, match=r"transformers\.models\.glm4\.modeling_glm4\.Glm4RMSNorm is not known"):
        assert ltx.optimize(other).left_alone["0"].endswith("Glm4RMSNorm is not known")


def class_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def test_layer_norms_of_transformers(ltx: ModuleType, device: str) -> None:
    """Falcon's are torch's."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": 99}
    torch.manual_seed(0)
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes)).to(device).eval().requires_grad_(False)
    ids = make_ids(device)
    stock = model(ids).logits
    report = ltx.optimize(model, level="norms")
    assert report.replaced == {"torch.LayerNorm": LAYERS + 1}
    assert_close(model(ids).logits, stock)
    assert report.fallbacks == {}


def class_named(name: str) -> Any:
    """A class of the installed transformers; None: it has no such class."""
    module, _, cls = name.rpartition(".")
    return getattr(importlib.import_module(module), cls, None) if importlib.util.find_spec(module) else None


def test_forms_hold(ltx: ModuleType, device: str) -> None:
    """Every class that is known as a norm computes what is known of it, and rounds where that says."""
    forms = ltx.integrations.transformers.norms.LANGUAGE_FORMS
    without_weight = "transformers.models.llama4.modeling_llama4.Llama4TextL2Norm"
    classes = {name: cls for name in forms if name != without_weight and (cls := class_named(name)) is not None}
    assert len(classes) > 15
    for name, cls in classes.items():
        norm = cls(WIDTH, eps=1e-3).to(device, torch.bfloat16)
        torch.manual_seed(3)
        norm.weight.normal_(0.5, 0.2)
        x = torch.randn(5, 9, WIDTH).to(device, torch.bfloat16)
        stock = norm(x)
        with ltx.optimize(norm, rounding="eager", strict=True) as report:
            assert (norm(x) != stock).double().mean() < 0.01, name
            assert report.sites[0].calls == 1
        with ltx.optimize(norm):
            differ = (norm(x) != stock).double().mean()
        assert differ > 0.05 if forms[name].twice else differ < 0.01, name
        other = ltx.rmsnorm(x, norm.weight, 1e-3, weight_offset=1.0 - forms[name].offset)
        assert (other != stock).double().mean() > 0.5, name


def test_a_weight_of_another_dtype(ltx: ModuleType, device: str) -> None:
    """GPT-OSS keeps its norms in float32: they cast their result, while Llama's would return float32."""
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(4)).to(device, torch.bfloat16)
    for name, runs in (("gpt_oss.modeling_gpt_oss.GptOssRMSNorm", 1), ("llama.modeling_llama.LlamaRMSNorm", 0)):
        norm = class_named(f"transformers.models.{name}")(WIDTH).to(device)
        nn.init.normal_(norm.weight, 1.0, 0.2)
        stock = norm(x)
        report = ltx.optimize(norm)
        ours = norm(x)
        assert ours.dtype == stock.dtype and (ours != stock).double().mean() < 0.01
        assert report.sites[0].calls == runs and len(report.fallbacks) == 1 - runs


# ---- Calls that the op cannot take


def test_other_calls_run_stock(ltx: ModuleType, device: str) -> None:
    ids = make_ids(device)
    for change, reason in (
        (lambda model: model.double(), "dtype torch.float64"),
        (lambda model: norms(model)[0].double(), "its weight has dtype torch.float64, the input torch.float32"),
    ):
        model = make_model(device)
        change(model)
        norm = norms(model)[0]
        x = model.model.embed_tokens(ids)
        stock = norm(x)
        report = ltx.optimize(model, level="norms")
        got = norm(x)
        assert torch.equal(got, stock) and got.dtype == torch.float64
        assert report.fallbacks == {"transformers.LlamaRMSNorm": {reason: 1}} and reason in str(report)
    model = make_model(device)
    with torch.autocast(device, torch.bfloat16):
        stock = model(ids).logits
        report = ltx.optimize(model, level="norms")
        assert torch.equal(model(ids).logits, stock)
    assert report.fallbacks == {
        "transformers.LlamaRMSNorm": {
            "autocast is on in torch.bfloat16, the input has dtype torch.float32": NORMS["Llama"]
        }
    }


# ---- What goes on around a model


@pytest.mark.host
def test_copies_and_files(ltx: ModuleType, device: str, tmp_path: Path) -> None:
    model, ids = make_model(device), make_ids(device)
    stock, keys = model(ids).logits, list(model.state_dict())
    parameters = [id(p) for p in model.parameters()]
    report = ltx.optimize(model, level="norms")
    assert list(model.state_dict()) == keys and [id(p) for p in model.parameters()] == parameters

    copied = copy.deepcopy(model)
    norms(copied)[0].weight.zero_()
    assert_close(model(ids).logits, stock)
    calls = report.sites[0].calls
    assert distance(copied(ids).logits, stock) > 0.1
    assert report.sites[0].calls == calls  # the copy counts its own
    ltx.restore(copied)
    assert not any("forward" in m.__dict__ for m in copied.modules())

    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).to(device).eval()
    assert torch.equal(loaded(ids).logits, stock)
    other = ltx.optimize(loaded, level="norms")
    report.restore()
    assert torch.equal(model(ids).logits, stock)
    assert_close(loaded(ids).logits, stock)
    assert other.sites[0].calls == NORMS["Llama"]


def test_offload(ltx: ModuleType, device: str) -> None:
    """accelerate keeps the forward that it wraps: `optimize` replaces that one."""
    accelerate = pytest.importorskip("accelerate")
    model, ids = make_model(device), make_ids(device)
    stock = model(ids).logits
    accelerate.cpu_offload(model, torch.device(device))
    report = ltx.optimize(model, level="norms")
    assert_close(model(ids).logits, stock)
    assert report.sites[0].calls == NORMS["Llama"] and report.fallbacks == {}
    report.restore()
    assert_close(model(ids).logits, stock)
    assert report.sites[0].calls == NORMS["Llama"]


# ---- The layers, through the functions of kernels


def run_kernelize(model: nn.Module, mapping: Any, mode: Mode = Mode.INFERENCE) -> None:
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=mode)


def replaced_by(layer: type[nn.Module], model: nn.Module) -> int:
    return sum(getattr(m.forward, "__func__", None) is layer.forward for m in model.modules())


@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=pytest.mark.extended if Mode.TORCH_COMPILE in m else []) for m in MODES], ids=str
)
@pytest.mark.parametrize("family", ["Llama", pytest.param("Qwen3", marks=pytest.mark.slow)])
def test_kernelize(ltx: ModuleType, device: str, family: str, mode: Mode) -> None:
    ids = make_ids(device)
    training = Mode.TRAINING in mode
    model = make_model(device, family=family).requires_grad_(training).train(training)
    stock, want = model(ids).logits, gradients(model, ids) if training else []
    run_kernelize(model, ltx.kernel_mapping(), mode)
    assert replaced_by(ltx.layers.RMSNorm, model) == NORMS[family]
    if Mode.TORCH_COMPILE in mode:
        model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert_close(model(ids, use_cache=False).logits, stock)
    if training:
        for got, expected in zip(gradients(model, ids), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        if Mode.TORCH_COMPILE not in mode:
            model.gradient_checkpointing_enable()
            for got, expected in zip(gradients(model, ids), want, strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_layer_rounds_once(ltx: ModuleType, device: str, dtype: torch.dtype) -> None:
    norm = make_model(device, dtype, rms_norm_eps=0.3).model.norm
    run_kernelize(norm, ltx.kernel_mapping())
    torch.manual_seed(2)
    x = torch.randn(3, 7, WIDTH).to(device, dtype)
    wide = x.double()
    truth = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 0.3) * norm.weight.double()
    assert_close_to_fp64(norm(x), truth, truth.abs())


def test_generation_with_layers(ltx: ModuleType, device: str) -> None:
    model, ids = make_model(device), make_ids(device)
    options = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    stock = model.generate(ids, **options)
    run_kernelize(model, ltx.kernel_mapping())
    assert torch.equal(model.generate(ids, **options), stock)


@pytest.fixture
def build(ltx: ModuleType, backend: str) -> Path:
    """The folder of the loaded variant."""
    if (backend == "cpu") != (torch.version.cuda is None):
        pytest.skip("NOT RUN: kernels takes the variant that goes with torch, and that is not the one under test")
    return Path(ltx.__file__).parent


REPOSITORIES: dict[str, Callable[[Path], Any]] = {
    "variant": lambda build: LocalLayerRepository(build, layer_name="RMSNorm"),
    "build": lambda build: LocalLayerRepository(build.parent, layer_name="RMSNorm"),
    "LOCAL_KERNELS": lambda build: LayerRepository(REPO_ID, layer_name="RMSNorm", revision="main"),
}


@pytest.mark.host
@pytest.mark.parametrize("where", REPOSITORIES)
def test_repositories(ltx: ModuleType, device: str, build: Path, where: str) -> None:
    """The same layer by a path, and by a name that LOCAL_KERNELS resolves without a network."""
    model, ids = make_model(device), make_ids(device)
    stock = model(ids).logits
    repository = REPOSITORIES[where](build)
    run_kernelize(model, {"RMSNorm": {device: repository}}, Mode.INFERENCE | Mode.TORCH_COMPILE)
    assert replaced_by(repository.load(), model) == NORMS["Llama"]
    assert repository.load() is ltx.layers.RMSNorm  # one build, one module, however it is named
    assert_close(model(ids).logits, stock)


@pytest.mark.host
def test_missing_layer_and_device(ltx: ModuleType, device: str, build: Path) -> None:
    model = make_model(device)
    with pytest.raises(ValueError, match="Layer `LayerNorm` not found"):
        run_kernelize(model, {"RMSNorm": {device: LocalLayerRepository(build, layer_name="LayerNorm")}})
    run_kernelize(model, {"RMSNorm": {"xpu": ltx.kernel_mapping()["RMSNorm"][device]}})
    assert replaced_by(ltx.layers.RMSNorm, model) == 0


def test_mapping(ltx: ModuleType, backend: str) -> None:
    used = set()
    for rounding in ("fp32", "eager"):
        mapping = ltx.kernel_mapping(rounding=rounding)
        assert {device for devices in mapping.values() for device in devices} == {backend}
        loaded = {repository.load() for devices in mapping.values() for repository in devices.values()}
        assert mapping == ltx.kernel_mapping(rounding=rounding) == copy.deepcopy(mapping)  # kernels does all of this
        assert len({hash(repository) for devices in mapping.values() for repository in devices.values()}) == len(loaded)
        used |= loaded
    packed = {getattr(ltx.layers, name) for name in PACKED}
    assert used | packed == {getattr(ltx.layers, name) for name in ltx.layers.__all__} and not used & packed
    for layer in used | packed:
        assert layer.has_backward and layer.can_torch_compile
        assert layer.__init__ is nn.Module.__init__
        assert set(dir(layer)) - set(dir(nn.Module)) == {"has_backward", "can_torch_compile"}
    with pytest.raises(ValueError, match='rounding: expected "fp32" or "eager", got \'no\''):
        ltx.kernel_mapping(rounding="no")


def decorated(name: str) -> dict[str, str]:
    """The forward of every class of the installed transformers that is decorated with a name for kernels."""
    found = {}
    for file in sorted((Path(transformers.__file__).parent / "models").rglob("modeling_*.py")):
        text = file.read_text()
        if f'use_kernel_forward_from_hub("{name}")' not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and any(f"('{name}')" in ast.unparse(d) for d in node.decorator_list):
                (forward,) = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "forward"]
                forward.returns = None
                found[f"{file.stem}.{node.name}"] = ast.unparse(forward)
    return found


def test_layer_fits_every_module_of_its_name() -> None:
    """Read in their sources: weight and variance_epsilon, rounded before the weight, after it, or both."""
    forwards = decorated("RMSNorm")
    assert len(forwards) > 100 and "modeling_llama.LlamaRMSNorm" in forwards
    returned = {
        "return self.weight * hidden_states.to(input_dtype)",
        "return (self.weight * hidden_states).to(input_dtype)",
        "return (self.weight.to(torch.float32) * hidden_states).to(input_dtype)",
    }
    for name, forward in forwards.items():
        lines = [line.strip() for line in forward.splitlines()]
        assert lines[0] in ("def forward(self, hidden_states: torch.Tensor):", "def forward(self, hidden_states):"), (
            name
        )
        assert lines[1:-1] == [
            "input_dtype = hidden_states.dtype",
            "hidden_states = hidden_states.to(torch.float32)",
            "variance = hidden_states.pow(2).mean(-1, keepdim=True)",
            "hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)",
        ], name
        assert lines[-1] in returned, name


def norm_module(name: str, cls: str, dtype: torch.dtype, device: str, **options: Any) -> Any:
    module = class_named(f"transformers.models.{name}.modeling_{name}.{cls}")
    if module is None or not TAKES_KERNELS:
        pytest.skip(f"NOT RUN: transformers {transformers.__version__} has no decorated {cls}")
    torch.manual_seed(5)
    norm = module(WIDTH, eps=0.3, **options).to(device, dtype)
    norm.weight.normal_(0.7, 0.2)
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_zero_centred_norm(ltx: ModuleType, device: str, dtype: torch.dtype) -> None:
    norm = norm_module("qwen3_5", "Qwen3_5RMSNorm", dtype, device)
    x = torch.randn(3, 7, WIDTH).to(device, dtype)
    stock = norm(x)
    run_kernelize(norm, ltx.kernel_mapping())
    assert replaced_by(ltx.layers.RMSNormZeroCentered, norm) == 1
    wide = x.double()
    truth = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 0.3) * (1 + norm.weight.double())
    assert_close_to_fp64(norm(x), truth, truth.abs())
    assert (norm(x) != stock).double().mean() < 0.01 or dtype == torch.float32


GATED_BY_SILU = [
    ("qwen3_next", "Qwen3NextRMSNormGated"),
    ("qwen3_5", "Qwen3_5RMSNormGated"),
    ("qwen3_5_moe", "Qwen3_5MoeRMSNormGated"),
]
GATED = [*GATED_BY_SILU[:2], ("kimi_linear", "KimiLinearRMSNormGated")]


@pytest.mark.parametrize("model, cls", GATED_BY_SILU)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_gated_norm_by_optimize(ltx: ModuleType, device: str, dtype: torch.dtype, model: str, cls: str) -> None:
    """In "eager" the class's bits, but for the order of sums."""
    norm = norm_module(model, cls, dtype, device)
    x, gate = torch.randn(2, 3, 7, WIDTH).to(device, dtype)
    stock, wide = norm(x, gate), x.double()
    truth = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 0.3) * norm.weight.double()
    truth = truth * torch.nn.functional.silu(gate.double())
    for rounding in ("fp32", "eager"):
        with ltx.optimize(norm, rounding=rounding, strict=True) as report:
            ours = norm(x, gate)
            assert report.sites[0].calls == 1 and report.fallbacks == {}
            assert distance(ours, truth) <= (1.0 if rounding == "fp32" else 1.01) * max(distance(stock, truth), 1e-7)
            if rounding == "eager" and dtype != torch.float32:
                assert (ours != stock).double().mean() < 0.01


@pytest.mark.host
def test_gated_norms_that_run_stock(ltx: ModuleType, device: str) -> None:
    norm = norm_module("qwen3_5", "Qwen3_5RMSNormGated", torch.bfloat16, device)
    x, gate = torch.randn(2, 3, 7, WIDTH).to(device, torch.bfloat16)
    cases = {"dtype torch.float32": (x, gate.float()), "its gate has another shape than its input": (x, gate[:1])}
    for reason, inputs in cases.items():
        stock = norm(*inputs)
        with ltx.optimize(norm) as report:
            assert torch.equal(norm(*inputs), stock)
            assert reason in str(report.fallbacks)
    norm.activation = "gelu"
    stock = norm(x, gate)
    with ltx.optimize(norm) as report:
        assert torch.equal(norm(x, gate), stock)
        assert "its activation is gelu" in str(report.fallbacks)
    del norm.activation  # as in transformers 5.14, whose class knows SiLU alone
    with ltx.optimize(norm) as report:
        assert norm(x, gate).shape == x.shape and report.fallbacks == {}


@pytest.mark.parametrize("model, cls", GATED)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_gated_norm(ltx: ModuleType, device: str, dtype: torch.dtype, model: str, cls: str) -> None:
    norm = norm_module(model, cls, dtype, device)
    x, gate = torch.randn(2, 3, 7, WIDTH).to(device, dtype)
    stock = norm(x, gate)
    run_kernelize(norm, ltx.kernel_mapping())
    assert replaced_by(ltx.layers.RMSNormGated, norm) == 1
    wide, activate = x.double(), torch.nn.functional.silu if norm.activation == "silu" else torch.sigmoid
    truth = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 0.3) * norm.weight.double()
    truth = truth * activate(gate.double())
    assert_close(norm(x, gate), stock)
    assert distance(norm(x, gate), truth) <= 1.1 * max(distance(stock, truth), 1e-7)
    assert distance(norm(x, 2 * gate), truth) > 0.1
    norm.activation = "relu"
    with pytest.raises(ValueError, match='activation: expected "silu", "swish" or "sigmoid", got \'relu\''):
        norm(x, gate)


# One rotates interleaved pairs, the other one backwards: docs/layers.md says to leave them out.
OTHER_ROTARY = {"modeling_openai_privacy_filter", "modeling_nanochat"}  # transformers 5.24.0 does not decorate the last


def test_every_rotary_function_turns_halves() -> None:
    """What the layer computes is what each decorated function means, by the function that turns for it."""
    x, cos, sin = torch.randn(2, 8), torch.randn(4), torch.randn(4)
    (a, b), found = x.chunk(2, -1), {}
    for file in sorted((Path(transformers.__file__).parent / "models").rglob("modeling_*.py")):
        text = file.read_text()
        if '"rotary_pos_emb"' not in text:
            continue
        nodes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
        rotary = nodes["apply_rotary_pos_emb"]
        assert [a.arg for a in rotary.args.args] == ["q", "k", "cos", "sin", "unsqueeze_dim"], file.name
        turn = nodes.get("rotate_half") or nodes["_apply_rotary_emb"]
        made: dict[str, Any] = {"torch": torch}
        exec(ast.unparse(turn), made)
        if turn.name == "rotate_half":
            found[file.stem] = torch.equal(made[turn.name](x), torch.cat((-b, a), -1))
        else:
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
            found[file.stem] = torch.allclose(made[turn.name](x, cos, sin), turned)
    assert len(found) > 100 and found["modeling_llama"]
    assert {name for name, fits in found.items() if not fits} == OTHER_ROTARY & found.keys()


@through_transformers
@pytest.mark.parametrize("rounding", ["fp32", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("heads_dim", [1, 2])
def test_rotary_function(ltx: ModuleType, device: str, heads_dim: int, dtype: torch.dtype, rounding: str) -> None:
    """Through kernelize, which reaches the function by the attention that it is attached to."""
    llama = sys.modules["transformers.models.llama.modeling_llama"]
    model, function = make_model(device, dtype), llama.apply_rotary_pos_emb
    torch.manual_seed(6)
    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16)
    if heads_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    q, k = q.to(device, dtype), k.to(device, dtype)
    angles = torch.randn(2, 9, 8).repeat(1, 1, 2)
    tables = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    stock = function(q, k, *tables, unsqueeze_dim=heads_dim)
    truth = function(q.double(), k.double(), *(t.double() for t in tables), unsqueeze_dim=heads_dim)
    run_kernelize(model, ltx.kernel_mapping(rounding=rounding))
    layer = ltx.layers.RotaryPosEmbEager if rounding == "eager" else ltx.layers.RotaryPosEmb
    assert function.forward.__func__ is layer.forward
    for got, want, exact, x in zip(function(q, k, *tables, heads_dim), stock, truth, (q, k), strict=True):
        assert got.dtype == dtype and got.stride() == x.stride()
        if rounding == "eager":
            assert_close_to_eager(got, want)
        else:
            assert_close_to_fp64(got, exact, 2 * x.double().abs().amax(-1, keepdim=True))
    halves = tuple(t[..., :8] for t in tables)  # as GPT-OSS has them
    for got, want in zip(function(q, k, *halves, heads_dim), function(q, k, *tables, heads_dim), strict=True):
        assert torch.equal(got, want)
    with torch.enable_grad():
        leaf = q.clone().requires_grad_(True)
        (grad,) = torch.autograd.grad(function(leaf, k, *tables, heads_dim)[0].float().square().sum(), leaf)
    torch.testing.assert_close(grad.float(), 2 * q.float(), rtol=0.1, atol=0.1)  # a rotation keeps lengths


@through_transformers
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize(
    "name", ["gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python", "silu", "quick_gelu"]
)
def test_activations(ltx: ModuleType, device: str, name: str, dtype: torch.dtype) -> None:
    from transformers.activations import ACT2FN

    module = copy.deepcopy(ACT2FN[name])
    torch.manual_seed(4)
    x = (torch.randn(5, 33, 64) * 3).to(device, dtype)
    stock, truth = module(x), copy.deepcopy(module)(x.double())
    with use_kernel_mapping(ltx.kernel_mapping(), inherit_mapping=False):
        kernelize(module, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device=device, use_fallback=False)
    ours = module(x)
    assert_close_to_fp64(ours, truth, x.double().abs(), eager=lambda: stock)
    with torch.enable_grad():
        leaf = x.clone().requires_grad_(True)
        (got,) = torch.autograd.grad(module(leaf).sum(), leaf)
        wide = x.double().requires_grad_(True)
        (want,) = torch.autograd.grad(type(module).forward(module, wide).sum(), wide)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.host
def test_own_modules(ltx: ModuleType, device: str) -> None:
    """A user's class with the same attributes, decorated or not."""

    @kernels.use_kernel_forward_from_hub("RMSNorm")
    class Decorated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((WIDTH,), 3.0))
            self.variance_epsilon = 0.5

        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("this forward was to be replaced")

    norm = Decorated().to(device)
    run_kernelize(norm, ltx.kernel_mapping())
    x = torch.randn(4, WIDTH, device=device)
    truth = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 0.5) * 3
    assert_close_to_fp64(norm(x), truth, truth.abs())

    class Gated(nn.Module):  # takes something else: kernels refuses
        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            return x * gate

    kernels.replace_kernel_forward_from_hub(Gated, "RMSNorm")
    repository = {"RMSNorm": {device: type(ltx.kernel_mapping()["RMSNorm"][device])(type("RMSNorm", (nn.Module,), {
        "forward": ltx.layers.RMSNorm.forward, "has_backward": True, "can_torch_compile": True,
    }))}}  # fmt: skip
    with pytest.raises(TypeError, match="different number of arguments"), use_kernel_mapping(repository):
        kernelize(Gated(), mode=Mode.INFERENCE, device=device)


def test_optimize_and_kernelize(ltx: ModuleType, device: str) -> None:
    """Either way round: what came later does not run twice, and `restore` takes away nothing of kernelize's."""
    ids = make_ids(device)
    model = make_model(device)
    stock = model(ids).logits
    report = ltx.optimize(model, level="norms")
    run_kernelize(model, ltx.kernel_mapping())
    assert_close(model(ids).logits, stock)
    assert report.sites[0].calls == 0 and replaced_by(ltx.layers.RMSNorm, model) == NORMS["Llama"]
    report.restore()
    assert replaced_by(ltx.layers.RMSNorm, model) == NORMS["Llama"]
    with pytest.warns(UserWarning, match="its forward is patched already"):
        assert set(ltx.optimize(model, level="norms").left_alone.values()) == {"its forward is patched already"}
    assert_close(model(ids).logits, stock)

    model = make_model(device)
    run_kernelize(model, {})  # puts every stock forward where it would put a layer's
    report = ltx.optimize(model, level="norms", strict=True)
    assert_close(model(ids).logits, stock)
    assert report.sites[0].calls == NORMS["Llama"]


# ---- Through transformers


@pytest.fixture
def transformers_takes_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """KernelConfig has a list of devices without the CPU."""
    config = importlib.import_module("transformers.utils.kernel_config")
    monkeypatch.setattr(config, "KERNELS_SUPPORTED_DEVICE_TYPES", [*config.KERNELS_SUPPORTED_DEVICE_TYPES, "cpu"])


@pytest.mark.host
@through_transformers
@pytest.mark.usefixtures("transformers_takes_cpu")
def test_kernel_config_of_a_folder(ltx: ModuleType, device: str, build: Path) -> None:
    """KernelConfig({"RMSNorm": "folder:RMSNorm"}, use_local_kernel=True), for a model that exists."""
    model, ids = make_model(device), make_ids(device)
    stock = model(ids).logits
    config = KernelConfig({"RMSNorm": f"{build.parent}:RMSNorm"}, use_local_kernel=True)
    model.set_use_kernels(True, config)
    assert model.use_kernels and replaced_by(ltx.layers.RMSNorm, model) == NORMS["Llama"]
    assert_close(model(ids).logits, stock)


@pytest.mark.host
@through_transformers
@pytest.mark.usefixtures("transformers_takes_cpu")
def test_kernel_config_of_a_repository(ltx: ModuleType, device: str, build: Path, tmp_path: Path) -> None:
    """from_pretrained(..., use_kernels=True) with a repository; LOCAL_KERNELS says where it is."""
    model, ids = make_model(device), make_ids(device)
    model.save_pretrained(tmp_path)
    repository = f"{REPO_ID}:RMSNorm", {"revision": "main", "trust_remote_code": True}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, device_map=device, use_kernels=True,
        kernel_config=KernelConfig({"RMSNorm": repository}, inherit_mapping=False),
    )  # fmt: skip
    assert loaded.use_kernels and replaced_by(ltx.layers.RMSNorm, loaded) == NORMS["Llama"]
    assert_close(loaded(ids).logits, model(ids).logits)


@pytest.mark.host
@through_transformers
def test_kernel_config_of_the_mapping(ltx: ModuleType, device: str) -> None:
    """What is loaded already, on any device; and it stays through train() and eval()."""
    model, ids = make_model(device), make_ids(device)
    stock = model(ids).logits
    model.kernel_config = KernelConfig(ltx.kernel_mapping(), inherit_mapping=False)
    hub_kernels.kernelize(model)
    for _ in range(2):
        assert model.use_kernels and replaced_by(ltx.layers.RMSNorm, model) == NORMS["Llama"]
        assert_close(model(ids).logits, stock)
        model.train().eval()


def forget_packed_layers() -> None:
    """transformers keeps what KernelConfig patched for the whole process."""
    from transformers import conversion_mapping, monkey_patching

    monkey_patching.clear_patch_mapping()
    conversion_mapping._checkpoint_conversion_mapping_cache = None
    conversion_mapping.USER_REGISTERED_MAPPINGS.clear()


@pytest.fixture
def stock_classes():
    """A packed layer also stays in its model class's list of layers to note outputs of, from where stock ones go."""
    noted = [getattr(transformers, f"{family}Model")._can_record_outputs for family in (*NORMS, "Gemma")]
    stock = copy.deepcopy(noted)
    yield
    forget_packed_layers()
    for recorders, content in zip(noted, stock):
        recorders.update(content)


NORM_AND_MLP = (
    ("RMSNorm", "model.layers.*.post_attention_layernorm"),
    ("MLP", "model.layers.*.mlp"),
)


@through_transformers
@pytest.mark.usefixtures("transformers_takes_cpu", "build", "stock_classes")
@pytest.mark.parametrize(
    "family, key, layer",
    [
        ("Llama", "LlamaMLP", "SwiGLUMLP"),
        ("Qwen3", "Qwen3MLP", "SwiGLUMLP"),
        ("Gemma", "GemmaMLP", "GeGLUMLP"),
        ("Llama", NORM_AND_MLP, "RMSNormSwiGLUMLP"),
        ("Mistral", NORM_AND_MLP, "RMSNormSwiGLUMLP"),
    ],
)
def test_packed_layers(ltx: ModuleType, device: str, tmp_path: Path, family: str, key: Any, layer: str) -> None:
    """Built into the model from the stock checkpoint, twice in one process; what it saves is a stock checkpoint."""
    from safetensors.torch import load_file

    options = {"mlp_bias": True} if family == "Llama" else {}
    model, ids = make_model(device, family=family, **options), make_ids(device)
    model.save_pretrained(tmp_path / "stock")
    repository = f"{REPO_ID}:{layer}", {"revision": "main", "trust_remote_code": True}
    for _ in range(2):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "stock", dtype=torch.float32, device_map=device, use_kernels=True,
            kernel_config=KernelConfig({key: repository}, inherit_mapping=False),
        )  # fmt: skip
        assert replaced_by(getattr(ltx.layers, layer), loaded) == LAYERS
        assert sum("gate_up_proj.weight" in name for name, _ in loaded.named_parameters()) == LAYERS
        assert_close(loaded(ids).logits, model(ids).logits)
    assert torch.equal(
        loaded.generate(ids, max_new_tokens=8, do_sample=False), model.generate(ids, max_new_tokens=8, do_sample=False)
    )
    loaded.save_pretrained(tmp_path / "again")
    want, got = (load_file(tmp_path / name / "model.safetensors") for name in ("stock", "again"))
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)
    got, want = gradients(loaded.requires_grad_(True), ids), gradients(model.requires_grad_(True), ids)
    assert sum(g.double().square().sum() for g in got).item() == pytest.approx(
        sum(g.double().square().sum() for g in want).item(), rel=1e-4
    )


@through_transformers
@pytest.mark.usefixtures("transformers_takes_cpu", "build", "stock_classes")
def test_packed_layer_of_another_activation(device: str, tmp_path: Path) -> None:
    make_model(device, family="Gemma").save_pretrained(tmp_path)
    repository = f"{REPO_ID}:SwiGLUMLP", {"revision": "main", "trust_remote_code": True}
    with pytest.raises(ValueError, match='SwiGLUMLPLayout: expected a model whose activation is one of "silu"'):
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, kernel_config=KernelConfig({"GemmaMLP": repository}, inherit_mapping=False), use_kernels=True
        )


@through_transformers
def test_transformers_mends_local_kernels_in_from_pretrained(build: Path, tmp_path: Path) -> None:
    """A fault of transformers 5.22.2: docs/layers.md tells of it. Should this fail, it is mended."""
    make_model("cpu").save_pretrained(tmp_path)
    config = KernelConfig({"RMSNorm": f"{build.parent}:RMSNorm"}, use_local_kernel=True)
    hub_kernels.register_kernel_replacements_and_fusions(
        transformers.LlamaForCausalLM, transformers.LlamaConfig(), config
    )
    assert isinstance(config.kernel_mapping["RMSNorm"], tuple)  # where create_compatible_mapping expects a string


# ---- The page


@pytest.mark.host
@through_transformers
@pytest.mark.usefixtures("transformers_takes_cpu", "stock_classes")
def test_docs(ltx: ModuleType, device: str, build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python block of docs/layers.md, in their order, with a small model in the place of the real one."""
    text = (ROOT / "docs" / "layers.md").read_text()
    if transformers.__version__ in text:
        assert f"each of the {len(decorated('RMSNorm'))} classes" in text
    for name in ltx.kernel_mapping():
        assert f"`{name}`" in text
    for name in ltx.layers.__all__:
        assert f"`{name}`" in text
    make_model(device, torch.bfloat16, "Qwen3").save_pretrained(tmp_path / "model")
    (tmp_path / "build").symlink_to(build.parent)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ltx_fused", ltx)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(
            block.replace("Qwen/Qwen3-0.6B", "model")
            .replace('"cuda"', repr(device))
            .replace("org/ltx-kernels", REPO_ID),
            names,
        )
        (packed,) = re.findall(r":(\w*MLP)", block) or [""]
        if packed:
            assert replaced_by(getattr(ltx.layers, packed), names["model"]) == LAYERS, block
            forget_packed_layers()
            continue
        replaced = replaced_by(ltx.layers.RMSNorm, names["model"])
        if "kernelize" in block or "set_use_kernels" in block or "use_kernels=True" in block:
            assert replaced == NORMS["Qwen3"], block
            names["model"] = transformers.AutoModelForCausalLM.from_pretrained("model").to(device)
        else:
            assert replaced == 0
    assert all(site.calls for site in names["report"].sites) and names["report"].fallbacks == {}
    for mapping in (names["by_path"], names["by_name"]):
        assert mapping["RMSNorm"][device].load() is ltx.layers.RMSNorm
