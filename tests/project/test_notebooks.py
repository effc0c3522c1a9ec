"""notebooks/: they are what their sources say, run in their short form, and hold no times of a CPU."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.build_checks import ROOT

pytest.importorskip("jupytext")
pytest.importorskip("transformers")
pyplot = pytest.importorskip("matplotlib.pyplot")

import nbformat  # noqa: E402

sys.path.insert(0, str(ROOT / "notebooks"))

sys.path.insert(0, str(ROOT / "examples"))

import kernels_demo  # noqa: E402
import make  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SOURCES = {path.stem: path for path in make.sources()}


def test_the_three() -> None:
    assert sorted(SOURCES) == ["advanced", "beginner", "write_your_own"]
    assert sorted(path.stem for path in make.NOTEBOOKS.glob("*.ipynb")) == sorted(SOURCES)


def test_notebooks_are_what_their_sources_say() -> None:
    assert make.main(["--check"]) == 0


def test_stored_outputs_name_no_folder_of_a_machine() -> None:
    folder = make.NOTEBOOKS.parent
    outputs = [
        nbformat.v4.new_output("stream", name="stderr", text="a warning of a library"),
        nbformat.v4.new_output("stream", name="stdout", text="printed"),
        nbformat.v4.new_output("execute_result", data={"text/plain": f"Path('{folder}/examples/kernel.cu')"}),
    ]
    cell = nbformat.v4.new_code_cell(outputs=outputs)
    make.tidy(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("text"), cell]))
    printed, result = cell.outputs
    assert printed.text == "printed" and result.data["text/plain"] == "Path('examples/kernel.cu')"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the notebooks, which may change."""
    for path in make.NOTEBOOKS.iterdir():
        if path.suffix in (".py", ".ipynb"):
            shutil.copy(path, tmp_path)
    (tmp_path / "make.py").unlink()
    monkeypatch.setattr(make, "NOTEBOOKS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(("old", "new"), [("SHORT = None", "SHORT = False"), ("\n# # ", "\n# # About ")])
def test_a_changed_source_is_noticed(folder: Path, capsys: pytest.CaptureFixture[str], old: str, new: str) -> None:
    """Outputs of the others stay, and those of the changed one go: they would be of other code."""
    for name in ("beginner", "advanced"):
        book = nbformat.read(folder / f"{name}.ipynb", as_version=4)
        code = next(cell for cell in book.cells if cell.cell_type == "code")
        code.outputs = [nbformat.v4.new_output("stream", text="stored by the test")]
        book.cells[1].source = "*The outputs are of a test.*"
        nbformat.write(book, folder / f"{name}.ipynb")
    assert make.main(["--check"]) == 0
    source = folder / "beginner.py"
    source.write_text(source.read_text().replace(old, new, 1))
    assert make.main(["--check"]) == 1
    assert capsys.readouterr().out.startswith("beginner.ipynb: not what beginner.py says")
    assert make.main(["--only", "advanced"]) == 0 and make.main(["--check"]) == 1
    assert make.main([]) == 0 and make.main(["--check"]) == 0
    assert "stored by the test" not in (folder / "beginner.ipynb").read_text()
    assert "stored by the test" in (folder / "advanced.ipynb").read_text()


@pytest.mark.parametrize("name", SOURCES)
def test_stored_outputs_are_of_a_gpu(name: str) -> None:
    book = nbformat.read(make.NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(book)
    if any(cell.get("outputs") for cell in book.cells):
        assert book.cells[1].source.startswith("*The outputs are of NVIDIA ")
        offline = any(
            "going on with this package's build" in output.get("text", "") for output in make.outputs_of(book)
        )
        assert (make.OFFLINE in book.cells[1].source) == offline
    else:
        assert book.cells[1].source.startswith(make.NOT_RUN)
    assert make.HOW_TO_OPEN in book.cells[1].source


def test_what_is_stored_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, expected in (
        (["--execute"], "expected a GPU"),
        (["--execute", "--short"], "--output of its own"),
        (["--only", "none"], "--only: invalid choice: 'none'"),
    ):
        with pytest.raises(SystemExit):
            make.main(arguments)
        assert expected in capsys.readouterr().err


def test_the_folder_is_made_before_notebooks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "folder"

    def execute(source: Path, short: bool) -> Any:
        assert folder.is_dir()
        return make.notebook_of(source)

    monkeypatch.setattr(make, "execute", execute)
    options = ["--execute", "--short", "--only", "beginner", "--output"]
    assert make.main([*options, str(folder)]) == 0 and (folder / "beginner.ipynb").is_file()
    with pytest.raises(SystemExit):
        make.main([*options, "/dev/null/folder"])
    assert "argument --output: [Errno " in capsys.readouterr().err


def test_a_notebook_is_executed(ltx: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `make notebooks` does, in its short form: cells, outputs, pictures, and the note on where it ran."""
    pytest.importorskip("nbclient")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert make.main(["--execute", "--short", "--only", "beginner", "--output", str(tmp_path)]) == 0
    book = nbformat.read(tmp_path / "beginner.ipynb", as_version=4)
    nbformat.validate(book)
    note = book.cells[1].source
    assert note.startswith("*The outputs are of ") and make.HOW_TO_OPEN in note and make.OFFLINE in note
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    pictures = [output for output in make.outputs_of(book) if "image/png" in output.get("data", {})]
    assert len(pictures) == 4


@pytest.mark.extended
@pytest.mark.parametrize("name", SOURCES)
def test_short_form_runs(
    ltx: ModuleType,
    traced_compile: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    """The source as a script; every race in it checks its results against float64."""
    pyplot.switch_backend("Agg")
    monkeypatch.chdir(ROOT / "notebooks")
    monkeypatch.setattr(kernels_demo, "fetch_community", lambda: (None, "no network here"))
    source = SOURCES[name].read_text()
    assert source.count("SHORT = None") == 1
    program = compile(source.replace("SHORT = None", "SHORT = True"), str(SOURCES[name]), "exec")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(program, names)
    output, demo = capsys.readouterr().out, names["demo"]
    assert ("going on with this package's build: no network here" in output) == (name == "beginner")
    assert len(pyplot.get_fignums()) == {"beginner": 4, "advanced": 8, "write_your_own": 2}[name]
    pyplot.close("all")
    races = names["measured"].values() if name == "advanced" else [names["records"]]
    assert all(demo.COMPILED in record.us for records in races for record in records)
    assert all(record.size <= 2**14 for records in races for record in records)
    if name == "write_your_own":
        runs = names["HAS_TRITON"] and (names["bench"].device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
        assert ("SKIPPED: Triton needs a GPU" in output) == (not runs) and ("Triton" in names["WAYS"]) == runs
        assert "cudaStream_t" not in str(demo.Source(ROOT / "examples/own_kernel/kernel_src/relu_squared_gate.cu",
                                                     "template <typename T, int kWidth>\n__global__"))  # fmt: skip


# ---- examples/own_kernel


@pytest.fixture(scope="module")
def own(ltx: ModuleType, backend: str, device: str, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    import kernels
    from helpers.build_checks import builder

    folder = tmp_path_factory.mktemp("own_kernel")
    arguments = ["--project", str(ROOT / "examples/own_kernel"), "--output", str(folder)]
    assert builder.main([*arguments, *(["--this-machine"] if device == "cuda" else ["--backend", "cpu"])]) == 0
    return kernels.get_local_kernel(folder, backend=None if device == "cuda" else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_own_kernel(own: ModuleType, device: str, dtype: torch.dtype) -> None:
    for shape in ((0,), (1,), (7,), (3, 5, 33), (4097,)):
        for offset in (0, 1):  # a view that begins at an odd address
            count = torch.Size(shape).numel()
            gate, up = (torch.randn(count + offset, device=device).to(dtype)[offset:].view(shape) for _ in range(2))
            exact = torch.relu(gate.double()).square() * up.double()
            result = own.relu_squared_gate(gate, up)
            assert result.dtype == dtype and result.shape == gate.shape
            torch.testing.assert_close(result.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=0)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, -1, 2], device=device).to(dtype)
    expected = torch.relu(special).square() * special
    torch.testing.assert_close(own.relu_squared_gate(special, special), expected, equal_nan=True)
    torch.library.opcheck(own.ops.relu_squared_gate.default, (gate, up))


def test_own_kernel_has_no_gradient(own: ModuleType, device: str) -> None:
    """It says so where torch would go on without one."""
    x = torch.ones(4, 6, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"^relu_squared_gate: expected a call under torch.no_grad\(\)"):
        own.relu_squared_gate(x.detach(), x)
    with torch.no_grad():
        assert own.relu_squared_gate(x, x).equal(x)


def test_own_kernel_names_the_argument(own: ModuleType, device: str) -> None:
    x = torch.ones(4, 6, device=device)
    for gate, up, error in (
        (x.double(), x, "gate: expected Float or BFloat16, got Double"),
        (x, x.bfloat16(), "up: expected Float, got BFloat16"),
        (x, x[:2], r"up: expected shape \[4, 6\], got shape \[2, 6\]"),
        (x.t(), x.t(), "gate: expected a contiguous tensor, got one with gaps or in another order"),
    ):
        with pytest.raises(RuntimeError, match=rf"^{error}$"):
            own.relu_squared_gate(gate, up)
