"""Prompts in a sliding window: where their mask says nothing but the window, attention runs without it."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")
from helpers.language_models import (  # noqa: E402
    GEMMA4,
    LAYERS,
    OTHER_ATTENTION,
    distance,
    make_ids,
    make_model,
    other_attention,
    plain_flash,
)

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")
CLOSE = 1e-5 if torch.cuda.is_available() else 3e-6
WINDOW, LENGTH = 6, 15
REMARK = "attention in a window without its mask"
FAMILIES: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": WINDOW},
    "Ministral": {"sliding_window": WINDOW},
    "Qwen3": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "Gemma3": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "tie_word_embeddings": False},
    "Gemma4": {**GEMMA4, "sliding_window": WINDOW},
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def sliding_layers(model: Any) -> int:
    types = getattr(model.config, "layer_types", None) or ["sliding_attention"] * LAYERS
    return sum(kind == "sliding_attention" for kind in types)


def make(family: str, device: str, dtype: torch.dtype = torch.float32) -> Any:
    options = dict(FAMILIES[family])
    if family == "Gemma3":
        options["layer_types"] = ["sliding_attention", "full_attention"]
    return make_model(device, dtype, family, **options)


@pytest.fixture
def flash(ltx: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has the same attention computed in plain torch on any device; the windows of its calls."""
    windows: list[int] = []
    plain_flash(ltx, monkeypatch, lambda query, window: None if window is None else windows.append(window))
    return windows


@every_family
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("length", [WINDOW, WINDOW + 1, LENGTH])
def test_prompts(ltx: ModuleType, device: str, flash: list[int], family: str, batch: int, length: int) -> None:
    model, ids = make(family, device), make_ids(device, length)[:batch]
    stock = model(ids).logits
    report = ltx.optimize(model)
    assert distance(model(ids).logits, stock) < CLOSE
    count = sliding_layers(model)
    assert count > 0 and flash == [WINDOW] * count
    assert REMARK in str(report)


@every_family
def test_generation(ltx: ModuleType, device: str, flash: list[int], family: str) -> None:
    """The prompt runs in a window, the tokens after it as ever."""
    model, ids = make(family, device), make_ids(device, LENGTH)
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    stock = model.generate(ids, **options)
    ltx.optimize(model)
    assert torch.equal(model.generate(ids, **options), stock)
    assert len(flash) == sliding_layers(model)


def four_dimensions(length: int, device: str, window: int) -> Tensor:
    places = torch.arange(length, device=device)
    behind = places[:, None] - places
    return ((behind >= 0) & (behind < window))[None, None]


@every_family
@pytest.mark.parametrize("case", ["padding", "another window", "one more key", "one key less", "short"])
def test_other_masks_stay(ltx: ModuleType, device: str, flash: list[int], family: str, case: str) -> None:
    """Anything but the layer's own window over a whole prompt is the model's attention with its mask."""
    model, ids = make(family, device), make_ids(device, LENGTH)
    options: dict[str, Any] = {}
    if case == "short":
        ids = ids[:, : WINDOW - 1]
    elif case == "padding":
        options["attention_mask"] = torch.ones_like(ids)
        options["attention_mask"][0, :3] = 0
    else:
        mask = four_dimensions(LENGTH, device, WINDOW - 1 if case == "another window" else WINDOW)
        mask = mask.repeat(2, 1, 1, 1)
        if case == "one more key":
            mask[1, 0, 8, 1] = True
        elif case == "one key less":
            mask[1, 0, 8, 5] = False
        full = four_dimensions(LENGTH, device, LENGTH)
        both = {"sliding_attention": mask, "full_attention": full}
        options["attention_mask"] = mask if family == "Mistral" else both

    stock = model(ids, **options).logits
    report = ltx.optimize(model)
    assert distance(model(ids, **options).logits, stock) < CLOSE
    assert flash == [] and REMARK not in str(report)


@pytest.mark.parametrize("case", OTHER_ATTENTION)
def test_other_functions_stay(
    ltx: ModuleType, device: str, flash: list[int], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    model, ids = make("Gemma3", device), make_ids(device, LENGTH)
    ltx.optimize(model)
    with other_attention(case, model, monkeypatch):
        model(ids)
    assert flash == []


def test_compiled_models_keep_the_mask(ltx: ModuleType, device: str, flash: list[int]) -> None:
    model, ids = make("Gemma3", device), make_ids(device, LENGTH)
    stock = model(ids, use_cache=False).logits
    ltx.optimize(model)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert distance(compiled(ids, use_cache=False).logits, stock) < CLOSE
    assert flash == []


def test_compiled_layers(ltx: ModuleType, device: str, flash: list[int]) -> None:
    """One graph for prompts that are shorter and longer than the window."""
    model = make("Mistral", device)
    ltx.optimize(model)
    torch.compiler.reset()
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="eager", dynamic=True)
    for i, length in enumerate((WINDOW - 2, LENGTH)):
        mask = four_dimensions(length, device, WINDOW).repeat(2, 1, 1, 1)
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            model(make_ids(device, length), attention_mask=mask, use_cache=False)
    assert flash == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_family
def test_flash_attention(ltx: ModuleType, device: str, family: str, dtype: torch.dtype) -> None:
    """torch's own on a GPU: not further from the model in float32 than stock."""
    if device != "cuda" or torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs a GPU with flash attention")
    model, ids = make(family, device, dtype), make_ids(device, 200)
    stock, exact = model(ids).logits, copy.deepcopy(model).float()(ids).logits
    report = ltx.optimize(model)
    assert distance(model(ids).logits, exact) <= 1.2 * distance(stock, exact)
    assert REMARK in str(report)
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        before = sum(site.remarks[REMARK] for site in report.sites)
        model(ids)
    assert sum(site.remarks[REMARK] for site in report.sites) == before
