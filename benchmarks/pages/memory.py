"""The peak memory of a step, with and without offload: h200-memory.json."""

from pages.names import MODELS, config_of, model_of
from pages.writing import block, link, load, records_of, table, text

MODES = {"none": "none", "model": "the model", "blocks": "groups of one block", "leaves": "groups of leaves"}


@block("docs/fp8.md", "memory")
def memory() -> str:
    """The peak memory of a step by offload mode, and the cards that it fits on."""
    result = load("h200-memory")
    head = "| model | | offload | moved, GiB | stock weights on the host, GiB | peak, GiB | ms | cards of |"
    row = "| {model} | {config} | {mode} | {moved_gb:.1f} | {host_gb:.1f} | {peak_gb:.2f} | {step_ms:.0f} | {cards} |"
    return text(
        f"One step on one {result['meta']['device']}, bf16, random weights ({link('h200-memory')}, "
        "`python benchmarks/memory.py`). A card needs "
        f"{result['meta']['reserve_gb']} GiB beside the peak. Groups are moved on a stream of their own:",
        table(
            head,
            row,
            [record for model in MODELS for record in records_of("h200-memory", model=model)],
            model=model_of,
            config=config_of,
            mode=lambda record: MODES[record["offload"]],
            cards=lambda record: f"{', '.join(map(str, record['fits']))} GB" if record["fits"] else "none of them",
        ),
    )
