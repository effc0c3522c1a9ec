"""Adapters in training beside weights that are in fp8 and frozen."""

from __future__ import annotations

import copy
import functools
import statistics
import types
import weakref
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")
from helpers.language_models import make_ids  # noqa: E402
from test_families import FAMILIES, cast, make  # noqa: E402
from test_replay_gradients import assert_same, calls, kind, not_recorded, replay  # noqa: E402, F401
from test_training import blocks_of, exact_step, step, step_under, with_adapters  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "fp8_device", "without_cudnn_attention")

BF16 = torch.bfloat16
LINEAR = "torch.Linear"
# Cross-attention; two streams and one; an MLP beside attention in one layer; gates of heads; SwiGLU; GEGLU.
TRAINED = ("ltx", "flux", "flux2", "wan-t2v", "qwenimage", "ltx2", "z_image", "basic_transformer")
STOCK_WEIGHTS = ("beside", "cpu", "free")


def layers_of(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The layers whose weights are in fp8."""
    return [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear and "ltx_fp8_scales" in m._buffers]


def dequantised(ltx: ModuleType, linear: nn.Linear) -> Tensor:
    """The weight that a layer's fp8 values stand for, in float64."""
    values, scales = ltx.integrations.linear.fp8_weights.quantised_weight(linear)
    return values.double() * scales.double()[:, None]


def plain_forward(ltx: ModuleType, self: nn.Linear, input: Tensor) -> Tensor:
    """The layer as a plain torch program in bfloat16: of rounded rows, which count as the input itself."""
    values, scales = ltx.quantize_rows(input.detach())
    rounded = (values.float() * scales).to(input.dtype)
    return nn.functional.linear(input + (rounded - input).detach(), self.weight, self.bias)


def as_fp8(ltx: ModuleType, model: nn.Module, optimized: nn.Module, plain: bool) -> nn.Module:
    """Gives a stock model the weights of an optimized one, brought back from fp8."""
    for name, linear in layers_of(optimized):
        layer = model.get_submodule(name)
        layer.weight.data = dequantised(ltx, linear).to(layer.weight.dtype)
        if plain:
            layer.forward = types.MethodType(functools.partial(plain_forward, ltx), layer)
    return model


def assert_as_exact(ours: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Compares the errors of both programs against float64: on average ours is at most 1.3 times the plain one's.

    A few rows that round to other fp8 values move all gradients, by chance: 1.2 times as far, or 0.9 times, with other
    inputs, and one small tensor by 5 times.
    """
    assert ours.keys() == plain.keys() == exact.keys() and ours
    ratios = []
    for name, want in exact.items():
        if want.any():  # else the result does not depend on it
            mine, theirs = (((got[name].double() - want).norm() / want.norm()).item() for got in (ours, plain))
            assert mine < 8 * theirs, name
            ratios.append(mine / theirs)
    assert statistics.geometric_mean(ratios) < 1.3


def fallbacks(report: Any) -> dict[str, dict[str, int]]:
    """The stock calls of blocks and linear layers. A norm outside of blocks may run stock."""
    return {name: of for name, of in report.fallbacks.items() if not name.endswith("Norm")}


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_of_adapters(ltx: ModuleType, device: str, name: str) -> None:
    """Against a float64 model with the weights that fp8 stands for, as near as a plain torch program in bfloat16."""
    family = FAMILIES[name]
    stock = with_adapters(make(family, device, BF16), family)
    model = copy.deepcopy(stock)
    report = ltx.optimize(model, precision="fp8", stock_weights="free")
    assert len(layers_of(model)) == family.fp8
    reference = as_fp8(ltx, copy.deepcopy(stock), model, False).double()
    plain_model = as_fp8(ltx, stock, model, True)
    grads: tuple[dict[str, Tensor], ...] = ({}, {}, {})
    for batch in (1, 2):
        inputs = cast(family.inputs(batch), device, BF16)
        found = [exact_step(reference, inputs)]
        for each in (plain_model, model):
            with torch.autocast(device, BF16):
                found.append(step(each, inputs)[1])
        for all_of_one, one in zip(grads, found):
            all_of_one |= {f"{batch} {key}": grad for key, grad in one.items()}
    exact, plain, ours = grads
    for site in blocks_of(report, family):
        assert site.fallbacks == {} and site.calls == site.gradients == 2 * family.blocks[site.name]
    assert LINEAR not in report.fallbacks
    assert_as_exact(ours, plain, exact)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_language_models(ltx: ModuleType, device: str, name: str) -> None:
    pytest.importorskip("transformers")
    from test_language_models import CASES
    from test_language_models import make as make_language_model

    ids = make_ids(device, 48)
    stock = make_language_model(CASES[name], device, BF16)
    torch.manual_seed(3)
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    stock = peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False), stock)
    for parameter_name, parameter in stock.named_parameters():
        parameter.requires_grad_("lora_" in parameter_name)

    def gradients(model: Any) -> dict[str, Tensor]:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    model = copy.deepcopy(stock)
    report = ltx.optimize(model, precision="fp8", stock_weights="free")
    assert len(layers_of(model)) == CASES[name].fp8
    exact = gradients(as_fp8(ltx, copy.deepcopy(stock), model, False).double())
    plain = gradients(as_fp8(ltx, stock, model, True))
    ours = gradients(model)
    assert fallbacks(report) == {}
    assert_as_exact(ours, plain, exact)


# ---- One group of layers


def group(
    ltx: ModuleType, device: str, adapted: tuple[int, ...], biases: bool = True, **config: Any
) -> tuple[list[nn.Module], Any]:
    """(query, key and value of an attention in fp8, some with adapters, their `Linears` with gradients)."""
    family = FAMILIES["ltx"]
    model: Any = make(family, device, BF16)
    attention = model.transformer_blocks[0].attn1
    for number, name in enumerate(("to_q", "to_k", "to_v")):  # scales that differ by far, so that each has its place
        layer = getattr(attention, name)
        layer.weight.data *= 2.0 ** (torch.arange(layer.out_features, device=device)[:, None] % 5 + number)
        layer.bias = layer.bias if biases else None
    targets = [f"transformer_blocks.0.attn1.to_{'qkv'[i]}" for i in adapted]
    torch.manual_seed(3)
    if targets:
        options = {"r": 8, "lora_alpha": 12, "init_lora_weights": False, **config}
        model.add_adapter(peft.LoraConfig(target_modules=targets, **options))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    ltx.optimize(model, precision="fp8", stock_weights="free")
    modules = [getattr(attention, name) for name in ("to_q", "to_k", "to_v")]
    x = torch.zeros(1, modules[0].in_features, dtype=BF16, device=device)
    return modules, lambda: ltx.integrations.linear.linears.Linears(modules, x, attention._ltx_kernels)


def near(got: Tensor | None, want: Tensor, bound: float = 2**-8) -> bool:
    return got is not None and bool((got.double() - want).norm() <= bound * want.norm())


@pytest.mark.parametrize("adapted", [(), (0,), (0, 1, 2)], ids=["bare", "one", "all"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "apart"])
@pytest.mark.parametrize("biases", [True, False], ids=["biases", "none"])
def test_gradients_of_layers(
    ltx: ModuleType, device: str, adapted: tuple[int, ...], packed: bool, biases: bool
) -> None:
    """Within bfloat16's rounding of float64, of products with adapters and without; the workspace is freed."""
    modules, make_linears = group(ltx, device, adapted, biases)
    bases = [getattr(module, "base_layer", module) for module in modules]
    if not packed:
        for base in bases:
            base._buffers["ltx_fp8_scales"] = base._buffers["ltx_fp8_scales"].clone()
            base.weight.data = base.weight.data.clone()
    linears = make_linears()
    assert linears.scaled and not linears.fp8 and linears.packed == packed
    torch.manual_seed(4)
    x = torch.randn(2, 5, bases[0].in_features, device=device).to(BF16).requires_grad_()
    outputs, saved = [], []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outputs = linears(x)
    if not adapted:  # the fp8 weights alone
        assert all(tensor.dtype == torch.float8_e4m3fn or tensor.dim() == 1 for tensor in saved)
    dys = [torch.randn_like(output) for output in outputs]
    seen: list[Any] = []
    frozen = ltx.integrations.linear.frozen.Layers
    stock = frozen.full_weight

    def full_weight(self: Any, dtype: torch.dtype) -> Tensor:
        weight = stock(self, dtype)
        seen.append(weakref.ref(weight))
        return weight

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frozen, "full_weight", full_weight)
        torch.autograd.backward(outputs, dys)
    assert len(seen) == (1 if packed else 3) and all(weight() is None for weight in seen)
    exact_x = x.detach().double().requires_grad_()
    wanted = []
    for i, base in enumerate(bases):
        want = nn.functional.linear(exact_x, dequantised(ltx, base))
        if i in adapted:
            parts = [getattr(modules[i], name)["default"].weight for name in ("lora_A", "lora_B")]
            down, up = (part.detach().double().requires_grad_() for part in parts)
            wanted.append((parts, (down, up)))
            want = want + 1.5 * nn.functional.linear(nn.functional.linear(exact_x, down), up)
        (want * dys[i].double()).sum().backward(retain_graph=True)
    assert exact_x.grad is not None and near(x.grad, exact_x.grad)
    for parts, leaves in wanted:
        assert all(near(part.grad, leaf.grad, 2**-7) for part, leaf in zip(parts, leaves))


def test_trained_biases(ltx: ModuleType, device: str) -> None:
    """Of layers with an adapter and without; a bias of several layers in one product would have no gradient."""
    modules, make_linears = group(ltx, device, (0,))
    bases = [getattr(module, "base_layer", module) for module in modules]
    for base in bases:
        base.bias.requires_grad_()
    linears = make_linears()
    assert linears.scaled and not linears.packed
    x = torch.randn(7, bases[0].in_features, device=device).to(BF16)
    outputs = linears(x)
    dys = [torch.randn_like(output) for output in outputs]
    torch.autograd.backward(outputs, dys)
    assert all(near(base.bias.grad, dy.double().sum(0)) for base, dy in zip(bases, dys))
    bases[1].bias.grad = None
    bases[1](x).backward(dys[1])  # the layer's own forward
    assert near(bases[1].bias.grad, dys[1].double().sum(0))


def test_an_infinity_reaches_the_input(ltx: ModuleType, device: str) -> None:
    """In its row and in no other, so that a scaler of gradients sees it."""
    modules, make_linears = group(ltx, device, ())
    x = torch.randn(3, modules[0].in_features, device=device).to(BF16).requires_grad_()
    (query, *_) = make_linears()(x)
    dy = torch.randn_like(query)
    dy[1, 0] = torch.inf
    query.backward(dy)
    assert x.grad is not None
    assert x.grad[[0, 2]].isfinite().all() and not x.grad[1].isfinite().any()


def test_what_an_input_does_not_need_is_not_computed(ltx: ModuleType, device: str) -> None:
    """In the first block the input needs no gradient: no weight is brought back for it."""
    modules, make_linears = group(ltx, device, (0, 1, 2))
    x = torch.randn(3, modules[0].base_layer.in_features, device=device).to(BF16)
    outputs = make_linears()(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ltx.integrations.linear.frozen.Layers, "full_weight", lambda *_: pytest.fail("a weight is made"))
        sum(output.float().sum() for output in outputs).backward()
    assert all(module.lora_A["default"].weight.grad is not None for module in modules)


@pytest.mark.parametrize("rows", [2, 20], ids=["few", "many"])
def test_weights_alone(ltx: ModuleType, device: str, rows: int) -> None:
    """memory="low": the modulation's layers, as a trained embedding of the timestep reads them."""
    model = make(FAMILIES["flux"], device, BF16).requires_grad_(False)
    report = ltx.optimize(model, memory="low")
    weight_only = ltx.integrations.linear.weight_only.WEIGHT_ONLY
    linear = next(m for _, m in layers_of(model) if m._ltx_kernels.entry is weight_only)
    linear.bias.requires_grad_()
    x = torch.randn(rows, linear.in_features, device=device).to(BF16).requires_grad_()
    output = linear(x)
    dy = torch.randn_like(output)
    output.backward(dy)
    assert near(x.grad, dy.double() @ dequantised(ltx, linear)) and near(linear.bias.grad, dy.double().sum(0))
    assert report.fallbacks == {}


# ---- Whole steps


def test_stock_weights_make_no_difference(ltx: ModuleType, device: str) -> None:
    family = FAMILIES["ltx"]
    found = []
    for stock_weights in STOCK_WEIGHTS:
        model = with_adapters(make(family, device, BF16), family)
        inputs = cast(family.inputs(2), device, BF16)
        report = ltx.optimize(model, precision="fp8", stock_weights=stock_weights)
        found.append(step_under(device, BF16, model, inputs))
        assert fallbacks(report) == {}
    for other in found[1:]:
        assert_same(other, found[0])


@pytest.mark.parametrize("kind_of_adapters", ["float32", "float32, no autocast", "dropout", "dora", "bias"])
def test_kinds_of_adapters(ltx: ModuleType, device: str, kind_of_adapters: str) -> None:
    """What peft computes, or torch in peft's order, reads the same products."""
    family = FAMILIES["ltx"]
    config: dict[str, Any] = {
        "dropout": {"lora_dropout": 0.3},
        "dora": {"use_dora": True},
        "bias": {"lora_bias": True},
    }.get(kind_of_adapters, {})
    stock, inputs = with_adapters(make(family, device, BF16), family, **config), cast(family.inputs(2), device, BF16)
    if kind_of_adapters.startswith("float32"):
        for name, parameter in stock.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
    model = copy.deepcopy(stock)
    # DoRA brings the stock weights back, in the place of those that autograd has just saved.
    stock_weights = "cpu" if kind_of_adapters == "dora" else "free"
    report = ltx.optimize(model, precision="fp8", stock_weights=stock_weights)
    as_fp8(ltx, stock, model, True)
    autocast = torch.float32 if kind_of_adapters == "float32, no autocast" else BF16
    for each in (stock, model):
        each.train()
    torch.manual_seed(5)
    _, want = step_under(device, autocast, stock, inputs)
    torch.manual_seed(5)
    _, got = step_under(device, autocast, model, inputs)
    assert fallbacks(report) == {}
    assert got.keys() == want.keys()
    # Two programs in bfloat16, which round the same rows to fp8, differ by how they round before.
    errors = [((got[name] - want[name]).norm() / want[name].norm()).item() for name in want]
    assert max(errors) < 0.2 and sum(errors) / len(errors) < 0.1


@pytest.mark.parametrize("name", ["ltx", "flux"])
@pytest.mark.parametrize("stock_weights", ["beside", "free"])
def test_checkpoints(ltx: ModuleType, device: str, name: str, stock_weights: str) -> None:
    """The bits of a step without them: the second run rounds to the same fp8 values."""
    family = FAMILIES[name]
    model, inputs = with_adapters(make(family, device, BF16), family), cast(family.inputs(2), device, BF16)
    report = ltx.optimize(model, precision="fp8", stock_weights=stock_weights)
    want = step_under(device, BF16, model, inputs)
    model.enable_gradient_checkpointing(functools.partial(checkpoint, use_reentrant=False))
    for _ in range(3):  # ordinary calls, and recorded ones
        assert_same(step_under(device, BF16, model, inputs), want)
    assert fallbacks(report) == {}
    assert all(site.fallbacks == {} and site.recomputed for site in blocks_of(report, family))


@pytest.mark.parametrize("name", ["ltx", "flux", "wan-t2v"])
def test_recorded_steps(
    ltx: ModuleType,
    replay: ModuleType,  # noqa: F811
    kind: Any,  # noqa: F811
    device: str,
    name: str,
) -> None:
    """The bits and counts of steps that are not recorded; also of adapters that an optimizer writes to."""
    family = FAMILIES[name]
    stock, inputs = with_adapters(make(family, device, BF16), family), cast(family.inputs(2), device, BF16)
    found = []
    for recorded in (False, True):
        model = copy.deepcopy(stock)
        report = ltx.optimize(model, precision="fp8", stock_weights="free")
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        steps = []
        for _ in range(4):
            if recorded:
                steps.append(step_under(device, BF16, model, inputs))
            else:
                with not_recorded(replay):
                    steps.append(step_under(device, BF16, model, inputs))
            optimizer.step()
        counts = {site.name: (site.calls, site.gradients, dict(site.remarks)) for site in report.sites}
        found.append((steps, counts))
    recordings = calls(replay, model)
    assert recordings and all(isinstance(call, kind) for call in recordings), recordings
    assert found[0][1] == found[1][1]
    for one, other in zip(found[1][0], found[0][0]):
        assert_same(one, other)


def test_steps_and_validations_in_turn(ltx: ModuleType, device: str) -> None:
    """A validation between steps has about the loss of a step, although fused ops quantise in it."""
    family = FAMILIES["ltx"]
    model, inputs = with_adapters(make(family, device, BF16), family), cast(family.inputs(2), device, BF16)
    report = ltx.optimize(model, precision="fp8", stock_weights="free")
    losses = []
    for _ in range(3):
        losses.append(step(model, inputs)[0])
        with torch.inference_mode():
            outputs = model(**inputs, return_dict=False)
        losses.append(torch.stack([output.double().square().mean() for output in outputs]).sum())
    assert max(losses) < 1.05 * min(losses) and fallbacks(report) == {}


def test_weights_that_are_trained(ltx: ModuleType, device: str) -> None:
    """Stock where the stock weight is there; where it is not the report says that it gets no gradient."""
    family = FAMILIES["ltx"]
    inputs = cast(family.inputs(1), device, BF16)
    for stock_weights in STOCK_WEIGHTS:
        model = with_adapters(make(family, device, BF16), family)
        report = ltx.optimize(model, precision="fp8", stock_weights=stock_weights)
        weight = model.transformer_blocks[0].ff.net[2].weight.requires_grad_()
        step(model, inputs)
        if stock_weights == "beside":
            assert weight.grad is not None and weight.grad.any()
            assert fallbacks(report) == {LINEAR: {"a gradient of its weight is needed": 1}}
        else:
            assert weight.grad is None and fallbacks(report) == {}
            assert "no gradients of weights that are in fp8 alone or in the host's memory, torch.Linear, 1 x" in str(
                report
            )


@pytest.mark.parametrize("reentrant", [None, True], ids=["whole", "reentrant"])
def test_a_validation_after_steps_of_a_fused_optimizer(ltx: ModuleType, device: str, reentrant: bool | None) -> None:
    """A fused optimizer changes a weight but not its version. The old fp8 weights must not be read any more."""
    family = FAMILIES["ltx"]
    inputs = cast(family.inputs(2), device, BF16)
    inputs["hidden_states"].requires_grad_()
    stock = make(family, device, BF16)
    ours = copy.deepcopy(stock)
    ltx.optimize(ours, precision="fp8", stock_weights="beside")
    found = []
    for model in (stock, ours):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("attn1.to_" in name or "ff.net" in name)
        if reentrant:
            model.enable_gradient_checkpointing(functools.partial(checkpoint, use_reentrant=True))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer, losses = torch.optim.AdamW(trained, lr=1e-2, fused=True), []
        for _ in range(3):
            optimizer.zero_grad()
            loss, _ = step(model, inputs)
            optimizer.step()
            with torch.no_grad():
                validation = model(**inputs, return_dict=False)[0].square().mean()
            losses += [loss.item(), validation.item()]
        found.append(losses)
    assert found[0][-1] < 0.5 * found[0][0]
    assert found[1] == pytest.approx(found[0], rel=0.05)


@pytest.mark.extended
def test_compiled_blocks(ltx: ModuleType, device: str) -> None:
    family = FAMILIES["ltx"]
    stock, inputs = with_adapters(make(family, device, BF16), family), cast(family.inputs(1), device, BF16)
    model = copy.deepcopy(stock)
    report = ltx.optimize(model, precision="fp8", stock_weights="free")
    exact = exact_step(as_fp8(ltx, copy.deepcopy(stock), model, False).double(), inputs)
    _, plain = step(as_fp8(ltx, stock, model, True), inputs)
    for block in model.transformer_blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    _, ours = step(model, inputs)
    torch.compiler.reset()
    assert fallbacks(report) == {}
    assert_as_exact(ours, plain, exact)
