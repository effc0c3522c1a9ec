"""The one checker that op tests use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cases import Case
from .memory import Guarded, Layout, guarded_output, unchanged
from .numeric import assert_close_to_eager, assert_close_to_fp64, assert_same_bits


def check(ltx: Any, case: Case) -> tuple[Tensor, ...]:
    """Runs the case: outputs within the bound of the fp64 truth, new, in the promised order; inputs as before."""
    with unchanged(**case.tensors):
        outputs = case.run(ltx)
    truths, terms = case.truth(ltx), case.terms(ltx)
    assert len(outputs) == len(truths)
    rotary = case.op.startswith(("apply_rotary", "rope", "qk_norm"))
    # Activations may err as torch's own do in fp32: 1 + erf loses its digits on the negative side.
    activation = case.op in ("geglu", "swiglu", "gelu")

    def in_fp32() -> Tensor:
        return case.map(lambda tensor: tensor.float()).eager()[0]

    for i, (output, truth, term) in enumerate(zip(outputs, truths, terms, strict=True)):
        what = f"{case.op} output {i}"
        like = case.inputs[i if rotary else 0]
        assert output.dtype == like.dtype, f"{what}: {output.dtype}, expected {like.dtype}"
        strides = torch.empty_like(like).stride() if rotary else torch.empty(output.shape).stride()
        significant = [d for d, size in enumerate(output.shape) if size > 1]
        assert [output.stride(d) for d in significant] == [strides[d] for d in significant], f"{what}: memory order"
        for name, tensor in case.tensors.items():
            if output.numel() and tensor.numel():
                shared = output.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
                assert not shared, f"{what} shares memory with {name}"
        assert_close_to_fp64(output, truth, term, eager=in_fp32 if activation else None, what=what)
    return outputs


def check_eager(ltx: Any, case: Case, *, exact: bool = False, **tolerance: Any) -> tuple[Tensor, ...]:
    """Runs the case with rounding="eager": the bits of eager torch, all of them (`exact`) or but for flips."""
    outputs = case.replace(rounding="eager").run(ltx)
    for i, (output, eager, term) in enumerate(zip(outputs, case.eager(), case.terms(ltx), strict=True)):
        assert_close_to_eager(output, eager, None if exact else term, what=f"{case.op} output {i}", **tolerance)
    return outputs


def check_out(ltx: Any, case: Case, layout: Layout | str) -> None:
    """Into given outputs of a layout: the bits of the functional call, returned as given, nothing else written."""
    expected = case.run(ltx)
    guarded = [guarded_output(output, layout) for output in expected]
    with unchanged(**case.tensors):
        returned = case.run(ltx, **_out_arguments(case, guarded))
    assert len(returned) == len(guarded)
    for i, (given, output, want) in enumerate(zip(guarded, returned, expected, strict=True)):
        assert output is given.view, f"{case.op} output {i}: not the tensor that was given"
        assert_same_bits(given.view, want, f"{case.op} output {i} into {layout}")
        given.check(f"{case.op} output {i}")


def _out_arguments(case: Case, guarded: list[Guarded]) -> dict[str, Any]:
    views = tuple(g.view for g in guarded)
    if case.output_names == ("out", "residual_out"):
        return dict(zip(case.output_names, views, strict=True))
    return {"out": views if len(views) > 1 else views[0]}
