"""What takes images in UNets and ControlNets: residual blocks, upsampling, and what stands around transformer blocks.

What stands between two convolutions is one op. What joins these modules stays diffusers' own: skip connections, the
residuals of a ControlNet, downsampling.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...channels_last import upsample_nearest
from ..blocks.image_module import ImageModule
from ..blocks.images import Images, branch_of, is_plain
from ..engine.guards import class_of, hooked
from ._resnet import DOWNSAMPLE, MODELS, RESNET, UPSAMPLE, add_branch, doubles_pixels, halves_pixels

SILU, GELU = "torch.nn.modules.activation.SiLU", "torch.nn.modules.activation.GELU"


def _resnet(self: Any, input_tensor: Tensor, temb: Tensor | None) -> Tensor:
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


def _why_not_resnet(block: Any) -> str:
    activation = class_of(block.nonlinearity)
    if activation not in (SILU, GELU):
        return f"nonlinearity is {activation}"
    for name, expected, usual in (("upsample", UPSAMPLE, doubles_pixels), ("downsample", DOWNSAMPLE, halves_pixels)):
        part = getattr(block, name)
        if part is not None and not (class_of(part) == expected and usual(part)):
            return f"its {name} computes with a kernel, or more than one step"
    return ""


def _check_resnet(block: Any, arguments: Mapping[str, Any]) -> str:
    for name in ("upsample", "downsample", "nonlinearity"):
        part = block._modules.get(name)
        if part is None or class_of(part) == GELU:  # which is called as often as in the stock block
            continue
        reason = next(filter(None, map(hooked, part.modules())), "")
        if reason:
            return f"{name} {reason}"
    image, temb = arguments["input_tensor"], arguments.get("temb")
    if temb is None and block.time_embedding_norm == "scale_shift":
        return "no time embedding"
    if (temb is None) != (block.time_emb_proj is None):
        return "a time embedding without a layer for it, or the layer alone"
    if temb is not None and temb.shape[:-1] != image.shape[:1]:
        return f"a time embedding of shape {list(temb.shape)}"
    return ""


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
    return vars(sys.modules[type(self).__module__])["Transformer2DModelOutput"](sample=output)


def _rows(image: Tensor) -> Tensor:
    """The pixels of an image in channels-last memory, [B, H * W, C]: a view."""
    return image.flatten(2).transpose(1, 2)


def _image(rows: Tensor, size: tuple[int, ...]) -> Tensor:
    return rows.transpose(1, 2).unflatten(2, size)


def _projected(layer: Any, rows: Tensor, size: tuple[int, ...]) -> Any:
    """A linear layer of each pixel, or a convolution that is one."""
    if is_plain(layer) and layer.kernel_size == (1, 1) and layer.padding == (0, 0):
        return F.linear(rows, layer.weight.flatten(1), layer.bias)
    if isinstance(getattr(layer, "base_layer", layer), nn.Conv2d):
        return _rows(layer(_image(rows, size)))
    return layer(rows)


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
        _resnet,
        ("group_norm", "upsample_nearest"),
        unused=("args", "kwargs"),
        tensors=("temb",),
        norms=("norm1", "norm2"),
        dropouts=("dropout",),
        why_not=_why_not_resnet,
        check=_check_resnet,
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
