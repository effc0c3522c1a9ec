"""One forward of each diffusion model: h200-models.json and h200-models-profile.json."""

from collections.abc import Mapping

from plots import geometric_mean
from records import AUTOTUNED

from pages.names import COMPILED, CONFIGS, FP8_PEAKS, by_model, config_of, first_blocks, first_step, in_order, model_of
from pages.writing import KINDS, Record, across, block, link, load, records_of, table, table_of_kinds, text

PROFILED = ("baseline", "compile", "kernels", "kernels_fp8")  # the configurations whose kernels are shown
CLOSE = 1.1  # how many times the error of bf16 counts as close to it
ERRORS = ("error_vs_fp32", "loop_error_vs_fp32")  # of one forward, and of the latents after some steps
# How many times as fast as diffusers and as torch.compile a step should be.
AIMS = {
    ("ltx13b", "kernels"): (1.35, 1.12),
    ("ltx2", "kernels"): (1.40, 1.12),
    ("sd35", "kernels"): (1.65, 1.12),
    ("flux2", "kernels"): (1.20, 1.05),
    ("zimage", "kernels"): (1.50, 1.10),
    ("flux", "kernels_fp8"): (2.05, 1.55),
}


def loop_steps() -> int:
    """How many steps the error of a loop is measured after."""
    return max(record.get("loop_steps", 0) for record in records_of("h200-models"))


def of_configs(names: Mapping[str, str]) -> list[dict[str, Record]]:
    """For each model that has records of all these configurations, those records by the configurations' names here."""
    return [
        {name: of_config[config] for name, config in names.items()}
        for of_config in by_model("h200-models").values()
        if set(names.values()) <= of_config.keys()
    ]


@block("docs/measured/models.md", "models")
def models() -> str:
    """One forward of each model, by configuration."""
    meta, records = load("h200-models")["meta"], in_order(by_model("h200-models"))

    def milliseconds(record: Record) -> str:
        ms = f"{record['step_ms']:.1f}"
        return f"**{ms}**" if record["config"].startswith("kernels") else ms

    def whole(config: str, other: str) -> dict[str, float]:
        """The gains over another configuration, of the models with all their blocks."""
        whole = [record for record in records if record["config"] == config and not record.get("shallow", False)]
        return {model_of(record): record["gain"][other] for record in whole if other in record["gain"]}

    def of_graphs(config: str, other: str) -> dict[str, float]:
        """The gains over another configuration where both run as CUDA graphs, without the host's time."""
        ms = {(model_of(record), record["config"]): record["graph_ms"] for record in records if "graph_ms" in record}
        return {
            title: ms[title, other] / ms[title, config]
            for title, known in ms
            if known == config and (title, other) in ms
        }

    def spread(gains: dict[str, float]) -> str:
        least, most = (pick(gains, key=lambda title: gains[title]) for pick in (min, max))
        mean = geometric_mean(list(gains.values()))
        return f"{gains[least]:.2f} ({least}) to {gains[most]:.2f} ({most}), geometric mean {mean:.2f}"

    summary = [
        f"- {CONFIGS[config]} beside {CONFIGS[other]}, over {len(gains)} whole models: {spread(gains)}."
        for config in ("kernels", "kernels_fp8")
        for other in ("baseline", *COMPILED)
        if (gains := whole(config, other))
    ]
    summary += [
        f"- {CONFIGS[config]} beside {CONFIGS[other]}, both as CUDA graphs, over {len(gains)} models: {spread(gains)}."
        for config in ("kernels", "kernels_fp8")
        for other in ("baseline", "compile")
        if (gains := of_graphs(config, other))
    ]
    for config in ("kernels", "kernels_fp8"):
        late = dict.fromkeys(title for mode in COMPILED for title, gain in whole(config, mode).items() if gain < 1)
        summary += [f"- {CONFIGS[config]} is slower than torch.compile: {', '.join(late)}."] if late else []
    if any(record["config"] == AUTOTUNED for record in records):
        summary.append(
            f'- {CONFIGS[AUTOTUNED]}: the mode "max-autotune-no-cudagraphs". README.md shows the faster mode.'
        )
    head = (
        "| model | shape | | ms | x diffusers | x torch.compile | ms as a CUDA graph | first step | peak GiB | error | "
        f"after {loop_steps()} steps |"
    )
    row = (
        "| {model} | {shape}{depth} | {config} | {ms} | {gain.baseline?:.2f} | {gain.compile?:.2f} | "
        "{graph_ms?:.1f} | {first_step} | {peak_gb:.1f} | {error_vs_fp32?:.2e} | {loop_error_vs_fp32?:.2e} |"
    )
    return text(
        f"One forward on one {meta['device']}, torch {meta['torch']}, diffusers {meta['diffusers']}, {meta['dtype']}, "
        f"random weights, batch as the pipelines pass it ({link('h200-models')}, `python benchmarks/models.py`). The "
        "error compares the first blocks of each kind with float32, after one forward and in the latents after "
        f"{loop_steps()} steps. `ms` is of launched steps, which wait for a slow host where they are short. There "
        '`optimize` captures CUDA graphs by itself (`graphs="auto"`). '
        f"{FP8_PEAKS}",
        table(
            head,
            row,
            records,
            model=model_of,
            depth=first_blocks,
            config=config_of,
            ms=milliseconds,
            first_step=first_step,
        ),
        "Times as fast:",
        "\n".join(summary),
    )


@block("docs/measured/models.md", "kinds")
def model_kinds() -> str:
    """Where the time of one forward of a model goes on the device."""
    records = in_order(by_model("h200-models-profile"))
    rows = [record for record in records if record["config"] in PROFILED]
    for record in rows:
        ms = record["ms_by_kind"]
        ms["all kernels"] = sum(ms.get(kind, 0.0) for kind in KINDS)
        if "clock_mhz" in record:
            record["cycles"] = ms["GEMM"] * record["clock_mhz"] / 1e3
    row = "| {model} | {config} | {clock_mhz?:.0f} | {cycles?:.0f} |"
    head = "| model | | clock, MHz | GEMM, million cycles |"
    return text(
        f"Milliseconds of one forward, by kind of kernel ({link('h200-models-profile')}, "
        "`python benchmarks/models.py --profile`). The clock is the GPU's while steps run, where it was read:",
        table_of_kinds(head, row, rows, (*KINDS, "all kernels"), model=model_of, config=config_of),
    )


@block("docs/measured/models.md", "aims")
def missed_aims() -> str:
    """The steps that are short of their aims, and what of them cannot be fused away."""
    timed, profiled = by_model("h200-models"), by_model("h200-models-profile")

    def missed(model: str, config: str, aims: tuple[float, float]) -> str:
        gains = {other: timed[model][config]["gain"][other] for other in ("baseline", "compile")}
        short = [
            f"{gain:.2f} times as fast as {CONFIGS[other]} (aim {aim:.2f})"
            for (other, gain), aim in zip(gains.items(), aims)
            if round(gain, 2) < aim
        ]
        ms = profiled[model][config]["ms_by_kind"]
        both, every = ms["GEMM"] + ms["attention"], sum(ms.get(kind, 0.0) for kind in KINDS)
        where = f"Products and attention are {both:.1f} of the {every:.1f} ms of its kernels"
        return f"- {model_of({'model': model})}, {CONFIGS[config]}: {' and '.join(short)}. {where}." if short else ""

    lines = [line for (model, config), aims in AIMS.items() if (line := missed(model, config, aims))]
    return text("Below the aims that this project has set itself:", "\n".join(lines)) if lines else ""


@block("docs/measured/fp8.md", "models")
def fp8_models() -> str:
    """Whole models in fp8 beside bf16: times, errors and memory."""
    names = {"stock": "baseline", "bf16": "kernels", "fp8": "kernels_fp8"}
    rows = of_configs(names)
    growth = {}
    for of_config in rows:
        bf16, fp8 = of_config["bf16"], of_config["fp8"]
        times = [fp8[key] / bf16[key] for key in ERRORS if key in fp8 and key in bf16]
        if times:
            growth[model_of(fp8)] = max(times)
    close = [most for most in growth.values() if most <= CLOSE]
    apart = [f"{title} ({most:.1f} times)" for title, most in growth.items() if most > CLOSE]
    summary = f"In {len(close)} of these models fp8 has at most {max(close):.2f} times the error of bf16."
    summary += f" It has more than {CLOSE} times the error in {', '.join(apart)}." if apart else ""
    forward, loop = (across(f"{{@.{error}?:.2e}}", names) for error in ERRORS)
    row = (
        "| {model} | {bf16.step_ms:.1f} | {fp8.step_ms:.1f} | {bf16.step_ms/fp8.step_ms:.2f} | "
        f"{forward} | {loop} | {{bf16.peak_gb:.1f}} | {{fp8.peak_gb:.1f}} |"
    )
    head = (
        f"| model | bf16, ms | fp8, ms | ratio | error: {across('@', names)} | after {loop_steps()} steps: "
        f"{across('@', names)} | GiB: bf16 | fp8 |"
    )
    return text(
        f"One forward, from {link('h200-models')}, beside the same model in bf16 with this package. The error is the "
        "distance of the first blocks of each kind from the model in float32. The memory of fp8 is that with "
        '`stock_weights="beside"`:',
        table(head, row, rows, model=lambda row: model_of(row["fp8"]) + first_blocks(row["fp8"])),
        summary,
    )


@block("docs/measured/fp8.md", "torchao")
def beside_torchao() -> str:
    """Whole models in fp8 beside torchao's recipe: times and errors."""
    names = {"fp8": "kernels_fp8", "torchao": "torchao_fp8_compile"}
    rows = of_configs(names)
    forward, loop = (across(f"{{@.{error}?:.2e}}", names) for error in ERRORS)
    row = (
        "| {model} | {fp8.step_ms:.1f} | {torchao.step_ms:.1f} | {torchao.step_ms/fp8.step_ms:.2f} | "
        f"{forward} | {loop} |"
    )
    shown = CONFIGS["kernels_fp8"], "torchao"
    head = (
        f"| model | ms: {across('@', shown)} | times as fast | error: {across('@', shown)} | "
        f"after {loop_steps()} steps: {across('@', shown)} |"
    )
    return text(
        f"One forward in fp8, of one run for each model ({link('h200-models')}):",
        table(head, row, rows, model=lambda row: model_of(row["fp8"]) + first_blocks(row["fp8"])),
    )
