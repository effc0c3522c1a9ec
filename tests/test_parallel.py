"""Optimized models inside diffusers' context parallelism: two processes on the CPU, equal to one.

gloo takes tensors that NCCL refuses, so every tensor that reaches a collective is asked whether it is contiguous.
"""

from __future__ import annotations

import datetime
import os
import socket
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

diffusers = pytest.importorskip("diffusers")

WORLD = 2


def ltx_video(text: int = 8) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=16,
        cross_attention_dim=64,
        num_layers=2,
        caption_channels=16,
    )
    mask = torch.ones(2, text)
    mask[0, text // 2 - 1 :] = 0  # the halves of the prompt differ
    return model.eval(), {
        "hidden_states": torch.randn(2, 32, 8),
        "encoder_hidden_states": torch.randn(2, text, 16),
        "timestep": torch.tensor([500.0, 500.0]),
        "encoder_attention_mask": mask,
        "num_frames": 2,
        "height": 4,
        "width": 4,
    }


def wan() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    return model.eval(), {
        "hidden_states": torch.randn(2, 4, 2, 8, 8),
        "timestep": torch.tensor([10, 10]),
        "encoder_hidden_states": torch.randn(2, 8, 16),
    }


def flux() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    return model.eval(), {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 8, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([1.0]),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }


CASES = [(make, order) for make in (ltx_video, wan, flux) for order in ("before", "after")]


def _run(make: Any, order: str, ltx: ModuleType) -> str:
    """What went wrong in one case; empty if nothing did."""
    from diffusers import ContextParallelConfig

    model, inputs = make()
    with torch.no_grad():
        expected = model(**inputs, return_dict=False)[0]
    if order == "before":
        report = ltx.optimize(model)
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=WORLD))
    if order == "after":
        report = ltx.optimize(model)
    strided: list[str] = []
    gather = dist.all_gather

    def asked(outputs: Any, tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if not tensor.is_contiguous():
            strided.append(f"{list(tensor.shape)} with strides {tensor.stride()} reaches all_gather")
        return gather(outputs, tensor, *arguments, **options)

    dist.all_gather = asked
    try:
        with torch.no_grad():
            result = model(**inputs, return_dict=False)[0]
    finally:
        dist.all_gather = gather
    distance = ((result - expected).norm() / expected.norm()).item()
    if distance > 1e-6:
        return f"differs from one process by {distance:.2e}"
    if strided:
        return strided[0]
    return f"stock calls: {report.fallbacks}" if report.fallbacks else ""


def _worker(rank: int, port: int, ltx_path: str) -> None:
    import sys
    from pathlib import Path

    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from kernels import get_local_kernel

    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD))
    torch.set_num_threads(1)
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it, and a torch for CPUs has none
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=60))
    ltx = get_local_kernel(Path(ltx_path), backend="cpu")
    wrong = []
    for make, order in CASES:
        problem = _run(make, order, ltx)
        if problem:
            wrong.append(f"{make.__name__}, optimized {order}, rank {rank}: {problem}")
    dist.destroy_process_group()
    if wrong:
        raise AssertionError("\n".join(wrong))


def test_ulysses_equals_one_process(ltx: ModuleType, backend: str) -> None:
    """LTX-Video's stock model fails here: its mask has every head, and a rank has some of them."""
    if backend != "cpu":
        pytest.skip("the processes load the CPU build")
    from pathlib import Path

    build = Path(ltx.__file__).parent.parent
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_worker, (port, str(build)), nprocs=WORLD)
