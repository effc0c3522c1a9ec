"""The machine code of the CUDA kernels: 16-byte accesses where they are meant, no local memory, no reduction under a
predicate, the device guard.

tests/project/test_build_variants.py reads what ptxas says of registers and spills.
"""

from __future__ import annotations

import collections
import os
import re
import shutil
import site
import subprocess
from pathlib import Path

import pytest
from helpers.build_checks import built_variant, dynamic_symbols, fatbin_archs, library_of

ACCESS = re.compile(r"\*/\s+(?:@!?U?P\w+\s+)?(LDG|STG|LDL|STL)\b([.\w]*)")
GUARDED_REDUCTION = re.compile(r"\*/\s+@!?U?P\w+\s+REDUX\b")
INDEXED = 1 << 30  # kIndexed of kernel_src/ltx/row/operands.cuh, in the operands that an instance knows
PRODUCT = re.compile(r"\*/\s+(HGMMA|IGMMA|WARPGROUP)\b")


@pytest.fixture(scope="module")
def library() -> Path:
    return library_of(built_variant("cuda"))


@pytest.fixture(scope="module")
def accesses(library: Path) -> dict[str, collections.Counter[str]]:
    """For each kernel, how many instructions load and store global and local memory, by width: "LDG 128".

    And "guarded REDUX": reductions of a warp under a predicate; "HGMMA" and "IGMMA": products of warpgroups,
    "WARPGROUP": what begins them and waits for them.
    """
    wheels = [f"{path}/nvidia/cu13/bin" for path in site.getsitepackages()]
    toolkit = [f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"]
    search = os.pathsep.join([os.environ["PATH"], *toolkit, *wheels])
    for tool in ("cuobjdump", "nvdisasm"):
        if shutil.which(tool, path=search) is None:
            pytest.skip(f"no {tool} (pip install nvidia-cuda-{tool})")
    newest = max(number for image in fatbin_archs(library) for kind, number in image if kind == "sm" and number <= 90)
    command = [str(shutil.which("cuobjdump", path=search)), "-sass", "-arch", f"sm_{newest}", str(library)]
    text = subprocess.run(
        command, env={**os.environ, "PATH": search}, capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, collections.Counter[str]] = {}
    kernel = ""
    for line in text.splitlines():
        if "Function :" in line:
            kernel = line.split(":", 1)[1].strip()
            found[kernel] = collections.Counter()
        elif (access := ACCESS.search(line)) and kernel:
            width = re.search(r"\.(128|64|U16|S16|U8|S8)\b", access[2])
            found[kernel][f"{access[1]} {width[1] if width else '32'}"] += 1
        elif GUARDED_REDUCTION.search(line) and kernel:
            found[kernel]["guarded REDUX"] += 1
        elif (product := PRODUCT.search(line)) and kernel:
            found[kernel][product[1]] += 1
    assert len(found) > 100
    return found


def kernels(accesses: dict[str, collections.Counter[str]], name: str) -> dict[str, collections.Counter[str]]:
    """Those of one template, whose mangled name has its length before it."""
    return {kernel: counts for kernel, counts in accesses.items() if re.search(rf"\d{name}I", kernel)}


def known_operands(kernel: str) -> int:
    """The uint32_t among the arguments of norm_kernel's template."""
    (known,) = re.findall(r"Lj(\d+)E", kernel)
    return int(known)


def test_no_local_memory(accesses: dict[str, collections.Counter[str]]) -> None:
    for kernel, counts in accesses.items():
        local = {access: count for access, count in counts.items() if access.startswith(("LDL", "STL"))}
        assert not local, kernel


def test_no_reduction_is_guarded(accesses: dict[str, collections.Counter[str]]) -> None:
    """All lanes of a warp must take part in it. ptxas 13.0 guarded one with a predicate of something else.

    It took a uniform predicate's number for that of another: the row's largest magnitude was garbage, in one of a
    hundred kernels. No source of ours asks for a guard (kernel_src/ltx/fp8.cuh, warp_magnitude).
    """
    for kernel, counts in accesses.items():
        assert not counts["guarded REDUX"], kernel


def test_products_of_warpgroups_run_beside_the_rest(accesses: dict[str, collections.Counter[str]]) -> None:
    """Of the attention on Hopper. After harmless-looking edits ptxas waits for each product by itself, three times as
    long in all: it then has a WARPGROUP instruction for each, and says so in a warning that nobody reads."""
    found = kernels(accesses, "hopper_attention_kernel")
    int8 = [kernel for kernel, counts in found.items() if counts["IGMMA"]]
    # Two dtypes, two widths, and one more for masks of addends; each also for keys in pieces. Causal: two dtypes, two
    # widths. In 8 bits two dtypes.
    assert (len(found), len(int8)) == (16, 2)
    for kernel, counts in found.items():
        assert counts["HGMMA"] + 2 * counts["IGMMA"] >= 24, kernel
        assert counts["WARPGROUP"] <= 9, kernel


@pytest.mark.parametrize("name", ["norm_kernel", "glu_kernel", "heads_kernel", "row_kernel", "attention_kernel"])
def test_main_lines_move_whole_packs(accesses: dict[str, collections.Counter[str]], name: str) -> None:
    """The kernels that common calls take store 16 bytes at a time, and load at least as many packs as they store.

    Tables and biases of another width than the rows' may take narrower loads; norm_kernel has none, but a row's number
    where an index names the modulation: a bool, an int32 or the two words of an int64. Quantised rows are a byte an
    element, with a scale of 32 bits; one scale for all rows is read.
    """
    found = kernels(accesses, name)
    assert found
    for kernel, counts in found.items():
        widths = {access for access in counts if access.startswith("STG")}
        quantised = name == "norm_kernel" and "6OutputE1" in kernel
        if quantised:
            assert {"STG 64", "STG 32"} <= widths <= {"STG 64", "STG 32", "STG 128"}, kernel
        else:
            assert widths == {"STG 128"}, kernel
        assert counts["LDG 128"] >= counts["STG 128"], kernel
        if name == "norm_kernel" and not quantised:
            index = {"LDG 32", "LDG U8"} if INDEXED & known_operands(kernel) else set()
            assert {access for access in counts if access.startswith("LDG")} == {"LDG 128"} | index, kernel


def test_the_device_is_guarded(library: Path) -> None:
    """Only two GPUs show a launch on the wrong one; without a guard in the binding its function is not imported."""
    undefined = {name for _, name in dynamic_symbols(library, "--undefined-only")}
    assert {"aoti_torch_create_device_guard", "aoti_torch_get_current_cuda_stream"} <= undefined
