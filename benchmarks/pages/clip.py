"""Whole clips: h200-clip.json and h100-80gb-hbm3-clip.json."""

from pages.names import CLIP_CONFIGS, FP8_PEAKS
from pages.writing import Record, block, link, load, table, text

CLIP_MODELS = {"ltx": "LTX-Video 2B", "ltx2": "LTX-2, with audio"}


def _clip(record: Record) -> str:
    size = f"{record['frames']} frames of {record['height']}x{record['width']}"
    return f"{CLIP_MODELS[record['model']]}, {record['recipe']}, {size}"


def _place(record: Record) -> tuple[object, ...]:
    models, configs = list(CLIP_MODELS), list(CLIP_CONFIGS)
    size = record["frames"] * record["height"] * record["width"]
    return models.index(record["model"]), record["recipe"], size, configs.index(record["config"])


@block("docs/measured/clips.md", "clips", file="h200-clip")
@block("docs/measured/clips.md", "clips-h100", file="h100-80gb-hbm3-clip")
def clips(file: str) -> str:
    """Whole clips, by part."""
    result = load(file)
    meta, records = result["meta"], result["records"]
    stock = {_clip(record): record["clip_ms"] for record in records if record["config"] == "stock"}
    head = "| clip | | ms | x diffusers | waiting for the host | prompt | a step | decoding | peak GiB | first clip |"
    row = (
        "| {clip} | {config} | {clip_ms:.0f} | {stock/clip_ms:.2f} | {idle_ms?:.0f} | {text_ms:.1f} | {step_ms:.1f} | "
        "{decode_ms:.1f} | {peak_gb:.1f} | {first_s:.1f} s |"
    )
    rows = [
        {**r, "clip": _clip(r), "config": CLIP_CONFIGS[r["config"]], "stock": stock.get(_clip(r))}
        for r in sorted(records, key=_place)
    ]
    return text(
        f"Whole calls of the pipelines with prompt, steps and decoding, on one {meta['device']}, torch "
        f"{meta['torch']}, {meta['dtype']}, random weights ({link(file)}, `python benchmarks/clip.py`). The "
        "text encoder, the transformer and the video's decoder are optimized. Distilled: 8 steps without guidance. "
        "Guided: 30 steps with it. Times are in ms. Waiting for the host is the part of a clip in which no kernel "
        f"runs. {FP8_PEAKS} {meta.get('note', '')}".rstrip(),
        table(head, row, rows),
    )
