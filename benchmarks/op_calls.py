"""Records the calls of ops that optimized models make at their released shapes: benchmarks/op_calls.json.

    python tools/build.py
    python benchmarks/op_calls.py [--models flux ltx2 llama-8b]     # the file keeps what it has of other models

Nothing is computed, so that any machine does it in minutes: the models have one or two blocks of their released width,
and large tensors are allocated and never written (`Shapes`). Calls count as one where the same kernel serves them alike
(`key_of`): the same op, modes, dtypes and widths, the same form of every argument, and up to FEW rows or more. Of those
the one with the most rows is recorded. benchmarks/op_cases.py makes a case of each that its table of cases lacks.

A model with other guards on a GPU may make other calls there: attention by this package's own kernel is one, which
benchmarks/attention.py times. Ops between convolutions are in benchmarks/vae.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import mmap
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from op_cases import CALLS, OPS, Case, Make
from result_files import REPOSITORY, load_package, write
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

sys.path.insert(0, str(REPOSITORY / "examples"))

FEW = 1024  # rows; small launches differ from large ones
LARGE = 100_000  # elements, from which on a tensor is not written
PRECISIONS = ("native", "fp8")
PROMPT = 512  # tokens of a language model's prompt, after which one token is decoded
# What is computed of large tensors too, because Python reads the results, or a shape follows from them.
READ = {"aminmax", "all", "any", "equal", "max", "min", "sum", "_local_scalar_dense", "is_nonzero", "nonzero", "index"}
READ |= {"eq", "ne", "lt", "le", "gt", "ge", "isfinite", "isnan", "logical_not", "logical_and", "logical_or"}
FILLS = {"normal_", "uniform_", "random_", "copy_", "mul_", "add_", "div_", "addmm_"}
Call = dict[str, Any]


class Shapes(TorchDispatchMode):
    """Runs a program with large tensors that nobody writes, and notes its calls of this package's ops."""

    def __init__(self, ltx: ModuleType) -> None:
        super().__init__()
        self.namespace, self.calls = ltx._ops.ops.name, list[Call]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ours, name = func.namespace == self.namespace, func._opname
        if ours:
            self.calls.append(call_of(func, args))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        large = any(tensor.numel() > LARGE for tensor in tensors)
        if ours and name.endswith("_out"):
            return None
        if name in FILLS and large:
            return args[0]
        if "out" in kwargs and large:
            return kwargs["out"]
        makes_new = not func._schema.is_mutable and all(one.alias_info is None for one in func._schema.returns)
        if tensors and makes_new and (ours or (large and name not in READ)):
            like = tree_map_only(Tensor, on_meta, (args, kwargs))
            outputs = func(*like[0], **{**like[1], **({"device": "meta"} if "device" in kwargs else {})})
            if name == "convolution":
                outputs = outputs.contiguous(memory_format=order_of_convolution(*like[0][:2]))
            return tree_map_only(Tensor, unwritten, outputs)
        return func(*args, **kwargs)


def order_of_convolution(input: Tensor, weight: Tensor) -> torch.memory_format:
    """The memory order of a convolution's result on a GPU, as cuDNN chooses it: channels last if either has them so."""
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.dim(), torch.contiguous_format)
    last = any(x.is_contiguous(memory_format=order) and not x.is_contiguous() for x in (input, weight))
    return order if last else torch.contiguous_format


def on_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def unwritten(like: Tensor) -> Tensor:
    """A tensor of zeros, because a forward may compare its rows. Pages that nobody writes to take no memory."""
    size = 1 + sum((n - 1) * step for n, step in zip(like.shape, like.stride()))
    pages = mmap.mmap(-1, max(1, size) * like.element_size())
    return torch.frombuffer(pages, dtype=torch.uint8).view(like.dtype).as_strided(like.shape, like.stride())


def call_of(func: Any, args: Sequence[Any]) -> Call:
    """An op's call by the names of its arguments: tensors as their shape, strides and dtype."""
    schema = func._schema
    names = [argument.name for argument in schema.arguments]
    values = [described(value) for value in args]
    if func._opname.endswith("_out"):  # its outputs lead
        outputs = sum(argument.alias_info is not None for argument in schema.arguments)
        names, values = names[outputs:], values[outputs:]
    return {"op": func._opname.removesuffix("_out"), "arguments": dict(zip(names, values))}


def described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"shape": list(value.shape), "stride": list(value.stride()), "dtype": str(value.dtype)[6:]}
    return [described(one) for one in value] if isinstance(value, (list, tuple)) else value


def rows_of(call: Call) -> int:
    """The rows of a call's first argument, as its tokens or as the rows of a matrix."""
    first = next(iter(call["arguments"].values()))
    return math.prod(first["shape"][: 2 if len(first["shape"]) == 4 else -1])


def key_of(call: Call) -> str:
    """What decides the kernel of a call and how it runs.

    A tensor counts by its dtype and its dimensions, from the outermost in memory. Dimensions of one element are left
    out, and dimensions that follow each other without a gap are one. Letters stand for the batch, the tokens, and all
    rows. Other sizes, such as widths and heads, are themselves.
    """
    arguments = call["arguments"]
    sizes: dict[int, str] = {}
    for name, letter in (("input", "S"), ("query", "S"), ("key", "K"), ("x", "S")):
        if isinstance(value := arguments.get(name), Mapping):
            *leading, _ = value["shape"][:3] if len(value["shape"]) == 4 else value["shape"]
            if leading:
                sizes.setdefault(math.prod(leading), "rows" if letter == "S" else "keys")
                sizes.setdefault(leading[-1], letter)
                sizes.setdefault(leading[0], "B")

    def form(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            heads = len(value["shape"]) == 4 and value["shape"][2] < FEW
            return value["dtype"], dimensions_of(value["shape"], value["stride"], 2 if heads else 1, sizes)
        if isinstance(value, list):
            return [form(name, one) for one in value]
        if isinstance(value, float):
            return bool(value) if name == "weight_offset" else None  # eps and factors decide nothing
        return value

    forms = {name: form(name, value) for name, value in arguments.items()}
    return json.dumps([call["op"], forms, "few" if rows_of(call) <= FEW else "many"])


def dimensions_of(shape: Sequence[int], stride: Sequence[int], kept: int, sizes: Mapping[int, str]) -> list[str]:
    """The dimensions of a tensor, from the outermost in memory: each size, and whether it is repeated or has gaps.

    kept: How many at the end are no rows: a width, or heads and their columns.
    """
    rows = sorted((-step, i) for i, (n, step) in enumerate(zip(shape[:-kept], stride)) if n > 1)
    dims: list[tuple[int, int]] = []
    last = -1
    for _, i in rows:
        n, step = shape[i], stride[i]
        if dims and last < i and dims[-1][1] == n * step and step:  # in their order, and without a gap
            dims[-1] = dims[-1][0] * n, step
        else:
            dims.append((n, step))
        last = i
    found, inner = [], 1
    columns = list(zip(shape, stride))[-kept:]
    for n, step in reversed([*dims, *columns]):
        kind = "repeated" if step == 0 else "" if step == inner or n == 1 else "with gaps"
        found.append(f"{sizes.get(n, n) if (n, step) not in columns else n} {kind}".strip())
        inner = max(inner, n * step)
    return found[::-1]


# Of language models that are not recorded with the first layers that have every type, in their own configuration: the
# number of layers, and what is changed.
RECORDED: dict[str, tuple[int, dict[str, Any]]] = {
    "llama4-scout": (0, {"num_local_experts": 2}),  # experts call no op
    "gemma4": (12, {"num_kv_shared_layers": 6}),  # as the smaller ones share keys and values
}


def calls_of_model(name: str, precision: str, ltx: ModuleType) -> list[Call]:
    """The calls of one forward of a model of model_shapes.py, or of a prompt and a token of a language model."""
    from llm_models import random_model
    from model_shapes import MODELS, of_few_blocks
    from model_shapes import Make as MakeInputs

    with torch.no_grad(), Shapes(ltx) as shapes:
        if name in MODELS:
            known = of_few_blocks(MODELS[name], 2)
            model = known.construct(False, torch.bfloat16, "cpu")
            inputs = known.inputs(model, MakeInputs(torch.bfloat16, "cpu"), **known.shape)
            report = ltx.optimize(model, precision=precision, graphs=False)
            shapes.calls.clear()  # the weights were quantised
            model(**inputs, return_dict=False)
        else:
            layers, changes = RECORDED.get(name, (0, {}))
            model = random_model(name, torch.bfloat16, "cpu", layers, **changes)
            report = ltx.optimize(model, precision=precision, graphs=False)
            shapes.calls.clear()
            ids = torch.zeros(1, PROMPT, dtype=torch.int64)
            cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
            model(input_ids=ids[:, -1:], use_cache=True, past_key_values=cache)
    if stock := {name: reasons for name, reasons in report.fallbacks.items() if reasons}:
        raise RuntimeError(f"{name}, {precision}: expected no stock calls, got {stock}")
    return shapes.calls


def models() -> list[str]:
    """What is recorded: all diffusion transformers and language models that have benchmarks."""
    from llm_shapes import SHAPES
    from model_shapes import MODELS

    return [*MODELS, *(name for name in SHAPES if name != "tiny")]


def key_of_case(case: Case, ltx: ModuleType) -> str:
    """The key of the call that a case of benchmarks/op_cases.py makes."""
    from ops import calls
    from result_files import DTYPES

    inputs = case.build(Make(DTYPES[case.dtype], "meta"))
    with torch.no_grad(), Shapes(ltx) as shapes:
        calls(ltx, case, inputs, compiled=False)["ours"]()
    return key_of(shapes.calls[0])


def merged(earlier: Iterable[Call], found: Mapping[str, Iterable[Call]], ltx: ModuleType) -> list[Call]:
    """The distinct calls of all models, each with the models that make it and the case of the table that covers it."""
    cases = {
        key_of_case(op.case(shape), ltx): op.case(shape).name
        for op in OPS
        for shape in op.shapes
        if covers(op.function)
    }
    calls: dict[str, Call] = {}
    users: dict[str, dict[str, None]] = {}
    kept = [(one, user) for one in earlier for user in one["models"] if user not in found]
    for call, user in (*kept, *((call, user) for user, calls_of in found.items() for call in calls_of)):
        key = key_of(call)
        users.setdefault(key, {})[user] = None
        if key not in calls or rows_of(call) > rows_of(calls[key]):
            calls[key] = call
    return [
        {
            "op": calls[key]["op"],
            "id": hashlib.sha256(key.encode()).hexdigest()[:6],
            "models": list(users[key]),
            "case": cases.get(key),
            "arguments": calls[key]["arguments"],
        }
        for key in sorted(calls, key=lambda key: (calls[key]["op"], key))
    ]


def covers(function: str) -> bool:
    """Whether cases of a function may cover calls of models; attention has a benchmark of its own."""
    return function != "attention"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=models(), default=models(), help="(default: all)")
    parser.add_argument("--output", type=Path, default=CALLS, help="JSON (default: benchmarks/op_calls.json)")
    options = parser.parse_args()
    ltx, _ = load_package()
    earlier = json.loads(options.output.read_text())["records"] if options.output.exists() else []
    found: dict[str, list[Call]] = {}
    for name in options.models:
        for precision in PRECISIONS:
            user = name if precision == "native" else f"{name} {precision}"
            distinct = {key_of(call): call for call in calls_of_model(name, precision, ltx)}
            found[user] = list(distinct.values())
            print(f"{user}: {len(distinct)} distinct calls", flush=True)
            write(options.output, {"rows": f"up to {FEW}, or more"}, merged(earlier, found, ltx))
    print(options.output)


if __name__ == "__main__":
    main()
