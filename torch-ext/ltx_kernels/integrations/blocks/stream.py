"""The residual stream of a transformer block: a branch waits until the next op, which adds it and reads the sum.

This is the one place that decides what a launch computes: residual, gate, norm and modulation together, and quantised
rows where the linear layers that read the result hold fp8 weights.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, Union

import torch
from torch import Tensor, nn

from ..._checks import RMS
from ..._fused_norm import fused_norm, fused_norm_pair
from ...quant import quantize_rows
from ..engine.autocast import autocast_dtype
from ..engine.guards import children
from ..engine.norm_forms import FP32_LAYERNORM as FP32_LAYERNORM
from ..engine.norm_forms import RMSNORM as RMSNORM
from ..engine.norm_forms import TORCH_LAYERNORM as TORCH_LAYERNORM
from ..engine.norm_forms import TORCH_RMSNORM as TORCH_RMSNORM
from ..engine.norm_forms import form_of
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
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return torch.cat((first, second), 1)
    return as_one(_joint, first, second)


def _joint(first: Tensor, second: Tensor) -> Tensor:
    batch, rows, width = first.shape
    length = rows + second.shape[1]
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


def _with_offset(offset: float, weight: Tensor) -> Tensor:
    """A norm's weight, in float32, plus an offset. It is not kept, because writes through `.data` cannot be seen."""
    return weight.float() + offset


class Stream:
    """The residual stream of a block, [B, S, H].

    `add` only remembers a branch. The next `norm`, `rows` or `value` adds it, in the launch that it needs anyway.
    ``into`` names the children of the block that read a result. Where all of them hold fp8 weights, the result is
    quantised rows, (values, scales), and otherwise a tensor. Attentions, feed-forwards and `Linears` support both.
    """

    __slots__ = ("_branch", "_branch_norm", "_cast_to", "_first", "_gate", "_index", "_module", "_value", "rounding")

    def __init__(self, module: nn.Module, value: Tensor, index: Tensor | None = None, promotes: bool = False) -> None:
        """Starts with the value [B, S, H] that a block is given.

        module: The block, a module that `optimize` replaced.
        index: [B, S] or [S], the row of every modulation that a token takes; the modulations are then [B, rows, H].
            None: the modulations are as `Mod` says.
        promotes: Under autocast a sum has the dtype that torch promotes its parts to, and linear layers alone read what
            `norm` and `rows` return. It is returned in autocast's dtype, to which each of these layers would cast it.
        """
        self._module, self._index = module, index
        self.rounding: str = site_of(module).rounding
        self._cast_to = autocast_dtype(value) if promotes else None
        # After a patch embedding's transpose the columns lie apart, and each op that reads the rows would be slow.
        self._first = self._value = value if value.stride(-1) == 1 else value.contiguous()
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
        self._branch, self._gate = branch if self._cast_to is None else self._promoted(branch, gate), gate

    def _promoted(self, branch: Tensor, gate: Mod | None) -> Tensor:
        """The branch in the dtype of its sum with the stream, which is cast to it too."""
        parts = [self._value, branch, *(part for part in gate or () if part is not None)]
        if len({part.dtype for part in parts}) == 1:
            return branch
        self._value = self._value.float()  # what torch promotes any two of its dtypes to
        return branch.float()

    def _read(self, rows: Input) -> Input:
        """A result as linear layers read it."""
        return rows if self._cast_to is None or isinstance(rows, tuple) else rows.to(self._cast_to)

    def own(self) -> Tensor | None:
        """The stream if it may be overwritten: no branch waits, and it is not the block's own input. Else None."""
        return self._value if self._branch is None and self._value is not self._first else None

    def value(self) -> Tensor:
        """The stream as a tensor, with the waiting branch added."""
        if self._branch is not None:
            branch, gate, norm, self._branch = self._branch, self._gate, self._branch_norm, None
            if norm is not None:
                form = form_of(norm)
                assert form is not None
                _, self._value = fused_norm(
                    branch,
                    weight_offset=form.offset,
                    residual=self._value,
                    gate=gate,
                    branch_norm=(norm._parameters.get("weight"), form.eps_of(norm)),
                    index=self._index,
                    rounding=self.rounding,
                )
            elif gate is None:
                self._value = self._value + branch
            else:
                _, self._value = fused_norm(
                    branch, residual=self._value, gate=gate, index=self._index, rounding=self.rounding
                )
        return self._value

    def _quantises(self, into: Readers) -> bool:
        """Whether the readers of a result want it quantised."""
        if into is None:
            return False
        return site_of(self._module).entry.takes_rows(self._module, into, self._value)

    def rows(self, into: Readers = None) -> Input:
        """The stream for the layers that read it."""
        if not self._quantises(into):
            return self._read(self.value())
        gate = self._gate
        if self._branch is None or gate is None or self._branch_norm is not None:
            return quantize_rows(self.value())
        branch, self._branch = self._branch, None
        rows, self._value = fused_norm(branch, residual=self._value, gate=gate, index=self._index, quantise=True)
        return rows

    def norm(self, norm: nn.Module, shift: Mod | None = None, scale: Mod | None = None, into: Readers = None) -> Input:
        """The stream normalised as a norm module does, times 1 + scale, plus shift.

        A norm of torch.nn.Identity gives the stream itself. A shift needs a scale beside it.
        """
        form = form_of(norm)
        if form is None:  # torch.nn.Identity, or the guards would have run the stock block
            return self.rows(into)
        quantise = self._quantises(into)
        rounding = self.rounding
        branch_norm = None
        if self._branch is not None and self._branch_norm is not None:
            if form == form_of(self._branch_norm) and form.rounding(rounding) == rounding:
                branch_norm = self._branch_norm._parameters.get("weight"), form.eps_of(self._branch_norm)
            else:
                self.value()
        plain = scale is None and branch_norm is None and (self._branch is None or self._gate is None)
        if plain and form.statistic == RMS and not quantise:
            rounding = form.rounding(rounding)
            if rounding != self.rounding:
                self.value()  # the sum rounds as the stock addition does, and the norm once
        input, residual = self._value, None
        if self._branch is not None:
            input, residual, self._branch = self._branch, self._value, None
        parameters = norm._parameters
        weight, offset = parameters.get("weight"), form.offset
        if offset and weight is not None and scale is not None and residual is None:  # the op of these adds no offset
            weight, offset = as_one(functools.partial(_with_offset, offset), weight), 0.0
        rows, self._value = fused_norm(
            input,
            form.statistic,
            weight,
            parameters.get("bias"),
            form.eps_of(norm),
            offset,
            scale,
            shift,
            residual,
            self._gate,
            branch_norm,
            self._index,
            rounding,
            quantise,
        )
        return self._read(rows)

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
        form = form_of(norm)
        assert form is not None  # or the guards would have run the stock block
        quantise = self._quantises(into)
        if quantise != self._quantises(into2):
            self.value()
            return self.norm(norm, *first, into), self.norm(norm, *second, into2)
        input, residual = self._value, None
        if self._branch is not None:
            input, residual, self._branch = self._branch, self._value, None
        parameters = norm._parameters
        one, two, self._value = fused_norm_pair(
            input,
            form.statistic,
            parameters.get("weight"),
            parameters.get("bias"),
            form.eps_of(norm),
            first,
            second,
            residual=residual,
            gate=self._gate,
            index=self._index,
            rounding=self.rounding,
            quantise=quantise,
        )
        return one, two
