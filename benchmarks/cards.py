"""Computes what the weights of each transformer and of its text encoder take in memory, from their configurations.

    python tools/build.py
    python benchmarks/cards.py [--models flux wan] [--output PATH]

The models are made on "meta", so that nothing is computed and any machine does it in minutes. `bf16_gb` is all
parameters and buffers as diffusers loads them, `fp8_gb` with precision="fp8", and `low_gb` with memory="low": an fp8
weight has one byte for each number and a float32 scale for each row. `text_encoder_gb` is the largest text encoder in
bf16. Peaks of a step are measured by benchmarks/memory.py; docs/checkpoints.md joins both.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from model_shapes import MODELS
from result_files import REPOSITORY, common_meta, load_package, write
from torch import nn

sys.path.insert(0, str(REPOSITORY / "examples"))
from image_pipeline import GATED, T5_XXL
from llm_shapes import SHAPES

# The largest text encoder of each model: its name, its class, its configuration's, and what the released one changes.
T5_RELEASED = {"vocab_size": 32128, **T5_XXL, **GATED}
ENCODERS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "t5": ("T5-XXL", "T5EncoderModel", "T5Config", T5_RELEASED),
    "umt5": ("UMT5-XXL", "UMT5EncoderModel", "UMT5Config", {**T5_RELEASED, "vocab_size": 256384}),
    "gemma": ("Gemma 3 12B", "Gemma3TextModel", "Gemma3TextConfig", SHAPES["gemma3-12b"][1]),
}
ENCODER_OF = {
    **dict.fromkeys(("ltx13b", "flux", "chroma", "sd35", "cogvideox", "mochi"), "t5"),
    **dict.fromkeys(("wan", "wan_ti2v"), "umt5"),
    **dict.fromkeys(("ltx2", "ltx23"), "gemma"),
}


def on_meta(make: Any, config: Any) -> nn.Module:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model: nn.Module = make(config)
    finally:
        torch.set_default_dtype(default)
    return model


def size_of(model: nn.Module, in_fp8: set[str]) -> int:
    """The bytes of all parameters and buffers, with these linear layers in fp8."""
    size = sum(tensor.nbytes for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())
    for name in in_fp8:
        weight = model.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor)
        size += weight.numel() + 4 * len(weight) - weight.nbytes
    return size


def sizes_of(model: nn.Module, ltx: Any) -> dict[str, int]:
    """The bytes of a model's weights in bf16, in fp8 and with memory="low"."""
    layers = ltx.integrations.selection.layers_for_fp8
    taken = {"bf16_gb": set(), "fp8_gb": layers(model, None, False), "low_gb": layers(model, None, True)}
    return {key: size_of(model, in_fp8) for key, in_fp8 in taken.items()}


def record(name: str, ltx: Any) -> dict[str, Any]:
    sizes = sizes_of(MODELS[name].construct(False, torch.bfloat16, "meta"), ltx)
    found: dict[str, Any] = {"model": name, **{key: round(size / 2**30, 3) for key, size in sizes.items()}}
    encoder = ENCODER_OF.get(name)
    if encoder is not None:
        title, cls, config, options = ENCODERS[encoder]
        made = on_meta(getattr(transformers, cls), getattr(transformers, config)(**options))
        found |= {"text_encoder": title, "text_encoder_gb": round(size_of(made, set()) / 2**30, 3)}
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks/results/cards.json")
    options = parser.parse_args(arguments)
    ltx, metadata = load_package()
    records = []
    for name in options.models:
        records.append(record(name, ltx))
        print(*records[-1].values(), flush=True)
    write(options.output, {**common_meta(metadata, "cpu"), "transformers": transformers.__version__}, records)
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
