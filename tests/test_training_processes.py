"""Training on several processes: DDP and FSDP2 around an optimized model with adapters."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

pytest.importorskip("diffusers")
pytest.importorskip("peft")
from families import randn
from helpers.ranks import join_ranks, run_ranks
from test_families import FAMILIES, cast, make
from test_training import assert_as_exact, with_adapters
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

WORLD, BLOCK = 2, "diffusers.LTXVideoTransformerBlock"
APART = "projections of diffusers.LTXAttention one by one"


def gradients(model: nn.Module, batches: list[dict[str, Any]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Of the mean over batches; a wrapped model takes one batch, and its processes take the mean."""
    model.zero_grad()
    for inputs in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            (output,) = model(**cast(inputs, "cpu", dtype), return_dict=False)
        (output.double().square().mean() / len(batches)).backward()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            found[name.removeprefix("module.")] = whole.clone()
    return found


def fsdp(model: Any, **options: Any) -> nn.Module:
    for block in model.transformer_blocks:
        fully_shard(block, **options)
    sharded: nn.Module = fully_shard(model, **options)
    return sharded


# Gathered in bfloat16; gradients are added in float32.
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclasses.dataclass(frozen=True)
class Way:
    """How a model is wrapped, the dtype of its weights, that of its calls, and whether it has checkpoints."""

    wrap: Callable[[Any], nn.Module]
    weights: torch.dtype = torch.float32
    calls: torch.dtype = torch.float32  # bfloat16: under autocast
    checkpoints: bool = False


HALF = torch.bfloat16
WAYS = {
    "ddp": Way(DistributedDataParallel),
    "ddp-bfloat16-checkpoints": Way(functools.partial(DistributedDataParallel, static_graph=True), HALF, HALF, True),
    "fsdp": Way(fsdp),
    "fsdp-bfloat16-checkpoints": Way(fsdp, HALF, HALF, True),
    "fsdp-mixed": Way(functools.partial(fsdp, mp_policy=MIXED), calls=HALF),
}


def compare(ltx: ModuleType, rank: int, way: Way, sharded: bool) -> None:
    family = FAMILIES["ltx"]
    model = with_adapters(make(family, "cpu", way.weights), family)
    batches = [{**family.inputs(2), "hidden_states": randn(2, 24, 8, seed=7 + each)} for each in range(WORLD)]
    exact = gradients(copy.deepcopy(model).double(), batches, torch.float64)
    if way.checkpoints:
        model.enable_gradient_checkpointing()
    stock = gradients(way.wrap(copy.deepcopy(model)), [batches[rank]], way.calls)
    report = ltx.optimize(model)
    wrapped = way.wrap(model)
    ours = gradients(wrapped, [batches[rank]], way.calls)
    assert_as_exact(ours, stock, exact)
    for _ in range(3):  # the second is recorded
        again = gradients(wrapped, [batches[rank]], way.calls)
        assert all(torch.equal(again[name], ours[name]) for name in ours)
    (site,) = [site for site in report.sites if site.name == BLOCK]
    assert site.fallbacks == {} and site.gradients == site.calls > 0
    assert (APART in str(report)) == sharded  # its parameters do not lie side by side


def worker(rank: int, world: int, port: int, build: str) -> None:
    ltx = join_ranks(rank, world, port, build)
    wrong = []
    for name, way in WAYS.items():
        try:
            compare(ltx, rank, way, name.startswith("fsdp"))
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    dist.destroy_process_group()
    if wrong:
        raise AssertionError("\n".join(wrong))


@pytest.mark.slow
def test_gradients_of_two_processes(ltx: ModuleType, backend: str) -> None:
    """Gradients are compared with those of a stock model that has the same wrapper, and with float64."""
    if backend != "cpu":
        pytest.skip("the processes load the CPU build")
    run_ranks(worker, WORLD, ltx)
