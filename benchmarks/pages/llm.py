"""Prompts and tokens of language models: h200-llm.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pages.names import LANGUAGE_MODELS
from pages.writing import Cell, Record, block, kinds_of_kernels, link, load, number, optional, table, text


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


GATED = [model for model in LANGUAGE_MODELS if model != "falcon-7b"]  # models with a gated MLP, which Liger knows
STOCK_GAINS = {"llama-8b": 1.23, "mistral-7b": 1.23, "qwen3-8b": 1.31, "gemma3-12b": 1.36, "falcon-7b": 1.0}
AIMS = [
    Aim("prompt", "kernels", "eager", "prefill_ms", STOCK_GAINS, 8192),
    Aim("prompt", "kernels", "liger", "prefill_ms", dict.fromkeys(GATED, 1.02), 8192),
    Aim("token", "kernels", "eager", "decode_ms", dict.fromkeys(GATED, 1.25)),
    Aim("prompt in fp8", "kernels_fp8", "eager", "prefill_ms", dict.fromkeys(LANGUAGE_MODELS, 1.5), 8192),
]


def _label(config: str) -> str:
    return {"eager": "stock", "liger": "Liger"}.get(config, config.replace("_", " + ").replace("+ fp8", "fp8"))


@block("docs/layers.md", "language models")
def language_models() -> str:
    """Prompts and tokens by configuration, and the kinds of kernels of a prompt."""
    result = load("h200-llm")
    meta, records = result["meta"], result["records"]
    depth: dict[str, int] = {}  # the layers of the whole model; the keys are in the table's order
    for r in records:
        depth[r["model"]] = max(r["layers"], depth.get(r["model"], 0))
    order = list(depth)

    def is_whole(record: Record) -> bool:
        return record["layers"] == depth[record["model"]]

    def run(record: Record, config: str) -> tuple[Any, ...]:
        return (*(record[key] for key in ("model", "layers", "tokens", "batch")), config)

    by_run = {run(r, r["config"]): r for r in records}

    def gain(record: Record, other: str, key: str) -> str:
        beside = by_run.get(run(record, other))
        return f"{beside[key] / record[key]:.2f}" if beside else ""

    def over(other: str, key: str) -> Cell:
        return lambda record: gain(record, other, key)

    tokens = ("tokens", lambda r: f"{r['batch']} x {r['tokens']}")
    configuration = ("configuration", lambda r: _label(r["config"]))
    columns = [
        ("model", lambda r: r["model"] if is_whole(r) else f"{r['model']}, {r['layers']} layers"),
        tokens,
        configuration,
        ("prompt, ms", number("prefill_ms", ".2f")),
        ("x stock", over("eager", "prefill_ms")),
        ("x Liger", over("liger", "prefill_ms")),
        ("token, ms", number("decode_ms", ".2f")),
        ("x stock", over("eager", "decode_ms")),
        ("x Liger", over("liger", "decode_ms")),
        ("error", optional("error_vs_fp32", ".1e")),
    ]
    rows = sorted(records, key=lambda r: (not is_whole(r), order.index(r["model"]), -r["tokens"], r["batch"]))
    missed = [
        f"{r['model']}, {r['tokens']} tokens, {aim.what}: {got} x {_label(aim.other)}, aim {aim.gains[r['model']]}"
        for r in filter(is_whole, rows)
        for aim in AIMS
        if aim.is_for(r) and (got := gain(r, aim.other, aim.key)) and float(got) < aim.gains[r["model"]]
    ]
    kinds = kinds_of_kernels("GEMM", "attention", "this package", "elementwise")
    profiled = [r for r in rows if "ms_by_kind" in r]
    by_kind = (
        "Milliseconds of one prompt by kind of kernel (`--profile`):",
        table([("model", number("model", "")), tokens, configuration, *kinds], profiled),
    )
    return text(
        "Whole models with random weights, at their released depth unless the row says else, on one "
        f"{meta['device'].split()[-1]}, {meta['dtype']}, transformers {meta['transformers']}, Liger {meta['liger']} "
        f"(`python benchmarks/llm.py`, {link('h200-llm')}):",
        table(columns, rows),
        f"Behind the aims: {'; '.join(missed)}." if missed else "",
        *(by_kind if profiled else ()),
    )
