"""Distances in ulps, the project's error bound, and assertions that name the first and the worst mismatch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Allowed beside the error of the sums, in ulps of the output (docs: numerics).
OUTPUT_ULPS = {torch.float32: 8, torch.float16: 1, torch.bfloat16: 1}
SUM_ERROR = 8 * 2.0**-24
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The spacing of `dtype` at each fp64 value."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(value.double().abs().clamp(info.smallest_normal, info.max))
    return torch.ldexp(torch.full_like(value, info.eps, dtype=torch.float64), exponent - 1)


def report(
    actual: Tensor,
    expected: Tensor,
    wrong: Tensor,
    what: str,
    error: Tensor | None = None,
    allowed: Tensor | None = None,
) -> str:
    """How many elements are wrong, the first one, and the one that exceeds its bound most."""
    lines = [f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ ({tuple(actual.shape)}, {actual.dtype})"]
    places = {"first": wrong.flatten().to(torch.uint8).argmax()}
    if error is not None and allowed is not None:
        excess = torch.where(wrong, (error / allowed).nan_to_num(nan=torch.inf), torch.zeros_like(error))
        places["worst"] = excess.flatten().argmax()
    for name, flat in places.items():
        index = tuple(int(i) for i in torch.unravel_index(flat, wrong.shape)) if wrong.dim() else ()
        line = f"  {name} at {list(index)}: got {actual[index].item()!r}, expected {expected[index].item()!r}"
        if error is not None and allowed is not None:
            in_ulps = (error / ulp(expected, actual.dtype))[index].item()
            line += f"; error {error[index].item():.3g} ({in_ulps:.3g} ulp), allowed {allowed[index].item():.3g}"
        lines.append(line)
    return "\n".join(lines)


def errors(actual: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """|actual - truth| in fp64, and where one is nan or infinite and the other is not alike.

    An overflow counts as the next number past the largest, so that rounding near it may go either way.
    """
    info = torch.finfo(actual.dtype)
    past = info.max * (1 + info.eps / 2)
    error = (actual.double().clamp(-past, past) - truth.clamp(-past, past)).abs()
    wrong_kind = actual.isnan() != truth.isnan()
    wrong_kind |= truth.isinf() & (actual.double() != truth)
    return error.nan_to_num(nan=0.0), wrong_kind


def bound(truth: Tensor, terms: Tensor, dtype: torch.dtype) -> Tensor:
    """The error allowed: OUTPUT_ULPS of the truth, and SUM_ERROR times the absolute terms of its sums."""
    return OUTPUT_ULPS[dtype] * ulp(truth, dtype) + SUM_ERROR * terms.nan_to_num(0.0, 0.0, 0.0)


def assert_close_to_fp64(
    actual: Tensor,
    truth: Tensor,
    terms: Tensor | float = 0.0,
    *,
    eager: Callable[[], Tensor] | None = None,
    what: str = "output",
) -> Tensor:
    """Every element within its `bound` of `truth` (fp64); returns the error that was allowed.

    Where `eager` (the plain torch code in the tensors' own dtypes) is farther from the truth than that somewhere in the
    case, the op may be as far.
    """
    assert truth.dtype == torch.float64, "the truth has to be computed in float64"
    assert actual.shape == truth.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(truth.shape)}"
    allowed = bound(truth, torch.as_tensor(terms, dtype=torch.float64, device=truth.device), actual.dtype)
    error, wrong_kind = errors(actual, truth)
    if eager is not None and bool((wrong_kind | (error > allowed)).any()):
        other_error, other_wrong_kind = errors(eager(), truth)
        allowed = allowed.clamp(min=torch.where(other_wrong_kind, 0.0, other_error).max())
        wrong_kind &= ~other_wrong_kind
        error = torch.where(other_wrong_kind, 0.0, error)
    wrong = wrong_kind | (error > allowed)
    assert not bool(wrong.any()), report(actual, truth, wrong, what, error, allowed)
    return allowed


# Tensors of so many elements are compared on the host: a sanitizer that watches this package's kernels alone takes what
# torch's kernels have written for uninitialized memory, and the results of a comparison are such.
HOST_SIZE = 2**20


def to_compare(tensor: Tensor) -> Tensor:
    return tensor.cpu() if tensor.numel() <= HOST_SIZE else tensor


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "output") -> None:
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    actual, expected = to_compare(actual), to_compare(expected)
    bits = BITS[actual.element_size()]
    wrong = actual.contiguous().view(bits) != expected.contiguous().view(bits)
    assert not bool(wrong.any()), report(actual, expected, wrong, what)


# How many elements may round to the other side because a statistic was summed in another order: a change of an fp32
# value by 2^-22 crosses one rounding boundary in 2^14 (bf16) or 2^11 (fp16), for each rounding of the chain.
FLIPPED = {torch.bfloat16: 0.002, torch.float16: 0.01, torch.float32: 1.0}
# Elements of a row that have the same mantissa round alike, and bf16 has 128 mantissas: two of them may flip in a row.
ROW_FLIPPED = 2 / 128
FEW_FLIPPED = 6  # whatever the size: three elements, each of which a rotation mixes into two results


def assert_close_to_eager(
    actual: Tensor,
    eager: Tensor,
    terms: Tensor | None = None,
    *,
    flipped: float | None = None,
    steps: int = 4,
    what: str = "output",
) -> None:
    """The bits of eager code, but for a few elements that rounded the other way in one of at most `steps` roundings.

    Without `terms` not one element may differ (two nans are equal).
    """
    assert actual.dtype == eager.dtype, f"{what}: {actual.dtype}, expected {eager.dtype}"
    assert actual.shape == eager.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(eager.shape)}"
    wrong = (actual != eager) & ~(actual.isnan() & eager.isnan())
    if terms is None:
        assert not bool(wrong.any()), report(actual, eager, wrong, what)
        return
    expected = eager.double()
    error = (actual.double() - expected).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    unit = torch.finfo(actual.dtype).eps * (8 if actual.dtype == torch.float32 else 1)
    floor = torch.finfo(actual.dtype).smallest_normal * torch.finfo(actual.dtype).eps
    allowed = steps * unit * terms.nan_to_num(0.0, 0.0, 0.0) + floor
    far = wrong & (error > allowed)
    assert not bool(far.any()), report(actual, expected, far, f"{what} (far from eager)", error, allowed)
    limit = FLIPPED[actual.dtype] if flipped is None else flipped
    count = int(wrong.sum())
    assert count <= max(FEW_FLIPPED, limit * wrong.numel(), ROW_FLIPPED * wrong.shape[-1]), report(
        actual, expected, wrong, f"{what} (more than {limit:.2%} round otherwise)", error, allowed
    )
