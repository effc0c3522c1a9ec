"""benchmarks/op_calls.py: every call of an op that an optimized model makes at its released shape has a case."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import op_calls  # noqa: E402
import op_cases  # noqa: E402
import ops  # noqa: E402

RECORDS = json.loads(op_cases.CALLS.read_text())["records"]
KEYS = {op_calls.key_of(record): record for record in RECORDS}
MODELS = op_calls.models()
QUICK = ("ltx2", "qwen3-8b")  # the others take seconds each, and are recorded by the same code
ELEMENTS = 2_000_000  # of a call that a CPU computes in a moment


@pytest.mark.parametrize("precision", op_calls.PRECISIONS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.repeated) for name in MODELS]
)
def test_every_call_of_a_model_has_a_case(ltx: ModuleType, backend: str, name: str, precision: str) -> None:
    if backend != "cpu":
        pytest.skip("calls are recorded with the CPU variant")
    user = name if precision == "native" else f"{name} {precision}"
    missing = [call for call in op_calls.calls_of_model(name, precision, ltx) if op_calls.key_of(call) not in KEYS]
    assert not missing, f"run python benchmarks/op_calls.py --models {name}: no case covers a call of {user}"


@pytest.mark.host
def test_products_into_given_memory_are_not_computed(ltx: ModuleType) -> None:
    """On a CPU without products in bfloat16 one of them takes a minute at a model's shape."""
    left, out = torch.ones(400, 400), torch.zeros(400, 400)
    with torch.no_grad(), op_calls.Shapes(ltx):
        assert torch.mm(left, left, out=out) is out
        torch.addmm(left, left, left, out=out)
    assert not out.any()


def test_every_model_is_recorded() -> None:
    users = {user for record in RECORDS for user in record["models"]}
    assert {user.partition(" ")[0] for user in users} == set(MODELS)


def test_calls_of_one_key_are_recorded_once() -> None:
    assert len(KEYS) == len(RECORDS)


@pytest.mark.parametrize("case", op_cases.recorded(), ids=lambda case: case.name)
def test_a_recorded_case_makes_the_call_of_the_model(ltx: ModuleType, backend: str, case: op_cases.Case) -> None:
    """With the same shapes, strides, dtypes and modes; the plain torch beside it gives results of the same shapes."""
    if backend != "cpu":
        pytest.skip("the calls that a build for the CPU notes")
    assert op_calls.key_of_case(case, ltx) in KEYS
    inputs = case.build(op_cases.Make(torch.bfloat16, "meta"))
    with torch.no_grad():
        calls = ops.calls(ltx, case, inputs, compiled=False)
        shapes = [[(x.shape, x.dtype) for x in ops.tensors(calls[name]())] for name in ("ours", "eager")]
    assert shapes[0] == shapes[1]


def elements(record: op_calls.Call) -> int:
    tensors = [value for value in record["arguments"].values() if isinstance(value, dict)]
    return sum(math.prod(tensor["shape"]) for tensor in tensors)


UNCOVERED = [record for record in RECORDS if record["case"] is None]
SMALL = [
    case
    for case, record in zip(op_cases.recorded(), UNCOVERED)
    if elements(record) < ELEMENTS and "quant" not in case.op  # which has tests of its own
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_recorded_cases_agree(ltx: ModuleType, device: str, case: op_cases.Case) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        calls = ops.calls(ltx, case, case.build(op_cases.Make(torch.bfloat16, device)), compiled=False)
        expected = ops.tensors(calls["eager"]())
        for column in calls.keys() - {"eager"}:
            ops.assert_same(calls[column](), expected)


def in_torch(**functions: Callable[..., object]) -> ModuleType:
    module = ModuleType("package")
    vars(module).update(functions)
    return module


LIGER = in_torch(
    liger_rms_norm=lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps),
    liger_layer_norm=lambda x, weight, bias, eps: F.layer_norm(x, weight.shape, weight, bias, eps),
    liger_fused_add_rms_norm=lambda x, residual, weight, eps: (
        F.rms_norm(x + residual, weight.shape, weight, eps),
        x + residual,
    ),
    liger_swiglu=lambda gate, up: F.silu(gate) * up,
    liger_geglu=lambda gate, up: F.gelu(gate, approximate="tanh") * up,
)


def test_other_packages_are_called_for_what_the_call_computes(ltx: ModuleType) -> None:
    torch.manual_seed(0)
    compared = set()
    with torch.no_grad():
        for case in SMALL:
            inputs = case.build(op_cases.Make(torch.bfloat16, "cpu", {"liger": LIGER}))
            calls = ops.calls(ltx, case, inputs, compiled=False)
            if "liger" in calls:
                ops.assert_same(calls["liger"](), ops.tensors(calls["eager"]()))
                compared.add(case.op.split()[0])
    assert compared == {"norm", "residual_norm", "glu"}


def test_each_op_that_others_have_too_is_beside_them() -> None:
    make = op_cases.Make(torch.bfloat16, "meta", {"liger": LIGER, "quack": ModuleType("quack")})
    found = {(case.op.split()[0], peer) for case in op_cases.recorded() for peer in case.build(make).peers}
    assert found == {
        *(("norm", peer) for peer in ("native", "liger", "quack")),
        *(("residual_norm", peer) for peer in ("liger", "quack")),
        ("glu", "liger"),
        *((op, "native") for op in ("gelu", "group_norm", "upsample_nearest")),
    }


def test_split_rotation_of_ltx2_has_a_case() -> None:
    """The norm across heads, and a table for each head whose rows of tokens lie apart, as LTX-2 hands it on."""
    found = [
        record
        for record in RECORDS
        if record["op"] == "qk_norm_rope" and {"ltx2", "ltx23"} <= set(record["models"])
        and record["arguments"]["cos"]["shape"] == [1, 32, 6144, 64]
    ]  # fmt: skip
    assert found and all(record["arguments"]["query"]["shape"] == [1, 6144, 32, 128] for record in found)
    assert all(record["arguments"]["cos"]["dtype"] == "float32" for record in found)
    assert any(case.op.startswith("qk_norm_rope as in ltx2") for case in op_cases.recorded())


def test_what_decides_a_kernel_is_in_its_key() -> None:
    record = next(record for record in RECORDS if record["op"] == "qk_norm_rope")

    def changed(**values: object) -> str:
        call = copy.deepcopy(record)
        for path, value in values.items():
            name, _, part = path.partition("__")
            if part:
                call["arguments"][name][part] = value
            else:
                call["arguments"][name] = value
        return op_calls.key_of(call)

    key = op_calls.key_of(record)
    cos = record["arguments"]["cos"]
    assert changed(cos__dtype="float16") != key
    assert changed(query_weight=None) != key
    assert changed(cos__stride=[step * 2 for step in cos["stride"]]) != key
    assert changed(eps=0.5) == key
    with_fewer = {"shape": [1, 7, 32, 128], "stride": [7 * 4096, 4096, 128, 1], "dtype": "bfloat16"}
    assert changed(query=with_fewer, key=with_fewer) != key


def test_layouts() -> None:
    sizes = {6144: "S", 2: "B"}
    dense, packed = [2, 6144, 4096], [6144 * 12288, 12288, 1]
    assert op_calls.dimensions_of(dense, [6144 * 4096, 4096, 1], 1, sizes) == ["12288", "4096"]
    assert op_calls.dimensions_of(dense, packed, 1, sizes) == ["12288 with gaps", "4096"]
    assert op_calls.dimensions_of([1, 6144, 64], [0, 64, 1], 1, sizes) == ["S", "64"]
    assert op_calls.dimensions_of([2, 1, 64], [0, 64, 1], 1, sizes) == ["B repeated", "64"]
    assert op_calls.dimensions_of([1, 32, 6144, 64], [12582912, 64, 2048, 1], 1, sizes) == ["S", "32", "64"]
