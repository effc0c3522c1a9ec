"""Loading into fp8 by diffusers' own ``from_pretrained`` and ``from_single_file``.

diffusers calls a quantizer for each tensor that it loads. This one quantises a weight as it arrives on its device, or
keeps the fp8 values and scales of the file, so that no weight of a quantised layer is there in bfloat16 but the one
that is being quantised. When all are loaded, `optimize` takes the weights as they are.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable

import torch
from torch import Tensor, nn

from ...quant import quantize_weight
from ..linear import fp8_weights
from ..linear.checkpoints import Placed, read_fp8, read_multiplied
from ..linear.original_names import StandIn, pieces_of
from ..linear.scaled_weights import FP8, SCALES, ScaledWeights
from ..linear.tensor_files import TensorDict, TensorFiles, safetensors
from .parts import SCALE, check_devices, check_dtype, layers_to_quantise, with_scales


class DiffusersQuantizer:
    """The methods that diffusers calls, in this order; its own base class has the others.

    Attributes:
        report: What `optimize` reports of the loaded model.
    """

    optimize: Callable[..., Any]
    use_keep_in_fp32_modules = True
    is_serializable = True
    is_trainable = False
    is_compileable = True
    supports_parallel_loading = False  # a weight and its scale may be in two shards

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        super().__init__(quantization_config, **options)  # type: ignore[call-arg]
        self.config = quantization_config
        self.report: Any = None
        # from_single_file leaves this at its default. A file that has nothing in fp8 is quantised.
        self.in_fp8_already = options.get("pre_quantized", True)
        self._layers: set[str] = set()  # the names of the layers that can be in fp8
        self._kept: set[str] = set()  # those that are
        self._waiting: dict[str, Tensor] = {}  # weights and scales whose other half comes with a later shard
        self._keep: set[str] = set()  # parts of names that stay in float32
        self._planned = False
        self._multiplied = self._input_scales = 0
        self._model: weakref.ref[nn.Module] | None = None

    def validate_environment(self, *others: Any, **options: Any) -> None:
        safetensors("safetensors")
        self.update_torch_dtype(options.get("torch_dtype"))

    def update_torch_dtype(self, torch_dtype: Any) -> torch.dtype:
        return check_dtype("torch_dtype", torch_dtype)

    def adjust_target_dtype(self, torch_dtype: torch.dtype) -> torch.dtype:
        return torch.uint8  # accelerate counts bytes

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Puts stand-ins in the place of weights in fp8, which keep the scales through diffusers' converters."""
        tensors = {**self._waiting, **state_dict}
        if self._planned and self.in_fp8_already:  # one shard of several
            self._waiting = _without_other_half(tensors)
            tensors = {name: tensor for name, tensor in tensors.items() if name not in self._waiting}
        weights = ScaledWeights(TensorDict(tensors))
        self._input_scales += weights.input_scales
        if not self._planned:  # the whole file
            self.in_fp8_already = bool(weights.weights)
        found: dict[str, Any] = {name: tensors[name] for name in weights.others}
        for name, header in weights.headers.items():
            # Without the prefix, which not every converter of diffusers knows.
            of_fp8, given = name in weights.weights, tensors[weights.prefix + name]
            found[name] = StandIn.of((weights, name), header.shape, torch.float8_e4m3fn) if of_fp8 else given
        return found

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        """Takes out scales, which are no tensors of the model. A missing one is an error before anything is read."""
        scales = {key for key in loaded_keys if key.rpartition(".")[2] in SCALES}
        files = [Path(file) for file in checkpoint_files] if scales or self.in_fp8_already else []
        in_fp8 = {
            name: file
            for file in files
            for name, header in TensorFiles(file).headers.items()
            if name.endswith(".weight") and header.dtype in FP8
        }
        # Of a folder of another program the configuration does not say so.
        self.in_fp8_already = self.in_fp8_already or bool(in_fp8)
        for name, file in in_fp8.items():
            layer = name[: -len(".weight")]
            if not any(f"{layer}.{scale}" in scales for scale in SCALES):
                raise ValueError(f"weights: {name}: expected {layer}.{SCALE} beside it, got nothing in {file}")
        return [key for key in loaded_keys if key not in scales]

    def _process_model_before_weight_loading(
        self,
        model: nn.Module,
        device_map: Mapping[str, Any] | None = None,
        keep_in_fp32_modules: Sequence[str] = (),
        **more: Any,
    ) -> None:
        check_devices(device_map)
        self._planned, self._keep = True, set(filter(None, keep_in_fp32_modules))
        self._layers = layers_to_quantise(model, self.config, self.in_fp8_already, keep_in_fp32_modules)

    def check_if_quantized_param(
        self, model: nn.Module, param_value: Tensor, param_name: str, state_dict: Any, **more: Any
    ) -> bool:
        layer, _, key = param_name.rpartition(".")
        return isinstance(param_value, StandIn) or (
            key == "weight" and layer in self._layers and not self.in_fp8_already
        )

    def create_quantized_param(
        self,
        model: nn.Module,
        param_value: Tensor,
        param_name: str,
        target_device: Any,
        *others: Any,
        **more: Any,
    ) -> None:
        path, _, key = param_name.rpartition(".")
        module, device = model.get_submodule(path), torch.device(target_device)
        if isinstance(param_value, StandIn):
            rows = [(*piece.source, piece.start, piece.stop) for piece in pieces_of(param_value)]
            exact = self.config.skip is None and any(weights.weights[name].exact for weights, name, _, _ in rows)
            if key != "weight" or path not in self._layers or exact:
                in_float32 = bool(self._keep & set(param_name.split(".")))
                dtype = torch.float32 if in_float32 else torch.bfloat16
                made = read_multiplied(rows, torch.empty(param_value.shape, dtype=dtype, device=device))
                module._parameters[key] = nn.Parameter(made, requires_grad=False)
                self._multiplied += 1
                return
            values = torch.empty(param_value.shape, dtype=torch.float8_e4m3fn, device=device)
            scales = torch.empty(len(values), dtype=torch.float32, device=device)
            read_fp8(rows, values, scales)
        else:
            values, scales = quantize_weight(param_value.to(device))
        module._parameters[key] = nn.Parameter(values, requires_grad=False)
        module.register_buffer(fp8_weights.SCALES, scales, persistent=False)
        self._kept.add(path)

    def _process_model_after_weight_loading(self, model: nn.Module, **more: Any) -> nn.Module:
        empty = next((name for name, t in model.named_parameters() if t.device.type == "meta"), None)
        if empty is not None:
            raise ValueError(f"weights: {empty}: expected a tensor, got nothing in the checkpoint")
        counts = (
            (self._multiplied, "fp8 layers multiplied by their scales, because they stay in bf16"),
            (self._input_scales, "static scales of inputs not used: each row gets its own"),
        )
        notes = [f"weights: {count} {text}" for count, text in counts if count]
        placed = Placed(self._kept, notes)
        self.report = type(self).optimize(model, precision="fp8", memory=self.config.memory, weights=placed)
        self._model = weakref.ref(model)
        model.register_to_config(quantization_config=self.config)  # type: ignore[operator]
        return model

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Tensor], safe_serialization: bool = True
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        if self._model is None:
            return dict(state_dict), {}
        model = self._model()
        if model is None:
            raise RuntimeError("save_pretrained: expected the model that was loaded or a copy of it, which is gone")
        return with_scales(model, state_dict), {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The quantizer of a copied model, whose scales it saves."""
        made = copy.copy(self)
        model = None if self._model is None else self._model()
        if id(model) in memo:
            made._model = weakref.ref(memo[id(model)])
        return made


def _without_other_half(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in fp8 of a shard whose scales are in another one, and such scales."""
    found = {}
    for name, tensor in tensors.items():
        layer, _, key = name.rpartition(".")
        in_fp8 = tensor.is_floating_point() and tensor.dtype.itemsize == 1
        if (key == "weight" and in_fp8 and not any(f"{layer}.{scale}" in tensors for scale in SCALES)) or (
            key in SCALES and f"{layer}.weight" not in tensors
        ):
            found[name] = tensor
    return found
