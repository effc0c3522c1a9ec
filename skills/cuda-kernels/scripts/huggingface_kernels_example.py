#!/usr/bin/env python3
"""Kernels of the Hub and of a local build: load, check, time, put into a model. Runs examples/hub_kernels.py.

    python huggingface_kernels_example.py                                  # a community kernel, and the local build
    python huggingface_kernels_example.py --repo-id someone/ltx-kernels --trust
    python huggingface_kernels_example.py --publishing                     # the steps that put a kernel on the Hub

It asks `has_kernel` and loads `get_kernel("kernels-community/activation", version=1)`, compares its `silu_and_mul` with
torch and times both; loads this package from the Hub or from LOCAL_KERNELS; and replaces each `torch.nn.RMSNorm` of a
model by the function `rmsnorm` that the package has. Without a network the Hub's part is left out with the reason.
"""

from __future__ import annotations

import os
import sys

from programs import SCRIPTS, add_programs, run_example

GUIDE = SCRIPTS.parent / "references" / "huggingface-kernels-integration.md"


def publishing() -> str:
    """The section of the guide."""
    return "Publish" + GUIDE.read_text().split("\n## Publish", 1)[1].split("\n## ", 1)[0]


def main() -> None:
    if "--publishing" in sys.argv[1:]:
        print(publishing())
        return
    add_programs()
    from command_line import REPO_ID  # sets LOCAL_KERNELS, unless it is set

    builds = dict(entry.split("=", 1) for entry in os.environ["LOCAL_KERNELS"].split(":") if entry)
    run_example("hub_kernels.py", ["--build", builds[REPO_ID]] if REPO_ID in builds else [], __doc__)


if __name__ == "__main__":
    main()
