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

NOT_OPS = {"kernel_mapping", "optimize", "restore", "split_batch"}  # tests/test_integration.py has theirs

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


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("values", "least"), [(wrong_values, 1000), (too_large, 200)], ids=["types", "too large"])
def test_wrong_types_name_the_argument(
    ltx: Any, device: str, values: Callable[[str, Tensor], list[object]], least: int, grad: bool
) -> None:
    count, unnamed = 0, []
    for package in (ltx, ltx.reference):
        for where, wrong, call in wrong_calls(package, public_ops(package), device, grad, values):
            count += 1
            parameter = where.partition("(")[2].rstrip(")")
            try:
                call()
            except Exception as error:
                text = str(error)
                named = re.search(rf"\b(key_)?{parameter}\b", text)  # key_cos: the second of a pair given as cos
                if not named or not re.fullmatch(r"[\w\[\]]+: expected [^\n]+, got [^\n]+", text):
                    what = f"{package.__name__}.{where} of {str(wrong)[:60]}"
                    unnamed.append(f"{what}: {type(error).__name__}: {text[:200]}")
            else:
                unnamed.append(f"{package.__name__}.{where} of {str(wrong)[:60]}: no error")
    assert not unnamed, f"{len(unnamed)} of {count} calls\n" + "\n".join(unnamed[:60])
    assert count >= least
