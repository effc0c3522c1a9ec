"""The residual block of AutoencoderKL and of UNets, and their upsampling: what each stands for between convolutions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..blocks.images import Images, branch_of

MODELS = "diffusers.models."
RESNET = MODELS + "resnet.ResnetBlock2D"
UPSAMPLE = MODELS + "upsampling.Upsample2D"
DOWNSAMPLE = MODELS + "downsampling.Downsample2D"


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
