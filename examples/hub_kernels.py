#!/usr/bin/env python3
"""Kernels from the Hub and from a local build: load them, check them against torch, time them, put one into a model.

    python examples/hub_kernels.py                            # the build in build/, and a kernel of the Hub
    python examples/hub_kernels.py --repo-id someone/ltx-kernels --trust

What cannot be fetched is reported and left out: nothing of the rest depends on it. `--trust` runs the code of that one
repository; read it first. docs/hub.md explains versions, pins and errors.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from command_line import HOW_TO_BUILD, ROOT, start


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo-id", default="org/ltx-kernels", help="this package on the Hub, once it is there")
    parser.add_argument("--trust", action="store_true", help="run the code of --repo-id whoever published it")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="local build (default: build)")
    return parser


if __name__ == "__main__":
    start(make_parser())  # before the imports below, which take seconds

# ruff: noqa: E402
import torch
import torch.nn.functional as F
from kernels import get_kernel, get_loaded_kernels, get_local_kernel, has_kernel
from torch import Tensor, nn
from torch.utils.benchmark import Timer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
COMMUNITY = "kernels-community/activation"


def microseconds(function: Callable[[], Any]) -> float:
    return Timer("function()", globals={"function": function}).blocked_autorange(min_run_time=0.2).median * 1e6


def compare(name: str, kernel: Callable[[], Tensor], plain: Callable[[], Tensor]) -> bool:
    """Check a kernel against plain torch, time both, print a line; whether they agree."""
    actual, expected = kernel(), plain()
    tolerance = 3e-2 if DEVICE == "cuda" else 1e-5  # plain torch rounds several times on the way
    agree = actual.dtype == expected.dtype and torch.allclose(actual, expected, rtol=tolerance, atol=tolerance)
    error = (actual.float() - expected.float()).abs().max().item()
    times = f"{microseconds(kernel):9.1f} us   torch {microseconds(plain):9.1f} us"
    print(f"  {name:<16} {times}   largest difference {error:.1e}   {'ok' if agree else 'WRONG'}")
    return agree


def reason(error: Exception) -> str:
    """The first sentence of an error: the loader's errors name the cause there."""
    return f"{type(error).__name__}: {str(error).strip()}".split("\n")[0].split(". ")[0]


def fetch_community() -> tuple[ModuleType | None, str]:
    """A kernel of a trusted publisher, which needs no trust_remote_code; or None and why it is left out."""
    try:
        if not has_kernel(COMMUNITY, version=1):
            return None, f"it has no build for this system ({DEVICE}, torch {torch.__version__})"
        return get_kernel(COMMUNITY, version=1), ""
    except Exception as error:  # no network, most often; each library underneath has errors of its own
        return None, f"could not be fetched. {reason(error)}"


def community_kernel() -> bool:
    """The Hub's kernel writes to an output that it is given."""
    print(f"{COMMUNITY}, version 1, from the Hub")
    activation, why = fetch_community()
    if activation is None:
        print(f"  left out: {why}")
        return True
    x = torch.randn(4096, 2 * 2048, device=DEVICE, dtype=DTYPE)
    out = torch.empty(4096, 2048, device=DEVICE, dtype=DTYPE)

    def fused() -> Tensor:
        activation.silu_and_mul(out, x)
        return out

    gate, up = x.chunk(2, dim=-1)
    return compare("silu_and_mul", fused, lambda: F.silu(gate) * up)


def this_package(repo_id: str, build: Path, trust: bool) -> ModuleType | None:
    """From the Hub where a repository is named, else from the build directory, by path and by LOCAL_KERNELS."""
    if not repo_id.startswith("org/"):
        print(f"{repo_id}, version 1, from the Hub")
        allowed = [repo_id] if trust else False
        try:
            if has_kernel(repo_id, version=1, trust_remote_code=allowed):
                return get_kernel(repo_id, version=1, trust_remote_code=allowed)
            print("  it has no build for this system; going on with the local one")
        except Exception as error:
            print(f"  could not be fetched; going on with the local build. {reason(error)}")
    print(f"{build}, built here")
    backend = None if DEVICE == "cuda" else "cpu"  # a CUDA torch without a GPU takes a CPU build only when told to
    try:
        kernel = get_local_kernel(build, backend=backend)
    except FileNotFoundError as error:
        print(f"  {reason(error)}\n  {HOW_TO_BUILD}")
        return None
    # What an application does that already calls get_kernel: nothing. The variable sends it to the directory.
    os.environ["LOCAL_KERNELS"] = f"org/ltx-kernels={build}"
    assert has_kernel("org/ltx-kernels", version=1, backend=backend)
    assert get_kernel("org/ltx-kernels", version=1, backend=backend) is kernel
    return kernel


def ops(ltx: ModuleType) -> bool:
    x = torch.randn(2, 2688 if DEVICE == "cuda" else 256, 2048, device=DEVICE, dtype=DTYPE)
    weight = torch.rand(2048, device=DEVICE, dtype=DTYPE)
    scale, shift = torch.randn(2, 2, 1, 2048, device=DEVICE, dtype=DTYPE).unbind(1)
    return all([
        compare("rmsnorm", lambda: ltx.rmsnorm(x, weight), lambda: F.rms_norm(x, (2048,), weight, 1e-6)),
        compare(
            "adaln_rmsnorm",
            lambda: ltx.adaln_rmsnorm(x, weight, scale, shift),
            lambda: F.rms_norm(x, (2048,), weight, 1e-6) * (1 + scale) + shift,
        ),
        compare("gelu", lambda: ltx.gelu(x, approximate="tanh"), lambda: F.gelu(x, approximate="tanh")),
    ])  # fmt: skip


def replace_norms(ltx: ModuleType) -> bool:
    """Give each nn.RMSNorm of a model a forward of its own, and take it away again."""
    model = nn.Sequential(nn.Linear(512, 512), nn.RMSNorm(512, eps=1e-6), nn.Linear(512, 512), nn.RMSNorm(512))
    model = model.to(DEVICE, DTYPE)
    x = torch.randn(256, 512, device=DEVICE, dtype=DTYPE)
    norms = [module for module in model if type(module) is nn.RMSNorm]

    def forward(norm: nn.RMSNorm) -> Callable[[Tensor], Tensor]:
        return lambda input: ltx.rmsnorm(input, norm.weight, norm.eps)  # eps=None means to it what it means to torch

    stock = copy.deepcopy(model)
    for norm in norms:
        norm.forward = forward(norm)  # type: ignore[method-assign]
    print(f"A model with {len(norms)} nn.RMSNorm replaced")
    with torch.no_grad():
        agree = compare("model(x)", lambda: model(x), lambda: stock(x))
        for norm in norms:
            del norm.forward  # the class's own forward is there again
        return agree and torch.equal(model(x), stock(x))


def main() -> int:
    args = make_parser().parse_args()
    torch.manual_seed(0)

    right = community_kernel()
    ltx = this_package(args.repo_id, args.build.resolve(), args.trust)
    if ltx is None:
        return 1
    right = ops(ltx) and replace_norms(ltx) and right
    print("Loaded:", *(f"{k.metadata.name} {k.metadata.version} ({k.metadata.id})" for k in get_loaded_kernels()))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
