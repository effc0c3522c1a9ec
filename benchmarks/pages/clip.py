"""Whole clips: h200-clip.json."""

from __future__ import annotations

from collections.abc import Sequence

from pages.names import CLIP_CONFIGS
from pages.writing import Record, block, formed, link, load, number, optional, table, text

CLIP_MODELS = {"ltx": "LTX-Video 2B", "ltx2": "LTX-2, with sound"}


def _clip(record: Record) -> str:
    size = f"{record['frames']} frames of {record['height']}x{record['width']}"
    return f"{CLIP_MODELS[record['model']]}, {record['recipe']}, {size}"


@block("docs/optimize.md", "clips")
@block("docs/case-study.md", "clips", models=["ltx"])
def clips(models: Sequence[str] = tuple(CLIP_MODELS)) -> str:
    """Whole clips of some models, by part."""
    result = load("h200-clip")
    meta, records = result["meta"], [record for record in result["records"] if record["model"] in models]
    stock = {_clip(record): record["clip_ms"] for record in records if record["config"] == "stock"}

    def gain(record: Record) -> str:
        clip = _clip(record)
        return formed(stock[clip] / record["clip_ms"] if clip in stock else None, ".2f")

    columns = [
        ("clip", _clip),
        ("", lambda record: CLIP_CONFIGS[record["config"]]),
        ("ms", number("clip_ms", ".0f")),
        ("x diffusers", gain),
        ("waiting for the host", optional("idle_ms", ".0f")),
        ("prompt", number("text_ms", ".1f")),
        ("a step", number("step_ms", ".1f")),
        ("decoding", number("decode_ms", ".1f")),
        ("peak GiB", number("peak_gb", ".1f")),
        ("first clip", number("first_s", ".1f", " s")),
    ]
    note = f"\n{meta['note']}" if "note" in meta else ""
    return text(
        f"Whole calls of the pipelines with prompt, steps and decoding, on one {meta['device']}, torch "
        f"{meta['torch']}, {meta['dtype']}, random weights ({link('h200-clip')}, `python benchmarks/clip.py`). The "
        "text encoder, the transformer and the video's decoder are optimized. Distilled: 8 steps without guidance. "
        "Guided: 30 steps with it. Times are in ms. Waiting for the host is the part of a clip in which no kernel "
        f"runs.{note}",
        table(columns, records),
    )
