"""Wrong Python types: every public function names the argument, and says what it expected, in one line.

The calls are made from the signatures, so that a new function is tested without being listed here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import Make, every_function
from torch import Tensor

NOT_OPS = {
    "LTXKernelsFp8Config",
    "kernel_mapping",
    "optimize",
    "restore",
    "split_batch",
}  # tests/test_integration.py has theirs

Call = tuple[str, object, Callable[[], Any]]  # the argument, what is given for it, and the call


def wrong_values(annotation: str, tensor: Tensor) -> list[object]:
    """Values that none of an annotation's types takes."""
    wrong: list[object] = [object(), {}, b"x", print]
    if "bool" not in annotation:  # the dispatcher takes any number, and None, for True or False
        wrong.append(1j)
    if "str" not in annotation:
        wrong += ["x", ["x"], ("x", None)]
    else:
        wrong += ["no such mode", ["fp32"], 3]
    if "Pair" in annotation:
        wrong += [(tensor,), (tensor, "x"), (tensor, tensor, tensor)]
    if "Tensor" in annotation or "Pair" in annotation:
        wrong += [3, 1.5, [1.0]]
    elif "float" not in annotation and "bool" not in annotation and "str" not in annotation:
        wrong += [1.5]
    if "None" not in annotation and "bool" not in annotation:
        wrong.append(None)
    return wrong


def too_large(annotation: str, tensor: Tensor) -> list[object]:
    """Integers beyond 64 bits, where an annotation takes numbers, alone and in sequences."""
    if not re.search(r"\b(float|int)\b", annotation):
        return []
    numbers = [10**400, -(10**400)]
    if "float" not in annotation:
        numbers += [2**63, -(2**63) - 1, 2**64]
    if "Sequence" in annotation:
        return [[1] * (length - 1) + [number] for number in numbers for length in (1, 2, 3)]
    return list(numbers)


def wrong_calls(
    package: Any, names: list[str], device: str, grad: bool, values: Callable[[str, Tensor], list[object]]
) -> Iterator[Call]:
    cases = every_function(Make(device, torch.float32))
    for name in names:
        case, function = cases[name], getattr(package, name)
        good = {key: value for key, value in case.kwargs.items() if key in inspect.signature(function).parameters}
        for value in good.values():
            if isinstance(value, Tensor) and value.is_floating_point() and not name.endswith("_quant"):
                value.requires_grad_(grad)
        for parameter in inspect.signature(function).parameters.values():
            for wrong in values(parameter.annotation, torch.ones(2)):
                arguments = {**good, parameter.name: wrong}
                yield f"{name}({parameter.name})", wrong, lambda f=function, a=arguments: f(**a)


def public_ops(package: Any) -> list[str]:
    return [name for name in package.__all__ if inspect.isfunction(getattr(package, name)) and name not in NOT_OPS]


def unnamed(
    package: Any, names: list[str], device: str, grad: bool, values: Callable[[str, Tensor], list[object]]
) -> tuple[int, list[str]]:
    """How many calls were made, and those of which no error named the argument."""
    count, found = 0, []
    for where, wrong, call in wrong_calls(package, names, device, grad, values):
        count += 1
        parameter = where.partition("(")[2].rstrip(")")
        what = f"{package.__name__}.{where} of {str(wrong)[:60]}"
        try:
            call()
        except Exception as error:
            text = str(error)
            named = re.search(rf"\b(key_)?{parameter}\b", text)  # key_cos: the second of a pair given as cos
            if not named or not re.fullmatch(r"[\w\[\]]+: expected [^\n]+, got [^\n]+", text):
                found.append(f"{what}: {type(error).__name__}: {text[:200]}")
        else:
            found.append(f"{what}: no error")
    return count, found


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("values", "least"), [(wrong_values, 1000), (too_large, 200)], ids=["types", "too large"])
def test_wrong_types_name_the_argument(
    ltx: Any, device: str, values: Callable[[str, Tensor], list[object]], least: int, grad: bool
) -> None:
    found = [unnamed(package, public_ops(package), device, grad, values) for package in (ltx, ltx.reference)]
    errors = [text for _, texts in found for text in texts]
    count = sum(calls for calls, _ in found)
    assert not errors, f"{len(errors)} of {count} calls\n" + "\n".join(errors[:60])
    assert count >= least


@pytest.mark.parametrize("grad", [False, True])
def test_wrong_types_that_an_op_is_given(ltx: Any, monkeypatch: pytest.MonkeyPatch, grad: bool) -> None:
    """As on Hopper, where nothing of scaled_linear's operands is looked at before its op is called."""
    quant = ltx.quant
    monkeypatch.setattr(quant, "has_own_product", lambda device: True)

    def multiply(*tensors: Tensor, **_: object) -> Tensor:
        values, scales, weight, weight_scales, bias, _, use_fast_accum, addend, _ = tensors
        return quant._scaled_linear(values, scales, weight, weight_scales, bias, addend, use_fast_accum)

    monkeypatch.setattr(quant, "multiply", multiply)
    count, errors = unnamed(ltx, ["scaled_linear"], "cpu", grad, wrong_values)
    assert not errors, "\n".join(errors)
    assert count >= 80
