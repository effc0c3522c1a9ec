"""The sources that a measurement depends on, found by reading them, in the working tree or in a commit.

A measurement is made by a program of benchmarks/ or tests/, of some public functions or of `optimize` with some models.
Its sources are

- the definitions that the program's `main` reaches, in its own file and in those that it imports. Of a table of models
  by name only the entry of the measured one counts, and of a list of cases only what its entries call: the record names
  its case;
- the Python files of the package that these functions are in and import. For `optimize`: those of the families that
  know the models, with all that they import. Of the files in BY_NAME only the definitions that others import, and FAKES
  where it runs;
- the bindings of the ops that these files call, and the kernels that the bindings launch, with the files and the flags
  that build.toml has for each.

Comments, docstrings, the form of the code and what can only raise do not count, and neither does how result files are
written and how programs share a GPU. What only gradients need counts where the program calls ``backward`` or ``grad``:
that method of autograd.Functions, what it alone imports, and the kernels that are named after it.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import importlib.util
import posixpath
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import tomllib

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "examples", "kernel_src", "tests", "torch-ext")
SUFFIXES = (".py", ".cu", ".cuh", ".cpp", ".h")
PACKAGE = "torch-ext/ltx_kernels/"
INTEGRATIONS = PACKAGE + "integrations/"
FAKES = PACKAGE + "_fakes.py"  # shapes for torch.compile, and what runs for gradients and where an op has no kernel
BY_NAME = (PACKAGE + "_checks.py", PACKAGE + "_torch_private.py")  # collections of definitions, imported one by one
# No figure depends on how a file is written, nor on how programs share the GPU: one that times something has it alone.
APART = ("benchmarks/result_files.py", "benchmarks/sharing.py")
PROGRAM_FOLDERS = ("benchmarks", "examples", "tests")  # where a program finds what it imports
OP_CALL = r'\bop\(\s*"(\w+)"'
OP_OF_GRADIENTS = r"\bops\.(\w+)\.default"  # how autograd.Functions call an op
FORWARD = "without backward"  # the part of a file that counts for programs without gradients
Parts = dict[str, str]  # what a measurement depends on, by name: a file, or "FILE: DEFINITION"


class HistoryError(Exception):
    """The history of the repository is not here, or lacks a commit."""


@dataclass(frozen=True, eq=False)
class Tree:
    """A version of the repository's sources: the paths, and how their text is read."""

    paths: Collection[str]
    read: Callable[[str], str]

    def under(self, folder: str, *suffixes: str) -> list[str]:
        return [path for path in self.paths if path.startswith(folder) and path.endswith(suffixes)]


def working_tree(root: Path = REPOSITORY) -> Tree:
    files = [*(path for folder in FOLDERS for path in (root / folder).rglob("*")), root / "build.toml"]
    names = {str(path.relative_to(root)) for path in files if path.suffix in SUFFIXES or path.name == "build.toml"}
    generated = {PACKAGE + "_ops.py", "torch-ext/registration.h"}
    return Tree(sorted(names - generated), functools.cache(lambda path: (root / path).read_text()))


class History:
    """The commits of a repository; a text that several of them share is read once."""

    def __init__(self, root: Path = REPOSITORY) -> None:
        self.root = root
        self.process: subprocess.Popen[bytes] | None = None
        self.blob = functools.cache(self._blob)
        self.tree = functools.cache(self._tree)
        self.named = functools.cache(self._named)

    def git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self.root), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[0]
            raise HistoryError(f"git {' '.join(arguments)}: {reason}") from error

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether this is a repository with all of its commits, and not a folder in another one."""
        try:
            top, shallow = self.git("rev-parse", "--show-toplevel", "--is-shallow-repository").split("\n")[:2]
        except HistoryError:
            return False
        return Path(top).resolve() == self.root.resolve() and shallow == "false"

    @functools.cached_property
    def commits(self) -> dict[str, int]:
        """When each commit before the checked-out one was made, in seconds; the newest stands first."""
        lines = self.git("log", "--format=%H %ct").splitlines()
        return {commit: int(seconds) for commit, seconds in (line.split() for line in lines)}

    def _named(self, commit: str) -> str | None:
        """The whole name of a commit; None for one that is not in the history, and for a dirty tree."""
        if not re.fullmatch("[0-9a-f]{7,40}", commit):
            return None
        return next((name for name in self.commits if name.startswith(commit)), None)

    def _tree(self, commit: str) -> Tree:
        blobs: dict[str, str] = {}
        for line in self.git("ls-tree", "-r", "-z", commit, "--", *FOLDERS, "build.toml").split("\0"):
            about, _, path = line.partition("\t")
            if path.endswith(SUFFIXES) or path == "build.toml":
                blobs[path] = about.split()[2]
        return Tree(blobs, lambda path: self.blob(blobs[path]))

    def _blob(self, name: str) -> str:
        if self.process is None:
            command = ["git", "-C", str(self.root), "cat-file", "--batch"]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{name}\n".encode())
        self.process.stdin.flush()
        size = int(self.process.stdout.readline().split()[2])
        return self.process.stdout.read(size + 1)[:-1].decode()


@functools.cache
def parsed(text: str) -> ast.Module:
    """Python without docstrings, and without what can only raise: no run that was measured has come to it."""
    module = ast.parse(text)
    for node in ast.walk(module):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:] or [ast.Pass()]
    before = _names_in(module)
    return _without_unused(_WithoutErrors(before).visit(_WithoutApart(module).visit(module)), before)


class _WithoutApart(ast.NodeTransformer):
    """Takes out calls, alone or of a ``with``, of what a module imports from the files in APART.

    A call stays if its arguments are computed in it, since they can do what counts.
    """

    def __init__(self, module: ast.Module) -> None:
        apart = {Path(path).stem for path in APART}
        imports = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom) and not node.level]
        defined = {node.name for node in ast.walk(module) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        named = {one.asname or one.name for node in imports if node.module in apart for one in node.names}
        self.names = named - defined

    def _is_apart(self, node: ast.expr) -> bool:
        named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.names
        return named and sum(isinstance(inner, ast.Call) for inner in ast.walk(node)) == 1

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if self._is_apart(node.value) else node

    def visit_With(self, node: ast.With) -> ast.With | list[ast.stmt]:
        self.generic_visit(node)
        node.items = [item for item in node.items if item.optional_vars or not self._is_apart(item.context_expr)]
        return node if node.items else node.body


class _WithoutErrors(ast.NodeTransformer):
    """Takes out each ``if`` that can only raise an error with a text, which ends a run.

    An error without a text, or in a ``try``, may choose between two ways. What a test names with ``:=`` may be read in
    that ``if`` alone.
    """

    def __init__(self, names: Counter[str]) -> None:
        self.names = names

    def visit_Try(self, node: ast.Try) -> ast.Try:
        return node

    def visit_If(self, node: ast.If) -> ast.If | None:
        self.generic_visit(node)
        mine = _names_in(node)
        named = {inner.target.id for inner in ast.walk(node.test) if isinstance(inner, ast.NamedExpr)}
        raises = not node.orelse and all(
            isinstance(inner, ast.Raise) and isinstance(inner.exc, ast.Call) and inner.exc.args for inner in node.body
        )
        return None if raises and all(mine[name] == self.names[name] for name in named) else node


@functools.cache
def without_backward(text: str) -> ast.Module:
    """Python that is `parsed`, without methods named ``backward``, and without what they alone refer to."""
    module = copy.deepcopy(parsed(text))
    before = _names_in(module)
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            node.body = [inner for inner in node.body if getattr(inner, "name", "") != "backward"] or [ast.Pass()]
    return _without_unused(module, before)


def _without_unused(module: ast.Module, before: Collection[str]) -> ast.Module:
    """Without the private definitions and the imports whose names were in a module before, and are no more."""
    gone = set(before) - set(_names_in(module))
    while gone:
        used, private = _names_in(module), {name for name in gone if name.startswith("_")}
        module.body = [node for node in module.body if getattr(node, "name", "") not in private]
        for node in module.body:
            if isinstance(node, ast.ImportFrom):
                node.names = [one for one in node.names if (one.asname or one.name) not in gone or one.asname]
        gone = set(used) - set(_names_in(module))
    module.body = [node for node in module.body if not isinstance(node, ast.ImportFrom) or node.names]
    return module


def _names_in(node: ast.AST) -> Counter[str]:
    return Counter(inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name))


COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|(\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')", re.DOTALL)


def without_comments(text: str) -> str:
    """C++ or CUDA without its comments; strings stay."""
    return COMMENT.sub(lambda match: match[1] or "", text)


@functools.cache
def code_of(name: str, text: str) -> str:
    """What counts of a part's text: the code without comments, docstrings and spaces."""
    if name.endswith(".py"):
        return ast.dump(parsed(text))
    if name.endswith(SUFFIXES):
        return " ".join(without_comments(text).split())
    return text


def digest(parts: Parts) -> str:
    """A name of the code of these parts."""
    code = "\0".join(f"{name}\0{code_of(name, text)}" for name, text in sorted(parts.items()))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Subject:
    """What is measured.

    program: The file of the program, in the repository.
    keys: How the program's tables name what is measured. Without keys all of a table counts.
    functions: Public functions that the program does not name itself.
    everything: Whether all sources of the package count, as they do for tests.
    files: More files that count whole.
    root: The definition of the program that the others are reached from.
    """

    program: str
    keys: frozenset[str] = frozenset()
    functions: frozenset[str] = frozenset()
    backend: str = "cuda"
    everything: bool = False
    files: tuple[str, ...] = ()
    root: str = "main"


@dataclass(frozen=True, eq=False)
class Sources:
    """What a measurement depends on in one version of the repository."""

    tree: Tree
    known: dict[Any, Any] = field(default_factory=dict)  # what was found before, by the question

    def of(self, subject: Subject) -> Parts:
        """The parts that a measurement depends on in this version."""
        return {name: self.part(name, subject.keys) or "" for name in self._once(self._names, subject)}

    def unchanged(self, subject: Subject, parts: Parts) -> bool:
        """Whether parts of another version are the same in this one."""

        def is_same(name: str, text: str) -> bool:
            mine = self.part(name, subject.keys)
            return mine is not None and (mine == text or code_of(name, mine) == code_of(name, text))

        return all(is_same(name, text) for name, text in parts.items())

    def part(self, name: str, keys: frozenset[str]) -> str | None:
        """The text of a part; None where this version lacks it."""
        path, _, definition = name.partition(": ")
        if path not in self.tree.paths:
            return None
        if path == "build.toml":
            kernel = self.builds.get(definition)
            return None if kernel is None else repr(kernel)
        if not definition:
            return self.tree.read(path)
        if definition == FORWARD:
            return ast.dump(without_backward(self.tree.read(path)))
        return self.module(path).reached(definition, keys).code if definition in self.module(path).names else None

    def module(self, path: str) -> _Module:
        return cast("_Module", self._once(_Module, self.tree, path))

    def _once(self, question: Callable[..., Any], *arguments: Any) -> Any:
        key = question.__name__, *(one for one in arguments if one is not self.tree)
        if key not in self.known:
            self.known[key] = question(*arguments)
        return self.known[key]

    def _names(self, subject: Subject) -> list[str]:
        if subject.program not in self.tree.paths:
            return []
        files = {path for path in subject.files if path in self.tree.paths}
        program, functions, words = self.of_program(subject.program, subject.keys, subject.root)
        if subject.everything:
            files |= {path for path in self.tree.paths if path.startswith(("kernel_src/", "torch-ext/"))}
        else:
            classes = frozenset(word for word in words if word in modules_of_classes())
            trains = bool(words & {"backward", "grad"})
            mine = frozenset(functions | subject.functions)
            files |= self._once(self.of_functions, mine, classes, subject.backend, trains)
        return [*sorted(program), *sorted(files)]

    def of_program(self, path: str, keys: frozenset[str], root: str) -> tuple[set[str], set[str], set[str]]:
        """(the definitions that one of a program reaches, the public functions that they name, all their words)."""
        names = self.module(path).names
        waiting = [(path, name) for name in ((root,) if root in names else names)]
        found, functions, words = set[str](), set[str](), set[str]()
        while waiting:
            path, name = waiting.pop()
            if path in APART or f"{path}: {name}" in found or name not in self.module(path).names:
                continue
            found.add(f"{path}: {name}")
            reached = self.module(path).reached(name, keys)
            functions |= reached.functions
            words |= reached.words
            waiting += reached.references
        return found, functions, words

    def of_functions(
        self, functions: frozenset[str], classes: frozenset[str], backend: str, trains: bool = False
    ) -> set[str]:
        """The parts that public functions run, and `optimize` of models of these classes."""
        reference = {PACKAGE + "reference.py"} if "reference" in functions else set()
        roots = [self.public[function] for function in functions if function in self.public]
        if "optimize" in functions:
            roots += [INTEGRATIONS + "__init__.py", *self.families(classes)]
        python = self.closure(roots, trains, left_out=() if trains or backend != "cuda" else (FAKES,))
        forms = (OP_CALL, OP_OF_GRADIENTS) if trains else (OP_CALL,)
        calls = {name for path in python for form in forms for name in re.findall(form, self.tree.read(path))}
        files = python.difference(BY_NAME)
        parts = set(files) if trains else {self._without_backward(path) for path in files}
        parts |= self.by_name(files, trains)
        return parts | reference | self._once(self.of_ops, frozenset(calls), backend, trains)

    def _without_backward(self, path: str) -> str:
        """The name of what counts of a file for programs without gradients."""
        return f"{path}: {FORWARD}" if "def backward(" in self.tree.read(path) else path

    @functools.cached_property
    def public(self) -> dict[str, str]:
        """The file of each public function, and of each op."""
        modules = [path for path in self.tree.under(PACKAGE, ".py") if path.count("/") == 2 and "/_" not in path]
        ops = {name: path for path in modules for name in re.findall(OP_CALL, self.tree.read(path))}
        return ops | {
            node.name: path
            for path in modules
            if not path.endswith("/reference.py")
            for node in parsed(self.tree.read(path)).body
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        }

    def closure(self, roots: Iterable[str], trains: bool = False, left_out: Collection[str] = ()) -> set[str]:
        """Python files of the package with all that they import, but for the families that the registry imports."""
        found: set[str] = set()
        waiting = [path for path in roots if path in self.tree.paths]
        while waiting:
            path = waiting.pop()
            if path in found or path in left_out:
                continue
            found.add(path)
            if path != INTEGRATIONS + "registry.py":
                waiting += self._once(self.imports, path, trains)
        return found

    def by_name(self, files: Iterable[str], trains: bool) -> set[str]:
        """The definitions in BY_NAME that these files import, with those that they refer to.

        The whole file counts where it is imported as a module, and where it does more than define.
        """
        waiting = []
        for path in files:
            for node in ast.walk((parsed if trains else without_backward)(self.tree.read(path))):
                if isinstance(node, ast.ImportFrom) and node.level:
                    base = _base(node, path)
                    waiting += [(f"{base}.py", alias.name) for alias in node.names]
                    waiting += [(f"{base.rstrip('/')}/{alias.name}.py", "") for alias in node.names]
        waiting = [(path, name) for path, name in waiting if path in BY_NAME and path in self.tree.paths]
        found = set[str]()
        while waiting:
            path, name = waiting.pop()
            module = self.module(path)
            is_one = name in module.names and module.only_defines
            part = f"{path}: {name}" if is_one else path
            if part not in found:
                found.add(part)
                for one in [name] if is_one else module.names:
                    references = module.reached(one, frozenset()).references
                    waiting += [(f, n) for f, n in references if f in BY_NAME and (f != path or n in module.names)]
        return found

    def imports(self, path: str, trains: bool = False) -> list[str]:
        """The files of the package that a file imports, but for the package's own __init__.py."""
        found: list[str] = []
        for node in ast.walk((parsed if trains else without_backward)(self.tree.read(path))):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = _base(node, path)
                for name in (base, *(f"{base.rstrip('/')}/{alias.name}" for alias in node.names)):
                    candidates = (f"{name.rstrip('/')}.py", f"{name.rstrip('/')}/__init__.py")
                    found += [file for file in candidates if file in self.tree.paths]
        return [file for file in found if file != PACKAGE + "__init__.py"]

    def families(self, classes: Collection[str]) -> list[str]:
        """The files of the families that know these classes of libraries; all families where there are none."""
        folders = tuple(f"{INTEGRATIONS}{library}/" for library in ("diffusers", "transformers"))
        known = [path for path in self.tree.under(INTEGRATIONS, ".py") if path.startswith(folders)]
        files = [path for path in known if not Path(path).name.startswith("_")]
        found = []
        for module in sorted({modules_of_classes()[name] for name in classes}):
            stem = re.sub("^(transformer|modeling|configuration)_", "", module)
            named = re.compile(rf'\b{module}\b|"{stem}"')
            speaking = {path for path in known if Path(path).stem == stem or named.search(self.tree.read(path))}
            # Families share files whose names begin with an underscore.
            found += [
                path for path in files if speaking & {path, *(f for f in self._once(self.imports, path) if "/_" in f)}
            ]
        return found or files

    def of_ops(self, names: Collection[str], backend: str, trains: bool = False) -> set[str]:
        """The bindings of ops, and what they launch."""
        if not names:
            return set()
        defined = re.compile(rf"^[\w:<>, ]*\b(?:{'|'.join(sorted(names))})(?:_out)?\(", re.MULTILINE)
        bindings = [path for path in self.tree.under("torch-ext/", ".cpp") if path != "torch-ext/torch_binding.cpp"]
        bindings = [path for path in bindings if defined.search(self.tree.read(path))]
        launched = {name for path in bindings for name in re.findall(r"\bltx::(\w+)\(", self.tree.read(path))}
        if not trains:
            launched = {name for name in launched if not name.endswith("_backward")}
        return self.included(bindings) | self.of_kernels(launched, backend)

    def included(self, paths: Iterable[str]) -> set[str]:
        """C++ files with the headers that they include."""
        found, waiting = set[str](), list(paths)
        while waiting:
            path = waiting.pop()
            if path in found:
                continue
            found.add(path)
            for name in re.findall(r'^#include "([^"]+)"', self.tree.read(path), re.MULTILINE):
                candidates = (posixpath.normpath(posixpath.join(posixpath.dirname(path), name)), f"kernel_src/{name}")
                waiting += [file for file in candidates if file in self.tree.paths]
        return found

    @functools.cached_property
    def builds(self) -> dict[str, Any]:
        """The kernels of build.toml, by their names."""
        return cast("dict[str, Any]", tomllib.loads(self.tree.read("build.toml")).get("kernel", {}))

    def of_kernels(self, functions: Collection[str], backend: str) -> set[str]:
        """The files and the flags of the kernels that these functions launch, and of others that those call."""
        kernels = {  # what build.toml says of each source of kernels
            path: (name, build["src"])
            for name, build in self.builds.items()
            for path in build["src"]
            if build["backend"] == backend and path.endswith((".cu", ".cpp"))
        }
        paths = [path for path in kernels if path in self.tree.paths]
        texts = {path: without_comments(self.tree.read(path)) for path in paths}
        paths = self.tree.under("kernel_src/", ".h", ".cuh")
        headers = {path: without_comments(self.tree.read(path)) for path in paths}
        declaration = re.compile(r"^[\w:<>&*, ]+ \*?(\w+)\([^;{}()]*\);", re.MULTILINE)
        declared = {name for text in (*headers.values(), *texts.values()) for name in declaration.findall(text)}
        definition = re.compile(r"^[\w:<>&*, ]+ \*?(\w+)\([^;{}()]*\) \{", re.MULTILINE)
        unnamed = re.compile(r"^namespace \{$.*?^\}  // namespace$", re.MULTILINE | re.DOTALL)
        home: dict[str, set[str]] = {}
        for path in texts:
            for name in definition.findall(unnamed.sub("", self.tree.read(path))):
                home.setdefault(name, set()).add(path)
        found: set[str] = set()
        waiting, seen = set(functions), set[str]()
        while waiting:
            name = waiting.pop()
            seen.add(name)
            for path in home.get(name, set()) - found:
                found.add(path)
                read = [texts[path], *(headers[file] for file in kernels[path][1] if file in headers)]
                calls = (re.findall(r"\b(\w+)(?:<[^;(){}]*>)?\(", declaration.sub("", text)) for text in read)
                called = {call for of_one in calls for call in of_one}
                waiting |= (called & declared) - seen - set(definition.findall(texts[path]))
        files = {file for path in found for file in kernels[path][1] if file in self.tree.paths}
        return files | {f"build.toml: {kernels[path][0]}" for path in found}


@functools.cache
def modules_of_classes() -> Mapping[str, str]:
    """The module, by its last name, of each class of the models that are installed with diffusers and transformers."""
    found: dict[str, str] = {}
    for library, pattern in (("diffusers", "models/**/*.py"), ("transformers", "models/*/modeling_*.py"),
                             ("transformers", "models/*/configuration_*.py")):  # fmt: skip
        spec = importlib.util.find_spec(library)
        for place in (spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(place).glob(pattern)):
                for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE):
                    found.setdefault(name, path.stem)
    return found


def _base(node: ast.ImportFrom, path: str) -> str:
    """What a relative import in a file names, before the names that it imports: a module without .py, or a folder."""
    folder = path
    for _ in range(node.level):
        folder = posixpath.dirname(folder)
    return posixpath.join(folder, *(node.module or "").split("."))


@dataclass(frozen=True)
class _Reached:
    """What a definition is made of, and what it refers to."""

    code: str
    words: frozenset[str]
    functions: frozenset[str]  # of the package
    references: tuple[tuple[str, str], ...]  # (file, definition)


class _Module:
    """The definitions of a Python file, and what it imports of the repository."""

    def __init__(self, tree: Tree, path: str) -> None:
        self.path = path
        self.names: dict[str, list[ast.stmt]] = {}
        self.imported: dict[str, tuple[str, str]] = {}  # (file, name in it; empty: the module)
        self.known: dict[tuple[str, frozenset[str]], _Reached] = {}
        places = dict.fromkeys((posixpath.dirname(path), *PROGRAM_FOLDERS))

        def file_of(name: str) -> str | None:
            files = (f"{place}/{name.replace('.', '/')}{end}" for place in places for end in (".py", "/__init__.py"))
            return next((file for file in files if file in tree.paths), None)

        body = parsed(tree.read(path)).body
        for node in (n for top in body for n in ast.walk(top)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if file := file_of(alias.name):
                        self.imported[alias.asname or alias.name] = file, ""
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    if file := file_of(f"{node.module}.{alias.name}"):
                        self.imported[alias.asname or alias.name] = file, ""
                    elif file := file_of(node.module):
                        self.imported[alias.asname or alias.name] = file, alias.name
                    elif alias.asname:  # handed on, as a definition of this file
                        self.names[alias.asname] = [ast.ImportFrom(node.module, [alias], 0)]
            elif isinstance(node, ast.ImportFrom) and (module := f"{_base(node, path)}.py") in tree.paths:
                self.imported |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}
        for top in body:
            for name in _defined(top):
                self.names.setdefault(name, []).append(top)
        plain = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
        self.only_defines = all(isinstance(top, plain) for top in body)

    def reached(self, name: str, keys: frozenset[str]) -> _Reached:
        """What a definition refers to, of a table as far as the keys name it."""
        is_table = any(_table(node) is not None for node in self.names[name])
        key = name, keys if is_table else frozenset[str]()
        if key not in self.known:
            self.known[key] = self._reached([_counted(node, keys) for node in self.names[name]])
        return self.known[key]

    def _reached(self, counted: list[tuple[ast.AST, bool]]) -> _Reached:
        words, functions, references = set[str](), set[str](), dict[tuple[str, str], None]()
        for node in (inner for top, _ in counted for inner in ast.walk(top)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
            elif isinstance(node, ast.Name):
                words.add(node.id)
                file, name = self.imported.get(node.id, (self.path, node.id))
                references[file, name] = None
            elif isinstance(node, ast.Attribute):
                words.add(node.attr)
                if "ltx" in (getattr(node.value, "id", ""), getattr(node.value, "attr", "")):
                    functions.add(node.attr)
                file, name = self.imported.get(getattr(node.value, "id", ""), ("", "a name"))
                if not name:
                    references[file, node.attr] = None
        code = "\n".join(ast.dump(node) for node, is_part in counted if is_part)
        return _Reached(code, frozenset(words), frozenset(functions), tuple(references))


def _table(node: ast.stmt) -> ast.expr | None:
    """The dict, list or comprehension that a statement names."""
    value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
    return value if isinstance(value, (ast.Dict, ast.List, ast.Tuple, ast.Set, ast.ListComp)) else None


def _counted(node: ast.stmt, keys: Collection[str]) -> tuple[ast.AST, bool]:
    """(what counts of a definition, whether its own text counts, and not what it refers to alone)."""
    value = _table(node)
    if not keys or value is None:
        return node, True
    if isinstance(value, ast.Dict):
        mine = [v for k, v in zip(value.keys, value.values) if isinstance(k, ast.Constant) and k.value in keys]
        return (ast.Tuple(mine, ast.Load()), True) if mine else (node, True)
    elements = value.elts if isinstance(value, (ast.List, ast.Tuple, ast.Set)) else [value]
    constants = [{n.value for n in ast.walk(e) if isinstance(n, ast.Constant)} for e in elements]
    mine = [element for element, found in zip(elements, constants) if found & set(keys)]
    if mine:
        return ast.Tuple(mine, ast.Load()), False
    sizes = not any(isinstance(one, str) for found in constants for one in found)
    if sizes or any(isinstance(element, (ast.Call, ast.Starred)) for element in elements):
        return ast.Tuple([], ast.Load()), False  # other cases, and sizes: a record names its own
    return node, True


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
    elif isinstance(node, (ast.If, ast.With, ast.Try, ast.For)):
        for inner in (n for n in ast.walk(node) if isinstance(n, ast.stmt) and n is not node):
            yield from _defined(inner)
