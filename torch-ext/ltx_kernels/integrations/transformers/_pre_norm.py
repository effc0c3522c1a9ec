"""The decoder layer of Llama and its kin: norm, attention, norm, gated MLP, two residual additions.

The addition after the attention and the norm after it are one launch. The layer returns the stream itself, which
transformers records as a hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..blocks.gated_mlp import GatedMLP
from ..blocks.stream import Stream
from ..causal.engine import LIVE, CausalAttention
from ..causal.kv_cache import CACHE, RENAMES
from ..engine.guards import children, is_idle
from ..engine.norm_forms import NORMS
from ..engine.rotary_tables import Tables
from ._layer import Layer

Options = dict[str, Any]


def layer_window(attention: Any, arguments: Mapping[str, Any]) -> Options:
    return {"sliding_window": attention.sliding_window}


def drops(layer: Any, name: str) -> bool:
    """Whether a layer has a dropout that only some classes have, and it is active or has a hook."""
    dropout = layer._modules.get(name)
    return dropout is not None and not is_idle(dropout)


def dropped(layer: Any, name: str, branch: Tensor) -> Tensor:
    """A branch after such a dropout."""
    return layer._modules[name](branch) if drops(layer, name) else branch


def through_mlp(layer: Any, h: Stream, mlp: GatedMLP | None, name: str = "mlp") -> Tensor:
    """What a layer returns: its stream after the norm and the MLP after the attention.

    mlp: The description of the MLP; None where it has none.
    name: The name of the MLP.
    """
    norm, ff = children(layer, "post_attention_layernorm", name)
    rows = h.norm(norm, into=None if mlp is None else name)
    own = h.own()
    if own is not None and mlp is not None and mlp.adds(ff) and not drops(layer, "resid_mlp_dropout"):
        added: Tensor = ff(rows, addend=own)
        return added
    output = ff(rows)
    if isinstance(output, tuple):  # a mixture of experts, which returns its scores as well
        output = output[0].view_as(rows)
    h.add(dropped(layer, "resid_mlp_dropout", output))
    return h.value()


def pre_norm_layer(
    classes: tuple[str, ...], attention: CausalAttention, mlp: GatedMLP | None, casts: bool = False
) -> Layer:
    """Decoder layers of these classes, whose attention is of the given class, and the MLP of that or of another.

    casts: As in `Block`: the norms' weights may have a dtype of their own.
    """

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: Tables | None = None,
        **kwargs: Any,
    ) -> Tensor:
        norm, attn = children(self, "input_layernorm", "self_attn")
        h = Stream(self, hidden_states)
        attended = attn(
            hidden_states=h.norm(norm, into="self_attn"),
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CACHE: past_key_values},
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        h.add(dropped(self, "resid_attn_dropout", attended[0]))
        return through_mlp(self, h, mlp)

    return Layer(
        classes,
        forward,
        renames=RENAMES,
        children=frozenset({"mlp"}),  # also where it has no description
        optional_children=frozenset({"resid_attn_dropout", "resid_mlp_dropout"}),
        norms={"input_layernorm": NORMS, "post_attention_layernorm": NORMS},
        attentions={"self_attn": attention, **({} if mlp is None else {"mlp": mlp})},
        casts=casts,
        live=LIVE,
        ops=("rmsnorm", "rmsnorm_residual"),
    )
