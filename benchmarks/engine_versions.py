"""Which classes `optimize` knows run under the versions that an engine pins, and which stay stock.

    make engine-versions                                                  # installs them, and calls this for each
    PYTHONPATH=.engines/sglang python benchmarks/engine_versions.py sglang

The record of this engine in benchmarks/results/engine-versions.json is replaced. The table of docs/serving.md shows
the records, and tests/test_families.py compares them with what it finds.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from helpers.versions import REASONS, states
from result_files import REPOSITORY, common_meta, kept_records, load_package, write

ENGINES = {"this project": "", "sglang": "sglang", "vllm-omni": "vllm-omni"}
LIBRARIES = "diffusers", "transformers", "kernels"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES, nargs="?", default="this project")
    path = REPOSITORY / "benchmarks" / "results" / "engine-versions.json"
    parser.add_argument("--output", type=Path, default=path)
    args = parser.parse_args()
    ltx, package = load_package()
    short_name = ltx.integrations.engine.sites.short_name
    found = states(ltx)
    of_engine = {"version": version(ENGINES[args.engine])} if ENGINES[args.engine] else {}
    record = {
        "engine": args.engine,
        **of_engine,
        **{name: version(name) for name in LIBRARIES},
        "optimized": sum(state == "optimized" for state in found.values()),
        **{state: [short_name(name) for name, one in found.items() if one == state] for state in REASONS},
    }
    meta = common_meta(package)
    records = kept_records(args.output, meta, [record], ("engine",))
    write(args.output, meta, sorted(records, key=lambda one: list(ENGINES).index(one["engine"])))
    print(json.dumps(record))


if __name__ == "__main__":
    main()
