"""Encoders and decoders of video and image autoencoders: what every family of them needs.

The convolutions stay cuDNN's, in channels-last memory and without their bias, which the next op adds. That op also adds
the residual, normalises and activates. Of videos it modulates too, and writes the padding that the next convolution
wants. Every step rounds where the stock modules round. Tiling, slicing and framewise decoding call the encoder or the
decoder, so they run this too.

`optimize` moves the weights of the convolutions into channels-last memory, because torch would copy them there in every
call. They are the same parameters with the same values. `restore` and calls of the stock forward move them back, and
the next call that runs the ops moves them again. No call moves any while another thread is in a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...channels_last import channel_norm, channel_norm_residual
from ..engine.autocast import remark_autocast
from ..engine.guards import HOOK, class_of, hooked, is_hopper, is_ordinary, why_not_input
from ..engine.signature import attention_is_replaced
from ..engine.sites import Entry, site_of, stock_forward
from ..engine.state import remember
from .images import VIDEO, ResidualStream, move, move_back, moved, parts, to_move, within_call

OPS = {  # by the dimensions of the tensors
    5: ("channel_norm", "channel_norm_residual", "pixel_shuffle_3d", "unpatchify", "upsample_nearest"),
    4: ("group_norm", "group_norm_residual", "upsample_nearest", "unpatchify"),
}
# What children of these names are. Other classes without parameters are known too, and would pass for them.
_PLACES: Mapping[str, tuple[type[nn.Module], ...]] = {
    "nonlinearity": (nn.SiLU,),
    "conv_act": (nn.SiLU,),
    "dropout": (nn.Dropout, nn.Identity),
}


def _misplaced(module: nn.Module) -> str:
    """Which child was exchanged for a module of another kind; empty if none was."""
    for name, child in module._modules.items():
        if child is None:
            continue
        fits = isinstance(child, _PLACES[name]) if name in _PLACES else True
        if not fits or (name.startswith("norm") and isinstance(child, (nn.SiLU, nn.Dropout, nn.Identity))):
            return f"{name} is {class_of(child)}"
    return ""


TORCH_MODULES = frozenset(
    f"torch.nn.modules.{name}" for name in ("container.ModuleList", "conv.Conv3d", "dropout.Dropout", "activation.SiLU")
)


@dataclass(frozen=True)
class Form:
    """What the modules of an encoder or decoder have in common."""

    norm: str
    eps: float
    padding: tuple[int, int] = (0, 0)  # frames before and after
    reflect: bool = False  # otherwise the convolutions pad with zeros

    def conv(self, module: Any, padded: Tensor) -> Tensor:
        """A convolution without its bias."""
        conv = module.conv
        return F.conv3d(padded, conv.weight, None, conv.stride, (0, 0, 0) if self.reflect else conv.padding)

    def interior(self, padded: Tensor) -> Tensor:
        """A padded tensor without its padding: a view."""
        front, back = self.padding
        x = padded[:, :, front : padded.shape[2] - back]
        return x[..., 1:-1, 1:-1] if self.reflect else x


class Hidden(ResidualStream):
    """A stream of videos, whose norms are over the channels of each voxel."""

    def __init__(self, form: Form, branch: Tensor, bias: Tensor | None = None, **noise: Tensor) -> None:
        super().__init__(branch, bias, **noise)
        self.form = form

    @property
    def like(self) -> Tensor:
        """A tensor of the sum's shape, dtype and device."""
        like: Tensor | None = self.branch.get("input", self.stream)
        assert like is not None
        return like

    def norm(
        self,
        operands: Mapping[str, Tensor],
        *,
        activation: str = "silu",
        last: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """The normalised and activated sum, padded.

        Args:
            operands: The norm's weight or modulation, by `channel_norm`'s names.
            last: Nothing else will read the sum, and the stream starts anew.
            out: Where to write the result.
        """
        form = self.form
        options: dict[str, Any] = {
            "eps": form.eps,
            "norm": form.norm,
            "activation": activation,
            "padding": form.padding,
            "reflect": form.reflect,
            "out": out,
            **operands,
        }
        if last or not self.branch:
            return channel_norm(**self._waiting(keep=not last), **options)
        waiting = self._waiting(keep=True)
        # The sum may take the branch's memory, which nothing else reads.
        branch = waiting["input"]
        dense = branch.is_contiguous(memory_format=VIDEO)
        x, self.stream = channel_norm_residual(**waiting, **options, residual_out=branch if dense else None)
        return x

    def padded(self, padding: tuple[int, int] | None = None, out: Tensor | None = None) -> Tensor:
        """The sum itself, padded as the form says or with other numbers of frames. The stream starts anew."""
        form = self.form
        frames = form.padding if padding is None else padding
        waiting = self._waiting(keep=False)
        return channel_norm(**waiting, norm="none", padding=frames, reflect=form.reflect, out=out)


# More columns than a head of torch's flash attention may have.
_WIDE = 256
# From so many pixels on two products are faster (h200-pixels-tuning.json); fewer have not been timed.
_PIXELS = 4096
_SCORES = 2**26  # that are in memory at a time


def attention_between_pixels(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of one head: `F.scaled_dot_product_attention` of [..., pixels, columns].

    torch has no kernel for Hopper for heads of more than 256 columns. There two products and a softmax of float32
    scores between them are faster. The scores are those of some queries at a time, so that they need little memory.
    """
    if not _is_faster_as_products(query):
        return F.scaled_dot_product_attention(query, key, value)
    pixels, columns = query.shape[-2:]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    some = _SCORES // pixels
    for q, k, v, rows in zip(*(x.flatten(0, -3) for x in (query, key, value, out))):
        for first in range(0, pixels, some):
            part = slice(first, first + some)
            scores = torch.mm(q[part], k.T, out_dtype=torch.float32).mul_(columns**-0.5)
            torch.mm(scores.softmax(-1).to(v.dtype), v, out=rows[part])
    return out


def _is_faster_as_products(query: Tensor) -> bool:
    pixels, columns = query.shape[-2:]
    if torch.compiler.is_compiling() or attention_is_replaced():
        return False
    if not query.is_cuda or query.dtype == torch.float32:
        return False
    return columns > _WIDE and _PIXELS <= pixels <= _SCORES and is_hopper(query.device)


def space_to_depth(x: Tensor, stride: Sequence[int]) -> Tensor:
    """Moves frames, rows and columns into channels, in channels-last memory: `pixel_shuffle_3d` backwards."""
    t, h, w = stride
    x = x.unflatten(4, (-1, w)).unflatten(3, (-1, h)).unflatten(2, (-1, t))  # [B, C, T, t, H, h, W, w]
    return x.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4, 7).movedim(-1, 1)


# ---- What a family describes


def why_not_convolution(conv: nn.Module, strided: bool = False) -> str:
    """Why a convolution cannot run without its own forward; empty if it can, or if it is none.

    strided: Whether it may skip voxels.
    """
    if not isinstance(conv, (nn.Conv2d, nn.Conv3d)):
        return ""
    skips = not strided and any(step != 1 for step in conv.stride)
    if skips or any(step != 1 for step in conv.dilation) or conv.groups != 1:
        return "it holds a convolution with a stride, dilation or groups"
    return "it holds a convolution without bias" if conv.bias is None else ""


@dataclass(frozen=True)
class Autoencoder:
    """A class of encoders or decoders, and the forward that takes its place.

    classes: Names of the classes, with their modules.
    forward: The whole encoder or decoder, with the stock signature, on modules whose own forwards it does not call.
    parameters: Names of the stock forward's, without self; the first is the tensor to encode or decode.
    known: Classes that the modules below may have.
    why_not: Why a module of other structure has to stay as it is; empty if it need not.
    check: Why a call has to run stock, beside the modules' state: (module, arguments by name) to a reason or "".
    keeps_frames: It reads and writes lists that it is given, so that a graph of its call would miss them.
    dimensions: Of its tensors: 5 of videos, 4 of images.
    """

    classes: tuple[str, ...]
    forward: Callable[..., Tensor]
    parameters: tuple[str, ...]
    known: frozenset[str]
    why_not: Callable[[Any], str]
    check: Callable[[Any, Mapping[str, Any]], str] = lambda module, arguments: ""
    keeps_frames: bool = False
    dimensions: int = 5

    def entry(self) -> Entry:
        """What `optimize` installs."""
        compute, parameters = self.forward, self.parameters

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            reason = self._why_not_call(module, {**dict(zip(parameters, args)), **kwargs})
            if reason:
                if not torch.compiler.is_compiling():
                    within_call(move_back, moved(parts(module)))
                return stock_forward(module, reason, *args, **kwargs)
            site = site_of(module)
            site.count_call()
            remark_autocast(site.remark, args[0] if args else kwargs[parameters[0]])
            within_call(move, remember(module, "weights", lambda module: to_move(parts(module))))
            return compute(module, *args, **kwargs)

        return Entry(
            self.classes,
            forward,
            OPS[self.dimensions],
            parameters,
            why_not=self._why_not_module,
            arrange=lambda module: move(to_move(parts(module))),
            release=lambda module: move_back(moved(parts(module))),
            alone=True,
            why_no_graph="it writes into a list that it is given" if self.keeps_frames else "",
        )

    def _why_not_module(self, module: nn.Module) -> str:
        for part in parts(module):
            if class_of(part) not in self.known:
                return f"it holds a {class_of(part)}"
            if misplaced := _misplaced(part):
                return misplaced
        return self.why_not(module)

    def _why_not_state(self, module: nn.Module, dtype: torch.dtype, device: torch.device) -> str:
        """Why the modules as they are now cannot be read past their forwards; empty if they can."""
        grad = torch.is_grad_enabled()
        for part in parts(module):
            if part is not module and (hooked(part) == HOOK or "forward" in part.__dict__):
                return f"a {type(part).__name__} has a hook or another forward"
            if part is not module and hooked(part):
                return f"a {type(part).__name__} {hooked(part)}"
            if class_of(part) not in self.known:
                return f"it holds a {class_of(part)}"
            if misplaced := _misplaced(part):
                return misplaced
            if isinstance(part, nn.Dropout) and part.training and part.p > 0:
                return "dropout is on"
            for name, parameter in part._parameters.items():
                if parameter is None or name == "timestep_scale_multiplier":
                    continue
                if not is_ordinary(parameter) or parameter.dtype != dtype or parameter.device != device:
                    return f"a {name} is not an ordinary parameter of {dtype} on {device}"
                if grad and parameter.requires_grad:
                    return "a gradient is needed"
        return self.why_not(module)  # what it asks of the modules' attributes may have changed

    def _why_not_call(self, module: nn.Module, arguments: Mapping[str, Any]) -> str:
        if torch.compiler.is_compiling():
            return "torch.compile fuses the autoencoder itself"
        input: Tensor = arguments[self.parameters[0]]
        reason = why_not_input(input, site_of(module).rounding)
        if reason:
            return reason
        if input.dim() != self.dimensions or input.numel() == 0:
            return f"an input of shape {list(input.shape)}"
        key = input.dtype, input.device
        return self.check(module, arguments) or remember(module, key, self._why_not_state, *key)
