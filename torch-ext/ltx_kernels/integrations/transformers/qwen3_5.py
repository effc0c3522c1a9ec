"""Qwen3.5: Llama's layers, most of them with linear attention; also the dense parts of its mixtures of experts.

Each layer holds either an attention, whose layer for the query makes a gate of the output as well, or linear attention,
which stays the model's own module. Its gated norm is described in norms.py. The other norms multiply by ``1 + weight``.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..blocks.gated_mlp import GatedMLP
from ..blocks.stream import Stream
from ..causal.engine import LIVE, CausalAttention, input_of
from ..causal.kv_cache import CACHE, IS_RENAMED, RENAMES
from ..engine.guards import children
from ..engine.norm_forms import OFFSET_NORMS
from ..engine.norm_forms import transformers_class as _class
from ..engine.recording import Live, as_one
from ..engine.rotary_tables import Tables
from ._layer import Layer
from ._pre_norm import through_mlp

ATTENTION = CausalAttention(
    (_class("qwen3_5", "Qwen3_5Attention"), _class("qwen3_5_moe", "Qwen3_5MoeAttention")),
    norms=("q_norm", "k_norm"),
    gated=True,
)
MLP = GatedMLP((_class("qwen3_5", "Qwen3_5MLP"), _class("qwen3_5_moe", "Qwen3_5MoeMLP")))
LINEAR = "linear_attn"
LINEAR_CACHE = "cache" if IS_RENAMED else "cache_params"  # its name for the cache
NUMBERS = "it makes one number for each head, which decides how fast the state decays"


def _form(block: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """As `LIVE` has it. Nothing but the module of linear attention reads its cache, and a replay calls that again."""
    if LINEAR not in block._modules:
        return LIVE.signature(block, args, kwargs)
    return False if input_of(args, kwargs).shape[1] == 1 else None


def _attend_linearly(module: Any, rows: Tensor, cache: Any, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    attended: Tensor = module(hidden_states=rows, **{LINEAR_CACHE: cache}, attention_mask=mask, **options)
    return attended


def _layer(classes: tuple[str, ...], linear: tuple[str, ...], mlp: GatedMLP | None) -> Layer:
    """Decoder layers of these classes, with linear attention of the classes `linear`."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Tables,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        (norm,) = children(self, "input_layernorm")
        h = Stream(self, hidden_states)
        if LINEAR in self._modules:
            module, rows = self._modules[LINEAR], h.norm(norm)
            h.add(as_one(_attend_linearly, module, rows, past_key_values, attention_mask, kwargs))
        else:
            attended = self._modules["self_attn"](
                hidden_states=h.norm(norm, into="self_attn"),
                attention_mask=attention_mask,
                position_ids=position_ids,
                **{CACHE: past_key_values},
                position_embeddings=position_embeddings,
                **kwargs,
            )
            h.add(attended[0])
        return through_mlp(self, h, mlp)

    return Layer(
        classes,
        forward,
        renames=RENAMES,
        children=frozenset({"mlp"}),
        optional_children=frozenset({"self_attn", LINEAR}),
        norms={"input_layernorm": OFFSET_NORMS, "post_attention_layernorm": OFFSET_NORMS},
        attentions={"self_attn": ATTENTION, **({} if mlp is None else {"mlp": mlp})},
        linears=((f"{LINEAR}.in_proj_qkv", f"{LINEAR}.in_proj_z"), (f"{LINEAR}.out_proj",)),
        never_fp8=((f"{LINEAR}.in_proj_a", NUMBERS), (f"{LINEAR}.in_proj_b", NUMBERS)),
        live=Live(LIVE.names, _form),
        plain=linear,
        ops=("rmsnorm", "rmsnorm_residual"),
    )


ENTRIES = (
    ATTENTION,
    MLP,
    _layer((_class("qwen3_5", "Qwen3_5DecoderLayer"),), (_class("qwen3_5", "Qwen3_5GatedDeltaNet"),), MLP),
    _layer(
        (_class("qwen3_5_moe", "Qwen3_5MoeDecoderLayer"),), (_class("qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet"),), None
    ),
)
