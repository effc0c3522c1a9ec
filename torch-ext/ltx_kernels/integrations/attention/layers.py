"""The layers of an attention module in the forms that its state allows, or why its calls run stock."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from ..._checks import RMS
from ..blocks.gated_mlp import SILU, kind_of
from ..blocks.stream import TORCH_RMSNORM
from ..engine.autocast import autocast_dtype
from ..engine.code import patched
from ..engine.guards import children, class_of, follows_shared, hooked, is_idle, submodule, why_not_norm_weight
from ..engine.norm_forms import statistic
from ..engine.sites import site_of
from ..linear.fp8 import in_fp8
from ..linear.linears import Linears
from ..linear.products import may_overwrite
from .description import Attention, AttentionModule, in_features, out_features


def why_not_module(spec: Attention, module: nn.Module) -> str:
    """Why a module of the class cannot be replaced."""
    attention_module = cast(AttentionModule, module)
    if class_of(attention_module.processor) not in (spec.processor, *spec.other_processors):
        return f"its processor is {class_of(attention_module.processor)}"
    reason = patched(type(attention_module.processor)) or spec.why_not(module)
    return reason or _why_not_norms(spec, module) or _why_not_mlp(spec, module)


def _why_not_mlp(spec: Attention, module: nn.Module) -> str:
    activation = module._modules.get(spec.mlp) if spec.mlp else None
    fits = not spec.mlp or kind_of(activation) == SILU
    return "" if fits else f"{spec.mlp} is {class_of(activation)}"


def _norm_pairs(spec: Attention, module: nn.Module) -> list[tuple[str, str]]:
    """The names of the norms of query and key, of each stream that has any."""
    pairs = [spec.norms]
    if spec.added:
        pairs.append(spec.added_norms)
    if spec.image:
        pairs.append((spec.image[2], spec.image[2]))
    return [pair for pair in pairs if any(module._modules.get(name) is not None for name in pair)]


def _why_not_norms(spec: Attention, module: nn.Module) -> str:
    for pair in _norm_pairs(spec, module):
        norms = [module._modules.get(name) for name in pair]
        if any(class_of(norm) != spec.norm for norm in norms):
            return f"{pair[0]} or {pair[1]} is not {'torch.nn.RMSNorm' if spec.norm == TORCH_RMSNORM else spec.norm}"
        one, other = norms
        assert one is not None and other is not None
        if one.eps != other.eps:
            return f"{pair[0]} and {pair[1]} differ in eps"
        if statistic(one) == RMS and any(norm._parameters.get("bias") is not None for norm in (one, other)):
            return f"{pair[0]} or {pair[1]} has a bias"
    return ""


def settings_of(module: nn.Module) -> Mapping[str, Any]:
    """The site's settings: diffusers' dispatch function and its registry of attention backends, or None for each.

    Both are looked up where the processor finds them, so that another copy of diffusers or a patched dispatch is used.
    """
    processor = type(cast(AttentionModule, module).processor)
    dispatch = getattr(sys.modules[processor.__module__], "dispatch_attention_fn", None)
    if dispatch is None:
        return {"dispatch": None, "backends": None}
    home = sys.modules[dispatch.__module__]
    patched = getattr(home, "dispatch_attention_fn", None) is not dispatch
    backends = None if patched else getattr(home, "_AttentionBackendRegistry", None)
    return {"dispatch": dispatch, "backends": backends}


class AttentionLayers:
    """The layers of an attention module in the forms that their state allows, or the reason why its calls run stock.

    reason: Why calls run stock; empty if they do not. Where it is set, other fields may be missing.
    all, query, context: The projections of the first stream: all three, query alone, and key and value alone.
    added, added_out: Projections and output layer of a joint attention's second stream, where the module has them.
    image: Key and value projections of an image.
    gate: The layer that gives each head's logit.
    out, dropout: The output layer, and a dropout after it that is active, hooked or of another class.
    weights, biases: Of the norms, two for each stream that has norms: query and key.
    eps: One for each such stream.
    layout: The rotation's layout.
    in_place: Fresh tensors may be overwritten.
    heads: The number of the query's heads.
    ops: The ops of a call, by (rotated, computed by this package's attention).
    """

    __slots__ = (
        *("added", "added_out", "all", "biases", "context", "dropout", "eps", "gate", "heads"),
        *("image", "in_place", "layout", "ops", "out", "query", "reason", "weights"),
    )

    def __init__(self, module: nn.Module, spec: Attention, input: Tensor) -> None:
        """input: A tensor of the dtype and device of the calls."""
        site = site_of(module)
        site.settings.update(settings_of(module))  # somebody may have exchanged diffusers' functions
        self.reason = _why_not_layers(spec, module, input)
        if self.reason:
            return
        self.in_place = may_overwrite()
        self.heads: int = getattr(module, spec.heads)
        self.ops: dict[tuple[bool, bool], tuple[str, ...]] = {}  # by what `_count` is told
        self._read_norms(spec, module)
        self.added = self.added_out = self.gate = self.image = self.out = self.dropout = None
        self.layout = spec.layout if spec.layout_of is None else spec.layout_of(module)
        if spec.mlp:
            self.all, self.out = (
                Linears((cast(nn.Linear, module._modules[name]),), input, site)
                for name in (*spec.projections, spec.output)
            )
            self.query = self.context = self.all
            return
        pack = site.rounding == "fp32"

        def linears(names: tuple[str, ...], pack: bool = pack) -> Linears:
            called = spec.called(module, names)
            parts = len(names) if called != names else 1
            layers = [cast(nn.Linear, module._modules[name]) for name in called]
            made = Linears(layers, input, site, pack, parts)
            even = len({out_features(module._modules[name]) for name in names}) == 1
            if parts > 1 and not (even and type(layers[0]) is nn.Linear and (made.plain or made.scaled)):
                self.reason = f"{called[0]}, which fuse_qkv_projections made, cannot be taken as one product"
            if parts > 1 and made.plain and in_fp8(cast(nn.Module, module._modules[names[0]])):
                site.remark(f"{called[0]} in its own precision: it was fused after optimize")
            return made

        q, k, _ = (module._modules[name] for name in spec.projections)
        self.all = linears(spec.projections, pack and in_features(q) == in_features(k))
        self.query = linears(spec.projections[:1])
        self.context = linears(spec.projections[1:])
        if spec.gate and module._modules.get(spec.gate) is not None:
            self.gate = Linears((cast(nn.Linear, module._modules[spec.gate]),), input, site)
        if spec.added and module._modules.get(spec.added_projections[0]) is not None:
            self.added = linears(spec.added_projections)
        if spec.added and module._modules.get(spec.added_output) is not None:
            self.added_out = Linears((cast(nn.Linear, module._modules[spec.added_output]),), input, site)
        if spec.image and module._modules.get(spec.image[0]) is not None:
            self.image = linears(spec.image[:2])
        out = submodule(module, spec.output)
        if out is not None:
            self.out = Linears((cast(nn.Linear, submodule(module, spec.output_layer(module))),), input, site)
            dropout = out._modules.get("1")
            if dropout is not None and not is_idle(dropout):
                self.dropout = dropout

    def _read_norms(self, spec: Attention, module: nn.Module) -> None:
        self.weights: list[Tensor | None] = []
        self.biases: list[Tensor | None] = []
        self.eps: list[float | None] = []
        for pair in _norm_pairs(spec, module):
            norms = children(module, *pair)
            self.weights += [norm._parameters.get("weight") for norm in norms]
            self.biases += [norm._parameters.get("bias") for norm in norms]
            self.eps.append(norms[0].eps)


def _why_not_layers(spec: Attention, module: nn.Module, input: Tensor) -> str:
    processor = cast(AttentionModule, module).processor
    if class_of(processor) not in (spec.processor, *spec.other_processors):
        return f"the processor is {class_of(processor)}"
    own = module.__dict__
    if "inner_dim" in own and own.get(spec.heads, 0) * own.get("head_dim", 0) not in (0, own["inner_dim"]):
        return f"its {spec.heads} and head_dim do not make its inner_dim"
    reason = _why_not_heads(spec, module) or patched(type(processor)) or spec.why_not(module)
    reason = reason or _why_not_norms(spec, module)
    # Under autocast, attention itself casts query and key to the dtype of the value.
    casts = spec.casts or autocast_dtype(input) is not None
    for pair in [] if reason else _norm_pairs(spec, module):
        for name in pair:
            norm = module._modules[name]
            assert norm is not None
            if hooked(norm):
                return f"{name} {hooked(norm)}"
            found = "" if reason else why_not_norm_weight(norm, input, casts, follows_shared())  # type: ignore[arg-type]
            reason = f"{name}: {found}" if found else reason
    if spec.mlp and not reason:
        activation = cast(nn.Module, module._modules[spec.mlp])
        reason = _why_not_mlp(spec, module) or (
            next((f"{spec.mlp} {reason}" for reason in map(hooked, activation.modules()) if reason), "")
        )
    return reason


def _why_not_heads(spec: Attention, module: nn.Module) -> str:
    """Why query, key and value cannot be cut into heads of one width that the query's heads share evenly."""
    sizes = [out_features(module._modules[name]) for name in spec.projections]
    heads = getattr(module, spec.heads, 0)
    if not isinstance(heads, int) or heads < 1:
        return f"its {spec.heads} is {heads}"
    if spec.mlp or None in sizes:
        return ""
    query, key, value = cast("list[int]", sizes)
    fits = key == value and query % heads == 0 and key % (query // heads) == 0 and query % key == 0
    if not fits:
        return f"its query, key and value of {query}, {key} and {value} columns make no {heads} heads"
    scale = getattr(module, spec.scale) if spec.scale else None
    return "" if scale in (None, (query // heads) ** -0.5) else f"its {spec.scale} is {scale}"
