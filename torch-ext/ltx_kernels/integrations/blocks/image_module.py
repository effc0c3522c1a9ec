"""What a family says about modules of a UNet that take images, and the guards that follow from it.

Each module keeps its place and gets and returns whole images, so that whatever stands between two of them stays as it
is: skip connections, the residuals of a ControlNet, FreeU. Results are in channels-last memory, which torch's own
functions then hand on. An image in another memory order is copied once.

`optimize` moves the weights of the convolutions into channels-last memory. `restore` and calls of the stock forward
move them back, and the next call that runs ops moves them again. No call moves any while another thread is in a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import Tensor, nn

from ..engine.autocast import group_norm, remark_autocast, why_not_result
from ..engine.guards import class_of, hooked, is_idle, why_not_input, why_not_tensor
from ..engine.sites import Entry, parameters_of, site_of, stock_forward
from ..engine.state import remember
from ..replay.calls import replayed
from .images import move, move_back, moved, parts, to_move, within_call

GROUP_NORM = "torch.nn.modules.normalization.GroupNorm"


@dataclass(frozen=True)
class ImageModule:
    """A class of modules that take an image [B, C, H, W], and the forward that takes its place.

    classes: Names of the classes, with their modules.
    forward: The whole module, with the stock signature but for `unused`. The image is its first argument, and in
        channels-last memory.
    ops: The public functions that it calls.
    unused: Names of further parameters of the stock forward's. A call that gives any runs stock.
    tensors: Names of other arguments that are tensors of the image's dtype.
    norms: Names of the GroupNorms that `forward` reads and does not call.
    passed_over: Names of other modules that it does not call as often as the stock forward. They may be missing.
    dropouts: Names of dropouts that it does not call.
    apart: Names of children with forwards of their own, which it calls.
    records: Whether later calls replay the functions of an earlier one.
    why_not: Why a module of other structure has to stay as it is; empty if it need not.
    check: Why a call has to run stock: (module, arguments by name) to a reason or "".
    """

    classes: tuple[str, ...]
    forward: Callable[..., Any]
    ops: tuple[str, ...]
    unused: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    dropouts: tuple[str, ...] = ()
    apart: frozenset[str] = frozenset()
    records: bool = True
    why_not: Callable[[Any], str] = lambda module: ""
    check: Callable[[Any, Mapping[str, Any]], str] = lambda module, arguments: ""

    def entry(self) -> Entry:
        """What `optimize` installs."""
        compute, names = self.forward, parameters_of(self.forward)

        def ordinary(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            arguments = {**dict(zip((*names, *self.unused), args)), **kwargs}
            reason = self._why_not_call(module, arguments, names)
            if reason:
                if not torch.compiler.is_compiling():
                    within_call(move_back, moved(self._parts(module)))
                return stock_forward(module, reason, *args, **kwargs)
            site = site_of(module)
            site.count_call()
            image: Tensor = arguments.pop(names[0])
            remark_autocast(site.remark, image)
            within_call(move, remember(module, "weights", self._to_move))
            return compute(module, image.contiguous(memory_format=torch.channels_last), **arguments)

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self.records:
                return ordinary(module, *args, **kwargs)
            return replayed(module, ordinary, args, kwargs)

        return Entry(
            self.classes,
            forward,
            self.ops,
            (*names, *self.unused),
            why_not=self._why_not_module,
            arrange=lambda module: move(self._to_move(module)),
            release=lambda module: move_back(moved(self._parts(module))),
            apart=self.apart,
        )

    def _children(self, module: nn.Module) -> Iterator[nn.Module]:
        """Its children without those that have forwards of their own."""
        for name, child in module.named_children():
            if name not in self.apart:
                yield child

    def _parts(self, module: nn.Module) -> Iterator[nn.Module]:
        for child in self._children(module):
            yield from parts(child)

    def _to_move(self, module: nn.Module) -> list[Any]:
        return to_move(self._parts(module))

    def _why_not_module(self, module: nn.Module) -> str:
        for name in self.norms:
            if class_of(module._modules.get(name)) != GROUP_NORM:
                return f"{name} is {class_of(module._modules.get(name))}"
        return self.why_not(module)

    def _why_not_state(self, module: nn.Module, image: Tensor) -> str:
        """Why the module's own parts keep a call from running ops."""
        reason = self._why_not_module(module)
        if reason:
            return reason
        for name in (*self.norms, *self.passed_over):
            part = module._modules.get(name)
            reason = "" if part is None else next(filter(None, map(hooked, part.modules())), "")
            if reason:
                return f"{name} {reason}"
        for name in self.dropouts:
            if not is_idle(module._modules[name]):  # type: ignore[arg-type]
                return f"{name} is on, or has a hook"
        for child in self._children(module):
            base = child._modules.get("base_layer") or child  # of an adapter
            for name, parameter in base._parameters.items():
                reason = "" if parameter is None else why_not_tensor(f"a {name}", parameter, image)
                if reason:
                    return reason
        return ""

    def _why_not_call(self, module: nn.Module, arguments: Mapping[str, Any], names: tuple[str, ...]) -> str:
        if torch.compiler.is_compiling():
            return "torch.compile fuses what stands between convolutions itself"
        image: Tensor = arguments[names[0]]
        reason = why_not_input(image, site_of(module).rounding) or why_not_result(group_norm, image)
        if reason:
            return reason
        if image.dim() != 4 or image.numel() == 0:
            return f"an input of shape {list(image.shape)}"
        others = sorted(arguments.keys() - set(names))
        if others:
            return f"arguments {', '.join(others)}"
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()):
            return "a gradient is needed"
        for name in self.tensors:
            tensor = arguments.get(name)
            reason = "" if tensor is None else why_not_tensor(name, tensor, image)
            if reason:
                return reason
        key = "image", image.dtype, image.device
        return remember(module, key, self._why_not_state, image) or self.check(module, arguments)
