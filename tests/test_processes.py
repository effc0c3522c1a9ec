"""Several threads, streams and processes: the same bits as one call at a time."""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers import (
    ACTIVATIONS,
    NORM_OPS,
    Case,
    Make,
    activation_case,
    assert_same_bits,
    attention_case,
    every_case,
    every_op,
    norm_case,
    plain_attention_case,
    qk_norm_rope_case,
    rope_case,
    rotary_case,
)
from helpers.build import REPO_ID

THREADS, ROUNDS = 8, 60


def sums(device: str) -> dict[str, list[str]]:
    """What a process gets from every op, bit by bit, as text that travels."""
    from kernels import get_kernel

    ltx = get_kernel(REPO_ID, version=1)
    found = {}
    for name, case in every_case(Make(device, torch.float32)).items():
        found[name] = [output.cpu().contiguous().view(torch.int32).flatten().tolist() for output in case.run(ltx)]
    return found


def test_threads(ltx: Any, device: str) -> None:
    """Threads that call every op at once, each in an order of its own, on a GPU each on a stream of its own."""
    cases = every_op(Make(device, torch.bfloat16))
    expected = {name: case.run(ltx) for name, case in cases.items()}
    if device == "cuda":
        torch.cuda.synchronize()

    def work(thread: int) -> None:
        order = random.Random(thread)
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(stream):
            for _ in range(ROUNDS):
                name = order.choice(list(cases))
                outputs = cases[name].run(ltx)
                if stream is not None:
                    stream.synchronize()
                for output, want in zip(outputs, expected[name], strict=True):
                    assert_same_bits(output, want, f"{name} in thread {thread}")

    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(work, thread) for thread in range(THREADS)]:
            future.result()


def test_threads_that_fail(ltx: Any, device: str) -> None:
    """An error in one thread stays there."""
    case = every_case(Make(device, torch.float32))["rmsnorm"]
    expected = case.run(ltx)[0]
    bad = case.replace(weight=torch.ones(3, device=device))

    def work(index: int) -> str:
        try:
            assert_same_bits((bad if index % 2 else case).run(ltx)[0], expected)
        except RuntimeError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(THREADS) as pool:
        texts = list(pool.map(work, range(200)))
    assert texts[::2] == [""] * 100
    assert texts[1::2] == ["weight: expected shape [64], got [3]"] * 100


def test_spawned_workers(ltx: Any, device: str) -> None:
    """Processes that load the package themselves get the bits that this one gets."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for found in pool.map(sums, [device] * 2):
            assert found == sums(device)


def forked_child(ltx: Any, cases: dict[str, Any], write: int) -> None:
    torch.set_num_threads(1)  # as DataLoader does in its workers: OpenMP's pool does not survive a fork
    same = all(
        torch.equal(output, want)
        for case, expected in cases.values()
        for output, want in zip(case.run(ltx), expected, strict=True)
    )
    os.write(write, b"same" if same else b"different")


@pytest.mark.filterwarnings("ignore")
def test_forked_workers(ltx: Any, backend: str) -> None:
    """A child that inherited the loaded package, after its parent used it with several threads."""
    if backend != "cpu":
        pytest.skip("a forked process has no CUDA; CPU tensors run plain torch there")
    cases = {name: (case, case.run(ltx)) for name, case in every_case(Make("cpu", torch.float32)).items()}
    large = torch.randn(300, 1000)
    ltx.rmsnorm(large)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            forked_child(ltx, cases, write)
        finally:
            os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    assert os.read(read, 100) == b"same"
    os.close(read)
    assert status == 0


class Rows(torch.utils.data.Dataset):
    def __init__(self, ltx: Any):
        self.ltx = ltx

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.ltx.rmsnorm(torch.full((2, 64), float(index + 1)) + torch.arange(64))


@pytest.mark.filterwarnings("ignore")
def test_data_loader_workers(ltx: Any) -> None:
    """Forked workers of torch's own; with a CUDA variant they run the reference, on CPU tensors."""
    rows = Rows(ltx)
    loader = torch.utils.data.DataLoader(rows, batch_size=4, num_workers=2, multiprocessing_context="fork")
    for batch, want in zip(torch.cat(list(loader)), [rows[i] for i in range(16)], strict=True):
        assert_same_bits(batch, want)


# ---- GPU


def gpu_cases(device: str, seed: int = 0) -> dict[str, Case]:
    """Every op in small, and in the shapes that take the kernels of the main line."""
    make = Make(device, torch.bfloat16, seed=seed)
    found = every_op(make)
    found |= {f"wide {op}": norm_case(op, make, (2, 30, 2048)) for op in NORM_OPS}
    found |= {f"wide {name}": activation_case(name, make, (60, 2048)) for name in ACTIVATIONS}
    heads = (2, 50, 8, 64)
    for across in (True, False):
        found[f"heads of 64, normed {across}"] = qk_norm_rope_case(make, heads, across_heads=across, key=(52, 9))
    found["heads of 64, rotary"] = rotary_case(make, heads, heads_first=True)
    found["heads of 64, rope_3d"] = rope_case(make, (2, 8, 64), grid=(1, 50, 1), key_heads=9)
    found["heads of 64, attention"] = plain_attention_case(make, heads, 140)
    found["heads of 64, cross-attention"] = attention_case(make, heads, 140, mask="addends")
    return found


every_gpu_case = pytest.mark.parametrize("name", list(gpu_cases("cpu")))


@every_gpu_case
def test_streams(ltx: Any, cuda: str, name: str) -> None:
    """Every op launches on the current stream, after what was put there before it."""
    case = gpu_cases(cuda)[name]
    expected = case.run(ltx)
    late = case.map(torch.zeros_like)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for operand, tensor in late.tensors.items():
            tensor.copy_(case.tensors[operand])
        outputs = late.run(ltx)
    stream.synchronize()
    for output, want in zip(outputs, expected, strict=True):
        assert_same_bits(output, want)


@every_gpu_case
def test_cuda_graph(ltx: Any, cuda_graphs: str, name: str) -> None:
    """Capture, then replay with other values: the outputs of plain calls."""
    case, other = (gpu_cases(cuda_graphs, seed)[name] for seed in (0, 1))
    expected = other.run(ltx)
    case.run(ltx)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = case.run(ltx)
    for operand, tensor in case.tensors.items():
        tensor.copy_(other.tensors[operand])
    graph.replay()
    torch.cuda.synchronize()
    for output, want in zip(outputs, expected, strict=True):
        assert_same_bits(output, want)


@every_gpu_case
def test_second_device(ltx: Any, cuda: str, name: str) -> None:
    """The tensors' device is where an op runs, after what was put there, while another one is current and stays so.

    A launch on the current one would work, too, where GPUs read each other's memory. But it would not wait."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = gpu_cases(cuda)[name]
    there = case.map(lambda tensor: tensor.to("cuda:1"))
    late = there.map(torch.zeros_like)
    torch.cuda.synchronize(1)
    with torch.cuda.device(1):
        torch.cuda._sleep(20_000_000)
        for operand, tensor in late.tensors.items():
            tensor.copy_(there.tensors[operand])
    torch.cuda.set_device(0)
    for output, want in zip(late.run(ltx), case.run(ltx), strict=True):
        assert output.device == torch.device("cuda:1")
        assert_same_bits(output.to(cuda), want)
    assert torch.cuda.current_device() == 0


def test_forked_process_has_no_cuda(cuda: str) -> None:
    """An inherited CUDA tensor raises in the child; it neither hangs nor ends the process."""
    code = (
        "import os, torch, kernels; ltx = kernels.get_kernel('org/ltx-kernels', version=1)\n"
        "x = torch.ones(2, 64, device='cuda'); ltx.rmsnorm(x); torch.cuda.synchronize()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        ltx.rmsnorm(x)\n"
        "    except RuntimeError as error:\n"
        "        os.write(1, str(error).encode())\n"
        "        os._exit(0)\n"
        "    os._exit(1)\n"
        "print(os.waitpid(child, 0)[1], ltx.rmsnorm(x).isfinite().all().item())\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert process.stdout.startswith("output: expected memory for shape [2, 64] of float32 on cuda:0, got none")
    assert process.stdout.endswith("0 True\n")
