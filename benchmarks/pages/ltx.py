"""A denoising step of LTX-Video: h200-ltx.json, and beside it the whole clip of the first screen."""

from collections.abc import Iterable

from pages.names import CONFIGS, by_config, config_of, first_step, in_order
from pages.writing import KINDS, Record, across, block, grid, link, load, records_of, table, table_of_kinds, text

# The first screen's rows: configurations of benchmarks/ltx.py, and of benchmarks/clip.py as launched and as graphs.
HEADLINE = {
    "baseline": ("stock", ""),
    "compile": ("compile", ""),
    "kernels": ("kernels", "kernels_graphs"),
    "kernels_fp8": ("kernels_fp8", "kernels_fp8_graphs"),
}
HEADLINE_CLIP = {"model": "ltx", "recipe": "distilled", "frames": 49}
PROFILED = ("baseline", "kernels")  # configurations of a step whose kernels docs/profiling.md shows
PROFILED_FRAMES, PROFILED_KERNELS = 49, 10


def by_frames() -> dict[int, dict[str, Record]]:
    """For each number of frames, its records by configuration."""
    frames = sorted({record["frames"] for record in records_of("h200-ltx")})
    return {count: by_config(records_of("h200-ltx", frames=count)) for count in frames}


@block("docs/measured/clips.md", "step")
def step() -> str:
    """A denoising step, whole."""
    meta = load("h200-ltx")["meta"]

    def marked(record: Record, figure: str) -> str:
        if record["ms_by_kind"]["idle"] > record["step_ms"] / 4:  # the host's time, not the device's
            return f"({figure})"
        return f"**{figure}**" if record["config"].startswith("kernels") else figure

    def ms(record: Record) -> str:
        return marked(record, f"{record['step_ms']:.1f}")

    def speed_up(record: Record) -> str:
        return marked(record, f"{record['gain']['baseline']:.2f}")

    def launches(record: Record) -> int:
        return sum(kernel["launches"] for kernel in record["kernels"])

    head = "| frames | | ms | x diffusers | x torch.compile | ms as a CUDA graph | launches | first step | error |"
    row = (
        "| {frames} | {config} | {ms} | {speed_up} | {gain.compile:.2f} | {graph_ms:.1f} | {launches:,} | "
        "{first_step} | {error_vs_fp32:.2e} |"
    )
    cold = ""
    if "cold" in meta:  # another run had filled the caches
        cold = f"The compilers' caches were warm here. With cold caches the first step took {meta['cold']}. "
    note = f"{meta['note']} " if "note" in meta else ""
    return text(
        "A denoising step of LTX-Video 2B (batch 2, 512x768, bf16, prompts of "
        f"{' and '.join(map(str, meta['prompts']))} tokens) on one {meta['device']}, torch {meta['torch']}, commit "
        f"{meta['commit'][:7]}; the error is the distance of one forward from the model in fp32, with random weights:",
        table(
            head,
            row,
            in_order(by_frames()),
            config=config_of,
            ms=ms,
            speed_up=speed_up,
            launches=launches,
            first_step=first_step,
        ),
        '<img src="../benchmarks/results/h200-ltx.png" width="100%" alt="Where the time of a step goes">',
        f"{cold}{note}Launches are the kernels and the clearing of memory in one step. "
        "A CUDA graph does not wait for the host, whose speed differs from machine to machine.",
    )


@block("skills/cuda-kernels/SKILL.md", "figures")
def figures() -> str:
    """The first screen's table: a step of LTX-Video 2B and a whole clip, of four configurations."""
    steps = by_frames()
    clip = {record["config"]: record for record in records_of("h200-clip", **HEADLINE_CLIP)}

    rows = []
    for config, names in HEADLINE.items():
        records, stock_ms = [of_config[config] for of_config in steps.values()], clip["stock"]["clip_ms"]
        cells = [f"{r['step_ms']:.1f} ms ({r['gain']['baseline']:.2f} x)" for r in records]
        ms = [clip[name]["clip_ms"] if name in clip else None for name in names]
        cells += [f"{clip_ms:.0f} ms ({stock_ms / clip_ms:.2f} x)" if clip_ms else "" for clip_ms in ms]
        rows.append([CONFIGS[config], *cells, f"{max(record['error_vs_fp32'] for record in records):.2e}"])
    frames = across("guided step, @ frames", map(str, steps))
    clip_frames = f"distilled clip, {HEADLINE_CLIP['frames']} frames"
    launched, graphs = zip(*HEADLINE.values())
    return text(
        f"LTX-Video 2B (512x768, bf16) on one {load('h200-ltx')['meta']['device']}: a denoising step with guidance "
        f"(batch 2), and a whole clip of {clip['stock']['steps']} steps without guidance, from the prompt to the "
        "decoded video. The error is the relative distance from the model in float32, with random weights:",
        grid(f"| | {frames} | {clip_frames} | the clip, `graphs=True` | error of a step |", rows),
        "In the clip the text encoder and the video's decoder are compiled or optimized too, in bf16. The GPU waits "
        "for the host during "
        f"{_idle(clip[name] for name in launched)} of a clip, and during "
        f"{_idle(clip[name] for name in graphs if name)} with `graphs=True`. How long it waits depends on the host.",
    )


def _idle(records: Iterable[Record]) -> str:
    """The share of clips in which the GPU waits for the host: from the least to the most."""
    shares = sorted(round(record["idle_ms"] / record["clip_ms"] * 100) for record in records)
    return f"{shares[0]} to {shares[-1]} %"


@block("docs/measured/clips.md", "kinds")
def kinds() -> str:
    """Where the time of a step goes on the device."""
    cells, kinds = "| {frames} | {config} |", (*KINDS, "idle")
    return text(
        "Milliseconds of a step, by kind of kernel:",
        table_of_kinds("| frames | |", cells, in_order(by_frames()), kinds, config=config_of),
    )


@block("docs/profiling.md", "profile")
def profile() -> str:
    """The kernels that take most of a step, before and after `optimize`."""

    def name(kernel: Record) -> str:
        name = kernel["kernel"].replace("|", "/").removeprefix("void ")
        return f"`{name}`" if len(name) <= 90 else f"`{name[:89]}…`"

    parts = []
    for config in PROFILED:
        record = by_frames()[PROFILED_FRAMES][config]
        kinds_ms = ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in record["ms_by_kind"].items())
        parts.append(f"{CONFIGS[config]}: {record['step_ms']:.1f} ms, of these {kinds_ms}")
        kernels = record["kernels"][:PROFILED_KERNELS]
        cells = "| {ms:.2f} | {launches} | {kind} | {name} |"
        parts.append(table("| ms | launches | kind | kernel |", cells, kernels, name=name))
    return text(
        f"The {PROFILED_KERNELS} kernels that take most of a step of LTX-Video 2B at {PROFILED_FRAMES} frames "
        f"({link('h200-ltx')}, `python benchmarks/ltx.py`):",
        *parts,
    )
