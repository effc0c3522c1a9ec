"""What the quantizers of diffusers and of transformers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..linear import fp8_weights
from ..selection import check_device, layers_for_fp8

METHOD = "ltx_kernels_fp8"  # in a model's config.json
# Values of device_map that name no device.
NO_DEVICE = {"cpu", "disk", "None", "auto", "balanced", "balanced_low_0", "sequential"}
SCALE = "weight_scale"  # beside a weight in a saved file, [out] in float32


def check_dtype(argument: str, dtype: Any) -> torch.dtype:
    if dtype not in (None, torch.bfloat16):
        raise ValueError(f"{argument}: expected torch.bfloat16 with LTXKernelsFp8Config, got {dtype}")
    return torch.bfloat16


def check_devices(device_map: Any) -> None:
    """RuntimeError where a device of a device_map has no products in fp8."""
    devices = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    for device in {str(device) for device in devices} - NO_DEVICE:
        check_device(torch.device("cuda", int(device)) if device.isdigit() else torch.device(device))


def layers_to_quantise(
    model: nn.Module, config: Any, in_fp8_already: bool, in_float32: Sequence[str] | None
) -> set[str]:
    """The names of the layers that can be in fp8; of a checkpoint that is in fp8 already, all that have a form in it.

    in_float32: Parts of names that the model's class keeps in float32.
    """
    skip = [] if in_fp8_already and config.skip is None else config.skip
    keep = set(filter(None, in_float32 or ()))
    return {name for name in layers_for_fp8(model, skip, config.memory == "low") if not keep & set(name.split("."))}


def with_scales(model: nn.Module, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For ``save_pretrained``: each scale after its weight."""
    linears = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear and fp8_weights.holds_fp8(m)]
    scales = {f"{name}.weight": fp8_weights.quantised_weight(linear)[1] for name, linear in linears}
    found: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        found[name] = tensor
        if name in scales:
            found[f"{name[: -len('.weight')]}.{SCALE}"] = scales[name]
    return found
