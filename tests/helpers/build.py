"""Which build is tested: the one that LOCAL_KERNELS names."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

import pytest


def local_kernels() -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in os.environ.get("LOCAL_KERNELS", "").split(":") if entry)


# `nix run .#ci-test` names the build after the repository of build.toml, which is another for other publishers.
REPO_ID = next((name for name in local_kernels() if name.endswith("/ltx-kernels")), "org/ltx-kernels")
# A CUDA torch takes the CPU variant only where it is told to: for tests of that torch on a machine without a GPU.
BACKEND = os.environ.get("LTX_KERNELS_BACKEND") or None
ROOT = Path(__file__).resolve().parent.parent.parent


def use_own_build_by_default() -> None:
    os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={ROOT / 'build'}")


def build_directory() -> Path | None:
    path = local_kernels().get(REPO_ID)
    return None if path is None else Path(path)


def load_build() -> ModuleType:
    """The package as users load it. A test that calls this is skipped without the library `kernels`."""
    kernels = pytest.importorskip("kernels")
    directory = build_directory()
    if directory is None:
        pytest.fail(f"LOCAL_KERNELS has no entry for {REPO_ID}", pytrace=False)
    if not directory.exists():
        pytest.fail(f"{directory} does not exist: run `make build`", pytrace=False)
    package: ModuleType = kernels.get_kernel(REPO_ID, version=1, backend=BACKEND)
    return package


def installed_by_pip(folder: Path) -> None:
    """Puts a stand-in for pip's package into a folder: its name and the id of its ops, without a metadata.json."""
    package = folder / "ltx_fused"
    package.mkdir()
    (package / "__init__.py").write_text("class _ops:\n    class ops:\n        name = '_pip_ops'\n")
    importlib.invalidate_caches()
