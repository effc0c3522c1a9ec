"""Decoders and encoders of video, and their ops: h200-vae.json."""

from pages.names import AUTOENCODERS
from pages.writing import Record, block, records_of, table, text

CODERS = {"decode": "decoder", "encode": "encoder"}
VAE_CONFIGS = {
    "compile": "torch.compile",
    "channels_last": "channels-last",
    "channels_last_compile": "channels-last, torch.compile",
    "kernels": "**this package**",
}


def _ms(record: Record) -> float:
    return record[f"{record['half']}_ms"]


def _video(record: Record) -> str:
    """What the configurations of an autoencoder's call have in common."""
    frames = f"{record['frames']} frames " if record["frames"] > 1 else ""
    size = f"{frames}{record['height']}x{record['width']}, {record['dtype']}"
    return f"{AUTOENCODERS[record['model']].title} {CODERS[record['half']]}, {size}"


@block("docs/vae.md", "decoders")
def decoders() -> str:
    """Whole decoders and encoders, by configuration."""
    records, order = [record for record in records_of("h200-vae") if "model" in record], list(AUTOENCODERS)
    stock = {_video(record): _ms(record) for record in records if record["config"] == "stock"}
    rows = [
        {
            **record,
            "video": _video(record),
            "config": VAE_CONFIGS.get(record["config"], record["config"]),
            "ms": _ms(record),
            "stock": stock[_video(record)],
        }
        for record in sorted(records, key=lambda r: (order.index(r["model"]), r["half"], r["frames"], r["height"]))
    ]
    head = "| autoencoder, video | configuration | ms | x stock | peak GiB | rms error |"
    row = "| {video} | {config} | {ms:.1f} | {stock/ms:.2f} | {peak_gb:.2f} | {rms_vs_fp32?:.2e} |"
    return text(table(head, row, rows))


@block("docs/vae.md", "ops")
def video_ops() -> str:
    """Ops between convolutions."""
    head = "| op | channels x frames x height x width | µs | x copy | plain torch |"
    row = "| {op} | {shape} | {kernels_us:.0f} | {of_a_copy:.2f} | {torch_us:.0f} |"
    return text(table(head, row, [record for record in records_of("h200-vae") if "op" in record]))
