"""Guidance over ranks: every rank computes some samples of a model's batch, and attention exchanges nothing.

Classifier-free guidance calls a model with a batch of two halves, with and without the prompt. Two ranks compute a half
each and gather the results at the end of the call.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..engine.guards import class_of
from .ranks import all_gather, context_of, token_ranks

ATTRIBUTE = "_ltx_kernels_batch"
OF_BLOCKS = frozenset({"skip_layers", "spatio_temporal_guidance_blocks"})  # of SD3 and LTX-2: numbers of blocks


class BatchSplit:
    """What `split_batch` returns. ``remove()``, or the end of a ``with`` block, gives the model its calls back."""

    def __init__(self, model: nn.Module, group: Any) -> None:
        self.model, self.group = model, group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.signature = inspect.signature(type(model).forward)
        self.parameters = tuple(self.signature.parameters)[1:]
        self.handles = (
            model.register_forward_pre_hook(self._split, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._gather),
        )
        model.__dict__[ATTRIBUTE] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchSplit:
        """Of a copy of the model, in which its hooks are copied too; a group of processes cannot be copied."""
        copied = copy.copy(self)
        memo[id(self)] = copied
        copied.model = copy.deepcopy(self.model, memo)
        copied.handles = copy.deepcopy(self.handles, memo)
        return copied

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.model.__dict__.pop(ATTRIBUTE, None)

    def __enter__(self) -> BatchSplit:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _split(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.signature.bind(model, *args, **kwargs)  # raises where the model's own call does
        given = {**dict(zip(self.parameters, args)), **kwargs}
        batch = len(given[self.parameters[0]])
        if batch % self.size:
            raise ValueError(
                f"{self.parameters[0]}: expected a batch that {self.size} ranks share evenly (split_batch), got {batch}"
            )
        return (), {name: v if name in OF_BLOCKS else self._part(v, batch) for name, v in given.items()}

    def _part(self, value: Any, batch: int) -> Any:
        """This rank's samples of an argument that has `batch` of them; anything else as it is."""
        if isinstance(value, Tensor):
            return value.chunk(self.size)[self.rank] if value.dim() and value.shape[0] == batch else value
        if not isinstance(value, list):
            return value
        if value and all(isinstance(x, Tensor) and x.dim() and x.shape[0] == batch for x in value):
            return [self._part(x, batch) for x in value]
        length = batch // self.size
        return value[self.rank * length : (self.rank + 1) * length] if len(value) == batch else value

    def _gather(self, model: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            if output.requires_grad:
                raise ValueError("split_batch: expected calls without gradients, got one whose result needs one")
            output = output.contiguous()
            result = output.new_empty(self.size * output.shape[0], *output.shape[1:])
            all_gather(result, output, group=self.group)
            return result
        if isinstance(output, list) and output and all(isinstance(x, Tensor) for x in output):
            return list(self._gather(model, args, torch.stack(output)).unbind())
        if isinstance(output, Mapping):
            return type(output)(**{name: self._gather(model, args, x) for name, x in output.items()})
        if isinstance(output, tuple):
            return tuple(self._gather(model, args, x) for x in output)
        return output


def split_batch(model: nn.Module, group: Any = None) -> BatchSplit:
    """Has every rank compute an equal part of a model's batch: guidance over two GPUs.

    Equivalent to this around every call, for all arguments that have a batch::

        part = model(**{name: x.chunk(ranks)[rank] for name, x in inputs.items()})
        torch.cat(all_gather(part))

    An argument has a batch where it is a tensor, or a list, as long as the first argument is. A list of tensors that
    are that long is split in each of them. Lists of blocks' numbers (``skip_layers``) stay whole. Every rank has to
    make the same calls with the same values, so pipelines need generators of the same seed. It goes with `optimize` in
    either order, with models that have no context parallelism, and, where ``group`` is one dimension of a mesh, with
    context parallelism over another.

    Args:
        model: A denoiser whose guidance is one call with a batch of two, as in the pipelines of LTX-Video, LTX-2,
            Stable Diffusion 3, CogVideoX and Z-Image. Where guidance is two calls (Wan, Qwen-Image), there is nothing
            to split in a batch of one.
        group: The torch.distributed process group of the ranks; None: all of them.

    Returns:
        An object with ``remove()``, also a context manager.

    Raises:
        TypeError: ``model`` is no module, or ``group`` no process group.
        RuntimeError: torch.distributed is not initialized, or the model's batch is split already.
        ValueError: This rank is not in ``group``, or two ranks of it share tokens of the model. At a call: a batch that
            the ranks cannot share evenly, or one that needs gradients.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {class_of(model)}")
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("group: expected torch.distributed to be initialized, got no default process group")
    if ATTRIBUTE in model.__dict__:
        raise RuntimeError("model: expected one whose batch is whole, got one that split_batch was called with before")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: expected one that this rank is in, got one of other ranks")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a process group, such as mesh.get_group(), got {class_of(group)}")
    if reason := why_not_tokens(group, getattr(model, "_parallel_config", None)):
        raise ValueError(f"group: {reason}")
    return BatchSplit(model, group)


def why_not_tokens(group: Any, parallel: Any) -> str:
    """Why ranks that share a model's batch cannot share its tokens too; empty if they can."""
    config = context_of(parallel)
    of_batch = dist.get_process_group_ranks(group)
    both = [] if config is None else sorted(set(of_batch) & set(token_ranks(config)))
    if len(both) < 2:
        return ""
    return (
        f"expected ranks that share the batch (split_batch) or the tokens (context parallelism), got ranks {both} with "
        "both; give each a dimension of a mesh"
    )


def lines(root: nn.Module) -> list[str]:
    """What the report says of a model whose batch is split."""
    split = root.__dict__.get(ATTRIBUTE)
    name = type(root).__name__
    return [f"batch of {name} split; rank {split.rank} of {split.size}"] if split is not None else []
