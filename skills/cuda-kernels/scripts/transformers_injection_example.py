#!/usr/bin/env python3
"""A language model of transformers with this package's ops: runs examples/inject_llm.py and judges its errors.

    python transformers_injection_example.py                    # a small random Llama: no download
    python transformers_injection_example.py llama-8b           # a released size, with random weights
    python transformers_injection_example.py Qwen/Qwen3-0.6B    # a model of the Hub, or a folder
    python transformers_injection_example.py --configs eager kernels compile kernels_compile

The logits of each configuration are compared with those of the model in float32. The result is right if the relative
error of the configuration `kernels` is at most 1.5 times the stock model's error, or at most 1e-4. The script ends with
status 1 if it is not. Prompt and decoding are timed, and tokens per second printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from programs import add_programs, run_example

ERROR_LIMIT, LEAST_ERROR = 1.5, 1e-4


def verdict(records: list[dict[str, Any]]) -> tuple[bool, str]:
    errors = {record["config"]: record.get("error_vs_fp32") for record in records}
    stock, ours = errors.get("eager"), errors.get("kernels")
    if stock is None or ours is None:
        return True, "NOT VERIFIED: it takes the configurations eager and kernels, without --no-float32"
    limit = max(ERROR_LIMIT * stock, LEAST_ERROR)
    right = ours <= limit
    text = f"{'PASS' if right else 'FAIL'}: error of the logits {ours:.2e}, of the stock model {stock:.2e}"
    return right, f"{text}, limit {limit:.2e}"


def main() -> int:
    add_programs()
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--json", type=Path)
    with tempfile.TemporaryDirectory() as folder:
        path = parser.parse_known_args()[0].json or Path(folder) / "result.json"
        run_example("inject_llm.py", ["--json", str(path)], __doc__)
        right, text = verdict(json.loads(path.read_text())["records"])
    print(text)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
