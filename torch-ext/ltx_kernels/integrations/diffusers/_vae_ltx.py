"""What the encoders and decoders of LTX-Video's and LTX-2's autoencoders share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..blocks.autoencoder import TORCH_MODULES, Form, Hidden, why_not_convolution
from ..engine.autocast import square, why_not_result
from ..engine.guards import class_of

LTX = "diffusers.models.autoencoders.autoencoder_kl_ltx.LTXVideo"
LTX2 = "diffusers.models.autoencoders.autoencoder_kl_ltx2.LTX2Video"
RMSNORM = "diffusers.models.normalization.RMSNorm"
PER_CHANNEL = "diffusers.models.autoencoders.autoencoder_kl_ltx2.PerChannelRMSNorm"
COMMON = frozenset(
    [
        *(f"{family}{name}" for family in (LTX, LTX2) for name in ("MidBlock3d", "ResnetBlock3d", "CausalConv3d")),
        *TORCH_MODULES,
        "torch.nn.modules.normalization.LayerNorm",
        RMSNORM,
        PER_CHANNEL,
    ]
)


def ltx_form(module: Any) -> Form:
    return _form(module, "rms", module.conv_in.is_causal)


def ltx2_form(module: Any, causal: bool | None) -> Form:
    return _form(module, "rms_stepwise", bool(causal or module.is_causal))


def _form(module: Any, norm: str, causal: bool) -> Form:
    reflect = module.conv_in.conv.padding_mode == "reflect"
    return Form(norm, module.norm_out.eps, (2, 0) if causal else (1, 1), reflect)


def modulation(temb: Tensor, table: Tensor, row: int) -> dict[str, Tensor]:
    """Shift and scale: the vectors `row` and `row` + 1 of the embedding and of the table."""
    vectors = temb.unflatten(1, (table.shape[0], -1))
    return {
        "shift": vectors[:, row],
        "shift_table": table[row],
        "scale": vectors[:, row + 1],
        "scale_table": table[row + 1],
    }


def _noise(branch: Tensor, scale: Tensor | None) -> dict[str, Tensor]:
    if scale is None:
        return {}
    noise = torch.randn(branch.shape[-2:], device=branch.device, dtype=branch.dtype)
    return {"noise": noise, "noise_scale": scale.flatten()}


def resnet(form: Form, block: Any, h: Hidden, temb: Tensor | None = None) -> None:
    table = block.scale_shift_table
    first: dict[str, Tensor] = {}
    second: dict[str, Tensor] = {}
    if table is not None and temb is not None:
        first, second = modulation(temb, table, 0), modulation(temb, table, 2)
    branch = form.conv(block.conv1, h.norm(first))
    inner = Hidden(form, branch, block.conv1.conv.bias, **_noise(branch, block.per_channel_scale1))
    del branch
    x = inner.norm(second, last=True)
    branch = form.conv(block.conv2, x)
    del x
    h.add(branch, block.conv2.conv.bias, **_noise(branch, block.per_channel_scale2))
    if block.conv_shortcut is not None and h.stream is not None:
        norm, shortcut = block.norm3, getattr(block.conv_shortcut, "conv", block.conv_shortcut)
        x = F.layer_norm(h.stream.movedim(1, -1), norm.normalized_shape, norm.weight, norm.bias, norm.eps)
        h.stream = F.conv3d(x.movedim(-1, 1), shortcut.weight, shortcut.bias)


def check_ltx2(module: Any, arguments: Mapping[str, Any]) -> str:
    """Why a call of LTX-2's runs stock: the op rounds each step of its norm, which autocast may compute in float32."""
    return why_not_result(square, arguments["hidden_states"])


def why_not_ltx(module: Any, strided: bool = False) -> str:
    """Why an encoder or decoder has a structure that `resnet` and the convolutions do not fit; empty if they do."""
    forms: dict[str, set[Any]] = {"eps": set(), "padding": set(), "causality": set()}
    for part in module.modules():
        name = class_of(part)
        reason = why_not_convolution(part, strided)
        if reason:
            return reason
        if isinstance(part, nn.Conv3d):
            usual = part.kernel_size == (3, 3, 3) or (part.kernel_size == (1, 1, 1) and part.padding_mode == "zeros")
            if not usual or part.padding_mode not in ("zeros", "reflect"):
                return "it holds a convolution of another kernel, or with another kind of padding"
            if part.kernel_size == (3, 3, 3):
                forms["padding"].add(part.padding_mode)
        if name == RMSNORM and part.weight is not None:
            return "its norms have weights"
        if name == PER_CHANNEL and part.channel_dim != 1:
            return "its norms are over another dimension than the channels"
        if name in (RMSNORM, PER_CHANNEL):
            forms["eps"].add(part.eps)
        if name == LTX + "CausalConv3d":
            if part.kernel_size != part.conv.kernel_size:
                return "it pads for another kernel than its convolution has"
            forms["causality"].add(part.is_causal)
        if name.endswith("ResnetBlock3d") and part.per_channel_scale1 is not None and part.conv_shortcut is not None:
            return "a block adds noise and changes the number of channels"
    for what, found in forms.items():
        if len(found) > 1:
            return f"its blocks differ in {what}"
    return "its patches have more than one frame" if module.patch_size_t != 1 else ""
