"""The ranks of diffusers' context parallelism, and the collectives of torch that they call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Config(Protocol):
    """What diffusers' ContextParallelConfig holds."""

    ulysses_degree: int
    ring_degree: int
    ulysses_anything: bool
    ring_anything: bool
    mesh: Any
    _ulysses_mesh: Any
    _ring_mesh: Any
    _flattened_mesh: Any
    _device: torch.device


def context_of(parallel: Any) -> Config | None:
    """The part of a parallel configuration that splits tokens; None where there is none."""
    if parallel is None:
        return None
    config = getattr(parallel, "context_parallel_config", parallel)
    return config if hasattr(config, "ulysses_degree") else None


def token_ranks(config: Config) -> list[int]:
    """The ranks that share a model's tokens with this one, also before diffusers has set up the configuration."""
    if config.mesh is None:
        return list(range(config.ring_degree * config.ulysses_degree))
    ranks: list[int] = config.mesh["ring", "ulysses"].mesh.flatten().tolist()
    return ranks


def all_gather(output: Tensor, input: Tensor, **options: Any) -> Any:
    """torch's collective on one tensor, by the name that it has: torch 2.13 warns of the older one."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return getattr(dist, name)(output, input, **options)


@dataclass(frozen=True)
class Ranks:
    """The ranks of one dimension of the mesh. even: Every rank holds as many tokens as the others."""

    group: Any
    size: int
    rank: int
    even: bool

    def lengths(self, x: Tensor) -> list[int]:
        """The number of tokens of each rank, where this one holds x [B, S, ...]. Uneven ones cost a collective."""
        if self.even:
            return [x.shape[1]] * self.size
        device = "cpu" if "cpu" in str(dist.get_backend(self.group)) else x.device
        all_lengths = torch.empty(self.size, dtype=torch.int64, device=device)
        all_gather(all_lengths, torch.tensor([x.shape[1]], device=device), group=self.group)
        return all_lengths.tolist()

    def exchange(
        self, send: Tensor, sent: Sequence[int], received: Sequence[int], later: bool = False
    ) -> tuple[Tensor, Any]:
        """All-to-all of the rows of a contiguous tensor; one length for each rank.

        With `later` the rows are there once the work that is returned too has been waited for.
        """
        result = send.new_empty(sum(received), *send.shape[1:])
        rows = None if self.even else (list(received), list(sent))
        output_rows, input_rows = rows or (None, None)
        work = dist.all_to_all_single(result, send, output_rows, input_rows, group=self.group, async_op=later)
        return result, work

    def gather(self, x: Tensor) -> tuple[Tensor, Any]:
        """x [S, ...] of all ranks, [size S, ...], once the work that is returned too has been waited for."""
        result = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        # torch.compile supports collectives that end before they return.
        return result, all_gather(result, x, group=self.group, async_op=not torch.compiler.is_compiling())


def ranks_of(config: Config, name: str) -> Ranks | None:
    """The ranks of "ulysses" or of "ring"; None where the configuration has one rank of that kind."""
    size = getattr(config, f"{name}_degree")
    if size == 1:
        return None
    group = getattr(config, f"_{name}_mesh").get_group()
    return Ranks(group, size, dist.get_rank(group), not getattr(config, f"{name}_anything"))


def wait_for(work: Any) -> None:
    """Waits for a collective that may have ended before it returned."""
    if work is not None:
        work.wait()
