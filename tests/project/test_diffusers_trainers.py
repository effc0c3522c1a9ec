"""diffusers' own LoRA trainers, unchanged, on tiny pipelines: optimized models train as stock ones do.

The scripts come from examples/dreambooth of the folder that the environment variable DIFFUSERS names.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

for package in ("accelerate", "diffusers", "peft", "transformers"):
    pytest.importorskip(package)
import diffusers  # noqa: E402
import transformers  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from diffusers.loaders import PeftAdapterMixin  # noqa: E402
from families import random_  # noqa: E402
from helpers.diffusers_models import BLOCK_NAMES  # noqa: E402
from helpers.trainers import forget_accelerator  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from test_pipelines_by_default import KNOWN, image_vae, qwen_vae  # noqa: E402
from tokenizers import pre_tokenizers  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "without_cudnn_attention", "stays_inside")

STEPS, WIDTH = 2, 32
SYMBOLS = sorted(pre_tokenizers.ByteLevel.alphabet())
HEADS = {"num_attention_heads": 2, "vocab_size": 600}


def table(*more: str) -> dict[str, int]:
    return {symbol: i for i, symbol in enumerate([*SYMBOLS, *more])}


def clip() -> dict[str, Any]:
    config = transformers.CLIPTextConfig(hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=1, **HEADS)
    words = table(*(f"{symbol}</w>" for symbol in SYMBOLS), "<|startoftext|>", "<|endoftext|>")
    return {
        "text_encoder": transformers.CLIPTextModel(config),
        "tokenizer": transformers.CLIPTokenizer(words, [], model_max_length=77),
    }


def t5() -> dict[str, Any]:
    config = transformers.T5Config(d_model=WIDTH, d_kv=16, d_ff=32, num_layers=1, num_heads=2, vocab_size=600)
    pieces = [(symbol, -1.0) for symbol in ("<pad>", "</s>", "<unk>", "▁", *SYMBOLS)]
    return {
        "text_encoder_2": transformers.T5EncoderModel(config),
        "tokenizer_2": transformers.T5TokenizerFast(pieces, extra_ids=0, model_max_length=64),
    }


def qwen() -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 1, "num_key_value_heads": 2, **HEADS}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": WIDTH}
    config = transformers.Qwen2_5_VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=vision)
    return {
        "text_encoder": transformers.Qwen2_5_VLForConditionalGeneration(config),
        "tokenizer": transformers.Qwen2Tokenizer(table("<|endoftext|>", "<|im_start|>", "<|im_end|>"), []),
    }


@dataclass(frozen=True)
class Trainer:
    """script: Its name in examples/dreambooth. pipeline: What it loads. family: Of the transformer, in tests/families.
    parts: Makes the other components."""

    script: str
    pipeline: str
    family: str
    parts: Callable[[], dict[str, Any]]


TRAINERS = {
    "flux": Trainer(
        "train_dreambooth_lora_flux.py",
        "FluxPipeline",
        "flux",
        lambda: {**clip(), **t5(), "vae": image_vae(2)()},
    ),
    "qwen_image": Trainer(
        "train_dreambooth_lora_qwen_image.py", "QwenImagePipeline", "qwenimage", lambda: {**qwen(), "vae": qwen_vae()}
    ),
}


@pytest.fixture(scope="module")
def scripts() -> Path:
    source = os.environ.get("DIFFUSERS")
    if not source:
        pytest.skip("NOT RUN: DIFFUSERS names no folder with diffusers' source")
    pytest.importorskip("torchvision", reason="NOT RUN: the scripts need torchvision (pip install torchvision)")
    folder = Path(source) / "examples" / "dreambooth"
    if not folder.is_dir():
        pytest.skip(f"NOT RUN: {source} has no examples/dreambooth")
    return folder


@pytest.fixture
def stays_inside(offline: None) -> Iterator[None]:
    """What a script sets for all of its process ends with the test, and it asks no server."""
    levels = [(module.utils.logging, module.utils.logging.get_verbosity()) for module in (diffusers, transformers)]
    yield
    for logging, level in levels:
        logging.set_verbosity(level)
    forget_accelerator()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Trainer], Path]:
    """A tiny pipeline as it is stored, and images beside it."""
    made: dict[str, Path] = {}

    def folder(trainer: Trainer) -> Path:
        if trainer.pipeline not in made:
            path = made[trainer.pipeline] = tmp_path_factory.mktemp(trainer.pipeline)
            torch.manual_seed(0)
            transformer = random_(KNOWN[trainer.family].make())
            scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
            parts = {**trainer.parts(), "transformer": transformer, "scheduler": scheduler}
            getattr(diffusers, trainer.pipeline)(**parts).save_pretrained(path / "model")
            (path / "images").mkdir()
            for number, colour in enumerate(("red", "blue")):
                Image.new("RGB", (80, 64), colour).save(path / "images" / f"{number}.png")
        return made[trainer.pipeline]

    return folder


@dataclass
class Run:
    losses: list[float]
    adapters: dict[str, torch.Tensor]
    report: Any


def run(
    script: Path, folder: Path, output: Path, options: list[str], optimize: Callable[[Any], Any] | None, device: str
) -> Run:
    """One run of a script, as it would be called from a shell. `optimize` gets what adapters were added to."""
    forget_accelerator()
    losses: list[float] = []
    reports: list[Any] = []
    add_adapter, log = PeftAdapterMixin.add_adapter, Accelerator.log

    def added(model: Any, *args: Any, **kwargs: Any) -> None:
        add_adapter(model, *args, **kwargs)
        if optimize is not None:
            reports.append(optimize(model))

    def logged(accelerator: Accelerator, values: dict[str, float], *args: Any, **kwargs: Any) -> None:
        losses.append(values["loss"])
        log(accelerator, values, *args, **kwargs)

    arguments = {
        "pretrained_model_name_or_path": folder / "model",
        "instance_data_dir": folder / "images",
        "instance_prompt": "a photo",
        "output_dir": output,
        "resolution": 64,
        "max_train_steps": STEPS,
        "max_sequence_length": 16,
        "train_batch_size": 1,
        "learning_rate": 1e-3,
        "rank": 4,
        "seed": 0,
        "report_to": "all",  # those that are installed
        "lr_warmup_steps": 0,
        "checkpointing_steps": 1,
    }
    command = [
        script.name,
        *(text for name, value in arguments.items() for text in (f"--{name}", str(value))),
        *options,
    ]
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setattr(PeftAdapterMixin, "add_adapter", added)
        patch.setattr(Accelerator, "log", logged)
        patch.setattr(sys, "argv", command)
        runpy.run_path(str(script), run_name="__main__")
    (report,) = reports or [None]
    return Run(losses, load_file(output / "pytorch_lora_weights.safetensors"), report)


@pytest.mark.extended
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("name", TRAINERS)
def test_trains_as_stock(
    ltx: ModuleType, device: str, scripts: Path, folders: Any, tmp_path: Path, name: str, precision: str
) -> None:
    trainer = TRAINERS[name]
    script, folder = scripts / trainer.script, folders(trainer)
    options = ["--mixed_precision", precision]
    stock = run(script, folder, tmp_path / "stock", options, None, device)
    for checkpoints in (False, True):
        output = tmp_path / f"optimized-{checkpoints}"
        given = [*options, "--gradient_checkpointing"] if checkpoints else options
        ours = run(script, folder, output, given, ltx.optimize, device)
        blocks = KNOWN[trainer.family].blocks
        sites = {site.name: site for site in ours.report.sites if site.name.endswith(BLOCK_NAMES)}
        assert sites.keys() == {block for block in blocks if block.endswith(BLOCK_NAMES)}
        for block, site in sites.items():
            assert site.fallbacks == {} and site.gradients == site.calls == STEPS * blocks[block]
            assert site.recomputed == (site.calls if checkpoints else 0)
        assert len(ours.losses) == len(stock.losses) == STEPS
        assert ours.losses == pytest.approx(stock.losses, rel=1e-2 if precision == "bf16" else 1e-4)
        assert ours.adapters.keys() == stock.adapters.keys() and ours.adapters
        for key, adapter in stock.adapters.items():
            if "lora_B" in key:  # which were zero
                distance = (ours.adapters[key].float() - adapter.float()).norm() / adapter.float().norm()
                assert distance < (0.4 if precision == "bf16" else 1e-3), key  # Adam's first steps take a sign alone
        assert (output / f"checkpoint-{STEPS}").is_dir()


@pytest.mark.extended
@pytest.mark.parametrize("name", TRAINERS)
def test_resumes(ltx: ModuleType, device: str, scripts: Path, folders: Any, tmp_path: Path, name: str) -> None:
    """A script loads the checkpoint of an optimized model into another optimized model."""
    trainer = TRAINERS[name]
    script, folder = scripts / trainer.script, folders(trainer)
    run(script, folder, tmp_path, ["--mixed_precision", "no"], ltx.optimize, device)
    saved = load_file(tmp_path / f"checkpoint-{STEPS}" / "pytorch_lora_weights.safetensors")
    more = ["--mixed_precision", "no", "--resume_from_checkpoint", "latest", "--max_train_steps", str(STEPS + 1)]
    resumed = run(script, folder, tmp_path, more, ltx.optimize, device)
    assert len(resumed.losses) == 1
    assert all(site.fallbacks == {} for site in resumed.report.sites if site.name.endswith(BLOCK_NAMES))
    assert resumed.adapters.keys() == saved.keys()
    assert all((resumed.adapters[key] - value).abs().max() < 0.01 for key, value in saved.items())
    assert any(not torch.equal(resumed.adapters[key], value) for key, value in saved.items())
