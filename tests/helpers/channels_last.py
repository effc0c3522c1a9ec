"""Calls of the ops on channels-last videos: seeded inputs, and comparisons with the chain of plain torch ops."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from .cases import Make
from .tally import Tally

NORMS = ["rms", "rms_stepwise", "l2", "none"]
LAYOUTS = ["channels_last", "contiguous", "strided", "padded", "misaligned"]
OPERANDS = ["bias", "noise", "residual", "weight", "modulation", "tables"]
# In rounding steps of the largest result: a channel sum in another order may move a few results by a step, which the
# modulation then multiplies.
STEPS = 16
FLIPPED = 0.02  # of the results


def order_of(x: Tensor) -> torch.memory_format:
    return torch.channels_last_3d if x.dim() == 5 else torch.channels_last


def placed(x: Tensor, layout: str) -> Tensor:
    """An image or a video in another memory order, or inside a larger tensor."""
    if layout == "contiguous":
        return x.contiguous()
    x = x.contiguous(memory_format=order_of(x))
    if layout == "padded":  # the inside of a tensor that has one more frame, row and column on each side
        larger = torch.nn.functional.pad(x, (1,) * 2 * (x.dim() - 2)).contiguous(memory_format=order_of(x))
        return larger[(slice(None), slice(None), *[slice(1, -1)] * (x.dim() - 2))]
    if layout == "strided":
        return x.repeat_interleave(2, 1)[:, ::2]
    if layout == "misaligned":  # channels-last memory that begins at the second element of its storage
        return x.new_empty(x.numel() + 1)[1:].as_strided(x.shape, x.stride()).copy_(x)
    return x


@dataclasses.dataclass(frozen=True)
class Video:
    """A call of one op. `sizes`: batch, frames, height, width of the input; `channels` of the output."""

    op: str
    sizes: tuple[int, int, int, int]
    channels: int
    dtype: torch.dtype
    norm: str = "rms"
    operands: tuple[str, ...] = ()
    eps: float = 1e-6
    silu: bool = False
    padding: tuple[int, int] = (0, 0)
    reflect: bool = False
    upscale: tuple[int, int, int] = (2, 2, 2)
    residual_parts: int = 1  # of the input's channels, as many as the residual has
    skip_frames: int = 0
    clamp: bool = False
    layout: str = "channels_last"
    given_out: bool = False
    in_place: str = ""
    seed: int = 0

    def arguments(self, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        make = Make(device, self.dtype, self.seed)
        batch, frames, height, width = self.sizes
        channels = self.channels

        def video(count: int) -> Tensor:
            return placed(make(batch, count, frames, height, width), self.layout)

        if self.op == "pixel_shuffle_3d":
            parts = math.prod(self.upscale)
            keywords: dict[str, Any] = {"skip_frames": min(self.skip_frames, self.upscale[0] - 1)}
            if "bias" in self.operands:
                keywords["bias"] = make(channels * parts)
            if "residual" in self.operands:
                held = channels // self.residual_parts if channels % self.residual_parts == 0 else channels
                keywords["residual"] = video(held * parts)
            return (video(channels * parts), self.upscale), keywords
        if self.op == "unpatchify":
            patch = self.upscale[1]
            bias = {"bias": make(channels * patch**2)} if "bias" in self.operands else {}
            return (video(channels * patch**2), patch), {"clamp": self.clamp, **bias}
        keywords = {"norm": self.norm, "eps": self.eps, "activation": "silu" if self.silu else "none"}
        keywords |= {"padding": self.padding, "reflect": self.reflect and min(height, width) > 1}
        if "bias" in self.operands:
            keywords["bias"] = make(2 * channels)[::2]
        if "noise" in self.operands:
            keywords |= {"noise": make(height, width), "noise_scale": make(channels)}
        if "residual" in self.operands:
            keywords["residual"] = video(channels)
        if "weight" in self.operands:
            keywords["weight"] = make(channels)
        if "modulation" in self.operands:
            packed = make(batch, 4, channels)
            keywords |= {"scale": packed[:, 1], "shift": packed[:, 2]}
            if "tables" in self.operands:
                keywords |= {"scale_table": make(channels), "shift_table": make(channels)}
        return (video(channels),), keywords

    def run(self, f: Any, device: str, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """The results of the package or its reference, with the tensors converted to a dtype."""
        arguments, keywords = self.arguments(device)

        def converted(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and dtype else value

        given = {key: converted(value) for key, value in keywords.items()}
        result = getattr(f, self.op)(*map(converted, arguments), **given)
        return result if isinstance(result, tuple) else (result,)

    def check(self, ltx: Any, device: str, tally: Tally | None = None) -> None:
        """Against the same call in plain torch, which rounds at the same places, and in fp64."""
        eager, exact = self.run(ltx.reference, device), self.run(ltx.reference, device, torch.float64)
        results = self.run(ltx, device)
        outputs = []
        for got, wanted, truth in zip(results, eager, exact):
            allowed = self.compare(got, wanted, truth)
            known = truth.where(wanted.isfinite() & got.isfinite(), math.nan)
            outputs.append((got, known, torch.full_like(known, math.inf), torch.full_like(known, allowed)))
            plain = self.op == "unpatchify"
            assert got.is_contiguous(memory_format=torch.contiguous_format if plain else torch.channels_last_3d)
        if self.given_out:
            for got, again in zip(results, self.into(ltx, device, results)):
                assert torch.equal(got.nan_to_num(), again.nan_to_num())
        if tally is not None:
            tally.add_outputs(
                self.op, outputs
            )  # a rounding between two ops of torch has no bound in ulps of the result
            tally.add_eager(self.op, zip(results, eager))

    def into(self, ltx: Any, device: str, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The same call with outputs given: poisoned, or in place of an input."""
        arguments, keywords = self.arguments(device)
        outs = [torch.full_like(result, math.nan) for result in results]
        if self.op == "channel_norm_residual":
            name = self.in_place if self.in_place in keywords or self.in_place == "input" else ""
            if name:
                taken = arguments[0] if name == "input" else keywords[name]
                taken = taken.contiguous(memory_format=torch.channels_last_3d)
                arguments, keywords = (
                    ((taken,), keywords) if name == "input" else (arguments, {**keywords, name: taken})
                )
                outs[1] = taken
            result = ltx.channel_norm_residual(*arguments, **keywords, out=outs[0], residual_out=outs[1])
            assert result[0] is outs[0] and result[1] is outs[1]
        else:
            assert getattr(ltx, self.op)(*arguments, **keywords, out=outs[0]) is outs[0]
        return tuple(outs)

    def compare(self, got: Tensor, wanted: Tensor, truth: Tensor) -> float:
        """Returns the error that is allowed beside the truth."""
        assert got.shape == wanted.shape and got.dtype == wanted.dtype
        if got.numel() == 0:
            return 1.0
        finite = wanted.isfinite() & got.isfinite()
        assert torch.equal(got.isnan(), wanted.isnan())
        largest = torch.where(finite, wanted, 0).abs().max().item()
        step = torch.finfo(self.dtype).eps * largest
        difference = torch.where(finite, got.double() - wanted.double(), 0.0).abs()
        assert difference.max().item() <= STEPS * step
        if self.dtype != torch.float32:
            assert (difference > 0).sum().item() <= 3 + FLIPPED * got.numel()
        # Not further from the truth than plain torch is.
        own = torch.where(finite, got.double() - truth, 0.0).abs().max().item()
        theirs = torch.where(finite, wanted.double() - truth, 0.0).abs().max().item()
        allowed: float = 1.25 * theirs + STEPS / 4 * step
        assert own <= allowed
        return allowed or 1.0


def small_calls(dtype: torch.dtype) -> list[Video]:
    """A few calls of every op, with few operands and with all."""
    found = []
    for op in ("channel_norm", "channel_norm_residual", "pixel_shuffle_3d", "unpatchify"):
        found.append(Video(op, (1, 2, 3, 4), 8, dtype))
        edges: dict[str, Any] = {"padding": (1, 2), "reflect": True}
        found.append(Video(op, (2, 3, 2, 4), 8, dtype, "rms_stepwise", tuple(OPERANDS), layout="contiguous", **edges))
    return found
