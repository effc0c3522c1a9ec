"""Many processes on few GPUs: each sees all of them, and another one first."""

from __future__ import annotations

import os

import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"


def name_gpus() -> None:
    """Writes down which GPUs there are, for processes to come."""
    os.environ.setdefault(VISIBLE, ",".join(map(str, range(torch.cuda.device_count()))))


def take_turns(turn: int) -> dict[str, str]:
    """What process number `turn` needs in its environment before it looks for GPUs."""
    gpus = os.environ.get(VISIBLE, "").split(",")
    first = turn % len(gpus)
    return {VISIBLE: ",".join(gpus[first:] + gpus[:first])} if len(gpus) > 1 else {}
