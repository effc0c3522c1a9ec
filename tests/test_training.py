"""Blocks with gradients on: adapters of peft in training, checkpoints, and what happens between training steps."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import statistics
import types
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor  # noqa: E402
from families import Family  # noqa: E402
from helpers.autocast import autocast  # noqa: E402
from helpers.diffusers_models import BLOCK_NAMES  # noqa: E402
from helpers.language_models import make_ids  # noqa: E402
from test_families import FAMILIES, cast, flat, make  # noqa: E402
from torch.utils.checkpoint import CheckpointError, checkpoint, create_selective_checkpoint_contexts  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "without_cudnn_attention")

TRAINED = ("ltx", "ltx-per_token", "flux", "wan-t2v", "qwenimage")
every_model = pytest.mark.parametrize("family", [FAMILIES[name] for name in TRAINED], ids=TRAINED)
OTHERS = [name for name, family in FAMILIES.items() if family.lora and name not in TRAINED]
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def with_adapters(model: Any, family: Family, names: tuple[str, ...] = ("default",), **config: Any) -> Any:
    """A frozen model with trained adapters, all of them active."""
    options = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, **config}
    torch.manual_seed(3)
    for name in names:
        model.add_adapter(peft.LoraConfig(target_modules=list(family.lora), **options), name)
    model.set_adapters(list(names)) if len(names) > 1 else None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


def step(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss and the gradients of all that is trained."""
    model.zero_grad()
    outputs = [output.double() for output in flat(model(**inputs, return_dict=False))]
    loss = torch.stack([output.square().mean() for output in outputs]).sum()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_as_exact(
    ours: dict[str, Tensor],
    stock: dict[str, Tensor],
    exact: dict[str, Tensor],
    bound: float | None = None,
    times: float = 2.5,
    smallest: float = 1e-6,
) -> None:
    """No gradient is far from float64's beside stock's, and all together are about as far as stock's.

    A small tensor's error is by chance 1.9 times stock's, or its half: of the families of TRAINED and all dtypes.
    """
    assert ours.keys() == stock.keys() == exact.keys() and ours
    ratios = []
    for name, want in exact.items():
        assert ours[name].dtype == stock[name].dtype
        if not want.any():  # of what the model's result does not depend on
            assert not ours[name].any()
            continue
        mine, theirs = (((got[name].double() - want).norm() / want.norm()).item() for got in (ours, stock))
        assert mine <= times * theirs + smallest, name
        ratios.append(mine / theirs)
    half = all(grad.dtype == torch.bfloat16 for grad in stock.values())
    # In float32 sums differ by their order.
    assert statistics.geometric_mean(ratios) <= (bound or (1.1 if half else 1.5))


def blocks_of(report: Any, family: Family) -> list[Any]:
    return [site for site in report.sites if site.name in family.blocks and site.name.endswith(BLOCK_NAMES)]


def exact_step(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The gradients of a stock model in float64."""
    device = next(model.parameters()).device.type
    return step(copy.deepcopy(model).double(), cast(inputs, device, torch.float64))[1]


def with_autocast(device: str, dtype: torch.dtype) -> Any:
    return torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16)


@every_model
@every_dtype
def test_gradients_of_adapters(ltx: ModuleType, device: str, family: Family, dtype: torch.dtype) -> None:
    """Whole blocks run ops, and no gradient is further from float64's than stock's."""
    model, inputs = with_adapters(make(family, device, dtype), family), cast(family.inputs(2), device, dtype)
    exact = exact_step(model, inputs)
    with with_autocast(device, dtype):
        _, stock = step(model, inputs)
        report = ltx.optimize(model)
        _, ours = step(model, inputs)
    for site in blocks_of(report, family):
        assert site.fallbacks == {} and site.calls == site.gradients == family.blocks[site.name]
        assert f"gradients through {site.name}, {site.calls} x" in str(report)
    assert_as_exact(ours, stock, exact)


def exact_or_skip(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """`exact_step`, where the stock model runs in float64."""
    try:
        return exact_step(model, inputs)
    except RuntimeError as error:
        if "vector_norm" not in str(error):  # of a sum that the stock model takes in float32
            raise
        pytest.skip("the stock model does not run in float64")


def assert_trains(
    ltx: ModuleType, model: Any, inputs: dict[str, Any], family: Family, autocast: Any, smallest: float
) -> None:
    """Four steps of whole blocks, the last of them recorded. Of so many families some are off by chance."""
    exact = exact_or_skip(model, inputs)
    with autocast:
        _, stock = step(model, inputs)
        report = ltx.optimize(model)
        steps = [step(model, inputs)[1] for _ in range(4)]
    for site in blocks_of(report, family):  # blocks that come before the first adapter need no gradient
        assert site.fallbacks == {} and 0 < site.gradients <= site.calls
    for ours in steps:
        assert_as_exact(ours, stock, exact, times=3, smallest=smallest)


@pytest.mark.slow
@every_dtype
@pytest.mark.parametrize("name", OTHERS)
def test_gradients_of_every_family(ltx: ModuleType, device: str, name: str, dtype: torch.dtype) -> None:
    """Adapters in every model that diffusers has adapters for."""
    family = FAMILIES[name]
    model = make(family, device, dtype)
    if not hasattr(model, "add_adapter"):
        pytest.skip("diffusers has no adapters for this model")
    model, inputs = with_adapters(model, family), cast(family.inputs(2), device, dtype)
    assert_trains(ltx, model, inputs, family, with_autocast(device, dtype), smallest=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_all_weights_of_every_family(ltx: ModuleType, device: str, name: str) -> None:
    """All weights of every model, in float32. Some models round to bfloat16 inside, where a small error grows."""
    family = FAMILIES[name]
    model, inputs = make(family, device, torch.float32), cast(family.inputs(2), device, torch.float32)
    model.requires_grad_(True)
    assert_trains(ltx, model, inputs, family, contextlib.nullcontext(), smallest=1e-5)


def test_each_token_gets_the_gradient_of_its_own_modulation(ltx: ModuleType, device: str) -> None:
    """ERNIE-Image's blocks read one row of a modulation whose rows are equal; its gradients are not."""
    family, given = FAMILIES["ernie_image"], []
    model, inputs = make(family, device, torch.float32), cast(family.inputs(2), device, torch.float32)
    handle = model.layers[0].register_forward_pre_hook(lambda block, args: given.append(args))
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    x, rope, temb, *rest = given[0]

    def gradients() -> list[Tensor]:
        leaves = [value.clone().requires_grad_() for value in temb]
        model.layers[0](x, rope, leaves, *rest).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    stock = gradients()
    report = ltx.optimize(model)
    ours = gradients()
    assert blocks_of(report, family)[0].calls == 1
    for mine, theirs in zip(ours, stock):
        assert (theirs[0] != theirs[1]).any()
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


CONFIGS: dict[str, dict[str, Any]] = {
    "rank 1": {"r": 1},
    "rank 16": {"r": 16, "lora_alpha": 3},
    "float32": {},
    "bias": {"lora_bias": True},
    "dora": {"use_dora": True},
    "one layer": {"target_modules": ["to_q"]},
    "another rank": {"rank_pattern": {"to_k": 4}},
    "another scale": {"alpha_pattern": {"to_v": 3}},
}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "apart"])
@pytest.mark.parametrize("config", CONFIGS)
def test_kinds_of_adapters(ltx: ModuleType, device: str, config: str, packed: bool) -> None:
    """Two adapters at once. float32 adapters run in autocast's dtype, as peft's do; some kinds peft computes itself."""
    family, dtype = FAMILIES["ltx"], torch.bfloat16
    options = dict(CONFIGS[config])
    if "target_modules" in options:
        family = dataclasses.replace(family, lora=tuple(options.pop("target_modules")))
    model = with_adapters(make(family, device, dtype), family, ("one", "two"), **options)
    if config == "float32":
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
    inputs = [cast(family.inputs(seed), device, dtype) for seed in (2, 3, 4)]

    def gradients(step: Any) -> dict[str, Tensor]:
        """Of all inputs together: a small tensor's error for one input is by chance 2.8 times stock's."""
        each = [step(model, given) for given in inputs]
        return {name: torch.stack([found[name] for found in each]) for name in each[0]}

    exact = gradients(exact_step)
    with torch.autocast(device, dtype):
        stock = gradients(lambda *given: step(*given)[1])
        report = ltx.optimize(model)
        if not packed:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        ours = gradients(lambda *given: step(*given)[1])
    assert all(site.fallbacks == {} for site in blocks_of(report, family))
    remarks = {text for site in report.sites for text in site.remarks if text.startswith("adapters")}
    assert remarks == {
        "adapters called by themselves: DoraLinearVariant of peft" if config == "dora" else "adapters beside"
    }
    assert_as_exact(ours, stock, exact, times=2)


def test_dropout_of_adapters(ltx: ModuleType, device: str) -> None:
    """peft computes adapters that drop inputs: from the same seed the same are dropped, in the order of its calls."""
    family = FAMILIES["ltx"]
    model = with_adapters(make(family, device), family, lora_dropout=0.3).train()
    inputs, grads = cast(family.inputs(1), device, torch.float32), []
    for optimized in (False, True):
        if optimized:
            report = ltx.optimize(model)
        torch.manual_seed(5)
        grads.append(step(model, inputs)[1])
    assert all(site.fallbacks == {} for site in blocks_of(report, family))
    assert any("a dropout of adapters" in text for site in report.sites for text in site.remarks)
    for name, want in grads[0].items():
        torch.testing.assert_close(grads[1][name], want, rtol=1e-4, atol=1e-6)


def test_gradients_of_inputs(ltx: ModuleType, device: str) -> None:
    """Of all streams, as guidance by gradients and a trained embedding want them; nothing of the model is trained."""
    for name in ("ltx", "flux"):
        family = FAMILIES[name]
        model, inputs = make(family, device), cast(family.inputs(2), device, torch.float32)
        names = [key for key in ("hidden_states", "encoder_hidden_states") if isinstance(inputs.get(key), Tensor)]
        assert len(names) == 2

        def gradients(model: nn.Module, given: dict[str, Any], names: list[str] = names) -> dict[str, Tensor]:
            leaves = {key: given[key].clone().requires_grad_() for key in names}
            model(**{**given, **leaves}, return_dict=False)[0].square().mean().backward()
            return {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}

        exact = gradients(copy.deepcopy(model).double(), cast(inputs, device, torch.float64))
        stock = gradients(model, inputs)
        report = ltx.optimize(model)
        ours = gradients(model, inputs)
        assert all(site.fallbacks == {} and site.calls for site in blocks_of(report, family))
        assert_as_exact(ours, stock, exact)


@pytest.mark.parametrize("name", ["ltx", pytest.param("flux", marks=pytest.mark.repeated)])
def test_backward_hooks_on_every_module(ltx: ModuleType, device: str, name: str) -> None:
    """Each module that the first and the last block call, in turn: its gradients go through the hook."""
    family = FAMILIES[name]
    model, inputs = with_adapters(make(family, device), family), cast(family.inputs(1), device, torch.float32)
    stock = copy.deepcopy(model)
    ltx.optimize(model)
    for _ in range(3):  # calls are recorded
        step(model, inputs)
    called: set[str] = set()
    names = [path for path, part in stock.named_modules() if type(part).__name__.endswith(BLOCK_NAMES)]
    for path, part in stock.named_modules():
        if path.startswith((f"{names[0]}.", f"{names[-1]}.")):
            part.register_forward_hook(lambda *_, path=path: called.add(path))
    step(stock, inputs)
    calls: Counter[nn.Module] = Counter()

    def double(module: nn.Module, gradients: Any) -> Any:
        calls[module] += 1
        return tuple(None if gradient is None else 2 * gradient for gradient in gradients)

    for path in sorted(called):
        expected, found = stock.get_submodule(path), model.get_submodule(path)
        hooks = [part.register_full_backward_pre_hook(double) for part in (expected, found)]
        wanted, got = step(stock, inputs)[1], step(model, inputs)[1]
        assert calls[found] == calls[expected], path
        for key, gradient in wanted.items():
            torch.testing.assert_close(got[key], gradient, rtol=1e-3, atol=1e-5, msg=f"{path}: {key}")
        for hook in hooks:
            hook.remove()
    assert calls


def test_what_is_trained_in_a_block_itself(ltx: ModuleType, device: str) -> None:
    """Norms, tables and time embeddings run ops; a linear layer is called as it is."""
    family = FAMILIES["wan-t2v"]
    model, inputs = make(family, device), cast(family.inputs(1), device, torch.float32)
    for name in (
        "blocks.0.scale_shift_table",
        "blocks.0.norm2.weight",
        "condition_embedder.time_proj.weight",
        "blocks.0.attn1.norm_q.weight",
        "blocks.0.attn2.norm_k.weight",
        "blocks.0.attn1.to_q.weight",
        "blocks.0.ffn.net.2.bias",
    ):
        parameter = model.get_parameter(name).requires_grad_()
        _, stock = step(model, inputs)
        report = ltx.optimize(model)
        _, ours = step(model, inputs)
        found = {why for of in report.fallbacks.values() for why in of if why != "a gradient is needed"}
        assert not found  # but norms outside of blocks
        (site,) = blocks_of(report, family)
        assert site.fallbacks == {}
        assert ours.keys() == {name}
        torch.testing.assert_close(ours[name], stock[name], rtol=1e-4, atol=1e-6)
        report.restore()
        parameter.requires_grad_(False)


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_all_parameters(ltx: ModuleType, device: str, family: Family, dtype: torch.dtype) -> None:
    """A whole model in training: blocks run ops, and no gradient is further from float64's than stock's."""
    model = make(family, device, dtype).requires_grad_(True)
    # By chance one batch alone is up to 1.2 times as far from float64's as stock's, or 0.8 times.
    batches = range(1, 9 if dtype == torch.bfloat16 else 3)
    grads: tuple[dict[str, Tensor], ...] = ({}, {}, {})

    def collect(all_of_one: dict[str, Tensor], step: Any) -> None:
        for batch in batches:
            found = step(model, cast(family.inputs(batch), device, dtype))
            all_of_one |= {f"{batch} {name}": grad for name, grad in found.items()}

    exact, stock, ours = grads
    collect(exact, exact_step)
    with with_autocast(device, dtype):
        collect(stock, lambda *given: step(*given)[1])
        report = ltx.optimize(model)
        collect(ours, lambda *given: step(*given)[1])
    for site in report.sites:
        assert site.fallbacks == {} or not site.name.endswith((*BLOCK_NAMES, "Attention"))
    for site in blocks_of(report, family):
        assert site.calls == site.gradients == len(batches) * family.blocks[site.name]
    assert_as_exact(ours, stock, exact)


@pytest.mark.parametrize("name", ["ltx", "ltx-per_token", "flux", "wan-t2v"])
@pytest.mark.parametrize("lists", ["cuda", "cpu"])
def test_gradients_of_weights_in_float32(ltx: ModuleType, device: str, name: str, lists: str) -> None:
    """A whole model in mixed precision: blocks run ops, and gradients are in float32, about as exact as stock's."""
    if lists == "cpu" and device != "cpu":
        pytest.skip("CUDA's autocast has CUDA's lists")
    family, batches = FAMILIES[name], range(1, 9)
    model = make(family, device).requires_grad_(True)
    grads: list[dict[str, Tensor]] = []

    def collect(step: Any) -> None:
        found = ((batch, step(model, cast(family.inputs(batch), device, torch.float32))) for batch in batches)
        grads.append({f"{batch} {name}": grad for batch, all_of_one in found for name, grad in all_of_one.items()})

    def step_under_lists(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
        with autocast(device, torch.bfloat16, lists):
            return step(model, inputs)[1]

    collect(exact_step)
    collect(step_under_lists)
    report = ltx.optimize(model)
    collect(step_under_lists)
    for site in blocks_of(report, family):
        assert site.fallbacks == {} and site.calls == site.gradients == len(batches) * family.blocks[site.name]
    exact, stock, ours = grads
    assert {grad.dtype for grad in ours.values()} == {torch.float32}
    assert_as_exact(ours, stock, exact, bound=1.1)


@pytest.mark.parametrize("name", ["ltx", "flux", "wan-t2v"])
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=str)
def test_checkpoints_of_all_parameters(ltx: ModuleType, device: str, name: str, weights: torch.dtype) -> None:
    """The bits of a step without checkpoints, of recorded steps too, in all that belongs to blocks.

    A recorded block adds up the gradients of what it reads several times, before others add theirs.
    """
    family, dtype = FAMILIES[name], torch.bfloat16
    model, inputs = make(family, device, weights).requires_grad_(True), cast(family.inputs(2), device, weights)
    report = ltx.optimize(model)
    found = [step_under(device, dtype, model, inputs)[1] for _ in range(3)]
    model.enable_gradient_checkpointing(functools.partial(checkpoint, use_reentrant=False))
    found += [step_under(device, dtype, model, inputs)[1] for _ in range(3)]
    for grads in found[1:]:
        assert grads.keys() == found[0].keys()
        for key, grad in grads.items():
            assert torch.equal(grad, found[0][key]) or "blocks." not in key, key
            assert (grad - found[0][key]).norm() <= 2e-2 * found[0][key].norm(), key
    assert all(site.fallbacks == {} for site in blocks_of(report, family))


def loss_of_rows(self: Any, ids: Tensor, labels: Tensor, **options: Any) -> Any:
    """A model's forward that computes no logits of all tokens at once, as Liger's fused cross-entropy."""
    hidden = self.model(input_ids=ids, **options)[0]
    parts = zip(hidden[:, :-1].split(3, dim=1), labels[:, 1:].split(3, dim=1))
    losses = [
        nn.functional.cross_entropy(self.lm_head(rows).flatten(0, 1).float(), targets.flatten(), reduction="sum")
        for rows, targets in parts
    ]
    return types.SimpleNamespace(loss=torch.stack(losses).sum() / labels[:, 1:].numel())


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "own loss"])
def test_language_models(ltx: ModuleType, device: str, name: str, kind: str) -> None:
    """Adapters on all layers of attention and MLP, with checkpoints and without."""
    pytest.importorskip("transformers")
    from test_language_models import CASES as LANGUAGE_CASES
    from test_language_models import make as make_language_model

    case, ids = LANGUAGE_CASES[name], make_ids(device, 48)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model = make_language_model(case, device, dtype)
    torch.manual_seed(3)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False), model)
    model.train()
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in parameter_name)

    def gradients(model: nn.Module) -> dict[str, Tensor]:
        model.zero_grad()
        if kind == "own loss":
            model.forward = types.MethodType(loss_of_rows, model)
        with with_autocast(device, model.dtype):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    exact, stock = gradients(copy.deepcopy(model).double()), gradients(model)
    report = ltx.optimize(model)
    ours = gradients(model)
    assert_as_exact(ours, stock, exact)
    (site,) = [site for site in report.sites if site.name.endswith("DecoderLayer")]
    assert site.fallbacks == {} and site.calls == site.gradients == case.replaced[site.name.partition(".")[2]]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again = gradients(model)
    # transformers has the first layer's input need a gradient then, so that other ops run in plain torch.
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    assert all((again[key] - ours[key]).norm() <= bound * ours[key].norm() for key in ours)
    assert site.recomputed == case.replaced[site.name.partition(".")[2]]


# ---- Checkpoints


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpoints(ltx: ModuleType, device: str, name: str, reentrant: bool) -> None:
    """The bits of a step without checkpoints; the report counts what the backward computes again apart.

    A reentrant one computes first without gradients, where adapters are added in other places.
    """
    family, dtype = FAMILIES[name], torch.bfloat16
    model, inputs = with_adapters(make(family, device, dtype), family), cast(family.inputs(2), device, dtype)
    if reentrant:  # it sees no gradient where no input needs one
        inputs["hidden_states"].requires_grad_()
    report = ltx.optimize(model)
    _, whole = step_under(device, dtype, model, inputs)
    counts = {site.name: site.calls for site in report.sites}
    model.enable_gradient_checkpointing(functools.partial(checkpoint, use_reentrant=reentrant))
    _, again = step_under(device, dtype, model, inputs)
    assert whole.keys() <= again.keys()  # a reentrant one makes zeros for what the result does not depend on
    for key, want in whole.items():
        assert torch.equal(again[key], want) if not reentrant else (again[key] - want).norm() <= 0.1 * want.norm(), key
    for site in blocks_of(report, family):
        assert site.fallbacks == {}
        assert site.calls == 2 * counts[site.name] and site.recomputed == counts[site.name]
        assert f"calls of {site.name} computed again in a backward, {site.recomputed} x" in str(report)


@pytest.mark.parametrize("name", ["ltx", "flux"])
@pytest.mark.parametrize("writes", [False, True], ids=["", "writes allowed"])
def test_selective_checkpoints(ltx: ModuleType, device: str, name: str, writes: bool) -> None:
    """What they keep of products is not written to by adapters that are added."""
    family = FAMILIES[name]
    model, inputs = with_adapters(make(family, device), family), cast(family.inputs(2), device, torch.float32)
    ltx.optimize(model)
    want = step(model, inputs)
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept, allow_cache_entry_mutation=writes)
    model.enable_gradient_checkpointing(functools.partial(checkpoint, use_reentrant=False, context_fn=contexts))
    for _ in range(2):
        loss, gradients = step(model, inputs)
        torch.testing.assert_close(loss, want[0])
        torch.testing.assert_close(gradients, want[1], rtol=1e-4, atol=1e-6)


def step_under(device: str, dtype: torch.dtype, model: nn.Module, inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """A step whose forward alone runs under autocast, as trainers have it."""
    model.zero_grad()
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        outputs = flat(model(**inputs, return_dict=False))
    loss = torch.stack([output.float().square().mean() for output in outputs]).sum()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _hook(model: Any) -> None:
    model.transformer_blocks[1].norm1.register_forward_hook(lambda *_: None)


def _hook_of_attention(model: Any) -> None:
    model.transformer_blocks[1].attn1.processor = Processor()


class Processor(LTXVideoAttnProcessor):
    pass


CHANGES: dict[str, Callable[[Any], object]] = {
    "a hook on a norm": _hook,
    "another processor": _hook_of_attention,
    "an adapter less": lambda model: model.set_adapters(["one"]),
    "adapters off": lambda model: model.disable_adapters(),
    "a global hook": lambda model: HANDLES.append(
        torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    ),
}
HANDLES: list[Any] = []


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("back", [False, True], ids=["own first", "stock first"])
def test_another_way_in_the_backward_is_an_error(ltx: ModuleType, device: str, change: str, back: bool) -> None:
    """What the second run saves would stand in the place of what the first one saved."""
    family = FAMILIES["ltx"]
    model = with_adapters(make(family, device), family, ("one", "two"))
    inputs = cast(family.inputs(1), device, torch.float32)
    ltx.optimize(model)
    model.enable_gradient_checkpointing()
    if back:
        if change in ("an adapter less", "adapters off"):
            pytest.skip("a change of one kind in both directions")
        changed = copy.deepcopy(model) if change != "a global hook" else model
        CHANGES[change](changed)
    else:
        changed = model
    try:
        loss = changed(**inputs, return_dict=False)[0].square().mean()
        if not back:
            CHANGES[change](model)
        elif change == "a global hook":
            HANDLES.pop().remove()
        elif change == "a hook on a norm":
            changed.transformer_blocks[1].norm1._forward_hooks.clear()
        else:
            changed.transformer_blocks[1].attn1.processor = LTXVideoAttnProcessor()
        with pytest.raises(CheckpointError):
            loss.backward()
    finally:
        while HANDLES:
            HANDLES.pop().remove()


@pytest.mark.parametrize("second", ["exp", "sigmoid"])
@pytest.mark.parametrize("marked", [True, False], ids=["marked", "not marked"])
def test_marks_tell_ways_that_save_tensors_of_one_shape(
    ltx: ModuleType, device: str, second: str, marked: bool
) -> None:
    """Without them the gradient is wrong, and nothing says so. The result of the first way holds the mark."""
    marks, ways = ltx.integrations.engine.marks, iter(("exp", second))

    def compute(x: Tensor) -> Tensor:
        way = next(ways)
        function = getattr(torch, way)
        result: Tensor = marks.marked(lambda: way, x, function, x) if marked else function(x)
        return result

    x = torch.randn(5, device=device, requires_grad=True)
    loss = checkpoint(compute, x, use_reentrant=False).sum()
    if marked and second != "exp":
        with pytest.raises(CheckpointError):
            loss.backward()
        return
    loss.backward()
    assert x.grad is not None and torch.allclose(x.grad, x.exp()) == (second == "exp")


# ---- Between steps


def test_steps_and_validations_in_turn(ltx: ModuleType, device: str) -> None:
    """Every call sees the adapters as the optimizer has left them: in steps, recorded calls and inference mode."""
    family = FAMILIES["ltx"]
    stock = with_adapters(make(family, device), family)
    model = copy.deepcopy(stock)
    inputs, others = (cast(family.inputs(batch), device, torch.float32) for batch in (2, 1))
    report = ltx.optimize(model)
    optimizers = [
        torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-2) for each in (stock, model)
    ]
    for number in range(4):
        for each, optimizer in zip((stock, model), optimizers):
            each.train()
            step(each, others if number % 2 else inputs)
            optimizer.step()
            each.eval()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode() if number % 2 else torch.no_grad())
            for _ in range(3):
                for given in (others, inputs):
                    want, got = (flat(each(**given, return_dict=False))[0] for each in (stock, model))
                    assert ((got - want).norm() / want.norm()).item() < 1e-4
    pairs = zip(model.parameters(), stock.parameters())
    assert all(((a - b).norm() <= 1e-3 * b.norm()).item() for a, b in pairs)
    assert "recorded calls: 2 of 2" in str(report)
    assert all(site.fallbacks == {} for site in blocks_of(report, family))


def test_tables_of_a_validation_serve_a_step(ltx: ModuleType, device: str) -> None:
    """What inference mode makes, autograd cannot save: what is kept is made outside of it."""
    for name in ("ltx", "wan-t2v"):
        family = FAMILIES[name]
        model, inputs = with_adapters(make(family, device), family), cast(family.inputs(1), device, torch.float32)
        _, want = step(model, inputs)
        ltx.optimize(model)
        with torch.inference_mode():
            for _ in range(3):
                model(**inputs, return_dict=False)
        _, got = step(model, inputs)
        assert all(((got[key] - want[key]).norm() <= 1e-4 * want[key].norm()).item() for key in want)


def test_accumulated_gradients(ltx: ModuleType, device: str) -> None:
    """Two batches, and gradients scaled for float16: their sum, and an overflow that the scaler sees."""
    family = FAMILIES["ltx"]
    model = with_adapters(make(family, device, torch.float16), family)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    inputs = [cast(family.inputs(batch), device, torch.float16) for batch in (1, 2)]
    ltx.optimize(model)
    sums: dict[str, Tensor] = {}
    for given in inputs:
        for name, grad in step_under(device, torch.float16, model, given)[1].items():
            sums[name] = sums.get(name, 0) + grad
    model.zero_grad()
    scaler = torch.amp.GradScaler(device, init_scale=2.0**4)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    for given in inputs:
        with torch.autocast(device, torch.float16):
            loss = model(**given, return_dict=False)[0].float().square().mean()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    for name, parameter in model.named_parameters():
        if name in sums:
            assert parameter.grad is not None
            assert (parameter.grad - sums[name]).norm() <= 2e-2 * sums[name].norm()
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler(device, init_scale=2.0**40)
    with torch.autocast(device, torch.float16):
        loss = model(**inputs[0], return_dict=False)[0].float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < 2.0**40


def test_kept_answers_know_what_is_trained(ltx: ModuleType, device: str) -> None:
    """Frozen, unfrozen and frozen again: answers about modules are kept with gradients on, and stay right."""
    family = FAMILIES["wan-t2v"]
    model, inputs = with_adapters(make(family, device), family), cast(family.inputs(1), device, torch.float32)
    report = ltx.optimize(model)
    (site,) = blocks_of(report, family)
    asked = []
    why = type(ltx.integrations.diffusers.wan.BLOCK)._why_not_state
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(ltx.integrations.diffusers.wan.BLOCK),
            "_why_not_state",
            lambda *args: asked.append(args[1]) or why(*args),
        )
        for trained in (False, False, True, True, False):
            model.blocks[0].norm2.weight.requires_grad_(trained)
            _, grads = step(model, inputs)
            assert ("blocks.0.norm2.weight" in grads) == trained
    assert sum(module is model.blocks[0] for module in asked) == 2
    assert site.fallbacks == {}


def test_compiled_blocks(ltx: ModuleType, device: str) -> None:
    family = FAMILIES["ltx"]
    model, inputs = with_adapters(make(family, device), family), cast(family.inputs(1), device, torch.float32)
    exact = exact_step(model, inputs)
    _, stock = step(model, inputs)
    report = ltx.optimize(model)
    for block in model.transformer_blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    _, ours = step(model, inputs)
    torch.compiler.reset()
    (site,) = blocks_of(report, family)
    assert site.traces > 0 and site.fallbacks == {}
    assert_as_exact(ours, stock, exact)
