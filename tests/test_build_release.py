"""tools/release.py: what may change of the API after a release, tags and the changelog, a whole set of variants."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from build_checks import PACKAGE, ROOT, builder, built_variant, release


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


def test_tag(tmp_path: Path):
    (tmp_path / "build.toml").write_text("[general]\nversion = 1\n")
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text("# Changelog\n\n## Version 1\n\nFirst.\n")
    assert release.check_tag(tmp_path, "v1.0") == "v1.0: version and changelog agree"
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


@pytest.fixture
def gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight variants as Nix would leave them: the built one, under each name, from a clean commit."""
    monkeypatch.setattr(builder, "manylinux_violations", lambda library: [])
    for name in release.variants(builder.load_project()):
        target = tmp_path / name
        shutil.copytree(built_variant("cpu"), target, ignore=shutil.ignore_patterns("__pycache__"))
        metadata = json.loads((target / "metadata.json").read_text())
        metadata["provenance"]["kernel"] = {"commit": "1" * 40, "dirty": False}
        (target / "metadata.json").write_text(json.dumps(metadata))
    return tmp_path


def test_a_complete_set(gathered: Path):
    assert release.check_complete(builder.load_project(), gathered) == "8 variants of 111111111111"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("variant missing", "missing:.*cu126-aarch64"),
        ("dirty", "dirty tree"),
        ("other commit", "different commits"),
        ("byte", "not those that its metadata was written for"),
        ("version", "version 2, expected 1"),
    ],
)
def test_an_unfit_set(gathered: Path, damage: str, message: str):
    variant = gathered / "torch-stable-abi211-cu126-aarch64-linux"
    metadata = json.loads((variant / "metadata.json").read_text())
    if damage == "variant missing":
        shutil.rmtree(variant)
    elif damage == "byte":
        (variant / "rope.py").write_text("")
    else:
        metadata["provenance"]["kernel"]["dirty"] = damage == "dirty"
        metadata["provenance"]["kernel"]["commit"] = ("2" if damage == "other commit" else "1") * 40
        metadata["version"] = 2 if damage == "version" else 1
        (variant / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(release.ReleaseError, match=message):
        release.check_complete(builder.load_project(), gathered)


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


def test_collect(tmp_path: Path):
    """What Nix made is read-only, and lies in `result` itself or one directory below."""
    variant = built_variant("cpu")
    shutil.copytree(variant, tmp_path / "result" / variant.name)
    target = release.collect(tmp_path / "result", variant.name, tmp_path / "dist" / "build")
    assert target == tmp_path / "dist" / "build" / variant.name
    assert builder.hash_variant(target) == builder.hash_variant(variant)
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
    with pytest.raises(release.ReleaseError, match=r"GLIBC_2\.32 are newer .*: build it with Nix"):
        release.check_complete(builder.load_project(), gathered)
