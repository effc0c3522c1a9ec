"""Tensors in safetensors files: one file, or the shards that an index names. Data is read where it is used."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

INDEX = ".safetensors.index.json"
# What a file begins with that is of another format, and how its model is loaded.
_OTHERS = (
    (b"GGUF", 'a GGUF file: load it with diffusers\' GGUFQuantizationConfig, and optimize without precision="fp8"'),
    (b"PK\x03\x04", "a pickle, which can run code: write its tensors with safetensors.torch.save_file"),
    (b"\x80", "a pickle, which can run code: write its tensors with safetensors.torch.save_file"),
)
# Of safetensors' dtypes, those that torch computes with or converts from.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def safetensors(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            "weights in fp8 on disk: expected the package safetensors, which is not installed: pip install safetensors"
        ) from error


def open_file(path: Path, device: str = "cpu") -> Any:
    """safetensors' handle of a file. Its header is checked, and its size against the header's."""
    library = safetensors("safetensors")
    try:
        return library.safe_open(path, framework="pt", device=device)
    except library.SafetensorError as error:
        with path.open("rb") as file:
            start = file.read(8)
        what = next((text for magic, text in _OTHERS if start.startswith(magic)), str(error))
        raise ValueError(f"weights: expected a safetensors file, got {path}: {what}") from error


class Header(NamedTuple):
    """What a file says about a tensor. Not every dtype of safetensors is one of torch's, so `dtype` is its name."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        dtype = DTYPES.get(self.dtype)
        return f"{list(self.shape)} of {self.dtype if dtype is None else str(dtype).replace('torch.', '')}"


class TensorFiles:
    """The tensors of one safetensors file, or of the shards that ``NAME.safetensors.index.json`` names.

    Attributes:
        headers: What is known of each tensor by name, without reading its data.
        metadata: The file's metadata; of shards, that of all.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.headers: dict[str, Header] = {}
        self.metadata: dict[str, str] = {}
        self._files: dict[str, Any] = {}  # by the names of the tensors
        shards = _shards(path) if path.name.endswith(INDEX) else {path: []}
        for shard, names in shards.items():
            if not shard.is_file():
                raise FileNotFoundError(f"weights: expected a safetensors file, got {shard}, which does not exist")
            file = open_file(shard)
            self.metadata.update(file.metadata() or {})
            for name in file.keys():  # noqa: SIM118
                if name in self.headers:
                    raise ValueError(f"weights: {name}: expected it in one shard, got it in two in {path}")
                slice_ = file.get_slice(name)
                self.headers[name] = Header(slice_.get_dtype(), tuple(slice_.get_shape()))
                self._files[name] = file
            missing = next((name for name in names if self._files.get(name) is not file), None)
            if missing is not None:
                raise ValueError(f"weights: {missing}: expected it in {shard.name}, as {path.name} says, got nothing")

    def tensor(self, name: str) -> Tensor:
        """A tensor on the CPU, which may be a view of the mapped file: copy what is kept."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


class TensorDict:
    """Tensors that are loaded already, as `TensorFiles`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.headers = {
            name: Header(_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
            for name, tensor in tensors.items()
        }
        self.metadata: dict[str, str] = {}

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]


def _shards(index: Path) -> dict[Path, list[str]]:
    """The files of an index, each with the names of its tensors."""
    try:
        found = json.loads(index.read_text())["weight_map"]
        pairs = [(str(name), str(file)) for name, file in found.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"weights: expected an index with a weight_map, got {index}: {error!r}") from error
    shards: dict[Path, list[str]] = {}
    for name, file in pairs:
        if Path(file).name != file:
            raise ValueError(f"weights: {name}: expected a file beside {index.name}, got {file}")
        shards.setdefault(index.parent / file, []).append(name)
    return shards
