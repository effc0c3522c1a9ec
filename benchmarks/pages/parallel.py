"""Steps on several GPUs and the exchanges between them: h200x2-parallel.json."""

from pages.names import CLIP_CONFIGS, MODELS
from pages.writing import Record, across, block, grid, link, load, records_of, table, text

FILE = "h200x2-parallel"
PARALLEL = {"ltx": "LTX-Video 2B", **{name: model.title for name, model in MODELS.items()}}
# The gain over one GPU that a configuration should reach on two.
AIMS = {
    ("ltx", "kernels", "ulysses"): 1.78,
    ("ltx13b", "kernels", "ulysses"): 1.85,
    ("wan", "kernels", "ulysses"): 1.85,
}
MODES = {"ulysses": "Ulysses", "ring": "ring", "guidance": "guidance split"}


# The first cells of a row.
WAY_HEAD = "| model | configuration | mode |"
WAY = "| {way.model}, {shape} | {way.config} | {way.mode} |"


def _way(record: Record) -> dict[str, str]:
    names = {"model": PARALLEL, "config": CLIP_CONFIGS, "mode": MODES}
    return {key: titles[record[key]] for key, titles in names.items()}


def _configured(record: Record) -> str:
    return f"{PARALLEL[record['model']]} with {CLIP_CONFIGS[record['config']]}"


def like(records: list[Record], record: Record, *keys: str) -> list[Record]:
    """The records of the same model, shape and configuration, and of the same values of these keys."""
    same = ("model", "shape", "config", *keys)
    return [r for r in records if all(r.get(key) == record.get(key) for key in same)]


def alone_ms(records: list[Record], record: Record) -> float:
    """The step of one GPU."""
    (alone,) = [r["step_ms"] for r in like(records, record) if r["gpus"] == 1]
    return alone


def split_of(records: list[Record], record: Record) -> dict[str, float | None]:
    """The parts of a step on two GPUs, in ms: half of what it takes `alone` on one GPU, the exchanges, and the rest.

    The records that model more GPUs take the same exchanges and the same rest; benchmarks/parallel.py has the formula.
    """
    alone = alone_ms(records, record)
    modelled = [r for r in like(records, record, "mode") if "modelled_ms" in r]
    if not modelled:
        return {"alone": alone, "exchanges": None, "rest": None}
    rest = modelled[0]["modelled_ms"] - alone / modelled[0]["gpus"] - modelled[0]["exchange_ms"]
    return {"alone": alone, "exchanges": record["step_ms"] - alone / 2 - rest, "rest": rest}


def _missed_aim(row: Record) -> str:
    """Where the time of a step is that misses its aim; empty where it reaches the aim or has none."""
    aim, alone, exchanges = AIMS.get((row["model"], row["config"], row["mode"])), row["alone"], row["exchanges"]
    gain = alone / row["step_ms"]
    if not aim or gain >= aim or exchanges is None:
        return ""
    return (
        f"Short of its aim: {_configured(row)} under {MODES[row['mode']]} is {gain:.2f} times as fast as on one GPU, "
        f"and the aim is {aim}, a step of {alone / aim:.1f} ms. Half of one GPU's step is {alone / 2:.1f} ms, the "
        f"exchanges take {exchanges:.1f} ms, and the rest is {row['rest']:.1f} ms. Without the rest the step would be "
        f"{alone / (alone / 2 + exchanges):.2f} times as fast."
    )


@block("docs/measured/parallel.md", "two GPUs")
def two_gpus() -> str:
    """Steps on two GPUs beside one, and what the exchanges take of them."""
    result = load(FILE)
    meta, records = result["meta"], result["records"]
    timed = [r for r in records if "step_ms" in r and r["gpus"] == 2]
    stock = {(r["model"], r["mode"]): r["step_ms"] for r in timed if r["config"] == "stock"}
    head = f"{WAY_HEAD} one GPU | two GPUs | x one GPU | x stock on two | exchanges | rest | error |"
    row = (
        f"{WAY} {{alone:.1f}} | {{step_ms:.1f}} | {{alone/step_ms:.2f}} | {{stock/step_ms:.2f}} | {{exchanges:.1f}} | "
        "{rest:.1f} | {error:.1e} |"
    )
    rows = [
        {
            **record,
            **split_of(records, record),
            "stock": stock.get((record["model"], record["mode"])),
            "error": record["error_vs_one_gpu"] or 0,
        }
        for record in timed
    ]
    collectives = [
        _configured(r) for r in timed if any(one["exchange"] == "all_to_all_single" for one in r["exchanges_by_size"])
    ]
    return text(
        f"One forward on {meta['device']} in one host, torch {meta['torch']}, NCCL {meta['nccl']}, diffusers "
        f"{meta['diffusers']}, {meta['dtype']}, random weights, in ms (`python benchmarks/parallel.py`, "
        f"{link(FILE)}). LTX-Video has a batch of two, the halves of guidance. Exchanges: what the exchanges of a step "
        "take as bare exchanges of the same bytes. Rest: what the step takes beyond that and half of one GPU's step. "
        "Error: relative distance from the result of one GPU.",
        table(head, row, rows, way=_way),
        *(_missed_aim(row) for row in rows),
        f"Measured with collectives under Ulysses: {', '.join(collectives)}." if collectives else "",
        "\n".join(f"Failed: {what}: `{reason}`" for what, reason in meta["failed"].items()),
    )


@block("docs/measured/parallel.md", "more GPUs")
def more_gpus() -> str:
    """Steps on four and eight GPUs, by a model of them."""
    records = records_of(FILE)
    head = f"{WAY_HEAD} GPUs | modelled ms | modelled x one GPU | exchanges of these, ms |"
    row = f"{WAY} {{gpus}} | {{modelled_ms:.1f}} | {{alone/modelled_ms:.2f}} | {{exchange_ms:.1f}} |"
    modelled = [{**record, "alone": alone_ms(records, record)} for record in records if "modelled_ms" in record]
    return text(table(head, row, modelled, way=_way))


@block("docs/measured/parallel.md", "exchanges")
def exchanges() -> str:
    """Bare exchanges between two GPUs."""
    of_bytes: dict[int, dict[str, float]] = {}
    for record in records_of(FILE):
        if "exchange" in record:
            of_bytes.setdefault(record["bytes"], {})[record["exchange"]] = record["us"]
    names = list(dict.fromkeys(name for us in of_bytes.values() for name in us))
    rows = [
        [f"{size / 1e6:.0f}", *(f"{us[name]:.0f} | {size / us[name] / 1e3:.0f}" for name in names)]
        for size, us in of_bytes.items()
    ]
    return text(grid(f"| MB that leave a GPU | {across('`@`, µs | GB/s', names)} |", rows))
