"""The ways users and developers get at a build: get_kernel with LOCAL_KERNELS, get_local_kernel, has_kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.build import BACKEND, REPO_ID, build_directory

kernels = pytest.importorskip("kernels")

pytestmark = pytest.mark.kernels_ci


def works(module, device: str) -> bool:
    x = torch.arange(1.0, 9.0, device=device).view(2, 4)
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return torch.allclose(module.rmsnorm(x), expected, rtol=1e-6, atol=0)


def test_get_kernel(ltx, device):
    assert works(ltx, device)
    assert kernels.get_kernel(REPO_ID, version=1, backend=BACKEND) is ltx
    assert Path(ltx.__file__).parent.parent == build_directory()


def test_get_kernel_by_revision(ltx):
    """LOCAL_KERNELS overrides whatever revision is asked for."""
    assert kernels.get_kernel(REPO_ID, revision="main", backend=BACKEND) is ltx


def test_has_kernel(ltx):
    assert kernels.has_kernel(REPO_ID, version=1, backend=BACKEND)


@pytest.mark.parametrize("path", ["build", "parent", "variant", "relative"])
def test_get_local_kernel(ltx, device, path, monkeypatch):
    """The build directory, the repository above it, the variant below it, absolute or relative."""
    build = build_directory()
    if path == "parent" and build.name != "build":
        pytest.skip(f"{build} is not named build")
    variant = Path(ltx.__file__).parent
    if path == "relative":
        monkeypatch.chdir(build.parent)
    module = kernels.get_local_kernel(
        {"build": build, "parent": build.parent, "variant": variant, "relative": Path(build.name)}[path],
        backend=BACKEND,
    )
    assert works(module, device)
    assert Path(module.__file__).samefile(ltx.__file__)


def test_get_local_kernel_of_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match="build variant"):
        kernels.get_local_kernel(tmp_path)


def test_metadata_names_the_variant(ltx, backend):
    """What the loader goes by: name, version and backend; and the module carries the id."""
    variant = Path(ltx.__file__).parent
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["name"] == "ltx-kernels"
    assert metadata["version"] == 1
    assert metadata["python-depends"] == []
    assert variant.name.startswith(f"torch-stable-abi211-{'cpu' if backend == 'cpu' else 'cu'}")
    assert ltx.__name__ == metadata["id"]
    loaded = [kernel.module for kernel in kernels.get_loaded_kernels()]
    assert ltx in loaded


def test_ops_are_registered_under_the_id(ltx):
    """Two builds in one process must not collide, so the namespace of the ops is the build's own id."""
    namespace = getattr(torch.ops, ltx.__name__)
    assert namespace.norm.default is not None
    assert not hasattr(torch.ops.ltx_kernels, "norm")


def test_imports_nothing_but_torch(ltx):
    """Loaded into a fresh process, the package imports the standard library and torch, and no model library."""
    code = (
        "import sys, torch, kernels\n"
        f"before = set(sys.modules)\n"
        f"module = kernels.get_kernel({REPO_ID!r}, version=1, backend={BACKEND!r})\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "own = module.__name__\n"
        "foreign = {n for n in new - {own, 'torch'} - set(sys.stdlib_module_names) if n[0] != '_'}\n"
        "print(sorted(foreign))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().splitlines()[-1] == "[]"


def test_loads_without_a_network(ltx):
    """LOCAL_KERNELS resolves before anything is asked of the Hub."""
    code = (
        "import socket\n"
        "def refuse(*args, **kwargs):\n"
        "    raise AssertionError('the network was used')\n"
        "socket.create_connection = socket.getaddrinfo = refuse\n"
        "import kernels, torch\n"
        f"module = kernels.get_kernel({REPO_ID!r}, version=1, backend={BACKEND!r})\n"
        "print(module.rmsnorm(torch.full((1, 4), 2.0)).tolist())\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().splitlines()[-1].startswith("[[0.99999")
