"""The residual stream of images between convolutions, and the memory order of the convolutions' weights.

A convolution stays cuDNN's, in channels-last memory and without its bias. The next op adds the bias and the residual,
normalises and activates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._torch_private import without_function_modes
from ...channels_last import group_norm, group_norm_residual, unpatchify, upsample_nearest
from ..engine import threads
from ..engine.guards import hooked, is_capturing, is_ordinary

VIDEO = torch.channels_last_3d


class ResidualStream:
    """The residual stream, and the branch that waits to be added to it: a convolution's output without its bias."""

    def __init__(self, branch: Tensor, bias: Tensor | None = None, **operands: Tensor | None) -> None:
        self.stream: Tensor | None = None
        self.add(branch, bias, **operands)

    def add(self, branch: Tensor, bias: Tensor | None = None, **operands: Tensor | None) -> None:
        """operands: What else the next op adds, by its names."""
        self.branch: dict[str, Any] = {"input": branch, "bias": bias, **operands}

    def upsampled(self, times: int) -> Tensor:
        """The sum, with each pixel `times` over in rows and columns. The stream starts anew."""
        return upsample_nearest(**self._waiting(keep=False), scale=(times, times))

    def _waiting(self, keep: bool) -> dict[str, Any]:
        """The operands of the sum; no branch waits from now on, and without `keep` the stream is empty."""
        waiting = {**self.branch, "residual": self.stream} if self.branch else {"input": self.stream}
        self.branch = {}
        if not keep:
            self.stream = None
        return waiting


class Images(ResidualStream):
    """A stream of images, [B, C, H, W], whose norms are over groups of channels."""

    @classmethod
    def of(cls, stream: Tensor) -> Images:
        """A stream to which no branch waits to be added."""
        h = cls(stream)
        h.stream, h.branch = stream, {}
        return h

    def norm(self, norm: nn.GroupNorm, activation: str = "silu", *, last: bool = False) -> Tensor:
        """The normalised and activated sum.

        last: Nothing else will read the sum, and the stream starts anew.
        """
        options: dict[str, Any] = {
            "groups": norm.num_groups,
            "weight": norm.weight,
            "bias_norm": norm.bias,
            "eps": norm.eps,
            "activation": activation,
        }
        if last or not self.branch:
            return group_norm(**self._waiting(keep=not last), **options)
        waiting = self._waiting(keep=True)
        branch = waiting["input"]
        dense = branch.is_contiguous(memory_format=torch.channels_last)
        x, self.stream = group_norm_residual(**waiting, **options, residual_out=branch if dense else None)
        return x

    def finished(self, norm: nn.GroupNorm, conv: nn.Conv2d) -> Tensor:
        """The last norm, SiLU and convolution of the sum, in contiguous memory."""
        branch = convolved(conv, self.norm(norm, last=True))
        return unpatchify(branch.unsqueeze(2), 1, bias=conv.bias).squeeze(2)


def convolved(conv: Any, x: Tensor) -> Tensor:
    """A convolution without its bias."""
    return F.conv2d(x, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)


def branch_of(conv: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """A convolution, and the bias that its result still lacks.

    One with a hook or an adapter is called, and adds its bias itself.
    """
    if is_plain(conv):
        return convolved(conv, x), conv.bias
    return conv(x), None


def is_plain(conv: Any) -> bool:
    """Whether a convolution is torch's own, pads with zeros, and has no hook."""
    own = type(conv) is nn.Conv2d and conv.padding_mode == "zeros" and "_conv_forward" not in conv.__dict__
    return own and not hooked(conv)


# ---- The memory order of the weights

MOVED = "_ltx_kernels_moved"  # a convolution whose weight was not in channels-last memory


def parts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that run without their own forward: all but the embedders of the timestep."""
    for name, part in module.named_modules():
        if "time_embedder" not in name:
            yield part


def to_move(modules: Iterable[nn.Module]) -> list[Any]:
    """The convolutions whose weights `move` has to move: none with a hook, or with a weight that is no ordinary one."""
    return [m for m in modules if isinstance(m, (nn.Conv2d, nn.Conv3d)) and not hooked(m) and _is_movable(m)]


def _is_movable(conv: nn.Conv2d | nn.Conv3d) -> bool:
    weight = conv._parameters.get("weight")
    if weight is None or not is_ordinary(weight) or weight.dim() != len(conv.kernel_size) + 2:
        return False
    return not weight.is_contiguous(memory_format=_order(conv))


def _order(conv: Any) -> torch.memory_format:
    return VIDEO if isinstance(conv, nn.Conv3d) else torch.channels_last


def moved(modules: Iterable[nn.Module]) -> list[Any]:
    """The convolutions whose weights `move` has moved."""
    return [module for module in modules if MOVED in module.__dict__]


def _give_order(conv: Any, order: torch.memory_format) -> None:
    """Moves a weight into memory of this order, which is an inference tensor's where the weight is one.

    torch makes no views of a parameter of inference mode with other memory.
    """
    with torch.inference_mode(conv.weight.is_inference()), torch.no_grad():
        conv.weight.data = conv.weight.data.contiguous(memory_format=order)


def move(convolutions: list[Any]) -> None:
    """Into channels-last memory."""
    for conv in convolutions:
        conv.__dict__[MOVED] = True
        _give_order(conv, _order(conv))


def move_back(convolutions: list[Any]) -> None:
    for conv in convolutions:
        if isinstance(conv, (nn.Conv2d, nn.Conv3d)):
            _give_order(conv, torch.contiguous_format)
        conv.__dict__.pop(MOVED, None)


def within_call(change: Callable[[list[Any]], None], convolutions: list[Any]) -> None:
    """Moves weights during a call, unless another thread is in a call and may be reading them.

    They stay where they are then, since a convolution computes the same from weights in either order.
    """
    if not convolutions or is_capturing():
        return
    with threads.if_alone() as alone, without_function_modes():  # a recorded call does not repeat this
        if alone:
            _synchronize(convolutions)  # kernels on other streams may still be reading
            change(convolutions)
            _synchronize(convolutions)


def _synchronize(convolutions: list[Any]) -> None:
    for device in {conv.weight.device for conv in convolutions if conv.weight.is_cuda}:
        torch.cuda.synchronize(device)
