"""What the tests of a build share: the builder itself, the variants in build/, and a tiny project to build from."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torch-ext" / "ltx_kernels"

if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))
from tools import build as builder  # noqa: E402
from tools import release as release  # noqa: E402

# Where the variants are that are looked at: those of Nix, gathered from other machines, or this machine's own.
VARIANTS = Path(os.environ.get("LTX_KERNELS_VARIANTS") or ROOT / "build").resolve()
# Set by `make test`, which builds what this machine can run: another variant may be missing, older than the sources, or
# without the code of some GPUs. Its tests are skipped then.
THIS_MACHINE = bool(os.environ.get("LTX_KERNELS_THIS_MACHINE"))
# Set by `make ARCHS=...`: the CUDA variant has the code of these architectures alone.
ARCHS = os.environ.get("LTX_KERNELS_ARCHS", "").split()


def built_variants(backend: str) -> list[Path]:
    compute = "cpu" if backend == "cpu" else "cu[0-9]*"
    return sorted(VARIANTS.glob(f"torch-stable-abi211-{compute}-*-linux"))


def cuda_version(variant: Path) -> tuple[int, int]:
    match = re.search(r"-cu(\d+)(\d)-", variant.name)
    assert match is not None
    return int(match[1]), int(match[2])


def skip_if_old(variant: Path) -> None:
    if THIS_MACHINE and builder.is_stale(builder.load_project(), variant):
        pytest.skip(f"NOT RUN: {variant.name} was made from other sources (make test-variants)")


def built_variant(backend: str) -> Path:
    """Directory of a built variant. CPU must be there; CUDA where it can be built, and always in CI.

    For `make test` it is enough that the variant is there that this machine runs.
    """
    found = built_variants(backend)
    if found:
        skip_if_old(found[-1])
        archs = json.loads((found[-1] / "metadata.json").read_text())["backend"].get("archs")
        if THIS_MACHINE and archs and archs != builder.load_project().capabilities(cuda_version(found[-1])):
            pytest.skip(f"NOT RUN: {found[-1].name} has the code of {' '.join(archs)} alone (make test-variants)")
        return found[-1]
    if THIS_MACHINE:
        pytest.skip(f"NOT RUN: no {backend} variant in {VARIANTS} (make test-variants)")
    if VARIANTS != ROOT / "build":
        pytest.skip(f"NOT RUN: no {backend} variant in {VARIANTS}")
    if backend == "cuda" and not os.environ.get("CI") and builder.find_cuda() is None:
        pytest.skip("NOT RUN: CUDA variant not built: nvcc not found (python tools/build.py --cuda-from-pypi)")
    pytest.fail(f"no {backend} variant in build/: run `make build`")


def library_of(variant: Path) -> Path:
    (library,) = variant.glob("*.so")
    return library


def tool(*command: str | Path) -> str:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True).stdout


def dynamic_symbols(library: Path, which: str) -> list[tuple[str, str]]:
    """(type, mangled name) of each symbol; `which` is --undefined-only or --defined-only."""
    lines = tool("nm", "-D", which, library).splitlines()
    matches = [re.fullmatch(r"[0-9a-f]*\s*(\w) (\S+)", line.strip()) for line in lines]
    assert all(matches), lines
    return [(m[1], m[2]) for m in matches if m is not None]


def assert_exports_its_entry_alone(library: Path) -> None:
    """Also nothing of std, and no GNU_UNIQUE symbol: the loader may exchange these among libraries in a process."""
    assert dynamic_symbols(library, "--defined-only") == [("T", f"PyInit_{library.name.removesuffix('.abi3.so')}")]


def fatbin_archs(library: Path) -> list[set[tuple[str, int]]]:
    """For each device image embedded in a library, what it holds: ("sm" or "ptx", capability times ten)."""
    data = library.read_bytes()
    images = []
    start = data.find(struct.pack("<IH", 0xBA55ED50, 1))
    while start >= 0:
        header_size, size = struct.unpack_from("<HQ", data, start + 6)
        position, end, held = start + header_size, start + header_size + size, set()
        while position < end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", data, position)
            (arch,) = struct.unpack_from("<I", data, position + 28)
            held.add(({1: "ptx", 2: "sm"}[kind], arch))
            position += entry_header + entry_size
        images.append(held)
        start = data.find(struct.pack("<IH", 0xBA55ED50, 1), end)
    return images


def expected_images(archs: list[str]) -> set[tuple[str, int]]:
    held = set()
    for arch in archs:
        number = int(arch.removesuffix("+PTX").removesuffix("a").replace(".", ""))
        held.add(("sm", number))
        if arch.endswith("+PTX"):
            held.add(("ptx", number))
    return held


BINDING = """\
#include "torch_binding.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "ltx/add.h"
#include "registration.h"

using torch::stable::Tensor;

Tensor add_one(const Tensor& input) {
  Tensor out = torch::stable::empty_like(input);
  void* stream = nullptr;
#if defined(CUDA_KERNEL)
  aoti_torch_get_current_cuda_stream(input.get_device_index(), &stream);
#endif
  ltx::add(static_cast<const float*>(input.const_data_ptr()), static_cast<float*>(out.mutable_data_ptr()),
           input.numel(), stream);
  return out;
}

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) { ops.def("add_one(Tensor input) -> Tensor"); }
#if defined(CPU_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) { ops.impl("add_one", TORCH_BOX(&add_one)); }
#else
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) { ops.impl("add_one", TORCH_BOX(&add_one)); }
#endif
REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
"""

TINY_PROJECT = {
    "README.md": "tiny\n",
    "LICENSE": "none\n",
    "build.toml": """\
[general]
name = "ltx-kernels"
version = 1
edition = 5
license = "Apache-2.0"
backends = ["cuda", "cpu"]

[torch]
src = ["torch-ext/torch_binding.cpp", "torch-ext/torch_binding.h", "torch-ext/exports.o"]
include = ["kernel_src"]
cxx-flags = ["-fvisibility=hidden"]

[torch.stable-abi]
cuda = "2.11"
cpu = "2.11"

[kernel.add]
backend = "cuda"
depends = ["torch"]
include = ["kernel_src"]
src = ["kernel_src/add.cu", "kernel_src/ltx/add.h"]
cuda-capabilities = ["8.0", "9.0+PTX"]
cuda-flags = ["-Xcompiler=-fno-gnu-unique,-fvisibility=hidden"]

[kernel.add_cpu]
backend = "cpu"
depends = ["torch"]
include = ["kernel_src"]
src = ["kernel_src/cpu/add.cpp", "kernel_src/ltx/add.h"]
cxx-flags = ["-fvisibility=hidden"]
""",
    "kernel_src/ltx/add.h": """\
#pragma once
#include <cstdint>
constexpr float kAddend = 1.0f;
namespace ltx { void add(const float* in, float* out, int64_t count, void* stream); }
""",
    "kernel_src/cpu/add.cpp": """\
#include "ltx/add.h"
void ltx::add(const float* in, float* out, int64_t count, void*) {
  for (int64_t i = 0; i < count; ++i) out[i] = in[i] + kAddend;
}
""",
    "kernel_src/add.cu": """\
#include "ltx/add.h"
__global__ void add_kernel(const float* in, float* out, int64_t count) {
  int64_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = in[i] + kAddend;
}
void ltx::add(const float* in, float* out, int64_t count, void* stream) {
  add_kernel<<<(count + 255) / 256, 256, 0, static_cast<cudaStream_t>(stream)>>>(in, out, count);
}
""",
    "torch-ext/torch_binding.h": "#pragma once\n#include <torch/csrc/stable/tensor.h>\n",
    "torch-ext/torch_binding.cpp": BINDING,
    "torch-ext/ltx_kernels/__init__.py": """\
from ._ops import add_op_namespace_prefix, ops

__all__ = ["add_one"]


def add_one(input):
    return ops.add_one(input)
""",
}


def make_tiny_project(directory: Path) -> Path:
    """A project of one op that is built by copies of this project's own build files."""
    for name, text in TINY_PROJECT.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("tools/build.py", "hatch_build.py", "pyproject.toml", ".gitignore", "torch-ext/exports.o"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, directory / name)
    return directory


def run_build(directory: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(directory / "tools" / "build.py"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and result.returncode != 0:
        raise AssertionError(f"{command} failed:\n{result.stdout}{result.stderr}")
    return result


def run_python(code: str, *, check: bool = True, **environment: str) -> str:
    """Output of a Python program in a process of its own, started outside of the repository."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, cwd="/"
    )
    if check and result.returncode != 0:
        raise AssertionError(f"{code}\nfailed with {result.returncode}:\n{result.stdout}{result.stderr}")
    return result.stdout
