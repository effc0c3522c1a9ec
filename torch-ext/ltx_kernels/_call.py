"""How the Python functions call their ops: outputs, gradients and wrong types, for every op in one way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd.graph import increment_version

from ._autograd import function_of
from ._checks import NO_TANGENTS, check_type, no_given_outputs, no_gradient, requires_grad
from ._fakes import Mode, in_torch
from ._ops import ops
from ._torch_private import forward_ad


def op(name: str, *, gradient: bool = True, **elements: Sequence[str]) -> Callable[..., Any]:
    """The way to call an op: ``call(outs, *arguments)``, with the arguments of its schema in their order.

    ``outs`` is what the caller gave to write into: None, a tensor, or a tuple for an op with several results. The
    call returns it, or new results. Where a gradient is needed it applies the op's Function (`_autograd`), or runs the
    op in plain torch; an op without a gradient then raises. Types are checked after an op has failed, so that a
    correct call does not pay for these checks.

    ``elements`` has the public names of the elements of a list argument.
    """
    functional: Any = getattr(ops, name).default
    into: Any = getattr(ops, name + "_out").default if hasattr(ops, name + "_out") else None
    schema = functional._schema
    results = len(schema.returns)
    tensors = sum("Tensor" in str(argument.type) for argument in schema.arguments)  # they lead in every schema
    plain = in_torch(name)
    find_function = function_of(name, [argument.name for argument in schema.arguments[:tensors]])
    # torch.compile traces the checks of types, and cannot trace what the schema has as types.
    kinds = [(argument.name, _kind(str(argument.type))) for argument in schema.arguments]
    out_names = [] if into is None else [argument.name for argument in into._schema.arguments[:results]]

    def call(outs: Any, *arguments: Any) -> Any:
        if forward_ad._current_level >= 0 and not is_grad_enabled():
            raise RuntimeError(NO_TANGENTS)
        try:
            if outs is None:
                if is_grad_enabled() and requires_grad(*arguments[:tensors]):
                    return followed(arguments)
                return functional(*arguments)
            given = (outs, *arguments) if results == 1 else (*outs, *arguments)
            if is_grad_enabled() and requires_grad(*given[: results + tensors]):
                no_given_outputs(outs)
            into(*given)
            count_writes((outs,) if results == 1 else outs)
            return outs
        except Exception:
            check_types(arguments)
            if outs is not None:
                check_outs(outs)
            raise

    def followed(arguments: Sequence[Any]) -> Any:
        if not gradient:
            no_gradient(*arguments[:tensors])
        function = find_function(arguments)
        if function is not None:
            return function.apply(*arguments)
        if not torch.compiler.is_compiling():
            check_types(arguments)  # plain torch takes some wrong types for others
        return plain(Mode(compute=True), *arguments)

    def check_types(arguments: Sequence[Any]) -> None:
        for (argument, kind), value in zip(kinds, arguments):
            if argument in elements:
                for part, element in zip(elements[argument], value):
                    check_type(part, kind[len("Sequence[") : -1], element)
            else:
                check_type(argument, kind, value)

    def check_outs(outs: Any) -> None:
        if out_names[0] != "out":
            check_type("out", "Pair", outs)
        else:
            for name, out in zip(out_names, (outs,) if results == 1 else outs):
                check_type(name, "Tensor", out)

    return call


def _kind(text: str) -> str:
    """The type of a schema's argument as `check_type` names it; `text` is how torch prints it."""
    kind = text.replace("List", "Sequence")
    return kind[len("Optional[") : -1] + " | None" if kind.startswith("Optional[") else kind


def count_writes(outs: Sequence[Tensor]) -> None:
    """Tells autograd that an op has written to tensors: what it saved of them is not valid any more."""
    if not torch.compiler.is_compiling():
        increment_version([out for out in outs if not out.is_inference()])


def given_or_new(input: Tensor, *outs: Tensor | None) -> tuple[Tensor, ...]:
    """The outputs of a call that gave some of them: what was not given is new."""
    check_type("input", "Tensor", input)
    return tuple(torch.empty_like(input, memory_format=torch.contiguous_format) if out is None else out for out in outs)
