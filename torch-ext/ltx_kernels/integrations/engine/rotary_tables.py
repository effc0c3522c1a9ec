"""Rotary tables: half as wide as the models make them, made once, kept as long as what they were made of.

A stock table holds each angle at both places of its pair. The ops take one entry per pair, so the second of each two
equal columns is left out once and not read in every block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._ops import add_op_namespace_prefix
from .kept import kept
from .sites import Selection, Site, site_of

Tables = tuple[Tensor, Tensor]  # cos, sin


def compact(table: Tensor) -> Tensor:
    """A table of interleaved pairs, [..., 2 n], without the second of each two equal columns: [..., n], contiguous."""
    return _compact_op(table) if torch.compiler.is_compiling() else table[..., ::2].contiguous()


# Opaque to torch.compile, which would compute the table anew for every second block that reads it: 0.2 ms of a step of
# 49 frames on an H200 (benchmarks/results/h200-ltx.json at 73b16a4).
@torch.library.custom_op(add_op_namespace_prefix("compact_table"), mutates_args=(), schema="(Tensor table) -> Tensor")
def _compact_op(table: Tensor) -> Tensor:
    return table[..., ::2].contiguous()


@_compact_op.register_fake
def _(table: Tensor) -> Tensor:
    return table.new_empty(*table.shape[:-1], table.shape[-1] // 2)


def full_width(table: Tensor, width: int) -> Tensor:
    """A table in the stock layout, each angle at both places of its pair, from either layout."""
    return table if table.shape[-1] == width else table.repeat_interleave(2, -1)


def halves(attention: Any, rope: Tables) -> Tables:
    """Both tables of interleaved pairs, compact; blocks of a forward that get the same tensors share one copy.

    A pair keeps the cosine of its first place and the sine of its second, as in Wan's processors.
    """
    cos, sin = rope

    def make() -> Tables:
        return cos[..., ::2].contiguous(), sin[..., 1::2].contiguous()

    if torch.compiler.is_compiling():  # tensors of a graph have no identity to torch 2.11
        return make()
    return kept(site_of(attention), "halves", rope, make)


def first_halves(attention: Any, rope: Tables) -> Tables:
    """Both tables of the layout "half", whose two halves of columns are equal, without the second half."""
    width = rope[0].shape[-1] // 2

    def make() -> Tables:
        return rope[0][..., :width].contiguous(), rope[1][..., :width].contiguous()

    return kept(site_of(attention), "first halves", rope, make)


def of_complex(attention: Any, rope: Tensor) -> Tables:
    """Both tables, [B, S, D / 2] in float32, of complex numbers cos + i sin."""

    def make() -> Tables:
        return rope.real.float().contiguous(), rope.imag.float().contiguous()

    return kept(site_of(attention), "complex", (rope,), make)


def of_matrices(attention: Any, rope: Tensor) -> Tables:
    """Both tables, [B, S, D / 2], of matrices ((cos, -sin), (sin, cos)), [B, S, 1, D / 2, 2, 2]."""

    def make() -> Tables:
        cos, sin = rope[:, :, 0, :, :, 0].unbind(-1)
        return cos.contiguous(), sin.contiguous()

    return kept(site_of(attention), "of matrices", (rope,), make)


def with_identity_rows(site: Site, rope: Tables, rows: int, first: bool) -> Tables:
    """Both tables [..., S, W] with rows of a rotation by nothing before the others (``first``) or after them."""

    def make() -> Tables:
        cos, sin = rope
        shape = *cos.shape[:-2], rows, cos.shape[-1]
        pairs = zip((cos.new_ones(shape), sin.new_zeros(shape)), rope)
        cos, sin = (torch.cat(pair if first else pair[::-1], -2) for pair in pairs)
        return cos, sin

    if torch.compiler.is_compiling():  # tensors of a graph have no identity to torch 2.11
        return make()
    return kept(site, ("identity rows", rows, first), rope, make)


def keep_table_readers_together(selection: Selection) -> None:
    """Leaves a module that makes compact tables as it is, unless all that read them support that layout.

    The readers are the modules of the same model whose names end in the entry's ``table_readers``.
    """
    for name, (_, entry) in list(selection.modules.items()):
        if not entry.table_readers:
            continue
        model = name[: name.rfind(".") + 1]
        readers = [
            other for other in selection.left_alone if other.startswith(model) and other.endswith(entry.table_readers)
        ]
        if readers:
            del selection.modules[name]
            selection.left_alone[name] = f"{readers[0]}, which reads its table, is left alone"
        elif not any(other.startswith(model) and other.endswith(entry.table_readers) for other in selection.modules):
            del selection.modules[name]
            selection.left_alone[name] = "what reads its table is not in the part that was given"
