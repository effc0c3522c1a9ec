"""Models in fp8 on disk: quantised once, and loaded without the stock weights of the quantised layers.

A folder holds ``config.json`` as the model writes it, and one safetensors file with all parameters and buffers of the
model. The weight of a quantised layer is there as its fp8 values, with its scales beside.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._fp8 import SCALES, in_fp8, put_loaded_weights, quantised_weight
from ._guards import class_of

FILE = "ltx_kernels_fp8.safetensors"
FORMAT = "ltx-kernels fp8, version 1"


def _safetensors(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            "weights in fp8 on disk: expected the package safetensors, which is not installed: pip install safetensors"
        ) from error


class Slot(NamedTuple):
    """A tensor that a model's state_dict holds, and everywhere that the model keeps it."""

    name: str
    tensor: Tensor
    places: list[tuple[dict[str, Any], str]]


def _slots(root: nn.Module) -> list[Slot]:
    found: dict[int, Slot] = {}
    for path, module in root.named_modules():
        for held, left_out in ((module._parameters, ()), (module._buffers, module._non_persistent_buffers_set)):
            for key, tensor in held.items():
                if tensor is not None and key not in left_out:
                    slot = Slot(f"{path}.{key}" if path else key, tensor, [])
                    found.setdefault(id(tensor), slot).places.append((held, key))
    return list(found.values())


def _linears(root: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in root.named_modules() if type(m) is nn.Linear and in_fp8(m)}


def save(root: nn.Module, folder: Path) -> None:
    """Writes a model whose linear layers are in fp8 into a folder, which is made."""
    linears = _linears(root)
    if not linears:
        raise RuntimeError(f'save_weights: expected a model with precision "fp8", got {class_of(root)} without')
    tensors = {slot.name: slot.tensor.detach() for slot in _slots(root)}
    for name, linear in linears.items():
        tensors[f"{name}.weight"], tensors[f"{name}.{SCALES}"] = quantised_weight(linear)
    for name, tensor in tensors.items():
        if ".base_layer." in name:
            raise RuntimeError(f"save_weights: expected a model without adapters, got {name}: unload them first")
        if tensor.device.type == "meta":
            raise RuntimeError(f"save_weights: expected tensors with data, got {name} on meta, where an offload put it")
    library = _safetensors("safetensors.torch")
    folder.mkdir(parents=True, exist_ok=True)
    save_config = getattr(root, "save_config", None)  # diffusers'
    if callable(save_config):
        save_config(folder)
    unfinished = folder / f"{FILE}.part"
    metadata = {"format": "pt", "ltx_kernels": FORMAT, "class": class_of(root)}
    library.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished, metadata=metadata)
    os.replace(unfinished, folder / FILE)


class File:
    """The file of a model in fp8, which is known to fit the model."""

    def __init__(self, root: nn.Module, folder: Path) -> None:
        self.root, self.path = root, folder / FILE
        if not self.path.is_file():
            raise FileNotFoundError(f"weights: expected a folder with {FILE} that save_weights wrote, got {folder}")
        with self._open("cpu") as file:
            metadata, names = file.metadata() or {}, set(file.keys())
            written = metadata.get("ltx_kernels")
            if written != FORMAT:
                raise ValueError(f"weights: expected a file of {FORMAT}, got {written} in {self.path}")
            if metadata.get("class") != class_of(root):
                raise ValueError(f"weights: expected those of {class_of(root)}, got {metadata.get('class')}")
            self.linears = {name[: -len(SCALES) - 1] for name in names if name.endswith(f".{SCALES}")}
            expected = {slot.name: tuple(slot.tensor.shape) for slot in _slots(root)}
            self._check(expected, {n: tuple(file.get_slice(n).get_shape()) for n in names if not n.endswith(SCALES)})

    def _open(self, device: str) -> Any:
        library = _safetensors("safetensors")
        try:
            return library.safe_open(self.path, framework="pt", device=device)
        except library.SafetensorError as error:
            raise ValueError(f"weights: expected a safetensors file, got {self.path}: {error}") from error

    def _check(self, expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> None:
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                want, got = (list(shapes[name]) if name in shapes else "nothing" for shapes in (expected, found))
                raise ValueError(f"weights: {name}: expected {want}, got {got} in {self.path}")
        saved = {id(slot.tensor) for slot in _slots(self.root)}
        for name, buffer in self.root.named_buffers():
            if buffer.device.type == "meta" and id(buffer) not in saved:
                raise ValueError(
                    f"weights: expected buffers that no file holds to have data, got {name} on meta: make the model "
                    "under accelerate.init_empty_weights()"
                )

    def load(self, groups: Sequence[Sequence[nn.Linear]]) -> None:
        """Reads all tensors into the model, each once; those of layers that share an input one behind the other."""
        names = {id(module): name for name, module in self.root.named_modules()}
        slots = _slots(self.root)
        devices = [slot.tensor.device for slot in slots if slot.tensor.device.type != "meta"]
        with self._open(str(devices[0] if devices else torch.get_default_device())) as file:
            in_groups: set[str] = set()
            for linears in groups:
                if id(linears[0]) not in names:
                    continue  # of another component
                paths = [names[id(linear)] for linear in linears]
                in_groups.update(f"{path}.weight" for path in paths)
                values = torch.cat([file.get_tensor(f"{path}.weight") for path in paths])
                scales = torch.cat([file.get_tensor(f"{path}.{SCALES}") for path in paths])
                put_loaded_weights(linears, values, scales)
            for slot in slots:
                if slot.name not in in_groups:
                    _put(slot, file.get_tensor(slot.name))


def _put(slot: Slot, new: Tensor) -> None:
    """Gives a parameter or buffer new data: it stays the one that it is, unless it is on meta."""
    if new.untyped_storage().nbytes() > new.nbytes:  # the whole file's
        new = new.clone()
    if slot.tensor.device.type != "meta":
        slot.tensor.data = new.to(slot.tensor.device)
        return
    made = nn.Parameter(new, slot.tensor.requires_grad) if isinstance(slot.tensor, nn.Parameter) else new
    for held, key in slot.places:
        held[key] = made
