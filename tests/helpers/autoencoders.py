"""What the tests of video and image autoencoders share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def calls(report: Any, half: str = "decoder") -> int:
    (site,) = [site for site in report.sites if half in site.name.lower()]
    count: int = site.calls
    return count


def reason_of(report: Any) -> str:
    """The reason of the only call that ran the stock forward."""
    (reasons,) = report.fallbacks.values()
    ((reason, count),) = reasons.items()
    assert count == 1
    return str(reason)


def close(result: Tensor, stock: Tensor) -> None:
    torch.testing.assert_close(result, stock, rtol=1e-4, atol=1e-4 * stock.abs().max().item())


def error(result: Tensor, truth: Tensor) -> float:
    return ((result.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt()).item()
