"""Times a denoising step of LTX-Video: stock, with this package, with torch.compile, with both, and all that in fp8.

    python tools/build.py
    python benchmarks/ltx.py [--frames 49 161] [--configs baseline kernels] [--model random|tiny|ID] [--output PATH]

A step is one forward of the transformer with the batch that guidance makes, timed among others as in denoising. The
configurations share one set of weights and take turns, forwards and backwards: each leaves the chip warm or cool for
the next one. fp8 is optimize(precision="fp8"), and torchao's dynamic quantisation per row of the same blocks' linear
layers (where torchao is installed), compiled block by block.

`step_ms` is that of steps as a program launches them, `graph_ms` that of the same kernels in a CUDA graph: where it is
much less, the step waits for the host. `first_step_s` is what it takes from the call that makes a configuration to the
end of its first step; `peak_gb` its weights and what a step needs beside them; `error_vs_fp32` the relative L2 error of
the result against the stock model in float32, and `psnr_vs_baseline` its likeness to the stock result in decibels.
Beside the JSON goes a picture of where the time of a step goes on the device.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import math
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from cpu import DTYPES, REPOSITORY
from cpu import meta as common_meta
from diffusers import LTXVideoTransformer3DModel
from ops import driver_version, load_package, write
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

CONFIGS = ("baseline", "kernels", "compile", "kernels_compile")
FP8_CONFIGS = ("kernels_fp8", "torchao_fp8_compile", "kernels_fp8_compile")
PROFILED_STEPS = 5
WARM_UP_S = 1.0  # of each turn on a GPU: until then its clock is what the configuration before has left
STEPS_AHEAD = 3  # that the host launches before those that are timed
TINY = {"num_layers": 2, "num_attention_heads": 4, "cross_attention_dim": 256, "caption_channels": 64}
TEXT_TOKENS = 128
PROMPTS = 10, 60  # how many of them are not padding: a short negative prompt and an ordinary one
TEMPORAL, SPATIAL, FRAME_RATE = 8, 32, 25  # the VAE's compression

# Device kernels by what they do, the first that fits; what is left is elementwise work of torch and torch.compile.
KINDS = {
    "elementwise": re.compile(r"^triton_"),  # torch.compile names them after all that they touch
    "attention": re.compile(r"fmha|flash|sdpa|attention|cudnn.*sm\d+.*knob", re.IGNORECASE),
    "GEMM": re.compile(r"gemm|nvjet|cutlass|xmma|cublas|splitK|addmm", re.IGNORECASE),
    "this package": re.compile(r"\bltx::"),
}
COLOURS = {"GEMM": "#4C72B0", "attention": "#8172B3", "this package": "#55A868", "elementwise": "#DD8452"}
COLOURS["idle"] = "#CCCCCC"


def load_model(name: str, dtype: torch.dtype, device: str) -> LTXVideoTransformer3DModel:
    if name in ("random", "tiny"):
        torch.manual_seed(0)
        with torch.device(device):
            model = LTXVideoTransformer3DModel(**(TINY if name == "tiny" else {}))
        for key, parameter in model.named_parameters():
            if key.endswith(("norm_q.weight", "norm_k.weight")):
                nn.init.normal_(parameter, 1.0, 0.1)  # as constructed they are all one
        model = model.to(dtype)
    else:
        model = LTXVideoTransformer3DModel.from_pretrained(name, subfolder="transformer", torch_dtype=dtype).to(device)
    return model.eval().requires_grad_(False)


def make_inputs(
    model: nn.Module, batch: int, frames: int, height: int, width: int, prompts: Sequence[int] = PROMPTS
) -> dict[str, Any]:
    """What LTXPipeline hands the transformer. `prompts`: tokens of the negative prompt and of the other."""
    grid = (frames - 1) // TEMPORAL + 1, height // SPATIAL, width // SPATIAL
    options = {"device": model.device, "dtype": model.dtype}
    mask = torch.ones(batch, TEXT_TOKENS, device=model.device, dtype=torch.int64)
    mask[0, prompts[0] :] = 0
    mask[-1, prompts[-1] :] = 0
    return {
        "hidden_states": torch.randn(batch, math.prod(grid), model.config.in_channels, **options),
        "encoder_hidden_states": torch.randn(batch, TEXT_TOKENS, model.config.caption_channels, **options),
        "timestep": torch.full((batch,), 500.0, device=model.device),
        "encoder_attention_mask": mask,
        "num_frames": grid[0],
        "height": grid[1],
        "width": grid[2],
        "rope_interpolation_scale": (TEMPORAL / FRAME_RATE, SPATIAL, SPATIAL),
        "return_dict": False,
    }


def view_of(model: nn.Module) -> nn.Module:
    """Another model with the same parameters."""
    return copy.deepcopy(model, {id(p): p for p in [*model.parameters(), *model.buffers()]})


# What torchao sets in inductor for these layers: by itself it would, for all that the process compiles later.
TORCHAO_INDUCTOR = {"coordinate_descent_tuning": True, "coordinate_descent_check_all_directions": True}


def quantise_with_torchao(model: nn.Module) -> None:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)
    quantize_(model.transformer_blocks, config)


def make_model(config: str, model: nn.Module, ltx: ModuleType) -> nn.Module:
    model = view_of(model)
    if config.startswith("kernels"):
        ltx.optimize(model, precision="fp8" if "fp8" in config else "native")
    elif config.startswith("torchao"):
        quantise_with_torchao(model)
    if config == "torchao_fp8_compile":  # block by block: whole, that takes minutes
        model.compile_repeated_blocks(fullgraph=True, options=TORCHAO_INDUCTOR)
    elif config.endswith("compile"):
        model.compile()
    return model


def weight_bytes(model: nn.Module) -> int:
    """What a model's parameters and buffers take; a storage that several share counts once."""
    storages = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        parts = [getattr(tensor, name) for name in getattr(tensor, "tensor_data_names", ())] or [tensor]
        for part in parts:
            storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(storages.values())


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def time_steps(step: Callable[[], Tensor], steps: int, device: str) -> list[float]:
    """Milliseconds of each; on a GPU device time, launched ahead."""
    if device != "cuda":
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            step()
            times.append((time.perf_counter() - start) * 1e3)
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_UP_S:
        step()
        torch.cuda.synchronize()
    for _ in range(STEPS_AHEAD):
        step()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def as_graph(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A step whose kernels the host launches all at once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


def kernel_times(step: Callable[[], Tensor]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """(milliseconds of a step by kind of kernel, all kernels with their milliseconds and launches).

    Of steps that follow one another: alone, a step finds a cooler chip and a higher clock.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    step()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("gpu_"):
            by_name[event.name].append(event.device_time_total / 1e3)
    by_kind: dict[str, float] = defaultdict(float)
    kernels = []
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1])):
        kind = next((kind for kind, pattern in KINDS.items() if pattern.search(name)), "elementwise")
        ms, launches = sum(times) / PROFILED_STEPS, round(len(times) / PROFILED_STEPS)
        by_kind[kind] += ms
        kernels.append({"kernel": name, "kind": kind, "ms": round(ms, 3), "launches": launches})
    return {kind: round(ms, 3) for kind, ms in by_kind.items()}, kernels


def error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def psnr(got: Tensor, expected: Tensor) -> float | None:
    mean_square = (got.double() - expected.double()).square().mean().item()
    span = (expected.max() - expected.min()).item()
    return 10 * math.log10(span * span / mean_square) if mean_square else None


def measure(
    model: nn.Module,
    exact: nn.Module,
    ltx: ModuleType,
    inputs: dict[str, Any],
    frames: int,
    configs: list[str],
    options: Any,
    progress: Progress,
) -> list[dict[str, Any]]:
    device = options.device
    upcast = {k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    expected = exact(**upcast)[0]
    steps: dict[str, Callable[[], Tensor]] = {}
    records: dict[str, dict[str, Any]] = {}
    results: dict[str, Tensor] = {}
    graphs: dict[str, Callable[[], Tensor]] = {}
    task = progress.add_task(f"{frames} frames", total=len(configs) * (options.rounds + 1))
    for config in configs:
        synchronize(device)
        start = time.perf_counter()
        made = make_model(config, model, ltx)
        steps[config] = lambda made=made: made(**inputs)[0]
        steps[config]()
        synchronize(device)
        records[config] = {"first_step_s": round(time.perf_counter() - start, 3)}
        for _ in range(3):
            steps[config]()
        before = 0
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        results[config] = steps[config]().clone()
        if device == "cuda":
            peak = weight_bytes(made) + torch.cuda.max_memory_allocated() - before
            records[config]["peak_gb"] = round(peak / 2**30, 3)
            graphs[config] = as_graph(steps[config])
        progress.console.print(f"{frames} frames, {label(config)}: first step {records[config]['first_step_s']} s")
        progress.advance(task)
    times: dict[str, list[float]] = {config: [] for config in configs}
    graph_times: dict[str, list[float]] = {config: [] for config in graphs}
    for turn in range(options.rounds):
        for config in configs[:: -1 if turn % 2 else 1]:
            times[config] += time_steps(steps[config], options.steps, device)
            if config in graphs:
                graph_times[config] += time_steps(graphs[config], options.steps, device)
            progress.advance(task)
    baseline = results.get("baseline")
    for config, record in records.items():
        record["step_ms"] = round(statistics.median(times[config]), 3)
        record["p90_ms"] = round(statistics.quantiles(times[config], n=10)[-1], 3)
        if config in graphs:
            record["graph_ms"] = round(statistics.median(graph_times[config]), 3)
        record["error_vs_fp32"] = float(f"{error(results[config], expected):.4g}")
        record["psnr_vs_baseline"] = None if baseline is None else psnr(results[config], baseline)
        if device == "cuda":
            by_kind, record["kernels"] = kernel_times(steps[config])
            # Of the step as it was timed: under the profiler the host is slower, and the device waits for it.
            idle = max(0.0, record["step_ms"] - sum(by_kind.values()))
            record["ms_by_kind"] = {**by_kind, "idle": round(idle, 3)}
    return [{"config": config, **record} for config, record in records.items()]


def label(config: str) -> str:
    return config.replace("_fp8", " fp8").replace("_", " + ")


def draw(records: list[dict[str, Any]], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    frames = sorted({record["frames"] for record in records})
    figure, axes = pyplot.subplots(1, len(frames), figsize=(6.4 * len(frames), 3.8), squeeze=False)
    for axis, count in zip(axes[0], frames):
        shown = [record for record in records if record["frames"] == count]
        bottom = [0.0] * len(shown)
        names = [label(record["config"]).replace(" + ", "\n+ ") for record in shown]
        for kind, colour in COLOURS.items():
            heights = [record["ms_by_kind"].get(kind, 0.0) for record in shown]
            axis.bar(names, heights, bottom=bottom, color=colour, label=kind, width=0.7)
            bottom = [b + h for b, h in zip(bottom, heights)]
        for i, record in enumerate(shown):
            axis.text(i, bottom[i], f"{record['step_ms']:.1f} ms", ha="center", va="bottom", fontsize=9)
        axis.set_title(f"{count} frames")
        axis.set_ylim(0, max(bottom) * 1.12)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="x", labelsize=8)
    axes[0][0].set_ylabel("ms a denoising step")
    axes[0][-1].legend(frameon=False, fontsize=8, loc="upper right")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=150)


def print_table(records: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="LTX-Video, one denoising step")
    columns = (
        "frames",
        "configuration",
        "ms",
        "p90",
        "speed-up",
        "graph ms",
        "first step s",
        "peak GiB",
        "error",
        "PSNR dB",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "configuration" else "right")
    for record in records:
        stock = [r for r in records if r["frames"] == record["frames"] and r["config"] == "baseline"]
        table.add_row(
            str(record["frames"]),
            label(record["config"]),
            f"{record['step_ms']:.2f}",
            f"{record['p90_ms']:.2f}",
            f"{stock[0]['step_ms'] / record['step_ms']:.3f}" if stock else "",
            f"{record['graph_ms']:.2f}" if "graph_ms" in record else "",
            f"{record['first_step_s']:.1f}",
            f"{record['peak_gb']:.2f}" if "peak_gb" in record else "",
            f"{record['error_vs_fp32']:.2e}",
            "" if record["psnr_vs_baseline"] is None else f"{record['psnr_vs_baseline']:.1f}",
        )
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, nargs="+", default=[49, 161])
    parser.add_argument("--height", type=int, default=512)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=2, help="2 is one clip with guidance (default: 2)")
    parser.add_argument("--configs", nargs="+", choices=CONFIGS + FP8_CONFIGS, help="(default: all)")
    parser.add_argument(
        "--skip", nargs="+", default=[], metavar="FRAMES:CONFIG", help="leave out, to save its compilation"
    )
    parser.add_argument("--model", default="random", help="random (the 2B shape), tiny, a folder, or a Hub id")
    parser.add_argument(
        "--prompts",
        type=int,
        nargs=2,
        metavar="TOKENS",
        default=PROMPTS,
        help=f"tokens of the negative prompt and of the other, of {TEXT_TOKENS} (default: {PROMPTS})",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=4, help="turns of a configuration (default: 4)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a turn (default: 10)")
    parser.add_argument("--output", type=Path, help="JSON (default: benchmarks/results/<gpu>-ltx.json)")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 130)

    torchao = version("torchao") if importlib.util.find_spec("torchao") else None
    if options.configs is None:
        options.configs = [*CONFIGS, *FP8_CONFIGS]
        if torchao is None:
            options.configs.remove("torchao_fp8_compile")
            console.print("missing: torchao, and with it torchao_fp8_compile")

    ltx, metadata = load_package()
    cuda = options.device == "cuda"
    name = torch.cuda.get_device_name() if cuda else "cpu"
    slug = name.removeprefix("NVIDIA ").lower().replace(" ", "-")
    output = options.output or REPOSITORY / f"benchmarks/results/{slug}-ltx.json"
    meta = {
        **common_meta(),
        "device": name,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "kernels": metadata["id"],
        "commit": metadata.get("provenance", {}).get("kernel", {}).get("commit"),
        "model": options.model,
        "dtype": options.dtype,
        "torchao": torchao,
        "skipped": options.skip,
        "prompts": list(options.prompts),
        "psnr": "of the transformer's output, peak: the range of the stock output",
    }
    records: list[dict[str, Any]] = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with torch.no_grad(), Progress(*columns, console=console) as progress:
        model = load_model(options.model, DTYPES[options.dtype], options.device)
        exact = copy.deepcopy(model).float()
        for frames in options.frames:
            chosen = [config for config in options.configs if f"{frames}:{config}" not in options.skip]
            torch.compiler.reset()  # a second shape would be compiled for all sizes, and slower
            torch.manual_seed(frames)
            inputs = make_inputs(model, options.batch, frames, options.height, options.width, options.prompts)
            shape = {"frames": frames, "height": options.height, "width": options.width, "batch": options.batch}
            records += [{**shape, **r} for r in measure(model, exact, ltx, inputs, frames, chosen, options, progress)]
            write(output, meta, records)
    if cuda:
        title = f"LTX-Video 2B, batch {options.batch}, {options.height}x{options.width}, {options.dtype}, {name}"
        draw(records, output, title)
    print_table(records, console)
    console.print(str(output), highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
