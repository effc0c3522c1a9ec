"""Processes of one CPU that are the ranks of a process group."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import distributed as dist


def run_ranks(worker: Callable[..., None], world: int, ltx: ModuleType, *arguments: Any) -> None:
    """Calls worker(rank, world, port, build, *arguments) in `world` processes. Each begins with `join_ranks`."""
    build = Path(ltx.__file__ or "").parent.parent
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(worker, (world, port, str(build), *arguments), nprocs=world)


def join_ranks(rank: int, world: int, port: int, build: str) -> ModuleType:
    """Makes the process one of the ranks, with one thread; returns the CPU build."""
    from kernels import get_local_kernel

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=300))
    return get_local_kernel(Path(build), backend="cpu")
