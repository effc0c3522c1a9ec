"""A checkpoint's own names of tensors, as its authors wrote it, in a model of diffusers.

diffusers has a function for each class of model that renames the tensors of an original checkpoint. It splits and joins
some, such as query, key and value of one layer, and does not know scales of fp8 weights. Here it converts stand-ins
without data. Each knows the rows of the file's tensors that it stands for, so that the scales go where their rows go,
and no data is copied.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor, nn

from ..._torch_private import without_subclasses
from ..engine.guards import class_of


class Piece(NamedTuple):
    """Rows of a tensor: ``tensor[start:stop]``."""

    source: Any  # what the tensor is called, or the tensor itself
    start: int
    stop: int


def pieces_of(tensor: Tensor) -> tuple[Piece, ...]:
    """The rows that a stand-in is made of, in order."""
    assert isinstance(tensor, StandIn)
    return tensor.pieces


class StandIn(Tensor):
    """A tensor on "meta" that can be split and joined along its first dimension, and nothing else."""

    pieces: tuple[Piece, ...]

    @staticmethod
    def of(source: Any, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> StandIn:
        return _stand_in(torch.empty(tuple(shape), dtype=dtype, device="meta"), (Piece(source, 0, _rows(shape)),))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with without_subclasses():
            result = func(*args, **kwargs)
            name = getattr(func, "__name__", str(func))
            if name in _SAME:
                return args[0]
            if name in _JOINS:
                parts = list(args[0])
                if all(isinstance(part, cls) for part in parts) and result.shape[1:] == parts[0].shape[1:]:
                    return _stand_in(result, tuple(piece for part in parts for piece in part.pieces))
            elif name in _SPLITS:
                if all(part.shape[1:] == args[0].shape[1:] for part in result):
                    ends = [sum(len(part) for part in result[: i + 1]) for i in range(len(result))]
                    return tuple(
                        _stand_in(part, _cut(args[0].pieces, end - len(part), end)) for part, end in zip(result, ends)
                    )
            elif name == "__getitem__" and isinstance(args[1], slice) and args[1].step in (None, 1):
                start, stop, _ = args[1].indices(len(args[0]))
                return _stand_in(result, _cut(args[0].pieces, start, stop))
            elif not isinstance(result, Tensor):
                return result
        raise NotImplementedError(f"{name} of the tensor {args[0].pieces[0].source if args else ''}")


_SAME = ("contiguous", "detach", "clone", "to")
_JOINS = ("cat", "concat", "concatenate")
_SPLITS = ("chunk", "split", "split_with_sizes", "tensor_split")


def _rows(shape: Sequence[int]) -> int:
    return shape[0] if len(shape) else 1


def _stand_in(tensor: Tensor, pieces: tuple[Piece, ...]) -> StandIn:
    made = tensor.as_subclass(StandIn)
    made.pieces = pieces
    return made


def _cut(pieces: Sequence[Piece], start: int, stop: int) -> tuple[Piece, ...]:
    """The rows from `start` to `stop` of some pieces, one after the other."""
    found: list[Piece] = []
    first = 0
    for source, low, high in pieces:
        a, b = max(start - first, 0), min(stop - first, high - low)
        if a < b:
            found.append(Piece(source, low + a, low + b))
        first += high - low
    return tuple(found)


# ---- diffusers' converters


def is_of_diffusers(root: nn.Module) -> bool:
    return any(cls.__module__.startswith("diffusers.") for cls in type(root).__mro__)


def _converter(root: nn.Module) -> Callable[..., dict[str, Any]] | None:
    if not is_of_diffusers(root):
        return None
    known: Any = getattr(
        importlib.import_module("diffusers.loaders.single_file_model"), "SINGLE_FILE_LOADABLE_CLASSES", {}
    )
    names = (cls.__name__ for cls in type(root).__mro__ if cls.__module__.startswith("diffusers."))
    found: dict[str, Any] = next((known[name] for name in names if name in known), {})
    converter: Callable[..., dict[str, Any]] | None = found.get("checkpoint_mapping_fn")
    return converter


def converted(root: nn.Module, tensors: Mapping[str, StandIn]) -> dict[str, StandIn] | str:
    """What diffusers makes of a checkpoint in original names, or why it cannot."""
    converter = _converter(root)
    if converter is None:
        return f"diffusers has no converter of original checkpoints for {class_of(root)}"
    try:
        return dict(converter(config=dict(getattr(root, "config", {})), checkpoint=dict(tensors)))
    except Exception as error:  # of other code, for a checkpoint that need not be in original names
        return f"diffusers' converter for {type(root).__name__} failed with {error!r}"
