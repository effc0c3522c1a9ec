"""Several tokens after a KV cache: assisted decoding, and prompts in pieces. Keys are not repeated for their heads."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")
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
    plain_flash,
)
from transformers import DynamicCache, StaticCache  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")
CLOSE = 1e-5 if torch.cuda.is_available() else 3e-6
WINDOW, PLACES = 6, 24
PIECES = (4, 6, 5)
ORDER = "causal attention of several tokens without their mask"
IN_WINDOW = "attention in a window without its mask"
MASKED = "attention of a few tokens with a mask in groups of heads"
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Ministral3": MINISTRAL3,
    "Qwen2": {},
    "Qwen3": {},
    "Qwen3_5": {**QWEN3_5, "layer_types": ["full_attention"] * LAYERS},
    "Phi3": {},
    "Olmo2": {},
}
SLIDING: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": WINDOW},
    "Qwen3": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "Gemma3": {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Gemma4": {**GEMMA4, "sliding_window": WINDOW},
}
CASES = {**FAMILIES, **{f"{family}-window": config for family, config in SLIDING.items()}, "Llama4": LLAMA4}
every_case = pytest.mark.parametrize("case", CASES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
Caches = Callable[[Any], Any]


def dynamic(model: Any) -> Any:
    return DynamicCache(config=model.config)


def static(model: Any) -> Any:
    return StaticCache(config=model.config, max_cache_len=PLACES)


every_cache = pytest.mark.parametrize("cache", [dynamic, static], ids=lambda cache: cache.__name__)


def make(case: str, device: str, dtype: torch.dtype = torch.float32) -> Any:
    return make_model(device, dtype, case.partition("-")[0], **CASES[case])


def in_pieces(
    model: Any, ids: Tensor, cache: Caches, mask: Tensor | None = None, pieces: Sequence[int] = PIECES
) -> Tensor:
    """The logits of a text that the model reads piece by piece, in float32."""
    kept, outputs, start = cache(model), [], 0
    for length in pieces:
        end = start + length
        given = {} if mask is None else {"attention_mask": mask[:, :end]}
        outputs.append(model(ids[:, start:end], past_key_values=kept, use_cache=True, **given).logits.float())
        start = end
    return torch.cat(outputs, 1)


def remarks(report: Any, text: str) -> int:
    return sum(site.remarks[text] for site in report.sites)


@pytest.fixture
def flash(ltx: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """Has torch's flash attention computed in plain torch on any device; the queries and the window of its calls."""
    calls: list[tuple[int, int | None]] = []
    plain_flash(ltx, monkeypatch, lambda query, window: calls.append((query.shape[2], window)))
    return calls


@pytest.fixture
def masked(ltx: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Has the products of groups of heads computed on any device and in float32; the queries and keys of its calls."""
    home: Any = sys.modules[f"{ltx.__name__}.integrations.causal.masked_tokens"]
    own, calls = home.attention, list[tuple[int, int]]()

    def attention(site: Any, query: Tensor, key: Tensor, *others: Any) -> Tensor:
        calls.append((query.shape[2], key.shape[2]))
        output: Tensor = own(site, query, key, *others)
        return output

    monkeypatch.setattr(home, "_has_products", lambda query: query.dtype == torch.float32)
    monkeypatch.setattr(home, "attention", attention)
    return calls


@every_case
@every_dtype
@every_cache
@pytest.mark.parametrize("batch", [1, 2])
def test_pieces(
    ltx: ModuleType,
    device: str,
    flash: list[tuple[int, int | None]],
    case: str,
    dtype: torch.dtype,
    cache: Caches,
    batch: int,
) -> None:
    """Without padding, each piece after the first goes through flash attention, with the window of its layer."""
    model, ids = make(case, device, dtype), make_ids(device, sum(PIECES))[:batch]
    stock, exact = in_pieces(model, ids, cache), in_pieces(copy.deepcopy(model).float(), ids, cache)
    report = ltx.optimize(model)
    ours = in_pieces(model, ids, cache)
    if dtype == torch.float32:
        assert distance(ours, stock) < CLOSE
    else:
        assert distance(ours, exact) <= 1.2 * distance(stock, exact)
    assert report.fallbacks == {}
    chunked = case == "Llama4"  # one of its layers sees chunks, whose mask is another where a chunk ends
    assert {length for length, _ in flash} == set(PIECES)
    assert remarks(report, ORDER) + remarks(report, IN_WINDOW) >= (len(PIECES) - 1) * (LAYERS - chunked)
    assert (remarks(report, IN_WINDOW) > 0) == case.endswith("window")


@every_case
@every_cache
def test_padding(
    ltx: ModuleType,
    device: str,
    flash: list[tuple[int, int | None]],
    masked: list[tuple[int, int]],
    case: str,
    cache: Caches,
) -> None:
    """With padding, pieces of few tokens are products of groups of heads; a token that sees nothing gets zeros."""
    model, ids = make(case, device), make_ids(device, sum(PIECES))
    mask = torch.ones_like(ids)
    mask[0, : PIECES[0] - 1] = 0
    stock = in_pieces(model, ids, cache, mask)
    report = ltx.optimize(model)
    assert distance(in_pieces(model, ids, cache, mask), stock) < CLOSE
    full = case == "Mistral-window" and cache is static  # all layers have as many places as their window
    assert remarks(report, MASKED) == len(masked) and (len(masked) > 0) != full
    if not case.endswith("window") and case != "Llama4":
        assert flash == [] and [length for length, _ in masked] == [n for n in PIECES for _ in range(LAYERS)]


@every_case
def test_many_padded_tokens_stay(ltx: ModuleType, device: str, masked: list[tuple[int, int]], case: str) -> None:
    pieces = 2, 17
    model, ids = make(case, device), make_ids(device, sum(pieces))
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    stock = in_pieces(model, ids, dynamic, mask, pieces)
    ltx.optimize(model)
    assert distance(in_pieces(model, ids, dynamic, mask, pieces), stock) < CLOSE
    assert {length for length, _ in masked} == {2}


@pytest.mark.parametrize("case", ["Llama", "Qwen3", "Gemma3-window"])
def test_assisted_decoding(ltx: ModuleType, device: str, flash: list[tuple[int, int | None]], case: str) -> None:
    """Greedy decoding with a draft has stock's tokens. The model reads several tokens at a time."""
    model, ids = make(case, device), make_ids(device)[:1]
    assistant = copy.deepcopy(model)
    assistant.lm_head.weight[3:7] += 0.05
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    stock = model.generate(ids, assistant_model=assistant, **options)
    report = ltx.optimize(model)
    assert torch.equal(model.generate(ids, assistant_model=assistant, **options), stock)
    assert remarks(report, ORDER) > 0


@pytest.mark.parametrize("change", ["one more key", "one key less", "a later key", "one sample"])
def test_other_masks_stay(
    ltx: ModuleType, device: str, flash: list[tuple[int, int | None]], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """A mask that differs in one place from a causal one is the model's attention's."""
    model, ids = make("Llama", device), make_ids(device, 9)
    mask = torch.ones(9, 9, dtype=torch.bool, device=device).tril()[4:].repeat(2, 1, 1, 1)
    row, column = {"one more key": (1, 6), "one key less": (3, 0), "a later key": (0, 8), "one sample": (4, 8)}[change]
    mask[1, 0, row, column] ^= True

    def run() -> Tensor:
        cache = model(ids[:, :4], use_cache=True).past_key_values
        logits: Tensor = model(ids[:, 4:], past_key_values=cache, attention_mask=mask).logits
        return logits

    stock = run()
    report = ltx.optimize(model)
    assert distance(run(), stock) < CLOSE
    assert remarks(report, ORDER) == 0
    mask[1, 0, row, column] ^= True
    run()
    assert remarks(report, ORDER) == LAYERS


@pytest.mark.parametrize("case", ["rounding", "inference mode", *OTHER_ATTENTION])
def test_calls_that_keep_their_mask(
    ltx: ModuleType,
    device: str,
    flash: list[tuple[int, int | None]],
    masked: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    model, ids = make("Llama", device), make_ids(device, sum(PIECES))
    report = ltx.optimize(model, rounding="eager" if case == "rounding" else "fp32")
    context = torch.inference_mode() if case == "inference mode" else other_attention(case, model, monkeypatch)
    with context:
        in_pieces(model, ids, dynamic)
    assert remarks(report, ORDER) == 0


def test_the_mask_is_read_once(ltx: ModuleType, device: str, flash: list[Any], monkeypatch: Any) -> None:
    """For all layers of a forward."""
    home: Any = sys.modules[f"{ltx.__name__}.integrations.causal.causal_mask"]
    own, asked = home._seen_places, list[int]()

    def seen_places(mask: Tensor, *others: Any) -> int:
        asked.append(mask.shape[2])
        places: int = own(mask, *others)
        return places

    monkeypatch.setattr(home, "_seen_places", seen_places)
    model, ids = make("Llama", device), make_ids(device, sum(PIECES))
    ltx.optimize(model)
    in_pieces(model, ids, dynamic)
    assert asked == list(PIECES[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_cache
@pytest.mark.parametrize("case", ["Llama", "Qwen3", "Mistral-window", "Gemma3-window"])
def test_flash_attention(ltx: ModuleType, cuda: str, case: str, cache: Caches, dtype: torch.dtype) -> None:
    """torch's own on a GPU, and the products: not further from the model in float32 than stock."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs a GPU with flash attention")
    model, ids = make(case, cuda, dtype), make_ids(cuda, sum(PIECES))
    padding = torch.ones_like(ids)
    padding[0, :3] = 0
    single = copy.deepcopy(model).float()
    stock = [in_pieces(model, ids, cache, mask) for mask in (None, padding)]
    exact = [in_pieces(single, ids, cache, mask) for mask in (None, padding)]
    report = ltx.optimize(model)
    for mask, theirs, wanted in zip((None, padding), stock, exact):
        valid = padding.bool() if mask is not None else torch.ones_like(ids).bool()
        ours = in_pieces(model, ids, cache, mask)
        assert distance(ours[valid], wanted[valid]) <= 1.25 * distance(theirs[valid], wanted[valid])
    assert remarks(report, ORDER) + remarks(report, IN_WINDOW) > 0
    if cache is dynamic or case != "Mistral-window":  # a static cache's full window shows other masks
        assert remarks(report, MASKED) > 0
