"""Checkpoints for `optimize(..., weights=...)`: this package's own, and those in scaled fp8 of other programs.

The names may be those of the checkpoint's authors or diffusers'. All is compared with the model before data is read.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, Union

import torch
from torch import Tensor, nn

from ..._linear import joined_bits
from ...quant import quantize_weight
from ..engine.guards import class_of
from .fp8_files import (
    FILE,
    File,
    Slot,
    check_buffers,
    check_layers,
    device_of,
    home_of,
    is_on_meta,
    move_buffers,
    put,
    slots_of,
)
from .fp8_weights import LINEAR_CLASS, held_dtypes, put_loaded_weights, quantised_weight
from .original_names import Piece, StandIn, converted, is_of_diffusers, pieces_of
from .scaled_weights import E4M3, FLOATING, FP8, ScaledWeights, refuse
from .tensor_files import DTYPES, INDEX, TensorFiles, open_file

TOKENIZERS = frozenset({"spiece_model"})  # the bytes of a tokenizer, in ComfyUI's files of text encoders
WHAT = f"a folder with {FILE} that save_weights wrote, a safetensors file, or the index of its shards"


def open_weights(models: Mapping[str, nn.Module], weights: Any, skip: Sequence[str] | None) -> dict[str, Weights]:
    """The weights of each model, which are known to fit it.

    models: By the names of components, or one without a name.
    weights: What `optimize` was given: a path, or a path for each component.
    """
    if isinstance(weights, Placed):
        return dict.fromkeys(models, weights)
    if isinstance(weights, Mapping):
        if weights.keys() != models.keys():
            named = f"a path for each of {', '.join(models)}" if "" not in models else "a path, as obj is no pipeline"
            raise ValueError(
                f"weights: expected {named}, got {', '.join(weights) or 'none'}; components=[...] names the components "
                "to optimize"
            )
        paths = {name: Path(weights[name]) for name in models}
    else:
        paths = {name: Path(weights) / name for name in models}
        if Path(weights).is_file() and "" not in models:
            names = ", ".join(f'"{name}": FILE' for name in models)
            raise ValueError(f"weights: expected a folder or {{{names}}} for a pipeline, got the file {weights}")
    return {name: _open(root, paths[name], name, skip) for name, root in models.items()}


def _open(root: nn.Module, path: Path, component: str, skip: Sequence[str] | None) -> Weights:
    if path.is_dir():
        own = path / FILE
        found = [own] if own.is_file() else sorted(path.glob(f"*{INDEX}")) or sorted(path.glob("*.safetensors"))
        if len(found) != 1:
            names = ", ".join(file.name for file in found)
            raise FileNotFoundError(f"weights: expected {WHAT}, got {path}" + (f" with {names}" if names else ""))
        (path,) = found
    if not path.is_file():
        raise FileNotFoundError(f"weights: expected {WHAT}, got {path}, which does not exist")
    if path.name == FILE or (not path.name.endswith(INDEX) and "ltx_kernels" in (open_file(path).metadata() or {})):
        if skip is not None:
            raise ValueError("weights: expected no skip with it: the file says what is in fp8")
        return File(root, path)
    return Checkpoint(root, TensorFiles(path), component, skip)


class Checkpoint:
    """A checkpoint in scaled fp8, which is known to fit a model.

    Attributes:
        linears: The names of linear layers whose weights can stay in fp8. Where a layer has no form in fp8 in its
            model, `read` multiplies its weight by its scales.
    """

    all_or_error = False  # whether each of `linears` has to be in fp8

    def __init__(self, root: nn.Module, files: TensorFiles, component: str, skip: Sequence[str] | None) -> None:
        self.root, self.path = root, files.path
        self._weights = ScaledWeights(files)
        self._slots = slots_of(root)
        self._without_data = any(slot.tensor.device.type == "meta" for slot in self._slots)
        self._pieces = self._named()
        self._check()
        check_buffers(root)
        classes = {name: class_of(module) for name, module in root.named_modules()}
        in_fp8 = [name[: -len(".weight")] for name, pieces in self._pieces.items() if self._in_fp8(name, pieces)]
        if not in_fp8:
            raise ValueError(
                f"weights: expected layers in fp8, got none in {self.path}: load it as its library says, and "
                'call optimize with precision="fp8" alone'
            )
        self._in_fp8_in_file = [name for name in in_fp8 if classes.get(name) == LINEAR_CLASS]
        self._exact: set[str] = set()
        if skip is None:
            self._exact = {name for name in self._in_fp8_in_file if self._is_exact(f"{name}.weight")}
        self.linears = {
            name
            for name in self._in_fp8_in_file
            if name not in self._exact and not any(fnmatch.fnmatchcase(_join(component, name), p) for p in skip or ())
        }

    def _named(self) -> dict[str, tuple[Piece, ...]]:
        """The rows of the file by the model's names, in the naming that fits the model best."""
        given = {
            name: StandIn.of(name, header.shape, DTYPES.get(header.dtype, torch.uint8))
            for name, header in self._weights.headers.items()
            if name not in TOKENIZERS
        }
        result = converted(self.root, given)
        known = [slot.names for slot in self._slots]

        def misfits(found: Mapping[str, Any]) -> int:
            aliases = {name for names in known for name in names}
            return sum(1 for names in known if not found.keys() & names) + len(found.keys() - aliases)

        if isinstance(result, str):
            if not given.keys() & {name for names in known for name in names}:
                raise ValueError(
                    f"weights: expected the tensors of {class_of(self.root)}, got {next(iter(given), 'none')} and "
                    f"others in {self.path}: {result}"
                )
            result = given
        best: Mapping[str, Tensor] = min((given, result), key=misfits)
        self._stand_ins = dict(best)
        used = {piece.source for tensor in best.values() for piece in pieces_of(tensor)}
        tokenizers = self._weights.headers.keys() & TOKENIZERS
        self._left = [*self._weights.others, *tokenizers, *(name for name in given if name not in used)]
        return {name: pieces_of(tensor) for name, tensor in best.items()}

    def _check(self) -> None:
        aliases = {name for slot in self._slots for name in slot.names}
        for name in sorted(self._stand_ins.keys() - aliases):
            header = self._weights.headers[self._pieces[name][0].source]
            raise ValueError(f"weights: {name}: expected nothing, got {header} in {self.path}")
        for slot in self._slots:
            self._check_slot(slot)

    def _check_slot(self, slot: Slot) -> None:
        name = self._name_of(slot)
        wants = f"{list(slot.tensor.shape)}"
        if name is None:
            raise ValueError(f"weights: {slot.name}: expected {wants}, got nothing in {self.path}")
        headers = [self._weights.headers[piece.source] for piece in self._pieces[name]]
        shape = self._stand_ins[name].shape
        dtypes = {header.dtype for header in headers}
        fits = len(dtypes) == 1 or dtypes <= set(FLOATING) - set(FP8)
        if slot.tensor.is_floating_point() and not dtypes <= set(FLOATING):
            raise refuse(slot.name, f"{headers[0]}, where the model has {wants}")
        if shape != slot.tensor.shape or not fits or (not slot.tensor.is_floating_point() and dtypes & set(FLOATING)):
            turned = ", which is the transposed form" if shape == slot.tensor.shape[::-1] else ""
            got = headers[0] if len(headers) == 1 else f"{list(shape)} of {' and '.join(sorted(dtypes))}"
            raise ValueError(f"weights: {slot.name}: expected {wants}, got {got}{turned} in {self.path}")

    def _name_of(self, slot: Slot) -> str | None:
        return next((name for name in slot.names if name in self._pieces), None)

    def _in_fp8(self, name: str, pieces: Sequence[Piece]) -> bool:
        return name.endswith(".weight") and all(piece.source in self._weights.weights for piece in pieces)

    def _is_exact(self, name: str) -> bool:
        return any(self._weights.weights[piece.source].exact for piece in self._pieces[name])

    def notes(self, in_fp8: set[str], left_by_default: int) -> list[str]:
        """What the report says about the file.

        in_fp8: The names of the layers that stay in fp8.
        left_by_default: How many of them would stay in bfloat16 if they were quantised here.
        """
        exact = self._exact - in_fp8
        multiplied = [name for name in self._in_fp8_in_file if name not in in_fp8 | exact]
        again = [name for name in in_fp8 if not self._is_e4m3(f"{name}.weight")]
        found = (
            (len(multiplied), f"fp8 layers multiplied by their scales, because they stay in bf16 ({_few(multiplied)})"),
            (len(exact), "fp8 layers multiplied by their scales, because the file asks for it (skip=[] keeps them)"),
            (left_by_default, "layers in fp8 because the file has them so; quantised here, they would stay in bf16"),
            (len(again), "layers in e5m2 quantised to e4m3, by row"),
            (self._weights.input_scales, "static scales of inputs not used: each row gets its own"),
            (len(self._left), f"tensors of other models left in the file ({_few(self._left)})"),
        )
        return [f"weights: {count} {text}" for count, text in found if count]

    def _is_e4m3(self, name: str) -> bool:
        return all(self._weights.headers[piece.source].dtype == E4M3 for piece in self._pieces[name])

    def read(self, groups: Sequence[Sequence[nn.Linear]]) -> list[Callable[[], None]]:
        """Reads all tensors, each once, as `File.read` does."""
        names = {id(module): name for name, module in self.root.named_modules()}
        check_layers(self.root, groups)
        device, on_meta = device_of(self.root), is_on_meta(self.root)
        puts = move_buffers(self.root)
        in_groups: set[str] = set()
        for linears in groups:
            if id(linears[0]) not in names:
                continue  # of another component
            paths = [f"{names[id(linear)]}.weight" for linear in linears]
            in_groups.update(paths)
            rows = sum(linear.out_features for linear in linears)
            values = torch.empty(rows, linears[0].in_features, dtype=torch.float8_e4m3fn, device=device)
            scales = torch.empty(rows, dtype=torch.float32, device=device)
            start = 0
            for path, linear in zip(paths, linears):
                stop = start + linear.out_features
                read_fp8(self._rows(path), values[start:stop], scales[start:stop])
                start = stop
            puts.append(functools.partial(put_loaded_weights, linears, values, scales))
        held = held_dtypes(self.root)
        for slot in self._slots:
            name = self._name_of(slot)
            if name is not None and name not in in_groups:
                dtype = self._dtype(slot, held.get(slot.name, slot.tensor.dtype))
                to = home_of(slot.tensor, device, on_meta)
                made = torch.empty(slot.tensor.shape, dtype=dtype, device=to)
                puts.append(functools.partial(put, slot, read_multiplied(self._rows(name), made)))
        return puts

    def _rows(self, name: str) -> Rows:
        return [(self._weights, *piece) for piece in self._pieces[name]]

    def _dtype(self, slot: Slot, own: torch.dtype) -> torch.dtype:
        """The dtype that a tensor gets: its own, and of a model without data the one that diffusers loads it in."""
        # A model that is made without data may have made some buffers in the dtype of its code.
        if not own.is_floating_point or (not self._without_data and own.itemsize > 1):
            return own
        keep = getattr(self.root, "_keep_in_fp32_modules", None) if is_of_diffusers(self.root) else None
        return torch.float32 if set(keep or ()) & set(slot.name.split(".")) else torch.bfloat16


class Placed:
    """Weights in fp8 that a model's parameters hold already, each with its scales in a buffer."""

    all_or_error = True

    def __init__(self, linears: set[str], notes: Sequence[str]) -> None:
        self.linears, self._notes = linears, list(notes)

    def notes(self, in_fp8: set[str], left_by_default: int) -> list[str]:
        return self._notes

    def read(self, groups: Sequence[Sequence[nn.Linear]]) -> list[Callable[[], None]]:
        """Puts the weights of each group one after the other."""
        return [functools.partial(_join_weights, linears) for linears in groups]


def _join_weights(linears: Sequence[nn.Linear]) -> None:
    values, scales = map(joined_bits, zip(*map(quantised_weight, linears)))
    put_loaded_weights(linears, values, scales, by_quantizer=True)


# ---- Rows of a file


Rows = Sequence[tuple[ScaledWeights, str, int, int]]  # of tensors by name, from one row to another


def read_fp8(rows: Rows, values: Tensor, scales: Tensor) -> None:
    """Copies rows of weights and their scales. Rows in e5m2 are quantised again."""
    start = 0
    for weights, name, low, high in rows:
        stop = start + high - low
        found, of_rows = weights.values(name, low, high), weights.scales(name, low, high)
        if found.dtype == torch.float8_e4m3fn:
            values[start:stop].copy_(found)
            scales[start:stop].copy_(of_rows)
        else:
            exact = found.to(values.device).float() * of_rows.to(values.device)[:, None]
            for here, tensor in zip((values, scales), quantize_weight(exact)):
                here[start:stop].copy_(tensor)
        start = stop


def read_multiplied(rows: Rows, made: Tensor) -> Tensor:
    """Copies rows of tensors, multiplied by their scales where they are in fp8."""
    start = 0
    for weights, name, low, high in rows:
        stop = start + high - low
        found = weights.values(name, low, high)
        if name in weights.weights:
            scales = weights.scales(name, low, high).to(made.device)
            shaped = scales.view(-1, *[1] * (found.dim() - 1)) if found.dim() else scales[0]
            found = found.to(made.device).float() * shaped
        (made if made.dim() == 0 else made[start:stop]).copy_(found)
        start = stop
    return made


Weights = Union[File, Checkpoint, Placed]


def _join(component: str, name: str) -> str:
    return f"{component}.{name}" if component else name


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
