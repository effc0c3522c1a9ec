"""What Python and torch take to launch a step: h200-host.json."""

from pages.names import CONFIGS
from pages.writing import across, block, grid, link, load, records_of, text

HOST_MODELS = {"ltx": "LTX-Video 2B", "flux": "FLUX.1", "wan": "Wan 1.3B", "qwen": "Qwen-Image"}
HOST_CONFIGS = ("baseline", "kernels", "kernels_fp8")


@block("docs/measured/clips.md", "host")
def host_times() -> str:
    """The host's time with recorded calls and without them."""
    result = load("h200-host")
    by_config = {(r["model"], r["config"]): r for r in result["records"] if "model" in r}
    earlier = {r["config"]: r["ratio_to_baseline"] for r in records_of("h200-host-start")}
    rows = []
    for model, title in HOST_MODELS.items():
        records = [by_config[model, config] for config in HOST_CONFIGS]
        rows.append([title, *(f"{r['host_ms']:.1f} ({r['ratio_to_baseline']:.2f} x)" for r in records)])
    return text(
        "The host's time to launch one step, without waiting for the GPU: one "
        f"{result['meta']['device']}, models of all their blocks and few columns, in ms ({link('h200-host')}):",
        grid(f"| blocks of | {across('@', (CONFIGS[config] for config in HOST_CONFIGS))} |", rows),
        f"Without recorded calls LTX-Video's step takes {earlier['kernels']:.2f} times diffusers' time in bf16 and "
        f"{earlier['kernels_fp8']:.2f} times in fp8 ({link('h200-host-start')}).",
    )
