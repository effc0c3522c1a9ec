"""examples/serve_ray.py: the class without Ray, and where Ray is installed the application on this machine's CPU."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("rich")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import serve_ray  # noqa: E402
from serve_ray import Clips, Shape  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL, WIDE = Shape(9, 64, 96, 2), Shape(9, 64, 128, 2)
REQUEST: dict[str, Any] = {"prompt": "A red kite over a beach", "seed": 3, **SMALL._asdict()}


@pytest.fixture(scope="module")
def clips() -> Clips:
    return Clips("tiny", [SMALL, WIDE])


def distance(one: np.ndarray, other: np.ndarray) -> int:
    return int(np.abs(one.astype(int) - other.astype(int)).max())


def test_warmed_up(clips: Clips) -> None:
    """Every shape and batch has a recorded call before the first request."""
    lines = str(clips.report).splitlines()
    assert "recorded calls: 3 of 3 diffusers.LTXVideoTransformerBlock" in lines
    (block,) = (site for site in clips.report.sites if site.name == "diffusers.LTXVideoTransformerBlock")
    calls = block.calls
    clips.generate(WIDE, ["a"] * 3, [0, 1, 2])
    assert block.calls == calls + 3 * WIDE.steps and clips.report.fallbacks == {}


def test_a_request_is_the_same_clip_in_every_batch(clips: Clips) -> None:
    prompts, seeds = ["A red kite", "A blue boat", "A dog"], [5, 6, 7]
    together = clips.generate(SMALL, prompts, seeds)
    assert [clip.shape for clip in together] == [(9, 64, 96, 3)] * 3 and together[0].dtype == np.uint8
    for clip, prompt, seed in zip(together, prompts, seeds):
        (alone,) = clips.generate(SMALL, [prompt], [seed])
        assert distance(alone, clip) <= 2  # bf16, and products of another shape
    assert distance(together[0], together[1]) > 20  # the seeds and prompts are those of their own request
    (other,) = clips.generate(SMALL, prompts[:1], [6])
    assert distance(other, together[0]) > 20


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "prompt too long": ({"prompt": "x" * 200}, "prompt: expected at most 128 tokens, got 201"),
    "half a character": (
        {"prompt": "a\ud800"},
        "prompt: expected text, got half of a surrogate pair, '\\ud800'",
    ),
    "no text": ({"prompt": 3}, "prompt: expected str, got 3"),
    "another shape": ({"width": 160}, "shape: expected 9x64x96x2 or 9x64x128x2, got 9x64x160x2"),
    "no integer": ({"frames": 9.0}, "frames: expected int, got 9.0"),
    "a truth value": ({"seed": True}, "seed: expected int, got True"),
    "a negative seed": ({"seed": -1}, "seed: expected 0 to 2^63 - 1, got -1"),
    "one field more": ({"fps": 25}, "request: expected the fields prompt, seed, frames, height, width, steps, got "),
    "half a character in a field": ({"\udfff": 25}, "request: expected the fields prompt, seed, frames, height, "),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(clips: Clips, case: str) -> None:
    change, message = BAD[case]
    with pytest.raises(ValueError) as raised:
        clips.check({**REQUEST, **change})
    assert str(raised.value).startswith(message)
    assert str(raised.value).encode()  # as the text of an answer


NO_REQUESTS = (
    b"{",
    b"[1]",
    b"null",
    b"[" * 60000,
    b'{"a":' * 10000,
    b'{"a": {}}',
    b'{"a": %s1%s}' % (b"[" * 600, b"]" * 600),
)


def test_bodies_without_a_request() -> None:
    """Neither json nor pickle, with which Ray sends a request to a replica, can take lists in lists without end."""
    assert [serve_ray.request_in(body) for body in NO_REQUESTS] == [None] * len(NO_REQUESTS)
    assert serve_ray.request_in(json.dumps(REQUEST).encode()) == REQUEST


def test_accepted(clips: Clips) -> None:
    assert clips.check(REQUEST) == SMALL
    assert clips.check({**REQUEST, "prompt": "x" * 127}) == SMALL  # and the end of the text


def test_counting_tokens_leaves_the_pipelines_tokenizer_alone(clips: Clips, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are checked while another thread tokenizes with other padding: one tokenizer cannot do both at once."""
    with monkeypatch.context() as broken:
        broken.setattr(clips.pipe, "tokenizer", None)
        assert clips.check(REQUEST) == SMALL


def test_a_prompt_that_the_pipeline_would_cut_is_refused(clips: Clips) -> None:
    """The pipeline reads the last character of the longest prompt that is accepted, and no further one."""

    def made(prompt: str) -> np.ndarray:
        return clips.generate(SMALL, [prompt], [0])[0]

    assert distance(made("x" * 126 + "y"), made("x" * 127)) > 0
    assert distance(made("x" * 128 + "y"), made("x" * 129)) == 0


def test_health(clips: Clips, monkeypatch: pytest.MonkeyPatch) -> None:
    clips.check_health()
    with monkeypatch.context() as broken:
        broken.setattr(clips, "pipe", lambda *args, **named: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            clips.generate(SMALL, ["a"], [0])
    with pytest.raises(RuntimeError, match="the last call failed: division by zero"):
        clips.check_health()
    clips.generate(SMALL, ["a"], [0])
    clips.check_health()


def test_a_batch_of_ray_data(clips: Clips) -> None:
    rows = {"prompt": np.array(["A red kite", "A dog"]), "seed": np.array([5, 7])}
    made = clips(rows)
    assert made["clip"].shape == (2, 9, 64, 96, 3)
    assert distance(made["clip"][1], clips.generate(SMALL, ["A dog"], [7])[0]) <= 2


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "batch_size: expected 1 to 4 rows, got 0"),
        (["a"] * 5, "batch_size: expected 1 to 4 rows, got 5"),
        (["a", "x" * 200], "prompt: expected at most 128 tokens, got 201"),
    ],
)
def test_a_batch_of_ray_data_is_refused(clips: Clips, prompts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clips({"prompt": np.array(prompts, dtype=object), "seed": np.arange(len(prompts))})


def test_ray_data_of_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of docs/serving.md, with a stand-in for Ray Data that makes one actor and gives it one batch."""

    def map_batches(rows: Any, cls: Any, *, fn_constructor_args: Any, batch_size: int, num_gpus: int, concurrency: int):
        assert (batch_size, num_gpus, concurrency) == (4, 1, 2)
        columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        return cls(*fn_constructor_args)(columns)

    class Rows(list[dict[str, Any]]):
        pass

    Rows.map_batches = map_batches  # type: ignore[attr-defined]
    data = SimpleNamespace(data=SimpleNamespace(from_items=Rows))
    monkeypatch.setitem(sys.modules, "ray", data)  # type: ignore[arg-type]
    text = (EXAMPLES.parent / "docs" / "serving.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["clips"]["clip"].shape == (1, 9, 64, 96, 3)


@pytest.mark.parametrize("text", ["9x64x96", "9x64x96x2x1", "9x64xax2"])
def test_shapes_of_the_command_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_ray.parser.parse_args(["--shapes", "9x64x96x2"]).shapes == [SMALL]
    with pytest.raises(SystemExit):
        serve_ray.parser.parse_args(["--shapes", text])
    assert f"expected FRAMESxHEIGHTxWIDTHxSTEPS, got {text}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0x64x96x4", "frames: expected a multiple of 8, plus 1, got 0"),
        ("10x64x96x4", "frames: expected a multiple of 8, plus 1, got 10"),
        ("9x65x96x4", "height: expected a multiple of 32, got 65"),
        ("9x64x100x4", "width: expected a multiple of 32, got 100"),
        ("9x64x96x1", "steps: expected at least 2, got 1"),
    ],
)
def test_shapes_that_the_pipeline_cannot_make(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve_ray.parser.parse_args(["--shapes", text])
    assert f"argument --shapes: {message}" in capsys.readouterr().err


# ---- With Ray

PORT = 8237


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    """The URL and the process of the program itself, as a user starts it."""
    pytest.importorskip("ray", reason="NOT RUN: ray is not installed (make test-serving)")
    shapes = [str(SMALL), str(WIDE)]
    command = [sys.executable, str(EXAMPLES / "serve_ray.py"), "--port", str(PORT), "--shapes", *shapes]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        printed: list[str] = []
        try:
            for line in run.stdout:
                printed.append(line)
                if "is ready; Ctrl-C ends it" in line:
                    break
            assert run.poll() is None, "".join(printed)
            yield f"http://127.0.0.1:{PORT}/", run.pid
        finally:
            run.terminate()
            run.communicate(timeout=60)


def send(url: str, body: bytes | None) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=body), timeout=120) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_served(server: tuple[str, int], clips: Clips) -> None:
    """The clip of the class, every refusal with its reason, and the report."""
    url, _ = server
    status, content = send(url, json.dumps(REQUEST).encode())
    assert status == 200, content
    if not torch.cuda.is_available():  # the server's clips are those of a CPU
        (want,) = clips.generate(SMALL, [REQUEST["prompt"]], [REQUEST["seed"]])
        assert distance(np.load(io.BytesIO(content)), want) <= 2
    for change, message in BAD.values():
        status, content = send(url, json.dumps({**REQUEST, **change}).encode())
        assert (status, content.decode()[: len(message)]) == (422, message)
    for body in NO_REQUESTS:
        assert send(url, body) == (400, b"request: expected a JSON object of strings and numbers")
    too_large = json.dumps({**REQUEST, "prompt": "x" * 70000}).encode()
    assert send(url, too_large)[0] == 413
    status, content = send(url, None)
    assert status == 200 and b"diffusers.LTXVideoTransformerBlock" in content
    assert send(f"{url}-/healthz", None) == (200, b"success")


def listening(pid: int) -> list[tuple[str, str]]:
    """(command, address) of the TCP sockets on which a process and its children listen."""
    found = []
    for child in (Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text().split():
        found += listening(int(child))
    inodes = set()
    for fd in (Path("/proc") / str(pid) / "fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(fd))
    name = (Path("/proc") / str(pid) / "cmdline").read_text().replace("\0", " ").strip()
    for table in ("tcp", "tcp6"):
        for line in (Path("/proc/net") / table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in inodes:
                found.append((name, local.partition(":")[0]))
    return found


def test_what_other_machines_reach(server: tuple[str, int]) -> None:
    """One port for each replica, which Ray Serve opens for other replicas (docs/serving.md), and nothing else."""
    found = listening(server[1])
    loopback = "0100007F", "0000000000000000FFFF00000100007F"
    open_to_all = [name.partition(" ")[0] for name, address in found if address not in loopback]
    assert len(found) > 5
    assert sorted(open_to_all) == ["ray::ServeReplica:default:Frontend", "ray::ServeReplica:default:Replica"]
