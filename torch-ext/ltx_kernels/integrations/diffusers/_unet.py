"""What takes images in UNets and ControlNets: residual blocks, upsampling, and what stands around transformer blocks.

What stands between two convolutions is one op. What joins these modules stays diffusers' own: skip connections, the
residuals of a ControlNet, downsampling.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...channels_last import upsample_nearest
from ..blocks.image_module import ImageModule
from ..blocks.images import Images, is_plain
from ..engine.sites import site_of
from ._resnet import MODELS, RESNET, UPSAMPLE, check_unet_resnet, doubles_pixels, unet_resnet, why_not_unet_resnet


def _upsample(self: Any, hidden_states: Tensor, output_size: tuple[int, int] | None = None) -> Any:
    image = upsample_nearest(hidden_states, (2, 2))
    return self.conv(image) if self.use_conv else image


def _why_not_upsample(upsample: Any) -> str:
    return "" if doubles_pixels(upsample) else "it does not double the pixels, or does more than one convolution"


def _check_upsample(upsample: Any, arguments: Mapping[str, Any]) -> str:
    size, image = arguments.get("output_size"), arguments["hidden_states"]
    if size is None or tuple(size) == tuple(2 * n for n in image.shape[2:]):
        return ""
    return f"an output of {tuple(size)}"


def _transformer(
    self: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    timestep: Tensor | None = None,
    added_cond_kwargs: Mapping[str, Tensor] | None = None,
    class_labels: Tensor | None = None,
    cross_attention_kwargs: Mapping[str, Any] | None = None,
    attention_mask: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    return_dict: bool = True,
) -> Any:
    h, size = Images.of(hidden_states), hidden_states.shape[2:]
    rows = _projected(self.proj_in, _rows(h.norm(self.norm, "none")), size)
    for block in self.transformer_blocks:
        rows = block(
            rows,
            attention_mask=attention_mask,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            timestep=timestep,
            cross_attention_kwargs=cross_attention_kwargs,
            class_labels=class_labels,
        )
    h.add(_image(_projected(self.proj_out, rows, size), size))
    output = h.upsampled(1)
    if not return_dict:
        return (output,)
    return vars(sys.modules[site_of(self).cls.__module__])["Transformer2DModelOutput"](sample=output)


def _rows(image: Tensor) -> Tensor:
    """The pixels of an image in channels-last memory, [B, H * W, C]: a view."""
    return image.flatten(2).transpose(1, 2)


def _image(rows: Tensor, size: tuple[int, ...]) -> Tensor:
    return rows.transpose(1, 2).unflatten(2, size)


def _projected(layer: Any, rows: Tensor, size: tuple[int, ...]) -> Any:
    """A linear layer of each pixel, or a convolution that is one."""
    if is_plain(layer) and _is_linear(layer):
        return F.linear(rows, layer.weight.flatten(1), layer.bias)
    if isinstance(getattr(layer, "base_layer", layer), nn.Conv2d):
        return _rows(layer(_image(rows, size)))
    return layer(rows)


def _is_linear(conv: nn.Conv2d) -> bool:
    """Whether a convolution computes each pixel from all channels of the same pixel."""
    return conv.kernel_size == conv.stride == (1, 1) and conv.padding == (0, 0) and conv.groups == 1


def _why_not_transformer(transformer: Any) -> str:
    return "" if transformer.is_input_continuous else "its inputs are patches or codes"


def _check_transformer(transformer: Any, arguments: Mapping[str, Any]) -> str:
    for name in ("attention_mask", "encoder_attention_mask"):
        mask = arguments.get(name)
        if mask is not None and mask.dim() == 2:
            return f"{name} of two dimensions"
    scale = (arguments.get("cross_attention_kwargs") or {}).get("scale")
    return "" if scale is None else "a scale in cross_attention_kwargs"


UNET = (
    ImageModule(
        (RESNET,),
        unet_resnet,
        ("group_norm", "upsample_nearest"),
        unused=("args", "kwargs"),
        tensors=("temb",),
        norms=("norm1", "norm2"),
        passed_over=("upsample", "downsample", "nonlinearity"),
        dropouts=("dropout",),
        why_not=why_not_unet_resnet,
        check=check_unet_resnet,
    ),
    ImageModule(
        (UPSAMPLE,),
        _upsample,
        ("upsample_nearest",),
        unused=("args", "kwargs"),
        why_not=_why_not_upsample,
        check=_check_upsample,
    ),
    ImageModule(
        (MODELS + "transformers.transformer_2d.Transformer2DModel",),
        _transformer,
        ("group_norm", "upsample_nearest"),
        norms=("norm",),
        apart=frozenset({"transformer_blocks"}),
        records=False,
        why_not=_why_not_transformer,
        check=_check_transformer,
    ),
)
