"""The residual block of AutoencoderKL and of UNets, and their upsampling: what each stands for between convolutions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..blocks.images import Images, branch_of

MODELS = "diffusers.models."
RESNET = MODELS + "resnet.ResnetBlock2D"
UPSAMPLE = MODELS + "upsampling.Upsample2D"


def resnet(block: Any, h: Images, shift: Tensor | None = None) -> None:
    """shift: [B, C] that the first convolution's result is moved by, such as a UNet's time embedding."""
    inner = Images(*branch_of(block.conv1, h.norm(block.norm1)), residual_bias=shift)
    branch = branch_of(block.conv2, inner.norm(block.norm2, last=True))
    shortcut = block.conv_shortcut
    if shortcut is None:
        h.add(*branch)
    else:
        h.stream, bias = branch_of(shortcut, h.stream)  # type: ignore[arg-type]
        h.add(*branch, residual_bias=bias)


def doubles_pixels(upsample: Any) -> bool:
    """Whether an Upsample2D repeats each pixel twice in rows and columns, and then convolves."""
    usual = upsample.use_conv and upsample.interpolate and upsample.name == "conv" and upsample.norm is None
    return bool(usual and not upsample.use_conv_transpose)
