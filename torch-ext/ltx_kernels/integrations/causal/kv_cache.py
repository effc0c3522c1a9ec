"""Keys and values of a prompt as the contents of an empty DynamicCache of transformers, without a copy of them.

The cache appends by torch.cat, which copies a whole prompt although nothing is there to append to. Only transformers'
own classes are filled here, while they are empty. Any other cache is updated by its own method.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Callable

import torch
from torch import Tensor

from ..engine.code import is_code_of

HOME = "transformers.cache_utils"
SLIDING_WINDOW = 4  # of the layers that `_fills_as` compares
# Elements of a layer's keys from which a token of each sample is made contiguous, because torch.cat has a faster kernel
# then. With fewer elements the host takes longer to ask for the copies than the GPU saves.
LARGE = 2**24

Pair = tuple[Tensor, Tensor]

_known: dict[Any, bool] = {}  # by the updates of transformers' own layers: whether `fill` does the same


def _is_renamed() -> bool:
    try:
        major, minor, *_ = version("transformers").split(".")
    except PackageNotFoundError:
        return True
    return (int(major), int(minor)) >= (5, 24)


# Under which name transformers hands the cache to layers and attentions. From 5.24 on it also hands the other keywords
# to the cache's update, which may change them.
EARLIER = "past_key_values"
IS_RENAMED = _is_renamed()
CACHE = "cache" if IS_RENAMED else EARLIER
RENAMES = {EARLIER: CACHE}  # of blocks, whose forwards here have the earlier name


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a layer or an attention, where newer ones still accept the earlier name."""
    cache = arguments.get(CACHE)
    return arguments.get(EARLIER) if cache is None else cache


def update(cache: Any, key: Tensor, value: Tensor, index: int, options: dict[str, Any]) -> Pair:
    """``cache.update`` as the stock attention calls it.

    options: The further keywords of the attention function.
    """
    further = {"kwargs": options} if IS_RENAMED else {}
    pair: Pair = cache.update(key, value, index, **further)
    return pair


def empty_layer(cache: Any, index: int, remark: Callable[[str], None]) -> Any:
    """The layer of a cache that `fill` takes; None where the cache has to be updated by its own method.

    remark: What is told about a cache of transformers' class whose methods are somebody else's.
    """
    home = sys.modules.get(HOME)
    if home is None or type(cache) is not home.DynamicCache or cache.offloading:
        return None
    layers = cache.layers
    if len(layers) > index:
        layer = layers[index]
        if type(layer) not in (home.DynamicLayer, home.DynamicSlidingWindowLayer):
            return None
        if layer.is_initialized or getattr(layer, "record_past", False):
            return None
    elif cache.layer_class_to_replicate is not home.DynamicLayer:
        return None
    if not is_code_of(home.Cache.update, home) or "update" in cache.__dict__:
        remark("keys and values copied: the update of their cache is not transformers'")
        return None
    while len(layers) <= index:
        layers.append(home.DynamicLayer())
    layer = layers[index]
    if "update" in layer.__dict__ or not _fills_as(type(layer), home):
        remark("keys and values copied: the update of their cache's layer is not transformers'")
        return None
    return layer


def fill(layer: Any, key: Tensor, value: Tensor) -> Pair:
    """What ``layer.update(key, value)`` does for an empty layer, which keeps these tensors instead of copies.

    key, value: [B, heads, S, D], in memory that nothing else holds.
    """
    layer.lazy_initialization(key, value)
    layer.keys, layer.values = key, value
    if layer.is_sliding:
        layer.cumulative_length += key.shape[-2]
        first = 1 - layer.sliding_window
        layer.keys, layer.values = key[:, :, first:, :], value[:, :, first:, :]
    return key, value


def is_filled(cache: Any, index: int) -> bool:
    """Whether a layer of one of transformers' caches holds keys, so that `empty_layer` does not return it."""
    layers = getattr(cache, "layers", ())
    return len(layers) > index and getattr(layers[index], "is_initialized", False) is True


def is_large(cache: Any, index: int) -> bool:
    """Whether a layer of a cache holds so many keys that what is appended to them should be contiguous."""
    layers = getattr(cache, "layers", ())
    keys = getattr(layers[index], "keys", None) if len(layers) > index else None
    return isinstance(keys, Tensor) and keys.numel() >= LARGE


def heads_first(heads: Tensor) -> Tensor:
    """[B, heads, S, D] of [B, S, heads, D], contiguous: a copy wherever there are several tokens.

    Words of 8 bytes are copied where they fit: where dimensions trade places, torch copies element by element.
    """
    words = 8 // heads.element_size()
    places = heads.storage_offset(), heads.shape[-1], *heads.stride()[:-1]
    if heads.stride(-1) == 1 and not any(place % words for place in places):
        return heads.view(torch.int64).transpose(1, 2).contiguous().view(heads.dtype)
    return heads.transpose(1, 2).contiguous()


def _fills_as(cls: type, home: types.ModuleType) -> bool:
    """Whether `fill` leaves a layer of this class as its own ``update`` does, found out once with a few numbers."""
    update = cls.update  # type: ignore[attr-defined]
    if not is_code_of(update, home):
        return False
    if update not in _known:
        _known[update] = _fills_alike(cls, 2) and _fills_alike(cls, 2 * SLIDING_WINDOW)
    return _known[update]


def _fills_alike(cls: type, length: int) -> bool:
    options = {"sliding_window": SLIDING_WINDOW} if cls.is_sliding else {}  # type: ignore[attr-defined]
    stock, ours = cls(**options), cls(**options)
    key = torch.arange(2.0 * length, device="cpu").view(1, 1, length, 2)
    pairs = zip(stock.update(key, -key), fill(ours, key, -key))
    states = vars(stock), vars(ours)
    return all(torch.equal(*pair) for pair in pairs) and (
        states[0].keys() == states[1].keys() and all(_same(states[0][name], states[1][name]) for name in states[0])
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)
