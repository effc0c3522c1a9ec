"""The first screen of README.md: a chart and a table of whole models, and the names of all that are known."""

import textwrap

from records import HEADLINE

from pages.families import LIBRARIES, families_of, first_sentence
from pages.names import COMPILED, MODELS
from pages.writing import block, grid, load, picture, records_of, text

CHART = "benchmarks/results/h200-models.svg"
BARS = {"compile": "torch.compile", "kernels": "ltx-kernels, bf16", "kernels_fp8": "ltx-kernels, fp8"}
IN_CHART = HEADLINE[:8]
WIDTH, LABELS, BAR, GAP, TOP = 820, 190, 13, 14, 52  # of the chart, in pixels
MOST = 2.75  # times as fast as diffusers, at the right end of the chart
# The colours follow the reader's light or dark scheme, as pictures in GitHub's pages do.
STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.compile { fill: #afb8c1; } .kernels { fill: #2da44e; } .kernels_fp8 { fill: #116329; } .line { stroke: #8c959f; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .compile { fill: #6e7681; } .kernels { fill: #3fb950; } .kernels_fp8 { fill: #aff5b4; }
}"""


def _step_ms(model: str) -> dict[str, float]:
    """Milliseconds of a step by configuration; of torch.compile's modes the faster one counts."""
    ms = {record["config"]: record["step_ms"] for record in records_of("h200-models", model=model)}
    compiled = [ms[mode] for mode in COMPILED if mode in ms]
    return {**ms, "compile": min(compiled)} if compiled else ms


def _gains(model: str) -> dict[str, float]:
    """How many times as fast as diffusers a step is, by configuration."""
    ms = _step_ms(model)
    return {config: ms["baseline"] / ms[config] for config in BARS if config in ms}


@picture(CHART)
def chart() -> str:
    """Bars of each model, beside diffusers' own time as a line."""

    def x(gain: float) -> float:
        return LABELS + gain / MOST * (WIDTH - LABELS)

    parts = []
    for place, (config, title) in enumerate(BARS.items()):
        left = LABELS + 190 * place
        parts.append(f'<rect class="{config}" x="{left}" y="8" width="{BAR}" height="{BAR}"/>')
        parts.append(f'<text x="{left + 20}" y="19">{title}</text>')
    y = TOP
    for model in IN_CHART:
        gains = _gains(model)
        middle = y + BAR * len(BARS) / 2 + 5
        parts.append(f'<text x="{LABELS - 8}" y="{middle:g}" text-anchor="end">{MODELS[model].title}</text>')
        for config, gain in gains.items():
            width = x(gain) - LABELS
            parts.append(f'<rect class="{config}" x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR - 1}"/>')
            parts.append(f'<text x="{x(gain) + 5:.1f}" y="{y + BAR - 2}">{gain:.2f}</text>')
            y += BAR
        y += GAP
    parts.append(f'<line class="line" x1="{x(1):.1f}" x2="{x(1):.1f}" y1="{TOP - 6}" y2="{y - GAP + 6}"/>')
    parts.append(f'<text x="{x(1):.1f}" y="{TOP - 10}" text-anchor="middle">diffusers = 1</text>')
    size = f'width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}"'
    lines = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>\n{STYLE}\n</style>\n{lines}\n</svg>\n'


def _range(config: str) -> str:
    gains = sorted(_gains(model)[config] for model in HEADLINE)
    return f"{gains[0]:.2f} to {gains[-1]:.2f}"


@block("README.md", "chart")
def shown() -> str:
    """The picture, and what it says in a sentence."""
    return text(
        f'<img src="{CHART}" width="100%" alt="Times as fast as diffusers: torch.compile, bf16 and fp8">',
        f"On one {load('h200-models')['meta']['device']} a step of the {len(HEADLINE)} models below is "
        f"{_range('kernels')} times as fast as with diffusers in bf16, and {_range('kernels_fp8')} times in fp8.",
    )


@block("CARD.md", "models")
@block("README.md", "models")
def models() -> str:
    """Milliseconds of a step, one figure a cell."""
    columns = ("baseline", *BARS)

    def cells(ms: dict[str, float]) -> list[str]:
        return [f"{ms[config]:.0f}" if config in ms else "" for config in columns]

    rows = [[MODELS[model].title, *cells(_step_ms(model))] for model in HEADLINE]
    return text(grid("| ms a step | diffusers | torch.compile | bf16 | fp8 |", rows))


@block("README.md", "known")
def known() -> str:
    """The names of the families whose blocks are replaced, by library."""
    titles = {"diffusers": "Diffusion", "transformers": "Language models and text encoders"}
    paragraphs = []
    for library in LIBRARIES:
        transformers = {name: module for name, module in families_of(library).items() if not name.startswith("vae_")}
        names = "; ".join(first_sentence(module).rstrip(".").partition(":")[0] for module in transformers.values())
        paragraphs.append(textwrap.fill(f"**{titles[library]}:** {names}.", 139, break_on_hyphens=False))
    return text(*paragraphs)
