"""What the package has, read from its sources, so that tests need no lists of their own."""

from __future__ import annotations

import ast
import re
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .build import ROOT
from .cases import Make, every_op
from .channels_last import small_calls
from .group_norm import small_images

SOURCES = ROOT / "torch-ext"


def _module(path: str) -> ast.Module:
    return ast.parse((SOURCES / "ltx_kernels" / path).read_text())


def _public_names() -> list[str]:
    for statement in _module("__init__.py").body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return list(ast.literal_eval(statement.value))
    raise AssertionError("__init__.py has no __all__")


def _public_functions() -> dict[str, list[str]]:
    names, found = _public_names(), {}
    for path in sorted((SOURCES / "ltx_kernels").glob("*.py")):
        for item in _module(path.name).body if path.name != "reference.py" else ():
            if isinstance(item, ast.FunctionDef) and item.name in names:
                found[item.name] = [a.arg for a in (*item.args.posonlyargs, *item.args.args, *item.args.kwonlyargs)]
    return found


# The public functions that compute something, with the names of their parameters.
FUNCTIONS = _public_functions()
# Those that raise where a gradient is needed.
WITHOUT_GRADIENT = {name for name in FUNCTIONS if name.endswith("_quant")} | {"quantize_rows", "scaled_linear"}

# The names of the dispatcher's ops.
SCHEMAS = re.findall(r'ops\.def\(\s*"(\w+)\(', (SOURCES / "torch_binding.cpp").read_text())
WITH_OUT = [name for name in SCHEMAS if f"{name}_out" in SCHEMAS]
# The ops that the public functions call on every device. test_plain_attention.py, test_attention_int8.py and
# test_quant.py check the others.
NOT_EVERYWHERE = ("attention", "attention_lse", "attention_int8", "scaled_linear")
CALLED_EVERYWHERE = [name for name in WITH_OUT if name not in NOT_EVERYWHERE]


class _Recorder(TorchDispatchMode):
    def __init__(self, namespace: str) -> None:
        super().__init__()
        self.namespace = namespace
        self.calls: dict[str, list[tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == self.namespace:
            self.calls.setdefault(func._schema.name.partition("::")[2], []).append(args)
        return func(*args, **(kwargs or {}))


def op_samples(ltx: Any, device: str, dtype: torch.dtype) -> dict[str, list[tuple[Any, ...]]]:
    """The arguments that the ops get from small calls of the public functions, by the op's name."""
    with torch.no_grad(), _Recorder(ltx.__name__) as recorder:
        for case in every_op(Make(device, dtype)).values():
            case.run(ltx)
            case.in_layout("rows apart").run(ltx)
            if case.takes_rounding and not case.op.startswith("quantize") and not case.op.endswith("_quant"):
                case.replace(rounding="eager").run(ltx)
        for call in (*small_calls(dtype), *small_images(dtype)):
            call.run(ltx, device)
    return recorder.calls
