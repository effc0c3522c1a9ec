"""The residual stream of a transformer block: a branch waits until the next op, which adds it and reads the sum.

This is the one place that chooses among the ops for residual, gate, norm and modulation, and the only one that knows
their quantising forms: where the linear layers that read a result hold fp8 weights, the op quantises it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Union, cast

import torch
from torch import Tensor, nn

from ...adaln import (
    adaln_layernorm,
    adaln_layernorm_pair,
    adaln_rmsnorm,
    adaln_rmsnorm_pair,
    gated_residual,
    gated_residual_adaln_layernorm,
    gated_residual_adaln_layernorm_pair,
    gated_residual_adaln_rmsnorm,
    gated_residual_adaln_rmsnorm_pair,
)
from ...norm import layernorm, norm_gated_residual_norm, norm_residual
from ...quant import (
    adaln_layernorm_pair_quant,
    adaln_layernorm_quant,
    adaln_rmsnorm_pair_quant,
    adaln_rmsnorm_quant,
    gated_residual_adaln_layernorm_pair_quant,
    gated_residual_adaln_layernorm_quant,
    gated_residual_adaln_rmsnorm_pair_quant,
    gated_residual_adaln_rmsnorm_quant,
    gated_residual_quant,
    layernorm_quant,
    norm_gated_residual_norm_quant,
    quantize_rows,
)
from ..engine.guards import NormModule, children
from ..engine.norm_forms import FP32_LAYERNORM as FP32_LAYERNORM
from ..engine.norm_forms import LAYER, RMS, Form, form_of
from ..engine.norm_forms import RMSNORM as RMSNORM
from ..engine.norm_forms import TORCH_LAYERNORM as TORCH_LAYERNORM
from ..engine.norm_forms import TORCH_RMSNORM as TORCH_RMSNORM
from ..engine.recording import as_one
from ..engine.sites import site_of
from ..linear.products import Input

Readers = Union[str, tuple[str, ...], None]  # names of a block's children


class Mod(NamedTuple):
    """One modulation input, a shift, scale or gate: a tensor and a row of a table, added up inside the ops.

    value: [B, H] per sample, [B, 1, H], or [B, S, H] per token; any strides. In a stream with an index: [B, rows, H].
    table: [H], or None.
    """

    value: Tensor
    table: Tensor | None = None


_NOTHING: tuple[Tensor | None, Tensor | None] = None, None


def modulation(temb: Tensor, count: int, table: Tensor | None = None) -> list[Mod]:
    """The `count` modulation inputs that lie side by side in the last dimension, [..., count * H], of one tensor.

    table: [count, H], one row for each.
    """
    return modulation_of(temb.unflatten(-1, (count, -1)).unbind(-2), table)


def modulation_of(values: Sequence[Tensor], table: Tensor | None = None) -> list[Mod]:
    """The modulation inputs that are tensors already, with the rows of a table [count, H]."""
    if table is None:
        return [Mod(value) for value in values]
    return list(map(Mod, values, table.unbind(0)))


def modulation_by(norm: nn.Module, temb: Tensor, count: int) -> list[Mod]:
    """The `count` modulation inputs that the linear layer in a norm such as AdaLayerNormZero makes of SiLU(temb)."""
    silu, linear = children(norm, "silu", "linear")
    return modulation(linear(silu(temb)), count)


def chosen(values: Tensor, index: Tensor) -> tuple[Tensor, Tensor | None]:
    """(values, index) for a `Stream`, where each token takes one of two rows of modulation.

    values: [B, 2, N].
    index: [B, S], 0 or 1, also as bool.

    On a GPU the row kernel reads an index of bfloat16 rows alone. The general kernel reads the others, and takes
    several times as long as the row kernel with a modulation for each token. One launch therefore writes such a
    modulation, [B, S, N], and the index is None.
    """
    if values.is_cuda and values.dtype != torch.bfloat16:
        return torch.where(index.unsqueeze(-1) == 1, values[:, 1:], values[:, :1]), None
    return values, index


def clipped(value: Tensor) -> Tensor:
    """The stream as the stock blocks return it: float16 without infinities."""
    return value.clip(-65504, 65504) if value.dtype == torch.float16 else value


def joint(first: Tensor, second: Tensor) -> Tensor:
    """Two streams [B, S, H] and [B, T, H] as one [B, S + T, H]: a view where they are neighbours in one tensor."""
    return as_one(_joint, first, second)


def _joint(first: Tensor, second: Tensor) -> Tensor:
    batch, rows, width = first.shape
    length = rows + second.shape[1]
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return torch.cat((first, second), 1)
    neighbours = (
        first.stride() == second.stride()
        and first.stride()[1:] == (width, 1)
        and (batch == 1 or first.stride(0) == length * width)
        and first.data_ptr() + rows * width * first.element_size() == second.data_ptr()
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    )
    if neighbours:
        return first.as_strided((batch, length, width), (length * width, width, 1))
    return torch.cat((first, second), 1)


class Stream:
    """The residual stream of a block, [B, S, H].

    `add` only remembers a branch. The next `norm`, `rows` or `value` adds it, in the launch that it needs anyway.
    ``into`` names the children of the block that read a result. Where all of them hold fp8 weights, the result is
    quantised rows, (values, scales), and otherwise a tensor. Attentions, feed-forwards and `Linears` support both.
    """

    __slots__ = ("_branch", "_branch_norm", "_first", "_gate", "_index", "_module", "_value", "rounding")

    def __init__(self, module: nn.Module, value: Tensor, index: Tensor | None = None) -> None:
        """Starts with the value [B, S, H] that a block is given.

        module: The block, a module that `optimize` replaced.
        index: [B, S] or [S], the row of every modulation that a token takes; the modulations are then [B, rows, H].
            None: the modulations are as `Mod` says.
        """
        self._module, self._index = module, index
        self.rounding: str = site_of(module).rounding
        self._first = self._value = value
        self._branch: Tensor | None = None
        self._branch_norm: nn.Module | None = None
        self._gate: Mod | None = None

    def add(self, branch: Tensor, gate: Mod | None = None, norm: nn.Module | None = None) -> None:
        """Adds ``norm(branch) * gate`` to the stream, later.

        branch: [B, S, H].
        gate: None multiplies by nothing.
        norm: An RMS norm module; None leaves the branch as it is.
        """
        if self._branch is not None:
            self.value()
        self._branch_norm = None
        if norm is not None:
            form = form_of(norm)
            assert form is not None  # or the guards would have run the stock block
            if form.rounding(self.rounding) == self.rounding:
                self._branch_norm = norm
            else:  # the op would round in other places than this class does
                branch = form.rms(norm, branch, self.rounding)
        self._branch, self._gate = branch, gate

    def own(self) -> Tensor | None:
        """The stream if it may be overwritten: no branch waits, and it is not the block's own input. Else None."""
        return self._value if self._branch is None and self._value is not self._first else None

    def value(self) -> Tensor:
        """The stream as a tensor, with the waiting branch added."""
        if self._branch is not None:
            branch, gate, self._branch = self._branch, self._gate, None
            if self._branch_norm is not None:
                norm, form = self._branch_norm, form_of(self._branch_norm)
                assert form is not None
                gate_value, gate_table = gate or _NOTHING
                self._value = norm_residual(
                    branch,
                    self._value,
                    norm._parameters.get("weight"),
                    form.eps_of(norm),
                    gate=gate_value,
                    gate_table=gate_table,
                    index=self._index,
                    weight_offset=form.offset,
                    rounding=self.rounding,
                )
            elif gate is None:
                self._value = self._value + branch
            else:
                tables = {"gate_table": gate.table, "index": self._index}
                self._value = gated_residual(branch, self._value, gate.value, **tables, rounding=self.rounding)
        return self._value

    def _quantises(self, into: Readers) -> bool:
        """Whether the readers of a result want it quantised."""
        if into is None:
            return False
        return site_of(self._module).entry.takes_rows(self._module, into, self._value)

    def rows(self, into: Readers = None) -> Input:
        """The stream for the layers that read it."""
        if not self._quantises(into):
            return self.value()
        gate = self._gate
        if self._branch is None or gate is None or self._branch_norm is not None:
            return quantize_rows(self.value())
        branch, self._branch = self._branch, None
        tables = {"gate_table": gate.table, "index": self._index}
        values, scales, self._value = gated_residual_quant(branch, self._value, gate.value, **tables)
        return values, scales

    def norm(self, norm: nn.Module, shift: Mod | None = None, scale: Mod | None = None, into: Readers = None) -> Input:
        """The stream normalised as a norm module does, times 1 + scale, plus shift.

        A norm of torch.nn.Identity gives the stream itself. A shift needs a scale beside it.
        """
        form = form_of(norm)
        if form is None:  # torch.nn.Identity, or the guards would have run the stock block
            return self.rows(into)
        quantises = self._quantises(into)
        if self._branch is not None and self._branch_norm is not None:
            before = form_of(self._branch_norm)
            if form == before and form.rounding(self.rounding) == self.rounding:
                return self._norm_of_normed_sum(form, self._branch_norm, norm, shift, scale, quantises)
            self.value()
        if form.statistic == RMS and scale is None and (self._branch is None or self._gate is None):
            return self._rms(form, norm, quantises)
        kind, module = form.statistic, cast(NormModule, norm)
        if self._branch is not None:
            return self._norm_of_sum(kind, module, shift, scale, quantises)
        x, rounding, parameters = self._value, self.rounding, module._parameters
        weight, bias, eps = parameters.get("weight"), parameters.get("bias"), module.eps
        if scale is None:
            affine = x, weight, bias, cast(float, eps)
            return layernorm_quant(*affine) if quantises else layernorm(*affine, rounding=rounding)
        shift_value, shift_table = shift or _NOTHING
        tables: dict[str, Any] = {"scale_table": scale.table, "shift_table": shift_table, "index": self._index}
        if kind == LAYER:
            operands = x, weight, scale.value, shift_value, bias, cast(float, eps)
            if quantises:
                return adaln_layernorm_quant(*operands, **tables)
            return adaln_layernorm(*operands, **tables, rounding=rounding)
        if quantises:
            return adaln_rmsnorm_quant(x, weight, scale.value, shift_value, eps, **tables)
        return adaln_rmsnorm(x, weight, scale.value, shift_value, eps, **tables, rounding=rounding)

    def _rms(self, form: Form, norm: nn.Module, quantises: bool) -> Input:
        """`norm` without modulation, of the stream and of a waiting branch without a gate."""
        if self._branch is None:
            if quantises:
                return form.rms_quant(norm, self._value)
            return form.rms(norm, self._value, self.rounding)
        branch, self._branch = self._branch, None
        result: Input
        if quantises:
            result, self._value = form.rms_of_sum_quant(norm, branch, self._value)
        else:
            result, self._value = form.rms_of_sum(norm, branch, self._value, self.rounding)
        return result

    def _norm_of_normed_sum(
        self, form: Form, before: nn.Module, norm: nn.Module, shift: Mod | None, scale: Mod | None, quantises: bool
    ) -> Input:
        """`norm` of the stream and a waiting branch that is normalised first, in one launch."""
        branch, self._branch = cast(Tensor, self._branch), None
        gate, gate_table = self._gate or _NOTHING
        scale_value, scale_table = scale or _NOTHING
        shift_value, shift_table = shift or _NOTHING
        operands = branch, self._value, gate, before._parameters.get("weight"), form.eps_of(before)
        more = norm._parameters.get("weight"), scale_value, shift_value, form.eps_of(norm)
        options: dict[str, Any] = {"weight_offset": form.offset, "gate_table": gate_table}
        options.update(scale_table=scale_table, shift_table=shift_table, index=self._index)
        if quantises:
            values, scales, self._value = norm_gated_residual_norm_quant(*operands, *more, **options)
            return values, scales
        result, self._value = norm_gated_residual_norm(*operands, *more, **options, rounding=self.rounding)
        return result

    def _norm_of_sum(
        self, kind: str, module: NormModule, shift: Mod | None, scale: Mod | None, quantises: bool
    ) -> Input:
        """`norm` of the stream and the waiting branch, in one launch."""
        branch, self._branch = cast(Tensor, self._branch), None
        weight, bias, eps = module._parameters.get("weight"), module._parameters.get("bias"), module.eps
        gate, gate_table = self._gate or _NOTHING
        scale_value, scale_table = scale or _NOTHING
        shift_value, shift_table = shift or _NOTHING
        tables: dict[str, Any] = {"gate_table": gate_table, "scale_table": scale_table, "shift_table": shift_table}
        tables["index"] = self._index
        operands = branch, self._value, gate, weight, scale_value, shift_value
        if kind == LAYER:
            affine = bias, cast(float, eps)
            if quantises:
                values, scales, self._value = gated_residual_adaln_layernorm_quant(*operands, *affine, **tables)
                return values, scales
            result, self._value = gated_residual_adaln_layernorm(*operands, *affine, **tables, rounding=self.rounding)
            return result
        if quantises:
            values, scales, self._value = gated_residual_adaln_rmsnorm_quant(*operands, eps, **tables)
            return values, scales
        result, self._value = gated_residual_adaln_rmsnorm(*operands, eps, **tables, rounding=self.rounding)
        return result

    def norm_pair(
        self,
        norm: nn.Module,
        first: tuple[Mod, Mod],
        second: tuple[Mod, Mod],
        into: Readers = None,
        into2: Readers = None,
    ) -> tuple[Input, Input]:
        """The stream normalised once and modulated twice, by (shift, scale) each, in one launch.

        It is two launches where the readers of one result alone take quantised rows.
        """
        form, module = form_of(norm), cast(NormModule, norm)
        assert form is not None  # or the guards would have run the stock block
        quantises = self._quantises(into)
        if quantises != self._quantises(into2):
            self.value()
            return self.norm(norm, *first, into), self.norm(norm, *second, into2)
        layer, weight = form.statistic == LAYER, module._parameters.get("weight")
        (shift, scale), (shift2, scale2) = first, second
        mods = scale.value, shift.value, scale2.value, shift2.value
        after: tuple[Any, ...] = (module._parameters.get("bias"), module.eps) if layer else (module.eps,)
        options: dict[str, Any] = {"scale_table": scale.table, "shift_table": shift.table, "index": self._index}
        options.update(scale2_table=scale2.table, shift2_table=shift2.table)
        if not quantises:
            options["rounding"] = self.rounding
        op: Any
        if self._branch is None:
            op = _PAIRS[layer, quantises]
            results = op(self._value, weight, *mods, *after, **options)
        else:
            branch, self._branch = self._branch, None
            gate, gate_table = self._gate or _NOTHING
            op = _PAIRS_OF_SUM[layer, quantises]
            *results, self._value = op(
                branch, self._value, gate, weight, *mods, *after, gate_table=gate_table, **options
            )
        if quantises:
            values, scales, values2, scales2 = results
            return (values, scales), (values2, scales2)
        one, two = results
        return one, two


# By whether the norm is a LayerNorm, and whether the op quantises.
_PAIRS = {
    (False, False): adaln_rmsnorm_pair,
    (False, True): adaln_rmsnorm_pair_quant,
    (True, False): adaln_layernorm_pair,
    (True, True): adaln_layernorm_pair_quant,
}
_PAIRS_OF_SUM = {
    (False, False): gated_residual_adaln_rmsnorm_pair,
    (False, True): gated_residual_adaln_rmsnorm_pair_quant,
    (True, False): gated_residual_adaln_layernorm_pair,
    (True, True): gated_residual_adaln_layernorm_pair_quant,
}
