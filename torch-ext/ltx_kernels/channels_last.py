"""Ops on images and videos in channels-last memory, for the decoders and encoders of autoencoders.

Videos are [B, C, T, H, W] in ``torch.channels_last_3d`` memory, the layout that cuDNN's convolutions want, and images
[B, C, H, W] in ``torch.channels_last`` memory; any other layout is copied into it first. `group_norm` and
`upsample_nearest` take both, the other ops take videos. All tensors of a call have one dtype. Every step rounds to that
dtype, because the stock modules run each step as an op of its own: the results have the bits of that chain, up to the
order of the sums of a norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._call import op
from ._checks import (
    CHANNEL_ACTIVATION,
    CHANNEL_NORM,
    channel_norm_shape,
    channels_last_order,
    check_image_or_video,
    check_type,
    choice,
)

_channel_norm = op("channel_norm")
_channel_norm_residual = op("channel_norm_residual")
_pixel_shuffle = op("pixel_shuffle")
_unpatchify = op("unpatchify")
_group_norm = op("group_norm")
_group_norm_residual = op("group_norm_residual")
_upsample_nearest = op("upsample_nearest")


def channel_norm(
    input: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    norm: str = "rms",
    bias: Tensor | None = None,
    noise: Tensor | None = None,
    noise_scale: Tensor | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    scale_table: Tensor | None = None,
    shift_table: Tensor | None = None,
    activation: str = "none",
    padding: Sequence[int] = (0, 0),
    reflect: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Norm over the channels of each voxel, with what stands around it between two convolutions.

    Equivalent to::

        h = input + bias[:, None, None, None]                          # where given, as each step below
        h = h + (noise * noise_scale[:, None, None])[:, None]
        h = h + residual
        mean = h.float().pow(2).mean(1, keepdim=True)
        y = (h * torch.rsqrt(mean + eps)).to(h.dtype)                  # norm="rms"
        y = h / torch.sqrt((h**2).mean(1, keepdim=True) + eps)         # norm="rms_stepwise"
        y = F.normalize(h.float(), dim=1, eps=eps).to(h.dtype) * C**0.5     # norm="l2"
        y = h                                                          # norm="none"
        y = y * weight[:, None, None, None]
        y = y * (1 + (scale + scale_table)[..., None, None, None]) + (shift + shift_table)[..., None, None, None]
        y = F.silu(y)                                                  # activation="silu"
        y = torch.cat([y[:, :, :1]] * padding[0] + [y] + [y[:, :, -1:]] * padding[1], 2)
        y = F.pad(y, (1, 1, 1, 1, 0, 0), mode="reflect")               # reflect=True

    Args:
        input: [B, C, T, H, W], float32, float16 or bfloat16, fastest in channels-last memory: what a convolution
            without its bias returned. Every other tensor has its dtype and device.
        weight: None, or [C].
        eps: Added to the mean of the squares; with ``norm="l2"`` the least divisor.
        norm: "rms" (diffusers' RMSNorm over channels), "rms_stepwise" (LTX-2's PerChannelRMSNorm, whose every step is
            rounded), "l2" (Wan's RMS_norm) or "none".
        bias: None, or [C]: the bias of the convolution that made the input.
        noise: None, or [H, W], the same for all channels and frames; ``noise_scale``: [C]. Both or neither.
        residual: None, or a tensor of the input's shape.
        scale: None, or [B, C]; ``shift`` likewise. Both or neither.
        scale_table: None, or [C], added to scale; ``shift_table`` likewise.
        activation: "none" or "silu".
        padding: Copies of the first frame before the result, and of the last one after it.
        reflect: Mirror one row and column at each edge of the frames.
        out: Where to write, in channels-last memory, of the result's shape, the input's dtype and device.

    Returns:
        [B, C, padding[0] + T + padding[1], H (+ 2), W (+ 2)] in channels-last memory; ``out`` where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit (the text names the argument, what was expected and what
            came), or ``out`` is given where a gradient is needed.
        ValueError: An unknown ``norm`` or ``activation``.

    Source: AutoencoderKLLTXVideo, AutoencoderKLLTX2Video and AutoencoderKLWan (diffusers).
    """
    return _channel_norm(
        out, input, bias, noise, noise_scale, residual, weight, scale, shift, scale_table, shift_table, eps,
        choice("norm", CHANNEL_NORM, norm), choice("activation", CHANNEL_ACTIVATION, activation),
        _edges(padding, reflect),
    )  # fmt: skip


def channel_norm_residual(
    input: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    norm: str = "rms",
    bias: Tensor | None = None,
    noise: Tensor | None = None,
    noise_scale: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    scale_table: Tensor | None = None,
    shift_table: Tensor | None = None,
    activation: str = "none",
    padding: Sequence[int] = (0, 0),
    reflect: bool = False,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`channel_norm` that also returns the sum that it normalises: the residual stream.

    Equivalent to::

        h = input + bias[:, None, None, None] + (noise * noise_scale[:, None, None])[:, None] + residual
        channel_norm(h, weight, eps, norm=norm, ...), h

    Args:
        input: [B, C, T, H, W], as in `channel_norm`, which describes all other arguments too.
        residual: None, or a tensor of the input's shape.
        weight: None, or [C].
        eps: Added to the mean of the squares; with ``norm="l2"`` the least divisor.
        norm: "rms", "rms_stepwise", "l2" or "none".
        bias: None, or [C].
        noise: None, or [H, W]; ``noise_scale``: [C].
        scale: None, or [B, C]; ``shift`` likewise.
        scale_table: None, or [C], added to scale; ``shift_table`` likewise.
        activation: "none" or "silu".
        padding: Copies of the first frame before the first result, and of the last one after it.
        reflect: Mirror one row and column at each edge of the first result's frames.
        out: Where to write the first result.
        residual_out: Where to write the sum; it may be the memory of ``input`` or of ``residual``.

    Returns:
        (normalised and padded, sum), both in channels-last memory.

    Raises:
        RuntimeError: A shape, dtype or device does not fit, or an output is given where a gradient is needed.
        ValueError: An unknown ``norm`` or ``activation``.

    Source: AutoencoderKLLTXVideo, AutoencoderKLLTX2Video and AutoencoderKLWan (diffusers).
    """
    edges = _edges(padding, reflect)
    outs = None
    if out is not None or residual_out is not None:
        check_type("input", "Tensor", input)
        outs = (
            _empty_padded(input, edges) if out is None else out,
            _empty_padded(input, (0, 0, 0)) if residual_out is None else residual_out,
        )
    return _channel_norm_residual(
        outs, input, bias, noise, noise_scale, residual, weight, scale, shift, scale_table, shift_table, eps,
        choice("norm", CHANNEL_NORM, norm), choice("activation", CHANNEL_ACTIVATION, activation), edges,
    )  # fmt: skip


def _edges(padding: Sequence[int], reflect: bool) -> tuple[int, ...]:
    """The padding as the ops take it."""
    check_type("padding", "Sequence[int]", padding)
    check_type("reflect", "bool", reflect)
    return (*padding, int(bool(reflect)))


def _empty_padded(input: Tensor, edges: tuple[int, ...]) -> Tensor:
    shape = channel_norm_shape(input, edges)
    return torch.empty(shape, dtype=input.dtype, device=input.device, memory_format=torch.channels_last_3d)


def pixel_shuffle_3d(
    input: Tensor,
    upscale: Sequence[int],
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    skip_frames: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Moves channels into frames, rows and columns: the upsampling of video autoencoders.

    Equivalent to::

        def shuffle(x):                                                # t, h, w = upscale
            x = x.unflatten(1, (-1, t, h, w))                          # [B, C, t, h, w, T, H, W]
            return x.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(6, 7).flatten(4, 5).flatten(2, 3)

        out = shuffle(input + bias[:, None, None, None])
        extra = shuffle(residual)
        out = out + extra.repeat(1, out.shape[1] // extra.shape[1], 1, 1, 1)
        out = out[:, :, skip_frames:]

    Args:
        input: [B, C * t * h * w, T, H, W], float32, float16 or bfloat16, fastest in channels-last memory.
        upscale: (t, h, w): by how much frames, rows and columns grow.
        bias: None, or [C * t * h * w], of the input's dtype: the bias of the convolution that made the input.
        residual: None, or a tensor of the input's dtype and voxels that is shuffled alike; its channels are a multiple
            of t * h * w and divide the input's.
        skip_frames: First frames to leave out, fewer than t.
        out: Where to write, dense in channels-last memory.

    Returns:
        [B, C, T * t - skip_frames, H * h, W * w] in channels-last memory; ``out`` where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit, or ``out`` is given where a gradient is needed.

    Source: LTXVideoUpsampler3d (diffusers); torch.nn.PixelShuffle in two dimensions.
    """
    return _pixel_shuffle(out, input, bias, residual, upscale, skip_frames)


def unpatchify(
    input: Tensor,
    patch_size: int,
    *,
    bias: Tensor | None = None,
    clamp: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Moves channels into square patches of each frame: the last step of a decoder.

    Equivalent to::

        x = (input + bias[:, None, None, None]).unflatten(1, (-1, patch_size, patch_size))   # [B, C, q, p, T, H, W]
        x = x.permute(0, 1, 4, 5, 3, 6, 2).flatten(5, 6).flatten(3, 4)                       # H and p, W and q
        x = x.clamp(-1, 1)                                                                   # clamp=True

    Args:
        input: [B, C * patch_size**2, T, H, W], float32, float16 or bfloat16, fastest in channels-last memory.
        patch_size: Rows and columns of a patch.
        bias: None, or [C * patch_size**2], of the input's dtype.
        clamp: Limit the result to [-1, 1].
        out: Where to write, contiguous.

    Returns:
        [B, C, T, H * patch_size, W * patch_size], contiguous in this order; ``out`` where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit, or ``out`` is given where a gradient is needed.

    Source: LTXVideoDecoder3d and the unpatchify of AutoencoderKLWan (diffusers).
    """
    return _unpatchify(out, input, bias, patch_size, clamp)


def group_norm(
    input: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias_norm: Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    activation: str = "none",
    out: Tensor | None = None,
) -> Tensor:
    """Group norm of an image or video, with what stands before it and after it in a residual block.

    Equivalent to::

        h = input + bias.view(-1, C, 1, 1)                             # where given, as each operand below
        h = h + (residual + residual_bias.view(-1, C, 1, 1))
        y = F.group_norm(h, groups, weight, bias_norm, eps)
        y = F.silu(y)                                                  # activation="silu"

    The mean and the variance are float32. A result depends on its image alone, not on the others of the batch.

    Args:
        input: [B, C, H, W] or [B, C, T, H, W], float32, float16 or bfloat16, fastest in channels-last memory: what a
            convolution without its bias returned. Every other tensor has its dtype and device.
        groups: How many groups of neighbouring channels there are, a divisor of C. A group is normalised over its
            channels and all pixels.
        weight: None, or [C].
        bias_norm: None, or [C]: the bias of the norm.
        eps: Added to the variance.
        bias: None, [C], or [B, C]: the bias of the convolution that made the input.
        residual: None, or a tensor of the input's shape.
        residual_bias: None, [C], or [B, C]: the bias of the convolution that made the residual. Without a residual it
            is added to the sum, such as the time embedding of a UNet's block.
        activation: "none" or "silu".
        out: Where to write, in channels-last memory, of the input's shape, dtype and device. It may be the memory of
            ``input`` or of ``residual``.

    Returns:
        A tensor of the input's shape in channels-last memory; ``out`` where given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit, or ``groups`` does not divide the channels (the text names
            the argument, what was expected and what came), or ``out`` is given where a gradient is needed.
        ValueError: An unknown ``activation``.

    Source: "Group Normalization", Wu and He, 2018; ResnetBlock2D (diffusers). The statistics are merged by the formula
    of Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983.
    """
    return _group_norm(
        out, input, bias, residual, residual_bias, weight, bias_norm, groups, eps,
        choice("activation", CHANNEL_ACTIVATION, activation),
    )  # fmt: skip


def group_norm_residual(
    input: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias_norm: Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    activation: str = "none",
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`group_norm` that also returns the sum that it normalises: the residual stream.

    Equivalent to::

        h = input + bias.view(-1, C, 1, 1) + (residual + residual_bias.view(-1, C, 1, 1))
        group_norm(h, groups, weight, bias_norm, eps, activation=activation), h

    Args:
        input: [B, C, H, W] or [B, C, T, H, W], as in `group_norm`, which describes all other arguments too.
        groups: How many groups of neighbouring channels there are, a divisor of C.
        weight: None, or [C].
        bias_norm: None, or [C].
        eps: Added to the variance.
        bias: None, [C], or [B, C].
        residual: None, or a tensor of the input's shape.
        residual_bias: None, [C], or [B, C].
        activation: "none" or "silu".
        out: Where to write the first result.
        residual_out: Where to write the sum; it may be the memory of ``input`` or of ``residual``.

    Returns:
        (normalised, sum), both of the input's shape in channels-last memory.

    Raises:
        RuntimeError: A shape, dtype or device does not fit, or ``groups`` does not divide the channels, or an output is
            given where a gradient is needed.
        ValueError: An unknown ``activation``.

    Source: ResnetBlock2D (diffusers), and the block that follows it.
    """
    outs = None
    if out is not None or residual_out is not None:
        check_type("input", "Tensor", input)
        check_image_or_video(input)
        order = channels_last_order(input)
        outs = tuple(
            torch.empty_like(input, memory_format=order) if given is None else given for given in (out, residual_out)
        )
    return _group_norm_residual(
        outs, input, bias, residual, residual_bias, weight, bias_norm, groups, eps,
        choice("activation", CHANNEL_ACTIVATION, activation),
    )  # fmt: skip


def upsample_nearest(
    input: Tensor,
    scale: Sequence[int],
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    residual_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Repeats the rows and columns of an image or video: the upsampling before a convolution.

    Equivalent to::

        h = input + bias.view(-1, C, 1, 1)                             # where given, as each operand below
        h = h + (residual + residual_bias.view(-1, C, 1, 1))
        rows, columns = scale
        h.repeat_interleave(rows, -2).repeat_interleave(columns, -1)

    Of an image without the sums this is ``F.interpolate(input, scale_factor=(rows, columns), mode="nearest")``.

    Args:
        input: [B, C, H, W] or [B, C, T, H, W], float32, float16 or bfloat16, fastest in channels-last memory.
        scale: (rows, columns): by how much rows and columns grow.
        bias: None, [C], or [B, C], of the input's dtype: the bias of the convolution that made the input.
        residual: None, or a tensor of the input's shape and dtype.
        residual_bias: None, [C], or [B, C], of the input's dtype. Without a residual it is added to the sum.
        out: Where to write, dense in channels-last memory.

    Returns:
        [B, C, H * rows, W * columns], or [B, C, T, H * rows, W * columns], in channels-last memory; ``out`` where
        given.

    Raises:
        RuntimeError: A shape, dtype or device does not fit, or ``out`` is given where a gradient is needed.

    Source: Upsample2D (diffusers); torch.nn.functional.interpolate.
    """
    return _upsample_nearest(out, input, bias, residual, residual_bias, scale)
