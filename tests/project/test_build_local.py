"""tools/build.py and the pip package, on a project of one op: identities, increments, options, errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers.build_checks import (
    ROOT,
    assert_exports_its_entry_alone,
    builder,
    built_variant,
    dynamic_symbols,
    fatbin_archs,
    library_of,
    make_tiny_project,
    run_build,
    run_python,
    tool,
)

needs_nvcc = pytest.mark.skipif(builder.find_cuda() is None, reason="nvcc not found")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_tiny_project(tmp_path / "tiny")


def cpu_variant(project: Path, output: str = "build") -> Path:
    (variant,) = (project / output).glob("torch-stable-abi211-cpu-*-linux")
    return variant


def ops_id(variant: Path) -> str:
    return json.loads((variant / "metadata.json").read_text())["id"]


def git(project: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=project, capture_output=True, text=True, check=True
    ).stdout


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


LOAD = """
import pathlib, torch
from kernels import get_local_kernel
def load(path):
    return get_local_kernel(pathlib.Path(path), backend="cpu")
one = torch.ones(3)
"""


def test_build_load_and_rebuild(project: Path):
    assert "built" in run_build(project, "--backend", "cpu").stdout
    variant = cpu_variant(project)
    assert run_python(LOAD + f"print(load({str(variant)!r}).add_one(one).tolist())") == "[2.0, 2.0, 2.0]\n"
    before = {p: p.stat().st_mtime_ns for p in variant.iterdir()}

    start = time.monotonic()
    assert "up to date" in run_build(project, "--backend", "cpu").stdout
    assert time.monotonic() - start < 5
    assert {p: p.stat().st_mtime_ns for p in variant.iterdir() if p.suffix != ".pyc" and p in before} == before

    # A header: everything that includes it is compiled again.
    edit(project / "kernel_src/ltx/add.h", "1.0f", "5.0f")
    assert "built" in run_build(project, "--backend", "cpu").stdout
    assert run_python(LOAD + f"print(load({str(variant)!r}).add_one(one).tolist())") == "[6.0, 6.0, 6.0]\n"
    assert len(list(variant.glob("*.so"))) == 1


def test_a_python_edit_compiles_one_file(project: Path):
    run_build(project, "--backend", "cpu")
    first = ops_id(cpu_variant(project))
    kernel = next((project / "build/.cache").glob("*/obj/kernel_src__cpu__add.cpp.o"))
    before = kernel.stat().st_mtime_ns
    edit(project / "torch-ext/ltx_kernels/__init__.py", "return ops", "# edited\n    return ops")
    run_build(project, "--backend", "cpu")
    assert ops_id(cpu_variant(project)) != first
    assert kernel.stat().st_mtime_ns == before
    assert "# edited" in (cpu_variant(project) / "__init__.py").read_text()


@pytest.mark.extended
def test_a_broken_source_leaves_the_variant_alone(project: Path):
    run_build(project, "--backend", "cpu")
    variant = cpu_variant(project)
    before = builder.hash_variant(variant)
    edit(project / "kernel_src/cpu/add.cpp", "kAddend;", "kNoSuchThing;")
    result = run_build(project, "--backend", "cpu", check=False)
    assert result.returncode == 1
    assert "kNoSuchThing" in result.stdout + result.stderr and "error: compilation failed" in result.stderr
    assert builder.hash_variant(variant) == before
    assert [p.name for p in (project / "build").iterdir() if p.name != ".cache"] == [variant.name]


def test_an_undefined_function_fails_the_build(project: Path):
    edit(project / "kernel_src/cpu/add.cpp", "ltx::add", "ltx::subtract")
    edit(
        project / "kernel_src/ltx/add.h",
        "namespace ltx {",
        "namespace ltx { void subtract(const float*, float*, int64_t, void*);",
    )
    result = run_build(project, "--backend", "cpu", check=False)
    assert result.returncode == 1
    assert "error: not defined by any source: ltx::add(" in result.stderr
    assert not list((project / "build").glob("torch-*"))


@pytest.mark.extended
def test_identity_follows_git(project: Path):
    git(project, "init", "-q")
    git(project, "add", "-A")
    git(project, "commit", "-qm", "one")
    tree, commit = git(project, "rev-parse", "HEAD^{tree}", "HEAD").split()
    run_build(project, "--backend", "cpu")
    metadata = json.loads((cpu_variant(project) / "metadata.json").read_text())
    assert metadata["id"] == f"_ltx_kernels_cpu_{tree[:7]}"
    assert metadata["provenance"]["kernel"] == {"commit": commit, "dirty": False}

    (project / "torch-ext/ltx_kernels/extra.py").write_text("")  # untracked, and yet in the variant
    run_build(project, "--backend", "cpu")
    metadata = json.loads((cpu_variant(project) / "metadata.json").read_text())
    assert re.fullmatch(r"_ltx_kernels_cpu_[0-9a-f]{10}_dirty", metadata["id"])
    assert metadata["provenance"]["kernel"] == {"commit": commit, "dirty": True}
    assert (cpu_variant(project) / "extra.py").is_file()


@pytest.mark.slow
def test_two_dirty_builds_in_one_process(project: Path, tmp_path: Path):
    run_build(project, "--backend", "cpu")
    first = tmp_path / "first"
    shutil.copytree(cpu_variant(project), first / cpu_variant(project).name)
    edit(project / "kernel_src/ltx/add.h", "1.0f", "5.0f")
    run_build(project, "--backend", "cpu")
    (copy,) = first.iterdir()
    code = f"a, b = load({str(copy)!r}), load({str(cpu_variant(project))!r})\n"
    code += "print(a.add_one(one).tolist(), b.add_one(one).tolist(), a.add_one(one).tolist())"
    assert run_python(LOAD + code) == "[2.0, 2.0, 2.0] [6.0, 6.0, 6.0] [2.0, 2.0, 2.0]\n"


@pytest.mark.slow
def test_options_change_the_identity(project: Path):
    run_build(project, "--backend", "cpu")
    run_build(project, "--backend", "cpu", "--suffix", "mine", "--output", str(project / "other"))
    plain, mine = ops_id(cpu_variant(project)), ops_id(cpu_variant(project, "other"))
    assert mine == f"{plain}_mine"


@pytest.mark.slow
def test_static_libstdcxx(project: Path):
    """libstdc++ is in the library then, and none of it is visible."""
    edit(project / "kernel_src/cpu/add.cpp", '#include "ltx/add.h"', '#include <iostream>\n#include "ltx/add.h"')
    edit(project / "kernel_src/cpu/add.cpp", "{\n", "{\n  std::cerr << count << std::endl;\n")
    run_build(project, "--backend", "cpu")
    second = run_build(project, "--backend", "cpu", "--static-libstdcxx").stdout
    assert re.findall(r"c\+\+ (\S+)", second) == ["torch-ext/torch_binding.cpp"]  # the rest is compiled already
    for folder, static in (("build", False), ("build/static-libstdcxx", True)):
        library = library_of(cpu_variant(project, folder))
        assert ("libstdc++" not in tool("objdump", "-p", library)) == static
        assert_exports_its_entry_alone(library)
    assert ops_id(cpu_variant(project)) != ops_id(cpu_variant(project, "build/static-libstdcxx"))


@pytest.mark.slow
def test_sanitizers(project: Path):
    result = run_build(project, "--sanitize", "address,undefined")
    variant = cpu_variant(project, "build/sanitized")
    undefined = [name for _, name in dynamic_symbols(library_of(variant), "--undefined-only")]
    assert any(name.startswith("__asan_") for name in undefined)
    assert any(name.startswith("__ubsan_") for name in undefined)
    runtime = re.search(r"LD_PRELOAD=(\S+)", result.stdout)
    assert runtime is not None
    code = LOAD + f"print(load({str(variant)!r}).add_one(one).tolist())"
    output = run_python(code, LD_PRELOAD=runtime[1], ASAN_OPTIONS="detect_leaks=0")
    assert output == "[2.0, 2.0, 2.0]\n"
    # The fault it is for: a read past the end, which a plain build does not notice.
    edit(project / "kernel_src/cpu/add.cpp", "i < count", "i < count + 100000")
    run_build(project, "--sanitize", "address,undefined")
    with pytest.raises(AssertionError, match=r"heap-buffer-overflow|SEGV|AddressSanitizer"):
        run_python(code, LD_PRELOAD=runtime[1], ASAN_OPTIONS="detect_leaks=0")


@needs_nvcc
@pytest.mark.slow
def test_cuda_architectures(project: Path):
    run_build(project, "--backend", "cuda")
    (variant,) = (project / "build").glob("torch-stable-abi211-cu*-linux")
    assert fatbin_archs(library_of(variant))[0] == {("sm", 80), ("sm", 90), ("ptx", 90)}
    assert json.loads((variant / "metadata.json").read_text())["backend"]["archs"] == ["8.0", "9.0+PTX"]
    (report,) = (project / "build/.cache" / variant.name).glob("ptxas-add.txt")
    assert report.read_text().count("0 bytes spill stores") == 2

    for arch in ("7.5", "8.0"):
        output = project / f"ptx-{arch}"
        run_build(project, "--arch", f"{arch}+PTX-only", "--output", str(output))
        (variant,) = output.iterdir()
        (held,) = fatbin_archs(library_of(variant))
        assert held == {("ptx", int(arch.replace(".", "")))}
        # The driver compiles PTX for whatever is newer, and `kernels` must not refuse it.
        assert json.loads((variant / "metadata.json").read_text())["backend"]["archs"] == [f"{arch}+PTX"]


CHOOSE = """
import json, pathlib, torch
from kernels.variants import get_variants_local, resolve_variant
chosen = {}
for torch.version.cuda in ("13.0", "13.1", "13.2", "13.4", "12.8"):
    best, _ = resolve_variant(get_variants_local(pathlib.Path(%r)), None)
    chosen[torch.version.cuda] = best and best.arch.backend.variant_str
print(json.dumps(chosen))
"""


@pytest.mark.slow
def test_two_cuda_versions_side_by_side(project: Path):
    """With compilers from PyPI. Each torch takes the newest that its CUDA covers; a CUDA torch loads it."""
    (ROOT / builder.CUDA_TOOLCHAIN_DIR).mkdir(exist_ok=True)
    (project / builder.CUDA_TOOLCHAIN_DIR).symlink_to(ROOT / builder.CUDA_TOOLCHAIN_DIR)  # downloaded once
    for version in ("13.0", "13.2"):
        result = run_build(project, "--backend", "cuda", "--cuda-from-pypi", version, check=False)
        if "pip could not install" in result.stderr:
            pytest.skip(f"NOT RUN: no compiler of CUDA {version}: {result.stderr}")
        assert result.returncode == 0, result.stderr
    variants = {path.name.split("-")[3]: path for path in (project / "build").glob("torch-*")}
    assert sorted(variants) == ["cu130", "cu132"]
    assert ops_id(variants["cu130"]) == ops_id(variants["cu132"])  # made of the same sources: one of them is loaded
    chosen = json.loads(run_python(CHOOSE % str(project / "build")))
    assert chosen == {"13.0": "cu130", "13.1": "cu130", "13.2": "cu132", "13.4": "cu132", "12.8": None}
    if torch.version.cuda in chosen:
        code = f"import pathlib, kernels; print(kernels.get_local_kernel(pathlib.Path({str(project / 'build')!r})))"
        assert variants[chosen[torch.version.cuda]].name in run_python(code)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "hopper"], "error: not an architecture: 'hopper'"),
        (["--sanitize", "address", "--backend", "cuda"], "error: --sanitize builds the CPU variant alone"),
        (["--suffix", "a-b"], "error: --suffix 'a-b': expected letters, digits and _"),
        (["--jobs", "0"], "error: --jobs: expected at least 1, got 0"),
        (["--jobs", "-1"], "error: --jobs: expected at least 1, got -1"),
        (["--arch", "9.0", "--backend", "cpu"], "error: --arch is for the CUDA variant: drop it, or --backend cpu"),
        (["--this-machine", "--backend", "cpu"], "error: --this-machine chooses backend and architectures of an"),
    ],
)
def test_argument_errors(project: Path, arguments: list[str], message: str):
    result = run_build(project, *arguments, check=False)
    assert result.returncode == 1
    assert message in result.stderr and "Traceback" not in result.stderr


PROJECT = """
[general]
name = "{}"
version = 1
license = "Apache-2.0"
backends = ["cpu"]
[torch]
stable-abi = "2.11"
[kernel]
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "--project: expected a directory with a build.toml, got "),
        ("x = [", "--project: expected TOML in "),
        ("[general]", "--project: expected the key torch in "),
        ('[general]\nbackends = ["cpu"]\n[torch]', "--project: expected the key stable-abi in "),
        (
            PROJECT.format("own_kernel"),
            "build.toml: expected a name of lowercase letters, digits and -, got 'own_kernel'",
        ),
        (
            PROJECT.format("Own Kernel"),
            "build.toml: expected a name of lowercase letters, digits and -, got 'Own Kernel'",
        ),
        (PROJECT.format("my-gate"), "build.toml names my-gate: expected its package in torch-ext/my_gate, got no "),
    ],
    ids=["none", "no TOML", "no table", "no key", "underscore", "capitals", "no package"],
)
def test_a_directory_that_is_no_project(tmp_path: Path, text: str | None, message: str):
    if text is not None:
        (tmp_path / "build.toml").write_text(text)
    result = run_build(ROOT, "--project", str(tmp_path), check=False)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {message}") and "Traceback" not in result.stderr


def stand_in_torch(directory: Path, cuda: str | None) -> Path:
    """The installed torch, with another torch.version.cuda."""
    directory.mkdir()
    real = Path(torch.__file__).parent
    for name in ("include", "lib"):
        (directory / name).symlink_to(real / name)
    (directory / "version.py").write_text(f"__version__ = {torch.__version__!r}\ncuda = {cuda!r}\n")
    return directory


def stand_in_gpus(directory: Path, *capabilities: str) -> None:
    """An nvidia-smi that lists GPUs of these compute capabilities."""
    directory.mkdir(exist_ok=True)
    (directory / "nvidia-smi").write_text("#!/bin/sh\n" + "".join(f"echo {c}\n" for c in capabilities))
    (directory / "nvidia-smi").chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for stand-ins that comes first in PATH, with an nvidia-smi that lists no GPU."""
    stand_in_gpus(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "bin"


def test_native_architectures(machine: Path, monkeypatch: pytest.MonkeyPatch):
    assert builder.native_archs() == []
    stand_in_gpus(machine, "9.0", "12.0", "9.0", "[N/A]")
    assert builder.native_archs() == ["9.0", "12.0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert builder.native_archs() == []


def test_a_gpu_that_is_too_old(machine: Path):
    """It is left out beside a newer one, and alone it is an error."""
    project = builder.load_project()
    stand_in_gpus(machine, "7.0", "9.0")
    assert builder.supported_archs(project) == ["9.0"]
    stand_in_gpus(machine, "7.0")
    with pytest.raises(builder.BuildError, match=r"^this machine's GPU has compute capability 7\.0: expected 7\.5 or"):
        builder.supported_archs(project)


def test_a_project_that_lists_no_architectures(machine: Path):
    """It is built for whatever GPU there is."""
    project = builder.load_project()
    kernels = tuple(builder.dataclasses.replace(kernel, capabilities=()) for kernel in project.kernels)
    stand_in_gpus(machine, "7.0")
    assert builder.supported_archs(builder.dataclasses.replace(project, kernels=kernels)) == ["7.0"]


def test_a_directory_that_cannot_be_built_into(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        builder.BuildError, match=r"file/build: expected a directory to build into, got Not a directory"
    ):
        builder.make_directory(tmp_path / "file/build")


def test_a_program_that_is_not_installed():
    with pytest.raises(builder.BuildError, match=r"^no-such-program not found: install it"):
        builder.run(["no-such-program", "--version"])


def test_a_build_that_waits_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with builder.locked(tmp_path):
        waiting = threading.Thread(target=lambda: builder.locked(tmp_path).__enter__())
        waiting.start()
        for _ in range(500):
            if "Waiting" in (printed := capsys.readouterr().out):
                break
            time.sleep(0.01)
    waiting.join()
    assert printed == f"Waiting for another build in {tmp_path}\n"


def test_this_machine_without_a_gpu(project: Path, machine: Path):
    """The CPU variant alone, whatever toolkit there is; what is compiled is told as it goes."""
    output = run_build(project, "--this-machine").stdout
    assert output.startswith("Building for the CPU: no NVIDIA GPU") and "`make build`" in output
    assert [p.name for p in (project / "build").glob("torch-*")] == [cpu_variant(project).name]
    assert re.findall(r"^  \[(\d)/3, ", output, re.MULTILINE) == ["1", "2", "3"]
    assert "fault" not in output and "GLIBC" not in output
    result = run_build(project, "--arch", "native", check=False)
    assert result.returncode == 1 and "error: --arch native: no NVIDIA GPU found" in result.stderr


@needs_nvcc
def test_this_machine_with_a_gpu(project: Path, machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The CUDA variant alone, for the architectures of its GPUs, into build/."""
    stand_in_gpus(machine, "8.9")
    cuda = builder.find_cuda()
    assert cuda is not None
    monkeypatch.setenv("LTX_KERNELS_TORCH", str(stand_in_torch(tmp_path / "torch", f"{cuda.version[0]}.0")))
    assert "compute capability 8.9" in run_build(project, "--this-machine").stdout
    (variant,) = (project / "build").glob("torch-*")
    assert fatbin_archs(library_of(variant))[0] == {("sm", 89)}
    assert json.loads((variant / "metadata.json").read_text())["backend"] == {"type": "cuda", "archs": ["8.9"]}

    monkeypatch.setenv("LTX_KERNELS_TORCH", str(stand_in_torch(tmp_path / "older", "11.8")))
    result = run_build(project, "--this-machine", check=False)
    assert result.returncode == 1
    assert f"a torch for CUDA 11.8 and an nvcc of CUDA {cuda.version[0]}: install that CUDA toolkit" in result.stderr


def test_stale_builds_are_noticed(project: Path):
    run_build(project, "--backend", "cpu")
    tiny = builder.load_project(project)
    assert not builder.is_stale(tiny, cpu_variant(project))
    (project / "README.md").write_text("not built\n")
    assert not builder.is_stale(tiny, cpu_variant(project))
    edit(project / "kernel_src/ltx/add.h", "1.0f", "5.0f")
    assert builder.is_stale(tiny, cpu_variant(project))
    run_build(project, "--backend", "cpu", "--output", str(project / "other"))
    assert builder.is_stale(tiny, cpu_variant(project)) and not builder.is_stale(tiny, cpu_variant(project, "other"))
    run_build(project, "--backend", "cpu")
    assert not builder.is_stale(tiny, cpu_variant(project))


def test_torch_missing_or_too_old(project: Path, tmp_path: Path):
    torch = tmp_path / "site" / "torch"
    command = [sys.executable, str(project / "tools/build.py"), "--backend", "cpu"]
    environment = {**os.environ, "LTX_KERNELS_TORCH": str(torch)}
    missing = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert missing.returncode == 1
    assert (
        f"error: LTX_KERNELS_TORCH: expected torch's directory, .../site-packages/torch, got {torch}" in missing.stderr
    )
    torch.mkdir(parents=True)
    (torch / "version.py").write_text("__version__ = '2.9.1+cu128'\ncuda = '12.8'\n")
    old = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert old.returncode == 1
    assert "error: torch 2.9.1+cu128" in old.stderr and "pip install 'torch>=2.11'" in old.stderr
    assert "Traceback" not in missing.stderr + old.stderr


def test_missing_source(project: Path):
    (project / "kernel_src/ltx/add.h").unlink()
    result = run_build(project, "--backend", "cpu", check=False)
    assert result.returncode == 1
    assert "error: build.toml lists files that do not exist: kernel_src/ltx/add.h" in result.stderr


def virtual_environment(directory: Path) -> Path:
    """An environment that sees this one's packages, for pip to install into."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    python = directory / "bin" / "python"
    purelib = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    Path(purelib, "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def pip_install(python: Path, *arguments: str) -> None:
    pytest.importorskip("hatchling")
    command = [str(python), "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def python_output(python: Path, code: str) -> str:
    result = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False, cwd="/")
    assert result.returncode == 0, result.stderr
    return result.stdout


USE = "import torch, ltx_fused; print(ltx_fused.add_one(torch.ones(2)).tolist())\n"


@pytest.mark.extended
def test_pip_install_beside_a_local_build(project: Path, tmp_path: Path):
    """The pip package and a build of the same sources have different ops, so that one process can load both."""
    python = virtual_environment(tmp_path / "venv")
    pip_install(python, str(project))
    run_build(project, "--backend", "cpu")
    code = USE + LOAD + f"kernel = load({str(cpu_variant(project))!r})\nprint(kernel.add_one(one).tolist())\n"
    code += "print(ltx_fused._ops.add_op_namespace_prefix('add_one'), kernel._ops.add_op_namespace_prefix('add_one'))"
    first, second, names = python_output(python, code).splitlines()
    assert (first, second) == ("[2.0, 2.0]", "[2.0, 2.0, 2.0]")
    installed, local = names.split()
    assert installed == local.replace("_dirty::", "_dirty_pip::")
    assert "torch-ext" not in python_output(python, "import ltx_fused; print(ltx_fused.__file__)")
    info = python_output(
        python, "import importlib.metadata as m; print(m.version('ltx-fused'), m.requires('ltx-fused'))"
    )
    assert info == "1 ['torch>=2.11']\n"


def other_distribution(directory: Path) -> Path:
    """A stand-in for Lightricks' distribution, with its name and that of its module."""
    (directory / "ltx_kernels").mkdir(parents=True)
    (directory / "ltx_kernels" / "__init__.py").write_text("class All2All: ...\n")
    (directory / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "ltx-kernels"\nversion = "0.2"\n'
    )
    return directory


@pytest.mark.extended
@pytest.mark.parametrize("ours", ["wheel", "editable"])
def test_pip_install_beside_another_package_of_the_kernels_name(project: Path, tmp_path: Path, ours: str):
    """Both are installed, imported and removed, whichever comes first, and neither has a file of the other's."""
    python = virtual_environment(tmp_path / "venv")
    other = other_distribution(tmp_path / "other")
    if ours == "wheel":
        pip_install(python, str(project))
        pip_install(python, str(other))
    else:
        pip_install(python, str(other))
        pip_install(python, "--editable", str(project))
    both = (
        "import ltx_fused, ltx_kernels, torch; print(ltx_kernels.All2All.__name__, hasattr(ltx_kernels, 'add_one'))\n"
    )
    assert python_output(python, both + USE) == "All2All False\n[2.0, 2.0]\n"
    files = (
        "import importlib.metadata as m\nprint(*({str(f) for f in m.files(n)} for n in ('ltx-fused', 'ltx-kernels')))"
    )
    mine, theirs = python_output(python, files).strip().split("} {")
    assert "ltx_kernels/" not in mine and "ltx_fused" not in theirs
    uninstall = [str(python), "-m", "pip", "uninstall", "--yes"]
    subprocess.run([*uninstall, "ltx-kernels"], check=True, capture_output=True)
    alone = "import importlib.util as u; print(u.find_spec('ltx_kernels'), u.find_spec('ltx_fused') is not None)"
    assert python_output(python, alone) == "None True\n" and python_output(python, USE) == "[2.0, 2.0]\n"
    pip_install(python, str(other))
    subprocess.run([*uninstall, "ltx-fused"], check=True, capture_output=True)
    assert python_output(python, "import ltx_kernels; print(ltx_kernels.All2All.__name__)") == "All2All\n"
    assert python_output(python, "import importlib.util as u; print(u.find_spec('ltx_fused'))") == "None\n"


def source_archive(project: Path, output: Path) -> Path:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(output)]
    result = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (archive,) = output.glob("*.tar.gz")
    return archive


def test_a_source_archive_after_an_editable_installation(project: Path, tmp_path: Path):
    """The link in build/ leads to the package's folder, which the archive holds as before."""

    def names(output: Path) -> list[str]:
        with tarfile.open(source_archive(project, output)) as archive:
            return sorted(archive.getnames())

    before = names(tmp_path / "before")
    (project / "build/.editable").mkdir(parents=True)
    (project / "build/.editable/ltx_fused").symlink_to(project / "torch-ext/ltx_kernels")
    assert names(tmp_path / "after") == before
    assert any(name.endswith("torch-ext/ltx_kernels/__init__.py") for name in before)


@pytest.mark.slow
def test_pip_install_from_a_source_archive(project: Path, tmp_path: Path):
    archive = source_archive(project, tmp_path / "dist")
    shutil.rmtree(project)
    python = virtual_environment(tmp_path / "venv")
    pip_install(python, str(archive))
    assert python_output(python, USE) == "[2.0, 2.0]\n"


def test_a_source_archive_holds_what_a_build_reads(tmp_path: Path):
    with tarfile.open(source_archive(ROOT, tmp_path)) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    project = builder.load_project()
    inputs = {path.relative_to(ROOT).as_posix() for b in project.backends for path in project.input_files(b)}
    assert inputs | {"hatch_build.py", "tools/build.py", "pyproject.toml", "README.md", "LICENSE"} <= held


@needs_nvcc
@pytest.mark.slow
def test_pip_builds_for_the_gpus_of_this_machine(
    project: Path, machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cuda = builder.find_cuda()
    assert cuda is not None
    monkeypatch.setenv("LTX_KERNELS_TORCH", str(stand_in_torch(tmp_path / "torch", f"{cuda.version[0]}.0")))
    tiny = builder.load_project(project)
    stand_in_gpus(machine, "8.9")
    assert fatbin_archs(library_of(builder.build_for_pip(tiny)))[0] == {("sm", 89)}
    monkeypatch.setenv("LTX_KERNELS_ARCH", "8.0; 9.0+PTX")
    assert fatbin_archs(library_of(builder.build_for_pip(tiny)))[0] == {("sm", 80), ("sm", 90), ("ptx", 90)}


@pytest.mark.parametrize(
    ("torch_cuda", "gpus", "backend", "archs", "expected"),
    [
        (None, [], "", "", None),
        ("13.0", [], "", "", None),  # a toolkit without a GPU: a laptop, a login node
        ("13.0", ["8.9", "9.0"], "", "", ("8.9", "9.0")),
        (None, ["9.0"], "", "", None),
        ("13.0", ["9.0"], "cpu", "", None),
        ("13.0", [], "cuda", "", ()),  # all architectures of build.toml
        ("13.0", ["9.0"], "cuda", "", ("9.0",)),
        ("13.0", [], "", "8.0, 9.0+PTX", ("8.0", "9.0+PTX")),
        ("13.0", [], "rocm", "", "LTX_KERNELS_BACKEND: expected cpu or cuda, got rocm"),
        ("13.0", [], "cpu", "9.0", "LTX_KERNELS_ARCH: expected nothing beside LTX_KERNELS_BACKEND=cpu, got 9.0"),
        (None, [], "cuda", "", "LTX_KERNELS_BACKEND=cuda: expected a torch for CUDA, got torch"),
        (None, [], "", "9.0", "LTX_KERNELS_ARCH: expected a torch for CUDA, got torch"),
    ],
)
def test_which_variant_pip_builds(
    project: Path, machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    torch_cuda: str | None, gpus: list[str], backend: str, archs: str, expected: object,
):  # fmt: skip
    """What this machine runs: the CPU variant where there is no GPU, unless the user asks for something else."""
    monkeypatch.setenv("LTX_KERNELS_TORCH", str(stand_in_torch(tmp_path / "torch", torch_cuda)))
    monkeypatch.setenv("LTX_KERNELS_BACKEND", backend)
    monkeypatch.setenv("LTX_KERNELS_ARCH", archs)
    stand_in_gpus(machine, *gpus)
    tiny, found = builder.load_project(project), builder.find_torch((2, 11))
    if isinstance(expected, str):
        with pytest.raises(builder.BuildError, match=re.escape(expected)):
            builder.build_for_pip(tiny)
    else:
        assert builder._archs_for_pip(tiny, found) == expected


def test_pip_without_the_toolkit_of_torch(
    project: Path, machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """No CPU variant by surprise on a machine with a GPU."""
    stand_in_gpus(machine, "9.0")
    monkeypatch.setenv("LTX_KERNELS_TORCH", str(stand_in_torch(tmp_path / "torch", "11.8")))
    with pytest.raises(builder.BuildError, match=r"for CUDA 11\.8 and .*: install .*, or set LTX_KERNELS_BACKEND=cpu"):
        builder.build_for_pip(builder.load_project(project))


@pytest.mark.parametrize("place", ["own", "pth", "system", "active", "folder"])
def test_where_torch_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str):
    """In an isolated build, whose interpreter does not import torch: pip's, or one of another environment, as uv's."""
    user, elsewhere = tmp_path / "user", tmp_path / "elsewhere"
    options = ["--system-site-packages"] if place == "system" else []
    for directory in (user, elsewhere):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", *options, str(directory)], check=True)
    (packages,) = (user / "lib").glob("python*/site-packages")
    base = tmp_path / "base"
    holder = {"pth": tmp_path / "linked", "system": base / packages.relative_to(user)}.get(place, packages)
    stand_in = holder / "torch"
    stand_in.parent.mkdir(parents=True, exist_ok=True)
    stand_in_torch(stand_in, None)
    if place == "pth":
        (packages / "linked.pth").write_text(f"# a comment\nimport sys\n{holder}\n")
    monkeypatch.delenv("LTX_KERNELS_TORCH", raising=False)
    monkeypatch.setattr(builder.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "prefix", str(elsewhere if place in ("active", "folder") else user))
    monkeypatch.setattr(sys, "base_prefix", str(base))
    monkeypatch.setattr(builder.sysconfig, "get_path", lambda name: str(tmp_path / "none"))
    monkeypatch.setattr(builder.site, "getusersitepackages", lambda: str(tmp_path / "none"))
    monkeypatch.setenv("PATH", f"{user / 'bin'}:/usr/bin" if place == "active" else "/usr/bin")
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.setenv("PWD", str(project))
    assert (builder._torch_path() == stand_in) == (place != "folder")
    if place == "folder":
        (tmp_path / ".venv").symlink_to(user)
        assert builder._torch_path() == tmp_path / ".venv" / stand_in.relative_to(user)
    monkeypatch.setenv("PIP_BUILD_TRACKER", str(tmp_path))  # pip runs the interpreter that it installs for
    assert (builder._torch_path() is None) == (place in ("active", "folder"))
    if builder._torch_path() is None:
        with pytest.raises(builder.BuildError, match=r"^torch not found .* pip install 'torch>=2.11'"):
            builder.find_torch((2, 11))
    monkeypatch.setenv("LTX_KERNELS_TORCH", str(tmp_path / "nowhere"))
    with pytest.raises(builder.BuildError, match=r"^LTX_KERNELS_TORCH: expected torch's directory, .*nowhere$"):
        builder.find_torch((2, 11))


@pytest.mark.slow
def test_editable_install_sees_edits(project: Path, tmp_path: Path):
    python = virtual_environment(tmp_path / "venv")
    pip_install(python, "--editable", str(project))
    assert python_output(python, USE) == "[2.0, 2.0]\n"
    edit(project / "torch-ext/ltx_kernels/__init__.py", "ops.add_one(input)", "ops.add_one(input) * 10")
    assert python_output(python, USE) == "[20.0, 20.0]\n"
    # What it wrote beside the sources is no source: the id of a local build is not moved by it.
    run_build(project, "--backend", "cpu")
    assert sorted(p.name for p in cpu_variant(project).iterdir() if p.suffix == ".py") == ["__init__.py", "_ops.py"]
    pip_install(python, "--editable", str(project))
    assert len(list((project / "torch-ext/ltx_kernels").glob("*.so"))) == 1


@pytest.mark.slow
def test_pip_install_of_the_package(tmp_path: Path):
    """The real sources, in the process that also loads build/: minutes where a CUDA torch is installed."""
    python = virtual_environment(tmp_path / "venv")
    pip_install(python, str(ROOT))
    code = (
        "import torch, ltx_fused\n" + LOAD + f"kernel = load({str(built_variant('cpu'))!r})\n"
        "x = torch.randn(3, 64)\n"
        "assert torch.equal(kernel.rmsnorm(x), ltx_fused.rmsnorm(x))\n"
        "print(ltx_fused._ops.add_op_namespace_prefix('') != kernel._ops.add_op_namespace_prefix(''))\n"
    )
    assert python_output(python, code) == "True\n"
    typed = "import ltx_fused, pathlib; print(pathlib.Path(ltx_fused.__file__).with_name('py.typed').is_file())"
    assert python_output(python, typed) == "True\n"
