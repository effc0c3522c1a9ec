"""docs/measured/guarantees.md: fuzz-*.json, sanitize-*.json, suites-*.json and mutations-*.json."""

import re
import sys

from pages.writing import REPOSITORY, Record, across, block, device_of, grid, link, load, text

sys.path.append(str(REPOSITORY / "tests"))

from mutations import MUTATIONS

DTYPES = ["float32", "float16", "bfloat16"]
# Ops that take exponentials of sums, so that no number of ulps bounds their errors.
EXPONENTIAL = {"attention", "qk_norm_cross_attention"}
# The runs of tests/gpu.py, in the order of the table. Other runs follow under their own names.
SUITES = {
    "tests": "this GPU's code",
    "models": "models",
    "forced": "every kernel and geometry",
    "large": "more than 2³¹ elements",
    "devices": "two GPUs",
}


def source(file: str) -> str:
    meta = load(file)["meta"]
    commit = str(meta.get("commit") or "unknown")[:9]
    return f"{link(file)}: {device_of(meta)}, torch {meta['torch']}, commit {commit}, {meta['date'][:10]}."


@block("docs/measured/guarantees.md", "fuzz-cpu", file="fuzz-cpu")
@block("docs/measured/guarantees.md", "fuzz-gpu", file="fuzz-h200")
def fuzz(file: str) -> str:
    """Cases, failures, and the largest errors of each op and dtype."""
    result = load(file)
    records = {(record["op"], record["dtype"]): record for record in result["records"]}

    def error(record: Record | None) -> str:
        if record is None:
            return ""
        op = record["op"]
        if record["elements"] == 0:  # checked in another way than against a bound
            return "one rounding" if op.endswith("_quant") or op == "quantize_rows" else "as torch"
        share = f"({100 * record['share']:.0f} %)"
        in_ulps = op not in EXPONENTIAL and (record["ulp"] or not record["share"])
        return f"{record['ulp']:.2f} {share}" if in_ulps else share

    rows = []
    for op in sorted({op for op, _ in records}):
        cases = sum(records[op, dtype]["cases"] for dtype in DTYPES if (op, dtype) in records)
        rows.append([f"`{op}`", *(error(records.get((op, dtype))) for dtype in DTYPES), str(cases)])
    elements = sum(record["elements"] for record in records.values())
    repeats = sum(record["repeats"] for record in records.values())
    halves = [record for record in records.values() if record["dtype"] != "float32"]
    different, compared = (sum(record[key] for record in halves) for key in ("eager_different", "eager_elements"))
    found = f"{len(result['failures'])} failure{'s' * (len(result['failures']) != 1)}"
    return text(
        f"{source(file)} **{result['cases']} cases, {found}**, {elements / 1e6:.0f} million numbers compared with "
        f'fp64. {repeats} repeated calls, whole or one batch alone, gave the same bits. With `rounding="eager"`, '
        "and in the ops of videos, which always round as plain torch does, "
        f"{different} of {compared / 1e6:.0f} million 16-bit numbers differ from plain torch's.",
        grid(f"| op | {across('@: ulp (part of the bound)', DTYPES)} | cases |", rows),
    )


@block("docs/measured/guarantees.md", "sanitizers")
def sanitizers() -> str:
    """What the tools of compute-sanitizer found."""
    result = load("sanitize-h200")
    meta, rows = result["meta"], []
    all_processes = meta["processes"] // len(result["tools"])
    for tool, processes in result["tools"].items():
        faults = [process["faults"] for process in processes.values()]
        tests = sum(process["tests"] for process in processes.values())
        seconds = [process["seconds"] for process in processes.values()]
        found = "did not finish" if None in faults else str(sum(faults))
        ended, took = f"{len(processes)} of {all_processes}", f"{sum(seconds):.0f} s ({max(seconds):.0f} s)"
        rows.append([tool, ended, str(tests), found, took])
    part = f" **A part of the tests alone** (`-k '{meta['only']}'`)." if meta["only"] else ""
    return text(
        f"{source('sanitize-h200')} compute-sanitizer {meta['sanitizer']}. All four tools: {meta['seconds']:.0f} s, "
        f"beside other tests.{part}",
        grid("| tool | processes that ended | tests | faults | their time (the longest's) |", rows),
    )


@block("docs/measured/guarantees.md", "suites")
def suites() -> str:
    """How the tests ended on a GPU, by run and file."""
    result = load("suites-h200")
    rows = []
    for suite in [*filter(result["suites"].get, SUITES), *sorted(result["suites"].keys() - SUITES.keys())]:
        for file, numbers in sorted(result["suites"][suite]["files"].items()):
            cells = [str(numbers.get(key, 0)) for key in ("passed", "failed", "skipped")]
            unfinished = ", **which did not finish**" if numbers.get("status", 0) is None else ""
            rows.append([SUITES.get(suite, suite), f"`{file}.py`{unfinished}", *cells])
    seconds = result["meta"]["seconds_of_calls"]
    took = ", ".join(f"{call:.0f} s" for call in seconds)
    return text(
        f"{source('suites-h200')} `tests/gpu.py` ran these in {len(seconds)} calls ({took}).",
        grid("| run | tests | passed | failed | skipped |", rows),
    )


@block("docs/measured/guarantees.md", "mutations")
def mutations() -> str:
    """Each defect with the first test that fails: in CPU sources, in CUDA sources, in what is not compiled."""
    rows, counts = [[mutation.defect, f"`{mutation.file}`"] for mutation in MUTATIONS], []
    for backend in ("cpu", "cuda", "tools"):
        result = load(f"mutations-{backend}")
        found = {record["defect"]: record for record in result["records"]}
        planted = [mutation for mutation in MUTATIONS if backend in mutation.backends]
        for mutation, row in zip(MUTATIONS, rows, strict=True):
            test = found.get(mutation.defect, {}).get("caught_by", "not run yet")
            told = f"`{test}`" if test and "test_" in test else test or "**nothing**"
            row.append(told if mutation in planted else "")
        caught = sum(bool(found.get(mutation.defect, {}).get("caught_by")) for mutation in planted)
        commits = ", ".join(sorted({re.sub("^([0-9a-f]{9})[0-9a-f]+", r"\1", r["commit"]) for r in found.values()}))
        where = f"{link(f'mutations-{backend}')}: {result['meta']['device']}, commit {commits}"
        counts.append(f"- {len(planted)} defects, **{caught} caught**, {where}")
    head = f"| defect | planted in | {across('first test that fails: @', ('CPU', 'CUDA', 'tools'))} |"
    return text("\n".join(counts), grid(head, rows))
