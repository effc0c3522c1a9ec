#!/usr/bin/env python3
"""Generate one LTX-Video clip and say where the time went: examples/generate_video.py with the defaults below.

    python benchmark_example.py --use-optimized-kernels [--compile]
    python benchmark_example.py --no-optimized-kernels [--compile]
    python benchmark_example.py --num-frames 9 --height 64 --width 96 --steps 3   # seconds on a CPU

With neither of the first two options the kernels run where a build can be loaded; elsewhere the stock modules run, and
the reason is printed. --compile goes with both.

Four defaults are not generate_video.py's: --guidance-scale 4.5 --seed 42 --warmup-iterations 2
--output demo/benchmark_example.mp4, and on a GPU --num-frames 161 --height 512 --width 768 --steps 50. With
--graphs auto the number of warm-ups is generate_video.py's. The model is random weights of the 2B shape on a GPU and a
tiny model on a CPU; --model Lightricks/LTX-Video loads the released one.
"""

from __future__ import annotations

import argparse

from programs import add_programs, asks_for_help, run_example

WARM_UPS = "--warmup-iterations 2"
DEFAULTS = f"--guidance-scale 4.5 --seed 42 {WARM_UPS} --output demo/benchmark_example.mp4"
ON_A_GPU = "--num-frames 161 --height 512 --width 768 --steps 50"  # on a CPU it would take hours


def defaults() -> list[str]:
    """Those for this machine's device, or for the one that --device names.

    --no-optimized-kernels is among them where no build can be loaded and neither option was given.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--use-optimized-kernels", "--no-optimized-kernels", dest="chosen", action="store_true")
    parser.add_argument("--graphs", nargs="?")
    parser.add_argument("--device")
    args, _ = parser.parse_known_args()

    import torch
    from command_line import ExampleError, load_kernels

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    added = DEFAULTS if device == "cpu" else f"{ON_A_GPU} {DEFAULTS}"
    if args.graphs == "auto":  # needs more warm-ups, and generate_video.py knows how many
        added = added.replace(f"{WARM_UPS} ", "")
    print(f"defaults that differ from generate_video.py's: {added}", flush=True)
    if args.chosen:
        return added.split()
    try:
        load_kernels(device)
    except ExampleError as error:  # no build, none for this machine, or none that this torch can load
        print(f"the stock modules run: {error}", flush=True)
        return [*added.split(), "--no-optimized-kernels"]
    return added.split()


def main() -> None:
    add_programs()
    run_example("generate_video.py", [] if asks_for_help() else defaults(), __doc__)


if __name__ == "__main__":
    main()
