"""Load and faults: examples/serve_ray.py with a tiny pipeline under Ray Serve, 8 clients, a replica that is killed.

    pip install -r requirements/serving.txt
    python tools/build.py --backend cpu
    python benchmarks/serving.py

Everything runs on this machine's CPU and its loopback device. 8 clients send 200 requests of mixed shapes. Some of them
have to be refused: no JSON, a prompt that is too long, a shape that is not served. After half of the requests a replica
is killed with SIGKILL. Every clip is compared with one that the class makes in this process. The memory of processes
that live throughout is read after every request. The result goes to benchmarks/results/cpu-serving.json; it has counts
and ratios, and no times.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import numpy as np
import serve_ray
import torch
from result_files import common_meta, load_package, result_file, write
from serve_ray import BATCHES, Clips, Shape

SHAPES = [Shape(9, 64, 64, 2), Shape(9, 64, 96, 2), Shape(17, 64, 64, 2)]
FROM = 50  # requests after which memory has to be flat
CLOSE = 2  # of 255: clips of another batch are rounded differently
BAD = {
    "no JSON": (b'{"prompt": "A red kite"', 400, "request: expected a JSON object"),
    "prompt too long": ({"prompt": "x" * 500}, 422, "prompt: expected at most 128 tokens, got 501"),
    "shape not served": ({"frames": 25}, 422, f"shape: expected {' or '.join(map(str, SHAPES))}, got 25x"),
}


def request_of(number: int) -> tuple[bytes, str]:
    """The body of a request, and which of BAD it is; every tenth is one of them."""
    request = {"prompt": f"A red kite, number {number}", "seed": number, **SHAPES[number % len(SHAPES)]._asdict()}
    if number % 10 != 9:
        return json.dumps(request).encode(), ""
    kind = list(BAD)[number // 10 % len(BAD)]
    change = BAD[kind][0]
    return change if isinstance(change, bytes) else json.dumps({**request, **change}).encode(), kind


def send(url: str, body: bytes) -> tuple[int, bytes, int]:
    """(status, content, how often it was sent to a replica)."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=body), timeout=300) as answer:
            return answer.status, answer.read(), int(answer.headers["Tries"])
    except urllib.error.HTTPError as error:
        return error.code, error.read(), int(error.headers.get("Tries", 0))


def processes_of(deployment: str) -> dict[str, int]:
    """Actor names and process ids of the replicas of a deployment."""
    import ray

    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    replicas = [name for name in names if f"#{deployment}#" in name]
    return {
        name: ray.get(ray.get_actor(name, namespace="serve").__ray_call__.remote(lambda actor: os.getpid()))
        for name in replicas
    }


def resident(pid: int) -> int:
    lines = (Path("/proc") / str(pid) / "status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


class Load:
    """The clients, and what happens while they send."""

    def __init__(self, url: str, requests: int, clients: int) -> None:
        self.url, self.requests, self.clients = url, requests, clients
        self.answers: dict[int, tuple[int, bytes, int]] = {}
        self.lock = threading.Lock()
        victims = processes_of("Replica")
        (_, self.killed), *others = sorted(victims.items())
        self.watched = dict([*others, *processes_of("Frontend").items()])
        self.memory: dict[str, list[int]] = {name: [] for name in self.watched}
        self.in_flight_at_kill = 0
        self.sent = 0

    def one(self, number: int) -> None:
        body, _ = request_of(number)
        with self.lock:
            self.sent += 1
        answer = send(self.url, body)
        with self.lock:
            self.answers[number] = answer
            for name, pid in self.watched.items():
                self.memory[name].append(resident(pid))
            if len(self.answers) == self.requests // 2:
                self.in_flight_at_kill = self.sent - len(self.answers)
                os.kill(self.killed, signal.SIGKILL)

    def run(self) -> None:
        with ThreadPoolExecutor(self.clients) as pool:
            list(pool.map(self.one, range(self.requests)))


def records_of(load: Load, clips: Clips) -> list[dict[str, Any]]:
    good = [number for number in range(load.requests) if not request_of(number)[1]]
    answered = [number for number in good if load.answers[number][0] == 200]
    for number in sorted({*good} - {*answered}):
        status, content, tries = load.answers[number]
        print(f"lost: request {number}, status {status} after {tries} tries: {content.decode()}", file=sys.stderr)
    right = 0
    for index, shape in enumerate(SHAPES):
        of_shape = [number for number in answered if number % len(SHAPES) == index]
        for first in range(0, len(of_shape), max(BATCHES)):
            numbers = of_shape[first : first + max(BATCHES)]
            wanted = clips.generate(shape, [f"A red kite, number {number}" for number in numbers], numbers)
            for number, want in zip(numbers, wanted):
                got = np.load(io.BytesIO(load.answers[number][1]))
                right += got.shape == want.shape and int(np.abs(got.astype(int) - want.astype(int)).max()) <= CLOSE
    records: list[dict[str, Any]] = [
        {
            "what": "accepted",
            "sent": len(good),
            "answered": len(answered),
            "right": right,
            "sent_again": sum(load.answers[number][2] > 1 for number in answered),
            "in_flight_at_kill": load.in_flight_at_kill,
            "shapes": len(SHAPES),
            "clients": load.clients,
            "replicas_killed": 1,
        }
    ]
    for kind, (_, status, reason) in BAD.items():
        answers = [load.answers[number] for number in range(load.requests) if request_of(number)[1] == kind]
        told = [answer for answer in answers if answer[0] == status and answer[1].decode().startswith(reason)]
        records.append({"what": kind, "sent": len(answers), "refused": len(told), "status": status})
    for name, sizes in load.memory.items():
        kind = "frontend" if "#Frontend#" in name else "replica"
        flat = sizes[FROM:]
        records.append({"what": f"memory of the {kind}", "samples": len(flat), "growth": round(max(flat) / flat[0], 4)})
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--port", type=int, default=8238)
    parser.add_argument("--output", type=Path, default=result_file("serving", "cpu"))
    args = parser.parse_args()
    if args.requests <= FROM:
        parser.error(f"--requests: expected more than {FROM}, after which memory has to be flat, got {args.requests}")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OMP_NUM_THREADS"] = "1"  # of the replicas; for models so small threads would only wait for one another
    torch.set_num_threads(1)
    _, package = load_package()
    serve_ray.start_ray(4, args.port)
    import ray
    from ray import serve

    serve.run(serve_ray.application("tiny", SHAPES, 2))
    load = Load(f"http://127.0.0.1:{args.port}/", args.requests, args.clients)
    load.run()
    for _ in range(300):  # until the killed replica is there again
        replicas = processes_of("Replica")
        if len(replicas) == 2:
            break
        time.sleep(1)
    serve.shutdown()
    ray.shutdown()
    records = records_of(load, Clips("tiny", SHAPES))
    records[0]["replicas_at_the_end"] = len(replicas)
    meta = {**common_meta(package), "ray": ray.__version__, "requests": args.requests, "flat_from": FROM}
    write(args.output, meta, records)
    print(args.output.read_text())
    if records[0]["right"] < records[0]["sent"]:
        sys.exit("requests were lost or answered wrongly")


if __name__ == "__main__":
    main()
