"""The variants in build/: layout, metadata, digest, symbols, device code."""

from __future__ import annotations

import json
import platform
import re
import shutil
from pathlib import Path

import pytest
from helpers.build_checks import (
    ARCHS,
    PACKAGE,
    ROOT,
    THIS_MACHINE,
    assert_exports_its_entry_alone,
    builder,
    built_variant,
    built_variants,
    cuda_version,
    dynamic_symbols,
    expected_images,
    fatbin_archs,
    library_of,
    run_python,
    skip_if_old,
    tool,
)

rust = pytest.importorskip("kernels._rust", reason="the metadata parser is a private module of kernels")


# Every variant there is; a backend of which there is none is left to built_variant, which fails or says why.
FOUND = {v.name: v for backend in ("cpu", "cuda") for v in built_variants(backend)}
MISSING = [backend for backend in ("cpu", "cuda") if not built_variants(backend)]


@pytest.fixture(params=[*FOUND, *MISSING])
def variant(request: pytest.FixtureRequest) -> Path:
    if request.param not in FOUND:
        return built_variant(request.param)
    variant = FOUND[request.param]
    if THIS_MACHINE and not variant.samefile(Path(request.getfixturevalue("ltx").__file__).parent):
        skip_if_old(variant)
    return variant


def local_cache(variant: Path) -> Path:
    """What tools/build.py left of the build of a variant; Nix leaves nothing."""
    caches = (ROOT / "build" / ".cache").glob(f"{variant.name}*")
    found = [cache for cache in caches if (cache / "lib" / library_of(variant).name).is_file()]
    if variant.parent != ROOT / "build" or not found:
        pytest.skip(f"NOT RUN: {variant} was not built here")
    return found[0]


def validate(variant: Path) -> None:
    metadata = rust.Metadata.read_from_file(variant / "metadata.json")
    metadata.digest.validate(rust.Digest.hash_variant(metadata.digest.algorithm, variant))


def test_layout(variant: Path):
    metadata = json.loads((variant / "metadata.json").read_text())
    ops = metadata["id"]
    sources = {f.relative_to(PACKAGE).as_posix() for f in builder.load_project().python_files()}
    found = {f.relative_to(variant).as_posix() for f in variant.rglob("*") if f.is_file() and f.suffix != ".pyc"}
    assert found == sources | {"_ops.py", f"{ops}.abi3.so", "metadata.json"}
    backend = metadata["backend"]["type"]
    assert re.fullmatch(rf"_ltx_kernels_{backend}_([0-9a-f]{{7}}|[0-9a-f]+_dirty)", ops)
    assert f"from . import {ops}\n" in (variant / "_ops.py").read_text()


def test_not_older_than_the_sources(variant: Path):
    """A build of other sources passes tests that those sources would not."""
    assert not builder.is_stale(builder.load_project(), variant), (
        f"{variant}: made from other sources: run `make build`"
    )


def test_name_is_accepted_by_kernels(variant: Path):
    variants = pytest.importorskip("kernels.variants")
    parsed = variants.parse_variant(variant.name)
    assert parsed.variant_str == variant.name
    assert str(parsed.framework.version) == "2.11"


def test_metadata(variant: Path):
    metadata = rust.Metadata.read_from_file(variant / "metadata.json")
    project = builder.load_project()
    assert (str(metadata.name), metadata.version, metadata.license) == ("ltx-kernels", 1, "Apache-2.0")
    assert metadata.python_depends == list(project.python_depends)
    assert metadata.provenance is not None
    assert metadata.digest is not None
    git = builder.git_status(ROOT)
    every = None if "-cpu-" in variant.name else project.capabilities(cuda_version(variant))
    if git is not None:
        assert metadata.provenance.kernel is not None and len(metadata.provenance.kernel.commit) == 40
        # A commit names the build for all architectures alone.
        named = not metadata.provenance.kernel.dirty and metadata.backend.archs == every
        assert metadata.id.endswith("_dirty") == (not named)
    if "-cpu-" in variant.name:
        assert metadata.backend.archs is None
    else:
        expected = [ARCHS or every]
        if THIS_MACHINE:
            expected.append(builder.native_archs())
        assert metadata.backend.archs in expected


def test_digest(variant: Path):
    validate(variant)
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["digest"] == {"algorithm": "sha256", "files": builder.hash_variant(variant)}


def test_digest_finds_tampering(variant: Path, tmp_path: Path):
    copy = tmp_path / variant.name
    shutil.copytree(variant, copy, ignore=shutil.ignore_patterns("__pycache__"))
    validate(copy)
    library = library_of(copy)
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    library.write_bytes(data)
    with pytest.raises(rust.DigestValidationError, match=library.name):
        validate(copy)
    shutil.copyfile(library_of(variant), library)
    (copy / "extra.py").write_text("")
    with pytest.raises(rust.DigestValidationError, match=r"extra\.py"):
        validate(copy)


def test_bytecode_is_not_part_of_the_digest(variant: Path, tmp_path: Path):
    copy = tmp_path / variant.name
    shutil.copytree(variant, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "__pycache__").mkdir()
    (copy / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"x")
    validate(copy)


def test_only_the_stable_abi_is_used(variant: Path):
    """No symbol of c10, at or torch but torch::stable's; what else comes from torch are the C shims."""
    for kind, symbol in dynamic_symbols(library_of(variant), "--undefined-only"):
        name, _, version = symbol.partition("@")
        if version or kind in "wv" or builder.STD_SYMBOL.match(name):  # libc, libstdc++, libgcc; hooks of the linker
            continue
        assert re.match(r"(aoti_torch_|torch_|Py)", name), f"{name} is no symbol of the stable ABI"
    undefined = [name for _, name in dynamic_symbols(library_of(variant), "--undefined-only")]
    assert "torch_library_impl" in undefined, "the ops are not registered through the stable ABI"


def test_python_abi(variant: Path):
    python = [n for _, n in dynamic_symbols(library_of(variant), "--undefined-only") if n.startswith(("Py", "_Py"))]
    assert python == ["PyModule_Create2"]  # in the limited API since 3.2


def test_exports(variant: Path):
    assert_exports_its_entry_alone(library_of(variant))


def test_no_iostreams_and_no_locales(variant: Path):
    """Where a toolchain links a part of libstdc++ statically, a process has two sets of their objects."""
    lines = tool("nm", "-DC", library_of(variant)).splitlines()
    assert [line for line in lines if re.search(r"std::.*(stream|locale|ios_base|basic_ios|_put|_get)", line)] == []


def test_needed_libraries(variant: Path):
    needed = re.findall(r"NEEDED\s+(\S+)", tool("objdump", "-p", library_of(variant)))
    torch = ["libtorch.so", "libtorch_cpu.so"] + ([] if "-cpu-" in variant.name else ["libtorch_cuda.so"])
    assert needed[: len(torch)] == torch
    system = {
        "libstdc++.so.6",
        "libm.so.6",
        "libgcc_s.so.1",
        "libc.so.6",
        "libpthread.so.0",
        "libdl.so.2",
        "librt.so.1",
    }
    rest = {name for name in needed[len(torch) :] if not name.startswith("ld-linux")}
    assert rest <= system
    assert not re.findall(r"R(UN)?PATH", tool("objdump", "-p", library_of(variant)))


def test_symbol_versions(variant: Path):
    """Nothing newer than manylinux_2_28 has, where Nix built it; of a local build what is newer is told."""
    violations = builder.manylinux_violations(library_of(variant))
    provenance = json.loads((variant / "metadata.json").read_text())["provenance"]["kernel-builder"]
    if provenance.get("version") == "tools/build.py" and violations:
        pytest.skip(f"local build, not to be published: {', '.join(violations)} are newer than manylinux_2_28")
    assert not violations


def test_size(variant: Path):
    assert library_of(variant).stat().st_size <= 26 * 2**20


def test_target_version(variant: Path):
    text = (local_cache(variant) / "build.ninja").read_text()
    assert "-DTORCH_TARGET_VERSION=0x020b000000000000" in text
    assert "-DPy_LIMITED_API=0x03090000" in text
    assert ("-DCPU_KERNEL" in text) == ("-cpu-" in variant.name)


def test_device_code_of_each_architecture():
    """Those that the variant was built for, which are all unless ARCHS names fewer."""
    variant = built_variant("cuda")
    images = fatbin_archs(library_of(variant))
    project = builder.load_project()
    expected = [
        expected_images(builder.archs_of(kernel, ARCHS, cuda_version(variant)))
        for kernel in project.kernels_for("cuda")
        for source in kernel.src
        if source.endswith(".cu")
    ]
    held = [image for image in images if image]
    assert sorted(map(sorted, held)) == sorted(map(sorted, expected)), (
        "in the library, and what its sources should give"
    )


def resource_lines(report: str) -> list[str]:
    return re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)


def test_no_spills_and_no_local_memory():
    """`ptxas -v` of every kernel on every architecture of the variant."""
    variant = built_variant("cuda")
    project = builder.load_project()
    for kernel in project.kernels_for("cuda"):
        report = (local_cache(variant) / f"ptxas-{kernel.name}.txt").read_text()
        for arch in builder.archs_of(kernel, ARCHS, cuda_version(variant)):
            number = arch.removesuffix("+PTX").replace(".", "")
            assert f"for 'sm_{number}'" in report, f"{kernel.name} was not compiled for {arch}"
        lines = resource_lines(report)
        assert len(lines) >= report.count("Compiling entry function") > 0
        function = ""
        for line in report.splitlines():
            if "Function properties for" in line or "Compiling entry function" in line:
                function = line
            elif (found := resource_lines(line)) and found[0] != ("0", "0", "0"):
                pytest.fail(f"{function}\n{line}")


@pytest.mark.parametrize("name", [kernel.name for kernel in builder.load_project().kernels_for("cuda")])
def test_front_end_for_other_architectures(name: str, tmp_path: Path):
    """nvcc's front end takes each source for the architectures that the variant has no machine code of.

    It reads what the preprocessor leaves for an architecture and instantiates the templates; inline assembly is left to
    the build for all architectures.
    """
    variant = built_variant("cuda")
    project = builder.load_project()
    (kernel,) = (kernel for kernel in project.kernels_for("cuda") if kernel.name == name)
    every, compiled = (builder.archs_of(kernel, asked, cuda_version(variant)) for asked in ([], ARCHS))
    others = tuple(arch for arch in every if arch not in compiled)
    if not others:
        pytest.skip(f"the variant has the machine code of {' '.join(every)}")
    cuda = builder.find_cuda() or builder.install_cuda_from_pypi("13.0", ROOT / builder.CUDA_TOOLCHAIN_DIR)
    torch = builder.find_torch(project.stable_abi["cuda"])
    edges = builder.edges_of(project, "cuda", torch, cuda, builder.Options(archs=others), local_cache(variant))
    for edge in edges:
        if edge.source in kernel.src:
            output = ["-fatbin", "-o", tmp_path / "none.fatbin"]
            tool(cuda.nvcc, "--fdevice-syntax-only", *output, *edge.flags, project.root / edge.source)


def test_cpu_variant_loads_and_runs():
    variants = [v for v in built_variants("cpu") if v.name.endswith(f"-{platform.machine()}-linux")]
    variant = variants[0] if variants else built_variant("cpu")
    names = run_python(
        "import pathlib, torch\n"
        "from kernels import get_local_kernel\n"
        f"kernel = get_local_kernel(pathlib.Path({str(variant)!r}), backend='cpu')\n"
        "missing = [name for name in kernel.__all__ if not hasattr(kernel, name)]\n"
        "assert not missing, missing\n"
        "x = torch.randn(3, 64)\n"
        "torch.testing.assert_close(kernel.rmsnorm(x), torch.nn.functional.rms_norm(x, (64,), eps=1e-6))\n"
        "print(*kernel.__all__)\n"
    )
    assert "rmsnorm" in names.split()
