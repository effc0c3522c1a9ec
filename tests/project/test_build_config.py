"""build.toml is complete, and the Python package keeps the Hub's rules. Nothing is built here."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.build_checks import PACKAGE, ROOT, builder

PYTHON_FILES = sorted(p for p in PACKAGE.rglob("*.py") if p.name != "_ops.py")
TOML = builder.read_toml(ROOT / "build.toml")
TABLES = {"torch": TOML["torch"], **TOML["kernel"]}


def test_accepted_by_kernels():
    config = pytest.importorskip("kernels._rust", reason="the parser is a private module of kernels")
    build = config.Build.open(ROOT)
    assert {str(backend).lower() for backend in build.general.backends} == {"cpu", "cuda"}
    assert TOML["general"]["edition"] == 5
    assert TOML["torch"]["stable-abi"] == {"cpu": "2.11", "cuda": "2.11"}


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_every_source_is_listed(backend: str):
    listed = {
        source for table in TABLES.values() if table.get("backend", backend) == backend for source in table["src"]
    }
    wanted = {
        p for p in (ROOT / "torch-ext").iterdir() if p.suffix in (".cpp", ".h", ".o") and p.name != "registration.h"
    }
    if backend == "cpu":
        wanted |= {p for p in (ROOT / "kernel_src" / "cpu").rglob("*") if p.suffix in (".cpp", ".h")}
    else:
        wanted |= {p for p in (ROOT / "kernel_src").rglob("*") if p.suffix in (".cu", ".cuh")}
    wanted |= set((ROOT / "kernel_src" / "ltx").glob("*.h"))
    assert {str(p.relative_to(ROOT)) for p in wanted} == listed


def included(file: Path, search: list[Path]) -> set[Path]:
    found = set()
    for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', file.read_text(), re.MULTILINE):
        if name == "registration.h":  # written by the builder
            continue
        hits = [base / name for base in [file.parent, *search] if (base / name).is_file()]
        assert hits, f"{file}: {name} is not on the table's include path"
        found.add(hits[0].resolve())
    return found


@pytest.mark.parametrize("name", TABLES)
def test_includes_are_listed_in_the_same_table(name: str):
    table = TABLES[name]
    files = [ROOT / source for source in table["src"]]
    # A Nix build sees the union of all tables; a binding may rely on a kernel's headers, a kernel on its own alone.
    listed = {f.resolve() for f in files}
    if name == "torch":
        listed |= {(ROOT / source).resolve() for other in TOML["kernel"].values() for source in other["src"]}
    search = [ROOT / directory for directory in table.get("include", [])]
    for file in files:
        missing = included(file, search) - listed
        assert not missing, f"{file.name} includes {missing}, not listed in [{name}]"


def test_no_torch_below_kernel_src():
    for file in (ROOT / "kernel_src").rglob("*.*"):
        if file.suffix in (".h", ".cuh", ".cu", ".cpp"):
            assert not re.search(r"#\s*include\s*[<\"](torch|ATen|c10)/", file.read_text()), file


INCLUDE = re.compile(r"#\s*include\s*<([^>]+)>")
STREAMS = {"fstream", "iomanip", "ios", "iostream", "istream", "locale", "ostream", "regex", "sstream", "streambuf"}


def test_no_iostreams_and_no_locales():
    """torch's headers have some: stable_abi.h takes them out, and no other file includes torch's headers."""
    files = [p for name in ("torch-ext", "kernel_src") for p in (ROOT / name).rglob("*.*")]
    sources = {p.name: p for p in files if p.suffix in (".h", ".cuh", ".cu", ".cpp") and p.name != "registration.h"}
    included = {name: set(INCLUDE.findall(path.read_text())) for name, path in sources.items()}
    assert any(header.startswith("torch/") for header in included.pop("stable_abi.h"))
    for name, headers in included.items():
        assert not headers & STREAMS, name
        assert not [header for header in headers if header.startswith("torch/")], f"{name}: include stable_abi.h"


# The kernels that a GPU may go without: where they do not run, torch's do.
ONLY_SOME = {"attention_hopper": ["9.0a"]}
# The kernels that Blackwell compiles from PTX.
PTX_ON_BLACKWELL = ["7.5", "8.0", "9.0+PTX"]


@pytest.mark.parametrize("name", [n for n, t in TOML["kernel"].items() if t["backend"] == "cuda"])
def test_cuda_tables(name: str):
    table = TOML["kernel"][name]
    archs = pytest.importorskip("kernels.archs")
    if name in ONLY_SOME:
        assert table["cuda-capabilities"] == ONLY_SOME[name]
    else:
        for capability in [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]:
            assert archs._supports_cuda_capability(table["cuda-capabilities"], capability), capability
        assert {"7.5", "8.0"} <= set(table["cuda-capabilities"])
    flags = " ".join(table["cuda-flags"])
    assert "-fno-gnu-unique" in flags and "-fvisibility=hidden" in flags
    assert "fast" not in flags and "fmad=false" not in flags


@pytest.mark.parametrize("name", [n for n, t in TOML["kernel"].items() if t["backend"] == "cpu"])
def test_cpu_tables(name: str):
    flags = TOML["kernel"][name]["cxx-flags"]
    assert "-ffp-contract=off" in flags and "-fvisibility=hidden" in flags
    assert not [flag for flag in flags if flag.startswith(("-march", "-m", "-ffast"))]


def test_one_set_of_flags_for_each_backend():
    for backend in ("cpu", "cuda"):
        tables = [{**t, "src": []} for t in TOML["kernel"].values() if t["backend"] == backend]
        for table in tables:
            if table.get("cuda-capabilities") in (*ONLY_SOME.values(), PTX_ON_BLACKWELL):
                table["cuda-capabilities"] = tables[0]["cuda-capabilities"]
        assert all(table == tables[0] for table in tables)


def test_every_gpu_is_admitted():
    """What `kernels` compares a GPU with is the union of all tables, in the metadata."""
    archs = pytest.importorskip("kernels.archs")
    union = builder.load_project().capabilities((13, 0))
    assert union == ["10.0", "12.0", "7.5", "8.0", "9.0+PTX", "9.0a"]
    for capability in [(7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]:
        assert archs._supports_cuda_capability(union, capability), capability
    assert not archs._supports_cuda_capability(union, (7, 0))


@pytest.mark.parametrize(
    ("asked", "hopper", "others"),
    [
        ([], ["9.0a"], ["7.5", "8.0", "9.0+PTX"]),
        (["9.0"], ["9.0a"], ["9.0"]),
        (["7.5", "9.0+PTX"], ["9.0a"], ["7.5", "9.0+PTX"]),
        (["8.0"], ["8.0"], ["8.0"]),
        (["7.5+PTX-only"], ["7.5+PTX-only"], ["7.5+PTX-only"]),
    ],
)
def test_what_kernels_are_compiled_for(asked: list[str], hopper: list[str], others: list[str]):
    kernels = {kernel.name: kernel for kernel in builder.load_project().kernels}
    assert builder.archs_of(kernels["attention_hopper"], asked, (12, 6)) == hopper
    assert builder.archs_of(kernels["attention"], asked, (12, 6)) == others


@pytest.mark.parametrize(
    ("toolkit", "knows_blackwell"), [((12, 6), False), ((12, 7), False), ((12, 8), True), ((13, 0), True)]
)
def test_architectures_of_a_toolkit(toolkit: tuple[int, int], knows_blackwell: bool):
    """Blackwell's came with CUDA 12.8."""
    for arch in ("10.0", "12.0"):
        assert builder.known_to_toolkit(arch, toolkit) == knows_blackwell
    for arch in ("7.5", "9.0+PTX", "9.0a"):
        assert builder.known_to_toolkit(arch, toolkit)


def test_pip_reads_its_version_from_build_toml():
    project = builder.read_toml(ROOT / "pyproject.toml")["project"]
    assert {"version", "dependencies"} <= set(project["dynamic"])
    assert not (ROOT / "setup.py").exists()


@pytest.mark.parametrize("file", PYTHON_FILES, ids=lambda p: p.name)
def test_python_file(file: Path):
    tree = ast.parse(file.read_text(), feature_version=(3, 9))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            roots = {(node.module or "").split(".")[0]}
        else:
            continue
        foreign = roots - set(sys.stdlib_module_names) - {"torch"}
        assert not foreign, f"{file.name}:{node.lineno} imports {foreign}: only the standard library and torch may be"


def test_python_39_syntax():
    """Annotations like `int | None` parse everywhere, but in 3.9 they must not be evaluated: ruff knows."""
    select = ["--select", "E9,F,FA102,FA100", "--target-version", "py39", "--no-cache"]
    command = [sys.executable, "-m", "ruff", "check", "--isolated", *select, str(PACKAGE)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


REGISTRATIONS = {"register_fake", "register_kernel", "register_autograd", "custom_op", "triton_op", "register_autocast",
                 "impl", "impl_abstract", "register_vmap", "define"}  # fmt: skip


PREFIX = "add_op_namespace_prefix("


def prefixed_names(tree: ast.Module) -> set[str]:
    """Names that are assigned add_op_namespace_prefix(...), also in a tuple, and nothing else."""
    prefixed, other = set(), set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for name, value in pairs:
                (prefixed if ast.unparse(value).startswith(PREFIX) else other).add(ast.unparse(name))
    return prefixed - other


def unprefixed(tree: ast.Module) -> list[str]:
    """Registrations of ops whose name does not come from add_op_namespace_prefix."""
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "torch.library"
        for alias in node.names
    }
    decorators = {id(d) for node in ast.walk(tree) for d in getattr(node, "decorator_list", [])}
    found = []
    for node in [n for n in ast.walk(tree) if isinstance(n, ast.Call)]:
        name = ast.unparse(node.func)
        *owner, last = name.split(".")
        if not ("library" in owner or (name in imported and not owner)):
            continue
        if last == "Library":
            found.append(f"line {node.lineno}: torch.library.Library opens a namespace of its own")
        elif last in REGISTRATIONS:
            first = ast.unparse(node.args[0]) if node.args else ""
            # kernel-builder reads decorators, and only as they are written; a plain call may use a variable.
            if not (first.startswith(PREFIX) or (first in prefixed_names(tree) and id(node) not in decorators)):
                found.append(f"line {node.lineno}: {name}({first}, ...)")
    return found


@pytest.mark.parametrize("file", PYTHON_FILES, ids=lambda p: p.name)
def test_registrations_are_prefixed(file: Path):
    text = file.read_text()
    assert not re.search(r"[\"']_?ltx_kernels\w*::", text), f"{file.name} names a fixed op namespace"
    assert not re.search(r"torch\.ops\.\w*ltx", text), f"{file.name} reaches the ops by a fixed name"
    tree = ast.parse(text)
    assert unprefixed(tree) == []
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Try):
            assert "_ops" not in ast.unparse(statement), f"{file.name}:{statement.lineno}: no fallback for _ops"


@pytest.mark.parametrize(
    "line",
    [
        '@torch.library.register_fake("ltx::norm")\ndef f(x): ...',
        "@torch.library.custom_op(name, mutates_args=())\ndef f(x): ...",
        'from torch.library import register_fake\n@register_fake("ltx::norm")\ndef f(x): ...',
        'name = add_op_namespace_prefix("norm")\n@torch.library.register_fake(name)\ndef f(x): ...',
        'torch.library.define("ltx::norm", "(Tensor x) -> Tensor")',
        'torch.library.Library("ltx", "DEF")',
    ],
)
def test_unprefixed_registrations_are_found(line: str):
    assert len(unprefixed(ast.parse(line))) == 1


def test_tests_register_no_op_of_a_fixed_name():
    """kernel-builder puts tests into its builds and holds them to the same rule."""
    for file in sorted((ROOT / "tests").rglob("*.py")):
        assert unprefixed(ast.parse(file.read_text())) == [], file


def test_ops_are_registered_in_the_generated_namespace():
    """In C++: the macros that expand TORCH_EXTENSION_NAME, and no others, which would take a name as it stands."""
    for file in (ROOT / "torch-ext").glob("*.cpp"):
        for macro, namespace in re.findall(r"\b((?:STABLE_)?TORCH_LIBRARY\w*)\(\s*(\w+)", file.read_text()):
            assert macro in ("STABLE_TORCH_LIBRARY_EXPAND", "STABLE_TORCH_LIBRARY_IMPL_EXPAND"), file
            assert namespace == "TORCH_EXTENSION_NAME", file


def layer_problems(tree: ast.Module) -> list[str]:
    """What the Hub forbids in a layer: anything but `forward`, and the two members that say what it can do."""
    problems = []
    for node in [n for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]:
        if not any(ast.unparse(base).endswith("Module") for base in node.bases):
            problems.append(f"{node.name} is no nn.Module")
        for member in node.body:
            if isinstance(member, ast.FunctionDef):
                if member.name != "forward":
                    problems.append(f"{node.name}.{member.name}: a layer has forward alone")
            elif isinstance(member, (ast.Assign, ast.AnnAssign)):
                targets = member.targets if isinstance(member, ast.Assign) else [member.target]
                names = {ast.unparse(target) for target in targets}
                declared = isinstance(member, ast.AnnAssign) and member.value is None  # of the module it stands in for
                if not declared and not names <= {"has_backward", "can_torch_compile"}:
                    problems.append(f"{node.name}.{', '.join(names)}: not a member of a layer")
            elif not (isinstance(member, ast.Expr) and isinstance(member.value, ast.Constant)):
                problems.append(f"{node.name}: {ast.unparse(member)}")
    return problems


def test_layers_are_pure():
    files = [f for f in PYTHON_FILES if f.relative_to(PACKAGE).parts[0] in ("layers.py", "layers")]
    definitions = [node for file in files for node in ast.parse(file.read_text()).body]
    assert {"RMSNorm"} <= {node.name for node in definitions if isinstance(node, ast.ClassDef)}
    assert [p for file in files for p in layer_problems(ast.parse(file.read_text()))] == []


def test_impure_layers_are_found():
    pure = "class A(nn.Module):\n  'doc'\n  has_backward: bool = True\n  eps: float\n  def forward(self, x): ...\n"
    assert layer_problems(ast.parse(pure)) == []
    for line in ("def __init__(self): ...", "def extra(self): ...", "eps = 1e-6", "other: int = 1"):
        assert len(layer_problems(ast.parse(pure + f"  {line}\n"))) == 1, line
    assert layer_problems(ast.parse(pure.replace("nn.Module", "object"))) == ["A is no nn.Module"]


def test_all_is_a_literal_list():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (value,) = [
        node.value for node in tree.body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    ]  # fmt: skip
    assert isinstance(value, ast.List)
    names = ast.literal_eval(value)
    assert names and all(isinstance(name, str) for name in names)
    assert len(names) == len(set(names))


def test_card_is_a_template():
    jinja2 = pytest.importorskip("jinja2")
    yaml = pytest.importorskip("yaml")
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    card = environment.from_string((ROOT / "CARD.md").read_text())
    names = {"repo_id": "someone/ltx-kernels", "version": 7, "license": "apache-2.0"}
    empty = dict.fromkeys(("functions", "layers", "upstream", "source"))
    full = {"functions": ["rmsnorm", "geglu"], "layers": ["RMSNorm"], "upstream": "https://up", "source": "https://src"}
    for variables in ({**names, **empty, "has_benchmark": False}, {**names, **full, "has_benchmark": True}):
        text = card.render(**variables)
        _, front_matter, body = text.split("---\n", 2)
        front = yaml.safe_load(front_matter)
        assert front["library_name"] == "kernels" and front["license"] == "apache-2.0"
        assert 'get_kernel("someone/ltx-kernels", version=7' in body
        assert "org/ltx-kernels" not in body and "{%" not in body and "{{" not in body and "None" not in body
        for value in [
            *(variables["functions"] or []),
            *(variables["layers"] or []),
            *filter(None, [variables["source"]]),
        ]:
            assert value in body
