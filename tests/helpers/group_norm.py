"""Calls of group_norm, group_norm_residual and upsample_nearest: seeded inputs, and comparisons with fp64."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cases import TINY, Make
from .channels_last import order_of, placed
from .numeric import assert_close_to_fp64, assert_same_bits
from .tally import Tally

OPS = ["group_norm", "group_norm_residual", "upsample_nearest"]
OPERANDS = ["bias", "residual", "residual_bias", "weight", "bias_norm"]


def per_channel(vector: Tensor, like: Tensor) -> Tensor:
    return vector.view(*vector.shape, *[1] * (like.dim() - 2))


@dataclasses.dataclass(frozen=True)
class Image:
    """A call of one op. `size`: the batch and the sizes of the pixels: H, W, or T, H, W."""

    op: str
    size: tuple[int, ...]
    channels: int
    groups: int
    dtype: torch.dtype
    operands: tuple[str, ...] = ()
    per_image: bool = False  # biases of the shape [B, C]
    mean: float = 0.0
    eps: float = 1e-6
    silu: bool = False
    scale: tuple[int, int] = (2, 2)
    layout: str = "channels_last"
    given_out: bool = False
    in_place: str = ""  # the operand whose memory gets the sum, or the result where there is no sum
    seed: int = 0

    @property
    def upsamples(self) -> bool:
        return self.op == "upsample_nearest"

    def arguments(self, device: str) -> dict[str, Any]:
        make = Make(device, self.dtype, self.seed)
        batch, *pixels = self.size

        def image(mean: float) -> Tensor:
            return placed(make(batch, self.channels, *pixels, mean=mean), self.layout)

        def bias() -> Tensor:
            return make(batch, 2 * self.channels)[:, ::2] if self.per_image else make(2 * self.channels)[::2]

        given: dict[str, Any] = {"input": image(self.mean)}
        if self.upsamples:
            given["scale"] = self.scale
        else:
            given |= {"groups": self.groups, "eps": self.eps, "activation": "silu" if self.silu else "none"}
        made = {"residual": lambda: image(0.0), "bias": bias, "residual_bias": bias}
        for name in OPERANDS:
            if name in self.operands and (name in made or not self.upsamples):
                given[name] = made.get(name, lambda: make(self.channels))()
        return given

    def run(self, f: Any, device: str) -> tuple[Tensor, ...]:
        result = getattr(f, self.op)(**self.arguments(device))
        return result if isinstance(result, tuple) else (result,)

    def check(self, ltx: Any, device: str, tally: Tally | None = None) -> None:
        """The sum has the bits of plain torch, and so have repeated pixels; a norm is as close to fp64 as its bound."""
        given, results = self.arguments(device), self.run(ltx, device)
        h = self.sum(given)
        for result in results:
            assert result.is_contiguous(memory_format=order_of(h)) and result.dtype == self.dtype
        if self.upsamples:
            rows, columns = self.scale
            assert_same_bits(results[0], h.repeat_interleave(rows, -2).repeat_interleave(columns, -1), self.op)
            truth = results[0].double()
            outputs = [(results[0], truth, truth.abs(), torch.ones_like(truth))]
        else:
            outputs = [self.check_norm(ltx, given, h, results[0])]
            if len(results) == 2:
                assert_same_bits(results[1], h, "sum")
        if self.given_out or self.in_place:
            for got, again in zip(results, self.into(ltx, given)):
                assert_same_bits(again, got, f"{self.op} into {self.in_place or 'given outputs'}")
        if tally is not None:
            tally.add_outputs(self.op, outputs)

    @staticmethod
    def sum(given: dict[str, Any]) -> Tensor:
        """h in plain torch."""
        h, residual = given["input"], given.get("residual")
        if "bias" in given:
            h = h + per_channel(given["bias"], h)
        if "residual_bias" in given:
            other = per_channel(given["residual_bias"], h)
            residual = other if residual is None else residual + other
        return h if residual is None else h + residual

    def check_norm(
        self, ltx: Any, given: dict[str, Any], h: Tensor, result: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The norm against fp64; SiLU against torch's, of the same op's result without it."""
        if self.silu:
            plain = ltx.group_norm(**{**given, "activation": "none"})
            assert_close_to_silu(result, plain)
            result = plain
        truth, terms = self.truth(given, h)
        allowed = assert_close_to_fp64(result, truth, terms, what=self.op)
        return result, truth, terms, allowed

    def truth(self, given: dict[str, Any], h: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of h in fp64, and its formula with each summand replaced by its absolute value."""
        x = h.double().unflatten(1, (self.groups, -1)).flatten(2)
        deviation = x - x.mean(2, keepdim=True)
        rstd = torch.rsqrt(deviation.square().mean(2, keepdim=True) + self.eps)
        magnitude = (x.abs() + x.abs().mean(2, keepdim=True)).clamp(min=TINY) * rstd
        truth, terms = (deviation * rstd).view(h.shape), magnitude.view(h.shape)
        if "weight" in given:
            weight = per_channel(given["weight"].double(), h)
            truth, terms = truth * weight, terms * weight.abs()
        if "bias_norm" in given:
            bias = per_channel(given["bias_norm"].double(), h)
            truth, terms = truth + bias, terms + bias.abs()
        return truth, terms

    def into(self, ltx: Any, given: dict[str, Any]) -> tuple[Tensor, ...]:
        """The same call with outputs given: poisoned, or the memory of an operand."""
        shapes = [tuple(result.shape) for result in self.run(ltx, given["input"].device.type)]
        outs = [given["input"].new_full(shape, math.nan).contiguous(memory_format=order_of(given["input"]))
                for shape in shapes]  # fmt: skip
        if self.in_place in given and not self.upsamples:
            taken = given[self.in_place].clone(memory_format=order_of(given["input"]))
            given, outs[-1] = {**given, self.in_place: taken}, taken
        names = ("out", "residual_out")
        result = getattr(ltx, self.op)(**given, **dict(zip(names, outs)))
        assert all(a is b for a, b in zip(result if isinstance(result, tuple) else (result,), outs))
        return tuple(outs)


def assert_close_to_silu(result: Tensor, x: Tensor) -> None:
    """The bits of torch's SiLU: on a GPU in 16 bits all, on the CPU but for a few that are a step away."""
    wanted = F.silu(x)
    same = (result == wanted) | (result.isnan() & wanted.isnan())
    if result.device.type == "cuda" and result.dtype != torch.float32:
        assert same.all()
        return
    steps = 4 if result.dtype == torch.float32 else 1
    far = (result - wanted).double().abs() > steps * torch.finfo(result.dtype).eps * wanted.double().abs() + 1e-7
    assert not (far & ~same).any()
    assert result.dtype == torch.float32 or (~same).sum() <= 3 + 0.01 * same.numel()


def small_images(dtype: torch.dtype) -> list[Image]:
    """A few calls of every op, with few operands and with all."""
    found = []
    for op in OPS:
        found.append(Image(op, (1, 3, 4), 8, 2, dtype))
        every: dict[str, Any] = {"operands": tuple(OPERANDS), "per_image": True, "silu": True, "layout": "contiguous"}
        found.append(Image(op, (2, 3, 2, 4), 8, 4, dtype, **every))
    return found
