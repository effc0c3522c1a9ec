"""What the examples do before they import anything large: arguments, --help, Ctrl-C, other packages' notes.

Only the standard library is imported here, so that `--help` and wrong arguments are answered at once.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
REPO_ID = "org/ltx-kernels"
PROMPT = "A red kite over a beach at sunset, waves rolling in, slow camera pan"
NEGATIVE_PROMPT = "worst quality, inconsistent motion, blurry, jittery, distorted"
DTYPES = ("bfloat16", "float16", "float32")
OFFLOADS = ("none", "model", "sequential", "group")
# torchao names the libraries that it cannot load, diffusers says that it goes without torchao then, and torch warns of
# how torchao registers its classes. None of that is about these examples.
FOREIGN_LOGGERS = ("torchao", "diffusers.quantizers.torchao.torchao_quantizer", "torch.utils._pytree")

TRAINED = ROOT / "examples" / "demo_model"  # what train_demo.py has made, and demo.py shows
BUILD = ROOT / "build"
HOW_TO_BUILD = (
    f"In {ROOT}, `make build` or `python tools/build.py --this-machine` fills build/, and `pip install .` installs the "
    "package"
    if (ROOT / "tools" / "build.py").is_file()
    else f"Set LOCAL_KERNELS={REPO_ID}=/path/to/build, or `pip install` the package"  # a copy of the skill
)
NAMED = "LOCAL_KERNELS" in os.environ  # the user names a build
# `get_kernel` then takes the local build, unless the user names another.
os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={BUILD}")


class ExampleError(RuntimeError):
    """What stops an example; the message says what to do."""


def load_kernels(device: Any) -> ModuleType:
    """The package for a torch.device, or for the name of one: the build that LOCAL_KERNELS names, or else the one in
    build/, or else the package that pip installed."""
    if not NAMED and not any(BUILD.glob("torch-*")) and importlib.util.find_spec("ltx_fused"):
        return importlib.import_module("ltx_fused")
    from kernels import get_kernel

    try:
        return get_kernel(REPO_ID, version=1, backend="cpu" if str(device) == "cpu" else None)
    except Exception as error:
        raise ExampleError(
            f"{REPO_ID} could not be loaded: {str(error).strip()}\n"
            f"LOCAL_KERNELS is {os.environ['LOCAL_KERNELS']}, and pip has not installed the package. {HOW_TO_BUILD}"
        ) from error


def metadata_of(ltx: ModuleType) -> dict[str, Any]:
    """What the package's metadata.json says of its build; pip's package has none, and only the id of its ops."""
    path = Path(str(ltx.__file__)).with_name("metadata.json")
    metadata: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"id": ltx._ops.ops.name}
    return metadata


def start(parser: argparse.ArgumentParser) -> None:
    """Answer --help and wrong arguments; then set the process up for one quiet run."""
    sys.excepthook = last_words
    parser.parse_args()
    silence_other_packages()


def silence_other_packages() -> None:
    """Keep their notes about themselves out of what an example prints."""
    warnings.filterwarnings("ignore", category=SyntaxWarning)  # of packages that Python compiles at first import
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it tells which image processors have no torchvision
    warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm, in a notebook without ipywidgets
    for name in FOREIGN_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def last_words(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Ctrl-C ends a run with status 130 and no traceback; an error that the user can fix is printed as one line."""
    if issubclass(kind, KeyboardInterrupt):
        leave("interrupted", 130)
    if issubclass(kind, ModuleNotFoundError):
        leave(f"error: {error}: `pip install -r requirements/dev.txt`, or `make setup`, installs what examples need", 1)
    if issubclass(kind, (ExampleError, OSError)):
        leave(f"error: {error}", 1)
    sys.__excepthook__(kind, error, traceback)


def leave(message: str, status: int) -> NoReturn:
    """End the process now. What Python would still run, such as other packages' exit handlers, prints tracebacks."""
    print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def frames(text: str) -> int:
    value = int(text)
    if value < 1 or value % 8 != 1:
        raise argparse.ArgumentTypeError(f"expected a multiple of 8, plus 1, got {value}")
    return value


def pixels(text: str) -> int:
    value = int(text)
    if value < 32 or value % 32:
        raise argparse.ArgumentTypeError(f"expected a multiple of 32, got {value}")
    return value


def at_least(least: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, got {value}")
        return value

    return integer


def finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a finite number, got {value}")
    return value


def seed(text: str, bits: int = 63) -> int:
    value = int(text)
    if not 0 <= value < 2**bits:
        raise argparse.ArgumentTypeError(f"expected 0 to 2^{bits} - 1, got {value}")
    return value


def new_file(text: str) -> Path:
    """A path in which a file can be made: its directory is there, or can be made."""
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory; name a file")
    parent = Path(text).absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{parent} is not a directory that can be written to")
    return Path(text)


def file_that_ends_in(*endings: str) -> Callable[[str], Path]:
    """A path as of `new_file`, with one of these endings or none."""

    def file(text: str) -> Path:
        path = new_file(text)
        if path.suffix and path.suffix.lower() not in endings:
            raise argparse.ArgumentTypeError(f"expected a name that ends in {', '.join(endings)}, got {text}")
        return path

    return file


def directory(text: str) -> Path:
    """A path of a directory that is there, or can be made."""
    if not text:
        raise argparse.ArgumentTypeError("expected a directory, got an empty text")
    if Path(text).exists() and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a directory")
    return new_file(f"{text}/file").parent


def graphs(text: str) -> str:
    if text != "auto":
        raise argparse.ArgumentTypeError(f'expected nothing or "auto", got {text}')
    return text


def add_kernel_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the examples that generate videos or images, with the kernels or without."""
    kernels = parser.add_mutually_exclusive_group()
    kernels.add_argument("--use-optimized-kernels", dest="optimized", action="store_true", help="(default)")
    kernels.add_argument("--no-optimized-kernels", dest="optimized", action="store_false", help="the stock modules")
    parser.set_defaults(optimized=True)
    parser.add_argument(
        "--precision", choices=("native", "fp8"), default="native",
        help="of the linear layers, with the kernels: fp8 needs compute capability 8.9 (default: native)",
    )  # fmt: skip
    parser.add_argument(
        "--graphs", nargs="?", type=graphs, const=True, default=False, metavar="auto",
        help="replay the components' calls as CUDA graphs, where the host is the limit; auto: where that pays",
    )  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="torch.compile the transformer; with kernels or without")
    parser.add_argument(
        "--warmup-iterations", type=at_least(0), metavar="N",
        help="calls before those that are timed, in which videos have 2 steps (default: 1, with --graphs 2, since the "
        "second captures, with --graphs auto 6)",
    )  # fmt: skip


def check_kernel_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program where these arguments contradict one another; fills in the number of warm-up calls."""
    if args.precision != "native" and not args.optimized:
        parser.error(f"argument --precision: {args.precision} needs the optimized kernels")
    if args.graphs and not (args.optimized and args.device.startswith("cuda")):
        parser.error("argument --graphs: it needs a GPU and the optimized kernels")
    if args.graphs and args.compile:
        parser.error("argument --graphs: what --compile compiles is not replayed")
    if args.warmup_iterations is None:
        args.warmup_iterations = 6 if args.graphs == "auto" else 2 if args.graphs else 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of each example that makes clips. `ltx_pipeline.parse` fills in what depends on the device."""
    parser.add_argument(
        "--model", default=os.environ.get("MODEL"), metavar="MODEL",
        help="random (weights; the shape of the 2B model), tiny (random, and small), a folder, or a Hub id such as "
        "Lightricks/LTX-Video (default: $MODEL; without it tiny, on a GPU random)",
    )  # fmt: skip
    parser.add_argument("--prompt", help=f"(default: the one that the model was trained for, or {PROMPT!r})")
    parser.add_argument("--negative-prompt", default=NEGATIVE_PROMPT)
    parser.add_argument(
        "--num-frames", "--frames", type=frames, dest="frames", metavar="N",
        help="a multiple of 8, plus 1 (default: 25; on a GPU 49)",
    )  # fmt: skip
    parser.add_argument("--height", type=pixels, help="a multiple of 32 (default: 128; on a GPU 512)")
    parser.add_argument("--width", type=pixels, help="a multiple of 32 (default: 192; on a GPU 768)")
    # The scheduler's noise levels, which end at one that is given, need two.
    parser.add_argument("--steps", type=at_least(2), help="of denoising, at least 2 (default: 8; on a GPU 20)")
    parser.add_argument("--guidance-scale", type=finite, default=3.0, help="1 or less: no guidance (default: 3)")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: cuda where torch sees a GPU, else cpu)")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
