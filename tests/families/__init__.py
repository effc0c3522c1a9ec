"""Tiny models of the families that `optimize` knows: one module for each, found by test_families.py without a list."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from helpers.versions import missing_class
from torch import Tensor, nn

# Modules here whose models the installed diffusers lacks, each with the class that is missing.
LACKING: dict[str, str] = {}


@dataclass(frozen=True)
class Family:
    """A tiny model of one family, and what must hold for it.

    make: The model, on the CPU in float32, as its class makes it; the tests give it random parameters.
    inputs: Arguments of a forward for a batch of this size, without masks, floating-point ones in float32.
    blocks: Names in the report of the classes whose calls must run ops, and how many modules of each.
    masked: More arguments, for a forward with a mask.
    lora: Ends of the names of the linear layers that a LoRA is added to.
    first_block_cache: diffusers' FirstBlockCache knows the blocks.
    fp8: Linear layers that precision="fp8" takes.
    one_graph: torch.compile takes the stock model as one graph.
    stock_calls: Reasons that are expected in the report: what the family cannot fuse.
    stock_but_in_bfloat16: The same, expected in float32 and float16 alone.
    magnifies: The tests in float32 allow a distance so many times as large: the stock code rounds to bfloat16, or more
        layers than usual add to it.
    left_alone: Reasons why `optimize` replaces some modules by nothing, such as an attention that no description fits.
    idle: How many of the blocks these inputs do not call.
    given_twice: How many of the blocks get one tensor as two arguments, so that their calls are not recorded.
    not_recorded: Why the report says that calls of the blocks are not recorded; empty where they are.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]
    blocks: dict[str, int]
    fp8: int
    masked: Callable[[int], dict[str, Any]] | None = None
    lora: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj")
    first_block_cache: bool = False
    one_graph: bool = True
    stock_calls: tuple[str, ...] = ()
    stock_but_in_bfloat16: tuple[str, ...] = ()
    magnifies: float = 1.0
    left_alone: tuple[str, ...] = ()
    idle: int = 0
    given_twice: int = 0
    not_recorded: str = ""

    @property
    def dtype(self) -> torch.dtype:
        """A dtype in which all of the family runs ops."""
        return torch.bfloat16 if self.stock_but_in_bfloat16 else torch.float32


def families() -> dict[str, Family]:
    """The families by name, "module" or "module-case"."""
    found: dict[str, Family] = {}
    for info in pkgutil.iter_modules(__path__):
        try:
            module = importlib.import_module(f"{__name__}.{info.name}")
        except ImportError as error:
            LACKING[info.name] = missing_class(error)
            continue
        for case, family in getattr(module, "FAMILIES", {}).items():  # left.py has none
            found["-".join(filter(None, (info.name, case)))] = family
    return found


def random_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random parameters everywhere, so that a forgotten weight or an exchanged pair shows."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        fan_in = parameter.shape[-1] if parameter.dim() > 1 else 1
        if parameter.dim() == 4:  # of a convolution: many in a row would leave the range of float16
            fan_in = parameter[0].numel()
        # Around what a norm is made with: 1, or 0 where the class adds 1 to its weight.
        mean = parameter.mean().round().item() if parameter.dim() == 1 and name.endswith("weight") else 0.0
        std = 0.2 if parameter.dim() == 1 else fan_in**-0.5
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * std + mean)
    return model.eval().requires_grad_(False)


def randn(*shape: int, seed: int = 1) -> Tensor:
    """A random tensor of an input."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_time_in_dtype(model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The timestep in the model's dtype, as the pipeline hands it over; the model does not cast it."""
    return args, {**kwargs, "timestep": kwargs["timestep"].to(model.dtype)}
