#!/usr/bin/env python3
"""This package's ops in a language model of transformers, with one call.

    python examples/inject_llm.py                      # a small random Llama: no download
    python examples/inject_llm.py llama-8b             # the released size of a model, with random weights
    python examples/inject_llm.py Qwen/Qwen3-0.6B      # a model of the Hub, or a folder
    python examples/inject_llm.py --kernelize          # through kernels.kernelize, in the place of ltx.optimize
    python examples/inject_llm.py --configs eager kernels compile kernels_compile liger kernels_fp8

It prints what was replaced, and for every configuration: milliseconds of a prompt and of a decoded token, tokens per
second, memory, how far the logits are from the stock model's in float32, and how many greedy tokens are the stock
model's (in a random model each is a close choice). `--json` writes the same to a file.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

from command_line import at_least, load_kernels, new_file, start
from llm_shapes import CONFIGS, DTYPES, SHAPES


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = ", ".join(SHAPES)
    parser.add_argument(
        "model", nargs="?", default="tiny", help=f"{named}, a folder, or the name of a model on the Hub"
    )
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=["eager", "kernels"])
    parser.add_argument("--kernelize", action="store_true", help="kernels: the layers, through the kernels library")
    parser.add_argument("--rounding", choices=("fp32", "eager"), default="fp32", help="once, or where the model does")
    parser.add_argument("--no-float32", action="store_true", help="leave float32 out, which saves memory")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--prompt", type=at_least(1), default=32, help="tokens of the prompt (default: 32)")
    parser.add_argument("--batch", type=at_least(1), default=1)
    parser.add_argument("--tokens", type=at_least(1), default=64, help="how many to generate (default: 64)")
    parser.add_argument("--json", type=new_file, metavar="PATH", help="write all that is printed to this file")
    return parser


if __name__ == "__main__":
    start(make_parser())  # before the imports below, which take seconds

# ruff: noqa: E402
import torch
from kernels import Mode, kernelize, use_kernel_mapping
from llm_models import Configured, configure, has_liger, load_model
from rich.console import Console
from rich.table import Table
from steps import error, view_of
from torch import Tensor, nn

REPEATS = 5


def milliseconds(call: Callable[[], Any], device: str, repeats: int) -> float:
    """The median of several calls, each waited for."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def generate(configured: Configured, prompt: Tensor, tokens: int) -> Tensor:
    options = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0}
    with configured.in_place():
        return configured.model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[
            :, prompt.shape[1] :
        ]


def put_layers_in(model: nn.Module, ltx: ModuleType, rounding: str) -> str:
    """What `optimize` does, by way of the kernels library; returns what was replaced."""
    logging.getLogger("kernels").setLevel(logging.ERROR)  # it warns of every layer that the mapping does not have
    with use_kernel_mapping(ltx.kernel_mapping(rounding=rounding), inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE)
    forwards = {getattr(ltx.layers, name).forward for name in ltx.layers.__all__}
    replaced = [m for m in model.modules() if getattr(m.forward, "__func__", None) in forwards]
    return "\n".join(f"{count} x {name}" for name, count in Counter(type(m).__name__ for m in replaced).items())


def measure(configured: Configured, prompt: Tensor, tokens: int, device: str) -> dict[str, Any]:
    """One configuration's times, tokens and memory."""
    configured.prefill(prompt)  # warm-up
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    prefill = milliseconds(lambda: configured.prefill(prompt), device, REPEATS)
    for _ in range(2):  # the first time, the attention may prepare something for each new length of the cache
        decode = milliseconds(configured.decoder(prompt, tokens), device, tokens)
    record = {"prefill_ms": round(prefill, 3), "decode_ms": round(decode, 3)}
    record["tokens_per_s"] = round(prompt.shape[0] * 1e3 / decode, 1)
    if device == "cuda":
        record["peak_gb"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return record


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(arguments)
    if "liger" in args.configs and not has_liger():
        parser.error("--configs: liger needs the package liger-kernel, which is not installed")
    if args.kernelize and "kernels" not in args.configs:
        parser.error("--kernelize: expected kernels among --configs, since it is another way to put the kernels in")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    console = Console(width=None if sys.stdout.isatty() else 130, highlight=False)
    ltx = load_kernels(device)
    model = load_model(args.model, getattr(torch, DTYPES[args.dtype]), device)
    prompt = torch.randint(0, model.config.get_text_config().vocab_size, (args.batch, args.prompt)).to(device)
    keep = min(args.prompt, 64)  # tokens whose logits are compared
    exact = None if args.no_float32 else copy.deepcopy(model).float()(prompt, logits_to_keep=keep).logits
    stock = Configured("eager", view_of(model))
    stock_logits, stock_tokens = stock.prefill(prompt, keep), generate(stock, prompt, args.tokens)

    result: dict[str, Any] = {"model": args.model, "device": device, "records": []}
    table = Table(
        "configuration", "prompt ms", "token ms", "tokens/s", "peak GiB", "from float32", "from stock", "same"
    )
    for config in args.configs:
        torch.compiler.reset()  # or the second compiled configuration meets torch's limit, and runs eagerly
        if config == "kernels" and args.kernelize:
            configured = Configured(config, view_of(model))
            replaced = put_layers_in(configured.model, ltx, args.rounding)
        else:
            configured = configure(
                config, model, ltx, **({"rounding": args.rounding} if config in ("kernels", "kernels_compile") else {})
            )
            replaced = str(configured.report) if configured.report else ""
        record = {"config": config, **measure(configured, prompt, args.tokens, device)}
        logits = configured.prefill(prompt, keep)
        tokens = generate(configured, prompt, args.tokens)
        record["from_stock"] = error(logits, stock_logits)
        if exact is not None:
            record["error_vs_fp32"] = error(logits, exact)
        record["same_tokens"] = int((tokens == stock_tokens).cumprod(1).sum())
        record["replaced"] = replaced and (str(configured.report) if configured.report else replaced)
        result["records"].append(record)
        if record["replaced"]:
            console.print(f"{config}:\n{record['replaced']}", markup=False)
        table.add_row(
            config,
            f"{record['prefill_ms']:.2f}",
            f"{record['decode_ms']:.2f}",
            f"{record['tokens_per_s']:.1f}",
            f"{record['peak_gb']:.2f}" if "peak_gb" in record else "",
            f"{record['error_vs_fp32']:.2e}" if exact is not None else "",
            f"{record['from_stock']:.1e}",
            f"{record['same_tokens']} of {args.batch * args.tokens}",
        )
    console.print(table)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
