"""Steps on several GPUs and the exchanges between them: h200x2-parallel.json."""

from __future__ import annotations

from dataclasses import dataclass

from pages.names import CLIP_CONFIGS, MODELS
from pages.writing import Record, block, formed, grid, link, load, number, records_of, table, text

FILE = "h200x2-parallel"
PARALLEL = {"ltx": "LTX-Video 2B", **{name: model.title for name, model in MODELS.items()}}
# The gain over one GPU that a configuration should reach on two.
AIMS = {
    ("ltx", "kernels", "ulysses"): 1.78,
    ("ltx13b", "kernels", "ulysses"): 1.85,
    ("wan", "kernels", "ulysses"): 1.85,
}
MODES = {"ulysses": "Ulysses", "ring": "ring", "guidance": "guidance split"}

WAY = [
    ("model", lambda record: f"{PARALLEL[record['model']]}, {record['shape']}"),
    ("configuration", lambda record: CLIP_CONFIGS[record["config"]]),
    ("mode", lambda record: MODES[record["mode"]]),
]


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


@dataclass(frozen=True)
class Split:
    """A step on two GPUs, in ms: half of one GPU's step, the exchanges, and the rest.

    The records that model more GPUs take the same exchanges and the same rest; benchmarks/parallel.py has the formula.
    """

    step: float
    alone: float
    rest: float | None

    @property
    def exchanges(self) -> float | None:
        return None if self.rest is None else self.step - self.alone / 2 - self.rest

    @property
    def gain(self) -> float:
        return self.alone / self.step


def split_of(records: list[Record], record: Record) -> Split:
    """The parts of a step on two GPUs."""
    alone = alone_ms(records, record)
    modelled = [r for r in like(records, record, "mode") if "modelled_ms" in r]
    rests = [r["modelled_ms"] - alone / r["gpus"] - r["exchange_ms"] for r in modelled]
    return Split(record["step_ms"], alone, rests[0] if rests else None)


def _missed_aim(record: Record) -> str:
    """What a step that misses its aim would take to reach it; empty where it reaches the aim or has none."""
    split: Split = record["split"]
    aim = AIMS.get((record["model"], record["config"], record["mode"]))
    if not aim or split.gain >= aim or split.exchanges is None or split.rest is None:
        return ""
    return (
        f"Behind its aim: {_configured(record)} under {MODES[record['mode']]} is {split.gain:.2f} times as fast as on "
        f"one GPU, and the aim is {aim}, a step of {split.alone / aim:.1f} ms. Half of one GPU's step is "
        f"{split.alone / 2:.1f} ms, the exchanges take {split.exchanges:.1f} ms, and the rest is {split.rest:.1f} ms. "
        f"Without the rest the step would be {split.alone / (split.alone / 2 + split.exchanges):.2f} times as fast."
    )


@block("docs/parallel.md", "two GPUs")
def two_gpus() -> str:
    """Steps on two GPUs beside one, and what the exchanges take of them."""
    result = load(FILE)
    meta, records = result["meta"], result["records"]
    timed = [r for r in records if "step_ms" in r and r["gpus"] == 2]
    stock = {(r["model"], r["mode"]): r["step_ms"] for r in timed if r["config"] == "stock"}

    def over_stock(record: Record) -> str:
        beside = stock.get((record["model"], record["mode"]))
        return formed(beside and beside / record["step_ms"], ".2f")

    columns = [
        *WAY,
        ("one GPU", lambda row: f"{row['split'].alone:.1f}"),
        ("two GPUs", number("step_ms", ".1f")),
        ("x one GPU", lambda row: f"{row['split'].gain:.2f}"),
        ("x stock on two", over_stock),
        ("exchanges", lambda row: formed(row["split"].exchanges, ".1f")),
        ("rest", lambda row: formed(row["split"].rest, ".1f")),
        ("error", lambda row: f"{row['error_vs_one_gpu'] or 0:.1e}"),
    ]
    rows = [{**record, "split": split_of(records, record)} for record in timed]
    collectives = [
        _configured(r) for r in timed if any(one["exchange"] == "all_to_all_single" for one in r["exchanges_by_size"])
    ]
    return text(
        f"One forward on {meta['device']} in one host, torch {meta['torch']}, NCCL {meta['nccl']}, diffusers "
        f"{meta['diffusers']}, {meta['dtype']}, random weights, in ms (`python benchmarks/parallel.py`, "
        f"{link(FILE)}). LTX-Video has a batch of two, the halves of guidance. Exchanges: what the exchanges of a step "
        "take as bare exchanges of the same bytes. Rest: what the step takes beyond that and half of one GPU's step. "
        "Error: relative distance from the result of one GPU.",
        table(columns, rows),
        *(_missed_aim(row) for row in rows),
        f"Measured with collectives under Ulysses: {', '.join(collectives)}." if collectives else "",
        "\n".join(f"Failed: {what}: `{reason}`" for what, reason in meta["failed"].items()),
    )


@block("docs/parallel.md", "more GPUs")
def more_gpus() -> str:
    """Steps on four and eight GPUs, by a model of them."""
    records = records_of(FILE)
    columns = [
        *WAY,
        ("GPUs", number("gpus", "")),
        ("modelled ms", number("modelled_ms", ".1f")),
        ("modelled x one GPU", lambda record: f"{alone_ms(records, record) / record['modelled_ms']:.2f}"),
        ("exchanges of these, ms", number("exchange_ms", ".1f")),
    ]
    return text(table(columns, [record for record in records if "modelled_ms" in record]))


@block("docs/parallel.md", "exchanges")
def exchanges() -> str:
    """Bare exchanges between two GPUs."""
    of_bytes: dict[int, dict[str, float]] = {}
    for record in records_of(FILE):
        if "exchange" in record:
            of_bytes.setdefault(record["bytes"], {})[record["exchange"]] = record["us"]
    names = list(dict.fromkeys(name for us in of_bytes.values() for name in us))
    heads = ["MB that leave a GPU", *(head for name in names for head in (f"`{name}`, µs", "GB/s"))]
    rows = [
        [
            f"{size / 1e6:.0f}",
            *(cell for name in names for cell in (f"{us[name]:.0f}", f"{size / us[name] / 1e3:.0f}")),
        ]
        for size, us in of_bytes.items()
    ]
    return text(grid(heads, rows))
