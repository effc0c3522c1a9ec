"""Encoders of LTX-Video's and LTX-2's autoencoders, for image-to-video: the decoders' blocks, and steps downwards."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...channels_last import unpatchify
from ..blocks.autoencoder import Autoencoder, Form, Hidden, space_to_depth
from ..engine.guards import class_of
from ._vae_ltx import COMMON, LTX, LTX2, check_ltx2, ltx2_form, ltx_form, resnet, why_not_ltx


def _downsample(form: Form, module: Any, h: Hidden) -> None:
    if class_of(module).endswith("CausalConv3d"):  # with a stride
        h.add(form.conv(module, h.padded()), module.conv.bias)
        return
    # The stock module repeats the first frame, so that the frames divide, before it pads.
    front, back = form.padding
    x = h.padded((front + module.stride[0] - 1, back))
    residual = space_to_depth(form.interior(x), module.stride)
    h.stream = residual.unflatten(1, (-1, module.group_size)).mean(2)
    places = math.prod(module.stride)
    branch = form.conv(module.conv, x)
    del x, residual
    h.add(space_to_depth(branch, module.stride), module.conv.conv.bias.repeat_interleave(places))


def _encode(self: Any, video: Tensor, form: Form) -> Tensor:
    patch = self.patch_size
    x = video.unflatten(4, (-1, patch)).unflatten(3, (-1, patch))  # [B, C, T, H, p, W, q]
    x = x.permute(0, 2, 3, 5, 1, 6, 4).flatten(4, 6).movedim(-1, 1)  # channels (C, q, p), in channels-last memory
    h = Hidden(form, form.conv(self.conv_in, Hidden(form, x).padded()), self.conv_in.conv.bias)
    del x
    for down_block in self.down_blocks:
        for block in down_block.resnets:
            resnet(form, block, h)
        for downsampler in down_block.downsamplers or ():
            _downsample(form, downsampler, h)
        if getattr(down_block, "conv_out", None) is not None:
            resnet(form, down_block.conv_out, h)
    for block in self.mid_block.resnets:
        resnet(form, block, h)
    branch = form.conv(self.conv_out, h.norm({}, last=True))
    moments = unpatchify(branch, 1, bias=self.conv_out.conv.bias)
    # The last channel is the logarithm of the variance of all others.
    return torch.cat([moments, moments[:, -1:].expand(-1, moments.shape[1] - 2, -1, -1, -1)], 1)


def ltx_encode(self: Any, hidden_states: Tensor) -> Tensor:
    return _encode(self, hidden_states, ltx_form(self))


def ltx2_encode(self: Any, hidden_states: Tensor, causal: bool | None = None) -> Tensor:
    return _encode(self, hidden_states, ltx2_form(self, causal))


def _why_not(encoder: Any) -> str:
    if encoder.mid_block.time_embedder is not None:
        return "it takes a timestep"
    steps = [step for block in encoder.down_blocks for step in block.downsamplers or () if hasattr(step, "group_size")]
    if any(step.stride[0] > 2 for step in steps):
        return "it has a step of more than two frames"
    return why_not_ltx(encoder, strided=True)


NAMES = ("Encoder3d", "DownBlock3D", "095DownBlock3D", "Downsampler3d")
KNOWN = COMMON | {f"{family}{name}" for family in (LTX, LTX2) for name in NAMES}

ENTRIES = (
    Autoencoder((f"{LTX}Encoder3d",), ltx_encode, ("hidden_states",), KNOWN, _why_not),
    Autoencoder((f"{LTX2}Encoder3d",), ltx2_encode, ("hidden_states", "causal"), KNOWN, _why_not, check_ltx2),
)
