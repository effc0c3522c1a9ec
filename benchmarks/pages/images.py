"""Whole images: h200-image.json."""

from pages.names import CLIP_CONFIGS, FP8_PEAKS
from pages.writing import Record, block, link, load, table, text

IMAGE_MODELS = {
    "schnell": "FLUX.1-schnell",
    "dev": "FLUX.1-dev",
    "flux2_klein": "FLUX.2 klein 4B",
    "sd35": "Stable Diffusion 3.5 large",
    "zimage": "Z-Image-Turbo",
    "qwen": "Qwen-Image",
}
IMAGE_CONFIGS = {
    **CLIP_CONFIGS,
    "compile": "torch.compile",
    "flux_fast": "flux-fast",
    "flux_fast_fp8": "flux-fast, fp8",
    "flux_fast_fp8_rows": "flux-fast, fp8 per row",
    "flux_fast_fp8_blocks": "flux-fast, fp8 per row, block by block",
    "stock_fbc": "diffusers, FirstBlockCache",
    "kernels_fbc": "`optimize`, FirstBlockCache",
    "stock_taylor": "diffusers, TaylorSeer",
    "kernels_taylor": "`optimize`, TaylorSeer",
}


def _image(record: Record) -> str:
    return f"{IMAGE_MODELS[record['model']]}, {record['steps']} steps, {record['height']}x{record['width']}"


def _place(record: Record) -> tuple[int, int]:
    return list(IMAGE_MODELS).index(record["model"]), list(IMAGE_CONFIGS).index(record["config"])


@block("docs/measured/images.md", "images")
def images() -> str:
    """Whole images, by part."""
    result = load("h200-image")
    meta, records = result["meta"], result["records"]
    stock = {_image(record): record["image_ms"] for record in records if record["config"] == "stock"}
    times = "ms | x diffusers | prompt | a step | decoding | to PIL"
    head = f"| image | | {times} | peak GiB | first image | error | PSNR, dB |"
    row = (
        "| {image} | {config} | {image_ms:.0f} | {stock/image_ms:.2f} | {text_ms:.1f} | {step_ms:.1f} | "
        "{decode_ms:.1f} | {post_ms:.1f} | {peak_gb:.1f} | {first_s:.1f} s | {error_vs_fp32?:.2e} | {psnr?:.1f} |"
    )
    rows = [
        {**r, "image": _image(r), "config": IMAGE_CONFIGS[r["config"]], "stock": stock.get(_image(r))}
        for r in sorted(records, key=_place)
    ]
    return text(
        "Whole calls of the pipelines with prompt, steps, decoding and the conversion to PIL, on one "
        f"{meta['device']}, torch {meta['torch']}, {meta['dtype']}, random weights ({link('h200-image')}, "
        "`python benchmarks/image.py`). Times are in ms. The last two columns compare with the stock pipeline in "
        "float32: the latents after all steps, and the image. "
        f"{FP8_PEAKS}",
        table(head, row, rows),
    )
