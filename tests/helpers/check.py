"""The checkers that op tests use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .attention import Truth
from .cases import Case, gate_and_up
from .memory import Layout, assert_same_memory, copied, guarded_output, unchanged
from .numeric import assert_close_to_eager, assert_close_to_fp64, assert_same_bits, report, ulp
from .tally import Tally


def check(ltx: Any, case: Case) -> tuple[Tensor, ...]:
    """Runs the case: outputs within the bound of the fp64 truth, new, in the promised order; inputs as before."""
    with unchanged(**case.tensors):
        outputs = case.run(ltx)
    _assert_new(case, outputs)
    _assert_true(ltx, case, outputs)
    return outputs


def check_eager(
    ltx: Any, case: Case, *, exact: bool = False, outputs: tuple[Tensor, ...] | None = None, **tolerance: Any
) -> tuple[Tensor, ...]:
    """Runs the case with rounding="eager" (or takes `outputs`): the bits of eager torch, all of them (`exact`) or but
    for flips; of activations, what torch's own errors in fp32 allow."""
    outputs = outputs or case.replace(rounding="eager").run(ltx)
    for i, (output, eager, term) in enumerate(zip(outputs, case.eager(), case.terms(ltx), strict=True)):
        what = f"{case.op} output {i}"
        if case.is_activation:
            _assert_close_to_eager_activation(case, output, eager, what)
        else:
            assert_close_to_eager(output, eager, None if exact else term, what=what, **tolerance)
    return outputs


def check_out(ltx: Any, case: Case, layout: Layout | str) -> None:
    """Into given outputs of a layout: the bits of the functional call, returned as given, nothing else written."""
    expected = case.run(ltx)
    guarded = [guarded_output(output, layout) for output in expected]
    views = tuple(g.view for g in guarded)
    with unchanged(**case.tensors):
        _run_into(ltx, case, views)
    for i, (given, want) in enumerate(zip(guarded, expected, strict=True)):
        assert_same_bits(given.view, want, f"{case.op} output {i} into {layout}")
        given.check(f"{case.op} output {i}")


def check_everywhere(
    ltx: Any,
    case: Case,
    device: str,
    *,
    out_layout: Layout | str = "contiguous",
    in_place: tuple[str, ...] = (),
    tally: Tally | None = None,
    repeat: bool = True,
    eager: bool = True,
    **tolerance: Any,
) -> None:
    """All of the above of a case on the CPU, whose memory is copied to the device and back: nothing but this package's
    kernels and copies runs there.

    The call is made with new outputs, again and on its last batch alone (`repeat`), and, as far as it offers that, into
    given outputs in `out_layout`, in place of those of its arguments that `in_place` names, and with rounding="eager",
    which is compared with plain torch (`eager`; `tolerance`: that of check_eager).
    """
    there = case.on(device)
    outputs = there.run(ltx)
    _assert_new(there, outputs)
    again: tuple[Tensor, ...] = there.run(ltx) if repeat else ()
    part = there.batch(there.inputs[0].shape[0] - 1) if repeat and there.inputs[0].numel() else None
    last: tuple[Tensor, ...] = () if part is None else part.run(ltx)
    guarded = [guarded_output(output, out_layout, "cpu") for output in outputs]
    views = copied(device, *(given.view for given in guarded))
    if views:
        _run_into(ltx, there, views)
    in_eager: tuple[Tensor, ...] = there.replace(rounding="eager").run(ltx) if case.takes_rounding else ()

    groups = (outputs, again, last, views, in_eager, tuple(there.tensors.values()))
    copies = iter(copied("cpu", *(tensor for group in groups for tensor in group)))
    expected, again, last, views, in_eager, inputs = (tuple(next(copies) for _ in group) for group in groups)
    _assert_true(ltx, case, expected, tally)
    for i, want in enumerate(expected):
        if last:
            assert_same_bits(last[i], want[-1:], f"{case.op} output {i} of the last batch alone")
        if again:
            assert_same_bits(again[i], want, f"{case.op} output {i} of a second run")
        if views:
            assert_same_bits(views[i], want, f"{case.op} output {i} into {out_layout}")
            guarded[i].check(f"{case.op} output {i}", views[i])
    if tally is not None:
        tally.add_repeats(case.op, expected[0].dtype, bool(again) + bool(last))
    if case.takes_rounding and eager:
        plain = case.eager()
        if all(bool(tensor.isfinite().all()) for tensor in plain):
            check_eager(ltx, case, outputs=in_eager, **tolerance)
            if tally is not None and not tolerance:
                tally.add_eager(case.op, zip(in_eager, plain, strict=True))
    for (name, tensor), after in zip(case.tensors.items(), inputs, strict=True):
        assert_same_memory(after, tensor, f"{case.op}: {name}")

    for name in in_place:
        if _in_place_of(name, case) is None:
            continue
        there = case.on(device)
        targets = _in_place_of(name, there)
        if len(case.output_names) > 1:
            last = case.output_names[-1]
            results = there.run(ltx, **{last if name == "residual" else "out": targets[0]})
        else:
            results = _run_into(ltx, there, targets)
        for i, (result, want) in enumerate(zip(copied("cpu", *results), expected, strict=True)):
            assert_same_bits(result, want, f"{case.op} output {i} in place of {name}")


def kernels_of(call: Callable[[], Any]) -> list[str]:
    """The names of what a call runs on the GPU: kernels, copies and memsets."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def check_streams(ltx: Any, cases: Sequence[Case]) -> None:
    """Calls of several streams at once, a case each: the same bits as one call at a time."""
    expected = [case.run(ltx)[0] for case in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    outputs: list[list[Tensor]] = [[] for _ in cases]
    for _ in range(20):
        for case, stream, found in zip(cases, streams, outputs, strict=True):
            with torch.cuda.stream(stream):
                found.append(case.run(ltx)[0])
    torch.cuda.synchronize()
    for found, want in zip(outputs, expected, strict=True):
        for output in found:
            assert_same_bits(output, want)


def _in_place_of(name: str, case: Case) -> tuple[Tensor, ...] | None:
    """The tensors that outputs may overwrite exactly; None where the op cannot work in their place."""
    if name not in case.kwargs or case.packs_gate_and_up:
        return None
    if case.op == "attention" or (case.is_attention and name != "query"):
        return None
    targets = case.inputs if case.is_rotary else (case.kwargs[name],)
    overlap = any(size > 1 and step == 0 for t in targets for size, step in zip(t.shape, t.stride(), strict=True))
    return None if overlap else targets


def _run_into(ltx: Any, case: Case, views: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if len(case.output_names) > 1:
        outputs = dict(zip(case.output_names, views, strict=True))
    else:
        outputs = {"out": views if len(views) > 1 else views[0]}
    returned = case.run(ltx, **outputs)
    assert len(returned) == len(views)
    for i, (output, view) in enumerate(zip(returned, views, strict=True)):
        assert output is view, f"{case.op} output {i}: not the tensor that was given"
    return returned


def _assert_new(case: Case, outputs: tuple[Tensor, ...]) -> None:
    """The input's dtype, the promised memory order, and memory of their own."""
    for i, output in enumerate(outputs):
        what = f"{case.op} output {i}"
        like = case.inputs[i if case.is_rotary else 0]
        assert output.dtype == like.dtype, f"{what}: {output.dtype}, expected {like.dtype}"
        strides = torch.empty_like(like).stride() if case.is_rotary else torch.empty(output.shape).stride()
        significant = [d for d, size in enumerate(output.shape) if size > 1]
        assert [output.stride(d) for d in significant] == [strides[d] for d in significant], f"{what}: memory order"
        for name, tensor in case.tensors.items():
            if output.numel() and tensor.numel():
                shared = output.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
                assert not shared, f"{what} shares memory with {name}"


def _assert_true(ltx: Any, case: Case, outputs: tuple[Tensor, ...], tally: Tally | None = None) -> None:
    truths, terms = case.truth(ltx), case.terms(ltx)
    assert len(outputs) == len(truths)

    # Activations may err as torch's own do in fp32: 1 + erf loses its digits on the negative side.
    def in_fp32() -> Tensor:
        return case.map(lambda tensor: tensor.float()).eager()[0]

    def eager() -> Tensor:
        return case.eager()[0]

    reference = in_fp32 if case.is_activation else eager if case.is_attention else None
    allowed = [
        assert_close_to_fp64(output, truth, term, eager=reference, what=f"{case.op} output {i}")
        for i, (output, truth, term) in enumerate(zip(outputs, truths, terms, strict=True))
    ]
    if tally is not None:
        if case.is_activation:  # the tail of an activation is small against its argument
            gate, up = gate_and_up(case.op, case.kwargs)
            terms = [terms[0].maximum(gate.double().abs() / 2 * (1 if up is None else up.double().abs()))]
        if case.is_attention:
            terms = [Truth(case.kwargs).magnitude()]
        tally.add_outputs(case.op, zip(outputs, truths, terms, allowed, strict=True))


def _assert_close_to_eager_activation(case: Case, output: Tensor, eager: Tensor, what: str) -> None:
    """torch's own activations err by a few fp32 ulps, so an activated gate may round the other way, once, and its
    product once more. In fp32 there is nothing to round."""
    if output.dtype == torch.float32:
        return
    gate, up = gate_and_up(case.op, case.kwargs)
    if case.kwargs.get("bias") is not None:
        gate = (gate + case.kwargs["bias"]).to(gate.dtype)
    allowed = ulp(gate.double(), output.dtype) * (1.0 if up is None else up.double().abs())
    allowed = allowed + ulp(eager.double(), output.dtype)
    error = (output.double() - eager.double()).abs()
    far = (error > allowed) | (output.isnan() != eager.isnan())
    assert not bool(far.any()), report(output, eager.double(), far, f"{what} (far from eager)", error, allowed)
