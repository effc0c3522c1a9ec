"""What AutoencoderKL's encoder and decoder share: residual blocks, attention between pixels, and what they must be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import nn

from ..blocks.autoencoder import attention_between_pixels, why_not_convolution
from ..blocks.images import Images
from ..engine.autocast import group_norm, why_not_result
from ..engine.code import patched
from ..engine.guards import class_of
from ._resnet import MODELS, RESNET, resnet

ATTENTION = MODELS + "attention_processor.Attention"
PROCESSOR = MODELS + "attention_processor.AttnProcessor2_0"
TORCH_MODULES = frozenset(
    f"torch.nn.modules.{name}"
    for name in (
        "activation.SiLU",
        "container.ModuleList",
        "conv.Conv2d",
        "dropout.Dropout",
        "linear.Linear",
        "normalization.GroupNorm",
    )
)
COMMON = TORCH_MODULES | {RESNET, ATTENTION, MODELS + "unets.unet_2d_blocks.UNetMidBlock2D"}


def attention(attn: Any, h: Images) -> None:
    """Attention of one head between all pixels. Rows of pixels are a view of channels-last memory."""
    x = h.norm(attn.group_norm, "none")
    rows = x.flatten(2).transpose(1, 2)
    q, k, v = (F.linear(rows, layer.weight, layer.bias).unsqueeze(1) for layer in (attn.to_q, attn.to_k, attn.to_v))
    out = attn.to_out[0]
    rows = F.linear(attention_between_pixels(q, k, v).squeeze(1), out.weight, out.bias)
    h.add(rows.transpose(1, 2).unflatten(2, x.shape[2:]))


def middle(block: Any, h: Images) -> None:
    resnet(block.resnets[0], h)
    for attn, after in zip(block.attentions, block.resnets[1:]):
        if attn is not None:
            attention(attn, h)
        resnet(after, h)


def why_not_kl(module: nn.Module) -> str:
    """Why an encoder or decoder has a structure that this does not fit; empty if it does."""
    for part in module.modules():
        reason = why_not_convolution(part, strided=True) or _why_not_part(class_of(part), part)
        if reason:
            return reason
    return ""


def _why_not_part(name: str, part: Any) -> str:
    if isinstance(part, nn.Conv2d) and part.padding_mode != "zeros":
        return "its convolutions pad with something else than zeros"
    if name == RESNET:
        if part.time_emb_proj is not None or part.time_embedding_norm == "scale_shift":
            return "its blocks take a timestep"
        if part.upsample is not None or part.downsample is not None or part.output_scale_factor != 1:
            return "its residual blocks change the size or the scale of their results"
    if name == ATTENTION:
        if part.heads != 1 or part.group_norm is None or not part.residual_connection:
            return "its attention has several heads, no norm, or no residual"
        if part.rescale_output_factor != 1 or not (part.spatial_norm is part.norm_q is part.norm_k is None):
            return "its attention has other norms, or scales its result"
    return ""


def check_call(module: Any, arguments: Mapping[str, Any]) -> str:
    """Why a call has to run stock. Users and `fuse_qkv_projections` may exchange attention processors at any time."""
    reason = why_not_result(group_norm, arguments["sample"])
    if reason:
        return reason
    if arguments.get("latent_embeds") is not None:
        return "latent_embeds for the norms"
    for attn in module.mid_block.attentions:
        if attn is not None:
            name = class_of(attn.processor)
            if name != PROCESSOR:
                return f"its attention's processor is {name}"
            reason = patched(type(attn.processor))
            if reason:
                return reason
    return ""
