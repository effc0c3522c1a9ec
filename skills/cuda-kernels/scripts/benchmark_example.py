#!/usr/bin/env python3
"""Generate one LTX-Video clip and say where the time went: examples/generate_video.py with the defaults below.

    python benchmark_example.py --use-optimized-kernels [--compile]
    python benchmark_example.py --no-optimized-kernels [--compile]
    python benchmark_example.py --model tiny --num-frames 9 --height 64 --width 96 --steps 3   # seconds on a CPU

With neither of the first two options the kernels run where a build can be loaded; elsewhere the stock modules run, and
the reason is printed. --compile goes with both.

Defaults that differ from those of generate_video.py: --num-frames 161 --height 512 --width 768 --steps 50
--guidance-scale 4.5 --seed 42 --warmup-iterations 2 --output demo/benchmark_example.mp4. The model is random weights of
the 2B shape on a GPU and a tiny model on a CPU; --model Lightricks/LTX-Video loads the released one.
"""

from __future__ import annotations

import argparse

from programs import add_programs, asks_for_help, run_example

DEFAULTS = (
    "--num-frames 161 --height 512 --width 768 --steps 50 --guidance-scale 4.5 --seed 42 --warmup-iterations 2 "
    "--output demo/benchmark_example.mp4"
)


def without_a_build() -> list[str]:
    """--no-optimized-kernels where no build can be loaded and neither option was given."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--use-optimized-kernels", "--no-optimized-kernels", dest="chosen", action="store_true")
    parser.add_argument("--device")
    args, _ = parser.parse_known_args()
    if args.chosen:
        return []

    import torch
    from command_line import ExampleError, load_kernels

    try:
        load_kernels(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except ExampleError as error:  # no build, none for this machine, or none that this torch can load
        print(f"the stock modules run: {error}", flush=True)
        return ["--no-optimized-kernels"]
    return []


def main() -> None:
    add_programs()
    added = []
    if not asks_for_help():
        print(f"defaults that differ from generate_video.py's: {DEFAULTS}", flush=True)
        added = without_a_build()
    run_example("generate_video.py", [*DEFAULTS.split(), *added], __doc__)


if __name__ == "__main__":
    main()
