"""Language models by name, configurations to compare, and their calls; inject_llm.py and benchmarks/llm.py share it."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import transformers
from command_line import ROOT, ExampleError  # sets LOCAL_KERNELS to build/, unless it is set
from llm_shapes import SHAPES
from torch import Tensor
from transformers import AutoModelForCausalLM, StaticCache

sys.path.insert(0, str(ROOT / "benchmarks"))
from steps import options_of, view_of


def random_model(name: str, dtype: torch.dtype, device: str, layers: int | None = None, **changes: Any) -> Any:
    """A model of a named shape with random weights, made on the device.

    layers: How many of the first layers it has; 0: as many as have a layer of every type.
    changes: Further changes of the configuration.
    """
    config_class, sizes = SHAPES[name]
    config = getattr(transformers, config_class)(**{**sizes, **changes})
    types = getattr(config, "layer_types", None) or [""]
    if layers == 0:
        layers = 1 + max(map(types.index, set(types)))
    if layers:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for key, parameter in model.named_parameters():
        if parameter.dim() == 1 and "norm" in key:  # as constructed they are all the same
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval().requires_grad_(False)


def load_model(name: str, dtype: torch.dtype, device: str) -> Any:
    """A model of a named shape, or one of the Hub or of a folder."""
    if name in SHAPES:
        return random_model(name, dtype, device)
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ExampleError(f"{name}: {reason} (a Hub name needs the network; tiny needs nothing)") from error
    return model.to(device).eval().requires_grad_(False)


def has_liger() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


@dataclass
class Configured:
    """A model in one configuration, with the weights of the one that it was made from."""

    config: str
    model: Any
    report: Any = None
    ordinary: Callable[..., Any] | None = None  # the forward before it was compiled
    # (module, name, function): what Liger replaces for the whole process. It is in place during our calls alone.
    functions: list[tuple[ModuleType, str, Any]] = field(default_factory=list)

    @property
    def compiled(self) -> bool:
        return self.ordinary is not None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        stock = [(module, name, getattr(module, name)) for module, name, _ in self.functions]
        for entry in self.functions:
            setattr(*entry)
        try:
            yield
        finally:
            for entry in stock:
                setattr(*entry)

    def prefill(self, ids: Tensor, keep: int = 1, mask: Tensor | None = None) -> Tensor:
        """The logits of the last `keep` tokens of a prompt; keys and values are cached, as in `generate`.

        mask: [B, S], 0 where a prompt has padding; None where none has.
        """
        with self.in_place():
            return self.model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=keep).logits

    def decoder(self, ids: Tensor, tokens: int, mask: Tensor | None = None) -> Callable[[], Tensor]:
        """A function that decodes the next of at most `tokens` tokens after a prompt. mask: As in `prefill`."""
        config, forward = self.model.config, self.ordinary or self.model
        cache = StaticCache(config=config, max_cache_len=ids.shape[1] + tokens) if self.compiled else None
        # A compiled model's prompt runs ordinarily here: with this cache it would be compiled once more.
        with self.in_place():
            output = forward(
                input_ids=ids, attention_mask=mask, use_cache=True, past_key_values=cache, logits_to_keep=1
            )
        cache, token = output.past_key_values, ids[:, -1:].clone()

        def step() -> Tensor:
            nonlocal mask
            if mask is not None:
                mask = torch.cat((mask, torch.ones_like(mask[:, :1])), 1)
            with self.in_place():
                return self.model(input_ids=token, attention_mask=mask, use_cache=True, past_key_values=cache).logits

        return step


def configure(config: str, model: Any, ltx: ModuleType, **options: Any) -> Configured:
    """A view of a model in a configuration of `CONFIGS`. `options` go to `optimize`."""
    made = Configured(config, view_of(model))
    if config.startswith("kernels"):
        made.report = ltx.optimize(made.model, **options_of(config), **options)
    elif config == "liger":
        made.functions = apply_liger(made.model)
    if config.endswith("compile"):
        made.ordinary = made.model.forward
        made.model.forward = compiled_forward(made.ordinary)
    return made


def compiled_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled forward: of tokens as `generate` compiles it, with CUDA graphs, and of prompts in the default mode."""
    prompt, token = torch.compile(forward), torch.compile(forward, mode="reduce-overhead")

    @functools.wraps(forward)
    def compiled(*, input_ids: Tensor, **kwargs: Any) -> Any:
        return (token if input_ids.shape[1] == 1 else prompt)(input_ids=input_ids, **kwargs)

    return compiled


def apply_liger(model: Any, layers: bool = True, loss: bool = False) -> list[tuple[ModuleType, str, Any]]:
    """Patches one model, and returns the functions that Liger would patch for all.

    layers: Whether norms, MLP and rotary embedding are replaced.
    loss: Whether the model's forward is replaced by one whose loss needs no logits of all tokens at once.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    left_out = {} if layers else dict.fromkeys(("rope", "rms_norm", "swiglu", "geglu"), False)
    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=loss, **left_out)
    changed = [name for name, value in vars(module).items() if before.get(name) is not value]
    functions = [(module, name, getattr(module, name)) for name in changed if name in before]
    for name in changed:
        if name in before:
            setattr(module, name, before[name])
    return functions
