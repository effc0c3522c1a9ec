"""A training step that a program has captured as one CUDA graph trains what the same steps train without it."""

from __future__ import annotations

import copy
import functools
import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")
pytest.importorskip("peft")
from test_families import FAMILIES, cast, flat, make
from test_training import with_adapters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("one_thread", "without_cudnn_attention")

WARM_UP, REPLAYS = 3, 4


class Training:
    """A model, its optimizer, and inputs at places of their own, into which each batch is copied."""

    def __init__(self, model: nn.Module, inputs: dict[str, Any], dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-3, fused=True, capturable=True)
        self.inputs = {key: value.clone() if isinstance(value, Tensor) else value for key, value in inputs.items()}

    def state(self) -> Tensor:
        return torch.cat([parameter.detach().flatten().double() for parameter in self.trained])

    def take(self, inputs: dict[str, Any]) -> None:
        for key, value in inputs.items():
            if isinstance(value, Tensor):
                self.inputs[key].copy_(value)

    def step(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", self.dtype, enabled=self.dtype != torch.float32):
            outputs = flat(self.model(**self.inputs, return_dict=False))
        loss = torch.stack([output.float().square().mean() for output in outputs]).sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def captured(training: Training) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = training.step()
    return graph, loss


@pytest.mark.parametrize("checkpoints", [False, True], ids=["kept", "checkpoints"])
@pytest.mark.parametrize(
    "trained, dtype",
    [("adapters", torch.float32), ("adapters", torch.bfloat16), ("all weights", torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("name", ["ltx", "flux", "wan-t2v"])
def test_captured_steps(
    ltx: ModuleType, cuda_graphs: str, name: str, trained: str, checkpoints: bool, dtype: torch.dtype
) -> None:
    """Losses, what is trained, and a validation after the replays, on batches that take turns."""
    family = FAMILIES[name]
    stock = make(family, cuda_graphs, dtype)
    stock = with_adapters(stock, family) if trained == "adapters" else stock.requires_grad_(True)
    if checkpoints:  # which must not save the state of the generators: a capture does not permit it
        save = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        stock.enable_gradient_checkpointing(save)
    batches = [cast(family.inputs(2), cuda_graphs, dtype) for _ in range(2)]
    batches[1]["hidden_states"] = batches[1]["hidden_states"].flip(0) * 0.5
    runs = []
    for model in (copy.deepcopy(stock), stock):
        ltx.optimize(model, graphs=False)
        runs.append(Training(model, batches[0], dtype))
    plain, graphed = runs
    # The same bits in every run: cuDNN and flash attention add up their gradients in any order.
    with sdpa_kernel(SDPBackend.MATH):
        for number in range(WARM_UP):
            for run in runs:
                run.take(batches[number % 2])
                run.step()
        graph, loss = captured(graphed)
        before = plain.state()
        for number in range(REPLAYS):
            for run in runs:
                run.take(batches[number % 2])
            want = plain.step()
            graph.replay()
            assert (loss - want).abs() <= 1e-4 * want.abs()
        moved = (plain.state() - before).norm()
        assert moved > 0
        assert (graphed.state() - plain.state()).norm() <= 1e-3 * moved
        with torch.no_grad():
            for run in runs:
                run.model.eval()
            for _ in range(3):
                want, got = (flat(run.model(**batches[0], return_dict=False))[0] for run in runs)
                assert (got - want).norm() <= 1e-3 * want.norm()


def test_a_capture_keeps_nothing_of_its_inputs(ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made of an input before the capture is not what the replays read; what was made of a weight is."""
    kept = importlib.import_module(f"{ltx.__name__}.integrations.engine.kept")

    class Site:
        def __init__(self) -> None:
            self.cache: dict[Any, Any] = {}

    site, given, weight = Site(), torch.ones(3, device=device), nn.Parameter(torch.ones(3, device=device), False)
    for source, again in ((given, 2), (weight, 1)):
        calls: list[Tensor] = []

        def make_one(source: Tensor = source, calls: list[Tensor] = calls) -> Tensor:
            calls.append(source)
            return source + 1

        monkeypatch.setattr(kept, "is_capturing", lambda: False)
        for _ in range(2):
            kept.kept(site, "sum", (source,), make_one)
        monkeypatch.setattr(kept, "is_capturing", lambda: True)
        kept.kept(site, "sum", (source,), make_one)
        assert len(calls) == again


def test_what_a_graph_reads_lives_as_long_as_the_graph(
    ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = importlib.import_module(f"{ltx.__name__}.integrations.engine.kept")
    site, weight = type("Site", (), {"cache": {}})(), nn.Parameter(torch.ones(3, device=device), False)
    value = kept.kept(site, "sum", (weight,), lambda: weight + 1)
    monkeypatch.setattr(kept, "is_capturing", lambda: True)
    before, reads = len(kept._captured), []
    with kept.read_by(reads):
        assert kept.kept(site, "sum", (weight,), lambda: weight + 1) is value
    assert reads[0] is value and len(reads) == 1 and len(kept._captured) == before
