"""How a model's tokens are split among ranks: a family's plan, and `enable_parallelism` with it.

A family may bring a `Parallel` plan. `follow` prepares a model, whose `enable_parallelism` then applies that plan in
the place of diffusers' own. Calls that cannot give a right result raise before anything is changed.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import importlib
import inspect
import types
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..engine.guards import ATTRIBUTE, RELEASE, class_of
from . import guidance, peer_memory
from .ranks import Config, all_gather, context_of, ranks_of

ENABLE = "enable_parallelism"

Splits = Mapping[str, Mapping["str | int", "tuple[int, int]"]]


@dataclass(frozen=True)
class Parallel:
    """How a model is split, where diffusers' plan gives wrong results, errors, or exchanges without need.

    model: The name of the model's class, with its module.
    split: A function of the model. For the submodule at each path it gives (dimension to split, number of dimensions)
        of tensors: of an argument by its name, of an output by its number. A tensor with another number of dimensions
        stays whole. So does an argument of the model that has one row where another argument has more.
    gather: For the submodule at each path, the same of its outputs to gather; None for outputs that are whole already.
    local: Patterns of attentions that exchange nothing: all their keys are on every rank.
    """

    model: str
    split: Callable[[Any], Splits]
    gather: Mapping[str, Sequence[tuple[int, int] | None]]
    local: tuple[str, ...]

    def plan(self, root: nn.Module) -> dict[str, Any]:
        """The plan in diffusers' classes."""
        home = _hooks(root)
        plan: dict[str, Any] = {}
        for path, tensors in self.split(root).items():
            plan[path] = {
                name: home.ContextParallelInput(split_dim=dim, expected_dims=dims, split_output=isinstance(name, int))
                for name, (dim, dims) in tensors.items()
            }
        for path, outputs in self.gather.items():
            plan[path] = [
                None if output is None else home.ContextParallelOutput(gather_dim=output[0], expected_dims=output[1])
                for output in outputs
            ]
        return plan

    def attentions(self, root: nn.Module) -> Iterator[nn.Module]:
        """The modules that `local` names."""
        for name, module in root.named_modules():
            if "processor" in module.__dict__ and any(fnmatch.fnmatchcase(name, pattern) for pattern in self.local):
                yield module


def _hooks(root: nn.Module) -> Any:
    """diffusers' module of hooks for context parallelism."""
    return importlib.import_module(f"{type(root).__module__.split('.')[0]}.hooks.context_parallel")


def _hook(root: nn.Module, path: str, kind: str) -> Any:
    """The hook that a plan has put on a submodule; None if there is none."""
    if "*" in path:
        return None
    registry = root.get_submodule(path).__dict__.get("_diffusers_hook")
    return None if registry is None else registry.get_hook(f"cp_{kind}---{path}")


def _carries(root: nn.Module, plan: Mapping[str, Any]) -> bool:
    """Whether a model's hooks are those of a plan."""
    for path, part in plan.items():
        hook = _hook(root, path, "input" if isinstance(part, dict) else "output")
        expected = part if isinstance(part, (dict, list, tuple)) else [part]
        if hook is None or hook.metadata != expected:
            return False
    return True


def _split_arguments(
    hook: Any, names: tuple[str, ...], module: nn.Module, *args: Any, **kwargs: Any
) -> tuple[tuple[()], dict[str, Any]]:
    """The pre_forward of diffusers' hook, for optional arguments, and tensors of two numbers of dimensions.

    diffusers' own raises for a missing argument, and warns of a tensor with other dimensions. A tensor of one row
    beside others of more rows is for all tokens, and stays whole.
    """
    given = {**dict(zip(names, args)), **kwargs}
    sizes = {
        name: given[name].shape[split.split_dim]
        for name, split in hook.metadata.items()
        if isinstance(given.get(name), Tensor) and given[name].dim() == split.expected_dims
    }
    for name, size in sizes.items():
        if size > 1 or max(sizes.values()) == 1:
            given[name] = hook._prepare_cp_input(given[name], hook.metadata[name])
    return (), given


class Followed:
    """What `follow` has done to a model, and how to undo it."""

    def __init__(self, parallel: Parallel | None) -> None:
        self.parallel = parallel
        self.applied = False  # the plan of `parallel` is in force

    def apply(self, root: Any) -> None:
        """What has to be done beside a plan that diffusers has applied."""
        assert self.parallel is not None
        self.applied = True
        hook = _hook(root, "", "input")
        names = tuple(inspect.signature(type(root).forward).parameters)[1:]
        hook.fn_ref.pre_forward = functools.partial(_split_arguments, hook, names)
        for module in self.parallel.attentions(root):
            module.processor = copy.copy(module.processor)
            module.processor._parallel_config = None  # type: ignore[union-attr]

    def __call__(self, root: Any) -> None:
        """Undoes it all; the model stays parallel, as diffusers does it."""
        root.__dict__.pop(ENABLE, None)
        if self.applied:
            assert self.parallel is not None
            self.applied = False
            _exchange_plans(root, self.parallel.plan(root), type(root)._cp_plan)
            for module in self.parallel.attentions(root):
                module.processor._parallel_config = root._parallel_config  # type: ignore[union-attr]

    def __deepcopy__(self, memo: dict[int, Any]) -> Followed:
        copied = Followed(self.parallel)
        copied.applied = self.applied
        return copied


def _exchange_plans(root: Any, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    home = _hooks(root)
    home.remove_context_parallel(root, old)
    home.apply_context_parallel(root, context_of(root._parallel_config), new)


def follow(root: Any, parallel: Parallel | None) -> None:
    """Has a model's `enable_parallelism`, in the past or in the future, fit what was replaced in it."""
    if not hasattr(root, ENABLE):
        return
    followed = root.__dict__[RELEASE] = Followed(parallel)
    root.__dict__[ENABLE] = types.MethodType(_enable, root)
    config = context_of(getattr(root, "_parallel_config", None))
    if config is None:
        return
    if parallel is not None and _carries(root, type(root)._cp_plan):
        _exchange_plans(root, type(root)._cp_plan, parallel.plan(root))
        followed.apply(root)
    _agree(root, config)


def _enable(self: Any, *, config: Any, cp_plan: Any = None, **options: Any) -> None:
    """diffusers' enable_parallelism, with the family's plan, and errors before anything is changed."""
    followed: Followed | None = self.__dict__.get(RELEASE)
    stock = type(self).enable_parallelism
    context = context_of(config)
    if followed is None or context is None or getattr(self, "_parallel_config", None) is not None:
        stock(self, config=config, cp_plan=cp_plan, **options)
        return
    reason = _obstacle(self, cp_plan) or _shares_batch(self, context)
    if reason:
        raise ValueError(f"enable_parallelism: {reason}")
    parallel = followed.parallel if cp_plan is None else None
    stock(self, config=config, cp_plan=cp_plan if parallel is None else parallel.plan(self), **options)
    if parallel is not None:
        followed.apply(self)
    _agree(self, context)


def _shares_batch(root: Any, context: Config) -> str:
    """Why ranks that share a model's batch cannot share its tokens; empty if they do not, or can."""
    split = root.__dict__.get(guidance.ATTRIBUTE)
    return guidance.why_not_tokens(split.group, context) if split is not None else ""


PLAIN = "diffusers.models.attention_processor.AttnProcessor2_0"


def _obstacle(root: Any, cp_plan: Any) -> str:
    """Why tokens of a model cannot be split; empty if they can."""
    for module in root.modules():
        processor = module.__dict__.get("processor")
        if processor is not None and ATTRIBUTE in module.__dict__ and not hasattr(processor, "_parallel_config"):
            if cp_plan is None and class_of(processor) == PLAIN:
                continue  # such as an attention that refines the text, which diffusers' own plans do not split
            return (
                "expected attention that exchanges tokens between ranks, which diffusers does not have in "
                f"{class_of(processor)} of {type(root).__name__}"
            )
    if cp_plan is None and root._cp_plan is None:
        return f"expected a cp_plan, since diffusers has none for {type(root).__name__}"
    return why_not_offloaded(root)


def why_not_offloaded(root: nn.Module) -> str:
    """Why a model whose tokens are split, or are to be, must not be as it is; empty if it may."""
    for module in root.modules():
        registry = module.__dict__.get("_diffusers_hook")
        if registry is not None and any("group_offloading" in name for name in registry.hooks):
            return f"expected a {type(root).__name__} that is not offloaded by groups, got one that is"
    return ""


def check(root: nn.Module) -> None:
    """Raises where `optimize` cannot make a model right that is parallel already."""
    config = context_of(getattr(root, "_parallel_config", None))
    if config is not None:
        reason = why_not_offloaded(root) or _shares_batch(root, config)
        if reason:
            raise ValueError(f"obj: with context parallelism, {reason}")


def _agree(root: nn.Module, config: Config) -> None:
    """Raises on every rank where ranks have replaced different modules: their calls would wait for one another."""
    replaced = [
        (name, site.class_name, site.rounding)
        for name, site in ((name, module.__dict__.get(ATTRIBUTE)) for name, module in root.named_modules())
        if site is not None
    ]
    group = config._flattened_mesh.get_group()
    mine = torch.tensor([zlib.crc32(repr(replaced).encode())], device=config._device)
    everyones = mine.new_empty(dist.get_world_size(group))
    all_gather(everyones, mine, group=group)
    if len(set(everyones.tolist())) > 1:
        raise RuntimeError(
            "context parallelism: expected the same modules to be replaced on every rank, got differences between the "
            f"ranks; this one has replaced {len(replaced)}: call optimize with the same arguments on all of them"
        )


def lines(root: nn.Module) -> list[str]:
    """What the report says of a model's parallelism."""
    config = context_of(getattr(root, "_parallel_config", None))
    if config is None:
        return []
    kinds = [f"{name} {getattr(config, f'{name}_degree')}" for name in ("ulysses", "ring")]
    mode = " x ".join(kind for kind in kinds if not kind.endswith(" 1"))
    mode += ", uneven" if config.ulysses_anything or config.ring_anything else ""
    group = config._flattened_mesh.get_group()
    followed = root.__dict__.get(RELEASE)
    plan = "this package's plan" if followed is not None and followed.applied else "diffusers' plan"
    ulysses = ranks_of(config, "ulysses")
    exchange = "" if ulysses is None else peer_memory.line(ulysses.group)
    return [
        f"context parallelism of {type(root).__name__}: {mode}; rank {dist.get_rank(group)} of "
        f"{dist.get_world_size(group)}; {plan}{exchange and f'; exchange by {exchange}'}"
    ]
