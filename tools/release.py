#!/usr/bin/env python3
"""What a release consists of, and its checks: the variants, the API, the version and the changelog.

    python tools/release.py variants            the variants that Nix must build, one a line
    python tools/release.py table [--write]     which variant serves whom, for docs/hub.md
    python tools/release.py api                 the signatures of the public API
    python tools/release.py check [TAG]         the API against the last release; with a tag, also version and changelog
    python tools/release.py complete BUILD      does BUILD hold every variant of this commit, and nothing else?
    python tools/release.py sign BUILD          cosign signs every metadata.json below BUILD
    python tools/release.py card BUILD          CARD.md filled in, and benchmarks, where the upload wants them
    python tools/release.py upload BUILD        kernel-builder uploads these to the repository that build.toml names
    python tools/release.py nix-matrix          what Nix would build, compared with `variants`; the matrix of build.yml
    python tools/release.py collect RESULT VARIANT BUILD    a variant that Nix built, into BUILD

Nothing but the standard library is needed (for the card also jinja2), and nothing is imported from the package: its
sources are read.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools import build as builder

ROOT = builder.ROOT
# What is built for, each with the GitHub runner that is one.
RUNNERS = {"x86_64-linux": "ubuntu-latest", "aarch64-linux": "ubuntu-24.04-arm"}
SYSTEMS = tuple(RUNNERS)
# What the kernel-builder that flake.lock pins has, for a stable-ABI kernel of torch 2.11.
CUDA_VERSIONS = ((12, 6), (13, 0), (13, 2))
PLACEHOLDER = "org/ltx-kernels"
# Files that tell the world where the package lives. Docs and tests use the placeholder as an example.
NAMES_ITS_HOME = (
    "build.toml", "pyproject.toml", "engines/pyproject.toml", "CITATION.cff", "SECURITY.md",
    ".github/ISSUE_TEMPLATE/config.yml", "README.md",
)  # fmt: skip
TABLE_MARKS = ("<!-- variants -->", "<!-- /variants -->")


class ReleaseError(RuntimeError):
    """What keeps this from being released; the message says what to do."""


def variants(project: builder.Project, systems: Sequence[str] = SYSTEMS) -> list[str]:
    """Names of the variants, as `nix eval .#packages.<system>.variants` must give them."""
    names = []
    for system in systems:
        for backend in sorted(project.backends):
            abi = "".join(map(str, project.stable_abi[backend]))
            computes = [f"cu{major}{minor}" for major, minor in CUDA_VERSIONS] if backend == "cuda" else [backend]
            names += [f"torch-stable-abi{abi}-{compute}-{system}" for compute in computes]
    return names


def variant_table(project: builder.Project) -> str:
    """A Markdown table: what torch there is, the variant that it gets, and the GPUs that this one has code for."""
    abi = ".".join(map(str, min(project.stable_abi.values())))
    lines = ["| torch | variant | GPUs: machine code for | and by PTX |", "|---|---|---|---|"]
    lines.append(f"| {abi} or newer, for CPUs | `{variants(project)[0].removesuffix('-' + SYSTEMS[0])}` | | |")
    for version in CUDA_VERSIONS:
        later = [v for v in CUDA_VERSIONS if v[0] == version[0] and v > version]
        until = f" to {version[0]}.{later[0][1] - 1}" if later else f" and later {version[0]}.x"
        served = f"{abi} or newer, for CUDA {version[0]}.{version[1]}{until}"
        name = f"torch-stable-abi{abi.replace('.', '')}-cu{version[0]}{version[1]}"
        archs = sorted(project.capabilities(version), key=builder.parse_version)
        machine_code = ", ".join(dict.fromkeys(arch.removesuffix("+PTX").rstrip("af") for arch in archs))
        ptx = ", ".join(f"{arch.removesuffix('+PTX')} and newer" for arch in archs if arch.endswith("+PTX"))
        lines.append(f"| {served} | `{name}` | {machine_code} | {ptx} |")
    lines.append("")
    lines.append("Each in two builds, " + " and ".join(f"`-{system}`" for system in SYSTEMS) + ".")
    return "\n".join(lines)


def write_table(project: builder.Project, file: Path) -> None:
    start, end = TABLE_MARKS
    before, rest = file.read_text().split(start)
    _, after = rest.split(end)
    file.write_text(f"{before}{start}\n{variant_table(project)}\n{end}{after}")


def public_signatures(package: Path) -> dict[str, str]:
    """`name(parameters)` of each name in `__all__`, read from the sources; of a module or class its name alone."""
    tree = ast.parse((package / "__init__.py").read_text())
    exported = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    sources = {
        (alias.asname or alias.name): (node.module, alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
    }
    return {name: _signature(package, *sources.get(name, (None, name))) for name in sorted(exported)}


def _signature(package: Path, module: str | None, name: str) -> str:
    if module is None and not (package / "__init__.py").read_text().count(f"def {name}("):
        return name  # a module of the package
    file = package / (module.replace(".", "/") if module else "__init__")
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    tree = ast.parse(file.read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return f"{name}({ast.unparse(node.args)})"
        if isinstance(node, ast.ClassDef) and node.name == name:
            return name
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    inner = file.parent.relative_to(package).as_posix().replace("/", ".").strip(".")
                    return _signature(package, ".".join(filter(None, [inner, node.module])), alias.name)
    return name


def breaking_changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """What a caller of `old` would trip over: a name that is gone, or a call that no longer means what it meant."""
    broken = [f"{name}: gone" for name in old if name not in new]
    for name in sorted(set(old) & set(new)):
        if reason := _breaks(old[name], new[name]):
            broken.append(f"{name}: {reason}\n  was {old[name]}\n  is  {new[name]}")
    return broken


def _parameters(signature: str) -> tuple[dict[str, tuple[str, str | None]], list[str]]:
    """Of each parameter its kind and default, and the names that can be given by position, in order."""
    if "(" not in signature:
        return {}, []
    function = ast.parse(f"def {signature}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    kinds = ["by position alone"] * len(arguments.posonlyargs) + ["positional"] * len(arguments.args)
    missing = len(positional) - len(arguments.defaults)
    defaults = [None] * missing + [ast.unparse(value) for value in arguments.defaults]
    found = {a.arg: (kind, default) for a, kind, default in zip(positional, kinds, defaults)}
    if arguments.vararg is not None:
        found[arguments.vararg.arg] = ("several", "()")
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults):
        found[argument.arg] = ("keyword", None if value is None else ast.unparse(value))
    if arguments.kwarg is not None:
        found[arguments.kwarg.arg] = ("several", "{}")
    return found, [a.arg for a in positional]


def _breaks(old: str, new: str) -> str:
    if ("(" in old) != ("(" in new):
        return "no longer the same kind of thing"
    before, order = _parameters(old)
    after, new_order = _parameters(new)
    if gone := [name for name in before if name not in after]:
        return f"argument {', '.join(gone)} gone"
    if new_order[: len(order)] != order:
        return "arguments by position changed"
    if unnamed := [name for name in before if "by position alone" == after[name][0] != before[name][0]]:
        return f"argument {', '.join(unnamed)} has no name any more"
    if demanded := [name for name in after if name not in before and after[name][1] is None]:
        return f"new argument {', '.join(demanded)} has no default"
    if changed := [name for name in before if before[name][1] not in (None, after[name][1])]:
        return f"default of {', '.join(changed)} changed"
    return ""


def git(root: Path, *arguments: str) -> str:
    return builder.run(["git", *arguments], cwd=root).strip()


def last_release(root: Path, before: str | None = None) -> str | None:
    """The newest release tag that HEAD descends from, `before` itself left out."""
    tags = git(root, "tag", "--merged", "HEAD", "--list", "v[0-9]*", "--sort=-version:refname").split()
    return next((tag for tag in tags if tag != before), None)


def check_api(root: Path, tag: str | None = None) -> str:
    """The API may grow within a version; anything else needs the next `version` in build.toml."""
    release = last_release(root, before=tag)
    if release is None:
        return "no release yet: nothing of the API is frozen"
    with tempfile.TemporaryDirectory() as directory:
        archive = Path(directory) / "release.tar"
        git(root, "archive", "--output", str(archive), release, "build.toml", "torch-ext")
        builder.run(["tar", "-xf", str(archive), "-C", directory])
        released_version = builder.read_toml(Path(directory) / "build.toml")["general"]["version"]
        released = public_signatures(next((Path(directory) / "torch-ext").glob("*/__init__.py")).parent)
    general = builder.read_toml(root / "build.toml")["general"]
    current = public_signatures(root / "torch-ext" / general["name"].replace("-", "_"))
    broken = breaking_changes(released, current)
    if broken and general["version"] == released_version:
        raise ReleaseError(
            f"the API of {release} changed, and `version` in build.toml is still {released_version}: "
            "restore it, or raise the version\n" + "\n".join(broken)
        )
    added = sorted(set(current) - set(released))
    return f"API compatible with {release}" + (f"; new: {', '.join(added)}" if added else "")


def check_tag(root: Path, tag: str) -> str:
    match = re.fullmatch(r"v(\d+)\.(\d+)", tag)
    if match is None:
        raise ReleaseError(f"{tag}: a release tag is v<version>.<number>, for example v1.0")
    version = builder.read_toml(root / "build.toml")["general"]["version"]
    if int(match[1]) != version:
        raise ReleaseError(f"{tag}: `version` in build.toml is {version}")
    wanted = [f"Version {match[1]}.{match[2]}"] + ([f"Version {match[1]}"] if match[2] == "0" else [])
    changelog = (root / "CHANGELOG.md").read_text()
    if not re.search(rf"^##+ ({'|'.join(map(re.escape, wanted))})\b(?!\.).*\n+(?!#)\S", changelog, re.MULTILINE):
        raise ReleaseError(f"{tag}: CHANGELOG.md has no text under a heading `## {wanted[0]}`")
    for name in NAMES_ITS_HOME:
        if (root / name).is_file() and PLACEHOLDER in (root / name).read_text():
            raise ReleaseError(f"{tag}: {name} still has the placeholder {PLACEHOLDER}: name the package's home")
    return f"{tag}: version, changelog and the package's home agree"


def check_complete(project: builder.Project, build: Path, systems: Sequence[str] = SYSTEMS) -> str:
    """`build` holds every variant, each made from HEAD by Nix, perhaps what `card` adds, and nothing else.

    An upload takes whatever lies there, and the digest does not cover bytecode, `__pycache__` and linked directories.
    So everything is named here that may be there, and all else is an error.
    """
    git_status = builder.git_status(project.root)
    if git_status is None:
        raise ReleaseError(f"{project.root}: expected a git checkout, whose commit the variants are compared with")
    _check_gathered(project, build)
    names = set(variants(project, systems))
    found = {path.name for path in build.iterdir() if path.is_dir()}
    if missing := sorted(names - found):
        raise ReleaseError(f"{build}: missing variants: {', '.join(missing)}")
    _check_entries(build, names | {"CARD.md"})
    _check_entries(build.parent, {build.name, "benchmarks"})
    benchmarks = {file.name: file for file in benchmark_scripts(project)}
    if (staged := build.parent / "benchmarks").exists():
        _check_entries(staged, set(benchmarks))
        if changed := [
            file.name for file in staged.iterdir() if file.read_bytes() != benchmarks[file.name].read_bytes()
        ]:
            raise ReleaseError(f"{staged}: not the files of this commit: {', '.join(sorted(changed))}")
    for name in sorted(names):
        _check_variant(project, build / name, git_status.commit)
    return f"{len(names)} variants of {git_status.commit[:12]}"


def _check_entries(directory: Path, allowed: set[str]) -> None:
    links = sorted(path.name for path in directory.iterdir() if path.is_symlink())
    if links:
        raise ReleaseError(f"{directory}: expected no links, got {', '.join(links)}")
    if others := sorted(path.name for path in directory.iterdir() if path.name not in allowed):
        raise ReleaseError(f"{directory}: not expected: {', '.join(others)}")


def _check_variant(project: builder.Project, variant: Path, commit: str) -> None:
    """The variant's metadata describe this project at `commit`, and its files are those of the digest and no others."""
    backend, cuda = _backend(variant.name)
    metadata = json.loads((variant / "metadata.json").read_text())
    ops = metadata.get("id", "")
    kernel = metadata.get("provenance", {}).get("kernel") or {}
    if kernel.get("dirty", True):
        raise ReleaseError(f"{variant.name}: built from a dirty tree; commit first")
    info: dict[str, Any] = {"type": backend}
    if cuda is not None:
        info["archs"] = project.capabilities(cuda)
    for key, got, expected in (
        ("name", metadata.get("name"), project.name),
        ("version", metadata.get("version"), project.version),
        ("license", metadata.get("license"), project.license),
        ("source", metadata.get("source"), project.source),
        ("python-depends", metadata.get("python-depends"), list(project.python_depends)),
        ("backend", {k: v for k, v in metadata.get("backend", {}).items() if v is not None}, info),
        ("commit", kernel.get("commit"), commit),
        ("digest algorithm", metadata.get("digest", {}).get("algorithm"), "sha256"),
    ):
        if got != expected:
            raise ReleaseError(f"{variant.name}: {key}: expected {expected}, got {got}")
    if not re.fullmatch(rf"_{project.python_name}_{backend}_[0-9a-z]+", ops):
        raise ReleaseError(f"{variant.name}: id: expected _{project.python_name}_{backend}_<commit>, got {ops}")

    sources = {file.relative_to(project.package_dir).as_posix(): file for file in project.python_files()}
    signed = {*sources, builder.OPS_FILE, f"{ops}.abi3.so"}
    beside = {"metadata.json", "metadata.json.sigstore"}
    directories = {parent.as_posix() for name in signed for parent in PurePosixPath(name).parents}
    for path in sorted(variant.rglob("*")):
        name = path.relative_to(variant).as_posix()
        if path.is_symlink():
            raise ReleaseError(f"{variant.name}: expected no links, got {name}")
        if name not in (directories if path.is_dir() else signed | beside):
            raise ReleaseError(f"{variant.name}: not expected: {name}")
    files = builder.hash_variant(variant)
    if files != metadata["digest"]["files"]:
        raise ReleaseError(f"{variant.name}: its files are not those that its metadata was written for")
    if missing := sorted(signed - files.keys()):
        raise ReleaseError(f"{variant.name}: missing: {', '.join(missing)}")
    if changed := sorted(name for name, file in sources.items() if file.read_bytes() != (variant / name).read_bytes()):
        raise ReleaseError(f"{variant.name}: not the sources of this commit: {', '.join(changed)}")
    if violations := builder.manylinux_violations(variant / f"{ops}.abi3.so"):
        raise ReleaseError(f"{variant.name}: {', '.join(violations)} are newer than manylinux_2_28: build it with Nix")


def _backend(variant: str) -> tuple[str, tuple[int, int] | None]:
    """Backend and CUDA version in the name of a variant: ("cuda", (13, 0)) of cu130, ("cpu", None) of cpu."""
    compute = variant.split("-")[3]
    if match := re.fullmatch(r"cu(\d+)(\d)", compute):
        return "cuda", (int(match[1]), int(match[2]))
    return compute, None


def sign(build: Path) -> None:
    """Keyless, as the workflow that runs it; locally cosign asks for a log-in in the browser."""
    found = sorted(build.glob("*/metadata.json"))
    if not found:
        raise ReleaseError(f"{build}: expected variants to sign, found no metadata.json in its folders")
    for metadata in found:
        builder.run(["cosign", "sign-blob", str(metadata), "--bundle", f"{metadata}.sigstore", "--yes"])
        print(f"signed {metadata}")


def hub_repository(project: builder.Project) -> str:
    repo_id = builder.read_toml(project.root / "build.toml")["general"]["hub"]["repo-id"]
    if repo_id == PLACEHOLDER:
        raise ReleaseError(f"{repo_id} is a placeholder: set repo-id of [general.hub] in build.toml")
    return str(repo_id)


def render_card(project: builder.Project, repo_id: str) -> str:
    """CARD.md with the variables that kernel-builder gives it."""
    import jinja2

    functions = [name for name, text in public_signatures(project.package_dir).items() if "(" in text]
    modules = [
        f for f in project.python_files() if f.relative_to(project.package_dir).parts[0] in ("layers.py", "layers")
    ]
    definitions = [node for file in modules for node in ast.parse(file.read_text()).body]
    layers = [node.name for node in definitions if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string((project.root / "CARD.md").read_text()).render(
        repo_id=repo_id,
        version=project.version,
        license=project.license.lower(),
        functions=functions,
        layers=layers,
        has_benchmark=bool(benchmark_scripts(project)),
        upstream=None,
        source=project.source,
    )


def _check_gathered(project: builder.Project, build: Path) -> None:
    """kernel-builder uploads what it finds in a directory of the name `build`, and benchmarks from beside it."""
    if build.name != "build":
        raise ReleaseError(f"{build}: expected a directory of the name build, such as dist/build")
    if build.resolve() == project.root / "build":
        raise ReleaseError(f"{build} is for local builds: gather what Nix built in a directory of its own, dist/build")
    if not build.is_dir():
        raise ReleaseError(f"{build}: expected a directory of variants, got none: `collect` fills one")


def benchmark_scripts(project: builder.Project) -> list[Path]:
    """What `kernels benchmark` runs, which goes to the Hub beside the variants."""
    return sorted((project.root / "benchmarks").glob("benchmark*.py"))


def stage_card(project: builder.Project, build: Path) -> None:
    """kernel-builder uploads build/CARD.md as README.md, and benchmarks/benchmark*.py from beside build/."""
    _check_gathered(project, build)
    (build / "CARD.md").write_text(render_card(project, hub_repository(project)))
    benchmarks = build.parent / "benchmarks"
    benchmarks.mkdir(exist_ok=True)
    for file in benchmark_scripts(project):
        shutil.copyfile(file, benchmarks / file.name)


def upload_command(project: builder.Project, build: Path) -> list[str]:
    """kernel-builder of the revision that built the variants; it takes the version's branch from the metadata."""
    repo_id = hub_repository(project)
    lock = json.loads((project.root / "flake.lock").read_text())
    revision = lock["nodes"]["kernel-builder"]["locked"]["rev"]
    flake = f"github:huggingface/kernels/{revision}#kernel-builder"
    return ["nix", "run", "-L", flake, "--", "upload", "--repo-id", repo_id, str(build.parent)]


def nix_matrix(project: builder.Project) -> str:
    """The matrix of the build jobs, after a look whether Nix and this project mean the same variants."""
    jobs = []
    for system, runner in RUNNERS.items():
        found = json.loads(builder.run(["nix", "eval", "--json", f".#packages.{system}.variants"], cwd=project.root))
        expected = variants(project, [system])
        if sorted(found) != sorted(expected):
            raise ReleaseError(f"Nix builds {sorted(found)}; this project expects {sorted(expected)}")
        jobs += [{"variant": variant, "runner": runner} for variant in found]
    return json.dumps({"include": jobs})


def collect(result: Path, variant: str, build: Path) -> Path:
    """Copy what `nix build .#redistributable.<variant>` made, which Nix keeps read-only, to `build`/<variant>."""
    found = sorted([*result.glob("metadata.json"), *result.glob("*/metadata.json")])
    if len(found) != 1:
        raise ReleaseError(f"{result}: expected one variant, found {len(found)}")
    target = build / variant
    shutil.rmtree(target, ignore_errors=True)
    for file in sorted(found[0].parent.rglob("*")):
        if file.is_file():
            copy = target / file.relative_to(found[0].parent)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("variants")
    listing.add_argument("--system", action="append", choices=SYSTEMS)
    table = commands.add_parser("table")
    table.add_argument("--write", action="store_true", help="into docs/hub.md")
    commands.add_parser("api")
    commands.add_parser("check").add_argument("tag", nargs="?")
    commands.add_parser("nix-matrix")
    collecting = commands.add_parser("collect")
    collecting.add_argument("result", type=Path)
    collecting.add_argument("variant")
    collecting.add_argument("build", type=Path)
    for name in ("complete", "sign", "card", "upload"):
        commands.add_parser(name).add_argument("build", type=Path)
    args = parser.parse_args(arguments)
    try:
        project = builder.load_project(ROOT)
        if args.command == "variants":
            print("\n".join(variants(project, args.system or SYSTEMS)))
        elif args.command == "table" and args.write:
            write_table(project, ROOT / "docs" / "hub.md")
        elif args.command == "table":
            print(variant_table(project))
        elif args.command == "api":
            print("\n".join(public_signatures(project.package_dir).values()))
        elif args.command == "check":
            if args.tag:
                print(check_tag(ROOT, args.tag))
            print(check_api(ROOT, args.tag))
        elif args.command == "complete":
            print(check_complete(project, args.build))
        elif args.command == "nix-matrix":
            matrix = nix_matrix(project)
            print(matrix)
            if output := os.environ.get("GITHUB_OUTPUT"):
                with open(output, "a") as file:
                    file.write(f"matrix={matrix}\n")
        elif args.command == "collect":
            print(collect(args.result, args.variant, args.build))
        elif args.command == "card":
            stage_card(project, args.build)
        elif args.command == "sign":
            sign(args.build)
        elif shutil.which("nix") is None:
            raise ReleaseError("nix not found: install it, or add its folder to PATH")
        elif subprocess.run(upload_command(project, args.build), check=False).returncode != 0:
            raise ReleaseError("upload failed (see above)")
    except (ReleaseError, builder.BuildError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
