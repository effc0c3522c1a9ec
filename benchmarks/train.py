"""Times a training step of LoRA adapters on LTX-Video 2B: stock, with torch.compile, and with this package.

    python tools/build.py
    python benchmarks/train.py [--frames 49 89] [--checkpointing off on] [--timesteps sample token] [--tiny]

A step is a forward under `torch.autocast`, a backward, and AdamW's step on the adapters. The base is frozen, and its
weights are shared by the configurations, which take turns. "compile" is torch.compile of each block, "kernels" is
`optimize` after the adapters were added. `--timesteps token` gives each token its own timestep, as trainers with a
conditioning frame do.

`step_ms` is a whole step on the device, `forward_ms`, `backward_ms` and `optimizer_ms` are its parts. `peak_gb` is the
weights and what a step needs beside them. `grad_error_vs_fp32` is the relative L2 error of all adapters' gradients
against the stock model in float32, of the first `error_blocks` blocks. `own_calls` and `stock_calls` count the
calls of a step that run the ops, and those that do not, by reason.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import peft
import torch
from ltx import load_model, make_inputs
from models import first_blocks, floats
from result_files import DTYPES, kept_records, write
from rich.console import Console
from rich.progress import Progress
from runs import add_options, begin, empty_table
from steps import COLUMNS, Turns, error, label, measure, synchronize, view_of
from torch import Tensor, nn

CONFIGS = ("baseline", "compile", "kernels")
PARTS = ("forward", "backward", "optimizer")
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
IDENTITY = ("frames", "height", "width", "rank", "checkpointing", "timesteps", "config")  # what a record measures
ERROR_BLOCKS = 4
HEIGHT, WIDTH = 512, 768


def with_adapters(model: nn.Module, rank: int, checkpointing: bool) -> Any:
    """Another model with the same frozen weights, and trained adapters of its own."""
    made: Any = view_of(model)
    torch.manual_seed(2)
    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS, init_lora_weights=False)
    made.add_adapter(config)
    if checkpointing:
        made.enable_gradient_checkpointing()
    return made.train()


def make_model(config: str, model: nn.Module, ltx: ModuleType, rank: int, checkpointing: bool) -> Any:
    made = with_adapters(model, rank, checkpointing)
    if config == "kernels":
        made.report = ltx.optimize(made, graphs=False)
    elif config == "compile":
        for block in made.transformer_blocks:
            block.compile()
    return made


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def loss_of(model: nn.Module, inputs: dict[str, Any], target: Tensor, autocast: bool) -> Tensor:
    with torch.autocast(target.device.type, torch.bfloat16) if autocast else contextlib.nullcontext():
        result = model(**inputs)[0]
    return nn.functional.mse_loss(result.to(target.dtype), target)


class Step:
    """A training step of a model. `marks` are the events at the ends of its parts, where those are recorded."""

    def __init__(self, model: nn.Module, inputs: dict[str, Any], target: Tensor, autocast: bool) -> None:
        self.model, self.inputs, self.target, self.autocast = model, inputs, target, autocast
        self.optimizer = torch.optim.AdamW(trained(model), lr=1e-5)
        self.marks: list[torch.cuda.Event] | None = None

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        self._mark()
        loss = loss_of(self.model, self.inputs, self.target, self.autocast)
        self._mark()
        loss.backward()
        self._mark()
        self.optimizer.step()
        self._mark()
        return loss.detach()

    def _mark(self) -> None:
        if self.marks is not None:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()

    def parts(self, steps: int) -> dict[str, float]:
        """Medians of the milliseconds of each part."""
        times: dict[str, list[float]] = {part: [] for part in PARTS}
        for _ in range(steps):
            self.marks = []
            self()
            torch.cuda.synchronize()
            for part, (begun, ended) in zip(PARTS, itertools.pairwise(self.marks)):
                times[part].append(begun.elapsed_time(ended))
        self.marks = None
        return {f"{part}_ms": round(statistics.median(found), 3) for part, found in times.items()}


def gradients(model: nn.Module, inputs: dict[str, Any], target: Tensor, autocast: bool) -> Tensor:
    loss_of(model, inputs, target, autocast).backward()
    return torch.cat([parameter.grad.flatten().float() for parameter in trained(model)])


def gradient_errors(
    model: nn.Module, inputs: dict[str, Any], target: Tensor, options: Any, made: Callable[[str, nn.Module], nn.Module]
) -> dict[str, float]:
    """By configuration but the compiled one, of a model of the first blocks."""
    shallow = first_blocks(model, ERROR_BLOCKS)
    exact = with_adapters(copy.deepcopy(shallow).float(), options.rank, checkpointing=False)
    for parameter, other in zip(trained(exact), trained(with_adapters(shallow, options.rank, checkpointing=False))):
        parameter.data.copy_(other)
    wanted = gradients(exact, {key: floats(value) for key, value in inputs.items()}, target.float(), autocast=False)
    found = {}
    for config in options.configs:
        if config != "compile":
            got = gradients(made(config, shallow), inputs, target, options.dtype != "fp32")
            found[config] = float(f"{error(got, wanted):.4g}")
    return found


def calls_of(step: Step) -> dict[str, Any]:
    """What the report says of one step's calls of replaced modules."""

    def seen() -> tuple[Counter[str], Counter[str]]:
        own = Counter({site.class_name: site.calls for site in step.model.report.sites})
        stock = {f"{name}: {reason}": n for name, of in step.model.report.fallbacks.items() for reason, n in of.items()}
        return own, Counter(stock)

    before = seen()
    step()
    own, stock = (after - earlier for after, earlier in zip(seen(), before))
    return {"own_calls": dict(own), "stock_calls": dict(stock)}


def measure_size(
    model: nn.Module,
    ltx: ModuleType,
    size: tuple[int, int, int],
    checkpointing: bool,
    timesteps: str,
    options: Any,
    progress: Progress,
) -> list[dict[str, Any]]:
    torch.compiler.reset()
    torch.manual_seed(1)
    inputs = make_inputs(model, 1, *size)
    if timesteps == "token":
        tokens = inputs["hidden_states"].shape[1]
        inputs["timestep"] = torch.linspace(0, 999, tokens, device=model.device)[None]
    target = torch.randn_like(inputs["hidden_states"])
    autocast = options.dtype != "fp32"
    identity = {"frames": size[0], "height": size[1], "width": size[2], "rank": options.rank}
    identity |= {"checkpointing": checkpointing, "timesteps": timesteps}

    def made(config: str, base: nn.Module = model) -> Any:
        return make_model(config, base, ltx, options.rank, checkpointing)

    errors = gradient_errors(model, inputs, target, options, lambda config, base: made(config, base))
    measured = measure(
        f"{size[0]} frames, {timesteps}{', checkpointing' if checkpointing else ''}",
        made,
        lambda one: Step(one, inputs, target, autocast),
        options.configs,
        Turns(options.rounds, options.steps, profiled=0, graph_s=0.0),
        options.device,
        progress,
    )
    records = []
    for config, one in measured.items():
        record = {**identity, "config": config, **one.record}
        if options.device == "cuda":
            record |= one.step.parts(options.steps)
        if config in errors:
            record |= {"grad_error_vs_fp32": errors[config], "error_blocks": ERROR_BLOCKS}
        if config == "kernels":
            record |= calls_of(one.step)
        records.append(record)
    synchronize(options.device)
    return records


def print_table(records: list[dict[str, Any]], console: Console) -> None:
    numbers = ["step_ms", *(f"{part}_ms" for part in PARTS), "peak_gb", "grad_error_vs_fp32"]
    headings = ["x baseline", *(column.replace("_", " ") for column in numbers)]
    table = empty_table("A training step of LoRA adapters on LTX-Video 2B", ["frames", "form", "config"], headings)
    stock = {_scene(r): r["step_ms"] for r in records if r["config"] == "baseline"}
    for record in records:
        form = f"{record['timesteps']}{', checkpointing' if record['checkpointing'] else ''}"
        ratio = f"{stock[_scene(record)] / record['step_ms']:.3f}" if _scene(record) in stock else ""
        row = (str(record.get(column, "")) for column in numbers)
        table.add_row(str(record["frames"]), form, label(record["config"]), ratio, *row)
    console.print(table)


def _scene(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record[key] for key in IDENTITY[:-1])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS), help="(default: all)")
    parser.add_argument("--frames", nargs="+", type=int, default=[49, 89], help="of 512x768 (default: 49 89)")
    parser.add_argument("--checkpointing", nargs="+", choices=["off", "on"], default=["off", "on"])
    parser.add_argument("--timesteps", nargs="+", choices=["sample", "token"], default=["sample", "token"])
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4, help="turns of each configuration (default: 4)")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a turn (default: 6)")
    parser.add_argument("--update", action="store_true", help="keep what the file says of all else")
    add_options(parser, "train", "a model of seconds on a CPU")
    options = parser.parse_args(arguments)
    facts = {"peft": peft.__version__, "targets": TARGETS, "dtype": options.dtype}
    ltx, output, meta, console = begin("train", options, **facts)
    model = load_model("tiny" if options.tiny else "random", DTYPES[options.dtype], options.device)
    height, width = (64, 64) if options.tiny else (HEIGHT, WIDTH)
    records: list[dict[str, Any]] = []
    with Progress(*COLUMNS, console=console) as progress:
        for frames, checkpointing, timesteps in itertools.product(
            options.frames, options.checkpointing, options.timesteps
        ):
            size = frames, height, width
            records += measure_size(model, ltx, size, checkpointing == "on", timesteps, options, progress)
            write(output, meta, kept_records(output, meta, records, IDENTITY) if options.update else records)
    print_table(records, console)
    console.print(str(output), highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
