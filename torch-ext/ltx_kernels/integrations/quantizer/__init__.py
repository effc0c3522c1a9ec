"""`LTXKernelsFp8Config`: loading into fp8 by the own ``from_pretrained`` of diffusers and of transformers."""

from __future__ import annotations

import enum
import functools
import importlib
from collections.abc import Sequence
from typing import Any, Callable

from .diffusers import DiffusersQuantizer
from .parts import METHOD
from .transformers import TransformersQuantizer


class Method(str, enum.Enum):
    """diffusers reads ``quant_method.value``."""

    FP8 = METHOD


def quantization_config(skip: Sequence[str] | None, memory: str | None, optimize: Callable[..., Any]) -> Any:
    """A configuration for both libraries, whose class is made and registered at the first call.

    optimize: The function of this package.
    """
    return _config_class(optimize)(skip=skip, memory=memory)


# By library: the file that its quantizers are registered in, its base classes, and what this package registers. The
# last name is of a module that only those versions have that load by operations.
_LIBRARIES = (
    ("diffusers", "quantizers.quantization_config", "DiffusersQuantizer", DiffusersQuantizer, "quantizers.base"),
    ("transformers", "utils.quantization_config", "HfQuantizer", TransformersQuantizer, "core_model_loading"),
)


@functools.cache
def _config_class(optimize: Callable[..., Any]) -> type:
    """The class of the configuration. No library is imported before it is asked for."""
    mixins, mappings = [], []
    for library, home, base_name, quantizer, needed in _LIBRARIES:
        try:
            importlib.import_module(f"{library}.{needed}")
            auto = importlib.import_module(f"{library}.quantizers.auto")
            base = getattr(importlib.import_module(f"{library}.quantizers.base"), base_name)
            mixins.append(importlib.import_module(f"{library}.{home}").QuantizationConfigMixin)
        except ImportError:
            continue
        made = type("LTXKernelsFp8Quantizer", (quantizer, base), {"optimize": staticmethod(optimize)})
        auto.AUTO_QUANTIZER_MAPPING[METHOD] = made
        mappings.append(auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
    if not mixins:
        raise ImportError(
            "LTXKernelsFp8Config: expected the package diffusers, or transformers 5: pip install diffusers"
        )
    config = type("LTXKernelsFp8Config", (_Config, *mixins), {})
    for mapping in mappings:
        mapping[METHOD] = config
    return config


class _Config:
    """What `LTXKernelsFp8Config` returns."""

    def __init__(
        self, skip: Sequence[str] | None = None, quant_method: str = METHOD, memory: str | None = None
    ) -> None:
        if quant_method != METHOD:
            raise ValueError(f"quant_method: expected {METHOD}, got {quant_method}")
        self.quant_method = Method.FP8
        self.skip, self.memory = None if skip is None else list(skip), memory

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": METHOD, "skip": self.skip, "memory": self.memory}

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()
