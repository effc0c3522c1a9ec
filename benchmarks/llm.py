"""Times language models of transformers at their released depth and width, with random weights.

    python tools/build.py
    python benchmarks/llm.py [--models llama-8b qwen3-8b] [--configs eager kernels] [--layers 4] [--output PATH]

`prefill_ms` is a prompt of `tokens` tokens whose keys and values are cached and whose last logits are computed.
`decode_ms` is one token after such a prompt, as a program launches it, at lengths of the cache that the configuration
has met before. `first_decode_ms` is the same at lengths that it meets for the first time: there the attention may
prepare something that it keeps, and what one configuration has prepared may serve the next, so that only `decode_ms`
compares configurations. Every token of a text has a length of its own, so that a token of the first text of a process
takes `first_decode_ms`. `padding` is the number of tokens of padding before every other prompt, with a mask for all.

"compile" is torch.compile of the whole model, as `generate` uses it: tokens have a static cache and CUDA graphs (mode
"reduce-overhead"). The others decode with the dynamic cache of `generate`. "liger" is Liger's norms, MLP and rotary
embedding. The configurations share one set of weights and take turns.

`error_vs_fp32` is the relative L2 error of the last 64 tokens' logits against the same model in float32, for one
prompt. `peak_gb` is what is allocated while a prompt runs, with the weights of that configuration. `--profile` adds
`ms_by_kind`, the milliseconds of a prompt by kind of kernel.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch
import transformers
from result_files import REPOSITORY, kept_records, write
from rich.console import Console
from rich.table import Table
from runs import add_options, begin
from sharing import give_turn, is_shared, share
from steps import STEPS_AHEAD, error, free_memory, kernel_times, synchronize, time_steps, weight_bytes
from torch import Tensor

sys.path.insert(0, str(REPOSITORY / "examples"))
from llm_models import Configured, configure, has_liger, random_model
from llm_shapes import CONFIGS, DTYPES, LARGE, SHAPES

KEPT_LOGITS = 64
WARM_TOKENS = 4  # before those that are timed
MODELS = [name for name in SHAPES if name not in ("tiny", *LARGE)]
SIZES = ["8192x1", "512x1", "512x8"]  # tokens x batch
IDENTITY = ("model", "layers", "tokens", "batch", "padding", "config")  # what a record measures


def size(text: str) -> tuple[int, int]:
    tokens, _, batch = text.partition("x")
    return int(tokens), int(batch or 1)


def first_call(
    make: Callable[[], Configured], ids: Tensor, mask: Tensor | None, device: str
) -> tuple[Configured, dict[str, Any]]:
    """A configuration after its first prompt, with the seconds that both took, and the memory of a later one."""
    synchronize(device)
    start = time.perf_counter()
    made = make()
    made.prefill(ids, mask=mask)
    synchronize(device)
    seconds = round(time.perf_counter() - start, 3)
    record: dict[str, Any] = {} if made.compiled and is_shared() else {"first_s": seconds}  # it waited for others
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made.prefill(ids, mask=mask)
        record["peak_gb"] = round((weight_bytes(made.model) + torch.cuda.max_memory_allocated() - before) / 2**30, 3)
    return made, record


def errors(model: Any, ids: Tensor, all_made: dict[str, Configured]) -> dict[str, float]:
    exact_model = copy.deepcopy(model).float()
    exact = exact_model(input_ids=ids, use_cache=False, logits_to_keep=KEPT_LOGITS).logits
    del exact_model
    return {
        config: float(f"{error(made.prefill(ids, KEPT_LOGITS), exact):.4g}")
        for config, made in all_made.items()
        if not made.compiled  # it differs from its own by the compiler's choice alone
    }


def measure(model: Any, ltx: ModuleType, tokens: int, batch: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every configuration's record for one size, timed in turns."""
    device = options.device
    torch.manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (batch, tokens), device=device)
    mask = None
    if options.padding:
        mask = torch.ones_like(ids)
        mask[::2, : options.padding] = 0
    all_made, records = {}, {}
    for config in options.configs:
        made = first_call(lambda config=config: configure(config, model, ltx), ids, mask, device)
        all_made[config], records[config] = made
    found = errors(model, ids, all_made) if batch == 1 and mask is None and not options.no_errors else {}
    prefill: dict[str, list[float]] = {config: [] for config in all_made}
    decode: dict[str, list[float]] = {config: [] for config in all_made}
    first_decode: dict[str, list[float]] = {config: [] for config in all_made}
    for turn in range(options.rounds):
        for config in options.configs[:: -1 if turn % 2 else 1]:
            made = all_made[config]
            prompt = functools.partial(made.prefill, ids, mask=mask)
            give_turn()
            prefill[config] += time_steps(prompt, options.steps, device, options.warm_up)
            for timed in (False, True) if turn == 0 else (True,):
                step = made.decoder(ids, options.decoded + WARM_TOKENS, mask)
                for _ in range(WARM_TOKENS):
                    step()
                times = time_steps(step, options.decoded - STEPS_AHEAD, device, 0.0)
                (decode if timed else first_decode)[config] += times
    for config, record in records.items():
        record["prefill_ms"] = round(statistics.median(prefill[config]), 3)
        record["decode_ms"] = round(statistics.median(decode[config]), 3)
        record["first_decode_ms"] = round(statistics.median(first_decode[config]), 3)
        if config in found:
            record["error_vs_fp32"] = found[config]
        if options.profile and device == "cuda":
            record["ms_by_kind"], _ = kernel_times(functools.partial(all_made[config].prefill, ids, mask=mask))
        report = all_made[config].report
        if report is not None:
            record["replaced"] = report.replaced
            record["fallbacks"] = report.fallbacks
    common = {"tokens": tokens, "batch": batch, "layers": model.config.num_hidden_layers}
    if options.padding:
        common["padding"] = options.padding
    return [{**common, "config": config, **record} for config, record in records.items()]


def print_table(records: list[dict[str, Any]], console: Console) -> None:
    table = Table(
        "model", "tokens", "configuration", "prefill ms", "x eager", "x liger", "decode ms", "x eager", "error"
    )
    for (model, tokens, batch), group in itertools.groupby(records, lambda r: (r["model"], r["tokens"], r["batch"])):
        by_config = {record["config"]: record for record in group}

        def ratio(other: str, key: str, record: dict[str, Any], by_config: dict[str, Any] = by_config) -> str:
            return f"{by_config[other][key] / record[key]:.3f}" if other in by_config else ""

        for config, record in by_config.items():
            table.add_row(
                model,
                f"{batch} x {tokens}",
                config,
                f"{record['prefill_ms']:.2f}",
                ratio("eager", "prefill_ms", record),
                ratio("liger", "prefill_ms", record),
                f"{record['decode_ms']:.2f}",
                ratio("eager", "decode_ms", record),
                f"{record['error_vs_fp32']:.2e}" if "error_vs_fp32" in record else "",
            )
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=MODELS, help="(default: all)")
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, help="(default: all that are installed)")
    parser.add_argument("--sizes", nargs="+", type=size, default=list(map(size, SIZES)), help="tokens x batch")
    parser.add_argument("--layers", type=int, default=None, help="only the first layers (default: all)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of a configuration (default: 2)")
    parser.add_argument("--steps", type=int, default=4, help="timed prompts of a turn (default: 4)")
    parser.add_argument("--padding", type=int, default=0, help="tokens before every other prompt (default: none)")
    parser.add_argument("--decoded", type=int, default=24, help="tokens of a turn (default: 24)")
    parser.add_argument("--warm-up", type=float, default=0.3, help="seconds of prompts before each turn (default: 0.3)")
    parser.add_argument("--profile", action="store_true", help="add the milliseconds of a prompt by kind of kernel")
    parser.add_argument("--no-errors", action="store_true", help="leave out the model in float32")
    add_options(parser, "llm")
    options = parser.parse_args(arguments)
    options.configs = options.configs or [config for config in CONFIGS if config != "liger" or has_liger()]
    facts = {
        "transformers": transformers.__version__,
        "liger": version("liger-kernel") if has_liger() else None,
        "dtype": options.dtype,
        "weights": "random",
    }
    share()
    ltx, output, meta, console = begin("llm", options, **facts)
    records: list[dict[str, Any]] = []
    failed = False
    with torch.no_grad():
        for key in options.models:
            model = random_model(key, getattr(torch, DTYPES[options.dtype]), options.device, options.layers)
            for tokens, batch in options.sizes:
                torch.compiler.reset()  # or the sizes after the first meet torch.compile's limit, and run eagerly
                try:
                    records += [{"model": key, **r} for r in measure(model, ltx, tokens, batch, options)]
                    write(output, meta, kept_records(output, meta, records, IDENTITY))
                except Exception as reason:  # the others are still measured; the exit status says that one was not
                    failed = True
                    console.print(
                        f"[red]{key}, {batch} x {tokens} tokens failed[/red]: {type(reason).__name__}: {reason}"
                    )
                free_memory(options.device)
            del model
            gc.collect()
    print_table(records, console)
    console.print(str(output), highlight=False, soft_wrap=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
