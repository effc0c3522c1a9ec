"""Pages, docs and skills: each code block runs here, or says above it why not; calls fit their signatures.

`<!-- needs a GPU -->` or `<!-- needs the network -->` on the line before a block is such a reason. A block that has one
and runs all the same, where that is missing, fails its test.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.build_checks import ROOT

FILES = [
    "README.md",
    "CARD.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *sorted(f.relative_to(ROOT).as_posix() for f in (ROOT / "docs").rglob("*.md")),
    *sorted(f.relative_to(ROOT).as_posix() for f in (ROOT / "skills").rglob("*.md")),
]
# Python blocks that need a Hub or a language model, and the test that runs every one of them.
RUN_ELSEWHERE = {
    "CARD.md": "tests/project/test_hub.py::test_docs_snippets",
    "docs/hub.md": "tests/project/test_hub.py::test_docs_snippets",
    "docs/layers.md": "tests/test_layers.py::test_docs",
    "docs/parallel.md": "tests/test_parallel.py::run_docs",
    "docs/serving.md": "tests/project/test_serve_ray.py::test_ray_data_of_the_docs",
    "skills/cuda-kernels/references/kernel-templates.md": "tests/project/test_skills.py::templates",
    "skills/cuda-kernels/references/python-ops.md": "tests/project/test_skills.py::test_ops_in_python",
    "skills/cuda-kernels/references/worked-example.md": "tests/project/test_skills.py::apply_blocks",
}
REASONS = ("needs a GPU", "needs the network")


@dataclass(frozen=True)
class Block:
    file: str
    line: int
    language: str
    reason: str | None
    code: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def blocks(file: str, *languages: str) -> list[Block]:
    text = (ROOT / file).read_text()
    found = []
    for match in re.finditer(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text[: match.start(2)].count("\n") + 1
        found.append(Block(file, line, match[2], match[1], match[3]))
    assert text.count("\n```") == 2 * len(found), f"{file}: a block that does not begin or end at the line's start"
    return [block for block in found if not languages or block.language in languages]


def test_every_block_has_a_known_language_and_reason():
    """A block without a language holds no code: it shows a text."""
    for block in (block for file in FILES for block in blocks(file)):
        of_the_skill = RUN_ELSEWHERE.get(block.file, "").startswith("tests/project/test_skills.py")
        compiled = ("cuda", "cpp", "toml", "nix", "console") if of_the_skill else ()
        assert block.language in ("python", "bash", "text", "mermaid", "", *compiled), block.place
        assert block.reason is None or (block.reason in REASONS and block.language == "python"), block.place
        if block.language in ("", "text", "mermaid"):
            with pytest.raises(SyntaxError):
                compile(block.code, block.place, "exec")
    for file, test in RUN_ELSEWHERE.items():
        name, _, function = test.partition("::")
        (source,) = re.findall(rf"^def {function}\(.*?(?=^\S|\Z)", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)
        assert "```" in source and not [block for block in blocks(file) if block.reason], file


# ---- Python


@pytest.fixture(scope="module")
def tiny(one_thread: None, device: str) -> Any:
    """The pipeline that each block gets in the place of the real one."""
    pytest.importorskip("diffusers")
    sys.path.insert(0, str(ROOT / "examples"))
    import ltx_pipeline

    pipe = ltx_pipeline.load_pipeline("tiny", torch.device(device), torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("file", [file for file in FILES if file not in RUN_ELSEWHERE and blocks(file, "python")])
def test_python_blocks_run(
    file: str,
    ltx: ModuleType,
    device: str,
    tiny: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """In their order, with the names that the page says are there, but for the model and the size of the clip."""
    from diffusers import LTXPipeline
    from helpers.language_models import forget_kernelized

    monkeypatch.setitem(sys.modules, "ltx_fused", ltx)
    monkeypatch.setattr(LTXPipeline, "from_pretrained", lambda *a, **k: SimpleNamespace(to=lambda device: tiny))
    bf16 = {"device": device, "dtype": torch.bfloat16}
    names: dict[str, Any] = {
        "ltx": ltx, "torch": torch, "pipe": tiny, "x": torch.randn(2, 16, 64, **bf16),
        "scale": torch.randn(2, 64, **bf16), "shift": torch.randn(2, 64, **bf16),
        "linear": torch.nn.Linear(64, 32, **bf16),
    }  # fmt: skip
    for block in blocks(file, "python"):
        code = block.code.replace("num_frames=49, height=512, width=768", "num_frames=9, height=64, width=96, **STEPS")
        names["STEPS"] = {} if "num_inference_steps" in code else {"num_inference_steps": 2}
        program = compile(code, block.place, "exec")
        runs = {None: True, "needs a GPU": device == "cuda", "needs the network": False}[block.reason]
        if runs:
            exec(program, names)
        else:
            with pytest.raises((RuntimeError, OSError, ValueError, AssertionError)):
                exec(program, names)
    ltx.restore(tiny)
    forget_kernelized()
    if file == "README.md":
        sites = {site.name: site.calls for site in names["report"].sites}
        assert sites["diffusers.LTXVideoTransformerBlock"] == 2 * len(tiny.transformer.transformer_blocks)
        assert "LTXVideoTransformerBlock" in capsys.readouterr().out and len(names["video"]) == 9
        expected = ltx.reference.adaln_rmsnorm(names["x"], None, names["scale"], names["shift"])
        torch.testing.assert_close(names["y"], expected)


# ---- Calls


def spans(file: str) -> Iterator[tuple[str, str]]:
    """(place, code) of each Python block, and of each piece of code within a sentence that Python can read."""
    for block in blocks(file, "python"):
        yield block.place, re.sub(r"\{\{.*?\}\}", "0", block.code)
    text = re.sub(r"^```.*?^```$", lambda m: "\n" * m[0].count("\n"), (ROOT / file).read_text(), flags=re.M | re.S)
    for match in re.finditer(r"`([^`\n]+)`", text):
        if re.fullmatch(r"[\w./-]+\.(py|md|cpp|cu|cuh|h|json|toml|yml)", match[1]):  # the name of a file
            continue
        try:
            ast.parse(match[1])
        except SyntaxError:
            continue
        yield f"{file}:{text[: match.start()].count(chr(10)) + 1}", match[1]


def misfits(ltx: ModuleType, code: str) -> list[str]:
    """Attributes of `ltx` that it does not have, and calls of public functions that their signature refuses."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("ltx."):
            try:
                eval(ast.unparse(node), {"ltx": ltx})
            except AttributeError as error:
                found.append(str(error))
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).removeprefix("ltx.").removeprefix("ltx_fused.")
        function = getattr(ltx, name, None) if name in ltx.__all__ else None
        if not inspect.isfunction(function):
            continue
        keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg is not None}
        shortened = any(isinstance(a, ast.Starred) or ast.unparse(a) == "..." for a in node.args)
        signature = inspect.signature(function)
        try:
            if shortened or len(keywords) < len(node.keywords) or (not node.args and not keywords):
                signature.bind_partial(**keywords)
            else:
                signature.bind_partial(*node.args, **keywords)
        except TypeError as error:
            found.append(f"{name}: {error}")
    return found


@pytest.mark.parametrize("file", FILES)
def test_calls_fit_their_signatures(file: str, ltx: ModuleType):
    """Also those that are not run: a misspelt name or argument in a sentence misleads as much as in a block."""
    for place, code in spans(file):
        assert misfits(ltx, code) == [], place


@pytest.mark.parametrize(
    "code", ["ltx.optimise(pipe)", "ltx.rmsnorm(x, w, 1e-6, 3, 4)", "geglu(x, precision=1)", "ltx.reference.rmsnom"]
)
def test_misfits_are_found(ltx: ModuleType, code: str):
    assert len(misfits(ltx, code)) == 1


def test_the_table_of_operations(ltx: ModuleType):
    """Every function, each with its arguments by their names in their order, but for some of the last."""
    page = (ROOT / "docs" / "ops.md").read_text()
    named = set(re.findall(r"`ltx\.(\w+)\(", page))
    for cell in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE):
        for text in re.findall(r"`(\w+\(.*?\))`", cell):
            call = ast.parse(text, mode="eval").body
            assert isinstance(call, ast.Call)
            name = ast.unparse(call.func)
            named.add(name)
            parameters = inspect.signature(getattr(ltx, name)).parameters
            given = [ast.unparse(argument) for argument in call.args if ast.unparse(argument) != "..."]
            assert given == list(parameters)[: len(given)], text
            assert {keyword.arg for keyword in call.keywords} <= set(parameters), text
    assert named == {name for name in ltx.__all__ if inspect.isfunction(getattr(ltx, name))}


# ---- Messages


def literals() -> str:
    """What stands between the quotes of all strings of the package, its build and its tests' header, joined."""
    found = []
    for path in [*(ROOT / "torch-ext").rglob("*.py"), ROOT / "tools" / "build.py", ROOT / "tests" / "conftest.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    for path in (ROOT / "torch-ext").glob("*.h"):
        found += re.findall(r'"((?:[^"\\]|\\.)*)"', path.read_text())
    return "\n".join(found)


def test_messages_are_those_of_the_sources():
    """Each part of a message between two `…` is in a string of the sources."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) > 40
    known = literals()
    unknown = [part for m in messages for part in m.split("…") if len(part.strip(" ,:()")) > 2 and part not in known]
    assert unknown == []


# ---- Figures

UNIT = r"(?:x(?! ?\d)|×|times|[nµum]?s|seconds?|minutes?|[kKMGT]i?B(?:/s)?|TFLOP/s|TFLOPS|%|dB|it/s)"
MEASURED = re.compile(rf"(?<![\w.,-])(?P<number>\d[\d.,]*(?:e-?\d+)?) ?(?:<!-- (?P<source>[^>]*) -->)? ?{UNIT}(?!\w)")
VERSIONED = "".join(rf"(?<!{name} )" for name in ("torch", "torchao", "CUDA", "capability", "LTX-Video"))
BARE = re.compile(rf"(?<![\w.,-]){VERSIONED}\d+\.\d+(?:e-?\d+)?(?![\w.]|<!--)")


def figures_without_source(text: str) -> list[str]:
    """Figures in sentences and hand-written tables that name no result file.

    A figure is a number with a unit of time, memory, speed or ratio, and a decimal number in a paragraph that has one.
    What stands in a block that a program writes, or in code, is not looked at.
    """
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^<!-- ([\w -]+) -->\n.*?^<!-- /\1 -->$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    found = []
    for paragraph in text.split("\n\n"):
        of_unit = list(MEASURED.finditer(paragraph))
        found += [match[0] for match in of_unit if not match["source"]]
        if of_unit:
            found += BARE.findall(MEASURED.sub("", paragraph))
    return found


@pytest.mark.parametrize("file", FILES)
def test_every_figure_names_its_result(file: str):
    """By a comment, which benchmarks/readme.py turns into the digits; test_benchmarks.py compares them."""
    assert figures_without_source((ROOT / file).read_text()) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It takes 3.1 ms.", ["3.1 ms"]),
        ("It is 1.77 x as fast, or 2 times, and 30 % of 5 GiB.", ["1.77 x", "2 times", "30 %", "5 GiB"]),
        ("It takes 3.1<!-- h200-ltx frames=49 config=compile step_ms --> ms.", []),
        ("3.1<!-- h200-ltx a --> ms against 4.5 and 1.6e-2 in torch 2.11.0, CUDA 12.9", ["4.5", "1.6e-2"]),
        ("| 3.1 ms |", ["3.1 ms"]),
        ("With torch 2.11 on 8.9, 2 x 8064 tokens of 512x768, `3.1 ms`.\n\n```\n3.1 ms\n```", []),
        ("<!-- step -->\n3.1 ms\n<!-- /step -->\n", []),
        ("3.1 s\n\n2.11", ["3.1 s"]),
    ],
)
def test_figures_are_found(text: str, found: list[str]):
    assert figures_without_source(text) == found


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("frames=49 config=compile step_ms", 45.541),
        ("frames=49 config=baseline step_ms / step_ms", 1.0),
        ("frames=161 config=kernels step_ms * 1000", 144741),
        ("meta.prompts.1 / 10", 6.0),
        ("config=compile step_ms", None),
        ("frames=49 config~torchao step_ms", 35.68),
        ("frames=49 config=compile steps_ms", None),
    ],
)
def test_figures_are_read_from_their_results(
    source: str, value: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import plots
    import readme

    steps = [(49, "baseline", 68.008), (49, "compile", 45.541), (49, "torchao_fp8_compile", 35.68)]
    steps += [(161, "compile", 172.102), (161, "kernels", 144.741)]
    records = [{"frames": frames, "config": config, "step_ms": ms} for frames, config, ms in steps]
    (tmp_path / "h200-ltx.json").write_text(json.dumps({"meta": {"prompts": [10, 60]}, "records": records}))
    monkeypatch.setattr(plots, "RESULTS", tmp_path)
    if value is None:
        with pytest.raises((ValueError, KeyError)):
            readme.figure("h200-ltx", source)
        return
    assert readme.figure("h200-ltx", source) == pytest.approx(value)
    marked = f"It takes 9.9<!-- h200-ltx {source} --> ms."
    assert readme.with_figures(marked) == marked.replace("9.9", f"{value:.1f}", 1)


# ---- Constants and defaults

# A number, and the constant of the package that it is, or a part of one: `128<!-- integrations/x.py NAME / 2 -->`.
CONSTANT = re.compile(r"(?P<number>\d+)<!-- (?P<module>[\w/]+)\.py (?P<name>\w+)(?: / (?P<divisor>\d+))? -->")


def wrong_constants(ltx: ModuleType, text: str) -> list[str]:
    """Numbers beside which a comment names a constant of the package that has another value."""
    found = [comment for comment in re.findall(r".?<!-- \S+\.py .*?-->", text) if not CONSTANT.search(comment)]
    for match in CONSTANT.finditer(text):
        module = functools.reduce(getattr, match["module"].split("/"), ltx)
        if int(match["number"]) * int(match["divisor"] or 1) != getattr(module, match["name"]):
            found.append(match[0])
    return found


@pytest.mark.parametrize("file", FILES)
def test_constants_are_those_of_the_sources(ltx: ModuleType, file: str):
    assert wrong_constants(ltx, (ROOT / file).read_text()) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("keeps 8<!-- integrations/replay/cuda_graphs.py LIMIT --> graphs", 0),
        ("up to 256<!-- integrations/attention/choice.py MOST_KEYS / 64 --> keys", 0),
        ("keeps 16<!-- integrations/replay/cuda_graphs.py LIMIT --> graphs", 1),
        ("up to 256<!-- integrations/attention/choice.py MOST_KEYS / 128 --> keys", 1),
        ("keeps eight<!-- integrations/replay/cuda_graphs.py LIMIT --> graphs", 1),
        ("keeps 8<!-- integrations/replay/cuda_graphs.py LIMIT * 2 --> graphs", 1),
    ],
)
def test_wrong_constants_are_found(ltx: ModuleType, text: str, wrong: int):
    assert len(wrong_constants(ltx, text)) == wrong


TABLE_OF_VALUES = re.compile(r"^\| `(?P<argument>\w+)` \|.*\n\|[-| ]+\|\n(?P<rows>(?:\|.*\n)+)", re.MULTILINE)


def wrong_defaults(ltx: ModuleType, text: str) -> list[str]:
    """Tables of the values of one argument of `optimize` that do not mark its default, and this one alone."""
    found = []
    parameters = inspect.signature(ltx.optimize).parameters
    for table in TABLE_OF_VALUES.finditer(text):
        if table["argument"] in parameters:
            marked = re.findall(r"^\| `(.*?)` \(default\) \|", table["rows"], re.MULTILINE)
            if [ast.literal_eval(value) for value in marked] != [parameters[table["argument"]].default]:
                found.append(table["argument"])
    return found


def test_tables_of_values_mark_the_default(ltx: ModuleType):
    pages = [(ROOT / file).read_text() for file in FILES]
    assert "stock_weights" in {table["argument"] for page in pages for table in TABLE_OF_VALUES.finditer(page)}
    assert [argument for page in pages for argument in wrong_defaults(ltx, page)] == []


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        (['"cpu"` (default)', '"beside"`'], []),
        (['"cpu"`', '"beside"`'], ["stock_weights"]),
        (['"cpu"`', '"beside"` (default)'], ["stock_weights"]),
        (['"beside"` (default)', '"cpu"` (default)'], ["stock_weights"]),
    ],
)
def test_wrong_defaults_are_found(ltx: ModuleType, rows: list[str], wrong: list[str]):
    table = "".join(f"| `{row} | text |\n" for row in rows)
    assert wrong_defaults(ltx, f"| `stock_weights` | where |\n|---|---|\n{table}") == wrong


def wrong_capabilities(text: str, least: str) -> list[str]:
    """Sentences, or cells of a table, that say of products in fp8 another compute capability than the least one."""
    sentences = re.split(r"(?<=[.:;])\s+|\s\|\s", " ".join(text.split()))
    of_fp8 = [sentence for sentence in sentences if re.search(r"\bfp8\b|`scaled_linear`", sentence)]
    return [s for s in of_fp8 if set(re.findall(r"compute capability (\d+\.\d+)", s)) - {least}]


def test_gpus_that_fp8_needs(ltx: ModuleType, monkeypatch: pytest.MonkeyPatch):
    def takes(major: int, minor: int) -> bool:
        gpu = SimpleNamespace(name="GPU", major=major, minor=minor)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        return ltx.quant.fp8_obstacle(torch.device("cuda")) is None

    least = next(f"{major}.{minor}" for major in range(7, 11) for minor in range(10) if takes(major, minor))
    pages = {file: (ROOT / file).read_text() for file in FILES}
    said = "`scaled_linear` needs compute capability"
    assert f"{said} {least}" in pages["docs/fp8.md"]
    assert {file: wrong_capabilities(page, least) for file, page in pages.items()} == {file: [] for file in pages}
    assert wrong_capabilities(f"As always. {said} 1.0 on a GPU.", least) == [f"{said} 1.0 on a GPU."]


def options_with_defaults(source: str) -> Iterator[tuple[str, str, str]]:
    """(option, its default by its help, its default by its code), where both are numbers or words."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith(".add_argument"):
            continue
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        said = re.search(r"\(default: ([^,;)]+)", ast.unparse(given["help"])) if "help" in given else None
        default = given.get("default", ast.Constant(None))
        values = [v.value for v in getattr(default, "elts", [default]) if isinstance(v, ast.Constant)]
        if said and any(values):  # 0 and None say that the program decides
            yield (
                ast.unparse(call.args[0]),
                said[1],
                " ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values),
            )


def test_helps_tell_the_default():
    folders = ("benchmarks", "examples", "notebooks", "skills", "tests", "tools")
    sources = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [(path.name, *option) for path in sources for option in options_with_defaults(path.read_text())]
    assert len(found) > 20
    assert [option for option in found if option[2] != option[3]] == []


# ---- Shell

# Programs that need a network, a GPU or another machine, beside `make` and this repository's scripts.
ELSEWHERE = {"cachix", "kernel-builder", "pip", "git", "nix", "hf", "kernels", "ncu", "nsys", "sglang", "uv", "vllm"}
SHELL = {"cd", "cp", "export", "mkdir"}


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command, without comment and environment."""
    for line in block.code.replace("\\\n", " ").splitlines():
        for command in re.split(r" && ", line):
            words = shlex.split(command, comments=True)
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words = words[1:]
            if words[:1] == ["torchrun"]:
                words = ["python", *words[3:]]
            if words:
                yield words


def home(file: str) -> Path:
    """Where the commands of a page are typed: in a skill's folder, or in the repository's."""
    folder = ROOT.joinpath(*Path(file).parts[:2])
    return folder if (folder / "SKILL.md").is_file() else ROOT


def options_of(path: Path) -> set[str]:
    """The options that a script, or the modules of this repository that it imports or runs, adds to a parser."""
    text = path.read_text()
    imported = re.findall(r"^from (\w+) import|^import (\w+)$", text, re.MULTILINE)
    beside = [folder / f"{a or b}.py" for folder in (path.parent, ROOT / "examples") for a, b in imported]
    programs = re.findall(r"run_example\(\s*\"(\w+\.py)\"", text)
    text += "".join(path.read_text() for path in beside if path.is_file())
    own = set(re.findall(r"\"(--[a-z0-9-]+)\"", text)) | {"--help"}
    return own.union(*(options_of(ROOT / "examples" / name) for name in programs))


@pytest.mark.parametrize("file", [file for file in FILES if blocks(file, "bash")])
def test_shell_blocks(file: str):
    """Their syntax; targets and variables of make, scripts and their options exist."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for block in blocks(file, "bash"):
        subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)
        for words in commands(block):
            program, arguments = words[0], words[1:]
            if program == "make":
                assert {a for a in arguments if "=" not in a} <= targets, f"{block.place}: {words}"
                for variable in (a.partition("=")[0] for a in arguments if "=" in a):
                    assert f"$({variable})" in makefile or f"({variable})," in makefile, f"{block.place}: {variable}"
            elif program == "python" and arguments[0] == "-m":
                assert arguments[1] in ("ltx_fused", "pytest"), f"{block.place}: {words}"
            elif program == "python" and arguments != ["app.py"]:  # app.py is the reader's own
                given = {a.partition("=")[0] for a in arguments if a.startswith("--")}
                assert given <= options_of(home(file) / arguments[0]), f"{block.place}: {words}"
            else:
                assert program in ELSEWHERE | SHELL or arguments == ["app.py"], f"{block.place}: {words}"
