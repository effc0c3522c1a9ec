"""Attention in 16 and 8 bits: h200-attention.json and its trials, h200-attention-*-tuning.json."""

from __future__ import annotations

from collections.abc import Iterable

from pages.models import ERRORS, by_model
from pages.names import MODELS, config_of, model_of
from pages.writing import (
    Column,
    Record,
    block,
    grid,
    link,
    load,
    number,
    optional,
    ratio,
    records_of,
    table,
    text,
)

# What benchmarks/attention.py times.
ATTENTION = {
    "ours": "this package",
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN",
    "flash2": "torch's flash attention",
}
ATTENTION_SHAPES = {
    **{name: model.title for name, model in MODELS.items()},
    "ltx49": "LTX-Video 2B, 49 frames",
    "ltx161": "LTX-Video 2B, 161 frames",
    "cog": MODELS["cogvideox"].title,
    "few64": "few queries",
    "few128": "few queries",
    "few64_8": "few queries, eight samples",
    "few128_8": "few queries, eight samples",
    "ltx2_audio": "LTX-2, sound to video",
    "ltx2_video": "LTX-2, video to sound",
    "ltx2_audio_text": "LTX-2, sound to prompt",
    "ltx2_text": "LTX-2, video to prompt",
    "ltx13b_text": "LTX-Video 13B, video to prompt",
    "wan_text": "Wan 2.1 14B, video to prompt",
    "wan_image": "Wan 2.1 14B, video to image",
}


def shape_of(record: Record) -> str:
    return ", ".join(map(str, record["shape"]))


NAME: Column = ("", lambda record: ATTENTION_SHAPES[record["name"]])
SHAPE: Column = ("B, S, heads, D", shape_of)
KEYS: Column = ("keys", number("keys", ""))


def milliseconds(*names: str) -> list[Column]:
    return [(ATTENTION[name], number(f"ms.{name}", ".3f")) for name in names]


def errors_by_input(records: list[Record], form: str, *names: str) -> list[Column]:
    """A column for each kind of input that the records have errors of, with the errors of these ways."""
    kinds = records[0]["err"] if records else {}
    return [
        (kind, lambda record, kind=kind: ", ".join(f"{record['err'][kind][name]:{form}}" for name in names))
        for kind in kinds
    ]


def _between(values: Iterable[float]) -> str:
    """The range of some factors; one figure where they are alike."""
    ordered = sorted(values)
    return " to ".join(dict.fromkeys(f"{value:.2f}" for value in (ordered[0], ordered[-1])))


def _gains(records: list[Record]) -> str:
    """How attention compares with the others, by width of the heads."""
    sentences = []
    for width in sorted({record["shape"][3] for record in records}):
        ms = [record["ms"] for record in records if record["shape"][3] == width]
        others = [
            f"{_between(times[name] / times['ours'] for times in ms)} times as fast as {ATTENTION[name]}"
            for name in ATTENTION
            if name != "ours" and all(name in times for times in ms)
        ]
        sentences.append(f"With heads of {width} columns the kernel is {' and '.join(others)}.")
    return " ".join(sentences)


@block("docs/attention.md", "speed")
def speed() -> str:
    """Attention beside torch's backends, with masks, and of few queries."""
    result = load("h200-attention")
    meta, records = result["meta"], result["records"]
    plain = [record for record in records if "tflops" in record]
    masked = records_of("h200-attention", mask="keys")
    cross = [record for record in records if "keys" in record]
    halves = records_of("h200-attention", dtype="float16")
    times = milliseconds(*(name for name in ATTENTION if any(name in record["ms"] for record in plain)))
    whole = [
        NAME,
        SHAPE,
        *times,
        ("TFLOP/s", number("tflops.ours", "")),
        ("over cuDNN", ratio("ms.cudnn", "ms.ours", " x")),
    ]
    without_keys = [
        NAME,
        ("mask", number("ms.ours", ".3f")),
        ("key lengths", number("ms.ours_lengths", ".3f")),
        ("the other keys alone", number("ms.ours_valid", ".3f")),
        ("torch with the mask", number("ms.default", ".3f")),
    ]
    added = [NAME, *milliseconds("ours"), ("torch", number("ms.default", ".3f"))]
    over_valid = _between(r["ms"][way] / r["ms"]["ours_valid"] for r in masked for way in ("ours", "ours_lengths"))
    over_mask = _between(record["ms"]["default"] / record["ms"]["ours"] for record in masked)
    return text(
        f"One {meta['device']}, torch {meta['torch']}, bf16, random normal inputs, in ms "
        f"(`python benchmarks/attention.py`, {link('h200-attention')}). {meta.get('note', '')}".rstrip(),
        table(whole, plain),
        _gains(plain),
        "With the last 40 keys left out, by a bool mask or by key lengths, beside attention to the other keys alone:",
        table(without_keys, masked),
        f"With a mask or with lengths the kernel takes {over_valid} times as long as for the other keys alone. torch "
        f"with the mask takes {over_mask} times as long as the kernel with the mask.",
        "Few queries to many keys, and cross-attentions:",
        table([NAME, SHAPE, KEYS, *times], [record for record in cross if record["mask"] is None]),
        "With zeros added to the scores of the keys, as LTX-2 and LTX-Video do for a prompt without padding:",
        table(added, [record for record in cross if record["mask"] == "addends"]),
        *(("In float16:", table([NAME, SHAPE, *times], halves)) if halves else ()),
    )


@block("docs/attention.md", "error")
def error() -> str:
    """The errors of attention and of torch's backends, by kind of input."""
    records = [r for r in records_of("h200-attention") if "err" in r and r["name"] in ("ltx49", "flux")]
    names = [name for name in ATTENTION if all(name in record["err"]["normal"] for record in records)]
    rows = [
        [
            f"{ATTENTION_SHAPES[record['name']]}, heads of {record['shape'][3]}",
            kind,
            *(f"{errors[name]:.2e}" for name in names),
        ]
        for record in records
        for kind, errors in record["err"].items()
    ]
    return text(
        "Relative L2 error against float64. Peaked: queries and keys of standard deviation 2. Outliers: every 16th "
        "channel eight times as large. Copied keys: 40 times the queries as keys.",
        grid(["", "inputs", *(ATTENTION[name] for name in names)], rows),
    )


@block("docs/attention.md", "int8")
def int8() -> str:
    """Time and error of attention in 8 bits beside bf16: the op's, and of whole models."""
    result = load("h200-attention")
    records = [record for record in result["records"] if "ours_8bit" in record["ms"]]
    columns = [
        NAME,
        SHAPE,
        ("bf16", number("ms.ours", ".3f")),
        ("int8", number("ms.ours_8bit", ".3f")),
        ("gain", ratio("ms.ours", "ms.ours_8bit", " x")),
        *errors_by_input(records, ".1e", "ours", "ours_8bit"),
    ]
    others = [record for record in result["records"] if "cudnn_fp8" in record["ms"]]
    other_columns = [
        NAME,
        SHAPE,
        ("cuDNN fp8", number("ms.cudnn_fp8", ".3f")),
        ("this package, bf16", number("ms.ours", ".3f")),
        ("this package, int8", optional("ms.ours_8bit", ".3f")),
        *errors_by_input(others, ".1e", "cudnn_fp8"),
    ]
    return text(
        f"One {result['meta']['device']}, bf16, in ms ({link('h200-attention')}). The time of int8 includes "
        "its quantising. Errors are relative L2 errors against float64, first of bf16 and then of int8, on inputs as "
        "above.",
        table(columns, records),
        "cuDNN with e4m3 inputs and scales of one, in ms without the time of its cast, and its errors on the same "
        "inputs:"
        if others
        else "",
        table(other_columns, others) if others else "",
        *_int8_models(),
    )


def _int8_models() -> tuple[str, ...]:
    """Whole models without and with `attention="int8"`, as far as they were measured."""
    rows = [
        {"without": of_config[config], "with": of_config[int8]}
        for of_config in by_model("h200-models").values()
        for config, int8 in (("kernels", "kernels_int8"), ("kernels_fp8", "kernels_fp8_int8"))
        if {config, int8} <= of_config.keys()
    ]

    def errors(key: str) -> str:
        return lambda row: ", ".join(f"{record[key]:.1e}" for record in row.values() if key in record)

    columns = [
        ("", lambda row: model_of(row["without"])),
        ("", lambda row: config_of(row["without"])),
        ("without", number("without.step_ms", ".1f")),
        ("with", number("with.step_ms", ".1f")),
        ("gain", ratio("without.step_ms", "with.step_ms", " x")),
        ("forward", errors(ERRORS[0])),
        ("8 steps", errors(ERRORS[1])),
    ]
    head = (
        f'Whole models, without and with `attention="int8"`, ms of a step ({link("h200-models")}). The errors are '
        "relative L2 errors against float32, of one forward and of the latents after 8 steps:"
    )
    return (head, table(columns, rows)) if rows else ()


@block("docs/attention.md", "few queries")
def few_queries() -> str:
    """Few queries of many keys: the kernel, and what was tried in its place."""
    records = records_of("h200-attention-few-tuning")
    titles = {"ours": "this package", "cudnn": "cuDNN", "copy": "a copy of key and value"}
    columns = [
        ("B, queries, heads, D", shape_of),
        KEYS,
        *((titles.get(name, name), number(f"ms.{name}", ".3f")) for name in records[0]["ms"]),
    ]
    return text(f"In ms ({link('h200-attention-few-tuning')}):", table(columns, records))


@block("docs/attention.md", "int8 parts")
def int8_parts() -> str:
    """What attention in 8 bits spends on its quantising."""
    columns = [
        NAME,
        SHAPE,
        ("mean of the keys", number("us.sample_keys", ".1f")),
        ("query and key as integers", number("us.quantise_rows", ".1f")),
        ("attention", number("us.hopper_attention", ".1f")),
        ("quantising of the whole", lambda record: f"{1 - record['us']['hopper_attention'] / record['us']['all']:.1%}"),
    ]
    file = "h200-attention-parts-tuning"
    return text(f"In µs ({link(file)}):", table(columns, records_of(file)))


@block("docs/attention.md", "8 bits")
def trials_in_8_bits() -> str:
    """Time and error of trials with 8-bit integers, beside the attention that the package has."""
    result = load("h200-attention-8bit-tuning")
    parts, trials, recipes = result["parts_us"], result["scores"], result["recipes"]
    products = [
        SHAPE,
        *milliseconds("ours"),
        ("int8", number("ms.int8", ".3f")),
        ("gain", ratio("ms.ours", "ms.int8", " x")),
    ]
    scores = [
        SHAPE,
        ("relative to", number("weights", "")),
        *milliseconds("ours"),
        ("int8 scores", number("ms.int8_scores", ".3f")),
        ("attention", number("ms.attention", ".3f")),
        ("gain", ratio("ms.ours", "ms.int8_scores", " x")),
        ("gain of attention", ratio("ms.ours", "ms.attention", " x")),
    ]
    return text(
        f"One {result['meta']['device']}, bf16, random normal inputs, in ms, trial and kernel in the same run "
        f"({link('h200-attention-8bit-tuning')}).",
        "All products of integers:",
        table(products, result["records"]),
        f"The times of int8 include quantising: with {parts['tokens']} tokens {parts['quantising']} µs, beside "
        f"{parts['attention']} µs of attention.",
        "Relative L2 error against float64 with 4608 tokens, inputs as above:",
        _errors({"this package": "ours", "int8": "int8"}, result["err"]),
        "Scores of integers, by what the exponentials are relative to; `attention` is without the quantising:",
        table(scores, [{**record, "weights": trial["weights"]} for trial in trials for record in trial["records"]]),
        "Their relative L2 error, by what the exponentials are relative to:",
        _errors(
            {"this package": "ours", **{trial["weights"]: trial["weights"] for trial in trials}},
            {
                kind: {**errors, **{trial["weights"]: trial["err"][kind]["int8_scores"] for trial in trials}}
                for kind, errors in trials[0]["err"].items()
            },
        ),
        "The error of recipes alone, computed in float32 by plain torch on a CPU:",
        _errors({name: name for name in recipes["normal"]}, recipes),
    )


def _errors(ways: dict[str, str], of_kind: dict[str, dict[str, float]]) -> str:
    """A row for each kind of input, with the errors of these ways."""
    rows = [[kind, *(f"{errors[way]:.2e}" for way in ways.values())] for kind, errors in of_kind.items()]
    return grid(["inputs", *ways], rows)
