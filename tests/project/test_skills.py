"""skills/: what the folders hold, that their scripts run, and that the kernel templates compile and are right.

The Python blocks of their pages run in tests/project/test_docs.py.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.build_checks import ROOT, builder
from torch import Tensor

SKILLS = sorted(path.parent for path in (ROOT / "skills").glob("*/SKILL.md"))
SCRIPTS = sorted(path for skill in SKILLS for path in (skill / "scripts").glob("*_*.py"))
TEMPLATES = ROOT / "skills" / "cuda-kernels" / "references" / "kernel-templates.md"
TINY = ["--model", "tiny", "--num-frames", "9", "--height", "64", "--width", "96"]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT / "skills").as_posix()


# ---- Folders


def held(skill: Path) -> list[str]:
    """Every file and every link of a skill's folder. Links to directories are not followed."""
    found = []
    for folder, directories, files in os.walk(skill):
        directories[:] = [name for name in directories if name != "__pycache__"]
        links = [name for name in directories if (Path(folder) / name).is_symlink()]
        found += [(Path(folder) / name).relative_to(skill).as_posix() for name in (*files, *links)]
    return sorted(found)


@pytest.mark.parametrize("skill", SKILLS, ids=name_of)
def test_manifest_lists_the_folder(skill: Path):
    assert (skill / "manifest.txt").read_text().splitlines() == held(skill)


@pytest.mark.parametrize("skill", SKILLS, ids=name_of)
def test_front_matter(skill: Path):
    yaml = pytest.importorskip("yaml")
    text = (skill / "SKILL.md").read_text()
    begin, front, body = text.split("---\n", 2)
    assert begin == "" and body.lstrip().startswith("# ") and text.count("\n") < 500
    fields = yaml.safe_load(front)
    assert fields["name"] == skill.name and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", fields["name"])
    assert 0 < len(fields["description"]) <= 1024 and len(fields["name"]) <= 64
    assert set(fields) == {"name", "description", "license", "compatibility", "allowed-tools", "argument-hint"}
    assert all(isinstance(value, str) for value in fields.values()) and len(fields["compatibility"]) <= 500
    assert fields["license"] == builder.load_project().license


def links(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return {target for target in targets if not re.match(r"https?:|#", target)}


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The skills as the documented command copies them."""
    folder = tmp_path_factory.mktemp("skills")
    command = f"cp -rL {ROOT}/skills/cuda-kernels {ROOT}/skills/h100-diffusers-kernels {folder}"
    subprocess.run(command.split(), check=True)
    return folder


def test_the_documented_command_is_the_one_that_is_tested():
    command = "mkdir -p ~/.claude/skills && cp -rL skills/cuda-kernels skills/h100-diffusers-kernels "
    for page in ("skills/README.md", "skills/cuda-kernels/SKILL.md", "skills/h100-diffusers-kernels/SKILL.md"):
        assert f"\n{command}" in (ROOT / page).read_text(), page


def test_links_lead_somewhere(installed: Path):
    """In the repository and in a copy, where the links to examples/ and benchmarks/ are folders."""
    for page in sorted((ROOT / "skills").glob("**/*.md")):
        copy = installed / page.relative_to(ROOT / "skills")
        for target in links(page):
            file, _, anchor = target.partition("#")
            goal = page.parent / file if file else page
            assert goal.exists(), f"{page}: {target}"
            assert not copy.exists() or (copy.parent / file).exists(), f"{copy}: {target}"
            assert not anchor or anchor in anchors(goal), f"{page}: {target}"


def test_a_skill_names_all_its_references():
    for skill in SKILLS:
        text = (skill / "SKILL.md").read_text()
        for file in held(skill):
            if file.startswith("references/") or re.fullmatch(r"scripts/\w+_\w+\.py", file):
                assert file in text, f"{skill.name}/SKILL.md does not name {file}"


# ---- Scripts


def run(
    script: Path, *arguments: str, timeout: float = 300, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """Runs a script with these variables; None takes one away."""
    wanted = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200", **environment}
    variables = {name: value for name, value in wanted.items() if value is not None}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=variables, check=False)


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_help(script: Path):
    """It shows the script's own text, and answers before torch is imported."""
    result = run(script, "--help")
    (docstring,) = re.findall(r'^#!.*\n"""(.*?)\n', script.read_text())
    assert result.returncode == 0 and docstring in result.stdout and "usage: " + script.name in result.stdout
    times = run(script, "--help", PYTHONPROFILEIMPORTTIME="1").stderr
    assert "importlib" in times and not re.search(r"\| +torch$", times, re.MULTILINE)


def script_of(name: str) -> Path:
    (script,) = [path for path in SCRIPTS if path.name == name]
    return script


def test_defaults_of_the_clip(monkeypatch: pytest.MonkeyPatch):
    """generate_video.py's parser takes them, and the script's text lists them. A CPU keeps the parser's small sizes."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.syspath_prepend(str(ROOT / "skills" / "cuda-kernels" / "scripts"))
    import generate_video

    script = importlib.import_module("benchmark_example")
    monkeypatch.setattr(sys, "argv", ["benchmark_example.py", "--no-optimized-kernels", "--device", "cpu"])
    assert script.defaults() == script.DEFAULTS.split()
    monkeypatch.setattr(sys, "argv", ["benchmark_example.py", "--no-optimized-kernels", "--device", "cuda"])
    args = generate_video.make_parser().parse_args(script.defaults())
    assert (args.frames, args.height, args.width, args.steps, args.guidance_scale) == (161, 512, 768, 50, 4.5)
    assert (args.seed, args.warmup_iterations, args.batch_size) == (42, 2, 1)
    monkeypatch.setattr(sys, "argv", ["benchmark_example.py", "--graphs", "auto", "--use-optimized-kernels"])
    assert "--warmup-iterations" not in script.defaults()
    text = " ".join(script.__doc__.split())
    assert script.DEFAULTS in text and script.ON_A_GPU in text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_table_of_options(device: str, monkeypatch: pytest.MonkeyPatch):
    """Every option of the parser stands in SKILL.md, with the default that it has on this device."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.syspath_prepend(str(ROOT / "skills" / "cuda-kernels" / "scripts"))
    import generate_video
    import ltx_pipeline

    script = importlib.import_module("benchmark_example")
    page = (ROOT / "skills" / "cuda-kernels" / "SKILL.md").read_text()
    table = page.partition("## Options of benchmark_example.py\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `--")]
    parser = generate_video.make_parser()
    known = {option for action in parser._actions for option in action.option_strings}
    named = {option for row in rows for option in re.findall(r"`(--[\w-]+)`", row[0])}
    assert named == known - {"-h", "--help", "--frames"}
    monkeypatch.delenv("MODEL", raising=False)
    monkeypatch.setattr(ltx_pipeline.torch.cuda, "is_available", lambda: device == "cuda")
    monkeypatch.setattr(ltx_pipeline.torch.cuda, "device_count", lambda: 1)
    given = script.DEFAULTS if device == "cpu" else f"{script.ON_A_GPU} {script.DEFAULTS}"
    args = vars(ltx_pipeline.parse(parser, given.split()))
    of_option = {option: action.dest for action in parser._actions for option in action.option_strings}
    words = {"off": (None, False), "all": (list(generate_video.COMPONENTS),)}
    checked = 0
    for options, *cells in rows:
        cell = (cells[1] if device == "cuda" and len(cells) > 1 else "") or cells[0]
        for option in re.findall(r"`(--[\w-]+)`", options):
            value = args[of_option[option]]
            if re.fullmatch(r"`.*`|[\d.]+", cell.strip(" |")):
                shown = str(value).removeprefix(f"{Path.cwd()}/")
                assert shown == cell.strip(" |`"), option
                checked += 1
            elif cell.strip(" |") in words:
                assert value in words[cell.strip(" |")], option
                checked += 1
    assert (
        checked == len(known - {"-h", "--help", "--frames"}) - 4
    )  # two are words of a sentence, two choose the kernels


CASES: dict[str, tuple[list[str], list[str]]] = {
    "benchmark_example.py": (
        [*TINY, "--steps", "2", "--warmup-iterations", "0"],
        [
            "defaults that differ",
            "optimized kernels",
            "LTXVideoTransformerBlock",
            "iterations per second",
            "peak memory",
        ],
    ),
    "benchmark_rmsnorm.py": (["--shapes", "2x4x64", "--no-compile"], ["2x4x64", "PASS", "of copy"]),
    "ltx_kernel_injection_example.py": (
        [*TINY, "--steps", "2"],
        ["optimize, then offload (group)", "offload, then optimize (group)", "the stock bits"],
    ),
    "transformers_injection_example.py": (["--prompt", "4", "--tokens", "2"], ["LlamaRMSNorm", "tokens/s", "PASS"]),
    "huggingface_kernels_example.py": ([], ["kernels-community/activation", "adaln_rmsnorm", "2 nn.RMSNorm replaced"]),
    "profile_example.py": (TINY, ["matrix product", "LTXAttention", "RMSNorm", "aten::addmm"]),
    "new_project.py": ([], ["kernel_src/common.cuh", "torch-ext/my_kernels/__init__.py", "build.toml"]),
    "try_kernel.py": (["--no-compile"], ["bfloat16, views: error", "a copy of the same bytes", "PASS"]),
    "benchmark_h100.py": (["--tiny"], ["rmsnorm", "geglu", "PASS"]),
}


Here = Callable[..., tuple[int, str]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_thread: None) -> Here:
    """Runs a script in this process, where its imports are done: its status, and what it printed."""

    def run_here(name: str, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [str(script_of(name)), *arguments])
        monkeypatch.setattr(sys, "path", [str(script_of(name).parent), *sys.path])
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        capsys.readouterr()
        try:
            runpy.run_path(str(script_of(name)), run_name="__main__")
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        return status, capsys.readouterr().out

    return run_here


@pytest.mark.usefixtures("ltx")
@pytest.mark.parametrize("name", [script.name for script in SCRIPTS])
def test_tiny_run(name: str, here: Here, device: str, tmp_path: Path):
    arguments, expected = CASES[name]
    if name == "benchmark_example.py":
        arguments = [*arguments, "--output", str(tmp_path / "clip.mp4")]
    if name == "new_project.py":
        arguments = [str(tmp_path / "my-kernels")]
    if device == "cuda":
        expected = [text.replace("(group)", "(model)") for text in expected]
    if name == "huggingface_kernels_example.py":  # in a process that asks no network
        result = run(script_of(name), *arguments)
        status, output = result.returncode, result.stdout
    else:
        status, output = here(name, *arguments)
    assert status == 0, output
    for text in expected:
        assert text in output, text
    assert "FAIL" not in output and "WRONG" not in output


def test_without_a_build(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The stock modules run, and the reason is said; asked for the kernels, it is an error."""
    monkeypatch.setenv("LOCAL_KERNELS", f"org/ltx-kernels={tmp_path}")
    arguments = [*TINY, "--steps", "2", "--warmup-iterations", "0", "--output", str(tmp_path / "clip.mp4")]
    status, output = here("benchmark_example.py", *arguments)
    assert status == 0 and "the stock modules run: org/ltx-kernels could not be loaded" in output
    status, output = here("benchmark_example.py", "--use-optimized-kernels", *arguments)
    assert status == 1 and "could not be loaded" in output


def test_a_result_that_cannot_be_written(here: Here, tmp_path: Path):
    """It is refused before anything is measured."""
    for name in ("benchmark_h100.py", "benchmark_rmsnorm.py"):
        assert here(name, "--json", str(tmp_path)) == (2, "")


def test_an_installed_copy_without_a_build_says_what_to_do(installed: Path):
    """It has no Makefile. Without LOCAL_KERNELS the loader looks into a folder that is not there."""
    if importlib.util.find_spec("ltx_fused"):
        pytest.skip("NOT RUN: pip has installed the package")
    scripts = installed / "cuda-kernels" / "scripts"
    for script in ("benchmark_h100.py", "benchmark_rmsnorm.py", "try_kernel.py", "huggingface_kernels_example.py"):
        result = run(scripts / script, LOCAL_KERNELS=None)
        output = result.stdout + result.stderr
        assert result.returncode == 1 and "Traceback" not in output and "make build" not in output, output
        assert "Set LOCAL_KERNELS=org/ltx-kernels=/path/to/build, or `pip install` the package" in output, output


def test_an_installed_copy_needs_a_build_and_no_checkout(installed: Path, ltx: ModuleType, tmp_path: Path):
    build = Path(ltx.__file__).parent.parent
    script = installed / "cuda-kernels" / "scripts" / "benchmark_rmsnorm.py"
    result = run(script, "--shapes", "8x64", "--no-compile", LOCAL_KERNELS=f"org/ltx-kernels={build}")
    assert result.returncode == 0 and "PASS" in result.stdout, result.stderr
    (installed / "cuda-kernels" / "scripts" / "examples").rename(tmp_path / "examples")
    try:
        result = run(script)
        assert result.returncode == 1 and "cp -rL" in result.stderr
    finally:
        (tmp_path / "examples").rename(installed / "cuda-kernels" / "scripts" / "examples")


TRIAL = """
import torch
import torch.nn.functional as F

SIZES, SMALL, LABEL = (64,), (1, 7), "rows"


def inputs(random, rows):
    return random(rows, 64), random(64)


def plain(x, weight):
    return F.rms_norm(x, (64,), weight, 1e-6)


def kernel(x, weight):
    if not x.is_contiguous():
        raise RuntimeError("x: expected a contiguous tensor")
    return KERNEL
"""


@pytest.mark.usefixtures("ltx")
@pytest.mark.parametrize(
    "kernel, expected",
    [
        ("plain(x, weight)", "PASS"),
        (
            "F.rms_norm(x, (64,), weight, 1e-2)",
            "FAIL: torch.float32, contiguous, size 1: this kernel: expected an error",
        ),
        ("plain(x, weight).nan_to_num(posinf=0)", "FAIL: torch.float32, one infinity, size 1: expected NaN and"),
        (
            "(y := plain(x, weight)).where(~y.isnan(), y.new_tensor(torch.inf))",
            "one infinity, size 1: expected NaN and",
        ),
        ("plain(x, weight).add_(x.mul_(0))", "size 1: expected the inputs as they were, the kernel wrote to one"),
        ("plain(x, weight) + 0.1 * (x.abs().amax() == 0)", "FAIL: torch.float32, zeros"),
        ("plain(x, weight)[:, :32]", "expected results of shapes [[1, 64]], got [[1, 32]]"),
        (
            "plain(x.float(), weight.float())",
            "FAIL: torch.float16, size 1: expected results of dtypes [torch.float16], as plain torch's, got",
        ),
        ("None", "FAIL: kernel: expected a tensor, or a tuple or list of tensors, got NoneType"),
        (
            "[plain(x, weight), 1]",
            "FAIL: kernel: expected a tensor, or a tuple or list of tensors, got Tensor, int",
        ),
        ("F.rms_norm(x, (63,), weight)", "expected a result, since this is timed, got Expected weight to be of same"),
    ],
    ids=["right", "eps", "infinity", "nan", "inputs", "zeros", "shape", "dtype", "none", "no tensor", "refusal"],
)
def test_a_kernel_of_ones_own(here: Here, tmp_path: Path, kernel: str, expected: str):
    """Faults are told; a refused view is named; what passes is logged, a line for each size."""
    trial, log = tmp_path / "my_trial.py", tmp_path / "new" / "trials.jsonl"
    trial.write_text(TRIAL.replace("KERNEL", kernel))
    status, output = here("try_kernel.py", str(trial), "--no-compile", "--log", str(log), "--question", "does it pay?")
    assert (status == 0) == (expected == "PASS") and expected in output, output
    assert log.exists() == (status == 0)
    if status == 0:
        assert "views: error" in output and "refused: x: expected a contiguous tensor" in output
        for line in map(json.loads, log.read_text().splitlines()):
            assert line["question"] == "does it pay?" and {"plain torch", "this kernel"} < set(line["us"])
            assert line["kept"] in (None, True, False) and line["why"].startswith("the best of the others, plain torch")


def test_a_trial_that_lacks_something(here: Here, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trial, no_sizes = tmp_path / "my_trial.py", tmp_path / "no_sizes.py"
    trial.write_text("SIZES = SMALL = (1,)\nLABEL = 'rows'\n")
    no_sizes.write_text(TRIAL.replace("(1, 7)", "()"))
    for arguments in (
        [str(trial)],
        [str(no_sizes)],
        [str(tmp_path / "none.py")],
        ["--log", "x"],
        ["--log", "/dev/null/x", "--question", "does it pay?"],
    ):
        status, _ = here("try_kernel.py", *arguments)
        assert status == 2


def test_publishing_steps_are_the_guides():
    result = run(script_of("huggingface_kernels_example.py"), "--publishing")
    assert result.returncode == 0 and result.stdout.startswith("Publish") and "build.toml" in result.stdout


def test_a_verdict_can_fail(monkeypatch: pytest.MonkeyPatch):
    """The scripts that judge: an error above the limit, and nothing to judge, are told."""
    monkeypatch.syspath_prepend(str(ROOT / "skills" / "cuda-kernels" / "scripts"))
    verdict = importlib.import_module("transformers_injection_example").verdict
    stock = {"config": "eager", "error_vs_fp32": 1e-3}
    assert verdict([stock, {"config": "kernels", "error_vs_fp32": 1.4e-3}])[0]
    right, text = verdict([stock, {"config": "kernels", "error_vs_fp32": 1.6e-3}])
    assert not right and text.startswith("FAIL")
    assert verdict([stock])[1].startswith("NOT VERIFIED")
    stock = {"config": "eager", "error_vs_fp32": 0.0}  # in float32
    assert verdict([stock, {"config": "kernels", "error_vs_fp32": 4e-7}])[0]
    assert not verdict([stock, {"config": "kernels", "error_vs_fp32": 2e-4}])[0]


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_verdict_is_of_every_result(ltx: Any, here: Here, monkeypatch: pytest.MonkeyPatch, wrong: int):
    """Of an op with two, where either alone is further from float64 than plain torch's."""
    function = ltx.gated_residual_adaln_rmsnorm

    def a_bit_off(*arguments: Any, **options: Any) -> list[Any]:
        return [x * 1.01 if i == wrong else x for i, x in enumerate(function(*arguments, **options))]

    monkeypatch.setattr(ltx, "gated_residual_adaln_rmsnorm", a_bit_off)
    status, output = here("benchmark_h100.py", "--tiny", "--only", "gated_residual_adaln")
    assert status == 1 and "FAIL" in output and "PASS" not in output, output


# ---- Kernel templates


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project of the page, as new_project.py writes it: every block in the file that its first line names."""
    folder = tmp_path_factory.mktemp("templates") / "my-kernels"
    result = run(script_of("new_project.py"), str(folder))
    assert result.returncode == 0, result.stderr
    blocks = len(re.findall(r"^```(?!console)\w", TEMPLATES.read_text(), re.MULTILINE))
    assert result.stdout.count("wrote ") == blocks, "a block does not name its file"
    assert run(script_of("new_project.py"), str(folder)).returncode == 2  # it is not empty
    assert run(script_of("new_project.py"), str(folder.with_name("My_Kernels"))).returncode == 2  # no name of a kernel
    other = folder.with_name("fast-norm")
    assert run(script_of("new_project.py"), str(other)).returncode == 0
    assert 'name = "fast-norm"' in (other / "build.toml").read_text()
    assert (other / "torch-ext/fast_norm/__init__.py").is_file()
    sources = sorted(path.name for path in (folder / "kernel_src").glob("*.cu"))
    assert len(sources) == 7
    (folder / "all.cu").write_text("".join(f'#include "{name}"\n' for name in sources))
    return folder


@pytest.fixture(scope="module")
def toolkit() -> Any:
    found = builder.find_cuda()
    if found is None:
        pytest.skip("NOT RUN: the templates are not compiled: nvcc not found (python tools/build.py --cuda-from-pypi)")
    return found


def test_templates_are_a_project(templates: Path):
    project = builder.load_project(templates)
    assert project.name == "my-kernels" and project.python_name == "my_kernels"
    listed = {source for backend in ("cuda", "cpu") for kernel in project.kernels_for(backend) for source in kernel.src}
    assert listed == {path.relative_to(templates).as_posix() for path in (templates / "kernel_src").iterdir()}


def apply_blocks(page: Path, folder: Path) -> None:
    """Write the blocks of a page whose first line is `file:`, and insert those whose first line is `add to:`."""
    fence = re.compile(
        r"^```\w+\n(?://|#) (file|add to): (\S+)(?: before: (.*?))?\n(.*?)^```$", re.MULTILINE | re.DOTALL
    )
    for kind, name, line, code in fence.findall(page.read_text()):
        path = folder / name
        if kind == "add to":
            text = path.read_text()
            assert f"\n{line}\n" in text, (name, line)
            before, after = text.split(f"\n{line}\n", 1)
            code = f"{before}\n{code}{line}\n{after}"
        path.write_text(code)


def test_ops_in_python(tmp_path: Path, device: str):
    """The blocks of the page as one file, which Triton reads its kernels from; without a GPU those that need none."""
    page = (ROOT / "skills/cuda-kernels/references/python-ops.md").read_text()
    found = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert ["import triton" in code for code in found] == [False, True]
    program = tmp_path / "ops.py"
    program.write_text("\n".join(found if device == "cuda" else found[:1]))
    result = run(program)
    assert result.returncode == 0, result.stderr


@pytest.mark.extended
def test_the_worked_example(installed: Path, tmp_path: Path):
    """A GEGLU with bias from a copy of the skill alone: built, verified and injected, in a folder with nothing else."""
    scripts, page = installed / "cuda-kernels" / "scripts", installed / "cuda-kernels/references/worked-example.md"
    nothing = {"LOCAL_KERNELS": f"org/ltx-kernels={tmp_path / 'none'}", "PYTHONPATH": ""}

    def here(*command: str) -> str:
        result = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env={**os.environ, **nothing}, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    here(str(scripts / "new_project.py"), "my-kernels")
    apply_blocks(page, tmp_path / "my-kernels")
    assert "built" in here(str(scripts / "build.py"), "--project", "my-kernels", "--backend", "cpu")
    output = here(str(scripts / "try_kernel.py"), "geglu_trial.py", "--no-compile", "--log", "log", "--question", "?")
    assert output.rstrip().endswith("PASS") and output.count("contiguous: error") == 3
    assert all(json.loads(line)["kept"] in (None, True, False) for line in (tmp_path / "log").read_text().splitlines())
    assert "1 GEGLU patched" in here("inject_geglu.py")


def test_the_worked_example_on_the_host(installed: Path, tmp_path: Path, toolkit: Any):
    """Its CUDA source, by the command of the templates' page, with the header that is in the skill."""
    assert run(installed / "cuda-kernels/scripts/new_project.py", str(tmp_path / "my-kernels")).returncode == 0
    apply_blocks(installed / "cuda-kernels/references/worked-example.md", tmp_path / "my-kernels")
    page = (installed / "cuda-kernels/references/kernel-templates.md").read_text()
    (command,) = re.findall(r"^g\+\+ .*?host\.so$", page, re.MULTILINE | re.DOTALL)
    command = command.replace("../scripts", str(installed / "cuda-kernels/scripts")).replace("gelu.cu", "geglu.cu")
    command = command.replace("/usr/local/cuda/include", str(toolkit.nvcc.parent.parent / "include"))
    subprocess.run(["bash", "-c", command], cwd=tmp_path / "my-kernels", check=True)
    library = ctypes.CDLL(str(tmp_path / "my-kernels" / "host.so"))
    x, bias = randn(3, 64, dtype=torch.float32), randn(64, dtype=torch.float32, seed=1)
    out = torch.full((3, 32), torch.nan)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, bias, out)]
    function = library._ZN2my10geglu_biasENS_5DTypeEPKvS2_PvllS3_
    function(ctypes.c_int(0), *pointers, ctypes.c_int64(3), ctypes.c_int64(32), ctypes.c_void_p(None))
    a, b = (x.double() + bias.double()).chunk(2, -1)
    close(out, a * F.gelu(b))


def test_templates_compile(templates: Path, toolkit: Any):
    """All in one call, for one GPU; nothing spills, and rows move in accesses of 16 bytes."""
    command = [toolkit.nvcc, "-std=c++17", "-arch=sm_90", "-Xptxas=-v", "-I", "kernel_src", "-c", "all.cu"]
    process = subprocess.run(
        [*map(str, command), "-o", "all.o", "--keep", "--keep-dir", "."],
        cwd=templates, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0 and "warning" not in process.stderr, process.stderr
    spills = re.findall(r"(\d+) bytes spill", process.stderr)
    assert len(spills) > 100 and set(spills) == {"0"}
    kernels = re.split(r"^\.visible \.entry|^\.weak \.entry|^\.entry", (templates / "all.ptx").read_text(), flags=re.M)
    for kernel in kernels[1:]:
        if "attention_kernel" not in kernel.partition("\n")[0]:
            assert re.search(r"ld\.global(\.nc)?\.v4\.[bu]32", kernel), kernel.partition("\n")[0]


def test_binding_compiles(templates: Path, toolkit: Any):
    """Against torch's stable ABI."""
    ops = "_my_kernels_test"
    (templates / "registration.h").write_text(builder.REGISTRATION.format(ops=ops))
    torch_ = builder.find_torch((2, 11))
    includes = [*torch_.include, builder.python_include(), toolkit.nvcc.parent.parent / "include", "kernel_src", "."]
    flags = [f"-DTORCH_EXTENSION_NAME={ops}", "-DCUDA_KERNEL", "-DUSE_CUDA", "-DPy_LIMITED_API=0x03090000"]
    process = subprocess.run(
        ["g++", f"-std={torch_.cxx_standard}", "-fsyntax-only", "-Wall", "-DTORCH_TARGET_VERSION=0x020b000000000000",
         *flags, *(f"-I{path}" for path in includes), "torch-ext/torch_binding.cpp"],
        cwd=templates, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    text = (templates / "torch-ext" / "torch_binding.cpp").read_text()
    assert not re.search(r"pybind11|torch/extension|TORCH_LIBRARY\(|PyInit", text)


def test_package_of_the_templates_traces(templates: Path, monkeypatch: pytest.MonkeyPatch):
    """The Python file of the page, with ops of the binding's schemas that have no kernel: their fakes know shapes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    binding = re.sub(r'"\s+"', "", (templates / "torch-ext" / "torch_binding.cpp").read_text())
    schemas = re.findall(r'ops\.def\(\s*"([^"]+)"\)', binding)
    (templates / "torch-ext" / "my_kernels" / "_ops.py").write_text(
        'import torch\n\nlibrary = torch.library.Library("_my_kernels_test", "DEF")\n'
        f"for schema in {schemas}:\n    library.define(schema)\nops = torch.ops._my_kernels_test\n\n\n"
        'def add_op_namespace_prefix(name):\n    return f"_my_kernels_test::{name}"\n'
    )
    monkeypatch.syspath_prepend(str(templates / "torch-ext"))
    package = importlib.import_module("my_kernels")
    with FakeTensorMode():
        x, vector = torch.empty(2, 3, 64, dtype=torch.bfloat16), torch.empty(2, 64, dtype=torch.bfloat16)
        outputs = [package.gelu(x), *package.gated_residual_adaln_rmsnorm(x, x, vector, vector, vector)]
    assert [(o.shape, o.dtype) for o in outputs] == [(x.shape, x.dtype)] * 3
    assert sorted(package.__all__) == sorted(re.findall(r'ops\.impl\("(\w+)"', binding))
    sys.modules["my_kernels._ops"].library._destroy()


@pytest.fixture(scope="module")
def kernels(templates: Path, toolkit: Any) -> Any:
    """The kernels as functions on CPU tensors: compiled for the host, threads for threads."""
    header, library = ROOT / "tests" / "helpers" / "cuda_on_host.h", templates / "host.so"
    includes = ["-I", str(toolkit.nvcc.parent.parent / "include"), "-I", "kernel_src"]
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-x", "c++", "-include", str(header)]
    subprocess.run([*command, *includes, "all.cu", "-o", str(library)], cwd=templates, check=True)
    symbols = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True, check=True).stdout
    loaded = ctypes.CDLL(str(library))
    codes = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

    def call(name: str, dtype: torch.dtype, *arguments: Tensor | int | float) -> None:
        (symbol,) = re.findall(rf" T (_ZN2my{len(name)}{name}E\w+)", symbols)
        values: list[Any] = [ctypes.c_int(codes[dtype])]
        for argument in arguments:
            if isinstance(argument, Tensor):
                assert argument.is_contiguous()
                values.append(ctypes.c_void_p(argument.data_ptr()))
            else:
                values.append(ctypes.c_int64(argument) if isinstance(argument, int) else ctypes.c_float(argument))
        getattr(loaded, symbol)(*values, ctypes.c_void_p(None))

    return call


DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def close(got: Tensor, truth: Tensor, ulps: float = 1.0) -> None:
    """Within some units in the last place of the largest result, and of each."""
    eps = torch.finfo(got.dtype).eps
    error = (got.double() - truth).abs()
    floor = 16 * torch.finfo(torch.float32).eps * truth.abs().max()
    assert bool((error <= ulps * eps * truth.abs() + floor).all()), (error.max().item(), truth.abs().max().item())


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestTemplates:
    def test_gelu(self, kernels: Any, dtype: torch.dtype):
        for count in (16, 2085):  # the second has a rest, in the second block
            x = 3 * randn(count, dtype=dtype)
            out = torch.full_like(x, torch.nan)
            kernels("gelu", dtype, x, out, count)
            close(out, F.gelu(x.double(), approximate="tanh"))

    @pytest.mark.parametrize("width", [8, 1032, 2048])
    def test_moments(self, kernels: Any, dtype: torch.dtype, width: int):
        """The mean is large beside the deviation, which E[x^2] - E[x]^2 does not survive."""
        x = (100 + 3 * randn(3, width, dtype=torch.float64)).to(dtype)
        mean, rstd = torch.full((3,), torch.nan), torch.full((3,), torch.nan)
        kernels("moments", dtype, x, mean, rstd, 3, width, 1e-2)
        close(mean, x.double().mean(1), 8)
        close(rstd, (x.double().var(1, unbiased=False) + 1e-2).rsqrt(), 64)

    @pytest.mark.parametrize("width", [64, 1544])
    def test_fused_norm(self, kernels: Any, dtype: torch.dtype, width: int):
        batch, tokens, eps = 2, 3, 0.3
        x, residual = randn(batch, tokens, width, dtype=dtype), randn(batch, tokens, width, dtype=dtype, seed=1)
        gate, scale, shift = (randn(batch, width, dtype=dtype, seed=seed) for seed in (2, 3, 4))
        out, stream = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
        kernels(
            "gated_residual_adaln_rmsnorm",
            dtype,
            x,
            residual,
            gate,
            scale,
            shift,
            out,
            stream,
            batch,
            tokens,
            width,
            eps,
        )
        h = residual.double() + x.double() * gate.double()[:, None]
        close(stream, h)
        norm = h * (h.square().mean(-1, keepdim=True) + eps).rsqrt()
        close(out, norm * (1 + scale.double()[:, None]) + shift.double()[:, None])

    def test_rotary(self, kernels: Any, dtype: torch.dtype):
        batch, tokens, heads, width = 2, 5, 3, 16
        x, angle = randn(batch, tokens, heads, width, dtype=dtype), randn(tokens, width // 2, dtype=torch.float32)
        out = torch.full_like(x, torch.nan)
        kernels("rotary", dtype, x, angle.cos(), angle.sin(), out, batch, tokens, heads, width)
        rotation = torch.polar(torch.ones_like(angle, dtype=torch.float64), angle.double())[None, :, None]
        turned = torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * rotation
        close(out, torch.view_as_real(turned).flatten(-2))

    def test_swiglu(self, kernels: Any, dtype: torch.dtype):
        rows, width = 5, 1032
        x = 3 * randn(rows, 2 * width, dtype=dtype)
        out = torch.full((rows, width), torch.nan, dtype=dtype)
        kernels("swiglu", dtype, x, out, rows, width)
        gate, up = x.double().chunk(2, -1)
        close(out, F.silu(gate) * up)

    def test_quantize_rows(self, kernels: Any, dtype: torch.dtype, ltx: ModuleType):
        rows, width = 4, 1032
        x = randn(rows, width, dtype=dtype) * torch.tensor([1e-3, 1.0, 20.0, 0.0], dtype=dtype)[:, None]
        values, scales = torch.empty(rows, width, dtype=torch.float8_e4m3fn), torch.empty(rows, 1)
        kernels("quantize_rows", dtype, x, values.view(torch.uint8), scales, rows, width)
        expected_values, expected_scales = ltx.reference.quantize_rows(x)
        torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
        differ = values.float() != expected_values.float()
        assert differ.float().mean() < 1e-3  # next to a tie
        close((values.float() * scales)[~differ], (expected_values.double() * expected_scales.double())[~differ], 16)
        assert not values[3].float().any() and scales[3] > 0

    @pytest.mark.parametrize("width", [64, 128])
    def test_attention(self, kernels: Any, dtype: torch.dtype, width: int):
        """Queries that do not fill a block, keys that do not fill a tile, and a maximum that comes late."""
        batch, queries, keys, heads, scale = 2, 5, 37, 2, 0.3
        q = randn(batch, queries, heads, width, dtype=dtype)
        k, v = (randn(batch, keys, heads, width, dtype=dtype, seed=seed) for seed in (1, 2))
        k[:, 35] = 2 * q[:, 0]
        out = torch.full_like(q, torch.nan)
        kernels("attention", dtype, q, k, v, out, batch, queries, keys, heads, width, scale)
        a, b, c = (x.double().transpose(1, 2) for x in (q, k, v))
        truth = F.scaled_dot_product_attention(a, b, c, scale=scale).transpose(1, 2)
        close(out, truth, 4)


def test_result_files_of_the_skill_are_there():
    """A page that names a result file names one that exists; nothing measured is said of a GPU without such a file."""
    results = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
    for page in (ROOT / "skills").glob("**/*.md"):
        named = set(re.findall(r"benchmarks/results/([\w.-]+)", page.read_text()))
        assert named <= results, page
    assert json.loads((ROOT / "benchmarks/results/h200-ops.json").read_text())["meta"]["device"] == "NVIDIA H200"
