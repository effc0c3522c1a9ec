"""tools/release.py: what may change of the API after a release, tags and the changelog, a whole set of variants."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.build_checks import PACKAGE, ROOT, builder, built_variant, release


def test_api_against_the_last_release():
    """Nothing is frozen before the first release tag; after that a name, a parameter or a default stays what it was."""
    if builder.git_status(ROOT) is None:
        pytest.skip("NOT RUN: not a git checkout, so there are no release tags to compare with")
    print(release.check_api(ROOT))


def test_signatures_are_those_of_the_package(ltx):
    """What is read from the sources is what a user gets: names, parameters, kinds and defaults."""
    import inspect

    signatures = release.public_signatures(PACKAGE)
    assert sorted(signatures) == sorted(ltx.__all__)
    for name, text in signatures.items():
        value = getattr(ltx, name)
        if "(" not in text:
            assert not inspect.isfunction(value), name
            continue
        parameters, order = release._parameters(text)
        real = inspect.signature(value).parameters
        assert list(parameters) == list(real)
        assert order == [p.name for p in real.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        for parameter in real.values():
            default = parameters[parameter.name][1]
            assert (default is None) == (parameter.default is parameter.empty)
            if default is not None and "torch" not in default:
                assert eval(default) == parameter.default, (name, parameter.name)


def test_docs_have_the_current_variant_table():
    """`python tools/release.py table --write` writes it."""
    start, end = release.TABLE_MARKS
    text = (ROOT / "docs" / "hub.md").read_text()
    assert text.partition(start)[2].partition(end)[0].strip() == release.variant_table(builder.load_project())


SOURCE = """\
from .ops import norm as norm
from .ops import old as old

__all__ = ["norm", "old"]
"""
OPS = "def norm(x, weight=None, eps=1e-6, *, out=None): ...\n\ndef old(x): ...\n"


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A repository whose HEAD is the release v1.0."""
    package = tmp_path / "torch-ext" / "my_kernel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(SOURCE)
    (package / "ops.py").write_text(OPS)
    (tmp_path / "build.toml").write_text('[general]\nname = "my-kernel"\nversion = 1\n')
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"], ["tag", "v1.0"]):
        release.git(tmp_path, "-c", "user.name=test", "-c", "user.email=test@example.org", *command)
    return tmp_path


def change(root: Path, name: str, old: str, new: str) -> None:
    file = root / "torch-ext" / "my_kernel" / name
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def test_nothing_is_frozen_before_the_first_tag(released: Path):
    release.git(released, "tag", "-d", "v1.0")
    change(released, "ops.py", "eps=1e-6", "eps=1e-3")
    assert "nothing of the API is frozen" in release.check_api(released)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("ops.py", "weight=None, eps=1e-6, *, out=None", "weight=None, eps=1e-6, *, bias=None, out=None"),
        ("ops.py", "eps=1e-6, *", "eps=1e-6, bias=None, *"),
        ("ops.py", "def norm(x,", "def norm(x: int,"),
        ("__init__.py", '"old"]', '"old", "new"]'),
        ("ops.py", "def old(x):", "def old(x, y=1):"),
    ],
)
def test_additions_are_compatible(released: Path, name: str, old: str, new: str):
    change(released, name, old, new)
    if '"new"' in new:
        change(released, name, "import old as old", "import old as old, new as new")
        (released / "torch-ext/my_kernel/ops.py").write_text(OPS + "def new(): ...\n")
        assert release.check_api(released) == "API compatible with v1.0; new: new"
    else:
        assert release.check_api(released) == "API compatible with v1.0"


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("__init__.py", ', "old"]', "]", "old: gone"),
        ("ops.py", "eps=1e-6", "eps=1e-5", "norm: default of eps changed"),
        ("ops.py", ", *, out=None", "", "norm: argument out gone"),
        ("ops.py", "weight=None, eps=1e-6", "eps=1e-6, weight=None", "norm: arguments by position changed"),
        ("ops.py", "*, out=None", "*, mode, out=None", "norm: new argument mode has no default"),
        ("ops.py", "weight=None", "weight", "norm: default of weight, eps changed"),
        ("ops.py", "def old(x): ...", "class old: ...", "old: no longer the same kind of thing"),
        ("ops.py", "def norm(x,", "def norm(x, /,", "norm: argument x has no name any more"),
    ],
)
def test_a_change_needs_a_new_version(released: Path, name: str, old: str, new: str, message: str):
    change(released, name, old, new)
    if new == "weight":
        change(released, name, "eps=1e-6", "eps")
    with pytest.raises(release.ReleaseError, match=r"`version` in build\.toml is still 1") as error:
        release.check_api(released)
    assert message in str(error.value)
    toml = released / "build.toml"
    toml.write_text(toml.read_text().replace("version = 1", "version = 2"))
    assert "compatible" in release.check_api(released) or "v1.0" in release.check_api(released)


def test_the_last_release_is_the_highest_number(released: Path):
    """v1.10 comes after v1.9; a tag that HEAD does not descend from is no release of it."""
    for tag in ("v1.9", "v1.10", "v1.2", "not-a-release"):
        release.git(released, "tag", tag)
    assert release.last_release(released) == "v1.10"
    assert release.last_release(released, before="v1.10") == "v1.9"
    change(released, "ops.py", "eps=1e-6", "eps=1e-5")
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    release.git(released, *identity, "commit", "-qam", "elsewhere")
    release.git(released, "tag", "v2.0")
    release.git(released, "checkout", "-q", "v1.10")
    assert release.last_release(released) == "v1.10"


def test_tag(tmp_path: Path):
    (tmp_path / "build.toml").write_text("[general]\nversion = 1\n")
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text("# Changelog\n\n## Version 1\n\nFirst.\n")
    assert release.check_tag(tmp_path, "v1.0") == "v1.0: version, changelog and the package's home agree"
    (tmp_path / "pyproject.toml").write_text('Source = "https://github.com/org/ltx-kernels"')
    with pytest.raises(release.ReleaseError, match=r"pyproject\.toml still has the placeholder org/ltx-kernels"):
        release.check_tag(tmp_path, "v1.0")
    (tmp_path / "pyproject.toml").unlink()
    for tag, message in {
        "1.0": "a release tag is v",
        "v2.0": "`version` in build.toml is 1",
        "v1.1": "no text",
    }.items():
        with pytest.raises(release.ReleaseError, match=message):
            release.check_tag(tmp_path, tag)
    changelog.write_text("# Changelog\n\n## Version 1.1\n\n## Version 1\n\nFirst.\n")
    with pytest.raises(release.ReleaseError, match=r"no text under a heading `## Version 1\.1`"):
        release.check_tag(tmp_path, "v1.1")
    changelog.write_text("# Changelog\n\n## Version 1.1\n\nFaster.\n\n## Version 1\n\nFirst.\n")
    release.check_tag(tmp_path, "v1.1")


COMMIT = "1" * 40


def write_metadata(variant: Path, **changes: Any) -> None:
    """What a build writes of the files that are there, but for `changes`."""
    project = builder.load_project()
    backend, cuda = release._backend(variant.name)
    (library,) = variant.glob("*.abi3.so")
    archs = project.capabilities(cuda) if cuda else ()
    git = builder.Git(commit=COMMIT, tree="2" * 40, dirty=False)
    metadata = builder.metadata(project, backend, library.name.removesuffix(".abi3.so"), archs, git, variant)
    (variant / "metadata.json").write_text(json.dumps(metadata | changes))


@pytest.fixture
def gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight variants as Nix would leave them, from a clean commit, with libraries that are none."""
    project = builder.load_project()
    monkeypatch.setattr(builder, "manylinux_violations", lambda library: [])
    monkeypatch.setattr(builder, "git_status", lambda root: builder.Git(COMMIT, "2" * 40, dirty=False))
    for name in release.variants(project):
        variant = tmp_path / "dist" / "build" / name
        variant.mkdir(parents=True)
        library = tmp_path / "library"
        library.write_text(name)
        builder.assemble(project, library, f"_ltx_kernels_{release._backend(name)[0]}_2222222", variant)
        write_metadata(variant)
    return tmp_path / "dist" / "build"


def check(gathered: Path) -> str:
    return release.check_complete(builder.load_project(), gathered)


def refused(gathered: Path) -> str:
    with pytest.raises(release.ReleaseError) as error:
        check(gathered)
    return str(error.value)


CUDA_VARIANT, CPU_VARIANT = (f"torch-stable-abi211-{compute}-aarch64-linux" for compute in ("cu126", "cpu"))


def test_a_complete_set(gathered: Path, commands: Path, monkeypatch: pytest.MonkeyPatch):
    """Before and after it is signed and has its card and benchmarks."""
    assert check(gathered) == "8 variants of 111111111111"
    pytest.importorskip("jinja2")
    monkeypatch.setattr(release, "hub_repository", lambda _: "someone/ltx-kernels")
    release.stage_card(builder.load_project(), gathered)
    for name in release.variants(builder.load_project()):
        (gathered / name / "metadata.json.sigstore").write_text("{}")
    assert check(gathered) == "8 variants of 111111111111"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "other"}, "name: expected ltx-kernels, got other"),
        ({"version": 2}, "version: expected 1, got 2"),
        ({"license": "MIT"}, "license: expected Apache-2.0, got MIT"),
        ({"source": "https://example.org"}, "source: expected"),
        ({"python-depends": ["einops"]}, "python-depends: expected [], got ['einops']"),
        ({"backend": {"type": "cpu"}}, "backend: expected {'type': 'cuda', 'archs': "),
        ({"backend": {"type": "cuda", "archs": ["8.0"]}}, "got {'type': 'cuda', 'archs': ['8.0']}"),
        ({"id": "_ltx_kernels_cpu_2222222"}, "id: expected _ltx_kernels_cuda_<commit>, got _ltx_kernels_cpu_2222222"),
        ({"id": "_ltx_kernels_cuda_2222222_dirty"}, "id: expected _ltx_kernels_cuda_<commit>, got"),
        ({"id": "_ltx_kernels_cuda_3333333"}, "not expected: _ltx_kernels_cuda_2222222.abi3.so"),
        ({"provenance": {"kernel": {"commit": COMMIT, "dirty": True}}}, "dirty tree"),
        ({"provenance": {}}, "dirty tree"),
        ({"provenance": {"kernel": {"commit": "3" * 40, "dirty": False}}}, f"commit: expected {COMMIT}, got 3333"),
        ({"digest": {"algorithm": "md5", "files": {}}}, "digest algorithm: expected sha256, got md5"),
        ({"digest": {"algorithm": "sha256", "files": {}}}, "not those that its metadata was written for"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_metadata_of_something_else(gathered: Path, changes: dict[str, Any], message: str):
    write_metadata(gathered / CUDA_VARIANT, **changes)
    assert message in (refusal := refused(gathered)) and refusal.startswith(f"{CUDA_VARIANT}: ")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("extra.py", "not expected: extra.py"),
        ("norm.pyc", "not expected: norm.pyc"),
        ("__pycache__/norm.cpython-312.pyc", "not expected: __pycache__"),
        ("norm/__init__.pyc", "not expected: norm"),
        ("integrations/extra.so", "not expected: integrations/extra.so"),
        ("../extra/metadata.json", "build: not expected: extra"),
        ("../.hidden", "build: not expected: .hidden"),
        ("../../benchmarks/benchmark_extra.py", "benchmarks: not expected: benchmark_extra.py"),
        ("../../benchmarks/benchmark.py", "benchmarks: not the files of this commit: benchmark.py"),
        ("../../setup.py", "dist: not expected: setup.py"),
    ],
)
def test_nothing_else_is_published(gathered: Path, file: str, message: str):
    """Digests that name such a file, or could not, do not help: only what this project consists of is accepted."""
    path = gathered / CPU_VARIANT / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("print('poison')")
    for _ in range(2):
        assert message in refused(gathered)
        write_metadata(gathered / CPU_VARIANT)


@pytest.mark.parametrize("place", ["norm", "extra.py", "..", "../.."])
def test_no_links(gathered: Path, tmp_path: Path, place: str):
    """Python would run what a linked directory `norm` holds in the place of norm.py; the digest does not see it."""
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "__init__.py").write_text("print('poison')")
    place = place if "." not in place or place == "extra.py" else f"{place}/link"
    (gathered / CPU_VARIANT / place).symlink_to(target)
    assert "expected no links, got " in refused(gathered)


def test_changed_files(gathered: Path):
    source = gathered / CUDA_VARIANT / "rope.py"
    text = source.read_text()
    source.write_text(text + "\n")
    assert refused(gathered) == f"{CUDA_VARIANT}: its files are not those that its metadata was written for"
    write_metadata(gathered / CUDA_VARIANT)
    assert refused(gathered) == f"{CUDA_VARIANT}: not the sources of this commit: rope.py"
    source.unlink()
    write_metadata(gathered / CUDA_VARIANT)
    assert refused(gathered) == f"{CUDA_VARIANT}: missing: rope.py"
    shutil.rmtree(gathered / CUDA_VARIANT)
    assert refused(gathered).endswith(f"missing variants: {CUDA_VARIANT}")


def test_complete_needs_a_commit_and_a_directory_build(gathered: Path, monkeypatch: pytest.MonkeyPatch):
    gathered.rename(gathered.with_name("variants"))
    assert "expected a directory of the name build" in refused(gathered.with_name("variants"))
    assert "is for local builds" in refused(ROOT / "build")
    assert "expected a directory of variants, got none" in refused(gathered)
    monkeypatch.setattr(builder, "git_status", lambda root: None)
    assert "expected a git checkout" in refused(gathered)


def test_what_names_the_home_is_there():
    """A release is refused while one of these names the placeholder; what has another name would not be asked."""
    for name in release.NAMES_ITS_HOME:
        assert release.PLACEHOLDER in (ROOT / name).read_text(), name


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for nix and cosign; what they were asked is in the file that this is."""
    log, binaries = tmp_path / "log", tmp_path / "bin"
    binaries.mkdir()
    script = f'#!/bin/sh\necho "$0 $@" >> {log}\n'
    script += "".join(f'case "$*" in *{s}*) cat {tmp_path}/{s}; esac\n' for s in release.SYSTEMS)
    for name in ("nix", "cosign"):
        (binaries / name).write_text(script)
        (binaries / name).chmod(0o755)
    for system in release.SYSTEMS:
        (tmp_path / system).write_text(json.dumps(release.variants(builder.load_project(), [system])[::-1]))
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")
    return log


def test_nix_matrix(commands: Path, tmp_path: Path):
    project = builder.load_project()
    jobs = json.loads(release.nix_matrix(project))["include"]
    assert sorted(job["variant"] for job in jobs) == sorted(release.variants(project))
    assert {job["runner"] for job in jobs if "aarch64" in job["variant"]} == {"ubuntu-24.04-arm"}
    assert "nix eval --json .#packages.aarch64-linux.variants" in commands.read_text()
    (tmp_path / "x86_64-linux").write_text('["torch-stable-abi212-cpu-x86_64-linux"]')
    with pytest.raises(release.ReleaseError, match=r"Nix builds .*abi212.* this project expects"):
        release.nix_matrix(project)


def test_sign(commands: Path, gathered: Path):
    release.sign(gathered)
    for name in release.variants(builder.load_project()):
        metadata = gathered / name / "metadata.json"
        assert f"cosign sign-blob {metadata} --bundle {metadata}.sigstore --yes\n" in commands.read_text()


def test_a_folder_without_variants_is_not_signed(commands: Path, tmp_path: Path):
    with pytest.raises(release.ReleaseError, match="expected variants to sign"):
        release.sign(tmp_path)


def test_collect(tmp_path: Path):
    """What Nix made is read-only, and lies in `result` itself or one directory below."""
    variant = built_variant("cpu")
    shutil.copytree(variant, tmp_path / "result" / variant.name)
    target = release.collect(tmp_path / "result", variant.name, tmp_path / "dist" / "build")
    assert target == tmp_path / "dist" / "build" / variant.name
    assert builder.hash_variant(target) == builder.hash_variant(variant)
    assert builder.hash_variant(release.collect(target, "again", tmp_path)) == builder.hash_variant(variant)
    (tmp_path / "again" / "of_an_earlier_variant.py").touch()
    assert builder.hash_variant(release.collect(target, "again", tmp_path)) == builder.hash_variant(variant)
    with pytest.raises(release.ReleaseError, match="expected one variant, found 0"):
        release.collect(tmp_path / "dist", "none", tmp_path)


def test_card_and_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("jinja2")
    project, build = builder.load_project(), tmp_path / "dist" / "build"
    build.mkdir(parents=True)
    for command in (release.stage_card, release.upload_command):
        with pytest.raises(release.ReleaseError, match="org/ltx-kernels is a placeholder"):
            command(project, build)
    monkeypatch.setattr(release, "hub_repository", lambda _: "someone/ltx-kernels")
    release.stage_card(project, build)
    card = (build / "CARD.md").read_text()
    assert 'get_kernel("someone/ltx-kernels", version=1' in card and "- `rmsnorm`" in card and "{{" not in card
    scripts = {path.name for path in (ROOT / "benchmarks").glob("benchmark*.py")}
    assert {path.name for path in (tmp_path / "dist" / "benchmarks").iterdir()} == scripts
    assert ("kernels benchmark someone/ltx-kernels" in card) == bool(scripts)
    flake = "github:huggingface/kernels/8ac69fc542a4306eade0759ef7c45b4f2ae57df0#kernel-builder"
    upload = ["nix", "run", "-L", flake, "--", "upload", "--repo-id", "someone/ltx-kernels", str(tmp_path / "dist")]
    assert release.upload_command(project, build) == upload
    with pytest.raises(release.ReleaseError, match="local builds"):
        release.stage_card(project, ROOT / "build")


def test_local_builds_are_not_publishable(gathered: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(builder, "manylinux_violations", lambda library: ["GLIBC_2.32"])
    assert "GLIBC_2.32 are newer than manylinux_2_28: build it with Nix" in refused(gathered)
