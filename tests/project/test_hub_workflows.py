"""The workflows in .github: pinned, with few rights, and made of commands that also run locally."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.build_checks import ROOT

yaml = pytest.importorskip("yaml")

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINS = {
    "actions/checkout": "3d3c42e5aac5ba805825da76410c181273ba90b1",
    "DeterminateSystems/nix-installer-action": "ef8a148080ab6020fd15196c2084a2eea5ff2d25",
    "cachix/cachix-action": "5f2d7c5294214f71b873db4b969586b980625e71",
    "actions/upload-artifact": "043fb46d1a93c77aae656e7c1c64a875d1fc6a0a",
    "actions/download-artifact": "3e5f45b2cfb9172054b4087a40e8e0b5a5461e7c",
    "actions/setup-python": "5fda3b95a4ea91299a34e894583c3862153e4b97",
    "sigstore/cosign-installer": "6f9f17788090df1f26f669e9d70d6ae9567deba6",
}
# Rights beyond reading the repository.
RIGHTS = {("release.yml", "sign"): {"contents": "read", "id-token": "write"}}
# The jobs that may sign or upload, each with all that it runs.
PRIVILEGED = {
    "sign": ["actions/checkout", "actions/setup-python", "sigstore/cosign-installer", "actions/download-artifact",
             "make check-complete sign", "actions/upload-artifact"],
    "upload": ["actions/checkout", "actions/setup-python", "DeterminateSystems/nix-installer-action",
               "cachix/cachix-action", "actions/download-artifact", "make check-complete", "make upload"],
}  # fmt: skip


def load(workflow: Path) -> dict[str, Any]:
    return yaml.load(workflow.read_text(), Loader=yaml.BaseLoader)  # in YAML 1.1 the key `on` is a boolean


def steps(workflow: Path) -> list[tuple[str, dict[str, Any]]]:
    jobs = load(workflow)["jobs"].items()
    return [(name, step) for name, job in jobs for step in job.get("steps", [])]


def test_there_are_five():
    assert [w.name for w in WORKFLOWS] == ["build.yml", "gpu.yml", "nightly.yml", "release.yml", "test.yml"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda w: w.name)
def test_actions_are_pinned(workflow: Path):
    for line in re.findall(r"uses: *(.*)", workflow.read_text()):
        if line.startswith("./"):
            assert (ROOT / line).is_file()
            continue
        match = re.fullmatch(r"([\w/-]+)@([0-9a-f]{40}) # v[\d.]+", line)
        assert match is not None, f"{line}: pin a commit, and name its version in a comment"
        assert PINS[match[1]] == match[2]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda w: w.name)
def test_rights(workflow: Path):
    content = load(workflow)
    assert content["permissions"] == {"contents": "read"}
    assert content["concurrency"]["group"]
    assert "pull_request_target" not in content["on"], "it runs a stranger's code with this repository's secrets"
    for name, job in content["jobs"].items():
        assert job.get("permissions") == RIGHTS.get((workflow.name, name))
        assert "uses" in job or int(job["timeout-minutes"]) > 0
    for _, step in steps(workflow):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] == "false"
        if "pull_request" in content["on"]:
            assert "secrets." not in str(step)


def jobs(name: str) -> dict[str, Any]:
    return load(ROOT / ".github" / "workflows" / name)["jobs"]


def test_a_release_goes_through_every_check():
    """Each job waits for the one before: a wrong tag builds nothing, nothing unchecked is signed."""
    release = jobs("release.yml")
    assert [(name, job.get("needs")) for name, job in release.items()] == [
        ("check", None), ("build", "check"), ("stage", "build"), ("sign", "stage"), ("upload", "sign"),
    ]  # fmt: skip
    assert release["build"]["uses"] == "./.github/workflows/build.yml"
    (check,) = (step for step in release["check"]["steps"] if "run" in step)
    assert check["run"] == "make check-release" and check["env"] == {"TAG": "${{ github.ref_name }}"}
    assert not any("if" in part for job in release.values() for part in (job, *job.get("steps", [])))
    assert [step["run"] for step in release["stage"]["steps"] if "run" in step] == [
        "make check-complete card check-complete"
    ]
    build = jobs("build.yml")
    assert [(name, job.get("needs")) for name, job in build.items()] == [
        ("variants", None), ("build", "variants"), ("gather", "build"),
    ]  # fmt: skip
    assert [step["run"] for step in build["gather"]["steps"] if "run" in step] == ["make check-complete check-variants"]
    assert [step["run"] for step in build["build"]["steps"] if "run" in step] == ["make nix-build check-variants"]


def test_rights_are_held_by_the_steps_that_need_them():
    """The jobs that sign and upload wait for approval, run nothing else, and install no Python package."""
    for name, job in jobs("release.yml").items():
        text = str(job)
        if name not in PRIVILEGED:
            assert "environment" not in job and "secrets." not in text and "id-token" not in text, name
            continue
        assert job["environment"] == "release"
        assert [step.get("run") or step["uses"].split("@")[0] for step in job["steps"]] == PRIVILEGED[name]
    for name in WORKFLOWS:
        holders = [step["run"] for _, step in steps(name) if "HF_TOKEN" in str(step)]
        assert holders == {"release.yml": ["make upload"], "gpu.yml": ["make gpu-job"]}.get(name.name, []), name
    makefile = (ROOT / "Makefile").read_text()
    for target in ("check-complete", "check-release", "sign", "upload"):
        assert re.search(rf"^{target}:  ## .*\n\t\$\(RELEASE\) ", makefile, re.MULTILINE), f"{target} makes .venv"


def test_card_is_made_with_checked_packages():
    """What it needs has versions and hashes, and the environment takes nothing else."""
    makefile, script = (ROOT / "Makefile").read_text(), (ROOT / "tools" / "venv.sh").read_text()
    assert "REQUIREMENTS=requirements/card.txt tools/venv.sh .venv-card" in makefile.partition("\ncard:")[2]
    assert 'pip install -qq --require-hashes --only-binary :all: -r "$here/$REQUIREMENTS"\n  exit\n' in script
    wanted = (ROOT / "requirements" / "card.in").read_text()
    pinned = re.findall(
        r"^(\S+==\S+) \\\n    --hash=sha256:[0-9a-f]{64}", (ROOT / "requirements/card.txt").read_text(), re.M
    )
    assert pinned == re.findall(r"^\w\S+==\S+$", wanted, re.M) and len(pinned) == 2


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda w: w.name)
def test_commands_run_locally_too(workflow: Path):
    """One make command, or one script, without anything that GitHub would fill in: values come by the environment."""
    for name, step in steps(workflow):
        if "run" not in step:
            continue
        words = step["run"].split()
        assert "${{" not in step["run"] and "\n" not in step["run"].strip()
        if words[0] == "make":
            given = [word for word in words[1:] if "=" not in word]
            assert given and set(given) <= make_targets(), f"{workflow.name}, {name}: {step['run']}"
        else:
            assert words == [".ci/run"] and (ROOT / words[0]).stat().st_mode & 0o100


def test_actionlint():
    actionlint = shutil.which("actionlint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if actionlint is None:
        pytest.skip("NOT RUN: actionlint is not installed (`make actionlint` installs it, from GitHub, and runs it)")
    result = subprocess.run([actionlint, *map(str, WORKFLOWS)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_gpu_job():
    """Without a token it says that nothing was run; a dry run shows the job, which is given no secret."""
    hf = shutil.which("hf", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hf is None or not (ROOT / ".git").exists():
        pytest.skip("NOT RUN: it needs the hf command, and a git checkout")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "DRY_RUN"))}
    environment |= {
        "FLAVOR": "h200",
        "GITHUB_REPOSITORY": "someone/ltx-kernels",
        "HF": hf,
    }
    script = str(ROOT / "tools" / "gpu_job.sh")
    result = subprocess.run([script], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "NOT RUN: GPU tests on h200: no HF_TOKEN\n"
    environment |= {"DRY_RUN": "1", "HF_TOKEN": "hf_secret"}
    result = subprocess.run([script], env=environment, capture_output=True, text=True, check=True)
    assert re.search(r"flavor\s+h200", result.stdout) and "(dry run) Job not submitted." in result.stdout
    assert "bash -euc 'git clone" in result.stdout and "https://github.com/someone/ltx-kernels" in result.stdout
    assert "hf_secret" not in result.stdout and "secrets" not in result.stdout
    environment["VARIANTS_FROM"] = "someone/ltx-kernels@v1"
    published = subprocess.run([script], env=environment, capture_output=True, text=True, check=True).stdout
    assert "hf download" in published and "--revision" in published and "make test-all" not in published
    assert "make test-all" in result.stdout


@pytest.mark.parametrize("source", ["someone/ltx-kernels", "someone/ltx-kernels@", "@v1"])
def test_a_gpu_job_of_variants_needs_their_revision(source: str, tmp_path: Path):
    """A job that would fail on the GPU is not submitted."""
    environment = {**os.environ, "VARIANTS_FROM": source, "HF_TOKEN": "hf_secret", "HF": str(tmp_path / "none")}
    script = str(ROOT / "tools" / "gpu_job.sh")
    result = subprocess.run([script], env=environment, capture_output=True, text=True, check=False)
    expected = f"error: VARIANTS_FROM: expected owner/name@revision, such as owner/name@v1, got {source}\n"
    assert (result.returncode, result.stdout, result.stderr) == (1, "", expected)
