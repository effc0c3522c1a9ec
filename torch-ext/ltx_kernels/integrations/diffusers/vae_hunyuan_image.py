"""HunyuanImage 2.1's decoder and encoder, for images: AutoencoderKL's blocks, and pixels that move into channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...channels_last import pixel_shuffle_3d
from ..blocks.autoencoder import Autoencoder, attention_between_pixels
from ..blocks.images import Images, convolved
from ..engine.autocast import group_norm, why_not_result
from ..engine.guards import class_of
from ._resnet import resnet
from ._vae_kl import TORCH_MODULES, why_not_kl

HUNYUAN = "diffusers.models.autoencoders.autoencoder_kl_hunyuanimage.HunyuanImage"
COMMON = TORCH_MODULES | {f"{HUNYUAN}{name}" for name in ("MidBlock", "ResnetBlock", "AttentionBlock")}


def _attention(attn: Any, h: Images) -> None:
    x = h.norm(attn.norm, "none")
    q, k, v = (
        F.conv2d(x, layer.weight, layer.bias).flatten(2).transpose(1, 2) for layer in (attn.to_q, attn.to_k, attn.to_v)
    )
    rows = attention_between_pixels(q, k, v)
    h.add(convolved(attn.proj, rows.transpose(1, 2).unflatten(2, x.shape[2:])), attn.proj.bias)


def _middle(block: Any, h: Images) -> None:
    resnet(block.resnets[0], h)
    for attn, after in zip(block.attentions, block.resnets[1:]):
        _attention(attn, h)
        resnet(after, h)


def _parts_last(x: Tensor) -> Tensor:
    """The channels (part of a pixel, C) of a weight or bias as (C, part), the order of `pixel_shuffle_3d`."""
    return x.unflatten(0, (4, -1)).transpose(0, 1).flatten(0, 1)


def _upsample(module: Any, h: Images) -> None:
    x, conv = h.upsampled(1), module.conv
    branch = F.conv2d(x, _parts_last(conv.weight), None, conv.stride, conv.padding)
    shortcut = x.movedim(1, -1).unflatten(-1, (4, -1)).transpose(-1, -2).repeat_interleave(module.repeats, -2)
    h.stream = pixel_shuffle_3d(
        branch.unsqueeze(2),
        (1, 2, 2),
        bias=_parts_last(conv.bias),
        residual=shortcut.flatten(-2).movedim(-1, 1).unsqueeze(2),
    ).squeeze(2)


def _pixels_to_channels(x: Tensor) -> Tensor:
    """[B, C, H, W] as [B, (2, 2, C), H / 2, W / 2], in channels-last memory."""
    x = x.movedim(1, -1).unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
    return x.permute(0, 1, 3, 2, 4, 5).flatten(3).movedim(-1, 1)


def _downsample(module: Any, h: Images) -> None:
    x = h.upsampled(1)
    h.stream = _mean_of_groups(_pixels_to_channels(x), module.group_size)
    h.add(_pixels_to_channels(convolved(module.conv, x)), module.conv.bias.repeat(4))


def _mean_of_groups(x: Tensor, size: int) -> Tensor:
    return x.unflatten(1, (-1, size)).mean(2)


def decode(self: Any, x: Tensor) -> Tensor:
    h = Images(convolved(self.conv_in, x), self.conv_in.bias)
    h.stream = x.repeat_interleave(self.repeat, 1)
    _middle(self.mid_block, h)
    for block in self.up_blocks:
        (_upsample if class_of(block) == HUNYUAN + "Upsample" else resnet)(block, h)
    return h.finished(self.norm_out, self.conv_out)


def encode(self: Any, x: Tensor) -> Tensor:
    h = Images(convolved(self.conv_in, x), self.conv_in.bias)
    for block in self.down_blocks:
        (_downsample if class_of(block) == HUNYUAN + "Downsample" else resnet)(block, h)
    _middle(self.mid_block, h)
    moments = Images(convolved(self.conv_out, h.norm(self.norm_out)), self.conv_out.bias)
    assert h.stream is not None
    moments.stream = _mean_of_groups(h.stream, self.group_size)
    return moments.upsampled(1).contiguous()


def _why_not(module: Any) -> str:
    for part in module.modules():
        name = class_of(part)
        if name == HUNYUAN + "ResnetBlock" and part.conv_shortcut is not None:
            return "a residual block changes the number of channels"
        if name == HUNYUAN + "Upsample":
            channels = part.conv.in_channels
            if channels % 4 or channels * part.repeats != part.conv.out_channels:
                return "an upsampler repeats its channels in another way"
    return why_not_kl(module)


def _check_call(module: Any, arguments: Mapping[str, Any]) -> str:
    return why_not_result(group_norm, arguments["x"])


ENTRIES = tuple(
    Autoencoder(
        (f"{HUNYUAN}{half}2D",),
        compute,
        ("x",),
        COMMON | {f"{HUNYUAN}{half}2D", f"{HUNYUAN}{step}"},
        _why_not,
        _check_call,
        dimensions=4,
    )
    for half, compute, step in (("Decoder", decode, "Upsample"), ("Encoder", encode, "Downsample"))
)
