"""Which build is tested: the one that LOCAL_KERNELS names."""

from __future__ import annotations

import os
from pathlib import Path

REPO_ID = "org/ltx-kernels"
# A CUDA torch takes the CPU variant only where it is told to: for tests of that torch on a machine without a GPU.
BACKEND = os.environ.get("LTX_KERNELS_BACKEND")
ROOT = Path(__file__).resolve().parent.parent.parent


def use_own_build_by_default() -> None:
    os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={ROOT / 'build'}")


def build_directory() -> Path | None:
    entries = dict(entry.split("=", 1) for entry in os.environ["LOCAL_KERNELS"].split(":"))
    return Path(entries[REPO_ID]) if REPO_ID in entries else None
