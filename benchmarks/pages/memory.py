"""The peak memory of a step, with and without offload: h200-memory.json."""

from pages.cards import CARDS, card_of, of_other_defaults
from pages.names import MODELS, config_of, model_of
from pages.writing import block, link, load, records_of, table, text

MODES = {"none": "none", "model": "the model", "blocks": "groups of one block", "leaves": "groups of leaves"}


@block("docs/measured/fp8.md", "memory")
def memory() -> str:
    """The peak memory of a step by offload mode, and the smallest card for it."""
    result = load("h200-memory")
    records = [record for model in MODELS for record in records_of("h200-memory", model=model)]
    whole = {(r["model"], r["config"]): r for r in records if "moved_gb" in r}
    shallow = max(record.get("blocks", 0) for record in records)
    other = of_other_defaults()
    head = "| model | | offload | weights, GiB | peak, GiB | card | ms |"
    row = "| {model} | {config} | {mode} | {weights:.1f} | {peak_gb:.2f} | {cards} | {step_ms?:.0f} |"
    return text(
        f"One step on one {result['meta']['device']}, bf16, random weights ({link('h200-memory')}, "
        f"`python benchmarks/memory.py`). The card is the smallest of {CARDS}; it needs "
        f"{result['meta']['reserve_gb']} GiB beside the peak. Groups are moved on a stream of their own. In fp8 the "
        "stock weights wait in the host's memory, as is the default."
        + (f" Rows with groups and without a time ran the first {shallow} blocks of each kind." if shallow else "")
        + (
            f" The fp8 rows of {', '.join(other)} were measured with other layers in bf16: "
            "[checkpoints](checkpoints.md#what-do-i-type) has their weights now."
            if other
            else ""
        ),
        table(
            head,
            row,
            records,
            model=model_of,
            config=config_of,
            mode=lambda record: MODES[record["offload"]],
            weights=lambda record: whole[record["model"], record["config"]]["moved_gb"],
            cards=lambda record: card_of(record["peak_gb"]),
        ),
    )


@block("docs/fp8.md", "stock weights")
def stock_weights() -> str:
    """What it costs to keep the stock weights in the host's memory: seconds of `optimize` and `restore`."""
    measured = [r for model in MODELS for r in records_of("h200-memory", model=model) if "optimize_s" in r]
    if not measured:
        return text("How long `optimize` and `restore` take with each of these has not been measured.")
    head = "| model | | `optimize`, s | peak, GiB | `restore`, s | peak, GiB |"
    row = "| {model} | {config} | {optimize_s:.1f} | {optimize_peak_gb:.2f} | {restore_s:.1f} | {restore_peak_gb:.2f} |"
    return text(
        f"`optimize` and `restore` of a model that is on the GPU ({link('h200-memory')}):",
        table(head, row, measured, model=model_of, config=config_of),
    )
