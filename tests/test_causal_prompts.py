"""Prompts without a mask: where attention is causal and nothing else, this package's op computes it."""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
from helpers.attention import has_kernel  # noqa: E402
from helpers.language_models import (  # noqa: E402
    GEMMA4,
    LAYERS,
    LLAMA4,
    MINISTRAL3,
    OTHER_ATTENTION,
    QWEN3_5,
    distance,
    make_ids,
    make_model,
    other_attention,
)

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")
CLOSE = 1e-5 if torch.cuda.is_available() else 3e-6
LEAST = 8
REMARK = "causal attention of a prompt in this package's kernel"
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Llama4": {**LLAMA4, "attention_chunk_size": 4096},
    "Mistral": {"sliding_window": None},
    "Ministral3": MINISTRAL3,
    "Qwen2": {},
    "Qwen3": {},
    "Qwen3_5": {**QWEN3_5, "layer_types": ["full_attention"] * LAYERS},
    "Phi3": {},
    "Olmo2": {},
    "Gemma3": {"sliding_window": 4096, "query_pre_attn_scalar": 16, "tie_word_embeddings": False},
    "Gemma4": {**GEMMA4, "sliding_window": 4096},
}
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture
def prompts(ltx: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has the op take prompts of `LEAST` tokens on any device; the lengths of its calls."""
    home: Any = sys.modules[f"{ltx.__name__}.integrations.causal.own_kernel"]
    lengths: list[int] = []
    own = home.attention

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        assert options["is_causal"] is True and key.shape[1] == query.shape[1]
        lengths.append(query.shape[1])
        output: Tensor = own(query, key, value, **options)
        return output

    monkeypatch.setattr(home, "LEAST", LEAST)
    monkeypatch.setattr(home, "runs_kernel", lambda *tensors: not any(t.requires_grad for t in tensors))
    monkeypatch.setattr(home, "attention", attention)
    return lengths


def make(family: str, device: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    return make_model(device, dtype, family, **{**FAMILIES[family], **more})


@every_family
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("length", [LEAST, 15])
def test_prompts(ltx: ModuleType, device: str, prompts: list[int], family: str, batch: int, length: int) -> None:
    model, ids = make(family, device), make_ids(device, length)[:batch]
    stock = model(ids).logits
    report = ltx.optimize(model)
    assert distance(model(ids).logits, stock) < CLOSE
    assert prompts == [length] * LAYERS
    assert REMARK in str(report)


@every_family
def test_generation(ltx: ModuleType, device: str, prompts: list[int], family: str) -> None:
    """The prompt goes through the op, the tokens after it as ever."""
    model, ids = make(family, device), make_ids(device, 15)
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    stock = model.generate(ids, **options)
    ltx.optimize(model)
    assert torch.equal(model.generate(ids, **options), stock)
    assert prompts == [15] * LAYERS


@every_family
def test_static_caches(ltx: ModuleType, device: str, prompts: list[int], family: str) -> None:
    """The places after the prompt are left out, since transformers makes no mask for them."""
    model, ids = make(family, device), make_ids(device, 15)

    def run() -> Tensor:
        cache = transformers.StaticCache(model.config, max_cache_len=20)
        logits: Tensor = model(ids, past_key_values=cache).logits
        return logits

    stock = run()
    report = ltx.optimize(model)
    assert distance(run(), stock) < CLOSE
    assert prompts == [15] * LAYERS
    assert REMARK in str(report)


def test_key_heads_are_not_repeated(ltx: ModuleType, device: str, prompts: list[int], monkeypatch: Any) -> None:
    home: Any = sys.modules[f"{ltx.__name__}.integrations.causal.own_kernel"]
    shapes: list[tuple[int, ...]] = []
    own = home.attention

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        shapes.append((query.shape[2], key.shape[2], value.shape[2]))
        output: Tensor = own(query, key, value, **options)
        return output

    monkeypatch.setattr(home, "attention", attention)
    model = make("Llama", device)
    ltx.optimize(model)
    model(make_ids(device, 15))
    assert shapes == [(4, 2, 2)] * LAYERS


@every_family
@pytest.mark.parametrize("case", ["padding", "four dimensions", "short", "one token", "appended"])
def test_other_calls_stay(ltx: ModuleType, device: str, prompts: list[int], family: str, case: str) -> None:
    """A mask, few tokens, and tokens after others are the model's attention."""
    model, ids = make(family, device), make_ids(device, 15)
    options: dict[str, Any] = {}
    if case in ("short", "one token"):
        ids = ids[:, : LEAST - 1 if case == "short" else 1]
    elif case == "padding":
        options["attention_mask"] = torch.ones_like(ids)
        options["attention_mask"][0, :3] = 0
    elif case == "four dimensions":
        mask = torch.ones(15, 15, dtype=torch.bool, device=device).tril()[None, None].repeat(2, 1, 1, 1)
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        types = {"sliding_attention": mask, "full_attention": mask}
        options["attention_mask"] = types if family in ("Gemma3", "Qwen2", "Qwen3") else mask

    def run() -> Tensor:
        if case != "appended":
            return model(ids, **options).logits
        cache = model(ids[:, :4], use_cache=True).past_key_values
        return model(ids[:, 4:], past_key_values=cache).logits

    stock = run()
    report = ltx.optimize(model)
    assert distance(run(), stock) < CLOSE
    assert prompts == [] and REMARK not in str(report)


@pytest.mark.host
@pytest.mark.parametrize("case", ["no kernel", "rounding", *OTHER_ATTENTION, "gradient"])
def test_other_functions_stay(
    ltx: ModuleType, device: str, prompts: list[int], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    model, ids = make("Llama", device), make_ids(device, 15)
    ltx.optimize(model, rounding="eager" if case == "rounding" else "fp32")
    if case == "no kernel":
        home = sys.modules[f"{ltx.__name__}.integrations.causal.own_kernel"]
        monkeypatch.setattr(home, "runs_kernel", lambda *_: False)
    elif case == "gradient":
        model.requires_grad_(True)
    with torch.enable_grad() if case == "gradient" else other_attention(case, model, monkeypatch):
        model(ids)
    assert prompts == []


@pytest.mark.parametrize("scope", ["process", "context"])
def test_default_device(ltx: ModuleType, device: str, prompts: list[int], scope: str) -> None:
    """It takes the functions that make tensors, and no attention."""
    model, ids = make("Llama", device), make_ids(device, 15)
    ltx.optimize(model)
    if scope == "context":
        with torch.device(device):
            model(ids)
    else:
        torch.set_default_device(device)
        try:
            model(ids)
        finally:
            torch.set_default_device(None)
    assert prompts == [15] * LAYERS


@pytest.mark.parametrize("option", ["softcap", "is_causal", "position_bias", "cache", "s_aux", "sliding_window"])
def test_options_that_change_the_result(ltx: ModuleType, device: str, option: str) -> None:
    """Alone among these, a window of at least the prompt changes nothing."""
    home, calls = (sys.modules[f"{ltx.__name__}.integrations.causal.{name}"] for name in ("own_kernel", "call"))
    function = sys.modules["transformers.integrations.sdpa_attention"].sdpa_attention_forward
    model = make("Llama", device)
    report = ltx.optimize(model)
    site = next(site for site in report.sites if "Attention" in site.class_name)
    module = model.model.layers[0].self_attn
    heads = torch.randn(3, 1, 4, 300, 64, device=device).unbind()

    def attends(module: Any = module, function: Any = function, **options: Any) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(home, "runs_kernel", lambda *_: True)
            return home.attend(calls.FunctionCall(site, module, function, *heads, None, 0.1, options)) is not None

    assert attends() and attends(**{option: None}) and attends(sliding_window=300)
    assert not attends(**{option: 299 if option == "sliding_window" else False})
    assert not attends(function=lambda *_: None)
    module.is_causal = False
    assert not attends()


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_compiled_layers(
    ltx: ModuleType, device: str, prompts: list[int], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The op is in the graph, which serves other lengths."""
    monkeypatch.setattr(sys.modules[f"{ltx.__name__}.integrations.causal.own_kernel"], "attention", ltx.attention)
    model = make(family, device)
    cases = [make_ids(device, length) for length in (15, 17, 19)]
    stock = [model(ids, use_cache=False).logits for ids in cases]
    report = ltx.optimize(model)
    torch.compiler.reset()
    for module in model.modules():
        if type(module).__name__.endswith("DecoderLayer"):
            module.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    for i, (ids, wanted) in enumerate(zip(cases, stock)):
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            assert distance(model(ids, use_cache=False).logits, wanted) < CLOSE
    assert REMARK in str(report)


def test_compiled_layers_without_the_kernel(
    ltx: ModuleType, device: str, prompts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph for short and for long prompts."""
    monkeypatch.setattr(sys.modules[f"{ltx.__name__}.integrations.causal.own_kernel"], "runs_kernel", lambda *_: False)
    model = make("Llama", device)
    ltx.optimize(model)
    torch.compiler.reset()
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="eager", dynamic=True)
    for i, length in enumerate((LEAST - 2, LEAST + 2)):
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            model(make_ids(device, length), use_cache=False)


@pytest.mark.host
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("length", [LEAST - 2, LEAST + 2])
def test_exported_layers(ltx: ModuleType, device: str, prompts: list[int], length: int, strict: bool) -> None:
    """For all lengths, with the model's attention, wherever torch exports the stock layer so."""
    model = make("Llama", device)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rotary = model.model.layers[0], model.model.rotary_emb

        def forward(self, x: Tensor) -> Tensor:
            places = torch.arange(x.shape[1], device=x.device)[None]
            output: Tensor = self.layer(x, position_ids=places, position_embeddings=self.rotary(x, places))
            return output

    x = torch.randn(2, 40, 64, device=device)
    sizes = {"x": {1: torch.export.Dim("length", min=2, max=64)}}

    def export() -> Any:
        given = x[:, :length].clone()
        return torch.export.export(Layer(), (given,), dynamic_shapes=sizes, strict=strict).module()

    try:
        export()
    except torch._dynamo.exc.UserError as error:
        pytest.skip(f"torch does not export the stock layer: {error}")
    ltx.optimize(model)
    exported = export()
    assert prompts == []
    for rows in (3, 40):
        assert distance(exported(x[:, :rows]), Layer()(x[:, :rows])) < CLOSE


@pytest.mark.extended
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_compiled_models(ltx: ModuleType, device: str, prompts: list[int], family: str) -> None:
    """In one graph with the model's mask, which transformers makes for every prompt while it is traced."""
    model, ids = make(family, device), make_ids(device, 15)
    stock = model(ids, use_cache=False).logits
    ltx.optimize(model)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert distance(compiled(ids, use_cache=False).logits, stock) < CLOSE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_kernel(ltx: ModuleType, cuda: str, family: str, dtype: torch.dtype) -> None:
    """On a GPU with the kernel: not further from the model in float32 than stock, compiled and in a graph, too."""
    if not has_kernel(ltx, cuda):
        pytest.skip("the kernel is for Hopper alone")
    model, ids = make(family, cuda, dtype, head_dim=64), make_ids(cuda, 300)[:1]
    stock, exact = model(ids).logits, copy.deepcopy(model).float()(ids).logits
    report = ltx.optimize(model)
    output = model(ids).logits
    assert distance(output, exact) <= 1.2 * distance(stock, exact)
    assert REMARK in str(report)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # for which transformers makes a mask, so that torch attends
        captured = model(ids, use_cache=False).logits
    graph.replay()
    assert distance(captured, exact) <= 1.2 * distance(stock, exact)
    torch.compiler.reset()
    for layer in model.model.layers:
        layer.compile(fullgraph=True)
    assert distance(model(ids, use_cache=False).logits, exact) <= 1.2 * distance(stock, exact)
    assert f"{REMARK} (compiled)" in str(report)
