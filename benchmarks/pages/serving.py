"""docs/serving.md: what runs under the versions that engines pin, and the load and faults under Ray."""

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
