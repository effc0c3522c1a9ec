"""How the Python functions call their ops: outputs, gradients and wrong types, for every op in one way."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, Callable

import torch
from torch import Tensor, is_grad_enabled

from ._checks import no_gradient, requires_grad, wrong_type
from ._fakes import in_torch
from ._ops import ops

# What a type of the schemas takes, and its name in errors.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "Tensor": ((Tensor,), "a tensor"),
    "float": ((numbers.Real, torch.SymInt, torch.SymFloat, Tensor), "a number"),
    "int": ((numbers.Integral, torch.SymInt, Tensor), "an integer"),
    "bool": ((numbers.Integral,), "True or False"),
    "List[float]": ((numbers.Real, torch.SymInt, torch.SymFloat), "numbers"),
    "List[int]": ((numbers.Integral, torch.SymInt), "integers"),
}


def op(name: str, *, gradient: bool = True, **elements: Sequence[str]) -> Callable[..., Any]:
    """The way to call an op: ``call(outs, *arguments)``, the arguments being those of its schema, in their order.

    ``outs`` is what the caller gave to write into: None, a tensor, or a pair of tensors for an op with two results. The
    call returns it, or new results. Where a gradient is needed it runs the op in plain torch; an op without a gradient
    then raises. A wrong type is looked for when something has failed, so that a good call pays nothing for it.

    ``elements`` has the public names of the elements of a list argument.
    """
    functional: Any = getattr(ops, name).default
    into: Any = getattr(ops, name + "_out").default if hasattr(ops, name + "_out") else None
    schema = functional._schema
    results = len(schema.returns)
    tensors = sum("Tensor" in str(argument.type) for argument in schema.arguments)  # they lead in every schema
    plain = in_torch(name)

    def call(outs: Any, *arguments: Any) -> Any:
        try:
            if outs is None:
                if is_grad_enabled() and requires_grad(*arguments[:tensors]):
                    return followed(arguments)
                return functional(*arguments)
            given = (outs, *arguments) if results == 1 else (*outs, *arguments)
            if is_grad_enabled() and requires_grad(*given[: results + tensors]):
                raise RuntimeError(
                    "out: expected no gradient to be needed, got an input that requires grad; "
                    "call without out= or under torch.no_grad()"
                )
            into(*given)
            return outs
        except Exception:
            check_types(arguments)
            if outs is not None:
                check_outs(outs)
            raise

    def followed(arguments: Sequence[Any]) -> Any:
        if not gradient:
            no_gradient(*arguments[:tensors])
        if not torch.compiler.is_compiling():
            check_types(arguments)  # plain torch takes some wrong types for others
        return plain({}, True, *arguments)

    def check_types(arguments: Sequence[Any]) -> None:
        for argument, value in zip(schema.arguments, arguments):
            kind = str(argument.type)
            if kind.startswith("Optional["):
                if value is None:
                    continue
                kind = kind[len("Optional[") : -1]
            types, expected = _TYPES[kind]
            if not kind.startswith("List["):
                if not isinstance(value, types):
                    wrong_type(argument.name, expected, value)
                continue
            for i, element in enumerate(value):
                if not isinstance(element, types):
                    part, one = argument.name, expected
                    if part in elements:
                        part, one = elements[part][i], _TYPES[kind[len("List[") : -1]][1]
                    wrong_type(part, one, element)

    def check_outs(outs: Any) -> None:
        if results == 1:
            if not isinstance(outs, Tensor):
                wrong_type("out", "a tensor", outs)
        elif not isinstance(outs, (tuple, list)) or len(outs) != 2:
            wrong_type("out", "a pair of tensors", outs)
        else:
            names = [argument.name for argument in into._schema.arguments[:2]]
            for i, (name, out) in enumerate(zip(names, outs)):
                if not isinstance(out, Tensor):
                    wrong_type(f"out[{i}]" if names[0] != "out" else name, "a tensor", out)

    return call


def both(input: Tensor, out: Tensor | None, residual_out: Tensor | None) -> tuple[Tensor, Tensor]:
    """The two outputs of a call that gave one of them or both: what was not given is new."""
    if not isinstance(input, Tensor):
        wrong_type("input", "a tensor", input)
    if out is None:
        out = torch.empty_like(input, memory_format=torch.contiguous_format)
    if residual_out is None:
        residual_out = torch.empty_like(input, memory_format=torch.contiguous_format)
    return out, residual_out
