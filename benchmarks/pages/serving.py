"""docs/serving.md: what runs under the versions that engines pin, and the load and faults under Ray."""

from pages.names import ENGINE_CONFIGS
from pages.writing import block, grid, link, load, records_of, text


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name.rpartition('.')[2]}`" for name in names) or "none"


@block("docs/serving.md", "versions")
def versions() -> str:
    rows = []
    for r in load("engine-versions")["records"]:
        name = " ".join(filter(None, (r["engine"], r.get("version"))))
        rows.append(
            [
                name,
                r["diffusers"],
                r["transformers"],
                r["kernels"],
                str(r["optimized"]),
                _names(r["stock"]),
                _names([name for name in r["absent"] if name.endswith("Block")]),
            ]
        )
    table = grid(
        "| versions of | diffusers | transformers | kernels | known classes that are replaced | that stay stock "
        "| blocks that do not exist there |",
        rows,
    )
    return text(table)


@block("docs/measured/serving.md", "load")
def load_and_faults() -> str:
    meta = load("cpu-serving")["meta"]
    (accepted,) = records_of("cpu-serving", what="accepted")
    rows = [["good requests", str(accepted["sent"]), f"{accepted['right']} with the right clip"]]
    memory = []
    for record in load("cpu-serving")["records"]:
        if "refused" in record:
            rows.append([record["what"], str(record["sent"]), f"{record['refused']} refused with the reason"])
        elif "growth" in record:
            memory.append(f"{record['what'].removeprefix('memory of ')} {record['growth']:.3f} x")
    return text(
        f"{meta['requests']} requests by {accepted['clients']} clients, of {accepted['shapes']} shapes, to 2 replicas "
        f"of a tiny model on a CPU ({link('cpu-serving')}). After half of them one replica was killed, with "
        f"{accepted['in_flight_at_kill']} requests in flight; {accepted['sent_again']} were sent to another replica, "
        f"and {accepted['sent'] - accepted['answered']} were lost.",
        grid("| requests | sent | answered |", rows),
        f"Resident memory from request {meta['flat_from']} on, the most beside the first sample: {', '.join(memory)}.",
    )


@block("docs/measured/serving.md", "engines")
def engines() -> str:
    """Requests to the pipelines that engines load."""
    meta, records = load("h200-engines")["meta"], records_of("h200-engines")
    plain = {r["engine"]: r["request_ms"] for r in records if r["config"] == "plain"}
    rows = [
        [
            f"{r['engine'].replace('_', '-')} {r['version']}",
            ENGINE_CONFIGS[r["config"]],
            f"{r['request_ms']:.0f}",
            f"{plain[r['engine']] / r['request_ms']:.2f}",
            "the same bits" if r["same_image"] else "another image",
        ]
        for r in records
    ]
    double, single = meta["blocks"]
    size = f"{records[0]['height']}x{records[0]['width']}"
    return text(
        f"An image of {size} in {records[0]['steps']} steps by the first {double} double and {single} single blocks of "
        f"{meta['model']} with random weights, on one {meta['device']} (`python benchmarks/engines.py`, "
        f"{link('h200-engines')}). The engine's own class has loaded the pipeline from a folder, and the plug-in has "
        "optimized it. The last column compares the image with one that a program of its own makes with `optimize`:",
        grid("| engine | `LTX_KERNELS_OPTIMIZE` | request, ms | x without | the image |", rows),
    )
