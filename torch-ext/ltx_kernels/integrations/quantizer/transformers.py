"""Loading into fp8 by transformers' own ``from_pretrained``.

transformers reads a tensor, moves it to its device, and hands it to the quantizer's operation, one after the other. A
folder that ``save_pretrained`` wrote holds the values and, beside each, its scales, which are buffers of the layers for
as long as the folder is read.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from typing import Any, Callable, cast

import torch
from torch import Tensor, nn

from ...quant import quantize_weight
from ..linear import fp8_weights
from ..linear.checkpoints import Placed
from ..linear.scaled_weights import FP8
from ..linear.tensor_files import safetensors
from ..selection import why_in_bf16
from .parts import SCALE, check_devices, check_dtype, layers_to_quantise, with_scales


class TransformersQuantizer:
    """The methods that transformers calls, in this order; its own base class has the others.

    Attributes:
        report: What `optimize` reports of the loaded model.
    """

    optimize: Callable[..., Any]
    pre_quantized: bool  # whether the folder is one that save_pretrained wrote
    quantized_element_size = 1
    is_trainable = False
    is_compileable = True

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        super().__init__(quantization_config, **options)  # type: ignore[call-arg]
        self.config = quantization_config
        self.report: Any = None
        self._layers: set[str] = set()  # the names of the layers that can be in fp8
        self._read: set[str] = set()  # the names of the tensors that a folder in fp8 has
        self._model: weakref.ref[nn.Module] | None = None

    def validate_environment(self, *others: Any, device_map: Any = None, **options: Any) -> None:
        safetensors("safetensors")
        if isinstance(device_map, Mapping) and "disk" in device_map.values():
            raise ValueError("device_map: expected devices that hold the model, got disk")
        if self.pre_quantized and not hasattr(super(), "get_new_dtype"):
            raise ImportError(
                "this release of transformers cannot read a folder that holds fp8 weights with their scales: install "
                "transformers 5.22 or newer, or load the checkpoint in bfloat16 with LTXKernelsFp8Config"
            )

    def update_dtype(self, dtype: Any) -> torch.dtype:
        return check_dtype("dtype", dtype)

    def _process_model_before_weight_loading(self, model: nn.Module, device_map: Any = None, **more: Any) -> None:
        check_devices(None if isinstance(device_map, str) else device_map)
        keep = getattr(model, "_keep_in_fp32_modules_strict", None)
        self._layers = layers_to_quantise(model, self.config, self.pre_quantized, keep)
        if not self._layers:
            raise ValueError(
                f"quantization_config: expected a model with linear layers for fp8, got {type(model).__name__}: its "
                "blocks are not known, or skip leaves all of them"
            )
        for name in self._layers:
            linear = cast(nn.Linear, model.get_submodule(name))
            linear.register_buffer(SCALE, torch.empty(linear.out_features, dtype=torch.float32, device="meta"))
        if self.pre_quantized:  # the file says which layers have a scale
            ignored = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
            model._keys_to_ignore_on_load_missing = {*ignored, rf"\.{re.escape(SCALE)}$"}  # type: ignore[assignment]

    def param_needs_quantization(self, model: nn.Module, param_name: str, **more: Any) -> bool:
        layer, _, key = param_name.rpartition(".")
        return key == "weight" and layer in self._layers

    def get_quantize_ops(self) -> Any:
        return _Quantise()

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """The dtype that a tensor of a folder in fp8 is read in."""
        self._read.update(converter.target_patterns)
        in_file = param.get_dtype() if hasattr(param, "get_dtype") else str(param.dtype)
        return None if in_file in FP8 or "float8" in in_file else super().get_new_dtype(converter, param, dtype)  # type: ignore[misc]

    def _process_model_after_weight_loading(self, model: nn.Module, **more: Any) -> nn.Module:
        for name, parameter in model.named_parameters():
            layer, _, key = name.rpartition(".")
            of_fp8 = parameter.dtype.itemsize == 1 and parameter.is_floating_point()
            if of_fp8 and (key != "weight" or layer not in self._layers):
                raise ValueError(f"weights: {name}: expected a layer that can be in fp8, got {parameter.dtype}")
        for name in sorted(self._layers):
            self._take_scales(name, model.get_submodule(name))
        kept = {name for name in self._layers if fp8_weights.SCALES in model.get_submodule(name)._buffers}
        skip, low = self.config.skip, self.config.memory == "low"
        notes = why_in_bf16(model, kept, skip, low, loaded=self.pre_quantized)
        self.report = type(self).optimize(
            model, precision="fp8", memory=self.config.memory, weights=Placed(kept, notes)
        )
        self._model = weakref.ref(model)
        return model

    def _take_scales(self, name: str, linear: nn.Module) -> None:
        """Puts a layer's scales where `optimize` looks for them; a layer that is not in fp8 has none."""
        scales, weight = linear._buffers.pop(SCALE), linear._parameters["weight"]
        assert scales is not None and weight is not None
        in_fp8 = weight.dtype == torch.float8_e4m3fn
        if self.pre_quantized and in_fp8 != (f"{name}.{SCALE}" in self._read):
            found = "nothing" if in_fp8 else f"a weight in {weight.dtype}"
            raise ValueError(f"weights: {name}: expected a weight in e4m3 and {SCALE} beside it, got {found}")
        if not in_fp8:
            return
        if scales.shape != weight.shape[:1] or not bool(((scales > 0) & scales.isfinite()).all()):
            raise ValueError(f"weights: {name}.{SCALE}: expected {len(weight)} finite numbers above 0")
        linear._parameters["weight"] = nn.Parameter(weight.data, requires_grad=False)
        linear.register_buffer(fp8_weights.SCALES, scales, persistent=False)

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        return with_scales(model, model.state_dict()), {}

    def is_serializable(self) -> bool:
        return True


class _Quantise:
    """transformers' operation for one weight."""

    def convert(self, input_dict: Mapping[str, Any], **more: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, given in input_dict.items():
            values, scales = quantize_weight(given[0] if isinstance(given, list) else given)
            found[name], found[f"{name[: -len('weight')]}{SCALE}"] = values, scales
        return found
