"""The residual blocks of AutoencoderKL and of UNets: what stands between their convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...channels_last import upsample_nearest
from ..blocks.images import Images, branch_of
from ..engine.guards import class_of

MODELS = "diffusers.models."
RESNET = MODELS + "resnet.ResnetBlock2D"
UPSAMPLE = MODELS + "upsampling.Upsample2D"
DOWNSAMPLE = MODELS + "downsampling.Downsample2D"
SILU, GELU = "torch.nn.modules.activation.SiLU", "torch.nn.modules.activation.GELU"


def resnet(block: Any, h: Images) -> None:
    """The residual block of an autoencoder."""
    inner = Images(*branch_of(block.conv1, h.norm(block.norm1)))
    add_branch(block, h, inner.norm(block.norm2, last=True))


def add_branch(block: Any, h: Images, activated: Tensor) -> None:
    """Adds the second convolution of a residual block to the stream, or to what the shortcut makes of the stream."""
    branch = branch_of(block.conv2, activated)
    shortcut = block.conv_shortcut
    if shortcut is None:
        h.add(*branch)
    else:
        h.stream, bias = branch_of(shortcut, h.stream)  # type: ignore[arg-type]
        h.add(*branch, residual_bias=bias)


def doubles_pixels(upsample: Any) -> bool:
    """Whether an Upsample2D repeats each pixel twice in rows and columns, and then convolves or does nothing more."""
    usual = upsample.interpolate and upsample.name == "conv" and upsample.norm is None
    return bool(usual and not upsample.use_conv_transpose)


def halves_pixels(downsample: Any) -> bool:
    """Whether a Downsample2D takes the means of squares of four pixels, and does nothing more."""
    return bool(not downsample.use_conv and downsample.norm is None)


def unet_resnet(self: Any, input_tensor: Tensor, temb: Tensor | None) -> Tensor:
    """The stock forward of a UNet's residual block, which may also double or halve the pixels."""
    h = Images.of(input_tensor)
    x = _activated(self, h, self.norm1)
    if self.upsample is not None:
        x, h.stream = upsample_nearest(x, (2, 2)), h.upsampled(2)
    elif self.downsample is not None:
        x, h.stream = F.avg_pool2d(x, 2), F.avg_pool2d(input_tensor, 2)
    conv1 = branch_of(self.conv1, x)
    if temb is not None:
        temb = self.time_emb_proj(temb if self.skip_time_act else self.nonlinearity(temb))
    if temb is None or self.time_embedding_norm == "default":
        x = _activated(self, Images(*conv1, residual_bias=temb), self.norm2, last=True)
    else:
        scale, shift = temb[..., None, None].chunk(2, 1)
        x = torch.addcmul(shift, Images(*conv1).norm(self.norm2, "none", last=True), 1 + scale)
        x = F.silu(x) if class_of(self.nonlinearity) == SILU else self.nonlinearity(x)
    add_branch(self, h, x)
    output = h.upsampled(1)
    return output if self.output_scale_factor == 1 else output / self.output_scale_factor


def _activated(block: Any, h: Images, norm: nn.GroupNorm, last: bool = False) -> Tensor:
    if class_of(block.nonlinearity) == SILU:
        return h.norm(norm, last=last)
    activated: Tensor = block.nonlinearity(h.norm(norm, "none", last=last))
    return activated


def why_not_unet_resnet(block: Any) -> str:
    """Why `unet_resnet` cannot stand for a block; empty if it can."""
    activation = class_of(block.nonlinearity)
    if activation not in (SILU, GELU):
        return f"nonlinearity is {activation}"
    for name, expected, usual in (("upsample", UPSAMPLE, doubles_pixels), ("downsample", DOWNSAMPLE, halves_pixels)):
        part = getattr(block, name)
        if part is not None and not (class_of(part) == expected and usual(part)):
            return f"its {name} computes with a kernel, or more than one step"
    return ""


def check_unet_resnet(block: Any, arguments: Mapping[str, Any]) -> str:
    """Why it cannot take these arguments; empty if it can."""
    image, temb = arguments["input_tensor"], arguments.get("temb")
    if temb is None and block.time_embedding_norm == "scale_shift":
        return "no time embedding"
    if (temb is None) != (block.time_emb_proj is None):
        return "a time embedding without a layer for it, or the layer alone"
    if temb is not None and temb.shape[:-1] != image.shape[:1]:
        return f"a time embedding of shape {list(temb.shape)}"
    return ""
