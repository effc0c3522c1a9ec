"""Models in fp8 on disk: quantised once, and loaded without the stock weights of the quantised layers.

A folder holds ``config.json`` as the model writes it, and one safetensors file with all parameters and buffers of the
model. The weight of a quantised layer is there as its fp8 values, with its scales beside.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..._linear import joined_bits
from ..engine.guards import class_of
from .fp8_weights import SCALES, has_changed, held_dtypes, holds_fp8, put_loaded_weights, quantised_weight
from .offload import is_on_disk
from .tensor_files import open_file, safetensors

FILE = "ltx_kernels_fp8.safetensors"
FORMAT = "ltx-kernels fp8, version 1"


class Slot(NamedTuple):
    """A tensor that a model's state_dict holds, all its names there, and everywhere that the model keeps it."""

    names: list[str]
    tensor: Tensor
    places: list[tuple[dict[str, Any], str]]

    @property
    def name(self) -> str:
        return self.names[0]


def slots_of(root: nn.Module) -> list[Slot]:
    found: dict[int, Slot] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        for held, left_out in ((module._parameters, ()), (module._buffers, module._non_persistent_buffers_set)):
            for key, tensor in held.items():
                if tensor is not None and key not in left_out:
                    slot = found.setdefault(id(tensor), Slot([], tensor, []))
                    slot.names.append(f"{path}.{key}" if path else key)
                    slot.places.append((held, key))
    return list(found.values())


def _linears(root: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in root.named_modules() if type(m) is nn.Linear and holds_fp8(m)}


def _tensors(root: nn.Module) -> dict[str, Tensor]:
    """All that the file of a model holds."""
    linears = _linears(root)
    if not linears:
        raise RuntimeError(f'save_weights: expected a model with precision "fp8", got {class_of(root)} without')
    if is_on_disk(root):
        raise RuntimeError("save_weights: expected weights in memory, got a group offload to disk: save before it")
    tensors = {slot.name: slot.tensor.detach() for slot in slots_of(root)}
    for name, linear in linears.items():
        if has_changed(linear):
            raise RuntimeError(
                f"save_weights: expected weights as they were quantised, got {name}.weight, which has changed since: "
                "call optimize again"
            )
        tensors[f"{name}.weight"], tensors[f"{name}.{SCALES}"] = quantised_weight(linear)
    for name, tensor in tensors.items():
        if ".base_layer." in name:
            raise RuntimeError(f"save_weights: expected a model without adapters, got {name}: unload them first")
        if tensor.device.type == "meta":
            raise RuntimeError(f"save_weights: expected tensors with data, got {name} on meta, where an offload put it")
    return tensors


def save(models: Mapping[str, nn.Module], folder: Path) -> None:
    """Writes models whose linear layers are in fp8, each into a folder of its name, which is made.

    Files that are there already are replaced when all new ones are written.
    """
    tensors = {component: _tensors(root) for component, root in models.items()}
    library = safetensors("safetensors.torch")
    for component in models:
        path = folder / component
        existing = next(path for path in (path, *path.parents) if path.exists())
        if not existing.is_dir():
            raise ValueError(f"folder: expected a folder, got the file {existing}")
    with contextlib.ExitStack() as stack:
        finished: list[tuple[Path, Path]] = []
        for component, root in models.items():
            (folder / component).mkdir(parents=True, exist_ok=True)
            unfinished = tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder / component)
            path = Path(stack.enter_context(unfinished))
            save_config = getattr(root, "save_config", None)  # diffusers'
            if callable(save_config):
                save_config(path)
            elif hasattr(getattr(root, "config", None), "save_pretrained"):  # transformers'
                cast(Any, root).config.save_pretrained(path)
            contents = {name: tensor.contiguous() for name, tensor in tensors[component].items()}
            metadata = {"format": "pt", "ltx_kernels": FORMAT, "class": class_of(root)}
            library.save_file(contents, path / FILE, metadata=metadata)
            finished += [(file, folder / component / file.name) for file in path.iterdir()]
        for file, place in finished:
            os.replace(file, place)


def check_layers(root: nn.Module, groups: Iterable[Iterable[nn.Linear]]) -> None:
    """ValueError where layers cannot have weights in fp8 alone, without stock weights to go back to."""
    in_fp8 = {id(linear._parameters) for linears in groups for linear in linears}
    for slot in slots_of(root):
        inside = [name for name, (held, _) in zip(slot.names, slot.places) if id(held) in in_fp8]
        if not inside or not inside[0].endswith(".weight"):
            continue
        outside = [name for name in slot.names if name not in inside]
        if outside:
            raise ValueError(
                f"weights: {inside[0]}: expected a weight of layers in fp8 alone, but {outside[0]} is it, too"
            )
        if slot.tensor.dtype == torch.float32 and slot.tensor.device.type != "meta":
            raise ValueError(f"weights: {inside[0]}: expected a model in bfloat16, got float32: call model.bfloat16()")


def check_buffers(root: nn.Module) -> None:
    """ValueError where a buffer that no file holds has no data."""
    saved = {id(slot.tensor) for slot in slots_of(root)}
    for name, buffer in root.named_buffers():
        if buffer.device.type == "meta" and id(buffer) not in saved:
            raise ValueError(
                f"weights: expected buffers that no file holds to have data, got {name} on meta: make the model "
                "under accelerate.init_empty_weights()"
            )


def is_on_meta(root: nn.Module) -> bool:
    """Whether no parameter of a model has data. Its buffers may have some: accelerate.init_empty_weights makes them."""
    return all(parameter.device.type == "meta" for parameter in root.parameters())


def device_of(root: nn.Module) -> torch.device:
    """Where the parameters of a model are; of one on "meta", torch's default device."""
    devices = (parameter.device for parameter in root.parameters() if parameter.device.type != "meta")
    return next(devices, torch.get_default_device())


def home_of(tensor: Tensor, device: torch.device, on_meta: bool) -> torch.device:
    """Where a tensor of a model is to be once it is loaded; device and on_meta are `device_of` and `is_on_meta`."""
    return device if on_meta or tensor.device.type == "meta" else tensor.device


def move_buffers(root: nn.Module) -> list[Callable[[], None]]:
    """Of a model on "meta": brings the buffers that no file holds, such as rotary tables, to `device_of`.

    Returns what puts them there, as `File.read` does.
    """
    if not is_on_meta(root):
        return []
    device = device_of(root)
    return [
        functools.partial(module._buffers.__setitem__, key, buffer.to(device))
        for module in root.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and key in module._non_persistent_buffers_set
    ]


class Expected(NamedTuple):
    """What a file has to hold for one name."""

    shape: list[int]
    dtypes: tuple[torch.dtype, ...]


def _text(shape: Sequence[int], dtypes: Sequence[torch.dtype]) -> str:
    return f"{list(shape)} of {' or '.join(str(dtype).replace('torch.', '') for dtype in dtypes)}"


class File:
    """The file of a model in fp8 that `save` wrote, which is known to fit the model.

    Attributes:
        linears: The names of the layers in fp8.
    """

    all_or_error = True  # each of `linears` has to be in fp8

    def __init__(self, root: nn.Module, path: Path) -> None:
        self.root, self.path = root, path
        with open_file(self.path) as file:
            metadata = file.metadata() or {}
            written = metadata.get("ltx_kernels")
            if written != FORMAT:
                raise ValueError(f"weights: expected a file of {FORMAT}, got {written} in {self.path}")
            if metadata.get("class") != class_of(root):
                raise ValueError(f"weights: expected those of {class_of(root)}, got {metadata.get('class')}")
            # safetensors gives views of the file, so that no data is read here.
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self.linears = {name[: -len(SCALES) - 1] for name in found if name.endswith(f".{SCALES}")}
            self._check(found)

    def _expected(self, found: dict[str, Tensor]) -> dict[str, Expected]:
        """What the model needs, by name. Scales or a weight in e4m3fn say that the file has a layer in fp8."""
        expected: dict[str, Expected] = {}
        held, on_meta = held_dtypes(self.root), is_on_meta(self.root)
        for slot in slots_of(self.root):
            shape, own = list(slot.tensor.shape), held.get(slot.name, slot.tensor.dtype)
            layers = {name[: -len(".weight")] for name in slot.names if name.endswith(".weight")}
            in_file = found.get(slot.name)
            is_e4m3 = in_file is not None and in_file.dtype == torch.float8_e4m3fn and own != torch.float8_e4m3fn
            if layers & self.linears or (layers and is_e4m3):
                for layer in layers & self.linears or layers:  # several may share a weight
                    expected[f"{layer}.weight"] = Expected(shape, (torch.float8_e4m3fn,))
                    expected[f"{layer}.{SCALES}"] = Expected(shape[:1], (torch.float32,))
            elif (on_meta or slot.tensor.device.type == "meta") and own.is_floating_point:
                # A model that is made without data has the default dtype, whatever it will run in. Its buffers, too.
                expected[slot.name] = Expected(shape, tuple(dict.fromkeys((own, torch.bfloat16, torch.float32))))
            else:
                expected[slot.name] = Expected(shape, (own,))
        return expected

    def _check(self, found: dict[str, Tensor]) -> None:
        expected = self._expected(found)
        for name in sorted(expected.keys() | found.keys()):
            want, got = expected.get(name), found.get(name)
            if want is None or got is None or list(got.shape) != want.shape or got.dtype not in want.dtypes:
                needs = "nothing" if want is None else _text(*want)
                has = "nothing" if got is None else _text(got.shape, (got.dtype,))
                raise ValueError(f"weights: {name}: expected {needs}, got {has} in {self.path}")
        check_buffers(self.root)

    def notes(self, in_fp8: set[str], left_by_default: int) -> list[str]:
        return []

    def read(self, groups: Sequence[Sequence[nn.Linear]]) -> list[Callable[[], None]]:
        """Reads all tensors, each once. The tensors of layers that share an input are put one after another.

        The model stays as it is until the functions that this returns are called. These do not fail: they make no
        tensors.
        """
        names = {id(module): name for name, module in self.root.named_modules()}
        check_layers(self.root, groups)
        device, on_meta = device_of(self.root), is_on_meta(self.root)
        puts = move_buffers(self.root)
        with open_file(self.path, str(device)) as file:
            in_groups: set[str] = set()
            for linears in groups:
                if id(linears[0]) not in names:
                    continue  # of another component
                paths = [names[id(linear)] for linear in linears]
                in_groups.update(f"{path}.weight" for path in paths)
                values = joined_bits([file.get_tensor(f"{path}.weight") for path in paths])
                scales = joined_bits([file.get_tensor(f"{path}.{SCALES}") for path in paths])
                puts.append(functools.partial(put_loaded_weights, linears, values, scales))
            for slot in slots_of(self.root):
                if slot.name not in in_groups:
                    read = _read(file, slot)
                    puts.append(functools.partial(put, slot, read.to(home_of(slot.tensor, device, on_meta))))
        return puts


def _read(file: Any, slot: Slot) -> Tensor:
    """The file's tensor for a slot, in memory of its own."""
    read: Tensor = file.get_tensor(slot.name)
    return read.clone() if read.device.type == "cpu" else read  # on the CPU it is a view of the file


def put(slot: Slot, new: Tensor) -> None:
    """Gives a parameter or buffer new data: it stays the one that it is, unless it is on another device, as on meta."""
    if slot.tensor.device == new.device:
        slot.tensor.data = new
        return
    made = nn.Parameter(new, slot.tensor.requires_grad) if isinstance(slot.tensor, nn.Parameter) else new
    for held, key in slot.places:
        held[key] = made
