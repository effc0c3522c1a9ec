"""Decoders of AutoencoderKL and AutoencoderKLFlux2, for images: all that stands between two convolutions is one op."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..blocks.autoencoder import Autoencoder
from ..blocks.images import Images, convolved
from ..engine.guards import class_of
from ._resnet import MODELS, UPSAMPLE, doubles_pixels, resnet
from ._vae_kl import COMMON, check_call, middle, why_not_kl


def decode(self: Any, sample: Tensor, latent_embeds: Tensor | None = None) -> Tensor:
    h = Images(convolved(self.conv_in, sample), self.conv_in.bias)
    middle(self.mid_block, h)
    for block in self.up_blocks:
        for layer in block.resnets:
            resnet(layer, h)
        for upsampler in block.upsamplers or ():
            h.add(convolved(upsampler.conv, h.upsampled(2)), upsampler.conv.bias)
    return h.finished(self.conv_norm_out, self.conv_out)


def _why_not(decoder: Any) -> str:
    if not all(doubles_pixels(part) and part.use_conv for part in decoder.modules() if class_of(part) == UPSAMPLE):
        return "its upsamplers do not double the pixels before one convolution"
    return why_not_kl(decoder)


ENTRIES = (
    Autoencoder(
        (MODELS + "autoencoders.vae.Decoder",),
        decode,
        ("sample", "latent_embeds"),
        COMMON | {MODELS + "autoencoders.vae.Decoder", MODELS + "unets.unet_2d_blocks.UpDecoderBlock2D", UPSAMPLE},
        _why_not,
        check_call,
        dimensions=4,
    ),
)
