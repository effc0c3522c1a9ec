"""Keys and values of a prompt in transformers' caches: in memory of their own, not copied, and used as stock's are."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")
from helpers.language_models import GEMMA4, LAYERS, LLAMA4, distance, make_ids, make_model  # noqa: E402
from transformers import cache_utils  # noqa: E402
from transformers.cache_utils import DynamicCache, DynamicLayer  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")
CLOSE = 1e-5 if torch.cuda.is_available() else 3e-6
WINDOW = 6
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Llama4": LLAMA4,
    "Phi3": {},
    "Qwen3": {},
    "Gemma3": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "tie_word_embeddings": False},
    "Gemma4": {**GEMMA4, "sliding_window": WINDOW},
}
every_family = pytest.mark.parametrize("family", FAMILIES)


class CountCopies(TorchDispatchMode):
    """Counts the concatenations of tensors of four dimensions, which a cache's keys and values have."""

    copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.cat.default and args[0][-1].dim() == 4:
            # The halves that a stock rotation exchanges are concatenated along the columns.
            self.copies += 0 if len(args) > 1 and args[1] in (-1, 3) else 1
        return func(*args, **(kwargs or {}))


def make(family: str, device: str, dtype: torch.dtype = torch.float32) -> Any:
    return make_model(device, dtype, family, **FAMILIES[family])


def filled(model: Any, ids: Tensor, cache: Any = None) -> tuple[Any, int]:
    """(the cache after a prompt, how many copies it made)."""
    with CountCopies() as counter:
        return model(ids, past_key_values=cache, use_cache=True).past_key_values, counter.copies


def assert_same(ours: Any, stock: Any) -> None:
    """The caches hold the same, in tensors of the same kind."""
    assert len(ours.layers) == len(stock.layers)
    for got, want in zip(ours.layers, stock.layers):
        assert type(got) is type(want) and vars(got).keys() == vars(want).keys()
        for name, value in vars(want).items():
            if not isinstance(value, Tensor) or value.dim() < 4:
                assert vars(got)[name] == value, name
                continue
            assert distance(vars(got)[name], value) < CLOSE, name
            assert vars(got)[name].stride() == value.stride(), name
        assert got.keys.untyped_storage().nbytes() == want.keys.untyped_storage().nbytes()
        assert got.values.untyped_storage().nbytes() == want.values.untyped_storage().nbytes()


@every_family
@pytest.mark.parametrize("packed", [True, False])
def test_prompts_are_not_copied(ltx: ModuleType, device: str, family: str, packed: bool) -> None:
    model, ids = make(family, device), make_ids(device)
    stock, copies = filled(model, ids)
    assert copies == 2 * LAYERS
    report = ltx.optimize(model, rounding="fp32" if packed else "eager")
    filled(model, ids)  # the first time, the update of the layer's class is tried on a few numbers
    ours, copies = filled(model, ids)
    assert copies == 0 and "copied" not in str(report)
    assert_same(ours, stock)
    more = make_ids(device, 3)
    _, copies = filled(model, more, ours)
    assert copies == 2 * LAYERS  # after what is there
    report.restore()
    filled(model, more, stock)
    assert_same(ours, stock)


@pytest.mark.parametrize("prompts", [1, 2])
def test_a_cache_that_makes_its_layers(ltx: ModuleType, device: str, prompts: int) -> None:
    """DynamicCache() without a configuration has no layers before it is updated."""
    model, ids = make("Llama", device), make_ids(device)
    caches = []
    for optimized in (False, True):
        if optimized:
            ltx.optimize(model)
        cache: Any = DynamicCache()
        for _ in range(prompts):
            cache, copies = filled(model, ids, cache)
        assert (copies == 0) == (optimized and prompts == 1)
        caches.append(cache)
    assert_same(*reversed(caches))


def crop(cache: Any) -> None:
    cache.crop(-2)


def repeat(cache: Any) -> None:
    cache.batch_repeat_interleave(3)


def select(cache: Any) -> None:
    cache.batch_select_indices(torch.tensor([1]))


def reorder(cache: Any) -> None:
    cache.reorder_cache(torch.tensor([1, 0]))


def reset(cache: Any) -> None:
    cache.reset()


def overwrite(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys.mul_(0.5)
        layer.values.zero_()


@every_family
@pytest.mark.parametrize("change", [crop, repeat, select, reorder, reset, overwrite])
def test_what_is_done_to_a_cache(ltx: ModuleType, device: str, family: str, change: Any) -> None:
    model, more = make(family, device), make_ids(device, 1)
    ids = make_ids(device)[:, : WINDOW - 2] if change is crop else make_ids(device)
    logits = []
    for optimized in (False, True):
        if optimized:
            ltx.optimize(model)
        cache, _ = filled(model, ids)
        change(cache)
        first = cache.layers[0]
        batch = first.keys.shape[0] if first.is_initialized else 2
        logits.append(model(more[:1].expand(batch, -1), past_key_values=cache).logits)
    assert distance(logits[1], logits[0]) < 2 * CLOSE


@every_family
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}, {"prompt_lookup_num_tokens": 2}],
    ids=lambda options: "-".join(options),
)
def test_generation(ltx: ModuleType, device: str, family: str, options: dict[str, int]) -> None:
    """Token for token, where the cache is reordered, repeated or cropped on the way."""
    if family == "Gemma3" and "prompt_lookup_num_tokens" in options:
        options = {**options, "max_new_tokens": WINDOW - 4}
    model, ids = make(family, device), make_ids(device)[:1]
    ids = ids.repeat(1, 2)[:, :12]
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids), **options}
    stock = model.generate(ids, **options)
    ltx.optimize(model)
    assert torch.equal(model.generate(ids, **options), stock)


class OwnCache(DynamicCache):
    """A cache of a user's own, which counts its updates."""

    updates = 0

    def update(self, *args: Any, **kwargs: Any) -> Any:
        self.updates += 1
        return super().update(*args, **kwargs)


class OwnLayer(DynamicLayer):
    updates = 0

    def update(self, *args: Any, **kwargs: Any) -> Any:
        self.updates += 1
        return super().update(*args, **kwargs)


def test_other_caches_are_updated(ltx: ModuleType, device: str) -> None:
    """A subclass of the cache, or of its layers, and a cache of a fixed size."""
    model, ids = make("Llama", device), make_ids(device)
    stock, _ = filled(model, ids)
    report = ltx.optimize(model)
    cache = OwnCache()
    filled(model, ids, cache)
    assert cache.updates == LAYERS
    mixed = DynamicCache()
    mixed.layers = [OwnLayer(), DynamicLayer()]
    _, copies = filled(model, ids, mixed)
    assert mixed.layers[0].updates == 1 and copies == 2
    for got in (cache, mixed):
        for one, other in zip(got.layers, stock.layers):
            assert distance(one.keys, other.keys) < CLOSE and distance(one.values, other.values) < CLOSE
    static = transformers.StaticCache(config=model.config, max_cache_len=32)
    filled(model, ids, static)
    length = ids.shape[1]
    for one, other in zip(static.layers, stock.layers):
        assert distance(one.keys[:, :, :length], other.keys) < CLOSE
    assert "copied" not in str(report)  # these are no caches of transformers' that somebody has patched


def test_sliding_layers_that_record_the_past(ltx: ModuleType, device: str) -> None:
    model, ids = make("Gemma3", device), make_ids(device)
    caches = []
    for optimized in (False, True):
        if optimized:
            ltx.optimize(model)
        cache = DynamicCache(config=model.config)
        for layer in cache.layers:
            if layer.is_sliding and hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        filled(model, ids, cache)
        caches.append(cache)
    assert_same(*reversed(caches))


@pytest.mark.usefixtures("unchecked")
def test_keywords_that_a_cache_changes(ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 5.24 on transformers hands a cache the keywords of the attention function, for its batches of requests."""
    monkeypatch.setattr(f"{ltx.__name__}.integrations.causal.kv_cache.IS_RENAMED", True)

    class Marking(DynamicCache):
        def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **options: Any) -> Any:
            options.get("kwargs", {})["mark"] = layer
            return super().update(key, value, layer, *args, **options)

    model, ids = make("Llama", device), make_ids(device)
    stock = sys.modules["transformers.integrations.sdpa_attention"].sdpa_attention_forward
    marks: list[Any] = []

    def attend(*args: Any, mark: Any = None, **options: Any) -> Any:
        marks.append(mark)
        return stock(*args, **options)

    registry = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(registry._global_mapping, "sdpa", attend)
    ltx.optimize(model)
    cache = Marking(config=model.config)
    for tokens in (ids, *[ids[:, :1]] * 3):
        model(tokens, past_key_values=cache)
    assert marks == 4 * list(range(len(model.model.layers)))


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_batches_of_requests(ltx: ModuleType, device: str, family: str) -> None:
    """A paged cache, which earlier releases of transformers hand to the attention function as an argument `cache`."""
    model = make(family, device)
    requests = [ids.tolist() for ids in make_ids(device)] + [make_ids(device)[0, :5].tolist()]
    options = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    tokens = []
    for optimized in (False, True):
        if optimized:
            report = ltx.optimize(model)
        found = model.generate_batch(requests, options, small, progress_bar=False, warmup=False)
        tokens.append([found[name].generated_tokens for name in sorted(found)])
    assert tokens[1] == tokens[0] and all(map(len, tokens[0]))
    assert all(site.calls for site in report.sites) and report.fallbacks == {}


@pytest.mark.parametrize("where", ["cache", "Cache", "DynamicLayer", "layer"])
def test_patched_updates_are_called(ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A patch of transformers' own classes, or of one object, and the report says so."""
    model, ids = make("Llama", device), make_ids(device)
    report = ltx.optimize(model)
    cache = DynamicCache(config=model.config)
    owner: Any = {"cache": cache, "layer": cache.layers[0]}.get(where) or getattr(cache_utils, where)
    stock, calls = owner.update, []

    def update(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return stock(*args, **kwargs)

    monkeypatch.setattr(owner, "update", update)
    filled(model, ids, cache)
    assert len(calls) == (1 if where == "layer" else LAYERS)
    assert "keys and values copied" in str(report)


def test_gradients_and_compiled_models_update(ltx: ModuleType, device: str) -> None:
    model, ids = make("Llama", device), make_ids(device)
    stock, _ = filled(model, ids)
    ltx.optimize(model)
    with torch.enable_grad():
        cache, copies = filled(model, ids)
    assert copies == 2 * LAYERS
    assert_same(cache, stock)
    torch.compiler.reset()
    cache = torch.compile(model, backend="aot_eager")(ids, use_cache=True).past_key_values
    for got, want in zip(cache.layers, stock.layers):
        assert distance(got.keys, want.keys) < CLOSE and distance(got.values, want.values) < CLOSE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [128, 20, 6])
def test_heads_first(ltx: ModuleType, device: str, dtype: torch.dtype, width: int) -> None:
    """Copies of views at any place, whatever their width."""
    heads_first = _module(ltx, "causal.kv_cache").heads_first
    packed = torch.randn(2, 5, 7 * width + 3, device=device).to(dtype)
    for start in (0, 1, 2 * width):
        heads = packed[..., start : start + 3 * width].unflatten(-1, (3, width))
        copy = heads_first(heads)
        assert copy.is_contiguous() and torch.equal(copy, heads.transpose(1, 2))
        assert copy.data_ptr() != heads.data_ptr()


# ---- The addition after the MLP


@pytest.mark.parametrize("bias", [False, True])
def test_the_addition_after_the_mlp_is_one_product(ltx: ModuleType, device: str, bias: bool) -> None:
    """It is no further from the exact sum than two roundings; "eager" rounds as stock does."""
    model = make_model(device, torch.bfloat16, "Llama", mlp_bias=bias)
    layer = model.model.layers[0]
    x = torch.randn(2, 9, 64, device=device).bfloat16()
    total = 8 * torch.randn(2, 9, 64, device=device).bfloat16()
    branch = layer.mlp(x)
    stock = total + branch
    report = ltx.optimize(model, rounding="eager")
    spec = _module(ltx, "transformers.llama").MLP
    assert not spec.adds(layer.mlp)
    report.restore()
    assert not spec.adds(layer.mlp)
    ltx.optimize(model)
    assert spec.adds(layer.mlp)
    exact = total.double() + layer.mlp(x).double() if bias else _exact(layer.mlp, x) + total.double()
    given = total.clone()
    ours = layer.mlp(x, addend=given)
    assert ours.data_ptr() == given.data_ptr()  # nothing is allocated for it
    assert distance(ours, exact) < 1.05 * distance(stock, exact)
    assert distance(ours, stock) < 0.01


def _exact(mlp: Any, x: Tensor) -> Tensor:
    """The MLP in float64, but for the roundings of what its last layer reads."""
    kept: list[Tensor] = []
    handle = mlp.down_proj.register_forward_pre_hook(lambda module, inputs: kept.append(inputs[0]))
    mlp(x)
    handle.remove()
    return kept[0].double() @ mlp.down_proj.weight.double().T


@every_family
def test_nothing_that_was_given_is_overwritten(ltx: ModuleType, device: str, family: str) -> None:
    model = make(family, device)
    embeddings = model.model.embed_tokens(make_ids(device))
    given = embeddings.clone()
    stock = model(inputs_embeds=given, output_hidden_states=True).hidden_states
    ltx.optimize(model)
    ours = model(inputs_embeds=given, output_hidden_states=True).hidden_states
    assert torch.equal(given, embeddings)
    for got, want in zip(ours, stock, strict=True):
        assert distance(got, want) < CLOSE


def _module(ltx: ModuleType, name: str) -> Any:
    return sys.modules[f"{ltx.__name__}.integrations.{name}"]


# Gemma 4 norms its values, and Llama 4 its keys after the rotation, which makes them contiguous for any cache.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("Gemma4", "Llama4")])
@pytest.mark.parametrize("large", [True, False], ids=["large", "small"])
def test_one_token_of_each_sample_has_the_strides_of_stock(
    ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch, family: str, large: bool
) -> None:
    """torch's choice of a kernel of attention depends on them.

    The cache appends by `torch.cat`, which has a faster kernel for contiguous tensors. To a small cache views of the
    layers' one product are appended.
    """
    if large:
        monkeypatch.setattr(_module(ltx, "causal.kv_cache"), "LARGE", 1)
    model, ids, seen, appended = make(family, device), make_ids(device), list[Any](), list[Tensor]()
    attention, cat = torch.nn.functional.scaled_dot_product_attention, torch.cat

    def watched_attention(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Tensor:
        seen.append([(x.shape, x.stride()) for x in (query, key, value)])
        return attention(query, key, value, *arguments, **options)

    def watched_cat(tensors: Any, dim: int = 0) -> Tensor:
        if dim == -2:
            appended.append(tensors[-1])
        return cat(tensors, dim=dim)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched_attention)
    # In the file of the cache alone: where torch's own function is exchanged, layers that call it run stock.
    monkeypatch.setattr(cache_utils, "torch", SimpleNamespace(**{**vars(torch), "cat": watched_cat}))

    def of_a_token() -> list[Any]:
        cache, _ = filled(model, ids)
        seen.clear()
        appended.clear()
        model(ids[:, -1:], past_key_values=cache, use_cache=True)
        return list(seen)

    stock = of_a_token()
    ltx.optimize(model)
    assert ids.shape[0] > 1 and len(stock) == LAYERS
    ours = of_a_token()
    assert (ours == stock) is large
    assert len(appended) == 2 * LAYERS
    assert all(tensor.is_contiguous() is large for tensor in appended)
