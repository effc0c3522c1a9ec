"""The ops one by one, beside a copy and their peers: h200-ops.json, and what an H100 was measured with."""

import collections
import math

from plots import PEERS, QUANTISED, case_name, family, fastest, geometric_mean, measured

from pages.attention import by_shape, speeds
from pages.names import by_model, config_of, in_order, model_of
from pages.writing import Record, across, block, grid, link, load, records_of, sizes, table, text

Shown = list[tuple[str, list[int], str]]  # ops that a table shows: the op, its shape, and its name for people

# What the table of ops shows; all cases are in the file, and the losses below the table.
SHOWN: Shown = [
    ("qk_norm_rope across heads, full table", [2, 8064, 32, 64], "q/k norm + rotary, LTX-Video"),
    ("qk_norm_rope per head", [1, 4608, 24, 128], "q/k norm + rotary, FLUX"),
    ("qk_norm_rope across heads, table of a head", [1, 32760, 12, 128], "q/k norm + rotary, Wan"),
    ("gated_residual_adaln_rmsnorm", [2, 8064, 2048], "gated residual + norm + modulation, LTX-Video"),
    ("adaln_rmsnorm", [2, 8064, 2048], "RMSNorm + modulation, LTX-Video"),
    ("adaln_layernorm", [2, 8064, 2048], "LayerNorm + modulation"),
    ("rmsnorm", [16384, 4096], "RMSNorm"),
    ("swiglu", [16128, 8192], "SwiGLU"),
    ("gelu erf", [16128, 8192], "GELU"),
]
# What the pages of skills/ show: rows from small to large, and shapes of diffusers' models.
SKILL_ROWS: Shown = [
    *(("rmsnorm", [rows, 2048], "RMSNorm") for rows in (64, 512, 1024, 5376, 16128)),
    *(("rmsnorm", shape, "RMSNorm") for shape in ([16384, 4096], [8192, 8192], [131072, 128], [8, 65536])),
]
SKILL_SHAPES: Shown = [
    ("rmsnorm", [2048, 2048], "RMSNorm 2x1024x2048"),  # tokens 2x1024 as rows
    ("geglu tanh", [2048, 4096], "GEGLU 2x1024x4096"),
    ("rmsnorm", [1024, 2048], "RMSNorm"),
    ("rmsnorm", [5376, 2048], "RMSNorm, LTX-Video"),
    ("geglu tanh", [512, 8192], "GEGLU"),
    ("geglu tanh", [5376, 8192], "GEGLU"),
    *(
        (op, [2, tokens, 2048], f"{name}, LTX-Video")
        for op, name in (
            ("adaln_rmsnorm", "norm + modulation"),
            ("gated_residual_adaln_rmsnorm", "gated residual + norm + modulation"),
        )
        for tokens in (2688, 8064)
    ),
    ("qk_norm_rope across heads, full table", [2, 2688, 32, 64], "q/k norm + rotary, LTX-Video"),
    *SHOWN[:3],
]
# Ops of docs/fp8.md, with a shape of LTX-Video.
QUANTISING = [
    ("quantize_rows", [2, 8064, 2048]),
    ("quantised rmsnorm", [16128, 2048]),
    ("quantised rmsnorm_residual", [16128, 2048]),
    ("quantised adaln_rmsnorm", [2, 8064, 2048]),
    ("quantised gated_residual", [2, 8064, 2048]),
    ("quantised gated_residual_adaln_rmsnorm", [2, 8064, 2048]),
    ("quantised gelu", [16128, 8192]),
    ("quantised swiglu", [16128, 8192]),
]

# How many times a copy's time an op may take, by how its name begins, in the cases that move this much: there the time
# of a launch no longer counts. Attention multiplies matrices.
AIMS = {
    "qk_norm_cross_attention": None,
    "attention": None,
    "qk_norm_rope": 1.10,
    "apply_rotary": 1.08,
    "rope": 1.08,
    "quant": 1.08,
    "rmsnorm_residual": 1.05,
    "gated_residual": 1.05,
    "": 1.03,
}
LARGE = 40e6  # bytes
# The geometric mean of the fastest peer's time over this package's that a family should reach.
PEER_AIMS = {
    "plain and residual norms": 0.99,
    "norm + modulation": 1.15,
    "gated residual (+ norm + modulation)": 1.02,
    "q/k norm + rotary": 1.8,
    "GLU and GELU": 0.99,
}


def aim(record: Record) -> float | None:
    return next(value for start, value in AIMS.items() if record["op"].startswith(start))


def over_copy(record: Record) -> float:
    return record["us"]["ours"] / record["us"]["copy"]


def large(records: list[Record]) -> list[Record]:
    return [record for record in records if record["bytes"] >= LARGE and aim(record)]


def slow(records: list[Record]) -> list[Record]:
    """The large cases that take longer than they should."""
    return [record for record in large(records) if over_copy(record) > (aim(record) or math.inf)]


def behind(records: list[Record]) -> list[Record]:
    """The cases in which a peer is ahead by more than noise."""
    peers = ((record, fastest(record)[1]) for record in records)
    return [record for record, us in peers if record["us"]["ours"] > us + max(0.02 * us, 0.3)]


def families(records: list[Record]) -> str:
    """How each family does against its aims."""
    rows = []
    for name in measured(records):
        members = [record for record in records if family(record["op"]) == name]
        mean = geometric_mean([fastest(record)[1] / record["us"]["ours"] for record in members])
        goal = f" (aim {PEER_AIMS[name]})" if name in PEER_AIMS else ""
        limits = " or ".join(f"{limit:.2f}" for limit in sorted({aim(record) or 0 for record in members}))
        moved = large(members)
        kept = f"{len(moved) - len(slow(moved))} of {len(moved)} (within {limits} x)" if moved else ""
        rows.append(f"| {name} | {len(members)} | {mean:.2f} x{goal} | {kept} | {len(behind(members))} |")
    return grid("| | cases | speed-up over the fastest peer | large cases near a copy | a peer is ahead |", rows)


def of_commits(ops: Record) -> str:
    """The commits of the timed kernels and, where there are several, how many cases are of each."""
    commits = [record.get("commit", ops["meta"]["commit"]) or "unknown" for record in ops["records"]]
    counts = collections.Counter(commit[:7] for commit in commits).most_common()
    if len(counts) == 1:
        return f"of commit {counts[0][0]}"
    return "of commits " + ", ".join(f"{commit} ({count})" for commit, count in counts)


def find(records: list[Record], op: str, shape: list[int]) -> list[Record]:
    return [r for r in records if (r["op"], r["shape"], r["dtype"]) == (op, shape, "bf16")]


def one(records: list[Record], op: str, shape: list[int]) -> Record:
    found = find(records, op, shape)
    if len(found) != 1:
        raise ValueError(f"expected one record of {op} {shape} in bf16, got {len(found)}")
    return found[0]


def of_ops(ops: Record, shown: Shown, form: str) -> tuple[str, str]:
    """A table of some ops, beside a copy and their peers, and the sentence before it."""
    peers = {key: name for key, name in PEERS.items() if any(r["us"].get(key) for r in ops["records"])}
    rows = [{**one(ops["records"], op, shape), "name": name} for op, shape, name in shown]
    meta, of_peers = ops["meta"], across(f"{{us.@?:{form}}}", peers)
    head = f"| op | shape | this package | copy of the same bytes | {across('@', peers.values())} | plain torch |"
    row = f"| {{name}} | {{shape}} | **{{us.ours:{form}}}** | {{us.copy:{form}}} | {of_peers} | {{us.eager?:{form}}} |"
    return (
        f"The ops on one {meta['device']}, torch {meta['torch']}, bf16, in µs:",
        table(head, row, rows, shape=sizes),
    )


@block("skills/cuda-kernels/references/h100-optimization-guide.md", "rows", shown=SKILL_ROWS)
@block("skills/cuda-kernels/references/diffusers-h100.md", "shapes", shown=SKILL_SHAPES)
def skill_ops(shown: Shown, file: str = "h200-ops") -> str:
    """The ops of a page of skills/, as far as the file has them."""
    ops = load(file)
    there = [row for row in shown if find(ops["records"], *row[:2])]
    missing = [name for op, shape, name in shown if (op, shape, name) not in there]
    return text(
        *of_ops(ops, there, ".1f"),
        f"All cases, {of_commits(ops)}: `benchmarks/results/{file}.json`.",
        f"Not in that file: {', '.join(missing)}." if missing else "",
    )


@block("skills/cuda-kernels/references/h100-optimization-guide.md", "h100")
def on_h100() -> str:
    """What was measured on an H100: rows, attention and a step of FLUX.1."""
    slug = "h100-80gb-hbm3"
    ops = records_of(f"{slug}-ops")
    head = "| model | | ms | x diffusers | x torch.compile | error |"
    row = (
        "| {model}, {shape} | {config} | {step_ms:.1f} | {gain.baseline:.2f} | {gain.compile:.2f} | "
        "{error_vs_fp32?:.2e} |"
    )
    return text(
        skill_ops([row for row in (*SKILL_ROWS, *SKILL_SHAPES) if find(ops, *row[:2])], f"{slug}-ops").rstrip(),
        f"Self-attention in ms (`benchmarks/results/{slug}-attention.json`):",
        by_shape(*speeds(["ours", "cudnn", "flash2"]), records_of(f"{slug}-attention", mask=None)),
        f"One forward in bf16 with random weights (`benchmarks/results/{slug}-models.json`):",
        table(head, row, in_order(by_model(f"{slug}-models")), model=model_of, config=config_of),
    )


@block("docs/measured/ops.md", "ops")
def ops_table() -> str:
    """The ops one by one, with their families and the cases that are slower than a peer or an aim."""
    ops = load("h200-ops")
    records = ops["records"]
    (host,) = [r["host_us"] for r in records if r["host_us"]]
    missing = "".join(f" {PEERS[key]} was not installed." for key in ops["meta"]["missing"])
    losses, slower = "| case | this package | the fastest peer | |", "| case | times the copy | aim |"
    row = "| {case} | {us.ours:.1f} | {fastest.1:.1f} | {fastest.0} |"
    return text(
        *of_ops(ops, SHOWN, ".0f"),
        f"All {len(records)} cases, {of_commits(ops)}, are in {link('h200-ops')}.{missing} One `rmsnorm` of 8x2048 "
        f"costs the host {host['ours']} µs, `F.rms_norm` {host['native']} µs.",
        '<img src="../benchmarks/results/h200-ops-floor.png" width="100%" '
        'alt="Times of this package and of its fastest peer over the time of a copy, by size">',
        families(records),
        "Speed-up: geometric mean of the fastest peer's time over this package's, of all cases in bf16, fp16 and fp32. "
        "Large: 40 MB or more. A peer is ahead: by more than 2 % and 0.3 µs. The trials that chose "
        f"constants of the kernels, by question: {link('h200-tuning')}.",
        f"<details><summary>The {len(behind(records))} cases in which a peer is ahead, in µs</summary>",
        table(losses, row, behind(records), case=case_name, fastest=lambda record: list(fastest(record))),
        "</details>",
        f"<details><summary>The {len(slow(records))} large cases that take longer than their aim</summary>",
        table(slower, "| {case} | {us.ours/us.copy:.3f} | {aim:.2f} |", slow(records), case=case_name, aim=aim),
        "</details>",
        "<details><summary>How many times as fast as each peer</summary>",
        '<img src="../benchmarks/results/h200-ops-peers.png" width="100%" alt="How many times as fast as each peer">',
        "</details>",
    )


@block("docs/ops.md", "index")
def by_index() -> str:
    """The modulated ops by index, beside the same ops with one modulation."""
    records = [r for r in records_of("h200-row-index", question="") if "copy" in r["us"]]
    cells = "{us.ours/us.copy:.2f} | {us.one modulation/us.copy:.2f}"
    return text(
        f"Time over a copy of the bytes on one {load('h200-row-index')['meta']['device']} ({link('h200-row-index')}):",
        table(
            "| op | tokens x columns | by index | with one modulation |",
            f"| `{{op}}` | {{tokens}} | {cells} |",
            records,
            tokens=lambda record: "x".join(map(str, record["shape"][1:])),
        ),
    )


@block("docs/measured/fp8.md", "ops")
def quantising() -> str:
    """Ops that quantise, beside a copy and torch.compile."""
    ops = load("h200-ops")
    records = [record for record in ops["records"] if family(record["op"]) == QUANTISED]

    def op(record: Record) -> str:
        return record["op"].removeprefix("quantised ")

    shown = [one(records, op, shape) for op, shape in QUANTISING]
    head = "| op | shape | this package | copy | ratio | torch.compile |"
    row = "| {op} | {shape} | **{us.ours:.1f}** | {us.copy:.1f} | {us.ours/us.copy:.2f} | {us.compile:.1f} |"
    return text(
        f"Ops that quantise, beside a copy of the same bytes, {of_commits({**ops, 'records': records})} "
        f"({link('h200-ops')}):",
        table(head, row, shown, op=op, shape=sizes),
        f"Of {len(large(records))} cases that move 40 MB or more, {len(slow(records))} take longer than "
        f"{AIMS['quant']} times the copy; [the ops](measured/ops.md) lists them.",
    )
