"""`optimize` on whole layers of language models: a tiny model of each family's own classes, compared with stock."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
from helpers.build import load_build  # noqa: E402
from helpers.engine_paths import block_descriptions, few_with_every_part, of_each_path, one_of_each_path  # noqa: E402
from helpers.language_models import (  # noqa: E402
    FALCONS,
    GEMMA4,
    LAYERS,
    LLAMA4,
    MINISTRAL3,
    QWEN3_5,
    distance,
    forget_kernelized,
    gradients,
    make_encoder,
    make_falcon,
    make_ids,
    make_model,
    random_,
    text_model,
)
from helpers.ranks import join_ranks, run_ranks  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")
HALF = [torch.bfloat16, torch.float16]
# Of float32: the order of sums, which on a GPU is that of other products as well.
CLOSE = 1e-5 if torch.cuda.is_available() else 3e-6


@dataclass(frozen=True)
class Case:
    """A tiny model.

    family: The prefix of its configuration and model classes.
    replaced: How many modules of each class `optimize` replaces, without "transformers." before the names.
    config: What its configuration changes.
    fp8: How many linear layers precision="fp8" takes.
    """

    family: str
    replaced: dict[str, int]
    fp8: int
    config: dict[str, Any] = field(default_factory=dict)


def layers(prefix: str, norms: int, mlp: str = "") -> dict[str, int]:
    each = {f"{prefix}DecoderLayer": LAYERS, f"{prefix}Attention": LAYERS, mlp or f"{prefix}MLP": LAYERS}
    return {**each, f"{prefix}RMSNorm": norms}


def of_gemma4(norms: int) -> dict[str, int]:
    each = {"Gemma4TextDecoderLayer": LAYERS, "Gemma4TextAttention": LAYERS, "Gemma4TextMLP": LAYERS}
    return {**each, "Gemma4RMSNorm": norms}


def of_llama4(mlps: int) -> dict[str, int]:
    each = {"Llama4TextDecoderLayer": LAYERS, "Llama4TextAttention": LAYERS, "Llama4TextMLP": mlps}
    return {**each, "Llama4TextRMSNorm": 2 * LAYERS + 1, "Llama4TextL2Norm": 1}


# With tied embeddings, a random model repeats its last token.
GEMMA = {"sliding_window": 6, "query_pre_attn_scalar": 16, "tie_word_embeddings": False}
CASES = {
    "llama": Case("Llama", layers("Llama", 5), 14),
    "llama-biases": Case("Llama", layers("Llama", 5), 14, {"mlp_bias": True, "attention_bias": True}),
    "llama4": Case("Llama4", of_llama4(LAYERS), 14, LLAMA4),
    "llama4-moe": Case(
        "Llama4",
        of_llama4(LAYERS),
        11,
        {**LLAMA4, "moe_layers": [0], "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
    "mistral": Case("Mistral", layers("Mistral", 5), 14, {"sliding_window": None}),
    "mistral-window": Case("Mistral", layers("Mistral", 5), 14, {"sliding_window": 6}),
    "ministral": Case("Ministral", layers("Ministral", 5), 14, {"sliding_window": 6}),
    "ministral3": Case("Ministral3", layers("Ministral3", 5), 14, MINISTRAL3),
    "qwen2": Case("Qwen2", layers("Qwen2", 5), 14),
    "qwen2.5-vl": Case("Qwen2_5_VL", layers("Qwen2_5_VL", 5, "Qwen2MLP"), 14),
    "phi3": Case("Phi3", layers("Phi3", 5), 8),
    "phi3-partial": Case(
        "Phi3",
        layers("Phi3", 5),
        8,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "qwen3": Case("Qwen3", layers("Qwen3", 9), 14),
    "qwen3-window": Case(
        "Qwen3", layers("Qwen3", 9), 14, {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}
    ),
    "qwen3-moe": Case(
        "Qwen3Moe",
        {**layers("Qwen3Moe", 9), "Qwen3MoeMLP": 1},
        11,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    ),
    "qwen3.5": Case("Qwen3_5", {**layers("Qwen3_5", 7), "Qwen3_5Attention": 1, "Qwen3_5RMSNormGated": 1}, 13, QWEN3_5),
    "qwen3.5-moe": Case(
        "Qwen3_5Moe",
        {**layers("Qwen3_5Moe", 7), "Qwen3_5MoeAttention": 1, "Qwen3_5MoeRMSNormGated": 1},
        7,
        {
            **QWEN3_5,
            "layer_types": QWEN3_5["layer_types"][::-1],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "gemma2": Case("Gemma2", layers("Gemma2", 9), 14, GEMMA),
    "gemma3": Case("Gemma3", layers("Gemma3", 13), 14, GEMMA),
    "gemma4": Case("Gemma4", of_gemma4(18), 14, GEMMA4),
    "gemma4-shared": Case(
        "Gemma4",
        of_gemma4(16),
        12,
        {
            **GEMMA4,
            "layer_types": ["full_attention"] * LAYERS,
            "num_kv_shared_layers": 1,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4-moe": Case(
        "Gemma4",
        of_gemma4(23),
        13,
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 4,
            "moe_intermediate_size": 32,
        },
    ),
    "olmo2": Case("Olmo2", layers("Olmo2", 9), 14),
    "gpt-oss": Case(
        "GptOss",
        {"GptOssDecoderLayer": LAYERS, "GptOssAttention": LAYERS, "GptOssExperts": LAYERS, "GptOssRMSNorm": 5},
        8,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    ),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
BLOCKS = {name: [f"transformers.{replaced}" for replaced in case.replaced] for name, case in CASES.items()}
DESCRIPTIONS = block_descriptions(load_build(), "transformers")
FIRST = one_of_each_path(DESCRIPTIONS, BLOCKS)
every_path = of_each_path("case", CASES, FIRST)
every_compiled_path = of_each_path("case", CASES, few_with_every_part(DESCRIPTIONS, BLOCKS, FIRST))


def make(case: Case, device: str, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    return make_model(device, dtype, case.family, **{**case.config, **config})


def assert_ran(report: Any, case: Case) -> None:
    """Every module of the family's layers ran the ops, and nothing else is in the report."""
    assert report.replaced == {f"transformers.{name}": count for name, count in case.replaced.items()}
    assert all(site.calls for site in report.sites), report
    assert report.fallbacks == {} and report.left_alone == {} and "not packed" not in str(report)


def test_the_gate_of_experts(ltx: ModuleType, device: str) -> None:
    """It is the class's own again after `restore`; experts with another gate stay as they are."""
    model, ids = make(CASES["gpt-oss"], device), make_ids(device)
    stock = model(ids).logits
    first, second = (layer.mlp.experts for layer in model.model.layers[:2])
    second._apply_gate = functools.partial(type(second)._apply_gate, second)
    report = ltx.optimize(model)
    assert report.replaced["transformers.GptOssExperts"] == LAYERS - 1
    assert "its _apply_gate is patched already" in report.left_alone.values()
    assert distance(model(ids).logits, stock) < CLOSE
    with torch.autocast(device, dtype=torch.bfloat16):
        model(ids)
    assert report.fallbacks["transformers.GptOssExperts"].keys() == {
        "autocast is on in torch.bfloat16, the input has dtype torch.float32"
    }
    report.restore()
    assert "_apply_gate" not in first.__dict__ and "_apply_gate" in second.__dict__
    assert torch.equal(model(ids).logits, stock)


def test_alpha_and_limit_of_experts(ltx: ModuleType, device: str) -> None:
    """All experts of transformers are made with the same numbers."""
    model, ids = make(CASES["gpt-oss"], device), make_ids(device)
    logits = [model(ids).logits]
    for name, value in (("alpha", 0.4), ("limit", 0.02)):
        for number, layer in enumerate(model.model.layers, 1):
            setattr(layer.mlp.experts, name, value * number)
        logits.append(model(ids).logits)
        assert distance(*logits[-2:]) > 10 * CLOSE
    ltx.optimize(model, strict=True)
    assert distance(model(ids).logits, logits[-1]) < CLOSE


def test_keys_of_earlier_layers(ltx: ModuleType, device: str) -> None:
    """Gemma 4 as it is released: two kinds of layers, the last of each reading keys of the one before; scales."""
    config = {**GEMMA4, "layer_types": 2 * GEMMA4["layer_types"], "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    model, ids = make_model(device, torch.float32, "Gemma4", **config), make_ids(device)
    for number, layer in enumerate(model.model.layers, 1):
        layer.layer_scalar.fill_(1 - 0.1 * number)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False}
    stock, tokens = model(ids).logits, model.generate(ids, **options)
    report = ltx.optimize(model, strict=True)
    assert distance(model(ids).logits, stock) < CLOSE
    assert torch.equal(model.generate(ids, **options), tokens)
    assert report.replaced["transformers.Gemma4TextAttention"] == 4 and report.fallbacks == {}
    assert "recorded calls: 4 of 4 transformers.Gemma4TextDecoderLayer" in str(report)


@every_case
@pytest.mark.parametrize("batch", [1, 3])
def test_float32(ltx: ModuleType, device: str, case: Case, batch: int) -> None:
    model, ids = make(case, device), make_ids(device).repeat(2, 1)[:batch]
    stock = model(ids).logits
    keys = list(model.state_dict())
    report = ltx.optimize(model, strict=True)
    assert distance(model(ids).logits, stock) < CLOSE
    assert_ran(report, case)
    assert list(model.state_dict()) == keys
    report.restore()
    assert distance(model(ids).logits, stock) < CLOSE
    assert not [key for module in model.modules() for key in vars(module) if key == "forward" or "ltx" in key]
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in model.parameters())  # packed no more


@pytest.mark.host
@every_case
def test_every_norm_has_its_eps(ltx: ModuleType, device: str, case: Case) -> None:
    """Norms that share a launch, such as those of query and key, are made with one number and may have others."""
    model, ids = make(case, device), make_ids(device)
    plain = model(ids).logits
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    for number, norm in enumerate(norms, 1):
        setattr(norm, "eps" if hasattr(norm, "eps") else "variance_epsilon", 0.02 * number)
    stock = model(ids).logits
    assert distance(stock, plain) > 0.01
    ltx.optimize(model, strict=True)
    assert distance(model(ids).logits, stock) < CLOSE


@every_case
@pytest.mark.parametrize("rounding", ["fp32", "eager"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half(ltx: ModuleType, device: str, case: Case, dtype: torch.dtype, rounding: str) -> None:
    """Not further from the model in float32 than stock; "eager" has stock's bits but for the order of sums."""
    model, ids = make(case, device, dtype), make_ids(device)
    stock, exact = model(ids).logits, copy.deepcopy(model).float()(ids).logits
    report = ltx.optimize(model, rounding=rounding)
    ours = model(ids).logits
    assert ours.dtype == dtype
    assert distance(ours, exact) <= 1.2 * distance(stock, exact)  # one small model: the ratio has its own noise
    if rounding == "eager":
        assert distance(ours, stock) < 0.5 * distance(stock, exact)
    else:
        assert_ran(report, case)
    report.restore()
    assert torch.equal(model(ids).logits, stock)


@every_case
@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic cache", "static cache"])
def test_generation(ltx: ModuleType, device: str, case: Case, cache: str | None) -> None:
    """Token for token, with prompts of two lengths, beyond the length of a sliding window."""
    model, ids = make(case, device), make_ids(device)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False, "cache_implementation": cache}
    if cache == "static":
        options["disable_compile"] = True
    try:
        stock = model.generate(ids, **options)
    except TypeError as error:  # transformers 5.17, for chunked masks of a static cache
        if "block_sequence_ids" not in str(error):
            raise
        pytest.skip(f"NOT RUN: {error}")
    report = ltx.optimize(model)
    assert torch.equal(model.generate(ids, **options), stock)
    assert_ran(report, case)
    assert len(stock[:, ids.shape[1] :].unique()) > 5  # not one token over and over


@every_case
def test_recorded_outputs(ltx: ModuleType, device: str, case: Case) -> None:
    """Hidden states and attention weights, which transformers records by hooks."""
    model, ids = make(case, device, attn_implementation="eager"), make_ids(device)
    stock = model(ids, output_hidden_states=True, output_attentions=True)
    ltx.optimize(model)
    ours = model(ids, output_hidden_states=True, output_attentions=True)
    assert len(ours.hidden_states) == len(stock.hidden_states) == LAYERS + 1
    for got, want in zip(ours.hidden_states + ours.attentions, stock.hidden_states + stock.attentions, strict=True):
        assert distance(got, want) < CLOSE


@pytest.mark.host
@every_case
def test_faults_would_show(ltx: ModuleType, device: str, case: Case) -> None:
    """No parameter is left unread: each one, changed, changes the result as it changes stock's."""
    model, stock_model, ids = make(case, device), make(case, device), make_ids(device)
    ltx.optimize(model)
    before = model(ids).logits
    for name, parameter in text_model(model).layers[0].named_parameters():
        pair = parameter, text_model(stock_model).layers[0].get_parameter(name)
        kept = parameter.clone()
        for changed in pair:
            changed.mul_(0.5).add_(0.1)
        stock = stock_model(ids).logits
        assert distance(model(ids).logits, stock) < 3 * CLOSE, name
        # A bias of the keys moves all the scores of a query alike, which the softmax takes away.
        assert distance(before, stock) > 1e-4 or name.endswith("k_proj.bias"), name
        for changed in pair:
            changed.copy_(kept)


@pytest.mark.host
@every_path
def test_hooks(ltx: ModuleType, device: str, case: Case) -> None:
    """A hook on any submodule of a layer does what it does in the stock model."""
    stock_model, model, ids = make(case, device), make(case, device), make_ids(device)
    ltx.optimize(model)
    first = text_model(model).layers[0]
    (prefix,) = [name for name, module in model.named_modules() if module is first]
    names = [name for name, _ in first.named_modules(prefix=prefix)]
    seen: dict[str, list[str]] = {"stock": [], "ours": []}
    handles = [
        m.get_submodule(name).register_forward_hook(lambda *_, where=where, name=name: seen[where].append(name))
        for where, m in (("stock", stock_model), ("ours", model))
        for name in names
    ]
    assert distance(model(ids).logits, stock_model(ids).logits) < CLOSE
    assert sorted(seen["ours"]) == sorted(seen["stock"])
    for handle in handles:
        handle.remove()
    for name in names:
        handles = [m.get_submodule(name).register_forward_hook(scaled) for m in (model, stock_model)]
        assert distance(model(ids).logits, stock_model(ids).logits) < CLOSE, name
        for handle in handles:
            handle.remove()


def scaled(module: nn.Module, arguments: Any, output: Any) -> Any:
    if isinstance(output, Tensor):
        return output * 1.25
    return (output[0] * 1.25, *output[1:])


class Quantised(nn.Linear):
    """Stands for a layer of a quantisation library: its weight is not what multiplies."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, 1.5 * self.weight, self.bias)


@every_case
def test_quantised_layers_are_called(ltx: ModuleType, device: str, case: Case) -> None:
    model, stock_model, ids = make(case, device), make(case, device), make_ids(device)
    for m in (model, stock_model):
        for module in text_model(m).layers.modules():
            if type(module) is nn.Linear:
                module.__class__ = Quantised
    report = ltx.optimize(model)
    assert distance(model(ids).logits, stock_model(ids).logits) < CLOSE
    assert "no plain nn.Linear" in str(report) or case.family == "Phi3"  # which has packed weights of its own


@pytest.mark.host
@every_case
@pytest.mark.parametrize("when", ["before", "after"])
def test_norm_weights_in_buffers(ltx: ModuleType, device: str, case: Case, when: str) -> None:
    model, stock_model, ids = make(case, device), make(case, device), make_ids(device)
    if when == "after":
        ltx.optimize(model)
        model(ids)
    form_of = ltx.integrations.engine.norm_forms.form_of
    for m in (model, stock_model):
        for module in m.modules():
            weight = module._parameters.get("weight") if form_of(module) is not None else None
            if weight is not None:
                del module.weight
                module.register_buffer("weight", 2 * weight.detach())
    if when == "before":
        ltx.optimize(model)
    assert distance(model(ids).logits, stock_model(ids).logits) < CLOSE


@pytest.mark.host
@every_case
def test_attention_of_a_class_made_later(ltx: ModuleType, device: str, case: Case) -> None:
    """As FSDP makes one of a module's class, in a module of its own."""
    model, stock_model, ids = make(case, device), make(case, device), make_ids(device)
    ltx.optimize(model)
    for m in (model, stock_model):
        for layer in text_model(m).layers:
            if hasattr(layer, "self_attn"):
                cls = type(layer.self_attn)
                layer.self_attn.__class__ = type("Sharded", (cls,), {"__module__": __name__})
    assert distance(model(ids).logits, stock_model(ids).logits) < CLOSE


def _tensor_parallel(rank: int, world: int, port: int, build: str, folder: str) -> None:
    """One of two processes that share the weights of a model in `folder`."""
    ltx = join_ranks(rank, world, port, build)
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, folder)
    ids = make_ids("cpu")
    with torch.no_grad():
        whole = load()(ids).logits
        model = load(tp_plan="auto")
        assert type(model.model.layers[0].mlp.gate_proj.weight).__name__ == "DTensor"
        stock = model(ids).logits
        report = ltx.optimize(model)
        ours = model(ids).logits
        assert distance(ours, whole) < CLOSE and distance(stock, whole) < CLOSE
        assert all(site.calls for site in report.sites) and report.fallbacks == {}
        assert "not packed, 2 attentions: q_proj, k_proj or v_proj is no plain nn.Linear" in str(report)
        report.restore()
        assert torch.equal(model(ids).logits, stock)
    torch.distributed.destroy_process_group()


@pytest.mark.extended
def test_tensor_parallel(ltx: ModuleType, backend: str, tmp_path: Path) -> None:
    """Linear layers that are split over ranks are called as they are, and the report says so."""
    if backend != "cpu":
        pytest.skip("the processes load the CPU build")
    make(CASES["llama"], "cpu", vocab_size=100).save_pretrained(tmp_path)
    run_ranks(_tensor_parallel, 2, ltx, str(tmp_path))


@every_path
@pytest.mark.parametrize("precision", ["native", "fp8"])
def test_lora(ltx: ModuleType, device: str, case: Case, precision: str, request: pytest.FixtureRequest) -> None:
    """Disabled adapters leave the bits of the model without adapters."""
    peft = pytest.importorskip("peft")
    if precision == "fp8":
        request.getfixturevalue("fp8_device")
    model, ids = make(case, device, torch.bfloat16 if precision == "fp8" else torch.float32), make_ids(device)
    bare = model(ids).logits
    report = ltx.optimize(model, precision=precision)
    plain = model(ids).logits
    # The router of Llama 4 is a linear layer that returns two tensors, which peft cannot adapt.
    others = ["router"] if any(name.endswith("router") for name, _ in model.named_modules()) else None
    config = peft.LoraConfig(r=4, target_modules="all-linear", exclude_modules=others, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).requires_grad_(False)
    ours = adapted(ids).logits
    with adapted.disable_adapter():
        assert torch.equal(adapted(ids).logits, plain)
    report.restore()
    stock = adapted(ids).logits
    close = 2 * distance(plain, bare) if precision == "fp8" else CLOSE
    assert distance(stock, bare) > 0.01 and distance(ours, stock) < close


@pytest.mark.host
@every_case
def test_training_runs_stock(ltx: ModuleType, device: str, case: Case) -> None:
    model, ids = make(case, device).requires_grad_(True).train(), make_ids(device)
    want = gradients(model, ids)
    report = ltx.optimize(model)
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        for got, expected in zip(gradients(model, ids), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())
    assert any("a gradient is needed" in reasons for reasons in report.fallbacks.values())
    model.eval()
    calls = report.sites[0].calls
    model(ids)  # without gradients it is the ops again
    assert report.sites[0].calls == calls + LAYERS


@pytest.mark.extended
@every_compiled_path
def test_compile(ltx: ModuleType, device: str, case: Case) -> None:
    model, ids = make(case, device), make_ids(device)
    stock = model(ids, use_cache=False).logits
    report = ltx.optimize(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert distance(compiled(ids, use_cache=False).logits, stock) < CLOSE
    assert all(site.traces for site in report.sites) and report.fallbacks == {}
    compiled(make_ids(device, 12), use_cache=False)  # once more for lengths that vary, and then never again
    with torch.compiler.set_stance("fail_on_recompile"):
        ids = make_ids(device, 15)
        assert distance(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits) < CLOSE


@pytest.mark.extended
@every_compiled_path
def test_compiled_generation(ltx: ModuleType, device: str, case: Case) -> None:
    if case.family == "Llama4":
        pytest.skip("transformers generates with Llama 4 without torch.compile")
    report = compiled_generation(ltx, make(case, device), make_ids(device))
    assert all(site.traces for site in report.sites) and report.fallbacks == {}


def test_padded_prompts_without_a_mask(ltx: ModuleType, device: str) -> None:
    """`generate` makes the mask if the signature of the model's forward has one."""
    model, ids = make_model(device), make_ids(device)
    ids[0, :4] = 0
    options = {"max_new_tokens": 2, "pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
    stock = model.generate(ids, do_sample=False, **options).logits
    ltx.optimize(model, graphs=True)
    ours = model.generate(ids, do_sample=False, **options).logits
    assert all(distance(a, b) < CLOSE for a, b in zip(ours, stock))


def compiled_generation(ltx: ModuleType, model: Any, ids: Tensor) -> Any:
    """`generate` compiles the decoding step by itself on a GPU; here wherever it runs, and once for all tokens."""
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    stock = model.generate(ids, **options)
    report = ltx.optimize(model)
    config = transformers.CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    config._compile_all_devices = True
    torch._dynamo.utils.counters.clear()
    assert torch.equal(model.generate(ids, **options, cache_implementation="static", compile_config=config), stock)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # as many as stock has
    return report


@every_case
def test_fp8(ltx: ModuleType, device: str, case: Case) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 on this GPU")
    model, ids = make(case, device, torch.bfloat16), make_ids(device)
    stock, exact = model(ids).logits, copy.deepcopy(model).float()(ids).logits
    report = ltx.optimize(model, precision="fp8")
    ours = model(ids).logits
    assert report.replaced["torch.Linear"] == case.fp8 and report.fallbacks == {}
    assert distance(stock, exact) < distance(ours, exact) < 0.3
    report.restore()
    assert torch.equal(model(ids).logits, stock)


@pytest.mark.host
@every_case
@pytest.mark.parametrize("first", ["optimize", "kernelize"])
def test_optimize_and_kernelize(ltx: ModuleType, device: str, case: Case, first: str) -> None:
    model, ids = make(case, device), make_ids(device)
    both_ways(ltx, model, lambda: model(ids).logits, first)


def both_ways(ltx: ModuleType, model: Any, call: Callable[[], Tensor], first: str) -> None:
    """Either way round the result holds, and what kernelize has replaced is reported."""
    kernels = pytest.importorskip("kernels")
    stock = call()
    functions = [f for m in model.modules() for f in vars(m).get("_kernel_funcs", {}).values()]
    try:
        for step in (first, "kernelize" if first == "optimize" else "optimize"):
            if step == "optimize":
                report = ltx.optimize(model)
            else:
                with kernels.use_kernel_mapping(ltx.kernel_mapping(), inherit_mapping=False):
                    kernels.kernelize(model, mode=kernels.Mode.INFERENCE)
        assert distance(call(), stock) < CLOSE
        if functions:  # this transformers takes this kernels
            assert report.fallbacks or (first == "kernelize" and "its forward is patched already" in str(report))
    finally:
        forget_kernelized()


@pytest.mark.parametrize("config", FALCONS.values(), ids=FALCONS)
def test_falcon(ltx: ModuleType, device: str, config: dict[str, Any]) -> None:
    model, ids = make_falcon(device, **config), make_ids(device)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    stock, tokens = model(ids).logits, model.generate(ids, **options)
    masked = model(ids, attention_mask=mask).logits[:, 4:]
    report = ltx.optimize(model, strict=True)
    assert distance(model(ids).logits, stock) < CLOSE
    assert distance(model(ids, attention_mask=mask).logits[:, 4:], masked) < CLOSE
    assert torch.equal(model.generate(ids, **options), tokens)
    assert report.replaced["transformers.FalconAttention"] == LAYERS and report.fallbacks == {}
    assert report.replaced["transformers.FalconDecoderLayer"] == LAYERS and all(site.calls for site in report.sites)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert distance(compiled(ids, use_cache=False).logits, stock) < CLOSE
    for dtype in HALF:
        half = make_falcon(device, dtype, **config)
        theirs = half(ids).logits
        ltx.optimize(half)
        exact = copy.deepcopy(half).float()
        ltx.restore(exact)
        wide = exact(ids).logits
        assert distance(half(ids).logits, wide) <= 1.2 * distance(theirs, wide)
    report.restore()
    assert distance(model(ids).logits, stock) < CLOSE


@pytest.mark.host
@pytest.mark.parametrize("config", FALCONS.values(), ids=FALCONS)
def test_parts_of_falcon(ltx: ModuleType, device: str, config: dict[str, Any]) -> None:
    """A parameter that changes, a number of a norm and a hook on any submodule do what they do in the stock model."""
    models, ids = [make_falcon(device, **config) for _ in range(2)], make_ids(device)
    model, stock_model = models
    ltx.optimize(model, strict=True)
    plain = model(ids).logits

    def compared() -> float:
        stock = stock_model(ids).logits
        assert distance(model(ids).logits, stock) < 3 * CLOSE
        return distance(plain, stock)

    for name, _ in model.transformer.h[0].named_parameters():
        pair = [m.transformer.h[0].get_parameter(name) for m in models]
        kept = pair[0].clone()
        for parameter in pair:
            parameter.mul_(0.5).add_(0.1)
        assert compared() > 1e-4, name
        for parameter in pair:
            parameter.copy_(kept)
    for name, module in model.transformer.h[0].named_modules():
        pair = [m.transformer.h[0].get_submodule(name) for m in models]
        if isinstance(module, nn.LayerNorm):
            for norm in pair:
                norm.eps = 0.3
            assert compared() > 1e-3, name
            for norm in pair:
                norm.eps = model.config.layer_norm_epsilon
        if not isinstance(module, nn.Dropout):
            handles = [part.register_forward_hook(scaled) for part in pair]
            assert compared() > 1e-4, name
            for handle in handles:
                handle.remove()


@pytest.mark.host
@pytest.mark.parametrize("config", FALCONS.values(), ids=FALCONS)
def test_traced_falcon(ltx: ModuleType, device: str, config: dict[str, Any]) -> None:
    """Under torch.jit.trace sizes are tensors."""
    model, ids = make_falcon(device, **config), make_ids(device)
    model.config.use_cache = model.config.return_dict = False
    ltx.optimize(model)
    expected = model(ids)[0]
    assert torch.equal(torch.jit.trace(model, (ids,), check_trace=False)(ids)[0], expected)


def test_falcon_in_training(ltx: ModuleType, device: str) -> None:
    """With a dropout the layers run stock."""
    model, ids = make_falcon(device, hidden_dropout=0.5), make_ids(device)
    report = ltx.optimize(model)
    model.train()
    torch.manual_seed(3)
    ours = model(ids).logits
    assert report.fallbacks["transformers.FalconDecoderLayer"] == {"a dropout is active": LAYERS}
    report.restore()
    torch.manual_seed(3)
    assert distance(ours, model(ids).logits) < CLOSE


@pytest.mark.parametrize("name", [n if n == "7b" else pytest.param(n, marks=pytest.mark.repeated) for n in FALCONS])
def test_compiled_generation_of_falcon(ltx: ModuleType, device: str, name: str) -> None:
    report = compiled_generation(ltx, make_falcon(device, **FALCONS[name]), make_ids(device))
    (attention,) = [site for site in report.sites if site.name == "transformers.FalconAttention"]
    assert attention.traces and set(report.fallbacks) == {"torch.LayerNorm"}  # which torch.compile fuses by itself


@pytest.mark.parametrize("first", ["optimize", "kernelize"])
def test_falcon_and_kernelize(ltx: ModuleType, device: str, first: str) -> None:
    model, ids = make_falcon(device, **FALCONS["7b"]), make_ids(device)
    both_ways(ltx, model, lambda: model(ids).logits, first)


@pytest.mark.host
def test_falcon_that_stays_stock(ltx: ModuleType, device: str) -> None:
    """Positions by alibi, recorded attention, and gradients."""
    ids = make_ids(device)
    for config, arguments, reason in (
        ({"alibi": True}, {}, "positions by alibi"),
        ({"attn_implementation": "eager"}, {"output_attentions": True}, "another attention than sdpa"),
    ):
        model = make_falcon(device, **config)
        stock = model(ids, **arguments).logits
        report = ltx.optimize(model)
        assert distance(model(ids, **arguments).logits, stock) < CLOSE
        assert report.fallbacks["transformers.FalconAttention"] == {reason: LAYERS}
    model = make_falcon(device).requires_grad_(True)
    want = gradients(model, ids)
    report = ltx.optimize(model)
    for got, expected in zip(gradients(model, ids), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())
    assert report.fallbacks["transformers.FalconAttention"] == {"a gradient is needed": LAYERS}


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("prefix", ["T5", "UMT5"])
def test_encoders(ltx: ModuleType, device: str, prefix: str, dtype: torch.dtype) -> None:
    model, ids = make_encoder(prefix, device, dtype), make_ids(device)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    stock = model(ids, attention_mask=mask).last_hidden_state
    exact = copy.deepcopy(model).float()(ids, attention_mask=mask).last_hidden_state
    report = ltx.optimize(model, strict=True)
    ours = model(ids, attention_mask=mask).last_hidden_state
    names = (f"{prefix}Block", f"{prefix}DenseGatedActDense", f"{prefix}LayerNorm")
    counts = (LAYERS, LAYERS, 2 * LAYERS + 1)
    assert report.replaced == {f"transformers.{name}": count for name, count in zip(names, counts)}
    if dtype == torch.float32:
        assert distance(ours, stock) < CLOSE
    else:
        assert distance(ours, exact) <= 1.2 * distance(stock, exact)
    reason = {"the stock block clamps its stream in float16": LAYERS}
    assert report.fallbacks == ({f"transformers.{prefix}Block": reason} if dtype == torch.float16 else {})
    # In half precision the scores, which T5 does not scale, take roundings too far to tell a hook from none.
    hooks = ("encoder.block.0.layer.0", "encoder.block.0.layer.1", "encoder.block.0.layer.1.DenseReluDense.act")
    for name in hooks if dtype == torch.float32 else ():
        handle = model.get_submodule(name).register_forward_hook(scaled)
        hooked = model(ids, attention_mask=mask).last_hidden_state
        report.restore()
        unhooked = distance(hooked, stock)
        assert distance(hooked, model(ids, attention_mask=mask).last_hidden_state) < 2 * CLOSE < unhooked
        handle.remove()
        report = ltx.optimize(model)
    report.restore()
    # Packed weights may make torch's CPU product in float32 another one.
    assert distance(model(ids, attention_mask=mask).last_hidden_state, stock) < 2 * CLOSE


@pytest.fixture
def ordinary(ltx: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """An encoder's result without recorded calls."""
    replay = sys.modules[f"{ltx.__name__}.integrations.replay.calls"]

    def run(model: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(replay, "RECORD", "0")
            return model(ids, attention_mask=mask).last_hidden_state

    return run


def recordings(ltx: ModuleType, model: Any) -> list[Any]:
    """What the blocks hold of their calls, of each signature: a recorded call, or the reason why there is none."""
    replay = sys.modules[f"{ltx.__name__}.integrations.replay.calls"]
    held = [replay.held(block).replays for block in model.encoder.block]
    return [call for replays in held if replays is not None for call in replays.calls.values()]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("prefix", ["T5", "UMT5"])
def test_recorded_encoders(
    ltx: ModuleType, device: str, ordinary: Callable[..., Tensor], prefix: str, dtype: torch.dtype, masked: bool
) -> None:
    """Same bits and counts with prompts of several lengths in turn."""
    model, inputs = make_encoder(prefix, device, dtype), []
    for i in range(4):
        for length in (9, 1, 14):
            ids = make_ids(device, length)
            mask = torch.ones_like(ids)
            mask[0, length - i :] = 0  # of all ones in the first round: transformers hands no mask to the blocks
            inputs.append((ids, mask if masked else None))
    stock = [model(ids, attention_mask=mask).last_hidden_state for ids, mask in inputs]
    report = ltx.optimize(model, strict=True)
    expected = [ordinary(model, *given) for given in inputs]
    counts = {site.name: site.calls for site in report.sites}
    assert recordings(ltx, model) == []
    results = [model(ids, attention_mask=mask).last_hidden_state for ids, mask in inputs]
    found = recordings(ltx, model)
    assert sum(not isinstance(call, str) for call in found) == 3 * LAYERS, found
    assert f"recorded calls: {LAYERS} of {LAYERS} transformers.{prefix}Block" in str(report)
    assert all(map(torch.equal, results, expected))
    assert {site.name: site.calls for site in report.sites} == {name: 2 * calls for name, calls in counts.items()}
    assert report.fallbacks == {}
    if dtype == torch.float32:
        assert all(distance(*pair) < CLOSE for pair in zip(results, stock))


def twice(*args: Any, **options: Any) -> tuple[Tensor, None]:
    """An attention function of somebody else."""
    stock = sys.modules["transformers.integrations.sdpa_attention"].sdpa_attention_forward
    return 2 * stock(*args, **options)[0], None


def _implementation(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.encoder.config._attn_implementation = "eager"


def _configuration(model: Any, patch: pytest.MonkeyPatch) -> None:
    attention = model.encoder.block[1].layer[0].SelfAttention
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation = "eager"


def _registered(model: Any, patch: pytest.MonkeyPatch) -> None:
    registry = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    patch.setitem(registry._global_mapping, "sdpa", twice)


def _registered_in_its_name(model: Any, patch: pytest.MonkeyPatch) -> None:
    registry = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    stock = registry._global_mapping["sdpa"]
    patch.setitem(
        registry._global_mapping, "sdpa", functools.wraps(stock)(lambda *args, **kwargs: twice(*args, **kwargs))
    )


def _eager_function(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys.modules[type(model).__module__], "eager_attention_forward", twice)
    model.encoder.config._attn_implementation = "eager"


def _forward_of_the_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    cls = type(model.encoder.block[0].layer[0].SelfAttention)
    stock = cls.forward

    @functools.wraps(stock)
    def forward(*args: Any, **options: Any) -> Any:
        return 2 * (found := stock(*args, **options))[0], *found[1:]

    patch.setattr(cls, "forward", forward)


def _hook(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.encoder.block[0].layer[0].SelfAttention.register_forward_hook(scaled)


def _in_place(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.encoder.block[1].layer[0].SelfAttention.v.weight.mul_(2)


def _positions(model: Any, patch: pytest.MonkeyPatch) -> None:
    bias = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias
    bias.weight = nn.Parameter(2 * bias.weight, requires_grad=False)


def _distances(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.encoder.block[0].layer[0].SelfAttention.relative_attention_num_buckets = 8


def _scaling(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.encoder.block[1].layer[0].SelfAttention.scaling = 0.5


def _eps(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.encoder.block[1].layer[1].layer_norm.variance_epsilon = 0.3


def _dropout(model: Any, patch: pytest.MonkeyPatch) -> None:
    dropout = model.encoder.block[0].layer[1].dropout
    dropout.p = 1.0
    dropout.train()


CHANGES = [
    _implementation, _configuration, _registered, _eager_function, _forward_of_the_class, _hook, _in_place, _positions,
    _distances, _scaling, _eps, _dropout,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
@pytest.mark.parametrize("prefix", ["T5", "UMT5"])
def test_changes_of_recorded_encoders(
    ltx: ModuleType,
    device: str,
    ordinary: Callable[..., Tensor],
    monkeypatch: pytest.MonkeyPatch,
    prefix: str,
    change: Callable[[Any, pytest.MonkeyPatch], None],
) -> None:
    # In float32 torch's attention and the eager one may have the same bits. In bfloat16 the eager one rounds scores.
    model, ids = make_encoder(prefix, device, torch.bfloat16), make_ids(device)
    ltx.optimize(model)
    for _ in range(3):
        before = model(ids).last_hidden_state
    assert not any(isinstance(call, str) for call in recordings(ltx, model))
    change(model, monkeypatch)
    after = [model(ids).last_hidden_state for _ in range(4)]
    expected = ordinary(model, ids)
    assert not torch.equal(before, expected)
    assert all(torch.equal(result, expected) for result in after)


@pytest.mark.parametrize(
    "change",
    [_registered, _registered_in_its_name, _eager_function, _forward_of_the_class],
    ids=lambda change: change.__name__[1:],
)
@pytest.mark.parametrize("prefix", ["T5", "UMT5"])
def test_attention_of_others_in_encoders(
    ltx: ModuleType,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    prefix: str,
    change: Callable[[Any, pytest.MonkeyPatch], None],
) -> None:
    """It may launch kernels that nothing tells of. Such a call is not recorded, and the report says why."""
    model, ids = make_encoder(prefix, device, torch.float32), make_ids(device)
    change(model, monkeypatch)
    stock = model(ids).last_hidden_state
    report = ltx.optimize(model)
    for _ in range(4):
        assert distance(model(ids).last_hidden_state, stock) < CLOSE
    assert all(isinstance(call, str) for call in recordings(ltx, model))
    patched = change is _forward_of_the_class
    why = f"a {prefix}Attention is patched" if patched else "an attention function may run"
    assert f"not recorded, transformers.{prefix}Block, {LAYERS} x: {why}" in str(report)


@pytest.mark.parametrize("prefix", ["T5", "UMT5"])
def test_recorded_encoders_with_an_ordinary_mlp(
    ltx: ModuleType, device: str, ordinary: Callable[..., Tensor], prefix: str
) -> None:
    """The first T5 has no gate. Its MLP stays stock and is recorded with the block."""
    model, ids = make_encoder(prefix, device, torch.float32, feed_forward_proj="relu"), make_ids(device)
    ltx.optimize(model)
    results = [model(ids).last_hidden_state for _ in range(3)]
    assert sum(not isinstance(call, str) for call in recordings(ltx, model)) == LAYERS
    assert all(torch.equal(result, ordinary(model, ids)) for result in results)


@pytest.mark.parametrize("prefix", ["T5", pytest.param("UMT5", marks=pytest.mark.extended)])
def test_compiled_encoders(ltx: ModuleType, device: str, prefix: str) -> None:
    """One graph for prompts of all lengths after the second."""
    model, ids = make_encoder(prefix, device, torch.float32), make_ids(device)
    stock = model(ids).last_hidden_state
    report = ltx.optimize(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert distance(compiled(ids).last_hidden_state, stock) < CLOSE
    assert all(site.traces for site in report.sites) and report.fallbacks == {}
    compiled(make_ids(device, 12))
    with torch.compiler.set_stance("fail_on_recompile"):
        ids = make_ids(device, 15)
        assert distance(compiled(ids).last_hidden_state, model(ids).last_hidden_state) < CLOSE


@pytest.mark.parametrize("first", ["optimize", "kernelize"])
@pytest.mark.parametrize("prefix", ["T5", "UMT5"])
def test_encoders_and_kernelize(ltx: ModuleType, device: str, prefix: str, first: str) -> None:
    model, ids = make_encoder(prefix, device, torch.float32), make_ids(device)
    both_ways(ltx, model, lambda: model(ids).last_hidden_state, first)


TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 99, "pad_token_id": 0,
}  # fmt: skip
PICTURES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


@pytest.mark.host
@pytest.mark.parametrize("family", ["Gemma3", "Mistral3"])
def test_models_that_also_take_pictures(ltx: ModuleType, device: str, family: str) -> None:
    """LTX-2's and FLUX.2's text encoders: pipelines read the hidden states of every layer."""
    text = {**TEXT, "sliding_window": 6} if family == "Gemma3" else {**TEXT, "model_type": "mistral"}
    vision = PICTURES if family == "Gemma3" else {**PICTURES, "head_dim": 16, "model_type": "pixtral"}
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = random_(getattr(transformers, f"{family}ForConditionalGeneration")(config))
    model, ids = model.to(device).eval().requires_grad_(False), make_ids(device)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "output_hidden_states": True}
    stock = model(ids, **options).hidden_states
    report = ltx.optimize(model)
    for got, want in zip(model(ids, **options).hidden_states, stock, strict=True):
        assert distance(got[mask > 0], want[mask > 0]) < CLOSE
    layer = {"Gemma3": "Gemma3DecoderLayer", "Mistral3": "MistralDecoderLayer"}[family]
    assert report.replaced[f"transformers.{layer}"] == LAYERS and report.fallbacks == {}


@pytest.mark.host
def test_decoder_of_t5_stays_stock(ltx: ModuleType, device: str) -> None:
    config = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": LAYERS, "num_heads": 4, "vocab_size": 99}
    config = transformers.T5Config(**config, feed_forward_proj="gated-gelu", decoder_start_token_id=0)
    torch.manual_seed(0)
    model = random_(transformers.T5ForConditionalGeneration(config)).to(device).eval().requires_grad_(False)
    ids = make_ids(device)
    stock = model(ids, decoder_input_ids=ids).logits
    report = ltx.optimize(model)
    assert (
        distance(model(ids, decoder_input_ids=ids).logits, stock) < 7 * CLOSE
    )  # four blocks of scores without a scale
    assert report.replaced["transformers.T5Block"] == LAYERS
    assert "layer.1 is" in report.left_alone["decoder.block.0"]
