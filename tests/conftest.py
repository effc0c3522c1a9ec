"""Fixtures: the package as users load it, and the device that its variant runs on."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.build import ROOT, build_directory, load_build, use_own_build_by_default
from helpers.failures import name_failures
from helpers.gpus import take_turns
from torch.nn.attention import SDPBackend, sdpa_kernel

use_own_build_by_default()


def pytest_configure(config: pytest.Config) -> None:
    for marker in (
        "kernels_ci: the fast subset, under 60 s in all",
        "slow: minutes, tens of gigabytes, or more models and builds of one kind; make check-all runs it",
        "extended: seconds for one more kind of what `make test` runs in another kind; make test-variants runs it",
        "repeated: what a test without this mark checks, for more dtypes, widths or models; GPUs and test-all run it",
        "host: takes the device, but its subject is code that runs on the host, the same for every device",
        "sanitize: every op, dtype and geometry in small, for compute-sanitizer",
    ):
        config.addinivalue_line("markers", marker)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:  # or every worker takes all cores, and they wait for one another
        torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // workers)))
    os.environ.update(take_turns(int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))))
    name_failures(config)
    # On a GPU torch rounds the operands of a float32 convolution to 10 bits. Results are compared to closer than that.
    torch.backends.cudnn.allow_tf32 = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on-device", action="store_true", help="leave out what a CPU proves as well (tests/gpu.py)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A CPU proves what never asks for the device, and what is marked `host`."""
    if not config.getoption("--on-device"):
        return
    of_device = {item for item in items if "device" in getattr(item, "fixturenames", ())}
    of_device = {item for item in of_device if item.get_closest_marker("host") is None}
    config.hook.pytest_deselected(items=[item for item in items if item not in of_device])
    items[:] = [item for item in items if item in of_device]


@pytest.fixture(scope="session", autouse=True)
def programs_take_interrupts() -> Iterator[None]:
    """Under nohup and in the background of a script SIGINT is ignored, and programs inherit that, but no handler."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGINT, lambda *_: None)
    yield
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models so small that threads would only wait for one another, which takes seconds where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def without_cudnn_attention() -> Iterator[None]:
    """Its gradients are wrong for some numbers of keys, for stock models too (pytorch/pytorch#196678)."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    yield
    torch.backends.cuda.enable_cudnn_sdp(enabled)


@pytest.fixture
def unchecked(ltx: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that count what calls run, or have replays fail: LTX_KERNELS_RECORD=check runs each call twice."""
    replay = importlib.import_module(f"{ltx.__name__}.integrations.replay.calls")
    if replay.RECORD == replay.CHECK:
        monkeypatch.setattr(replay, "RECORD", "1")


@pytest.fixture
def same_attention(device: str) -> Iterator[None]:
    """On a GPU the fast kernels of torch's attention sum gradients in the order in which their blocks end."""
    with sdpa_kernel(SDPBackend.MATH) if device == "cuda" else nullcontext():
        yield


@pytest.fixture
def no_grad() -> Iterator[None]:
    """A test computes no gradients; what torch.compile made for it is dropped at its end."""
    with torch.no_grad():
        yield
    torch.compiler.reset()


@pytest.fixture
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions in fp64, rounded, and then the bias: the same bits in every memory order, as cuDNN adds a bias."""

    def exact(convolution: Any) -> Any:
        def convolve(x, weight, bias=None, *options):
            result = convolution(x.double(), weight.double(), None, *options).to(x.dtype)
            return result if bias is None else result + bias.view(-1, *[1] * (x.dim() - 2))

        return convolve

    monkeypatch.setattr(F, "conv3d", exact(F.conv3d))
    monkeypatch.setattr(F, "conv2d", exact(F.conv2d))


@pytest.fixture
def traced_compile(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """torch.compile traces whole functions and runs them, but compiles nothing, which takes seconds for each.

    The value lists what was handed to it.
    """
    compiled: list[Any] = []
    stock_compile = torch.compile

    def trace(function: Any, **options: Any) -> Any:
        compiled.append(function)
        return stock_compile(function, **{**options, "backend": "eager", "fullgraph": True})

    monkeypatch.setattr(torch, "compile", trace)
    yield compiled
    torch.compiler.reset()


def pytest_report_header() -> list[str]:
    """Which builds are tested though the sources have changed."""
    if not (ROOT / "tools").is_dir():  # a Nix build
        return []
    from helpers.build_checks import builder

    project = builder.load_project()
    tested = [path.parent for path in sorted((build_directory() or ROOT).glob("torch-*/metadata.json"))]
    return [f"STALE: {v} was made from other sources: run `make build`" for v in tested if builder.is_stale(project, v)]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """A Nix build holds torch-ext and tests alone: of them `nix run .#ci-test` can import those that it runs."""
    if (ROOT / "tools").is_dir() or not collection_path.name.startswith("test_"):
        return None
    return "mark.kernels_ci" not in collection_path.read_text() or None


@pytest.fixture(scope="session")
def ltx() -> ModuleType:
    return load_build()


@pytest.fixture(scope="session")
def backend(ltx: ModuleType) -> str:
    """Of the loaded variant: "cpu" or "cuda"."""
    return json.loads((Path(ltx.__file__).parent / "metadata.json").read_text())["backend"]["type"]


@pytest.fixture(scope="session")
def device(backend: str) -> str:
    return "cuda" if backend == "cuda" and torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def cuda(device: str) -> str:
    if device != "cuda":
        pytest.skip("needs a GPU and the CUDA variant")
    return device


@pytest.fixture(scope="session")
def cpu_kernels(backend: str) -> None:
    if backend != "cpu":
        pytest.skip("needs the CPU variant: the other one runs plain torch on a CPU")


@pytest.fixture(scope="session")
def fp8_device(device: str) -> str:
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 on this GPU")
    return device


@pytest.fixture(scope="session")
def cuda_graphs(cuda: str) -> str:
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        pytest.skip("no capture with PYTORCH_NO_CUDA_MEMORY_CACHING: it calls cudaMalloc")
    return cuda


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub is not asked, which would take a minute of retries without a network."""
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # it reads the environment when it is imported


@pytest.fixture(autouse=True)
def torchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers' set_attention_backend is for all of the process: what a test has set ends with it."""
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    if dispatch is not None:
        monkeypatch.setattr(dispatch._AttentionBackendRegistry, "_active_backend", dispatch.AttentionBackendName.NATIVE)
