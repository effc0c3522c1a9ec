"""One forward of each diffusion model: h200-models.json and h200-models-profile.json."""

from __future__ import annotations

from plots import geometric_mean

from pages.names import CONFIGS, MODELS, by_config, config_of, first_blocks, model_of
from pages.writing import (
    Cell,
    Record,
    block,
    formed,
    kinds_of_kernels,
    link,
    load,
    number,
    optional,
    ratio,
    records_of,
    table,
    text,
)

CLOSE = 1.1  # how many times the error of bf16 counts as close to it
ERRORS = ("error_vs_fp32", "loop_error_vs_fp32")  # of one forward, and of the latents after some steps


def by_model(file: str) -> dict[str, dict[str, Record]]:
    """The records of each model by configuration."""
    return {model: by_config(records_of(file, model=model)) for model in MODELS}


def loop_steps() -> int:
    """How many steps the error of a loop is measured after."""
    return max(record.get("loop_steps", 0) for record in records_of("h200-models"))


@block("docs/models.md", "models")
def models() -> str:
    """One forward of each model, by configuration."""
    meta, of_model = load("h200-models")["meta"], by_model("h200-models")
    records = [record for of_config in of_model.values() for record in of_config.values()]

    def gain(record: Record, other: str) -> float | None:
        """How many times as fast as another configuration of the same model."""
        beside = of_model[record["model"]].get(other)
        return beside["step_ms"] / record["step_ms"] if beside else None

    def over(other: str) -> Cell:
        return lambda record: formed(gain(record, other), ".2f")

    def milliseconds(record: Record) -> str:
        ms = f"{record['step_ms']:.1f}"
        return f"**{ms}**" if record["config"].startswith("kernels") else ms

    columns = [
        ("model", model_of),
        ("shape", lambda record: record["shape"] + first_blocks(record)),
        ("", config_of),
        ("ms", milliseconds),
        ("x diffusers", over("baseline")),
        ("x torch.compile", over("compile")),
        ("first step", number("first_step_s", ".1f", " s")),
        ("peak GiB", number("peak_gb", ".1f")),
        ("error", optional(ERRORS[0], ".2e")),
        (f"after {loop_steps()} steps", optional(ERRORS[1], ".2e")),
    ]

    def whole(config: str, other: str) -> dict[str, float]:
        """The gains over another configuration, of the models with all their blocks."""
        found = {model_of(r): gain(r, other) for r in records if r["config"] == config and not r.get("shallow", False)}
        return {title: value for title, value in found.items() if value is not None}

    def spread(gains: dict[str, float]) -> str:
        least, most = (pick(gains, key=lambda title: gains[title]) for pick in (min, max))
        mean = geometric_mean(list(gains.values()))
        return f"{gains[least]:.2f} ({least}) to {gains[most]:.2f} ({most}), geometric mean {mean:.2f}"

    summary = [
        f"- {CONFIGS[config]} beside {CONFIGS[other]}, over {len(gains)} whole models: {spread(gains)}."
        for config in ("kernels", "kernels_fp8")
        for other in ("baseline", "compile")
        if (gains := whole(config, other))
    ]
    late = [title for title, value in whole("kernels", "compile").items() if value < 1]
    summary += [f"- Behind torch.compile: {', '.join(late)}."] if late else []
    notes: dict[str, dict[str, None]] = {}
    for record in records:
        if "note" in record:
            notes.setdefault(record["note"], {})[model_of(record)] = None
    return text(
        f"One forward on one {meta['device']}, torch {meta['torch']}, diffusers {meta['diffusers']}, {meta['dtype']}, "
        f"random weights, batch as the pipelines pass it ({link('h200-models')}, `python benchmarks/models.py`). The "
        "error compares the first blocks of each kind with float32, after one forward and in the latents after "
        f"{loop_steps()} steps.",
        table(columns, records),
        "Times as fast:",
        "\n".join(summary),
        "\n".join(f"{', '.join(titles)}: {note}" for note, titles in notes.items()),
    )


@block("docs/models.md", "kinds")
def model_kinds() -> str:
    """Where the time of one forward of a model goes on the device."""
    kinds = kinds_of_kernels("GEMM", "attention", "this package", "elementwise")

    def every_kind(record: Record) -> str:
        return f"{sum(record['ms_by_kind'].get(kind, 0.0) for kind, _ in kinds):.1f}"

    return text(
        f"Milliseconds of one forward, by kind of kernel ({link('h200-models-profile')}, "
        "`python benchmarks/models.py --profile`):",
        table(
            [("model", model_of), ("", config_of), *kinds, ("all kernels", every_kind)],
            [record for of_config in by_model("h200-models-profile").values() for record in of_config.values()],
        ),
    )


@block("docs/fp8.md", "models")
def fp8_models() -> str:
    """Whole models in fp8 beside bf16: times, errors and memory."""
    names = {"stock": "baseline", "bf16": "kernels", "fp8": "kernels_fp8"}
    rows = [
        {name: of_config[config] for name, config in names.items()}
        for of_config in by_model("h200-models").values()
        if set(names.values()) <= of_config.keys()
    ]
    columns = [
        ("model", lambda row: model_of(row["fp8"]) + first_blocks(row["fp8"])),
        ("bf16, ms", number("bf16.step_ms", ".1f")),
        ("fp8, ms", number("fp8.step_ms", ".1f")),
        ("ratio", ratio("bf16.step_ms", "fp8.step_ms")),
        ("error: stock", optional(f"stock.{ERRORS[0]}", ".2e")),
        ("bf16", optional(f"bf16.{ERRORS[0]}", ".2e")),
        ("fp8", optional(f"fp8.{ERRORS[0]}", ".2e")),
        (f"after {loop_steps()} steps: stock", optional(f"stock.{ERRORS[1]}", ".2e")),
        ("bf16", optional(f"bf16.{ERRORS[1]}", ".2e")),
        ("fp8", optional(f"fp8.{ERRORS[1]}", ".2e")),
        ("GiB: bf16", number("bf16.peak_gb", ".1f")),
        ("fp8", number("fp8.peak_gb", ".1f")),
    ]
    growth = {
        model_of(row["fp8"]): max(
            row["fp8"][key] / row["bf16"][key] for key in ERRORS if key in row["fp8"] and key in row["bf16"]
        )
        for row in rows
    }
    close = [times for times in growth.values() if times <= CLOSE]
    apart = [f"{title} ({times:.1f} times)" for title, times in growth.items() if times > CLOSE]
    summary = f"In {len(close)} of these models fp8 has at most {max(close):.2f} times the error of bf16."
    summary += f" It has more than {CLOSE} times the error in {' and '.join(apart)}." if apart else ""
    return text(
        f"One forward, from {link('h200-models')}, beside the same model in bf16 with this package. The error is the "
        "distance of the first blocks of each kind from the model in float32:",
        table(columns, rows),
        summary,
    )
