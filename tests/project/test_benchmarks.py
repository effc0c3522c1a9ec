"""The programs of benchmarks/ in small: that what they time computes the same, and that they write what they say."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.build import installed_by_pip
from helpers.diffusers_models import BLOCK_NAMES
from helpers.dispatch import Namespaces

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import op_cases  # noqa: E402
import ops  # noqa: E402
import plots  # noqa: E402
import readme  # noqa: E402
import records  # noqa: E402
import result_files  # noqa: E402
import sources  # noqa: E402
import timing  # noqa: E402
from pages import families, headline, writing  # noqa: E402
from pages.ops import of_commits  # noqa: E402
from pages.writing import table  # noqa: E402

SMALL = [op.case(op.small) for op in op_cases.OPS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_columns_agree(ltx: ModuleType, device: str, case: op_cases.Case, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = case.build(op_cases.Make(dtype, device))
    with torch.no_grad():
        calls = ops.calls(ltx, case, inputs, compiled=False)
        expected = ops.tensors(calls["eager"]())
        for call in calls.values():
            ops.assert_same(call(), expected)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_our_column_alone_runs_our_ops(ltx: ModuleType, backend: str, device: str, case: op_cases.Case) -> None:
    """Benchmarks were seen that timed plain torch under both names, or the op under both."""
    if backend != device:
        pytest.skip("without a GPU the CUDA variant runs the reference")
    ours = ltx._ops.add_op_namespace_prefix("").rstrip(":")
    hopper = device == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    ops_of_ours = {"ours"} if case.function != "attention" or hopper else set()  # elsewhere it is torch's
    with torch.no_grad():
        for name, call in ops.calls(
            ltx, case, case.build(op_cases.Make(torch.bfloat16, device)), compiled=False
        ).items():
            with Namespaces() as namespaces:
                call()
            assert (ours in namespaces.seen) == (name in ops_of_ours), name


def test_a_wrong_result_is_noticed() -> None:
    expected = torch.randn(4, 64).bfloat16()
    with pytest.raises(AssertionError, match="relative error"):
        ops.assert_same(expected * 1.1, [expected])
    with pytest.raises(AssertionError, match="relative error"):
        ops.assert_same(expected * float("nan"), [expected])


class FixedTimer:
    def measure(self, calls: dict[str, Callable[[], object]]) -> dict[str, timing.Timing]:
        return {name: timing.Timing(median=2.0 if name == "copy" else 3.0, p90=4.0) for name in calls}


def test_record(ltx: ModuleType, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Columns that do not apply are null; a peer that fails or computes something else is named, and not timed."""
    liger, quack = ModuleType("liger"), ModuleType("quack")
    liger.liger_rms_norm = lambda x, weight, eps: x
    case = next(case for case in SMALL if case.op == "rmsnorm")
    make = op_cases.Make(torch.bfloat16, device, {"liger": liger, "quack": quack})
    with torch.no_grad():
        record = ops.measure(ltx, FixedTimer(), case, make, compiled=False)
    assert record["us"] == {
        "ours": 3,
        "copy": 2,
        "eager": 3,
        "compile": None,
        "native": 3,
        "liger": None,
        "quack": None,
    }
    assert record["p90"]["ours"] == 4
    assert record["bytes"] == 2 * (3 * 128 * 2 + 128)
    assert record["failed"]["liger"].startswith("AssertionError: relative error")
    assert record["failed"]["quack"].startswith("AttributeError")
    ops.print_table([record])
    printed = capsys.readouterr().out
    assert "1.50" in printed
    assert "failed: liger on rmsnorm 3x128" in printed


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a GPU was asked to do, in order; between two events lie three microseconds."""
    order: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("event")

        def elapsed_time(self, end: Event) -> float:
            return 0.003

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("wait"))
    return order


def test_calls_are_timed_by_the_device_behind_a_flush(order: list[str]) -> None:
    """A host's timer saw launches, and inputs that lay in the L2 cache."""

    class Buffer:
        def zero_(self) -> None:
            order.append("flush")

    timer = object.__new__(timing.Timer)
    timer.rounds, timer.calls, timer.warm_up, timer.buffer, timer.flush_us = 1, 2, 1, Buffer(), 1e9
    measured = timer.measure({"call": lambda: order.append("call")})
    assert order == ["call", "wait", "call", "wait", *2 * ["flush", "flush", "event", "call", "event"], "wait"]
    assert measured == {"call": timing.Timing(median=3.0, p90=3.0)}
    largest_l2 = 126 << 20
    assert 4 * largest_l2 < timing.FLUSH_BYTES


def test_steps_are_timed_by_the_device_behind_a_warm_up(order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a wait between the steps that are timed, and those before them."""
    import steps

    seconds = iter([0.0, 0.4, 0.8, 1.2])
    monkeypatch.setattr(steps.time, "perf_counter", lambda: next(seconds))
    assert steps.time_steps(lambda: order.append("step"), 2, "cuda") == [0.003, 0.003]
    assert order == [*2 * ["step", "wait"], *3 * ["step"], "event", *2 * ["step", "event"], "wait"]


def test_published_cases_have_their_baselines() -> None:
    """A case without a time of torch.compile says why."""
    for path in (BENCHMARKS / "results").glob("*-ops.json"):
        for record in json.loads(path.read_text())["records"]:
            us = record["us"]
            assert all(us[column] > 0 for column in ("ours", "copy", "eager")), record
            assert record["failed"]["compile"] if us["compile"] is None else us["compile"] > 0, record
            if record["op"] in ("rmsnorm", "layernorm", "gelu"):
                assert us["native"] > 0, record


def test_each_peer_gets_its_own_module() -> None:
    make = op_cases.Make(torch.float32, "cpu", {"liger": ModuleType("liger"), "quack": ModuleType("quack")})
    calls = make.peers(liger=lambda module: module.__name__, quack=lambda module: module.__name__, other=str)
    assert {name: call() for name, call in calls.items()} == {"liger": "liger", "quack": "quack"}


def test_traffic() -> None:
    x, weight = torch.randn(3, 64), torch.randn(64)
    inputs = op_cases.Inputs((x, None, 1e-6), {"bias": weight, "approximate": "tanh"})
    assert ops.traffic(inputs, [x]) == 4 * (2 * 3 * 64 + 64)
    assert ops.copied(8192) == 4096
    assert ops.copied(8194) == 8192


def test_cases() -> None:
    """What the test above covers is what is timed, each case once, and the one of the host among them."""
    cases = op_cases.cases()
    recorded = {case.op for case in op_cases.recorded()}
    assert {case.op for case in cases} - recorded == {case.op for case in SMALL}
    assert len({case.name for case in cases}) == len(cases)
    assert op_cases.HOST_CASE in [(case.op, case.shape, case.dtype) for case in cases]
    assert {plots.family(case.op) for case in cases} == set(plots.FAMILIES)
    with pytest.raises(ValueError, match="op: expected one of a family, got no_such_op: name it in FAMILIES"):
        plots.family("no_such_op")


def test_the_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "results" / "gpu-ops.json"
    result_files.write(path, {"device": "gpu"}, [])
    result_files.write(path, {"device": "gpu"}, [{"op": "rmsnorm"}])
    assert json.loads(path.read_text()) == {"meta": {"device": "gpu"}, "records": [{"op": "rmsnorm"}]}
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_result_file_has_a_line_for_each_record() -> None:
    result = {
        "meta": {"device": "gpu", "failed": {}},
        "cases": 2,
        "records": [{"op": "rmsnorm", "us": {"ours": 1.5}}, {"op": "geglu"}],
        "suites": {"tests": {"files": {"test_norm": {"passed": 1}, "test_glu": {"passed": 2}}}},
    }
    assert result_files.as_text(result).splitlines() == [
        "{",
        '"meta": {',
        ' "device": "gpu",',
        ' "failed": {}',
        "},",
        '"cases": 2,',
        '"records": [',
        ' {"op": "rmsnorm", "us": {"ours": 1.5}},',
        ' {"op": "geglu"}',
        "],",
        '"suites": {',
        ' "tests": {',
        '  "files": {',
        '   "test_norm": {"passed": 1},',
        '   "test_glu": {"passed": 2}',
        "  }",
        " }",
        "}",
        "}",
    ]
    assert json.loads(result_files.as_text(result)) == result


@pytest.mark.host
@pytest.mark.usefixtures("one_thread")
def test_the_installed_package_is_measured_where_nothing_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip's package has no metadata.json: a result file has the id of its ops, and no commit."""
    import command_line
    import cpu

    monkeypatch.delitem(sys.modules, "ltx_fused", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(command_line, "NAMED", False)
    monkeypatch.setattr(command_line, "BUILD", tmp_path / "build")
    installed_by_pip(tmp_path)
    ltx, metadata = result_files.load_package.__wrapped__()
    assert ltx.__name__ == "ltx_fused" and result_files.common_meta(metadata)["kernels"] == "_pip_ops"
    path = tmp_path / "cpu.json"
    monkeypatch.setattr(sys, "argv", ["cpu.py", "--only", "no such op", "--threads", "1", "--output", str(path)])
    assert cpu.main() == 0
    meta = json.loads(path.read_text())["meta"]
    assert (meta["kernels"], meta["commit"], meta["dirty"]) == ("_pip_ops", None, None)
    del sys.modules["ltx_fused"]


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results").glob("*.json")), ids=lambda path: path.stem)
def test_result_files_are_written_by_result_files(path: Path) -> None:
    """Pretty-printed, the results were a third of the repository's lines."""
    text = path.read_text()
    assert text == result_files.as_text(json.loads(text, parse_constant=pytest.fail))


def test_without_a_gpu() -> None:
    process = subprocess.run(
        [sys.executable, str(BENCHMARKS / "ops.py")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 1
    assert process.stderr.startswith("benchmarks/ops.py needs an NVIDIA GPU")


@pytest.mark.skipif(not sources.History().is_whole, reason="needs the repository with all of its commits")
def test_readme_shows_the_results() -> None:
    process = subprocess.run(
        [sys.executable, str(BENCHMARKS / "readme.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize("name", plots.PNGS)
def test_a_picture_of_other_records_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And drawn again. The pictures here are compared with their records by readme.py --check."""
    pytest.importorskip("matplotlib")
    result = plots.load(plots.PNGS[name].file)
    monkeypatch.setattr(plots, "RESULTS", tmp_path)
    monkeypatch.setattr(plots, "PNGS", {name: plots.PNGS[name]})
    path = tmp_path / f"{plots.PNGS[name].file}.json"
    path.write_text(json.dumps(result))
    assert plots.outdated() == [name]  # there is none
    plots.redraw([name])
    assert plots.outdated() == []
    result["records"][0]["commit"] = "f" * 40
    path.write_text(json.dumps(result))
    assert plots.outdated() == [name]


def test_results_are_cited() -> None:
    """Each file by a page or beside a constant, and each question of the trials by the file that it names."""
    sources = [path for place in ("kernel_src", "torch-ext") for path in (readme.REPOSITORY / place).rglob("*.*")]
    text = "\n".join(path.read_text() for path in (*sources, *(BENCHMARKS / "pages").glob("*.py"), *readme._pages()))
    text = re.sub("<!-- files -->.*?<!-- /files -->", "", text, flags=re.DOTALL)  # the list of all files cites none
    stems = [path.stem for path in (BENCHMARKS / "results").glob("*.json") if not records.is_ledger(path.stem)]
    assert [stem for stem in stems if not re.search(rf"\b{stem}(?![\w-])", text)] == []
    trials = writing.load("h200-tuning")
    assert {record["question"] for record in trials["records"]} == trials["cited_by"].keys()
    for file in set(trials["cited_by"].values()):
        assert "h200-tuning" in (readme.REPOSITORY / file).read_text(), file


def test_every_picture_stands_in_a_page() -> None:
    shown = "".join(page.read_text() for page in readme._pages())
    pictures = [path.name for path in (BENCHMARKS / "results").iterdir() if path.suffix != ".json"]
    assert pictures and [name for name in pictures if f"benchmarks/results/{name}" not in shown] == []


def test_every_table_has_a_writer() -> None:
    """A table that no function writes would keep its figures forever."""
    closed = {
        (str(page.relative_to(writing.REPOSITORY)), name)
        for page in readme._pages()
        for name in re.findall("^<!-- /(.+) -->$", page.read_text(), re.MULTILINE)
    }
    by_hand = {name for _, name in closed - writing.BLOCKS.keys()}
    assert by_hand == {"data sheet", "variants"}  # NVIDIA's figures; what tools/release.py writes


def test_guides_have_no_tables_of_measurements() -> None:
    """They are in docs/measured/. A guide has what is derived from the build, and blocks of a few lines."""
    narratives = {"docs/case-study.md", "docs/profiling.md", "docs/attention-trials.md"}
    of_guides = {name for page, name in writing.BLOCKS if Path(page).parent == Path("docs") and page not in narratives}
    derived = {"diffusers", "transformers", "supported", "left", "left in bf16", "versions", "cards"}
    assert of_guides == derived | {"index", "stock weights", "trust"}


def test_a_table_is_its_head_and_its_row() -> None:
    head, row = "| | ms | gain | error |", "| {name} | {ms.ours:.1f} | {ms.cudnn/ms.ours:.2f} x | {error?:.1e} |"
    records = [{"ms": {"ours": 2.0, "cudnn": 3.0}}, {"ms": {"ours": 4.0, "cudnn": 2.0}, "error": 0.25}]
    written = table(head, row, records, name=lambda record: f"{len(record)} keys")
    rows = ["| 1 keys | 2.0 | 1.50 x |  |", "| 2 keys | 4.0 | 0.50 x | 2.5e-01 |"]
    assert written.splitlines() == [head, "|---|---|---|---|", *rows]
    with pytest.raises(KeyError, match="error"):
        table("| error |", "| {error:.1e} |", records)
    with pytest.raises(ValueError, match="expected a cell for each column of"):
        table("| a | b |", "| {error?} |", records)


def test_gains_are_of_one_depth_and_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's first layers, and an autoencoder's other half, are not divided by each other."""
    language = {"model": "llama-8b", "tokens": 8192, "batch": 1}
    video = {"model": "qwen", "frames": 49, "height": 512, "dtype": "bf16"}
    results = {
        "h200-llm": [
            {
                **language,
                "layers": 32,
                "config": "eager",
                "prefill_ms": 60.0,
                "decode_ms": 6.0,
                "first_decode_ms": 50.0,
            },
            {
                **language,
                "layers": 32,
                "config": "kernels_fp8",
                "prefill_ms": 30.0,
                "decode_ms": 4.0,
                "first_decode_ms": 10.0,
            },
            {**language, "layers": 8, "config": "eager", "prefill_ms": 15.0, "decode_ms": 2.0, "first_decode_ms": 4.0},
            {
                **language,
                "layers": 8,
                "config": "kernels",
                "prefill_ms": 10.0,
                "decode_ms": 1.0,
                "first_decode_ms": 2.0,
            },
        ],
        "h200-vae": [
            {**video, "half": "decode", "config": "stock", "decode_ms": 9.0},
            {**video, "half": "decode", "config": "kernels", "decode_ms": 3.0},
            {**video, "half": "encode", "config": "kernels", "encode_ms": 1.0},
            {**video, "model": "wan", "half": "decode", "config": "stock", "decode_ms": 8.0},
            {**video, "model": "wan", "half": "decode", "config": "kernels", "decode_ms": 4.0},
        ],
    }
    monkeypatch.setattr(writing, "load", lambda name: {"records": results.get(name, [])})
    assert families.measured_gains() == {
        "llama": [
            "Llama 8B, prompt of 8192 tokens: fp8 2.00 x",
            "Llama 8B, token: fp8 1.50 x",
            "Llama 8B, token at a length that is new to the process: fp8 5.00 x",
        ],
        "vae_wan": ["decoders, 49 frames: bf16 2.00 to 3.00 x"],
    }
    results["h200-vae"].append(results["h200-vae"][0])
    with pytest.raises(ValueError, match="expected one record of each configuration, got 3 in all"):
        families.measured_gains()


def test_the_first_screen_has_the_faster_mode_of_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    ms = {"baseline": 12.0, "compile": 8.0, "autotune_compile": 6.0, "kernels": 4.0}
    records = [{"config": config, "step_ms": step_ms} for config, step_ms in ms.items()]
    monkeypatch.setattr(headline, "records_of", lambda file, model: records)
    assert headline._gains("flux") == {"compile": 2.0, "kernels": 3.0}
    assert "| FLUX.1 dev | 12 | 6 | 4 |  |" in headline.models()
    records.pop(2)
    assert headline._gains("flux") == {"compile": 1.5, "kernels": 3.0}


@pytest.mark.parametrize(
    "page", ["no block\n", "<!-- a -->\nx\n", "<!-- a -->\n<!-- /a -->\n<!-- a -->\n<!-- /a -->\n"]
)
def test_a_block_stands_once_in_its_page(page: str) -> None:
    good = "1\n<!-- a -->\nold\n<!-- /a -->\n2\n"
    assert readme.with_block(good, "a", "new\n") == good.replace("old", "new")
    with pytest.raises(ValueError, match="<!-- a -->: expected it once"):
        readme.with_block(page, "a", "new\n")


def test_a_figure_without_a_number_is_an_error() -> None:
    comment = "<!-- h200-train-llm model=qwen3-8b config=kernels step_ms -->"
    assert readme.with_figures(f"0.0{comment} ms") != f"0.0{comment} ms"
    with pytest.raises(ValueError, match="expected a number before"):
        readme.with_figures(f"?{comment} ms")
    assert readme.with_figures("<!-- needs the network -->") == "<!-- needs the network -->"


def test_update_keeps_what_is_not_measured_again(tmp_path: Path) -> None:
    """--update: the other cases of a result, in the table's order, from the same machine alone; each commit is told.

    A run that is cut off keeps the cases that it has not come to.
    """
    meta = {"device": "GPU", "torch": "2.11", "cuda": "13.0", "commit": "a" * 40}
    first, second, third = op_cases.cases()[:3]
    records = [{"op": c.op, "shape": list(c.shape), "dtype": c.dtype} for c in (first, second, third)]
    path = tmp_path / "ops.json"
    result_files.write(path, meta, records)
    now = {**meta, "commit": "b" * 40}
    found, kept = ops.earlier(path, now)
    assert found == meta and kept == records
    updated = ops.in_order([*kept, {**records[1], "commit": now["commit"]}])
    assert [plots.case_name(record) for record in updated] == [first.name, second.name, third.name]
    assert of_commits({"meta": meta, "records": updated}) == "of commits aaaaaaa (2), bbbbbbb (1)"
    assert of_commits({"meta": meta, "records": records}) == "of commit aaaaaaa"
    with pytest.raises(SystemExit, match=r"--update: .* is of device GPU, this machine has other"):
        ops.earlier(path, {**now, "device": "other"})


@pytest.mark.parametrize("model", ["flux", "wan"])
@pytest.mark.usefixtures("cpu_kernels")
def test_models_are_timed_and_compared(ltx: ModuleType, tmp_path: Path, model: str) -> None:
    """Another model's records stay in the file, with what their run said of them."""
    pytest.importorskip("diffusers")
    import models

    path = tmp_path / "models.json"
    old = {"config": "baseline", "step_ms": 1.0, "first_step_s": 1.0}
    earlier = [{"model": "other", **old}, {"model": model, **old}]
    meta = {"commit": "a" * 40, "device": result_files.device_name()}
    path.write_text(json.dumps({"meta": meta, "records": earlier}))
    arguments = ["--tiny", "--device", "cpu", "--dtype", "fp32", "--rounds", "1", "--steps", "1", "--output", str(path)]
    assert models.main([*arguments, "--models", model, "--configs", "baseline", "kernels"]) == 0
    other, baseline, kernels = json.loads(path.read_text())["records"]
    assert other == {"model": "other", **old, "commit": "a" * 40} and kernels["date"]
    assert (baseline["config"], kernels["config"]) == ("baseline", "kernels")
    assert baseline["error_vs_fp32"] == 0 < kernels["error_vs_fp32"] < 1e-6
    assert baseline["loop_error_vs_fp32"] == 0 < kernels["loop_error_vs_fp32"] < 1e-5 and kernels["loop_steps"] == 8
    assert kernels["step_ms"] > 0 and kernels["shape"] == "tiny"


def test_every_model_denoises() -> None:
    """Its result has the form of its latents, which a benchmark moves by it."""
    pytest.importorskip("diffusers")
    import model_shapes
    import models

    for name, known in model_shapes.MODELS.items():
        model = known.construct(True, torch.float32, "cpu")
        inputs = known.inputs(model, model_shapes.Make(torch.float32, "cpu"), **known.tiny_shape)
        start = next(iter(inputs.values()))
        with torch.no_grad():
            latents = models.denoise(model, inputs, 2)
        assert latents.numel() == sum(x.numel() for x in (start if isinstance(start, list) else [start])), name
        assert latents.isfinite().all(), name


@pytest.mark.parametrize("shared", [False, True])
def test_a_first_step_that_waited_for_others_is_not_written(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    import sharing
    import steps
    from rich.progress import Progress

    monkeypatch.setenv(sharing.VARIABLE, "lock") if shared else monkeypatch.delenv(sharing.VARIABLE, raising=False)
    made = torch.nn.Linear(2, 2)
    measured = steps.measure(
        "a model",
        lambda config: made,
        lambda model: lambda: model(torch.ones(2)).detach(),
        ["baseline", "compile"],
        steps.Turns(rounds=1, steps=1),
        "cpu",
        Progress(disable=True),
    )
    assert ["first_step_s" in one.record for one in measured.values()] == [True, not shared]


@pytest.mark.parametrize("shared", [False, True])
def test_a_first_image_that_waited_for_others_is_not_written(
    ltx: ModuleType, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    pytest.importorskip("diffusers")
    import image
    import sharing
    import whole
    from rich.progress import Progress

    monkeypatch.setenv(sharing.VARIABLE, "lock") if shared else monkeypatch.delenv(sharing.VARIABLE, raising=False)
    configs = ["stock", "compile", "kernels", *image.FLUX_FAST]
    records = whole.measure(
        "a pipeline",
        configs,
        lambda config: SimpleNamespace(components={}),
        lambda pipe: {"image_ms": 1.0},
        ltx,
        1,
        SimpleNamespace(device="cpu", idle=False),
        Progress(disable=True),
    )
    compiled = {"compile", *image.FLUX_FAST}
    for config, record in records:
        assert ("first_s" in record) == (not shared or config not in compiled), config


def test_the_number_of_blocks_of_every_model_is_known() -> None:
    """A model that names it otherwise would be built whole where few blocks are enough."""
    pytest.importorskip("diffusers")
    import model_shapes

    for name, known in model_shapes.MODELS.items():
        changed = model_shapes.of_few_blocks(known, 2).config
        assert {changed[depth] for depth in model_shapes.DEPTHS if depth in changed} == {2}, name


@pytest.mark.usefixtures("cpu_kernels")
def test_profiles_are_written_to_a_file_of_their_own(
    ltx: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times are in the first file before the profile begins; its kernels are in the second one alone."""
    pytest.importorskip("diffusers")
    import models

    path, profiles = tmp_path / "models.json", tmp_path / "models-profile.json"
    timed = {"model": "wan", "shape": "tiny", "config": "kernels", "step_ms": 1.0}
    profiled = {"kernels": [], "ms_by_kind": {"GEMM": 0.8}, "clock_mhz": 1500}

    def records(self: Any, name: str) -> Iterator[list[dict[str, Any]]]:
        yield [dict(timed)]
        assert json.loads(path.read_text())["records"][0]["step_ms"] == 1.0 and not profiles.exists()
        yield [{**timed, **profiled}]

    monkeypatch.setattr(models.Benchmark, "model", records)
    assert models.main(["--device", "cpu", "--models", "wan", "--profile", "--output", str(path)]) == 0
    (record,), (profile,) = (json.loads(file.read_text())["records"] for file in (path, profiles))
    assert timed.items() <= record.items() and not profiled.keys() & record.keys()
    assert {**timed, **profiled}.items() <= profile.items() and profile["date"] == record["date"]


@pytest.mark.usefixtures("cpu_kernels")
def test_a_model_that_fails_is_named(
    ltx: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("diffusers")
    import model_shapes
    import models

    def fail(*arguments: Any) -> None:
        raise RuntimeError("no such model")

    monkeypatch.setattr(model_shapes.Model, "construct", fail)
    assert models.main(["--tiny", "--device", "cpu", "--models", "wan", "--output", str(tmp_path / "m.json")]) == 1
    assert "wan failed: RuntimeError: no such model" in capsys.readouterr().out


def test_host_times_are_medians_and_ratios_to_the_stock_model(ltx: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three rounds with known seconds, in which the configurations take turns."""
    pytest.importorskip("diffusers")
    import host

    monkeypatch.setitem(host.DEEP, "ltx", ("ltx13b", {"num_layers": 1}))
    monkeypatch.setattr(host, "WARM_UP", 1)
    seconds = iter([0.1, 0.2, 0.4, 0.2, 0.1, 0.3])
    monkeypatch.setattr(host, "host_s", lambda step, device: next(seconds))
    configs = ["baseline", "kernels"]
    options = host.argparse.Namespace(dtype="fp32", device="cpu", configs=configs, rounds=3)
    with torch.no_grad():
        stock, kernels = host.measure("ltx", ltx, options)
    assert (stock["host_ms"], stock["least_ms"], stock["ratio_to_baseline"]) == (100, 100, 1)
    assert (kernels["host_ms"], kernels["least_ms"], kernels["ratio_to_baseline"]) == (200, 200, 2)


@pytest.mark.parametrize("call", [1, 2])  # the one for the error, and the one that is timed
@pytest.mark.usefixtures("cpu_kernels")
def test_a_configuration_that_fails_is_named_and_the_others_are_measured(
    ltx: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: int
) -> None:
    pytest.importorskip("diffusers")
    import models

    make, made = models.make_model, []

    def make_or_fail(config: str, *rest: Any) -> Any:
        made.append(config)
        if config == "kernels_fp8" and made.count(config) == call:
            raise RuntimeError("too little memory")
        return make(config, *rest)

    monkeypatch.setattr(models, "make_model", make_or_fail)
    path = tmp_path / "models.json"
    arguments = ["--tiny", "--device", "cpu", "--dtype", "fp32", "--rounds", "1", "--steps", "1", "--output", str(path)]
    configs = ["baseline", "kernels_fp8", "kernels"]
    assert models.main([*arguments, "--models", "wan", "--configs", *configs]) == 1
    assert [record["config"] for record in json.loads(path.read_text())["records"]] == ["baseline", "kernels"]
    assert "kernels fp8 failed: RuntimeError: too little memory" in capsys.readouterr().out


def test_every_model_says_how_deep_it_was(ltx: ModuleType) -> None:
    pytest.importorskip("diffusers")
    import model_shapes
    import models

    flux = model_shapes.MODELS["flux"].construct(True, torch.float32, "cpu")
    shallow = models.first_blocks(flux, 1)
    assert {name: len(blocks) for name, blocks in models.block_lists(flux).items()} == {
        "transformer_blocks": 2,
        "single_transformer_blocks": 2,
    }
    assert len(shallow.transformer_blocks) == 1 and len(flux.transformer_blocks) == 2
    assert shallow.transformer_blocks[0].attn.to_q.weight is flux.transformer_blocks[0].attn.to_q.weight


@pytest.mark.usefixtures("cpu_kernels")
def test_ltx_video_is_timed(ltx: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    import ltx as script

    path = tmp_path / "ltx.json"
    size = ["--frames", "9", "--height", "64", "--width", "64", "--rounds", "1", "--steps", "2"]
    arguments = ["--model", "tiny", "--device", "cpu", "--dtype", "fp32", *size, "--output", str(path)]
    assert script.main([*arguments, "--configs", "baseline", "kernels"]) == 0
    baseline, kernels = json.loads(path.read_text())["records"]
    assert baseline["error_vs_fp32"] == 0 < kernels["error_vs_fp32"] < 1e-6
    assert kernels["step_ms"] > 0 and kernels["psnr_vs_baseline"] > 100


@pytest.mark.usefixtures("cpu_kernels")
def test_the_host_is_timed(ltx: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused blocks call fewer functions than the stock ones, whatever the machine does beside."""
    pytest.importorskip("diffusers")
    import host

    monkeypatch.setitem(host.DEEP, "ltx", ("ltx13b", {"num_layers": 2}))
    path = tmp_path / "host.json"
    arguments = ["--models", "ltx", "--device", "cpu", "--dtype", "fp32", "--rounds", "1", "--output", str(path)]
    assert host.main([*arguments, "--configs", "baseline", "kernels"]) == 0
    baseline, kernels, *calls = json.loads(path.read_text())["records"]
    assert kernels["c_calls"] < baseline["c_calls"] and kernels["python_calls"] < baseline["python_calls"]
    assert baseline["ratio_to_baseline"] == 1 and kernels["host_ms"] > 0
    assert {record["op"] for record in calls} >= {"rmsnorm", "qk_norm_rope"}
    assert all(record["ours_us"] > 0 < record["stock_us"] for record in calls)


def test_a_result_names_the_commit_of_its_build() -> None:
    """And not the checkout's, which may have no history."""
    package = {"id": "build", "provenance": {"kernel": {"commit": "c" * 40, "dirty": True}}}
    meta = result_files.common_meta(package)
    assert (meta["kernels"], meta["commit"], meta["dirty"]) == ("build", "c" * 40 + "-dirty", True)
    assert result_files.common_meta({"id": "build"})["commit"] is None
    assert result_files.output_of(["no-such-command"]) is None


@pytest.mark.usefixtures("cpu_kernels")
def test_language_models_are_timed_and_compared(ltx: ModuleType, tmp_path: Path) -> None:
    """A later run adds to the file: other sizes of a model stay, and the same size is replaced."""
    pytest.importorskip("transformers")
    import llm

    path = tmp_path / "llm.json"
    options = ["--models", "tiny", "--layers", "2", "--device", "cpu", "--dtype", "fp32", "--output", str(path)]
    options += ["--rounds", "1", "--steps", "1", "--decoded", "5", "--warm-up", "0", "--configs", "eager", "kernels"]
    for sizes in (["20x1", "8x2"], ["20x1"]):
        assert llm.main([*options, "--sizes", *sizes]) == 0
    records = json.loads(path.read_text())["records"]
    assert sorted((r["tokens"], r["batch"], r["config"]) for r in records) == [
        (8, 2, "eager"), (8, 2, "kernels"), (20, 1, "eager"), (20, 1, "kernels")
    ]  # fmt: skip
    assert all(("commit" in r) == (r["tokens"] == 8) for r in records), "kept records name their commit"
    eager, kernels = (r for r in records if r["tokens"] == 20)
    assert eager["error_vs_fp32"] == 0 < kernels["error_vs_fp32"] < 1e-5
    assert eager["prefill_ms"] > 0 < kernels["decode_ms"] and kernels["layers"] == 2 and kernels["replaced"]


def test_the_table_of_language_models() -> None:
    """How many times as fast a configuration is: a prompt in half of the time is 2 x eager."""
    pytest.importorskip("transformers")
    import llm
    from rich.console import Console

    size = {"model": "m", "tokens": 8, "batch": 1}
    times = {"eager": (4.0, 9.0), "liger": (3.0, 9.0), "kernels": (2.0, 3.0)}
    console = Console(file=io.StringIO(), record=True, width=200)
    records = [{**size, "config": name, "prefill_ms": a, "decode_ms": b} for name, (a, b) in times.items()]
    llm.print_table(records, console)
    rows = [line.strip("│ ").split("│") for line in console.export_text().splitlines() if "1 x 8" in line]
    found = {cells[2].strip(): [cell.strip() for cell in cells[3:8]] for cells in rows}
    assert found["kernels"] == ["2.00", "2.000", "1.500", "3.00", "3.000"]
    assert found["eager"] == ["4.00", "1.000", "0.750", "9.00", "1.000"]


def test_psnr_of_a_step() -> None:
    """A tenth of the range of the expected values everywhere is 20 dB."""
    import steps

    expected = torch.tensor([-1.0, 0.0, 3.0])
    assert steps.psnr(expected + 0.4, expected) == pytest.approx(20.0)
    assert steps.psnr(expected, expected) is None


def test_slow_steps_make_short_turns() -> None:
    import steps

    turns = steps.Turns(steps=10, seconds=1.0)
    assert [turns.steps_of(seconds) for seconds in (0.01, 0.25, 3.0)] == [10, 4, 1]
    assert steps.Turns(steps=10).steps_of(3.0) == 10


@pytest.mark.parametrize("model", ["ltx", "ltx2"])
@pytest.mark.usefixtures("cpu_kernels")
def test_clips_are_timed_by_part(model: str, ltx: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers")
    import clip

    monkeypatch.setitem(clip.RECIPES, "distilled", clip.Recipe(3, 1.0))
    samples: list[int] = []  # of each forward of a transformer
    make = clip.random_pipeline

    def counted(*given: Any) -> Any:
        pipe = make(*given)
        count = lambda module, args, kwargs: samples.append(kwargs["hidden_states"].shape[0])  # noqa: E731
        pipe.transformer.register_forward_pre_hook(count, with_kwargs=True)
        return pipe

    monkeypatch.setattr(clip, "random_pipeline", counted)
    path = tmp_path / "clip.json"
    arguments = ["--models", model, "--tiny", "--device", "cpu", "--dtype", "fp32", "--clips", "1"]
    size = ["--recipes", "distilled", "--sizes", "9x64x64", "--configs", "stock", "kernels"]
    assert clip.main([*arguments, *size, "--output", str(path)]) == 0
    records = json.loads(path.read_text())["records"]
    assert [(record["model"], record["config"]) for record in records] == [(model, "stock"), (model, "kernels")]
    for record in records:
        assert (record["frames"], record["height"], record["width"], record["steps"]) == (9, 64, 64, 3)
        parts = record["text_ms"] + record["steps_ms"] + record["decode_ms"]
        assert 0 < parts <= record["clip_ms"] < 2 * parts + 1000
        assert record["step_ms"] == pytest.approx(record["steps_ms"] / 3, rel=0.9)
    # Three clips of each configuration on a CPU, of three steps: without guidance one sample each.
    assert samples == [1] * len(samples) and len(samples) == 2 * 3 * 3


IMAGES = [
    "schnell",
    "zimage",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("flux2_klein", "sd35", "qwen")),
]


@pytest.mark.parametrize("model", IMAGES)
@pytest.mark.usefixtures("cpu_kernels")
def test_images_are_timed_by_part(model: str, ltx: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both configurations give the latents that the stock pipeline gives in float32."""
    pytest.importorskip("diffusers")
    import image

    reports: list[Any] = []
    optimize = ltx.optimize
    monkeypatch.setattr(ltx, "optimize", lambda *args, **options: reports.append(optimize(*args, **options)))
    monkeypatch.setitem(image.MODELS, model, replace(image.MODELS[model], steps=2))
    path = tmp_path / "image.json"
    arguments = ["--models", model, "--tiny", "--device", "cpu", "--dtype", "fp32", "--images", "1", "--size", "64x64"]
    assert image.main([*arguments, "--configs", "stock", "kernels", "--output", str(path)]) == 0
    records = json.loads(path.read_text())["records"]
    assert [record["config"] for record in records] == ["stock", "kernels"]
    for record in records:
        parts = [record[part] for part in ("text_ms", "steps_ms", "decode_ms", "post_ms")]
        assert min(parts) > 0 and record["image_ms"] == pytest.approx(sum(parts), abs=0.1)
        assert record["tensor_ms"] == pytest.approx(record["image_ms"] - record["post_ms"], abs=0.1)
        assert record["step_ms"] == pytest.approx(record["steps_ms"] / 2, abs=0.1)
    stock, ours = (record["error_vs_fp32"] for record in records)
    assert stock == 0 < ours < 1e-5
    (report,) = reports
    assert report.fallbacks == {} and all(site.calls for site in report.sites if site.name.endswith(BLOCK_NAMES))


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_kernels")
def test_caches_of_images(ltx: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TaylorSeer skips work, on the optimized pipeline as on the stock one; FirstBlockCache finds nothing to skip."""
    pytest.importorskip("diffusers")
    import image

    monkeypatch.setitem(image.MODELS, "dev", replace(image.MODELS["dev"], steps=8))
    path = tmp_path / "image.json"
    arguments = ["--models", "dev", "--tiny", "--device", "cpu", "--dtype", "fp32", "--images", "1", "--size", "64x64"]
    assert image.main([*arguments, "--configs", *image.CACHES, "--output", str(path)]) == 0
    errors = {record["config"]: record["error_vs_fp32"] for record in json.loads(path.read_text())["records"]}
    for cache in ("fbc", "taylor"):
        assert errors[f"kernels_{cache}"] == pytest.approx(errors[f"stock_{cache}"], rel=1e-2, abs=1e-6)
    assert errors["stock_taylor"] > 1e-3


@torch.no_grad()
@pytest.mark.usefixtures("cpu_kernels")
def test_a_clip_with_sound_is_the_same_with_the_kernels(ltx: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Picture and sound; nothing of the optimized parts falls back to the stock modules."""
    pytest.importorskip("diffusers")
    import clip

    reports: list[Any] = []
    optimize = ltx.optimize
    monkeypatch.setattr(ltx, "optimize", lambda *args, **options: reports.append(optimize(*args, **options)))
    pipe = clip.random_pipeline(clip.MODELS["ltx2"], True, torch.device("cpu"), torch.float32)
    request = {"num_frames": 9, "height": 64, "width": 64, "num_inference_steps": 2, "output_type": "pt"}
    results = []
    for config in ("stock", "kernels"):
        made = clip.configured(config, pipe, ltx)
        made.set_progress_bar_config(disable=True)
        result = made("waves", guidance_scale=1.0, generator=torch.Generator().manual_seed(0), **request)
        results.append((result.frames, result.audio))
    replaced = {name for report in reports for name in report.replaced}
    blocks = {"LTX2VideoTransformerBlock", "LTX2VideoDecoder3d", "Gemma3DecoderLayer"}
    assert blocks <= {name.split(".")[-1] for name in replaced} and not any(report.fallbacks for report in reports)
    for stock, ours in zip(*results):
        assert (stock - ours).norm() < 1e-5 * stock.norm() and stock.std() > 0


def test_an_update_keeps_what_it_does_not_measure(tmp_path: Path) -> None:

    path, meta = tmp_path / "a.json", {"device": "one", "commit": "1"}
    first = [{"model": "a", "size": 1, "ms": 1.0}, {"model": "b", "size": 1, "ms": 2.0}]
    assert result_files.kept_records(path, meta, first, ("model", "size")) == first
    result_files.write(path, meta, first)
    second = [{"model": "b", "size": 1, "ms": 3.0}]
    kept = result_files.kept_records(path, {**meta, "commit": "2"}, second, ("model", "size"))
    assert kept == [{"commit": "1", **first[0]}, *second]
    result_files.write(path, {**meta, "commit": "2"}, kept)
    third = [{"model": "c", "size": 1, "ms": 4.0}]
    kept = result_files.kept_records(path, {**meta, "commit": "3"}, third, ("model", "size"))
    assert [(record["model"], record.get("commit")) for record in kept] == [("a", "1"), ("b", "2"), ("c", None)]
    with pytest.raises(SystemExit, match=r"expected records of another, got some of one; give --output"):
        result_files.kept_records(path, {**meta, "device": "another"}, third, ("model", "size"))


@pytest.mark.usefixtures("cpu_kernels")
def test_autoencoders_are_timed_by_half(ltx: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    import vae

    path = tmp_path / "vae.json"
    common = ["--tiny", "--device", "cpu", "--dtype", "fp32", "--no-ops", "--rounds", "1", "--sizes", "5x64x64"]
    common += ["--configs", "stock", "kernels", "--output", str(path)]
    assert vae.main([*common, "--models", "wan", "--halves", "decode"]) == 0
    assert vae.main([*common, "--models", "wan", "wan22", "--halves", "encode", "--update"]) == 0
    with pytest.raises(SystemExit):
        vae.main([*common, "--models", "flux", "--update"])  # an image of five frames
    image = ["--models", "flux", "flux2_small", "--configs", "stock", "channels_last", "--sizes", "1x64x64", "--update"]
    assert vae.main([*common, *image]) == 0
    records = json.loads(path.read_text())["records"]
    found = [(record["model"], record["half"], record["config"]) for record in records]
    halves = [("wan", "decode"), ("wan", "encode"), ("wan22", "encode")]
    images = [(m, "decode", config) for m in ("flux", "flux2_small") for config in ("stock", "channels_last")]
    assert found == [*((*half, config) for half in halves for config in ("stock", "kernels")), *images]
    assert all(record[f"{record['half']}_ms"] > 0 for record in records)


@pytest.mark.extended
@pytest.mark.usefixtures("cpu_kernels")
def test_memory_by_offload(ltx: ModuleType, tmp_path: Path) -> None:
    """fp8 halves what an offload moves of the quantised layers, and holds their stock weights beside."""
    pytest.importorskip("diffusers")
    pytest.importorskip("accelerate")
    import memory

    path = tmp_path / "memory.json"
    assert memory.main(["--tiny", "--device", "cpu", "--models", "wan", "--output", str(path)]) == 0
    records = json.loads(path.read_text())["records"]
    assert [(one["config"], one["offload"]) for one in records] == [
        *((config, mode) for config in memory.CONFIGS if config != memory.BESIDE for mode in memory.OFFLOADS),
        (memory.BESIDE, "none"),
    ]
    bf16, fp8 = ([one for one in records if one["config"] == config] for config in ("kernels", "kernels_fp8"))
    for plain, quantised in zip(bf16, fp8):
        assert plain["host_gb"] == 0 < quantised["host_gb"]
        halves = plain["moved_gb"] - quantised["host_gb"] / 2
        assert halves < quantised["moved_gb"] < 1.1 * halves  # and a scale for every output channel


@pytest.mark.usefixtures("cpu_kernels")
def test_weights_by_configuration(ltx: ModuleType) -> None:
    """The computed sizes are those that models have, in bf16, in fp8 and with memory="low"."""
    pytest.importorskip("diffusers")
    import cards
    import memory

    known = cards.MODELS["flux"]
    sizes = cards.sizes_of(known.construct(True, torch.bfloat16, "meta"), ltx)
    for config, key in (("kernels", "bf16_gb"), ("kernels_fp8", "fp8_gb"), (memory.LOW, "low_gb")):
        model = known.construct(True, torch.bfloat16, "cpu")
        memory.prepare(model, config, "none", "cpu", ltx)
        assert sizes[key] == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert sizes["bf16_gb"] > sizes["fp8_gb"] > sizes["low_gb"]


@pytest.mark.usefixtures("cpu_kernels")
def test_errors_of_fp8_by_kind_of_layer(ltx: ModuleType, tmp_path: Path) -> None:
    """Each kind alone is in fp8: between nothing and all; the layers that stay out by default are measured too."""
    pytest.importorskip("diffusers")
    import fp8_families

    path = tmp_path / "fp8-families.json"
    assert fp8_families.main(["--tiny", "--device", "cpu", "--models", "wan", "--output", str(path)]) == 0
    errors = {record["layers"]: record["error"] for record in json.loads(path.read_text())["records"]}
    assert list(errors)[:4] == ["none (bf16)", "the default", "memory low", "all"]
    kinds = list(errors)[4:]
    assert "blocks: attn1.to_q, attn1.to_k, attn1.to_v" in kinds and "blocks: attn2.to_out.0" in kinds
    assert errors["none (bf16)"] < errors["the default"] < errors["all"]
    assert all(errors[kind] < errors["all"] for kind in kinds)


@pytest.mark.parametrize("config", ["baseline", "kernels_fp8"])
@pytest.mark.usefixtures("cpu_kernels")
def test_adapters_are_timed(ltx: ModuleType, tmp_path: Path, config: str) -> None:
    """Every change of them, and that none quantises a weight."""
    pytest.importorskip("peft")
    pytest.importorskip("diffusers")
    import lora

    path = tmp_path / "lora.json"
    arguments = ["--tiny", "--device", "cpu", "--rounds", "2", "--steps", "1", "--rank", "8", "--output", str(path)]
    assert lora.main([*arguments, "--configs", config]) == 0
    result = json.loads(path.read_text())
    assert result["meta"]["targets"] == lora.TARGETS
    (record,) = result["records"]
    assert (record["config"], record["rank"], record["quantised"]) == (config, 8, 0)
    assert record["step_ms"] > 0 < record["lora_step_ms"]
    assert {f"{name}_ms" for name in lora.CHANGES} <= record.keys()


@pytest.mark.usefixtures("cpu_kernels")
def test_training_steps_are_timed(ltx: ModuleType, tmp_path: Path) -> None:
    """With checkpointing and without, and the gradients' error beside that of the stock model."""
    pytest.importorskip("peft")
    pytest.importorskip("diffusers")
    import train

    path = tmp_path / "train.json"
    configs = ("baseline", "kernels", "kernels_fp8")
    arguments = ["--tiny", "--device", "cpu", "--rounds", "1", "--steps", "1"]
    arguments += ["--models", "ltx", "--timesteps", "token"]
    assert train.main([*arguments, "--configs", *configs, "--output", str(path)]) == 0
    records = json.loads(path.read_text())["records"]
    found = [(record["checkpointing"], record["config"]) for record in records]
    assert found == [(on, config) for on in (False, True) for config in configs]
    for stock, kernels, fp8 in zip(records[::3], records[1::3], records[2::3]):
        assert stock["grad_error_vs_fp32"] < fp8["grad_error_vs_fp32"] < 0.2
        assert fp8["own_calls"]["torch.nn.modules.linear.Linear"] > 0
        assert fp8["stock_calls"] == kernels["stock_calls"]
        assert 0 < kernels["grad_error_vs_fp32"] < 1.2 * stock["grad_error_vs_fp32"] < 0.05
        assert sum(kernels["own_calls"].values()) > 0 < kernels["step_ms"]


@pytest.mark.usefixtures("cpu_kernels")
def test_training_steps_of_language_models_are_timed(
    ltx: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole layers run the ops, and without a GPU the configurations with Liger are left out."""
    pytest.importorskip("peft")
    pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    import train_llm

    path = tmp_path / "train-llm.json"
    arguments = ["--tiny", "--device", "cpu", "--rounds", "1", "--steps", "1", "--output", str(path)]
    configs = [config for config in train_llm.CONFIGS if config != "compile"]
    assert train_llm.main([*arguments, "--checkpointing", "off", "on", "--configs", *configs]) == 0
    assert "not run: Liger" in capsys.readouterr().out
    found = json.loads(path.read_text())["records"]
    expected = [(on, config) for on in (False, True) for config in ("baseline", "kernels")]
    assert [(record["checkpointing"], record["config"]) for record in found] == expected
    for stock, kernels in zip(found[::2], found[1::2]):
        assert 0 < kernels["grad_error_vs_fp32"] < 1.2 * stock["grad_error_vs_fp32"] < 0.05
        layer = "transformers.models.llama.modeling_llama.LlamaDecoderLayer"
        assert kernels["own_calls"][layer] == train_llm.ERROR_BLOCKS and kernels["step_ms"] > 0
        assert kernels["stock_calls"] == {"transformers.LlamaRMSNorm: a gradient is needed": 1}  # the last norm
    assert train_llm.main([*arguments, "--configs", "baseline", "--update"]) == 0
    kept = json.loads(path.read_text())["records"]
    assert sorted((record["checkpointing"], record["config"]) for record in kept) == sorted(expected)
