"""``python -m ltx_fused``: which package and build this is, torch, the GPUs, which kernels run here, what is missing.

The exit status is 0 if compiled kernels serve the machine's best device and give the right result there, else 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from . import __version__, reference, rmsnorm
from ._ops import ops
from ._variant import COMPILED_DEVICE
from .quant import fp8_obstacle

# What `optimize` and the layers work on, and what fetches builds from the Hub. The ops need none of these.
OPTIONAL = ("diffusers", "transformers", "kernels")


def build_name() -> str:
    """The variant's directory and architectures where `kernels` loads it; of the pip package the id of its ops."""
    metadata = Path(__file__).with_name("metadata.json")
    if not metadata.is_file():
        return f"installed by pip as {__package__} ({ops.name})"
    archs = json.loads(metadata.read_text())["backend"].get("archs")
    return f"{metadata.parent.name} ({ops.name}{', for ' + ' '.join(archs) if archs else ''})"


def namesake() -> str:
    """Where another package with this kernel's name is, such as Lightricks'; empty if there is none."""
    spec = importlib.util.find_spec("ltx_kernels")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    return "" if folder is None or folder.samefile(Path(__file__).parent) else str(folder)


def gpu_names() -> list[str]:
    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        names.append(f"{properties.name}, compute capability {properties.major}.{properties.minor}")
    return names


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def what_is_wrong(device: str) -> str | None:
    """One op on the device, against plain torch; None if its compiled kernel ran and was right."""
    if device != COMPILED_DEVICE:
        return f"this build holds the kernels for {COMPILED_DEVICE}: on {device} plain torch computes"
    x = torch.linspace(-2, 2, 4 * 256, device=device).view(4, 256)
    try:
        error = (rmsnorm(x) - reference.rmsnorm(x)).abs().max().item()
    except RuntimeError as failure:
        return str(failure).strip().split("\n")[0]
    return None if error < 1e-5 else f"rmsnorm is {error:.1e} from plain torch"


def main(arguments: Sequence[str] = ()) -> int:
    argparse.ArgumentParser(
        prog=f"python -m {__package__}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(arguments)
    gpus = gpu_names()
    device = "cuda" if gpus else "cpu"
    wrong, obstacle = what_is_wrong(device), fp8_obstacle(torch.device(device))
    facts = [
        ("ltx-kernels", f"version {__version__}, {build_name()}"),
        ("location", str(Path(__file__).parent)),
        *[("namesake", f"another package, ltx_kernels, in {other}") for other in [namesake()] if other],
        ("torch", f"{torch.__version__} for {'CUDA ' + torch.version.cuda if torch.version.cuda else 'CPUs'}"),
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        *[("GPU", name) for name in gpus or ["none that torch can use"]],
        ("backend", f"compiled kernels run on {device}" if wrong is None else f"NOT on {device}: {wrong}"),
        ("fp8", f"no matrix products: {obstacle}" if obstacle else f"matrix products run on {device}"),
        *[(package, version_of(package)) for package in OPTIONAL],
    ]
    for label, text in facts:
        print(f"{label:<13}{text}")
    if wrong is not None and device == "cuda" and COMPILED_DEVICE != "cuda":
        print("\nFor the GPU: install the CUDA toolkit of torch's CUDA version, and the package again.")
    if wrong is not None and device == "cpu" and COMPILED_DEVICE == "cuda":
        print("\nThis build is for NVIDIA GPUs, and torch sees none: see nvidia-smi and CUDA_VISIBLE_DEVICES.")
    return 0 if wrong is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
