"""Layers of transformers, whose forward is a checkpoint by itself.

Before transformers 5.24 ``GradientCheckpointingLayer.__call__`` checkpointed a layer's forward, whichever that was. Now
the forward of the class is a checkpoint, and what `optimize` puts in its place has to be one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable

import torch
from torch import nn

from ..blocks.block import Block
from ..causal.kv_cache import CACHE
from ..engine.sites import Entry, stock_forward

FLAG, CHECKPOINT = "gradient_checkpointing", "_gradient_checkpointing_func"  # a layer's attributes, by transformers
CACHES = (CACHE, "cache", "layer_past", "use_cache")  # arguments that a stock layer drops, with a warning


class Layer(Block):
    """A `Block` whose forward is a checkpoint where the stock one is."""

    def entry(self) -> Entry:
        entry = super().entry()
        inner = entry.forward

        def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not checkpoints_itself(layer):
                return inner(layer, *args, **kwargs)
            if any(_is_given(kwargs.get(name)) for name in CACHES):
                return stock_forward(layer, "a cache under a checkpoint", *args, **kwargs)
            checkpoint: Callable[..., Any] = layer.__dict__[CHECKPOINT]
            run = inner if torch.compiler.is_compiling() else functools.partial(_run, inner)
            return checkpoint(functools.partial(run, layer, **kwargs), *args)

        return dataclasses.replace(entry, forward=forward)


def checkpoints_itself(layer: nn.Module) -> bool:
    """Whether the stock forward of a layer would be a checkpoint in this call."""
    if not (layer.training and layer.__dict__.get(FLAG) and torch.is_grad_enabled()):
        return False
    return CHECKPOINT in layer.__dict__ and type(layer).__call__ is nn.Module.__call__


def _is_given(cache: Any) -> bool:
    """Whether a layer got a cache, which may be empty, or has to fill one."""
    return cache is not None and cache is not False


def _run(inner: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """One run of a checkpoint's function, in which a stock forward is no checkpoint once more."""
    before = layer.__dict__[FLAG]
    layer.__dict__[FLAG] = False
    try:
        return inner(layer, *args, **kwargs)
    finally:
        layer.__dict__[FLAG] = before
