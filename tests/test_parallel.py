"""Optimized models inside diffusers' context parallelism: processes on the CPU, equal to one.

The processes are started once for a list of cases. gloo takes tensors that NCCL refuses, so every tensor that reaches a
collective is asked whether it is contiguous.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import logging
import platform
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

diffusers = pytest.importorskip("diffusers")

from families import families, random_  # noqa: E402
from helpers.build import ROOT  # noqa: E402
from helpers.ranks import join_ranks, run_ranks  # noqa: E402

ULYSSES = {"ulysses_degree": 2}
ULYSSES_ANYTHING = {**ULYSSES, "ulysses_anything": True}
RING = {"ring_degree": 2}
RING_ANYTHING = {**RING, "ring_anything": True}
BOTH = {**ULYSSES, **RING}
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
EXCHANGES = ("all_to_all_single", GATHER)


@dataclass(frozen=True)
class Case:
    """A family under a configuration.

    config: Arguments of ContextParallelConfig.
    options: Of optimize.
    dtype: Of the model. In bfloat16 the result may be as far from the stock model in float32 as that of one process.
    samples: The batch.
    text: So many tokens of the prompt; None leaves it as the family has it.
    masked: With the family's mask.
    column: The timestep is [B, 1], the time of each sample, which all of its tokens have.
    later: enable_parallelism comes before optimize.
    kernel: `attention` takes the tensors, as on a GPU with the kernel; a ring then merges by log-sum-exp.
    exchanges: How often a forward calls each collective; None where that is not the point.
    batch: The batch is split, and the tokens only where there is a config, of half of the ranks.
    batch_first: Before the tokens, where both are split over the same ranks, which is an error.
    gradients: With those of the parameters, which the ranks add up.
    own_plan: The caller gives diffusers' plan, which splits LTX-Video's prompt, so that its mask is gathered.
    compiled: By torch.compile, as one graph.
    ahead: Values are sent before query and key, however few they are.
    peers: The ranks share memory, as GPUs that reach each other's do; copies take the place of collectives.
    elsewhere: Options of the other ranks, where they differ.
    error: What the error says, where there has to be one.
    prepare: Something that is done to the model before all.
    """

    family: str
    config: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    samples: int = 2
    text: int | None = 4
    masked: bool = False
    column: bool = False
    later: bool = False
    kernel: bool = False
    exchanges: tuple[int, int] | None = None
    batch: bool = False
    batch_first: bool = True
    gradients: bool = False
    own_plan: bool = False
    compiled: bool = False
    ahead: bool = False
    peers: bool = False
    elsewhere: dict[str, Any] | None = None
    error: str = ""
    prepare: Callable[[nn.Module], Any] = lambda model: None


def offloaded(model: Any) -> None:
    model.enable_group_offload(onload_device=torch.device("cpu"), offload_type="leaf_level")


def with_lora(model: Any) -> None:
    """An adapter that is not fused; the same on every rank."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    names = ["to_q", "to_k", "to_v", "to_out.0"]
    model.add_adapter(peft.LoraConfig(r=4, init_lora_weights=False, target_modules=names))


def one_head(model: Any) -> None:
    """Heads that two ranks cannot share."""
    for module in model.modules():
        if "processor" in module.__dict__:
            module.heads = 1


# The prompt's 4 tokens divide by two, but for the "anything" modes. LTX-Video's prompt may have any length.
TWO = (
    Case("ltx", ULYSSES, masked=True, exchanges=(2 * 2, 0)),
    Case("ltx", ULYSSES, masked=True, text=7, later=True, exchanges=(2 * 2, 0)),
    Case("ltx", RING, masked=True, exchanges=(0, 2)),
    Case("ltx", RING, masked=True, later=True, kernel=True, exchanges=(0, 2)),
    Case("ltx", ULYSSES_ANYTHING, masked=True, exchanges=(2 * 2, 2)),
    Case("ltx-per_token", ULYSSES, text=7),
    Case("ltx-per_token", RING, text=7, kernel=True),
    Case("ltx", ULYSSES, text=7, column=True),
    Case("ltx", RING_ANYTHING, text=7, column=True, later=True),
    Case("ltx", ULYSSES, text=7, column=True, compiled=True),
    Case("ltx2", ULYSSES, text=None, column=True),
    Case("ltx2", ULYSSES, masked=True, text=None),
    Case("ltx2", RING, masked=True, text=None, later=True),
    Case("ltx2-interleaved", ULYSSES, text=None, later=True),
    Case("ltx2-3", ULYSSES, masked=True, text=None),
    Case("ltx2-3", RING, text=None, kernel=True),
    Case("wan-t2v", ULYSSES, text=None, exchanges=(2 * 2, 0)),
    Case("wan-i2v", RING, text=None, later=True),
    Case("wan-ti2v", ULYSSES, text=None, later=True),
    Case("wan-chronoedit", RING, text=None, kernel=True),
    Case("flux", ULYSSES, exchanges=(2 * 4, 0)),
    Case("flux", RING, later=True, kernel=True),
    Case("flux", ULYSSES_ANYTHING, text=5),
    Case("flux", RING_ANYTHING, text=5, kernel=True),
    Case("flux2", ULYSSES, later=True),
    Case("flux2-klein", RING, kernel=True),
    Case("flux2", ULYSSES_ANYTHING, text=5),
    Case("qwenimage", ULYSSES),
    Case("qwenimage", ULYSSES, masked=True),
    Case("qwenimage", RING_ANYTHING, text=5, later=True),
    Case("ltx", ULYSSES, dtype=torch.bfloat16, masked=True),
    Case("flux", RING, dtype=torch.bfloat16, kernel=True),
    Case("ltx", ULYSSES, {"precision": "fp8"}, torch.bfloat16, masked=True),
    Case("wan-t2v", ULYSSES, {"precision": "fp8"}, torch.bfloat16, text=None, later=True),
    Case("flux", RING, {"precision": "fp8"}, torch.bfloat16, kernel=True),
    Case("ltx", ULYSSES, {"graphs": True}, masked=True),
    Case("ltx", ULYSSES, {"rounding": "eager"}, masked=True),
    Case("ltx", ULYSSES, masked=True, text=7, prepare=with_lora),
    Case("ltx", RING, masked=True, later=True, kernel=True, prepare=with_lora),
    Case("flux", ULYSSES, prepare=with_lora),
    # Families without context parallelism too.
    Case("ltx", {}, masked=True, text=7, batch=True, exchanges=(0, 1)),
    Case("ltx2", {}, masked=True, text=None, later=True, batch=True),
    Case("sd3", {}, batch=True, text=None, later=True),
    Case("z_image", {}, batch=True, text=None),
    Case("qwenimage", {}, batch=True, text=5),
    Case("ltx", ULYSSES, masked=True, own_plan=True, exchanges=(2 * 2 + 2 * 3, 2)),
    Case("ltx", RING, masked=True, own_plan=True, exchanges=(0, 2 + 2 * 2)),
    Case("ltx", RING_ANYTHING, masked=True, own_plan=True, text=7),
    Case("ltx", ULYSSES, masked=True, text=7, compiled=True),
    Case("ltx-per_token", RING, text=7, compiled=True),
    Case("ltx", ULYSSES, masked=True, ahead=True, exchanges=(3 * 2, 0)),
    Case("ltx", ULYSSES, {"precision": "fp8"}, torch.bfloat16, masked=True, ahead=True, exchanges=(3 * 2, 0)),
    Case("wan-t2v", ULYSSES, text=None, ahead=True, later=True, exchanges=(3 * 2, 0)),
    Case("ltx2", ULYSSES, text=None, ahead=True, kernel=True),
    Case("ltx", ULYSSES_ANYTHING, ahead=True, exchanges=(2 * 2, 2)),
    Case("ltx", RING, masked=True, ahead=True, exchanges=(0, 2)),
    Case("ltx", ULYSSES, text=7, ahead=True, compiled=True),
    Case("ltx", ULYSSES, masked=True, peers=True, exchanges=(0, 0)),
    Case("ltx", ULYSSES, {"precision": "fp8"}, torch.bfloat16, masked=True, peers=True, exchanges=(0, 0)),
    Case("ltx", ULYSSES, masked=True, own_plan=True, peers=True),
    Case("ltx2", ULYSSES, text=None, peers=True, kernel=True),
    Case("wan-t2v", ULYSSES, text=None, peers=True, later=True, kernel=True, exchanges=(0, 0)),
    Case("flux", ULYSSES, peers=True, exchanges=(0, 0)),
    Case("flux", ULYSSES, {"precision": "fp8"}, torch.bfloat16, peers=True, exchanges=(0, 0)),
    Case("flux2", ULYSSES, peers=True, kernel=True, exchanges=(0, 0)),
    Case("qwenimage", ULYSSES, peers=True),
    Case("wan-t2v", ULYSSES, text=None, gradients=True),
    Case("ltx", ULYSSES, masked=True, gradients=True),
    # What cannot be right raises on every rank.
    Case("ltx", {}, batch=True, gradients=True, error="split_batch: expected calls without gradients"),
    Case("ltx", {}, batch=True, samples=3, error="hidden_states: expected a batch that 2 ranks share evenly"),
    Case("ltx", ULYSSES, batch=True, error="enable_parallelism: expected ranks that share the batch"),
    Case("ltx", ULYSSES, batch=True, batch_first=False, error="group: expected ranks that share the batch"),
    Case("ltx", ULYSSES, batch=True, later=True, error="obj: with context parallelism, expected ranks that share"),
    Case("ltx", ULYSSES, elsewhere={"level": "norms"}, error="the same modules to be replaced on every rank"),
    Case("ltx", ULYSSES, elsewhere={"rounding": "eager"}, later=True, error="same modules to be replaced on every"),
    Case(
        "flux2", ULYSSES, elsewhere={"rounding": "eager"}, error="same modules to be replaced on every"
    ),  # all of them
    Case("sd3", ULYSSES, error="enable_parallelism: expected attention that exchanges tokens"),
    Case("cogvideox-5b", ULYSSES, error="enable_parallelism: expected attention that exchanges tokens"),
    Case("hunyuan_video", ULYSSES, error="expected a cp_plan, since diffusers has none for Hunyuan"),
    Case("z_image", RING, error="enable_parallelism: expected a cp_plan, since diffusers has none for ZImage"),
    Case("wan-vace", ULYSSES, error="enable_parallelism: expected a cp_plan, since diffusers has none for WanVACE"),
    Case("qwenimage", RING, masked=True, error="ring_degree: expected 1 with a mask of shape [2, 2]"),
    Case("wan-t2v", ULYSSES, error="ulysses_degree: expected a divisor of the 1 heads", prepare=one_head, text=None),
    Case("ltx", ULYSSES, error="expected a LTXVideoTransformer3DModel that is not offloaded", prepare=offloaded),
    Case("ltx", ULYSSES, later=True, error="obj: with context parallelism, expected a LTXVideo", prepare=offloaded),
)
THREE = (
    Case("ltx", {"ring_degree": 3}, masked=True, text=7),
    Case("wan-t2v", {"ring_degree": 3}, text=None, kernel=True),
    Case("ltx", {"ulysses_degree": 3, "ulysses_anything": True}, masked=True, text=7),
    Case("ltx", {"ulysses_degree": 3}, masked=True, error="ulysses_degree: expected a divisor of the 2 heads, got 3"),
)
FOUR = (
    Case("ltx2", {"ulysses_degree": 4}, text=None, peers=True),
    Case("ltx", BOTH, masked=True, text=7, exchanges=(3 * 2, 2)),
    Case("ltx2", BOTH, text=None, later=True),
    Case("wan-t2v", BOTH, text=None, kernel=True),
    Case("ltx", ULYSSES, masked=True, text=7, batch=True),
)


def _inputs(case: Case) -> dict[str, Any]:
    family = families()[case.family]
    inputs = {**family.inputs(case.samples), **(family.masked(case.samples) if case.masked and family.masked else {})}
    for name in ("encoder_hidden_states", "encoder_attention_mask", "encoder_hidden_states_mask"):
        if case.text is not None and isinstance(inputs.get(name), torch.Tensor):
            inputs[name] = inputs[name][:, : case.text]
    if case.column:
        inputs["timestep"] = inputs["timestep"].view(case.samples, -1)[:, :1]
    if case.text is not None and "txt_ids" in inputs:
        inputs["txt_ids"] = inputs["txt_ids"][: case.text]
    if case.family.startswith("flux2"):  # as its pipelines give them
        inputs.update({name: inputs[name].expand(2, -1, -1) for name in ("img_ids", "txt_ids")})
    floats = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    keep = ("timestep", "sigma", "img_ids", "txt_ids")
    return {**inputs, **{k: v if k in keep else v.to(case.dtype) for k, v in floats.items()}}


@contextlib.contextmanager
def _watched(strided: list[str]) -> Iterator[collections.Counter[str]]:
    """Counts the collectives, and notes the tensors that NCCL would refuse."""
    calls: collections.Counter[str] = collections.Counter()
    stock = {name: getattr(dist, name) for name in (*EXCHANGES, "all_gather")}

    def watch(name: str) -> Callable[..., Any]:
        def watched(output: Any, input: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            outputs = output if isinstance(output, list) else [output]
            strided.extend(f"{name}: strides {x.stride()}" for x in (input, *outputs) if not x.is_contiguous())
            return stock[name](output, input, *arguments, **options)

        return watched

    for name in stock:
        setattr(dist, name, watch(name))
    try:
        yield calls
    finally:
        for name, function in stock.items():
            setattr(dist, name, function)


HERE = platform.node(), ""


def failing_window(*_: Any) -> Any:
    raise RuntimeError("no memory\nand more")


def lonely_window() -> Any:
    """A window of two ranks that share no memory: this one, with the number 1, does not see the other's."""
    parts = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
    return parts, lambda: [part[0].fill_(2) for part in parts]


def joined_window() -> Any:
    """The same with the other rank's number where it belongs."""
    parts = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
    return parts, lambda: [part[1].fill_(2) for part in parts]


@contextlib.contextmanager
def in_shared_memory(peers: ModuleType) -> Iterator[None]:
    """Ranks on the CPU have windows: files that all of them map."""

    def make_window(group: Any, device: torch.device, nbytes: int) -> Any:
        rank, names = dist.get_rank(group), [""] * dist.get_world_size(group)
        with tempfile.NamedTemporaryFile() as file:
            file.truncate(nbytes)
            dist.all_gather_object(names, file.name, group=group)
            parts = [torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8) for name in names]
            dist.barrier(group)
        assert parts[rank].is_contiguous()
        return peers.Window(parts, functools.partial(dist.barrier, group))

    known = peers._known
    with (
        mock.patch.object(peers, "why_not", lambda device: ""),
        mock.patch.object(peers, "make_window", make_window),
        mock.patch.object(peers, "_known", type(known)()),
    ):
        yield


def _tensors(output: Any) -> torch.Tensor:
    return torch.cat([x.float().flatten() for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)])


def _divide(case: Case, ltx: ModuleType, model: Any) -> None:
    if case.batch and case.config and case.error:  # over the same ranks
        enable = functools.partial(model.enable_parallelism, config=diffusers.ContextParallelConfig(**case.config))
        for share in (lambda: ltx.split_batch(model), enable)[:: 1 if case.batch_first else -1]:
            share()
    elif case.batch and case.config:
        mesh = dist.init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("guidance", "ring", "ulysses"))
        model.enable_parallelism(config=diffusers.ContextParallelConfig(mesh=mesh, **case.config))
        ltx.split_batch(model, mesh["guidance"].get_group())
    elif case.batch:
        ltx.split_batch(model)
    else:
        plan = type(model)._cp_plan if case.own_plan else None
        model.enable_parallelism(config=diffusers.ContextParallelConfig(**case.config), cp_plan=plan)


def _result(case: Case, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """All that a call gives; with gradients, these, after the sum that they are of."""
    model.requires_grad_(case.gradients).zero_grad()
    result = _tensors(model(**inputs, return_dict=case.batch and not case.config))
    if not case.gradients:
        return result
    (result * torch.linspace(-1, 1, result.numel())).sum().backward()
    sums = [result.detach().sum().view(1)]
    return torch.cat(sums + [p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _distance(result: torch.Tensor, expected: torch.Tensor) -> float:
    return ((result - expected).norm() / expected.norm()).item()


def _in_float32(case: Case) -> torch.Tensor:
    """The stock model's result, of the parameters and inputs that the case has after rounding."""
    model = random_(families()[case.family].make()).to(case.dtype).float()
    inputs = _inputs(case)
    floats = {k: v.float() for k, v in inputs.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    with torch.no_grad():
        return _tensors(model(**{**inputs, **floats}, return_dict=False))


def _run(case: Case, ltx: ModuleType, rank: int, world: int) -> str:
    """What went wrong in one case; empty if nothing did."""
    home = f"{ltx.__name__}.integrations"
    names = "attention.choice", "parallel.attention", "parallel.peer_memory"
    dispatch, parallel, peers = (sys.modules[f"{home}.{name}"] for name in names)
    family = families()[case.family]
    model: Any = random_(family.make()).to(case.dtype)
    case.prepare(model)
    inputs = _inputs(case)
    stock_splits = model._cp_plan
    options = case.options if rank == 0 or case.elsewhere is None else case.elsewhere
    with torch.set_grad_enabled(case.gradients):
        if not case.error:
            with ltx.optimize(model, **options):
                expected = _result(case, model, inputs)
        if case.later:
            _divide(case, ltx, model)
        report = ltx.optimize(model, **options)
        if not case.later:
            _divide(case, ltx, model)
        strided: list[str] = []
        with _watched(strided) as calls, contextlib.ExitStack() as stack:
            if case.kernel:
                stack.enter_context(mock.patch.object(dispatch, "runs_kernel", lambda *_: True))
            if case.ahead:
                stack.enter_context(mock.patch.object(parallel, "LEAST_AHEAD", 0))
            if case.peers:
                stack.enter_context(in_shared_memory(peers))
            call = torch.compile(model, backend="aot_eager", fullgraph=True) if case.compiled else model
            result = _result(case, call, inputs)
            counted = tuple(calls[name] for name in EXCHANGES)
            stack.enter_context(mock.patch.object(peers, "wide", lambda *tensors: tensors))
            stack.enter_context(mock.patch.object(parallel, "LEAST_AHEAD", 1 << 60))
            by_element = _result(case, model, inputs) if (case.ahead or case.peers) and not case.compiled else result
            said = str(report)
        if case.gradients:
            dist.all_reduce(result[1:])
    far, allowed = _distance(result, expected), 2e-6
    if case.dtype != torch.float32:
        truth = _in_float32(case)
        far, allowed = _distance(result, truth), 1.2 * _distance(expected, truth)
    if not far <= allowed:
        return f"its error is {far:.2e}, which may be {allowed:.2e}"
    if not torch.equal(result, by_element):
        return "it has other bits where elements are copied one by one, and values travel with query and key"
    if strided:
        return strided[0]
    if case.exchanges is not None and counted != case.exchanges:
        return f"{EXCHANGES} called {counted} times, not {case.exchanges}"
    stock_calls = {reason for reasons in report.fallbacks.values() for reason in reasons}
    stock_calls -= {"arguments encoder_hidden_states_mask"}
    stock_calls -= {reason for reason in stock_calls if case.gradients and "a gradient " in reason}
    stock_calls -= {"torch.compile fuses it with what follows (compiled)"} if case.compiled else set()
    if stock_calls:
        return f"stock calls: {report.fallbacks}"
    if ("; exchange by copies between" in said) != case.peers:
        return f"the report says of the exchange: {said}"
    if f"; rank {rank % 2 if case.batch else rank} of {2 if case.batch else world}" not in str(report):
        return f"the report does not name the rank: {report}"
    return "" if case.batch else _restored(model, report, stock_splits)


def _restored(model: Any, report: Any, stock_splits: Any) -> str:
    """Whether a model that was restored has diffusers' plan again."""
    report.restore()
    if "enable_parallelism" in model.__dict__:
        return "restore leaves enable_parallelism"
    if "" in stock_splits and model._diffusers_hook.get_hook("cp_input---").metadata != stock_splits[""]:
        return "restore leaves another plan than diffusers'"
    processors = [module.processor for module in model.modules() if "processor" in module.__dict__]
    alone = [p for p in processors if hasattr(p, "_parallel_config") and p._parallel_config is None]
    return f"restore leaves {len(alone)} processors without their configuration" if alone else ""


def run_docs(ltx: ModuleType) -> None:
    """The blocks of docs/parallel.md, each with a pipeline of its own: on the CPU, and with a small clip."""
    sys.path.insert(0, str(ROOT / "examples"))
    import ltx_pipeline

    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "parallel.md").read_text(), re.M | re.S)
    clip = {"num_frames": 9, "height": 64, "width": 64, "num_inference_steps": 2, "output_type": "latent"}
    said_of_ranks = ["ulysses 4; rank ", "split; rank ", "ulysses 2; rank "]
    assert len(blocks) == len(said_of_ranks)
    for block, said in zip(blocks, said_of_ranks):
        pipe = ltx_pipeline.load_pipeline("tiny", torch.device("cpu"), torch.float32)
        pipe.set_progress_bar_config(disable=True)
        small = functools.partialmethod(type(pipe).__call__, **clip)
        names = {"pipe": pipe, "ltx": ltx, "dist": dist, "ContextParallelConfig": diffusers.ContextParallelConfig}
        with (
            mock.patch.object(type(pipe), "__call__", small),
            mock.patch.object(type(pipe), "from_pretrained", return_value=mock.Mock(**{"to.return_value": pipe})),
            mock.patch.dict(sys.modules, ltx_fused=ltx),
            mock.patch.object(torch.cuda, "set_device"),
            mock.patch.object(dist, "init_process_group"),
        ):
            exec(re.sub("^ltx.optimize", "report = ltx.optimize", block.replace('"cuda"', '"cpu"'), flags=re.M), names)
            assert said in str(names["report"]), names["report"]
            if "mesh" in names:
                assert pipe("A kite", generator=torch.Generator().manual_seed(0)).frames.isfinite().all()


def _worker(rank: int, world: int, port: int, build: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it, and a torch for CPUs has none
    ltx = join_ranks(rank, world, port, build)
    wrong = []
    if world == 4:
        run_docs(ltx)
    for case in {2: TWO, 3: THREE, 4: FOUR}[world]:
        try:
            problem = _run(case, ltx, rank, world)
            if case.error:
                problem = "no error"
        except Exception as error:
            problem = "" if case.error and case.error in str(error) else f"{type(error).__name__}: {error}"
        if problem:
            wrong.append(f"{case}, rank {rank}: {problem}")
    dist.destroy_process_group()
    if wrong:
        raise AssertionError("\n".join(wrong))


def test_lists_of_blocks_are_not_split(ltx: ModuleType) -> None:
    """Stable Diffusion 3's guidance that skips two blocks, for two images."""
    guidance = ltx.integrations.parallel.guidance
    with (
        mock.patch.object(dist, "get_world_size", lambda group: 2),
        mock.patch.object(dist, "get_rank", lambda group: 1),
    ):
        split = guidance.BatchSplit(random_(families()["sd3"].make()), None)
    given = {"hidden_states": torch.arange(2), "timestep": ["a", "b"], "skip_layers": [0, 1]}
    _, mine = split._split(split.model, (), given)
    assert mine == {"hidden_states": torch.tensor([1]), "timestep": ["b"], "skip_layers": [0, 1]}


@pytest.mark.extended
@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_ranks_equal_one_process(ltx: ModuleType, backend: str, world: int) -> None:
    """LTX-Video's stock model fails under Ulysses, and is wrong under ring; LTX-2's fails everywhere."""
    if backend != "cpu":
        pytest.skip("the processes load the CPU build")
    run_ranks(_worker, world, ltx)


@pytest.mark.parametrize(
    ("patches", "others", "reason"),
    [
        ({}, [("", HERE)], "the device is cpu"),
        ({"why_not": lambda device: ""}, [("a reason", HERE)], "a reason"),
        ({"why_not": lambda device: ""}, [("", ("another", ""))], "the ranks are on several hosts"),
        (
            {"why_not": lambda device: "", "make_window": failing_window},
            [("", HERE)],
            "symmetric memory failed: no memory",
        ),
        (
            {"why_not": lambda device: "", "make_window": lonely_window},
            [("", HERE)],
            "symmetric memory held [[2, 0], [2, 0]]",
        ),
        ({"why_not": lambda device: "", "make_window": joined_window}, [("", HERE), "it failed"], "it failed"),
        ({"why_not": lambda device: "", "make_window": joined_window}, [("", HERE), ""], None),
    ],
)
def test_why_ranks_use_collectives(
    ltx: ModuleType, patches: dict[str, Any], others: list[Any], reason: str | None
) -> None:
    """One of two ranks, and what the other one says."""
    peers = sys.modules[f"{ltx.__name__}.integrations.parallel.peer_memory"]
    if patches.get("make_window") in (lonely_window, joined_window):
        made = patches["make_window"]
        patches = {**patches, "make_window": lambda *arguments: peers.Window(*made())}
    answers = iter([*others, ""])
    with contextlib.ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(mock.patch.object(peers, name, value))
        stack.enter_context(mock.patch.object(peers, "BOOT", Path("/none")))
        stack.enter_context(mock.patch.object(peers, "_of_all", lambda group, mine: [mine, next(answers)]))
        stack.enter_context(mock.patch.object(dist, "get_rank", lambda group: 0))
        found = peers._join(object(), torch.device("cpu"), 64)
    assert found == reason if reason else isinstance(found, peers.Peers)


def test_peer_memory_can_be_turned_off(ltx: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = sys.modules[f"{ltx.__name__}.integrations.parallel.peer_memory"]
    monkeypatch.setenv("LTX_KERNELS_PEER_MEMORY", "0")
    assert peers.why_not(torch.device("cuda", 0)) == "LTX_KERNELS_PEER_MEMORY is 0"


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["0", "1"])
def test_benchmark(ltx: ModuleType, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str) -> None:
    """Two ranks of benchmarks/parallel.py, in small: its records, and what it makes of them.

    On two GPUs with NCCL, and with copies between their memories.
    """
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if device == "cpu" and memory == "1":
        pytest.skip("needs two GPUs, whose memory the ranks share")
    monkeypatch.setenv("LTX_KERNELS_PEER_MEMORY", memory)
    path = tmp_path / "parallel.json"
    arguments = [
        "--tiny",
        "--device",
        device,
        "--gpus",
        "2",
        "--models",
        "ltx",
        "--configs",
        *(["stock"] if device == "cpu" else []),
        "kernels",
        "--rounds",
        "1",
        "--steps",
        "1",
        "--seconds",
        "0",
    ]
    script = [sys.executable, ROOT / "benchmarks" / "parallel.py", *arguments, "--output", path]
    subprocess.run(list(map(str, script)), check=True, capture_output=True, text=True, timeout=600)
    result = json.loads(path.read_text())
    timed = {(r["config"], r["gpus"], r.get("mode")): r for r in result["records"] if "step_ms" in r}
    assert all(record["step_ms"] > 0 and len(record["step_ms_by_rank"]) == 2 for record in timed.values())
    for mode, exchanges in (("ulysses", 8 if memory == "1" else 4), ("ring", 2), ("guidance", 1)):
        record = timed["kernels", 2, mode]
        assert record["error_vs_one_gpu"] < 1e-2 and record["exchanges"] == exchanges, record
    # Query, key, value and output of two layers: 2 samples of 8 tokens of 128 in bfloat16, of which half stays.
    assert timed["kernels", 2, "ulysses"]["exchange_mb"] == pytest.approx(2 * 4 * 2 * 4 * 128 * 2 / 2 / 1e6, abs=1e-3)
    failed = {"ltx, stock, 2 GPUs, ulysses", "ltx, stock, 2 GPUs, ring"} if device == "cpu" else set()
    assert set(result["meta"]["failed"]) == failed
    modelled = {(r["config"], r["mode"], r["gpus"]) for r in result["records"] if "modelled_ms" in r}
    assert modelled == {("kernels", mode, gpus) for mode in ("ulysses", "ring") for gpus in (4, 8)}


def test_modelled_times() -> None:
    """Of a step of 100 ms on one GPU and exchanges whose time is known, by hand."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import parallel

    same = {"model": "m", "shape": "s", "config": "kernels"}
    records = [
        {**same, "gpus": 1, "step_ms": 100.0},
        {"exchange": "all_to_all_single", "gpus": 2, "bytes": 1000, "us": 100.0},
        {"exchange": "all_to_all_single", "gpus": 2, "bytes": 5000, "us": 500.0},
        {
            **same,
            "gpus": 2,
            "mode": "ulysses",
            "step_ms": 57.0,
            "exchanges": 10,
            "exchanges_by_size": [{"exchange": "all_to_all_single", "bytes": 4000, "count": 10}],
        },
    ]
    four, eight = parallel.modelled(records)
    # Two ranks send 4000 bytes of 8000, ten times in 4 ms, so that 3 ms are left. Four send 3000 of 4000, eight 1750.
    assert four["exchange_ms"] == pytest.approx(3.0) and four["modelled_ms"] == pytest.approx(25 + 3 + 3)
    assert eight["exchange_ms"] == pytest.approx(1.75) and eight["modelled_ms"] == pytest.approx(12.5 + 1.75 + 3)

    stale = {**four, "modelled_ms": 1.0}
    measured = [{**record, "model": "ltx"} if "model" in record else record for record in records]
    kept = parallel.with_modelled([{**stale, "model": "ltx"}, *measured])
    assert [record["modelled_ms"] for record in kept[-2:]] == [four["modelled_ms"], eight["modelled_ms"]]
    assert len(kept) == len(records) + 2

    from pages.parallel import split_of

    split = split_of([*records, four, eight], records[-1])
    assert (split["exchanges"], split["rest"]) == pytest.approx((4.0, 3.0))


def test_an_update_of_the_benchmark_keeps_the_rest(tmp_path: Path) -> None:
    """Records in the order of the models, and the failures of what is not tried again."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import parallel

    path = tmp_path / "parallel.json"
    failed = {
        "ltx": "d",
        "ltx, stock, 2 GPUs, ulysses": "a",
        "ltx, stock, 2 GPUs, ring": "e",
        "ltx, kernels, 2 GPUs, ring": "b",
        "ltx13b, stock, 2 GPUs, ring": "c",
    }
    path.write_text(json.dumps({"meta": {"failed": failed}, "records": []}))
    assert list(parallel.of_this_package(failed)) == ["ltx", "ltx, kernels, 2 GPUs, ring"]
    options = parallel.argparse.Namespace(models=["ltx"], configs=["stock"], modes=["ulysses"])
    assert parallel.failures_kept(path, options) == {what: failed[what] for what in list(failed)[2:]}
    assert parallel.failures_kept(tmp_path / "none.json", options) == {}
    records = [
        {"model": "ltx", "config": "kernels", "modelled_ms": 1.0},
        {"model": "wan", "config": "stock"},
        {"model": "ltx", "config": "kernels"},
        {"model": "ltx", "config": "stock"},
        {"exchange": "all_to_all_single"},
    ]
    assert parallel.in_order(records) == [*records[::-1][:3], records[1], records[0]]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ulysses", "ring", "guidance"])
def test_example(ltx: ModuleType, backend: str, tmp_path: Path, mode: str) -> None:
    """Two ranks of generate_video.py make the clip that one makes, and the first one alone writes it."""
    if backend != "cpu":
        pytest.skip("the processes load the CPU build")
    sys.path.insert(0, str(ROOT / "examples"))
    import generate_video
    import numpy as np
    from PIL import Image, ImageSequence
    from rich.console import Console

    clip = ["--model", "tiny", "--frames", "9", "--height", "64", "--width", "64", "--steps", "2", "--dtype", "float32"]
    clip += ["--device", "cpu", "--warmup-iterations", "0"]
    files = ["--output", tmp_path / "clip.gif", "--gif", "--json", tmp_path / "clip.json"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    script = [ROOT / "examples" / "generate_video.py", "--parallel", mode]
    run = subprocess.run([str(x) for x in (*torchrun, *script, *clip, *files)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path / "clip.json").read_text())
    assert result["run"]["parallel"] == mode and result["run"]["processes"] == 2
    assert "; rank 0 of 2" in result["report"]["text"] and run.stdout.count("wrote") == len(result["files"]) + 1
    expected = generate_video.generate(generate_video.parse_arguments(clip), Console(quiet=True))[0].frames[0]
    generate_video.write_video(expected, tmp_path / "single", gif=True)
    pictures = []
    for name in ("clip_optimized", "single"):
        with Image.open(tmp_path / f"{name}.gif") as gif:
            pictures.append(
                np.stack([np.asarray(f.convert("RGB"), dtype=np.float32) for f in ImageSequence.Iterator(gif)])
            )
    ours, one_process = pictures
    assert ours.shape == one_process.shape and np.abs(ours - one_process).mean() < 2 < one_process.std()


@pytest.mark.parametrize(
    ("ranks", "wrong", "expected"),
    [
        ("1", "--parallel ring", "expected several processes, as of torchrun --nproc-per-node 2"),
        ("2", "--parallel ulysses --no-optimized-kernels", "needs the optimized kernels, since the stock LTX-Video"),
        ("3", "--parallel guidance", "3 processes cannot share a batch of 2 evenly"),
        ("2", "--parallel guidance --guidance-scale 1", "2 processes cannot share a batch of 1 evenly"),
        ("2", "--parallel ulysses --num-frames 1 --height 96 --width 96", "2 processes cannot share the 9 tokens of a"),
        ("5", "--parallel ring --num-frames 9 --height 64 --width 96", "5 processes cannot share the 12 tokens of a"),
        ("2", "--parallel fast", "invalid choice: 'fast'"),
    ],
)
def test_wrong_arguments_of_the_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ranks: str, wrong: str, expected: str
) -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    import generate_video

    monkeypatch.setenv("WORLD_SIZE", ranks)
    with pytest.raises(SystemExit):
        generate_video.parse_arguments(["--device", "cpu", *wrong.split()])
    assert f"argument --parallel: {expected}" in capsys.readouterr().err


def test_the_example_names_the_heads_that_processes_cannot_share(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every process says so: torchrun ends the others as soon as one has failed."""
    sys.path.insert(0, str(ROOT / "examples"))
    import generate_video

    transformer = SimpleNamespace(config=SimpleNamespace(num_attention_heads=4))
    monkeypatch.setattr(generate_video, "join", lambda args: None)
    monkeypatch.setattr(generate_video, "load_pipeline", lambda *args: SimpleNamespace(transformer=transformer))
    monkeypatch.setattr(generate_video, "optimize", lambda *args: None)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "2")
    assert generate_video.main(["--device", "cpu", "--parallel", "ulysses"]) == 1
    assert "error: --parallel: 3 processes cannot share the model's 4 heads evenly" in capsys.readouterr().out
