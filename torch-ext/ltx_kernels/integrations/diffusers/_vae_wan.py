"""What Wan's and Qwen-Image's encoders and decoders share: cached causal convolutions, blocks, attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..blocks.autoencoder import TORCH_MODULES, Form, Hidden, attention_between_pixels, why_not_convolution
from ..blocks.images import VIDEO
from ..engine.guards import class_of

WAN = "diffusers.models.autoencoders.autoencoder_kl_wan."
FAMILIES = (f"{WAN}Wan", "diffusers.models.autoencoders.autoencoder_kl_qwenimage.QwenImage")
SHARED = ("MidBlock", "ResidualBlock", "AttentionBlock", "Resample", "CausalConv3d", "RMS_norm")
COMMON = frozenset(
    [
        *(f"{family}{name}" for family in FAMILIES for name in SHARED),
        *TORCH_MODULES,
        *(f"torch.nn.modules.{name}" for name in ("container.Sequential", "conv.Conv2d", "linear.Identity")),
    ]
)
FORM = Form("l2", 1e-12)


class Frames:
    """The last frames that each causal convolution has read: the list that the stock modules keep, in their order.

    It holds what the stock modules put there, so that a later call may run either: None before the first call, "Rep"
    for a step in time that has not run, or a tensor. Frames that it lacks are zeros.
    """

    def __init__(self, cache: list[Any], index: list[int]) -> None:
        self.cache, self.index = cache, index

    def skips_first(self, mark: Any) -> bool:
        """Whether the next convolution has not run yet. It is left out then, and a mark stands for its frames."""
        place = self.index[0]
        if self.cache[place] is not None:
            return False
        self.cache[place] = mark
        self.index[0] += 1
        return True

    def conv(
        self,
        h: Hidden,
        module: Any,
        norm: Any = None,
        *,
        last: bool = False,
        before: int = 2,
        weight: Tensor | None = None,
    ) -> Tensor:
        """A convolution, without its bias, of the sum after the frames that were before it.

        One frame that follows no others is convolved in two dimensions, with the last slice of the weight: the other
        slices would only multiply zeros. Images, and the first frame of every clip, are such frames.

        Args:
            norm: Normalises and activates the sum first. Without it, and with `last`, the stream starts anew.
            before: How many frames the convolution looks back.
            weight: Stands in for the module's.
        """
        batch, channels, frames, height, width = h.like.shape
        weight = module.weight if weight is None else weight
        columns, _, rows, *_ = module._padding
        place = self.index[0]
        self.index[0] += 1
        held = self.cache[place]
        missing = before - min(before, held.shape[2]) if isinstance(held, Tensor) else before
        if frames == 1 and missing == before:
            x = self.cache[place] = self._read(h, norm, last)
            images = F.conv2d(as_images(x), weight[:, :, -1], None, module.stride[1:], (rows, columns))
            return as_video(images, batch)
        shape = batch, channels, before + frames, height, width
        x = torch.empty(shape, dtype=h.like.dtype, device=h.like.device, memory_format=VIDEO)
        x[:, :, :missing] = 0
        if missing < before:
            x[:, :, missing:before] = held[:, :, missing - before :]
        self._read(h, norm, last, out=x[:, :, before:])
        self.cache[place] = x[:, :, frames:].clone()
        return F.conv3d(x, weight, None, module.stride, (0, rows, columns))

    @staticmethod
    def _read(h: Hidden, norm: Any, last: bool, out: Tensor | None = None) -> Tensor:
        if norm is None:
            return h.padded(out=out)
        return h.norm({"weight": norm.gamma.flatten()}, last=last, out=out)


def resnet(block: Any, h: Hidden, frames: Frames) -> Tensor:
    """A residual block; returns what it was given."""
    branch = frames.conv(h, block.conv1, block.norm1)
    given = h.stream
    assert given is not None
    inner = Hidden(FORM, branch, block.conv1.bias)
    del branch
    branch = frames.conv(inner, block.conv2, block.norm2, last=True)
    if not isinstance(block.conv_shortcut, nn.Identity):
        h.stream = F.conv3d(given, block.conv_shortcut.weight, block.conv_shortcut.bias)
    h.add(branch, block.conv2.bias)
    return given


def attention(block: Any, h: Hidden) -> None:
    """Attention of one head between the voxels of each frame."""
    x = h.norm({"weight": block.norm.gamma.flatten()}, activation="none")
    batch, _, _, height, width = x.shape
    qkv = F.conv2d(as_images(x), block.to_qkv.weight, block.to_qkv.bias)
    q, k, v = qkv.flatten(2).transpose(1, 2).unsqueeze(1).contiguous().chunk(3, -1)
    x = attention_between_pixels(q, k, v).squeeze(1).transpose(1, 2).unflatten(2, (height, width))
    h.add(as_video(F.conv2d(x, block.proj.weight), batch), block.proj.bias)


def middle(block: Any, h: Hidden, frames: Frames) -> None:
    resnet(block.resnets[0], h, frames)
    for attn, after in zip(block.attentions, block.resnets[1:]):
        if attn is not None:
            attention(attn, h)
        resnet(after, h, frames)


def as_images(x: Tensor) -> Tensor:
    """[B, C, T, H, W] as [B * T, C, H, W]: a view of dense channels-last memory."""
    return x.transpose(1, 2).flatten(0, 1)


def as_video(x: Tensor, batch: int) -> Tensor:
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def why_not_wan(module: nn.Module) -> str:
    """Why an encoder or decoder has a structure that this does not fit; empty if it does."""
    for part in module.modules():
        name = class_of(part)
        reason = why_not_convolution(part, strided=True)
        if reason:
            return reason
        if name.endswith("RMS_norm") and (not part.channel_first or isinstance(part.bias, Tensor)):
            return "its norms have a bias, or channels in another place"
        if isinstance(part, (nn.Conv2d, nn.Conv3d)) and part.padding_mode != "zeros":
            return "its convolutions pad with something else than zeros"
    return ""


def check_call(module: Any, arguments: Mapping[str, Any]) -> str:
    given = isinstance(arguments.get("feat_cache"), list) and isinstance(arguments.get("feat_idx"), list)
    return "" if given else "no cache of frames"
