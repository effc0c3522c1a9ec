"""torch.autocast: fused blocks run under it, with weights of its dtype or in float32, no less exact than stock."""

from __future__ import annotations

import copy
import importlib
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

diffusers = pytest.importorskip("diffusers")
from families import Family  # noqa: E402
from helpers.autocast import CudaLists, autocast  # noqa: E402
from helpers.diffusers_models import BLOCK_NAMES  # noqa: E402
from test_families import FAMILIES, assert_ran, cast, distance, every_path, flat, make, run  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@pytest.fixture(params=["cuda", "cpu"])
def lists(request: pytest.FixtureRequest, ltx: ModuleType, device: str) -> Any:
    """Whose lists of functions autocast has. What the package has found out about the other ones is forgotten."""
    if request.param == "cpu" and device != "cpu":
        pytest.skip("CUDA's autocast has CUDA's lists")
    known = importlib.import_module(f"{ltx.__name__}.integrations.engine.autocast")._asked_once
    known.cache_clear()
    yield request.param
    known.cache_clear()


lists_of_cuda_first = pytest.mark.parametrize(
    "lists", ["cuda", pytest.param("cpu", marks=pytest.mark.repeated)], indirect=True
)


def test_lists_of_cuda() -> None:
    """What the package relies on, by torch's own dispatch for tensors of a GPU."""
    x, heads = torch.zeros(2, 8), torch.zeros(1, 2, 4, 8)
    mode = CudaLists(torch.bfloat16)

    def computes_in(function: Any, *args: Any) -> torch.dtype | None:
        return mode.ask(function, args, {})

    assert computes_in(F.layer_norm, x, (8,)) == torch.float32
    assert computes_in(F.rms_norm, x, (8,)) == (torch.float32 if torch.__version__ >= (2, 12) else None)
    assert computes_in(torch.pow, x, 2) == torch.float32
    assert computes_in(F.linear, x, x) == torch.bfloat16
    assert computes_in(F.scaled_dot_product_attention, heads, heads, heads) == torch.bfloat16
    assert not any(computes_in(function, x) for function in (F.gelu, F.silu, torch.tanh, torch.sigmoid))
    assert not any(computes_in(function, x, x) for function in (torch.add, torch.mul))
    half = x.bfloat16()
    with mode:
        assert F.layer_norm(half, (8,)).dtype == torch.float32 and F.linear(x, half).dtype == torch.bfloat16
        assert F.gelu(half).dtype == torch.bfloat16 and half.float().dtype == torch.float32


# Under CUDA's autocast stock makes a stream of theirs in float32, because a norm ends what makes the text. RMSNorm
# gives float32 from torch 2.12 on.
FLOAT32_STREAMS = ("hunyuan_video-15", "hunyuan_video-15_text")
FLOAT32_STREAMS += ("minimax_h3",) if torch.__version__ >= (2, 12) else ()
# There a norm hands float32 to the attention that refines their text.
FLOAT32_REFINERS = ("hunyuan_video", "hunyuan_video-padded", "hunyuan_video-token_replace", "hunyuan_video-image")


@every_path
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.repeated)], ids=str)
def test_families(ltx: ModuleType, device: str, family: Family, dtype: torch.dtype, lists: str) -> None:
    """Whole blocks run ops, in the dtypes of stock, and no further from the model in float32 than stock is."""
    model, inputs = make(family, device, dtype), cast(family.inputs(2), device, dtype)
    exact = run(copy.deepcopy(model).float(), cast(inputs, device, torch.float32))
    with autocast(device, dtype, lists):
        stock = run(model, inputs)
        report = ltx.optimize(model)
        ours = run(model, inputs)
    assert [x.dtype for x in ours] == [x.dtype for x in stock]
    # One small model: the ratio of Chroma in float16 on an H100 is 1.33.
    assert distance(ours, exact) <= 1.35 * distance(stock, exact)
    blocks = {site.name: site for site in report.sites if site.name in family.blocks and "Block" in site.name}
    if lists == "cuda" and family in [FAMILIES.get(name) for name in FLOAT32_STREAMS]:
        reasons = [reason for site in blocks.values() for reason in site.fallbacks]
        assert reasons and all("torch.float32" in reason and str(dtype) in reason for reason in reasons)
        return
    if lists == "cuda" and family in [FAMILIES.get(name) for name in FLOAT32_REFINERS]:
        family = replace(family, stock_calls=(f"autocast is on in {dtype}, the input has dtype torch.float32",))
    assert_ran(report, family, dtype)
    for site in blocks.values():
        assert site.remarks[f"under autocast in {dtype}"] == site.calls > 0
        assert f"under autocast in {dtype}, {site.name}, {site.calls} x" in str(report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norms_by_themselves(ltx: ModuleType, device: str, dtype: torch.dtype, lists: str) -> None:
    """They run ops where autocast returns the input's dtype, and else stock with a reason that names both dtypes."""
    width = 16
    norms = (nn.LayerNorm(width), nn.RMSNorm(width, eps=1e-6), diffusers.models.normalization.RMSNorm(width, eps=1e-6))
    for norm in norms:
        model = nn.Sequential(norm).to(device, dtype)
        x = torch.randn(3, width, device=device).to(dtype)
        with autocast(device, dtype, lists):
            stock = model(x)
            report = ltx.optimize(model, level="norms")
            ours = model(x)
        assert ours.dtype == stock.dtype
        torch.testing.assert_close(ours, stock)
        (site,) = report.sites
        widened = stock.dtype != dtype
        assert site.calls == (not widened)
        reason = f"autocast returns torch.float32 for an input of {dtype}"
        assert site.fallbacks == ({reason: 1} if widened else {})
    with autocast(device, dtype, lists):
        assert norms[0](x).dtype == (torch.float32 if lists == "cuda" else dtype)


# Models that keep float32 weights under autocast. LTX-Video's stream becomes float32 in its first block; the others'
# streams stay in autocast's dtype, beside norms' weights and tables in float32.
FLOAT32_MODELS = ("ltx", "ltx-per_token", "wan-t2v", "wan-ti2v", "flux", "qwenimage")


@pytest.mark.parametrize("name", FLOAT32_MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.repeated)], ids=str)
def test_models_in_float32(ltx: ModuleType, device: str, name: str, dtype: torch.dtype, lists: str) -> None:
    """Whole blocks run ops, each in the dtypes of stock, and no further from the model in float32 than stock is."""
    family = FAMILIES[name]
    model, inputs = make(family, device), cast(family.inputs(2), device, torch.float32)
    exact = run(model, inputs)

    def results() -> list[tuple[torch.Tensor, ...]]:
        found: list[tuple[torch.Tensor, ...]] = []
        blocks = [module for module in model.modules() if type(module).__name__.endswith("Block")]
        hooks = [block.register_forward_hook(lambda *given: found.append(flat(given[-1]))) for block in blocks]
        with autocast(device, dtype, lists):
            found.append(run(model, inputs))
        for hook in hooks:
            hook.remove()
        return found

    stock = results()
    report = ltx.optimize(model)
    hooked = results()
    with autocast(device, dtype, lists):
        ours = [run(model, inputs) for _ in range(3)]
    assert [[x.dtype for x in result] for result in hooked] == [[x.dtype for x in result] for result in stock]
    assert all(torch.equal(a, b) for results in ours[1:] for a, b in zip(results, ours[0]))
    assert distance(ours[0], exact) <= 1.1 * distance(stock[-1], exact)
    for site in report.sites:
        if site.name in family.blocks and site.name.endswith((*BLOCK_NAMES, "Attention")):
            assert site.calls > 0 and site.fallbacks == {}, site.name


def test_other_dtypes_run_stock(ltx: ModuleType, device: str) -> None:
    """A stream or a table of another dtype, and the roundings of "eager", are reasons that name the dtypes."""
    family = FAMILIES["ltx2"]
    model, inputs = make(family, device), cast(family.inputs(1), device, torch.float32)
    half, halves = make(family, device, torch.bfloat16), cast(family.inputs(1), device, torch.bfloat16)
    table = "scale_shift_table has dtype torch.float32, the input torch.bfloat16"  # whose sum with it is float32
    other = "scale_shift_table has dtype torch.bfloat16, the input torch.float16"
    stream = "autocast is on in {}, the input has dtype {}"
    eager = "autocast is on in torch.bfloat16, and rounds in other places than 'eager'"
    cases: list[tuple[nn.Module, Any, torch.dtype, str, set[str]]] = [
        (model, inputs, torch.bfloat16, "fp32", {table, stream.format(torch.bfloat16, torch.float32)}),
        (half, halves, torch.float16, "fp32", {other, stream.format(torch.float16, torch.float32)}),
        (half, halves, torch.bfloat16, "eager", {eager}),
    ]
    for changed, given, dtype, rounding, reasons in cases:
        with torch.autocast(device, dtype):
            stock = run(changed, given)
            report = ltx.optimize(changed, rounding=rounding)
            ours = run(changed, given)
        assert all(map(torch.equal, ours, stock))
        (site,) = [site for site in report.sites if site.name.endswith(BLOCK_NAMES)]
        assert site.calls == 0 and sum(site.fallbacks.values()) == 2
        assert set(site.fallbacks) == reasons
        report.restore()


# ---- Recordings, graphs and kept answers


def with_wide_adapters(model: nn.Module, family: Family) -> nn.Module:
    """Adapters in float32 beside layers in bfloat16: autocast computes them in its dtype, and peft else in float32."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=list(family.lora), init_lora_weights=False))  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    return model.requires_grad_(False)


def test_recorded_calls(ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with autocast on and off have recordings of their own, with the bits of calls that are not recorded."""
    family = FAMILIES["ltx"]
    model = with_wide_adapters(make(family, device, torch.bfloat16), family)
    inputs = cast(family.inputs(2), device, torch.bfloat16)
    replay = importlib.import_module(f"{ltx.__name__}.integrations.replay.calls")
    report = ltx.optimize(model)

    def call(enabled: bool) -> tuple[torch.Tensor, ...]:
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            return run(model, inputs)

    with monkeypatch.context() as patch:
        patch.setattr(replay, "RECORD", "0")
        expected = {enabled: call(enabled) for enabled in (True, False)}
    assert not torch.equal(expected[True][0], expected[False][0])
    (site,) = [site for site in report.sites if site.name.endswith(BLOCK_NAMES)]
    remark, before = "under autocast in torch.bfloat16", site.remarks["under autocast in torch.bfloat16"]
    for enabled in (True, True, True, False, False, False, True, False):
        assert torch.equal(call(enabled)[0], expected[enabled][0])
    held = [ltx.integrations.engine.state.held(block).replays for block in model.transformer_blocks]
    assert all(sum(not isinstance(found, str) for found in replays.calls.values()) == 2 for replays in held)
    assert site.remarks[remark] - before == 4 * 2


def test_graphs(ltx: ModuleType, device: str, cuda_graphs: str) -> None:
    """Graphs of calls with autocast on and off; one holds no copy of a weight that autocast cached before it."""
    family = FAMILIES["ltx"]
    model = make(family, device, torch.bfloat16)
    inputs = cast(family.inputs(2), device, torch.bfloat16)
    model.proj_out.float().requires_grad_()  # what autocast caches: leaves in float32 that may need a gradient
    report = ltx.optimize(model, graphs=True)
    with torch.autocast(device, torch.bfloat16):
        results = [run(model, inputs)[0] for _ in range(2)]
    for _ in range(3):
        torch.full((2**20,), torch.nan, device=device)  # whatever was freed is written over
        with torch.autocast(device, torch.bfloat16):
            results.append(run(model, inputs)[0])
    assert all(torch.equal(result, results[0]) for result in results)
    assert "graphs of LTXVideoTransformer3DModel: 1" in str(report)


def test_kept_answers(ltx: ModuleType, device: str) -> None:
    """What is kept for a module, or for the tensors that it was made of, belongs to a state of autocast."""
    engine = f"{ltx.__name__}.integrations.engine"
    state, kept = importlib.import_module(f"{engine}.state"), importlib.import_module(f"{engine}.kept")
    module, tensor = nn.Linear(2, 2).to(device), torch.zeros(3, device=device)
    site = type("Site", (), {"cache": {}})()
    dtypes: list[Any] = [None, torch.bfloat16, torch.float16]
    for _ in range(2):
        for number, dtype in enumerate(dtypes):
            with torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None):
                assert state.remember(module, "key", lambda module, n=number: n) == number
                assert state.recall(module, "key") == number
                assert kept.kept(site, "key", (tensor,), lambda n=number: n) == number
            dtypes[number] = dtype
    assert len(site.cache) == 3


@every_path
@lists_of_cuda_first
def test_fp8(ltx: ModuleType, device: str, family: Family, lists: str) -> None:
    """`optimize` and calls with fp8 weights: torch.cat, which autocast has a list for, takes no fp8 there."""
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 on this GPU")
    model, inputs = make(family, device, torch.bfloat16), cast(family.inputs(2), device, torch.bfloat16)
    with autocast(device, torch.bfloat16, lists):
        stock = run(model, inputs)
        report = ltx.optimize(model, precision="fp8")
        ours = run(model, inputs)
    assert report.replaced["torch.Linear"] == family.fp8 and "torch.Linear" not in report.fallbacks
    assert 1e-3 < distance(ours, stock) < 0.15
    with torch.autocast(device, torch.bfloat16):
        ours = run(model, inputs)
        again = [run(model, inputs) for _ in range(2)]
    assert all(torch.equal(a, b) for results in again for a, b in zip(results, ours))
    report.restore()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=str)
def test_compile(ltx: ModuleType, device: str, masked: bool, weights: torch.dtype) -> None:
    """One graph, with ops in it, and stock's error."""
    family = FAMILIES["ltx"]
    model, inputs = make(family, device, weights), cast(family.inputs(2), device, weights)
    if masked:
        assert family.masked is not None
        inputs.update(cast(family.masked(2), device, weights))
    exact = run(copy.deepcopy(model).float(), cast(inputs, device, torch.float32))
    report = ltx.optimize(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.autocast(device, torch.bfloat16):
        ours = run(compiled, inputs)
        eager = run(model, inputs)
    assert distance(ours, exact) <= 1.1 * distance(eager, exact)
    traces = {site.name: site.traces for site in report.sites}
    assert all(traces[name] > 0 for name in family.blocks), traces
    assert all(name not in report.fallbacks for name in family.blocks)


# ---- Language models, text encoders, autoencoders

transformers = pytest.importorskip("transformers")
from helpers.language_models import make_ids  # noqa: E402
from test_language_models import every_path as every_language_path  # noqa: E402
from test_language_models import make as make_language_model  # noqa: E402
from test_language_models import make_encoder  # noqa: E402
from test_vae import BATCH, RUN, calls, every_class, make_vae  # noqa: E402


@every_language_path
def test_language_models(ltx: ModuleType, device: str, case: Any, lists: str) -> None:
    model, ids = make_language_model(case, device, torch.bfloat16), make_ids(device)
    exact = copy.deepcopy(model).float()(ids).logits
    with autocast(device, torch.bfloat16, lists):
        stock = model(ids).logits
        report = ltx.optimize(model)
        ours = model(ids).logits
        again = [model.generate(ids, max_new_tokens=4, do_sample=False) for _ in range(2)]
    assert ours.dtype == stock.dtype
    assert distance((ours,), (exact,)) <= 1.2 * distance((stock,), (exact,))
    assert report.fallbacks == {} and all(site.calls for site in report.sites)
    assert torch.equal(*again)


@pytest.mark.parametrize("prefix", ["T5", "UMT5"])
def test_encoders(ltx: ModuleType, device: str, prefix: str, lists: str) -> None:
    model, ids = make_encoder(prefix, device, torch.bfloat16), make_ids(device)
    exact = copy.deepcopy(model).float()(ids).last_hidden_state
    with autocast(device, torch.bfloat16, lists):
        stock = model(ids).last_hidden_state
        report = ltx.optimize(model, strict=True)
        ours = [model(ids).last_hidden_state for _ in range(3)]
    assert ours[0].dtype == stock.dtype and all(torch.equal(ours[0], other) for other in ours)
    assert distance((ours[0],), (exact,)) <= 1.2 * distance((stock,), (exact,))
    assert report.fallbacks == {}


@every_class
@lists_of_cuda_first
def test_autoencoders(ltx: ModuleType, device: str, name: str, half: str, lists: str) -> None:
    """LTX-2's runs stock where autocast squares in float32: its op rounds each step."""
    vae, batch = make_vae(name, device, torch.bfloat16), BATCH[half]
    exact = RUN[half](copy.deepcopy(vae).float(), batch=batch)
    with autocast(device, torch.bfloat16, lists):
        stock = RUN[half](vae, batch=batch)
        report = ltx.optimize(vae)
        ours = RUN[half](vae, batch=batch)
    assert ours.dtype == stock.dtype
    error = distance((ours,), (exact,)) / distance((stock,), (exact,))
    if lists == "cuda" and name.startswith("ltx2"):
        (site,) = [site for site in report.sites if half in site.name.lower()]
        reason = "autocast returns torch.float32 for an input of torch.bfloat16"
        assert site.calls == 0 and list(site.fallbacks) == [reason] and torch.equal(ours, stock)
    else:
        assert calls(report, half) > 0
        assert error <= 1.3  # as in test_vae: without autocast
