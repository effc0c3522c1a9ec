#!/usr/bin/env python3
"""Serve clips of LTX-Video with Ray Serve: one replica a GPU, requests of one shape in one batch, on 127.0.0.1.

    pip install "ray[serve]"
    python examples/serve_ray.py --model Lightricks/LTX-Video --replicas 2 --shapes 49x512x768x20 121x512x768x20

A shape is frames x height x width x steps. Each replica warms its shapes up before the first request, and refuses
others. A request is a POST to http://127.0.0.1:8000/ with the JSON

    {"prompt": "A red kite over a beach", "seed": 0, "frames": 49, "height": 512, "width": 768, "steps": 20}

The answer is the clip, [frames, height, width, 3] in uint8, as a file of numpy. A wrong request is answered with 4xx,
a request that finds the queue full with 503, and a call that fails with 500. Each answer has the reason. A replica that
dies is started again, and its requests are sent to another one: with its seed, a request can be made twice. GET gives
the report of one replica. http://127.0.0.1:8000/-/healthz is Ray's.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import io
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from command_line import ExampleError, at_least, frames, pixels, start

TRIES = 5  # of a request whose replicas die
MOST_BYTES = 65536  # of a request
BATCHES = 1, 2, 4  # each size is a signature of its own, with recorded calls and graphs: a batch is filled up to one


class Shape(NamedTuple):
    frames: int
    height: int
    width: int
    steps: int

    def __str__(self) -> str:
        return "x".join(map(str, self))


SIZES = {"frames": frames, "height": pixels, "width": pixels, "steps": at_least(2)}  # the pipeline makes no others


def shape(text: str) -> Shape:
    try:
        parts = dict(zip(SIZES, text.split("x"), strict=True))
        return Shape(*(size(name, part) for name, part in parts.items()))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected FRAMESxHEIGHTxWIDTHxSTEPS, got {text}") from None


def size(name: str, text: str) -> int:
    try:
        return SIZES[name](text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{name}: {error}") from None


def request_in(body: bytes) -> dict[str, Any] | None:
    """The JSON object of a body; None where it is none, or has lists or objects in it."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(request, dict) or any(isinstance(value, (list, dict)) for value in request.values()):
        return None
    return request


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="tiny", help="tiny (the default), random, a folder, or a Hub id")
parser.add_argument("--shapes", type=shape, nargs="+", default=[Shape(9, 64, 96, 4)], metavar="FxHxWxS")
parser.add_argument("--replicas", type=at_least(1), default=1, help="one GPU each, or a process each without GPUs")
parser.add_argument("--precision", choices=("native", "fp8"), default="native")
parser.add_argument("--graphs", action="store_true", help="replay calls as CUDA graphs, where the host is the limit")
parser.add_argument("--port", type=at_least(1), default=8000)
if __name__ == "__main__":
    start(parser)

# ruff: noqa: E402
import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from command_line import load_kernels
from ltx_pipeline import load_pipeline, quiet


class Clips:
    """An optimized pipeline that makes clips of the shapes it was told; plain Python, also for Ray Data.

    Args:
        model: "tiny", "random", a folder, or a Hub id.
        shapes: The shapes of requests.
        options: Of `optimize`.
    """

    def __init__(self, model: str, shapes: Sequence[Shape], **options: Any) -> None:
        quiet()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.pipe = load_pipeline(model, torch.device(device), torch.bfloat16)
        self.pipe.set_progress_bar_config(disable=True)
        # `check` counts tokens while another thread generates, and a call of a tokenizer changes how others pad.
        self.tokenizer = copy.deepcopy(self.pipe.tokenizer)
        self.report = load_kernels(device).optimize(self.pipe, **options)
        self.shapes = [Shape(*shape) for shape in shapes]
        self.failure: Exception | None = None
        for shape in self.shapes:
            for batch in BATCHES:
                for _ in range(2):  # the second call of a signature is recorded, and captured with graphs=True
                    self.generate(shape, ["warm-up"] * batch, [0] * batch)

    def check(self, request: dict[str, Any]) -> Shape:
        """The shape of a request. A ValueError says why it is refused."""
        expected = {"prompt": str, "seed": int, **dict.fromkeys(Shape._fields, int)}
        if request.keys() != expected.keys():
            got = ", ".join(map(ascii, request)) or "none"
            raise ValueError(f"request: expected the fields {', '.join(expected)}, got {got}")
        for name, kind in expected.items():
            if type(request[name]) is not kind:
                raise ValueError(f"{name}: expected {kind.__name__}, got {request[name]!r}")
        shape = Shape(*(request[name] for name in Shape._fields))
        if shape not in self.shapes:
            raise ValueError(f"shape: expected {' or '.join(map(str, self.shapes))}, got {shape}")
        if not 0 <= request["seed"] < 2**63:
            raise ValueError(f"seed: expected 0 to 2^63 - 1, got {request['seed']}")
        self.check_prompt(request["prompt"])
        return shape

    def check_prompt(self, prompt: str) -> None:
        """A ValueError says why the pipeline cannot read the whole prompt."""
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            half = ascii(prompt[error.start])
            raise ValueError(f"prompt: expected text, got half of a surrogate pair, {half}") from None
        most = inspect.signature(self.pipe.__call__).parameters["max_sequence_length"].default  # it would cut the rest
        tokens = len(self.tokenizer(prompt).input_ids)
        if tokens > most:
            raise ValueError(f"prompt: expected at most {most} tokens, got {tokens}")

    def generate(self, shape: Shape, prompts: Sequence[str], seeds: Sequence[int]) -> list[np.ndarray]:
        """Clips of [frames, height, width, 3] in uint8, up to the largest of BATCHES at once."""
        more = next(size for size in BATCHES if size >= len(prompts)) - len(prompts)
        try:
            clips = self.pipe(
                [*prompts, *[prompts[-1]] * more],
                num_frames=shape.frames,
                height=shape.height,
                width=shape.width,
                num_inference_steps=shape.steps,
                generator=[torch.Generator().manual_seed(seed) for seed in [*seeds, *[seeds[-1]] * more]],
                output_type="np",
            ).frames
        except Exception as error:
            self.failure = error
            raise
        self.failure = None
        return [(clip * 255).round().astype(np.uint8) for clip in clips[: len(prompts)]]

    def check_health(self) -> None:
        """Raises where the last call failed: an error of CUDA stays until the process ends."""
        if self.failure is not None:
            raise RuntimeError(f"the last call failed: {self.failure}") from self.failure

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A batch of Ray Data: adds the column `clip` to `prompt` and `seed`."""
        prompts, seeds = rows["prompt"].tolist(), rows["seed"].tolist()
        if not 1 <= len(prompts) <= max(BATCHES):
            raise ValueError(f"batch_size: expected 1 to {max(BATCHES)} rows, got {len(prompts)}")
        for prompt in prompts:
            self.check_prompt(prompt)
        clips = self.generate(self.shapes[0], prompts, seeds)
        return {**rows, "clip": np.stack(clips)}


def application(model: str, shapes: Sequence[Shape], replicas: int, **options: Any) -> Any:
    """The application of Ray Serve, for `serve.run`."""
    from ray import serve
    from ray.exceptions import RayActorError, RayTaskError
    from ray.serve.exceptions import BackPressureError
    from ray.util import metrics
    from starlette.responses import Response

    most = 2 * max(BATCHES)  # of one replica: a batch that runs, and one that waits
    gpus = 1 if torch.cuda.is_available() else 0

    @serve.deployment(
        num_replicas=replicas,
        ray_actor_options={"num_gpus": gpus},
        max_ongoing_requests=most,
        max_queued_requests=8 * most * replicas,
        health_check_period_s=5,
    )
    class Replica:
        """The pipeline of one GPU, with a queue of requests for each shape."""

        def __init__(self) -> None:
            self.thread = ThreadPoolExecutor(1)  # one call at a time, beside the loop that answers health checks
            self.clips = Clips(model, shapes, **options)
            self.queues = {shape: self.queue(shape) for shape in self.clips.shapes}
            self.seconds = metrics.Histogram(
                "ltx_batch_seconds", "of a batch", boundaries=[0.1, 1, 10, 100], tag_keys=("shape",)
            )
            self.stock = metrics.Gauge("ltx_stock_calls", "calls of stock modules", tag_keys=("module", "reason"))

        def queue(self, shape: Shape) -> Any:
            @serve.batch(max_batch_size=max(BATCHES), batch_wait_timeout_s=0.05)
            async def generate(requests: list[dict[str, Any]]) -> list[np.ndarray]:
                begin = time.perf_counter()
                prompts, seeds = zip(*((request["prompt"], request["seed"]) for request in requests))
                loop = asyncio.get_running_loop()
                clips = await loop.run_in_executor(self.thread, self.clips.generate, shape, prompts, seeds)
                self.seconds.observe(time.perf_counter() - begin, {"shape": str(shape)})
                for module, reasons in self.clips.report.fallbacks.items():
                    for reason, count in reasons.items():
                        self.stock.set(count, {"module": module, "reason": reason})
                return clips

            return generate

        async def generate(self, request: dict[str, Any]) -> np.ndarray | str:
            """A clip, or why the request is refused."""
            try:
                shape = self.clips.check(request)
            except ValueError as error:
                return str(error)
            return await self.queues[shape](request)

        async def report(self) -> str:
            return str(self.clips.report)

        async def check_health(self) -> None:
            self.clips.check_health()

    @serve.deployment(max_ongoing_requests=1000)
    class Frontend:
        """Answers HTTP, and sends a request again whose replica has died."""

        def __init__(self, replicas: Any) -> None:
            self.replicas = replicas
            self.requests = metrics.Counter("ltx_requests", "by status", tag_keys=("status",))

        async def __call__(self, http: Any) -> Response:
            if http.method == "GET":
                return Response(await self.replicas.report.remote())
            status, content, tries = await self.generate(await http.body())
            self.requests.inc(tags={"status": str(status)})
            return Response(content, status, {"Tries": str(tries)})

        async def generate(self, body: bytes) -> tuple[int, str | bytes, int]:
            """(status, clip or reason, how often the request was sent to a replica)."""
            if len(body) > MOST_BYTES:
                return 413, f"request: expected at most {MOST_BYTES} bytes, got {len(body)}", 0
            request = request_in(body)
            if request is None:
                return 400, "request: expected a JSON object of strings and numbers", 0
            for tries in range(1, TRIES + 1):
                try:
                    clip = await self.replicas.generate.remote(request)
                except BackPressureError:
                    return 503, "busy: try again later", tries
                except RayActorError:
                    await asyncio.sleep(0.5)  # Ray has to notice it
                except RayTaskError as error:
                    return 500, f"the call failed: {error.cause}", tries
                else:
                    if isinstance(clip, str):
                        return 422, clip, tries
                    file = io.BytesIO()
                    np.save(file, clip)
                    return 200, file.getvalue(), tries
            return 500, f"{TRIES} replicas have died", TRIES

    return Frontend.bind(Replica.bind())


def start_ray(cpus: int, port: int) -> None:
    """Ray on this machine alone, and its HTTP server."""
    # Ray's switch for machines without a cluster: its processes listen on 127.0.0.1. It is read at the import.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
        from ray import serve
    except ModuleNotFoundError as error:
        raise ExampleError(f'{error}: `pip install "ray[serve]"` installs it') from error

    # A replica imports this file and its neighbours.
    here = {"env_vars": {"PYTHONPATH": str(Path(__file__).resolve().parent)}}
    ray.init(num_cpus=cpus, include_dashboard=False, runtime_env=here)
    serve.start(http_options={"host": "127.0.0.1", "port": port})


def main() -> None:
    args = parser.parse_args()
    start_ray(args.replicas + 2, args.port)
    from ray import serve

    options = {"precision": args.precision, "graphs": args.graphs}
    serve.run(application(args.model, args.shapes, args.replicas, **options))
    print(f"http://127.0.0.1:{args.port}/ is ready; Ctrl-C ends it")
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()
