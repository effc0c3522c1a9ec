"""Encoders of AutoencoderKL and AutoencoderKLFlux2, for image-to-image: the decoders' blocks, and steps downwards."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..blocks.autoencoder import Autoencoder
from ..blocks.images import Images, convolved
from ..engine.guards import class_of
from ._resnet import MODELS, resnet
from ._vae_kl import COMMON, check_call, middle, why_not_kl

DOWNSAMPLE = MODELS + "downsampling.Downsample2D"


def encode(self: Any, sample: Tensor) -> Tensor:
    h = Images(convolved(self.conv_in, sample), self.conv_in.bias)
    for block in self.down_blocks:
        for layer in block.resnets:
            resnet(layer, h)
        for downsampler in block.downsamplers or ():
            x = h.upsampled(1)
            x = F.pad(x, (0, 1, 0, 1)) if downsampler.padding == 0 else x
            h.add(convolved(downsampler.conv, x), downsampler.conv.bias)
    middle(self.mid_block, h)
    return h.finished(self.conv_norm_out, self.conv_out)


def _why_not(encoder: Any) -> str:
    steps = [part for part in encoder.modules() if class_of(part) == DOWNSAMPLE]
    if any(not step.use_conv or step.norm is not None for step in steps):
        return "its steps downwards are no convolutions, or have a norm"
    return why_not_kl(encoder)


ENTRIES = (
    Autoencoder(
        (MODELS + "autoencoders.vae.Encoder",),
        encode,
        ("sample",),
        COMMON | {MODELS + "autoencoders.vae.Encoder", MODELS + "unets.unet_2d_blocks.DownEncoderBlock2D", DOWNSAMPLE},
        _why_not,
        check_call,
        dimensions=4,
    ),
)
