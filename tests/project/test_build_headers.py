"""The bindings compile against the headers of the torch that runs the tests, from the oldest that they are for."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from helpers.build_checks import ROOT, builder

BINDINGS = [source for source in builder.load_project().torch_src if source.endswith(".cpp")]


def built_against() -> set[Path]:
    """Directories of the torch that the variants in build/ were compiled against."""
    ninja = (ROOT / "build" / ".cache").glob("*/build.ninja")
    return {Path(word.removeprefix("-isystem")) for file in ninja for word in file.read_text().split()}


@pytest.mark.parametrize("source", BINDINGS)
def test_binding_compiles(source: str, tmp_path: Path):
    """For `make test-torch`: the build itself has tried the torch that it was made with."""
    found = builder.find_torch((2, 11))
    if set(found.include) <= built_against():
        pytest.skip(f"build/ was compiled against this torch ({torch.__version__})")
    (tmp_path / "registration.h").write_text(builder.REGISTRATION.format(ops="_ltx_kernels_test"))
    flags = [f"-std={found.cxx_standard}", "-DTORCH_TARGET_VERSION=0x020b000000000000", "-DCPU_KERNEL", "-fsyntax-only"]
    search = [f"-I{ROOT / 'kernel_src'}", f"-I{tmp_path}", *(f"-isystem{path}" for path in found.include)]
    python = [f"-isystem{sysconfig.get_path('include')}", "-DPy_LIMITED_API=0x03090000"]
    command = ["g++", *flags, *search, *python, str(ROOT / source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
