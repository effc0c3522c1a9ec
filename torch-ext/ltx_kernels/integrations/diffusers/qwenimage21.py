"""Qwen-Image 2.1: one stream of text and image, modulation by scale and tanh gate that all blocks share, SwiGLU MLP.

The attention keeps keys and values of the prompt from the first step. Tokens of the prompt may be modulated by time 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention.call import Call
from ..attention.choice import attend_noted
from ..attention.description import Attention
from ..attention.kept_keys import with_kept
from ..attention.masks import ALL_KEYS, ScoresMask, Seen
from ..blocks.block import Block
from ..blocks.gated_mlp import GatedMLP
from ..blocks.stream import RMSNORM, TORCH_LAYERNORM, Stream, clipped, modulation_of
from ..engine.guards import children
from ..engine.kept import kept, may_read
from ..engine.recording import as_one, refuse
from ..engine.rotary_tables import of_complex
from ..engine.sites import Site, site_of

QWEN = "diffusers.models.transformers.transformer_qwenimage21.QwenImage21"


def _attends(call: Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention to the kept keys and the own ones, or of each segment of the prompt and then of the image."""
    cache, mode, segments, valid = map(call.further.get, ("layer_cache", "kv_cache_mode", "segments", "key_valid"))
    if cache is not None:
        refuse("keys and values of the prompt are kept")
        rows = call.further.get("cache_write_slice")
        if mode == "extract" and rows is not None:
            cache.store(key[:, rows].clone(), value[:, rows].clone())
        elif mode == "cached":
            key, value = (with_kept(*pair) for pair in zip(cache.get(), (key, value)))
    if segments is None:
        return attend_noted(call, query, key, value, call.seen(call.mask))
    outputs, rows = [], query.shape[1]
    for start, end, is_text in (*segments, (segments[-1][1] if segments else 0, rows, False)):
        seen = ALL_KEYS if valid is None else call.seen(valid[:, None, None, :end])
        if is_text:  # each token sees those before it
            mask = torch.ones(end - start, end, dtype=torch.bool, device=query.device).tril(start)[None, None]
            seen = Seen(mask if seen.mask is None else mask & seen.mask, None, False)
        outputs.append(attend_noted(call, query[:, start:end], key[:, :end], value[:, :end], seen))
    return torch.cat(outputs, 1)


ATTENTION = Attention(
    classes=(QWEN + "Attention",),
    processor=QWEN + "AttnProcessor",
    parameters=("hidden_states", "kwargs"),
    rope="rotary_emb",
    norm=RMSNORM,
    mask=ScoresMask(),
    tables=of_complex,
    attends=_attends,
    arguments=("layer_cache", "kv_cache_mode", "cache_write_slice", "segments", "key_valid"),
)
MLP = GatedMLP(
    (QWEN + "SwiGLUFeedForward",),
    parameter="hidden_states",
    projections=("gate_layer", "proj"),
    activation="activation_fn",
    down="out",
)


def _modulation(site: Site, params: Tensor, target: Tensor | None) -> tuple[Tensor, ...]:
    """Scale and gate of the attention and of the MLP, [B, 1, H], or [B, S, H] where tokens have one of two times."""

    def make() -> tuple[Tensor, ...]:
        scale1, gate1, scale2, gate2 = params.chunk(4, -1)
        values = scale1, gate1.tanh(), scale2, gate2.tanh()
        if target is None:
            return tuple(value.unsqueeze(1) for value in values)
        rows = target.view(1, -1, 1)
        pairs = tuple((value[:-1].unsqueeze(1), value[-1:].unsqueeze(0)) for value in values)
        if may_read(target) and bool(target.all()):  # after the first step: the prompt is not computed again
            return tuple(real.expand(-1, rows.shape[1], -1) for real, _ in pairs)
        return tuple(torch.where(rows, real, zero) for real, zero in pairs)

    return kept(site, "modulation", (params,) if target is None else (params, target), make)


def block_forward(
    self: Any,
    hidden_states: Tensor,
    modulation: Tensor,
    rotary_emb: Tensor | None = None,
    attention_mask: Tensor | None = None,
    target_token_mask: Tensor | None = None,
    layer_cache: Any = None,
    kv_cache_mode: str | None = None,
    cache_write_slice: slice | None = None,
    segments: list[tuple[int, int, bool]] | None = None,
    key_valid: Tensor | None = None,
) -> Tensor:
    norm1, attn, norm2, mlp = children(self, "img_norm1", "attn", "img_norm2", "img_mlp")
    mods = modulation_of(as_one(_modulation, site_of(self), modulation, target_token_mask))
    scale1, gate1, scale2, gate2 = mods
    h = Stream(self, hidden_states)
    attended = attn(
        hidden_states=h.norm(norm1, None, scale1, into="attn"),
        attention_mask=attention_mask,
        rotary_emb=rotary_emb,
        layer_cache=layer_cache,
        kv_cache_mode=kv_cache_mode,
        cache_write_slice=cache_write_slice,
        segments=segments,
        key_valid=key_valid,
    )
    h.add(attended, gate1)
    h.add(mlp(h.norm(norm2, None, scale2, into="img_mlp")), gate2)
    return clipped(h.value())


BLOCK = Block(
    classes=(QWEN + "TransformerBlock",),
    forward=block_forward,
    tensors=("modulation",),
    unbatched=("modulation",),  # it has one more row, for time 0, where tokens have one of two times
    norms={"img_norm1": (TORCH_LAYERNORM,), "img_norm2": (TORCH_LAYERNORM,)},
    attentions={"attn": ATTENTION, "img_mlp": MLP},
)

ENTRIES = (ATTENTION, MLP, BLOCK)
