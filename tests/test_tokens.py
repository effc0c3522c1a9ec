"""Tokens after a prompt: recorded calls of decoder layers for any cache and any mask, and attention without a plan."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
from helpers.language_models import (  # noqa: E402
    FALCONS,
    GEMMA4,
    LAYERS,
    LLAMA4,
    MINISTRAL3,
    OTHER_ATTENTION,
    QWEN3_5,
    WIDTH,
    decoder_layers,
    distance,
    make_falcon,
    make_ids,
    make_model,
    other_attention,
    plain_flash,
)
from transformers.cache_utils import DynamicCache, StaticCache  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")
CLOSE = 1e-5 if torch.cuda.is_available() else 3e-6
TOKENS = 6
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Llama4": LLAMA4,
    "Mistral": {"sliding_window": 6},
    "Ministral3": MINISTRAL3,
    "Qwen2_5_VL": {},
    "Qwen3": {},
    "Qwen3_5": QWEN3_5,
    "Phi3": {},
    "Olmo2": {},
    "Gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 16},
    "Gemma3": {"sliding_window": 6, "query_pre_attn_scalar": 16, "tie_word_embeddings": False},
    "Gemma4": GEMMA4,
}
every_family = pytest.mark.parametrize("family", [*FAMILIES, *(f"Falcon {name}" for name in FALCONS)])


def make(family: str, device: str, dtype: torch.dtype = torch.float32) -> Any:
    if family.startswith("Falcon"):
        return make_falcon(device, dtype, **FALCONS[family.removeprefix("Falcon ")])
    return make_model(device, dtype, family, **FAMILIES[family])


def padding(ids: Tensor) -> Tensor:
    """A mask that leaves out the first two tokens of the first sample."""
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return mask


def tokens(model: Any, ids: Tensor, cache: Any = None, mask: Tensor | None = None, count: int = TOKENS) -> Tensor:
    """The logits of the tokens after a prompt, one call for each."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    model(ids, past_key_values=cache, attention_mask=mask, use_cache=True)
    logits = []
    for i in range(count):
        if mask is not None:
            mask = torch.cat((mask, torch.ones_like(mask[:, :1])), 1)
        token = ids[:, i : i + 1]
        logits.append(model(token, past_key_values=cache, attention_mask=mask, use_cache=True).logits)
    return torch.cat(logits, 1)


def recordings(ltx: ModuleType, model: Any) -> list[Any]:
    """What the layers hold of their calls, of each signature: a recorded call, or the reason why there is none."""
    replay = sys.modules[f"{ltx.__name__}.integrations.replay.calls"]
    held = [replay.held(layer).replays for layer in decoder_layers(model)]
    return [call for replays in held if replays is not None for call in replays.calls.values()]


def recorded_calls_are_checked(ltx: ModuleType) -> bool:
    replay = sys.modules[f"{ltx.__name__}.integrations.replay.calls"]
    return bool(replay.RECORD == replay.CHECK)


def count(ltx: ModuleType, model: Any) -> int:
    return sum(not isinstance(call, str) for call in recordings(ltx, model))


@pytest.fixture
def ordinary(ltx: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """`tokens` without recorded calls."""
    replay = sys.modules[f"{ltx.__name__}.integrations.replay.calls"]

    def run(*args: Any, **options: Any) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(replay, "RECORD", "0")
            return tokens(*args, **options)

    return run


@every_family
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_same_bits_and_counts(
    ltx: ModuleType, device: str, ordinary: Callable[..., Tensor], family: str, masked: bool, batch: int
) -> None:
    model, ids = make(family, device), make_ids(device)[:batch]
    mask = padding(ids) if masked else None
    stock = tokens(model, ids, mask=mask)
    report = ltx.optimize(model)
    expected = ordinary(model, ids, mask=mask)
    counts = {site.name: site.calls for site in report.sites}
    assert count(ltx, model) == 0
    first, second = tokens(model, ids, mask=mask), tokens(model, ids, mask=mask)
    assert count(ltx, model) == LAYERS, recordings(ltx, model)
    assert f"recorded calls: {LAYERS} of {LAYERS}" in str(report)
    assert torch.equal(first, expected) and torch.equal(second, expected)
    assert distance(second, stock) < CLOSE
    calls = {site.name: site.calls for site in report.sites}
    if recorded_calls_are_checked(ltx):  # a module that a replay calls, and does not record, runs twice then
        for found in (calls, counts):
            found.pop("transformers.Qwen3_5RMSNormGated", None)
    assert calls == {name: 3 * number for name, number in counts.items()}
    assert not any(site.fallbacks for site in report.sites)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_fp8(ltx: ModuleType, device: str, ordinary: Callable[..., Tensor], family: str) -> None:
    if device != "cpu" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs a GPU of compute capability 8.9")
    model, ids = make(family, device, torch.bfloat16), make_ids(device)
    ltx.optimize(model, precision="fp8", skip=())
    expected = ordinary(model, ids)
    assert torch.equal(tokens(model, ids), expected)
    assert count(ltx, model) == LAYERS, recordings(ltx, model)


def test_fp8_weights_follow_merged_adapters(ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """peft writes to the stock weight and tells nobody. A recorded call holds the weight that was quantised before."""
    if device != "cpu" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs a GPU of compute capability 8.9")
    peft = pytest.importorskip("peft")
    model, ids = make("Llama", device, torch.bfloat16), make_ids(device)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    model.eval().requires_grad_(False)
    models = model, copy.deepcopy(model)

    def run(model: Any) -> Tensor:
        cache = DynamicCache(config=model.config)
        logits = [tokens(model, ids, cache)]
        for change in ("merge", "unmerge"):
            for module in model.modules():
                if isinstance(module, peft.tuners.lora.LoraLayer):
                    getattr(module, change)()
            logits.append(model(ids[:, :1], past_key_values=cache).logits)
        return torch.cat(logits, 1)

    for model in models:
        ltx.optimize(model, precision="fp8", skip=(), stock_weights="beside")  # `merge` writes to the parameter
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[f"{ltx.__name__}.integrations.replay.calls"], "RECORD", "0")
        expected = [run(models[0]) for _ in range(3)]
    assert all(torch.equal(run(models[1]), logits) for logits in expected)
    tokens(models[1], ids)
    assert count(ltx, models[1]) == LAYERS, recordings(ltx, models[1])


def test_caches_in_turn(ltx: ModuleType, device: str, ordinary: Callable[..., Tensor]) -> None:
    """One recording serves texts of different lengths that are continued in turn, with a mask and without."""
    model, ids = make("Llama", device), make_ids(device, 12)
    ltx.optimize(model)
    prompts = [ids, ids[:, :5], ids[:, 3:10]]
    expected = [ordinary(model, prompt, count=4) for prompt in prompts]
    tokens(model, ids)
    caches = [DynamicCache(config=model.config) for _ in prompts]
    for prompt, cache in zip(prompts, caches):
        model(prompt, past_key_values=cache)
    for i in range(4):
        for prompt, cache, logits in zip(prompts, caches, expected):
            assert torch.equal(model(prompt[:, i : i + 1], past_key_values=cache).logits, logits[:, i : i + 1])
    assert count(ltx, model) == LAYERS
    masked = ordinary(model, ids, mask=padding(ids))
    assert torch.equal(tokens(model, ids, mask=padding(ids)), masked)
    assert count(ltx, model) == 2 * LAYERS


def crop(cache: Any) -> None:
    cache.crop(-2)


def reorder(cache: Any) -> None:
    cache.reorder_cache(torch.tensor([1, 0]))


def reset(cache: Any) -> None:
    cache.reset()


@pytest.mark.parametrize("change", [crop, reorder, reset], ids=lambda change: change.__name__)
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_caches_that_change(ltx: ModuleType, device: str, family: str, change: Callable[[Any], None]) -> None:
    """A cache that is empty again takes a token as a prompt, without a copy."""
    if change is crop and family == "Gemma3":
        pytest.skip("transformers crops no window that is full")
    model, ids = make(family, device), make_ids(device)

    def run() -> Tensor:
        cache = DynamicCache(config=model.config)
        before = tokens(model, ids, cache)
        change(cache)
        after = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(3)]
        return torch.cat((before, *after), 1)

    stock = run()
    ltx.optimize(model)
    for _ in range(2):
        assert distance(run(), stock) < CLOSE
    assert count(ltx, model) in (LAYERS, 2 * LAYERS)  # Gemma 3 gets a mask once its window is full


def test_static_caches(ltx: ModuleType, device: str, ordinary: Callable[..., Tensor]) -> None:
    model, ids = make("Llama", device), make_ids(device)

    def cache() -> Any:
        return StaticCache(config=model.config, max_cache_len=32)

    stock = tokens(model, ids, cache())
    ltx.optimize(model)
    expected = ordinary(model, ids, cache())
    results = [tokens(model, ids, cache()) for _ in range(2)]
    assert all(torch.equal(result, expected) for result in results) and distance(expected, stock) < CLOSE
    assert count(ltx, model) == LAYERS


def test_large_caches(
    ltx: ModuleType, device: str, ordinary: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a length on a token of several samples gets other memory: that is another recording."""
    model, ids = make("Llama", device), make_ids(device)
    ltx.optimize(model)
    cache = sys.modules[f"{ltx.__name__}.integrations.causal.kv_cache"]
    monkeypatch.setattr(cache, "LARGE", 2 * 2 * 16 * (ids.shape[1] + 4))
    expected = ordinary(model, ids, count=9)
    assert torch.equal(tokens(model, ids, count=9), expected)
    assert count(ltx, model) == 2 * LAYERS


def _hook(model: Any) -> None:
    model.model.layers[0].self_attn.register_forward_hook(lambda module, args, output: (2 * output[0], output[1]))


def _weight(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.data = 2 * model.model.layers[1].mlp.down_proj.weight.data


def _in_place(model: Any) -> None:
    model.model.layers[0].input_layernorm.weight.mul_(2)


def _eps(model: Any) -> None:
    model.model.layers[0].post_attention_layernorm.variance_epsilon = 0.3


def _scaling(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 0.9


def _attention(model: Any) -> None:
    registry = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    stock = sys.modules["transformers.integrations.sdpa_attention"].sdpa_attention_forward
    registry["twice"] = lambda *args, **options: (2 * stock(*args, **options)[0], None)
    model.config._attn_implementation = "twice"


CHANGES = [_hook, _weight, _in_place, _eps, _scaling, _attention]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
def test_changes_are_seen(
    ltx: ModuleType, device: str, ordinary: Callable[..., Tensor], change: Callable[[Any], None]
) -> None:
    model, ids = make("Llama", device), make_ids(device)
    ltx.optimize(model)
    before = tokens(model, ids)
    assert count(ltx, model) == LAYERS
    change(model)
    after = [tokens(model, ids) for _ in range(3)]
    expected = ordinary(model, ids)
    assert distance(before, expected) > 1e-3
    assert all(torch.equal(logits, expected) for logits in after)


@pytest.mark.usefixtures("unchecked")
def test_a_failure_leaves_the_cache_as_it_is(ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded call that fails after the cache's update is not run once more, which would append the token twice."""
    model, ids = make("Llama", device), make_ids(device)
    report = ltx.optimize(model)
    expected = tokens(model, ids)
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)

    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("out of memory")

    registry = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    with monkeypatch.context() as patch:
        patch.setitem(registry._global_mapping, "sdpa", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(ids[:, :1], past_key_values=cache)
    assert [layer.get_seq_length() for layer in cache.layers] == [ids.shape[1] + 1, ids.shape[1]]
    assert torch.equal(tokens(model, ids), expected)
    assert "a replay failed: out of memory" in str(report)


@pytest.mark.usefixtures("unchecked")
def test_prompts_without_a_cache(ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are recorded, and what their attention remarks at each call is counted once."""
    model, ids = make("Llama", device), make_ids(device)
    report = ltx.optimize(model)
    causal = sys.modules[f"{ltx.__name__}.integrations.causal.own_kernel"]

    def attend(call: Any) -> None:
        call.site.remark("asked")

    monkeypatch.setattr(causal, "attend", attend)
    expected = model(ids, use_cache=False).logits
    for _ in range(4):
        assert torch.equal(model(ids, use_cache=False).logits, expected)
    assert count(ltx, model) == LAYERS
    (site,) = (site for site in report.sites if site.name.endswith("LlamaAttention"))
    assert site.remarks["asked"] == 5 * LAYERS and site.calls == 5 * LAYERS


def test_prompts_with_a_cache(ltx: ModuleType, device: str) -> None:
    """Prompts differ in length, and an empty cache takes their keys and values without a copy: none is recorded."""
    model, ids = make("Llama", device), make_ids(device)
    ltx.optimize(model)
    for _ in range(4):
        model(ids, use_cache=True)
        model(ids[:, :1], use_cache=True)
    assert recordings(ltx, model) == []


def test_arguments_that_are_the_live_mask_at_one_call(
    ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attention function of somebody's gets the mask a second time, or another tensor in its place."""
    model, ids = make("Llama", device), make_ids(device)
    registry = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    stock = sys.modules["transformers.integrations.sdpa_attention"].sdpa_attention_forward
    given: list[Tensor] = []

    def attend(*args: Any, own: Tensor, **options: Any) -> Any:
        given.append(own)
        return stock(*args, **options)

    monkeypatch.setitem(registry._global_mapping, "sdpa", attend)
    ltx.optimize(model)
    cache = StaticCache(config=model.config, max_cache_len=32)
    mask = torch.zeros(2, 1, 1, 32, device=device)
    for own in (mask, mask, mask, mask + 1, mask, mask + 2):
        given.clear()
        model(ids[:, :1], past_key_values=cache, attention_mask=mask, own=own)
        assert len(given) == LAYERS and all(tensor is own for tensor in given)


OWN: list[Callable[[], Any]] = [list, dict, lambda: ([], 1), lambda: {torch.float32: 1}]


@pytest.mark.parametrize("make_own", OWN)
def test_functions_write_to_what_they_are_given(
    ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch, make_own: Callable[[], Any]
) -> None:
    """An attention function of somebody's may collect scores in a list or a dict of the caller's."""
    model, ids = make("Llama", device), make_ids(device)
    registry = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    stock = sys.modules["transformers.integrations.sdpa_attention"].sdpa_attention_forward
    given: list[Any] = []

    def attend(*args: Any, own: Any, **options: Any) -> Any:
        given.append(own)
        return stock(*args, **options)

    monkeypatch.setitem(registry._global_mapping, "sdpa", attend)
    ltx.optimize(model)
    cache = DynamicCache(config=model.config)
    for _ in range(5):
        own = make_own()
        model(ids[:, :1], past_key_values=cache, own=own)
        assert given.pop() is own and given.pop() is own


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("same", [True, False])
def test_masks_that_are_no_tensors(
    ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch, same: bool, tokens: int
) -> None:
    """Such as a flag of somebody's attention function, which equals other arguments, or flex_attention's own class."""
    model = make("Llama", device)
    registry = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    stock = sys.modules["transformers.integrations.sdpa_attention"].sdpa_attention_forward
    given: list[tuple[Any, Any]] = []

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, own: Any, **options: Any) -> Any:
        given.append((mask, own))
        return stock(module, query, key, value, None, **options)

    monkeypatch.setitem(registry._global_mapping, "sdpa", attend)
    ltx.optimize(model)
    cache = DynamicCache(config=model.config)
    layer, hidden_states = model.model.layers[0], torch.randn(2, tokens, WIDTH, device=device)
    tables = model.model.rotary_emb(hidden_states, torch.zeros(2, tokens, dtype=torch.int64, device=device))
    for mask, own in [(True, same)] * 4 + [(False, same)] * 4:
        layer(hidden_states, position_embeddings=tables, past_key_values=cache, attention_mask=mask, own=own)
        assert given.pop() == (mask, own)


@pytest.mark.parametrize("asks", [lambda mask: mask.shape, lambda mask: mask.dim(), lambda mask: mask + 1])
def test_other_code_may_not_read_what_changes(ltx: ModuleType, asks: Callable[[Tensor], Any]) -> None:
    """A line that reads a live argument outside of `as_one` ends the recording."""
    replay = sys.modules[f"{ltx.__name__}.integrations.replay.calls"]
    recorder = replay.Recorder([], [], {"mask": (mask := torch.ones(2, 2))})
    with recorder:
        asks(mask)
    assert recorder.reason


def test_mixtures_of_experts_are_not_recorded(ltx: ModuleType, device: str) -> None:
    model, ids = make_model(device, family="Qwen3Moe", num_experts=4, num_experts_per_tok=2), make_ids(device)
    stock = tokens(model, ids)
    report = ltx.optimize(model)
    assert distance(tokens(model, ids), stock) < CLOSE
    assert count(ltx, model) == 0
    assert "SparseMoeBlock, which may run other kernels" in str(report)


class OwnAttention(nn.Module):
    """An attention of somebody's own, which has other children and attributes than the stock one."""

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.stock = stock

    def forward(self, hidden_states: Tensor, **options: Any) -> tuple[Tensor, None]:
        return 2 * self.stock(hidden_states, **options)[0], None


def test_an_attention_of_somebody_else(ltx: ModuleType, device: str) -> None:
    model, ids = make("Llama", device), make_ids(device)
    layer = model.model.layers[0]
    layer.self_attn = OwnAttention(layer.self_attn)
    stock = tokens(model, ids)
    report = ltx.optimize(model)
    for _ in range(2):
        assert distance(tokens(model, ids), stock) < CLOSE
    assert count(ltx, model) == LAYERS - 1
    report.restore()
    ltx.optimize(model)
    model.model.layers[1].self_attn = OwnAttention(model.model.layers[1].self_attn)
    after = tokens(model, ids)
    ltx.restore(model)
    assert distance(after, tokens(model, ids)) < CLOSE


def test_recorded_tokens_travel_in_copies(ltx: ModuleType, device: str) -> None:
    model, ids = make("Llama", device), make_ids(device)
    ltx.optimize(model)
    expected = tokens(model, ids)
    other = copy.deepcopy(model)
    nn.init.ones_(other.model.norm.weight)
    assert count(ltx, other) == 0
    tokens(other, ids)
    assert torch.equal(tokens(model, ids), expected)


@pytest.mark.usefixtures("unchecked")
def test_weights_in_storages_of_their_own(ltx: ModuleType, device: str, ordinary: Callable[..., Tensor]) -> None:
    """An offload may bring weights back so. A recorded call finds out before the token is in its cache."""
    model, ids = make_model(device, intermediate_size=1024), make_ids(device)
    report = ltx.optimize(model)
    expected = ordinary(model, ids)
    tokens(model, ids)
    assert count(ltx, model) == LAYERS
    for weight in model.model.layers[0].mlp.parameters():
        weight.data = torch.from_dlpack(weight.data)
    assert distance(tokens(model, ids), expected) < CLOSE
    assert "a recorded call failed, and ran ordinarily" in str(report)


@pytest.mark.usefixtures("unchecked")
def test_other_threads_do_not_count_in_a_recording(
    ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = make("Llama", device), make_ids(device)
    report = ltx.optimize(model)
    decoder, recording = (
        sys.modules[f"{ltx.__name__}.integrations.{name}"] for name in ("causal.engine", "engine.recording")
    )
    compute, others = decoder._norm_and_rotate, list[threading.Thread]()

    @torch.no_grad()
    def prompt() -> None:
        model(ids)

    def interrupted(*args: Any) -> Any:
        if recording.recorder_of_thread() is not None:
            others.append(threading.Thread(target=prompt))
            others[-1].start()
            others[-1].join()
        return compute(*args)

    monkeypatch.setattr(decoder, "_norm_and_rotate", interrupted)
    tokens(model, ids)
    assert len(others) == LAYERS == count(ltx, model)
    before = {site.name: site.calls for site in report.sites}
    tokens(model, ids, count=5)
    counted = {site.name: site.calls - before[site.name] for site in report.sites}
    assert counted == {name: 6 * (1 if name.endswith("RMSNorm") else LAYERS) for name in counted}


# ---- Attention without a mask

REMARK = "attention without a mask in torch's flash attention"


@pytest.fixture
def flash(ltx: ModuleType, unchecked: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has the same attention computed in plain torch on any device; the numbers of queries of its calls."""
    lengths: list[int] = []
    plain_flash(ltx, monkeypatch, lambda query, window: lengths.append(query.shape[2]) if window is None else None)
    return lengths


@pytest.mark.parametrize("family", ["Llama", "Qwen2_5_VL", "Qwen3", "Phi3", "Olmo2"])
@pytest.mark.parametrize("batch", [1, 2])
def test_flash(ltx: ModuleType, device: str, flash: list[int], family: str, batch: int) -> None:
    """Short prompts and tokens, which have a number of keys each that cuDNN would plan for."""
    model, ids = make(family, device), make_ids(device)[:batch]
    stock = tokens(model, ids)
    report = ltx.optimize(model)
    assert distance(tokens(model, ids), stock) < CLOSE
    assert flash == [ids.shape[1]] * LAYERS + [1] * (LAYERS * TOKENS)
    assert REMARK in str(report)
    flash.clear()
    tokens(model, ids, mask=torch.cat((torch.zeros_like(ids[:, :1]), torch.ones_like(ids[:, 1:])), 1))
    assert flash == []


@pytest.mark.parametrize("case", ["rounding", "long", *OTHER_ATTENTION])
def test_calls_that_stay_without_flash(
    ltx: ModuleType, device: str, flash: list[int], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    model, ids = make("Llama", device), make_ids(device)
    ltx.optimize(model, rounding="eager" if case == "rounding" else "fp32")
    monkeypatch.setattr(sys.modules[f"{ltx.__name__}.integrations.causal.flash"], "SHORT", 9)
    with other_attention(case, model, monkeypatch):
        if case == "long":
            model(ids)
        else:
            tokens(model, ids[:, :5], count=3)
    assert flash == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Qwen3", "Falcon"])
def test_flash_attention(ltx: ModuleType, cuda: str, family: str, dtype: torch.dtype) -> None:
    """torch's own on a GPU: not further from the model in float32 than stock, and not where it is turned off."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs a GPU with flash attention")
    model = make_falcon(cuda, dtype, **FALCONS["7b"]) if family == "Falcon" else make(family, cuda, dtype)
    ids = make_ids(cuda, 70)[:1]
    stock, exact = tokens(model, ids), tokens(copy.deepcopy(model).float(), ids)
    report = ltx.optimize(model)
    assert distance(tokens(model, ids), exact) <= 1.2 * distance(stock, exact)
    found = sum(site.remarks[REMARK] for site in report.sites)
    assert (found > 0) == (family in ("Llama", "Qwen3"))  # Gemma 2 caps its scores, Falcon's calls are not counted
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        tokens(model, ids)
    assert sum(site.remarks[REMARK] for site in report.sites) == found


# ---- Attention with a mask

MASKED = "attention of a token with a mask in groups of heads"


@pytest.fixture
def masked(ltx: ModuleType, unchecked: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has the products of groups of heads computed on any device and in float32; the numbers of keys of its calls."""
    home: Any = sys.modules[f"{ltx.__name__}.integrations.causal.masked_tokens"]
    own, lengths = home.attention, list[int]()

    def attention(site: Any, query: Tensor, key: Tensor, *others: Any) -> Tensor:
        lengths.append(key.shape[2])
        output: Tensor = own(site, query, key, *others)
        return output

    monkeypatch.setattr(home, "_has_products", lambda query: True)
    monkeypatch.setattr(home, "attention", attention)
    return lengths


def of_each_token(ids: Tensor) -> list[int]:
    return [ids.shape[1] + 1 + i for i in range(TOKENS) for _ in range(LAYERS)]


@pytest.mark.parametrize("family", ["Llama", "Qwen2_5_VL", "Qwen3", "Phi3", "Olmo2"])
def test_masked(ltx: ModuleType, device: str, masked: list[int], family: str) -> None:
    model, ids = make(family, device), make_ids(device)
    stock = tokens(model, ids, mask=padding(ids))
    report = ltx.optimize(model)
    assert distance(tokens(model, ids, mask=padding(ids)), stock) < CLOSE
    assert masked == [ids.shape[1]] * LAYERS + of_each_token(ids)  # the prompt is short, too
    assert MASKED in str(report)
    masked.clear()
    tokens(model, ids)
    assert masked == []


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_masks_of_four_dimensions(ltx: ModuleType, device: str, masked: list[int], dtype: torch.dtype) -> None:
    """One for all samples, of truth values or of numbers that are added to the scores."""
    model, ids = make("Llama", device), make_ids(device)
    mask = torch.ones(1, 1, 1, ids.shape[1] + 1, dtype=torch.bool, device=device)
    mask[..., 2] = False
    if dtype == torch.float32:
        mask = torch.where(mask, 0.5, torch.finfo(dtype).min)

    def run() -> Tensor:
        cache = model(ids, use_cache=True).past_key_values
        logits: Tensor = model(ids[:, :1], past_key_values=cache, attention_mask=mask).logits
        return logits

    stock = run()
    ltx.optimize(model)
    assert distance(run(), stock) < CLOSE
    assert masked == [ids.shape[1] + 1] * LAYERS


@pytest.mark.parametrize("config", FALCONS.values(), ids=FALCONS)
def test_masked_tokens_of_falcon(ltx: ModuleType, device: str, masked: list[int], config: dict[str, Any]) -> None:
    """transformers gives Falcon a mask for every token, also without padding."""
    model, ids = make_falcon(device, **config), make_ids(device)
    for mask in (None, padding(ids)):
        stock = tokens(model, ids, mask=mask)
        report = ltx.optimize(model)
        assert distance(tokens(model, ids, mask=mask), stock) < CLOSE
        assert masked == of_each_token(ids)
        report.restore()
        masked.clear()


def test_a_sample_that_sees_nothing(ltx: ModuleType, device: str, masked: list[int]) -> None:
    """A server fills a batch of a fixed size with samples whose mask is 0, also for their new token."""
    model, ids = make("Llama", device), make_ids(device)
    seen = torch.ones(ids.shape[0], ids.shape[1] + 1, dtype=torch.int64, device=device)
    seen[0] = 0

    def run() -> Tensor:
        cache = model(ids, attention_mask=seen[:, :-1], use_cache=True).past_key_values
        logits: Tensor = model(ids[:, :1], past_key_values=cache, attention_mask=seen).logits
        return logits

    stock = run()
    ltx.optimize(model)
    assert distance(run(), stock) < CLOSE
    assert masked == [ids.shape[1]] * LAYERS + [ids.shape[1] + 1] * LAYERS


def test_static_caches_with_their_mask(ltx: ModuleType, device: str, masked: list[int]) -> None:
    model, ids = make("Llama", device), make_ids(device)
    caches = [StaticCache(config=model.config, max_cache_len=32) for _ in range(2)]
    stock = tokens(model, ids, caches[0])
    ltx.optimize(model)
    assert distance(tokens(model, ids, caches[1]), stock) < CLOSE
    assert masked == [32] * (TOKENS * LAYERS)


@pytest.mark.parametrize("case", ["rounding", "a full window", *OTHER_ATTENTION])
def test_calls_that_keep_their_mask(
    ltx: ModuleType, device: str, masked: list[int], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    model, ids = make("Gemma3" if case == "a full window" else "Llama", device), make_ids(device)
    ltx.optimize(model, rounding="eager" if case == "rounding" else "fp32")
    with other_attention(case, model, monkeypatch):
        tokens(model, ids, mask=padding(ids))
    assert masked == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Falcon"])
def test_masked_attention(ltx: ModuleType, cuda: str, family: str, dtype: torch.dtype) -> None:
    """On a GPU: hardly further from the model in float32 than stock. The weights are rounded after their division."""
    model = make_falcon(cuda, dtype, **FALCONS["7b"]) if family == "Falcon" else make(family, cuda, dtype)
    ids = make_ids(cuda, 70)
    mask = padding(ids)
    stock, exact = tokens(model, ids, mask=mask), tokens(copy.deepcopy(model).float(), ids, mask=mask)
    report = ltx.optimize(model)
    assert distance(tokens(model, ids, mask=mask), exact) <= 1.25 * distance(stock, exact)
    assert family == "Falcon" or MASKED in str(report)
