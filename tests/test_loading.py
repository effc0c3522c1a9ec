"""The ways users and developers get at a build: get_kernel with LOCAL_KERNELS, get_local_kernel, has_kernel."""

from __future__ import annotations

import json
import os
import shutil
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


@pytest.fixture
def folders(ltx, tmp_path: Path) -> Path:
    """A folder with two copies of the build, first_copy and second_copy."""
    for name in ("first_copy", "second_copy"):
        shutil.copytree(Path(ltx.__file__).parent, tmp_path / name)
    return tmp_path


def python_in(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)


@pytest.mark.extended
def test_one_build_from_two_folders(folders):
    """As pip's and the Hub's cache may have it: torch ends a process that registers its ops twice."""
    (folders / "third_name").symlink_to("first_copy")
    code = (
        "import torch, first_copy, second_copy, third_name\n"
        "x = torch.arange(8.0).view(2, 4)\n"
        "for package in (second_copy, third_name):\n"
        "    assert package._ops.ops is first_copy._ops.ops\n"
        "    assert package._variant.COMPILED_DEVICE == first_copy._variant.COMPILED_DEVICE\n"
        "    assert torch.equal(package.rmsnorm(x), first_copy.rmsnorm(x))\n"
        "    compiled = torch.compile(package.rmsnorm, backend='eager', fullgraph=True)\n"
        "    assert torch.equal(compiled(x), first_copy.rmsnorm(x))\n"
        "print('loaded')\n"
    )
    run = python_in(folders, code)
    assert (run.returncode, run.stdout) == (0, "loaded\n"), run.stderr


@pytest.mark.extended
def test_another_library_of_the_same_name(folders):
    """Of sources that are the same, compiled in another way: an error that names both files; the first one works on."""
    (library,) = (folders / "second_copy").glob("*.so")
    library.write_bytes(library.read_bytes() + b"x")
    code = (
        "import torch, first_copy\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        import second_copy\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
        "first_copy.rmsnorm(torch.ones(2, 4))\n"
    )
    run = python_in(folders, code)
    assert run.returncode == 0, run.stderr
    first, second = run.stdout.splitlines()
    assert first == second and str(library) in first and str(folders / "first_copy" / library.name) in first


@pytest.mark.extended
@pytest.mark.parametrize("count", [0, 2])
def test_one_library_beside_the_package(folders, count):
    (library,) = (folders / "first_copy").glob("*.so")
    names = "none"
    if count == 2:
        shutil.copyfile(library, library.with_name(f"older{library.name}"))
        names = f"{library.name} and older{library.name}"
    else:
        library.unlink()
    run = python_in(folders, "import first_copy")
    assert f"ImportError: {folders / 'first_copy'}: expected one compiled library" in run.stderr
    assert f"got {names}: build or install it again" in run.stderr


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
