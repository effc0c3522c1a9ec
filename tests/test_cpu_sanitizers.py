"""The CPU backend under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "kernel_src" / "cpu").glob("*.cpp"))
# Two calls of everything, odd sizes and strides, every error, and random calls.
CHECKED = ["tests/test_sanitize.py", "tests/test_errors.py", "tests/test_inputs.py", "tests/test_quant.py"]


def run(*command: str | Path, **environment: str) -> str:
    result = subprocess.run(
        [str(c) for c in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    return result.stdout


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that loads a build with both sanitizers."""
    output = tmp_path_factory.mktemp("sanitized")
    build = [sys.executable, ROOT / "tools/build.py", "--backend", "cpu", "--sanitize", "address,undefined"]
    preload = re.search(r"LD_PRELOAD=(\S+)", run(*build, "--output", output))
    assert preload is not None
    return {
        "LD_PRELOAD": preload[1],
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "LOCAL_KERNELS": f"org/ltx-kernels={output}",
        "LTX_TEST_GUARD": "0",  # the sanitizer sees the ends of buffers
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.slow
def test_addresses_and_undefined_behaviour(sanitized: dict[str, str]) -> None:
    pytest_alone = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    chosen = ["-k", "not compile and not memory_for_the_output", *CHECKED]
    output = run(sys.executable, *pytest_alone, *chosen, **sanitized)
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None and int(passed[1]) > 1000


@pytest.mark.slow
def test_random_calls(sanitized: dict[str, str], tmp_path: Path) -> None:
    output = tmp_path / "fuzz.json"
    fuzz = [sys.executable, ROOT / "tests/fuzz.py", "--cases", "1000", "--jobs", "2", "--output", output]
    assert "0 failures" in run(*fuzz, **sanitized)


def driver(directory: Path, name: str, *flags: str) -> Path:
    binary = directory / name
    common = ["-std=c++17", "-g", "-ffp-contract=off", f"-I{ROOT / 'kernel_src'}"]
    run("g++", *common, *flags, *SOURCES, ROOT / "tests/cpu_driver.cpp", "-pthread", "-o", binary)
    return binary


@pytest.mark.slow
def test_threads(tmp_path: Path) -> None:
    """ThreadSanitizer does not see libgomp, so a driver without torch runs the ranges in threads of its own."""
    binary = driver(tmp_path, "tsan", "-O1", "-fsanitize=thread")
    assert len(run(binary, "4").splitlines()) > 100


@pytest.mark.slow
def test_same_bits_from_every_instruction_set_and_thread(tmp_path: Path) -> None:
    expected = None
    for isa in (0, 1, 2):
        binary = driver(tmp_path, f"isa{isa}", "-O2", f"-DLTX_CPU_MAX_ISA={isa}")
        for threads in ("1", "3"):
            text = run(binary, threads)
            expected = expected or text
            assert text == expected, f"instruction set {isa}, {threads} threads"
