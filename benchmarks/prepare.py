"""Compiles what benchmarks/models.py will time, several models side by side.

    python tools/build.py
    python benchmarks/prepare.py [--models flux sd35] [--configs compile torchao_fp8_compile] [--jobs 8]
    python benchmarks/models.py --models flux sd35 --compiled-before compile torchao_fp8_compile

torch.compile takes long for a model, and torchao's recipe, which tunes every kernel, takes minutes. One core of the
host does most of it. Here each model is compiled in a process of its own, from BLOCKS blocks of each
kind at their released width. The whole model has the same kinds of blocks, so models.py finds their kernels in
Triton's cache on disk. Times that are taken beside other processes mean nothing, so nothing is timed here. For the same
reason torch.compile's own cache is thrown away: it has what torch.compile chose by such times. models.py chooses again,
among kernels that are compiled already.
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
from result_files import DTYPES, load_package
from steps import first_line, synchronize
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

BLOCKS = 2  # the last block of some models is of another form
COMPILED = [config for config in ALL_CONFIGS if config.endswith("compile")]


def compile_model(name: str, options: argparse.Namespace) -> int:
    """Compiles the configurations one after the other; the number of those that failed."""
    ltx, _ = load_package()
    dtype = DTYPES[options.dtype]
    known = of_few_blocks(MODELS[name], BLOCKS)
    model = known.construct(options.tiny, dtype, options.device)
    inputs = known.inputs(model, Make(dtype, options.device), **(known.tiny_shape if options.tiny else known.shape))
    failed = 0
    for config in options.configs:
        start = time.perf_counter()
        try:
            one_tensor(make_model(config, model, ltx)(**inputs, return_dict=False))
            synchronize(options.device)
        except Exception as reason:  # the other configurations are still compiled
            failed += 1
            print(f"{name}, {config} failed: {first_line(reason)}", flush=True)
        else:
            print(f"{name}, {config}: {time.perf_counter() - start:.0f} s", flush=True)
    return failed


def compile_all(options: argparse.Namespace, arguments: list[str]) -> int:
    """A process for each model; the number of those that failed."""
    threads = max(1, (os.cpu_count() or 1) // min(options.jobs, len(options.models)))
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads), **os.environ, "TRITON_CACHE_DIR": triton_cache_dir(0)}

    def run(name: str) -> int:
        command = [sys.executable, __file__, *arguments, "--models", name]  # the last --models counts
        with tempfile.TemporaryDirectory() as choices:
            return subprocess.run(command, env={**environment, "TORCHINDUCTOR_CACHE_DIR": choices}).returncode

    with ThreadPoolExecutor(options.jobs) as pool:
        return sum(status != 0 for status in pool.map(run, options.models))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)")
    parser.add_argument("--configs", nargs="+", choices=COMPILED, default=["compile", "kernels_compile"])
    parser.add_argument("--jobs", type=int, default=8, help="models at a time (default: 8)")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the script")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    with torch.no_grad():
        failed = compile_model(*options.models, options) if len(options.models) == 1 else compile_all(options, given)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
