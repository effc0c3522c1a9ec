"""A Hub served from this machine (hub_server.py): download, cache, versions, trust, locks, offline use, signatures.

The clients are processes of their own, as users have them: huggingface_hub reads HF_ENDPOINT, HF_HOME and
HF_HUB_OFFLINE when it is imported. What needs the real Hub, or Sigstore, is named by
test_not_run_here.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.build_checks import ROOT, builder, built_variant, make_tiny_project, release, run_build, run_python
from hub_server import HubServer, Repository

pytest.importorskip("kernels")

UNTRUSTED, TRUSTED = "org/ltx-kernels", "trusted/ltx-kernels"
NO_BYTECODE = shutil.ignore_patterns("__pycache__")


@dataclass
class Client:
    """A user's machine: what it has downloaded is below `home`."""

    hub: HubServer
    home: Path

    cwd: Path = Path("/")

    def process(self, *arguments: str, offline: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
        # kernels 0.17.2 sends a header that httpx refuses where telemetry is off: see test_telemetry_switched_off.
        inherited = {k: v for k, v in os.environ.items() if k not in ("LOCAL_KERNELS", "HF_HUB_DISABLE_TELEMETRY")}
        environment = {
            "HF_ENDPOINT": self.hub.endpoint, "HF_HOME": str(self.home), "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            **({"HF_HUB_OFFLINE": "1"} if offline else {}), **environment,
        }  # fmt: skip
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, env=inherited | environment, capture_output=True, text=True, check=False, cwd=self.cwd
        )

    def run(self, code: str, *, offline: bool = False, **environment: str) -> str:
        result = self.process("-c", "import torch, kernels\n" + code, offline=offline, **environment)
        assert result.returncode == 0, f"{code}\n{result.stdout}{result.stderr}"
        return result.stdout

    def outcomes(self, *snippets: str, offline: bool = False, **environment: str) -> list[str]:
        """Of each snippet, run one after the other in one process, what it printed, and the error that ended it."""
        return json.loads(self.run(OUTCOMES % (list(snippets),), offline=offline, **environment))

    def cli(self, *commands: list[str]) -> list[str]:
        """`kernels <command>`, each in turn: its output, and `SystemExit: <code>` or the error that ended it."""
        run = "sys.argv = ['kernels', *%r]\nfrom kernels.cli import main\nmain()\n"
        return self.outcomes(*(run % command for command in commands))


OUTCOMES = """
import contextlib, io, json, pathlib, sys
answers = []
for snippet in %r:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            exec(snippet, globals())
        except (Exception, SystemExit) as error:
            print(f"{type(error).__name__}: {error}")
    answers.append(output.getvalue())
print(json.dumps(answers))
"""


def copy_variant(target: Path) -> None:
    """The built CPU variant as of a clean commit: of another the loader warns, in what these tests read."""
    shutil.copytree(built_variant("cpu"), target, ignore=NO_BYTECODE)
    metadata = json.loads((target / "metadata.json").read_text())
    metadata["provenance"].setdefault("kernel", {"commit": "1" * 40})["dirty"] = False
    (target / "metadata.json").write_text(json.dumps(metadata))


def fill_repository(directory: Path) -> Path:
    """What a release uploads: the built CPU variant, and of each other variant its metadata alone."""
    cpu = built_variant("cpu")
    project = builder.load_project()
    for name in release.variants(project):
        target = directory / "build" / name
        if name == cpu.name:
            copy_variant(target)
            continue
        metadata = json.loads((cpu / "metadata.json").read_text())
        if match := re.search(r"-cu(\d+)(\d)-", name):
            archs = project.capabilities((int(match[1]), int(match[2])))
            metadata |= {"backend": {"type": "cuda", "archs": archs}, "id": metadata["id"].replace("_cpu_", "_cuda_")}
        target.mkdir(parents=True)
        (target / "metadata.json").write_text(json.dumps(metadata))
    (directory / "README.md").write_text("the card\n")
    return directory


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    if torch.version.cuda is not None:
        pytest.skip("NOT RUN: this Hub has the CPU variant alone, and a CUDA torch would take another")
    with HubServer(tmp_path_factory.mktemp("hub")) as server:
        directory = fill_repository(tmp_path_factory.mktemp("repository"))
        server.trusted.add("trusted")
        for repo_id in (UNTRUSTED, TRUSTED):
            server.repository(repo_id).push("v1", directory)
        yield server
        assert set(server.unknown) <= {"/api/agent-harnesses"}, "huggingface_hub asks for more than this Hub serves"


@pytest.fixture
def repository(hub: HubServer, request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Repository, Path]:
    """A repository of the test's own, of a trusted publisher: its id, itself, and its files to change and push."""
    repo_id = f"trusted/{re.sub('[^a-z]', '-', request.node.name)}"
    files = fill_repository(tmp_path / "files")
    hub.repository(repo_id).push("v1", files)
    return repo_id, hub.repository(repo_id), files


@pytest.fixture
def client(hub: HubServer, tmp_path: Path) -> Client:
    hub.requests.clear()
    return Client(hub, tmp_path / "home")


def get(repo_id: str = UNTRUSTED, which: str = "version=1") -> str:
    trust = f", trust_remote_code=[{repo_id!r}]" if repo_id == UNTRUSTED else ""
    return f"kernel = kernels.get_kernel({repo_id!r}, {which}{trust})\n"


USE = "print(kernel.rmsnorm(torch.full((1, 4), 2.0)).sum().round().item())\n"


def test_download_and_cache(client: Client, hub: HubServer):
    """Of eight variants the one for this machine is downloaded, once."""
    info = "print(*[k.repo_info.repo_id for k in kernels.get_loaded_kernels()])\n"
    again = f"assert kernel is kernels.get_kernel({UNTRUSTED!r}, version=1, trust_remote_code=True)\n"
    assert client.run(get() + USE + again + info) == f"4.0\n{UNTRUSTED}\n"
    variant = built_variant("cpu")
    sent = hub.files_sent()
    wanted = {p.relative_to(variant).as_posix() for p in variant.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert sorted(sent) == sorted(f"build/{variant.name}/{name}" for name in wanted)

    hub.requests.clear()
    assert client.run(get() + USE) == "4.0\n"
    assert hub.files_sent() == []


def test_trust(client: Client, hub: HubServer):
    """An untrusted publisher's kernel needs trust_remote_code, and nothing of it is downloaded before that."""
    plain, other, trusted = client.outcomes(
        f"kernels.get_kernel({UNTRUSTED!r}, version=1)",
        f"kernels.get_kernel({UNTRUSTED!r}, version=1, trust_remote_code=['org/other'])",
        get(TRUSTED) + USE,
    )
    assert plain.startswith(f"ValueError: Kernel repository '{UNTRUSTED}' is not from a trusted publisher.")
    assert other == plain
    assert trusted == "4.0\n"
    assert not [line for line in hub.requests if UNTRUSTED in line]


def test_has_kernel_and_missing_versions(client: Client):
    ask = f"print(kernels.has_kernel({TRUSTED!r}, version=%s, backend=%r))"
    has, has_cpu, other, neither = client.outcomes(
        ask % (1, None), ask % (1, "cpu"), get(TRUSTED, "version=7"), f"kernels.get_kernel({TRUSTED!r})"
    )
    assert (has, has_cpu) == ("True\n", "True\n")
    assert other == "ValueError: Version 7 not found, available versions: 1\n"
    assert neither.startswith("ValueError: A kernel version or revision must be specified.")


@pytest.mark.slow
def test_new_commits_and_pins(client: Client, repository):
    """A version follows its branch; a revision stays. Nothing checks a file against the digest at load."""
    repo_id, served, files = repository
    first = served.branches["v1"]
    assert client.run(get(repo_id) + USE) == "4.0\n"
    with open(files / "build" / built_variant("cpu").name / "__init__.py", "a") as init:
        init.write("\nCHANGED = True\n")  # the metadata still holds the digest of the old file
    served.push("v1", files)
    changed = "print(hasattr(kernel, 'CHANGED'))\n"
    assert client.run(get(repo_id) + changed) == "True\n"
    assert client.run(get(repo_id, f"revision={first!r}") + changed) == "False\n"


@pytest.mark.slow
def test_offline(client: Client):
    """What get_kernel downloads does not serve offline, since a version is a branch; a whole snapshot of it does."""
    client.run(get(TRUSTED))
    (message,) = client.outcomes(get(TRUSTED), offline=True)
    assert f"ValueError: Version 1 of '{TRUSTED}' is not available in the local cache" in message
    client.run(
        "from huggingface_hub import snapshot_download\n"
        f"snapshot_download({TRUSTED!r}, repo_type='kernel', revision='v1')\n"
    )
    client.hub.requests.clear()
    assert client.run(get(TRUSTED) + USE, offline=True) == "4.0\n"
    assert client.hub.requests == []


@pytest.mark.slow
def test_vendored_directory(client: Client, tmp_path: Path):
    """A directory that `hf download --local-dir` made serves offline through LOCAL_KERNELS, without a trust check."""
    target = tmp_path / "vendored"
    client.run(
        "from huggingface_hub import snapshot_download\n"
        f"snapshot_download({UNTRUSTED!r}, repo_type='kernel', revision='v1', allow_patterns='build/*-cpu-*',\n"
        f"                  local_dir={str(target)!r})\n"
    )
    client.hub.requests.clear()
    code = f"kernel = kernels.get_kernel({UNTRUSTED!r}, version=1)\n" + USE
    assert client.run(code, offline=True, LOCAL_KERNELS=f"{UNTRUSTED}={target}") == "4.0\n"
    assert client.hub.requests == []


def make_project(directory: Path, repo_id: str) -> Path:
    directory.mkdir()
    (directory / "pyproject.toml").write_text(f'[tool.kernels.dependencies]\n"{repo_id}" = 1\n')
    return directory


@pytest.mark.slow
def test_lock(client: Client, repository, tmp_path: Path):
    """`kernels lock` writes the commit; get_locked_kernel keeps to it when the branch moves on."""
    repo_id, served, files = repository
    project = make_project(tmp_path / "project", repo_id)
    untrusted = make_project(tmp_path / "untrusted", UNTRUSTED)
    locked, refused = client.cli(["lock", str(project)], ["lock", str(untrusted)])
    commit = served.branches["v1"]
    assert locked == "" and commit in (project / "kernels.lock").read_text()
    assert "is not from a trusted publisher" in refused and not (untrusted / "kernels.lock").exists()

    (files / "build" / built_variant("cpu").name / "__init__.py").write_text("CHANGED = True\n")
    served.push("v1", files)
    # load_kernel never downloads, and takes a whole snapshot only: not what get_locked_kernel left in the cache.
    lock = f"({repo_id!r}, lockfile=pathlib.Path({str(project / 'kernels.lock')!r}))\n"
    load = "kernel = kernels.load_kernel" + lock + USE
    snapshot = "import huggingface_hub\nhuggingface_hub.snapshot_download"
    snapshot += f"({repo_id!r}, repo_type='kernel', revision={commit!r})"
    at_once, part, _ = client.outcomes("kernel = kernels.get_locked_kernel" + lock + USE, load, snapshot)
    assert at_once == "4.0\n"
    assert f"FileNotFoundError: Cannot find a local snapshot for {repo_id} (revision: {commit})" in part
    client.hub.requests.clear()
    assert client.run("import pathlib\n" + load, offline=True) == "4.0\n"
    assert client.hub.requests == []


def test_command_line(client: Client, tmp_path: Path):
    variant = built_variant("cpu").name
    project = make_project(tmp_path / "project", TRUSTED)
    versions, info, local, unsigned, filtered, untrusted, _, downloaded = client.cli(
        ["versions", TRUSTED],
        ["info", TRUSTED, "--version", "1", "--json"],
        ["info", str(ROOT), "--json"],
        ["verify-signature", TRUSTED, "1"],
        ["verify-signature", TRUSTED, "1", "--filter-unsigned"],
        ["verify-signature", UNTRUSTED, "1"],  # it wants trust, and has no option to grant it
        ["lock", str(project)],
        ["download", str(project)],
    )
    assert versions.startswith("Version 1:\n") and f"{variant} compatible, preferred" in versions
    for answer in (info, local):
        told = json.loads(answer)
        assert (told["name"], told["version"], told["license"]) == ("ltx-kernels", 1, "Apache-2.0")
        assert told["python_depends"] == [] and "cpu" in told["backends"]
    assert unsigned == f"❌ {variant}: cannot verify kernel integrity, signature not found\nSystemExit: 1\n"
    assert filtered == ""
    assert untrusted.startswith("ValueError: ") and "is not from a trusted publisher" in untrusted
    assert downloaded.startswith(f"Downloading kernel: {TRUSTED}") and "Error" not in downloaded


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """kernels.verify, as if Sigstore had accepted the signature of metadata.json; Sigstore itself needs the network."""
    verify = pytest.importorskip("kernels.verify")

    class AcceptsAnything:
        production = classmethod(lambda cls: cls())

        def verify_artifact(self, *_: object) -> None: ...

    monkeypatch.setattr(verify, "Verifier", AcceptsAnything)
    monkeypatch.setattr(verify.Bundle, "from_json", lambda _: None)
    return verify


@pytest.mark.parametrize("tampering", ["nothing", "byte", "extra file", "missing file"])
def test_verification_finds_tampering(tampering: str, tmp_path: Path, verify: ModuleType):
    variant = tmp_path / built_variant("cpu").name
    shutil.copytree(built_variant("cpu"), variant, ignore=NO_BYTECODE)
    (variant / "metadata.json.sigstore").write_text("{}")
    (library,) = variant.glob("*.so")
    if tampering == "byte":
        data = bytearray(library.read_bytes())
        data[len(data) // 2] ^= 1
        library.write_bytes(data)
    elif tampering == "extra file":
        (variant / "extra.py").touch()
    elif tampering == "missing file":
        (variant / "rope.py").unlink()
    result = verify.verify_variant(variant)
    if tampering == "nothing":
        assert isinstance(result, verify.VerificationResult.Success)
    else:
        assert isinstance(result, verify.VerificationResult.DigestVerificationFailure)
        (violation,) = result.violations
        assert {"byte": library.name, "extra file": "extra.py", "missing file": "rope.py"}[tampering] in str(violation)


@pytest.mark.slow
def test_bytecode_passes_verification(tmp_path: Path, verify: ModuleType):
    """Planted bytecode runs though verification succeeds; it does not run from the copy that docs/hub.md makes."""
    variant = tmp_path / "planted" / built_variant("cpu").name
    copy_variant(variant)
    (variant / "metadata.json.sigstore").write_text("{}")
    source, poison = variant / "rope.py", tmp_path / "poison.py"
    poison.write_text(source.read_text() + "\nprint('poison')\n")
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    planted = py_compile.compile(
        str(poison), importlib.util.cache_from_source(str(source)), invalidation_mode=unchecked
    )
    assert planted is not None and Path(planted).is_relative_to(variant)
    assert isinstance(verify.verify_variant(variant), verify.VerificationResult.Success)

    load = "import pathlib, kernels\nkernels.get_local_kernel(pathlib.Path(%r), backend='cpu')\n"
    assert run_python(load % str(variant)) == "poison\n"
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL) if "shutil.copyfile" in b)
    copying = block[block.index("copy = Path") : block.index("ltx = ")].replace("verified", str(tmp_path))
    exec(copying, {"Path": Path, "json": json, "shutil": shutil, "variant": variant})
    assert run_python(load % str(tmp_path / variant.name)) == ""


def test_the_server_keeps_to_its_store(hub: HubServer):
    """`..` in a path, also as %2e%2e, leads to nothing outside of the commit."""
    commit = hub.repository(UNTRUSTED).branches["v1"]
    (hub.store / "secret").write_text("confidential")
    connection = http.client.HTTPConnection(*hub.server.server_address[:2])
    for climb in (
        "../../../secret",
        "%2e%2e/%2e%2e/%2e%2e/secret",
        f"build/../../../../secret#{commit}",
        "%2Fetc/passwd",
    ):
        for what in (f"/kernels/{UNTRUSTED}/resolve/{commit}/", f"/api/kernels/{UNTRUSTED}/tree/{commit}/"):
            connection.request("GET", what + climb)
            response = connection.getresponse()
            assert (response.status, b"confidential" in response.read()) == (404, False), what + climb
    connection.request("GET", f"/kernels/{UNTRUSTED}/resolve/{commit}/README.md")
    assert connection.getresponse().read() == b"the card\n"


@pytest.mark.slow
def test_two_versions_in_one_process(client: Client, repository, tmp_path: Path):
    """Version 2 has other ops, and other ones of the same name; both are at work in one process."""
    repo_id, served, _ = repository
    project = make_tiny_project(tmp_path / "tiny")
    toml = project / "build.toml"
    toml.write_text(toml.read_text().replace("\nversion = 1\n", "\nversion = 2\n"))
    run_build(project, "--backend", "cpu")
    shutil.rmtree(project / "build" / ".cache")
    shutil.copytree(project / "build", tmp_path / "second" / "build")
    served.push("v2", tmp_path / "second")
    code = get(repo_id) + f"second = kernels.get_kernel({repo_id!r}, version=2)\n" + USE
    code += "print(second.add_one(torch.ones(2)).tolist(), kernel.__name__ != second.__name__)\n" + USE
    result = client.process("-c", "import torch, kernels\n" + code)
    assert result.stdout == "4.0\n[2.0, 2.0] True\n4.0\n", result.stderr
    assert f"You are using version 1 of '{repo_id}', but version 2 is available." in result.stderr


def test_telemetry_switched_off(client: Client):
    """A fault of kernels 0.17.2 with huggingface_hub 2.4: docs/hub.md tells of it. Should this fail, it is mended."""
    message, misleading = client.outcomes(get(UNTRUSTED), get(TRUSTED), HF_HUB_DISABLE_TELEMETRY="1")
    assert message.startswith("LocalProtocolError: Illegal header value")
    assert "could not verify publisher trust status" in misleading


# What a user sees whose system no variant serves: (system, exception, text). docs/hub.md explains each of them.
SYSTEMS = {
    "torch 2.10": (
        "torch_version='2.10.0'",
        "Torch stable ABI version (2.11) is too new for environment Torch version (2.10)",
    ),
    "CUDA 12.4": ("cuda='12.4'", "CUDA version (12.6) is not compatible with system CUDA version (12.4)"),
    "CUDA 14.0": ("cuda='14.0'", "CUDA version (13.2) is not compatible with system CUDA version (14.0)"),
    "32-bit ARM": ("machine='armv7l'", "CPU (aarch64) does not match system CPU (armv7l)"),
    "macOS": ("system='Darwin'", "OS (linux) does not match system OS (darwin)"),
    "ROCm": ("hip='7.1'", "backend (cpu) does not match selected backend (rocm71)"),
    "sm_70": ("cuda='13.0', capability=(7, 0)", "CUDA capability 7.0 of the current device is not supported"),
}  # fmt: skip
CHOICES = {
    "cuda='12.6'": "cu126", "cuda='12.9'": "cu126", "cuda='13.0'": "cu130", "cuda='13.1'": "cu130",
    "cuda='13.2'": "cu132", "cuda='13.3'": "cu132", "torch_version='2.15.0'": "cpu",
    "machine='aarch64'": "cpu", "cuda='13.2', machine='aarch64'": "cu132",
}  # fmt: skip

PRETEND = """
import json, platform
import kernels.variants, kernels.archs, torch.version
real = torch.__version__, torch.version.cuda, torch.version.hip, platform.machine, platform.system
def pretend(torch_version=real[0], cuda=None, hip=None, machine="x86_64", system="Linux", capability=(9, 0)):
    torch.__version__, torch.version.cuda, torch.version.hip = torch_version, cuda, hip
    platform.machine, platform.system = lambda: machine, lambda: system
    torch.cuda.is_available = lambda: cuda is not None
    torch.cuda.get_device_capability = lambda *_: capability
    torch.backends.mps.is_available = lambda: False
answers = {}
for system in %r:
    eval(f"pretend({system})")
    try:
        accepted = [d.variant.variant_str for d in kernels.get_kernel_variants(REPO, version=1)
                    if isinstance(d, kernels.VariantAccepted)]
        answers[system] = {"has": kernels.has_kernel(REPO, version=1), "best": accepted[:1], "error": ""}
        if not answers[system]["has"]:
            kernels.get_kernel(REPO, version=1)
    except Exception as error:
        answers[system]["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(answers))
"""


def test_which_variant_is_chosen(client: Client):
    systems = [*CHOICES, *(system for system, _ in SYSTEMS.values())]
    answers = json.loads(client.run(f"REPO = {TRUSTED!r}\n" + PRETEND % systems))
    for system, compute in CHOICES.items():
        (best,) = answers[system]["best"]
        machine = "aarch64" if "aarch64" in system else "x86_64"
        assert best == f"torch-stable-abi211-{compute}-{machine}-linux" and answers[system]["has"], system
    for name, (system, text) in SYSTEMS.items():
        assert not answers[system]["has"], name
        kind = "RuntimeError: Kernel" if "capability" in system else "FileNotFoundError: Cannot find a build variant"
        assert answers[system]["error"].startswith(kind) and text in answers[system]["error"], answers[system]


# Texts of the loader that the tests above see; docs/hub.md tells what to do about each.
MESSAGES = [
    "Cannot find a build variant for this system", "is not from a trusted publisher",
    "could not verify publisher trust status", "Illegal header value", "is not available in the local cache",
    "Cannot find a local snapshot", "Version 7 not found, available versions: 1",
    "A kernel version or revision must be specified", "You are using version 1 of",
    *(text for _, text in SYSTEMS.values()),
]  # fmt: skip
DOCS = (ROOT / "docs" / "hub.md").read_text()
CUDA_130 = "torch-stable-abi211-cu130-x86_64-linux"  # the example in the docs


def test_docs_explain_every_error():
    rows = re.findall(r"^\| `(.*?)`[^|]*\| (.+) \|$", DOCS.partition("## When it does not load")[2], re.MULTILINE)
    assert {text for text, _ in rows} >= set(MESSAGES)


@pytest.mark.extended
def test_docs_snippets(client: Client, hub: HubServer, tmp_path: Path):
    """Every Python block of docs/hub.md and of the card, against this Hub; the local build in a process of its own."""
    client.cwd = tmp_path
    (tmp_path / "build").symlink_to(ROOT / "build")
    project = make_project(tmp_path / "project", UNTRUSTED)
    hub.trusted.add("org")
    assert client.cli(["lock", str(project)]) == [""]
    hub.trusted.remove("org")
    shutil.copyfile(project / "kernels.lock", tmp_path / "kernels.lock")
    card = pytest.importorskip("jinja2").Template((ROOT / "CARD.md").read_text()).render(repo_id=UNTRUSTED, version=1)
    blocks = re.findall(r"```python\n(.*?)```", DOCS + card, re.DOTALL)
    assert len(blocks) >= 8
    commit = hub.repository(UNTRUSTED).branches["v1"]
    blocks = [block.replace("COMMIT", commit).replace(CUDA_130, built_variant("cpu").name) for block in blocks]
    use = "if 'ltx' in globals(): assert ltx.rmsnorm(torch.ones(1, 4)).sum().round() == 4; del ltx\n"
    copied = [block for block in blocks if "shutil.copyfile" in block]  # of the same ops as the one that is downloaded
    local = [block for block in blocks if "get_local_kernel" in block and block not in copied]
    for group in (copied, local, [block for block in blocks if block not in copied + local]):
        assert group
        for block, output in zip(group, client.outcomes(*(block + use for block in group)), strict=True):
            assert "Error" not in output, f"{block}\n{output}"
            if "get_kernel_variants" in block:
                assert output.splitlines()[0] == f"{built_variant('cpu').name} fits"
            if "verify_variant" in block:
                assert output.count("SignatureBundleMissing()") == 8


@pytest.mark.extended
def test_example(client: Client):
    """examples/hub_kernels.py: what the Hub gives is used, what it does not give is said and left out."""
    script = str(ROOT / "examples" / "hub_kernels.py")
    online = client.process(script, "--repo-id", TRUSTED)
    assert online.returncode == 0, online.stdout + online.stderr
    assert f"{TRUSTED}, version 1, from the Hub\n  rmsnorm" in online.stdout
    assert "left out: could not be fetched" in online.stdout  # this Hub has no kernels-community
    offline = client.process(script, "--repo-id", "nobody/ltx-kernels", "--build", str(ROOT / "build"), offline=True)
    assert offline.returncode == 0, offline.stdout + offline.stderr
    assert "could not be fetched; going on with the local build" in offline.stdout
    for result in (online, offline):
        assert "WRONG" not in result.stdout and "2 nn.RMSNorm replaced" in result.stdout
        assert len(re.findall(r"difference \S+   ok$", result.stdout, re.MULTILINE)) == 4


BENCHMARK = """\
import torch
from kernels.benchmark import Benchmark

class RMSNorm(Benchmark):
    seed = 1
    def setup_small(self):
        self.x = torch.randn(8, 64, device=self.device)
        self.out = torch.empty_like(self.x)
    def benchmark_small(self):
        self.kernel.rmsnorm(self.x, out=self.out)
    def verify_small(self):
        return torch.nn.functional.rms_norm(self.x, (64,), eps=1e-6)
"""


def kernels_benchmark(directory: Path, output: Path) -> list[dict[str, Any]]:
    pytest.importorskip("tabulate", reason="NOT RUN: `kernels benchmark` needs tabulate")
    command = ["benchmark", "./", "--iterations", "3", "--warmup", "1", "--output", str(output)]
    process = subprocess.run(
        [sys.executable, "-c", "from kernels.cli import main; main()", *command],
        capture_output=True, text=True, check=False, cwd=directory,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return json.loads(output.read_text())["results"]


@pytest.mark.extended
def test_benchmark_command(tmp_path: Path):
    """`kernels benchmark ./` runs the benchmarks/benchmark*.py of a checkout on its build/, and compares results."""
    (tmp_path / "build").symlink_to(ROOT / "build")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "benchmark.py").write_text(BENCHMARK)
    (result,) = kernels_benchmark(tmp_path, tmp_path / "result.json")
    assert result["workload"] == "RMSNorm.small" and result["verified"] is True
    assert result["timingResults"]["iterations"] == 3


@pytest.mark.slow
def test_benchmarks_of_this_package(tmp_path: Path):
    if not (ROOT / "benchmarks" / "benchmark.py").is_file():
        pytest.skip("NOT RUN: there is no benchmarks/benchmark.py")
    results = kernels_benchmark(ROOT, tmp_path / "result.json")
    assert results and all(result["verified"] is True for result in results)
    assert {f"Compiled.{op}" for op in ("adaln_rmsnorm", "gated_residual_adaln_rmsnorm")} <= {
        result["workload"] for result in results
    }


@pytest.mark.parametrize(
    "what",
    [
        "download from huggingface.co (network): a Hub on this machine stands in for it",
        "signatures by Sigstore (network, and a log-in): the digest part of verification is tested",
        "kernel-builder upload (network, and a token)",
        "nix build of any variant (network): CI on GitHub, .github/workflows/build.yml",
    ],
)
def test_not_run_here(what: str):
    pytest.skip(f"NOT RUN: {what}")
