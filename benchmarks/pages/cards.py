"""Which model fits which card: the weights of cards.json, and the measured peaks of h200-memory.json."""

from pages.names import MODELS
from pages.writing import Record, block, grid, link, load, records_of, text

CARDS_GB = (12, 16, 24, 32)
CARDS = f"{', '.join(map(str, CARDS_GB[:-1]))} or {CARDS_GB[-1]} GB"  # in a sentence
AGREE_GB = 0.1  # between measured and computed weights: otherwise the peak is of another default


def card_of(gib: float) -> str:
    """The smallest card for a peak of so many GiB."""
    needed = gib + load("h200-memory")["meta"]["reserve_gb"]
    return next((f"{card} GB" for card in CARDS_GB if needed <= card), "none")


def _measured(model: str, offload: str, *configs: str) -> Record | None:
    found = [
        record
        for config in configs
        for record in records_of("h200-memory", model=model, config=config, offload=offload)
        if "peak_gb" in record
    ]
    return found[0] if found else None


def _alone(model: str, weights: float, *configs: str) -> str:
    """The card for a transformer alone; configs: those whose step is like this one's, the same one first."""
    record = _measured(model, "none", *configs)
    if record is None:
        return "–"
    if record["config"] == configs[0] and abs(record["moved_gb"] - weights) < AGREE_GB:
        return f"**{card_of(record['peak_gb'])}**"
    return card_of(weights + record["peak_gb"] - record["moved_gb"])


def of_other_defaults() -> list[str]:
    """The models whose fp8 weights were others when their steps were measured."""
    computed = {one["model"]: one["fp8_gb"] for one in load("cards")["records"]}
    found = {model: _measured(model, "none", "kernels_fp8") for model in computed}
    return [
        MODELS[model].title
        for model, record in found.items()
        if record is not None and abs(record["moved_gb"] - computed[model]) >= AGREE_GB
    ]


@block("docs/checkpoints.md", "cards")
def cards() -> str:
    """The weights of each model, and the smallest card that holds it."""
    rows = []
    for one in load("cards")["records"]:
        name, low = one["model"], ("kernels_fp8_low", "kernels_fp8")
        step, grouped = _measured(name, "none", *low), _measured(name, "blocks", "kernels_fp8")
        together = "–"
        if step is not None and "text_encoder" in one:
            together = card_of(one["low_gb"] + one["text_encoder_gb"] + step["peak_gb"] - step["moved_gb"])
        encoder = f"{one['text_encoder']}, {one['text_encoder_gb']:.1f}" if "text_encoder" in one else "–"
        rows.append(
            [
                MODELS[name].title,
                *(f"{one[key]:.1f}" for key in ("bf16_gb", "fp8_gb", "low_gb")),
                _alone(name, one["fp8_gb"], "kernels_fp8"),
                _alone(name, one["low_gb"], *low),
                encoder,
                together,
                f"**{card_of(grouped['peak_gb'])}**" if grouped is not None else "–",
            ]
        )
    return text(
        "GiB of the transformer's weights, computed from its configuration "
        f"(`python benchmarks/cards.py`, {link('cards')}), and the smallest card of {CARDS}. Bold: the "
        f"peak of a step was measured ({link('h200-memory')}). Plain: computed weights, and the measured memory of a "
        "step beside them. Dash: no step of the model was measured, or its text encoder is not in the list.",
        grid(
            '| model | bf16 | fp8 | `memory="low"` | card, fp8 | card, `memory="low"` | text encoder, bf16 | '
            '`memory="low"` with it | fp8, groups of one block |',
            rows,
        ),
    )
