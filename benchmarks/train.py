"""Times a training step of LoRA adapters or of a whole model: stock, with torch.compile, and with this package.

    python tools/build.py
    python benchmarks/train.py [--models ltx flux] [--sizes 49x512x768] [--checkpointing off on] [--tiny]

Models have their released depth and width, and random weights. SCENES has the size at which each of them is trained,
unless --sizes names others. Models larger than LTX-Video 2B are trained with gradient checkpoints.

A step is a forward under `torch.autocast`, a backward, and AdamW's step. The adapters' base is frozen, and its weights
are shared by the configurations, which take turns. With `--rank 0` there are no adapters: all weights are trained, in
`--dtype`, and each configuration has its own. "compile" is torch.compile of each block, "kernels" is `optimize`, after
the adapters were added. "kernels_fp8" is that with precision="fp8" and stock_weights="free". "torchao_fp8_compile" is
torchao's float8 training of the frozen layers below the adapters, compiled: it keeps the weights in bfloat16 and rounds
them at every step. `--timesteps token` gives each token of LTX-Video its own timestep, as trainers with a conditioning
frame do.

`step_ms` is a whole step on the device, `forward_ms`, `backward_ms` and `optimizer_ms` are its parts. `peak_gb` is the
weights and what a step needs beside them. `grad_error_vs_fp32` is the relative L2 error of all adapters' gradients
against the stock model in float32, of the first `error_blocks` blocks. `graph_ms` is the whole step as one CUDA graph
that the program has captured (absent with checkpoints, which read the generators' state, and where a step takes longer
than GRAPH_S). `own_calls` and `stock_calls` count the
calls of a step that run the ops, and those that do not, by reason. With `--profile`, `ms_by_kind` is what a step's
kernels take, and "idle" the time in which the GPU waits for the host.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import itertools
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from types import ModuleType
from typing import Any

import peft
import torch
from model_shapes import MODELS, Make
from models import block_lists, first_blocks, floats, one_tensor
from result_files import DTYPES, kept_records, write
from rich.console import Console
from rich.progress import Progress
from runs import add_options, begin, empty_table
from sharing import share
from steps import (
    COLUMNS,
    PROFILED_STEPS,
    Measured,
    Turns,
    error,
    free_memory,
    label,
    measure,
    profile,
    synchronize,
    view_of,
)
from torch import Tensor, nn

CONFIGS = ("baseline", "compile", "kernels", "kernels_fp8", "torchao_fp8_compile")
PARTS = ("forward", "backward", "optimizer")
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
IDENTITY = ("model", "size", "rank", "checkpointing", "timesteps", "config")  # what a record measures
ERROR_BLOCKS = 4
GRAPH_S = 0.5  # the host does not limit longer steps


@dataclass(frozen=True)
class Scene:
    """How a model is trained here.

    sizes: Frames x height x width; 1 frame is an image.
    cudnn: Whether attention may be cuDNN's, as torch chooses it on H100 and H200.
    """

    sizes: tuple[str, ...]
    rank: int = 32
    checkpointing: tuple[bool, ...] = (True,)
    timesteps: tuple[str, ...] = ("sample",)
    cudnn: bool = True


SCENES = {
    "ltx": Scene(("49x512x768", "89x512x768"), checkpointing=(False, True), timesteps=("sample", "token")),
    "ltx13b": Scene(("65x768x768",), rank=128, timesteps=("token",)),
    # cuDNN's backward ends in an illegal memory access for the stock model (torch 2.11).
    "flux": Scene(("1x1024x1024",), cudnn=False),
    "wan": Scene(("17x480x832",)),
    "qwen": Scene(("1x1024x1024",)),
}
TRAINED = {name: MODELS[name] for name in SCENES if name in MODELS}
# LTX-Video 2B has the class's own depth and width.
TRAINED["ltx"] = replace(MODELS["ltx13b"], config={}, tiny={**MODELS["ltx13b"].tiny, "cross_attention_dim": 128})


def trainable(model: nn.Module, rank: int, checkpointing: bool) -> Any:
    """Another model with the same frozen weights, and trained adapters of its own; of rank 0 with trained weights."""
    made: Any = view_of(model) if rank else copy.deepcopy(model).requires_grad_(True)
    if rank:
        torch.manual_seed(2)
        config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS, init_lora_weights=False)
        made.add_adapter(config)
    if checkpointing:
        made.enable_gradient_checkpointing()
    return made.train()


def make_model(config: str, model: nn.Module, ltx: ModuleType, rank: int, checkpointing: bool) -> Any:
    frees = config == "kernels_fp8"  # the weights of its own
    made = trainable(copy.deepcopy(model) if frees else model, rank, checkpointing)
    if config == "kernels":
        made.report = ltx.optimize(made, graphs=False)
    elif config == "kernels_fp8":
        made.report = ltx.optimize(made, graphs=False, precision="fp8", stock_weights="free")
    elif config == "torchao_fp8_compile":
        train_with_torchao(made)
    if config.endswith("compile"):
        for block in itertools.chain(*block_lists(made).values()):
            block.compile()
    return made


def train_with_torchao(model: Any) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_wide(module: nn.Module, name: str) -> bool:
        frozen = not any(parameter.requires_grad for parameter in module.parameters())
        return frozen and isinstance(module, nn.Linear) and not (module.in_features % 16 or module.out_features % 16)

    config = Float8LinearConfig.from_recipe_name("rowwise")
    for block in itertools.chain(*block_lists(model).values()):
        convert_to_float8_training(block, module_filter_fn=is_wide, config=config)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def loss_of(model: nn.Module, inputs: dict[str, Any], target: Tensor, autocast: bool) -> Tensor:
    with torch.autocast(target.device.type, torch.bfloat16) if autocast else contextlib.nullcontext():
        result = model(**inputs)[0]
    return nn.functional.mse_loss(result.to(target.dtype), target)


class Step:
    """A training step of a model. `marks` are the events at the ends of its parts, where those are recorded."""

    def __init__(self, model: Any, loss: Callable[[], Tensor], capturable: bool) -> None:
        self.model, self.loss = model, loss
        self.optimizer = torch.optim.AdamW(trained(model), lr=1e-5, capturable=capturable)
        self.marks: list[torch.cuda.Event] | None = None

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        self._mark()
        loss = self.loss()
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


def gradients(model: nn.Module, loss: Tensor) -> Tensor:
    """All that a loss has, in one row."""
    loss.backward()
    return torch.cat([parameter.grad.flatten().float() for parameter in trained(model)])


def gradient_errors(
    model: nn.Module,
    inputs: dict[str, Any],
    target: Tensor,
    rank: int,
    options: Any,
    made: Callable[[str, nn.Module], nn.Module],
) -> dict[str, float]:
    """By configuration but the compiled ones, of a model of the first blocks."""
    shallow = first_blocks(model, ERROR_BLOCKS)
    exact = trainable(copy.deepcopy(shallow).float(), rank, checkpointing=False)
    for parameter, other in zip(trained(exact), trained(trainable(shallow, rank, checkpointing=False))):
        parameter.data.copy_(other)
    exact_inputs = {key: floats(value) for key, value in inputs.items()}
    wanted = gradients(exact, loss_of(exact, exact_inputs, target.float(), autocast=False))
    found = {}
    for config in options.configs:
        if not config.endswith("compile"):
            one = made(config, shallow)
            got = gradients(one, loss_of(one, inputs, target, options.dtype != "fp32"))
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


def inputs_of(name: str, model: nn.Module, size: str, timesteps: str, options: Any) -> dict[str, Any]:
    """A batch of one, of the given size in frames, height and width, or "tiny"."""
    known = TRAINED[name]
    shape = dict(known.tiny_shape if options.tiny else known.shape)
    if size != "tiny":
        shape |= {key: n for key, n in zip(("frames", "height", "width"), map(int, size.split("x"))) if key in shape}
    inputs = known.inputs(model, Make(DTYPES[options.dtype], options.device), **shape)
    if timesteps == "token":
        inputs["timestep"] = torch.linspace(0, 999, inputs["hidden_states"].shape[1], device=options.device)[None]
    if "guidance" in inputs:  # times 1000 a number of bfloat16, so that the model in float32 is guided in the same way
        inputs["guidance"] = torch.full_like(inputs["guidance"], 4.0)
    return {**inputs, "return_dict": False}


def measure_scene(
    name: str,
    model: nn.Module,
    ltx: ModuleType,
    size: str,
    checkpointing: bool,
    timesteps: str,
    options: Any,
    progress: Progress,
) -> Iterator[list[dict[str, Any]]]:
    """The records of a scene, as soon as they are timed, and again with their profiles."""
    torch.compiler.reset()
    torch.manual_seed(1)
    inputs = inputs_of(name, model, size, timesteps, options)
    with torch.no_grad():
        target = torch.randn_like(one_tensor(model(**inputs)))
    autocast = options.dtype != "fp32"
    rank = SCENES[name].rank if options.rank is None else options.rank
    identity = {"model": name, "size": size, "rank": rank, "checkpointing": checkpointing, "timesteps": timesteps}
    identity |= {} if SCENES[name].cudnn else {"cudnn_attention": False}

    def made(config: str, base: nn.Module = model) -> Any:
        return make_model(config, base, ltx, rank, checkpointing)

    errors = gradient_errors(model, inputs, target, rank, options, made)
    measured = measure(
        f"{name} {size}, {timesteps}{', checkpointing' if checkpointing else ''}",
        made,
        lambda one: Step(one, lambda: loss_of(one, inputs, target, autocast), capturable=options.device == "cuda"),
        options.configs,
        Turns(options.rounds, options.steps, profiled=0, graph_s=0.0 if checkpointing else GRAPH_S),
        options.device,
        progress,
    )
    yield from records_of(measured, identity, errors, options)


def records_of(
    measured: dict[str, Measured], identity: dict[str, Any], errors: dict[str, float], options: Any
) -> Iterator[list[dict[str, Any]]]:
    """The records of configurations that were timed, and again with their profiles. errors: Of some of them."""
    records = {}
    for config, one in measured.items():
        records[config] = record = {**identity, "config": config, **one.record}
        if options.device == "cuda":
            record |= one.step.parts(options.steps)
        if config in errors:
            record |= {"grad_error_vs_fp32": errors[config], "error_blocks": ERROR_BLOCKS}
        if config.startswith("kernels"):
            record |= calls_of(one.step)
    synchronize(options.device)
    yield [*records.values()]
    if options.profile and options.device == "cuda":
        for config, one in measured.items():
            profile(one, PROFILED_STEPS)
            launches = sum(kernel["launches"] for kernel in one.record.pop("kernels"))
            records[config] |= {**one.record, "launches": launches}
        yield [*records.values()]


def print_table(records: list[dict[str, Any]], console: Console) -> None:
    numbers = ["step_ms", "graph_ms", *(f"{part}_ms" for part in PARTS), "peak_gb", "grad_error_vs_fp32"]
    headings = ["x baseline", *(column.replace("_", " ") for column in numbers)]
    table = empty_table("A training step", ["model", "size", "form", "config"], headings)
    stock = {_scene(r): r["step_ms"] for r in records if r["config"] == "baseline"}
    for record in records:
        form = f"{record['timesteps']}{', checkpointing' if record['checkpointing'] else ''}"
        ratio = f"{stock[_scene(record)] / record['step_ms']:.3f}" if _scene(record) in stock else ""
        row = (str(record.get(column, "")) for column in numbers)
        table.add_row(record["model"], record["size"], form, label(record["config"]), ratio, *row)
    console.print(table)


def _scene(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record[key] for key in IDENTITY[:-1])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS), help="(default: all)")
    parser.add_argument("--models", nargs="+", choices=SCENES, default=["ltx"], help="(default: ltx)")
    parser.add_argument("--sizes", nargs="+", metavar="FxHxW", help="(default: the model's)")
    parser.add_argument("--checkpointing", nargs="+", choices=["off", "on"], help="(default: the model's)")
    parser.add_argument("--timesteps", nargs="+", choices=["sample", "token"], help="(default: the model's)")
    parser.add_argument("--rank", type=int, help="0: all weights are trained (default: the model's)")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each configuration (default: 4)")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a turn (default: 6)")
    parser.add_argument("--profile", action="store_true", help="add milliseconds by kind of kernel, and launches")
    parser.add_argument("--update", action="store_true", help="keep what the file says of all else")
    add_options(parser, "train", "a model of seconds on a CPU")
    options = parser.parse_args(arguments)
    torchao = version("torchao") if importlib.util.find_spec("torchao") else None
    if (options.device == "cpu" or not torchao) and "torchao_fp8_compile" in options.configs:
        options.configs.remove("torchao_fp8_compile")
        print("not run: torchao, which needs a GPU and to be installed")
    facts = {"peft": peft.__version__, "torchao": torchao, "targets": TARGETS, "dtype": options.dtype}
    share()
    ltx, output, meta, console = begin("train", options, **facts)
    records: list[dict[str, Any]] = []
    with Progress(*COLUMNS, console=console) as progress:
        for name in options.models:
            scene = SCENES[name]
            torch.backends.cuda.enable_cudnn_sdp(scene.cudnn)
            model = TRAINED[name].construct(options.tiny, DTYPES[options.dtype], options.device)
            checkpointing = [form == "on" for form in options.checkpointing or ()] or scene.checkpointing
            for size, saved, timesteps in itertools.product(
                ["tiny"] if options.tiny else options.sizes or scene.sizes,
                checkpointing,
                options.timesteps or scene.timesteps,
            ):
                earlier = records
                for found in measure_scene(name, model, ltx, size, saved, timesteps, options, progress):
                    records = [*earlier, *found]
                    write(output, meta, kept_records(output, meta, records, IDENTITY) if options.update else records)
            del model
            free_memory(options.device)
    print_table(records, console)
    console.print(str(output), highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
