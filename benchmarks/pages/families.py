"""The model families that the built package knows, with what was measured of them in several files."""

import functools
import importlib
import pkgutil
import runpy
from types import ModuleType
from typing import Any

from result_files import load_package

from pages.llm import layers_of_whole_models
from pages.names import AUTOENCODERS, LANGUAGE_MODELS, MODELS, first_blocks
from pages.vae import CODERS
from pages.writing import REPOSITORY, Record, between, block, grid, records_of, text

LIBRARIES = ("diffusers", "transformers")


@functools.cache
def families_of(library: str) -> dict[str, ModuleType]:
    """The modules of the built package that each know one family of a library's models, by name.

    `norms.py` is not among them: it knows norms and activations of any model.
    """
    ltx, _ = load_package()
    package = importlib.import_module(f"{ltx.__name__}.integrations.{library}")
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__) if not info.name.startswith("_"))
    return {name: importlib.import_module(f"{package.__name__}.{name}") for name in names if name != "norms"}


def first_sentence(module: ModuleType) -> str:
    return " ".join((module.__doc__ or "").split("\n\n")[0].split())


def path_of(library: str, family: str) -> str:
    return f"torch-ext/ltx_kernels/integrations/{library}/{family}.py"


@block("docs/models.md", "diffusers", library="diffusers")
@block("docs/models.md", "transformers", library="transformers")
def known_families(library: str) -> str:
    """The model families that `optimize` knows whole, from the first sentence of each family's file."""
    families = families_of(library).items()
    lines = [f"- {first_sentence(module)} ([{name}.py](../{path_of(library, name)}))" for name, module in families]
    return text("\n".join(lines))


def _blocks(module: ModuleType) -> list[Any]:
    """What a family says about transformer blocks; of a family without any, all that it replaces."""
    blocks = [known for known in module.ENTRIES if type(known).__name__ == "Block"]
    return blocks or list(module.ENTRIES)


def _level(known: Any) -> str:
    """The level of `optimize` from which on a description counts."""
    return (known.entry() if hasattr(known, "entry") else known).level


def _has_fp8(known: Any) -> bool:
    return any(getattr(known, name, None) for name in ("attentions", "feed_forwards", "linears"))


@block("docs/models.md", "left in bf16")
def left_in_bf16() -> str:
    """The linear layers of each family's blocks that fp8 leaves in bf16, and what memory="low" stores in fp8."""
    rows = []
    for library in LIBRARIES:
        for name, module in families_of(library).items():
            known = [one for one in _blocks(module) if _has_fp8(one)]
            if known:
                entries = [one.entry() for one in known]
                cells = [
                    ", ".join(dict.fromkeys(f"`{pattern}`" for entry in entries for pattern in of(entry))) or "none"
                    for of in (
                        lambda entry: entry.fp8_skip,
                        lambda entry: entry.fp8_skip_low,
                        lambda entry: entry.weight_only,
                    )
                ]
                rows.append([f"[{name}](../{path_of(library, name)})", *cells])
    low = 'with `memory="low"`'
    head = f"| family | layers of its blocks that stay in bf16 | {low} | layers of the modulation, in fp8 {low} |"
    return text(grid(head, rows))


def _gains(found: dict[str, Record], stock: str, key: str) -> dict[str, float]:
    """How many times as fast as its `stock` configuration a model is, by precision, as far as both were timed."""
    configs = {"bf16": "kernels", "fp8": "kernels_fp8"}
    return {
        precision: found[stock][key] / found[config][key]
        for precision, config in configs.items()
        if {stock, config} <= found.keys()
    }


def measured_gains() -> dict[str, list[str]]:
    """What README.md says of the speed of each family's models, as far as they were timed."""
    gains: dict[str, list[str]] = {}

    def of_configs(file: str, **where: Any) -> dict[str, Record]:
        records = records_of(file, **where)
        found = {record["config"]: record for record in records}
        if len(found) < len(records):
            raise ValueError(f"{file} {where}: expected one record of each configuration, got {len(records)} in all")
        return found

    def add(family: str, title: str, file: str, stock: str, key: str, **where: Any) -> None:
        found = of_configs(file, **where)
        if times := _gains(found, stock, key):
            cell = ", ".join(f"{precision} {gain:.2f} x" for precision, gain in times.items())
            gains.setdefault(family, []).append(f"{title}{first_blocks(found[stock])}: {cell}")

    add("ltx", "2B, a step of 49 frames", "h200-ltx", "baseline", "step_ms", frames=49)
    for model, (title, family) in MODELS.items():
        add(family, title, "h200-models", "baseline", "step_ms", model=model)
    for half, coder in CODERS.items():
        for frames, what in (49, "49 frames"), (1, "images"):
            of_family: dict[str, list[float]] = {}
            for model, (_, decoders) in AUTOENCODERS.items():
                where = {"model": model, "half": half, "frames": frames, "dtype": "bf16"}
                for height in dict.fromkeys(record["height"] for record in records_of("h200-vae", **where)):
                    found = of_configs("h200-vae", **where, height=height)
                    of_family.setdefault(decoders, []).extend(_gains(found, "stock", f"{half}_ms").values())
            for decoders, times in of_family.items():
                if times:
                    family = f"{decoders}_encoder" if half == "encode" else decoders
                    gains.setdefault(family, []).append(f"{coder}s, {what}: bf16 {between(times)} x")
    layers = layers_of_whole_models(records_of("h200-llm"))
    for model, (title, family) in LANGUAGE_MODELS.items():
        whole = {"model": model, "layers": layers.get(model)}
        for key, what in (
            ("prefill_ms", "prompt of 8192 tokens"),
            ("decode_ms", "token"),
            ("first_decode_ms", "token at a length that is new to the process"),
        ):
            add(family, f"{title}, {what}", "h200-llm", "eager", key, **whole, tokens=8192, batch=1)
    return gains


def row_of(family: str) -> str:
    """What the families of one row of the table have in common.

    It is the first word of their files' names, and of an autoencoder's decoder and encoder all but that word.
    """
    return family.removesuffix("_encoder") if family.startswith("vae_") else family.split("_")[0]


@block("docs/models.md", "supported")
def supported() -> str:
    """The families by what is replaced in them, whether fp8 knows them, and what was measured."""
    gains = measured_gains()
    rows = []
    for library in LIBRARIES:
        sharing: dict[str, dict[str, ModuleType]] = {}
        for name, module in families_of(library).items():
            sharing.setdefault(row_of(name), {})[name] = module
        for modules in sharing.values():
            blocks = [known for module in modules.values() for known in _blocks(module)]
            classes = dict.fromkeys(f"`{known.split('.')[-1]}`" for one in blocks for known in one.classes)
            rows.append(
                [
                    "; ".join(first_sentence(module).rstrip(".").partition(":")[0] for module in modules.values()),
                    ", ".join(classes),
                    ", ".join(sorted({_level(known) for known in blocks})),
                    "yes" if any(map(_has_fp8, blocks)) else "no",
                    "; ".join(gain for name in modules for gain in gains.get(name, [])) or "not measured",
                ]
            )
        if library == "diffusers":
            left = left_at_norm_level()
            known = ", ".join(f"`{name}`" for name in left["WELL_KNOWN"])
            others = len(left["LEFT"]) - len(left["WELL_KNOWN"])
            names = f"{known} and {others} other [models of diffusers](#left-at-norm-level)"
            rows.append([names, "norms and activations alone", "norms", "no", "not measured"])
    head = "| models | classes that get another forward | level | fp8 | times as fast as stock, on one H200 |"
    shallow = any(", first" in gain for of_family in gains.values() for gain in of_family)
    note = '"First" blocks: the time of a shallow model, not of the whole one.' if shallow else ""
    return text(grid(head, rows), note)


def left_at_norm_level() -> dict[str, Any]:
    """What tests/families/left.py lists."""
    return runpy.run_path(str(REPOSITORY / "tests/families/left.py"))


@block("docs/models.md", "left")
def left_models() -> str:
    """The models of diffusers whose blocks stay stock, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_at_norm_level()["LEFT"].items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    rows = [[reason, ", ".join(sorted(names))] for reason, names in by_reason.items()]
    return text(grid("| why | models |", rows))
