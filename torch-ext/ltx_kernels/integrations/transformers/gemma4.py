"""Gemma 4: Gemma's layers with a norm of the value, an input of their own, and a scale of the whole layer.

Some layers have a mixture of experts beside the MLP, which stays the model's own. The last layers of some models read
keys and values of an earlier layer, which hands them over in ``shared_kv_states``.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ...glu import geglu
from ..blocks.gated_mlp import GatedMLP
from ..blocks.stream import Stream
from ..causal.engine import LIVE, CausalAttention, input_of
from ..causal.kv_cache import CACHE, RENAMES
from ..engine.guards import children
from ..engine.norm_forms import NORMS, form_of
from ..engine.norm_forms import transformers_class as _class
from ..engine.recording import Live
from ..engine.rotary_tables import Tables
from ..engine.sites import site_of
from ._layer import Layer
from ._pre_norm import layer_window

SANDWICH = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
OF_EXPERTS = ("router", "experts", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
AFTER_MLP = "post_feedforward_layernorm_1"
OF_INPUT = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
GELU = "transformers.activations.GELUTanh"


ATTENTION = CausalAttention(
    (_class("gemma4", "Gemma4TextAttention"),),
    (
        "hidden_states",
        "position_embeddings",
        "attention_mask",
        "shared_kv_states",
        CACHE,
        "kwargs",
    ),
    norms=("q_norm", "k_norm", "v_norm"),
    shares="shared_kv_states",
    options=layer_window,
)
MLP = GatedMLP((_class("gemma4", "Gemma4TextMLP"),))


def _with_experts(block: Any, branch: Tensor, stream: Tensor) -> Tensor:
    """What the MLP and the experts make of a stream, each after a norm of its own."""
    router, experts, before, after = children(block, *OF_EXPERTS)
    norm = block._modules[AFTER_MLP]
    form = form_of(norm)
    assert form is not None
    rows = stream.reshape(-1, stream.shape[-1])
    _, weights, index = router(rows)
    chosen: Tensor = after(experts(before(rows), index, weights).view_as(stream))
    return form.rms(norm, branch, site_of(block).rounding) + chosen


def _form(block: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """As `LIVE` has it. A layer that reads keys and values of an earlier one has no place in the cache."""
    if not block._modules["self_attn"].is_kv_shared_layer:
        return LIVE.signature(block, args, kwargs)
    return False if input_of(args, kwargs).shape[1] == 1 else None


def layer_forward(
    self: Any,
    hidden_states: Tensor,
    per_layer_input: Tensor | None = None,
    shared_kv_states: Any = None,
    position_embeddings: Tables | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Tensor:
    norm1, norm2, norm3, norm4 = children(self, *SANDWICH)
    attn, ff = children(self, "self_attn", "mlp")
    h = Stream(self, hidden_states)
    attended = attn(
        hidden_states=h.norm(norm1, into="self_attn"),
        position_embeddings=position_embeddings,
        attention_mask=attention_mask,
        shared_kv_states=shared_kv_states,
        position_ids=position_ids,
        **{CACHE: past_key_values},
        **kwargs,
    )
    h.add(attended[0], norm=norm2)
    branch = ff(h.norm(norm3, into="mlp"))
    h.add(_with_experts(self, branch, h.value()) if self.__dict__["enable_moe_block"] else branch, norm=norm4)
    if OF_INPUT[0] in self._modules:
        gate, projection, norm5 = children(self, *OF_INPUT)
        gated = geglu(gate(h.value()), per_layer_input, rounding=site_of(self).rounding)
        h.add(projection(gated), norm=norm5)
    return h.value() * self._buffers["layer_scalar"]


ENTRIES = (
    ATTENTION,
    MLP,
    Layer(
        (_class("gemma4", "Gemma4TextDecoderLayer"),),
        layer_forward,
        renames=RENAMES,
        children=frozenset({"self_attn", "mlp"}),
        optional_children=frozenset((*OF_EXPERTS, AFTER_MLP, *OF_INPUT, "act_fn")),
        tensors=("per_layer_input",),
        norms=dict.fromkeys((*SANDWICH, AFTER_MLP, OF_INPUT[2]), NORMS),
        modules={"act_fn": (GELU,)},
        attentions={"self_attn": ATTENTION, "mlp": MLP},
        linears=((OF_INPUT[0],), (OF_INPUT[1],)),
        fp8_skip=tuple(f"*.{name}" for name in OF_INPUT[:2]),
        live=Live((*LIVE.names, "shared_kv_states"), _form),
        ops=("norm_gated_residual_norm", "norm_residual", "rmsnorm", "geglu"),
    ),
)
