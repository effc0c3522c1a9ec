"""Times a training step of LoRA adapters of language models: stock, compiled, with Liger, and with this package.

    python tools/build.py
    python benchmarks/train_llm.py [--models llama-8b] [--sizes 1x4096] [--checkpointing off on] [--profile] [--tiny]

Models have their released depth and width, and random weights. A step is a forward under `torch.autocast` with the
model's own loss, a backward, and AdamW's step. peft's adapters are in float32, and the base model is frozen. All
configurations share the base model's weights, and they take turns. With gradient checkpointing, transformers computes
each layer again in the backward.

"compile" is torch.compile of each layer. "liger" is what Liger replaces by default: norms, MLP, rotary embedding and
the loss, which it computes without the logits of all tokens. "kernels" is `optimize` after the adapters were added,
with the stock loss. "kernels_liger_loss" is that with Liger's loss, and nothing else of Liger.

`step_ms` is a whole step on the device, `forward_ms`, `backward_ms` and `optimizer_ms` are its parts. `peak_gb` is the
weights and what a step needs beside them. `grad_error_vs_fp32` is the relative L2 error of all adapters' gradients
against the stock model in float32, of the first `error_blocks` layers. `own_calls` and `stock_calls` count the calls of
a step that run the ops, and those that do not, by reason. With `--profile`, `ms_by_kind` is what a step's kernels take,
and "idle" the time in which the GPU waits for the host.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
from collections.abc import Iterator
from importlib.metadata import version
from types import ModuleType
from typing import Any

import peft
import torch
import transformers
from result_files import DTYPES, REPOSITORY, kept_records, write
from rich.console import Console
from rich.progress import Progress
from runs import add_options, begin, empty_table
from sharing import share
from steps import COLUMNS, Turns, error, free_memory, label, measure, view_of
from torch import Tensor
from train import ERROR_BLOCKS, PARTS, Step, gradients, records_of, trained

sys.path.insert(0, str(REPOSITORY / "examples"))
from llm_models import Configured, apply_liger, has_liger, random_model
from llm_shapes import TRAINED

CONFIGS = ("baseline", "compile", "liger", "kernels", "kernels_liger_loss")
RANK = 32
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
MODELS, SIZES = (list(dict.fromkeys(names)) for names in zip(*(job.split() for job in TRAINED)))
IDENTITY = ("model", "tokens", "rank", "checkpointing", "config")  # what a record measures


def trainable(model: Any, checkpointing: bool) -> Any:
    """peft's model of the same frozen weights, with trained adapters of its own."""
    base: Any = view_of(model)
    if checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(2)
    config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS, init_lora_weights=False)
    return peft.get_peft_model(base, config).train()


def make_model(config: str, model: Any, ltx: ModuleType, checkpointing: bool) -> Any:
    made = Configured(config, trainable(model, checkpointing))
    base = made.model.get_base_model()
    if "liger" in config:
        made.functions = apply_liger(base, layers=config == "liger", loss=True)
    if config.startswith("kernels"):
        made.model.report = ltx.optimize(made.model, graphs=False)
    elif config == "compile":
        for layer in base.model.layers:
            layer.compile()
    made.model.in_place = made.in_place
    return made.model


def loss_of(model: Any, ids: Tensor, autocast: bool) -> Tensor:
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        return model(input_ids=ids, labels=ids, use_cache=False).loss


class LanguageStep(Step):
    """A step with Liger's functions in place, which the backward of a checkpoint calls again."""

    def __call__(self) -> Tensor:
        with self.model.in_place():
            return super().__call__()


def gradient_errors(model: Any, ids: Tensor, ltx: ModuleType, checkpointing: bool, options: Any) -> dict[str, float]:
    """By configuration but the compiled one, of a model of the first layers."""
    shallow: Any = view_of(model)
    shallow.model.layers = shallow.model.layers[:ERROR_BLOCKS]
    exact = trainable(copy.deepcopy(shallow).float(), checkpointing=False)
    for parameter, other in zip(trained(exact), trained(trainable(shallow, checkpointing=False))):
        parameter.data.copy_(other)
    wanted = gradients(exact, loss_of(exact, ids, autocast=False))
    del exact
    found = {}
    for config in options.configs:
        if config != "compile":
            one = make_model(config, shallow, ltx, checkpointing)
            with one.in_place():
                got = gradients(one, loss_of(one, ids, options.dtype != "fp32"))
            found[config] = float(f"{error(got, wanted):.4g}")
    free_memory(options.device)
    return found


def measure_size(
    name: str, model: Any, ltx: ModuleType, size: str, checkpointing: bool, options: Any, progress: Progress
) -> Iterator[list[dict[str, Any]]]:
    """The records of a model and size, as soon as they are timed, and again with their profiles."""
    torch.compiler.reset()
    torch.manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, tuple(map(int, size.split("x"))), device=options.device)
    autocast = options.dtype != "fp32"
    errors = gradient_errors(model, ids, ltx, checkpointing, options)
    measured = measure(
        f"{name} {size}{', checkpointing' if checkpointing else ''}",
        lambda config: make_model(config, model, ltx, checkpointing),
        lambda one: LanguageStep(one, lambda: loss_of(one, ids, autocast), capturable=options.device == "cuda"),
        options.configs,
        Turns(options.rounds, options.steps, profiled=0, graph_s=0.0),
        options.device,
        progress,
    )
    identity = {"model": name, "tokens": size, "rank": RANK, "checkpointing": checkpointing}
    yield from records_of(measured, identity, errors, options)


def print_table(records: list[dict[str, Any]], console: Console) -> None:
    numbers = ["step_ms", *(f"{part}_ms" for part in PARTS), "peak_gb", "grad_error_vs_fp32"]
    others = ("baseline", "liger")
    headings = [*(f"x {other}" for other in others), *(column.replace("_", " ") for column in numbers)]
    table = empty_table("A training step", ["model", "tokens", "checkpoints", "config"], headings)
    step_ms = {tuple(map(record.get, IDENTITY)): record["step_ms"] for record in records}
    for record in records:
        of_others = (step_ms.get((*map(record.get, IDENTITY[:-1]), other)) for other in others)
        ratios = (f"{ms / record['step_ms']:.3f}" if ms else "" for ms in of_others)
        texts = record["model"], record["tokens"], "yes" if record["checkpointing"] else "no", label(record["config"])
        table.add_row(*texts, *ratios, *(str(record.get(column, "")) for column in numbers))
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS), help="(default: all)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="(default: all)")
    parser.add_argument("--sizes", nargs="+", metavar="BxS", default=SIZES, help=f"batch x tokens (default: {SIZES})")
    parser.add_argument("--checkpointing", nargs="+", choices=["off", "on"], default=["on"], help="(default: on)")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each configuration (default: 4)")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a turn (default: 6)")
    parser.add_argument("--profile", action="store_true", help="add milliseconds by kind of kernel, and launches")
    parser.add_argument("--update", action="store_true", help="keep what the file says of all else")
    add_options(parser, "train-llm", "a model of seconds on a CPU")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.models, options.sizes = ["tiny"], ["2x24"]
    liger = version("liger-kernel") if has_liger() else None
    if (options.device == "cpu" or not liger) and any("liger" in config for config in options.configs):
        options.configs = [config for config in options.configs if "liger" not in config]
        print("not run: Liger, which needs a GPU and to be installed")
    facts = {
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "liger": liger,
        "targets": TARGETS,
        "dtype": options.dtype,
        "weights": "random",
    }
    share()
    ltx, output, meta, console = begin("train-llm", options, **facts)
    records: list[dict[str, Any]] = []
    with Progress(*COLUMNS, console=console) as progress:
        for name in options.models:
            model = random_model(name, DTYPES[options.dtype], options.device)
            for size, saved in itertools.product(options.sizes, options.checkpointing):
                earlier = records
                for found in measure_size(name, model, ltx, size, saved == "on", options, progress):
                    records = [*earlier, *found]
                    write(output, meta, kept_records(output, meta, records, IDENTITY) if options.update else records)
                free_memory(options.device)
            del model
    print_table(records, console)
    console.print(str(output), highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
