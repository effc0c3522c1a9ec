"""Times one forward of diffusion transformers at their released depth and width, with random weights.

    python tools/build.py
    python benchmarks/models.py [--models flux wan] [--configs baseline kernels] [--profile] [--tiny] [--output PATH]

A step is one forward of the transformer with the inputs that its pipeline hands it. The configurations share one set of
weights and take turns. "compile" is `compile_repeated_blocks`, which is how diffusers recommends it. Classes that
do not name their repeated blocks have them compiled in the same way. "autotune_compile" is the same in the mode
"max-autotune-no-cudagraphs", which takes minutes.

`step_ms` is a step as a program launches it, `graph_ms` the same kernels in a CUDA graph (absent where the stock model
reads values on the host, and where a step takes longer than GRAPH_S). `first_step_s` counts from the call that makes a
configuration to the end of its first step. `peak_gb` is its weights and what a step needs beside them. `error_vs_fp32`
is the relative L2 error of the result against the stock model in float32, of the first `error_blocks` blocks of each
kind: whole models of this size do not fit into the memory twice. `loop_error_vs_fp32` is the error of the latents after
`loop_steps` steps at one timestep. Each step subtracts the same share of the result in float32. torchao runs them
without the compiler. With `--blocks` a record is of those blocks alone, and says so.
`--profile` writes a second file, whose name ends in "-profile": `ms_by_kind`, the kernels of a step that take longest,
and the GPU's clock and power while steps run.

Each file is written after each model: a run that is killed keeps what it has measured. A model's records replace its
earlier ones; other models keep theirs, each with the commit and date of its run.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from types import ModuleType
from typing import Any

import diffusers
import torch
from model_shapes import MODELS, Inputs, Make
from records import AUTOTUNED
from result_files import DTYPES, earlier_records, of_the_run, write
from rich.console import Console
from rich.progress import Progress
from runs import add_options, begin, empty_table
from sharing import give_turn, share
from steps import (
    COLUMNS,
    CONFIGS,
    FP8_CONFIGS,
    INT8_CONFIGS,
    LOW,
    TORCHAO_INDUCTOR,
    Turns,
    error,
    first_line,
    free_memory,
    label,
    measure,
    options_of,
    profile,
    quantise_with_torchao,
    view_of,
)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ERROR_BLOCKS = 4
KEPT_KERNELS = 12  # of a profile, from the one that takes longest
GRAPH_S = 0.1  # the host does not limit longer steps
OF_THE_PROFILE = ("kernels", "ms_by_kind", "clock_mhz", "power_w")
ALL_CONFIGS = (*CONFIGS, AUTOTUNED, *FP8_CONFIGS, *INT8_CONFIGS, LOW)


def block_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """The lists of a model's repeated blocks by name, and no list within a block."""
    known = getattr(model, "_repeated_blocks", None) or getattr(model, "_no_split_modules", None)
    lists = {n: c for n, c in model.named_children() if isinstance(c, nn.ModuleList) and len({*map(type, c)}) == 1}
    has_block = {n: not known or any(type(part).__name__ in known for part in c[0].modules()) for n, c in lists.items()}
    return {n: c for n, c in lists.items() if len(c) > 1 and has_block[n]}


def first_blocks(model: nn.Module, count: int) -> nn.Module:
    """A model of the first `count` blocks of each list, with the same parameters."""
    shallow = view_of(model)
    for name, blocks in block_lists(shallow).items():
        setattr(shallow, name, blocks[:count])
    return shallow


def make_model(config: str, model: nn.Module, ltx: ModuleType) -> nn.Module:
    model = view_of(model)
    if config.startswith("kernels"):
        ltx.optimize(model, attention="int8" if "int8" in config else "native", **options_of(config))
    elif config.startswith("torchao"):
        quantise_with_torchao(model, list(block_lists(model).values()))
    if config.endswith("compile"):
        options: dict[str, Any] = {"options": TORCHAO_INDUCTOR} if "torchao" in config else {}
        if config == AUTOTUNED:
            options = {"mode": "max-autotune-no-cudagraphs"}
        if getattr(model, "_repeated_blocks", None):
            model.compile_repeated_blocks(fullgraph=True, **options)
        else:  # of classes that do not name them
            for block in (block for blocks in block_lists(model).values() for block in blocks):
                block.compile(fullgraph=True, **options)
    return model


def one_tensor(result: Any) -> Tensor:
    """A model's results side by side: some have two streams, a list of images, or None for what was not asked for."""
    parts = [part for part in result if part is not None]
    tensors = [t for part in parts for t in (part if isinstance(part, (list, tuple)) else [part])]
    return tensors[0] if len(tensors) == 1 else torch.cat([t.flatten() for t in tensors])


def denoise(model: nn.Module, inputs: Inputs, steps: int) -> Tensor:
    """The first stream's latents after some steps, kept in float32 between them."""
    key, start = next(iter(inputs.items()))
    latents = floats(start)
    for _ in range(steps):
        give_turn()
        given = [x.to(like.dtype) for x, like in zip(latents, start)] if isinstance(start, list) else latents.to(start)
        result = model(**{**inputs, key: given}, return_dict=False)[0]
        if isinstance(latents, list):
            latents = [moved(x, velocity, steps) for x, velocity in zip(latents, result)]
        else:
            latents = moved(latents, result, steps)
    return torch.cat([x.flatten() for x in latents]) if isinstance(latents, list) else latents


def moved(latents: Tensor, velocity: Tensor, steps: int) -> Tensor:
    """One step in the channels, dimension 1, that the latents and the result have in common.

    Some models have inputs beside the latents in their channels, and some predict a variance beside the velocity.
    """
    if latents.shape == velocity.shape:
        return latents - velocity.float() / steps
    channels = min(latents.shape[1], velocity.shape[1])
    return torch.cat((latents[:, :channels] - velocity[:, :channels].float() / steps, latents[:, channels:]), 1)


def floats(value: Any) -> Any:
    """The same inputs in float32."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(floats(v) for v in value)
    return value


class RepeatedKeys(TorchFunctionMode):
    """Attention with a key for each head of the query: torch has no other one in float32 that fits into the memory."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is nn.functional.scaled_dot_product_attention and kwargs.pop("enable_gqa", False):
            query, *others = args if args else (kwargs.pop("query"), kwargs.pop("key"), kwargs.pop("value"))
            times = [query.shape[-3] // other.shape[-3] for other in others[:2]]
            args = (query, *(x.repeat_interleave(n, -3) for x, n in zip(others, times)), *others[2:])
        return function(*args, **kwargs)


@dataclass
class Benchmark:
    """What every model is measured with."""

    ltx: ModuleType
    options: argparse.Namespace
    turns: Turns
    progress: Progress
    failed: dict[str, str] = field(default_factory=dict)

    def errors(
        self, model: nn.Module, inputs: Inputs, configs: list[str], failed: dict[str, str]
    ) -> dict[str, dict[str, float]]:
        """What a record says of its error; nothing of compiled ones, which differ by the compiler's choice alone.

        torchao's products are made for the compiler, and its error is measured without. A configuration that fails is
        named in `failed`.
        """
        blocks, steps = self.options.error_blocks, self.options.loop_steps
        shallow = first_blocks(model, blocks) if blocks else model
        exact, exact_inputs = copy.deepcopy(shallow).float(), {key: floats(value) for key, value in inputs.items()}
        with RepeatedKeys():
            expected = one_tensor(exact(**exact_inputs, return_dict=False))
            expected_latents = denoise(exact, exact_inputs, steps)
        del exact
        found: dict[str, dict[str, float]] = {}
        for config in configs:
            if config.endswith("compile") and not config.startswith("torchao"):
                continue
            try:
                made = make_model(config.removesuffix("_compile"), shallow, self.ltx)
                result = one_tensor(made(**inputs, return_dict=False))
                latents = denoise(made, inputs, steps)
            except Exception as reason:
                failed[config] = first_line(reason)
                self.progress.console.print(f"[red]{label(config)} failed[/red]: {failed[config]}")
            else:
                found[config] = {"error_vs_fp32": float(f"{error(result, expected):.4g}"), "error_blocks": blocks}
                if steps:
                    found[config] |= {
                        "loop_error_vs_fp32": float(f"{error(latents, expected_latents):.4g}"),
                        "loop_steps": steps,
                    }
        return found

    def model(self, name: str) -> Iterator[list[dict[str, Any]]]:
        """A model's records, as soon as they are timed, and again with their profiles."""
        known, options = MODELS[name], self.options
        dtype = DTYPES[options.dtype]
        torch.compiler.reset()
        model = known.construct(options.tiny, dtype, options.device)
        if options.blocks:
            model = first_blocks(model, options.blocks)
            free_memory(options.device)  # of the other blocks
        torch.manual_seed(1)
        inputs = known.inputs(model, Make(dtype, options.device), **(known.tiny_shape if options.tiny else known.shape))
        turns = self.turns if known.graphs else replace(self.turns, graph_s=0.0)
        failed: dict[str, str] = {}
        errors = self.errors(model, inputs, options.configs, failed)
        measured = measure(
            name,
            lambda config: make_model(config, model, self.ltx),
            lambda made: lambda: one_tensor(made(**inputs, return_dict=False)),
            [config for config in options.configs if config not in failed],
            turns,
            options.device,
            self.progress,
            failed,
        )
        self.failed.update({f"{name}, {config}": reason for config, reason in failed.items()})
        depth = {key: len(blocks) for key, blocks in block_lists(model).items()}
        common: dict[str, Any] = {"model": name, "shape": "tiny" if options.tiny else known.shape_name, "blocks": depth}
        if options.blocks:
            common["shallow"] = True
        for config in errors.keys() & measured.keys():
            measured[config].record.update(errors[config])
        yield [{**common, "config": config, **one.record} for config, one in measured.items()]
        if options.profile and options.device == "cuda":
            for one in measured.values():
                profile(one, self.turns.steps_of(one.step_s))
                del one.record["kernels"][KEPT_KERNELS:]
            yield [{**common, "config": config, **one.record} for config, one in measured.items()]


def print_table(records: list[dict[str, Any]], console: Console) -> None:
    texts = "model", "configuration"
    numbers = "ms", "x stock", "x compile", "graph ms", "first s", "peak GiB", "error"
    table = empty_table("One forward of each model", texts, numbers)
    by_key = {(record["model"], record["config"]): record for record in records}
    for record in records:

        def ratio(config: str, record: dict[str, Any] = record) -> str:
            other = by_key.get((record["model"], config))
            return f"{other['step_ms'] / record['step_ms']:.3f}" if other else ""

        table.add_row(
            record["model"],
            label(record["config"]),
            f"{record['step_ms']:.2f}",
            ratio("baseline"),
            ratio("compile"),
            f"{record['graph_ms']:.2f}" if "graph_ms" in record else "",
            f"{record['first_step_s']:.1f}" if "first_step_s" in record else "",
            f"{record['peak_gb']:.1f}" if "peak_gb" in record else "",
            f"{record['error_vs_fp32']:.2e}" if "error_vs_fp32" in record else "",
        )
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)")
    parser.add_argument("--configs", nargs="+", choices=ALL_CONFIGS, help=f"(default: all but {AUTOTUNED})")
    parser.add_argument("--blocks", type=int, default=0, help="only the first blocks of each kind (default: all)")
    parser.add_argument("--error-blocks", type=int, default=ERROR_BLOCKS, help="blocks for the error; 0: all of them")
    parser.add_argument("--loop-steps", type=int, default=8, help="steps for the latents' error; 0: none (default: 8)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of a configuration (default: 2)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a turn at most (default: 10)")
    parser.add_argument("--seconds", type=float, default=0.5, help="a turn's steps take about this long (default: 0.5)")
    parser.add_argument("--warm-up", type=float, default=0.5, help="seconds of steps before each turn (default: 0.5)")
    parser.add_argument("--no-graphs", action="store_true", help="do not time CUDA graphs")
    parser.add_argument("--profile", action="store_true", help="add the kernels of one step, which takes seconds more")
    add_options(parser, "models", "models of seconds on a CPU")
    options = parser.parse_args(arguments)
    torchao = version("torchao") if importlib.util.find_spec("torchao") else None
    if options.configs is None:
        installed = [config for config in ALL_CONFIGS if torchao or not config.startswith("torchao")]
        options.configs = [config for config in installed if config != AUTOTUNED]
    facts = {"diffusers": diffusers.__version__, "torchao": torchao, "dtype": options.dtype, "weights": "random"}
    share()
    ltx, output, meta, console = begin("models", options, **facts)
    profiles = output.with_name(f"{output.stem}-profile.json")
    records, profiled = earlier_records(output, meta), earlier_records(profiles, meta)
    graph_s = 0.0 if options.no_graphs else GRAPH_S
    turns = Turns(options.rounds, options.steps, options.seconds, options.warm_up, 0, graph_s)
    with torch.no_grad(), Progress(*COLUMNS, console=console) as progress:
        benchmark = Benchmark(ltx, options, turns, progress)
        for model in options.models:
            try:
                for measured in benchmark.model(model):
                    measured = [{**record, **of_the_run(meta)} for record in measured]
                    records = [record for record in records if record["model"] != model]
                    records += [{k: v for k, v in record.items() if k not in OF_THE_PROFILE} for record in measured]
                    write(output, meta, records)
                    if any("ms_by_kind" in record for record in measured):
                        profiled = [record for record in profiled if record["model"] != model] + measured
                        write(profiles, meta, profiled)
            except Exception as reason:  # the others are still measured; the exit status says that one was not
                benchmark.failed[model] = first_line(reason)
                console.print(f"[red]{model} failed[/red]: {benchmark.failed[model]}")
            free_memory(options.device)
    print_table(records, console)
    console.print(str(output), highlight=False, soft_wrap=True)
    return 1 if benchmark.failed else 0


if __name__ == "__main__":
    sys.exit(main())
