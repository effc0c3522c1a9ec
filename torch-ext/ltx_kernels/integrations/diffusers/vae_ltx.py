"""Decoders of LTX-Video's and LTX-2's autoencoders: all that stands between two convolutions is one launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...channels_last import channel_norm, pixel_shuffle_3d, unpatchify
from ..blocks.autoencoder import Autoencoder, Form, Hidden
from ._vae_ltx import COMMON, LTX, LTX2, check_ltx2, ltx2_form, ltx_form, modulation, resnet, why_not_ltx


def _embedded(module: Any, temb: Tensor | None, hidden: Tensor) -> Tensor | None:
    """What a block's own embedder makes of the timestep: [B, vectors of channels side by side]."""
    if module.time_embedder is None or temb is None:
        return None
    embedded = module.time_embedder(
        timestep=temb.flatten(),
        resolution=None,
        aspect_ratio=None,
        batch_size=hidden.shape[0],
        hidden_dtype=hidden.dtype,
    )
    return embedded.view(hidden.shape[0], -1)


def _upsample(form: Form, upsampler: Any, h: Hidden) -> None:
    x = h.padded()
    h.stream = pixel_shuffle_3d(
        form.conv(upsampler.conv, x),
        upsampler.stride,
        bias=upsampler.conv.conv.bias,
        residual=form.interior(x) if upsampler.residual else None,
        skip_frames=upsampler.stride[0] - 1,
    )


def _decode(self: Any, hidden_states: Tensor, temb: Tensor | None, form: Form) -> Tensor:
    if temb is not None and self.timestep_scale_multiplier is not None:
        temb = temb * self.timestep_scale_multiplier
    x = channel_norm(hidden_states, norm="none", padding=form.padding, reflect=form.reflect)
    h = Hidden(form, form.conv(self.conv_in, x), self.conv_in.conv.bias)
    del x
    embedded = _embedded(self.mid_block, temb, hidden_states)
    for block in self.mid_block.resnets:
        resnet(form, block, h, embedded)
    for up_block in self.up_blocks:
        if up_block.conv_in is not None:
            resnet(form, up_block.conv_in, h, temb)
        embedded = _embedded(up_block, temb, hidden_states)
        for upsampler in up_block.upsamplers or ():
            _upsample(form, upsampler, h)
        for block in up_block.resnets:
            resnet(form, block, h, embedded)
    embedded = _embedded(self, temb, hidden_states)
    shift_scale = {} if embedded is None else modulation(embedded, self.scale_shift_table, 0)
    branch = form.conv(self.conv_out, h.norm(shift_scale, last=True))
    return unpatchify(branch, self.patch_size, bias=self.conv_out.conv.bias)


def ltx_decode(self: Any, hidden_states: Tensor, temb: Tensor | None = None) -> Tensor:
    return _decode(self, hidden_states, temb, ltx_form(self))


def ltx2_decode(self: Any, hidden_states: Tensor, temb: Tensor | None = None, causal: bool | None = None) -> Tensor:
    return _decode(self, hidden_states, temb, ltx2_form(self, causal))


def _check_call(decoder: Any, arguments: Mapping[str, Any]) -> str:
    hidden_states, temb = arguments["hidden_states"], arguments.get("temb")
    if decoder.conv_in.conv.padding_mode == "reflect" and min(hidden_states.shape[-2:]) < 2:
        return "a latent too small to mirror its edges"
    if decoder.timestep_scale_multiplier is not None and (temb is None or temb.numel() != hidden_states.shape[0]):
        return "not one timestep a sample"
    return ""


def _check_ltx2(decoder: Any, arguments: Mapping[str, Any]) -> str:
    return _check_call(decoder, arguments) or check_ltx2(decoder, arguments)


KNOWN = COMMON | {f"{family}{name}" for family in (LTX, LTX2) for name in ("Decoder3d", "UpBlock3d", "Upsampler3d")}

ENTRIES = (
    Autoencoder((f"{LTX}Decoder3d",), ltx_decode, ("hidden_states", "temb"), KNOWN, why_not_ltx, _check_call),
    Autoencoder(
        (f"{LTX2}Decoder3d",), ltx2_decode, ("hidden_states", "temb", "causal"), KNOWN, why_not_ltx, _check_ltx2
    ),
)
