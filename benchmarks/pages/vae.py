"""Decoders and encoders of video, and their ops: h200-vae.json."""

from __future__ import annotations

from typing import Any

from pages.names import AUTOENCODERS
from pages.writing import Record, block, number, optional, records_of, table, text

CODERS = {"decode": "decoder", "encode": "encoder"}
VAE_CONFIGS = {"compile": "torch.compile", "kernels": "**this package**"}


def _coded(record: Record) -> tuple[Any, ...]:
    """What the configurations of an autoencoder's call have in common."""
    return tuple(record[key] for key in ("half", "model", "frames", "height", "width", "dtype"))


def _ms(record: Record) -> float:
    return record[f"{record['half']}_ms"]


def _video(record: Record) -> str:
    size = f"{record['frames']} frames {record['height']}x{record['width']}, {record['dtype']}"
    return f"{AUTOENCODERS[record['model']]} {CODERS[record['half']]}, {size}"


@block("docs/vae.md", "decoders")
def decoders() -> str:
    """Whole decoders and encoders, by configuration."""
    found, order = [record for record in records_of("h200-vae") if "model" in record], list(AUTOENCODERS)
    stock = {_coded(record): _ms(record) for record in found if record["config"] == "stock"}
    columns = [
        ("autoencoder, video", _video),
        ("configuration", lambda record: VAE_CONFIGS.get(record["config"], record["config"])),
        ("ms", lambda record: f"{_ms(record):.1f}"),
        ("x stock", lambda record: f"{stock[_coded(record)] / _ms(record):.2f}"),
        ("peak GiB", number("peak_gb", ".2f")),
        ("rms error", optional("rms_vs_fp32", ".2e")),
    ]
    return text(
        table(columns, sorted(found, key=lambda r: (order.index(r["model"]), r["half"], r["frames"], r["height"])))
    )


@block("docs/vae.md", "ops")
def video_ops() -> str:
    """Ops between convolutions."""
    columns = [
        ("op", number("op", "")),
        ("channels x frames x height x width", number("shape", "")),
        ("µs", number("kernels_us", ".0f")),
        ("x copy", number("of_a_copy", ".2f")),
        ("plain torch", number("torch_us", ".0f")),
    ]
    return text(table(columns, [record for record in records_of("h200-vae") if "op" in record]))
