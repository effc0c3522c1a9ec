"""Training: steps of adapters of diffusion and language models on an H200, and the gradients of the ops one by one."""

from collections.abc import Sequence
from typing import Any

from plots import RESULTS

from pages.names import CONFIGS, LANGUAGE_MODELS
from pages.parallel import PARALLEL
from pages.writing import KINDS, Record, block, link, load, records_of, table, table_of_kinds, text, titled

# The configurations of benchmarks/train_llm.py.
LANGUAGE_CONFIGS = {
    "baseline": "transformers",
    "compile": "torch.compile",
    "liger": "Liger",
    "kernels": "`ltx.optimize(model)`",
    "kernels_liger_loss": "`ltx.optimize(model)` and Liger's loss",
}


@block("docs/measured/training.md", "steps")
def steps() -> str:
    """Steps by model, size and configuration, and what some of them consist of."""
    models = list(PARALLEL)

    def place(record: Record) -> tuple[Any, ...]:
        frames = int(record["size"].split("x")[0])
        return models.index(record["model"]), not record["rank"], frames, record["checkpointing"]

    records = sorted(records_of("h200-train"), key=place)

    def form(record: Record) -> tuple[Any, ...]:
        """What is timed, and in which run: a ratio of two runs would be one of their hosts."""
        return tuple(map(record.get, ("model", "size", "rank", "checkpointing", "timesteps", "commit", "date")))

    stock = {form(record): record["step_ms"] for record in records if record["config"] == "baseline"}
    rows = [{**record, "title": CONFIGS[record["config"]], "stock": stock.get(form(record))} for record in records]
    head = (
        "| model | size | rank | timestep per | checkpoints | configuration | step, ms | x stock | forward | backward "
        "| as a graph | peak GiB | error of gradients |"
    )
    row = (
        "| {name} | {size} | {adapters} | {timesteps} | {checkpoints} | {title} | {step_ms:.1f} | {stock/step_ms?:.2f} "
        "| {forward_ms:.1f} | {backward_ms:.1f} | {graph_ms?:.1f} | {peak_gb:.2f} | {grad_error_vs_fp32?:.2e} |"
    )
    cells = {
        "name": lambda record: PARALLEL[record["model"]],
        "adapters": lambda record: record["rank"] or "all weights",
        "checkpoints": lambda record: "yes" if record["checkpointing"] else "no",
    }
    profiled = [row for row in rows if "ms_by_kind" in row]
    shown = [kind for kind in (*KINDS, "idle") if any(kind in row["ms_by_kind"] for row in profiled)]
    kinds = table_of_kinds(
        "| model | size | rank | checkpoints | configuration | launches |",
        "| {name} | {size} | {adapters} | {checkpoints} | {title} | {launches} |",
        profiled,
        shown,
        **cells,
    )
    waits = " While the GPU is idle, it waits for the host." if "idle" in shown else ""
    told = f"Milliseconds of a step by kind of kernel.{waits}"
    return text(table(head, row, rows, **cells), titled(told, kinds))


@block("docs/measured/training.md", "language-models")
def language_models() -> str:
    """Steps of adapters of language models; nothing until they have been measured."""
    file = "h200-train-llm"
    if not (RESULTS / f"{file}.json").exists():
        return ""
    result = load(file)
    meta, records = result["meta"], result["records"]

    def run(record: Record, config: str) -> tuple[Any, ...]:
        return (*map(record.get, ("model", "tokens", "rank", "checkpointing", "commit", "date")), config)

    step_ms = {run(record, record["config"]): record["step_ms"] for record in records}
    rows = [
        {**record, **{other: step_ms.get(run(record, other)) for other in ("baseline", "liger")}} for record in records
    ]
    head = (
        "| model | tokens | rank | checkpoints | configuration | step, ms | x stock | x Liger | forward | backward "
        "| peak GiB | error of gradients |"
    )
    row = (
        "| {name} | {tokens} | {rank} | {checkpoints} | {title} | {step_ms:.1f} | {baseline/step_ms?:.2f} "
        "| {liger/step_ms?:.2f} | {forward_ms:.1f} | {backward_ms:.1f} | {peak_gb:.2f} | {grad_error_vs_fp32?:.2e} |"
    )
    cells = {
        "name": lambda record: LANGUAGE_MODELS[record["model"]].title,
        "checkpoints": lambda record: "yes" if record["checkpointing"] else "no",
        "title": lambda record: LANGUAGE_CONFIGS[record["config"]],
    }
    kinds = table_of_kinds(
        "| model | tokens | checkpoints | configuration | launches |",
        "| {name} | {tokens} | {checkpoints} | {title} | {launches} |",
        [row for row in rows if "ms_by_kind" in row],
        (*KINDS, "idle"),
        **cells,
    )
    return text(
        f"A step of LoRA adapters of language models, on {', '.join(meta['targets'])}, under `torch.autocast` in "
        f"bfloat16, on one {meta['device'].split()[-1]}, with random weights, transformers {meta['transformers']} and "
        f"Liger {meta['liger']} (`python benchmarks/train_llm.py`, {link(file)}). Liger replaces norms, MLP, rotary "
        "embedding and the loss, which it computes without the logits of all tokens.",
        table(head, row, rows, **cells),
        titled("Milliseconds of a step by kind of kernel.", kinds),
    )


def _largest(records: Sequence[Record]) -> str:
    """The gradients of each op at its largest measured shape."""
    largest = {record["op"]: record for record in sorted(records, key=lambda r: r["bytes"])}
    head = "| op | shape | µs | x copy | torch.compile | torch's own op | Liger | plain torch |"
    row = (
        "| {op} | {size} | {us.ours:.0f} | {us.ours/us.copy:.2f} | {us.compile?:.0f} | {us.native?:.0f} "
        "| {us.liger?:.0f} | {us.eager:.0f} |"
    )
    rows = [largest[op] for op in dict.fromkeys(record["op"] for record in records)]
    return text(table(head, row, rows, size=lambda record: "x".join(map(str, record["shape"]))))


@block("docs/measured/training.md", "backward")
def backward() -> str:
    """The gradients of inputs."""
    return _largest([record for record in records_of("h200-backward") if "sums over rows" not in record["op"]])


@block("docs/measured/training.md", "sums")
def sums() -> str:
    """The gradients of what rows share."""
    return _largest([record for record in records_of("h200-backward") if "sums over rows" in record["op"]])
