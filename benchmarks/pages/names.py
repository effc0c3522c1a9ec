"""The names of models and configurations for people, in the order of the tables."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from records import AUTOTUNED

from pages.writing import Record, records_of

# The configurations of benchmarks/ltx.py and models.py.
CONFIGS = {
    "baseline": "diffusers",
    "compile": "torch.compile",
    AUTOTUNED: "torch.compile, max-autotune",
    "kernels": "`ltx.optimize(pipe)`",
    "kernels_compile": "`ltx.optimize(pipe)` and torch.compile",
    "kernels_fp8": '`ltx.optimize(pipe, precision="fp8")`',
    "kernels_fp8_low": '`ltx.optimize(pipe, memory="low")`',
    "kernels_fp8_beside": '`ltx.optimize(pipe, precision="fp8", stock_weights="beside")`',
    "kernels_fp8_compile": '`ltx.optimize(pipe, precision="fp8")` and torch.compile',
    "torchao_fp8_compile": "torchao's fp8 and torch.compile",
    "kernels_int8": '`ltx.optimize(pipe, attention="int8")`',
    "kernels_fp8_int8": '`ltx.optimize(pipe, precision="fp8", attention="int8")`',
}
COMPILED = ("compile", AUTOTUNED)  # the modes of torch.compile alone
# The configurations of benchmarks/quality.py beside these.
QUALITY_CONFIGS = {
    **CONFIGS,
    "float32": "diffusers in float32",
    "stock": "diffusers",
    "stock_fbc": "diffusers, with FirstBlockCache",
    "kernels_fbc": "`ltx.optimize(pipe)`, with FirstBlockCache",
    "kernels_fp8_fbc": '`ltx.optimize(pipe, precision="fp8")`, with FirstBlockCache',
}
# The configurations of benchmarks/engines.py.
ENGINE_CONFIGS = {"plain": "without", "plugin": "`{}`", "plugin_fp8": '`{"precision": "fp8"}`'}
# The configurations of benchmarks/clip.py and parallel.py.
CLIP_CONFIGS = {
    "stock": "diffusers",
    "compile": "torch.compile of these three",
    "kernels": "`optimize(graphs=False)`",
    "kernels_graphs": "`optimize(graphs=True)`",
    "kernels_auto": "`optimize`",
    "kernels_fp8": '`optimize(precision="fp8", graphs=False)`',
    "kernels_fp8_graphs": '`optimize(precision="fp8", graphs=True)`',
    "kernels_fp8_auto": '`optimize(precision="fp8")`',
}
# Of models, images and clips: steps.options_of.
FP8_PEAKS = (
    'The rows in fp8 are with `stock_weights="beside"`: their peaks hold the stock weights too. '
    "[Memory](measured/fp8.md#memory) has the peaks of the default."
)


class Model(NamedTuple):
    """A model's name, and the file of the family that knows its blocks."""

    title: str
    family: str


# The models of benchmarks/model_shapes.py.
MODELS = {
    "ltx13b": Model("LTX-Video 13B", "ltx"),
    "ltx2": Model("LTX-2 19B", "ltx2"),
    "ltx23": Model("LTX-2.3", "ltx2"),
    "flux": Model("FLUX.1 dev", "flux"),
    "chroma": Model("Chroma", "chroma"),
    "flux2": Model("FLUX.2 dev", "flux2"),
    "wan": Model("Wan 2.1 14B", "wan"),
    "wan_ti2v": Model("Wan 2.2 TI2V 5B", "wan"),
    "qwen": Model("Qwen-Image", "qwenimage"),
    "qwen21": Model("Qwen-Image 2.1", "qwenimage21"),
    "sd35": Model("Stable Diffusion 3.5 large", "sd3"),
    "auraflow": Model("AuraFlow", "auraflow"),
    "hidream": Model("HiDream-I1", "hidream"),
    "hyvideo15": Model("HunyuanVideo 1.5", "hunyuan_video15"),
    "cogvideox": Model("CogVideoX-5B", "cogvideox"),
    "cosmos3": Model("Cosmos 3", "cosmos3"),
    "mochi": Model("Mochi 1", "mochi"),
    "flux3": Model("FLUX.3", "flux3"),
    "zimage": Model("Z-Image", "z_image"),
    "krea2": Model("Krea 2", "krea2"),
    "ernie_image": Model("ERNIE-Image", "ernie_image"),
    "kandinsky5": Model("Kandinsky 5 Lite", "kandinsky5"),
    "minimax_h3": Model("MiniMax H3", "minimax_h3"),
    "sdxl": Model("SDXL", "basic_transformer"),
    "pixart": Model("PixArt-Sigma", "basic_transformer"),
    "lumina2": Model("Lumina-Image 2.0", "lumina2"),
    "ideogram4": Model("Ideogram 4", "ideogram4"),
    "ace_step": Model("ACE-Step 1.5", "ace_step"),
    "bria_fibo2": Model("Bria FIBO 2", "bria_fibo2"),
}
# The models of benchmarks/llm.py.
LANGUAGE_MODELS = {
    "llama-8b": Model("Llama 8B", "llama"),
    "mistral-7b": Model("Mistral 7B", "llama"),
    "qwen3-8b": Model("Qwen3 8B", "qwen3"),
    "gemma3-12b": Model("Gemma 3 12B", "gemma"),
    "falcon-7b": Model("Falcon 7B", "falcon"),
}
# The autoencoders of benchmarks/vae.py, with the family of their decoders. The family of their encoders ends in
# "_encoder".
AUTOENCODERS = {
    "ltx090": Model("LTX-Video 0.9.0", "vae_ltx"),
    "ltx091": Model("LTX-Video 0.9.1", "vae_ltx"),
    "ltx": Model("LTX-Video 0.9.5", "vae_ltx"),
    "ltx2": Model("LTX-2.0", "vae_ltx"),
    "ltx23": Model("LTX-2.3", "vae_ltx"),
    "wan": Model("Wan 2.1", "vae_wan"),
    "wan22": Model("Wan 2.2", "vae_wan"),
    "qwen": Model("Qwen-Image", "vae_wan"),
    "flux": Model("FLUX.1", "vae_kl"),
    "flux2": Model("FLUX.2", "vae_kl"),
    "flux2_small": Model("FLUX.2, small decoder", "vae_kl"),
}


def config_of(record: Record) -> str:
    return CONFIGS[record["config"]]


def model_of(record: Record) -> str:
    return MODELS[record["model"]].title


def first_blocks(record: Record) -> str:
    """What a table writes after the name of a model that was timed with its first blocks alone."""
    return f", first {max(record['blocks'].values())} blocks" if record.get("shallow", False) else ""


def first_step(record: Record) -> str:
    """How long a configuration's first step took, where nothing else used the GPU meanwhile."""
    return f"{record['first_step_s']:.1f} s" if "first_step_s" in record else ""


def by_config(records: Sequence[Record]) -> dict[str, Record]:
    """Records of one model and shape by their configuration, in the order of the tables.

    Each gets a `gain`: how many times as fast as every other configuration it is.
    """
    ms = {record["config"]: record["step_ms"] for record in records}
    gains = {config: {other: ms[other] / ms[config] for other in ms} for config in ms}
    found = {record["config"]: {**record, "gain": gains[record["config"]]} for record in records}
    return {config: found[config] for config in CONFIGS if config in found}


def by_model(file: str) -> dict[str, dict[str, Record]]:
    """The records of each model by configuration."""
    return {model: by_config(records_of(file, model=model)) for model in MODELS}


def in_order(groups: Mapping[Any, Mapping[str, Record]]) -> list[Record]:
    """The records of all models or shapes, one after the other."""
    return [record for of_config in groups.values() for record in of_config.values()]
