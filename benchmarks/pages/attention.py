"""Attention in 16 and 8 bits: h200-attention.json and its trials, h200-attention-*-tuning.json."""

from collections.abc import Iterable, Sequence

from pages.models import ERRORS
from pages.names import MODELS, by_model, config_of, model_of
from pages.writing import Record, across, between, block, grid, link, load, records_of, table, text, titled

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
    "ltx2_audio": "LTX-2, audio to video",
    "ltx2_video": "LTX-2, video to audio",
    "ltx2_audio_text": "LTX-2, audio to prompt",
    "ltx2_text": "LTX-2, video to prompt",
    "ltx13b_text": "LTX-Video 13B, video to prompt",
    "wan_text": "Wan 2.1 14B, video to prompt",
    "wan_image": "Wan 2.1 14B, video to image",
    **dict.fromkeys(
        ("llama_256", "llama_512", "llama_1024", "llama_2048", "llama"), "Llama 3.1 8B, Mistral 7B, Qwen3 8B"
    ),
    **dict.fromkeys(("llama_512_8", "llama_8"), "the same, eight prompts"),
    "llama2": "Llama 2 7B",
    **dict.fromkeys(("falcon_512", "falcon"), "Falcon 7B"),
}


def title_of(record: Record) -> str:
    return ATTENTION_SHAPES[record["name"]]


def shape_of(record: Record) -> str:
    return ", ".join(map(str, record["shape"]))


def speeds(names: Sequence[str]) -> tuple[str, str]:
    """The columns of the milliseconds of some ways, for by_shape: heads and cells."""
    return across("@", (ATTENTION[name] for name in names)), across("{ms.@:.3f}", names)


def timed_in(records: Sequence[Record]) -> tuple[str, str]:
    return speeds([name for name in ATTENTION if any(name in record["ms"] for record in records)])


def by_name(head: str, row: str, records: Iterable[Record]) -> str:
    """A table whose first column has the names of the cases."""
    return table(f"| | {head} |", f"| {{title}} | {row} |", records, title=title_of, shape=shape_of)


def by_shape(head: str, row: str, records: Iterable[Record]) -> str:
    return by_name(f"B, S, heads, D | {head}", f"{{shape}} | {row}", records)


def _gains(records: list[Record]) -> str:
    """How attention compares with the others, by width of the heads."""
    sentences = []
    for width in sorted({record["shape"][3] for record in records}):
        ms = [record["ms"] for record in records if record["shape"][3] == width]
        others = [
            f"{between(times[name] / times['ours'] for times in ms)} times as fast as {ATTENTION[name]}"
            for name in ATTENTION
            if name != "ours" and all(name in times for times in ms)
        ]
        sentences.append(f"With heads of {width} columns the kernel is {', '.join(others[:-1])} and {others[-1]}.")
    return " ".join(sentences)


@block("docs/measured/attention.md", "speed")
def speed() -> str:
    """Attention beside torch's backends, with masks, and of few queries."""
    result = load("h200-attention")
    meta, records = result["meta"], result["records"]
    causal = [record for record in records if "key_heads" in record]
    plain = [record for record in records if "tflops" in record and record not in causal]
    masked = records_of("h200-attention", mask="keys")
    cross = [record for record in records if "keys" in record and record["mask"] is None]
    addends = [record for record in records if "keys" in record and record["mask"] == "addends"]
    heads, cells = timed_in(plain)
    causal_heads, causal_cells = timed_in(causal)
    mask_cells = across("{ms.@:.3f}", ("ours", "ours_lengths", "ours_valid", "default"))
    over_valid = between(r["ms"][way] / r["ms"]["ours_valid"] for r in masked for way in ("ours", "ours_lengths"))
    over_mask = between(record["ms"]["default"] / record["ms"]["ours"] for record in masked)

    return text(
        f"One {meta['device']}, torch {meta['torch']}, bf16, random normal inputs, in ms "
        f"(`python benchmarks/attention.py`, {link('h200-attention')}). {meta.get('note', '')}".rstrip(),
        by_shape(f"{heads} | TFLOP/s | over cuDNN", f"{cells} | {{tflops.ours}} | {{ms.cudnn/ms.ours:.2f}} x", plain),
        _gains(plain),
        "With the last 40 keys left out, by a bool mask or by key lengths, beside attention to the other keys alone:",
        by_name("mask | key lengths | the other keys alone | torch with the mask", mask_cells, masked),
        f"With a mask or with lengths the kernel takes {over_valid} times as long as for the other keys alone. torch "
        f"with the mask takes {over_mask} times as long as the kernel with the mask.",
        "Few queries to many keys, and cross-attentions:",
        by_shape(f"keys | {heads}", f"{{keys}} | {cells}", cross),
        "With zeros added to the scores of the keys, as LTX-2 and LTX-Video do for a prompt without padding:",
        by_name("this package | torch", "{ms.ours:.3f} | {ms.default:.3f}", addends),
        titled(
            "Prompts of language models: causal attention, with fewer heads of keys and values:",
            by_shape(
                f"key heads | {causal_heads} | TFLOP/s | over cuDNN",
                f"{{key_heads}} | {causal_cells} | {{tflops.ours}} | {{ms.cudnn/ms.ours:.2f}} x",
                causal,
            ),
        ),
        titled("In float16:", by_shape(heads, cells, records_of("h200-attention", dtype="float16"))),
    )


@block("docs/measured/attention.md", "error")
def error() -> str:
    """The errors of attention and of torch's backends, by kind of input."""
    records = [r for r in records_of("h200-attention") if "err" in r and r["name"] in ("ltx49", "flux")]
    names = [name for name in ATTENTION if all(name in record["err"]["normal"] for record in records)]
    rows = [
        {"case": f"{ATTENTION_SHAPES[r['name']]}, heads of {r['shape'][3]}", "kind": kind, "error": error}
        for r in records
        for kind, error in r["err"].items()
    ]
    head = f"| | inputs | {across('@', (ATTENTION[name] for name in names))} |"
    return text(
        "Relative L2 error against float64. Peaked: queries and keys of standard deviation 2. Outliers: every 16th "
        "channel eight times as large. Copied keys: 40 times the queries as keys.",
        table(head, f"| {{case}} | {{kind}} | {across('{error.@:.2e}', names)} |", rows),
    )


@block("docs/measured/attention.md", "int8")
def int8() -> str:
    """Time and error of attention in 8 bits beside bf16: the op's, and of whole models."""
    result = load("h200-attention")
    records = [record for record in result["records"] if "ours_8bit" in record["ms"]]
    others = [record for record in result["records"] if "cudnn_fp8" in record["ms"]]
    kinds = list(records[0]["err"])
    cells = "{ms.ours:.3f} | {ms.ours_8bit:.3f} | {ms.ours/ms.ours_8bit:.2f} x"
    errors = across("{err.@.ours:.1e}, {err.@.ours_8bit:.1e}", kinds)
    other_cells = across("{ms.@?:.3f}", ("cudnn_fp8", "ours", "ours_8bit"))
    other_cells += f" | {across('{err.@.cudnn_fp8:.1e}', kinds)}"
    inputs = across("@", kinds)
    return text(
        f"One {result['meta']['device']}, bf16, in ms ({link('h200-attention')}). The time of int8 includes its "
        "quantising. Errors are relative L2 errors against float64, first of bf16 and then of int8, on inputs as "
        "above.",
        by_shape(f"bf16 | int8 | gain | {inputs}", f"{cells} | {errors}", records),
        titled(
            "cuDNN with e4m3 inputs and scales of one, in ms without the time of its cast, and its errors on the same "
            "inputs:",
            by_shape(f"cuDNN fp8 | this package, bf16 | this package, int8 | {inputs}", other_cells, others),
        ),
        titled(
            f'Whole models, without and with `attention="int8"`, ms of a step ({link("h200-models-int8")}, '
            "`python benchmarks/models.py --configs kernels_fp8 kernels_fp8_int8`). "
            "The errors are relative L2 errors against float32, of one forward and of the latents after 8 steps:",
            _int8_models(),
        ),
    )


def _int8_models() -> str:
    """Whole models without and with `attention="int8"`, as far as they were measured."""
    rows = []
    for of_config in by_model("h200-models-int8").values():
        for config, int8 in (("kernels", "kernels_int8"), ("kernels_fp8", "kernels_fp8_int8")):
            if {config, int8} <= of_config.keys():
                pair = of_config[config], of_config[int8]
                errors = [", ".join(f"{record[key]:.1e}" for record in pair if key in record) for key in ERRORS]
                ms = [f"{record['step_ms']:.1f}" for record in pair]
                gain = f"{pair[1]['gain'][config]:.2f} x"
                rows.append([model_of(pair[0]), config_of(pair[0]), *ms, gain, *errors])
    return grid("| | | without | with | gain | forward | 8 steps |", rows)


@block("docs/attention-trials.md", "few queries")
def few_queries() -> str:
    """Few queries of many keys: the kernel, and what was tried in its place."""
    records = records_of("h200-attention-few-tuning")
    titles = {"ours": "this package", "cudnn": "cuDNN", "copy": "a copy of key and value"}

    def times(rows: list[Record]) -> str:
        names = list(rows[0]["ms"])
        head = f"| B, queries, heads, D | keys | {across('@', (titles.get(name, name) for name in names))} |"
        return table(head, f"| {{shape}} | {{keys}} | {across('{ms.@:.3f}', names)} |", rows, shape=shape_of)

    return text(
        f"In ms ({link('h200-attention-few-tuning')}):",
        times(records),
        "Two smaller blocks, in a run of its own:",
        times([{**record, **record["two_blocks"]} for record in records if "two_blocks" in record]),
    )


@block("docs/measured/attention.md", "int8 parts")
def int8_parts() -> str:
    """What attention in 8 bits spends on its quantising."""
    file, head = "h200-attention-parts-tuning", "mean of the keys | query and key as integers | attention"
    records = records_of(file)
    for record in records:
        record["share"] = 1 - record["us"]["hopper_attention"] / record["us"]["all"]
    cells = across("{us.@:.1f}", ("sample_keys", "quantise_rows", "hopper_attention"))
    return text(
        f"In µs ({link(file)}):", by_shape(f"{head} | quantising of the whole", f"{cells} | {{share:.1%}}", records)
    )


@block("docs/attention-trials.md", "8 bits")
def trials_in_8_bits() -> str:
    """Time and error of trials with 8-bit integers, beside the attention that the package has."""
    result = load("h200-attention-8bit-tuning")
    parts, trials, recipes = result["parts_us"], result["scores"], result["recipes"]
    weights = [trial["weights"] for trial in trials]
    of_scores = {
        kind: {**errors, **{trial["weights"]: trial["err"][kind]["int8_scores"] for trial in trials}}
        for kind, errors in trials[0]["err"].items()
    }
    scores = [{**record, "weights": trial["weights"]} for trial in trials for record in trial["records"]]

    def errors(heads: Sequence[str], names: Sequence[str], of_kind: dict[str, Record]) -> str:
        rows = [[kind, *(f"{error[name]:.2e}" for name in names)] for kind, error in of_kind.items()]
        return grid(f"| inputs | {across('@', heads)} |", rows)

    head = "| B, S, heads, D | this package | int8 | gain |"
    row = "| {shape} | {ms.ours:.3f} | {ms.int8:.3f} | {ms.ours/ms.int8:.2f} x |"
    scores_head = "| B, S, heads, D | relative to | this package | int8 scores | attention | gain | gain of attention |"
    scores_row = (
        "| {shape} | {weights} | {ms.ours:.3f} | {ms.int8_scores:.3f} | {ms.attention:.3f} | "
        "{ms.ours/ms.int8_scores:.2f} x | {ms.ours/ms.attention:.2f} x |"
    )
    return text(
        f"One {result['meta']['device']}, bf16, random normal inputs, in ms, trial and kernel in the same run "
        f"({link('h200-attention-8bit-tuning')}).",
        "All products of integers:",
        table(head, row, result["records"], shape=shape_of),
        f"The times of int8 include quantising: with {parts['tokens']} tokens {parts['quantising']} µs, beside "
        f"{parts['attention']} µs of attention.",
        "Relative L2 error against float64 with 4608 tokens, inputs as in [Attention](measured/attention.md#error):",
        errors(["this package", "int8"], ["ours", "int8"], result["err"]),
        "Scores of integers, by what the exponentials are relative to; `attention` is without the quantising:",
        table(scores_head, scores_row, scores, shape=shape_of),
        "Their relative L2 error, by what the exponentials are relative to:",
        errors(["this package", *weights], ["ours", *weights], of_scores),
        "The error of recipes alone, computed in float32 by plain torch on a CPU:",
        errors(list(recipes["normal"]), list(recipes["normal"]), recipes),
    )
