"""Decoders of Wan's (2.1, 2.2) and Qwen-Image's autoencoders: frame by frame, with a cache of the frames before."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...channels_last import pixel_shuffle_3d, unpatchify
from ..blocks.autoencoder import Autoencoder, Hidden
from ..engine.guards import class_of
from ._vae_wan import (
    COMMON,
    FAMILIES,
    FORM,
    WAN,
    Frames,
    as_images,
    as_video,
    check_call,
    middle,
    resnet,
    why_not_wan,
)


def _repeated(x: Tensor, times: tuple[int, int, int], parts: tuple[int, ...] = (1, 1, 1)) -> Tensor:
    """Each voxel `times` over in frames, rows and columns, in channels-last memory.

    Where `parts` are given, the channels are (C, parts), and each copy in that direction takes its part.
    """
    x = x.unflatten(1, (-1, *parts))  # [B, C, i, j, k, T, H, W]
    batch, channels, *_, frames, height, width = x.shape
    x = x.expand(batch, channels, *times, frames, height, width).permute(0, 5, 2, 6, 3, 7, 4, 1)
    t, h, w = times
    return x.reshape(batch, frames * t, height * h, width * w, channels).movedim(-1, 1)


def _parts(shortcut: Any) -> tuple[int, ...]:
    """Into how many parts the channels go in each direction, of a shortcut that repeats the others."""
    left, parts = shortcut.factor // shortcut.repeats, []
    for times in (shortcut.factor_t, shortcut.factor_s, shortcut.factor_s):
        parts.append(math.gcd(times, left))
        left //= parts[-1]
    return tuple(parts)


def _interleaved(x: Tensor) -> Tensor:
    """The halves of the first dimension in turns, as `pixel_shuffle_3d` takes them."""
    return x.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


def _upsample(module: Any, h: Hidden, frames: Frames) -> None:
    if module.mode == "upsample3d" and not frames.skips_first("Rep"):
        time = module.time_conv
        x = frames.conv(h, time, weight=_interleaved(time.weight))
        h.stream = pixel_shuffle_3d(x, (2, 1, 1), bias=_interleaved(time.bias))
    x, conv = h.upsampled(2), module.resample[1]
    batch = x.shape[0]
    h.add(as_video(F.conv2d(as_images(x), conv.weight, None, conv.stride, conv.padding), batch), conv.bias)


def decode(
    self: Any, x: Tensor, feat_cache: list[Any], feat_idx: list[int], first_chunk: bool | None = False
) -> Tensor:
    frames = Frames(feat_cache, feat_idx)
    h = Hidden(FORM, frames.conv(Hidden(FORM, x), self.conv_in), self.conv_in.bias)
    middle(self.mid_block, h, frames)
    for block in self.up_blocks:
        first, *others = block.resnets
        given = resnet(first, h, frames)
        shortcut = getattr(block, "avg_shortcut", None)
        if shortcut is None:
            del given
        for other in others:
            resnet(other, h, frames)
        upsampler = block.upsampler if hasattr(block, "upsampler") else (block.upsamplers or [None])[0]
        if upsampler is not None:
            _upsample(upsampler, h, frames)
        if shortcut is not None:
            times = shortcut.factor_t, shortcut.factor_s, shortcut.factor_s
            skipped = shortcut.factor_t - 1 if first_chunk else 0
            h.stream = _repeated(given, times, _parts(shortcut))[:, :, skipped:]
            del given
    branch = frames.conv(h, self.conv_out, self.norm_out, last=True)
    return unpatchify(branch, 1, bias=self.conv_out.bias)


def _why_not(decoder: Any) -> str:
    for part in decoder.modules():
        name = class_of(part)
        if name.endswith("Resample") and part.mode not in ("upsample2d", "upsample3d"):
            return f"it holds a step of mode {part.mode}"
        if name.endswith("Upsample") and (part.scale_factor, part.mode) != ((2.0, 2.0), "nearest-exact"):
            return "it does not double rows and columns"
        if name == WAN + "DupUp3D" and part.repeats * math.prod(_parts(part)) != part.factor:
            return "it holds a shortcut with other numbers of channels"
    return why_not_wan(decoder)


KNOWN = (
    COMMON
    | {f"{family}{name}" for family in FAMILIES for name in ("Decoder3d", "UpBlock", "Upsample")}
    | {f"{WAN}WanResidualUpBlock", f"{WAN}DupUp3D"}
)
PARAMETERS = ("x", "feat_cache", "feat_idx")

ENTRIES = tuple(
    Autoencoder((f"{family}Decoder3d",), decode, parameters, KNOWN, _why_not, check_call, keeps_frames=True)
    for family, parameters in zip(FAMILIES, ((*PARAMETERS, "first_chunk"), PARAMETERS))
)
