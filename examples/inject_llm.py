#!/usr/bin/env python3
"""This package's ops in a language model of transformers, with one call.

    python examples/inject_llm.py                      # a small random Llama: no download
    python examples/inject_llm.py Qwen/Qwen3-0.6B      # or a folder
    python examples/inject_llm.py --kernelize          # through kernels.kernelize, in the place of ltx.optimize

It prints what was replaced, how far the logits move (and how far bfloat16 takes them from float32), how many of the
tokens are the same (in a random model each is a close choice), and tokens per second with and without.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

REPO_ID = "org/ltx-kernels"
os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={Path(__file__).resolve().parent.parent / 'build'}")

import torch  # noqa: E402
from kernels import Mode, get_kernel, kernelize, use_kernel_mapping  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402


def load(name: str, dtype: torch.dtype) -> nn.Module:
    if name != "tiny":
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "vocab_size": 1000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads), dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.uniform_(parameter, 0.5, 1.5)  # as constructed they are all one
    return model


def generate(model: nn.Module, prompt: Tensor, tokens: int) -> tuple[Tensor, float]:
    """The generated tokens, and how many of them came out per second."""
    options = {"do_sample": False, "min_new_tokens": tokens, "pad_token_id": 0}
    model.generate(prompt, max_new_tokens=2, **{**options, "min_new_tokens": 2})  # warm-up
    start = time.perf_counter()
    output = model.generate(prompt, max_new_tokens=tokens, **options)[:, prompt.shape[1] :]
    output.cpu()  # waits for the GPU
    return output, output.numel() / (time.perf_counter() - start)


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def put_layers_in(model: nn.Module, ltx: ModuleType) -> str:
    """What `optimize` does, by way of the kernels library; returns what was replaced."""
    logging.getLogger("kernels").setLevel(logging.ERROR)  # it warns of every layer that the mapping does not have
    with use_kernel_mapping(ltx.kernel_mapping(), inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE)
    forwards = {getattr(ltx.layers, name).forward for name in ltx.layers.__all__}
    replaced = [m for m in model.modules() if getattr(m.forward, "__func__", None) in forwards]
    return "\n".join(f"{count} x {name}" for name, count in Counter(type(m).__name__ for m in replaced).items())


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny", help="tiny, a folder, or the name of a model on the Hub")
    parser.add_argument("--kernelize", action="store_true", help="use the layers, through the kernels library")
    parser.add_argument("--rounding", choices=("fp32", "eager"), default="fp32", help="once, or where the model does")
    parser.add_argument("--no-float32", action="store_true", help="leave float32 out, which saves memory")
    parser.add_argument("--tokens", type=int, default=64, help="how many to generate")
    args = parser.parse_args(arguments)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ltx = get_kernel(REPO_ID, version=1, backend="cpu" if device == "cpu" else None)
    model = load(args.model, torch.bfloat16).to(device).eval()
    prompt = torch.randint(0, model.config.get_text_config().vocab_size, (1, 32)).to(device)

    stock = model(prompt).logits
    exact = None if args.no_float32 else copy.deepcopy(model).float()(prompt).logits
    stock_tokens, stock_rate = generate(model, prompt, args.tokens)

    report = put_layers_in(model, ltx) if args.kernelize else ltx.optimize(model, rounding=args.rounding)
    ours = model(prompt).logits
    our_tokens, our_rate = generate(model, prompt, args.tokens)

    print(report)
    print(f"logits, relative distance from the stock model's: {distance(ours, stock):.1e}")
    if exact is not None:
        print(f"  from those in float32: stock {distance(stock, exact):.2e}, with the ops {distance(ours, exact):.2e}")
    same = int((our_tokens == stock_tokens).cumprod(1).sum())
    print(f"greedy tokens: the first {same} of {args.tokens} are the same")
    print(f"tokens per second on {device}: stock {stock_rate:.1f}, with the ops {our_rate:.1f}")


if __name__ == "__main__":
    main()
