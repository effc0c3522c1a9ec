"""Decoders of LTX-Video's and LTX-2's autoencoders: all that stands between two convolutions is one launch.

The convolutions stay cuDNN's, in channels-last memory and without their bias, which the next op adds. That op also adds
the residual, normalises, modulates, activates, and writes the padding that the next convolution wants. Every step
rounds where the stock modules round. Tiling, slicing and framewise decoding call the decoder, so they run this too.

The weights of the convolutions move into channels-last memory at the first call, because torch would copy them there in
every call. They are the same parameters with the same values. `restore` and calls of the stock forward move them back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...channels_last import channel_norm, channel_norm_residual, pixel_shuffle_3d, unpatchify
from .._guards import class_of, hooked, is_ordinary, remember, why_not_input
from .._sites import Entry, site_of, stock_forward

LTX = "diffusers.models.autoencoders.autoencoder_kl_ltx.LTXVideo"
LTX2 = "diffusers.models.autoencoders.autoencoder_kl_ltx2."


@dataclass(frozen=True)
class Form:
    """What a decoder's modules have in common."""

    norm: str
    eps: float
    padding: tuple[int, int]  # frames before and after
    reflect: bool  # otherwise the convolutions pad with zeros

    def conv(self, module: Any, padded: Tensor) -> Tensor:
        """A convolution without its bias."""
        conv = module.conv
        return F.conv3d(padded, conv.weight, None, padding=(0, 0, 0) if self.reflect else conv.padding)


class Hidden:
    """The residual stream, and the branch that waits to be added to it: a convolution's output without its bias."""

    def __init__(self, form: Form, branch: Tensor, bias: Tensor) -> None:
        self.form = form
        self.stream: Tensor | None = None
        self.branch: dict[str, Any] = {"input": branch, "bias": bias}

    def add(self, branch: Tensor, bias: Tensor, **noise: Tensor) -> None:
        self.branch = {"input": branch, "bias": bias, **noise}

    def norm(self, modulation: Mapping[str, Tensor], *, last: bool = False) -> Tensor:
        """The normalised, modulated and activated sum, padded. `last`: nothing else will read the sum."""
        form = self.form
        options: dict[str, Any] = {
            "eps": form.eps,
            "norm": form.norm,
            "activation": "silu",
            "padding": form.padding,
            "reflect": form.reflect,
            **modulation,
        }
        if last or not self.branch:
            return channel_norm(**self._waiting(), **options)
        waiting = self._waiting()
        # The sum may take the branch's memory, which nothing else reads.
        branch = waiting["input"]
        dense = branch.is_contiguous(memory_format=torch.channels_last_3d)
        x, self.stream = channel_norm_residual(**waiting, **options, residual_out=branch if dense else None)
        return x

    def padded(self) -> Tensor:
        """The sum itself, padded."""
        form = self.form
        return channel_norm(**self._waiting(), norm="none", padding=form.padding, reflect=form.reflect)

    def _waiting(self) -> dict[str, Any]:
        """The operands of the sum; nothing waits from now on."""
        if not self.branch:
            return {"input": self.stream}
        waiting, self.branch = self.branch, {}
        return {**waiting, "residual": self.stream}


def _interior(padded: Tensor, form: Form) -> Tensor:
    """A padded tensor without its padding: a view."""
    front, back = form.padding
    x = padded[:, :, front : padded.shape[2] - back]
    return x[..., 1:-1, 1:-1] if form.reflect else x


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


def _modulation(temb: Tensor, table: Tensor, row: int) -> dict[str, Tensor]:
    """Shift and scale, of which the shift is vector `row` of the embedding and of the table."""
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


def _resnet(form: Form, block: Any, h: Hidden, temb: Tensor | None) -> None:
    table = block.scale_shift_table
    first: dict[str, Tensor] = {}
    second: dict[str, Tensor] = {}
    if table is not None and temb is not None:
        first, second = _modulation(temb, table, 0), _modulation(temb, table, 2)
    branch = form.conv(block.conv1, h.norm(first))
    x = channel_norm(
        branch,
        eps=form.eps,
        norm=form.norm,
        bias=block.conv1.conv.bias,
        **_noise(branch, block.per_channel_scale1),
        **second,
        activation="silu",
        padding=form.padding,
        reflect=form.reflect,
    )
    del branch
    branch = form.conv(block.conv2, x)
    del x
    h.add(branch, block.conv2.conv.bias, **_noise(branch, block.per_channel_scale2))
    if block.conv_shortcut is not None and h.stream is not None:
        norm, shortcut = block.norm3, getattr(block.conv_shortcut, "conv", block.conv_shortcut)
        x = F.layer_norm(h.stream.movedim(1, -1), norm.normalized_shape, norm.weight, norm.bias, norm.eps)
        h.stream = F.conv3d(x.movedim(-1, 1), shortcut.weight, shortcut.bias)


def _upsample(form: Form, upsampler: Any, h: Hidden) -> None:
    x = h.padded()
    bias = upsampler.conv.conv.bias
    h.stream = pixel_shuffle_3d(
        form.conv(upsampler.conv, x),
        upsampler.stride,
        bias=bias,
        residual=_interior(x, form) if upsampler.residual else None,
        skip_frames=upsampler.stride[0] - 1,
    )


def _decode(self: Any, hidden_states: Tensor, temb: Tensor | None, form: Form) -> Tensor:
    if temb is not None and self.timestep_scale_multiplier is not None:
        temb = temb * self.timestep_scale_multiplier
    x = channel_norm(hidden_states, norm="none", padding=form.padding, reflect=form.reflect)
    h = Hidden(form, form.conv(self.conv_in, x), self.conv_in.conv.bias)
    del x
    embedded = _embedded(self.mid_block, temb, hidden_states)
    for resnet in self.mid_block.resnets:
        _resnet(form, resnet, h, embedded)
    for block in self.up_blocks:
        if block.conv_in is not None:
            _resnet(form, block.conv_in, h, temb)
        embedded = _embedded(block, temb, hidden_states)
        for upsampler in block.upsamplers or ():
            _upsample(form, upsampler, h)
        for resnet in block.resnets:
            _resnet(form, resnet, h, embedded)
    embedded = _embedded(self, temb, hidden_states)
    modulation = {} if embedded is None else _modulation(embedded, self.scale_shift_table, 0)
    branch = form.conv(self.conv_out, h.norm(modulation, last=True))
    h.stream = None
    return unpatchify(branch, self.patch_size, bias=self.conv_out.conv.bias)


# ---- The memory order of the weights

MOVED = "_ltx_kernels_moved"  # a convolution whose weight was not in channels-last memory


def _move_weights(decoder: nn.Module) -> None:
    for module in _parts(decoder):
        if isinstance(module, nn.Conv3d) and not module.weight.is_contiguous(memory_format=torch.channels_last_3d):
            with torch.inference_mode(False), torch.no_grad():
                module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last_3d)
            module.__dict__[MOVED] = True


def _move_weights_back(decoder: nn.Module) -> None:
    for module in _parts(decoder):
        if module.__dict__.pop(MOVED, False) and isinstance(module, nn.Conv3d):
            with torch.inference_mode(False), torch.no_grad():
                module.weight.data = module.weight.data.contiguous()


def _stock(decoder: nn.Module, reason: str, *arguments: Any) -> Tensor:
    if not torch.compiler.is_compiling():
        _move_weights_back(decoder)
    result: Tensor = stock_forward(decoder, reason, *arguments)
    return result


# ---- When it fits


def _parts(decoder: Any) -> Iterator[nn.Module]:
    """The modules that run without their own forward: all but the embedders of the timestep."""
    for name, module in decoder.named_modules():
        if "time_embedder" not in name:
            yield module


def _why_not_decoder(decoder: Any) -> str:
    """Why a decoder can never run the ops; empty if it can."""
    for module in _parts(decoder):
        name = class_of(module)
        if name not in KNOWN:
            return f"it holds a {name}"
        if isinstance(module, nn.Conv3d):
            usual = module.kernel_size == (3, 3, 3) or (
                module.kernel_size == (1, 1, 1) and module.padding_mode == "zeros"
            )
            if not usual or module.stride != (1, 1, 1) or module.dilation != (1, 1, 1) or module.groups != 1:
                return "it holds a convolution of another kernel, stride, dilation or number of groups"
            if module.bias is None or module.padding_mode not in ("zeros", "reflect"):
                return "it holds a convolution without bias, or with another kind of padding"
        if getattr(module, "weight", None) is not None and name == RMSNORM:
            return "its norms have weights"
        if name == PER_CHANNEL and getattr(module, "channel_dim", None) != 1:
            return "its norms are over another dimension than the channels"
    blocks = [decoder.mid_block, *decoder.up_blocks]
    resnets = [r for block in blocks for r in (*block.resnets, getattr(block, "conv_in", None)) if r is not None]
    if any(r.per_channel_scale1 is not None and r.conv_shortcut is not None for r in resnets):
        return "a block adds noise and changes the number of channels"
    forms = {(n.eps, c.conv.padding_mode) for r in resnets for n in (r.norm1, r.norm2) for c in (r.conv1, r.conv2)}
    forms |= {(decoder.norm_out.eps, c.conv.padding_mode) for c in (decoder.conv_in, decoder.conv_out)}
    if len(forms) != 1:
        return "its blocks differ in eps or padding"
    return "its patches have more than one frame" if decoder.patch_size_t != 1 else ""


def _why_not_parts(decoder: nn.Module, dtype: torch.dtype, device: torch.device) -> str:
    """Why the modules as they are now cannot be read past their forwards; empty if they can."""
    grad = torch.is_grad_enabled()
    for module in _parts(decoder):
        if module is not decoder and (hooked(module) or "forward" in module.__dict__):
            return f"a {type(module).__name__} has a hook or another forward"
        if class_of(module) not in KNOWN:
            return f"it holds a {class_of(module)}"
        if isinstance(module, nn.Dropout) and module.training and module.p > 0:
            return "dropout is on"
        for name, parameter in module._parameters.items():
            if parameter is None or name == "timestep_scale_multiplier":
                continue
            if not is_ordinary(parameter) or parameter.dtype != dtype or parameter.device != device:
                return f"a {name} is not an ordinary parameter of {dtype} on {device}"
            if grad and parameter.requires_grad:
                return "a gradient is needed"
    return ""


def _why_not_call(decoder: Any, hidden_states: Tensor, temb: Tensor | None) -> str:
    if torch.compiler.is_compiling():
        return "torch.compile fuses the decoder itself"
    reason = why_not_input(hidden_states)
    if reason:
        return reason
    if hidden_states.dim() != 5 or hidden_states.numel() == 0:
        return f"latents of shape {list(hidden_states.shape)}"
    if decoder.conv_in.conv.padding_mode == "reflect" and min(hidden_states.shape[-2:]) < 2:
        return "a latent too small to mirror its edges"
    if decoder.timestep_scale_multiplier is not None and (temb is None or temb.numel() != hidden_states.shape[0]):
        return "not one timestep a sample"
    key = hidden_states.dtype, hidden_states.device
    return remember(decoder, key, _why_not_parts, *key)


def _form(decoder: Any, norm: str, causal: bool) -> Form:
    reflect = decoder.conv_in.conv.padding_mode == "reflect"
    return Form(norm, decoder.norm_out.eps, (2, 0) if causal else (1, 1), reflect)


def ltx_forward(self: Any, hidden_states: Tensor, temb: Tensor | None = None) -> Tensor:
    reason = _why_not_call(self, hidden_states, temb)
    if reason:
        return _stock(self, reason, hidden_states, temb)
    site_of(self).count_call()
    remember(self, "weights", _move_weights)
    return _decode(self, hidden_states, temb, _form(self, "rms", self.conv_in.is_causal))


def ltx2_forward(self: Any, hidden_states: Tensor, temb: Tensor | None = None, causal: bool | None = None) -> Tensor:
    reason = _why_not_call(self, hidden_states, temb)
    if reason:
        return _stock(self, reason, hidden_states, temb, causal)
    site_of(self).count_call()
    remember(self, "weights", _move_weights)
    return _decode(self, hidden_states, temb, _form(self, "rms_stepwise", causal or self.is_causal))


RMSNORM = "diffusers.models.normalization.RMSNorm"
PER_CHANNEL = LTX2 + "PerChannelRMSNorm"
KNOWN = frozenset(
    [
        *(
            f"{LTX}{name}"
            for name in ("Decoder3d", "MidBlock3d", "UpBlock3d", "Upsampler3d", "ResnetBlock3d", "CausalConv3d")
        ),
        *(
            f"{LTX2}LTX2Video{name}"
            for name in ("Decoder3d", "MidBlock3d", "UpBlock3d", "Upsampler3d", "ResnetBlock3d", "CausalConv3d")
        ),
        *(
            f"torch.nn.modules.{name}"
            for name in (
                "container.ModuleList",
                "conv.Conv3d",
                "dropout.Dropout",
                "activation.SiLU",
                "normalization.LayerNorm",
            )
        ),
        RMSNORM,
        PER_CHANNEL,
    ]
)
OPS = ("channel_norm", "channel_norm_residual", "pixel_shuffle_3d", "unpatchify")

ENTRIES = (
    Entry(
        (f"{LTX}Decoder3d",),
        ltx_forward,
        OPS,
        ("hidden_states", "temb"),
        why_not=_why_not_decoder,
        release=_move_weights_back,
        alone=True,
    ),
    Entry(
        (f"{LTX2}LTX2VideoDecoder3d",),
        ltx2_forward,
        OPS,
        ("hidden_states", "temb", "causal"),
        why_not=_why_not_decoder,
        release=_move_weights_back,
        alone=True,
    ),
)
