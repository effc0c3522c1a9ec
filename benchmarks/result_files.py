"""What the benchmarks share: the package, what a result file says of its run, and the files themselves."""

from __future__ import annotations

import datetime
import functools
import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from sources import FOLDERS

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "examples"))
REPO_ID = "org/ltx-kernels"
GIT = ("git", "-C", str(REPOSITORY))
CHANGES = (
    *GIT,
    "status",
    "--porcelain",
    "--untracked-files=no",
    "--",
    *FOLDERS,
    "build.toml",
    ":(exclude)benchmarks/results",
)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@functools.cache
def load_package() -> tuple[ModuleType, dict[str, Any]]:
    """(the package as users load it for this machine's best device, the metadata of its build)."""
    from command_line import load_kernels, metadata_of  # sets LOCAL_KERNELS to build/, unless it is set

    ltx = load_kernels("cuda")
    return ltx, metadata_of(ltx)


def device_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def slug_of(device: str) -> str:
    """What the name of a GPU is in the names of its result files: "h200" for "NVIDIA H200"."""
    return device.removeprefix("NVIDIA ").lower().replace(" ", "-")


def result_file(about: str, device: str = "cuda") -> Path:
    """Where a benchmark writes its result unless --output says otherwise; `device` is a type: "cuda" or "cpu"."""
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return REPOSITORY / f"benchmarks/results/{slug_of(name)}-{about}.json"


def output_of(command: Sequence[str]) -> str | None:
    """The first line that a command prints; None where it fails or is not there."""
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    return lines[0].strip() if lines else None


def common_meta(package: Mapping[str, Any] | None = None, device: str = "cpu") -> dict[str, Any]:
    """What a result file says of its run.

    package: The metadata of the build that was measured, which names the commit that it was made of. The checkout
        may be of another commit, or have no history. None: no build was measured, and the checkout's commit counts.
    device: The type of the device that was measured.
    """
    cuda = device == "cuda"
    facts = {
        "device": torch.cuda.get_device_name() if cuda else device_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "threads": torch.get_num_threads(),
    }
    if cuda:
        driver = output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
        facts |= {"driver": driver, "cuda": torch.version.cuda}
    if package is None:
        return {**facts, "commit": output_of([*GIT, "describe", "--always", "--dirty", "--exclude", "*"])}
    made_of = package.get("provenance", {}).get("kernel", {})
    commit, dirty = made_of.get("commit"), made_of.get("dirty")
    if commit and (dirty or output_of(CHANGES)):
        commit += "-dirty"  # of sources that no commit has: never up to date
    return {**facts, "kernels": package["id"], "commit": commit, "dirty": dirty}


def as_text(result: Mapping[str, Any]) -> str:
    """The JSON of a result file, with one line for each fact of `meta` and for each record.

    A record is a member of a list, or a dict that holds no other dict.
    """

    def lines(value: Any, depth: int) -> str:
        margin, end = "\n" + " " * depth, "\n" + " " * (depth - 1)
        if isinstance(value, list) and value and depth == 1:
            return f"[{','.join(f'{margin}{json.dumps(record)}' for record in value)}{end}]"
        if isinstance(value, dict) and value and (depth < 2 or any(isinstance(one, dict) for one in value.values())):
            members = (f"{margin}{json.dumps(name)}: {lines(one, depth + 1)}" for name, one in value.items())
            return f"{{{','.join(members)}{end}}}"
        return json.dumps(value)

    return lines(result, 0) + "\n"


def write(path: Path, meta: Mapping[str, Any], records: Sequence[Any] | None = None, **parts: Any) -> None:
    """Replaces the file in one step, so that there is a whole one whenever the run is killed.

    parts: What the file has besides `meta` and `records`, or in the place of records.
    """
    result = {"meta": meta, **parts} if records is None else {"meta": meta, **parts, "records": records}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(as_text(result))
    partial.replace(path)


def kept_records(
    path: Path, meta: dict[str, Any], measured: list[dict[str, Any]], identity: Sequence[str]
) -> list[dict[str, Any]]:
    """The records of an earlier run that are not measured again, each with its commit, then those measured.

    identity: The keys that say what a record measures.
    """
    again = {tuple(record.get(key) for key in identity) for record in measured}
    earlier = earlier_records(path, meta)
    return [record for record in earlier if tuple(record.get(key) for key in identity) not in again] + measured


def earlier_records(path: Path, meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records of a file that a run adds to, each with the commit and the date of its own run; none without it."""
    if not path.exists():
        return []
    result = json.loads(path.read_text())
    if result["meta"]["device"] != meta["device"]:
        sys.exit(f"{path}: expected records of {meta['device']}, got some of {result['meta']['device']}; give --output")
    return stamped(result)


def stamped(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records of a result file, each with the commit and the date of its run."""
    run = of_the_run(result["meta"])
    return [record if "commit" in record else {**run, **record} for record in result["records"]]


def of_the_run(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What a record keeps of its run when later runs add to the file."""
    return {key: meta[key] for key in ("commit", "date") if key in meta}
