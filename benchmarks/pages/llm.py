"""Prompts and tokens of language models: h200-llm.json."""

from dataclasses import dataclass
from typing import Any

from pages.names import LANGUAGE_MODELS
from pages.writing import Record, block, link, load, table, table_of_kinds, text, titled


@dataclass(frozen=True)
class Aim:
    """How many times as fast as another configuration a model should be, in a prompt or in a decoded token."""

    what: str
    config: str
    other: str
    key: str
    gains: dict[str, float]
    tokens: int | None = None  # the prompts that it is for; None: all

    def is_for(self, record: Record) -> bool:
        fits = record["config"] == self.config and record["model"] in self.gains
        return fits and self.tokens in (None, record["tokens"])


GATED = [model for model in LANGUAGE_MODELS if model != "falcon-7b"]  # the models with a gated MLP
STOCK_GAINS = {"llama-8b": 1.23, "mistral-7b": 1.23, "qwen3-8b": 1.31, "gemma3-12b": 1.36, "falcon-7b": 1.0}
AIMS = [
    Aim("prompt", "kernels", "eager", "prefill_ms", STOCK_GAINS, 8192),
    Aim("prompt", "kernels", "liger", "prefill_ms", dict.fromkeys(GATED, 1.02), 8192),
    Aim("token", "kernels", "eager", "decode_ms", dict.fromkeys(GATED, 1.25)),
    Aim("prompt in fp8", "kernels_fp8", "eager", "prefill_ms", dict.fromkeys(LANGUAGE_MODELS, 1.5), 8192),
]


# The configurations of benchmarks/llm.py, in the order of the table.
CONFIGS = {
    "eager": "stock",
    "compile": "compile",
    "liger": "Liger",
    "kernels": "kernels",
    "kernels_compile": "kernels + compile",
    "kernels_fp8": "kernels fp8",
}


def layers_of_whole_models(records: list[Record]) -> dict[str, int]:
    """How many layers each model has where it was timed whole."""
    layers: dict[str, int] = {}
    for record in records:
        layers[record["model"]] = max(record["layers"], layers.get(record["model"], 0))
    return layers


@block("docs/measured/language-models.md", "language models")
def language_models() -> str:
    """Prompts and tokens by configuration, and the kinds of kernels of a prompt."""
    result = load("h200-llm")
    meta, records = result["meta"], result["records"]
    whole = layers_of_whole_models(records)
    models = list(LANGUAGE_MODELS)

    def is_whole(record: Record) -> bool:
        return record["layers"] == whole[record["model"]]

    def run(record: Record, config: str) -> tuple[Any, ...]:
        return (*(record.get(key) for key in ("model", "layers", "tokens", "batch", "padding")), config)

    by_run = {run(r, r["config"]): r for r in records}

    def gain(record: Record, other: str, key: str) -> float | None:
        beside = by_run.get(run(record, other))
        return beside[key] / record[key] if beside else None

    def place(r: Record) -> tuple[Any, ...]:
        size = -r["tokens"], r["batch"], r.get("padding", 0)
        return not is_whole(r), models.index(r["model"]), *size, list(CONFIGS).index(r["config"])

    rows = sorted(records, key=place)
    for r in rows:
        r["size"] = f"{r['batch']} x {r['tokens']}{', padded' if 'padding' in r else ''}"
    missed = [
        f"{r['model']}, {r['size']} tokens, {aim.what}: {got:.2f} x {CONFIGS[aim.other]}, aim {aim.gains[r['model']]}"
        for r in filter(is_whole, rows)
        for aim in AIMS
        if aim.is_for(r) and (got := gain(r, aim.other, aim.key)) and round(got, 2) < aim.gains[r["model"]]
    ]
    head = (
        "| model | tokens | configuration | prompt, ms | x stock | x Liger | token, ms | x stock | x Liger "
        "| token of a new length, ms | x stock | error |"
    )
    row = (
        "| {name} | {size} | {label} | {prefill_ms:.2f} | {prompt.eager:.2f} | {prompt.liger:.2f} | "
        "{decode_ms:.2f} | {token.eager:.2f} | {token.liger:.2f} | {first_decode_ms:.2f} | {first.eager:.2f} | "
        "{error_vs_fp32?:.1e} |"
    )
    for r in rows:
        r["name"] = r["model"] if is_whole(r) else f"{r['model']}, {r['layers']} layers"
        r["label"] = CONFIGS[r["config"]]
        for name, key in (("prompt", "prefill_ms"), ("token", "decode_ms"), ("first", "first_decode_ms")):
            r[name] = {other: gain(r, other, key) for other in ("eager", "liger")}
    kinds = table_of_kinds(
        "| model | tokens | configuration |",
        "| {model} | {size} | {label} |",
        [r for r in rows if "ms_by_kind" in r],
    )
    return text(
        "Whole models with random weights, at their released depth unless the row says else, on one "
        f"{meta['device'].split()[-1]}, {meta['dtype']}, transformers {meta['transformers']}, Liger {meta['liger']} "
        f"(`python benchmarks/llm.py`, {link('h200-llm')}):",
        table(head, row, rows),
        f"Below the aim that this project has set itself: {'; '.join(missed)}." if missed else "",
        titled("Milliseconds of one prompt by kind of kernel (`--profile`):", kinds),
    )
