#!/usr/bin/env python3
"""Build the variants of build.toml that this machine can build, without Nix.

The result has the layout of a Nix build (build/<variant>/..., see CONTRIBUTING.md) and is for
development: the variants that get published come from `nix run .#build-and-copy`. The pip package
(hatch_build.py) uses the functions of this module, so that there is one local build.

torch is read, never imported: its headers, its libraries and torch/version.py are all a build needs. That keeps a build
that changes nothing under a second, and lets pip build in an isolated environment against the torch that is installed.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NAME = "[a-z][a-z0-9-]*[a-z0-9]"  # of a project, as kernel-builder and kernels want it
OPS_FILE = "_ops.py"
CXX_SUFFIXES = (".cpp", ".cc")
LINKER_SUFFIX = ".o"  # what CMake, and so kernel-builder, hands to the linker as it is
PY_LIMITED_API = "0x03090000"
MANYLINUX_2_28 = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
CUDA_TOOLCHAIN_DIR = ".cuda"
INPUT_DIGEST = "input-digest.txt"  # in a variant's cache: of the sources that the variant was made from
STD_SYMBOL = re.compile(r"_ZN?K?St")

# The compiler of CUDA 13.x is complete on PyPI; that of 12.x is not (its wheels hold ptxas alone).
CUDA_WHEELS = {
    "13.0": {
        "nvidia-cuda-nvcc": "13.0.88",
        "nvidia-cuda-crt": "13.0.88",
        "nvidia-nvvm": "13.0.88",
        "nvidia-cuda-runtime": "13.0.88",
        "nvidia-cuda-cccl": "13.0.85",
    },
    "13.2": {
        "nvidia-cuda-nvcc": "13.2.86",
        "nvidia-cuda-crt": "13.2.86",
        "nvidia-nvvm": "13.2.86",
        "nvidia-cuda-runtime": "13.2.75",
        "nvidia-cuda-cccl": "13.2.75",
    },
}


class BuildError(RuntimeError):
    """A build that cannot go on; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One [kernel.<name>] table."""

    name: str
    backend: str
    src: tuple[str, ...]
    include: tuple[str, ...]
    cxx_flags: tuple[str, ...]
    cuda_flags: tuple[str, ...]
    capabilities: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Project:
    """build.toml."""

    root: Path
    name: str
    version: int
    license: str
    source: str | None
    python_depends: tuple[str, ...]
    backends: tuple[str, ...]
    stable_abi: dict[str, tuple[int, int]]
    torch_src: tuple[str, ...]
    torch_include: tuple[str, ...]
    torch_cxx_flags: tuple[str, ...]
    kernels: tuple[Kernel, ...]

    @property
    def python_name(self) -> str:
        return self.name.replace("-", "_")

    @property
    def package_dir(self) -> Path:
        return self.root / "torch-ext" / self.python_name

    def kernels_for(self, backend: str) -> list[Kernel]:
        return [kernel for kernel in self.kernels if kernel.backend == backend]

    def capabilities(self, cuda: tuple[int, int]) -> list[str]:
        """Capabilities of all CUDA kernels with this toolkit, sorted as kernel-builder sorts them."""
        listed = {c for kernel in self.kernels_for("cuda") for c in kernel.capabilities}
        return sorted(c for c in listed if known_to_toolkit(c, cuda))

    def python_files(self) -> list[Path]:
        """Python files of the package, without what an editable installation generates beside them."""
        files = [f for f in sorted(self.package_dir.rglob("*")) if f.suffix in (".py", ".pyi")]
        return [f for f in files if f.name != OPS_FILE or f.parent != self.package_dir]

    def input_files(self, backend: str) -> list[Path]:
        """Everything that the variant of a backend is made from."""
        listed = [*self.torch_src, *(s for kernel in self.kernels_for(backend) for s in kernel.src)]
        files = {self.root / "build.toml", *(self.root / name for name in listed), *self.python_files()}
        return sorted(files)

    def input_digest(self, backend: str, key: str = "") -> str:
        """Hash of `key` and of all input files, with their names."""
        digest = hashlib.sha256(key.encode())
        for file in self.input_files(backend):
            digest.update(f"{file.relative_to(self.root)}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
        return digest.hexdigest()


def read_toml(path: Path) -> dict[str, Any]:
    try:
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
    except ModuleNotFoundError:
        raise BuildError("tomli is needed below Python 3.11: run `pip install tomli`") from None
    with open(path, "rb") as file:
        return tomllib.load(file)


def load_project(root: Path = ROOT) -> Project:
    """The project of a directory; on the command line --project names it."""
    file = root / "build.toml"
    if not file.is_file():
        raise BuildError(f"--project: expected a directory with a build.toml, got {root}")
    try:
        toml = read_toml(file)
    except ValueError as error:  # of the TOML, or of its encoding
        raise BuildError(f"--project: expected TOML in {file}, got {error}") from error
    try:
        return _project_of(root, toml)
    except KeyError as error:
        raise BuildError(f"--project: expected the key {error.args[0]} in {file}, got none") from error


def _project_of(root: Path, toml: dict[str, Any]) -> Project:
    general, torch = toml["general"], toml["torch"]
    backends = tuple(general["backends"])
    stable_abi = torch["stable-abi"]
    if isinstance(stable_abi, str):
        stable_abi = dict.fromkeys(backends, stable_abi)
    kernels = tuple(
        Kernel(
            name=name,
            backend=table["backend"],
            src=tuple(table["src"]),
            include=tuple(table.get("include", ())),
            cxx_flags=tuple(table.get("cxx-flags", ())),
            cuda_flags=tuple(table.get("cuda-flags", ())),
            capabilities=tuple(table.get("cuda-capabilities", ())),
        )
        for name, table in toml["kernel"].items()
    )
    if not re.fullmatch(NAME, general["name"]):
        raise BuildError(f"build.toml: expected a name of lowercase letters, digits and -, got {general['name']!r}")
    project = Project(
        root=root,
        name=general["name"],
        version=general["version"],
        license=general["license"],
        source=general.get("source"),
        python_depends=tuple(general.get("python-depends", ())),
        backends=backends,
        stable_abi={backend: parse_version(version) for backend, version in stable_abi.items()},
        torch_src=tuple(torch.get("src", ())),
        torch_include=tuple(torch.get("include", ())),
        torch_cxx_flags=tuple(torch.get("cxx-flags", ())),
        kernels=kernels,
    )
    if not (project.package_dir / "__init__.py").is_file():
        package = project.package_dir.relative_to(root)
        raise BuildError(
            f"build.toml names {project.name}: expected its package in {package}, got no {package}/__init__.py"
        )
    for backend in backends:
        missing = [str(f.relative_to(root)) for f in project.input_files(backend) if not f.is_file()]
        if missing:
            raise BuildError(f"build.toml lists files that do not exist: {', '.join(missing)}")
    return project


def parse_version(text: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise BuildError(f"not a version: {text!r}")
    return int(match[1]), int(match[2])


@dataclasses.dataclass(frozen=True)
class Torch:
    path: Path
    version: str
    cuda: str | None  # version of CUDA that this torch was built for

    @property
    def include(self) -> list[Path]:
        return [self.path / "include", self.path / "include" / "torch" / "csrc" / "api" / "include"]

    @property
    def lib(self) -> Path:
        return self.path / "lib"

    @property
    def cxx_standard(self) -> str:
        return "c++20" if parse_version(self.version) >= (2, 12) else "c++17"  # headers of 2.12 need C++20


@dataclasses.dataclass(frozen=True)
class Cuda:
    path: Path
    version: tuple[int, int]

    @property
    def nvcc(self) -> Path:
        return self.path / "bin" / "nvcc"

    @property
    def lib(self) -> Path:
        for name in ("lib64", "lib", f"targets/{platform.machine()}-linux/lib"):
            if (self.path / name / "libcudart_static.a").is_file():
                return self.path / name
        raise BuildError(f"libcudart_static.a not found below {self.path}: install the CUDA toolkit's cudart package")


def find_torch(minimum: tuple[int, int]) -> Torch:
    wanted = ".".join(map(str, minimum))
    hint = f"install torch {wanted} or newer first, for example: pip install 'torch>={wanted}'"
    path = _torch_path()
    if path is None and (named := os.environ.get("LTX_KERNELS_TORCH")):
        raise BuildError(f"LTX_KERNELS_TORCH: expected torch's directory, .../site-packages/torch, got {named}")
    if path is None:
        raise BuildError(
            f"torch not found for {sys.executable}: {hint}. If it is installed elsewhere, set LTX_KERNELS_TORCH to its "
            "directory (.../site-packages/torch), or build with `pip install --no-build-isolation`"
        )
    info = runpy.run_path(str(path / "version.py"))
    version = str(info["__version__"])
    if parse_version(version) < minimum:
        raise BuildError(f"torch {version} at {path} is older than the stable ABI that build.toml targets: {hint}")
    return Torch(path=path, version=version, cuda=info.get("cuda"))


def _torch_path() -> Path | None:
    override = os.environ.get("LTX_KERNELS_TORCH")
    candidates = [Path(override)] if override else []
    if not override:
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            candidates.append(Path(spec.origin).parent)
        candidates += [directory / "torch" for directory in _site_directories()]
    return next((path for path in candidates if (path / "version.py").is_file()), None)


def _site_directories() -> list[Path]:
    """Where the environment that is installed into may have its packages, the likeliest first.

    pip's isolated builds run its interpreter with these directories removed from sys.path. uv's run an environment of
    their own, so that the user's is found through PATH, which it is in while it is active, or as `.venv`. Under pip
    neither counts: a torch there need not be of the environment that is installed into.
    """
    prefixes = [Path(sys.prefix)]
    if "PIP_BUILD_TRACKER" not in os.environ:  # pip sets it for the builds that it runs
        prefixes += [Path(entry).parent for entry in os.environ.get("PATH", "").split(os.pathsep) if entry]
        here = Path(os.environ.get("PWD") or ".")
        prefixes += [directory / ".venv" for directory in (here, *here.parents)]
    found: list[Path] = []
    for prefix in prefixes:
        settings = prefix / "pyvenv.cfg"
        if prefix != Path(sys.prefix) and not settings.is_file():
            continue
        bases = [str(prefix)]
        if settings.is_file() and re.search(r"(?im)^include-system-site-packages\s*=\s*true", settings.read_text()):
            bases.append(sys.base_prefix)
        found += map(Path, site.getsitepackages(bases))
    found += [Path(sysconfig.get_path("platlib")), Path(site.getusersitepackages())]
    return [linked for directory in dict.fromkeys(found) for linked in (directory, *_linked(directory))]


def _linked(directory: Path) -> list[Path]:
    """The directories that the .pth files of one add to sys.path."""
    lines = [
        line.strip()
        for file in sorted(directory.glob("*.pth"))
        for line in file.read_text(errors="replace").splitlines()
    ]
    return [directory / line for line in lines if line and not line.startswith(("#", "import ", "import\t"))]


def find_cuda() -> Cuda | None:
    """The toolkit of CUDA_HOME, else that of the nvcc in PATH, else /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        if not (Path(home) / "bin" / "nvcc").is_file():
            raise BuildError(f"CUDA_HOME is {home}, but there is no bin/nvcc in it: unset it, or point it at a toolkit")
        return _toolkit(Path(home))
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        # nvcc in PATH may be a link or a script: ask it where its toolkit is.
        listing = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True, check=False).stderr
        top = re.search(r"^#\$ TOP=(.*)$", listing, re.MULTILINE)
        if top is not None and (Path(top[1]) / "bin" / "nvcc").is_file():
            return _toolkit(Path(top[1]).resolve())
    if Path("/usr/local/cuda/bin/nvcc").is_file():
        return _toolkit(Path("/usr/local/cuda").resolve())
    return None


def _toolkit(path: Path) -> Cuda:
    text = run([str(path / "bin" / "nvcc"), "--version"])
    match = re.search(r"release (\d+)\.(\d+)", text)
    if match is None:
        raise BuildError(f"cannot read the version of {path}/bin/nvcc from: {text}")
    return Cuda(path=path, version=(int(match[1]), int(match[2])))


def supported_archs(project: Project) -> list[str]:
    """The architectures of this machine's GPUs, without those that are too old for the project's CUDA kernels.

    Raises:
        BuildError: Every GPU of this machine is too old.
    """
    native, listed = native_archs(), [c for kernel in project.kernels_for("cuda") for c in kernel.capabilities]
    if not listed:  # nothing says which are too old
        return native
    oldest = min(listed, key=parse_version)
    supported = [arch for arch in native if parse_version(arch) >= parse_version(oldest)]
    if native and not supported:
        raise BuildError(
            f"this machine's GPU has compute capability {native[-1]}: expected {oldest} or newer; "
            "pip builds for its CPU with LTX_KERNELS_BACKEND=cpu, tools/build.py with --backend cpu"
        )
    return supported


def native_archs() -> list[str]:
    """Compute capabilities of this machine's NVIDIA GPUs, such as 9.0; none where there is no GPU or no driver."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return sorted(set(re.findall(r"^\d+\.\d+$", listing, re.MULTILINE)), key=parse_version)


def install_cuda_from_pypi(version: str, directory: Path) -> Cuda:
    """Install the CUDA compiler's wheels below `directory`, once."""
    target = directory / f"cuda-{version}"
    home = target / "nvidia" / f"cu{version.split('.')[0]}"
    stamp = target / ".complete"
    wanted = "\n".join(f"{name}=={pin}" for name, pin in CUDA_WHEELS[version].items())
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"Installing the CUDA {version} compiler into {target}", flush=True)
        shutil.rmtree(target, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
        if subprocess.run([*command, *wanted.split("\n")], check=False).returncode != 0:
            raise BuildError(f"pip could not install the CUDA {version} compiler (see above)")
        stamp.write_text(wanted)
    cuda = _toolkit(home)
    # nvcc finds its own libraries in lib64 only.
    if not (home / "lib64").exists():
        (home / "lib64").symlink_to("lib")
    return cuda


def find_tool(variable: str, names: Sequence[str], hint: str) -> str:
    override = os.environ.get(variable)
    for name in [override] if override else names:
        found = shutil.which(name)
        if found is not None:
            return found
    raise BuildError(f"{override or names[0]} not found: {hint}")


def find_ninja() -> str:
    with contextlib.suppress(ImportError):
        import ninja

        return str(Path(ninja.BIN_DIR) / "ninja")
    return find_tool("NINJA", ["ninja", "ninja-build"], "run `pip install ninja`")


def python_include() -> Path:
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        raise BuildError(
            f"Python.h not found in {include}: install Python's headers (Debian: apt-get install python3-dev)"
        )
    return include


def run(command: Sequence[str], cwd: Path | None = None) -> str:
    try:
        result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise BuildError(f"{command[0]} not found: install it, or add its folder to PATH") from error
    if result.returncode != 0:
        raise BuildError(f"{shlex.join(command)} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


@dataclasses.dataclass(frozen=True)
class Options:
    """What changes the binary beyond build.toml and the sources."""

    archs: tuple[str, ...] = ()  # instead of cuda-capabilities; "7.5+PTX-only" has PTX and no machine code
    sanitize: tuple[str, ...] = ()
    static_libstdcxx: bool = False
    suffix: str = ""

    @property
    def key(self) -> str:
        """Empty for an ordinary build, else a name that tells such builds apart. The suffix renames, no more."""
        if not self.archs and not self.sanitize and not self.static_libstdcxx:
            return ""
        return hashlib.sha256(repr((self.archs, self.sanitize, self.static_libstdcxx)).encode()).hexdigest()[:8]

    @property
    def cache_key(self) -> str:
        """The same for builds that compile alike: how they are linked makes no difference."""
        return dataclasses.replace(self, static_libstdcxx=False).key

    @property
    def folder(self) -> str:
        """Where below build/ its variants lie by default."""
        if self.sanitize:
            return "sanitized"
        if self.static_libstdcxx:
            return "static-libstdcxx"
        return f"archs-{self.key}" if self.key else ""


@dataclasses.dataclass(frozen=True)
class Git:
    commit: str
    tree: str
    dirty: bool


def git_status(root: Path) -> Git | None:
    try:
        if Path(run(["git", "rev-parse", "--show-toplevel"], cwd=root).strip()).resolve() != root.resolve():
            return None  # an unpacked copy inside somebody else's repository
        commit, tree = run(["git", "rev-parse", "HEAD", "HEAD^{tree}"], cwd=root).split()
        dirty = bool(run(["git", "status", "--porcelain", "--untracked-files=no"], cwd=root).strip())
        if not dirty:  # a file that a build reads and git does not know makes the commit an untrue name for it
            inputs = ["build.toml", "kernel_src", "torch-ext"]
            dirty = bool(run(["git", "status", "--porcelain", "--", *inputs], cwd=root).strip())
    except (OSError, BuildError):
        return None
    return Git(commit=commit, tree=tree, dirty=dirty)


def unique_id(project: Project, backend: str, options: Options, git: Git | None) -> str:
    """Two libraries with one id in a process crash it, so whatever differs must differ in the id."""
    if git is not None and not git.dirty and not options.key:
        identifier = git.tree[:7]  # as kernel-builder names a clean build
    else:
        identifier = f"{project.input_digest(backend, options.key)[:10]}_dirty"
    return f"{identifier}_{options.suffix}" if options.suffix else identifier


def variant_name(project: Project, backend: str, cuda: Cuda | None) -> str:
    abi = "".join(map(str, project.stable_abi[backend]))
    compute = backend if cuda is None else f"cu{cuda.version[0]}{cuda.version[1]}"
    return f"torch-stable-abi{abi}-{compute}-{platform.machine()}-linux"


def known_to_toolkit(arch: str, cuda: tuple[int, int]) -> bool:
    """Whether nvcc has this architecture; kernel-builder leaves out those that it does not have, too."""
    return cuda >= (12, 8) or parse_version(arch) < (10, 0)


def archs_of(kernel: Kernel, asked: Sequence[str], cuda: tuple[int, int]) -> list[str]:
    """What a kernel is compiled for: its capabilities, or the architectures that were asked for in their place.

    Where a kernel has code for one of these alone, as for 9.0a where 9.0 was asked for, that is what was meant.
    """
    known = [c for c in kernel.capabilities if known_to_toolkit(c, cuda)]
    numbers = {parse_version(arch) for arch in asked}
    own = [c for c in known if c[-1] in "af" and parse_version(c) in numbers]
    return own or list(asked) or known


def gencode_flags(archs: Sequence[str]) -> list[str]:
    flags = []
    for arch in archs:
        match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX(-only)?)?", arch)
        if match is None:
            raise BuildError(f"not an architecture: {arch!r} (expected for example 8.0, 9.0+PTX or 7.5+PTX-only)")
        number = match[1] + match[2] + match[3]
        if match[5] is None:
            flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match[4] is not None:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


REGISTRATION = """\
// Generated by tools/build.py.
#pragma once

#include <Python.h>

#define TORCH_EXTENSION_NAME {ops}

// One more macro level than torch's own, so that TORCH_EXTENSION_NAME is replaced by its value first.
#define STABLE_TORCH_LIBRARY_EXPAND(NAME, MODULE) STABLE_TORCH_LIBRARY(NAME, MODULE)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(NAME, DEVICE, MODULE) STABLE_TORCH_LIBRARY_IMPL(NAME, DEVICE, MODULE)

#define LTX_JOIN_(A, B) A##B
#define LTX_JOIN(A, B) LTX_JOIN_(A, B)
#define LTX_QUOTE_(A) #A
#define LTX_QUOTE(A) LTX_QUOTE_(A)

// The module is empty: importing it loads the library, whose static objects register the ops.
#define REGISTER_EXTENSION(NAME)                                                                        \\
  PyMODINIT_FUNC LTX_JOIN(PyInit_, NAME)() {{                                                            \\
    static PyModuleDef definition = {{PyModuleDef_HEAD_INIT, LTX_QUOTE(NAME), nullptr, 0, nullptr,       \\
                                     nullptr, nullptr, nullptr, nullptr}};                               \\
    return PyModule_Create(&definition);                                                                \\
  }}
"""

OPS_MODULE = '''\
"""Generated by the build: the ops of this binary, and the name of their namespace."""

import torch
from . import {ops}

ops = torch.ops.{ops}


def add_op_namespace_prefix(op_name: str) -> str:
    """Full name of an op: `rmsnorm` -> `<namespace>::rmsnorm`."""
    return f"{ops}::{{op_name}}"
'''


def ninja_path(path: Path | str) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def ninja_quote(arguments: Sequence[str | Path]) -> str:
    return shlex.join(str(a) for a in arguments).replace("$", "$$")


def write_if_changed(path: Path, text: str) -> None:
    """Leave the file's time alone where nothing changed: ninja goes by it."""
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@dataclasses.dataclass(frozen=True)
class Edge:
    """How one source is compiled: the rule of build.ninja, the source's path in the project, the flags, the folder.

    Objects lie in obj/ of the folder: that of all builds that compile alike, or the build's own for the source that
    names the ops.
    """

    rule: str
    source: str
    flags: list[str]
    folder: Path


def own_folder(options: Options, cache: Path) -> Path:
    """What differs between builds that compile alike: registration.h with what includes it, and the library."""
    return cache / "static" if options.static_libstdcxx else cache


def edges_of(
    project: Project, backend: str, torch: Torch, cuda: Cuda | None, options: Options, cache: Path
) -> list[Edge]:
    """What has to be compiled for one variant: the binding to torch first, then the kernels."""
    major, minor = project.stable_abi[backend]
    defines = [
        f"-DTORCH_TARGET_VERSION=0x{(major << 56) | (minor << 48):016x}",
        f"-DPy_LIMITED_API={PY_LIMITED_API}",
        *(["-DCPU_KERNEL"] if cuda is None else ["-DUSE_CUDA=1", "-DCUDA_KERNEL"]),
    ]
    optimise = ["-O1", "-g", "-fno-omit-frame-pointer"] if options.sanitize else ["-O3", "-DNDEBUG"]
    system = [*torch.include, python_include()] + ([] if cuda is None else [cuda.path / "include"])
    common = [
        *optimise, *sanitizers(options), f"-std={torch.cxx_standard}", "-fPIC", "-fno-gnu-unique",
        "-Wall", "-Wno-maybe-uninitialized",  # GCC's own AVX-512 headers set it off (GCC bug 105593)
        f"-ffile-prefix-map={project.root}=.", *defines,
    ]  # fmt: skip

    def includes(names: Sequence[str]) -> list[str]:
        return [f"-I{project.root / name}" for name in names]

    binding_flags = [
        *common, *project.torch_cxx_flags, *includes(project.torch_include), *(f"-isystem{path}" for path in system)
    ]  # fmt: skip
    own = own_folder(options, cache)
    edges = []
    for source in (source for source in project.torch_src if source.endswith(CXX_SUFFIXES)):
        if "registration.h" in (project.root / source).read_text():
            edges.append(Edge("cxx", source, [*binding_flags, f"-I{own}"], own))
        else:
            edges.append(Edge("cxx", source, binding_flags, cache))
    for kernel in project.kernels_for(backend):
        for source in kernel.src:
            if source.endswith(CXX_SUFFIXES):
                edges.append(Edge("cxx", source, [*common, *kernel.cxx_flags, *includes(kernel.include)], cache))
            elif source.endswith(".cu") and cuda is not None:
                archs = archs_of(kernel, options.archs, cuda.version)
                flags = [
                    "-O3", "-DNDEBUG", f"-std={torch.cxx_standard}", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC",
                    "-Xptxas=-v", *gencode_flags(archs), *defines, *kernel.cuda_flags,
                    *includes(kernel.include),
                ]  # fmt: skip
                edges.append(Edge("nvcc", source, flags, cache))
    return edges


def sanitizers(options: Options) -> list[str]:
    return [f"-fsanitize={','.join(options.sanitize)}"] if options.sanitize else []


def link_flags(torch: Torch, cuda: Cuda | None, options: Options, cache: Path, cxx: str) -> list[str]:
    if cuda is None:
        libraries = ["-ltorch", "-ltorch_cpu"]
        search = [f"-L{torch.lib}"]
        runtime: list[str] = []
    else:
        search = [f"-L{torch.lib}", f"-L{cuda.lib}"]
        if not (torch.lib / "libtorch_cuda.so").is_file():
            search.append(f"-L{_torch_cuda_stub(cache, cxx)}")
        libraries = ["-ltorch", "-ltorch_cpu", "-ltorch_cuda"]
        # Static: the runtime then is the toolkit's that compiled the kernels, whatever torch brings along.
        runtime = ["-lcudart_static", "-lrt", "-lpthread", "-ldl"]
    static = ["-static-libstdc++"] if options.static_libstdcxx else []
    # torch's libraries must be in DT_NEEDED although nothing but functions looked up at load comes from them.
    return ["-Wl,--no-as-needed", *search, *libraries, "-Wl,--as-needed", *runtime, *static, *sanitizers(options)]


def rules(cxx: str, cuda: Cuda | None) -> list[str]:
    nvcc: list[str | Path] = [] if cuda is None else [cuda.nvcc, "-ccbin", cxx]
    return [
        "ninja_required_version = 1.5",
        "rule cxx",
        f"  command = {ninja_quote([cxx])} -MMD -MF $out.d $flags -c $in -o $out",
        "  deps = gcc",
        "  depfile = $out.d",
        "  description = c++ $source",
        "rule nvcc",
        f"  command = {ninja_quote(nvcc)} -MMD -MF $out.d $flags -c $in -o $out > $out.log 2>&1 || "
        "{ cat $out.log; rm -f $out; exit 1; }",
        "  deps = gcc",
        "  depfile = $out.d",
        "  description = nvcc $source",
        "rule link",
        f"  command = {ninja_quote([cxx])} -shared -o $out $in $flags",
        "  description = link $library",
    ]


def write_ninja(
    project: Project, backend: str, torch: Torch, cuda: Cuda | None, options: Options, cache: Path, ops: str
) -> Path:
    """Write build.ninja below `cache`; the path of the library that it builds.

    Builds that compile alike share the cache, ninja's records and the objects.
    """
    own = own_folder(options, cache)
    cxx = find_tool("CXX", ["g++", "c++"], "install a C++ compiler (Debian: apt-get install g++)")
    lines = rules(cxx, cuda)
    objects = []
    for edge in edges_of(project, backend, torch, cuda, options, cache):
        target = ninja_path(edge.folder / "obj" / (edge.source.replace("/", "__") + ".o"))
        objects.append(target)
        lines += [
            f"build {target}: {edge.rule} {ninja_path(project.root / edge.source)}",
            f"  source = {edge.source}",
            f"  flags = {ninja_quote(edge.flags)}",
        ]
    objects += [ninja_path(project.root / name) for name in project.torch_src if name.endswith(LINKER_SUFFIX)]
    library = own / "lib" / f"{ops}.abi3.so"
    lines += [
        f"build {ninja_path(library)}: link {' '.join(objects)}",
        f"  library = {library.name}",
        f"  flags = {ninja_quote(link_flags(torch, cuda, options, cache, cxx))}",
        f"default {ninja_path(library)}",
        "",
    ]
    write_if_changed(own / "registration.h", REGISTRATION.format(ops=ops))
    write_if_changed(own / "build.ninja", "\n".join(lines))
    return library


def _torch_cuda_stub(cache: Path, cxx: str) -> Path:
    """A stand-in for libtorch_cuda.so on a machine whose torch has none.

    Only its soname matters: it becomes a DT_NEEDED entry, through which the loader finds the symbols at run time. A
    shared library may leave symbols undefined, so the stub defines none and never gets out of date.
    """
    directory = cache / "stub"
    library = directory / "libtorch_cuda.so"
    if not library.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        source = directory / "stub.cpp"
        source.write_text("")
        run([cxx, "-shared", "-fPIC", "-Wl,-soname,libtorch_cuda.so", "-o", str(library), str(source)])
    return directory


def compile_variant(library: Path, cache: Path, jobs: int, verbose: bool) -> None:
    """Run ninja; its output tells what failed."""
    # The environment, not the command line: with another number of jobs nothing needs to be compiled again.
    # nvcc compiles for its architectures in parallel: there are fewer sources than CPUs, and one is the largest by far.
    environment = {
        **os.environ,
        "NVCC_APPEND_FLAGS": f"{os.environ.get('NVCC_APPEND_FLAGS', '')} --threads={jobs}",
        "NINJA_STATUS": "  [%f/%t, %e s] ",
    }
    command = [find_ninja(), "-f", str(library.parents[1] / "build.ninja"), "-j", str(jobs)]
    command += ["-v"] if verbose else []
    sys.stdout.flush()
    if subprocess.run(command, cwd=cache, env=environment, check=False).returncode != 0:
        raise BuildError("compilation failed (see above)")
    for stale in library.parent.glob("*.so"):
        if stale != library:
            stale.unlink()


def is_stale(project: Project, variant: Path) -> bool:
    """Whether build/<variant> was made from other sources than those that are there now; False if Nix made it."""
    backend = json.loads((variant / "metadata.json").read_text())["backend"]["type"]
    recorded = project.root / "build" / ".cache" / variant.name / INPUT_DIGEST
    made_here = variant.parent.resolve() == project.root / "build" and recorded.is_file()
    return made_here and recorded.read_text() != project.input_digest(backend)


def check_defined(library: Path) -> None:
    """A shared library links with symbols missing, and then fails at import, on the user's machine: fail here."""
    # A weak symbol need not be defined: newer compilers leave those of transactional memory behind.
    undefined = [
        line.split()[-1]
        for line in run(["nm", "-D", "--undefined-only", str(library)]).splitlines()
        if line.split()[-2] not in ("w", "v")
    ]
    # Those of std have no version either where the linker met them in libtorch_cpu.so first, as in torch's wheels.
    missing = [s for s in undefined if s.startswith("_Z") and "@" not in s and not STD_SYMBOL.match(s)]
    if missing:
        names = run(["c++filt", *missing]).strip().replace("\n", ", ")
        raise BuildError(
            f"not defined by any source: {names}; list the source in build.toml, or keep to torch's stable ABI"
        )


def write_ptxas_reports(project: Project, cache: Path) -> None:
    """Write what ptxas says of each kernel's registers, stack and spills to ptxas-<kernel>.txt, and show warnings."""
    for kernel in project.kernels_for("cuda"):
        logs = [cache / "obj" / (s.replace("/", "__") + ".o.log") for s in kernel.src if s.endswith(".cu")]
        text = "".join(log.read_text() for log in logs)
        write_if_changed(cache / f"ptxas-{kernel.name}.txt", text)
        for line in text.splitlines():
            if "warning" in line.lower():
                print(f"{kernel.name}: {line}")


def hash_variant(directory: Path) -> dict[str, str]:
    """Digest as `kernels` computes it: all files but the metadata (it holds the digest), its signature and bytecode."""
    files = {}
    for file in sorted(directory.rglob("*")):
        name = file.relative_to(directory).as_posix()
        if not file.is_file() or name in ("metadata.json", "metadata.json.sigstore"):
            continue
        if file.suffix == ".pyc" or "__pycache__" in file.parts:
            continue
        files[name] = base64.b64encode(hashlib.sha256(file.read_bytes()).digest()).decode()
    return files


def metadata(
    project: Project, backend: str, ops: str, archs: Sequence[str], git: Git | None, directory: Path
) -> dict[str, Any]:
    info: dict[str, Any] = {"type": backend}
    if archs:
        info["archs"] = [arch.replace("+PTX-only", "+PTX") for arch in archs]
    provenance: dict[str, Any] = {"kernel-builder": {"version": "tools/build.py"}}
    if git is not None:
        provenance["kernel"] = {"commit": git.commit, "dirty": git.dirty}
    return {
        "name": project.name,
        "id": ops,
        "version": project.version,
        "license": project.license,
        **({"source": project.source} if project.source else {}),
        "python-depends": list(project.python_depends),
        "backend": info,
        "digest": {"algorithm": "sha256", "files": hash_variant(directory)},
        "provenance": provenance,
    }


def assemble(project: Project, library: Path, ops: str, directory: Path) -> None:
    """Fill a directory with the package, the library and the generated _ops.py."""
    for file in project.python_files():
        target = directory / file.relative_to(project.package_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    shutil.copyfile(library, directory / f"{ops}.abi3.so")
    (directory / OPS_FILE).write_text(OPS_MODULE.format(ops=ops))


def replace_directory(new: Path, target: Path) -> None:
    """Put `new` in the place of `target`: a reader sees the old or the new files, never a mixture."""
    old = target.with_name(f".old-{target.name}-{os.getpid()}")
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    make_directory(directory)
    with open(directory / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Waiting for another build in {directory}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_directory(directory: Path) -> None:
    """Makes a directory that is built into, or says why it cannot be one."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"{directory}: expected a directory to build into, got {error.strerror}") from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise BuildError(f"{directory}: expected a directory to build into, got one that may not be written to")


def manylinux_violations(library: Path) -> list[str]:
    """Symbol versions that are newer than manylinux_2_28 has."""
    text = run(["objdump", "-T", str(library)])
    found = set()
    for name, number in re.findall(r"\(?(GLIBC|GLIBCXX|CXXABI)_([0-9.]+)\)?", text):
        if tuple(int(part) for part in number.split(".")) > MANYLINUX_2_28[name]:
            found.add(f"{name}_{number}")
    return sorted(found)


@dataclasses.dataclass(frozen=True)
class Result:
    variant: str
    status: str  # built, up to date, or skipped: why
    path: Path | None = None
    seconds: float = 0.0
    archs: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return 0 if self.path is None else sum(f.stat().st_size for f in self.path.rglob("*") if f.is_file())


def build_variant(
    project: Project,
    backend: str,
    torch: Torch,
    cuda: Cuda | None,
    output: Path,
    options: Options = Options(),
    jobs: int | None = None,
    verbose: bool = False,
) -> Result:
    """Build one variant into `output`/<variant>. `cuda` is the toolkit of a CUDA variant, None for CPU."""
    start = time.monotonic()
    if torch.version and parse_version(torch.version) < project.stable_abi[backend]:
        raise BuildError(
            f"torch {torch.version} is older than the stable ABI {project.stable_abi[backend]} of {backend}"
        )
    git = git_status(project.root)
    ops = f"_{project.python_name}_{backend}_{unique_id(project, backend, options, git)}"
    variant = variant_name(project, backend, cuda)
    archs = () if cuda is None else options.archs or tuple(project.capabilities(cuda.version))
    cache = project.root / "build" / ".cache" / (f"{variant}.{options.cache_key}" if options.cache_key else variant)
    with locked(cache):
        print(f"{variant}{': ' if archs else ''}{' '.join(archs)}")
        library = write_ninja(project, backend, torch, cuda, options, cache, ops)
        compile_variant(library, cache, jobs or len(os.sched_getaffinity(0)), verbose)
        if not options.sanitize:  # the sanitizers' runtime defines symbols of its own
            check_defined(library)
        if cuda is not None:
            write_ptxas_reports(project, cache)
        make_directory(output)
        target = output / variant
        new = output / f".new-{variant}-{os.getpid()}"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        assemble(project, library, ops, new)
        text = json.dumps(metadata(project, backend, ops, archs, git, new), indent=2) + "\n"
        (new / "metadata.json").write_text(text)
        old_metadata = target / "metadata.json"
        if old_metadata.is_file() and old_metadata.read_text() == text and hash_variant(target) == hash_variant(new):
            shutil.rmtree(new)
            status = "up to date"
        else:
            replace_directory(new, target)
            status = "built"
        if output.resolve() == project.root / "build":
            write_if_changed(project.root / "build" / ".cache" / variant / INPUT_DIGEST, project.input_digest(backend))
    return Result(variant, status, target, time.monotonic() - start, archs)


def build_for_pip(project: Project) -> Path:
    """Build the one variant that this machine runs; its directory.

    LTX_KERNELS_BACKEND chooses another, and LTX_KERNELS_ARCH names the architectures of a CUDA variant. Its ops have an
    id of their own, so that it can be loaded beside the same sources' build/<variant>.
    """
    torch = find_torch(min(project.stable_abi.values()))
    archs = _archs_for_pip(project, torch)
    gencode_flags(archs or ())
    print(f"Building for {torch.path}, torch {torch.version}.", flush=True)
    if archs is None:
        print("It is the CPU variant, which takes about a minute.", flush=True)
        cuda = None
    else:
        cuda = _cuda_of(torch, "set LTX_KERNELS_BACKEND=cpu for the CPU variant")
        print(f"It is the CUDA variant for {', '.join(archs) or 'all architectures'}, which takes minutes.", flush=True)
    backend = "cpu" if cuda is None else "cuda"
    options = Options(archs=archs or (), suffix="pip")
    result = build_variant(project, backend, torch, cuda, project.root / "build" / "pip", options)
    assert result.path is not None
    return result.path


def _archs_for_pip(project: Project, torch: Torch) -> tuple[str, ...] | None:
    """The architectures to compile for, none for all of build.toml; None for the CPU variant."""
    backend = os.environ.get("LTX_KERNELS_BACKEND", "")
    asked = tuple(filter(None, re.split(r"[,; ]+", os.environ.get("LTX_KERNELS_ARCH", ""))))
    if backend not in ("", *project.backends):
        raise BuildError(f"LTX_KERNELS_BACKEND: expected {' or '.join(sorted(project.backends))}, got {backend}")
    if backend == "cpu" and asked:
        raise BuildError(f"LTX_KERNELS_ARCH: expected nothing beside LTX_KERNELS_BACKEND=cpu, got {' '.join(asked)}")
    if torch.cuda is None and (asked or backend == "cuda"):
        name = "LTX_KERNELS_ARCH" if asked else "LTX_KERNELS_BACKEND=cuda"
        raise BuildError(
            f"{name}: expected a torch for CUDA, got torch {torch.version}: install one first, or unset it"
        )
    if backend == "cpu" or "cuda" not in project.backends:
        return None
    archs = asked or (tuple(supported_archs(project)) if torch.cuda is not None else ())
    return archs if archs or backend == "cuda" else None


def install_generated(project: Project, files: Sequence[Path]) -> None:
    """Copy generated files beside the package's sources, in the place of those of an earlier build."""
    for stale in project.package_dir.glob("*.abi3.so"):
        stale.unlink()
    for file in files:
        shutil.copyfile(file, project.package_dir / file.name)


def print_table(results: Sequence[Result]) -> None:
    rows = [("variant", "status", "seconds", "MiB", "archs")]
    for r in results:
        done = r.path is not None
        rows.append((
            r.variant, r.status, f"{r.seconds:.1f}" if done else "", f"{r.size / 2**20:.1f}" if done else "",
            " ".join(r.archs),
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    libraries = [library for r in results if r.path is not None for library in r.path.glob("*.so")]
    if any(manylinux_violations(library) for library in libraries):
        print(
            "\nThese builds are for this machine. Builds for other machines come from Nix: nix run .#build-and-copy -L"
        )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--backend", action="append", choices=("cpu", "cuda"), help="build this backend (repeatable; default: all)"
    )
    parser.add_argument(
        "--arch", action="append", default=[], metavar="ARCH",
        help="CUDA architectures instead of build.toml's: 8.0, 9.0+PTX, 7.5+PTX-only for PTX without machine code, "
        "or native for those of this machine's GPUs (repeatable)",
    )  # fmt: skip
    parser.add_argument(
        "--this-machine", action="store_true",
        help="build what this machine runs, and no more: the CUDA variant for its GPUs, else the CPU variant",
    )  # fmt: skip
    parser.add_argument(
        "--project",
        type=Path,
        default=ROOT,
        metavar="DIR",
        help="directory of another build.toml (default: this one's)",
    )
    parser.add_argument("--output", type=Path, help="directory of the variants (default: build, in the project)")
    parser.add_argument("--jobs", type=int, help="compilations at a time (default: one per CPU)")
    parser.add_argument("--sanitize", default="", metavar="LIST", help="CPU only, for example address,undefined")
    parser.add_argument(
        "--static-libstdcxx", action="store_true", help="link libstdc++ statically, as toolchains for old systems do"
    )
    parser.add_argument("--suffix", default="", help="append this to the id of the ops")
    parser.add_argument(
        "--cuda-from-pypi", nargs="?", const="13.0", choices=sorted(CUDA_WHEELS), metavar="VERSION",
        help=f"install the CUDA compiler from PyPI into {CUDA_TOOLCHAIN_DIR}/ and use it: {', '.join(CUDA_WHEELS)} "
        "(default: 13.0)",
    )  # fmt: skip
    parser.add_argument("--verbose", action="store_true", help="show every command")
    return parser.parse_args(arguments)


def _cuda_of(torch: Torch, otherwise: str) -> Cuda:
    """The toolkit that torch's CUDA version asks for.

    otherwise: What else the user can do where it is missing.
    """
    cuda = find_cuda()
    if cuda is None or torch.cuda is None or cuda.version[0] != parse_version(torch.cuda)[0]:
        found = "no nvcc (CUDA_HOME, PATH, /usr/local/cuda)" if cuda is None else f"an nvcc of CUDA {cuda.version[0]}"
        raise BuildError(
            f"this machine has a torch for CUDA {torch.cuda} and {found}: install that CUDA toolkit, or {otherwise}"
        )
    return cuda


def choose_for_this_machine(project: Project, args: argparse.Namespace) -> None:
    """Set backend, architectures and output to what this machine's torch and GPUs can run."""
    if args.backend or args.arch or args.sanitize or args.static_libstdcxx:
        raise BuildError(
            "--this-machine chooses backend and architectures of an ordinary build: drop --backend, --arch, --sanitize "
            "and --static-libstdcxx"
        )
    torch = find_torch(min(project.stable_abi.values()))
    archs = supported_archs(project) if torch.cuda is not None else []
    if archs and not args.cuda_from_pypi:
        _cuda_of(torch, "a compiler by --cuda-from-pypi")
    args.backend, args.arch = (["cuda"], archs) if archs else (["cpu"], [])
    args.output = args.output or project.root / "build"
    print(
        f"Building for this machine's GPU (compute capability {', '.join(archs)})."
        if archs
        else "Building for the CPU: no NVIDIA GPU that this torch can use was found.",
        "`make build` builds every variant that this machine can compile.",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    try:
        project = load_project(args.project.resolve())
        if args.this_machine:
            choose_for_this_machine(project, args)
        archs = [arch for arch in re.split(r"[,; ]+", " ".join(args.arch)) if arch]
        if "native" in archs:
            native = native_archs()
            if not native:
                raise BuildError("--arch native: no NVIDIA GPU found (nvidia-smi lists none): name the architectures")
            archs = list(dict.fromkeys(a for arch in archs for a in (native if arch == "native" else [arch])))
        options = Options(
            archs=tuple(archs),
            sanitize=tuple(s for s in args.sanitize.split(",") if s),
            static_libstdcxx=args.static_libstdcxx,
            suffix=args.suffix,
        )
        gencode_flags(options.archs)
        if args.jobs is not None and args.jobs < 1:
            raise BuildError(f"--jobs: expected at least 1, got {args.jobs}")
        if args.suffix and not re.fullmatch(r"[A-Za-z0-9_]+", args.suffix):
            raise BuildError(f"--suffix {args.suffix!r}: expected letters, digits and _")
        backends = args.backend or (["cpu"] if options.sanitize else ["cuda"] if options.archs else project.backends)
        unknown = [backend for backend in backends if backend not in project.backends]
        if unknown:
            known = ", ".join(project.backends)
            hint = "; --arch 9.0 compiles for CUDA without a GPU" if "cuda" in known else ""
            raise BuildError(
                f"{project.root / 'build.toml'}: expected the backend {unknown[0]}, got {known} alone{hint}"
            )
        if options.sanitize and list(backends) != ["cpu"]:
            raise BuildError("--sanitize builds the CPU variant alone: drop --backend cuda")
        if options.archs and "cuda" not in backends:
            raise BuildError("--arch is for the CUDA variant: drop it, or --backend cpu")
        output = args.output or project.root / "build" / options.folder
        torch = find_torch(min(project.stable_abi[b] for b in backends))
        results = []
        for backend in sorted(set(backends)):
            cuda = None
            if backend == "cuda":
                if args.cuda_from_pypi:
                    cuda = install_cuda_from_pypi(args.cuda_from_pypi, ROOT / CUDA_TOOLCHAIN_DIR)
                else:
                    cuda = find_cuda()
                if cuda is None:
                    reason = "nvcc not found (CUDA_HOME, PATH, /usr/local/cuda); --cuda-from-pypi installs a compiler"
                    if args.backend:
                        raise BuildError(reason)
                    results.append(Result("cuda", f"skipped: {reason}"))
                    continue
            own = options if backend == "cuda" else dataclasses.replace(options, archs=())
            results.append(build_variant(project, backend, torch, cuda, output, own, args.jobs, args.verbose))
        print_table(results)
        if output != project.root / "build":
            print(f"\nIt is in {output}, where LOCAL_KERNELS and get_local_kernel have to look.")
        if options.sanitize:
            # libstdc++ too: the runtime looks for the exceptions' functions when Python starts, which has none.
            cxx = find_tool("CXX", ["g++", "c++"], "install g++")
            preload = ":".join(run([cxx, f"-print-file-name=lib{name}.so"]).strip() for name in ("asan", "stdc++"))
            print(f"\nRun Python with LD_PRELOAD={preload} ASAN_OPTIONS=detect_leaks=0 to load this build.")
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
