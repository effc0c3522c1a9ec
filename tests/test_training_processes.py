"""Training on several processes: DDP and FSDP2 around an optimized model with adapters."""

from __future__ import annotations

import copy
import datetime
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

pytest.importorskip("diffusers")
pytest.importorskip("peft")
from families import randn
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


def ddp(model: Any) -> nn.Module:
    return DistributedDataParallel(model)


def ddp_static(model: Any) -> nn.Module:
    return DistributedDataParallel(model, static_graph=True)


def fsdp(model: Any) -> nn.Module:
    for block in model.transformer_blocks:
        fully_shard(block)
    sharded: nn.Module = fully_shard(model)
    return sharded


def fsdp_mixed(model: Any) -> nn.Module:
    """Shards in float32 that are gathered in bfloat16; gradients are added in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.transformer_blocks:
        fully_shard(block, mp_policy=policy)
    sharded: nn.Module = fully_shard(model, mp_policy=policy)
    return sharded


WAYS: dict[str, tuple[Callable[[Any], nn.Module], torch.dtype, bool]] = {  # wrap, dtype, checkpointing
    "ddp": (ddp, torch.float32, False),
    "ddp-bfloat16-checkpoints": (ddp_static, torch.bfloat16, True),
    "fsdp": (fsdp, torch.float32, False),
    "fsdp-bfloat16-checkpoints": (fsdp, torch.bfloat16, True),
    "fsdp-mixed": (fsdp_mixed, torch.float32, False),
}


def compare(ltx: ModuleType, rank: int, way: str) -> None:
    wrap, dtype, checkpointing = WAYS[way]
    family = FAMILIES["ltx"]
    model = with_adapters(make(family, "cpu", dtype), family)
    batches = [{**family.inputs(2), "hidden_states": randn(2, 24, 8, seed=7 + each)} for each in range(WORLD)]
    exact = gradients(copy.deepcopy(model).double(), batches, torch.float64)
    if checkpointing:
        model.enable_gradient_checkpointing()
    used = torch.bfloat16 if way == "fsdp-mixed" else dtype
    stock = gradients(wrap(copy.deepcopy(model)), [batches[rank]], used)
    report = ltx.optimize(model)
    wrapped = wrap(model)
    ours = gradients(wrapped, [batches[rank]], used)
    assert_as_exact(ours, stock, exact)
    again = gradients(wrapped, [batches[rank]], used)
    assert all(torch.equal(again[name], ours[name]) for name in ours)
    (site,) = [site for site in report.sites if site.name == BLOCK]
    assert site.fallbacks == {} and site.gradients == site.calls > 0
    assert (APART in str(report)) == way.startswith("fsdp")  # its parameters do not lie side by side


def worker(rank: int, port: int, ltx_path: str) -> None:
    from kernels import get_local_kernel

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=120))
    ltx = get_local_kernel(Path(ltx_path), backend="cpu")
    wrong = []
    for way in WAYS:
        try:
            compare(ltx, rank, way)
        except Exception as error:
            wrong.append(f"{way}: {type(error).__name__}: {error}")
    dist.destroy_process_group()
    if wrong:
        raise AssertionError("\n".join(wrong))


@pytest.mark.slow
def test_gradients_of_two_processes(ltx: ModuleType, backend: str) -> None:
    """The mean of two processes' gradients is as near to float64's as that of stock models, wrapped alike."""
    if backend != "cpu":
        pytest.skip("the processes load the CPU build")
    build = Path(ltx.__file__).parent.parent
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(worker, (port, str(build)), nprocs=WORLD)
