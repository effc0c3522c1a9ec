"""The errors and times of fp8: the files that benchmarks/fp8.py, fp8_*.py write."""

import math

from pages.names import MODELS, QUALITY_CONFIGS
from pages.ops import LARGE
from pages.writing import across, block, grid, link, load, records_of, sizes, table, text

SHOWN_KINDS = 4  # of layers, in the table of what adds fp8's error
# The inputs of benchmarks/fp8_numerics.py, by how their names begin, as the table calls them.
INPUTS = {"normal": "normal", "GELU of normal": "GELU of normal", "normal, 1 %": "1 % loud channels"}
# The forms of benchmarks/fp8_gemm.py, as the table calls them.
PRODUCTS = {
    "bf16": "bf16",
    "fp8 per row": "fp8 per row",
    "fp8 per row, slow accumulation": "slow accumulation",
    "torch._scaled_mm": "torch._scaled_mm",
    "torch._scaled_mm per tensor": "per tensor",
}


@block("docs/measured/fp8.md", "numerics")
def numerics() -> str:
    """The error of one product by recipe."""
    records = records_of("fp8-numerics")
    rows: dict[str, list[str]] = {}
    for start in INPUTS:
        for r in records:
            if r["input"] == start or ("%" in start and r["input"].startswith(start)):
                rows.setdefault(r["recipe"], [r["recipe"]]).append(f"{100 * r['relative_error']:.2f} %")
    return text(
        "Relative error of one product of a 1024x2048 input and a normal 2048x2048 weight, row by row "
        f"(`python benchmarks/fp8_numerics.py`, {link('fp8-numerics')}):",
        grid(f"| recipe | {across('@', INPUTS.values())} |", rows.values()),
    )


@block("docs/measured/fp8.md", "products")
def products() -> str:
    """Linear layers by form."""
    meta = load("h200-fp8-gemm")["meta"]
    records = [record for record in records_of("h200-fp8-gemm") if "us" in record]
    rows: dict[str, dict[str, str]] = {}
    for record in records:
        form = "**{:.0f}**" if record["form"] == "fp8 per row" else "{:.0f}"
        rows.setdefault(sizes(record), {})[record["form"]] = form.format(record["us"])
    cells = [[shape, *(us[form] for form in PRODUCTS)] for shape, us in rows.items()]

    def between(key: str, form: str) -> str:
        found = [record[key] for record in records if record["form"] == form]
        return f"{min(found):.1e} to {max(found):.1e}"

    return text(
        f"Linear layers with bias on one {meta['device']}, torch {meta['torch']}, in µs "
        f"(`python benchmarks/fp8_gemm.py`, {link('h200-fp8-gemm')}):",
        grid(f"| tokens x in x out | {across('@', PRODUCTS.values())} |", cells),
        "Relative error against the exact product of the same quantised matrices, with the rounding to bf16: "
        f"{between('rounding', 'fp8 per row')}, with slow accumulation "
        f"{between('rounding', 'fp8 per row, slow accumulation')}. Against the product of the matrices before "
        f"quantisation: {between('error', 'fp8 per row')}, without a bias "
        f"{between('error', 'torch._scaled_mm, no bias')}.",
    )


@block("docs/measured/fp8.md", "layers")
def layers() -> str:
    """Which layers carry fp8's error."""
    result = load("fp8-layers")
    return text(
        f"One forward of the 2B model with {result['meta']['tokens']} tokens of a clip, against the model in float32 "
        f"(`python benchmarks/fp8_layers.py`, on a CPU, {link('fp8-layers')}):",
        table("| in fp8 | error |", "| {recipe} | {error:.2e} |", result["records"]),
    )


@block("docs/measured/fp8.md", "family layers")
def family_layers() -> str:
    """Which layers carry fp8's error in each family."""
    result = load("h200-fp8-families")
    errors: dict[str, dict[str, float]] = {}
    for record in result["records"]:
        errors.setdefault(record["model"], {})[record["layers"]] = record["error"]
    rows = []
    for model, of in errors.items():
        of.pop("memory low", None)
        bf16, default, every = (of.pop(name) for name in ("none (bf16)", "the default", "all"))
        added = {name: math.sqrt(max(0.0, error**2 - bf16**2)) for name, error in of.items()}
        most = sorted(added, key=lambda name: -added[name])[:SHOWN_KINDS]
        kinds = "; ".join(f"`{name}` {added[name]:.1e}" for name in most)
        rows.append([MODELS[model].title, *(f"{error:.2e}" for error in (bf16, default, every)), kinds])
    return text(
        f"One forward of the first {result['records'][0]['blocks']} blocks of each kind at released widths and shapes, "
        f"with random weights, on one {result['meta']['device']}, against the same blocks in float32 "
        f"(`python benchmarks/fp8_families.py`, {link('h200-fp8-families')}). "
        "The last column has the error that a kind of layers adds when it alone is in fp8:",
        grid("| model | bf16 | the default | all | kinds of layers that add most |", rows),
    )


@block("docs/measured/fp8.md", "memory low")
def memory_low() -> str:
    """The errors of memory="low"."""
    result = load("fp8-low")
    errors: dict[str, dict[str, float]] = {}
    for record in result["records"]:
        errors.setdefault(record["model"], {})[record["layers"]] = record["error"]
    kinds = ("none (bf16)", "the default", "memory low", "all")
    rows = [[MODELS[model].title, *(f"{of[kind]:.3e}" for kind in kinds)] for model, of in errors.items()]
    return text(
        "One forward of the first block of each kind at released widths, with few tokens and random weights, against "
        f"the same blocks in float32 (`python benchmarks/fp8_families.py --few-tokens --blocks 1`, on a CPU, "
        f"{link('fp8-low')}):",
        grid('| model | bf16 | the default | `memory="low"` | `skip=[]` |', rows),
    )


@block("docs/measured/fp8.md", "memory low steps")
def memory_low_steps() -> str:
    """What memory="low" costs beside fp8, of whole models."""
    meta = load("h200-models-low")["meta"]
    peaks = {(r["model"], r["config"]): r["peak_gb"] for r in records_of("h200-memory", offload="none")}
    of = {(r["model"], r["config"]): r for r in records_of("h200-models-low")}
    rows = []
    for model in dict.fromkeys(name for name, _ in of):
        fp8, low = of[model, "kernels_fp8"], of[model, "kernels_fp8_low"]
        held = [peaks.get((model, config)) for config in ("baseline", "kernels_fp8", "kernels_fp8_low")]
        rows.append(
            [
                MODELS[model].title,
                f"{fp8['step_ms']:.1f}",
                f"{low['step_ms']:.1f}",
                f"{low['step_ms'] / fp8['step_ms']:.3f}",
                f"{fp8['loop_error_vs_fp32']:.2e}",
                f"{low['loop_error_vs_fp32']:.2e}",
                *("" if peak is None else f"{peak:.1f}" for peak in held),
            ]
        )
    return text(
        f"A step of whole models on one {meta['device']} (`python benchmarks/models.py`, {link('h200-models-low')}), "
        "the error of the latents after eight steps of the first blocks, and the peak of a step "
        f"({link('h200-memory')}):",
        grid(
            '| model | fp8, ms | `memory="low"`, ms | ratio | error: fp8 | `memory="low"` | peak, GiB: bf16 | fp8 '
            '| `memory="low"` |',
            rows,
        ),
    )


@block("docs/measured/fp8.md", "loop")
def loop() -> str:
    """What fp8 costs over a whole denoising loop."""
    result = load("h200-fp8")
    meta = result["meta"]
    head = (
        "| recipe | error of the latents | PSNR of the frames | SSIM | ms a step | GiB of weights | stock ones freed |"
    )
    row = (
        "| {recipe} | {latents_error:.2e} | {psnr_db:.1f} dB | {ssim:.4f} | {graph_ms?:.1f} | {weights_gb:.2f} | "
        "{freed_gb?:.2f} |"
    )
    return text(
        f"{meta['steps']} steps at {meta['frames']} frames of {meta['height']}x{meta['width']}, random weights, "
        f"{meta['seeds']} seeds, against the stock model in float32:",
        table(head, row, result["records"]),
        '<img src="../benchmarks/results/h200-fp8.png" width="100%" alt="Error by step, error against time, memory">',
        "" if meta["torchao"] else "torchao was not part of this run.",
    )


@block("docs/measured/fp8.md", "quantised norms")
def quantised_norms() -> str:
    """The quantised norms in bf16 beside a copy of their bytes, by the vectors that a call has."""
    layer_norms = [r for r in records_of("h200-layernorm-quant", dtype="bf16") if "layernorm" in r["op"]]
    rms_norms = records_of("h200-quant-rows", question="before and after", dtype="bf16")
    ratios: dict[tuple[str, str], dict[str, float]] = {}
    for record in (*layer_norms, *rms_norms):
        op = record["op"]
        if "us" in record and "norm_" in op and op.endswith("_quant") and record["bytes"] >= LARGE:
            of_form = ratios.setdefault((op, record["form"] or "a row of each"), {})
            of_form[sizes(record)] = record["us"]["ours"] / record["us"]["copy"]
    rows = [
        [f"`{op}`", form, ", ".join(f"{shape} {ratio:.2f}" for shape, ratio in of_form.items())]
        for (op, form), of_form in sorted(ratios.items())
    ]
    return text(
        "Quantised norms in bf16, in times of a copy of the same bytes, of calls that move "
        f"{LARGE / 1e6:.0f} MB and more ({link('h200-layernorm-quant')}, {link('h200-quant-rows')}):",
        grid("| op | its vectors | shape, times as long as the copy |", rows),
    )


@block("docs/measured/fp8.md", "trained model")
def trained_model() -> str:
    """What clips of a trained model lose."""
    meta, records = load("h200-quality")["meta"], records_of("h200-quality")
    rows = [
        [
            QUALITY_CONFIGS[r["config"]],
            f"{r['psnr']:.1f}" if "psnr" in r else "",
            f"{r['least_psnr']:.1f}" if "psnr" in r else "",
            f"{r['recognised']} of {r['clips']}",
        ]
        for r in records
    ]
    return text(
        f"Clips of {meta['steps']} steps by the demo's small LTX-Video, which is trained, in {meta['dtype']} on one "
        f"{meta['device']}, beside the same clips of the stock model in float32 (`python benchmarks/quality.py`, "
        f"{link('h200-quality')}). A program reads from each clip what it shows, and compares that with the prompt:",
        grid("| configuration | PSNR, dB, median | of the worst clip | shows its prompt |", rows),
    )
