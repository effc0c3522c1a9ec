"""Encoders of Wan's (2.1, 2.2) and Qwen-Image's autoencoders: the decoders' blocks, and steps downwards."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...channels_last import unpatchify
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


def _downsample(module: Any, h: Hidden, frames: Frames) -> None:
    x = h.padded()
    pad, conv = module.resample
    images = F.pad(as_images(x), pad.padding)
    h.add(as_video(F.conv2d(images, conv.weight, None, conv.stride), x.shape[0]), conv.bias)
    if module.mode != "downsample3d":
        return
    x = h.padded()
    h.add(x)
    if not frames.skips_first(x[:, :, -1:]):
        h.add(frames.conv(h, module.time_conv, before=1), module.time_conv.bias)


def _down_block(block: Any, h: Hidden, frames: Frames) -> None:
    given = None
    for layer in block.resnets:
        entered = resnet(layer, h, frames)
        given = entered if given is None else given
    if block.downsampler is not None:
        _downsample(block.downsampler, h, frames)
    h.add(h.padded())
    h.stream = block.avg_shortcut(given)


def encode(self: Any, x: Tensor, feat_cache: list[Any], feat_idx: list[int]) -> Tensor:
    frames = Frames(feat_cache, feat_idx)
    h = Hidden(FORM, frames.conv(Hidden(FORM, x), self.conv_in), self.conv_in.bias)
    for layer in self.down_blocks:
        name = class_of(layer)
        if name.endswith("ResidualDownBlock"):
            _down_block(layer, h, frames)
        elif name.endswith("ResidualBlock"):
            resnet(layer, h, frames)
        else:
            _downsample(layer, h, frames)
    middle(self.mid_block, h, frames)
    branch = frames.conv(h, self.conv_out, self.norm_out, last=True)
    return unpatchify(branch, 1, bias=self.conv_out.bias)


def _why_not(encoder: Any) -> str:
    if any(class_of(layer).endswith("AttentionBlock") for layer in encoder.down_blocks):
        return "it holds attention between its steps, which the stock forward cannot call with a cache"
    for part in encoder.modules():
        if class_of(part).endswith("Resample") and part.mode not in ("downsample2d", "downsample3d"):
            return f"it holds a step of mode {part.mode}"
    return why_not_wan(encoder)


KNOWN = COMMON | {
    *(f"{family}Encoder3d" for family in FAMILIES),
    f"{WAN}WanResidualDownBlock",
    f"{WAN}AvgDown3D",
    "torch.nn.modules.padding.ZeroPad2d",
}

ENTRIES = tuple(
    Autoencoder(
        (f"{family}Encoder3d",),
        encode,
        ("x", "feat_cache", "feat_idx"),
        KNOWN,
        _why_not,
        check_call,
        keeps_frames=True,
    )
    for family in FAMILIES
)
