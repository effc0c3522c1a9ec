"""Weights in fp8 with scales beside them, in the spellings of the programs that write such checkpoints.

========================================  ==========================================================================
written by                                tensors of a layer X beside ``X.weight`` in e4m3 or e5m2, and ``X.bias``
========================================  ==========================================================================
ComfyUI, older; Kijai's files; Wan2GP     ``X.scale_weight``, ``X.scale_input``; once for the file, ``scaled_fp8``
ComfyUI                                   ``X.weight_scale``, ``X.input_scale``, ``X.comfy_quant`` (JSON in uint8), or
                                          the metadata ``_quantization_metadata``
Lightricks (LTX-2)                        ``X.weight_scale``, ``X.input_scale``
Black Forest Labs (fp8r), diffusers       ``X.weight_scale``, one for each row
this package, version 1                   ``X.ltx_fp8_scales``, one for each row
casts                                     none: every scale is one
========================================  ==========================================================================

A scale is one number for the tensor, or one for each row. Other formats are refused: 4 bits, int8, scales of blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._checks import E4M3_MAX
from ..engine.guards import is_ordinary
from .fp8_weights import is_replaced
from .tensor_files import Header, TensorDict, TensorFiles

E4M3, E5M2 = "F8_E4M3", "F8_E5M2"
FP8 = (E4M3, E5M2)
FLOATING = ("F64", "F32", "F16", "BF16", *FP8)
PREFIXES = ("model.diffusion_model.", "diffusion_model.")  # of a model among other parts of one file
SCALES = ("scale_weight", "weight_scale", "ltx_fp8_scales")
_OF_INPUTS = ("scale_input", "input_scale")
_FORMATS = ("float8_e4m3fn", "float8_e5m2")  # in ComfyUI's description of a layer
_FOR_THE_FILE = "scaled_fp8"  # ComfyUI's older mark of a whole file; two elements ask for products in full precision
_OF_A_LAYER = "comfy_quant"
_LONGEST = 1 << 16  # bytes of a layer's description
# Parts of names that only other formats have.
_OTHER_FORMATS = {
    "weight_scale_2": "NVFP4",
    "pre_quant_scale": "NVFP4 or int4 with scales of inputs",
    "output_scale": "a scale of outputs",
    "scale_output": "a scale of outputs",
    "weight_scale_inv": "scales of blocks",
    "weight_zero_point": "integers with a zero point",
    "_weight_qdata": "a tensor of torchao",
    "SCB": "int8 of bitsandbytes",
}
_IN_NAMES = {".weight.absmax": "4 bits of bitsandbytes", ".weight._data": "a tensor of quanto"}
_WAY_ON = 'load it with diffusers\' quantization_config, without precision="fp8"'


class Weight(NamedTuple):
    """What belongs to a weight in fp8."""

    scale: str | None  # the name of its scale, None where it is one
    exact: bool  # the file asks for products in full precision


def refuse(layer: str, found: object) -> ValueError:
    return ValueError(
        f"weights: {layer}: expected e4m3 values with one scale a tensor or a row, got {found}: {_WAY_ON}"
    )


class ScaledWeights:
    """The tensors of a model in a file, with the scales beside their weights.

    Attributes:
        prefix: What the model's names begin with in the file.
        headers: All tensors of the model but scales and marks, by the file's names without a prefix.
        weights: Those in fp8.
        input_scales: The number of scales of inputs. Nothing reads them: each row of activations gets its own.
        others: Names of tensors of other parts of the file, such as an autoencoder.
    """

    def __init__(self, files: TensorFiles | TensorDict) -> None:
        self._files = files
        names = list(files.headers)
        self.prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in names)), "")
        of_model = {n[len(self.prefix) :]: files.headers[n] for n in names if n.startswith(self.prefix)}
        self.others = [name for name in names if not name.startswith(self.prefix)]
        self.headers: dict[str, Header] = {}
        self.weights: dict[str, Weight] = {}
        self.input_scales = 0
        scales: dict[str, str] = {}
        told = self._of_metadata()
        exact = False
        for name, header in of_model.items():
            layer, _, key = name.rpartition(".")
            other = next((text for part, text in _IN_NAMES.items() if part in name), _OTHER_FORMATS.get(key))
            if other is not None:
                raise refuse(
                    name.partition(".weight.")[0] if ".weight." in name else layer, f"{other} ({name}: {header})"
                )
            if name == _FOR_THE_FILE:
                exact = header.shape == (2,)
            elif key == _OF_A_LAYER:
                told[layer] = self._description(layer, name, header)
            elif key in _OF_INPUTS:
                self.input_scales += 1
            elif key in SCALES:
                if layer in scales:
                    raise refuse(layer, f"two scales ({scales[layer]}, {name})")
                scales[layer] = name
            else:
                self.headers[name] = header
        for layer, description in told.items():
            self._check_description(layer, description)
        for layer in [*scales, *(layer for layer in told if layer not in scales)]:
            self._check_scale(layer, scales.get(layer), of_model)
        for name, header in self.headers.items():
            if header.dtype not in FP8:
                continue
            layer = name[: -len(".weight")] if name.endswith(".weight") else ""
            scale = scales.get(layer)
            if scale is None and scales and layer and len(header.shape) == 2:
                raise ValueError(
                    f"weights: {name}: expected a scale beside it, as other layers of the file have one, got nothing"
                )
            self.weights[name] = Weight(
                scale, exact or bool(told.get(layer, {}).get("full_precision_matrix_mult", False))
            )

    def _tensor(self, name: str) -> Tensor:
        return self._files.tensor(self.prefix + name)

    def _of_metadata(self) -> dict[str, Mapping[str, Any]]:
        """ComfyUI's descriptions of layers in the file's metadata."""
        text = self._files.metadata.get("_quantization_metadata")
        if text is None:
            return {}
        try:
            layers = dict(json.loads(text)["layers"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"weights: _quantization_metadata: expected JSON with layers, got {error!r}") from error
        start = len(self.prefix)
        return {
            (name[start:] if name.startswith(self.prefix) else name): found
            for name, found in layers.items()
            if name.startswith(self.prefix) or f"{self.prefix}{name}.weight" in self._files.headers
        }

    def _description(self, layer: str, name: str, header: Header) -> Mapping[str, Any]:
        try:
            if header.dtype != "U8" or len(header.shape) != 1 or header.shape[0] > _LONGEST:
                raise ValueError(str(header))
            found = json.loads(bytes(self._tensor(name).tolist()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"weights: {layer}.{_OF_A_LAYER}: expected JSON, got {error!r}") from error
        return found if isinstance(found, dict) else {}

    def _check_description(self, layer: str, description: Mapping[str, Any]) -> None:
        found = description.get("format") if isinstance(description, Mapping) else description
        if found not in _FORMATS:
            weight = self.headers.get(f"{layer}.weight")
            raise refuse(layer, f"the format {found!r}" + (f" ({weight})" if weight else ""))

    def _check_scale(self, layer: str, scale: str | None, of_model: Mapping[str, Header]) -> None:
        """A layer that has a scale, or is said to be in fp8."""
        weight = self.headers.get(f"{layer}.weight")
        if weight is None:
            raise ValueError(f"weights: {layer}.weight: expected it beside {scale or _OF_A_LAYER}, got nothing")
        if scale is None:
            raise ValueError(f"weights: {layer}.weight: expected a scale beside it, got nothing")
        header, rows = of_model[scale], weight.shape[0] if weight.shape else 1
        if weight.dtype not in FP8:
            what = {"U8": "4-bit values, packed", "I8": "int8"}.get(weight.dtype, "no fp8")
            raise refuse(layer, f"{what} ({weight}, scales {header})")
        if header.dtype in ("U8", "F8_E8M0", "torch.float8_e8m0fnu"):
            raise refuse(layer, f"MXFP8 ({weight}, scales of blocks {header})")
        if header.dtype not in ("F32", "BF16", "F16"):
            raise refuse(layer, f"{weight}, scales {header}")
        if header.shape not in ((), (1,), (1, 1), (rows,), (rows, 1)):
            raise refuse(layer, f"{weight} with scales of blocks {header}")
        values = self._tensor(scale).float()
        if not bool(((values > 0) & values.isfinite()).all()):
            bad = values[~((values > 0) & values.isfinite())].flatten()[0].item()
            raise ValueError(f"weights: {layer}: expected scales above 0 and finite, got {bad} in {scale}")

    def values(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a tensor as the file has them, which may be a view of the mapped file."""
        tensor = self._tensor(name)
        return tensor if tensor.dim() == 0 or (start, stop) == (0, len(tensor)) else tensor[start:stop]

    def scales(self, name: str, start: int, stop: int) -> Tensor:
        """The scales of rows of a weight in fp8: [rows], float32."""
        scale = self.weights[name].scale
        if scale is None:
            return torch.ones(stop - start)
        found = self._tensor(scale).float().flatten()
        return found.expand(stop - start) if len(found) == 1 else found[start:stop]


def holds_codes(linear: nn.Module) -> bool:
    """Whether a weight looks like the values of a scaled fp8 checkpoint, which were loaded without their scales.

    Then every element is a number of e4m3, and the largest is near the end of its range: at 448, or above half of it
    where scales are powers of two. No weight that was trained or made at random is so.
    """
    weight = linear._parameters.get("weight")
    if weight is None or not is_ordinary(weight) or not weight.is_floating_point() or not weight.numel():
        return False
    if weight.device.type == "meta" or is_replaced(linear):
        return False
    with torch.no_grad():
        floats = weight if weight.dtype.itemsize > 1 else weight.bfloat16()
        largest = max(map(abs, map(float, torch.aminmax(floats))))
        return E4M3_MAX / 2 <= largest <= E4M3_MAX and bool((floats.to(torch.float8_e4m3fn).to(floats) == floats).all())
