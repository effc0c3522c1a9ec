"""Decoders and encoders of video and images, and their ops: h200-vae.json, and what an H100 was measured with."""

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


@block("docs/measured/autoencoders.md", "decoders", file="h200-vae")
@block("docs/measured/autoencoders.md", "images", file="h100-80gb-hbm3-vae")
def decoders(file: str) -> str:
    """Whole decoders and encoders, by configuration."""
    records, order = [record for record in records_of(file) if "model" in record], list(AUTOENCODERS)
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
    head = "| autoencoder, video or image | configuration | ms | x stock | peak GiB | rms error |"
    row = "| {video} | {config} | {ms:.1f} | {stock/ms:.2f} | {peak_gb:.2f} | {rms_vs_fp32?:.2e} |"
    return text(table(head, row, rows))


@block("docs/measured/autoencoders.md", "group norms")
def group_norms() -> str:
    """Norms over groups and the doubling of pixels, beside torch's own in contiguous memory."""
    ops = ("group_norm", "group_norm_residual", "upsample_nearest")
    records = [r for r in records_of("h100-80gb-hbm3-ops", dtype="bf16") if r["op"] in ops]
    head = "| op | channels x height x width | µs | x copy | torch, channels-last | torch, contiguous |"
    row = "| {op} | {size} | {us.ours:.0f} | {us.ours/us.copy:.2f} | {us.eager:.0f} | {us.native?:.0f} |"
    return text(table(head, row, records, size=lambda record: "x".join(map(str, record["shape"]))))


@block("docs/measured/autoencoders.md", "ops")
def video_ops() -> str:
    """Ops between convolutions."""
    head = "| op | channels x frames x height x width | µs | x copy | plain torch |"
    row = "| {op} | {shape} | {kernels_us:.0f} | {of_a_copy:.2f} | {torch_us:.0f} |"
    return text(table(head, row, [record for record in records_of("h200-vae") if "op" in record]))
