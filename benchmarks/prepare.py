"""Compiles what benchmarks/models.py will time, several models and configurations side by side.

    python tools/build.py
    python benchmarks/prepare.py [--models flux sd35] [--configs compile torchao_fp8_compile] [--jobs 8]
    python benchmarks/models.py --models flux sd35 --compiled-before compile torchao_fp8_compile

torch.compile takes long for a model, and torchao's recipe and max-autotune, which tune every kernel, take minutes. One
core of the host does most of it. Here each configuration of a model is compiled in a process of its own, from BLOCKS
blocks of each kind at their released width. The whole model has the same kinds of blocks, so models.py finds their
kernels in Triton's cache on disk. Times that are taken beside other processes mean nothing, so nothing is timed here.
For the same reason torch.compile's own cache is thrown away: it has what torch.compile chose by such times. models.py
chooses again, among kernels that are compiled already.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from model_shapes import MODELS, Make, of_few_blocks
from models import ALL_CONFIGS, make_model, one_tensor
from records import AUTOTUNED
from result_files import DTYPES, load_package
from steps import first_line, synchronize
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

BLOCKS = 2  # the last block of some models is of another form
TUNED = ("torchao_fp8_compile", AUTOTUNED)  # these take minutes
COMPILED = [config for config in ALL_CONFIGS if config.endswith("compile")]


def compile_one(name: str, config: str, options: argparse.Namespace) -> int:
    """Compiles a configuration of a model in this process; 1 where it fails."""
    ltx, _ = load_package()
    dtype = DTYPES[options.dtype]
    known = of_few_blocks(MODELS[name], BLOCKS)
    model = known.construct(options.tiny, dtype, options.device)
    inputs = known.inputs(model, Make(dtype, options.device), **(known.tiny_shape if options.tiny else known.shape))
    start = time.perf_counter()
    try:
        with torch.no_grad():
            one_tensor(make_model(config, model, ltx)(**inputs, return_dict=False))
        synchronize(options.device)
    except Exception as reason:
        print(f"{name}, {config} failed: {first_line(reason)}", flush=True)
        return 1
    print(f"{name}, {config}: {time.perf_counter() - start:.0f} s", flush=True)
    return 0


def compile_all(options: argparse.Namespace, arguments: list[str]) -> int:
    """A process for each model and configuration, the slowest configurations first; 1 where one fails."""
    configs = sorted(options.configs, key=lambda config: config not in TUNED)
    pairs = [(name, config) for config in configs for name in options.models]
    threads = max(1, (os.cpu_count() or 1) // min(options.jobs, len(pairs)))
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads), **os.environ, "TRITON_CACHE_DIR": triton_cache_dir(0)}

    def run(pair: tuple[str, str]) -> int:
        name, config = pair
        command = [sys.executable, __file__, *arguments, "--models", name, "--configs", config]  # the last ones count
        with tempfile.TemporaryDirectory() as choices:
            return subprocess.run(command, env={**environment, "TORCHINDUCTOR_CACHE_DIR": choices}).returncode

    with ThreadPoolExecutor(options.jobs) as pool:
        return int(any([*pool.map(run, pairs)]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)")
    parser.add_argument("--configs", nargs="+", choices=COMPILED, default=["compile", "kernels_compile"])
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time (default: 8)")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    if len(options.models) == len(options.configs) == 1:
        return compile_one(*options.models, *options.configs, options)
    return compile_all(options, given)


if __name__ == "__main__":
    sys.exit(main())
