"""Bad input, systematically: every tensor argument of every op, spoiled in every way that a tensor can be.

The reference is the judge: it raises, and the op raises the same text and leaves its outputs alone; or it takes the
input, and the op gives the same result. tests/test_errors.py has the texts themselves.
"""

from __future__ import annotations

import inspect
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import Case, Make, assert_same_bits, every_case, every_quantising_case, guarded_output
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

NAMES = list(every_case(Make("cpu", torch.float32)))
every_call = pytest.mark.parametrize("name", NAMES)

SPOILED: dict[str, Callable[[Tensor], Tensor]] = {
    "int64": lambda t: t.long(),
    "float64": lambda t: t.double(),
    "complex64": lambda t: t.to(torch.complex64),
    "bool": lambda t: t.bool(),
    "float8": lambda t: t.to(torch.float8_e4m3fn),
    "float16": lambda t: t.half(),
    "one more dimension": lambda t: t[None],
    "one less dimension": lambda t: t[0],
    "a trailing dimension": lambda t: t[..., None],
    "no dimension": lambda t: t.flatten()[0],
    "first size longer": lambda t: torch.cat((t, t[:1])),
    "first size shorter": lambda t: t[1:],
    "first size one": lambda t: t[:1],
    "last size longer": lambda t: torch.cat((t, t[..., :1]), -1),
    "last size shorter": lambda t: t[..., 1:],
    "last size halved": lambda t: t[..., : t.shape[-1] // 2],
    "last size one": lambda t: t[..., :1],
    "last size zero": lambda t: t[..., :0],
    "first size zero": lambda t: t[:0],
    "transposed": lambda t: t.transpose(0, -1),
    "overlapping rows": lambda t: t[:1].expand(t.shape),
    "reversed": lambda t: t.flip(-1),  # torch copies: it has no negative strides
    "another device": lambda t: t.to("meta"),
}


def spoiled(case: Case, name: str, how: str) -> Case:
    """The case with its tensor `name` ("cos[1]" of a pair) spoiled."""
    operand, _, index = name.removesuffix("]").partition("[")
    value = case.kwargs[operand]
    if index:
        items = list(value)
        items[int(index)] = SPOILED[how](items[int(index)])
        return case.replace(**{operand: tuple(items)})
    return case.replace(**{operand: SPOILED[how](value)})


def outputs_of(case: Case, outputs: Sequence[Tensor]) -> dict[str, Any]:
    """Outputs as the function takes them."""
    if len(case.output_names) == len(outputs):
        return dict(zip(case.output_names, outputs, strict=True))
    return {"out": tuple(outputs)}


def output_labels(case: Case, count: int) -> list[str]:
    """The names of the outputs in errors."""
    names = list(case.output_names)
    return names if len(names) == count else [f"out[{i}]" for i in range(count)]


def outcome(call: Callable[[], tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...] | None, str]:
    try:
        return call(), ""
    except RuntimeError as error:
        return None, str(error)


@every_call
@pytest.mark.parametrize("how", SPOILED)
def test_every_argument(ltx: Any, device: str, name: str, how: str) -> None:
    case = every_case(Make(device, torch.float32))[name]
    # Into what is given, too: outputs of the right shape and dtype, in guarded memory.
    expected = case.run(ltx)
    for operand in case.tensors:
        bad = spoiled(case, operand, how)
        results, text = outcome(lambda bad=bad: bad.run(ltx.reference))
        if any(tensor.device.type == "meta" for tensor in bad.tensors.values()) and len(case.tensors) == 1:
            continue  # all of them on one device: no error
        got, own_text = outcome(lambda bad=bad: bad.run(ltx))
        if how == "float64" and operand in ("input", "query"):  # the reference's alone
            text = f"{operand}: expected dtype float32, float16 or bfloat16, got float64"
        assert own_text == text, f"{operand}, {how}"
        if not text:
            assert got is not None and results is not None
            for output, want in zip(got, results, strict=True):
                near = 1e-5 if output.dtype == torch.float32 else 2e-3
                torch.testing.assert_close(output, want, rtol=near, atol=near, equal_nan=True)
            continue
        assert ": expected " in text, f"{operand}, {how}: {text}"
        guarded = [guarded_output(output, "rows apart") for output in expected]
        for g in guarded:
            g.view.fill_(math.nan)
        views = tuple(g.view for g in guarded)
        outs = outputs_of(case, views)
        _, text = outcome(lambda bad=bad, outs=outs: bad.run(ltx, **outs))
        assert text, f"{operand}, {how}: no error with given outputs"
        for g in guarded:
            assert bool(g.view.isnan().all()), f"{operand}, {how}: an output was written"
            g.check()


@pytest.mark.parametrize("name", every_quantising_case(Make("cpu", torch.float32)))
@pytest.mark.parametrize("how", SPOILED)
def test_every_argument_of_quantising_ops(ltx: Any, device: str, name: str, how: str) -> None:
    case = every_quantising_case(Make(device, torch.float32))[name]
    for operand in case.tensors:
        bad = spoiled(case, operand, how)
        if any(tensor.device.type == "meta" for tensor in bad.tensors.values()) and len(case.tensors) == 1:
            continue
        results, text = outcome(lambda bad=bad: bad.run(ltx.reference))
        got, own_text = outcome(lambda bad=bad: bad.run(ltx))
        if how == "float64" and operand == "input":  # the reference's alone
            text = f"{operand}: expected dtype float32, float16 or bfloat16, got float64"
        assert own_text == text, f"{operand}, {how}"
        if text:
            assert ": expected " in text, f"{operand}, {how}: {text}"
            continue
        assert got is not None and results is not None
        own, want = list(got), list(results)
        while own and own[0].dtype == torch.float8_e4m3fn:  # values and scales, of one result or of two
            (values, scales, *own), (want_values, want_scales, *want) = own, want
            expected = want_values.float() * want_scales
            error = (values.float() * scales - expected).abs()  # which may go either way
            assert bool((error <= torch.maximum(expected.abs() / 7, want_scales * 2.0**-8)).all()), f"{operand}, {how}"
        near = 1e-5 if bad.inputs[0].dtype == torch.float32 else 2e-3
        torch.testing.assert_close(own, want, rtol=near, atol=near)


@pytest.mark.host
@every_call
@pytest.mark.parametrize("how", [how for how in SPOILED if how not in ("transposed", "reversed")])
def test_every_output(ltx: Any, device: str, name: str, how: str) -> None:
    """A spoiled output is named; none is written, the other one neither."""
    case = every_case(Make(device, torch.float32))[name]
    expected = case.run(ltx)
    for i, argument in enumerate(output_labels(case, len(expected))):
        outputs = [torch.full_like(output, math.nan) for output in expected]
        outputs[i] = SPOILED[how](outputs[i])
        same = outputs[i].shape == expected[i].shape and outputs[i].dtype == torch.float32
        if same and how not in ("another device", "overlapping rows"):
            continue
        outs = outputs_of(case, outputs)
        before = [output.clone() for output in outputs]
        _, text = outcome(lambda outs=outs: case.run(ltx, **outs))
        assert text.startswith(f"{argument}: expected "), f"{argument}, {how}: {text!r}"
        for output, old in zip(outputs, before, strict=True):
            if output.device.type != "meta":
                torch.testing.assert_close(output, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.host
@every_call
def test_texts_of_wrong_outputs(ltx: Any, device: str, name: str) -> None:
    """From the compiled op, on meta tensors and from the fake alike."""
    case = every_case(Make(device, torch.float32))[name]
    expected = case.run(ltx)
    like = [name for value in case.inputs for name, tensor in case.tensors.items() if tensor is value]
    for i, label in enumerate(output_labels(case, len(expected))):
        shape = list(expected[i].shape)
        wrong = {
            f"shape {shape}, got {[*shape, 1]}": expected[i][..., None],
            f"dtype float32 (that of {like[i if len(like) > 1 else 0]}), got bfloat16": expected[i].bfloat16(),
        }
        for text, output in wrong.items():
            outs = outputs_of(case, [output if j == i else e for j, e in enumerate(expected)])
            whole = case.replace(**outs)
            for call in (whole, whole.map(lambda tensor: tensor.to("meta"))):
                assert outcome(lambda call=call: call.run(ltx))[1] == f"{label}: expected {text}"
            with FakeTensorMode() as mode:
                fake = whole.map(mode.from_tensor)
                assert outcome(lambda fake=fake: fake.run(ltx))[1] == f"{label}: expected {text}"


@every_call
def test_outputs_in_one_place(ltx: Any, device: str, name: str) -> None:
    """Strides under which elements share memory, whatever they are; ones that skip memory are fine."""
    case = every_case(Make(device, torch.float32))[name]
    output = case.run(ltx)[0]
    flat = torch.full((output.shape[-1] * output.numel(),), math.nan, device=device)
    for strides in ([1] * output.dim(), [0] * output.dim(), [*output.stride()[:-1], output.stride(-2)]):
        bad = flat.as_strided(output.shape, strides)
        outs = {"out": (bad, *(torch.empty_like(t) for t in case.inputs[1:])) if case.is_rotary else bad}
        if len(case.inputs) == 1:
            outs = {"out": bad}
        _, text = outcome(lambda outs=outs: case.run(ltx, **outs))
        assert "expected memory of its own for every element" in text, strides
    assert bool(flat.isnan().all())


@pytest.mark.parametrize("name", ["attention", "attention_int8", "linear_cat", "scaled_linear"])
def test_outputs_in_one_place_of_torchs_functions(ltx: Any, device: str, name: str) -> None:
    """What torch computes refuses such an output as well, before anything is written."""
    if name == "scaled_linear" and device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 products need a GPU of compute capability 8.9")
    rows, weight = torch.randn(32, 16, device=device), torch.randn(32, 16, device=device)
    heads = torch.randn(1, 4, 2, 128, device=device, dtype=torch.bfloat16)
    wide = heads.float()
    fp8, fp8_weight = ltx.quantize_rows(rows), ltx.quantize_rows(weight)
    call, shape, dtype = {
        "attention": (lambda out: ltx.attention(wide, wide, wide, out=out), wide.shape, torch.float32),
        "attention_int8": (
            lambda out: ltx.attention(heads, heads, heads, precision="int8", out=out),
            heads.shape,
            torch.bfloat16,
        ),
        "linear_cat": (
            lambda out: ltx.linear_cat([rows[:, :8], rows[:, 8:]], weight, out=out),
            (32, 32),
            torch.float32,
        ),
        "scaled_linear": (
            lambda out: ltx.scaled_linear(*fp8, fp8_weight[0], fp8_weight[1][:, 0], out=out),
            (32, 32),
            torch.bfloat16,
        ),
    }[name]
    flat = torch.full((4096,), math.nan, device=device, dtype=dtype)
    for strides in ([1] * len(shape), [0] * len(shape)):
        with pytest.raises(RuntimeError, match=r"^out: expected memory of its own for every element, got strides \["):
            call(flat.as_strided(shape, strides))
    assert bool(flat.isnan().all())


def spaced(shape: Sequence[int], gap: int) -> list[int]:
    """Strides that leave `gap` elements free after each row, and after each of the larger parts."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size + gap
    return strides[::-1]


@every_call
def test_an_output_that_overlaps_an_argument(ltx: Any, backend: str, device: str, name: str) -> None:
    """In one element, between tensors with gaps: each output and each argument, and the outputs among themselves."""
    if backend != device:
        pytest.skip("the reference does not look at memory")
    case = every_case(Make(device, torch.float32))[name]
    expected = case.run(ltx)
    labels = output_labels(case, len(expected))
    memory = torch.zeros(1 << 16, device=device)
    for i, output in enumerate(expected):
        fresh = [torch.empty_like(e) for e in expected]
        for operand, tensor in case.tensors.items():
            strides, start = spaced(tensor.shape, 2), 16
            taken = memory.view(tensor.dtype).as_strided(tensor.shape, strides, start)
            last = start + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
            fresh[i] = memory.as_strided(output.shape, spaced(output.shape, 3), last * tensor.element_size() // 4)
            swapped = case.map(lambda t, old=tensor, new=taken: new if t is old else t)
            _, text = outcome(lambda swapped=swapped, fresh=fresh: swapped.run(ltx, **outputs_of(case, fresh)))
            of = {"cos[0]": "cos", "cos[1]": "key_cos", "sin[0]": "sin", "sin[1]": "key_sin"}.get(operand, operand)
            texts = (f"exactly the memory of {of} or none of it", f"memory apart from that of {of}")
            assert text in [f"{labels[i]}: expected {expected}, got an overlap" for expected in texts], operand
        for j in range(i):
            fresh = [torch.empty_like(e) for e in expected]
            for k, start in ((j, 0), (i, 8)):
                fresh[k] = memory.as_strided(expected[k].shape, spaced(expected[k].shape, 3), start)
            _, text = outcome(lambda fresh=fresh: case.run(ltx, **outputs_of(case, fresh)))
            assert text == f"{labels[i]}: expected memory apart from that of {labels[j]}, got an overlap"
    assert not memory.any()


@every_call
def test_slices_of_a_packed_tensor_are_apart(ltx: Any, device: str, name: str) -> None:
    """Outputs beside the arguments that they are like, in the same rows of one tensor, and exactly in their place."""
    case = every_case(Make(device, torch.float32))[name]
    if any(a.shape != e.shape for a, e in zip(case.inputs, case.run(ltx))):
        pytest.skip("no output is like an input")
    expected = case.run(ltx)
    packed, count = {}, len(expected)
    for tensor in case.inputs:
        whole = torch.zeros(*tensor.shape[:-1], (count + 1) * tensor.shape[-1], device=device)
        packed[id(tensor)] = whole.chunk(count + 1, -1)
        packed[id(tensor)][count].copy_(tensor)
    swapped = case.map(lambda t: packed[id(t)][count] if id(t) in packed else t)
    sides = [packed[id(case.inputs[i if len(case.inputs) > 1 else 0])] for i in range(count)]
    beside = [side[i] for i, side in enumerate(sides)]
    for got, want in zip(swapped.run(ltx, **outputs_of(case, beside)), expected, strict=True):
        assert_same_bits(got, want)
    if not case.is_attention and len(expected) == len(case.inputs):
        in_place = [side[count] for side in sides]
        for got, want in zip(swapped.run(ltx, **outputs_of(case, in_place)), expected, strict=True):
            assert_same_bits(got, want)


def bytes_of(x: Tensor) -> set[int]:
    """The places of its elements in its storage."""
    steps = [range(0, size * stride, stride) for size, stride in zip(x.shape, x.stride(), strict=True)]
    first = [x.itemsize * (x.storage_offset() + sum(step)) for step in itertools.product(*steps)]
    return {place + byte for place in first for byte in range(x.itemsize)}


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(("dtype", "other"), [(F32, F32), (F32, BF16), (BF16, F32)], ids=str)
def test_overlaps_are_told_exactly(ltx: Any, backend: str, device: str, dtype: torch.dtype, other: torch.dtype) -> None:
    """An error where two tensors share a byte and are not the same, and nowhere else: compared with their sets."""
    if backend != device:
        pytest.skip("the reference does not look at memory")
    draw = random.Random(0)
    memory = torch.zeros(4096, dtype=torch.uint8, device=device)

    def drawn(dtype: torch.dtype) -> Tensor:
        strides = [draw.choice([1, 2, 3, 4, 5, 6, 12, 24, 60]) for _ in shape]
        return memory.view(dtype).as_strided(shape, strides, draw.randint(0, 240 // dtype.itemsize))

    told = [0, 0]
    for _ in range(4000):
        shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
        x, out = drawn(other), drawn(dtype)
        if len(bytes_of(out)) < out.nbytes:
            continue
        steps = [[(size, step) for size, step in zip(t.shape, t.stride(), strict=True) if size > 1] for t in (x, out)]
        same = dtype == other and x.storage_offset() == out.storage_offset() and steps[0] == steps[1]
        expected = bool(bytes_of(x) & bytes_of(out)) and not same
        if dtype == other:
            case = Case("gelu", {"input": x})
        else:
            apart = torch.zeros(shape, dtype=dtype, device=device)
            case = Case("gated_residual", {"input": apart, "residual": apart, "gate": x})
        _, text = outcome(lambda case=case, out=out: case.run(ltx, out=out))
        if "memory of its own" in text:  # strides that do not nest count as if elements shared a place
            continue
        assert bool(text) == expected, (shape, x.stride(), x.storage_offset(), out.stride(), out.storage_offset())
        told[expected] += 1
    assert min(told) > 300


@pytest.mark.parametrize("other", [F32, BF16, torch.bool], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_overlaps_of_two_elements(ltx: Any, backend: str, device: str, dtype: torch.dtype, other: torch.dtype) -> None:
    """At every distance in bytes from -4 to 4 that torch allows for the two sizes of elements."""
    if backend != device:
        pytest.skip("the reference does not look at memory")
    memory = torch.zeros(64, dtype=torch.uint8, device=device)
    apart = torch.zeros(1, 1, dtype=dtype, device=device)
    case = Case("gated_residual", {"input": apart, "residual": apart, "gate": apart})
    distances = set()
    for start, distance in itertools.product(range(16, 20), range(-4, 5)):
        at = start + distance
        if start % dtype.itemsize or at % other.itemsize or (dtype == other and distance == 0):
            continue
        out, x = memory[start : start + dtype.itemsize].view(dtype), memory[at : at + other.itemsize].view(other)
        name, value = ("index", x) if other == torch.bool else ("gate", x.view(1, 1))
        call = case.replace(**{name: value})
        _, text = outcome(lambda call=call, out=out: call.run(ltx, out=out.view(1, 1)))
        overlap = f"out: expected memory apart from that of {name}, got an overlap"
        assert text == (overlap if bytes_of(x) & bytes_of(out) else ""), distance
        distances.add(distance)
    step = min(dtype.itemsize, other.itemsize)
    assert distances | {0} == set(range(-4, 5, step))


@every_call
@pytest.mark.parametrize("eps", [math.nan, math.inf, -math.inf, -1e-30])
def test_eps(ltx: Any, device: str, name: str, eps: float) -> None:
    case = every_case(Make(device, torch.float32))[name]
    if "eps" not in inspect.signature(getattr(ltx, case.op)).parameters:
        pytest.skip("takes no eps")
    out = tuple(torch.full_like(output, math.nan) for output in case.run(ltx))
    outs = {"out": out if case.is_rotary else out[0]}
    for module, arguments in ((ltx, {}), (ltx.reference, {}), (ltx, outs)):
        _, text = outcome(lambda module=module, arguments=arguments: case.replace(eps=eps).run(module, **arguments))
        assert text.startswith("eps: expected a finite number >= 0, got ")
    assert all(bool(output.isnan().all()) for output in out)


# ---- Sizes


@every_call
def test_huge_sizes_on_meta(ltx: Any, name: str) -> None:
    """2^40 batches: every size is 64 bits wide."""
    case = every_case(Make("cpu", torch.bfloat16))[name].map(lambda tensor: tensor.to("meta"))
    huge = 2**40

    def grow(tensor: Tensor) -> Tensor:
        return tensor[:1].expand(huge, *tensor.shape[1:]) if tensor.shape[:1] == (2,) else tensor

    grown = case.map(grow)
    for output, like in zip(grown.run(ltx), case.run(ltx), strict=True):
        assert output.shape == (huge, *like.shape[1:])
        assert output.dtype == torch.bfloat16


@pytest.mark.parametrize("op", ["rmsnorm", "gelu", "apply_rotary"])
def test_no_memory_for_the_output(ltx: Any, backend: str, device: str, op: str) -> None:
    """An input of 2^50 elements in the memory of a few: the error says what was wanted, and that memory is out."""
    if backend != device:
        pytest.skip("the reference's error is torch's")
    x = torch.zeros(1, 1, 1, 64, device=device).expand(2**44, 1, 1, 64)
    table = torch.zeros(1, 64, device=device)
    arguments = (x, table, table) if op == "apply_rotary" else (x,)
    with pytest.raises(RuntimeError, match=r"output: expected memory for shape .* of float32 on .* out of memory\.$"):
        getattr(ltx, op)(*arguments)
    small = torch.ones(1, 64, device=device)
    assert bool(ltx.rmsnorm(small).isfinite().all())


def test_too_many_dimensions(ltx: Any, device: str) -> None:
    """Sixteen that merge are no problem; nine that do not are named."""
    merging = torch.randn(*([2] * 15), 4, device=device)
    torch.testing.assert_close(ltx.rmsnorm(merging), ltx.reference.rmsnorm(merging))
    apart = torch.randn(*([2] * 9), 4, device=device).permute(*reversed(range(9)), 9)
    _, text = outcome(lambda: (ltx.rmsnorm(apart),))
    assert not text or text.startswith("input: expected at most 8 leading dimensions that cannot be merged, got shape")
